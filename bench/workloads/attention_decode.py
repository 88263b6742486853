"""Attention of one token over a cache: batches that fill the GPU, single long sequences, two models' heads. Caches in
FP8 are beside the same numbers in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench.baselines import DTYPES, Contender, Inputs, Launch, Workload
from bench.suites import Case
from bench.workloads.attention import NAIVE, sdpa
from cutekernels.ops.attention import token_scales
from cutekernels.ops.attention.decode import DecodeProblem
from cutekernels.ops.attention.decode_api import decode_attention
from cutekernels.ops.attention.reference import decode as reference

MODELS = {"llama-3-8b": (32, 8), "qwen2.5-7b": (28, 4)}  # heads of q, and of k and v

# ---- cases ----------------------------------------------------------------------------------------------


def _case(dtype: str, model: str, batch: int, seq: int, page_size: int = 0, cache: str = "same") -> Case:
    heads, heads_kv = MODELS[model]
    problem = DecodeProblem(batch, seq, heads, heads_kv, dtype=dtype, page_size=page_size, cache=cache)
    paged = f" pages of {page_size}" if page_size else ""
    op = "decode_attention" if cache == "same" else "decode_attention_fp8"
    return Case(op, str(problem), f"{model} b{batch} h{heads}/{heads_kv} s{seq}{paged}")


def _decode(dtype: str, accumulate: str) -> list[Case]:
    return [
        _case(dtype, "llama-3-8b", 32, 4096),
        _case(dtype, "llama-3-8b", 32, 4096, 16),
        _case(dtype, "qwen2.5-7b", 64, 2048),
        _case(dtype, "llama-3-8b", 1, 32768),
        _case(dtype, "qwen2.5-7b", 1, 1024),
        _case(dtype, "qwen2.5-7b", 1, 4096),
        _case(dtype, "qwen2.5-7b", 1, 4096, 16),
    ]


def _fp8(dtype: str, accumulate: str) -> list[Case]:
    sizes = ((32, 4096, 0), (32, 4096, 16), (16, 8192, 64), (1, 32768, 0), (1, 131072, 0), (1, 4096, 0))
    cases = [_case(dtype, "llama-3-8b", *size, cache="fp8_tokens") for size in sizes]
    others = ((64, 2048, 0), (16, 8192, 64))
    return [*cases, *[_case(dtype, "qwen2.5-7b", *size, cache="fp8_tokens") for size in others]]


def _published(dtype: str, accumulate: str) -> list[Case]:
    return [
        Case("decode_attention", str(DecodeProblem(batch, seq, 8, 8, dtype=dtype)), f"b{batch} h8 s{seq} d128")
        for batch, seq in ((1, 512), (1, 1024), (1, 2048), (2, 1024))
    ]


# ---- operands -------------------------------------------------------------------------------------------


def _inputs(case: Case, problem: DecodeProblem, device: str, seed: int) -> Inputs:
    """Sequences that fill the cache; pages in a random order."""
    draw = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=draw, device=device, dtype=DTYPES[problem.dtype])
    q = normal((problem.batch, problem.seq_q, problem.heads_q, problem.head_dim))
    lengths = torch.full((problem.batch,), problem.seq_kv, device=device, dtype=torch.int32)
    size = problem.page_size or problem.seq_kv
    each = -(-problem.seq_kv // size)
    k, v = (normal((problem.batch * each, size, problem.heads_kv, problem.head_dim)) for _ in range(2))
    operands: tuple[Tensor, ...] = (q, k, v, lengths)
    if problem.cache == "fp8_tokens":
        (k, k_scale), (v, v_scale) = (token_scales.quantized(t) for t in (k, v))
        operands = (q, k, v, lengths, *map(token_scales.by_head, (k_scale, v_scale)))
    if problem.page_size:
        order = torch.randperm(problem.batch * each, generator=draw, device=device)
        operands = (*operands, order.view(problem.batch, each).to(torch.int32))
    return Inputs(operands, (torch.empty_like(q),))


def _table(i: Inputs) -> Tensor | None:
    return i.operands[-1] if i.operands[-1].dim() == 2 else None


def _scales(i: Inputs) -> dict[str, Tensor]:
    """Scales of a cache in FP8, as ``decode_attention`` takes them."""
    found = i.operands[4:6] if i.operands[1].element_size() == 1 else ()
    return dict(zip(("k_scale", "v_scale"), found, strict=False))


def _truth(case: Case, i: Inputs) -> tuple[Tensor, ...]:
    q, k, v = (t if t.element_size() == 1 else t.double() for t in i.operands[:3])
    scale = DecodeProblem.parse(case.problem).head_dim ** -0.5
    return reference(q.double(), k, v, i.operands[3], _table(i), None, scale, 0.0, **_scales(i), left=None)[:1]


# ---- contenders -----------------------------------------------------------------------------------------


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    return [
        partial(decode_attention, *i.operands[:4], page_table=_table(i), **_scales(i), out=i.out, config=config)
        for i in sets
    ]


def _in_16_bits(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """The same numbers in a cache of q's type."""

    def bound(i: Inputs) -> Launch:
        q, k, v, lengths, *scales = i.operands
        factors = [token_scales.by_slot(own, k.shape[1], torch.float32) for own in scales[:2]]
        wide = [(t.float() * own).to(q.dtype) for t, own in zip((k, v), factors, strict=True)]
        return partial(decode_attention, q, *wide, lengths, page_table=_table(i), out=i.out)

    return [bound(i) for i in sets]


WORKLOADS = (
    Workload(
        op="decode_attention",
        suites={"decode": _decode, "published": _published},
        inputs=_inputs,
        truth=_truth,
        ours=_ours,
        peers=(sdpa(SDPBackend.CUDNN_ATTENTION), sdpa(SDPBackend.FLASH_ATTENTION), NAIVE),
    ),
    Workload(
        op="decode_attention_fp8",
        poses="decode_attention",
        suites={"fp8": _fp8},
        inputs=_inputs,
        truth=_truth,
        ours=_ours,
        peers=(Contender("16-bit cache", _in_16_bits),),
    ),
)
