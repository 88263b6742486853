"""Trials as JSON lines: full, each line complete in itself, or slim, after a line with the fields that all share.

::

    {"common": {"gpu": {"name": "l40s", ...}, "environment": {...}, "origin": "predicted", "status": "ok", ...}}
    {"id": "019ab...", "problem": "m=16 n=4096 k=4096", "config": "tile_m=64 ...", "median_us": 43.84}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cutekernels.db.trial import Trial, parse_json
from cutekernels.errors import StoreError

_COMMON = "common"
_DIGITS = 5  # of a slim row's numbers


def parsed(lines: Iterable[str]) -> Iterator[tuple[int, Trial | StoreError]]:
    """The number of each line with its trial, or with the rule that it breaks."""
    common: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            if isinstance(row, dict) and row.keys() == {_COMMON} and isinstance(row[_COMMON], dict):
                common = row[_COMMON]
                continue
            yield number, Trial.from_row(common | row if isinstance(row, dict) else row)
        except StoreError as error:
            yield number, error


def slim(trials: Sequence[Trial]) -> list[str]:
    """The trials as slim lines, numbers rounded, without the lines' ends."""
    rows = [{name: _rounded(value) for name, value in t.as_row().items()} for t in trials]
    common = {n: v for n, v in rows[0].items() if all(row.get(n) == v for row in rows)} if rows else {}
    rest = [{name: value for name, value in row.items() if name not in common} for row in rows]
    return [json.dumps(row, allow_nan=False) for row in ([{_COMMON: common}, *rest] if rows else [])]


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
