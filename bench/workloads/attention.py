"""Attention of whole prompts: the shapes of the FlashAttention papers, three models' heads, rows others published."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.baselines import Absent, Contender, Inputs, Launch, each, example, launched
from bench.suites import Case, suite
from bench.workloads import parse_case
from bench.workloads.declared import workload
from cutekernels.ops.attention.api import attention
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import AttentionProblem

Words = dict[str, Any]
MODELS = {"llama-3-8b": (32, 8), "qwen2.5-7b": (28, 4), "minfer": (48, 8)}  # heads of q, and of k and v

# ---- cases ----------------------------------------------------------------------------------------------


Shape = tuple[int, int, int, int, int, bool]  # batch, tokens, heads of q, and of k and v, head dim, causal


def problem(shape: Shape, dtype: str, *, mask: bool = False) -> AttentionProblem:
    batch, seq, heads, heads_kv, head_dim, causal = shape
    sizes = batch, seq, seq, heads, heads_kv
    return AttentionProblem(*sizes, head_dim=head_dim, dtype=dtype, causal=causal, mask=mask)


def square(d: int, batch: int, seq: int, causal: bool) -> Shape:
    """2048 channels in all."""
    return batch, seq, 2048 // d, 2048 // d, d, causal


def by_label(*shapes: Shape, before: str = "") -> dict[str, Words]:
    found = {}
    for batch, seq, heads, heads_kv, head_dim, causal in shapes:
        groups = "" if heads == heads_kv else f"/{heads_kv}"
        label = f"{before}b{batch} h{heads}{groups} s{seq} d{head_dim} {'causal' if causal else 'full'}"
        found[label] = {"shape": (batch, seq, heads, heads_kv, head_dim, causal)}
    return found


# 16k tokens in all, as the papers have it, and one long prompt.
PREFILL = by_label(
    *[square(d, 16384 // s, s, causal) for d in (128, 64) for causal in (False, True) for s in (4096, 16384)],
    (4, 2048, 32, 32, 64, True),
    (1, 16384, 32, 8, 128, True),
)
LLM = {
    name: words
    for model, heads in MODELS.items()
    for name, words in by_label(
        *[(batch, seq, *heads, 128, True) for batch, seq in ((1, 512), (1, 2048), (4, 4096))], before=f"{model} "
    ).items()
}
_SMALL = ((1, 1, 512), (1, 1, 1024), (1, 1, 2048), (2, 4, 512))  # batch, heads, tokens
PUBLISHED = by_label(
    *[(batch, seq, heads, heads, 64, causal) for batch, heads, seq in _SMALL for causal in (False, True)],
    *[(4, seq, *MODELS["minfer"], 128, True) for seq in (4096, 8192, 16384)],
)
# Head dims 64, 128 and 256, one to eight prompts, 512 to 32k tokens.
_SQUARES = ((128, 4, 4096), (128, 1, 16384), (64, 4, 4096), (256, 4, 4096), (128, 8, 1024))
HOPPER = by_label(
    *[square(*size, causal) for size in _SQUARES for causal in (False, True)],
    *[(batch, seq, 32, 8, 128, True) for batch, seq in ((1, 1024), (8, 1024), (1, 4096), (1, 32768))],
    (4, 2048, 32, 32, 64, True),
    (8, 512, 32, 32, 64, False),
    (1, 512, 28, 4, 128, True),
    (2, 4096, 16, 16, 256, True),
)
MASKED = {
    f"{label}, bool mask": {**words, "mask": True}
    for label, words in by_label(
        (1, 128, 32, 8, 128, False),
        (8, 512, 16, 16, 64, False),
        (4, 1024, 32, 8, 128, False),
        (2, 1501, 28, 4, 128, False),
        (1, 4096, 32, 8, 128, False),
    ).items()
}


# ---- contenders -----------------------------------------------------------------------------------------


def _ours(case: Case, sets: Sequence[Inputs], config: Any) -> Sequence[Launch]:
    causal = parse_case(case)[1].causal

    def launch(i: Inputs) -> Launch:
        q, k, v, *mask = i.operands
        return partial(attention, q, k, v, causal=causal, mask=mask[0] if mask else None, out=i.out, config=config)

    return list(map(launch, sets))


def sdpa(backend: SDPBackend) -> Contender:
    """torch's ``scaled_dot_product_attention`` by one of its backends, of whole prompts or of tokens over a cache."""

    def make(case: Case) -> Callable[..., Launch]:
        problem = parse_case(case)[1]
        if getattr(problem, "page_size", 0):
            raise Absent("scaled_dot_product_attention takes no pages")
        if backend != SDPBackend.CUDNN_ATTENTION:
            _refuse_masks(problem)
        options = {"is_causal": _causal(problem), "enable_gqa": problem.heads_q != problem.heads_kv}
        masked = getattr(problem, "mask", False)

        def launch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, mask, **options)
            return out.transpose(1, 2)

        return lambda q, k, v, *more: partial(launch, q, k, v, _of_all_heads(more[0]) if masked else None)

    return each(f"torch sdpa {backend.name.removesuffix('_ATTENTION').lower()}", make)


