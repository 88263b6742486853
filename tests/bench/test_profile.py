"""``bench OP --profile`` with a stand-in for ncu: what it is asked, what is read from its report, and its failures."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench import __main__ as command
from bench import profile
from bench.suites import Case
from tests.command_line import invoke

SMALL = Case("gemm", "m=24 n=16 k=32 c=n", "small", 0.5, 2.0)
REPORT = """==PROF== Connected
"ID","Kernel Name","gpu__time_duration.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",\
"sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active","lts__t_sector_hit_rate.pct"
"","","ns","%","%","%","%"
"0","kernel_a","1,234,567","81.5","0","62.25","33.4"
"1","kernel_b","1000","","","",""
"""
NCU = """#!{python}
import json, os, sys
with open({log!r}, "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
if os.environ.get("NCU_FAILS"):
    sys.exit("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")
if "--import" in sys.argv:
    print({report!r} if not os.environ.get("NCU_IS_EMPTY") else "==WARNING== No kernels were profiled.")
"""


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands first on the PATH, and writes down how it was called."""
    log, program = tmp_path / "log", tmp_path / "ncu"
    program.write_text(NCU.format(python=sys.executable, log=str(log), report=REPORT))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return log


def test_figures_are_read_from_the_report(ncu: Path, tmp_path: Path) -> None:
    report, (first, second) = profile.profile(SMALL, tmp_path / "reports")
    assert report == tmp_path / "reports" / "gemm-small.ncu-rep"
    assert first.name == "kernel_a"
    assert first.figures == {
        "time, µs": pytest.approx(1234.567),
        "DRAM, % of its peak": 81.5,
        "tensor pipes, % of cycles": 62.25,
        "L2 hits, %": 33.4,
    }
    assert second.figures == {"time, µs": 1.0}
    measured, imported = map(json.loads, ncu.read_text().splitlines())
    assert measured[measured.index("--export") + 1] == imported[imported.index("--import") + 1] == str(report)
    assert Case(**json.loads(measured[-1])) == SMALL
    assert measured[-3:-1] == ["-m", "bench.profile"]


def test_the_command_prints_a_row_for_each_launch(ncu: Path, tmp_path: Path) -> None:
    words = ["rms_norm", "--match", "2048", "--profile", "--out", str(tmp_path / "reports")]
    result = invoke(command.app, *words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "kernel_a" in result.output
    assert "1234.6" in result.output
    assert "not in the report" in result.output
    assert "ncu-ui" in result.output


def test_without_ncu_or_its_permission_it_says_so(ncu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCU_FAILS", "1")
    with pytest.raises(profile.Unprofiled, match="exit code 1: .*NVreg_RestrictProfilingToAdminUsers=0"):
        profile.profile(SMALL, tmp_path)
    monkeypatch.delenv("NCU_FAILS")
    monkeypatch.setenv("NCU_IS_EMPTY", "1")
    with pytest.raises(profile.Unprofiled, match="holds no launch: ==WARNING== No kernels"):
        profile.profile(SMALL, tmp_path)
    monkeypatch.setattr(profile.shutil, "which", lambda name: None)
    result = invoke(command.app, "rms_norm", "--profile")
    assert result.exit_code == 1
    assert "ncu is not on the PATH: install NVIDIA Nsight Compute" in " ".join(result.output.split())


def test_the_child_profiles_one_call_alone() -> None:
    """On CPU tensors: two calls, the second between the profiler's marks."""
    seen: list[str] = []
    with (
        mock.patch.object(torch.cuda, "synchronize", lambda: None),
        mock.patch.object(torch.cuda.profiler, "start", lambda: seen.append("start")),
        mock.patch.object(torch.cuda.profiler, "stop", lambda: seen.append("stop")),
        mock.patch.object(profile, "ours", lambda name: mock.Mock(bind=_bind(seen))),
    ):
        profile.call(SMALL, "cpu")
    assert seen == ["call 0", "start", "call 1", "stop"]


def _bind(seen: list[str]) -> object:
    return lambda case, sets: [lambda i=i: seen.append(f"call {i}") for i in range(len(sets))]
