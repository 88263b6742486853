"""One task on a GPU that is present: suggest, compile ahead, measure, race, final round, winner.

A search is one thread of the coordinator. It keeps a few candidates compiling while the GPU measures those that are
ready, one at a time::

    Optuna's study -> compile pool -> static facts -> worker: verify, time beside default and incumbent -> row

What breaks a rule, and the static facts, cost no GPU time; only attempts that reached the compiler count against
``trials``. Earlier rows of the same (gpu, op, revision, problem) are trials of the study too, and none is repeated.

The final round (``final.py``) times the candidates that may be the fastest beside the default, in fresh processes, and
crowns one; it is held again where the kernels' sources or the versions of their compilers and driver have changed.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from cutekernels.autotune import final, samplers
from cutekernels.autotune.history import ATTEMPTS, TaskHistory, status_of
from cutekernels.autotune.job import Task
from cutekernels.autotune.report import TaskReport
from cutekernels.autotune.requests import VENDOR, Measure, Outcome, Prepare
from cutekernels.autotune.runtime import Runtime
from cutekernels.autotune.space import MODEL_SEEDS, space
from cutekernels.autotune.studies import Studies, attempt_of
from cutekernels.autotune.study import Study
from cutekernels.backends import Facts
from cutekernels.db.storage.store import Trial
from cutekernels.errors import CuteKernelsError
from cutekernels.gpu import GpuSpec
from cutekernels.isolate import ChildFailure
from cutekernels.measure import Samples
from cutekernels.op import Config, Op

AHEAD = 8  # candidates in the compile pool: keeps the GPU busy, yet the sampler learns before choosing more
RACE_ROUNDS, RACE_BUDGET_US = 20, 150_000.0

OnTrial = Callable[[Trial, int, int], None]  # a row just written, attempts so far, attempts wanted


def prune_reason(facts: Facts, op: Op[Any, Any], gpu: GpuSpec) -> str | None:
    """The reason not to run a compiled candidate, from the compiler's facts alone; None where there is none."""
    if facts.smem_bytes > gpu.smem_per_block_bytes:
        return f"{facts.smem_bytes} B of shared memory, {gpu.name} has {gpu.smem_per_block_bytes} per block"
    if facts.stack_bytes > op.most_stack_bytes:
        return f"spills: {facts.stack_bytes} B of stack per thread, over {op.most_stack_bytes}"
    return None


