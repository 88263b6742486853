"""Parameters of several projections moved side by side in memory, so that one product serves all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """All rows in one tensor, of which each parameter becomes a view; their values stay."""
    whole = torch.cat([p.data for p in parameters])
    for p, rows in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        p.data = rows
    return whole
