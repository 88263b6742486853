"""The map from CTAs to tiles: pure index arithmetic on the device."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


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
    def place(self, block: Int32, tiles_m: Int32, tiles_n: Int32) -> tuple[Int32, Int32, Int32]:
        """``(tile_m, tile_n, layer)`` of a batch of such matrices, one layer after the other."""
        layer = block // (tiles_m * tiles_n)
        tile = self.tile
        at_m, at_n = tile(block - layer * (tiles_m * tiles_n), tiles_m, tiles_n)
        return at_m, at_n, layer
