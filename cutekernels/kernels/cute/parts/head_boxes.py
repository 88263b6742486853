"""Rows of attention heads by TMA: the load of a tensor, and a head's blocks of rows with their target."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync


@dataclass(frozen=True)
class HeadBoxes:
    """Boxes of rows of ``padded`` columns, of tensors ``(B, S, H, D)``, or ``packed`` ones ``(TOTAL, H, D)``.

    What lies outside the tensor becomes zeros.
    """

    padded: int
    packed: bool

    def load(self, mX: cute.Tensor, layout: cute.ComposedLayout):
        """The TMA load into a stage of ``layout`` (rows, D, STAGE): its atom and its tensor ``(S, D, H[, B])``."""
        order = [0, 2, 1] if self.packed else [1, 3, 2, 0]
        one = cute.slice_(layout, (None, None, 0))
        mX = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=order))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, one, cute.product_each(one.shape))

    @cute.jit
    def blocks(
        self, operand: tuple, rows: cutlass.Constexpr[int], begin: Int32, head: Int32, batch: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Blocks of ``rows`` of a head from row ``begin`` on, ``(TMA, block)``, and their target ``(TMA, STAGE)``."""
        tma, tX, sX = operand
        tX = tX[None, None, head] if const_expr(self.packed) else tX[None, None, head, batch]
        gX = cute.local_tile(cute.domain_offset((begin, 0), tX), (rows, self.padded), (None, 0))
        target, source = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        return source, target
