"""Child processes for functions that may kill theirs: compilers that abort, kernels that fault, hang or exit.

:class:`Child` is one spawned process answering requests in turn; :class:`Pool` is several of them sharing a list
of tasks. Neither knows anything of kernels: the function to run is named by a dotted path,
``"package.module:function"``, and takes one picklable request. This module starts processes, exchanges messages with
them, times them out and reaps them::

    with Child("cutekernels.autotune.worker:answer") as child:
        reply = child.ask(request, deadline_s=30)     # or a ChildFailure; the next ask starts a new process

Four decisions, each with its reason:

* Spawned with ``subprocess`` and a bootstrap of our own: a forked CUDA context is unusable, and ``multiprocessing``'s
  spawn would import the caller's ``__main__`` again, which runs an unguarded script twice.
* Every read and write in the parent is non-blocking with a deadline, so that neither a hung nor a stopped child
  blocks it; a child that misses the deadline is killed with everything it started.
* The child's stdout and stderr go to an unlinked file, whose end is quoted when it dies: a pipe that is not read
  would block the child. The file is emptied after each answer.
* The child leads a session of its own, so Ctrl-C reaches the parent only, which kills the child on its way out. The
  child exits when the request pipe closes, so a killed parent leaves no orphan behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import json
import os
import pickle
import queue
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from cutekernels.errors import CuteKernelsError

START_DEADLINE_S = 180.0  # a cold import of torch and a DSL from a network disk
_TAIL_BYTES = 4000
_POLL_S = 0.2  # how often a silent child is checked for being alive
_REAP_S = 10.0  # longest wait for a killed process; one stuck inside the driver may outlive SIGKILL
_HEADER = struct.Struct(">Q")
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # signals sent from outside
_FAIR_SHARE = 0.8  # CPU time over the deadline, below which a missed deadline is the machine's
OUT_OF_MEMORY = re.compile(r"out of memory|bad_alloc|cannot allocate memory|MemoryError", re.IGNORECASE)
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from cutekernels.isolate import _serve; "
    "_serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"
)


class ChildFailure(CuteKernelsError):
    """A request that got no answer: :class:`ChildDied`, :class:`ChildTimeout`, :class:`RemoteError`, StartFailed."""

    def __reduce__(self) -> tuple[Any, ...]:  # a failure on another machine travels to the one that writes its row
        return _restore, (type(self), str(self), self.__dict__)


def _restore(kind: type[ChildFailure], message: str, state: dict[str, Any]) -> ChildFailure:
    error = kind.__new__(kind, message)
    error.__dict__.update(state)
    return error


class ChildDied(ChildFailure):
    """The process ended while it worked on a request."""

    def __init__(self, target: str, exitcode: int | None, stderr: str) -> None:
        self.target, self.exitcode, self.stderr = target, exitcode, stderr
        super().__init__(f"the process running {target} {self.cause}{_quote(stderr)}")

    @property
    def outside(self) -> bool:
        """Whether the request is not to blame: killed from outside (the kernel's OOM killer), or out of memory."""
        return self.exitcode is None or -self.exitcode in _SENT or bool(OUT_OF_MEMORY.search(self.stderr))

    @property
    def cause(self) -> str:
        """``"died of SIGABRT"`` or ``"exited with code 3"``."""
        if self.exitcode is None:
            return "vanished"
        if self.exitcode >= 0:
            return f"exited with code {self.exitcode}"
        try:
            return f"died of {signal.Signals(-self.exitcode).name}"
        except ValueError:
            return f"died of signal {-self.exitcode}"


class ChildTimeout(ChildFailure):
    """The process was killed: no answer within the deadline. ``cpu_s``: CPU time it spent on the request, if known."""

    def __init__(self, target: str, deadline_s: float, stderr: str, cpu_s: float | None = None) -> None:
        self.target, self.deadline_s, self.stderr, self.cpu_s = target, deadline_s, stderr, cpu_s
        spent = "" if cpu_s is None else f" (with {cpu_s:.1f} s of CPU time)"
        super().__init__(f"{target} gave no answer within {deadline_s:g} s{spent} and was killed{_quote(stderr)}")

    @property
    def outside(self) -> bool:
        """Whether the request is not to blame: on a loaded machine the process got too little CPU time."""
        return self.cpu_s is not None and self.cpu_s < _FAIR_SHARE * self.deadline_s


class RemoteError(ChildFailure):
    """The function raised. The process stays alive."""

    def __init__(self, type_name: str, message: str, traceback_text: str = "") -> None:
        self.type_name, self.message, self.traceback_text = type_name, message, traceback_text
        super().__init__(f"{type_name}: {message}")


class StartFailed(ChildFailure):
    """The process never became ready: it died, hung, or could not import its target. The request never ran."""


def _quote(stderr: str) -> str:
    return f"; its output ends:\n{stderr.strip()}" if stderr.strip() else "; it printed nothing"


class Child:
    """One spawned process that answers requests one at a time through the function ``target`` names.

    Args:
        target: ``"package.module:function"``, importable with this process's ``sys.path``.
        env: changes to the inherited environment; None removes a variable. ``{"CUDA_VISIBLE_DEVICES": ""}``
            hides all GPUs from the process.
        start_deadline_s: for starting the process and importing ``target``; not part of a request's deadline.
    """

    def __init__(
        self, target: str, *, env: Mapping[str, str | None] | None = None, start_deadline_s: float = START_DEADLINE_S
    ) -> None:
        if target.count(":") != 1:
            raise ValueError(f"a target is 'package.module:function'; got {target!r}")
        self.target = target
        self._env = dict(env or {})
        self._start_deadline_s = start_deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._request_fd = self._reply_fd = -1
        self._log: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._cpu_before_s = 0.0

    def ask(self, request: Any, deadline_s: float, *, fresh: bool = True) -> Any:
        """The function's answer to ``request``; the process is started if none is alive.

        Without ``fresh``, one that died since the last request is not replaced: what it had prepared is lost.

        Raises:
            ChildDied: the process ended first, by a signal or an exit.
            ChildTimeout: no answer within ``deadline_s``; the process was killed.
            RemoteError: the function raised.
            StartFailed: no process could be started; the request never ran.
        """
        payload = pickle.dumps(request)
        with self._lock:
            try:
                if not fresh and self._process is not None and (self._process.poll() is not None or self._hung_up()):
                    self._raise_died()
                self._ensure_started()
                self._cpu_before_s = self._cpu_s(f"{self.pid}/stat")  # it has no children between requests
                limit = time.monotonic() + deadline_s
                self._write(payload, limit, deadline_s)
                kind, body = self._read(limit, deadline_s)
                self._empty_log()
            except BaseException:  # Ctrl-C included: a late answer must not be read as the next request's
                self._reap()
                raise
        if kind == "error":
            raise RemoteError(*body)
        return body

    def start(self) -> None:
        """Start the process ahead of the first request. Raises StartFailed."""
        with self._lock:
            try:
                self._ensure_started()
            except BaseException:
                self._reap()
                raise

    def kill(self) -> None:
        """End the process, whatever it is doing. The next :meth:`ask` starts another."""
        self._signal_group()
        with self._lock:
            self._reap()

    def close(self) -> None:
        """End the process for good. Safe to call from another thread and twice."""
        self._closed = True
        self.kill()

    @property
    def pid(self) -> int | None:
        """The process's id while one is alive."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the process

    def _ensure_started(self) -> None:
        if self._closed:
            raise StartFailed(f"the process for {self.target} was closed; it takes no more requests")
        if self._process is not None and (self._process.poll() is not None or self._hung_up()):
            self._reap()  # died between requests (by the out-of-memory killer, say), so no request is lost
        if self._process is not None:
            return
        for last in (False, True):
            try:
                self._start_once()
                return
            except StartFailed as error:
                died = error.__cause__
                if last or not (isinstance(died, ChildDied) and died.outside):
                    raise
                self._reap()  # killed from outside, by the out-of-memory killer, say: once more

    def _start_once(self) -> None:
        descriptors: list[int] = []
        try:
            for _ in range(2):
                descriptors += os.pipe()
            child_in, self._request_fd, self._reply_fd, child_out = descriptors
            os.set_blocking(self._request_fd, False)
            os.set_blocking(self._reply_fd, False)
            self._log = tempfile.TemporaryFile(prefix="cutekernels-child-")  # noqa: SIM115 (lives as long as the process)
        except OSError as error:
            for fd in descriptors:
                os.close(fd)
            self._request_fd = self._reply_fd = -1
            raise StartFailed(
                f"no process for {self.target} could be started: {error}; free descriptors (ulimit -n) and space in "
                f"TMPDIR, {tempfile.gettempdir()}"
            ) from error
        # O_APPEND: after _empty_log truncated the file, the child must write at its new end.
        fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)
        environment = {**os.environ, **{k: v for k, v in self._env.items() if v is not None}}
        for name in (k for k, v in self._env.items() if v is None):
            environment.pop(name, None)
        paths = [os.fspath(path) for path in sys.path]  # people put Path objects into it
        arguments = [json.dumps(paths), str(child_in), str(child_out), self.target]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(child_in, child_out),
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise StartFailed(
                f"no process for {self.target} could be started: {error}; free memory, or take fewer --jobs or --lanes"
            ) from error
        finally:
            os.close(child_in)
            os.close(child_out)
        if self._closed:  # close() ran before there was a process to kill
            raise StartFailed(f"the process for {self.target} was closed while it started")
        try:
            kind, body = self._read(time.monotonic() + self._start_deadline_s, self._start_deadline_s)
        except ChildFailure as error:
            raise StartFailed(
                f"no process for {self.target} could be started: {error}; free memory, or take fewer --jobs or --lanes"
            ) from error
        if kind == "error":
            raise StartFailed(f"{self.target} cannot be imported: {body[0]}: {body[1]}") from RemoteError(*body)

    def _hung_up(self) -> bool:
        poller = select.poll()  # no answer is due, so a readable pipe has been closed
        poller.register(self._reply_fd, select.POLLIN)
        return bool(poller.poll(0))

    def _signal_group(self) -> None:
        process = self._process
        if process is not None:  # even if it is dead: the compilers it started may be alive
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _reap(self) -> None:
        self._signal_group()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
        for fd in (self._request_fd, self._reply_fd):
            if fd >= 0:
                os.close(fd)
        if self._log is not None:
            self._log.close()
        self._process, self._log, self._request_fd, self._reply_fd = None, None, -1, -1

    # -- frames, with a deadline

    def _write(self, payload: bytes, limit: float, deadline_s: float) -> None:
        view = memoryview(_HEADER.pack(len(payload)) + payload)
        while view:
            if self._ready(self._request_fd, select.POLLOUT, limit, deadline_s):
                try:
                    view = view[os.write(self._request_fd, view) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    self._raise_died()

    def _read(self, limit: float, deadline_s: float) -> tuple[str, Any]:
        (size,) = _HEADER.unpack(self._read_exactly(_HEADER.size, limit, deadline_s))
        kind, body = pickle.loads(self._read_exactly(size, limit, deadline_s))
        return kind, body

    def _read_exactly(self, size: int, limit: float, deadline_s: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            if self._ready(self._reply_fd, select.POLLIN, limit, deadline_s):
                try:
                    chunk = os.read(self._reply_fd, min(size - len(data), 1 << 20))
                except BlockingIOError:
                    continue
                if not chunk:
                    self._raise_died()
                data += chunk
        return bytes(data)

    def _ready(self, fd: int, event: int, limit: float, deadline_s: float) -> bool:
        """Wait briefly for ``fd``. Raises when the deadline has passed or the process is gone."""
        poller = select.poll()
        poller.register(fd, event)
        left = limit - time.monotonic()
        if poller.poll(max(0.0, min(left, _POLL_S)) * 1000):
            return True
        if self._process is not None and self._process.poll() is not None and not poller.poll(0):
            self._raise_died()  # a surviving grandchild may hold the pipe open
        if left <= 0:
            raise ChildTimeout(self.target, deadline_s, self._tail(), self._cpu_s("[0-9]*/stat") - self._cpu_before_s)
        return False

    def _cpu_s(self, pattern: str) -> float:
        """CPU time so far of the processes in /proc that match and belong to the session: its compilers count too."""
        ticks = 0
        for stat in Path("/proc").glob(pattern):
            with contextlib.suppress(OSError):
                words = stat.read_text().rpartition(")")[2].split()
                if self._process is not None and int(words[3]) == self._process.pid:
                    ticks += sum(map(int, words[11:15]))  # of its own and of children it has waited for
        return ticks / os.sysconf("SC_CLK_TCK")

    def _raise_died(self) -> NoReturn:
        assert self._process is not None
        exitcode: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            exitcode = self._process.wait(_REAP_S)
        raise ChildDied(self.target, exitcode, self._tail())

    def _tail(self) -> str:
        if self._log is None:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        data = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return data.decode("utf-8", "replace")

    def _empty_log(self) -> None:
        if self._log is not None:
            os.ftruncate(self._log.fileno(), 0)


class Pool:
    """``size`` children working through tasks in parallel; a death or a missed deadline fails that task only."""

    def __init__(
        self,
        target: str,
        size: int,
        *,
        env: Mapping[str, str | None] | None = None,
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool has at least one process; got {size}")
        self.size = size
        self._children = [Child(target, env=env, start_deadline_s=start_deadline_s) for _ in range(size)]
        # Last in, first out: a task prefers a process that is already warm over one not yet started.
        self._idle: queue.LifoQueue[Child] = queue.LifoQueue()
        for child in self._children:
            self._idle.put(child)
        # One thread per child, each of which only waits for its process. They are daemons, which an executor's are not:
        # a program that ends while a thread of its own compiles ahead does not wait for that.
        self._threads: list[threading.Thread] = []
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Any, float] | None] = queue.SimpleQueue()
        self._submitting = threading.Lock()
        self._closed = False

    def submit(self, task: Any, deadline_s: float) -> Future[Any]:
        """Queues one task; the future holds its reply or one of the :class:`ChildFailure` errors."""
        future: Future[Any] = Future()
        with self._submitting:
            if self._closed:
                raise RuntimeError("the pool was closed; it takes no more tasks")
            self._tasks.put((future, task, deadline_s))
            if len(self._threads) < self.size:
                self._threads.append(threading.Thread(target=self._work, name="cutekernels-pool", daemon=True))
                self._threads[-1].start()
        return future

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task, deadline_s = item
            if not future.set_running_or_notify_cancel():
                continue
            child = self._idle.get()
            try:
                answer = child.ask(task, deadline_s)
            except BaseException as error:  # noqa: BLE001  whoever waits for the future gets it
                self._idle.put(child)
                future.set_exception(error)
            else:
                self._idle.put(child)
                future.set_result(answer)

    def close(self) -> None:
        """Kills the children and drops the tasks not yet begun."""
        with self._submitting:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while (item := self._tasks.get_nowait()) is not None:
                    item[0].cancel()
            for _ in self._threads:
                self._tasks.put(None)
        for child in self._children:
            child.close()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# ---- the child's side ------------------------------------------------------------------------------------


def _serve(request_fd: int, reply_fd: int, target: str) -> None:
    """Main loop of the child: import ``target``, report ready, then answer until the parent closes the pipe."""
    faulthandler.enable(all_threads=False)
    for fd in (request_fd, reply_fd):
        os.set_inheritable(fd, False)  # a compiler this process starts must not keep the parent's pipe open
    # A reader thread, so that the parent's death ends this process even during a request.
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(request_fd, requests), daemon=True).start()
    try:
        module, _, name = target.partition(":")
        function: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001  this edge turns any failure into an answer
        _send(reply_fd, ("error", _description(error)))
        return
    _send(reply_fd, ("ready", None))
    while True:
        request = requests.get()
        try:
            answer = pickle.dumps(("reply", function(pickle.loads(request))))
        except Exception as error:  # noqa: BLE001  this edge turns any failure into an answer
            answer = pickle.dumps(("error", _description(error)))
        sys.stdout.flush()
        sys.stderr.flush()
        _send_bytes(reply_fd, answer)


def _description(error: Exception) -> tuple[str, str, str]:
    return type(error).__name__, str(error), "".join(traceback.format_exception(error))[-_TAIL_BYTES:]


def _listen(fd: int, requests: queue.SimpleQueue[bytes]) -> None:
    with os.fdopen(fd, "rb") as stream:
        while True:
            header = stream.read(_HEADER.size)
            if len(header) < _HEADER.size:  # the parent is gone, or has closed the pipe
                if os.getpgrp() == os.getpid():
                    os.killpg(0, signal.SIGKILL)  # and with this process the compilers that it started
                os._exit(0)
            requests.put(stream.read(_HEADER.unpack(header)[0]))


def _send(fd: int, message: tuple[str, Any]) -> None:
    _send_bytes(fd, pickle.dumps(message))


def _send_bytes(fd: int, payload: bytes) -> None:
    view = memoryview(_HEADER.pack(len(payload)) + payload)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        os._exit(0)
