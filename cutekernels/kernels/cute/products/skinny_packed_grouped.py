"""Products of few tokens each with packed experts: ``out = act(X @ dequantized(W[e])^T + bias[e])``, rows in groups.

Roles, pipeline and steps are :class:`SkinnyPacked`'s, over units that the device finds: an expert without tokens has
none, and its weight is not read. The packed weight has all experts' rows, one expert behind the other.

Work:
    Tiles run group by group, then along weight rows, then along the group's tokens: tiles that share weight rows follow
    one another. Each warp counts the tiles of all groups (``GroupWalk``), and deals their k-tiles out to the CTAs in
    equal runs, or with ``split`` unset in runs of whole tiles. From one group to the next it looks for a larger end.
    All depends on the groups' ends alone, so results are the same each time.

Ends: those of the groups may be anything; they are clamped to the rows, and one that falls counts as the largest before
    it. Tokens behind a group's end are neither read nor stored. Rows of no group get zeros, a share from each CTA.

Dependent launch (PDL): nothing is known before the groups' ends are, so nothing is prefetched.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.dependent import pdl_wait
from cutekernels.kernels.cute.parts.schedule import Raster
from cutekernels.kernels.cute.parts.smem import TILE
from cutekernels.kernels.cute.parts.tile_share import TileOwner
from cutekernels.kernels.cute.parts.walk import GroupWalk
from cutekernels.kernels.cute.products.packed_values import Operands, PackedGroups
from cutekernels.kernels.cute.products.skinny_packed import Cta, SkinnyPacked, Unit

WARP = 32


@dataclass(frozen=True)
class GroupUnit(Unit):
    """One k-tile of one tile of a group's rows."""

    tile: Int32  # among all
    group: Int32
    begin: Int32  # token of the group
    end: Int32


@dataclass(frozen=True)
class SkinnyPackedGrouped(PackedGroups, SkinnyPacked):
    """The body."""

    split: bool = True
    clamped: bool = False

    @property
    def group_walk(self) -> GroupWalk:
        """One band of tiles along a group's tokens: those of the same weight rows follow one another."""
        return GroupWalk(self.smem.tile_m, Raster(1 << 16))

    @cute.kernel
    def kernel(self, given: Operands):
        tid, _, _ = cute.arch.thread_idx()
        ctas, _, _ = cute.arch.grid_dim()
        run = TileOwner().run()
        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=128)
        if const_expr(self.dependent):
            pdl_wait()
        # -- the tiles of all groups, and this CTA's run of units; each warp for itself
        rows = cute.size(given.mX, mode=[0])
        lead = cutlass.min(cutlass.max(given.mEnds[0], Int32(0)), rows)
        rHigh = cute.make_rmem_tensor(4, Int32)  # ends of a lane's four groups
        state, tiles_m, top = self.group_walk.survey(given.mEnds, rows, rHigh, lead)
        of = self.extents(given, tiles_m, Int32(0))
        tiles = tiles_m * of.tiles_n
        share = cute.ceil_div(tiles, ctas) * of.k_tiles
        if const_expr(self.split):
            share = cute.ceil_div(tiles * of.k_tiles, ctas)
        of = self.extents(given, tiles_m, share)
        first = run * share
        end = cutlass.min(first + share, tiles * of.k_tiles)
        tile = first // of.k_tiles
        _, found = self.group_walk.find(given.mEnds, rows, rHigh, state, tile, of.tiles_n)
        k_tile = first - tile * of.k_tiles
        at = GroupUnit(found.n, found.m, k_tile, tile, found.group, found.begin, found.end)
        self.walk(Cta(tid, run, storage, given, of), at, first, end)
        self.blank(tid, given.mD, lead, top)

    # ---- where a unit lies

    @cute.jit
    def following(self, cta: Cta, unit: GroupUnit) -> GroupUnit:
        """The unit behind ``unit``."""
        n, m, k_tile, tile = unit.n, unit.m, unit.k_tile + 1, unit.tile
        group, begin, end = unit.group, unit.begin, unit.end
        if k_tile == cta.of.k_tiles:
            k_tile = Int32(0)
            tile = tile + 1
            m = m + 1
            if begin + m * self.smem.tile_m >= end:
                m = Int32(0)
                n = n + 1
                if n == cta.of.tiles_n:
                    n = Int32(0)
                    begin = end
                    group, end = self.next_group(cta.given.mEnds, cta.of.m, group, end)
        return GroupUnit(n, m, k_tile, tile, group, begin, end)

    @cute.jit
    def next_group(self, mEnds: cute.Tensor, rows: Int32, group: Int32, top: Int32) -> tuple[Int32, Int32]:
        """The first group behind ``group`` that ends behind ``top``, where it begins, and its end.

        Behind the last one an empty group. A warp looks at 32 ends at a time.
        """
        lane = cute.arch.lane_idx()
        groups = mEnds.shape[0] - 1
        first, end, searching = group + 1, top, Int32(1)
        while searching > 0:
            own = Int32(0)
            if first + lane < groups:
                own = cutlass.min(mEnds[first + lane + 1], rows)
            hits = cute.arch.vote_ballot_sync(own > top)
            if hits != 0:
                # The lowest lane that has one.
                holder = cute.arch.popc((hits & -hits) - 1)
                first = first + holder
                end = cute.arch.shuffle_sync(own, holder)
                searching = Int32(0)
            else:
                first = first + WARP
                if first >= groups:
                    searching = Int32(0)
        return first, end

    def tile_number(self, cta: Cta, unit: GroupUnit) -> Int32:
        return unit.tile

    def first_row(self, cta: Cta, unit: GroupUnit) -> Int32:
        return unit.group * (cta.of.n * self.halves)

    def all_rows(self, cta: Cta, unit: int) -> Int32:
        # Each expert has a multiple of 64 rows, or of a block's.
        return cute.size(cta.given.weight.mW, mode=[0]) * TILE // unit

    def first_token(self, unit: GroupUnit) -> Int32:
        return unit.begin + unit.m * self.smem.tile_m

    def end_of_tokens(self, cta: Cta, unit: GroupUnit) -> Int32:
        return unit.end

    def row_scales(self, cta: Cta, unit: GroupUnit) -> cute.Tensor:
        return cute.domain_offset((self.first_row(cta, unit),), super().row_scales(cta, unit))

    def bias(self, cta: Cta, unit: GroupUnit) -> cute.Tensor | None:
        return None if cta.given.mBias is None else cta.given.mBias[unit.group, None]

    # ---- rows of no group

    @cute.jit
    def blank(self, tid: Int32, mD: cute.Tensor, lead: Int32, top: Int32):
        """Zeros for the rows before ``lead`` and from ``top`` on: this CTA's share, a row to a warp."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        rows, columns = mD.shape
        warps = const_expr(self.threads // WARP)
        for i in cutlass.range(cta * warps + tid // WARP, lead + (rows - top), ctas * warps, unroll=1):
            row = i if i < lead else i - lead + top
            for column in cutlass.range(tid % WARP, columns, WARP, unroll=1):
                to = cute.make_tensor(mD.iterator + (Int64(row) * mD.stride[0] + column), cute.make_layout(1))
                to[0] = mD.element_type(0.0)
