"""``attention`` and ``decode_attention``: public functions over the declarations, and their registration with torch."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention.calls import (
    FOREIGN,
    LIMITS,
    NO_WINDOW,
    cap_of,
    check_scale,
    check_values,
    default_scale,
    number,
    replay,
    sides_of,
    tensors_of,
    window_of,
)
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.decode import DECODE_ATTENTION, DecodeConfig
from cutekernels.ops.attention.gradient import BACKWARD_PATH
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.shared.calls import define_with_out, implementations, refuse_others, text_of
from cutekernels.ops.shared.checks import check_flag
from cutekernels.ops.shared.paths import refuse_gradient, transformed

_CALLS = ATTENTION.calls
_is_compiling = torch.compiler.is_compiling


class _Options(TypedDict, total=False):
    causal: bool
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    mask: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    sinks: Tensor | None
    check: bool
    out: Tensor | None
    config: AttentionConfig | str | None


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[_Options]
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
    out: Tensor | None = None,
    config: AttentionConfig | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``out = softmax(scale * q k^T + mask) v``, head by head, in fp32, rounded once.

    Differentiable once in q, k, v and sinks, with every option; gradients are deterministic: the same bits each time.

    Args:
        q: ``(B, SQ, HQ, D)``, fp16 or bf16 (on the CPU fp32 too); D a multiple of 8 up to 256. D contiguous and rows
            16-byte aligned, as slices of a fused projection are; anything else costs a copy. With ``cu_seqlens``,
            ``(TOTAL_Q, HQ, D)``.
        k: ``(B, SKV, HKV, D)``, dtype of ``q``; HKV divides HQ, and ``HQ / HKV`` query heads in a row share a head of
            k and v. With ``cu_seqlens``, ``(TOTAL_KV, HKV, D)``.
        v: shape and dtype of ``k``.
        causal: a query sees no later keys, where the *last* query is aligned with the last key.
        window: ``(left, right)``: a query sees this many keys before and behind its own; None is no limit.
        scale: factor of ``q k^T``, above 0; ``1 / sqrt(D)`` if left out.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        mask: bool ``(B or 1, HQ or 1, SQ, SKV)``, True where a query sees a key. Not with ``cu_seqlens``.
        cu_seqlens_q: int32 ``(sequences + 1,)``, where varlen sequences begin and end: ``[0, ..., TOTAL_Q]``, never
            falling. The CPU refuses other values. A GPU's are not looked at: kernels clamp them to the tensors, and
            rows of no sequence are queries that see nothing.
        cu_seqlens_kv: likewise for k and v.
        sinks: ``(HQ,)``, fp32 or of q's dtype, as gpt-oss has them: a logit for each query head that takes its share of
            the softmax and adds no value, ``out = sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j))``. Neither scale
            nor softcap touches it; -inf is none. The log-sum-exp has it in it.
        return_lse: return the rows' log-sum-exp too.
        check: read ``cu_seqlens`` back from a GPU and refuse wrong values. The host waits: for debugging, not for
            graphs.
        out: where to write: shape and dtype of ``q``, memory of its own. Not differentiable.
        config: overrides the tuned choice, as an :class:`AttentionConfig` or its text. Ignored on the CPU.

    Returns:
        Shape and dtype of ``q``, or ``out``; with ``return_lse`` also fp32 ``(B, HQ, SQ)`` or ``(HQ, TOTAL_Q)``. A
        query that sees nothing has 0, and its sink or -inf as lse.

    Raises:
        UnsupportedProblem: a dtype or head dim no kernel takes, mismatched shapes, dtypes or devices, options out of
            range, an ``out`` that overlaps an input or itself.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    try:
        if type(causal) is not bool or type(return_lse) is not bool:  # keys take 1 for True
            check_flag("attention", "causal", causal)  # type: ignore[unreachable]
            check_flag("attention", "return_lse", return_lse)
        left, right = (-1, -1) if window is None else sides_of(window)
        if causal:
            right = -1
        factor = default_scale(q) if scale is None else scale if type(scale) is float else number("scale", scale)
        cap = 0.0 if softcap is None else cap_of(softcap)
        text = text_of(config, AttentionConfig)
        operands = (q, k, v, mask, cu_seqlens_q, cu_seqlens_kv, sinks)
        seen = NO_WINDOW if window is None else (LIMITS[left >= 0, right >= 0], max(left, 0), max(right, 0))
        options = (causal, *seen, cap > 0.0, return_lse)
        if check is not False:
            check_flag("attention", "check", check)
            check_values(ATTENTION, operands, options, factor)
        made = replay(_CALLS, out, operands, options, (factor, cap), text)
        if made is not None:
            return made if return_lse else made[0]  # type: ignore[return-value]
        leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
        differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
        if out is None:
            # The gradients start from the log-sum-exp. A transform's tensors do not say whether theirs are wanted.
            needed = differentiates or (torch.is_grad_enabled() and transformed())
            arguments = (*operands, causal, left, right, factor, cap, return_lse or needed, text)
            if _is_compiling():
                result, lse = torch.ops.cutekernels.attention(*arguments)
            else:
                result, lse = ATTENTION_PATH(*arguments)
            return (result, lse) if return_lse else result
        if differentiates or (torch.is_grad_enabled() and out.requires_grad):
            raise UnsupportedProblem("out= is not differentiable: leave it out, or call under torch.no_grad()")
        lse = torch.ops.cutekernels.attention_out(*operands, out, causal, left, right, factor, cap, return_lse, text)
        return (out, lse) if return_lse else out
    except FOREIGN:
        operands = (q, k, v, mask, cu_seqlens_q, cu_seqlens_kv, sinks)
        refuse_others(ATTENTION, operands, None if out is None else (out,))
        raise


class _DecodeOptions(TypedDict, total=False):
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
    **options: Unpack[_DecodeOptions],
) -> Tensor: ...  # fmt: skip


@overload
def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, *, return_lse: Literal[True],
    **options: Unpack[_DecodeOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, *, return_lse: bool,
    **options: Unpack[_DecodeOptions],
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
        text = text_of(config, DECODE_ATTENTION.serving(operands).Config)
        left = -1 if window is None else sides_of(window, later=False)[0]
        options = (left >= 0, max(left, 0), cap > 0.0, return_lse)
        if out is not None and out.shape != q.shape:
            raise UnsupportedProblem(f"out must have q's shape {tuple(q.shape)}; it has {tuple(out.shape)}")
        target = out.unsqueeze(1) if single and out is not None else out
        if check is not False:
            check_flag("decode_attention", "check", check)
            check_values(DECODE_ATTENTION, operands, options, factor)
        made = replay(DECODE_ATTENTION.calls, target, operands, options, (factor, cap), text)
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


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, cu_q, cu_kv, sinks, *options = inputs
    ctx.save_for_backward(q, k, v, *output, mask, cu_q, cu_kv, sinks)
    ctx.options, ctx.lse_given = options[:5], options[5]
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *rest, sinks = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 14
    if not ctx.lse_given:
        raise UnsupportedProblem("the gradients of attention start from its lse: call the op with return_lse=True")
    dout = torch.zeros_like(out) if dout is None else dout
    *grads, dsinks = BACKWARD_PATH(dout, dlse, q, k, v, out, lse, *rest, sinks, *ctx.options, None)
    return *grads, None, None, None, None if sinks is None else dsinks, *(None,) * 7


def _read(
    causal: bool, left: int, right: int, scale: float, softcap: float, lse: bool, config: str | None = None
) -> tuple[Any, Any, Any]:
    """Options, scalars and config."""
    check_scale(scale)
    return (causal, *window_of(left, right), softcap > 0.0, lse), (scale, softcap), config


ATTENTION_PATH = define_with_out(
    "attention",
    tensors_of(ATTENTION),
    "bool causal, int window_left, int window_right, float scale, float softcap, bool return_lse, str? config=None",
    partial(implementations, ATTENTION, read=_read),
    returns=("(Tensor, Tensor)", "Tensor"),
    gradient=_gradient,
    remember=_remember,
    autocast="lower",
    kept=(6,),
)


def _read_decode(left: int, scale: float, softcap: float, lse: bool, config: str | None = None) -> tuple[Any, Any, Any]:
    """Options, scalars and config."""
    check_scale(scale)
    return (left >= 0, max(left, 0), softcap > 0.0, lse), (scale, softcap), config


DECODE_PATH = define_with_out(
    "decode_attention",
    tensors_of(DECODE_ATTENTION),
    "int window_left, float scale, float softcap, bool return_lse, str? config=None",
    partial(implementations, DECODE_ATTENTION, read=_read_decode),
    returns=("(Tensor, Tensor)", "Tensor"),
    autocast="lower",
    kept=(5, 6, 7),
)
