"""``python -m bench sweep OP --problem TEXT``: near-exhaustive times of one problem's configs, for ``bench replay``.

Each config is measured beside the default by the tuner's own worker; a line has the time, its samples and quantiles,
the ratio to the default in the same rounds, the compiler's facts and the model's estimate, or the failure's words.
"""

from __future__ import annotations

import json
import lzma
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import replay
from cutekernels import environment, terminal
from cutekernels import gpu as gpus
from cutekernels.autotune.requests import Measure, Prepare
from cutekernels.autotune.runtime import LocalRuntime, Runtime
from cutekernels.autotune.search import prune_reason
from cutekernels.backends import Facts
from cutekernels.errors import CuteKernelsError, UnsupportedProblem
from cutekernels.isolate import ChildFailure
from cutekernels.measure import Samples
from cutekernels.op import Config, Op, Problem

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    op: Annotated[str, typer.Argument(help="An op's name, e.g. gemm.")],
    problem: Annotated[list[str], typer.Option("--problem", help="A problem as text; may be repeated.")],
    out: Annotated[Path | None, typer.Option(help="File; default bench/sweeps/<gpu>/<op>.jsonl.xz, added to.")] = None,
    most: Annotated[int, typer.Option(min=2, help="Configs of a problem at most, evenly drawn.")] = 400,
    rounds: Annotated[int, typer.Option(min=5, help="Samples of each config.")] = 20,
    slim: Annotated[bool, typer.Option("--slim", help="Leave out what `bench replay` does not read.")] = False,
    deadline_s: Annotated[float, typer.Option(min=1, help="Seconds for all problems; the rest is left out.")] = 540.0,
) -> None:
    """Measure the configs of some problems and add a line for each to a compressed file."""
    from cutekernels.ops import registry

    end = time.monotonic() + deadline_s
    try:
        found = registry.get(op)
        problems = [found.Problem.parse(text).bucket() for text in problem]
        gpu = gpus.lookup("auto")
        path = out or Path(__file__).parent / "sweeps" / gpu.name / f"{op}.jsonl.xz"
        path.parent.mkdir(parents=True, exist_ok=True)
        stamp = environment.stamp(gpu.name, None)
        if path.exists():
            list(replay.recorded(path))  # nothing is added to a file that cannot be read
        with LocalRuntime(max(1, len(os.sched_getaffinity(0)) - 2)) as runtime:
            for number, one in enumerate(problems):
                until = time.monotonic() + (end - time.monotonic()) / (len(problems) - number)
                lines = list(sweep(runtime, found, one, gpu, most=most, rounds=rounds, until=until))
                if slim:
                    lines = [{name: line[name] for name in replay.READS if name in line} for line in lines]
                    lines[:1] = [line | {"stamp": stamp} for line in lines[:1]]
                else:
                    lines = [line | {"stamp": stamp} for line in lines]
                text = "".join(json.dumps(line) + "\n" for line in lines)
                with path.open("ab") as file:  # each problem is a xz stream of its own, in one write
                    file.write(lzma.compress(text.encode()))
                terminal.say(f"{op} [{one}]: {len(lines)} configs in {path}")
    except CuteKernelsError as error:
        terminal.fail(str(error), code=2 if isinstance(error, UnsupportedProblem) else 1)


def sweep(
    runtime: Runtime, op: Op[Any, Any], problem: Problem, gpu: gpus.GpuSpec, *, most: int, rounds: int, until: float
) -> Iterator[dict[str, Any]]:
    """Lines of one problem, the default's first, until the time ``until`` of the monotonic clock."""
    valid = list(op.valid(problem, gpu))
    default = op.default(problem, gpu)
    others = [c for c in valid if c != default]
    random.Random(0).shuffle(others)
    chosen = [default, *others[: most - 1]]
    futures = {config: runtime.compile(op, problem, config, gpu) for config in chosen}
    try:
        for config in chosen:
            if time.monotonic() >= until:
                return
            line = {
                "op": op.name,
                "revision": op.revision,
                "problem": str(problem),
                "config": str(config),
                "default": config == default,
                "valid": len(valid),
                "model_us": op.estimate_us(problem, config, gpu),
                "floor_us": op.work(problem).floor_us(gpu),
            }
            line |= _measured(runtime, op, problem, gpu, (default, config), futures[config], rounds)
            yield {name: _short(value) for name, value in line.items()}
    finally:
        for future in futures.values():
            future.cancel()


def _measured(
    runtime: Runtime,
    op: Op[Any, Any],
    problem: Problem,
    gpu: gpus.GpuSpec,
    pair: tuple[Config, Config],
    future: Future[Facts],
    rounds: int,
) -> dict[str, Any]:
    base, config = map(str, pair)
    try:
        facts = future.result()
        found: dict[str, Any] = {"registers": facts.registers, "stack_bytes": facts.stack_bytes}
        found["smem_bytes"] = facts.smem_bytes
        reason = prune_reason(facts, op, gpu)
        if reason is not None:
            return found | {"failure": reason}
        texts = tuple(dict.fromkeys([base, config]))
        outcomes = runtime.measure(Measure(Prepare(op.name, str(problem), gpu), texts, rounds=rounds))
    except ChildFailure as error:
        return {"failure": str(error)[:200]}
    mine, beside = outcomes[config], outcomes[base]
    if not mine.right:
        return found | {"failure": f"error {mine.error:.3g} times the tolerance"}
    samples = Samples(mine.us)
    ratio = samples.ratio(Samples(beside.us)) if beside.right else None
    return found | {
        "us": samples.median,
        "p20": samples.p20,
        "p80": samples.p80,
        "samples": [float(f"{us:.5g}") for us in mine.us],
        "error": mine.error,
        "ratio": ratio.value if ratio else None,
    }


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
