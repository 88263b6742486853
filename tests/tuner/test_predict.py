"""The same job without the GPU: the space compiled, pruned by facts, ranked by the model, crowned as predicted."""

from __future__ import annotations

from typing import Any

import pytest

from cutekernels.autotune import departures
from cutekernels.autotune.history import TaskHistory
from cutekernels.autotune.predict import Prediction
from cutekernels.autotune.report import TaskReport
from cutekernels.backends import Facts
from cutekernels.db.storage.store import Environment, Store
from cutekernels.errors import CacheUnusable
from cutekernels.isolate import ChildDied, RemoteError, StartFailed
from cutekernels.op import Config
from tests.tuner.toys import A100, DEFAULT, PROBLEM, TOY, VALID, ToyConfig, ToyMachine, task

ABORTED = ChildDied("compile", -6, "MLIR assertion")
RANKED = sorted(VALID, key=lambda c: (TOY.estimate_us(PROBLEM, c, A100), str(c)))


def task_history(store: Store, origin: str = "predicted") -> TaskHistory:
    return TaskHistory(store, TOY, PROBLEM, A100, Environment(), origin)


def run(store: Store, machine: ToyMachine, **options: Any) -> TaskReport:
    return Prediction(task(len(VALID)), A100, task_history(store), machine, clock=machine.clock, **options).run()


def test_every_valid_config_is_a_predicted_row_and_the_best_that_holds_is_crowned(store: Store) -> None:
    best, second, third = RANKED[:3]
    machine = ToyMachine(compile_failures={best: ABORTED}, facts={second: Facts(255, 2000, 0)})
    report = run(store, machine)
    assert machine.compiled == RANKED, "best estimates first"
    assert machine.measured == []
    trials = {t.config: t for t in store.trials(op="toy")}
    assert set(trials) == {str(c) for c in VALID}
    assert {t.origin for t in trials.values()} == {"predicted"}
    assert trials[str(best)].status == "compile_error" and "SIGABRT" in trials[str(best)].message
    assert trials[str(second)].status == "pruned" and trials[str(second)].stack_bytes == 2000
    assert trials[str(third)].median_us == TOY.estimate_us(PROBLEM, third, A100)
    gain = TOY.estimate_us(PROBLEM, DEFAULT, A100) / TOY.estimate_us(PROBLEM, third, A100)
    assert trials[str(third)].ratio == gain and trials[str(DEFAULT)].ratio == 1.0, "by the model"
    assert trials[str(third)].ratio_low is None, "nothing was measured"
    assert report.state == "predicted"
    assert report.winner == trials[str(third)] == store.winners(gpu="a100-sxm-80gb")[0]
    assert report.attempts == {"ok": len(VALID) - 2, "compile_error": 1, "pruned": 1}
    assert report.default == str(DEFAULT)


def test_a_jobs_trials_are_its_compiles(store: Store) -> None:
    """The best by the model and the default; ``limit`` is another number, of the best alone."""
    machine = ToyMachine()
    report = Prediction(task(6), A100, task_history(store), machine, clock=machine.clock).run()
    assert machine.compiled == [*RANKED[:5], DEFAULT] and report.attempts == {"ok": 6}
    more = ToyMachine()
    Prediction(task(6), A100, task_history(store), more, 8, clock=more.clock).run()
    assert more.compiled == RANKED[5:8]


def test_among_equals_the_default_is_crowned(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(TOY), "estimate_us", lambda self, p, c, gpu: 5.0)
    report = run(store, ToyMachine())
    assert report.winner is not None and report.winner.config == str(DEFAULT)


def test_a_second_run_compiles_nothing(store: Store) -> None:
    first = run(store, ToyMachine())
    machine = ToyMachine()
    again = run(store, machine)
    assert machine.compiled == []
    assert (again.state, again.measured, again.resumed, again.winner) == ("done", 0, len(VALID), first.winner)


def test_limit_takes_the_best_by_the_model(store: Store) -> None:
    machine = ToyMachine()
    report = run(store, machine, limit=5)
    assert machine.compiled == RANKED[:5]
    assert report.winner is not None and report.winner.config == str(RANKED[0])
    more = ToyMachine()
    assert run(store, more, limit=7).resumed == 5
    assert more.compiled == RANKED[5:7]


def test_fewer_attempts_leave_a_better_prediction(store: Store) -> None:
    """What earlier runs stored counts, though this one would not try it."""
    best = run(store, ToyMachine()).winner
    machine = ToyMachine(width=1)
    late = Prediction(task(1), A100, task_history(store), machine, clock=machine.clock).run()
    assert best is not None and late.winner == best

    def tick(trial: Any, done: int, wanted: int) -> None:
        machine.now += 1

    for options in ({"limit": 1}, {"limit": 1, "force": True}, {"force": True, "deadline": machine.now + 0.5}):
        again = run(store, machine, on_trial=tick, **options).winner
        assert again is not None and again.config == best.config, options


def test_interrupted_runs_keep_their_rows_and_go_on(store: Store) -> None:
    machine = ToyMachine(width=1)

    def stop(trial: Any, done: int, wanted: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, machine, on_trial=stop)
    kept = {t.config for t in store.trials(op="toy")}
    assert len(kept) == 6
    second = ToyMachine()
    report = run(store, second)
    assert report.resumed == 6
    assert {str(c) for c in second.compiled} == {str(c) for c in VALID} - kept


