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
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench import published, workloads
from bench.rows import Row, steepest
from bench.suites import Case
from bench.workloads import cases as cases_of
from cutekernels import cli, environment, terminal
from cutekernels.errors import CuteKernelsError, UnknownGpu

HERE = Path(__file__).parent
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Dtype(StrEnum):
    """Type of the operands."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Accumulate(StrEnum):
    """Type in which a matrix product accumulates."""

    fp32 = "fp32"
    fp16 = "fp16"


@app.command()
def bench(
    op: Annotated[str, typer.Argument(help=f"What to time: {', '.join(workloads.OPS)}; all for --published.")],
    suite: Annotated[str | None, typer.Option(help="Which of its suites; the first by default.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the operands.")] = Dtype.bf16,
    accumulate: Annotated[
        Accumulate, typer.Option(help="Type of accumulation; fp16 needs --dtype fp16.")
    ] = Accumulate.fp32,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; default bench/results/<gpu>.")] = None,
    max_smem_kib: Annotated[int | None, typer.Option(min=1, help="Time our best within this much smem too.")] = None,
    example: Annotated[Path | None, typer.Option(help="NVIDIA's tensorop_gemm.py, from a CUTLASS checkout.")] = None,
    match: Annotated[str, typer.Option(help="Only cases with this in their label or problem.")] = "",
    alone: Annotated[bool, typer.Option("--alone", help="Ours without its peers: many cases in little time.")] = False,
    warm: Annotated[bool, typer.Option("--warm", help="One input set, which stays in the L2 cache.")] = False,
    rest_ms: Annotated[
        float, typer.Option(min=0, help="Idle before each sample: 50 for bursts at full clock; 0 for sustained load.")
    ] = 0.0,
    rounds: Annotated[int, typer.Option(min=5, help="Samples per contender.")] = 30,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw a PNG beside the rows.")] = True,
    commit: Annotated[str | None, typer.Option(help="The commit under test, where .git was left behind.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cases and contenders; time nothing.")] = False,
    reproduced: Annotated[
        bool,
        typer.Option("--published", help="Compare recorded rows with numbers others published for OP; time nothing."),
    ] = False,
    profiled: Annotated[
        bool,
        typer.Option("--profile", help="Run the first case of ours under Nsight Compute; print what limits it."),
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
                _reproduced(one, suite, out, warm=warm, plots=plots)
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
            _check(case)
    except ValueError as error:
        terminal.fail(str(error), code=2)
    if not cases:
        terminal.fail(f"no case of {op} {suite} has {match!r} in its label or problem", code=2)
    if dry_run:
        _list(cases, alone)
        return
    if profiled:
        _profiled(cases[0], out or HERE.parent / "build" / "profiles")
        return
    try:
        gpu = _gpu()
    except UnknownGpu:
        terminal.fail("no CUDA device is visible, and times are only taken on one; --dry-run lists what would be timed")
    from bench import run as runner

    name = run_name(
        op,
        suite,
        dtype=dtype,
        accumulate=accumulate,
        max_smem_kib=max_smem_kib,
        match=match,
        alone=alone,
        warm=warm,
        rest_ms=rest_ms,
    )
    path = (out or HERE / "results" / gpu.name) / f"{name}.jsonl"
    plan = runner.Plan(
        suite,
        gpu,
        environment.stamp(gpu.name, commit),
        warm,
        rest_ms,
        max_smem_kib,
        rounds,
        example=example,
        alone=alone,
    )
    talk = Console(stderr=True, highlight=False)
    try:
        rows = runner.run(cases, plan, path, runner.Timer(), lambda some: _progress(talk, some))
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
    talk.print(f"{len(rows)} rows in {path}")
    if any(r.status in ("failed", "wrong_result") and r.contender.startswith("cutekernels") for r in rows):
        terminal.fail("one of ours failed or was wrong; its row says why")


def _reproduced(op: str, suite: str | None, out: Path | None, *, warm: bool, plots: bool) -> None:
    """Print tables of published numbers, and of the same cases recorded here, one for each GPU."""
    theirs = published.load(op, suite)
    if not theirs:
        terminal.fail(
            f"nothing is published of {' '.join(filter(None, (op, suite)))}; see bench/published.json", code=2
        )
    talk = Console(stderr=True, highlight=False)
    folders = _folders(out)
    reproduced = {folder: published.reproduce(theirs, folder, warm=warm) for folder in folders}
    measured = [folder for folder, lines in reproduced.items() if any(line.ours is not None for line in lines)]
    for folder in measured or folders:
        lines = reproduced[folder]
        gpu = next((r.stamp.get("gpu", folder.name) for x in lines if (r := x.ours) is not None), folder.name)
        terminal.show(published.reproduced_table(lines, f"{gpu}, {'warm' if warm else 'cold'} L2"))
        for command in published.missing(lines):
            line = f"not measured in {folder}; measure with: {command}{' --warm' if warm else ''}"
            talk.print(line, soft_wrap=True)
        for reason in dict.fromkeys(line.unmeasured for line in lines if line.unmeasured):
            talk.print(f"no case here reproduces {op}: {reason}", soft_wrap=True)
        if plots and any(line.ours is not None for line in lines):
            from bench.plots import draw_reproduced

            draw_reproduced(lines, gpu, folder / published.picture(op, warm=warm))
    terminal.show(published.published_table(theirs))


def _folders(out: Path | None) -> list[Path]:
    """The folders of recorded rows, one for each GPU."""
    return [out] if out is not None else sorted(p for p in (HERE / "results").iterdir() if p.is_dir())


def _profiled(case: Case, folder: Path) -> None:
    from bench import profile

    try:
        report, kernels = profile.profile(case, folder)
    except profile.Unprofiled as error:
        terminal.fail(str(error))
    terminal.show(profile.table(case, kernels))
    Console(stderr=True, highlight=False).print(f"the whole report is in {report}; open it with ncu-ui", soft_wrap=True)


def _check(case: Case) -> None:
    workloads.posed(case)


def _gpu() -> Any:
    from cutekernels.gpu import lookup

    return lookup("auto")


def run_name(
    op: str,
    suite: str,
    *,
    dtype: str,
    accumulate: str,
    max_smem_kib: int | None,
    match: str,
    alone: bool = False,
    warm: bool,
    rest_ms: float = 0.0,
) -> str:
    """The file name of a run: one per suite and conditions, so that a later run replaces exactly its predecessor."""
    words = [op, suite]
    words += [dtype] if dtype != "bf16" else []
    words += ["acc" + accumulate] if accumulate != "fp32" else []
    words += [f"smem{max_smem_kib}"] if max_smem_kib is not None else []
    words += ["".join(c if c.isalnum() else "-" for c in match)] if match else []
    words += ["alone"] if alone else []
    words += ["warm"] if warm else []
    words += ["rested"] if rest_ms else []
    return "_".join(words)


# ---- tables and messages --------------------------------------------------------------------------------


def table(rows: list[Row]) -> Table:
    """A table of all rows, losing and failing ones too, with the GPU in the title."""
    stamp = rows[0].stamp
    shown = Table(
        title=f"{rows[0].op} {rows[0].suite} on {stamp.get('gpu', '?')}, {_conditions(rows[0])}, µs of GPU time"
    )
    for name in ("case", "contender"):
        shown.add_column(name)
    for name in ("median", "TFLOP/s", "GB/s", "% roof", "% stream", "% mma", "speed-up [95 %]", "CPU µs", "err/torch"):
        shown.add_column(name, justify="right")
    shown.add_column("config or reason", overflow="fold")
    for r in rows:
        speedup = "" if r.speedup is None else f"{r.speedup:.3f} [{r.speedup_low:.3f}, {r.speedup_high:.3f}]"
        said = f"{r.config} ({r.origin})" if r.config else ""
        shown.add_row(
            r.label,
            r.contender,
            _number(r.median_us, 2) if r.status == "ok" else Text(r.status, style="yellow"),
            _number(r.tflops, 1),
            _number(r.gbps, 0),
            _percent(r.roofline_fraction),
            _number(None if r.stream_fraction is None else 100 * r.stream_fraction, 1),
            _percent(r.mma_fraction),
            speedup,
            _number(r.cpu_us, 2),
            _number(r.error_vs_torch, 2),
            Text(r.reason or said),
        )
    return shown


def _conditions(row: Row) -> str:
    load = f"{row.rest_ms:g} ms of rest before each sample" if row.rest_ms else "sustained load"
    return f"{row.l2} L2, {load}"


def _list(cases: list[Case], alone: bool) -> None:
    """Cases to stdout in 80 columns, contenders to stderr: they are the same for all but for streaming kernels."""
    rows = [{"case": c.label, "problem": c.problem, "alpha": c.alpha, "beta": c.beta} for c in cases]
    scaled = any((case.alpha, case.beta) != (1.0, 0.0) for case in cases)
    terminal.write(rows, terminal.Format.table, ("case", "problem", *(("alpha", "beta") if scaled else ())))
    workload = workloads.get(cases[0].op)
    streams = [] if workload.streams is None else ["streaming {}:{}".format(*workload.streams(cases[0]))]
    peers = [] if alone else [*(peer.name for peer in workload.peers), *streams]
    terminal.say(f"{cases[0].op}, {len(cases)} cases: {', '.join([*peers, 'cutekernels'])}")


def _progress(talk: Console, rows: list[Row]) -> None:
    said = ", ".join(
        f"{r.contender} {r.median_us:.1f} µs" if r.median_us else f"{r.contender} {r.status}" for r in rows
    )
    talk.print(Text(f"{rows[0].label}: {said}"))


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}"


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
