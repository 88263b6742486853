"""Gradients of attention, warpgroup schedule, by TMA and warpgroup MMA: no atomics, one order of sums.

The mathematics are those of ``backward.py``: with ``P = exp(S - lse)``, ``dP = dO V^T`` and ``dS = P * (dP - delta)``,
``dV = P^T dO``, ``dK = scale * dS^T Q`` and ``dQ = scale * dS K``.

Schedule:
    A CTA owns 64 rows of one head for each of ``groups`` warp groups, and walks tiles of the other side's rows: keys
    walk the queries of all heads of their group, queries walk keys. S and dP of ``owned x walked`` come from shared
    memory; P and dS stay in registers as the A operands of the sums. A walked tile is read twice, with its columns
    contiguous along k for S and dP and along n for the sums.
    A group starts S and dP, computes P while dP runs, starts the sum of P, computes dS while it runs, and starts the
    sum of dS. One group computes exponentials while another multiplies.
    One warp loads by TMA, the owned rows once and walked tiles ``stages`` ahead. A second one fetches the statistics of
    walked queries. Registers go from the loading warp group to the others.

Source:
    FlashAttention-3 (Shah 2024) keeps P and dS of transposed scores in registers; it computes dQ in the same kernel and
    adds it up by atomics. Here dQ has a kernel of its own: 7 products instead of 5, and one order of sums.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cutekernels.kernels.cute.parts.attention_smem import WarpgroupBackwardSmem
from cutekernels.kernels.cute.parts.groups import ROWS, THREADS, GroupProducts, round_to, store_rows
from cutekernels.kernels.cute.parts.head_loads import HeadLoads
from cutekernels.kernels.cute.parts.heads import HeadRows
from cutekernels.kernels.cute.parts.mask import BandMask
from cutekernels.kernels.cute.parts.mma import WarpMma
from cutekernels.kernels.cute.parts.pipeline import StagePipeline
from cutekernels.kernels.cute.parts.schedule import TileQueue
from cutekernels.kernels.cute.parts.score_gradients import BLIND, ScoreGradients
from cutekernels.kernels.cute.parts.sequences import HeadOrder, Sequences
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax

FIRST_GROUP_BARRIER = 1  # named barriers; 0 is the CTA's


@dataclass(frozen=True)
class WarpgroupAttentionBackward:
    """The body. ``of``: the gradients, ``"q"``, ``"k"``, ``"v"`` or ``"kv"``; the owned rows follow from it.

    The rows of ``mask`` are a CTA's owned ones, its columns the walked ones. ``resident``: most CTAs of a persistent
    grid, which draw their tiles from a counter; 0 for one CTA a tile.
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

    @property
    def tile_own(self) -> int:
        return ROWS * self.groups

    @property
    def threads(self) -> int:
        return THREADS * (self.groups + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that loads and of one that multiplies."""
        return {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.groups]

    @property
    def by_keys(self) -> bool:
        return self.of != "q"

    @property
    def wants_ds(self) -> bool:
        """Whether dS is needed: for dQ or dK, the first sum."""
        return self.of != "v"

    @property
    def wants_p(self) -> bool:
        """Whether P is needed: for dV, the second sum."""
        return self.of in ("v", "kv")

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
        return HeadRows(ROWS, self.head_dim, self.padded, self.groups, THREADS)

    @property
    def rows_walked(self) -> HeadRows:
        return HeadRows(self.tile_walked, self.head_dim, self.padded, self.stages, THREADS)

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
        return TileQueue(self.resident > 0, THREADS * self.groups + (32 if self.by_keys else 0))

    @property
    def scores(self) -> ScoreGradients:
        """The elementwise work on one group's rows."""
        mask = self.mask
        rows = BandMask(ROWS, self.tile_walked, mask.limited_left, mask.limited_right, mask.given)
        return ScoreGradients(rows, self.softmax, self.by_keys, self.wants_ds)

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
        group = mQ.shape[at + 1] // mK.shape[at + 1]
        bytes_per_head = Int64(self.sequences.length(mY1, mCu)) * (4 * self.head_dim)
        if const_expr(self.by_keys):
            bytes_per_head = bytes_per_head * group
            group = Int32(1)  # no two heads share the rows they walk
        band = self.order.band(layers, group, bytes_per_head)
        layout_x, layout_y, layout_yt = self.layouts(dtype)
        sources = ((mX1, layout_x), (mX2, layout_x), (mY1, layout_y), (mY2, layout_y))
        loads = [part for mX, layout in sources for part in self.loads.boxed(mX, layout, False)]
        count = tiles * layers
        blocks = count if const_expr(self.resident == 0) else cutlass.min(count, Int32(self.resident))
        self.kernel(
            mFirst, mSecond, mQ, mK, mStats, mMask, mCuQ, mCuKv, mCounter, *loads,
            (scale, cap_inner, cap_outer, factor), left, right, (tiles, layers, band),
            self.products.scores_mma(dtype), self.products.sums_mma(dtype),
            WarpMma(THREADS // 32, 1, Float32, True, True).tiled_mma(dtype), layout_x, layout_y, layout_yt,
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, mFirst: cute.Tensor | None, mSecond: cute.Tensor | None, mQ: cute.Tensor, mK: cute.Tensor,
        mStats: cute.Tensor, mMask: cute.Tensor | None, mCuQ: cute.Tensor | None, mCuKv: cute.Tensor | None,
        mCounter: cute.Tensor | None, tma_x1: cute.CopyAtom, tX1: cute.Tensor, tma_x2: cute.CopyAtom, tX2: cute.Tensor,
        tma_y1: cute.CopyAtom, tY1: cute.Tensor, tma_y2: cute.CopyAtom, tY2: cute.Tensor,
        factors: tuple[Float32, Float32, Float32, Float32], left: Int32, right: Int32,
        walk: tuple[Int32, Int32, Int32], scores_mma: cute.TiledMma, sums_mma: cute.TiledMma, warp_mma: cute.TiledMma,
        layout_x: cute.ComposedLayout, layout_y: cute.ComposedLayout, layout_yt: cute.ComposedLayout,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        team = cute.arch.make_warp_uniform(tid // THREADS)
        warp = cute.arch.make_warp_uniform(tid // 32)
        loading = const_expr(self.groups)  # the warp group that loads
        dtype = mQ.element_type
        smem = self.smem

        # -- setup
        storage = SmemAllocator().allocate(smem.total_bytes, byte_alignment=ALIGNMENT)
        at_x2 = storage + (self.owned - 1) * self.groups * smem.group_bytes
        at_y1 = storage + smem.walked_at
        at_y2 = at_y1 + self.stages * smem.stage_bytes
        buffers = []
        for at, layout in (
            (storage, layout_x), (at_x2, layout_x), (at_y1, layout_y), (at_y2, layout_y), (at_y1, layout_yt),
            (at_y2, layout_yt),
        ):  # fmt: skip
            buffers.append(cute.make_tensor(cute.recast_ptr(at, layout.inner, dtype), layout.outer))
        sX1, sX2, sY1, sY2, sY1t, sY2t = buffers
        full_x = cute.recast_ptr(storage + smem.barriers_at, dtype=Int64)
        empty_x = full_x + 1
        full_1 = empty_x + 1
        full_2 = full_1 + self.stages
        empty = full_2 + self.stages
        queue = empty + self.stages
        barriers = (full_x, empty_x, full_1, full_2, empty)
        if warp == 4 * loading:
            cpasync.prefetch_descriptor(tma_x1)
            cpasync.prefetch_descriptor(tma_x2)
            cpasync.prefetch_descriptor(tma_y1)
            cpasync.prefetch_descriptor(tma_y2)
            with cute.arch.elect_one():
                init_owners, init_queue = self.owners.init, self.queue.init
                init_owners(full_x, empty_x)
                init_queue(queue)
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full_1 + stage, 2 if self.by_keys else 1)  # the bytes, and statistics
                    cute.arch.mbarrier_init(full_2 + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, self.groups)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        load, fetch, consume = self.load, self.fetch, self.consume
        place = (mQ, mK, mStats, mCuQ, mCuKv, left, right, walk)
        if team == loading:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 4 * loading:
                load(
                    place, (tma_x1, tX1, sX1), (tma_x2, tX2, sX2), (tma_y1, tY1, sY1), (tma_y2, tY2, sY2), barriers,
                    queue, mCounter,
                )  # fmt: skip
            if const_expr(self.by_keys):  # noqa: SIM102  known when compiled
                if warp == 4 * loading + 1:
                    fetch(tid % 32, place, storage, barriers, queue)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            consume(
                tid % THREADS, team, place, (mFirst, mSecond, mMask), factors, (scores_mma, sums_mma, warp_mma),
                (sX1, sX2, sY1, sY2, sY1t, sY2t), storage, barriers, queue,
            )  # fmt: skip

    @cute.jit
    def located(self, index: Int32, place: tuple):
        """Tile ``index``: ``(batch, head, first row, rows that exist)``, ``(first query head, first walked head)``,
        begins of owned and walked rows, ``(owned rows, walked rows, left, right)`` of their sequences, ``(first, open,
        closed, end)`` blocks of walked rows and heads to walk, ``(statistics, apart by head, from lse to delta)``.
        """
        mQ, mK, mStats, mCuQ, mCuKv, left, right, (tiles, layers, band) = place
        order, locate, seen = self.order.place, self.sequences.locate, self.mask.blocks
        at = const_expr(self.sequences.rows_mode)
        mX, mY, mCuX, mCuY = mQ, mK, mCuQ, mCuKv
        if const_expr(self.by_keys):
            mX, mY, mCuX, mCuY = mK, mQ, mCuKv, mCuQ
        tile, layer = order(index, layers, tiles, band)
        if const_expr(self.by_keys):
            tile = tiles - 1 - tile  # under a causal mask the first keys are seen by most
        heads_q, heads_kv = mQ.shape[at + 1], mK.shape[at + 1]
        batch, head, tile, begin_x, begin_y, seq_x, seq_y = locate(tile, layer, self.tile_own, mX, mY, mCuX, mCuY)
        row = tile * self.tile_own
        alive = cutlass.min(cutlass.max(seq_x - row, Int32(0)), Int32(self.tile_own))
        group = heads_q // heads_kv
        head_q, head_y, turns, begin_q = head, head // group, Int32(1), begin_x
        if const_expr(self.by_keys):
            head_q, head_y, turns, begin_q = head * group, head * group, group, begin_y
        between = Int64(mQ.shape[at])
        stats_at = Int64(head_q) * between + begin_q
        if const_expr(not self.sequences.packed):
            stats_at = (Int64(batch) * heads_q + head_q) * between
        shift = seq_y - seq_x
        left_x, right_x, whole_y = left - shift, right + shift, seq_y
        if const_expr(self.by_keys):  # a key is seen by queries right before it and left behind it
            left_x, right_x = right - shift, left + shift
            # Queries that do not exist are blind: their statistics leave nothing.
            whole_y = (seq_y + self.tile_walked - 1) // self.tile_walked * self.tile_walked
        first, open_, closed, end = seen(row, seq_x, whole_y, left_x, right_x)
        if alive <= 0:
            open_, closed, end = first, first, first
        if end <= first:
            turns = Int32(0)
        return (
            (batch, head, row, alive), (head_q, head_y), (begin_x, begin_y), (seq_x, seq_y, left_x, right_x),
            (first, open_, closed, end, turns), (mStats.iterator + stats_at, between, Int64(cute.size(mStats)) // 2),
        )  # fmt: skip

    # ---- loads

    @cute.jit
    def load(
        self, place: tuple, own_1: tuple, own_2: tuple, walked_1: tuple, walked_2: tuple, barriers: tuple,
        queue: cute.Pointer, mCounter: cute.Tensor | None,
    ):  # fmt: skip
        """The loads of this CTA's tiles: walked rows head by head, owned ones behind the first of them."""
        full_x, empty_x, full_1, full_2, empty = barriers
        index, _, _ = cute.arch.block_idx()
        *_, (tiles, layers, _) = place
        located, rows_of, load_owned = self.located, self.loads.rows_of, self.load_owned
        acquire, advance = self.pipeline.acquire, self.pipeline.advance
        draw, publish = self.queue.draw, self.queue.publish
        stage, phase, refill, drawn = Int32(0), Int32(1), Int32(1), Int32(1)
        while index < tiles * layers:
            following = draw(index, tiles * layers, mCounter)
            (batch, head, row, alive), (_, head_y), (begin_x, begin_y), _, (first, _, _, end, turns), _ = located(
                index, place
            )
            if alive > 0:
                at = (begin_x + row, head, batch)
                if turns == 0:
                    load_owned(own_1, own_2, at, full_x, empty_x, refill)
                for turn in cutlass.range(turns, unroll=1):
                    source_1, target_1 = rows_of(walked_1, self.tile_walked, begin_y, head_y + turn, batch, False)
                    source_2, target_2 = rows_of(walked_2, self.tile_walked, begin_y, head_y + turn, batch, False)
                    for i in cutlass.range(end - first, unroll=1):
                        acquire(full_1, empty, stage, phase)
                        cute.copy(
                            walked_1[0], source_1[None, first + i], target_1[None, stage], tma_bar_ptr=full_1 + stage
                        )
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(full_2 + stage, self.smem.stage_bytes)
                        cute.copy(
                            walked_2[0], source_2[None, first + i], target_2[None, stage], tma_bar_ptr=full_2 + stage
                        )
                        if turn + i == 0:
                            load_owned(own_1, own_2, at, full_x, empty_x, refill)
                        stage, phase = advance(stage, phase)
                refill = refill ^ 1
            publish(queue, following, drawn)
            drawn = drawn ^ 1
            index = following

    @cute.jit
    def load_owned(self, own_1: tuple, own_2: tuple, at: tuple, full: cute.Pointer, empty: cute.Pointer, refill: Int32):
        """A tile's rows of the owned operands, once the groups have delivered the tile before."""
        row, head, batch = at
        acquire, rows_of = self.owners.acquire, self.loads.rows_of
        acquire(full, empty, Int32(0), refill)
        for own in (own_1, own_2)[: self.owned]:
            source, target = rows_of(own, ROWS, row, head, batch, False)
            for group in cutlass.range_constexpr(self.groups):
                cute.copy(own[0], source[None, group], target[None, group], tma_bar_ptr=full)

    @cute.jit
    def fetch(self, lane: Int32, place: tuple, storage: cute.Pointer, barriers: tuple, queue: cute.Pointer):
        """lse and delta of the walked queries, tile by tile; those that do not exist leave no probability."""
        _, _, full_1, _, empty = barriers
        index, _, _ = cute.arch.block_idx()
        *_, (tiles, layers, _) = place
        located, receive, advance = self.located, self.queue.receive, self.pipeline.advance
        columns = const_expr(self.tile_walked)
        each = const_expr((columns + 31) // 32)
        shared = cute.recast_ptr(storage + self.smem.stats_at, dtype=Float32)
        stage, phase, drawn = Int32(0), Int32(1), Int32(0)
        while index < tiles * layers:
            _, _, _, (_, seq_y, _, _), (first, _, _, end, turns), (begin, between, to_delta) = located(index, place)
            for turn in cutlass.range(turns, unroll=1):
                for i in cutlass.range(end - first, unroll=1):
                    row = (first + i) * columns
                    source = begin + (Int64(turn) * between + row)
                    values = cute.make_rmem_tensor((2, each), Float32)
                    for j in cutlass.range_constexpr(each):
                        own = lane + 32 * j
                        values[0, j], values[1, j] = Float32(BLIND), Float32(0.0)
                        if own < columns and row + own < seq_y:
                            values[0, j] = (source + own).load()
                            values[1, j] = (source + (to_delta + own)).load()
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    target = shared + stage * (2 * columns)
                    for j in cutlass.range_constexpr(each):
                        own = lane + 32 * j
                        if own < columns:
                            target[own] = values[0, j]
                            target[columns + own] = values[1, j]
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(full_1 + stage)
                    stage, phase = advance(stage, phase)
            index = receive(queue, index, drawn)
            drawn = drawn ^ 1

    # ---- products

    @cute.jit
    def consume(
        self, member: Int32, team: Int32, place: tuple, tensors: tuple, factors: tuple, mmas: tuple, shared: tuple,
        storage: cute.Pointer, barriers: tuple, queue: cute.Pointer,
    ):  # fmt: skip
        """A multiplying group's rows of this CTA's tiles."""
        *_, (tiles, layers, _) = place
        mFirst, mSecond, mMask = tensors
        scores_mma, sums_mma, _ = mmas
        sX1, sX2, sY1, sY2, sY1t, sY2t = shared
        full_x, empty_x, *_ = barriers
        dtype = sX1.element_type
        index, _, _ = cute.arch.block_idx()
        mask, located, step, deliver = self.mask, self.located, self.step, self.deliver
        row_stats, receive, release = self.scores.row_stats, self.queue.receive, self.owners.release
        scores, sums = scores_mma.get_slice(0), sums_mma.get_slice(0)
        rX1 = scores_mma.make_fragment_A(scores.partition_A(sX1))[None, None, None, team]  # descriptors (MMA, M, D)
        rX2 = scores_mma.make_fragment_A(scores.partition_A(sX2))[None, None, None, team]
        rY1 = scores_mma.make_fragment_B(scores.partition_B(sY1))  # (MMA, N, D, STAGE)
        rY2 = scores_mma.make_fragment_B(scores.partition_B(sY2))
        rY1t = sums_mma.make_fragment_B(sums.partition_B(sY1t))  # (MMA, D, WALKED, STAGE)
        rY2t = sums_mma.make_fragment_B(sums.partition_B(sY2t))
        shape_s = scores_mma.partition_shape_C((ROWS, self.tile_walked))
        shape_x = sums_mma.partition_shape_C((ROWS, self.padded))
        shape_p = sums_mma.partition_shape_A((ROWS, self.tile_walked))
        acc_s = cute.make_rmem_tensor(shape_s, Float32)
        acc_dp, acc_1, acc_2, rP, rDs = None, None, None, None, None
        if const_expr(self.wants_ds):
            acc_dp = cute.make_rmem_tensor(shape_s, Float32)
            acc_1 = cute.make_rmem_tensor(shape_x, Float32)
            rDs = cute.make_rmem_tensor(shape_p, dtype)
        if const_expr(self.wants_p):
            acc_2 = cute.make_rmem_tensor(shape_x, Float32)
            rP = cute.make_rmem_tensor(shape_p, dtype)
        rLse, rDelta = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        operands = (rX1, rX2, rY1, rY2, rY1t, rY2t)
        values = (acc_s, acc_dp, acc_1, acc_2, rP, rDs, rLse, rDelta)
        stage, phase, filled, drawn = Int32(0), Int32(0), Int32(0), Int32(0)
        while index < tiles * layers:
            (batch, head, row, alive), (head_q, _), (begin_x, _), edges, blocks, stats = located(index, place)
            first, open_, closed, end, turns = blocks
            row = row + team * ROWS
            if alive > 0:
                if const_expr(self.wants_ds):
                    acc_1.fill(0.0)
                if const_expr(self.wants_p):
                    acc_2.fill(0.0)
                if const_expr(not self.by_keys):
                    row_stats(member, row, edges[0], stats, rLse, rDelta, mmas[2])
                cute.arch.mbarrier_wait(full_x, filled)
                for turn in cutlass.range(turns, unroll=1):
                    gMask = None
                    if const_expr(mask.given):
                        gMask = mMask[batch, head_q + turn, None, None]
                        if const_expr(self.by_keys):
                            gMask = cute.make_tensor(gMask.iterator, cute.select(gMask.layout, mode=[1, 0]))
                    seen = (row, *edges, gMask)
                    if const_expr(not mask.given):
                        if const_expr(mask.limited_left):
                            for i in cutlass.range(open_ - first, unroll=1):
                                stage, phase = step(
                                    member, team, first + i, stage, phase, True, operands, values, factors, seen, mmas,
                                    storage, barriers,
                                )  # fmt: skip
                        for i in cutlass.range(closed - open_, unroll=1):
                            stage, phase = step(
                                member, team, open_ + i, stage, phase, False, operands, values, factors, seen, mmas,
                                storage, barriers,
                            )  # fmt: skip
                    if const_expr(mask.given or mask.limited_right or not self.by_keys):
                        for i in cutlass.range(end - closed, unroll=1):
                            stage, phase = step(
                                member, team, closed + i, stage, phase, True, operands, values, factors, seen, mmas,
                                storage, barriers,
                            )  # fmt: skip
                at = (batch, head, row, begin_x, edges[0])
                if const_expr(self.wants_ds):
                    for i in cutlass.range_constexpr(cute.size(acc_1)):
                        acc_1[i] = acc_1[i] * factors[3]
                    deliver(member, team, 0, at, mFirst, acc_1, storage)
                if const_expr(self.wants_p):
                    deliver(member, team, self.owned - 1, at, mSecond, acc_2, storage)
                cute.arch.barrier(barrier_id=FIRST_GROUP_BARRIER + team, number_of_threads=THREADS)  # results are read
                release(member, empty_x, Int32(0), Boolean(True))
                filled = filled ^ 1
            index = receive(queue, index, drawn)
            drawn = drawn ^ 1

    @cute.jit
    def step(
        self, member: Int32, team: Int32, block: Int32, stage: Int32, phase: Int32,
        masked: cutlass.Constexpr, operands: tuple, values: tuple, factors: tuple, seen: tuple, mmas: tuple,
        storage: cute.Pointer, barriers: tuple,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """One walked tile, at ``(stage, phase)``. Returns the next tile's position."""
        rX1, rX2, rY1, rY2, rY1t, rY2t = operands
        acc_s, acc_dp, acc_1, acc_2, rP, rDs, rLse, rDelta = values
        _, _, full_1, full_2, empty = barriers
        multiply, clear, advance, release = (
            self.products.multiply, self.clear_ends, self.pipeline.advance, self.pipeline.release,
        )  # fmt: skip
        column_stats, weigh, slope = self.scores.column_stats, self.scores.weigh, self.scores.slope
        statistics = cute.recast_ptr(storage + self.smem.stats_at, dtype=Float32)
        cute.arch.mbarrier_wait(full_1 + stage, phase)
        if const_expr(self.sequences.packed or not self.wants_ds):
            cute.arch.mbarrier_wait(full_2 + stage, phase)
        if const_expr(self.sequences.packed):
            clear(member, team, block, stage, seen[2], storage)
        multiply(mmas[0], acc_s, rX1, rY1[None, None, None, stage], True)
        if const_expr(self.wants_ds):
            cute.arch.mbarrier_wait(full_2 + stage, phase)
            multiply(mmas[0], acc_dp, rX2, rY2[None, None, None, stage], True)
        warpgroup.wait_group(const_expr(int(self.wants_ds)))  # S is there
        cLse = rLse
        if const_expr(self.by_keys):
            cLse = column_stats(member, 0, stage, statistics)
        slopes = weigh(member, block, masked, acc_s, cLse, factors, seen, mmas[2])
        if const_expr(self.wants_ds and self.wants_p):
            round_to(acc_s, rP)
            multiply(mmas[1], acc_2, rP, rY2t[None, None, None, stage], False)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        if const_expr(self.wants_ds):
            cDelta = rDelta
            if const_expr(self.by_keys):
                cDelta = column_stats(member, 1, stage, statistics)
            slope(acc_s, acc_dp, cDelta, slopes)
            round_to(acc_dp, rDs)
            multiply(mmas[1], acc_1, rDs, rY1t[None, None, None, stage], False)
        else:
            round_to(acc_s, rP)
            multiply(mmas[1], acc_2, rP, rY2t[None, None, None, stage], False)
        warpgroup.wait_group(0)
        release(member, empty, stage, Boolean(True))
        return advance(stage, phase)

    @cute.jit
    def clear_ends(self, member: Int32, team: Int32, block: Int32, stage: Int32, seq_y: Int32, storage: cute.Pointer):
        """Zeros the walked rows behind a packed sequence's end: they are the next sequence's, and might be NaN.

        Behind the tensor's end the TMA has written zeros. Each group clears them for itself.
        """
        rows = seq_y - block * self.tile_walked
        if rows < self.tile_walked:
            clear, into, smem = self.rows_walked.clear_rows, self.rows_walked.address, self.smem
            at = storage + (smem.walked_at + stage * smem.stage_bytes)
            clear(member, into(member, at), rows)
            clear(member, into(member, at + self.stages * smem.stage_bytes), rows)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=FIRST_GROUP_BARRIER + team, number_of_threads=THREADS)

    # ---- results

    @cute.jit
    def deliver(
        self, member: Int32, team: Int32, operand: cutlass.Constexpr[int], at: tuple, mX: cute.Tensor,
        acc: cute.Tensor, storage: cute.Pointer,
    ):  # fmt: skip
        """A group's gradients to ``mX``, through its rows of an owned operand, which it no longer reads."""
        batch, head, row, begin_x, seq_x = at
        pointer, store, into = self.sequences.pointer, self.rows_own.store, self.rows_own.address
        alive = cutlass.min(cutlass.max(seq_x - row, Int32(0)), Int32(ROWS))
        rG = cute.make_fragment_like(acc, mX.element_type)
        round_to(acc, rG)
        buffer = storage + (operand * self.groups + team) * self.smem.group_bytes
        cute.arch.barrier(barrier_id=FIRST_GROUP_BARRIER + team, number_of_threads=THREADS)  # all have read it
        store_rows(member, rG, buffer.toint().to(Int32), self.padded)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=FIRST_GROUP_BARRIER + team, number_of_threads=THREADS)
        x_head, x_stride, _ = pointer(mX, batch, begin_x, head)
        store(member, x_head, x_stride, row, into(member, buffer), alive)
