"""Attention, warpgroup schedule: ``out = softmax(scale * Q K^T) V`` by TMA and warpgroup MMA (sm_90).

A tile is 64 queries of one head for each of ``groups`` consumer warp groups, over all blocks of ``tile_kv`` keys that
some of its rows see. Blocks are walked from the last to the first.

Roles:
    Consumer warp groups 0 .. groups - 1 (128 threads each): group g owns rows ``64 g .. 64 g + 63`` of the tile, their
        scores, probabilities, accumulators and results. All groups read the same K and V. The second group does what
        the first does, for the next 64 rows (with ``paired_tiles``: for the rows that lie as far from the end of the
        head as the first group's from its beginning).
    Producer warp group (the last 128 threads): its first warp issues all TMA loads and passes tiles on; the other three
        warps idle. It gives registers to the consumers (setmaxnreg).

Pipelines (mbarriers in shared memory; the producer waits on ``empty``, consumers wait on ``full``):
    ============  ===========  =====================================  =============================================
    barriers      stages       full: arrivals                         empty: arrivals
    ============  ===========  =====================================  =============================================
    ``*_q``       ``groups``   1 and a group's 64 rows of bytes       1: the group whose queries they are
    ``*_k``       ``stages``   1 and a block of K in bytes            ``groups``: each when its ``Q K^T`` has read it
    ``*_v``       ``stages``   1 and a block of V in bytes            ``groups``: each when its ``P V`` has read it
    queue         1            1: a tile's number (dynamic_scheduler) 128 ``groups``: every consumer thread has read it
    ============  ===========  =====================================  =============================================
    So the producer waits on ``empty_k`` before it loads a block of K over an older one, until the product of every
    group with the older one is done. The first round over fresh stages passes at once.
    Named barriers: one for each group's 128 threads, one for each group of the ping-pong (256 threads).

One tile, producer:
    K of the last block; each group's Q, once the group has released the tile before; then, block by block towards the
    first, K of the next block and V of this one: K runs one block ahead of V.
One tile, consumer group:
    1. Wait for Q and K of the last block: scores ``S = Q K^T``, mask, softmax; P stays in registers.
    2. For each further block: wait for its K, start ``S = Q K^T``; wait for V of the block before, start ``O += P V``;
       wait for S, release K, mask and softmax while ``P V`` runs; wait for ``P V``, release V, rescale O where a row's
       reference moved, and only then overwrite P.
       Regions, in this order: blocks that the right edge cuts (causal, window, the last key), masked; blocks that all
       rows see whole, unmasked; blocks that the window's left edge cuts, masked. The last block is always masked; with
       a given mask all blocks are.
    3. ``O += P V`` of the first block; divide by the totals; results leave through shared memory (``group_results``).
    With ``turns`` (ping-pong) a group starts its two products only after the group before has, so that one group's
    softmax runs while the other's products do.

The next tile's Q is loaded after the next tile's first K, once ``empty_q`` has the group's arrival: after its results
have left, since they use the queries' bytes; with ``separate_output_smem`` already after its last ``Q K^T``.
A row that sees no key gets 0, and -inf as log-sum-exp (its sink's, where it has one): ``parts/softmax.py``.

K and V may be in a cache, contiguous or in pages, with lengths and page table on the device: the producer looks pages
up, and consumers zero rows of V behind a length or before a window in shared memory, since they may be NaN.
CTAs take one tile each, or walk over the tiles in a persistent grid, where the next tile's first keys are loaded
during the last products of this one. For few tiles: ``split`` CTAs of a cluster share the keys of a tile and add up
their parts (``parts/cluster_reduction.py``); ``paired_tiles`` gives a CTA the i-th and the i-th last 64 rows, one to
each group.

Refuses (``ops/attention/config.py``): GPUs without wgmma; ``split`` or ``paired_tiles`` with varlen sequences, a given
mask or a cache; ``paired_tiles`` unless there are two groups and rows see more keys the later they are; pages that are
neither part nor multiple of ``tile_kv``; tiles whose accumulators do not fit the registers.

Source:
    FlashAttention-3 (Shah 2024) has both overlaps; rescaling on demand is FlashAttention-4's. Different here:
    one body for all orders of tiles, results in the queries' bytes, clusters that split keys.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cutekernels.kernels.cute.parts.attention_smem import WarpgroupAttentionSmem
from cutekernels.kernels.cute.parts.cluster_reduction import ClusterReduction
from cutekernels.kernels.cute.parts.dependent import pdl_launch, pdl_wait
from cutekernels.kernels.cute.parts.group_results import GroupResults, ResultTile
from cutekernels.kernels.cute.parts.groups import (
    ConsumerThread,
    GroupProducts,
    PingPong,
    as_warps,
    round_to,
)
from cutekernels.kernels.cute.parts.head_loads import HeadLoads, Pages, TmaOperand
from cutekernels.kernels.cute.parts.heads import HeadRows
from cutekernels.kernels.cute.parts.mask import Band, BandMask, Blocks
from cutekernels.kernels.cute.parts.mma import WarpMma
from cutekernels.kernels.cute.parts.pipeline import Position, StagePipeline
from cutekernels.kernels.cute.parts.schedule import TileQueue
from cutekernels.kernels.cute.parts.sequences import Ends, HeadOrder, Sequences
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax, RowStates
from cutekernels.kernels.cute.parts.warp_groups import GROUP, ROWS, TmaTensor, WarpGroupBody

FIRST_GROUP_BARRIER, FIRST_PING_PONG_BARRIER = 1, 4  # named barriers; 0 is the CTA's


@dataclass(frozen=True)
class Launch:
    """Tensors of a launch that both roles read."""

    mO: cute.Tensor
    mLse: cute.Tensor | None
    mK: cute.Tensor
    mMask: cute.Tensor | None
    ends: Ends
    mSinks: cute.Tensor | None
    mCounter: cute.Tensor | None


@dataclass(frozen=True)
class Numbers:
    """Numbers of a launch."""

    scale: Float32  # factor of scores, to base 2
    cap_inner: Float32
    cap_outer: Float32
    left: Int32
    right: Int32
    tiles: Int32  # of a head
    layers: Int32  # heads, counted over the batch too
    band: Int32  # heads of a band of the tiles' order


@dataclass(frozen=True)
class Barriers:
    """mbarriers in shared memory, one for each stage (``parts/pipeline.py``), and the queue of tiles."""

    full_q: cute.Pointer
    empty_q: cute.Pointer
    full_k: cute.Pointer
    empty_k: cute.Pointer
    full_v: cute.Pointer
    empty_v: cute.Pointer
    queue: cute.Pointer


@dataclass(frozen=True)
class Tile:
    """A CTA's tile of queries, and the keys that it sees."""

    layer: Int32
    batch: Int32
    head: Int32
    head_kv: Int32
    row: Int32  # the first one, in its sequence
    valid: Int32  # rows that exist from ``row`` on; with paired_tiles of the first group's
    begin_q: Int32  # of the sequence, in varlen tensors
    begin_kv: Int32
    band: Band
    blocks: Blocks  # that the producer loads


