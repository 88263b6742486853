"""Matrix products: squares, the projections of two models, and the (alpha, beta) table others published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.baselines import Absent, Contender, Inputs, Launch, example, launched
from bench.suites import EVERY_FEW, TOKENS, Case, Suite, suite
from bench.workloads import parse_case
from bench.workloads.declared import workload
from cutekernels.ops.products.api import gemm
from cutekernels.ops.products.dense import GEMM
from cutekernels.ops.products.schedules.problem import GemmProblem

# ---- cases ----------------------------------------------------------------------------------------------

# Weights as nn.Linear keeps them: (N, K) of every projection in a layer.
PROJECTIONS = {
    "llama-3-8b": {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "qwen2.5-7b": {"qkv": (4608, 3584), "out": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)},
}
# Projections of five more models that nothing was tuned to (ten of the products are in sweeps that a model was fitted
# to), and token counts on and off the ladder.
HELD_OUT = {
    "llama-3-70b": {"qkv": (10240, 8192), "down": (8192, 28672)},
    "gemma-2-9b": {"out": (3584, 4096), "down": (3584, 14336)},
    "qwen2.5-32b": {"qkv": (7168, 5120)},
    "phi-3-mini": {"gate_up": (16384, 3072), "down": (3072, 8192)},
    "qwen3-30b-a3b": {"qkv": (5120, 2048)},
}
HELD_OUT_TOKENS = (128, 200, 256, 333, 512, 1000, 1024, 2000, 2048, 4000, 8192)
TRAINED_TOKENS = (4096, 8192)
LAYOUTS = (("k", "n"), ("k", "k"), ("m", "n"), ("m", "k"))  # contiguous extents of a and b
BATCHES, BATCHED_SQUARES = (8, 64), (512, 1024, 2048)
DECODE = ((3584, 3584), (18944, 3584), (4096, 4096), (6144, 4096), (3584, 18944))  # weights (N, K)
DECODE_TOKENS = (1, 4, 8, 16, 32, 64, 128)
_OF_MODELS = [weight for of in (PROJECTIONS, HELD_OUT) for model in of.values() for weight in model.values()]
WEIGHTS = tuple(dict.fromkeys([*_OF_MODELS, *DECODE, (128256, 4096)]))  # the last one is a head
SQUARES = (512, 1024, 2048, 4096, 8192)
SCALES = ((1.0, 0.0), (1.0, 1.0), (2.0, 3.0), (0.5, 2.0))  # (alpha, beta), as minfer's table has them


Words = dict[str, Any]  # of a problem


def _words(m: int, n: int, k: int, **more: Any) -> Words:
    return {"m": m, "n": n, "k": k, **more}


def _linear(weights: Iterable[tuple[int, int]], tokens: Sequence[int]) -> dict[str, Words]:
    return {f"{n}x{k} m={m}": _words(m, n, k, b_major="k") for n, k in weights for m in tokens}


_LLM = {
    f"{model} {name} m={m}": _words(m, n, k, b_major="k")
    for model, projections in PROJECTIONS.items()
    for name, (n, k) in projections.items()
    for m in TOKENS
}
_TRAINING = {  # the products of a linear layer's backward: dx = dy @ weight, dweight = dy.T @ x
    f"{model} {name} {gradient} {tokens}": _words(m, n, k, a_major=a_major)
    for model, projections in PROJECTIONS.items()
    for name, (wide, deep) in projections.items()
    for tokens in TRAINED_TOKENS
    for gradient, m, n, k, a_major in (("dx", tokens, deep, wide, "k"), ("dw", wide, deep, tokens, "m"))
}
_LAYOUTS = {f"{s} a_major={a} b_major={b}": _words(s, s, s, a_major=a, b_major=b) for s in SQUARES for a, b in LAYOUTS}
_BATCHED = {f"{n} x {s}": _words(s, s, s, batch=n, batched=True) for n in BATCHES for s in BATCHED_SQUARES}


def _suite(shapes: Mapping[str, Words]) -> Suite:
    return lambda dtype, summed: suite("gemm", partial(GemmProblem, accumulate=summed), shapes)(dtype, summed)


def _alphabeta(dtype: str, accumulate: str) -> list[Case]:
    def text(s: int, c: str) -> str:
        return str(GemmProblem(s, s, s, c=c, dtype=dtype, accumulate=accumulate))

    return [
        Case("gemm", text(s, "n" if b else "none"), f"{s} ({a:g}, {b:g})", a, b) for s in SQUARES for a, b in SCALES
    ]


# ---- contenders -----------------------------------------------------------------------------------------


def _truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    a, b, c, bias, *_ = (None if t is None else t.double() for t in i.args[:4])
    return GEMM.reference(parse_case(case)[1], a, b, c, bias, case.alpha, case.beta)


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    accumulate = parse_case(case)[1].accumulate
    options = {"alpha": case.alpha, "beta": case.beta, "accumulate": accumulate, "config": config}
    return [partial(gemm, *i.operands, out=i.out, **options) for i in sets]


def _cublas(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    if (case.alpha, case.beta) == (1.0, 0.0):
        multiply = torch.bmm if sets[0].out.dim() == 3 else torch.mm
        return [partial(multiply, *i.operands, out=i.out) for i in sets]
    scale = {"alpha": case.alpha, "beta": case.beta}  # beta=0 leaves addmm's first operand unread
    thirds = [i.operands[2] if case.beta else i.out for i in sets]
    return [partial(torch.addmm, c, *i.operands[:2], **scale, out=i.out) for c, i in zip(thirds, sets, strict=True)]


def _quack(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    from quack import gemm_interface

    product, scale = gemm_interface.gemm, {"alpha": case.alpha}
    if case.beta:
        product, scale = gemm_interface.gemm_add, {"alpha": case.alpha, "beta": case.beta}
    return [partial(product, *i.operands, out=i.out, tuned=False, **scale) for i in sets]


def _triton(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """The grouped product of one group."""
    p = parse_case(case)[1]
    if (case.alpha, case.beta, p.a_major, p.batched, p.bias, p.activation) != (1.0, 0.0, "k", False, "none", "none"):
        raise Absent("the kernel takes rows with K contiguous, and nothing but the product")
    from bench.workloads.grouped_triton import grouped

    ends = torch.tensor([0, p.m], dtype=torch.int32, device=sets[0].out.device)
    return [partial(grouped, i.operands[0], i.operands[1].t().unsqueeze(0), ends) for i in sets]


def nvidia_example(file: Path) -> Contender:
    """NVIDIA's CuTe DSL example ``ampere/.../tensorop_gemm.py``, from a CUTLASS checkout: mma.sync, as ours is."""
    return Contender("nvidia tensorop_gemm", partial(_nvidia, file))


