"""Slopes of the activations that products end with, in plain torch: what their gradients are multiplied by."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def through_activation(grad: Tensor, z: Tensor, activation: str) -> Tensor:
    """``grad`` times the slope of the activation at ``z``; for ReLU its value does for ``z``."""
    if activation == "relu":
        return torch.where(z > 0, grad, torch.zeros_like(grad))
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    return (grad.to(wide) * SLOPES[activation](z.to(wide))).to(grad.dtype)


def _silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def _gelu_slope(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _gelu_tanh_slope(z: Tensor) -> Tensor:
    k = math.sqrt(2 / math.pi)
    t = torch.tanh(k * (z + 0.044715 * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * k * (1 + 3 * 0.044715 * z * z)


SLOPES = {"silu": _silu_slope, "gelu": _gelu_slope, "gelu_tanh": _gelu_tanh_slope}
