"""``attention``: the public function over the declaration in ``op.py``, and its registration with torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from cutekernels import dispatch
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention import reference
from cutekernels.ops.attention.arguments import (
    FOREIGN,
    cap_of,
    check_dtype,
    check_ends,
    check_flags,
    check_scale,
    check_sinks,
    default_scale,
    number,
    refuse_others,
    sides_of,
    text_of,
)
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import DTYPES, WIDEST, AttentionProblem, sinks_of
from cutekernels.ops.shared.call_cache import Call, CallCache, Inputs, empty_copy, stand_ins
from cutekernels.ops.shared.registration import Path, define_with_out, direct, transformed
from cutekernels.ops.shared.strides import overlaps_itself, pairs, relation

_CALLS = CallCache()
ATTENTION_PATH: Path
GRADIENT_PATH: list[Path] = []  # one, which gradient.py adds
_is_compiling = torch.compiler.is_compiling
_autocast = torch._C._is_any_autocast_enabled
_function_modes = torch._C._len_torch_function_stack
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WIDEST_HEAD = 256
_MOST_ROW_STRIDE = 2**23  # elements; a tile's offsets have 32 bits


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
        cu_seqlens_q: int32 ``(sequences + 1,)``, where packed sequences begin and end: ``[0, ..., TOTAL_Q]``, never
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
        left, right = (-1, -1) if window is None else sides_of(window)
        if causal:
            right = -1
        factor = default_scale(q) if scale is None else scale if type(scale) is float else number("scale", scale)
        cap = 0.0 if softcap is None else cap_of(softcap)
        text = None if config is None else text_of(config, AttentionConfig)
        operands = (q, k, v, mask, cu_seqlens_q, cu_seqlens_kv, sinks)
        if check is not False:
            check_flags("attention", check=check)
            _check_values(*operands, factor)
        made = replayed(_CALLS, out, operands, (causal, left, right, cap > 0.0, return_lse), (factor, cap), text)
        if made is not None:
            return made if return_lse else made[0]  # type: ignore[return-value]
        check_flags("attention", causal=causal, return_lse=return_lse)
        leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
        differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
        if out is None:
            # The gradients start from the log-sum-exp. A transform's tensors do not say whether theirs are wanted.
            needed = differentiates or (torch.is_grad_enabled() and transformed())
            options = (causal, left, right, factor, cap, return_lse or needed, text)
            if _is_compiling():
                result, lse = torch.ops.cutekernels.attention(*operands, *options)
            else:
                result, lse = ATTENTION_PATH(*operands, *options)
            return (result, lse) if return_lse else result
        if differentiates or (torch.is_grad_enabled() and out.requires_grad):
            raise UnsupportedProblem("out= is not differentiable: leave it out, or call under torch.no_grad()")
        lse = torch.ops.cutekernels.attention_out(*operands, out, causal, left, right, factor, cap, return_lse, text)
        return (out, lse) if return_lse else out
    except FOREIGN:
        given = {"mask": mask, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv, "sinks": sinks, "out": out}
        refuse_others("attention", {"q": q, "k": k, "v": v}, given)
        raise


def replayed(
    calls: CallCache, out: Tensor | None, operands: Inputs, options: tuple[object, ...],
    scalars: tuple[float, float], config: str | None,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """``(out[, lse])`` of a call that repeats one; None, and nothing was done, where it must go through torch.

    ``scalars`` are scale and softcap, of which the caller has checked the second.
    """
    if _is_compiling() or _function_modes() or _autocast() or not 0.0 < scalars[0] < math.inf:
        return None
    if type(operands[0]) is not Tensor:  # a fake's address is not to be read
        return None
    results = None if out is None else (out,)
    made = calls.replay(results, operands, options, scalars, config)
    if made is None and direct(*operands, out):
        made = calls.recall(results, operands, options, scalars, config)
    return made


def _check_values(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_q: Tensor | None, cu_kv: Tensor | None,
    sinks: Tensor | None, scale: float,
) -> None:  # fmt: skip
    """:func:`check`, and the values of the sequences' ends."""
    check(q, k, v, mask, cu_q, cu_kv, scale, sinks)
    if cu_q is not None and cu_kv is not None:
        check_ends(q, k, cu_q, cu_kv)


