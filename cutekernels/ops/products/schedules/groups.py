"""Expectations of schedules for groups of rows: how many tiles rows fill, and how many experts they choose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from cutekernels.columns import larger, over
from cutekernels.ops.products.schedules.packed_problem import QuantizedProblem

_MOST_EXACT = 40.0  # mean rows of an expert up to which their spread is summed term by term


@dataclass(frozen=True)
class Experts:
    """Questions of rules and model beside the product of one expert."""

    rows: int
    experts: int
    clamped: bool = False
    """Whether the gate behind the product is gpt-oss's."""

    @property
    def hit(self) -> float:
        """Experts that the rows are expected to choose."""
        return expected_hit(self.rows, self.experts) if self.rows else 0.0

    @property
    def mean(self) -> float:
        """Rows of an expert that has some."""
        return self.rows / max(1.0, self.hit)

    def row_tiles(self, c: Any) -> Any:
        """Tiles of ``c`` that they are expected to fill."""
        return row_tiles(self.rows, self.experts, c, "tile_m")

    def waves(self, c: Any, columns: Any, ctas: int) -> Any:
        """Rounds of ``ctas`` that they are expected to take, with ``columns`` tiles for each tile of rows."""
        mean, spread = over(c, ("tile_m",), lambda c: spread_of_tiles(self.rows, self.experts, c.tile_m))
        # Three draws, equally likely, that have this mean and spread.
        few, many = larger(1, mean - spread * 1.5**0.5), mean + spread * 1.5**0.5
        return sum(-(-tiles * columns // ctas) for tiles in (few, mean, many)) / 3

    def most_tiles(self, p: QuantizedProblem, c: Any) -> Any:
        """Tiles of out that there can be at most, whatever the groups' ends."""
        return (self.rows // c.tile_m + min(self.experts, self.rows)) * -(-p.n // c.tile_n)


def row_tiles(rows: int, experts: int, c: Any, *knobs: str) -> Any:
    """Tiles with as many rows as the knobs' product, as a whole number."""
    return over(c, knobs, lambda c: math.ceil(tile_rows(rows, experts, math.prod(getattr(c, name) for name in knobs))))


def tile_rows(rows: int, experts: int, unit: int) -> float:
    """Tiles of ``unit`` rows that so many rows are expected to fill."""
    return spread_of_tiles(rows, experts, unit)[0]


@cache
def spread_of_tiles(rows: int, experts: int, unit: int) -> tuple[float, float]:
    """Mean and standard deviation of the tiles of ``unit`` rows, a Poisson number of rows to each expert."""
    if experts == 1:
        return float(-(-rows // unit)), 0.0
    mean = rows / experts
    if mean > 20 * unit:
        return experts * (mean / unit + 0.5), math.sqrt(experts * (mean / unit**2 + 1 / 12))
    last = math.ceil(mean + 6 * math.sqrt(mean) + 6)
    shares = [_exceeds(mean, at) for at in range(0, last, unit)]
    tiles = sum(shares)
    squares = sum((2 * i + 1) * share for i, share in enumerate(shares))
    return experts * tiles, math.sqrt(experts * max(0.0, squares - tiles**2))


def expected_hit(rows: int, experts: int) -> float:
    """Experts that so many rows are expected to choose."""
    return tile_rows(rows, experts, max(1, rows))


def _exceeds(mean: float, at: int) -> float:
    """How likely a Poisson number with this mean is larger than ``at``; by the normal law where the mean is large."""
    if mean > _MOST_EXACT:
        return 0.5 * math.erfc((at + 0.5 - mean) / math.sqrt(2 * mean))
    term = total = math.exp(-mean)
    for i in range(1, at + 1):
        term *= mean / i
        total += term
    return max(0.0, 1.0 - total)
