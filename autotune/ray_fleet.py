"""The GPUs of a Ray cluster as a :class:`~cutekernels.autotune.fleet.Fleet`: an actor with one GPU for each seat.

Only measuring and compiling happen there; the search runs in the driver, the only process that writes, so that nodes
need neither the database nor a way to it. A node that dies takes its attempts in flight with it: their tasks go to
other GPUs of that kind, its seats come back when it does, and nodes that join are found.

A seat is bound to its node, and the actor says which GPU it got: Ray's accelerator types tell an A100 of 40 GB from
one of 80 GB no more than the GeForce cards from each other. They only say that two seats have the same kind.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

from cutekernels import environment
from cutekernels.autotune.fleet import Seat, SeatUnfit, Slot, SlotLost
from cutekernels.autotune.requests import Measure, Outcome, Prepare
from cutekernels.backends import Facts
from cutekernels.compilers import Compile
from cutekernels.db.storage.store import Environment
from cutekernels.errors import CacheUnusable, CuteKernelsError, JobError
from cutekernels.gpu import GpuSpec
from cutekernels.isolate import ChildFailure, StartFailed
from cutekernels.op import Config, Op, Problem

SERVICE = "cutekernels.autotune.ray_fleet:local"
"""The factory that an actor calls with the numbers of compilers and of lanes; it returns a :class:`Service`."""
_PORT = 6379  # of a head, unless it says otherwise
_TOGETHER = 256  # requests that an actor takes at once; its compilers queue them


class Lane(Protocol):
    """The process that measures for one of the tasks in work on a GPU."""

    def prepare(self, request: Prepare) -> None: ...
    def measure(self, request: Measure) -> dict[str, Outcome]: ...
    def refresh(self) -> None: ...


class Service(Protocol):
    """One GPU's processes, on its own machine."""

    gpu: GpuSpec
    environment: Environment
    width: int

    @property
    def lanes(self) -> Sequence[Lane]: ...

    def compile(self, request: Compile) -> Future[Facts]: ...
    def close(self) -> None: ...


def local(jobs: int, lanes: int | None) -> Service:
    """The processes for the one GPU that Ray lets this actor see."""
    return _Local(jobs, lanes)


class _Local:
    def __init__(self, jobs: int, lanes: int | None) -> None:
        from cutekernels.autotune.fleet import LocalFleet

        self._fleet = LocalFleet(None, jobs, lanes)
        (seat,) = self._fleet.seats()
        slot = self._fleet.open(seat)
        self.gpu, self.environment, self.lanes, self.width = slot.gpu, slot.environment, slot.lanes, jobs
        self.compile, self.close = self._fleet.compilers.submit, self._fleet.close


class _Actor:
    """Runs on the GPU's node. Failures of requests are values: Ray would wrap a raised one in a type of its own."""

    def __init__(self, service: str, jobs: int, lanes: int | None) -> None:
        module, _, name = service.partition(":")
        self._unfit = ""
        try:
            self._service: Service = getattr(import_module(module), name)(jobs, lanes)
        except CuteKernelsError as error:
            self._unfit = str(error)

    def hello(self) -> tuple[GpuSpec, Environment, int, int] | str:
        """The GPU, its machine's versions, how many compilers and lanes it has; or why it is of no use."""
        if self._unfit:
            return self._unfit
        s = self._service
        return s.gpu, s.environment, s.width, len(s.lanes)

    def compile(self, request: Compile) -> tuple[bool, Any]:
        return _answer(lambda: self._service.compile(request).result())

    def ask(self, lane: int, method: str, *request: Any) -> tuple[bool, Any]:
        return _answer(lambda: getattr(self._service.lanes[lane], method)(*request))

    def close(self) -> None:
        self._service.close()


