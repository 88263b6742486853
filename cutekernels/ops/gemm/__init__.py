"""Matrix products: ``gemm`` and ``linear``."""

from __future__ import annotations

from typing import Any

import torch

from cutekernels.op import Op
from cutekernels.ops.gemm import api
from cutekernels.ops.gemm.op import GEMM

OPS: tuple[Op[Any, Any], ...] = (GEMM,)


def register(library: torch.library.Library) -> None:
    """Defines the family's torch ops in ``library``."""
    api.register(library)
