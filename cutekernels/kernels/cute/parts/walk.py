"""Tiles of groups of rows whose ends only the device knows: which group a tile belongs to, and where it lies in it."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutekernels.kernels.cute.parts.schedule import Raster

WARP = 32
EACH = 4  # groups that a lane keeps
CHUNK = WARP * EACH  # groups that a warp looks at together


@dataclass(frozen=True)
class GroupWalk:
    """Tiles group by group, for a warp that asks for them in rising order and keeps ``CHUNK`` groups in registers.

    ``unit`` rows are a row of tiles; in a group ``raster`` walks over rows of tiles and ``tiles_n`` columns. Ends may
    be anything: they are clamped to the rows, and one that falls counts as the largest before it. So groups never
    overlap, and a bound on the number of tiles holds for any ends.
    """

    unit: int
    raster: Raster

    @cute.jit
    def tiles(self, begin: Int32, end: Int32) -> Int32:
        return (end - begin + (self.unit - 1)) // self.unit

    @cute.jit
    def chunk(
        self, mEnds: cute.Tensor, rows: Int32, rHigh: cute.Tensor, first: Int32, top: Int32
    ) -> tuple[Int32, Int32, Int32]:
        """Reads the groups from ``first`` on, behind row ``top``: each lane's ends go to ``rHigh``.

        Returns where the lane's first group begins, tiles up to the end of its last one, and the end of the chunk.
        """
        lane = cute.arch.lane_idx()
        groups = mEnds.shape[0] - 1
        tiles = self.tiles
        peak = top
        for i in cutlass.range_constexpr(EACH):
            behind = first + lane * EACH + (i + 1)
            high = Int32(0)
            if behind <= groups:
                high = mEnds[behind]
            peak = cutlass.max(peak, cutlass.min(high, rows))
            rHigh[i] = peak
        for distance in cutlass.range_constexpr(5):
            lower = cute.arch.shuffle_sync_up(peak, 1 << distance, mask_and_clamp=0)
            peak = cutlass.max(peak, lower)  # a lane with none below gets its own
        low = cute.arch.shuffle_sync_up(peak, 1, mask_and_clamp=0)
        if lane == 0:
            low = top
        total, begin = Int32(0), low
        for i in cutlass.range_constexpr(EACH):
            rHigh[i] = cutlass.max(rHigh[i], low)
            total = total + tiles(begin, rHigh[i])
            begin = rHigh[i]
        for distance in cutlass.range_constexpr(5):
            lower = cute.arch.shuffle_sync_up(total, 1 << distance, mask_and_clamp=0)
            if lane >= (1 << distance):
                total = total + lower
        return low, total, cute.arch.shuffle_sync(peak, WARP - 1)

    @cute.jit
    def find(
        self,
        mEnds: cute.Tensor,
        rows: Int32,
        rHigh: cute.Tensor,
        state: tuple[Int32, Int32, Int32, Int32, Int32],  # first, low, total, top; tiles before the chunk
        tile: Int32,
        tiles_n: Int32,
    ) -> tuple[tuple[Int32, Int32, Int32, Int32, Int32], Int32, Int32, Int32, Int32, Int32]:
        """``(state, group, begin, end, row of tiles, column of tiles)`` of ``tile``; group -1 where there is none, and
        then state's top is the end of the last group.
        """
        first, low, total, top, before = state
        lane = cute.arch.lane_idx()
        groups = mEnds.shape[0] - 1
        chunk, tiles, place = self.chunk, self.tiles, self.raster.tile
        slot = tile // tiles_n
        passed, searching = Int32(WARP), Int32(1)
        while searching > 0:
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(before + total <= slot))
            if passed < WARP or first + CHUNK >= groups:
                searching = Int32(0)
            else:
                before = before + cute.arch.shuffle_sync(total, WARP - 1)
                first = first + CHUNK
                low, total, top = chunk(mEnds, rows, rHigh, first, top)
        # Every lane looks through its groups; the result of the lane that has the tile counts.
        own, at = Int32(0), low
        for i in cutlass.range_constexpr(EACH):
            own = own + tiles(at, rHigh[i])
            at = rHigh[i]
        inside = slot - before - (total - own)
        group, begin, end = first + lane * EACH, low, rHigh[0]
        for i in cutlass.range_constexpr(1, EACH):
            count = tiles(begin, end)
            if inside >= count:
                inside = inside - count
                group, begin, end = first + lane * EACH + i, rHigh[i - 1], rHigh[i]
        holder = cutlass.min(passed, Int32(WARP - 1))
        group = cute.arch.shuffle_sync(group, holder)
        begin = cute.arch.shuffle_sync(begin, holder)
        end = cute.arch.shuffle_sync(end, holder)
        inside = cute.arch.shuffle_sync(inside, holder)
        at_m, at_n = Int32(0), Int32(0)
        if passed == WARP:
            group = Int32(-1)
        else:
            at_m, at_n = place(inside * tiles_n + tile - slot * tiles_n, tiles(begin, end), tiles_n)
        return (first, low, total, top, before), group, begin, end, at_m, at_n
