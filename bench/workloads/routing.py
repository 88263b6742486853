"""Mixtures of experts: routing, grouping tokens by expert, and moving rows there and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.baselines import DTYPES, Inputs, Launch, Workload, compiled, eager
from bench.suites import Case
from bench.workloads import posed
from cutekernels.ops.moe.api import moe_combine, moe_gather, moe_permute, moe_route
from cutekernels.ops.moe.permute import MOE_PERMUTE, MoePermuteProblem
from cutekernels.ops.moe.route import MOE_ROUTE, MOE_ROUTE_BACKWARD, MoeRouteProblem
from cutekernels.ops.moe.rows import MOE_COMBINE_BACKWARD, MoeMoveProblem

ROUTERS = {
    "8 top 2": (8, 2),
    "64 top 6": (64, 6),
    "128 top 8": (128, 8),
    "256 top 8": (256, 8),
    "512 top 10": (512, 10),
}
TOKENS = (1, 16, 256, 4096, 32768)
MOVED = {"qwen3-30b-a3b": (128, 8, 2048), "mixtral-8x7b": (8, 2, 4096), "deepseek-v3": (256, 8, 7168)}


# ---- routing --------------------------------------------------------------------------------------------


def _route_cases(dtype: str, accumulate: str) -> list[Case]:
    return [
        Case("moe_route", str(MoeRouteProblem(tokens, experts, top_k, str(dtype))), f"{name}, {tokens} tokens")
        for name, (experts, top_k) in ROUTERS.items()
        for tokens in TOKENS
    ]


def _route_inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    """Logits without ties, whose order torch.topk leaves open: each row one of the orders of E distinct numbers."""
    draw = torch.Generator(device).manual_seed(seed)
    noise = torch.rand((problem.tokens, problem.experts), generator=draw, device=device)
    logits = ((noise.argsort(-1) - problem.experts // 2) / 64).to(DTYPES[problem.dtype])
    shape = (problem.tokens, problem.top_k)
    return Inputs((logits,), (logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)))


def _route_truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    problem = MoeRouteProblem.parse(case.problem)
    return MOE_ROUTE.evaluate(i.operands[0].double(), top_k=problem.top_k, renormalize=problem.renormalize)


def _route_ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    top_k = MoeRouteProblem.parse(case.problem).top_k
    return [partial(moe_route, i.operands[0], top_k, config=config) for i in sets]


def _routed(case: Case) -> Callable[..., Any]:
    top_k = MoeRouteProblem.parse(case.problem).top_k

    def routed(logits: Tensor) -> tuple[Tensor, ...]:
        weights, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)

    return routed


# ---- grouping -------------------------------------------------------------------------------------------


def _permute_cases(dtype: str, accumulate: str) -> list[Case]:
    return [
        Case("moe_permute", str(MoePermuteProblem(tokens * top_k, experts)), f"{name}, {tokens} tokens")
        for name, (experts, top_k) in ROUTERS.items()
        for tokens in TOKENS
    ]


def _permute_inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    (ids,) = MOE_PERMUTE.sample(problem, device, seed)
    return Inputs((ids,), MOE_PERMUTE.outputs(problem, ids))


def _permute_truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    return MOE_PERMUTE.evaluate(*i.operands, experts=MoePermuteProblem.parse(case.problem).experts)


def _permute_ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    experts = MoePermuteProblem.parse(case.problem).experts
    return [partial(moe_permute, i.operands[0], experts, config=config) for i in sets]


def _permuted(case: Case) -> Callable[..., Any]:
    experts = MoePermuteProblem.parse(case.problem).experts

    def permuted(ids: Tensor) -> tuple[Tensor, ...]:
        grouped, order = torch.sort(ids, stable=True)
        places = torch.arange(ids.numel(), device=ids.device, dtype=torch.int32)
        inverse = torch.empty_like(places).scatter_(0, order, places)
        edges = torch.arange(experts + 1, device=ids.device, dtype=ids.dtype)
        return order.to(torch.int32), torch.searchsorted(grouped, edges, out_int32=True), inverse

    return permuted


# ---- rows -----------------------------------------------------------------------------------------------


def _move_cases(op: str, dtype: str, accumulate: str) -> list[Case]:
    return [
        Case(op, str(MoeMoveProblem(tokens, cols, top_k, str(dtype), op == "moe_combine")), f"{model}, {tokens} tokens")
        for model, (_, top_k, cols) in MOVED.items()
        for tokens in TOKENS[:-1]
    ]


def _move_inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    draw = torch.Generator(device).manual_seed(seed)
    experts = next(e for e, k, cols in MOVED.values() if (k, cols) == (problem.top_k, problem.cols))
    noise = torch.rand((problem.tokens, experts), generator=draw, device=device)
    ids = noise.topk(problem.top_k, dim=-1).indices.to(torch.int32)
    order, _, inverse = MOE_PERMUTE.evaluate(ids, experts=experts)
    normal = partial(torch.randn, generator=draw, device=device, dtype=DTYPES[problem.dtype])
    tokens, rows = (problem.tokens, problem.cols), (problem.tokens * problem.top_k, problem.cols)
    if case.op == "moe_gather":
        x = normal(tokens)
        return Inputs((x, inverse, order), (x.new_empty(rows),))
    y = normal(rows)
    weights = torch.rand((problem.tokens, problem.top_k), generator=draw, device=device)
    return Inputs((y, inverse, weights), (y.new_empty(tokens),))


def _gather_truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    x, inverse, order = i.operands
    return (x.double()[order.long() // inverse.shape[-1]],)


def _gather_ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    return [partial(moe_gather, *i.operands[:2], config=config) for i in sets]


def _gathered(case: Case) -> Callable[..., Any]:
    def gathered(x: Tensor, inverse: Tensor, order: Tensor) -> Tensor:
        return x[order // inverse.shape[-1]]

    return gathered


def _combine_truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    rows, inverse, weights = i.operands
    return ((rows.double()[inverse.long()] * weights.double().unsqueeze(-1)).sum(1),)


def _combine_ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    return [partial(moe_combine, *i.operands, config=config) for i in sets]


def _combined(case: Case) -> Callable[..., Any]:
    def combined(rows: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
        return (rows[inverse] * weights.unsqueeze(-1)).sum(1).to(rows.dtype)

    return combined


# ---- gradients ------------------------------------------------------------------------------------------


def _fewer(cases: Callable[[str, str], list[Case]]) -> Callable[[str, str], list[Case]]:
    """Those of training: batches of tokens."""
    return lambda dtype, accumulate: [c for c in cases(dtype, accumulate) if posed(c)[1].tokens >= 256]


def _route_backward_cases(dtype: str, accumulate: str) -> list[Case]:
    return [dataclasses.replace(c, op="moe_route_backward") for c in _route_cases(dtype, accumulate)]


def _route_backward_inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    forward = _route_inputs(case, problem, device, seed)
    (logits,) = forward.operands
    weights, ids = MOE_ROUTE.evaluate(logits, top_k=problem.top_k, renormalize=problem.renormalize)
    draw = torch.Generator(device).manual_seed(seed)
    dweights = torch.randn(weights.shape, generator=draw, device=device, dtype=weights.dtype)
    return Inputs((dweights, weights, ids, logits), (torch.empty_like(logits),))


def _route_backward_truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    problem = MoeRouteProblem.parse(case.problem)
    dweights, weights, ids, logits = i.operands
    wide = (dweights.double(), weights.double(), ids, logits.double())
    return MOE_ROUTE_BACKWARD.evaluate(*wide, top_k=problem.top_k, renormalize=problem.renormalize)


def _route_backward_ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    problem, text = MoeRouteProblem.parse(case.problem), None if config is None else str(config)

    def launch(i: Inputs) -> tuple[Tensor, ...]:
        torch.ops.cutekernels.moe_route_backward_out(*i.operands, *i.results, problem.top_k, problem.renormalize, text)
        return i.results

    return [partial(launch, i) for i in sets]


def _unrouted(case: Case) -> Callable[..., Any]:
    def gradient(dweights: Tensor, weights: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
        pulls = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        return torch.zeros_like(logits).scatter_(-1, ids.long(), pulls.to(logits.dtype))

    return gradient


def _combine_backward_cases(dtype: str, accumulate: str) -> list[Case]:
    return [dataclasses.replace(c, op="moe_combine_backward") for c in _move_cases("moe_combine", dtype, accumulate)]


def _combine_backward_inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    forward = _move_inputs(dataclasses.replace(case, op="moe_combine"), problem, device, seed)
    (rows, inverse, weights), (out,) = forward.operands, forward.results
    dout = torch.randn(out.shape, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=out.dtype)
    return Inputs((dout, rows, inverse, weights), (torch.empty_like(rows), torch.empty_like(weights)))


def _combine_backward_truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    dout, rows, inverse, weights = i.operands
    return MOE_COMBINE_BACKWARD.evaluate(dout.double(), rows.double(), inverse, weights.double())


def _combine_backward_ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    text = None if config is None else str(config)

    def launch(i: Inputs) -> tuple[Tensor, ...]:
        torch.ops.cutekernels.moe_combine_backward_out(*i.operands, *i.results, text)
        return i.results

    return [partial(launch, i) for i in sets]


def _uncombined(case: Case) -> Callable[..., Any]:
    def gradient(dout: Tensor, rows: Tensor, inverse: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        d = dout.float().unsqueeze(-2)
        terms = (weights.unsqueeze(-1) * d).to(rows.dtype).reshape(rows.shape)
        drows = torch.empty_like(rows).index_copy_(0, inverse.flatten().long(), terms)
        return drows, (rows[inverse] * d).sum(-1)

    return gradient


WORKLOADS = (
    Workload(
        op="moe_route",
        suites={"routers": _route_cases},
        inputs=_route_inputs,
        truth=_route_truth,
        ours=_route_ours,
        peers=(compiled(_routed), eager(_routed)),
    ),
    Workload(
        op="moe_permute",
        suites={"routers": _permute_cases},
        inputs=_permute_inputs,
        truth=_permute_truth,
        ours=_permute_ours,
        peers=(compiled(_permuted), eager(_permuted)),
    ),
    Workload(
        op="moe_gather",
        suites={"llm": partial(_move_cases, "moe_gather")},
        inputs=_move_inputs,
        truth=_gather_truth,
        ours=_gather_ours,
        peers=(compiled(_gathered), eager(_gathered)),
        streams=lambda case: (1, MoeMoveProblem.parse(case.problem).top_k),
    ),
    Workload(
        op="moe_combine",
        suites={"llm": partial(_move_cases, "moe_combine")},
        inputs=_move_inputs,
        truth=_combine_truth,
        ours=_combine_ours,
        peers=(compiled(_combined), eager(_combined)),
        streams=lambda case: (MoeMoveProblem.parse(case.problem).top_k, 1),
    ),
    Workload(
        op="moe_route_backward",
        suites={"routers": _fewer(_route_backward_cases)},
        inputs=_route_backward_inputs,
        truth=_route_backward_truth,
        ours=_route_backward_ours,
        peers=(compiled(_unrouted), eager(_unrouted)),
    ),
    Workload(
        op="moe_combine_backward",
        suites={"llm": _fewer(_combine_backward_cases)},
        inputs=_combine_backward_inputs,
        truth=_combine_backward_truth,
        ours=_combine_backward_ours,
        peers=(compiled(_uncombined), eager(_uncombined)),
        streams=lambda case: (1, 1),
    ),
)
