"""Rules that Triton ops share: elements of a tile that each thread has, and of a tile that a problem leaves idle."""

from __future__ import annotations


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
