"""Arguments of bodies of packed weights, and values that they hand on: sizes; of the warpgroup body a CTA's shares and
memory, a consumer.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cutekernels.kernels.cute.parts.boxes import BoxOperands, Corner
from cutekernels.kernels.cute.parts.launch import Launched
from cutekernels.kernels.cute.parts.packed import Weight
from cutekernels.kernels.cute.parts.pipeline import Position
from cutekernels.kernels.cute.parts.tile_share import TileOwner, Workspace
from cutekernels.kernels.cute.parts.tile_source import Share, TileSource
from cutekernels.kernels.cute.parts.warp_groups import TmaTensor
from cutekernels.kernels.cute.products.warp_specialized import Shared


@dataclass(frozen=True)
class Operands:
    """Tensors of a launch; of experts, rows in groups."""

    mD: cute.Tensor  # (M, N)
    mX: cute.Tensor  # (M, K)
    weight: Weight
    mBias: cute.Tensor | None  # (N,); of experts (E, N)
    workspace: Workspace
    mEnds: cute.Tensor | None = None  # where groups end, (E + 1,)
    clamp: tuple[Float32, Float32] | None = None  # alpha and limit of a clamped gate


class PackedBody(Launched):
    """The common part of the bodies. ``extend`` launches one."""

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # (M, N)
        mX: cute.Tensor,  # (M, K)
        mW: cute.Tensor,  # (N / 64, K / 64, bytes)
        mS: cute.Tensor,  # (groups, N padded to 64), or of 128 x 128 blocks
        mZ: cute.Tensor | None,  # bytes, as the scales
        mF: cute.Tensor | None,  # (2, N padded to 64)
        mBias: cute.Tensor | None,  # (N,)
        mPartials: cute.Tensor,  # a tile of accumulators a run
        mCounters: cute.Tensor,  # of each tile, or of each group's part of one
        ctas: Int32,
        *rest: Any,  # what is dealt out to each CTA; the stream
    ):
        weight, workspace = Weight(mW, mS, mZ, mF), Workspace(mPartials, mCounters)
        self.extend(Operands(mD, mX, weight, mBias, workspace), ctas, rest[:-1], rest[-1])


class PackedGroups:
    """Likewise of bodies of packed experts: a base in front of the body of one weight."""

    clamped: bool  # the gate is gpt-oss's

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
        mPartials: cute.Tensor,  # of the skinny body, as the counters
        mCounters: cute.Tensor,
        ctas: Int32,
        alpha: Float32,
        limit: Float32,
        stream: cuda.CUstream,
    ):
        clamp = (alpha, limit) if const_expr(self.clamped) else None
        weight, workspace = Weight(mW, mS, mZ, mF), Workspace(mPartials, mCounters)
        self.extend(Operands(mD, mX, weight, mBias, workspace, mEnds, clamp), ctas, (), stream)


@dataclass(frozen=True)
class Extents:
    """Sizes of the product in the kernel's units."""

    n: Int32
    m: Int32
    k: Int32
    k_tiles: Int32  # of a tile of out
    tiles_n: Int32  # along weight rows
    tiles_m: Int32  # along tokens
    share: Int32  # k-tiles of each CTA in tiles that CTAs share
    rounds: Int32 | None = None  # whole tiles of each CTA, where CTAs share the others
    ctas: Int32 | None = None
    rank: Int32 | None = None  # of this CTA in a cluster that shares a tile; ``ctas`` are clusters then
    tiles_k: Int32 | None = None  # packed tiles along K

    @property
    def tiles(self) -> Int32:
        """Tiles of out."""
        return self.tiles_n * self.tiles_m


