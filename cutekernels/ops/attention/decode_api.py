"""``decode_attention``: the public function over the declaration in ``decode.py``, and its registration with torch."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention import reference, token_scales
from cutekernels.ops.attention.arguments import (
    FOREIGN,
    cap_of,
    check_dtype,
    check_lengths,
    check_pages,
    check_scale,
    check_sinks,
    default_scale,
    number,
    refuse_others,
    sides_of,
    text_of,
)
from cutekernels.ops.attention.cached import CACHE_ATTENTION, CacheAttention, CacheProblem
from cutekernels.ops.attention.calls import canonical, check_heads, dense, implementations, replay
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.decode import (
    DECODE_ATTENTION,
    MOST_QUERIES,
    DecodeAttention,
    DecodeConfig,
    DecodeProblem,
    check_cache_dim,
    check_page_size,
)
from cutekernels.ops.attention.problem import WIDEST, sinks_of
from cutekernels.ops.shared.call_cache import CallCache, empty_copy
from cutekernels.ops.shared.checks import check_flag
from cutekernels.ops.shared.dtypes import DTYPES
from cutekernels.ops.shared.registration import define_with_out, refuse_gradient, splitting

_CALLS = CallCache()
_NAMES = DTYPES.names


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
        single = q.dim() == 3
        queries = q.unsqueeze(1) if single else q
        factor = default_scale(q) if scale is None else scale if type(scale) is float else number("scale", scale)
        cap = 0.0 if softcap is None else cap_of(softcap)
        text = None if config is None else text_of(config, _op_of(queries).Config)
        operands = (queries, k_cache, v_cache, cache_seqlens, page_table, sinks, k_scale, v_scale)
        left = -1 if window is None else sides_of(window, later=False)[0]
        if out is not None and out.shape != q.shape:
            raise UnsupportedProblem(f"out must have q's shape {tuple(q.shape)}; it has {tuple(out.shape)}")
        target = out.unsqueeze(1) if single and out is not None else out
        if check is not False:
            check_flag("decode_attention", "check", check)
            _check_values(operands, factor, left)
        made = replay(_CALLS, target, operands, (left, cap > 0.0, return_lse), (factor, cap), text)
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
        tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens}
        optional = {"page_table": page_table, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "out": out}
        refuse_others("decode_attention", tensors, optional)
        raise


def _check_values(operands: Any, scale: float, left: int) -> None:
    """:func:`check`, and the values of lengths and page table."""
    check(*(*operands, scale))
    q, k, _, lengths, table, *_ = operands
    check_lengths(lengths, room_of(k, table))
    if table is not None:
        check_pages(table, lengths, k.shape[0], k.shape[1], q.shape[1], left)


def check(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None, sinks: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, scale: float,
) -> None:  # fmt: skip
    """Raises UnsupportedProblem for arguments that pose no problem."""
    if q.dim() != 4:
        raise UnsupportedProblem(f"q must be (B, HQ, D) or (B, SQ, HQ, D); its shape is {tuple(q.shape)}")
    form = "(B, T_MAX, HKV, D)" if table is None else "(PAGES, PAGE_SIZE, HKV, D)"
    for name, t in (("k_cache", k), ("v_cache", v)):
        if t.dim() != 4:
            raise UnsupportedProblem(f"{name} must be {form}; its shape is {tuple(t.shape)}")
        if t.dtype not in (q.dtype, torch.float8_e4m3fn) or t.device != q.device:
            raise UnsupportedProblem(
                f"{name} must have q's dtype {q.dtype}, or float8_e4m3fn, and device {q.device}; it has {t.dtype} on "
                f"{t.device}"
            )
    check_dtype("decode_attention", q)
    if k.dtype != v.dtype:
        raise UnsupportedProblem(f"k_cache and v_cache must have one dtype; they have {k.dtype} and {v.dtype}")
    check_heads(q, k, v, "_cache")
    batch, seq_q, _, head_dim = q.shape
    if not seq_q:
        raise UnsupportedProblem("q must have a token of each sequence at least; it has none: skip the call")
    if k.shape[3] != head_dim or (table is None and k.shape[0] != batch):
        raise UnsupportedProblem(
            f"q and k_cache must agree in head dim and batch; their shapes are {tuple(q.shape)} and {tuple(k.shape)}"
            + (": pages need a page_table" if table is None else "")
        )
    check_scale(scale)
    check_cache_dim(_cache_of(k, k_scale), head_dim)
    _check_cache_scale("k_scale", k_scale, k)
    _check_cache_scale("v_scale", v_scale, k)
    if k_scale is not None and v_scale is not None and k_scale.dtype != v_scale.dtype:
        raise UnsupportedProblem(
            f"k_scale and v_scale are both of heads, or both of tokens and heads; they are {k_scale.dtype} and "
            f"{v_scale.dtype}: pass two of one kind"
        )
    if sinks is not None:
        check_sinks(sinks, q)
    _check_index("cache_seqlens", lengths, 1, q)
    if table is not None:
        _check_index("page_table", table, 2, q)
        check_page_size(k.shape[1])


def _cache_of(k: Tensor, k_scale: Tensor | None) -> str:
    """The field ``cache`` of a problem."""
    if k_scale is None or k.dtype != torch.float8_e4m3fn:
        return "same"
    return "fp8_tokens" if k_scale.dtype == torch.uint8 else "fp8"


def _check_cache_scale(name: str, t: Tensor | None, k: Tensor) -> None:
    """Refuses scales of a cache that has none, and a cache in FP8 without them."""
    if (t is None) != (k.dtype != torch.float8_e4m3fn):
        raise UnsupportedProblem(
            f"{name} belongs to a cache in float8_e4m3fn, as uint8 {token_scales.shape(k)}, one for each token and "
            f"head, or fp32 ({k.shape[2]},), one for each head; the cache is {k.dtype}, and {name} is "
            f"{'missing' if t is None else 'given'}"
        )
    if t is not None and t.dtype == torch.uint8:
        token_scales.check(name, t, k)
    elif t is not None and (t.shape != (k.shape[2],) or t.dtype != torch.float32 or t.device != k.device):
        raise UnsupportedProblem(
            f"{name} must be fp32, ({k.shape[2]},), one for each head of the cache, or uint8, "
            f"{token_scales.shape(k)}, one for each token and head, on {k.device}; it is {t.dtype}, "
            f"{tuple(t.shape)}, on {t.device}"
        )


def _check_index(name: str, t: Tensor, rank: int, q: Tensor) -> None:
    if t.dtype != torch.int32 or t.dim() != rank or t.shape[0] != q.shape[0] or t.device != q.device:
        form = f"({q.shape[0]},)" if rank == 1 else f"({q.shape[0]}, MAX_PAGES)"
        raise UnsupportedProblem(
            f"{name} must be int32, {form}, on {q.device}; it is {t.dtype}, {tuple(t.shape)}, on {t.device}"
        )


def _op_of(q: Tensor) -> DecodeAttention | CacheAttention:
    """The op that takes queries ``(B, SQ, HQ, D)``."""
    return DECODE_ATTENTION if q.dim() < 2 or q.shape[1] <= MOST_QUERIES else CACHE_ATTENTION


def pose(
    q: Tensor, k: Tensor, table: Tensor | None, left: int, softcap: float, lse: bool, sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> Any:  # fmt: skip
    """The problem these checked arguments pose."""
    batch, seq_q, heads_q, head_dim = q.shape
    chunk = seq_q > MOST_QUERIES
    kind: Any = CacheProblem if chunk else DecodeProblem
    return kind(
        batch=batch,
        seq_q=seq_q,
        seq_kv=room_of(k, table),
        heads_q=heads_q,
        heads_kv=k.shape[2],
        window_left=max(left, 0),
        head_dim=head_dim,
        dtype=_NAMES[q.dtype],
        window=("left" if left >= 0 else "none") if chunk else left >= 0,
        softcap=softcap > 0.0,
        lse=lse,
        sinks=sinks_of(sinks, q),
        page_size=0 if table is None else k.shape[1],
        cache=_cache_of(k, k_scale),
    )


def room_of(k: Tensor, table: Tensor | None) -> int:
    """Tokens that a sequence may have; none where there is no page."""
    return k.shape[1] if table is None else table.shape[1] * k.shape[1] if k.shape[0] else 0


def readable(t: Tensor) -> bool:
    """Whether kernels read ``t`` where it lies: rows contiguous, 16-byte aligned."""
    widest = 2 * WIDEST // t.element_size() if t.element_size() < 4 else WIDEST
    aligned = all(s % widest == 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1)
    return t.stride(-1) == 1 and aligned and t.data_ptr() % 16 == 0


def _cache(name: str, t: Tensor) -> Tensor:
    """``t`` with strides that kernels take. Raises UnsupportedProblem where only a copy would do."""
    if not readable(t):
        raise UnsupportedProblem(
            f"{name} must have D contiguous and rows 16-byte aligned; its strides are {t.stride()} and it begins "
            f"{t.data_ptr() % 16} bytes behind a multiple of 16: a cache is not copied, allocate it so"
        )
    return _fit(t)


def _fit(t: Tensor) -> Tensor:
    """A readable ``t`` with strides that kernels take: 0 where there is one of something."""
    return t.as_strided(t.shape, (*[0 if n == 1 else s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)], 1))


def _pose(
    out: Tensor, inputs: Any, left: int, softcap: float, return_lse: bool
) -> tuple[Any, Any, list[Tensor | None]]:
    """The op, the problem that checked GPU tensors pose, and what a launch takes for out and inputs."""
    q, k, v, lengths, table, sinks, *scales = inputs
    problem = pose(q, k, table, left, softcap, return_lse, sinks, scales[0])
    target = _fit(out if readable(out) else empty_copy(out))
    indices = lengths.contiguous(), None if table is None else table.contiguous()
    caches = _cache("k_cache", k), _cache("v_cache", v)
    laid: Any = dense
    if problem.cache == "fp8_tokens":
        laid = _fit
        for name, t in zip(("k_scale", "v_scale"), scales, strict=True):
            token_scales.check_aligned(name, t)
    return _op_of(q), problem, [target, canonical(q), *caches, *indices, dense(sinks), *map(laid, scales)]


# ---- torch.library --------------------------------------------------------------------------------------


def _compute(*args: Any) -> tuple[Tensor, Tensor]:
    """The reference, of pages that are there."""
    q, k, v, lengths, table, sinks, k_scale, v_scale, left, scale, softcap = args
    if table is not None:
        check_pages(table, lengths, k.shape[0], k.shape[1], q.shape[1], left)
    seen = lengths.clamp(0, room_of(k, table))  # as the kernel does, which cannot raise
    window = None if left < 0 else left
    return reference.decode(q, k, v, seen, table, sinks, scale, softcap, k_scale, v_scale, left=window)


_cuda, _cpu, _fake = implementations(_CALLS, 1, check, _pose, _compute)
DECODE_PATH = define_with_out(
    "decode_attention",
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? page_table, Tensor? sinks, "
    "Tensor? k_scale, Tensor? v_scale",
    "int window_left, float scale, float softcap, bool return_lse, str? config=None",
    splitting(8, _cuda, _cpu, _fake),
    returns=("(Tensor, Tensor)", "Tensor"),
    autocast="lower",
    kept=(5, 6, 7),
)
