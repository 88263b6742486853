"""RMSNorm and the projection behind it, and a gated MLP's first half: of Qwen2.5 7B from decoding to prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bench.baselines import Contender, Workload, compiled, eager
from bench.suites import EVERY_FEW, HIDDEN, INTERMEDIATE, Case, suite
from bench.workloads.declared import launches, workload
from cutekernels.ops.norm_linear import linear_silu_mul, rms_norm_linear
from cutekernels.ops.products.fused import CHAIN
from cutekernels.ops.products.norm import LINEAR_SILU_MUL, RMS_NORM_LINEAR

EPS = 1e-6
K = HIDDEN["qwen2.5-7b"]
PROJECTIONS = {"q": 3584, "gate": INTERMEDIATE["qwen2.5-7b"]}  # the weights whose tables others published
TOKENS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192)
DECODE_TOKENS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128)


Words = dict[str, dict[str, Any]]


def _projections(tokens: Sequence[int]) -> Words:
    return {f"{name} {n}x{K} m={m}": {"m": m, "n": n, "k": K} for name, n in PROJECTIONS.items() for m in tokens}


def _gates(tokens: Sequence[int]) -> Words:
    size = {"n": PROJECTIONS["gate"], "k": K}
    norm = size | {"norm": True, "norm_weight": "same"}
    kinds = (("gate and up", size), ("norm, gate and up", norm))
    return {f"{label} m={m}": words | {"m": m} for label, words in kinds for m in tokens}


def _plain(case: Case) -> Callable[..., Any]:
    """The op as a model's own code writes it."""

    def normed(x: Tensor, norm_weight: Tensor | None) -> Tensor:
        return x if norm_weight is None else F.rms_norm(x, x.shape[-1:], norm_weight, EPS)

    def projection(x: Tensor, norm_weight: Tensor, weight: Tensor) -> Tensor:
        return F.linear(normed(x, norm_weight), weight)

    def gated(x: Tensor, weight: Tensor, norm_weight: Tensor | None = None) -> Tensor:
        gate, up = F.linear(normed(x, norm_weight), weight).chunk(2, -1)
        return F.silu(gate) * up

    return projection if case.op == "rms_norm_linear" else gated


def _workload(op: Any, function: Callable[..., Any], cases: Callable[[Sequence[int]], Words]) -> Workload:
    chain = Contender("our ops one by one", lambda case, sets: launches(op, function, case, sets, CHAIN))
    tokens = {"qwen": TOKENS, "decode": DECODE_TOKENS, "tokens": EVERY_FEW}
    suites = {name: suite(op.name, op.Problem, cases(some)) for name, some in tokens.items()}
    return workload(op, suites, (compiled(_plain), eager(_plain), chain), function, {"eps": EPS})


WORKLOADS = (
    _workload(RMS_NORM_LINEAR, rms_norm_linear, _projections),
    _workload(LINEAR_SILU_MUL, linear_silu_mul, _gates),
)
