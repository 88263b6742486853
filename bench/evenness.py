"""How even a time is over the number of tokens: what one token more costs, and no more than its neighbours say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from bench.rows import Row


def steepest(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """For each contender and weight, the row that is farthest above the mean of its neighbours, one token fewer and one
    more, and how many times that mean it takes. Tokens without both neighbours are passed over.
    """

    def kind(row: Row) -> tuple[str, str]:
        return row.contender, row.problem.partition(" ")[2]

    alike = (list(group) for _, group in groupby(sorted(rows, key=kind), key=kind))
    return [max(found, key=lambda pair: pair[1]) for some in alike if (found := list(_steps(some)))]


def _steps(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    by_tokens = {int(r.problem.partition(" ")[0].removeprefix("m=")): r for r in rows if r.median_us}
    for m, row in by_tokens.items():
        fewer, more = by_tokens.get(m - 1), by_tokens.get(m + 1)
        if fewer is not None and more is not None:
            assert row.median_us
            assert fewer.median_us
            assert more.median_us
            yield row, 2 * row.median_us / (fewer.median_us + more.median_us)
