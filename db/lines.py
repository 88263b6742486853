"""Trials as JSON lines: full, each line complete in itself, or slim, after a line with what most of them share.

A slim line repeats a shared field only where its value is another::

    {"common": {"gpu": {"name": "l40s", ...}, "environment": {...}, "origin": "predicted", "status": "ok", ...}}
    {"id": "019ab...", "problem": "m=16 n=4096 k=4096", "config": "tile_m=64 ...", "median_us": 43.84}
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from cutekernels.db.trial import REQUIRED, Trial, parse_json
from cutekernels.errors import StoreError

_COMMON = "common"
_DIGITS = 5  # of a slim row's numbers
_NONE = object()


def parsed(lines: Iterable[str]) -> Iterator[tuple[int, Trial | StoreError]]:
    """The number of each line with its trial, or with the rule that it breaks."""
    common: dict[str, Any] = {}  # a line with all that a trial must have is complete in itself
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            if isinstance(row, dict) and row.keys() == {_COMMON} and isinstance(row[_COMMON], dict):
                common = row[_COMMON]
                if unknown := common.keys() - {f.name for f in fields(Trial)}:
                    raise StoreError(f"a trial has no field {', '.join(sorted(unknown))}")
                continue
            yield number, Trial.from_row(common | row if isinstance(row, dict) and not _complete(row) else row)
        except StoreError as error:
            yield number, error


def slim(trials: Sequence[Trial]) -> list[str]:
    """The trials as slim lines, numbers rounded, without the lines' ends."""
    rows = [_rounded(t.as_row()) for t in trials]
    in_all = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
    common = {name: _usual([row[name] for row in rows]) for name in in_all}
    common = {name: value for name, value in common.items() if value is not _NONE}
    rest = [{name: value for name, value in row.items() if common.get(name, _NONE) != value} for row in rows]
    rest = [row if _complete(short) else short for row, short in zip(rows, rest, strict=True)]
    lines = [{_COMMON: common}, *rest] if rows else []
    return [json.dumps(line, allow_nan=False, separators=(",", ":")) for line in lines]


def _complete(row: dict[str, Any]) -> bool:
    return row.keys() >= REQUIRED


def _usual(values: Sequence[Any]) -> Any:
    """The value that most of ``values`` have, or ``_NONE``."""
    texts = Counter(json.dumps(value) for value in values)
    text, times = texts.most_common(1)[0]
    return json.loads(text) if 2 * times > len(values) else _NONE


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    rounded = float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
    return value if rounded in (math.inf, -math.inf) else rounded
