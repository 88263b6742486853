"""``quantize``: a weight of bf16, fp16 or fp32 in four or eight bits, by rounding to nearest (ties to even).

All is computed in fp32, per group of a row, per row, or per block; ``a`` is the largest absolute value there::

    int4, symmetric    s = a / 7.5                       q = clamp(round(w / s) + 8, 0, 15)    z = 8
    int4, asymmetric   s = (max(w, 0) - min(w, 0)) / 15  q = clamp(round(w / s) + z, 0, 15)    z = round(-min(w, 0) / s)
    int8               s = a / 127                       q = clamp(round(w / s), -127, 127)
    e4m3               s = a / 448                       q = e4m3(clamp(w / s, -448, 448))
    mxfp4              s = 2 ** (floor(log2(a)) - 2)     q = e2m1(clamp(w / s, -6, 6)), blocks of 32 (OCP MX)

Codes are found with the scale as it is stored: int4 has fp16 scales, or fp32 ones where a scale is beyond fp16's normal
numbers; others have fp32. Where all values are 0, s is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem, near
from cutekernels.quant.assembly import assemble, groups_of
from cutekernels.quant.formats.nibbles import check
from cutekernels.quant.formats.own import SCHEMES
from cutekernels.quant.weight import FLOATS, QuantizedWeight

_E4M3_MAX = 448.0
_FP16 = torch.finfo(torch.float16)


@torch.no_grad()
def quantize(weight: Tensor, scheme: str, *, symmetric: bool = True) -> QuantizedWeight:
    """``weight`` rounded to nearest, on its device; ``dequantize`` gives its dtype.

    Args:
        weight: ``(N, K)`` in bf16, fp16 or fp32, finite.
        scheme: ``"int4_g128"``, ``"int4_g64"``, ``"int4_g32"``, ``"int4"`` (a scale per row), ``"fp8_channel"``,
            ``"fp8_block"`` (128 x 128), ``"int8_channel"`` or ``"mxfp4"``.
        symmetric: int4 alone: zeros are 8; else each group has its own.

    Raises:
        UnsupportedProblem: an unknown scheme, zeros for eight bits, or a weight that is no finite matrix.
    """
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise UnsupportedProblem(
            f"a scheme is one of {', '.join(SCHEMES)}, not {str(scheme)[:60]!r}. {near(str(scheme), SCHEMES)}"
            "Pass one of them"
        )
    if not isinstance(symmetric, bool):
        raise UnsupportedProblem(f"symmetric is True or False, not {symmetric!r:.60}; pass either")
    check("weight", weight, by="quantize")
    code, group, scale_rows = SCHEMES[scheme]
    if weight.dtype not in FLOATS or weight.dim() != 2 or 0 in weight.shape:
        raise UnsupportedProblem(
            f"quantize takes a matrix of fp16, bf16 or fp32, not {'an empty one of ' if 0 in weight.shape else ''}"
            f"{weight.dtype} {tuple(weight.shape)}; "
            "pass the weight of a linear layer"
        )
    if not symmetric and code != "int4":
        raise UnsupportedProblem(f"{scheme} has no zeros; leave symmetric=True, or quantize to int4")
    if not bool(torch.isfinite(weight).all()):
        raise UnsupportedProblem(
            "quantize takes finite weights, and some here are NaN or infinite; look for the bad layer"
        )
    zeros: Tensor | None = None
    block: tuple[int, int] | None = None
    if scale_rows == 128:
        codes, scales = _blocks(weight)
        block = (128, 128)
    elif code == "e2m1":
        codes, scales = _mxfp4(weight)
    elif code == "int4":
        codes, scales, zeros = _int4(weight, group, symmetric)
    else:
        largest, limit = weight.abs().amax(1, keepdim=True).float(), _E4M3_MAX if code == "e4m3" else 127.0
        scales = _nonzero(largest / limit)
        codes = _eight(weight.float() / scales, limit)
        scales = scales.t()
    return assemble(
        codes,
        code,
        scales,
        group=group,
        zeros=zeros,
        block=block,
        dtype=weight.dtype,
        format="cutekernels",
        details={"scheme": scheme},
    )


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


def _eight(ratio: Tensor, limit: float) -> Tensor:
    """Bytes of e4m3 (``limit`` 448) or int8 nearest to ``ratio``."""
    ratio = ratio.clamp(-limit, limit)
    return (ratio.to(torch.float8_e4m3fn) if limit == _E4M3_MAX else ratio.round().to(torch.int8)).view(torch.uint8)


def _blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -k % 128, 0, -n % 128)).unflatten(1, (-1, 128))
    padded = padded.unflatten(0, (-1, 128))
    scales = _nonzero(padded.abs().amax((1, 3)) / _E4M3_MAX)
    codes = _eight(padded / scales[:, None, :, None], _E4M3_MAX)
    return codes.flatten(2).flatten(0, 1)[:n, :k], scales


def _int4(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    n, k = weight.shape
    size = k if group == 0 or group >= k else group
    padded = torch.nn.functional.pad(weight.float(), (0, -k % size)).reshape(n, groups_of(size, k), size)
    low = padded.amin(-1).clamp(max=0)
    high = padded.amax(-1).clamp(min=0)
    scales = _to_fp16(_nonzero(torch.maximum(-low, high) / 7.5 if symmetric else (high - low) / 15))
    exact = scales.float()
    zeros = torch.full_like(exact, 8) if symmetric else (-low / exact).round().clamp(0, 15)
    codes = ((padded / exact[..., None]).round() + zeros[..., None]).clamp(0, 15).to(torch.uint8)
    return codes.flatten(1)[:, :k], scales.t(), None if symmetric else zeros.to(torch.uint8).t()


def _mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of a block lies from 4 to 8 times its scale, as OCP's specification of MX has it; above 6 it is 6."""
    k = weight.shape[1]
    blocks = torch.nn.functional.pad(weight.float(), (0, -k % 32)).unflatten(1, (-1, 32))
    largest = blocks.abs().amax(-1)
    exponent = (torch.frexp(largest).exponent - 3).clamp(-127, 127).where(largest > 0, torch.zeros(()).int())
    ratio = torch.ldexp(blocks, -exponent[..., None]).abs()
    # Nearest of E2M1's values, ties to the even code: thresholds alternate between "above" and "from".
    edges = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), device=weight.device)
    below, above = torch.bucketize(ratio, edges, right=False), torch.bucketize(ratio, edges, right=True)
    codes = torch.where(below % 2 == 0, below, above)
    codes = codes | (torch.signbit(blocks).long() << 3)
    return codes.flatten(1)[:, :k].to(torch.uint8), (exponent + 127).to(torch.uint8).t()


def _to_fp16(scales: Tensor) -> Tensor:
    """In fp16 where all are among its normal numbers."""
    fits = bool((scales >= _FP16.smallest_normal).all()) and bool((scales <= _FP16.max).all())
    return scales.half() if fits else scales
