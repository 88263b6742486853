"""Sweeps: recorded times of many configs of one problem, and how well the ops' models rank them.

``python -m bench sweep OP --problem TEXT`` measures one: each config beside the default, by the tuner's own worker.
``python -m bench estimates`` holds today's models against all of them. A prediction for a GPU that is absent is worth
what these models are where measurements exist; it flatters them that some constants were fitted on these runs.

A line of a sweep is a config: JSON with at least ``op``, ``problem`` and ``config``, and ``us`` unless it failed.
"""

from __future__ import annotations

import json
import lzma
import math
import os
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from statistics import StatisticsError, correlation, geometric_mean, median
from typing import Annotated, Any

import typer

from bench.rows import rounded
from bench.wall import As
from cutekernels import environment, terminal
from cutekernels import gpu as gpus
from cutekernels.autotune.requests import Measure, Outcome, Prepare
from cutekernels.autotune.runtime import LocalRuntime, Runtime
from cutekernels.autotune.search import prune_reason
from cutekernels.backends import Facts
from cutekernels.errors import CuteKernelsError
from cutekernels.gpu import GpuSpec
from cutekernels.isolate import ChildFailure
from cutekernels.measure import Samples
from cutekernels.op import Config, Op, Problem
from cutekernels.ops import registry
from cutekernels.terminal import Format

SWEEPS = Path(__file__).parent / "sweeps"
TOP, NEAR, LEAST_CONFIGS = 8, 1.05, 11
AT_ONCE = 8  # configs that take turns in a sweep
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


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
    for name, kind in (("op", str), ("problem", str), ("config", str), ("revision", int)):
        if name in row and type(row[name]) is not kind:
            raise ValueError(f"{name} is {'a text' if kind is str else 'a whole number'}; it is {row[name]!r:.40}")
    if "config" in row and (op := registry.find(row.get("op", ""))):
        row["config"] = op.spell(row.get("revision", 1), row.get("problem", ""), row["config"])
    for name in ("us", "p20", "p80", "model_us") if "config" in row else ():
        value = row.get(name)
        if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
            raise ValueError(f"{name} is a number of microseconds above 0; it is {value!r:.40}")
    return row


def load(folder: Path) -> dict[tuple[str, str], dict[str, float]]:
    """Measured µs by op and problem, then by config. Of a problem in two sweeps, the one with more configs counts."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for file in files(folder):
        run: dict[tuple[str, str], dict[str, float]] = {}
        for row in recorded(file):
            if {"op", "problem", "config"} <= row.keys() and row.get("us"):
                run.setdefault((row["op"], row["problem"]), {})[row["config"]] = row["us"]
        found |= {key: us for key, us in run.items() if len(us) > len(found.get(key, {}))}
    return found


def valid(op: Op[Any, Any], problem: Problem, measured: dict[str, float], gpu: GpuSpec) -> dict[Config, float]:
    """Measured µs by config, less the configs that a rule or a knob younger than the sweep refuses."""
    found = {}
    for text, us in measured.items():
        with suppress(CuteKernelsError):
            found[op.check(problem, op.Config.parse(text), gpu)] = us
    return found


@dataclass(frozen=True)
class Quality:
    """Estimates of one problem's configs against their measured times."""

    op: str
    problem: str
    configs: int
    correlation: float | None  # Spearman's, of ranks; None where all estimates, or all times, are equal
    choice: float  # measured time of the config with the least estimate over the best measured time
    top: float  # the same of the best among the eight with the least estimates
    default: float | None  # the same of the op's default; None where the sweep lacks it


def judge(name: str, text: str, measured: dict[str, float], gpu: GpuSpec) -> Quality | None:
    """None where fewer than eleven of the configs are valid today."""
    op: Any = registry.get(name)
    problem = op.Problem.parse(text)
    us = valid(op, problem, measured, gpu)
    if len(us) < LEAST_CONFIGS:
        return None
    estimates = {config: op.estimate_us(problem, config, gpu) for config in us}
    times = [us[config] for config in sorted(us, key=lambda config: (estimates[config], str(config)))]
    best, default = min(times), us.get(op.default(problem, gpu))
    ranked = spearman([*estimates.values()], [*us.values()])
    fitted = None if default is None else default / best
    return Quality(name, text, len(us), ranked, times[0] / best, min(times[:TOP]) / best, fitted)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The correlation of two lists' ranks, equal values sharing the mean of theirs; None where one has no order."""
    try:
        return correlation(_ranks(a), _ranks(b))
    except StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[int]:
    ordered = sorted(values)
    return [bisect_left(ordered, v) + bisect_right(ordered, v) for v in values]


