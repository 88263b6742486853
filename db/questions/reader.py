"""Database: the winners as people ask for them, typed, local and shipped ones side by side. Read-only.

The fields of problems and configs are those that the ops declare (``query.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

from cutekernels import settings
from cutekernels.db.questions import query
from cutekernels.db.storage import snapshot, sqlite
from cutekernels.db.storage.store import Store
from cutekernels.db.storage.trial import ORIGINS, PROVENANCE, Trial
from cutekernels.dispatch import LEAST_GAIN
from cutekernels.errors import StoreError, UnsupportedProblem
from cutekernels.op import Scalar

LOCAL, SHIPPED = "local", "shipped"
TRIAL_COLUMNS = (*("vendor_us" if f.name == "baseline_us" else f.name for f in fields(Trial)), *PROVENANCE)
_LATE = (*PROVENANCE, "sources")  # texts that older trials lack
_MOST_ASKED = 1000  # problems in one statement


@dataclass(frozen=True, slots=True)
class Winner:
    """The tuned config of one problem, with everything that is known about it.

    Attributes:
        problem: the fields of the problem, defaults written out; ``problem_text`` is the form that is stored.
        config: the knobs, likewise; ``config_text`` and the certificate's configs, too, are in the words of the op's
            revision here, whatever the row's own.
        source: ``"local"`` or ``"shipped"``.
        serves: whether calls use this row.
        reason: why they do not, ``""`` where they do: another source's row precedes it, the op's revision was
            raised since, a prediction promises too little, or calls refuse its config.
        ratio: time of the default config over this one's, with its 95 % interval; of a prediction by the model.
        tflops: achieved rate, like ``gbps``; ``roofline`` is the share of what the GPU can do, at most 1.
        vendor_us: the vendor library's time in the same run, where it was measured.
        sources: a hash of the kernel's sources, ``""`` in older rows.
        certificate: of the final that chose it, as the fields of
            :class:`~cutekernels.db.storage.certificate.Certificate`; empty where there was none.
        version: of this package; with ``commit`` and ``host``, the class of machine, ``""`` in older rows.
    """

    gpu: str
    op: str
    revision: int
    source: str
    serves: bool
    reason: str
    problem: Mapping[str, Scalar]
    config: Mapping[str, Scalar]
    origin: str
    median_us: float | None
    p20_us: float | None
    p80_us: float | None
    tflops: float | None
    gbps: float | None
    roofline: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    vendor_us: float | None
    error: float | None
    sources: str
    certificate: Mapping[str, Any]
    version: str
    commit: str
    host: str
    environment: Mapping[str, str]
    created_at: datetime
    id: str
    problem_text: str
    config_text: str

    def as_row(self) -> dict[str, Any]:
        """Plain values by name, ``problem``, ``config`` and ``environment`` as records."""
        return {name: getattr(self, name) for name in self.__slots__}


class Winners(list[Winner]):
    """A list of winners that pandas may read."""

    def to_pandas(self) -> Any:
        """A DataFrame with a column for each field: ``problem_m``, ``config_tile_m``, ``median_us``, ..."""
        try:
            import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas") from error
        return pandas.json_normalize([w.as_row() for w in self], sep="_")


class Refused(NamedTuple):
    """A winner that calls refuse, with its source, local or shipped, and the reason."""

    source: str
    trial: Trial
    reason: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Two databases' winners of one problem; None where one has none."""

    gpu: str
    op: str
    revision: int
    problem_text: str
    state: str  # only in a | only in b | other config | other time
    a_us: float | None
    b_us: float | None
    speedup: float | None  # a_us / b_us: above 1, b is faster
    a_config_text: str | None
    b_config_text: str | None


