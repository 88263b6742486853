"""``moe_ffn``: the experts of a mixture as one differentiable call over the family's ops."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.activations.api import silu_mul
from cutekernels.ops.moe.api import moe_combine, moe_gather, moe_permute
from cutekernels.ops.moe.rows import FEW_PAIRS, MOE_DISPATCH
from cutekernels.ops.products.epilogue import ALPHA, CLAMPED, GATES, LIMIT
from cutekernels.ops.products.grouped_api import clamped_swiglu, grouped_gemm
from cutekernels.ops.products.schedules.problem import GATED
from cutekernels.ops.shared.calls import call
from cutekernels.ops.shared.checks import check_number, check_tensor, check_word
from cutekernels.ops.shared.paths import PLAIN, is_grad_enabled, undisturbed
from cutekernels.quant.experts import QuantizedStack

_IDS = (torch.int32, torch.int64)
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def moe_ffn(
    x: Tensor,
    w_gate_up: Tensor | QuantizedStack,
    w_down: Tensor | QuantizedStack,
    ids: Tensor,
    weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Literal["silu_mul", "swiglu_oai"] = "silu_mul",
    alpha: float = ALPHA,
    limit: float = LIMIT,
) -> Tensor:
    """``out[t] = sum_j weights[t, j] * down_e(silu(gate_e(x[t])) * up_e(x[t]))`` with ``e = ids[t, j]``.

    The path is permute, gather, gate and up with SwiGLU behind them, down, combine. Where a gradient is taken, SwiGLU
    is a kernel of its own. Where x takes none, few pairs of a token and an expert, up to 256, are permuted and gathered
    in one launch; torch.compile's graphs and autocast keep two. Nothing waits for the host, sums run in a fixed order,
    and CUDA graphs can hold the call.

    Args:
        x: ``(..., H)``, fp16 or bf16 (on the CPU fp32 and fp64 too).
        w_gate_up: ``(E, 2 * I, H)``, gate's rows before up's: ``experts.gate_up_proj`` of Hugging Face. This and the
            next may be a :class:`~cutekernels.quant.QuantizedStack`, which stays packed and has no gradient.
        w_down: ``(E, H, I)``: ``experts.down_proj``.
        ids: int32 or int64 ``(..., K)`` from :func:`moe_route`. One that names no expert adds nothing.
        weights: ``(..., K)`` from :func:`moe_route`, of any floating-point type.
        gate_up_bias: ``(E, 2 * I)``.
        down_bias: ``(E, H)``.
        activation: ``"swiglu_oai"`` is gpt-oss's gate, ``(up + 1) * gate * sigmoid(alpha * gate)``; of experts that are
            not packed it runs behind the product, in plain PyTorch.
        alpha, limit: of ``"swiglu_oai"``; gates are clamped to ``limit`` from above, up on both sides.

    Returns:
        ``(..., H)``, dtype of ``x``. Differentiable in x, weights, matrices and biases, once.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, shapes that do not fit, other devices.
    """
    given = {"x": x, "w_gate_up": w_gate_up, "w_down": w_down, "ids": ids, "weights": weights}
    for name, t in given.items():
        if isinstance(t, QuantizedStack):
            if name.startswith("w_"):
                continue
            check_tensor("moe_ffn", name, t)
        elif type(t) not in PLAIN or t.layout is not torch.strided or t.is_nested or t.is_quantized:
            check_tensor("moe_ffn", name, t)
    for name, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
        if bias is not None:
            check_tensor("moe_ffn", name, bias)
    check_word("moe_ffn", "activation", activation)
    if activation not in GATES:
        raise UnsupportedProblem(f"moe_ffn takes activation as {' or '.join(GATES)}; got {activation!r}: pass one")
    if activation == CLAMPED and not isinstance(w_gate_up, QuantizedStack):  # whose product checks them
        check_number("moe_ffn", "alpha", alpha)
        check_number("moe_ffn", "limit", limit, 0.0)
    shape = tuple(w_gate_up.shape)
    experts, width = shape[0] if len(shape) == 3 else 0, x.shape[-1] if x.dim() else 0
    fits = len(shape) == 3 and shape[1] % 2 == 0 and shape[2] == width
    if not fits or w_down.shape != (experts, width, w_gate_up.shape[1] // 2):
        raise UnsupportedProblem(
            f"moe_ffn takes w_gate_up (E, 2 * I, H) and w_down (E, H, I) for x (..., H); got {tuple(w_gate_up.shape)}, "
            f"{tuple(w_down.shape)} and {tuple(x.shape)}"
        )
    if ids.shape != weights.shape or ids.shape[:-1] != x.shape[:-1]:
        raise UnsupportedProblem(
            f"moe_ffn takes ids and weights (..., K) for x (..., H); got {tuple(ids.shape)}, "
            f"{tuple(weights.shape)} and {tuple(x.shape)}"
        )
    if weights.dtype not in _WEIGHTS:
        names = ", ".join(str(kind).removeprefix("torch.") for kind in _WEIGHTS)
        raise UnsupportedProblem(f"moe_ffn takes weights in {names}; got {weights.dtype}: pass those of moe_route")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # Graphs may serve any number of tokens, so that none is asked for there; moe_dispatch has no gradient.
    if undisturbed(x, ids) is not None and ids.numel() <= FEW_PAIRS and ids.dtype in _IDS and ids.device == x.device:
        rows, offsets, inverse = call(MOE_DISPATCH, (x, ids), (experts,))
    else:
        _, offsets, inverse = moe_permute(ids, experts)
        rows = moe_gather(x, inverse)
    hidden: Tensor
    if isinstance(w_gate_up, QuantizedStack):
        hidden = grouped_gemm(rows, w_gate_up, offsets, gate_up_bias, activation=activation, alpha=alpha, limit=limit)
    elif activation == CLAMPED:
        hidden = clamped_swiglu(grouped_gemm(rows, w_gate_up, offsets, gate_up_bias), alpha, limit)
    elif is_grad_enabled() and any(t is not None and t.requires_grad for t in (rows, w_gate_up, gate_up_bias)):
        hidden = silu_mul(grouped_gemm(rows, w_gate_up, offsets, gate_up_bias))  # backward reads gate and up
    else:
        hidden = grouped_gemm(rows, w_gate_up, offsets, gate_up_bias, activation=GATED)
    return moe_combine(grouped_gemm(hidden, w_down, offsets, down_bias), inverse, weights.to(wide))
