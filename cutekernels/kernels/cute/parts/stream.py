"""Even shares of tiles for a fixed number of CTAs: who has which k-tiles, who shares a tile, where sums are left.

A *unit* is one k-tile of one tile; units are numbered tile by tile, so tile t of ``k_tiles`` has units
``t * k_tiles .. (t + 1) * k_tiles - 1``. Plain arithmetic on ints, on the host and on the device alike; products stay
below 2^31 where units times CTAs do. There are at least as many units as CTAs.
"""

from __future__ import annotations

from typing import Any

SLOTS = 2  # of partial sums a CTA: a range that begins within a tile shares that one, and the one where it ends


def begin(cta: Any, ctas: Any, units: Any) -> Any:
    """The first unit of ``cta``; its last is the one before the next CTA's first."""
    return cta * units // ctas


def owner(unit: Any, ctas: Any, units: Any) -> Any:
    """The CTA that has ``unit``."""
    return ((unit + 1) * ctas - 1) // units


def slot(cta: Any, first: Any) -> Any:
    """Where ``cta`` leaves its sums of a tile; ``first`` is the CTA that has the tile's first unit.

    Only the tile's first CTA can have begun in an earlier tile and share this one too.
    """
    return cta * SLOTS + 1 // (cta - first + 1)
