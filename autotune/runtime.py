"""The processes behind a search: a pool of compilers that see no GPU, and one worker that measures on it.

A search uses :class:`Runtime`, a protocol of four methods; :class:`LocalRuntime` implements it with processes. A
compile, the first request of a problem (inputs, reference, a cold CUDA context) and a measurement each have a deadline.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self

from cutekernels import compile as compiler
from cutekernels.backends import Facts
from cutekernels.errors import CacheUnusable
from cutekernels.gpu import GpuSpec
from cutekernels.isolate import Child, ChildFailure, Pool, StartFailed
from cutekernels.op import Config, Op, Problem

COMPILE_TARGET = "cutekernels.autotune.runtime:compile_candidate"
WORKER_TARGET = "cutekernels.autotune.worker:answer"
COMPILE_DEADLINE_S = 120.0
PREPARE_DEADLINE_S = 180.0
MEASURE_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Prepare:
    """Request: make the inputs and the reference of a problem."""

    op: str
    problem: str
    gpu: GpuSpec
    seed: int = 0


@dataclass(frozen=True)
class Measure:
    """Request: verify ``configs``, time the correct ones interleaved. ``race``: leader, contenders (``measure.py``)."""

    prepare: Prepare
    configs: tuple[str, ...]
    race: tuple[str, ...] = ()
    rounds: int = 20
    budget_us: float | None = None
    rest_s: float = 0.0  # before each sample (``measure.py``)


@dataclass(frozen=True)
class Outcome:
    """The result for one config. ``error`` over 1 means a wrong result, whose times are missing or do not count."""

    error: float
    us: tuple[float, ...] = ()

    @property
    def right(self) -> bool:
        return self.error <= 1 and bool(self.us)


class NotPrepared(ChildFailure):
    """The inputs or the reference of a problem could not be made: no verdict on the configs to be measured."""


class Runtime(Protocol):
    """The compile and measurement services that a search uses."""

    width: int
    """Compiles that run in parallel."""

    def compile(self, op: Op[Any, Any], problem: Problem, config: Config, gpu: GpuSpec) -> Future[Facts]:
        """Starts a compile; the future holds its facts or a :class:`~cutekernels.isolate.ChildFailure`."""
        ...

    def prepare(self, request: Prepare) -> None:
        """Prepare the worker for a problem ahead of time; otherwise :meth:`measure` does it."""
        ...

    def measure(self, request: Measure) -> dict[str, Outcome]:
        """Outcomes by config. Raises :class:`~cutekernels.isolate.ChildFailure`; later requests get a new process."""
        ...

    def refresh(self) -> None:
        """Kill the worker, so that the next measurement runs in a fresh process."""
        ...


class LocalRuntime:
    """Processes on this machine. ``jobs`` compilers; the worker starts with the first measurement.

    Temporary files of all of them lie in one folder, removed at the end: compilers killed in their work leave some.

    Raises:
        CacheUnusable: no kernel could be compiled.
    """

    def __init__(self, jobs: int) -> None:
        compiler.tidy()
        self._open = ExitStack()
        temporary = str(self._open.enter_context(compiler.scratch()))
        self.width = jobs
        # No visible GPU: otherwise each compiler would make a CUDA context of hundreds of megabytes.
        self._pool = Pool(COMPILE_TARGET, jobs, env={"CUDA_VISIBLE_DEVICES": "", "TMPDIR": temporary})
        self._worker = Child(WORKER_TARGET, env={"TMPDIR": temporary})
        self._prepared: tuple[int | None, object] | None = None

    def compile(self, op: Op[Any, Any], problem: Problem, config: Config, gpu: GpuSpec) -> Future[Facts]:
        return self._pool.submit((op.name, str(problem), str(config), gpu), COMPILE_DEADLINE_S)

    def prepare(self, request: Prepare) -> None:
        if self._worker.pid is None or self._prepared != (self._worker.pid, request):
            self._worker.ask(request, PREPARE_DEADLINE_S)
            self._prepared = (self._worker.pid, request)

    def measure(self, request: Measure) -> dict[str, Outcome]:
        try:
            self.prepare(request.prepare)
        except StartFailed:
            raise
        except ChildFailure as error:
            raise NotPrepared(f"{request.prepare.op} [{request.prepare.problem}] was not prepared: {error}") from error
        outcomes: dict[str, Outcome] = self._worker.ask(request, MEASURE_DEADLINE_S)
        return outcomes

    def refresh(self) -> None:
        self._worker.kill()

    def close(self) -> None:
        """End all processes; compiles not yet begun are dropped."""
        self._pool.close()
        self._worker.close()
        self._open.close()
        with suppress(CacheUnusable):
            compiler.tidy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def compile_candidate(request: tuple[str, str, str, GpuSpec]) -> Facts:
    """Inside a compiler process: put the kernel's object into the disk cache, unless it is there.

    The request holds the whole GpuSpec: this process sees no GPU, and a GPU may be missing from the table.
    """
    from cutekernels.ops import registry

    name, problem, config, gpu = request
    op = registry.get(name)
    return compiler.prepare(op, op.Problem.parse(problem), op.Config.parse(config), gpu)
