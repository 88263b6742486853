"""Preview of a run, without doing it: the tasks of a job, and what is left of each after earlier runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutekernels import environment
from cutekernels.autotune.job import Job, Task
from cutekernels.autotune.shards import expected_s
from cutekernels.db.storage import sqlite
from cutekernels.gpu import GpuSpec

if TYPE_CHECKING:
    from cutekernels.db.storage.store import Store

LISTED: tuple[str, ...] = ("op", "problem", "trials", "expected_s")  # columns of the tables, which fit into 80
PLANNED: tuple[str, ...] = ("op", "problem", "state", "stored", "to_do", "winner")


def listed(job: Job, *, measured: bool = True) -> list[dict[str, Any]]:
    """The job's tasks, with the seconds each is expected to take on an H200 where they are ``measured``."""
    return [_row(t) | ({"expected_s": round(expected_s(t), 1)} if measured else {}) for t in job.tasks]


def planned(
    job: Job,
    spec: GpuSpec,
    store: Store | None,
    limit: int | None = None,
    *,
    force: bool = False,
    measured: bool = True,
) -> list[dict[str, Any]]:
    """For each task: attempts stored and still to do, the winner so far. ``store`` None: nothing is stored yet.

    Attempts with other kernel sources or versions do not count: a run repeats them.

    ``force``: what a run with this flag would do, which repeats what is stored. ``measured``: whether it would measure.
    """
    return [_rest(task, spec, store, limit, measured=measured, force=force) for task in job.tasks]


def stored(url: str) -> Store | None:
    """The database at ``url`` for reading; None where there is none yet."""
    from cutekernels.db.storage.store import Store

    path = sqlite.path_of(url)
    return None if path is not None and sqlite.is_absent(path) else Store(url, readonly=True)


def _rest(
    task: Task, spec: GpuSpec, store: Store | None, limit: int | None, *, measured: bool, force: bool
) -> dict[str, Any]:
    from cutekernels.autotune.history import ATTEMPTS, TaskHistory
    from cutekernels.autotune.space import space
    from cutekernels.db.storage.store import Environment

    origin = "measured" if measured else "predicted"
    valid = sum(measured or not c.vendors for c in space(task.op, task.problem, spec).valid)
    wanted = min(valid, task.trials if measured or limit is None else limit)
    state, done, winner = "new", 0, None
    if store is not None:
        versions = Environment.of(environment.collect())
        history = TaskHistory(store, task.op, task.problem, spec, versions, origin)
        rows, winner = history.stored(), history.winner()
        holding = [row for row in rows if history.holds(row)]
        done = min(wanted, len({row.config for row in holding if row.status in ATTEMPTS}))
        crowned = winner is not None and (history.holds(winner) if winner.origin == origin else not measured)
        if rows:
            state = "repeats" if force or not holding else "done" if crowned and done == wanted else "resumes"
    return _row(task) | {
        "gpu": spec.name,
        "origin": origin,
        "state": state,
        "stored": done,
        "to_do": wanted if force else wanted - done,
        "winner": None if winner is None else task.op.spell(winner.revision, winner.problem, winner.config),
    }


def _row(task: Task) -> dict[str, Any]:
    return {"op": task.op.name, "problem": str(task.problem), "trials": task.trials}
