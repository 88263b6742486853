"""The search of one task on a toy machine: measurements, stored rows, winners."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from concurrent.futures import wait as waited
from dataclasses import replace
from typing import Any

import pytest

from cutekernels.autotune import search
from cutekernels.autotune.history import TaskHistory
from cutekernels.autotune.report import TaskReport
from cutekernels.autotune.runtime import NotPrepared
from cutekernels.autotune.search import Search, prune_reason
from cutekernels.backends import Facts
from cutekernels.db.storage.store import Environment, Store, Trial
from cutekernels.errors import CacheUnusable
from cutekernels.isolate import ChildDied, ChildTimeout, RemoteError
from cutekernels.measure import Ratio, Samples
from cutekernels.op import Config
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD
from cutekernels.ops.attention.decode import DECODE_ATTENTION
from cutekernels.ops.attention.op import ATTENTION
from tests.tuner.toys import BEST, DEFAULT, H200, PROBLEM, TOY, VALID, ToyConfig, ToyMachine, ToyProblem, task, true_us

DIED = ChildDied("worker", -11, "illegal address")
HUNG = ChildTimeout("worker", 30, "")
ENVIRONMENT = Environment(driver="580", torch="2.11")


def task_history(store: Store, problem: ToyProblem = PROBLEM) -> TaskHistory:
    return TaskHistory(store, TOY, problem, H200, ENVIRONMENT, "measured")


def run(store: Store, machine: ToyMachine, trials: int = 10, **options: Any) -> TaskReport:
    job = task(trials)
    return Search(job, H200, task_history(store), machine, clock=machine.clock, **options).run()


def rows(store: Store, config: Config | None = None, status: str | None = None) -> list[Trial]:
    return store.trials(op="toy", config=None if config is None else str(config), status=status)


class TestCrowning:
    def test_the_whole_space_finds_the_best_and_crowns_its_final_row(self, store: Store) -> None:
        machine = ToyMachine()
        report = run(store, machine, trials=100)
        assert report.state == "tuned"
        assert report.winner is not None
        assert report.winner.config == str(BEST)
        assert store.winners(gpu="h200", op="toy") == [report.winner]
        w = report.winner
        assert (w.origin, w.status, w.revision, w.problem) == ("measured", "ok", 3, "m=16 n=64")
        expected = true_us(DEFAULT) / true_us(BEST)
        assert w.ratio == pytest.approx(expected, rel=0.01)
        assert w.ratio_low is not None and w.ratio_high is not None
        assert 1 < w.ratio_low <= w.ratio <= w.ratio_high
        assert w.p20_us is not None and w.median_us is not None and w.p80_us is not None
        assert w.p20_us <= w.median_us <= w.p80_us
        assert (w.error, w.registers, w.stack_bytes, w.smem_bytes) == (0.3, 64, 0, 1024)
        assert w.samples == 60
        assert w.environment == ENVIRONMENT
        assert report.attempts["ok"] == len(VALID) + 4, "each config once, then the final's four"

    def test_the_final_is_the_three_best_and_the_default_in_fresh_processes_with_fresh_inputs(
        self, store: Store
    ) -> None:
        machine = ToyMachine()
        run(store, machine, trials=100)
        finals = [m for m in machine.measured if m.final]
        by_law = sorted(VALID, key=true_us)
        assert finals == machine.measured[-2:] and machine.refreshed == 2
        assert all(set(f.configs) == {str(c) for c in [DEFAULT, *by_law[:3]]} for f in finals)
        assert len({f.prepare.seed for f in finals} | {machine.measured[0].prepare.seed}) == 3
        assert {m.duty for m in machine.measured} == {None}, "search and final time alike"

    def test_the_default_is_crowned_when_nothing_beats_it(self, store: Store) -> None:
        machine = ToyMachine(law=lambda c: 10.0 if c == DEFAULT else 12.0)
        report = run(store, machine, trials=100)
        assert report.state == "tuned"
        assert report.winner is not None
        assert report.winner.config == report.default == str(DEFAULT)
        assert report.winner.ratio == report.winner.ratio_low == 1.0

    def test_the_default_is_crowned_when_differences_are_noise(self, store: Store) -> None:
        report = run(store, ToyMachine(law=lambda c: 10.0, noise=0.05), trials=100)
        assert report.winner is not None
        assert report.winner.config == str(DEFAULT)

    def test_ties_break_by_the_order_of_texts(self, store: Store) -> None:
        equal = {ToyConfig(64, 8, True), ToyConfig(32, 2, False), ToyConfig(32, 4, True)}
        machine = ToyMachine(law=lambda c: 10.0 if c in equal else 20.0, noise=0.03)
        report = run(store, machine, trials=100)
        assert report.winner is not None
        assert report.winner.config == min(map(str, equal))

    @pytest.mark.parametrize(("low", "crowned"), [(0.995, False), (1.0, False), (1.005, False), (1.0051, True)])
    def test_a_winner_beats_the_default_by_half_a_percent_with_its_whole_interval(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, low: float, crowned: bool
    ) -> None:
        machine = ToyMachine(law=lambda c: 9.0 if c == BEST else 10.0)
        real = Samples.ratio

        def ratio(mine: Samples, other: Samples, confidence: float = 0.95) -> Ratio:
            found = real(mine, other, confidence)
            return Ratio(found.value, low, found.high) if found.value > 1.05 else found

        monkeypatch.setattr(Samples, "ratio", ratio)
        report = run(store, machine, trials=100)
        assert report.winner is not None
        assert report.winner.config == str(BEST if crowned else DEFAULT)

    @pytest.mark.parametrize(("lead", "tied"), [(0.0, True), (0.003, True), (0.01, False), (0.1, False)])
    def test_only_what_cannot_be_told_apart_is_tied(self, store: Store, lead: float, tied: bool) -> None:
        """Where BEST leads by one per cent, the other's text comes first in vain; a lead of 0.3 % is none."""
        first = min((c for c in VALID if str(c) < str(BEST) and c != DEFAULT), key=str)
        law = {BEST: 10.0, first: 10.0 * (1 + lead)}
        report = run(store, ToyMachine(law=lambda c: law.get(c, 20.0), noise=0.002), trials=100)
        assert report.winner is not None
        assert report.winner.config == str(first if tied else BEST)

    def test_a_wrong_finalist_is_not_crowned(self, store: Store) -> None:
        machine = ToyMachine()

        def unmask(request: Any) -> None:
            if request.prepare.seed:
                machine.wrong[BEST] = 40.0

        machine.on_measure = unmask
        report = run(store, machine, trials=100)
        assert report.winner is not None
        assert report.winner.config == str(sorted(VALID, key=true_us)[1])
        assert rows(store, BEST)[-1].status == "wrong_result"

    def test_a_finalist_that_crashes_is_found_blamed_and_left_out(self, store: Store) -> None:
        machine = ToyMachine(final_failures={BEST: DIED})
        report = run(store, machine, trials=100)
        assert report.winner is not None
        assert report.winner.config == str(sorted(VALID, key=true_us)[1])
        assert rows(store, BEST)[-1].status == "crashed"
        again = run(store, machine, trials=100)
        assert again.state == "done"


