"""Shared by the tests of ops with two bodies: problems that reach every branch of the bodies in CuTe."""

from __future__ import annotations

from typing import Any

from cutekernels.ops.norms.op import RMS_NORM
from cutekernels.ops.rope.op import ROPE

OPS: dict[str, Any] = {op.name: op for op in (RMS_NORM, ROPE)}

# Beside the ops' suites: ragged, one row, every alignment, every kind of weight, table and position.
RAGGED = {
    "rms_norm": (
        "rows=1 cols=1 align=2",
        "rows=7 cols=13 align=2",
        "rows=4099 cols=24",
        "rows=5 cols=128 weight=fp32 rounding=huggingface",
        "rows=3001 cols=8191 dtype=fp32 align=4",
        "rows=4000 cols=516 dtype=fp16 align=8 weight=none",
        "rows=300 cols=16384 shifted=1 rounding=huggingface dtype=fp16",
    ),
    "rope": (
        "batch=1 seq=1 heads_q=1 head_dim=2 rotary=2 heads_kv=1 align=2",
        "batch=2 seq=3 heads_q=2 head_dim=5 rotary=4 heads_kv=1 align=2 interleaved=1",
        "batch=5 seq=9 heads_q=7 head_dim=33 rotary=14 align=2 positions=token",
        "batch=2 seq=33 heads_q=3 head_dim=96 rotary=96 heads_kv=2 interleaved=1 dtype=fp32 positions=batch",
        "batch=2 seq=17 heads_q=3 head_dim=600 rotary=528 heads_kv=7 dtype=fp16",
        "batch=2 seq=17 heads_q=3 head_dim=128 rotary=32 interleaved=1 inverse=1",
        "batch=300 seq=1 heads_q=12 head_dim=64 rotary=64 heads_kv=2 positions=batch index=i32 table=same",
    ),
}


def in_cute(op: Any, problem: Any, spec: Any) -> list[Any]:
    """The valid configs of the body in CuTe."""
    return [c for c in op.valid(problem, spec) if c.body == "cute"]
