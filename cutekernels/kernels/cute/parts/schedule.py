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
    """The numbers of a CTA's tiles, which its loading warp passes on to ``readers`` threads that multiply.

    The first is the CTA's own number, the others are a grid apart. ``counted``: they come from a counter in global
    memory, so that a CTA that is done early takes more; the last CTA to ask leaves the counter zero.
    """

    counted: bool
    readers: int

    @cute.jit
    def init(self, at: cute.Pointer):
        """Initialize the barriers; one thread's work."""
        if const_expr(self.counted):
            cute.arch.mbarrier_init(at, 1)
            cute.arch.mbarrier_init(at + 1, self.readers)

    @cute.jit
    def draw(self, tile: Int32, count: Int32, mCounter: cute.Tensor | None) -> Int32:
        """The tile after ``tile``, for the loading warp; ``count`` or more where there is none."""
        blocks, _, _ = cute.arch.grid_dim()
        following = tile + blocks
        if const_expr(self.counted):
            drawn = Int32(0)
            if cute.arch.lane_idx() == 0:
                drawn = cute.arch.atomic_add(mCounter.iterator, Int32(1), sem="relaxed", scope="gpu")
                if drawn == count - 1:  # as many draws as tiles: the first of each CTA makes up for its last
                    mCounter[0] = Int32(0)
            following = blocks + cute.arch.shuffle_sync(drawn, 0)
        return following

    @cute.jit
    def publish(self, at: cute.Pointer, tile: Int32, turn: Int32):
        """Pass ``tile`` on: the loading warp's work. ``turn`` is 1 the first time, then 0 and 1 in turns."""
        if const_expr(self.counted):
            cute.arch.mbarrier_wait(at + 1, turn)
            if cute.arch.lane_idx() == 0:
                cute.make_tensor(cute.recast_ptr(at + 2, dtype=Int32), cute.make_layout(1))[0] = tile
                cute.arch.mbarrier_arrive(at)

    @cute.jit
    def receive(self, at: cute.Pointer, tile: Int32, turn: Int32) -> Int32:
        """The tile after ``tile``, for the readers. ``turn`` is 0 the first time."""
        blocks, _, _ = cute.arch.grid_dim()
        following = tile + blocks
        if const_expr(self.counted):
            cute.arch.mbarrier_wait(at, turn)
            following = cute.make_tensor(cute.recast_ptr(at + 2, dtype=Int32), cute.make_layout(1))[0]
            cute.arch.mbarrier_arrive(at + 1)
        return following


@dataclass(frozen=True)
class TileRing:
    """Tiles on their way from the warp that finds them to the warps that multiply, a few tiles ahead.

    A tile is four numbers in one of ``places``, which has a full and an empty barrier, as a stage has. Tile ``i`` lies
    in place ``i % places``, and ``readers`` warps read it.
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
    def publish(self, at: cute.Pointer, i: Int32, a: Int32, b: Int32, c: Int32, d: Int32):
        """Pass tile ``i`` on: the finding warp's work."""
        place = i % self.places
        numbers = self.numbers
        cute.arch.mbarrier_wait(at + self.places + place, ((i // self.places) & 1) ^ 1)
        if cute.arch.lane_idx() == 0:
            own = numbers(at, place)
            own[0], own[1], own[2], own[3] = a, b, c, d
            cute.arch.mbarrier_arrive(at + place)

    @cute.jit
    def receive(self, at: cute.Pointer, i: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """Tile ``i``, for each reading warp."""
        place = i % self.places
        numbers = self.numbers
        cute.arch.mbarrier_wait(at + place, (i // self.places) & 1)
        own = numbers(at, place)
        a, b, c, d = own[0], own[1], own[2], own[3]
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(at + self.places + place)
        uniform = cute.arch.make_warp_uniform
        return uniform(a), uniform(b), uniform(c), uniform(d)
