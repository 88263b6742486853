"""Tunes simulated on recorded sweeps: how many attempts an order of trying needs to 97 % and 99 % of the best.

A sweep is a JSON line for each config of a problem, with at least ``op``, ``problem``, ``config``, ``us``,
``model_us`` and ``default``; ``p20`` and ``p80`` give its noise, and a line without ``us`` is a config that failed.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer

from cutekernels import terminal
from cutekernels.autotune.chooser import Chooser, spread
from cutekernels.autotune.suggest import MODEL_SEEDS, is_shape
from cutekernels.errors import CuteKernelsError
from cutekernels.op import Scalar
from cutekernels.terminal import As, Format

SWEEPS = Path(__file__).parent / "sweeps"
SHARES = (0.97, 0.99)


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

    def reached(self, share: float) -> set[int]:
        """Configs that run at ``share`` of the best's speed or more."""
        best = min(us for us in self.us if us is not None)
        return {i for i, us in enumerate(self.us) if us is not None and best / us >= share}

    def draw(self, row: int, dice: random.Random) -> float | None:
        """One measured value of a config: the logarithm of its time over the default's, with noise."""
        us, base = self.us[row], self.us[self.default]
        if us is None or base is None:
            return None
        return math.log(us / base) + dice.gauss(0.0, self.noise[row])


def files(folder: Path) -> list[Path]:
    """The sweeps in ``folder``; or ``folder`` itself, where it is one."""
    return [folder] if folder.is_file() else sorted(folder.rglob("*.jsonl.gz"))


def recorded(folder: Path) -> Iterator[dict[str, Any]]:
    """Every line of the sweeps in ``folder``. Raises CuteKernelsError for a line that is none."""
    for file in files(folder):
        read = 0
        try:
            with gzip.open(file, "rt", encoding="utf-8") as lines:
                for line in lines:
                    yield _sound(json.loads(line))
                    read += 1
        except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
            raise CuteKernelsError(f"{file}, line {read + 1}, is not of a sweep: {error}") from error


def _sound(row: object) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError("a line is a JSON object")
    for name in ("op", "problem", "config"):
        if not isinstance(row.get(name, ""), str):
            raise ValueError(f"{name} is a text; it is {row[name]!r:.40}")
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
    """The default, then any."""
    rest = [i for i in range(len(sweep.rows)) if i != sweep.default]
    dice.shuffle(rest)
    yield from [sweep.default, *rest]


def by_model(sweep: Sweep, dice: random.Random) -> Iterator[int]:
    """The default, then by the analytical model."""
    rest = [i for i in range(len(sweep.rows)) if i != sweep.default]
    yield from [sweep.default, *sorted(rest, key=lambda i: (sweep.model_us[i], i))]


def ours(sweep: Sweep, dice: random.Random) -> Iterator[int]:
    """The tuner's: spread seeds, then expected improvement."""
    shapes = [i for i, name in enumerate(sweep.knobs) if is_shape(name)]
    first = [sweep.default, *spread(sweep.rows, shapes, sweep.model_us, MODEL_SEEDS)]
    chooser = Chooser(sweep.rows, sweep.model_us, first)
    while (row := chooser.next()) is not None:
        yield row
        chooser.observe(row, sweep.draw(row, dice))


def by_tpe(sweep: Sweep, dice: random.Random) -> Iterator[int]:
    """The tuner's before: the model's eight best, then Optuna's TPE, moved to the nearest untried config."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    values = {name: sorted({row[i] for row in sweep.rows}, key=str) for i, name in enumerate(sweep.knobs)}
    space: dict[str, Any] = {n: optuna.distributions.CategoricalDistribution(v) for n, v in values.items()}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=dice.randrange(1 << 30)))
    untried = dict.fromkeys(range(len(sweep.rows)))
    first = [sweep.default, *list(by_model(sweep, dice))[1:9]]
    while untried:
        if first:
            row = first.pop(0)
        else:
            trial = study.ask(space)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            wanted = tuple(trial.params[name] for name in sweep.knobs)
            row = min(untried, key=lambda i: sum(a != b for a, b in zip(sweep.rows[i], wanted, strict=True)))
        del untried[row]
        yield row
        value = sweep.draw(row, dice)
        state = optuna.trial.TrialState.PRUNED if value is None else optuna.trial.TrialState.COMPLETE
        params = dict(zip(sweep.knobs, sweep.rows[row], strict=True))
        study.add_trial(optuna.trial.create_trial(state=state, value=value, params=params, distributions=space))


ORDERS: dict[str, Order] = {"random": by_chance, "model": by_model, "tpe": by_tpe, "ours": ours}


def attempts(sweep: Sweep, order: Order, seed: int, shares: Sequence[float] = SHARES) -> list[int]:
    """Attempts until a config of each share of the best's speed was tried."""
    goals = [sweep.reached(share) for share in shares]
    found = [0] * len(shares)
    for number, row in enumerate(order(sweep, random.Random(seed)), 1):
        found = [n or (number if row in goal else 0) for n, goal in zip(found, goals, strict=True)]
        if all(found):
            break
    return found


def medians(sweeps: Sequence[Sweep], order: Order, seeds: int) -> list[float]:
    """Median over sweeps of the median over seeds, for each share."""
    each = [[attempts(sweep, order, seed) for seed in range(seeds)] for sweep in sweeps]
    return [median(median(run[share] for run in runs) for runs in each) for share in range(len(SHARES))]


# ---- the command line ---------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    folder: Annotated[Path, typer.Option(help="Where the sweeps are.")] = SWEEPS,
    orders: Annotated[str, typer.Option(help="Which orders, with commas between.")] = ",".join(ORDERS),
    seeds: Annotated[int, typer.Option(min=1, help="Tunes of each sweep and order.")] = 10,
    format: As = Format.table,
) -> None:
    """Replay tunes on recorded sweeps; print the attempts to 97 % and 99 % of the best for each order."""
    try:
        sweeps = load(folder)
    except CuteKernelsError as error:
        terminal.fail(str(error))
    unknown = set(orders.split(",")) - ORDERS.keys()
    if unknown or not sweeps:
        terminal.fail(
            f"no order is called {min(unknown)!r}; known: {', '.join(ORDERS)}" if unknown else f"no sweep in {folder}",
            code=2,
        )
    rows = []
    for name in orders.split(","):
        each = [[attempts(sweep, ORDERS[name], seed) for seed in range(seeds)] for sweep in sweeps]
        row: dict[str, Any] = {"order": name, "sweeps": len(sweeps), "tunes": len(sweeps) * seeds}
        for i, share in enumerate(SHARES):
            found = sorted(median(run[i] for run in runs) for runs in each)
            row[f"median to {share:.0%}"] = median(found)
            row[f"90 % to {share:.0%}"] = found[int(0.9 * len(found))]
            row[f"mean to {share:.0%}"] = round(mean(run[i] for runs in each for run in runs), 2)
        rows.append(row)
    terminal.write(rows, format, pipe_width=terminal.PIPE_WIDTH)
