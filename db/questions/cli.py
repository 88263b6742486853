"""``cutekernels db``: query the tuned-config database, carry winners from one to another.

Data goes to stdout, messages to stderr. Exit code 0: done, an empty answer included; 1: it failed, or the one thing
named was not found; 2: the command was misused: no such verb, option, op, GPU, field or column.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, fields
from datetime import timedelta
from difflib import get_close_matches
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from cutekernels import db as database
from cutekernels import settings, terminal
from cutekernels.db.questions import listing
from cutekernels.db.questions import query as query_
from cutekernels.db.questions.query import is_default, revisions
from cutekernels.db.questions.reader import SHIPPED, TRIAL_COLUMNS, Database, Difference, Winner, diff
from cutekernels.db.storage import incoming, snapshot, sqlite
from cutekernels.db.storage.engine import file_errors, url_of
from cutekernels.db.storage.store import ImportReport, Request, Store, Trial, replace_file
from cutekernels.errors import CuteKernelsError, UnknownGpu, UnsupportedProblem
from cutekernels.terminal import As, Format

app = typer.Typer(
    help="Look into the tuned-config database; export, import and merge winners.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Origin(StrEnum):
    """Source of a trial's time."""

    measured = "measured"
    predicted = "predicted"


Db = Annotated[str | None, typer.Option("--db", metavar="URL", help="Path or URL; default: CUTEKERNELS_DB.")]
GpuName = Annotated[str | None, typer.Option("--gpu", help="Only this GPU: h200, a100, auto.")]
OpName = Annotated[str | None, typer.Option("--op", help="Only this op, e.g. gemm.")]
Conditions = Annotated[
    str | None, typer.Option("--problem", help='Only problems with these fields: "m>=16 n=4096 dtype=bf16".')
]
Columns = Annotated[str | None, typer.Option("--columns", help="These columns only: op,problem_m,median_us.")]
Sort = Annotated[str | None, typer.Option("--sort", help="By this column; -NAME for descending.")]
Wide = Annotated[bool, typer.Option("--wide", help="One line for each row, as where stdout is no terminal.")]

_MOST_TOLD = 400  # characters of a row's text
_LEAST_OF_AN_ID = 8  # characters: the listings show so many
_TRIAL_COLUMNS = (*TRIAL_COLUMNS, "problem_text", "config_text")


# ---- verbs --------------------------------------------------------------------------------------------------


@app.command()
def query(
    gpu: GpuName = None,
    op: OpName = None,
    problem: Conditions = None,
    origin: Annotated[Origin | None, typer.Option(help="Only winners of this origin.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first this many, after --sort.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Only what was tuned here, no shipped winners.")] = False,
    columns: Columns = None,
    sort: Sort = None,
    wide: Wide = False,
    format: As = Format.table,
    db: Db = None,
) -> None:
    """List the winners, local and shipped: which config is used for which problem. A * marks those that calls use."""
    with _errors(), database.open(db, shipped=not local) as opened:
        found = opened.winners(gpu=gpu, op=op, problem=problem, origin=origin)
        if opened.absent:
            terminal.say("no database yet, only shipped winners; `cutekernels tune` makes one")
        name, note = opened.gpu(gpu), ""
        if name is not None and not local and not any(w.serves and w.origin == "measured" for w in found):
            note = snapshot.unmeasured(name, ((w.origin, w.source) for w in opened.winners(gpu=name) if w.serves))
    rows = _sort([w.as_row() for w in found], sort, _names(Winner))[:limit]
    _write(rows, format, columns, "no winner matches", _names(Winner), wide, listing.winners)
    if note:
        terminal.say(note)


@app.command()
def history(
    gpu: GpuName = None,
    op: OpName = None,
    problem: Conditions = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the latest this many.")] = None,
    columns: Columns = None,
    sort: Sort = None,
    wide: Wide = False,
    format: As = Format.table,
    db: Db = None,
) -> None:
    """List every trial, oldest first, failed ones with the reason."""
    with _open(db, needed=True) as opened:
        rows = [opened.columns(t) for t in opened.trials(gpu=gpu, op=op, problem=problem, latest=limit)]
    _write(_sort(rows, sort, _TRIAL_COLUMNS), format, columns, "no trial matches", _TRIAL_COLUMNS, wide, listing.trials)


