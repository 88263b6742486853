"""``linear``: a linear layer, which chooses the op by the weight.

A repeated call of ``linear`` goes to its launch through caches of calls; whatever else takes the op's path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cutekernels import torch_names
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import Activation
from cutekernels.ops.products.api import (
    CALLS,
    FUSED_CALLS,
    check_depth,
    cpu,
    first_call,
    gemm,
    linear_into,
    product,
    rows_of,
)
from cutekernels.ops.products.gradients import before_activation, column_sums, reads_value
from cutekernels.ops.shared.calls import with_results
from cutekernels.ops.shared.checks import check_tensor, check_word
from cutekernels.ops.shared.paths import PLAIN, Call, CallCache, Given, Inputs, Path, autocasting
from cutekernels.quant.weight import QuantizedWeight

_LINEAR_CALLS, _BIASED_CALLS = CallCache(), CallCache()  # of linear without and with a bias
_is_grad_enabled = torch.is_grad_enabled
_any_requires_grad = torch_names.any_requires_grad
_is_compiling = torch.compiler.is_compiling


def linear(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``out[..., n] = activation(sum_k x[..., k] * weight[n, k] + bias[n])``, accumulated in fp32, rounded once.

    Args:
        x: ``(..., K)``, fp16 or bf16 (on the CPU fp32 and fp64 too). Any strides; K contiguous and 16-byte
            aligned rows are fastest. Leading dimensions that no single stride walks cost a copy.
        weight: ``(N, K)``, dtype of ``x``: the layout of ``nn.Linear.weight``. Or a
            :class:`~cutekernels.quant.QuantizedWeight` of four or eight bits, decoded in the product, without gradient.
        bias: ``(N,)``, dtype of ``x`` or fp32.
        activation: ``"relu" | "gelu" | "gelu_tanh" | "silu"``; None for identity.
        out: where to write, ``(..., N)``; must not overlap an input. Not differentiable.

    Returns:
        ``(..., N)``, dtype of ``x``; or ``out``. Differentiable in x, weight and bias.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched extents, dtypes or devices, an ``out`` that
            overlaps an input or itself, ``out`` together with gradients.
    """
    if isinstance(weight, QuantizedWeight):
        from cutekernels.ops.products.packed_api import quantized_linear

        return quantized_linear(x, weight, bias, activation=activation, out=out)
    name, compiling = "none" if activation is None else activation, _is_compiling()
    direct_types = type(x) in PLAIN and type(weight) in PLAIN and (bias is None or type(bias) in PLAIN)
    if out is None and direct_types and not compiling:  # a call like one before
        calls = _LINEAR_CALLS
        inputs: Inputs = (x, weight)
        options: tuple[Any, ...] = (None, name)
        if bias is not None:  # guards take one number of tensors
            calls, inputs, options = _BIASED_CALLS, (x, weight, bias), (name,)
        graded = _is_grad_enabled() and _any_requires_grad(*inputs)
        made = calls.replay(None, inputs, options, (), None, LINEAR_PATH.differentiated if graded else None)
        if made is not None:
            return made[0]
    if out is None or not direct_types or weight.is_nested:
        check_tensor("linear", "x", x)
        check_tensor("linear", "weight", weight)
        check_tensor("linear", "bias", bias, optional=True)
        check_word("linear", "activation", name)
    if weight.dim() != 2:
        raise UnsupportedProblem(f"weight must be (N, K); its shape is {tuple(weight.shape)}")
    if x.dtype != weight.dtype and not autocasting():
        raise UnsupportedProblem(f"linear takes weight in x's {x.dtype}; got {weight.dtype}: convert one of them")
    if out is not None and x.dim() == 2:
        return gemm(x, weight.t(), bias=bias, activation=activation, out=out)
    check_depth(x, weight.shape[1], weight.shape[0])
    if out is None:
        path = torch.ops.cutekernels.linear if compiling else LINEAR_PATH
        return path(x, weight, bias, name)  # type: ignore[no-any-return]
    linear_into(out, x, weight, bias, activation)
    return out


# ---- torch.library --------------------------------------------------------------------------------------


