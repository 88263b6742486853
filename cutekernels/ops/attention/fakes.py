"""Fake operands that attention's kernels are compiled with: what the DSL takes for tensors of any extents.

Imported inside ``build`` alone, since it loads the DSL.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass.cute import sym_int
from cutlass.cute.runtime import make_fake_tensor

from cutekernels.ops.attention.problem import WIDEST

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


def rows(dtype: str, head_dim: int, *lead: Any) -> Any:
    """``(*lead, head_dim)`` with aligned rows, any strides between them."""
    stride = (*[sym_int(64, divisibility=WIDEST) for _ in lead], 1)
    return make_fake_tensor(DTYPES[dtype], (*lead, head_dim), stride=stride, assumed_align=16)


def vector(kind: Any, extent: Any = None) -> Any:
    """``(extent,)``, contiguous; an extent of its own unless given."""
    return make_fake_tensor(kind, (sym_int() if extent is None else extent,), stride=(1,), assumed_align=4)


def mask(*extents: Any) -> Any:
    """Booleans with any strides."""
    strides = tuple([sym_int(64) for _ in extents])
    return make_fake_tensor(cutlass.Uint8, extents, stride=strides, assumed_align=1)
