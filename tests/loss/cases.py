"""Shared by the tests of losses: exact losses in fp64, and cases for Triton's interpreter.

This file is also the script of the child process that runs the cases (see ``tests/interpreted.py``).
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutekernels.ops.loss.rows import LOGIT_GRADIENT, LOGIT_STATISTICS, SCALE_GRADIENT, TERMS
from tests.interpreted import DTYPES, interpret, serve
from tests.tolerance import FP32_ULP, worst_ratio

OPS = {op.name: op for op in (LOGIT_STATISTICS, LOGIT_GRADIENT, SCALE_GRADIENT)}


def logits_of(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, softcap: float | None = None, temperature: float = 1.0
) -> Tensor:
    """The logits of a loss, in the type of ``x``."""
    z = x @ weight.t() if bias is None else x @ weight.t() + bias
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def cross_entropy(
    z: Tensor,
    targets: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    num_items_in_batch: float | None = None,
) -> Tensor:
    """The loss by torch's own."""
    weight = None if class_weight is None else class_weight.to(z.dtype)
    losses = F.cross_entropy(
        z, targets.long(), weight=weight, reduction="none", label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    counted = targets != ignore_index
    squares = torch.where(counted, z.logsumexp(-1) ** 2, 0.0) * z_loss
    if reduction == "none":
        return losses + squares
    if reduction == "sum":
        return losses.sum() + squares.sum()
    divisor: Any = num_items_in_batch
    if divisor is None:
        of_class = torch.ones(len(z)) if weight is None else weight[targets.clamp(0, z.shape[-1] - 1).long()]
        divisor = torch.where(counted, of_class.to(z), 0.0).sum()
    number = counted.sum() if num_items_in_batch is None else num_items_in_batch
    return losses.sum() / divisor + squares.sum() / number


def logprob(z: Tensor, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, log-sum-exp and entropy: 0 where a row does not count."""
    counted = targets != ignore_index
    found = z.log_softmax(-1)
    own = found.gather(-1, targets.clamp(0, z.shape[-1] - 1).long()[:, None])[:, 0]
    entropy = -(found.exp() * found).sum(-1)
    return tuple([torch.where(counted, t, 0.0) for t in (own, z.logsumexp(-1), entropy)])  # type: ignore[return-value]


# ---- cases for the interpreter --------------------------------------------------------------------------


def laid(kind: str, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(rows, cols) * 4
    if kind == "padded":
        return torch.zeros(rows, cols + 8 - cols % 8 + 8, dtype=dtype)[:, :cols].copy_(values)
    if kind == "strided":
        return torch.zeros(rows, cols, 2, dtype=dtype)[..., 0].copy_(values)
    return values.to(dtype)


def child_case(case: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(6)
    op, dtype = OPS[case["op"]], DTYPES[case["dtype"]]
    how = {"config": case.get("config"), "edit": case.get("edit")}
    if op is SCALE_GRADIENT:
        return _scaled(case, dtype, how)
    rows, cols, first = case["rows"], case["cols"], case.get("first", 0)
    logits = laid(case["kind"], rows, cols, dtype)
    for row, begin, end, value in case.get("extreme", []):
        logits[row, begin:end] = value
    targets = (torch.arange(rows) * 5 + first) % (cols + 2)  # some in other blocks
    targets[rows // 2] = -100
    targets = targets.to(torch.int32 if case.get("index") == "i32" else torch.int64)
    options = {name: case.get(name, False) for name in ("capped", "moments", "totals")}
    class_weight = torch.rand(cols) if case.get("weighted") else None
    if op is LOGIT_STATISTICS:
        state = torch.rand(rows, TERMS)
        state[0, 0], state[0, 1] = -math.inf, 0.0  # nothing seen yet
        scalars: tuple[Any, ...] = (first, -100, 0.5, 7.0)
        inputs: tuple[Any, ...] = (logits, targets, class_weight, state)
        made = torch.empty_like(state)
    else:
        factors = torch.randn(rows, TERMS)
        factors[:, 0] = torch.logsumexp(logits.float() * 0.5, 1)
        factors[rows // 3, 1:] = 0  # a row without a gradient
        scalars = (first, 0.5, 7.0)
        inputs = (logits, targets, class_weight, factors)
        made = logits if case.get("in_place") else laid(case["kind"], rows, cols, dtype)
    exact = op.evaluate(*[t.double() if t is not None and t.is_floating_point() else t for t in inputs], *scalars,
                        **options)[0]  # fmt: skip
    problem = interpret(op, (made,), inputs, scalars, **options, **how)
    size = exact.abs() + logits.double().abs().sum(1, keepdim=True).nan_to_num(0, 0, 0) * 1e-3 + 1
    finite = exact.isfinite()
    same = torch.equal(made[~finite].double().nan_to_num(7), exact[~finite].nan_to_num(7))
    ratio = worst_ratio(made[finite], exact[finite], (64 * FP32_ULP * size)[finite])
    return {"ratio": ratio if same else math.inf, "outside": True, "problem": problem}


def _scaled(case: dict[str, Any], dtype: torch.dtype, how: dict[str, Any]) -> dict[str, Any]:
    memory = torch.randn(case["elements"] + 16).to(dtype)
    grad = memory[8:-8]
    exact, factor = grad.double() * case["factor"] * 0.5, torch.full((1,), case["factor"])
    made = grad if case.get("in_place") else torch.empty_like(grad)
    before = memory.clone()
    problem = interpret(SCALE_GRADIENT, (made,), (grad, factor), (0.5,), **how)
    outside = torch.equal(memory[:8], before[:8]) and torch.equal(memory[-8:], before[-8:])
    return {"ratio": worst_ratio(made, exact, FP32_ULP * exact.abs()), "outside": outside, "problem": problem}


def numerics_cases() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    base = {"rows": 6, "cols": 600, "dtype": "bf16", "kind": "dense", "config": "block=256 warps=1"}
    ops = ("logit_statistics", "logit_gradient")
    for op, kind, cols in product(ops, ("dense", "padded", "strided"), (600, 37)):
        cases[f"{op} {kind} {cols}"] = base | {"op": op, "kind": kind, "cols": cols}
    flags = ("capped", "moments", "totals", "weighted")
    for op, dtype in product(ops, ("bf16", "fp16", "fp32")):
        cases[f"{op} {dtype} everything"] = base | {"op": op, "dtype": dtype, "first": 300} | dict.fromkeys(flags, True)
    for op, flag in product(ops, flags[:3]):
        cases[f"{op} {flag}"] = base | {"op": op, flag: True, "index": "i32"}
    extreme = [(0, 3, 4, 3e4), (3, 500, 501, 2e4), (1, 0, 600, -math.inf), (2, 5, 6, -math.inf), (4, 9, 10, math.nan)]
    for op in ops:
        cases[f"{op} extreme"] = base | {
            "op": op,
            "dtype": "fp32",
            "moments": True,
            "extreme": extreme[:2] + extreme[3:],
        }
        cases[f"{op} one class"] = base | {"op": op, "cols": 1, "rows": 3}
    cases["all -inf"] = base | {"op": "logit_statistics", "dtype": "fp32", "extreme": extreme[2:3]}
    cases["gradient in place"] = base | {"op": "logit_gradient", "in_place": True}
    scale = {"op": "scale_gradient", "dtype": "bf16", "elements": 5000, "factor": 3.0}
    for i, more in enumerate(({}, {"in_place": True}, {"in_place": True, "factor": 2.0}, {"factor": 2.0},
                              {"elements": 1001, "dtype": "fp32"}, {"elements": 3, "dtype": "fp16"})):  # fmt: skip
        cases[f"scale {i}"] = scale | more | {"config": "block=1024 warps=4 programs=256"}
    return cases


CASES = numerics_cases()
_SMALL = {"rows": 6, "cols": 600, "dtype": "bf16", "kind": "dense", "config": "block=256 warps=1"}
PLANTED = {
    "a column forgotten": _SMALL | {"op": "logit_statistics", "edit": {"cols": -1}, "totals": True},
    "another block's target": _SMALL | {"op": "logit_statistics", "edit": {"first": 1}},
    "an ignored row counted": _SMALL | {"op": "logit_statistics", "edit": {"ignore": 1}},
    "the gradient's target is the next": _SMALL | {"op": "logit_gradient", "edit": {"first": 1}},
    "the gradient's row is another": _SMALL | {"op": "logit_gradient", "edit": {"logits_row": -1}},
    "an element not scaled": {"op": "scale_gradient", "dtype": "bf16", "elements": 5000, "factor": 3.0,
                              "in_place": True, "edit": {"elements": -1}},
}  # fmt: skip


if __name__ == "__main__":
    serve(child_case)
