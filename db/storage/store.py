"""Store: reading and writing the tuned-config database.

Each method is one transaction, so a killed process leaves no call half done. A Store may be shared by threads and
used in a forked child: it keeps no connection between calls, and a fork waits for the transactions of other threads.

Rules for winners (:meth:`Store.crown`, :meth:`Store.import_`, :meth:`Store.merge`): the trial has status ``ok``, and
a predicted one never replaces a measured one. Otherwise ``crown``, which the tuner calls, always replaces. Import and
merge compare two winners: measured beats predicted, then the newer ``created_at`` wins, then the greater id; so
merging is a union, in any order, and repeating it changes nothing.
"""

from __future__ import annotations

import gzip
import lzma
import os
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self, TextIO

from sqlalchemy import ColumnElement, case, func, or_, select, tuple_
from sqlalchemy.orm import Session

from cutekernels.db.storage import lines, models, sqlite, statements, trial
from cutekernels.db.storage.engine import (
    WRITING,
    file_errors,
    open_engine,
    queue,
    require_unchanged,
    shown,
    translated,
    url_of,
)
from cutekernels.db.storage.incoming import Judge, accept, read, require_all, without_future
from cutekernels.db.storage.rate import Rate
from cutekernels.db.storage.trial import Environment, Gpu, Trial
from cutekernels.errors import StoreError
from cutekernels.interrupts import section

__all__ = ["Environment", "Gpu", "ImportReport", "Rate", "Request", "Stat", "Store", "Trial"]

_PRUNED_AT_ONCE = 5000  # trials, during which no other writer has its turn


@dataclass(frozen=True, slots=True)
class Request:
    """A problem that was dispatched and never measured. ``gpu`` is the GPU's name."""

    gpu: str
    op: str
    revision: int
    problem: str
    hits: int
    last_seen: datetime


RATE_KEY = ("gpu", "name", "revision")


@dataclass(frozen=True, slots=True)
class TaskKey:
    """A tuning key that has trials. ``gpu`` is the GPU's name."""

    gpu: str
    op: str
    revision: int
    problem: str


