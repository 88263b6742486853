"""``cutekernels tune``: the command line of a tuning run. The result goes to stdout, progress and errors to stderr.

Exit codes: 0 all tasks have a winner, 1 a task failed, the time ended before it had a winner (a grid goes on another
day), or the run was interrupted, 2 the request itself is wrong, 75 the database's server could not be reached, or went
away and stayed away, 143 ended by SIGTERM, 129 by SIGHUP: what was measured is stored, and the same command resumes,
but with --force begins anew.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console

from cutekernels import interrupts, terminal
from cutekernels.terminal import As, Format

if TYPE_CHECKING:
    from cutekernels.autotune.card import Checked
    from cutekernels.autotune.fleet import Fleet
    from cutekernels.autotune.job import Job
    from cutekernels.autotune.report import TuneReport
    from cutekernels.autotune.run import Watcher
    from cutekernels.db.storage.snapshot import Snapshot
    from cutekernels.gpu import GpuSpec

app = typer.Typer(no_args_is_help=True)
_STORED = "all measurements so far are stored, and the same command"


@app.command("tune", no_args_is_help=True)
def command(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="A job file (TOML), or the name of a bundled one, as `jobs` lists them; or `grid`, or `card`.",
        ),
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="auto, or a name such as a100, l40s, rtx5090, h200. Absent ones are predicted.")
    ] = "auto",
    as_: Annotated[
        str | None, typer.Option("--as", help="Let the GPU stand in for one with less: a100, l40s, rtx5090.")
    ] = None,
    db: Annotated[str | None, typer.Option(help="Path or URL of the database; default: the settings'.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Attempts per task; default: the job's.")] = None,
    budget_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds for the whole job; default: the job's.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="The same in minutes; of `card`, whose checks count, 30 by default.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Compiling processes; default: one per CPU, less one where a GPU measures."),
    ] = None,
    lanes: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="Tasks in work on a GPU at a time; default: up to 8, by memory and CPUs."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="Without the GPU: compile the best by model of each problem, N in place of its trials."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Repeat what earlier runs did, interrupted ones too.")] = False,
    confirm: Annotated[
        bool,
        typer.Option("--confirm", help="Measure only the eight predicted best, what serves today and the default."),
    ] = False,
    sampler: Annotated[
        str, typer.Option(metavar="random|tpe|NAME", help="Optuna's sampler, which proposes what follows the seeds.")
    ] = "random",
    op: Annotated[str | None, typer.Option("--op", help="Only the tasks of this op.")] = None,
    requests: Annotated[
        bool, typer.Option("--requests", help="No JOB: the problems that calls missed, most GPU time first.")
    ] = False,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only the I-th of N equal parts: for SLURM arrays, 1 to N.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="all|0,2", help="Several GPUs of this machine share the tasks.")
    ] = None,
    device: Annotated[int | None, typer.Option(min=0, help="The GPU of this machine with this CUDA index.")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS|auto", help="The GPUs of a Ray cluster; needs the extra `fleet`.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the tasks and end.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what earlier runs left to do and end.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the page and the winners of `card`; here by default.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Append a line for each task to this file.")] = None,
    format: As = Format.table,
) -> None:
    """Tune a job's problems for one GPU, or for those of a fleet, and store the winners in the database.

    Where the GPU is present, candidates are measured on it; else they are compiled and ranked by a model.

    An interrupted run resumes when started again. `tune grid` begins with what removes most expected regret.

    `tune card` checks this GPU and every op on it, tunes what models call, and writes a page and a file to send.
    """
    from cutekernels.autotune import card, grid
    from cutekernels.errors import CuteKernelsError, JobError, StoreUnreachable, UnknownGpu
    from cutekernels.gpu import choose, is_auto, lookup, present

    began = time.monotonic()
    of_card = job == card.NAME and not requests  # a job file may be called so too
    of_grid = of_card or (job == grid.NAME and not requests)
    checked = None
    goes_on = "begins anew; without --force it repeats nothing that is stored" if force else "resumes the run"
    with ExitStack() as stack:
        try:
            stack.enter_context(_signals_raise())  # the first to enter: a second one spoils no closing
            if ray is not None and (as_ is not None or of_card):
                raise JobError("--as and `card` are of this machine's GPUs: leave --ray out")
            if as_ is not None:
                spec = choose(gpu, as_)
                gpu = gpu if is_auto(gpu) else spec.name
            if out is not None and not (of_card and present(lookup(gpu))):
                raise JobError("--out is where `card` puts what it measured on a card that is here: leave it out")
            budget_s = _seconds(budget_s, minutes, card.MINUTES if of_card else None)
            devices = _devices(gpus, device, ray)
            if of_grid:
                # How many GPUs a cluster has is known later: all points, of which the run leaves the late ones.
                winners, seconds = _winners(gpu, db, force=force), None if list_ or ray else budget_s
                points: dict[str, Any] = {"families": card.families(), "name": card.NAME} if of_card else {}
                points |= {"op": op, "shard": shard, "trials": trials, "gpus": len(devices or (0,))}
                next_ones = grid.plan(winners, lookup(gpu), budget_s=seconds, **points)
                terminal.say(str(next_ones))
                wanted = next_ones.job
                if not (list_ or dry_run or devices or ray or of_card):
                    grid.refuse_absent(lookup(gpu))
                if of_card and not (list_ or dry_run):
                    checked = _check_card(lookup(gpu), budget_s, jobs)
            else:
                wanted = _job(job, requests=requests, gpu=gpu, db=db, op=op, trials=trials, shard=shard)
            if list_ or dry_run:
                if dry_run:  # what the run would refuse
                    from cutekernels.autotune.fleet import require_visible
                    from cutekernels.autotune.run import check
                    from cutekernels.autotune.samplers import checked as known_sampler

                    check(budget_s, confirm=confirm, measured=bool(devices or ray) or present(lookup(gpu)))
                    known_sampler(sampler)
                    if devices is not None:
                        require_visible(devices)
                # A grid leaves out what is done already; a run for a card that is elsewhere predicts.
                on_fleet = devices is not None or ray is not None
                predicted = dry_run and of_card and not (on_fleet or present(lookup(gpu)))
                dry = dry_run and (predicted or not of_grid)
                measures = on_fleet or (of_grid and not predicted)
                _show(wanted, gpu, db, limit, format, dry=dry, force=force, measures=measures)
                raise typer.Exit
            if not wanted.tasks:
                terminal.say(f"{wanted.name}: this part of the job has no task")
            from cutekernels.autotune.run import tune

            fleet = _fleet(devices, ray, jobs, lanes)
            if fleet is not None:
                stack.callback(fleet.close)
            watcher = stack.enter_context(_watcher(wanted, log, db))
            report = tune(
                wanted,
                gpu,
                db=db,
                budget_s=budget_s,
                jobs=jobs,
                lanes=lanes,
                limit=limit,
                force=force,
                confirm=confirm,
                sampler=sampler,
                watcher=watcher,
                fleet=fleet,
                began=began,
            )
        except (JobError, UnknownGpu) as error:
            stack.close()
            terminal.fail(str(error), code=2)
        except StoreUnreachable as error:
            stack.close()
            again = f"{error}; once it is back, the same command {goes_on}"
            terminal.fail(again, code=_ended_by(error) or os.EX_TEMPFAIL)
        except CuteKernelsError as error:
            stack.close()
            terminal.fail(str(error), code=_ended_by(error) or 1)
        except KeyboardInterrupt:
            stack.close()
            terminal.fail(f"interrupted; {_STORED} {goes_on}")
        except _Terminated as ended:
            with suppress(OSError):  # progress on a terminal that is gone
                stack.close()
            terminal.fail(f"ended by {ended.signal.name}; {_STORED} {goes_on}", code=128 + ended.signal)
    _print(report, format)
    if checked is not None:
        page, file = card.write(out or Path(), lookup(gpu), report, checked, db)
        terminal.say(f"{page} says what gained; to share it, send {file}: `cutekernels db import` reads it")
    if requests and report.origin == "predicted":
        terminal.say(
            f"the requests stay in the queue: only a measurement on a {report.gpu} ends one; "
            "`cutekernels db requests --clear` drops them"
        )
    later = of_grid and all(task.state != "failed" for task in report.tasks)  # the next run goes on
    raise typer.Exit(0 if report.ok or later else 1)


# ---- what to tune, and on what ------------------------------------------------------------------------------


def _job(
    name: str | None,
    *,
    requests: bool,
    gpu: str,
    db: str | None,
    op: str | None,
    trials: int | None,
    shard: str | None,
) -> Job:
    from cutekernels import gpu as known
    from cutekernels.autotune import shards
    from cutekernels.autotune.job import load
    from cutekernels.errors import JobError

    if (name is None) != requests:
        raise JobError(
            "name one job file or bundled job, or give --requests in its place; `cutekernels jobs` lists them"
        )
    if name is None and shard is not None:
        raise JobError("--shard splits a job; runs on one database share its --requests by themselves: leave it out")
    if name is None:
        from cutekernels.autotune.outlook import stored
        from cutekernels.db.storage.engine import url_of

        spec = known.lookup(gpu)
        store = stored(url_of(db))
        queue = store.requests(gpu=spec.name) if store else []
        found = shards.requested(queue, spec, trials)
        if reasons := [why for r in queue if (why := shards.left_out(r, spec))]:
            told = f"{len(reasons)} requests are left out, the first because {reasons[0]}"
            terminal.say(f"{told}; `cutekernels db requests` lists all, with --clear it drops them")
        if not found.tasks:
            terminal.say(f"no request is waiting for {spec.name}; `cutekernels db requests` lists all")
    else:
        found = load(name)
        if trials is not None:
            found = found.with_trials(trials)
    if op is not None:
        found = shards.only(found, op)
    return found if shard is None else shards.part(found, shard)


def _seconds(budget_s: float | None, minutes: float | None, default: float | None) -> float | None:
    """The time of a run, in seconds."""
    from cutekernels.errors import JobError

    if budget_s is not None and minutes is not None:
        raise JobError("--budget-s and --minutes both say how long the run is: give one of them")
    minutes = default if minutes is None and budget_s is None else minutes
    return budget_s if minutes is None else 60 * minutes


def _check_card(spec: GpuSpec, budget_s: float | None, jobs: int | None) -> Checked | None:
    """The check of a card before it is tuned; None where it is elsewhere, and its winners are predicted."""
    from cutekernels.autotune import card
    from cutekernels.gpu import present

    if not present(spec):
        terminal.say(f"no {spec.name} is here: nothing is checked or measured; winners are compiled and predicted")
        return None
    return card.check(spec, budget_s or 0.0, jobs)


def _winners(gpu: str, db: str | None, *, force: bool) -> Snapshot:
    """The winners that calls on a GPU use; none with ``force``, which measures everything again."""
    from cutekernels import gpu as known
    from cutekernels.db.storage import snapshot

    return snapshot.Snapshot({}) if force else snapshot.load(known.lookup(gpu).name, db)


def _devices(gpus: str | None, device: int | None, ray: str | None) -> Sequence[int] | None:
    """The CUDA indices that the options name; None where they name none."""
    from cutekernels.errors import JobError

    if sum(option is not None for option in (gpus, device, ray)) > 1:
        raise JobError("--gpus, --device and --ray each name the GPUs: give one of them")
    if gpus is None:
        return None if device is None else [device]
    if gpus == "all":
        from cutekernels.autotune.fleet import visible

        return range(len(visible()))
    words = [word.strip() for word in gpus.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise JobError(f"--gpus takes all, or CUDA indices such as 0,2; it is {gpus[:40]!r}")
    return [int(word) for word in words]


def _fleet(devices: Sequence[int] | None, ray: str | None, jobs: int | None, lanes: int | None) -> Fleet | None:
    from cutekernels.autotune.fleet import LocalFleet

    if ray is not None:
        from cutekernels.autotune.ray_fleet import RayFleet

        return RayFleet(ray, jobs, lanes)
    if devices is None:
        return None
    return LocalFleet(devices, jobs, lanes)


def _show(
    job: Job, gpu: str, db: str | None, limit: int | None, format: Format, *, dry: bool, force: bool, measures: bool
) -> None:
    """``measures``: whether a run only measures."""
    from cutekernels import gpu as known
    from cutekernels.autotune import outlook, shards
    from cutekernels.autotune.progress import duration

    spec = known.lookup(gpu) if dry or not known.is_auto(gpu) else None  # a list needs no GPU, but no false name
    measures = measures or spec is None or known.present(spec)
    if dry and spec is not None:
        from cutekernels.db.storage.engine import url_of

        rows = outlook.planned(job, spec, outlook.stored(url_of(db)), limit, force=force, measured=measures)
        columns = outlook.PLANNED
    else:
        rows = outlook.listed(job, measured=measures)
        columns = outlook.LISTED if measures else outlook.LISTED[:-1]
    terminal.write(rows, format, columns if format is Format.table else ())
    left = [t for t, row in zip(job.tasks, rows, strict=True) if row.get("state") != "done"]
    cost = f"about {duration(sum(map(shards.expected_s, left)))} one task at a time on an H200"
    if spec is not None and not measures:
        number = "as many as its trials" if limit is None else f"--limit {limit}"
        cost = f"compiled and predicted, since no {spec.name} is here: of each the best by model, {number}"
    terminal.say(f"{job.name}: {len(rows)} tasks, {len(left)} to do, {cost}")


# ---- while it runs ------------------------------------------------------------------------------------------


class _Terminated(BaseException):
    """A signal to end arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def _ended_by(error: BaseException) -> int | None:
    """The exit code of a run that a signal ended, where ``error`` came as it closed."""
    context = error.__context__
    while context is not None and not isinstance(context, (_Terminated, KeyboardInterrupt)):
        context = context.__context__
    if isinstance(context, _Terminated):
        return 128 + context.signal
    return None if context is None else 1


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP (a closed terminal) end the run as Ctrl-C does; others are ignored while one is obeyed."""

    def end(number: int, frame: Any) -> None:
        for other in before:
            signal.signal(other, lambda *_: None)  # SIG_IGN would be handed down to processes that are started
        interrupts.end(_Terminated(number))

    def interrupt(number: int, frame: Any) -> None:
        interrupts.end(KeyboardInterrupt())

    ending = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]  # under nohup
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in (*ending, signal.SIGINT)}
    for number in ending:
        signal.signal(number, end)
    if before[signal.SIGINT] == signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_of_database(log: Path, db: str | None) -> bool:
    """Whether a log would be written into the run's database, or into a file beside it."""
    from cutekernels.db.storage import sqlite
    from cutekernels.db.storage.engine import url_of

    path = sqlite.path_of(url_of(db))
    return path is not None and os.path.realpath(log) in {f"{path}{end}" for end in ("", *sqlite.BESIDE)}


