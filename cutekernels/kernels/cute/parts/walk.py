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
class WalkState:
    """Where a walk stands: the chunk of groups that the warp holds, and this lane's part of it."""

    first: Int32  # group of the chunk
    low: Int32  # where the lane's first group begins
    total: Int32  # tiles of the chunk up to the end of the lane's last group
    top: Int32  # where the chunk's last group ends
    before: Int32  # tiles of all groups before the chunk


@dataclass(frozen=True)
class GroupTile:
    """A tile of a group; of none, ``group`` is -1."""

    group: Int32
    begin: Int32  # row of the group
    end: Int32
    m: Int32  # row of tiles in the group
    n: Int32  # column of tiles


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
    def start(self, mEnds: cute.Tensor, rows: Int32, rHigh: cute.Tensor, lead: Int32) -> WalkState:
        """The state before the first tile; ``lead`` rows belong to no group."""
        return self.chunk(mEnds, rows, rHigh, Int32(0), lead, Int32(0))

    @cute.jit
    def chunk(
        self, mEnds: cute.Tensor, rows: Int32, rHigh: cute.Tensor, first: Int32, top: Int32, before: Int32
    ) -> WalkState:
        """Reads the groups from ``first`` on, behind row ``top`` and ``before`` tiles; a lane's ends to ``rHigh``."""
        lane = cute.arch.lane_idx()
        groups = mEnds.shape[0] - 1
        # This lane's ends, each the largest so far; groups behind the last one are empty.
        peak = top
        for i in cutlass.range_constexpr(EACH):
            behind = first + lane * EACH + (i + 1)
            high = Int32(0)
            if behind <= groups:
                high = mEnds[behind]
            peak = cutlass.max(peak, cutlass.min(high, rows))
            rHigh[i] = peak
        # Prefix maximum over the warp: an end that falls counts as the largest before it.
        for distance in cutlass.range_constexpr(5):
            lower = cute.arch.shuffle_sync_up(peak, 1 << distance, mask_and_clamp=0)
            peak = cutlass.max(peak, lower)  # a lane with none below gets its own
        low = cute.arch.shuffle_sync_up(peak, 1, mask_and_clamp=0)
        if lane == 0:
            low = top
        # Prefix sum over the warp: tiles up to the end of this lane's last group.
        total, begin = Int32(0), low
        for i in cutlass.range_constexpr(EACH):
            rHigh[i] = cutlass.max(rHigh[i], low)
            total = total + self.tiles(begin, rHigh[i])
            begin = rHigh[i]
        for distance in cutlass.range_constexpr(5):
            lower = cute.arch.shuffle_sync_up(total, 1 << distance, mask_and_clamp=0)
            if lane >= (1 << distance):
                total = total + lower
        return WalkState(first, low, total, cute.arch.shuffle_sync(peak, WARP - 1), before)

    @cute.jit
    def survey(
        self, mEnds: cute.Tensor, rows: Int32, rHigh: cute.Tensor, lead: Int32
    ) -> tuple[WalkState, Int32, Int32]:
        """The state before the first tile, how many rows of tiles all groups have, and where the last group ends."""
        groups = mEnds.shape[0] - 1
        state = self.start(mEnds, rows, rHigh, lead)
        first, total, top, before = state.first, state.total, state.top, state.before
        if groups > CHUNK:
            while first + CHUNK < groups:
                before = before + cute.arch.shuffle_sync(total, WARP - 1)
                first = first + CHUNK
                following = self.chunk(mEnds, rows, rHigh, first, top, before)
                total, top = following.total, following.top
            state = self.start(mEnds, rows, rHigh, lead)
        return state, before + cute.arch.shuffle_sync(total, WARP - 1), top

    @cute.jit
    def find(
        self, mEnds: cute.Tensor, rows: Int32, rHigh: cute.Tensor, state: WalkState, tile: Int32, tiles_n: Int32
    ) -> tuple[WalkState, GroupTile]:
        """The group's tile that is number ``tile`` of all. Where there is none, the state's ``top`` is the end of the
        last group.
        """
        first, low, total, top, before = state.first, state.low, state.total, state.top, state.before
        lane = cute.arch.lane_idx()
        groups = mEnds.shape[0] - 1
        slot = tile // tiles_n
        # Chunk after chunk, until one has the slot or the groups are at their end.
        passed, searching = Int32(WARP), Int32(1)
        while searching > 0:
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(before + total <= slot))
            if passed < WARP or first + CHUNK >= groups:
                searching = Int32(0)
            else:
                before = before + cute.arch.shuffle_sync(total, WARP - 1)
                first = first + CHUNK
                following = self.chunk(mEnds, rows, rHigh, first, top, before)
                low, total, top = following.low, following.total, following.top
        # Every lane looks through its groups; the result of the lane that has the tile counts.
        own, at = Int32(0), low
        for i in cutlass.range_constexpr(EACH):
            own = own + self.tiles(at, rHigh[i])
            at = rHigh[i]
        inside = slot - before - (total - own)
        group, begin, end = first + lane * EACH, low, rHigh[0]
        for i in cutlass.range_constexpr(1, EACH):
            count = self.tiles(begin, end)
            if inside >= count:
                inside = inside - count
                group, begin, end = first + lane * EACH + i, rHigh[i - 1], rHigh[i]
        # From the lane that has it to all lanes.
        holder = cutlass.min(passed, Int32(WARP - 1))
        group = cute.arch.shuffle_sync(group, holder)
        begin = cute.arch.shuffle_sync(begin, holder)
        end = cute.arch.shuffle_sync(end, holder)
        inside = cute.arch.shuffle_sync(inside, holder)
        m, n = Int32(0), Int32(0)
        if passed == WARP:
            group = Int32(-1)
        else:
            m, n = self.raster.tile(inside * tiles_n + tile - slot * tiles_n, self.tiles(begin, end), tiles_n)
        return WalkState(first, low, total, top, before), GroupTile(group, begin, end, m, n)
