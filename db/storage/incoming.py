"""Trials from elsewhere, files or other databases, and the rules that they keep beyond those of :class:`Trial`."""

from __future__ import annotations

import gzip
import lzma
import os
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TextIO

from cutekernels import settings
from cutekernels.db.storage import lines
from cutekernels.db.storage.engine import file_errors
from cutekernels.db.storage.trial import CLOCK_SKEW, LINE_LIMIT, Trial
from cutekernels.errors import StoreError

Judge = Callable[[Trial], str]
"""Why a row cannot be true, by what the ops know of its problem; "" of one that can."""


def accept(t: Trial) -> str:
    """A judge who knows nothing."""
    return ""


def _open_text(name: str) -> TextIO:
    """The text of a file, compressed or not. A byte that is not UTF-8 becomes a character that no rule lets through."""
    if name.endswith(".gz"):
        if not os.path.getsize(name):
            raise StoreError(f"{name} is empty, which no gzip file is: copy it again")
        return gzip.open(name, "rt", encoding="utf-8-sig", errors="surrogateescape")
    if name.endswith(".xz"):
        return lzma.open(name, "rt", encoding="utf-8-sig", errors="surrogateescape")
    return open(name, encoding="utf-8-sig", errors="surrogateescape")


def read(source: str | os.PathLike[str] | TextIO, judge: Judge) -> list[Trial]:
    """The trials of a file or a stream of :meth:`Store.export`'s lines.

    Raises:
        StoreError: naming the line and the rule it breaks.
    """
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        with file_errors(name), _open_text(name) as stream:
            return _read_stream(stream, name, judge)
    return _read_stream(source, getattr(source, "name", "stream"), judge)


def _read_stream(stream: TextIO, name: str, judge: Judge) -> list[Trial]:
    trials = []
    seen: dict[str, tuple[int, Trial]] = {}
    latest = datetime.now(UTC) + CLOCK_SKEW
    for number, incoming in lines.parsed(iter(lambda: stream.readline(LINE_LIMIT + 1), "")):
        try:
            if isinstance(incoming, StoreError):
                raise incoming
            _require_sound(incoming, latest, judge)
            first, same = seen.setdefault(incoming.id, (number, incoming))
            if same != incoming:
                raise StoreError(f"id {incoming.id} stands in line {first} with other contents: remove one of the two")
        except StoreError as error:
            raise StoreError(f"{name}, line {number}: {error}; nothing was imported") from None
        if first == number:
            trials.append(incoming)
    return trials


def without_future(trials: Iterable[Trial], source: str) -> list[Trial]:
    """Those of another database's winners that no wrong clock has dated; a warning names the others."""
    latest, every = datetime.now(UTC) + CLOCK_SKEW, list(trials)
    late = [t for t in every if t.created_at > latest]
    if late:
        settings.logger("db").warning(
            "%d winners of %s lie in the future and are left out, the first trial %s, %s: `tune --force` its problem",
            *(len(late), source, late[0].id, late[0].created_at.isoformat()),
        )
    return [t for t in every if t.created_at <= latest]


def require_all(incoming: Iterable[Trial], source: str, verb: str, judge: Judge) -> None:
    """Raises StoreError for the first of another database's trials that breaks a rule."""
    latest = datetime.now(UTC) + CLOCK_SKEW
    for candidate in incoming:
        try:
            _require_sound(candidate, latest, judge)
        except StoreError as error:
            raise StoreError(f"{source}, trial {candidate.id}: {error}; nothing was {verb}") from None


def _require_sound(incoming: Trial, latest: datetime, judge: Judge) -> None:
    if incoming.created_at > latest:  # it would win every later comparison
        raise StoreError(
            f"created_at lies in the future, {incoming.created_at.isoformat()}: set this machine's clock; or where the "
            "row was written, `cutekernels tune --force` its problem and `db prune --days 0` the row"
        )
    untimed = (0, None) if incoming.origin == "measured" else (0,)
    if incoming.status == "ok" and incoming.median_us in untimed:
        raise StoreError(
            f"median_us of a good row must be above 0; it is {incoming.median_us}: measure again, or leave it out"
        )
    if reason := judge(incoming):
        raise StoreError(f"{incoming.op} [{incoming.problem}]: {reason}, or leave the row out")
