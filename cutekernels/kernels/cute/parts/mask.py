"""The mask of keys a query sees: index arithmetic over blocks of keys, and -inf for the scores of hidden ones."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cutekernels.kernels.cute.parts.softmax import by_rows


@dataclass(frozen=True)
class Band:
    """Keys that the rows of one sequence see: row ``r`` sees those of the keys ``r - left .. r + right`` that exist.

    ``left`` and ``right`` are relative to the row's own index, so they contain ``seq_kv - seq_q``: the last query is
    aligned with the last key. In the backward pass rows may be keys and columns queries.
    """

    seq_q: Int32
    seq_kv: Int32
    left: Int32
    right: Int32
    mMask: cute.Tensor | None = None  # (seq_q, seq_kv): zero hides a key, where a mask is given


@dataclass(frozen=True)
class Blocks:
    """Blocks of keys of a tile of rows: ``first .. end`` are seen by some row, the others by none.

    ``first .. whole_first`` are cut by the band's left edge, ``whole_end .. end`` by its right edge or by the last key;
    both are masked. Every row sees all keys of ``whole_first .. whole_end``, which need no mask.
    """

    first: Int32
    whole_first: Int32
    whole_end: Int32
    end: Int32


@dataclass(frozen=True)
class BandMask:
    """The mask of tiles ``tile_q x tile_kv``. A side of the band that is not ``limited`` reaches to the end.

    ``given`` adds a mask in memory; then every block is masked.
    """

    tile_q: int
    tile_kv: int
    limited_left: bool
    limited_right: bool
    given: bool

    @cute.jit
    def blocks(self, row: Int32, band: Band) -> Blocks:
        """The blocks of keys of the tile of rows that begins at ``row``."""
        last = cutlass.min(row + self.tile_q, band.seq_q) - 1
        # Keys that some row sees, then those that every row sees: the first row's right edge, the last one's left edge.
        seen_end, whole_end = band.seq_kv, band.seq_kv
        seen_begin, whole_begin = Int32(0), Int32(0)
        if const_expr(self.limited_right):
            seen_end = cutlass.min(band.seq_kv, last + band.right + 1)
            whole_end = cutlass.min(band.seq_kv, row + band.right + 1)
        if const_expr(self.limited_left):
            seen_begin = cutlass.max(Int32(0), row - band.left)
            whole_begin = cutlass.max(Int32(0), last - band.left)
        # Whole blocks: ends are rounded inwards for those without a mask, outwards for those with some key.
        end = (cutlass.max(seen_end, Int32(0)) + self.tile_kv - 1) // self.tile_kv
        first = cutlass.min(seen_begin // self.tile_kv, end)
        closed = cutlass.max(cutlass.max(whole_end, Int32(0)) // self.tile_kv, first)
        open_ = (whole_begin + self.tile_kv - 1) // self.tile_kv
        if const_expr(self.given):
            closed = first
        return Blocks(first, cutlass.min(cutlass.max(open_, first), closed), closed, end)

    @cute.jit
    def apply(
        self,
        thread: Int32,
        acc_s: cute.Tensor,  # ((2, 2), MMA_M, MMA_KV)
        row: Int32,
        column: Int32,
        band: Band,
        tiled_mma: cute.TiledMma,
    ):
        """Writes -inf where a row of the tile at ``row`` does not see a key of the block at ``column``."""
        tile = cute.make_identity_tensor((self.tile_q, self.tile_kv))
        # Coordinates of this thread's scores, and thread 0's, which are constants.
        scores = by_rows(acc_s)
        places = by_rows(tiled_mma.get_slice(thread).partition_C(tile))  # ((2, MMA_M), (2, MMA_KV))
        constants = by_rows(tiled_mma.get_slice(0).partition_C(tile))
        own = column + places[0, 0][1]
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            # The row's edges relative to this thread's first column: a comparison with a constant for each score.
            at = row + places[r, 0][0]
            end = band.seq_kv
            if const_expr(self.limited_right):
                end = cutlass.min(band.seq_kv, at + band.right + 1)
            end = end - own
            begin = Int32(0)
            if const_expr(self.limited_left):
                begin = at - band.left - own
            if const_expr(self.given):
                # Rows and keys beyond the sequence are not in memory: the last ones' are read for them.
                gRow = band.mMask[cutlass.min(at, band.seq_q - 1), None]
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                ahead = const_expr(constants[0, c][1])
                hidden = ahead >= end
                if const_expr(self.limited_left):
                    hidden = hidden or ahead < begin
                if const_expr(self.given):
                    unseen = gRow[cutlass.min(own + ahead, band.seq_kv - 1)] == 0
                    hidden = hidden or unseen
                scores[r, c] = -Float32.inf if hidden else scores[r, c]
