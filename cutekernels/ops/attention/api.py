"""``attention``: the public function over the declaration in ``op.py``, and its registration with torch."""

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
from cutekernels.ops.attention.calls import (
    LIMITS,
    NO_WINDOW,
    check_values,
    implementations,
    replay,
    tensors_of,
    window_of,
)
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.gradient import BACKWARD_PATH
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.shared.calls import refuse_others
from cutekernels.ops.shared.checks import check_flag
from cutekernels.ops.shared.registration import define_with_out, splitting, transformed

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
        text = None if config is None else text_of(config, AttentionConfig)
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


def _split(
    causal: bool, left: int, right: int, scale: float, softcap: float, lse: bool, config: str | None = None
) -> tuple[Any, Any, Any]:
    """Options, scalars and config."""
    check_scale(scale)
    return (causal, *window_of(left, right), softcap > 0.0, lse), (scale, softcap), config


_cuda, _cpu, _fake = implementations(ATTENTION, _split)
ATTENTION_PATH = define_with_out(
    "attention",
    tensors_of(ATTENTION),
    "bool causal, int window_left, int window_right, float scale, float softcap, bool return_lse, str? config=None",
    splitting(7, _cuda, _cpu, _fake),
    returns=("(Tensor, Tensor)", "Tensor"),
    gradient=_gradient,
    remember=_remember,
    autocast="lower",
    kept=(6,),
)
