"""Operands as data: what an op's tensors are, and how given tensors fit that.

An op declares each tensor once, as a class attribute::

    out = Matrix("rows", "cols", result=True)
    ids = Vector("rows", dtype="index")
    table = Matrix("vocabulary", "cols")

Axes are names of extents. Extents of one name are equal wherever they stand; ``"vocabulary+1"`` has one element more
than that, ``"seq?"`` may be missing. ``"*rows"`` is any number of leading dimensions, alike in every operand that has
them, flattened into ``rows``. ``"n/64"`` counts the tiles of 64 that hold ``n``, ``"n^64"`` their elements, and
``"k/group"`` groups of an extent, one where that is 0; ``"n^64|n/128"`` is either, and ``"batch|1"`` may be broadcast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.shared.strides import matrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Sizes = dict[str, int]  # extents by name
Leads = Mapping[str, tuple[int, ...]]  # leading dimensions by flattened axis
Named = Mapping[str, "Tensor | None"]  # tensors by operand
Looks = tuple[tuple[int, ...], "tuple[torch.dtype, ...]"]  # a shape, and the types it may have
_AXIS = re.compile(r"(?P<name>\w+?)(?P<more>\+1)?(?:(?P<by>[/^])(?P<unit>\w+))?")


@dataclass(frozen=True, slots=True)
class Extent:
    """The length of an axis: of the extent ``name``, that and ``more``, or its tiles of ``unit``."""

    name: str
    more: int = 0
    unit: str = ""
    rounded: bool = False
    """Whether elements of whole tiles are counted, rather than the tiles."""

    def of(self, sizes: Mapping[str, int]) -> int | None:
        """Its value; None where ``sizes`` lack an extent."""
        size = int(self.name) if self.name.isdigit() else sizes.get(self.name)
        unit = int(self.unit) if self.unit.isdigit() else sizes.get(self.unit, 1 if not self.unit else None)
        if size is None or unit is None:
            return None
        if not self.unit:
            return size + self.more
        tiles = -(-size // unit) if unit else 1
        return tiles * unit if self.rounded else tiles


@cache
def extents_of(axis: str) -> tuple[Extent, ...]:
    """The lengths that ``axis`` may have."""
    found = []
    for text in axis.strip("*?").split("|"):
        parts = _AXIS.fullmatch(text)
        assert parts is not None, axis
        found.append(Extent(parts["name"], int(parts["more"] is not None), parts["unit"] or "", parts["by"] == "^"))
    return tuple(found)


def binds(axis: str) -> bool:
    """Whether a tensor's length along ``axis`` tells an extent."""
    first, *others = extents_of(axis)
    return not (first.unit or others)


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor of an op. Made by :func:`Matrix`, :func:`Vector` or :func:`Array`."""

    axes: tuple[str, ...]
    dtype: str
    """A type of ``TYPES``; "wide" for fp32, or fp64 beside fp64 operands; "sums" for fp32, or fp64 beside any where no
    kernel runs; or a field of the problem: ``dtype``, the
    type of the op, or a field whose values are types, "same" for that of the op, and "none" where the operand may be
    absent. ``"dtype|fp8"`` is either."""
    strides: tuple[str, ...]
    """The kernel's names for the strides of the outer axes. Axes that it names none of are contiguous."""
    result: bool
    given: str | None
    """The field of the problem that says whether an optional operand is there: a bool one, or ``field=value``."""
    optional: bool
    laid: bool
    """Whether its address, strides and last axis take part in the problem's layout and alignment."""
    align: str | int | None = None
    """Divisor of its address and of the strides of its outer axes: bytes, without which a copy stands in for it,
    or elements, which a field of the problem tells. None where kernels take it as it lies."""
    bits: int = 32
    """Width of its strides in kernels."""
    major: str | None = None
    """The field of the problem that names its contiguous axis, of the last two."""
    flat: bool = False
    """Whether CuTe kernels take it as one run of elements."""
    strided: bool = False
    """Whether CuTe kernels take any stride along the last axis too."""
    canonical: bool = False
    """Whether CuTe kernels are handed 0 as the stride of an axis of one element, 1 of a last one."""

    @property
    def leads(self) -> bool:
        """Whether leading dimensions are flattened."""
        return self.axes[:1] != () and self.axes[0].startswith("*")

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, without the marks of flattened and missing ones."""
        return tuple([axis.strip("*?") for axis in self.axes])

    def axes_of(self, t: Tensor) -> tuple[str, ...]:
        """The axes that ``t`` has: all, or those that must be there."""
        if t.dim() == len(self.axes) or self.leads:
            return self.axes
        return tuple([axis for axis in self.axes if not axis.endswith("?")])

    def walk(self, t: Tensor) -> tuple[int, ...]:
        """The strides that kernels are told: 0 along an axis of one element that is never walked, a last one as 1."""
        if (len(self.axes) == 2 and not self.axes[1].endswith("?")) or (len(self.axes) == 1 and self.leads):
            found = self._matrix(t)
            if found is None:
                raise UnsupportedProblem(
                    f"leading dimensions must be walked by one stride; strides {t.stride()} of shape {tuple(t.shape)} "
                    "are not: pass a contiguous copy"
                )
            return found[2 : 2 + len(self.axes)]
        if not self.axes:
            return ()
        *outer, last = [(n, s) for n, s in zip(t.shape, t.stride(), strict=True)]
        steps = (*[s if n != 1 else 0 for n, s in outer], last[1] if last[0] != 1 else 1)
        axes = self.axes_of(t)
        if len(axes) == len(self.axes):
            return steps
        there = dict(zip(axes, steps, strict=True))
        return tuple([there.get(axis, 0) for axis in self.axes])

    def seen(self, t: Tensor, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of the view of ``t`` that kernels are handed: axes that may be broadcast are expanded."""
        axes = zip(t.shape, self.axes_of(t), strict=True)
        shape = tuple([sizes[extents_of(axis)[0].name] if axis.endswith("|1") else n for n, axis in axes])
        steps = [s if n == m else 0 for n, m, s in zip(t.shape, shape, t.stride(), strict=True)]
        if self.canonical:
            steps = [s if n != 1 else int(i == t.dim() - 1) for i, (n, s) in enumerate(zip(shape, steps, strict=True))]
        return shape, tuple(steps)

    def taken(self, t: Tensor) -> bool:
        """Whether kernels take ``t`` as it lies; else a contiguous copy stands in for it."""
        if not self.strides:
            return t.is_contiguous()
        if not self.leads:
            return len(self.strides) == len(self.axes) or self.walk(t)[-1] == 1
        return len(self.axes) > 2 or self._matrix(t) is not None

    def is_aligned(self, t: Tensor) -> bool:
        """Whether ``align`` bytes divide the address of ``t`` and its outer strides."""
        if not isinstance(self.align, int):
            return True
        steps = [s * t.element_size() for n, s in zip(t.shape[:-1], t.stride(), strict=False) if n > 1]
        return not any(place % self.align for place in (t.data_ptr(), *(steps if self.strides else ())))

    def _matrix(self, t: Tensor) -> tuple[int, int, int, int] | None:
        """``t`` as rows and columns; flattened alone, its rows have one column each."""
        column = (1,) * (len(self.axes) == 1)
        return matrix((*t.shape, *column), (*t.stride(), *column))

    def describe(self) -> str:
        """Its shape in words: ``(..., cols)``."""
        names = ["..." if a.startswith("*") else f"[{a[:-1]}]" if a.endswith("?") else a for a in self.axes]
        return f"({', '.join(names)}{',' if len(names) == 1 and names != ['...'] else ''})"


