"""Matrix products: ``gemm`` and ``linear``."""

from __future__ import annotations

from typing import Any

from cutekernels.op import Op
from cutekernels.ops.gemm.op import GEMM

OPS: tuple[Op[Any, Any], ...] = (GEMM,)
