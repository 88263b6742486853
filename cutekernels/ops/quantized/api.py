"""``linear`` with a :class:`~cutekernels.quant.QuantizedWeight`: the call, its gradient, its registration."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.gemm.epilogue import GATED
from cutekernels.ops.quantized import backward
from cutekernels.ops.quantized.decode import DEQUANTIZE
from cutekernels.ops.quantized.op import QUANTIZED_LINEAR
from cutekernels.ops.shared.calls import call, register
from cutekernels.ops.shared.checks import check_tensor, check_word
from cutekernels.quant.support import why_not
from cutekernels.quant.weight import QuantizedWeight

MOST_GATED = 32  # tokens of a gate behind the product


def quantized_linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out: Tensor | None = None,
    config: Any = None,
) -> Tensor:
    """:func:`cutekernels.linear` of a packed weight; arguments as there."""
    if activation is not None:
        check_word("linear", "activation", activation)
    check_tensor("linear", "x", x)
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise UnsupportedProblem(f"x must be (..., K) with weight's K={k}; its shape is {tuple(x.shape)}")
    if weight.offsets is not None or k % 8:
        check_kernels(x, weight)
    activation = "none" if activation is None else activation
    if out is None:
        return _call(x, weight, bias, activation, config)
    check_tensor("linear", "out", out)
    if out.shape != (*x.shape[:-1], n):
        raise UnsupportedProblem(f"out must be {(*x.shape[:-1], n)}; its shape is {tuple(out.shape)}")
    try:
        flat_out = out.view(math.prod(x.shape[:-1]), n)
    except RuntimeError:  # no single stride walks out's rows
        return out.copy_(_call(x, weight, bias, activation, config))
    _call(x, weight, bias, activation, config, flat_out)
    return out


def gated(x: Tensor, weight: QuantizedWeight, *, out: Tensor | None = None) -> Tensor | None:
    """``silu(gate) * up`` of a packed weight with the gate's rows before up's, as one op, rounded once.

    None where two do better or must: many tokens, rows that are no multiple of 128.
    """
    n, k = weight.shape
    rows = math.prod(x.shape[:-1])
    if n % 128 or k % 8 or rows > MOST_GATED or x.dim() == 0 or x.shape[-1] != k or weight.offsets is not None:
        return None
    if out is None:
        return _call(x, weight, None, GATED)
    if out.shape != (*x.shape[:-1], n // 2) or not out.is_contiguous():
        return None
    _call(x, weight, None, GATED, out=out.view(rows, n // 2))
    return out


def _call(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    activation: str,
    config: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    """The op of the rows of ``x``, in the weight's order of K: new, in the shape of ``x``, or written to ``out``."""
    n, k = weight.shape
    if weight.order is not None:
        x = x.index_select(-1, weight.order)
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), k)
    inputs = (flat, weight.packed, weight.scales, weight.zeros, weight.factors, bias)
    options = (weight.code, weight.group, n, activation)
    made = call(QUANTIZED_LINEAR, inputs, options, config=config, out=None if out is None else (out,))[0]
    return made if x.dim() == 2 or out is not None else made.view(*x.shape[:-1], made.shape[-1])


def check_kernels(x: Tensor, weight: QuantizedWeight) -> None:
    """Raises UnsupportedProblem for a weight that no kernel multiplies by ``x``, with the remedy."""
    reason = why_not(weight) if x.is_cuda or weight.offsets is not None else None
    if reason is not None:
        raise UnsupportedProblem(reason)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *weight, bias = inputs[:6]
    ctx.options = inputs[6:-1]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.k = x.shape[1]
    ctx.save_for_backward(*weight, *backward.saved_for(ctx.options[-1], x, output, bias))


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """dz = grad * activation'(z); dx = dz weight, an op of its own; dbias = sum of dz. The weight has no gradient."""
    *weight, first, bias = ctx.saved_tensors
    code, group, n, activation = ctx.options
    operands = (first, *weight, bias, code, group, n, "none", None)
    dz = backward.before_activation(grad, first, activation, partial(QUANTIZED_LINEAR.path, *operands))
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        dx = backward.BACKWARD_PATH(dz, *weight, code, group, n, ctx.k)
    if ctx.needs_input_grad[5] and ctx.bias_dtype is not None:
        dbias = dz.sum(0, dtype=ctx.bias_dtype)
    return dx, None, None, None, None, dbias, None, None, None, None, None


register(DEQUANTIZE)
register(QUANTIZED_LINEAR, gradient=_gradient, remember=_remember, autocast="lower", kept=(2, 4, 5))
