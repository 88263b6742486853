"""Gradients of scores on their way from the kernel of dK and dV to that of dQ: blocks of 16 keys by 16 queries.

A block is the 16 bytes of each thread of a warp that holds it as rounded accumulators, or as an A operand, keys by
queries; 8 x 8 at a time it is transposed where it is read. Only blocks that the walk of a tile of keys visits exist. A
tile of keys and its mirror image among a head's tiles share their rows of blocks, so that a causal triangle leaves no
gaps.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cutekernels.kernels.cute.parts.attention_smem import BLOCK_KEYS, BLOCK_QUERIES
from cutekernels.kernels.cute.parts.groups import as_warps
from cutekernels.kernels.cute.parts.mask import Band, BandMask
from cutekernels.kernels.cute.parts.softmax import by_rows
from cutekernels.kernels.cute.parts.warp_groups import ROWS

WORDS = 128  # of 32 bits: four of each thread


@dataclass(frozen=True)
class ScoreBlocks:
    """Blocks of a head in ``(rows, columns)`` of memory, for tiles of ``mask.tile_q`` keys that walk queries.

    Walked tiles are of 64 queries or a multiple, since 64 are read together: all of them are there where one is seen.
    """

    mask: BandMask  # rows are keys, columns queries

    def band(self, seq_q: Int32, seq_kv: Int32, left: Int32, right: Int32) -> Band:
        """The band as keys see it, for limits of queries; queries that do not exist count to a walked tile's end."""
        shift, walked = seq_q - seq_kv, self.mask.tile_kv
        whole = (seq_q + walked - 1) // walked * walked
        return Band(seq_kv, whole, right - shift, left + shift)

    @cute.jit
    def place(self, tile: Int32, band: Band) -> tuple[Int32, Int32]:
        """``(row, column)`` of a tile's first key and of query 0; a column may be negative."""
        per_tile = const_expr(self.mask.tile_kv // BLOCK_QUERIES)
        mirror = (band.seq_q + self.mask.tile_q - 1) // self.mask.tile_q - 1 - tile
        row, column = tile, Int32(0)
        if tile > mirror:
            # Behind the blocks of the mirror image.
            row = mirror
            blocks = self.mask.blocks(mirror * self.mask.tile_q, band)
            column = (blocks.end - blocks.first) * per_tile
        own = self.mask.blocks(tile * self.mask.tile_q, band)
        return row * (self.mask.tile_q // BLOCK_KEYS), column - own.first * per_tile

    @cute.jit
    def hide_missing(self, thread: Int32, row: Int32, keys: Int32, acc_ds: cute.Tensor):
        """Zeros in a group's dS from ``row`` on for keys that do not exist: their probabilities may be infinite."""
        if row + ROWS > keys:
            gradients = by_rows(as_warps(acc_ds))
            for r in cutlass.range_constexpr(2):
                if row + (thread // 32 * 16 + thread % 32 // 4 + 8 * r) >= keys:
                    for c in cutlass.range_constexpr(cute.size(gradients, mode=[1])):
                        gradients[r, c] = Float32(0.0)

    @cute.jit
    def store(self, lane: Int32, rDs: cute.Tensor, at: cute.Pointer, tile: Int32):
        """A warp's dS of a walked tile, a block at a time: 16 bytes of each thread. ``at``: its blocks from query 0."""
        each = const_expr(self.mask.tile_kv // BLOCK_QUERIES)
        words = cute.recast_tensor(rDs, Int32)
        target = cute.recast_ptr(at, dtype=Int32) + tile * (each * WORDS) + lane * 4
        for i in cutlass.range_constexpr(each):
            source = cute.make_tensor(words.iterator + 4 * i, cute.make_layout(4))
            cute.autovec_copy(source, cute.make_tensor((target + i * WORDS).align(16), cute.make_layout(4)))
