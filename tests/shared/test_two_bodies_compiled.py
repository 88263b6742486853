"""Ops with a body in Triton and one in CuTe: rules, the choice between them, and the CuTe bodies compiled."""

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
from tests.compiled import H200, TARGETS, opcodes, program
from tests.shared.two_bodies_cases import OPS, RAGGED, in_cute

NORM = "block_rows=1 block_cols=4096 resident=1 warps=8 per_sm=0 stages=1 body=cute"
TURN = "tokens=4 heads=8 block=64 warps=4 body=cute"
PREFILL = "batch=1 seq=2048 heads_q=32 head_dim=128 rotary=128 heads_kv=8"
KNOBS_OF = {"rms_norm": NORM, "rope": TURN.replace("tokens=4 heads=8", "tokens=1 heads=16")}
BASE = {"rms_norm": ("rows=2048 cols=4096", NORM), "rope": (PREFILL, TURN)}


def posed(name: str, text: str, config: str) -> tuple[Any, Any, Any]:
    op = OPS[name]
    return op, op.Problem.parse(text), op.Config.parse(config)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_the_body_in_cute_is_served_by_measurement_alone(op: Any) -> None:
    """The model puts each of its configs behind the default, which is Triton's and has no word for it."""
    for text, spec in zip(op.suite, cycle((gpu.lookup("a100"), H200)), strict=False):
        problem = op.Problem.parse(text)
        default = op.default(problem, spec)
        assert default.body == "triton"
        assert "body" not in str(default)
        valid = list(op.valid(problem, spec))
        assert len(valid) == len(set(valid))
        assert all(op.why_not(problem, c, spec) is None for c in valid)
        least = op.estimate_us(problem, default, spec)
        found = [c for c in valid if c.body == "cute"]
        assert all(op.estimate_us(problem, c, spec) >= 1.2 * least for c in found)
        refused = problem.layout in ("strided", "heads") or getattr(problem, "width", 0) > 16384
        assert bool(found) is not refused, text


@pytest.mark.parametrize(
    ("name", "text", "config", "rule"),
    [
        ("rms_norm", "rows=9 cols=4096 layout=strided", NORM, "layout is strided: take body=triton"),
        ("rms_norm", "rows=9 cols=4096 heads=2 layout=heads", NORM, "layout is heads: take body=triton"),
        ("rms_norm", "rows=3000000000 cols=4096", NORM, "2147483647 rows at most; there are 3000000000"),
        ("rms_norm", "rows=9 cols=1000", NORM, "those of 1000 by block_cols=1024; it is 4096"),
        ("rms_norm", "rows=9 cols=4096", NORM.replace("warps=8", "warps=2"), "8 to 32 elements; 64"),
        ("rms_norm", "rows=9 cols=4096", NORM.replace("stages=1", "stages=2"), "takes stages from 1; it is 2"),
        ("rms_norm", "rows=9 cols=4096", NORM.replace("resident=1", "resident=0"), "takes resident from True"),
        (
            "rms_norm",
            "rows=99 cols=128",
            "block_rows=32 block_cols=128 resident=1 warps=4 per_sm=0 stages=1 body=cute",
            "8 threads or all it has accesses for; 4 are too few",
        ),
        ("rms_norm", "rows=1 cols=4096", NORM.replace("rows=1", "rows=2"), "block_rows=2 idles most of a tile"),
        ("rope", f"{PREFILL} layout=strided", TURN, "layout is strided: take body=triton"),
        ("rope", PREFILL, TURN.replace("block=64", "block=32"), "64 pairs by block=64, .* it is 32"),
        ("rope", f"{PREFILL} dtype=fp32", TURN.replace("warps=4", "warps=1"), "64 of a head .* are 32"),
        ("rope", PREFILL, TURN.replace("heads=8", "heads=32"), "64 channels at most; warps=4 makes 128"),
        ("rope", PREFILL.replace("seq=2048", "seq=2"), TURN, "tokens=4 idles"),
    ],
)
def test_rules_say_what_is_wrong(name: str, text: str, config: str, rule: str) -> None:
    op, problem, c = posed(name, text, config)
    with pytest.raises(InvalidConfig, match=rule):
        op.check(problem, c, H200)


@pytest.mark.parametrize("spec", TARGETS, ids=lambda spec: spec.target)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_compiles_for_every_architecture_without_spills(op: Any, spec: gpu.GpuSpec) -> None:
    rng = random.Random(op.name + spec.name)
    texts = rng.sample((*op.suite, *RAGGED[op.name]), len(op.suite))
    problem, found = next((p, c) for text in texts if (c := in_cute(op, p := op.Problem.parse(text), spec)))
    tallest = max(found, key=lambda c: (getattr(c, "block_rows", 0) * getattr(c, "block_cols", 0) or c.heads) / c.warps)
    config = tallest if TARGETS.index(spec) % 2 else rng.choice(found)
    facts = op.build(problem, config, spec).facts
    assert facts.stack_bytes == 0, (str(problem), str(config), facts)
    assert facts.registers * 32 * config.warps <= spec.REGISTERS_PER_SM


@pytest.mark.parametrize(
    ("name", "words", "loads", "stores"),
    [
        ("rms_norm", "", {"128": 4}, {"128": 2}),  # 16 elements of x and of the weight
        ("rms_norm", "weight=fp32", {"128": 6}, {"128": 2}),
        ("rms_norm", "align=4", {"": 16}, {"": 8}),
        ("rope", "", {"128": 12}, {"128": 8}),  # two heads of q or of k, two runs; a cosine is 4 bytes
    ],
)
def test_accesses_are_as_wide_as_alignment_allows(
    name: str, words: str, loads: dict[str, int], stores: dict[str, int]
) -> None:
    text, config = BASE[name]
    op, problem, c = posed(name, f"{text} {words}", config)
    found = opcodes(op.build(problem, op.check(problem, c, H200), H200))
    for kind, expected in (("LDG.E", loads), ("STG.E", stores)):
        widths: dict[str, int] = {}
        for opcode, count in found.items():
            if opcode.startswith(kind):
                width = opcode.removeprefix(kind).removeprefix(".").removesuffix(".CONSTANT")
                widths[width] = widths.get(width, 0) + count
        assert widths == expected


def made_of(op: Any, problem: Any, config: Any) -> tuple[str, Any]:
    return program(op.build, problem, config, H200)[0], op.grid(problem, config)


@pytest.mark.parametrize("name", OPS)
def test_every_knob_changes_the_code_or_the_grid(name: str) -> None:
    op, problem, base = posed(name, BASE[name][0], KNOBS_OF[name])
    seen = {made_of(op, problem, base)}
    changed = {"block", "block_cols"} if name == "rms_norm" else {"block"}  # a row's, or its pairs' width: one value
    for knob, values in op.cute.knobs.items():
        others = [base.replace(**{knob: v}) for v in values if v != getattr(base, knob)]
        for config in [c for c in others if op.why_not(problem, c, H200) is None][:1]:
            made = made_of(op, problem, config)
            assert made not in seen, f"{knob} changes nothing in {config}"
            seen.add(made)
            changed.add(knob)
    assert changed >= set(op.cute.knobs)


def test_bodies_to_read_first_are_short() -> None:
    for file in (*Path(rowwise.__file__).parent.glob("*.py"), Path(__file__).parents[2] / "examples/silu_mul_cute.py"):
        lines = file.read_text().split('"""', 2)[2].splitlines()
        assert sum(bool(line.strip()) for line in lines) <= 120, f"{file.name} is no longer read in one go"
