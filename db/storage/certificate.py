"""Certificate of a winner: the final round that chose it, stored with its trial as one JSON object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from reprlib import repr as short_repr
from typing import Any, Self

from cutekernels.errors import StoreError

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_MOST_TIED = 100
_MOST_TEXT = 1000
_MOST_TOGETHER = 48 * 1024  # characters of all configs: a row is a line of 64 KiB at most


@dataclass(frozen=True, slots=True)
class Certificate:
    """The comparison that a winner won, and its conditions.

    Attributes:
        default: the default config of that day, as text.
        tied: the configs that the final could not tell from the fastest, the winner among them, in text order.
        challengers: configs in the final beside the default.
        processes: fresh processes that the final was held in.
        quantiles_us: the winner's time of one call at 0, 5, 25, 50, 75, 95 and 100 % of its samples.
        clock_mhz: of the SMs, the median during the final; like ``temperature_c`` and ``power_w`` None where the
            driver does not tell.
    """

    default: str
    tied: tuple[str, ...]
    challengers: int
    processes: int
    quantiles_us: tuple[float, ...]
    clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None

    def __post_init__(self) -> None:
        texts = (self.default, *self.tied) if isinstance(self.tied, tuple) else (None,)
        for t in texts:
            if not (type(t) is str and len(t) <= _MOST_TEXT and t.isprintable() and t.isascii()):
                raise StoreError(
                    f"a certificate's configs, default and tied, must be printable ASCII; one is {short_repr(t)}"
                )
        if not 1 <= len(self.tied) <= _MOST_TIED:
            raise StoreError(f"a certificate must name 1 to {_MOST_TIED} tied configs; it has {len(self.tied)}")
        if sum(map(len, self.tied)) > _MOST_TOGETHER:
            raise StoreError(
                f"a certificate's tied configs must have {_MOST_TOGETHER} characters at most; they have "
                f"{sum(map(len, self.tied))}: name fewer"
            )
        for name, most in (("challengers", _MOST_TIED), ("processes", 1000)):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= most:
                raise StoreError(f"a certificate's {name} must be a whole number to {most}; it is {short_repr(value)}")
        times = self.quantiles_us if isinstance(self.quantiles_us, tuple) else (None,)
        if len(times) != len(QUANTILES) or not all(map(_is_number, times)):
            raise StoreError(f"a certificate must have {len(QUANTILES)} quantiles; they are {short_repr(times)}")
        for name in ("clock_mhz", "temperature_c", "power_w"):
            value = getattr(self, name)
            if value is not None and not _is_number(value):
                raise StoreError(f"a certificate's {name} must be a finite number from 0 up; it is {short_repr(value)}")

    def as_row(self) -> dict[str, Any]:
        """Plain JSON values, those that are None left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items() if v is not None}

    @classmethod
    def from_row(cls, row: object) -> Self:
        """The certificate that a parsed JSON object describes. Raises StoreError with the rule it breaks."""
        if not isinstance(row, Mapping):
            raise StoreError(f"a certificate must be a JSON object; it is {short_repr(row)}")
        try:
            values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
            return cls(**values)
        except TypeError as error:  # fields that are missing or unknown
            raise StoreError(f"a certificate has other fields: {short_repr(str(error))}") from None


def _is_number(value: object) -> bool:
    if type(value) is int:
        return 0 <= value < 2**53
    return type(value) is float and math.isfinite(value) and value >= 0
