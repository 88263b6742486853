"""``tune()``: a whole job. Tasks are measured or predicted, and share the time budget and the processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol

from cutekernels import environment, rates, settings
from cutekernels import gpu as gpus
from cutekernels.autotune.fleet import POLL_S, Board, Fleet, LocalFleet, OneSlot, Slot, hand_out
from cutekernels.autotune.history import TaskHistory, name_of
from cutekernels.autotune.job import MOST_SECONDS, Job, Task, load
from cutekernels.autotune.ledger import Ledger
from cutekernels.autotune.predict import Prediction
from cutekernels.autotune.report import TaskReport, TuneReport
from cutekernels.autotune.runtime import LocalRuntime, Runtime
from cutekernels.autotune.samplers import DEFAULT, checked
from cutekernels.autotune.search import Search
from cutekernels.autotune.studies import Studies, translated
from cutekernels.db.storage.leases import Leases, of
from cutekernels.db.storage.store import Environment, Trial
from cutekernels.errors import JobError, StoreError, StoreUnreachable
from cutekernels.gpu import GpuSpec

MOST_RETURNS = 10  # of a server during one task
_LEAST_S = 15.0  # what a task takes at least beside seven others


class Watcher(Protocol):
    """Progress callbacks of a run; the command line draws them."""

    def begin(self, task: Task, number: int, of: int) -> None: ...

    def trial(self, trial: Trial, done: int, wanted: int) -> None: ...

    def end(self, report: TaskReport) -> None: ...


class Watched:
    """A watcher called from several threads, one call at a time."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._lock = watcher, threading.Lock()

    def begin(self, task: Task, number: int, of: int) -> None:
        with self._lock:
            self._watcher.begin(task, number, of)

    def trial(self, trial: Trial, done: int, wanted: int) -> None:
        with self._lock:
            self._watcher.trial(trial, done, wanted)

    def end(self, report: TaskReport) -> None:
        with self._lock:
            self._watcher.end(report)


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
    lanes: int | None = None,
    limit: int | None = None,
    force: bool = False,
    confirm: bool = False,
    sampler: str = DEFAULT,
    watcher: Watcher | None = None,
    fleet: Fleet | None = None,
    runtime: Runtime | None = None,
    clock: Callable[[], float] = time.monotonic,
    began: float | None = None,
) -> TuneReport:
    """Tune every task of ``job`` for ``gpu`` and store the winners in the database.

    Where a GPU of that kind is present, candidates are measured on it; where none is, they are compiled, ranked by
    the ops' models and stored as predicted. After an interruption (Ctrl-C, a kill) the next call resumes, but
    with ``force`` it begins anew.

    Args:
        job: a path, the name of a bundled job, or a :class:`~cutekernels.autotune.job.Job`.
        gpu: a name of the GPU table, or ``"auto"`` for the one in this machine.
        db: path or URL of the database; None for the one in the settings.
        trials: attempts per task, overriding the job's.
        budget_s: seconds for the whole job, overriding the job's; shared evenly among the tasks still to do, or, where
            a job is ranked, given to its tasks in their order.
        jobs: compiling processes; default one per CPU, less one for the coordinator where a GPU measures.
        lanes: tasks in work on the GPU at a time, of which one is timed; default up to eight, by memory and CPUs.
        limit: without the GPU, compile the best ``limit`` by the model, in place of the task's ``trials``.
        force: repeat what earlier runs did.
        confirm: measure only what was predicted best, beside the default and what serves today.
        sampler: Optuna's, which proposes what follows the seeds: ``"random"``, ``"tpe"``, or another's name.
        fleet: several GPUs that share the tasks: :class:`~cutekernels.autotune.fleet.LocalFleet`,
            :class:`~cutekernels.autotune.ray_fleet.RayFleet`. ``gpu="auto"`` then means every kind that it has.
        watcher, runtime, clock, began: progress, the processes to use, time, and when the budget began on it; for the
            command line and for tests.

    Raises:
        JobError: the job file breaks a rule, ``trials`` is no number of attempts or ``budget_s`` none of seconds,
            Optuna has no such sampler or it cannot take the configs, or ``confirm`` without the GPU.
        UnknownGpu: no such GPU, or ``auto`` without one.
        StoreError: the database cannot be opened or written.
    """
    loaded = job if isinstance(job, Job) else load(job)
    wanted = gpus.lookup(gpu) if fleet is None or not gpus.is_auto(gpu) else None
    begin = clock() if began is None else began
    budget = loaded.budget_s if budget_s is None else budget_s
    if trials is not None:
        loaded = loaded.with_trials(trials)
    measured = fleet is not None or (wanted is not None and gpus.present(wanted))
    check(budget, confirm=confirm, measured=measured)
    end = None if budget is None else begin + budget
    least_s = min(_LEAST_S, (budget or 0.0) / 4) if loaded.ranked else None
    run = _Run(loaded.tasks, Watched(watcher or Silent()), end, least_s, limit, force, confirm, checked(sampler), clock)
    with Ledger(db) as store, nullcontext() if db is None else rates.read_from(db), closing(of(store.url)) as leases:
        run.leases = leases
        if not loaded.tasks:  # more shards than tasks
            reports: list[TaskReport] = []
        elif measured:
            if fleet is None:
                assert wanted is not None
                fleet = LocalFleet(None, jobs, lanes) if runtime is None else OneSlot(wanted, runtime)
            reports = run.measure(store, fleet, wanted, ranked=loaded.ranked or budget is not None)
        else:
            assert wanted is not None
            reports = run.predict(store, wanted, runtime, jobs)
    kinds = list(dict.fromkeys(report.gpu for report in reports)) or [wanted.name if wanted is not None else "auto"]
    return TuneReport(
        loaded.name, ", ".join(kinds), "measured" if measured else "predicted", tuple(reports), clock() - begin
    )


