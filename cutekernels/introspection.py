"""Public functions that concern every op: :func:`explain`, :func:`warmup` and :func:`report_misses`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from cutekernels import ahead, compilers, dispatch, environment, rates, settings
from cutekernels import gpu as gpus
from cutekernels.ahead import Recorded, Warmed
from cutekernels.db.storage import snapshot
from cutekernels.db.storage.snapshot import TunedConfig
from cutekernels.errors import StoreError, UnsupportedProblem
from cutekernels.interval import Interval
from cutekernels.ops import registry
from cutekernels.ops.shared.checks import check_word

if TYPE_CHECKING:
    import torch


def explain(
    op: str,
    problem: str,
    *,
    gpu: str = "auto",
    config: str | None = None,
    database: str | os.PathLike[str] | None = None,
    gpu_name: str = "",
) -> dispatch.Explanation:
    """The reason for a call's config: ``print(cutekernels.explain("gemm", "m=16 n=4096 k=4096"))``.

    Args:
        op: the op's name, e.g. ``"gemm"``.
        problem: the problem in text form; fields left out hold their defaults.
        gpu: a GPU of the table (``"a100"``), or ``"auto"`` for the machine's own.
        config: explain this config instead of the chosen one.
        database: a path or URL, or a lock, to read in place of the database in the settings.
        gpu_name: the name of ``gpu`` until 0.2.0, which still works.

    Returns:
        The choice, its origin, every source that was tried, the roofline floor; ``str()`` of it is a table.

    Raises:
        UnsupportedProblem: no such op, or not a problem of it.
        UnknownGpu: no such GPU.
        InvalidConfig: ``config`` breaks a rule of the op.
        StoreError: ``database`` cannot be read.
        ValueError: ``database`` is neither a path nor a URL.
    """
    check_word("explain", "op", op)
    check_word("explain", "problem", problem)
    check_word("explain", "gpu", gpu)
    check_word("explain", "gpu_name", gpu_name)
    if gpu_name:
        if gpu != "auto":
            raise UnsupportedProblem(f"explain takes one GPU; got gpu={gpu!r} and gpu_name={gpu_name!r}: leave out one")
        gpu = gpu_name
    _check_database(database)
    database = None if database is None else os.fspath(database)
    declared = registry.get(op)
    spec, posed = gpus.lookup(gpu), declared.Problem.parse(problem)
    if database is None:
        return _with_drift(dispatch.explain(declared, posed, spec, config), None)
    known = cache(lambda of: snapshot.load(of.name, database, strict=True))
    with rates.read_from(database):
        return _with_drift(dispatch.explain(declared, posed, spec, config, known), database)


def _with_drift(found: dispatch.Explanation, database: str | None) -> dispatch.Explanation:
    """``found``, with a note where its winner was measured under another version of its kernel's compiler."""
    winner = found.choice.winner
    if winner is None or winner.origin != "measured":
        return found
    measured_on = gpus.SIBLINGS.get(found.gpu) if found.choice.origin == "sibling" else None
    versions = _versions(winner, measured_on or found.gpu, database)
    note = environment.drift(versions, [registry.get(found.op).compiler(found.choice.config)])
    return replace(found, rows=(*found.rows, ("note", note))) if note else found


def _versions(winner: TunedConfig, of: str, database: str | None) -> Mapping[str, str]:
    """The environment that ``winner`` for the GPU called ``of`` was measured in; none for a lock's."""
    if winner.source == "shipped":
        return snapshot.shipped_environment(winner, of)
    if winner.source == "database":  # SQLAlchemy is loaded here alone
        with suppress(StoreError), import_module("cutekernels.db").open(database) as opened:
            rows = opened.winners(gpu=of, op=winner.op, origin="measured")
            return next((r.environment for r in rows if r.serves and r.problem_text == winner.problem), {})
    return {}


@overload
def warmup(
    problems: Iterable[tuple[str, str]], device: int | None = None, *, jobs: int | None = None
) -> list[dispatch.Plan]: ...


