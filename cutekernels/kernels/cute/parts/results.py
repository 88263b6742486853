"""From a skinny_warpgroup GEMM's accumulators to rows of out: the cluster's shares, the epilogue, whole lines.

1. With ``split`` > 1: each CTA sends every other its accumulators of that one's columns (``exchange``), and waits on
   its ``inbox_full`` for those of its own. Of more than two CTAs the inbox is in the place of stages, so they send when
   the whole cluster has read its stages.
2. Factors of rows: alpha times rstd, given or from sums of squares (``scale`` waits on ``squared_full``).
3. Scale, add C and bias, activate, round (``finish``).
4. Store: pairs from registers, or, where out is aligned, through shared memory in the place of the stages, between two
   named barriers of the consumer threads.

Rows and columns that another tile has too, or that do not exist, are masked here and nowhere else (``row_of``).
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.epilogue import Epilogue, EpilogueOperands
from cutekernels.kernels.cute.parts.ptx import instruction, mul_rn
from cutekernels.kernels.cute.parts.smem import SkinnyWarpgroupSmem

WIDEST = 8  # elements in 16 bytes


def store_16(target: cute.Pointer, words: cute.Tensor) -> None:
    """Four 32-bit ``words`` to global memory, at a multiple of 16 bytes.

    Ordinary stores would be interleaved with the reads of shared memory that stand in front of all of them.
    """
    text = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
    instruction(text, "l,r,r,r,r", target.toint(), *[words[i] for i in range(4)])


@dataclass(frozen=True)
class Place:
    """Where a tile lies. The last tiles begin early, to end where out does."""

    own_m: Int32  # the first row that this tile is to store
    row: Int32  # the first row of its first box
    later: Int32  # the first row of its second box, which may overlap the first
    own_n: Int32  # the first column that this tile is to store
    column: Int32  # the first column that it computes


@dataclass(frozen=True)
class ResultOperands:
    """Where results go, and what the epilogue makes them of."""

    mD: cute.Tensor  # (M, N)
    epilogue: EpilogueOperands
    mRstd: cute.Tensor | None  # (M,)
    k: Int32 | None
    eps: Float32 | None


@dataclass(frozen=True)
class ResultTile:
    """One consumer thread's part of a tile, but for its accumulators."""

    tid: Int32
    tCcD: cute.Tensor  # ((2, 2, N / 8), 1, 1), coordinates in the tile
    storage: cute.Pointer
    place: Place
    operands: ResultOperands


@dataclass(frozen=True)
class PairCoordinates:
    """Coordinates of two neighbours in a row, which a thread's accumulators are."""

    row: Int32
    column: Int32  # the first one's
    half: int  # 0: the first of the thread's two rows, 1: the other
    mine: Boolean  # the row is this tile's to store
    own: tuple[Int32, Int32]  # the columns that are: from, to
    gated: bool = False

    @cute.jit
    def columns(self, vector: cute.Tensor) -> cute.TensorSSA:
        found = cute.make_rmem_tensor(2, Float32)
        found.fill(0.0)
        for j in cutlass.range_constexpr(2):
            if self.mine and self.column + j >= self.own[0] and self.column + j < self.own[1]:
                found[j] = vector[self.column + j].to(Float32)
        return found.load()

    @cute.jit
    def rows(self, factors: cute.Tensor) -> cute.TensorSSA:
        """``factors`` of the thread's two rows."""
        found = cute.make_rmem_tensor(2, Float32)
        found.fill(factors[self.half])
        return found.load()

    @cute.jit
    def elements(self, mC: cute.Tensor) -> cute.TensorSSA:
        return self.columns(mC[self.row, None])


