"""Rate: one calibrated speed of a part of a GPU. Names and their meaning are the models'; here they are text.

``value`` is in ``unit``; ``revision`` is that of the meaning, as an op's revision is of its configs; ``conditions`` are
words such as ``reading=1.31 clock_mhz=1695 driver=580.159.04``, for people; ``source`` is what measured it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cutekernels.db.storage.trial import Rule, gpu_name_rule, moment, require, revision_rule, text

_WORDS = text(r"[ -~]{0,1000}", "printable ASCII, at most 1000 characters")


def _positive(v: object) -> str | None:
    return None if type(v) is float and math.isfinite(v) and v > 0 else "a finite number above 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A row of the table ``rate``, of which a GPU has one for each name and revision: the latest."""

    gpu: str
    name: str
    revision: int
    value: float
    unit: str
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    conditions: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            require(name, getattr(self, name), rule)


_RULES: dict[str, Rule] = {
    "gpu": gpu_name_rule,
    "name": text(r"[a-z][a-z0-9_]{0,63}", "a rate's name: lower case letters, digits and '_'"),
    "revision": revision_rule,
    "value": _positive,
    "unit": text(r"[ -~]{0,40}", "a unit in printable ASCII, at most 40 characters"),
    "created_at": moment,
    "conditions": _WORDS,
    "source": _WORDS,
}
