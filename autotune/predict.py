"""One task for a GPU that is absent: compile what the op's model ranks first, prune by static facts.

No GPU is needed: kernels are compiled for the requested target in child processes, whose abort costs only that
candidate. Every candidate becomes a row of origin ``predicted``: ``ok`` with the model's estimate as its time, the
default's over it as its ratio, and a message where calls should take it in place of the default, ``pruned`` or
``compile_error``. The best becomes the predicted winner, which never displaces a measured one. An interrupted run
resumes, best estimates first.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field

from cutekernels.autotune import departures
from cutekernels.autotune.history import TaskHistory, status_of
from cutekernels.autotune.job import Task
from cutekernels.autotune.report import TaskReport
from cutekernels.autotune.runtime import Runtime
from cutekernels.autotune.search import OnTrial, prune_reason
from cutekernels.backends import Facts
from cutekernels.db.storage.store import Trial
from cutekernels.gpu import GpuSpec
from cutekernels.isolate import ChildFailure
from cutekernels.op import Config

_AHEAD = 4  # compiles queued per process: keeps them busy, yet a spent budget ends the run promptly


@dataclass
class Prediction:
    """The prediction of one task; :meth:`run` does all of it.

    Args:
        limit: compile this many, the best by the model; None for the task's ``trials``, the default among them.
        deadline: on ``clock``; after it nothing new is compiled.
        force: forget earlier rows (they stay in the database) and compile anew.
    """

    task: Task
    gpu: GpuSpec
    history: TaskHistory
    runtime: Runtime
    limit: int | None = None
    deadline: float | None = None
    force: bool = False
    on_trial: OnTrial = lambda trial, done, wanted: None
    clock: Callable[[], float] = time.monotonic
    _attempts: Counter[str] = field(default_factory=Counter)
    _rows: dict[Config, Trial] = field(default_factory=dict)
    _spoiled: dict[Config, str] = field(default_factory=dict)  # compiles that the machine spoiled, and how
    _default: Config | None = None
    _gains: dict[Config, float] = field(default_factory=dict)

    def run(self) -> TaskReport:
        """Compile, rank, store the winner and report. Rows are written on the way."""
        op, problem = self.task.op, self.task.problem
        begin = self.clock()
        default = self._default = op.check(problem, op.default(problem, self.gpu), self.gpu)
        own = (c for c in op.valid(problem, self.gpu) if not c.vendors)
        estimates = {c: op.estimate_us(problem, c, self.gpu) for c in own}
        # The default comes first among equals: a prediction that is no better must not replace it.
        every = sorted(estimates, key=lambda c: (estimates[c], c != default, str(c)))
        ranked = every[: self.task.trials if self.limit is None else self.limit]
        if self.limit is None and default not in ranked:
            ranked[-1] = default
        rows = ((self.history.config_of(trial), trial) for trial in self.history.earlier())
        earlier = {config: trial for config, trial in rows if config is not None}
        self._rows = {} if self.force else dict(earlier)
        todo = [c for c in ranked if c not in self._rows]
        resumed = len(ranked) - len(todo)
        self._gains = {c: estimates[default] / us if us else 1.0 for c, us in estimates.items()}
        self._compile_all(todo, estimates, len(ranked))
        late = any(c not in self._rows for c in ranked)
        # Earlier runs' rows count too where this one, of fewer trials or cut off, does not try their configs.
        stored = earlier | self._rows
        fine = [c for c in every if c in stored and stored[c].status == "ok"]
        winner = self.history.winner()
        message = ""
        best = stored[fine[0]] if fine else None
        # An interrupted run may have stored rows without making the best one of today's kernels the winner.
        if best is not None and (todo or winner is None or self._is_beaten(winner, best)):
            if self.history.crown(best):
                winner = best
            else:
                message = "a measured winner stays"
        state = "unfinished" if late else "predicted" if todo else "done"
        if self._spoiled:
            config, why = next(iter(self._spoiled.items()))
            message = f"{len(self._spoiled)} configs did not compile, tried again by the next run; [{config}]: {why}"
        if not fine and not late:
            state, message = "failed", f"none of {len(ranked)} configs compiled without spilling"
        return TaskReport(
            op=op.name,
            problem=str(problem),
            state=state,
            winner=winner,
            default=str(default),
            attempts=dict(self._attempts),
            resumed=resumed,
            seconds=self.clock() - begin,
            message=message,
        )

    def _is_beaten(self, winner: Trial, best: Trial) -> bool:
        return winner.origin == "predicted" and not (self.history.holds(winner) and winner.config == best.config)

    def _compile_all(self, todo: list[Config], estimates: dict[Config, float], wanted: int) -> None:
        """Compile ``todo`` in order, until all are rows or the deadline passes; what the machine spoiled once more."""
        waiting = deque(todo)
        compiling: dict[Future[Facts], Config] = {}
        try:
            while True:
                if self._late():
                    for queued in [future for future in compiling if future.cancel()]:
                        del compiling[queued]
                else:
                    while waiting and len(compiling) < self.runtime.width * _AHEAD:
                        config = waiting.popleft()
                        compiling[self.runtime.compile(self.task.op, self.task.problem, config, self.gpu)] = config
                if not compiling:
                    return
                future = next(as_completed(compiling))
                config = compiling.pop(future)
                trial = self._row(config, future, estimates[config])
                if trial is not None:
                    self._note(config, trial, wanted)
                elif config not in self._spoiled:
                    waiting.append(config)
                    self._spoiled[config] = str(future.exception()).partition("\n")[0]
        finally:
            for future in compiling:
                future.cancel()

    def _row(self, config: Config, future: Future[Facts], estimate_us: float) -> Trial | None:
        try:
            facts = future.result()
        except ChildFailure as error:
            status = status_of(error, compiling=True)
            return None if status is None else self.history.row(config, status, message=str(error))
        reason = None if config == self._default else prune_reason(facts, self.task.op, self.gpu)
        if reason is not None:
            return self.history.row(config, "pruned", facts=facts, message=reason)
        assert self._default is not None
        why = departures.reason(self.task.op, self.task.problem, self.gpu, self._default, config)
        gain = self._gains[config]
        return self.history.row(config, "ok", facts=facts, estimate_us=estimate_us, gain=gain, message=why)

    def _note(self, config: Config, trial: Trial, wanted: int) -> None:
        self._rows[config] = trial
        self._spoiled.pop(config, None)
        self._attempts[trial.status] += 1
        self.history.record([trial])
        self.on_trial(trial, len(self._rows), wanted)

    def _late(self) -> bool:
        return self.deadline is not None and self.clock() >= self.deadline
