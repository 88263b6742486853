"""``grouped_gemm``: linear layers of experts, which chooses the op by the weight; its gradients, its registration."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from cutekernels.kernels.activations import Activation
from cutekernels.ops.products.backward import group_sums
from cutekernels.ops.products.epilogue import ALPHA, CLAMPED, LIMIT, activate
from cutekernels.ops.products.gradients import before_activation, reads_value
from cutekernels.ops.products.grouped import GROUPED_GEMM, GROUPED_GEMM_WGRAD
from cutekernels.ops.products.schedules.packed_problem import QuantizedConfig
from cutekernels.ops.products.schedules.problem import GemmConfig
from cutekernels.ops.shared.calls import call, refuse_others, register
from cutekernels.ops.shared.paths import PLAIN
from cutekernels.quant.experts import QuantizedStack


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
    name = "none" if activation is None else activation
    if isinstance(weight, QuantizedStack):
        from cutekernels.ops.products.packed_api import quantized_grouped_gemm

        return quantized_grouped_gemm(x, weight, offsets, bias, name, alpha, limit, out=out, config=config)
    inputs, results = (x, weight, offsets, bias), None if out is None else (out,)
    if type(x) not in PLAIN or type(weight) not in PLAIN or type(offsets) not in PLAIN:
        refuse_others(GROUPED_GEMM, inputs, results, (name,))
    return call(GROUPED_GEMM, inputs, (name,), config=config, out=results)[0]


def clamped_swiglu(y: Tensor, alpha: float = ALPHA, limit: float = LIMIT) -> Tensor:
    """gpt-oss's gate of ``(..., 2 * N)``, gates before up, in fp32 and rounded once: plain PyTorch, differentiable."""
    return activate(y.to(torch.promote_types(y.dtype, torch.float32)), CLAMPED, alpha, limit).to(y.dtype)


# ---- torch.library --------------------------------------------------------------------------------------


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


register(GROUPED_GEMM, gradient=_grouped_gradient, remember=_remember_grouped, autocast="lower", kept=(3,))
register(GROUPED_GEMM_WGRAD, gradient=_wgrad_gradient, remember=_remember_wgrad)