@app.command()
def show(
    what: Annotated[
        str, typer.Argument(metavar="TRIAL_OR_PROBLEM", help="The start or the end of a trial's id; or a problem.")
    ],
    gpu: GpuName = None,
    op: OpName = None,
    format: As = Format.table,
    db: Db = None,
) -> None:
    """Show all fields of one trial, or of the winner that serves one problem."""
    with _open(db) as opened:
        found = _pick(opened, what, gpu, op)
    if not found:
        terminal.fail(f"nothing matches {what!r}; `cutekernels db query` lists the winners")
    if len(found) > 1:
        several = "; ".join(f"{r['id']}  {_brief(r)}" for r in found[:5])
        terminal.fail(f"{len(found)} trials match {what!r}, name one by its id: {several}")
    if format is Format.table:
        table = Table("field", "value", box=None, pad_edge=False)
        for name, value in terminal.flat(found[0]).items():
            if value not in (None, ""):
                table.add_row(name, terminal.cell(f"{value:.6g}" if isinstance(value, float) else value))
        terminal.show(table)
    else:
        terminal.write(found, format)


@app.command("diff")
def diff_(
    a: Annotated[str, typer.Argument(help="Path or URL of a database, or `shipped`.")],
    b: Annotated[str, typer.Argument(help="Another one.")],
    gpu: GpuName = None,
    op: OpName = None,
    format: As = Format.table,
) -> None:
    """List the problems whose winners differ between two databases, in config or by more than 1 % in time."""
    with _side(a) as first, _side(b) as second:
        rows = [asdict(row) for row in diff(first, second, gpu=gpu, op=op)]
    names = tuple(f.name for f in fields(Difference))
    _write(rows, format, None, "the winners are the same", names, False, listing.differences)


@app.command()
def stats(format: As = Format.table, db: Db = None) -> None:
    """Count trials and winners per GPU, op and origin."""
    with _store(db) as store:
        rows = [asdict(row) for row in store.stats()]
    _write(rows, format, None, "the database is empty", ("gpu", "op", "origin", "trials", "ok", "winners"))


@app.command()
def requests(
    gpu: GpuName = None,
    op: OpName = None,
    problem: Conditions = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first this many.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Forget those listed, and such as were tuned since.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --clear: do it; otherwise they are counted.")] = False,
    format: As = Format.table,
    db: Db = None,
) -> None:
    """List problems that were dispatched but never measured, most hits first: candidates to tune next."""
    if yes and not clear:
        terminal.fail("--yes confirms --clear: give both", code=2)
    with _open(db, needed=True) as opened:
        assert opened.store is not None
        gpu, op = opened.gpu(gpu), opened.op(op)
        asked = query_.conditions(problem or "", op)
        queue = opened.store.requests(gpu=gpu, waiting=not clear)
        predicted = {t.key for t in opened.store.winners(gpu=gpu) if t.origin == "predicted"}
    of_op = (r for r in queue if op in (None, r.op))
    chosen = [r for r in of_op if query_.matches(r.op, query_.problem(r.op, r.problem), asked)][:limit]
    if clear:
        if yes:
            with _store(db, writing=True) as store:
                store.clear_requests(chosen)
        terminal.say(f"{len(chosen)} requests {'cleared' if yes else 'would be cleared; --yes clears them'}")
        return
    declared = ("gpu", "op", "revision", "problem_text", "hits", "last_seen", "note")
    rows = [
        dict(zip(declared, (*astuple(r), _waiting(r, predicted)), strict=True))
        | {"problem": query_.problem(r.op, r.problem)}
        for r in chosen
    ]
    _write(rows, format, None, "no request is waiting", declared)


def _waiting(r: Request, predicted: Collection[tuple[str, str, int, str]]) -> str:
    """Why a request waits on after a run."""
    why = query_.foreign(r.op, r.revision, r.problem)
    if not why and (r.gpu, r.op, r.revision, r.problem) in predicted:
        why = f"predicted: only a measurement on a {r.gpu} ends it"
    return why


