"""``python -m bench OP``: the command line of the benchmarks. The table goes to stdout, messages to stderr.

Exit code 0: done; 1: it could not be measured here; 2: the command was misused. Results are written only
where a CUDA device measured them; ``--dry-run`` lists the cases and contenders on any machine.
``python -m bench sweep OP`` times many configs of a problem and records them; ``python -m bench estimates`` compares
the models with such records, ``python -m bench regret`` what calls run.
``python -m bench models`` times whole models beside transformers, ``python -m bench host`` what calls cost the host,
``python -m bench training`` steps of training and losses beside plain torch and Liger.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from bench import published, workloads
from bench.rows import Row, steepest
from bench.suites import Case
from bench.wall import RESULTS, As, Commit, DryRun, Out, Rounds, detect_gpu, number, tabulated
from bench.workloads import cases as cases_of
from cutekernels import cli, environment, terminal
from cutekernels.errors import CuteKernelsError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


Dtype = StrEnum("Dtype", ["bf16", "fp16", "fp32"])
Accumulate = StrEnum("Accumulate", ["fp32", "fp16"])


@app.command()
def bench(
    op: Annotated[str, typer.Argument(help=f"What to time: {', '.join(workloads.OPS)}; all for --published.")],
    suite: Annotated[str | None, typer.Option(help="Which of its suites; the first by default.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the operands.")] = Dtype.bf16,
    accumulate: Annotated[
        Accumulate, typer.Option(help="Type of accumulation; fp16 needs --dtype fp16.")
    ] = Accumulate.fp32,
    out: Out = None,
    as_: As = None,
    example: Annotated[Path | None, typer.Option(help="NVIDIA's tensorop_gemm.py, from a CUTLASS checkout.")] = None,
    match: Annotated[str, typer.Option(help="Only cases with this in their label or problem.")] = "",
    alone: Annotated[bool, typer.Option("--alone", help="Ours without its peers: many cases in little time.")] = False,
    warm: Annotated[bool, typer.Option("--warm", help="One input set, which stays in the L2 cache.")] = False,
    rest_ms: Annotated[
        float, typer.Option(min=0, help="Idle before each sample: 50 for bursts at full clock; 0 for sustained load.")
    ] = 0.0,
    rounds: Rounds = 30,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw a PNG beside the rows.")] = True,
    commit: Commit = None,
    dry_run: DryRun = False,
    reproduced: Annotated[
        bool,
        typer.Option("--published", help="Compare recorded rows with numbers others published for OP; time nothing."),
    ] = False,
    profiled: Annotated[
        bool, typer.Option("--profile", help="Run the first case of ours under Nsight Compute; print what limits it.")
    ] = False,
) -> None:
    """Time an op's suite beside its peers, all contenders of a case interleaved, and record every row."""
    if reproduced:
        if out is not None and not out.is_dir():
            terminal.fail(f"{out} is no folder of results", code=2)
        ops = dict.fromkeys(p.op for p in published.load(None, suite)) if op == "all" else (op,)
        if not ops:
            terminal.fail(f"nothing is published of a suite {suite}; see bench/published.json", code=2)
        try:
            for one in ops:
                _reproduce(one, suite, out, warm=warm, plots=plots)
            if op == "all":
                for line in published.account(_folders(out), warm=warm):
                    terminal.show(line)
        except (ValueError, OSError) as error:
            terminal.fail(str(error))
        return
    if alone and example is not None:
        terminal.fail("--example adds a peer and --alone leaves them out: give one of the two", code=2)
    try:
        suite = suite or next(iter(workloads.get(op).suites))
        cases = cases_of(op, suite, dtype=dtype, accumulate=accumulate, match=match)
        for case in cases:
            workloads.parse_case(case)
    except ValueError as error:
        terminal.fail(str(error), code=2)
    if not cases:
        terminal.fail(f"no case of {op} {suite} has {match!r} in its label or problem", code=2)
    if dry_run:
        _list(cases, alone)
        return
    if profiled:
        _profile(cases[0], out or RESULTS.parents[1] / "build" / "profiles")
        return
    gpu = detect_gpu(as_)
    from bench import run as runner

    kinds: dict[str, Any] = {"dtype": dtype, "accumulate": accumulate, "match": match, "alone": alone, "warm": warm}
    name = run_name(op, suite, **kinds, rest_ms=rest_ms)
    path = (out or RESULTS / gpu.name) / f"{name}.jsonl"
    stamp = environment.stamp(gpu.name, commit)
    plan = runner.RunPlan(suite, gpu, stamp, warm, rest_ms, rounds, example=example, alone=alone)
    try:
        rows = runner.run(cases, plan, path, runner.Timer(), _progress)
    except (CuteKernelsError, ValueError) as error:
        terminal.fail(str(error))
    terminal.show(table(rows))
    if suite == "tokens":
        for row, times in steepest(rows):
            terminal.show(f"{row.contender}, {row.label} is the steepest: {times:.3f} of its neighbours' mean")
    theirs = published.load(op, suite)
    if theirs:
        terminal.show(published.published_table(theirs))
    if plots and any(r.status == "ok" for r in rows):
        from bench.plots import draw

        draw(rows, path.with_suffix(".png"))
    terminal.say(f"{len(rows)} rows in {path}")
    if any(r.status in ("failed", "wrong_result") and r.contender.startswith("cutekernels") for r in rows):
        terminal.fail("one of ours failed or was wrong; its row says why")


