"""Problems that say how their operands lie, and samples that lie so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.shared.dtypes import BYTES, WIDEST_BYTES

if TYPE_CHECKING:
    from torch import Tensor


class LaidOut:
    """The part of a problem that says how its operands lie: mixed into problems with these fields.

    ``layout``: "dense", where a problem has that, if all operands are contiguous and their rows one long one; "rows"
    where the elements of each row are contiguous; "strided" for the rest. ``align``: bytes that divide the address and
    pitch of every laid operand (dense: the address); nothing depends on it where the layout is strided.
    """

    dtype: str
    layout: str
    align: int
    aligns_rows: ClassVar[str | None] = None
    """The extent whose bytes ``align`` divides too: a row's length, where kernels assume it."""

    most: ClassVar[Mapping[str, int]] = {}
    """The largest extents, by name, that grids and offsets allow."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        for name, limit in self.most.items():
            if getattr(self, name) > limit:
                raise UnsupportedProblem(f"{name} is at most {limit}; it is {getattr(self, name)}: split the call")
        if self.align < self.itemsize:
            raise UnsupportedProblem(
                f"align covers one element of {self.dtype}, {self.itemsize} bytes; it is {self.align}"
            )
        if self.aligns_rows is not None:
            row = getattr(self, self.aligns_rows) * self.itemsize
            if self.layout == "strided" and self.align != WIDEST_BYTES:
                raise UnsupportedProblem(
                    f"nothing depends on align in a strided layout: leave it at 16; it is {self.align}"
                )
            if self.layout != "strided" and row % self.align:
                raise UnsupportedProblem(f"rows of {row} bytes are not aligned to {self.align}: lower align")

    @property
    def itemsize(self) -> int:
        return BYTES[self.dtype]

    @property
    def vec(self) -> int:
        """Elements in one access."""
        return 1 if self.layout == "strided" else self.align // self.itemsize

    def pitch(self, cols: int, itemsize: int) -> int:
        """Elements from row to row of ``cols`` elements in memory that lies as promised."""
        vec = 1 if self.layout in ("dense", "strided") else max(1, self.align // itemsize)
        return -(-cols // vec) * vec


def place_as(values: Tensor, p: Any, rows_apart: int = 1) -> Tensor:
    """``values`` in memory that lies as ``p`` promises and no better: its layout, and align but no multiple of it.

    ``rows_apart``: how many rows there is room for from one to the next.
    """
    item, n = values.element_size(), values.shape[-1] if values.dim() else 1
    if p.layout == "strided":
        memory = values.new_empty((*values.shape, 2))[..., 0]
        return memory.copy_(values)
    pitch = p.pitch(n, item) * rows_apart
    rows = values.numel() // max(1, n)
    skew = p.align % WIDEST_BYTES // item
    memory = values.new_empty(rows * pitch + skew)[skew:].view(*values.shape[:-1], pitch)[..., :n]
    return memory.copy_(values)
