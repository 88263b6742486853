"""The timer's statistics and scheduling, with a fake round in place of a GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from cutekernels.measure import LEAST_ROUNDS, MOST_SETS, Launch, Round, Samples, cpu_us_per_call, l2_rotation
from cutekernels.measure import time_interleaved as interleaved
from tests.processes import python

MIB = 1 << 20


class FakeRound:
    """A kernel of ``us`` µs with 2 % noise, on a machine whose clock drifts for everybody."""

    drift = 1.0

    def __init__(
        self, us: float, launches: int = 4, seed: int = 0, log: list[str] | None = None, name: str = ""
    ) -> None:
        self.us, self.launches, self.log, self.name = us, launches, log, name
        self.noise = random.Random(seed)

    def __call__(self) -> float:
        if self.log is not None:
            self.log.append(self.name)
        return self.us * FakeRound.drift * self.noise.uniform(0.98, 1.02)


@pytest.fixture(autouse=True)
def _steady_clock() -> Iterator[None]:
    FakeRound.drift = 1.0
    yield
    FakeRound.drift = 1.0


def samples(*us: float) -> Samples:
    return Samples(us)


class TestStatistics:
    def test_quantiles(self) -> None:
        s = samples(5, 1, 4, 2, 3)
        assert (s.median, s.p20, s.p80) == (3, 1.8, 4.2)
        assert (samples(7).median, samples(7).p20, samples(7).p80) == (7, 7, 7)

    def test_no_samples_is_an_error_at_once(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            Samples(())

    def test_ratio_is_how_many_times_faster_self_is(self) -> None:
        r = samples(10, 10, 10).ratio(samples(20, 20, 20))
        assert (r.value, r.low, r.high) == (2, 2, 2)
        assert samples(20.0).ratio(samples(10.0)).value == 0.5

    def test_ratio_is_paired_by_round(self) -> None:
        """Drift of 10x across rounds, the same for both: unpaired medians would see nothing but noise."""
        drift = [1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 3.0, 7.0]
        slow = Samples(tuple(100 * d for d in drift))
        fast = Samples(tuple(98 * d for d in drift))
        r = fast.ratio(slow)
        assert r.low == pytest.approx(100 / 98) and r.high == pytest.approx(100 / 98)

    def test_interval_is_deterministic_and_holds_the_value(self) -> None:
        noise = random.Random(1)
        a = Samples(tuple(10 * noise.uniform(0.95, 1.05) for _ in range(20)))
        b = Samples(tuple(10 * noise.uniform(0.95, 1.05) for _ in range(20)))
        r = a.ratio(b)
        assert r.low <= r.value <= r.high
        assert r == a.ratio(b)
        assert r.low < 1 < r.high, "equals are not told apart"

    def test_interval_covers_the_truth(self) -> None:
        """95 % nominal over 200 experiments; fewer than 85 % would be a broken bootstrap."""
        noise = random.Random(3)
        covered = 0
        for _ in range(200):
            a = Samples(tuple(noise.gauss(100, 3) for _ in range(15)))
            b = Samples(tuple(noise.gauss(110, 3) for _ in range(15)))
            r = a.ratio(b)
            covered += r.low <= 1.1 <= r.high
        assert covered > 170

    def test_the_interval_is_of_95_percent(self) -> None:
        """The median of 400 normal ratios: 1.96 standard errors on each side, not 1.64 (90 %) or 2.58 (99 %)."""
        noise, widths = random.Random(5), []
        for _ in range(6):
            r = Samples((1.0,) * 400).ratio(Samples(tuple(noise.gauss(1.0, 0.05) for _ in range(400))))
            widths.append((r.high - r.low) / 2)
        standard_error = 0.05 * math.sqrt(math.pi / 2) / math.sqrt(400)
        assert 1.78 < sum(widths) / len(widths) / standard_error < 2.25

    def test_ratio_over_the_rounds_both_ran(self) -> None:
        assert samples(1, 1).ratio(samples(2, 2, 50, 50)).value == 2


class TestRotation:
    @pytest.mark.parametrize("set_bytes", [1 * MIB, 7 * MIB, 96 * MIB])
    def test_at_least_three_times_the_cache(self, set_bytes: int) -> None:
        sets = l2_rotation(set_bytes, 60 * MIB)
        assert sets * set_bytes >= 180 * MIB
        assert (sets - 1) * set_bytes < 180 * MIB

    def test_limits(self) -> None:
        assert l2_rotation(1000 * MIB, 60 * MIB) == 1
        assert l2_rotation(16, 60 * MIB) == MOST_SETS
        assert l2_rotation(0, 60 * MIB) == 1


class TestScheduling:
    def test_one_sample_per_round_in_the_callers_order(self) -> None:
        out = interleaved({"b": FakeRound(10), "a": FakeRound(20)}, rounds=7)
        assert list(out) == ["b", "a"]
        assert [len(s.us) for s in out.values()] == [7, 7]
        assert out["a"].ratio(out["b"]).value == pytest.approx(0.5, rel=0.05)

    def test_rounds_are_interleaved_in_random_order(self) -> None:
        log: list[str] = []
        names = "abc"
        interleaved({n: FakeRound(10, log=log, name=n) for n in names}, rounds=20, seed=1)
        turns = [tuple(log[i : i + 3]) for i in range(0, len(log), 3)]
        assert all(sorted(turn) == list(names) for turn in turns), "each runs once in every round"
        assert len(set(turns)) > 3, "a fixed order would favour whoever runs after an idle moment"
        again: list[str] = []
        interleaved({n: FakeRound(10, log=again, name=n) for n in names}, rounds=20, seed=1)
        assert again == log

    def test_launches_are_prepared_with_the_least_time(self) -> None:
        seen: list[tuple[int, float]] = []

        def prepare(launches: Sequence[Launch], least_us: float) -> Round:
            seen.append((len(launches), least_us))
            return FakeRound(5)

        interleaved({"x": [lambda: None] * 3}, rounds=2, least_us=321, prepare=prepare)
        assert seen == [(3, 321)]

    def test_budget_ends_it_but_not_before_the_least_rounds(self) -> None:
        generous = interleaved({"x": FakeRound(100, launches=10)}, rounds=50, budget_us=20_000)
        assert 19 <= len(generous["x"].us) <= 21
        stingy = interleaved({"x": FakeRound(100, launches=10)}, rounds=50, budget_us=1)
        assert len(stingy["x"].us) == LEAST_ROUNDS

    def test_a_clear_loser_leaves_the_race(self) -> None:
        field = {"best": FakeRound(10), "near": FakeRound(10.1, seed=2), "far": FakeRound(15, seed=3)}
        out = interleaved(field, rounds=30, race=("best", "near", "far"))
        assert len(out["far"].us) == LEAST_ROUNDS
        assert len(out["best"].us) == len(out["near"].us) == 30
        assert out["far"].ratio(out["best"]).high < 1

    def test_the_race_ends_when_nobody_is_left(self) -> None:
        field = {"best": FakeRound(10), "far": FakeRound(15), "bystander": FakeRound(30)}
        out = interleaved(field, rounds=30, race=("best", "far"))
        assert [len(s.us) for s in out.values()] == [LEAST_ROUNDS] * 3

    def test_who_does_not_race_runs_to_the_end(self) -> None:
        field = {"slow": FakeRound(30), "best": FakeRound(10), "near": FakeRound(10.1, seed=2)}
        out = interleaved(field, rounds=20, race=("best", "near"))
        assert [len(s.us) for s in out.values()] == [20] * 3

    def test_a_faster_one_never_leaves(self) -> None:
        out = interleaved({"old": FakeRound(10), "new": FakeRound(6)}, rounds=20, race=("old", "new"))
        assert len(out["new"].us) == 20

    def test_wrong_arguments(self) -> None:
        with pytest.raises(ValueError, match="rounds"):
            interleaved({"x": FakeRound(1)}, rounds=0)
        with pytest.raises(ValueError, match="'y'"):
            interleaved({"x": FakeRound(1)}, race=("x", "y"))


class TestHostTime:
    def test_calls_are_counted_and_drained_outside_the_clock(self) -> None:
        now = [0.0]
        events: list[str] = []

        def fn() -> None:
            now[0] += 3e-6

        def drain() -> None:
            events.append("drain")
            now[0] += 1.0

        s = cpu_us_per_call(fn, calls=50, rounds=4, synchronize=drain, clock=lambda: now[0])
        assert s.us == pytest.approx((3.0,) * 4)
        assert events == ["drain"] * 5

    def test_a_real_clock(self) -> None:
        calls = [0]

        def fn() -> None:
            calls[0] += 1

        s = cpu_us_per_call(fn, calls=100, rounds=3)
        assert 0 < s.median < 100
        assert calls[0] == 10 + 300


def test_importing_the_timer_loads_no_torch() -> None:
    code = "import sys, cutekernels.measure, cutekernels.verify, cutekernels.isolate; sys.exit('torch' in sys.modules)"
    python(code)


def test_a_round_is_any_callable_with_launches() -> None:
    check: Callable[[Round], float] = lambda r: r() * r.launches  # noqa: E731 (a structural type, held to by mypy)
    assert check(FakeRound(1.0, launches=10)) == pytest.approx(10, rel=0.05)
