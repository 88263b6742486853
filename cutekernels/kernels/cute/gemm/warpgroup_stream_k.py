"""GEMM, warpgroup schedule with stream-K: where tiles would not fill the last wave, CTAs share the K of some.

Roles, barriers and the mainloop are :class:`WarpgroupGemm`'s, cooperative. The k-tiles of all tiles, one tile's behind
another's, are dealt out in runs of equal length, one to a cluster; a run may begin and end within a tile.

A part of a tile, consumer:
    The run that begins the tile is its owner. Another run has its part first of all: it leaves the accumulators in
    global memory, counts itself at the owner, and goes on with its next tile, without an epilogue.
    The owner has its part last: it waits until all later runs of the tile are counted, adds their parts in the order
    of the runs, so that bits are the same every time, and stores.
    Each group does so on its own, and each CTA of a cluster, whose tiles lie side by side.

Order: owners wait for CTAs of lower numbers alone (``parts/tile_share.py``): the last cluster has the first run.

Refuses (``ops/gemm/warpgroup.py``): ping-pong, bands of tile rows, accumulators in fp16, tiles that fill the GPU's
waves, a short K.

Source:
    Stream-K (Osama et al., 2023). Here the CTA that begins a tile stores it, and runs are dealt out from the last CTA
    to the first.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutekernels.kernels.cute.gemm.warpgroup_gemm import Part, Shared, Walk, WarpgroupGemm
from cutekernels.kernels.cute.parts.boxes import FIRST_BARRIER, BoxOperands
from cutekernels.kernels.cute.parts.epilogue import EpilogueOperands
from cutekernels.kernels.cute.parts.pipeline import Position
from cutekernels.kernels.cute.parts.tile_share import VECTOR, TileOwner, add_vectors, leave_vectors
from cutekernels.kernels.cute.parts.warp_groups import GROUP


@dataclass(frozen=True)
class Parts:
    """What CTAs leave for owners."""

    mPartials: cute.Tensor  # (CTA, GROUP, ACCUMULATOR / VECTOR, THREAD, VECTOR), flat
    mCounters: cute.Tensor  # (CTA, GROUP), flat; zero before and after


@dataclass(frozen=True)
class WarpgroupStreamK(WarpgroupGemm):
    """The body. Its grid has all CTAs that are resident at once."""

    @property
    def accumulators(self) -> int:
        """A thread's, of a tile."""
        return self.tile_m * self.tile_n // (GROUP * self.groups)

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
        self.extended(mD, mA, mB, EpilogueOperands(mC, mBias, alpha, beta, own=own), stream)

    @cute.jit
    def ctas(self, tiles: Int32) -> Int32:
        return Int32(self.resident)

    @cute.jit
    def walk(self, all_tiles: Walk) -> Walk:
        """The tiles that this cluster's run touches; ``begin`` to ``end`` are its k-tiles, of all tiles'."""
        k_tiles, clusters = all_tiles.k_tiles, all_tiles.step
        units = all_tiles.count * k_tiles
        share = cute.ceil_div(units, clusters)
        begin = (clusters - 1 - all_tiles.first) * share
        end = cutlass.min(begin + share, units)
        # A run behind the last unit has no tile.
        return replace(all_tiles, first=begin // k_tiles, count=cute.ceil_div(end, k_tiles), step=Int32(1), share=share)

    @cute.jit
    def part(self, walk: Walk, index: Int32) -> Part:
        block, _, _ = cute.arch.block_idx()
        clusters = Int32(self.resident // self.cluster)
        first = (
            clusters - 1 - block // self.cluster
        ) * walk.share - index * walk.k_tiles  # of the run, from the tile on
        begin = cutlass.max(first, Int32(0))
        return Part(begin, cutlass.min(first + walk.share, walk.k_tiles) - begin)

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
        """A consumer group's parts of tiles, one after the other."""
        consumer = self.consumer(tid, group, shared, tiled_mma)
        buffers = self.buffers(consumer, shared)
        at, boxes_used = Position(Int32(0), Int32(0)), Int32(0)
        block, _, _ = cute.arch.block_idx()
        last_cluster = Int32(self.resident // self.cluster - 1)
        run = last_cluster - block // self.cluster
        owner = TileOwner(GROUP, FIRST_BARRIER)
        partials = self.partials(outputs.own)
        thread = consumer.thread + group * GROUP
        for index in cutlass.range(walk.first, walk.count, unroll=1):
            part = self.part(walk, index)
            tile = self.place(walk, index)
            corner = self.results.corner(buffers, tile)
            if part.begin == 0:
                self.results.load_inputs(buffers, outputs, tile, corner, boxes_used)
            consumer.acc.fill(0.0)
            at = self.multiply(consumer, shared, at, part.count)
            if part.begin > 0:
                # Another run began this tile: its accumulators are left for that one.
                leave_vectors(consumer.acc, partials, thread, block)
                began = (index * walk.k_tiles) // walk.share
                owner.post(self.counter(outputs.own, walk, began, group), consumer.thread, group)
            else:
                if part.count < walk.k_tiles:
                    # The tile's other k-tiles are the later runs', of CTAs a cluster lower each.
                    last = (index * walk.k_tiles + walk.k_tiles - 1) // walk.share
                    owner.wait(self.counter(outputs.own, walk, run, group), consumer.thread, last - run, group)
                    add_vectors(consumer.acc, partials, thread, (block - self.cluster, -self.cluster), last - run)
                self.results.store_tile(buffers, outputs, consumer.acc, corner, boxes_used)
                boxes_used = boxes_used + self.results.count
        self.results.drain(consumer.thread)

    @cute.jit
    def partials(self, own: Parts) -> cute.Tensor:
        """(VECTOR, THREAD, ACCUMULATOR / VECTOR, CTA)."""
        threads, vectors = GROUP * self.groups, self.accumulators // VECTOR
        shape = (VECTOR, threads, vectors, self.resident)
        stride = (1, VECTOR, VECTOR * threads, VECTOR * threads * vectors)
        return cute.make_tensor(own.mPartials.iterator, cute.make_layout(shape, stride=stride))

    @cute.jit
    def counter(self, own: Parts, walk: Walk, run: Int32, group: Int32) -> cute.Pointer:
        """Of the tile that ``run`` begins and does not end: its CTA's with this one's place in the cluster."""
        clusters = Int32(self.resident // self.cluster)
        cta = (clusters - 1 - run) * self.cluster + walk.rank
        return own.mCounters.iterator + (cta * self.groups + group)
