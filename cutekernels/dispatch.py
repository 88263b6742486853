"""Dispatch: from a problem to a config, its compiled kernel and a launch.

``resolve`` chooses a config; ``plan`` chooses and compiles, once per device and problem; ``explain`` describes the
choice. A config comes from the first of these that ``why_not`` accepts for the *exact* problem:

1. ``forced``: the caller's ``config=``;
2. ``tuned``: a measured winner of the problem's bucket;
3. ``nearest``: a measured winner with the same static fields and extents within an octave and a half in all, unless
   the model has it far behind the default here but not at its own problem; the vendor's call where the three closest
   winners are its;
4. ``sibling``: the bucket's winner on the GPU that ``gpus.sibling`` names, where it was at least ``SIBLING_GAIN`` times
   as fast as the same default;
5. ``predicted``: the model's winner of the bucket, or of its nearest neighbour, where its row says why it is better;
6. ``default``: the op's analytical choice.

Winners are read once per GPU into immutable dicts; :func:`reload` reads them again. Nothing is tuned here, no call
touches the database after the first one with its problem, and a broken database means defaults, never an error.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from cutekernels import compile as compiler
from cutekernels import gpu as gpus
from cutekernels import rates, settings
from cutekernels.db.storage import snapshot as snapshots
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.interval import Interval

if TYPE_CHECKING:
    from cutekernels.db.storage.snapshot import Snapshot, TunedConfig
    from cutekernels.gpu import GpuSpec
    from cutekernels.lengths import Chosen
    from cutekernels.op import Config, Op, Problem

MAX_OCTAVES = 1.5
"""Limit on a neighbour's distance: octaves, summed over the extents."""
MOST_TRIED = 4
"""Neighbours that are tried: each takes the models of two problems, milliseconds of host time."""
VENDOR_WINNERS = 3
"""The vendor's call serves a neighbour where so many of the closest winners are its. Each of 290 products left out in
turn (H100, 2026-11-26): 30 got it, 28 of them rightly, 1.42 times as fast as the default beside which they were tuned;
with two, 6 of 37 wrongly."""
MOST_BEHIND = 1.05
"""Limit on a neighbour's config: its time over the default's by the model, here against at its own problem.

1.05: docs/notes/trunk.md#neighbours (H200, 2026-11-25)."""
SIBLING_GAIN = 1.1
"""A sibling's winner serves calls where it was so many times as fast as the default there, which is the default here
too: 1.24 times as fast in the mean of 26, docs/notes/trunk.md#siblings (H200, 2026-11-26)."""
MOST_SHARE = 1.25
"""A measured time below the roofline's over this is false. Above 1, since boards run above the boost clock of their
data sheet, from which ``peak_tflops`` is."""
LEAST_GAIN = 1.5
"""A prediction serves calls where the model has it at least this many times as fast as the default. On the H200's
sweeps the model promised 1.00 to 1.45 where its choice is not the default, and 31 of 46 were slower:
docs/notes/trunk.md#predictions."""


_Known = Callable[["GpuSpec"], "Snapshot"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A config for one problem: ``origin`` names its source, ``note`` gives the reason in a sentence."""

    config: Config
    origin: str
    note: str
    winner: TunedConfig | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice, compiled: ``launch(*outputs, *args)`` runs it on the current device and stream."""

    config: Config
    launch: Callable[..., Any]
    origin: str
    note: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reason for a call's config. ``considered`` lists each source that was tried, in order."""

    op: str
    problem: Problem
    gpu: str
    choice: Choice
    considered: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows)


_lock = threading.RLock()
_plans: dict[tuple[Any, ...], Plan] = {}
_missed: dict[tuple[str, str, int, str], int] = {}
_listeners: list[Callable[[], None]] = []


def resolve(
    op: Op[Any, Any], p: Any, gpu: GpuSpec, snapshot: Snapshot | None = None, forced: Config | str | None = None
) -> Choice:
    """The config for ``p`` on ``gpu``; compiles nothing.

    ``snapshot``: the only winners, in place of those that calls use.

    Raises:
        InvalidConfig: ``forced`` is not a config of the op, or breaks one of its rules.
    """
    if forced is not None:
        return _callers_choice(op, p, gpu, forced)
    for _, outcome in _sources(op, p, gpu, winners if snapshot is None else _alone(gpu, snapshot)):
        if isinstance(outcome, Choice):
            return outcome
    raise AssertionError("the last source is the default, which always gives a config")


