"""One task's rows in the database: earlier attempts, and how an outcome becomes a trial.

Attempts are stored in batches of a second (``ledger.py``), of which a kill -9 loses the last. This module
translates between a search's objects (configs, facts, samples, failures) and ``Trial``; the decisions are
made in ``search.py`` and ``predict.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any

from cutekernels.autotune.runtime import NotPrepared
from cutekernels.backends import Facts
from cutekernels.compile import source_fingerprint
from cutekernels.db.storage import snapshot
from cutekernels.db.storage.certificate import Certificate
from cutekernels.db.storage.store import Environment, Gpu, Store, Trial
from cutekernels.dispatch import octaves
from cutekernels.errors import CacheUnusable, InvalidConfig, UnsupportedProblem
from cutekernels.gpu import GpuSpec
from cutekernels.isolate import OUT_OF_MEMORY, ChildDied, ChildFailure, ChildTimeout, RemoteError, StartFailed
from cutekernels.measure import Ratio, Samples
from cutekernels.op import Config, Op, Problem

ATTEMPTS = ("ok", "compile_error", "wrong_result", "crashed", "timeout", "pruned")
"""Statuses that count against a task's budget; ``invalid`` costs nothing."""

_NEIGHBOURS = 3  # winners of the nearest problems that a search tries first
_REMOTE_STATUS = {"CompileError": "compile_error", "InvalidConfig": "invalid", "WrongResult": "wrong_result"}
_MACHINES = (
    "CompilerKilled",
    "MemoryError",
    "OutOfMemoryError",
    "OSError",
    *(e.__name__ for e in OSError.__subclasses__()),
)


def name_of(gpu: GpuSpec, op: Op[Any, Any], problem: Problem) -> str:
    """The name of a task: of its study and its lease."""
    return f"{gpu.name} {op.name} r{op.revision} [{problem}]"


