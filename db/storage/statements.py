"""Statements of the store: each runs inside a transaction that a Store method opened.

Rows go in and out through SQLAlchemy Core in batches: with the ORM, mixed rows cost a statement each.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    ColumnElement,
    LargeBinary,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    case,
    cast,
    delete,
    exists,
    false,
    func,
    or_,
    select,
    tuple_,
    type_coerce,
    update,
)
from sqlalchemy.dialects import sqlite as sqlite_dialect
from sqlalchemy.orm import Session

from cutekernels import settings
from cutekernels.db.storage import models
from cutekernels.db.storage.models import KEY
from cutekernels.db.storage.trial import (
    CLOCK_SKEW,
    COUNTS,
    INT64_MAX,
    MEASUREMENTS,
    PROVENANCE,
    REQUEST_RULES,
    TRIAL_RULES,
    Environment,
    Gpu,
    Trial,
    broken_request,
)
from cutekernels.db.storage.uuid7 import UUID7
from cutekernels.errors import StoreError

_BATCH = 500  # ids per IN (...); SQLite takes 32,766 variables, 999 in old builds
_KEYS = 200  # tuning keys per IN (...): four variables each

R = TypeVar("R", Gpu, Environment)
T = TypeVar("T")

_GPU_FIELDS = tuple(f.name for f in fields(Gpu))
_VERSION_FIELDS = tuple(f.name for f in fields(Environment) if f.name not in PROVENANCE)
_TRIAL_FIELDS = tuple(f.name for f in fields(Trial) if f.name not in ("gpu", "environment"))

_trial, _gpu, _environment, _request = (
    models.Base.metadata.tables[name] for name in ("trial", "gpu", "environment", "request")
)
_winner = models.winner

Key = tuple[str, str, int, str]


class Rank(NamedTuple):
    """The order of two winners of one key: measured, then newer, then the greater id."""

    measured: bool
    created_at: datetime
    id: str


class RecordedTrial(NamedTuple):
    """A stored trial as far as the rules for winners need it."""

    id: str
    key: Key
    status: str
    rank: Rank


def insert_into(session: Session, table: Any) -> Any:
    """INSERT of the database's own dialect: both know ON CONFLICT, each under its own class."""
    if session.get_bind().dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql  # 20 ms, which no query of an SQLite file needs

        return postgresql.insert(table)
    return sqlite_dialect.insert(table)


def batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """``values`` in lists of ``size``, the last one shorter."""
    rest = iter(values)
    while batch := list(islice(rest, size)):
        yield batch


# ---- trials -------------------------------------------------------------------------------------------------


def add(session: Session, batch: Sequence[Trial]) -> int:
    """Insert trials whose id is new. Returns how many those were."""
    gpus = _ids(session, _gpu, _GPU_FIELDS, {t.gpu for t in batch})
    measured_on = {t.environment for t in batch}
    versions = {e: Environment(**{name: getattr(e, name) for name in _VERSION_FIELDS}) for e in measured_on}
    environments = _ids(session, _environment, _VERSION_FIELDS, set(versions.values()))
    rows = (
        {name: getattr(t, name) for name in _TRIAL_FIELDS}
        | {name: getattr(t.environment, name) for name in PROVENANCE}
        | {"gpu_id": gpus[t.gpu], "environment_id": environments[versions[t.environment]]}
        for t in sorted(batch, key=lambda t: t.id)  # two writers that lock rows in the same order cannot deadlock
    )
    statement = insert_into(session, _trial).on_conflict_do_nothing(index_elements=["id"]).returning(_trial.c.id)
    connection = session.connection()
    return sum(len(connection.execute(statement, some).all()) for some in batches(rows, 5000))


def _ids(session: Session, table: Table, names: tuple[str, ...], records: set[R]) -> dict[R, int]:
    """Ids of the rows of ``table`` that hold ``records``; absent ones are inserted."""

    def known() -> dict[tuple[Any, ...], int]:
        columns = [table.c[name] for name in names]
        return {tuple(values): id_ for id_, *values in session.execute(select(table.c.id, *columns))}

    wanted = {record: tuple(getattr(record, name) for name in names) for record in sorted(records, key=repr)}
    ids = known()
    missing = [dict(zip(names, values, strict=True)) for values in wanted.values() if values not in ids]
    if missing:
        session.connection().execute(insert_into(session, table).on_conflict_do_nothing(), missing)
        ids = known()
    return {record: ids[values] for record, values in wanted.items()}


