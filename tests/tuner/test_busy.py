"""A GPU kept busy: tasks share it, what is timed has it alone, and no process start stands in anyone's way."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cutekernels import gpu as gpus
from cutekernels.autotune import fleet, runtime
from cutekernels.autotune.fleet import LocalFleet, lanes_of
from cutekernels.autotune.job import Job
from cutekernels.autotune.requests import Measure, Prepare
from cutekernels.autotune.run import tune
from cutekernels.autotune.runtime import LocalRuntime
from cutekernels.autotune.turns import Turns
from cutekernels.isolate import ChildFailure
from tests.processes import until
from tests.tuner.toys import DEFAULT, H200, PROBLEM, task

TASKS = Job("busy", tuple(task(6, f"m={m} n=64") for m in (1, 2, 4)))


@dataclass(frozen=True)
class Work:
    what: str
    pid: int
    began: float
    ended: float
    on: str


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setattr(runtime, "COMPILE_TARGET", "tests.tuner.slow_start:compile_slowly")
    monkeypatch.setattr(runtime, "WORKER_TARGET", "tests.tuner.slow_start:measure_slowly")
    monkeypatch.setattr(gpus, "detect", lambda device=None: H200)
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def done(log: Path) -> list[Work]:
    lines = [line.split(maxsplit=4) for line in log.read_text().splitlines()]
    return [Work(w, int(p), float(b), float(e), *(on or [""])) for w, p, b, e, *on in lines]


def test_what_is_timed_has_the_gpu_alone(log: Path, tmp_path: Path) -> None:
    report = tune(TASKS, db=str(tmp_path / "t.db"), fleet=LocalFleet(None, 2, 3))
    assert report.ok and {t.state for t in report.tasks} == {"tuned"}
    on_gpu = sorted((w for w in done(log) if w.what != "compile"), key=lambda w: w.began)
    timed = [w for w in on_gpu if w.what == "time"]
    assert len({w.on for w in timed}) == len(TASKS.tasks)
    for w in timed:
        beside = [o for o in on_gpu if o is not w and o.began < w.ended and w.began < o.ended]
        assert not beside, (w, beside)
    turns = [w.on for w in timed]
    assert any(a != b != c and a == c for a, b, c in zip(turns, turns[1:], turns[2:], strict=False)), (
        "tasks take turns, none waits for another's end"
    )


def test_three_lanes_prepare_side_by_side(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_MEET", "3")
    assert tune(TASKS, trials=1, db=str(tmp_path / "t.db"), fleet=LocalFleet(None, 1, 3)).ok


def test_a_refresh_waits_for_no_start_and_no_context(log: Path) -> None:
    def ask(machine: LocalRuntime) -> int:
        machine.measure(Measure(Prepare("toy", str(PROBLEM), H200), (str(DEFAULT),), rounds=2))
        return done(log)[-1].pid

    with LocalRuntime(1) as machine:
        pids = [ask(machine)]
        machine._spares.join()
        ready = {w.pid for w in done(log) if w.what == "context"}
        for _ in range(2):
            machine.refresh()
            pids.append(ask(machine))
    assert len(set(pids)) == 3, "a fresh process each time"
    assert set(pids) == ready, "which had its context before"


def test_closing_ends_workers_that_are_starting(log: Path) -> None:
    machine = LocalRuntime(1)
    machine.measure(Measure(Prepare("toy", str(PROBLEM), H200), (str(DEFAULT),), rounds=2))
    children: list[Any] = [machine._worker, *machine._spares._children]
    assert len(children) == 3
    machine.close()
    assert all(child.pid is None for child in children) and not any(t.is_alive() for t in machine._spares._starting)


def test_lanes_follow_memory_and_cpus() -> None:
    assert [lanes_of(H200, cpus) for cpus in (1, 4, 8, 64)] == [1, 2, 4, fleet.LANES]
    assert lanes_of(gpus.lookup("rtx5090"), 64) == 3
    assert lanes_of(replace(H200, memory_bytes=8 << 30), 64) == 1


def test_a_gpu_for_one_process_has_one_lane_and_no_context_ahead(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "one_process", lambda device=None: True)
    one = LocalFleet(None, 1, lanes=4)
    try:
        (lane,) = one.open(one.seats()[0]).lanes
        assert isinstance(lane, LocalRuntime)
        lane.measure(Measure(Prepare("toy", str(PROBLEM), H200), (str(DEFAULT),), rounds=2))
        lane._spares.join()
        assert len({w.pid for w in done(log) if w.what == "context"}) == 1
    finally:
        one.close()


def test_closing_waits_for_no_request_of_another_lane(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane's spares wait for their turn behind one that would be alone, and it for a lane that prepares for long."""
    two = LocalFleet(None, 1, lanes=2)
    first, second = two.open(two.seats()[0]).lanes
    request = Measure(Prepare("toy", str(PROBLEM), H200), (str(DEFAULT),), rounds=2)
    first.measure(request)
    monkeypatch.setenv("TOY_PREPARE_S", "600")
    ends: list[str] = []

    def hang() -> None:
        try:
            second.prepare(request.prepare)
        except ChildFailure as error:
            ends.append(type(error).__name__)

    def wait_to_be_alone() -> None:
        with suppress(ChildFailure):
            first.measure(request)

    assert isinstance(second, LocalRuntime)
    threads = [threading.Thread(target=hang), threading.Thread(target=wait_to_be_alone)]
    threads[0].start()
    until(lambda: len(list(Path(f"{log}.preparing").iterdir())) == 2)  # the first lane's, before, and now this one's
    threads[1].start()
    until(lambda: second._turns._waiting)
    two.close()
    for thread in threads:
        thread.join(60)
    assert ends == ["ChildDied"] and not any(thread.is_alive() for thread in threads)


class TestTurns:
    def test_many_prepare_at_a_time(self) -> None:
        turns, both, met = Turns(), threading.Barrier(2, timeout=60), []

        def prepare() -> None:
            with turns.together():
                met.append(both.wait())

        threads = [threading.Thread(target=prepare) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(met) == [0, 1]

    def test_who_would_be_alone_waits_and_lets_no_newcomer_in(self) -> None:
        turns, order = Turns(), []

        def alone() -> None:
            with turns.alone():
                order.append("alone")

        def newcomer() -> None:
            with turns.together():
                order.append("newcomer")

        threads = [threading.Thread(target=alone), threading.Thread(target=newcomer)]
        with turns.together():
            threads[0].start()
            until(lambda: turns._waiting)
            threads[1].start()
            time.sleep(0.02)
            assert order == []
        for thread in threads:
            thread.join(60)
        assert order == ["alone", "newcomer"]

    def test_a_failure_gives_the_turn_back(self) -> None:
        turns = Turns()
        for way in (turns.alone, turns.together):
            with pytest.raises(KeyError), way():
                raise KeyError
        with turns.alone():
            pass
        with turns.together():
            pass
