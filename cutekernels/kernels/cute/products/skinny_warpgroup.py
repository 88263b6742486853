"""GEMM, skinny_warpgroup schedule: ``out = act(alpha * X @ W^T + beta * C + bias)`` by TMA and warpgroup MMA.

For few tokens. A CTA has one tile: ``tile_m`` of X (tokens, the MMA's side of 64) by ``tile_n`` rows of W, any multiple
of 8 up to 256, whichever deals N out evenly: docs/notes/gemm.md#tiles. There is no CTA-wide barrier in the loop, and no
instruction is spent on copies or fragments.

Roles:
    Consumer warp groups, ``groups`` of them: 64 rows of X each, straight from shared memory, then the results.
    Producer warp, behind them: only issues TMA loads of X, W and a norm's weight, ``stages`` ahead.
    Three squaring warps, behind it, where a norm sums squares: they read the same stages (``parts/statistics.py``).

Barriers (mbarriers; one phase bit each):
    full[stage]: 1 arrival, the producer's with the stage's bytes; TMA completes it. Consumers and squaring warps wait.
    empty[stage]: 1 arrival of each consumer group and of each squaring warp. The producer waits.
    inbox_full: 1 arrival, of the receiving CTA's thread 0 with the bytes that the other CTAs send (``split`` > 1).
    squared_full: 1 arrival of each squaring warp, the first one's with the bytes that the other CTAs send.
    Named barrier 1: all consumer threads, around results in shared memory.

One k-tile, producer: wait empty[stage]; arrive on full[stage] with the bytes; TMA each box; next stage.
One k-tile, consumer: wait full[stage]; issue the wgmmas, commit; wait for those of the k-tile before; arrive on its
    empty. Where ``eager``: wait for these at once, arrive on this stage's.
    With a ``norm`` X's fragments go through registers, where they are multiplied by the norm's weight, half a k-tile
    while the products of the other half run; rstd multiplies the accumulators.
Tile's end, consumer (``parts/results.py``): exchange with the other CTAs; scale, add, activate, round; store. Where
    rows of out are aligned, by way of shared memory, in the place of the stages, as whole lines:
    docs/notes/gemm.md#whole-lines.

Cluster: the ``split`` CTAs of a cluster share a tile's K. Each sends every other its accumulators of that one's
columns, into shared memory there, and adds up its own columns in a fixed order, so the result is the same each time.
The stores arrive on the receiver's barrier. Two CTAs need no barrier of the cluster (docs/notes/gemm.md#clusters). What
more of them send takes the place of stages, so all threads of the cluster arrive once they have read theirs, and
consumers wait for that before they send: docs/notes/gemm.md#many-ctas-to-a-tile.

Dependent launch (PDL): the producer prefetches the first ``prefetch_tiles`` k-tiles of W into the L2 while the previous
kernel still runs, and lets the next kernel start when its own last loads are under way
(``ops/products/schedules/schedule.py``).

Ends: the TMA fills a ragged K with zeros. It is slow over rows that do not exist (docs/notes/gemm.md#boxes), so the
last tile of either operand begins early enough to end where the operand does, and rows that another tile has too are
not stored. X's ``tile_m`` rows come in two boxes, of which the second may overlap the first. Products of whatever lies
behind them in shared memory, up to whole groups, are not stored either (``TileResults.row_of``).

Refuses (``ops/products/schedules/skinny_warpgroup.py``): GPUs without wgmma; operands that are not K-major with 16-byte
aligned rows; an out that is not N-major; a batch, 64-bit strides, fp16 accumulators; K = 0.

Source:
    The pairing of full and empty barriers, and a producer warp beside consumer groups, are CUTLASS's "warp
    specialized" mainloop for Hopper; tokens on the m64 side and odd tile widths are for few tokens.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.dependent import pdl_launch, pdl_wait
from cutekernels.kernels.cute.parts.epilogue import Epilogue, EpilogueOperands
from cutekernels.kernels.cute.parts.gemm_arguments import GemmBody, GemmOperands, NormOperands, transpose
from cutekernels.kernels.cute.parts.norm import RowNorm
from cutekernels.kernels.cute.parts.pipeline import Position, StagePipeline
from cutekernels.kernels.cute.parts.ptx import kept_move
from cutekernels.kernels.cute.parts.results import Place, ResultOperands, ResultTile, TileResults
from cutekernels.kernels.cute.parts.smem import ALIGNMENT, SWIZZLED, SWIZZLED_ROWS, SkinnyWarpgroupSmem
from cutekernels.kernels.cute.parts.statistics import StageSquares
from cutekernels.kernels.cute.parts.warp_groups import GROUP, ROWS, BoxLoad, TmaTensor, WarpGroupBody, wgmma

SQUARING_WARPS = SkinnyWarpgroupSmem.SQUARING_WARPS


def swizzle() -> cute.Swizzle:
    """The 128-byte pattern: 8 rows' chunks of 16 bytes lie in different banks."""
    return cute.make_swizzle(3, 4, 3)


