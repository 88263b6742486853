"""The final round: who enters, who is tied, who wins; false crowns and re-tunes by simulation; the certificate."""

from __future__ import annotations

import ctypes
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutekernels.autotune import final
from cutekernels.autotune.history import TaskHistory
from cutekernels.autotune.report import TaskReport
from cutekernels.autotune.requests import VENDOR, Outcome
from cutekernels.autotune.search import Search
from cutekernels.conditions import Conditions, Watch
from cutekernels.db.storage import snapshot
from cutekernels.db.storage.certificate import Certificate
from cutekernels.db.storage.store import Environment, Store, Trial
from cutekernels.errors import StoreError
from cutekernels.measure import Samples
from tests.tuner.toys import BEST, DEFAULT, H200, PROBLEM, SEEN, TOY, VALID, VENDOR_US, ToyConfig, ToyMachine, task

ENVIRONMENT = Environment(driver="580.95", torch="2.11")
A, B, C = ToyConfig(32, 8, True), ToyConfig(64, 4, True), BEST


def history(store: Store, environment: Environment = ENVIRONMENT) -> TaskHistory:
    return TaskHistory(store, TOY, PROBLEM, H200, environment, "measured")


def run(store: Store, machine: ToyMachine, environment: Environment = ENVIRONMENT, **options: Any) -> TaskReport:
    return Search(task(100), H200, history(store, environment), machine, clock=machine.clock, **options).run()


def certified(trial: Trial | None) -> Certificate:
    assert trial is not None and trial.certificate is not None
    return trial.certificate


def timed(us: dict[ToyConfig, float], noise: float, seed: int, rounds: int = 60) -> dict[Any, Outcome]:
    """A final's outcomes, every config with noise of its own."""
    draw = random.Random(seed)
    return {c: Outcome(0.3, tuple(t * draw.gauss(1, noise) for _ in range(rounds))) for c, t in us.items()}


class TestChallengers:
    @staticmethod
    def known(store: Store, ratios: dict[ToyConfig, tuple[float, float, float]]) -> dict[Any, Trial]:
        row = history(store).row(BEST, "ok")
        return {
            c: replace(row, config=str(c), ratio=r, ratio_low=low, ratio_high=high)
            for c, (r, low, high) in ratios.items()
        }

    def test_all_whose_interval_meets_the_best_ones(self, store: Store) -> None:
        close = [c for c in VALID if c != DEFAULT][:5]
        ratios = {c: (1.30 - i / 1000, 1.29, 1.31) for i, c in enumerate(close)}
        ratios[close[-1]] = (1.27, 1.26, 1.295)  # its interval alone meets the best one's
        behind = {c: (1.10, 1.09, 1.11) for c in VALID if c not in (*close, DEFAULT)}
        assert final.challengers(self.known(store, ratios | behind), DEFAULT, []) == close

    def test_three_at_least_and_eight_at_most(self, store: Store) -> None:
        apart = {c: (9 - i / 10,) * 3 for i, c in enumerate(VALID)}
        assert len(final.challengers(self.known(store, apart), DEFAULT, [])) == 3
        alike = dict.fromkeys(VALID, (1.5, 1.4, 1.6))
        assert len(final.challengers(self.known(store, alike), DEFAULT, [])) == 8

    def test_what_serves_enters_and_the_default_does_not_enter_twice(self, store: Store) -> None:
        apart = {c: (9 - i / 10,) * 3 for i, c in enumerate(VALID)}
        last = VALID[-1]
        found = final.challengers(self.known(store, apart), DEFAULT, [last, DEFAULT])
        assert last in found and DEFAULT not in found

    def test_a_failure_does_not_enter(self, store: Store) -> None:
        apart = self.known(store, {c: (9 - i / 10,) * 3 for i, c in enumerate(VALID)})
        best, second = [c for c in VALID if c != DEFAULT][:2]
        apart[best] = replace(apart[best], status="wrong_result")
        found = final.challengers(apart, DEFAULT, [best])
        assert best not in found and found[0] == second

    def test_none(self) -> None:
        assert final.challengers({}, DEFAULT, []) == []


