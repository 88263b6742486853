"""Linear layers with weights of four and eight bits: ten weights of four models, and eleven of four others ("heldout").

The baseline is cuBLAS with the weight in bf16 (fp16), decoded beforehand; "our ops in bf16" have it too. Other projects
are in ``quantized_peers``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.baselines import DTYPES, Contender, Inputs, Launch, Workload, each
from bench.suites import Case, Suite, suite
from bench.workloads import parse_case, quantized_peers
from bench.workloads.declared import draw_inputs, workload
from cutekernels.op import Work
from cutekernels.ops.linear import linear
from cutekernels.ops.products import backward
from cutekernels.ops.products.api import gemm
from cutekernels.ops.products.dequantize import DEQUANTIZE, DequantizeProblem, rows_of_scale
from cutekernels.ops.products.packed import QUANTIZED_LINEAR
from cutekernels.ops.products.packed_api import quantized_linear
from cutekernels.ops.products.schedules.packed_problem import QuantizedProblem
from cutekernels.ops.products.schedules.problem import ELEMENT_BYTES
from cutekernels.ops.shared.calls import run
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


def _suites(op: str, models: dict[str, dict[str, tuple[int, int]]], **tokens: Sequence[int]) -> dict[str, Suite]:
    def shapes(some: Sequence[int]) -> dict[str, dict[str, Any]]:
        return {
            f"{name}, {label} m={m}": {"m": m, "n": n, "k": k, **words}
            for name, words in FORMATS.items()
            for label, n, k in _weights(models)
            for m in some
        }

    return {name: suite(op, QuantizedProblem, shapes(some)) for name, some in tokens.items()}


def _decode(columns: int) -> Suite:
    """Whole weights, or so many columns: those that a gradient decodes at a time, about."""
    shapes = {
        f"{name}, {label}": {"n": n, "columns": columns or k, "k": k, **words}
        for name, words in FORMATS.items()
        for label, n, k in _weights(WEIGHTS)
    }
    return suite("dequantize", DequantizeProblem, shapes)


# ---- operands -------------------------------------------------------------------------------------------


def _inputs_backward(case: Case, problem: QuantizedProblem, device: str, seed: int) -> Inputs:
    """The gradient of the product in the place of the tokens."""
    i = draw_inputs(QUANTIZED_LINEAR, {}, case, problem, device, seed)
    x, *weight = i.operands
    return Inputs((i.out.normal_(generator=torch.Generator(device).manual_seed(seed)), *weight), (x,))


def _decoded_inputs(case: Case, problem: DequantizeProblem, device: str, seed: int) -> Inputs:
    i = draw_inputs(DEQUANTIZE, {"first": 0}, case, problem, device, seed)
    share = problem.columns / problem.k
    return dataclasses.replace(i, read_bytes=int(share * sum(t.nbytes for t in i.operands)))


def _of(case: Case, i: Inputs) -> QuantizedWeight:
    """The packed weight of a case, behind its other operands."""
    p, (packed, scales) = parse_case(case)[1], i.operands[-2:]
    rows, dtype = rows_of_scale(scales, p.n), DTYPES[p.dtype]
    return QuantizedWeight(p.code, p.group, rows, (p.n, p.k), packed, scales, dtype=dtype)


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
    """The launches of a backward pass: QLoRA's weights are frozen, so x alone has a gradient."""
    p = parse_case(case)[1]

    def gradient(i: Inputs) -> Launch:
        dy, packed, scales = i.operands
        return partial(backward.LINEAR_BACKWARD, dy, packed, scales, None, None, p.code, p.group, p.n, p.k)

    return [gradient(i) for i in sets]


def _cublas(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    turned = case.op == "quantized_linear_backward"

    def product(i: Inputs) -> Launch:
        weight = _of(case, i).dequantize()
        return partial(torch.mm, i.operands[0], weight if turned else weight.t(), out=i.out)

    return [product(i) for i in sets]


def _decoding_cublas(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """The whole weight decoded by our kernel before each product."""
    p = parse_case(case)[1]

    def product(i: Inputs) -> Launch:
        dy, packed, scales = i.operands
        weight = dy.new_empty((p.n, p.k))
        options = (p.code, p.group, p.n, p.k, p.k, p.dtype)

        def launch() -> Tensor:
            run(DEQUANTIZE, (weight,), (packed, scales, None, None), options=options, scalars=(0,))
            return torch.mm(dy, weight, out=i.out)

        return launch

    return [product(i) for i in sets]


def _in_bf16(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """``ck.linear``, or the gradient of its x, of the weight decoded beforehand."""
    product = gemm if case.op == "quantized_linear_backward" else linear
    return [partial(product, i.operands[0], _of(case, i).dequantize(), out=i.out) for i in sets]


def _decoded_rows(columns: int, dtype: torch.dtype, nibbles: bool, codes: Tensor, scales: Tensor) -> Tensor:
    """Rows of codes that lie as in a checkpoint, two in a byte where they have four bits."""
    if nibbles:
        values = torch.stack((codes & 15, codes >> 4), -1).flatten(1).float() - 8.0
    else:
        values = codes.view(torch.float8_e4m3fn).float()
    rows, group = codes.shape[0] // scales.shape[0], columns // scales.shape[1]
    blocks = values.unflatten(1, (-1, group)).unflatten(0, (-1, rows))
    scaled: Tensor = blocks * scales.float()[:, None, :, None]
    return scaled.flatten(2).flatten(0, 1).to(dtype)


def _plain(compile: bool, case: Case) -> Callable[..., Launch]:
    p = parse_case(case)[1]
    decode: Callable[..., Tensor] = partial(_decoded_rows, p.columns, DTYPES[p.dtype], p.code == "int4")
    if compile:
        torch.compiler.reset()
        decode = torch.compile(decode, dynamic=False)

    def bind(*weight: Tensor) -> Launch:
        rows = quantized_peers.rows_of(p, *weight)
        codes, scales = rows.codes[:, : p.columns], rows.scales
        if p.group:
            scales = scales[:, : p.columns // p.group].contiguous()
        return partial(decode, quantized_peers.nibbles(codes) if p.code == "int4" else codes.contiguous(), scales)

    return bind


_IN_16_BITS = (Contender("cublas", _cublas), Contender("our ops in bf16", _in_bf16))
WORKLOADS = (
    workload(
        QUANTIZED_LINEAR,
        _suites("quantized_linear", WEIGHTS, decode=DECODE_TOKENS, tokens=TOKENS, prefill=PREFILL_TOKENS)
        | _suites("quantized_linear", HELD_OUT, heldout=HELD_OUT_TOKENS),
        (*_IN_16_BITS, *quantized_peers.PEERS),
        truth=_truth,
        ours=_ours,
        confined=_IN_16_BITS[1:],
        streams=lambda case: (1, 0),
    ),
    Workload(
        op="quantized_linear_backward",
        poses="quantized_linear",
        suites=_suites("quantized_linear_backward", WEIGHTS, qlora=TRAINED_TOKENS),
        inputs=_inputs_backward,
        truth=_truth,
        ours=_ours_gradient,
        peers=(*_IN_16_BITS, Contender("decoding, then cublas", _decoding_cublas)),
        configured=False,
        work=_gradient_work,
    ),
    workload(
        DEQUANTIZE,
        {"weights": _decode(0), "parts": _decode(512)},
        (each("torch.compile", partial(_plain, True)), each("eager", partial(_plain, False))),
        inputs=_decoded_inputs,
        truth=_decoded_truth,
        streams=lambda case: (1, 4 if parse_case(case)[1].code == "int4" else 2),
    ),
)
