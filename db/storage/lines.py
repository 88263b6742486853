"""Trials as JSON lines: full, each line complete in itself, or slim, after a line with what most of them share.

A slim line has the values of the named columns in their order. Null, or a missing value at its end, stands for the
shared one, or for none. Another line of shared values begins the next section::

    {"common": {"gpu": {"name": "l40s", ...}, "origin": "predicted", ...}, "columns": ["id", "problem", "config", ...]}
    ["019ab...", "m=16 n=4096 k=4096", "tile_m=64 ...", 43.84]
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from cutekernels.db.storage.trial import Trial, parse_json
from cutekernels.errors import StoreError

_COMMON, _COLUMNS = "common", "columns"
_MOST_LINES = 1_000_000  # a few bytes of a compressed file may stand for as many
DIGITS = 4  # of a slim row's numbers
_MADE = ("gpu", "environment", "sources")  # how a trial came about: long texts, of which few are different
_NONE = object()


def parsed(lines: Iterable[str]) -> Iterator[tuple[int, Trial | StoreError]]:
    """The number of each line with its trial, or with the rule that it breaks."""
    for number, row in rows(lines):
        try:
            yield number, row if isinstance(row, StoreError) else Trial.from_row(row)
        except StoreError as error:
            yield number, error


def rows(lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """The number of each line with what it holds, by the names of a trial's fields, or why it holds nothing."""
    common: dict[str, Any] = {}
    columns: list[str] = []
    for number, line in enumerate(lines, 1):
        if number > _MOST_LINES:
            yield number, StoreError(f"a file has {_MOST_LINES} lines at most: split it")
            return
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            if isinstance(row, dict) and row.keys() == {_COMMON, _COLUMNS}:
                common, columns = _header(row[_COMMON], row[_COLUMNS])
                continue
            yield number, common | _by_name(columns, row) if isinstance(row, list) else row
        except StoreError as error:
            yield number, error


def _header(common: Any, columns: Any) -> tuple[dict[str, Any], list[str]]:
    if not isinstance(common, dict) or not isinstance(columns, list) or not all(isinstance(n, str) for n in columns):
        raise StoreError("the first of slim lines is an object of common fields and the columns' names")
    if unknown := {*common, *columns} - {f.name for f in fields(Trial)}:
        raise StoreError(f"a trial has no field {', '.join(sorted(unknown))}")
    if len(set(columns)) < len(columns):
        raise StoreError("the columns of slim lines have a name each")
    return common, columns


def _by_name(columns: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    if len(values) > len(columns):
        raise StoreError(f"a slim line has a value for each of {len(columns)} columns; this one has {len(values)}")
    return {name: value for name, value in zip(columns, values, strict=False) if value is not None}


def slim(trials: Sequence[Trial]) -> list[str]:
    """The trials as slim lines, numbers rounded, without the lines' ends: those made alike behind one line."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for row in (_round(t.as_row()) for t in trials):
        sections.setdefault(json.dumps([row.get(name) for name in _MADE]), []).append(row)
    return [line for rows in sections.values() for line in _section(rows)]


def _section(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    common = {name: _usual([row[name] for row in rows]) for name in names if all(name in row for row in rows)}
    common = {name: value for name, value in common.items() if value is not _NONE}
    own = [{name: value for name, value in row.items() if common.get(name, _NONE) != value} for row in rows]
    columns = [name for name in names if any(name in row for row in own)]
    lines = [{_COMMON: common, _COLUMNS: columns}, *(trimmed([row.get(n) for n in columns]) for row in own)]
    return [json.dumps(line, allow_nan=False, separators=(",", ":")) for line in lines]


def trimmed(values: list[Any]) -> list[Any]:
    """Values up to the last that is not None."""
    while values and values[-1] is None:
        values.pop()
    return values


def _usual(values: Sequence[Any]) -> Any:
    """The value that most of ``values`` have, or ``_NONE``."""
    texts = Counter(json.dumps(value) for value in values)
    text, times = texts.most_common(1)[0]
    return json.loads(text) if 2 * times > len(values) else _NONE


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _round(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_round(one) for one in value]
    rounded = float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
    return value if rounded in (math.inf, -math.inf) else rounded
