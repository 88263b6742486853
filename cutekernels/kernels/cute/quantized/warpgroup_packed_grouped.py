"""Products of many tokens with packed experts, warpgroup schedule: a product for the rows of each group.

Roles, pipeline and mainloops are :class:`WarpgroupPacked`'s, over tiles that the device finds, as ``grouped_gemm`` has
them (``moe/warpgroup_grouped.py``):
    Producer warp: finds the CTA's next tile among the groups' ends (``parts/walk.py``), passes it on through a ring in
        shared memory, then issues its loads.
    Consumer warp groups: take tiles from the ring, multiply, and store what belongs to the group (``GroupBoxes``).
        Behind the last tile they write zeros to the rows of no group.

Ring (``parts/schedule.py``): full[place]: 1 arrival, the producer's; the consumers wait. empty[place]: 1 arrival of
    each consumer warp; the producer waits. The last entry says that there is no tile, and which rows have no group.

Gated, one consumer group has 64 rows of gates, the other the rows of up that belong to them, so that their threads hold
    a pair at the same place. The second leaves its accumulators in shared memory, and goes on to the next tile; the
    first takes them, adds biases, applies the gate and stores. Named barriers of 256 threads: ``TAKEN``, the
    first group arrives and the second waits before it writes; ``LEFT``, the second arrives and the first waits.

Ends: a group's last tile begins early, where the group has so many rows; else it reads rows of the next group, which
    spoil only columns of the product that are not stored. Each expert has whole tiles of 64 rows.

Refuses (``ops/products/schedules/packed_warpgroup.py``): what ``quantized_linear``'s does; a gate with other than two
groups.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.boxes import FIRST_BARRIER, BoxOperands, Corner
from cutekernels.kernels.cute.parts.dependent import pdl_launch, pdl_wait
from cutekernels.kernels.cute.parts.epilogue import Epilogue, EpilogueOperands
from cutekernels.kernels.cute.parts.pipeline import Position
from cutekernels.kernels.cute.parts.schedule import RingTile, TileRing
from cutekernels.kernels.cute.parts.smem import ALIGNMENT, WarpgroupPackedSmem, WarpgroupSmem
from cutekernels.kernels.cute.parts.walk import GroupWalk
from cutekernels.kernels.cute.parts.warp_groups import GROUP, ROWS, TmaTensor
from cutekernels.kernels.cute.quantized.values import Consumer, Extents, Segment, Shared, Weight
from cutekernels.kernels.cute.quantized.warpgroup_packed import TILE, WarpgroupPacked

TAKEN, LEFT = FIRST_BARRIER + 2, FIRST_BARRIER + 3  # named barriers, behind those of two groups


@dataclass(frozen=True)
class GroupSegment(Segment):
    """A tile of a group's rows, with all of K. ``corner`` counts columns of out, and tokens."""

    expert: Int32
    last: Int32  # behind the group's last token


@dataclass(frozen=True)
class PairCoordinates:
    """Coordinates of eight of a thread's gates and of what they multiply, ((2, 2, 2), 2): rows are the second mode."""

    biases: cute.Tensor  # of rows r and r + 8, of both halves
    gated: bool = True

    def columns(self, vector: cute.Tensor) -> cute.TensorSSA:
        """Biases, which the thread has loaded."""
        layout = cute.make_layout(((2, 2, 2), 2), stride=((0, 1, 0), 2))
        return cute.make_tensor(self.biases.iterator, layout).load()

    @cute.jit
    def halves(self, x: cute.TensorSSA) -> tuple[cute.TensorSSA, cute.TensorSSA]:
        rX = cute.make_rmem_tensor(x.shape, Float32)
        rX.store(x)
        return rX[(None, None, None), 0].load(), rX[(None, None, None), 1].load()


