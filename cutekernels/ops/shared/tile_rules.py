"""Rules that Triton ops share: elements of a tile that each thread has, and of a tile that a problem leaves idle.

``accesses``, ``most_elements`` and ``idles`` are what a rule of an op's own returns. The ``*_rule`` make the whole rule
of an op whose tile is a product of knobs and of properties of the problem, by their names::

    accesses = accesses_rule("block_rows", "block_cols")
    no_idle_rows = idle_rule("block_rows", "rows", "{} rows")
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from cutekernels.op import power_of_two
from cutekernels.rules import of_both, of_config

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec


def accesses(tile: int, warps: int, vec: int, *, unit: str = "elements") -> str | None:
    """Each thread has one access of ``vec`` elements or more."""
    least = 32 * warps * vec
    return f"{32 * warps} threads of {vec} {unit} an access need {least}; a tile has {tile}" if tile < least else None


def most_elements(tile: int, warps: int, most: int) -> str | None:
    """A thread has ``most`` elements of a tile at most."""
    each = tile // (32 * warps)
    return f"a thread takes at most {most} elements; {tile} of a tile make {each}" if each > most else None


def idles(knob: str, value: int, most: int, there: str) -> str | None:
    """A tile is no larger than the power of two that covers what is ``there``."""
    return f"{knob}={value} idles most of a tile with {there}" if value > most else None


def accesses_rule(*tile: str, vec: str | int = "vec", one_warp: bool = False) -> Callable[..., str | None]:
    """The rule of :func:`accesses`. ``one_warp``: a single warp may have less."""

    @of_both
    def rule(self: object, p: Any, c: Any, gpu: GpuSpec) -> str | None:
        if one_warp and c.warps == 1:
            return None
        size = prod(getattr(c if hasattr(c, name) else p, name) for name in tile)
        return accesses(size, c.warps, vec if isinstance(vec, int) else getattr(p, vec))

    return rule


def elements_rule(*tile: str, most: int) -> Callable[..., str | None]:
    """The rule of :func:`most_elements`, of knobs alone."""

    @of_config
    def rule(self: object, c: Any, gpu: GpuSpec) -> str | None:
        return most_elements(prod(getattr(c, name) for name in tile), c.warps, most)

    return rule


def idle_rule(
    knob: str, extent: str | Callable[[Any], int], there: str, *, least: int = 1
) -> Callable[..., str | None]:
    """The rule of :func:`idles` for an ``extent`` of the problem, which ``there`` puts in words; tiles of up to
    ``least`` are for any.
    """

    @of_both
    def rule(self: object, p: Any, c: Any, gpu: GpuSpec) -> str | None:
        n = getattr(p, extent) if isinstance(extent, str) else extent(p)
        value, most = getattr(c, knob), max(least, power_of_two(n))
        return idles(knob, value, most, there.format(n, p=p)) if value > most else None

    return rule
