"""A guest with every kind of bad candidate, and the measuring process on the CPU.

``answer`` stands in for the worker: the real one, which takes a launch's own word for how long it was.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cutekernels import gpu as gpus
from cutekernels.backends import Facts
from cutekernels.guests import Guest
from cutekernels.op import Config, Problem, Work, extent, knob

NAME = "tests.guests.toy:sums"
COMPILER, GPU, WRONG, REFUSED, BEST = 3, 5, 6, 7, 8  # what breaks: the compiler, the GPU, the result, the config


@dataclass(frozen=True)
class SumsProblem(Problem):
    m: int = extent()
    k: int = extent()


@dataclass(frozen=True)
class SumsConfig(Config):
    parts: int = knob(1, 2, COMPILER, 4, GPU, WRONG, REFUSED, BEST)


class Sums(Guest[SumsProblem, SumsConfig]):
    """``out[i] = sum_j x[i, j]``, whose time falls with ``parts``."""

    revision = 1
    suite = ("m=4 k=8",)
    Problem = SumsProblem
    Config = SumsConfig
    begun = False

    def why_not(self, p: SumsProblem, c: SumsConfig, gpu: gpus.GpuSpec) -> str | None:
        return None

    def default(self, p: SumsProblem, gpu: gpus.GpuSpec) -> SumsConfig:
        return SumsConfig(1)

    def compile(self, p: SumsProblem, c: SumsConfig, gpu: gpus.GpuSpec) -> Facts:
        if c.parts == COMPILER:
            os.abort()  # as LLVM does
        return Facts(32, 0, 1024)

    def begin(self) -> None:
        self.begun = True

    def call(self, p: SumsProblem, c: SumsConfig, *tensors: Any) -> float:
        assert self.begun, "before any call"
        out, x = tensors
        if c.parts == GPU:
            os._exit(70)  # as the worker does where the CUDA context is lost
        if c.parts == REFUSED:
            from triton.runtime.errors import OutOfResources

            raise OutOfResources(300_000, 232_448, "shared memory")
        out.copy_(x[:, 1:].sum(-1) if c.parts == WRONG else x.sum(-1))
        return 100.0 / c.parts

    def outputs(self, p: SumsProblem, *args: Any) -> Any:
        return (args[0].new_empty(p.m),)

    def sample(self, p: SumsProblem, device: str, seed: int) -> Any:
        import torch

        return (torch.randn((p.m, p.k), generator=torch.Generator().manual_seed(seed)),)

    def reference(self, p: SumsProblem, *args: Any) -> Any:
        return (args[0].double().sum(-1).float(),)

    def work(self, p: SumsProblem) -> Work:
        return Work(1.0 * p.m * p.k, 4.0 * p.m * p.k)


def sums() -> Sums:
    return Sums()


ONE = Sums()


def same() -> Sums:
    return ONE


def unfinished() -> object:
    class Unfinished(Guest[SumsProblem, SumsConfig]):
        why_not, default, call, outputs = Sums.why_not, Sums.default, Sums.call, Sums.outputs  # type: ignore[assignment]
        sample, reference, work = Sums.sample, Sums.reference, Sums.work  # type: ignore[assignment]

    return Unfinished()


class Faulty(Sums):
    """Whose default breaks a rule where m is 5, and whose model raises where it is 6."""

    def why_not(self, p: SumsProblem, c: SumsConfig, gpu: gpus.GpuSpec) -> str | None:
        return "m must not be 5" if p.m == 5 else None

    def estimate_us(self, p: SumsProblem, c: SumsConfig, gpu: gpus.GpuSpec) -> float:
        return 1.0 / (p.m - 6)


def faulty() -> Faulty:
    return Faulty()


def not_a_guest() -> str:
    return "a text"


class Round:
    """Runs launches in turn, as a graph would, and reports the time that they state."""

    def __init__(self, launches: Sequence[Callable[[], Any]], least_us: float = 200.0) -> None:
        self._list, self.launches = launches, len(launches)

    def __call__(self) -> float:
        return float(sum(launch() for launch in self._list) / len(self._list))


def answer(request: Any) -> Any:
    """The real worker on the CPU."""
    import torch

    sys.modules["cutlass.cute"] = None  # type: ignore[assignment]  # takes seconds, which nothing here needs
    from cutekernels.autotune import worker
    from cutekernels.autotune.requests import Warm

    if isinstance(request, Warm):
        return None
    worker.GraphRound = Round  # type: ignore[misc,assignment]
    gpus.detect = lambda device=None: gpus.lookup("h200")  # type: ignore[assignment]
    torch.cuda.mem_get_info = lambda *device: (1 << 30, 1 << 30)
    torch.cuda.synchronize = lambda *device: None  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: None
    return worker.answer(request)


class Interpreted(Round):
    """Runs launches of Triton's interpreter, which take a while, at first and where their output is poisoned."""

    def __init__(self, launches: Sequence[Callable[[], Any]], least_us: float = 200.0) -> None:
        super().__init__(launches, least_us)
        self._us = self._run()

    def _run(self) -> float:
        begin = time.perf_counter()
        self._list[0]()
        return (time.perf_counter() - begin) * 1e6

    def __call__(self) -> float:
        output = self._list[0].args[0]  # type: ignore[attr-defined]
        if bool(output.isnan().any()):
            self._run()
        return self._us


def answer_interpreted(request: Any) -> Any:
    """:func:`answer` for a guest with Triton kernels, which run in the interpreter; the compilers are the real ones."""
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from cutekernels import guests

    if getattr(request, "op", "") and request.op not in guests._loaded:
        guest = guests.load(request.op)
        sample = guest.sample
        guest.sample = lambda p, device, seed: sample(p, "cpu", seed)  # type: ignore[method-assign]
    global Round
    Round = Interpreted  # type: ignore[misc]
    return answer(request)


def unlike(**attributes: object) -> object:
    """The description with other attributes."""
    return type("Unlike", (Sums,), attributes)()


def numbered() -> object:
    return unlike(revision="1")


def problemless() -> object:
    return unlike(Problem=None)


def configless() -> object:
    return unlike(Config=int)


def workless() -> object:
    return unlike(work=lambda self, p: None, suite=())


def ending() -> object:
    raise SystemExit(0)