@dataclass(frozen=True)
class PackedWalk(TileSource):
    """Whole tiles, a grid apart, then a CTA's run of k-tiles that are dealt out; or a cluster's part of its tile."""

    body: Any
    of: Extents
    cta: Int32
    count: Int32 | None = None
    k_tiles: None = None
    first: ClassVar[int] = 0
    step: ClassVar[int] = 1
    counted: ClassVar[bool] = True

    @cute.jit
    def share(self, i: Int32) -> Share:
        """The ``i``-th share of this CTA: its whole tiles come first."""
        tile, begin, end = self.cta + i * self.of.ctas, Int32(0), self.of.k_tiles
        if const_expr(self.body.split):
            if i >= self.of.rounds:
                first, last = self.run()
                shared = first // self.of.k_tiles + (i - self.of.rounds)
                tile = self.of.rounds * self.of.ctas + shared
                begin = cutlass.max(first - shared * self.of.k_tiles, Int32(0))
                end = cutlass.min(last - shared * self.of.k_tiles, self.of.k_tiles)
        elif const_expr(self.body.cluster > 1):
            begin = self.of.rank * self.of.k_tiles // self.body.cluster
            end = (self.of.rank + 1) * self.of.k_tiles // self.body.cluster
        owner = True
        if const_expr(self.body.split):
            owner = begin == 0
        elif const_expr(self.body.cluster > 1):
            owner = self.of.rank < self.body.owners
        row, column = tile, Int32(0)
        if self.of.tiles_m > 1:  # or nothing is divided: loads begin the sooner
            row, column = self.body.raster.tile(tile, self.of.tiles_n, self.of.tiles_m)
        corner = Corner(row * self.body.columns, column * self.body.smem.tile_n, Int32(0))
        return Share(corner, begin, end - begin, number=tile, owner=owner, stop=end)

    @cute.jit
    def run(self) -> tuple[Int32, Int32]:
        """This CTA's k-tiles of the tiles that are shared, counted from the first one's."""
        shared = self.of.tiles - self.of.rounds * self.of.ctas
        begin = TileOwner().run() * self.of.share
        return begin, cutlass.min(begin + self.of.share, shared * self.of.k_tiles)

    @cute.jit
    def total(self) -> Int32:
        """How many tiles this CTA has a part of."""
        if const_expr(self.body.cluster > 1):  # a cluster's only one
            return cutlass.min(self.of.tiles - self.cta, Int32(1))
        if const_expr(not self.body.split):
            return cutlass.max((self.of.tiles - self.cta + self.of.ctas - 1) // self.of.ctas, Int32(0))
        begin, end = self.run()
        parts = Int32(0)
        if end > begin:
            parts = (end - 1) // self.of.k_tiles - begin // self.of.k_tiles + 1
        return self.of.rounds + parts

    def to_load(self, i: Int32) -> Share:
        return self.share(i)


@dataclass(frozen=True)
class Cta:
    """A CTA's part of the product, for all of its roles."""

    shared: Shared
    tokens: TmaTensor  # (M, K)
    weight: Weight
    of: Extents
    tiled_mma: cute.TiledMma
    outputs: BoxOperands
    extra: Any  # the workspace; of experts, their ends and a clamped gate's alpha and limit


@dataclass(frozen=True)
class Consumer:
    """State of a consumer warp group from its first tile to its last."""

    thread: Int32  # 0 to 127, in the group
    group: Int32  # of those that have other rows
    cta: Cta
    rX: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K, STAGE)
    rW: cute.Tensor  # decoded weights of 64 of K (MMA, 1, 4)
    rV: cute.Tensor  # those of the next 64
    acc: cute.Tensor  # ((2, 2, N / 8), 1, 1)
    part: cute.Tensor  # accumulators of a group of K; or those of the tile
    constant: Int32  # of the decoder
    turn: Int32 | int = 0  # among groups of the same rows


@dataclass(frozen=True)
class LoopState:
    """The place of a mainloop with two batches under way."""

    at: Position
    before: Int32  # stages of the two batches in front, which are released when their products are done
    last: Int32
    coming: Float32  # the scale of the next k-tile's block
