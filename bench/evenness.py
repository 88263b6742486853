"""Jumps in time from one more token: each number of tokens is compared with the mean of its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from bench.rows import Row


def steepest(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """For each contender and weight, the row farthest above the mean of its neighbours (one token fewer and one more),
    and its time over that mean. Numbers of tokens without both neighbours are skipped.
    """

    def kind(row: Row) -> tuple[str, str]:
        return row.contender, row.problem.partition(" ")[2]

    alike = (list(group) for _, group in groupby(sorted(rows, key=kind), key=kind))
    return [max(found, key=lambda pair: pair[1]) for some in alike if (found := list(_steps(some)))]


def _steps(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    timed = {int(r.problem.partition(" ")[0].removeprefix("m=")): (r, r.median_us) for r in rows if r.median_us}
    for m, (row, us) in timed.items():
        if m - 1 in timed and m + 1 in timed:
            yield row, 2 * us / (timed[m - 1][1] + timed[m + 1][1])
