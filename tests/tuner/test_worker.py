"""The measuring worker's three checks, on the CPU: planted bugs in toy kernels, a stub for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from cutekernels import measure
from cutekernels.autotune import worker
from cutekernels.autotune.requests import Load, Measure, Prepare
from cutekernels.errors import UnknownGpu
from cutekernels.op import Work
from tests.tuner.toys import H200, ToyConfig, ToyOp, ToyProblem

GOOD = ToyConfig(16, 1, False)
OTHER = ToyConfig(32, 1, False)
BAD = ToyConfig(64, 1, False)


class Doubling(ToyOp):
    """``out = 2 x``, bf16."""

    def sample(self, p: ToyProblem, device: str, seed: int) -> Any:
        return (torch.randn(p.m, p.n, generator=torch.Generator().manual_seed(seed)).bfloat16(),)

    def outputs(self, p: ToyProblem, *args: Any) -> Any:
        return (torch.empty_like(args[0]),)

    def reference(self, p: ToyProblem, *args: Any) -> Any:
        return ((args[0].float() * 2).bfloat16(),)


class StubRound:
    """A stub that runs its launches in turn, as a graph would, and reports a fixed time."""

    made = 0

    def __init__(self, launches: Sequence[Callable[[], object]], least_us: float = 200.0) -> None:
        StubRound.made += 1
        self._list = launches
        self.launches = len(launches)

    def __call__(self) -> float:
        for launch in self._list:
            launch()
        return 10.0


def right(out: Any, x: Any) -> None:
    torch.mul(x, 2, out=out)


def off_by_a_little(out: Any, x: Any) -> None:
    out.copy_(x * 2.1)


def leaves_the_last_row(out: Any, x: Any) -> None:
    out[:-1] = x[:-1] * 2


def right_at_first() -> Callable[[Any, Any], None]:
    """A race that shows only under repetition."""
    calls = [0]

    def launch(out: Any, x: Any) -> None:
        calls[0] += 1
        out.copy_(x * 2)
        if calls[0] > 3:
            out[0, 0] = 77.0

    return launch


KERNELS: dict[ToyConfig, Callable[[Any, Any], None]] = {}


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    KERNELS.clear()
    KERNELS.update({GOOD: right, OTHER: right})
    StubRound.made = 0
    monkeypatch.setattr(worker, "_current", None)
    monkeypatch.setattr(worker, "GraphRound", StubRound)
    monkeypatch.setattr(worker.gpus, "detect", lambda: SMALL)
    monkeypatch.setattr(worker.registry, "get", lambda name: Doubling())
    monkeypatch.setattr(worker.compiler, "get", lambda op, p, c, gpu: KERNELS[c])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    yield
    worker._current = None


SMALL = replace(H200, l2_bytes=1 << 20)
PREPARE = Prepare("toy", "m=256 n=512", SMALL)  # 512 KiB a set, so 6 sets for a 1 MiB L2


def ask(*configs: ToyConfig, race: Sequence[ToyConfig] = ()) -> Any:
    texts = tuple(map(str, configs))
    outcomes = worker.answer(Measure(PREPARE, texts, tuple(map(str, race)), rounds=5))
    assert outcomes is not None
    assert tuple(outcomes) == texts
    return [outcomes[text] for text in texts]


def test_right_ones_are_timed() -> None:
    good, other = ask(GOOD, OTHER)
    assert good.right and other.right
    assert good.us == (10.0,) * 5
    assert 0 <= good.error <= 1


def test_inputs_are_made_once_and_keep_the_l2_cold() -> None:
    assert worker.answer(PREPARE) is None
    assert worker._current is not None
    bench = worker._current[1]
    args = [a[0] for _, a in bench.sets]
    assert len(args) == measure.l2_rotation(512 << 10, SMALL.l2_bytes) == 6
    assert len({a.data_ptr() for a in args}) == 6
    assert not torch.equal(args[0], args[1])
    ask(GOOD)
    assert worker._current[1] is bench
    worker.answer(Prepare("toy", "m=2 n=8", SMALL))
    assert worker._current[1] is not bench


@pytest.mark.parametrize(("flops", "asked", "duty"), [(1e15, None, 0.5), (1.0, None, 1.0), (1e15, 0.25, 0.25)])
def test_the_gpu_rests_where_arithmetic_is_the_limit(
    monkeypatch: pytest.MonkeyPatch, flops: float, asked: float | None, duty: float
) -> None:
    """Power throttles tensor cores, not DRAM."""
    seen, real = [], worker.time_interleaved

    def timed(candidates: Any, **options: Any) -> Any:
        seen.append(options.pop("duty"))
        return real(candidates, **options)

    monkeypatch.setattr(worker, "time_interleaved", timed)
    monkeypatch.setattr(Doubling, "work", lambda self, p: Work(flops, 1e6, depth=1.0))
    assert worker.answer(Measure(PREPARE, (str(GOOD),), rounds=5, duty=asked)) is not None
    assert seen == [duty]


def test_as_many_inputs_of_each_kind_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' rows spread by a sample's seed: a winner of one spread alone would be none of the others'."""
    monkeypatch.setattr(Doubling, "sample_kinds", 4)
    for seed in (0, 1):
        worker.answer(Prepare(PREPARE.op, PREPARE.problem, PREPARE.gpu, seed))
        assert worker._current is not None
        assert len(worker._current[1].sets) == 8  # six would keep the L2 cold


