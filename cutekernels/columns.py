"""Configs as columns: what rules and models say of all configs of a body is computed at once.

An expression over knobs is written once. Of a config its knobs are numbers; of :class:`Columns`, which has attributes
of the same names, arrays. Operators take both; where Python would branch on a knob, a function of this module stands.
NumPy is imported by the first Columns, not with this module, and columns are in double precision, since products of
extents overflow integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from types import FunctionType, MethodType
from typing import Any, TypeVar

_BITS = 33  # ten decimal digits


class Columns:
    """``size`` configs of one kind. A knob is an array, or one value that all have; a property of the kind is what its
    expression makes of them.
    """

    def __init__(self, kind: Any, size: int, knobs: Mapping[str, Any]) -> None:
        self.kind, self.size, self.knobs = kind, size, dict(knobs)
        self.kept: dict[Any, Any] = {}
        self.__dict__.update(self.knobs)

    @classmethod
    def span(cls, kind: Any, values: Mapping[Any, Sequence[Any]]) -> Columns:
        """Every config of these values, in the order of a loop over each; a key that names several knobs has a tuple of
        their values in each of its own.
        """
        import numpy as np

        size = math.prod(map(len, values.values()))
        knobs: dict[str, Any] = {}
        outer = 1
        for key, own in values.items():
            outer *= len(own)
            at = np.tile(np.repeat(np.arange(len(own)), size // outer), outer // len(own)) if len(own) > 1 else 0
            names, each = (key, zip(*own, strict=True)) if isinstance(key, tuple) else ((key,), (own,))
            for name, column in zip(names, map(tuple, each), strict=True):
                knobs[name] = column[0] if len(own) == 1 else _column(column, at)
        return cls(kind, size, {name: knobs[name] for name in kind.space() if name in knobs})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.kind, name)
        if isinstance(found, property):
            assert found.fget is not None
            self.__dict__[name] = value = found.fget(self)
            return value
        return MethodType(found, self) if isinstance(found, FunctionType) else found

    def __len__(self) -> int:
        return self.size

    def drawn(self, knobs: Iterable[tuple[str, Any]]) -> Columns:
        """As many configs, with the columns ``knobs``."""
        return Columns(self.kind, self.size, dict(knobs))

    def taken(self, rows: Any) -> Columns:
        """The configs that a mask or indices choose."""
        import numpy as np

        rows = np.asarray(rows)
        flags = rows.dtype == np.dtype(bool)
        rows = np.flatnonzero(np.broadcast_to(rows, self.size)) if flags else rows.astype(np.intp)
        return Columns(self.kind, len(rows), {name: _rows_of(own, rows) for name, own in self.knobs.items()})

    def __iter__(self) -> Iterator[Any]:
        """The configs themselves."""
        columns = [_values(own, type(self.kind.space()[name][0]), self.size) for name, own in self.knobs.items()]
        for chosen in zip(*columns, strict=True):
            yield self.kind.drawn(zip(self.knobs, chosen, strict=True))

    def combinations(self, names: tuple[str, ...]) -> tuple[list[Any], Any]:
        """A config for each combination of some knobs' values, and for each config here which one is its own."""
        import numpy as np

        if names not in self.kept:
            codes = np.zeros(self.size, np.int64)
            for name in names:
                if isinstance(own := self.knobs[name], np.ndarray):
                    values, own = np.unique(own, return_inverse=True)
                    codes = codes * len(values) + own
            _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
            self.kept[names] = list(self.taken(first)), inverse
        return self.kept[names]  # type: ignore[no-any-return]


class Words:
    """A column of a knob whose values are words."""

    def __init__(self, values: tuple[Any, ...], at: Any) -> None:
        self.values, self.at = values, at

    def __eq__(self, other: object) -> Any:
        return self.at == (self.values.index(other) if other in self.values else -1)

    def __ne__(self, other: object) -> Any:
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.at)


@cache
def _arrays() -> Any:
    """The class of arrays: NumPy's, but whole quotients of doubles, which it takes from remainders, are rounded from
    the quotient, twenty times as fast. Both are exact below 2^53.
    """
    import numpy as np

    class Array(np.ndarray):
        def __floordiv__(self, other: Any) -> Any:
            return np.floor(self / other)

        def __rfloordiv__(self, other: Any) -> Any:
            return np.floor(other / self)

        def __mod__(self, other: Any) -> Any:
            return self - np.floor(self / other) * other

        def __rmod__(self, other: Any) -> Any:
            return other - np.floor(other / self) * self

        def __divmod__(self, other: Any) -> Any:
            whole = np.floor(self / other)
            return whole, self - whole * other

        def __rdivmod__(self, other: Any) -> Any:
            whole = np.floor(other / self)
            return whole, other - whole * self

    return Array


