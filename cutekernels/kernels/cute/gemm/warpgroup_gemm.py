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

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from cutekernels.kernels.cute.parts.boxes import BoxBuffers, BoxOperands, Corner, ResultBoxes
from cutekernels.kernels.cute.parts.dependent import pdl_launch, pdl_wait
from cutekernels.kernels.cute.parts.epilogue import EpilogueOperands
from cutekernels.kernels.cute.parts.pipeline import Position, StagePipeline
from cutekernels.kernels.cute.parts.schedule import Raster
from cutekernels.kernels.cute.parts.smem import ALIGNMENT, SWIZZLED, SWIZZLED_ROWS, WarpgroupSmem
from cutekernels.kernels.cute.parts.warp_groups import GROUP, ROWS, TmaTensor, WarpGroupBody, wgmma


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


@dataclass(frozen=True)
class BoxLoad:
    """The loads of a box's k-tiles. A gated operand has two boxes in a stage: ``half`` says which."""

    tma: cute.CopyAtom
    source: cute.Tensor  # (TMA, k)
    target: cute.Tensor  # (TMA, STAGE), or (TMA, 2 * STAGE) of halves
    mask: Int16 | None  # CTAs of the cluster that get it
    half: Int32 | None


@dataclass(frozen=True)
class Shared:
    """Stages and mbarriers of a CTA in shared memory."""

    storage: cute.Pointer
    sR: cute.Tensor  # (M, K, STAGE)
    sS: cute.Tensor  # (N, K, STAGE)
    full: cute.Pointer  # of each stage
    empty: cute.Pointer  # of each stage
    c_full: cute.Pointer  # of each box of each group
    order: cute.Pointer  # of each group


@dataclass(frozen=True)
class Walk:
    """The tiles of out, and those of this CTA's cluster: ``first``, ``first + step``, ... below ``count``."""

    rank: Int32  # of this CTA in its cluster
    first: Int32
    count: Int32
    step: Int32
    tiles_m: Int32  # of clusters
    tiles_n: Int32
    rows: Int32  # of out
    columns: Int32
    k_tiles: Int32 | None = None  # of a tile, where all have as many
    full: Int32 | None = None  # tiles in full waves (``warpgroup_split.py``)


@dataclass(frozen=True)
class Part:
    """The k-tiles of a tile that a CTA multiplies."""

    begin: int | Int32
    count: Int32


@dataclass(frozen=True)
class Consumer:
    """State of a consumer warp group from its first tile to its last."""

    thread: Int32  # 0 to 127, in the group
    group: Int32
    tiled_mma: cute.TiledMma
    rR: cute.Tensor  # descriptors (MMA, MMA_M, MMA_K, STAGE)
    rS: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K, STAGE)
    acc: cute.Tensor  # ((2, 2, N / 8), MMA_M, 1)


