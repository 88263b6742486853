"""RMSNorm and the projection behind it, and a gated MLP's first half: of Qwen2.5 7B from decoding to prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baselines import DTYPES, Contender, Inputs, Launch, Workload, compiled, eager
from bench.suites import EVERY_FEW, HIDDEN, INTERMEDIATE, Case, unless
from cutekernels.ops.norm_linear.api import linear_silu_mul, rms_norm_linear
from cutekernels.ops.norm_linear.problem import CHAIN

EPS = 1e-6
K = HIDDEN["qwen2.5-7b"]
PROJECTIONS = {"q": 3584, "gate": INTERMEDIATE["qwen2.5-7b"]}  # the weights whose tables others published
TOKENS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192)
DECODE_TOKENS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128)


# ---- cases ----------------------------------------------------------------------------------------------


def _projections(tokens: Sequence[int], dtype: str, accumulate: str) -> list[Case]:
    words = unless("dtype", dtype, "bf16")
    return [
        Case("rms_norm_linear", f"m={m} n={n} k={K}{words}", f"{name} {n}x{K} m={m}")
        for name, n in PROJECTIONS.items()
        for m in tokens
    ]


def _gates(tokens: Sequence[int], dtype: str, accumulate: str) -> list[Case]:
    words = unless("dtype", dtype, "bf16")
    return [
        Case("linear_silu_mul", f"m={m} n={PROJECTIONS['gate']} k={K}{words}{norm}", f"{label} m={m}")
        for norm, label in (("", "gate and up"), (" norm=1 norm_weight=same", "norm, gate and up"))
        for m in tokens
    ]


# ---- operands -------------------------------------------------------------------------------------------


def _inputs(case: Case, problem: Any, device: str, seed: int) -> Inputs:
    """x, the linear layer's weight for outputs near 1, and the norm's where there is one."""
    draw = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=draw, device=device, dtype=DTYPES[problem.dtype])
    m, n, k = problem.m, problem.n, problem.k
    operands = [normal((m, k)), normal((problem.product.n, k)).mul_(k**-0.5)]
    if problem.norm_weight != "none":
        operands.append(normal(k))
    return Inputs(tuple(operands), (torch.empty((m, n), device=device, dtype=DTYPES[problem.dtype]),))


def _plain(case: Case) -> Callable[..., Any]:
    """What a model's own code says."""

    def normed(x: Tensor, norm_weight: Tensor | None) -> Tensor:
        return x if norm_weight is None else F.rms_norm(x, x.shape[-1:], norm_weight, EPS)

    def projection(x: Tensor, weight: Tensor, norm_weight: Tensor) -> Tensor:
        return F.linear(normed(x, norm_weight), weight)

    def gated(x: Tensor, weight: Tensor, norm_weight: Tensor | None = None) -> Tensor:
        gate, up = F.linear(normed(x, norm_weight), weight).chunk(2, -1)
        return F.silu(gate) * up

    return projection if case.op == "rms_norm_linear" else gated


def _truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    return (_plain(case)(*[t.double() for t in i.operands]),)


# ---- contenders -----------------------------------------------------------------------------------------


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    def projection(i: Inputs) -> Launch:
        x, weight, norm_weight = i.operands
        return partial(rms_norm_linear, x, norm_weight, weight, eps=EPS, out=i.out, config=config)

    def gated(i: Inputs) -> Launch:
        x, weight, *norm = i.operands
        norm_weight = norm[0] if norm else None
        return partial(linear_silu_mul, x, weight, norm_weight=norm_weight, eps=EPS, out=i.out, config=config)

    return [(projection if case.op == "rms_norm_linear" else gated)(i) for i in sets]


def _chain(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    return _ours(case, sets, CHAIN)


def _workload(op: str, cases: Callable[[Sequence[int], str, str], list[Case]]) -> Workload:
    return Workload(
        op=op,
        suites={
            "qwen": partial(cases, TOKENS),
            "decode": partial(cases, DECODE_TOKENS),
            "tokens": partial(cases, EVERY_FEW),
        },
        inputs=_inputs,
        truth=_truth,
        ours=_ours,
        peers=(compiled(_plain), eager(_plain), Contender("our ops one by one", _chain)),
    )


WORKLOADS = (_workload("rms_norm_linear", _projections), _workload("linear_silu_mul", _gates))
