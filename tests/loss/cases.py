"""Shared by the tests of losses: exact losses in fp64, and cases for Triton's interpreter.

This file is also the script of the child process that runs the cases (see ``tests/interpreted.py``).
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import cutekernels as ck
from cutekernels.ops.loss import products
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
    squares = torch.where(counted, z.logsumexp(-1) ** 2, 0.0) * z_loss if z_loss else torch.zeros_like(losses)
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


# ---- logits near the ends of fp32 ----

HUGE = 3e38
INF = math.inf
PLACES = 300  # classes: two blocks of tests that make pieces small
LOGITS: dict[str, Any] = {  # by class
    "equal at 1e30": lambda c: torch.full_like(c, 1e30),
    "equal at -1e30": lambda c: torch.full_like(c, -1e30),
    "equal at 3e38": lambda c: torch.full_like(c, HUGE),
    "equal at -3e38": lambda c: torch.full_like(c, -HUGE),
    "three at 1e30": lambda c: torch.where((c == 2) | (c == 7) | (c == 290), 1e30, c * 0.01),
    "1e30 in the second block": lambda c: torch.where(c >= 280, 1e30, 3.0),
    "1e30 before 3": lambda c: torch.where(c < 20, 1e30, 3.0),
    "from -1e30 to 1e30": lambda c: torch.where(c % 2 == 0, 1e30, -1e30),
    "from -3e38 to 3e38": lambda c: torch.where(c >= 150, HUGE, -HUGE),
    "some at -inf": lambda c: torch.where(c % 3 == 0, -INF, torch.where(c == 1, 1e30, 1e30)),
    "-inf but for small ones": lambda c: torch.where(c < 270, -INF, c * 0.01),
    "all at -inf": lambda c: torch.full_like(c, -INF),
}
LOSSES: dict[str, dict[str, Any]] = {
    "mean": {"reduction": "mean"},
    "none": {"reduction": "none"},
    "smoothed": {"reduction": "sum", "label_smoothing": 0.2},
    "smoothed and weighted": {"reduction": "none", "label_smoothing": 0.2, "weighted": True},
    "z-loss": {"reduction": "mean", "z_loss": 1e-35},
    "z-loss of each": {"reduction": "none", "z_loss": 1e-35},
    "capped": {"reduction": "mean", "softcap": 30.0, "temperature": 0.7},
    "log-probability": {},
    "log-probability, capped": {"softcap": 30.0, "temperature": 0.7},
}


def extreme_loss(logits: str, loss: str, dtype: torch.dtype = torch.float32) -> float:
    """Worst error of a loss of such logits and of its gradients by weight and bias, over their tolerance; infinite
    where what is not finite differs.
    """
    given = dict(LOSSES[loss])
    shaped = {name: given.pop(name) for name in ("softcap", "temperature") if name in given}
    targets = torch.tensor([2, 290, 7, 1, -100])
    z = LOGITS[logits](torch.arange(PLACES, dtype=torch.float32))
    # Each row's logits are a column of weight; what is not finite comes by the bias.
    bias = torch.where(z.isfinite(), 0.0, z).requires_grad_()
    x, weight = torch.eye(5, dtype=dtype), torch.where(z.isfinite(), z, 0.0).expand(5, -1).t().to(dtype)
    weight = weight.clone().requires_grad_()
    inputs = weight, bias
    exact = logits_of(x.double(), weight.double(), bias.double(), **shaped)
    top = torch.where(exact.isfinite(), exact, -INF).amax(1, keepdim=True).detach()
    lse = (exact - top).logsumexp(1)  # less the largest logit, which has no room for it
    class_weight = torch.linspace(0.5, 1.5, PLACES) if given.pop("weighted", False) else None
    if given:
        found: Any = [ck.linear_cross_entropy(x, weight, targets, bias, class_weight=class_weight, **given, **shaped)]
        z_loss = given.pop("z_loss", 0.0)
        squares = z_loss * torch.where(targets != -100, top[:, 0] + lse, 0.0).square()
        of_torch = cross_entropy(exact, targets, class_weight=class_weight, **given)
        # What overflows for torch in fp32 may here.
        known = cross_entropy(exact.detach().float(), targets, class_weight=class_weight, **given).isfinite()
        counted = {"mean": squares.sum() / 4, "none": squares, "sum": squares.sum()}[given["reduction"]]
        expected = [of_torch + counted if z_loss else of_torch]
    else:
        known = torch.tensor(True)
        found = list(ck.linear_logprob(x, weight, targets, bias=bias, entropy=True, **shaped))
        logp = exact - top - lse[:, None]
        terms = torch.where(logp > -INF, logp, 0.0) * torch.where(logp > -INF, logp, -INF).exp()
        own = logp.gather(1, targets.clamp_min(0)[:, None])[:, 0]
        expected = [torch.where(targets != -100, t, 0.0) for t in (own, top[:, 0] + lse, -terms.sum(1))]
    if logits == "all at -inf" and not shaped:
        return 0.0 if all(bool(t.sum().isnan()) for t in (found[0], expected[0])) else INF
    pairs = [(a, torch.where(known, b, INF)) for a, b in zip(found, expected, strict=True)]
    there = z.isfinite()
    for value, truth in zip(found, expected, strict=True) if there.any() else ():
        upstream = torch.linspace(1.0, 2.0, value.numel()).view(value.shape)
        # Of classes at -inf torch's gradients are NaN where ours are 0 in the limit.
        ours = torch.autograd.grad(value, inputs, upstream, retain_graph=True)
        theirs = torch.autograd.grad(truth, inputs, upstream.double(), retain_graph=True)
        pairs += [(a[there].to(dtype), b[there]) for a, b in zip(ours, theirs, strict=True)]
    worst = 0.0
    for value, truth in pairs:
        mine, true = value.detach().double(), truth.detach().to(value.dtype).double()
        finite = true.isfinite()
        if not torch.equal(mine[~finite].nan_to_num(), true[~finite].nan_to_num()):
            return INF
        eps = torch.finfo(value.dtype).eps
        tolerance = 8 * eps * (true[finite].abs() + torch.where(finite, true.abs(), 0.0).max() + 1e-3)
        worst = max([worst, *((mine[finite] - true[finite]).abs() / tolerance).nan_to_num(INF).tolist()])
    return worst


def _extreme(case: dict[str, Any]) -> dict[str, Any]:
    def call(op: Any, operands: Any, options: Any, scalars: Any, out: Any) -> None:
        interpret(op, out, operands, scalars, **dict(zip(op.options, options, strict=True)))

    pieces = {"MOST_ROWS": 8, "_ROWS": 8, "MOST_BYTES": 8 * 256 * 4, "call": call}
    with mock.patch.multiple(products, **pieces):
        found = {logits: extreme_loss(logits, case["loss"], DTYPES[case["dtype"]]) for logits in LOGITS}
    worst = max(found, key=lambda logits: found[logits])
    return {"ratio": found[worst], "outside": True, "logits": worst}


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
    if "loss" in case:
        return _extreme(case)
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
        factors[:, 0] = torch.where(logits.isnan(), -math.inf, logits.float() * 0.5).amax(1)
        factors[:, 1] = torch.logsumexp(logits.float() * 0.5 - factors[:, :1], 1)
        factors[rows // 3, 2:] = 0  # a row without a gradient
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
    for i, loss in enumerate(LOSSES):
        cases[f"extreme logits: {loss}"] = {"loss": loss, "dtype": "fp32" if i % 2 else "bf16"}
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
