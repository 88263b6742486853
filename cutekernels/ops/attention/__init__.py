"""Attention: prefill, decode over a cache, and gradients."""

from __future__ import annotations

from typing import Any

from cutekernels.op import Op
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD
from cutekernels.ops.attention.cache import CACHE_ATTENTION
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
