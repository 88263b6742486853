"""Attention, decode schedule: few queries against a long cache, ``out = softmax(scale * q K^T) V``, on any GPU.

Reading K and V bounds decode, so the schedule keeps many of their bytes in flight. The rows of a tile of 16 are the
query heads that share a head of K and V, by all queries of the sequence: one m16 tile serves a group of 16 and one
query, or a group of 4 and four. ``splits`` CTAs share a tile's keys.

Roles:
    All warps do the same, each for itself: warp w has ``rows`` keys of each block of ``warps * rows``, a ring of
    ``stages`` buffers of its own, and its own accumulators, references and totals for all 16 rows of the tile. So no
    barrier of the CTA is in the loop. Q alone is copied by all threads together.

Pipeline: no mbarriers. Each warp's ring has ``stages`` buffers of K and as many of V; one cp.async group of each lane
for each block (a group without copies where the walk is over).
One block, each warp:
    wait until all copies but the newest ``stages - 2`` blocks' have arrived (each lane for its own; the warp's barrier
    for the others'), start the copies of the block ``stages - 1`` ahead into the buffer read last, look up the pages of
    the one behind it; S = Q K^T, mask, softmax, O += P V.
    Blocks with a key that some row does not see are masked (a branch of the warp), the others are not.
One tile:
    1. Q and ``stages - 1`` blocks are copied ahead; the CTA waits for Q.
    2. Each warp walks the CTA's blocks from the first to the last.
    3. The warps' accumulators are added up in shared memory, in the place of the rings (``merge_warps``).
    4. The splits' accumulators are added up. With one split they are the result. With a cluster (two to eight splits)
       each CTA owns some columns, and adds up what all CTAs send it of these (``parts/decode_reduction.py``). Otherwise
       each CTA leaves its accumulators in a workspace and takes a ticket (an atomic), and the CTA with the last ticket
       adds up all of them, in their order: the same bits whichever CTA was last.

Lengths are read on the device. The grid follows from the longest sequence the cache has room for; a sequence with fewer
blocks than splits uses as many as it has: CTAs beyond return at once, or in a cluster only receive. So a captured graph
serves all lengths, which must not change while a launch runs: CTAs would count each other wrongly.
A cache in e4m3 lies in the rings as it comes; its fragments become fp16 in registers (``parts/float8.py``), and Q
becomes fp16 in shared memory ahead of the walk. Scores are then multiplied by a factor of their row. Where a head has
one scale, K's is part of ``scale`` and V's multiplies the results. Where each token and head has one, they come with
the keys (``parts/token_scales.py``): K's multiplies scores, and probabilities hold V's, whose logarithm is added to
scores. References are then of these sums, and totals are of probabilities without V's scale, relative to them.

Keys outside a sequence are never read (``parts/cache.py``), and their scores are masked. A row that sees no key gets 0,
and -inf as log-sum-exp (its sink's, where it has one).

Refuses (``ops/attention/decode.py``): clusters on GPUs without them; more registers or shared memory than
``ctas_per_sm`` CTAs have.

Source:
    FlashDecoding (Dao and others 2023) splits keys among CTAs; rows gathered from a group of heads are FlashAttention's
    ``pack_gqa``. Different here: warps have rings of their own, and no second kernel combines the splits.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.attention_smem import DecodeSmem
from cutekernels.kernels.cute.parts.cache import GRAIN, CacheHead, CacheRows, SeenKeys
from cutekernels.kernels.cute.parts.decode_reduction import DecodeReduction
from cutekernels.kernels.cute.parts.dependent import pdl_launch, pdl_wait
from cutekernels.kernels.cute.parts.float8 import Float8Queries
from cutekernels.kernels.cute.parts.fragments import span_bytes, swizzled
from cutekernels.kernels.cute.parts.heads import WIDEST, shared_vector, vector
from cutekernels.kernels.cute.parts.products import Products
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.softmax import LN_2, NO_REFERENCE, OnlineSoftmax, RowStates, by_rows, quad_sum
from cutekernels.kernels.cute.parts.tile_share import arrive_last
from cutekernels.kernels.cute.parts.token_scales import TokenScales

TILE_Q = DecodeSmem.ROWS
AT_ONCE = 16  # groups of 8 columns that are read from the workspace together


@dataclass(frozen=True)
class Launch:
    """The launch's arguments, which every function has; shapes stand at ``DecodeAttentionBody.__call__``."""

    mO: cute.Tensor
    mLse: cute.Tensor | None
    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mLengths: cute.Tensor
    mTable: cute.Tensor | None
    mSinks: cute.Tensor | None
    mKScale: cute.Tensor | None
    mVScale: cute.Tensor | None
    scale: Float32  # in the walk times K's scale, where a head has one
    cap_inner: Float32
    cap_outer: Float32
    left: Int32
    mPartials: cute.Tensor | None
    mTickets: cute.Tensor | None
    group: Int32  # query heads that share a head of K and V
    tiles: Int32  # of a head of K and V
    tiled_mma: cute.TiledMma
    v_scale: Float32 | None = None  # of e4m3, beside scales of tokens without them; known in the walk


