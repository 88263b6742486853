"""Gradients of attention, warpgroup schedule, by TMA and warpgroup MMA (sm_90): no atomics, one order of summation.

With ``P = exp(S - lse)``, ``dP = dO V^T`` and ``dS = P * (dP - delta)``, where ``delta`` is a query's sum of dO * O::

    dV = P^T dO        dK = scale * dS^T Q        dQ = scale * dS K

A CTA owns 64 rows of one head for each of ``groups`` consumer warp groups, and walks tiles of the other side's rows:
keys walk the queries of all heads of their group, queries walk keys. With owned operands X and walked ones Y::

    of           X1   X2   Y1   Y2   S = X1 Y1^T   dP = X2 Y2^T   first result: dS Y1   second result: P Y2
    q            Q    dO   K    V    Q K^T         dO V^T         dQ                    -
    k, v, kv,    K    V    Q    dO   K Q^T         V dO^T         dK                    dV
    qkv

so P and dS are accumulators of the owned rows, and become A operands from registers. A walked tile is read twice, with
its columns contiguous along k for S and dP and along n for the results.

Of ``qkv``, dS goes to memory too, from registers, in blocks (``parts/score_blocks.py``); a second kernel of the same
launch makes dQ of it (``warpgroup_queries.py``). A launch may be about a part of the heads, whose dS finds room.

Roles:
    Consumer warp groups 0 .. groups - 1 (128 threads each): group g owns rows ``64 g .. 64 g + 63`` of the tile. The
        second group does what the first does, for the next 64 rows, with the same walked tiles.
    Producer warp group (the last 128 threads), which gives registers to the consumers (setmaxnreg): its first warp
        issues all TMA loads and passes tiles on. Where queries are walked, its second warp loads their statistics, lse
        and delta, into shared memory. The others idle.

Pipelines (mbarriers in shared memory; producer warps wait on ``empty``, consumers wait on ``full``):
    ==============  ==========  ================================================  =====================================
    barriers        stages      full: arrivals                                    empty: arrivals
    ==============  ==========  ================================================  =====================================
    ``*_x``         1           1 and the bytes of all owned rows                 ``groups``: results have left, which
                                                                                  use the owned rows' bytes
    ``full_1``      ``stages``  1 and the bytes of Y1; where queries are walked,  (``empty``)
                                1 more of the warp that writes their statistics
    ``full_2``      ``stages``  1 and the bytes of Y2                             (``empty``)
    ``empty``       ``stages``  (``full_1``, ``full_2``)                          ``groups``: Y1, Y2 and statistics
                                                                                  have been read
    queue           1           1: a tile's number                                every consumer thread, and 32 of the
                                                                                  statistics' warp: it has been read
    ==============  ==========  ================================================  =====================================
    Named barriers: one for each group's 128 threads.

One tile, producer:
    Y1 and Y2 of the first walked tile; the owned rows, once all groups have delivered the tile before; further walked
    tiles, head by head.
One step, consumer group:
    Wait for Y1 (and statistics): start S. Wait for Y2: start dP. Wait for S: P by exponentials, while dP runs. Start
    ``P Y2``; wait for dP: dS, while ``P Y2`` runs. Start ``dS Y1``, wait for it, release the stage. One group computes
    exponentials while another multiplies.
    Regions of each head, in this order: tiles that the band's left edge cuts, masked; tiles seen whole, unmasked; tiles
    that its right edge or the last key cuts, masked. With a given mask all tiles are masked.

The next tile's owned rows are loaded behind its first walked tile, once ``empty_x`` has every group's arrival: after
its results have been read from shared memory. A query that sees no key has inf as log-sum-exp (``BLIND``), so its
probabilities are 0, and with them its gradients; keys that no query sees get 0.

Refuses (``ops/attention/backward_config.py``): GPUs without wgmma, tiles whose accumulators do not fit the registers.

Source:
    FlashAttention-3 (Shah 2024) keeps P and dS of transposed scores in registers; it computes dQ in the same kernel and
    adds it up by atomics. Here dQ has a kernel of its own, in one order of summation: 7 products instead of 5, or 5
    and the bytes of dS.
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

from cutekernels.kernels.cute.attention.warpgroup_queries import WarpgroupQueryGradients
from cutekernels.kernels.cute.parts.attention_smem import BLOCK_KEYS, WarpgroupBackwardSmem
from cutekernels.kernels.cute.parts.groups import (
    ConsumerThread,
    GroupProducts,
    as_warps,
    round_to,
    store_rows,
)
from cutekernels.kernels.cute.parts.head_loads import HeadLoads, TmaBlocks, TmaOperand
from cutekernels.kernels.cute.parts.heads import HeadRows
from cutekernels.kernels.cute.parts.mask import Band, BandMask, Blocks
from cutekernels.kernels.cute.parts.mma import WarpMma
from cutekernels.kernels.cute.parts.pipeline import Position, StagePipeline
from cutekernels.kernels.cute.parts.schedule import TileQueue
from cutekernels.kernels.cute.parts.score_blocks import WORDS, ScoreBlocks
from cutekernels.kernels.cute.parts.score_gradients import (
    BLIND,
    GradientNumbers,
    QueryStatistics,
    ScoreFactors,
    ScoreGradients,
)
from cutekernels.kernels.cute.parts.sequences import Ends, HeadOrder, Sequences
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax
from cutekernels.kernels.cute.parts.warp_groups import GROUP, ROWS, TmaTensor, WarpGroupBody

FIRST_GROUP_BARRIER = 1  # named barriers; 0 is the CTA's


@dataclass(frozen=True)
class Launch:
    """Tensors of a launch that roles read beside the loads' own."""

    mFirst: cute.Tensor | None
    mSecond: cute.Tensor | None
    mQ: cute.Tensor
    mK: cute.Tensor
    mStats: cute.Tensor
    mMask: cute.Tensor | None
    mCuQ: cute.Tensor | None
    mCuKv: cute.Tensor | None
    mCounter: cute.Tensor | None
    mDs: cute.Tensor | None
    layer: Int32 | None  # the first head of K that a launch is about, where dS is handed on


