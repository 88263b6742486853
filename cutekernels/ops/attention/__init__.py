"""Attention: prefill, decode over a cache, and gradients."""

from __future__ import annotations

from typing import Any

import torch

from cutekernels.op import Op
from cutekernels.ops.attention import api, decode_api, gradient
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD
from cutekernels.ops.attention.cached import CACHE_ATTENTION
from cutekernels.ops.attention.decode import DECODE_ATTENTION
from cutekernels.ops.attention.delta import ATTENTION_DELTA
from cutekernels.ops.attention.op import ATTENTION

OPS: tuple[Op[Any, Any], ...] = (
    ATTENTION,
    ATTENTION_DELTA,
    ATTENTION_BACKWARD,
    DECODE_ATTENTION,
    CACHE_ATTENTION,
)


def register(library: torch.library.Library) -> None:
    """Defines the family's torch ops in ``library``."""
    api.register(library)
    gradient.register(library)
    decode_api.register(library)
