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

from bench.baselines import Inputs, Launch, Workload, each
from bench.suites import Case, suite
from bench.workloads import attention as forward
from bench.workloads import parse_case
from cutekernels.gpu import GpuSpec
from cutekernels.op import Work
from cutekernels.ops.attention.api import attention
from cutekernels.ops.attention.backward_config import AttentionBackwardProblem, passes
from cutekernels.ops.attention.gradient import problems
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.reference import gradients as reference

aten = torch.ops.aten


def _problem(shape: forward.Shape, dtype: str) -> AttentionBackwardProblem:
    p = forward.problem(shape, dtype)
    of = passes(p.head_dim)[0]
    return AttentionBackwardProblem(**{f.name: getattr(p, f.name) for f in dataclasses.fields(p)}, of=of)


# Head dims 64, 128 and 256, one to eight prompts, 512 to 16k tokens.
_SQUARES = ((128, 4, 4096), (128, 8, 1024), (64, 4, 4096), (256, 2, 4096))
HOPPER = forward.by_label(
    *[forward.square(*size, causal) for size in _SQUARES for causal in (False, True)],
    *[(batch, seq, 32, 8, 128, True) for batch, seq in ((1, 2048), (8, 1024), (1, 8192))],
    (1, 16384, 16, 16, 128, True),
    (4, 2048, 32, 32, 64, True),
    (8, 512, 32, 32, 64, False),
)


def _launch_problem(problem: AttentionBackwardProblem, gpu: GpuSpec) -> AttentionBackwardProblem:
    """The problem that gives dK: with dV, or all three."""
    return problems(problem.forward().replace(lse=False), gpu)[0]


def _inputs(case: Case, problem: AttentionBackwardProblem, device: str, seed: int) -> Inputs:
    dout, *_ = ATTENTION.sample(problem.forward(), device, seed + (1 << 20))
    operands = dout, *ATTENTION.sample(problem.forward(), device, seed)[:3]
    return Inputs(operands, tuple([torch.empty_like(t) for t in operands[1:]]))


def _truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    problem = parse_case(case)[1]
    dout, q, k, v = (t.double() for t in i.operands)
    return reference(dout, None, q, k, v, None, None, None, problem.head_dim**-0.5, 0.0, **problem.sides)


def _work(case: Case) -> Work:
    problem = parse_case(case)[1]
    own = parse_case(case)[0].work(problem)
    flops = 10.0 * problem.batch * problem.heads_q * problem.pairs * problem.head_dim
    rows = problem.batch * (4 * problem.seq_q * problem.heads_q + 4 * problem.seq_kv * problem.heads_kv)
    return Work(flops, float(2 * rows * problem.head_dim), depth=own.depth)


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    """The launches of autograd; ``config`` goes to the kernel that gives dK."""
    problem = parse_case(case)[1]
    options = (problem.causal, -1, -1, problem.head_dim**-0.5, 0.0, None if config is None else str(config))

    def bind(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Launch:
        left = attention(q, k, v, causal=problem.causal, return_lse=True)
        op = torch.ops.cutekernels.attention_backward
        call = partial(op, dout, None, q, k, v, *left, None, None, None, None, *options)
        return lambda: call()[:3]  # without the sinks' gradient

    return [bind(*i.operands) for i in sets]


def _torchs(name: str, case: Case) -> Callable[..., Launch]:
    """The kernels behind torch's autograd, called without it."""
    causal = parse_case(case)[1].causal
    forward = getattr(aten, f"_scaled_dot_product_{name}_attention")
    kernel = getattr(aten, f"_scaled_dot_product_{name}_attention_backward")

    def bind(*operands: Tensor) -> Launch:
        dout, q, k, v = (t.transpose(1, 2) for t in operands)
        bias = (None, True) if name == "cudnn" else ()
        out, lse, *ends, seed, offset, _ = forward(q, k, v, *bias, 0.0, causal, False)
        rest = (seed, offset, None, *ends, 0.0, causal) if name == "cudnn" else (*ends, 0.0, causal, seed, offset)
        return lambda: tuple([t.transpose(1, 2) for t in kernel(dout, q, k, v, out, lse, *rest)])

    return bind


def _flash_4(case: Case) -> Callable[..., Launch]:
    """Its deterministic kernels, since ours have no others."""
    kernel = forward.flash_attn_4("flash_attn.cute.interface")._flash_attn_bwd
    causal = parse_case(case)[1].causal

    def bind(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Launch:
        left = attention(q, k, v, causal=causal, return_lse=True)
        return lambda: tuple(kernel(q, k, v, left[0], dout, left[1], causal=causal, deterministic=True)[:3])

    return bind


_FLASH = each("torch sdpa flash", partial(_torchs, "flash"))
WORKLOADS = (
    Workload(
        op="attention_backward",
        suites={
            name: suite("attention_backward", _problem, shapes)
            for name, shapes in {"prefill": forward.PREFILL, "llm": forward.LLM, "hopper": HOPPER}.items()
        },
        inputs=_inputs,
        truth=_truth,
        ours=_ours,
        launches=_launch_problem,
        confined=(_FLASH,),
        peers=(
            _FLASH,
            each("torch sdpa cudnn", partial(_torchs, "cudnn")),
            each("flash-attn-4", _flash_4),
        ),
        work=_work,
    ),
)
