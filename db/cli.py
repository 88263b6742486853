"""``cutekernels db``: query the tuned-config database, carry winners from one to another.

Data goes to stdout, messages to stderr. Exit code 0: done; 1: not found, or it failed; 2: the command was misused.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table

from cutekernels import settings, terminal
from cutekernels.db.store import ImportReport, Store, Trial
from cutekernels.errors import StoreError
from cutekernels.terminal import As, Format

app = typer.Typer(help="Look into the tuned-config database; export, import and merge winners.", no_args_is_help=True)


class Origin(StrEnum):
    """Source of a trial's time."""

    measured = "measured"
    predicted = "predicted"


Db = Annotated[str | None, typer.Option("--db", metavar="URL", help="Path or URL; default: CUTEKERNELS_DB.")]
GpuName = Annotated[str | None, typer.Option("--gpu", help="Only this GPU, e.g. h200.")]
OpName = Annotated[str | None, typer.Option("--op", help="Only this op, e.g. gemm.")]
Words = Annotated[
    str | None, typer.Option("--problem", help='Only problems with all these words: "m=4096 dtype=bf16".')
]

_LISTED = tuple(f.name for f in fields(Trial) if f.name != "environment")
_WINNER_COLUMNS = ("gpu", "op", "problem", "config", "origin", "median_us", "ratio", "baseline_us", "id")
_HISTORY_COLUMNS = ("created_at", "gpu", "op", "problem", "config", "origin", "status", "median_us", "ratio", "id")


# ---- verbs --------------------------------------------------------------------------------------------------


@app.command()
def query(
    gpu: GpuName = None,
    op: OpName = None,
    problem: Words = None,
    origin: Annotated[Origin | None, typer.Option(help="Only winners of this origin.")] = None,
    format: As = Format.table,
    db: Db = None,
) -> None:
    """List the winners: which config is used for which problem."""
    with _open(db) as store:
        found = [t for t in store.winners(gpu=gpu, op=op, origin=origin) if _has_words(t, problem)]
    _list_trials(found, _WINNER_COLUMNS, format, "no winner matches")


@app.command()
def history(
    gpu: GpuName = None,
    op: OpName = None,
    problem: Words = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the latest this many.")] = None,
    format: As = Format.table,
    db: Db = None,
) -> None:
    """List every trial, oldest first, failed ones with the reason."""
    with _open(db) as store:
        found = [t for t in store.trials(gpu=gpu, op=op) if _has_words(t, problem)]
    _list_trials(found[-limit:] if limit else found, _HISTORY_COLUMNS, format, "no trial matches")


@app.command()
def show(
    what: Annotated[str, typer.Argument(metavar="TRIAL_OR_PROBLEM", help="A trial's id or its start; or a problem.")],
    gpu: GpuName = None,
    op: OpName = None,
    format: As = Format.table,
    db: Db = None,
) -> None:
    """Show all fields of one trial, or of the winner of one problem."""
    with _open(db) as store:
        found = _pick(store, what, gpu, op)
    if not found:
        terminal.fail(f"nothing matches {what!r}; `cutekernels db query` lists the winners")
    if len(found) > 1:
        several = "; ".join(f"{t.id}  {t.gpu.name} {t.op} r{t.revision} [{t.problem}]" for t in found[:5])
        terminal.fail(f"{len(found)} trials match {what!r}, name one by its id: {several}")
    if format is Format.table:
        table = Table("field", "value")
        for name, value in terminal.flat(found[0].as_row()).items():
            table.add_row(name, terminal.cell(value))
        terminal.show(table)
    else:
        terminal.write([found[0].as_row()], format)


@app.command()
def stats(format: As = Format.table, db: Db = None) -> None:
    """Count trials and winners per GPU, op and origin."""
    with _open(db) as store:
        rows = [asdict(row) for row in store.stats()]
    _write(rows, format, ("gpu", "op", "origin", "trials", "ok", "winners"), "the database is empty")


@app.command()
def requests(
    gpu: GpuName = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first this many.")] = None,
    format: As = Format.table,
    db: Db = None,
) -> None:
    """List problems that were dispatched but never measured, most hits first: candidates to tune next."""
    with _open(db) as store:
        rows = [asdict(row) for row in store.requests(gpu=gpu, limit=limit)]
    _write(rows, format, ("gpu", "op", "revision", "problem", "hits", "last_seen"), "no request is waiting")


@app.command()
def export(
    file: Annotated[str, typer.Argument(help="Where to write; - for stdout.")] = "-",
    gpu: GpuName = None,
    op: OpName = None,
    db: Db = None,
) -> None:
    """Write the winners as JSON lines, each complete in itself."""
    with _open(db) as store:
        count = store.export(sys.stdout if file == "-" else file, gpu=gpu, op=op)
    terminal.say(f"{count} winners written to {'stdout' if file == '-' else file}")


@app.command("import")
def import_(file: Annotated[str, typer.Argument(help="What to read; - for stdin.")], db: Db = None) -> None:
    """Take in winners that `export` wrote: all lines or none."""
    with _open(db, writing=True) as store:
        if file == "-":
            stream = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", errors="surrogateescape")
            _report(store.import_(stream))
        else:
            _report(store.import_(file))


@app.command()
def merge(url: Annotated[str, typer.Argument(help="Path or URL of the other database.")], db: Db = None) -> None:
    """Take in every trial and winner of another database; it is only read."""
    with _open(db, writing=True) as store:
        _report(store.merge(url))


# ---- output -------------------------------------------------------------------------------------------------


def _report(report: ImportReport) -> None:
    terminal.say(f"{report.added} trials added, {report.crowned} winners set, {report.kept} winners kept as they were")


@contextmanager
def _open(db: str | None, *, writing: bool = False) -> Iterator[Store]:
    try:
        with Store(settings.load().database_url if db is None else db, readonly=not writing) as store:
            yield store
    except (StoreError, ValueError) as error:  # ValueError: an environment variable is set wrongly
        terminal.fail(str(error))


def _has_words(trial: Trial, words: str | None) -> bool:
    return words is None or set(words.split()) <= set(trial.problem.split())


def _pick(store: Store, what: str, gpu: str | None, op: str | None) -> list[Trial]:
    if "=" not in what and len(what) >= 8:
        return [t for t in store.find(what) if gpu in (None, t.gpu.name) and op in (None, t.op)]
    winners = [t for t in store.winners(gpu=gpu, op=op) if _has_words(t, what)]
    exact = [t for t in winners if set(t.problem.split()) == set(what.split())]
    return exact or winners


def _list_trials(trials: Sequence[Trial], columns: Sequence[str], format: Format, nothing: str) -> None:
    if format is Format.json:
        _write([t.as_row() for t in trials], format, (), nothing)
        return
    rows = [t.as_row() | {"gpu": t.gpu.name} for t in trials]
    _write(rows, format, columns if format is Format.table else _LISTED, nothing)


def _write(rows: Sequence[dict[str, Any]], format: Format, columns: Sequence[str], nothing: str) -> None:
    if not rows:
        terminal.say(nothing)
    terminal.write(rows, format, columns)
