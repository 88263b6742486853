"""GPUs that share a job: each task goes to a GPU of its kind, and one process, the coordinator, writes all rows.

A :class:`Fleet` names its seats, the places where a GPU is, and opens them as :class:`Slot`. A slot has several lanes,
so that one task is timed while others compile, start processes or verify: :func:`hand_out` serves each lane with a
thread of the coordinator, which takes a task, searches, takes the next. A search runs here and reaches its GPU through
the lane's :class:`~cutekernels.autotune.runtime.Runtime`, wherever that is; so a lost machine costs the attempts in
flight, and their tasks go on elsewhere from the rows that are stored already.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from cutekernels import environment
from cutekernels import gpu as gpus
from cutekernels.autotune import runtime as runtimes
from cutekernels.autotune.job import Task
from cutekernels.autotune.report import TaskReport
from cutekernels.autotune.runtime import SPARES, LocalRuntime, Runtime, Spares
from cutekernels.autotune.shards import longest_first
from cutekernels.autotune.turns import Turns, shared_file
from cutekernels.db.storage.store import Environment
from cutekernels.errors import CuteKernelsError, JobError, UnknownGpu
from cutekernels.gpu import GpuSpec
from cutekernels.isolate import ChildFailure

MOST_LOSSES = 3  # losses of one task, or of one seat without a finished task in between
LANES = 8  # tasks in work on one GPU at a time
_LANE_BYTES, _LANE_CPUS = 10 << 30, 2  # GPU memory for a lane; CPUs to compile for it and start its processes
FIRST_S = 5.0  # longest wait for a first GPU where the fleet has none that is of use
SWITCH_S = 0.0005  # threads that compute (a space, a regression) let those that pass the GPU on wait no longer
POLL_S = 0.5  # between looks for seats that came or went
_SETTLE_S = 10.0  # longest wait for threads whose GPU was closed


class SlotLost(CuteKernelsError):
    """A GPU or its machine is gone. No verdict on the task, which another GPU of its kind takes up."""


class SeatUnfit(SlotLost):
    """A seat that is of no use in this run, and is not opened again."""


@dataclass(frozen=True)
class Seat:
    """A place for a slot. Seats of one ``label`` have the same kind of GPU."""

    name: str
    label: str


@dataclass(frozen=True)
class Slot:
    """One GPU with the processes that serve it: as many tasks are in work on it as it has ``lanes``."""

    gpu: GpuSpec
    environment: Environment
    lanes: Sequence[Runtime]
    close: Callable[[], None]


DoTask = Callable[[Slot, Runtime, GpuSpec, int], TaskReport]
"""One task, by its position, in a lane of a slot for a kind of GPU."""


class Fleet(Protocol):
    """The GPUs of one host, or of a cluster.

    **Ownership.** :func:`hand_out` takes a fleet over: it closes each slot that it opened, and at its end the fleet. A
    slot owns its lanes, and what was closed is not used again; its seat may be opened anew.

    **Threads.** The main thread asks for ``seats``. A thread for each seat calls ``open``, several at a time. Threads
    of a slot may close it while others wait for its lanes, and more than once; so may the main thread close the fleet
    while one is in ``open``, which then raises :class:`SlotLost`.
    """

    patience_s: float
    """Seconds to wait for a GPU while there is none any more; for the first one :data:`FIRST_S` at most."""

    def seats(self) -> Sequence[Seat]:
        """Where a GPU is now; a machine may join or leave."""
        ...

    def open(self, seat: Seat) -> Slot:
        """The GPU at ``seat``, waiting until it is free. Raises :class:`SlotLost`."""
        ...

    def close(self) -> None:
        """End all processes; requests in flight fail."""
        ...


class LocalFleet:
    """GPUs of this host; all share the compilers.

    Args:
        devices: their CUDA indices; None for the one that this process would use.
        jobs: compiling processes; default one per CPU, less one for the coordinator.
        lanes: tasks in work on each GPU at a time; default up to eight, by the GPU's memory and its share of ``jobs``.
    """

    patience_s = 0.0

    def __init__(self, devices: Sequence[int] | None, jobs: int | None = None, lanes: int | None = None) -> None:
        if devices is None:
            self._devices: dict[Seat, int | None] = {Seat("gpu", "gpu"): None}
        else:
            self._names = require_visible(devices)
            self._devices = {Seat(f"gpu {device}", f"gpu {device}"): device for device in devices}
        self._jobs = jobs if jobs is not None else max(1, len(os.sched_getaffinity(0)) - 1)
        self._lanes = lanes
        self._environment = Environment.of(environment.collect())
        self.compilers = runtimes.CompilerPool(self._jobs)
        self._open: list[tuple[list[LocalRuntime], Spares]] = []
        self._closed = False
        self._lock = threading.Lock()

    def seats(self) -> Sequence[Seat]:
        return list(self._devices)

    def open(self, seat: Seat) -> Slot:
        device = self._devices[seat]
        spec = gpus.detect(device)
        name = None if device is None else self._names[device]
        known = gpus.identity(device)
        turns = Turns(None if known is None else shared_file(known))
        cpus, alone = (self._jobs + 1) // len(self._devices), gpus.one_process(device)
        count = 1 if alone else self._lanes or lanes_of(spec, cpus)
        with self._lock:
            if self._closed:
                raise SlotLost(f"{seat.name}: the run is over")
            spares = Spares(max(SPARES, count), self.compilers.env_of(name), turns, warm=not alone)
            shared: Any = {"device": name, "compilers": self.compilers, "turns": turns, "spares": spares}
            made = [LocalRuntime(self._jobs, **shared) for _ in range(count)]
            self._open.append((made, spares))
        return Slot(spec, self._environment, made, lambda: _close(made, spares))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for lanes, spares in self._open:
                _close(lanes, spares)
        self.compilers.close()


def _close(lanes: Sequence[LocalRuntime], spares: Spares) -> None:
    spares.stop()
    for lane in lanes:  # before one is waited for: a spare may wait for the turn of a lane's worker
        lane.close()
    spares.join()


class OneSlot:
    """A fleet of one GPU, whose ``runtime`` is the caller's, who closes it too."""

    patience_s = 0.0

    def __init__(self, gpu: GpuSpec, runtime: Runtime) -> None:
        self._slot = Slot(gpu, Environment.of(environment.collect()), [runtime], lambda: None)

    def seats(self) -> Sequence[Seat]:
        return [Seat("gpu", "gpu")]

    def open(self, seat: Seat) -> Slot:
        return self._slot

    def close(self) -> None:
        pass


