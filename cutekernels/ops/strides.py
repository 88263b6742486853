"""How tensors lie in memory: as a matrix of rows, over themselves, and beside one another.

Pure arithmetic on shapes, strides and addresses. Any op that flattens leading dimensions or takes ``out=``
asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Relation = Literal["apart", "same", "overlap"]


def matrix(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int, int] | None:
    """``(rows, cols, row_stride, col_stride)`` of a tensor whose leading dimensions are flattened into rows.

    None where no single stride walks the leading dimensions. A stride that is never taken (an extent of 1)
    reads as if the matrix were dense.
    """
    cols, col_stride = (shape[-1], strides[-1]) if shape else (1, 1)
    if cols == 1:
        col_stride = 1
    rows, row_stride = 1, cols * col_stride
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1:
            continue
        if rows == 1:
            row_stride = stride
        elif stride != rows * row_stride:
            return None
        rows *= size
    return rows, cols, row_stride, col_stride


def overlaps_itself(t: Tensor) -> bool:
    """Whether two elements may share an address: an expanded dimension, a sliding window."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1):
        if stride <= reach and size > 1:
            return True
        reach += (size - 1) * stride
    return False


def span_bytes(t: Tensor) -> int:
    """From the first byte of ``t`` to behind its last one; 0 for an empty tensor."""
    if t.numel() == 0:
        return 0
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (reach + 1) * t.element_size()


def relation(out: Tensor, t: Tensor) -> Relation:
    """How ``out`` lies to ``t``: nowhere near, element upon element, or overlapping in some other way.

    Exact for slices of one buffer with equal row pitch, such as ``out = buffer[:, n:]`` beside
    ``t = buffer[:, :n]``; where that is too hard to tell, "overlap".
    """
    begin, other = out.data_ptr(), t.data_ptr()
    if begin + span_bytes(out) <= other or other + span_bytes(t) <= begin:
        return "apart"
    if out.device != t.device:
        return "apart"
    if begin == other and out.dtype == t.dtype and out.shape == t.shape and _walk(out) == _walk(t):
        return "same"
    ours, theirs = matrix(out.shape, out.stride()), matrix(t.shape, t.stride())
    if ours is None or theirs is None or ours[3] != 1 or theirs[3] != 1:
        return "overlap"
    pitches = {m[2] * x.element_size() for m, x in ((ours, out), (theirs, t)) if m[0] > 1}
    pitch = pitches.pop() if len(pitches) == 1 else 0
    if pitch <= 0:
        return "overlap"
    # Row j of t begins k * pitch + (other - begin) after row i of out, with k = j - i. They share a byte
    # where that distance is inside (-width of t's row, width of out's row): look at the first k past the left end.
    width, other_width = ours[1] * out.element_size(), theirs[1] * t.element_size()
    distance = other - begin
    k = max((-other_width - distance) // pitch + 1, -(ours[0] - 1))
    return "overlap" if k <= theirs[0] - 1 and distance + k * pitch < width else "apart"


def _walk(t: Tensor) -> tuple[int, ...]:
    """The strides that are ever taken."""
    return tuple(s for n, s in zip(t.shape, t.stride(), strict=True) if n != 1)
