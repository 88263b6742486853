"""bitsandbytes nf4: a flat run of codes in blocks that share ``absmax``, which may itself be of eight bits.

``weight`` ``(N * K / 2, 1)``: bytes, high nibble first, in rows of W one behind the other. ``absmax``: fp32, or codes
of ``nested_quant_map``, worth ``map[q] * nested_absmax[b // nested_blocksize] + nested_offset``. Sizes, dtype and
offset stand in ``quant_state.bitsandbytes__nf4``, JSON as bytes. An element is ``NF4[q] * absmax``.

Blocks do not end with rows. Where they do not divide K, parts of 32, 64 or 128 that divide both are groups, each with
the scale of the block that it lies in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.nf4 import NF4
from cutekernels.quant.assembly import assemble, unassemble
from cutekernels.quant.formats.nibbles import check, expect, take, to_bytes
from cutekernels.quant.formats.plain import copy
from cutekernels.quant.layout import dense
from cutekernels.quant.weight import QuantizedWeight

STATE = "quant_state.bitsandbytes__nf4"
NAMES = (
    "weight",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    f"weight.{STATE}",
)
_BY = "bitsandbytes"
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def from_bitsandbytes(
    weight: Tensor, state: Mapping[str, Tensor] | Any = None, *, dtype: torch.dtype | None = None
) -> QuantizedWeight:
    """A weight from a ``Params4bit``, or from packed codes and their state.

    Args:
        weight: the packed codes, or a ``Params4bit``.
        state: a ``QuantState``, or its tensors by their names behind ``weight.``; None: ``weight.quant_state``.
        dtype: of the weight's ``dequantize``; that of the state if None.

    Raises:
        UnsupportedProblem: fp4, a K that 32 does not divide, and tensors that contradict each other.
    """
    check("weight", weight, by=_BY)
    state = getattr(weight, "quant_state", None) if state is None else state
    if state is None:
        raise UnsupportedProblem(
            "a weight of bitsandbytes has a quant_state, and this one is not quantized yet; "
            "move the model to a device first"
        )
    data = weight.detach().as_subclass(Tensor)
    tensors = dict(state if isinstance(state, Mapping) else state.as_dict(packed=True))
    said = _read_state(tensors)
    n, k = said["shape"]
    block = said["blocksize"]
    group = block if k % block == 0 else math.gcd(block, k)
    if group % 32:
        raise UnsupportedProblem(
            f"blocks of {block} elements run on from row to row, and kernels take groups of 32 at least, so "
            f"that 32 divides K, which is {k}; quantize the dequantized weight anew with cutekernels.quant.quantize"
        )
    flat = dense(dense(data).reshape(-1)).view(torch.uint8)
    if flat.numel() * 2 != n * k:
        raise UnsupportedProblem(
            f"bitsandbytes's weight has {n * k // 2} bytes for shape ({n}, {k}), not {flat.numel()}; "
            "download the checkpoint again"
        )
    table = take(tensors, "quant_map", by=_BY)
    if table.numel() != 16 or not torch.equal(table.float().cpu().flatten(), torch.tensor(NF4)):
        raise UnsupportedProblem(
            "quant_map holds the sixteen values of nf4, and here it does not; quantize anew as nf4"
        )
    scales = _absmax(tensors, said, -(-n * k // block)).to(flat.device)
    pairs = torch.stack((flat >> 4, flat & 15), dim=-1)
    small = {name: copy(tensor) for name, tensor in tensors.items() if name != "absmax" or "nested_absmax" in tensors}
    return assemble(
        pairs.reshape(n, k),
        "nf4",
        scales.repeat_interleave(block // group)[: n * k // group].reshape(n, k // group).t(),
        group=group,
        dtype=_DTYPES[said["dtype"]] if dtype is None else dtype,
        format="bitsandbytes",
        details={
            "extra": small,
            "data": (tuple(data.shape), data.dtype),
            "nested": "nested_absmax" in tensors,
            "repeated": block // group,
        },
    )


def _read_state(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The JSON of ``quant_state``, with the fields that are read."""
    names = [name for name in tensors if name.startswith("quant_state.")]
    if names and names != [STATE]:
        raise UnsupportedProblem(
            f"4-bit weights of bitsandbytes are read as nf4, not {names[0].rpartition('__')[2]}; "
            'quantize with bnb_4bit_quant_type="nf4"'
        )
    raw = take(tensors, STATE, by=_BY)
    try:
        said = json.loads(bytes(raw.cpu().tolist()))
        fields = {name: said[name] for name in ("blocksize", "dtype", "shape")}
        fields["quant_type"] = said.get("quant_type", "nf4")
        if "nested_absmax" in tensors:
            fields |= {name: said[name] for name in ("nested_blocksize", "nested_offset")}
        rows, columns = fields["shape"]
        sizes = rows, columns, fields["blocksize"], fields.get("nested_blocksize", 1)
        offset = float(fields.get("nested_offset", 0.0))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise UnsupportedProblem(
            f"{STATE} is JSON with blocksize, dtype and a shape of two, and here it is not "
            f"({type(error).__name__}: {str(error)[:80]}); download the checkpoint again"
        ) from None
    if (
        fields["quant_type"] != "nf4"
        or str(fields["dtype"]) not in _DTYPES
        or not all(type(size) is int and 0 < size < 2**31 for size in sizes)
        or not math.isfinite(offset)
    ):
        raise UnsupportedProblem(
            f"{STATE} says nf4, fp16, bf16 or fp32 and sizes of at least 1, not {str(fields)[:200]}; "
            "quantize anew as nf4"
        )
    return fields


def _absmax(tensors: Mapping[str, Tensor], said: Mapping[str, Any], blocks: int) -> Tensor:
    """The scales in fp32, one a block."""
    absmax = take(tensors, "absmax", by=_BY)
    why = f"shape {tuple(said['shape'])} in blocks of {said['blocksize']}"
    nested = tensors.get("nested_absmax")
    expect("absmax", absmax, (torch.float32,) if nested is None else (torch.uint8,), (blocks,), why, by=_BY)
    if nested is None:
        return absmax
    size = said["nested_blocksize"]
    table = take(tensors, "nested_quant_map", by=_BY)
    expect("nested_absmax", nested, (torch.float32,), (-(-blocks // size),), f"{blocks} blocks by {size}", by=_BY)
    expect("nested_quant_map", table, (torch.float32,), (256,), "eight bits", by=_BY)
    offset = torch.tensor(float(said["nested_offset"]), device=absmax.device)  # fp32
    return table[absmax.int()] * nested.repeat_interleave(size)[:blocks] + offset


def write(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors that :func:`from_bitsandbytes` read."""
    codes, scales, _, _ = unassemble(weight)
    shape, dtype = weight.details["data"]
    swapped = codes.flatten().unflatten(0, (-1, 2)).flip(-1).flatten()
    tensors = {"weight": to_bytes(swapped).view(dtype).reshape(shape)}
    if not weight.details["nested"]:
        tensors["weight.absmax"] = scales.t().flatten()[:: weight.details["repeated"]]
    return {
        **tensors,
        **{f"weight.{name}": tensor.to(weight.device) for name, tensor in weight.details["extra"].items()},
    }
