"""Norms fused with the product behind them: ``rms_norm_linear`` and ``linear_silu_mul``."""

from __future__ import annotations

from typing import Any

from cutekernels.op import Op
from cutekernels.ops.norm_linear.op import LINEAR_SILU_MUL, RMS_NORM_LINEAR

OPS: tuple[Op[Any, Any], ...] = (
    RMS_NORM_LINEAR,
    LINEAR_SILU_MUL,
)
