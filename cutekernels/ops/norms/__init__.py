"""Norms over rows, with gradients: ``rms_norm``, ``add_rms_norm`` and ``layer_norm``."""

from __future__ import annotations

from typing import Any

from cutekernels.op import Op
from cutekernels.ops.norms.gradients import COLUMN_SUM, COLUMN_SUM_PAIR, LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from cutekernels.ops.norms.op import ADD_RMS_NORM, LAYER_NORM, RMS_NORM

OPS: tuple[Op[Any, Any], ...] = (
    RMS_NORM,
    RMS_NORM_BACKWARD,
    ADD_RMS_NORM,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    COLUMN_SUM,
    COLUMN_SUM_PAIR,
)
