"""Regret of calls by the recorded sweeps: how far the dispatcher's choice is behind the best config measured.

``held out`` leaves out the winner of the problem's own bucket: what somebody gets whose shape nobody tuned, from a
neighbour's winner, a prediction or the default. ``all`` is that winner itself, where there is one. A sweep that lacks
the config of a call says nothing about it; such problems are counted, without a regret. The least of many noisy times
is lower than the best config's own, so that regrets are too large rather than too small.

``--promises`` judges predictions: the model's choice among a sweep's configs, what it promises over the default, and
what was measured; so how large a promise must be before a prediction serves (``dispatch.LEAST_GAIN``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any

import typer

from bench.judge import SWEEPS, Folder, Gpu, judge_sweeps, load, valid
from cutekernels import dispatch, terminal
from cutekernels.db.storage.snapshot import Snapshot
from cutekernels.gpu import GpuSpec
from cutekernels.measure import quantile
from cutekernels.ops import registry
from cutekernels.terminal import As, Format

LEAST_CONFIGS = 5
LEAST_PROMISES = (1.0, 1.05, 1.1, 1.2, 1.3, 1.5)
SHARES = {"p50": 0.5, "p95": 0.95, "most": 1.0}


@dataclass(frozen=True)
class Regret:
    """The choice for one problem. ``regret``: its time over the best one, less 1; None where it was not measured."""

    op: str
    problem: str
    known: str
    origin: str
    config: str
    best: str
    regret: float | None


def judge(name: str, text: str, measured: dict[str, float], gpu: GpuSpec, known: Snapshot) -> Iterator[Regret]:
    """The regret with ``known`` less the winner of the problem's bucket, and of that winner, where it serves."""
    op: Any = registry.get(name)
    problem = op.Problem.parse(text)
    us = {str(config): time for config, time in valid(op, problem, measured, gpu).items()}
    if len(us) < LEAST_CONFIGS:
        return
    best = min(us, key=lambda config: (us[config], config))
    bucket = str(problem.bucket())
    others = {
        key: {other: row for other, row in table.items() if other != bucket} if key[0] == op.name else table
        for key, table in known.table.items()
    }
    for kind, rows in (("held out", replace(known, table=others)), ("all", known)):
        choice = dispatch.resolve(op, problem, gpu, rows)
        if kind == "held out" or choice.origin == "tuned":
            mine = us.get(str(choice.config))
            regret = None if mine is None else mine / us[best] - 1
            yield Regret(name, text, kind, choice.origin, str(choice.config), best, regret)


def of_sweeps(gpu: GpuSpec, folder: Path = SWEEPS) -> list[Regret]:
    """The regrets of all problems in the sweeps of ``gpu``, by the winners that calls would use there."""
    known = dispatch.winners(gpu)
    return [r for (op, text), us in load(folder / gpu.name).items() for r in judge(op, text, us, gpu, known)]


@dataclass(frozen=True)
class Promise:
    """The model's choice among a problem's measured configs, where it departs from the default.

    ``promised``: the default's time over its own by the model; ``gained``: as they were measured.
    """

    op: str
    body: str
    problem: str
    config: str
    promised: float
    gained: float


def promise(name: str, text: str, measured: dict[str, float], gpu: GpuSpec) -> Promise | None:
    """None where the default is the choice or was not measured, or where few configs were."""
    op: Any = registry.get(name)
    problem = op.Problem.parse(text)
    us = {config: time for config, time in valid(op, problem, measured, gpu).items() if not config.vendors}
    default = op.default(problem, gpu)
    if len(us) < LEAST_CONFIGS or default not in us:
        return None
    estimates = {config: op.estimate_us(problem, config, gpu) for config in us}
    chosen = min(us, key=lambda config: (estimates[config], config != default, str(config)))
    if chosen == default:
        return None
    body = getattr(chosen, "body", "")
    return Promise(name, body, text, str(chosen), estimates[default] / estimates[chosen], us[default] / us[chosen])


def promises_of_sweeps(gpu: GpuSpec, folder: Path = SWEEPS) -> list[Promise]:
    """The promises of the model for all problems in the sweeps of ``gpu``."""
    return [p for (op, text), us in load(folder / gpu.name).items() if (p := promise(op, text, us, gpu))]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    gpu: Gpu = "h200",
    folder: Folder = SWEEPS,
    every: Annotated[bool, typer.Option("--every", help="A line for each problem, the worst first.")] = False,
    promises: Annotated[
        bool,
        typer.Option("--promises", help="How often the model's choice is slower than the default, by promise."),
    ] = False,
    format: As = Format.table,
) -> None:
    """How far behind the best measured config calls are, with the winner of their own problem and without it."""
    if promises:
        kept: list[Promise] = sorted(judge_sweeps(gpu, folder, promises_of_sweeps), key=lambda p: p.gained)
        terminal.write([vars(p) for p in kept] if every else _by_promise(kept), format)
        return
    found = judge_sweeps(gpu, folder, of_sweeps)
    rows = [vars(r) for r in sorted(found, key=lambda r: -(r.regret or 0.0))] if every else _by_op(found)
    terminal.write(rows, format)


def _by_op(found: Sequence[Regret]) -> list[dict[str, Any]]:
    rows = []
    for known, op in sorted({(r.known, r.op) for r in found}):
        mine = [r for r in found if (r.known, r.op) == (known, op)]
        regrets = sorted(r.regret for r in mine if r.regret is not None)
        rows.append(
            {
                "winners": known,
                "op": op,
                "problems": len(mine),
                "measured": len(regrets),
                **{name: f"{quantile(regrets, share):.1%}" if regrets else None for name, share in SHARES.items()},
                "origins": ", ".join(f"{n} {origin}" for origin, n in Counter(r.origin for r in mine).most_common()),
            }
        )
    return rows


def _by_promise(found: Sequence[Promise]) -> list[dict[str, Any]]:
    """For each body and least promise: how many choices keep it, how many are slower than the default, by how much."""
    rows = []
    for op, body in sorted({(p.op, p.body) for p in found}):
        for least in LEAST_PROMISES:
            gains = [p.gained for p in found if (p.op, p.body) == (op, body) and p.promised >= least]
            if gains:
                rows.append(
                    {
                        "op": op,
                        "body": body,
                        "promised at least": least,
                        "problems": len(gains),
                        "slower": sum(gain < 1 for gain in gains),
                        "worst": f"{min(gains):.2f}",
                        "mean": f"{geometric_mean(gains):.2f}",
                    }
                )
    return rows
