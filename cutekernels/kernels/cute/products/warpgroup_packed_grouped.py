"""Products of many tokens with packed experts, warpgroup schedule: a product for the rows of each group.

Roles, pipeline and mainloops are :class:`WarpgroupPacked`'s, over tiles that the device finds (:class:`GroupRing`).

Ends: a group's last tile begins early, where the group has so many rows; else it reads rows of the next group, which
    spoil only columns of the product that are not stored. Each expert has whole tiles of 64 rows.

Refuses (``ops/products/schedules/packed_warpgroup.py``): what ``quantized_linear``'s does; a gate with other than two
groups.
"""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cutekernels.kernels.cute.parts.boxes import BoxOperands, Corner
from cutekernels.kernels.cute.parts.epilogue import EpilogueOperands
from cutekernels.kernels.cute.parts.packed import Weight
from cutekernels.kernels.cute.parts.smem import TILE
from cutekernels.kernels.cute.parts.tile_source import GroupRing, GroupTensors, Share, TileSource
from cutekernels.kernels.cute.parts.walk import GroupWalk
from cutekernels.kernels.cute.parts.warp_groups import TmaTensor
from cutekernels.kernels.cute.products.packed_values import Consumer, Extents, PackedGroups
from cutekernels.kernels.cute.products.warp_specialized import Shared
from cutekernels.kernels.cute.products.warpgroup_packed import WarpgroupPacked


@dataclass(frozen=True)
class WarpgroupPackedGrouped(PackedGroups, WarpgroupPacked):
    """The body, whose results are :class:`GroupBoxes`."""

    clamped: bool = False
    source: ClassVar[type[TileSource]] = GroupRing

    @property
    def group_walk(self) -> GroupWalk:
        return GroupWalk(self.smem.tile_n, self.raster)

    @cute.jit
    def shares(
        self, shared: Shared, tokens: TmaTensor, outputs: BoxOperands, extra: tuple, place: tuple
    ) -> tuple[Extents, GroupRing]:
        (m, k), n = tokens.coordinates.shape, cute.size(outputs.out.coordinates, mode=[0])
        tiles_n = cute.ceil_div(n, self.columns)
        of = Extents(n, m, k, cute.ceil_div(k, self.smem.tile_k), tiles_n, Int32(0), Int32(0))
        ring = GroupRing(
            walk=self.group_walk,
            ring=self.ring,
            at=shared.ring,
            given=GroupTensors(outputs.mOut, extra[0], outputs.mBias),
            tile=(self.smem.tile_n, self.columns),
            clusters=(1, 1),
            shifted=False,
            swapped=True,
            tiles_o=tiles_n,
            k_tiles=of.k_tiles,
            rows=m,
            blocks=place[1],
        )
        return of, ring

    # ---- rows of the weight

    def first_row(self, of: Extents, corner: Corner, group: int | Int32) -> Int32:
        return corner.layer * self.rows(of) + WarpgroupPacked.first_row(self, of, corner, group)

    def present(self, of: Extents, corner: Corner) -> Int32:
        # Each expert has whole tiles of 64 rows.
        return Int32(2) if self.gated else cutlass.min((of.n - corner.row) // TILE, Int32(self.groups))

    def all_rows(self, weight: Weight, of: Extents, unit: int) -> Int32:
        return cute.size(weight.mW, mode=[0]) * TILE // unit

    # ---- consumers

    def read_ahead(self, consumer: Consumer, corner: Corner) -> None:
        """Nothing: registers are few while products run."""

    @cute.jit
    def gather(self, source: GroupRing, consumer: Consumer, share: Share) -> bool:
        if const_expr(self.weights.by_rows):
            first = self.first_row(consumer.cta.of, share.corner, consumer.group)
            self.scale_by(consumer, self.row_factors(consumer, first))
        return True

    @cute.jit
    def gate_operands(self, consumer: Consumer, share: Share) -> tuple[EpilogueOperands, cute.Tensor]:
        of, mBias = consumer.cta.of, consumer.cta.outputs.mBias
        biases = cute.make_rmem_tensor((2, 2), Float32)
        bias = None
        if const_expr(mBias is not None):
            bias = mBias[share.corner.layer, None]
            for half in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    row = share.corner.row + half * of.n + self.own_row(consumer) + 8 * r
                    biases[r, half] = bias[row].to(Float32)
        return EpilogueOperands(mBias=bias, alpha=self.gate_factor(), clamp=consumer.cta.extra[1]), biases