class TaskHistory:
    """Trials of one (gpu, op, revision, problem): earlier ones, and those this run adds."""

    def __init__(
        self, store: Store, op: Op[Any, Any], problem: Problem, gpu: GpuSpec, environment: Environment, origin: str
    ) -> None:
        self.op, self.problem, self.gpu, self.origin = op, problem, gpu, origin
        self._store = store
        self._gpu_row = Gpu(
            gpu.name, gpu.target, gpu.sm_count, gpu.smem_per_block_bytes, gpu.l2_bytes, gpu.memory_bytes
        )
        self._environment = environment
        self.sources = source_fingerprint(type(op))
        self._key: dict[str, Any] = {"gpu": gpu.name, "op": op.name, "revision": op.revision, "problem": str(problem)}

    @property
    def name(self) -> str:
        """The task's name, which its study has too."""
        return name_of(self.gpu, self.op, self.problem)

    # -- reading

    def stored(self) -> list[Trial]:
        """Rows of this task and origin, under any revision that serves, oldest first."""
        return self._trials(origin=self.origin)

    def _trials(self, **wanted: Any) -> list[Trial]:
        found = [self._store.trials(**self._key | {"revision": r}, **wanted) for r in self.op.revisions]
        return found[0] if len(found) == 1 else sorted(chain(*found), key=lambda t: (t.created_at, t.id))

    def earlier(self) -> list[Trial]:
        """Those that hold for today's kernels and versions."""
        return [t for t in self.stored() if self.holds(t)]

    def holds(self, trial: Trial) -> bool:
        """Whether a trial was made from today's sources, under today's versions (of the driver, its branch)."""
        return trial.sources == self.sources and _versions(trial.environment) == _versions(self._environment)

    def predicted(self, count: int) -> list[Config]:
        """The ``count`` best predicted configs, the fastest first; none where nothing was predicted."""
        rows = self._trials(origin="predicted", status="ok")
        rows.sort(key=lambda t: (t.median_us or math.inf, t.config))
        configs = (self.config_of(t) for t in rows)
        return list(dict.fromkeys(c for c in configs if c is not None))[:count]

    def serving(self) -> list[Config]:
        """Measured configs that serve this problem today: this database's winner, then the shipped one."""
        rows = snapshot.shipped(self.gpu.name)
        shipped = (t for t in rows if t.op == self.op.name and t.revision in self.op.revisions)
        found = [self.winner(), *(t for t in shipped if t.problem == str(self.problem))]
        configs = [self.config_of(t) for t in found if t is not None and t.origin == "measured"]
        return list(dict.fromkeys(c for c in configs if c is not None))

    def winner(self) -> Trial | None:
        """The winner that serves: a measured one, of the latest revision."""
        winners = chain(*(self._store.winners(**self._key | {"revision": r}) for r in self.op.revisions))
        return max(winners, key=lambda t: (t.origin == "measured", t.revision), default=None)

    def config_of(self, trial: Trial) -> Config | None:
        """The trial's config, or None where the op's current declaration cannot parse it."""
        try:
            config: Config = self.op.Config.parse(self.op.spell(trial.revision, trial.problem, trial.config))
        except InvalidConfig:
            return None
        return config

    def seeds(self) -> list[Config]:
        """Configs to try first: what serves this problem, then winners of the nearest with the same static fields."""
        found: list[tuple[float, str, Trial]] = []
        for trial in self._store.winners(gpu=self.gpu.name, op=self.op.name):
            if trial.revision not in self.op.revisions:
                continue
            try:
                other = self.op.Problem.parse(trial.problem)
            except UnsupportedProblem:
                continue  # stored before a field changed
            if other.static() == self.problem.static():
                found.append((octaves(self.problem, other), trial.problem, trial))
        found.sort(key=lambda row: (*row[:2], -row[2].revision))
        configs = [self.config_of(trial) for _, _, trial in found[: _NEIGHBOURS + 1]]
        return list(dict.fromkeys([*self.serving(), *(c for c in configs if c is not None)]))

    # -- writing

    def row(
        self,
        config: Config,
        status: str,
        *,
        facts: Facts | None = None,
        samples: Samples | None = None,
        ratio: Ratio | None = None,
        estimate_us: float | None = None,
        gain: float | None = None,
        error: float | None = None,
        vendor_us: float | None = None,
        certificate: Certificate | None = None,
        message: str = "",
    ) -> Trial:
        """One attempt as a trial, not yet recorded. ``gain``: a prediction's ratio, by the model."""
        return Trial.new(
            gpu=self._gpu_row,
            environment=self._environment,
            op=self.op.name,
            revision=self.op.revision,
            problem=str(self.problem),
            config=str(config),
            origin=self.origin,
            status=status,
            median_us=samples.median if samples else estimate_us,
            p20_us=samples.p20 if samples else None,
            p80_us=samples.p80 if samples else None,
            samples=len(samples.us) if samples else None,
            ratio=ratio.value if ratio else gain,
            ratio_low=ratio.low if ratio else None,
            ratio_high=ratio.high if ratio else None,
            baseline_us=vendor_us,
            error=error,
            registers=facts.registers if facts else None,
            stack_bytes=facts.stack_bytes if facts else None,
            smem_bytes=facts.smem_bytes if facts else None,
            message=message,
            sources=self.sources,
            certificate=certificate,
        )

    def record(self, trials: Iterable[Trial]) -> None:
        """Store rows, all or none."""
        self._store.record(trials)

    def crown(self, trial: Trial) -> bool:
        """Make ``trial`` the task's winner; False where a measured winner keeps its place over a predicted one."""
        return self._store.crown(trial.id)


def status_of(failure: ChildFailure, *, compiling: bool) -> str | None:
    """The trial status for a failed request, by which process failed and how.

    None where the failure is the machine's, not the config's: a process killed from outside or out of memory, a
    deadline missed for want of CPU time, inputs that could not be made. It leaves no row and is tried again.

    Raises:
        StartFailed: no process could be started.
        CacheUnusable: no kernel can be compiled.
    """
    if isinstance(failure, StartFailed):
        raise failure
    if isinstance(failure, NotPrepared) or (isinstance(failure, ChildDied | ChildTimeout) and failure.outside):
        return None
    if isinstance(failure, RemoteError):
        if failure.type_name == CacheUnusable.__name__:
            raise CacheUnusable(failure.message) from failure
        if failure.type_name in _MACHINES or OUT_OF_MEMORY.search(failure.message):
            return None
        if failure.type_name in _REMOTE_STATUS:
            return _REMOTE_STATUS[failure.type_name]
    if compiling:
        return "compile_error"
    return "timeout" if isinstance(failure, ChildTimeout) else "crashed"


def _versions(environment: Environment) -> tuple[str, ...]:
    e = environment
    return e.driver.partition(".")[0], e.cuda, e.dsl, e.ptxas, e.triton, e.torch
