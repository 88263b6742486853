"""``cutekernels calibrate``: readings become rates, the rates a database's rows. Timers are fakes; kernels compile."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cutekernels import cli, gpu, rates
from cutekernels.autotune import calibrate, probes
from cutekernels.autotune.probes import ON_H200, PROBES, Lab, Probe
from cutekernels.conditions import Conditions, Watch
from cutekernels.db.storage import snapshot
from cutekernels.db.storage.store import Store
from cutekernels.errors import CompileError
from cutekernels.ops import registry
from tests.command_line import invoke
from tests.triton_compiled import TARGETS

H200, L40S = gpu.lookup("h200"), gpu.lookup("l40s")
PROBE = {probe.rate: probe for probe in PROBES}


def seen(clock_mhz: float = 1700.0) -> Watch:
    watch = Watch("")
    watch._samples.append(Conditions(clock_mhz, 50.0, 600.0))
    return watch


class Told(Lab):
    """Times that are told instead of taken, by the kernel's or the op's name, or by a function of its arguments."""

    def __init__(self, spec: gpu.GpuSpec = H200, **times: Any) -> None:
        super().__init__(spec, "cpu", seen())
        self.times = times

    def _told(self, name: str, *args: Any, **options: Any) -> float:
        time = self.times[name]
        return float(time(*args, **options) if callable(time) else time)

    def us(self, launches: Sequence[Any], rounds: int = 9, least_us: float = 500.0) -> float:
        return self._told("copy")

    def reading_us(self, words: int, block: int, programs: int) -> float:
        return self._told("read", words)

    def op_us(self, name: str, problem: str, config: str, rounds: int = 9) -> float:
        return self._told(name, problem, config)


# ---- what is read -------------------------------------------------------------------------------------------


def test_each_probe_is_of_a_rate_whose_reading_on_an_h200_is_known() -> None:
    assert set(PROBE) == set(ON_H200) < set(rates.NAMES) and len(PROBES) == len(PROBE)


def test_readings_are_in_the_rates_own_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that follow from a machine's rates by the probes' definitions give these rates back."""
    monkeypatch.setattr(probes, "_DRAM_WORDS", 1 << 16)

    def gemm(problem: str, config: str) -> float:
        extent = int(problem.split()[0][2:])
        return 2.0 * extent**3 / 132 / (6e6 if "warpgroup" in config else 4e6)

    lab = Told(
        copy=2 * 4 * (1 << 16) / (0.8 * 4.8e6),
        read=lambda words: 4 * words / (0.9 * 4.8e6),
        gemm=gemm,
        rms_norm=lambda problem, config: 6.7 if "warps=1 " in config else 4.0,
    )
    assert {name: probe.read(lab) for name, probe in PROBE.items()} == pytest.approx(
        {
            "warpgroup_flops_per_us": 6e6,
            "mma_flops_per_us": 4e6,
            "clock_mhz": 1700,
            "smem_bytes_per_us": 128 * 1700,
            "dram_share": 0.9,
            "walked_us": 2.7 / 112,
        }
    )


class TestRates:
    def test_an_h200s_own_readings_give_the_fitted_row(self) -> None:
        for name, reading in ON_H200.items():
            assert PROBE[name].rate_of(reading) == pytest.approx(getattr(rates.FITTED, name))
            assert PROBE[name].rate_of(reading * 1.25) == pytest.approx(getattr(rates.FITTED, name) * 1.25)

    def test_recorded_ones_are_of_the_record(self) -> None:
        from bench.judge import SWEEPS, recorded

        rows = {(r.get("op"), r.get("problem"), r.get("config")): r.get("us") for r in recorded(SWEEPS / "h200")}
        us = rows["gemm", "m=8192 n=8192 k=8192 b_major=k", probes._GROUP_TILE]
        assert ON_H200["warpgroup_flops_per_us"] == pytest.approx(2 * 8192**3 / us / 132, rel=1e-4)
        one, two = (rows["rms_norm", "rows=16 cols=3584", probes._CHUNKS.format(warps=w)] for w in (1, 2))
        assert ON_H200["walked_us"] == pytest.approx((one - two) / 112, rel=1e-4)


