"""GEMM, warpgroup schedule with split K: the tiles of a last wave that is not full are shared by ``split_k`` CTAs each.

Roles, barriers and the mainloop are :class:`WarpgroupGemm`'s, cooperative. Full waves run as there. Behind them come
the parts of the tiles that are left: equal shares of K, one to a cluster, at most as many as run at once. All CTAs of a
share walk K side by side, so that what several of them read is in the L2.

A part of a tile, consumer:
    The part that begins at 0 is its tile's owner's. Another one's accumulators are left in global memory and counted
    at the owner, without an epilogue.
    The owner waits until all others are counted, adds them up in K's order, so that bits are the same every time, and
    stores.
    Each group does so on its own, and each CTA of a cluster, whose tiles lie side by side.

Order: owners wait for CTAs of lower numbers alone, which wait for nobody (``parts/tile_share.py``).
Ends: no tile begins early, since results of rows that two tiles had would differ by the order of their sums.

Refuses (``ops/products/schedules/warpgroup.py``): ping-pong, accumulators in fp16, waves that are full, more parts than
CTAs at once, a short K.

Source:
    CUTLASS's split K and stream-K (Osama et al., 2023) with data-parallel waves. Here shares are equal: runs that begin
    anywhere in K take up to three times as long (H100, 2026-11-27: docs/notes/gemm.md#split-k).
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cutekernels.kernels.cute.parts.tile_share import GroupParts, TileOwner, Workspace
from cutekernels.kernels.cute.parts.tile_source import Share, TileWalk
from cutekernels.kernels.cute.parts.warp_groups import GROUP
from cutekernels.kernels.cute.products.warpgroup import Consumer, Cta, WarpgroupGemm


@dataclass(frozen=True, kw_only=True)
class SplitWalk(TileWalk):
    """Tiles, then parts of tiles, a grid further each: a cluster has at most one part, its last share."""

    full: Int32  # tiles in full waves, which give each cluster equally many
    parts: Workspace

    @cute.jit
    def tile(self, index: Int32) -> Int32:
        """The tile that share ``index`` is a part of."""
        return index if index < self.full else self.full + (index - self.full) // self.body.split_k

    @cute.jit
    def part(self, index: Int32) -> tuple[Int32, Int32]:
        """All of K, or a part. A tile's owner, which has the first part, comes last: it waits for lower numbers."""
        split_k = const_expr(self.body.split_k)
        begin, count = Int32(0), self.k_tiles
        # Behind the full waves come parts, equal shares of K but for the last.
        if index >= self.full:
            share = cute.ceil_div(self.k_tiles, split_k)
            begin = (split_k - 1 - (index - self.full) % split_k) * share
            count = cutlass.max(cutlass.min(share, self.k_tiles - begin), Int32(0))
        return begin, count

    @cute.jit
    def to_load(self, index: Int32) -> Share:
        return Share(self.body.place(self, self.tile(index)), 0, self.k_tiles, number=index)

    @cute.jit
    def cut(self, share: Share) -> Share:
        begin, count = self.part(share.number)
        return replace(share, begin=begin, count=count)

    @cute.jit
    def share(self, index: Int32) -> Share:
        begin, count = self.part(index)
        return Share(self.body.place(self, self.tile(index)), begin, count, owner=begin == 0)


@dataclass(frozen=True)
class WarpgroupSplit(WarpgroupGemm):
    """The body."""

    split_k: int

    @property
    def shifted(self) -> bool:
        return False

    @cute.jit
    def full(self, tiles: Int32) -> Int32:
        """Tiles of clusters in full waves."""
        clusters = const_expr(self.resident // self.cluster)
        return tiles // clusters * clusters

    @cute.jit
    def ctas(self, tiles: Int32) -> Int32:
        full = self.full(tiles)
        return cutlass.min(full + (tiles - full) * self.split_k, Int32(self.resident // self.cluster)) * self.cluster

    @cute.jit
    def shares(self, cta: Cta, extra: Workspace, tiles: tuple[Int32, Int32, Int32]) -> SplitWalk:
        walk = WarpgroupGemm.shares(self, cta, None, tiles)
        # A cluster has at most one part, its last share: full waves give each cluster equally many tiles.
        full = self.full(walk.count)
        count = full + (walk.count - full) * self.split_k
        return SplitWalk(**vars(replace(walk, count=count)), full=full, parts=extra)

    @cute.jit
    def gather(self, source: SplitWalk, consumer: Consumer, share: Share) -> Boolean:
        """Its own accumulators and the others', for the tile's owner; who is none leaves them."""
        block, _, _ = cute.arch.block_idx()
        parts = GroupParts(self.groups, self.smem.tile_m * self.smem.tile_n // (GROUP * self.groups))
        owner = TileOwner(consumer.group)
        if share.owner:
            # The tile is this CTA's to store: whole, or with the others' parts. The second share is the cluster's
            # before this one, and so on down.
            if share.count < source.k_tiles:
                others = Int32(self.split_k - 1)
                # Wait until the others' parts, released before their counts, are visible to the group's threads.
                owner.wait(parts.counter(source.parts, consumer, block), consumer.thread, others)
                parts.add(source.parts, consumer, (block - self.cluster, -self.cluster), others)
        else:
            # Another's: the owner, so many clusters further as shares lie before this one, adds this part to its own.
            # Each CTA has room for one part, since it leaves one at most.
            parts.leave(source.parts, consumer, block)
            further = share.begin // cute.ceil_div(source.k_tiles, self.split_k) * self.cluster
            owner.post(parts.counter(source.parts, consumer, block + further), consumer.thread)
        return share.owner
