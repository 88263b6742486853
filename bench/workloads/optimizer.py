"""AdamW: one parameter, or many, of as many elements as others timed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.baselines import Absent, Contender, Inputs, Launch
from bench.suites import Case, suite
from bench.workloads.declared import draw_inputs, exact, workload
from cutekernels.ops.optimizer.api import adamw_step
from cutekernels.ops.optimizer.op import ADAMW_STEP, AdamWProblem
from cutekernels.optim import FusedAdamW

MANY = 200  # tensors, in cases whose label says so
STEP = 3  # of the declaration's sample, and so are these
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


_SIZES = {f"{m}M": {"elements": m * 1_000_000} for m in (1, 10, 50)}
_TENSORS = {f"{label} in {MANY} tensors": words for label, words in _SIZES.items()}


def _inputs(case: Case, problem: AdamWProblem, device: str, seed: int) -> Inputs:
    i = draw_inputs(ADAMW_STEP, {}, case, problem, device, seed)
    param, _, *moments = i.operands
    # Nobody writes to given results here: they stand for the bytes that a step writes.
    return Inputs(i.operands, i.results[:3], (param, *moments), args=i.args)


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


_PEERS = (
    Contender("torch AdamW(fused)", partial(_torch, fused=True, capturable=True)),
    Contender("torch AdamW(foreach)", partial(_torch, foreach=True, capturable=True)),
    Contender("cutekernels FusedAdamW", _table),
)
WORKLOADS = (
    workload(
        ADAMW_STEP,
        {name: suite("adamw_step", AdamWProblem, some) for name, some in (("sizes", _SIZES), ("tensors", _TENSORS))},
        _PEERS,
        inputs=_inputs,
        truth=lambda case, i: exact(ADAMW_STEP, case, i)[:3],
        ours=_ours,
        streams=lambda case: (4, 3),
    ),
)
