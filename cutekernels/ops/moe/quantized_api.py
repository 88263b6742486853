"""``grouped_gemm`` of a :class:`~cutekernels.quant.QuantizedStack`: the call, its gradients, its registration."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.moe.group_sums import group_sums
from cutekernels.ops.moe.packed_experts import CLAMPED
from cutekernels.ops.moe.quantized import ALPHA, LIMIT, QUANTIZED_GROUPED_GEMM
from cutekernels.ops.moe.quantized_backward import BACKWARD_PATH
from cutekernels.ops.quantized.backward import before_activation, saved_for
from cutekernels.ops.shared.calls import call, register
from cutekernels.ops.shared.checks import check_number, check_tensor
from cutekernels.quant.experts import QuantizedStack
from cutekernels.quant.support import why_not


def quantized_grouped_gemm(
    x: Tensor,
    weight: QuantizedStack,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    alpha: float = ALPHA,
    limit: float = LIMIT,
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
    reason = why_not(weight.weight) if x.is_cuda else None
    if reason is not None:
        raise UnsupportedProblem(reason)
    own = weight.weight
    inputs = (x, own.packed, own.scales, own.zeros, own.factors, offsets, bias)
    options = (own.code, own.group, "none" if activation is None else activation)
    results = None if out is None else (out,)
    return call(QUANTIZED_GROUPED_GEMM, inputs, options, (float(alpha), float(limit)), config=config, out=results)[0]


def clamped_swiglu(y: Tensor, alpha: float = ALPHA, limit: float = LIMIT) -> Tensor:
    """gpt-oss's gate of ``(..., 2 * N)``, gates before up, in fp32 and rounded once: plain PyTorch, differentiable."""
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(y.dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *weight, offsets, bias = inputs[:7]
    *ctx.options, ctx.alpha, ctx.limit, _ = inputs[7:]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.k, ctx.dtype = x.shape[1], x.dtype
    ctx.save_for_backward(*weight, offsets, *saved_for(ctx.options[-1], x, output, bias))


def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    """dz = dout * activation'(z); dx = dz weight, an op of its own; dbias = sums of dz. Weights have no gradient."""
    *weight, offsets, first, bias = ctx.saved_tensors
    code, group, activation = ctx.options
    operands = (first, *weight, offsets, bias, code, group, "none", ctx.alpha, ctx.limit, None)
    products = partial(QUANTIZED_GROUPED_GEMM.path, *operands)
    if activation == CLAMPED:
        dz = _through_clamped(dout, products(), ctx.alpha, ctx.limit)
    else:
        dz = before_activation(dout, first, activation, products)
    needs = ctx.needs_input_grad
    dx = BACKWARD_PATH(dz, *weight, offsets, code, group, ctx.k) if needs[0] else None
    dbias = group_sums(dz, offsets, ctx.bias_dtype) if needs[6] and ctx.bias_dtype is not None else None
    return dx, None, None, None, None, None, dbias, None, None, None, None, None, None


def _through_clamped(dout: Tensor, z: Tensor, alpha: float, limit: float) -> Tensor:
    """The gradient of :func:`clamped_swiglu`, which clamps stop."""
    wide = torch.promote_types(z.dtype, torch.float32)
    gate, up = z.to(wide).chunk(2, dim=-1)
    g, u, d = gate.clamp(max=limit), up.clamp(-limit, limit), dout.to(wide)
    s = torch.sigmoid(alpha * g)
    dgate = d * (u + 1) * (s + alpha * g * s * (1 - s)) * (gate <= limit)
    dup = d * g * s * (up.abs() <= limit)
    return torch.cat((dgate, dup), dim=-1).to(z.dtype)


register(QUANTIZED_GROUPED_GEMM, gradient=_gradient, remember=_remember, autocast="lower", kept=(2, 4, 6))
