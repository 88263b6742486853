"""What a run would do, without doing it: the tasks of a job, and what is left of each after earlier runs."""

from __future__ import annotations

import os
from typing import Any

from cutekernels import gpu as gpus
from cutekernels.autotune.history import ATTEMPTS
from cutekernels.autotune.job import Job, Task
from cutekernels.autotune.shards import expected_s
from cutekernels.autotune.suggest import space
from cutekernels.db import sqlite
from cutekernels.db.store import Store
from cutekernels.gpu import GpuSpec


def listed(job: Job) -> list[dict[str, Any]]:
    """The job's tasks, with the seconds each is expected to take on one GPU."""
    return [_row(task) | {"expected_s": round(expected_s(task), 1)} for task in job.tasks]


def planned(job: Job, spec: GpuSpec, store: Store | None, limit: int | None = None) -> list[dict[str, Any]]:
    """For each task: attempts stored and still to do, the winner so far. ``store`` None: nothing is stored yet."""
    measured = gpus.present(spec)
    return [_left(task, spec, store, limit, measured=measured) for task in job.tasks]


def stored(url: str) -> Store | None:
    """The database at ``url`` for reading; None where there is none yet."""
    path = sqlite.path_of(url)
    return None if path is not None and not os.path.lexists(path) else Store(url, readonly=True)


def _left(task: Task, spec: GpuSpec, store: Store | None, limit: int | None, *, measured: bool) -> dict[str, Any]:
    key: dict[str, Any] = {"op": task.op.name, "revision": task.op.revision, "problem": str(task.problem)}
    origin = "measured" if measured else "predicted"
    rows = [] if store is None else store.trials(gpu=spec.name, **key, origin=origin)
    winners = [] if store is None else store.winners(gpu=spec.name, **key)
    valid = len(space(task.op, task.problem, spec).valid)
    wanted = min(valid, task.trials if measured else limit or valid)
    done = min(wanted, len({row.config for row in rows if row.status in ATTEMPTS}))
    crowned = bool(winners) and (not measured or winners[0].origin == "measured")
    state = "new" if not rows else "done" if crowned and done == wanted else "resumes"
    return _row(task) | {
        "gpu": spec.name,
        "origin": origin,
        "state": state,
        "stored": done,
        "to_do": wanted - done,
        "winner": winners[0].config if winners else None,
    }


def _row(task: Task) -> dict[str, Any]:
    return {"op": task.op.name, "problem": str(task.problem), "trials": task.trials}
