"""Gradients of attention in one kernel, warpgroup schedule: 5 products a pair of tiles, dQ added up in a fixed order.

The mathematics and the walk of keys are those of ``warpgroup_backward.py``, whose loads, statistics and results serve
here too. What is new is dQ: a CTA has a part of it for each tile of queries that its keys see.

Schedule:
    Two warp groups own 64 keys each. dS of both goes through shared memory, with the queries contiguous; then each
    group multiplies it with all 128 keys, for 64 rows of dQ, or 64 of its columns (``tile_walked`` is 128 or 64). The
    parts go to shared memory in fp32, in the order of a thread's registers.
    A warp of its own adds them to ``mSum`` in global memory by one bulk reduction a tile. CTAs take turns at a tile of
    queries: each tile has a number in ``mTurn``, which says whose turn it is; the first stores, the last leaves zero.

Order of turns:
    Where all tiles of a band of heads are at work at once, keys take turns from the diagonal on, ``n, n - 1, ..``, as
    they get there: a CTA without limits begins its walk at its own diagonal. Otherwise in the order in which tiles are
    drawn. A CTA draws its next tile when this one's parts are added up: a tile that nobody works on would be waited for.

Source:
    FlashAttention-3 (Shah 2024) has dS in shared memory and adds dQ by a warp of its own; turns at a tile of queries
    are FlashAttention-2's deterministic mode, their order the shift of DASH (Qiang 2025).
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cutekernels.kernels.cute.attention.warpgroup_backward import FIRST_GROUP_BARRIER, WarpgroupAttentionBackward
from cutekernels.kernels.cute.parts.attention_smem import FusedBackwardSmem
from cutekernels.kernels.cute.parts.groups import ROWS, THREADS, GroupProducts, as_warps, round_to, store_rows
from cutekernels.kernels.cute.parts.mask import BandMask
from cutekernels.kernels.cute.parts.mma import WarpMma
from cutekernels.kernels.cute.parts.ptx import instruction
from cutekernels.kernels.cute.parts.schedule import TileQueue
from cutekernels.kernels.cute.parts.score_gradients import ScoreGradients
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.softmax import by_rows

CHUNK = 64 * 64  # elements of dQ that a group computes at a time
ALL_GROUPS_BARRIER = FIRST_GROUP_BARRIER + 2


@dataclass(frozen=True)
class FusedAttentionBackward(WarpgroupAttentionBackward):
    """The body: ``of`` is ``"qkv"``, ``groups`` 2 and the grid persistent."""

    @property
    def by_keys(self) -> bool:
        return True

    @property
    def wants_ds(self) -> bool:
        return True

    @property
    def wants_p(self) -> bool:
        return True

    @property
    def registers(self) -> tuple[int, int]:
        return 24, 240

    @property
    def smem(self) -> FusedBackwardSmem:
        return FusedBackwardSmem(self.groups, self.tile_walked, self.head_dim, self.stages, owned=2, stats=True)

    @property
    def queue(self) -> TileQueue:
        return TileQueue(True, THREADS * self.groups + 64)  # the groups, the warps of statistics and of dQ

    @property
    def rotates(self) -> bool:
        """Whether a walk may begin anywhere: every tile of keys walks all blocks."""
        return not (self.mask.limited_left or self.mask.limited_right)

    @property
    def scores(self) -> ScoreGradients:
        """The elementwise work on a group's keys and 64 queries."""
        mask = self.mask
        return ScoreGradients(
            BandMask(ROWS, ROWS, mask.limited_left, mask.limited_right, False), self.softmax, True, True
        )

    @property
    def halves(self) -> int:
        """Pieces of 64 queries in a walked tile."""
        return self.tile_walked // ROWS

    @property
    def products(self) -> GroupProducts:
        return GroupProducts(ROWS, self.padded)

    def queries_mma(self, dtype: type[cutlass.Numeric]) -> cute.TiledMma:
        return hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.MN, OperandMajorMode.MN, Float32, (1, 1, 1), (ROWS, ROWS)
        )

    def chunks(self, dtype: type[cutlass.Numeric]) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """64 x 64 pieces: dS as ``(queries, keys)`` of each buffer, group and half; K as ``(columns, keys)``."""
        pieces = 2 * self.groups * self.tile_walked // ROWS
        return (
            hopper_helpers.make_smem_layout_a(LayoutEnum.COL_MAJOR, (ROWS, 0, ROWS), dtype, pieces),
            hopper_helpers.make_smem_layout_b(
                LayoutEnum.COL_MAJOR, (0, ROWS, ROWS), dtype, self.groups * self.padded // ROWS
            ),
        )

    @cute.jit
    def __call__(
        self,
        mSum: cute.Tensor,  # (B * HQ * blocks * 2 * 64 * 64,), fp32: sums of dQ
        mTurn: cute.Tensor,  # (B * HQ * blocks,), zero before and after a launch
        mDk: cute.Tensor,  # (B, SKV, HKV, D)
        mDv: cute.Tensor,  # as mDk
        mDo: cute.Tensor,  # as mQ
        mQ: cute.Tensor,  # (B, SQ, HQ, D)
        mK: cute.Tensor,  # (B, SKV, HKV, D)
        mV: cute.Tensor,  # as mK
        mStats: cute.Tensor,  # (2 * B * HQ * SQ,): lse to base 2, then delta, as (B, HQ, SQ)
        mCounter: cute.Tensor,  # (1,), zero before and after a launch
        scale: Float32,  # factor of scores, to base 2
        cap_inner: Float32,
        cap_outer: Float32,
        factor: Float32,  # factor of dQ and dK
        left: Int32,  # keys seen before a query's own, where limited
        right: Int32,  # and behind it
        stream: cuda.CUstream,
    ):
        dtype = mQ.element_type
        tiles, layers = self.sequences.grid(mK, None, self.tile_own)
        group = mQ.shape[2] // mK.shape[2]
        bytes_per_head = Int64(mQ.shape[1]) * (4 * self.head_dim) * group
        band = self.order.band(layers, Int32(1), bytes_per_head)
        layout_x, layout_y, layout_yt = self.layouts(dtype)
        sources = ((mK, layout_x), (mV, layout_x), (mQ, layout_y), (mDo, layout_y))
        loads = [part for mX, layout in sources for part in self.loads.boxed(mX, layout, False)]
        self.kernel(
            (mSum, mTurn), (mDk, mDv), mQ, mK, mStats, mCounter, *loads,
            (scale, cap_inner, cap_outer, factor), left, right, (tiles, layers, band),
            (
                self.products.scores_mma(dtype), self.products.sums_mma(dtype), self.queries_mma(dtype),
                WarpMma(THREADS // 32, 1, Float32, True, True).tiled_mma(dtype),
            ), layout_x, layout_y, layout_yt, *self.chunks(dtype),
        ).launch(
            grid=[cutlass.min(tiles * layers, Int32(self.resident)), 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, sums: tuple[cute.Tensor, cute.Tensor], results: tuple[cute.Tensor, cute.Tensor], mQ: cute.Tensor,
        mK: cute.Tensor, mStats: cute.Tensor, mCounter: cute.Tensor, tma_x1: cute.CopyAtom, tX1: cute.Tensor,
        tma_x2: cute.CopyAtom, tX2: cute.Tensor, tma_y1: cute.CopyAtom, tY1: cute.Tensor, tma_y2: cute.CopyAtom,
        tY2: cute.Tensor, factors: tuple[Float32, Float32, Float32, Float32], left: Int32, right: Int32,
        walk: tuple[Int32, Int32, Int32], mmas: tuple[cute.TiledMma, ...], layout_x: cute.ComposedLayout, layout_y: cute.ComposedLayout, layout_yt: cute.ComposedLayout,
        layout_ds: cute.ComposedLayout, layout_xt: cute.ComposedLayout,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        team = cute.arch.make_warp_uniform(tid // THREADS)
        warp = cute.arch.make_warp_uniform(tid // 32)
        loading = const_expr(self.groups)  # the warp group that loads
        dtype = mQ.element_type
        smem = self.smem

        # -- setup
        storage = SmemAllocator().allocate(smem.total_bytes, byte_alignment=ALIGNMENT)
        at_y1 = storage + smem.walked_at
        at_y2 = at_y1 + self.stages * smem.stage_bytes
        buffers = []
        for at, layout in (
            (storage, layout_x), (storage + self.groups * smem.group_bytes, layout_x), (at_y1, layout_y),
            (at_y2, layout_y), (at_y1, layout_yt), (at_y2, layout_yt), (storage + smem.ds_at, layout_ds),
            (storage, layout_xt),
        ):  # fmt: skip
            buffers.append(cute.make_tensor(cute.recast_ptr(at, layout.inner, dtype), layout.outer))
        sX1, sX2, sY1, sY2, *_ = buffers
        full_x = cute.recast_ptr(storage + smem.barriers_at, dtype=Int64)
        empty_x = full_x + 1
        full_1 = empty_x + 1
        full_2 = full_1 + self.stages
        empty = full_2 + self.stages
        full_q = empty + self.stages
        empty_q = full_q + 1
        added = empty_q + 1
        queue = added + 1
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
                    cute.arch.mbarrier_init(full_1 + stage, 2)  # the bytes, and statistics
                    cute.arch.mbarrier_init(full_2 + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, self.groups)
                cute.arch.mbarrier_init(full_q, self.groups)
                cute.arch.mbarrier_init(empty_q, 1)
                cute.arch.mbarrier_init(added, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        load, fetch, add, consume = self.load, self.fetch, self.add, self.consume_all
        place = (mQ, mK, mStats, None, None, left, right, walk)
        if team == loading:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 4 * loading:
                load(
                    place, (tma_x1, tX1, sX1), (tma_x2, tX2, sX2), (tma_y1, tY1, sY1), (tma_y2, tY2, sY2), barriers,
                    queue, mCounter, added,
                )  # fmt: skip
            if warp == 4 * loading + 1:
                fetch(tid % 32, place, storage, barriers, queue)
            if warp == 4 * loading + 2:
                add(tid % 32, place, sums, storage, (full_q, empty_q, added), queue)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            consume(
                tid % THREADS, team, place, results, factors, mmas, tuple(buffers), storage, barriers,
                (full_q, empty_q), queue,
            )  # fmt: skip

    # ---- turns

    @cute.jit
    def from_diagonal(self, place: tuple) -> Boolean:
        """Whether keys take turns from the diagonal on: all tiles of a band are at work at once."""
        *_, (tiles, _, band) = place
        blocks, _, _ = cute.arch.grid_dim()
        return band * tiles <= blocks

    @cute.jit
    def ith(self, i: Int32, row: Int32, first: Int32, end: Int32, place: tuple) -> Int32:
        """The ``i``-th block of queries that keys from ``row`` on walk, of those from ``first`` to ``end``."""
        from_diagonal = self.from_diagonal
        block = first + i
        if const_expr(self.rotates):
            begin = cutlass.min(row // self.tile_walked, end - 1)
            if from_diagonal(place):
                block = begin + i
                if block >= end:
                    block = block - (end - first)
        return block

    @cute.jit
    def turn_of(self, row: Int32, block: Int32, edges: tuple, place: tuple) -> tuple[Int32, Int32]:
        """``(turn, turns)`` of the keys from ``row`` on at a block of queries."""
        seq_x, _, left_x, right_x = edges
        from_diagonal = self.from_diagonal
        own, query = row // self.tile_own, block * self.tile_walked
        first, end = Int32(0), (seq_x + self.tile_own - 1) // self.tile_own
        if const_expr(self.mask.limited_right):
            first = cutlass.max(query - right_x, Int32(0)) // self.tile_own
        if const_expr(self.mask.limited_left):
            seen = cutlass.min(query + self.tile_walked + left_x, seq_x)
            end = (seen + self.tile_own - 1) // self.tile_own
        turn = own - first
        if from_diagonal(place):
            start = end - 1
            if const_expr(self.rotates):
                start = cutlass.min(query // self.tile_own, end - 1)
            turn = start - own
            if own > start:
                turn = (start - first) + (end - own)
        return turn, end - first

    @cute.jit
    def add(
        self, lane: Int32, place: tuple, sums: tuple, storage: cute.Pointer, barriers: tuple, queue: cute.Pointer
    ):  # fmt: skip
        """Adds the groups' parts of dQ to ``mSum``, tile by tile, each when its turn comes."""
        mSum, mTurn = sums
        mQ, *_, (tiles, layers, _) = place
        full, empty, added = barriers
        located, ith, turn_of, receive = self.located, self.ith, self.turn_of, self.queue.receive
        part = const_expr(self.groups * CHUNK)
        source = (storage + self.smem.dq_at).toint().to(Int32)
        blocks = (mQ.shape[1] + self.tile_walked - 1) // self.tile_walked
        phase, drawn = Int32(0), Int32(0)
        index, _, _ = cute.arch.block_idx()
        while index < tiles * layers:
            (batch, _, row, _), (head_q, _), _, edges, (first, _, _, end, heads), _ = located(index, place)
            for head in cutlass.range(heads, unroll=1):
                for i in cutlass.range(end - first, unroll=1):
                    block = ith(i, row, first, end, place)
                    turn, turns = turn_of(row, block, edges, place)
                    at = (batch * mQ.shape[2] + head_q + head) * blocks + block
                    cute.arch.mbarrier_wait(full, phase)
                    if lane == 0:
                        mark = mTurn.iterator + at
                        seen = cute.arch.load(mark, Int32, sem="acquire", scope="gpu")
                        while seen != turn:
                            seen = cute.arch.load(mark, Int32, sem="acquire", scope="gpu")
                        cute.arch.fence_proxy("async")
                        target = (mSum.iterator + Int64(at) * part).toint()
                        if turn == 0:
                            instruction(
                                "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "l,r,r", target, source,
                                Int32(4 * part),
                            )  # fmt: skip
                        else:
                            instruction(
                                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;", "l,r,r",
                                target, source, Int32(4 * part),
                            )  # fmt: skip
                        cute.arch.cp_async_bulk_commit_group()
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        cute.arch.mbarrier_arrive(empty)
                        cute.arch.cp_async_bulk_wait_group(0, read=False)
                        cute.arch.fence_proxy("async")
                        following = turn + 1
                        if following == turns:
                            following = Int32(0)
                        cute.arch.store(mark, following, sem="release", scope="gpu")
                    cute.arch.sync_warp()
                    phase = phase ^ 1
            if lane == 0:
                cute.arch.mbarrier_arrive(added)
            index = receive(queue, index, drawn)
            drawn = drawn ^ 1

    # ---- products

    @cute.jit
    def consume_all(
        self, member: Int32, team: Int32, place: tuple, results: tuple, factors: tuple, mmas: tuple, shared: tuple,
        storage: cute.Pointer, barriers: tuple, dq_barriers: tuple, queue: cute.Pointer,
    ):  # fmt: skip
        """A multiplying group's keys of this CTA's tiles."""
        *_, (tiles, layers, _) = place
        mDk, mDv = results
        scores_mma, sums_mma, queries_mma, _ = mmas
        sX1, sX2, sY1, sY2, sY1t, sY2t, sDs, sX1t = shared
        full_x, empty_x, *_ = barriers
        dtype = sX1.element_type
        index, _, _ = cute.arch.block_idx()
        mask, located, advance_all, deliver = self.mask, self.located, self.step_all, self.deliver
        receive, release = self.queue.receive, self.owners.release
        scores, sums, queries = scores_mma.get_slice(0), sums_mma.get_slice(0), queries_mma.get_slice(0)
        rX1 = scores_mma.make_fragment_A(scores.partition_A(sX1))[None, None, None, team]  # descriptors (MMA, M, D)
        rX2 = scores_mma.make_fragment_A(scores.partition_A(sX2))[None, None, None, team]
        rY1, rY2 = [
            tuple(
                [
                    scores_mma.make_fragment_B(
                        scores.partition_B(cute.local_tile(sY, (ROWS, self.padded), (h, 0, None)))
                    )
                    for h in range(self.halves)
                ]
            )
            for sY in (sY1, sY2)
        ]  # of each half, (MMA, N, D, STAGE)
        rY1t = sums_mma.make_fragment_B(sums.partition_B(sY1t))  # (MMA, D, WALKED, STAGE)
        rY2t = sums_mma.make_fragment_B(sums.partition_B(sY2t))
        rDst = queries_mma.make_fragment_A(queries.partition_A(sDs))  # (MMA, QUERIES, KEYS, PIECE)
        rX1t = queries_mma.make_fragment_B(queries.partition_B(sX1t))  # (MMA, D, KEYS, PIECE)
        shape_s = scores_mma.partition_shape_C((ROWS, ROWS))
        shape_x = sums_mma.partition_shape_C((ROWS, self.padded))
        shape_p = sums_mma.partition_shape_A((ROWS, ROWS))
        halves = const_expr(self.halves)
        acc_s = tuple([cute.make_rmem_tensor(shape_s, Float32) for _ in range(halves)])
        acc_dp = tuple([cute.make_rmem_tensor(shape_s, Float32) for _ in range(halves)])
        rP = tuple([cute.make_rmem_tensor(shape_p, dtype) for _ in range(halves)])
        rDs = tuple([cute.make_rmem_tensor(shape_p, dtype) for _ in range(halves)])
        acc_dk, acc_dv = cute.make_rmem_tensor(shape_x, Float32), cute.make_rmem_tensor(shape_x, Float32)
        acc_dq = cute.make_rmem_tensor(queries_mma.partition_shape_C((ROWS, ROWS)), Float32)
        operands = (rX1, rX2, rY1, rY2, rY1t, rY2t, rDst, rX1t)
        values = (acc_s, acc_dp, acc_dk, acc_dv, acc_dq, rP, rDs)
        at = (Int32(0), Int32(0), Int32(0), Int32(1))  # stage and its phase, buffer of dS, phase of dQ's
        filled, drawn = Int32(0), Int32(0)
        while index < tiles * layers:
            (batch, head, own, alive), _, (begin_x, _), edges, blocks, _ = located(index, place)
            first, open_, closed, end, turns = blocks
            row = own + team * ROWS
            if alive > 0:
                acc_dk.fill(0.0)
                acc_dv.fill(0.0)
                cute.arch.mbarrier_wait(full_x, filled)
                seen = (row, *edges, None)
                for _turn in cutlass.range(turns, unroll=1):
                    if const_expr(mask.limited_left):
                        for i in cutlass.range(open_ - first, unroll=1):
                            at = advance_all(
                                member, team, first + i, at, True, operands, values, factors, seen, mmas, storage,
                                barriers, dq_barriers,
                            )  # fmt: skip
                    for i in cutlass.range(closed - open_, unroll=1):
                        at = advance_all(
                            member, team, open_ + i, at, False, operands, values, factors, seen, mmas, storage,
                            barriers, dq_barriers,
                        )  # fmt: skip
                    if const_expr(mask.limited_right):
                        for i in cutlass.range(end - closed, unroll=1):
                            at = advance_all(
                                member, team, closed + i, at, True, operands, values, factors, seen, mmas, storage,
                                barriers, dq_barriers,
                            )  # fmt: skip
                where = (batch, head, row, begin_x, edges[0])
                for i in cutlass.range_constexpr(cute.size(acc_dk)):
                    acc_dk[i] = acc_dk[i] * factors[3]
                # Where results go on their way to memory lie keys, of which the other group may still compute dQ.
                cute.arch.barrier(barrier_id=ALL_GROUPS_BARRIER, number_of_threads=THREADS * self.groups)
                deliver(member, team, 0, where, mDk, acc_dk, storage)
                deliver(member, team, 1, where, mDv, acc_dv, storage)
                cute.arch.barrier(barrier_id=FIRST_GROUP_BARRIER + team, number_of_threads=THREADS)  # results are read
                release(member, empty_x, Int32(0), Boolean(True))
                filled = filled ^ 1
            index = receive(queue, index, drawn)
            drawn = drawn ^ 1

    @cute.jit
    def step_all(
        self, member: Int32, team: Int32, block: Int32, at: tuple, masked: cutlass.Constexpr, operands: tuple,
        values: tuple, factors: tuple, seen: tuple, mmas: tuple, storage: cute.Pointer, barriers: tuple,
        dq_barriers: tuple,
    ) -> tuple[Int32, Int32, Int32, Int32]:  # fmt: skip
        """One walked tile, at stage and phase. Returns the next tile's position."""
        rX1, rX2, rY1, rY2, rY1t, rY2t, rDst, rX1t = operands
        acc_s, acc_dp, acc_dk, acc_dv, acc_dq, rP, rDs = values
        stage, phase, buffer, emptied = at
        _, _, full_1, full_2, empty = barriers
        full_q, empty_q = dq_barriers
        row, seq_x, *_ = seen
        multiply, advance, release = self.products.multiply, self.pipeline.advance, self.pipeline.release
        column_stats, weigh, slope = self.scores.column_stats, self.scores.weigh, self.scores.slope
        hide, queries, hand_over = self.hide_missing, self.queries, self.hand_over
        statistics = cute.recast_ptr(storage + self.smem.stats_at, dtype=Float32)
        halves = const_expr(self.halves)
        keys = const_expr(ROWS // 16)  # steps of k of a half
        cute.arch.mbarrier_wait(full_1 + stage, phase)
        for h in cutlass.range_constexpr(halves):
            multiply(mmas[0], acc_s[h], rX1, rY1[h][None, None, None, stage], True)
            if const_expr(h == 0):
                cute.arch.mbarrier_wait(full_2 + stage, phase)
            multiply(mmas[0], acc_dp[h], rX2, rY2[h][None, None, None, stage], True)
        own = (storage + self.smem.ds_at).toint().to(Int32)
        own = own + (buffer * self.groups + team) * (self.tile_walked * ROWS * 2)
        for h in cutlass.range_constexpr(halves):
            behind = const_expr(2 * (halves - h - 1) + min(h, 1))  # products started behind dP: scores, a sum of P
            warpgroup.wait_group(const_expr(behind + 1))  # S is there
            lse = column_stats(member, 0, stage, statistics, h, halves)
            slopes = weigh(member, block * halves + h, masked, acc_s[h], lse, factors, seen, mmas[3])
            round_to(acc_s[h], rP[h])
            multiply(mmas[1], acc_dv, rP[h], rY2t[None, None, None, stage], False, h * keys)
            warpgroup.wait_group(const_expr(behind + 1))  # dP is there
            slope(acc_s[h], acc_dp[h], column_stats(member, 1, stage, statistics, h, halves), slopes)
            hide(member, row, seq_x, acc_dp[h])
            round_to(acc_dp[h], rDs[h])
            store_rows(member, rDs[h], own + h * (ROWS * ROWS * 2), ROWS)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=ALL_GROUPS_BARRIER, number_of_threads=THREADS * self.groups)
        queries(team, buffer, mmas[2], acc_dq, rDst, rX1t)
        for h in cutlass.range_constexpr(halves):
            multiply(mmas[1], acc_dk, rDs[h], rY1t[None, None, None, stage], False, h * keys)
        warpgroup.wait_group(const_expr(halves))  # dQ is there
        cute.arch.mbarrier_wait(empty_q, emptied)
        hand_over(member, team, acc_dq, factors[3], storage)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=FIRST_GROUP_BARRIER + team, number_of_threads=THREADS)
        if member == 0:
            cute.arch.mbarrier_arrive(full_q)
        warpgroup.wait_group(0)
        release(member, empty, stage, Boolean(True))
        stage, phase = advance(stage, phase)
        return stage, phase, buffer ^ 1, emptied ^ 1

    @cute.jit
    def hide_missing(self, member: Int32, row: Int32, seq_x: Int32, acc_dp: cute.Tensor):
        """Zeros in dS for keys that do not exist: their probabilities may be infinite."""
        if row + ROWS > seq_x:
            gradients = by_rows(as_warps(acc_dp))
            for r in cutlass.range_constexpr(2):
                if row + (member // 32 * 16 + member % 32 // 4 + 8 * r) >= seq_x:
                    for c in cutlass.range_constexpr(cute.size(gradients, mode=[1])):
                        gradients[r, c] = Float32(0.0)

    @cute.jit
    def queries(
        self, team: Int32, buffer: Int32, tiled_mma: cute.TiledMma, acc: cute.Tensor, rDst: cute.Tensor,
        rX1t: cute.Tensor,
    ):  # fmt: skip
        """Starts a group's part of dQ, of all keys that the CTA owns."""
        halves = const_expr(self.halves)
        columns = const_expr(self.padded // ROWS)
        half, column = (team, Int32(0)) if const_expr(halves == 2) else (Int32(0), team)
        warpgroup.fence()
        atom = cute.make_mma_atom(tiled_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for group in cutlass.range_constexpr(self.groups):
            rA = rDst[None, None, None, (buffer * self.groups + group) * halves + half]
            rB = rX1t[None, None, None, group * columns + column]
            for kb in cutlass.range_constexpr(cute.size(rA, mode=[2])):
                cute.gemm(atom, acc, rA[None, None, kb], rB[None, None, kb], acc)
                atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def hand_over(self, member: Int32, team: Int32, acc: cute.Tensor, factor: Float32, storage: cute.Pointer):
        """A group's part of dQ to shared memory: four values of each thread at a time, thread by thread."""
        target = cute.recast_ptr(storage + self.smem.dq_at, dtype=Float32) + (team * CHUNK + member * 4)
        four = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(cute.size(acc) // 4):
            for j in cutlass.range_constexpr(4):
                four[j] = acc[4 * i + j] * factor
            cute.autovec_copy(four, cute.make_tensor((target + i * (4 * THREADS)).align(16), cute.make_layout(4)))
