"""Workloads and contenders: the parts a workload is made of, and peers that many workloads share.

A contender is a name and a function that binds it to input sets: one no-argument launch per set, which returns the
tensor or the tuple of tensors that it wrote. A peer that cannot take part raises :class:`Absent` with the reason,
which becomes a row; so does an import that fails.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.suites import Case, Suite
from cutekernels.gpu import GpuSpec
from cutekernels.op import Work

Launch = Callable[[], Tensor | tuple[Tensor, ...]]
Bind = Callable[[Case, "Sequence[Inputs]"], Sequence[Launch]]
Shapes = Callable[[Case, "Sequence[Inputs]"], Mapping[str, Sequence[Launch]]]
"""A launch per set in each shape of a kernel, by the words for that shape."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Absent(ImportError):
    """A peer cannot take part: it has no such operation, or, as any ImportError says, it is not installed."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of one call: operands, results of ours, and the operands that are changed in place.

    Before a contender's results are judged, ``results`` are poisoned and ``updated`` get their first values back.
    """

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    updated: tuple[Tensor, ...] = ()
    read_bytes: int | None = None
    """Bytes read from the operands, where a call does not read all of them: some rows of a table."""
    args: tuple[Any, ...] = ()
    """The op's own arguments, absent tensors and numbers among them, where they are not the operands."""

    @property
    def out(self) -> Tensor:
        """The only result."""
        (out,) = self.results
        return out

    @property
    def bytes(self) -> int:
        """Bytes that a call reads and writes."""
        read = _bytes(self.operands) if self.read_bytes is None else self.read_bytes
        return read + _bytes(self.results)


def _bytes(tensors: Sequence[Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(frozen=True, slots=True)
class Contender:
    """A name in the tables, and the function that binds it to input sets."""

    name: str
    bind: Bind
    judged: bool = True
    """Whether its results are compared with the truth; otherwise it is only timed."""
    config: str = ""
    """The config that the row of one of ours records; ``origin`` is its origin."""
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """How one op is benchmarked."""

    op: str
    suites: Mapping[str, Suite]
    """Suites by name, the first is the default. A case's problem is the op's canonical text; labels are unique."""
    inputs: Callable[[Case, Any, str, int], Inputs]
    """``(case, its problem, device, seed)``: operands that pose the case, standard normal where they are numbers."""
    truth: Callable[[Case, Inputs], tuple[Tensor, ...]]
    """The results, in the order of a launch's: in fp64, or whole numbers as they are. Asked before anything runs."""
    ours: Callable[[Case, Sequence[Inputs], Any], Sequence[Launch]]
    """A launch of the public function for each input set; the last argument is its ``config``, None for any."""
    peers: tuple[Contender, ...]
    """The first one is the baseline that speed-ups and errors refer to."""
    confined: tuple[Contender, ...] = ()
    """Peers of a stand-in (``GpuSpec.stand_in``), without warpgroup MMA and TMA. The first one is the baseline."""
    streams: Callable[[Case], tuple[int, int]] | None = None
    """Number of arrays of like size that a call reads and writes, which the streaming contenders move too. None where
    memory is not the limit."""
    poses: str | None = None
    """The registered op whose problems the cases pose, where ``op`` is not registered itself: a chain of several."""
    configured: bool = True
    """Whether ``ours`` takes a config of the op that is posed; else it calls several, each by the dispatcher."""
    work: Callable[[Case], Work] | None = None
    """Least flops and bytes of a case; by default those of the op's problem."""
    example: Callable[[Path], Contender] | None = None
    """A peer loaded from an example file of another project."""
    launches: Callable[[Any, GpuSpec], Any] | None = None
    """The problem that a call of a case's problem launches, where the GPU decides that."""
    cute: Shapes | None = None
    """The body in CuTe of an op that has none, for a suite ``headtohead``."""


# ---- peers of any workload ------------------------------------------------------------------------------


def each(name: str, make: Callable[[Case], Callable[..., Launch]]) -> Contender:
    """``make(case)`` binds the operands of one input set."""

    def bind(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
        bound = make(case)
        return [bound(*i.operands) for i in sets]

    return Contender(name, bind)


def absent(name: str, reason: str) -> Contender:
    """A contender that cannot take part, and the reason."""

    def bind(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
        raise Absent(reason)

    return Contender(name, bind)


def eager(function: Callable[[Case], Callable[..., Any]], name: str = "eager") -> Contender:
    """Plain torch: ``function(case)`` is called with the operands."""
    return each(name, lambda case: partial(partial, function(case)))


def compiled(function: Callable[[Case], Callable[..., Any]]) -> Contender:
    """The same under torch.compile, with the case's shapes as constants."""

    def make(case: Case) -> Callable[..., Launch]:
        torch.compiler.reset()  # or the shapes of earlier cases count against the limit of recompilations
        return partial(partial, torch.compile(function(case), dynamic=False))

    return each("torch.compile", make)


def example(file: Path) -> Any:
    """An example of another project, imported from its file."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise Absent(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launched(kernel: Any, sets: Sequence[Inputs], tensors: Sequence[Sequence[Any]], *numbers: Any) -> Sequence[Launch]:
    """Launches of an example's CuTe kernel on its own ``tensors`` of each input set, compiled for the first."""
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]
    import cutlass.cute as cute

    def stream() -> Any:
        return cuda.CUstream(torch.cuda.current_stream().cuda_stream)

    compiled = cute.compile(kernel, *tensors[0], *numbers, stream())

    def launch(i: Inputs, own: Sequence[Any]) -> Tensor:
        compiled(*own, *numbers, stream())
        return i.out

    return [partial(launch, i, own) for i, own in zip(sets, tensors, strict=True)]
