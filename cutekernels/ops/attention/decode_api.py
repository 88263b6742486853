"""``decode_attention``: the public function over the declaration in ``decode.py``, and its registration with torch."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention.arguments import (
    FOREIGN,
    cap_of,
    check_scale,
    default_scale,
    number,
    sides_of,
    text_of,
)
from cutekernels.ops.attention.calls import check_values, implementations, replay, tensors_of
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.decode import DECODE_ATTENTION, DecodeConfig
from cutekernels.ops.shared.calls import refuse_others
from cutekernels.ops.shared.checks import check_flag
from cutekernels.ops.shared.registration import define_with_out, refuse_gradient, splitting

_CALLS = DECODE_ATTENTION.calls


class _Options(TypedDict, total=False):
    page_table: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scale: float | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    sinks: Tensor | None
    check: bool
    out: Tensor | None
    config: DecodeConfig | AttentionConfig | str | None


@overload
def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, *, return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip


@overload
def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, *, return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, *, return_lse: bool,
    **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    page_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
    out: Tensor | None = None,
    config: DecodeConfig | AttentionConfig | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``out = softmax(scale * q k^T) v`` of each sequence's last tokens over its cache, in fp32, rounded once.

    The queries' own keys and values are in the cache already, and counted in its length: the last query sees
    ``cache_seqlens`` keys, the one before one less.

    Args:
        q: ``(B, HQ, D)``, or ``(B, SQ, HQ, D)`` with the last SQ tokens of each sequence, fp16 or bf16 (on the CPU
            fp32 too); D a multiple of 8 up to 256. D contiguous and rows 16-byte aligned; anything else costs a copy.
            The decode kernel takes up to 16 tokens, that of :func:`cutekernels.attention` more, as a chunk of a prompt
            has. Where a sequence has fewer than SQ, the first queries see nothing.
        k_cache: ``(B, T_MAX, HKV, D)``, or ``(PAGES, PAGE_SIZE, HKV, D)`` with a page size of 16, 32, 64, 128 or 256;
            dtype of ``q``, or float8_e4m3fn beside its scales; HKV divides HQ. D contiguous and rows 16-byte aligned
            (in FP8, D a multiple of 16), for a cache is not copied.
        v_cache: shape and dtype of ``k_cache``.
        cache_seqlens: int32 ``(B,)``, tokens of each sequence in the cache. Read on the device, so that a captured
            graph is good for any lengths; one above what the cache has room for counts as just that. What a cache
            holds beyond a length is never read. Lengths must not change while a call's kernel runs (on another stream,
            say): CTAs that share a sequence would disagree about it, and may wait for ever.
        page_table: int32 ``(B, MAX_PAGES)``: the page of each ``PAGE_SIZE`` tokens of a sequence. Entries that no query
            sees a token of may be anything. Of the others, the CPU refuses those that name no page; a GPU, where
            values are not looked at, reads some page of the cache instead.
        k_scale: of a cache in FP8: keys are ``k_cache`` times it. A scale of each token and head, as
            :class:`cutekernels.KVCache` writes them, is uint8 ``(B, HKV, T_MAX)`` or ``(PAGES, HKV, PAGE_SIZE)``, the
            last rounded up to a multiple of 16, of which byte ``b`` is ``2^(b - 127)``. Scales of heads alone, as
            other engines have them, are fp32 ``(HKV,)``, above 0. Results are those of such a cache as exactly as of
            one in 16 bits, where its numbers are in the range of q's type.
        v_scale: the same of values.
        scale: factor of ``q k^T``, above 0; ``1 / sqrt(D)`` if left out.
        window: ``(left, None)``: a query sees this many keys before its own. None is no limit.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: ``(HQ,)``, fp32 or of q's dtype: a logit for each query head that takes its share of the softmax and adds
            no value, as in :func:`cutekernels.attention`.
        return_lse: return the rows' log-sum-exp too.
        check: read lengths and page table back from a GPU, and refuse those that the cache has no room or page for.
            The host waits: for debugging, not for graphs.
        out: where to write: shape and dtype of ``q``, memory of its own.
        config: overrides the tuned choice, as a :class:`DecodeConfig`, beyond 16 tokens an :class:`AttentionConfig`, or
            its text. Ignored on the CPU.

    Returns:
        Shape and dtype of ``q``, or ``out``; with ``return_lse`` also fp32 ``(B, HQ)`` or ``(B, HQ, SQ)``. A query that
        sees nothing has 0, and its sink or -inf as lse.

    Raises:
        UnsupportedProblem: a dtype, head dim or page size no kernel takes, mismatched shapes, dtypes or devices, a
            cache whose rows are not aligned, options out of range, an ``out`` that overlaps an input or itself; and in
            the backward pass, which does not exist.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    try:
        if type(return_lse) is not bool:  # keys take 1 for True
            check_flag("decode_attention", "return_lse", return_lse)  # type: ignore[unreachable]
        if q.dim() not in (3, 4):
            raise UnsupportedProblem(f"q must be (B, HQ, D) or (B, SQ, HQ, D); its shape is {tuple(q.shape)}")
        single = q.dim() == 3
        queries = q.unsqueeze(1) if single else q
        factor = default_scale(q) if scale is None else scale if type(scale) is float else number("scale", scale)
        cap = 0.0 if softcap is None else cap_of(softcap)
        operands = (queries, k_cache, v_cache, cache_seqlens, page_table, sinks, k_scale, v_scale)
        text = None if config is None else text_of(config, DECODE_ATTENTION.serving(operands).Config)
        left = -1 if window is None else sides_of(window, later=False)[0]
        options = (left >= 0, max(left, 0), cap > 0.0, return_lse)
        if out is not None and out.shape != q.shape:
            raise UnsupportedProblem(f"out must have q's shape {tuple(q.shape)}; it has {tuple(out.shape)}")
        target = out.unsqueeze(1) if single and out is not None else out
        if check is not False:
            check_flag("decode_attention", "check", check)
            check_values(DECODE_ATTENTION, operands, options, factor)
        made = replay(_CALLS, target, operands, options, (factor, cap), text)
        result: Tensor
        lse: Tensor
        if made is not None:
            result, lse = made[0], made[-1]
        elif target is None:
            arguments = (*operands, left, factor, cap, return_lse, text)
            if torch.compiler.is_compiling():
                result, lse = torch.ops.cutekernels.decode_attention(*arguments)
            else:
                result, lse = DECODE_PATH(*arguments)
        else:
            refuse_gradient(*[t for t in (*operands, target) if t is not None])
            lse = torch.ops.cutekernels.decode_attention_out(*operands, target, left, factor, cap, return_lse, text)
        if out is not None:
            result = out
        elif single:
            result = result.squeeze(1)
        if not return_lse:
            return result
        return result, lse.squeeze(2) if single else lse
    except FOREIGN:
        operands = (q, k_cache, v_cache, cache_seqlens, page_table, sinks, k_scale, v_scale)
        refuse_others(DECODE_ATTENTION, operands, None if out is None else (out,))
        raise


# ---- torch.library --------------------------------------------------------------------------------------


def _split(left: int, scale: float, softcap: float, lse: bool, config: str | None = None) -> tuple[Any, Any, Any]:
    """Options, scalars and config."""
    check_scale(scale)
    return (left >= 0, max(left, 0), softcap > 0.0, lse), (scale, softcap), config


_cuda, _cpu, _fake = implementations(DECODE_ATTENTION, _split)
DECODE_PATH = define_with_out(
    "decode_attention",
    tensors_of(DECODE_ATTENTION),
    "int window_left, float scale, float softcap, bool return_lse, str? config=None",
    splitting(8, _cuda, _cpu, _fake),
    returns=("(Tensor, Tensor)", "Tensor"),
    autocast="lower",
    kept=(5, 6, 7),
)
