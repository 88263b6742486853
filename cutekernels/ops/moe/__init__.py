"""Mixture of experts: routing, permutation, and moving rows to experts and back."""

from __future__ import annotations

from typing import Any

import torch

from cutekernels.op import Op
from cutekernels.ops.moe import permute, route, rows
from cutekernels.ops.moe.permute import MOE_PERMUTE
from cutekernels.ops.moe.route import MOE_ROUTE, MOE_ROUTE_BACKWARD
from cutekernels.ops.moe.rows import MOE_COMBINE, MOE_COMBINE_BACKWARD, MOE_GATHER

OPS: tuple[Op[Any, Any], ...] = (
    MOE_ROUTE,
    MOE_ROUTE_BACKWARD,
    MOE_PERMUTE,
    MOE_GATHER,
    MOE_COMBINE,
    MOE_COMBINE_BACKWARD,
)


def register(library: torch.library.Library) -> None:
    """Defines the family's torch ops in ``library``."""
    route.register(library)
    permute.register(library)
    rows.register(library)
