"""Values that bodies of packed weights hand on: sizes; of the warpgroup body a CTA's share and memory, a consumer."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cutekernels.kernels.cute.parts.boxes import BoxOperands
from cutekernels.kernels.cute.parts.packed import Weight
from cutekernels.kernels.cute.parts.warp_groups import TmaTensor


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
class Shared:
    """Stages and mbarriers of a CTA in shared memory."""

    storage: cute.Pointer
    sX: cute.Tensor  # (tokens, K, STAGE)
    full: cute.Pointer
    empty: cute.Pointer
    c_full: cute.Pointer  # of no boxes: there is no C
    ring: cute.Pointer  # of tiles that the producer finds


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
    group: Int32
    cta: Cta
    tiled_mma: cute.TiledMma
    rX: cute.Tensor  # descriptors (MMA, MMA_N, MMA_K, STAGE)
    rW: cute.Tensor  # decoded weights of 64 of K (MMA, 1, 4)
    rV: cute.Tensor  # those of the next 64
    acc: cute.Tensor  # ((2, 2, N / 8), 1, 1)
    part: cute.Tensor  # accumulators of a group of K; or those of the tile
    constant: Int32  # of the decoder

    @property
    def shared(self) -> Shared:
        return self.cta.shared
