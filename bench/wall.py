"""Options, rows as they come and tables that the commands share; and rows of wall times."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.table import Table
from rich.text import Text

from bench.rows import Row, write
from cutekernels import gpu as gpus
from cutekernels import terminal
from cutekernels.errors import UnknownGpu
from cutekernels.measure import Samples

if TYPE_CHECKING:
    import torch

RESULTS = Path(__file__).parent / "results"
C = TypeVar("C")
Place = tuple[str, str, str, str]  # op, suite, problem and label of a row

Match = Annotated[list[str] | None, typer.Option(help="Only cases with one of these in their name or sizes.")]
Rounds = Annotated[int, typer.Option(min=5, help="Samples of each contender.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the results; default bench/results/<gpu> or one in it.")]
Commit = Annotated[str | None, typer.Option(help="The commit under test, where .git was left behind.")]
As = Annotated[str | None, typer.Option("--as", help="Let this GPU stand in for one with less: a100, l40s, rtx5090.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the cases and contenders; time nothing.")]


def chosen(cases: Iterable[C], match: Sequence[str] | None, name: Callable[[C], str]) -> list[C]:
    """The cases that ``--match`` leaves; ends the process where it leaves none."""
    found = [case for case in cases if not match or any(each in name(case) for each in match)]
    return found or terminal.fail(
        f"no case has {' or '.join(map(repr, match or ()))} in its name or sizes; --dry-run lists them", code=2
    )


def detect_gpu(stands_for: str | None = None) -> gpus.GpuSpec:
    """This machine's GPU, as the stand-in for another where one is named; ends the process where there is none.

    Triton's products keep to the MMA of a warp then, as ours do.
    """
    try:
        gpus.lookup("auto")
    except UnknownGpu:
        terminal.fail("no CUDA device is visible, and times are only taken on one; --dry-run lists what would be timed")
    try:
        gpu = gpus.choose("auto", stands_for)
    except UnknownGpu as error:
        terminal.fail(str(error), code=2)
    if gpu.confined_to is not None and not gpu.has_wgmma:
        os.environ["DISABLE_MMA_V3"] = "1"
    return gpu


def record(rows: Iterable[Row], path: Path, table: Callable[[list[Row]], Table]) -> None:
    """Write ``path`` after each row, so that an interrupted run keeps its measurements; show all at the end."""
    kept: list[Row] = []
    for row in rows:
        kept.append(row)
        write(path, kept)
        terminal.say(f"{row.suite} {row.label}: {row.contender} {row.median_us or row.reason}")
    terminal.show(table(kept))
    terminal.say(f"{len(kept)} rows in {path}")


def timed(place: Place, contender: str, us: Sequence[float], **more: Any) -> Row:
    """A row of wall times."""
    found = Samples(tuple(us))
    about: dict[str, Any] = {"l2": "warm", "rounds": len(us), "median_us": found.median}
    about |= {"p20_us": found.p20, "p80_us": found.p80} | more
    return Row(*place, 1.0, 0.0, contender, "ok", **about)


def untimed(place: Place, contender: str, error: BaseException, **more: Any) -> Row:
    """A row of a contender that is not installed, or failed."""
    status = "absent" if isinstance(error, ImportError) else "failed"
    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return Row(*place, 1.0, 0.0, contender, status, reason, **more)


def wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget() -> None:
    """Drop graphs, compiled code, caches and free memory of the contender before."""
    import torch

    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def tabulated(
    title: str, rows: Iterable[C], left: Mapping[str, Callable[[C], str]], right: Mapping[str, Callable[[C], str]],
    last: Mapping[str, Callable[[C], Text | str]], caption: str = "",
) -> Table:  # fmt: skip
    """A table of ``rows``, without columns that are empty: words to the left, numbers, and words that may be long."""
    rows = [*rows]
    shown = Table(title=title, caption=caption or None)
    cells: list[list[Text | str]] = []
    for named in (left, right, last):
        for name, text in named.items():
            found = [text(row) for row in rows]
            if any(found):
                justify: Literal["right", "left"] = "right" if named is right else "left"
                shown.add_column(name, justify=justify, overflow="fold" if named is last else "ellipsis")
                cells.append(found)
    for row in zip(*cells, strict=True):
        shown.add_row(*row)
    return shown


def number(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "" if value is None else f"{factor * value:.{digits}f}"


def table(rows: list[Row]) -> Table:
    """All rows of wall times, failed ones too."""
    right: dict[str, Callable[[Row], str]] = {
        "median ms": lambda r: number(r.median_us, 3, 1e-3) or r.status,
        "p20 to p80": lambda r: f"{r.p20_us / 1e3:.3f} to {r.p80_us / 1e3:.3f}" if r.p20_us and r.p80_us else "",
        "GiB": lambda r: number(r.memory_gib, 1),
        "speedup": lambda r: number(r.speedup, 2),
        "error": lambda r: number(r.error, 2),
    }
    title = f"{rows[0].op} on {rows[0].stamp.get('gpu', '?')}, wall time"
    return tabulated(title, rows, PLACE | {"contender": lambda r: r.contender}, right, {"reason": lambda r: r.reason})


PLACE: dict[str, Callable[[Row], str]] = {"suite": lambda r: r.suite, "case": lambda r: r.label}