def _reproduce(op: str, suite: str | None, out: Path | None, *, warm: bool, plots: bool) -> None:
    """Print tables of published numbers, and of the same cases recorded here, one for each GPU."""
    theirs = published.load(op, suite)
    if not theirs:
        which = f"{op} {suite or ''}".rstrip()
        terminal.fail(f"nothing is published of {which}; see bench/published.json", code=2)
    folders = _folders(out)
    reproduced = {folder: published.reproduce(theirs, folder, warm=warm) for folder in folders}
    measured = [folder for folder, lines in reproduced.items() if any(line.ours is not None for line in lines)]
    for folder in measured or folders:
        lines = reproduced[folder]
        gpu = next((r.stamp.get("gpu", folder.name) for x in lines if (r := x.ours) is not None), folder.name)
        terminal.show(published.reproduced_table(lines, f"{gpu}, {'warm' if warm else 'cold'} L2"))
        for command in published.missing(lines):
            terminal.say(f"not measured in {folder}; measure with: {command}{' --warm' if warm else ''}")
        for reason in dict.fromkeys(p.unmeasured for p in theirs if p.unmeasured):
            terminal.say(f"no case here reproduces {op}: {reason}")
        if plots and any(line.ours is not None for line in lines):
            from bench.plots import draw_reproduced

            draw_reproduced(lines, gpu, folder / published.picture(op, warm=warm))
    terminal.show(published.published_table(theirs))


def _folders(out: Path | None) -> list[Path]:
    """The folders of recorded rows, one for each GPU."""
    return [out] if out is not None else sorted(p for p in RESULTS.iterdir() if p.is_dir())


def _profile(case: Case, folder: Path) -> None:
    from bench import profile

    try:
        report, kernels = profile.profile(case, folder)
    except profile.Unprofiled as error:
        terminal.fail(str(error))
    terminal.show(profile.table(case, kernels))
    terminal.say(f"the whole report is in {report}; open it with ncu-ui")


def run_name(
    op: str, suite: str, *, dtype: str, accumulate: str, match: str, alone: bool = False,
    warm: bool, rest_ms: float = 0.0,
) -> str:  # fmt: skip
    """The file name of a run: one per suite and conditions, so that a later run replaces exactly its predecessor."""
    words = [op, suite, dtype * (dtype != "bf16"), f"acc{accumulate}" * (accumulate != "fp32")]
    words += ["".join(c if c.isalnum() else "-" for c in match)]
    words += ["alone" * alone, "warm" * warm, "rested" * bool(rest_ms)]
    return "_".join(filter(None, words))


# ---- tables and messages --------------------------------------------------------------------------------


def table(rows: list[Row]) -> Table:
    """A table of all rows, losing and failing ones too, with the GPU in the title."""
    first = rows[0]
    load = f"{first.rest_ms:g} ms of rest before each sample" if first.rest_ms else "sustained load"
    title = f"{first.op} {first.suite} on {first.stamp.get('gpu', '?')}, {first.l2} L2, {load}, µs of GPU time"

    def speedup(r: Row) -> str:
        return "" if r.speedup is None else f"{r.speedup:.3f} [{r.speedup_low:.3f}, {r.speedup_high:.3f}]"

    numbers: dict[str, Callable[[Row], str]] = {
        "median": lambda r: number(r.median_us, 2) if r.status == "ok" else f"[yellow]{r.status}[/]",
        "TFLOP/s": lambda r: number(r.tflops, 1),
        "GB/s": lambda r: number(r.gbps, 0),
        "% roof": lambda r: number(r.roofline_fraction, 0, 100),
        "% stream": lambda r: number(r.stream_fraction, 1, 100),
        "% mma": lambda r: number(r.mma_fraction, 0, 100),
        "speed-up [95 %]": speedup,
        "CPU µs": lambda r: number(r.cpu_us, 2),
        "err/torch": lambda r: number(r.error_vs_torch, 2),
    }
    words: dict[str, Callable[[Row], str]] = {"case": lambda r: r.label, "contender": lambda r: r.contender}
    said = {"config or reason": lambda r: Text(r.reason or (f"{r.config} ({r.origin})" if r.config else ""))}
    return tabulated(title, rows, words, numbers, said)


def _list(cases: list[Case], alone: bool) -> None:
    """Cases to stdout in 80 columns, contenders to stderr: they are the same for all but for streaming kernels."""
    rows = [{"case": c.label, "problem": c.problem, "alpha": c.alpha, "beta": c.beta} for c in cases]
    scaled = any((case.alpha, case.beta) != (1.0, 0.0) for case in cases)
    terminal.write(rows, terminal.Format.table, ("case", "problem", *(("alpha", "beta") if scaled else ())))
    workload = workloads.get(cases[0].op)
    streams = [] if workload.streams is None else ["streaming {}:{}".format(*workload.streams(cases[0]))]
    peers = [] if alone else [*(peer.name for peer in workload.peers), *streams]
    terminal.say(f"{cases[0].op}, {len(cases)} cases: {', '.join([*peers, 'cutekernels'])}")


def _progress(rows: list[Row]) -> None:
    times = (f"{r.median_us:.1f} µs" if r.median_us else r.status for r in rows)
    terminal.say(f"{rows[0].label}: {', '.join(f'{r.contender} {t}' for r, t in zip(rows, times, strict=True))}")


def main() -> None:
    """``bench OP``, or a verb that is no op: ``estimates``, ``host``, ``models``, ``training`` and the like."""
    verb = sys.argv[1] if sys.argv[1:] else ""
    if verb in ("estimates", "sweep"):  # commands of one app
        cli.ended(partial(importlib.import_module("bench.judge").app, prog_name="python -m bench"))
    if verb in ("host", "models", "regret", "training"):
        del sys.argv[1]
        cli.ended(partial(importlib.import_module(f"bench.{verb}").app, prog_name=f"python -m bench {verb}"))
    cli.ended(partial(app, prog_name="python -m bench"))


if __name__ == "__main__":
    main()