def where(
    gpu: str | None, op: str | None, revision: int | None, problem: str | None, origin: str | None
) -> list[ColumnElement[bool]]:
    """Conditions on a trial, for the values that are given."""
    t = _trial.c
    asked = ((_gpu.c.name, gpu), (t.op, op), (t.revision, revision), (t.problem, problem), (t.origin, origin))
    return [column == value for column, value in asked if value is not None]


def bounded(limit: int | None) -> int | None:
    """``limit`` as SQL takes it: more than 64 bits hold is no limit."""
    return None if limit is None or limit > INT64_MAX else limit


def select_trials(
    session: Session,
    conditions: Sequence[ColumnElement[bool]],
    *,
    winning: bool = False,
    limit: int | None = None,
    latest: bool = False,
    strict: bool = False,
) -> list[Trial]:
    """Trials that meet the conditions, oldest first. A broken row is left out with a warning; ``strict``: refused.

    ``limit``: so many rows alone, the first or the ``latest``.
    """
    gpus = [_gpu.c[name] for name in _GPU_FIELDS]
    versions = [_environment.c[name] for name in _VERSION_FIELDS]
    rest = [_trial.c[name] for name in (*PROVENANCE, *_TRIAL_FIELDS)]
    query = select(*gpus, *versions, *rest).select_from(_trial).join(_gpu, _gpu.c.id == _trial.c.gpu_id)
    query = query.join(_environment, _environment.c.id == _trial.c.environment_id).where(*conditions)
    if winning:
        query = query.join(_winner, _winner.c.trial_id == _trial.c.id)
    found, broken = [], []
    some_gpus: dict[tuple[Any, ...], Gpu] = {}
    some_environments: dict[tuple[Any, ...], Environment] = {}
    first, second = len(gpus), len(gpus) + len(versions) + len(PROVENANCE)
    age = [column.desc() if latest else column for column in (_trial.c.created_at, _trial.c.id)]
    rows = session.execute(query.order_by(*age).limit(bounded(limit)))
    for row in reversed(rows.all()) if latest else rows:
        try:
            of_gpu, of_environment = tuple(row[:first]), tuple(row[first:second])
            if of_gpu not in some_gpus:
                some_gpus[of_gpu] = Gpu(*of_gpu)
            if of_environment not in some_environments:
                some_environments[of_environment] = Environment(*of_environment)
            values = dict(zip(_TRIAL_FIELDS, row[second:], strict=True))
            found.append(Trial(gpu=some_gpus[of_gpu], environment=some_environments[of_environment], **values))
        except StoreError as error:
            if strict:
                raise StoreError(f"a broken row, {row.id!r:.60}: {error}; nothing was taken") from None
            broken.append(f"{row.id!r:.60}: {error}")
    if broken:
        settings.logger("db").warning("%d broken rows left out, the first: %s", len(broken), broken[0])
    return found


def keep_greater(
    session: Session, model: Any, key: Sequence[str], columns: Sequence[str], records: Sequence[Any]
) -> None:
    """Adds records; of one that is there already each of ``columns`` keeps the greater value."""
    if not records:
        return
    insert = insert_into(session, model)
    greater = {
        name: case((insert.excluded[name] > getattr(model, name), insert.excluded[name]), else_=getattr(model, name))
        for name in columns
    }
    session.execute(insert.on_conflict_do_update(index_elements=list(key), set_=greater), _values(key, records))


def keep_later(session: Session, model: Any, key: Sequence[str], time: str, records: Sequence[Any]) -> None:
    """Adds records; one that is there already is replaced by one whose ``time`` is later."""
    if not records:
        return
    insert = insert_into(session, model)
    changes = {f.name: insert.excluded[f.name] for f in fields(records[0]) if f.name not in key}
    later = insert.excluded[time] > getattr(model, time)
    session.execute(
        insert.on_conflict_do_update(index_elements=list(key), set_=changes, where=later), _values(key, records)
    )


