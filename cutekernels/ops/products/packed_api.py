"""Products with packed weights, of one weight and of experts, as ``linear`` and ``grouped_gemm`` call them; their
gradients, their registration.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from cutekernels.dispatch import recording
from cutekernels.errors import UnsupportedProblem
from cutekernels.gpu import detect
from cutekernels.ops.products.api import check_depth
from cutekernels.ops.products.backward import GROUPED_BACKWARD, LINEAR_BACKWARD, group_sums
from cutekernels.ops.products.dequantize import DEQUANTIZE
from cutekernels.ops.products.gradients import before_activation, column_sums, saved_for
from cutekernels.ops.products.packed import QUANTIZED_GROUPED_GEMM, QUANTIZED_LINEAR, gate_pays
from cutekernels.ops.products.schedules.packed_problem import QuantizedProblem
from cutekernels.ops.products.schedules.problem import GATED
from cutekernels.ops.shared.calls import call, register
from cutekernels.ops.shared.checks import check_number, check_tensor, check_word
from cutekernels.ops.shared.declared_op import DeclaredOp
from cutekernels.ops.shared.dtypes import DTYPES, TYPES
from cutekernels.ops.shared.paths import Path, traced_by_dynamo
from cutekernels.quant.experts import QuantizedStack
from cutekernels.quant.support import why_not
from cutekernels.quant.weight import QuantizedWeight

MOST_SKINNY = 16  # tokens up to which a gate is one op: ten of ten cases' mean 1.05 (docs/notes/quantized.md#gates)


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
    check_depth(x, k)
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

    None where two must, with rows that are no multiple of 128, an ``out`` with gaps or off 16 bytes, and where two are
    faster. Traced, it is one, since the models that compare them are no part of a graph.
    """
    n, k = weight.shape
    rows = math.prod(x.shape[:-1])
    if n % 128 or k % 8 or x.dim() == 0 or x.shape[-1] != k or weight.offsets is not None:
        return None
    if out is not None and (out.shape != (*x.shape[:-1], n // 2) or not out.is_contiguous()):
        return None
    if not traced_by_dynamo() and rows > MOST_SKINNY:
        if recording():
            # Which of the two calls take is their GPU's and their tokens': both are made ready.
            _call(x, weight, None, GATED)
            return None
        if out is not None and out.data_ptr() % 16:
            return None
        if x.is_cuda:
            scales, more = weight.scales.dtype, (weight.zeros is not None, weight.factors is not None)
            p = _pose_gate(rows, n, k, x.dtype, weight.code, weight.group, weight.scale_rows, scales, *more)
            if p is not None and not gate_pays(p, detect(x.device.index)):
                return None
    if out is None:
        return _call(x, weight, None, GATED)
    _call(x, weight, None, GATED, out=out.view(rows, n // 2))
    return out


@lru_cache(maxsize=1024)
def _pose_gate(
    m: int, n: int, k: int, dtype: torch.dtype, code: str, group: int, rows: int, scale: torch.dtype, zeros: bool,
    factors: bool,
) -> QuantizedProblem | None:  # fmt: skip
    """The problem of a gate's product, as its tuning has it; None where there is none, as the op's call will say."""
    word = ("ue5m3" if factors else "e8m0") if code == "e2m1" else TYPES.names.get(scale, "")
    try:
        return QuantizedProblem(
            m, n, k, dtype=DTYPES.names.get(dtype, ""), code=code, group=group, scale_rows=rows, scale=word,
            zeros=zeros, factors=factors, activation=GATED,
        ).bucket()  # fmt: skip
    except UnsupportedProblem:
        return None


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


def quantized_grouped_gemm(
    x: Tensor,
    weight: QuantizedStack,
    offsets: Tensor,
    bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    *,
    out: Tensor | None = None,
    config: Any = None,
) -> Tensor:
    """:func:`cutekernels.grouped_gemm` of packed experts; arguments as there."""
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
    own = weight.weight
    inputs = (x, own.packed, own.scales, own.zeros, own.factors, offsets, bias)
    options, numbers = (own.code, own.group, activation), (float(alpha), float(limit))
    results = None if out is None else (out,)
    return call(QUANTIZED_GROUPED_GEMM, inputs, options, numbers, config=config, out=results)[0]


# ---- torch.library --------------------------------------------------------------------------------------


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


register(DEQUANTIZE)
_register_packed(QUANTIZED_LINEAR, LINEAR_BACKWARD, groups=False)
_register_packed(QUANTIZED_GROUPED_GEMM, GROUPED_BACKWARD, groups=True)