@dataclass(frozen=True)
class Shared:
    """Stages and mbarriers of a CTA in shared memory."""

    storage: cute.Pointer
    sX: cute.Tensor  # (M, K, STAGE)
    sW: cute.Tensor  # (N, K, STAGE)
    sG: cute.Tensor | None  # (K, STAGE), the norm's weight
    full: cute.Pointer  # of each stage
    empty: cute.Pointer  # of each stage
    inbox_full: cute.Pointer
    squared_full: cute.Pointer


@dataclass(frozen=True)
class Consumer:
    """State of a consumer thread in the mainloop."""

    tid: Int32
    shared: Shared
    tiled_mma: cute.TiledMma
    acc: cute.Tensor  # ((2, 2, N / 8), 1, 1)
    rX: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K, STAGE); with a norm fragments ((2, 2, 2), 1, MMA_K)
    rW: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K, STAGE)
    chunks: list[Int32] | None  # with a norm: offsets in a stage of X


@dataclass(frozen=True)
class SkinnyWarpgroupGemm(GemmBody, WarpGroupBody):
    """The body. ``smem.tile_m`` rows of X are loaded: whole groups' 64, or about as many as there are where one tile
    has them all. ``smem.rows`` are multiplied. ``out_align`` columns of out are one aligned store.
    """

    smem: SkinnyWarpgroupSmem
    dependent: bool  # launched under programmatic dependent launch
    epilogue: Epilogue
    out_align: int
    ctas_per_sm: int
    prefetch_tiles: int  # k-tiles of W prefetched before pdl_wait
    norm: RowNorm | None = None  # of X's rows

    @property
    def groups(self) -> int:
        return self.smem.rows // ROWS

    @property
    def eager(self) -> bool:
        """Whether a stage is released before the wait for the next, where stages are few and bytes limit:
        docs/notes/gemm.md#eager (H200, 2026-11-22).
        """
        return self.groups == 2 and self.smem.split == 2

    @property
    def head(self) -> int:
        """Rows of X's first box: half of them or more. All are tokens, since fewer take a smaller tile."""
        return max(SWIZZLED_ROWS, 1 << ((self.smem.tile_m - 1).bit_length() - 1))

    @property
    def threads(self) -> int:
        """The groups, then the producer warp, then warps that square rows."""
        return GROUP * self.groups + 32 + 32 * SQUARING_WARPS * self.squaring

    @property
    def cluster_shape(self) -> list[int]:
        return [self.smem.split, 1, 1]

    @property
    def pipeline(self) -> StagePipeline:
        return StagePipeline(self.smem.stages, self.smem.stage_bytes, self.groups + SQUARING_WARPS * self.squaring, 1)

    @property
    def results(self) -> TileResults:
        return TileResults(self.smem, self.head, self.epilogue, self.out_align)

    def stages_of(self, rows: int, taken: int = 0) -> cute.Layout:
        """The stages of an operand of ``rows``, ``(rows, tile_k, STAGE)``, without the swizzle; ``taken`` of the rows,
        where that is given.
        """
        along_k = (SWIZZLED, self.smem.tile_k // SWIZZLED)
        shape = ((SWIZZLED_ROWS, (taken or rows) // SWIZZLED_ROWS), along_k, self.smem.stages)
        stride = ((SWIZZLED, SWIZZLED_ROWS * SWIZZLED), (1, rows * SWIZZLED), rows * self.smem.tile_k)
        return cute.make_layout(shape, stride=stride)

    def tma_of(self, op: cpasync.TmaCopyOp, mX: cute.Tensor, rows: int, taken: int) -> TmaTensor | None:
        """The TMA copy of ``taken`` of an operand's ``rows`` into a stage; None for none."""
        if taken == 0:
            return None
        one = cute.select(self.stages_of(rows, taken), mode=[0, 1])
        stage = cute.make_composed_layout(swizzle(), 0, one)
        return TmaTensor(*cpasync.make_tiled_tma_atom(op, mX, stage, (taken, self.smem.tile_k)))

    @cute.jit
    def extend(self, given: GemmOperands, stream: cuda.CUstream):
        mW, norm = given.mB, given.norm
        if const_expr(norm is None):
            mW, norm = transpose(mW), NormOperands()  # (N, K)
        mX, mW = self.pitched(given.mA), self.pitched(mW)
        # W comes in one box, X in two: a power of two of its rows, then the others.
        op = cpasync.CopyBulkTensorTileG2SOp()
        weight = self.tma_of(op, mW, self.smem.tile_n, self.smem.tile_n)
        head = self.tma_of(op, mX, self.smem.tile_m, self.head)
        tail = self.tma_of(op, mX, self.smem.tile_m, self.smem.tile_m - self.head)
        source = warpgroup.OperandSource.SMEM if const_expr(self.norm is None) else warpgroup.OperandSource.RMEM
        tiled_mma = wgmma(mX.element_type, self.smem.tile_n, groups=self.groups, source=source)
        gamma = None
        if const_expr(self.weighted):
            one = cute.make_layout(self.smem.tile_k)
            gamma = TmaTensor(*cpasync.make_tiled_tma_atom(op, norm.mGamma, one, (self.smem.tile_k,)))
        tiles_m = cute.ceil_div(cute.size(given.mD, mode=[0]), self.smem.rows)
        tiles_n = cute.ceil_div(cute.size(given.mD, mode=[1]), self.smem.tile_n)
        tmas, norm = (weight.tma, head, tail), replace(norm, mGamma=None)
        arguments = (given.mD, weight.coordinates, given.epilogue, *tmas, tiled_mma, gamma, norm)
        self.launch(arguments, [self.smem.split, tiles_m, tiles_n], stream)

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
        epilogue: EpilogueOperands,
        tma_w: cute.CopyAtom,
        head: TmaTensor,  # (M, K)
        tail: TmaTensor | None,  # (M, K)
        tiled_mma: cute.TiledMma,
        gamma: TmaTensor | None,  # (K,)
        norm: NormOperands,
    ):
        operands = ResultOperands(mD, epilogue, norm.mRstd, cute.size(tW, mode=[1]), norm.eps)
        split, tile_m, tile_n = cute.arch.block_idx()
        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=ALIGNMENT)
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        producer = const_expr(self.groups * 4)
        dtype = mD.element_type
        k_tiles = cute.ceil_div(cute.size(tW, mode=[1]), self.smem.tile_k)
        first, end = split * k_tiles // self.smem.split, (split + 1) * k_tiles // self.smem.split  # this CTA's k-tiles

        shared = self.set_up(warp, storage, dtype, (head.tma, tma_w))

        # -- this tile's beginning: the last tiles begin early, to end where the operands do
        m, n = mD.shape
        own_m, own_n = tile_m * self.smem.tile_m, tile_n * self.smem.tile_n
        row = cutlass.max(cutlass.min(own_m, m - self.smem.tile_m), Int32(0))
        later = cutlass.min(own_m + self.head, m - (self.smem.tile_m - self.head))  # the second box's
        column = cutlass.max(cutlass.min(own_n, n - self.smem.tile_n), Int32(0))
        # A stage's boxes: W, X's first rows, X's other rows, the norm's weight.
        at_x = shared.sX.iterator
        boxes = [TmaTensor(tma_w, tW).loads(shared.sW, column, (self.smem.tile_n, self.smem.tile_k))]
        at_head = cute.make_tensor(at_x, self.stages_of(self.smem.tile_m, self.head))  # (M, K, STAGE)
        boxes += [head.loads(at_head, row, (self.head, self.smem.tile_k))]
        if const_expr(tail is not None):
            others = const_expr(self.smem.tile_m - self.head)
            layout = self.stages_of(self.smem.tile_m, others)
            at_tail = cute.make_tensor(at_x + self.head * SWIZZLED, layout)  # (M, K, STAGE)
            boxes += [tail.loads(at_tail, later, (others, self.smem.tile_k))]
        if const_expr(self.weighted):
            gG = cute.local_tile(gamma.coordinates, (self.smem.tile_k,), (None,))  # (tile_k, k)
            target, source = cpasync.tma_partition(gamma.tma, 0, cute.make_layout(1), shared.sG, gG)
            boxes += [BoxLoad(gamma.tma, source, target)]
        if const_expr(self.dependent):  # noqa: SIM102  known when compiled
            # PDL: before the wait only prefetches, which are right whatever the previous kernel still writes: they
            # bring lines to the L2, where its writes go too.
            if warp == producer:
                self.prefetch_l2(boxes, tile_n * self.smem.split + split, k_tiles, first, end)
        if const_expr(self.dependent):
            pdl_wait()

        if warp == producer:
            # -- producer
            self.produce(boxes, shared, first, end)
            if const_expr(self.dependent):
                pdl_launch()
            if const_expr(self.smem.inbox_in_stages):
                cute.arch.cluster_arrive_relaxed()  # this warp reads no stages
            if const_expr(self.smem.split > 1):
                cute.arch.cluster_wait()  # pairs this warp's arrival
        if const_expr(self.squaring):  # noqa: SIM102  known when compiled
            if warp > producer:
                # -- squaring warps
                squares = StageSquares(self.smem, self.pipeline)
                squares.run(tid - (GROUP * self.groups + 32), dtype, storage, split, first, end)
        if warp < producer:
            # -- consumers
            shape = tiled_mma.partition_shape_C((self.smem.rows, self.smem.tile_n))
            acc = cute.make_rmem_tensor(shape, Float32)  # ((2, 2, N / 8), 1, 1)
            self.consume(tid, acc, tiled_mma, shared, first, end)
            cD = cute.make_identity_tensor((self.smem.rows, self.smem.tile_n))
            tCcD = tiled_mma.get_slice(tid).partition_C(cD)  # ((2, 2, N / 8), 1, 1)
            place = Place(own_m, row, later, own_n, column)
            self.results.store_tile(ResultTile(tid, tCcD, storage, place, operands), acc, split)

    @cute.jit
    def set_up(
        self,
        warp: Int32,
        storage: cute.Pointer,
        dtype: cutlass.Constexpr[type[cutlass.Numeric]],
        tmas: tuple[cute.CopyAtom, cute.CopyAtom],
    ) -> Shared:
        """Stages and barriers in the CTA's shared memory, initialized."""
        at_x = cute.recast_ptr(storage, swizzle(), dtype)
        at_w = cute.recast_ptr(storage + self.smem.w_at, swizzle(), dtype)
        sG = None
        if const_expr(self.weighted):
            gamma_type = Float32 if self.smem.gamma_bytes == 4 else dtype
            at_g = cute.recast_ptr(storage + self.smem.gamma_at, dtype=gamma_type)
            sG = cute.make_tensor(at_g, cute.make_layout((self.smem.tile_k, self.smem.stages)))
        full = cute.recast_ptr(storage + self.smem.barriers_at, dtype=Int64)
        shared = Shared(
            storage=storage,
            sX=cute.make_tensor(at_x, self.stages_of(self.smem.tile_m, self.smem.rows)),
            sW=cute.make_tensor(at_w, self.stages_of(self.smem.tile_n)),
            sG=sG,
            full=full,
            empty=full + self.smem.stages,
            inbox_full=cute.recast_ptr(storage + self.smem.inbox_barrier_at, dtype=Int64),
            squared_full=cute.recast_ptr(storage + self.smem.squares_barrier_at, dtype=Int64),
        )
        self.initialize(warp, tmas, lambda: self.init_barriers(shared))
        # No thread of this CTA touches the barriers before they are initialized.
        cute.arch.sync_threads()
        if const_expr(self.smem.split > 1 and not self.smem.inbox_in_stages):
            # Tells the other CTA that this one's barriers are set up. Each role waits for the other's word before it
            # sends there; nobody waits here. More than two CTAs arrive once they have read their stages.
            cute.arch.cluster_arrive_relaxed()
        return shared

    @cute.jit
    def init_barriers(self, shared: Shared):
        """One thread's work."""
        self.pipeline.init(shared.full, shared.empty)
        if const_expr(self.smem.split > 1):
            cute.arch.mbarrier_init(shared.inbox_full, 1)
        if const_expr(self.squaring):
            cute.arch.mbarrier_init(shared.squared_full, SQUARING_WARPS)

    # ---- producer

    @cute.jit
    def prefetch_l2(self, boxes: list[BoxLoad], number: Int32, k_tiles: Int32, first: Int32, end: Int32):
        """Before pdl_wait: the first CTAs prefetch a k-tile each of what all read, and each CTA its first of W."""
        if const_expr(self.prefetch_tiles > 0):
            # X and gamma, which all CTAs read: a k-tile each of the first CTAs.
            if number < k_tiles:
                for box in boxes[1:]:
                    cute.prefetch(box.tma, box.source[None, number])
            # W, of which each CTA reads its own rows.
            for k_tile in cutlass.range(first, cutlass.min(first + self.prefetch_tiles, end), unroll=1):
                cute.prefetch(boxes[0].tma, boxes[0].source[None, k_tile])

    @cute.jit
    def produce(self, boxes: list[BoxLoad], shared: Shared, first: Int32, end: Int32):
        """Keeps the stages full."""
        at = Position(Int32(0), Int32(1))  # a fresh empty barrier counts as complete at phase 1
        for k_tile in cutlass.range(first, end, unroll=1):
            # Wait until all consumer groups and squaring warps have read the stage; then announce its bytes.
            self.pipeline.acquire(shared.full, shared.empty, at.stage, at.phase)
            for box in boxes:
                cute.copy(
                    box.tma,
                    box.source[None, k_tile],
                    box.target[None, at.stage],
                    tma_bar_ptr=shared.full + at.stage,
                )
            at = self.pipeline.next(at)

    # ---- consumers

    @cute.jit
    def consume(self, tid: Int32, acc: cute.Tensor, tiled_mma: cute.TiledMma, shared: Shared, first: Int32, end: Int32):
        """The mainloop. A stage is released when the products of the next are under way, or where ``eager`` at once."""
        # Descriptors are a group's, the same for its threads; fragments in registers are a thread's.
        of_group = tiled_mma.get_slice(cute.arch.make_warp_uniform(tid // GROUP) * GROUP)
        rX = None
        if const_expr(self.norm is None):
            rX = tiled_mma.make_fragment_A(of_group.partition_A(shared.sX))  # descriptors: (MMA, MMA_M, MMA_K, STAGE)
        else:
            thr_mma = tiled_mma.get_slice(tid)
            rX = thr_mma.make_fragment_A(thr_mma.partition_A(shared.sX)[None, None, None, 0])  # ((2, 2, 2), 1, MMA_K)
        rW = tiled_mma.make_fragment_B(of_group.partition_B(shared.sW))  # descriptors: (MMA, MMA_N, MMA_K, STAGE)
        acc.fill(0.0)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        chunks = None
        if const_expr(self.norm is not None):
            chunks = self.chunks(tid)
        consumer = Consumer(tid, shared, tiled_mma, acc, rX, rW, chunks)
        at, before = Position(Int32(0), Int32(0)), Int32(0)
        for k_tile in cutlass.range(first, end, unroll=1):
            # Wait until the TMA has filled the stage.
            cute.arch.mbarrier_wait(shared.full + at.stage, at.phase)
            releases = k_tile > first and tid % GROUP == 0
            if const_expr(self.norm is None):
                # Accumulators in registers are ordered before the products that read them.
                warpgroup.fence()
                for kb in cutlass.range_constexpr(self.smem.tile_k // 16):
                    cute.gemm(tiled_mma, acc, rX[None, None, kb, at.stage], rW[None, None, kb, at.stage], acc)
                warpgroup.commit_group()
                if const_expr(self.eager):
                    # These products are done, so the producer may refill this stage.
                    warpgroup.wait_group(0)
                    if tid % GROUP == 0:
                        cute.arch.mbarrier_arrive(shared.empty + at.stage)
                else:
                    # The products of the k-tile before are done, so the producer may refill its stage; these go on.
                    warpgroup.wait_group(1)
                    if releases:
                        cute.arch.mbarrier_arrive(shared.empty + before)
            else:
                self.multiply_weighed(consumer, at.stage, shared.empty + before, releases)
            before = at.stage
            at = self.pipeline.next(at)
        # The last products are done. Their stages stay: this CTA loads nothing more.
        warpgroup.wait_group(0)

    @cute.jit
    def chunks(self, tid: Int32) -> list[Int32]:
        """Offsets (elements) in a stage of X of the eight k's that this thread gives ``ldmatrix``, for each k-block in
        128 bytes. From the stages' layout the compiler would derive each anew, by four instructions a block.
        """
        lane, warp = tid % 32, tid // 32
        row = warp * 16 + lane % 16
        blocks = const_expr(min(self.smem.tile_k, SWIZZLED) // 16)
        return [row * SWIZZLED + ((2 * i + lane // 16) ^ (row % SWIZZLED_ROWS)) * 8 for i in range(blocks)]

    @cute.jit
    def multiply_weighed(self, consumer: Consumer, stage: Int32, before: cute.Pointer, releases: Boolean):
        """One stage with X's fragments weighed in registers, half of it while the products of the other half run.

        ``before``: the empty barrier of the stage before, which is released if ``releases``.
        """
        rX, shared, chunks = consumer.rX, consumer.shared, consumer.chunks
        dtype = shared.sX.element_type
        blocks = const_expr(self.smem.tile_k // 16)
        ldmatrix = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), dtype)
        count = const_expr(blocks // 2)
        raw = cute.make_rmem_tensor(((2, 2, 2), 1, count), dtype)
        words = cute.recast_tensor(raw, Int32)
        at_x = cute.recast_ptr(shared.sX.iterator, dtype=dtype) + stage * (self.smem.tile_m * self.smem.tile_k)
        if const_expr(self.weighted):
            rG = cute.make_rmem_tensor(((2, 2), count), shared.sG.element_type)
        for half in cutlass.range_constexpr(2):
            begin = const_expr(half * count)
            # Half a k-tile of X's fragments from the stage, by ldmatrix, beside the products that are under way.
            for i in cutlass.range_constexpr(count):
                block, chunk = const_expr(divmod(begin + i, len(chunks)))
                at = at_x + chunks[chunk] + block * (self.smem.tile_m * SWIZZLED)
                at = cute.make_ptr(dtype, at.toint(), cute.AddressSpace.smem, assumed_align=16)
                target = cute.make_tensor(raw.iterator + 8 * i, cute.make_layout(8))
                cute.copy(ldmatrix, cute.make_tensor(at, cute.make_layout(8)), target)
            if const_expr(self.weighted):
                self.norm.fetch(consumer.tid % 32, shared.sG, stage, begin, rG)
            if const_expr(half == 0):
                # The products of the k-tile before are done: its fragments may be overwritten, its stage refilled.
                warpgroup.wait_group(0)
                if releases:
                    cute.arch.mbarrier_arrive(before)
                for w in cutlass.range_constexpr(cute.size(words)):
                    # A move that LLVM must keep here: until the wait products read registers of their own.
                    words[w] = kept_move(words[w])
            for i in cutlass.range_constexpr(count):
                if const_expr(self.weighted):
                    self.norm.weigh(raw[None, None, i], rG[None, i], rX[None, None, begin + i])
                else:
                    rX[None, None, begin + i].store(raw[None, None, i].load())
            # Fragments and accumulators in registers are ordered before the products that read them.
            warpgroup.fence()
            for i in cutlass.range_constexpr(begin, begin + count):
                cute.gemm(
                    consumer.tiled_mma,
                    consumer.acc,
                    rX[None, None, i],
                    consumer.rW[None, None, i, stage],
                    consumer.acc,
                )
            warpgroup.commit_group()
