"""Products of many tokens with packed experts, warpgroup schedule: a product for the rows of each group.

Roles, pipeline and mainloops are :class:`WarpgroupPacked`'s, over tiles that the device finds (:class:`GroupRing`).

Gated, one consumer group has 64 rows of gates, the other the rows of up that belong to them, so that their threads hold
    a pair at the same place. The second leaves its accumulators in shared memory, and goes on to the next tile; the
    first takes them, adds biases, applies the gate and stores. Named barriers of 256 threads: ``TAKEN``, the
    first group arrives and the second waits before it writes; ``LEFT``, the second arrives and the first waits.

Ends: a group's last tile begins early, where the group has so many rows; else it reads rows of the next group, which
    spoil only columns of the product that are not stored. Each expert has whole tiles of 64 rows.

Refuses (``ops/products/schedules/packed_warpgroup.py``): what ``quantized_linear``'s does; a gate with other than two
groups.
"""

from dataclasses import dataclass
from typing import ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cutekernels.kernels.cute.parts.boxes import FIRST_BARRIER, BoxBuffers, BoxOperands, Corner
from cutekernels.kernels.cute.parts.epilogue import Epilogue, EpilogueOperands
from cutekernels.kernels.cute.parts.packed import Weight
from cutekernels.kernels.cute.parts.smem import TILE
from cutekernels.kernels.cute.parts.tile_source import GroupRing, GroupTensors, Share, TileSource
from cutekernels.kernels.cute.parts.walk import GroupWalk
from cutekernels.kernels.cute.parts.warp_groups import GROUP, ROWS, TmaTensor
from cutekernels.kernels.cute.products.warpgroup_packed import (
    Consumer,
    Extents,
    Shared,
    WarpgroupPacked,
)

TAKEN, LEFT = FIRST_BARRIER + 2, FIRST_BARRIER + 3  # named barriers, behind those of two groups


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
    source: ClassVar[type[TileSource]] = GroupRing

    @property
    def gated(self) -> bool:
        return self.gate is not None

    @property
    def columns(self) -> int:
        """Columns of out in a tile."""
        return ROWS if self.gated else ROWS * self.groups

    @property
    def group_walk(self) -> GroupWalk:
        return GroupWalk(self.tile_n, self.raster)

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
        mCounters: cute.Tensor,
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
        self.start((tokens, outputs, Weight(mW, mS, mZ, mF), (mEnds, clamp), tiled_mma, layout, None), ctas, stream)

    @cute.jit
    def shares(
        self, shared: Shared, tokens: TmaTensor, outputs: BoxOperands, extra: tuple, place: tuple
    ) -> tuple[Extents, GroupRing]:
        (m, k), n = tokens.coordinates.shape, cute.size(outputs.tD, mode=[0])
        tiles_n = cute.ceil_div(n, self.columns)
        of = Extents(n, m, k, cute.ceil_div(k, self.tile_k), tiles_n, Int32(0), Int32(0))
        ring = GroupRing(
            walk=self.group_walk,
            ring=self.ring,
            at=shared.ring,
            given=GroupTensors(outputs.mOut, extra[0], outputs.mBias),
            tile=(self.tile_n, self.columns),
            clusters=(1, 1),
            shifted=False,
            swapped=True,
            cluster=1,
            tiles_o=tiles_n,
            k_tiles=of.k_tiles,
            rows=m,
            blocks=place[1],
        )
        return of, ring

    # ---- rows of the weight

    def first_row(self, of: Extents, corner: Corner, group: int | Int32) -> Int32:
        rows = of.n * (2 if self.gated else 1)
        return corner.layer * rows + corner.row + group * (of.n if self.gated else ROWS)

    def present(self, of: Extents, corner: Corner) -> Int32:
        if self.gated:
            return Int32(2)
        return cutlass.min((of.n - corner.row) // TILE, Int32(self.groups))

    def all_rows(self, weight: Weight, of: Extents, unit: int) -> Int32:
        return cute.size(weight.mW, mode=[0]) * TILE // unit

    # ---- consumers

    @cute.jit
    def buffers(self, consumer: Consumer) -> BoxBuffers:
        buffers = WarpgroupPacked.buffers(self, consumer)
        if const_expr(self.gated):  # noqa: SIM102  known when compiled
            if consumer.group == 0:
                # Nobody's accumulators lie in shared memory yet: the second group may leave its own.
                cute.arch.barrier_arrive(barrier_id=TAKEN, number_of_threads=2 * GROUP)
        return buffers

    def read_ahead(self, consumer: Consumer, corner: Corner) -> None:
        """Nothing: registers are few while products run."""

    @cute.jit
    def gather(self, source: GroupRing, consumer: Consumer, share: Share) -> bool | Boolean:
        if const_expr(self.by_rows):
            first = self.first_row(consumer.cta.of, share.corner, consumer.group)
            self.scale_by(consumer, self.row_factors(consumer, first))
        if const_expr(not self.gated):
            return True
        self.meet(consumer, share)
        # The first group has all results.
        return consumer.group == 0

    @cute.jit
    def meet(self, consumer: Consumer, share: Share):
        """Gates and what they multiply: the first group's ``acc`` are then results."""
        of, shared = consumer.cta.of, consumer.shared
        mBias, clamp = consumer.cta.outputs.mBias, consumer.cta.extra[1]
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
                bias = mBias[share.corner.layer, None]
                for half in cutlass.range_constexpr(2):
                    for r in cutlass.range_constexpr(2):
                        row = share.corner.row + half * of.n + self.own_row(consumer) + 8 * r
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