@dataclass(frozen=True)
class Place:
    """A tile of one head of K and V."""

    batch: Int32
    head: Int32  # of K and V
    tile: Int32  # of the head
    group: Int32  # query heads that share the head


@dataclass(frozen=True)
class Rows:
    """A tile of 16 rows of one head of K and V: query by query, and of each query its group's heads."""

    batch: Int32
    head: Int32  # of K and V
    tile: Int32  # of the head
    group: Int32  # query heads that share the head
    valid: Int32  # rows that exist


@dataclass(frozen=True)
class KeyRange:
    """A sequence's keys, and which CTAs walk them."""

    first: Int32  # the first key that some query sees
    begin: Int32  # of block 0: a multiple of GRAIN, at most ``first``
    end: Int32  # the sequence's length
    blocks: Int32
    active: Int32  # splits that have a block
    split: Int32  # this CTA


@dataclass(frozen=True)
class StoredGroups:
    """Which groups of 8 columns a thread stores, ``own + k * step``, and whether its warp stores log-sum-exps."""

    own: Int32
    step: int
    leads: Boolean


@dataclass(frozen=True)
class DecodeAttentionBody:
    """The body; its header is the module's.

    ``ops/attention/decode.py`` chooses the parts; ``limited``: by a window on the left side.
    """

    rows_kv: CacheRows  # in 16-bit elements, of which e4m3 has two each
    head_dim: int
    padded: int
    products: Products
    softmax: OnlineSoftmax
    warps: int
    splits: int
    limited: bool
    ctas_per_sm: int
    dependent: bool  # launched under programmatic dependent launch
    clustered: bool = False  # the splits of a tile are a cluster
    queries: Float8Queries | None = None  # where the cache is e4m3
    token_scales: TokenScales | None = None  # and each token and head has a scale

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile_kv(self) -> int:
        """Keys of a block, all warps together."""
        return self.warps * self.rows_kv.rows

    @property
    def n8_groups(self) -> int:
        """Groups of 8 columns in an accumulator."""
        return self.padded // 8

    @property
    def share(self) -> int:
        """Groups that a warp adds up over all warps."""
        return -(-self.n8_groups // self.warps)

    @property
    def smem(self) -> DecodeSmem:
        clustered = self.splits if self.clustered else 0
        of_cache = 2 if self.queries is None else 1
        return DecodeSmem(
            self.tile_kv,
            self.padded,
            self.rows_kv.stages,
            self.warps,
            clustered,
            cache_bytes=of_cache,
            token_scales=self.token_scales is not None,
        )

    @property
    def reduction(self) -> DecodeReduction:
        return DecodeReduction(self.smem, self.n8_groups)

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,  # (B, SQ, HQ, D)
        mLse: cute.Tensor | None,  # (B * HQ * SQ,), as (B, HQ, SQ)
        mQ: cute.Tensor,  # as mO
        mK: cute.Tensor,  # (B, T_MAX, HKV, D), or (PAGES, PAGE_SIZE, HKV, D); e4m3 as 16-bit elements of two columns
        mV: cute.Tensor,  # as mK
        mLengths: cute.Tensor,  # (B,)
        mTable: cute.Tensor | None,  # (B, MAX_PAGES)
        mSinks: cute.Tensor | None,  # (HQ,)
        mKScale: cute.Tensor | None,  # (HKV,), of a cache in e4m3; or (PAGES or B, HKV, slots) of tokens' heads
        mVScale: cute.Tensor | None,  # as mKScale
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
            Launch(
                mO,
                mLse,
                mQ,
                mK,
                mV,
                mLengths,
                mTable,
                mSinks,
                mKScale,
                mVScale,
                scale,
                cap_inner,
                cap_outer,
                left,
                mPartials,
                mTickets,
                group,
                tiles,
                self.products.tiled_mma(self.operand_type(mQ)),
            )
        ).launch(
            grid=[tiles * mK.shape[2] * self.splits * mQ.shape[0], 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.splits, 1, 1] if const_expr(self.clustered) else None,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, launch: Launch):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=ALIGNMENT)
        full = None
        if const_expr(self.clustered):
            full = self.reduction.init(warp, storage)
        if const_expr(self.dependent):
            # PDL: the next kernel may set up behind this one; this one waits for the kernel before, ahead of any read:
            # lengths, caches and tickets may be that kernel's.
            pdl_launch()
            pdl_wait()

        # ---- this CTA's tile and share of its keys

        block, _, _ = cute.arch.block_idx()
        heads_kv = launch.mK.shape[2]
        # Neighbours share keys, then lines of memory: tiles of a head, heads of a token, splits, sequences.
        first_split, rest = Int32(0), block
        if const_expr(self.clustered):
            first_split, rest = block % self.splits, block // self.splits
        tile, rest = rest % launch.tiles, rest // launch.tiles
        head, rest = rest % heads_kv, rest // heads_kv
        split, batch = first_split, rest
        if const_expr(not self.clustered):
            split, batch = rest % self.splits, rest // self.splits
        seq_q = launch.mQ.shape[1]
        room = launch.mK.shape[1]
        if const_expr(self.rows_kv.paged):
            room = launch.mTable.shape[1] * self.rows_kv.page_size
        # A length beyond the cache counts as all of it.
        end = cutlass.min(cutlass.max(launch.mLengths[batch], Int32(0)), room)
        first = Int32(0)
        if const_expr(self.limited):
            first = cutlass.max(end - seq_q - launch.left, Int32(0))
        # Blocks begin where a grain of the cache does; a split without one returns, but the first, which has no keys.
        begin = first // GRAIN * GRAIN
        blocks = (end - begin + self.tile_kv - 1) // self.tile_kv
        active = cutlass.max(cutlass.min(blocks, Int32(self.splits)), Int32(1))
        if const_expr(self.clustered):
            # Waits until all CTAs of the cluster can receive.
            self.reduction.announce(tid, split, active, full)

        # ---- walk; without a cluster, results too

        if const_expr(self.queries is not None):
            # k's scale is part of the factor of scores, v's multiplies results; tokens' scales come with the keys.
            k_scale = v_scale = Float32(self.queries.float8.undone)
            if const_expr(self.token_scales is None):
                k_scale = launch.mKScale[head] * self.queries.float8.undone
                v_scale = launch.mVScale[head] * self.queries.float8.undone
            launch = replace(launch, v_scale=v_scale)
            if const_expr(self.softmax.capped):
                launch = replace(launch, cap_inner=launch.cap_inner * k_scale)
            else:
                launch = replace(launch, scale=launch.scale * k_scale)
        place = Place(batch, head, tile, launch.group)
        if split < active:
            keys = KeyRange(first, begin, end, blocks, active, split)
            self.walk(launch, place, keys, storage, full)

        # ---- a cluster's results: each CTA's own columns

        if const_expr(self.clustered):
            lane = tid % 32
            # Waits for the messages of all active CTAs.
            acc, states = self.reduction.collect(warp, lane, active, storage, full)
            rows_of = self.rows_of(launch, place)
            columns = StoredGroups(
                warp * self.splits + split, const_expr(self.warps * self.splits), split == 0 and warp == 0
            )
            self.store(lane, launch, acc, states, rows_of, columns)

    def operand_type(self, mQ: cute.Tensor) -> type[cutlass.Numeric]:
        """The type of the products' operands: q's, or fp16 beside e4m3, which is exact in it."""
        return mQ.element_type if self.queries is None else Float16

    def rows_of(self, launch: Launch, place: Place) -> Rows:
        """The rows of a tile; the last tile of a head may have fewer than 16 that exist."""
        valid = cutlass.min(launch.mQ.shape[1] * place.group - place.tile * TILE_Q, Int32(TILE_Q))
        return Rows(place.batch, place.head, place.tile, place.group, valid)

    @cute.jit
    def walk(
        self,
        launch: Launch,
        place: Place,
        keys: KeyRange,
        storage: cute.Pointer,
        full: cute.Pointer | None,
    ):
        """One CTA's blocks of keys; then its accumulators combined with other splits', or sent to the cluster."""
        mK, mV, tiled_mma = launch.mK, launch.mV, launch.tiled_mma
        tile, group, end = place.tile, place.group, keys.end
        dtype = self.operand_type(launch.mQ)
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        seq_q = launch.mQ.shape[1]
        rows_of = self.rows_of(launch, place)
        valid = rows_of.valid
        at, stop = keys.split * keys.blocks // keys.active, (keys.split + 1) * keys.blocks // keys.active
        seen = SeenKeys(keys.first, cutlass.max(end - 1, Int32(0)))

        # ---- setup: shared memory, Q's and this warp's

        stage_bytes = const_expr(self.rows_kv.rows * self.rows_kv.padded * dtype.width // 8)  # one warp's
        layout_kv = self.rows_kv.smem_layout(dtype)
        of_warp = self.smem.q_bytes + warp * (self.rows_kv.stages * stage_bytes)
        at_q = cute.recast_ptr(storage, dtype=dtype)
        at_k = cute.recast_ptr(storage + of_warp, dtype=dtype)
        at_v = cute.recast_ptr(storage + (of_warp + self.rows_kv.stages * self.smem.stage_bytes), dtype=dtype)
        to_k, to_v = self.rows_kv.address(lane, at_k), self.rows_kv.address(lane, at_v)
        # K's columns between head_dim and padded are zeros; V's only reach columns that are not stored.
        for stage in cutlass.range_constexpr(self.rows_kv.stages):
            self.rows_kv.clear_padding(lane, dtype, to_k + stage * stage_bytes)

        # ---- prologue: Q, and all stages but one

        # First group of copies: Q; then one for each block.
        self.fetch_q(tid, launch.mQ, at_q, rows_of)
        cute.arch.cp_async_commit_group()
        page_of_k, page_of_v = Int64(rows_of.batch), Int64(rows_of.batch)
        if const_expr(self.rows_kv.paged):
            page_of_k, page_of_v = Int64(0), Int64(0)
        stride_k, stride_v = mK.layout.stride, mV.layout.stride
        k_rows = mK.iterator + (page_of_k * Int64(stride_k[0]) + Int64(rows_of.head) * Int64(stride_k[2]))
        v_rows = mV.iterator + (page_of_v * Int64(stride_v[0]) + Int64(rows_of.head) * Int64(stride_v[2]))
        k = CacheHead(k_rows, Int64(stride_k[0]), Int64(stride_k[1]))
        v = CacheHead(v_rows, Int64(stride_v[0]), Int64(stride_v[1]))
        gTable = None
        if const_expr(self.rows_kv.paged):
            gTable = launch.mTable[rows_of.batch, None]
        scales, at_scales, numbers, score_scale = None, Int32(0), Int32(0), launch.scale
        if const_expr(self.token_scales is not None):
            # This warp's stages of scales, and its numbers.
            scales = self.token_scales.head(lane, launch.mKScale, launch.mVScale, rows_of.batch, rows_of.head)
            base, rows = storage.toint().to(Int32), const_expr(self.rows_kv.rows)
            at_scales = base + (self.smem.scales_at + warp * const_expr(2 * rows * self.rows_kv.stages))
            numbers = base + (self.smem.numbers_at + warp * const_expr(self.smem.NUMBERS_BYTES * rows))
            score_scale = launch.cap_inner if const_expr(self.softmax.capped) else launch.scale
        own = keys.begin + warp * self.rows_kv.rows  # this warp's keys of block 0
        pages = [cute.make_rmem_tensor(self.rows_kv.grains, Int32) for _ in range(self.rows_kv.stages)]
        # All pages are looked up before any is used, so that these loads wait together.
        for stage in cutlass.range_constexpr(self.rows_kv.stages):
            self.rows_kv.look_up(pages[stage], gTable, own + (at + stage) * self.tile_kv, seen.last)
        for stage in cutlass.range_constexpr(self.rows_kv.stages - 1):
            if at + stage < stop:
                token = own + (at + stage) * self.tile_kv
                self.rows_kv.confine(pages[stage], mK.shape[0])
                self.rows_kv.fetch(lane, k, pages[stage], token, seen, to_k + stage * stage_bytes)
                self.rows_kv.fetch(lane, v, pages[stage], token, seen, to_v + stage * stage_bytes)
                if const_expr(self.token_scales is not None):
                    to_scales = at_scales + stage * self.token_scales.stage_bytes
                    self.token_scales.fetch(lane, scales, pages[stage], token, seen.last, to_scales)
            cute.arch.cp_async_commit_group()
        ahead = pages[self.rows_kv.stages - 1]  # pages of the block that is fetched next

        # ---- fragments

        thr_mma = tiled_mma.get_slice(lane)
        acc_o = cute.make_rmem_tensor(tiled_mma.partition_shape_C((TILE_Q, self.padded)), Float32)  # ((2, 2), 1, MMA_D)
        states = RowStates(cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32))
        acc_o.fill(0.0)
        self.softmax.start(states)
        if const_expr(launch.mSinks is not None):
            for r in cutlass.range_constexpr(2):
                row = tile * TILE_Q + cutlass.min(lane // 4 + 8 * r, valid - 1)
                if keys.split == 0 and warp == 0:  # once among all warps and splits that are added up
                    self.softmax.start_with(r, launch.mSinks[rows_of.head * group + row % group].to(Float32), states)
        layout_q = CacheRows(TILE_Q, self.head_dim, self.padded, 1, 0).smem_layout(dtype)
        sources = self.products.sources(lane, tiled_mma, at_q, layout_q, at_k, at_v, layout_kv)
        rQ = thr_mma.make_fragment_A(thr_mma.partition_A(sources.x.tensor))  # (MMA, 1, MMA_D)
        # This thread's part of Q has arrived; the barrier waits for everybody's.
        cute.arch.cp_async_wait_group(self.rows_kv.stages - 1)
        cute.arch.sync_threads()
        factors = None
        if const_expr(self.queries is not None):
            # All threads turn Q into fp16; the barrier waits for everybody's rows and their factors.
            self.queries.convert(tid, at_q, storage + self.smem.factors_at, launch.mQ.element_type)
            cute.arch.sync_threads()
            factors = self.queries.factors(lane, storage + self.smem.factors_at, launch.mQ.element_type)
        if const_expr(self.products.x_in_registers):
            self.products.load(lane, (rQ,), sources.x, 0)

        # ---- keys that this lane's two rows see, and the range that every row sees

        places = by_rows(
            thr_mma.partition_C(cute.make_identity_tensor((TILE_Q, self.rows_kv.rows)))
        )  # ((2, 1), (2, MMA_KV))
        constant = by_rows(tiled_mma.get_slice(0).partition_C(cute.make_identity_tensor((TILE_Q, self.rows_kv.rows))))
        sees_from, sees_to = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Int32)
        for r in cutlass.range_constexpr(2):
            query = (tile * TILE_Q + places[r, 0][0]) // group
            sees_to[r] = cutlass.min(end - seq_q + query + 1, end)
            sees_from[r] = Int32(0)
            if const_expr(self.limited):
                sees_from[r] = end - seq_q + query - launch.left
        whole_from, whole_to = Int32(0), end - seq_q + 1
        if const_expr(self.limited):
            whole_from = end - 1 - launch.left

        # ---- this warp's keys, block by block

        slot, free = Int32(0), Int32(self.rows_kv.stages - 1)
        for i in cutlass.range(at, stop, unroll=1):
            # This lane's copies of the block have arrived; the warp's barrier waits for all lanes', and until all have
            # read the block before, whose buffer is filled next.
            cute.arch.cp_async_wait_group(self.rows_kv.stages - 2)
            cute.arch.sync_warp()
            token = own + i * self.tile_kv
            if i + (self.rows_kv.stages - 1) < stop:
                late = token + (self.rows_kv.stages - 1) * self.tile_kv
                self.rows_kv.confine(ahead, mK.shape[0])
                self.rows_kv.fetch(lane, k, ahead, late, seen, to_k + free * stage_bytes)
                self.rows_kv.fetch(lane, v, ahead, late, seen, to_v + free * stage_bytes)
                if const_expr(self.token_scales is not None):
                    to_scales = at_scales + free * self.token_scales.stage_bytes
                    self.token_scales.fetch(lane, scales, ahead, late, seen.last, to_scales)
                self.rows_kv.look_up(ahead, gTable, late + self.tile_kv, seen.last)
            # A group even without copies, so that the wait above counts blocks.
            cute.arch.cp_async_commit_group()
            if const_expr(self.token_scales is not None):
                self.token_scales.spread(lane, at_scales + slot * self.token_scales.stage_bytes, numbers, score_scale)

            acc_s = cute.make_rmem_tensor(
                tiled_mma.partition_shape_C((TILE_Q, self.rows_kv.rows)), Float32
            )  # ((2, 2), 1, MMA_KV)
            acc_s.fill(0.0)
            self.products.multiply(lane, acc_s, rQ, sources, Int32(0), slot * stage_bytes, tiled_mma)
            if const_expr(factors is not None):
                self.queries.unscale(acc_s, factors)
            columns_of = None
            if const_expr(self.token_scales is not None):
                # All lanes have stored their numbers of this block.
                cute.arch.sync_warp()
                columns_of = self.token_scales.read(lane, numbers)
                self.token_scales.apply(acc_s, columns_of, self.softmax, launch.cap_outer)
            elif const_expr(self.softmax.capped):
                self.softmax.cap(acc_s, launch.cap_inner, launch.cap_outer)
            # Masked blocks: some row does not see all their keys (the window, later queries' keys, the last key).
            if token < whole_from or token + self.rows_kv.rows > whole_to:
                scores = by_rows(acc_s)
                for r in cutlass.range_constexpr(2):
                    edge = token + places[r, 0][1]
                    for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                        key = edge + const_expr(constant[0, c][1])
                        hidden = key >= sees_to[r]
                        if const_expr(self.limited):
                            hidden = hidden or key < sees_from[r]
                        scores[r, c] = -Float32.inf if hidden else scores[r, c]
            if const_expr(self.token_scales is not None):
                self.softmax.step(acc_s, acc_o, states, Float32(1.0), columns_of.inverses)
            else:
                self.softmax.step(acc_s, acc_o, states, launch.scale)
            rP = cute.make_fragment_like(acc_s, dtype)
            rP.store(acc_s.load().to(dtype))
            self.products.add(lane, acc_o, rP, sources, slot * stage_bytes, tiled_mma)
            slot = slot + 1
            if slot == self.rows_kv.stages:
                slot = Int32(0)
            free = free + 1
            if free == self.rows_kv.stages:
                free = Int32(0)
        # No copy is on its way into the rings, whose bytes the merge takes.
        cute.arch.cp_async_wait_group(0)

        # ---- the warps' accumulators are added up, then the splits'

        # A row's four lanes have a part of its total each.
        for r in cutlass.range_constexpr(2):
            states.total[r] = quad_sum(states.total[r])
        acc = cute.make_rmem_tensor((2, 2, self.share), Float32)  # a pair of columns, two rows, own groups
        self.merge_warps(warp, lane, acc_o, states, acc, storage + self.smem.q_bytes, self.queries is not None)
        columns = StoredGroups(warp, self.warps, warp == 0)
        if const_expr(self.clustered):
            self.reduction.send((warp, lane), keys.split, acc, states, storage, full)
        elif const_expr(self.splits == 1):
            self.store(lane, launch, acc, states, rows_of, columns)
        else:
            # A short sequence has keys for fewer CTAs than there are; the others have returned.
            if keys.active == 1:
                self.store(lane, launch, acc, states, rows_of, columns)
            else:
                number = (rows_of.batch * mK.shape[2] + rows_of.head) * launch.tiles + tile
                partials = launch.mPartials.iterator + Int64(number) * (self.splits * TILE_Q * (self.padded + 2))
                # This CTA leaves its accumulators and statistics, for the last of the tile's CTAs.
                self.leave(warp, lane, acc, states, partials, keys.split, valid)
                flag = cute.recast_ptr(storage + self.smem.flag_at, dtype=Int32)
                if arrive_last(launch.mTickets.iterator + number, flag, tid, keys.active):
                    # It weighs all splits' by their references, then adds up its warps' as before.
                    self.gather(warp, lane, acc_o, states, partials, keys.active, valid)
                    self.merge_warps(warp, lane, acc_o, states, acc, storage + self.smem.q_bytes, False)
                    self.store(lane, launch, acc, states, rows_of, columns)

    @cute.jit
    def fetch_q(self, tid: Int32, mQ: cute.Tensor, at_q: cute.Pointer, rows_of: Rows):
        """Starts the copy of the tile of queries; rows and columns that do not exist become zeros."""
        tile, valid = rows_of.tile, rows_of.valid
        span = const_expr(span_bytes(self.padded))
        along = const_expr(span // 16)
        across = const_expr(self.threads // along)
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), mQ.element_type, num_bits_per_copy=128
        )
        own, column = tid // along, tid % along * WIDEST
        address = swizzled(at_q.toint().to(Int32) + tid * 16, span)
        for i in cutlass.range_constexpr(0, TILE_Q, across):
            row = own + i
            if row < TILE_Q:
                source = self.element(mQ, rows_of, tile * TILE_Q + cutlass.min(row, valid - 1)) + column
                for j in cutlass.range_constexpr(0, self.padded, along * WIDEST):
                    sX = shared_vector(mQ.element_type, address + (j // (along * WIDEST) * TILE_Q + i) * span)
                    if row < valid and column + j < self.head_dim:
                        cute.copy(atom, vector(source + j), sX)
                    else:
                        sX.fill(0.0)

    @cute.jit
    def element(self, mX: cute.Tensor, rows_of: Rows, row: Int32) -> cute.Pointer:
        """The begin of row ``row`` of a head of K and V in (B, SQ, HQ, D): query ``row // group``, head by head."""
        stride = mX.layout.stride
        query = row // rows_of.group
        head_q = rows_of.head * rows_of.group + row - query * rows_of.group
        return mX.iterator + (
            Int64(rows_of.batch) * Int64(stride[0]) + Int64(query) * Int64(stride[1]) + Int64(head_q) * Int64(stride[2])
        )

    @cute.jit
    def merge_warps(
        self,
        warp: Int32,
        lane: Int32,
        acc_o: cute.Tensor,
        states: RowStates,
        acc: cute.Tensor,
        storage: cute.Pointer,
        alternating: cutlass.Constexpr[bool],
    ):
        """Adds up the warps' ``acc_o`` into ``acc``, each warp its own groups; all get references and totals.

        The layout of accumulators is [warp][group][row half][lane][column], so that lanes are neighbours in memory.
        ``alternating``: ``acc_o`` has even and odd columns of 16 in neighbouring groups (``parts/float8.py``).
        """
        each = const_expr(128 * self.n8_groups)
        base = cute.recast_ptr(storage, dtype=Float32)
        sO = cute.make_tensor(  # (column, row half, group, lane, warp)
            base, cute.make_layout((2, 2, self.n8_groups, 32, self.warps), stride=(1, 64, 128, 2, each))
        )
        sR = cute.make_tensor(  # (row, statistic, warp)
            base + self.warps * each, cute.make_layout((TILE_Q, 2, self.warps), stride=(1, TILE_Q, 2 * TILE_Q))
        )
        # Every warp has read its rings (or what was merged here before), whose bytes are written now.
        cute.arch.sync_threads()
        if const_expr(alternating):
            # A lane has four neighbouring columns of 16, which two lanes of one group have elsewhere.
            quarter = lane % 4
            place = quarter // 2 * 128 + (lane - quarter + quarter % 2 * 2) * 2 + warp * each
            for n in cutlass.range_constexpr(0, self.n8_groups, 2):
                for r in cutlass.range_constexpr(2):
                    four = cute.make_rmem_tensor(4, Float32)
                    for c in cutlass.range_constexpr(4):
                        four[c] = acc_o[(c // 2, r), 0, n + c % 2]
                    target = (base + (place + (128 * n + 64 * r))).align(16)
                    cute.autovec_copy(four, cute.make_tensor(target, cute.make_layout(4)))
        else:
            for n in cutlass.range_constexpr(self.n8_groups):
                for r in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(2):
                        sO[c, r, n, lane, warp] = acc_o[(c, r), 0, n]
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                sR[lane // 4 + 8 * r, 0, warp] = states.reference[r]
                sR[lane // 4 + 8 * r, 1, warp] = states.total[r]
        # All warps' accumulators are in shared memory.
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
            states.reference[r], states.total[r] = most, whole
        acc.fill(0.0)
        for k in cutlass.range_constexpr(self.share):
            n = k * self.warps + warp
            if n < self.n8_groups:
                for w in cutlass.range_constexpr(self.warps):
                    for r in cutlass.range_constexpr(2):
                        for c in cutlass.range_constexpr(2):
                            acc[c, r, k] = acc[c, r, k] + weight[r, w] * sO[c, r, n, lane, w]

    @cute.jit
    def partial(self, partials: cute.Pointer, split: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """A split's place in the workspace: ``(2, 2, group, lane)`` as in ``merge_warps``, and ``(row, statistic)``."""
        base = (partials + split * (TILE_Q * (self.padded + 2))).align(16)
        gO = cute.make_tensor(base, cute.make_layout((2, 2, self.n8_groups, 32), stride=(1, 64, 128, 2)))
        return gO, cute.make_tensor(base + 128 * self.n8_groups, cute.make_layout((TILE_Q, 2)))

    @cute.jit
    def leave(
        self,
        warp: Int32,
        lane: Int32,
        acc: cute.Tensor,
        states: RowStates,
        partials: cute.Pointer,
        split: Int32,
        valid: Int32,
    ):
        """Stores this split's accumulators of rows that exist in the workspace."""
        gO, gR = self.partial(partials, split)
        for r in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * r
            if row < valid:
                for k in cutlass.range_constexpr(self.share):
                    n = k * self.warps + warp
                    if n < self.n8_groups:
                        cute.autovec_copy(acc[None, r, k], gO[None, r, n, lane])
                if warp == 0 and lane % 4 == 0:
                    gR[row, 0] = states.reference[r]
                    gR[row, 1] = states.total[r]

    @cute.jit
    def gather(
        self,
        warp: Int32,
        lane: Int32,
        acc_o: cute.Tensor,
        states: RowStates,
        partials: cute.Pointer,
        active: Int32,
        valid: Int32,
    ):
        """Adds up the accumulators of splits ``warp, warp + warps, ...``, as if they had been this warp's blocks.

        Columns shared out among warps were slower: docs/notes/attention.md#decode-gather (H200, 2026-11-22).
        """
        acc_o.fill(0.0)
        self.softmax.start(states)
        for split in cutlass.range(warp, active, self.warps, unroll=1):
            gO, gR = self.partial(partials, split)
            for r in cutlass.range_constexpr(2):
                row = lane // 4 + 8 * r
                shrink, grow = Float32(1.0), Float32(0.0)
                if row < valid:
                    raised = cute.arch.fmax(states.reference[r], gR[row, 0])
                    shrink = cute.math.exp2(states.reference[r] - raised, fastmath=True)
                    grow = cute.math.exp2(gR[row, 0] - raised, fastmath=True)
                    states.reference[r] = raised
                    states.total[r] = states.total[r] * shrink + gR[row, 1] * grow
                for some in cutlass.range_constexpr(0, self.n8_groups, AT_ONCE):
                    if row < valid:
                        for n in cutlass.range_constexpr(some, min(some + AT_ONCE, self.n8_groups)):
                            pair = cute.make_rmem_tensor(2, Float32)
                            cute.autovec_copy(gO[None, r, n, lane], pair)
                            for c in cutlass.range_constexpr(2):
                                acc_o[(c, r), 0, n] = acc_o[(c, r), 0, n] * shrink + pair[c] * grow
                    if const_expr(self.n8_groups > AT_ONCE):
                        # Nobody waits for data: without it all loads are hoisted together, and spill.
                        cute.arch.sync_warp()

    @cute.jit
    def store(
        self,
        lane: Int32,
        launch: Launch,
        acc: cute.Tensor,
        states: RowStates,
        rows_of: Rows,
        columns: StoredGroups,
    ):
        """Divides by the totals, rounds and stores; a row that sees nothing has 0, and -inf as log-sum-exp."""
        mO, mLse, tile, group = launch.mO, launch.mLse, rows_of.tile, rows_of.group
        for r in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * r
            if row < rows_of.valid:
                at = tile * TILE_Q + row
                inverse, lse = Float32(0.0), -Float32.inf
                if states.total[r] != 0.0:
                    inverse = 1.0 / states.total[r]
                    lse = (states.reference[r] + cute.math.log2(states.total[r])) * LN_2
                if const_expr(launch.v_scale is not None):
                    inverse = inverse * launch.v_scale
                target = self.element(mO, rows_of, at) + lane % 4 * 2
                for k in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                    n = columns.own + k * columns.step
                    if n * 8 < self.head_dim:
                        pair = cute.make_rmem_tensor(2, mO.element_type)
                        for c in cutlass.range_constexpr(2):
                            pair[c] = (acc[c, r, k] * inverse).to(mO.element_type)
                        cute.autovec_copy(pair, cute.make_tensor((target + n * 8).align(4), cute.make_layout(2)))
                if const_expr(mLse is not None):
                    query = at // group
                    head_q = rows_of.batch * mO.shape[2] + rows_of.head * group + at - query * group
                    if columns.leads and lane % 4 == 0:
                        mLse[Int64(head_q) * mO.shape[1] + query] = lse
