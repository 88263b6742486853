"""How operands of a product lie, and when a copy that lies better is worth its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutekernels.ops.gemm.problem import WIDEST
from cutekernels.ops.shared.strides import alignment

if TYPE_CHECKING:
    from torch import Tensor


# Copies make large products of unaligned operands up to 5 times faster: docs/notes/host.md#copies (H200, 2026-11).
_COPY_FROM = 2**28  # products M*N*K from which copies pay
_COPY_EXTENT = 128  # and the least M and N: below, the operands are most of the traffic


def worth_copying(a: Tensor, b: Tensor) -> tuple[bool, bool]:
    """Whether to copy canonical a, and b, into aligned rows first, because their own rows slow a large product."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    narrow = alignment(a) <= 2, alignment(b) <= 2
    if not any(narrow) or m * n * k < _COPY_FROM or min(m, n) < _COPY_EXTENT:
        return False, False
    return (True, True) if k % WIDEST else narrow  # a K that grows, grows in both


def k_contiguous(t: Tensor) -> Tensor:
    """A copy of ``([B,] rows, K)`` with K contiguous and grown to a multiple of 8 with zeros, which change no sum."""
    if t.dim() == 3 and t.stride(0) == 0:
        return k_contiguous(t[0]).expand(t.shape[0], -1, -1)
    k = t.shape[-1]
    copy = t.new_empty((*t.shape[:-1], -(-k // WIDEST) * WIDEST))
    copy[..., :k] = t
    copy[..., k:] = 0
    return copy


def canonical(t: Tensor) -> Tensor:
    """``t`` itself where one of its last two strides is 1; else a view or a copy of which that is true."""
    if t.stride(-1) == 1 or t.stride(-2) == 1:
        return t
    if t.shape[-1] == 1:  # a stride never taken
        return t.as_strided(t.shape, (*t.stride()[:-1], 1))
    if t.shape[-2] == 1:
        return t.as_strided(t.shape, (*t.stride()[:-2], 1, t.stride(-1)))
    return t.contiguous()
