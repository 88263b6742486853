"""Sources of a CTA's work, which name its *shares* one after the other: tiles, or parts of a tile's K.

Producer and consumers ask the same source, each for itself (``WarpSpecialized.produce``, ``consume``):

- :class:`TileWalk`: tiles a grid apart, each with all of K. Bodies that share tiles have walks of their own:
  ``warpgroup_split.py``, ``warpgroup_packed.py``.
- :class:`DepthWalk`: the same over groups' matrices, each as deep as its group has rows.
- :class:`GroupRing`: tiles of groups of rows, which the producer's warp finds and passes on.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cutekernels.kernels.cute.parts.boxes import BoxOperands, Corner
from cutekernels.kernels.cute.parts.schedule import RingTile, TileRing
from cutekernels.kernels.cute.parts.walk import GroupTile, GroupWalk, WalkState


@dataclass(frozen=True)
class Share:
    """The k-tiles of a tile that a CTA multiplies."""

    corner: Corner
    begin: int | Int32  # k-tile
    count: Int32  # k-tiles
    owner: bool | Boolean = True  # the results are this CTA's to store
    row: Int32 | None = None  # of both operands, where the tile's depth begins
    depth: Int32 | None = None  # rows of it, which no k-tile need divide
    end: Int32 | None = None  # of the tile's group of rows
    number: Int32 | None = None  # of the share
    stop: Int32 | None = None  # behind the last k-tile, where it is known before the count

    @property
    def k_end(self) -> Int32:
        """The k-tile behind the last."""
        return self.begin + self.count if self.stop is None else self.stop


class TileSource:
    """The common part of sources. Fields of a share that are not known at once, or cost registers, come when needed."""

    counted: ClassVar[bool]  # a share is a number, and all know how many there are
    tokens_first: ClassVar[bool]  # tokens are the first operand, whichever side of a tile is theirs
    k_tiles: Int32 | None  # of a tile, where all have as many

    def deepen(self, share: Share) -> Share:
        """``share`` with its depth, where that lies in memory: for the producer at once, before its products else."""
        return share

    def cut(self, share: Share) -> Share:
        """The producer's ``share`` with its part of K."""
        return share

    def passed(self, number: Int32) -> Int32:
        """The k-tiles of a share, for the group of a ping-pong that passes over them."""
        return self.k_tiles

    def following(self, number: Int32) -> Int32:
        """The share behind, which is the other group's."""
        return number

    def outputs(self, outputs: BoxOperands, share: Share) -> BoxOperands:
        """Where the results of ``share`` go."""
        return outputs


@dataclass(frozen=True)
class TileWalk(TileSource):
    """The tiles of out, and those of this CTA's cluster: ``first``, ``first + step``, ... below ``count``."""

    body: Any  # says where a tile lies
    rank: Int32  # of this CTA in its cluster
    first: Int32
    count: Int32
    step: Int32
    tiles_m: Int32  # of clusters
    tiles_n: Int32
    rows: Int32  # of out
    columns: Int32
    k_tiles: Int32 | None = None  # of a tile, where all have as many
    counted: ClassVar[bool] = True
    tokens_first: ClassVar[bool] = False

    @cute.jit
    def share(self, index: Int32) -> Share:
        """A cluster's CTAs have neighbouring tiles; its next tile is a grid further."""
        return Share(self.body.place(self, index), 0, self.k_tiles)

    def to_load(self, index: Int32) -> Share:
        """Share ``index`` for the producer."""
        return self.deepen(self.share(index))

    @cute.jit
    def following(self, number: Int32) -> Int32:
        # The last one has none behind it and stands for it.
        return cutlass.min(number + self.step, self.count - 1)


@dataclass(frozen=True, kw_only=True)
class DepthWalk(TileWalk):
    """Tiles of every group's matrix, one group after the other, as deep as the group has rows."""

    mEnds: cute.Tensor  # (G + 1,)
    depth: Int32  # rows of all

    @cute.jit
    def span(self, group: Int32) -> tuple[Int32, Int32]:
        """Where the rows of ``group`` begin, and how many there are; ends may be anything and are clamped."""
        begin = cutlass.min(cutlass.max(self.mEnds[group], Int32(0)), self.depth)
        end = cutlass.min(cutlass.max(self.mEnds[group + 1], begin), self.depth)
        return begin, end - begin

    @cute.jit
    def deepen(self, share: Share) -> Share:
        row, depth = self.span(share.corner.layer)
        return replace(share, count=cute.ceil_div(depth, self.body.smem.tile_k), row=row, depth=depth)

    @cute.jit
    def passed(self, number: Int32) -> Int32:
        _, depth = self.span(self.body.place(self, number).layer)
        return cute.ceil_div(depth, self.body.smem.tile_k)


