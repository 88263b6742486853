"""Grouped GEMM, warpgroup schedule: a product for each group of rows by TMA and warpgroup MMA.

Roles, pipeline and steps are :class:`WarpgroupGemm`'s (``gemm/warpgroup_gemm.py``), over tiles that the device finds:
    Producer warp: finds the CTA's next tile among the groups' ends (``parts/walk.py``), passes it on through a ring in
        shared memory, then issues its loads.
    Consumer warp groups: take tiles from the ring, in ping-pong every second entry; multiply; store what belongs to the
        group (``GroupBoxes``). Behind the last tile they write zeros to the rows of no group.

Ring (``parts/schedule.py``): ``PLACES`` places ahead. full[place]: 1 arrival, the producer's; the consumers wait.
    empty[place]: 1 arrival of each warp that reads it, 4 times the groups that share a tile; the producer waits. The
    last entry (the last two in ping-pong, one for each group) says that there is none, and which rows have no group.

One tile, producer: find; publish; for each k-tile wait empty[stage], announce, load both operands.
One tile, consumer: receive; the bias; (ping-pong: wait for order;) mainloop; boxes.

Order and ends:
    Tiles run group by group, so that CTAs at work share an expert's weights in the L2. An expert is a coordinate of the
    weights' TMA. The tile at a group's end begins early, where the group has so many rows; else it reads rows of the
    next group, which spoil only rows of the product that are not stored. Nothing is masked in the mainloop; a ragged K
    is filled with zeros by the TMA.
``swap_ab`` puts weight rows on the MMA's side of 64, and tokens on that of 16 to 256.

Refuses (``ops/products/schedules/grouped.py``): what ``gemm``'s does; a gate with a bias or a weight that is not
K-major.

Source:
    CUTLASS's grouped GEMM finds tiles by a warp that scans the problems' sizes; here sizes are prefix sums already and
    no descriptor is written on the device.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.gemm.warpgroup_gemm import Operand, Shared, Side, WarpgroupGemm
from cutekernels.kernels.cute.parts.boxes import BoxOperands, Corner
from cutekernels.kernels.cute.parts.dependent import pdl_launch
from cutekernels.kernels.cute.parts.pipeline import Position
from cutekernels.kernels.cute.parts.schedule import RingTile, TileRing
from cutekernels.kernels.cute.parts.smem import ALIGNMENT, WarpgroupSmem
from cutekernels.kernels.cute.parts.walk import GroupWalk
from cutekernels.kernels.cute.parts.warp_groups import TmaTensor


@dataclass(frozen=True)
class GroupTensors:
    """Tensors that the kernel reads and writes without TMA."""

    mD: cute.Tensor  # (T, N)
    mEnds: cute.Tensor  # (G + 1,)
    mBias: cute.Tensor | None  # (G, N)


@dataclass(frozen=True)
class GroupOperands:
    """The producer's tensors: both operands, the groups' ends, and out for its extents."""

    tokens: Operand
    weights: Operand
    given: GroupTensors
    tiles_o: Int32  # of clusters, along out's columns


@dataclass(frozen=True)
class WarpgroupGrouped:
    """``product`` of each group, whose results are :class:`GroupBoxes`."""

    product: WarpgroupGemm

    @property
    def tokens(self) -> Side:
        """The product's operand that holds tokens."""
        return self.product.of_columns if self.product.swap_ab else self.product.of_rows

    @property
    def weights(self) -> Side:
        return self.product.of_rows if self.product.swap_ab else self.product.of_columns

    @property
    def cluster_t(self) -> int:
        """CTAs of a cluster along the tokens: they have weights in common."""
        return self.weights.sharers

    @property
    def cluster_o(self) -> int:
        """CTAs of a cluster along out's columns."""
        return self.tokens.sharers

    @property
    def smem(self) -> WarpgroupSmem:
        return replace(self.product.smem, places=WarpgroupSmem.PLACES)

    @property
    def walk(self) -> GroupWalk:
        return GroupWalk(self.tokens.rows * self.cluster_t, self.product.raster)

    @property
    def ring(self) -> TileRing:
        return TileRing(WarpgroupSmem.PLACES, 4 * self.product.sharing)

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # (T, N)
        mX: cute.Tensor,  # (T, K)
        mW: cute.Tensor,  # (G, N, K); gated (G, 2 * N, K)
        mEnds: cute.Tensor,  # (G + 1,)
        mBias: cute.Tensor | None,  # (G, N)
        stream: cuda.CUstream,
    ):
        body, dtype = self.product, mX.element_type
        swap_ab = const_expr(body.swap_ab)
        mX = body.prepare(mX, False, False)
        mW = body.prepare(
            mW, False, not (body.rows_k_major if const_expr(swap_ab) else body.columns_k_major)
        )  # (N, K, G)
        mTile = body.prepare(mD, body.swap_ab, body.results.rows_contiguous)
        # T is tokens and W weights; R and S are the tile's rows and columns, T and W or the reverse.
        layout_r, layout_s = body.layouts(dtype)
        layout_t, layout_w = (layout_s, layout_r) if const_expr(swap_ab) else (layout_r, layout_s)
        tokens = body.tma_of(mX, layout_t, self.tokens)
        weights = body.tma_of(mW, layout_w, self.weights)
        tma_d, tD = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), mTile, body.results.layout(), body.results.shape
        )
        tiled_mma = body.mma(dtype)
        # As many tiles as there can be at most bound the grid: the device alone knows how many there are.
        rows, groups = mX.shape[0], mEnds.shape[0] - 1
        tiles_o = cute.ceil_div(mD.shape[1], self.weights.box * self.cluster_o)
        most = (rows // self.walk.unit + cutlass.min(groups, rows)) * tiles_o * body.cluster
        given = GroupTensors(mD, mEnds, mBias)
        self.kernel(tokens, weights, TmaTensor(tma_d, tD), given, tiled_mma, layout_r, layout_s, tiles_o).launch(
            grid=[cutlass.min(most, Int32(body.resident)), 1, 1],
            block=[body.threads, 1, 1],
            cluster=[body.cluster, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent
            use_pdl=body.dependent,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tokens: TmaTensor,  # (T, K)
        weights: TmaTensor,  # (N, K, G)
        out: TmaTensor,  # (T, N), or (N, T) where swapped
        given: GroupTensors,
        tiled_mma: cute.TiledMma,
        layout_r: cute.ComposedLayout,
        layout_s: cute.ComposedLayout,
        tiles_o: Int32,
    ):
        body = self.product
        block, _, _ = cute.arch.block_idx()
        tid, group, warp = body.role()
        producer = const_expr(body.groups)  # the warp group that loads

        # -- setup
        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=ALIGNMENT)
        shared = body.allocate(storage, layout_r, layout_s)
        ring = cute.recast_ptr(storage + self.smem.ring_at, dtype=Int64)
        if warp == 4 * producer:
            with cute.arch.elect_one():
                self.ring.init(ring)
        # Makes the ring's barriers visible with the others, and waits for the previous kernel.
        body.set_up(warp, (tokens.tma, weights.tma, out.tma), shared)

        k_tiles = cute.ceil_div(cute.size(tokens.coordinates, mode=[1]), body.tile_k)
        if group == producer:
            cute.arch.setmaxregister_decrease(body.registers[0])
            if warp == 4 * producer:
                sT, sW = (shared.sS, shared.sR) if const_expr(body.swap_ab) else (shared.sR, shared.sS)
                operands = GroupOperands(Operand(tokens, sT), Operand(weights, sW), given, tiles_o)
                self.produce(operands, block, shared, ring, k_tiles)
                if const_expr(body.dependent):
                    pdl_launch()
        else:
            cute.arch.setmaxregister_increase(body.registers[1])
            outputs = BoxOperands(
                out.tma, out.coordinates, None, None, given.mBias, Float32(1.0), Float32(0.0), given.mD, None
            )
            self.consume(tid, group, shared, tiled_mma, ring, k_tiles, outputs)
        if const_expr(body.cluster > 1):
            # Both CTAs wait for each other's end: the other's multicasts and arrivals need this one's shared memory.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def produce(self, operands: GroupOperands, block: Int32, shared: Shared, ring: cute.Pointer, k_tiles: Int32):
        """The producer warp's work: finds the CTA's tiles, passes them on, loads them."""
        body = self.product
        tile_t, tile_o = const_expr(self.tokens.rows), const_expr(self.weights.box)
        mEnds = operands.given.mEnds
        rows, columns = operands.given.mD.shape
        blocks, _, _ = cute.arch.grid_dim()
        rank, tile, step = block % body.cluster, block // body.cluster, blocks // body.cluster
        # The walk's chunk of groups lies in the warp's registers: each lane has the ends of four.
        rHigh = cute.make_rmem_tensor(4, Int32)
        lead = cutlass.min(cutlass.max(mEnds[0], Int32(0)), rows)
        state = self.walk.start(mEnds, rows, rHigh, lead)
        entry, at, group = Int32(0), Position(Int32(0), Int32(1)), Int32(0)
        while group >= 0:
            state, found = self.walk.find(mEnds, rows, rHigh, state, tile, operands.tiles_o)
            group = found.group
            if group >= 0:
                tile_m, tile_n = found.m, found.n
                # This CTA's tile of the cluster's.
                if const_expr(self.cluster_t > 1):
                    tile_m = tile_m * self.cluster_t + rank
                if const_expr(self.cluster_o > 1):
                    tile_n = tile_n * self.cluster_o + rank
                # The last tiles of a group and of out's columns begin early, where there are so many.
                token = cutlass.max(cutlass.min(found.begin + tile_m * tile_t, found.end - tile_t), found.begin)
                column = cutlass.max(cutlass.min(tile_n * tile_o, columns - tile_o), Int32(0))
                self.ring.publish(ring, entry, RingTile(token, column, group, found.end))
                loads = [
                    *body.load(operands.tokens, self.tokens, token, group, rank),
                    *body.load(operands.weights, self.weights, column, group, rank),
                ]
                at = body.produce(shared, loads, at, k_tiles)
                entry, tile = entry + 1, tile + step
        # No more tiles, for each group that takes entries of its own.
        for i in cutlass.range_constexpr(2 if body.pingpong else 1):
            self.ring.publish(ring, entry + i, RingTile(lead, state.top, Int32(-1), Int32(0)))

    @cute.jit
    def consume(
        self,
        tid: Int32,
        group: Int32,
        shared: Shared,
        tiled_mma: cute.TiledMma,
        ring: cute.Pointer,
        k_tiles: Int32,
        outputs: BoxOperands,
    ):
        """A consumer group's tiles, one after the other, then its share of the rows of no group."""
        body = self.product
        consumer = body.consumer(tid, group, shared, tiled_mma)
        buffers = body.buffers(consumer, shared)

        at, boxes_used, order_phase, entry = Position(Int32(0), Int32(0)), Int32(0), Int32(1) - group, Int32(0)
        if const_expr(body.pingpong):
            # Ping-pong: every second entry. The second group passes over the stages of the first tile.
            entry = group
            if group == 1:
                at = body.pipeline.after(at, k_tiles)
        # -- tile after tile, until an entry says that there is none
        tile = self.ring.receive(ring, entry)
        while tile.group >= 0:
            row, column = tile.row, tile.column
            if const_expr(body.swap_ab):
                row, column = tile.column, tile.row
            corner = body.results.corner(buffers, Corner(row, column, Int32(0)))
            # The tile's own outputs: its group's bias and end.
            bias = None
            if const_expr(outputs.mBias is not None):
                bias = outputs.mBias[tile.group, None]
            own = replace(outputs, mBias=bias, end=tile.end)
            body.results.load_inputs(buffers, own, Corner(row, column, Int32(0)), corner, boxes_used)
            if const_expr(body.pingpong):
                # Wait until the other group has issued all products of its tile.
                cute.arch.mbarrier_wait(shared.order + group, order_phase)
                order_phase = order_phase ^ 1
            consumer.acc.fill(0.0)
            at = body.multiply(consumer, shared, at, k_tiles)
            if const_expr(body.pingpong):
                at = body.pipeline.after(at, k_tiles)  # the other group's stages
            body.results.store_tile(buffers, own, consumer.acc, corner, boxes_used)
            boxes_used = boxes_used + body.results.count
            entry = entry + const_expr(2 if body.pingpong else 1)
            tile = self.ring.receive(ring, entry)
        # -- rows of no group, of which every CTA has a share
        body.results.drain(consumer.thread)
        body.blank(tid, outputs.mOut, tile.row, tile.column)
