"""Attention, decode schedule: few queries against a long cache, ``out = softmax(scale * q K^T) V``, on any GPU.

Reading K and V bounds decode, so the schedule keeps many of their bytes in flight.

Schedule:
    The rows of a tile of 16 are the query heads that share a head of K and V, by all queries of the sequence: one m16
    tile serves a group of 16 and one query, or a group of 4 and four. ``splits`` CTAs share a tile's keys.
    Each warp has ``rows`` keys of each block of ``warps * rows``, a ring of ``stages`` buffers of its own and its own
    sums, so that no barrier of the CTA is in the loop: a warp waits for its own cp.async copies alone. Warps' sums are
    added up once, in shared memory. With several splits, each CTA stores its sums in a workspace, and the last to
    arrive (an atomic ticket) adds all of them in their order, so the result is the same whichever CTA was last. Two to
    eight splits may be a cluster instead: each CTA owns some columns, and adds up what all CTAs send it of these
    (``parts/cluster_rows.py``).
    Lengths are read on the device. The grid follows from the longest sequence the cache has room for; a sequence with
    fewer blocks than splits uses as many as it has: CTAs beyond return at once, or in a cluster only receive. So a
    captured graph serves all lengths, which must not change while a launch runs: CTAs would count each other wrongly.
    Keys outside a sequence are never read (``parts/cache.py``), and their scores are masked.

Source:
    FlashDecoding (Dao and others 2023) splits keys among CTAs; rows packed from a group of heads are FlashAttention's
    ``pack_gqa``. Different here: warps have rings of their own, and no second kernel combines the splits.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.attention_smem import DecodeSmem
from cutekernels.kernels.cute.parts.cache import GRAIN, CacheRows
from cutekernels.kernels.cute.parts.cluster_rows import ClusterRows
from cutekernels.kernels.cute.parts.fragments import span_bytes, swizzled
from cutekernels.kernels.cute.parts.heads import WIDEST, shared_vector, vector
from cutekernels.kernels.cute.parts.products import Products
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.softmax import LN_2, NO_REFERENCE, OnlineSoftmax, by_rows, quad_sum

TILE_Q = DecodeSmem.ROWS
AT_ONCE = 16  # groups of 8 columns that are read from the workspace together


@dataclass(frozen=True)
class DecodeAttention:
    """The body. ``ops/attention/decode.py`` chooses the parts; ``limited``: by a window on the left side."""

    rows_kv: CacheRows
    products: Products
    softmax: OnlineSoftmax
    warps: int
    splits: int
    limited: bool
    ctas_per_sm: int
    dependent: bool  # launched under programmatic dependent launch
    clustered: bool = False  # the splits of a tile are a cluster

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile_kv(self) -> int:
        """Keys of a block, all warps together."""
        return self.warps * self.rows_kv.rows

    @property
    def eighths(self) -> int:
        """Groups of 8 columns in an accumulator."""
        return self.rows_kv.padded // 8

    @property
    def share(self) -> int:
        """Groups that a warp adds up over all warps."""
        return -(-self.eighths // self.warps)

    @property
    def smem(self) -> DecodeSmem:
        meeting = self.splits if self.clustered else 0
        return DecodeSmem(self.tile_kv, self.rows_kv.head_dim, self.rows_kv.stages, self.warps, meeting)

    @property
    def meeting(self) -> ClusterRows:
        return ClusterRows(self.smem, self.eighths)

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,  # (B, SQ, HQ, D)
        mLse: cute.Tensor | None,  # (B * HQ * SQ,), as (B, HQ, SQ)
        mQ: cute.Tensor,  # as mO
        mK: cute.Tensor,  # (B, T_MAX, HKV, D), or (PAGES, PAGE_SIZE, HKV, D)
        mV: cute.Tensor,  # as mK
        mLengths: cute.Tensor,  # (B,)
        mTable: cute.Tensor | None,  # (B, MAX_PAGES)
        mSinks: cute.Tensor | None,  # (HQ,)
        scale: Float32,  # factor of scores, to base 2
        cap_inner: Float32,
        cap_outer: Float32,
        left: Int32,  # keys seen before a query's own, where limited
        mPartials: cute.Tensor | None,  # (B * HKV * tiles * splits * 16 * (padded + 2),)
        mTickets: cute.Tensor | None,  # (B * HKV * tiles,), zero before and after
        stream: cuda.CUstream,
    ):
        group = mQ.shape[2] // mK.shape[2]
        tiles = cute.ceil_div(mQ.shape[1] * group, TILE_Q)
        self.kernel(
            mO, mLse, mQ, mK, mV, mLengths, mTable, mSinks, scale, cap_inner, cap_outer, left, mPartials, mTickets,
            group, tiles, self.products.tiled_mma(mQ.element_type),
        ).launch(
            grid=[tiles * mK.shape[2] * self.splits * mQ.shape[0], 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.splits, 1, 1] if const_expr(self.clustered) else None,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
            use_pdl=self.dependent,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, mO: cute.Tensor, mLse: cute.Tensor | None, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor,
        mLengths: cute.Tensor, mTable: cute.Tensor | None, mSinks: cute.Tensor | None, scale: Float32,
        cap_inner: Float32, cap_outer: Float32, left: Int32, mPartials: cute.Tensor | None,
        mTickets: cute.Tensor | None, group: Int32, tiles: Int32, tiled_mma: cute.TiledMma,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=ALIGNMENT)
        meeting = self.meeting
        full = None
        if const_expr(self.clustered):
            init = meeting.init
            full = init(warp, storage)
        if const_expr(self.dependent):  # before any read: lengths, caches and tickets may be the last kernel's
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        block, _, _ = cute.arch.block_idx()
        heads_kv = mK.shape[2]
        # Neighbours share keys, then lines of memory: tiles of a head, heads of a token, splits, sequences.
        first_split, rest = Int32(0), block
        if const_expr(self.clustered):
            first_split, rest = block % self.splits, block // self.splits
        tile, rest = rest % tiles, rest // tiles
        head, rest = rest % heads_kv, rest // heads_kv
        split, batch = first_split, rest
        if const_expr(not self.clustered):
            split, batch = rest % self.splits, rest // self.splits
        seq_q = mQ.shape[1]
        room = mK.shape[1]
        if const_expr(self.rows_kv.paged):
            room = mTable.shape[1] * self.rows_kv.page_size
        # A length beyond the cache counts as all of it.
        end = cutlass.min(cutlass.max(mLengths[batch], Int32(0)), room)
        first = Int32(0)
        if const_expr(self.limited):
            first = cutlass.max(end - seq_q - left, Int32(0))
        begin = first // GRAIN * GRAIN
        blocks = (end - begin + self.tile_kv - 1) // self.tile_kv
        active = cutlass.max(cutlass.min(blocks, Int32(self.splits)), Int32(1))
        if const_expr(self.clustered):
            expect = meeting.expect
            expect(tid, split, active, full)
        if split < active:
            work = self.work
            work(
                mO, mLse, mQ, mK, mV, mTable, mSinks, (scale, cap_inner, cap_outer), left, mPartials, mTickets,
                (group, tiles, tile, head, split, batch), (first, begin, end, blocks, active), tiled_mma, storage, full,
            )  # fmt: skip
        if const_expr(self.clustered):
            collect, store = meeting.collect, self.store
            lane = tid % 32
            sums, reference, total = collect(warp, lane, active, storage, full)
            alive = cutlass.min(seq_q * group - tile * TILE_Q, Int32(TILE_Q))
            groups = (warp * self.splits + split, const_expr(self.warps * self.splits), split == 0 and warp == 0)
            store(lane, mO, mLse, sums, reference, total, (batch, head, tile, group, alive), groups)

    @cute.jit
    def work(
        self, mO: cute.Tensor, mLse: cute.Tensor | None, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor,
        mTable: cute.Tensor | None, mSinks: cute.Tensor | None, factors: tuple[Float32, Float32, Float32], left: Int32,
        mPartials: cute.Tensor | None, mTickets: cute.Tensor | None,
        place: tuple[Int32, Int32, Int32, Int32, Int32, Int32], keys: tuple[Int32, Int32, Int32, Int32, Int32],
        tiled_mma: cute.TiledMma, storage: cute.Pointer, full: cute.Pointer | None,
    ):  # fmt: skip
        """One CTA's blocks of keys, and its sums combined with other splits', or sent to the cluster."""
        group, tiles, tile, head, split, batch = place
        first, begin, end, blocks, active = keys
        scale, cap_inner, cap_outer = factors
        rows_kv, softmax = self.rows_kv, self.softmax
        padded, rows, stages = rows_kv.padded, rows_kv.rows, const_expr(rows_kv.stages)
        dtype = mQ.element_type
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        seq_q = mQ.shape[1]
        alive = cutlass.min(seq_q * group - tile * TILE_Q, Int32(TILE_Q))  # rows of the tile that exist
        at, stop = split * blocks // active, (split + 1) * blocks // active
        last = cutlass.max(end - 1, Int32(0))

        # -- setup: shared memory, Q's and this warp's
        smem = self.smem
        stage_bytes = const_expr(rows * padded * dtype.width // 8)  # one warp's
        layout_kv = rows_kv.smem_layout(dtype)
        of_warp = smem.q_bytes + warp * (stages * stage_bytes)
        at_q = cute.recast_ptr(storage, dtype=dtype)
        at_k = cute.recast_ptr(storage + of_warp, dtype=dtype)
        at_v = cute.recast_ptr(storage + (of_warp + stages * smem.stage_bytes), dtype=dtype)
        into = rows_kv.address
        to_k, to_v = into(lane, at_k), into(lane, at_v)
        clear = rows_kv.clear_padding
        for stage in cutlass.range_constexpr(stages):
            clear(lane, dtype, to_k + stage * stage_bytes)  # V's padding only reaches columns that are not stored

        # -- prologue: Q, and all stages but one
        fetch_q = self.fetch_q
        fetch_q(tid, mQ, at_q, (batch, head, tile, group, alive))
        cute.arch.cp_async_commit_group()
        page_of_k, page_of_v = Int64(batch), Int64(batch)
        if const_expr(rows_kv.paged):
            page_of_k, page_of_v = Int64(0), Int64(0)
        stride_k, stride_v = mK.layout.stride, mV.layout.stride
        k_head = mK.iterator + (page_of_k * Int64(stride_k[0]) + Int64(head) * Int64(stride_k[2]))
        v_head = mV.iterator + (page_of_v * Int64(stride_v[0]) + Int64(head) * Int64(stride_v[2]))
        k_strides, v_strides = (Int64(stride_k[0]), Int64(stride_k[1])), (Int64(stride_v[0]), Int64(stride_v[1]))
        gTable = None
        if const_expr(rows_kv.paged):
            gTable = mTable[batch, None]
        look_up, confine, fetch = rows_kv.look_up, rows_kv.confine, rows_kv.fetch
        own = begin + warp * rows  # this warp's keys of block 0
        pages = [cute.make_rmem_tensor(rows_kv.grains, Int32) for _ in range(stages)]
        for stage in cutlass.range_constexpr(stages):
            look_up(pages[stage], gTable, own + (at + stage) * self.tile_kv, last)
        for stage in cutlass.range_constexpr(stages - 1):
            if at + stage < stop:
                token = own + (at + stage) * self.tile_kv
                confine(pages[stage], mK.shape[0])
                fetch(lane, k_head, k_strides, pages[stage], token, first, last, to_k + stage * stage_bytes)
                fetch(lane, v_head, v_strides, pages[stage], token, first, last, to_v + stage * stage_bytes)
            cute.arch.cp_async_commit_group()
        ahead = pages[stages - 1]  # pages of the block that is fetched next

        # -- fragments
        thr_mma = tiled_mma.get_slice(lane)
        acc_o = cute.make_rmem_tensor(tiled_mma.partition_shape_C((TILE_Q, padded)), Float32)  # ((2, 2), 1, MMA_D)
        reference, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        acc_o.fill(0.0)
        start, start_with = softmax.start, softmax.start_with
        start(reference, total)
        if const_expr(mSinks is not None):
            for r in cutlass.range_constexpr(2):
                row = tile * TILE_Q + cutlass.min(lane // 4 + 8 * r, alive - 1)
                if split == 0 and warp == 0:  # once among all whose sums are added up
                    start_with(r, mSinks[head * group + row % group].to(Float32), reference, total)
        layout_q = CacheRows(TILE_Q, rows_kv.head_dim, padded, 1, 0).smem_layout(dtype)
        products = self.products
        sources = products.sources(lane, tiled_mma, at_q, layout_q, at_k, at_v, layout_kv)
        rQ = thr_mma.make_fragment_A(thr_mma.partition_A(sources.x.tensor))  # (MMA, 1, MMA_D)
        cute.arch.cp_async_wait_group(stages - 1)
        cute.arch.sync_threads()
        if const_expr(products.x_in_registers):
            load = products.load
            load(lane, (rQ,), sources.x, 0)

        # -- keys that this lane's two rows see, and the range that every row sees
        places = by_rows(thr_mma.partition_C(cute.make_identity_tensor((TILE_Q, rows))))
        constant = by_rows(tiled_mma.get_slice(0).partition_C(cute.make_identity_tensor((TILE_Q, rows))))
        sees_from, sees_to = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Int32)
        for r in cutlass.range_constexpr(2):
            query = (tile * TILE_Q + places[r, 0][0]) // group
            sees_to[r] = cutlass.min(end - seq_q + query + 1, end)
            sees_from[r] = Int32(0)
            if const_expr(self.limited):
                sees_from[r] = end - seq_q + query - left
        whole_from, whole_to = Int32(0), end - seq_q + 1
        if const_expr(self.limited):
            whole_from = end - 1 - left

        # -- this warp's keys, block by block
        multiply, add = products.multiply, products.add
        slot, free = Int32(0), Int32(stages - 1)
        for i in cutlass.range(at, stop, unroll=1):
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.sync_warp()  # all lanes' copies have arrived, and all lanes have read the block before
            token = own + i * self.tile_kv
            if i + (stages - 1) < stop:
                late = token + (stages - 1) * self.tile_kv
                confine(ahead, mK.shape[0])
                fetch(lane, k_head, k_strides, ahead, late, first, last, to_k + free * stage_bytes)
                fetch(lane, v_head, v_strides, ahead, late, first, last, to_v + free * stage_bytes)
                look_up(ahead, gTable, late + self.tile_kv, last)
            cute.arch.cp_async_commit_group()

            acc_s = cute.make_rmem_tensor(tiled_mma.partition_shape_C((TILE_Q, rows)), Float32)  # ((2, 2), 1, MMA_KV)
            acc_s.fill(0.0)
            multiply(lane, acc_s, rQ, sources, Int32(0), slot * stage_bytes, tiled_mma)
            if const_expr(softmax.capped):
                cap = softmax.cap
                cap(acc_s, cap_inner, cap_outer)
            if token < whole_from or token + rows > whole_to:
                scores = by_rows(acc_s)
                for r in cutlass.range_constexpr(2):
                    edge = token + places[r, 0][1]
                    for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                        key = edge + const_expr(constant[0, c][1])
                        hidden = key >= sees_to[r]
                        if const_expr(self.limited):
                            hidden = hidden or key < sees_from[r]
                        scores[r, c] = -Float32.inf if hidden else scores[r, c]
            step = softmax.step
            step(acc_s, acc_o, reference, total, scale)
            rP = cute.make_fragment_like(acc_s, dtype)
            rP.store(acc_s.load().to(dtype))
            add(lane, acc_o, rP, sources, slot * stage_bytes, tiled_mma)
            slot = slot + 1
            if slot == stages:
                slot = Int32(0)
            free = free + 1
            if free == stages:
                free = Int32(0)
        cute.arch.cp_async_wait_group(0)

        # -- the warps' sums are added up, then the splits'
        for r in cutlass.range_constexpr(2):
            total[r] = quad_sum(total[r])
        sums = cute.make_rmem_tensor((2, 2, self.share), Float32)  # a pair of columns, two rows, own groups
        meet, store = self.meet, self.store
        meet(warp, lane, acc_o, reference, total, sums, storage + smem.q_bytes)
        rows_of = (batch, head, tile, group, alive)
        groups = (warp, self.warps, warp == 0)
        if const_expr(self.clustered):
            send = self.meeting.send
            send(warp, lane, split, sums, reference, total, storage, full)
        elif const_expr(self.splits == 1):
            store(lane, mO, mLse, sums, reference, total, rows_of, groups)
        else:
            if active == 1:
                store(lane, mO, mLse, sums, reference, total, rows_of, groups)
            else:
                number = (batch * mK.shape[2] + head) * tiles + tile
                left_at = mPartials.iterator + Int64(number) * (self.splits * TILE_Q * (padded + 2))
                leave, gather = self.leave, self.gather
                leave(warp, lane, sums, reference, total, left_at, split, alive)
                flag = cute.make_tensor(cute.recast_ptr(storage + smem.flag_at, dtype=Int32), cute.make_layout(1))
                cute.arch.fence_acq_rel_gpu()
                cute.arch.sync_threads()
                if tid == 0:
                    flag[0] = cute.arch.atomic_add(mTickets.iterator + number, Int32(1), sem="acq_rel", scope="gpu")
                cute.arch.sync_threads()
                if flag[0] == active - 1:
                    cute.arch.fence_acq_rel_gpu()
                    gather(warp, lane, acc_o, reference, total, left_at, active, alive)
                    meet(warp, lane, acc_o, reference, total, sums, storage + smem.q_bytes)
                    store(lane, mO, mLse, sums, reference, total, rows_of, groups)
                    if tid == 0:
                        mTickets[number] = Int32(0)

    @cute.jit
    def fetch_q(self, tid: Int32, mQ: cute.Tensor, at_q: cute.Pointer, rows_of: tuple[Int32, ...]):
        """Starts the copy of the tile of queries; rows and columns that do not exist become zeros."""
        batch, head, tile, group, alive = rows_of
        padded, head_dim = self.rows_kv.padded, self.rows_kv.head_dim
        span = const_expr(span_bytes(padded))
        along = const_expr(span // 16)
        across = const_expr(self.threads // along)
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), mQ.element_type, num_bits_per_copy=128
        )
        own, column = tid // along, tid % along * WIDEST
        address = swizzled(at_q.toint().to(Int32) + tid * 16, span)
        element = self.element
        for i in cutlass.range_constexpr(0, TILE_Q, across):
            row = own + i
            if row < TILE_Q:
                source = element(mQ, batch, head, tile * TILE_Q + cutlass.min(row, alive - 1), group) + column
                for j in cutlass.range_constexpr(0, padded, along * WIDEST):
                    sX = shared_vector(mQ.element_type, address + (j // (along * WIDEST) * TILE_Q + i) * span)
                    if row < alive and column + j < head_dim:
                        cute.copy(atom, vector(source + j), sX)
                    else:
                        sX.fill(0.0)

    @cute.jit
    def element(self, mX: cute.Tensor, batch: Int32, head: Int32, row: Int32, group: Int32) -> cute.Pointer:
        """The begin of row ``row`` of a head of K and V in (B, SQ, HQ, D): query ``row // group``, head by head."""
        stride = mX.layout.stride
        query = row // group
        at = head * group + row - query * group
        return mX.iterator + (
            Int64(batch) * Int64(stride[0]) + Int64(query) * Int64(stride[1]) + Int64(at) * Int64(stride[2])
        )

    @cute.jit
    def meet(
        self, warp: Int32, lane: Int32, acc_o: cute.Tensor, reference: cute.Tensor, total: cute.Tensor,
        sums: cute.Tensor, storage: cute.Pointer,
    ):  # fmt: skip
        """Adds up the warps' ``acc_o`` into ``sums``, each warp its own groups; all get references and totals.

        The layout of accumulators is [warp][group][row half][lane][column], so that lanes are neighbours in memory.
        """
        each = const_expr(128 * self.eighths)
        base = cute.recast_ptr(storage, dtype=Float32)
        sO = cute.make_tensor(
            base, cute.make_layout((2, 2, self.eighths, 32, self.warps), stride=(1, 64, 128, 2, each))
        )
        sR = cute.make_tensor(
            base + self.warps * each, cute.make_layout((TILE_Q, 2, self.warps), stride=(1, TILE_Q, 2 * TILE_Q))
        )
        cute.arch.sync_threads()
        for n in cutlass.range_constexpr(self.eighths):
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    sO[c, r, n, lane, warp] = acc_o[(c, r), 0, n]
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                sR[lane // 4 + 8 * r, 0, warp] = reference[r]
                sR[lane // 4 + 8 * r, 1, warp] = total[r]
        cute.arch.sync_threads()
        weight = cute.make_rmem_tensor((2, self.warps), Float32)
        for r in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * r
            most, whole = Float32(NO_REFERENCE), Float32(0.0)
            for w in cutlass.range_constexpr(self.warps):
                most = cute.arch.fmax(most, sR[row, 0, w])
            for w in cutlass.range_constexpr(self.warps):
                weight[r, w] = cute.math.exp2(sR[row, 0, w] - most, fastmath=True)
                whole = whole + weight[r, w] * sR[row, 1, w]
            reference[r], total[r] = most, whole
        sums.fill(0.0)
        for k in cutlass.range_constexpr(self.share):
            n = k * self.warps + warp
            if n < self.eighths:
                for w in cutlass.range_constexpr(self.warps):
                    for r in cutlass.range_constexpr(2):
                        for c in cutlass.range_constexpr(2):
                            sums[c, r, k] = sums[c, r, k] + weight[r, w] * sO[c, r, n, lane, w]

    @cute.jit
    def partial(self, left_at: cute.Pointer, split: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """A split's place in the workspace: sums ``(2, 2, group, lane)`` as in ``meet``, ``(row, statistic)``."""
        base = (left_at + split * (TILE_Q * (self.rows_kv.padded + 2))).align(16)
        sums = cute.make_tensor(base, cute.make_layout((2, 2, self.eighths, 32), stride=(1, 64, 128, 2)))
        return sums, cute.make_tensor(base + 128 * self.eighths, cute.make_layout((TILE_Q, 2)))

    @cute.jit
    def leave(
        self, warp: Int32, lane: Int32, sums: cute.Tensor, reference: cute.Tensor, total: cute.Tensor,
        left_at: cute.Pointer, split: Int32, alive: Int32,
    ):  # fmt: skip
        """Stores this split's sums of rows that exist in the workspace."""
        partial = self.partial
        gO, gR = partial(left_at, split)
        for r in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * r
            if row < alive:
                for k in cutlass.range_constexpr(self.share):
                    n = k * self.warps + warp
                    if n < self.eighths:
                        cute.autovec_copy(sums[None, r, k], gO[None, r, n, lane])
                if warp == 0 and lane % 4 == 0:
                    gR[row, 0] = reference[r]
                    gR[row, 1] = total[r]

    @cute.jit
    def gather(
        self, warp: Int32, lane: Int32, acc_o: cute.Tensor, reference: cute.Tensor, total: cute.Tensor,
        left_at: cute.Pointer, active: Int32, alive: Int32,
    ):  # fmt: skip
        """Adds up the sums of splits ``warp, warp + warps, ...``, as if they had been this warp's blocks.

        Columns shared out among warps were slower: docs/notes/attention.md#decode-gather (H200, 2026-11-22).
        """
        partial, start = self.partial, self.softmax.start
        acc_o.fill(0.0)
        start(reference, total)
        for split in cutlass.range(warp, active, self.warps, unroll=1):
            gO, gR = partial(left_at, split)
            for r in cutlass.range_constexpr(2):
                row = lane // 4 + 8 * r
                shrink, grow = Float32(1.0), Float32(0.0)
                if row < alive:
                    raised = cute.arch.fmax(reference[r], gR[row, 0])
                    shrink = cute.math.exp2(reference[r] - raised, fastmath=True)
                    grow = cute.math.exp2(gR[row, 0] - raised, fastmath=True)
                    reference[r] = raised
                    total[r] = total[r] * shrink + gR[row, 1] * grow
                for some in cutlass.range_constexpr(0, self.eighths, AT_ONCE):
                    if row < alive:
                        for n in cutlass.range_constexpr(some, min(some + AT_ONCE, self.eighths)):
                            pair = cute.make_rmem_tensor(2, Float32)
                            cute.autovec_copy(gO[None, r, n, lane], pair)
                            for c in cutlass.range_constexpr(2):
                                acc_o[(c, r), 0, n] = acc_o[(c, r), 0, n] * shrink + pair[c] * grow
                    if const_expr(self.eighths > AT_ONCE):
                        cute.arch.sync_warp()  # else all loads are hoisted together, and spill

    @cute.jit
    def store(
        self, lane: Int32, mO: cute.Tensor, mLse: cute.Tensor | None, sums: cute.Tensor, reference: cute.Tensor,
        total: cute.Tensor, rows_of: tuple[Int32, ...], groups: tuple,
    ):  # fmt: skip
        """Divides by the totals, rounds and stores; a row that sees nothing has 0, and -inf as lse.

        ``groups``: the first group of 8 columns in ``sums``, the step to the next, and whether this warp stores lse.
        """
        batch, head, tile, group, alive = rows_of
        own, step, leads = groups
        element = self.element
        for r in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * r
            if row < alive:
                at = tile * TILE_Q + row
                inverse, lse = Float32(0.0), -Float32.inf
                if total[r] != 0.0:
                    inverse = 1.0 / total[r]
                    lse = (reference[r] + cute.math.log2(total[r])) * LN_2
                target = element(mO, batch, head, at, group) + lane % 4 * 2
                for k in cutlass.range_constexpr(cute.size(sums, mode=[2])):
                    n = own + k * step
                    if n * 8 < self.rows_kv.head_dim:
                        pair = cute.make_rmem_tensor(2, mO.element_type)
                        for c in cutlass.range_constexpr(2):
                            pair[c] = (sums[c, r, k] * inverse).to(mO.element_type)
                        cute.autovec_copy(pair, cute.make_tensor((target + n * 8).align(4), cute.make_layout(2)))
                if const_expr(mLse is not None):
                    query = at // group
                    over = batch * mO.shape[2] + head * group + at - query * group
                    if leads and lane % 4 == 0:
                        mLse[Int64(over) * mO.shape[1] + query] = lse