def test_what_launches_read_in_part_is_shared_and_still_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a table: the sets have one table, and are as many as keep what they read of it out of the L2."""

    def variant(self: Doubling, p: Any, args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
        return args

    monkeypatch.setattr(Doubling, "variant", variant)
    monkeypatch.setattr(Doubling, "work", lambda self, p: Work(1.0, 256 << 10, depth=1.0))
    worker.answer(Prepare(PREPARE.op, PREPARE.problem, PREPARE.gpu, seed=5))
    assert worker._current is not None
    sets = worker._current[1].sets
    assert len(sets) == measure.l2_rotation(256 << 10, SMALL.l2_bytes) == 12
    assert len({args[0].data_ptr() for _, args in sets}) == 1
    assert len({outputs[0].data_ptr() for outputs, _ in sets}) == 12


def test_the_final_sees_inputs_the_search_did_not() -> None:
    worker.answer(PREPARE)
    assert worker._current is not None
    first = worker._current[1].sets[0][1][0]
    worker.answer(Prepare(PREPARE.op, PREPARE.problem, PREPARE.gpu, seed=1))
    assert not torch.equal(first, worker._current[1].sets[0][1][0])


def test_the_poison_is_in_memory_before_a_round_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round's stream does not wait for the one that fills: a large fill would end up in the results."""
    poison, compare, filling = worker.poison, worker.Judge.worst_error, list[Any]()

    def drain() -> None:
        while filling:
            poison(filling.pop())

    def fill(outputs: Any) -> None:
        filling.append(outputs)
        if not StubRound.made:  # the launch of the first check is in the same stream
            drain()

    def compared(judge: Any, actual: Any) -> float:
        drain()
        return compare(judge, actual)

    monkeypatch.setattr(worker, "poison", fill)
    monkeypatch.setattr(worker.Judge, "worst_error", compared)
    monkeypatch.setattr(torch.cuda, "synchronize", drain)
    (good,) = ask(GOOD)
    assert good.right and good.error <= 1


@pytest.mark.parametrize("bug", [off_by_a_little, leaves_the_last_row])
def test_a_wrong_one_is_told_and_not_timed(bug: Callable[[Any, Any], None]) -> None:
    KERNELS[BAD] = bug
    good, bad = ask(GOOD, BAD, race=(GOOD, BAD))
    assert good.right
    assert bad.error > 1 and bad.us == () and not bad.right
    assert StubRound.made == 1


def test_an_unwritten_element_cannot_hide_behind_the_previous_candidates_result() -> None:
    KERNELS[BAD] = leaves_the_last_row
    _, bad = ask(GOOD, BAD)
    assert bad.error == float("inf")


def test_a_race_under_repetition_is_found_after_the_timing() -> None:
    KERNELS[BAD] = right_at_first()
    good, bad = ask(GOOD, BAD)
    assert good.right
    assert bad.error > 1 and not bad.right


def test_a_config_is_repeated_after_its_first_timing_alone() -> None:
    calls = [0]

    def counted(out: Any, x: Any) -> None:
        calls[0] += 1
        right(out, x)

    KERNELS[GOOD] = counted
    ask(GOOD)
    first = calls[0]
    ask(GOOD)
    again = calls[0] - first
    sets, rounds = 6, 5
    assert first == 1 + (rounds + 1) * sets, "one launch, the rounds, and one more"
    assert again == rounds * sets


def test_loading_verifies_and_captures_and_times_nothing() -> None:
    KERNELS[BAD] = leaves_the_last_row
    assert worker.answer(Load(Measure(PREPARE, (str(GOOD), str(BAD))))) is None
    assert StubRound.made == 1
    good, bad = ask(GOOD, BAD)
    assert StubRound.made == 1 and good.right and bad.us == ()


def test_default_and_incumbent_are_captured_once_and_let_go_when_not_asked_for() -> None:
    ask(GOOD)
    ask(GOOD, OTHER)
    assert StubRound.made == 2
    ask(OTHER)
    ask(GOOD, OTHER)
    assert StubRound.made == 3


def test_another_gpu_than_the_jobs_is_refused() -> None:
    with pytest.raises(UnknownGpu, match="a100"):
        worker.answer(Prepare("toy", "m=2 n=8", worker.gpus.lookup("a100")))


def test_a_failure_on_a_healthy_device_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(out: Any, x: Any) -> None:
        raise RuntimeError("too many resources requested for launch")

    KERNELS[BAD] = fails
    with pytest.raises(RuntimeError, match="too many resources"):
        ask(BAD)


def test_a_lost_device_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(worker.os, "_exit", end)
    with pytest.raises(Ended, match=str(worker.DEVICE_LOST)):
        ask(GOOD)
