"""Problems of every number of tokens, from a few that were recorded, and the configs chosen for them ahead of calls."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cutekernels import settings
from cutekernels.op import Op, Problem

Posed = tuple[Op[Any, Any], Problem]

_log = settings.logger("compile")
MOST_RECORDED = 200
"""Numbers of tokens that are recorded at most. Where problems follow no rule, those between are left out."""


@dataclass(frozen=True)
class Line:
    """The problems that one call poses, for each number of tokens from ``low`` to ``high``.

    Attributes:
        op: the op's name.
        first: the problem of ``low`` tokens.
        slopes: how much an extent grows with each token, by its name; all others stay.
    """

    op: str
    first: Problem
    slopes: tuple[tuple[str, int], ...]
    low: int
    high: int

    def at(self, tokens: int) -> Problem:
        return self.first.replace(**{n: getattr(self.first, n) + s * (tokens - self.low) for n, s in self.slopes})

    def parts(self, size: int) -> list[Line]:
        """The same line in pieces of at most ``size`` numbers of tokens."""
        return [
            replace(self, first=self.at(low), low=low, high=min(self.high, low + size - 1))
            for low in range(self.low, self.high + 1, size)
        ]

    def tokens_of(self, p: Problem) -> int | None:
        """The number of tokens for which ``p`` is on the line."""
        tokens = self.low
        if self.slopes:
            name, slope = self.slopes[0]
            tokens += (getattr(p, name) - getattr(self.first, name)) // slope
        return tokens if self.low <= tokens <= self.high and self.at(tokens) == p else None


@dataclass(frozen=True)
class Chosen:
    """The configs chosen for a line: from ``begins[i]`` tokens on ``configs[i]``, with where it comes from."""

    line: Line
    begins: list[int]
    configs: list[tuple[str, str]]

    def of(self, p: Problem) -> tuple[str, str] | None:
        tokens = self.line.tokens_of(p)
        return None if tokens is None else self.configs[bisect_right(self.begins, tokens) - 1]


def lines(record: Callable[[int], Sequence[Posed]], low: int, high: int) -> list[Line]:
    """Lines through all that ``record(tokens)`` gives for ``low`` to ``high`` tokens.

    Between two numbers of tokens extents grow evenly, which a few more of all alignments confirm; else both halves are
    asked. The lowest number stands alone: one token is often another kernel's.
    """
    recorded: dict[int, list[Posed]] = {}

    def at(tokens: int) -> list[Posed]:
        if tokens not in recorded:
            recorded[tokens] = list(record(tokens))
        return recorded[tokens]

    found = _between(at(low), low, at(low), low) or []
    spans = [(low + 1, high)] if high > low else []
    while spans and len(recorded) < MOST_RECORDED:
        a, b = spans.pop()
        joined = _between(at(a), a, at(b), b)
        middle = (a + b) // 2
        probes = (a + 1, middle | 1, middle & -16, (middle | 15) + 1, middle & -8, (middle | 7) + 1)
        if joined is not None and all(_agree(joined, t, at(t)) for t in {*probes} & {*range(a + 1, b)}):
            found += joined
            continue
        if _static(at(a)) != _static(at(b)):  # the last number of tokens whose calls are those of ``a``
            middle = a + bisect_left(range(a + 1, b), True, key=lambda t: _static(at(t)) != _static(at(a)))
        spans += [(middle + 1, b), (a, middle)]
    if spans:
        _log.warning("calls of %d to %d tokens follow no rule: some are not thought of", spans[-1][0], high)
    return _join(found)


def alone(posed: Iterable[Posed]) -> list[Line]:
    """A line of one number of tokens for each problem."""
    return [Line(op.name, p, (), 1, 1) for op, p in dict.fromkeys(posed)]


def _agree(found: Iterable[Line], tokens: int, posed: Iterable[Posed]) -> bool:
    """Whether the lines have just these problems for so many tokens."""
    return {(line.op, line.at(tokens)) for line in found} == {(op.name, p) for op, p in posed}


def _static(posed: Iterable[Posed]) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys((op.name, p.static()) for op, p in posed))


def _between(first: Sequence[Posed], a: int, last: Sequence[Posed], b: int) -> list[Line] | None:
    """A line from each problem of ``a`` tokens to its counterpart of ``b``; None where they have none."""
    if len(first) != len(last):
        return None
    found = []
    for (op, p), (other, q) in dict.fromkeys(zip(first, last, strict=True)):
        if op is not other or p.static() != q.static():
            return None
        grown = [(n, y - x) for n, x, y in zip(p.extent_names(), p.extents(), q.extents(), strict=True) if x != y]
        if any(growth % (b - a) for _, growth in grown):
            return None
        slopes = tuple((name, growth // (b - a)) for name, growth in grown)
        found.append(Line(op.name, p, slopes, a, b if slopes else a))
    return found


def _join(found: Iterable[Line]) -> list[Line]:
    """The lines, those joined that go on behind each other; a problem that does not grow stands once."""
    joined: dict[tuple[Any, ...], Line] = {}
    for line in sorted(found, key=lambda each: each.low):
        slope = dict(line.slopes)
        starts = [
            x - slope.get(name, 0) * line.low
            for name, x in zip(line.first.extent_names(), line.first.extents(), strict=True)
        ]
        key = line.op, line.slopes, line.first.static(), tuple(starts)
        before = joined.setdefault(key, line)
        if line.slopes:
            joined[key] = replace(before, high=max(before.high, line.high))
    return list(joined.values())