@app.command()
def report(
    file: Annotated[str, typer.Argument(metavar="OUT.HTML", help="Where to write.")],
    gpu: GpuName = None,
    op: OpName = None,
    problem: Conditions = None,
    db: Db = None,
) -> None:
    """Write one HTML file of pictures: searches, time by status, roofline, prediction, winners (extra `report`)."""
    from cutekernels.db.questions import html_report

    with _open(db, needed=True) as opened:
        page = html_report.page(opened, gpu=gpu, op=op, problem=problem)
        with file_errors(file):
            replace_file(Path(file), page)
    terminal.say(f"written to {file}; open it in a browser; it loads nothing else")


@app.command()
def export(
    file: Annotated[str, typer.Argument(help="Where to write; - for stdout.")] = "-",
    gpu: GpuName = None,
    op: OpName = None,
    slim: Annotated[bool, typer.Option("--slim", help="What most rows share stands in the first line only.")] = False,
    db: Db = None,
) -> None:
    """Write the local winners as JSON lines, each complete in itself unless --slim."""
    with _open(db, needed=True) as opened:
        assert opened.store is not None
        target = sys.stdout if file == "-" else file
        count = opened.store.export(target, gpu=opened.gpu(gpu), op=opened.op(op), slim=slim)
    hint = "" if count else "; shipped ones, which every installation has, are not among them"
    terminal.say(f"{count} local winners written to {'stdout' if file == '-' else file}{hint}")


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(help="What to read; - for stdin.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the winners it would change; change nothing.")
    ] = False,
    format: As = Format.table,
    db: Db = None,
) -> None:
    """Take in winners that `export` wrote: all lines or none."""
    source = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", errors="surrogateescape") if file == "-" else file
    with _errors():
        url = url_of(db)
        read = incoming.read(source, query_.false_time)  # first: of a wrong file no database is made
    if not dry_run:
        with _store(db, writing=True) as store:
            _report(store.import_read(read))
        return
    with tempfile.TemporaryDirectory(prefix="cutekernels-") as folder:
        after, path = str(Path(folder) / "after.db"), sqlite.path_of(url)
        there = path is None or not sqlite.is_absent(path)
        with _store(after, writing=True) as store:
            report = store.rehearse(url, read) if there else store.import_read(read)
        with _errors(), database.open(url, local=there, shipped=False) as now, _side(after) as then:
            rows = [asdict(row) for row in diff(now, then)]
    names = tuple(f.name for f in fields(Difference))
    _write(rows, format, None, "no winner would change", names, False, listing.differences)
    _report(report)
    terminal.say("a dry run (a: now, b: after the import): nothing was stored")


@app.command()
def merge(url: Annotated[str, typer.Argument(help="Path or URL of the other database.")], db: Db = None) -> None:
    """Take in every trial, winner, request and calibrated rate of another database; it is only read."""
    with _store(db, writing=True) as store:
        _report(store.merge(url, judge=query_.false_time))


@app.command()
def pull(
    url: Annotated[str, typer.Argument(help="Path or URL of a fleet's database, such as PostgreSQL's.")],
    gpu: GpuName = None,
    op: OpName = None,
    db: Db = None,
) -> None:
    """Copy a fleet's winners into the local database, at once: for serving processes, which read a local file."""
    with _open(url) as other:
        gpu, op = other.gpu(gpu), other.op(op)
    with _store(db, writing=True) as store:
        _report(store.pull(url, gpu=gpu, op=op, judge=query_.false_time))


@app.command()
def prune(
    days: Annotated[
        int | None, typer.Option(min=0, max=36500, help="Trials older than this, or of no date, that win nothing.")
    ] = None,
    stale: Annotated[bool, typer.Option("--stale", help="All trials of earlier revisions that serve no more.")] = False,
    gpu: GpuName = None,
    op: OpName = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete them; otherwise they are counted.")] = False,
    db: Db = None,
) -> None:
    """Delete trials that no call needs. A pruned failure may be tried again by `tune`."""
    if days is None and not stale:
        terminal.fail("say what to prune: --days N, --stale or both", code=2)
    with _open(db, needed=True) as opened:
        gpu, op = opened.gpu(gpu), opened.op(op)
        assert opened.store is not None
        ops = {row.op for row in opened.store.stats()} if stale else ()
        current = {name: found for name in ops if (found := revisions(name))}
    with _store(db, writing=yes) as store:
        older = None if days is None else timedelta(days=days)
        count = store.prune(older_than=older, stale=current, gpu=gpu, op=op, count_only=not yes)
    terminal.say(f"{count} trials {'deleted' if yes else 'would be deleted; --yes deletes them'}")


