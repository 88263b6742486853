"""``linear`` and ``grouped_gemm``: linear layers of one weight and of experts, which choose the op by the weight.

A repeated call of ``linear`` goes to its launch through caches of calls; whatever else takes the op's path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from cutekernels import torch_names
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import Activation
from cutekernels.ops.products.api import CALLS, FUSED_CALLS, cpu, first_call, gemm, linear_into, product, rows_of
from cutekernels.ops.products.backward import GROUPED_BACKWARD, LINEAR_BACKWARD
from cutekernels.ops.products.dequantize import DEQUANTIZE
from cutekernels.ops.products.epilogue import ALPHA, CLAMPED, LIMIT, activate
from cutekernels.ops.products.gradients import before_activation, column_sums, group_sums, reads_value, saved_for
from cutekernels.ops.products.grouped import GROUPED_GEMM, GROUPED_GEMM_WGRAD
from cutekernels.ops.products.packed import QUANTIZED_GROUPED_GEMM, QUANTIZED_LINEAR
from cutekernels.ops.products.schedules.packed_problem import QuantizedConfig
from cutekernels.ops.products.schedules.problem import GATED, GemmConfig
from cutekernels.ops.shared.calls import call, refuse_others, register, with_results
from cutekernels.ops.shared.checks import check_number, check_tensor, check_word
from cutekernels.ops.shared.declared_op import DeclaredOp
from cutekernels.ops.shared.paths import PLAIN, Call, CallCache, Given, Inputs, Path
from cutekernels.quant.experts import QuantizedStack
from cutekernels.quant.support import why_not
from cutekernels.quant.weight import QuantizedWeight

MOST_GATED = 32  # tokens of a gate behind a packed product
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
    if out is not None and x.dim() == 2:
        return gemm(x, weight.t(), bias=bias, activation=activation, out=out)
    _check_depth(x, weight.shape[1])
    if out is None:
        path = torch.ops.cutekernels.linear if compiling else LINEAR_PATH
        return path(x, weight, bias, name)  # type: ignore[no-any-return]
    linear_into(out, x, weight, bias, activation)
    return out


def grouped_gemm(
    x: Tensor,
    weight: Tensor | QuantizedStack,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | Literal["silu_mul", "swiglu_oai"] | None = None,
    alpha: float = ALPHA,
    limit: float = LIMIT,
    out: Tensor | None = None,
    config: GemmConfig | QuantizedConfig | str | None = None,
) -> Tensor:
    """``out[r] = activation(x[r] @ weight[e].T + bias[e])`` for the rows r of each expert e.

    Sums are in fp32 and rounded once. The host learns no group's size and never waits, so graphs can hold the call.

    Args:
        x: ``(T, K)``, fp16 or bf16 (on the CPU fp32 and fp64 too), grouped by expert as :func:`moe_gather` leaves it.
        weight: ``(E, N, K)``, dtype of ``x``: Hugging Face's 3-D expert parameters. K or N contiguous, so
            ``w.mT`` of an ``(E, K, N)`` weight is free; other strides cost a copy. Or a
            :class:`~cutekernels.quant.QuantizedStack`, which stays packed.
        offsets: int32 ``(E + 1,)`` from :func:`moe_permute`: expert e has rows ``offsets[e]`` to ``offsets[e + 1]``,
            which may be none. Rows before ``offsets[0]`` and from ``offsets[E]`` on get 0. Offsets that fall or leave
            the rows are refused on the CPU; a GPU clamps them, and reads and writes nothing out of range. They must
            not change while a call's kernel runs, which may then hang.
        bias: ``(E, N)``, dtype of ``x`` or fp32.
        activation: ``"relu" | "gelu" | "gelu_tanh" | "silu"``; None for identity. ``"silu_mul"`` takes a weight
            ``(E, 2 * N, K)``, the gate's rows before up's, and a bias ``(E, 2 * N)``: ``out = silu(gate) * up``.
            ``"swiglu_oai"``, of packed experts alone, is gpt-oss's: ``(up + 1) * gate * sigmoid(alpha * gate)``.
        alpha, limit: of ``"swiglu_oai"``; gates are clamped to ``limit`` from above, up on both sides.
        out: where to write, ``(T, N)``; must not overlap an input. Not differentiable.
        config: overrides the tuned choice, as a :class:`GemmConfig` or its text. Ignored on the CPU.

    Returns:
        ``(T, N)``, dtype of ``x``; or ``out``. Differentiable in x, weight and bias, deterministically; packed weights
        have no gradient.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, shapes that do not fit, other devices, more than 1023 experts.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    inputs: Inputs
    op: DeclaredOp[Any, Any]
    options: tuple[Any, ...] = ("none" if activation is None else activation,)
    numbers: tuple[float, ...] = ()
    results = None if out is None else (out,)
    if isinstance(weight, QuantizedStack):
        _check_stack(x, weight, offsets, alpha, limit)
        op, own = QUANTIZED_GROUPED_GEMM, weight.weight
        inputs = (x, own.packed, own.scales, own.zeros, own.factors, offsets, bias)
        options, numbers = (own.code, own.group, *options), (float(alpha), float(limit))
    else:
        op, inputs = GROUPED_GEMM, (x, weight, offsets, bias)
        if type(x) not in PLAIN or type(weight) not in PLAIN or type(offsets) not in PLAIN:
            refuse_others(op, inputs, results, options)
    return call(op, inputs, options, numbers, config=config, out=results)[0]


