"""Weight gradients of grouped products, warpgroup schedule: ``out[e] = a[rows of e].T @ b[rows of e]``.

Schedule:
    :class:`WarpgroupGemm`'s persistent grid over the tiles of every expert's matrix, one expert after the other. Both
    operands lie along their rows, and a tile is as deep as its expert has rows, so each tile has its own number of
    k-tiles; an expert without rows gets zeros. Loads begin at the expert's first row, wherever that is. Warps that load
    and that multiply read the ends for themselves: offsets that change while the kernel runs may hang it.
    The last k-tile reaches into the next expert's rows. Of those the MMA's step of 16 rows that is partly the expert's
    own is zeroed in shared memory by each group that reads it, in both operands, and later steps are not multiplied: a
    NaN stays with its expert.

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

from cutekernels.kernels.cute.gemm.warpgroup import GROUP, ROWS, WarpgroupGemm
from cutekernels.kernels.cute.parts.boxes import FIRST_BARRIER
from cutekernels.kernels.cute.parts.fragments import swizzled
from cutekernels.kernels.cute.parts.heads import WIDEST, shared_vector
from cutekernels.kernels.cute.parts.smem import ALIGNMENT

STEP = 16  # rows of both operands that an MMA multiplies


@dataclass(frozen=True)
class GroupedDepth:
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
        prepared, results = body.prepared, body.results
        mR = prepared(mA if const_expr(not body.swapped) else mB, True, True)  # (M, T)
        mS = prepared(mB if const_expr(not body.swapped) else mA, True, True)  # (N, T)
        mD = prepared(mD, body.swapped, results.rows_contiguous)  # (M, N, G)
        layout_r, layout_s = body.layouts(dtype)
        tma_r, tR = body.boxed(mR, layout_r, body.of_rows)
        tma_s, tS = body.boxed(mS, layout_s, body.of_columns)
        tma_d, tD = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mD, results.layout(), results.shape)
        tiles_m = cute.ceil_div(cute.size(mD, mode=[0]), body.tile_m * body.cluster_m)
        tiles_n = cute.ceil_div(cute.size(mD, mode=[1]), results.columns * body.cluster_n)
        tiles = (tiles_m, tiles_n, mEnds.shape[0] - 1)
        blocks = cutlass.min(tiles[0] * tiles[1] * tiles[2] * body.cluster, Int32(body.resident))
        self.kernel(tma_r, tR, tma_s, tS, tma_d, tD, mEnds, body.mma(dtype), layout_r, layout_s, tiles).launch(
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
        tma_r: cute.CopyAtom,
        tR: cute.Tensor,  # (M, T), coordinates
        tma_s: cute.CopyAtom,
        tS: cute.Tensor,  # (N, T), coordinates
        tma_d: cute.CopyAtom,
        tD: cute.Tensor,  # (M, N, G), coordinates
        mEnds: cute.Tensor,
        tiled_mma: cute.TiledMma,
        layout_r: cute.ComposedLayout,
        layout_s: cute.ComposedLayout,
        tiles: tuple[Int32, Int32, Int32],  # of clusters: along M, along N, groups
    ):
        body = self.product
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(tid // GROUP)
        warp = cute.arch.make_warp_uniform(tid // 32)
        loading = const_expr(body.groups)  # the group that loads
        furnish, ready = body.furnish, body.ready
        storage = SmemAllocator().allocate(body.smem.total_bytes, byte_alignment=ALIGNMENT)
        sR, sS, full, empty, landed, turns = furnish(storage, layout_r, layout_s)
        ready(warp, (tma_r, tma_s, tma_d), full, empty, landed)

        rank = block % body.cluster
        walk = (block // body.cluster, tiles[0] * tiles[1] * tiles[2], blocks // body.cluster)
        place, load, produce, span, consume = body.place, body.load, body.produce, self.span, self.consume
        extents = cute.size(tD, mode=[0]), cute.size(tD, mode=[1])
        depth = cute.size(tR, mode=[1])
        if group == loading:
            cute.arch.setmaxregister_decrease(body.registers[0])
            if warp == 4 * loading:
                stage, phase = Int32(0), Int32(1)
                for tile in cutlass.range(walk[0], walk[1], walk[2], unroll=1):
                    at = place(tile, rank, tiles, extents)
                    begin, rows = span(mEnds, at[2], depth)
                    loads = [
                        *load((tma_r, cute.domain_offset((0, begin), tR), sR), body.of_rows, at[0], at[2], rank),
                        *load((tma_s, cute.domain_offset((0, begin), tS), sS), body.of_columns, at[1], at[2], rank),
                    ]
                    stage, phase = produce(loads, full, empty, stage, phase, cute.ceil_div(rows, body.tile_k))
                if const_expr(body.dependent):
                    cute.arch.griddepcontrol_launch_dependents()  # their setup then runs behind the last products
        else:
            cute.arch.setmaxregister_increase(body.registers[1])
            consume(
                tid, group, rank, walk, tiles, tiled_mma, sR, sS, (full, empty, landed, turns), storage, mEnds, depth,
                (tma_d, tD, None, None, None, Float32(1.0), Float32(0.0)),
            )  # fmt: skip
        if const_expr(body.cluster > 1):  # the other CTA's copies and arrivals need this one's shared memory
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def span(self, mEnds: cute.Tensor, group: Int32, depth: Int32) -> tuple[Int32, Int32]:
        """Where the rows of ``group`` begin, and how many there are; ends may be anything and are clamped."""
        begin = cutlass.min(cutlass.max(mEnds[group], Int32(0)), depth)
        end = cutlass.min(cutlass.max(mEnds[group + 1], begin), depth)
        return begin, end - begin

    @cute.jit
    def consume(
        self,
        tid: Int32,
        group: Int32,
        rank: Int32,
        walk: tuple[Int32, Int32, Int32],
        tiles: tuple[Int32, Int32, Int32],
        tiled_mma: cute.TiledMma,
        sR: cute.Tensor,
        sS: cute.Tensor,
        barriers: tuple[cute.Pointer, cute.Pointer, cute.Pointer, cute.Pointer],
        storage: cute.Pointer,
        mEnds: cute.Tensor,
        depth: Int32,
        operands: tuple,
    ):
        """A multiplying group's tiles, one after the other."""
        body, smem, results = self.product, self.product.smem, self.product.results
        first, count, step = walk
        full, empty, landed, turns = barriers
        member = tid % GROUP
        fragments, place, skip, span = body.fragments, body.place, body.pipeline.skip, self.span
        begin, deliver, finish, multiply = results.begin, results.deliver, results.finish, self.multiply
        rR, rS, acc = fragments(group, tiled_mma, sR, sS)
        at_boxes = storage + smem.boxes_at + group * (smem.boxes * smem.box_bytes)
        at_bias = cute.recast_ptr(storage + smem.biases_at, dtype=Float32)
        landed = landed + group * smem.boxes
        extents = cute.size(operands[1], mode=[0]), cute.size(operands[1], mode=[1])
        below = group * ROWS if const_expr(not body.pingpong) else Int32(0)  # this group's first row of a tile

        stage, phase, used, turn = Int32(0), Int32(0), Int32(0), Int32(1) - group
        stride = step
        if const_expr(body.pingpong):
            if group == 1:
                _, _, other = place(first, rank, tiles, extents)
                _, rows = span(mEnds, other, depth)
                stage, phase = skip(stage, phase, cute.ceil_div(rows, body.tile_k))
                first = first + step
            stride = step * 2
        for tile in cutlass.range(first, count, stride, unroll=1):
            row, column, layer = place(tile, rank, tiles, extents)
            corner = (row + below, column, layer)
            begin(member, corner, row, at_boxes, at_bias, landed, used, operands)
            if const_expr(body.pingpong):
                cute.arch.mbarrier_wait(turns + group, turn)
                turn = turn ^ 1
            acc.fill(0.0)
            _, rows = span(mEnds, layer, depth)
            stage, phase = multiply(
                member, group, tiled_mma, acc, rR, rS, sR, sS, storage, full, empty, turns, stage, phase, rows
            )
            if const_expr(body.pingpong):
                _, _, other = place(cutlass.min(tile + step, count - 1), rank, tiles, extents)
                _, rows = span(mEnds, other, depth)
                stage, phase = skip(stage, phase, cute.ceil_div(rows, body.tile_k))
            deliver(member, group, acc, corner, below, at_boxes, at_bias, landed, used, operands)
            used = used + results.count
        finish(member)

    @cute.jit
    def multiply(
        self,
        member: Int32,
        group: Int32,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        rR: cute.Tensor,
        rS: cute.Tensor,
        sR: cute.Tensor,
        sS: cute.Tensor,
        storage: cute.Pointer,
        full: cute.Pointer,
        empty: cute.Pointer,
        turns: cute.Pointer,
        stage: Int32,
        phase: Int32,
        rows: Int32,
    ) -> tuple[Int32, Int32]:
        """The mainloop of a tile ``rows`` deep."""
        body = self.product
        advance, release, clear = body.pipeline.advance, body.pipeline.release, self.clear
        whole = rows // body.tile_k
        rest = rows - whole * body.tile_k
        before = Int32(0)
        for k_tile in cutlass.range(whole, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(body.tile_k // STEP):
                cute.gemm(tiled_mma, acc, rR[None, None, kb, stage], rS[None, None, kb, stage], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            release(member, empty, before, k_tile > 0)
            before = stage
            stage, phase = advance(stage, phase)
        if rest > 0:
            cute.arch.mbarrier_wait(full + stage, phase)
            steps = cute.ceil_div(rest, STEP)
            clear(member, storage, sR, body.tile_m, stage, rest, steps * STEP)
            clear(member, storage + body.smem.columns_at, sS, body.tile_n, stage, rest, steps * STEP)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=GROUP)
            warpgroup.wait_group(0)
            release(member, empty, before, whole > 0)
            before = stage
            warpgroup.fence()
            for kb in cutlass.range(steps, unroll=1):
                cute.gemm(tiled_mma, acc, rR[None, None, kb, stage], rS[None, None, kb, stage], acc)
            warpgroup.commit_group()
            stage, phase = advance(stage, phase)
        if const_expr(body.pingpong):  # noqa: SIM102  known when compiled
            if member == 0:
                cute.arch.mbarrier_arrive(turns + (group ^ 1))
        warpgroup.wait_group(0)
        release(member, empty, before, rows > 0)
        return stage, phase

    @cute.jit
    def clear(
        self,
        member: Int32,
        storage: cute.Pointer,
        sX: cute.Tensor,
        extent: cutlass.Constexpr[int],
        stage: Int32,
        first: Int32,
        end: Int32,
    ):
        """Zeros rows ``first`` to ``end`` of a stage of an operand, ``extent`` wide: ``sX`` (extent, K, STAGE)."""
        pieces = const_expr(extent // WIDEST)
        base = storage.toint().to(Int32)
        for i in cutlass.range(member, (end - first) * pieces, GROUP, unroll=1):
            at = cute.crd2idx((i % pieces * WIDEST, first + i // pieces, stage), sX.layout) * 2
            shared_vector(Int16, base + swizzled(at, 128)).fill(0)
