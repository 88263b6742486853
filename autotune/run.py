"""``tune()``: a whole job. Tasks are measured or predicted, and share the time budget and the processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from cutekernels import environment
from cutekernels import gpu as gpus
from cutekernels.autotune.history import TaskHistory
from cutekernels.autotune.job import MOST_SECONDS, Job, Task, checked_trials, load
from cutekernels.autotune.predict import Prediction
from cutekernels.autotune.report import TaskReport, TuneReport
from cutekernels.autotune.runtime import LocalRuntime, Runtime
from cutekernels.autotune.search import Search
from cutekernels.db.store import Environment, Store, Trial
from cutekernels.errors import JobError


class Watcher(Protocol):
    """Progress callbacks of a run; the command line draws them."""

    def begin(self, task: Task, number: int, of: int) -> None: ...

    def trial(self, trial: Trial, done: int, wanted: int) -> None: ...

    def end(self, report: TaskReport) -> None: ...


class Silent:
    """A watcher that ignores progress."""

    def begin(self, task: Task, number: int, of: int) -> None:
        pass

    def trial(self, trial: Trial, done: int, wanted: int) -> None:
        pass

    def end(self, report: TaskReport) -> None:
        pass


def tune(
    job: str | Path | Job,
    gpu: str = "auto",
    *,
    db: str | None = None,
    trials: int | None = None,
    budget_s: float | None = None,
    jobs: int | None = None,
    limit: int | None = None,
    force: bool = False,
    watcher: Watcher | None = None,
    runtime: Runtime | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TuneReport:
    """Tune every task of ``job`` for ``gpu`` and store the winners in the database.

    Where a GPU of that kind is present, candidates are measured on it; where none is, they are compiled, ranked by
    the ops' models and stored as predicted. After an interruption (Ctrl-C, a kill) the next call resumes.

    Args:
        job: a path, the name of a bundled job, or a :class:`~cutekernels.autotune.job.Job`.
        gpu: a name of the GPU table, or ``"auto"`` for the one in this machine.
        db: path or URL of the database; None for the one in the settings.
        trials: attempts per task, overriding the job's.
        budget_s: seconds for the whole job, overriding the job's; shared evenly among the tasks still to do.
        jobs: compiling processes; default one per CPU, less one for the coordinator where a GPU measures.
        limit: without the GPU, compile only the best ``limit`` by the model.
        force: repeat what earlier runs did.
        watcher, runtime, clock: progress, the processes to use, and time; for the command line and for tests.

    Raises:
        JobError: the job file breaks a rule, ``trials`` is no number of attempts or ``budget_s`` none of seconds.
        UnknownGpu: no such GPU, or ``auto`` without one.
        StoreError: the database cannot be opened or written.
    """
    loaded = job if isinstance(job, Job) else load(job)
    spec = gpus.lookup(gpu)
    measured = gpus.present(spec)
    begin = clock()
    budget = loaded.budget_s if budget_s is None else budget_s
    if trials is not None:
        checked_trials(trials, "trials")
    if budget is not None and not 0 <= budget < MOST_SECONDS:
        raise JobError(f"budget_s must be a number of seconds from 0 up, at most a year; it is {budget}")
    end = None if budget is None else begin + budget
    versions = Environment.of(environment.collect())
    watch = watcher or Silent()
    reports: list[TaskReport] = []
    with Store(db) as store, _processes(runtime, jobs, measured) as processes:
        for number, listed in enumerate(loaded.tasks, 1):
            task = listed if trials is None else Task(listed.op, listed.problem, trials)
            now = clock()
            deadline = None if end is None else now + max(0.0, end - now) / (len(loaded.tasks) - number + 1)
            origin = "measured" if measured else "predicted"
            history = TaskHistory(store, task.op, task.problem, spec, versions, origin)
            watch.begin(task, number, len(loaded.tasks))
            if measured:
                report = Search(
                    task, spec, history, processes, deadline, force, on_trial=watch.trial, clock=clock
                ).run()
            else:
                report = Prediction(
                    task, spec, history, processes, limit, deadline, force, on_trial=watch.trial, clock=clock
                ).run()
            watch.end(report)
            reports.append(report)
    return TuneReport(loaded.name, spec.name, "measured" if measured else "predicted", tuple(reports), clock() - begin)


def _processes(runtime: Runtime | None, jobs: int | None, measured: bool) -> AbstractContextManager[Runtime]:
    if runtime is not None:
        return nullcontext(runtime)
    cpus = len(os.sched_getaffinity(0))
    return LocalRuntime(jobs if jobs is not None else max(1, cpus - 1) if measured else cpus)
