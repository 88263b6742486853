"""``cutekernels tune``: the command line of a tuning run. The result goes to stdout, progress and errors to stderr.

Exit codes: 0 all tasks have a winner, 1 a task failed, the time ended before it had a winner, or the run was
interrupted, 2 the request itself is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cutekernels import terminal
from cutekernels.terminal import As, Format

if TYPE_CHECKING:
    from rich.progress import TaskID

    from cutekernels.autotune.job import Task
    from cutekernels.autotune.report import TaskReport, TuneReport
    from cutekernels.db.store import Trial

app = typer.Typer(no_args_is_help=True)


@app.command("tune", no_args_is_help=True)
def command(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job file (TOML), or the name of a bundled one: demo.")],
    gpu: Annotated[
        str, typer.Option(help="auto, or a name such as a100, l40s, rtx5090, h200. Absent ones are predicted.")
    ] = "auto",
    db: Annotated[str | None, typer.Option(help="Path or URL of the database; default: the settings'.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Attempts per task; default: the job's.")] = None,
    budget_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds for the whole job; default: the job's.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Compiling processes; default: one per CPU.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Without the GPU: compile only this many, the best by the model.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Repeat what earlier runs did.")] = False,
    format: As = Format.table,
) -> None:
    """Tune a job's problems for one GPU and store the winners in the database.

    Where the GPU is present, candidates are measured on it. Where it is not, they are compiled, ranked by a model
    and stored as predicted. An interrupted run resumes when started again.
    """
    from cutekernels.autotune.run import tune
    from cutekernels.errors import CuteKernelsError, JobError, UnknownGpu

    try:
        with _Progress(Console(stderr=True)) as progress:
            report = tune(
                job,
                gpu,
                db=db,
                trials=trials,
                budget_s=budget_s,
                jobs=jobs,
                limit=limit,
                force=force,
                watcher=progress,
            )
    except (JobError, UnknownGpu) as error:
        terminal.fail(str(error), code=2)
    except CuteKernelsError as error:
        terminal.fail(str(error))
    except KeyboardInterrupt:
        terminal.fail("interrupted; all measurements so far are stored, and the same command resumes the run")
    _print(report, format)
    raise typer.Exit(0 if report.ok else 1)


def _print(report: TuneReport, format: Format) -> None:
    if format is Format.json:
        typer.echo(report.as_json())
    elif format is Format.csv:
        typer.echo(report.as_csv(), nl=False)
    else:
        terminal.show(report.as_table())


class _Progress:
    """Draws a run on stderr: one bar for the tasks, one for the attempts of the current task."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # otherwise an empty line stands before each message
        )
        self._tasks: TaskID = self._progress.add_task("tasks", total=None)
        self._attempts: TaskID = self._progress.add_task("", total=None, visible=False)

    def __enter__(self) -> _Progress:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def begin(self, task: Task, number: int, of: int) -> None:
        self._progress.update(self._tasks, total=of, completed=number - 1)
        self._progress.reset(self._attempts, description=str(task), total=task.trials, visible=True)

    def trial(self, trial: Trial, done: int, wanted: int) -> None:
        self._progress.update(self._attempts, completed=done, total=wanted)
        if trial.status in ("wrong_result", "crashed", "timeout"):
            self._progress.console.print(
                f"{trial.status}: {trial.op} [{trial.problem}] with [{trial.config}]: {trial.message.splitlines()[0]}",
                style="yellow",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def end(self, report: TaskReport) -> None:
        self._progress.advance(self._tasks)
