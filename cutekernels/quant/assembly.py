"""From what a reader has unpacked to a ``QuantizedWeight``, with all values looked at, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant import layout
from cutekernels.quant.weight import EXPONENTS, FLOATS, GROUPS, NF4_ZERO, QuantizedWeight, scales_shape

MOST_EXPONENT = 152  # of MXFP4: a scale of 2 ** 25; decoding holds a weight times 2 ** -24 in bf16
MOST_UE5M3 = 190  # e4m3's 448


def packed_group(group: int, k: int) -> tuple[int, int]:
    """``(group, repeats)`` of the packed weight for a format's ``group`` along ``k`` elements.

    Raises:
        UnsupportedProblem: a group that is none of 32, 64, multiples of 128 and all of K.
    """
    if group <= 0 or group >= k:
        return 0, 1
    if group in GROUPS:
        return group, 1
    if group % 128 == 0:
        return 128, group // 128
    raise UnsupportedProblem(
        f"groups are of 32, 64 or a multiple of 128 elements, or of all of K, not {group} of K={k}; "
        "quantize the dequantized weight anew with cutekernels.quant.quantize"
    )


def check_group(group: object, *, by: str) -> None:
    """Raises UnsupportedProblem for what is no size of groups in a checkpoint."""
    if type(group) is not int or (group < 1 and group != -1):
        raise UnsupportedProblem(
            f"{by}'s groups have a number of elements of K from 1, or -1 for all of K, not {group!r:.60}; "
            "pass the group_size of the checkpoint's config"
        )


def groups_of(group: int, k: int) -> int:
    """How many groups of ``group`` elements cover ``k``; 0 and -1 stand for all of K."""
    return 1 if group <= 0 else -(-k // group)


@torch.no_grad()
def assemble(
    codes: Tensor,
    code: str,
    scales: Tensor,
    *,
    group: int,
    zeros: Tensor | None = None,
    offsets: Tensor | None = None,
    order: Tensor | None = None,
    block: tuple[int, int] | None = None,
    factors: Tensor | None = None,
    dtype: torch.dtype,
    format: str,
    details: Mapping[str, Any],
) -> QuantizedWeight:
    """A ``QuantizedWeight`` of what a reader has unpacked, with all values looked at.

    Args:
        codes: uint8 ``(N, K)``, columns as packed (permuted already where there is an ``order``).
        scales: ``(groups, N)``, or ``(blocks along N, blocks along K)`` where there is a ``block``.
        group: of the format: any size that :func:`packed_group` takes, 0 or -1 for all of K.
        zeros, offsets: ``(groups, N)``.
        block: ``(rows, columns)`` that share a scale, multiples of 128.
        factors: ``(2, N)``, of groups of 16.
    """
    n, k = codes.shape
    shape = (n, k)
    check_scales(scales, code, group)
    if code == "e4m3" and bool(((codes & 0x7F) == 0x7F).any()):
        raise UnsupportedProblem(
            "e4m3 weights hold numbers, not the NaN codes 0x7f and 0xff; download the checkpoint again or quantize anew"
        )
    kept: dict[str, Any] = {**details, "group": group}
    if block is not None:
        kept["block"] = block
        rows, columns = block
        if rows % 128 or columns % 128:
            raise UnsupportedProblem(
                f"blocks of scales have multiples of 128 rows and columns, not {rows} x {columns}; quantize the "
                'dequantized weight anew with cutekernels.quant.quantize(weight, "fp8_block")'
            )
        table = scales.repeat_interleave(rows // 128, 0)[: -(-n // 128)]
        table = table.repeat_interleave(columns // 128, 1)[:, : -(-k // 128)]
        return QuantizedWeight(
            code,
            128,
            128,
            shape,
            layout.pack(codes, code),
            layout.dense(table.t()),
            None,
            None,
            dtype,
            format,
            kept,
        )
    size, repeats = (group, 1) if code == "e2m1" else packed_group(group, k)
    count = scales_shape(size, 1, shape)[0]

    def strip(table: Tensor) -> Tensor:
        """``table`` repeated to the packed groups, rows padded to 64 with 0."""
        table = table if repeats == 1 else table.repeat_interleave(repeats, 0)[:count]
        table = layout.dense(torch.nn.functional.pad(table, (0, -n % layout.TILE)))
        return layout.pack_scales(table) if group == 16 and code == "e2m1" else table

    if zeros is not None and bool((zeros == 8).all()):
        zeros = None
        kept["zeros"] = True
    if offsets is not None and not bool(offsets.any()):
        kept["offsets"] = offsets.cpu() if bool(offsets.signbit().any()) else True  # -0 is written back as -0
        offsets = None
    fill: int | Tensor = NF4_ZERO if code == "nf4" else 0
    if code == "int4":
        fill = 8 if zeros is None else zeros[-1].clamp(max=15)
    return QuantizedWeight(
        code,
        size,
        1,
        shape,
        layout.pack(codes, code, fill),
        strip(scales),
        None if zeros is None else strip(zeros),
        None if order is None else layout.dense(order.to(torch.int32)),
        dtype,
        format,
        kept,
        None if offsets is None else strip(offsets),
        None if factors is None else layout.dense(torch.nn.functional.pad(factors, (0, -n % layout.TILE), value=1)),
    )


def check_scales(scales: Tensor, code: str, group: int) -> None:
    """Scales are finite fp16, bf16 or fp32; of e2m1 bytes up to ``MOST_EXPONENT``, or ``MOST_UE5M3``."""
    if not scales.numel():
        raise UnsupportedProblem("a weight has scales, and here are none; download the checkpoint again")
    if code == "e2m1":
        if group == 16 and scales.dtype == torch.int32:
            scales = layout.unpack_scales(scales)
        most, what = (MOST_UE5M3, "448") if group == 16 else (MOST_EXPONENT, "2 ** 25")
        if scales.dtype != EXPONENTS or int(scales.amax()) > most:
            found = f"{int(scales.amax())}" if scales.dtype == EXPONENTS else f"{scales.dtype}"
            raise UnsupportedProblem(
                f"scales of e2m1 are bytes of up to {most} for {what}, not {found}; "
                "download the checkpoint again, or take its weights in bf16"
            )
        return
    if scales.dtype not in FLOATS:
        raise UnsupportedProblem(f"scales are fp16, bf16 or fp32, not {scales.dtype}; convert the checkpoint's scales")
    if not bool(torch.isfinite(scales).all()):
        raise UnsupportedProblem("scales are finite, and some here are NaN or infinite; download the checkpoint again")


def unassemble(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """``(codes, scales, zeros, offsets)`` as :func:`assemble` was given them; columns stay as packed."""
    n, k = weight.shape
    codes = layout.unpack(weight.packed, weight.code, n, k)
    details = weight.details
    if weight.scale_rows == 128:
        rows, columns = details.get("block", (128, 128))
        return codes, weight.scales.t()[:: rows // 128, :: columns // 128].contiguous(), None, None
    group = details.get("group", weight.group)
    repeats = 1 if weight.code == "e2m1" else packed_group(group, k)[1]

    def strip(table: Tensor | None) -> Tensor | None:
        if table is not None and weight.group == 16:
            table = layout.unpack_scales(table)[: k // 16]
        return None if table is None else table[::repeats, :n].contiguous()

    zeros, offsets = strip(weight.zeros), strip(weight.offsets)
    scales = strip(weight.scales)
    assert scales is not None
    if zeros is None and details.get("zeros"):
        zeros = torch.full_like(scales, 8, dtype=torch.uint8)
    if offsets is None and "offsets" in details:
        said = details["offsets"]
        offsets = said.to(weight.device) if isinstance(said, Tensor) else torch.zeros_like(scales)
    return codes, scales, zeros, offsets
