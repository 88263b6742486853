"""The gradients of attention, all three: the forward pass's shapes.

Flops are those of the five products that any backward pass needs, whatever a contender computes twice; the forward pass
is not timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.baselines import DTYPES, Contender, Inputs, Launch, Workload
from bench.suites import Case
from bench.workloads import attention as forward
from bench.workloads import posed
from cutekernels.op import Work
from cutekernels.ops.attention.api import attention
from cutekernels.ops.attention.backward import AttentionBackwardProblem, passes
from cutekernels.ops.attention.problem import AttentionProblem
from cutekernels.ops.attention.reference import gradients as reference

aten = torch.ops.aten

# ---- cases ----------------------------------------------------------------------------------------------


def _backward(suite: Callable[[str, str], list[Case]], dtype: str, accumulate: str) -> list[Case]:
    """The cases of the forward pass; their problem is that of the kernel that gives dK."""
    cases = []
    for case in suite(dtype, accumulate):
        p = AttentionProblem.parse(case.problem)
        of = passes(p.head_dim)[0]
        problem = AttentionBackwardProblem(**{f.name: getattr(p, f.name) for f in dataclasses.fields(p)}, of=of)
        cases.append(Case("attention_backward", str(problem), case.label))
    return cases


# ---- operands -------------------------------------------------------------------------------------------


def _inputs(case: Case, problem: AttentionBackwardProblem, device: str, seed: int) -> Inputs:
    draw = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=draw, device=device, dtype=DTYPES[problem.dtype])
    dout, q = (normal((problem.batch, problem.seq_q, problem.heads_q, problem.head_dim)) for _ in range(2))
    k, v = (normal((problem.batch, problem.seq_kv, problem.heads_kv, problem.head_dim)) for _ in range(2))
    return Inputs((dout, q, k, v), tuple([torch.empty_like(t) for t in (q, k, v)]))


def _truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    problem = posed(case)[1]
    dout, q, k, v = (t.double() for t in i.operands)
    right = 0 if problem.causal else None
    return reference(
        dout, None, q, k, v, None, None, None, problem.head_dim**-0.5, 0.0, left=None, right=right
    )  # fmt: skip


def _work(case: Case) -> Work:
    problem = posed(case)[1]
    own = posed(case)[0].work(problem)
    flops = 10.0 * problem.batch * problem.heads_q * problem.pairs * problem.head_dim
    rows = problem.batch * (4 * problem.seq_q * problem.heads_q + 4 * problem.seq_kv * problem.heads_kv)
    return Work(flops, float(2 * rows * problem.head_dim), depth=own.depth)


# ---- contenders -----------------------------------------------------------------------------------------


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    """What autograd runs; ``config`` is that of the kernel that gives dK."""
    problem = posed(case)[1]
    options = (problem.causal, -1, -1, problem.head_dim**-0.5, 0.0, None if config is None else str(config))

    def bound(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Launch:
        left = attention(q, k, v, causal=problem.causal, return_lse=True)
        return partial(torch.ops.cutekernels.attention_backward, dout, None, q, k, v, *left, None, None, None, *options)

    return [bound(*i.operands) for i in sets]


def _flash(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """The kernels behind torch's autograd, called without it."""
    problem = posed(case)[1]
    return [_torch(problem, False, *i.operands) for i in sets]


def _cudnn(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    problem = posed(case)[1]
    return [_torch(problem, True, *i.operands) for i in sets]


def _torch(problem: AttentionBackwardProblem, cudnn: bool, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Launch:
    dout, q, k, v = (t.transpose(1, 2) for t in (dout, q, k, v))
    causal, none = problem.causal, torch.empty(0, device=q.device)
    if cudnn:
        out, lse, cu_q, cu_k, most_q, most_k, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False
        )
        rest: tuple[Any, ...] = (seed, offset, none, cu_q, cu_k, most_q, most_k, 0.0, causal)
        kernel = aten._scaled_dot_product_cudnn_attention_backward
    else:
        out, lse, cu_q, cu_k, most_q, most_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False
        )
        rest = (cu_q, cu_k, most_q, most_k, 0.0, causal, seed, offset)
        kernel = aten._scaled_dot_product_flash_attention_backward

    def launch() -> tuple[Tensor, ...]:
        return tuple([t.transpose(1, 2) for t in kernel(dout, q, k, v, out, lse, *rest)])

    return launch


WORKLOADS = (
    Workload(
        op="attention_backward",
        suites={
            "prefill": partial(_backward, forward._prefill),
            "llm": partial(_backward, forward._llm),
        },
        inputs=_inputs,
        truth=_truth,
        ours=_ours,
        peers=(Contender("torch sdpa flash", _flash), Contender("torch sdpa cudnn", _cudnn)),
        work=_work,
    ),
)