def plan(op: Op[Any, Any], p: Any, device: int | None = None, forced: Config | str | None = None) -> Plan:
    """The compiled choice for ``p`` on CUDA device ``device`` (None: the current one), cached.

    Raises:
        InvalidConfig: as :func:`resolve`.
        CompileError: the kernel does not compile.
    """
    key = (op.name, p, device, None if forced is None else str(forced))
    if recording():
        return _recorder.note(op, p)  # type: ignore[no-any-return]
    found = _plans.get(key)
    if found is not None:
        return found
    gpu = gpus.detect(device)
    with _lock:
        found = _plans.get(key)  # another thread may have made it while this one waited
        if found is not None:
            return found
        choice = (_ahead_of(op, p, gpu) if forced is None else None) or resolve(op, p, gpu, forced=forced)
        launch = op.bind(p, choice.config, compiler.get(op, p, choice.config, gpu))
        made = Plan(choice.config, launch, choice.origin, choice.note)
        _plans[key] = made
        if choice.origin not in ("forced", "tuned"):
            miss = gpu.name, op.name, op.revision, str(p.bucket())
            _missed[miss] = _missed.get(miss, 0) + 1
    return made


def choose_ahead(gpu: GpuSpec, chosen: Iterable[Chosen]) -> None:
    """Calls on ``gpu`` take these choices until :func:`reload`."""
    with _lock:
        for each in chosen:
            kept = _chosen.setdefault((gpu.name, each.line.op), [])
            kept[:] = [each, *(other for other in kept if other.line != each.line)]


def has_choices(gpu: GpuSpec) -> bool:
    """Whether :func:`choose_ahead` has been called for ``gpu``."""
    return any(name == gpu.name for name, _ in _chosen)


_chosen: dict[tuple[str, str], list[Chosen]] = {}


def _ahead_of(op: Op[Any, Any], p: Any, gpu: GpuSpec) -> Choice | None:
    for chosen in _chosen.get((gpu.name, op.name), ()):
        found = chosen.of(p)
        if found is not None:
            return Choice(op.Config.parse(found[0]), found[1], "chosen by warmup")
    return None


@contextmanager
def recorded_by(note: Callable[[Op[Any, Any], Problem], Plan]) -> Iterator[None]:
    """This thread's plans are those that ``note(op, problem)`` returns."""
    global recorders
    with _lock:
        recorders += 1
    _recorder.note = note
    try:
        yield
    finally:
        _recorder.note = None
        with _lock:
            recorders -= 1


def recording() -> bool:
    """Whether the calls of this thread are recorded: nothing may be kept of them."""
    return recorders > 0 and getattr(_recorder, "note", None) is not None


recorders = 0
"""Threads that record, for calls that are counted in nanoseconds."""
_recorder = threading.local()


def explain(
    op: Op[Any, Any], p: Any, gpu: GpuSpec, config: Config | str | None = None, known: _Known | None = None
) -> Explanation:
    """The config that a call with ``p`` would run on ``gpu``, its source and those tried before. Compiles nothing.

    ``known``: gives the winners of a GPU, in place of those that calls use.
    """
    considered = []
    known = known or winners
    choice = None if config is None else _callers_choice(op, p, gpu, config)
    if choice is None:
        for name, outcome in _sources(op, p, gpu, known):
            considered.append((name, outcome.note if isinstance(outcome, Choice) else outcome))
            if isinstance(outcome, Choice):
                choice = outcome
                break
    assert choice is not None
    estimate = op.estimate_us(p, choice.config, gpu)
    rows = [
        ("op", f"{op.name} (revision {op.revision})"),
        ("problem", str(p)),
        ("bucket", str(p.bucket())),
        ("gpu", f"{gpu.name} ({gpu.product})"),
        ("config", str(choice.config)),
        ("origin", choice.origin),
        ("why", choice.note),
        ("floor", f"{op.work(p).floor_us(gpu):.2f} us (roofline)"),
        ("model", f"{estimate:.2f} us (analytical)"),
    ]
    if choice.winner is not None and choice.winner.origin == "measured" and choice.winner.median_us is not None:
        against = (
            f", {choice.winner.ratio:.3f} times as fast as the default then" if choice.winner.ratio is not None else ""
        )
        where = "its bucket" if choice.origin in ("tuned", "sibling") else choice.winner.problem
        if choice.origin == "sibling":
            where += f" on {gpus.SIBLINGS[gpu.name]}"
        rows.append(("measured", f"{choice.winner.median_us:.2f} us at {where}{against}"))
    rows += [(f"asked: {name}", said) for name, said in considered]
    usable = (
        w for table in known(gpu).table.values() for w in table.values() if snapshots.may_serve(w.origin, w.reason)
    )
    note = snapshots.unmeasured(gpu.name, ((w.origin, w.source) for w in usable))
    rows += [("note", note)] if note and choice.origin != "sibling" else []
    return Explanation(op.name, p, gpu.name, choice, tuple(considered), tuple(rows))


