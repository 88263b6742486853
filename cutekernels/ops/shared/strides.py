"""How tensors lie in memory: as a matrix of rows, over themselves, and beside one another.

Pure arithmetic on shapes, strides and addresses, for ops that flatten leading dimensions or take ``out=``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Relation = Literal["apart", "same", "overlap"]
_WIDEST = 8  # elements of 16 bits in a thread's widest access
Pair = tuple[int, int, int, int, bool]  # (result i, operand j, low, high, whether j may be i); see pairs


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


def cube(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int, int, int, int] | None:
    """``(rows, heads, cols, row_stride, head_stride, col_stride)``: a matrix whose last leading dimension is apart.

    None where no single stride walks the dimensions before that. A stride that is never taken reads as 0, but that of
    a single column as 1.
    """
    heads, head_stride = (shape[-2], strides[-2]) if len(shape) > 1 else (1, 0)
    found = matrix((*shape[:-2], 1), (*strides[:-2], 1))
    if found is None:
        return None
    rows, _, row_stride, _ = found
    cols, col_stride = (shape[-1], strides[-1]) if shape else (1, 1)
    return (
        rows,
        heads,
        cols,
        row_stride if rows > 1 else 0,
        head_stride if heads > 1 else 0,
        col_stride if cols > 1 else 1,
    )


def alignment(t: Tensor) -> int:
    """Elements in the widest vector that address, strides and contiguous extent allow: 8, 4, 2 or 1."""
    along = -1 if t.stride(-1) == 1 else -2
    bits = _WIDEST | (t.data_ptr() // t.element_size()) | t.shape[along]
    for i in range(t.dim()):
        if i != t.dim() + along:
            bits |= t.stride(i)
    return bits & -bits


def overlaps_itself(t: Tensor) -> bool:
    """Whether two elements may share an address: an expanded dimension, a sliding window."""
    if t.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1):
        if stride <= reach and size > 1:
            return True
        reach += (size - 1) * stride
    return False


def is_dense(t: Tensor) -> bool:
    """Whether the elements of ``t`` fill one run of memory, each once, in whatever order of dimensions."""
    if t.is_contiguous() or t.numel() == 0:
        return True
    found = _lattice(t)
    return found is not None and not found[0]


def span_bytes(t: Tensor) -> int:
    """Bytes from the first one of ``t`` to its last one, both counted; 0 for an empty tensor."""
    if t.numel() == 0:
        return 0
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (reach + 1) * t.element_size()


def relation(out: Tensor, t: Tensor) -> Relation:
    """How ``out`` lies to ``t``: nowhere near, element upon element, or overlapping in some other way.

    Exact for slices of one buffer with equal row pitch, such as ``out = buffer[:, n:]`` beside
    ``t = buffer[:, :n]``, and tells apart any two that share a period without reaching out of it (channels of heads
    of batches, say); where that is too hard to tell, "overlap".
    """
    begin, other = out.data_ptr(), t.data_ptr()
    if begin + span_bytes(out) <= other or other + span_bytes(t) <= begin:
        return "apart"
    if out.device != t.device:
        return "apart"
    if begin == other and out.dtype == t.dtype and out.shape == t.shape and walk(out) == walk(t):
        return "same"
    ours, theirs = _lattice(out), _lattice(t)
    if ours is None or theirs is None:
        return "overlap"
    (steps, width), (other_steps, other_width) = ours, theirs
    distance = other - begin
    if steps and steps == other_steps:
        first, gap, last = (width, distance, other_width) if distance >= 0 else (other_width, -distance, width)
        if first <= gap and gap + last <= steps[0][1] and _is_nested(steps):
            return "apart"
    if len(steps) > 1 or len(other_steps) > 1:
        return "overlap"
    pitches = {stride for found in (steps, other_steps) for _, stride in found}
    pitch = pitches.pop() if len(pitches) == 1 else 0
    if pitch <= 0:
        return "overlap"
    rows, other_rows = (found[0][0] if found else 1 for found in (steps, other_steps))
    # Row j of t begins k * pitch + (other - begin) after row i of out, with k = j - i. They share a byte
    # where that distance is inside (-width of t's row, width of out's row): look at the first k past the left end.
    k = max((-other_width - distance) // pitch + 1, -(rows - 1))
    return "overlap" if k <= other_rows - 1 and distance + k * pitch < width else "apart"


def pairs(results: int, operands: Sequence[Tensor | None], in_place: Sequence[int] = ()) -> tuple[Pair, ...]:
    """Each of the first ``results`` operands beside every later one; none with an empty tensor, which touches nothing.

    Operand j touches what result i spans where it begins more than ``low`` and less than ``high`` bytes from it.
    ``in_place``: operands that a result may be, element upon element.
    """
    spans = [0 if t is None else span_bytes(t) for t in operands]
    return tuple(
        [
            (i, j, -spans[j], spans[i], j in in_place)
            for i in range(results)
            for j in range(i + 1, len(operands))
            if spans[i] and spans[j]
        ]
    )


def collide(pairs: Sequence[Pair], operands: Sequence[Tensor | None], addresses: Sequence[int]) -> bool:
    """Whether a pair shares memory other than as it may. Spans that do not meet are told apart by addresses alone."""
    for i, j, low, high, in_place in pairs:
        if low < addresses[j] - addresses[i] < high:
            found = relation(operands[i], operands[j])  # type: ignore[arg-type]
            if found == "overlap" or (found == "same" and not in_place):
                return True
    return False


def _lattice(t: Tensor) -> tuple[list[tuple[int, int]], int] | None:
    """``t`` as runs of contiguous bytes: (count, stride in bytes) of the runs, closest first, and a run's width.

    Dimensions that one stride walks are joined, whatever their order. None where an address repeats for certain.
    """
    joined: list[tuple[int, int]] = []
    width = size = t.element_size()
    for stride, count in sorted((s * size, n) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1):
        if stride <= 0:
            return None
        if not joined and stride == width:
            width *= count
        elif joined and stride == joined[-1][0] * joined[-1][1]:
            joined[-1] = (joined[-1][0] * count, joined[-1][1])
        else:
            joined.append((count, stride))
    return joined, width


def _is_nested(steps: Sequence[tuple[int, int]]) -> bool:
    """Whether the points of a lattice are at least its smallest stride apart."""
    reach = steps[0][1]
    for count, stride in steps:
        if stride < reach:
            return False
        reach += (count - 1) * stride
    return True


def walk(t: Tensor) -> tuple[int, ...]:
    """Strides of the dimensions with more than one element: those that are ever taken."""
    return tuple(s for n, s in zip(t.shape, t.stride(), strict=True) if n != 1)
