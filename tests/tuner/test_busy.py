"""A GPU kept busy: the next task compiles while this one measures, and no process start stands in its way."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cutekernels import gpu as gpus
from cutekernels.autotune import runtime
from cutekernels.autotune.job import Job
from cutekernels.autotune.run import tune
from cutekernels.autotune.runtime import Compilers, LocalRuntime, Measure, Prepare
from tests.tuner.slow_start import COMPILE_S, MEASURE_S, START_S
from tests.tuner.toys import DEFAULT, H200, PROBLEM, VALID, task

TASKS = Job("busy", tuple(task(6, f"m={m} n=64") for m in (1, 2, 4, 8)))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setattr(runtime, "COMPILE_TARGET", "tests.tuner.slow_start:compile_slowly")
    monkeypatch.setattr(runtime, "WORKER_TARGET", "tests.tuner.slow_start:measure_slowly")
    monkeypatch.setattr(gpus, "detect", lambda device=None: H200)
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def seconds(log: Path, what: str) -> float:
    return sum(float(line.split()[1]) for line in log.read_text().splitlines() if line.startswith(what))


def run(log: Path, db: Path, jobs: int = 3) -> tuple[float, float]:
    """Seconds a task after the first, which starts everything, and the share of them in which the GPU measured."""
    log.write_text("")
    with LocalRuntime(jobs) as processes:
        tune(Job("first", (task(2, "m=16 n=64"),)), db=str(db), runtime=processes)
        log.write_text("")
        report = tune(TASKS, db=str(db), runtime=processes)
    assert report.ok and {t.state for t in report.tasks} == {"tuned"}
    return report.seconds / len(TASKS.tasks), seconds(log, "measure") / report.seconds


@pytest.mark.slow
def test_the_share_of_time_in_which_the_gpu_measures(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_s, after = run(log, tmp_path / "after.db")
    monkeypatch.setattr(runtime, "SPARES", 0)
    monkeypatch.setattr(Compilers, "ahead", lambda self, requests: None)
    before_s, before = run(log, tmp_path / "before.db")
    print(f"before {before_s:.2f} s a task, GPU busy {before:.0%}; after {after_s:.2f} s, {after:.0%}")
    assert after_s < before_s - 0.6 * START_S and after > 1.3 * before


def test_what_is_compiled_ahead_is_compiled_once(log: Path) -> None:
    with Compilers(2) as pool:
        requests = [("toy", str(PROBLEM), str(c), H200) for c in VALID[:6]]
        pool.ahead(requests)
        futures = [pool.submit(r) for r in requests]
        assert [f.result(30).registers for f in futures] == [64] * 6
        assert Counter(line.split()[0] for line in log.read_text().splitlines()) == {"compile": 6}


def test_what_is_wanted_now_does_not_wait_for_what_is_compiled_ahead(log: Path) -> None:
    with Compilers(1) as pool:
        pool.submit(("toy", str(PROBLEM), "warm", H200)).result(30)
        pool.ahead([("toy", str(PROBLEM), str(c), H200) for c in VALID[:8]])
        pool.submit(("toy", str(PROBLEM), "now", H200)).result(30)
        done = [line.split("n=64 ")[1] for line in log.read_text().splitlines()]
        assert done[:1] == ["warm"] and "now" in done and done.index("now") <= 2, "after the one that was begun"


def test_a_later_look_ahead_replaces_the_earlier(log: Path) -> None:
    with Compilers(1) as pool:
        first, second = ([("toy", str(PROBLEM), f"{name}{i}", H200) for i in range(9)] for name in "ab")
        pool.ahead(first)
        pool.ahead(second)
        pool.submit(second[0]).result(30)
        assert sum("n=64 a" in line for line in log.read_text().splitlines()) <= 1


def test_a_refresh_does_not_wait_for_a_start(log: Path) -> None:
    def ask(machine: LocalRuntime) -> int:
        machine.measure(Measure(Prepare("toy", str(PROBLEM), H200), (str(DEFAULT),), rounds=2))
        return int(log.read_text().splitlines()[-1].split()[2])

    with LocalRuntime(1) as machine:
        pids = [ask(machine)]
        for thread in machine._starting:
            thread.join()
        import time

        began = time.monotonic()
        for _ in range(2):
            machine.refresh()
            pids.append(ask(machine))
        taken_s = time.monotonic() - began
    assert len(set(pids)) == 3, "a fresh process each time"
    assert taken_s < START_S + 4 * MEASURE_S and COMPILE_S > 0


def test_closing_ends_workers_that_are_starting(log: Path) -> None:
    machine = LocalRuntime(1)
    machine.measure(Measure(Prepare("toy", str(PROBLEM), H200), (str(DEFAULT),), rounds=2))
    children: list[Any] = [machine._worker, *machine._spares]
    assert len(children) == 3
    machine.close()
    assert all(child.pid is None for child in children) and not any(t.is_alive() for t in machine._starting)