def winners(gpu: GpuSpec) -> Snapshot:
    """The winners known for ``gpu``, read at first use."""
    return snapshots.snapshot_of(gpu.name)


def reload(*, watch_s: float | None = None) -> None:
    """Forget winners, rates and plans: the next calls use what was tuned and calibrated since. Compiled kernels stay.

    Args:
        watch_s: do so again whenever the database's file has changed, which a thread looks at every ``watch_s``
            seconds; it also reads the new winners, so that no call does. None ends it.

    Raises:
        ValueError: ``watch_s`` is no number of seconds from 0.01 up, or the database in the settings is no file: a
            serving process reads a local copy, which ``cutekernels db pull`` makes and renews.
    """
    global _watched
    if watch_s is not None:
        _watched = _stamp()
    _watcher.every(watch_s)
    _forget({})


def _forget(known: dict[str, Snapshot]) -> None:
    with _lock:
        snapshots.forget(known)
        rates.forget()
        _plans.clear()
        _chosen.clear()
        for forget in _listeners:
            forget()


_watched: tuple[int, ...] = ()
_TIME_STEP_NS = 30_000_000


def _stamp() -> tuple[int, ...]:
    """Changes when the database in the settings is written."""
    path = settings.load().database_path
    if path is None:
        raise ValueError(
            f"only a file can be watched; {settings.DB_VARIABLE} names a server: use `cutekernels db pull`"
        )
    found: list[int] = []
    for name in (path, f"{path}-wal"):
        try:
            status = os.stat(name)
        except OSError:
            found += (0, 0, 0)
        else:
            found += (status.st_ino, status.st_mtime_ns, status.st_size)
    return tuple(found)


def _look() -> None:
    global _watched
    stamp = _stamp()
    if stamp == _watched:
        return
    # Before reading: a write meanwhile is seen by the next look. File times advance in steps, which two writes share.
    _watched = () if time.time_ns() - max(stamp[1], stamp[4]) < _TIME_STEP_NS else stamp
    before = snapshots.all_held()
    known = {name: snapshots.load(name) for name in before}
    if known != before:
        _forget(known)


_watcher = Interval("cutekernels-watch", _look)


def take_missed() -> dict[tuple[str, str, int, str], int]:
    """Number of problems planned without a measured winner, by (gpu, op, revision, bucket), since the last call."""
    with _lock:
        taken = dict(_missed)
        _missed.clear()
    return taken


def give_back_missed(taken: dict[tuple[str, str, int, str], int]) -> None:
    """Undo :func:`take_missed`, where the counts could not be stored."""
    with _lock:
        for miss, hits in taken.items():
            _missed[miss] = _missed.get(miss, 0) + hits


def on_reload(forget: Callable[[], None]) -> None:
    """Register ``forget`` to be called by :func:`reload`: for ops that cache plans in a faster table of their own."""
    _listeners.append(forget)


# ---- where configs come from ----------------------------------------------------------------------------


def _callers_choice(op: Op[Any, Any], p: Any, gpu: GpuSpec, config: Config | str) -> Choice:
    if isinstance(config, str):
        return Choice(op.read(p, config, gpu), "forced", "the caller's config=")
    if not isinstance(config, op.Config):
        raise InvalidConfig(f"{op.name} takes a {op.Config.__name__} or its text; got {config!r}")
    return Choice(op.check(p, config, gpu), "forced", "the caller's config=")


def _alone(gpu: GpuSpec, snapshot: Snapshot) -> _Known:
    return lambda other: snapshot if other == gpu else snapshots.Snapshot({})


