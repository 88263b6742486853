"""Gradients of attention, warp-MMA schedule, on any GPU with cp.async and mma.sync: no atomics, one order of summation.

With ``P = exp(S - lse)``, ``dP = dO V^T`` and ``dS = P * (dP - delta)``, where ``delta`` is a query's sum of dO * O::

    dV = P^T dO        dK = scale * dS^T Q        dQ = scale * dS K

Each CTA owns a tile of rows of one head and walks tiles of the other side's rows. For dK and dV it owns keys and walks
the queries of all heads of the group; for dQ it owns queries and walks keys. With owned operands X and walked ones Y::

    of           X1   X2   Y1   Y2   S = X1 Y1^T   dP = X2 Y2^T   first result: dS Y1   second result: P Y2
    q            Q    dO   K    V    Q K^T         dO V^T         dQ                    -
    k, v, kv     K    V    Q    dO   K Q^T         V dO^T         dK                    dV

so P and dS are accumulators of the warps, which divide the owned rows, and become A operands in registers. ldmatrix
reads a walked tile twice: plain for S and dP, transposed for the results.

Roles:
    All warps do the same: they copy global to shared memory together (cp.async), and each multiplies its own rows of
    the owned tile with all walked rows.

Pipeline: no mbarriers. A thread waits for its own copies (cp.async groups), then the CTA's barrier makes everybody's
visible and says that every warp has read the buffers that are filled next.
    ``stages = 2``: the next tile is copied during a whole one, with one barrier a tile.
    ``stages = 1``: a barrier when every warp has read the tile, then the copy of the next; another CTA of the SM
    computes meanwhile.
One step:
    (two stages: copy the next tile;) S = X1 Y1^T, mask, P; acc_2 += P Y2; dP - delta = X2 Y2^T from accumulators that
    begin at -delta; acc_1 += dS Y1; (one stage: barrier, copy the next tile;) wait for the next tile; barrier.
Regions of each head's walk, in this order: tiles that the band's left edge cuts, masked; tiles seen whole, unmasked;
tiles that its right edge or the last key cuts, masked. With a given mask all tiles are masked.

Statistics (lse to base 2, delta) belong to queries: to rows for dQ, in registers; to columns for dK and dV, in shared
memory, fetched with the tile. A query that sees no key, or does not exist, has inf as lse (``BLIND``): its
probabilities are 0, and with them its gradients. Keys that no query sees get 0.

Refuses (``ops/attention/backward.py``): tiles whose accumulators or buffers do not fit the registers or shared memory
of ``ctas_per_sm`` CTAs.

Source:
    FlashAttention-2 (Dao 2023), which adds dQ up by atomics in the kernel of dK and dV; here dQ has a kernel of its own
    that computes S and dP again: 7 products instead of 5, and one order of summation.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.heads import HeadRows
from cutekernels.kernels.cute.parts.mask import Band, BandMask
from cutekernels.kernels.cute.parts.products import Products, Sources
from cutekernels.kernels.cute.parts.score_gradients import BLIND, GradientNumbers, QueryStatistics, ScoreFactors
from cutekernels.kernels.cute.parts.sequences import Ends, Head, HeadOrder, Sequences
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax, by_rows


@dataclass(frozen=True)
class Walk:
    """The walked tiles, head by head: where they come from, and where they go."""

    y1: Head  # of the first head
    y2: Head
    statistics: QueryStatistics  # from the first query of the first head on
    to_y: Int32  # this thread's first vector in the first buffer of Y1; Y2's buffers follow Y1's
    sStats: cute.Pointer  # lse, then delta, of each stage's columns; where queries are walked
    first: Int32  # tiles of a head
    end: Int32
    heads: Int32  # 0 where no walked row is seen
    seq_y: Int32


@dataclass(frozen=True)
class Held:
    """State of a thread for the whole walk; None where its results do not need it."""

    tid: Int32
    tiled_mma: cute.TiledMma
    sources: Sources
    rX1: cute.Tensor  # (MMA, MMA_M, MMA_D)
    rX2: cute.Tensor
    acc_1: cute.Tensor | None  # dQ or dK ((2, 2), MMA_M, MMA_D)
    acc_2: cute.Tensor | None  # dV
    rLse: cute.Tensor  # of this thread's rows, where these are queries
    rDelta: cute.Tensor
    factors: ScoreFactors
    row: Int32  # the tile's first one


@dataclass(frozen=True)
class Launch:
    """Tensors of a launch."""

    mFirst: cute.Tensor | None
    mSecond: cute.Tensor | None
    mDo: cute.Tensor
    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mStats: cute.Tensor
    mMask: cute.Tensor | None
    mCuQ: cute.Tensor | None
    mCuKv: cute.Tensor | None


@dataclass(frozen=True)
class MultistageAttentionBackward:
    """The body; its header is the module's.

    ``of``: the gradients, ``"q"``, ``"k"``, ``"v"`` or ``"kv"``; the owned rows follow from it. ``own`` rows are in one
    buffer each of Q and dO, or of K and V; ``walked`` ones in ``stages``. The rows of ``mask`` are the owned ones, its
    columns the walked ones.
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
        """Whether dS is needed: for dQ or dK, the first result."""
        return self.of != "v"

    @property
    def wants_p(self) -> bool:
        """Whether P is needed: for dV, the second result."""
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
        heads_per_kv = mQ.shape[at + 1] // mK.shape[at + 1]
        bytes_per_head = Int64(self.sequences.length(mWalked, mCu)) * (4 * self.walked.head_dim)
        if const_expr(self.by_keys):
            bytes_per_head = bytes_per_head * heads_per_kv
            heads_per_kv = Int32(1)  # no two heads share the rows they walk
        band = self.order.band(layers, heads_per_kv, bytes_per_head)
        self.kernel(
            Launch(mFirst, mSecond, mDo, mQ, mK, mV, mStats, mMask, mCuQ, mCuKv),
            GradientNumbers(ScoreFactors(scale, cap_inner, cap_outer), factor, left, right, tiles, layers, band),
            self.products.tiled_mma(mQ.element_type),
        ).launch(
            grid=[tiles * layers, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
            stream=stream,
        )

    @cute.kernel
    def kernel(self, launch: Launch, numbers: GradientNumbers, tiled_mma: cute.TiledMma):
        tid, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        dtype = launch.mQ.element_type
        stages = const_expr(self.walked.stages)
        two = const_expr(self.wants_ds)  # owned operands
        mX1, mX2, mY1, mY2, ends = launch.mQ, launch.mDo, launch.mK, launch.mV, Ends(launch.mCuQ, launch.mCuKv)
        if const_expr(self.by_keys):
            mX1, mX2, mY1, mY2, ends = launch.mK, launch.mV, launch.mQ, launch.mDo, Ends(launch.mCuKv, launch.mCuQ)

        # ---- this CTA's rows

        tile, layer = self.order.place(number, numbers.layers, numbers.tiles, numbers.band)
        if const_expr(self.by_keys):
            tile = numbers.tiles - 1 - tile  # under a causal mask the first keys are seen by most
        at = const_expr(self.sequences.rows_mode)
        heads_q, heads_kv = launch.mQ.shape[at + 1], launch.mK.shape[at + 1]
        place = self.sequences.locate(tile, layer, self.own.rows, mX1, mY1, ends)
        batch, head, seq_x, seq_y = place.batch, place.head, place.seq_x, place.seq_y
        row = place.tile * self.own.rows
        valid = cutlass.min(cutlass.max(seq_x - row, Int32(0)), Int32(self.own.rows))  # rows of the tile that exist
        heads_per_kv = heads_q // heads_kv
        head_q, head_y, heads = head, head // heads_per_kv, Int32(1)
        if const_expr(self.by_keys):
            head_q, head_y, heads = head * heads_per_kv, head * heads_per_kv, heads_per_kv
        x1 = self.sequences.head(mX1, batch, place.begin_x, head)
        x2 = self.sequences.head(mX2, batch, place.begin_x, head)
        y1 = self.sequences.head(mY1, batch, place.begin_y, head_y)
        y2 = self.sequences.head(mY2, batch, place.begin_y, head_y)
        # Statistics are (B, HQ, SQ), or (HQ, TOTAL_Q) of varlen sequences.
        between = Int64(launch.mQ.shape[at])
        begin_q = place.begin_x
        if const_expr(self.by_keys):
            begin_q = place.begin_y
        stats_at = Int64(head_q) * between + begin_q
        if const_expr(not self.sequences.varlen):
            stats_at = (Int64(batch) * heads_q + head_q) * between
        statistics = QueryStatistics(launch.mStats.iterator + stats_at, between, Int64(cute.size(launch.mStats)) // 2)

        # ---- their walked rows: the band seen from the owned side

        shift = seq_y - seq_x
        left_x, right_x, whole_y = numbers.left - shift, numbers.right + shift, seq_y
        if const_expr(self.by_keys):  # a key is seen by queries right before it and left behind it
            left_x, right_x = numbers.right - shift, numbers.left + shift
            # Queries that do not exist are blind.
            whole_y = (seq_y + self.walked.rows - 1) // self.walked.rows * self.walked.rows
        blocks = self.mask.blocks(row, Band(seq_x, whole_y, left_x, right_x))
        first, whole_first, whole_end, end = blocks.first, blocks.whole_first, blocks.whole_end, blocks.end
        if valid <= 0:
            whole_first, whole_end, end = first, first, first
        if end <= first:
            heads = Int32(0)

        # ---- setup: shared memory

        layout_x, layout_y = self.own.smem_layout(dtype), self.walked.smem_layout(dtype)
        x_elements, y_elements = cute.cosize(layout_x), cute.cosize(layout_y)
        owned = const_expr(2 if two else 1)
        allocator = SmemAllocator()
        storage = allocator.allocate_array(dtype, owned * x_elements + 2 * y_elements, byte_alignment=ALIGNMENT)
        sStats = storage
        if const_expr(self.by_keys):
            sStats = allocator.allocate_array(Float32, 2 * self.walked.rows * stages, byte_alignment=16)
        at_x2, at_y = storage + (owned - 1) * x_elements, storage + owned * x_elements
        sX = cute.make_tensor(cute.recast_ptr(storage, layout_x.inner, dtype), layout_x.outer)  # (rows, D, 1)
        sX = sX[None, None, 0]
        sX2 = cute.make_tensor(cute.recast_ptr(at_x2, layout_x.inner, dtype), layout_x.outer)  # (rows, D, 1)
        sX2 = sX2[None, None, 0]

        # ---- prologue: the owned operands and the first walked tile

        x_bytes = const_expr(self.own.rows * self.own.padded * dtype.width // 8)
        stage_bytes = const_expr(self.walked.rows * self.own.padded * dtype.width // 8)
        to_x, to_y = self.own.address(tid, storage), self.walked.address(tid, at_y)
        to_x2 = to_x + (owned - 1) * x_bytes
        # Columns between head_dim and padded are zeros once and for all: no copy writes them.
        for i in cutlass.range_constexpr(owned):
            self.own.clear_padding(tid, dtype, to_x + i * x_bytes)
        for i in cutlass.range_constexpr(2 * stages):
            self.walked.clear_padding(tid, dtype, to_y + i * stage_bytes)
        self.own.fetch(tid, x1.rows, x1.stride, row, to_x, valid)
        if const_expr(two):
            self.own.fetch(tid, x2.rows, x2.stride, row, to_x2, valid)
        walk = Walk(y1, y2, statistics, to_y, sStats, first, end, heads, seq_y)
        if heads > 0:
            self.fetch_walked(tid, walk, Int32(0), first, Int32(0))
        cute.arch.cp_async_commit_group()
        thr_mma = tiled_mma.get_slice(tid)
        shape_x = tiled_mma.partition_shape_C((self.own.rows, self.own.padded))  # ((2, 2), MMA_M, MMA_D)
        acc_1, acc_2 = None, None
        if const_expr(self.wants_ds):
            acc_1 = cute.make_rmem_tensor(shape_x, Float32)
            acc_1.fill(0.0)
        if const_expr(self.wants_p):
            acc_2 = cute.make_rmem_tensor(shape_x, Float32)
            acc_2.fill(0.0)
        own_rows = const_expr(shape_x[0][1] * shape_x[1])
        rLse, rDelta = cute.make_rmem_tensor(own_rows, Float32), cute.make_rmem_tensor(own_rows, Float32)
        if const_expr(not self.by_keys):
            places = by_rows(thr_mma.partition_C(cute.make_identity_tensor((self.own.rows, self.own.padded))))
            for r in cutlass.range_constexpr(own_rows):
                mine = places[r, 0][0]
                rLse[r], rDelta[r] = Float32(BLIND), Float32(0.0)
                if mine < valid:
                    rLse[r] = (statistics.begin + (row + mine)).load()
                    rDelta[r] = (statistics.begin + (statistics.to_delta + row + mine)).load()
        # This thread's copies have arrived; the barrier waits for everybody's.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        rX1 = thr_mma.make_fragment_A(thr_mma.partition_A(sX))  # (MMA, MMA_M, MMA_D)
        rX2 = thr_mma.make_fragment_A(thr_mma.partition_A(sX2))
        sources = self.products.sources(tid, tiled_mma, storage, layout_x, at_y, at_y, layout_y)
        if const_expr(self.products.x_in_registers):
            self.products.load(tid, (rX1, rX2)[:owned], sources.x, x_bytes)

        # ---- walked tiles, head by head

        slot = Int32(0)
        held = Held(tid, tiled_mma, sources, rX1, rX2, acc_1, acc_2, rLse, rDelta, numbers.factors, row)
        for h in cutlass.range(heads, unroll=1):
            gMask = None
            if const_expr(self.mask.given):
                gMask = launch.mMask[batch, head_q + h, None, None]  # (SQ, SKV)
                if const_expr(self.by_keys):
                    gMask = cute.make_tensor(gMask.iterator, cute.select(gMask.layout, mode=[1, 0]))
            band_x = Band(seq_x, seq_y, left_x, right_x, gMask)
            if const_expr(not self.mask.given):
                if const_expr(self.mask.limited_left):
                    # Masked tiles: the band's left edge cuts them.
                    for i in cutlass.range(whole_first - first, unroll=1):
                        slot = self.step(held, walk, band_x, (first + i, h), slot, True)
                # Unmasked tiles: every owned row meets all their rows.
                for i in cutlass.range(whole_end - whole_first, unroll=1):
                    slot = self.step(held, walk, band_x, (whole_first + i, h), slot, False)
            if const_expr(self.mask.given or self.mask.limited_right or not self.by_keys):
                # Masked tiles: the band's right edge or the last key cuts them; with a given mask, all.
                for i in cutlass.range(end - whole_end, unroll=1):
                    slot = self.step(held, walk, band_x, (whole_end + i, h), slot, True)

        # ---- epilogue: through the owned operands' shared memory, 16 bytes a thread

        # Nobody reads the owned operands any more: a step ends with a barrier, and a warp's rows are its own.
        if const_expr(self.wants_ds):
            rG = cute.make_fragment_like(acc_1, dtype)
            rG.store((acc_1.load() * numbers.factor).to(dtype))
            cute.autovec_copy(rG, thr_mma.partition_C(sX))
        if const_expr(self.wants_p):
            rG = cute.make_fragment_like(acc_2, dtype)
            rG.store(acc_2.load().to(dtype))
            cute.autovec_copy(rG, thr_mma.partition_C(sX2))
        # All gradients are in shared memory.
        cute.arch.sync_threads()
        if const_expr(self.wants_ds):
            out = self.sequences.head(launch.mFirst, batch, place.begin_x, head)
            self.own.store(tid, out.rows, out.stride, row, to_x, valid)
        if const_expr(self.wants_p):
            out = self.sequences.head(launch.mSecond, batch, place.begin_x, head)
            self.own.store(tid, out.rows, out.stride, row, to_x2, valid)

    @cute.jit
    def step(
        self,
        held: Held,
        walk: Walk,
        band: Band,
        tile: tuple[Int32, Int32],  # of a head, and which head
        slot: Int32,
        masked: cutlass.Constexpr,
    ) -> Int32:
        """One walked tile, which is in ``slot``. Returns the slot of the next tile, if there is one."""
        block, h = tile
        tid, tiled_mma, sources = held.tid, held.tiled_mma, held.sources
        dtype = held.rX1.element_type
        x_bytes = const_expr(self.own.rows * self.own.padded * dtype.width // 8)
        stage_bytes = const_expr(self.walked.rows * self.own.padded * dtype.width // 8)
        # The next tile: of this head, or the first one of the next.
        ahead, ahead_h = block + 1, h
        if ahead == walk.end:
            ahead, ahead_h = walk.first, h + 1
        nxt = slot
        if const_expr(self.walked.stages > 1):
            # Two stages: copied into the buffers that the barrier of the step before has freed.
            nxt = 1 - slot
            if ahead_h < walk.heads:
                self.fetch_walked(tid, walk, ahead_h, ahead, nxt)
            cute.arch.cp_async_commit_group()
        at_1 = slot * stage_bytes
        at_2 = at_1 + self.walked.stages * stage_bytes

        # S = X1 Y1^T: owned rows by walked columns.
        shape_s = tiled_mma.partition_shape_C((self.own.rows, self.walked.rows))
        acc_s = cute.make_rmem_tensor(shape_s, Float32)  # ((2, 2), MMA_M, MMA_WALKED)
        acc_s.fill(0.0)
        self.products.multiply(tid, acc_s, held.rX1, sources, Int32(0), at_1, tiled_mma)

        # P = exp(S - lse): S capped, masked.
        if const_expr(self.softmax.capped):
            self.softmax.cap(acc_s, held.factors.cap_inner, held.factors.cap_outer)
        if const_expr(masked):
            self.mask.apply(tid, acc_s, held.row, block * self.walked.rows, band, tiled_mma)
        scores = by_rows(acc_s)  # ((2, MMA_M), (2, MMA_WALKED))
        many, wide = const_expr(cute.size(scores, mode=[0])), const_expr(cute.size(scores, mode=[1]))
        cLse, cDelta = held.rLse, held.rDelta  # one value per row, or per column
        if const_expr(self.by_keys):
            cLse, cDelta = self.column_statistics(tid, walk.sStats, slot, wide)
        sloped = const_expr(self.softmax.capped and self.wants_ds)
        slopes = None
        if const_expr(sloped):  # of the cap; 0 where a score is hidden
            inverse = cute.arch.rcp_approx(held.factors.cap_outer)
            slopes = cute.make_fragment_like(acc_s)
            for i in cutlass.range_constexpr(cute.size(acc_s)):
                t = acc_s[i] * inverse
                slopes[i] = 1.0 - cute.arch.fmin(t * t, Float32(1.0))
        for r in cutlass.range_constexpr(many):
            for c in cutlass.range_constexpr(wide):
                at = const_expr(c if self.by_keys else r)
                scores[r, c] = cute.math.exp2(scores[r, c] * held.factors.scale - cLse[at], fastmath=True)
        rP = None
        if const_expr(self.wants_p):
            rP = cute.make_fragment_like(acc_s, dtype)
            rP.store(acc_s.load().to(dtype))
        if const_expr(sloped):
            acc_s.store(acc_s.load() * slopes.load())

        # acc_2 += P Y2.
        if const_expr(self.wants_p):
            self.products.add(tid, held.acc_2, rP, sources, at_2, tiled_mma)
        # dS = P * (dP - delta), dP = X2 Y2^T; acc_1 += dS Y1.
        if const_expr(self.wants_ds):
            acc_dp = cute.make_rmem_tensor(shape_s, Float32)
            gradients = by_rows(acc_dp)
            for r in cutlass.range_constexpr(many):
                for c in cutlass.range_constexpr(wide):
                    gradients[r, c] = -cDelta[c if self.by_keys else r]
            self.products.multiply(tid, acc_dp, held.rX2, sources, Int32(x_bytes), at_2, tiled_mma)
            rDs = cute.make_fragment_like(acc_s, dtype)
            rDs.store((acc_s.load() * acc_dp.load()).to(dtype))
            self.products.add(tid, held.acc_1, rDs, sources, at_1, tiled_mma)

        if const_expr(self.walked.stages == 1):
            # One stage: waits until every warp has read this tile, whose buffers the next one takes.
            cute.arch.sync_threads()
            if ahead_h < walk.heads:
                self.fetch_walked(tid, walk, ahead_h, ahead, nxt)
            cute.arch.cp_async_commit_group()
        # This thread's part of the next tile has arrived; the barrier waits for everybody's, and (two stages) until
        # every warp has read this tile.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        return nxt

    @cute.jit
    def column_statistics(
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
    def fetch_walked(self, tid: Int32, walk: Walk, h: Int32, block: Int32, slot: Int32):
        """Starts the copies of tile ``block`` of the ``h``-th head into ``slot``; rows beyond the end are zeros."""
        y1, y2 = walk.y1, walk.y2
        columns = const_expr(self.walked.rows)
        stage_bytes = const_expr(columns * self.walked.padded * y1.rows.dtype.width // 8)
        row = block * columns
        left = walk.seq_y - row
        y1_rows, y2_rows = y1.rows + Int64(h) * y1.between, y2.rows + Int64(h) * y2.between
        to_1 = walk.to_y + slot * stage_bytes
        to_2 = to_1 + self.walked.stages * stage_bytes
        if left >= columns:
            self.walked.fetch(tid, y1_rows, y1.stride, row, to_1, None)
            self.walked.fetch(tid, y2_rows, y2.stride, row, to_2, None)
        else:
            self.walked.fetch(tid, y1_rows, y1.stride, row, to_1, left)
            self.walked.fetch(tid, y2_rows, y2.stride, row, to_2, left)
        if const_expr(self.by_keys):
            # Statistics of the tile's queries, 4 bytes a copy: lse, then delta.
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.ALWAYS), Float32, num_bits_per_copy=32)
            source = walk.statistics.begin + (Int64(h) * walk.statistics.between + row)
            for i in cutlass.range_constexpr(0, 2 * columns, self.walked.threads):
                at = tid + i
                if at < 2 * columns:
                    which, column = at // columns, at % columns
                    target = cute.make_tensor(walk.sStats + (slot * (2 * columns) + at), cute.make_layout(1))
                    if column < left:
                        value = source + (which * walk.statistics.to_delta + column)
                        cute.copy(atom, cute.make_tensor(value, cute.make_layout(1)), target)
                    else:
                        target[0] = Float32(0.0) if which == 1 else Float32(BLIND)
