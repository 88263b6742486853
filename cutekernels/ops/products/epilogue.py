"""A product's end in problems and references: its bias, and the activation or gate behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutekernels.kernels.activations import activated
from cutekernels.ops.products.schedules.problem import ELEMENT_BYTES, GATED

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CLAMPED = "swiglu_oai"  # gpt-oss's gate: (up + 1) * gate * sigmoid(alpha * gate), with both clamped
ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss
GATES = (GATED, CLAMPED)


def bias_bytes(kind: str, elements: float) -> float:
    return 0.0 if kind == "none" else elements * (4 if kind == "fp32" else ELEMENT_BYTES)


def activate(y: Tensor, activation: str, alpha: float = ALPHA, limit: float = LIMIT) -> Tensor:
    """``activation`` of what a product gave, gates before up where it takes both. ``alpha``, ``limit``: of CLAMPED."""
    import torch

    if activation not in GATES:
        return activated(y, activation)
    gate, up = y.chunk(2, dim=-1)
    if activation == GATED:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def exact_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype, *gate: Any
) -> Tensor:
    """``activation(x @ weight.T + bias)`` in fp64, rounded once. ``gate``: alpha and limit."""
    y = x.double() @ weight.double().mT
    if bias is not None:
        y = y + bias.double()
    return activate(y, activation, *gate).to(dtype)
