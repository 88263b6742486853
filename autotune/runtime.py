"""The processes behind a search: a pool of compilers that see no GPU, and one worker that measures on it.

A search uses :class:`Runtime`, a protocol of four methods; :class:`LocalRuntime` implements it with processes. A
compile, the first request of a problem (inputs, reference, a cold CUDA context) and a measurement each have a deadline.
Several runtimes may share a GPU: what is timed has it alone (``turns.py``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, Self

from cutekernels import compilers
from cutekernels.autotune.requests import Load, Measure, Outcome, Prepare, Warm
from cutekernels.autotune.turns import Turns
from cutekernels.backends import Facts
from cutekernels.gpu import GpuSpec
from cutekernels.isolate import Child, ChildFailure, StartFailed
from cutekernels.op import Config, Op, Problem

COMPILE_TARGET = compilers.TARGET
WORKER_TARGET = "cutekernels.autotune.worker:answer"
PREPARE_DEADLINE_S = 180.0
MEASURE_DEADLINE_S = 30.0
SPARES = 2  # of a runtime of its own: a final takes place in two fresh processes


class NotPrepared(ChildFailure):
    """The inputs or the reference of a problem could not be made: no verdict on the configs to be measured."""


class Runtime(Protocol):
    """The compile and measurement services that a search uses.

    **Ownership.** A runtime owns its worker process. Whoever made it closes it, a search never does; its compilers and
    its GPU may be shared with others.

    **Threads.** One thread at a time calls these methods: the lane's, in which its search runs. Runtimes of one GPU are
    called side by side and keep to their turns. Futures of ``compile`` end in other threads.
    """

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


class CompilerPool(compilers.Compilers):
    """Compiling processes, which the runtimes of one host may share: the tuner's."""

    def __init__(self, jobs: int) -> None:
        super().__init__(jobs, COMPILE_TARGET)


class Spares:
    """Workers started ahead for the runtimes of one GPU: a fresh process then waits for no import and no CUDA context.

    Args:
        count: of them at a time.
        env: of each process.
        turns: of the GPU.
        warm: whether they make their CUDA context ahead; not where the driver lets one process alone have one.
    """

    def __init__(self, count: int, env: Mapping[str, str], turns: Turns, *, warm: bool = True) -> None:
        self._count, self._env, self._turns, self._warm = count, dict(env), turns, warm
        self._lock = threading.Lock()
        self._children: deque[Child] = deque()
        self._warmed: set[Child] = set()
        self._starting: list[threading.Thread] = []
        self._closed = False

    def fill(self) -> None:
        """Start those that are missing, in the background."""
        with self._lock:
            self._starting = [thread for thread in self._starting if thread.is_alive()]
            while len(self._children) < self._count and not self._closed:
                child = Child(WORKER_TARGET, env=self._env)
                self._children.append(child)
                self._starting.append(threading.Thread(target=self._start, args=(child,), daemon=True))
                self._starting[-1].start()

    def _start(self, child: Child) -> None:
        with suppress(ChildFailure):  # the request that needs it starts it again, and reports why it cannot
            child.start()
            if self._warm:
                with self._turns.together():
                    child.ask(Warm(), PREPARE_DEADLINE_S)
            with self._lock:
                self._warmed.add(child)

    def take(self) -> Child | None:
        """One that is ready, else the one that was begun first; None where there is none."""
        with self._lock:
            child = next((c for c in self._children if c in self._warmed), next(iter(self._children), None))
            if child is not None:
                self._children.remove(child)
                self._warmed.discard(child)
            return child

    def stop(self) -> None:
        """End them, whatever they do."""
        with self._lock:
            self._closed = True
            children = list(self._children)
        for child in children:
            child.close()

    def join(self) -> None:
        """Wait for those that were starting."""
        for thread in self._starting:
            thread.join()


class LocalRuntime:
    """Processes on this machine. ``jobs`` compilers; the worker starts with the first measurement.

    Args:
        device: the one GPU that the worker sees, as ``CUDA_VISIBLE_DEVICES`` names it; None for all that are visible.
        compilers: those of the host, shared with other runtimes; None for its own.
        turns: of the GPU, shared with other runtimes on it; None where it is alone.
        spares: of the GPU, shared with other runtimes on it; None for its own.

    Raises:
        CacheUnusable: no kernel could be compiled.
    """

    def __init__(
        self,
        jobs: int,
        *,
        device: str | None = None,
        compilers: CompilerPool | None = None,
        turns: Turns | None = None,
        spares: Spares | None = None,
    ) -> None:
        self._turns = Turns() if turns is None else turns
        self._own_compilers, self._own_spares = compilers is None, spares is None
        self._compilers = CompilerPool(jobs) if compilers is None else compilers
        self.width = self._compilers.width
        env = self._compilers.env_of(device)
        self._worker = Child(WORKER_TARGET, env=env)
        self._spares = Spares(SPARES, env, self._turns) if spares is None else spares
        self._prepared: tuple[int | None, object] | None = None

    def compile(self, op: Op[Any, Any], problem: Problem, config: Config, gpu: GpuSpec) -> Future[Facts]:
        return self._compilers.submit((op.name, str(problem), str(config), gpu))

    def prepare(self, request: Prepare) -> None:
        self._worker.start()  # before its turn, which others wait for
        if self._prepared != (self._worker.pid, request):
            with self._turns.together():
                self._worker.ask(request, PREPARE_DEADLINE_S)
            self._prepared = (self._worker.pid, request)
        self._spares.fill()

    def measure(self, request: Measure) -> dict[str, Outcome]:
        try:
            self.prepare(request.prepare)
        except StartFailed:
            raise
        except ChildFailure as error:
            raise NotPrepared(f"{request.prepare.op} [{request.prepare.problem}] was not prepared: {error}") from error
        with self._turns.together():
            self._worker.ask(Load(request), MEASURE_DEADLINE_S, fresh=False)
        with self._turns.alone():
            outcomes: dict[str, Outcome] = self._worker.ask(request, MEASURE_DEADLINE_S, fresh=False)
        return outcomes

    def refresh(self) -> None:
        with self._turns.together():  # the worker's CUDA context goes with it, beside which nothing is timed
            fresh = self._spares.take()
            if fresh is None:
                self._worker.kill()
            else:
                old, self._worker = self._worker, fresh
                old.close()

    def stop(self) -> None:
        """End the worker and its own spares, whatever they do."""
        if self._own_spares:
            self._spares.stop()
        self._worker.close()

    def close(self) -> None:
        """End all processes; compiles not yet begun are dropped, unless others share the compilers."""
        self.stop()
        if self._own_spares:
            self._spares.join()
        if self._own_compilers:
            self._compilers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
