"""Snapshot for the dispatcher: the winners for one GPU, read once into immutable dicts.

Shipped rows are overlaid by the user's database, but a prediction never replaces a measurement. Reading writes
nothing, creates nothing and waits a second at most. :func:`load` never raises: a broken database is logged once per
process, and only shipped rows are used. Standard library only (SQLAlchemy is imported for a PostgreSQL URL).
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from cutekernels import settings
from cutekernels.db import sqlite
from cutekernels.db.migrations import HEAD, READABLE
from cutekernels.db.trial import ORIGINS, Trial, gpu_name_rule
from cutekernels.errors import StoreError

_TIMEOUT_S = 1.0
_LIMIT_S = 10.0  # of reading; views of a hostile database may never end
_ATTEMPTS = 3
_VERSION = "SELECT version_num FROM alembic_version"
_WINNERS = """
    SELECT winner.op, winner.revision, winner.problem, trial.config, trial.origin, trial.median_us, trial.ratio
    FROM winner JOIN trial ON trial.id = winner.trial_id
    WHERE winner.gpu = :gpu
"""

_Row = tuple[object, ...]
_Tables = dict[tuple[str, int], dict[str, "Winner"]]
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class Winner:
    """A tuned config. ``source`` is ``"shipped"`` or ``"database"``."""

    problem: str
    config: str
    origin: str
    median_us: float | None
    ratio: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Per (op, revision), the winner of each problem bucket. Immutable throughout."""

    table: Mapping[tuple[str, int], Mapping[str, Winner]]


def load(gpu: str, url: str | None = None) -> Snapshot:
    """The winners for the GPU called ``gpu``; ``url`` is a path or URL, None for the database in the settings."""
    tables: _Tables = {}
    for t in shipped(gpu):
        winner = Winner(t.problem, t.config, t.origin, t.median_us, t.ratio, "shipped")
        tables.setdefault((t.op, t.revision), {})[t.problem] = winner
    for (op, revision), winner in _database(gpu, url):
        table = tables.setdefault((op, revision), {})
        below = table.get(winner.problem)
        if serves_over(winner.origin, None if below is None else below.origin):
            table[winner.problem] = winner
    return Snapshot(MappingProxyType({key: MappingProxyType(table) for key, table in tables.items()}))


def shipped_gpus() -> list[str]:
    """The GPUs for which winners travel with the package."""
    found = (file.name for file in (files("cutekernels.db") / "shipped").iterdir())
    return sorted(name.removesuffix(".jsonl") for name in found if name.endswith(".jsonl"))


def serves_over(winner: str, below: str | None) -> bool:
    """Whether a database's winner of origin ``winner`` serves calls in place of a shipped one of origin ``below``."""
    return below != "measured" or winner == "measured"


def shipped(gpu: str) -> list[Trial]:
    """The winners that travel with the package for one GPU; a broken row is logged once and skipped."""
    if gpu_name_rule(gpu) is not None:  # not a file name either
        return []
    name = f"{gpu}.jsonl"
    try:
        text = (files("cutekernels.db") / "shipped" / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        _say(f"shipped/{name}: {error}")
        return []
    found, bad = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            trial = Trial.from_line(line)
            if trial.gpu.name != gpu:
                raise StoreError(f"it is for {trial.gpu.name}")
        except StoreError as error:
            bad.append(f"line {number}: {error}")
            continue
        found.append(trial)
    if bad:
        _say(f"shipped/{name}: {len(bad)} broken rows skipped, the first: {bad[0]}")
    return found


def _database(gpu: str, url: str | None) -> list[tuple[tuple[str, int], Winner]]:
    shown = "from the settings"
    try:
        place = settings.load().database_url if url is None else settings.database_url(url)
        shown = re.sub(r"(?<=:)[^:@/]*(?=@)", "***", place)  # no password in a log
        path = sqlite.path_of(place)
        if url is None and path is not None and not path.exists() and not settings.load().database_named:
            return []  # nothing has been tuned yet: no reason to warn
        rows = _read_postgres(place, gpu) if path is None else _read_sqlite(path, gpu)
    except (StoreError, sqlite3.Error, OSError, ValueError, RuntimeError, ImportError) as error:
        # ValueError: a bad setting or URL; RuntimeError: no home directory; ImportError: no PostgreSQL driver.
        _say(f"tuned-config database {shown}: {error}; only shipped winners and defaults are used")
        return []
    found, bad = [], []
    for row in rows:
        winner = _checked(row)
        if winner is None:
            bad.append(row)
        else:
            found.append(winner)
    if bad:
        _say(f"tuned-config database {shown}: {len(bad)} broken rows skipped, the first: {bad[0]!r:.200}")
    return found


def _checked(row: _Row) -> tuple[tuple[str, int], Winner] | None:
    """The row as a winner, or None for a broken one: SQLite stores any type in any column."""
    op, revision, problem, config, origin, median_us, ratio = row
    if not (isinstance(op, str) and isinstance(revision, int) and isinstance(problem, str) and isinstance(config, str)):
        return None
    if not isinstance(origin, str) or origin not in ORIGINS:
        return None
    if not isinstance(median_us, float | None) or not isinstance(ratio, float | None):
        return None
    return (op, revision), Winner(problem, config, origin, median_us, ratio, "database")


def _read_sqlite(path: Path, gpu: str) -> list[_Row]:
    if not path.exists():
        raise StoreError("there is none; `cutekernels tune` makes one")
    if not path.is_file():
        raise StoreError("it is not a file")
    for _ in range(_ATTEMPTS):
        immutable = sqlite.needs_immutable(path)
        before = sqlite.stamp(path) if immutable else None
        try:
            made = sqlite.connect_readonly(path, _TIMEOUT_S, immutable=immutable, limit_s=_LIMIT_S)
            with closing(made) as connection:
                connection.execute("BEGIN")  # one view of the file for both statements
                _require_known(connection.execute(_VERSION).fetchone())
                rows = connection.execute(_WINNERS, {"gpu": gpu}).fetchall()
        except sqlite3.DatabaseError as error:
            if sqlite.is_half_written(error):
                raise StoreError("a killed writer left it half-written; `cutekernels db stats` repairs it") from error
            # Immutable reading takes no lock: apparent damage may be a checkpoint in progress.
            if immutable and sqlite.stamp(path) != before:
                continue
            raise
        if not immutable or sqlite.stamp(path) == before:
            return rows
    raise StoreError("a writer kept changing it")


def _require_known(version: tuple[object] | None) -> None:
    found = None if version is None else version[0]
    if found not in READABLE:
        relation = "newer" if isinstance(found, str) and found > HEAD else "older"
        raise StoreError(f"its schema {found!r:.40} is {relation} than {HEAD!r}, the one this cutekernels reads")


def _read_postgres(url: str, gpu: str) -> Iterable[_Row]:
    from sqlalchemy import text

    from cutekernels.db.engine import open_engine, translated

    engine = open_engine(url, readonly=True, accepts=READABLE)
    with translated("query"), engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(_WINNERS), {"gpu": gpu})]


def _say(message: str) -> None:
    if message in _said:
        return
    _said.add(message)
    try:
        log = settings.logger("db")
    except ValueError:  # the setting of the log level itself is bad
        log = logging.getLogger("cutekernels.db")
    log.warning(message)