def _nvidia(file: Path, case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    if (case.alpha, case.beta) != (1.0, 0.0):
        raise Absent("the example has neither alpha nor beta")
    import cutlass
    from cutlass.cute.runtime import from_dlpack

    kinds = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}

    def fitted(t: Tensor) -> Any:
        lead = 1 if t.stride(1) == 1 else 0
        dynamic = from_dlpack(t.unsqueeze(-1), assumed_align=16).mark_layout_dynamic(leading_dim=lead)
        return dynamic.mark_compact_shape_dynamic(mode=lead, stride_order=(2, 1 - lead, lead), divisibility=8)

    kind = kinds[sets[0].out.dtype]
    kernel = example(file).TensorOpGemm(kind, kind, cutlass.Float32, (2, 2, 1))
    tensors = [[fitted(i.operands[0]), fitted(i.operands[1].t()), fitted(i.out)] for i in sets]
    return launched(kernel, sets, tensors)


WORKLOADS = (
    workload(
        GEMM,
        {
            "square": _suite({str(s): _words(s, s, s) for s in SQUARES}),
            "llm": _suite(_LLM),
            "decode": _suite(_linear(DECODE, DECODE_TOKENS)),
            "tokens": _suite(_linear(DECODE[:2], EVERY_FEW)),
            "heldout": _suite(_linear([w for of in HELD_OUT.values() for w in of.values()], HELD_OUT_TOKENS)),
            "weights": _suite(_linear(WEIGHTS, DECODE_TOKENS)),
            "layouts": _suite(_LAYOUTS),
            "training": _suite(_TRAINING),
            "batched": _suite(_BATCHED),
            "alphabeta": _alphabeta,
        },
        (Contender("cublas", _cublas), Contender("quack (untuned)", _quack)),
        truth=_truth,
        ours=_ours,
        example=nvidia_example,
        confined=(Contender("triton, MMA of a warp", _triton),),
    ),
)
