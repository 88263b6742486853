"""Attention, prefill schedule: ``out = softmax(scale * Q K^T) V`` on any GPU with cp.async and mma.sync.

Each CTA computes ``tile_q`` queries of one head over all blocks of ``tile_kv`` keys that some of them see, from the
last block to the first.

Roles:
    All ``threads / 32`` warps do the same: they copy global to shared memory together (cp.async, 16 bytes a thread),
    and each multiplies its own rows of the tile with all keys. So a row's softmax stays within four threads, and P
    becomes the A operand of ``P V`` in registers.

Pipelines: no mbarriers. A thread waits for its own copies (cp.async groups), then the CTA's barrier makes everybody's
visible and says that every warp has read the buffer that is filled next.
    ``stages = 1``: one buffer of K and one of V.      ``stages = 2``: two of each.
        prologue: copy Q and K, then V; wait for K         prologue: copy Q, K and V; wait for all
        S = Q K^T                                          copy the next block's K and V into the other buffers
        wait for V; barrier: every warp has read K         S = Q K^T
        copy the next K                                    softmax, O += P V
        softmax, O += P V                                  wait for the next K and V; barrier: every warp has read
        wait for the next K; barrier: all have read V          this block
        copy the next V

Regions of the walk, in this order: blocks that the right edge cuts (causal, window, the last key), masked; blocks that
every row sees whole, unmasked; blocks that the window's left edge cuts, masked. With a given mask all are masked.
A row that sees no key gets 0, and -inf as log-sum-exp (its sink's, where it has one): ``parts/softmax.py``.
A row's reference score moves only where a block exceeds it by far, so most blocks do not rescale O.

K and V may be in a cache, contiguous or in pages, with lengths and page table on the device; a thread looks up the
pages of its rows a block ahead. Nothing behind a length or before a window is read. A cache in e4m3 is converted on the
way to shared memory, by loads that are waited for. Scales of heads are part of the factor of scores, and of the
results; those of tokens and heads, powers of two, multiply what is converted.

Refuses (``ops/attention/op.py``): tiles whose accumulators or buffers do not fit the registers or shared memory of
``ctas_per_sm`` CTAs.

Source:
    FlashAttention-2 (Dao 2023); rescaling on demand is FlashAttention-4's. NVIDIA's CuTe DSL ``flash_attention_v2``
    example has the one-buffer pipeline. Different here: caches in pages, blocks at the edges apart from whole ones.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.cache import CacheSteps, CacheTiles
from cutekernels.kernels.cute.parts.heads import HeadRows
from cutekernels.kernels.cute.parts.mask import Band, BandMask
from cutekernels.kernels.cute.parts.products import Products, Sources
from cutekernels.kernels.cute.parts.sequences import Ends, HeadOrder, Sequences
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax, RowStates, by_rows


@dataclass(frozen=True)
class Keys:
    """Where the tile's keys and values come from, and where they go."""

    k: cute.Pointer  # the head's first row
    k_step: Int32 | CacheSteps  # from row to row
    v: cute.Pointer
    v_step: Int32 | CacheSteps
    to_k: Int32  # this thread's first vector in the first buffer of K; V's buffers follow K's
    first: Int32  # the first block that is seen
    gTable: cute.Tensor | None  # the sequence's row of the page table
    last: Int32  # the last key


@dataclass(frozen=True)
class Launch:
    """The launch's arguments; shapes stand at ``MultistageAttention.__call__``."""

    mO: cute.Tensor
    mLse: cute.Tensor | None
    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mMask: cute.Tensor | None
    ends: Ends
    mSinks: cute.Tensor | None
    scale: Float32
    cap_inner: Float32
    cap_outer: Float32
    left: Int32
    right: Int32
    mKScale: cute.Tensor | None
    mVScale: cute.Tensor | None
    tiles: Int32  # of a sequence
    layers: Int32  # heads of sequences
    band: Int32  # heads that walk together
    tiled_mma: cute.TiledMma


