"""Where a head's rows begin, in a batch of one length or in packed sequences, and which sequence a tile belongs to."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.heads import WIDEST


@dataclass(frozen=True)
class Sequences:
    """Tensors ``(B, S, H, D)``, or ``packed`` ones ``(TOTAL, H, D)`` with the sequences' ends in ``(B + 1,)``."""

    packed: bool

    @property
    def rows_mode(self) -> int:
        """The mode of rows; that of heads is the next."""
        return 0 if self.packed else 1

    @cute.jit
    def pointer(self, mX: cute.Tensor, batch: Int32, begin: Int32, head: Int32) -> tuple[cute.Pointer, Int32, Int64]:
        """A head's first row, the stride between its rows, and that between heads (elements)."""
        stride = mX.layout.stride
        at = const_expr(self.rows_mode)
        if const_expr(self.packed):
            offset = Int64(begin) * Int64(stride[0])
        else:
            offset = Int64(batch) * Int64(stride[0])
        heads = Int64(stride[at + 1])
        rows = cute.assume(Int32(stride[at]), divby=WIDEST)
        return mX.iterator + (offset + Int64(head) * heads), rows, cute.assume(heads, divby=WIDEST)

    @cute.jit
    def find(self, mCu: cute.Tensor, tile: Int32, rows: int) -> tuple[Int32, Int32]:
        """``(sequence, tile in it)`` of tiles of ``rows``; tiles that no sequence has are put behind the last one's."""
        last = mCu.shape[0] - 2
        sequence = Int32(0)
        tiles = (mCu[1] - mCu[0] + rows - 1) // rows
        while tile >= tiles and sequence < last:
            tile = tile - tiles
            sequence = sequence + 1
            tiles = (mCu[sequence + 1] - mCu[sequence] + rows - 1) // rows
        return sequence, tile
