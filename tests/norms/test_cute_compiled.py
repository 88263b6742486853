"""The body of ``rms_norm`` in CuTe: its rules, when it is served, and the code that is compiled."""

from __future__ import annotations

import random
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cutekernels import gpu
from cutekernels.errors import InvalidConfig
from cutekernels.kernels.cute import rowwise
from cutekernels.ops.norms.op import RMS_NORM
from tests.compiled import H200, TARGETS, opcodes, program
from tests.norms.cute_cases import CONFIG, RAGGED, in_cute


def parsed(text: str, config: str) -> tuple[Any, Any]:
    return RMS_NORM.Problem.parse(text), RMS_NORM.Config.parse(config)


def test_the_body_in_cute_is_served_by_measurement_alone() -> None:
    """The model puts each of its configs behind the default, which is Triton's and has no word for it."""
    for text, spec in zip(RMS_NORM.suite, cycle((gpu.lookup("a100"), H200)), strict=False):
        problem = RMS_NORM.Problem.parse(text)
        default = RMS_NORM.default(problem, spec)
        assert default.body == "triton"
        assert "body" not in str(default)
        valid = list(RMS_NORM.valid(problem, spec))
        assert len(valid) == len(set(valid))
        assert all(RMS_NORM.why_not(problem, c, spec) is None for c in valid)
        least = RMS_NORM.estimate_us(problem, default, spec)
        found = [c for c in valid if c.body == "cute"]
        assert all(RMS_NORM.estimate_us(problem, c, spec) >= 1.2 * least for c in found)
        refused = problem.layout in ("strided", "heads") or problem.cols > 16384
        assert bool(found) is not refused, text


@pytest.mark.parametrize(
    ("text", "config", "rule"),
    [
        ("rows=9 cols=4096 layout=strided", CONFIG, "layout is strided: take body=triton"),
        ("rows=9 cols=4096 heads=2 layout=heads", CONFIG, "layout is heads: take body=triton"),
        ("rows=3000000000 cols=4096", CONFIG, "2147483647 rows at most; there are 3000000000"),
        ("rows=9 cols=1000", CONFIG, "those of 1000 by block_cols=1024; it is 4096"),
        ("rows=9 cols=4096", CONFIG.replace("warps=8", "warps=2"), "8 to 32 elements; 64"),
        ("rows=9 cols=4096", CONFIG.replace("stages=1", "stages=2"), "takes stages from 1; it is 2"),
        ("rows=9 cols=4096", CONFIG.replace("resident=1", "resident=0"), "takes resident from True"),
        (
            "rows=99 cols=128",
            "block_rows=32 block_cols=128 resident=1 warps=4 per_sm=0 stages=1 body=cute",
            "8 threads or all it has accesses for; 4 are too few",
        ),
        ("rows=1 cols=4096", CONFIG.replace("rows=1", "rows=2"), "block_rows=2 idles most of a tile"),
    ],
)
def test_rules_say_what_is_wrong(text: str, config: str, rule: str) -> None:
    problem, c = parsed(text, config)
    with pytest.raises(InvalidConfig, match=rule):
        RMS_NORM.check(problem, c, H200)


@pytest.mark.parametrize("spec", TARGETS, ids=lambda spec: spec.target)
def test_compiles_for_every_architecture_without_spills(spec: gpu.GpuSpec) -> None:
    rng = random.Random(RMS_NORM.name + spec.name)
    texts = rng.sample((*RMS_NORM.suite, *RAGGED), len(RMS_NORM.suite))
    problem, found = next((p, c) for text in texts if (c := in_cute(p := RMS_NORM.Problem.parse(text), spec)))
    tallest = max(found, key=lambda c: c.block_rows * c.block_cols / c.warps)
    config = tallest if TARGETS.index(spec) % 2 else rng.choice(found)
    facts = RMS_NORM.build(problem, config, spec).facts
    assert facts.stack_bytes == 0, (str(problem), str(config), facts)
    assert facts.registers * 32 * config.warps <= spec.REGISTERS_PER_SM


@pytest.mark.parametrize(
    ("words", "loads", "stores"),
    [
        ("", {"128": 4}, {"128": 2}),  # 16 elements of x and of the weight
        ("weight=fp32", {"128": 6}, {"128": 2}),
        ("align=4", {"": 16}, {"": 8}),
    ],
)
def test_accesses_are_as_wide_as_alignment_allows(words: str, loads: dict[str, int], stores: dict[str, int]) -> None:
    problem, c = parsed(f"rows=2048 cols=4096 {words}", CONFIG)
    found = opcodes(RMS_NORM.build(problem, RMS_NORM.check(problem, c, H200), H200))
    for kind, expected in (("LDG.E", loads), ("STG.E", stores)):
        widths: dict[str, int] = {}
        for opcode, count in found.items():
            if opcode.startswith(kind):
                width = opcode.removeprefix(kind).removeprefix(".").removesuffix(".CONSTANT")
                widths[width] = widths.get(width, 0) + count
        assert widths == expected


def test_every_knob_changes_the_code_or_the_grid() -> None:
    problem, base = parsed("rows=2048 cols=4096", CONFIG)

    def made_of(config: Any) -> tuple[str, Any]:
        return program(RMS_NORM.build, problem, config, H200)[0], RMS_NORM.grid(problem, config)

    seen = {made_of(base)}
    changed = {"block_cols"}  # a row's width: one value
    for knob, values in RMS_NORM.cute.knobs.items():
        others = [base.replace(**{knob: v}) for v in values if v != getattr(base, knob)]
        for config in [c for c in others if RMS_NORM.why_not(problem, c, H200) is None][:1]:
            made = made_of(config)
            assert made not in seen, f"{knob} changes nothing in {config}"
            seen.add(made)
            changed.add(knob)
    assert changed >= set(RMS_NORM.cute.knobs)


def test_bodies_to_read_first_are_short() -> None:
    for file in (*Path(rowwise.__file__).parent.glob("*.py"), Path(__file__).parents[2] / "examples/silu_mul_cute.py"):
        lines = file.read_text().split('"""', 2)[2].splitlines()
        assert sum(bool(line.strip()) for line in lines) <= 120, f"{file.name} is no longer read in one go"