class TestVerdicts:
    def test_equals_crown_nobody(self) -> None:
        """Ten configs of one speed, 300 finals: at most 5 % may crown another than the default."""
        configs = [DEFAULT, *[c for c in VALID if c != DEFAULT][:9]]
        finals = (timed(dict.fromkeys(configs, 10.0), 0.01, seed) for seed in range(300))
        crowned = [final.decide(f, DEFAULT, []).winner for f in finals]
        assert sum(c != DEFAULT for c in crowned) <= 15

    @pytest.mark.parametrize(("lead", "crowned"), [(1.003, False), (1.02, True)])
    def test_a_lead_that_is_too_small_crowns_nobody_however_sure(self, lead: float, crowned: bool) -> None:
        verdict = final.decide(timed({DEFAULT: 10.0 * lead, C: 10.0}, 0.0005, 0), DEFAULT, [])
        assert verdict.winner == (C if crowned else DEFAULT)
        assert (DEFAULT in verdict.tied) != crowned

    def test_a_lead_that_is_sure_alone_is_not_among_nine(self) -> None:
        """The chance of an error is shared by all comparisons: seven more, which nobody confuses with the two."""
        two = timed({DEFAULT: 10.25, A: 10.0}, 0.03, 14)
        first, second = (Samples(two[c].us) for c in (A, DEFAULT))
        assert first.ratio(second, 0.95).low > final.EFFECT > first.ratio(second, 1 - 0.05 / 8).low
        assert final.decide(two, DEFAULT, []).tied == (A,)
        slow = timed({c: 30.0 for c in VALID if c not in (A, DEFAULT)}, 0.03, 0)
        nine = two | dict([*slow.items()][:7])
        assert set(final.decide(nine, DEFAULT, []).tied) == {A, DEFAULT}
        assert final.decide(nine, DEFAULT, []).winner == DEFAULT

    def test_what_serves_keeps_its_place_while_it_is_tied(self) -> None:
        alike = timed({DEFAULT: 13.0, A: 10.0, B: 10.01, C: 10.0}, 0.002, 1)
        assert final.decide(alike, DEFAULT, []).winner == min((A, B, C), key=str)
        for serving in (A, B, C):
            assert final.decide(alike, DEFAULT, [serving]).winner == serving
        apart = timed({DEFAULT: 13.0, A: 10.0, B: 10.5}, 0.002, 1)
        assert final.decide(apart, DEFAULT, [B]).winner == A, "beaten by 5 %"
        assert final.decide(apart, DEFAULT, [C]).winner == A, "not measured"

    def test_wrong_results_decide_nothing(self) -> None:
        outcomes = timed({DEFAULT: 10.0, A: 8.0}, 0.002, 0)
        for wrong in (Outcome(4.0), Outcome(4.0, (1.0,) * 60)):
            assert final.decide(outcomes | {C: wrong}, DEFAULT, [C]).winner == A

    def test_of_the_tied_the_first_in_text_order_wins_the_fastest_or_not(self) -> None:
        first, *others = sorted((A, B, C), key=str)
        law = {DEFAULT: 13.0, first: 10.02} | dict.fromkeys(others, 10.0)
        assert final.decide(timed(law, 0.002, 1), DEFAULT, []).winner == first

    def test_what_serves_precedes_a_default_that_is_tied(self) -> None:
        alike = timed({DEFAULT: 10.0, A: 10.0, B: 10.0}, 0.01, 3)
        verdict = final.decide(alike, DEFAULT, [A])
        assert (verdict.winner, set(verdict.tied)) == (A, {DEFAULT, A, B})
        assert final.decide(alike, DEFAULT, []).winner == DEFAULT
        assert final.certificate(verdict, alike, DEFAULT).tied == tuple(sorted(map(str, (DEFAULT, A, B))))

    def test_re_tunes_stay_in_the_tied_set(self) -> None:
        """Winners of 60 tasks, five finals each, with six configs within 0.8 % of each other."""
        left = 0
        for number in range(60):
            draw = random.Random(number)
            law = {DEFAULT: 11.0} | {c: 10.0 * (1 + 0.008 * draw.random()) for c in VALID[10:16]}
            first = final.decide(timed(law, 0.01, 1000 * number), DEFAULT, [])
            serving = [first.winner]
            for again in range(1, 6):
                serving = [final.decide(timed(law, 0.01, 1000 * number + again), DEFAULT, serving).winner]
                left += serving[0] not in first.tied
        assert left <= 6, "2 % of 300"


