"""Checks that several ops make of their operands, and the types that kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Op
from cutekernels.ops.shared.strides import Pair, collide, overlaps_itself, pairs

GPU_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in GPU_DTYPES.items()}
WIDEST_BYTES = 16  # one thread's widest access; alignment beyond it gains nothing

_OVERLAP = {
    True: "out= overlaps an operand other than element upon element, so that inputs would be overwritten before they "
    "are read: write to memory of its own, or to the input itself",
    False: "out= overlaps an operand, which would be overwritten before it is read: write to memory of its own",
}


def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def check_dtype(op: Op[Any, Any], t: Tensor) -> None:
    """Refuses a type that no kernel takes."""
    allowed = [*GPU_DTYPES.values(), torch.float64] if t.device.type == "cpu" else list(GPU_DTYPES.values())
    if t.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise UnsupportedProblem(f"{op.name} on {t.device.type} takes {names}; got {t.dtype}")


def check_alike(
    op: Op[Any, Any], first: Tensor, others: Sequence[Tensor], what: Sequence[str] = ("shape", "dtype", "device")
) -> None:
    """Refuses operands that differ from ``first``."""
    for t in others:
        for name in what:
            if getattr(t, name) != getattr(first, name):
                raise UnsupportedProblem(
                    f"{op.name} takes operands of one {name}; got {getattr(first, name)} and {getattr(t, name)}: "
                    "expand or convert one explicitly"
                )


def check_results(results: Sequence[Tensor]) -> None:
    """Refuses results with two elements at one address."""
    if any(map(overlaps_itself, results)):
        raise UnsupportedProblem("out= must not overlap itself: an expanded tensor has one address for many elements")


def pairs_of(op: Any, results: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> tuple[Pair, ...]:
    """The operands to keep apart: results from one another, and from inputs but as ``op.in_place`` allows."""
    operands = (*results, *inputs)
    return pairs(len(results), operands, range(len(results), len(operands)) if op.in_place else ())


def check_overlap(op: Any, results: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> None:
    """Refuses results that share memory with an input or with one another, but as ``op.in_place`` allows."""
    operands = (*results, *inputs)
    addresses = [0 if t is None else t.data_ptr() for t in operands]
    if collide(pairs_of(op, results, inputs), operands, addresses):
        raise UnsupportedProblem(_OVERLAP[op.in_place])


def refuse_gradient(*tensors: Tensor | None) -> None:
    """Refuses a call with ``out=`` that autograd would differentiate."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedProblem("out= is not differentiable: leave it out, or call under torch.no_grad()")
