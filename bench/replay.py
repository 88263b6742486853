"""Tunes simulated on recorded sweeps: what an order of trying has found after 16 and 32 attempts.

A sweep is a JSON line for each config of a problem, with at least ``op``, ``problem``, ``config``, ``us``,
``model_us`` and ``default``; ``p20`` and ``p80`` give its noise, and a line without ``us`` is a config that failed.
"""

from __future__ import annotations

import json
import lzma
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import optuna
import typer

from cutekernels import terminal
from cutekernels.autotune import samplers
from cutekernels.autotune.space import Space
from cutekernels.autotune.studies import Studies
from cutekernels.autotune.study import PATIENCE, Attempt, Study, since_improved
from cutekernels.errors import CuteKernelsError, JobError
from cutekernels.op import Scalar
from cutekernels.ops import registry
from cutekernels.terminal import As, Format

SWEEPS = Path(__file__).parent / "sweeps"
READS = ("op", "revision", "problem", "config", "default", "us", "p20", "p80", "model_us")
MARKS = (16, 32)
ORDERS = "chance,model,random,tpe"


@dataclass(frozen=True)
class Sweep:
    """All measured configs of one problem; ``us`` is None where a config failed."""

    op: str
    problem: str
    knobs: tuple[str, ...]
    rows: tuple[tuple[Scalar, ...], ...]
    us: tuple[float | None, ...]
    noise: tuple[float, ...]
    model_us: tuple[float, ...]
    default: int

    @cached_property
    def space(self) -> Space:
        return Space(tuple(range(len(self.rows))), self.knobs, self.rows, self.model_us)

    def draw(self, row: int, dice: random.Random) -> float | None:
        """One measured value of a config: the logarithm of its time over the default's, with noise."""
        us, base = self.us[row], self.us[self.default]
        if us is None or base is None:
            return None
        return math.log(us / base) + dice.gauss(0.0, self.noise[row])


def files(folder: Path) -> list[Path]:
    """The sweeps in ``folder``; or ``folder`` itself, where it is one."""
    return [folder] if folder.is_file() else sorted(folder.rglob("*.jsonl.xz"))


def recorded(folder: Path) -> Iterator[dict[str, Any]]:
    """Every line of the sweeps in ``folder``. Raises CuteKernelsError for a line that is none."""
    for file in files(folder):
        read = 0
        try:
            with lzma.open(file, "rt", encoding="utf-8") as lines:
                for line in lines:
                    yield _sound(json.loads(line))
                    read += 1
        except (OSError, EOFError, lzma.LZMAError, ValueError, RecursionError) as error:
            raise CuteKernelsError(f"{file}, line {read + 1}, is not of a sweep: {error}") from error


def _sound(row: object) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError("a line is a JSON object")
    for name in ("op", "problem", "config"):
        if not isinstance(row.get(name, ""), str):
            raise ValueError(f"{name} is a text; it is {row[name]!r:.40}")
    if type(row.get("revision", 1)) is not int:
        raise ValueError(f"revision is a whole number; it is {row['revision']!r:.40}")
    if "config" in row and (op := registry.find(row.get("op", ""))):
        row["config"] = op.spelled(row.get("revision", 1), row.get("problem", ""), row["config"])
    for name in ("us", "p20", "p80", "model_us") if "config" in row else ():
        value = row.get(name)
        if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
            raise ValueError(f"{name} is a number of microseconds above 0; it is {value!r:.40}")
    return row


def load(folder: Path = SWEEPS) -> list[Sweep]:
    """The sweeps in ``folder``, except those of fewer than twelve configs, where every order does equally well."""
    found: dict[tuple[str, str], list[dict[str, object]]] = {}
    for row in recorded(folder):
        if {"op", "problem", "config", "model_us", "default"} <= row.keys():
            found.setdefault((row["op"], row["problem"]), []).append(row)
    made = (_sweep(op, problem, rows) for (op, problem), rows in found.items())
    return [sweep for sweep in made if sweep is not None and len(sweep.rows) >= 12]


def _sweep(op: str, problem: str, lines: list[dict[str, object]]) -> Sweep | None:
    configs: list[dict[str, Scalar]] = [
        {
            name: int(raw) if raw.isdigit() else raw
            for name, _, raw in (w.partition("=") for w in str(r["config"]).split())
        }
        for r in lines
    ]
    knobs = tuple(dict.fromkeys(name for config in configs for name in config))
    default = next((i for i, r in enumerate(lines) if r["default"]), None)
    if default is None or lines[default].get("us") is None:
        return None
    us = tuple(_number(r.get("us")) for r in lines)
    noise = []
    for r, mid in zip(lines, us, strict=True):
        low, high = _number(r.get("p20")), _number(r.get("p80"))
        # The spread of one sample over that of a median of twenty.
        noise.append(0.0 if not (mid and low and high) else math.log(high / low) / 1.68 * 1.25 / math.sqrt(20))
    # A knob that a text leaves out has its default, which no value in the sweep equals.
    rows = tuple(tuple(config.get(name, -1) for name in knobs) for config in configs)
    model = tuple(_number(r["model_us"]) or math.inf for r in lines)
    return Sweep(op, problem, knobs, rows, us, tuple(noise), model, default)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


