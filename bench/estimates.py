"""How well the ops' models rank configs: today's estimates against the recorded sweeps.

A prediction for a GPU that is absent stands on these models, so their quality where measurements exist is what such a
prediction is worth. It flatters them: the constants of attention and of the streaming model were fitted on these runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

import typer

from bench.replay import SWEEPS, files, recorded
from cutekernels import gpu as gpus
from cutekernels import terminal
from cutekernels.errors import CuteKernelsError
from cutekernels.gpu import GpuSpec
from cutekernels.op import Config, Op, Problem
from cutekernels.ops import registry
from cutekernels.terminal import As, Format

TOP = 8
NEAR = 1.05
LEAST_CONFIGS = 11
J = TypeVar("J")


@dataclass(frozen=True)
class Quality:
    """Estimates of one problem's configs against their measured times.

    Attributes:
        correlation: Spearman's rank correlation; None where all estimates, or all times, are equal.
        choice: measured time of the config with the least estimate over the best measured time.
        top: the same of the best among the eight with the least estimates.
        default: the same of the op's default; None where the sweep lacks it.
    """

    op: str
    problem: str
    configs: int
    correlation: float | None
    choice: float
    top: float
    default: float | None


def load(folder: Path) -> dict[tuple[str, str], dict[str, float]]:
    """Measured µs by op and problem, then by config. Of a problem in two sweeps, the one with more configs counts."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for file in files(folder):
        run: dict[tuple[str, str], dict[str, float]] = {}
        for row in recorded(file):
            if {"op", "problem", "config"} <= row.keys() and row.get("us"):
                run.setdefault((row["op"], row["problem"]), {})[row["config"]] = row["us"]
        found |= {key: us for key, us in run.items() if len(us) > len(found.get(key, {}))}
    return found


def valid(op: Op[Any, Any], problem: Problem, measured: dict[str, float], gpu: GpuSpec) -> dict[Config, float]:
    """Measured µs by config, less the configs that a rule or a knob younger than the sweep refuses."""
    found = {}
    for text, us in measured.items():
        with suppress(CuteKernelsError):
            found[op.check(problem, op.Config.parse(text), gpu)] = us
    return found


def judge(name: str, text: str, measured: dict[str, float], gpu: GpuSpec) -> Quality | None:
    """None where fewer than eleven of the configs are valid today."""
    op: Any = registry.get(name)
    problem = op.Problem.parse(text)
    known = valid(op, problem, measured, gpu)
    timed = [(op.estimate_us(problem, config, gpu), us, config) for config, us in known.items()]
    if len(timed) < LEAST_CONFIGS:
        return None
    timed.sort(key=lambda row: (row[0], str(row[2])))
    times = [us for _, us, _ in timed]
    best, default = min(times), op.default(problem, gpu)
    return Quality(
        op=name,
        problem=text,
        configs=len(timed),
        correlation=spearman([estimate for estimate, _, _ in timed], times),
        choice=times[0] / best,
        top=min(times[:TOP]) / best,
        default=next((us / best for _, us, config in timed if config == default), None),
    )


def of_sweeps(gpu: GpuSpec, folder: Path = SWEEPS) -> list[Quality]:
    """The quality of the estimates for all problems in the sweeps of ``gpu``."""
    return [q for (op, text), us in load(folder / gpu.name).items() if (q := judge(op, text, us, gpu))]


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The correlation of two lists' ranks, equal values sharing the mean of theirs; None where one has no order."""
    x, y = _ranks(a), _ranks(b)
    mean = (len(x) - 1) / 2
    spread = math.sqrt(sum((v - mean) ** 2 for v in x) * sum((v - mean) ** 2 for v in y))
    return sum((v - mean) * (w - mean) for v, w in zip(x, y, strict=True)) / spread if spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [sum(places[v]) / len(places[v]) for v in values]


# ---- the command line ---------------------------------------------------------------------------------------

Gpu = Annotated[str, typer.Option(help="Whose sweeps.")]
Folder = Annotated[Path, typer.Option(help="Where the sweeps are, a folder for each GPU.")]


def judged(gpu: str, folder: Path, of_sweeps: Callable[[GpuSpec, Path], list[J]]) -> list[J]:
    """The findings of ``of_sweeps`` for ``gpu``; ends the process where there is no such GPU or no sound sweep."""
    try:
        spec = gpus.lookup(gpu)
    except CuteKernelsError as error:
        terminal.fail(str(error), code=2)
    try:
        found = of_sweeps(spec, folder)
    except CuteKernelsError as error:
        terminal.fail(str(error))
    if not found:
        terminal.fail(f"no sweep in {folder / spec.name}", code=2)
    return found


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    gpu: Gpu = "h200",
    folder: Folder = SWEEPS,
    every: Annotated[bool, typer.Option("--every", help="A line for each problem, not for each op.")] = False,
    format: As = Format.table,
) -> None:
    """Compare the models' estimates with recorded sweeps: rank correlation, and what their choice costs."""
    found = judged(gpu, folder, of_sweeps)
    rows = [vars(q) for q in found] if every else _by_op(found)
    terminal.write(rows, format)


def _by_op(found: Sequence[Quality]) -> list[dict[str, Any]]:
    rows = []
    for op in sorted({q.op for q in found}):
        mine = [q for q in found if q.op == op]
        ordered = [q.correlation for q in mine if q.correlation is not None]
        rows.append(
            {
                "op": op,
                "problems": len(mine),
                "configs": sum(q.configs for q in mine),
                "correlation": round(median(ordered), 2) if ordered else None,
                f"best of {TOP} within 5 %": f"{sum(q.top <= NEAR for q in mine)} of {len(mine)}",
                "choice": round(_geomean([q.choice for q in mine]), 3),
                "default": round(_geomean(defaults), 3)
                if (defaults := [q.default for q in mine if q.default])
                else None,
            }
        )
    return rows


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