@overload
def warmup(
    problems: torch.nn.Module | Recorded,
    *,
    tokens: tuple[int, int] | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> Warmed: ...


def warmup(
    problems: Any,
    device: int | None = None,
    *,
    tokens: tuple[int, int] | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> list[dispatch.Plan] | Warmed:
    """Compile ahead the kernels that calls will need, of a model or of problems.

    ::

        ck.warmup(model, tokens=(1, 4096))          # a patched model, or a Decoder
        ck.warmup([("gemm", "m=16 n=4096 k=4096"), ("silu_mul", "rows=16 cols=4096")])

    Of a model every number of tokens is thought of, without a launch or memory: prompts in a batch of one and a token
    behind each; of a :class:`~cutekernels.models.Decoder` its prompts' chunks and the steps of every batch. What was
    chosen and compiled is kept in the disk cache, so that the next process, or another node with the same cache, needs
    seconds. Without the GPU, ``cutekernels warmup FOLDER --gpu h200`` does the same for a checkpoint.

    Kernels are compiled side by side in processes of their own, which see no GPU and do not import the caller's main
    module. It may be called from any thread; calls in other threads go on meanwhile.

    Args:
        problems: a patched transformers model or a Decoder, on a GPU; or pairs of an op's name and a problem's text, as
            :func:`explain` takes them.
        device: of pairs: a CUDA device's index; None for the current one.
        tokens: of a model: the least and the greatest number of tokens in a prompt; None for 1 to 4096, and for all
            that a Decoder takes.
        jobs: compiling processes; None for as many as there are CPUs and memory for, at most 16.
        progress: a bar of a model's kernels, done and left, where stderr is a terminal.

    Returns:
        Of pairs the plans, in order; of a model the numbers of problems and kernels, and the seconds it took.

    Raises:
        UnsupportedProblem: an op or a problem that does not exist, a model that makes no call of this library's ops or
            is on no GPU, ``tokens`` that are no range, or ``jobs`` that is no number of processes.
        UnknownGpu: no CUDA device is visible.
        CompileError: kernels do not compile, or their compilers crashed or took longer than two minutes each. All
            others are ready then.
    """
    import torch

    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise UnsupportedProblem(f"warmup takes a number of jobs, processes from 1 up; got {jobs!r}: leave it out")
    if isinstance(problems, torch.nn.Module) or hasattr(problems, "lines"):
        if device is not None:
            raise UnsupportedProblem(f"a model is warmed up on its own device; got device={device!r}: leave it out")
        span, place = _tokens(problems, tokens), ahead.device_of(problems)
        if place.type != "cuda":
            raise UnsupportedProblem(f"warmup is for a model on a GPU; this one is on {place}: move it there")
        return ahead.prepare(problems, span, gpus.detect(place.index), jobs, progress)
    if tokens is not None:
        raise UnsupportedProblem(f"tokens are a model's; got {tokens!r} with problems: leave them out")
    index = torch.cuda.current_device() if device is None and torch.cuda.is_available() else device
    posed = []  # all are checked before any compiles
    for pair in problems if isinstance(problems, Iterable) and not isinstance(problems, str) else [problems]:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(word, str) for word in pair):
            raise UnsupportedProblem(
                f"warmup takes pairs of an op's name and a problem's text; got {pair!r:.60}: pass "
                '[("gemm", "m=16 n=4096 k=4096")]'
            )
        op = registry.get(pair[0])
        posed.append((op, op.Problem.parse(pair[1])))
    failed = ahead.compile_missing(posed, gpus.detect(index), jobs)
    plans = [dispatch.plan(op, problem, index) for op, problem in posed if (op, problem) not in failed]
    if failed:
        raise compilers.together(list(failed.values()))
    return plans


def check_tokens(tokens: object) -> tuple[int, int]:
    """A range of numbers of tokens."""
    if isinstance(tokens, tuple | list) and len(tokens) == 2 and all(type(each) is int for each in tokens):
        low, high = tokens
        if 1 <= low <= high <= _MOST_TOKENS:
            return low, high
    raise UnsupportedProblem(
        f"tokens are the least and the greatest number of a prompt's, from 1 to {_MOST_TOKENS}; got {tokens!r:.60}: "
        "pass (1, 4096)"
    )


def _tokens(model: Any, tokens: object) -> tuple[int, int]:
    return check_tokens((1, getattr(model, "max_tokens", 4096)) if tokens is None else tokens)


_MOST_TOKENS = 1 << 20


def report_misses(database: str | None = None, *, every_s: float | None = None) -> int:
    """Store the untuned problems of this process in the tuner's queue, which ``cutekernels db requests`` lists.

    Nothing is written unless this is called, periodically or at the end of a serving process. A problem counts
    once per process that planned it (its first call, or the first after :func:`cutekernels.reload`).

    Args:
        database: a path or a SQLAlchemy URL; None for the one in the settings.
        every_s: repeat this every so many seconds in a thread, and when the process ends; forked children too. What
            cannot be stored is logged and kept. Needs ``database`` or ``CUTEKERNELS_DB``. None ends the repetition.

    Returns:
        Number of buckets stored. They are not stored again.

    Raises:
        StoreError: the database cannot be written. The counts are kept for the next call.
        ValueError: ``every_s`` is no number of seconds from 0.01 up, or no database is named for it; ``database`` is
            neither a path nor a URL.
    """
    global _to
    _reporter.check(every_s)
    _check_database(database)
    if every_s is not None:
        if database is None and not settings.load().database_named:
            raise ValueError(f"every_s needs a database that others read: set {settings.DB_VARIABLE} or give database=")
        if _reporter.seconds is None:
            atexit.unregister(_report_quietly)
            atexit.register(_report_quietly)
    elif _reporter.seconds is not None:
        atexit.unregister(_report_quietly)
    _to = database
    _reporter.every(every_s)
    return _report(database)


def _check_database(database: object) -> None:
    if database is not None and not isinstance(database, str | os.PathLike):
        raise ValueError(f"database is a path or a URL; it is {database!r:.60}")


def _report(database: str | None) -> int:
    taken = dispatch.take_missed()
    if not taken:
        return 0
    try:
        with import_module("cutekernels.db.storage.store").Store(database) as store:
            store.note_requests([(*miss, hits) for miss, hits in taken.items()])
    except BaseException:
        dispatch.give_back_missed(taken)
        raise
    return len(taken)


_to: str | None = None


def _report_quietly() -> None:
    try:
        _report(_to)
    except (StoreError, ValueError) as error:
        settings.logger("requests").warning("untuned problems could not be reported, they are kept: %s", error)


_reporter = Interval("cutekernels-report", _report_quietly)
