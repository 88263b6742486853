"""Preview of a run, without doing it: the tasks of a job, and what is left of each after earlier runs.

``python -m cutekernels.autotune.outlook demo l40s`` says where stored predictions differ from the defaults, and why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cutekernels import environment
from cutekernels import gpu as gpus
from cutekernels.autotune.history import ATTEMPTS, TaskHistory
from cutekernels.autotune.job import Job, Task, load
from cutekernels.autotune.shards import expected_s
from cutekernels.autotune.suggest import space
from cutekernels.db import sqlite
from cutekernels.db.store import Environment, Store
from cutekernels.gpu import GpuSpec
from cutekernels.op import Config, Op, Problem


def listed(job: Job) -> list[dict[str, Any]]:
    """The job's tasks, with the seconds each is expected to take on one GPU."""
    return [_row(task) | {"expected_s": round(expected_s(task), 1)} for task in job.tasks]


def planned(
    job: Job, spec: GpuSpec, store: Store | None, limit: int | None = None, *, force: bool = False
) -> list[dict[str, Any]]:
    """For each task: attempts stored and still to do, the winner so far. ``store`` None: nothing is stored yet.

    Attempts with other kernel sources or versions do not count: a run repeats them.

    ``force``: what a run with this flag would do, which repeats what is stored.
    """
    measured = gpus.present(spec)
    return [_left(task, spec, store, limit, measured=measured, force=force) for task in job.tasks]


@dataclass(frozen=True)
class Departure:
    """A predicted winner beside the default. ``why``: for each knob that differs, the model's slowdown without it."""

    task: Task
    default: Config
    predicted: Config
    default_us: float
    predicted_us: float
    why: tuple[str, ...]


def departures(job: Job, spec: GpuSpec, store: Store) -> list[Departure]:
    """The job's stored predictions for ``spec``, those that gain most first; those equal to the default last."""
    found = []
    for task in job.tasks:
        op, problem = task.op, task.problem
        for winner in store.winners(gpu=spec.name, op=op.name, revision=op.revision, problem=str(problem)):
            default, chosen = op.default(problem, spec), op.Config.parse(winner.config)
            times = [op.estimate_us(problem, c, spec) for c in (default, chosen)]
            why = tuple(_reasons(op, problem, spec, default, chosen))
            found.append(Departure(task, default, chosen, times[0], times[1], why))
    return sorted(found, key=lambda d: d.predicted_us / d.default_us if d.default_us else 1.0)


LEAST_GAIN = 1.5
"""Gain over the default, by the model, from which on a prediction serves calls. On the H200's sweeps the model promised
1.00 to 1.31 where its choice is not the default, and 8 of 11 were slower: docs/notes/trunk.md#predictions."""


def reason(op: Op[Any, Any], problem: Problem, spec: GpuSpec, default: Config, chosen: Config) -> str:
    """Why calls should take ``chosen``, which nobody measured; empty where the model is not that sure."""
    best_us = op.estimate_us(problem, chosen, spec)
    gain = op.estimate_us(problem, default, spec) / best_us if best_us else 1.0
    if chosen == default or gain < LEAST_GAIN:
        return ""
    return f"{gain:.2f} times as fast by the model; " + "; ".join(_reasons(op, problem, spec, default, chosen))


def _reasons(op: Op[Any, Any], problem: Problem, spec: GpuSpec, default: Config, chosen: Config) -> Iterator[str]:
    """One knob at a time goes back to the default's value; those that no rule lets go alone are named together."""
    best_us = op.estimate_us(problem, chosen, spec)
    tied = []
    for name in chosen.space():
        mine, other = getattr(chosen, name), getattr(default, name)
        if mine == other:
            continue
        change = f"{name} {other} -> {mine}"
        back = replace(chosen, **{name: other})
        if op.why_not(problem, back, spec) is not None:
            tied.append(change)
            continue
        times = op.estimate_us(problem, back, spec) / best_us
        same = abs(times - 1) < 0.005
        yield f"{change}: {'the same to the model' if same else f'{other} would take {times:.2f} times as long'}"
    if tied:
        yield f"only together: {', '.join(tied)}"


def _tell(job: str, gpu: str) -> None:
    spec = gpus.lookup(gpu)
    with Store(readonly=True) as store:
        found = departures(load(job), spec, store)
    for d in found:
        gain = d.default_us / d.predicted_us
        print(f"\n{d.task} on {spec.name}")
        print(f"  default    {d.default_us:10.1f} us  {d.default}")
        if d.predicted == d.default:
            print("  predicted  the default: no config that compiled is faster by the model")
            continue
        print(f"  predicted  {d.predicted_us:10.1f} us  {d.predicted}")
        print(
            f"  why        {gain:.2f} times faster by the model"
            + "".join(f"\n             {reason}" for reason in d.why)
        )


def stored(url: str) -> Store | None:
    """The database at ``url`` for reading; None where there is none yet."""
    path = sqlite.path_of(url)
    return None if path is not None and not os.path.lexists(path) else Store(url, readonly=True)


def _left(
    task: Task, spec: GpuSpec, store: Store | None, limit: int | None, *, measured: bool, force: bool
) -> dict[str, Any]:
    origin = "measured" if measured else "predicted"
    valid = sum(measured or not c.vendors for c in space(task.op, task.problem, spec).valid)
    wanted = min(valid, task.trials if measured else limit or valid)
    state, done, winner = "new", 0, None
    if store is not None:
        versions = Environment.of(environment.collect())
        history = TaskHistory(store, task.op, task.problem, spec, versions, origin)
        rows, winner = history.stored(), history.winner()
        holding = [row for row in rows if history.holds(row)]
        done = min(wanted, len({row.config for row in holding if row.status in ATTEMPTS}))
        crowned = winner is not None and (not measured or (winner.origin == origin and history.holds(winner)))
        if rows:
            state = "repeats" if force or not holding else "done" if crowned and done == wanted else "resumes"
    return _row(task) | {
        "gpu": spec.name,
        "origin": origin,
        "state": state,
        "stored": done,
        "to_do": wanted if force else wanted - done,
        "winner": None if winner is None else winner.config,
    }


def _row(task: Task) -> dict[str, Any]:
    return {"op": task.op.name, "problem": str(task.problem), "trials": task.trials}


if __name__ == "__main__":
    _tell(*sys.argv[1:])