def _answer(request: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, request()
    except ChildFailure as error:
        return False, error


class RayFleet:
    """The GPUs of the cluster at ``address`` (``"auto"``: the one this machine belongs to).

    Args:
        jobs: compiling processes for each GPU; default its share of the node's CPUs.
        lanes: tasks in work on each GPU at a time; default up to eight, by its memory and ``jobs``.

    Raises:
        JobError: Ray is not installed, or there is no cluster at ``address``.
    """

    patience_s = 120.0

    def __init__(self, address: str, jobs: int | None = None, lanes: int | None = None) -> None:
        try:
            self._ray: Any = import_module("ray")
        except ImportError as error:
            raise JobError("--ray needs Ray, of the cluster's version: pip install 'cutekernels[fleet]'") from error
        if not address.strip() or address.startswith(":"):
            raise JobError(f"--ray takes auto, or a head's address such as 10.0.0.1:{_PORT}; it is {address[:80]!r}")
        if not self._ray.is_initialized():
            if ":" not in address and address not in ("auto", "local"):
                address = f"{address}:{_PORT}"
            try:
                _reach(address)
                with _own_sigterm():
                    self._ray.init(
                        address=address, log_to_driver=False, logging_level="warning", include_dashboard=False
                    )
            except (OSError, ValueError, RuntimeError) as error:
                raise JobError(f"no Ray cluster at {address[:80]!r}: {_why(error)}") from error
        self._lost: type[Exception] = self._ray.exceptions.RayError
        self._own = Environment.of(environment.collect())
        self._jobs, self._lanes = jobs, lanes
        self._shares: dict[Seat, tuple[str, int]] = {}  # node, compilers
        self._actors: dict[Seat, Any] = {}
        self._closed = False
        self._lock = threading.Lock()

    def seats(self) -> Sequence[Seat]:
        found = []
        for node in self._ray.nodes():
            resources = node["Resources"]
            count = int(resources.get("GPU", 0)) if node["Alive"] else 0
            kinds = [name for name in resources if name.startswith("accelerator_type:")]
            for index in range(count):
                seat = Seat(
                    f"{node['NodeManagerAddress']} {node['NodeID'][:8]} gpu {index}", min(kinds, default=node["NodeID"])
                )
                share = max(1, int(resources.get("CPU", 1)) // count)
                self._shares[seat] = node["NodeID"], self._jobs or share
                found.append(seat)
        return found

    def open(self, seat: Seat) -> Slot:
        node, jobs = self._shares[seat]
        strategies = import_module("ray.util.scheduling_strategies")
        bound = strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        options = {"num_gpus": 1, "num_cpus": 1, "max_concurrency": _TOGETHER, "scheduling_strategy": bound}
        try:
            with self._lock:
                if self._closed:
                    raise SlotLost(f"{seat.name}: the run is over")
                made = self._ray.remote(_Actor).options(**options)
                actor = self._actors[seat] = made.remote(SERVICE, jobs, self._lanes)
            told = self._ray.get(actor.hello.remote())
        except self._lost as error:
            raise SlotLost(_reason(error)) from error
        if isinstance(told, str):
            self._end(seat)
            raise SeatUnfit(told)
        spec, versions, width, lanes = told
        theirs, mine = (versions.version, versions.commit), (self._own.version, self._own.commit)
        if theirs != mine:  # its kernels may be others
            self._end(seat)
            raise SeatUnfit(
                f"the node has cutekernels {' '.join(theirs)}, the driver {' '.join(mine)}: install one version"
            )
        found = [_RayRuntime(self._ray, actor, width, lane) for lane in range(lanes)]
        return Slot(spec, versions, found, lambda: self._end(seat))

    def _end(self, seat: Seat) -> None:
        with self._lock:
            actor = self._actors.pop(seat, None)
        if actor is not None:
            self._ray.kill(actor)  # its children end with it: their request pipe closes

    def close(self) -> None:
        with self._lock:
            self._closed = True
            seats = list(self._actors)
        for seat in seats:
            self._end(seat)
        # Ray leaves the cluster at exit: a shutdown here aborts the process while a thread waits for an answer.


class _RayRuntime:
    """A lane, whose processes are an actor's. A dead one raises SlotLost."""

    def __init__(self, ray: Any, actor: Any, width: int, lane: int) -> None:
        self._ray, self._actor, self.width, self._lane = ray, actor, width, lane

    def compile(self, op: Op[Any, Any], problem: Problem, config: Config, gpu: GpuSpec) -> Future[Facts]:
        future: Future[Facts] = Future()

        def arrived(answer: Future[tuple[bool, Any]]) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                fine, value = answer.result()
            except Exception as error:  # noqa: BLE001  of Ray, in its own thread
                fine, value = False, SlotLost(_reason(error))
            if fine:
                future.set_result(value)
            else:
                future.set_exception(value)

        request = (op.name, str(problem), str(config), gpu)
        self._actor.compile.remote(request).future().add_done_callback(arrived)
        return future

    def prepare(self, request: Prepare) -> None:
        self._ask("prepare", request)

    def measure(self, request: Measure) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = self._ask("measure", request)
        return outcomes

    def refresh(self) -> None:
        self._ask("refresh")

    def _ask(self, method: str, *request: object) -> Any:
        try:
            fine, value = self._ray.get(self._actor.ask.remote(self._lane, method, *request))
        except self._ray.exceptions.RayError as error:
            raise SlotLost(_reason(error)) from error
        if fine:
            return value
        # A node that can start no process, or write no cache, is no reason to end the whole run.
        if isinstance(value, StartFailed) or getattr(value, "type_name", "") == CacheUnusable.__name__:
            raise SlotLost(str(value))
        raise value


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's handler of SIGTERM: Ray sets one that ends the process at once, with another exit code."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _reach(address: str) -> None:
    """Fail at once where nothing listens: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _why(error: Exception) -> str:
    """Ray's words when it cannot join, and what to do: where a cluster asks for a token, only its log names it."""
    told = str(error).partition("\n")[0]
    if not isinstance(error, ConnectionError) or "Failed to connect to Ray" not in told:
        return f"{told}; `ray start --head` begins one"
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return (
            f"{told}; it takes neither this token nor, perhaps, this version of Ray: set RAY_AUTH_TOKEN as on its head"
        )
    return (
        f"{told}; something answers there: where it asks for a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
        "RAY_AUTH_TOKEN_PATH, as on its head"
    )


def _reason(error: Exception) -> str:
    """Ray's message in one line: without escapes, and of a traceback the last line, which says what was raised."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error)).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = lines[-1] if "Traceback" in text else " ".join(lines)
    return f"{type(error).__name__}: {told[:300]}"
