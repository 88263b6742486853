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

from bench.baselines import DTYPES, Contender, Inputs, Launch
from bench.suites import Case, Suite, suite
from bench.workloads.attention import NAIVE, sdpa
from bench.workloads.declared import workload
from bench.workloads.rope import HEADS
from cutekernels.ops.attention import token_scales
from cutekernels.ops.attention.api import decode_attention
from cutekernels.ops.attention.decode import DECODE_ATTENTION, DecodeProblem


def _suite(cache: str, *shapes: tuple[str, int, int, int]) -> Suite:
    """Model, sequences, keys, and tokens in a page or 0."""
    words = {}
    for model, batch, seq, size in shapes:
        heads, heads_kv = HEADS[model]
        name = f"{model} b{batch} h{heads}/{heads_kv} s{seq}" + (f" pages of {size}" if size else "")
        words[name] = {"batch": batch, "seq_kv": seq, "heads_q": heads, "heads_kv": heads_kv, "page_size": size}
    op = "decode_attention" if cache == "same" else "decode_attention_fp8"
    return suite(op, partial(DecodeProblem, cache=cache), words)


_LLAMA, _QWEN = HEADS
_DECODE = _suite(
    "same",
    *[(_LLAMA, 32, 4096, 0), (_LLAMA, 32, 4096, 16), (_QWEN, 64, 2048, 0), (_LLAMA, 1, 32768, 0)],
    *[(_QWEN, 1, 1024, 0), (_QWEN, 1, 4096, 0), (_QWEN, 1, 4096, 16)],
)
_FP8_SIZES = ((32, 4096, 0), (32, 4096, 16), (16, 8192, 64), (1, 32768, 0), (1, 131072, 0), (1, 4096, 0))
_FP8 = _suite("fp8_tokens", *[(_LLAMA, *size) for size in _FP8_SIZES], (_QWEN, 64, 2048, 0), (_QWEN, 16, 8192, 64))
_PUBLISHED = suite(
    "decode_attention",
    DecodeProblem,
    {
        f"b{batch} h8 s{seq} d128": {"batch": batch, "seq_kv": seq, "heads_q": 8, "heads_kv": 8}
        for batch, seq in ((1, 512), (1, 1024), (1, 2048), (2, 1024))
    },
)


def _inputs(case: Case, problem: DecodeProblem, device: str, seed: int) -> Inputs:
    """Sequences that fill the cache; pages in a random order."""
    draw = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=draw, device=device, dtype=DTYPES[problem.dtype])
    q = normal((problem.batch, problem.seq_q, problem.heads_q, problem.head_dim))
    lengths = torch.full((problem.batch,), problem.seq_kv, device=device, dtype=torch.int32)
    size = problem.page_size or problem.seq_kv
    each = -(-problem.seq_kv // size)
    k, v = (normal((problem.batch * each, size, problem.heads_kv, problem.head_dim)) for _ in range(2))
    scales: tuple[Tensor | None, ...] = None, None
    if problem.cache == "fp8_tokens":
        (k, k_scale), (v, v_scale) = (token_scales.quantized(t) for t in (k, v))
        scales = token_scales.by_head(k_scale), token_scales.by_head(v_scale)
    table = None
    if problem.page_size:
        order = torch.randperm(problem.batch * each, generator=draw, device=device)
        table = order.view(problem.batch, each).to(torch.int32)
    args = (q, k, v, lengths, table, None, *scales, problem.head_dim**-0.5, 0.0)
    operands = tuple([t for t in (q, k, v, lengths, *scales, table) if t is not None])
    return Inputs(operands, (torch.empty_like(q),), args=args)


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    def bind(i: Inputs) -> Launch:
        q, k, v, lengths, table, _, *scales = i.args[:-2]
        named = dict(zip(("k_scale", "v_scale"), scales, strict=True))
        return partial(decode_attention, q, k, v, lengths, page_table=table, **named, out=i.out, config=config)

    return [bind(i) for i in sets]


def _in_16_bits(case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    """The same numbers in a cache of q's type."""

    def bind(i: Inputs) -> Launch:
        q, k, v, lengths, table, _, *scales = i.args[:-2]
        factors = [token_scales.by_slot(own, k.shape[1], torch.float32) for own in scales]
        wide = [(t.float() * own).to(q.dtype) for t, own in zip((k, v), factors, strict=True)]
        return partial(decode_attention, q, *wide, lengths, page_table=table, out=i.out)

    return [bind(i) for i in sets]


_FLASH = sdpa(SDPBackend.FLASH_ATTENTION)
_SDPA = (sdpa(SDPBackend.CUDNN_ATTENTION), _FLASH, NAIVE)
_OURS: dict[str, Any] = {"inputs": _inputs, "ours": _ours}
WORKLOADS = (
    workload(DECODE_ATTENTION, {"decode": _DECODE, "published": _PUBLISHED}, _SDPA, confined=(_FLASH,), **_OURS),
    workload(
        DECODE_ATTENTION,
        {"fp8": _FP8},
        (Contender("16-bit cache", _in_16_bits),),
        op="decode_attention_fp8",
        poses="decode_attention",
        **_OURS,
    ),
)
