"""Problem, Config and Op: the text form, buckets, and refusal of untrusted text."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.op import Config, Problem, Work, exact, extent, knob, ladder, plain
from cutekernels.ops import registry
from tests.tuner.toys import ToyProblem


@dataclass(frozen=True)
class Toy(Problem):
    rows: int = extent(ladder)
    cols: int = extent()
    batch: int = extent(default=1)
    dtype: str = plain("bf16", "fp16")
    causal: bool = plain(False, True)
    align: int = plain(16, 8)


@dataclass(frozen=True)
class ToyConfig(Config):
    tile: int = knob(32, 64)
    feed: str = knob("copy", "tma")
    split: bool = knob(False, True)


extents = st.integers(0, 10**15)
toys = st.builds(
    Toy, extents, extents, extents, st.sampled_from(["bf16", "fp16"]), st.booleans(), st.sampled_from([16, 8])
)


class TestText:
    @given(toys)
    def test_a_problem_survives_its_text(self, p: Toy) -> None:
        assert Toy.parse(str(p)) == p

    @pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
    def test_every_suite_problem_of_every_op_survives(self, op: Any) -> None:
        for text in op.suite:
            problem = op.Problem.parse(text)
            assert op.Problem.parse(str(problem)) == problem
            assert op.Problem.parse(str(problem.bucket())) == problem.bucket()

    @pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
    @settings(max_examples=25)
    @given(data=st.data())
    def test_configs_of_every_op_survive(self, op: Any, data: st.DataObject) -> None:
        values = {name: data.draw(st.sampled_from(options)) for name, options in op.Config.space().items()}
        config = op.Config(**values)
        assert op.Config.parse(str(config)) == config

    def test_defaults_are_left_out_and_bools_are_digits(self) -> None:
        assert str(Toy(4, 5)) == "rows=4 cols=5"
        assert str(Toy(4, 5, 2, "fp16", True, 8)) == "rows=4 cols=5 batch=2 dtype=fp16 causal=1 align=8"
        assert Toy.parse("cols=5 causal=1 rows=4").causal is True
        assert str(ToyConfig(32, "copy", False)) == "tile=32 feed=copy split=0", "knobs have no default to leave out"

    def test_a_field_added_later_leaves_old_text_valid(self) -> None:
        @dataclass(frozen=True)
        class Grown(Toy):
            window: int = plain(0, 4096)

        assert Grown.parse("rows=4 cols=5") == Grown(4, 5)
        assert str(Grown(4, 5)) == str(Toy(4, 5))

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("rows=4", "needs cols"),
            ("", "needs rows, cols"),
            ("rows=4 cols=5 depth=1", "'depth=1' is not a field"),
            ("rows=4 cols", "'cols' is not NAME=VALUE"),
            ("rows=4 cols=5 rows=6", "'rows' stands twice"),
            ("rows=-4 cols=5", "whole number from 0 up; got '-4'"),
            ("rows=4.0 cols=5", "got '4.0'"),
            ("rows=0x4 cols=5", "got '0x4'"),
            ("rows=1_000 cols=5", "got '1_000'"),
            ("rows=٤ cols=5", "got '٤'"),
            (f"rows={'9' * 5000} cols=5", "whole number"),
            (f"rows={'0' * 19}4 cols=5", "whole number"),
            ("rows=4 cols=5 dtype=fp32", "must be one of bf16, fp16; got 'fp32'"),
            ("rows=4 cols=5 causal=True", "must be one of"),
            ("rows=4 cols=5 causal=2", "must be one of"),
            ("rows=__import__('os') cols=5", "whole number"),
            ("__class__=4 rows=4 cols=5", "is not a field"),
        ],
    )
    def test_bad_text_says_the_rule_and_the_value(self, text: str, said: str) -> None:
        with pytest.raises(UnsupportedProblem) as raised:
            Toy.parse(text)
        assert said in str(raised.value)

    @given(st.text())
    def test_any_text_parses_or_is_refused(self, text: str) -> None:
        for cls, error in ((Toy, UnsupportedProblem), (ToyConfig, InvalidConfig)):
            with suppress(error):
                assert cls.parse(text) == cls.parse(str(cls.parse(text)))

    @given(st.from_regex(r"(rows|cols|tile|feed|__dict__)=[^ ]{0,8}( (cols|split)=\S{0,4})?", fullmatch=True))
    def test_near_misses_parse_or_are_refused(self, text: str) -> None:
        self.test_any_text_parses_or_is_refused.hypothesis.inner_test(self, text)

    def test_a_config_outside_its_knobs_is_refused(self) -> None:
        with pytest.raises(InvalidConfig, match="tile must be one of 32, 64; got '48'"):
            ToyConfig.parse("tile=48 feed=tma split=0")


class TestValues:
    @pytest.mark.parametrize("rows", [-1, 1.0, True, "4", None])
    def test_extents_are_whole_numbers(self, rows: Any) -> None:
        with pytest.raises(UnsupportedProblem, match="rows is an extent"):
            Toy(rows, 5)

    @pytest.mark.parametrize("change", [{"causal": 1}, {"align": True}, {"align": 4}, {"dtype": b"bf16"}])
    def test_a_plain_field_takes_its_values_and_their_types(self, change: dict[str, Any]) -> None:
        with pytest.raises(UnsupportedProblem):
            Toy(4, 5, **change)

    def test_a_knob_takes_its_values_and_their_types(self) -> None:
        for change in ({"tile": 48}, {"split": 1}, {"feed": "warp"}):
            with pytest.raises(InvalidConfig):
                ToyConfig(32, "copy", False).replace(**change)

    def test_records_are_frozen_and_hashable(self) -> None:
        assert len({Toy(4, 5), Toy(4, 5), Toy(4, 6)}) == 2
        with pytest.raises(AttributeError):
            Toy(4, 5).rows = 6  # type: ignore[misc]


class TestBuckets:
    @given(st.integers(0, 10**9))
    def test_the_ladder_is_idempotent_and_rounds_up_by_less_than_half(self, n: int) -> None:
        step = ladder(n)
        assert ladder(step) == step
        assert n <= step
        assert step <= max(2, n * 3 // 2 + 1)

    @given(st.integers(0, 10**9), st.integers(0, 10**9))
    def test_the_ladder_is_monotone(self, a: int, b: int) -> None:
        assert (ladder(a) <= ladder(b)) or a > b

    def test_the_ladder_has_two_steps_per_octave(self) -> None:
        assert sorted({ladder(n) for n in range(65)}) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
        assert exact(4097) == 4097

    @given(toys)
    def test_a_bucket_is_its_own_bucket_and_keeps_the_rest(self, p: Toy) -> None:
        bucket = p.bucket()
        assert bucket.bucket() == bucket
        assert bucket.static() == p.static()
        assert bucket.cols == p.cols

    def test_static_and_extents_split_the_fields(self) -> None:
        p = Toy(4, 5, causal=True)
        assert p.extents() == (4, 5, 1)
        assert p.static() == (("dtype", "bf16"), ("causal", True), ("align", 16))


class TestSpace:
    def test_every_is_the_whole_space_in_a_fixed_order(self) -> None:
        every = list(ToyConfig.every())
        assert len(every) == len(set(every)) == 8
        assert every == list(ToyConfig.every())
        assert str(every[0]) == "tile=32 feed=copy split=0"

    def test_ops_read_the_same_in_every_process(self) -> None:
        assert [repr(op) for op in registry.OPS] == [f"<op {op.name}>" for op in registry.OPS]

    def test_a_roofline_takes_the_slower_axis(self) -> None:
        from cutekernels.gpu import lookup

        gpu = lookup("h200")
        assert Work(gpu.peak_tflops * 1e6, 0).floor_us(gpu) == pytest.approx(1)
        assert Work(0, gpu.dram_gbps * 1e3).floor_us(gpu) == pytest.approx(1)
        assert Work(gpu.peak_tflops * 1e6, gpu.dram_gbps * 2e3).floor_us(gpu) == pytest.approx(2)
        assert not Work(gpu.peak_tflops * 1e6, gpu.dram_gbps * 2e3).by_arithmetic(gpu)
        assert Work(gpu.peak_tflops * 2e6, gpu.dram_gbps * 1e3).by_arithmetic(gpu)


def test_an_extent_fits_into_an_int64_and_so_does_its_bucket() -> None:
    most = ToyProblem(2**62, 1)
    assert most.bucket().m == 2**62
    assert ToyProblem.parse(str(most)) == most
    for value in (2**62 + 1, 2**63, 2**64, 10**5000):
        with pytest.raises(UnsupportedProblem, match=r"m is at most 2\*\*62; it has \d+ bits"):
            ToyProblem(value, 1)
    assert ToyProblem.parse(f"m={10**18 - 1} n=1").bucket().m < 2**63
