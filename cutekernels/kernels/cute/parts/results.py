"""From a specialized GEMM's sums in registers to rows of out: two CTAs' shares, the epilogue, whole lines."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.epilogue import Activation
from cutekernels.kernels.cute.parts.ptx import instruction
from cutekernels.kernels.cute.parts.smem import SpecializedSmem

WIDEST = 8  # elements in 16 bytes


def store_16(target: cute.Pointer, words: cute.Tensor) -> None:
    """Four 32-bit ``words`` to global memory, at a multiple of 16 bytes.

    Ordinary stores would be interleaved with the reads of shared memory that stand in front of all of them.
    """
    text = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
    instruction(text, "l,r,r,r,r", target.toint(), *[words[i] for i in range(4)])


@dataclass(frozen=True)
class TileResults:
    """The end of a tile, once all of its stages are read.

    ``place``: the tile's own first row, the beginnings of its two boxes of rows, its own first column, the first column
    it computes. ``operands``: out, C, bias, rstd (or None), alpha, beta, K and eps (or None).
    """

    smem: SpecializedSmem
    head: int  # rows of X's first box
    activation: Activation
    out_align: int

    @cute.jit
    def deliver(
        self,
        tid: Int32,
        acc: cute.Tensor,
        tCcD: cute.Tensor,
        split: Int32,
        storage: cute.Pointer,
        place: tuple[Int32, ...],
        operands: tuple,
    ):
        mD, _, _, mRstd, *_ = operands
        factors = None  # of this thread's two rows
        if const_expr(mRstd is not None or self.smem.squares):
            factors = cute.make_rmem_tensor(2, Float32)
        if const_expr(mRstd is not None):
            factors.fill(0.0)
            row_of = self.row_of
            for half in cutlass.range_constexpr(2):
                row, mine = row_of(tCcD[2 * half][0], place, cute.size(mD, mode=[0]))
                if mine:
                    factors[half] = mRstd[row]
        scale = self.scale
        if const_expr(self.smem.split == 1):
            scale(factors, tCcD, storage, operands)
            finish = self.finish
            finish(tid, acc, factors, tCcD, 0, storage, place, operands)
        else:
            exchange = self.exchange
            exchange(tid, acc, factors, tCcD, split, storage, place, operands)

    @cute.jit
    def exchange(
        self,
        tid: Int32,
        acc: cute.Tensor,
        factors: cute.Tensor | None,
        tCcD: cute.Tensor,
        split: Int32,
        storage: cute.Pointer,
        place: tuple[Int32, ...],
        operands: tuple,
    ):
        """Two CTAs halve a tile's columns between them: each sends the other its sums of that one's half."""
        smem = self.smem
        count, share, members = const_expr(cute.size(acc)), const_expr(smem.share), const_expr(smem.members)
        inbox = cute.recast_ptr(storage + smem.inbox_at, dtype=Float32)
        full = cute.recast_ptr(storage + smem.inbox_barrier_at, dtype=Int64)
        bits = cute.recast_tensor(acc, Int32)
        cute.arch.cluster_wait()  # both have set up their barriers
        for part in cutlass.range_constexpr(2):
            if split != part:
                for i in cutlass.range_constexpr(0, min(share, count - part * share), 4):
                    four = tuple([bits[part * share + i + j] for j in range(4)])
                    cute.arch.store_async_dsmem((inbox + members * i + 4 * tid).align(16), four, full, part)
        scale, finish = self.scale, self.finish
        scale(factors, tCcD, storage, operands)  # while the other's sums are on their way
        for part in cutlass.range_constexpr(2):
            if split == part:
                begin, size = const_expr(part * share), const_expr(min(share, count - part * share))
                if tid == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * size * members)
                cute.arch.mbarrier_wait(full, 0)
                some = cute.make_rmem_tensor(size, Float32)
                for i in cutlass.range_constexpr(0, size, 4):
                    theirs = cute.make_rmem_tensor(4, Float32)
                    left = (inbox + members * i + 4 * tid).align(16)
                    cute.autovec_copy(cute.make_tensor(left, cute.make_layout(4)), theirs)
                    for j in cutlass.range_constexpr(4):
                        some[i + j] = acc[begin + i + j] + theirs[j]
                finish(tid, some, factors, tCcD, begin, storage, place, operands)

    @cute.jit
    def scale(self, factors: cute.Tensor | None, tCcD: cute.Tensor, storage: cute.Pointer, operands: tuple):
        """The factors of this thread's rows: alpha times rstd, from sums of squares where those are computed."""
        _, _, _, _, alpha, _, k, eps = operands
        if const_expr(self.smem.squares):
            cute.arch.mbarrier_wait(cute.recast_ptr(storage + self.smem.squares_barrier_at, dtype=Int64), 0)
            kept = cute.make_tensor(
                cute.recast_ptr(storage + self.smem.squares_at, dtype=Float32),
                cute.make_layout((self.smem.rows, self.smem.split)),
            )
            for half in cutlass.range_constexpr(2):
                total = Float32(0.0)
                for part in cutlass.range_constexpr(self.smem.split):
                    total = total + kept[tCcD[2 * half][0], part]
                factors[half] = cute.math.rsqrt(total / k + eps)
        if const_expr(factors is not None):
            for half in cutlass.range_constexpr(2):
                factors[half] = alpha * factors[half]

    @cute.jit
    def finish(
        self,
        tid: Int32,
        acc: cute.Tensor,
        factors: cute.Tensor | None,
        tCcD: cute.Tensor,
        begin: cutlass.Constexpr[int],
        storage: cute.Pointer,
        place: tuple[Int32, ...],
        operands: tuple,
    ):
        """Scales, adds, activates, rounds and stores ``acc``, this thread's sums from number ``begin`` on.

        Stores are pairs, as in the MMA's layout; where out is aligned, 16 bytes by way of shared memory.
        """
        mD, mC, mBias, _, alpha, beta, _, _ = operands
        n = cute.size(mD, mode=[1])
        _, _, _, own_n, first_column = place
        dtype = mD.element_type
        activate, row_of = self.activation.apply, self.row_of
        through = const_expr(self.out_align == WIDEST)
        members, rows = const_expr(self.smem.members), const_expr(self.smem.tile_m)
        width = const_expr(cute.size(acc) // self.smem.SUMS_PER_BLOCK * 8)
        begin_column = const_expr(begin // self.smem.SUMS_PER_BLOCK * 8)
        sD = cute.make_tensor(
            cute.recast_ptr(storage, dtype=dtype),
            cute.make_layout((rows, width), stride=(self.smem.out_pitch, 1)),
        )
        if const_expr(through):
            cute.arch.barrier(barrier_id=1, number_of_threads=members)  # all have read their stages
        for i in cutlass.range_constexpr(0, cute.size(acc), 2):
            at, across = tCcD[begin + i]
            row, mine = row_of(at, place, cute.size(mD, mode=[0]))
            column = first_column + across
            pair = cute.make_rmem_tensor(2, Float32)
            for j in cutlass.range_constexpr(2):
                pair[j] = acc[i + j] * (alpha if const_expr(factors is None) else factors[(i + j) % 4 // 2])
                if const_expr(mC is not None or mBias is not None):  # noqa: SIM102  known when compiled
                    if mine and column + j >= own_n and column + j < n:
                        if const_expr(mC is not None):
                            pair[j] = pair[j] + beta * mC[row, column + j].to(Float32)
                        if const_expr(mBias is not None):
                            pair[j] = pair[j] + mBias[column + j].to(Float32)
            rounded = cute.make_rmem_tensor(2, dtype)
            rounded.store(activate(pair.load()).to(dtype))
            if const_expr(through):
                if at < rows:
                    left = (sD.iterator + cute.crd2idx((at, across - begin_column), sD.layout)).align(4)
                    cute.autovec_copy(rounded, cute.make_tensor(left, cute.make_layout(2)))
            elif const_expr(self.out_align > 1):
                if mine and column >= own_n and column < n:
                    target = (mD.iterator + cute.crd2idx((row, column), mD.layout)).align(4)
                    cute.autovec_copy(rounded, cute.make_tensor(target, cute.make_layout(2)))
            else:
                for j in cutlass.range_constexpr(2):
                    if mine and column + j >= own_n and column + j < n:
                        mD[row, column + j] = rounded[j]
        if const_expr(through):
            cute.arch.barrier(barrier_id=1, number_of_threads=members)
            store_lines = self.store_lines
            store_lines(tid, sD, mD, begin_column, place)

    @cute.jit
    def store_lines(
        self,
        tid: Int32,
        sD: cute.Tensor,
        mD: cute.Tensor,
        begin_column: cutlass.Constexpr[int],
        place: tuple[Int32, ...],
    ):
        """Results in shared memory, 16 bytes a store; all of a thread's are read before the first is stored."""
        m, n = mD.shape
        _, _, _, own_n, first_column = place
        rows, members, dtype = const_expr(self.smem.tile_m), const_expr(self.smem.members), mD.element_type
        across = const_expr(cute.size(sD, mode=[1]) // WIDEST)
        vectors = const_expr(rows * across)
        each = const_expr(-(-vectors // members))
        row_of = self.row_of
        taken = cute.make_rmem_tensor((WIDEST, each), dtype)
        for i in cutlass.range_constexpr(each):
            vector = tid + i * members
            if const_expr(vectors % members != 0 and i == each - 1):
                vector = cutlass.min(vector, vectors - 1)  # stored twice, by another thread too
            left = sD.iterator + cute.crd2idx((vector // across, vector % across * WIDEST), sD.layout)
            left = cute.make_ptr(dtype, left.toint(), cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(left, cute.make_layout(WIDEST)), taken[None, i])
        for i in cutlass.range_constexpr(each):
            vector = tid + i * members
            if const_expr(vectors % members != 0 and i == each - 1):
                vector = cutlass.min(vector, vectors - 1)
            row, mine = row_of(vector // across, place, m)
            column = first_column + begin_column + vector % across * WIDEST
            if mine and column >= own_n and column < n:
                target = mD.iterator + cute.crd2idx((row, column), mD.layout)
                store_16(target, cute.recast_tensor(taken[None, i], Int32))

    @cute.jit
    def row_of(self, at: Int32, place: tuple[Int32, ...], m: Int32) -> tuple[Int32, cutlass.Boolean]:
        """The row of out that is this tile's ``at``-th, and whether this tile stores it."""
        own_m, first_row, later, _, _ = place
        row, least = first_row + at, own_m
        if at >= self.head:  # the second box, without the rows of the first
            row, least = later + at - self.head, cutlass.max(own_m, first_row + self.head)
        return row, at < self.smem.tile_m and row >= least and row < m
