"""Attention's kernels compiled for GPUs that are not there: resources, instructions, and what each knob does."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest

from cutekernels import gpu
from cutekernels.ops.attention.op import ATTENTION, AttentionConfig
from cutekernels.ops.attention.problem import AttentionProblem
from tests import compiled
from tests.attention.cases import random_config

H200 = gpu.lookup("h200")
TARGETS = [gpu.lookup(name) for name in ("a100", "l40s", "h200", "rtx5090")]
FULL = "batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16"
PROBLEMS = {
    "full": FULL,
    "causal": f"{FULL} causal=1 lse=1",
    "narrow": "batch=4 seq_q=2048 seq_kv=2048 heads_q=32 heads_kv=8 head_dim=64 causal=1 dtype=fp16",
    "window": "batch=2 seq_q=300 seq_kv=777 heads_q=4 heads_kv=1 head_dim=80 window=both window_left=30 window_right=9",
    "mask": "batch=2 seq_q=130 seq_kv=200 heads_q=6 heads_kv=3 head_dim=96 mask=1 dtype=fp16 lse=1",
    "wide": "batch=3 seq_q=2000 seq_kv=2000 heads_q=8 heads_kv=2 head_dim=256 causal=1 softcap=1",
    "varlen": "batch=5 seq_q=150 seq_kv=150 heads_q=8 heads_kv=2 head_dim=40 causal=1 varlen=1 lse=1",
}
# Spilling into masked blocks, of which a tile of queries has a few, is not worth smaller tiles.
MASKED_SPILL_BYTES = 64


@cache
def built(problem: AttentionProblem, config: AttentionConfig, target: str) -> Any:
    return ATTENTION.build(problem, config, gpu.lookup(target))


def code(problem: AttentionProblem, config: AttentionConfig, target: str = "h200") -> bytes:
    return compiled.code(built(problem, config, target))


def loops(problem: AttentionProblem, config: AttentionConfig, target: str) -> list[Counter[str]]:
    """The opcodes of each loop over blocks of keys, in the order of the code.

    Rescaling lies behind the loop and jumps back into it, which looks like a loop with fewer products.
    """
    sass = compiled.sass(compiled.cubin(built(problem, config, target)))
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)([^;]*);", sass, re.MULTILINE)
    places = [int(at, 16) for at, _, _ in lines]
    found = []
    for at, opcode, operands in lines:
        target_at = re.search(r"0x([0-9a-f]+)", operands) if opcode == "BRA" else None
        if target_at and (begin := int(target_at[1], 16)) < (end := int(at, 16)):
            body = Counter(op for place, (_, op, _) in zip(places, lines, strict=True) if begin <= place <= end)
            if count(body, "HMMA") == products(problem, config):
                found.append(body)
    return found


def products(problem: AttentionProblem, config: AttentionConfig) -> int:
    """A warp's m16n8k16 products in one block of keys."""
    return 2 * config.rows * config.tile_kv * problem.head_dim // (16 * 8 * 16)


def count(body: Counter[str], prefix: str) -> int:
    return sum(n for op, n in body.items() if op.startswith(prefix))


