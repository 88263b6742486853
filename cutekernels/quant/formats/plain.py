"""Formats that store a matrix of e4m3 or int8 and scales beside it: ``w * s``.

Hugging Face's block FP8 (DeepSeek, Qwen3-FP8) lives here with its names; compressed-tensors and torchao share the
reader. ``weight_scale_inv`` is fp32 ``(ceil(N / 128), ceil(K / 128))`` and multiplies, whatever its name says. Stored
as e8m0 or as uint8 it is ``2 ** (b - 127)``: byte 0 is 2 ** -127 and 255 is no number. ``scale_fmt`` in the config is
not read: there are models whose scales it does not describe. AutoFP8 has the same ``quant_method``, and one
``weight_scale`` for all of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant.assembly import assemble, groups_of, unassemble
from cutekernels.quant.formats.nibbles import matrix
from cutekernels.quant.layout import dense
from cutekernels.quant.weight import QuantizedWeight, powers_of_two

CODES = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}
DTYPES = {code: dtype for dtype, code in CODES.items()}
SCALES = ("weight_scale_inv", "weight_scale")
NAMES = ("weight", *SCALES)
# Of static activations, which a weight-only product does not read.
ACTIVATIONS = ("input_scale", "input_zero_point", "activation_scale", "act_scale")
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


def from_fp8(
    weight: Tensor,
    weight_scale_inv: Tensor,
    block: tuple[int, int] | None = (128, 128),
    *,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Tensor] | None = None,
    name: str = SCALES[0],
) -> QuantizedWeight:
    """A weight from Hugging Face's FP8 tensors, or AutoFP8's.

    Args:
        weight: e4m3fn ``(N, K)``.
        weight_scale_inv: fp32 or bf16, or exponents as e8m0 or uint8: one per block, or one for all.
        block: ``weight_block_size``; None where one scale serves all.
        dtype: of the weight's ``dequantize``; bf16 if None.
        extra: small tensors of the layer that are kept for ``tensors()``.
        name: under which ``tensors()`` gives the scale: ``"weight_scale_inv"`` or AutoFP8's ``"weight_scale"``.

    Raises:
        UnsupportedProblem: tensors that contradict each other or the format.
    """
    return read_plain(
        weight,
        weight_scale_inv,
        block=block,
        by="FP8",
        dtype=torch.bfloat16 if dtype is None else dtype,
        format="fp8",
        details={"extra": copies(extra), "scale_name": name},
        codes=("e4m3",),
    )


def read_plain(
    weight: Tensor,
    scale: Tensor,
    *,
    group: int = 0,
    block: tuple[int, int] | None = None,
    by: str,
    dtype: torch.dtype,
    format: str,
    details: Mapping[str, Any],
    codes: tuple[str, ...] = ("e4m3", "int8"),
) -> QuantizedWeight:
    """``weight * scale``, whose scales are one, one a row, one a group of a row, or one a block."""
    n, k = matrix("weight", weight, tuple(DTYPES[code] for code in codes), by=by)
    values = exponents(scale, by=by) if scale.dtype in _EXPONENTS else scale
    stored = {**details, "scale_shape": tuple(scale.shape), "scale_dtype": scale.dtype}
    if block is not None and min(block) < 1:
        raise UnsupportedProblem(
            f"{by}'s blocks have one row and one column at least, not {block[0]} x {block[1]}; check the block "
            "size of the config"
        )
    if block is not None and block[0] == 1:  # groups of one row, by another name
        group, block = block[1], None
    blocks = None if block is None else (-(-n // block[0]), -(-k // block[1]))
    if blocks is not None and scale.dim() == 2 and (scale.numel() > 1 or blocks == (1, 1)):
        wanted: tuple[int, ...] = blocks
    elif scale.numel() == 1:
        wanted, group, block = tuple(scale.shape), 0, None
        values = values.reshape(1, 1).expand(1, n)
        stored["one"] = True
    elif tuple(scale.shape) == (1, n) and group <= 0:  # as transformers' modules of compressed-tensors hold it
        wanted, block = (1, n), None
    else:
        wanted = (n, groups_of(group, k)) if scale.dim() == 2 else (n,)
        block = None
    if tuple(scale.shape) != wanted:
        raise UnsupportedProblem(
            f"{by}'s scales have shape {wanted} for a weight of {n} x {k}, not {tuple(scale.shape)}; "
            "check the block or group size of the config, or download the checkpoint again"
        )
    if block is None and not stored.get("one"):
        values = values.reshape(n, -1).t()
    return assemble(
        dense(weight).view(torch.uint8),
        CODES[weight.dtype],
        values,
        group=group,
        block=block,
        dtype=dtype,
        format=format,
        details=stored,
    )


def write_plain(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """``(weight, scale)`` as :func:`read_plain` was given them."""
    codes, scales, _, _ = unassemble(weight)
    details = weight.details
    if details.get("one"):
        scales = scales[:, :1]
    elif weight.scale_rows == 1:
        scales = scales.t()
    scales = scales.reshape(details["scale_shape"])
    stored = details["scale_dtype"]
    if stored in _EXPONENTS:
        # The exponent field of 2 ** -127, a subnormal, is 0 as well.
        scales = (dense(scales).view(torch.int32) >> 23).to(torch.uint8).view(stored)
    return codes.view(DTYPES[weight.code]), dense(scales)


def exponents(scale: Tensor, *, by: str) -> Tensor:
    """``2 ** (b - 127)`` of e8m0 bytes, fp32."""
    held = dense(scale).view(torch.uint8)
    if bool((held == 255).any()):
        raise UnsupportedProblem(f"{by}'s e8m0 scales hold byte 255, which is NaN; download the checkpoint again")
    return powers_of_two(held)


def copies(extra: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Small tensors that stay on the CPU until ``tensors()``."""
    return {} if extra is None else {name: copy(tensor) for name, tensor in extra.items()}


def copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which holds no file open."""
    return tensor.detach().to("cpu", copy=True)


def extras(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors that :func:`kept` put aside, on the weight's device."""
    return {name: tensor.to(weight.device) for name, tensor in weight.details.get("extra", {}).items()}


def write(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors that :func:`from_fp8` read."""
    data, scale = write_plain(weight)
    return {"weight": data, weight.details["scale_name"]: scale, **extras(weight)}
