"""NVFP4: e2m1 elements in groups of 16 with e4m3 scales, and one fp32 factor for all of a weight.

compressed-tensors (``nvfp4-pack-quantized``): ``weight_packed`` uint8 ``(N, K / 2)``, the even element of K in the low
nibble, ``weight_scale`` e4m3 ``(N, K / 16)``, ``weight_global_scale`` fp32: ``E2M1[q] * fp32(s / global)``.
ModelOpt: the same as ``weight``, ``weight_scale`` and ``weight_scale_2``: ``E2M1[q] * fp32(s * scale_2)``.
Scales of activations are kept for ``tensors()``, and not read: activations stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant.assembly import assemble, unassemble
from cutekernels.quant.formats.nibbles import expect, known_only, matrix, of_bytes, take, to_bytes
from cutekernels.quant.formats.plain import ACTIVATIONS, copies, extras
from cutekernels.quant.layout import dense
from cutekernels.quant.weight import QuantizedWeight, ue5m3

GROUP = 16
NAMES = {  # format: the codes, the scales, and the factor or the divisor
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
}
BESIDE = (*ACTIVATIONS, "input_global_scale")


def from_nvfp4(tensors: Mapping[str, Tensor], format: str, *, dtype: torch.dtype | None = None) -> QuantizedWeight:
    """The weight of one linear layer.

    Args:
        tensors: the layer's, by their names behind the module's prefix.
        format: of ``NAMES``.
        dtype: of the weight's ``dequantize``; bf16 if None.

    Raises:
        UnsupportedProblem: tensors that contradict each other or the format, scales that are negative or NaN.
    """
    codes_name, scale_name, factor_name = NAMES[format]
    by = f"NVFP4 of {format}"
    known_only(tensors, (*NAMES[format], *BESIDE), by=by)
    data, stored, factor = (take(tensors, name, by=by) for name in NAMES[format])
    n, width = matrix(codes_name, data, (torch.uint8,), by=by)
    if width % (GROUP // 2):
        raise UnsupportedProblem(f"{by} has groups of {GROUP} elements of K, not {2 * width}; check {codes_name}")
    why = f"{n} rows of {2 * width} elements"
    expect(scale_name, stored, (torch.float8_e4m3fn,), (n, 2 * width // GROUP), why, by=by)
    expect(factor_name, factor, (torch.float32,), tuple(factor.shape) if factor.numel() == 1 else (1,), why, by=by)
    value = factor.reshape(1, 1)
    if int(dense(stored).view(torch.uint8).amax()) > 126 or not 0 < float(value) < float("inf"):
        raise UnsupportedProblem(
            f"{by}'s scales are e4m3 numbers from 0 on, and its {factor_name} one above; download the checkpoint again"
        )
    extra = {name: tensors[name] for name in BESIDE if name in tensors}
    details = {"extra": copies(extra), "factor_shape": tuple(factor.shape)}
    codes, blank = of_bytes(data), (stored.float() == 0).repeat_interleave(GROUP, 1)
    if bool((codes[blank] & 7).any()):  # a scale of 0 is one of codes of 0 here
        details["blank"] = codes[blank].cpu()
        codes = torch.where(blank, codes & 8, codes)
    one = torch.ones_like(value)
    pair = (one / value, value) if format == "compressed-tensors" else (value, one)
    scales = ((stored.float().view(torch.int32) >> 20) - (112 << 3)).clamp(min=0).to(torch.uint8)
    return assemble(
        codes,
        "e2m1",
        scales.t(),
        group=GROUP,
        factors=torch.cat(pair).expand(2, n),
        dtype=torch.bfloat16 if dtype is None else dtype,
        format=format,
        details=details,
    )


def write(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors that :func:`from_nvfp4` read."""
    codes, scales, _, _ = unassemble(weight)
    details, factors = weight.details, weight.factors
    assert factors is not None
    blank = scales.t() == 0
    if "blank" in details:
        codes[blank.repeat_interleave(GROUP, 1)] = details["blank"].to(codes.device)
    stored = ue5m3(scales.t()).masked_fill(blank, 0.0).to(torch.float8_e4m3fn)
    factor = factors[int(weight.format == "compressed-tensors"), 0].reshape(details["factor_shape"])
    values = to_bytes(codes), dense(stored), factor.clone()
    return {**dict(zip(NAMES[weight.format], values, strict=True)), **extras(weight)}