def _values(key: Sequence[str], records: Sequence[Any]) -> list[dict[str, Any]]:
    """Sorted by key: two writers that lock rows in the same order cannot deadlock."""
    made = [{f.name: getattr(record, f.name) for f in fields(record)} for record in records]
    return sorted(made, key=lambda values: tuple(values[name] for name in key))


def sound_requests(session: Session, query: Select[Any]) -> list[Any]:
    """Rows of a query for requests. A broken one is left out with a warning."""
    found, broken = [], []
    for row in session.execute(query):
        reason = broken_request(dict(row._mapping))
        if reason is None:
            found.append(row)
        else:
            broken.append(reason)
    if broken:
        settings.logger("db").warning("%d broken requests left out, the first: %s", len(broken), broken[0])
    return found


def forget_requests(session: Session, keys: Sequence[Key]) -> None:
    """Delete requests."""
    one = delete(_request).where(*(_request.c[name] == bindparam(f"its_{name}") for name in KEY))
    # One by one, in the order in which writers lock rows.
    values = [{f"its_{name}": value for name, value in zip(KEY, key, strict=True)} for key in sorted(keys)]
    if values:
        session.connection().execute(one, values)


def broken_rows(session: Session) -> list[str]:
    """Ids of rows that break a rule, each with the rule, and rows that point nowhere or to the wrong row."""
    names = [*_TRIAL_FIELDS]
    query = select(*(_trial.c[name] for name in names)).order_by(_trial.c.id)
    found: list[str] = []
    broken = set()
    gpu, environment = Gpu("none", "none", 1, 0, 0, 0), Environment()
    suspects = _suspects(session)
    for row in session.execute(query) if suspects else ():
        if row.id not in suspects:
            continue
        try:
            Trial(gpu=gpu, environment=environment, **dict(zip(names, row, strict=True)))
        except StoreError as error:
            broken.add(row.id)
            found.append(f"trial {row.id!r:.60}: {error}")
    late = select(_trial.c.id, _trial.c.created_at).where(_trial.c.created_at > datetime.now(UTC) + CLOCK_SKEW)
    late = late.order_by(_trial.c.id)
    rows = [row for row in session.execute(late) if row.id not in broken]
    found += [f"trial {row.id!r:.60}: created_at lies in the future, {row.created_at}" for row in rows]
    found += _orphans(session, broken)
    lost = select(_winner).where(~exists().where(_trial.c.id == _winner.c.trial_id))
    found += [f"winner of {tuple(row)!r:.120}: no such trial" for row in session.execute(lost)]
    for table, record, columns in ((_gpu, Gpu, _GPU_FIELDS), (_environment, Environment, _VERSION_FIELDS)):
        for row in session.execute(select(table.c.id, *(table.c[name] for name in columns))):
            try:
                record(*row[1:])
            except StoreError as error:
                found.append(f"{table.name} {row[0]!r:.20}: {error}")
    for row in session.execute(select(*(_request.c[name] for name in REQUEST_RULES))):
        reason = broken_request(dict(row._mapping))
        if reason is not None:
            found.append(f"request {tuple(row[:4])!r:.120}: {reason}")
    return found


def _suspects(session: Session) -> set[Any]:
    """Ids of the rows with a value that breaks its rule.

    Of values that differ from row to row SQL, in one scan, leaves over those that may be unsound, which their rules
    then judge. A value that many rows have is looked at once.
    """
    scanned = (*MEASUREMENTS, *COUNTS, "id", "created_at")
    query = select(*(_trial.c[name] for name in scanned)).where(or_(*_doubts(session.get_bind().dialect.name)))
    broken = {
        row.id
        for row in session.execute(query)
        if any(TRIAL_RULES[name](value) for name, value in zip(scanned, row, strict=True))
    }
    shared = [name for name in _TRIAL_FIELDS if name not in (*scanned, *KEY, "config")]  # few combinations of values
    for names in (KEY[1:], ("config",), shared):
        seen = session.execute(select(*(_trial.c[name] for name in names)).distinct()).all()
        for name, values in zip(names, zip(*seen, strict=True), strict=False):  # none of no rows
            column, rule = _trial.c[name], TRIAL_RULES[name]
            if any(rule(value) for value in dict.fromkeys(values)):
                broken |= {id_ for id_, value in session.execute(select(_trial.c.id, column)) if rule(value)}
    return broken


