"""Elementwise activations: ``silu_mul``, ``gelu_mul`` and ``bias_gelu``."""

from __future__ import annotations

from typing import Any

import torch

from cutekernels.op import Op
from cutekernels.ops.activations import api
from cutekernels.ops.activations.bias_gelu import BIAS_GELU, BIAS_GELU_BACKWARD
from cutekernels.ops.activations.glu import GELU_MUL, GELU_MUL_BACKWARD, SILU_MUL, SILU_MUL_BACKWARD

OPS: tuple[Op[Any, Any], ...] = (
    SILU_MUL,
    SILU_MUL_BACKWARD,
    GELU_MUL,
    GELU_MUL_BACKWARD,
    BIAS_GELU,
    BIAS_GELU_BACKWARD,
)


def register(library: torch.library.Library) -> None:
    """Defines the family's torch ops in ``library``."""
    api.register(library)