def test_an_op_says_how_much_stack_is_too_much() -> None:
    facts = Facts(255, 8, 1024)
    for op in (ATTENTION, ATTENTION_BACKWARD, DECODE_ATTENTION):
        assert "spills: 8 B" in str(prune_reason(facts, op, H200))
    assert prune_reason(facts, TOY, H200) is None


def test_limits_are_allowed() -> None:
    most = Facts(255, TOY.most_stack_bytes, H200.smem_per_block_bytes)
    assert prune_reason(most, TOY, H200) is None
    assert "stack" in str(prune_reason(replace(most, stack_bytes=most.stack_bytes + 1), TOY, H200))
    assert "shared" in str(prune_reason(replace(most, smem_bytes=most.smem_bytes + 1), TOY, H200))


class TestOutcomes:
    def test_every_outcome_is_a_row_and_the_search_goes_on(self, store: Store) -> None:
        by_law = sorted(VALID, key=true_us)
        crash, hang, wrong, broken, remote, spill, fat, refused = by_law[:8]
        machine = ToyMachine(
            failures={crash: DIED, hang: HUNG, remote: RemoteError("RuntimeError", "no such launch")},
            wrong={wrong: 7.5},
            compile_failures={
                broken: ChildDied("compile", -6, "MLIR assertion"),
                refused: RemoteError("InvalidConfig", "bad tile"),
            },
            facts={
                spill: Facts(255, TOY.most_stack_bytes + 8, 1024),
                fat: Facts(32, 0, H200.smem_per_block_bytes + 1),
            },
        )
        report = run(store, machine, trials=100)
        status = {c: rows(store, c)[-1] for c in by_law[:8]}
        assert status[crash].status == "crashed" and "SIGSEGV" in status[crash].message
        assert "illegal address" in status[crash].message
        assert status[hang].status == "timeout" and "30 s" in status[hang].message
        assert status[wrong].status == "wrong_result" and status[wrong].error == 7.5
        assert status[broken].status == "compile_error" and "MLIR assertion" in status[broken].message
        assert status[remote].status == "crashed" and "no such launch" in status[remote].message
        assert status[spill].status == "pruned" and "264 B of stack" in status[spill].message
        assert status[fat].status == "pruned" and "shared memory" in status[fat].message
        assert status[refused].status == "invalid" and "bad tile" in status[refused].message
        assert all(t.median_us is None and t.ratio is None for t in status.values())
        assert not {str(c) for c in (broken, spill, fat, refused)} & {t for m in machine.measured for t in m.configs}
        assert report.winner is not None
        assert report.winner.config == str(by_law[8])
        assert report.attempts["ok"] == len(VALID) - 8 + 4

    def test_a_neighbours_winner_that_breaks_a_rule_is_not_tried_and_has_no_row(self, store: Store) -> None:
        illegal = ToyConfig(128, 1, True)
        near = task_history(store, ToyProblem(m=32, n=64))  # a neighbour's winner, from before the rule
        row = near.row(illegal, "ok", estimate_us=1.0)
        near.record([row])
        near.crown(row)
        machine = ToyMachine()
        report = run(store, machine, trials=len(VALID))
        assert report.measured == len(VALID) + 4
        assert set(machine.compiled) == set(VALID)
        assert store.trials(op="toy", problem=str(PROBLEM), status="invalid") == []

    def test_a_search_ends_where_nothing_is_expected_to_gain(self, store: Store) -> None:
        machine = ToyMachine(law=lambda c: 100.0, width=1)
        report = run(store, machine, trials=len(VALID) - 1)
        assert len(machine.compiled) < len(VALID) - 1
        assert report.state == "tuned"
        assert run(store, ToyMachine(), trials=len(VALID) - 1).state == "done"

    def test_a_small_space_is_tried_whole(self, store: Store) -> None:
        machine = ToyMachine(law=lambda c: 100.0, width=1)
        run(store, machine, trials=len(VALID))
        assert set(machine.compiled) == set(VALID)

    def test_a_candidate_is_measured_beside_default_and_incumbent_and_races_the_incumbent(self, store: Store) -> None:
        machine = ToyMachine()
        run(store, machine, trials=30)
        best: ToyConfig = DEFAULT
        for request in machine.measured[1:-2]:
            assert request.configs[0] == str(DEFAULT)
            assert request.race == (str(best), request.configs[-1])
            assert str(best) in request.configs
            candidate = ToyConfig.parse(request.configs[-1])
            best = min(best, candidate, key=true_us)

    def test_a_failing_default_fails_the_task_and_says_so(self, store: Store) -> None:
        machine = ToyMachine(wrong={DEFAULT: 9.0})
        report = run(store, machine)
        assert report.state == "failed"
        assert str(DEFAULT) in report.message and "wrong_result" in report.message
        assert report.winner is None and store.winners() == []
        assert len(machine.measured) == 1
        machine.wrong.clear()
        repaired = ToyMachine()
        assert run(store, repaired).state == "tuned"
        assert repaired.compiled[0] == DEFAULT and repaired.measured[0].configs == (str(DEFAULT),)
        assert [t.status for t in rows(store, DEFAULT)][:2] == ["wrong_result", "ok"], "it is measured again"

    def test_a_spilling_default_is_measured_all_the_same(self, store: Store) -> None:
        report = run(store, ToyMachine(facts={DEFAULT: Facts(255, 4000, 0)}))
        assert report.state == "tuned"