def Array(
    *axes: str,
    dtype: str = "dtype",
    strides: Sequence[str] | None = None,
    result: bool = False,
    given: str | None = None,
    optional: bool = False,
    laid: bool | None = None,
    align: str | int | None = None,
    bits: int = 32,
    major: str | None = None,
    **more: bool,
) -> Operand:
    """A tensor of any rank. ``strides=()`` for one that kernels take contiguous; by default they are named as the axes.

    ``laid`` by default where its type is the op's.
    """
    steps = tuple(axis.strip("*?") for axis in axes) if strides is None else tuple(strides)
    laid = dtype == "dtype" if laid is None else laid
    return Operand(axes, dtype, steps, result, given, optional or given is not None, laid, align, bits, major, **more)


def Matrix(
    rows: str,
    cols: str,
    dtype: str = "dtype",
    *,
    result: bool = False,
    strides: Sequence[str] = ("row", "col"),
    **more: Any,
) -> Operand:
    """``(rows, cols)``, or with ``"*rows"`` ``(..., cols)``; its strides are ``row`` and ``col`` by default."""
    return Array(rows, cols, dtype=dtype, strides=strides, result=result, **more)


def Vector(
    extent: str,
    dtype: str = "dtype",
    *,
    stride: str = "row",
    strides: Sequence[str] | None = None,
    result: bool = False,
    **more: Any,
) -> Operand:
    """``(extent,)``; kernels call its stride ``row`` unless told otherwise."""
    return Array(extent, dtype=dtype, strides=(stride,) if strides is None else strides, result=result, **more)


# ---- tensors beside their declarations ------------------------------------------------------------------