class TestPooled:
    def test_rounds_of_both_processes_and_the_larger_error(self) -> None:
        one = {"a": Outcome(0.2, (1.0, 2.0)), "b": Outcome(0.1, (3.0, 4.0)), VENDOR: Outcome(0.0, (5.0,))}
        two = {"a": Outcome(0.4, (1.5,), SEEN), "b": Outcome(3.0)}
        assert final.pooled([one, two]) == {"a": Outcome(0.4, (1.0, 2.0, 1.5), SEEN), "b": Outcome(3.0)}


class TestCertificates:
    def test_the_winners_row_has_it_all(self, store: Store) -> None:
        winner = run(store, ToyMachine()).winner
        assert winner is not None
        c = certified(winner)
        assert (c.default, c.challengers, c.processes) == (str(DEFAULT), 3, 2)
        assert str(BEST) in c.tied
        assert c.quantiles_us[3] == winner.median_us and list(c.quantiles_us) == sorted(c.quantiles_us)
        assert Conditions(c.clock_mhz, c.temperature_c, c.power_w) == SEEN
        assert winner.baseline_us == pytest.approx(VENDOR_US, rel=0.25)
        assert winner.sources == history(store).sources != ""
        others = [t for t in store.trials() if t.id != winner.id]
        assert {t.certificate for t in others} == {None} and {t.sources for t in others} == {winner.sources}

    def test_through_a_line_and_a_database(self, store: Store, tmp_path: Path) -> None:
        winner = run(store, ToyMachine()).winner
        assert winner is not None
        assert Trial.from_line(winner.as_line()) == winner == store.trial(winner.id)
        store.export(tmp_path / "w.jsonl")
        with Store(str(tmp_path / "other.db")) as other:
            other.import_(tmp_path / "w.jsonl")
            assert other.winners() == [winner]

    @pytest.mark.parametrize(
        ("change", "rule"),
        [
            ({"tied": []}, "1 to 100 tied configs; it has 0"),
            ({"tied": ["x"] * 101}, "it has 101"),
            ({"tied": ["a\x1b[31m"]}, "printable ASCII"),
            ({"tied": "tile=1"}, "printable ASCII"),
            ({"default": 3}, "printable ASCII"),
            ({"quantiles_us": [1.0]}, "7 quantiles"),
            ({"quantiles_us": [1.0] * 6 + ["x"]}, "7 quantiles"),
            ({"processes": True}, "processes must be a whole number"),
            ({"power_w": -1}, "power_w must be a finite number"),
            ({"more": 1}, "other fields"),
        ],
        ids=lambda value: str(value)[:30].replace("\x1b", "") if isinstance(value, str) else str(sorted(value)),
    )
    def test_a_line_that_breaks_a_rule_is_refused(self, store: Store, change: dict[str, Any], rule: str) -> None:
        winner = run(store, ToyMachine()).winner
        assert winner is not None
        row = json.loads(winner.as_line())
        row["certificate"] |= change
        with pytest.raises(StoreError, match=rule):
            Trial.from_line(json.dumps(row))

    def test_a_broken_one_in_the_database_hides_no_other_row(self, store: Store, tmp_path: Path) -> None:
        import sqlite3

        run(store, ToyMachine())
        count = len(store.trials())
        with sqlite3.connect(tmp_path / "t.db") as raw:
            raw.execute("UPDATE trial SET certificate = '{\"tied\": 3}' WHERE certificate IS NOT NULL")
        raw.close()
        assert len(store.trials()) == count - 1 and store.winners() == []


