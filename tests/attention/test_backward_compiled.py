"""The kernels of attention's gradients compiled for GPUs that are not there: resources, instructions, knobs."""

from __future__ import annotations

import pytest

from cutekernels import gpu
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD
from cutekernels.ops.attention.backward_config import AttentionBackwardConfig, AttentionBackwardProblem
from cutekernels.ops.attention.delta import ATTENTION_DELTA, DeltaProblem
from tests.attention import compiled
from tests.attention.compiled import A100, H200, L40S, count
from tests.compiled import pairs

FULL = "batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16"
NARROW = "batch=4 seq_q=2048 seq_kv=2048 heads_q=32 heads_kv=8 head_dim=64 causal=1 dtype=fp16"
WIDE = "batch=3 seq_q=2000 seq_kv=2000 heads_q=8 heads_kv=2 head_dim=256 causal=1 softcap=1"
PROBLEMS = {
    "causal": f"{FULL} causal=1",  # the first two with the GPUs for which a test below looks at them too
    "narrow of q": f"{NARROW} of=q",
    "wide of k": f"{WIDE} of=k",
    "wide of q": f"{WIDE} of=q",
    "mask": "batch=2 seq_q=130 seq_kv=200 heads_q=6 heads_kv=3 head_dim=96 mask=1 dtype=fp16 softcap=1",
    "varlen": "batch=5 seq_q=150 seq_kv=150 heads_q=8 heads_kv=2 head_dim=40 varlen=1"
    " window=both window_left=30 window_right=9",
}
SMALL = "batch=2 seq_q=256 seq_kv=256 heads_q=4 heads_kv=2 head_dim=32"  # compiles fast
# Addresses kept on the stack beside the loops, read once per tile. Hardly anything spills within (see below).
SETUP_SPILL_BYTES = 64


def products(problem: AttentionBackwardProblem, config: AttentionBackwardConfig) -> int:
    """A warp's m16n8k16 products in one walked tile: S and dP, and the sums of P, of dS."""
    each = config.rows * config.tile_walked * problem.width // (16 * 8 * 16)
    return each * {"kv": 4, "q": 3, "k": 3, "v": 2}[problem.of]


# ---- resources ------------------------------------------------------------------------------------------


@pytest.mark.slow
@compiled.paired(PROBLEMS)
def test_compiles_for_every_architecture_as_why_not_predicts(name: str, spec: gpu.GpuSpec) -> None:
    problem = AttentionBackwardProblem.parse(PROBLEMS[name])
    default = ATTENTION_BACKWARD.default(problem, spec)
    facts = compiled.facts(ATTENTION_BACKWARD, problem, default, spec, default.smem_bytes(problem))
    assert facts.stack_bytes <= SETUP_SPILL_BYTES, f"spills: {default}"


@pytest.mark.parametrize(
    ("name", "spec"), [("causal", A100), ("narrow of q", L40S)], ids=lambda x: getattr(x, "target", x)
)
def test_tiles_between_the_edges_run_no_masking_code_and_hardly_spill(name: str, spec: gpu.GpuSpec) -> None:
    problem = AttentionBackwardProblem.parse(PROBLEMS[name])
    config = ATTENTION_BACKWARD.default(problem, spec)
    bodies = compiled.loops(ATTENTION_BACKWARD, problem, config, spec.name, products(problem, config))
    scores = config.rows * config.tile_walked // 32
    kind = "HMMA.16816.F32.BF16" if problem.dtype == "bf16" else "HMMA.16816.F32"
    inside, edge = sorted(bodies, key=lambda body: count(body, "FSEL"))
    for body in bodies:
        assert count(body, kind) == products(problem, config)
        assert scores <= count(body, "MUFU.EX2") <= scores + 8
        assert count(body, "LDG.") == 0
        assert count(body, "LDL") <= 4  # addresses
        assert count(body, "STL") == 0
    assert count(edge, "FSEL") >= scores
    assert count(inside, "FSEL") <= 1
    copied = 2 * config.tile_walked * problem.head_dim // 8 // config.threads
    assert count(inside, "LDGSTS.E.BYPASS") == 2 * copied  # for whole tiles, and for those with an end
    assert scores <= count(inside, "FFMA") <= scores + 16  # a score is scaled within its exponent


@pytest.mark.parametrize(
    ("text", "spec"),
    pairs(["batch=4 seq=4096 heads=16", "batch=1 seq=77 heads=2 head_dim=80 dlse=1 dtype=fp16"] * 2),
    ids=lambda x: getattr(x, "target", None),
)
def test_delta_compiles_for_every_architecture(text: str, spec: gpu.GpuSpec) -> None:
    problem = DeltaProblem.parse(text)
    facts = ATTENTION_DELTA.build(problem, ATTENTION_DELTA.default(problem, spec), spec).facts
    assert facts.stack_bytes == 0
    assert facts.registers <= 64


# ---- what the code depends on ---------------------------------------------------------------------------


@pytest.mark.slow
def test_the_kernel_depends_on_the_static_half_of_a_problem_alone() -> None:
    first = AttentionBackwardProblem.parse(SMALL)
    second = first.replace(batch=1, seq_q=200, seq_kv=100, heads_q=28, heads_kv=4)
    valid = (
        c for c in compiled.smallest_first(ATTENTION_BACKWARD, first) if not ATTENTION_BACKWARD.why_not(second, c, H200)
    )
    config = next(valid)
    compiled.depends_on_statics_alone(ATTENTION_BACKWARD, first, second, config)


CHANGES = ["dtype=fp16", "head_dim=24", "causal=1", "window=left", "window=right", "softcap=1", "mask=1", "varlen=1"]


@pytest.mark.slow
@pytest.mark.parametrize("change", [*CHANGES, "of=q", "of=k", "of=v"])
def test_every_static_field_changes_the_code(change: str) -> None:
    compiled.changes_the_code(ATTENTION_BACKWARD, AttentionBackwardProblem.parse(SMALL), change)


# Products and copies of the loops above are of as many rows, columns and threads as the config says; bodies differ in
# their instructions (test_warpgroup_backward.py).
COUNTED = ("tile_own", "tile_walked", "warps", "body")


@pytest.mark.slow
@pytest.mark.parametrize("knob", [name for name in AttentionBackwardConfig.space() if name not in COUNTED])
def test_every_other_knob_changes_the_code(knob: str) -> None:
    problems = [AttentionBackwardProblem.parse(text) for text in (SMALL, NARROW)]
    compiled.knob_changes_the_code(ATTENTION_BACKWARD, problems, knob, lambda p, c: c.smem_bytes(p))
