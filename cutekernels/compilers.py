"""Compiling processes, none of which sees a GPU: those of a tuning run, and those of ``cutekernels.warmup``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from cutekernels import compile as compiler
from cutekernels import dispatch, errors, settings
from cutekernels.backends import Facts, cute
from cutekernels.errors import CacheUnusable, CompileError, CompilerKilled
from cutekernels.gpu import GpuSpec
from cutekernels.isolate import ChildDied, ChildTimeout, Pool, RemoteError, StartFailed
from cutekernels.lengths import Chosen, Line, Posed, lines
from cutekernels.op import Op
from cutekernels.ops import registry

TARGET = "cutekernels.compilers:answer"
COMPILE_DEADLINE_S = 120.0
MOST = 16
"""Processes that are started unless told: the ranks of a node may all warm up at once."""
_PROCESS_BYTES = 1 << 30  # of a process that compiles: torch, the DSL, LLVM
_CGROUP = Path("/sys/fs/cgroup")

Compile = tuple[str, str, str, GpuSpec]
"""Request: op, problem, config, and the GPU, described whole: its table may lack it."""
Choose = tuple[Line, GpuSpec]
"""Request: the configs of all problems on a line."""
Wanted = dict[str, Compile]
"""Kernels by their names in the disk cache."""

_log = settings.logger("compile")


class Compilers:
    """Compiling processes, which the runtimes of one host may share. ``jobs`` of them, none of which sees a GPU.

    Temporary files of all processes lie in one folder, removed at the end: those killed in their work leave some.

    Raises:
        CacheUnusable: no kernel could be compiled.
    """

    def __init__(self, jobs: int, target: str = TARGET) -> None:
        compiler.tidy()
        self._open = ExitStack()
        self.temporary = str(self._open.enter_context(compiler.scratch()))
        self.width = jobs
        # No visible GPU: otherwise each compiler would make a CUDA context of hundreds of megabytes.
        self._pool = Pool(target, jobs, env=cute.WITHOUT_GPU | {"TMPDIR": self.temporary})

    def env_of(self, device: str | None) -> dict[str, str]:
        """The environment of a process that works beside them, on one GPU or on all that are visible."""
        return {"TMPDIR": self.temporary} | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})

    def submit(self, request: Compile | Choose) -> Future[Any]:
        return self._pool.submit(request, COMPILE_DEADLINE_S)

    def close(self) -> None:
        """End the processes; compiles not yet begun are dropped."""
        self._pool.close()
        self._open.close()
        with suppress(CacheUnusable):
            compiler.tidy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def answer(request: Compile | Choose) -> Any:
    """Inside a compiler process: either kind of request."""
    if isinstance(request[0], Line):
        return choose(request)
    name, _, config, _ = request
    op = registry.get(name)
    if op.compiler(op.Config.parse(config)) == "dsl":
        cute.import_without_torch()
    return compile_candidate(request)


def choose(request: Choose) -> tuple[list[Chosen], Wanted]:
    """The configs of all problems on a line, and of those that they launch beside; the kernels that they need."""
    line, gpu = request
    op = registry.get(line.op)
    own = Chosen(line, [], [])
    wanted: Wanted = {}
    beside: dict[int, list[Posed]] = {}
    for tokens in range(line.low, line.high + 1):
        p = line.at(tokens)
        choice = dispatch.resolve(op, p, gpu)
        found = str(choice.config), choice.origin
        if not own.configs or own.configs[-1] != found:
            own.begins.append(tokens)
            own.configs.append(found)
        wanted |= kernels(op, p, choice.config, gpu)
        beside[tokens] = list(op.chained(p, choice.config, gpu))
    chosen = [own]
    for more in lines(beside.__getitem__, line.low, line.high):
        chosen += choose((more, gpu))[0]
    return chosen, wanted


def kernels(op: Op[Any, Any], p: Any, config: Any, gpu: GpuSpec) -> Wanted:
    """The kernel of a config and those that it launches beside, where a compiling process finds their ops too."""
    found: Wanted = {}
    links = [(op, p, config)]
    for own, q, c in links:  # grows by what these launch
        links += [(o, r, dispatch.resolve(o, r, gpu).config) for o, r in own.chained(q, c, gpu)]
        if known(own):
            found[compiler.cache_key(own, q, c, gpu)] = own.name, str(q), str(c), gpu
    return found


def compile_candidate(request: Compile) -> Facts:
    """Inside a compiler process: put the kernel's object into the disk cache, unless it is there.

    The request holds the whole GpuSpec: this process sees no GPU, and a GPU may be missing from the table.
    """
    name, problem, config, gpu = request
    op = registry.get(name)
    return compiler.prepare(op, op.Problem.parse(problem), op.Config.parse(config), gpu)


def known(op: Op[Any, Any]) -> bool:
    """Whether a compiling process finds the op too: one of the package, not one that its caller made."""
    return type(op).__module__.startswith("cutekernels.")


def side_by_side(
    requests: Sequence[Compile],
    jobs: int | None = None,
    processes: Compilers | None = None,
    advance: Callable[[], object] = lambda: None,
    here: bool = False,
) -> list[CompileError | None]:
    """Compiles all ``requests`` in ``jobs`` processes; for each, None or the reason it is not in the disk cache.

    A compiler that crashes or takes longer than :data:`COMPILE_DEADLINE_S` fails its request only. A single request is
    compiled in this process: another one would take longer to start. Where no process can be started nothing is
    compiled, with a warning and no error: the caller's own process will, when it needs the kernel.

    Args:
        requests: one or more; the longest begin first.
        jobs: processes to start.
        processes: those of the caller, in their place.
        advance: is called whenever one is done.
        here: whether this process, which is about to need them all, compiles the longest itself: it has begun before
            another one has started.

    Raises:
        CacheUnusable: no kernel could be compiled.
    """
    order = sorted(range(len(requests)), key=lambda i: -registry.get(requests[i][0]).compile_s)
    own = order[: int(here or (len(requests) == 1 and processes is None))]
    rest = order[len(own) :]
    failures: dict[int, CompileError | StartFailed | None] = {}
    with ExitStack() as opened:
        futures: dict[int, Future[Any]] = {}
        if rest:
            pool = processes or opened.enter_context(Compilers(min(jobs or affordable(), len(rest)), TARGET))
            futures = {i: pool.submit(requests[i]) for i in rest}
        for i in own:
            failures[i] = _compile_here(requests[i])
            advance()
        for _ in as_completed(futures.values()):
            advance()
        failures |= {i: _failure(requests[i], future) for i, future in futures.items()}
    unstarted = [each for each in failures.values() if isinstance(each, StartFailed)]
    if unstarted:
        _log.warning("%d kernels are compiled in the calling process: %s", len(unstarted), unstarted[0])
    found = [failures[i] for i in range(len(requests))]
    return [None if isinstance(each, StartFailed) else each for each in found]


def _compile_here(request: Compile) -> CompileError | None:
    try:
        compile_candidate(request)
    except CompileError as error:
        return error
    return None


def _failure(request: Compile, future: Future[Any]) -> CompileError | StartFailed | None:
    """The reason for which a request is not in the disk cache, once its future is done; None where it is."""
    what = f"{request[0]} [{request[1]}] with [{request[2]}]"
    try:
        future.result()
    except StartFailed as error:
        return error
    except RemoteError as error:
        kind = getattr(errors, error.type_name, None)
        if isinstance(kind, type) and issubclass(kind, CompileError):
            return kind(f"{what}: {error.message}")
        return CompileError(f"{what}: {error}")
    except (ChildDied, ChildTimeout) as error:
        if error.outside:
            return CompilerKilled(f"{what} was not compiled: {error}; free memory, or take fewer jobs")
        return CompileError(f"{what} was not compiled: {error}; name another config, or leave it out")
    return None


def together(failures: Sequence[CompileError]) -> CompileError:
    """One error for all ``failures``: of their kind, where they are of one kind."""
    distinct = list({str(failure): failure for failure in failures}.values())
    if len(distinct) == 1:
        return distinct[0]
    kinds = {type(failure) for failure in distinct}
    kind = kinds.pop() if len(kinds) == 1 else CompileError
    return kind(f"{len(distinct)} kernels were not compiled, all others are ready: " + "; ".join(map(str, distinct)))


def affordable() -> int:
    """Processes that this machine, or the container's share of it, has CPUs and memory for; at most :data:`MOST`."""
    cpus, free = float(len(os.sched_getaffinity(0))), _available_bytes()
    with suppress(OSError, ValueError):  # no cgroup v2, or "max"
        quota, period = map(int, (_CGROUP / "cpu.max").read_text().split())
        cpus = min(cpus, quota / period)
    with suppress(OSError, ValueError):
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return max(1, min(MOST, round(cpus), free // _PROCESS_BYTES))


def _available_bytes() -> int:
    words = Path("/proc/meminfo").read_text().split()
    return int(words[words.index("MemAvailable:") + 1]) << 10
