"""Grouped GEMM, warpgroup schedule: a product for each group of rows, or one as deep as each group has rows.

Roles, barriers and steps are :class:`WarpgroupGemm`'s (``warpgroup.py``); the sources are others (``tile_source.py``).

:class:`WarpgroupGrouped`, over tiles that the device finds (:class:`GroupRing`). Tiles run group by group, so that CTAs
at work share an expert's weights in the L2. An expert is a coordinate of the weights' TMA. The tile at a group's end
reads rows of the next group where the group is short: they spoil only rows that are not stored (``GroupBoxes``).
``swap_ab`` puts weight rows on the MMA's side of 64, and tokens on that of 16 to 256.

:class:`WarpgroupGroupedDepth`, ``out[e] = a[rows of e].T @ b[rows of e]``: weight gradients (:class:`DepthWalk`). Both
operands lie along their rows, and an expert without rows gets zeros. Producer and consumers read the ends for
themselves: offsets that change while the kernel runs may hang it.
    Loads begin at the expert's first row, wherever that is, so an expert's *last* k-tile is the ragged one, and reaches
    into the next expert's rows. ``multiply`` treats it apart, behind the whole k-tiles: of its steps of 16 rows the one
    that is partly the expert's own is zeroed in shared memory behind the expert's end, by each group that reads it, in
    both operands (a NaN stays with its expert), and later steps are not multiplied.

Refuses (``ops/products/schedules/grouped.py``): what ``gemm``'s does; a gate with a bias or a weight that is not
K-major; along the depth matrices of fewer than 32 rows or columns.

Source:
    CUTLASS's grouped GEMM finds tiles by a warp that scans the problems' sizes, and writes descriptors on the device;
    here sizes are prefix sums already and one descriptor serves all.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cutekernels.kernels.cute.parts.boxes import BoxOperands
from cutekernels.kernels.cute.parts.tile_source import DepthWalk, GroupRing, GroupTensors, TileSource
from cutekernels.kernels.cute.parts.walk import GroupWalk
from cutekernels.kernels.cute.products.warpgroup import Cta, Side, WarpgroupGemm


@dataclass(frozen=True)
class WarpgroupGrouped(WarpgroupGemm):
    """The body, whose results are :class:`GroupBoxes`."""

    source: ClassVar[type[TileSource]] = GroupRing

    @property
    def tokens(self) -> Side:
        """The operand that holds tokens."""
        return self.of_columns if self.swap_ab else self.of_rows

    @property
    def weights(self) -> Side:
        return self.of_rows if self.swap_ab else self.of_columns

    @property
    def clusters(self) -> tuple[int, int]:
        """CTAs of a cluster along the tokens, which have weights in common, and along out's columns."""
        return self.weights.sharers, self.tokens.sharers

    @property
    def walk(self) -> GroupWalk:
        # A row of tiles is a cluster's: its CTAs lie side by side in a group.
        return GroupWalk(self.tokens.rows * self.clusters[0], self.raster)

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # (T, N)
        mX: cute.Tensor,  # (T, K)
        mW: cute.Tensor,  # (G, N, K); gated (G, 2 * N, K)
        mEnds: cute.Tensor,  # (G + 1,)
        mBias: cute.Tensor | None,  # (G, N)
        stream: cuda.CUstream,
    ):
        swap_ab = const_expr(self.swap_ab)
        mX = self.prepare(mX, False, False)
        mW = self.prepare(mW, False, not (self.rows_k_major if swap_ab else self.columns_k_major))  # (N, K, G)
        mTile = self.prepare(mD, self.swap_ab, self.results.rows_contiguous)
        # Tokens are the tile's rows and weights its columns, or the reverse.
        tokens, weights = self.tma_of(mX, not swap_ab), self.tma_of(mW, swap_ab)
        # Boxes whose rows all belong to one group leave by TMA.
        out = BoxOperands(self.results.tma(cpasync.CopyBulkTensorTileS2GOp(), mTile))
        tiled_mma = self.mma(mX.element_type)
        # As many tiles as there can be at most bound the grid: the device alone knows how many there are.
        rows, groups = mX.shape[0], mEnds.shape[0] - 1
        tiles_o = cute.ceil_div(mD.shape[1], self.weights.box * self.clusters[1])
        most = (rows // self.walk.unit + cutlass.min(groups, rows)) * tiles_o * self.cluster
        arguments = (tokens, weights, out, GroupTensors(mD, mEnds, mBias), tiled_mma, tiles_o)
        self.launch(arguments, [cutlass.min(most, Int32(self.resident)), 1, 1], stream)

    @cute.jit
    def shares(self, cta: Cta, groups: GroupTensors, tiles_o: Int32) -> GroupRing:
        k_tiles = cute.ceil_div(cute.size(cta.operands[0].box.coordinates, mode=[1]), self.smem.tile_k)
        return GroupRing(
            walk=self.walk,
            ring=self.ring,
            at=cta.shared.ring,
            given=groups,
            tile=(self.tokens.rows, self.weights.box),
            clusters=self.clusters,
            shifted=True,
            swapped=self.swap_ab,
            tiles_o=tiles_o,
            k_tiles=k_tiles,
            block=cta.block,
        )


@dataclass(frozen=True)
class WarpgroupGroupedDepth(WarpgroupGemm):
    """The body, whose tiles are as deep as their groups."""

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
        mR, mS = (mB, mA) if const_expr(self.swap_ab) else (mA, mB)
        mR, mS = self.prepare(mR, True, True), self.prepare(mS, True, True)  # (M, T), (N, T)
        mD = self.prepare(mD, self.swap_ab, self.results.rows_contiguous)  # (M, N, G)
        # One descriptor serves all experts: a load moves its coordinates to the expert's first row.
        rows, columns = self.tma_of(mR, True), self.tma_of(mS, False)
        # Every box is wholly one expert's: its matrix is a layer of out.
        out = BoxOperands(self.results.tma(cpasync.CopyBulkTensorTileS2GOp(), mD))
        tiles = (*self.tiles(mD), mEnds.shape[0] - 1)
        blocks = cutlass.min(tiles[0] * tiles[1] * tiles[2] * self.cluster, Int32(self.resident))
        self.launch((rows, columns, out, mEnds, self.mma(mA.element_type), tiles), [blocks, 1, 1], stream)

    @cute.jit
    def shares(self, cta: Cta, groups: cute.Tensor, tiles: tuple[Int32, Int32, Int32]) -> DepthWalk:
        # All experts' tiles, one expert after the other.
        count = tiles[0] * tiles[1] * tiles[2]
        walk = replace(WarpgroupGemm.shares(self, cta, None, tiles), count=count)
        return DepthWalk(**vars(walk), mEnds=groups, depth=cute.size(cta.operands[0].box.coordinates, mode=[1]))
