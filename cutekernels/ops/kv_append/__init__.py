"""Appending keys and values to a cache: ``kv_append``."""

from __future__ import annotations

from typing import Any

import torch

from cutekernels.op import Op
from cutekernels.ops.kv_append import api
from cutekernels.ops.kv_append.op import KV_APPEND

OPS: tuple[Op[Any, Any], ...] = (KV_APPEND,)


def register(library: torch.library.Library) -> None:
    """Defines the family's torch ops in ``library``."""
    api.register(library)