def _sources(op: Op[Any, Any], p: Any, gpu: GpuSpec, known: _Known) -> Iterator[tuple[str, Choice | str]]:
    """Each source in order, with its choice or the reason it has none."""
    table = _table(op, gpu, known(gpu))
    bucket = p.bucket()
    at_bucket = table.get(str(bucket))
    if at_bucket is None:
        yield "tuned", f"nobody tuned the bucket {bucket}"
    elif at_bucket.origin != "measured":
        yield "tuned", "the bucket has only a prediction"
    else:
        yield "tuned", _adopt(op, p, gpu, at_bucket, "tuned", f"measured for its bucket ({at_bucket.source})")
    yield "nearest", _nearest(op, p, gpu, table, "measured", "nearest")
    sibling = gpus.sibling(gpu)
    if sibling is not None:
        yield "sibling", _of_sibling(op, p, gpu, sibling, known(sibling))
    if at_bucket is None or at_bucket.origin != "predicted":
        yield "predicted", _nearest(op, p, gpu, table, "predicted", "predicted")
    elif snapshots.may_serve(at_bucket.origin, at_bucket.reason):
        note = f"the model's best for its bucket ({at_bucket.source}): {at_bucket.reason}"
        yield "predicted", _adopt(op, p, gpu, at_bucket, "predicted", note)
    else:
        gain = "less than" if at_bucket.ratio is None else f"{at_bucket.ratio:.2f}, less than"
        yield (
            "predicted",
            f"the model has its bucket's best {gain} {LEAST_GAIN} times as fast as the default, too little to serve",
        )
    yield "default", Choice(op.default(p, gpu), "default", "the op's analytical choice")


_tables: dict[tuple[str, str], tuple[Snapshot, Mapping[str, TunedConfig]]] = {}


def _table(op: Op[Any, Any], gpu: GpuSpec, snapshot: Snapshot) -> Mapping[str, TunedConfig]:
    """The winners that may serve ``op``, by problem; the same object for the same snapshot."""
    if not op.earlier:
        return snapshot.table.get((op.name, op.revision), {})
    known = _tables.get((gpu.name, op.name))
    if known is None or known[0] is not snapshot:
        known = _tables[gpu.name, op.name] = snapshot, snapshot.of(op.name, op.revisions)
    return known[1]


def _of_sibling(op: Op[Any, Any], p: Any, gpu: GpuSpec, sibling: GpuSpec, snapshot: Snapshot) -> Choice | str:
    """The winner of the bucket on ``sibling``, if it gained enough there over what is the default here too."""
    bucket = p.bucket()
    row = _table(op, sibling, snapshot).get(str(bucket))
    if row is None or row.origin != "measured":
        return f"nobody tuned the bucket on {sibling.name}"
    note = f"measured for its bucket on {sibling.name} ({row.source})"
    if row.ratio is None or row.ratio < SIBLING_GAIN:
        told = "not set beside" if row.ratio is None else f"{row.ratio:.3f} times as fast as"
        return f"{note}, but {told} the default there; it takes {SIBLING_GAIN:g} to serve here"
    if op.default(bucket, sibling) != op.default(bucket, gpu):
        return f"{note}, but the default that it was set beside there is another here"
    return _adopt(op, p, gpu, row, "sibling", note)


def _nearest(
    op: Op[Any, Any], p: Any, gpu: GpuSpec, table: Mapping[str, TunedConfig], wanted: str, origin: str
) -> Choice | str:
    """The closest acceptable neighbour among the rows of origin ``wanted``, of which a few are tried."""
    own = p.bucket()
    reason = f"no {wanted} neighbour within {MAX_OCTAVES:g} octaves"
    vendors = 0  # so many of the closest
    for tried, (distance, row, other) in enumerate(islice(_neighbours(op, own, gpu, table, wanted), MOST_TRIED), 1):
        note = f"{wanted} for {row.problem}, {distance:.2f} octaves away ({row.source})"
        note += f": {row.reason}" if row.reason else ""
        outcome = _adopt(op, p, gpu, row, origin, note)
        if isinstance(outcome, Choice) and outcome.config.vendors:
            vendors += 1
            if tried == vendors == VENDOR_WINNERS:
                return outcome
            outcome = f"{note}, but the vendor's call serves where the {VENDOR_WINNERS} closest winners are its"
        elif isinstance(outcome, Choice):
            here, there = (_over_default(op, problem, outcome.config, gpu) for problem in (own, other))
            behind = here / max(1.0, there)
            if behind <= MOST_BEHIND:
                return outcome
            outcome = f"{note}, but the model has it {behind:.2f} times as far behind the default as there"
        reason = outcome
    return reason


