"""Problems of ``rms_norm`` that reach every branch of its body in CuTe, for the tests of that body."""

from __future__ import annotations

from typing import Any

from cutekernels.ops.norms.op import RMS_NORM

CONFIG = "block_rows=1 block_cols=4096 resident=1 warps=8 per_sm=0 stages=1 body=cute"

# Beside the op's suite: ragged, one row, every alignment, every kind of weight.
RAGGED = (
    "rows=1 cols=1 align=2",
    "rows=7 cols=13 align=2",
    "rows=4099 cols=24",
    "rows=5 cols=128 weight=fp32 rounding=huggingface",
    "rows=3001 cols=8191 dtype=fp32 align=4",
    "rows=4000 cols=516 dtype=fp16 align=8 weight=none",
    "rows=300 cols=16384 shifted=1 rounding=huggingface dtype=fp16",
)


def in_cute(problem: Any, spec: Any) -> list[Any]:
    """The valid configs of the body in CuTe."""
    return [c for c in RMS_NORM.valid(problem, spec) if c.body == "cute"]
