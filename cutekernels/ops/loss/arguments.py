"""Checks that the losses over a vocabulary share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.shared.checks import check_number, check_tensor
from cutekernels.ops.shared.dtypes import DTYPES

_GPU_TYPES = tuple(DTYPES.values())
_INDICES = (torch.int64, torch.int32)
GREATEST = 3e38  # of a factor, which kernels take in fp32


def flatten(
    op: str, x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """``x`` as rows, the targets as a vector, and the shape of targets."""
    for name, t, optional in (
        ("x", x, False), ("weight", weight, False), ("targets", targets, False), ("bias", bias, True)
    ):  # fmt: skip
        check_tensor(op, name, t, optional=optional)
    check_type(op, x)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise UnsupportedProblem(
            f"{op} takes x (..., K) and weight (V, K); got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if targets.shape != x.shape[:-1]:
        raise UnsupportedProblem(
            f"{op} takes a target for each row of x, {tuple(x.shape[:-1])}; got {tuple(targets.shape)}: shift and "
            "flatten both alike"
        )
    rows = math.prod(x.shape[:-1])
    return x.reshape(rows, x.shape[-1]), targets.reshape(rows), tuple(targets.shape)


def check_type(op: str, x: Tensor) -> None:
    lowered = x.device.type == "cuda" and torch.is_autocast_enabled("cuda")
    wide = (torch.float32, torch.float64) if x.device.type != "cuda" or lowered else ()
    if x.dtype not in (*_GPU_TYPES, *wide):
        raise UnsupportedProblem(
            f"{op} takes x in fp16 or bf16 (on the CPU fp32 and fp64 too); got {x.dtype}: cast it, or use autocast"
        )


def shape(op: str, temperature: object, softcap: object) -> tuple[float, float]:
    """``1 / temperature``, and the cap or 0."""
    check_number(op, "temperature", temperature, 1e-30, GREATEST)
    if softcap is not None:
        check_number(op, "softcap", softcap, 1e-30, GREATEST)
    return 1.0 / float(temperature), 0.0 if softcap is None else float(softcap)  # type: ignore[arg-type]


def check(
    op: str,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    *,
    ignore_index: int,
    first: int | None,
) -> None:
    """Raises UnsupportedProblem for operands that pose no problem. ``first``: of a shard; None for a whole vocabulary,
    whose targets are looked at where that is free: on the CPU.
    """
    check_type(op, x)
    if weight.dtype != x.dtype:
        raise UnsupportedProblem(f"{op} takes weight in x's type {x.dtype}; got {weight.dtype}: cast it")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise UnsupportedProblem(f"{op} takes x (N, K) and weight (V, K); got {tuple(x.shape)}, {tuple(weight.shape)}")
    if not len(weight):
        raise UnsupportedProblem(f"{op} takes a vocabulary of one class at least; weight has none")
    if targets.dtype not in _INDICES or targets.shape != x.shape[:1]:
        raise UnsupportedProblem(
            f"{op} takes targets as int64 or int32, one for each row; got {targets.dtype} {tuple(targets.shape)}"
        )
    for name, t in (("bias", bias), ("class_weight", class_weight)):
        if t is not None and t.shape != weight.shape[:1]:
            raise UnsupportedProblem(f"{op} takes {name} as ({len(weight)},); got {tuple(t.shape)}")
    if bias is not None and bias.dtype not in (x.dtype, torch.float32):
        raise UnsupportedProblem(f"{op} takes bias in x's type {x.dtype} or fp32; got {bias.dtype}: cast it")
    for name, t in (("weight", weight), ("targets", targets), ("bias", bias), ("class_weight", class_weight)):
        if t is not None and t.device != x.device:
            raise UnsupportedProblem(f"{op} takes operands of one device; {name} is on {t.device}, x on {x.device}")
    if first is None and targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= len(weight)))
        if type(wrong) is Tensor and bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise UnsupportedProblem(
                f"{op} takes targets from 0 to {len(weight) - 1}, or ignore_index={ignore_index}; target {at} is "
                f"{int(targets[at])}"
            )


def rows_contiguous(weight: Tensor) -> Tensor:
    return weight if weight.stride(1) == 1 or weight.shape[1] == 1 else weight.contiguous()


def class_weights(class_weight: Tensor | None, targets: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """The weight of each row's target in ``dtype``; NaN for targets outside the classes, those of ignored rows too."""
    inside = (targets >= 0) & (targets < classes)
    if class_weight is None:
        return torch.where(inside, 1.0, torch.nan).to(dtype)
    return torch.where(inside, class_weight[targets.clamp(0, classes - 1).long()].to(dtype), torch.nan)