def lanes_of(gpu: GpuSpec, cpus: int) -> int:
    """Lanes for a GPU: :data:`LANES`, or what its memory and its share of the CPUs are enough for."""
    return max(1, min(LANES, gpu.memory_bytes // _LANE_BYTES, cpus // _LANE_CPUS))


def require_visible(devices: Sequence[int]) -> list[str]:
    """Names of this host's GPUs, after a check that ``devices`` are among them.

    Raises:
        JobError: one of them is named twice.
        UnknownGpu: one of them is not here.
    """
    names = visible()
    if len(set(devices)) != len(devices):
        raise JobError(f"each GPU is named once; the devices are {', '.join(map(str, devices))}")
    if not names:
        raise UnknownGpu("no CUDA device is visible; name a GPU with --gpu to predict for it")
    for device in devices:
        if not 0 <= device < len(names):
            raise UnknownGpu(f"there is no GPU {device} here; CUDA indices go from 0 to {len(names) - 1}")
    return names


def visible() -> list[str]:
    """The GPUs of this host as ``CUDA_VISIBLE_DEVICES`` names them, in the order of their CUDA index."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = [str(i) for i in range(count)] if named is None else [word.strip() for word in named.split(",")]
    return names[:count]


class Board:
    """Tasks to do, in work and done, for each kind of GPU. Shared by the threads of a run.

    Args:
        wanted: the only kind to tune for; None for every kind that the fleet has.
        ranked: begin tasks in their order; otherwise the longest first.
        free: whether a task may begin now; one that another run has is asked for again.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        wanted: GpuSpec | None,
        *,
        ranked: bool = False,
        free: Callable[[GpuSpec, int], bool] = lambda kind, position: True,
    ) -> None:
        self._free = free
        self._tasks = tasks
        self._wanted = wanted
        self._order = list(range(len(tasks))) if ranked else longest_first(tasks)
        self._changed = threading.Condition()
        self._kinds: dict[str, GpuSpec] = {}
        self._waiting: dict[str, deque[int]] = {}
        self._running: Counter[str] = Counter()
        self._lanes: Counter[str] = Counter()
        self._losses: Counter[tuple[str, int]] = Counter()
        self._reports: dict[tuple[str, int], TaskReport] = {}
        self._error: BaseException | None = None
        if wanted is not None:
            self._admit(wanted)

    def _admit(self, kind: GpuSpec) -> None:
        if kind.name not in self._kinds:
            self._kinds[kind.name] = kind
            self._waiting[kind.name] = deque(self._order)

    def join(self, own: GpuSpec, lanes: int) -> GpuSpec | None:
        """The kind for which a slot with the GPU ``own`` works; None where it is of no use."""
        with self._changed:
            if self._wanted is not None and not gpus.stands_for(self._wanted, own):
                return None
            kind = self._wanted or own
            self._admit(kind)
            self._lanes[kind.name] += lanes
            return kind

    def leave(self, kind: GpuSpec, lanes: int) -> None:
        with self._changed:
            self._lanes[kind.name] -= lanes

    def take(self, kind: GpuSpec) -> int | None:
        """The next task's position; waits while the last ones are in work elsewhere. None where all are done."""
        with self._changed:
            while self._error is None:
                waiting = self._waiting[kind.name]
                position = next((one for one in waiting if self._free(kind, one)), None)
                if position is not None:
                    waiting.remove(position)
                    self._running[kind.name] += 1
                    return position
                if not waiting and not self._running[kind.name]:
                    return None
                self._changed.wait(POLL_S)
            return None

    def put_back(self, kind: GpuSpec, position: int) -> None:
        """Let another lane take a task that was taken."""
        with self._changed:
            self._waiting[kind.name].appendleft(position)
            self._running[kind.name] -= 1
            self._changed.notify_all()

    def share(self, kind: GpuSpec, left_s: float) -> float:
        """A task's even share of the seconds that are left: it and those waiting, over the lanes of its kind."""
        with self._changed:
            turns = math.ceil((len(self._waiting[kind.name]) + 1) / max(1, self._lanes[kind.name]))
            return max(0.0, left_s) / turns

    def done(self, kind: GpuSpec, position: int, report: TaskReport) -> None:
        with self._changed:
            self._reports[kind.name, position] = report
            self._running[kind.name] -= 1
            self._changed.notify_all()

    def lost(self, kind: GpuSpec, position: int, error: SlotLost) -> TaskReport | None:
        """Put a task back that lost its slot; the report of one that has lost too many."""
        with self._changed:
            self._losses[kind.name, position] += 1
            if self._losses[kind.name, position] < MOST_LOSSES:
                self.put_back(kind, position)
                return None
        task = self._tasks[position]
        default = str(task.op.default(task.problem, kind))
        message = f"its GPU was lost {MOST_LOSSES} times, the last time: {error}"
        report = TaskReport(task.op.name, str(task.problem), "failed", None, default, message=message, gpu=kind.name)
        self.done(kind, position, report)
        return report

    def fail(self, error: BaseException) -> None:
        """End the run with ``error``, which :meth:`wait` raises."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait a moment for a change. Raises the error of a run that failed."""
        with self._changed:
            if self._error is None and not self.complete:
                self._changed.wait(POLL_S)
            if self._error is not None:
                raise self._error

    @property
    def complete(self) -> bool:
        """Whether all tasks of the kinds known so far are done."""
        with self._changed:
            return bool(self._kinds) and len(self._reports) == len(self._kinds) * len(self._tasks)

    @property
    def kinds_known(self) -> bool:
        """Whether no further kind of GPU is to be tuned for."""
        return self._wanted is not None

    @property
    def kinds(self) -> list[str]:
        return list(self._kinds)

    @property
    def total(self) -> int:
        """Tasks over all kinds known so far."""
        return max(1, len(self._kinds)) * len(self._tasks)

    @property
    def finished(self) -> int:
        return len(self._reports)

    def reports(self) -> list[TaskReport]:
        """Every task: by kind in the order of their arrival, then in the job's order."""
        kinds = list(self._kinds)
        return [self._reports[key] for key in sorted(self._reports, key=lambda k: (kinds.index(k[0]), k[1]))]


def hand_out(
    board: Board,
    fleet: Fleet,
    work: DoTask,
    *,
    given_up: Callable[[TaskReport], None] = lambda report: None,
    late: Callable[[], bool] = lambda: False,
) -> None:
    """Work through the board's tasks on all GPUs of the fleet; ``work`` does one task in a lane's thread.

    ``late``: whether the time has passed, after which no first GPU of a fleet that waits for some is waited for.

    Raises:
        CuteKernelsError: no GPU is left that could do a task, or what ``work`` raised.
    """
    service = _Service(board, fleet, work, given_up, late)
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        service.run()
    except BaseException as error:
        board.fail(error)  # threads take no further task
        raise
    finally:
        fleet.close()
        service.settle()
        sys.setswitchinterval(before)


class _Service:
    """The threads of :func:`hand_out`: one for each seat, which starts one for each lane."""

    def __init__(
        self,
        board: Board,
        fleet: Fleet,
        work: DoTask,
        given_up: Callable[[TaskReport], None],
        late: Callable[[], bool],
    ) -> None:
        self._board, self._fleet, self._work, self._given_up, self._late = board, fleet, work, given_up, late
        self._served = False  # whether a GPU has been of use
        self._threads: dict[Seat, threading.Thread] = {}
        self._failures: Counter[Seat] = Counter()
        self._useless: set[Seat] = set()
        self._labels: set[str] = set()  # labels with a known kind of GPU
        self._last = ""

    def run(self) -> None:
        alone_since: float | None = None
        while True:
            if self._threads:
                self._board.wait()
            seats = [s for s in self._fleet.seats() if s not in self._useless and self._failures[s] < MOST_LOSSES]
            if self._fleet.patience_s and not self._served and self._late():
                raise CuteKernelsError(
                    f"the time ended before a GPU was ready{self._last}; give it a larger --budget-s"
                )
            known = self._board.kinds_known or (bool(self._labels) and all(s.label in self._labels for s in seats))
            if known and self._board.complete:  # in this order: a kind is on the board before its label is known
                return
            for seat in seats:
                thread = self._threads.get(seat)
                if thread is None or not thread.is_alive():
                    self._threads[seat] = threading.Thread(
                        target=self._serve, args=(seat,), name=seat.name, daemon=True
                    )
                    self._threads[seat].start()
            if seats or any(t.is_alive() for t in self._threads.values()):
                alone_since = None
                continue
            alone_since = time.monotonic() if alone_since is None else alone_since
            patience_s = self._fleet.patience_s if self._served else min(self._fleet.patience_s, FIRST_S)
            if time.monotonic() - alone_since < patience_s:
                time.sleep(POLL_S)
            else:
                what = self._board.kinds[0] if self._board.kinds else "GPU"
                raise CuteKernelsError(
                    f"there is no {what} to tune on{self._last}; start one, or predict for it on a machine without it"
                )

    def settle(self) -> None:
        limit = time.monotonic() + _SETTLE_S
        for thread in self._threads.values():
            thread.join(max(0.0, limit - time.monotonic()))

    def _serve(self, seat: Seat) -> None:
        try:
            slot = self._fleet.open(seat)
        except SlotLost as error:
            if isinstance(error, SeatUnfit):
                self._useless.add(seat)
            self._lose(seat, error)
            return
        except BaseException as error:  # noqa: BLE001  the main thread raises it
            self._board.fail(error)
            return
        kind = self._board.join(slot.gpu, len(slot.lanes))
        self._labels.add(seat.label)
        if kind is None:
            self._useless.add(seat)
            self._last = f": {seat.name} is a {slot.gpu.name}"
            slot.close()
            return
        self._served = True
        lost: list[SlotLost] = []
        lanes = [
            threading.Thread(target=self._work_in, args=(seat, slot, lane, kind, lost), name=seat.name, daemon=True)
            for lane in slot.lanes
        ]
        try:
            for thread in lanes:
                thread.start()
            for thread in lanes:
                thread.join()
        finally:
            self._board.leave(kind, len(slot.lanes))
            _end(slot)
        if lost:
            self._lose(seat, lost[0])
        else:
            self._useless.add(seat)

    def _work_in(self, seat: Seat, slot: Slot, lane: Runtime, kind: GpuSpec, lost: list[SlotLost]) -> None:
        try:
            while not lost and (position := self._board.take(kind)) is not None:
                if lost:  # by another lane, while this one waited for a task
                    self._board.put_back(kind, position)
                    return
                try:
                    self._board.done(kind, position, self._work(slot, lane, kind, position))
                    self._failures[seat] = 0
                except SlotLost as error:
                    lost.append(error)
                    _end(slot)  # so that the other lanes notice
                    report = self._board.lost(kind, position, error)
                    if report is not None:
                        self._given_up(report)
        except BaseException as error:  # noqa: BLE001  the main thread raises it
            self._board.fail(error)

    def _lose(self, seat: Seat, error: SlotLost) -> None:
        self._failures[seat] += 1
        self._last = f"; {seat.name}: {error}"


def _end(slot: Slot) -> None:
    with suppress(ChildFailure, CancelledError):
        slot.close()
