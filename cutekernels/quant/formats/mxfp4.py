"""MXFP4 as gpt-oss stores it: e2m1 elements in blocks of 32, each with a power of two.

``blocks`` are uint8 ``(N, K / 32, 16)``, the even element of K in the low nibble; ``scales`` uint8 ``(N, K / 32)``:
an element is ``E2M1[q] * 2 ** (s - 127)``. Experts have one more extent in front. gpt-oss interleaves gate and up: rows
0, 2, 4... are gates, 1, 3, 5... what they multiply; kernels have all gates before all of up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant.assembly import assemble, unassemble
from cutekernels.quant.experts import QuantizedStack, stack
from cutekernels.quant.formats.nibbles import expect, of_bytes, to_bytes
from cutekernels.quant.layout import dense
from cutekernels.quant.weight import QuantizedWeight

GROUP = 32
NAMES = ("blocks", "scales")


def from_mxfp4(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype | None = None) -> QuantizedWeight:
    """The weight of one linear layer.

    Args:
        blocks: uint8 ``(N, K / 32, 16)``.
        scales: uint8 ``(N, K / 32)``; 153 and more, a scale above 2 ** 25, are refused.
        dtype: of the weight's ``dequantize``; bf16 if None.

    Raises:
        UnsupportedProblem: tensors that contradict each other or the format.
    """
    if blocks.dim() != 3 or 0 in blocks.shape:
        raise UnsupportedProblem(
            f"MXFP4's blocks are (N, K / 32, 16), not {tuple(blocks.shape)}; pass those of one layer, or all experts' "
            "to experts_from_mxfp4"
        )
    n, groups, _ = blocks.shape
    expect("blocks", blocks, (torch.uint8,), (n, groups, 16), "blocks of 32 elements", by="MXFP4")
    expect("scales", scales, (torch.uint8,), (n, groups), f"{n} rows of {groups} blocks", by="MXFP4")
    return assemble(
        of_bytes(blocks).flatten(1),
        "e2m1",
        scales.t(),
        group=GROUP,
        dtype=torch.bfloat16 if dtype is None else dtype,
        format="mxfp4",
        details={},
    )


def experts_from_mxfp4(
    blocks: Tensor, scales: Tensor, *, interleaved: bool = False, dtype: torch.dtype | None = None
) -> QuantizedStack:
    """The weights of all experts: ``gate_up_proj_blocks`` and ``_scales`` of gpt-oss, or ``down_proj``'s.

    Args:
        blocks: uint8 ``(E, N, K / 32, 16)``.
        scales: uint8 ``(E, N, K / 32)``.
        interleaved: whether rows of gates and of up alternate, as in ``gate_up_proj``: gates then come first. A bias
            goes the same way: ``torch.cat((bias[:, 0::2], bias[:, 1::2]), 1)``.
        dtype: of ``dequantize``; bf16 if None.
    """
    if blocks.dim() != 4 or scales.dim() != 3 or len(blocks) != len(scales) or not len(blocks):
        raise UnsupportedProblem(
            f"MXFP4's experts are blocks (E, N, K / 32, 16) and scales (E, N, K / 32), not {tuple(blocks.shape)} and "
            f"{tuple(scales.shape)}; pass both tensors of one projection"
        )
    made = []
    for own, powers in zip(blocks, scales, strict=True):  # one at a time: unpacked, an expert has twice the bytes
        if interleaved:
            own, powers = apart(own), apart(powers)
        made.append(from_mxfp4(own, powers, dtype=dtype))
    return stack(made, details={"group": GROUP, "interleaved": interleaved})


def apart(rows: Tensor) -> Tensor:
    """Rows 0, 2, 4... before rows 1, 3, 5..."""
    if len(rows) % 2:
        raise UnsupportedProblem(f"gates and up alternate in an even number of rows, not in {len(rows)}")
    return torch.cat((rows[0::2], rows[1::2]))


def alternating(rows: Tensor) -> Tensor:
    """The argument of :func:`apart`."""
    return torch.stack(rows.chunk(2), 1).flatten(0, 1)


def write(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors that :func:`from_mxfp4` read; of a stack those of all experts."""
    codes, scales, _, _ = unassemble(weight)
    blocks, powers = to_bytes(codes).unflatten(1, (-1, 16)), scales.t()
    experts = weight.details.get("experts")
    if experts is not None:
        parts = [(b, p) for b, p in zip(blocks.chunk(experts), powers.chunk(experts), strict=True)]
        if weight.details["interleaved"]:
            parts = [(alternating(b), alternating(p)) for b, p in parts]
        blocks, powers = torch.stack([b for b, _ in parts]), torch.stack([p for _, p in parts])
    return {"blocks": dense(blocks), "scales": dense(powers)}
