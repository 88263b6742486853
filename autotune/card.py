"""``tune card``: everything that the owner of a card can do for it in one command, and send to others.

It checks the machine, holds a default of every op to its reference, tunes what popular models call, most expected gain
first, and writes a page and the winners. The order is the grid's, over problems of bundled jobs in place of its own;
the run is any job's, so it resumes, and no winner is slower than its default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutekernels import environment, installation, terminal
from cutekernels import gpu as gpus
from cutekernels.autotune.grid import FAMILIES, ProductFamily, points
from cutekernels.autotune.job import load
from cutekernels.errors import CuteKernelsError
from cutekernels.gpu import GpuSpec
from cutekernels.ops import registry

if TYPE_CHECKING:
    from cutekernels.autotune.report import TuneReport
    from cutekernels.db.questions.reader import Winner

NAME = "card"
MODELS = ("qwen3-8b", "llama-3-8b", "gpt-oss-20b", "qwen3.5-9b", "qwen2.5-7b-int4")
MINUTES = 30.0
_MOST_CHECKED_S, _CHECKED_SHARE = 300.0, 0.25  # of the run's time, for the check of every op
_REGRET = 0.02  # of an op that no family of the grid has
_SHOWN = 20


def families() -> tuple[ProductFamily, ...]:
    """The problems of :data:`MODELS`, a family for each op, all problems counting alike."""
    texts: dict[str, dict[str, None]] = {}
    for task in (task for model in MODELS for task in load(model).tasks):
        texts.setdefault(task.op.name, {})[str(task.problem)] = None
    regret = {f.op: max(other.regret for other in FAMILIES if other.op == f.op) for f in FAMILIES}
    return tuple(
        ProductFamily(op, partial(iter, tuple(own)), float(len(own)), regret.get(op, _REGRET))
        for op, own in texts.items()
    )


@dataclass(frozen=True)
class Checked:
    """Findings before the first measurement: a line for each misfit of the machine, a row for each op."""

    misfits: tuple[str, ...]
    ops: tuple[dict[str, Any], ...]

    @property
    def bad(self) -> list[dict[str, Any]]:
        return [row for row in self.ops if row["state"] != "right"]

    def __str__(self) -> str:
        return f"{len(self.ops) - len(self.bad)} of {len(self.ops)} ops are right on this GPU"


def check(spec: GpuSpec, budget_s: float, jobs: int | None) -> Checked:
    """The machine and every op, in a quarter of ``budget_s`` and five minutes at most.

    Raises:
        CuteKernelsError: the machine's parts do not go together; the message has the remedy.
    """
    from cutekernels import compilers
    from cutekernels.autotune.check import check_ops
    from cutekernels.autotune.runtime import LocalRuntime

    found = installation.problems(installation.this_machine())
    misfits = [f"{misfit.what}, {misfit.state}: {misfit.value}; {misfit.remedy}" for misfit in found]
    if any(misfit.state == "broken" for misfit in found):
        raise CuteKernelsError("; ".join(misfits))
    seconds, rows = min(_MOST_CHECKED_S, _CHECKED_SHARE * budget_s), []
    with LocalRuntime(jobs or compilers.affordable()) as runtime:
        for row in check_ops(registry.OPS, spec, runtime, seconds):
            rows.append(row)
            if row["state"] != "right":
                terminal.say(f"{row['op']} [{row['problem']}]: {row['state']}")
    checked = Checked(tuple(misfits), tuple(rows))
    terminal.say(str(checked))
    return checked


def write(folder: Path, spec: GpuSpec, report: TuneReport, checked: Checked, db: str | None) -> tuple[Path, Path]:
    """The page, and the winners of ``spec`` in the form that ``db import`` reads."""
    from cutekernels import db as database

    page, winners = (folder / f"cutekernels-{spec.name}.{end}" for end in ("md", "jsonl"))
    folder.mkdir(parents=True, exist_ok=True)
    with database.open(db, shipped=False) as opened:
        assert opened.store is not None
        measured = list(opened.winners(gpu=spec.name, origin="measured"))
        opened.store.export(winners, gpu=spec.name)
    page.write_text(page_of(spec, report, checked, measured), encoding="utf-8")
    return page, winners


def page_of(spec: GpuSpec, report: TuneReport, checked: Checked, winners: Sequence[Winner]) -> str:
    """The page, in Markdown: gains, failures, distance from the roofline, and the clock and power of the run."""
    versions = ", ".join(f"{name} {value}" for name, value in environment.collect().items() if value)
    gained = sorted((w for w in winners if (w.ratio or 1.0) > 1.0), key=lambda w: -(w.ratio or 1.0))
    failed = [t for t in report.tasks if t.state == "failed"]
    wanted = {(task.op.name, str(task.problem)) for family in families() for task in points(family)}
    done = len(wanted & {(w.op, w.problem_text) for w in winners})
    lines = [f"# {spec.product} ({spec.name}), {datetime.now(UTC):%Y-%m-%d}", "", f"{versions}.", ""]
    if spec.confined_to is not None:
        card = gpus.STOOD_FOR[spec.confined_to]
        lines += [f"It stood in for {card}: its times are no {card}'s; which configs are fast may be.", ""]
    lines += [f"- {misfit}" for misfit in checked.misfits] + [f"- {checked}."]
    lines.append(f"- {done} of the models' {len(wanted)} problems are tuned; the same command goes on with the others.")
    lines.append(f"- {len(gained)} of all {len(winners)} winners are faster than the default.")
    lines.append(f"- {len(failed)} problems failed.")
    lines += [f"- {_range_of(winners, name, unit)}" for name, unit in _CONDITIONS]
    lines += ["", *_table("What gained most", [_gain(w) for w in gained[:_SHOWN]])]
    lines += _table("Ops that are wrong, or were not reached", [_brief(row) for row in checked.bad])
    lines += _table("Problems that failed", [{"op": t.op, "problem": t.problem, "why": t.message} for t in failed])
    return "\n".join(lines) + "\n"


_CONDITIONS = (("clock_mhz", "MHz"), ("power_w", "W"), ("temperature_c", "C"))


def _range_of(winners: Sequence[Winner], name: str, unit: str) -> str:
    """The range of a condition over the finals: a clock far below the boost means that power or heat was the limit."""
    values = sorted(w.certificate[name] for w in winners if w.certificate.get(name) is not None)
    what = name.partition("_")[0]
    if not values:
        return f"{what}: the driver did not tell."
    middle = values[len(values) // 2]
    return f"{what} in the finals: {values[0]:.0f} to {values[-1]:.0f} {unit}, in the middle {middle:.0f}."


def _gain(w: Winner) -> dict[str, object]:
    near = "" if w.roofline is None else f"{w.roofline:.0%}"
    shown: dict[str, object] = {"op": w.op, "problem": w.problem_text, "us": f"{w.median_us:.4g}"}
    return shown | {"times the default's speed": f"{w.ratio:.2f}", "of roofline": near, "config": w.config_text}


def _brief(row: dict[str, Any]) -> dict[str, object]:
    return {name: row[name] for name in ("op", "problem", "config", "state")}


def _table(title: str, rows: Sequence[dict[str, object]]) -> list[str]:
    if not rows:
        return []
    cells = [[*rows[0]], ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return [f"## {title}", "", *(f"| {' | '.join(line)} |" for line in cells), ""]
