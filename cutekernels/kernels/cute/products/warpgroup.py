"""GEMM, warpgroup schedule: ``out = act(alpha * A @ B + beta * C + bias)`` in any layout, by TMA and warpgroup MMA.

Roles:
    A persistent grid walks over the tiles. In a CTA the last warp group is the producer: its first warp issues TMA
    loads of both operands, ``stages`` ahead and across the ends of tiles; its other three warps are idle. The
    other ``groups`` are consumer warp groups: they multiply straight from shared memory, whichever extent is
    contiguous there, and store. setmaxnreg moves registers from the producer to them (``registers``). Two arrangements:
    *cooperative*: the consumer groups share a tile; group g has rows 64 * g to 64 * g + 63 of every 64 * groups.
    *ping-pong*: two consumer groups have every second tile of the CTA each. The second group starts with the CTA's
    second tile, passes over the stages of the first, and waits until the first group has issued all its products; from
    then on the groups issue their mainloops in turns, so that one's epilogue runs behind the other's products.

Barriers (all mbarriers but the last; one phase bit each):
    full[stage]: 1 arrival, the producer's with the stage's bytes; TMA completes it. The consumers wait.
    empty[stage]: 1 arrival for each consumer group that reads the stage, of each CTA in the cluster. The producer
        waits; with a cluster its multicast writes to both CTAs' stages, so the readers of both must be done.
    c_full[group, box]: 1 arrival with a box's bytes: a box of C has landed. The group that asked for it waits.
    order[group]: 1 arrival, by thread 0 of the other group, which has issued its products (ping-pong alone).
    Named barriers 1, 2, ...: the 128 threads of a consumer group, around its boxes (``parts/boxes.py``).

One k-tile, producer: wait empty[stage]; arrive on full[stage] with the bytes; TMA both operands; next stage.
One k-tile, consumer: wait full[stage]; issue ``tile_k / 16`` wgmmas, commit; wait for those of the k-tile before;
    arrive on its empty; next stage. One k-tile's products are always under way.
One tile, consumer: start C's first boxes and fetch the bias; in ping-pong wait for order; mainloop; arrive on the
    other's order; wait for the last products; boxes of 64 x 64 through swizzled shared memory, by stmatrix and TMA.

Ends:
    The TMA fills a ragged K with zeros, and clips stores at the ends of out; nothing is masked in the kernel. The last
    tiles of rows and columns begin early, to end where out does (``place``), but not with C.

Cluster of two CTAs, along rows or columns: each loads half of the operand that both need and multicasts it.
Dependent launch (PDL): barriers are set up while the previous kernel still runs.
``swap_ab`` computes ``out^T = B^T A^T``, so that out's columns are the side that advances by 64.
*Gated* (``results.gate``), B's columns are gates and, behind all of them, what they multiply. A tile has equally many
of both, in two boxes to a stage, one behind the other, so that a pair's accumulators meet in one thread.

Refuses (``ops/products/schedules/warpgroup.py``): GPUs without wgmma, rows that are not 16-byte aligned, 64-bit
strides, K = 0, fewer than 32 rows or columns, a C whose contiguous extent is not out's.

Source:
    CUTLASS's warp-specialized mainloops for Hopper, cooperative and pingpong, and QuACK's arrangement of them in
    the CuTe DSL. Here both are one body, the last box of a tile begins early rather than being narrow, and any
    multiple of 8 may be a tile's columns.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cutekernels.kernels.cute.parts.boxes import FIRST_BARRIER, BoxOperands, Corner, ResultBoxes
from cutekernels.kernels.cute.parts.dependent import pdl_wait
from cutekernels.kernels.cute.parts.fragments import shared_tensor, swizzled
from cutekernels.kernels.cute.parts.gemm_arguments import GemmBody, GemmOperands, transpose
from cutekernels.kernels.cute.parts.heads import WIDEST, shared_vector
from cutekernels.kernels.cute.parts.pipeline import Position, StagePipeline
from cutekernels.kernels.cute.parts.schedule import Raster
from cutekernels.kernels.cute.parts.smem import SWIZZLED, SWIZZLED_ROWS, WarpgroupSmem
from cutekernels.kernels.cute.parts.tile_source import Share, TileSource, TileWalk
from cutekernels.kernels.cute.parts.warp_groups import GROUP, BoxLoad, TmaTensor, wgmma
from cutekernels.kernels.cute.products.warp_specialized import Shared, WarpSpecialized

STEP = 16  # of a k-tile: a k-block


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
class Operand:
    """An operand's TMA load, its coordinates in global memory and its stages in shared memory."""

    box: TmaTensor  # (rows, K[, L])
    sX: cute.Tensor  # (rows, K, STAGE)
    side: Side
    along: str  # a tile's "row" or "column"


