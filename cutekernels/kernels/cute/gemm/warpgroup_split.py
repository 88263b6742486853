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

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cutekernels.kernels.cute.gemm.warpgroup_gemm import Part, Shared, Walk, WarpgroupGemm
from cutekernels.kernels.cute.parts.boxes import FIRST_BARRIER, BoxOperands
from cutekernels.kernels.cute.parts.epilogue import EpilogueOperands
from cutekernels.kernels.cute.parts.pipeline import Position
from cutekernels.kernels.cute.parts.tile_share import VECTOR, TileOwner, add_vectors, leave_vectors
from cutekernels.kernels.cute.parts.warp_groups import GROUP


@dataclass(frozen=True)
class Parts:
    """The workspace in which CTAs leave accumulators for owners."""

    mPartials: cute.Tensor  # (VECTOR, THREAD, ACCUMULATOR / VECTOR, CTA), flat
    mCounters: cute.Tensor  # (GROUP, CTA), flat; zero before and after


@dataclass(frozen=True)
class WarpgroupSplit(WarpgroupGemm):
    """The body."""

    split_k: int

    @property
    def shifted(self) -> bool:
        return False

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # ([L,] M, N)
        mA: cute.Tensor,  # ([L,] M, K)
        mB: cute.Tensor,  # ([L,] K, N)
        mC: cute.Tensor | None,  # ([L,] M, N)
        mBias: cute.Tensor | None,  # (N,)
        alpha: Float32,
        beta: Float32,
        mPartials: cute.Tensor,
        mCounters: cute.Tensor,
        stream: cuda.CUstream,
    ):
        own = Parts(mPartials, mCounters)
        self.extend(mD, mA, mB, EpilogueOperands(mC, mBias, alpha, beta, own=own), stream)

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
    def walk(self, all_tiles: Walk) -> Walk:
        """Tiles, then parts of tiles, a grid further each."""
        # A cluster has at most one part, its last: full waves give each cluster equally many tiles.
        full = self.full(all_tiles.count)
        return replace(all_tiles, full=full, count=full + (all_tiles.count - full) * self.split_k)

    @cute.jit
    def tile(self, walk: Walk, index: Int32) -> Int32:
        return index if index < walk.full else walk.full + (index - walk.full) // self.split_k

    @cute.jit
    def part(self, walk: Walk, index: Int32) -> Part:
        """All of K, or a share. A tile's owner, which has the first share, comes last."""
        begin, count = Int32(0), walk.k_tiles
        if index >= walk.full:
            # The last of a tile's clusters has its first share: the owner waits for lower numbers.
            share = cute.ceil_div(walk.k_tiles, self.split_k)
            begin = (self.split_k - 1 - (index - walk.full) % self.split_k) * share
            count = cutlass.max(cutlass.min(share, walk.k_tiles - begin), Int32(0))
        return Part(begin, count)

    @cute.jit
    def consume(
        self,
        tid: Int32,
        group: Int32,
        shared: Shared,
        walk: Walk,
        tiled_mma: cute.TiledMma,
        outputs: BoxOperands,
    ):
        """A consumer group's tiles, and its part of one, one after the other."""
        consumer = self.consumer(tid, group, shared, tiled_mma)
        buffers = self.buffers(consumer, shared)
        at, boxes_used = Position(Int32(0), Int32(0)), Int32(0)
        for index in cutlass.range(walk.first, walk.count, walk.step, unroll=1):
            part = self.part(walk, index)
            tile = self.place(walk, self.tile(walk, index))
            corner = self.results.corner(buffers, tile)
            if part.begin == 0:
                # C's first boxes and the bias, for the one who stores.
                self.results.load_inputs(buffers, outputs, tile, corner, boxes_used)
            consumer.acc.fill(0.0)
            # All products are done when this returns: accumulators may leave.
            at = self.multiply(consumer, shared, at, part.count)
            if part.begin == 0:
                # The tile is this CTA's to store: whole, or with the others' parts.
                if part.count < walk.k_tiles:
                    self.add_others(consumer.acc, outputs.own, consumer.thread, group)
                self.results.store_tile(buffers, outputs, consumer.acc, corner, boxes_used)
                boxes_used = boxes_used + self.results.count
            else:
                self.leave(consumer.acc, outputs.own, consumer.thread, group, part.begin, walk)
        self.results.drain(consumer.thread)

    @cute.jit
    def leave(self, acc: cute.Tensor, own: Parts, thread: Int32, group: Int32, begin: Int32, walk: Walk):
        """A group's part of a tile for the owner, whose CTA is so many clusters further as shares lie before it."""
        block, _, _ = cute.arch.block_idx()
        # Each CTA has room for one part, since it leaves one at most.
        leave_vectors(acc, self.partials(own), thread + group * GROUP, block)
        owner = block + begin // cute.ceil_div(walk.k_tiles, self.split_k) * self.cluster
        TileOwner(GROUP, FIRST_BARRIER).post(self.counter(own, owner, group), thread, group)

    @cute.jit
    def add_others(self, acc: cute.Tensor, own: Parts, thread: Int32, group: Int32):
        """``acc`` is the sum of all parts of the tile."""
        block, _, _ = cute.arch.block_idx()
        others = const_expr(self.split_k - 1)
        # Waits until the others' parts, released before their counts, are visible to all of the group's threads.
        TileOwner(GROUP, FIRST_BARRIER).wait(self.counter(own, block, group), thread, Int32(others), group)
        # The second share is the cluster's before this one, and so on down.
        numbers = (block - self.cluster, -self.cluster)
        add_vectors(acc, self.partials(own), thread + group * GROUP, numbers, Int32(others))

    @cute.jit
    def partials(self, own: Parts) -> cute.Tensor:
        """(VECTOR, THREAD, ACCUMULATOR / VECTOR, CTA)."""
        threads = const_expr(GROUP * self.groups)
        vectors = const_expr(self.tile_m * self.tile_n // threads // VECTOR)
        shape = (VECTOR, threads, vectors, self.resident)
        stride = (1, VECTOR, VECTOR * threads, VECTOR * threads * vectors)
        return cute.make_tensor(own.mPartials.iterator, cute.make_layout(shape, stride=stride))

    @cute.jit
    def counter(self, own: Parts, block: Int32, group: Int32) -> cute.Pointer:
        """Where the parts of the tile of ``block``'s group are counted."""
        return own.mCounters.iterator + (block * self.groups + group)
