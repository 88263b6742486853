"""Rules as records: what each reads, how subclasses change them, and the engine that filters by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cutekernels import gpu
from cutekernels.columns import Columns, where
from cutekernels.op import Config, knob
from cutekernels.ops import registry
from cutekernels.ops.attention.operands import AttentionOp
from cutekernels.ops.products.dense import SCHEDULES
from cutekernels.ops.products.fused import FUSED_SCHEDULES
from cutekernels.ops.products.packed import QUANTIZED_LINEAR
from cutekernels.ops.products.schedules.grouped import GROUPED_WARPGROUP
from cutekernels.rules import EVERY, Among, Broken, Ruled, Schedule, foreign, of_both, of_config, of_problem, values_of

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

    def span(self, among: Among = EVERY) -> Columns:
        return Columns.span(Knobs, values_of(Knobs, tile=(1, 2, 4), body=(self.name,)) | dict(among))

    def foreign_knobs(self, c: Knobs) -> Iterator[str]:
        return foreign(c, values_of(Knobs, tile=(1, 2, 4), body=(self.name,)))

    @of_both
    def covers(self, p: int, c: Knobs, gpu: gpu.GpuSpec, x: str) -> Broken:
        yield c.tile > p, "tile={} is more than {}", c.tile, p

    @of_problem
    def positive(self, p: int, gpu: gpu.GpuSpec, x: str) -> str | None:
        return f"{p} is no size" if p < 1 else None

    @of_config
    def odd(self, c: Knobs, gpu: gpu.GpuSpec, x: str) -> Broken:
        asked.append(x)
        yield (c.tile == 1) & (x == "even"), "tile={} is odd", c.tile

    def times_us(self, p: int, c: Any, gpu: gpu.GpuSpec, x: str) -> Any:
        return where(c.tile > p, c.tile - p, p - c.tile) * (1 + 1e-9 * c.tile)


class Large(Small):
    name = "large"
    positive = None  # type: ignore[assignment]

    @of_config
    def odd(self, c: Knobs, gpu: gpu.GpuSpec, x: str) -> Broken:
        yield c.tile == 2, "tile={} is odd here", c.tile


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
    assert found == [2] and asked == ["even"]
    assert [c.tile for c in SMALL.valid(4, H200, "even")] == [2, 4] and asked == ["even"]
    assert [c.tile for c in SMALL.valid(4, H200, "")] == [1, 2, 4] and asked == ["even", ""]
    assert list(SMALL.valid(0, H200, "")) == []


def test_the_best_is_the_least_estimate_and_the_preferred_of_equals() -> None:
    assert SMALL.best(4, H200, "") == (0.0, Knobs("small", 4, 1))
    found = SMALL.best(3, H200, "")
    assert found and found[1] == Knobs("small", 2, 1), "4 is too large"
    assert SMALL.best(0, H200, "") is None


def test_names_of_rules_are_told_apart() -> None:
    schedules = [
        *SCHEDULES.values(),
        GROUPED_WARPGROUP,
        *FUSED_SCHEDULES.values(),
        *QUANTIZED_LINEAR.schedules.values(),
    ]
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