@dataclass(frozen=True)
class Barriers:
    """mbarriers in shared memory, one for each stage, and the queue of tiles."""

    full_x: cute.Pointer
    empty_x: cute.Pointer
    full_1: cute.Pointer
    full_2: cute.Pointer
    empty: cute.Pointer
    queue: cute.Pointer


@dataclass(frozen=True)
class Tile:
    """A CTA's tile of owned rows, and the walked rows that it meets."""

    batch: Int32
    head: Int32
    row: Int32  # the first one, in its sequence
    valid: Int32  # rows that exist
    head_q: Int32  # the first query head that it meets
    head_y: Int32  # the first walked head
    heads: Int32  # to walk; 0 where no walked row is seen
    begin_x: Int32  # of the sequences, in varlen tensors
    begin_y: Int32
    band: Band  # rows are owned, columns walked
    blocks: Blocks  # of walked rows, of each head
    statistics: QueryStatistics  # from the first query of ``head_q`` on


@dataclass(frozen=True)
class Consumer:
    """State of a consumer thread from its first tile to its last; None where its results do not need it."""

    own: ConsumerThread
    xy_mma: cute.TiledMma
    py_mma: cute.TiledMma
    rX1: cute.Tensor  # descriptors (MMA, M, D) of the group's rows
    rX2: cute.Tensor
    rY1: cute.Tensor  # descriptors (MMA, N, D, STAGE)
    rY2: cute.Tensor
    rY1t: cute.Tensor  # descriptors (MMA, D, WALKED, STAGE)
    rY2t: cute.Tensor
    acc_s: cute.Tensor  # (MMA, M, N)
    acc_dp: cute.Tensor | None
    acc_1: cute.Tensor | None  # dQ or dK (MMA, M, D)
    acc_2: cute.Tensor | None  # dV
    rP: cute.Tensor | None  # (MMA, M, WALKED), 16 bits
    rDs: cute.Tensor | None
    rLse: cute.Tensor  # of this thread's two rows, where these are queries
    rDelta: cute.Tensor
    numbers: GradientNumbers
    barriers: Barriers


@dataclass(frozen=True)
class GroupTile:
    """The part of one walked head that a group's 64 rows of a tile see."""

    row: Int32  # the group's first one
    band: Band
    ds: cute.Pointer | None  # this warp's blocks of dS from query 0 on, where they are handed on


