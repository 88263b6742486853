"""GEMM, specialized schedule: ``out = act(alpha * X @ W^T + beta * C + bias)`` by TMA and warpgroup MMA.

Schedule:
    One warp asks the TMA for tiles of X and W, ``stages`` ahead, and does nothing else; ``groups`` warp groups multiply
    64 rows of X (tokens) by ``tile_n`` rows of W each, straight from shared memory. They meet on two barriers a stage
    alone (full, empty), so no barrier of the CTA is in the loop, and no instruction is spent on copies or fragments.
    ``tile_n`` is any multiple of 16 up to 256: what deals N out evenly. H200, 64 tokens, N = 18944, K = 3584: 132 tiles
    of 144 rows are one for each SM; with warp MMA such a tile is bound by its SM's instructions and not by DRAM, and
    takes 39.0 us (2026-11-22).
    ``split`` CTAs of a cluster share a tile's K. Each sends the others its sums of their shares, into shared memory of
    theirs, and adds up an equal share of everybody's in the order of K, so the result is the same each time. As stores
    that ring the receiver's barrier this takes 0.7 us less than with barriers of the cluster (64 tokens x 3584: 9.1 us
    and 8.4, 2026-11-22).
    As a dependent launch a CTA asks the L2 for its first ``ahead`` k-tiles of W while the kernel ahead still runs, and
    lets the next kernel in when its own last loads are on their way (``ops/gemm_ahead.py``).
    Where rows of out are aligned its results go through shared memory, in the place of the stages, and leave as whole
    lines. In pairs, as the MMA has them, they cost 0.9 us more at 64 tokens of 18944 columns (2026-11-22).
    K's end arrives as zeros. The TMA takes long over rows that do not exist (33 tokens of a box of 48: 9.9 us where 40
    took 8.6; 65 of 96: 14.0 and 10.4), so the last tile of either operand begins early enough to end where the operand
    does, and what another tile has too is not stored. X's ``rows`` come in two boxes, of which the second may overlap
    the first. The products of what lies behind them in shared memory, up to whole groups, are not stored either.

Source:
    The pairing of full and empty barriers, and a producer warp beside consumer groups, are CUTLASS's "warp
    specialized" mainloop for Hopper; tokens on the m64 side and odd tile widths are for few tokens.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cutekernels.kernels.cute.parts.epilogue import Activation
from cutekernels.kernels.cute.parts.smem import ALIGNMENT, SpecializedSmem

GROUP = 128  # threads of a warp group
WIDEST = 8  # elements in 16 bytes
ROWS = SpecializedSmem.GROUP_ROWS  # of X that a warp group multiplies
Box = tuple[cute.CopyAtom | None, cute.Tensor | None]
SWIZZLED_ROWS, SWIZZLED = 8, 64  # an atom of the 128-byte swizzle: rows, elements of K


@dataclass(frozen=True)
class SpecializedGemm:
    """The body. ``rows`` of X are loaded: whole groups' 64, or where one tile has all there are, about as many.
    ``out_align`` columns of out are one aligned store.
    """

    rows: int
    tile_n: int
    tile_k: int
    stages: int
    split: int
    dependent: bool  # launched under programmatic dependent launch
    activation: Activation
    out_align: int
    ctas_per_sm: int
    ahead: int  # k-tiles of W that are asked for before the turn comes

    @property
    def groups(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def tile_m(self) -> int:
        """Rows that are multiplied."""
        return ROWS * self.groups

    @property
    def head(self) -> int:
        """Rows of X's first box: half of them or more, and all of them tokens, since fewer take a smaller tile."""
        return max(SWIZZLED_ROWS, 1 << ((self.rows - 1).bit_length() - 1))

    @property
    def threads(self) -> int:
        """The producer warp comes last."""
        return GROUP * self.groups + 32

    @property
    def smem(self) -> SpecializedSmem:
        return SpecializedSmem(self.rows, self.tile_n, self.tile_k, self.stages, self.split)

    def layouts(self, dtype: type[cutlass.Numeric]) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """Of the stages of X and W: ``(rows, tile_k, STAGE)``, as TMA writes and warpgroup MMA reads them."""
        tile = (self.rows, self.tile_n, self.tile_k)
        return (
            hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, dtype, self.stages),
            hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, dtype, self.stages),
        )

    def of_rows(self, rows: int) -> cute.Layout:
        """The stages of X as if they had ``rows``: ``(rows, tile_k, STAGE)``."""
        shape = ((SWIZZLED_ROWS, rows // SWIZZLED_ROWS), (SWIZZLED, self.tile_k // SWIZZLED), self.stages)
        stride = ((SWIZZLED, SWIZZLED_ROWS * SWIZZLED), (1, self.rows * SWIZZLED), self.rows * self.tile_k)
        return cute.make_layout(shape, stride=stride)

    def boxed(self, op: cpasync.TmaCopyOp, mX: cute.Tensor, layout_x: cute.ComposedLayout, rows: int) -> Box:
        """The TMA's copy of ``rows`` of X into a stage; None for none."""
        if rows == 0:
            return None, None
        one = cute.make_composed_layout(layout_x.inner, 0, cute.select(self.of_rows(rows), mode=[0, 1]))
        return cpasync.make_tiled_tma_atom(op, mX, one, (rows, self.tile_k))

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # (M, N)
        mX: cute.Tensor,  # (M, K)
        mW: cute.Tensor,  # (K, N)
        mC: cute.Tensor | None,  # (M, N)
        mBias: cute.Tensor | None,  # (N,)
        alpha: Float32,
        beta: Float32,
        stream: cuda.CUstream,
    ):
        dtype = mX.element_type
        layout_x, layout_w = self.layouts(dtype)
        pitched = self.pitched
        mX = pitched(mX)
        mW = pitched(cute.make_tensor(mW.iterator, cute.select(mW.layout, mode=[1, 0])))  # (N, K)
        op = cpasync.CopyBulkTensorTileG2SOp()
        tma_w, tW = cpasync.make_tiled_tma_atom(
            op, mW, cute.slice_(layout_w, (None, None, 0)), (self.tile_n, self.tile_k)
        )
        head = self.boxed(op, mX, layout_x, self.head)
        tail = self.boxed(op, mX, layout_x, self.rows - self.head)
        tiled_mma = hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (self.groups, 1, 1), (ROWS, self.tile_n)
        )
        tiles_m = cute.ceil_div(cute.size(mD, mode=[0]), self.tile_m)
        tiles_n = cute.ceil_div(cute.size(mD, mode=[1]), self.tile_n)
        self.kernel(mD, tW, mC, mBias, alpha, beta, tma_w, *head, *tail, layout_x, layout_w, tiled_mma).launch(
            grid=[self.split, tiles_m, tiles_n],
            block=[self.threads, 1, 1],
            cluster=[self.split, 1, 1],
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.jit
    def pitched(self, t: cute.Tensor) -> cute.Tensor:
        """``t`` ``(rows, K)``; a lone row, whose pitch may be anything, gets one that the TMA takes."""
        rows, k = t.shape
        pitch = k if rows == 1 else t.stride[0]
        return cute.make_tensor(
            t.iterator, cute.make_layout((rows, k), stride=(cute.assume(pitch, divby=SWIZZLED_ROWS), 1))
        )

    @cute.kernel
    def kernel(
        self,
        mD: cute.Tensor,
        tW: cute.Tensor,  # (N, K), coordinates
        mC: cute.Tensor | None,
        mBias: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        tma_w: cute.CopyAtom,
        tma_head: cute.CopyAtom,
        tHead: cute.Tensor,  # (M, K), coordinates
        tma_tail: cute.CopyAtom | None,
        tTail: cute.Tensor | None,
        layout_x: cute.ComposedLayout,
        layout_w: cute.ComposedLayout,
        tiled_mma: cute.TiledMma,
    ):
        tid, _, _ = cute.arch.thread_idx()
        split, at_m, at_n = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        producer = const_expr(self.groups * 4)
        stages = const_expr(self.stages)
        dtype = mD.element_type
        k_tiles = cute.ceil_div(cute.size(tW, mode=[1]), self.tile_k)
        first, end = split * k_tiles // self.split, (split + 1) * k_tiles // self.split

        # -- setup
        smem = self.smem
        storage = SmemAllocator().allocate(smem.total_bytes, byte_alignment=ALIGNMENT)
        base = cute.recast_ptr(storage, dtype=dtype)
        at_x = cute.recast_ptr(base, layout_x.inner, dtype)
        sX = cute.make_tensor(at_x, self.of_rows(self.tile_m))  # (M, K, STAGE)
        sW = cute.make_tensor(
            cute.recast_ptr(base + cute.cosize(layout_x), layout_w.inner, dtype), layout_w.outer
        )  # (N, K, STAGE)
        full = cute.recast_ptr(storage + smem.barriers_at, dtype=Int64)
        empty = full + stages
        met = empty + stages
        if warp == producer:
            cpasync.prefetch_descriptor(tma_head)
            cpasync.prefetch_descriptor(tma_w)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, self.groups)
                if const_expr(self.split > 1):
                    cute.arch.mbarrier_init(met, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(self.split > 1):
            cute.arch.cluster_arrive_relaxed()

        # -- where this tile begins: the last ones early, so that they end where the operands do
        m, n = mD.shape
        own_m, own_n = at_m * self.rows, at_n * self.tile_n
        row = cutlass.max(cutlass.min(own_m, m - self.rows), Int32(0))
        later = cutlass.min(own_m + self.head, m - (self.rows - self.head))  # the second box's
        column = cutlass.max(cutlass.min(own_n, n - self.tile_n), Int32(0))
        loads = self.loads
        if const_expr(self.dependent):
            if const_expr(self.ahead > 0):  # noqa: SIM102  known when compiled
                if warp == producer:
                    _, early, _ = loads(tma_w, tW, sW, column, self.tile_n)
                    for k_tile in cutlass.range(first, cutlass.min(first + self.ahead, end), unroll=1):
                        cute.prefetch(tma_w, early[None, k_tile])
            cute.arch.griddepcontrol_wait()

        if warp == producer:
            boxes = [loads(tma_w, tW, sW, column, self.tile_n)]
            at_head = cute.make_tensor(at_x, self.of_rows(self.head))
            boxes += [loads(tma_head, tHead, at_head, row, self.head)]
            if const_expr(tma_tail is not None):
                tail = const_expr(self.rows - self.head)
                at_tail = cute.make_tensor(at_x + self.head * SWIZZLED, self.of_rows(tail))
                boxes += [loads(tma_tail, tTail, at_tail, later, tail)]
            produce = self.produce
            produce(boxes, full, empty, first, end)
            if const_expr(self.dependent):
                cute.arch.griddepcontrol_launch_dependents()  # whose CTAs' loads follow ours
            if const_expr(self.split > 1):
                cute.arch.cluster_wait()
        else:
            consume, finish = self.consume, self.finish
            thr_mma = tiled_mma.get_slice(cute.arch.make_warp_uniform(tid // GROUP) * GROUP)
            shape = tiled_mma.partition_shape_C((self.tile_m, self.tile_n))
            acc = cute.make_rmem_tensor(shape, Float32)  # ((2, 2, N / 8), 1, 1)
            consume(tid, acc, thr_mma, tiled_mma, sX, sW, full, empty, first, end)
            cD = cute.make_identity_tensor((self.tile_m, self.tile_n))
            tCcD = tiled_mma.get_slice(tid).partition_C(cD)  # ((2, 2, N / 8), 1, 1)
            place = (own_m, row, later, own_n, column)
            if const_expr(self.split == 1):
                finish(tid, acc, tCcD, 0, storage, place, mD, mC, mBias, alpha, beta)
            else:
                meet = self.meet
                meet(tid, acc, tCcD, split, storage, place, mD, mC, mBias, alpha, beta)

    @cute.jit
    def loads(self, tma: cute.CopyAtom, tX: cute.Tensor, sX: cute.Tensor, row: Int32, rows: cutlass.Constexpr[int]):
        """How ``rows`` from ``row`` on come into the stages: ``(copy, source (TMA, k), target (TMA, STAGE))``."""
        gX = cute.local_tile(cute.domain_offset((row, 0), tX), (rows, self.tile_k), (0, None))  # (rows, K, k)
        alone = cute.make_layout(1)
        target, source = cpasync.tma_partition(tma, 0, alone, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))
        return tma, source, target

    @cute.jit
    def produce(
        self,
        boxes: list[tuple[cute.CopyAtom, cute.Tensor, cute.Tensor]],
        full: cute.Pointer,
        empty: cute.Pointer,
        first: Int32,
        end: Int32,
    ):
        """Keeps the stages full."""
        stage, phase = Int32(0), Int32(1)  # of a fresh barrier, the phase before counts as complete
        for k_tile in cutlass.range(first, end, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.smem.stage_bytes)
            for tma, source, target in boxes:
                cute.copy(tma, source[None, k_tile], target[None, stage], tma_bar_ptr=full + stage)
            stage = stage + 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1

    @cute.jit
    def consume(
        self,
        tid: Int32,
        acc: cute.Tensor,
        thr_mma: cute.TiledMma,
        tiled_mma: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        first: Int32,
        end: Int32,
    ):
        """Multiplies what comes; a stage is given back when the products of the next are under way."""
        rX = tiled_mma.make_fragment_A(thr_mma.partition_A(sX))  # descriptors: (MMA, MMA_M, MMA_K, STAGE)
        rW = tiled_mma.make_fragment_B(thr_mma.partition_B(sW))
        acc.fill(0.0)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        stage, before, phase = Int32(0), Int32(0), Int32(0)
        for k_tile in cutlass.range(first, end, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(self.tile_k // 16):
                cute.gemm(tiled_mma, acc, rX[None, None, kb, stage], rW[None, None, kb, stage], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if k_tile > first and tid % GROUP == 0:
                cute.arch.mbarrier_arrive(empty + before)
            before = stage
            stage = stage + 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1
        warpgroup.wait_group(0)

    @cute.jit
    def meet(
        self,
        tid: Int32,
        acc: cute.Tensor,
        tCcD: cute.Tensor,
        split: Int32,
        storage: cute.Pointer,
        place: tuple[Int32, ...],
        mD: cute.Tensor,
        mC: cute.Tensor | None,
        mBias: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
    ):
        """The cluster's sums: each CTA adds up a share of all, and sends the others theirs."""
        count = const_expr(cute.size(acc))
        share = const_expr(self.smem.share)
        members = const_expr(GROUP * self.groups)
        inbox = cute.recast_ptr(storage + self.smem.inbox_at, dtype=Float32)
        met = cute.recast_ptr(storage + self.smem.barriers_at, dtype=Int64) + 2 * self.stages
        bits = cute.recast_tensor(acc, Int32)
        cute.arch.cluster_wait()  # all have set up their barriers
        for part in cutlass.range_constexpr(self.split):
            begin = const_expr(part * share)
            size = const_expr(max(0, min(share, count - part * share)))
            if split != part:
                slot = split
                if split > part:
                    slot = split - 1
                theirs = inbox + slot * share * members + 4 * tid
                for i in cutlass.range_constexpr(0, size, 4):
                    four = tuple([bits[begin + i + j] for j in range(4)])
                    cute.arch.store_async_dsmem((theirs + members * i).align(16), four, met, part)
        finish = self.finish
        for part in cutlass.range_constexpr(self.split):
            if split == part:
                begin = const_expr(part * share)
                size = const_expr(max(0, min(share, count - part * share)))
                if const_expr(size > 0):
                    if tid == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(met, (self.split - 1) * size * members * 4)
                    cute.arch.mbarrier_wait(met, 0)
                    some = cute.make_rmem_tensor(size, Float32)
                    some.fill(0.0)
                    for s in cutlass.range_constexpr(self.split):
                        if const_expr(s == part):
                            for i in cutlass.range_constexpr(size):
                                some[i] = some[i] + acc[begin + i]
                        else:
                            slot = const_expr(s if s < part else s - 1)
                            for i in cutlass.range_constexpr(0, size, 4):
                                taken = cute.make_rmem_tensor(4, Float32)
                                left = (inbox + slot * share * members + members * i + 4 * tid).align(16)
                                cute.autovec_copy(cute.make_tensor(left, cute.make_layout(4)), taken)
                                for j in cutlass.range_constexpr(4):
                                    some[i + j] = some[i + j] + taken[j]
                    finish(tid, some, tCcD, begin, storage, place, mD, mC, mBias, alpha, beta)

    @cute.jit
    def finish(
        self,
        tid: Int32,
        acc: cute.Tensor,
        tCcD: cute.Tensor,
        begin: cutlass.Constexpr[int],
        storage: cute.Pointer,
        place: tuple[Int32, ...],
        mD: cute.Tensor,
        mC: cute.Tensor | None,
        mBias: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
    ):
        """Scales, adds, activates, rounds and stores ``acc``, this thread's sums from number ``begin`` on.

        In pairs, as the MMA leaves them; where out is aligned by way of shared memory, so that 16 bytes are a store.
        """
        n = cute.size(mD, mode=[1])
        _, _, _, own_n, first_column = place
        dtype = mD.element_type
        activate, row_of = self.activation.apply, self.row_of
        through = const_expr(self.out_align == WIDEST)
        members = const_expr(GROUP * self.groups)
        width = const_expr(cute.size(acc) // self.smem.SUMS_PER_BLOCK * 8)
        begin_column = const_expr(begin // self.smem.SUMS_PER_BLOCK * 8)
        sD = cute.make_tensor(
            cute.recast_ptr(storage, dtype=dtype),
            cute.make_layout((self.rows, width), stride=(self.smem.out_pitch, 1)),
        )
        if const_expr(through):
            cute.arch.barrier(barrier_id=1, number_of_threads=members)  # all have read their stages
        for i in cutlass.range_constexpr(0, cute.size(acc), 2):
            at, across = tCcD[begin + i]
            row, mine = row_of(at, place, cute.size(mD, mode=[0]))
            column = first_column + across
            pair = cute.make_rmem_tensor(2, Float32)
            for j in cutlass.range_constexpr(2):
                pair[j] = alpha * acc[i + j]
                if const_expr(mC is not None or mBias is not None):  # noqa: SIM102  known when compiled
                    if mine and column + j >= own_n and column + j < n:
                        if const_expr(mC is not None):
                            pair[j] = pair[j] + beta * mC[row, column + j].to(Float32)
                        if const_expr(mBias is not None):
                            pair[j] = pair[j] + mBias[column + j].to(Float32)
            rounded = cute.make_rmem_tensor(2, dtype)
            rounded.store(activate(pair.load()).to(dtype))
            if const_expr(through):
                if at < self.rows:
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
            across = const_expr(width // WIDEST)
            for vector in cutlass.range(tid, self.rows * across, members, unroll=2):
                at = vector // across
                row, mine = row_of(at, place, cute.size(mD, mode=[0]))
                inside = vector % across * WIDEST
                column = first_column + begin_column + inside
                if mine and column >= own_n and column < n:
                    taken = cute.make_rmem_tensor(WIDEST, dtype)
                    left = (sD.iterator + cute.crd2idx((at, inside), sD.layout)).align(16)
                    target = (mD.iterator + cute.crd2idx((row, column), mD.layout)).align(16)
                    cute.autovec_copy(cute.make_tensor(left, cute.make_layout(WIDEST)), taken)
                    cute.autovec_copy(taken, cute.make_tensor(target, cute.make_layout(WIDEST)))

    @cute.jit
    def row_of(self, at: Int32, place: tuple[Int32, ...], m: Int32) -> tuple[Int32, cutlass.Boolean]:
        """Which row of out is this tile's ``at``-th, and whether it is this tile's to store."""
        own_m, first_row, later, _, _ = place
        row, least = first_row + at, own_m
        if at >= self.head:  # of the second box, what the first has not
            row, least = later + at - self.head, cutlass.max(own_m, first_row + self.head)
        return row, at < self.rows and row >= least and row < m
