"""Snapshot for the dispatcher: the winners and calibrated rates of one GPU, read once into immutable tables.

Shipped rows are overlaid by the user's database, but a prediction never replaces a measurement. Reading writes
nothing, creates nothing and waits a second at most. :func:`load` raises for a lock alone (``lock.py``), which is read
in place of both: a broken database is logged once per process, and only shipped rows are used. Standard library only
(SQLAlchemy is imported for a PostgreSQL URL).
"""

from __future__ import annotations

import logging
import lzma
import math
import os
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from cutekernels import settings
from cutekernels.db.storage import lines, lock, sqlite
from cutekernels.db.storage.migrations import HEAD, RATES_SINCE, READABLE
from cutekernels.db.storage.trial import ORIGINS, Trial, gpu_name_rule
from cutekernels.errors import StoreError

_SHIPPED = ".jsonl.xz"  # ends the names of files of shipped winners
_TIMEOUT_S = 1.0
_LIMIT_S = 10.0  # of reading; views of a hostile database may never end
_ATTEMPTS = 3
_VERSION = "SELECT version_num FROM alembic_version"
_WINNERS = """
    SELECT winner.op, winner.revision, winner.problem, trial.config, trial.origin, trial.median_us, trial.ratio,
           CASE trial.origin WHEN 'predicted' THEN trial.message ELSE '' END, 'database'
    FROM winner JOIN trial ON trial.id = winner.trial_id
    WHERE winner.gpu = :gpu AND trial.status = 'ok'
"""
_RATES = "SELECT name, revision, value FROM rate WHERE gpu = :gpu"

_SERVED = ("op", "revision", "problem", "config", "origin", "median_us", "ratio")  # and its message, if predicted
_Row = tuple[Any, ...]
# Types of the columns of _WINNERS in sound rows: SQLite stores any type in any column.
_SOUND: tuple[set[type], ...] = ({str}, {int}, {str}, {str}, {str}, {float, type(None)}, {float, type(None)}, {str})
_said: set[str] = set()


class TunedConfig(NamedTuple):
    """A winner as calls use it, in the words of its ``revision``: a row of ``_WINNERS``, and of a lock with a source.

    ``reason`` says why a predicted one is better; ``source``: shipped, database or lock.
    """

    op: str
    revision: int
    problem: str
    config: str
    origin: str
    median_us: float | None
    ratio: float | None
    reason: str
    source: str


def precedence(origin: str, source: str, revision: int) -> tuple[bool, bool, int]:
    """The greatest among a problem's winners serves: a measured one, then the user's, then the later revision's."""
    return origin == "measured", source != "shipped", revision


def _by_problem(rows: Iterable[TunedConfig]) -> Mapping[str, TunedConfig]:
    """The row of each problem that precedes its others."""
    found: dict[str, TunedConfig] = {}
    for row in rows:
        above = found.setdefault(row.problem, row)
        if above is not row and _rank(row) > _rank(above):
            found[row.problem] = row
    return MappingProxyType(found)