@dataclass(frozen=True)
class Consumer:
    """State of a consumer thread from its first tile to its last."""

    own: ConsumerThread
    qk_mma: cute.TiledMma
    pv_mma: cute.TiledMma
    rQ: cute.Tensor  # descriptors (MMA, M, D) of the group's rows
    rK: cute.Tensor  # descriptors (MMA, N, D, STAGE)
    rV: cute.Tensor  # descriptors (MMA, D, KV, STAGE)
    rP: cute.Tensor  # (MMA, M, KV), 16 bits
    acc_s: cute.Tensor  # (MMA, M, N)
    acc_o: cute.Tensor  # (MMA, M, D)
    states: RowStates  # of this thread's two rows
    numbers: Numbers
    barriers: Barriers


@dataclass(frozen=True)
class GroupTile:
    """The keys that a group's 64 rows of a tile see."""

    row: Int32  # the group's first one
    band: Band


@dataclass(frozen=True)
class WarpgroupAttention(WarpGroupBody):
    """The body; its header is the module's.

    ``resident``: most CTAs of a persistent grid, 0 for one CTA a tile. ``dynamic_scheduler``: CTAs of a persistent grid
    draw their tiles from a counter. ``dependent``: launched under programmatic dependent launch. A config says
    ``grid=dynamic`` for ``dynamic_scheduler``, ``grid=ahead`` for that and ``separate_output_smem``, ``order=paired``
    for ``paired_tiles``.
    """

    groups: int
    tile_kv: int
    head_dim: int
    padded: int
    stages: int
    turns: bool  # ping-pong: groups start their products one after another
    mask: BandMask  # of a CTA's tile
    softmax: OnlineSoftmax
    order: HeadOrder
    sequences: Sequences
    resident: int
    dynamic_scheduler: bool
    separate_output_smem: bool = False
    ctas_per_sm: int = 1
    split: int = 1
    paired_tiles: bool = False
    dependent: bool = False

    REGISTERS: ClassVar[dict[int, tuple[int, int]]] = {1: (56, 256), 2: (24, 240), 3: (32, 160)}

    @property
    def tile_q(self) -> int:
        return ROWS * self.groups

    @property
    def registers(self) -> tuple[int, int]:
        if self.ctas_per_sm == 2:  # of one group
            return 24, 232
        return self.REGISTERS[self.groups]

    @property
    def smem(self) -> WarpgroupAttentionSmem:
        return WarpgroupAttentionSmem(
            self.groups, self.tile_kv, self.head_dim, self.stages, self.separate_output_smem, self.split
        )

    @property
    def rows_q(self) -> HeadRows:
        """A group's rows of Q and of results."""
        return HeadRows(ROWS, self.head_dim, self.padded, self.groups, GROUP)

    @property
    def rows_kv(self) -> HeadRows:
        return HeadRows(self.tile_kv, self.head_dim, self.padded, self.stages, GROUP)

    @property
    def queries(self) -> StagePipeline:
        """A stage for each group, refilled for each tile and read by that group alone."""
        return StagePipeline(self.groups, self.smem.group_bytes, 1, 1)

    @property
    def keys(self) -> StagePipeline:
        """The stages of K, and those of V, read by all groups."""
        return StagePipeline(self.stages, self.smem.stage_bytes, self.groups, 1)

    @property
    def loads(self) -> HeadLoads:
        return HeadLoads(self.tile_kv, self.padded, self.sequences)

    @property
    def products(self) -> GroupProducts:
        return GroupProducts(self.tile_kv, self.padded)

    @property
    def products_order(self) -> PingPong:
        return PingPong(self.groups if self.turns else 1, FIRST_PING_PONG_BARRIER)

    @property
    def queue(self) -> TileQueue:
        return TileQueue(self.dynamic_scheduler, GROUP * self.groups)

    @property
    def cluster(self) -> ClusterReduction:
        return ClusterReduction(self.smem, self.padded, self.head_dim)

    @property
    def results(self) -> GroupResults:
        return GroupResults(self.smem, self.rows_q, self.softmax, self.sequences, self.queries, FIRST_GROUP_BARRIER)

    @property
    def group_mask(self) -> BandMask:
        """The mask of one group's rows."""
        return replace(self.mask, tile_q=ROWS)

    def layouts(self, dtype: type[cutlass.Numeric], keys: int) -> tuple[cute.ComposedLayout, ...]:
        """Q ``(64, D, groups)``, K ``(keys, D, STAGE)`` and V ``(D, keys, STAGE)`` in shared memory."""
        return (
            hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, 0, self.padded), dtype, self.groups),
            hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (0, keys, self.padded), dtype, self.stages),
            hopper_helpers.make_smem_layout_b(LayoutEnum.COL_MAJOR, (0, self.padded, keys), dtype, self.stages),
        )

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,  # (B, SQ, HQ, D), or (TOTAL_Q, HQ, D)
        mLse: cute.Tensor | None,  # (B * HQ * SQ,), as (B, HQ, SQ), or as (HQ, TOTAL_Q)
        mQ: cute.Tensor,  # as mO
        mK: cute.Tensor,  # (B, SKV, HKV, D), or (TOTAL_KV, HKV, D), or (PAGES, PAGE_SIZE, HKV, D)
        mV: cute.Tensor,  # as mK
        mMask: cute.Tensor | None,  # (B, HQ, SQ, SKV)
        mCuQ: cute.Tensor | None,  # (B + 1,)
        mCuKv: cute.Tensor | None,  # (B + 1,), or a cache's lengths (B,)
        mTable: cute.Tensor | None,  # (B, MAX_PAGES)
        mSinks: cute.Tensor | None,  # (HQ,)
        mCounter: cute.Tensor | None,  # (1,), zero before and after a launch
        scale: Float32,  # factor of scores, to base 2
        cap_inner: Float32,
        cap_outer: Float32,
        left: Int32,  # keys seen before a row's own, where limited
        right: Int32,  # and behind it
        stream: cuda.CUstream,
    ):
        dtype = mQ.element_type
        at = const_expr(self.sequences.rows_mode)
        tiles, layers = self.sequences.grid(mQ, mCuQ, self.tile_q)
        bytes_per_head = Int64(self.sequences.length(mK, mCuKv, mTable)) * (4 * self.head_dim)
        band = self.order.band(layers, mQ.shape[at + 1] // mK.shape[at + 1], bytes_per_head)
        layout_q, layout_k, layout_v = self.layouts(dtype, self.tile_kv)
        # A block of keys is one TMA box, or one of each page that it spans.
        _, box_k, box_v = self.layouts(dtype, self.loads.box)
        tma_q, tQ = self.loads.make_tma(mQ, layout_q, False)
        tma_k, tK = self.loads.make_tma(mK, box_k, False)
        tma_v, tV = self.loads.make_tma(mV, box_v, True)
        count = tiles * layers
        blocks = count * self.split if const_expr(self.resident == 0) else cutlass.min(count, Int32(self.resident))
        self.kernel(
            Launch(mO, mLse, mK, mMask, Ends(mCuQ, mCuKv, mTable), mSinks, mCounter),
            TmaTensor(tma_q, tQ),
            TmaTensor(tma_k, tK),
            TmaTensor(tma_v, tV),
            Numbers(scale, cap_inner, cap_outer, left, right, tiles, layers, band),
            (
                self.products.xy_mma(dtype),
                self.products.py_mma(dtype),
                WarpMma(GROUP // 32, 1, Float32, True, True).tiled_mma(dtype),
            ),
            (layout_q, layout_k, layout_v),
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.split, 1, 1] if const_expr(self.split > 1) else None,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        launch: Launch,
        query: TmaTensor,  # coordinates (S, D, H[, B])
        key: TmaTensor,
        value: TmaTensor,  # (D, S, H[, B])
        numbers: Numbers,
        mmas: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout],
    ):
        qk_mma, pv_mma, warp_mma = mmas
        layout_q, layout_k, layout_v = layouts
        tid, group, warp = self.role()
        producer = const_expr(self.groups)  # the number of the producer warp group
        dtype = launch.mO.element_type

        # ---- setup: shared memory, barriers

        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=ALIGNMENT)
        at_q = cute.recast_ptr(storage, layout_q.inner, dtype)
        at_k = cute.recast_ptr(storage + self.smem.k_at, layout_k.inner, dtype)
        at_v = cute.recast_ptr(storage + self.smem.v_at, layout_v.inner, dtype)
        sQ = cute.make_tensor(at_q, layout_q.outer)  # (64, D, groups)
        sK = cute.make_tensor(at_k, layout_k.outer)  # (tile_kv, D, STAGE)
        sV = cute.make_tensor(at_v, layout_v.outer)  # (D, tile_kv, STAGE)
        full_q = cute.recast_ptr(storage + self.smem.barriers_at, dtype=Int64)
        empty_q = full_q + self.groups
        full_k = empty_q + self.groups
        empty_k = full_k + self.stages
        full_v = empty_k + self.stages
        empty_v = full_v + self.stages
        queue = empty_v + self.stages
        barriers = Barriers(full_q, empty_q, full_k, empty_k, full_v, empty_v, queue)
        self.initialize(warp, (query.tma, key.tma, value.tma), lambda: self.init_barriers(barriers, storage))
        # All threads of the CTA wait for the thread that initializes the barriers.
        cute.arch.sync_threads()
        if const_expr(self.split > 1):
            # This CTA's barriers are ready; ClusterReduction.send waits for all CTAs' before it stores into theirs.
            cute.arch.cluster_arrive_relaxed()
        if const_expr(self.dependent):
            # PDL: the next kernel may set up behind this one; this one waits until the kernel before has written its
            # results, before any role reads global memory.
            pdl_launch()
            pdl_wait()

        # ---- roles

        if group == producer:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 4 * producer:
                self.produce(
                    launch,
                    numbers,
                    TmaOperand(query.tma, query.coordinates, sQ),
                    TmaOperand(key.tma, key.coordinates, sK),
                    TmaOperand(value.tma, value.coordinates, sV),
                    barriers,
                )
            if const_expr(self.split > 1):
                # A thread that has arrived at the cluster's barrier waits there too; consumers do before they send.
                cute.arch.cluster_wait()
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            own = ConsumerThread(tid % GROUP, group, warp_mma, storage)
            qk_slice, pv_slice = qk_mma.get_slice(0), pv_mma.get_slice(0)
            held = Consumer(
                own=own,
                qk_mma=qk_mma,
                pv_mma=pv_mma,
                rQ=qk_mma.make_fragment_A(qk_slice.partition_A(sQ))[None, None, None, group],  # (MMA, M, D)
                rK=qk_mma.make_fragment_B(qk_slice.partition_B(sK)),  # (MMA, N, D, STAGE)
                rV=pv_mma.make_fragment_B(pv_slice.partition_B(sV)),  # (MMA, D, KV, STAGE)
                acc_s=cute.make_rmem_tensor(qk_mma.partition_shape_C((ROWS, self.tile_kv)), Float32),  # (MMA, M, N)
                acc_o=cute.make_rmem_tensor(pv_mma.partition_shape_C((ROWS, self.padded)), Float32),  # (MMA, M, D)
                rP=cute.make_rmem_tensor(pv_mma.partition_shape_A((ROWS, self.tile_kv)), dtype),  # (MMA, M, KV)
                states=RowStates(*[cute.make_rmem_tensor(2, Float32) for _ in range(3)]),
                numbers=numbers,
                barriers=barriers,
            )
            self.consume(held, launch)

    @cute.jit
    def init_barriers(self, barriers: Barriers, storage: cute.Pointer):
        """One thread's work."""
        self.queue.init(barriers.queue)
        if const_expr(self.split > 1):
            self.cluster.init(cute.recast_ptr(storage + self.smem.inbox_barriers_at, dtype=Int64))
        self.queries.init(barriers.full_q, barriers.empty_q)
        self.keys.init(barriers.full_k, barriers.empty_k)
        self.keys.init(barriers.full_v, barriers.empty_v)

    def first_tile(self) -> Int32:
        index, _, _ = cute.arch.block_idx()
        return index // self.split if self.split > 1 else index

    @cute.jit
    def locate(self, index: Int32, launch: Launch, numbers: Numbers) -> Tile:
        """Where tile ``index`` lies, and the blocks of keys that its CTA loads."""
        at = const_expr(self.sequences.rows_mode)
        tile, layer = self.order.place(index, numbers.layers, numbers.tiles, numbers.band)
        place = self.sequences.locate(tile, layer, self.tile_q, launch.mO, launch.mK, launch.ends)
        head_kv = place.head // (launch.mO.shape[at + 1] // launch.mK.shape[at + 1])
        row = place.tile * const_expr(ROWS if self.paired_tiles else self.tile_q)
        valid = cutlass.min(cutlass.max(place.seq_x - row, Int32(0)), Int32(self.tile_q))
        # The last query is aligned with the last key.
        shift = place.seq_y - place.seq_x
        band = Band(place.seq_x, place.seq_y, numbers.left - shift, numbers.right + shift)
        if const_expr(self.paired_tiles):  # the last group's rows see all that the others do
            blocks = self.group_mask.blocks(self.row_of(row, Int32(self.groups - 1), place.seq_x), band)
        else:
            blocks = self.mask.blocks(row, band)
        if const_expr(self.split > 1):
            blocks = self.cluster.blocks(cute.arch.block_idx_in_cluster(), blocks)
        return Tile(layer, place.batch, place.head, head_kv, row, valid, place.begin_x, place.begin_y, band, blocks)

    @cute.jit
    def row_of(self, row: Int32, group: Int32, seq_q: Int32) -> Int32:
        """The first row of ``group`` in the tile at ``row``."""
        if const_expr(self.paired_tiles):  # group 0 has the 64 rows at ``row``, group 1 as many as far from the end
            return row + group * ((seq_q + (ROWS - 1)) // ROWS * ROWS - ROWS - 2 * row)
        return row + group * ROWS

    # ---- producer

    @cute.jit
    def produce(
        self,
        launch: Launch,
        numbers: Numbers,
        query: TmaOperand,
        key: TmaOperand,
        value: TmaOperand,
        barriers: Barriers,
    ):
        """The loads of this CTA's tiles, by one warp."""
        index = self.first_tile()
        # Phase 1: fresh stages count as released, so the first round waits for nobody.
        at, q_phase, queue_phase = Position(Int32(0), Int32(1)), Int32(1), Int32(1)
        while index < numbers.tiles * numbers.layers:
            following = self.queue.draw(index, numbers.tiles * numbers.layers, launch.mCounter)
            tile = self.locate(index, launch, numbers)
            # Surplus tiles of varlen sequences have no rows; consumers skip them by the same test.
            if tile.valid > 0:
                keys = self.loads.keys_of(key, tile.begin_kv, tile.head_kv, tile.batch, False)
                values = self.loads.keys_of(value, tile.begin_kv, tile.head_kv, tile.batch, True)
                pages = Pages(None, Int32(0), Int32(0))
                if const_expr(self.sequences.page_size):
                    pages = Pages(launch.ends.mTable[tile.batch, None], tile.band.seq_kv - 1, launch.mK.shape[0])
                first, end = tile.blocks.first, tile.blocks.end
                if end <= first:
                    # No row sees a key. Groups wait for their queries nevertheless.
                    self.load_queries(query, tile, barriers, q_phase)
                before = at
                for i in cutlass.range(end - first, unroll=1):
                    # Waits on empty_k until every group's Q K^T has read the block that was in this stage.
                    self.keys.acquire(barriers.full_k, barriers.empty_k, at.stage, at.phase)
                    self.loads.load(keys, end - 1 - i, at.stage, barriers.full_k, pages)
                    if i == 0:
                        # Behind the first K: a group's queries may have to wait for its last tile's results.
                        self.load_queries(query, tile, barriers, q_phase)
                    else:
                        # Waits on empty_v until every group's P V has read the block that was in this stage.
                        self.keys.acquire(barriers.full_v, barriers.empty_v, before.stage, before.phase)
                        self.loads.load(values, end - i, before.stage, barriers.full_v, pages)
                    before = at
                    at = self.keys.next(at)
                if end > first:
                    # The first block's V, one block behind its K.
                    self.keys.acquire(barriers.full_v, barriers.empty_v, before.stage, before.phase)
                    self.loads.load(values, first, before.stage, barriers.full_v, pages)
                q_phase = q_phase ^ 1
            # Where tiles are drawn from a counter: waits until all consumer threads have read the previous number.
            self.queue.publish(barriers.queue, following, queue_phase)
            queue_phase = queue_phase ^ 1
            index = following

    @cute.jit
    def load_queries(self, query: TmaOperand, tile: Tile, barriers: Barriers, phase: Int32):
        """Each group's queries of ``tile``, once the group has released those of its tile before."""
        if const_expr(not self.paired_tiles):
            blocks = self.loads.rows_of(query, ROWS, tile.begin_q + tile.row, tile.head, tile.batch, False)
        else:
            blocks = self.loads.rows_of(query, ROWS, tile.begin_q, tile.head, tile.batch, False)
        for group in cutlass.range_constexpr(self.groups):
            block = group
            if const_expr(self.paired_tiles):
                block = self.row_of(tile.row, Int32(group), tile.band.seq_q) // ROWS
            # Waits on empty_q until this group no longer needs the bytes, for queries or for results.
            self.queries.acquire(barriers.full_q, barriers.empty_q, Int32(group), phase)
            full = barriers.full_q + group
            cute.copy(blocks.tma, blocks.source[None, block], blocks.target[None, group], tma_bar_ptr=full)

    # ---- consumers

    @cute.jit
    def consume(self, held: Consumer, launch: Launch):
        """A consumer warp group's 64 rows of each of this CTA's tiles."""
        own, barriers = held.own, held.barriers
        index = self.first_tile()
        # Ping-pong: the first group has the first turn.
        self.products_order.start(own.group)
        at, q_phase, queue_phase = Position(Int32(0), Int32(0)), Int32(0), Int32(0)
        while index < held.numbers.tiles * held.numbers.layers:
            tile = self.locate(index, launch, held.numbers)
            row = self.row_of(tile.row, own.group, tile.band.seq_q)
            blocks = tile.blocks
            if const_expr(self.paired_tiles):
                blocks = self.group_mask.blocks(row, tile.band)
            if tile.valid > 0:
                band = tile.band
                if const_expr(self.mask.given):
                    gMask = launch.mMask[tile.batch, tile.head, None, None]
                    band = Band(band.seq_q, band.seq_kv, band.left, band.right, gMask)
                seen = GroupTile(row, band)
                self.start_rows(held, launch.mSinks, tile.head)
                # Waits for this group's queries.
                cute.arch.mbarrier_wait(barriers.full_q + own.group, q_phase)
                if const_expr(self.paired_tiles):
                    # Blocks that only the other group's rows see.
                    at = self.skip_blocks(held, tile.blocks.end - blocks.end, at)
                first, end = blocks.first, blocks.end
                if end > first:
                    # Last block, masked: scores and softmax; its P V runs beside the next block's softmax.
                    self.attend_last(held, seen, end - 1, at)
                    # Masked blocks: the right edge (causal, window, the last key) cuts them; with a given mask, all.
                    for i in cutlass.range(1, end - blocks.whole_end, unroll=1):
                        at = self.attend(held, seen, end - 1 - i, at, True)
                    if const_expr(not self.mask.given):
                        # Unmasked blocks: every row sees all their keys.
                        after = cutlass.min(blocks.whole_end, end - 1)
                        for i in cutlass.range(after - blocks.whole_first, unroll=1):
                            at = self.attend(held, seen, after - 1 - i, at, False)
                        if const_expr(self.mask.limited_left):
                            # Masked blocks: the window's left edge cuts them.
                            after = cutlass.min(blocks.whole_first, end - 1)
                            for i in cutlass.range(after - first, unroll=1):
                                at = self.attend(held, seen, after - 1 - i, at, True)
                    if const_expr(self.separate_output_smem):
                        # The last Q K^T is done: the producer, waiting on empty_q, may load the next tile's Q.
                        self.queries.release(own.thread, barriers.empty_q, own.group, Boolean(True))
                    # First block: its P V.
                    at = self.accumulate_first(held, seen, first, at)
                else:
                    # No row of the group sees a key here: accumulators and totals stay as start_rows left them.
                    if const_expr(self.separate_output_smem):
                        self.queries.release(own.thread, barriers.empty_q, own.group, Boolean(True))
                result = ResultTile(tile.layer, tile.batch, tile.head, row, tile.begin_q, band.seq_q)
                # Without separate_output_smem this arrives on empty_q too, once results have left the queries' bytes.
                self.results.store(own, result, launch.mO, launch.mLse, held.acc_o, held.states, barriers.empty_q)
                q_phase = q_phase ^ 1
            # Waits for the number of the next tile, where tiles are drawn from a counter.
            index = self.queue.receive(barriers.queue, index, queue_phase)
            queue_phase = queue_phase ^ 1

    @cute.jit
    def start_rows(self, held: Consumer, mSinks: cute.Tensor | None, head: Int32):
        """Empty accumulators; with sinks, each row starts at its head's logit."""
        held.acc_o.fill(0.0)
        self.softmax.start(held.states)
        if const_expr(mSinks is not None):
            for r in cutlass.range_constexpr(2):
                logit = mSinks[head].to(Float32)
                if const_expr(self.split > 1):  # noqa: SIM102  known when compiled
                    if cute.arch.block_idx_in_cluster() > 0:  # the cluster counts it once, in its first CTA
                        logit = -Float32.inf
                self.softmax.start_with(r, logit, held.states)

    @cute.jit
    def skip_blocks(self, held: Consumer, count: Int32, at: Position) -> Position:
        """Passes over ``count`` blocks that no row of this group sees. Returns the next position."""
        barriers = held.barriers
        for _ in cutlass.range(count, unroll=1):
            # A stage is released only once it is full: the producer counts one arrival of each group for each load.
            cute.arch.mbarrier_wait(barriers.full_k + at.stage, at.phase)
            self.keys.release(held.own.thread, barriers.empty_k, at.stage, Boolean(True))
            cute.arch.mbarrier_wait(barriers.full_v + at.stage, at.phase)
            self.keys.release(held.own.thread, barriers.empty_v, at.stage, Boolean(True))
            at = self.keys.next(at)
        return at

    @cute.jit
    def attend_last(self, held: Consumer, seen: GroupTile, block: Int32, at: Position):
        """The last ``block`` of keys, the first to be walked: scores and softmax alone."""
        barriers = held.barriers
        # Waits for the block's K; S = Q K^T, then K's stage is free.
        cute.arch.mbarrier_wait(barriers.full_k + at.stage, at.phase)
        self.products.multiply(held.qk_mma, held.acc_s, held.rQ, held.rK[None, None, None, at.stage], True)
        warpgroup.wait_group(0)
        self.keys.release(held.own.thread, barriers.empty_k, at.stage, Boolean(True))
        # O is 0 still, so that nothing is rescaled.
        self.probabilities(held, seen, block, True)
        round_to(held.acc_s, held.rP)

    @cute.jit
    def attend(
        self, held: Consumer, seen: GroupTile, block: Int32, before: Position, masked: cutlass.Constexpr
    ) -> Position:
        """One more ``block``: its scores and softmax, and P V of the block at ``before``. Returns its own position."""
        barriers, thread = held.barriers, held.own.thread
        at = self.keys.next(before)
        # Waits for this block's K, then (ping-pong) for the group before to start its products; S = Q K^T starts.
        cute.arch.mbarrier_wait(barriers.full_k + at.stage, at.phase)
        self.products_order.wait(held.own.group)
        self.products.multiply(held.qk_mma, held.acc_s, held.rQ, held.rK[None, None, None, at.stage], True)
        # Waits for V of the block before; O += P V starts behind S.
        cute.arch.mbarrier_wait(barriers.full_v + before.stage, before.phase)
        self.clear_outside(held, seen, block + 1, before.stage)
        self.products.multiply(held.pv_mma, held.acc_o, held.rP, held.rV[None, None, None, before.stage], False)
        # Both products are on their way: the next group may start its own.
        self.products_order.signal(held.own.group)
        # Waits for S alone: K's stage is free, and the softmax runs while P V multiplies.
        warpgroup.wait_group(1)
        self.keys.release(thread, barriers.empty_k, at.stage, Boolean(True))
        moved = self.probabilities(held, seen, block, masked)
        # Waits for P V: V's stage is free, and only now O may be rescaled and P, which the product reads, replaced.
        warpgroup.wait_group(0)
        self.keys.release(thread, barriers.empty_v, before.stage, Boolean(True))
        if moved:
            self.softmax.rescale(as_warps(held.acc_o), held.states.shrink)
        round_to(held.acc_s, held.rP)
        return at

    @cute.jit
    def accumulate_first(self, held: Consumer, seen: GroupTile, block: Int32, at: Position) -> Position:
        """P V of the first ``block``, the last to be walked. Returns the next tile's first position."""
        barriers = held.barriers
        # Waits for the block's V; O += P V, then V's stage is free.
        cute.arch.mbarrier_wait(barriers.full_v + at.stage, at.phase)
        self.clear_outside(held, seen, block, at.stage)
        self.products.multiply(held.pv_mma, held.acc_o, held.rP, held.rV[None, None, None, at.stage], False)
        warpgroup.wait_group(0)
        self.keys.release(held.own.thread, barriers.empty_v, at.stage, Boolean(True))
        return self.keys.next(at)

    @cute.jit
    def probabilities(self, held: Consumer, seen: GroupTile, block: Int32, masked: cutlass.Constexpr) -> Boolean:
        """Scores to unnormalised probabilities. Returns whether O must be rescaled by ``held.states.shrink``."""
        if const_expr(self.softmax.capped):
            self.softmax.cap(held.acc_s, held.numbers.cap_inner, held.numbers.cap_outer)
        if const_expr(masked):
            acc_s, column = as_warps(held.acc_s), block * self.tile_kv
            self.group_mask.apply(held.own.thread, acc_s, seen.row, column, seen.band, held.own.warp_mma)
        return self.softmax.probabilities(as_warps(held.acc_s), held.states, held.numbers.scale)

    @cute.jit
    def clear_outside(self, held: Consumer, seen: GroupTile, block: Int32, stage: Int32):
        """Zeros the rows of V behind a varlen sequence's end or a cache's length, which might be NaN; and those of a
        cache before the window of the CTA's first row, whose pages may be gone.

        Their probabilities are 0, and 0 * NaN is NaN. Behind the tensor's end TMA has written zeros.
        """
        own = held.own
        if const_expr(self.sequences.varlen or self.sequences.cached):
            rows = seen.band.seq_kv - block * self.tile_kv
            outside, first = rows < self.tile_kv, None
            if const_expr(self.sequences.cached and self.mask.limited_left):
                first = seen.row - own.group * ROWS - seen.band.left - block * self.tile_kv
                outside = outside or first > 0
            if outside:
                at_v = own.storage + (self.smem.v_at + stage * self.smem.stage_bytes)
                self.rows_kv.clear_rows(own.thread, self.rows_kv.address(own.thread, at_v), rows, first)
                # wgmma reads shared memory by the async proxy: these writes become visible to it,
                cute.arch.fence_proxy("async.shared", space="cta")
                # and the group waits until all its threads have written. Each group clears the rows for itself.
                cute.arch.barrier(barrier_id=FIRST_GROUP_BARRIER + own.group, number_of_threads=GROUP)
