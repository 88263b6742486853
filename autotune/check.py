"""``cutekernels db check``: whether stored winners are still the fastest, timed beside the defaults on this GPU.

Versions of Triton and the DSL compile one config to other code, so a winner of yesterday may be a loser today. Nothing
is stored. Exit codes: 0 all hold; 1 some fell behind or failed; 2 there is no GPU to measure on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutekernels import terminal
from cutekernels.errors import UnknownGpu
from cutekernels.terminal import As, Format

if TYPE_CHECKING:
    from cutekernels.autotune.runtime import Runtime
    from cutekernels.db.questions.reader import Winner
    from cutekernels.gpu import GpuSpec
    from cutekernels.op import Op

BOUND = 1.1
"""A winner this many times as slow as the default, or as it was, fell behind. A GPU's clock moves times by 5 %."""

app = typer.Typer()


@app.command("check")
def command(
    op: Annotated[str | None, typer.Option("--op", help="Only this op, e.g. gemm.")] = None,
    problem: Annotated[
        str | None, typer.Option("--problem", help='Only problems with these fields: "m>=16 n=4096 dtype=bf16".')
    ] = None,
    bound: Annotated[
        float, typer.Option(min=1, help="Times as slow as the default, or as stored, that is behind.")
    ] = BOUND,
    budget_s: Annotated[float, typer.Option(min=1, help="After this many seconds nothing new is measured.")] = 600.0,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Compiling processes; default: one per CPU.")
    ] = None,
    whole: Annotated[bool, typer.Option("--all", help="List those that hold, too.")] = False,
    db: Annotated[str | None, typer.Option("--db", metavar="URL", help="Path or URL; default: CUTEKERNELS_DB.")] = None,
    format: As = Format.table,
) -> None:
    """Time this GPU's winners beside the defaults, and list those that fell behind, with exit code 1."""
    from cutekernels import compilers
    from cutekernels import db as database
    from cutekernels import gpu as gpus
    from cutekernels.autotune.runtime import LocalRuntime

    try:
        spec = gpus.detect()
    except UnknownGpu:
        terminal.fail("db check times winners on the GPU of this machine, and no CUDA device is visible", code=2)
    with database.open(db) as opened:
        found = opened.winners(gpu=spec.name, op=op, problem=problem, origin="measured")
    serving = [winner for winner in found if winner.serves]
    with LocalRuntime(jobs or compilers.affordable()) as runtime:
        rows = list(check_winners(serving, spec, runtime, bound, budget_s))
    bad = [row for row in rows if row["state"] != "holds"]
    terminal.write(rows if whole else bad, format)
    left = "" if len(rows) == len(serving) else f"; {len(serving) - len(rows)} more were not reached in {budget_s:g} s"
    told = f"{len(bad)} of {len(rows)} winners of {spec.name} fell behind or failed{left}"
    if bad:
        terminal.fail(f"{told}; `cutekernels tune JOB --force` measures their problems again")
    terminal.say(told)


def check_winners(
    winners: Iterable[Winner], spec: GpuSpec, runtime: Runtime, bound: float, budget_s: float
) -> Iterator[dict[str, Any]]:
    """A row for each of ``winners`` that is measured before ``budget_s`` have passed."""
    end = time.monotonic() + budget_s
    for winner in winners:
        if time.monotonic() >= end:
            return
        shown = {
            "op": winner.op,
            "problem": winner.problem_text,
            "config": winner.config_text,
            "then_us": winner.median_us,
        }
        yield shown | _compare(winner, spec, runtime, bound)


def check_ops(
    ops: Iterable[Op[Any, Any]],
    spec: GpuSpec,
    runtime: Runtime,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[dict[str, Any]]:
    """A row for each op: its default on the least work of its suite, launched on its sample and held to its reference.

    Nothing is compiled or launched once ``budget_s`` have passed.
    """
    from cutekernels.autotune.requests import Measure, Prepare
    from cutekernels.isolate import ChildFailure

    end, begun = clock() + budget_s, []
    for op in sorted(ops, key=lambda op: op.compile_s):  # long compiles run while others are launched
        problem = min(map(op.Problem.parse, op.suite), key=lambda p: op.work(p).floor_us(spec))
        default = op.default(problem, spec)
        begun.append((op, str(problem), str(default), runtime.compile(op, problem, default, spec)))
    for op, problem, default, compiled in begun:
        row: dict[str, Any] = {"op": op.name, "problem": problem, "config": default, "error": None, "state": "right"}
        if clock() >= end:
            compiled.cancel()
            row["state"] = f"not reached in {budget_s:.0f} s"
        else:
            try:
                compiled.result()
                request = Measure(Prepare(op.name, problem, spec), (default,), rounds=5)
                row["error"] = error = runtime.measure(request)[default].error
                row["state"] = "right" if error <= 1 else f"wrong, {error:.3g} times the tolerance"
            except ChildFailure as failure:
                row["state"] = f"failed: {failure}".partition("\n")[0]
        yield row


def _compare(winner: Winner, spec: GpuSpec, runtime: Runtime, bound: float) -> dict[str, Any]:
    from cutekernels.autotune import final
    from cutekernels.autotune.requests import Measure, Prepare
    from cutekernels.isolate import ChildFailure
    from cutekernels.measure import Samples
    from cutekernels.ops import registry

    op = registry.get(winner.op)
    problem = op.Problem.parse(winner.problem_text)
    default = op.default(problem, spec)
    configs = list(dict.fromkeys([default, op.Config.parse(winner.config_text)]))
    texts = tuple(map(str, configs))
    row: dict[str, Any] = {"us": None, "default_us": None, "gain": None, "gain_then": winner.ratio}
    try:
        for compiled in [runtime.compile(op, problem, config, spec) for config in configs]:
            compiled.result()  # a measurement's deadline has no room for compilers
        request = Prepare(op.name, str(problem), spec, seed=1)
        outcomes = runtime.measure(Measure(request, texts, rounds=final.ROUNDS, budget_us=final.BUDGET_US))
    except ChildFailure as failure:
        return row | {"state": f"failed: {failure}".partition("\n")[0]}
    wrong = [text for text in texts if not outcomes[text].right]
    if wrong:
        return row | {"state": f"failed: [{wrong[0]}] is wrong, {outcomes[wrong[0]].error:.3g} times the tolerance"}
    base, mine = (Samples(outcomes[text].us) for text in (texts[0], texts[-1]))
    gain = mine.ratio(base)
    row |= {"us": mine.median, "default_us": base.median, "gain": gain.value}
    if gain.high * bound < 1:
        return row | {"state": "behind the default"}
    if winner.median_us is not None and mine.p20 > winner.median_us * bound:
        return row | {"state": f"slower than it was{_versions(winner)}"}
    return row | {"state": "holds"}


def _versions(winner: Winner) -> str:
    from cutekernels import environment

    told = environment.drift(winner.environment)
    return f", {told}" if told else ""