@dataclass(frozen=True)
class TileResults:
    """The end of a tile, once all of its stages are read."""

    smem: SkinnyWarpgroupSmem
    head: int  # rows of X's first box
    epilogue: Epilogue
    out_align: int

    @cute.jit
    def store_tile(self, tile: ResultTile, acc: cute.Tensor, split: Int32):
        """Finishes and stores ``acc`` ((2, 2, N / 8), 1, 1) of CTA ``split`` of a cluster that shares the tile."""
        mD, mRstd, tCcD = tile.operands.mD, tile.operands.mRstd, tile.tCcD
        factors = None  # of this thread's two rows
        if const_expr(mRstd is not None or self.smem.squares):
            factors = cute.make_rmem_tensor(2, Float32)
        if const_expr(mRstd is not None):
            factors.fill(0.0)
            for half in cutlass.range_constexpr(2):
                row, mine = self.row_of(tCcD[2 * half][0], tile.place, cute.size(mD, mode=[0]))
                if mine:
                    factors[half] = mRstd[row]
        if const_expr(self.smem.split == 1):
            self.scale(tile, factors)
            self.finish(tile, acc, factors, 0)
        else:
            self.exchange(tile, acc, factors, split)

    @cute.jit
    def exchange(self, tile: ResultTile, acc: cute.Tensor, factors: cute.Tensor | None, split: Int32):
        """The CTAs deal a tile's columns out among them: each sends every other its accumulators of that one's."""
        ctas = const_expr(self.smem.split)
        full = cute.recast_ptr(tile.storage + self.smem.inbox_barrier_at, dtype=Int64)
        if const_expr(self.smem.inbox_in_stages):
            # This thread's products have read their stages: its word for the others' stores to their place. Relaxed, as
            # it follows reads alone, which the wait for the last products has seen complete.
            cute.arch.cluster_arrive_relaxed()
        # Wait until the other CTAs have set up their barriers, since these stores arrive on their inbox_full; of more
        # than two, until they have read their stages too.
        cute.arch.cluster_wait()
        self.send(tile, acc, split, full)
        self.scale(tile, factors)  # while the others' are on their way
        for part in cutlass.range_constexpr(ctas):
            if const_expr(self.smem.count(part) > 0):  # noqa: SIM102  known when compiled
                if split == part:
                    self.add_up(tile, acc, factors, part, full)

    @cute.jit
    def add_up(
        self,
        tile: ResultTile,
        acc: cute.Tensor,
        factors: cute.Tensor | None,
        part: cutlass.Constexpr[int],
        full: cute.Pointer,
    ):
        """Adds the other CTAs' accumulators of CTA ``part``'s columns to its own, and finishes them."""
        others, threads = const_expr(self.smem.split - 1), const_expr(self.smem.consumer_threads)
        begin, size = const_expr(self.smem.begin(part)), const_expr(self.smem.count(part))
        if tile.tid == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * size * threads * others)
        # Wait for all that the other CTAs send to this one: its only phase, as a CTA has one tile.
        cute.arch.mbarrier_wait(full, 0)
        own = cute.make_rmem_tensor(size, Float32)
        for i in cutlass.range_constexpr(0, size, 4):
            for j in cutlass.range_constexpr(4):
                own[i + j] = acc[begin + i + j]
            # Always in the order of the CTAs behind this one, whichever sent first.
            for slot in cutlass.range_constexpr(others):
                theirs = cute.make_rmem_tensor(4, Float32)
                left = self.inbox(tile, slot, i)
                cute.autovec_copy(cute.make_tensor(left, cute.make_layout(4)), theirs)
                for j in cutlass.range_constexpr(4):
                    own[i + j] = own[i + j] + theirs[j]
        self.finish(tile, own, factors, begin)

    @cute.jit
    def send(self, tile: ResultTile, acc: cute.Tensor, split: Int32, full: cute.Pointer):
        """Sends every other CTA its columns of ``acc``: of several CTAs a block to each in turn, so that none of them
        has to take in all others' at once.
        """
        ctas, share = const_expr(self.smem.split), const_expr(self.smem.share)
        together = const_expr(share if ctas == 2 else 4)
        bits = cute.recast_tensor(acc, Int32)
        for first in cutlass.range_constexpr(0, share, together):
            for part in cutlass.range_constexpr(ctas):
                if split != part:
                    for i in cutlass.range_constexpr(first, min(first + together, self.smem.count(part)), 4):
                        four = tuple([bits[self.smem.begin(part) + i + j] for j in range(4)])
                        # As seen from there, this CTA is so many behind it.
                        slot = 0 if const_expr(ctas == 2) else (split + const_expr(ctas - 1 - part)) % ctas
                        cute.arch.store_async_dsmem(self.inbox(tile, slot, i), four, full, part)

    @cute.jit
    def inbox(self, tile: ResultTile, slot: Int32 | int, i: cutlass.Constexpr[int]) -> cute.Pointer:
        """A thread's accumulators ``i`` to ``i + 4`` from the CTA that is ``slot + 1`` behind this one."""
        inbox = cute.recast_ptr(tile.storage + self.smem.inbox_at, dtype=Float32)
        return (inbox + self.smem.consumer_threads * (self.smem.share * slot + i) + 4 * tile.tid).align(16)

    @cute.jit
    def scale(self, tile: ResultTile, factors: cute.Tensor | None):
        """The factors of this thread's rows: alpha times rstd, from sums of squares where those are computed."""
        operands = tile.operands
        if const_expr(self.smem.squares):
            # Wait until the squaring warps of all CTAs that share K have left the rows' sums.
            cute.arch.mbarrier_wait(cute.recast_ptr(tile.storage + self.smem.squares_barrier_at, dtype=Int64), 0)
            squares = cute.make_tensor(
                cute.recast_ptr(tile.storage + self.smem.squares_at, dtype=Float32),
                cute.make_layout((self.smem.rows, self.smem.split)),
            )
            for half in cutlass.range_constexpr(2):
                total = Float32(0.0)
                for part in cutlass.range_constexpr(self.smem.split):
                    total = total + squares[tile.tCcD[2 * half][0], part]
                factors[half] = cute.math.rsqrt(total / operands.k + operands.eps)
        if const_expr(factors is not None):
            for half in cutlass.range_constexpr(2):
                factors[half] = operands.epilogue.alpha * factors[half]

    @cute.jit
    def finish(self, tile: ResultTile, acc: cute.Tensor, factors: cute.Tensor | None, begin: cutlass.Constexpr[int]):
        """Scales, adds, activates, rounds and stores ``acc``, this thread's accumulators from number ``begin`` on.

        Stores are pairs, as in the MMA's layout; where out is aligned, 16 bytes by way of shared memory.
        """
        mD, operands = tile.operands.mD, tile.operands.epilogue
        alpha = operands.alpha
        added = const_expr(operands.mC is not None or operands.mBias is not None)
        if const_expr(added):
            # The product is rounded before C and the bias are added: contracting them is not left to ptxas.
            operands = replace(operands, alpha=None)
        elif const_expr(factors is not None):
            operands = replace(operands, alpha=None, row_factors=factors)  # alpha times rstd
        n = cute.size(mD, mode=[1])
        own_n, first_column = tile.place.own_n, tile.place.column
        dtype = mD.element_type
        through_smem = const_expr(self.out_align == WIDEST)
        threads, rows = const_expr(self.smem.consumer_threads), const_expr(self.smem.tile_m)
        width = const_expr(cute.size(acc) // self.smem.ACCUMULATORS_PER_BLOCK * 8)
        begin_column = const_expr(begin // self.smem.ACCUMULATORS_PER_BLOCK * 8)
        sD = cute.make_tensor(
            cute.recast_ptr(tile.storage, dtype=dtype),
            cute.make_layout((rows, width), stride=(self.smem.out_pitch, 1)),
        )  # (M, N)
        if const_expr(through_smem):
            # All consumer threads have read their stages, whose place the results take.
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        for i in cutlass.range_constexpr(0, cute.size(acc), 2):
            at, across = tile.tCcD[begin + i]
            row, mine = self.row_of(at, tile.place, cute.size(mD, mode=[0]))
            column = first_column + across
            pair = cute.make_rmem_tensor(2, Float32)
            for j in cutlass.range_constexpr(2):
                pair[j] = acc[i + j]
                if const_expr(added):
                    pair[j] = mul_rn(pair[j], alpha if const_expr(factors is None) else factors[i % 4 // 2])
            coordinates = PairCoordinates(row, column, const_expr(i % 4 // 2), mine, (own_n, n))
            rounded = cute.make_rmem_tensor(2, dtype)
            rounded.store(self.epilogue.apply(pair.load(), coordinates, operands).to(dtype))
            if const_expr(through_smem):
                # Into shared memory: all rows of the tile, those of whole groups beyond it left out.
                if at < rows:
                    left = (sD.iterator + cute.crd2idx((at, across - begin_column), sD.layout)).align(4)
                    cute.autovec_copy(rounded, cute.make_tensor(left, cute.make_layout(2)))
            elif const_expr(self.out_align > 1):
                # A pair is aligned, and wholly inside or outside.
                if mine and column >= own_n and column < n:
                    target = (mD.iterator + cute.crd2idx((row, column), mD.layout)).align(4)
                    cute.autovec_copy(rounded, cute.make_tensor(target, cute.make_layout(2)))
            else:
                # Element by element.
                for j in cutlass.range_constexpr(2):
                    if mine and column + j >= own_n and column + j < n:
                        mD[row, column + j] = rounded[j]
        if const_expr(through_smem):
            # All results are in shared memory: a thread stores what others have computed.
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)
            self.store_lines(tile, sD, begin_column)

    @cute.jit
    def store_lines(self, tile: ResultTile, sD: cute.Tensor, begin_column: cutlass.Constexpr[int]):
        """Results in shared memory, 16 bytes a store; all of a thread's are read before the first is stored."""
        tid, mD = tile.tid, tile.operands.mD
        m, n = mD.shape
        own_n, first_column = tile.place.own_n, tile.place.column
        rows, threads, dtype = const_expr(self.smem.tile_m), const_expr(self.smem.consumer_threads), mD.element_type
        across = const_expr(cute.size(sD, mode=[1]) // WIDEST)
        vectors = const_expr(rows * across)
        each = const_expr(-(-vectors // threads))
        taken = cute.make_rmem_tensor((WIDEST, each), dtype)
        for i in cutlass.range_constexpr(each):
            vector = tid + i * threads
            if const_expr(vectors % threads != 0 and i == each - 1):
                vector = cutlass.min(vector, vectors - 1)  # stored twice, by another thread too
            left = sD.iterator + cute.crd2idx((vector // across, vector % across * WIDEST), sD.layout)
            left = cute.make_ptr(dtype, left.toint(), cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(left, cute.make_layout(WIDEST)), taken[None, i])
        for i in cutlass.range_constexpr(each):
            vector = tid + i * threads
            if const_expr(vectors % threads != 0 and i == each - 1):
                vector = cutlass.min(vector, vectors - 1)
            row, mine = self.row_of(vector // across, tile.place, m)
            column = first_column + begin_column + vector % across * WIDEST
            if mine and column >= own_n and column < n:
                target = mD.iterator + cute.crd2idx((row, column), mD.layout)
                store_16(target, cute.recast_tensor(taken[None, i], Int32))

    @cute.jit
    def row_of(self, at: Int32, place: Place, m: Int32) -> tuple[Int32, cutlass.Boolean]:
        """The row of out that is this tile's ``at``-th, and whether this tile stores it."""
        row, least = place.row + at, place.own_m
        if at >= self.head:  # the second box, without the rows of the first
            row, least = place.later + at - self.head, cutlass.max(place.own_m, place.row + self.head)
        return row, at < self.smem.tile_m and row >= least and row < m
