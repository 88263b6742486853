"""Numbers that others published, and the same cases measured here: their baseline, the strongest peer, ours.

``published.json`` holds their numbers as published, each labelled with their GPU: groups of rows that share all but
the case, the baseline's number and the system's. Times from different GPUs are never compared; the speed-up of each
over the same baseline, on its own GPU, is. Rows that no case here can reproduce say why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.table import Table

from bench import rows, workloads
from bench.rows import OURS, Row, is_ours
from bench.wall import number, tabulated

FILE = Path(__file__).parent / "published.json"
UNITS = {"us": -1, "tokens/s": 1}  # -1: less is faster; 1: more is faster
MODELS = ("qwen2.5-7b",)  # whole models, which ``bench/models.py`` times; a case is a problem's text there


@dataclass(frozen=True, slots=True)
class Published:
    """One published number of a system, and of a baseline on the same GPU; None where only a script was published.

    ``unmeasured``: why no case here reproduces it; empty where one does.
    """

    system: str
    gpu: str
    op: str
    suite: str
    case: str  # label in the suite
    baseline_value: float | None
    system_value: float | None
    dtype: str
    baseline: str  # their name for it
    unit: str
    peer: str = ""  # our contender that reproduces it
    ours: str = OURS
    accumulate: str = "fp32"
    variant: str = ""
    note: str = ""
    unmeasured: str = ""

    @property
    def speedup(self) -> float | None:
        """Their speed-up over their baseline."""
        if self.baseline_value is None or self.system_value is None:
            return None
        return float((self.system_value / self.baseline_value) ** UNITS[self.unit])

    @property
    def name(self) -> str:
        return f"{self.system} ({self.variant})" if self.variant else self.system

    @property
    def problem(self) -> str:
        """The case's problem in canonical text form."""
        if self.unmeasured or self.op in MODELS:
            return self.case
        cases = _label(self.op, self.suite, self.dtype, self.accumulate)
        if self.case not in cases:
            raise ValueError(f"{self.op} {self.suite} has no case {self.case!r}; it has {', '.join(cases)}")
        return cases[self.case]

    @property
    def command(self) -> str:
        """The command line that measures the case here."""
        if self.op in MODELS:
            return f"python -m bench models --model {self.op} --published"
        words = ["python -m bench", self.op, "--suite", self.suite]
        words += ["--dtype", self.dtype] if self.dtype != "bf16" else []
        words += ["--accumulate", self.accumulate] if self.accumulate != "fp32" else []
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A published number, and the rows of one run here; None where nothing was measured."""

    published: Published
    baseline: Row | None = None
    strongest: Row | None = None
    """The fastest of the peers, torch.compile among them."""
    ours: Row | None = None

    @property
    def measured(self) -> bool:
        """Whether ours and their baseline were timed here."""
        return self.baseline is not None and self.ours is not None

    def speedup(self, row: Row | None) -> float | None:
        """Speed-up of ``row`` over the baseline measured in the same run."""
        if row is None or self.baseline is None or not row.median_us or not self.baseline.median_us:
            return None
        return self.baseline.median_us / row.median_us


@cache
def _label(op: str, suite: str, dtype: str, accumulate: str) -> dict[str, str]:
    return {c.label: c.problem for c in workloads.cases(op, suite, dtype=dtype, accumulate=accumulate)}


def load(op: str | None = None, suite: str | None = None) -> list[Published]:
    """Published numbers of ``op``, or of every op; for one of its suites, or all."""
    found = [
        Published(**shared, case=case, baseline_value=baseline, system_value=system)
        for group in json.loads(FILE.read_text())
        for shared in [{name: value for name, value in group.items() if name != "rows"}]
        for case, baseline, system in group["rows"]
    ]
    return [p for p in found if op in (None, p.op) and suite in (None, p.suite)]


def reproduce(published: Iterable[Published], folder: Path, *, warm: bool = False) -> list[Reproduced]:
    """``published`` beside the rows in ``folder`` taken under sustained load; the latest of several runs counts."""
    runs: dict[tuple[str, str, str], list[Row]] = {}
    for path in (*rows.files(folder), *rows.files(folder / "models", "*_published")):
        of_file: dict[tuple[str, str, str], list[Row]] = {}
        for row in rows.read(path):
            if row.l2 == ("warm" if warm or row.op in MODELS else "cold") and not row.rest_ms:
                of_file.setdefault((row.op, row.problem, row.label), []).append(row)
        for key, found in of_file.items():
            if key not in runs or _date(found) > _date(runs[key]):
                runs[key] = found
    return [_beside(p, runs.get((p.op, p.problem, p.case), [])) for p in published]


def _date(found: Sequence[Row]) -> str:
    return found[0].stamp.get("date", "")


def _beside(published: Published, run: Sequence[Row]) -> Reproduced:
    of = {r.contender: r for r in run if r.status == "ok"}
    if published.op in MODELS:
        peers = {name for name in of if not is_ours(name)}
    elif published.unmeasured:
        peers = set()
    else:
        peers = {peer.name for peer in workloads.get(published.op).peers if peer.judged and not is_ours(peer.name)}
    timed = [r for name, r in of.items() if name in peers]
    strongest = min(timed, key=lambda r: r.median_us or float("inf"), default=None)
    return Reproduced(published, of.get(published.peer), strongest, of.get(published.ours))


def picture(op: str, *, warm: bool = False) -> str:
    """The file name of the picture that sets published numbers of ``op`` beside recorded rows."""
    return f"{op}_published{'_warm' if warm else ''}.png"


def missing(lines: Iterable[Reproduced]) -> list[str]:
    """Commands that measure the missing cases."""
    left = [line.published for line in lines if not line.measured]
    return list(dict.fromkeys(p.command for p in left if not p.unmeasured))


def account(folders: Iterable[Path], *, warm: bool = False) -> list[str]:
    """Sentences on all published rows: how many stand beside ours, wait for a run, or have no case here, and why."""
    theirs = load()
    seen = [reproduce(theirs, folder, warm=warm) for folder in folders]
    best = [any(lines[i].measured for lines in seen) for i in range(len(theirs))]
    without = [p for p in theirs if p.unmeasured]
    found = [f"{len(theirs)} published rows: {sum(best)} beside ours here, {len(without)} that no case here reproduces"]
    left = [p for p, measured in zip(theirs, best, strict=True) if not measured and not p.unmeasured]
    found[0] += f", {len(left)} not measured yet"
    for reason in dict.fromkeys(p.unmeasured for p in without):
        mine = [p for p in without if p.unmeasured == reason]
        found.append(f"{len(mine)} of {mine[0].system} ({mine[0].op}): {reason}")
    for command in dict.fromkeys(p.command for p in left):
        found.append(f"{sum(p.command == command for p in left)} wait for: {command}")
    return found


# ---- tables ---------------------------------------------------------------------------------------------


def published_table(published: Sequence[Published]) -> Table:
    """A table of the published numbers alone."""

    def value(number: float | None) -> str:
        return "not published" if number is None else f"{number:g}"

    columns: dict[str, Callable[[Published], str]] = {
        "system": lambda p: p.name,
        "their GPU": lambda p: p.gpu,
        "case": lambda p: p.case,
        "dtype": lambda p: p.dtype,
        "their baseline": lambda p: p.baseline,
        "unit": lambda p: p.unit.replace("us", "µs"),
        "baseline": lambda p: value(p.baseline_value),
        "system's": lambda p: value(p.system_value),
        "note": lambda p: p.note,
    }
    title = f"{published[0].op}, published by others, on their GPUs"
    return tabulated(title, published, columns, {}, {}, caption=FILE.name)


def reproduced_table(lines: Sequence[Reproduced], gpu: str) -> Table:
    """Speed-ups over their baseline: theirs on their GPU, the strongest peer's and ours here with times."""

    def us(row: Row | None, name: str = "") -> str:
        if row is None or row.median_us is None:
            return "not measured"
        return f"{row.median_us:.2f}" + (f" ({name})" if name else "")

    words: dict[str, Callable[[Reproduced], str]] = {
        "case": lambda x: x.published.case,
        "dtype": lambda x: x.published.dtype,
        "system": lambda x: x.published.name,
        "their GPU": lambda x: x.published.gpu,
        "there": lambda x: number(x.published.speedup, 2) or "not published",
    }
    numbers: dict[str, Callable[[Reproduced], str]] = {
        "their baseline, µs here": lambda x: us(x.baseline, x.published.peer),
        "strongest peer, µs here": lambda x: us(x.strongest, x.strongest.contender if x.strongest else ""),
        "ours, µs here": lambda x: "no case here" if x.published.unmeasured else us(x.ours),
        "strongest peer": lambda x: number(x.speedup(x.strongest), 2),
        "ours": lambda x: number(x.speedup(x.ours), 2),
    }
    title = f"{lines[0].published.op}: how many times faster than their baseline, there and on {gpu}"
    return tabulated(title, lines, words, numbers, {})
