"""A product's end in problems, samples and references: its bias, and the activation or gate behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cutekernels.kernels.activations import activated
from cutekernels.ops.gemm.problem import ELEMENT_BYTES
from cutekernels.ops.shared.dtypes import DTYPES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GATED: Final = "silu_mul"  # the activation of a weight that has a gate's rows before up's: out has half as many columns


def kind_of(t: Tensor | None, x: Tensor) -> str:
    """The word of a bias or a norm's weight beside ``x``: "none", "same" or "fp32"."""
    return "none" if t is None else "same" if t.dtype == x.dtype else "fp32"


def bias_bytes(kind: str, elements: float) -> float:
    return 0.0 if kind == "none" else elements * (4 if kind == "fp32" else ELEMENT_BYTES)


def draw_bias(p: Any, draw: torch.Generator, *shape: int) -> Tensor | None:
    """A standard normal bias that poses ``p``."""
    import torch

    if p.bias == "none":
        return None
    bias = torch.randn(shape, generator=draw, device=draw.device, dtype=torch.float32)
    return bias if p.bias == "fp32" else bias.to(DTYPES[p.dtype])


def activate(y: Tensor, activation: str) -> Tensor:
    """``activation`` of what a product gave, gates before up where it takes both."""
    import torch

    if activation != GATED:
        return activated(y, activation)
    gate, up = y.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
