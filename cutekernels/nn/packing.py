"""Parameters of several projections moved side by side in memory, so that one product serves all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """All rows in one tensor, of which each parameter becomes a view; their values stay.

    Parameters that lie so already stay where they are: a second reader of a model takes no memory.
    """
    rows = [p.data for p in parameters]
    whole = _together(rows)
    if whole is None:
        whole = torch.cat(rows)
        for p, own in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            p.data = own
    return whole


def _together(rows: list[Tensor]) -> Tensor | None:
    """The tensor that ``rows`` are successive, contiguous parts of, or None."""
    first, end = rows[0], rows[0].storage_offset()
    for t in rows:
        alike = t.dtype == first.dtype and t.shape[1:] == first.shape[1:] and t.is_contiguous()
        if not alike or t.storage_offset() != end or t.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return None
        end += t.numel()
    return first.as_strided((sum(map(len, rows)), *first.shape[1:]), first.stride())