@dataclass
class Search:
    """The search of one task; :meth:`run` does all of it.

    Args:
        deadline: on ``clock``; after it nothing new is measured, and the final decides among what there is.
        force: forget earlier attempts (their rows stay) and measure anew.
        confirm: try no more than the default, what serves today and the eight that were predicted best; where nothing
            was predicted, the eight that the model likes best.
        studies: where Optuna keeps them; None: in memory.
        sampler: Optuna's, by the name that ``samplers.py`` knows.
        end: of the whole job, on ``clock``. The default may compile until then, since a process's first kernels take
            long; ``deadline`` moves by that time.
    """

    task: Task
    gpu: GpuSpec
    history: TaskHistory
    runtime: Runtime
    deadline: float | None = None
    force: bool = False
    confirm: bool = False
    end: float | None = None
    studies: Studies | None = None
    sampler: str = samplers.DEFAULT
    on_trial: OnTrial = lambda trial, done, wanted: None
    clock: Callable[[], float] = time.monotonic
    _attempts: Counter[str] = field(default_factory=Counter)
    _known: dict[Config, Trial] = field(default_factory=dict)
    _spoiled: dict[Config, str] = field(default_factory=dict)  # attempts that the machine spoiled, and how
    _again: deque[Config] = field(default_factory=deque)  # of these, those to be tried once more
    _default: Config = field(init=False)
    _study: Study = field(init=False)
    _small: bool = field(init=False, default=True)
    _wanted: int = field(init=False, default=0)  # attempts

    def run(self) -> TaskReport:
        """Search, store the winner and report. Rows are written on the way."""
        op, problem = self.task.op, self.task.problem
        begin = self.clock()
        self._default = op.check(problem, op.default(problem, self.gpu), self.gpu)
        earlier = [] if self.force else self.history.earlier()
        self._known = self._recall(earlier)
        resumed = len(self._known)
        message = ""
        self._study = self._begin(earlier)
        winner = self.history.winner()
        crowned = winner is not None and winner.origin == "measured" and self.history.holds(winner) and not self.force
        enough = self._tries() >= self.task.trials or self._enough()
        if crowned and enough and self._is_latest(winner):
            state = "done"
        elif self._late():
            state, message = "unfinished", "no time was left to begin"
        else:
            try:
                state = "tuned" if self._explore() else "unfinished"
                winner = self._final() or winner
                if self._spoiled:
                    config, why = next(iter(self._spoiled.items()))
                    state, message = "unfinished", f"{len(self._spoiled)} configs without a verdict, "
                    message += f"tried again by the next run; [{config}]: {why}"
            except _NoTime as error:
                state, message = "unfinished", str(error)
            except _DefaultFailed as error:
                state, winner, message = "failed", self.history.winner(), str(error)
            finally:
                self._study.close()
        return TaskReport(
            op=op.name,
            problem=str(problem),
            state=state,
            winner=winner,
            default=str(self._default),
            attempts=dict(self._attempts),
            resumed=resumed,
            seconds=self.clock() - begin,
            message=message,
        )

    # -- before the first measurement

    def _recall(self, earlier: Iterable[Trial]) -> dict[Config, Trial]:
        """Earlier attempts by config. The latest row counts: the final round may have rejected a candidate."""
        known: dict[Config, Trial] = {}
        for trial in earlier:
            config = self.history.config_of(trial)
            if config is not None and trial.status in ATTEMPTS:
                known[config] = trial
        if self._default in known and known[self._default].status != "ok":
            del known[self._default]  # its time is the baseline of all ratios: measure it again
        return known

    def _is_latest(self, winner: Trial | None) -> bool:
        """Whether the final that chose the winner came after all attempts: it records the winner last."""
        latest = max(self._known.values(), key=lambda t: (t.created_at, t.id), default=winner)
        return winner is not None and latest is not None and latest.id == winner.id

    def _begin(self, earlier: Sequence[Trial]) -> Study:
        """The task's study. A space no larger than the attempts is tried whole: all of it is seeds."""
        found = space(self.task.op, self.task.problem, self.gpu)
        seeds = found.openers([self._default, *self.history.seeds()])
        to_try: Sequence[Config] = found.valid
        if self.confirm:
            likely = self.history.predicted(MODEL_SEEDS) or found.openers([])
            to_try = [self._default, *self.history.serving(), *likely]
            to_try = list(dict.fromkeys(c for c in to_try if c in found.params))
        self._small = self.confirm or len(to_try) <= self.task.trials
        self._wanted = min(len(to_try), self.task.trials)
        if self._small:
            seeds = [*(c for c in seeds if c in to_try), *to_try]
        study = (self.studies or Studies()).study(self.history, found, earlier)
        seed = zlib.crc32(f"{self.history.name} {len(study.get_trials(deepcopy=False))}".encode())
        sampler = samplers.make(self.sampler, seed, found.branches)
        return Study(study, sampler, found, seeds, {c: attempt_of(trial) for c, trial in self._known.items()})

    def _enough(self) -> bool:
        """Whether no untried config is expected to gain."""
        return self._study.seeded if self._small else self._study.converged()

    # -- the search

    def _explore(self) -> bool:
        """Try candidates until there are enough attempts or none is left. False where the deadline came first."""
        compiling: dict[Future[Facts], Config] = {}
        try:
            if self._default not in self._known:
                self._measure_default(compiling)
            while not self._late():
                self._fill(compiling)
                if not compiling:
                    return True
                for future in self._ready(compiling):
                    self._attempt(compiling.pop(future), future)
                    if self._late():
                        break
            return False
        finally:
            for future in compiling:
                future.cancel()

    def _fill(self, compiling: dict[Future[Facts], Config]) -> None:
        while len(compiling) < min(self.runtime.width, AHEAD) and self._tries() + len(compiling) < self.task.trials:
            config = None if self._enough() else self._study.next()
            if config is None:
                break
            compiling[self._compile(config)] = config
        if not compiling and self._again:  # alone, when the machine is least loaded
            config = self._again.popleft()
            compiling[self._compile(config)] = config

    def _ready(self, compiling: dict[Future[Facts], Config]) -> Iterator[Future[Facts]]:
        done = wait(compiling, timeout=self._seconds_left(self.deadline), return_when=FIRST_COMPLETED).done
        return iter([future for future in compiling if future in done])  # in the order they were suggested

    def _compile(self, config: Config) -> Future[Facts]:
        return self.runtime.compile(self.task.op, self.task.problem, config, self.gpu)

    def _measure_default(self, compiling: dict[Future[Facts], Config]) -> None:
        first = self._study.next()  # the first seed
        assert first == self._default
        future = self._compile(self._default)  # before the others, so that it waits for none of them
        self._fill(compiling)
        with contextlib.suppress(ChildFailure):  # a repeated failure becomes the row of the default's measurement
            self.runtime.prepare(self._prepare(0))  # inputs and reference, while they compile
        self._await(future)
        self._attempt(self._default, future)
        if self._again:
            future = self._compile(self._again.popleft())
            self._await(future)
            self._attempt(self._default, future)
        if self._default in self._spoiled:
            raise _DefaultFailed(f"the default config [{self._default}]: {self._spoiled[self._default]}")
        trial = self._known[self._default]
        if trial.status != "ok":
            raise _DefaultFailed(f"the default config [{trial.config}] gave {trial.status}: {trial.message}")

    def _await(self, future: Future[Facts]) -> None:
        begin, until = self.clock(), self.deadline if self.end is None else self.end
        if not wait([future], timeout=self._seconds_left(until)).done:
            future.cancel()
            raise _NoTime("no time was left to compile the default")
        if self.deadline is not None and until is not None:
            self.deadline = min(until, self.deadline + self.clock() - begin)

    def _attempt(self, config: Config, future: Future[Facts]) -> None:
        """One candidate from its compile to its row; what the machine spoiled has none and is tried once more."""
        trial = self._outcome(config, future)
        if trial is None:
            return
        self._spoiled.pop(config, None)
        self._known[config] = trial
        self._note(config, trial)

    def _fail(
        self, config: Config, error: ChildFailure, *, compiling: bool, facts: Facts | None = None
    ) -> Trial | None:
        status = status_of(error, compiling=compiling)
        if status is not None:
            return self.history.row(config, status, facts=facts, message=str(error))
        if config not in self._spoiled:
            self._again.append(config)
        self._spoiled[config] = str(error).partition("\n")[0]
        return None

    def _outcome(self, config: Config, future: Future[Facts]) -> Trial | None:
        is_default = config == self._default
        try:
            facts = future.result()
        except ChildFailure as error:
            return self._fail(config, error, compiling=True)
        reason = None if is_default else prune_reason(facts, self.task.op, self.gpu)
        if reason is not None:
            return self.history.row(config, "pruned", facts=facts, message=reason)
        incumbent = self._incumbent()
        rivals = dict.fromkeys([self._default, incumbent, config])
        request = Measure(
            self._prepare(0),
            tuple(map(str, rivals)),
            race=() if is_default else (str(incumbent), str(config)),
            rounds=RACE_ROUNDS,
            budget_us=RACE_BUDGET_US,
        )
        try:
            outcomes = self.runtime.measure(request)
        except ChildFailure as error:
            return self._fail(config, error, compiling=False, facts=facts)
        return self._judge(config, outcomes, facts)

    def _judge(self, config: Config, outcomes: dict[str, Outcome], facts: Facts | None, **more: Any) -> Trial:
        """The row of one config, from a measurement that included the default."""
        mine, base = outcomes[str(config)], outcomes[str(self._default)]
        if not mine.right:
            message = f"error {mine.error:.3g} times the tolerance"
            return self.history.row(config, "wrong_result", facts=facts, error=mine.error, message=message)
        if not base.right:
            raise _DefaultFailed(f"the default config [{self._default}] was wrong: error {base.error:.3g}")
        samples = Samples(mine.us)
        ratio = samples.ratio(Samples(base.us))
        return self.history.row(config, "ok", facts=facts, samples=samples, ratio=ratio, error=mine.error, **more)

    def _incumbent(self) -> Config:
        """The fastest so far by ratio to the default; absolute times of different hours are not comparable."""
        ok = [(-t.ratio, str(c), c) for c, t in self._known.items() if t.status == "ok" and t.ratio]
        return min(ok)[2] if ok else self._default

    # -- the final round

    def _final(self) -> Trial | None:
        """Measure the finalists beside the default, record them, the winner last, and crown it.

        None where the machine spoiled a finalist's measurement: the next run has the final again.
        """
        serving = self.history.serving()
        challengers = final.challengers(self._known, self._default, serving)
        outcomes = self._measure_final(challengers)
        if outcomes is None:  # one of them killed the process: try each alone, then the others together
            alone = [c for c in challengers if self._measure_final([c], again=True, blame=True) is not None]
            outcomes = self._measure_final(alone, again=True) or self._measure_final([], again=True, blame=True)
        if not self._spoiled.keys().isdisjoint([self._default, *challengers]):
            return None
        if outcomes is None:
            raise _DefaultFailed(f"the default config [{self._default}] failed in the final; the rows say how")
        rows: dict[Config, Trial] = {}
        for config in [self._default, *challengers]:
            if str(config) in outcomes:
                rows[config] = self._judge(config, outcomes, self._facts(config))
                if rows[self._default].status != "ok":
                    self._note(config, rows[config])
                    raise _DefaultFailed(f"the default config [{self._default}] was wrong in the final")
        by_config = {config: outcomes[str(config)] for config in rows}
        verdict = final.decide(by_config, self._default, serving)
        del rows[verdict.winner]
        rows[verdict.winner] = winner = self._judge(  # the latest row
            verdict.winner, outcomes, self._facts(verdict.winner),
            vendor_us=Samples(outcomes[VENDOR].us).median if VENDOR in outcomes else None,
            certificate=final.certificate(verdict, by_config, self._default),
        )  # fmt: skip
        for config, trial in rows.items():
            self._note(config, trial)
        self.history.crown(winner)
        return winner

    def _measure_final(
        self, challengers: list[Config], *, again: bool = False, blame: bool = False
    ) -> dict[str, Outcome] | None:
        """Outcomes from fresh processes, or None where one died.

        ``blame`` records the death for the last config; ``again``: a failure of the machine is not tried once more.
        """
        texts = tuple(map(str, [self._default, *challengers]))
        processes = []
        try:
            for seed in range(1, 1 + final.PROCESSES):  # the search's inputs are of seed 0
                self.runtime.refresh()
                request = Measure(
                    self._prepare(seed), texts, rounds=final.ROUNDS, budget_us=final.BUDGET_US, final=True
                )
                processes.append(self.runtime.measure(request))
            return final.pooled(processes)
        except ChildFailure as error:
            last = challengers[-1] if challengers else self._default
            status = status_of(error, compiling=False)
            if status is None and again:
                self._spoiled[last] = str(error).partition("\n")[0]
            elif status is not None and blame:
                self._known[last] = self.history.row(last, status, message=str(error))
                self._note(last, self._known[last])
            return None

    def _facts(self, config: Config) -> Facts | None:
        t = self._known.get(config)
        if t is None or t.registers is None or t.stack_bytes is None or t.smem_bytes is None:
            return None
        return Facts(t.registers, t.stack_bytes, t.smem_bytes)

    # -- requests, rows, time

    def _prepare(self, seed: int) -> Prepare:
        return Prepare(self.task.op.name, str(self.task.problem), self.gpu, seed)

    def _note(self, config: Config, trial: Trial) -> None:
        self.history.record([trial])
        self._study.observe(config, attempt_of(trial))
        self._attempts[trial.status] += 1
        self.on_trial(trial, min(self._tries(), self._wanted), self._wanted)

    def _tries(self) -> int:
        return sum(trial.status in ATTEMPTS for trial in self._known.values()) + len(self._spoiled)

    def _seconds_left(self, until: float | None) -> float | None:
        return None if until is None else min(86400.0, max(0.0, until - self.clock()))

    def _late(self) -> bool:
        return self.deadline is not None and self.clock() >= self.deadline


class _DefaultFailed(CuteKernelsError):
    """The default config gave no time: there is no baseline, and the op has to be repaired before it is tuned."""


class _NoTime(CuteKernelsError):
    """The deadline passed before there was a baseline."""