@dataclass(frozen=True)
class GroupTensors:
    """Tensors of a product of groups of rows that the kernel reads and writes without TMA."""

    mD: cute.Tensor  # (T, N)
    mEnds: cute.Tensor  # (G + 1,)
    mBias: cute.Tensor | None  # (G, N)


@dataclass(frozen=True)
class GroupRing(TileSource):
    """Tiles of groups of rows, which the producer's warp finds among the groups' ends (``walk.py``) and puts in a ring
    (``schedule.py``). The grid's clusters take tiles in turn; one at a group's end begins early, where the group has so
    many rows. Behind the last tile consumers write zeros to the rows of no group, which the last entry names.

    full[place]: 1 arrival, the producer's; the consumers wait. empty[place]: 1 arrival of each warp that reads it, 4
    times the groups that share a tile; the producer waits. In ping-pong a group reads every second entry, and each
    has a last one.
    """

    walk: GroupWalk
    ring: TileRing
    at: cute.Pointer  # the ring, in shared memory
    given: GroupTensors
    tile: tuple[int, int]  # tokens, and columns of out
    clusters: tuple[int, int]  # CTAs along tokens, and along out's columns
    shifted: bool  # the last columns' tiles begin early too
    swapped: bool  # out's columns are the rows of a tile
    tiles_o: Int32  # of clusters, along out's columns
    k_tiles: Int32
    rows: Int32 | None = None  # of out
    columns: Int32 | None = None
    block: Int32 | None = None  # this CTA; None: read where the producer begins, as is the grid's size
    blocks: Int32 | None = None
    rank: Int32 | None = None  # of this CTA in its cluster
    first: Int32 | None = None
    step: Int32 | None = None
    counted: ClassVar[bool] = False
    tokens_first: ClassVar[bool] = True

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.clusters[0] * self.clusters[1]

    # ---- the producer's warp

    @cute.jit
    def locate(self) -> "GroupRing":
        """With what the producer alone needs: out's size, the cluster's first tile, and how far apart its tiles are."""
        rows, columns = self.given.mD.shape if self.rows is None else (self.rows, self.columns)
        block = cute.arch.block_idx()[0] if self.block is None else self.block
        blocks = cute.arch.grid_dim()[0] if self.blocks is None else self.blocks
        rank, first, step = block % self.cluster, block // self.cluster, blocks // self.cluster
        return replace(self, rows=rows, columns=columns, rank=rank, first=first, step=step)

    @cute.jit
    def start(self, rHigh: cute.Tensor) -> tuple[WalkState, Int32]:
        """The walk before its first tile, whose chunk of groups lies in ``rHigh``; rows that belong to no group."""
        lead = cutlass.min(cutlass.max(self.given.mEnds[0], Int32(0)), self.rows)
        return self.walk.start(self.given.mEnds, self.rows, rHigh, lead), lead

    @cute.jit
    def find(self, rHigh: cute.Tensor, state: WalkState, tile: Int32) -> tuple[WalkState, GroupTile]:
        """Tile number ``tile``, of group -1 where there is none."""
        return self.walk.find(self.given.mEnds, self.rows, rHigh, state, tile, self.tiles_o)

    @cute.jit
    def publish(self, entry: Int32, found: GroupTile) -> Share:
        """Passes this CTA's tile of the cluster's on, as entry ``entry``."""
        tile_m, tile_n = found.m, found.n
        if const_expr(self.clusters[0] > 1):
            tile_m = tile_m * self.clusters[0] + self.rank
        if const_expr(self.clusters[1] > 1):
            tile_n = tile_n * self.clusters[1] + self.rank
        token = cutlass.max(cutlass.min(found.begin + tile_m * self.tile[0], found.end - self.tile[0]), found.begin)
        column = tile_n * self.tile[1]
        if const_expr(self.shifted):
            column = cutlass.max(cutlass.min(column, self.columns - self.tile[1]), Int32(0))
        tile = RingTile(token, column, found.group, found.end)
        self.ring.publish(self.at, entry, tile)
        return self.share(tile)

    @cute.jit
    def end(self, entry: Int32, lead: Int32, state: WalkState):
        """Says that there is no tile, and which rows have no group."""
        self.ring.publish(self.at, entry, RingTile(lead, state.top, Int32(-1), Int32(0)))

    # ---- consumers

    @cute.jit
    def receive(self, entry: Int32) -> RingTile:
        return self.ring.receive(self.at, entry)

    @cute.jit
    def share(self, tile: RingTile) -> Share:
        row, column = (tile.column, tile.row) if const_expr(self.swapped) else (tile.row, tile.column)
        return Share(Corner(row, column, tile.group), 0, self.k_tiles, end=tile.end)

    def outputs(self, outputs: BoxOperands, share: Share) -> BoxOperands:
        """The group's bias, and its end."""
        bias = None if self.given.mBias is None else self.given.mBias[share.corner.layer, None]
        return replace(outputs, mBias=bias, mOut=self.given.mD, end=share.end)
