"""Mixture of experts: routing, permutation, moving rows to experts and back."""

from __future__ import annotations

from typing import Any

from cutekernels.op import Op
from cutekernels.ops.moe.permute import MOE_PERMUTE
from cutekernels.ops.moe.route import MOE_ROUTE, MOE_ROUTE_BACKWARD
from cutekernels.ops.moe.rows import MOE_COMBINE, MOE_COMBINE_BACKWARD, MOE_DISPATCH, MOE_GATHER

OPS: tuple[Op[Any, Any], ...] = (
    MOE_ROUTE,
    MOE_ROUTE_BACKWARD,
    MOE_PERMUTE,
    MOE_GATHER,
    MOE_DISPATCH,
    MOE_COMBINE,
    MOE_COMBINE_BACKWARD,
)