def _of_all_heads(mask: Tensor) -> Tensor:
    """A sampled mask, the same for all heads, as SDPA reads it faster: with one head."""
    return mask[:, :1]


def _refuse_masks(problem: Any) -> None:
    if getattr(problem, "mask", False):
        raise Absent("not for a mask in memory")


def _causal(problem: Any) -> bool:
    return bool(getattr(problem, "causal", False))  # a token sees the whole cache


def _flash_4(case: Case) -> Callable[..., Launch]:
    flash_attn_func = flash_attn_4("flash_attn.cute").flash_attn_func
    problem = parse_case(case)[1]
    _refuse_masks(problem)
    causal = problem.causal

    def launch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(q, k, v, causal=causal)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    return partial(partial, launch)


def flash_attn_4(module: str) -> Any:
    """A module of flash-attn-4, whose import fails in several ways."""
    try:
        return importlib.import_module(module)
    except RuntimeError as error:
        raise Absent(f"flash-attn-4 does not import: {error}") from error


_NAIVE_BYTES = 1 << 30  # of scores, beyond which nobody writes them out


def _naive(case: Case) -> Callable[..., Launch]:
    """Scores, softmax, product: every one written out."""
    problem = parse_case(case)[1]
    shape = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
    if math.prod(shape) * 2 > _NAIVE_BYTES or problem.heads_q != problem.heads_kv or getattr(problem, "page_size", 0):
        raise Absent("not for scores of more than a gigabyte, nor for groups of heads or pages")
    _refuse_masks(problem)
    hidden = _mask(problem, lower=False)

    def launch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-1, -2)) * problem.head_dim**-0.5
        if _causal(problem):
            scores = scores.masked_fill(hidden(q.device), -math.inf)
        return (torch.softmax(scores, -1) @ v).transpose(1, 2)

    return lambda q, k, v, *lengths: partial(launch, q, k, v)


def _mask(problem: Any, *, lower: bool) -> Callable[[torch.device], Tensor]:
    """Masks of a device: the keys a query sees, or those it does not. Made by the first call, which is not timed."""

    @cache
    def mask(device: torch.device) -> Tensor:
        ones = torch.ones((problem.seq_q, problem.seq_kv), dtype=torch.bool, device=device)
        return ones.tril() if lower else ones.triu(1)

    return mask


NAIVE = each("naive", _naive)


def _masked_sdpa(case: Case) -> Callable[..., Launch]:
    """The mask of the problem, or a causal one; K and V are repeated for each head of Q beforehand, as minfer does."""
    problem = parse_case(case)[1]
    if problem.mask == problem.causal or (problem.causal and problem.heads_q == problem.heads_kv):
        raise Absent("for a mask in memory, or causal attention of groups of heads, and not for both")

    def expanded(t: Tensor) -> Tensor:
        return t.repeat_interleave(problem.heads_q // problem.heads_kv, 2).transpose(1, 2)

    def launch(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)

    lower = _mask(problem, lower=True)

    def bind(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Launch:
        seen = _of_all_heads(mask[0]) if mask else lower(q.device)
        return partial(launch, q.transpose(1, 2), expanded(k), expanded(v), seen)

    return bind


def nvidia_example(file: Path) -> Contender:
    """NVIDIA's CuTe DSL example ``ampere/.../flash_attention_v2.py``, from a CUTLASS checkout: mma.sync, as ours is."""
    return Contender("nvidia flash_attention_v2", partial(_nvidia, file))


def _nvidia(file: Path, case: Case, sets: Sequence[Inputs]) -> Sequence[Launch]:
    problem = parse_case(case)[1]
    _refuse_masks(problem)
    if problem.heads_q != problem.heads_kv:
        raise Absent("the example has a head of K and V for each head of Q")
    import cutlass
    from cutlass.cute.runtime import from_dlpack

    def fitted(t: Tensor) -> Any:
        dynamic = from_dlpack(t, assumed_align=16).mark_layout_dynamic(leading_dim=3)
        return dynamic.mark_compact_shape_dynamic(mode=3, stride_order=t.dim_order(), divisibility=8)

    keys = 64 if problem.head_dim == 128 else 128  # of a block; queries and threads as the example has them
    kernel = example(file).FlashAttentionForwardAmpere(problem.head_dim, 128, keys, 128, problem.causal)
    tensors = [[fitted(t) for t in (*i.operands, i.out)] for i in sets]
    return launched(kernel, sets, tensors, cutlass.Float32(problem.head_dim**-0.5))


SUITES = {"prefill": PREFILL, "llm": LLM, "hopper": HOPPER, "published": PUBLISHED, "masked": MASKED}
WORKLOADS = (
    workload(
        ATTENTION,
        {name: suite("attention", problem, shapes) for name, shapes in SUITES.items()},
        (
            sdpa(SDPBackend.FLASH_ATTENTION),
            sdpa(SDPBackend.CUDNN_ATTENTION),
            each("flash-attn-4", _flash_4),
            NAIVE,
            each("torch sdpa, bool mask", _masked_sdpa),
        ),
        ours=_ours,
        example=nvidia_example,
        confined=(sdpa(SDPBackend.FLASH_ATTENTION),),
    ),
)