def _shape(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``y`` in the shape of the result. A view made within a Function could not be modified in place; this can."""
    return torch_names.unsafe_view(y, (*x.shape[:-1], weight.shape[0]))


def _linear_launch(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``linear`` on a GPU: a call like one before at once, the first one by its product."""
    given: Given = None, (x, weight), (None, activation), (), None
    calls, products = _LINEAR_CALLS, CALLS
    if bias is not None:
        given = None, (x, weight, bias), (activation,), (), None
        calls, products = _BIASED_CALLS, FUSED_CALLS
    made = calls.replay(*given) or calls.recall(given)
    if made is not None:
        return made[0]
    options, scalars, operands = (activation, "fp32"), (1.0, 0.0), (rows_of(x), weight.t(), None, bias)
    y = first_call(None, operands, scalars, options, None)
    result = y if x.dim() == 2 else _shape(y, x, weight)
    product = products.find((None, operands[:2] if bias is None else operands, options, scalars, None))
    if product is not None and operands[0].data_ptr() == x.data_ptr():
        calls.keep(_of_linear(product, given[1], result, y.shape), given)
    return result


def _of_linear(product: Call, inputs: Inputs, result: Tensor, shape: tuple[int, ...]) -> Call:
    """The call of ``linear`` that is a ``product`` of ``shape``."""
    by_addresses, absent = product.fire, (None,) * (len(inputs) - 2)

    def launch(out: Tensor, x: Tensor, weight: Tensor, *bias: Tensor) -> None:
        if out.dim() != 2:
            out, x = out.view(shape), rows_of(x)
        product.launch(out, x, weight.t(), *absent, *bias, 1.0, 0.0)  # type: ignore[misc]

    def fire(addresses: list[int], scalars: tuple[Any, ...]) -> None:
        by_addresses(addresses, (1.0, 0.0))  # type: ignore[misc]

    def fire_biased(addresses: list[int], scalars: tuple[Any, ...]) -> None:
        by_addresses([*addresses[:3], 0, addresses[3]], (1.0, 0.0))  # type: ignore[misc]

    chosen = None if by_addresses is None else fire_biased if absent else fire
    return Call.of(launch, inputs, (result,), (), chosen)


def _flatten(product: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``product`` of the rows of ``x``."""
    if x.dim() == 2:
        return product(x, weight.t(), None, bias, 1.0, 0.0, activation, "fp32", None)
    made = product(rows_of(x), weight.t(), None, bias, 1.0, 0.0, activation, "fp32", None)
    return _shape(made, x, weight)


# ---- gradients ------------------------------------------------------------------------------------------


def _remember_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, activation, *_ = inputs
    ctx.activation = activation
    if activation == "none":
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
    else:
        ctx.save_for_backward(x, weight, bias, output if reads_value(activation) else None)


def _linear_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """dz as of ``gemm``; dx = dz weight; dweight = dz^T x, laid as the weight; dbias = sum of dz."""
    dz = grad
    if ctx.activation == "none":
        x, weight = ctx.saved_tensors
        bias_dtype = ctx.bias_dtype
    else:
        x, weight, bias, output = ctx.saved_tensors
        bias_dtype = None if bias is None else bias.dtype
        dz = before_activation(grad, output, ctx.activation, partial(LINEAR_PATH, x, weight, bias, "none"))
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    flat = dz if dz.dim() == 2 else rows_of(dz)
    dx = dweight = dbias = None
    if needs_x:
        dx = product(flat, weight, 1.0)
        dx = dx if x.dim() == 2 else dx.view(x.shape)
    if needs_weight:
        dweight = product(flat.t(), x if x.dim() == 2 else rows_of(x), 1.0)
    if needs_bias and bias_dtype is not None:
        dbias = column_sums(flat, bias_dtype)
    return dx, dweight, dbias, None


LINEAR_PATH = Path(
    "linear(Tensor x, Tensor weight, Tensor? bias, str activation='none') -> Tensor",
    (_linear_launch, partial(_flatten, with_results(cpu, 4, 0))),
    partial(_flatten, torch.ops.cutekernels._gemm.default),
    gradient=_linear_gradient,
    remember=_remember_linear,
    autocast="lower",
)