@contextmanager
def _watcher(job: Job, log: Path | None, db: str | None) -> Iterator[Watcher]:
    from cutekernels.autotune.progress import Bars, Lines, Several
    from cutekernels.db.storage import sqlite
    from cutekernels.errors import JobError

    console = Console(stderr=True)
    with ExitStack() as stack:
        watchers: list[Watcher] = []
        if console.is_terminal:
            watchers.append(stack.enter_context(Bars(console, job.tasks)))
        else:
            watchers.append(Lines(sys.stderr, job.tasks))
        if log is not None:
            try:
                if claim := sqlite.claim(Path(os.path.realpath(log))):
                    raise JobError(f"--log {log} {claim}: name another file")
                if _is_of_database(log, db):
                    raise JobError(f"--log {log} is the run's database, or a file beside it: name another file")
                if job.source and os.path.realpath(log) == os.path.realpath(job.source):
                    raise JobError(f"--log {log} is the job file: name another file")
                stream = open(log, "a", encoding="utf-8", opener=_without_waiting)  # noqa: SIM115  closed below
            except OSError as error:
                raise JobError(f"--log {log}: {error.strerror}; name a file that can be written") from error
            stack.callback(_close, stream)
            watchers.append(Lines(stream, job.tasks))
        yield Several(watchers)


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; a pipe that nobody reads is refused."""
    found = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(found, True)
    return found


def _close(stream: TextIO) -> None:
    with suppress(OSError):  # each line was flushed: what is left could not be written, which was told then
        stream.close()


def _print(report: TuneReport, format: Format) -> None:
    if format is Format.json:
        typer.echo(report.as_json())
    elif format is Format.csv:
        typer.echo(report.as_csv(), nl=False)
    else:
        terminal.show(report.as_table())