def of_sweeps(gpu: GpuSpec, folder: Path = SWEEPS) -> list[Quality]:
    """The quality of the estimates for all problems in the sweeps of ``gpu``."""
    return [q for (op, text), us in load(folder / gpu.name).items() if (q := judge(op, text, us, gpu))]


Gpu = Annotated[str, typer.Option(help="Whose sweeps.")]
Folder = Annotated[Path, typer.Option(help="Where the sweeps are, a folder for each GPU.")]


def judge_sweeps(gpu: str, folder: Path, of_sweeps: Callable[[GpuSpec, Path], list[Any]]) -> list[Any]:
    """The findings of ``of_sweeps`` for ``gpu``; ends the process where there is no sweep."""
    return of_sweeps(gpus.lookup(gpu), folder) or terminal.fail(f"no sweep of {gpu} in {folder}", code=2)


@app.command("estimates")
def compare(
    gpu: Gpu = "h200",
    folder: Folder = SWEEPS,
    every: Annotated[bool, typer.Option("--every", help="A line for each problem, not for each op.")] = False,
    format: terminal.As = Format.table,
) -> None:
    """Compare the models' estimates with recorded sweeps: rank correlation, and what their choice costs."""
    found = judge_sweeps(gpu, folder, of_sweeps)
    summed = [_summary([q for q in found if q.op == op]) for op in sorted({q.op for q in found})]
    terminal.write([vars(q) for q in found] if every else summed, format)


def _summary(mine: Sequence[Quality]) -> dict[str, Any]:
    ordered = [q.correlation for q in mine if q.correlation is not None]
    defaults = [q.default for q in mine if q.default]
    return {
        "op": mine[0].op,
        "problems": len(mine),
        "configs": sum(q.configs for q in mine),
        "correlation": round(median(ordered), 2) if ordered else None,
        f"best of {TOP} within 5 %": f"{sum(q.top <= NEAR for q in mine)} of {len(mine)}",
        "choice": round(geometric_mean(q.choice for q in mine), 3),
        "default": round(geometric_mean(defaults), 3) if defaults else None,
    }


# ---- a new sweep ----------------------------------------------------------------------------------------