class TestServing:
    def test_a_shipped_winner_is_measured_and_kept_unless_it_is_beaten(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        row = history(store).row(B, "ok", estimate_us=1.0)
        monkeypatch.setattr(snapshot, "shipped", lambda gpu: [row])
        report = run(store, ToyMachine(law=lambda c: 10.0 if c in (A, B, C) else 20.0))
        assert report.winner is not None and report.winner.config == str(B) != min(map(str, (A, B, C)))
        report = run(store, ToyMachine(law=lambda c: {A: 9.5, B: 10.0}.get(c, 20.0)), force=True)  # type: ignore[arg-type]
        assert report.winner is not None and report.winner.config == str(A)

    def test_a_measurement_of_noise_leaves_the_winner(self, store: Store) -> None:
        first = run(store, ToyMachine(noise=0.01)).winner
        assert first is not None
        for _ in range(3):
            again = run(store, ToyMachine(noise=0.01), force=True).winner
            assert again is not None and again.config == first.config


class TestWhatHolds:
    def test_other_sources_are_measured_anew(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        first = run(store, ToyMachine())
        monkeypatch.setattr("cutekernels.autotune.history.source_fingerprint", lambda op: "ab" * 32)
        report = run(store, machine := ToyMachine())
        assert (report.state, report.resumed) == ("tuned", 0) and len(machine.compiled) == len(VALID)
        assert first.winner is not None and str(first.winner.config) in map(str, machine.compiled[:2])
        assert run(store, ToyMachine()).state == "done"

    @pytest.mark.parametrize(
        ("change", "holds"),
        [
            ({"driver": "580.102"}, True),
            ({"commit": "abc"}, True),
            ({"driver": "590.1"}, False),
            ({"torch": "3"}, False),
        ],
        ids=["driver of one branch", "commit", "driver", "torch"],
    )
    def test_other_versions_are_measured_anew(self, store: Store, change: dict[str, str], holds: bool) -> None:
        run(store, ToyMachine())
        report = run(store, ToyMachine(), replace(ENVIRONMENT, **change))
        assert report.state == ("done" if holds else "tuned")


class TestConditions:
    class Nvml:
        """The library as ctypes shows it; every second look is warmer."""

        looks = 0

        def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
            return 0 if uuid == b"GPU-1" else 6

        def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, number: Any) -> int:
            self.looks += 1
            return self._put(number, 1500 + 100 * self.looks)

        def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, number: Any) -> int:
            return self._put(number, 40)

        def nvmlDeviceGetPowerUsage(self, handle: Any, number: Any) -> int:
            return 3  # not supported

        def _put(self, number: Any, value: int) -> int:
            ctypes.cast(number, ctypes.POINTER(ctypes.c_uint))[0] = value
            return 0

    def test_medians_of_what_is_told(self) -> None:
        watch = Watch("GPU-1", self.Nvml())
        for _ in range(3):
            watch()
        assert watch.seen == Conditions(1700.0, 40.0, None)

    @pytest.mark.parametrize("watch", [Watch("GPU-1"), Watch("GPU-2", Nvml())], ids=["no library", "no such GPU"])
    def test_nothing_is_seen(self, watch: Watch) -> None:
        watch()
        assert watch.seen == Conditions()

    def test_without_a_gpu(self) -> None:
        watch = Watch.current()
        watch()
        assert isinstance(watch.seen, Conditions)
