"""Rotary position embedding: ``rope``."""

from __future__ import annotations

from cutekernels.ops.rope.op import ROPE

OPS = (ROPE,)