@app.command("sweep")
def record(
    op: Annotated[str, typer.Argument(help="An op's name, e.g. gemm.")],
    problem: Annotated[list[str], typer.Option("--problem", help="A problem as text; may be repeated.")],
    out: Annotated[Path | None, typer.Option(help="File; default bench/sweeps/<gpu>/<op>.jsonl.xz, added to.")] = None,
    most: Annotated[int, typer.Option(min=2, help="Configs of a problem at most.")] = 400,
    rounds: Annotated[int, typer.Option(min=5, help="Samples of each config.")] = 20,
    deadline_s: Annotated[float, typer.Option(min=1, help="Seconds for all problems; the rest is left out.")] = 540.0,
    as_: As = None,
) -> None:
    """Measure the configs of some problems and add a line for each to a compressed file."""
    end = time.monotonic() + deadline_s
    found = registry.get(op)
    problems = [found.Problem.parse(text).bucket() for text in problem]
    gpu = gpus.choose("auto", as_)
    path = out or SWEEPS / gpu.name / f"{op}.jsonl.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    list(recorded(path))  # nothing is added to a file that cannot be read
    with LocalRuntime(max(1, len(os.sched_getaffinity(0)) - 2)) as runtime:
        compiled = [compile_some(runtime, found, one, gpu, most) for one in problems]
        for number, (one, futures) in enumerate(zip(problems, compiled, strict=True)):
            until = time.monotonic() + (end - time.monotonic()) / (len(problems) - number)
            lines = list(sweep(runtime, found, one, gpu, futures, rounds=rounds, until=until))
            lines[:1] = [line | {"stamp": environment.stamp(gpu.name, None)} for line in lines[:1]]
            with path.open("ab") as file:  # each problem is a xz stream of its own, in one write
                file.write(lzma.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
            terminal.say(f"{op} [{one}]: {len(lines)} configs in {path}")
            if best := min((line for line in lines if "us" in line), key=lambda line: line["us"], default=None):
                terminal.say(f"the fastest takes {best['us']} µs, {lines[0].get('us')} the default: {best['config']}")


Futures = dict[Config, Future[Facts]]


def compile_some(runtime: Runtime, op: Op[Any, Any], problem: Problem, gpu: GpuSpec, most: int) -> Futures:
    """Start to compile ``most`` configs: the default, then those that the model likes best, then others at random."""
    default = op.default(problem, gpu)
    others = [c for c in op.valid(problem, gpu) if c != default]
    random.Random(0).shuffle(others)
    liked = nsmallest(TOP, (c for c in others if not c.vendors), key=lambda c: op.estimate_us(problem, c, gpu))
    chosen = [default, *dict.fromkeys([*liked, *others])][:most]
    return {config: runtime.compile(op, problem, config, gpu) for config in chosen}


def sweep(
    runtime: Runtime, op: Op[Any, Any], problem: Problem, gpu: GpuSpec, futures: Futures, *, rounds: int, until: float
) -> Iterator[dict[str, Any]]:
    """Lines of one problem in the order of ``futures``, the default's first, until the time ``until`` of the monotonic
    clock: ``AT_ONCE`` configs at a time beside the default, in the same rounds.
    """
    default, *_ = configs = list(futures)
    try:
        for at in range(0, len(configs), AT_ONCE):
            if time.monotonic() >= until:
                return
            some: dict[Config, str | None] = {}
            for config in configs[at : at + AT_ONCE]:
                if some and time.monotonic() >= until:
                    break
                some[config] = _why_not(futures[config], op, gpu, config == default)
            fit = [config for config, failure in some.items() if failure is None]
            prepare = Prepare(op.name, str(problem), gpu)
            found = _measure_beside(runtime, prepare, default, fit, rounds, until) if fit else {}
            for config, failure in some.items():
                if failure is None and config not in found:
                    continue
                line = {"op": op.name, "revision": op.revision, "problem": str(problem), "config": str(config)}
                line |= {"default": config == default, "model_us": op.estimate_us(problem, config, gpu)}
                line |= found[config] if failure is None else {"failure": failure}
                yield {name: rounded(value) for name, value in line.items()}
    finally:
        for future in futures.values():
            future.cancel()


def _why_not(future: Future[Facts], op: Op[Any, Any], gpu: GpuSpec, is_default: bool) -> str | None:
    """The reason not to measure a config. The default is measured, whatever it spills, since calls run it."""
    try:
        reason = prune_reason(future.result(), op, gpu)
        return None if is_default else reason
    except ChildFailure as error:
        return str(error)[:200]


def _measure_beside(
    runtime: Runtime, prepare: Prepare, default: Config, configs: Sequence[Config], rounds: int, until: float
) -> dict[Config, dict[str, Any]]:
    """Times of ``configs`` beside the default's, or the failure of each; one by one, as far as time allows, where one
    fails them all.
    """
    texts = tuple(dict.fromkeys(map(str, (default, *configs))))
    try:
        found = runtime.measure(Measure(prepare, texts, rounds=rounds))
    except ChildFailure as error:
        if len(configs) == 1:
            return {configs[0]: {"failure": str(error)[:200]}}
        alone: dict[Config, dict[str, Any]] = {}
        for config in configs:
            if time.monotonic() < until:
                alone |= _measure_beside(runtime, prepare, default, [config], rounds, until)
        return alone
    return {config: _times(found[str(config)], found[str(default)]) for config in configs}


def _times(mine: Outcome, beside: Outcome) -> dict[str, Any]:
    """A config's time, its quantiles, and the default's time over it in the same rounds."""
    if not mine.right:
        return {"failure": f"error {mine.error:.3g} times the tolerance"}
    us = Samples(mine.us)
    ratio = us.ratio(Samples(beside.us)).value if beside.right else None
    return {"us": us.median, "p20": us.p20, "p80": us.p80, "ratio": ratio}
