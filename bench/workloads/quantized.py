"""Linear layers with weights of four and eight bits: ten weights of four models, and eleven of four others ("heldout").

The baseline is cuBLAS with the weight in bf16 (fp16), decoded beforehand; "our ops in bf16" have it too. Other projects
are in ``quantized_peers``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.baselines import DTYPES, Contender, Inputs, Launch, Workload
from bench.suites import Case
from bench.workloads import posed, quantized_peers
from cutekernels.op import Work
from cutekernels.ops.gemm.api import gemm, linear
from cutekernels.ops.gemm.problem import ELEMENT_BYTES
from cutekernels.ops.quantized import backward
from cutekernels.ops.quantized.api import quantized_linear
from cutekernels.ops.quantized.decode import DEQUANTIZE, DequantizeProblem, random_weight, rows_of_scale
from cutekernels.ops.quantized.op import QUANTIZED_LINEAR
from cutekernels.ops.quantized.problem import QuantizedProblem
from cutekernels.ops.shared.calls import call
from cutekernels.quant.weight import QuantizedWeight

# ---- cases ----------------------------------------------------------------------------------------------

# Weights as nn.Linear keeps them: (N, K).
WEIGHTS = {
    "llama-3-8b": {"out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "llama-3-70b": {"qkv": (10240, 8192), "down": (8192, 28672)},
    "qwen3-14b": {"qkv": (7168, 5120), "gate_up": (34816, 5120), "down": (5120, 17408)},
    "mistral-small-24b": {"qkv": (6144, 5120), "out": (5120, 4096)},
}
HELD_OUT = {
    "gemma-2-9b": {"qkv": (8192, 3584), "out": (3584, 4096), "down": (3584, 14336)},
    "phi-4-mini": {"qkv": (5120, 3072), "gate_up": (16384, 3072), "down": (3072, 8192)},
    "qwen2.5-32b": {"out": (5120, 5120), "gate_up": (55296, 5120), "down": (5120, 27648)},
    "qwen2.5-3b": {"qkv": (2560, 2048), "down": (2048, 11008)},
}
FORMATS: dict[str, dict[str, Any]] = {
    "int4 g128": {},
    "e4m3 channel": {"code": "e4m3", "group": 0, "scale": "fp32"},
    "e4m3 block": {"code": "e4m3", "scale_rows": 128, "scale": "fp32"},
}
DECODE_TOKENS = (1, 4, 8, 16)
TOKENS = (1, 8, 32, 64, 128, 256)
PREFILL_TOKENS = (512, 1024, 2048, 4096, 8192)
HELD_OUT_TOKENS = (1, 3, 12, 48, 200, 1000)
TRAINED_TOKENS = (512, 2048, 8192)


def _weights(models: dict[str, dict[str, tuple[int, int]]]) -> list[tuple[str, int, int]]:
    return [(f"{model} {name}", n, k) for model, parts in models.items() for name, (n, k) in parts.items()]


def _linear(
    op: str, models: dict[str, dict[str, tuple[int, int]]], tokens: Sequence[int], dtype: str, accumulate: str
) -> list[Case]:
    return [
        Case(op, str(QuantizedProblem(m=m, n=n, k=k, dtype=str(dtype), **words)), f"{name}, {label} m={m}")
        for name, words in FORMATS.items()
        for label, n, k in _weights(models)
        for m in tokens
    ]


def _decoded(dtype: str, accumulate: str) -> list[Case]:
    """Whole weights."""
    return [
        Case("dequantize", str(DequantizeProblem(n=n, columns=k, k=k, dtype=str(dtype), **words)), f"{name}, {label}")
        for name, words in FORMATS.items()
        for label, n, k in _weights(WEIGHTS)
    ]


def _decoded_parts(dtype: str, accumulate: str) -> list[Case]:
    """The columns that a gradient decodes at a time, about."""
    return [
        Case("dequantize", str(DequantizeProblem(n=n, columns=512, k=k, dtype=str(dtype), **words)), f"{name}, {label}")
        for name, words in FORMATS.items()
        for label, n, k in _weights(WEIGHTS)
    ]


# ---- operands -------------------------------------------------------------------------------------------


def _normal(device: str, seed: int, dtype: str) -> Callable[..., Tensor]:
    draw = torch.Generator(device).manual_seed(seed + 1)
    return partial(torch.randn, generator=draw, device=device, dtype=DTYPES[dtype])


def _packed(problem: Any, device: str, seed: int) -> tuple[Tensor, Tensor]:
    packed, scales, zeros = random_weight(problem, device, seed)
    assert zeros is None, "no suite has zero points"
    return packed, scales


def _inputs(case: Case, problem: QuantizedProblem, device: str, seed: int) -> Inputs:
    """Tokens, packed and scales; or the gradient of their product in the place of the tokens."""
    normal = _normal(device, seed, problem.dtype)
    m, n, k = problem.m, problem.n, problem.k
    given, made = ((m, n), (m, k)) if case.op == "quantized_linear_backward" else ((m, k), (m, n))
    out = torch.empty(made, device=device, dtype=DTYPES[problem.dtype])
    return Inputs((normal(given), *_packed(problem, device, seed)), (out,))


def _decoded_inputs(case: Case, problem: DequantizeProblem, device: str, seed: int) -> Inputs:
    out = torch.empty((problem.n, problem.columns), device=device, dtype=DTYPES[problem.dtype])
    packed, scales = _packed(problem, device, seed)
    share = problem.columns / problem.k
    return Inputs((packed, scales), (out,), read_bytes=int(share * (packed.nbytes + scales.nbytes)))


def weight_of(problem: Any, packed: Tensor, scales: Tensor) -> QuantizedWeight:
    """The packed weight that ``problem`` has."""
    return QuantizedWeight(
        code=problem.code,
        group=problem.group,
        scale_rows=rows_of_scale(scales, problem.n),
        shape=(problem.n, problem.k),
        packed=packed,
        scales=scales,
        dtype=DTYPES[problem.dtype],
    )


def _of(case: Case, i: Inputs) -> QuantizedWeight:
    return weight_of(posed(case)[1], *i.operands[-2:])


def _truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    exact = _of(case, i).dequantize(torch.float32).double()
    given = i.operands[0].double()
    return (given @ exact if case.op == "quantized_linear_backward" else given @ exact.t(),)


def _decoded_truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    return (_of(case, i).dequantize(torch.float32)[:, : i.out.shape[1]].double(),)


def _gradient_work(case: Case) -> Work:
    p = QuantizedProblem.parse(case.problem)
    depth = QUANTIZED_LINEAR.work(p.replace(k=p.n, n=p.k)).depth
    moved = p.weight_bytes + ELEMENT_BYTES * p.m * (p.k + p.n)
    return Work(2.0 * p.m * p.n * p.k, float(moved), depth)


# ---- contenders -----------------------------------------------------------------------------------------


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    return [partial(quantized_linear, i.operands[0], _of(case, i), out=i.out, config=config) for i in sets]


def _ours_gradient(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    """What a backward pass calls: of QLoRA's frozen weights, x alone has a gradient."""
    p = posed(case)[1]

    def gradient(i: Inputs) -> Launch:
        dy, packed, scales = i.operands
        return partial(backward.BACKWARD_PATH, dy, packed, scales, None, p.code, p.group, p.n, p.k)

    return [gradient(i) for i in sets]