def _rank(row: TunedConfig) -> tuple[bool, bool, int]:
    return precedence(row.origin, row.source, row.revision)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Per (op, revision), the winner of each problem bucket; calibrated rates by (name, revision). Immutable.

    ``digest``: of the lock that they are from; else empty.
    """

    table: Mapping[tuple[str, int], Mapping[str, TunedConfig]]
    rates: Mapping[tuple[str, int], float] = field(default_factory=dict)
    digest: str = ""

    def of(self, op: str, revisions: Sequence[int]) -> Mapping[str, TunedConfig]:
        """The winners of ``op`` by problem, under any of the revisions whose rows serve."""
        found = [table for revision in revisions if (table := self.table.get((op, revision))) is not None]
        return found[0] if len(found) == 1 else _by_problem(row for table in found for row in table.values())


_lock = threading.RLock()
_held: dict[str, Snapshot] = {}


def snapshot_of(gpu: str) -> Snapshot:
    """The rows known for the GPU called ``gpu``, read at first use and kept until :func:`forget`."""
    found = _held.get(gpu)
    if found is None:
        with _lock:
            found = _held.get(gpu) or _held.setdefault(gpu, load(gpu))
    return found


def all_held() -> dict[str, Snapshot]:
    """All that :func:`held` has read."""
    with _lock:
        return dict(_held)


def forget(known: Mapping[str, Snapshot]) -> None:
    """Keep ``known`` alone, so that :func:`held` reads the others again."""
    with _lock:
        _held.clear()
        _held.update(known)


def load(gpu: str, url: str | None = None, *, strict: bool = False) -> Snapshot:
    """The winners for the GPU called ``gpu``; ``url`` is a path or URL, None for the database in the settings.

    Raises:
        StoreError: a lock is missing or not as it was written; with ``strict``, a database cannot be read.
    """
    place = _named_lock(url)
    if place is not None:
        return _of_lock(gpu, lock.read(lock.path_of(place)))
    rows, rates = _database(gpu, url, strict=strict)
    return _snapshot([*rows, *_shipped_winners(gpu)], rates)


def _snapshot(rows: Iterable[TunedConfig], rates: dict[tuple[str, int], float], digest: str = "") -> Snapshot:
    tables: dict[tuple[str, int], list[TunedConfig]] = {}
    for row in rows:
        tables.setdefault((row.op, row.revision), []).append(row)
    by_problem = {key: _by_problem(table) for key, table in tables.items()}
    return Snapshot(MappingProxyType(by_problem), MappingProxyType(rates), digest)


def _shipped_winners(gpu: str) -> list[TunedConfig]:
    """As of :func:`shipped`, judged by columns: three times as fast, and the first call of a process waits for it."""
    held = [row for _, row in lines.rows(_shipped_lines(gpu))]
    if all(isinstance(row, dict) and _is_whole(row, gpu) for row in held):
        found = [_as_winner(*map(row.get, _SERVED), row.get("message") or "") for row in held]
        if _sound(found):
            return found
    return [_as_winner(*(getattr(trial, name) for name in (*_SERVED, "message"))) for trial in shipped(gpu)]


def _is_whole(row: dict[str, Any], gpu: str) -> bool:
    """Whether a row says where and how it was measured, and that it went well."""
    of, made = row.get("gpu"), row.get("environment")
    return isinstance(of, dict) and of.get("name") == gpu and isinstance(made, dict) and row.get("status") == "ok"


def _as_winner(*values: Any) -> TunedConfig:
    *row, message = values
    return TunedConfig._make((*row, message if values[4] == "predicted" else "", "shipped"))


def shipped_environment(winner: TunedConfig, gpu: str) -> Mapping[str, str]:
    """The versions that a shipped winner was measured with."""
    for _, row in lines.rows(_shipped_lines(gpu)):
        if isinstance(row, dict) and tuple(map(row.get, _SERVED[:4])) == winner[:4]:
            return row.get("environment") or {}
    return {}


def _named_lock(url: str | None) -> str | None:
    try:
        place = settings.load().database_url if url is None else settings.database_url(url)
    except (ValueError, RuntimeError):  # told where the database is read
        return None
    return place if lock.is_one(place) else None


def _of_lock(gpu: str, frozen: lock.Lock) -> Snapshot:
    rows = (TunedConfig._make((*row, "lock")) for row in frozen.of("winner", gpu))
    rates = {(name, revision): value for name, revision, value in frozen.of("rate", gpu)}
    return _snapshot(rows, rates, frozen.digest)


def shipped_gpus() -> list[str]:
    """The GPUs for which winners travel with the package."""
    found = (file.name for file in (files("cutekernels.db") / "shipped").iterdir())
    return sorted(name.removesuffix(_SHIPPED) for name in found if name.endswith(_SHIPPED))


def may_serve(origin: str, reason: str) -> bool:
    """Whether calls may use a winner: a prediction, which nobody measured, says why it should displace the default."""
    return origin == "measured" or bool(reason)


def unmeasured(gpu: str, serving: Iterable[tuple[str, str]]) -> str:
    """A sentence for a GPU that no measured winner serves: what calls do there, and how to tune for it. Else "".

    ``serving``: origin and source of the winners that calls may use.
    """
    found = list(serving)
    if any(origin == "measured" for origin, _ in found):
        return ""
    ours = sum(source == "shipped" for _, source in found)
    no_other = "" if found else " and no prediction is shipped"
    number = f"{len(found)} prediction{'s' * (len(found) > 1)}, of which {ours} shipped, and otherwise "
    return (
        f"no measured winner serves {gpu}{no_other}: calls there use {number if found else ''}each op's default; "
        f"`cutekernels tune JOB` on such a GPU measures, `--gpu {gpu}` on a machine without one predicts"
    )


def shipped(gpu: str) -> list[Trial]:
    """The winners that travel with the package for one GPU; a broken row is logged once and skipped."""
    found, bad = [], []
    for number, trial in lines.parsed(_shipped_lines(gpu)):
        if isinstance(trial, Trial) and trial.gpu.name != gpu:
            trial = StoreError(f"it is for {trial.gpu.name}")
        if isinstance(trial, StoreError):
            bad.append(f"line {number}: {trial}")
        else:
            found.append(trial)
    if bad:
        say(f"shipped/{gpu}{_SHIPPED}: {len(bad)} broken rows skipped, the first: {bad[0]}")
    return found


def _shipped_lines(gpu: str) -> list[str]:
    """Those of the file for one GPU; none, with a message, where it cannot be read."""
    if gpu_name_rule(gpu) is not None:  # not a file name either
        return []
    name = gpu + _SHIPPED
    try:
        return lzma.decompress((files("cutekernels.db") / "shipped" / name).read_bytes()).decode().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        say(f"shipped/{name}: {error}")
        return []


_Read = tuple[list[TunedConfig], dict[tuple[str, int], float]]


def _database(gpu: str, url: str | None, *, strict: bool = False) -> _Read:
    shown = "from the settings"
    try:
        place = settings.load().database_url if url is None else settings.database_url(url)
        path = sqlite.path_of(place)
        shown = _without_password(place) if path is None else place
        named = settings.load().database_named and not strict
        if url is None and path is not None and sqlite.is_absent(path) and not named:
            return [], {}  # nothing has been tuned yet: no reason to warn
        rows, rates = _read_postgres(place, gpu) if path is None else _read_sqlite(path, gpu)
    except (StoreError, sqlite3.Error, OSError, ValueError, RuntimeError, ImportError) as error:
        # ValueError: a bad setting or URL; RuntimeError: no home directory; ImportError: no PostgreSQL driver.
        if strict:
            raise StoreError(f"tuned-config database {shown}: {error}") from error
        say(f"tuned-config database {shown}: {error}; only shipped winners and defaults are used")
        return [], {}
    if not _sound(rows):
        bad = [row for row in rows if not _sound([row])]
        rows = [row for row in rows if _sound([row])]
        say(f"tuned-config database {shown}: {len(bad)} broken rows skipped, the first: {bad[0]!r:.200}")
    return [TunedConfig._make(row) for row in rows], {
        (name, revision): value
        for name, revision, value in rates
        if (type(name), type(revision), type(value)) == (str, int, float) and 0 < value < math.inf
    }


def _without_password(url: str) -> str:
    """The URL of another database without its password, for a log."""
    try:
        from cutekernels.db.storage.engine import shown
    except ImportError:
        return url.partition("://")[0] + "://..."
    return shown(url)


def _sound(rows: Sequence[_Row]) -> bool:
    """Whether all rows are sound, looked at by columns: seven times as fast as row by row."""
    columns = list(zip(*rows, strict=True))
    if not rows:
        return True
    return (
        all(set(map(type, c)) <= types for c, types in zip(columns, _SOUND, strict=False))
        and set(columns[4]) <= set(ORIGINS)
        and all(map(_from_0_up, columns[5:7]))
    )


def _from_0_up(values: Sequence[float | None]) -> bool:
    """Whether times or ratios are ones, or absent: SQLite stores an infinity, and none that is not a number."""
    found = [value for value in values if value is not None]
    return not found or (min(found) >= 0 and max(found) < math.inf)


def _read_sqlite(path: Path, gpu: str) -> tuple[list[_Row], list[_Row]]:
    if sqlite.is_absent(path):
        raise StoreError("there is none; `cutekernels tune` makes one")
    if not path.is_file():
        os.lstat(path)  # raises where the folder is closed; is_file() is False there from Python 3.14 on
        raise StoreError("it is not a file")
    for _ in range(_ATTEMPTS):
        immutable = sqlite.needs_immutable(path)
        before = sqlite.stamp(path) if immutable else None
        try:
            made = sqlite.connect_readonly(path, _TIMEOUT_S, immutable=immutable, limit_s=_LIMIT_S)
            with closing(made) as connection:
                connection.execute("BEGIN")  # one view of the file for all statements
                version = _require_known(connection.execute(_VERSION).fetchone())
                rows = _fetch(connection, _WINNERS, gpu)
                rates = _fetch(connection, _RATES, gpu) if version >= RATES_SINCE else []
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if sqlite.is_half_written(error):
                raise StoreError("a killed writer left it half-written; `cutekernels db stats` repairs it") from error
            # Immutable reading takes no lock: apparent damage may be a checkpoint in progress.
            if immutable and sqlite.stamp(path) != before:
                continue
            if isinstance(error, UnicodeDecodeError):  # in what SQLite says of a damaged schema
                raise StoreError(
                    f"its schema is damaged; `cutekernels db doctor --fix` sets it aside ({error})"
                ) from error
            raise
        if not immutable or sqlite.stamp(path) == before:
            return rows, rates
    raise StoreError("a writer kept changing it")


def _fetch(connection: sqlite3.Connection, query: str, gpu: str) -> list[_Row]:
    """All rows. Texts are decoded in C, unless one is not UTF-8: then each by the connection's own function."""
    lenient = connection.text_factory
    connection.text_factory = str
    try:
        return connection.execute(query, {"gpu": gpu}).fetchall()
    except sqlite3.OperationalError as error:
        if "UTF-8" not in str(error):
            raise
    finally:
        connection.text_factory = lenient
    return connection.execute(query, {"gpu": gpu}).fetchall()


