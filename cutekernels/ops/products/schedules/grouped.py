"""The warpgroup schedules of ``grouped_gemm`` and of its weights' gradient: rules, models, bodies.

``grouped_gemm`` runs ``gemm``'s over tiles that the device finds; the gradient has a depth for each group.

``swap_ab`` puts weight rows on the MMA's side of 64; tokens then come in tiles of 16 to 256. A gated product's weight
has the gate's rows before up's, and a tile has as many of each.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from cutekernels.columns import Columns
from cutekernels.gpu import GpuSpec
from cutekernels.kernels.cute.parts.smem import WarpgroupSmem
from cutekernels.ops.products.schedules.coefficients import GROUPED
from cutekernels.ops.products.schedules.groups import expected_hit, row_tiles
from cutekernels.ops.products.schedules.problem import BY_SIXTEENS, ELEMENT_BYTES, HEIGHTS, GemmConfig, GemmProblem
from cutekernels.ops.products.schedules.schedule import PLAIN, Extras
from cutekernels.ops.products.schedules.warpgroup import GROUP_ROWS, LEAST_EXTENT, Warpgroup, cluster_tiles, sharing
from cutekernels.rules import Broken, of_config, of_problem

TILES_N = (16, 32, 48, *BY_SIXTEENS)  # the narrow ones of tokens, with swap_ab; steps of 8 were not tried


class Groups:
    """The common part of both schedules."""

    table = GROUPED
    strides: Any = None  # this and the next are rules of gemm's alone
    least_extents: Any = None

    def usually(self, p: GemmProblem, c: Columns, gpu: GpuSpec, x: Extras) -> Any:
        """Clusters are for tiles of many tokens: others share little."""
        return (c.cluster_m * c.cluster_n == 1) | (c.mma_tile[1] >= WarpgroupSmem.BOX)

    @abstractmethod
    def spread_us(self, p: GemmProblem, experts: int, c: Any, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        """The model where all of ``p``'s rows choose their experts at random, each as likely as another."""


class GroupedWarpgroup(Groups, Warpgroup):
    """Warpgroup over groups of rows."""

    narrowed: ClassVar = {"tile_n": TILES_N, "split_k": (1,)}
    places = WarpgroupSmem.PLACES

    @of_problem
    def grouped_weight(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Broken:
        yield p.n < LEAST_EXTENT, "{} takes {} columns or more; they are {}", self.name, LEAST_EXTENT, p.n
        odd = x.gated and (p.b_major != "k" or p.bias != "none")
        yield odd, "{} takes a gate with a K-major weight and without a bias", self.name

    @of_config
    def narrow_tiles(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        narrow = (c.swap_ab == 0) & (c.tile_n < WarpgroupSmem.BOX)
        why = "tile_n={} is a tile of tokens: results leave by {} columns; take swap_ab=1"
        yield narrow, why, c.tile_n, WarpgroupSmem.BOX

    @of_config
    def gate(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        for broken, *rest in super().gate(c, gpu, x):
            yield broken & (c.swap_ab == 0), *rest
        odd = c.swap_ab & (c.tile_n != 2 * GROUP_ROWS * sharing(c)) & x.gated
        why = "tile_n={}: gate and up are halves of a tile, and a group's 64 rows of each meet in a thread"
        yield odd, why, c.tile_n

    def spread_us(self, p: GemmProblem, experts: int, c: Any, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        tiles = row_tiles(p.m, experts, c, "tile_m", "cluster_m") * -(-p.n // (c.tile_n * c.cluster_n))
        read = expected_hit(p.m, experts) * p.n * p.k
        moved = ELEMENT_BYTES * (p.m * (p.k + p.n // (2 if extras.gated else 1)) + read)
        return self.walk_us(c, tiles, p.k, moved, gpu, extras)

    def body(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        from cutekernels.kernels.cute.parts.boxes import GroupBoxes
        from cutekernels.kernels.cute.products.warpgroup_grouped import WarpgroupGrouped

        product = super().body(p, c, gpu, extras)
        results = GroupBoxes(**vars(product.results), swap_ab=c.swap_ab)
        return WarpgroupGrouped(**vars(product) | {"results": results})


class DepthWarpgroup(Groups, Warpgroup):
    """Warpgroup over groups along the depth: a matrix for each. No operand is K-major: see ``operand_tiles``."""

    narrowed: ClassVar = {"tile_n": HEIGHTS, "split_k": (1,)}

    @of_problem
    def least_depth(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Broken:
        yield p.k == 0, "{} takes a row or more", self.name

    @of_problem
    def least_matrix(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Broken:
        why = "{} takes matrices of {} rows and columns or more; they are {} and {}"
        yield min(p.m, p.n) < LEAST_EXTENT, why, self.name, LEAST_EXTENT, p.m, p.n

    def spread_us(self, p: GemmProblem, experts: int, c: Any, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        tiles_m, tiles_n = cluster_tiles(p, c)
        depth = -(-p.k // experts) + c.tile_k // 2  # with half of a last k-tile that is not the group's
        moved = ELEMENT_BYTES * (p.k * (p.m + p.n) + experts * p.m * p.n)
        return self.walk_us(c, tiles_m * tiles_n * experts, depth, moved, gpu, extras)

    def body(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        from cutekernels.kernels.cute.products.warpgroup_grouped import WarpgroupGroupedDepth

        return WarpgroupGroupedDepth(**vars(super().body(p, c, gpu, extras)))


GROUPED_WARPGROUP = GroupedWarpgroup()
DEPTH_WARPGROUP = DepthWarpgroup()
