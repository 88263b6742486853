"""Grouped GEMM, multistage schedule: a product for each group of rows, whose ends are known to the device alone.

Roles and pipeline:
    Those of :class:`MultistageGemm`, whose ``produce``, ``consume`` and ``store`` run on views of the CTA's group. A
    view ends where the group does: what lies outside is neither read nor written, so a ragged group is masked by the
    same row masks (along M) or by the same partial first k-tile (along K) as a ragged matrix.

One CTA:
    1. Each warp finds the CTA's tile among the groups' ends, without a barrier (``find``).
    2. A tile of a group is filled, multiplied and stored; one of rows of no group gets zeros; a surplus one returns.

    The grid holds as many tiles as there can be at most, whatever the ends (``slots``). Along K it is exact.

Refuses:
    A persistent product (``ops/products/grouped.py`` asks for persistent=0) and C; along K a bias too.

Source:
    The tile search stands in for the host's sorted tile list of Triton's fused MoE (vLLM ``moe_align_block_size``),
    whose padding of each group to whole tiles is not needed here.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.epilogue import EpilogueOperands
from cutekernels.kernels.cute.parts.gemm_arguments import GemmOperands
from cutekernels.kernels.cute.parts.schedule import Tile
from cutekernels.kernels.cute.products.multistage import MultistageGemm

WARP = 32


@dataclass(frozen=True)
class GroupTile:
    """A tile of rows: its group, its number in the group, and the group's first row and rows."""

    group: Int32  # -1: rows before the first group; the number of groups: rows behind the last
    tile: Int32
    begin: Int32
    extent: Int32