def _require_known(version: tuple[Any] | None) -> str:
    found = None if version is None else version[0]
    if found not in READABLE:
        relation = "newer" if isinstance(found, str) and found > HEAD else "older"
        raise StoreError(f"its schema {found!r:.40} is {relation} than {HEAD!r}, the one this cutekernels reads")
    return str(found)


def _read_postgres(url: str, gpu: str) -> tuple[list[_Row], list[_Row]]:
    from sqlalchemy import text

    from cutekernels.db.storage.engine import open_engine, translated

    engine = open_engine(url, readonly=True, accepts=READABLE, patience_s=(1, int(_LIMIT_S)))
    with translated("query"), engine.connect() as connection:
        version = _require_known(tuple(connection.execute(text(_VERSION)).one()))
        queries = [_WINNERS, *([_RATES] if version >= RATES_SINCE else [])]
        rows, *rates = ([tuple(row) for row in connection.execute(text(query), {"gpu": gpu})] for query in queries)
    return rows, rates[0] if rates else []


def say(message: str) -> None:
    """Log a warning about what the database holds, once a process."""
    if message in _said:
        return
    _said.add(message)
    try:
        log = settings.logger("db")
    except ValueError:  # the setting of the log level itself is bad
        log = logging.getLogger("cutekernels.db")
    log.warning(message)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
