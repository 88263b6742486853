"""Filtering logits at the vocabularies of three models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.baselines import DTYPES, Inputs, Launch, Workload, compiled, eager
from bench.suites import Case, suite
from cutekernels.ops.sampling.api import sample_filter
from cutekernels.ops.sampling.op import SAMPLE_FILTER, SampleFilterProblem

VOCABULARIES = {"llama-3": 128256, "qwen2.5": 152064, "gemma-3": 262144}
FILTERS = {
    "top-k, top-p, min-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k": {"temperature": 0.8, "top_k": 50},
}


def _parameters(case: Case) -> dict[str, Any]:
    return FILTERS[case.label.split(" | ")[1]]


_ASKED = [(model, "top-k, top-p, min-p") for model in VOCABULARIES] + [("llama-3", "top-p"), ("llama-3", "top-k")]
_LLM = {
    f"{model} {rows} | {name}": {"rows": rows, "cols": VOCABULARIES[model]}
    | {f"by_{short}": long in FILTERS[name] for short, long in (("k", "top_k"), ("p", "top_p"), ("min_p", "min_p"))}
    for model, name in _ASKED
    for rows in (1, 16, 64, 256)
}


def _inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    """Standard normal logits, four times as wide: a few hundred tokens share most of the mass."""
    draw = torch.Generator(device).manual_seed(seed)
    logits = torch.randn((problem.rows, problem.cols), generator=draw, device=device).mul_(4).to(DTYPES[problem.dtype])
    return Inputs((logits,), (torch.empty_like(logits),))


def _truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | _parameters(case)
    asked = {"by_k": given["top_k"] > 0, "by_p": given["top_p"] < 1, "by_min_p": given["min_p"] > 0}
    (logits,) = i.operands
    (filtered,) = SAMPLE_FILTER.evaluate(logits, *[None] * 4, *[given[n] for n in SAMPLE_FILTER.scalars], **asked)
    return (torch.where(filtered.isneginf(), float("-inf"), logits.double() / given["temperature"]),)


def filtered(case: Case) -> Callable[..., Any]:
    """The way of model libraries: top-k's threshold, one sort for top-p, a softmax for each share."""
    given = _parameters(case)

    def chain(logits: Tensor) -> Any:
        y = logits.float() / given["temperature"]
        if "top_k" in given:
            y = y.masked_fill(y < y.topk(given["top_k"], dim=-1).values[:, -1:], float("-inf"))
        if "top_p" in given:
            values, order = y.sort(dim=-1, descending=True)
            p = values.softmax(-1)
            dropped = p.cumsum(-1) - p >= given["top_p"]
            y = y.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), float("-inf"))
        if "min_p" in given:
            p = y.softmax(-1)
            y = y.masked_fill(p < given["min_p"] * p.amax(-1, keepdim=True), float("-inf"))
        return y.to(logits.dtype)

    return chain


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    return [partial(sample_filter, *i.operands, **_parameters(case), config=config) for i in sets]


# A sort in fp32 draws the line of top-p a token earlier or later now and then, and through the midst of ties.
_PEERS = tuple([dataclasses.replace(peer, judged=False) for peer in (compiled(filtered), eager(filtered))])
_SUITES = {"llm": suite("sample_filter", SampleFilterProblem, _LLM)}
WORKLOADS = (Workload("sample_filter", _SUITES, _inputs, _truth, _ours, _PEERS, streams=lambda case: (1, 1)),)
