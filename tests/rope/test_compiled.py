"""``rope``'s kernel compiled for GPUs that are not there: code, resources, and what each knob does to them."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.ops.rope import ROPE, RopeConfig, RopeProblem
from tests.rope.cases import H200

TARGETS = [gpu.lookup(name) for name in ("a100", "l40s", "h200", "rtx5090")]
PREFILL = RopeProblem(1, 2048, 32, 128, 128, 8)


@cache
def built(problem: RopeProblem, config: RopeConfig, target: str) -> Any:
    return ROPE.build(problem, config, gpu.lookup(target))


def accesses(text: str) -> set[str]:
    return set(re.findall(r"(?:ld|st)\.global\S*?\.((?:v\d\.)?b\d+)\b", text))


@pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
def test_compiles_for_every_architecture(spec: gpu.GpuSpec) -> None:
    rng = random.Random(spec.name)
    for text in rng.sample(ROPE.suite, 4):
        problem = RopeProblem.parse(text)
        for config in (ROPE.default(problem, spec), rng.choice(list(ROPE.valid(problem, spec)))):
            facts = built(problem, config, spec.name).facts
            assert facts.stack_bytes == 0, (text, config, facts)
            assert facts.registers * 32 * config.warps <= 64 * 1024


@pytest.mark.parametrize("words", ["", "interleaved=1", "layout=strided", "dtype=fp32"])
def test_the_largest_tiles_do_not_spill(words: str) -> None:
    problem = RopeProblem.parse(f"batch=1 seq=2048 heads_q=32 head_dim=192 rotary=128 heads_kv=8 {words}")
    worst = max(ROPE.valid(problem, H200), key=lambda c: (c.tokens * c.heads * c.block / c.warps, c.tokens))
    assert built(problem, worst, "h200").facts.stack_bytes == 0, worst


def test_every_knob_changes_the_code_or_the_grid() -> None:
    base = ROPE.check(PREFILL, RopeConfig(2, 8, 64, 4), H200)
    seen = {(built(PREFILL, base, "h200").ptx, ROPE.grid(PREFILL, base))}
    for knob, values in RopeConfig.space().items():
        others = [base.replace(**{knob: v}) for v in values if v != getattr(base, knob)]
        others = [c for c in others if ROPE.why_not(PREFILL, c, H200) is None]
        assert others or knob == "block", knob  # a block follows from the number of channels that turn
        for config in others[:2]:
            made = (built(PREFILL, config, "h200").ptx, ROPE.grid(PREFILL, config))
            assert made not in seen, f"{knob} changes nothing in {config}"
            seen.add(made)
    wide = RopeProblem(1, 2048, 32, 256, 256, 8)
    assert wide.static() == PREFILL.static()
    config = ROPE.check(wide, base.replace(block=128), H200)
    assert built(wide, config, "h200").ptx not in {code for code, _ in seen}


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
    for target in ("a100", "h200", "rtx5090"):
        artifact = built(problem, ROPE.default(problem, gpu.lookup(target)), target)
        found = accesses(artifact.ptx)
        assert found <= widths
        assert min(widths, key=len) in found
        assert artifact.facts.smem_bytes == 0
        assert artifact.facts.registers <= 80


def test_compiled_code_does_not_depend_on_extents() -> None:
    config = RopeConfig(1, 4, 64, 1)
    other = RopeProblem(3, 77, 5, 250, 122, 4, align=2)
    assert built(PREFILL.replace(align=2), config, "h200").ptx == built(other, config, "h200").ptx