@dataclass(frozen=True)
class WarpgroupGemm(WarpGroupBody):
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
    swap_ab: bool
    resident: int  # most CTAs in the grid
    dependent: bool  # launched under programmatic dependent launch

    @property
    def sharing(self) -> int:
        """Consumer groups that share a tile."""
        return WarpgroupSmem.sharing(self.tile_m, self.pingpong)

    @property
    def groups(self) -> int:
        """Consumer warp groups."""
        return 2 if self.pingpong else self.sharing

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def shifted(self) -> bool:
        """Whether the last tiles begin early. With C they do not, since out may be C, and what another tile has stored
        would be added again.
        """
        return not self.results.source

    @property
    def of_rows(self) -> Side:
        return Side(self.tile_m, self.cluster_n, self.results.gate == "m")

    @property
    def of_columns(self) -> Side:
        return Side(self.tile_n, self.cluster_m, self.results.gate == "n")

    @property
    def smem(self) -> WarpgroupSmem:
        tile = (self.tile_m, self.tile_n, self.tile_k)
        return WarpgroupSmem(*tile, self.stages, self.groups, self.results.boxes, self.results.biased)

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
        majors = (k_major if self.rows_k_major else other, k_major if self.columns_k_major else other)
        return wgmma(dtype, self.tile_n, majors, self.sharing, self.accumulate)

    def halves(self, side: Side) -> cute.Layout:
        """A gated side's stages as gates, then what they multiply: ``(rows / 2, K, 2 * STAGE)``, without the swizzle.
        A row of ``tile_k`` is one swizzled line.
        """
        shape = ((SWIZZLED_ROWS, side.box // SWIZZLED_ROWS), self.tile_k, 2 * self.stages)
        return cute.make_layout(shape, stride=((SWIZZLED, SWIZZLED_ROWS * SWIZZLED), 1, side.box * SWIZZLED))

    def tma_of(self, mX: cute.Tensor, layout: cute.ComposedLayout, side: Side) -> TmaTensor:
        """The TMA load of a box of an operand into one stage of ``layout``."""
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if side.sharers > 1 else cpasync.CopyBulkTensorTileG2SOp()
        stages = self.halves(side) if side.gated else layout.outer
        # slice_ of the whole layout aborts the compiler where 16 does not divide the rows.
        layout = cute.make_composed_layout(layout.inner, 0, cute.select(stages, mode=[0, 1]))
        box = (side.box, self.tile_k)
        return TmaTensor(*cpasync.make_tiled_tma_atom(op, mX, layout, box, num_multicast=side.parts))

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
        self.extend(mD, mA, mB, EpilogueOperands(mC, mBias, alpha, beta), stream)

    @cute.jit
    def extend(
        self, mD: cute.Tensor, mA: cute.Tensor, mB: cute.Tensor, operands: EpilogueOperands, stream: cuda.CUstream
    ):
        """With the operands of any epilogue: its own are in ``operands.own`` (``parts/epilogue.py``)."""
        mC = operands.mC
        dtype = mA.element_type
        rows_contiguous = const_expr(self.results.rows_contiguous)
        # Tile rows R and tile columns S: A and B, or, swapped, B and A.
        mR = self.prepare(
            mA if const_expr(not self.swap_ab) else mB, self.swap_ab, not self.rows_k_major
        )  # (M, K[, L])
        mS = self.prepare(
            mB if const_expr(not self.swap_ab) else mA, not self.swap_ab, not self.columns_k_major
        )  # (N, K[, L])
        mD = self.prepare(mD, self.swap_ab, rows_contiguous)  # (M, N[, L])
        layout_r, layout_s = self.layouts(dtype)
        rows = self.tma_of(mR, layout_r, self.of_rows)
        columns = self.tma_of(mS, layout_s, self.of_columns)
        box, shape = self.results.layout(), self.results.shape
        # Out leaves, and C comes in, by the same boxes of 64 x 64.
        tma_d, tD = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mD, box, shape)
        tma_c, tC = None, None
        if const_expr(mC is not None):
            mC = self.prepare(mC, self.swap_ab, rows_contiguous)
            tma_c, tC = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mC, box, shape)
        tiled_mma = self.mma(dtype)
        # As many CTAs as are resident at once, whole clusters, or fewer where there are fewer tiles.
        layers = cute.size(mD, mode=[2]) if const_expr(cute.rank(mD) == 3) else Int32(1)
        tiles_m = cute.ceil_div(cute.size(mD, mode=[0]), self.tile_m * self.cluster_m)
        tiles_n = cute.ceil_div(cute.size(mD, mode=[1]), self.results.columns * self.cluster_n)
        blocks = self.ctas(tiles_m * tiles_n * layers)
        self.kernel(
            rows,
            columns,
            BoxOperands(tma_d, tD, tma_c, tC, operands.mBias, operands.alpha, operands.beta, own=operands.own),
            tiled_mma,
            layout_r,
            layout_s,
            (tiles_m, tiles_n, layers),
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.jit
    def ctas(self, tiles: Int32) -> Int32:
        """CTAs of the grid, for so many tiles of clusters."""
        return cutlass.min(tiles * self.cluster, Int32(self.resident))

    @cute.jit
    def with_norm(
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
        rows: TmaTensor,  # (M, K[, L])
        columns: TmaTensor,  # (N, K[, L])
        outputs: BoxOperands,
        tiled_mma: cute.TiledMma,
        layout_r: cute.ComposedLayout,
        layout_s: cute.ComposedLayout,
        tiles: tuple[Int32, Int32, Int32],  # of clusters: along M, along N, layers
    ):
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        tid, group, warp = self.role()
        producer = const_expr(self.groups)  # the warp group that loads
        # -- setup
        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=ALIGNMENT)
        shared = self.allocate(storage, layout_r, layout_s)
        self.set_up(warp, (rows.tma, columns.tma, outputs.tma_d), shared)

        rank = block % self.cluster
        first, step = block // self.cluster, blocks // self.cluster
        k_tiles = cute.ceil_div(cute.size(rows.coordinates, mode=[1]), self.tile_k)
        walk = self.walk(
            Walk(
                rank=rank,
                first=first,
                count=tiles[0] * tiles[1] * tiles[2],
                step=step,
                tiles_m=tiles[0],
                tiles_n=tiles[1],
                rows=cute.size(outputs.tD, mode=[0]),
                columns=cute.size(outputs.tD, mode=[1]),
                k_tiles=k_tiles,
            )
        )
        if group == producer:
            # -- producer: one warp loads tile after tile, without regard to where one ends
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 4 * producer:
                at = Position(Int32(0), Int32(1))  # a fresh empty barrier counts as complete at phase 1
                for index in cutlass.range(walk.first, walk.count, walk.step, unroll=1):
                    corner = self.place(walk, self.tile(walk, index))
                    r, s = Operand(rows, shared.sR), Operand(columns, shared.sS)
                    loads = [
                        *self.load(r, self.of_rows, corner.row, corner.layer, walk.rank),
                        *self.load(s, self.of_columns, corner.column, corner.layer, walk.rank),
                    ]
                    part = self.part(walk, index)
                    at = self.produce(shared, loads, at, part.count, part.begin)
                if const_expr(self.dependent):
                    # The next kernel's set-up runs behind our last products.
                    pdl_launch()
        else:
            # -- consumers
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(tid, group, shared, walk, tiled_mma, outputs)
        if const_expr(self.cluster > 1):
            # Both CTAs wait for each other's end: the other's multicasts and arrivals need this one's shared memory.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def allocate(self, storage: cute.Pointer, layout_r: cute.ComposedLayout, layout_s: cute.ComposedLayout) -> Shared:
        """Stages and barriers in the CTA's shared memory."""
        dtype = self.results.dtype
        at_r = cute.recast_ptr(storage, layout_r.inner, dtype)
        at_s = cute.recast_ptr(storage + self.smem.columns_at, layout_s.inner, dtype)
        full = cute.recast_ptr(storage + self.smem.barriers_at, dtype=Int64)
        empty = full + self.stages
        c_full = empty + self.stages
        return Shared(
            storage=storage,
            sR=cute.make_tensor(at_r, layout_r.outer),
            sS=cute.make_tensor(at_s, layout_s.outer),
            full=full,
            empty=empty,
            c_full=c_full,
            order=c_full + self.groups * self.smem.boxes,
        )

    @cute.jit
    def set_up(self, warp: Int32, tmas: tuple[cute.CopyAtom, cute.CopyAtom, cute.CopyAtom], shared: Shared):
        """Initializes the mbarriers, makes them visible to the cluster, then waits for the previous kernel (PDL)."""
        self.initialize(warp, tmas, lambda: self.init_barriers(shared))
        # Nobody touches barriers before they are initialized: neither this CTA's threads nor the other's multicasts.
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if const_expr(self.dependent):
            pdl_wait()

    @cute.jit
    def init_barriers(self, shared: Shared):
        """One thread's work."""
        self.pipeline.init(shared.full, shared.empty)
        # One arrival each: c_full of all boxes, then order of all groups.
        for i in cutlass.range_constexpr(self.groups * (self.smem.boxes + 1)):
            cute.arch.mbarrier_init(shared.c_full + i, 1)

    @cute.jit
    def walk(self, all_tiles: Walk) -> Walk:
        """A cluster's CTAs have neighbouring tiles; its next tile is a grid further."""
        return all_tiles

    @cute.jit
    def tile(self, walk: Walk, index: Int32) -> Int32:
        """The tile that ``index`` of the walk is about."""
        return index

    @cute.jit
    def part(self, walk: Walk, index: Int32) -> Part:
        """The part of that tile's K that this CTA multiplies: all of it."""
        return Part(0, walk.k_tiles)

    @cute.jit
    def place(self, walk: Walk, index: Int32) -> Corner:
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
        row, column = tile_m * self.tile_m, tile_n * self.results.columns
        if const_expr(self.shifted):
            row = cutlass.max(cutlass.min(row, walk.rows - self.tile_m), Int32(0))
            column = cutlass.max(cutlass.min(column, walk.columns - self.results.columns), Int32(0))
        return Corner(row, column, tile.layer)

    # ---- producer

    @cute.jit
    def produce(self, shared: Shared, loads: list, at: Position, k_tiles: Int32, begin: int | Int32 = 0) -> Position:
        """The loads of a tile's k-tiles from ``begin`` on, :class:`BoxLoad` each. Returns the position behind."""
        for k_tile in cutlass.range(begin, begin + k_tiles, unroll=1):
            # Wait until the consumers, of both CTAs in a cluster, have read the stage; then announce its bytes.
            self.pipeline.acquire(shared.full, shared.empty, at.stage, at.phase)
            # All boxes of the stage complete the same full barrier; multicast ones complete it in both CTAs.
            for i in cutlass.range_constexpr(len(loads)):
                filled = at.stage if const_expr(loads[i].half is None) else 2 * at.stage + loads[i].half
                cute.copy(
                    loads[i].tma,
                    loads[i].source[None, k_tile],
                    loads[i].target[None, filled],
                    tma_bar_ptr=shared.full + at.stage,
                    mcast_mask=loads[i].mask,
                )
            at = self.pipeline.next(at)
        return at

    @cute.jit
    def load(
        self, operand: Operand, side: cutlass.Constexpr[Side], first: Int32, layer: Int32, rank: Int32
    ) -> list[BoxLoad]:
        """The loads of an operand's rows from ``first`` on. Gated, those are two boxes, the other one as many rows
        further as there are gates; CTAs that share them load one each.
        """
        mask = Int16((1 << self.cluster) - 1) if const_expr(side.sharers > 1) else None
        if const_expr(not side.gated):
            return [BoxLoad(operand.box.tma, *self.partition(operand, side, first, layer, rank), mask, None)]
        loads = []
        # Gated: gates into the stage's first half, what they multiply into its second. CTAs that share load one each.
        gates = cute.size(operand.box.coordinates, mode=[0]) // 2
        halves = Operand(operand.box, cute.make_tensor(operand.sX.iterator, self.halves(side)))
        for i in cutlass.range_constexpr(2 // side.sharers):
            half = rank if const_expr(side.sharers > 1) else Int32(i)
            boxes = self.partition(halves, side, first + half * gates, layer, rank)
            loads.append(BoxLoad(operand.box.tma, *boxes, mask, half))
        return loads

    @cute.jit
    def partition(
        self, operand: Operand, side: cutlass.Constexpr[Side], first: Int32, layer: Int32, rank: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Source ``(TMA, k)`` and target ``(TMA, STAGE)`` of a box from row ``first`` on: this CTA's part of it."""
        tX = operand.box.coordinates
        if const_expr(cute.rank(tX) == 3):
            tX = tX[None, None, layer]
        gX = cute.local_tile(cute.domain_offset((first, 0), tX), (side.box, self.tile_k), (0, None))  # (rows, K, k)
        part = rank if const_expr(side.parts > 1) else Int32(0)
        target, source = cpasync.tma_partition(
            operand.box.tma,
            part,
            cute.make_layout(side.parts),
            cute.group_modes(operand.sX, 0, 2),
            cute.group_modes(gX, 0, 2),
        )
        return source, target

    # ---- consumers

    @cute.jit
    def consume(
        self,
        tid: Int32,
        group: Int32,
        shared: Shared,
        walk: Walk,
        tiled_mma: cute.TiledMma,
        outputs: BoxOperands,
    ):
        """A consumer group's tiles, one after the other."""
        consumer = self.consumer(tid, group, shared, tiled_mma)
        buffers = self.buffers(consumer, shared)
        # In ping-pong the first group finds its order at once (phase 1 of a fresh barrier); the second waits for it.
        at, boxes_used, order_phase = Position(Int32(0), Int32(0)), Int32(0), Int32(1) - group
        first, stride = walk.first, walk.step
        if const_expr(self.pingpong):
            # Ping-pong: every second tile of the CTA. The second group passes over the stages of the CTA's first tile.
            if group == 1:
                first = first + walk.step
                at = self.pipeline.after(at, walk.k_tiles)
            stride = walk.step * 2
        # -- tile after tile
        for index in cutlass.range(first, walk.count, stride, unroll=1):
            tile = self.place(walk, index)
            corner = self.results.corner(buffers, tile)
            self.results.load_inputs(buffers, outputs, tile, corner, boxes_used)
            if const_expr(self.pingpong):
                # Wait until the other group has issued all products of its tile. The first group's first wait passes:
                # its order barrier is fresh, and it begins at phase 1.
                cute.arch.mbarrier_wait(shared.order + group, order_phase)
                order_phase = order_phase ^ 1
            consumer.acc.fill(0.0)
            at = self.multiply(consumer, shared, at, walk.k_tiles)
            if const_expr(self.pingpong):
                at = self.pipeline.after(at, walk.k_tiles)  # the other group's stages
            self.results.store_tile(buffers, outputs, consumer.acc, corner, boxes_used)
            boxes_used = boxes_used + self.results.count
        self.results.drain(consumer.thread)

    @cute.jit
    def consumer(self, tid: Int32, group: Int32, shared: Shared, tiled_mma: cute.TiledMma) -> Consumer:
        """A group's descriptors of both operands' stages, and its accumulators."""
        thread = tid % GROUP
        # Cooperative, the MMA's tile has the rows of all groups; in ping-pong each group's is its own.
        share = group * GROUP if const_expr(not self.pingpong) else Int32(0)
        of_group = tiled_mma.get_slice(share)
        rR = tiled_mma.make_fragment_A(of_group.partition_A(shared.sR))
        rS = tiled_mma.make_fragment_B(of_group.partition_B(shared.sS))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((self.tile_m, self.tile_n)), self.accumulate)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        return Consumer(thread, group, tiled_mma, rR, rS, acc)

    @cute.jit
    def buffers(self, consumer: Consumer, shared: Shared) -> BoxBuffers:
        """A group's boxes and biases in shared memory, and its first row of a tile."""
        group = consumer.group
        boxes = shared.storage + self.smem.boxes_at + group * (self.smem.boxes * self.smem.box_bytes)
        bias = cute.recast_ptr(shared.storage + self.smem.biases_at + group * (self.smem.BIASES * 4), dtype=Float32)
        return BoxBuffers(
            thread=consumer.thread,
            group=group,
            boxes=boxes,
            bias=bias,
            c_full=shared.c_full + group * self.smem.boxes,
            first_row=group * ROWS if const_expr(not self.pingpong) else Int32(0),
        )

    @cute.jit
    def multiply(self, consumer: Consumer, shared: Shared, at: Position, k_tiles: Int32) -> Position:
        """The mainloop of one tile. Returns the position behind its last k-tile."""
        before = Int32(0)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            # Wait until the TMA has filled the stage.
            cute.arch.mbarrier_wait(shared.full + at.stage, at.phase)
            # Accumulators in registers are ordered before the products that read them.
            warpgroup.fence()
            for kb in cutlass.range_constexpr(self.tile_k // 16):
                cute.gemm(
                    consumer.tiled_mma,
                    consumer.acc,
                    consumer.rR[None, None, kb, at.stage],
                    consumer.rS[None, None, kb, at.stage],
                    consumer.acc,
                )
            warpgroup.commit_group()
            # Waits for the products of the k-tile before: the producer may refill its stage; these go on.
            warpgroup.wait_group(1)
            self.pipeline.release(consumer.thread, shared.empty, before, k_tile > 0)
            before = at.stage
            at = self.pipeline.next(at)
        if const_expr(self.pingpong):  # noqa: SIM102  known when compiled
            if consumer.thread == 0:
                # Thread 0 has issued all products of this tile: the other group may issue its own after them.
                cute.arch.mbarrier_arrive(shared.order + (consumer.group ^ 1))
        # Waits for the last products: then accumulators may be read, and the producer may refill the last stage.
        warpgroup.wait_group(0)
        self.pipeline.release(consumer.thread, shared.empty, before, Boolean(True))
        return at
