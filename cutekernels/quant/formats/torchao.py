"""torchao's weights, subclasses of Tensor: told by the names of their classes, so that torchao is not needed.

``Int4Tensor``: ``qdata`` ``(N, K / 2)``, q signed, low nibble first; ``scale`` and ``zero_point`` ``(K / g, N)``;
``q * s + z``.
``Int4TilePackedTo4dTensor``: ``qdata`` int32 ``(N / 8, K / 128, 32, 4)``, torch's ``_convert_weight_to_int4pack``;
scales and zeros side by side ``(K / g, N, 2)``; N is padded to 8 and K to 1024; ``(q - 8) * s + z``.
``Float8Tensor``: ``qdata`` e4m3 ``(N, K)``, ``scale`` per tensor, row or block; ``w * s``.

torchao's z is a float, added behind the product, which is rounded by itself: it becomes ``offsets``, unless it is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant.assembly import assemble, groups_of, unassemble
from cutekernels.quant.formats.nibbles import expect, matrix, of_bytes, of_words, take, to_bytes, to_words
from cutekernels.quant.formats.plain import read_plain, write_plain
from cutekernels.quant.layout import dense
from cutekernels.quant.weight import FLOATS, QuantizedWeight

CLASSES = ("Int4Tensor", "Int4TilePackedTo4dTensor", "Float8Tensor")
PREFIX = "_weight_"  # of flattened attributes in a safetensors file
NAMES = ("weight", *(PREFIX + name for name in ("qdata", "scale", "zero_point", "scale_and_zero")))
_TILE_K, _PADDED_K = 128, 1024
# (tile of N, tile of K, n, lane % 4, pair, odd, second k-tile, upper half) -> rows x K, and back
_TO_ROWS, _FROM_ROWS = (0, 2, 1, 4, 6, 7, 3, 5), (0, 2, 1, 6, 3, 7, 4, 5)


def from_torchao(tensor: Any, *, dtype: torch.dtype | None = None) -> QuantizedWeight:
    """A weight from one of torchao's tensors.

    Args:
        tensor: an instance of one of ``CLASSES``, or anything with its attributes.
        dtype: of the weight's ``dequantize``; the tensor's own if None.

    Raises:
        UnsupportedProblem: another class, activations that are scaled first, and tensors that contradict each other.
    """
    name = type(tensor).__name__
    if name not in CLASSES:
        raise UnsupportedProblem(
            f"torchao's tensors are read of the classes {', '.join(CLASSES)}, not {name}; "
            "quantize with Int4WeightOnlyConfig or Float8WeightOnlyConfig"
        )
    if getattr(tensor, "act_pre_scale", None) is not None:
        raise UnsupportedProblem(
            f"a weight multiplies activations as they are, and this {name} has act_pre_scale; "
            "quantize without AWQ's scaling"
        )
    dtype = tensor.dtype if dtype is None else dtype
    if name == "Float8Tensor":
        block = [int(extent) for extent in tensor.block_size or ()]
        return _float8(tensor.qdata, tensor.scale, block, dtype)
    n, k = (int(extent) for extent in tensor.shape[-2:])
    group = int(tensor.block_size[-1])
    if name == "Int4Tensor":
        return _int4(tensor.qdata, tensor.scale, tensor.zero_point, group, dtype)
    return _tiles(tensor.qdata, tensor.scale_and_zero, (n, k), group, dtype)


def from_flattened(tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> QuantizedWeight:
    """A weight from the attributes that a safetensors file holds, whose shapes say what the class was.

    ``Int4TilePackedTo4dTensor`` is taken to be as large as its padding: its true shape stands in the header alone.
    """
    data = take(tensors, PREFIX + "qdata", by="torchao")
    both = tensors.get(PREFIX + "scale_and_zero")
    if both is not None:
        if data.dim() != 4 or both.dim() != 3 or 0 in both.shape:
            raise UnsupportedProblem(
                f"torchao's tiles have four dimensions and their scales three, not {data.dim()} and {both.dim()}; "
                "check that the checkpoint is of this format"
            )
        k = data.shape[1] * _TILE_K
        return _tiles(data, both, (data.shape[0] * 8, k), k // both.shape[0], dtype)
    scale = take(tensors, PREFIX + "scale", by="torchao")
    if data.dtype == torch.float8_e4m3fn:
        block = [-(-a // b) for a, b in zip(data.shape, scale.shape, strict=False)] if scale.dim() == 2 else []
        return _float8(data, scale, block, dtype)
    zero = take(tensors, PREFIX + "zero_point", by="torchao")
    return _int4(data, scale, zero, 2 * data.shape[-1] // max(1, scale.shape[0]), dtype)


def _float8(data: Tensor, scale: Tensor, block: list[int], dtype: torch.dtype) -> QuantizedWeight:
    blocks = len(block) == 2 and block[0] > 1 and scale.numel() > 1
    return read_plain(
        data,
        scale,
        group=block[1] if len(block) == 2 and not blocks else 0,
        block=(block[0], block[1]) if blocks else None,
        by="torchao",
        dtype=dtype,
        format="torchao",
        details={"class": "Float8Tensor"},
        codes=("e4m3",),
    )


def _int4(data: Tensor, scale: Tensor, zero: Tensor, group: int, dtype: torch.dtype) -> QuantizedWeight:
    n, half = matrix("qdata", data, (torch.uint8, torch.int8), by="torchao")
    k = 2 * half
    why = f"a weight of {n} x {k} in groups of {group}"
    for name, table in (("scale", scale), ("zero_point", zero)):
        expect(name, table, FLOATS, (groups_of(group, k), n), why, by="torchao")
    return assemble(
        of_bytes(dense(data).view(torch.uint8)) ^ 8,
        "int4",
        scale,
        group=group,
        offsets=_finite(zero).to(scale.dtype),
        dtype=dtype,
        format="torchao",
        details={"class": "Int4Tensor", "data": data.dtype},
    )


def _tiles(data: Tensor, both: Tensor, shape: tuple[int, int], group: int, dtype: torch.dtype) -> QuantizedWeight:
    n, k = shape
    if data.dim() != 4 or data.dtype != torch.int32 or tuple(data.shape[2:]) != (32, 4):
        raise UnsupportedProblem(
            f"torchao's tiles are int32 (N / 8, K / 128, 32, 4), not {data.dtype} {tuple(data.shape)}; "
            "check that the checkpoint is of this format"
        )
    rows, columns = data.shape[0] * 8, data.shape[1] * _TILE_K
    why = f"{rows} x {columns} in groups of {group}"
    expect("scale_and_zero", both, FLOATS, (groups_of(group, columns), rows, 2), why, by="torchao")
    if not (n <= rows < n + 8 and k <= columns < k + _PADDED_K):
        raise UnsupportedProblem(
            f"torchao pads N to 8 and K to 1024, which makes no {rows} x {columns} of {n} x {k}; "
            "download the checkpoint again"
        )
    split = of_words(data).reshape(rows // 8, columns // _TILE_K, 8, 4, 4, 2, 2, 2)
    codes = split.permute(*_TO_ROWS).reshape(rows, columns)
    groups = groups_of(group, k)
    return assemble(
        codes[:n, :k],
        "int4",
        both[:groups, :n, 0],
        group=group,
        offsets=_finite(both[:groups, :n, 1]),
        dtype=dtype,
        format="torchao",
        details={"class": "Int4TilePackedTo4dTensor", "padded": (rows, columns)},
    )


def _finite(zero: Tensor) -> Tensor:
    if not bool(torch.isfinite(zero).all()):
        raise UnsupportedProblem(
            "torchao's zero points are finite, and some here are NaN or infinite; download the checkpoint again"
        )
    return zero


def write(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The attributes of the tensor that was read, by their names in a safetensors file."""
    kind = weight.details["class"]
    if kind == "Float8Tensor":
        data, scale = write_plain(weight)
        return {PREFIX + "qdata": data, PREFIX + "scale": scale}
    codes, scales, _, offsets = unassemble(weight)
    assert offsets is not None
    if kind == "Int4Tensor":
        data = to_bytes(codes ^ 8).view(weight.details["data"])
        return {PREFIX + "qdata": data, PREFIX + "scale": scales, PREFIX + "zero_point": offsets}
    rows, columns = weight.details["padded"]
    if (rows, columns) != weight.shape:
        raise UnsupportedProblem(
            f"what torchao wrote into its padding from {weight.shape} to {(rows, columns)} is not kept; "
            "save the model with torchao before it is read"
        )
    split = codes.reshape(rows // 8, 8, columns // _TILE_K, 4, 2, 2, 4, 2)
    words = to_words(split.permute(*_FROM_ROWS).reshape(rows // 8, columns // _TILE_K, 32, 4, 8))
    return {PREFIX + "qdata": words, PREFIX + "scale_and_zero": torch.stack((scales, offsets), dim=-1)}
