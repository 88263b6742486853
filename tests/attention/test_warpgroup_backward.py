"""The warpgroup body of attention's gradients: its rules, and its kernels compiled for a GPU that is not there."""

from __future__ import annotations

from typing import Any

import pytest

from cutekernels import gpu
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD
from cutekernels.ops.attention.backward_config import (
    BESIDE,
    AttentionBackwardConfig,
    AttentionBackwardProblem,
    Launches,
    passes,
)
from cutekernels.ops.attention.gradient import problems
from cutekernels.ops.attention.problem import AttentionProblem
from tests.attention.compiled import H200, built
from tests.compiled import cubin, sass

BASE = AttentionBackwardConfig.parse(
    "tile_own=128 tile_walked=64 warps=8 stages=3 ctas_per_sm=1 in_registers=0 order=rows body=warpgroup"
)
LONG = AttentionBackwardProblem.parse("batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16")


def warpgroup(p: AttentionBackwardProblem) -> list[AttentionBackwardConfig]:
    return [c for c in ATTENTION_BACKWARD.valid(p, H200) if c.body == "warpgroup"]


def test_the_base_is_valid_where_there_is_warpgroup_mma() -> None:
    assert ATTENTION_BACKWARD.why_not(LONG, BASE, H200) is None
    for name in ("a100", "l40s", "rtx5090"):
        assert "no warpgroup MMA" in str(ATTENTION_BACKWARD.why_not(LONG, BASE, gpu.lookup(name)))


def test_warp_groups_are_the_default_for_long_sequences_up_to_256() -> None:
    for head_dim in (64, 80, 128, 256):
        for of in passes(head_dim):
            p = LONG.replace(head_dim=head_dim, of=of)
            assert ATTENTION_BACKWARD.default(p, H200).body == "warpgroup", p
            assert ATTENTION_BACKWARD.default(p, gpu.lookup("a100")).body == "multistage"


OPTIONS = {
    "packed": "varlen=1 causal=1 softcap=1 dtype=fp16 head_dim=40",
    "window": "window=both window_left=100 window_right=5 head_dim=64",
    "mask": "mask=1",
    "wide": "head_dim=256 causal=1",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_compiles_as_why_not_predicts(name: str) -> None:
    """One pass of each, in turns: what options do to scores and probabilities is one code of all passes."""
    all_of = passes(AttentionBackwardProblem.parse(f"{LONG} {OPTIONS[name]} of=q").head_dim)
    p = AttentionBackwardProblem.parse(f"{LONG} {OPTIONS[name]} of={all_of[list(OPTIONS).index(name) % len(all_of)]}")
    config = min(warpgroup(p), key=lambda c: ATTENTION_BACKWARD.estimate_us(p, c, H200))
    facts = built(ATTENTION_BACKWARD, p, config).facts
    assert facts.smem_bytes == config.smem_bytes(p)
    assert facts.stack_bytes <= (64 if p.mask or p.varlen else 0)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_ds_is_handed_on_without_spills(head_dim: int) -> None:
    """Both kernels of a launch, and the larger one's shared memory."""
    p = LONG.replace(head_dim=head_dim, of="qkv", causal=True)
    config = ATTENTION_BACKWARD.default(p, H200)
    facts = built(ATTENTION_BACKWARD, p, config).facts
    assert facts.stack_bytes == 0
    assert facts.smem_bytes == config.smem_bytes(p) <= H200.smem_per_block_bytes


def test_ds_takes_a_part_of_the_gpu_s_memory_at_most() -> None:
    causal = LONG.replace(of="qkv", causal=True)
    for p in (LONG.replace(of="qkv"), causal, causal.replace(batch=1, seq_q=8192, seq_kv=8192, heads_q=64, heads_kv=8)):
        config = ATTENTION_BACKWARD.default(p, H200)
        launches = Launches.of(p, config, H200)
        assert launches.worth_it(p, config, H200)
        assert launches.layers == p.batch * p.heads_kv
        assert 2 * launches.elements <= H200.memory_bytes // 64 + 4 * BESIDE
        pairs = launches.each * p.group * p.pairs
        assert pairs <= launches.elements <= 1.1 * pairs, "blocks of a triangle leave gaps"
    few = causal.replace(batch=1, seq_q=16384, seq_kv=16384, heads_q=12, heads_kv=2)  # a launch of 128 tiles
    assert not Launches.of(few, BASE, H200).worth_it(few, BASE, H200)


def test_one_launch_gives_all_gradients_where_ds_finds_room() -> None:
    def posed(**values: Any) -> list[str]:
        p = AttentionProblem(4, 1024, 1024, 12, 2, causal=True).replace(**values)
        return [p.of for p in problems(p, H200)]

    assert posed() == posed(head_dim=112) == posed(window="left", window_left=100) == ["qkv"]
    assert posed(varlen=True) == posed(softcap=True) == posed(head_dim=64) == posed(head_dim=192) == ["kv", "q"]
    assert posed(head_dim=256) == ["k", "v", "q"]
    assert posed(batch=1, seq_q=65536, seq_kv=65536) == ["kv", "q"]
    p = AttentionProblem(4, 1024, 1024, 12, 2, causal=True)
    assert [p.of for p in problems(p, gpu.lookup("a100"))] == [p.of for p in problems(p, None)] == ["kv", "q"]


@pytest.mark.parametrize(("of", "waits"), [("kv", [2, 1, 1]), ("q", [2, 0, 1]), ("qkv", [1, 2, 1, 1])])
def test_products_of_a_tile_are_in_flight_together(of: str, waits: list[int]) -> None:
    """S and dP, then a wait for S alone; P's sum starts before dS, and dS's after it. ptxas has serialized nothing.

    Of all gradients, the kernel of dQ comes first, with one sum of dS.
    """
    p = LONG.replace(of=of)
    text = sass(cubin(built(ATTENTION_BACKWARD, p, BASE)))
    lines = [line for line in text.splitlines() if "HGMMA" in line or "WARPGROUP.DEPBAR" in line]
    sizes, count = [], 0  # products between one wait and the next
    for line in lines:
        if "DEPBAR" in line:
            sizes.append(count)
            count = 0
        else:
            count += 1
    together = {2: 16, 1: 4, 0: 0}  # S and dP of 8 each, a sum of 4
    assert sizes[: len(waits)] == [together[n] for n in waits]
