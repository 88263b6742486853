"""Shared by the tests of packed experts: stacks, and the product of each group with its expert in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from cutekernels.ops.products.epilogue import activate
from cutekernels.ops.products.groups import groups_of
from cutekernels.quant import QuantizedStack, QuantizedWeight, quantize, read, stack

SCHEMES = ("mxfp4", "nvfp4", "int4_g128", "int4_g32 zeros", "fp8_block", "fp8_channel", "int8_channel")


def experts(count: int, n: int, k: int, scheme: str, device: str = "cpu", seed: int = 0) -> QuantizedStack:
    """Experts of normal weights, of which a product with normal rows is near 1."""
    draw = torch.Generator().manual_seed(seed)
    name, zeros = scheme.removesuffix(" zeros"), scheme.endswith(" zeros")
    if scheme == "nvfp4":
        return stack([_nvfp4(n, k, draw) for _ in range(count)]).to(device)
    dense = torch.randn((count, n, k), generator=draw) * k**-0.5
    return stack([quantize(w.bfloat16(), name, symmetric=not zeros) for w in dense]).to(device)


def _nvfp4(n: int, k: int, draw: torch.Generator) -> QuantizedWeight:
    """The weight of an expert with a factor of its own, as ModelOpt stores it."""
    codes = torch.randint(0, 256, (n, k // 2), generator=draw, dtype=torch.uint8)
    scales = torch.randint(48, 72, (n, k // 16), generator=draw, dtype=torch.uint8).view(torch.float8_e4m3fn)
    factor = (torch.rand((), generator=draw) + 0.5) / (6 * k**0.5)
    tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": factor}
    return read(tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})


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
        out[begin:end] = activate(y, activation, 1.702, 7.0).to(x.dtype)
    return out
