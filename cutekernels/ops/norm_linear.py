"""``rms_norm_linear`` and ``linear_silu_mul``: what surrounds the projections of a transformer block.

Both run as the tuned ops they are made of, one after the other: the norm's kernel, the product's, the gate's. That
path is also what a fused kernel must beat; none is written yet, so it is the only candidate, and nothing here is an op
of its own to the tuner. Gradients, ``torch.compile`` and CUDA graphs come from the parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.activations import silu_mul
from cutekernels.ops.matmul import linear
from cutekernels.ops.norms import add_rms_norm, rms_norm


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    rstd: Tensor | None = None,
    activation: str | None = None,
    exact: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``y = activation(rms_norm(u) @ weight.T + bias)`` with ``u = x``, or ``u = x + residual`` rounded to its type.

    The normalised rows are rounded once to their type before the product, which accumulates in fp32: a norm kernel
    and a GEMM, one after the other.

    Args:
        x: ``(..., K)``, fp16 or bf16 (on the CPU fp32 and fp64 too), any strides.
        norm_weight: ``(K,)``, dtype of ``x`` or fp32; None for ones, say where :func:`fold` has put it into ``weight``.
        weight: ``(N, K)``, dtype of ``x``: the layout of ``nn.Linear.weight``.
        bias: ``(N,)``, dtype of ``x`` or fp32.
        eps: added to the mean of squares. Not used with ``rstd``.
        residual: shape, dtype and device of ``x``.
        rstd: ``(...)``, fp32: ``1 / sqrt(mean(u^2) + eps)`` of each row where a preceding op has it; then not computed.
        activation: ``"relu" | "gelu" | "gelu_tanh" | "silu"``; None for identity.
        exact: round ``u * rstd`` to the type of ``x`` before ``norm_weight``, as Hugging Face's modules do.
        out: where to write y, ``(..., N)``; must not overlap an input. Not differentiable.

    Returns:
        ``y``, ``(..., N)``, dtype of ``x``; with ``residual``, ``(y, u)``. Differentiable in x, residual, norm_weight,
        weight and bias; with ``rstd``, that is taken as given.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched extents, dtypes or devices, an ``out`` that overlaps an
            input or itself, ``out`` together with gradients.
    """
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise UnsupportedProblem(
            f"x must be (..., K) and weight (N, K); their shapes are {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if norm_weight is not None and tuple(norm_weight.shape) != (x.shape[-1],):
        raise UnsupportedProblem(
            f"norm_weight must be (K,) = ({x.shape[-1]},); its shape is {tuple(norm_weight.shape)}"
        )
    rounding = "huggingface" if exact else "once"
    if rstd is not None:
        u = x if residual is None else _sum(x, residual)
        h = _normalised(u, rstd, norm_weight, exact)
    elif residual is None:
        u, h = x, rms_norm(x, norm_weight, eps=eps, rounding=rounding)
    else:
        h, u = add_rms_norm(x, residual, norm_weight, eps=eps, rounding=rounding)
    y = linear(h, weight, bias, activation=activation, out=out)
    return y if residual is None else (y, u)


def linear_silu_mul(
    x: Tensor,
    w_gate_up: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    norm: bool | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``silu(h @ w_gate.T) * (h @ w_up.T)``, gate and up projected in one product; ``h`` is ``x`` or its RMS norm.

    Both projections are rounded to the type of ``x`` before the gate: a GEMM and an elementwise kernel, one after the
    other.

    Args:
        x: ``(..., K)``, fp16 or bf16 (on the CPU fp32 and fp64 too), any strides.
        w_gate_up: ``(2 * I, K)``, dtype of ``x``: the rows of the gate's weight, then those of up's.
        norm_weight: ``(K,)``, dtype of ``x`` or fp32: asks for the norm in front.
        eps: of the norm.
        norm: True for the norm in front without a weight (say after :func:`fold`); by default as ``norm_weight`` says.
        out: where to write, ``(..., I)``; must not overlap an input. Not differentiable.

    Returns:
        ``(..., I)``, dtype of ``x``. Differentiable in x, w_gate_up and norm_weight.

    Raises:
        UnsupportedProblem: an odd number of weight rows, ``norm=False`` with a ``norm_weight``, and what
            :func:`rms_norm_linear` and ``silu_mul`` refuse.
    """
    if w_gate_up.dim() != 2 or w_gate_up.shape[0] % 2:
        raise UnsupportedProblem(
            f"w_gate_up must be (2 * I, K), the gate's rows before up's; its shape is {tuple(w_gate_up.shape)}"
        )
    if norm is False and norm_weight is not None:
        raise UnsupportedProblem("norm=False takes no norm_weight: leave one of them out")
    if norm or norm_weight is not None:
        packed = rms_norm_linear(x, norm_weight, w_gate_up, eps=eps)
        assert isinstance(packed, Tensor)
    else:
        packed = linear(x, w_gate_up)
    return silu_mul(packed, out=out)


def fold(norm_weight: Tensor, weight: Tensor) -> Tensor:
    """``weight * norm_weight``, ``(N, K)``: a projection that has its norm's weight in it, rounded once.

    ``rms_norm_linear(x, None, fold(norm_weight, weight))`` then needs no weight for the norm. A copy as large as
    ``weight``, to be made again whenever either changes; for training, keep them apart.
    """
    if weight.dim() != 2 or tuple(norm_weight.shape) != (weight.shape[1],):
        raise UnsupportedProblem(
            f"norm_weight must be (K,) and weight (N, K); their shapes are {tuple(norm_weight.shape)} and "
            f"{tuple(weight.shape)}"
        )
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) * norm_weight.to(wide)).to(weight.dtype)


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    for what in ("shape", "dtype", "device"):
        if getattr(residual, what) != getattr(x, what):
            raise UnsupportedProblem(f"residual must have x's {what} {getattr(x, what)}; got {getattr(residual, what)}")
    return x + residual


def _normalised(u: Tensor, rstd: Tensor, norm_weight: Tensor | None, exact: bool) -> Tensor:
    """``u * rstd * norm_weight`` by torch's own kernels, rounded once, or twice where ``exact``."""
    if rstd.shape != u.shape[:-1] or rstd.dtype not in (torch.float32, torch.float64) or rstd.device != u.device:
        raise UnsupportedProblem(
            f"rstd must be {tuple(u.shape[:-1])}, fp32, on {u.device}; it is {tuple(rstd.shape)}, {rstd.dtype}, on "
            f"{rstd.device}"
        )
    wide = torch.promote_types(u.dtype, torch.float32)
    h = u.to(wide) * rstd.to(wide).unsqueeze(-1)
    if exact:
        h = h.to(u.dtype).to(wide)
    if norm_weight is not None:
        h = h * norm_weight.to(wide)
    return h.to(u.dtype)