def sizes_of(
    op: str,
    declared: Mapping[str, Operand],
    given: Named,
    known: Mapping[str, int],
    derive: Callable[[Sizes], None] | None = None,
) -> tuple[Sizes, dict[str, torch.Size]]:
    """``(extents by name, leading dimensions by flattened axis)`` of tensors; ``known``: extents told otherwise.

    ``derive`` adds those that follow from others; it raises ValueError where they contradict.

    Raises:
        UnsupportedProblem: a rank or an extent does not fit.
    """
    sizes: Sizes = dict(known)
    leads: dict[str, torch.Size] = {}
    there = [(name, operand, t) for name, operand in declared.items() if (t := given.get(name)) is not None]
    bound: dict[str, str] = {}  # the operand that told an extent
    for name, operand, t in there:
        axes = operand.axes_of(t)
        n = len(axes) - operand.leads
        split, wrong = t.dim() - n, ""
        if split < 0 or (split > 0 and not operand.leads):
            raise misfit(op, declared, given, known, f": {name} does not fit: it has {t.dim()} dimensions")
        for axis, size in zip(axes[operand.leads :], t.shape[split:], strict=True):
            extent = extents_of(axis)[0]
            if binds(axis) and not sizes.setdefault(extent.name, size - extent.more) == size - extent.more >= 0:
                told = f"{bound.get(extent.name, 'the call')}'s {sizes[extent.name]}"
                wrong = f": its {extent.name} is {size - extent.more}, {told}"
                break
            bound.setdefault(extent.name, name)
        if operand.leads:
            lead = t.shape[:split]
            if leads.setdefault(operand.axes[0], lead) != lead:
                wrong = f": its leading dimensions are {tuple(lead)}"
            sizes[operand.names[0]] = math.prod(lead)
        if wrong:
            raise misfit(op, declared, given, known, f": {name} does not fit{wrong}")
    if derive is not None:
        try:
            derive(sizes)
        except ValueError as error:
            raise misfit(op, declared, given, known, f": {error}") from None
    for name, operand, t in there:
        axes = operand.axes_of(t)[operand.leads :]
        if any(
            size != extents_of(axis)[0].of(sizes) and all(size != e.of(sizes) for e in extents_of(axis)[1:])
            for size, axis in zip(t.shape[t.dim() - len(axes) :], axes, strict=True)
        ):
            expected = [[extent.of(sizes) for extent in extents_of(axis)] for axis in axes]
            shape = ", ".join(" or ".join(map(str, dict.fromkeys(values))) for values in expected)
            beside = [f"{other} {tuple(u.shape)}" for other, _, u in there if other != name]
            beside += [f"{word} = {value}" for word, value in known.items()]
            wanted = f"{operand.describe()} = ({shape}{',' * (len(axes) == 1)})"
            raise UnsupportedProblem(f"{op} takes {name} {wanted}; got {tuple(t.shape)} beside {', '.join(beside)}")
    return sizes, leads


def misfit(
    op: str, declared: Mapping[str, Operand], given: Named, known: Mapping[str, int] = {}, why: str = ""
) -> UnsupportedProblem:
    """The refusal of shapes that do not fit together."""
    wanted = ", ".join(
        f"{name} {operand.describe()}" for name, operand in declared.items() if given.get(name) is not None
    )
    got = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given.items() if t is not None)
    said = "".join(f", {name} = {value}" for name, value in known.items())
    return UnsupportedProblem(f"{op} takes {wanted}{said}, each extent the same wherever it stands; got {got}{why}")


def shape_of(operand: Operand, sizes: Mapping[str, int], leads: Leads, missing: Sequence[str] = ()) -> tuple[int, ...]:
    """The shape that ``operand`` has without axes that may be missing and are ``missing``, or that ``sizes`` lack;
    flattened dimensions are one where nobody told them apart.
    """
    first = leads.get(operand.axes[0], (sizes[operand.names[0]],)) if operand.leads else ()
    axes = [axis for axis in operand.axes[operand.leads :] if not axis.endswith("?") or axis[:-1] not in missing]
    sized = [(extents_of(axis)[0].of(sizes), axis) for axis in axes]
    found = [n for n, axis in sized if n is not None or not axis.endswith("?")]
    assert None not in found, (operand.axes, sizes)
    return (*first, *[n for n in found if n is not None])


def bits_of(operand: Operand, t: Tensor, *, pitches: bool = True) -> int:
    """Alignment in bits of an operand's address and, unless told otherwise, of the strides between its rows."""
    bits = t.data_ptr()
    if pitches and operand.strides:
        rows = t.numel() // max(1, t.shape[-1]) if t.dim() else 1
        if rows > 1:
            bits |= t.element_size() * reduce(or_, operand.walk(t)[:-1], 0)
    return bits
