"""Weight gradients of grouped products, warpgroup schedule: ``out[e] = a[rows of e].T @ b[rows of e]``.

Roles, barriers and the order of steps are :class:`WarpgroupGemm`'s (``warpgroup.py``): one producer warp,
consumer warp groups, cooperative or in ping-pong, over the tiles of every expert's matrix, one after the other. Both
operands lie along their rows, and a tile is as deep as its expert has rows, so each tile has its own number of k-tiles;
an expert without rows gets zeros. Producer and consumers read the ends for themselves (``span``): offsets that change
while the kernel runs may hang it. In ping-pong a group passes over the other's stages by that tile's own depth.

Ends:
    Loads begin at the expert's first row, wherever that is, so an expert's *last* k-tile is the ragged one, and reaches
    into the next expert's rows. ``multiply`` treats it apart, behind the whole k-tiles: of its steps of 16 rows the one
    that is partly the expert's own is zeroed in shared memory behind the expert's end, by each group that reads it, in
    both operands (a NaN stays with its expert), and later steps are not multiplied.

Refuses (``ops/moe/grouped_schedules.py``): what ``gemm``'s does; matrices of fewer than 32 rows or columns.

Source:
    CUTLASS's grouped GEMM of ragged depth writes a descriptor for each group on the device; here one serves all.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cutekernels.kernels.cute.parts.boxes import BoxOperands
from cutekernels.kernels.cute.parts.tile_source import DepthWalk
from cutekernels.kernels.cute.products.warpgroup import Cta, WarpgroupGemm


@dataclass(frozen=True)
class DepthBody(WarpgroupGemm):
    """The product, of tiles that are as deep as their groups."""

    @cute.jit
    def shares(self, cta: Cta, groups: cute.Tensor, tiles: tuple[Int32, Int32, Int32]) -> DepthWalk:
        count = tiles[0] * tiles[1] * tiles[2]
        walk = replace(WarpgroupGemm.shares(self, cta, None, tiles), count=count)
        return DepthWalk(**vars(walk), mEnds=groups, depth=cute.size(cta.operands[0].box.coordinates, mode=[1]))


@dataclass(frozen=True)
class WarpgroupGroupedDepth:
    """``product`` of each group of rows."""

    product: WarpgroupGemm

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
        body = DepthBody(**vars(self.product))
        mR = body.prepare(mA if const_expr(not body.swap_ab) else mB, True, True)  # (M, T)
        mS = body.prepare(mB if const_expr(not body.swap_ab) else mA, True, True)  # (N, T)
        mD = body.prepare(mD, body.swap_ab, body.results.rows_contiguous)  # (M, N, G)
        # One descriptor serves all experts: a load moves its coordinates to the expert's first row.
        rows, columns = body.tma_of(mR, True), body.tma_of(mS, False)
        tma_d, tD = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), mD, body.results.layout(), body.results.shape
        )
        tiles = (*body.tiles(mD), mEnds.shape[0] - 1)
        blocks = cutlass.min(tiles[0] * tiles[1] * tiles[2] * body.cluster, Int32(body.resident))
        out = BoxOperands(tma_d, tD, None, None, None, None, None)
        body.start((rows, columns, out, mEnds, body.mma(mA.element_type), tiles), blocks, stream)
