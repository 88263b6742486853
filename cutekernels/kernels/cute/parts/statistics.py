"""Sums of the squares of a product's rows: by warps beside those that multiply, or by CTAs that have no tile."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from cutekernels.kernels.cute.parts.prefetch import prefetch_bulk
from cutekernels.kernels.cute.parts.ptx import instruction
from cutekernels.kernels.cute.parts.smem import SWIZZLED, SpecializedSmem

WARPS = SpecializedSmem.SQUARING_WARPS
_VECTOR = 8  # elements in 16 bytes
_LANES = SWIZZLED // _VECTOR  # that share a row of 128 bytes
_TOGETHER = 32 // _LANES  # rows that a warp reads at once
_VECTORS = 16  # loads of a row that a lane has in flight
_MOST_POLLS = 64  # until a CTA sums a row itself
_SLEEP_NS = 200


def sleep() -> None:
    """Sleeps for up to twice ``_SLEEP_NS``, so that other warps may issue."""
    instruction("nanosleep.u32 $0;", "r", Int32(_SLEEP_NS))


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

    Two CTAs that share K leave their sums in each other's shared memory too, beside that one's own.
    """

    smem: SpecializedSmem

    @property
    def fours(self) -> int:
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
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        full = cute.recast_ptr(storage + self.smem.barriers_at, dtype=Int64)
        empty = full + self.smem.stages
        sums = cute.make_rmem_tensor((self.fours, self.smem.tile_k // SWIZZLED), Float32)
        sums.fill(0.0)
        begin = storage + (warp * _TOGETHER * SWIZZLED * self.smem.element_bytes + lane * 16)
        pitch = const_expr(self.smem.tile_m * self.smem.tile_k * self.smem.element_bytes)
        add, leave = self.add, self.leave
        stage, phase = Int32(0), Int32(0)
        for _ in cutlass.range(first, end, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            add(begin + stage * pitch, dtype, sums)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(empty + stage)
            stage = stage + 1
            if stage == self.smem.stages:
                stage = Int32(0)
                phase = phase ^ 1
        leave(warp, lane, storage, split, sums)

    @cute.jit
    def add(self, begin: cute.Pointer, dtype: cutlass.Constexpr[type[cutlass.Numeric]], sums: cute.Tensor):
        """``sums`` ``(fours, blocks)`` of this lane's share of its warp's rows ``+=`` a stage's squares.

        Bytes behind the last row are summed with the rest, and not kept.
        """
        blocks = const_expr(cute.size(sums, mode=[1]))
        x = cute.make_rmem_tensor((_VECTOR, self.fours, blocks), dtype)
        for i in cutlass.range_constexpr(self.fours):
            for block in cutlass.range_constexpr(blocks):
                at = begin + (i * WARPS * _TOGETHER + block * self.smem.tile_m) * SWIZZLED * self.smem.element_bytes
                at = cute.make_ptr(dtype, at.toint(), cute.AddressSpace.smem, assumed_align=16)
                cute.autovec_copy(cute.make_tensor(at, cute.make_layout(_VECTOR)), x[None, i, block])
        add_squares(x, sums)

    @cute.jit
    def leave(self, warp: Int32, lane: Int32, storage: cute.Pointer, split: Int32, sums: cute.Tensor):
        """Rows' sums into shared memory. Lane ``i`` of those that share a row stores the ``i``-th four's."""
        full = cute.recast_ptr(storage + self.smem.squares_barrier_at, dtype=Int64)
        kept = cute.recast_ptr(storage + self.smem.squares_at, dtype=Float32) + split * self.smem.rows
        own = cute.make_tensor(kept, cute.make_layout(self.smem.rows))
        totals = cute.make_rmem_tensor(self.fours, Float32)
        for i in cutlass.range_constexpr(self.fours):
            totals[i] = sums[i, 0]
            for block in cutlass.range_constexpr(1, cute.size(sums, mode=[1])):
                totals[i] = totals[i] + sums[i, block]
        for step in cutlass.range_constexpr(_LANES.bit_length() - 1):
            for i in cutlass.range_constexpr(self.fours):
                totals[i] = totals[i] + cute.arch.shuffle_sync_bfly(totals[i], offset=1 << step)
        if const_expr(self.smem.split > 1):
            cute.arch.cluster_wait()  # the other has set up its barriers
        for first in cutlass.range_constexpr(0, self.fours, _LANES):
            mine, number = totals[first], first + lane % _LANES
            for i in cutlass.range_constexpr(first + 1, min(first + _LANES, self.fours)):
                if number == i:
                    mine = totals[i]
            row = (number * WARPS + warp) * _TOGETHER + lane // _LANES
            if number < self.fours and row < self.smem.tile_m:
                own[row] = mine
                if const_expr(self.smem.split > 1):
                    sent = cute.make_rmem_tensor(1, Float32)
                    sent[0] = mine
                    cute.arch.store_async_dsmem(kept + row, cute.recast_tensor(sent, Int32)[0], full, 1 - split)
        cute.arch.sync_warp()
        if lane == 0:
            if warp == 0 and const_expr(self.smem.split > 1):
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.smem.tile_m * 4)
            else:
                cute.arch.mbarrier_arrive(full)


@dataclass(frozen=True)
class GridSquares:
    """Sums of squares of X's rows by CTAs of the grid that have no tile, sent to those that have one by mailboxes.

    ``mail`` ``(1 + rows,)`` belongs to a stream or graph and is zero before its first launch. Its first word counts
    launches in the upper half: when done, one CTA of a launch adds what completes 2^32, every other CTA one. A row's
    mailbox holds the number of the launch and, below, the sum, so it is never cleared. The CTAs of a launch need not
    all run at once, so a CTA that has polled ``_MOST_POLLS`` times sums the row itself, in the same order.
    """

    smem: SpecializedSmem
    warps: int  # of a CTA
    poll_ps: int | None  # from the turn to the first poll, for each element of a row
    ctas = SpecializedSmem.SQUARING_CTAS

    @property
    def together(self) -> int:
        """Rows that a warp loads at once: all of its own, one or two."""
        return min(2, -(-self.smem.tile_m // (self.ctas * self.warps)))

    @cute.jit
    def launches(self, mail: cute.Tensor) -> Int64:
        return cute.arch.load(mail.iterator, Int64, sem="relaxed", scope="gpu") >> 32

    @cute.jit
    def done(self, mail: cute.Tensor, first: Boolean):
        """Counts this CTA out; for one thread of each, after it has read ``launches``."""
        x, y, z = cute.arch.grid_dim()
        mine = Int64(1)
        if first:
            mine = (Int64(1) << 32) - Int64(x * y * z - 1)
        cute.arch.atomic_add(mail.iterator, mine, sem="relaxed", scope="gpu")

    @cute.jit
    def prefetch(self, number: Int32, mX: cute.Tensor):
        """Before the turn: prefetches the rows of CTA ``number`` of those without a tile."""
        tid, _, _ = cute.arch.thread_idx()
        m, k = mX.shape
        row = number + self.ctas * tid
        if row < m:
            begin = mX.iterator + cute.crd2idx((row, 0), mX.layout)
            prefetch_bulk(Int64(begin.toint()), k * (mX.element_type.width // 8))

    @cute.jit
    def run(self, number: Int32, at_m: Int32, mX: cute.Tensor, mail: cute.Tensor):
        """The whole of CTA ``number`` of those without a tile. Warps take rows in turn; only the first tile of rows
        has any.
        """
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        launch, done, row_sums = self.launches(mail) + 1, self.done, self.row_sums
        m = cute.size(mX, mode=[0]) if at_m == 0 else 0
        step, together = const_expr(self.ctas * self.warps), self.together
        for first in cutlass.range(number * self.warps + warp, m, step * together, unroll=1):
            rows = cute.make_rmem_tensor(together, Int32)
            for i in cutlass.range_constexpr(together):
                rows[i] = cutlass.min(first + step * i, m - 1)
            totals = cute.make_rmem_tensor(together, Float32)
            row_sums(mX, rows, lane, totals)
            bits = cute.recast_tensor(totals, Uint32)
            for i in cutlass.range_constexpr(together):
                if lane == i:
                    message = (launch << 32) | Int64(bits[i])
                    cute.arch.store(mail.iterator + 1 + rows[i], message, sem="relaxed", scope="gpu")
        cute.arch.sync_threads()
        if tid == 0:
            done(mail, number + at_m == 0)

    @cute.jit
    def row_sums(self, mX: cute.Tensor, rows: cute.Tensor, lane: Int32, totals: cute.Tensor):
        """``totals`` (rows,) by a warp, each in a fixed order."""
        count = const_expr(cute.size(rows))
        vectors = cute.size(mX, mode=[1]) // _VECTOR
        sums = cute.make_rmem_tensor((_VECTORS, count), Float32)
        sums.fill(0.0)
        for first in cutlass.range(lane, vectors, 32 * _VECTORS, unroll=1):
            x = cute.make_rmem_tensor((_VECTOR, _VECTORS, count), mX.element_type)
            x.fill(0.0)
            for row in cutlass.range_constexpr(count):
                begin = mX.iterator + cute.crd2idx((rows[row], 0), mX.layout)
                for i in cutlass.range_constexpr(_VECTORS):
                    vector = first + 32 * i
                    if vector < vectors:
                        at = begin + vector * _VECTOR
                        at = cute.make_ptr(mX.element_type, at.toint(), cute.AddressSpace.gmem, assumed_align=16)
                        cute.autovec_copy(cute.make_tensor(at, cute.make_layout(_VECTOR)), x[None, i, row])
            add_squares(x, sums)
        for row in cutlass.range_constexpr(count):
            total = sums[0, row]
            for i in cutlass.range_constexpr(1, _VECTORS):
                total = total + sums[i, row]
            totals[row] = cute.arch.warp_reduction_sum(total)

    @cute.jit
    def gather(
        self,
        lane: Int32,
        mX: cute.Tensor,
        mail: cute.Tensor,
        storage: cute.Pointer,
        head: cutlass.Constexpr[int],
        row: Int32,
        later: Int32,
    ):
        """By one warp of a CTA with a tile: the sums of its rows into shared memory. Rows begin at ``row``, and from
        number ``head`` on at ``later``.
        """
        each = const_expr(-(-self.smem.tile_m // 32))
        rows = cute.make_rmem_tensor(each, Int32)
        for i in cutlass.range_constexpr(each):
            rows[i] = row + lane + 32 * i
            if lane + 32 * i >= head:
                rows[i] = later + lane + 32 * i - head
            rows[i] = cutlass.min(rows[i], cute.size(mX, mode=[0]) - 1)
        begin, until = cute.arch.globaltimer(), cute.size(mX, mode=[1]) * self.poll_ps // 1000
        launches, done, row_sums = self.launches, self.done, self.row_sums
        while cute.arch.globaltimer() - begin < until:
            sleep()
        found = cute.make_rmem_tensor(each, Int64)
        found.fill(0)
        missing, launch, polls = Boolean(True), Int64(0), Int32(0)
        while missing and polls < _MOST_POLLS:
            launch = launches(mail) + 1
            missing = Boolean(False)
            for i in cutlass.range_constexpr(each):
                found[i] = cute.arch.load(mail.iterator + 1 + rows[i], Int64, sem="relaxed", scope="gpu")
                missing = missing | ((found[i] >> 32) != launch)
            missing = cute.arch.vote_any_sync(missing)
            polls = polls + 1
        kept = cute.make_tensor(
            cute.recast_ptr(storage + self.smem.squares_at, dtype=Uint32), cute.make_layout(self.smem.rows)
        )
        for i in cutlass.range_constexpr(each):
            if lane + 32 * i < self.smem.tile_m:
                kept[lane + 32 * i] = Uint32(found[i] & Int64(0xFFFFFFFF))
        if missing:
            for i in cutlass.range_constexpr(each):
                lacking = cute.arch.vote_ballot_sync((found[i] >> 32) != launch)
                for other in cutlass.range(32, unroll=1):
                    if (lacking >> other) & 1 == 1:
                        total, lacked = cute.make_rmem_tensor(1, Float32), cute.make_rmem_tensor(1, Int32)
                        lacked[0] = cute.arch.shuffle_sync(rows[i], other)
                        row_sums(mX, lacked, lane, total)
                        if lane == other and lane + 32 * i < self.smem.tile_m:
                            kept[lane + 32 * i] = cute.recast_tensor(total, Uint32)[0]
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(cute.recast_ptr(storage + self.smem.squares_barrier_at, dtype=Int64))
            done(mail, Boolean(False))