def _ours_decoded(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    p = posed(case)[1]
    options = (p.code, p.group, p.n, p.k, p.columns, p.dtype)

    def decode(i: Inputs) -> tuple[Tensor, ...]:
        return call(DEQUANTIZE, (*i.operands, None), options, (0,), config=config, out=i.results)

    return [partial(decode, i) for i in sets]


def _cublas(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    turned = case.op == "quantized_linear_backward"

    def product(i: Inputs) -> Launch:
        weight = _of(case, i).dequantize()
        return partial(torch.mm, i.operands[0], weight if turned else weight.t(), out=i.out)

    return [product(i) for i in sets]


def _in_bf16(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """``ck.linear``, or the gradient of its x, of the weight decoded beforehand."""
    product = gemm if case.op == "quantized_linear_backward" else linear
    return [partial(product, i.operands[0], _of(case, i).dequantize(), out=i.out) for i in sets]


@dataclass(frozen=True, slots=True)
class _Plain:
    """Decodes rows of codes that lie as in a checkpoint, two in a byte where they have four bits."""

    columns: int
    dtype: torch.dtype
    nibbles: bool

    def __call__(self, codes: Tensor, scales: Tensor) -> Tensor:
        if self.nibbles:
            values = torch.stack((codes & 15, codes >> 4), -1).flatten(1).float() - 8.0
        else:
            values = codes.view(torch.float8_e4m3fn).float()
        rows, group = codes.shape[0] // scales.shape[0], self.columns // scales.shape[1]
        blocks = values.unflatten(1, (-1, group)).unflatten(0, (-1, rows))
        scaled: Tensor = blocks * scales.float()[:, None, :, None]
        return scaled.flatten(2).flatten(0, 1).to(self.dtype)


def _plain(case: Case, sets: Sequence[Inputs], wrap: Callable[[_Plain], Callable[..., Tensor]]) -> Sequence[Launch]:
    p = posed(case)[1]
    decode = wrap(_Plain(p.columns, DTYPES[p.dtype], p.code == "int4"))

    def bound(i: Inputs) -> Launch:
        rows = quantized_peers.rows_of(p, *i.operands)
        codes, scales = rows.codes[:, : p.columns], rows.scales
        if p.group:
            scales = scales[:, : p.columns // p.group].contiguous()
        return partial(decode, quantized_peers.nibbles(codes) if p.code == "int4" else codes.contiguous(), scales)

    return [bound(i) for i in sets]


def _compiled(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    torch.compiler.reset()
    return _plain(case, sets, partial(torch.compile, dynamic=False))


def _eager(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    return _plain(case, sets, lambda plain: plain)


WORKLOADS = (
    Workload(
        op="quantized_linear",
        suites={
            "decode": partial(_linear, "quantized_linear", WEIGHTS, DECODE_TOKENS),
            "tokens": partial(_linear, "quantized_linear", WEIGHTS, TOKENS),
            "prefill": partial(_linear, "quantized_linear", WEIGHTS, PREFILL_TOKENS),
            "heldout": partial(_linear, "quantized_linear", HELD_OUT, HELD_OUT_TOKENS),
        },
        inputs=_inputs,
        truth=_truth,
        ours=_ours,
        peers=(Contender("cublas", _cublas), Contender("our ops in bf16", _in_bf16), *quantized_peers.PEERS),
        streams=lambda case: (1, 0),
    ),
    Workload(
        op="quantized_linear_backward",
        poses="quantized_linear",
        suites={"qlora": partial(_linear, "quantized_linear_backward", WEIGHTS, TRAINED_TOKENS)},
        inputs=_inputs,
        truth=_truth,
        ours=_ours_gradient,
        peers=(Contender("cublas", _cublas), Contender("our ops in bf16", _in_bf16)),
        configured=False,
        work=_gradient_work,
    ),
    Workload(
        op="dequantize",
        suites={"weights": _decoded, "parts": _decoded_parts},
        inputs=_decoded_inputs,
        truth=_decoded_truth,
        ours=_ours_decoded,
        peers=(Contender("torch.compile", _compiled), Contender("eager", _eager)),
        streams=lambda case: (1, 4 if posed(case)[1].code == "int4" else 2),
    ),
)
