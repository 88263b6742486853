"""Shared by the tests of packed weights: weights with a truth that no layout goes into, and planted bugs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from cutekernels.kernels.activations import activated
from cutekernels.kernels.cute.parts.nf4 import NF4
from cutekernels.ops.shared.tolerance import rounded_operand_depth
from cutekernels.quant import QuantizedWeight, layout
from cutekernels.quant.weight import E2M1, scales_shape
from cutekernels.verify import worst_error

BF16, FP16, FP32, E8M0, UE5M3 = torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int32
_SIZE = {"int4": 5.0, "int8": 74.0, "e4m3": 130.0, "nf4": 0.5, "e2m1": 2.9}  # the root mean square of codes


@dataclass(frozen=True)
class Kind:
    """All of a weight but its extents."""

    code: str = "int4"
    group: int = 128
    scale_rows: int = 1
    zeros: bool = False
    scale: torch.dtype = FP16
    order: bool = False

    def __str__(self) -> str:
        rows = "" if self.scale_rows == 1 else f"x{self.scale_rows}"
        extras = "".join(f" {name}" for name in ("zeros", "order") if getattr(self, name))
        return f"{self.code} g{self.group}{rows}{extras} {str(self.scale).removeprefix('torch.')}"


_INT4 = [Kind("int4", g, zeros=z, scale=s) for g, z, s in product((0, 32, 64, 128), (False, True), (FP16, BF16, FP32))]
_OTHERS = [
    Kind(code, g, scale=s) for code, g, s in product(("int8", "e4m3", "nf4"), (0, 32, 64, 128), (FP16, BF16, FP32))
]
_BLOCKS = [Kind("e4m3", 128, 128, scale=s) for s in (FP32, BF16, FP16)]
_MXFP4, _NVFP4 = Kind("e2m1", 32, scale=E8M0), Kind("e2m1", 16, scale=UE5M3)
KINDS = {str(kind): kind for kind in (*_INT4, *_OTHERS, *_BLOCKS, _MXFP4, _NVFP4)}
COMMON = {  # one of each code and way of scaling
    str(kind): kind
    for kind in (
        Kind(), Kind(group=32, zeros=True, scale=FP32), Kind("e4m3", 0, scale=FP32), Kind("e4m3", 128, 128, scale=FP32),
        Kind("int8", 64, scale=BF16), Kind("nf4", 64, scale=FP32), _MXFP4, _NVFP4,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A weight as its codes, zeros and scales, columns as packed: ``(N, K)`` codes, others ``scales_shape``.

    Scales of groups of 16 are bytes ``(groups, N)``, and ``factors`` those of rows, and what divides.
    """

    kind: Kind
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    factors: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    def weight(self) -> QuantizedWeight:
        """As kernels take it."""
        kind = self.kind
        fill = 0 if kind.code != "int4" else 8
        return QuantizedWeight(
            kind.code, kind.group, kind.scale_rows, self.shape,
            layout.pack(self.codes, kind.code, fill),
            layout.pack_scales(self.scales) if kind.scale == UE5M3 else self.scales, self.zeros, self.order,
            factors=self.factors,
        )  # fmt: skip

    def exact(self) -> Tensor:
        """The values in fp64, as the definition of each code has them; columns as the weight's."""
        n, k = self.shape
        device, kind = self.codes.device, self.kind
        if kind.code in ("int4", "nf4", "e2m1"):
            table = {"int4": range(16), "nf4": NF4, "e2m1": E2M1}[kind.code]
            values = torch.tensor(table, dtype=torch.float64, device=device)[self.codes.long()]
        else:
            own = torch.int8 if kind.code == "int8" else torch.float8_e4m3fn
            values = self.codes.view(own).float().double()
        row = torch.arange(n, device=device)[:, None] // kind.scale_rows
        group = (
            torch.arange(k, device=device)[None] // kind.group if kind.group else torch.zeros(1, k).long().to(device)
        )
        if kind.code == "int4":
            values = values - (8 if self.zeros is None else self.zeros[group, row].double())
        scales = self.scales.double()
        if kind.scale == E8M0:
            scales = torch.exp2(scales - 127)
        if self.factors is not None:
            factor, divisor = self.factors
            scales = torch.exp2(scales.div(8).floor() - 15) * (1 + scales % 8 / 8)
            scales = torch.where(divisor == 1, scales.float() * factor, scales.float() / divisor).double()
        values = values * scales[group, row]
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order.long(), values)