def check(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_q: Tensor | None, cu_kv: Tensor | None, scale: float,
    sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Raises UnsupportedProblem for arguments that pose no problem."""
    packed = cu_q is not None or cu_kv is not None
    rank, form = (3, "(TOTAL, H, D)") if packed else (4, "(B, S, H, D)")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != rank:
            raise UnsupportedProblem(
                f"{name} must be {form}; its shape is {tuple(t.shape)}"
                + ("" if packed else ": packed sequences need cu_seqlens_q and cu_seqlens_kv")
            )
        if t.dtype != q.dtype or t.device != q.device:
            raise UnsupportedProblem(
                f"{name} must have q's dtype {q.dtype} and device {q.device}; it has {t.dtype} on {t.device}"
            )
    check_dtype("attention", q)
    if k.shape != v.shape:
        raise UnsupportedProblem(
            f"k and v must have one shape; they have {tuple(k.shape)} and {tuple(v.shape)}: where v's heads are "
            "narrower (DeepSeek's v_head_dim), pad them with zeros and drop those channels of the result"
        )
    head_dim = q.shape[-1]
    if k.shape[-1] != head_dim or (not packed and k.shape[0] != q.shape[0]):
        raise UnsupportedProblem(
            f"q and k must agree in head dim and batch; their shapes are {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if head_dim % WIDEST or not 0 < head_dim <= _WIDEST_HEAD:
        raise UnsupportedProblem(f"q's head dim must be a multiple of {WIDEST} up to {_WIDEST_HEAD}; it is {head_dim}")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_kv == 0 or heads_q % heads_kv:
        raise UnsupportedProblem(f"k's {heads_kv} heads must divide q's {heads_q}")
    check_scale(scale)
    if sinks is not None:
        check_sinks(sinks, q)
    if mask is not None:
        if packed:
            raise UnsupportedProblem("mask is for a batch of one length: packed sequences take none")
        wanted = (q.shape[0], heads_q, q.shape[1], k.shape[1])
        fits = mask.dim() == 4 and all(
            n == w or (n == 1 and i < 2) for i, (n, w) in enumerate(zip(mask.shape, wanted, strict=True))
        )
        if mask.dtype != torch.bool or mask.device != q.device or not fits:
            raise UnsupportedProblem(
                f"mask must be bool, (B or 1, HQ or 1, SQ, SKV) of {wanted}, on {q.device}; it is {mask.dtype}, "
                f"{tuple(mask.shape)}, on {mask.device}"
            )
    if packed:
        if cu_q is None or cu_kv is None:
            raise UnsupportedProblem("packed sequences need both cu_seqlens_q and cu_seqlens_kv; one is missing")
        for name, t in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
            if t.dtype != torch.int32 or t.dim() != 1 or t.shape != cu_q.shape or t.device != q.device or not len(t):
                raise UnsupportedProblem(
                    f"{name} must be int32, (sequences + 1,), of one length with the other, on {q.device}; it is "
                    f"{t.dtype}, {tuple(t.shape)}, on {t.device}"
                )
        if len(cu_q) == 1 and q.shape[0]:
            raise UnsupportedProblem(f"cu_seqlens_q of length 1 has no sequence, yet q has {q.shape[0]} rows")


def check_out(out: Tensor, q: Tensor, *inputs: Tensor | None) -> None:
    """Refuses an ``out`` that is not as ``q`` or shares memory with an input."""
    check_out_shape(out, q)
    if overlaps_itself(out):
        raise UnsupportedProblem(f"out must not overlap itself; its strides are {out.stride()}: give it dense memory")
    if any(t is not None and relation(out, t) != "apart" for t in (q, *inputs)):
        raise UnsupportedProblem("out overlaps an input: give it memory of its own")


def check_out_shape(out: Tensor, q: Tensor) -> None:
    """:func:`check_out` of fakes, which have no memory."""
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        raise UnsupportedProblem(
            f"out must be {tuple(q.shape)}, {q.dtype}, on {q.device}; it is {tuple(out.shape)}, {out.dtype}, "
            f"on {out.device}"
        )


def pose(
    q: Tensor, k: Tensor, mask: Tensor | None, cu_q: Tensor | None,
    causal: bool, left: int, right: int, softcap: float, lse: bool, sinks: Tensor | None = None,
) -> AttentionProblem:  # fmt: skip
    """The problem these checked arguments pose."""
    if cu_q is None:
        batch, seq_q, seq_kv = q.shape[0], q.shape[1], k.shape[1]
    else:
        batch = cu_q.shape[0] - 1
        seq_q, seq_kv = (-(-t.shape[0] // max(1, batch)) for t in (q, k))
    limits = {(False, False): "none", (True, False): "left", (False, True): "right", (True, True): "both"}
    return AttentionProblem(
        batch=batch,
        seq_q=seq_q,
        seq_kv=seq_kv,
        heads_q=q.shape[-2],
        heads_kv=k.shape[-2],
        window_left=max(left, 0),
        window_right=max(right, 0),
        head_dim=q.shape[-1],
        dtype=_NAMES[q.dtype],
        causal=causal,
        window=limits[left >= 0, right >= 0],
        softcap=softcap > 0.0,
        mask=mask is not None,
        varlen=cu_q is not None,
        lse=lse,
        sinks=sinks_of(sinks, q),
    )


def canonical(t: Tensor) -> Tensor:
    """``t`` itself where its rows are contiguous and aligned; else a view or a copy of which that is true."""
    strides = [0 if n == 1 else s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    aligned = all(s % WIDEST == 0 for s in strides) and t.data_ptr() % 16 == 0
    if t.stride(-1) != 1 or not aligned or strides[-2] >= _MOST_ROW_STRIDE:
        return t.clone(memory_format=torch.contiguous_format)
    return t if (*strides, 1) == t.stride() else t.as_strided(t.shape, (*strides, 1))


def dense(sinks: Tensor | None) -> Tensor | None:
    """``sinks`` with a stride of 1, even where there is one of them."""
    return None if sinks is None else sinks.contiguous().as_strided(sinks.shape, (1,))


def _launched(
    into: Tensor | None, operands: tuple[Any, ...], causal: bool, left: int, right: int, scale: float, softcap: float,
    return_lse: bool, config: str | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Poses, plans and launches for checked GPU tensors: ``(into or a new tensor[, lse])``."""
    q, k, v, mask, cu_q, cu_kv, sinks = operands
    out = q.new_empty(q.shape) if into is None else into
    more = (fresh_lse(q, cu_q, True),) if return_lse else ()
    if out.numel() == 0:
        return out, *more
    with torch.cuda.device(q.device):
        problem = pose(q, k, mask, cu_q, causal, left, right, softcap, return_lse, sinks)
        launch = dispatch.plan(ATTENTION, problem, q.get_device(), config).launch
        target = canonical(out) if _is_canonical(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
        if mask is not None:
            mask = mask.expand(q.shape[0], q.shape[2], -1, -1)
        ends = [None if t is None else t.contiguous() for t in (cu_q, cu_kv)]
        posed = (canonical(q), canonical(k), canonical(v), mask, *ends, dense(sinks))
    options = (causal, left, right, softcap > 0.0, return_lse)
    return add(_CALLS, launch, into, operands, options, (scale, softcap), config, (out, *more), (target, *more, *posed))


def add(
    calls: CallCache, launch: Callable[..., None], into: Tensor | None, operands: Inputs, options: tuple[object, ...],
    scalars: tuple[float, float], config: str | None, results: tuple[Tensor, ...], posed: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Makes and caches the call in which ``launch`` takes ``posed`` for ``(*results, *operands)``."""
    ways = [way(t, p, i == 0) for i, (t, p) in enumerate(zip((*results, *operands), posed, strict=True))]
    copied = [] if posed[0] is None or posed[0].data_ptr() == results[0].data_ptr() else [0]
    apart = () if into is None else pairs(1, (into, *operands))
    call = Call.of(stand_ins(launch, ways, copied), operands, results[into is not None :], apart)
    return calls.add(call, None if into is None else (into,), operands, options, scalars, config)


def way(t: Tensor | None, posed: Tensor | None, result: bool = False) -> Callable[[Tensor], Tensor] | None:
    """The function from ``t`` to ``posed``: None for itself, a view that begins where it does, or a contiguous copy."""
    if t is None or posed is None or posed is t:
        return None
    shape, strides = tuple(posed.shape), posed.stride()
    if posed.data_ptr() != t.data_ptr():
        if result:
            return lambda t: empty_copy(t).as_strided(shape, strides)
        return partial(torch.clone, memory_format=torch.contiguous_format)
    return None if (shape, strides) == (t.shape, t.stride()) else lambda t: t.as_strided(shape, strides)


def _is_canonical(t: Tensor) -> bool:
    """Whether :func:`canonical` gives a view."""
    aligned = all(s % WIDEST == 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n != 1)
    wide = t.shape[-3] != 1 and t.stride(-3) >= _MOST_ROW_STRIDE
    return t.stride(-1) == 1 and aligned and not wide and t.data_ptr() % 16 == 0


def fresh_lse(q: Tensor, cu_q: Tensor | None, wanted: bool) -> Tensor:
    kind = torch.promote_types(q.dtype, torch.float32)
    if not wanted:
        return q.new_empty((0,), dtype=kind)
    shape = (q.shape[0], q.shape[2], q.shape[1]) if cu_q is None else (q.shape[1], q.shape[0])
    return q.new_empty(shape, dtype=kind)


# ---- torch.library --------------------------------------------------------------------------------------


def register(library: torch.library.Library) -> None:
    """Defines the ops in ``library`` (namespace "cutekernels"): schemas, GPU and CPU, fakes, autograd."""
    inputs = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? sinks"
    options = (
        "bool causal, int window_left, int window_right, float scale, float softcap, bool return_lse, str? config=None"
    )
    global ATTENTION_PATH
    ATTENTION_PATH = define_with_out(
        library,
        "attention",
        inputs,
        options,
        (_cuda, _cpu, _fake),
        returns=("(Tensor, Tensor)", "Tensor"),
        gradient=_gradient,
        remember=_remember,
        autocast="lower",
        kept=(6,),
    )


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
    *grads, dsinks = GRADIENT_PATH[0](dout, dlse, q, k, v, out, lse, *rest, sinks, *ctx.options, None)
    return *grads, None, None, None, None if sinks is None else dsinks, *(None,) * 7


def _cuda(results: tuple[Tensor] | None, inputs: tuple[Any, ...], *options: Any) -> Any:
    causal, left, right, scale, softcap, return_lse, *forced = options
    config = forced[0] if forced else None
    key = (causal, left, right, softcap > 0.0, return_lse)
    made = None
    if 0.0 < scale < math.inf:  # keys do not hold it
        given = results, inputs, key, (scale, softcap), config
        made = _CALLS.replay(*given) or _CALLS.recall(*given)
    if made is None:
        check(*(*inputs[:6], scale, inputs[6]))
        if results is not None:
            check_out(results[0], *inputs[:4], inputs[6])
        made = _launched(*(results and results[0], inputs, *options[:6], config))
    lse = made[1] if return_lse else fresh_lse(inputs[0], inputs[4], False)
    return (made[0], lse) if results is None else lse


def _cpu(results: tuple[Tensor] | None, inputs: tuple[Any, ...], *options: Any) -> Any:
    q, k, v, mask, cu_q, cu_kv, sinks = inputs
    causal, left, right, scale, softcap, return_lse = options[:6]
    _check_values(*(*inputs, scale))
    if results is not None:
        check_out(results[0], *inputs[:4], sinks)
    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[2], -1, -1)
    reach = 0 if causal else right
    out, lse = reference.attention(
        q, k, v, mask, cu_q, cu_kv, sinks, scale, softcap,
        left=None if left < 0 else left, right=None if reach < 0 else reach,
    )  # fmt: skip
    lse = lse if return_lse else fresh_lse(q, cu_q, False)
    if results is None:
        return out, lse
    results[0].copy_(out)
    return lse


def _fake(results: tuple[Tensor] | None, inputs: tuple[Any, ...], *options: Any) -> Any:
    q = inputs[0]
    check(*(*inputs[:6], options[3], inputs[6]))
    lse = fresh_lse(q, inputs[4], options[5])
    if results is None:
        return q.new_empty(q.shape), lse
    check_out_shape(results[0], q)
    return lse