def _doubts(dialect: str) -> Iterator[ColumnElement[bool]]:
    """Conditions one of which each row meets whose measurement, count, id or moment breaks its rule; few others do."""
    t = _trial.c
    for name in MEASUREMENTS:  # SQLite compares any text or blob as greater than a number, PostgreSQL NaN
        yield ~t[name].between(0, sys.float_info.max)
    for name in COUNTS:
        yield ~t[name].between(0, INT64_MAX)
    if dialect == "postgresql":  # its columns hold their types alone
        yield t.id.bool_op("!~")(f"^{UUID7}$")
        return
    yield or_(*(func.typeof(t[name]) == "real" for name in COUNTS))
    # GLOB and datetime() see text alone, up to its first NUL.
    for column, size in ((t.id, 36), (t.created_at, 26)):
        yield or_(func.typeof(column) != "text", func.length(cast(column, LargeBinary)) != size)
    yield t.id.bool_op("NOT GLOB")(UUID7)
    written = type_coerce(t.created_at, Text)
    yield or_(func.substr(written, 1, 4) == "0000", written.bool_op("NOT GLOB")("*." + "[0-9]" * 6))  # of 26 characters
    yield func.datetime(written, "+0 days").is_distinct_from(func.substr(written, 1, 19))  # 30 February is 2 March


def _orphans(session: Session, broken: set[Any]) -> list[str]:
    """Trials that no listing shows, their GPU or environment being gone, and winners that cannot be what they say.

    Winners whose trials are ``broken`` are left out: their trials' rules say why.
    """
    found = []
    for table, column in ((_gpu, _trial.c.gpu_id), (_environment, _trial.c.environment_id)):
        query = select(_trial.c.id, column).where(column.not_in(select(table.c.id))).order_by(_trial.c.id)
        found += [f"trial {id_!r:.60}: no such {table.name}, {to!r:.20}" for id_, to in session.execute(query)]
    t = _trial.c
    key = (_gpu.c.name, t.op, t.revision, t.problem)
    query = select(t.id, t.status, *key, *(_winner.c[name] for name in KEY))
    query = query.join(_winner, _winner.c.trial_id == t.id).join(_gpu, _gpu.c.id == t.gpu_id)
    other = [column != _winner.c[name] for name, column in zip(KEY, key, strict=True)]
    wrong = session.execute(query.where(or_(t.status != "ok", *other)))
    for id_, status, *rest in sorted(map(tuple[Any, ...], wrong), key=str):  # SQL would walk all trials to sort them
        if id_ in broken:
            continue
        own, held = tuple(rest[: len(KEY)]), tuple(rest[len(KEY) :])
        why = f"its status is {status!r:.20}, not ok" if held == own else f"it is of {own!r:.120}"
        found.append(f"winner of {held!r:.120}: trial {id_!r:.60} cannot be: {why}")
    return found


# ---- winners ------------------------------------------------------------------------------------------------


def trials_of(session: Session, ids: Sequence[str]) -> list[Trial]:
    """The trials with these ids, as far as they are here."""
    return [t for some in batches(ids, _BATCH) for t in select_trials(session, [_trial.c.id.in_(some)])]


def recorded(session: Session, ids: Sequence[str]) -> dict[str, RecordedTrial]:
    """Stored trials by id, as far as the rules for winners need them. A broken one is as good as absent."""
    t = _trial.c
    query = select(t.id, _gpu.c.name, t.op, t.revision, t.problem, t.status, t.origin, t.created_at)
    query = query.join(_gpu, _gpu.c.id == t.gpu_id)
    found = {}
    for some in batches(ids, _BATCH):
        for id_, gpu, op, revision, problem, status, origin, created_at in session.execute(query.where(t.id.in_(some))):
            if isinstance(created_at, datetime):
                rank = Rank(origin == "measured", created_at.astimezone(UTC), id_)
                found[id_] = RecordedTrial(id_, (gpu, op, revision, problem), status, rank)
    return found


