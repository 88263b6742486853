"""A whole gated MLP: ``(silu(x @ gate.T) * (x @ up.T)) @ down.T``, as others published it and of two models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baselines import DTYPES, Inputs, Launch, Workload, compiled, eager
from bench.suites import HIDDEN, INTERMEDIATE, TOKENS, Case, Suite, suite
from cutekernels.nn.mlp import swiglu
from cutekernels.op import Work
from cutekernels.ops.activations.op import GluProblem

PUBLISHED = ((8, 128, 2048), (16, 256, 4096), (32, 512, 4096))  # batch x tokens x hidden, all 6912 wide inside
_WIDTH = "hidden "  # in a label, before the number that the problem lacks


def _suite(sizes: Mapping[str, tuple[int, int, int]]) -> Suite:
    """Rows, hidden and intermediate. The problem is that of the activation between the products, of one tensor."""
    shapes = {f"{label}, {_WIDTH}{k}": {"rows": m, "cols": n, "layout": "rows"} for label, (m, k, n) in sizes.items()}
    return suite("swiglu", GluProblem, shapes)


_PUBLISHED = {f"{b}x{t}": (b * t, hidden, 6912) for b, t, hidden in PUBLISHED}
_LLM = {f"{name}, {rows} tokens": (rows, HIDDEN[name], INTERMEDIATE[name]) for name in HIDDEN for rows in TOKENS}


def _hidden(case: Case) -> int:
    return int(case.label.rpartition(_WIDTH)[2])


def _inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    """x, gate and up in one weight, down."""
    draw = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=draw, device=device, dtype=DTYPES[problem.dtype])
    hidden, inner = _hidden(case), problem.cols
    gate_up = normal((2 * inner, hidden)).mul_(hidden**-0.5)
    down = normal((hidden, inner)).mul_(inner**-0.5)
    x = normal((problem.rows, hidden))
    return Inputs((x, gate_up, down), (torch.empty_like(x),))


def _work(case: Case) -> Work:
    problem, hidden = GluProblem.parse(case.problem), _hidden(case)
    products = 3 * hidden * problem.cols
    moved = 2 * (2 * problem.rows * hidden + products)
    return Work(2.0 * problem.rows * products, float(moved), depth=float(max(hidden, problem.cols)))


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Three products."""
    gate, up = gate_up.chunk(2)
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    """``cutekernels.nn.SwiGLU``'s forward pass; ``config`` is the activation's."""
    return [partial(swiglu, *i.operands, config=config) for i in sets]


WORKLOADS = (
    Workload(
        op="swiglu",
        poses="silu_mul",
        suites={"published": _suite(_PUBLISHED), "llm": _suite(_LLM)},
        inputs=_inputs,
        truth=lambda case, i: (_mlp(*[t.double() for t in i.operands]),),
        ours=_ours,
        peers=(compiled(lambda case: _mlp), eager(lambda case: _mlp)),
        work=_work,
    ),
)