@dataclass(frozen=True)
class MultistageGrouped(MultistageGemm):
    """The body. ``along``: the groups divide ``"m"``, rows of A and out, or ``"k"``, the depth."""

    along: str

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # (M, N), or (G, M, N)
        mA: cute.Tensor,  # (M, K); along K, (K, M)
        mB: cute.Tensor,  # (G, N, K); along K, (K, N)
        mEnds: cute.Tensor,  # (G + 1,)
        mBias: cute.Tensor | None,  # (G, N)
        stream: cuda.CUstream,
    ):
        groups = mEnds.shape[0] - 1
        if const_expr(self.along == "k"):
            # Both operands lie along their rows: (K, M) and (K, N), seen as (M, K) and (N, K).
            mA, mB = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 0])) for t in (mA, mB)]
        tiles_n = cute.ceil_div(mD.shape[cute.rank(mD) - 1], self.results.tile_n)
        # Along M, as many tiles as there can be at most, whatever the ends; along K, every group's matrix.
        if const_expr(self.along == "m"):
            blocks = slots(mA.shape[0], groups, self.results.tile_m) * tiles_n
        else:
            blocks = cute.ceil_div(mA.shape[0], self.results.tile_m) * tiles_n * groups
        self.launch((mD, mA, mB, mEnds, mBias, self.mma.tiled_mma(mA.element_type)), [blocks, 1, 1], stream)

    @cute.kernel
    def kernel(
        self,
        mD: cute.Tensor,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mEnds: cute.Tensor,
        mBias: cute.Tensor | None,
        tiled_mma: cute.TiledMma,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cta = self.set_up(tid, mA.element_type, tiled_mma)
        groups = mEnds.shape[0] - 1
        tiles_n = cute.ceil_div(mD.shape[cute.rank(mD) - 1], self.results.tile_n)
        if const_expr(self.along == "m"):
            # -- rows of A in groups: find the tile's group, and multiply views that end where the group does
            rows = mA.shape[0]
            slot, column = self.raster.tile(block, slots(rows, groups, self.results.tile_m), tiles_n)
            own = self.find(mEnds, rows, slot, self.results.tile_m)
            expert = cutlass.min(cutlass.max(own.group, Int32(0)), groups - 1)
            vA, vD = part(mA, 0, own.begin, own.extent), part(mD, 0, own.begin, own.extent)
            vB, bias = layer(mB, expert), None
            if const_expr(mBias is not None):
                bias = mBias[expert, None]
            given = GemmOperands(vD, vA, vB, EpilogueOperands(mBias=bias, alpha=Float32(1.0)))
            tile = Tile(own.tile, column, Int32(0))
            # A surplus CTA has no rows and returns. Rows before the first group or behind the last get zeros.
            if own.tile * self.results.tile_m < own.extent:
                if own.group >= 0 and own.group < groups:
                    self.multiply(cta, given, tile)
                else:
                    self.blank(tid, vD, tile)
        else:
            # -- the depth in groups: each CTA reads its group's two ends, and its K is as deep as the group
            own_tile = self.raster.place(block, cute.ceil_div(mA.shape[0], self.results.tile_m), tiles_n)
            depth = mA.shape[1]
            begin = cutlass.min(cutlass.max(mEnds[own_tile.layer], Int32(0)), depth)
            extent = cutlass.min(cutlass.max(mEnds[own_tile.layer + 1], begin), depth) - begin
            vA, vB = part(mA, 1, begin, extent), part(mB, 1, begin, extent)
            given = GemmOperands(mD, vA, vB, EpilogueOperands(alpha=Float32(1.0)))
            tile = Tile(own_tile.m, own_tile.n, Int32(0))
            self.produce(cta, given, tile)
            self.consume(cta, given, tile)
            # Out's matrix is found behind the mainloop, which has its registers.
            self.store(cta, replace(given, mD=layer(mD, own_tile.layer)), tile)

    @cute.jit
    def find(self, mEnds: cute.Tensor, rows: Int32, slot: Int32, tile: int) -> GroupTile:
        """The ``slot``-th tile, of ``tile`` rows; surplus tiles lie behind the rows and have an extent of 0.

        Ends may be anything and are clamped. Each warp searches for itself, 32 groups at a time, one to a lane.
        """
        lane = cute.arch.lane_idx()
        groups = mEnds.shape[0] - 1
        group, inside, begin, length = Int32(-1), Int32(0), rows, Int32(0)
        first, before, searching = Int32(-1), Int32(0), Int32(1)
        while searching > 0:
            # This lane's group: its rows [low, high). Group -1 are the rows before the first, ``groups`` the rest.
            mine = first + lane
            low, high = Int32(0), rows
            if mine >= 0:
                low = rows
                if mine <= groups:
                    low = cutlass.min(cutlass.max(mEnds[mine], Int32(0)), rows)
            # An end before the group's begin makes it empty.
            if mine < groups:
                high = cutlass.min(cutlass.max(mEnds[mine + 1], low), rows)
            tiles = (high - low + (tile - 1)) // tile
            # Inclusive prefix sum over the warp: tiles up to the end of this lane's group.
            ends = tiles
            for distance in cutlass.range_constexpr(5):
                lower = cute.arch.shuffle_sync_up(ends, 1 << distance, mask_and_clamp=0)
                if lane >= (1 << distance):
                    ends = ends + lower
            # Groups that end before the slot; the next one has it, if it is among these 32.
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(before + ends <= slot))
            if passed < WARP:
                group = first + passed
                begin = cute.arch.shuffle_sync(low, passed)
                length = cute.arch.shuffle_sync(high, passed) - begin
                inside = slot - before - cute.arch.shuffle_sync(ends - tiles, passed)
                searching = Int32(0)
            else:
                # None of these 32: the next ones.
                before = before + cute.arch.shuffle_sync(ends, WARP - 1)
                first = first + WARP
                if first > groups:
                    searching = Int32(0)
        if inside < 0 or inside >= (length + (tile - 1)) // tile:  # sums of wrong ends may overflow
            inside, length = Int32(0), Int32(0)
        return GroupTile(group, inside, begin, length)

    @cute.jit
    def blank(self, tid: Int32, vD: cute.Tensor, tile: Tile):
        """Zeros for a tile of rows that belong to no group."""
        m, n = cute.size(vD, mode=[0]), cute.size(vD, mode=[1])
        for i in cutlass.range(tid, self.results.tile_m * self.results.tile_n, self.results.threads, unroll=1):
            row = tile.m * self.results.tile_m + i // self.results.tile_n
            column = tile.n * self.results.tile_n + i % self.results.tile_n
            if row < m and column < n:
                vD[row, column, 0] = vD.element_type(0.0)


def slots(rows: Int32, groups: Int32, tile: int) -> Int32:
    """Tiles of ``tile`` rows that ``groups`` can have at most, with the rows before and behind them."""
    return rows // tile + cutlass.min(groups + 2, rows)


def part(t: cute.Tensor, mode: int, begin: Int32, extent: Int32) -> cute.Tensor:
    """``(X, Y)`` from ``begin`` on along ``mode``, ``extent`` long, as ``(X, Y, 1)``."""
    iterator = t.iterator + Int64(begin) * t.layout.stride[mode]
    shape = (extent, t.shape[1], 1) if mode == 0 else (t.shape[0], extent, 1)
    layout = cute.make_layout(shape, stride=(*t.layout.stride, 0))
    return cute.make_tensor(iterator.align(t.iterator.alignment), layout)


def layer(t: cute.Tensor, at: Int32) -> cute.Tensor:
    """``(G, X, Y)`` at ``at``, as ``(X, Y, 1)``."""
    iterator = t.iterator + Int64(at) * t.layout.stride[0]
    layout = cute.make_layout((*t.shape[1:], 1), stride=(*t.layout.stride[1:], 0))
    return cute.make_tensor(iterator.align(t.iterator.alignment), layout)
