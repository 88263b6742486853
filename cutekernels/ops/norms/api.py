"""``rms_norm``, ``add_rms_norm`` and ``layer_norm``: public functions and their registration with torch.

Backward saves only tensors that exist anyway. ``rstd`` is recomputed from ``x``, which a gradient reads in any case.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.norms.gradients import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from cutekernels.ops.norms.op import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from cutekernels.ops.norms.rows import NormConfig
from cutekernels.ops.shared.calls import call, register
from cutekernels.ops.shared.checks import INFINITE, check_eps, check_number
from cutekernels.ops.shared.paths import Path

_traced = torch.compiler.is_dynamo_compiling


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    rounding: Literal["once", "huggingface"] = "once",
    out: Tensor | None = None,
    config: NormConfig | str | None = None,
) -> Tensor:
    """``y = x * rstd * (weight + weight_offset)`` with ``rstd = 1 / sqrt(mean(x^2) + eps)`` over the last dimension.

    In fp32 (fp64 inputs, on the CPU, in fp64), rounded once.

    Args:
        x: ``(..., N)``, fp16, bf16 or fp32 (on the CPU fp64 too). Any strides: rows whose elements are contiguous are
            fast, slices of a joint projection included. Where no single stride walks the dimensions before the last
            two, a contiguous copy is made.
        weight: ``(N,)``, or ``(H, N)`` for an ``x`` of ``(..., H, N)``, a row for each head; dtype of ``x`` or
            fp32. None for ones; ``weight_offset`` is then not used.
        eps: added to the mean of squares.
        weight_offset: 1.0 for Gemma's weights, which are stored less one.
        rounding: ``"once"``, or ``"huggingface"`` to round ``x * rstd`` to the type of ``x`` before it is multiplied
            by the weight, as ``LlamaRMSNorm`` does. Gradients are the same for both.
        out: where to write: shape, dtype and device of ``x``, any strides. It may be ``x`` itself; any
            other overlap is refused. Not differentiable.
        config: overrides the tuned choice, as a :class:`NormConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., N)``, dtype of ``x`` whatever the weight's, contiguous, or ``out``. Differentiable in ``x`` and
        ``weight``, once; the gradient of ``weight`` is summed in fp32 in a fixed order.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched shapes, dtypes or devices, an ``out`` that
            overlaps an operand or itself, ``out`` together with gradients.
        InvalidConfig: ``config`` breaks a rule of the op.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    try:
        fits = 0.0 <= eps < 3e38 and -3e38 < weight_offset < 3e38
    except (TypeError, RuntimeError, ArithmeticError):
        fits = False
    if not fits:
        check_eps("rms_norm", eps)
        check_number("rms_norm", "weight_offset", weight_offset)
    options, scalars = (rounding, True if weight_offset else False), (eps, weight_offset)  # noqa: SIM210  bool() of a traced float is traced
    return call(RMS_NORM, (x, weight), options, scalars, config=config, out=None if out is None else (out,))[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    rounding: Literal["once", "huggingface"] = "once",
    config: NormConfig | str | None = None,
) -> tuple[Tensor, Tensor]:
    """``u = x + residual`` and ``y = rms_norm(u, weight)``, in one pass: a transformer block's residual and next norm.

    ``u`` is rounded to its type, and ``y`` is the norm of that rounded ``u``: what the two steps give one by one.

    Args:
        x: ``(..., N)``, fp16, bf16 or fp32 (on the CPU fp64 too), any strides, as in :func:`rms_norm`.
        residual: shape, dtype and device of ``x``; nothing is broadcast or cast.
        weight: ``(N,)`` or ``(H, N)``, dtype of ``x`` or fp32, or None, as in :func:`rms_norm`.
        eps: added to the mean of squares.
        weight_offset: as in :func:`rms_norm`.
        rounding: as in :func:`rms_norm`.
        config: overrides the tuned choice, as a :class:`NormConfig` or its text. Ignored on the CPU.

    Returns:
        ``(y, u)``, both ``(..., N)`` and contiguous, dtype of ``x``. Differentiable in ``x``, ``residual`` and
        ``weight``, once, through both results.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched shapes, dtypes or devices.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    try:
        fits = 0.0 <= eps < 3e38 and -3e38 < weight_offset < 3e38
    except (TypeError, RuntimeError, ArithmeticError):
        fits = False
    if not fits:
        check_eps("add_rms_norm", eps)
        check_number("add_rms_norm", "weight_offset", weight_offset)
    options, scalars = (rounding, True if weight_offset else False), (eps, weight_offset)  # noqa: SIM210  bool() of a traced float is traced
    y, u = call(ADD_RMS_NORM, (x, residual, weight), options, scalars, config=config)
    return y, u


def rms_norm_beside(x: Tensor, weight: Tensor | None, *, eps: float, weight_offset: float, rounding: str) -> Any:
    """``(rms_norm(x), x)`` for a residual: the gradients of both are added in the norm's backward pass."""
    options = rounding, weight_offset != 0.0, eps, weight_offset, None
    return torch.ops.cutekernels.rms_norm_beside(x, weight, *options) if _traced() else _BESIDE(x, weight, *options)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    config: NormConfig | str | None = None,
) -> Tensor:
    """``y = (x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension, ``var`` biased as in PyTorch.

    The mean is subtracted before squares are summed. In fp32 (fp64 inputs, on the CPU, in fp64), rounded once.

    Args:
        x: ``(..., N)``, fp16, bf16 or fp32 (on the CPU fp64 too), any strides, as in :func:`rms_norm`.
        weight: ``(N,)`` or ``(H, N)``, dtype of ``x`` or fp32, or None for ones.
        bias: shape of ``weight``, dtype of ``x`` or fp32, or None for zeros.
        eps: added to the variance.
        config: overrides the tuned choice, as a :class:`NormConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., N)``, dtype of ``x``, contiguous. Differentiable in ``x``, ``weight`` and ``bias``, once; the gradients
        of ``weight`` and ``bias`` are summed in fp32 in a fixed order.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched shapes, dtypes or devices.
        InvalidConfig: ``config`` breaks a rule of the op.

    Source: Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450.
    """
    if type(eps) is not float or not 0.0 <= eps < INFINITE:
        check_eps("layer_norm", eps)
    return call(LAYER_NORM, (x, weight, bias), scalars=(eps,), config=config)[0]


# ---- torch.library --------------------------------------------------------------------------------------


def _add_then_norm(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if x.shape != residual.shape or not (x.is_floating_point() and residual.is_floating_point()):
        raise UnsupportedProblem(
            f"add_rms_norm takes a residual of x's shape {tuple(x.shape)} and floating-point types; got "
            f"{tuple(residual.shape)}, {residual.dtype} beside {x.dtype}"
        )
    u = x + residual  # the sum promotes its operands, and the norm has a rule of its own
    return RMS_NORM.path(u, *rest), u


def _norm_beside(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return RMS_NORM.path(x, *rest), x.view_as(x)  # no Function saves an input that it returns


def _remember_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, Tensor]) -> None:
    if len(inputs) == 7:  # x, weight, rounding, offset, eps, weight_offset, config
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.summands = 1
    else:
        ctx.save_for_backward(output[1], inputs[2])
        ctx.summands = 2
    ctx.set_materialize_grads(False)
    ctx.scalars = inputs[-3:-1]


def _rms_norm_gradient(ctx: Any, dy: Tensor | None, du: Tensor | None = None) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx, dweight, wanted = du, None, weight is not None and ctx.needs_input_grad[ctx.summands]
    if dy is not None:
        dx, dweight = RMS_NORM_BACKWARD.path(dy, x, weight, du, wanted, *ctx.scalars, None)
    return *[dx] * ctx.summands, dweight if wanted else None, *[None] * 5


def _remember_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, eps, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias = "none" if bias is None else "same" if bias.dtype == x.dtype else "fp32"
    ctx.eps = eps


def _layer_norm_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wanted = weight is not None and ctx.needs_input_grad[1]
    bias = ctx.bias if ctx.needs_input_grad[2] else "none"
    dx, dweight, dbias = LAYER_NORM_BACKWARD.path(dy, x, weight, wanted, bias, ctx.eps, None)
    return dx, dweight if wanted else None, None if bias == "none" else dbias, None, None


# Autocast rules are those of torch's norms.
register(RMS_NORM, gradient=_rms_norm_gradient, remember=_remember_rms_norm, autocast="fp32")
register(ADD_RMS_NORM, gradient=_rms_norm_gradient, remember=_remember_rms_norm, autocast=_add_then_norm)
register(LAYER_NORM, gradient=_layer_norm_gradient, remember=_remember_layer_norm, autocast="fp32")
register(RMS_NORM_BACKWARD)
_BESIDE = Path(
    "rms_norm_beside(Tensor x, Tensor? weight, str rounding, bool offset, float eps, float weight_offset, "
    "str? config=None) -> (Tensor, Tensor)",
    (_norm_beside, _norm_beside),
    _norm_beside,
    remember=_remember_rms_norm,
    gradient=_rms_norm_gradient,
    autocast=_norm_beside,
)
register(LAYER_NORM_BACKWARD)