@app.command()
def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="Upgrade the schema; set a damaged file aside.")] = False,
    format: As = Format.table,
    db: Db = None,
) -> None:
    """Check the database: schema, broken rows, winners that no call uses. Exit code 1 if something is broken."""
    if fix:
        with _errors():
            path = sqlite.path_of(url_of(db))
        if path is not None and sqlite.is_absent(path):
            terminal.fail(f"there is no database at {path}; `cutekernels tune` and `db import` create one")
        with _store(db, writing=True):
            pass
    rows: list[dict[str, Any]] = []
    with _open(db, needed=True) as opened:
        assert opened.store is not None
        broken = opened.store.broken_rows()
        winners = opened.store.winners()
        unknown = [t for t in winners if not revisions(t.op)]
        idle = [t for t in winners if revisions(t.op) and t.revision not in revisions(t.op)]
        newer = [t for t in idle if t.revision > max(revisions(t.op))]
        earlier = [t for t in idle if t.revision < max(revisions(t.op))]
        refused = opened.refused(winners)
        count = opened.store.count()
    rows.append({"what": "database", "state": "ok", "found": f"{count} trials"})
    rows += [{"what": "row", "state": "broken", "found": reason} for reason in broken]
    for found, why in (
        (earlier, "of an earlier revision: tune again, or prune --stale"),
        (newer, "of a newer revision: upgrade cutekernels, or tune again here"),
        (unknown, "of an op that this version lacks: upgrade cutekernels if a later one has it"),
    ):
        if found:
            rows.append({"what": "winners", "state": "unused", "found": f"{len(found)} {why}"})
    for source in ("local", SHIPPED):
        among = [found for found in refused if found.source == source]
        if among:
            first = _describe(among[0].trial, among[0].reason)
            told = f"{len(among)} that calls refuse: tune again. The first: {first}"
            rows.append({"what": f"{source} winners", "state": "unused", "found": told})
    unused = len(idle) + len(unknown) + sum(found.source == "local" for found in refused)
    rows.append({"what": "winners", "state": "ok", "found": f"{len(winners) - unused} valid"})
    _write(rows, format, None, "", ("what", "state", "found"))
    raise typer.Exit(1 if broken else 0)


# ---- opening ------------------------------------------------------------------------------------------------


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (UnknownGpu, UnsupportedProblem) as error:
        terminal.fail(str(error), code=2)
    except (CuteKernelsError, ValueError) as error:  # ValueError: an environment variable is set wrongly
        terminal.fail(str(error))


@contextmanager
def _store(db: str | None, *, writing: bool = False) -> Iterator[Store]:
    with _errors(), Store(settings.load().database_url if db is None else db, readonly=not writing) as store:
        yield store


@contextmanager
def _open(db: str | None, *, needed: bool = False) -> Iterator[Database]:
    with _errors(), database.open(settings.load().database_url if db is None and needed else db) as opened:
        yield opened


@contextmanager
def _side(name: str) -> Iterator[Database]:
    """One side of a comparison: a database without the shipped winners, or these alone."""
    alone = name == "shipped"
    with _errors(), database.open(None if alone else name, local=not alone, shipped=alone) as opened:
        yield opened


# ---- choosing and writing -----------------------------------------------------------------------------------


def _report(report: ImportReport) -> None:
    more = "".join(
        f", {count} {what} taken"
        for count, what in ((report.requests, "requests"), (report.rates, "calibrated rates"))
        if count
    )
    kept = f"{report.kept} winners kept as they were"
    terminal.say(f"{report.added} trials added, {report.crowned} winners set, {kept}{more}")
    if report.differing:
        terminal.say(f"{report.differing} incoming winners are here with other contents under the same id, which stay")
    unused = [(t, why) for t in report.winners if (why := query_.unusable(t))]
    if unused:
        t, why = unused[0]
        terminal.say(f"calls here refuse {len(unused)} of the winners. The first: {_describe(t, why)}")


def _describe(t: Trial, why: str) -> str:
    return f"{t.gpu.name} {t.op} r{t.revision} [{t.problem}]: {why}"[:_MOST_TOLD]