@dataclass(frozen=True)
class Cta:
    """A CTA's part of the product, for all of its roles."""

    shared: Shared
    block: Int32
    blocks: Int32 | None  # of the grid, where all are known to have a share
    cluster: int  # CTAs
    operands: tuple[Operand, Operand]  # in the order of their loads
    tiled_mma: cute.TiledMma
    outputs: BoxOperands

    @property
    def rank(self) -> Int32:
        """In its cluster."""
        return self.block % self.cluster


@dataclass(frozen=True)
class Consumer:
    """State of a consumer warp group from its first tile to its last."""

    thread: Int32  # 0 to 127, in the group
    group: Int32
    cta: Cta
    rR: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K, STAGE)
    rS: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K, STAGE)
    acc: cute.Tensor  # ((2, 2, N / 8), MMA_M, 1)


@dataclass(frozen=True)
class WarpgroupGemm(GemmBody, WarpSpecialized):
    """The body. ``rows_k_major`` and ``columns_k_major`` say how the operands of tile rows and columns lie."""

    smem: WarpgroupSmem
    pingpong: bool
    cluster_m: int
    cluster_n: int
    raster: Raster
    rows_k_major: bool
    columns_k_major: bool
    accumulate: type[cutlass.Numeric]
    results: ResultBoxes
    swap_ab: bool
    resident: int  # most CTAs in the grid
    dependent: bool  # launched under programmatic dependent launch
    source: ClassVar[type[TileSource]] = TileWalk
    ctas_per_sm: ClassVar[int] = 1

    @property
    def sharing(self) -> int:
        """Consumer groups that share a tile."""
        return WarpgroupSmem.sharing(self.smem.tile_m, self.pingpong)

    @property
    def groups(self) -> int:
        """Consumer warp groups."""
        return self.smem.groups

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def cluster_shape(self) -> list[int]:
        return [self.cluster, 1, 1]

    @property
    def shifted(self) -> bool:
        """Whether the last tiles begin early. With C they do not, since out may be C, and what another tile has stored
        would be added again.
        """
        return not self.results.source

    @property
    def of_rows(self) -> Side:
        return Side(self.smem.tile_m, self.cluster_n, self.results.gate == "m")

    @property
    def of_columns(self) -> Side:
        return Side(self.smem.tile_n, self.cluster_m, self.results.gate == "n")

    @property
    def pipeline(self) -> StagePipeline:
        return StagePipeline(self.smem.stages, self.smem.stage_bytes, self.sharing, self.cluster)

    def layouts(self, dtype: type[cutlass.Numeric]) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """The stages of both operands, ``(rows, K, STAGE)``."""
        tile = (self.smem.tile_m, self.smem.tile_n, self.smem.tile_k)
        rows = LayoutEnum.ROW_MAJOR if self.rows_k_major else LayoutEnum.COL_MAJOR
        columns = LayoutEnum.ROW_MAJOR if self.columns_k_major else LayoutEnum.COL_MAJOR
        return (
            hopper_helpers.make_smem_layout_a(rows, tile, dtype, self.smem.stages),
            hopper_helpers.make_smem_layout_b(columns, tile, dtype, self.smem.stages),
        )

    def mma(self, dtype: type[cutlass.Numeric]) -> cute.TiledMma:
        """The product of a tile by the groups that share it."""
        k_major, other = OperandMajorMode.K, OperandMajorMode.MN
        majors = (k_major if self.rows_k_major else other, k_major if self.columns_k_major else other)
        return wgmma(dtype, self.smem.tile_n, majors, self.sharing, self.accumulate)

    def halves(self, side: Side) -> cute.Layout:
        """A gated side's stages as gates, then what they multiply: ``(rows / 2, K, 2 * STAGE)``, without the swizzle.
        A row of ``tile_k`` is one swizzled line.
        """
        shape = ((SWIZZLED_ROWS, side.box // SWIZZLED_ROWS), self.smem.tile_k, 2 * self.smem.stages)
        return cute.make_layout(shape, stride=((SWIZZLED, SWIZZLED_ROWS * SWIZZLED), 1, side.box * SWIZZLED))

    def tma_of(self, mX: cute.Tensor, rows: bool) -> TmaTensor:
        """The TMA load of a box of the operand of tile rows, or of columns, into one stage."""
        layout = self.layouts(mX.element_type)[0 if rows else 1]
        side = self.of_rows if rows else self.of_columns
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if side.sharers > 1 else cpasync.CopyBulkTensorTileG2SOp()
        stages = self.halves(side) if side.gated else layout.outer
        # slice_ of the whole layout aborts the compiler where 16 does not divide the rows.
        layout = cute.make_composed_layout(layout.inner, 0, cute.select(stages, mode=[0, 1]))
        box = (side.box, self.smem.tile_k)
        return TmaTensor(*cpasync.make_tiled_tma_atom(op, mX, layout, box, num_multicast=side.parts))

    @cute.jit
    def extend(self, given: GemmOperands, stream: cuda.CUstream):
        mA, mB, epilogue = given.mA, given.mB, given.epilogue
        if const_expr(given.norm is not None):
            mB = transpose(mB)  # (K, N)
        rows_contiguous = const_expr(self.results.rows_contiguous)
        # Tile rows R and tile columns S: A and B, or, swapped, B and A.
        mR, mS = (mB, mA) if const_expr(self.swap_ab) else (mA, mB)
        mR = self.prepare(mR, self.swap_ab, not self.rows_k_major)  # (M, K[, L])
        mS = self.prepare(mS, not self.swap_ab, not self.columns_k_major)  # (N, K[, L])
        mD = self.prepare(given.mD, self.swap_ab, rows_contiguous)  # (M, N[, L])
        rows, columns = self.tma_of(mR, True), self.tma_of(mS, False)
        # Out leaves, and C comes in, by the same boxes of 64 x 64.
        out, source = self.results.tma(cpasync.CopyBulkTensorTileS2GOp(), mD), None
        if const_expr(epilogue.mC is not None):
            mC = self.prepare(epilogue.mC, self.swap_ab, rows_contiguous)
            source = self.results.tma(cpasync.CopyBulkTensorTileG2SOp(), mC)
        tiled_mma = self.mma(self.results.dtype)
        # As many CTAs as are resident at once, whole clusters, or fewer where there are fewer tiles.
        layers = cute.size(mD, mode=[2]) if const_expr(cute.rank(mD) == 3) else Int32(1)
        tiles = (*self.tiles(mD), layers)
        blocks = self.ctas(tiles[0] * tiles[1] * layers)
        outputs = BoxOperands(out, source, epilogue.mBias, epilogue.alpha, epilogue.beta, own=epilogue.own)
        self.launch((rows, columns, outputs, given.workspace, tiled_mma, tiles), [blocks, 1, 1], stream)

    @cute.jit
    def tiles(self, mD: cute.Tensor) -> tuple[Int32, Int32]:
        """Tiles of clusters along M and N of out (M, N[, L])."""
        tiles_m = cute.ceil_div(cute.size(mD, mode=[0]), self.smem.tile_m * self.cluster_m)
        return tiles_m, cute.ceil_div(cute.size(mD, mode=[1]), self.results.columns * self.cluster_n)

    @cute.jit
    def ctas(self, tiles: Int32) -> Int32:
        """CTAs of the grid, for so many tiles of clusters."""
        return cutlass.min(tiles * self.cluster, Int32(self.resident))

    @cute.jit
    def prepare(self, t: cute.Tensor, flipped: cutlass.Constexpr[bool], first: cutlass.Constexpr[bool]):
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
        first: TmaTensor,  # (M, K[, L]), or of groups (T, K)
        second: TmaTensor,  # (N, K[, L])
        outputs: BoxOperands,
        extra: Any,  # the workspace; of groups, their ends and what else is theirs
        tiled_mma: cute.TiledMma,
        tiles: tuple[Int32, Int32, Int32],  # of clusters: along M, along N, layers
    ):
        # -- setup
        block, _, _ = cute.arch.block_idx()
        # Where a ring passes tiles on, only the producer asks how large the grid is.
        blocks = cute.arch.grid_dim()[0] if const_expr(self.source.counted) else None
        role = self.role()
        shared = self.set_up(role[2], (first.tma, second.tma, outputs.out.tma))
        # Nobody touches barriers before they are initialized: neither this CTA's threads nor the other's multicasts.
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if const_expr(self.dependent):
            pdl_wait()
        sides = ((shared.sR, self.of_rows, "row"), (shared.sS, self.of_columns, "column"))
        # Tokens come first where rows are in groups; swapped, they are columns.
        if const_expr(self.source.tokens_first and self.swap_ab):
            sides = sides[::-1]
        cta = Cta(
            shared=shared,
            block=block,
            blocks=blocks,
            cluster=self.cluster,
            operands=(Operand(first, *sides[0]), Operand(second, *sides[1])),
            tiled_mma=tiled_mma,
            outputs=outputs,
        )
        # -- producer and consumers
        self.divide(self.shares(cta, extra, tiles), cta, role)
        if const_expr(self.cluster > 1):
            # Both CTAs wait for each other's end: the other's multicasts and arrivals need this one's shared memory.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def shares(self, cta: Cta, extra: Any, tiles: tuple[Int32, Int32, Int32]) -> TileWalk:
        """The source of this CTA's shares."""
        tiles_m, tiles_n, layers = tiles
        rank, first, step = cta.rank, cta.block // self.cluster, cta.blocks // self.cluster
        k_tiles = cute.ceil_div(cute.size(cta.operands[0].box.coordinates, mode=[1]), self.smem.tile_k)
        return TileWalk(
            body=self,
            rank=rank,
            first=first,
            count=tiles_m * tiles_n * layers,
            step=step,
            tiles_m=tiles_m,
            tiles_n=tiles_n,
            rows=cute.size(cta.outputs.out.coordinates, mode=[0]),
            columns=cute.size(cta.outputs.out.coordinates, mode=[1]),
            k_tiles=k_tiles,
        )

    def stages_at(self, storage: cute.Pointer) -> tuple[cute.Tensor, cute.Tensor]:
        """The stages of both operands."""
        dtype, (layout_r, layout_s) = self.results.dtype, self.layouts(self.results.dtype)
        columns = storage + self.smem.columns_at
        return shared_tensor(storage, layout_r, dtype), shared_tensor(columns, layout_s, dtype)

    @cute.jit
    def init_barriers(self, shared: Shared):
        """One thread's work."""
        self.pipeline.init(shared.full, shared.empty)
        # One arrival each: c_full of all boxes, then order of all groups.
        for i in cutlass.range_constexpr(self.groups * (self.smem.boxes + 1)):
            cute.arch.mbarrier_init(shared.c_full + i, 1)

    @cute.jit
    def place(self, walk: TileWalk, index: Int32) -> Corner:
        """Where this CTA's part of the cluster's tile ``index`` begins. The last tiles begin early, to end where out
        does: docs/notes/gemm.md#boxes.
        """
        tile = self.raster.place(index, walk.tiles_m, walk.tiles_n)
        tile_m, tile_n = tile.m, tile.n
        if const_expr(self.cluster_m > 1):
            tile_m = tile_m * self.cluster_m + walk.rank
        else:
            tile_n = tile_n * self.cluster_n + walk.rank
        # With a gate along N a tile has half as many columns of out as the MMA has.
        row, column = tile_m * self.smem.tile_m, tile_n * self.results.columns
        if const_expr(self.shifted):
            row = cutlass.max(cutlass.min(row, walk.rows - self.smem.tile_m), Int32(0))
            column = cutlass.max(cutlass.min(column, walk.columns - self.results.columns), Int32(0))
        return Corner(row, column, tile.layer)

    # ---- producer

    @cute.jit
    def load(self, cta: Cta, source: TileSource, share: Share, at: Position) -> Position:
        """The loads of a share's k-tiles. Returns the position behind."""
        # A CTA's boxes of both operands, one or two each.
        loads = []
        for operand in cta.operands:
            loads += self.boxes_of(operand, share, cta.rank)
        share = source.cut(share)
        for k_tile in cutlass.range(share.begin, share.k_end, unroll=1):
            # Wait until the consumers, of both CTAs in a cluster, have read the stage; then announce its bytes.
            self.pipeline.acquire(cta.shared.full, cta.shared.empty, at.stage, at.phase)
            # All boxes of the stage complete the same full barrier; multicast ones complete it in both CTAs.
            for i in cutlass.range_constexpr(len(loads)):
                filled = at.stage if const_expr(loads[i].half is None) else 2 * at.stage + loads[i].half
                cute.copy(
                    loads[i].tma,
                    loads[i].source[None, k_tile],
                    loads[i].target[None, filled],
                    tma_bar_ptr=cta.shared.full + at.stage,
                    mcast_mask=loads[i].mask,
                )
            at = self.pipeline.next(at)
        return at

    @cute.jit
    def boxes_of(self, operand: Operand, share: Share, rank: Int32) -> list[BoxLoad]:
        """The loads of an operand's rows. Gated, those are two boxes, the other one as many rows further as there are
        gates; CTAs that share them load one each.
        """
        side, first = operand.side, getattr(share.corner, operand.along)
        mask = Int16((1 << self.cluster) - 1) if const_expr(side.sharers > 1) else None
        if const_expr(not side.gated):
            return [replace(self.partition(operand, first, share, rank), mask=mask)]
        loads = []
        # Gated: gates into the stage's first half, what they multiply into its second. CTAs that share load one each.
        gates = cute.size(operand.box.coordinates, mode=[0]) // 2
        halves = replace(operand, sX=cute.make_tensor(operand.sX.iterator, self.halves(side)))
        for i in cutlass.range_constexpr(2 // side.sharers):
            half = rank if const_expr(side.sharers > 1) else Int32(i)
            loads.append(replace(self.partition(halves, first + half * gates, share, rank), mask=mask, half=half))
        return loads

    @cute.jit
    def partition(self, operand: Operand, first: Int32, share: Share, rank: Int32) -> BoxLoad:
        """The loads of a box from row ``first`` on: this CTA's part of it."""
        side, tX = operand.side, operand.box.coordinates
        if const_expr(share.row is not None):
            # The tile's depth begins at a row of both operands.
            tX = cute.domain_offset((0, share.row), tX)
        if const_expr(cute.rank(tX) == 3):
            tX = tX[None, None, share.corner.layer]
        part = rank if const_expr(side.parts > 1) else Int32(0)
        return TmaTensor(operand.box.tma, tX).loads(operand.sX, first, (side.box, self.smem.tile_k), part, side.parts)

    # ---- consumers

    @cute.jit
    def consumer(self, cta: Cta, tid: Int32, group: Int32) -> Consumer:
        """A group's descriptors of both operands' stages, and its accumulators."""
        tiled_mma = cta.tiled_mma
        # Cooperative, the MMA's tile has the rows of all groups; in ping-pong each group's is its own.
        share = group * GROUP if const_expr(not self.pingpong) else Int32(0)
        of_group = tiled_mma.get_slice(share)
        rR = tiled_mma.make_fragment_A(of_group.partition_A(cta.shared.sR))
        rS = tiled_mma.make_fragment_B(of_group.partition_B(cta.shared.sS))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((self.smem.tile_m, self.smem.tile_n)), self.accumulate)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        return Consumer(tid % GROUP, group, cta, rR, rS, acc)

    @cute.jit
    def multiply(self, consumer: Consumer, share: Share, at: Position) -> Position:
        """The mainloop of one share. Returns the position behind its last k-tile."""
        shared, before, whole = consumer.cta.shared, Int32(0), share.count
        if const_expr(share.depth is not None):
            # The last k-tile may have rows of the next group.
            whole = share.depth // self.smem.tile_k
            rest = share.depth - whole * self.smem.tile_k
        for k_tile in cutlass.range(whole, unroll=1):
            # Wait until the TMA has filled the stage.
            cute.arch.mbarrier_wait(shared.full + at.stage, at.phase)
            # Accumulators in registers are ordered before the products that read them.
            warpgroup.fence()
            for kb in cutlass.range_constexpr(self.smem.tile_k // STEP):
                self.multiply_step(consumer, kb, at.stage)
            warpgroup.commit_group()
            # Waits for the products of the k-tile before: the producer may refill its stage; these go on.
            warpgroup.wait_group(1)
            self.pipeline.release(consumer.thread, shared.empty, before, k_tile > 0)
            before = at.stage
            at = self.pipeline.next(at)
        if const_expr(share.depth is not None):  # noqa: SIM102  known when compiled
            if rest > 0:
                # The ragged k-tile: its first ``rest`` rows are the group's, the others the next one's.
                cute.arch.mbarrier_wait(shared.full + at.stage, at.phase)
                steps = cute.ceil_div(rest, STEP)
                self.clear(consumer, shared.storage, shared.sR, at.stage, (rest, steps * STEP))
                columns = shared.storage + self.smem.columns_at
                self.clear(consumer, columns, shared.sS, at.stage, (rest, steps * STEP))
                # The tensor cores see this thread's zeros, and the group multiplies when all its threads have written.
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=FIRST_BARRIER + consumer.group, number_of_threads=GROUP)
                # The last whole k-tile's products are done: its stage goes back to the producer.
                warpgroup.wait_group(0)
                self.pipeline.release(consumer.thread, shared.empty, before, whole > 0)
                before = at.stage
                warpgroup.fence()
                for kb in cutlass.range(steps, unroll=1):
                    self.multiply_step(consumer, kb, at.stage)
                warpgroup.commit_group()
                at = self.pipeline.next(at)
        if const_expr(self.pingpong):  # noqa: SIM102  known when compiled
            if consumer.thread == 0:
                # Thread 0 has issued all products of this tile: the other group may issue its own after them.
                cute.arch.mbarrier_arrive(shared.order + (consumer.group ^ 1))
        # Waits for the last products: then accumulators may be read, and the producer may refill the last stage, which
        # a group without rows does not have.
        warpgroup.wait_group(0)
        some = Boolean(True) if const_expr(share.depth is None) else share.depth > 0
        self.pipeline.release(consumer.thread, shared.empty, before, some)
        return at

    @cute.jit
    def multiply_step(self, consumer: Consumer, kb: int | Int32, stage: Int32):
        """Issues the products of a k-block."""
        cute.gemm(
            consumer.cta.tiled_mma,
            consumer.acc,
            consumer.rR[None, None, kb, stage],
            consumer.rS[None, None, kb, stage],
            consumer.acc,
        )

    @cute.jit
    def clear(
        self, consumer: Consumer, storage: cute.Pointer, sX: cute.Tensor, stage: Int32, rows: tuple[Int32, Int32]
    ):
        """Zeros rows ``rows[0]`` to ``rows[1]`` of a stage of an operand, ``sX`` (extent, K, STAGE), whose stages begin
        at ``storage``. Groups that share a tile write the same zeros, each for itself.
        """
        # 16 bytes a thread, at the swizzled address; sX's layout has no swizzle.
        first, end = rows
        pieces = const_expr(cute.size(sX, mode=[0]) // WIDEST)
        base = storage.toint().to(Int32)
        for i in cutlass.range(consumer.thread, (end - first) * pieces, GROUP, unroll=1):
            at = cute.crd2idx((i % pieces * WIDEST, first + i // pieces, stage), sX.layout) * 2
            shared_vector(Int16, base + swizzled(at, 128)).fill(0)
