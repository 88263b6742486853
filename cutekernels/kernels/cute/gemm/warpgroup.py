"""GEMM, warpgroup schedule: ``out = act(alpha * A @ B + beta * C + bias)`` in any layout, by TMA and warpgroup MMA.

Schedule:
    A persistent grid walks over the tiles. In each CTA one warp loads by TMA, ``stages`` ahead, across the ends of
    tiles; warp groups multiply straight from shared memory, whichever extent is contiguous there. Full and empty
    barriers (``parts/pipeline.py``) are all that they share. Two arrangements of the groups:
    *cooperative*: the groups share a tile, 64 or 128 rows each.
    *pingpong*: each of two groups has a tile of its own, and they multiply in turns, so that one's epilogue runs
    behind the other's mainloop.
    With a cluster of two CTAs, along rows or columns, each loads half of the operand that both need and multicasts it.
    A dependent launch sets up its barriers while the kernel ahead still runs.
    Registers go from the loading warp group to the others (setmaxnreg). Results leave by boxes of 64 x 64 through
    swizzled shared memory (stmatrix) and TMA stores, which clip at the ends of out; C comes in by the same boxes.
    ``swapped`` computes ``out^T = B^T A^T``, so that out's columns are the side that advances by 64.
    *Gated* (``results.gate``), B's columns are gates and, behind all of them, what they multiply. A tile has equally
    many of both, in two boxes to a stage, one behind the other, so that a pair's sums meet in one thread.

Source:
    CUTLASS's warp-specialized mainloops for Hopper, cooperative and pingpong, and QuACK's arrangement of them in
    the CuTe DSL. Here both are one body, the last box of a tile begins early rather than being narrow, and any
    multiple of 8 may be a tile's columns.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cutekernels.kernels.cute.parts.boxes import ResultBoxes
from cutekernels.kernels.cute.parts.pipeline import StagePipeline
from cutekernels.kernels.cute.parts.schedule import Raster
from cutekernels.kernels.cute.parts.smem import ALIGNMENT, SWIZZLED, SWIZZLED_ROWS, WarpgroupSmem

GROUP = 128  # threads of a warp group
ROWS = 64  # that it multiplies at once


@dataclass(frozen=True)
class Side:
    """An operand's part of a tile: so many rows, the CTAs that share them, and whether half of them are gates."""

    rows: int
    sharers: int
    gated: bool

    @property
    def box(self) -> int:
        """Rows that one TMA load and the sharers' of the same time bring."""
        return self.rows // 2 if self.gated else self.rows

    @property
    def parts(self) -> int:
        """Parts of a box, each loaded by another sharer. Gated, they load a box each."""
        return 1 if self.gated else self.sharers


