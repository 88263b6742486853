"""``rope``'s kernel compiled without a GPU: its code, its resources, and what each knob changes."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.ops.rope.op import ROPE, RopeConfig, RopeProblem
from tests.triton_compiled import H200, TARGETS, accesses, built, check_knobs, check_resources, program

PREFILL = RopeProblem(1, 2048, 32, 128, 128, 8)


@pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
def test_compiles_for_every_architecture(spec: gpu.GpuSpec) -> None:
    """A problem of the suite by default, and another by a random config."""
    rng = random.Random(spec.name)
    first, second = map(RopeProblem.parse, rng.sample(ROPE.suite, 2))
    check_resources(ROPE, first, ROPE.default(first, spec), spec)
    check_resources(ROPE, second, rng.choice(list(ROPE.valid(second, spec))), spec)


@pytest.mark.parametrize("words", ["", "interleaved=1", "layout=strided", "dtype=fp32"])
def test_the_largest_tiles_do_not_spill(words: str) -> None:
    problem = RopeProblem.parse(f"batch=1 seq=2048 heads_q=32 head_dim=192 rotary=128 heads_kv=8 {words}")
    worst = max(ROPE.valid(problem, H200), key=lambda c: (c.tokens * c.heads * c.block / c.warps, c.tokens))
    check_resources(ROPE, problem, worst)


def test_every_knob_changes_the_code_or_the_grid() -> None:
    base = RopeConfig(2, 8, 64, 4)
    changed = check_knobs(ROPE, PREFILL, base)
    # A block has no other valid value: it follows from the number of rotated channels.
    assert changed.keys() | {"block"} == {"", *RopeConfig.space()} - {"body"}
    wide = RopeProblem(1, 2048, 32, 256, 256, 8)
    assert wide.static() == PREFILL.static()
    config = ROPE.check(wide, base.replace(block=128), H200)
    assert program(ROPE, wide, config) not in {code for codes in changed.values() for code in codes}


@pytest.mark.parametrize(
    ("words", "widths"),
    [
        ("", {"v4.b32"}),
        ("interleaved=1", {"v4.b32"}),
        ("dtype=fp32", {"v4.b32"}),
        ("align=8", {"v2.b32"}),
        ("align=4", {"b32"}),
    ],
)
def test_accesses_are_as_wide_as_alignment_allows(words: str, widths: set[str]) -> None:
    problem = RopeProblem.parse(f"batch=1 seq=2048 heads_q=32 head_dim=128 rotary=128 heads_kv=8 {words}")
    for spec in map(gpu.lookup, ("h200", "rtx5090")):
        artifact = built(ROPE, problem, ROPE.default(problem, spec), spec)
        found = accesses(artifact.ptx)
        assert found <= widths
        assert min(widths, key=len) in found
        assert artifact.facts.smem_bytes == 0
        assert artifact.facts.registers <= 80


def test_compiled_code_does_not_depend_on_extents() -> None:
    config = RopeConfig(1, 4, 64, 1)
    other = RopeProblem(3, 77, 5, 250, 122, 4, align=2)
    assert program(ROPE, PREFILL.replace(align=2), config) == program(ROPE, other, config)