def _neighbours(
    op: Op[Any, Any], own: Problem, gpu: GpuSpec, table: Mapping[str, TunedConfig], wanted: str
) -> Iterator[tuple[float, TunedConfig, Problem]]:
    """Rows with the static fields of ``own`` within an octave and a half, the nearest first."""
    described = _description(op, str(own))
    if described is None:
        return
    plain, place = described
    near = []
    for other, row in _place_rows(op, gpu, table).get((wanted, plain), ()):
        distance = sum(abs(x - y) for x, y in zip(place, other, strict=True))
        if distance <= MAX_OCTAVES:
            near.append((distance, row.problem, row))
    for distance, text, row in sorted(near, key=lambda n: n[:2]):
        try:
            problem = op.Problem.parse(text)
        except UnsupportedProblem:
            continue  # written by another version of this op
        if problem.static() == own.static() and problem != own:
            yield distance, row, problem


_Words = frozenset[tuple[str, str]]
_Placed = dict[tuple[str, _Words], list[tuple[tuple[float, ...], "TunedConfig"]]]
_places: dict[tuple[str, str], tuple[Mapping[str, TunedConfig], _Placed]] = {}


def _place_rows(op: Op[Any, Any], gpu: GpuSpec, table: Mapping[str, TunedConfig]) -> _Placed:
    """Rows of ``table`` by origin and static words, each with its place: made once for a table, from texts alone."""
    known = _places.get((gpu.name, op.name))
    if known is not None and known[0] is table:
        return known[1]
    found: _Placed = {}
    for row in table.values():
        if not snapshots.may_serve(row.origin, row.reason):
            continue
        described = _description(op, row.problem)
        if described is not None:
            found.setdefault((row.origin, described[0]), []).append((described[1], row))
    _places[gpu.name, op.name] = table, found
    return found


def _description(op: Op[Any, Any], text: str) -> tuple[_Words, tuple[float, ...]] | None:
    """A problem's static words, and the powers of two of its extents; None for a text that is no problem's."""
    words = dict(word.split("=", 1) for word in text.split() if "=" in word)
    try:
        place = tuple(_octave(int(words.pop(name, default))) for name, default in _extents(op).items())
    except ValueError:  # a missing extent, or one that is no number
        return None
    return frozenset(words.items()), place


@cache
def _extents(op: Op[Any, Any]) -> dict[str, str]:
    """The extents of the op's problems and their defaults, "" for one that must be there."""
    names = op.Problem.extent_names()
    return {f.name: "" if f.default is MISSING else str(f.default) for f in fields(op.Problem) if f.name in names}


def _octave(extent: int) -> float:
    return math.log2(extent or 0.5)


def _over_default(op: Op[Any, Any], p: Any, config: Config, gpu: GpuSpec) -> float:
    """The model's time for ``config`` over that for the default."""
    least = op.estimate_us(p, op.default(p, gpu), gpu)
    return op.estimate_us(p, config, gpu) / least if least > 0 else 1.0


def octaves(a: Problem, b: Problem) -> float:
    """Distance between two problems' extents in powers of two, summed over the extents."""
    return sum(abs(_octave(x) - _octave(y)) for x, y in zip(a.extents(), b.extents(), strict=True))


def adopt(
    op: Op[Any, Any], p: Any, gpu: GpuSpec, text: str, revision: int, problem: str, us: float | None
) -> Config | str:
    """A config stored under ``revision`` for ``problem``, if it parses and solves ``p`` itself; else the reason for
    which calls refuse it. ``us``: the time that was measured for it; None of a prediction.
    """
    try:
        config = op.Config.parse(op.spell(revision, problem, text))
    except InvalidConfig as error:
        return f"its config is not one of this version's: {error}"
    return op.why_not(p, config, gpu) or too_fast(us, floor_us(op, problem, gpu)) or config


def floor_us(op: Op[Any, Any], problem: str, gpu: GpuSpec) -> float | None:
    """The roofline of a stored problem; None of one that this version lacks."""
    try:
        return op.work(op.Problem.parse(problem)).floor_us(gpu)
    except (UnsupportedProblem, InvalidConfig, ArithmeticError):
        return None


def too_fast(us: float | None, floor_us: float | None) -> str:
    """Why a measured time is false, being far below the problem's roofline; else ""."""
    if us is None or floor_us is None or us * MOST_SHARE >= floor_us:
        return ""
    return f"its time of {us:.4g} us is below the roofline of {floor_us:.4g} us, which no kernel passes: measure again"


def _adopt(op: Op[Any, Any], p: Any, gpu: GpuSpec, row: TunedConfig, origin: str, note: str) -> Choice | str:
    us = row.median_us if row.origin == "measured" else None
    found = adopt(op, p, gpu, row.config, row.revision, row.problem, us)
    return f"{note}, but {found}" if isinstance(found, str) else Choice(found, origin, note, row)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _missed.clear()  # the parent reports these


os.register_at_fork(after_in_child=_after_fork)
