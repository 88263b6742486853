"""Grouped GEMM, warpgroup schedule: a product for each group of rows by TMA and warpgroup MMA.

Roles, pipeline and steps are :class:`WarpgroupGemm`'s (``warpgroup.py``), over tiles that the device finds:
    Producer warp: finds the CTA's next tile among the groups' ends (``parts/walk.py``), passes it on through a ring in
        shared memory, then issues its loads.
    Consumer warp groups: take tiles from the ring, in ping-pong every second entry; multiply; store what belongs to the
        group (``GroupBoxes``). Behind the last tile they write zeros to the rows of no group.

Ring (``parts/schedule.py``): ``PLACES`` places ahead. full[place]: 1 arrival, the producer's; the consumers wait.
    empty[place]: 1 arrival of each warp that reads it, 4 times the groups that share a tile; the producer waits. The
    last entry (the last two in ping-pong, one for each group) says that there is none, and which rows have no group.

One tile, producer: find; publish; for each k-tile wait empty[stage], announce, load both operands.
One tile, consumer: receive; the bias; (ping-pong: wait for order;) mainloop; boxes.

Order and ends:
    Tiles run group by group, so that CTAs at work share an expert's weights in the L2. An expert is a coordinate of the
    weights' TMA. The tile at a group's end begins early, where the group has so many rows; else it reads rows of the
    next group, which spoil only rows of the product that are not stored. Nothing is masked in the mainloop; a ragged K
    is filled with zeros by the TMA.
``swap_ab`` puts weight rows on the MMA's side of 64, and tokens on that of 16 to 256.

Refuses (``ops/moe/grouped_schedules.py``): what ``gemm``'s does; a gate with a bias or a weight that is not K-major.

Source:
    CUTLASS's grouped GEMM finds tiles by a warp that scans the problems' sizes; here sizes are prefix sums already and
    no descriptor is written on the device.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cutekernels.kernels.cute.parts.boxes import BoxOperands
from cutekernels.kernels.cute.parts.schedule import TileRing
from cutekernels.kernels.cute.parts.smem import WarpgroupSmem
from cutekernels.kernels.cute.parts.tile_source import GroupRing, GroupTensors
from cutekernels.kernels.cute.parts.walk import GroupWalk
from cutekernels.kernels.cute.products.warpgroup import Cta, Side, WarpgroupGemm


@dataclass(frozen=True)
class GroupedBody(WarpgroupGemm):
    """The product, with a ring as its source."""

    source: type[GroupRing] = GroupRing

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
        return GroupWalk(self.tokens.rows * self.clusters[0], self.raster)

    @property
    def ring(self) -> TileRing:
        return TileRing(WarpgroupSmem.PLACES, 4 * self.sharing)

    @cute.jit
    def shares(self, cta: Cta, groups: GroupTensors, tiles_o: Int32) -> GroupRing:
        k_tiles = cute.ceil_div(cute.size(cta.operands[0].box.coordinates, mode=[1]), self.tile_k)
        return GroupRing(
            walk=self.walk,
            ring=self.ring,
            at=cta.shared.ring,
            given=groups,
            tile=(self.tokens.rows, self.weights.box),
            clusters=self.clusters,
            shifted=True,
            swapped=self.swap_ab,
            cluster=self.cluster,
            tiles_o=tiles_o,
            k_tiles=k_tiles,
            block=cta.block,
        )


@dataclass(frozen=True)
class WarpgroupGrouped:
    """``product`` of each group, whose results are :class:`GroupBoxes`."""

    product: WarpgroupGemm

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
        body = GroupedBody(**vars(replace(self.product, source=GroupRing)))
        swap_ab = const_expr(body.swap_ab)
        mX = body.prepare(mX, False, False)
        mW = body.prepare(mW, False, not (body.rows_k_major if swap_ab else body.columns_k_major))  # (N, K, G)
        mTile = body.prepare(mD, body.swap_ab, body.results.rows_contiguous)
        # Tokens are the tile's rows and weights its columns, or the reverse.
        tokens, weights = body.tma_of(mX, not swap_ab), body.tma_of(mW, swap_ab)
        tma_d, tD = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), mTile, body.results.layout(), body.results.shape
        )
        tiled_mma = body.mma(mX.element_type)
        # As many tiles as there can be at most bound the grid: the device alone knows how many there are.
        rows, groups = mX.shape[0], mEnds.shape[0] - 1
        tiles_o = cute.ceil_div(mD.shape[1], body.weights.box * body.clusters[1])
        most = (rows // body.walk.unit + cutlass.min(groups, rows)) * tiles_o * body.cluster
        out = BoxOperands(tma_d, tD, None, None, None, None, None)
        arguments = (tokens, weights, out, GroupTensors(mD, mEnds, mBias), tiled_mma, tiles_o)
        body.start(arguments, cutlass.min(most, Int32(body.resident)), stream)
