"""Decode's kernels compiled for GPUs that are not there: resources, instructions, and what each knob does."""

from __future__ import annotations

from collections import Counter

import pytest

from cutekernels import gpu
from cutekernels.ops.attention.decode import DECODE_ATTENTION, WIDEST_IN_REGISTERS, DecodeConfig, DecodeProblem
from tests.attention import compiled
from tests.attention.compiled import A100, H200, RTX5090, count
from tests.compiled import area

PROBLEMS = {
    "ragged": "batch=2 seq_kv=500 heads_q=8 heads_kv=2 seq_q=16 head_dim=40 softcap=1 lse=1",
    "long": "batch=1 seq_kv=32768 heads_q=32 heads_kv=8 lse=1",
    "wide": "batch=2 seq_kv=4096 heads_q=8 heads_kv=2 head_dim=256 page_size=256 dtype=fp16 lse=1",
    "batch": "batch=32 seq_kv=4096 heads_q=32 heads_kv=8",
    "pages": "batch=2 seq_kv=2048 heads_q=32 heads_kv=1 seq_q=4 window_left=300 window=1 page_size=16",
}
NARROW = "batch=3 seq_kv=777 heads_q=8 heads_kv=8 head_dim=64 dtype=fp16"
SMALL = "batch=2 seq_kv=1024 heads_q=4 heads_kv=2 head_dim=32"  # compiles fast

# Spills after the loop over keys, in CTAs whose splits meet, at head dim 256, where 128 registers are sums.
LATE_SPILL_BYTES = 16


def loop(problem: DecodeProblem, config: DecodeConfig, target: str) -> Counter[str]:
    """The opcodes of the loop over blocks of keys: the shortest with all products."""
    products = 2 * config.rows * 16 * problem.head_dim // (16 * 8 * 16)
    return min(compiled.loops(DECODE_ATTENTION, problem, config, target, products), key=lambda body: body.total())


# ---- resources ------------------------------------------------------------------------------------------


@compiled.paired(PROBLEMS)
def test_compiles_for_every_architecture_as_why_not_predicts(name: str, spec: gpu.GpuSpec) -> None:
    problem = DecodeProblem.parse(PROBLEMS[name])
    config = DECODE_ATTENTION.default(problem, spec)
    facts = compiled.facts(DECODE_ATTENTION, problem, config, spec, config.smem(problem).total_bytes)
    assert facts.stack_bytes <= (LATE_SPILL_BYTES if name == "wide" and config.splits > 1 else 0), f"{config} spills"


# Each with the GPU that the test above compiles it for.
@pytest.mark.parametrize(
    ("name", "spec"), [("batch", RTX5090), ("pages", A100), ("wide", H200)], ids=lambda x: getattr(x, "target", x)
)
def test_the_loop_has_copies_and_products_and_no_barrier(name: str, spec: gpu.GpuSpec) -> None:
    problem = DecodeProblem.parse(PROBLEMS[name])
    config = DECODE_ATTENTION.default(problem, spec)
    body = loop(problem, config, spec.name)
    k_blocks = problem.head_dim // 16
    queries = k_blocks if problem.head_dim > WIDEST_IN_REGISTERS else 0
    assert count(body, "HMMA.16816.F32") == config.rows // 4 * k_blocks
    assert count(body, "LDGSTS.E.BYPASS") == 2 * config.rows * problem.head_dim // 8 // 32
    assert count(body, "LDSM") == config.rows // 8 * k_blocks + queries
    assert count(body, "BAR") == count(body, "LDL") == count(body, "STL") == 0
    assert count(body, "LDG.") == (config.rows // 16 if problem.page_size else 0)


# ---- what the code depends on ---------------------------------------------------------------------------


def test_the_kernel_depends_on_the_static_half_of_a_problem_alone() -> None:
    first = DecodeProblem.parse(f"{SMALL} lse=1")
    second = first.replace(batch=3, seq_kv=1000, heads_q=28, heads_kv=4, seq_q=5)
    split = [c for c in DECODE_ATTENTION.valid(second, H200) if c.splits == 4 and not c.cluster]
    config = min(split, key=lambda c: (area(c), str(c)))  # compiles fast
    compiled.depends_on_statics_alone(DECODE_ATTENTION, first, second, config)


CHANGES = [
    "dtype=fp16",
    "head_dim=24",
    "page_size=16",
    "page_size=64",
    "window=1",
    "softcap=1",
    "lse=1",
    "cache=fp8",
    "cache=fp8_tokens",
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_static_field_changes_the_code(change: str) -> None:
    compiled.changes_the_code(DECODE_ATTENTION, DecodeProblem.parse(SMALL), change)


@pytest.mark.parametrize("knob", [name for name in DecodeConfig.space() if name != "tile_kv"])  # products of the loop
def test_every_other_knob_changes_the_code(knob: str) -> None:
    problems = [DecodeProblem.parse(text) for text in (SMALL, NARROW)]
    compiled.knob_changes_the_code(DECODE_ATTENTION, problems, knob, lambda p, c: c.smem(p).total_bytes)
