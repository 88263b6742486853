"""AdamW: one parameter, or many, of as many elements as others timed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.baselines import DTYPES, Absent, Contender, Inputs, Launch, Workload
from bench.suites import Case
from cutekernels.ops.optimizer.api import adamw_step
from cutekernels.ops.optimizer.op import AdamWProblem
from cutekernels.optim import FusedAdamW

MANY = 200  # tensors, in cases whose label says so
STEP = 3
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
_MILLIONS = (1, 10, 50)


def _sizes(dtype: str, accumulate: str) -> list[Case]:
    return [Case("adamw_step", str(AdamWProblem(m * 1_000_000, str(dtype))), f"{m}M") for m in _MILLIONS]


def _tensors(dtype: str, accumulate: str) -> list[Case]:
    return [Case(c.op, c.problem, f"{c.label} in {MANY} tensors") for c in _sizes(dtype, accumulate)]


def _inputs(case: Case, problem: AdamWProblem, device: str, seed: int) -> Inputs:
    draw = torch.Generator(device).manual_seed(seed)

    def normal(dtype: str) -> Tensor:
        return torch.randn(problem.elements, generator=draw, device=device, dtype=DTYPES[dtype])

    param, grad, exp_avg = normal(problem.dtype), normal(problem.grad_dtype), normal("fp32").mul_(0.1)
    exp_avg_sq = normal("fp32").mul_(0.05).abs_().add_(0.05).square_()
    # Nobody writes to given results here: they stand for the bytes that a step writes.
    written = (torch.empty_like(param), torch.empty_like(exp_avg), torch.empty_like(exp_avg_sq))
    return Inputs((param, grad, exp_avg, exp_avg_sq), written, (param, exp_avg, exp_avg_sq))


def _truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    p, g, m, v = (t.double() for t in i.operands)
    beta1, beta2 = SETTINGS["betas"]
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    denominator = (v / (1 - beta2**STEP)).sqrt() + SETTINGS["eps"]
    lr = SETTINGS["lr"]
    return p * (1 - lr * SETTINGS["weight_decay"]) - lr / (1 - beta1**STEP) * m / denominator, m, v


def _stepping(make: Any, case: Case, i: Inputs) -> Launch:
    """A step of the optimizer that ``make`` makes, whose parameters and state are the operands."""
    pieces = MANY if "tensors" in case.label else 1
    size = -(-i.operands[0].numel() // pieces // 8) * 8  # of 16 bytes in any type, so that all are aligned
    cut = [t.split(size) for t in i.operands]
    params = [torch.nn.Parameter(p) for p in cut[0]]
    optimizer = make(params, **SETTINGS)
    for p, grad, exp_avg, exp_avg_sq in zip(params, *cut[1:], strict=True):
        p.grad = grad
        step = torch.full((), STEP - 1.0, device=p.device)
        optimizer.state[p] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    written = (i.operands[0], *i.operands[2:])

    def launch() -> tuple[Tensor, ...]:
        optimizer.step()
        return written

    return launch


def _one(i: Inputs, config: Any) -> tuple[Tensor, ...]:
    param, grad, exp_avg, exp_avg_sq = i.operands
    adamw_step(param, grad, exp_avg, exp_avg_sq, step=STEP, config=config, **SETTINGS)
    return param, exp_avg, exp_avg_sq


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    if "tensors" in case.label:
        return _table(case, sets)
    return [partial(_one, i, config) for i in sets]


def _table(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    return [_stepping(FusedAdamW, case, i) for i in sets]


def _torch(case: Case, sets: Sequence[Inputs], **how: Any) -> Sequence[Launch]:
    if AdamWProblem.parse(case.problem).dtype != "fp32":
        raise Absent("torch keeps the moments in the parameters' type")
    return [_stepping(partial(torch.optim.AdamW, **how), case, i) for i in sets]


WORKLOADS = (
    Workload(
        op="adamw_step",
        suites={"sizes": _sizes, "tensors": _tensors},
        inputs=_inputs,
        truth=_truth,
        ours=_ours,
        peers=(
            Contender("torch AdamW(fused)", partial(_torch, fused=True, capturable=True)),
            Contender("torch AdamW(foreach)", partial(_torch, foreach=True, capturable=True)),
            Contender("cutekernels FusedAdamW", _table),
        ),
        streams=lambda case: (4, 3),
    ),
)