@dataclass(frozen=True)
class WarpgroupAttentionBackward(WarpGroupBody):
    """The body; its header is the module's.

    ``of``: the gradients, ``"q"``, ``"k"``, ``"v"``, ``"kv"`` or ``"qkv"``; the owned rows follow from it. The rows of
    ``mask`` are a CTA's owned ones, its columns the walked ones. ``resident``: most CTAs of a persistent grid, which
    draw their tiles from a counter; 0 for one CTA a tile.
    """

    of: str
    groups: int
    tile_walked: int
    head_dim: int
    padded: int
    stages: int
    mask: BandMask
    softmax: OnlineSoftmax
    order: HeadOrder
    sequences: Sequences
    resident: int

    REGISTERS: ClassVar[dict[int, tuple[int, int]]] = {1: (56, 256), 2: (24, 240), 3: (32, 160)}

    @property
    def tile_own(self) -> int:
        return ROWS * self.groups

    @property
    def by_keys(self) -> bool:
        return self.of != "q"

    @property
    def wants_ds(self) -> bool:
        """Whether dS is needed: for dQ or dK, the first result."""
        return self.of != "v"

    @property
    def wants_p(self) -> bool:
        """Whether P is needed: for dV, the second result."""
        return "v" in self.of

    @property
    def hands_on(self) -> bool:
        """Whether dS goes to memory, for dQ by a second kernel of the same launch."""
        return self.by_keys and "q" in self.of

    @property
    def blocks(self) -> ScoreBlocks:
        return ScoreBlocks(self.mask)

    @property
    def owned(self) -> int:
        """Owned operands: K and V, Q and dO, or K alone."""
        return 2 if self.wants_ds else 1

    @property
    def smem(self) -> WarpgroupBackwardSmem:
        return WarpgroupBackwardSmem(
            self.groups, self.tile_walked, self.head_dim, self.stages, self.owned, self.by_keys
        )

    @property
    def rows_own(self) -> HeadRows:
        """A group's rows of results."""
        return HeadRows(ROWS, self.head_dim, self.padded, self.groups, GROUP)

    @property
    def rows_walked(self) -> HeadRows:
        return HeadRows(self.tile_walked, self.head_dim, self.padded, self.stages, GROUP)

    @property
    def loads(self) -> HeadLoads:
        return HeadLoads(self.tile_walked, self.padded, self.sequences)

    @property
    def pipeline(self) -> StagePipeline:
        """The stages of a walked operand."""
        return StagePipeline(self.stages, self.smem.stage_bytes, self.groups, 1)

    @property
    def products(self) -> GroupProducts:
        return GroupProducts(self.tile_walked, self.padded)

    @property
    def owners(self) -> StagePipeline:
        """The owned operands' one stage, refilled for each tile."""
        return StagePipeline(1, self.smem.walked_at, self.groups, 1)

    @property
    def queue(self) -> TileQueue:
        return TileQueue(self.resident > 0, GROUP * self.groups + (32 if self.by_keys else 0))

    @property
    def scores(self) -> ScoreGradients:
        """The elementwise work on one group's rows."""
        return ScoreGradients(replace(self.mask, tile_q=ROWS), self.softmax, self.by_keys, self.wants_ds)

    def layouts(self, dtype: type[cutlass.Numeric]) -> tuple[cute.ComposedLayout, ...]:
        """Owned rows ``(64, D, groups)``, walked ones ``(tile, D, STAGE)`` and the same as ``(D, tile, STAGE)``."""
        return (
            hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, 0, self.padded), dtype, self.groups),
            hopper_helpers.make_smem_layout_b(
                LayoutEnum.ROW_MAJOR, (0, self.tile_walked, self.padded), dtype, self.stages
            ),
            hopper_helpers.make_smem_layout_b(
                LayoutEnum.COL_MAJOR, (0, self.padded, self.tile_walked), dtype, self.stages
            ),
        )

    @cute.jit
    def __call__(
        self,
        mFirst: cute.Tensor | None,  # dQ or dK: (B, S, H, D), or (TOTAL, H, D)
        mSecond: cute.Tensor | None,  # dV
        mDo: cute.Tensor,  # as mQ
        mQ: cute.Tensor,  # (B, SQ, HQ, D), or (TOTAL_Q, HQ, D)
        mK: cute.Tensor,  # (B, SKV, HKV, D), or (TOTAL_KV, HKV, D)
        mV: cute.Tensor,  # as mK
        mStats: cute.Tensor,  # (2 * B * HQ * SQ,): lse to base 2, then delta, as (B, HQ, SQ) or (HQ, TOTAL_Q)
        mMask: cute.Tensor | None,  # (B, HQ, SQ, SKV)
        mCuQ: cute.Tensor | None,  # (B + 1,)
        mCuKv: cute.Tensor | None,  # (B + 1,)
        mCounter: cute.Tensor | None,  # (1,), zero before and after a launch
        mDq: cute.Tensor | None,  # as mQ
        mDs: cute.Tensor | None,  # (heads of Q, ROWS, COLUMNS, 256), see ``ScoreBlocks``
        layer: Int32 | None,  # the first head of K, counted over the batch, whose heads of Q these are
        scale: Float32,  # factor of scores, to base 2
        cap_inner: Float32,
        cap_outer: Float32,
        factor: Float32,  # factor of dQ and dK
        left: Int32,  # keys seen before a query's own, where limited
        right: Int32,  # and behind it
        stream: cuda.CUstream,
    ):
        dtype = mQ.element_type
        at = const_expr(self.sequences.rows_mode)
        mX1, mX2, mY1, mY2, mCu = mQ, mDo, mK, mV, mCuQ
        if const_expr(self.by_keys):
            mX1, mX2, mY1, mY2, mCu = mK, mV, mQ, mDo, mCuKv
        tiles, layers = self.sequences.grid(mX1, mCu, self.tile_own)
        heads_per_kv = mQ.shape[at + 1] // mK.shape[at + 1]
        if const_expr(self.hands_on):
            layers = mDs.shape[0] // heads_per_kv
        bytes_per_head = Int64(self.sequences.length(mY1, mCu)) * (4 * self.head_dim)
        if const_expr(self.by_keys):
            bytes_per_head = bytes_per_head * heads_per_kv
            heads_per_kv = Int32(1)  # no two heads share the rows they walk
        band = self.order.band(layers, heads_per_kv, bytes_per_head)
        layout_x, layout_y, layout_yt = self.layouts(dtype)
        operands = ((mX1, layout_x), (mX2, layout_x), (mY1, layout_y), (mY2, layout_y))
        loads = tuple([TmaTensor(*self.loads.make_tma(mX, layout, False)) for mX, layout in operands])
        count = tiles * layers
        blocks = count if const_expr(self.resident == 0) else cutlass.min(count, Int32(self.resident))
        self.kernel(
            Launch(mFirst, mSecond, mQ, mK, mStats, mMask, mCuQ, mCuKv, mCounter, mDs, layer),
            loads,
            GradientNumbers(ScoreFactors(scale, cap_inner, cap_outer), factor, left, right, tiles, layers, band),
            (
                self.products.xy_mma(dtype),
                self.products.py_mma(dtype),
                WarpMma(GROUP // 32, 1, Float32, True, True).tiled_mma(dtype),
            ),
            (layout_x, layout_y, layout_yt),
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent
            stream=stream,
        )
        if const_expr(self.hands_on):
            queries = WarpgroupQueryGradients(
                self.head_dim, self.padded, self.blocks, HeadOrder("rows", self.order.l2_bytes), self.resident
            )
            queries(mDq, mDs, mK, mCounter, layer, factor, left, right, stream)

    @cute.kernel
    def kernel(
        self,
        launch: Launch,
        loads: tuple[TmaTensor, TmaTensor, TmaTensor, TmaTensor],  # X1, X2, Y1, Y2; coordinates (S, D, H[, B])
        numbers: GradientNumbers,
        mmas: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout],
    ):
        xy_mma, py_mma, warp_mma = mmas
        layout_x, layout_y, layout_yt = layouts
        tid, group, warp = self.role()
        producer = const_expr(self.groups)  # the number of the producer warp group
        dtype = launch.mQ.element_type

        # ---- setup: shared memory, barriers

        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=ALIGNMENT)
        at_x2 = storage + (self.owned - 1) * self.groups * self.smem.group_bytes
        at_y1 = storage + self.smem.walked_at
        at_y2 = at_y1 + self.stages * self.smem.stage_bytes
        sX1 = self.buffer(storage, layout_x, dtype)  # (64, D, groups)
        sX2 = self.buffer(at_x2, layout_x, dtype)
        sY1 = self.buffer(at_y1, layout_y, dtype)  # (tile_walked, D, STAGE)
        sY2 = self.buffer(at_y2, layout_y, dtype)
        sY1t = self.buffer(at_y1, layout_yt, dtype)  # (D, tile_walked, STAGE)
        sY2t = self.buffer(at_y2, layout_yt, dtype)
        full_x = cute.recast_ptr(storage + self.smem.barriers_at, dtype=Int64)
        empty_x = full_x + 1
        full_1 = empty_x + 1
        full_2 = full_1 + self.stages
        empty = full_2 + self.stages
        queue = empty + self.stages
        barriers = Barriers(full_x, empty_x, full_1, full_2, empty, queue)
        self.initialize(warp, tuple([load.tma for load in loads]), lambda: self.init_barriers(barriers))
        # All threads wait for the thread that initializes the barriers.
        cute.arch.sync_threads()

        # ---- roles

        if group == producer:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 4 * producer:
                buffers = (sX1, sX2, sY1, sY2)
                operands = [TmaOperand(load.tma, load.coordinates, s) for load, s in zip(loads, buffers, strict=True)]
                self.produce(launch, numbers, tuple(operands[: self.owned]), tuple(operands[2:]), barriers)
            if const_expr(self.by_keys):  # noqa: SIM102  known when compiled
                if warp == 4 * producer + 1:
                    self.produce_statistics(tid % 32, launch, numbers, storage, barriers)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            own = ConsumerThread(tid % GROUP, group, warp_mma, storage)
            xy_slice, py_slice = xy_mma.get_slice(0), py_mma.get_slice(0)
            rX1 = xy_mma.make_fragment_A(xy_slice.partition_A(sX1))[None, None, None, group]  # (MMA, M, D)
            rX2 = xy_mma.make_fragment_A(xy_slice.partition_A(sX2))[None, None, None, group]
            rY1 = xy_mma.make_fragment_B(xy_slice.partition_B(sY1))  # (MMA, N, D, STAGE)
            rY2 = xy_mma.make_fragment_B(xy_slice.partition_B(sY2))
            rY1t = py_mma.make_fragment_B(py_slice.partition_B(sY1t))  # (MMA, D, WALKED, STAGE)
            rY2t = py_mma.make_fragment_B(py_slice.partition_B(sY2t))
            shape_s = xy_mma.partition_shape_C((ROWS, self.tile_walked))  # (MMA, M, N)
            shape_x = py_mma.partition_shape_C((ROWS, self.padded))  # (MMA, M, D)
            shape_p = py_mma.partition_shape_A((ROWS, self.tile_walked))  # (MMA, M, WALKED)
            acc_s = cute.make_rmem_tensor(shape_s, Float32)
            acc_dp, acc_1, acc_2, rP, rDs = None, None, None, None, None
            if const_expr(self.wants_ds):
                acc_dp = cute.make_rmem_tensor(shape_s, Float32)
                acc_1 = cute.make_rmem_tensor(shape_x, Float32)
                rDs = cute.make_rmem_tensor(shape_p, dtype)
            if const_expr(self.wants_p):
                acc_2 = cute.make_rmem_tensor(shape_x, Float32)
                rP = cute.make_rmem_tensor(shape_p, dtype)
            held = Consumer(
                own=own,
                xy_mma=xy_mma,
                py_mma=py_mma,
                rX1=rX1,
                rX2=rX2,
                rY1=rY1,
                rY2=rY2,
                rY1t=rY1t,
                rY2t=rY2t,
                acc_s=acc_s,
                acc_dp=acc_dp,
                acc_1=acc_1,
                acc_2=acc_2,
                rP=rP,
                rDs=rDs,
                rLse=cute.make_rmem_tensor(2, Float32),
                rDelta=cute.make_rmem_tensor(2, Float32),
                numbers=numbers,
                barriers=barriers,
            )
            self.consume(held, launch)

    def buffer(self, at: cute.Pointer, layout: cute.ComposedLayout, dtype: type[cutlass.Numeric]) -> cute.Tensor:
        """The swizzled buffer at ``at``."""
        return cute.make_tensor(cute.recast_ptr(at, layout.inner, dtype), layout.outer)

    @cute.jit
    def init_barriers(self, barriers: Barriers):
        """One thread's work."""
        self.owners.init(barriers.full_x, barriers.empty_x)
        self.queue.init(barriers.queue)
        for stage in cutlass.range_constexpr(self.stages):
            # The bytes; of a walk of queries their statistics too.
            cute.arch.mbarrier_init(barriers.full_1 + stage, 2 if self.by_keys else 1)
            cute.arch.mbarrier_init(barriers.full_2 + stage, 1)
            cute.arch.mbarrier_init(barriers.empty + stage, self.groups)

    @cute.jit
    def locate(self, index: Int32, launch: Launch, numbers: GradientNumbers) -> Tile:
        """Where tile ``index`` of owned rows lies, and what it walks."""
        at = const_expr(self.sequences.rows_mode)
        mX, mY, ends = launch.mQ, launch.mK, Ends(launch.mCuQ, launch.mCuKv)
        if const_expr(self.by_keys):
            mX, mY, ends = launch.mK, launch.mQ, Ends(launch.mCuKv, launch.mCuQ)
        number, layer = self.order.place(index, numbers.layers, numbers.tiles, numbers.band)
        if const_expr(self.by_keys):
            number = numbers.tiles - 1 - number  # under a causal mask the first keys are seen by most
        if const_expr(self.hands_on):
            layer = layer + launch.layer
        heads_q, heads_kv = launch.mQ.shape[at + 1], launch.mK.shape[at + 1]
        place = self.sequences.locate(number, layer, self.tile_own, mX, mY, ends)
        row = place.tile * self.tile_own
        valid = cutlass.min(cutlass.max(place.seq_x - row, Int32(0)), Int32(self.tile_own))
        heads_per_kv = heads_q // heads_kv
        head_q, head_y, heads, begin_q = place.head, place.head // heads_per_kv, Int32(1), place.begin_x
        if const_expr(self.by_keys):
            head_q, head_y = place.head * heads_per_kv, place.head * heads_per_kv
            heads, begin_q = heads_per_kv, place.begin_y
        # Statistics are (B, HQ, SQ), or (HQ, TOTAL_Q) of varlen sequences.
        between = Int64(launch.mQ.shape[at])
        stats_at = Int64(head_q) * between + begin_q
        if const_expr(not self.sequences.varlen):
            stats_at = (Int64(place.batch) * heads_q + head_q) * between
        shift = place.seq_y - place.seq_x
        left_x, right_x, whole_y = numbers.left - shift, numbers.right + shift, place.seq_y
        if const_expr(self.by_keys):  # a key is seen by queries right before it and left behind it
            left_x, right_x = numbers.right - shift, numbers.left + shift
            # Queries that do not exist are blind: their statistics leave nothing.
            whole_y = (place.seq_y + self.tile_walked - 1) // self.tile_walked * self.tile_walked
        blocks = self.mask.blocks(row, Band(place.seq_x, whole_y, left_x, right_x))
        first, whole_first, whole_end, end = blocks.first, blocks.whole_first, blocks.whole_end, blocks.end
        if valid <= 0:
            whole_first, whole_end, end = first, first, first
        if end <= first:
            heads = Int32(0)
        return Tile(
            batch=place.batch,
            head=place.head,
            row=row,
            valid=valid,
            head_q=head_q,
            head_y=head_y,
            heads=heads,
            begin_x=place.begin_x,
            begin_y=place.begin_y,
            band=Band(place.seq_x, place.seq_y, left_x, right_x),
            blocks=Blocks(first, whole_first, whole_end, end),
            statistics=QueryStatistics(
                launch.mStats.iterator + stats_at, between, Int64(cute.size(launch.mStats)) // 2
            ),
        )

    # ---- producer warps

    @cute.jit
    def produce(self, launch: Launch, numbers: GradientNumbers, owned: tuple, walked: tuple, barriers: Barriers):
        """The loads of this CTA's tiles, by one warp: walked rows head by head, owned ones behind the first of them."""
        index, _, _ = cute.arch.block_idx()
        # Phase 1: fresh stages count as released, so the first round waits for nobody.
        at, x_phase, queue_phase = Position(Int32(0), Int32(1)), Int32(1), Int32(1)
        while index < numbers.tiles * numbers.layers:
            following = self.queue.draw(index, numbers.tiles * numbers.layers, launch.mCounter)
            tile = self.locate(index, launch, numbers)
            if tile.valid > 0:
                first, end, row = tile.blocks.first, tile.blocks.end, tile.begin_x + tile.row
                if tile.heads == 0:
                    # Nothing is walked. Groups wait for their owned rows nevertheless.
                    self.load_owned(owned, tile, row, barriers, x_phase)
                for h in cutlass.range(tile.heads, unroll=1):
                    head = tile.head_y + h
                    y1 = self.loads.rows_of(walked[0], self.tile_walked, tile.begin_y, head, tile.batch, False)
                    y2 = self.loads.rows_of(walked[1], self.tile_walked, tile.begin_y, head, tile.batch, False)
                    for i in cutlass.range(end - first, unroll=1):
                        # Waits on empty until every group has read both tiles that were in this stage; announces Y1.
                        self.pipeline.acquire(barriers.full_1, barriers.empty, at.stage, at.phase)
                        self.load_walked(y1, first + i, at.stage, barriers.full_1)
                        # Y2's bytes have a barrier of their own, so that S starts before they have arrived.
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(barriers.full_2 + at.stage, self.smem.stage_bytes)
                        self.load_walked(y2, first + i, at.stage, barriers.full_2)
                        if h + i == 0:
                            self.load_owned(owned, tile, row, barriers, x_phase)
                        at = self.pipeline.next(at)
                x_phase = x_phase ^ 1
            # Waits until all readers have read the tile's number before.
            self.queue.publish(barriers.queue, following, queue_phase)
            queue_phase = queue_phase ^ 1
            index = following

    @cute.jit
    def load_walked(self, rows: TmaBlocks, block: Int32, stage: Int32, full: cute.Pointer):
        """Starts the load of a walked tile into ``stage``; its bytes arrive on ``full``."""
        cute.copy(rows.tma, rows.source[None, block], rows.target[None, stage], tma_bar_ptr=full + stage)

    @cute.jit
    def load_owned(self, owned: tuple, tile: Tile, row: Int32, barriers: Barriers, phase: Int32):
        """A tile's rows of the owned operands, from ``row`` of their tensors on."""
        # Waits on empty_x until all groups have stored the results of the tile before, which use these bytes.
        self.owners.acquire(barriers.full_x, barriers.empty_x, Int32(0), phase)
        for operand in owned:
            rows = self.loads.rows_of(operand, ROWS, row, tile.head, tile.batch, False)
            for group in cutlass.range_constexpr(self.groups):
                source, target = rows.source[None, group], rows.target[None, group]
                cute.copy(rows.tma, source, target, tma_bar_ptr=barriers.full_x)

    @cute.jit
    def produce_statistics(
        self, lane: Int32, launch: Launch, numbers: GradientNumbers, storage: cute.Pointer, barriers: Barriers
    ):
        """lse and delta of the walked queries, by one warp; those that do not exist leave no probability."""
        index, _, _ = cute.arch.block_idx()
        columns = const_expr(self.tile_walked)
        each = const_expr((columns + 31) // 32)
        shared = cute.recast_ptr(storage + self.smem.stats_at, dtype=Float32)
        at, queue_phase = Position(Int32(0), Int32(1)), Int32(0)
        while index < numbers.tiles * numbers.layers:
            tile = self.locate(index, launch, numbers)
            first, end, seq_y = tile.blocks.first, tile.blocks.end, tile.band.seq_kv
            for h in cutlass.range(tile.heads, unroll=1):
                for i in cutlass.range(end - first, unroll=1):
                    # Global memory to registers, before the stage is free.
                    row = (first + i) * columns
                    source = tile.statistics.begin + (Int64(h) * tile.statistics.between + row)
                    values = cute.make_rmem_tensor((2, each), Float32)
                    for j in cutlass.range_constexpr(each):
                        own = lane + 32 * j
                        values[0, j], values[1, j] = Float32(BLIND), Float32(0.0)
                        if own < columns and row + own < seq_y:
                            values[0, j] = (source + own).load()
                            values[1, j] = (source + (tile.statistics.to_delta + own)).load()
                    # Waits on empty, as the warp that loads Y does: every group has read the statistics in this stage.
                    cute.arch.mbarrier_wait(barriers.empty + at.stage, at.phase)
                    target = shared + at.stage * (2 * columns)
                    for j in cutlass.range_constexpr(each):
                        own = lane + 32 * j
                        if own < columns:
                            target[own] = values[0, j]
                            target[columns + own] = values[1, j]
                    # All lanes have written; one arrives on full_1, where consumers wait for Y1 and for these.
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(barriers.full_1 + at.stage)
                    at = self.pipeline.next(at)
            index = self.queue.receive(barriers.queue, index, queue_phase)
            queue_phase = queue_phase ^ 1

    # ---- consumers

    @cute.jit
    def consume(self, held: Consumer, launch: Launch):
        """A consumer warp group's 64 rows of each of this CTA's tiles."""
        own, barriers = held.own, held.barriers
        index, _, _ = cute.arch.block_idx()
        at, x_phase, queue_phase = Position(Int32(0), Int32(0)), Int32(0), Int32(0)
        while index < held.numbers.tiles * held.numbers.layers:
            tile = self.locate(index, launch, held.numbers)
            first, whole_first = tile.blocks.first, tile.blocks.whole_first
            whole_end, end = tile.blocks.whole_end, tile.blocks.end
            row = tile.row + own.group * ROWS
            if tile.valid > 0:
                if const_expr(self.wants_ds):
                    held.acc_1.fill(0.0)
                if const_expr(self.wants_p):
                    held.acc_2.fill(0.0)
                if const_expr(not self.by_keys):
                    self.scores.row_stats(own, row, tile.band.seq_q, tile.statistics, held.rLse, held.rDelta)
                # Waits for the owned rows.
                cute.arch.mbarrier_wait(barriers.full_x, x_phase)
                for h in cutlass.range(tile.heads, unroll=1):
                    gMask = None
                    if const_expr(self.mask.given):
                        gMask = launch.mMask[tile.batch, tile.head_q + h, None, None]  # (SQ, SKV)
                        if const_expr(self.by_keys):
                            gMask = cute.make_tensor(gMask.iterator, cute.select(gMask.layout, mode=[1, 0]))
                    band = tile.band
                    ds = None
                    if const_expr(self.hands_on):
                        ds = self.place_blocks(own, tile, h, launch)
                    seen = GroupTile(row, Band(band.seq_q, band.seq_kv, band.left, band.right, gMask), ds)
                    if const_expr(not self.mask.given):
                        if const_expr(self.mask.limited_left):
                            # Masked tiles: the band's left edge cuts them.
                            for i in cutlass.range(whole_first - first, unroll=1):
                                at = self.step(held, seen, first + i, at, True)
                        # Unmasked tiles: every owned row meets all their rows.
                        for i in cutlass.range(whole_end - whole_first, unroll=1):
                            at = self.step(held, seen, whole_first + i, at, False)
                    if const_expr(self.mask.given or self.mask.limited_right or not self.by_keys):
                        # Masked tiles: the band's right edge or the last key cuts them; with a given mask, all.
                        for i in cutlass.range(end - whole_end, unroll=1):
                            at = self.step(held, seen, whole_end + i, at, True)
                if const_expr(self.wants_ds):
                    for i in cutlass.range_constexpr(cute.size(held.acc_1)):
                        held.acc_1[i] = held.acc_1[i] * held.numbers.factor
                    self.store(own, 0, tile, row, launch.mFirst, held.acc_1)
                if const_expr(self.wants_p):
                    self.store(own, self.owned - 1, tile, row, launch.mSecond, held.acc_2)
                # The group waits until its results are read from shared memory; then it releases the owned rows' bytes
                # to the producer, which waits on empty_x for all groups.
                cute.arch.barrier(barrier_id=FIRST_GROUP_BARRIER + own.group, number_of_threads=GROUP)
                self.owners.release(own.thread, barriers.empty_x, Int32(0), Boolean(True))
                x_phase = x_phase ^ 1
            # Waits for the number of the next tile, where tiles are drawn from a counter.
            index = self.queue.receive(barriers.queue, index, queue_phase)
            queue_phase = queue_phase ^ 1

    @cute.jit
    def step(self, held: Consumer, seen: GroupTile, block: Int32, at: Position, masked: cutlass.Constexpr) -> Position:
        """One walked tile, ``block``, which is at ``at``. Returns the next tile's position."""
        own, barriers, stage = held.own, held.barriers, at.stage
        statistics = cute.recast_ptr(own.storage + self.smem.stats_at, dtype=Float32)
        # Waits for Y1, and where queries are walked for their statistics.
        cute.arch.mbarrier_wait(barriers.full_1 + stage, at.phase)
        if const_expr(self.sequences.varlen or not self.wants_ds):
            # Y2 too where its rows may have to be cleared, or where no dP waits for it below.
            cute.arch.mbarrier_wait(barriers.full_2 + stage, at.phase)
        if const_expr(self.sequences.varlen):
            self.clear_outside(own, block, stage, seen.band.seq_kv)
        # S = X1 Y1^T starts, then dP = X2 Y2^T as soon as Y2 is there.
        self.products.multiply(held.xy_mma, held.acc_s, held.rX1, held.rY1[None, None, None, stage], True)
        if const_expr(self.wants_ds):
            cute.arch.mbarrier_wait(barriers.full_2 + stage, at.phase)
            self.products.multiply(held.xy_mma, held.acc_dp, held.rX2, held.rY2[None, None, None, stage], True)
        # Waits for S alone: P is computed while dP runs.
        warpgroup.wait_group(const_expr(int(self.wants_ds)))
        rLse = held.rLse
        if const_expr(self.by_keys):
            rLse = self.scores.column_stats(own.thread, 0, stage, statistics)
        self.scores.cap(held.acc_s, held.numbers.factors)
        if const_expr(masked):
            acc_s, column = as_warps(held.acc_s), block * self.tile_walked
            self.scores.mask.apply(own.thread, acc_s, seen.row, column, seen.band, own.warp_mma)
        slopes = self.scores.probabilities(held.acc_s, rLse, held.numbers.factors)
        if const_expr(self.wants_ds and self.wants_p):
            # acc_2 += P Y2 starts; waits for dP alone, which was started before it.
            round_to(held.acc_s, held.rP)
            self.products.multiply(held.py_mma, held.acc_2, held.rP, held.rY2t[None, None, None, stage], False)
            warpgroup.wait_group(1)
        else:
            # Waits for dP; with P alone nothing runs.
            warpgroup.wait_group(0)
        if const_expr(self.wants_ds):
            # dS while P Y2 runs; acc_1 += dS Y1 starts.
            rDelta = held.rDelta
            if const_expr(self.by_keys):
                rDelta = self.scores.column_stats(own.thread, 1, stage, statistics)
            self.scores.gradients(held.acc_s, held.acc_dp, rDelta, slopes)
            if const_expr(self.hands_on):
                self.blocks.hide_missing(own.thread, seen.row, seen.band.seq_q, held.acc_dp)
            round_to(held.acc_dp, held.rDs)
            if const_expr(self.hands_on):
                self.blocks.store(own.thread % 32, held.rDs, seen.ds, block)
            self.products.multiply(held.py_mma, held.acc_1, held.rDs, held.rY1t[None, None, None, stage], False)
        else:
            round_to(held.acc_s, held.rP)
            self.products.multiply(held.py_mma, held.acc_2, held.rP, held.rY2t[None, None, None, stage], False)
        # Waits for all products, which read the stage, P and dS; both producer warps wait on empty for this arrival.
        warpgroup.wait_group(0)
        self.pipeline.release(own.thread, barriers.empty, stage, Boolean(True))
        return self.pipeline.next(at)

    @cute.jit
    def place_blocks(self, own: ConsumerThread, tile: Tile, head: Int32, launch: Launch) -> cute.Pointer:
        """A warp's blocks of dS of a tile's keys and its ``head``-th walked head, from query 0 on."""
        heads_q, heads_kv = launch.mQ.shape[2], launch.mK.shape[2]
        layer = tile.batch * heads_q + tile.head_q + head - launch.layer * (heads_q // heads_kv)
        walked = const_expr(self.tile_walked)
        whole = (tile.band.seq_kv + walked - 1) // walked * walked
        row, column = self.blocks.place(
            tile.row // self.tile_own, Band(tile.band.seq_q, whole, tile.band.left, tile.band.right)
        )
        row = row + own.group * (ROWS // BLOCK_KEYS) + own.thread // 32
        return launch.mDs[layer, row, None, None].iterator + column * (2 * WORDS)

    @cute.jit
    def clear_outside(self, own: ConsumerThread, block: Int32, stage: Int32, seq_y: Int32):
        """Zeros the walked rows behind a varlen sequence's end: they are the next sequence's, and might be NaN.

        Behind the tensor's end TMA has written zeros.
        """
        rows = seq_y - block * self.tile_walked
        if rows < self.tile_walked:
            at = own.storage + (self.smem.walked_at + stage * self.smem.stage_bytes)
            self.rows_walked.clear_rows(own.thread, self.rows_walked.address(own.thread, at), rows)
            at_2 = at + self.stages * self.smem.stage_bytes
            self.rows_walked.clear_rows(own.thread, self.rows_walked.address(own.thread, at_2), rows)
            # wgmma reads shared memory by the async proxy: these writes become visible to it,
            cute.arch.fence_proxy("async.shared", space="cta")
            # and the group waits until all its threads have written. Each group clears the rows for itself.
            cute.arch.barrier(barrier_id=FIRST_GROUP_BARRIER + own.group, number_of_threads=GROUP)

    @cute.jit
    def store(
        self,
        own: ConsumerThread,
        operand: cutlass.Constexpr[int],
        tile: Tile,
        row: Int32,
        mX: cute.Tensor,
        acc: cute.Tensor,
    ):
        """A group's gradients to ``mX``, through its rows of an owned operand, which it no longer reads."""
        valid = cutlass.min(cutlass.max(tile.band.seq_q - row, Int32(0)), Int32(ROWS))
        rG = cute.make_fragment_like(acc, mX.element_type)
        round_to(acc, rG)
        buffer = own.storage + (operand * self.groups + own.group) * self.smem.group_bytes
        # The group waits until all its threads' products have read the operand, whose bytes the gradients replace.
        cute.arch.barrier(barrier_id=FIRST_GROUP_BARRIER + own.group, number_of_threads=GROUP)
        store_rows(own.thread, rG, buffer.toint().to(Int32), self.padded)
        # Orders these writes before those of TMA, which loads the next tile's rows into the same bytes.
        cute.arch.fence_proxy("async.shared", space="cta")
        # The group waits until all its gradients are in shared memory; then whole rows leave, 16 bytes a thread.
        cute.arch.barrier(barrier_id=FIRST_GROUP_BARRIER + own.group, number_of_threads=GROUP)
        out = self.sequences.head(mX, tile.batch, tile.begin_x, tile.head)
        self.rows_own.store(own.thread, out.rows, out.stride, row, self.rows_own.address(own.thread, buffer), valid)
