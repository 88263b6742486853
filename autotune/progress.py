"""Progress of a run: bars on a terminal, a line for each task in a log, both with the time that is left."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from cutekernels import terminal
from cutekernels.autotune.report import counts
from cutekernels.autotune.shards import expected_s

if TYPE_CHECKING:
    from rich.progress import TaskID

    from cutekernels.autotune.job import Task
    from cutekernels.autotune.report import TaskReport
    from cutekernels.autotune.run import Watcher
    from cutekernels.db.storage.store import Trial

LATEST = 3  # tasks that the pace is taken from, for each in work at a time
_BAD = ("wrong_result", "crashed", "timeout")


class Pace:
    """Time left, from the seconds that the latest tasks took for each second they were expected to take.

    Tasks in work, of which a GPU has several, count as half done. The latest: kernels that the first tasks of a job
    compile are there for those that follow.
    """

    def __init__(self, tasks: Sequence[Task], clock: Callable[[], float] = time.monotonic) -> None:
        self._costs = {str(task): expected_s(task) for task in tasks}
        self._sum_s = sum(self._costs.values())
        self._kinds = 1.0
        self._ended_s = self._worked_s = 0.0  # expected seconds of ended tasks, and of those that did anything
        self._in_work: Counter[str] = Counter()
        self._clock = clock
        self._marks: deque[tuple[float, float]] = deque()  # moments, each with the expected seconds worked until then
        self._most = 0  # tasks in work at a time

    def begin(self, task: str, of: int) -> None:
        if not self._marks:
            self._marks.append((self._clock(), 0.0))
        self._in_work[task] += 1
        self._most = max(self._most, self._in_work.total())
        self._kinds = of / max(1, len(self._costs))

    def end(self, report: TaskReport) -> None:
        task = f"{report.op} [{report.problem}]"
        self._in_work[task] -= 1
        cost_s = self._costs.get(task, 0.0)
        self._ended_s += cost_s
        if report.measured:
            self._worked_s += cost_s
            self._marks.append((self._clock(), self._worked_s + self._half_s()))
        while len(self._marks) > LATEST * self._most + 1:
            self._marks.popleft()

    def _half_s(self) -> float:
        return sum(self._costs.get(task, 0.0) * count for task, count in self._in_work.items()) / 2

    def left_s(self) -> float | None:
        """None before the first task that took time has ended."""
        if not self._worked_s:
            return None
        half_s = self._half_s()
        left_s = max(0.0, self._sum_s * self._kinds - self._ended_s - half_s)
        began, before_s = self._marks[0]
        return left_s * (self._clock() - began) / max(self._worked_s + half_s - before_s, 1e-9)


class Several:
    """Watchers called in turn. One that can no longer write is told of and left out: the run goes on without it."""

    def __init__(self, watchers: Iterable[Watcher]) -> None:
        self._watchers = list(watchers)

    def begin(self, task: Task, number: int, of: int) -> None:
        self._each(lambda watcher: watcher.begin(task, number, of))

    def trial(self, trial: Trial, done: int, wanted: int) -> None:
        self._each(lambda watcher: watcher.trial(trial, done, wanted))

    def end(self, report: TaskReport) -> None:
        self._each(lambda watcher: watcher.end(report))

    def _each(self, call: Callable[[Watcher], None]) -> None:
        for watcher in list(self._watchers):
            try:
                call(watcher)
            except OSError as error:
                self._watchers.remove(watcher)
                terminal.say(f"{watcher} cannot be written any more ({error.strerror}); the run goes on without it")


class Lines:
    """One line for each task that ends and each candidate that fails badly: for a log, needs no terminal."""

    def __init__(self, stream: TextIO, tasks: Sequence[Task]) -> None:
        self._stream, self._pace = stream, Pace(tasks)
        self._ended = self._of = 0

    def __str__(self) -> str:
        return f"the log {getattr(self._stream, 'name', '')}".strip()

    def begin(self, task: Task, number: int, of: int) -> None:
        self._pace.begin(str(task), of)
        self._of = of

    def trial(self, trial: Trial, done: int, wanted: int) -> None:
        if trial.status in _BAD:
            self._write(_message(trial))

    def end(self, report: TaskReport) -> None:
        self._ended += 1
        self._pace.end(report)
        left_s = self._pace.left_s() if self._ended < self._of else None
        parts = [
            report.state,
            _winner(report),
            counts(report.attempts),
            f"{report.resumed} resumed" if report.resumed else "",
            f"{report.seconds:.1f} s",
            report.message,
            f"about {duration(left_s)} left" if left_s is not None else "",
        ]
        what = f"[{self._ended}/{self._of}] {report.gpu} {report.op} [{report.problem}]"
        self._write(f"{what}: {'; '.join(part for part in parts if part)}")

    def _write(self, text: str) -> None:
        moment = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S")
        self._stream.write(f"{moment} {terminal.clean(' '.join(text.split()))}\n")
        self._stream.flush()


class Bars:
    """Bars on stderr: one for the tasks with the time left, one for each task in work with its best so far."""

    def __init__(self, console: Console, tasks: Sequence[Task]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            transient=True,
        )
        self._pace = Pace(tasks)
        self._tasks = self._progress.add_task("tasks", total=None, note="")
        self._rows: dict[str, list[TaskID]] = {}  # two kinds of GPU may work on the same problem
        self._best: dict[str, tuple[float, str]] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def __str__(self) -> str:
        return "the terminal"

    def begin(self, task: Task, number: int, of: int) -> None:
        self._pace.begin(str(task), of)
        self._progress.update(self._tasks, total=of)
        # The total is known with the first row: a small space, or --limit, has another number than the task's trials.
        row = self._progress.add_task(str(task), total=None, note="")
        self._rows.setdefault(str(task), []).append(row)
        self._best.pop(str(task), None)

    def trial(self, trial: Trial, done: int, wanted: int) -> None:
        name = f"{trial.op} [{trial.problem}]"
        found = _rank(trial)
        if found is not None:
            self._best[name] = min(found, self._best.get(name, found))
        if self._rows.get(name):
            note = self._best[name][1] if name in self._best else ""
            self._progress.update(self._rows[name][-1], completed=done, total=wanted, note=note)
        if trial.status in _BAD:
            self._progress.console.print(
                terminal.clean(_message(trial)), style="yellow", markup=False, highlight=False, soft_wrap=True
            )

    def end(self, report: TaskReport) -> None:
        self._pace.end(report)
        rows = self._rows.get(f"{report.op} [{report.problem}]")
        if rows:
            self._progress.remove_task(rows.pop(0))
        left_s = self._pace.left_s()
        self._progress.update(self._tasks, advance=1, note="" if left_s is None else f"about {duration(left_s)} left")


def duration(seconds: float) -> str:
    """``"40 s"``, ``"12 min"``, ``"3.5 h"``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _rank(trial: Trial) -> tuple[float, str] | None:
    """Rank of a row among those so far, and how it is shown; None for one without a time."""
    if trial.status != "ok" or trial.median_us is None:
        return None
    if trial.ratio is None:
        return trial.median_us, f"best {trial.median_us:.1f} us"
    return -trial.ratio, f"best {trial.ratio:.2f}x the default"


def _winner(report: TaskReport) -> str:
    w = report.winner
    if w is None:
        return "no winner"
    time_us = "" if w.median_us is None else f"{w.median_us:.2f} us"
    ratio = "" if w.ratio is None else f"{w.ratio:.3f}x the default"
    origin = "" if w.origin == report.state else w.origin
    return ", ".join(part for part in (origin, time_us, ratio) if part)


def _message(trial: Trial) -> str:
    return f"{trial.status}: {trial.op} [{trial.problem}] with [{trial.config}]: {trial.message.partition(chr(10))[0]}"
