"""Mixtures of experts: routing, grouping tokens by expert, and moving rows there and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.baselines import DTYPES, Contender, Inputs, compiled, eager
from bench.suites import Case, Suite, suite
from bench.workloads import parse_case
from bench.workloads.declared import workload
from cutekernels.ops.moe.api import moe_combine, moe_gather, moe_permute, moe_route
from cutekernels.ops.moe.permute import MOE_PERMUTE, MoePermuteProblem
from cutekernels.ops.moe.route import MOE_ROUTE, MOE_ROUTE_BACKWARD, MoeRouteProblem
from cutekernels.ops.moe.rows import MOE_COMBINE, MOE_COMBINE_BACKWARD, MOE_GATHER, MoeMoveProblem

ROUTERS = {
    "8 top 2": (8, 2),
    "64 top 6": (64, 6),
    "128 top 8": (128, 8),
    "256 top 8": (256, 8),
    "512 top 10": (512, 10),
}
TOKENS = (1, 16, 256, 4096, 32768)
MOVED = {"qwen3-30b-a3b": (128, 8, 2048), "mixtral-8x7b": (8, 2, 4096), "deepseek-v3": (256, 8, 7168)}


# ---- cases ----------------------------------------------------------------------------------------------


def _routers(op: str) -> Suite:
    shapes = {
        f"{name}, {tokens} tokens": {"tokens": tokens, "experts": experts, "top_k": top_k}
        for name, (experts, top_k) in ROUTERS.items()
        for tokens in TOKENS
    }
    return suite(op, MoeRouteProblem, shapes)


def _pairs(dtype: str, accumulate: str) -> list[Case]:
    """Numbers of experts have no type."""
    return [
        Case("moe_permute", str(MoePermuteProblem(t * k, e)), f"{name}, {t} tokens")
        for name, (e, k) in ROUTERS.items()
        for t in TOKENS
    ]


def _moves(op: str) -> Suite:
    shapes = {
        f"{model}, {t} tokens": {"tokens": t, "cols": cols, "top_k": top_k, "weighted": op != "moe_gather"}
        for model, (_, top_k, cols) in MOVED.items()
        for t in TOKENS[:-1]
    }
    return suite(op, MoeMoveProblem, shapes)


def _of_training(cases: Suite) -> Suite:
    """Batches of tokens alone."""
    return lambda dtype, accumulate: [c for c in cases(dtype, accumulate) if parse_case(c)[1].tokens >= 256]


# ---- operands -------------------------------------------------------------------------------------------


def _logits(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    """Logits without ties, whose order torch.topk leaves open: each row one of the orders of E distinct numbers."""
    draw = torch.Generator(device).manual_seed(seed)
    noise = torch.rand((problem.tokens, problem.experts), generator=draw, device=device)
    logits = ((noise.argsort(-1) - problem.experts // 2) / 64).to(DTYPES[problem.dtype])
    return Inputs((logits,), MOE_ROUTE.outputs(problem, logits))


def _routed_logits(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    (logits,) = _logits(case, problem, device, seed).operands
    dweights, *_ = MOE_ROUTE_BACKWARD.sample(problem, device, seed)
    return Inputs((dweights, *MOE_ROUTE.reference(problem, logits), logits), (torch.empty_like(logits),))


def _move(op: Any, case: Case, problem: Any, device: str, seed: int) -> Inputs:
    """Rows go where a router of the model sends them. Behind the operands of ``moe_gather`` is their grouped order."""
    draw = torch.Generator(device).manual_seed(seed)
    experts = next(e for e, k, cols in MOVED.values() if (k, cols) == (problem.top_k, problem.cols))
    noise = torch.rand((problem.tokens, experts), generator=draw, device=device)
    ids = noise.topk(problem.top_k, dim=-1).indices.to(torch.int32)
    order, _, inverse = MOE_PERMUTE.evaluate(ids, experts=experts)
    sample = zip(op.inputs, op.sample(problem, device, seed), strict=True)
    args = tuple([inverse if name == "inverse" else t for name, t in sample])
    return Inputs((*args, order) if op is MOE_GATHER else args, op.outputs(problem, *args), args=args)


# ---- plain torch ----------------------------------------------------------------------------------------


def _route(case: Case) -> Callable[..., Any]:
    top_k = MoeRouteProblem.parse(case.problem).top_k

    def routed(logits: Tensor) -> tuple[Tensor, ...]:
        weights, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)

    return routed


def _permute_by_sort(case: Case) -> Callable[..., Any]:
    experts = MoePermuteProblem.parse(case.problem).experts

    def permuted(ids: Tensor) -> tuple[Tensor, ...]:
        grouped, order = torch.sort(ids, stable=True)
        places = torch.arange(ids.numel(), device=ids.device, dtype=torch.int32)
        inverse = torch.empty_like(places).scatter_(0, order, places)
        edges = torch.arange(experts + 1, device=ids.device, dtype=ids.dtype)
        return order.to(torch.int32), torch.searchsorted(grouped, edges, out_int32=True), inverse

    return permuted


def _gather(x: Tensor, inverse: Tensor, order: Tensor) -> Tensor:
    return x[order // inverse.shape[-1]]


def _combine(rows: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    return (rows[inverse] * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def _route_back(dweights: Tensor, weights: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
    pulls = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
    return torch.zeros_like(logits).scatter_(-1, ids.long(), pulls.to(logits.dtype))


def _combine_back(dout: Tensor, rows: Tensor, inverse: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    d = dout.float().unsqueeze(-2)
    terms = (weights.unsqueeze(-1) * d).to(rows.dtype).reshape(rows.shape)
    drows = torch.empty_like(rows).index_copy_(0, inverse.flatten().long(), terms)
    return drows, (rows[inverse] * d).sum(-1)


def _peers(plain: Callable[[Case], Callable[..., Any]]) -> tuple[Contender, ...]:
    return compiled(plain), eager(plain)


def _permute(ids: Tensor, experts: int, config: Any) -> tuple[Tensor, ...]:
    return moe_permute(ids, experts, config=config)


def _top_k(case: Case) -> int:
    return MoeMoveProblem.parse(case.problem).top_k


WORKLOADS = (
    workload(MOE_ROUTE, {"routers": _routers("moe_route")}, _peers(_route), moe_route, inputs=_logits),
    workload(MOE_PERMUTE, {"routers": _pairs}, _peers(_permute_by_sort), _permute),
    workload(
        MOE_GATHER,
        {"llm": _moves("moe_gather")},
        _peers(lambda case: _gather),
        moe_gather,
        inputs=partial(_move, MOE_GATHER),
        streams=lambda case: (1, _top_k(case)),
    ),
    workload(
        MOE_COMBINE,
        {"llm": _moves("moe_combine")},
        _peers(lambda case: _combine),
        moe_combine,
        inputs=partial(_move, MOE_COMBINE),
        streams=lambda case: (_top_k(case), 1),
    ),
    workload(
        MOE_ROUTE_BACKWARD,
        {"routers": _of_training(_routers("moe_route_backward"))},
        _peers(lambda case: _route_back),
        inputs=_routed_logits,
    ),
    workload(
        MOE_COMBINE_BACKWARD,
        {"llm": _of_training(_moves("moe_combine_backward"))},
        _peers(lambda case: _combine_back),
        inputs=partial(_move, MOE_COMBINE_BACKWARD),
        streams=lambda case: (1, 1),
    ),
)