@dataclass(frozen=True)
class WarpgroupPackedGrouped(WarpgroupPacked):
    """The body, whose results are :class:`GroupBoxes`."""

    gate: Epilogue | None = None  # of gates and what they multiply
    clamped: bool = False  # it is gpt-oss's

    @property
    def gated(self) -> bool:
        return self.gate is not None

    @property
    def columns(self) -> int:
        """Columns of out in a tile."""
        return ROWS if self.gated else ROWS * self.groups

    @property
    def smem(self) -> WarpgroupPackedSmem:
        exchanged = self.tile_n // 2 if self.gated else 0
        return replace(super().smem, places=WarpgroupSmem.PLACES, exchanged=exchanged)

    @property
    def group_walk(self) -> GroupWalk:
        return GroupWalk(self.tile_n, self.raster)

    @property
    def ring(self) -> TileRing:
        return TileRing(WarpgroupSmem.PLACES, 4 * self.groups)

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # (T, N)
        mX: cute.Tensor,  # (T, K)
        mW: cute.Tensor,  # (E * rows / 64, K / 64, bytes)
        mS: cute.Tensor,  # (groups, E * rows), or of 128 x 128 blocks
        mZ: cute.Tensor | None,  # bytes, as the scales
        mF: cute.Tensor | None,  # (2, E * rows)
        mEnds: cute.Tensor,  # (E + 1,)
        mBias: cute.Tensor | None,  # (E, rows)
        mPartials: cute.Tensor,  # of the skinny body
        mTickets: cute.Tensor,
        ctas: Int32,
        alpha: Float32,
        limit: Float32,
        stream: cuda.CUstream,
    ):
        tokens, out, layout = self.tma_of(mX, mD)
        # A gate's accumulators have had this factor before they meet.
        factor = Float32(self.weights.undone if const_expr(self.scaled == "weights" and not self.gated) else 1.0)
        outputs = BoxOperands(out.tma, out.coordinates, None, None, mBias, factor, Float32(0.0), mD, None)
        clamp = (alpha, limit) if const_expr(self.clamped) else None
        tiled_mma = self.mma(mX.element_type)
        self.kernel(tokens, outputs, Weight(mW, mS, mZ, mF), mEnds, clamp, tiled_mma, layout).launch(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tokens: TmaTensor,  # (T, K)
        outputs: BoxOperands,
        weight: Weight,
        mEnds: cute.Tensor,
        clamp: tuple[Float32, Float32] | None,
        tiled_mma: cute.TiledMma,
        layout: cute.ComposedLayout,
    ):
        ctas, _, _ = cute.arch.grid_dim()
        tid, group, warp = self.role()
        producer = const_expr(self.groups)  # the warp group that loads
        # -- setup
        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=ALIGNMENT)
        shared = self.allocate(storage, layout)
        ring = cute.recast_ptr(storage + self.smem.ring_at, dtype=Int64)
        if warp == 4 * producer:
            with cute.arch.elect_one():
                self.ring.init(ring)
        self.initialize(warp, (tokens.tma, outputs.tma_d), lambda: self.pipeline.init(shared.full, shared.empty))
        # Nobody touches the barriers before they are initialized.
        cute.arch.sync_threads()
        (m, k), n = tokens.coordinates.shape, cute.size(outputs.tD, mode=[0])
        tiles_n = cute.ceil_div(n, self.columns)
        of = Extents(n, m, k, cute.ceil_div(k, self.tile_k), tiles_n, Int32(0), ctas, Int32(0), Int32(0))
        if const_expr(self.dependent):
            pdl_wait()
        if group == producer:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 4 * producer:
                self.find_and_load(tokens, weight, shared, of, mEnds, ring)
                if const_expr(self.dependent):
                    pdl_launch()
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(tid, group, weight, shared, of, ring, outputs, (clamp, tiled_mma))

    # ---- rows of the weight

    def first_row(self, of: Extents, segment: GroupSegment, group: int | Int32) -> Int32:
        rows = of.n * (2 if self.gated else 1)
        return segment.expert * rows + segment.corner.row + group * (of.n if self.gated else ROWS)

    def present(self, of: Extents, segment: GroupSegment) -> Int32:
        if self.gated:
            return Int32(2)
        return cutlass.min((of.n - segment.corner.row) // TILE, Int32(self.groups))

    def all_rows(self, weight: Weight, of: Extents, unit: int) -> Int32:
        return cute.size(weight.mW, mode=[0]) * TILE // unit

    # ---- producer

    @cute.jit
    def find_and_load(
        self,
        tokens: TmaTensor,
        weight: Weight,
        shared: Shared,
        of: Extents,
        mEnds: cute.Tensor,
        ring: cute.Pointer,
    ):
        """The producer warp's work: finds the CTA's tiles, passes them on, loads them."""
        tile, _, _ = cute.arch.block_idx()
        # The walk's chunk of groups lies in the warp's registers: each lane has the ends of four.
        rHigh = cute.make_rmem_tensor(4, Int32)
        lead = cutlass.min(cutlass.max(mEnds[0], Int32(0)), of.m)
        state = self.group_walk.start(mEnds, of.m, rHigh, lead)
        entry, at, expert = Int32(0), Position(Int32(0), Int32(1)), Int32(0)
        while expert >= 0:
            state, found = self.group_walk.find(mEnds, of.m, rHigh, state, tile, of.tiles_n)
            expert = found.group
            if expert >= 0:
                # A group's last tile begins early, where it has so many rows.
                first = found.begin + found.m * self.tile_n
                token = cutlass.max(cutlass.min(first, found.end - self.tile_n), found.begin)
                column = found.n * self.columns
                self.ring.publish(ring, entry, RingTile(token, column, expert, found.end))
                corner = Corner(column, token, Int32(0))
                segment = GroupSegment(tile, corner, Int32(0), of.k_tiles, expert, found.end)
                at = self.produce(tokens, weight, shared, of, segment, at)
                entry, tile = entry + 1, tile + of.ctas
        # No more tiles.
        self.ring.publish(ring, entry, RingTile(lead, state.top, Int32(-1), Int32(0)))

    # ---- consumers

    @cute.jit
    def consume(
        self,
        tid: Int32,
        group: Int32,
        weight: Weight,
        shared: Shared,
        of: Extents,
        ring: cute.Pointer,
        outputs: BoxOperands,
        rest: tuple,  # alpha and limit of a clamped gate or None; the MMA
    ):
        """A consumer group's tiles, one after the other, then its share of the rows of no group."""
        clamp, tiled_mma = rest
        consumer = self.consumer(tid, group, shared, tiled_mma, of.share)
        buffers = self.buffers(consumer, shared)
        if const_expr(self.gated):  # noqa: SIM102  known when compiled
            if group == 0:
                # Nobody's accumulators lie in shared memory yet: the second group may leave its own.
                cute.arch.barrier_arrive(barrier_id=TAKEN, number_of_threads=2 * GROUP)
        at, boxes_used, entry = Position(Int32(0), Int32(0)), Int32(0), Int32(0)
        # -- tile after tile, until an entry says that there is none
        tile = self.ring.receive(ring, entry)
        while tile.group >= 0:
            corner = Corner(tile.column, tile.row, Int32(0))
            segment = GroupSegment(entry, corner, Int32(0), of.k_tiles, tile.group, tile.end)
            own = replace(outputs, end=tile.end)
            if const_expr(self.results.biased):
                own = replace(own, mBias=outputs.mBias[tile.group, None])
            of_group = self.results.corner(buffers, corner)
            self.results.load_inputs(buffers, own, corner, of_group, boxes_used)
            consumer.acc.fill(0.0)
            at = self.multiply(consumer, weight, shared, of, segment, at)
            if const_expr(self.by_rows):
                first = self.first_row(of, segment, consumer.group)
                self.scale_by(consumer, self.row_factors(consumer, weight, of, first))
            if const_expr(self.gated):
                self.meet(consumer, of, segment, shared, outputs.mBias, clamp)
            # Gated, the first group has all results.
            if const_expr(not self.gated) or group == 0:
                self.results.store_tile(buffers, own, consumer.acc, of_group, boxes_used)
                boxes_used = boxes_used + self.results.count
            entry = entry + 1
            tile = self.ring.receive(ring, entry)
        # -- rows of no group, of which every CTA has a share
        self.results.drain(consumer.thread)
        self.blank(tid, outputs.mOut, tile.row, tile.column)

    @cute.jit
    def meet(
        self,
        consumer: Consumer,
        of: Extents,
        segment: GroupSegment,
        shared: Shared,
        mBias: cute.Tensor | None,
        clamp: tuple[Float32, Float32] | None,
    ):
        """Gates and what they multiply: the first group's ``acc`` are then results."""
        count = const_expr(cute.size(consumer.acc))
        left = cute.make_tensor(
            cute.recast_ptr(shared.storage + self.smem.exchange_at, dtype=Float32),
            cute.make_layout((GROUP, count), stride=(1, GROUP)),
        )  # (THREAD, ACCUMULATOR)
        if consumer.group == 1:
            # The second group waits until the first has taken those of the tile before.
            cute.arch.barrier(barrier_id=TAKEN, number_of_threads=2 * GROUP)
            for i in cutlass.range_constexpr(count):
                left[consumer.thread, i] = consumer.acc[i]
            # They are in shared memory for the first group.
            cute.arch.barrier_arrive(barrier_id=LEFT, number_of_threads=2 * GROUP)
        else:
            # Biases of the thread's rows r and r + 8, of gates and of what they multiply.
            biases = cute.make_rmem_tensor((2, 2), Float32)
            bias = None
            if const_expr(mBias is not None):
                bias = mBias[segment.expert, None]
                for half in cutlass.range_constexpr(2):
                    for r in cutlass.range_constexpr(2):
                        row = segment.corner.row + half * of.n + self.own_row(consumer) + 8 * r
                        biases[r, half] = bias[row].to(Float32)
            factor = Float32(self.weights.undone) if const_expr(self.scaled == "weights") else None
            operands = EpilogueOperands(mBias=bias, alpha=factor, clamp=clamp)
            # The first group waits for the second's accumulators.
            cute.arch.barrier(barrier_id=LEFT, number_of_threads=2 * GROUP)
            values = cute.make_rmem_tensor(((2, 2, 2), 2), Float32)
            results = cute.make_rmem_tensor((2, 2, 2), Float32)
            for i in cutlass.range_constexpr(count // 8):
                for j in cutlass.range_constexpr(8):
                    values[j] = consumer.acc[8 * i + j]
                    values[8 + j] = left[consumer.thread, 8 * i + j]
                results.store(self.gate.apply(values.load(), PairCoordinates(biases), operands))
                for j in cutlass.range_constexpr(8):
                    consumer.acc[8 * i + j] = results[j]
            # All have been read: the second group may leave those of its next tile.
            cute.arch.barrier_arrive(barrier_id=TAKEN, number_of_threads=2 * GROUP)