@pytest.mark.parametrize("spec", TARGETS, ids=lambda spec: spec.name)
def test_every_probe_runs_on_every_architecture(spec: gpu.GpuSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compile without spilling, configs of our ops break no rule, and a kernel is called with what it takes."""
    monkeypatch.setattr(probes, "_DRAM_WORDS", 1 << 22)
    made = []

    def compiled(fn: Any, **options: Any) -> Any:
        made.append(compile_kernel(fn, **options))
        counted = len([kind for kind in options["signature"].values() if kind != "constexpr"])

        class Loaded:
            def kernel(self) -> Any:
                return lambda grid, *args: (grid, args) if len(args) == counted and len(grid) == 3 else 1 / 0

        return Loaded()

    compile_kernel = probes.compile_kernel
    monkeypatch.setattr(probes, "compile_kernel", compiled)

    class Still(Lab):
        def us(self, launches: Sequence[Any], rounds: int = 9, least_us: float = 500.0) -> float:
            launches[0]()
            return 1.0

        def op_us(self, name: str, problem: str, config: str, rounds: int = 9) -> float:
            op = registry.get(name)
            op.check(op.Problem.parse(problem), op.Config.parse(config), spec)
            return 1.0

    lab = Still(spec, "cpu", seen())
    for probe in PROBES:
        if probe.takes(spec):
            probe.read(lab)
    (artifact,) = made
    assert artifact.facts.stack_bytes == 0 and "ld.global.cg.v4.b32" in artifact.ptx, "16 bytes are loaded at once"


# ---- the run ------------------------------------------------------------------------------------------------


def probe(name: str, reading: float | Exception, needs: str = "") -> Probe:
    def read(lab: Lab) -> float:
        if isinstance(reading, Exception):
            raise reading
        return reading

    return Probe(name, f"the {name}", read, needs)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four probes: one of a rate, one that fails, one that goes wrong, one elsewhere."""
    found = (
        probe("launch_us", 1.2),
        probe("block_us", CompileError("no kernel\nat all")),
        probe("dram_share", -1.0),
        probe("warpgroup_flops_per_us", 1.0, needs="has_wgmma"),
    )
    monkeypatch.setattr(probes, "PROBES", found)
    monkeypatch.setattr(probes, "ON_H200", {"launch_us": 1.0, "block_us": 1.0, "dram_share": 0.9})


@pytest.fixture
def few_here(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with an L40S."""
    monkeypatch.setattr(gpu, "detect", lambda device=None: L40S)
    monkeypatch.setattr(probes, "Lab", lambda spec: Told(spec))


class TestRun:
    def test_only_sound_readings_become_rates(self, few: None) -> None:
        rows = {row["rate"]: row for row in calibrate.measured(Told(L40S), 30.0)}
        assert list(rows) == ["launch_us", "block_us", "dram_share"], "an L40S has no warpgroup MMA"
        stored = {name: row["row"] for name, row in rows.items() if "row" in row}
        (rate,) = stored.values()
        assert (rate.gpu, rate.name, rate.revision, rate.unit) == ("l40s", "launch_us", rates.REVISION, "us")
        assert rate.value == pytest.approx(1.5 * 1.2)
        assert "reading=1.2" in rate.conditions and "clock_mhz=1700" in rate.conditions
        assert "the launch_us" in rate.source
        assert rows["block_us"]["note"] == "failed: CompileError: no kernel"
        assert "not stored" in rows["dram_share"]["note"]

    def test_nothing_new_is_measured_after_its_time(self, few: None) -> None:
        ticks = iter([0.0, 1.0, 29.0, 31.0])
        rows = calibrate.measured(Told(L40S), 30.0, lambda: next(ticks))
        assert ["not reached in 30 s" in row["note"] for row in rows] == [False, False, True]

    def test_it_stores_what_the_models_then_use(
        self, few_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(snapshot, "_held", {})
        done = invoke(calibrate.app, "--format", "json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)[0]["calibrated"] == pytest.approx(1.8)
        assert "1 of 3 rates of l40s" in done.stderr
        rates.forget()
        assert rates.of(L40S).launch_us == pytest.approx(1.8)
        rates.forget()
        with Store(tmp_path / "tuned.db", readonly=True) as store:
            assert [r.name for r in store.rates()] == ["launch_us"]

    def test_another_database(self, few_here: None, tmp_path: Path) -> None:
        assert invoke(calibrate.app, "--db", str(tmp_path / "own.db")).exit_code == 0
        assert (tmp_path / "own.db").exists() and not (tmp_path / "tuned.db").exists()

    def test_no_rate_at_all_is_a_failure(self, few_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probes, "PROBES", [probe("dram_share", -1.0)])
        assert invoke(calibrate.app).exit_code == 1


@pytest.mark.skipif(gpu.present(H200), reason="needs a machine without a GPU")
class TestWithoutAGpu:
    def test_it_ends_with_one_line(self, tmp_path: Path) -> None:
        done = invoke(calibrate.app)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1 and "no CUDA device" in done.stderr and "--dry-run" in done.stderr
        assert not (tmp_path / "tuned.db").exists()

    def test_a_dry_run_lists_what_it_would_measure(self, tmp_path: Path) -> None:
        done = invoke(calibrate.app, "--dry-run", "--format", "json")
        rows = {row["rate"]: row for row in json.loads(done.stdout)}
        assert (done.exit_code, set(rows)) == (0, set(PROBE))
        assert {name: row["scaled"] for name, row in rows.items()} == {
            name: getattr(rates.scaled(H200), name) for name in PROBE
        }
        assert all(row["what"] and row["unit"] and row["reading"] is None for row in rows.values())
        assert not (tmp_path / "tuned.db").exists()

    def test_of_another_gpu(self) -> None:
        done = invoke(calibrate.app, "--dry-run", "--gpu", "l40s", "--format", "json")
        rows = {row["rate"]: row["scaled"] for row in json.loads(done.stdout)}
        assert rows["clock_mhz"] == rates.scaled(L40S).clock_mhz
        assert "warpgroup_flops_per_us" not in rows

    @pytest.mark.parametrize("words", [["--gpu", "h200"], ["--dry-run", "--gpu", "h900"]])
    def test_misuse(self, words: list[str]) -> None:
        assert invoke(calibrate.app, *words).exit_code == 2


# ---- doctor -------------------------------------------------------------------------------------------------


class TestDoctor:
    @pytest.fixture(autouse=True)
    def _an_l40s(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu, "detect", lambda device=None: L40S)
        monkeypatch.setattr(snapshot, "_held", {})

    def test_it_says_that_none_is_calibrated(self) -> None:
        (found,) = cli._rates()
        assert (found.what, found.state) == ("rates", "ok")
        assert "scaled" in found.value and "calibrate" in found.remedy

    def test_it_shows_both(self, tmp_path: Path) -> None:
        with Store(tmp_path / "tuned.db") as store:
            store.keep_rates(calibrate_row(name, value) for name, value in (("launch_us", 1.25), ("barrier_us", 9.0)))
        found = {f.what: f for f in cli._rates()}
        assert set(found) == set(rates.NAMES)
        assert found["launch_us"].value == "scaled 1.5 us, calibrated 1.25"
        assert "not calibrated" in found["block_us"].value
        assert found["barrier_us"].state == "absent" and "not used" in found["barrier_us"].remedy


def calibrate_row(name: str, value: float) -> Any:
    from cutekernels.db.storage.store import Rate

    return Rate(gpu="l40s", name=name, revision=rates.REVISION, value=value, unit="us")


def test_every_rate_has_a_unit() -> None:
    assert all(calibrate.unit_of(name) for name in rates.NAMES)
    assert all(math.isfinite(getattr(rates.FITTED, f.name)) for f in fields(rates.Rates))
