"""The outcome of a run: one line per task, as a table, JSON or CSV. The numbers come from the trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cutekernels import terminal

if TYPE_CHECKING:
    from rich.table import Table

    from cutekernels.db.storage.store import Trial


@dataclass(frozen=True)
class TaskReport:
    """One task's outcome.

    Attributes:
        state: "tuned": measured in this run, winner crowned; "predicted": compiled and ranked by the model, the best
            crowned as predicted; "done": earlier runs did enough; "unfinished": run again to go on, the message may say
            why; "failed": no winner, the message says why.
        winner: the crowned trial, if there is one.
        default: the default config's text, to tell whether the winner is it.
        attempts: number of rows this run wrote, by status; configs that a rule refused count as ``invalid``.
        resumed: attempts of earlier runs that this one did not repeat.
        gpu: the name of the GPU that did it, or for which it was predicted.
    """

    op: str
    problem: str
    state: str
    winner: Trial | None
    default: str
    attempts: Mapping[str, int] = field(default_factory=dict)
    resumed: int = 0
    seconds: float = 0.0
    message: str = ""
    gpu: str = ""

    @property
    def measured(self) -> int:
        """Attempts of this run that reached the compiler or the GPU."""
        return sum(count for status, count in self.attempts.items() if status != "invalid")

    @property
    def config(self) -> str | None:
        """The winner's config in the words of the op's revision."""
        from cutekernels.db.questions.query import spell

        w = self.winner
        return None if w is None else spell(self.op, w.revision, w.problem, w.config)

    def as_row(self) -> dict[str, Any]:
        """Plain values, for JSON and CSV."""
        w, config = self.winner, self.config
        return {
            "gpu": self.gpu,
            "op": self.op,
            "problem": self.problem,
            "state": self.state,
            "config": config,
            "is_default": config == self.default if w else None,
            "origin": w.origin if w else None,
            "median_us": w.median_us if w else None,
            "ratio": w.ratio if w else None,
            "ratio_low": w.ratio_low if w else None,
            "ratio_high": w.ratio_high if w else None,
            "attempts": dict(self.attempts),
            "measured": self.measured,
            "resumed": self.resumed,
            "seconds": round(self.seconds, 2),
            "message": self.message,
        }


@dataclass(frozen=True)
class TuneReport:
    """A job's outcome on one GPU, or on each kind of a fleet (``"h200, l40s"``).

    ``origin`` says whether times were measured or predicted.
    """

    job: str
    gpu: str
    origin: str
    tasks: tuple[TaskReport, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """No task failed, and each has a winner: the time did not end before the first."""
        return all(task.state != "failed" and task.winner is not None for task in self.tasks)

    @property
    def measured(self) -> int:
        return sum(task.measured for task in self.tasks)

    def as_json(self) -> str:
        return terminal.as_json(
            {
                "job": self.job,
                "gpu": self.gpu,
                "origin": self.origin,
                "seconds": round(self.seconds, 2),
                "measured": self.measured,
                "tasks": [task.as_row() for task in self.tasks],
            }
        )

    def as_csv(self) -> str:
        return terminal.as_csv([{**task.as_row(), "attempts": counts(task.attempts)} for task in self.tasks])

    def as_table(self) -> Table:
        from rich.markup import escape
        from rich.table import Table

        several = len({task.gpu for task in self.tasks}) > 1
        table = Table(title=self.headline(), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 1, 0))
        table.add_column("problem and winner", overflow="fold")
        table.add_column("us", justify="right")
        table.add_column("speed over default", justify="right")
        table.add_column("this run", overflow="fold")
        for task in self.tasks:
            w = task.winner
            config = task.config or "no winner"
            config = f"default: {config}" if config == task.default else config
            origin = "" if w is None else f"\n{w.origin}"
            done = [task.state, counts(task.attempts), f"{task.resumed} resumed" if task.resumed else "", task.message]
            table.add_row(
                escape(f"{task.op} {task.problem}{f' on {task.gpu}' if several else ''}\n{config}{origin}"),
                "" if w is None or w.median_us is None else f"{w.median_us:.2f}",
                escape(times_faster(w).replace(" [", "\n[")) if w else "",
                escape("; ".join(part for part in done if part)),
            )
        return table

    def headline(self) -> str:
        """One sentence: the request and what was done."""
        verb = "measured" if self.origin == "measured" else "predicted (no such GPU here)"
        late = sum(task.state == "unfinished" for task in self.tasks)
        nothing = "nothing done" if late or not self.tasks else "nothing measured, all of it resumed"
        done = (f"{self.measured} attempts" if self.measured else nothing) + (f", {late} unfinished" if late else "")
        return f"{self.job} on {self.gpu}, {verb}: {len(self.tasks)} tasks, {done}, {self.seconds:.0f} s"


def counts(attempts: Mapping[str, int]) -> str:
    """``"23 ok, 2 pruned"``."""
    return ", ".join(f"{count} {status}" for status, count in attempts.items() if count)


def times_faster(trial: Trial) -> str:
    """The ratio to the default, ``""`` where there is none, with its interval where it was measured."""
    if trial.ratio is None:
        return ""
    measured = trial.ratio_low is not None and trial.ratio_high is not None
    return f"{trial.ratio:.3f}" + (f" [{trial.ratio_low:.3f}, {trial.ratio_high:.3f}]" if measured else "")
