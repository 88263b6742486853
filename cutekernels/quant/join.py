"""Several quantized weights of one input as one (a product serves q, k and v, another gate and up), and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cutekernels.quant import layout
from cutekernels.quant.weight import QuantizedWeight, scales_shape


@torch.no_grad()
def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """All rows in one weight, or None where they do not fit together.

    They fit where K, codes, groups, types, device and the order of columns are alike, and each but the last has whole
    tiles of rows. The result's ``format`` is ``"cutekernels"``: no checkpoint has it so.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    rows = max(layout.TILE, first.scale_rows)
    if any(w.shape[0] % rows for w in weights[:-1]) or any(kind(w) != kind(first) for w in weights):
        return None
    orders = [w.order for w in weights]
    if any((o is None) != (first.order is None) for o in orders):
        return None
    if first.order is not None and not all(torch.equal(first.order, o) for o in orders if o is not None):
        return None
    return replace(
        first,
        shape=(sum(w.shape[0] for w in weights), first.shape[1]),
        packed=torch.cat([w.packed for w in weights]),
        scales=torch.cat([w.scales for w in weights], dim=1),
        zeros=_side_by_side([w.zeros for w in weights], [w.scales for w in weights], 8, torch.uint8),
        offsets=_side_by_side([w.offsets for w in weights], [w.scales for w in weights], 0, first.scales.dtype),
        factors=None if first.factors is None else torch.cat([w.factors for w in weights if w.factors is not None], 1),
        format="cutekernels",
        details={},
    )


def kind(w: QuantizedWeight) -> tuple[object, ...]:
    """The properties that all share. Offsets are added where zeros are subtracted: a weight has one or the other."""
    return w.code, w.group, w.scale_rows, w.shape[1], w.scales.dtype, w.dtype, w.device, w.offsets is None


def _side_by_side(tables: list[Tensor | None], scales: list[Tensor], none: int, dtype: torch.dtype) -> Tensor | None:
    """Tables along N; ``none`` stands for one that is not there, beside others that are."""
    if all(table is None for table in tables):
        return None
    filled = [torch.full_like(s, none, dtype=dtype) if t is None else t for t, s in zip(tables, scales, strict=True)]
    return torch.cat(filled, dim=1)


@torch.no_grad()
def padded(w: QuantizedWeight, n: int, k: int) -> QuantizedWeight:
    """``w`` with more rows, of zeros, and more columns, for activations that are 0 there: of shape ``(n, k)``.

    Tiles are padded as it is, so that up to the next multiples of 64 no byte of the codes changes. Experts of a width
    that fills no tile get there: gates and up of 0 give 0, which is what the further columns of down multiply.
    """
    shape = (n, k)
    if w.shape == shape:
        return w
    tiles, held = layout.tiles(shape), w.packed.shape
    groups, rows = scales_shape(w.group, w.scale_rows, shape)

    def wider(table: Tensor | None, down: int = groups - w.scales.shape[0], value: int = 0) -> Tensor | None:
        if table is None:
            return None
        return torch.nn.functional.pad(table, (0, rows - table.shape[1], 0, down), value=value)

    scales, order = wider(w.scales), w.order
    assert scales is not None
    if order is not None:
        order = torch.cat((order, torch.arange(w.shape[1], k, dtype=order.dtype, device=order.device)))
    return replace(
        w,
        shape=shape,
        packed=torch.nn.functional.pad(w.packed, (0, 0, 0, tiles[1] - held[1], 0, tiles[0] - held[0])),
        scales=scales,
        zeros=wider(w.zeros),
        offsets=wider(w.offsets),
        factors=wider(w.factors, 0, 1),
        order=order,
        format="cutekernels",
        details={},
    )