@dataclass(frozen=True)
class WarpgroupGemm:
    """The body. ``rows_k_major`` and ``columns_k_major`` say how the operands of tile rows and columns lie."""

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    pingpong: bool
    cluster_m: int
    cluster_n: int
    raster: Raster
    rows_k_major: bool
    columns_k_major: bool
    accumulate: type[cutlass.Numeric]
    results: ResultBoxes
    swapped: bool
    resident: int  # most CTAs in the grid
    dependent: bool  # launched under programmatic dependent launch

    @property
    def sharing(self) -> int:
        """Groups that share a tile."""
        if self.pingpong:
            return 1
        return self.tile_m // ROWS if self.tile_m <= 3 * ROWS else 2

    @property
    def groups(self) -> int:
        """Groups that multiply."""
        return 2 if self.pingpong else self.sharing

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that loads and of one that multiplies."""
        return {1: (40, 232), 2: (40, 232), 3: (32, 160)}[self.groups]

    @property
    def threads(self) -> int:
        return GROUP * (self.groups + 1)

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def of_rows(self) -> Side:
        return Side(self.tile_m, self.cluster_n, self.results.gate == "m")

    @property
    def of_columns(self) -> Side:
        return Side(self.tile_n, self.cluster_m, self.results.gate == "n")

    @property
    def smem(self) -> WarpgroupSmem:
        results = self.results
        biased = results.bias != "none"
        return WarpgroupSmem(self.tile_m, self.tile_n, self.tile_k, self.stages, self.groups, results.boxes, biased)

    @property
    def pipeline(self) -> StagePipeline:
        return StagePipeline(self.stages, self.smem.stage_bytes, self.sharing, self.cluster)

    def layouts(self, dtype: type[cutlass.Numeric]) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """The stages of both operands, ``(rows, K, STAGE)``."""
        tile = (self.tile_m, self.tile_n, self.tile_k)
        rows = LayoutEnum.ROW_MAJOR if self.rows_k_major else LayoutEnum.COL_MAJOR
        columns = LayoutEnum.ROW_MAJOR if self.columns_k_major else LayoutEnum.COL_MAJOR
        return (
            hopper_helpers.make_smem_layout_a(rows, tile, dtype, self.stages),
            hopper_helpers.make_smem_layout_b(columns, tile, dtype, self.stages),
        )

    def mma(self, dtype: type[cutlass.Numeric]) -> cute.TiledMma:
        """The product of a tile by the groups that share it."""
        k_major, other = OperandMajorMode.K, OperandMajorMode.MN
        return hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, k_major if self.rows_k_major else other, k_major if self.columns_k_major else other,
            self.accumulate, (self.sharing, 1, 1), (ROWS, self.tile_n),
        )  # fmt: skip

    def halves(self, side: Side) -> cute.Layout:
        """A gated side's stages as gates, then what they multiply: ``(rows / 2, K, 2 * STAGE)``, without the swizzle.
        A row of ``tile_k`` is one swizzled line.
        """
        shape = ((SWIZZLED_ROWS, side.box // SWIZZLED_ROWS), self.tile_k, 2 * self.stages)
        return cute.make_layout(shape, stride=((SWIZZLED, SWIZZLED_ROWS * SWIZZLED), 1, side.box * SWIZZLED))

    def boxed(self, mX: cute.Tensor, layout: cute.ComposedLayout, side: Side) -> tuple[cute.CopyAtom, cute.Tensor]:
        """The TMA load of a box of an operand into one stage of ``layout``."""
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if side.sharers > 1 else cpasync.CopyBulkTensorTileG2SOp()
        stages = self.halves(side) if side.gated else layout.outer
        # slice_ of the whole layout aborts the compiler where 16 does not divide the rows.
        layout = cute.make_composed_layout(layout.inner, 0, cute.select(stages, mode=[0, 1]))
        return cpasync.make_tiled_tma_atom(op, mX, layout, (side.box, self.tile_k), num_multicast=side.parts)

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # ([L,] M, N)
        mA: cute.Tensor,  # ([L,] M, K)
        mB: cute.Tensor,  # ([L,] K, N)
        mC: cute.Tensor | None,  # ([L,] M, N)
        mBias: cute.Tensor | None,  # (N,)
        alpha: Float32,
        beta: Float32,
        stream: cuda.CUstream,
    ):
        dtype = mA.element_type
        prepared = self.prepared
        rows_contiguous = const_expr(self.results.rows_contiguous)
        mR = prepared(mA if const_expr(not self.swapped) else mB, self.swapped, not self.rows_k_major)  # (M, K[, L])
        mS = prepared(mB if const_expr(not self.swapped) else mA, not self.swapped, not self.columns_k_major)  # (N, K)
        mD = prepared(mD, self.swapped, rows_contiguous)  # (M, N[, L])
        layout_r, layout_s = self.layouts(dtype)
        tma_r, tR = self.boxed(mR, layout_r, self.of_rows)
        tma_s, tS = self.boxed(mS, layout_s, self.of_columns)
        box, shape = self.results.layout(), self.results.shape
        tma_d, tD = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mD, box, shape)
        tma_c, tC = None, None
        if const_expr(mC is not None):
            mC = prepared(mC, self.swapped, rows_contiguous)
            tma_c, tC = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mC, box, shape)
        tiled_mma = self.mma(dtype)
        layers = cute.size(mD, mode=[2]) if const_expr(cute.rank(mD) == 3) else Int32(1)
        tiles_m = cute.ceil_div(cute.size(mD, mode=[0]), self.tile_m * self.cluster_m)
        tiles_n = cute.ceil_div(cute.size(mD, mode=[1]), self.results.columns * self.cluster_n)
        blocks = cutlass.min(tiles_m * tiles_n * layers * self.cluster, Int32(self.resident))
        self.kernel(
            tma_r, tR, tma_s, tS, tma_d, tD, tma_c, tC, mBias, alpha, beta, tiled_mma, layout_r, layout_s,
            (tiles_m, tiles_n, layers),
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent
            use_pdl=self.dependent,
            stream=stream,
        )  # fmt: skip

    @cute.jit
    def normed(
        self,
        mD: cute.Tensor,  # (M, I)
        mX: cute.Tensor,  # (M, K)
        mW: cute.Tensor,  # (2 * I, K), the gates' rows first
        mBias: None,
        mGamma: None,
        mRstd: None,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        """The gated product, with the arguments of the bodies that take a norm."""
        mW = cute.make_tensor(mW.iterator, cute.select(mW.layout, mode=[1, 0]))  # (K, 2 * I)
        self(mD, mX, mW, None, None, Float32(1.0), Float32(0.0), stream)

    @cute.jit
    def prepared(self, t: cute.Tensor, flipped: cutlass.Constexpr[bool], first: cutlass.Constexpr[bool]):
        """``([L,] X, Y)`` as ``(X, Y[, L])``, or ``(Y, X[, L])`` where ``flipped``; the ``first`` extent of those is
        contiguous, or the second. A stride over one row or layer may be anything, and gets a value valid for the TMA.
        """
        lead = const_expr(cute.rank(t) - 2)
        order = [lead + 1, lead] if const_expr(flipped) else [lead, lead + 1]
        x, y = t.shape[order[0]], t.shape[order[1]]
        length, count = (x, y) if const_expr(first) else (y, x)
        pitch = t.stride[order[1 if first else 0]]
        length = type(pitch)(length)
        pitch = cute.assume(length if count == 1 else pitch, divby=8)
        stride = (1, pitch) if const_expr(first) else (pitch, 1)
        if const_expr(lead == 0):
            return cute.make_tensor(t.iterator, cute.make_layout((x, y), stride=stride))
        layer = cute.assume(length if t.shape[0] == 1 else t.stride[0], divby=8)
        return cute.make_tensor(t.iterator, cute.make_layout((x, y, t.shape[0]), stride=(*stride, layer)))

    @cute.kernel
    def kernel(
        self,
        tma_r: cute.CopyAtom,
        tR: cute.Tensor,  # (M, K[, L]), coordinates
        tma_s: cute.CopyAtom,
        tS: cute.Tensor,  # (N, K[, L]), coordinates
        tma_d: cute.CopyAtom,
        tD: cute.Tensor,  # (M, N[, L]), coordinates
        tma_c: cute.CopyAtom | None,
        tC: cute.Tensor | None,
        mBias: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        tiled_mma: cute.TiledMma,
        layout_r: cute.ComposedLayout,
        layout_s: cute.ComposedLayout,
        tiles: tuple[Int32, Int32, Int32],  # of clusters: along M, along N, layers
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(tid // GROUP)
        warp = cute.arch.make_warp_uniform(tid // 32)
        loading = const_expr(self.groups)  # the group that loads
        furnish, ready = self.furnish, self.ready
        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=ALIGNMENT)
        sR, sS, full, empty, landed, turns = furnish(storage, layout_r, layout_s)
        ready(warp, (tma_r, tma_s, tma_d), full, empty, landed)

        rank = block % self.cluster
        first, step = block // self.cluster, blocks // self.cluster
        place, load, produce, consume = self.place, self.load, self.produce, self.consume
        k_tiles = cute.ceil_div(cute.size(tR, mode=[1]), self.tile_k)
        count = tiles[0] * tiles[1] * tiles[2]
        extents = cute.size(tD, mode=[0]), cute.size(tD, mode=[1])
        if group == loading:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 4 * loading:
                stage, phase = Int32(0), Int32(1)
                for tile in cutlass.range(first, count, step, unroll=1):
                    at = place(tile, rank, tiles, extents)
                    loads = [
                        *load((tma_r, tR, sR), self.of_rows, at[0], at[2], rank),
                        *load((tma_s, tS, sS), self.of_columns, at[1], at[2], rank),
                    ]
                    stage, phase = produce(loads, full, empty, stage, phase, k_tiles)
                if const_expr(self.dependent):
                    cute.arch.griddepcontrol_launch_dependents()  # their setup then runs behind the last products
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            consume(
                tid, group, rank, (first, count, step), tiles, tiled_mma, sR, sS, full, empty, landed, turns, k_tiles,
                storage, (tma_d, tD, tma_c, tC, mBias, alpha, beta),
            )  # fmt: skip
        if const_expr(self.cluster > 1):  # the other CTA's copies and arrivals need this one's shared memory
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def furnish(self, storage: cute.Pointer, layout_r: cute.ComposedLayout, layout_s: cute.ComposedLayout):
        """Stages and barriers in shared memory: ``(sR, sS, full, empty, landed, turns)``."""
        smem, dtype = self.smem, self.results.dtype
        at_r = cute.recast_ptr(storage, layout_r.inner, dtype)
        at_s = cute.recast_ptr(storage + smem.columns_at, layout_s.inner, dtype)
        sR = cute.make_tensor(at_r, layout_r.outer)  # (M, K, STAGE)
        sS = cute.make_tensor(at_s, layout_s.outer)  # (N, K, STAGE)
        full = cute.recast_ptr(storage + smem.barriers_at, dtype=Int64)
        empty = full + self.stages
        landed = empty + self.stages  # a barrier for each box of C
        turns = landed + self.groups * smem.boxes
        return sR, sS, full, empty, landed, turns

    @cute.jit
    def ready(
        self,
        warp: Int32,
        tmas: tuple[cute.CopyAtom, cute.CopyAtom, cute.CopyAtom],
        full: cute.Pointer,
        empty: cute.Pointer,
        landed: cute.Pointer,
    ):
        """Barriers initialized for every thread of the cluster, and the kernel ahead at its end."""
        if warp == 4 * self.groups:
            cpasync.prefetch_descriptor(tmas[0])
            cpasync.prefetch_descriptor(tmas[1])
            cpasync.prefetch_descriptor(tmas[2])
            with cute.arch.elect_one():
                init = self.pipeline.init
                init(full, empty)
                for i in cutlass.range_constexpr(self.groups * (self.smem.boxes + 1)):
                    cute.arch.mbarrier_init(landed + i, 1)
            cute.arch.mbarrier_init_fence()
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if const_expr(self.dependent):
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def place(
        self, tile: Int32, rank: Int32, tiles: tuple[Int32, Int32, Int32], extents: tuple[Int32, Int32]
    ) -> tuple[Int32, Int32, Int32]:
        """``(first row, first column, layer)`` of the CTA ``rank`` of a cluster in its ``tile``. The last tiles begin
        early, to end where out does: docs/notes/gemm.md#boxes. With C they do not, since out may be C, and what another
        tile has stored would be added again.
        """
        locate = self.raster.place
        at_m, at_n, layer = locate(tile, tiles[0], tiles[1])
        if const_expr(self.cluster_m > 1):
            at_m = at_m * self.cluster_m + rank
        else:
            at_n = at_n * self.cluster_n + rank
        row, column = at_m * self.tile_m, at_n * self.results.columns
        if const_expr(not self.results.source):
            row = cutlass.max(cutlass.min(row, extents[0] - self.tile_m), Int32(0))
            column = cutlass.max(cutlass.min(column, extents[1] - self.results.columns), Int32(0))
        return row, column, layer

    @cute.jit
    def produce(
        self, loads: list, full: cute.Pointer, empty: cute.Pointer, stage: Int32, phase: Int32, k_tiles: Int32
    ) -> tuple[Int32, Int32]:
        """The loads of one tile, each ``(copy, source (TMA, k), target (TMA, STAGE), mask of CTAs, half or None)``. Of
        halves a target has ``2 * STAGE``.
        """
        acquire, advance = self.pipeline.acquire, self.pipeline.advance
        for k_tile in cutlass.range(k_tiles, unroll=1):
            acquire(full, empty, stage, phase)
            for i in cutlass.range_constexpr(len(loads)):
                tma, source, target, mask, half = loads[i]
                filled = stage if const_expr(half is None) else 2 * stage + half
                cute.copy(tma, source[None, k_tile], target[None, filled], tma_bar_ptr=full + stage, mcast_mask=mask)
            stage, phase = advance(stage, phase)
        return stage, phase

    @cute.jit
    def load(
        self,
        operand: tuple[cute.CopyAtom, cute.Tensor, cute.Tensor],
        side: cutlass.Constexpr[Side],
        at: Int32,
        layer: Int32,
        rank: Int32,
    ) -> list:
        """What :meth:`produce` takes for an operand's rows from ``at`` on. Gated, those are two boxes, the other one as
        many rows further as there are gates; CTAs that share them load one each.
        """
        tma, tX, sX = operand
        partitioned = self.partitioned
        mask = Int16((1 << self.cluster) - 1) if const_expr(side.sharers > 1) else None
        if const_expr(not side.gated):
            return [(tma, *partitioned(operand, side, at, layer, rank), mask, None)]
        loads = []
        gates = cute.size(tX, mode=[0]) // 2
        halves = tma, tX, cute.make_tensor(sX.iterator, self.halves(side))
        for i in cutlass.range_constexpr(2 // side.sharers):
            half = rank if const_expr(side.sharers > 1) else Int32(i)
            loads.append((tma, *partitioned(halves, side, at + half * gates, layer, rank), mask, half))
        return loads

    @cute.jit
    def partitioned(
        self,
        operand: tuple[cute.CopyAtom, cute.Tensor, cute.Tensor],
        side: cutlass.Constexpr[Side],
        at: Int32,
        layer: Int32,
        rank: Int32,
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Source ``(TMA, k)`` and target ``(TMA, STAGE)`` of a box from ``at`` on: this CTA's part of it."""
        tma, tX, sX = operand
        tX = tX[None, None, layer] if const_expr(cute.rank(tX) == 3) else tX
        gX = cute.local_tile(cute.domain_offset((at, 0), tX), (side.box, self.tile_k), (0, None))  # (rows, K, k)
        part = rank if const_expr(side.parts > 1) else Int32(0)
        target, source = cpasync.tma_partition(
            tma, part, cute.make_layout(side.parts), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        return source, target

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
        full: cute.Pointer,
        empty: cute.Pointer,
        landed: cute.Pointer,
        turns: cute.Pointer,
        k_tiles: Int32,
        storage: cute.Pointer,
        operands: tuple,
    ):
        """A multiplying group's tiles, one after the other."""
        first, count, step = walk
        smem, pipeline, results = self.smem, self.pipeline, self.results
        member = tid % GROUP
        fragments = self.fragments
        rR, rS, acc = fragments(group, tiled_mma, sR, sS)
        at_boxes = storage + smem.boxes_at + group * (smem.boxes * smem.box_bytes)
        at_bias = cute.recast_ptr(storage + smem.biases_at + group * (smem.BIASES * 4), dtype=Float32)
        landed = landed + group * smem.boxes
        extents = cute.size(operands[1], mode=[0]), cute.size(operands[1], mode=[1])
        below = group * ROWS if const_expr(not self.pingpong) else Int32(0)  # this group's first row of a tile
        skip, multiply, place = pipeline.skip, self.multiply, self.place
        begin, deliver, finish = results.begin, results.deliver, results.finish

        stage, phase, used, turn = Int32(0), Int32(0), Int32(0), Int32(1) - group
        stride = step
        if const_expr(self.pingpong):
            if group == 1:
                first = first + step
                stage, phase = skip(stage, phase, k_tiles)
            stride = step * 2
        for tile in cutlass.range(first, count, stride, unroll=1):
            row, column, layer = place(tile, rank, tiles, extents)
            corner = (row + below, column, layer)
            begin(member, corner, row, at_boxes, at_bias, landed, used, operands)
            if const_expr(self.pingpong):
                cute.arch.mbarrier_wait(turns + group, turn)
                turn = turn ^ 1
            acc.fill(0.0)
            stage, phase = multiply(member, tiled_mma, acc, rR, rS, full, empty, stage, phase, k_tiles, turns, group)
            if const_expr(self.pingpong):
                stage, phase = skip(stage, phase, k_tiles)
            deliver(member, group, acc, corner, below, at_boxes, at_bias, landed, used, operands)
            used = used + results.count
        finish(member)

    @cute.jit
    def fragments(self, group: Int32, tiled_mma: cute.TiledMma, sR: cute.Tensor, sS: cute.Tensor):
        """A group's descriptors ``(MMA, MMA_M, MMA_K, STAGE)`` of both operands, and its sums."""
        share = group * GROUP if const_expr(not self.pingpong) else Int32(0)
        of_group = tiled_mma.get_slice(share)
        rR = tiled_mma.make_fragment_A(of_group.partition_A(sR))
        rS = tiled_mma.make_fragment_B(of_group.partition_B(sS))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((self.tile_m, self.tile_n)), self.accumulate)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        return rR, rS, acc

    @cute.jit
    def multiply(
        self,
        member: Int32,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        rR: cute.Tensor,
        rS: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        stage: Int32,
        phase: Int32,
        k_tiles: Int32,
        turns: cute.Pointer,
        group: Int32,
    ) -> tuple[Int32, Int32]:
        """The mainloop of one tile; a stage is released when the products of the next are under way."""
        advance, release = self.pipeline.advance, self.pipeline.release
        before = Int32(0)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(self.tile_k // 16):
                cute.gemm(tiled_mma, acc, rR[None, None, kb, stage], rS[None, None, kb, stage], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            release(member, empty, before, k_tile > 0)
            before = stage
            stage, phase = advance(stage, phase)
        if const_expr(self.pingpong):  # noqa: SIM102  known when compiled
            if member == 0:
                cute.arch.mbarrier_arrive(turns + (group ^ 1))
        warpgroup.wait_group(0)
        release(member, empty, before, Boolean(True))
        return stage, phase
