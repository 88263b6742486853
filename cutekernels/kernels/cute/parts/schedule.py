"""The map from CTAs to tiles: index arithmetic on the device, and a queue for tiles that differ in work."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@dataclass(frozen=True)
class Tile:
    """A tile of a batch of matrices: its row and column, counted in tiles, and the matrix."""

    m: Int32
    n: Int32
    layer: Int32


@dataclass(frozen=True)
class Raster:
    """A walk over the tiles of C in bands of ``group`` tile rows, down each band's columns.

    CTAs that run together share ``group`` row panels of A and a few column panels of B, so both stay in L2.
    ``group=1`` walks row by row.
    """

    group: int

    @cute.jit
    def tile(self, block: Int32, tiles_m: Int32, tiles_n: Int32) -> tuple[Int32, Int32]:
        """``(tile_m, tile_n)`` of the ``block``-th CTA; every block below ``tiles_m * tiles_n`` has its own."""
        band_tiles = self.group * tiles_n
        band = block // band_tiles
        first = band * self.group
        rows = cutlass.min(tiles_m - first, Int32(self.group))
        inside = block - band * band_tiles
        column = inside // rows
        return first + inside - column * rows, column

    @cute.jit
    def place(self, block: Int32, tiles_m: Int32, tiles_n: Int32) -> Tile:
        """The ``block``-th tile of a batch of such matrices, one layer after the other."""
        layer = block // (tiles_m * tiles_n)
        m, n = self.tile(block - layer * (tiles_m * tiles_n), tiles_m, tiles_n)
        return Tile(m, n, layer)


@dataclass(frozen=True)
class TileQueue:
    """The numbers of a CTA's tiles, which its loading warp passes on to ``readers`` consumer threads.

    The first is the CTA's own number, the others are a grid apart. ``dynamic``: they come from a
    counter in global memory, so that a CTA that is done early takes more; the last CTA to draw leaves the counter zero.

    Shared memory at ``at``, where ``dynamic``: a full barrier (1 arrival, the loading warp's), an empty barrier
    (``readers`` arrivals) and the number. A position is the phase alone: 1 at the loading warp's first tile, 0 at the
    readers', then the other one, in turns.
    """

    dynamic: bool
    readers: int

    @cute.jit
    def init(self, at: cute.Pointer):
        """Initialize the barriers; one thread's work."""
        if const_expr(self.dynamic):
            cute.arch.mbarrier_init(at, 1)
            cute.arch.mbarrier_init(at + 1, self.readers)

    @cute.jit
    def draw(self, tile: Int32, count: Int32, mCounter: cute.Tensor | None) -> Int32:
        """The tile after ``tile``, for the loading warp; ``count`` or more where there is none."""
        blocks, _, _ = cute.arch.grid_dim()
        following = tile + blocks
        if const_expr(self.dynamic):
            drawn = Int32(0)
            if cute.arch.lane_idx() == 0:
                drawn = cute.arch.atomic_add(mCounter.iterator, Int32(1), sem="relaxed", scope="gpu")
                if drawn == count - 1:  # as many draws as tiles: the first of each CTA makes up for its last
                    mCounter[0] = Int32(0)
            following = blocks + cute.arch.shuffle_sync(drawn, 0)
        return following

    @cute.jit
    def publish(self, at: cute.Pointer, tile: Int32, phase: Int32):
        """Pass ``tile`` on: the loading warp's work."""
        if const_expr(self.dynamic):
            # Wait until all readers have taken the number before.
            cute.arch.mbarrier_wait(at + 1, phase)
            if cute.arch.lane_idx() == 0:
                cute.make_tensor(cute.recast_ptr(at + 2, dtype=Int32), cute.make_layout(1))[0] = tile
                # The readers may take it: this lane's arrival releases its store.
                cute.arch.mbarrier_arrive(at)

    @cute.jit
    def receive(self, at: cute.Pointer, tile: Int32, phase: Int32) -> Int32:
        """The tile after ``tile``, for the readers."""
        blocks, _, _ = cute.arch.grid_dim()
        following = tile + blocks
        if const_expr(self.dynamic):
            # Wait for the loading warp's number, and say that this thread has it.
            cute.arch.mbarrier_wait(at, phase)
            following = cute.make_tensor(cute.recast_ptr(at + 2, dtype=Int32), cute.make_layout(1))[0]
            cute.arch.mbarrier_arrive(at + 1)
        return following


@dataclass(frozen=True)
class RingTile:
    """A tile of a group of rows, as a ring passes it on.

    Behind the last tile comes an entry with ``group`` -1; its ``row`` and ``column`` are the rows before the first
    group and the end of the last one.
    """

    row: Int32
    column: Int32
    group: Int32
    end: Int32  # of the group's rows


@dataclass(frozen=True)
class TileRing:
    """Tiles on their way from the warp that finds them to the consumer warps, a few tiles ahead.

    A tile is four numbers in one of ``places``. Each place has a full barrier (1 arrival, the finding warp's) and an
    empty barrier (``readers`` arrivals, one a consumer warp), as a pipeline's stage has. Tile ``i`` lies in place
    ``i % places``, at phase ``i // places % 2``.
    """

    places: int
    readers: int

    @cute.jit
    def init(self, at: cute.Pointer):
        """Initialize the barriers; one thread's work."""
        for place in cutlass.range_constexpr(self.places):
            cute.arch.mbarrier_init(at + place, 1)
            cute.arch.mbarrier_init(at + self.places + place, self.readers)

    @cute.jit
    def numbers(self, at: cute.Pointer, place: Int32) -> cute.Tensor:
        """The four numbers of a place, behind the barriers."""
        return cute.make_tensor(cute.recast_ptr(at + 2 * self.places, dtype=Int32) + 4 * place, cute.make_layout(4))

    @cute.jit
    def publish(self, at: cute.Pointer, i: Int32, tile: RingTile):
        """Pass tile ``i`` on: the finding warp's work."""
        place = i % self.places
        # Wait until all readers have taken the tile that lay here; the first time around this passes at once.
        cute.arch.mbarrier_wait(at + self.places + place, ((i // self.places) & 1) ^ 1)
        if cute.arch.lane_idx() == 0:
            own = self.numbers(at, place)
            own[0], own[1], own[2], own[3] = tile.row, tile.column, tile.group, tile.end
            # The readers may take it: this lane's arrival releases its stores.
            cute.arch.mbarrier_arrive(at + place)

    @cute.jit
    def receive(self, at: cute.Pointer, i: Int32) -> RingTile:
        """Tile ``i``, for each reading warp."""
        place = i % self.places
        # Wait for the finding warp.
        cute.arch.mbarrier_wait(at + place, (i // self.places) & 1)
        own = self.numbers(at, place)
        row, column, group, end = own[0], own[1], own[2], own[3]
        # All lanes have read; then one says so for the warp.
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(at + self.places + place)
        uniform = cute.arch.make_warp_uniform
        return RingTile(uniform(row), uniform(column), uniform(group), uniform(end))
