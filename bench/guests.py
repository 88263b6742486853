"""``python -m bench guests``: a fused MoE tuned on this GPU, its exported table beside the default that it replaces.

The table is read back as an engine reads it, the nearest batch size's entry, and both configs are timed interleaved in
this process, with inputs of their own: at the tuned batch sizes, and between them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from statistics import geometric_mean
from typing import Annotated, Any

import typer

from cutekernels import gpu as gpus
from cutekernels import guests, terminal, verify
from cutekernels.errors import CuteKernelsError
from cutekernels.guests import tables
from cutekernels.guests.fused_moe import FusedMoe, FusedMoeConfig, FusedMoeProblem
from cutekernels.terminal import As, Format

EXAMPLE = "examples.fused_moe:fused_moe"
LAYER = "experts=128 n=768 k=2048 top_k=8"  # Qwen3-30B-A3B
TUNED = tuple(1 << i for i in range(13))
BETWEEN = (3, 12, 40, 200, 700, 3000)
_MOST_SETS = 64


class Form(StrEnum):
    """The engine whose form the table has."""

    vllm = "vllm"
    sglang = "sglang"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Line:
    """One batch size: the default's time over the table's, with its 95 % interval, and the worse error of the two."""

    m: int
    tuned: bool
    default_us: float
    table_us: float
    ratio: float
    low: float
    high: float
    error: float
    config: str


def entry(table: dict[str, dict[str, int]], m: int) -> FusedMoeConfig:
    """The config of a table for ``m`` tokens, by the engines' rule: the nearest batch size's, the first of two."""
    sizes = {int(size): values for size, values in table.items()}
    return FusedMoeConfig(**sizes[min(sizes, key=lambda size: abs(size - m))])


def compare(moe: FusedMoe, layer: str, table: dict[str, dict[str, int]], batches: Sequence[int]) -> list[Line]:
    """Times the default and the table's entry at each of ``batches`` on this GPU."""
    from cutekernels.measure import l2_rotation, time_interleaved

    spec = gpus.detect()
    weights = moe.sample(FusedMoeProblem.parse(f"m=1 {layer}"), "cuda", 77)
    found = []
    for m in batches:
        p = FusedMoeProblem.parse(f"m={m} {layer}")
        count = min(_MOST_SETS, l2_rotation(int(moe.work(p).bytes), spec.l2_bytes))
        sets = [moe.variant(p, weights, 1000 + i) for i in range(count)]
        posed = [(moe.outputs(p, *args), args) for args in sets]
        work, expected = moe.work(p), moe.reference(p, *sets[0])
        configs = {"default": moe.default(p, spec), "table": entry(table, m)}
        errors, launches = [], {}
        for name, config in configs.items():
            launch = moe.bind(p, config, _unused)
            verify.poison(posed[0][0])
            launch(*posed[0][0], *posed[0][1])
            errors.append(verify.worst_error(posed[0][0], expected, work.flops, depth=work.depth))
            launches[name] = [partial(launch, *outputs, *args) for outputs, args in posed]
        us = time_interleaved(launches, rounds=30)
        ratio = us["table"].ratio(us["default"])
        times = us["default"].median, us["table"].median
        bounds = ratio.value, ratio.low, ratio.high
        found.append(Line(m, str(m) in table, *times, *bounds, max(errors), str(configs["table"])))
    return found


def _unused(*args: Any) -> None:
    """A guest's own call launches its kernel."""


def table_of(format: str, db: str, op: str, gpu: str, layer: str) -> tuple[str, dict[str, dict[str, int]]]:
    """The table of ``op`` for a layer, its problem's text without ``m``, on a GPU, with its name."""
    from cutekernels.db.store import Store

    with Store(db, readonly=True) as store:
        rows = [t for t in store.winners(gpu=gpu, op=op) if t.problem.partition(" ")[2] == layer]
        (made,) = tables.tables(format, rows, op=op)
    return made.path, json.loads(made.text())


def rows(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """One row a batch."""
    return [
        {
            "m": line.m,
            "tuned at": "itself" if line.tuned else "nearest",
            "default us": round(line.default_us, 2),
            "table us": round(line.table_us, 2),
            "default / table": round(line.ratio, 3),
            "95 %": f"{line.low:.3f} to {line.high:.3f}",
            "error": round(line.error, 3),
            "config": line.config,
        }
        for line in lines
    ]


def summary(lines: Sequence[Line]) -> str:
    """The mean at the tuned batch sizes, the worst anywhere, and whether anything is wrong."""
    mean = geometric_mean([line.ratio for line in lines if line.tuned])
    worst = min(lines, key=lambda line: line.ratio)
    slower = sum(line.high < 1 for line in lines)
    wrong = sum(line.error > 1 for line in lines)
    return (
        f"{mean:.3f} times as fast as the default in the geometric mean of the tuned batch sizes; "
        f"worst {worst.ratio:.3f} at m={worst.m}; {slower} of {len(lines)} slower with confidence, {wrong} wrong"
    )


@app.command()
def command(
    guest: Annotated[str, typer.Option(metavar="MODULE:FUNCTION", help="A fused MoE, ready or your own.")] = EXAMPLE,
    layer: Annotated[str, typer.Option(help="Its problem without m.")] = LAYER,
    trials: Annotated[int, typer.Option(min=1, help="Attempts at each batch size.")] = 32,
    budget_s: Annotated[float, typer.Option(min=1, help="Seconds for the tune; comparing takes some 20 more.")] = 120,
    table_format: Annotated[Form, typer.Option("--table", help="Whose form of table.")] = Form.vllm,
    db: Annotated[str | None, typer.Option(help="Keep the rows in this database.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the tasks; needs no GPU.")] = False,
    format: As = Format.table,
) -> None:
    """Tune a fused MoE at batch sizes from 1 to 4096, and time its table against the default it replaces."""
    from cutekernels.autotune.job import Job, Task
    from cutekernels.autotune.outlook import listed
    from cutekernels.autotune.run import tune

    moe = guests.load(guest)
    if not isinstance(moe, FusedMoe):
        terminal.fail(f"{guest} is no FusedMoe", code=2)
    problems = [FusedMoeProblem.parse(f"m={m} {layer}") for m in TUNED]
    job = Job("guests", tuple(Task(moe, p, trials) for p in problems))
    if dry_run:
        terminal.write(listed(job), format)
        return
    with tempfile.TemporaryDirectory() as folder:
        kept = db or f"{folder}/tuned.db"
        try:
            report = tune(job, db=kept, budget_s=budget_s)
            name, table = table_of(table_format, kept, guest, gpus.detect().name, str(problems[0]).partition(" ")[2])
            lines = compare(moe, layer, table, sorted({*map(int, table), *BETWEEN}))
        except CuteKernelsError as error:
            terminal.fail(str(error))
    terminal.say(report.headline())
    for task in report.tasks:
        if task.message:
            terminal.say(f"[{task.problem}] {task.state}: {task.message}")
    terminal.write(rows(lines), format)
    terminal.say(f"{name} on {gpus.detect().product}: {summary(lines)}")
    if any(line.error > 1 for line in lines):
        terminal.fail("a config of the table, or the default, is wrong")
