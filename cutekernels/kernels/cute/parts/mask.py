"""The mask of keys a query sees: index arithmetic over blocks of keys, and -inf for the scores of hidden ones."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cutekernels.kernels.cute.parts.softmax import by_rows


@dataclass(frozen=True)
class BandMask:
    """Query row r sees keys ``r - left .. r + right`` that exist; a side that is not ``limited`` reaches to the end.

    ``left`` and ``right`` are relative to the row's own index, so they contain ``seq_kv - seq_q``: the last query is
    aligned with the last key. ``given`` adds a mask in memory; then every block is masked.
    """

    tile_q: int
    tile_kv: int
    limited_left: bool
    limited_right: bool
    given: bool

    @cute.jit
    def blocks(
        self, row: Int32, seq_q: Int32, seq_kv: Int32, left: Int32, right: Int32
    ) -> tuple[Int32, Int32, Int32, Int32]:
        """``(begin, open, closed, end)`` of key blocks for the query tile that begins at ``row``.

        Blocks ``begin .. end`` are seen by some row; ``open .. closed`` among them by every row and entirely.
        """
        last = cutlass.min(row + self.tile_q, seq_q) - 1
        seen_end, whole_end = seq_kv, seq_kv
        seen_begin, whole_begin = Int32(0), Int32(0)
        if const_expr(self.limited_right):
            seen_end = cutlass.min(seq_kv, last + right + 1)
            whole_end = cutlass.min(seq_kv, row + right + 1)
        if const_expr(self.limited_left):
            seen_begin = cutlass.max(Int32(0), row - left)
            whole_begin = cutlass.max(Int32(0), last - left)
        end = (cutlass.max(seen_end, Int32(0)) + self.tile_kv - 1) // self.tile_kv
        begin = cutlass.min(seen_begin // self.tile_kv, end)
        closed = cutlass.max(cutlass.max(whole_end, Int32(0)) // self.tile_kv, begin)
        open_ = (whole_begin + self.tile_kv - 1) // self.tile_kv
        if const_expr(self.given):
            closed = begin
        return begin, cutlass.min(cutlass.max(open_, begin), closed), closed, end

    @cute.jit
    def apply(
        self,
        tid: Int32,
        acc_s: cute.Tensor,  # ((2, 2), MMA_M, MMA_KV)
        row: Int32,
        column: Int32,
        edges: tuple[Int32, Int32, Int32, Int32, cute.Tensor | None],
        tiled_mma: cute.TiledMma,
    ):
        """Writes -inf where a row of the tile at ``row`` does not see a key of the block at ``column``.

        ``edges``: seq_q, seq_kv, left, right, and the given mask (seq_q, seq_kv).
        """
        seq_q, seq_kv, left, right, mMask = edges
        tile = cute.make_identity_tensor((self.tile_q, self.tile_kv))
        # Coordinates of this thread's scores, and thread 0's, which are constants.
        scores, place = by_rows(acc_s), by_rows(tiled_mma.get_slice(tid).partition_C(tile))
        constant = by_rows(tiled_mma.get_slice(0).partition_C(tile))
        own = column + place[0, 0][1]
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            at = row + place[r, 0][0]
            end = seq_kv
            if const_expr(self.limited_right):
                end = cutlass.min(seq_kv, at + right + 1)
            end = end - own
            begin = Int32(0)
            if const_expr(self.limited_left):
                begin = at - left - own
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                ahead = const_expr(constant[0, c][1])
                hidden = ahead >= end
                if const_expr(self.limited_left):
                    hidden = hidden or ahead < begin
                if const_expr(self.given):
                    exists = at < seq_q and own + ahead < seq_kv
                    if exists:
                        hidden = hidden or mMask[at, own + ahead] == 0
                scores[r, c] = -Float32.inf if hidden else scores[r, c]
