"""Sums of the squares of a product's rows, by warps beside those that multiply.

One stage, squaring warp: wait full[stage], as the consumers do; read its rows; arrive on empty[stage], one of the
arrivals that the producer waits for. At the end each warp leaves its rows' sums in shared memory and arrives on
``squared_full``, where the consumers wait for them (``results.py``, ``scale``).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cutekernels.kernels.cute.parts.pipeline import Position, StagePipeline
from cutekernels.kernels.cute.parts.smem import ELEMENT_BYTES, SWIZZLED, SkinnyWarpgroupSmem

WARPS = SkinnyWarpgroupSmem.SQUARING_WARPS
_VECTOR = 8  # elements in 16 bytes
_LANES = SWIZZLED // _VECTOR  # that share a row of 128 bytes
_TOGETHER = 32 // _LANES  # rows that a warp reads at once


@cute.jit
def add_squares(x: cute.Tensor, sums: cute.Tensor):
    """``sums`` ``(...) +=`` squares of ``x`` ``(8, ...)``, pair by pair: additions to one sum depend on each other."""
    dtype, count = x.element_type, const_expr(cute.size(sums))
    pairs = cute.make_tensor(cute.recast_tensor(x, Uint32).iterator, cute.make_layout((_VECTOR // 2, count)))
    values = cute.make_tensor(x.iterator, cute.make_layout((_VECTOR, count)))
    wide = cute.make_rmem_tensor(2, Float32)
    bits = cute.recast_tensor(wide, Uint32)
    for j in cutlass.range_constexpr(_VECTOR // 2):
        for i in cutlass.range_constexpr(count):
            if const_expr(dtype is cutlass.BFloat16):  # its bits are a float's upper half
                bits[0] = pairs[j, i] << 16
                bits[1] = pairs[j, i] & Uint32(0xFFFF0000)
            else:
                for k in cutlass.range_constexpr(2):
                    wide[k] = values[2 * j + k, i].to(Float32)
            for k in cutlass.range_constexpr(2):
                sums[i] = sums[i] + wide[k] * wide[k]


@dataclass(frozen=True)
class StageSquares:
    """Sums of squares of X's rows, stage by stage, by warps beside those that multiply: every third four rows each.

    CTAs that share K leave their sums in each other's shared memory too, beside that one's own.
    """

    smem: SkinnyWarpgroupSmem
    pipeline: StagePipeline  # the product's, of which these warps are readers

    @property
    def rows4(self) -> int:
        """Groups of four rows that a warp has."""
        return -(-self.smem.tile_m // (_TOGETHER * WARPS))

    @cute.jit
    def run(
        self,
        tid: Int32,  # of these warps
        dtype: cutlass.Constexpr[type[cutlass.Numeric]],
        storage: cute.Pointer,
        split: Int32,
        first: Int32,  # k-tile
        end: Int32,
    ):
        """These warps' work: the squares of k-tiles ``first`` to ``end``, then the rows' sums."""
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        full = cute.recast_ptr(storage + self.smem.barriers_at, dtype=Int64)
        empty = full + self.smem.stages
        sums = cute.make_rmem_tensor((self.rows4, self.smem.tile_k // SWIZZLED), Float32)
        sums.fill(0.0)
        begin = storage + (warp * _TOGETHER * SWIZZLED * ELEMENT_BYTES + lane * 16)
        pitch = const_expr(self.smem.tile_m * self.smem.tile_k * ELEMENT_BYTES)
        at = Position(Int32(0), Int32(0))
        for _ in cutlass.range(first, end, unroll=1):
            # Wait until the TMA has filled the stage.
            cute.arch.mbarrier_wait(full + at.stage, at.phase)
            self.add(begin + at.stage * pitch, dtype, sums)
            # All lanes have read; then one says so to the producer.
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(empty + at.stage)
            at = self.pipeline.next(at)
        self.leave(warp, lane, storage, split, sums)

    @cute.jit
    def add(self, begin: cute.Pointer, dtype: cutlass.Constexpr[type[cutlass.Numeric]], sums: cute.Tensor):
        """``sums`` ``(rows4, blocks)`` of this lane's share of its warp's rows ``+=`` a stage's squares.

        Bytes behind the last row are summed with the rest, and not kept.
        """
        blocks = const_expr(cute.size(sums, mode=[1]))
        x = cute.make_rmem_tensor((_VECTOR, self.rows4, blocks), dtype)
        for i in cutlass.range_constexpr(self.rows4):
            for block in cutlass.range_constexpr(blocks):
                at = begin + (i * WARPS * _TOGETHER + block * self.smem.tile_m) * SWIZZLED * ELEMENT_BYTES
                at = cute.make_ptr(dtype, at.toint(), cute.AddressSpace.smem, assumed_align=16)
                cute.autovec_copy(cute.make_tensor(at, cute.make_layout(_VECTOR)), x[None, i, block])
        add_squares(x, sums)

    @cute.jit
    def leave(self, warp: Int32, lane: Int32, storage: cute.Pointer, split: Int32, sums: cute.Tensor):
        """Rows' sums into shared memory. Lane ``i`` of those that share a row stores the ``i``-th of ``rows4``."""
        full = cute.recast_ptr(storage + self.smem.squares_barrier_at, dtype=Int64)
        squares = cute.recast_ptr(storage + self.smem.squares_at, dtype=Float32) + split * self.smem.rows
        own = cute.make_tensor(squares, cute.make_layout(self.smem.rows))
        # A row's eight lanes have eight vectors of each 64 elements: add over blocks, then over lanes.
        totals = cute.make_rmem_tensor(self.rows4, Float32)
        for i in cutlass.range_constexpr(self.rows4):
            totals[i] = sums[i, 0]
            for block in cutlass.range_constexpr(1, cute.size(sums, mode=[1])):
                totals[i] = totals[i] + sums[i, block]
        for step in cutlass.range_constexpr(_LANES.bit_length() - 1):
            for i in cutlass.range_constexpr(self.rows4):
                totals[i] = totals[i] + cute.arch.shuffle_sync_bfly(totals[i], offset=1 << step)
        ctas = const_expr(self.smem.split)
        if const_expr(self.smem.inbox_in_stages):
            # Word that these threads have read their stages, whose place the others' accumulators take. Relaxed: the
            # last stage's arrival on its empty barrier, which releases, has put the reads before it.
            cute.arch.cluster_arrive_relaxed()
        if const_expr(ctas > 1):
            # Wait until the other CTAs have set up their barriers, since these stores arrive on their squared_full.
            cute.arch.cluster_wait()
        for first in cutlass.range_constexpr(0, self.rows4, _LANES):
            mine, number = totals[first], first + lane % _LANES
            for i in cutlass.range_constexpr(first + 1, min(first + _LANES, self.rows4)):
                if number == i:
                    mine = totals[i]
            row = (number * WARPS + warp) * _TOGETHER + lane // _LANES
            if number < self.rows4 and row < self.smem.tile_m:
                own[row] = mine
                if const_expr(ctas > 1):
                    sent = cute.make_rmem_tensor(1, Float32)
                    sent[0] = mine
                    for other in cutlass.range_constexpr(1, ctas):
                        peer = 1 - split if const_expr(ctas == 2) else (split + other) % ctas
                        cute.arch.store_async_dsmem(squares + row, cute.recast_tensor(sent, Int32)[0], full, peer)
        # All lanes have stored; then one says so to this CTA's consumers. The first warp's arrival also announces the
        # bytes that the other CTAs send, so the consumers wait for those too.
        cute.arch.sync_warp()
        if lane == 0:
            if warp == 0 and const_expr(ctas > 1):
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.smem.tile_m * 4 * (ctas - 1))
            else:
                cute.arch.mbarrier_arrive(full)
