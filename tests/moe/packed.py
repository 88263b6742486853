"""Shared by the tests of packed experts: stacks, and the product of each group with its expert in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from cutekernels.ops.moe.grouped import groups_of
from cutekernels.ops.moe.quantized import gated
from cutekernels.quant import QuantizedStack, quantize, stack

SCHEMES = ("mxfp4", "int4_g128", "int4_g32 zeros", "fp8_block", "fp8_channel", "int8_channel")


def experts(count: int, n: int, k: int, scheme: str, device: str = "cpu", seed: int = 0) -> QuantizedStack:
    """Experts of normal weights, of which a product with normal rows is near 1."""
    draw = torch.Generator().manual_seed(seed)
    name, zeros = scheme.removesuffix(" zeros"), scheme.endswith(" zeros")
    dense = torch.randn((count, n, k), generator=draw) * k**-0.5
    return stack([quantize(w.bfloat16(), name, symmetric=not zeros) for w in dense]).to(device)


def products(
    x: Tensor, weight: QuantizedStack, offsets: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """The truth: in fp64, rounded once; rows of no expert are 0."""
    dense = weight.dequantize(torch.float32)
    columns = weight.shape[1] // (2 if activation in ("silu_mul", "swiglu_oai") else 1)
    out = x.new_zeros((len(x), columns))
    for e, (begin, end) in enumerate(groups_of(offsets, len(x))):
        y = x[begin:end].double() @ dense[e].double().mT
        y = y if bias is None else y + bias[e].double()
        out[begin:end] = gated(y, activation, 1.702, 7.0).to(x.dtype)
    return out
