"""What ``host``, ``models`` and ``training`` share: their options, rows as they come, and a table of wall times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.table import Table

from bench.rows import Row, write
from cutekernels import gpu as gpus
from cutekernels import terminal
from cutekernels.errors import UnknownGpu
from cutekernels.measure import Samples

RESULTS = Path(__file__).parent / "results"
C = TypeVar("C")

Match = Annotated[list[str] | None, typer.Option(help="Only cases with one of these in their name or sizes.")]
Rounds = Annotated[int, typer.Option(min=5, help="Samples of each contender.")]
Out = Annotated[Path | None, typer.Option(help="Folder; default that of this command in bench/results/<gpu>.")]
Commit = Annotated[str | None, typer.Option(help="The commit under test, where .git was left behind.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the cases and contenders; time nothing.")]


def chosen(cases: Iterable[C], match: Sequence[str] | None, name: Callable[[C], str]) -> list[C]:
    """The cases that ``--match`` leaves; ends the process where it leaves none."""
    found = [case for case in cases if not match or any(each in name(case) for each in match)]
    return found or terminal.fail(
        f"no case has {' or '.join(map(repr, match or ()))} in its name or sizes; --dry-run lists them", code=2
    )


def detected() -> gpus.GpuSpec:
    """This machine's GPU; ends the process where there is none."""
    try:
        return gpus.lookup("auto")
    except UnknownGpu:
        terminal.fail("no CUDA device is visible, and times are only taken on one; --dry-run lists what would be timed")


def record(rows: Iterable[Row], path: Path, table: Callable[[list[Row]], Table]) -> None:
    """Write ``path`` after each row, so that an interrupted run keeps its measurements; show all at the end."""
    kept: list[Row] = []
    for row in rows:
        kept.append(row)
        write(path, kept)
        terminal.say(f"{row.suite} {row.label}: {row.contender} {row.median_us or row.reason}")
    terminal.show(table(kept))
    terminal.say(f"{len(kept)} rows in {path}")


def timed(place: Sequence[str], contender: str, us: Sequence[float], **more: Any) -> Row:
    """A row of wall times; ``place`` is op, suite, problem and label."""
    found = Samples(tuple(us))
    quantiles = {"median_us": found.median, "p20_us": found.p20, "p80_us": found.p80}
    return Row(*place, 1.0, 0.0, contender, "ok", l2="warm", rounds=len(us), **(quantiles | more))


def untimed(place: Sequence[str], contender: str, error: BaseException, **more: Any) -> Row:
    """A row of a contender that is not installed, or failed."""
    status = "absent" if isinstance(error, ImportError) else "failed"
    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return Row(*place, 1.0, 0.0, contender, status, reason, **more)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(rows: list[Row]) -> Table:
    """All rows, failed ones too, without columns that are empty."""
    columns: dict[str, Callable[[Row], str]] = {
        "median ms": lambda r: f"{r.median_us / 1e3:.3f}" if r.median_us else r.status,
        "p20 to p80": lambda r: f"{r.p20_us / 1e3:.3f} to {r.p80_us / 1e3:.3f}" if r.p20_us and r.p80_us else "",
        "GiB": lambda r: "" if r.memory_gib is None else f"{r.memory_gib:.1f}",
        "speedup": lambda r: "" if r.speedup is None else f"{r.speedup:.2f}",
        "error": lambda r: "" if r.error is None else f"{r.error:.2f}",
        "reason": lambda r: r.reason,
    }
    cells = {name: [text(row) for row in rows] for name, text in columns.items()}
    shown = Table("suite", "case", "contender", title=f"{rows[0].op} on {rows[0].stamp.get('gpu', '?')}, wall time")
    for name in (name for name, texts in cells.items() if any(texts)):
        shown.add_column(name, justify="left" if name == "reason" else "right", overflow="fold")
    for row, *texts in zip(rows, *[texts for texts in cells.values() if any(texts)], strict=True):
        shown.add_row(row.suite, row.label, row.contender, *texts)
    return shown