# ---- orders -------------------------------------------------------------------------------------------------

Order = Callable[[Sweep, random.Random], Iterator[int]]


def by_chance(sweep: Sweep, dice: random.Random) -> Iterator[int]:
    """The seeds, then any."""
    first = sweep.space.openers([sweep.default])
    rest = [i for i in range(len(sweep.rows)) if i not in set(first)]
    dice.shuffle(rest)
    yield from [*first, *rest]


def by_model(sweep: Sweep, dice: random.Random) -> Iterator[int]:
    """The default, then by the analytical model."""
    rest = [i for i in range(len(sweep.rows)) if i != sweep.default]
    yield from [sweep.default, *sorted(rest, key=lambda i: (sweep.model_us[i], i))]


def by_sampler(name: str) -> Order:
    """The tuner's: the seeds, then what a sampler of Optuna's proposes, and what it leaves out at the end."""

    def order(sweep: Sweep, dice: random.Random) -> Iterator[int]:
        sampler = samplers.make(name, dice.randrange(1 << 30), sweep.space.branches)
        study = Study(
            optuna.create_study(storage=Studies().storage),
            sampler,
            sweep.space,
            sweep.space.openers([sweep.default]),
            {},
        )
        left = dict.fromkeys(range(len(sweep.rows)))
        while (row := study.next()) is not None:
            del left[row]
            yield row
            value = sweep.draw(row, dice)
            study.observe(row, Attempt(None if value is None else math.exp(value)))
        yield from left

    return order


def order_of(name: str) -> Order:
    """``chance``, ``model``, or a sampler of Optuna's. Raises JobError for no such name."""
    own = {"chance": by_chance, "model": by_model}
    return own.get(name) or by_sampler(samplers.checked(name))


@dataclass(frozen=True)
class Tune:
    """A simulated tune: true times over the best one's, of the config that looked best so far."""

    found: tuple[float, ...]  # after each attempt
    ended: int  # attempts after which the tuner would have ended

    def at(self, attempts: int) -> float:
        return self.found[min(attempts, len(self.found)) - 1]


def tune(sweep: Sweep, order: Order, seed: int, most: int = max(MARKS)) -> Tune:
    """The first ``most`` attempts, each measured with the sweep's own noise."""
    best = min(us for us in sweep.us if us is not None)
    noise, seeds = random.Random(~seed), len(sweep.space.openers([sweep.default]))
    values: list[float | None] = []
    found: list[float] = []
    leader, ended = (math.inf, sweep.default), 0
    for row in islice(order(sweep, random.Random(seed)), most):
        value = sweep.draw(row, noise)
        values.append(None if value is None else math.exp(value))
        leader = leader if value is None else min(leader, (value, row))
        found.append((sweep.us[leader[1]] or math.inf) / best)
        if not ended and len(values) >= seeds and since_improved(values) >= PATIENCE:
            ended = len(values)
    return Tune(tuple(found), ended or len(found))


# ---- the command line ---------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    folder: Annotated[Path, typer.Option(help="Where the sweeps are.")] = SWEEPS,
    orders: Annotated[str, typer.Option(help="chance, model, samplers of Optuna's; with commas.")] = ORDERS,
    seeds: Annotated[int, typer.Option(min=1, help="Tunes of each sweep and order.")] = 10,
    least: Annotated[int, typer.Option(min=1, help="Only sweeps of so many configs.")] = 12,
    format: As = Format.table,
) -> None:
    """Replay tunes on recorded sweeps: what each order has found after 16 and 32 attempts, over the best.

    The last column is the difference to chance, with its 95 % interval over sweeps.
    """
    try:
        chosen = {name: order_of(name) for name in orders.split(",")}
        sweeps = [sweep for sweep in load(folder) if len(sweep.rows) >= least]
    except CuteKernelsError as error:
        terminal.fail(str(error), code=2 if isinstance(error, JobError) else 1)
    if not sweeps:
        terminal.fail(f"no sweep of {least} configs or more in {folder}", code=2)
    every = {name: [[tune(s, order, seed) for seed in range(seeds)] for s in sweeps] for name, order in chosen.items()}
    rows = []
    for name, each in every.items():
        row: dict[str, Any] = {"order": name, "sweeps": len(sweeps), "tunes": len(sweeps) * seeds}
        for mark in MARKS:
            row[f"found at {mark}"] = f"{mean(t.at(mark) for tunes in each for t in tunes):.4f}"
        row["attempts"] = round(mean(t.ended for tunes in each for t in tunes), 1)
        row["found at end"] = f"{mean(t.at(t.ended) for tunes in each for t in tunes):.4f}"
        row["behind chance at 16"] = _behind(each, every["chance"]) if "chance" in every else None
        rows.append(row)
    terminal.write(rows, format)


def _behind(mine: Sequence[Sequence[Tune]], chance: Sequence[Sequence[Tune]]) -> str:
    """The mean difference at the first mark, and half of its 95 % interval over sweeps."""
    gaps = [
        mean(t.at(MARKS[0]) for t in a) - mean(t.at(MARKS[0]) for t in b) for a, b in zip(mine, chance, strict=True)
    ]
    half = 1.96 * stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf
    return f"{mean(gaps):+.2%} ± {half:.2%}"
