"""The gradient of attention's queries from that of its scores, ``dQ = scale * dS K``, by warpgroup MMA (sm_90).

``warpgroup_backward.py`` has left dS in memory, in blocks (``parts/score_blocks.py``). A CTA owns 64 queries of a head
for each of ``groups`` consumer warp groups, and walks 64 keys at a time: one product, whose sum has one order. dS is an
A operand from registers, K is read with its columns contiguous along n.

Roles:
    Consumer warp groups 0 .. groups - 1 (128 threads each): group g owns queries ``64 g .. 64 g + 63`` of the tile.
    Producer warp group (the last 128 threads): its first warp issues all loads and passes tiles on. The others idle.

Pipelines (mbarriers in shared memory; the producer waits on ``empty``, consumers wait on ``full``):
    ==============  ==========  ====================================  ==================================================
    barriers        stages      full: arrivals                        empty: arrivals
    ==============  ==========  ====================================  ==================================================
    full, empty     ``stages``  1 and the bytes of K and of dS        ``groups``: both have been read
    queue           1           1: a tile's number                    every consumer thread: it has been read
    ==============  ==========  ====================================  ==================================================
    Named barriers: one for each group's 128 threads.

A group leaves out keys that none of its queries sees: nobody has written their dS. Keys that the whole tile sees need
no such question.
"""

from dataclasses import dataclass
from typing import ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cutekernels.kernels.cute.parts.attention_smem import BLOCK_KEYS, BLOCK_QUERIES, QueryGradientSmem
from cutekernels.kernels.cute.parts.groups import GroupProducts, round_to, store_rows
from cutekernels.kernels.cute.parts.head_loads import HeadLoads, TmaOperand
from cutekernels.kernels.cute.parts.heads import HeadRows
from cutekernels.kernels.cute.parts.mask import Band, BandMask, Blocks
from cutekernels.kernels.cute.parts.pipeline import Position, StagePipeline
from cutekernels.kernels.cute.parts.ptx import instruction, pure
from cutekernels.kernels.cute.parts.schedule import TileQueue
from cutekernels.kernels.cute.parts.score_blocks import WORDS, ScoreBlocks
from cutekernels.kernels.cute.parts.sequences import HeadOrder, Sequences
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.warp_groups import GROUP, ROWS, TmaTensor, WarpGroupBody

FIRST_GROUP_BARRIER = 1  # named barriers; 0 is the CTA's


@dataclass(frozen=True)
class Launch:
    """Tensors and numbers of a launch."""

    mDq: cute.Tensor
    mDs: cute.Tensor
    mK: cute.Tensor
    mCounter: cute.Tensor | None
    layer: Int32  # the first head, counted over the batch
    factor: Float32
    left: Int32
    right: Int32
    tiles: Int32  # of a head
    layers: Int32  # heads of this launch
    band: Int32  # heads of a band of the tiles' order


@dataclass(frozen=True)
class Barriers:
    """mbarriers in shared memory, one for each stage, and the queue of tiles."""

    full: cute.Pointer
    empty: cute.Pointer
    queue: cute.Pointer


@dataclass(frozen=True)
class Tile:
    """A CTA's queries of one head, and the blocks of keys that they see."""

    layer: Int32  # among those of the launch
    batch: Int32
    head: Int32
    row: Int32  # the first one
    band: Band
    blocks: Blocks  # of 64 keys


@dataclass(frozen=True)
class Consumer:
    """State of a consumer thread from its first tile to its last."""

    thread: Int32  # in the group
    group: Int32
    tiled_mma: cute.TiledMma
    rK: cute.Tensor  # descriptors (MMA, D, KEYS, STAGE)
    rDs: cute.Tensor  # (MMA, M, KEYS), 16 bits
    acc: cute.Tensor  # (MMA, M, D)
    storage: cute.Pointer
    barriers: Barriers


