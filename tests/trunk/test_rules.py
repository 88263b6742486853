"""Rules as records: what each reads, how subclasses change them, and the engine that filters by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cutekernels import gpu
from cutekernels.op import Config, knob
from cutekernels.ops import registry
from cutekernels.ops.attention.problem import AttentionOp
from cutekernels.ops.gemm.op import SCHEDULES
from cutekernels.ops.moe.grouped_schedules import GROUPED_WARPGROUP
from cutekernels.ops.norm_linear.fused import FUSED_SCHEDULES
from cutekernels.ops.quantized.op import SCHEDULES as PACKED
from cutekernels.rules import Ruled, Schedule, best, combinations, foreign, of_both, of_config, of_problem, values_of

H200 = gpu.lookup("h200")
asked: list[str] = []


@dataclass(frozen=True)
class Knobs(Config):
    body: str = knob("small", "large")
    tile: int = knob(1, 2, 4, 8)
    warps: int = knob(1, 2)


@dataclass(frozen=True)
class Small(Schedule[int, Knobs, str]):
    """Problems are whole numbers."""

    name = "small"

    def spanned(self, **among: tuple[Any, ...]) -> Iterator[Knobs]:
        yield from combinations(Knobs, values_of(Knobs, tile=(1, 2, 4), body=(self.name,)) | among)

    def foreign_knobs(self, c: Knobs) -> Iterator[str]:
        return foreign(c, values_of(Knobs, tile=(1, 2, 4), body=(self.name,)))

    @of_both
    def covers(self, p: int, c: Knobs, gpu: gpu.GpuSpec, x: str) -> str | None:
        return f"tile={c.tile} is more than {p}" if c.tile > p else None

    @of_problem
    def positive(self, p: int, gpu: gpu.GpuSpec, x: str) -> str | None:
        return f"{p} is no size" if p < 1 else None

    @of_config
    def odd(self, c: Knobs, gpu: gpu.GpuSpec, x: str) -> str | None:
        asked.append(str(c))
        return "tile=1 is odd" if c.tile == 1 and x == "even" else None

    def shortlist(self, p: int, gpu: gpu.GpuSpec, x: str) -> Iterable[Knobs]:
        return self.fitting(gpu, x)

    def estimate_us(self, p: int, c: Knobs, gpu: gpu.GpuSpec, x: str) -> float:
        return float(abs(p - c.tile))


class Large(Small):
    name = "large"
    positive = None  # type: ignore[assignment]

    @of_config
    def odd(self, c: Knobs, gpu: gpu.GpuSpec, x: str) -> str | None:
        return "tile=2 is odd here" if c.tile == 2 else None


SMALL, LARGE = Small(), Large()


def test_a_rule_is_a_record_and_a_subclass_replaces_or_drops_it() -> None:
    assert [rule[:2] for rule in SMALL.rules] == [("covers", "both"), ("positive", "problem"), ("odd", "config")]
    assert [rule[:2] for rule in LARGE.rules] == [("covers", "both"), ("odd", "config")]
    assert SMALL.refusal(0, H200, "") == "0 is no size" and LARGE.refusal(0, H200, "") is None
    two = Knobs("large", 2, 1)
    assert LARGE.why_not(4, two, H200, "even") == "tile=2 is odd here"


def test_failures_come_by_what_they_read_and_why_not_is_the_first() -> None:
    c = Knobs("large", 1, 2)
    told = list(SMALL.failures(0, c, H200, "even"))
    assert told == [
        "body=large takes body from small; it is large",
        "body=large takes warps from 1; it is 2",
        "0 is no size",
        "tile=1 is odd",
        "tile=1 is more than 0",
    ]
    assert SMALL.why_not(0, c, H200, "even") == told[0]


def test_configs_are_asked_once_for_all_problems() -> None:
    asked.clear()
    found = [c.tile for c in SMALL.valid(2, H200, "even")]
    assert found == [2] and len(asked) == 3
    assert [c.tile for c in SMALL.valid(4, H200, "even")] == [2, 4] and len(asked) == 3
    assert [c.tile for c in SMALL.valid(4, H200, "")] == [1, 2, 4] and len(asked) == 6
    assert list(SMALL.valid(0, H200, "")) == []


def test_the_best_is_the_least_estimate_and_the_preferred_of_equals() -> None:
    assert SMALL.best(3, H200, "") == (1.0, Knobs("small", 2, 1)), "2 and 4 are as far; by text 2 comes first"
    assert SMALL.best(0, H200, "") is None and best([], float, str) is None


def test_names_of_rules_are_told_apart() -> None:
    schedules = [*SCHEDULES.values(), GROUPED_WARPGROUP, *FUSED_SCHEDULES.values(), *PACKED.values()]
    schedules += [s for op in registry.OPS if isinstance(op, AttentionOp) for s in op.schedules]
    schedules += [op for op in registry.OPS if isinstance(op, Ruled)]
    for schedule in schedules:
        assert type(schedule).why_not is Ruled.why_not, "what is asked is the rules"
        names = [rule.name for rule in schedule.rules]
        assert names and len(set(names)) == len(names)
        assert {rule.reads for rule in schedule.rules} <= {"problem", "config", "both"}
        assert all(getattr(type(schedule), rule.name) is rule.why_not for rule in schedule.rules), (
            "the one that is asked"
        )