def set_winners(session: Session, candidates: Iterable[RecordedTrial], *, newest: bool) -> set[str]:
    """Make each candidate, one of every key, the winner where the rules allow it. Returns the new winners' ids.

    Atomic against other writers: either the row is inserted here, or it is locked (SQLite: by BEGIN IMMEDIATE)
    before the present winner is read. That takes a statement of its own, because PostgreSQL would show a joined trial
    in its state before the wait for the lock.
    """
    best = {c.key: c for c in sorted(candidates, key=lambda c: c.key)}  # sorted: see add
    connection = session.connection()
    columns = [_winner.c[name] for name in KEY]
    statement = insert_into(session, _winner).on_conflict_do_nothing(index_elements=list(KEY))
    statement = statement.returning(_winner.c.trial_id)
    won: set[str] = set()
    for some in batches(best, _KEYS):
        rows = [dict(zip(KEY, key, strict=True), trial_id=best[key].id) for key in some]
        inserted = {row.trial_id for row in connection.execute(statement, rows)}
        won |= inserted
        held = [key for key in some if best[key].id not in inserted]
        if not held:
            continue
        query = select(*columns, _winner.c.trial_id).where(tuple_(*columns).in_(held))
        query = query.order_by(*columns).with_for_update()
        present = {tuple(row[:4]): row[4] for row in connection.execute(query)}
        ranked = recorded(session, list(present.values()))
        for key in held:
            candidate, rival = best[key], ranked.get(present[key])
            if present[key] == candidate.id:
                won |= set() if newest else {candidate.id}
            elif rival is None or _beats(candidate.rank, rival.rank, newest=newest):
                same = [column == value for column, value in zip(columns, key, strict=True)]
                connection.execute(update(_winner).where(*same).values(trial_id=candidate.id))
                won.add(candidate.id)
    return won


def _beats(candidate: Rank, rival: Rank, *, newest: bool) -> bool:
    return candidate > rival if newest else candidate.measured or not rival.measured


# ---- pruning ------------------------------------------------------------------------------------------------


def to_prune(
    before: datetime | None,
    stale: Iterable[tuple[str, Collection[int]]],
    within: Sequence[ColumnElement[bool]],
    dialect: str,
) -> ColumnElement[bool]:
    """The condition on trials ``within`` some to go: those from before a time, from a wrong clock's future or of no
    date, that win nothing, and all of ``stale``.

    ``stale`` holds ops with the revisions that serve: earlier ones that are not among them go, later ones stay.
    """
    t = _trial.c
    chosen: list[ColumnElement[bool]] = [
        (t.op == op) & (t.revision < max(serving)) & t.revision.not_in(serving) for op, serving in stale
    ]
    if before is not None:
        no_time = (t.created_at < before) | (t.created_at > datetime.now(UTC) + CLOCK_SKEW)
        if dialect == "sqlite":  # which stores anything in a date's place, and compares its text
            written = func.substr(type_coerce(t.created_at, Text), 1, 19)
            no_time |= func.date(written, "+0 days").is_distinct_from(func.substr(written, 1, 10))
        chosen.append(no_time & ~exists().where(_winner.c.trial_id == t.id))
    return and_(or_(false(), *chosen), *within)


def ids_of(session: Session, condition: ColumnElement[bool]) -> list[str]:
    """Ids of the trials that meet a condition."""
    return [row.id for row in session.connection().execute(select(_trial.c.id).where(condition))]


def prune(session: Session, condition: ColumnElement[bool], ids: Sequence[str]) -> int:
    """Delete those of ``ids`` that still meet the condition, with what nothing points to any more."""
    connection, deleted = session.connection(), 0
    for some in batches(ids, _BATCH):
        going = ids_of(session, _trial.c.id.in_(some) & condition)
        connection.execute(delete(_winner).where(_winner.c.trial_id.in_(going)))
        connection.execute(delete(_trial).where(_trial.c.id.in_(going)))
        deleted += len(going)
    for table, column in ((_gpu, _trial.c.gpu_id), (_environment, _trial.c.environment_id)):
        connection.execute(delete(table).where(~exists().where(column == table.c.id)))
    return deleted
