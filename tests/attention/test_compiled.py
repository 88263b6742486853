"""Attention's kernels compiled for GPUs that are not there: resources, instructions, and what each knob does."""

from __future__ import annotations

import pytest

from cutekernels import gpu
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import AttentionProblem
from tests.attention import compiled
from tests.attention.compiled import H200, RTX5090, count

FULL = "batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16"
PROBLEMS = {
    "narrow": "batch=4 seq_q=2048 seq_kv=2048 heads_q=32 heads_kv=8 head_dim=64 causal=1 dtype=fp16",
    "wide": "batch=3 seq_q=2000 seq_kv=2000 heads_q=8 heads_kv=2 head_dim=256 causal=1 softcap=1",
    "varlen": "batch=5 seq_q=150 seq_kv=150 heads_q=8 heads_kv=2 head_dim=40 causal=1 varlen=1 lse=1",
    "causal": f"{FULL} causal=1 lse=1",  # with the RTX 5090, for which a test below looks at it too
    "mask and window": "batch=2 seq_q=130 seq_kv=777 heads_q=6 heads_kv=3 head_dim=96 mask=1 dtype=fp16 lse=1"
    " window=both window_left=30 window_right=9",
}
SMALL = "batch=2 seq_q=256 seq_kv=256 heads_q=4 heads_kv=2 head_dim=32"  # compiles fast
# Spilling into masked blocks, of which a tile of queries has a few, is not worth smaller tiles.
MASKED_SPILL_BYTES = 64


def products(problem: AttentionProblem, config: AttentionConfig) -> int:
    """A warp's m16n8k16 products in one block of keys."""
    return 2 * config.rows * config.tile_kv * problem.head_dim // (16 * 8 * 16)


# ---- resources ------------------------------------------------------------------------------------------


@compiled.paired(PROBLEMS)
def test_compiles_for_every_architecture_as_why_not_predicts(name: str, spec: gpu.GpuSpec) -> None:
    problem = AttentionProblem.parse(PROBLEMS[name])
    default = ATTENTION.default(problem, spec)
    facts = compiled.facts(ATTENTION, problem, default, spec, default.smem(problem).total_bytes)
    assert facts.stack_bytes <= MASKED_SPILL_BYTES, f"the default spills: {default}"


def test_blocks_between_the_edges_run_no_masking_code_and_hardly_spill() -> None:
    problem = AttentionProblem.parse(PROBLEMS["causal"])
    config = ATTENTION.default(problem, RTX5090)
    edge, inside = compiled.loops(ATTENTION, problem, config, RTX5090.name, products(problem, config))
    scores = config.rows * config.tile_kv // 32
    for body in (edge, inside):
        assert count(body, "HMMA.16816.F32.BF16") == products(problem, config)
        assert count(body, "MUFU.EX2") >= scores
    assert count(edge, "FSEL") >= scores
    assert count(inside, "FSEL") == 0
    assert count(inside, "LDL") == count(inside, "STL") <= 1  # 192 accumulators leave 63 registers
    assert count(inside, "LDG.") == 0
    assert count(inside, "LDGSTS.E.BYPASS") == 2 * config.tile_kv * problem.head_dim // 8 // config.threads
    # A score is scaled within the exponent, by one FFMA: its factor and the row's reference together.
    assert scores <= count(inside, "FFMA") <= scores + 16
    assert count(inside, "MUFU.EX2") <= scores + 16


# ---- what the code depends on ---------------------------------------------------------------------------


def test_the_kernel_depends_on_the_static_half_of_a_problem_alone() -> None:
    first = AttentionProblem.parse(SMALL)
    second = first.replace(batch=1, seq_q=200, seq_kv=100, heads_q=28, heads_kv=4)
    config = next(c for c in compiled.smallest_first(ATTENTION, first) if ATTENTION.why_not(second, c, H200) is None)
    compiled.depends_on_statics_alone(ATTENTION, first, second, config)


CHANGES = [
    "dtype=fp16",
    "head_dim=24",
    "causal=1",
    "window=left",
    "window=right",
    "softcap=1",
    "mask=1",
    "varlen=1",
    "lse=1",
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_static_field_changes_the_code(change: str) -> None:
    compiled.changes_the_code(ATTENTION, AttentionProblem.parse(SMALL), change)


# Products and copies of the loops above are of as many rows, keys and threads as the config says; bodies differ in
# their instructions (test_warpgroup.py), and launches of several parts in their meeting (test_few_tiles.py).
COUNTED = ("tile_q", "tile_kv", "warps", "body", "split")


@pytest.mark.parametrize("knob", [name for name in AttentionConfig.space() if name not in COUNTED])
def test_every_other_knob_changes_the_code(knob: str) -> None:
    problems = [AttentionProblem.parse(text) for text in (SMALL, PROBLEMS["narrow"])]
    compiled.knob_changes_the_code(ATTENTION, problems, knob, lambda p, c: c.smem(p).total_bytes)
