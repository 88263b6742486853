"""GEMM, specialized schedule: ``out = act(alpha * X @ W^T + beta * C + bias)`` by TMA and warpgroup MMA.

Schedule:
    One warp only issues TMA loads of X and W, ``stages`` ahead; ``groups`` warp groups multiply 64 rows of X (tokens)
    by ``tile_n`` rows of W each, straight from shared memory. They synchronise on two barriers a stage (full, empty),
    so no CTA-wide barrier is in the loop, and no instruction is spent on copies or fragments. ``tile_n`` is any
    multiple of 8 up to 256, whichever deals N out evenly: docs/notes/gemm.md#tiles.
    With ``split`` = 2 the two CTAs of a cluster share a tile's K. Each sends the other its sums of that one's half of
    the columns, into shared memory there, and adds up its own half, so the result is the same each time. The stores
    arrive on the receiver's barrier, without barriers of the cluster: docs/notes/gemm.md#clusters.
    With a ``norm`` X's fragments go through registers, where they are multiplied by the norm's weight, half a k-tile
    while the products of the other half run; rstd multiplies the sums. Squares of rows are summed by warps beside, from
    the stages (``parts/statistics.py``).
    A dependent launch prefetches its first ``ahead`` k-tiles of W into the L2 while the kernel ahead still runs, and
    releases the next kernel when its own last loads are under way (``ops/gemm/prefetch.py``).
    Where rows of out are aligned, results go through shared memory, in the place of the stages, and leave as whole
    lines: docs/notes/gemm.md#whole-lines.
    The TMA fills K's end with zeros. It is slow over rows that do not exist (docs/notes/gemm.md#boxes), so the last
    tile of either operand begins early enough to end where the operand does, and rows that another tile has too are not
    stored. X's ``rows`` come in two boxes, of which the second may overlap the first. Products of whatever lies behind
    them in shared memory, up to whole groups, are not stored either.

Source:
    The pairing of full and empty barriers, and a producer warp beside consumer groups, are CUTLASS's "warp
    specialized" mainloop for Hopper; tokens on the m64 side and odd tile widths are for few tokens.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from cutekernels.kernels.cute.parts.epilogue import Activation
from cutekernels.kernels.cute.parts.norm import RowNorm
from cutekernels.kernels.cute.parts.results import TileResults
from cutekernels.kernels.cute.parts.smem import ALIGNMENT, SWIZZLED, SWIZZLED_ROWS, SpecializedSmem
from cutekernels.kernels.cute.parts.statistics import StageSquares

GROUP = SpecializedSmem.GROUP_THREADS  # a warp group
SQUARING_WARPS = SpecializedSmem.SQUARING_WARPS
ROWS = SpecializedSmem.GROUP_ROWS  # of X that it multiplies
Box = tuple[cute.CopyAtom | None, cute.Tensor | None]


def swizzle() -> cute.Swizzle:
    """The 128-byte pattern: 8 rows' chunks of 16 bytes lie in different banks."""
    return cute.make_swizzle(3, 4, 3)