def check(budget_s: float | None, *, confirm: bool, measured: bool) -> None:
    """Raises JobError for settings of a run that no run takes; ``measured``: whether the GPU is present."""
    if budget_s is not None and not 0 <= budget_s < MOST_SECONDS:
        raise JobError(f"budget_s must be a number of seconds from 0 up, at most a year; it is {budget_s}")
    if confirm and not measured:
        raise JobError("--confirm measures what was predicted: run it on a machine with that GPU")


@dataclass
class _Run:
    """Settings that the tasks of one call have in common."""

    tasks: Sequence[Task]
    watch: Watched
    end: float | None
    least_s: float | None  # of a ranked job: seconds with fewer of which left no task begins
    limit: int | None
    force: bool
    confirm: bool
    sampler: str
    clock: Callable[[], float]
    leases: Leases = field(init=False)
    _held: set[str] = field(default_factory=set)

    def predict(self, store: Ledger, spec: GpuSpec, runtime: Runtime | None, jobs: int | None) -> list[TaskReport]:
        """All tasks in turn, for a GPU that is elsewhere."""
        versions = Environment.of(environment.collect())
        reports: dict[int, TaskReport] = {}
        waiting = list(range(len(self.tasks)))
        with _compilers(runtime, jobs) as processes:
            while waiting:
                position = next((one for one in waiting if self._free(spec, one)), None)
                if position is None:
                    time.sleep(POLL_S)
                    continue
                deadline = self._deadline(lambda left: max(0.0, left) / len(waiting))
                waiting.remove(position)
                task = self.tasks[position]
                self.watch.begin(task, len(self.tasks) - len(waiting), len(self.tasks))
                history = TaskHistory(store, task.op, task.problem, spec, versions, "predicted")
                predict = partial(
                    Prediction, task, spec, history, processes, self.limit, deadline, self.force,
                    on_trial=self.watch.trial, clock=self.clock,
                )  # fmt: skip
                late = deadline is not None and deadline <= self.clock() and not history.earlier()
                reports[position] = self._lease(store, task, history, predict, late=late)
                self.watch.end(reports[position])
        return [reports[position] for position in sorted(reports)]

    def measure(self, store: Ledger, fleet: Fleet, wanted: GpuSpec | None, *, ranked: bool) -> list[TaskReport]:
        """The tasks on all GPUs of the fleet that are wanted; only this process writes."""
        board = Board(self.tasks, wanted, ranked=ranked, free=self._free)
        studies = _studies(store.url)
        begun = count(1)

        def work(slot: Slot, lane: Runtime, kind: GpuSpec, position: int) -> TaskReport:
            task = self.tasks[position]
            deadline = self._deadline(lambda left: board.share(kind, left))
            self.watch.begin(task, next(begun), board.total)
            history = TaskHistory(store, task.op, task.problem, kind, slot.environment, "measured")
            search = partial(
                Search, task, kind, history, lane, deadline, self.force, self.confirm, self.end, studies, self.sampler,
                on_trial=self.watch.trial, clock=self.clock,
            )  # fmt: skip
            late = self.least_s is not None and deadline is not None and deadline <= self.clock()
            report = self._lease(store, task, history, search, late=late)
            self.watch.end(report)
            return report

        with closing(studies), store.hurry_on_signal():
            hand_out(board, fleet, work, given_up=self.watch.end, late=self._over)
        return board.reports()

    def _deadline(self, share: Callable[[float], float]) -> float | None:
        """The deadline of a task begun now: its ``share`` of the seconds left; all in a ranked job, if enough are."""
        now = self.clock()
        if self.end is None:
            return None
        if self.least_s is None:
            return now + share(self.end - now)
        return now if self.end - now < self.least_s else self.end

    def _postpone(self, history: TaskHistory) -> TaskReport:
        """The report of a task that is left to the next run."""
        op, problem, kind = history.op, history.problem, history.gpu
        default, message = str(op.default(problem, kind)), "no time was left to begin"
        winner = history.winner()
        return TaskReport(op.name, str(problem), "unfinished", winner, default, message=message, gpu=kind.name)

    # -- leases

    def _free(self, kind: GpuSpec, position: int) -> bool:
        """Whether a task may begin: no other run is at it, or no time is left to wait for that run."""
        name = name_of(kind, self.tasks[position].op, self.tasks[position].problem)
        if name not in self._held and self.leases.take(name):
            self._held.add(name)
        return name in self._held or self._over()

    def _over(self) -> bool:
        return self.end is not None and self.clock() >= self.end

    def _lease(
        self, store: Ledger, task: Task, history: TaskHistory, begin: Callable[[], Search | Prediction], *, late: bool
    ) -> TaskReport:
        """The task's search or prediction under its lease, which ends when its rows are stored. A late one is left to
        the next run: it would enumerate its space first, for seconds.
        """
        kind = history.gpu
        name = name_of(kind, task.op, task.problem)
        if name not in self._held:
            default = str(task.op.default(task.problem, kind))
            message = "another run was at it until no time was left"
            return TaskReport(
                task.op.name, str(task.problem), "unfinished", None, default, message=message, gpu=kind.name
            )
        try:
            with store.hurry_on_signal():
                run = partial(self._postpone, history) if late else lambda: begin().run()
                return replace(self._steady(store, run), gpu=kind.name)
        finally:
            self._drop(store, name)

    def _steady(self, store: Ledger, run: Callable[[], TaskReport]) -> TaskReport:
        """``run``, which begins again from its stored rows where the database's server went away and came back."""
        for left in reversed(range(MOST_RETURNS)):
            try:
                with translated():
                    return run()
            except StoreUnreachable as error:
                if not left:
                    raise
                store.await_server(error)
        raise AssertionError("the last one returns or raises")

    def _drop(self, store: Ledger, name: str) -> None:
        store.flush()
        if name in self._held:
            self._held.discard(name)
            self.leases.release(name)


def _studies(url: str) -> Studies:
    """The studies of a run: they repeat what its rows hold, so a right that is missing ends no run."""
    try:
        return Studies(url)
    except StoreUnreachable:
        raise
    except StoreError as error:
        settings.logger("autotune").warning("the Optuna studies of this run stay in memory: %s", error)
        return Studies()


def _compilers(runtime: Runtime | None, jobs: int | None) -> AbstractContextManager[Runtime]:
    if runtime is not None:
        return nullcontext(runtime)
    return LocalRuntime(jobs if jobs is not None else len(os.sched_getaffinity(0)))
