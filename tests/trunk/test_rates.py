"""Rates: calibrated ones take the place of scaled ones, where they are plausible and of this revision."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutekernels import dispatch, gpu, rates
from cutekernels.db.storage import snapshot
from cutekernels.db.storage.store import Rate, Store
from cutekernels.ops import registry
from tests.processes import python

H200, L40S = gpu.lookup("h200"), gpu.lookup("l40s")


@pytest.fixture(autouse=True)
def _read_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(snapshot, "_held", {})
    monkeypatch.setattr(snapshot, "_said", set())
    rates.forget()
    yield
    rates.forget()


def calibrate(path: Path, spec: gpu.GpuSpec, *, revision: int = rates.REVISION, **values: float) -> None:
    with Store(path) as store:
        store.keep_rates(Rate(gpu=spec.name, name=n, revision=revision, value=v, unit="us") for n, v in values.items())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned.db"  # the one in the settings, see conftest.py


class TestWhichAreTaken:
    def test_without_a_calibration_they_are_scaled(self) -> None:
        assert rates.of(L40S) is rates.scaled(L40S)
        assert rates.rates_for(L40S) == {}
        assert not rates.of(L40S).measured

    @pytest.mark.parametrize("name", ["l40s", "a100", "rtx5090", "h100-pcie"])
    def test_an_undescribed_gpu_is_scaled_by_its_own_clock(self, name: str) -> None:
        spec = gpu.lookup(name)
        own = rates.scaled(spec)
        assert own.clock_mhz == pytest.approx(1700 * spec.boost_mhz / 1980) and own.clock_mhz != H200.boost_mhz
        assert rates.scaled(replace(spec, name="no-row")).clock_mhz == own.clock_mhz
        faster = rates.scaled(replace(spec, name="no-row", boost_mhz=2 * spec.boost_mhz))
        assert faster.clock_mhz == 2 * own.clock_mhz and faster.barrier_us == own.barrier_us / 2

    def test_a_calibrated_one_takes_its_place_and_the_others_stay(self, path: Path) -> None:
        calibrate(path, L40S, launch_us=2.5)
        assert rates.of(L40S) == replace(rates.scaled(L40S), launch_us=2.5, measured=True)
        assert rates.of(H200) is rates.scaled(H200), "another GPU's"

    def test_a_tune_reads_those_of_its_own_database(self, path: Path, tmp_path: Path) -> None:
        calibrate(path, L40S, launch_us=2.5)
        other = tmp_path / "other.db"
        calibrate(other, L40S, launch_us=3.0)
        with rates.read_from(str(other)):
            assert rates.of(L40S).launch_us == 3.0
        assert rates.of(L40S).launch_us == 2.5

    def test_it_is_a_stand_ins_too(self, path: Path) -> None:
        """But for what a stand-in may not use."""
        calibrate(path, H200, launch_us=1.25)
        own = rates.of(gpu.lookup("h200-as-a100"))
        assert own == replace(rates.of(H200), dependent_us=0.0, warpgroup_flops_per_us=0.0)
        assert own.launch_us == 1.25
        assert rates.of(gpu.lookup("h200-as-rtx5090")).dependent_us == rates.of(H200).dependent_us

    @pytest.mark.parametrize("value", [0.49, 4.6])
    def test_an_implausible_one_is_refused_with_one_line(
        self, path: Path, value: float, caplog: pytest.LogCaptureFixture
    ) -> None:
        calibrate(path, L40S, launch_us=value, barrier_us=rates.scaled(L40S).barrier_us * 2)
        with caplog.at_level(logging.WARNING, logger="cutekernels"):
            found = rates.of(L40S)
            rates.forget()
            rates.of(L40S)
        assert (found.launch_us, found.barrier_us) == (1.5, rates.scaled(L40S).barrier_us * 2)
        (line,) = caplog.messages
        assert "launch_us of l40s" in line and "3 times off the scaled 1.5" in line

    def test_those_of_another_revision_or_name_are_passed_over(self, path: Path) -> None:
        calibrate(path, L40S, launch_us=2.5, revision=rates.REVISION + 1)
        calibrate(path, L40S, another_us=2.5, measured=1.0)
        assert rates.of(L40S) is rates.scaled(L40S)

    def test_a_broken_row_hides_no_other(self, path: Path) -> None:
        calibrate(path, L40S, launch_us=2.5, barrier_us=0.1)
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE rate SET value = 'fast' WHERE name = 'barrier_us'")
        connection.close()
        assert set(rates.rates_for(L40S)) == {"launch_us"}

    def test_a_later_calibration_replaces_an_earlier_one(self, path: Path) -> None:
        calibrate(path, L40S, launch_us=2.5)
        calibrate(path, L40S, launch_us=2.0)
        with Store(path, readonly=True) as store:
            assert [(r.name, r.value) for r in store.rates(gpu="l40s")] == [("launch_us", 2.0)]
        assert rates.of(L40S).launch_us == 2.0


class TestWhenTheyAreRead:
    def test_with_the_winners_and_once(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calibrate(path, L40S, launch_us=2.5)
        loads = []
        monkeypatch.setattr(snapshot, "load", lambda name, load=snapshot.load: loads.append(name) or load(name))
        for _ in range(3):
            dispatch.winners(L40S)
            rates.of(L40S)
        assert loads == ["l40s"]

    def test_reload_brings_new_ones(self, path: Path) -> None:
        calibrate(path, L40S, launch_us=2.5)
        assert rates.of(L40S).launch_us == 2.5
        calibrate(path, L40S, launch_us=2.0)
        assert rates.of(L40S).launch_us == 2.5
        dispatch.reload()
        assert rates.of(L40S).launch_us == 2.0

    def test_a_watched_database_too(self, path: Path) -> None:
        calibrate(path, L40S, launch_us=2.5)
        before = snapshot.snapshot_of("l40s")
        calibrate(path, L40S, launch_us=2.0)
        assert snapshot.load("l40s") != before, "which is what the watching thread compares"

    def test_a_database_of_an_earlier_schema_has_none(self, path: Path) -> None:
        calibrate(path, L40S, launch_us=2.5)
        with sqlite3.connect(path) as connection:
            connection.execute("DROP TABLE rate")
            connection.execute("UPDATE alembic_version SET version_num = '0003'")
        connection.close()
        assert rates.of(L40S) is rates.scaled(L40S)

    def test_no_sqlalchemy_is_loaded(self, path: Path) -> None:
        calibrate(path, L40S, launch_us=2.5)
        code = (
            "import sys; from cutekernels import gpu, rates; "
            "assert rates.of(gpu.lookup('l40s')).launch_us == 2.5; print('sqlalchemy' in sys.modules)"
        )
        done = python(code, env=os.environ)
        assert done.stdout == "False\n"


# ---- what remembers them ------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
def test_no_default_outlives_a_calibration(op: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default that read rates when it was chosen first reads them again, after a reload."""
    problem = op.Problem.parse(op.suite[0])
    asked: list[gpu.GpuSpec] = []
    monkeypatch.setattr(rates, "of", lambda spec: asked.append(spec) or rates.scaled(spec))

    def choose() -> int:
        asked.clear()
        config = op.default(problem, L40S)
        op.estimate_us(problem, config, L40S)
        return len(asked)

    rates.forget()
    first = choose()
    again = choose()
    dispatch.reload()
    assert choose() == first >= again


def test_models_read_the_mma_rates(path: Path) -> None:
    op = registry.get("gemm")
    problem = op.Problem.parse("m=8192 n=8192 k=8192")
    config = op.default(problem, L40S)
    assert config.body == "multistage"
    before = op.estimate_us(problem, config, L40S)
    calibrate(path, L40S, mma_flops_per_us=rates.scaled(L40S).mma_flops_per_us / 2)
    dispatch.reload()
    assert op.estimate_us(problem, config, L40S) > 1.5 * before
