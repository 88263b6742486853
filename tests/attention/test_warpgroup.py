"""The warpgroup body of attention: its rules, and its kernels compiled for a GPU that is not there."""

from __future__ import annotations

import pytest

from cutekernels import gpu
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.problem import AttentionProblem
from tests.attention.compiled import H200, built, count
from tests.compiled import cubin, opcodes, sass

BASE = AttentionConfig.parse(
    "tile_q=128 tile_kv=128 warps=8 stages=2 ctas_per_sm=1 q_in_registers=0 lazy=1 order=rows body=warpgroup turns=1"
)
LONG = AttentionProblem.parse("batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16")


def test_the_base_is_valid_where_there_is_warpgroup_mma() -> None:
    assert ATTENTION.why_not(LONG, BASE, H200) is None
    assert "no warpgroup MMA" in str(ATTENTION.why_not(LONG, BASE, gpu.lookup("a100")))


OPTIONS = {
    "window": "window=both window_left=100 window_right=5 head_dim=40",
    "packed": "varlen=1 causal=1 lse=1 softcap=1 dtype=fp16",
    "mask": "mask=1 head_dim=64",
    "wide": "head_dim=256 causal=1",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_compiles_as_why_not_predicts(name: str) -> None:
    p = AttentionProblem.parse(f"{LONG} {OPTIONS[name]}")
    valid = [c for c in ATTENTION.valid(p, H200) if c.body == "warpgroup" and c.grid == "dynamic" and c.turns]
    config = min(valid, key=lambda c: ATTENTION.estimate_us(p, c, H200))
    facts = built(ATTENTION, p, config).facts
    assert facts.smem_bytes == config.smem(p).total_bytes
    assert facts.stack_bytes <= (64 if p.mask else 0)


def test_both_products_of_a_block_are_in_flight_during_the_softmax() -> None:
    """Two groups of wgmma, then a wait for the first alone: ptxas has not serialized them."""
    text = sass(cubin(built(ATTENTION, LONG, BASE)))
    lines = [line for line in text.splitlines() if "HGMMA" in line or "WARPGROUP.DEPBAR" in line]
    from_registers = [", R" in line.partition("HGMMA")[2].partition("gdesc")[0] for line in lines]
    names = ["wait" if "DEPBAR" in x else "rs" if own else "ss" for x, own in zip(lines, from_registers, strict=True)]
    inside = names[len(names) - 8 - 1 - 8 - 8 - 2 : -9]  # the last loop: 8 + 8 products and two waits
    assert inside == ["ss"] * 8 + ["rs"] * 8 + ["wait"] * 2
    assert count(opcodes(built(ATTENTION, LONG, BASE)), "LDL") == 0