# ---- packed weights -------------------------------------------------------------------------------------


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
    _check_depth(x, k)
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


def _check_depth(x: Tensor, k: int) -> None:
    if x.dim() == 0 or x.shape[-1] != k:
        raise UnsupportedProblem(f"x must be (..., K) with weight's K={k}; its shape is {tuple(x.shape)}")


def _check_stack(x: Tensor, weight: QuantizedStack, offsets: Tensor, alpha: float, limit: float) -> None:
    check_tensor("grouped_gemm", "x", x)
    check_tensor("grouped_gemm", "offsets", offsets)
    check_number("grouped_gemm", "alpha", alpha)
    check_number("grouped_gemm", "limit", limit, 0.0)
    experts, _, k = weight.shape
    if x.dim() != 2 or x.shape[1] != k or offsets.shape != (experts + 1,):
        raise UnsupportedProblem(
            f"grouped_gemm takes x (T, {k}) and offsets ({experts + 1},) for {weight}; got {tuple(x.shape)} and "
            f"{tuple(offsets.shape)}"
        )
    check_kernels(x, weight.weight)


def clamped_swiglu(y: Tensor, alpha: float = ALPHA, limit: float = LIMIT) -> Tensor:
    """gpt-oss's gate of ``(..., 2 * N)``, gates before up, in fp32 and rounded once: plain PyTorch, differentiable."""
    return activate(y.to(torch.promote_types(y.dtype, torch.float32)), CLAMPED, alpha, limit).to(y.dtype)


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


def _register_packed(op: DeclaredOp[Any, Any], backward: Path, groups: bool) -> None:
    """Registers a product with packed weights: dz = dout * activation'(z); dx = dz weight, an op of its own; dbias =
    sums of dz. The weight has no gradient.
    """
    tensors, activations = len(op.inputs), op.options.index("activation")

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *between, bias = inputs[:tensors]
        ctx.options, ctx.k = inputs[tensors:-1], x.shape[1]
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*between, *saved_for(ctx.options[activations], x, output, bias))

    def gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *between, first, bias = ctx.saved_tensors  # the weight's tensors and offsets
        chosen, (activation, *numbers) = ctx.options[:activations], ctx.options[activations:]
        products = partial(op.path, first, *between, bias, *chosen, "none", *numbers, None)
        dz = before_activation(dout, first, activation, products, *numbers)
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            dx = backward(dz, *between, *chosen, ctx.k)
        if ctx.needs_input_grad[tensors - 1] and ctx.bias_dtype is not None:
            dbias = group_sums(dz, between[-1], ctx.bias_dtype) if groups else column_sums(dz, ctx.bias_dtype)
        return dx, *[None] * len(between), dbias, *[None] * len(ctx.options), None

    kept = [op.inputs.index(name) for name in ("scales", "factors", "bias")]
    register(op, gradient=gradient, remember=remember, autocast="lower", kept=kept)


def _remember_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, offsets, bias, ctx.activation, _ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    saved = output if reads_value(ctx.activation) else None if ctx.activation == "none" else bias
    ctx.save_for_backward(x, weight, offsets, saved)


def _grouped_gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets, saved = ctx.saved_tensors
    products = partial(GROUPED_GEMM.path, x, weight, offsets, saved, "none", None)
    dz = before_activation(dout, saved, ctx.activation, products)
    needs = ctx.needs_input_grad
    dx = GROUPED_GEMM.path(dz, weight.mT, offsets, None, "none", None) if needs[0] else None
    dweight = GROUPED_GEMM_WGRAD.path(dz, x, offsets, None) if needs[1] else None
    dbias = group_sums(dz, offsets, ctx.bias_dtype) if needs[3] else None
    return dx, dweight, None, dbias, None, None


def _remember_wgrad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _wgrad_gradient(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    dout, x, offsets = ctx.saved_tensors
    needs = ctx.needs_input_grad
    ddout = GROUPED_GEMM.path(x, d, offsets, None, "none", None) if needs[0] else None
    dx = GROUPED_GEMM.path(dout, d.mT, offsets, None, "none", None) if needs[1] else None
    return ddout, dx, None, None


LINEAR_PATH = Path(
    "linear(Tensor x, Tensor weight, Tensor? bias, str activation='none') -> Tensor",
    (_linear_launch, partial(_flatten, with_results(cpu, 4, 0))),
    partial(_flatten, torch.ops.cutekernels._gemm.default),
    gradient=_linear_gradient,
    remember=_remember_linear,
    autocast="lower",
)
register(DEQUANTIZE)
_register_packed(QUANTIZED_LINEAR, LINEAR_BACKWARD, groups=False)
_register_packed(QUANTIZED_GROUPED_GEMM, GROUPED_BACKWARD, groups=True)
register(GROUPED_GEMM, gradient=_grouped_gradient, remember=_remember_grouped, autocast="lower", kept=(3,))
register(GROUPED_GEMM_WGRAD, gradient=_wgrad_gradient, remember=_remember_wgrad)
