"""From a call's tensors to a launch, for ops whose operands share one shape, dtype and device.

Checks, outputs, copies, aliasing and the device guard. What shapes, strides and types imply, the plan included,
is remembered: the warm path is one dict lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cutekernels import dispatch
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import C, Op, P
from cutekernels.ops.strides import matrix, overlaps_itself, relation, span_bytes

GPU_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDEST_BYTES = 16  # one thread's widest access; what alignment beyond is worth nothing


class ElementwiseOp(Op[P, C]):
    """An op over tensors of one shape. ``results`` and ``inputs`` name its launch's operands in order."""

    results: ClassVar[tuple[str, ...]]
    inputs: ClassVar[tuple[str, ...]]

    def problem(self, *operands: Tensor) -> P:
        """Reads the problem off the operands of a launch. Raises UnsupportedProblem."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Call:
    """What follows from the shapes, strides, types and alignment of a call's operands."""

    launch: Callable[..., None] | None  # None where there is nothing to compute
    device: int
    spans: tuple[int, ...]  # bytes from an operand's first to its last; results, then inputs


_CALLS: dict[tuple[object, ...], _Call] = {}
_MAX_CALLS = 4096
dispatch.on_reload(_CALLS.clear)


def run(
    op: ElementwiseOp[P, C], results: tuple[Tensor, ...] | None, inputs: tuple[Tensor, ...], config: C | str | None
) -> tuple[Tensor, ...]:
    """Checks, allocates and launches on the GPU that holds ``inputs``. Raises UnsupportedProblem."""
    operands = inputs if results is None else (*results, *inputs)
    facts: list[object] = [op.name, config]
    begins: list[int] = []
    bits = 0
    for t in operands:
        facts += (t.shape, t.stride(), t.dtype, t.get_device())
        begin = t.data_ptr()
        begins.append(begin)
        bits |= begin
    facts.append(bits & (WIDEST_BYTES - 1))
    key = tuple(facts)
    call = _CALLS.get(key)
    if call is None:
        if len(_CALLS) >= _MAX_CALLS:
            _CALLS.clear()
        call = _CALLS[key] = _admit(op, results, inputs, config)
    if results is None:
        first = inputs[0]
        results = tuple([torch.empty(first.shape, dtype=first.dtype, device=first.device) for _ in op.results])
    else:
        _check_overlap(begins, call.spans, results, inputs)
    if call.launch is not None:
        if torch._C._cuda_getDevice() == call.device:
            call.launch(*results, *inputs)
        else:
            with torch.cuda.device(call.device):
                call.launch(*results, *inputs)
    return results


def _admit(
    op: ElementwiseOp[P, C], results: tuple[Tensor, ...] | None, inputs: tuple[Tensor, ...], config: C | str | None
) -> _Call:
    """Refuses what no kernel takes, reads the problem off the rest, and plans it."""
    first, device = inputs[0], inputs[0].get_device()
    check_operands(op, inputs, results or ())
    spans = tuple(map(span_bytes, (*(results or ()), *inputs)))
    if first.numel() == 0:
        return _Call(None, device, spans)
    fresh = torch.empty(first.shape, dtype=first.dtype, device="meta")  # how an aligned contiguous tensor looks
    operands = (*(results or [fresh] * len(op.results)), *inputs)
    copied = [matrix(t.shape, t.stride()) is None for t in operands]
    problem = op.problem(*[fresh if copy else t for t, copy in zip(operands, copied, strict=True)])
    with torch.cuda.device(device):
        launch = dispatch.plan(op, problem, device, config).launch
    return _Call(_through_copies(launch, copied, len(op.results)) if any(copied) else launch, device, spans)


def _through_copies(launch: Callable[..., None], copied: list[bool], results: int) -> Callable[..., None]:
    """``launch`` with contiguous copies in the place of operands that are no matrix."""

    def copying(*operands: Tensor) -> None:
        places = [
            t
            if not copy
            else torch.empty_like(t, memory_format=torch.contiguous_format)
            if i < results
            else t.contiguous()
            for i, (t, copy) in enumerate(zip(operands, copied, strict=True))
        ]
        launch(*places)
        for t, place in zip(operands[:results], places, strict=False):
            if place is not t:
                t.copy_(place)

    return copying


def check_operands(op: ElementwiseOp[P, C], inputs: Sequence[Tensor], results: Sequence[Tensor] = ()) -> None:
    """Refuses types no kernel takes, operands that differ, and results with two elements at one address."""
    first = inputs[0]
    allowed = [*GPU_DTYPES.values(), torch.float64] if first.device.type == "cpu" else list(GPU_DTYPES.values())
    if first.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise UnsupportedProblem(f"{op.name} on {first.device.type} takes {names}; got {first.dtype}")
    for t in (*inputs[1:], *results):
        for what in ("shape", "dtype", "device"):
            if getattr(t, what) != getattr(first, what):
                raise UnsupportedProblem(
                    f"{op.name} takes operands of one {what}; got {getattr(first, what)} and {getattr(t, what)}: "
                    "expand or convert one explicitly"
                )
    if any(map(overlaps_itself, results)):
        raise UnsupportedProblem("out= must not overlap itself: an expanded tensor has one address for many elements")


def check_overlap(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Refuses results that share memory with an input other than element upon element."""
    operands = (*results, *inputs)
    _check_overlap([t.data_ptr() for t in operands], [span_bytes(t) for t in operands], results, inputs)


def _check_overlap(
    begins: Sequence[int], spans: Sequence[int], results: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    n = len(results)
    for i in range(n):
        begin = begins[i]
        end = begin + spans[i]
        for j in range(n, n + len(inputs)):
            other = begins[j]
            if begin < other + spans[j] and other < end and relation(results[i], inputs[j - n]) == "overlap":
                raise UnsupportedProblem(
                    "out= overlaps an input other than element upon element, so that inputs would be overwritten "
                    "before they are read: write to memory of its own, or to the input itself"
                )
