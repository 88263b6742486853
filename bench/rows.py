"""Rows that a benchmark records: one per problem and contender, the losing, absent, failed and wrong ones too.

A file's first line is a JSON object: ``common`` holds the fields with one value in all rows (op, suite, versions,
commit, GPU), ``columns`` names the others. Each further line is a JSON array: one row's values in that order, without
the nulls at its end. A file of older rows may be packed, ``xz -9e``, and without the rates that follow from its times:
a later run of its suite replaces it.
"""

from __future__ import annotations

import json
import lzma
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from cutekernels.db.storage.lines import trimmed

STATUSES = ("ok", "absent", "failed", "wrong_result")
OURS = "cutekernels"  # our contender; "cutekernels (default)" and the like are variants of it
PACKED = ".xz"
DIGITS = 4  # significant digits kept of a number


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one problem. Numbers are None where it was not timed."""

    op: str
    suite: str
    problem: str
    label: str
    alpha: float
    beta: float
    contender: str
    status: str
    reason: str = ""
    config: str = ""  # of ours
    origin: str = ""  # of the config: forced, tuned, nearest, sibling, predicted, default
    l2: str = "cold"  # cold: inputs rotate through three times the L2; warm: one set
    rest_ms: float = 0.0  # idle time before each sample: 0 is sustained load, 50 a burst at full clock
    sets: int = 0
    rounds: int = 0
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    roofline_fraction: float | None = None  # the least time the problem needs on this GPU, over median_us
    mma_fraction: float | None = None  # tflops over the peak of warp-level MMA
    stream_fraction: float | None = None  # median_us of the best streaming contender of the same case, over median_us
    speedup: float | None = None  # over the first baseline of the same case, with its 95 % interval
    speedup_low: float | None = None
    speedup_high: float | None = None
    cpu_us: float | None = None  # host time of one eager call
    memory_gib: float | None = None  # of the GPU, at most, with all operands or weights
    error: float | None = None  # worst error over its tolerance (cutekernels.verify)
    error_vs_torch: float | None = None  # largest error against fp64, over torch's own
    stamp: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}; it is {self.status!r}")
        if (self.status == "ok") != (self.median_us is not None):
            raise ValueError(f"exactly the rows that are ok have a time; {self.contender} is {self.status}")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"a row that is {self.status} says why; {self.contender} does not")
        for name in _MEASURED:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{name} is a number or null; it is {value!r:.60}")


def is_ours(contender: str) -> bool:
    """Whether ``contender`` runs our kernels, and so is no peer."""
    return contender.startswith((OURS, "our ops"))


_NAMES = tuple(f.name for f in fields(Row))
_MEASURED = tuple(f.name for f in fields(Row) if f.type == "float | None")
_REPEATED = ("problem", "label", "stamp")


def write(path: Path, rows: Iterable[Row]) -> None:
    """Replace ``path`` with ``rows``, whole or not at all; numbers are rounded to ``DIGITS`` significant digits.

    A peer that is not installed has one row, the first, for all cases of a suite. A case and a stamp stand in the
    first of the rows that have them, null in the others.
    """
    kept: dict[object, Row] = {}
    for number, row in enumerate(rows):
        absent = (row.op, row.suite, row.contender, row.reason) if row.status == "absent" else None
        kept.setdefault(absent or number, row)
    rows = [*kept.values()]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = _lines([{name: rounded(getattr(row, name)) for name in _NAMES} for row in rows])
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
            path.with_name(f"{path.name}{PACKED}").unlink(missing_ok=True)
        except BaseException:
            os.unlink(file.name)
            raise


def rounded(value: Any) -> Any:
    """A float to ``DIGITS`` significant digits; anything else as it is."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _lines(rows: Sequence[dict[str, Any]]) -> list[Any]:
    columns = [name for name in _NAMES if any(row[name] != rows[0][name] for row in rows)]
    common = {name: value for name, value in rows[0].items() if name not in columns} if rows else {}
    lines: list[Any] = [{"common": common, "columns": columns}]
    for row, before in zip(rows, [None, *rows[:-1]], strict=True):
        same = {name for name in _REPEATED if before is not None and row[name] == before[name]}
        lines.append(trimmed([None if name in same else row[name] for name in columns]))
    return lines


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


def files(folder: Path, start: str = "") -> list[Path]:
    """The files of rows in ``folder`` whose names begin so, packed ones too, in the order of their names."""
    return sorted(path for end in ("", PACKED) for path in folder.glob(f"{start}*.jsonl{end}"))


def suite_of(path: Path) -> str:
    """The name of a file of rows without its ends: op, suite and conditions."""
    return path.name.removesuffix(PACKED).removesuffix(".jsonl")


def read(path: Path) -> list[Row]:
    """The rows in ``path``. ValueError for a line that is none."""
    try:
        data = path.read_bytes()
        text = (lzma.decompress(data) if path.suffix == PACKED else data).decode()
        first, *others = text.removesuffix("\n").split("\n")
        header = json.loads(first)
        common, columns = dict(header["common"]), list(header["columns"])
        unknown = {*common, *columns} - set(_NAMES)
        if unknown:
            raise ValueError(f"unknown field {', '.join(sorted(unknown))}")
        if len({*common, *columns}) < len(common) + len(columns):
            raise ValueError("a field stands in it twice")
    except (KeyError, TypeError, ValueError, RecursionError, lzma.LZMAError) as error:
        raise ValueError(f"{path}:1 is not the header of a benchmark's rows: {error}") from error
    rows: list[Row] = []
    for number, line in enumerate(others, 2):
        rows.append(_row(common, columns, line, rows[-1] if rows else None, f"{path}:{number}"))
    return rows


def _row(common: dict[str, Any], columns: Sequence[str], line: str, before: Row | None, where: str) -> Row:
    try:
        values = json.loads(line)
        values += [None] * (len(columns) - len(values))
        found = dict(zip(columns, values, strict=True))
        for name in _REPEATED:
            if name in columns and found[name] is None:
                if before is None:
                    raise ValueError(f"{name} is missing from the first row")
                found[name] = getattr(before, name)
        return Row(**common, **found)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not a benchmark row: {error}") from error
