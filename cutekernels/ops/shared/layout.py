"""How matrices lie in memory, as fields of a problem: layout and alignment, checked, read off tensors, and posed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.shared.strides import matrix

WIDEST_BYTES = 16


def check_alignment(layout: str, align: int, cols: int, itemsize: int) -> None:
    """Refuses a promise of alignment that rows of ``cols`` elements cannot keep."""
    if layout == "strided" and align != WIDEST_BYTES:
        raise UnsupportedProblem(f"nothing depends on align where the layout is strided: leave it at 16; it is {align}")
    if align < itemsize:
        raise UnsupportedProblem(f"align covers one element, {itemsize} bytes; it is {align}")
    if layout != "strided" and cols * itemsize % align:
        raise UnsupportedProblem(f"rows of {cols * itemsize} bytes are not aligned to {align}")


def walk(t: Tensor) -> tuple[int, int]:
    """The row and column stride of a matrix."""
    found = matrix(t.shape, t.stride())
    if found is None:
        raise UnsupportedProblem(
            f"leading dimensions must be walked by one stride; strides {t.stride()} of shape {tuple(t.shape)} are not: "
            "pass a contiguous copy"
        )
    return found[2:]


def laid_out(*operands: Tensor) -> tuple[str, int]:
    """``(layout, align)`` of operands of one type whose rows are as long."""
    bits = WIDEST_BYTES
    for t in operands:
        pitch, col = walk(t)
        if col != 1:
            return "strided", WIDEST_BYTES
        cols = t.shape[-1] if t.dim() else 1
        bits |= t.data_ptr() | pitch * t.element_size() | cols * t.element_size()
    return "rows", bits & -bits


def place(values: Callable[..., Tensor], p: Any, rows: int, cols: int) -> Tensor:
    """A matrix that poses the layout and alignment of ``p``, out of ``values(elements)``."""
    if p.layout == "strided":
        return values(rows * cols).as_strided((rows, cols), (1, rows) if rows > 1 and cols > 1 else (2 * cols, 2))
    skew = p.align % WIDEST_BYTES // p.itemsize  # elements off a 16-byte boundary
    return values(rows * cols + skew).as_strided((rows, cols), (cols, 1), skew)


def check_contiguous(op: Any, results: Sequence[Tensor]) -> None:
    """Refuses results that kernels cannot write front to back."""
    for t in results:
        if not t.is_contiguous():
            raise UnsupportedProblem(f"{op.name} writes contiguous results; got strides {t.stride()}")