@dataclass(frozen=True)
class Held:
    """A thread's own values for the whole walk."""

    tid: Int32
    tiled_mma: cute.TiledMma
    sources: Sources
    rQ: cute.Tensor  # (MMA, MMA_M, MMA_D)
    acc_o: cute.Tensor  # ((2, 2), MMA_M, MMA_D)
    states: RowStates
    scale: Float32
    cap_inner: Float32
    cap_outer: Float32
    row: Int32  # the tile's first one
    band: Band  # what the tile's rows see


@dataclass(frozen=True)
class MultistageAttention:
    """The body; its header is the module's.

    ``ops/attention/op.py`` chooses the parts; ``ctas_per_sm`` bounds registers so that as many fit.
    """

    rows_q: HeadRows
    rows_kv: HeadRows | CacheTiles
    products: Products
    mask: BandMask
    softmax: OnlineSoftmax
    order: HeadOrder
    sequences: Sequences
    ctas_per_sm: int

    @property
    def threads(self) -> int:
        return self.rows_q.threads

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,  # (B, SQ, HQ, D), or (TOTAL_Q, HQ, D)
        mLse: cute.Tensor | None,  # (B * HQ * SQ,), as (B, HQ, SQ), or as (HQ, TOTAL_Q)
        mQ: cute.Tensor,  # as mO
        # (B, SKV, HKV, D), or (TOTAL_KV, HKV, D), or (PAGES, PAGE_SIZE, HKV, D); e4m3 as pairs of 16 bits
        mK: cute.Tensor,
        mV: cute.Tensor,  # as mK
        mMask: cute.Tensor | None,  # (B, HQ, SQ, SKV)
        mCuQ: cute.Tensor | None,  # (B + 1,)
        mCuKv: cute.Tensor | None,  # (B + 1,), or a cache's lengths (B,)
        mTable: cute.Tensor | None,  # (B, MAX_PAGES)
        mSinks: cute.Tensor | None,  # (HQ,)
        scale: Float32,  # factor of scores, to base 2
        cap_inner: Float32,
        cap_outer: Float32,
        left: Int32,  # keys seen before a row's own, where limited
        right: Int32,  # and behind it
        mKScale: cute.Tensor | None,  # (HKV,), of a cache in e4m3; or (PAGES or B, HKV, slots) of tokens' heads
        mVScale: cute.Tensor | None,  # as mKScale
        stream: cuda.CUstream,
    ):
        at = const_expr(self.sequences.rows_mode)
        tiles, layers = self.sequences.grid(mQ, mCuQ, self.rows_q.rows)
        bytes_per_head = Int64(self.sequences.length(mK, mCuKv, mTable)) * (4 * self.rows_kv.head_dim)
        band = self.order.band(layers, mQ.shape[at + 1] // mK.shape[at + 1], bytes_per_head)
        self.kernel(
            Launch(
                mO,
                mLse,
                mQ,
                mK,
                mV,
                mMask,
                Ends(mCuQ, mCuKv, mTable),
                mSinks,
                scale,
                cap_inner,
                cap_outer,
                left,
                right,
                mKScale,
                mVScale,
                tiles,
                layers,
                band,
                self.products.tiled_mma(mQ.element_type),
            )
        ).launch(
            grid=[tiles * layers, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
            stream=stream,
        )

    @cute.kernel
    def kernel(self, launch: Launch):
        mQ, mK, mV = launch.mQ, launch.mK, launch.mV
        scale, cap_inner = launch.scale, launch.cap_inner
        tid, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        dtype = mQ.element_type
        stages = const_expr(self.rows_kv.stages)

        # ---- this CTA's queries

        tile, layer = self.order.place(number, launch.layers, launch.tiles, launch.band)
        place = self.sequences.locate(tile, layer, self.rows_q.rows, mQ, mK, launch.ends)
        batch, head, seq_q, seq_kv = place.batch, place.head, place.seq_x, place.seq_y
        at = const_expr(self.sequences.rows_mode)
        head_kv = head // (mQ.shape[at + 1] // mK.shape[at + 1])
        row = place.tile * self.rows_q.rows
        valid = cutlass.min(cutlass.max(seq_q - row, Int32(0)), Int32(self.rows_q.rows))  # rows of the tile that exist
        q = self.sequences.head(mQ, batch, place.begin_x, head)
        paged = const_expr(bool(self.sequences.page_size))
        first_page = Int32(0) if const_expr(paged) else batch
        k = self.sequences.head(mK, first_page, place.begin_y, head_kv)
        v = self.sequences.head(mV, first_page, place.begin_y, head_kv)
        k_step, v_step = k.stride, v.stride

        # ---- their keys

        shift = seq_kv - seq_q  # the last query is aligned with the last key
        left, right = launch.left - shift, launch.right + shift
        blocks = self.mask.blocks(row, Band(seq_q, seq_kv, left, right))
        first, whole_first, whole_end, end = blocks.first, blocks.whole_first, blocks.whole_end, blocks.end
        if valid <= 0:
            whole_first, whole_end, end = first, first, first
        gTable, last = None, cutlass.max(seq_kv - 1, Int32(0))
        if const_expr(self.sequences.cached):
            least = cutlass.max(row - left, Int32(0))
            pages = cute.make_rmem_tensor(self.rows_kv.rows // self.rows_kv.rows_per_page, Int32)
            k_step = self.steps(mK, launch.mKScale, pages, least, first_page, head_kv)
            v_step = self.steps(mV, launch.mVScale, pages, least, first_page, head_kv)
            if const_expr(paged):
                gTable = launch.ends.mTable[batch, None]
        v_scale = None
        if const_expr(launch.mKScale is not None and not self.rows_kv.float8.scaled):
            undone = const_expr(self.rows_kv.float8.undone)
            k_scale, v_scale = launch.mKScale[head_kv] * undone, launch.mVScale[head_kv] * undone
            if const_expr(self.softmax.capped):
                cap_inner = cap_inner * k_scale
            else:
                scale = scale * k_scale
        gMask = None
        if const_expr(self.mask.given):
            gMask = launch.mMask[batch, head, None, None]  # (SQ, SKV)

        # ---- setup: shared memory

        layout_q, layout_kv = self.rows_q.smem_layout(dtype), self.rows_kv.smem_layout(dtype)
        q_elements, kv_elements = cute.cosize(layout_q), cute.cosize(layout_kv)
        storage = SmemAllocator().allocate_array(dtype, q_elements + 2 * kv_elements, byte_alignment=ALIGNMENT)
        at_k, at_v = storage + q_elements, storage + (q_elements + kv_elements)
        sQ = cute.make_tensor(cute.recast_ptr(storage, layout_q.inner, dtype), layout_q.outer)  # (tile_q, D, 1)
        sQ = sQ[None, None, 0]

        # ---- prologue: Q and the last block, the only one where rows may be missing

        stage_bytes = const_expr(self.rows_kv.rows * self.rows_q.padded * dtype.width // 8)
        to_q, to_k = self.rows_q.address(tid, storage), self.rows_kv.address(tid, at_k)
        to_v = to_k + stages * stage_bytes
        # Columns between head_dim and padded are zeros once and for all: no copy writes them.
        self.rows_q.clear_padding(tid, dtype, to_q)
        for stage in cutlass.range_constexpr(stages):
            self.rows_kv.clear_padding(tid, dtype, to_k + stage * stage_bytes)
        self.rows_q.fetch(tid, q.rows, q.stride, row, to_q, valid)
        column = (end - 1) * self.rows_kv.rows
        if const_expr(paged):
            self.rows_kv.look_up(tid, k_step, gTable, column, last)
        # First group of copies: Q and K; second: V.
        if end > first:
            self.rows_kv.fetch(tid, k.rows, k_step, column, to_k, seq_kv - column)
        cute.arch.cp_async_commit_group()
        if end > first:
            self.rows_kv.fetch(tid, v.rows, v_step, column, to_v, seq_kv - column)
        cute.arch.cp_async_commit_group()
        if const_expr(paged):
            self.rows_kv.look_up(tid, k_step, gTable, column - self.rows_kv.rows, last)
        thr_mma = launch.tiled_mma.get_slice(tid)
        acc_o = cute.make_rmem_tensor(
            launch.tiled_mma.partition_shape_C((self.rows_q.rows, self.rows_q.padded)), Float32
        )  # ((2, 2), MMA_M, MMA_D)
        own_rows = const_expr(acc_o.shape[0][1] * acc_o.shape[1])
        states = RowStates(cute.make_rmem_tensor(own_rows, Float32), cute.make_rmem_tensor(own_rows, Float32))
        acc_o.fill(0.0)
        self.softmax.start(states)
        if const_expr(launch.mSinks is not None):
            for r in cutlass.range_constexpr(own_rows):
                self.softmax.start_with(r, launch.mSinks[head].to(Float32), states)
        # This thread's Q and K have arrived (with two stages its V too: the walk does not wait for it);
        cute.arch.cp_async_wait_group(1 if stages == 1 else 0)
        # the barrier waits for everybody's.
        cute.arch.sync_threads()
        rQ = thr_mma.make_fragment_A(thr_mma.partition_A(sQ))  # (MMA, MMA_M, MMA_D)
        sources = self.products.sources(tid, launch.tiled_mma, storage, layout_q, at_k, at_v, layout_kv)
        if const_expr(self.products.x_in_registers):
            self.products.load(tid, (rQ,), sources.x, 0)

        # ---- blocks of keys, from the last to the first

        slot = Int32(0)
        keys = Keys(k.rows, k_step, v.rows, v_step, to_k, first, gTable, last)
        band_seen = Band(seq_q, seq_kv, left, right, gMask)
        held = Held(
            tid, launch.tiled_mma, sources, rQ, acc_o, states, scale, cap_inner, launch.cap_outer, row, band_seen
        )
        # Masked blocks: the right edge (causal, window, the last key) cuts them; with a given mask, all.
        for i in cutlass.range(end - whole_end, unroll=1):
            slot = self.attend(held, keys, end - 1 - i, slot, True)
        if const_expr(not self.mask.given):
            # Unmasked blocks: every row sees all their keys.
            for i in cutlass.range(whole_end - whole_first, unroll=1):
                slot = self.attend(held, keys, whole_end - 1 - i, slot, False)
            if const_expr(self.mask.limited_left):
                # Masked blocks: the window's left edge cuts them.
                for i in cutlass.range(whole_first - first, unroll=1):
                    slot = self.attend(held, keys, whole_first - 1 - i, slot, True)

        # ---- epilogue: out through the queries' shared memory, 16 bytes a thread

        # No copy is on its way (without a walk, V's has not been waited for), and every warp has read Q.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.softmax.finish(acc_o, states)
        if const_expr(v_scale is not None):
            for i in cutlass.range_constexpr(cute.size(acc_o)):
                acc_o[i] = acc_o[i] * v_scale
        rO = cute.make_fragment_like(acc_o, dtype)
        rO.store(acc_o.load().to(dtype))
        cute.autovec_copy(rO, thr_mma.partition_C(sQ))
        # All results are in shared memory.
        cute.arch.sync_threads()
        out = self.sequences.head(launch.mO, batch, place.begin_x, head)
        self.rows_q.store(tid, out.rows, out.stride, row, to_q, valid)
        if const_expr(launch.mLse is not None):
            lse_at = Int64(layer) * seq_q + row
            if const_expr(self.sequences.varlen):
                lse_at = Int64(head) * mQ.shape[0] + (place.begin_x + row)
            # The thread of column 0, among the four of a row, stores its log-sum-exp.
            places = by_rows(thr_mma.partition_C(cute.make_identity_tensor((self.rows_q.rows, self.rows_q.padded))))
            if places[0, 0][1] == 0:
                for r in cutlass.range_constexpr(cute.size(states.reference)):
                    own = places[r, 0][0]
                    if own < valid:
                        launch.mLse[lse_at + own] = states.reference[r]

    @cute.jit
    def attend(self, held: Held, keys: Keys, block: Int32, slot: Int32, masked: cutlass.Constexpr) -> Int32:
        """One block of keys, whose K is in ``slot``; its V is there too, or being copied (one stage).

        Returns the slot of ``block - 1``, if there is one, in the same state.
        """
        tid = held.tid
        dtype = held.rQ.element_type
        one = const_expr(self.rows_kv.stages == 1)
        paged = const_expr(bool(self.sequences.page_size))
        ahead = (block - 1) * self.rows_kv.rows
        stage_bytes = const_expr(self.rows_kv.rows * self.rows_kv.padded * dtype.width // 8)
        to_v = keys.to_k + self.rows_kv.stages * stage_bytes
        nxt = slot
        if const_expr(not one):
            # Two stages: the next block's K and V into the buffers that the barrier of the block before has freed.
            nxt = 1 - slot
            if block > keys.first:
                self.rows_kv.fetch(tid, keys.k, keys.k_step, ahead, keys.to_k + nxt * stage_bytes, None)
                self.rows_kv.fetch(tid, keys.v, keys.v_step, ahead, to_v + nxt * stage_bytes, None)
                if const_expr(paged):
                    self.rows_kv.look_up(tid, keys.k_step, keys.gTable, ahead - self.rows_kv.rows, keys.last)
            cute.arch.cp_async_commit_group()

        # Scores; ptxas itself loads fragments ahead of the products, as far as registers allow.
        shape_s = held.tiled_mma.partition_shape_C((self.rows_q.rows, self.rows_kv.rows))
        acc_s = cute.make_rmem_tensor(shape_s, Float32)  # ((2, 2), MMA_M, MMA_KV)
        acc_s.fill(0.0)
        self.products.multiply(tid, acc_s, held.rQ, held.sources, Int32(0), slot * stage_bytes, held.tiled_mma)

        if const_expr(one):
            # One stage: this thread's V has arrived; the barrier waits for everybody's, and until all have read K.
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if block > keys.first:
                self.rows_kv.fetch(tid, keys.k, keys.k_step, ahead, keys.to_k, None)
            cute.arch.cp_async_commit_group()

        # Softmax, then O += P V; O is rescaled in between where a reference moved.
        if const_expr(self.softmax.capped):
            self.softmax.cap(acc_s, held.cap_inner, held.cap_outer)
        if const_expr(masked):
            self.mask.apply(tid, acc_s, held.row, block * self.rows_kv.rows, held.band, held.tiled_mma)
        self.softmax.step(acc_s, held.acc_o, held.states, held.scale)
        rP = cute.make_fragment_like(acc_s, dtype)
        rP.store(acc_s.load().to(dtype))
        self.products.add(tid, held.acc_o, rP, held.sources, slot * stage_bytes, held.tiled_mma)

        # This thread's part of the next block (one stage: of its K) has arrived; the barrier waits for everybody's, and
        # until all have read this block (its V).
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if const_expr(one):
            # One stage: the next V, copied during the next S = Q K^T.
            if block > keys.first:
                self.rows_kv.fetch(tid, keys.v, keys.v_step, ahead, to_v, None)
                if const_expr(paged):
                    self.rows_kv.look_up(tid, keys.k_step, keys.gTable, ahead - self.rows_kv.rows, keys.last)
            cute.arch.cp_async_commit_group()
        return nxt

    @cute.jit
    def steps(
        self,
        mX: cute.Tensor,
        mScale: cute.Tensor | None,
        pages: cute.Tensor,
        least: Int32,
        first_page: Int32,
        head: Int32,
    ) -> CacheSteps:
        """The way from row to row of a cache (``parts/cache.py``); K's and V's share their ``pages``."""
        between, scales, between_scales = mX.layout.stride, None, None
        if const_expr(self.rows_kv.float8 is not None and self.rows_kv.float8.scaled):
            stride = mScale.layout.stride
            between_scales = Int64(stride[0])
            scales = mScale.iterator + (Int64(first_page) * between_scales + Int64(head) * Int64(stride[1]))
        return CacheSteps(Int64(between[0]), Int64(between[1]), pages, mX.shape[0], least, scales, between_scales)