def _column(values: tuple[Any, ...], at: Any) -> Any:
    import numpy as np

    if isinstance(values[0], str):
        return Words(values, at)
    return np.array(values, dtype=bool if isinstance(values[0], bool) else float)[at].view(_arrays())


def _rows_of(column: Any, rows: Any) -> Any:
    if isinstance(column, Words):
        return Words(column.values, column.at[rows])
    return column[rows] if hasattr(column, "shape") else column


def _values(column: Any, kind: type, size: int) -> list[Any]:
    if isinstance(column, Words):
        return [column.values[at] for at in column.at.tolist()]
    return column.astype(kind).tolist() if hasattr(column, "shape") else [column] * size


# ---- what expressions are made of, beside operators -------------------------------------------------------


N = TypeVar("N")


def where(mask: Any, yes: N, no: N) -> N:
    """``yes if mask else no``."""
    if not hasattr(mask, "shape"):
        return yes if mask else no
    import numpy as np

    return np.where(mask, yes, no).view(_arrays())  # type: ignore[no-any-return, call-overload]


def larger(one: N, other: N) -> N:
    """The larger of two."""
    if not hasattr(one, "shape") and not hasattr(other, "shape"):
        return max(one, other)  # type: ignore[no-any-return, call-overload]
    import numpy as np

    return np.maximum(one, other)  # type: ignore[no-any-return, call-overload]


def smaller(one: N, other: N) -> N:
    """The smaller of two."""
    return -larger(-one, -other)  # type: ignore[no-any-return, operator]


def ceil(x: Any) -> Any:
    """The least whole number from ``x`` up."""
    return -(-x // 1) if hasattr(x, "shape") else math.ceil(x)


def gcd(one: Any, other: Any) -> Any:
    """The greatest common divisor of whole numbers."""
    if not hasattr(one, "shape") and not hasattr(other, "shape"):
        return math.gcd(int(one), int(other))
    import numpy as np

    return np.gcd(np.asarray(one, np.int64), np.asarray(other, np.int64))


def among(x: Any, values: Iterable[Any]) -> Any:
    """Whether ``x`` is one of ``values``."""
    found: Any = False
    for value in values:
        found = found | (x == value)
    return found


def pick(x: Any, values: Mapping[Any, Any]) -> Any:
    """The entry of ``values`` for ``x``; no other one is looked up."""
    if not hasattr(x, "__len__") or isinstance(x, str):
        return values[x]
    (_, found), *others = values.items()
    for key, value in others:
        found = where(x == key, value, found)
    return found


def over(c: Any, names: tuple[str, ...], function: Callable[[Any], Any]) -> Any:
    """``function(c)``, which is no expression, reads these knobs alone and returns a number or a tuple of some."""
    if not isinstance(c, Columns):
        return function(c)
    import numpy as np

    configs, which = c.combinations(names)
    found = np.array([function(own) for own in configs]).T[..., which].view(_arrays())
    return tuple(found) if found.ndim > 1 else found


F = TypeVar("F", bound=Callable[..., Any])


def cached(function: F) -> F:
    """Columns keep what ``function`` makes of them, by its other arguments: of expressions that read no extents."""

    @wraps(function)
    def asked(*args: Any) -> Any:
        c = next((a for a in args[:3] if isinstance(a, Columns)), None)
        if c is None:
            return function(*args)
        key = (function, *(a for a in args if a is not c))
        if key not in c.kept:
            found = function(*args)
            c.kept[key] = found if isinstance(found, tuple) or hasattr(found, "dtype") else _Kept(found)
        return c.kept[key]

    return asked  # type: ignore[return-value]


class _Kept:
    """An object of expressions, each computed once."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        self.__dict__[name] = value = getattr(self._of, name)
        return value


def round_off(us: Any) -> Any:
    """Times as they are compared. Powers differ by a last bit between processors, and ranks must choose alike."""
    if not hasattr(us, "shape"):
        mantissa, exponent = math.frexp(us)
        return math.ldexp(round(mantissa * 2.0**_BITS), exponent - _BITS)
    import numpy as np

    mantissa, exponent = np.frexp(us)
    return np.ldexp(np.rint(mantissa * 2.0**_BITS), exponent - _BITS)