@dataclass(frozen=True)
class SpecializedGemm:
    """The body. ``rows`` of X are loaded: whole groups' 64, or about as many as there are where one tile has them all.
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
    alone: bool  # on its SM, whatever would fit
    ahead: int  # k-tiles of W prefetched before the turn
    norm: RowNorm | None = None  # of X's rows
    gamma_bytes: int = 0  # an element of its weight

    @property
    def weighted(self) -> bool:
        return self.norm is not None and self.norm.weighted

    @property
    def squaring(self) -> bool:
        return self.norm is not None and self.norm.statistics

    def gamma_type(self, dtype: type[cutlass.Numeric]) -> type[cutlass.Numeric]:
        return Float32 if self.gamma_bytes == 4 else dtype

    @property
    def groups(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def tile_m(self) -> int:
        """Rows that are multiplied."""
        return ROWS * self.groups

    @property
    def eager(self) -> bool:
        """Whether a stage is released before the wait for the next, where stages are few and bytes limit:
        docs/notes/gemm.md#eager (H200, 2026-11-22).
        """
        return self.groups == 2 and self.split == 2

    @property
    def head(self) -> int:
        """Rows of X's first box: half of them or more. All are tokens, since fewer take a smaller tile."""
        return max(SWIZZLED_ROWS, 1 << ((self.rows - 1).bit_length() - 1))

    @property
    def threads(self) -> int:
        """The groups, then the producer warp, then warps that square rows."""
        return GROUP * self.groups + 32 + 32 * SQUARING_WARPS * self.squaring

    @property
    def smem(self) -> SpecializedSmem:
        return SpecializedSmem(
            self.rows, self.tile_n, self.tile_k, self.stages, self.split, self.gamma_bytes, self.squaring, self.alone
        )

    def stages_of(self, rows: int, taken: int = 0) -> cute.Layout:
        """The stages of an operand of ``rows``, ``(rows, tile_k, STAGE)``, without the swizzle; ``taken`` of the rows,
        where that is given.
        """
        shape = ((SWIZZLED_ROWS, (taken or rows) // SWIZZLED_ROWS), (SWIZZLED, self.tile_k // SWIZZLED), self.stages)
        stride = ((SWIZZLED, SWIZZLED_ROWS * SWIZZLED), (1, rows * SWIZZLED), rows * self.tile_k)
        return cute.make_layout(shape, stride=stride)

    def boxed(self, op: cpasync.TmaCopyOp, mX: cute.Tensor, rows: int, taken: int) -> Box:
        """The TMA copy of ``taken`` of an operand's ``rows`` into a stage; None for none."""
        if taken == 0:
            return None, None
        one = cute.select(self.stages_of(rows, taken), mode=[0, 1])
        return cpasync.make_tiled_tma_atom(op, mX, cute.make_composed_layout(swizzle(), 0, one), (taken, self.tile_k))

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
        start = self.start
        mW = cute.make_tensor(mW.iterator, cute.select(mW.layout, mode=[1, 0]))  # (N, K)
        start(mD, mX, mW, mC, mBias, alpha, beta, None, None, None, stream)

    @cute.jit
    def normed(
        self,
        mD: cute.Tensor,  # (M, N)
        mX: cute.Tensor,  # (M, K)
        mW: cute.Tensor,  # (N, K)
        mBias: cute.Tensor | None,  # (N,)
        mGamma: cute.Tensor | None,  # (K,)
        mRstd: cute.Tensor | None,  # (M,)
        eps: Float32,
        stream: cuda.CUstream,
    ):
        """With ``norm`` in front of X."""
        start = self.start
        start(mD, mX, mW, None, mBias, Float32(1.0), Float32(0.0), mGamma, mRstd, eps, stream)

    @cute.jit
    def start(
        self,
        mD: cute.Tensor,
        mX: cute.Tensor,
        mW: cute.Tensor,  # (N, K)
        mC: cute.Tensor | None,
        mBias: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        mGamma: cute.Tensor | None,
        mRstd: cute.Tensor | None,
        eps: Float32 | None,
        stream: cuda.CUstream,
    ):
        dtype = mX.element_type
        pitched = self.pitched
        mX, mW = pitched(mX), pitched(mW)
        op = cpasync.CopyBulkTensorTileG2SOp()
        tma_w, tW = self.boxed(op, mW, self.tile_n, self.tile_n)
        head = self.boxed(op, mX, self.rows, self.head)
        tail = self.boxed(op, mX, self.rows, self.rows - self.head)
        tiled_mma = hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (self.groups, 1, 1), (ROWS, self.tile_n),
            warpgroup.OperandSource.SMEM if const_expr(self.norm is None) else warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        gamma = (None, None)
        if const_expr(self.weighted):
            gamma = cpasync.make_tiled_tma_atom(op, mGamma, cute.make_layout(self.tile_k), (self.tile_k,))
        tiles_m = cute.ceil_div(cute.size(mD, mode=[0]), self.tile_m)
        tiles_n = cute.ceil_div(cute.size(mD, mode=[1]), self.tile_n)
        epilogue = mD, tW, mC, mBias, alpha, beta
        self.kernel(*epilogue, tma_w, *head, *tail, tiled_mma, *gamma, mRstd, eps).launch(
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
        """``t`` ``(rows, K)``; a lone row, whose pitch may be anything, gets a valid one for the TMA."""
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
        tiled_mma: cute.TiledMma,
        tma_gamma: cute.CopyAtom | None,
        tGamma: cute.Tensor | None,  # (K,), coordinates
        mRstd: cute.Tensor | None,
        eps: Float32 | None,
    ):
        operands = (mD, mC, mBias, mRstd, alpha, beta, cute.size(tW, mode=[1]), eps)
        split, at_m, at_n = cute.arch.block_idx()
        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=ALIGNMENT)
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        producer = const_expr(self.groups * 4)
        stages = const_expr(self.stages)
        dtype = mD.element_type
        k_tiles = cute.ceil_div(cute.size(tW, mode=[1]), self.tile_k)
        first, end = split * k_tiles // self.split, (split + 1) * k_tiles // self.split

        # -- setup
        smem = self.smem
        at_x = cute.recast_ptr(storage, swizzle(), dtype)
        at_w = cute.recast_ptr(storage + smem.w_at, swizzle(), dtype)
        sX = cute.make_tensor(at_x, self.stages_of(self.rows, self.tile_m))  # (M, K, STAGE)
        sW = cute.make_tensor(at_w, self.stages_of(self.tile_n))  # (N, K, STAGE)
        sG = None
        if const_expr(self.weighted):
            sG = cute.make_tensor(
                cute.recast_ptr(storage + smem.gamma_at, dtype=self.gamma_type(dtype)),
                cute.make_layout((self.tile_k, stages)),
            )
        full = cute.recast_ptr(storage + smem.barriers_at, dtype=Int64)
        empty = full + stages
        inbox_full = cute.recast_ptr(storage + smem.inbox_barrier_at, dtype=Int64)
        squared_full = cute.recast_ptr(storage + smem.squares_barrier_at, dtype=Int64)
        if warp == producer:
            cpasync.prefetch_descriptor(tma_head)
            cpasync.prefetch_descriptor(tma_w)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, self.groups + SQUARING_WARPS * self.squaring)
                if const_expr(self.split > 1):
                    cute.arch.mbarrier_init(inbox_full, 1)
                if const_expr(self.squaring):
                    cute.arch.mbarrier_init(squared_full, SQUARING_WARPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(self.split > 1):
            cute.arch.cluster_arrive_relaxed()

        # -- this tile's beginning: the last tiles begin early, to end where the operands do
        m, n = mD.shape
        own_m, own_n = at_m * self.rows, at_n * self.tile_n
        row = cutlass.max(cutlass.min(own_m, m - self.rows), Int32(0))
        later = cutlass.min(own_m + self.head, m - (self.rows - self.head))  # the second box's
        column = cutlass.max(cutlass.min(own_n, n - self.tile_n), Int32(0))
        loads = self.loads
        boxes = [loads(tma_w, tW, sW, column, self.tile_n)]
        at_head = cute.make_tensor(at_x, self.stages_of(self.rows, self.head))
        boxes += [loads(tma_head, tHead, at_head, row, self.head)]
        if const_expr(tma_tail is not None):
            tail = const_expr(self.rows - self.head)
            at_tail = cute.make_tensor(at_x + self.head * SWIZZLED, self.stages_of(self.rows, tail))
            boxes += [loads(tma_tail, tTail, at_tail, later, tail)]
        if const_expr(self.weighted):
            gG = cute.local_tile(tGamma, (self.tile_k,), (None,))  # (tile_k, k)
            target, source = cpasync.tma_partition(tma_gamma, 0, cute.make_layout(1), sG, gG)
            boxes += [(tma_gamma, source, target)]
        if const_expr(self.dependent):
            prefetch = self.prefetch
            if warp == producer:
                prefetch(boxes, at_n * self.split + split, k_tiles, first, end)
        if const_expr(self.dependent):
            cute.arch.griddepcontrol_wait()

        if warp == producer:
            produce = self.produce
            produce(boxes, full, empty, first, end)
            if const_expr(self.dependent):
                cute.arch.griddepcontrol_launch_dependents()  # their loads then follow ours
            if const_expr(self.split > 1):
                cute.arch.cluster_wait()
        if const_expr(self.squaring):  # noqa: SIM102  known when compiled
            if warp > producer:
                squares = StageSquares(smem)
                run = squares.run
                run(tid - (GROUP * self.groups + 32), dtype, storage, split, first, end)
        if warp < producer:
            shape = tiled_mma.partition_shape_C((self.tile_m, self.tile_n))
            acc = cute.make_rmem_tensor(shape, Float32)  # ((2, 2, N / 8), 1, 1)
            consume = self.consume
            consume(tid, acc, tiled_mma, sX, sW, sG, full, empty, first, end)
            cD = cute.make_identity_tensor((self.tile_m, self.tile_n))
            tCcD = tiled_mma.get_slice(tid).partition_C(cD)  # ((2, 2, N / 8), 1, 1)
            place = (own_m, row, later, own_n, column)
            results = TileResults(smem, self.head, self.activation, self.out_align)
            deliver = results.deliver
            deliver(tid, acc, tCcD, split, storage, place, operands)

    @cute.jit
    def loads(self, tma: cute.CopyAtom, tX: cute.Tensor, sX: cute.Tensor, row: Int32, rows: cutlass.Constexpr[int]):
        """The loads of ``rows`` from ``row`` on: ``(copy, source (TMA, k), target (TMA, STAGE))``."""
        gX = cute.local_tile(cute.domain_offset((row, 0), tX), (rows, self.tile_k), (0, None))  # (rows, K, k)
        alone = cute.make_layout(1)
        target, source = cpasync.tma_partition(tma, 0, alone, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))
        return tma, source, target

    @cute.jit
    def prefetch(
        self,
        boxes: list[tuple[cute.CopyAtom, cute.Tensor, cute.Tensor]],
        number: Int32,
        k_tiles: Int32,
        first: Int32,
        end: Int32,
    ):
        """Before the turn: the first CTAs prefetch a k-tile each of what all read, and each CTA its first of W."""
        if const_expr(self.ahead > 0):
            if number < k_tiles:
                for tma, source, _ in boxes[1:]:
                    cute.prefetch(tma, source[None, number])
            tma, source, _ = boxes[0]
            for k_tile in cutlass.range(first, cutlass.min(first + self.ahead, end), unroll=1):
                cute.prefetch(tma, source[None, k_tile])

    @cute.jit
    def produce(
        self,
        boxes: list[tuple[cute.CopyAtom, cute.Tensor, cute.Tensor]],
        full: cute.Pointer,
        empty: cute.Pointer,
        first: Int32,
        end: Int32,
    ):
        """The producer: keeps the stages full."""
        stage, phase = Int32(0), Int32(1)  # the phase before a fresh barrier's first counts as complete
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
        tiled_mma: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        sG: cute.Tensor | None,
        full: cute.Pointer,
        empty: cute.Pointer,
        first: Int32,
        end: Int32,
    ):
        """The consumers' mainloop; a stage is released when the products of the next are under way, or where
        ``eager`` at once.
        """
        of_group = tiled_mma.get_slice(cute.arch.make_warp_uniform(tid // GROUP) * GROUP)
        rX = None
        if const_expr(self.norm is None):
            rX = tiled_mma.make_fragment_A(of_group.partition_A(sX))  # descriptors: (MMA, MMA_M, MMA_K, STAGE)
        else:
            thr_mma = tiled_mma.get_slice(tid)
            rX = thr_mma.make_fragment_A(thr_mma.partition_A(sX)[None, None, None, 0])  # ((2, 2, 2), 1, MMA_K)
        rW = tiled_mma.make_fragment_B(of_group.partition_B(sW))  # descriptors
        acc.fill(0.0)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        multiply_weighed = self.multiply_weighed
        chunks = None
        if const_expr(self.norm is not None):
            chunks = self.chunks(tid)
        stage, before, phase = Int32(0), Int32(0), Int32(0)
        for k_tile in cutlass.range(first, end, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            releases = k_tile > first and tid % GROUP == 0
            if const_expr(self.norm is None):
                warpgroup.fence()
                for kb in cutlass.range_constexpr(self.tile_k // 16):
                    cute.gemm(tiled_mma, acc, rX[None, None, kb, stage], rW[None, None, kb, stage], acc)
                warpgroup.commit_group()
                if const_expr(self.eager):
                    warpgroup.wait_group(0)
                    if tid % GROUP == 0:
                        cute.arch.mbarrier_arrive(empty + stage)
                else:
                    warpgroup.wait_group(1)
                    if releases:
                        cute.arch.mbarrier_arrive(empty + before)
            else:
                multiply_weighed(tid, acc, tiled_mma, sX, chunks, rX, rW, sG, stage, empty + before, releases)
            before = stage
            stage = stage + 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1
        warpgroup.wait_group(0)

    @cute.jit
    def chunks(self, tid: Int32) -> list[Int32]:
        """Offsets (elements) in a stage of X of the eight k's that this thread gives ``ldmatrix``, for each k-block in
        128 bytes. From the stages' layout the compiler would derive each anew, by four instructions a block.
        """
        lane, warp = tid % 32, tid // 32
        row = warp * 16 + lane % 16
        blocks = const_expr(min(self.tile_k, SWIZZLED) // 16)
        return [row * SWIZZLED + ((2 * i + lane // 16) ^ (row % SWIZZLED_ROWS)) * 8 for i in range(blocks)]

    @cute.jit
    def multiply_weighed(
        self,
        tid: Int32,
        acc: cute.Tensor,
        tiled_mma: cute.TiledMma,
        sX: cute.Tensor,
        chunks: list[Int32],
        rX: cute.Tensor,  # ((2, 2, 2), 1, MMA_K)
        rW: cute.Tensor,
        sG: cute.Tensor | None,
        stage: Int32,
        before: cute.Pointer,  # the empty barrier of the stage before, which is released if ``releases``
        releases: Boolean,
    ):
        """One stage with X's fragments weighed in registers, half of it while the products of the other half run."""
        dtype = sX.element_type
        blocks = const_expr(self.tile_k // 16)
        ldmatrix = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), dtype)
        count = const_expr(blocks // 2)
        raw = cute.make_rmem_tensor(((2, 2, 2), 1, count), dtype)
        at_x = cute.recast_ptr(sX.iterator, dtype=dtype) + stage * (self.rows * self.tile_k)
        weigh = self.norm.weigh
        if const_expr(self.weighted):
            fetch = self.norm.fetch
            rG = cute.make_rmem_tensor(((2, 2), count), sG.element_type)
        for half in cutlass.range_constexpr(2):
            begin = const_expr(half * count)
            for i in cutlass.range_constexpr(count):
                block, chunk = const_expr(divmod(begin + i, len(chunks)))
                at = at_x + chunks[chunk] + block * (self.rows * SWIZZLED)
                at = cute.make_ptr(dtype, at.toint(), cute.AddressSpace.smem, assumed_align=16)
                target = cute.make_tensor(raw.iterator + 8 * i, cute.make_layout(8))
                cute.copy(ldmatrix, cute.make_tensor(at, cute.make_layout(8)), target)
            if const_expr(self.weighted):
                fetch(tid % 32, sG, stage, begin, rG)
            if const_expr(half == 0):
                warpgroup.wait_group(0)
                if releases:
                    cute.arch.mbarrier_arrive(before)
            for i in cutlass.range_constexpr(count):
                if const_expr(self.weighted):
                    weigh(raw[None, None, i], rG[None, i], rX[None, None, begin + i])
                else:
                    rX[None, None, begin + i].store(raw[None, None, i].load())
            warpgroup.fence()
            for i in cutlass.range_constexpr(begin, begin + count):
                cute.gemm(tiled_mma, acc, rX[None, None, i], rW[None, None, i, stage], acc)
            warpgroup.commit_group()