KILLED = ChildDied("compile", -9, "")
STARVED = ChildTimeout("compile", 120, "", cpu_s=3.0)
SPOILS = {
    "compiler killed": KILLED,
    "compiler asked to end": ChildDied("compile", -15, ""),
    "allocation failed": ChildDied("compile", -6, "terminate called after throwing std::bad_alloc"),
    "no CPU time before the deadline": STARVED,
    "a tool killed": RemoteError("CompilerKilled", "`ptxas` failed with error code -9"),
    "device memory taken by others": RemoteError("OutOfMemoryError", "CUDA out of memory"),
    "inputs not made": NotPrepared("toy [m=16 n=64] was not prepared"),
}


class TestFailuresOfTheMachine:
    """They are no verdicts on a config."""

    @pytest.mark.parametrize("name", SPOILS)
    @pytest.mark.parametrize("where", ["spoiled_compiles", "spoiled_measures"])
    def test_one_is_tried_again_in_the_same_run(self, store: Store, name: str, where: str) -> None:
        """Times of the best config and of the default, in turns."""
        spoil, turn = SPOILS[name], list(SPOILS).index(name) + (where == "spoiled_measures")
        config = (BEST, DEFAULT)[turn % 2]
        report = run(store, ToyMachine(**{where: {config: [spoil]}}), trials=100)
        assert (report.state, report.message) == ("tuned", "")
        assert report.winner is not None and report.winner.config == str(BEST)
        assert {t.status for t in rows(store)} <= {"ok", "invalid"}
        assert report.attempts["ok"] == len(VALID) + 4

    @pytest.mark.parametrize("where", ["spoiled_compiles", "spoiled_measures"])
    def test_one_that_lasts_leaves_no_row_and_the_next_run_tries_again(self, store: Store, where: str) -> None:
        report = run(store, ToyMachine(**{where: {BEST: [KILLED] * 2}}), trials=100)
        assert report.state == "unfinished"
        assert "1 configs without a verdict" in report.message and str(BEST) in report.message
        assert rows(store, BEST) == []
        assert report.winner is not None and report.winner.config == str(sorted(VALID, key=true_us)[1])
        machine = ToyMachine()
        again = run(store, machine, trials=100)
        assert (again.state, machine.compiled) == ("tuned", [BEST])
        assert again.winner is not None and again.winner.config == str(BEST)
        assert run(store, ToyMachine(), trials=100).state == "done"

    def test_they_count_as_attempts_of_this_run_only(self, store: Store) -> None:
        machine = ToyMachine(width=1, spoiled_compiles={c: [KILLED] * 2 for c in VALID if c != DEFAULT})
        report = run(store, machine, trials=6)
        assert (report.state, report.attempts["ok"]) == ("unfinished", 2)
        assert len(set(machine.compiled)) == 6
        assert run(store, ToyMachine(), trials=6).attempts["ok"] == 5 + 4

    def test_a_default_without_a_verdict_fails_the_task_and_leaves_no_row(self, store: Store) -> None:
        report = run(store, ToyMachine(spoiled_compiles={DEFAULT: [KILLED] * 2}))
        assert report.state == "failed" and "SIGKILL" in report.message
        assert rows(store) == []

    def test_a_spoiled_final_crowns_nobody_and_is_held_again(self, store: Store) -> None:
        second = sorted(VALID, key=true_us)[1]
        machine = ToyMachine()

        def spoil(request: Any) -> None:
            if request.prepare.seed:
                raise KILLED

        machine.on_measure = spoil
        report = run(store, machine, trials=100)
        assert (report.state, report.winner) == ("unfinished", None)
        row = rows(store, second)[-1]
        store.crown(row.id)  # a winner from before the best was found
        machine = ToyMachine()
        again = run(store, machine, trials=100)
        assert (again.state, machine.compiled, len(machine.measured)) == ("tuned", [], 2)
        assert again.winner is not None and again.winner.config == str(BEST)

    def test_a_final_spoiled_once_crowns_the_best(self, store: Store) -> None:
        machine, finals = ToyMachine(), []

        def spoil(request: Any) -> None:
            if request.prepare.seed:
                finals.append(request)
                if len(finals) == 1:
                    raise KILLED

        machine.on_measure = spoil
        report = run(store, machine, trials=100)
        assert report.winner is not None and report.winner.config == str(BEST)

    def test_an_unusable_cache_stops_the_run(self, store: Store) -> None:
        broken = RemoteError("CacheUnusable", "the kernel cache /x cannot be written: No space left on device")
        with pytest.raises(CacheUnusable, match="No space left"):
            run(store, ToyMachine(compile_failures=dict.fromkeys(VALID, broken)))
        assert rows(store) == []
        with pytest.raises(CacheUnusable, match="No space left"):
            run(store, ToyMachine(failures={BEST: broken}), trials=100)
        assert rows(store, BEST) == []

    def test_a_deadline_missed_at_work_is_a_verdict(self, store: Store) -> None:
        slow = ChildTimeout("compile", 120, "", cpu_s=119.0)
        run(store, ToyMachine(compile_failures={BEST: slow}, failures={VALID[3]: slow}), trials=100)
        assert rows(store, BEST)[-1].status == "compile_error"
        assert rows(store, VALID[3])[-1].status == "timeout"


