"""Product of many tokens with a packed weight, warpgroup schedule: ``out = act(X @ dequantized(W)^T + bias)``.

Roles:
    A tile has 64 weight rows for each of ``readers`` and ``tile_n`` tokens. In a CTA the last warp group is the
    producer: its first warp loads, ``stages`` ahead and across the ends of tiles, tokens by TMA and packed weights,
    scales and zeros by bulk copies; another brings the first stages to the L2 while the kernel ahead still runs. The
    other ``groups`` are consumers, of 64 weight rows each: they decode packed weights into the registers of wgmma's A
    operand, and multiply with tokens from shared memory. setmaxnreg moves registers from the producer to them.
    Where tiles are few, ``warps_k`` groups have the same rows and take k-tiles in turn, each from stages of its own:
    one decodes while the other multiplies. The first adds up their sums, through shared memory.

Work:
    Whole tiles, dealt out round robin in bands of rows (``raster``). With ``split`` only ``rounds`` of them, as many as
    all CTAs have; the k-tiles of the others are dealt out in equal runs, from the last CTA to the first. A tile whose
    k-tiles lie in several runs is added up, in their order, by the CTA that has the first of them, at the end of its
    run, when the others have left theirs: they began with it. With ``cluster`` > 1 every cluster has one tile, and its
    CTAs equal parts of K: where tiles are few. They exchange sums through shared memory, and the first ``owners`` store
    equal shares of the tokens.
    Two CTAs of one group may share an SM: one's products run behind the other's decoding, and the next kernel's CTAs
    find room before this one's have ended.

Barriers (mbarriers, one phase bit each):
    full[stage]: 1 arrival, the producer's with the stage's bytes; the copies complete it. The consumers wait.
    empty[stage]: 1 arrival of each group that reads it. The producer waits.
    inbox[group]: 1 arrival, of the group's first thread with the bytes that the cluster's other CTAs send.
    Cluster: all threads arrive when their CTA's mbarriers are initialized, and wait before they send.
    Named barriers 1, 2, ...: the 128 threads of a consumer group, around its boxes and its sums. ``SUMS``: groups that
    take k-tiles in turn; the first waits for the others' sums.

One k-tile, consumer, with sums of groups (``multiply_in_groups``), for 64 of K at a time: wait full[stage]; read packed
    words and scales; decode them into fresh registers, behind the products of the 64 before; wait for those, arrive on
    their stage's empty; add their group's accumulators times its scales to the tile's; issue four wgmmas, commit.
    Two consumer groups alternate: one's products run behind the other's decoding.
Without sums of groups (``multiply_ahead``): two sets of registers in turn, so two batches of products are under way;
    before a set is written again, the wait for the batch that reads it, and that batch's arrival on empty.

Numbers, ``scaled="accumulators"``: codes less their zero points are exact, and scales multiply fp32 accumulators, a
    group of K at a time. ``scaled="weights"``: a weight is its code times its scale, rounded once to the activations'
    type, as dequantizing does; half the registers, so tiles of 256 tokens. Scales of all of K multiply at a tile's end.

Gated, one consumer group has 64 rows of gates, the other those of up; the first stores (``parts/gate_pairs.py``).

Ends: the TMA fills tokens behind K with zeros and clips stores at the ends of out. The packed weight is padded to 64.

Refuses (``ops/products/schedules/packed_warpgroup.py``): GPUs without wgmma; tokens and out whose rows are not 16-byte
aligned.

Source:
    Mixed-input products with the decoded operand in registers are CUTLASS's (example 55) and QuACK's; promotion of
    accumulators is DeepGEMM's; boxes of results are ``parts/boxes.py``.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cutekernels.kernels.cute.parts.boxes import FIRST_BARRIER, BoxBuffers, BoxOperands, Corner, ResultBoxes
from cutekernels.kernels.cute.parts.dependent import pdl_wait
from cutekernels.kernels.cute.parts.epilogue import Epilogue, EpilogueOperands
from cutekernels.kernels.cute.parts.fragments import shared_tensor
from cutekernels.kernels.cute.parts.gate_pairs import GatePairs
from cutekernels.kernels.cute.parts.packed import PackedWeights, Weight, load_words
from cutekernels.kernels.cute.parts.pipeline import Position, StagePipeline
from cutekernels.kernels.cute.parts.prefetch import prefetch_bulk, prefetch_line
from cutekernels.kernels.cute.parts.ptx import copy_bulk, kept_move
from cutekernels.kernels.cute.parts.schedule import Raster
from cutekernels.kernels.cute.parts.smem import TILE, WarpgroupPackedSmem
from cutekernels.kernels.cute.parts.tile_share import ClusterSums, GroupParts, TileOwner, WarpSums, Workspace
from cutekernels.kernels.cute.parts.tile_source import Share, TileSource
from cutekernels.kernels.cute.parts.warp_groups import GROUP, ROWS, TmaTensor, wgmma
from cutekernels.kernels.cute.products.packed_scales import PackedScales
from cutekernels.kernels.cute.products.packed_values import (
    Consumer,
    Cta,
    Extents,
    LoopState,
    Operands,
    PackedBody,
    PackedWalk,
)
from cutekernels.kernels.cute.products.warp_specialized import Progress, Shared, WarpSpecialized

BLOCKS = TILE // 16  # k-blocks of a packed tile
VECTOR = 16  # bytes
SUMS = FIRST_BARRIER + 3  # behind those of groups that have other rows


@dataclass(frozen=True)
class WarpgroupPacked(PackedScales, PackedBody, WarpSpecialized):
    """The body. ``smem.tile_n`` counts tokens: they are the columns of the MMA."""

    smem: WarpgroupPackedSmem
    weights: PackedWeights
    scaled: str  # "accumulators" or "weights"
    groups: int  # consumer warp groups
    split: bool
    raster: Raster
    results: ResultBoxes
    dependent: bool  # launched under programmatic dependent launch
    cluster: int = 1  # CTAs that share a tile's K
    owners: int = 1  # of them, which have equal shares of its results
    ctas_per_sm: int = 1
    warps_k: int = 1  # groups of the same rows, which take k-tiles in turn
    gate: Epilogue | None = None  # of gates and what they multiply
    source: ClassVar[type[TileSource]] = PackedWalk
    pingpong: ClassVar[bool] = False
    REGISTERS_OF_TWO: ClassVar[dict[int, tuple[int, int]]] = {1: (40, 216), 2: (24, 104)}  # where two CTAs share an SM

    def __post_init__(self) -> None:
        super().__post_init__()
        # A barrier's phase is one bit: who waits for a stage's next fill must have waited for the one before.
        if self.smem.stages % self.warps_k:
            raise ValueError(f"{self.smem.stages} stages pass from group to group of {self.warps_k}: take a multiple")

    @property
    def gated(self) -> bool:
        return self.gate is not None

    @property
    def pairs(self) -> GatePairs:
        return GatePairs(self.gate, self.smem.exchange_at, self.smem.exchanged)

    @property
    def readers(self) -> int:
        """Groups that have other rows each."""
        return self.groups // self.warps_k

    @property
    def columns(self) -> int:
        """Columns of out in a tile."""
        return ROWS if self.gated else ROWS * self.readers

    @property
    def registers(self) -> tuple[int, int]:
        return self.REGISTERS_OF_TWO[self.groups] if self.ctas_per_sm > 1 else self.REGISTERS[self.groups]

    @property
    def cluster_shape(self) -> list[int] | None:
        return [self.cluster, 1, 1] if self.cluster > 1 else None

    @property
    def sums(self) -> ClusterSums:
        return ClusterSums(self.cluster, self.owners, GROUP, self.smem.tile_n // 2)

    @property
    def interval(self) -> int:
        """Elements of K between two additions to the tile's accumulators; 0: none, its products add up there."""
        return min(self.weights.group, self.smem.tile_k) if self.scaled == "accumulators" else 0

    @property
    def of_pair(self) -> int:
        """K-tiles of two batches of products, which are 64 of K each."""
        return 2 * TILE // self.smem.tile_k

    @property
    def pipeline(self) -> StagePipeline:
        return StagePipeline(self.smem.stages, self.smem.stage_bytes, self.readers, 1)

    def layout(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        """The stages of tokens, ``(tokens, K, STAGE)``."""
        tile = (ROWS, self.smem.tile_n, self.smem.tile_k)
        return hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, dtype, self.smem.stages)

    @cute.jit
    def extend(self, given: Operands, ctas: Int32, dealt: tuple[Int32, ...], stream: cuda.CUstream):
        """Launches the body; ``dealt``: whole tiles of each CTA and k-tiles of the others, unless the device finds
        them.
        """
        mX, mD, grouped = given.mX, given.mD, const_expr(given.mEnds is not None)
        layout = self.layout(self.results.dtype)
        pitch_x, pitch_d = cute.assume(mX.stride[0], divby=8), cute.assume(mD.stride[0], divby=8)
        mX = cute.make_tensor(mX.iterator, cute.make_layout((mX.shape[0], mX.shape[1]), stride=(pitch_x, 1)))
        mD = cute.make_tensor(mD.iterator, cute.make_layout((mD.shape[1], mD.shape[0]), stride=(1, pitch_d)))  # (N, M)
        stage = cute.make_composed_layout(layout.inner, 0, cute.select(layout.outer, mode=[0, 1]))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tokens = TmaTensor(*cpasync.make_tiled_tma_atom(load, mX, stage, (self.smem.tile_n, self.smem.tile_k)))
        # A gate's accumulators have their factor before they meet.
        undone = const_expr(self.scaled == "weights" and not self.gated)
        outputs = BoxOperands(
            self.results.tma(store, mD),
            mBias=given.mBias,
            alpha=Float32(self.weights.undone if undone else 1.0),
            beta=Float32(0.0),
            mOut=given.mD if grouped else None,
        )
        extra = (given.mEnds, given.clamp) if grouped else given.workspace
        # The product of one group: weights in registers, tokens in shared memory.
        tiled_mma = wgmma(self.results.dtype, self.smem.tile_n, source=warpgroup.OperandSource.RMEM)
        self.launch((tokens, outputs, given.weight, extra, tiled_mma, dealt), [ctas, 1, 1], stream)

    @cute.kernel
    def kernel(
        self,
        tokens: TmaTensor,  # (M, K)
        outputs: BoxOperands,
        weight: Weight,
        extra: Any,
        tiled_mma: cute.TiledMma,
        dealt: tuple[Int32, ...],  # whole tiles of each CTA, and k-tiles of the others
    ):
        block = cute.arch.block_idx()[0] if const_expr(self.source.counted) else None
        ctas, _, _ = cute.arch.grid_dim()
        role = self.role()
        shared = self.set_up(role[2], (tokens.tma, outputs.out.tma))
        # Nobody touches the barriers before they are initialized.
        cute.arch.sync_threads()
        if const_expr(self.cluster > 1):
            # Tells the cluster that this CTA's barriers are initialized; who sends waits for the others' word.
            cute.arch.cluster_arrive_relaxed()
        of, source = self.shares(shared, tokens, outputs, extra, (block, ctas, dealt))
        if const_expr(self.dependent):
            if const_expr(self.ctas_per_sm > 1):
                self.prefetch_tokens(tokens, shared, of, role[2])
            # All but the warps that prefetch weights, which read nothing.
            if role[2] <= 4 * self.groups:
                pdl_wait()
        self.divide(source, Cta(shared, tokens, weight, of, tiled_mma, outputs, extra), role)

    def stages_at(self, storage: cute.Pointer) -> tuple[None, cute.Tensor]:
        """The stages of tokens; those of the packed weight have no layout."""
        return None, shared_tensor(storage, self.layout(self.results.dtype), self.results.dtype)

    @cute.jit
    def shares(
        self, shared: Shared, tokens: TmaTensor, outputs: BoxOperands, extra: Workspace, place: tuple
    ) -> tuple[Extents, PackedWalk]:
        """Sizes, and the source of this CTA's shares."""
        cta, ctas, (rounds, share) = place
        rank = None
        if const_expr(self.cluster > 1):
            rank = cta % self.cluster
            cta, ctas = cta // self.cluster, ctas // self.cluster
        (m, k), n = tokens.coordinates.shape, cute.size(outputs.out.coordinates, mode=[0])
        of = Extents(
            n=n,
            m=m,
            k=k,
            k_tiles=cute.ceil_div(k, self.smem.tile_k),
            tiles_n=cute.ceil_div(n, self.columns),
            tiles_m=cute.ceil_div(m, self.smem.tile_n),
            ctas=ctas,
            rounds=rounds,
            share=share,
            rank=rank,
        )
        walk = PackedWalk(self, of, cta)
        return of, replace(walk, count=walk.total())

    @cute.jit
    def init_barriers(self, shared: Shared):
        """One thread's work."""
        self.pipeline.init(shared.full, shared.empty)
        if const_expr(self.cluster > 1):
            inboxes = cute.recast_ptr(shared.storage + self.smem.inbox_barriers_at, dtype=Int64)
            for group in cutlass.range_constexpr(self.readers):
                cute.arch.mbarrier_init(inboxes + group, 1)

    # ---- rows of the weight: of one product, all that there are

    def rows(self, of: Extents) -> Int32:
        """The rows of a weight."""
        return of.n * 2 if self.gated else of.n

    def first_row(self, of: Extents, corner: Corner, group: int | Int32) -> Int32:
        """The first row of a group in W."""
        return corner.row + group * (of.n if self.gated else ROWS)

    def present(self, of: Extents, corner: Corner) -> Int32:
        """Groups that have rows."""
        if self.gated:
            return Int32(2)
        return cutlass.min(cute.ceil_div(of.n - corner.row, TILE), Int32(self.readers))

    def all_rows(self, weight: Weight, of: Extents, unit: int) -> Int32:
        """The rows of W in ``unit``s."""
        return cute.ceil_div(self.rows(of), unit)

    # ---- producer

    @cute.jit
    def prefetch_tokens(self, tokens: TmaTensor, shared: Shared, of: Extents, warp: Int32):
        """A lone tile of tokens, which all CTAs read, into the L2: a k-tile by each of the first. The warp that loads
        does it, whose loads come behind, so that the descriptor outlasts it.
        """
        block, _, _ = cute.arch.block_idx()
        if warp == 4 * self.groups and of.tiles_m == 1 and block < of.k_tiles:
            x = tokens.loads(shared.sS, Int32(0), (self.smem.tile_n, self.smem.tile_k))
            cute.prefetch(x.tma, x.source[None, block])

    @cute.jit
    def stand_by(self, source: TileSource, cta: Cta, thread: Int32):
        """Prefetches into the L2 before the kernel ahead has ended: packed weights, scales and zero points of the first
        stages, a thread for each group of each. A warp's are issued one by one, so others do not wait for them.
        """
        if const_expr(self.dependent and self.source.counted):  # noqa: SIM102  known when compiled
            if source.count > 0:
                weight, of, share = cta.weight, cta.of, source.share(Int32(0))
                tiles_k = cute.ceil_div(of.k, TILE)
                row = self.first_row(of, share.corner, thread % self.readers)
                k_tile = share.begin + thread // self.readers
                first = k_tile * (self.smem.tile_k // TILE)
                count = cutlass.min(tiles_k - first, Int32(self.smem.tile_k // TILE))
                if thread < self.smem.stages * self.readers and row < self.rows(of) and count > 0:
                    at = (Int64(row // TILE) * tiles_k + first) * self.smem.tile_bytes
                    prefetch_bulk(weight.mW.iterator.toint() + at, count * self.smem.tile_bytes)
                    for at_strip, size, _ in self.strips(weight, of, row, k_tile, 0):
                        prefetch_bulk(at_strip, Int32(size))
                    if const_expr(self.weights.scale_rows > 1):
                        prefetch_line(self.block_scales(weight, of, row, k_tile))

    @cute.jit
    def load(self, cta: Cta, source: TileSource, share: Share, at: Position) -> Position:
        """The loads of one share. Returns the position behind."""
        shared, tokens, weight, of = cta.shared, cta.tokens, cta.weight, cta.of
        x = tokens.loads(shared.sS, share.corner.column, (self.smem.tile_n, self.smem.tile_k))
        base, full = shared.storage.toint().to(Int32), shared.full.toint().to(Int32)
        tiles_k = cute.ceil_div(of.k, TILE)
        # Groups of the tile whose rows the packed weight has.
        present = self.present(of, share.corner)
        for k_tile in cutlass.range(share.begin, share.k_end, unroll=1):
            # Wait until the consumers have read the stage; then announce its bytes, those of tiles that exist.
            cute.arch.mbarrier_wait(shared.empty + at.stage, at.phase)
            first = k_tile * (self.smem.tile_k // TILE)
            halves = cutlass.min(tiles_k - first, Int32(self.smem.tile_k // TILE))
            weight_bytes = halves * self.smem.tile_bytes
            bytes_ = self.smem.x_bytes + present * (weight_bytes + self.smem.scales_bytes + self.smem.zeros_bytes)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(shared.full + at.stage, bytes_)
            cute.copy(x.tma, x.source[None, k_tile], x.target[None, at.stage], tma_bar_ptr=shared.full + at.stage)
            barrier = full + at.stage * 8
            stage = base + at.stage * self.smem.packed_bytes + self.smem.packed_at
            with cute.arch.elect_one():
                for g in cutlass.range_constexpr(self.readers):
                    if g < present:
                        row = self.first_row(of, share.corner, g)
                        from_w = (
                            weight.mW.iterator.toint() + (Int64(row // TILE) * tiles_k + first) * self.smem.tile_bytes
                        )
                        copy_bulk(stage + g * self.smem.weight_bytes, from_w, weight_bytes, barrier)
                        for at_strip, size, place in self.strips(weight, of, row, k_tile, g):
                            copy_bulk(stage + place, at_strip, Int32(size), barrier)
            at = self.pipeline.next(at)
        return at

    def strips(self, weight: Weight, of: Extents, row: Int32, k_tile: Int32, g: int) -> list[tuple[Int64, int, int]]:
        """Scales and zero points of 64 rows, a strip for each group of K in the k-tile, behind K the last again: where
        each lies, its bytes, and its place in a stage, as group ``g``'s.
        """
        if self.smem.strips == 0 and not self.weights.zeros:
            return []
        last = cute.ceil_div(of.k, self.weights.group) - 1 if self.weights.group > 0 else Int32(0)
        found, size = [], self.weights.scale_bytes
        for i in range(max(self.smem.strips, self.smem.zero_strips)):
            group = Int32(0)
            if self.weights.group > 0:
                group = cutlass.min(k_tile * self.smem.tile_k // self.weights.group + i, last)
            at = Int64(group) * (self.all_rows(weight, of, TILE) * TILE) + row
            if self.smem.strips > 0:
                place = self.smem.scales_at + (g * self.smem.strips + i) * (TILE * size)
                found.append((weight.mS.iterator.toint() + at * size, TILE * size, place))
            if self.weights.zeros:
                place = self.smem.zeros_at + (g * self.smem.zero_strips + i) * TILE
                found.append((weight.mZ.iterator.toint() + at, TILE, place))
        return found

    @cute.jit
    def end_producer(self):
        if const_expr(self.cluster > 1):
            cute.arch.cluster_wait()  # pairs these warps' arrival

    # ---- consumers

    @cute.jit
    def consumer(self, cta: Cta, tid: Int32, group: Int32) -> Consumer:
        """A group's descriptors of the tokens' stages, its decoded weights and accumulators."""
        shared, tiled_mma = cta.shared, cta.tiled_mma
        of_group = tiled_mma.get_slice(0)
        rX = tiled_mma.make_fragment_B(of_group.partition_B(shared.sS))
        shape_w = tiled_mma.partition_shape_A((ROWS, TILE))
        rW, rV = [cute.make_rmem_tensor(shape_w, self.weights.dtype) for _ in range(2)]
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((ROWS, self.smem.tile_n)), Float32)
        part = acc
        if const_expr(self.interval > 0):
            part = cute.make_rmem_tensor(acc.shape, Float32)
        turn = 0
        if const_expr(self.warps_k > 1):
            group, turn = group % self.readers, group // self.readers
        constant = self.weights.constant(cta.of.share)
        return Consumer(tid % GROUP, group, cta, rX, rW, rV, acc, part, constant, turn)

    @cute.jit
    def buffers(self, consumer: Consumer) -> BoxBuffers:
        buffers = WarpSpecialized.buffers(self, consumer)
        if const_expr(self.gated):  # noqa: SIM102  known when compiled
            if consumer.group == 0:
                self.pairs.open()
        return buffers

    @cute.jit
    def multiply(self, consumer: Consumer, share: Share, at: Position) -> Position:
        """The mainloop of one share. Returns the position behind its last k-tile; of groups that take k-tiles in turn,
        which have one share alone, behind their own last one.
        """
        if const_expr(self.warps_k > 1):
            at = self.pipeline.after(at, consumer.turn)
            own = (share.count + (self.warps_k - 1) - consumer.turn) // self.warps_k
            share = replace(share, begin=share.begin + consumer.turn, count=own)
        if const_expr(self.interval > 0):
            at = self.multiply_in_groups(consumer, share, at)
        else:
            at = self.multiply_ahead(consumer, share, at)
        return at

    @cute.jit
    def multiply_ahead(self, consumer: Consumer, share: Share, at: Position) -> Position:
        """The mainloop without sums of groups. Weights of 64 of K take two sets of registers in turn, so that a batch
        of products is issued while the one before runs.
        """
        factors = cute.make_rmem_tensor((2, max(1, self.smem.strips)), Float32)
        state = LoopState(at, Int32(0), Int32(0), self.block_scale(consumer, share.corner, share.begin))
        # Both batches on every way through the loop: where one may be left out, ptxas lets them share registers, and
        # decoded weights overwrite what a product still reads (docs/notes/quantized.md#numbers-in-registers).
        for pair in cutlass.range(share.count // self.of_pair, unroll=1):
            for i in cutlass.range_constexpr(2):
                done = pair * self.of_pair + const_expr(i * (self.of_pair - 1))
                state = self.multiply_batch(consumer, share, factors, i, done, state)
        if const_expr(self.of_pair == 2):  # noqa: SIM102  known when compiled
            if share.count % 2 == 1:
                state = self.multiply_batch(consumer, share, factors, 0, share.count - 1, state)
        # The last products are done: accumulators may be read, and the producer may refill the last stages.
        warpgroup.wait_group(0)
        empty = consumer.cta.shared.empty
        if const_expr(self.of_pair == 2):
            self.pipeline.release(consumer.thread, empty, state.before, share.count > 1)
        self.pipeline.release(consumer.thread, empty, state.last, Boolean(True))
        return state.at

    @cute.jit
    def multiply_batch(
        self,
        consumer: Consumer,
        share: Share,
        factors: cute.Tensor,
        i: cutlass.Constexpr[int],
        done: Int32,
        state: LoopState,
    ) -> LoopState:
        """The ``i``-th of two batches of products, with ``done`` k-tiles in front of its own."""
        shared, of = consumer.cta.shared, consumer.cta.of
        at, before, last, coming = state.at, state.before, state.last, state.coming
        half = const_expr(i if self.of_pair == 1 else 0)
        if const_expr(half == 0):
            if const_expr(self.weights.scale_rows > 1):
                # The scale of this k-tile's block was asked for a k-tile ago.
                factors.fill(coming)
                following = cutlass.min(share.begin + (done + 1) * self.warps_k, of.k_tiles - 1)
                coming = self.block_scale(consumer, share.corner, following)
            # Wait until the copies have filled the stage.
            cute.arch.mbarrier_wait(shared.full + at.stage, at.phase)
        stage = shared.storage.toint().to(Int32) + self.smem.packed_at + at.stage * self.smem.packed_bytes
        if const_expr(half == 0 and self.smem.strips > 0):
            self.load_factors(consumer, stage, factors)
        words = self.packed_words(consumer, stage, half)
        # At most the batch in front still runs: the one that last had these registers is done.
        warpgroup.wait_group(1)
        if const_expr(self.of_pair == 2):
            self.pipeline.release(consumer.thread, shared.empty, before, done > 1)
        elif const_expr(half == 1):
            self.pipeline.release(consumer.thread, shared.empty, last, done > 0)
        rW = consumer.rW if const_expr(i == 0) else consumer.rV
        for w in cutlass.range_constexpr(cute.size(words)):
            # A move that LLVM must keep here: what follows from it may not come before the wait.
            words[w] = kept_move(words[w])
        self.decode(consumer, stage, half, words, factors, cute.recast_tensor(rW, Int32))
        self.issue(consumer, rW, half, at.stage)
        if const_expr(self.of_pair == 2 or half == 1):
            before, last = last, at.stage
            at = self.advance(at)
        return LoopState(at, before, last, coming)

    @cute.jit
    def issue(self, consumer: Consumer, rW: cute.Tensor, half: cutlass.Constexpr[int], stage: Int32):
        """Starts the products of 64 of K, with decoded weights in ``rW``."""
        # Registers written above are ordered before the products that read them.
        warpgroup.fence()
        atom = cute.make_mma_atom(consumer.cta.tiled_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for kb in cutlass.range_constexpr(BLOCKS):
            operand = consumer.rX[None, None, half * BLOCKS + kb, stage]
            cute.gemm(atom, consumer.acc, rW[None, None, kb], operand, consumer.acc)
        warpgroup.commit_group()

    @cute.jit
    def packed_words(self, consumer: Consumer, stage: Int32, half: cutlass.Constexpr[int]) -> cute.Tensor:
        """A thread's packed weights of 64 of K, from shared memory."""
        lane = consumer.thread % 32
        packed = stage + consumer.group * self.smem.weight_bytes + consumer.thread // 32 * (self.smem.tile_bytes // 4)
        packed = packed + (lane * VECTOR + half * self.smem.tile_bytes)
        words = cute.make_rmem_tensor((4, self.weights.bits // 4), Int32)
        for w in cutlass.range_constexpr(self.weights.bits // 4):
            load_words(packed + w * 32 * VECTOR, words[None, w])
        return words

    @cute.jit
    def decode(
        self,
        consumer: Consumer,
        stage: Int32,
        half: cutlass.Constexpr[int],
        words: cute.Tensor,
        factors: cute.Tensor,
        pairs: cute.Tensor,
    ):
        """A thread's weights of 64 of K into ``pairs`` (16,), times their scales where those multiply weights."""
        shifts = cute.make_rmem_tensor(2, Int32)
        if const_expr(self.weights.code == "int4" and not self.weights.zeros):
            shifts.fill(self.weights.symmetric)
        for kb in cutlass.range_constexpr(BLOCKS):
            k = const_expr(half * TILE + kb * 16)
            strip = const_expr(k // self.weights.group if self.smem.strips > 1 else 0)
            if const_expr(self.weights.zeros and (kb == 0 or (self.smem.strips > 1 and k % self.weights.group == 0))):
                self.load_shifts(consumer, stage, strip, shifts)
            of_block = cute.make_tensor(words.iterator + kb * self.weights.words, cute.make_layout(self.weights.words))
            four = cute.make_tensor(pairs.iterator + 4 * kb, cute.make_layout(4))
            self.weights.decode(of_block, shifts, consumer.constant, four)
            if const_expr(self.scaled == "weights" and self.weights.scale_type is self.weights.dtype):
                self.weights.scale16(factors[None, strip], four)
            elif const_expr(self.weights.factors):
                self.weights.times_scales(cute.recast_tensor(factors, Int32)[None, strip], kb, consumer.constant, four)
            elif const_expr(self.weights.code == "e2m1"):
                self.weights.times_powers(cute.recast_tensor(factors, Int32)[None, strip], four)
            elif const_expr(self.scaled == "weights"):
                self.weights.scale(factors[None, strip], four)

    @cute.jit
    def multiply_in_groups(self, consumer: Consumer, share: Share, at: Position) -> Position:
        """The mainloop with sums of groups, which are added to the tile's at each group's end."""
        shared, of, before = consumer.cta.shared, consumer.cta.of, Int32(0)
        strips = const_expr(max(1, self.smem.strips))
        factors, next_factors = [cute.make_rmem_tensor((2, strips), Float32) for _ in range(2)]
        factors.fill(0.0)
        atom = cute.make_mma_atom(consumer.cta.tiled_mma.op)
        held = cute.recast_tensor(consumer.rW, Int32)
        coming = self.block_scale(consumer, share.corner, share.begin)
        for k_tile in cutlass.range(share.begin, share.k_end, self.warps_k, unroll=1):
            if const_expr(self.weights.scale_rows > 1):
                # The scale of this k-tile's block was asked for a k-tile ago.
                next_factors.fill(coming)
                following = cutlass.min(k_tile + self.warps_k, of.k_tiles - 1)
                coming = self.block_scale(consumer, share.corner, following)
            # Wait until the copies have filled the stage.
            cute.arch.mbarrier_wait(shared.full + at.stage, at.phase)
            stage = shared.storage.toint().to(Int32) + self.smem.packed_at + at.stage * self.smem.packed_bytes
            if const_expr(self.smem.strips > 0):
                self.load_factors(consumer, stage, next_factors)
            for half in cutlass.range_constexpr(self.smem.tile_k // TILE):
                # -- packed words of 64 of K, decoded while the products of the 64 before run
                fresh = cute.make_rmem_tensor(4 * BLOCKS, Int32)
                self.decode(consumer, stage, half, self.packed_words(consumer, stage, half), factors, fresh)
                # The products of the 64 before are done: their weights' registers are free, and their stage.
                warpgroup.wait_group(0)
                if const_expr(half == 0):
                    self.pipeline.release(consumer.thread, shared.empty, before, k_tile > share.begin)
                    if k_tile > share.begin:
                        self.promote(consumer, factors[None, strips - 1])
                    for i in cutlass.range_constexpr(cute.size(factors)):
                        factors[i] = next_factors[i]
                elif const_expr(half * TILE % self.interval == 0):
                    self.promote(consumer, factors[None, half * TILE // self.interval - 1])
                for i in cutlass.range_constexpr(4 * BLOCKS):
                    # A move that LLVM must keep: products under way read registers of their own.
                    held[i] = kept_move(fresh[i])
                # Registers written above, weights and accumulators, are ordered before the products that read them.
                warpgroup.fence()
                for kb in cutlass.range_constexpr(BLOCKS):
                    at_k = const_expr(half * TILE + kb * 16)
                    new = const_expr(at_k % self.interval == 0)
                    if const_expr(new and kb > 0):
                        # A group of 32 ends within the 64: its products are waited for at once.
                        warpgroup.commit_group()
                        warpgroup.wait_group(0)
                        self.promote(consumer, factors[None, at_k // self.interval - 1])
                        warpgroup.fence()
                    atom.set(warpgroup.Field.ACCUMULATE, not new)
                    cute.gemm(
                        atom,
                        consumer.part,
                        consumer.rW[None, None, kb],
                        consumer.rX[None, None, half * BLOCKS + kb, at.stage],
                        consumer.part,
                    )
                warpgroup.commit_group()
            before = at.stage
            at = self.advance(at)
        # The last products are done: accumulators may be read, and the producer may refill the last stage.
        warpgroup.wait_group(0)
        self.pipeline.release(consumer.thread, shared.empty, before, Boolean(True))
        self.promote(consumer, factors[None, strips - 1])
        return at

    @cute.jit
    def advance(self, at: Position) -> Position:
        """Position of a group's next k-tile: behind those of the others."""
        for _ in cutlass.range_constexpr(self.warps_k):
            at = self.pipeline.next(at)
        return at

    @cute.jit
    def read_ahead(self, consumer: Consumer, corner: Corner) -> cute.Tensor | None:
        """Scales of all of K, or factors."""
        if const_expr(not self.weights.by_rows):
            return None
        return self.row_factors(consumer, self.first_row(consumer.cta.of, corner, consumer.group))

    @cute.jit
    def store(
        self,
        source: TileSource,
        consumer: Consumer,
        target: tuple[BoxBuffers, BoxOperands, Corner],
        share: Share,
        ahead: cute.Tensor | None,
        progress: Progress,
    ) -> Progress:
        (buffers, outputs, corner), boxes_used, results = target, progress.boxes_used, consumer.acc
        if const_expr(self.warps_k > 1):
            thread = consumer.thread + consumer.group * GROUP
            turns = WarpSums(GROUP * self.readers, self.warps_k, SUMS)
            turns.add_up(consumer.cta.shared.storage + self.smem.exchange_at, thread, consumer.turn, consumer.acc)
        early = const_expr(ahead is not None and (self.cluster > 1 or self.gated))
        if const_expr(early):
            self.scale_by(consumer, ahead)
        if const_expr(self.cluster > 1):
            rank = consumer.cta.of.rank
            whole = self.share_in_cluster(consumer, rank)
            results = cute.make_tensor(consumer.acc.iterator, cute.make_layout(self.sums.share))
            corner = replace(corner, column=corner.column + rank * self.results.columns)
        else:
            whole = self.gather(source, consumer, share)
        if whole:
            if const_expr(ahead is not None and not early):
                self.scale_by(consumer, ahead)
            if const_expr(self.gated):
                operands, biases = self.gate_operands(consumer, share)
                self.pairs.meet(consumer.cta.shared.storage, consumer.thread, consumer.group, results, operands, biases)
            # The first of a gate's two groups has results.
            if const_expr(not self.gated) or consumer.group == 0:
                self.results.store_tile(buffers, outputs, results, corner, boxes_used)
                boxes_used = boxes_used + self.results.count
        return Progress(progress.order_phase, progress.at, boxes_used)

    @cute.jit
    def gate_operands(self, consumer: Consumer, share: Share) -> tuple[EpilogueOperands, cute.Tensor | None]:
        """Operands of the gate, and biases of the thread's rows r and r + 8, of both halves."""
        return EpilogueOperands(alpha=self.gate_factor()), None

    def gate_factor(self) -> Float32 | None:
        """The factor of a gate's accumulators, and of those of up."""
        return Float32(self.weights.undone) if self.scaled == "weights" else None

    @cute.jit
    def gather(self, source: PackedWalk, consumer: Consumer, share: Share) -> bool | Boolean:
        """Whether this group's accumulators are now the whole tile's, which this CTA stores."""
        if const_expr(not self.split):
            return consumer.turn == 0
        of, workspace, parts = source.of, consumer.cta.extra, GroupParts(self.readers, self.smem.tile_n // 2)
        if share.count < of.k_tiles:
            shared = share.number - of.rounds * of.ctas  # among those that are shared
            counter, owner = parts.counter(workspace, consumer, shared), TileOwner(consumer.group)
            run = owner.run()
            if share.owner:
                # The tile's other k-tiles are the later runs'.
                others = ((shared + 1) * of.k_tiles - 1) // of.share - run
                owner.wait(counter, consumer.thread, others)
                parts.add(workspace, consumer, (run + 1, 1), others)
            else:
                # A run has one part at most of a tile that began before it.
                parts.leave(workspace, consumer, run)
                owner.post(counter, consumer.thread)
        return share.owner

    @cute.jit
    def share_in_cluster(self, consumer: Consumer, rank: Int32) -> Boolean:
        """Whether this CTA has a share of the tile's results, which are then the first accumulators."""
        thread, group, storage = consumer.thread, consumer.group, consumer.cta.shared.storage
        full = cute.recast_ptr(storage + self.smem.inbox_barriers_at, dtype=Int64) + group
        inbox = cute.recast_ptr(storage + self.smem.inbox_at, dtype=Float32) + group * (GROUP * self.sums.received)
        # Wait until all CTAs have initialized their barriers, on which this thread's stores arrive.
        cute.arch.cluster_wait()
        own = rank < self.owners
        if const_expr(self.warps_k > 1):
            own = own and consumer.turn == 0
        if consumer.turn == 0:
            self.sums.send(consumer.acc, inbox, full, thread, rank)
        if own:
            self.sums.add_up(consumer.acc, inbox, full, thread, rank)
        return own
