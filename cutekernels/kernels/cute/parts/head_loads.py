"""TMA loads of heads' rows: tiles of queries, and blocks of keys or values, of one tensor or in pages of a cache."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from cutekernels.kernels.cute.parts.sequences import Sequences


@dataclass(frozen=True)
class HeadLoads:
    """Loads of tiles of ``padded`` columns; blocks of keys have ``tile_kv`` rows, in a whole number of boxes."""

    tile_kv: int
    padded: int
    sequences: Sequences

    @property
    def box(self) -> int:
        """Keys that one TMA load brings: a block, or its part in one page."""
        return min(self.tile_kv, self.sequences.page_size or self.tile_kv)

    def boxed(self, mX: cute.Tensor, layout: cute.ComposedLayout, transposed: bool):
        """The TMA load of rows of heads: tensor ``(S, D, H[, B])``, or ``(D, S, H[, B])`` where ``transposed``.

        Of a cache in pages, S is the rows of a page, and B the pages.
        """
        order = [0, 2, 1] if self.sequences.packed else [1, 3, 2, 0]
        if transposed:
            order[:2] = order[1], order[0]
        one = cute.slice_(layout, (None, None, 0))
        mX = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=order))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, one, cute.product_each(one.shape))

    @cute.jit
    def rows_of(
        self, operand: tuple, rows: cutlass.Constexpr[int], begin: Int32, head: Int32, batch: Int32,
        transposed: cutlass.Constexpr[bool],
    ) -> tuple[cute.Tensor, cute.Tensor]:  # fmt: skip
        """Blocks of ``rows`` of a head from row ``begin`` on, ``(TMA, block)``, and their target ``(TMA, STAGE)``."""
        tma, tX, sX = operand
        tX = tX[None, None, head] if const_expr(self.sequences.packed) else tX[None, None, head, batch]
        if const_expr(transposed):
            gX = cute.local_tile(cute.domain_offset((0, begin), tX), (self.padded, rows), (0, None))
        else:
            gX = cute.local_tile(cute.domain_offset((begin, 0), tX), (rows, self.padded), (None, 0))
        target, source = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        return source, target

    @cute.jit
    def keys_of(
        self, operand: tuple, begin: Int32, head: Int32, batch: Int32, transposed: cutlass.Constexpr[bool]
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """As :meth:`rows_of`; in pages ``(TMA, box of a page, page)`` and ``(TMA, box of a block, STAGE)``."""
        if const_expr(not self.sequences.page_size):
            source, target = self.rows_of(operand, self.tile_kv, begin, head, batch, transposed)
        else:
            tma, tX, sX = operand
            tiler, boxes = (self.box, self.padded), (None, 0, None)
            if const_expr(transposed):
                tiler, boxes = tiler[::-1], (0, None, None)
            target, source = cpasync.tma_partition(
                tma, 0, cute.make_layout(1), cute.group_modes(cute.local_tile(sX, tiler, boxes), 0, 2),
                cute.group_modes(cute.local_tile(tX[None, None, head, None], tiler, boxes), 0, 2),
            )  # fmt: skip
        return source, target

    @cute.jit
    def load(
        self, tma: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, block: Int32, stage: Int32,
        full: cute.Pointer, pages: tuple,
    ):  # fmt: skip
        """Starts the loads of a block of K or V: one, or one of each page. Entries that name none become the last page.

        Keys behind the sequence's last are read from its last page.
        """
        if const_expr(not self.sequences.page_size):
            cute.copy(tma, source[None, block], target[None, stage], tma_bar_ptr=full + stage)
        else:
            gTable, last, count = pages
            size = const_expr(self.sequences.page_size)
            for part in cutlass.range_constexpr(self.tile_kv // self.box):
                token = block * self.tile_kv + part * self.box
                page = gTable[cutlass.min(token, last) // size]
                page = Int32(cutlass.min(Uint32(page), Uint32(count - 1)))
                inside = token % size // self.box
                cute.copy(tma, source[None, inside, page], target[None, part, stage], tma_bar_ptr=full + stage)