class TestBudgets:
    def test_trials_bound_the_attempts(self, store: Store) -> None:
        machine = ToyMachine()
        report = run(store, machine, trials=6)
        assert len(set(machine.compiled)) == len(machine.compiled) == 6
        assert len(machine.measured) == 6 + 2
        assert report.measured == 6 + 4

    def test_the_space_ends_it_when_it_is_smaller(self, store: Store) -> None:
        machine = ToyMachine()
        assert run(store, machine, trials=10_000).state == "tuned"
        assert sorted(map(str, machine.compiled)) == sorted(map(str, VALID))
        assert run(store, machine, trials=10_000).state == "done"

    def test_no_time_to_compile_the_default_is_told(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = ToyMachine()

        def wait(futures: Collection[Future[Facts]], timeout: float, **rest: Any) -> Any:
            machine.now += timeout
            return waited([Future()], timeout=0)

        monkeypatch.setattr(search, "wait", wait)
        report = run(store, machine, deadline=0.2)
        assert machine.now == 0.2
        assert (report.state, report.message) == ("unfinished", "no time was left to compile the default")
        assert machine.measured == []

    @pytest.mark.parametrize(("more", "state"), [(60.0, "tuned"), (10.0, "unfinished")])
    def test_the_first_compile_is_not_of_a_task_s_share(
        self, store: Store, more: float, state: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first kernels of a process wait for its imports."""
        machine = ToyMachine()

        def wait(futures: Collection[Future[Facts]], timeout: float, **rest: Any) -> Any:
            if len(machine.measured) == 0:  # for the default, which takes 20 s
                machine.now += min(timeout, 20.0)
            return waited(futures if machine.now >= 20 else [Future()], timeout=0)

        monkeypatch.setattr(search, "wait", wait)
        report = run(store, machine, trials=4, deadline=10.0, end=more)
        assert report.state == state

    def test_the_deadline_ends_it_and_the_final_still_decides(self, store: Store) -> None:
        machine = ToyMachine(width=1)
        report = run(store, machine, trials=100, deadline=5.0)
        assert report.state == "unfinished"
        assert len(machine.measured) == 5 + 2
        assert report.winner is not None
        more = run(store, machine, trials=100, deadline=None)
        assert more.state == "tuned" and more.resumed == 5

    def test_no_time_at_all(self, store: Store) -> None:
        machine = ToyMachine(now=10)
        report = run(store, machine, deadline=3.0)
        assert (report.state, report.winner, machine.measured) == ("unfinished", None, [])


class TestResume:
    def test_a_second_run_measures_nothing(self, store: Store) -> None:
        first = run(store, ToyMachine(), trials=12)
        before = rows(store)
        machine = ToyMachine()
        again = run(store, machine, trials=12)
        assert (again.state, again.measured, again.resumed) == ("done", 0, first.attempts["ok"] - 4)
        assert again.winner == first.winner
        assert (machine.compiled, machine.measured) == ([], [])
        assert rows(store) == before

    def test_more_trials_go_on_where_the_first_run_ended(self, store: Store) -> None:
        first = ToyMachine()
        run(store, first, trials=8)
        second = ToyMachine()
        report = run(store, second, trials=20)
        assert not set(first.compiled) & set(second.compiled)
        assert 0 < len(second.compiled) <= 12
        assert (report.state, report.resumed) == ("tuned", 8)

    @pytest.mark.parametrize("stopped_at", [1, 5, 8])
    def test_an_interrupted_run_loses_nothing_it_measured(self, store: Store, stopped_at: int) -> None:
        first = ToyMachine()

        def interrupt(request: Any) -> None:
            if len(first.measured) > stopped_at:
                raise KeyboardInterrupt

        first.on_measure = interrupt
        with pytest.raises(KeyboardInterrupt):
            run(store, first, trials=8)
        done = {t.config for t in rows(store, status="ok")}
        assert len(done) == min(stopped_at, 8)
        second = ToyMachine()
        report = run(store, second, trials=8)
        assert report.state == "tuned" and report.resumed == len(done)
        assert not done & {str(c) for c in second.compiled}
        assert len(done) + len(second.compiled) == 8

    def test_force_measures_again_and_keeps_the_old_rows(self, store: Store) -> None:
        run(store, ToyMachine(), trials=6)
        before = len(rows(store))
        machine = ToyMachine()
        report = run(store, machine, trials=6, force=True)
        assert (report.state, report.resumed) == ("tuned", 0)
        assert len(machine.compiled) == 6
        assert len(rows(store)) >= 2 * before - len(rows(store, status="invalid"))

    def test_rows_of_another_revision_gpu_or_problem_are_not_ours(self, store: Store) -> None:
        run(store, ToyMachine(), trials=6)
        other = TaskHistory(store, TOY, ToyProblem(m=16, n=128), H200, ENVIRONMENT, "measured")
        assert other.earlier() == []

    def test_a_predicted_winner_does_not_make_it_done(self, store: Store) -> None:
        predicted = TaskHistory(store, TOY, PROBLEM, H200, ENVIRONMENT, "predicted")
        row = predicted.row(BEST, "ok", estimate_us=1.0)
        predicted.record([row])
        assert predicted.crown(row)
        machine = ToyMachine()
        report = run(store, machine, trials=5)
        assert report.state == "tuned"
        assert BEST in machine.compiled[:3], "the predicted winner is a seed"
        assert report.winner is not None and report.winner.origin == "measured"

    def test_rows_that_todays_declaration_cannot_read_are_passed_over(self, store: Store) -> None:
        history = task_history(store)
        row = history.row(DEFAULT, "ok", estimate_us=1.0)
        values = {f: getattr(row, f) for f in ("gpu", "environment", "op", "revision", "problem", "origin", "status")}
        stale = Trial.new(**values, config="tile=16 warps=1 gone=2")
        store.record([stale])
        store.crown(stale.id)
        report = run(store, ToyMachine(), trials=5)
        assert (report.state, report.resumed) == ("tuned", 0)


class TestConfirming:
    def test_only_the_predicted_best_are_measured(self, store: Store) -> None:
        predicted = TaskHistory(store, TOY, PROBLEM, H200, ENVIRONMENT, "predicted")
        order = [c for c in VALID if c != DEFAULT]
        predicted.record([predicted.row(c, "ok", estimate_us=1.0 + i) for i, c in enumerate(order)])
        machine = ToyMachine()
        report = run(store, machine, trials=100, confirm=True)
        assert sorted(map(str, machine.compiled)) == sorted(map(str, [DEFAULT, *order[:8]]))
        assert report.winner is not None and report.winner.config == str(min(order[:8], key=true_us))
        assert run(store, ToyMachine(), trials=100, confirm=True).state == "done"
        whole = run(store, machine := ToyMachine(), trials=100)
        assert (whole.state, len(machine.compiled)) == ("tuned", len(VALID) - 9)

    def test_without_predictions_the_model_s_eight(self, store: Store) -> None:
        machine = ToyMachine()
        run(store, machine, trials=100, confirm=True)
        assert len(machine.compiled) == 9 and machine.compiled[0] == DEFAULT

    def test_what_serves_is_measured_too(self, store: Store) -> None:
        surprise = ToyConfig(16, 1, True)  # the last by the model
        run(store, ToyMachine(law=lambda c: 5.0 if c == surprise else 20.0), trials=100)
        run(store, machine := ToyMachine(), trials=100, confirm=True, force=True)
        assert surprise in machine.compiled and len(machine.compiled) == 10


class TestSeeds:
    def test_default_first_then_winners_of_this_and_near_problems_then_the_model(self, store: Store) -> None:
        for m, config in [(8, ToyConfig(32, 1, False)), (4096, ToyConfig(16, 8, True)), (24, ToyConfig(32, 2, True))]:
            history = task_history(store, ToyProblem(m=m, n=64))
            row = history.row(config, "ok", estimate_us=1.0)
            history.record([row])
            history.crown(row)
        alien = task_history(store, ToyProblem(m=16, n=64, dtype="fp16"))
        row = alien.row(ToyConfig(64, 1, True), "ok", estimate_us=1.0)
        alien.record([row])
        alien.crown(row)
        machine = ToyMachine(width=1)
        run(store, machine, trials=7)
        assert machine.compiled == [
            DEFAULT,
            ToyConfig(32, 2, True),
            ToyConfig(32, 1, False),
            ToyConfig(16, 8, True),
            ToyConfig(128, 8, False),
            ToyConfig(64, 8, False),
            ToyConfig(32, 8, False),
        ]


def test_progress_is_told_row_by_row(store: Store) -> None:
    told: list[tuple[str, int, int]] = []
    run(store, ToyMachine(), trials=5, on_trial=lambda t, done, wanted: told.append((t.status, done, wanted)))
    counted = [done for status, done, _ in told if status == "ok"]
    assert counted == [1, 2, 3, 4, 5, 5, 5, 5, 5]
    assert {wanted for _, _, wanted in told} == {5}
    assert {status for status, _, _ in told} == {"ok"}
