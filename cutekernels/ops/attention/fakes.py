"""Fake operands for compiling attention's kernels: stand-ins for tensors of any extents.

Imported inside ``build`` alone, since it loads the DSL.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass.cute import sym_int
from cutlass.cute.runtime import make_fake_tensor

from cutekernels.kernels.cute.parts.heads import WIDEST
from cutekernels.ops.attention.token_scales import TOGETHER

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp8": cutlass.Int16}  # of e4m3 two at a time


def rows(dtype: str, head_dim: int, *lead: Any) -> Any:
    """``(*lead, head_dim)`` with aligned rows, any strides between them."""
    stride = (*[sym_int(64, divisibility=WIDEST) for _ in lead], 1)
    return make_fake_tensor(DTYPES[dtype], (*lead, head_dim), stride=stride, assumed_align=16)


def vector(kind: Any, extent: Any = None) -> Any:
    """``(extent,)``, contiguous; an extent of its own unless given."""
    return make_fake_tensor(kind, (sym_int() if extent is None else extent,), stride=(1,), assumed_align=4)


def sinks(kind: str, dtype: str, heads: Any) -> Any:
    """``(HQ,)`` of a problem's ``sinks``; None without."""
    if kind == "none":
        return None
    own = DTYPES[dtype] if kind == "same" else cutlass.Float32
    return make_fake_tensor(own, (heads,), stride=(1,), assumed_align=own.width // 8)


def cache(kind: str, dtype: str, head_dim: int, *lead: Any) -> Any:
    """:func:`rows` of a problem's ``cache``."""
    return rows(dtype, head_dim, *lead) if kind == "same" else rows("fp8", head_dim // 2, *lead)


def scales(kind: str, layers: Any, heads: Any) -> list[Any]:
    """Scales of k and v: ``(HKV,)``, or of tokens and heads ``(layers, HKV, slots)``; None each without."""
    return [_scale(kind, layers, heads) for _ in range(2)]


def _scale(kind: str, layers: Any, heads: Any) -> Any:
    if kind != "fp8_tokens":
        return vector(cutlass.Float32, heads) if kind == "fp8" else None
    steps = [sym_int(64, divisibility=TOGETHER) for _ in range(2)]
    return make_fake_tensor(cutlass.Uint8, (layers, heads, sym_int()), stride=(*steps, 1), assumed_align=TOGETHER)


def table(batch: Any) -> Any:
    """A page table ``(batch, MAX_PAGES)`` with any stride between rows."""
    return make_fake_tensor(cutlass.Int32, (batch, sym_int()), stride=(sym_int(64), 1), assumed_align=4)


class Batch:
    """Operands of a batch of one length, or of ``varlen`` sequences, which share their extents."""

    def __init__(self, dtype: str, head_dim: int, varlen: bool) -> None:
        self._dtype, self._head_dim, self._varlen = dtype, head_dim, varlen
        self._batch, self._ends = sym_int(), sym_int()
        self._q, self._kv = [(sym_int(), sym_int()) for _ in range(2)]  # length, heads

    def _rows(self, lead: tuple[Any, Any]) -> Any:
        return rows(self._dtype, self._head_dim, *(() if self._varlen else (self._batch,)), *lead)

    def q(self) -> Any:
        return self._rows(self._q)

    def kv(self) -> Any:
        return self._rows(self._kv)

    def sinks(self, kind: str) -> Any:
        return sinks(kind, self._dtype, self._q[1])

    def mask(self) -> Any:
        """Booleans with any strides."""
        extents = (self._batch, self._q[1], self._q[0], self._kv[0])
        stride = tuple([sym_int(64) for _ in extents])
        return make_fake_tensor(cutlass.Uint8, extents, stride=stride, assumed_align=1)

    def ends(self) -> Any:
        """The sequences' ends, None where they are of one length."""
        return vector(cutlass.Int32, self._ends) if self._varlen else None


class Cached:
    """Operands of attention over a cache, in the order of the launch."""

    def __init__(self, p: Any) -> None:
        batch, seq_q, heads_q, heads_kv, layers, room = [sym_int() for _ in range(6)]
        q, of_cache = (batch, seq_q, heads_q), (layers, room, heads_kv)
        self.out, self.q = [rows(p.dtype, p.head_dim, *q) for _ in range(2)]
        self.lse = vector(cutlass.Float32) if p.lse else None
        self.k, self.v = [cache(p.cache, p.dtype, p.head_dim, *of_cache) for _ in range(2)]
        self.lengths, self.table = vector(cutlass.Int32, batch), table(batch) if p.page_size else None
        self.sinks, self.scales = sinks(p.sinks, p.dtype, heads_q), scales(p.cache, layers, heads_kv)
