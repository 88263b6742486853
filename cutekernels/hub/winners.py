"""Winners of a kernel repository: ``winners.json`` beside it, in the place of a database. Standard library only.

It has what ``dispatch.py`` and ``rates.py`` ask of ``db/snapshot.py``, whose place it takes there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from cutekernels import settings

_said: set[str] = set()
_held: dict[str, Snapshot] = {}


class Winner(NamedTuple):
    """A tuned config, in the words of its ``revision``. ``reason`` says why a predicted one is better."""

    problem: str
    config: str
    origin: str
    median_us: float | None
    ratio: float | None
    source: str
    reason: str
    revision: int

    @property
    def precedence(self) -> tuple[bool, int]:
        """The greatest among winners of one problem serves: a measured one, then the later revision's."""
        return self.origin == "measured", self.revision


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Per (op, revision), the winner of each problem bucket; no calibrated rates. Immutable."""

    table: Mapping[tuple[str, int], Mapping[str, Winner]]
    rates: Mapping[tuple[str, int], float] = field(default_factory=dict)
    digest: str = ""

    def of(self, op: str, revisions: Sequence[int]) -> Mapping[str, Winner]:
        """The winners of ``op`` by problem, under any of the revisions whose rows serve."""
        rows = [row for revision in revisions for row in self.table.get((op, revision), {}).values()]
        return {row.problem: row for row in sorted(rows, key=lambda row: row.precedence)}


def held(gpu: str) -> Snapshot:
    """What is known for the GPU called ``gpu``."""
    return _held[gpu] if gpu in _held else _held.setdefault(gpu, load(gpu))


def all_held() -> dict[str, Snapshot]:
    """All that :func:`held` has read."""
    return dict(_held)


def forget(known: Mapping[str, Snapshot]) -> None:
    """Keep ``known`` alone, so that :func:`held` reads the others again."""
    _held.clear()
    _held.update(known)


def load(gpu: str, url: str | None = None, *, strict: bool = False) -> Snapshot:
    """The winners for the GPU called ``gpu``; a kernel repository reads no database."""
    tables: dict[tuple[str, int], dict[str, Winner]] = {}
    for op, revision, problem, config, origin, median_us, ratio, reason in _rows().get(gpu, ()):
        winner = Winner(problem, config, origin, median_us, ratio, "shipped", reason, revision)
        tables.setdefault((op, revision), {})[problem] = winner
    return Snapshot(MappingProxyType(tables))


@cache
def _rows() -> dict[str, list[list[Any]]]:
    """Winners by GPU: op, revision, problem, config, origin, median in us, ratio, reason."""
    found: dict[str, list[list[Any]]] = json.loads((Path(__file__).parents[1] / "winners.json").read_text())
    return found


def may_serve(origin: str, reason: str) -> bool:
    """Whether calls may use a winner: a prediction, which nobody measured, says why it should displace the default."""
    return origin == "measured" or bool(reason)


def unmeasured(gpu: str, serving: Iterable[tuple[str, str]]) -> str:
    """A sentence for a GPU that no measured winner serves; else ""."""
    if any(origin == "measured" for origin, _ in serving):
        return ""
    return f"no measured winner of this kernel repository serves {gpu}: calls there use each op's default"


def say(message: str) -> None:
    """Log a warning, once a process."""
    if message not in _said:
        _said.add(message)
        settings.logger("db").warning(message)