def test_a_run_that_was_stopped_before_it_crowned_is_made_good(store: Store) -> None:
    """Its rows are all there, and the winner is still one of older sources."""
    old = task_history(store)
    old.sources = "0" * 64
    row = old.row(RANKED[1], "ok", estimate_us=1.0)
    old.record([row])
    old.crown(row)

    def stop(trial: Any, done: int, wanted: int) -> None:
        if done == wanted:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, ToyMachine(width=1), on_trial=stop)
    assert store.winners() == [row]
    machine = ToyMachine()
    report = run(store, machine, limit=5)
    assert machine.compiled == []
    assert report.winner is not None and report.winner.config == str(RANKED[0])
    assert task_history(store).holds(report.winner) and store.winners() == [report.winner]


def test_the_deadline_stops_it(store: Store) -> None:
    machine = ToyMachine(width=1)

    def tick(trial: Any, done: int, wanted: int) -> None:
        machine.now += 1

    report = run(store, machine, deadline=5.0, on_trial=tick)
    assert report.state == "unfinished"
    assert 5 <= report.measured < len(VALID)
    assert report.winner is not None and report.winner.config == str(RANKED[0])
    assert run(store, ToyMachine()).state == "predicted"


def test_a_measured_winner_stays(store: Store) -> None:
    measured = task_history(store, "measured")
    row = measured.row(DEFAULT, "ok", estimate_us=50.0)
    measured.record([row])
    measured.crown(row)
    report = run(store, ToyMachine())
    assert report.winner is not None and report.winner.id == row.id
    assert "measured winner stays" in report.message
    assert store.winners() == [row]


def test_nothing_compiles(store: Store) -> None:
    report = run(store, ToyMachine(compile_failures=dict.fromkeys(VALID, ABORTED)))
    assert (report.state, report.winner) == ("failed", None)
    assert str(len(VALID)) in report.message


def test_force_compiles_again(store: Store) -> None:
    run(store, ToyMachine())
    machine = ToyMachine()
    assert run(store, machine, force=True).state == "predicted"
    assert len(machine.compiled) == len(VALID)
    assert len(store.trials(op="toy")) == 2 * len(VALID)


def test_a_config_that_a_rule_refuses_today_is_not_crowned(store: Store) -> None:
    class Stricter(type(TOY)):  # type: ignore[misc]
        def why_not(self, p: Any, c: Config, gpu: Any) -> str | None:
            return "no longer" if c == RANKED[0] else super().why_not(p, c, gpu)

    run(store, ToyMachine())
    op = Stricter()
    history = TaskHistory(store, op, PROBLEM, A100, Environment(), "predicted")
    job = type(task())(op, PROBLEM, 10)
    report = Prediction(job, A100, history, ToyMachine(), force=True).run()
    assert report.winner is not None and report.winner.config == str(RANKED[1])
    assert isinstance(RANKED[1], ToyConfig)


def test_a_compile_that_the_machine_spoiled_is_tried_again(store: Store) -> None:
    best, second = RANKED[:2]
    killed = ChildDied("compile", -9, "")
    machine = ToyMachine(spoiled_compiles={best: [killed] * 2, second: [killed]})
    report = run(store, machine)
    assert (report.state, report.attempts) == ("unfinished", {"ok": len(VALID) - 1})
    assert str(best) in report.message and "SIGKILL" in report.message
    assert report.winner is not None and report.winner.config == str(second)
    machine = ToyMachine()
    again = run(store, machine)
    assert (again.state, machine.compiled) == ("predicted", [best])
    assert again.winner is not None and again.winner.config == str(best)


def test_an_unusable_cache_stops_the_run(store: Store) -> None:
    broken = RemoteError("CacheUnusable", "the kernel cache /x cannot be written")
    with pytest.raises(CacheUnusable, match="/x"):
        run(store, ToyMachine(compile_failures=dict.fromkeys(VALID, broken)))
    assert store.trials() == []


def test_an_environment_that_cannot_compile_writes_no_rows(store: Store) -> None:
    broken = StartFailed("cutekernels.compile cannot be imported: No module named 'cutlass'")
    with pytest.raises(StartFailed, match="cutlass"):
        run(store, ToyMachine(compile_failures=dict.fromkeys(VALID, broken)))
    assert store.trials() == []


class TestReasons:
    """A prediction says why calls should leave the default, where the model is sure enough."""

    def test_the_winners_row_says_why(self, store: Store) -> None:
        winner = run(store, ToyMachine()).winner
        assert winner is not None and winner.message.startswith("64.00 times as fast by the model; tile 16 -> 128: 16")

    def test_a_small_gain_is_no_reason(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        gain = 1.02 * departures.LEAST_GAIN
        for factor, told in ((gain, True), (0.95 * departures.LEAST_GAIN, False)):
            times = {DEFAULT: 10.0 * factor, RANKED[0]: 10.0}
            monkeypatch.setattr(type(TOY), "estimate_us", lambda self, p, c, gpu, t=times: t.get(c, 99.0))
            assert bool(departures.reason(TOY, PROBLEM, A100, DEFAULT, RANKED[0])) == told
        assert departures.reason(TOY, PROBLEM, A100, DEFAULT, DEFAULT) == ""
