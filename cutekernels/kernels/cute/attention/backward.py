"""Gradients of attention, warp-MMA schedule, on any GPU with cp.async and mma.sync: no atomics, one order of sums.

With ``P = exp(S - lse)``, ``dP = dO V^T`` and ``dS = P * (dP - delta)``, where ``delta`` is a query's sum of dO * O::

    dV = P^T dO        dK = scale * dS^T Q        dQ = scale * dS K

Schedule:
    Each CTA owns a tile of rows of one head and walks tiles of the other side's rows. For dK and dV it owns keys and
    walks the queries of all heads of the group; for dQ it owns queries and walks keys. All products are
    ``own x walked``: scores of keys by queries are ``K Q^T``, so that P and dS are accumulators of the warps, which
    divide the owned rows, and become A operands of the sums in registers. ldmatrix reads a walked tile twice, plain
    for S and dP, transposed for the sums.
    Row statistics belong to queries: to rows for dQ (registers), to columns for dK and dV (shared memory, fetched with
    the tile). Tiles at the edges of the band run masking code, those between have none.
    All threads load, by cp.async. With ``stages = 2`` the next tile is copied during a whole one, with one barrier;
    with one stage, another CTA of the SM computes during the copy.

Source:
    FlashAttention-2 (Dao 2023), which adds dQ up by atomics in the kernel of dK and dV; here dQ has a kernel of its own
    that computes S and dP again: 7 products instead of 5, and one order of sums.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.heads import HeadRows
from cutekernels.kernels.cute.parts.mask import BandMask
from cutekernels.kernels.cute.parts.products import Products
from cutekernels.kernels.cute.parts.score_gradients import BLIND
from cutekernels.kernels.cute.parts.sequences import HeadOrder, Sequences
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax, by_rows


@dataclass(frozen=True)
class AttentionBackward:
    """The body. ``of``: the gradients, ``"q"``, ``"k"``, ``"v"`` or ``"kv"``; the owned rows follow from it.

    ``own`` rows are in one buffer each of Q and dO, or of K and V; ``walked`` ones in ``stages``. The rows of ``mask``
    are the owned ones, its columns the walked ones.
    """

    of: str
    own: HeadRows
    walked: HeadRows
    products: Products
    mask: BandMask
    softmax: OnlineSoftmax
    order: HeadOrder
    sequences: Sequences
    ctas_per_sm: int

    @property
    def threads(self) -> int:
        return self.own.threads

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
        scale: Float32,  # factor of scores, to base 2
        cap_inner: Float32,
        cap_outer: Float32,
        factor: Float32,  # factor of dQ and dK
        left: Int32,  # keys seen before a query's own, where limited
        right: Int32,  # and behind it
        stream: cuda.CUstream,
    ):
        at = const_expr(self.sequences.rows_mode)
        mOwn, mWalked, mCu = mQ, mK, mCuQ
        if const_expr(self.by_keys):
            mOwn, mWalked, mCu = mK, mQ, mCuKv
        tiles, layers = self.sequences.grid(mOwn, mCu, self.own.rows)
        group = mQ.shape[at + 1] // mK.shape[at + 1]
        bytes_per_head = Int64(self.sequences.length(mWalked, mCu)) * (4 * self.walked.head_dim)
        if const_expr(self.by_keys):
            bytes_per_head = bytes_per_head * group
            group = Int32(1)  # no two heads share the rows they walk
        band = self.order.band(layers, group, bytes_per_head)
        self.kernel(
            mFirst, mSecond, mDo, mQ, mK, mV, mStats, mMask, mCuQ, mCuKv, scale, cap_inner, cap_outer, factor,
            left, right, tiles, layers, band, self.products.tiled_mma(mQ.element_type),
        ).launch(
            grid=[tiles * layers, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, mFirst: cute.Tensor | None, mSecond: cute.Tensor | None, mDo: cute.Tensor, mQ: cute.Tensor,
        mK: cute.Tensor, mV: cute.Tensor, mStats: cute.Tensor, mMask: cute.Tensor | None, mCuQ: cute.Tensor | None,
        mCuKv: cute.Tensor | None, scale: Float32, cap_inner: Float32, cap_outer: Float32, factor: Float32,
        left: Int32, right: Int32, tiles: Int32, layers: Int32, band: Int32, tiled_mma: cute.TiledMma,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        dtype = mQ.element_type
        own, walked, mask, by_keys = self.own, self.walked, self.mask, self.by_keys
        rows, columns, padded = own.rows, walked.rows, own.padded
        stages = const_expr(walked.stages)
        two = const_expr(self.wants_ds)  # owned operands
        mX1, mX2, mY1, mY2, mCuX, mCuY = mQ, mDo, mK, mV, mCuQ, mCuKv
        if const_expr(by_keys):
            mX1, mX2, mY1, mY2, mCuX, mCuY = mK, mV, mQ, mDo, mCuKv, mCuQ

        # -- this CTA's rows
        place, locate, pointer = self.order.place, self.sequences.locate, self.sequences.pointer
        tile, layer = place(block, layers, tiles, band)
        if const_expr(by_keys):
            tile = tiles - 1 - tile  # under a causal mask the first keys are seen by most
        at = const_expr(self.sequences.rows_mode)
        heads_q, heads_kv = mQ.shape[at + 1], mK.shape[at + 1]
        batch, head, tile, begin_x, begin_y, seq_x, seq_y = locate(tile, layer, rows, mX1, mY1, mCuX, mCuY)
        row = tile * rows
        alive = cutlass.min(cutlass.max(seq_x - row, Int32(0)), Int32(rows))  # rows of the tile that exist
        group = heads_q // heads_kv
        head_q, head_y, turns = head, head // group, Int32(1)
        if const_expr(by_keys):
            head_q, head_y, turns = head * group, head * group, group
        x1_head, x1_stride, _ = pointer(mX1, batch, begin_x, head)
        x2_head, x2_stride, _ = pointer(mX2, batch, begin_x, head)
        y1_head, y1_stride, y1_heads = pointer(mY1, batch, begin_y, head_y)
        y2_head, y2_stride, y2_heads = pointer(mY2, batch, begin_y, head_y)
        # Statistics of the head's first query, and the distance to the next head's.
        between = Int64(mQ.shape[at])
        begin_q = begin_x
        if const_expr(by_keys):
            begin_q = begin_y
        stats_at = Int64(head_q) * between + begin_q
        if const_expr(not self.sequences.packed):
            stats_at = (Int64(batch) * heads_q + head_q) * between
        stats = mStats.iterator + stats_at
        to_delta = Int64(cute.size(mStats)) // 2

        # -- their walked rows: the band seen from the owned side
        shift = seq_y - seq_x
        left_x, right_x, whole_y = left - shift, right + shift, seq_y
        if const_expr(by_keys):  # a key is seen by queries right before it and left behind it
            left_x, right_x = right - shift, left + shift
            whole_y = (seq_y + columns - 1) // columns * columns  # queries that do not exist are blind
        seen = mask.blocks
        first, open_, closed, end = seen(row, seq_x, whole_y, left_x, right_x)
        if alive <= 0:
            open_, closed, end = first, first, first
        if end <= first:
            turns = Int32(0)

        # -- setup: shared memory
        layout_x, layout_y = own.smem_layout(dtype), walked.smem_layout(dtype)
        x_elements, y_elements = cute.cosize(layout_x), cute.cosize(layout_y)
        owned = const_expr(2 if two else 1)
        allocator = SmemAllocator()
        storage = allocator.allocate_array(dtype, owned * x_elements + 2 * y_elements, byte_alignment=ALIGNMENT)
        sStats = storage
        if const_expr(by_keys):
            sStats = allocator.allocate_array(Float32, 2 * columns * stages, byte_alignment=16)
        at_x2, at_y = storage + (owned - 1) * x_elements, storage + owned * x_elements
        sX = cute.make_tensor(cute.recast_ptr(storage, layout_x.inner, dtype), layout_x.outer)[None, None, 0]
        sX2 = cute.make_tensor(cute.recast_ptr(at_x2, layout_x.inner, dtype), layout_x.outer)[None, None, 0]

        # -- prologue: the owned operands and the first walked tile
        clear_x, clear_y, fetch_x = own.clear_padding, walked.clear_padding, own.fetch
        into_x, into_y, fetch_walked = own.address, walked.address, self.fetch_walked
        x_bytes = const_expr(rows * padded * dtype.width // 8)
        stage_bytes = const_expr(columns * padded * dtype.width // 8)
        to_x, to_y = into_x(tid, storage), into_y(tid, at_y)
        to_x2 = to_x + (owned - 1) * x_bytes
        for i in cutlass.range_constexpr(owned):
            clear_x(tid, dtype, to_x + i * x_bytes)
        for i in cutlass.range_constexpr(2 * stages):
            clear_y(tid, dtype, to_y + i * stage_bytes)
        fetch_x(tid, x1_head, x1_stride, row, to_x, alive)
        if const_expr(two):
            fetch_x(tid, x2_head, x2_stride, row, to_x2, alive)
        walk = (
            (y1_head, y1_stride, y1_heads), (y2_head, y2_stride, y2_heads), (stats, between, to_delta),
            to_y, sStats, first, end, turns, seq_y,
        )  # fmt: skip
        if turns > 0:
            fetch_walked(tid, walk, Int32(0), first, Int32(0))
        cute.arch.cp_async_commit_group()
        thr_mma = tiled_mma.get_slice(tid)
        shape_sum = tiled_mma.partition_shape_C((rows, padded))  # ((2, 2), MMA_M, MMA_D)
        acc_1, acc_2 = None, None
        if const_expr(self.wants_ds):
            acc_1 = cute.make_rmem_tensor(shape_sum, Float32)
            acc_1.fill(0.0)
        if const_expr(self.wants_p):
            acc_2 = cute.make_rmem_tensor(shape_sum, Float32)
            acc_2.fill(0.0)
        own_rows = const_expr(shape_sum[0][1] * shape_sum[1])
        rLse, rDelta = cute.make_rmem_tensor(own_rows, Float32), cute.make_rmem_tensor(own_rows, Float32)
        if const_expr(not by_keys):
            places = by_rows(thr_mma.partition_C(cute.make_identity_tensor((rows, padded))))
            for r in cutlass.range_constexpr(own_rows):
                mine = places[r, 0][0]
                rLse[r], rDelta[r] = Float32(BLIND), Float32(0.0)
                if mine < alive:
                    rLse[r] = (stats + (row + mine)).load()
                    rDelta[r] = (stats + (to_delta + row + mine)).load()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        rX1 = thr_mma.make_fragment_A(thr_mma.partition_A(sX))  # (MMA, MMA_M, MMA_D)
        rX2 = thr_mma.make_fragment_A(thr_mma.partition_A(sX2))
        products = self.products
        sources = products.sources(tid, tiled_mma, storage, layout_x, at_y, at_y, layout_y)
        if const_expr(products.x_in_registers):
            load = products.load
            load(tid, (rX1, rX2)[:owned], sources.x, x_bytes)

        # -- walked tiles, head by head: those at the band's begin, whole ones, those at its end
        step = self.step
        slot = Int32(0)
        tensors = (rX1, rX2, acc_1, acc_2, rLse, rDelta)
        factors = (scale, cap_inner, cap_outer)
        for turn in cutlass.range(turns, unroll=1):
            gMask = None
            if const_expr(mask.given):
                gMask = mMask[batch, head_q + turn, None, None]
                if const_expr(by_keys):
                    gMask = cute.make_tensor(gMask.iterator, cute.select(gMask.layout, mode=[1, 0]))
            edges = (row, seq_x, seq_y, left_x, right_x, gMask)
            if const_expr(not mask.given):
                if const_expr(mask.limited_left):
                    for i in cutlass.range(open_ - first, unroll=1):
                        slot = step(tid, first + i, turn, slot, True, walk, sources, tensors, factors, edges, tiled_mma)
                for i in cutlass.range(closed - open_, unroll=1):
                    slot = step(tid, open_ + i, turn, slot, False, walk, sources, tensors, factors, edges, tiled_mma)
            if const_expr(mask.given or mask.limited_right or not by_keys):
                for i in cutlass.range(end - closed, unroll=1):
                    slot = step(tid, closed + i, turn, slot, True, walk, sources, tensors, factors, edges, tiled_mma)

        # -- epilogue: through the owned operands' shared memory, no longer read, 16 bytes a thread
        if const_expr(self.wants_ds):
            rG = cute.make_fragment_like(acc_1, dtype)
            rG.store((acc_1.load() * factor).to(dtype))
            cute.autovec_copy(rG, thr_mma.partition_C(sX))
        if const_expr(self.wants_p):
            rG = cute.make_fragment_like(acc_2, dtype)
            rG.store(acc_2.load().to(dtype))
            cute.autovec_copy(rG, thr_mma.partition_C(sX2))
        cute.arch.sync_threads()
        store = own.store
        if const_expr(self.wants_ds):
            first_head, first_stride, _ = pointer(mFirst, batch, begin_x, head)
            store(tid, first_head, first_stride, row, to_x, alive)
        if const_expr(self.wants_p):
            second_head, second_stride, _ = pointer(mSecond, batch, begin_x, head)
            store(tid, second_head, second_stride, row, to_x2, alive)

    @cute.jit
    def step(
        self, tid: Int32, block: Int32, turn: Int32, slot: Int32, masked: cutlass.Constexpr, walk: tuple,
        sources: cutlass.Constexpr, tensors: tuple[cute.Tensor, ...], factors: tuple[Float32, Float32, Float32],
        edges: tuple[Int32, Int32, Int32, Int32, Int32, cute.Tensor | None], tiled_mma: cute.TiledMma,
    ) -> Int32:  # fmt: skip
        """One walked tile, which is in ``slot``. Returns the slot of the next tile, if there is one."""
        sStats, first, end, turns = walk[4], walk[5], walk[6], walk[7]
        rX1, rX2, acc_1, acc_2, rLse, rDelta = tensors
        scale, cap_inner, cap_outer = factors
        row, *seen = edges
        own, walked, mask, softmax = self.own, self.walked, self.mask, self.softmax
        rows, columns, stages = own.rows, walked.rows, walked.stages
        dtype = rX1.element_type
        x_bytes = const_expr(rows * own.padded * dtype.width // 8)
        stage_bytes = const_expr(columns * own.padded * dtype.width // 8)
        fetch_walked, multiply, add = self.fetch_walked, self.products.multiply, self.products.add
        ahead, ahead_turn = block + 1, turn
        if ahead == end:
            ahead, ahead_turn = first, turn + 1
        nxt = slot
        if const_expr(stages > 1):
            nxt = 1 - slot
            if ahead_turn < turns:
                fetch_walked(tid, walk, ahead_turn, ahead, nxt)
            cute.arch.cp_async_commit_group()
        at_1 = slot * stage_bytes
        at_2 = at_1 + stages * stage_bytes

        # -- scores, owned rows by walked columns
        shape_s = tiled_mma.partition_shape_C((rows, columns))
        acc_s = cute.make_rmem_tensor(shape_s, Float32)  # ((2, 2), MMA_M, MMA_WALKED)
        acc_s.fill(0.0)
        multiply(tid, acc_s, rX1, sources, Int32(0), at_1, tiled_mma)

        # -- probabilities
        if const_expr(softmax.capped):
            cap = softmax.cap
            cap(acc_s, cap_inner, cap_outer)
        if const_expr(masked):
            hide = mask.apply
            hide(tid, acc_s, row, block * columns, seen, tiled_mma)
        scores = by_rows(acc_s)
        many, wide = const_expr(cute.size(scores, mode=[0])), const_expr(cute.size(scores, mode=[1]))
        cLse, cDelta = rLse, rDelta  # one value per row, or per column
        if const_expr(self.by_keys):
            cLse, cDelta = self.of_columns(tid, sStats, slot, wide)
        falls = const_expr(softmax.capped and self.wants_ds)
        slope = None
        if const_expr(falls):  # slope of the cap, 0 where a score is hidden
            inverse = cute.arch.rcp_approx(cap_outer)
            slope = cute.make_fragment_like(acc_s)
            for i in cutlass.range_constexpr(cute.size(acc_s)):
                t = acc_s[i] * inverse
                slope[i] = 1.0 - cute.arch.fmin(t * t, Float32(1.0))
        for r in cutlass.range_constexpr(many):
            for c in cutlass.range_constexpr(wide):
                at = const_expr(c if self.by_keys else r)
                scores[r, c] = cute.math.exp2(scores[r, c] * scale - cLse[at], fastmath=True)
        rP = None
        if const_expr(self.wants_p):
            rP = cute.make_fragment_like(acc_s, dtype)
            rP.store(acc_s.load().to(dtype))
        if const_expr(falls):
            acc_s.store(acc_s.load() * slope.load())

        if const_expr(self.wants_p):
            add(tid, acc_2, rP, sources, at_2, tiled_mma)
        if const_expr(self.wants_ds):
            acc_dp = cute.make_rmem_tensor(shape_s, Float32)
            slopes = by_rows(acc_dp)
            for r in cutlass.range_constexpr(many):
                for c in cutlass.range_constexpr(wide):
                    slopes[r, c] = -cDelta[c if self.by_keys else r]
            multiply(tid, acc_dp, rX2, sources, Int32(x_bytes), at_2, tiled_mma)
            rDs = cute.make_fragment_like(acc_s, dtype)
            rDs.store((acc_s.load() * acc_dp.load()).to(dtype))
            add(tid, acc_1, rDs, sources, at_1, tiled_mma)

        if const_expr(stages == 1):
            cute.arch.sync_threads()  # every warp has read this tile
            if ahead_turn < turns:
                fetch_walked(tid, walk, ahead_turn, ahead, nxt)
            cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)  # the next tile has arrived,
        cute.arch.sync_threads()  # and every warp has read this one
        return nxt

    @cute.jit
    def of_columns(
        self, tid: Int32, sStats: cute.Pointer, slot: Int32, count: cutlass.Constexpr
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """lse and delta of the ``count`` columns of this thread's accumulators: pairs, 8 columns apart."""
        columns = const_expr(self.walked.rows)
        layout = cute.make_layout((2, count // 2), stride=(1, 8))
        values = []
        for which in cutlass.range_constexpr(2):
            source = (sStats + ((2 * slot + which) * columns + tid % 4 * 2)).align(8)
            own = cute.make_rmem_tensor((2, count // 2), Float32)
            cute.autovec_copy(cute.make_tensor(source, layout), own)
            values.append(own)
        return values[0], values[1]

    @cute.jit
    def fetch_walked(self, tid: Int32, walk: tuple, turn: Int32, block: Int32, slot: Int32):
        """Starts the copies of tile ``block`` of the ``turn``-th head into ``slot``; rows beyond the end are zeros."""
        (y1_head, y1_stride, y1_heads), (y2_head, y2_stride, y2_heads), (stats, between, to_delta), *rest = walk
        to_y, sStats, _, _, _, seq_y = rest
        walked = self.walked
        columns = const_expr(walked.rows)
        fetch = walked.fetch
        stage_bytes = const_expr(columns * walked.padded * y1_head.dtype.width // 8)
        row = block * columns
        left = seq_y - row
        y1, y2 = y1_head + Int64(turn) * y1_heads, y2_head + Int64(turn) * y2_heads
        to_1 = to_y + slot * stage_bytes
        to_2 = to_1 + walked.stages * stage_bytes
        if left >= columns:
            fetch(tid, y1, y1_stride, row, to_1, None)
            fetch(tid, y2, y2_stride, row, to_2, None)
        else:
            fetch(tid, y1, y1_stride, row, to_1, left)
            fetch(tid, y2, y2_stride, row, to_2, left)
        if const_expr(self.by_keys):
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.ALWAYS), Float32, num_bits_per_copy=32)
            source = stats + (Int64(turn) * between + row)
            for i in cutlass.range_constexpr(0, 2 * columns, walked.threads):
                at = tid + i
                if at < 2 * columns:
                    which, column = at // columns, at % columns
                    target = cute.make_tensor(sStats + (slot * (2 * columns) + at), cute.make_layout(1))
                    if column < left:
                        value = cute.make_tensor(source + (which * to_delta + column), cute.make_layout(1))
                        cute.copy(atom, value, target)
                    else:
                        target[0] = Float32(0.0) if which == 1 else Float32(BLIND)
