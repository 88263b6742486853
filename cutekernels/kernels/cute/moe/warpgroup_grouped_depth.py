"""Weight gradients of grouped products, warpgroup schedule: ``out[e] = a[rows of e].T @ b[rows of e]``.

Roles, barriers and the order of steps are :class:`WarpgroupGemm`'s (``gemm/warpgroup_gemm.py``): one producer warp,
consumer warp groups, cooperative or in ping-pong, over the tiles of every expert's matrix, one after the other. Both
operands lie along their rows, and a tile is as deep as its expert has rows, so each tile has its own number of k-tiles;
an expert without rows gets zeros. Producer and consumers read the ends for themselves (``span``): offsets that change
while the kernel runs may hang it. In ping-pong a group passes over the other's stages by that tile's own depth.

Ends:
    Loads begin at the expert's first row, wherever that is, so an expert's *last* k-tile is the ragged one, and reaches
    into the next expert's rows. ``multiply`` treats it apart, behind the whole k-tiles: of its steps of 16 rows the one
    that is partly the expert's own is zeroed in shared memory behind the expert's end, by each group that reads it, in
    both operands (a NaN stays with its expert), and later steps are not multiplied.

Refuses (``ops/products/schedules/grouped.py``): what ``gemm``'s does; matrices of fewer than 32 rows or columns.

Source:
    CUTLASS's grouped GEMM of ragged depth writes a descriptor for each group on the device; here one serves all.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.gemm.warpgroup_gemm import Consumer, Operand, Shared, Walk, WarpgroupGemm
from cutekernels.kernels.cute.parts.boxes import FIRST_BARRIER, BoxOperands
from cutekernels.kernels.cute.parts.dependent import pdl_launch
from cutekernels.kernels.cute.parts.fragments import swizzled
from cutekernels.kernels.cute.parts.heads import WIDEST, shared_vector
from cutekernels.kernels.cute.parts.pipeline import Position
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.warp_groups import GROUP, TmaTensor

STEP = 16  # rows of both operands that an MMA multiplies


@dataclass(frozen=True)
class Ends:
    """The groups' ends, as the device has them, and the rows that there are."""

    mEnds: cute.Tensor  # (G + 1,)
    depth: Int32