@dataclass(frozen=True)
class WarpgroupQueryGradients(WarpGroupBody):
    """The body; its header is the module's. ``resident``: as of ``WarpgroupAttentionBackward``."""

    head_dim: int
    padded: int
    blocks: ScoreBlocks
    order: HeadOrder
    resident: int
    groups: int = 2

    REGISTERS: ClassVar[dict[int, tuple[int, int]]] = {2: (24, 240)}

    @property
    def tile_own(self) -> int:
        return ROWS * self.groups

    @property
    def smem(self) -> QueryGradientSmem:
        return QueryGradientSmem(self.head_dim, self.groups)

    @property
    def sequences(self) -> Sequences:
        return Sequences(False)

    @property
    def loads(self) -> HeadLoads:
        return HeadLoads(ROWS, self.padded, self.sequences)

    @property
    def pipeline(self) -> StagePipeline:
        return StagePipeline(self.smem.stages, self.smem.stage_bytes, self.groups, 1)

    @property
    def queue(self) -> TileQueue:
        return TileQueue(self.resident > 0, GROUP * self.groups)

    @property
    def rows_own(self) -> HeadRows:
        return HeadRows(ROWS, self.head_dim, self.padded, 1, GROUP)

    def mask(self, rows: int) -> BandMask:
        """The keys that so many queries see, 64 at a time."""
        by_keys = self.blocks.mask
        return BandMask(rows, ROWS, by_keys.limited_right, by_keys.limited_left, False)

    def layouts(self, dtype: type[cutlass.Numeric]) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """K as ``(64, D, STAGE)`` and the same as ``(D, 64, STAGE)``."""
        stages = self.smem.stages
        return (
            hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (0, ROWS, self.padded), dtype, stages),
            hopper_helpers.make_smem_layout_b(LayoutEnum.COL_MAJOR, (0, self.padded, ROWS), dtype, stages),
        )

    @cute.jit
    def __call__(
        self,
        mDq: cute.Tensor,  # (B, SQ, HQ, D)
        mDs: cute.Tensor,  # (heads of Q, ROWS, COLUMNS, 256)
        mK: cute.Tensor,  # (B, SKV, HKV, D)
        mCounter: cute.Tensor | None,  # (1,), zero before and after a launch
        layer: Int32,  # the first head of K, counted over the batch, whose heads of Q these are
        factor: Float32,
        left: Int32,  # keys seen before a query's own, where limited
        right: Int32,  # and behind it
        stream: cuda.CUstream,
    ):
        dtype = mK.element_type
        heads_per_kv = mDq.shape[2] // mK.shape[2]
        tiles, layers = cute.ceil_div(mDq.shape[1], self.tile_own), mDs.shape[0]
        band = self.order.band(layers, heads_per_kv, Int64(mK.shape[1]) * (2 * self.head_dim))
        layout_k, layout_kt = self.layouts(dtype)
        # One CTA a tile, or as many as fit, which draw their tiles from the counter.
        count = tiles * layers
        blocks = count if const_expr(self.resident == 0) else cutlass.min(count, Int32(self.resident))
        self.kernel(
            Launch(mDq, mDs, mK, mCounter, layer * heads_per_kv, factor, left, right, tiles, layers, band),
            TmaTensor(*self.loads.make_tma(mK, layout_k, False)),
            GroupProducts(ROWS, self.padded).py_mma(dtype),
            (layout_k, layout_kt),
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        launch: Launch,
        load: TmaTensor,
        tiled_mma: cute.TiledMma,
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
    ):
        layout_k, layout_kt = layouts
        tid, group, warp = self.role()
        producer = const_expr(self.groups)
        dtype = launch.mK.element_type
        # -- shared memory: K's stages, seen by rows for TMA and by columns for the product; behind them the barriers
        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=ALIGNMENT)
        sK = self.buffer(storage, layout_k, dtype)
        sKt = self.buffer(storage, layout_kt, dtype)
        full = cute.recast_ptr(storage + self.smem.barriers_at, dtype=Int64)
        empty = full + self.smem.stages
        barriers = Barriers(full, empty, empty + self.smem.stages)
        self.initialize(warp, (load.tma,), lambda: self.init_barriers(barriers))
        # All threads wait for the thread that initializes the barriers.
        cute.arch.sync_threads()
        # -- the producer's loads, or the products of a consumer's 64 queries
        if group == producer:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 4 * producer:
                self.produce(launch, TmaOperand(load.tma, load.coordinates, sK), storage, barriers)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            own = Consumer(
                thread=tid % GROUP,
                group=group,
                tiled_mma=tiled_mma,
                rK=tiled_mma.make_fragment_B(tiled_mma.get_slice(0).partition_B(sKt)),
                rDs=cute.make_rmem_tensor(tiled_mma.partition_shape_A((ROWS, ROWS)), dtype),
                acc=cute.make_rmem_tensor(tiled_mma.partition_shape_C((ROWS, self.padded)), Float32),
                storage=storage,
                barriers=barriers,
            )
            self.consume(own, launch)

    def buffer(self, at: cute.Pointer, layout: cute.ComposedLayout, dtype: type[cutlass.Numeric]) -> cute.Tensor:
        """The swizzled buffer at ``at``."""
        return cute.make_tensor(cute.recast_ptr(at, layout.inner, dtype), layout.outer)

    @cute.jit
    def init_barriers(self, barriers: Barriers):
        """One thread's work."""
        self.pipeline.init(barriers.full, barriers.empty)
        self.queue.init(barriers.queue)

    @cute.jit
    def locate(self, index: Int32, launch: Launch) -> Tile:
        """The place of tile ``index``, and the blocks that it walks."""
        number, layer = self.order.place(index, launch.layers, launch.tiles, launch.band)
        heads, seq_q, seq_kv = launch.mDq.shape[2], launch.mDq.shape[1], launch.mK.shape[1]
        # A launch may begin at any head of the batch; its dS is counted from there.
        batch = (launch.layer + layer) // heads
        row, shift = number * self.tile_own, seq_kv - seq_q
        band = Band(seq_q, seq_kv, launch.left - shift, launch.right + shift)
        blocks = self.mask(self.tile_own).blocks(row, band)
        return Tile(layer, batch, launch.layer + layer - batch * heads, row, band, blocks)

    @cute.jit
    def produce(self, launch: Launch, operand: TmaOperand, storage: cute.Pointer, barriers: Barriers):
        """The loads of this CTA's tiles, by one warp."""
        index, _, _ = cute.arch.block_idx()
        # Phase 1: fresh stages count as released, so the first round waits for nobody.
        at, queue_phase = Position(Int32(0), Int32(1)), Int32(1)
        heads_per_kv = launch.mDq.shape[2] // launch.mK.shape[2]
        seq_q, seq_kv = launch.mDq.shape[1], launch.mK.shape[1]
        by_keys = self.blocks.band(seq_q, seq_kv, launch.left, launch.right)
        steps = const_expr(ROWS // BLOCK_KEYS)
        step_bytes = const_expr(self.smem.ds_bytes // steps)
        while index < launch.tiles * launch.layers:
            following = self.queue.draw(index, launch.tiles * launch.layers, launch.mCounter)
            tile = self.locate(index, launch)
            first, end = tile.blocks.first, tile.blocks.end
            keys = self.loads.rows_of(operand, ROWS, Int32(0), tile.head // heads_per_kv, tile.batch, False)
            for i in cutlass.range(end - first, unroll=1):
                # Waits on empty until every group has read what was in this stage.
                self.pipeline.acquire(barriers.full, barriers.empty, at.stage, at.phase)
                full = barriers.full + at.stage
                # K by TMA; of dS, the blocks of 16 keys and all of the tile's queries lie in one run each.
                cute.copy(keys.tma, keys.source[None, first + i], keys.target[None, at.stage], tma_bar_ptr=full)
                own = (first + i) * ROWS // self.blocks.mask.tile_q
                row, column = self.blocks.place(own, by_keys)
                row = row + ((first + i) * ROWS - own * self.blocks.mask.tile_q) // BLOCK_KEYS
                column = column + tile.row // BLOCK_QUERIES
                target = (storage + (self.smem.ds_at + at.stage * self.smem.ds_bytes)).toint().to(Int32)
                with cute.arch.elect_one():
                    for j in cutlass.range_constexpr(steps):
                        source = launch.mDs[tile.layer, row + j, None, None].iterator + column * (2 * WORDS)
                        instruction(
                            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
                            "r,l,r,r",
                            target + j * step_bytes,
                            source.toint(),
                            Int32(step_bytes),
                            full.toint().to(Int32),
                        )
                at = self.pipeline.next(at)
            # Waits until all readers have read the tile's number before.
            self.queue.publish(barriers.queue, following, queue_phase)
            queue_phase = queue_phase ^ 1
            index = following

    @cute.jit
    def consume(self, own: Consumer, launch: Launch):
        """A consumer warp group's 64 queries of each of this CTA's tiles."""
        index, _, _ = cute.arch.block_idx()
        at, queue_phase = Position(Int32(0), Int32(0)), Int32(0)
        multiply = GroupProducts(ROWS, self.padded).multiply
        while index < launch.tiles * launch.layers:
            # The tile's keys are walked by all groups, each of which skips those that its own queries do not see.
            tile = self.locate(index, launch)
            blocks, row = tile.blocks, tile.row + own.group * ROWS
            seen = self.mask(ROWS).blocks(row, tile.band)
            own.acc.fill(0.0)
            for i in cutlass.range(blocks.end - blocks.first, unroll=1):
                # Waits for K and dS.
                cute.arch.mbarrier_wait(own.barriers.full + at.stage, at.phase)
                # dS exists only for keys that some query of the group sees.
                if blocks.first + i >= seen.first and blocks.first + i < seen.end:
                    self.read_scores(own, at.stage)
                    rK = own.rK[None, None, None, at.stage]
                    multiply(own.tiled_mma, own.acc, own.rDs, rK, False)
                    # Waits for the product, which reads K's stage and dS's registers.
                    warpgroup.wait_group(0)
                self.pipeline.release(own.thread, own.barriers.empty, at.stage, Boolean(True))
                at = self.pipeline.next(at)
            self.store(own, tile, row, launch)
            # Waits for the number of the next tile, where tiles are drawn from a counter.
            index = self.queue.receive(own.barriers.queue, index, queue_phase)
            queue_phase = queue_phase ^ 1

    @cute.jit
    def read_scores(self, own: Consumer, stage: Int32):
        """dS of a warp's 16 queries and 64 keys to ``own.rDs``, transposed: in memory, keys come by queries."""
        words = cute.recast_tensor(own.rDs, Int32)
        block = own.group * (ROWS // BLOCK_QUERIES) + own.thread // 32
        source = cute.recast_ptr(own.storage + (self.smem.ds_at + stage * self.smem.ds_bytes), dtype=Int32)
        source = source + (block * WORDS + own.thread % 32 * 4)
        step = const_expr(self.tile_own // BLOCK_QUERIES * WORDS)
        found = cute.make_rmem_tensor(4, Int32)
        for i in cutlass.range_constexpr(ROWS // BLOCK_KEYS):
            cute.autovec_copy(cute.make_tensor((source + i * step).align(16), cute.make_layout(4)), found)
            for j in cutlass.range_constexpr(4):
                # The halves of keys and of queries change places too.
                word = found[const_expr((0, 2, 1, 3)[j])]
                words[4 * i + j] = pure("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", word)

    @cute.jit
    def store(self, own: Consumer, tile: Tile, row: Int32, launch: Launch):
        """A group's gradients to memory, through its buffer."""
        valid = cutlass.min(cutlass.max(tile.band.seq_q - row, Int32(0)), Int32(ROWS))
        # The scores' scale, in fp32; then one rounding.
        for i in cutlass.range_constexpr(cute.size(own.acc)):
            own.acc[i] = own.acc[i] * launch.factor
        rG = cute.make_fragment_like(own.acc, launch.mDq.element_type)
        round_to(own.acc, rG)
        buffer = own.storage + (self.smem.results_at + own.group * self.smem.results_bytes)
        barrier = FIRST_GROUP_BARRIER + own.group
        # The group waits until the results before have left the buffer, and then until all of these are there.
        cute.arch.barrier(barrier_id=barrier, number_of_threads=GROUP)
        store_rows(own.thread, rG, buffer.toint().to(Int32), self.padded)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=GROUP)
        out = self.sequences.head(launch.mDq, tile.batch, Int32(0), tile.head)
        self.rows_own.store(own.thread, out.rows, out.stride, row, self.rows_own.address(own.thread, buffer), valid)
