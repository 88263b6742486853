"""Attention, prefill schedule: ``out = softmax(scale * Q K^T) V`` on any GPU with cp.async and mma.sync.

Schedule:
    Each CTA computes ``tile_q`` queries of one head over the blocks of keys they see, from the last to the first. Warps
    share the keys and divide the queries, so a row's softmax stays within four threads. Probabilities become the A
    operand of ``P V`` in registers. Blocks at the edges of the band run masking code, those between have none.
    All threads load, by cp.async. With ``stages = 1``, K and V have one buffer each: V is copied during ``Q K^T``, the
    next K during the softmax and ``P V``; two barriers per block. With ``stages = 2`` the next block's K and V are
    copied during a whole block, with one barrier.
    K and V may be in a cache, contiguous or in pages, with lengths and page table on the device; a thread looks up the
    pages of its rows a block ahead. Nothing behind a length or before a window is read.
    A row's reference score moves only where a block exceeds it by far (``parts/softmax.py``), so most blocks do not
    rescale the output accumulators.

Source:
    FlashAttention-2 (Dao 2023); rescaling on demand is FlashAttention-4's. NVIDIA's CuTe DSL ``flash_attention_v2``
    example has the one-buffer pipeline.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.cache import CacheTiles
from cutekernels.kernels.cute.parts.heads import HeadRows
from cutekernels.kernels.cute.parts.mask import BandMask
from cutekernels.kernels.cute.parts.products import Products
from cutekernels.kernels.cute.parts.sequences import HeadOrder, Sequences
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax, by_rows


@dataclass(frozen=True)
class PrefillAttention:
    """The body. ``ops/attention/op.py`` chooses the parts; ``ctas_per_sm`` bounds registers so that as many fit."""

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
        mK: cute.Tensor,  # (B, SKV, HKV, D), or (TOTAL_KV, HKV, D), or (PAGES, PAGE_SIZE, HKV, D)
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
        stream: cuda.CUstream,
    ):
        at = const_expr(self.sequences.rows_mode)
        tiles, layers = self.sequences.grid(mQ, mCuQ, self.rows_q.rows)
        bytes_per_head = Int64(self.sequences.length(mK, mCuKv, mTable)) * (4 * self.rows_kv.head_dim)
        band = self.order.band(layers, mQ.shape[at + 1] // mK.shape[at + 1], bytes_per_head)
        self.kernel(
            mO, mLse, mQ, mK, mV, mMask, mCuQ, mCuKv, mTable, mSinks, scale, cap_inner, cap_outer, left, right,
            tiles, layers, band, self.products.tiled_mma(mQ.element_type),
        ).launch(
            grid=[tiles * layers, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, mO: cute.Tensor, mLse: cute.Tensor | None, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor,
        mMask: cute.Tensor | None, mCuQ: cute.Tensor | None, mCuKv: cute.Tensor | None, mTable: cute.Tensor | None,
        mSinks: cute.Tensor | None, scale: Float32, cap_inner: Float32, cap_outer: Float32, left: Int32, right: Int32,
        tiles: Int32, layers: Int32, band: Int32, tiled_mma: cute.TiledMma,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        dtype = mQ.element_type
        rows_q, rows_kv, mask, softmax = self.rows_q, self.rows_kv, self.mask, self.softmax
        tile_q, tile_kv, padded = rows_q.rows, rows_kv.rows, rows_q.padded
        stages = const_expr(rows_kv.stages)

        # -- this CTA's queries
        place, locate, pointer = self.order.place, self.sequences.locate, self.sequences.pointer
        tile, layer = place(block, layers, tiles, band)
        batch, head, tile, begin_q, begin_kv, seq_q, seq_kv = locate(tile, layer, tile_q, mQ, mK, mCuQ, mCuKv, mTable)
        at = const_expr(self.sequences.rows_mode)
        head_kv = head // (mQ.shape[at + 1] // mK.shape[at + 1])
        row = tile * tile_q
        alive = cutlass.min(cutlass.max(seq_q - row, Int32(0)), Int32(tile_q))  # rows of the tile that exist
        q_head, q_stride, _ = pointer(mQ, batch, begin_q, head)
        paged = const_expr(bool(self.sequences.page_size))
        first_page = Int32(0) if const_expr(paged) else batch
        k_head, k_stride, _ = pointer(mK, first_page, begin_kv, head_kv)
        v_head, v_stride, _ = pointer(mV, first_page, begin_kv, head_kv)

        # -- their keys
        shift = seq_kv - seq_q
        left, right = left - shift, right + shift
        seen = mask.blocks
        first, open_, closed, end = seen(row, seq_q, seq_kv, left, right)
        if alive <= 0:
            open_, closed, end = first, first, first
        gTable, last = None, cutlass.max(seq_kv - 1, Int32(0))
        if const_expr(self.sequences.cached):
            k_stride, v_stride = self.steps(mK, mV, cutlass.max(row - left, Int32(0)))
            if const_expr(paged):
                gTable = mTable[batch, None]
        gMask = None
        if const_expr(mask.given):
            gMask = mMask[batch, head, None, None]

        # -- setup: shared memory and fragments
        layout_q, layout_kv = rows_q.smem_layout(dtype), rows_kv.smem_layout(dtype)
        q_elements, kv_elements = cute.cosize(layout_q), cute.cosize(layout_kv)
        storage = SmemAllocator().allocate_array(dtype, q_elements + 2 * kv_elements, byte_alignment=ALIGNMENT)
        at_k, at_v = storage + q_elements, storage + (q_elements + kv_elements)
        sQ = cute.make_tensor(cute.recast_ptr(storage, layout_q.inner, dtype), layout_q.outer)[None, None, 0]

        # -- prologue: Q and the last block, where rows may be missing
        clear_q, clear_kv, fetch_q, fetch_kv = rows_q.clear_padding, rows_kv.clear_padding, rows_q.fetch, rows_kv.fetch
        into_q, into_kv = rows_q.address, rows_kv.address
        stage_bytes = const_expr(tile_kv * padded * dtype.width // 8)
        to_q, to_k = into_q(tid, storage), into_kv(tid, at_k)
        to_v = to_k + stages * stage_bytes
        clear_q(tid, dtype, to_q)
        for stage in cutlass.range_constexpr(stages):
            clear_kv(tid, dtype, to_k + stage * stage_bytes)
        fetch_q(tid, q_head, q_stride, row, to_q, alive)
        column = (end - 1) * tile_kv
        if const_expr(paged):
            look_up = rows_kv.look_up
            look_up(tid, k_stride, gTable, column, last)
        if end > first:
            fetch_kv(tid, k_head, k_stride, column, to_k, seq_kv - column)
        cute.arch.cp_async_commit_group()
        if end > first:
            fetch_kv(tid, v_head, v_stride, column, to_v, seq_kv - column)
        cute.arch.cp_async_commit_group()
        if const_expr(paged):
            look_up(tid, k_stride, gTable, column - tile_kv, last)
        thr_mma = tiled_mma.get_slice(tid)
        acc_o = cute.make_rmem_tensor(tiled_mma.partition_shape_C((tile_q, padded)), Float32)  # ((2, 2), MMA_M, MMA_D)
        own_rows = const_expr(acc_o.shape[0][1] * acc_o.shape[1])
        reference, total = cute.make_rmem_tensor(own_rows, Float32), cute.make_rmem_tensor(own_rows, Float32)
        acc_o.fill(0.0)
        start, start_with = softmax.start, softmax.start_with
        start(reference, total)
        if const_expr(mSinks is not None):
            for r in cutlass.range_constexpr(own_rows):
                start_with(r, mSinks[head].to(Float32), reference, total)
        cute.arch.cp_async_wait_group(1 if stages == 1 else 0)
        cute.arch.sync_threads()
        rQ = thr_mma.make_fragment_A(thr_mma.partition_A(sQ))  # (MMA, MMA_M, MMA_D)
        products = self.products
        sources = products.sources(tid, tiled_mma, storage, layout_q, at_k, at_v, layout_kv)
        if const_expr(products.x_in_registers):
            load = products.load
            load(tid, (rQ,), sources.x, 0)

        # -- blocks of keys, from the last: those with the right edge, whole ones, those with the left edge
        attend = self.attend
        slot = Int32(0)
        keys = (k_head, k_stride, v_head, v_stride, to_k, first, gTable, last)
        tensors = (rQ, acc_o, reference, total)
        factors = (scale, cap_inner, cap_outer)
        edges = (row, seq_q, seq_kv, left, right, gMask)
        for i in cutlass.range(end - closed, unroll=1):
            slot = attend(tid, end - 1 - i, slot, True, keys, sources, tensors, factors, edges, tiled_mma)
        if const_expr(not mask.given):
            for i in cutlass.range(closed - open_, unroll=1):
                slot = attend(tid, closed - 1 - i, slot, False, keys, sources, tensors, factors, edges, tiled_mma)
            if const_expr(mask.limited_left):
                for i in cutlass.range(open_ - first, unroll=1):
                    slot = attend(tid, open_ - 1 - i, slot, True, keys, sources, tensors, factors, edges, tiled_mma)

        # -- epilogue: out through the queries' shared memory, 16 bytes a thread
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        finish = softmax.finish
        finish(acc_o, reference, total)
        rO = cute.make_fragment_like(acc_o, dtype)
        rO.store(acc_o.load().to(dtype))
        cute.autovec_copy(rO, thr_mma.partition_C(sQ))
        cute.arch.sync_threads()
        o_head, o_stride, _ = pointer(mO, batch, begin_q, head)
        store = rows_q.store
        store(tid, o_head, o_stride, row, to_q, alive)
        if const_expr(mLse is not None):
            lse_at = Int64(layer) * seq_q + row
            if const_expr(self.sequences.packed):
                lse_at = Int64(head) * mQ.shape[0] + (begin_q + row)
            places = by_rows(thr_mma.partition_C(cute.make_identity_tensor((tile_q, padded))))
            if places[0, 0][1] == 0:
                for r in cutlass.range_constexpr(cute.size(reference)):
                    own = places[r, 0][0]
                    if own < alive:
                        mLse[lse_at + own] = reference[r]

    @cute.jit
    def attend(
        self, tid: Int32, block: Int32, slot: Int32, masked: cutlass.Constexpr,
        keys: tuple, sources: cutlass.Constexpr, tensors: tuple[cute.Tensor, ...],
        factors: tuple[Float32, Float32, Float32],
        edges: tuple[Int32, Int32, Int32, Int32, Int32, cute.Tensor | None], tiled_mma: cute.TiledMma,
    ) -> Int32:  # fmt: skip
        """One block of keys, whose K is in ``slot``; its V is there too, or being copied (one stage).

        Returns the slot of ``block - 1``, if there is one, in the same state.
        """
        k_head, k_stride, v_head, v_stride, to_k, first, gTable, last = keys
        rQ, acc_o, reference, total = tensors
        scale, cap_inner, cap_outer = factors
        row, *seen = edges
        rows_kv, mask, softmax = self.rows_kv, self.mask, self.softmax
        multiply, add = self.products.multiply, self.products.add
        tile_q, tile_kv = self.rows_q.rows, rows_kv.rows
        dtype = rQ.element_type
        one = const_expr(rows_kv.stages == 1)
        fetch = rows_kv.fetch
        paged = const_expr(bool(self.sequences.page_size))
        ahead = (block - 1) * tile_kv
        stage_bytes = const_expr(tile_kv * rows_kv.padded * dtype.width // 8)
        to_v = to_k + rows_kv.stages * stage_bytes
        nxt = slot
        if const_expr(not one):
            nxt = 1 - slot
            if block > first:
                fetch(tid, k_head, k_stride, ahead, to_k + nxt * stage_bytes, None)
                fetch(tid, v_head, v_stride, ahead, to_v + nxt * stage_bytes, None)
                if const_expr(paged):
                    look_up = rows_kv.look_up
                    look_up(tid, k_stride, gTable, ahead - tile_kv, last)
            cute.arch.cp_async_commit_group()

        # -- scores; ptxas itself loads fragments ahead of the products, as far as registers allow
        acc_s = cute.make_rmem_tensor(
            tiled_mma.partition_shape_C((tile_q, tile_kv)), Float32
        )  # ((2, 2), MMA_M, MMA_KV)
        acc_s.fill(0.0)
        multiply(tid, acc_s, rQ, sources, Int32(0), slot * stage_bytes, tiled_mma)

        if const_expr(one):
            cute.arch.cp_async_wait_group(0)  # V has arrived,
            cute.arch.sync_threads()  # and every warp has read K
            if block > first:
                fetch(tid, k_head, k_stride, ahead, to_k, None)
            cute.arch.cp_async_commit_group()

        # -- softmax
        step = softmax.step
        if const_expr(softmax.capped):
            cap = softmax.cap
            cap(acc_s, cap_inner, cap_outer)
        if const_expr(masked):
            hide = mask.apply
            hide(tid, acc_s, row, block * tile_kv, seen, tiled_mma)
        step(acc_s, acc_o, reference, total, scale)
        rP = cute.make_fragment_like(acc_s, dtype)
        rP.store(acc_s.load().to(dtype))
        add(tid, acc_o, rP, sources, slot * stage_bytes, tiled_mma)

        cute.arch.cp_async_wait_group(0)  # the next block's operands have arrived,
        cute.arch.sync_threads()  # and every warp has read this one
        if const_expr(one):
            if block > first:
                fetch(tid, v_head, v_stride, ahead, to_v, None)
                if const_expr(paged):
                    look_up = rows_kv.look_up
                    look_up(tid, k_stride, gTable, ahead - tile_kv, last)
            cute.arch.cp_async_commit_group()
        return nxt

    @cute.jit
    def steps(self, mK: cute.Tensor, mV: cute.Tensor, least: Int32) -> tuple[tuple, tuple]:
        """The way from row to row of K's cache and of V's (``parts/cache.py``), which share their pages."""
        rows_kv = self.rows_kv
        pages = cute.make_rmem_tensor(rows_kv.rows // rows_kv.apart, Int32)
        ways = [(Int64(mX.layout.stride[0]), Int64(mX.layout.stride[1]), pages, mX.shape[0], least) for mX in (mK, mV)]
        return ways[0], ways[1]