class Database:
    """Winners of the database at ``url`` (None: the one in the settings) and those that travel with the package.

    The database in the settings need not exist, nor the default one be open to this user: then only shipped winners
    are found.
    """

    def __init__(self, url: str | os.PathLike[str] | None, *, local: bool = True, shipped: bool = True) -> None:
        self.absent = local and url is None and _absent()
        self.store = None
        try:
            if local and not self.absent:
                self.store = Store(url, readonly=True)
        except StoreError as error:
            needed = url is not None or not shipped or settings.load().database_named
            if needed or not isinstance(error.__cause__, PermissionError):
                raise
            snapshot.say(f"{error}; only shipped winners are found")
        self._shipped = shipped
        self._configs: dict[tuple[str, str], Mapping[str, Scalar]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the database."""
        if self.store is not None:
            self.store.close()

    def gpu(self, name: str | None) -> str | None:
        """The name under which rows of this GPU are stored: ``"A100"`` is ``"a100-sxm-80gb"``."""
        if name is None:
            return None
        return query.gpu_name(name, {*(row.gpu for row in self._stats()), *snapshot.shipped_gpus()})

    def op(self, name: str | None) -> str | None:
        """``name``, where an op or a stored row is called so."""
        if name is None or query.revisions(name):
            return name
        return query.op_name(name, {row.op for row in (*self._stats(), *_shipped_trials(None, None))})

    def _stats(self) -> Sequence[Any]:
        return () if self.store is None else self.store.stats()

    def winners(
        self,
        *,
        gpu: str | None = None,
        op: str | None = None,
        problem: str | None = None,
        origin: str | None = None,
        **values: Scalar,
    ) -> Winners:
        """The winners that meet all conditions, by GPU, op and problem.

        Args:
            gpu: a GPU of the table or its alias.
            op: an op's name.
            problem: conditions on the problem's fields, ``"m>=16 n=4096 dtype=bf16"``.
            origin: ``"measured"`` or ``"predicted"``.
            values: more such conditions, ``m=4096, dtype="bf16"`` or ``m=">=16"``.

        Raises:
            UnknownGpu, UnsupportedProblem: no such GPU, op, field, value or origin.
        """
        _require_texts(gpu=gpu, op=op, problem=problem, origin=origin)
        if origin is not None and origin not in ORIGINS:
            raise UnsupportedProblem(f"origin must be one of {', '.join(ORIGINS)}; it is {origin[:40]!r}")
        gpu, op = self.gpu(gpu), self.op(op)
        words = [problem or "", *(_word(name, value) for name, value in values.items())]
        conditions = query.conditions(" ".join(words), op)
        local = [] if self.store is None else self.store.winners(gpu=gpu, op=op)
        shipped = [] if not self._shipped else _shipped_trials(gpu, op)
        both = [*((t, LOCAL) for t in local), *((t, SHIPPED) for t in shipped)]
        first: dict[Any, tuple[Trial, str]] = {}
        for row in both:
            t = row[0]
            if t.revision in query.revisions(t.op):
                key = t.gpu.name, t.op, t.problem
                first[key] = max(first.get(key, row), row, key=_precedence)
        found = Winners()
        for t, source in sorted(both, key=lambda row: (row[0].key, row[1])):
            if origin in (None, t.origin) and self._matches(t, conditions):
                found.append(self._winner(t, source, first.get((t.gpu.name, t.op, t.problem))))
        return found

    def _matches(self, t: Trial, conditions: Sequence[query.Condition]) -> bool:
        return not conditions or query.matches(t.op, query.problem(t.op, t.problem), conditions)

    def _winner(self, t: Trial, source: str, first: tuple[Trial, str] | None) -> Winner:
        """``first``: of the rows of its problem the one that serves, where it may."""
        reason = self._why_idle(t, source, first)
        known = self._by_name(t) | query.rates(t.gpu.name, t.op, t.problem, t.median_us)
        known |= {"source": source, "serves": not reason, "reason": reason}
        return Winner(**{name: known[name] for name in Winner.__slots__})

    def _by_name(self, t: Trial) -> dict[str, Any]:
        """A trial's values under the names that a winner's have."""
        values = {f.name: getattr(t, f.name) for f in fields(t)}
        environment = {f.name: getattr(t.environment, f.name) for f in fields(t.environment)}
        values |= {name: environment.pop(name) for name in PROVENANCE}
        text = query.spell(t.op, t.revision, t.problem, t.config)
        return values | {
            "gpu": t.gpu.name,
            "environment": environment,
            "problem": query.problem(t.op, t.problem),
            "problem_text": t.problem,
            "config": self._config(t.op, text),
            "config_text": text,
            "vendor_us": t.baseline_us,
            "certificate": _certificate(t),
        }

    def _why_idle(self, t: Trial, source: str, first: tuple[Trial, str] | None) -> str:
        """Why calls do not use a winner; ``""`` where they do."""
        if t.revision not in query.revisions(t.op) or first is None:
            return query.unusable(t)
        if first[1] != source:
            return "a shipped measurement precedes it" if source == LOCAL else "a local winner precedes it"
        if first[0].revision != t.revision:
            return f"one of revision {first[0].revision} precedes it"
        if not snapshot.may_serve(t.origin, t.message):
            gain = "" if t.ratio is None else f" of {t.ratio:.2f}, below {LEAST_GAIN},"
            return f"its predicted gain{gain} is too small"
        return query.unusable(t)

    def refused(self, local: Sequence[Trial]) -> list[Refused]:
        """Winners of current revisions that calls refuse: among ``local``, the store's, and the shipped ones."""
        sources = ((LOCAL, local), (SHIPPED, _shipped_trials(None, None) if self._shipped else []))
        current = ((source, t) for source, found in sources for t in found if t.revision in query.revisions(t.op))
        judged = (Refused(s, t, query.unusable(t)) for s, t in current)
        return [found for found in judged if found.reason]

    def _config(self, op: str, text: str) -> Mapping[str, Scalar]:
        if (op, text) not in self._configs:  # a few hundred for thousands of winners
            self._configs[op, text] = query.config(op, text)
        return self._configs[op, text]

    def trials(
        self,
        *,
        gpu: str | None = None,
        op: str | None = None,
        problem: str | None = None,
        part: str | None = None,
        latest: int | None = None,
    ) -> list[Trial]:
        """Trials of the database, oldest first; ``part`` is the start or the end of an id, shipped trials too.

        ``latest``: the last so many alone.
        """
        _require_texts(gpu=gpu, op=op, problem=problem, part=part)
        if latest is not None and (type(latest) is not int or latest < 1):
            raise UnsupportedProblem(f"latest is a number of trials from 1 up, or None; it is {latest!r:.60}")
        gpu, op = self.gpu(gpu), self.op(op)
        conditions = query.conditions(problem or "", op)
        found: Sequence[Trial] = []
        if part is not None:
            part = part.lower().removeprefix("..")  # as listings shorten it
        if self.store is not None:
            if part is not None:
                found = self.store.find(part, gpu=gpu, op=op)
            else:
                problems = self._problems(gpu, op, conditions)
                chosen = problems is not None or not conditions  # by SQL alone
                found = self.store.trials(gpu=gpu, op=op, problems=problems, latest=latest if chosen else None)
        if part is not None and not found:
            found = [t for t in _shipped_trials(gpu, op) if t.id.startswith(part) or t.id.endswith(part)]
        mine = (t for t in found if gpu in (None, t.gpu.name) and op in (None, t.op))
        matching = [t for t in mine if self._matches(t, conditions)]
        return matching[-latest:] if latest else matching

    def columns(self, t: Trial) -> dict[str, Any]:
        """A trial's plain values under the names that a winner's have."""
        row = self._by_name(t)
        row |= {"created_at": t.created_at.astimezone(UTC).isoformat(), "certificate": row["certificate"] or None}
        absent = {name for name, value in row.items() if value is None or (name in _LATE and value == "")}
        return {name: row[name] for name in (*TRIAL_COLUMNS, "problem_text", "config_text") if name not in absent}

    def _problems(self, gpu: str | None, op: str | None, conditions: Sequence[Any]) -> list[tuple[str, str]] | None:
        """The ops and stored problems that meet the conditions; None where all trials may as well be read."""
        if not conditions or self.store is None:
            return None
        tasks = {(key.op, key.problem) for key in self.store.tasks(gpu=gpu, op=op)}
        met = {(name, text) for name, text in tasks if query.matches(name, query.problem(name, text), conditions)}
        return sorted(met) if len(met) <= _MOST_ASKED else None


def diff(a: Database, b: Database, *, gpu: str | None = None, op: str | None = None) -> list[Difference]:
    """Where the winners of two databases differ, in config or by more than 1 % in time."""
    mine, theirs = (_latest(database.winners(gpu=gpu, op=op)) for database in (a, b))
    found = []
    for key in sorted(mine.keys() | theirs.keys()):
        x, y = mine.get(key), theirs.get(key)
        speedup = x.median_us / y.median_us if x and y and x.median_us and y.median_us else None
        if x is None or y is None:
            state = "only in b" if x is None else "only in a"
        elif x.config != y.config:
            state = "other config"
        elif speedup is not None and not 0.99 <= speedup <= 1.01:
            state = "other time"
        else:
            continue
        found.append(
            Difference(
                key[0],
                key[1],
                max(w.revision for w in (x, y) if w),
                key[-1],
                state=state,
                a_us=x.median_us if x else None,
                b_us=y.median_us if y else None,
                speedup=speedup,
                a_config_text=x.config_text if x else None,
                b_config_text=y.config_text if y else None,
            )
        )
    return found


def _latest(winners: Iterable[Winner]) -> dict[tuple[Any, ...], Winner]:
    """Winners by GPU, op and problem, and by revision where that does not serve; of those that may, the latest."""
    found: dict[tuple[Any, ...], Winner] = {}
    for w in winners:
        serving = w.revision in query.revisions(w.op)
        key = w.gpu, w.op, -1 if serving else w.revision, w.problem_text
        found[key] = max(found.get(key, w), w, key=lambda w: w.revision)
    return found


def _precedence(row: tuple[Trial, str]) -> tuple[bool, bool, int]:
    t, source = row
    return snapshot.precedence(t.origin, source, t.revision)


def _certificate(t: Trial) -> dict[str, Any]:
    if t.certificate is None:
        return {}
    found = t.certificate.as_row()
    found["default"] = query.spell(t.op, t.revision, t.problem, found["default"])
    found["tied"] = [query.spell(t.op, t.revision, t.problem, text) for text in found["tied"]]
    return found


def _absent() -> bool:
    path = sqlite.path_of(settings.load().database_url)
    return path is not None and sqlite.is_absent(path)


def _shipped_trials(gpu: str | None, op: str | None) -> list[Trial]:
    names = snapshot.shipped_gpus() if gpu is None else [gpu]
    return [t for name in names for t in snapshot.shipped(name) if op in (None, t.op)]


def _require_texts(**words: object) -> None:
    for name, word in words.items():
        if word is not None and not isinstance(word, str):
            raise UnsupportedProblem(f"{name} must be a text or None; it is {word!r:.60}")


def _word(name: str, value: Scalar) -> str:
    """One condition; True stays a word, so that it is no extent of 1."""
    return f"{name}{value}" if isinstance(value, str) and value[:1] in "<>=!" else f"{name}={value}"


def open(url: str | os.PathLike[str] | None = None, *, local: bool = True, shipped: bool = True) -> Database:
    """The winners at ``url`` (None: the database in the settings) and the shipped ones; either may be left out.

    ::

        with cutekernels.db.open() as database:
            for winner in database.winners(gpu="h200", op="gemm", m=4096):
                print(winner.problem["n"], winner.config["tile_m"], winner.median_us, winner.roofline)

    Raises:
        StoreError: the database named by ``url`` does not exist or cannot be read.
    """
    return Database(url, local=local, shipped=shipped)
