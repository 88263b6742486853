"""``rms_norm_linear`` and ``linear_silu_mul`` as a chain of the ops they are made of, each as it is tuned.

``linear`` takes packed weights too: for those there is no other way.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.activations.api import silu_mul
from cutekernels.ops.gemm.api import linear
from cutekernels.ops.norms.api import add_rms_norm, rms_norm
from cutekernels.quant.weight import QuantizedWeight


def norm_then_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    activation: str | None,
    *,
    residual: Tensor | None = None,
    exact: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(y, u)``: the norm's kernel, which rounds its rows, then the product's."""
    rounding: Literal["once", "huggingface"] = "huggingface" if exact else "once"
    if rstd is not None:
        u = x if residual is None else _sum(x, residual)
        h = _normalise(u, rstd, norm_weight, exact)
    elif residual is None:
        u, h = x, rms_norm(x, norm_weight, eps=eps, rounding=rounding)
    else:
        h, u = add_rms_norm(x, residual, norm_weight, eps=eps, rounding=rounding)
    return linear(h, weight, bias, activation=activation, out=out), u  # type: ignore[arg-type]


def linear_then_gate(
    x: Tensor,
    w_gate_up: Tensor | QuantizedWeight,
    norm_weight: Tensor | None,
    eps: float,
    norm: bool,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The norm's kernel where there is a norm, one product for gate and up, rounded, then the gate's kernel."""
    h = rms_norm(x, norm_weight, eps=eps) if norm else x
    return silu_mul(linear(h, w_gate_up), out=out)


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    for what in ("shape", "dtype", "device"):
        if getattr(residual, what) != getattr(x, what):
            raise UnsupportedProblem(f"residual must have x's {what} {getattr(x, what)}; got {getattr(residual, what)}")
    return x + residual


def _normalise(u: Tensor, rstd: Tensor, norm_weight: Tensor | None, exact: bool) -> Tensor:
    """``u * rstd * norm_weight`` by torch's own kernels, rounded once, or twice where ``exact``."""
    check_rstd(rstd, u)
    wide = torch.promote_types(u.dtype, torch.float32)
    h = u.to(wide) * rstd.to(wide).unsqueeze(-1)
    if exact:
        h = h.to(u.dtype).to(wide)
    if norm_weight is not None:
        h = h * norm_weight.to(wide)
    return h.to(u.dtype)


def check_rstd(rstd: Tensor, u: Tensor) -> None:
    if rstd.shape != u.shape[:-1] or rstd.dtype not in (torch.float32, torch.float64) or rstd.device != u.device:
        raise UnsupportedProblem(
            f"rstd must be {tuple(u.shape[:-1])}, fp32, on {u.device}; it is {tuple(rstd.shape)}, {rstd.dtype}, on "
            f"{rstd.device}"
        )
