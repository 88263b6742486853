"""``python -m bench OP --profile``: one call of ours under Nsight Compute, and five figures that say what limits it.

The call runs in a child process that ``ncu`` starts, after one on other inputs that compiles it. ``ncu`` empties the
caches before each of its passes and leaves the clocks as they are. Its report, with every section, is kept.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.table import Table

from bench.run import ours
from bench.suites import Case
from bench.wall import number, tabulated
from bench.workloads import get, parse_case

TIMEOUT_S = 600
# Figures, each with ncu's name of its metric and a factor: base units are ns. Tensor pipes have several names.
FIGURES = {
    "time, µs": (r"gpu__time_duration\.sum", 1e-3),
    "DRAM, % of its peak": (r"dram__throughput\.avg\.pct_of_peak_sustained_elapsed", 1.0),
    "tensor pipes, % of cycles": (r"sm__pipe_tensor\w*_cycles_active\.avg\.pct_of_peak_sustained_active", 1.0),
    "warps in flight, % of the most": (r"sm__warps_active\.avg\.pct_of_peak_sustained_active", 1.0),
    "L2 hits, %": (r"lts__t_sector_hit_rate\.pct", 1.0),
}
_ROOT = Path(__file__).parents[1]  # where the child finds this package


class Unprofiled(Exception):
    """There is no report: ncu is absent, or it said why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A launch, and those of :data:`FIGURES` that the report has."""

    name: str
    figures: Mapping[str, float]


def profile(case: Case, folder: Path) -> tuple[Path, list[Kernel]]:
    """Where the report of one call lies, and its launches in their order."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise Unprofiled("ncu is not on the PATH: install NVIDIA Nsight Compute, which the CUDA toolkit has too")
    folder.mkdir(parents=True, exist_ok=True)
    report = folder.resolve() / ("".join(c if c.isalnum() else "-" for c in f"{case.op} {case.label}") + ".ncu-rep")
    asked = [ncu, "--set", "full", "--profile-from-start", "off", "--clock-control", "none", "--force-overwrite"]
    child = [sys.executable, "-m", "bench.profile", json.dumps(dataclasses.asdict(case))]
    _run([*asked, "--export", str(report), *child])
    text = _run([ncu, "--import", str(report), "--page", "raw", "--csv", "--print-units", "base"])
    kernels = parse(text)
    if not kernels:
        raise Unprofiled(f"{report} holds no launch: {text[-300:].strip() or 'ncu printed nothing'}")
    return report, kernels


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unprofiled(f"{Path(command[0]).name} was not done after {TIMEOUT_S} s: take a smaller case") from error
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).split())[-500:]
        hint = (
            "; let users read the counters: NVreg_RestrictProfilingToAdminUsers=0" if "ERR_NVGPUCTRPERM" in said else ""
        )
        raise Unprofiled(f"{Path(command[0]).name} failed with exit code {done.returncode}: {said}{hint}")
    return done.stdout


def parse(text: str) -> list[Kernel]:
    """The launches of a raw page in CSV: a line of names, one of units, then one for each launch."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    names, *rows = list(csv.reader(io.StringIO("\n".join(lines)))) or [[]]
    return [_kernel(dict(zip(names, row, strict=True))) for row in rows[1:]]


def _kernel(values: Mapping[str, str]) -> Kernel:
    found = {}
    for figure, (pattern, factor) in FIGURES.items():
        numbers = [float(v.replace(",", "")) for name, v in values.items() if re.fullmatch(pattern, name) and v]
        if numbers:
            found[figure] = max(numbers) * factor
    return Kernel(values.get("Kernel Name", "?"), found)


def table(case: Case, kernels: Sequence[Kernel]) -> Table:
    """A row for each launch."""

    def cell(figure: str, kernel: Kernel) -> str:
        return number(kernel.figures.get(figure), 1) or "not in the report"

    title = f"{case.op}, {case.label}: cold caches, under ncu"
    figures = {figure: partial(cell, figure) for figure in FIGURES}
    return tabulated(title, kernels, {"kernel": lambda kernel: kernel.name}, figures, {})


# ---- the child process ----------------------------------------------------------------------------------


def call(case: Case, device: str = "cuda") -> None:
    """One call of ours between the profiler's marks, after one on other inputs."""
    _, problem = parse_case(case)
    sets = [get(case.op).inputs(case, problem, device, seed) for seed in (0, 1)]
    warm, measured = ours("cutekernels").bind(case, sets)
    warm()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    measured()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    call(Case(**json.loads(sys.argv[1])))