@dataclass(frozen=True, slots=True)
class Stat:
    """Counts per GPU, op and origin."""

    gpu: str
    op: str
    origin: str
    trials: int
    ok: int
    winners: int


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of an import or a merge: trials added, winners set, winners kept against incoming ones; of a merge also
    the requests and calibrated rates that the other database has. ``differing``: incoming winners that are other than
    the trials with their ids that were here, which stay.
    """

    added: int
    crowned: int
    kept: int
    requests: int = 0
    rates: int = 0
    differing: int = 0
    winners: Sequence[Trial] = field(default=(), compare=False, repr=False)  # the best incoming, as they are here


class Store:
    """The database at ``url`` (a path, an SQLite or a PostgreSQL URL; None for the one in the settings).

    Opening for writing creates and migrates it; ``readonly`` does neither and works where nothing may be written.

    Raises:
        StoreError: from every method, when the database cannot be opened, read or written.
    """

    def __init__(self, url: str | os.PathLike[str] | None = None, *, readonly: bool = False) -> None:
        self.url = url_of(url)
        with section():
            self._engine = open_engine(self.url, readonly=readonly)
        self._writer = self._engine.execution_options(**{WRITING: True})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({shown(self.url)!r})"

    def close(self) -> None:
        """Dispose of the engine. With NullPool nothing is open between calls."""
        self._engine.dispose()

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        with section(), translated(shown(self.url)), Session(self._engine) as session, session.begin():
            yield session
            require_unchanged(session.connection())

    @contextmanager
    def _writing(self, *, alone: bool = False) -> Iterator[Session]:
        """``alone``: beside no other writer, since rows go that one may be about to point to."""
        with section(), translated(shown(self.url)), Session(self._writer) as session, session.begin():
            queue(session.connection(), alone=alone)
            yield session

    # ---- trials ---------------------------------------------------------------------------------------------

    def record(self, trials: Iterable[Trial]) -> int:
        """Adds trials, all or none; those whose id is there already are passed over. Returns how many were added."""
        batch = list(trials)
        if not batch:
            return 0
        with self._writing() as session:
            return statements.add(session, batch)

    def trials(
        self,
        *,
        gpu: str | None = None,
        op: str | None = None,
        revision: int | None = None,
        problem: str | None = None,
        config: str | None = None,
        origin: str | None = None,
        status: str | None = None,
        problems: Collection[tuple[str, str]] | None = None,
        latest: int | None = None,
    ) -> list[Trial]:
        """Trials with these values, oldest first; ``problems``: of one of these (op, problem), a thousand at most."""
        where = statements.where(gpu, op, revision, problem, origin)
        if problems is not None:
            where.append(tuple_(models.Trial.op, models.Trial.problem).in_(problems))
        for column, value in ((models.Trial.config, config), (models.Trial.status, status)):
            if value is not None:
                where.append(column == value)
        with self._reading() as session:
            return statements.select_trials(session, where, limit=latest, latest=latest is not None)

    def tasks(self, *, gpu: str | None = None, op: str | None = None, origin: str | None = None) -> list[TaskKey]:
        """The tuning keys that have trials with these values; malformed ones are left out."""
        t, g = models.Trial, models.Gpu
        query = select(g.name, t.op, t.revision, t.problem).join(g, g.id == t.gpu_id).distinct()
        query = query.where(*statements.where(gpu, op, None, None, origin))
        with self._reading() as session:
            found = [TaskKey(*row) for row in session.execute(query) if trial.problem_rule(row[3]) is None]
        named = (k for k in found if trial.gpu_name_rule(k.gpu) is None and trial.op_rule(k.op) is None)
        return sorted((k for k in named if type(k.revision) is int), key=astuple)

    def trial(self, trial_id: str) -> Trial | None:
        """The trial with this id, or None."""
        with self._reading() as session:
            return next(iter(statements.select_trials(session, [models.Trial.id == trial_id])), None)

    def find(self, part: str, *, gpu: str | None = None, op: str | None = None, limit: int = 10) -> list[Trial]:
        """Trials of ``gpu`` and ``op`` whose id starts or ends with ``part``, at most ``limit``, oldest first."""
        known = models.Trial.id
        part = part.lower()
        either = or_(known.startswith(part, autoescape=True), known.endswith(part, autoescape=True))
        with self._reading() as session:
            where = [either, *statements.where(gpu, op, None, None, None)]
            return statements.select_trials(session, where, limit=limit)

    # ---- winners --------------------------------------------------------------------------------------------

    def crown(self, trial_id: str) -> bool:
        """Makes a recorded trial of status ``ok`` the winner of its (gpu, op, revision, problem).

        Returns:
            False where it is predicted and the winner is measured; True where it is the winner now.

        Raises:
            StoreError: no such trial, or its status is not ``ok``.
        """
        with self._writing() as session:
            candidate = statements.recorded(session, [trial_id]).get(trial_id)
            if candidate is None:
                raise StoreError(
                    f"there is no trial {trial_id!r} to crown: record it first; if a prune has deleted it meanwhile, "
                    "repeat the command"
                )
            if candidate.status != "ok":
                raise StoreError(f"only a trial of status ok can win; {trial_id} has {candidate.status!r}")
            return bool(statements.set_winners(session, [candidate], newest=False))

    def winners(
        self,
        *,
        gpu: str | None = None,
        op: str | None = None,
        revision: int | None = None,
        problem: str | None = None,
        origin: str | None = None,
    ) -> list[Trial]:
        """The winning trials with these values, ordered by their tuning key."""
        with self._reading() as session:
            where = [*statements.where(gpu, op, revision, problem, origin), models.Trial.status == "ok"]
            found = statements.select_trials(session, where, winning=True)
        return sorted(found, key=lambda t: t.key)  # not by the database, whose collation may be anything

    # ---- requests: the tuner's queue ------------------------------------------------------------------------

    def note_requests(self, rows: Iterable[tuple[str, str, int, str, int]]) -> None:
        """Add hits of problems that were dispatched untuned: rows of (gpu, op, revision, problem, hits)."""
        hits: dict[tuple[str, str, int, str], int] = {}
        for gpu, op, revision, problem, count in rows:
            for name, value in zip(models.KEY, (gpu, op, revision, problem), strict=True):
                trial.require(name, value, trial.REQUEST_RULES[name])
            if type(count) is not int or not 0 < count <= trial.INT32_MAX:
                raise StoreError(f"hits must be a whole number from 1 to {trial.INT32_MAX}; it is {count!r}")
            key = (gpu, op, revision, problem)
            hits[key] = hits.get(key, 0) + count
        if not hits:
            return
        now = datetime.now(UTC)
        # Sorted: two writers that lock rows in the same order cannot deadlock.
        values = [dict(zip(models.KEY, key, strict=True), hits=n, last_seen=now) for key, n in sorted(hits.items())]
        with self._writing() as session:
            insert = statements.insert_into(session, models.Request)
            session.execute(
                insert.on_conflict_do_update(
                    index_elements=list(models.KEY),
                    set_={"hits": models.Request.hits + insert.excluded.hits, "last_seen": insert.excluded.last_seen},
                ),
                values,
            )

    def requests(self, *, gpu: str | None = None, limit: int | None = None, waiting: bool = True) -> list[Request]:
        """Dispatched problems, most hits first; ``waiting``: those without a measured winner of theirs or a later
        revision.
        """
        request, winner = models.Request, models.winner.c
        measured = (
            select(winner.trial_id)
            .join(models.Trial, models.Trial.id == winner.trial_id)
            .where(
                *(winner[k] == getattr(request, k) for k in ("gpu", "op", "problem")),
                winner.revision >= request.revision,
                models.Trial.origin == "measured",
            )
        )
        query = select(*(getattr(request, f.name) for f in fields(Request)))
        if waiting:
            query = query.where(~measured.exists())
        if gpu is not None:
            query = query.where(request.gpu == gpu)
        query = query.order_by(request.hits.desc(), request.gpu, request.op, request.revision, request.problem)
        with self._reading() as session:
            found = [Request(*row) for row in statements.sound_requests(session, query)]
        return found[:limit]

    def clear_requests(self, requests: Sequence[Request]) -> None:
        """Forget that problems were dispatched."""
        with self._writing() as session:
            statements.forget_requests(session, [(r.gpu, r.op, r.revision, r.problem) for r in requests])

    def count(self) -> int:
        """The number of trials."""
        with self._reading() as session:
            return session.scalar(select(func.count()).select_from(models.Trial)) or 0

    def stats(self) -> list[Stat]:
        """Numbers of trials, of trials with status ok and of winners, per GPU, op and origin."""
        t, g, w = models.Trial, models.Gpu, models.winner
        query = (
            select(
                g.name,
                t.op,
                t.origin,
                func.count(),
                func.sum(case((t.status == "ok", 1), else_=0)),
                func.count(w.c.trial_id),
            )
            .join(g, g.id == t.gpu_id)
            .outerjoin(w, w.c.trial_id == t.id)
            .group_by(g.name, t.op, t.origin)
        )
        with self._reading() as session:
            found = [
                Stat(str(gpu), str(op), str(origin), *map(int, rest))
                for gpu, op, origin, *rest in session.execute(query)
            ]
        return sorted(found, key=lambda s: (s.gpu, s.op, s.origin))

    # ---- rates ----------------------------------------------------------------------------------------------

    def keep_rates(self, rates: Iterable[Rate]) -> None:
        """Store calibrated rates, all or none; each replaces an earlier one of its GPU, name and revision."""
        values = [{f.name: getattr(rate, f.name) for f in fields(Rate)} for rate in rates]
        if not values:
            return
        values.sort(key=lambda rate: [rate[name] for name in RATE_KEY])  # as other writers lock rows
        with self._writing() as session:
            insert = statements.insert_into(session, models.Rate)
            changes = {name: insert.excluded[name] for name in values[0] if name not in RATE_KEY}
            session.execute(insert.on_conflict_do_update(index_elements=list(RATE_KEY), set_=changes), values)

    def rates(self, *, gpu: str | None = None) -> list[Rate]:
        """Calibrated rates, by GPU and name; a row that breaks a rule is passed over."""
        query = select(models.Rate) if gpu is None else select(models.Rate).where(models.Rate.gpu == gpu)
        found = []
        with self._reading() as session:
            for row in session.scalars(query):
                with suppress(StoreError):
                    found.append(Rate(**{f.name: getattr(row, f.name) for f in fields(Rate)}))
        return sorted(found, key=lambda r: (r.gpu, r.name, r.revision))

    # ---- exchange -------------------------------------------------------------------------------------------

    def export(
        self,
        target: str | os.PathLike[str] | TextIO,
        *,
        gpu: str | None = None,
        op: str | None = None,
        slim: bool = False,
    ) -> int:
        """Writes the winners as JSON lines, ordered by tuning key, to a path (atomically) or a stream.

        A path that ends in ``.gz`` or ``.xz`` gets them compressed; :meth:`import_` reads such a file too.

        Names of machines are left out. ``slim``: what all have in common stands in the first line only, and numbers are
        rounded.

        Returns:
            How many there were.
        """
        found = [replace(t, environment=t.environment.anonymous) for t in self.winners(gpu=gpu, op=op)]
        written = [f"{line}\n" for line in (lines.slim(found) if slim else (winner.as_line() for winner in found))]
        if isinstance(target, str | os.PathLike):
            with file_errors(os.fspath(target)):
                data = "".join(written).encode()
                if os.fspath(target).endswith(".gz"):
                    data = gzip.compress(data, mtime=0)
                elif os.fspath(target).endswith(".xz"):
                    data = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
                replace_file(Path(target), data)
        else:
            target.writelines(written)
            target.flush()  # where a reader that left is noticed
        return len(found)

    def import_(self, source: str | os.PathLike[str] | TextIO, *, judge: Judge = accept) -> ImportReport:
        """Import winners that :meth:`export` wrote: all lines or, where one breaks a rule, of ``judge``'s too, none.

        Raises:
            StoreError: naming the line and the rule it breaks.
        """
        return self.import_read(read(source, judge))

    def import_read(self, incoming: Sequence[Trial]) -> ImportReport:
        """:meth:`import_` of trials that have been read."""
        return self._import(incoming, [t for t in incoming if t.status == "ok"])

    def rehearse(self, url: str | os.PathLike[str], incoming: Sequence[Trial]) -> ImportReport:
        """In this empty database, :meth:`import_read` as the one at ``url``, which is only read, would do it."""
        with Store(url, readonly=True) as other, other._reading() as session:
            winners = statements.select_trials(session, [], winning=True)
            known = statements.trials_of(session, [t.id for t in incoming])
        self._import([*winners, *known], winners, newest=False)
        return self.import_read(incoming)

    def merge(self, other_url: str | os.PathLike[str], *, judge: Judge = accept) -> ImportReport:
        """Import every trial, winner, request and calibrated rate of another database, which is only read.

        Merging again changes nothing: of a request in both the greater number of hits stays, of a rate the later one.
        One row that breaks a rule, or that ``judge`` refuses, and none is taken.
        """
        with Store(other_url, readonly=True) as other:
            rates = other.rates()
            with other._reading() as session:
                incoming = statements.select_trials(session, [], strict=True)
                winners = statements.select_trials(session, [], winning=True, strict=True)
                columns = [getattr(models.Request, f.name) for f in fields(Request)]
                requests = [Request(*row) for row in statements.sound_requests(session, select(*columns))]
        require_all(incoming, shown(other.url), "merged", judge)
        return self._import(incoming, winners, requests=requests, rates=rates)

    def pull(
        self,
        other_url: str | os.PathLike[str],
        *,
        gpu: str | None = None,
        op: str | None = None,
        judge: Judge = accept,
    ) -> ImportReport:
        """Take another database's winners in one transaction: a reader sees all of them or none.

        For their problems they win here too, whatever is older or newer; only a predicted one never replaces a
        measured one. Nothing is deleted. Those that a wrong clock has dated into the future are left out.
        """
        with Store(other_url, readonly=True) as other:
            incoming = without_future(other.winners(gpu=gpu, op=op), shown(other.url))
            require_all(incoming, shown(other.url), "pulled", judge)
        return self._import(incoming, incoming, newest=False)

    def _import(
        self,
        incoming: Sequence[Trial],
        winners: Sequence[Trial],
        *,
        newest: bool = True,
        requests: Sequence[Request] = (),
        rates: Sequence[Rate] = (),
    ) -> ImportReport:
        if not (incoming or requests or rates):
            return ImportReport(0, 0, 0)
        with self._writing() as session:
            added = statements.add(session, incoming)
            # An id that was here already keeps the contents it has here, whatever the incoming row says.
            best: dict[statements.Key, statements.RecordedTrial] = {}
            for candidate in statements.recorded(session, [t.id for t in winners]).values():
                rival = best.get(candidate.key)
                if candidate.status == "ok" and (rival is None or candidate.rank > rival.rank):
                    best[candidate.key] = candidate
            crowned = len(statements.set_winners(session, best.values(), newest=newest))
            statements.keep_greater(session, models.Request, models.KEY, ("hits", "last_seen"), requests)
            statements.keep_later(session, models.Rate, RATE_KEY, "created_at", rates)
            here = {t.id: t for t in statements.trials_of(session, [t.id for t in winners])}
        differing = sum(_claim(here.get(t.id, t)) != _claim(t) for t in winners)
        told = [here[candidate.id] for candidate in best.values() if candidate.id in here]
        return ImportReport(added, crowned, len(winners) - crowned, len(requests), len(rates), differing, told)

    # ---- upkeep ---------------------------------------------------------------------------------------------

    def prune(
        self,
        *,
        older_than: timedelta | None = None,
        stale: Mapping[str, Collection[int]] | None = None,
        gpu: str | None = None,
        op: str | None = None,
        count_only: bool = False,
    ) -> int:
        """Delete trials that no call and no comparison needs. Winners of a current revision always stay.

        Args:
            older_than: delete trials of this age and more, of a wrong clock's future or of no date, that win nothing.
            stale: the revisions of each op that serve; delete all trials of earlier ones that do not, winners too.
            gpu: only trials of this GPU.
            op: only trials of this op.
            count_only: delete nothing.

        Returns:
            How many trials were, or would be, deleted.
        """
        within: list[ColumnElement[bool]] = []
        if gpu is not None:
            within.append(models.Trial.gpu_id.in_(select(models.Gpu.id).where(models.Gpu.name == gpu)))
        if op is not None:
            within.append(models.Trial.op == op)
        before = None if older_than is None else datetime.now(UTC) - older_than
        chosen = statements.to_prune(before, (stale or {}).items(), within, self._engine.dialect.name)
        with self._reading() as session:
            ids = statements.ids_of(session, chosen)
        if count_only:
            return len(ids)
        deleted = 0
        for some in statements.batches(ids, _PRUNED_AT_ONCE):  # others write in between
            with self._writing(alone=True) as session:
                deleted += statements.prune(session, chosen, some)
        return deleted

    def broken_rows(self) -> list[str]:
        """Rows that break a rule of :class:`Trial` or point nowhere, each with its reason."""
        with self._reading() as session:
            return statements.broken_rows(session)


def _claim(t: Trial) -> tuple[object, ...]:
    """The statement of a trial, by as many digits as a slim export has; not where it was measured, which that lacks."""
    return *t.key, t.config, t.status, t.origin, None if t.median_us is None else f"{t.median_us:.{lines.DIGITS}g}"


# ---- files --------------------------------------------------------------------------------------------------


def replace_file(path: Path, contents: str | bytes) -> None:
    """Write beside ``path`` and rename, so that a reader sees either the old file or the new one, complete.

    A device or pipe is written into, and a link stays: what it points to is replaced, and keeps its mode. A database
    and the files beside it are refused.
    """
    data = contents.encode() if isinstance(contents, str) else contents
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):  # raises for a loop of links
            path.write_bytes(data)
            return
    path = Path(os.path.realpath(path))
    if claim := sqlite.claim(path):
        raise StoreError(f"{path} {claim}: name another file")
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    temporary = path.absolute().with_name(f".{path.name}.{secrets.token_hex(4)}")
    created = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(temporary, created, 0o666 if mode is None else 0o600)  # less what the umask takes
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