@dataclass(frozen=True)
class WarpgroupGroupedDepth:
    """``product`` of each group of rows."""

    product: WarpgroupGemm

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # (G, M, N)
        mA: cute.Tensor,  # (T, M)
        mB: cute.Tensor,  # (T, N)
        mEnds: cute.Tensor,  # (G + 1,)
        mBias: None,
        stream: cuda.CUstream,
    ):
        body, dtype = self.product, mA.element_type
        mR = body.prepare(mA if const_expr(not body.swap_ab) else mB, True, True)  # (M, T)
        mS = body.prepare(mB if const_expr(not body.swap_ab) else mA, True, True)  # (N, T)
        mD = body.prepare(mD, body.swap_ab, body.results.rows_contiguous)  # (M, N, G)
        layout_r, layout_s = body.layouts(dtype)
        # One descriptor serves all experts: a load moves its coordinates to the expert's first row.
        rows = body.tma_of(mR, layout_r, body.of_rows)
        columns = body.tma_of(mS, layout_s, body.of_columns)
        tma_d, tD = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), mD, body.results.layout(), body.results.shape
        )
        tiles_m = cute.ceil_div(cute.size(mD, mode=[0]), body.tile_m * body.cluster_m)
        tiles_n = cute.ceil_div(cute.size(mD, mode=[1]), body.results.columns * body.cluster_n)
        tiles = (tiles_m, tiles_n, mEnds.shape[0] - 1)
        blocks = cutlass.min(tiles[0] * tiles[1] * tiles[2] * body.cluster, Int32(body.resident))
        out = TmaTensor(tma_d, tD)
        self.kernel(rows, columns, out, mEnds, body.mma(dtype), layout_r, layout_s, tiles).launch(
            grid=[blocks, 1, 1],
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
        of_rows: TmaTensor,  # (M, T)
        of_columns: TmaTensor,  # (N, T)
        out: TmaTensor,  # (M, N, G)
        mEnds: cute.Tensor,
        tiled_mma: cute.TiledMma,
        layout_r: cute.ComposedLayout,
        layout_s: cute.ComposedLayout,
        tiles: tuple[Int32, Int32, Int32],  # of clusters: along M, along N, groups
    ):
        body = self.product
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        tid, group, warp = body.role()
        producer = const_expr(body.groups)  # the warp group that loads
        storage = SmemAllocator().allocate(body.smem.total_bytes, byte_alignment=ALIGNMENT)
        shared = body.allocate(storage, layout_r, layout_s)
        body.set_up(warp, (of_rows.tma, of_columns.tma, out.tma), shared)

        # -- the walk: every expert's tiles, one expert after the other
        walk = Walk(
            rank=block % body.cluster,
            first=block // body.cluster,
            count=tiles[0] * tiles[1] * tiles[2],
            step=blocks // body.cluster,
            tiles_m=tiles[0],
            tiles_n=tiles[1],
            rows=cute.size(out.coordinates, mode=[0]),
            columns=cute.size(out.coordinates, mode=[1]),
        )
        ends = Ends(mEnds, cute.size(of_rows.coordinates, mode=[1]))
        if group == producer:
            cute.arch.setmaxregister_decrease(body.registers[0])
            if warp == 4 * producer:
                at = Position(Int32(0), Int32(1))  # a fresh empty barrier counts as complete at phase 1
                for index in cutlass.range(walk.first, walk.count, walk.step, unroll=1):
                    corner = body.place(walk, index)
                    begin, rows = self.span(ends, corner.layer)
                    own_rows = Operand(self.from_row(of_rows, begin), shared.sR)
                    own_columns = Operand(self.from_row(of_columns, begin), shared.sS)
                    loads = [
                        *body.load(own_rows, body.of_rows, corner.row, corner.layer, walk.rank),
                        *body.load(own_columns, body.of_columns, corner.column, corner.layer, walk.rank),
                    ]
                    at = body.produce(shared, loads, at, cute.ceil_div(rows, body.tile_k))
                if const_expr(body.dependent):
                    pdl_launch()
        else:
            cute.arch.setmaxregister_increase(body.registers[1])
            outputs = BoxOperands(out.tma, out.coordinates, None, None, None, Float32(1.0), Float32(0.0))
            self.consume(tid, group, shared, walk, tiled_mma, ends, outputs)
        if const_expr(body.cluster > 1):
            # Both CTAs wait for each other's end: the other's multicasts and arrivals need this one's shared memory.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    def from_row(self, operand: TmaTensor, begin: Int32) -> TmaTensor:
        """The operand's rows from ``begin`` on."""
        return TmaTensor(operand.tma, cute.domain_offset((0, begin), operand.coordinates))

    @cute.jit
    def span(self, ends: Ends, group: Int32) -> tuple[Int32, Int32]:
        """Where the rows of ``group`` begin, and how many there are; ends may be anything and are clamped."""
        begin = cutlass.min(cutlass.max(ends.mEnds[group], Int32(0)), ends.depth)
        end = cutlass.min(cutlass.max(ends.mEnds[group + 1], begin), ends.depth)
        return begin, end - begin

    @cute.jit
    def pass_over(self, walk: Walk, ends: Ends, index: Int32, at: Position) -> Position:
        """The position behind the stages of tile ``index``, which is the other group's."""
        other = self.product.place(walk, index)
        _, rows = self.span(ends, other.layer)
        return self.product.pipeline.after(at, cute.ceil_div(rows, self.product.tile_k))

    @cute.jit
    def consume(
        self,
        tid: Int32,
        group: Int32,
        shared: Shared,
        walk: Walk,
        tiled_mma: cute.TiledMma,
        ends: Ends,
        outputs: BoxOperands,
    ):
        """A consumer group's tiles, one after the other."""
        body = self.product
        consumer = body.consumer(tid, group, shared, tiled_mma)
        buffers = body.buffers(consumer, shared)

        at, boxes_used, order_phase = Position(Int32(0), Int32(0)), Int32(0), Int32(1) - group
        first, stride = walk.first, walk.step
        if const_expr(body.pingpong):
            # Ping-pong: every second tile of the CTA. The second group passes over the stages of the CTA's first tile.
            if group == 1:
                at = self.pass_over(walk, ends, first, at)
                first = first + walk.step
            stride = walk.step * 2
        for index in cutlass.range(first, walk.count, stride, unroll=1):
            tile = body.place(walk, index)
            corner = body.results.corner(buffers, tile)
            body.results.load_inputs(buffers, outputs, tile, corner, boxes_used)
            if const_expr(body.pingpong):
                # Wait until the other group has issued all products of its tile.
                cute.arch.mbarrier_wait(shared.order + group, order_phase)
                order_phase = order_phase ^ 1
            consumer.acc.fill(0.0)
            _, rows = self.span(ends, tile.layer)
            at = self.multiply(consumer, shared, at, rows)
            if const_expr(body.pingpong):
                at = self.pass_over(walk, ends, cutlass.min(index + walk.step, walk.count - 1), at)
            body.results.store_tile(buffers, outputs, consumer.acc, corner, boxes_used)
            boxes_used = boxes_used + body.results.count
        body.results.drain(consumer.thread)

    @cute.jit
    def multiply(self, consumer: Consumer, shared: Shared, at: Position, rows: Int32) -> Position:
        """The mainloop of a tile ``rows`` deep. Returns the position behind its last k-tile."""
        body = self.product
        whole = rows // body.tile_k
        rest = rows - whole * body.tile_k
        before = Int32(0)
        # Whole k-tiles: all rows are the expert's.
        for k_tile in cutlass.range(whole, unroll=1):
            # Wait until the TMA has filled the stage.
            cute.arch.mbarrier_wait(shared.full + at.stage, at.phase)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(body.tile_k // STEP):
                cute.gemm(
                    consumer.tiled_mma,
                    consumer.acc,
                    consumer.rR[None, None, kb, at.stage],
                    consumer.rS[None, None, kb, at.stage],
                    consumer.acc,
                )
            warpgroup.commit_group()
            # The products of the k-tile before are done, so the producer may refill its stage; these go on.
            warpgroup.wait_group(1)
            body.pipeline.release(consumer.thread, shared.empty, before, k_tile > 0)
            before = at.stage
            at = body.pipeline.next(at)
        if rest > 0:
            # The ragged k-tile: its first ``rest`` rows are the expert's, the others the next one's.
            cute.arch.mbarrier_wait(shared.full + at.stage, at.phase)
            steps = cute.ceil_div(rest, STEP)
            self.clear(consumer, shared.storage, shared.sR, at.stage, rest, steps * STEP)
            columns = shared.storage + body.smem.columns_at
            self.clear(consumer, columns, shared.sS, at.stage, rest, steps * STEP)
            # The tensor cores see this thread's zeros, and the group multiplies when all of its threads have written.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=FIRST_BARRIER + consumer.group, number_of_threads=GROUP)
            # The last whole k-tile's products are done: its stage goes back to the producer.
            warpgroup.wait_group(0)
            body.pipeline.release(consumer.thread, shared.empty, before, whole > 0)
            before = at.stage
            warpgroup.fence()
            for kb in cutlass.range(steps, unroll=1):
                cute.gemm(
                    consumer.tiled_mma,
                    consumer.acc,
                    consumer.rR[None, None, kb, at.stage],
                    consumer.rS[None, None, kb, at.stage],
                    consumer.acc,
                )
            warpgroup.commit_group()
            at = body.pipeline.next(at)
        if const_expr(body.pingpong):  # noqa: SIM102  known when compiled
            if consumer.thread == 0:
                # All products of this tile are issued: the other group may issue its own behind them.
                cute.arch.mbarrier_arrive(shared.order + (consumer.group ^ 1))
        # The last products are done: accumulators may be read. An expert without rows has no stage to give back.
        warpgroup.wait_group(0)
        body.pipeline.release(consumer.thread, shared.empty, before, rows > 0)
        return at

    @cute.jit
    def clear(self, consumer: Consumer, storage: cute.Pointer, sX: cute.Tensor, stage: Int32, first: Int32, end: Int32):
        """Zeros rows ``first`` to ``end`` of a stage of an operand, ``sX`` (extent, K, STAGE), whose stages begin at
        ``storage``. Groups that share a tile write the same zeros, each for itself.
        """
        # 16 bytes a thread, at the swizzled address; sX's layout has no swizzle.
        pieces = const_expr(cute.size(sX, mode=[0]) // WIDEST)
        base = storage.toint().to(Int32)
        for i in cutlass.range(consumer.thread, (end - first) * pieces, GROUP, unroll=1):
            at = cute.crd2idx((i % pieces * WIDEST, first + i // pieces, stage), sX.layout) * 2
            shared_vector(Int16, base + swizzled(at, 128)).fill(0)
