"""compressed-tensors: ``pack-quantized`` int4 and int8, ``float-quantized``, ``int-quantized`` and ``naive-quantized``;
``nvfp4-pack-quantized`` is in ``nvfp4.py``.

Packed: ``weight_packed`` int32 ``(N, ceil(K / 8))`` (int8: ``ceil(K / 4)``), element i of a word at bits ``bits * i``,
stored ``q + 2 ** (bits - 1)``; ``weight_scale`` ``(N, groups)``; ``weight_shape`` ``(2,)``; asymmetric ones have
``weight_zero_point`` int32 ``(ceil(N / 8), groups)``, packed along N with the same offset. An element is
``s * (q - z)`` in the dtype of s.
Others hold ``weight`` in e4m3 or int8 and ``weight_scale`` per tensor, row, group or block: ``w * s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant.assembly import assemble, groups_of, unassemble
from cutekernels.quant.formats import nvfp4
from cutekernels.quant.formats.gptq import order_of, unordered
from cutekernels.quant.formats.nibbles import expect, extents, known_only, matrix, of_words, take, to_words
from cutekernels.quant.formats.plain import ACTIVATIONS, copies, extras, read_plain, write_plain
from cutekernels.quant.layout import dense
from cutekernels.quant.weight import FLOATS, QuantizedWeight

PACKED = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
PLAIN = ("weight", "weight_scale", "weight_zero_point")
NAMES = (*PACKED, "weight")
_BY = "compressed-tensors"


def from_compressed_tensors(
    tensors: Mapping[str, Tensor], weights: Mapping[str, Any], *, dtype: torch.dtype | None = None
) -> QuantizedWeight:
    """A weight from the tensors of one layer.

    Args:
        tensors: by their names behind the module's prefix.
        weights: ``weights`` of the layer's entry in ``config_groups``: ``num_bits``, ``type``, ``strategy``,
            ``symmetric``, ``group_size`` and ``block_structure``.
        dtype: of the weight's ``dequantize``; that of ``weight_scale`` if None, as the library has it.

    Raises:
        UnsupportedProblem: tensors that contradict each other or ``weights``.
    """
    if "weight_global_scale" in tensors:
        return nvfp4.from_nvfp4(tensors, _BY, dtype=dtype)
    scale = take(tensors, "weight_scale", by=_BY)
    dtype = scale.dtype if dtype is None else dtype
    extra = {name: tensors[name] for name in ("weight_shape", *ACTIVATIONS) if name in tensors}
    if "weight_packed" in tensors:
        known_only(tensors, (*PACKED, *ACTIVATIONS), by=_BY)
        return _pack(tensors, weights, scale, dtype, copies(extra))
    known_only(tensors, (*PLAIN, *ACTIVATIONS), by=_BY)
    weight = take(tensors, "weight", by=_BY)
    zero = tensors.get("weight_zero_point")
    if zero is not None:
        if bool(zero.float().any()):
            raise UnsupportedProblem(
                "8-bit weights are symmetric, and this layer's weight_zero_point is not 0; quantize with symmetric=True"
            )
        extra["weight_zero_point"] = zero
    block = weights.get("block_structure") if weights.get("strategy") == "block" else None
    return read_plain(
        weight,
        scale,
        group=_group(weights),
        block=None if block is None else (int(block[0]), int(block[1])),
        by=_BY,
        dtype=dtype,
        format="compressed-tensors",
        details={"extra": copies(extra)},
    )


def _group(weights: Mapping[str, Any]) -> int:
    size = weights.get("group_size")
    return int(size) if weights.get("strategy") in ("group", None) and size else -1


def _pack(
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, Any],
    scale: Tensor,
    dtype: torch.dtype,
    extra: dict[str, Tensor],
) -> QuantizedWeight:
    bits = int(weights.get("num_bits", 4))
    if bits not in (4, 8):
        raise UnsupportedProblem(f"packed integers are read of 4 and 8 bits, not {bits}; quantize with num_bits=4")
    words = take(tensors, "weight_packed", by=_BY)
    n, columns = matrix("weight_packed", words, (torch.int32,), by=_BY)
    lanes = 32 // bits
    k = _columns(tensors, n, columns, lanes)
    group = _group(weights)
    groups = groups_of(group, k)
    why = f"a weight of {n} x {k} in groups of {group}"
    one = scale.numel() == 1 and (n > 1 or groups > 1)  # strategy "tensor"
    expect("weight_scale", scale, FLOATS, tuple(scale.shape) if one else (n, groups), why, by=_BY)
    details: dict[str, Any] = {"bits": bits, "extra": extra, "scale_shape": tuple(scale.shape), "one": one}
    scales = scale.reshape(1, 1).expand(groups, n) if one else scale.t()
    zeros, order = None, None
    stored = tensors.get("weight_zero_point")
    if stored is None and weights.get("symmetric") is False:
        raise UnsupportedProblem(
            "an asymmetric layer of compressed-tensors has weight_zero_point, and this one has not; "
            "check symmetric in the config, or download the checkpoint again"
        )
    if stored is not None:
        if bits == 8:
            raise UnsupportedProblem(
                "8-bit weights are symmetric, and this layer has weight_zero_point; quantize with symmetric=True"
            )
        if stored.dtype == torch.int8:  # of versions that did not pack them
            expect("weight_zero_point", stored, (torch.int8,), (n, groups), why, by=_BY)
            zeros = _nibbles(stored.t())
        else:
            expect("weight_zero_point", stored, (torch.int32, torch.int8), (-(-n // 8), groups), why, by=_BY)
            zeros = of_words(stored.t()).flatten(-2)[:, :n]
        details["zero_dtype"] = stored.dtype
    codes = of_words(words).flatten(-2) if bits == 4 else dense(words).view(torch.uint8) ^ 0x80
    codes = codes[:, :k]
    index = tensors.get("weight_g_idx")
    if index is not None:
        expect("weight_g_idx", index, (torch.int32, torch.int64), (k,), why, by=_BY)
        unset = bool((index == -1).all())  # the library's mark for "no act-order"
        details["g_idx"] = (index.dtype, unset)
        order = None if unset else order_of(index, group, by=_BY)
        codes = codes if order is None else codes[:, order]
    return assemble(
        codes,
        "int4" if bits == 4 else "int8",
        scales,
        group=group,
        zeros=zeros,
        order=order,
        dtype=dtype,
        format="compressed-tensors",
        details=details,
    )


def _nibbles(zero: Tensor) -> Tensor:
    """Zero points -8 to 7, as they are stored: 0 to 15."""
    if bool(((zero < -8) | (zero > 7)).any()):
        raise UnsupportedProblem(
            "zero points of four bits are -8 to 7, and some here are beyond; check num_bits in the config"
        )
    return (zero + 8).to(torch.uint8)


def _columns(tensors: Mapping[str, Tensor], n: int, columns: int, lanes: int) -> int:
    """K, which ``weight_shape`` says and ``weight_packed`` rounds up."""
    shape = take(tensors, "weight_shape", by=_BY)
    said = extents("weight_shape", shape, by=_BY)
    if len(said) != 2 or said[0] != n or said[1] < 1 or -(-said[1] // lanes) != columns:
        raise UnsupportedProblem(
            f"weight_packed of {n} x {columns} words holds {n} x {columns * lanes} elements at most, and weight_shape "
            f"says {said}; check num_bits in the config, or download the checkpoint again"
        )
    return said[1]


def write(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors that :func:`from_compressed_tensors` read."""
    details = weight.details
    if weight.code == "e2m1":
        return nvfp4.write(weight)
    if "bits" not in details:
        data, scale = write_plain(weight)
        return {"weight": data, "weight_scale": scale, **extras(weight)}
    codes, scales, zeros, _ = unassemble(weight)
    codes, index = unordered(codes, weight)
    lanes = 32 // details["bits"]
    padded = torch.nn.functional.pad(codes if lanes == 8 else codes ^ 0x80, (0, -codes.shape[1] % lanes))
    words = to_words(padded.unflatten(-1, (-1, 8))) if lanes == 8 else dense(padded).view(torch.int32)
    scales = scales[:1, :1] if details["one"] else scales.t()
    tensors = {"weight_packed": words, "weight_scale": scales.reshape(details["scale_shape"])}
    if details.get("zero_dtype") == torch.int8:
        assert zeros is not None
        tensors["weight_zero_point"] = (zeros.to(torch.int8) - 8).t()
    elif "zero_dtype" in details:
        assert zeros is not None
        padded = torch.nn.functional.pad(zeros, (0, -zeros.shape[1] % 8))
        tensors["weight_zero_point"] = to_words(padded.unflatten(-1, (-1, 8))).t()
    if "g_idx" in details:
        dtype, unset = details["g_idx"]
        tensors["weight_g_idx"] = (torch.full_like(index, -1) if unset else index).to(dtype)
    return {**tensors, **extras(weight)}