def _pick(opened: Database, what: str, gpu: str | None, op: str | None) -> list[dict[str, Any]]:
    if not any(sign in what for sign in "=<>"):
        if len(what) < _LEAST_OF_AN_ID:
            raise UnsupportedProblem(
                f'what to show is a problem, "m=16 n=4096", or at least {_LEAST_OF_AN_ID} characters of a trial\'s id, '
                f"its start or its end; it is {what!r}. `cutekernels db query` lists both"
            )
        trials = opened.trials(gpu=gpu, op=op, part=what)
        return [opened.columns(t) | {"hardware": asdict(t.gpu)} for t in trials]
    found = opened.winners(gpu=gpu, op=op, problem=what)
    asked = {word.partition("=")[0] for word in what.split()}
    # A field that is not named has its default, if some row is so: "m=16 n=64 k=32" is not the one with b_major=k.
    exact = [w for w in found if all(n in asked or is_default(w.op, n, v) for n, v in w.problem.items())]
    found = exact or list(found)  # type: ignore[assignment]
    serving = {(w.gpu, w.op, w.problem_text) for w in found if w.serves}
    shown = [w for w in found if w.serves or (w.gpu, w.op, w.problem_text) not in serving]
    # Where none serves, the local one comes before the shipped one.
    places: dict[tuple[str, str, str], Winner] = {}
    for w in sorted(shown, key=lambda w: w.source != "local"):
        places.setdefault((w.gpu, w.op, w.problem_text), w)
    return [w.as_row() for w in shown if w is places[w.gpu, w.op, w.problem_text]]


def _brief(row: Mapping[str, Any]) -> str:
    return f"{row['gpu']} {row['op']} r{row['revision']} [{row['problem_text']}]"


def _names(record: type[Any]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(record))


def _require_column(name: str, rows: Sequence[Mapping[str, Any]], declared: Sequence[str]) -> None:
    records = {inner for row in rows for inner, value in row.items() if isinstance(value, Mapping)}
    known = sorted({*declared, *chain.from_iterable(terminal.flat(row) for row in rows)} - records)
    nested = not rows and name.partition("_")[0] in declared  # problem_m, of which no row says that it is there
    if name not in known and not nested:
        near = [f"{name}_text"] if f"{name}_text" in known else get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        terminal.fail(f"there is no column {name[:60]!r}.{hint} The columns: {', '.join(known)}", code=2)


def _sort(rows: list[dict[str, Any]], sort: str | None, declared: Sequence[str]) -> list[dict[str, Any]]:
    if sort is None:
        return rows
    name = sort.removeprefix("-")
    _require_column(name, rows, declared)
    valued: list[tuple[Any, dict[str, Any]]] = [(terminal.flat(row).get(name), row) for row in rows]
    some = [pair for pair in valued if pair[0] is not None]
    numbers = all(isinstance(value, int | float) for value, _ in some)
    some.sort(key=lambda pair: pair[0] if numbers else str(pair[0]), reverse=sort.startswith("-"))
    return [row for _, row in some] + [row for value, row in valued if value is None]


def _write(
    rows: Sequence[dict[str, Any]],
    format: Format,
    columns: str | None,
    nothing: str,
    declared: Sequence[str],
    wide: bool = False,
    narrow: Any = None,
) -> None:
    if not rows and nothing:
        terminal.say(nothing)
    names = [name.strip() for name in columns.split(",")] if columns else []
    for name in names:
        _require_column(name, rows, declared)
    if format is not Format.table:
        chosen = [{name: terminal.flat(row).get(name) for name in names} for row in rows] if names else rows
        # Without rows a CSV still has its header.
        terminal.write(chosen, format, names if names or rows else declared)
    elif rows and narrow is not None and not names and not wide and terminal.is_terminal():
        terminal.show(narrow(rows))
    elif rows:
        shown = [{name: Text(str(v)) if name == "id" else v for name, v in row.items()} for row in rows]
        table = Table(*(names or listing.wide(rows) or declared), box=None, pad_edge=False)
        for row in map(terminal.flat, shown):
            table.add_row(*(terminal.cell(row.get(str(c.header))) for c in table.columns))
        terminal.show(table, one_line=wide)