# ---- resources ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
@pytest.mark.parametrize("name", PROBLEMS)
def test_compiles_for_every_architecture_as_why_not_predicts(name: str, spec: gpu.GpuSpec) -> None:
    problem = AttentionProblem.parse(PROBLEMS[name])
    default = ATTENTION.default(problem, spec)
    rng = random.Random(name)
    others = [random_config(rng, problem, spec)] if spec is rng.choice(TARGETS) else []  # on one of the GPUs
    for config in (default, *others):
        facts = built(problem, config, spec.name).facts
        assert facts.smem_bytes == config.smem(problem).total_bytes, config
        assert facts.smem_bytes <= spec.smem_per_block_bytes
        assert -(-facts.registers // 8) * 8 * config.threads * config.ctas_per_sm <= spec.REGISTERS_PER_SM
    assert built(problem, default, spec.name).facts.stack_bytes <= MASKED_SPILL_BYTES, f"the default spills: {default}"


@pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
def test_blocks_between_the_edges_run_no_masking_code_and_hardly_spill(spec: gpu.GpuSpec) -> None:
    problem = AttentionProblem.parse(PROBLEMS["causal"])
    config = ATTENTION.default(problem, spec)
    edge, inside = loops(problem, config, spec.name)
    scores = config.rows * config.tile_kv // 32
    for body in (edge, inside):
        assert count(body, "HMMA.16816.F32.BF16") == products(problem, config)
        assert count(body, "MUFU.EX2") >= scores
    assert count(edge, "FSEL") >= scores
    assert count(inside, "FSEL") == 0
    assert count(inside, "LDL") == count(inside, "STL") <= 1  # 192 accumulators leave 63 registers
    assert count(inside, "LDG.") == 0
    assert count(inside, "LDGSTS.E.BYPASS") == 2 * config.tile_kv * problem.head_dim // 8 // config.threads


def test_scores_are_scaled_within_the_exponent() -> None:
    """One FFMA a score: its factor and the row's reference together."""
    problem = AttentionProblem.parse(PROBLEMS["full"])
    config = ATTENTION.default(problem, H200)
    inside = loops(problem, config, "h200")[-1]
    scores = config.rows * config.tile_kv // 32
    assert scores <= count(inside, "FFMA") <= scores + 16
    assert count(inside, "MUFU.EX2") <= scores + 16


# ---- what the code depends on ---------------------------------------------------------------------------


def test_the_kernel_depends_on_the_static_half_of_a_problem_alone() -> None:
    first = AttentionProblem.parse(PROBLEMS["causal"])
    second = first.replace(batch=1, seq_q=200, seq_kv=100, heads_q=28, heads_kv=4)
    config = next(c for c in ATTENTION.valid(second, H200) if c.tile_q == 64)
    assert first.static() == second.static()
    assert code(first, config) == code(second, config)


@pytest.mark.parametrize(
    "change",
    [
        "dtype=fp16",
        "head_dim=120",
        "causal=1",
        "window=left",
        "window=right",
        "softcap=1",
        "mask=1",
        "varlen=1",
        "lse=1",
    ],
)
def test_every_static_field_changes_the_code(change: str) -> None:
    base = AttentionProblem.parse("batch=2 seq_q=256 seq_kv=256 heads_q=4 heads_kv=2")
    config = ATTENTION.default(base, H200)
    assert code(base, config) != code(AttentionProblem.parse(f"{base} {change}"), config)


@pytest.mark.parametrize("knob", list(AttentionConfig.space()))
def test_every_knob_changes_the_code(knob: str) -> None:
    problem = AttentionProblem.parse(PROBLEMS["narrow"])
    rng = random.Random(knob)
    alike: dict[str, list[AttentionConfig]] = {}
    for config in ATTENTION.valid(problem, H200):
        others = " ".join(word for word in str(config).split() if not word.startswith(f"{knob}="))
        alike.setdefault(others, []).append(config)
    groups = [configs for configs in alike.values() if len(configs) > 1]
    if not groups:  # the rules leave one value: "what fits"
        assert knob == "ctas_per_sm"
        config = ATTENTION.default(problem, H200)
        groups = [[config, config.replace(ctas_per_sm=config.ctas_per_sm - 1 or 2)]]
    first, second = rng.sample(rng.choice(groups), 2)
    if knob == "order":  # of CTAs: a number that the host computes for the kernel
        host = [str(built(problem, config, "h200")._function.ir_module) for config in (first, second)]
        nameless = [re.sub(r'@\S+|"[^"]*"', "", text) for text in host]
        assert nameless[0] != nameless[1]
    else:
        assert code(problem, first) != code(problem, second), f"{knob} changes nothing: [{first}] and [{second}]"


def test_every_value_of_every_knob_is_reachable() -> None:
    seen: dict[str, set[Any]] = {name: set() for name in AttentionConfig.space()}
    for spec in TARGETS:
        for text in PROBLEMS.values():
            for config in ATTENTION.valid(AttentionProblem.parse(text), spec):
                for name, values in seen.items():
                    values.add(getattr(config, name))
    for name, values in AttentionConfig.space().items():
        assert seen[name] == set(values), name
