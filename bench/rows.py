"""What a benchmark records: one JSON line per problem and contender, complete in itself.

A contender that is absent, fails or is wrong has a row too, with the reason: nothing is left out silently.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

STATUSES = ("ok", "absent", "failed", "wrong_result")


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
    origin: str = ""  # of the config: forced, tuned, nearest, predicted, default
    l2: str = "cold"  # cold: inputs rotate through three times the L2; warm: one set
    rest_ms: float = 0.0  # idle time before each sample: 0 is sustained load, 50 a burst at full clock
    sets: int = 0
    rounds: int = 0
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    roofline_fraction: float | None = None  # of the least time the problem needs on this GPU
    mma_fraction: float | None = None  # of the rate of warp-level MMA
    stream_fraction: float | None = None  # of the rate of the best streaming contender of the same case
    speedup: float | None = None  # over the first baseline of the same case, with its 95 % interval
    speedup_low: float | None = None
    speedup_high: float | None = None
    cpu_us: float | None = None  # host time of one eager call
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


def write(path: Path, rows: Iterable[Row]) -> None:
    """Replaces ``path`` with ``rows``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def read(path: Path) -> list[Row]:
    """The rows in ``path``. ValueError for a line that is none."""
    return [_row(line, f"{path}:{number}") for number, line in enumerate(path.read_text().splitlines(), 1)]


def _row(line: str, where: str) -> Row:
    try:
        values: dict[str, Any] = json.loads(line)
        unknown = set(values) - {f.name for f in fields(Row)}
        if unknown:
            raise ValueError(f"unknown field {', '.join(sorted(unknown))}")
        return Row(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is not a benchmark row: {error}") from error
