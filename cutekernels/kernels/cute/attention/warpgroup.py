"""Attention, warpgroup schedule: ``out = softmax(scale * Q K^T) V`` by TMA and warpgroup MMA.

Schedule:
    A tile is 64 queries of one head for each of ``groups`` warp groups; they share the tile's blocks of keys, walked
    from the last to the first. One warp loads by TMA: Q, then K one block ahead of V, ``stages`` blocks of each.
    A group starts the scores of the next block, then the product of the last block's probabilities with V, and computes
    the softmax of those scores while that product runs. With ``turns`` the groups start their products one after
    another, so that one's softmax runs behind the other's products.
    Probabilities stay in registers. A row's reference score moves only where a block exceeds it by far
    (``parts/softmax.py``), so most blocks do not rescale the output accumulators.
    K and V may be in a cache, contiguous or in pages, with lengths and page table on the device: the loading warp looks
    pages up, and rows of V behind a length or before a window are zeroed in shared memory.
    Results leave through the queries' shared memory. Registers go from the loading warp group to the others.
    CTAs take one tile each, or walk over the tiles in a persistent grid, where the next tile's keys are loaded behind
    the last products of this one; its queries too where results have shared memory of their own (``apart``).
    For few tiles: ``split`` CTAs of a cluster share the keys of a tile and send each other sums
    (``parts/cluster_sums.py``); ``folded`` gives a CTA the i-th and the i-th last 64 rows, one to each of its groups.

Source:
    FlashAttention-3 (Shah 2024) has both overlaps; rescaling on demand is FlashAttention-4's.
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

from cutekernels.kernels.cute.parts.attention_smem import WarpgroupAttentionSmem
from cutekernels.kernels.cute.parts.cluster_sums import ClusterSums
from cutekernels.kernels.cute.parts.group_results import GroupResults
from cutekernels.kernels.cute.parts.groups import ROWS, THREADS, GroupProducts, Turns, as_warps, round_to
from cutekernels.kernels.cute.parts.head_loads import HeadLoads
from cutekernels.kernels.cute.parts.heads import HeadRows
from cutekernels.kernels.cute.parts.mask import BandMask
from cutekernels.kernels.cute.parts.mma import WarpMma
from cutekernels.kernels.cute.parts.pipeline import StagePipeline
from cutekernels.kernels.cute.parts.schedule import TileQueue
from cutekernels.kernels.cute.parts.sequences import HeadOrder, Sequences
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax

FIRST_GROUP_BARRIER, FIRST_TURN_BARRIER = 1, 4  # named barriers; 0 is the CTA's


@dataclass(frozen=True)
class WarpgroupAttention:
    """The body. ``resident``: most CTAs of a persistent grid, 0 for one CTA a tile. ``counted``: CTAs of a persistent
    grid draw their tiles from a counter.
    """

    groups: int
    tile_kv: int
    head_dim: int
    padded: int
    stages: int
    turns: bool
    mask: BandMask  # of a CTA's tile
    softmax: OnlineSoftmax
    order: HeadOrder
    sequences: Sequences
    resident: int
    counted: bool
    apart: bool = False
    ctas_per_sm: int = 1
    split: int = 1
    folded: bool = False
    dependent: bool = False

    @property
    def tile_q(self) -> int:
        return ROWS * self.groups

    @property
    def threads(self) -> int:
        return THREADS * (self.groups + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that loads and of one that multiplies."""
        if self.ctas_per_sm == 2:  # of one group
            return 24, 232
        return {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.groups]

    @property
    def smem(self) -> WarpgroupAttentionSmem:
        return WarpgroupAttentionSmem(self.groups, self.tile_kv, self.head_dim, self.stages, self.apart, self.split)

    @property
    def rows_q(self) -> HeadRows:
        """A group's rows of Q and of results."""
        return HeadRows(ROWS, self.head_dim, self.padded, self.groups, THREADS)

    @property
    def rows_kv(self) -> HeadRows:
        return HeadRows(self.tile_kv, self.head_dim, self.padded, self.stages, THREADS)

    @property
    def queries(self) -> StagePipeline:
        """A stage for each group, refilled for each tile."""
        return StagePipeline(self.groups, self.smem.group_bytes, 1, 1)

    @property
    def keys(self) -> StagePipeline:
        """The stages of K, and those of V."""
        return StagePipeline(self.stages, self.smem.stage_bytes, self.groups, 1)

    @property
    def loads(self) -> HeadLoads:
        return HeadLoads(self.tile_kv, self.padded, self.sequences)

    @property
    def products(self) -> GroupProducts:
        return GroupProducts(self.tile_kv, self.padded)

    @property
    def turn(self) -> Turns:
        return Turns(self.groups if self.turns else 1, FIRST_TURN_BARRIER)

    @property
    def queue(self) -> TileQueue:
        return TileQueue(self.counted, THREADS * self.groups)

    @property
    def cluster(self) -> ClusterSums:
        return ClusterSums(self.smem, self.padded, self.head_dim)

    @property
    def results(self) -> GroupResults:
        smem, queries = self.smem, self.queries
        return GroupResults(smem, self.rows_q, self.softmax, self.sequences, queries, FIRST_GROUP_BARRIER)

    @property
    def group_mask(self) -> BandMask:
        """The mask of one group's rows."""
        mask = self.mask
        return BandMask(ROWS, self.tile_kv, mask.limited_left, mask.limited_right, mask.given)

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
        _, box_k, box_v = self.layouts(dtype, self.loads.box)
        boxed = self.loads.boxed
        tma_q, tQ = boxed(mQ, layout_q, False)
        tma_k, tK = boxed(mK, box_k, False)
        tma_v, tV = boxed(mV, box_v, True)
        count = tiles * layers
        blocks = count * self.split if const_expr(self.resident == 0) else cutlass.min(count, Int32(self.resident))
        self.kernel(
            mO, mLse, mK, mMask, mCuQ, mCuKv, mTable, mSinks, mCounter, tma_q, tQ, tma_k, tK, tma_v, tV,
            (scale, cap_inner, cap_outer), left, right, (tiles, layers, band), self.products.scores_mma(dtype),
            self.products.sums_mma(dtype), WarpMma(THREADS // 32, 1, Float32, True, True).tiled_mma(dtype), layout_q,
            layout_k, layout_v,
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.split, 1, 1] if const_expr(self.split > 1) else None,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
            use_pdl=self.dependent,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, mO: cute.Tensor, mLse: cute.Tensor | None, mK: cute.Tensor, mMask: cute.Tensor | None,
        mCuQ: cute.Tensor | None, mCuKv: cute.Tensor | None, mTable: cute.Tensor | None, mSinks: cute.Tensor | None,
        mCounter: cute.Tensor | None, tma_q: cute.CopyAtom, tQ: cute.Tensor,
        tma_k: cute.CopyAtom, tK: cute.Tensor, tma_v: cute.CopyAtom, tV: cute.Tensor,
        factors: tuple[Float32, Float32, Float32], left: Int32, right: Int32, walk: tuple[Int32, Int32, Int32],
        scores_mma: cute.TiledMma, sums_mma: cute.TiledMma, warp_mma: cute.TiledMma, layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout, layout_v: cute.ComposedLayout,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tid // THREADS)
        warp = cute.arch.make_warp_uniform(tid // 32)
        loading = const_expr(self.groups)  # the group that loads
        dtype = mO.element_type
        smem, queries, keys = self.smem, self.queries, self.keys

        # -- setup
        storage = SmemAllocator().allocate(smem.total_bytes, byte_alignment=ALIGNMENT)
        at_q = cute.recast_ptr(storage, layout_q.inner, dtype)
        at_k = cute.recast_ptr(storage + smem.k_at, layout_k.inner, dtype)
        at_v = cute.recast_ptr(storage + smem.v_at, layout_v.inner, dtype)
        sQ = cute.make_tensor(at_q, layout_q.outer)  # (64, D, groups)
        sK = cute.make_tensor(at_k, layout_k.outer)  # (tile_kv, D, STAGE)
        sV = cute.make_tensor(at_v, layout_v.outer)  # (D, tile_kv, STAGE)
        full_q = cute.recast_ptr(storage + smem.barriers_at, dtype=Int64)
        empty_q = full_q + self.groups
        full_k = empty_q + self.groups
        empty_k = full_k + self.stages
        full_v = empty_k + self.stages
        empty_v = full_v + self.stages
        queue = empty_v + self.stages
        barriers = (full_q, empty_q, full_k, empty_k, full_v, empty_v)
        if warp == 4 * loading:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
            cpasync.prefetch_descriptor(tma_v)
            with cute.arch.elect_one():
                init_queries, init_keys, init_queue = queries.init, keys.init, self.queue.init
                init_queue(queue)
                if const_expr(self.split > 1):
                    init_cluster = self.cluster.init
                    init_cluster(cute.recast_ptr(storage + smem.inbox_barriers_at, dtype=Int64))
                init_queries(full_q, empty_q)
                init_keys(full_k, empty_k)
                init_keys(full_v, empty_v)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(self.split > 1):
            cute.arch.cluster_arrive_relaxed()
        if const_expr(self.dependent):
            cute.arch.griddepcontrol_launch_dependents()  # their setup then runs behind this launch
            cute.arch.griddepcontrol_wait()

        place = (mO, mK, mCuQ, (mCuKv, mTable), left, right, walk)
        produce, consume = self.produce, self.consume
        if group == loading:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 4 * loading:
                produce(place, (tma_q, tQ, sQ), (tma_k, tK, sK), (tma_v, tV, sV), barriers, queue, mCounter)
            if const_expr(self.split > 1):
                cute.arch.cluster_wait()
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            consume(
                tid % THREADS, group, place, (mLse, mMask, mSinks), factors, (scores_mma, sums_mma, warp_mma),
                (sQ, sK, sV), storage, barriers, queue,
            )  # fmt: skip

    def first_tile(self) -> Int32:
        index, _, _ = cute.arch.block_idx()
        return index // self.split if self.split > 1 else index

    @cute.jit
    def located(self, index: Int32, place: tuple):
        """Tile ``index``: ``(layer, batch, head, kv head, first row, rows that exist)``, begins of queries and keys,
        and ``(seq_q, seq_kv, left, right)`` and blocks ``(first, open, closed, end)`` of keys.
        """
        mO, mK, mCuQ, (mCuKv, mTable), left, right, (tiles, layers, band) = place
        order, locate, seen = self.order.place, self.sequences.locate, self.mask.blocks
        at = const_expr(self.sequences.rows_mode)
        tile, layer = order(index, layers, tiles, band)
        batch, head, tile, begin_q, begin_kv, seq_q, seq_kv = locate(
            tile, layer, self.tile_q, mO, mK, mCuQ, mCuKv, mTable
        )
        head_kv = head // (mO.shape[at + 1] // mK.shape[at + 1])
        row = tile * const_expr(ROWS if self.folded else self.tile_q)
        alive = cutlass.min(cutlass.max(seq_q - row, Int32(0)), Int32(self.tile_q))
        shift = seq_kv - seq_q
        left, right = left - shift, right + shift
        if const_expr(self.folded):  # the last group's rows see all that the others do
            row_of, seen = self.row_of, self.group_mask.blocks
            blocks = seen(row_of(row, Int32(self.groups - 1), seq_q), seq_q, seq_kv, left, right)
        else:
            blocks = seen(row, seq_q, seq_kv, left, right)
        if const_expr(self.split > 1):
            share = self.cluster.blocks
            blocks = share(cute.arch.block_idx_in_cluster(), *blocks)
        return (
            (layer, batch, head, head_kv, row, alive), (begin_q, begin_kv), (seq_q, seq_kv, left, right), blocks,
        )  # fmt: skip

    @cute.jit
    def row_of(self, row: Int32, group: Int32, seq_q: Int32) -> Int32:
        """The first row of ``group`` in the tile at ``row``."""
        if const_expr(self.folded):  # the tile is that of rows, and of as many from the last ones on
            return row + group * ((seq_q + (ROWS - 1)) // ROWS * ROWS - ROWS - 2 * row)
        return row + group * ROWS

    # ---- loads

    @cute.jit
    def produce(
        self, place: tuple, query: tuple, key: tuple, value: tuple, barriers: tuple, queue: cute.Pointer,
        mCounter: cute.Tensor | None,
    ):  # fmt: skip
        """The loads of this CTA's tiles."""
        full_q, empty_q, full_k, empty_k, full_v, empty_v = barriers
        index = self.first_tile()
        _, mK, _, (_, mTable), _, _, (tiles, layers, _) = place
        located, load_queries = self.located, self.load_queries
        keys_of, load = self.loads.keys_of, self.loads.load
        acquire, advance = self.keys.acquire, self.keys.advance
        draw, publish = self.queue.draw, self.queue.publish
        stage, phase, turn, drawn = Int32(0), Int32(1), Int32(1), Int32(1)
        while index < tiles * layers:
            following = draw(index, tiles * layers, mCounter)
            (_, batch, head, head_kv, row, alive), (begin_q, begin_kv), edges, (first, _, _, end) = located(
                index, place
            )
            if alive > 0:
                source_k, target_k = keys_of(key, begin_kv, head_kv, batch, False)
                source_v, target_v = keys_of(value, begin_kv, head_kv, batch, True)
                pages = (None, Int32(0), Int32(0))
                if const_expr(self.sequences.page_size):
                    pages = (mTable[batch, None], edges[1] - 1, mK.shape[0])
                if end <= first:
                    load_queries(query, begin_q, row, edges[0], head, batch, full_q, empty_q, turn)
                behind, behind_phase = stage, phase
                for i in cutlass.range(end - first, unroll=1):
                    acquire(full_k, empty_k, stage, phase)
                    load(key[0], source_k, target_k, end - 1 - i, stage, full_k, pages)
                    if i == 0:
                        load_queries(query, begin_q, row, edges[0], head, batch, full_q, empty_q, turn)
                    else:
                        acquire(full_v, empty_v, behind, behind_phase)
                        load(value[0], source_v, target_v, end - i, behind, full_v, pages)
                    behind, behind_phase = stage, phase
                    stage, phase = advance(stage, phase)
                if end > first:
                    acquire(full_v, empty_v, behind, behind_phase)
                    load(value[0], source_v, target_v, first, behind, full_v, pages)
                turn = turn ^ 1
            publish(queue, following, drawn)
            drawn = drawn ^ 1
            index = following

    @cute.jit
    def load_queries(
        self, query: tuple, begin: Int32, row: Int32, seq_q: Int32, head: Int32, batch: Int32, full: cute.Pointer,
        empty: cute.Pointer, turn: Int32,
    ):  # fmt: skip
        """Each group's queries of the tile at ``row`` of a sequence that begins at ``begin``."""
        acquire, rows_of, row_of = self.queries.acquire, self.loads.rows_of, self.row_of
        if const_expr(not self.folded):
            source, target = rows_of(query, ROWS, begin + row, head, batch, False)
        else:
            source, target = rows_of(query, ROWS, begin, head, batch, False)
        for group in cutlass.range_constexpr(self.groups):
            at = group
            if const_expr(self.folded):
                at = row_of(row, Int32(group), seq_q) // ROWS
            acquire(full, empty, Int32(group), turn)
            cute.copy(query[0], source[None, at], target[None, group], tma_bar_ptr=full + group)

    # ---- products

    @cute.jit
    def consume(
        self, member: Int32, group: Int32, place: tuple, extra: tuple, factors: tuple, mmas: tuple, shared: tuple,
        storage: cute.Pointer, barriers: tuple, queue: cute.Pointer,
    ):  # fmt: skip
        """A multiplying group's rows of this CTA's tiles."""
        mO, _, _, _, _, _, (tiles, layers, _) = place
        mLse, mMask, mSinks = extra
        scores_mma, sums_mma, _ = mmas
        sQ, sK, sV = shared
        full_q, empty_q, *_ = barriers
        dtype = mO.element_type
        index = self.first_tile()
        located, begin, attend, finish = self.located, self.begin, self.attend, self.finish
        deliver, release = self.results.deliver, self.queries.release
        start, start_with = self.softmax.start, self.softmax.start_with
        start_turns, receive = self.turn.start, self.queue.receive
        row_of, pass_over, own_blocks = self.row_of, self.pass_over, self.group_mask.blocks
        scores, sums = scores_mma.get_slice(0), sums_mma.get_slice(0)
        rQ = scores_mma.make_fragment_A(scores.partition_A(sQ))[None, None, None, group]  # descriptors (MMA, M, D)
        rK = scores_mma.make_fragment_B(scores.partition_B(sK))  # (MMA, N, D, STAGE)
        rV = sums_mma.make_fragment_B(sums.partition_B(sV))  # (MMA, D, KV, STAGE)
        acc_s = cute.make_rmem_tensor(scores_mma.partition_shape_C((ROWS, self.tile_kv)), Float32)
        acc_o = cute.make_rmem_tensor(sums_mma.partition_shape_C((ROWS, self.padded)), Float32)
        rP = cute.make_rmem_tensor(sums_mma.partition_shape_A((ROWS, self.tile_kv)), dtype)
        reference, total, shrink = [cute.make_rmem_tensor(2, Float32) for _ in range(3)]  # of this thread's two rows
        fragments = (rQ, rK, rV, acc_s, acc_o, rP)
        state = (reference, total, shrink)
        start_turns(group)
        stage, phase, turn, drawn = Int32(0), Int32(0), Int32(0), Int32(0)
        while index < tiles * layers:
            (layer, batch, head, _, row, alive), (begin_q, _), edges, (first, open_, closed, end) = located(
                index, place
            )
            row = row_of(row, group, edges[0])
            loaded = end
            if const_expr(self.folded):
                first, open_, closed, end = own_blocks(row, *edges)
            if alive > 0:
                gMask = mMask[batch, head, None, None] if const_expr(self.mask.given) else None
                seen = (*edges, gMask)
                acc_o.fill(0.0)
                start(reference, total)
                if const_expr(mSinks is not None):
                    for r in cutlass.range_constexpr(2):
                        logit = mSinks[head].to(Float32)
                        if const_expr(self.split > 1):  # noqa: SIM102  known when compiled
                            if cute.arch.block_idx_in_cluster() > 0:  # the first CTA counts it
                                logit = -Float32.inf
                        start_with(r, logit, reference, total)
                cute.arch.mbarrier_wait(full_q + group, turn)
                if const_expr(self.folded):
                    stage, phase = pass_over(member, loaded - end, stage, phase, barriers)
                if end > first:
                    begin(member, group, end - 1, row, stage, phase, fragments, state, factors, seen, mmas, barriers)
                    for i in cutlass.range(1, end - closed, unroll=1):
                        stage, phase = attend(
                            member, group, end - 1 - i, row, stage, phase, True, fragments, state, factors, seen, mmas,
                            storage, barriers,
                        )  # fmt: skip
                    if const_expr(not self.mask.given):
                        after = cutlass.min(closed, end - 1)
                        for i in cutlass.range(after - open_, unroll=1):
                            stage, phase = attend(
                                member, group, after - 1 - i, row, stage, phase, False, fragments, state, factors, seen,
                                mmas, storage, barriers,
                            )  # fmt: skip
                        if const_expr(self.mask.limited_left):
                            after = cutlass.min(open_, end - 1)
                            for i in cutlass.range(after - first, unroll=1):
                                stage, phase = attend(
                                    member, group, after - 1 - i, row, stage, phase, True, fragments, state, factors,
                                    seen, mmas, storage, barriers,
                                )  # fmt: skip
                    if const_expr(self.apart):
                        release(member, empty_q, group, Boolean(True))
                    stage, phase = finish(
                        member, group, first, row, stage, phase, fragments, edges, mmas, storage, barriers
                    )
                else:
                    if const_expr(self.apart):
                        release(member, empty_q, group, Boolean(True))
                deliver(
                    member, group, (layer, batch, head, row, begin_q, edges[0]), mO, mLse, acc_o, state, mmas,
                    storage, empty_q,
                )  # fmt: skip
                turn = turn ^ 1
            index = receive(queue, index, drawn)
            drawn = drawn ^ 1

    @cute.jit
    def pass_over(self, member: Int32, count: Int32, stage: Int32, phase: Int32, barriers: tuple):
        """Passes over ``count`` blocks that other rows see. Returns the next position."""
        _, _, full_k, empty_k, full_v, empty_v = barriers
        advance, release = self.keys.advance, self.keys.release
        for _ in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(full_k + stage, phase)
            release(member, empty_k, stage, Boolean(True))
            cute.arch.mbarrier_wait(full_v + stage, phase)
            release(member, empty_v, stage, Boolean(True))
            stage, phase = advance(stage, phase)
        return stage, phase

    @cute.jit
    def begin(
        self, member: Int32, group: Int32, block: Int32, row: Int32, stage: Int32, phase: Int32, fragments: tuple,
        state: tuple, factors: tuple, seen: tuple, mmas: tuple, barriers: tuple,
    ):  # fmt: skip
        """The last block of keys: scores and softmax alone."""
        rQ, rK, _, acc_s, _, rP = fragments
        _, _, full_k, empty_k, _, _ = barriers
        multiply, weigh, release = self.products.multiply, self.weigh, self.keys.release
        cute.arch.mbarrier_wait(full_k + stage, phase)
        multiply(mmas[0], acc_s, rQ, rK[None, None, None, stage], True)
        warpgroup.wait_group(0)
        release(member, empty_k, stage, Boolean(True))
        weigh(member, block, row, True, acc_s, state, factors, seen, mmas[2])
        round_to(acc_s, rP)

    @cute.jit
    def attend(
        self, member: Int32, group: Int32, block: Int32, row: Int32, stage: Int32, phase: Int32,
        masked: cutlass.Constexpr, fragments: tuple, state: tuple, factors: tuple, seen: tuple, mmas: tuple,
        storage: cute.Pointer, barriers: tuple,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """One more ``block``: its scores and softmax, and the products of the block behind it, which is at
        ``(stage, phase)``, with V. Returns the block's own position.
        """
        rQ, rK, rV, acc_s, acc_o, rP = fragments
        _, _, full_k, empty_k, full_v, empty_v = barriers
        multiply, weigh, clear = self.products.multiply, self.weigh, self.clear_ends
        advance, release = self.keys.advance, self.keys.release
        take, give, rescale = self.turn.take, self.turn.give, self.softmax.rescale
        behind, behind_phase = stage, phase
        stage, phase = advance(stage, phase)
        cute.arch.mbarrier_wait(full_k + stage, phase)
        take(group)
        multiply(mmas[0], acc_s, rQ, rK[None, None, None, stage], True)
        cute.arch.mbarrier_wait(full_v + behind, behind_phase)
        clear(member, group, block + 1, row, behind, seen, storage)
        multiply(mmas[1], acc_o, rP, rV[None, None, None, behind], False)
        give(group)
        warpgroup.wait_group(1)
        release(member, empty_k, stage, Boolean(True))
        moved = weigh(member, block, row, masked, acc_s, state, factors, seen, mmas[2])
        warpgroup.wait_group(0)
        release(member, empty_v, behind, Boolean(True))
        if moved:
            rescale(as_warps(acc_o), state[2])
        round_to(acc_s, rP)
        return stage, phase

    @cute.jit
    def finish(
        self, member: Int32, group: Int32, block: Int32, row: Int32, stage: Int32, phase: Int32, fragments: tuple,
        edges: tuple, mmas: tuple, storage: cute.Pointer, barriers: tuple,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """The product of the first block's probabilities with V. Returns the next tile's first position."""
        _, _, rV, _, acc_o, rP = fragments
        _, _, _, _, full_v, empty_v = barriers
        multiply, clear = self.products.multiply, self.clear_ends
        advance, release = self.keys.advance, self.keys.release
        cute.arch.mbarrier_wait(full_v + stage, phase)
        clear(member, group, block, row, stage, edges, storage)
        multiply(mmas[1], acc_o, rP, rV[None, None, None, stage], False)
        warpgroup.wait_group(0)
        release(member, empty_v, stage, Boolean(True))
        return advance(stage, phase)

    @cute.jit
    def weigh(
        self, member: Int32, block: Int32, row: Int32, masked: cutlass.Constexpr, acc_s: cute.Tensor, state: tuple,
        factors: tuple, seen: tuple, warp_mma: cute.TiledMma,
    ) -> Boolean:  # fmt: skip
        """Scores to unnormalised probabilities. Returns whether the sums must be rescaled by ``state``'s shrink."""
        scale, cap_inner, cap_outer = factors
        reference, total, shrink = state
        softmax, mask = self.softmax, self.group_mask
        cap, hide, weigh = softmax.cap, mask.apply, softmax.weigh
        if const_expr(softmax.capped):
            cap(acc_s, cap_inner, cap_outer)
        if const_expr(masked):
            hide(member, as_warps(acc_s), row, block * self.tile_kv, seen, warp_mma)
        return weigh(as_warps(acc_s), reference, total, shrink, scale)

    @cute.jit
    def clear_ends(
        self, member: Int32, group: Int32, block: Int32, row: Int32, stage: Int32, edges: tuple, storage: cute.Pointer
    ):
        """Zeros the rows of V behind a packed sequence's end or a cache's length, which might be NaN; and those of a
        cache before the window of the CTA's first row, whose pages may be gone.

        Behind the tensor's end the TMA has written zeros. Each group clears them for itself.
        """
        if const_expr(self.sequences.packed or self.sequences.cached):
            _, seq_kv, left, *_ = edges
            rows = seq_kv - block * self.tile_kv
            outside, first = rows < self.tile_kv, None
            if const_expr(self.sequences.cached and self.mask.limited_left):
                first = row - group * ROWS - left - block * self.tile_kv
                outside = outside or first > 0
            if outside:
                clear, into = self.rows_kv.clear_rows, self.rows_kv.address
                clear(member, into(member, storage + (self.smem.v_at + stage * self.smem.stage_bytes)), rows, first)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=FIRST_GROUP_BARRIER + group, number_of_threads=THREADS)