def make(n: int, k: int, kind: Kind = Kind(), device: str = "cpu", seed: int = 0) -> Made:
    """Random codes, of which a product with standard normal tokens is near 1."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << layout.BITS[kind.code], (n, k), generator=draw, dtype=torch.int32)
    if kind.code == "e4m3":
        codes = torch.where(codes % 128 == 127, codes - 1, codes)  # no NaN
    shape = scales_shape(kind.group, kind.scale_rows, (n, k))
    scales = (torch.rand(shape, generator=draw) + 0.5) / (_SIZE[kind.code] * k**0.5)
    factors = None
    if kind.scale == UE5M3:
        factor = scales[0] / 128
        divisor = torch.where(torch.arange(shape[1]) % 2 == 0, 1.0, 1 / factor)
        factors = torch.stack((torch.where(divisor == 1, factor, 1 / divisor), divisor))
        scales = torch.randint(128, 191, (4 * shape[0], shape[1]), generator=draw).to(torch.uint8)  # 2 to 448
    else:
        scales = (scales.log2().round() + 127).to(E8M0) if kind.scale == E8M0 else scales.to(kind.scale)
    zeros = torch.randint(0, 17, shape, generator=draw).to(torch.uint8) if kind.zeros else None
    order = torch.randperm(k, generator=draw).to(torch.int32) if kind.order else None
    if kind.scale_rows == 1:  # rows that are padding
        scales[:, n:] = 0
    return Made(
        kind,
        codes.to(torch.uint8).to(device),
        scales.to(device),
        None if zeros is None else zeros.to(device),
        None if order is None else order.to(device),
        None if factors is None else factors.contiguous().to(device),
    )


def product_of(x: Tensor, exact: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """The truth: in fp64, rounded once to the type of ``x``."""
    y = x.double() @ exact.t()
    if bias is not None:
        y = y + bias.double()
    return activated(y, "none" if activation is None else activation).to(x.dtype)


def error(y: Tensor, expected: Tensor, k: int, *, gated: bool = False) -> float:
    """Over the tolerance that the op's declaration derives; up to 1 is right."""
    kind = {BF16: "bf16", FP16: "fp16"}.get(y.dtype)
    depth = float(k) if kind is None else max(float(k), rounded_operand_depth(kind, gated=gated))
    return worst_error((y,), (expected,), 2.0 * y.numel() * k, depth=depth)


# ---- planted bugs ---------------------------------------------------------------------------------------


def wrong_nibble(made: Made, row: int, column: int) -> Made:
    """One code off by half its range: of e4m3 its sign."""
    codes = made.codes.clone()
    codes[row, column] ^= 1 << layout.BITS[made.kind.code] - 1
    return replace(made, codes=codes)


def wrong_zero(made: Made, row: int, group: int) -> Made:
    """One zero point off by one."""
    assert made.zeros is not None
    zeros = made.zeros.clone()
    zeros[group, row] += 1 if zeros[group, row] < 16 else 255
    return replace(made, zeros=zeros)


def swapped_scales(made: Made, row: int) -> Made:
    """Two rows (of blocks) with one another's scales."""
    scales = made.scales.clone()
    scales[:, [row, row + 1]] = scales[:, [row + 1, row]]
    return replace(made, scales=scales)


def shifted_edge(made: Made, by: int) -> Made:
    """Every element of the last ``by`` columns of a group decoded with the next group's scale and zero, in fp64."""
    return _Shifted(made.kind, made.codes, made.scales, made.zeros, made.order, made.factors, by)


@dataclass(frozen=True)
class _Shifted(Made):
    by: int = 0

    def exact(self) -> Tensor:
        assert self.order is None
        n, k = self.shape
        column = (torch.arange(k, device=self.codes.device) + self.by).clamp(max=k - 1)
        codes = self.codes.clone().index_copy_(1, column, self.codes)
        values = Made(self.kind, codes, self.scales, self.zeros, None, self.factors).exact()[:, column]
        plain = Made(self.kind, self.codes, self.scales, self.zeros, None, self.factors).exact()
        whole = torch.arange(k, device=self.codes.device) < k - self.by  # the clamped columns share a place
        return torch.where(whole[None].expand(n, k), values, plain)
