"""Attention of few tiles: keys split in a cluster, folded tiles, two CTAs to an SM; rules, choice, compiled kernels."""

from __future__ import annotations

import random

import pytest

from bench import judge
from cutekernels import gpu
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import AttentionProblem
from cutekernels.ops.attention.reference import band
from tests.attention.cases import random_problem
from tests.attention.compiled import H200, built, count
from tests.compiled import opcodes

MEASURED = judge.SWEEPS / "h200/attention_few_tiles.jsonl.xz"
HEAD = AttentionProblem.parse("batch=1 seq_q=1024 seq_kv=1024 heads_q=1 heads_kv=1 head_dim=64")
PROMPT = AttentionProblem.parse("batch=1 seq_q=512 seq_kv=512 heads_q=28 heads_kv=4 causal=1 lse=1")
BASE = AttentionConfig.parse(
    "tile_q=64 tile_kv=64 warps=4 stages=2 ctas_per_sm=1 q_in_registers=0 lazy=1 order=rows body=few split=4"
)
FOLDED = BASE.replace(tile_q=128, warps=8, split=1, order="paired")
AHEAD = AttentionConfig.parse(
    "tile_q=128 tile_kv=128 warps=8 stages=2 ctas_per_sm=1 q_in_registers=0 lazy=1 order=heads body=warpgroup turns=1 "
    "grid=ahead"
)


# ---- rules ----------------------------------------------------------------------------------------------


def test_the_bases_are_valid_where_there_is_warpgroup_mma() -> None:
    assert ATTENTION.why_not(HEAD, BASE, H200) is None
    assert ATTENTION.why_not(PROMPT, FOLDED, H200) is None
    assert "no warpgroup MMA" in str(ATTENTION.why_not(HEAD, BASE, gpu.lookup("rtx5090")))


# ---- choice ---------------------------------------------------------------------------------------------


def test_the_default_is_near_the_best_of_each_measured_problem() -> None:
    """Each default was timed, and 19 of 20 are within 3 % of the best (H200, 2026-11-24); the other is 7 % off."""
    behind = {}
    for (_, text), timed in judge.load(MEASURED).items():
        p = AttentionProblem.parse(text)
        lone = p.batch * p.heads_q == 1  # tiles of one head come in the same order either way
        us = {c.replace("order=heads", "order=rows") if lone else c: t for c, t in timed.items()}
        default = str(ATTENTION.default(p, H200))
        behind[text] = us[default.replace("order=heads", "order=rows") if lone else default] / min(us.values())
    assert len(behind) == 20
    assert sorted(behind.values())[-2] <= 1.03
    assert max(behind.values()) <= 1.07


def test_tiles_that_fill_the_gpu_are_not_split() -> None:
    for heads in (64, 128, 512):
        assert ATTENTION.default(HEAD.replace(batch=1, heads_q=heads, heads_kv=heads), H200).split == 1


def test_clusters_that_do_not_fit_at_once_take_turns() -> None:
    """32 clusters of four CTAs on 132 SMs: as two waves, where 16 are one."""
    half = HEAD.replace(seq_q=512)
    whole = HEAD.replace(seq_q=2048)
    assert ATTENTION.estimate_us(whole, BASE, H200) > 1.5 * ATTENTION.estimate_us(half, BASE, H200)
    paired = BASE.replace(ctas_per_sm=2)
    assert ATTENTION.estimate_us(whole, paired, H200) < ATTENTION.estimate_us(whole, BASE, H200)
    assert ATTENTION.estimate_us(half, paired, H200) > ATTENTION.estimate_us(half, BASE, H200)


def test_the_most_keys_that_a_query_sees() -> None:
    rng = random.Random(0)
    for _ in range(300):
        p = random_problem(rng).replace(varlen=False, mask=False)
        p = p.replace(seq_q=rng.choice((1, 5, 64, 65)), seq_kv=rng.choice((1, 7, 64, 90)))
        assert p.most_seen == int(band(p.seq_q, p.seq_kv, **p.sides, device="cpu").sum(1).max()), p


# ---- compiled -------------------------------------------------------------------------------------------

BUILDS = {
    "split": (HEAD.replace(causal=True, lse=True, sinks="same"), BASE.replace(ctas_per_sm=2)),
    "paired": (PROMPT, FOLDED),
    "ahead": (PROMPT.replace(batch=16), AHEAD),
}


@pytest.mark.parametrize("name", BUILDS)
def test_compiles_as_why_not_predicts(name: str) -> None:
    p, config = BUILDS[name]
    assert ATTENTION.why_not(p, config, H200) is None
    facts = built(ATTENTION, p, config).facts
    assert facts.smem_bytes == config.smem(p).total_bytes
    assert facts.stack_bytes == 0
    threads = 128 * (config.tile_q // 64 + 1) * config.ctas_per_sm
    assert facts.registers * threads <= H200.REGISTERS_PER_SM
    found = opcodes(built(ATTENTION, p, config))
    assert count(found, "USETMAXREG") == 2  # registers go from the loading group to the others
    # Each CTA sends every CTA of the cluster statistics and a share of its columns, 16 bytes a thread.
    vectors = 1 + p.width // 8 // config.split
    assert count(found, "STAS.128") == (config.split * vectors if config.split > 1 else 0)
