"""Several GPUs share a job: tasks go to GPUs of their kind, a lost one costs an attempt, one process writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from cutekernels import gpu as gpus
from cutekernels.autotune import fleet as fleets
from cutekernels.autotune.fleet import LocalFleet, Seat, Slot, SlotLost
from cutekernels.autotune.job import Job
from cutekernels.autotune.report import TuneReport
from cutekernels.autotune.requests import Measure, Outcome
from cutekernels.autotune.run import tune
from cutekernels.db.storage.store import Environment, Store
from cutekernels.errors import CuteKernelsError, JobError, UnknownGpu
from cutekernels.gpu import GpuSpec
from tests.tuner.toys import BEST, H200, ToyConfig, ToyMachine, task, true_us

L40S = gpus.lookup("l40s")
EIGHT = Job("eight", tuple(task(6, f"m={m} n=64") for m in (1, 2, 4, 8, 16, 32, 64, 128)))


@dataclass
class SlowMachine(ToyMachine):
    """A toy GPU whose measurements take real time. ``dies_after``: its machine is lost at that measurement."""

    measure_s: float = 0.02
    dies_after: int = 10**9
    noise: float = 0.0005

    def measure(self, request: Measure) -> dict[str, Outcome]:
        time.sleep(self.measure_s)
        if len(self.measured) >= self.dies_after:
            raise SlotLost("the node died")
        return super().measure(request)


@dataclass
class ToyFleet:
    """``machines`` by seat, each with its kind of GPU; a seat whose machine died opens a second time with a new one."""

    machines: dict[str, tuple[GpuSpec, SlowMachine]]
    patience_s: float = 0.0
    opened: list[str] = field(default_factory=list)
    closed: bool = False
    gone: set[str] = field(default_factory=set)
    lanes: int = 1

    def seats(self) -> Sequence[Seat]:
        return [Seat(name, spec.name) for name, (spec, _) in self.machines.items() if name not in self.gone]

    def open(self, seat: Seat) -> Slot:
        spec, machine = self.machines[seat.name]
        if seat.name in self.opened:
            machine = SlowMachine(measure_s=machine.measure_s)
        self.opened.append(seat.name)
        return Slot(spec, Environment(driver=f"580.{seat.name}"), [machine] * self.lanes, lambda: None)

    def close(self) -> None:
        self.closed = True


def together(fleet: ToyFleet, parties: int, tasks: int | None = None) -> Callable[[Measure], None]:
    """Lets no H200 go on with the first measurement of a task until ``parties`` are at one, however slow the machine.

    So for the first ``tasks`` tasks: ``parties``, unless more are given. Returns what each measurement calls.
    """
    meet, lock, begun = threading.Barrier(parties, timeout=60), threading.Lock(), set[str]()

    def arrive(request: Measure) -> None:
        with lock:
            first = request.prepare.problem not in begun and len(begun) < (tasks or parties)
            begun.add(request.prepare.problem)
        if first:
            meet.wait()

    for spec, machine in fleet.machines.values():
        if spec is H200:
            machine.on_measure = arrive
    return arrive


def h200s(count: int, **kind: float) -> ToyFleet:
    return ToyFleet({f"h{i}": (H200, SlowMachine(**kind)) for i in range(count)})  # type: ignore[arg-type]


def check(db: str, report: TuneReport, kinds: Sequence[str] = ("h200",), job: Job = EIGHT) -> None:
    """Every task of every kind is done, each has a good config, no attempt is stored twice."""
    assert report.ok, [t.message for t in report.tasks]
    problems = sorted(str(t.problem) for t in job.tasks)
    assert sorted((t.gpu, t.problem) for t in report.tasks) == sorted((k, p) for k in kinds for p in problems)
    with Store(db) as store:
        trials, winners = store.trials(), store.winners()
    assert sorted((w.gpu.name, w.problem) for w in winners) == sorted((k, p) for k in kinds for p in problems)
    for winner in winners:
        assert true_us(ToyConfig.parse(winner.config)) <= 1.1 * true_us(BEST)
    searched: dict[tuple[str, str, str], int] = {}
    for t in trials:
        key = t.gpu.name, t.problem, t.config
        searched[key] = searched.get(key, 0) + 1
    # once in the search, once in the final (the winner is not written twice there)
    assert max(searched.values()) <= 2


def test_four_work_side_by_side(db: str) -> None:
    fleet = h200s(4, measure_s=0)
    together(fleet, 4, len(EIGHT.tasks))  # eight equal tasks, four at a time
    report = tune(EIGHT, trials=2, db=db, fleet=fleet)
    assert [t.problem for t in report.tasks] == [str(t.problem) for t in EIGHT.tasks], "in the job's order"
    assert report.ok and len(fleet.opened) == 4 and fleet.closed


def test_a_machine_that_dies_costs_the_attempt_in_flight(db: str) -> None:
    fleet = h200s(3)
    together(fleet, 3)
    fleet.machines["h1"][1].dies_after = 4
    check(db, tune(EIGHT, db=db, fleet=fleet))
    assert fleet.opened.count("h1") == 2, "its seat is opened again"


def test_lanes_share_a_gpu_and_lose_it_together(db: str) -> None:
    fleet = h200s(1)
    fleet.lanes = 4
    machine = fleet.machines["h0"][1]
    together(fleet, 4)
    machine.dies_after = 7  # in the middle of four tasks: each of them loses its GPU once
    check(db, tune(EIGHT, db=db, fleet=fleet))
    assert fleet.opened == ["h0", "h0"], "one loss, not four, which would be too many for a seat"
    assert len({request.prepare.problem for request in machine.measured}) == 4


def test_a_machine_that_leaves_for_good(db: str) -> None:
    fleet = h200s(2)
    arrive = together(fleet, 2)

    def leave(request: Measure) -> None:
        arrive(request)
        if len(fleet.machines["h1"][1].measured) == 5:
            fleet.gone.add("h1")
            raise SlotLost("the node died")

    fleet.machines["h1"][1].on_measure = leave
    check(db, tune(EIGHT, db=db, fleet=fleet))
    assert fleet.opened.count("h1") == 1


def test_a_task_that_loses_every_machine_fails_and_says_so(db: str) -> None:
    fleet = h200s(1)

    def die(request: Measure) -> None:
        if "m=8 " in request.prepare.problem:
            raise SlotLost("the node died")

    fleet.machines["h0"][1].on_measure = die
    opened = fleet.open

    def reopened(seat: Seat) -> Slot:
        slot = opened(seat)
        assert isinstance(slot.lanes[0], SlowMachine)
        slot.lanes[0].on_measure = die
        return slot

    fleet.open = reopened  # type: ignore[method-assign]
    report = tune(Job("one", (task(12, "m=8 n=64"),)), db=db, fleet=fleet)
    assert not report.ok
    assert "lost 3 times" in report.tasks[0].message and "node died" in report.tasks[0].message


def test_a_mixed_fleet_tunes_each_kind(db: str) -> None:
    fleet = h200s(2)
    together(fleet, 2)
    fleet.machines["l0"] = (L40S, SlowMachine())
    report = tune(EIGHT, db=db, fleet=fleet)
    check(db, report, ("h200", "l40s"))
    assert sorted(report.gpu.split(", ")) == ["h200", "l40s"]
    with Store(db) as store:
        drivers = {
            t.gpu.name: {row.environment.driver for row in store.trials(gpu=t.gpu.name)} for t in store.winners()
        }
    assert drivers["h200"] == {"580.h0", "580.h1"}, "a row names the environment of its machine"
    assert drivers["l40s"] == {"580.l0"}


def test_a_named_kind_leaves_the_others_alone(db: str) -> None:
    fleet = h200s(1)
    fleet.machines["l0"] = (L40S, SlowMachine())
    check(db, tune(EIGHT, "l40s", db=db, fleet=fleet), ("l40s",))
    assert fleet.machines["h0"][1].measured == []


def test_no_gpu_of_the_named_kind(db: str) -> None:
    with pytest.raises(CuteKernelsError, match="no a100-sxm-80gb to tune on: h0 is a h200"):
        tune(EIGHT, "a100", db=db, fleet=h200s(1))


def test_an_error_in_a_thread_ends_the_run(db: str) -> None:
    fleet = h200s(2)
    arrive = together(fleet, 2)

    def interrupt(request: Measure) -> None:
        arrive(request)
        raise KeyboardInterrupt

    fleet.machines["h1"][1].on_measure = interrupt
    with pytest.raises(KeyboardInterrupt):
        tune(EIGHT, db=db, fleet=fleet)
    assert fleet.closed and not [t for t in threading.enumerate() if t.name in ("h0", "h1") and t.is_alive()]
    check(db, tune(EIGHT, db=db, fleet=h200s(2)))


def test_a_budget_is_shared_between_the_gpus(db: str) -> None:
    fleet = h200s(2, measure_s=0)
    together(fleet, 2)
    machines = [machine for _, machine in fleet.machines.values()]
    report = tune(EIGHT, db=db, fleet=fleet, budget_s=16.0, clock=lambda: sum(m.now for m in machines) / 2)
    assert sum(m.now for m in machines) / 2 < 24, "a measurement takes a second; all of them would take 32"
    assert [t.state for t in report.tasks].count("unfinished") >= 1
    assert sum(t.winner is not None for t in report.tasks) >= 5, "four, if the first ones took all they need"


def test_a_second_run_measures_nothing(db: str) -> None:
    tune(EIGHT, db=db, fleet=h200s(2))
    fleet = h200s(2)
    assert {t.state for t in tune(EIGHT, db=db, fleet=fleet).tasks} == {"done"}
    assert all(not machine.measured for _, machine in fleet.machines.values())


class TestLocalFleet:
    @pytest.fixture(autouse=True)
    def _four(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fleets, "visible", lambda: ["0", "1", "4", "6"])

    def test_devices_that_are_not_there(self) -> None:
        with pytest.raises(UnknownGpu, match="no GPU 4 here"):
            LocalFleet([0, 4])
        with pytest.raises(JobError, match="named once"):
            LocalFleet([1, 1])


def test_the_order_of_a_ranked_job_is_kept(db: str) -> None:
    began: list[str] = []

    class Watch:
        def begin(self, task: object, number: int, of: int) -> None:
            began.append(str(task))

        def trial(self, *rest: object) -> None: ...

        def end(self, *rest: object) -> None: ...

    job = Job("ranked", (task(4, "m=1 n=64"), task(12, "m=2 n=64"), task(8, "m=4 n=64")), ranked=True)
    tune(job, db=db, fleet=h200s(1), watcher=Watch())
    assert began == [str(t) for t in job.tasks]
