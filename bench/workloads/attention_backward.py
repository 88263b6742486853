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

from bench.baselines import DTYPES, Absent, Contender, Inputs, Launch, Workload
from bench.suites import Case
from bench.workloads import attention as forward
from bench.workloads import posed
from cutekernels.op import Work
from cutekernels.ops.attention.api import attention
from cutekernels.ops.attention.backward_config import AttentionBackwardProblem, passes
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


def _hopper(dtype: str, accumulate: str) -> list[Case]:
    """Head dims 64, 128 and 256, one to eight prompts, 512 to 16k tokens."""
    square = [
        forward._case(dtype, batch, seq, 2048 // d, 2048 // d, d, causal)
        for d, batch, seq in ((128, 4, 4096), (128, 8, 1024), (64, 4, 4096), (256, 2, 4096))
        for causal in (False, True)
    ]
    groups = [forward._case(dtype, batch, seq, 32, 8, 128, True) for batch, seq in ((1, 2048), (8, 1024), (1, 8192))]
    return [
        *square,
        *groups,
        forward._case(dtype, 1, 16384, 16, 16, 128, True),
        forward._case(dtype, 4, 2048, 32, 32, 64, True),
        forward._case(dtype, 8, 512, 32, 32, 64, False),
    ]


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
        op = torch.ops.cutekernels.attention_backward
        bound = partial(op, dout, None, q, k, v, *left, None, None, None, None, *options)
        return lambda: bound()[:3]  # without the sinks' gradient

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
    causal = problem.causal
    if cudnn:
        out, lse, cu_q, cu_k, most_q, most_k, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False
        )
        rest: tuple[Any, ...] = (seed, offset, None, cu_q, cu_k, most_q, most_k, 0.0, causal)
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


def _flash_4(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """Its deterministic kernels, since ours have no others."""
    try:
        from flash_attn.cute.interface import _flash_attn_bwd
    except (ImportError, RuntimeError) as error:
        raise Absent(f"flash-attn-4 does not import: {error}") from error
    causal = posed(case)[1].causal

    def bound(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Launch:
        out, lse = attention(q, k, v, causal=causal, return_lse=True)

        def launch() -> tuple[Tensor, ...]:
            return tuple(_flash_attn_bwd(q, k, v, out, dout, lse, causal=causal, deterministic=True)[:3])

        return launch

    return [bound(*i.operands) for i in sets]


WORKLOADS = (
    Workload(
        op="attention_backward",
        suites={
            "prefill": partial(_backward, forward._prefill),
            "llm": partial(_backward, forward._llm),
            "hopper": partial(_backward, _hopper),
        },
        inputs=_inputs,
        truth=_truth,
        ours=_ours,
        peers=(
            Contender("torch sdpa flash", _flash),
            Contender("torch sdpa cudnn", _cudnn),
            Contender("flash-attn-4", _flash_4),
        ),
        work=_work,
    ),
)
