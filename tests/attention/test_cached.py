"""``decode_attention`` of more queries than decode has: mathematics, hostile values, the declaration, its kernels."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cutekernels import KVCache, gpu
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.ops.attention.api import attention, decode_attention
from cutekernels.ops.attention.cache import CACHE_ATTENTION, CacheProblem
from cutekernels.ops.attention.config import AttentionConfig
from cutekernels.ops.attention.decode import DecodeConfig
from tests.attention import compiled
from tests.attention.cached_cases import arguments, random_problem, without_unseen_pages
from tests.attention.cases import lengths_of, opcheck, over_a_cache, rows, wide
from tests.attention.compiled import H200, count
from tests.compiled import area

# ---- mathematics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_each_sequence_is_attention_of_its_tokens_whatever_the_cache_holds_elsewhere(seed: int) -> None:
    rng = random.Random(seed)
    p = random_problem(rng, rooms=(17, 20, 33, 70), queries=(17, 20, 40))
    args = wide(arguments(p, lengths_of(rng, p), seed))
    out, lse = over_a_cache(p, without_unseen_pages(p, args), return_lse=True)
    q, k, v, lengths, table, sinks, _, _, scale, softcap = args
    for b, length in enumerate(lengths.tolist()):
        own = (k[b], v[b]) if table is None else (t[table[b].long()].flatten(0, 1) for t in (k, v))
        window = (p.window_left, None) if p.window == "left" else None
        expected, expected_lse = attention(
            q[b : b + 1], *(t[None, :length] for t in own), causal=True, window=window, scale=scale,
            softcap=softcap or None, sinks=sinks, return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(out[b], expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[b], expected_lse[0], rtol=1e-12, atol=1e-12)
    assert out.isfinite().all()


def test_a_prompt_in_chunks_is_attention_over_all_of_it() -> None:
    """Over a cache that appends and shuffles its pages; chunks of 1, 16 and 17 tokens and more."""
    q, k, v = rows(1, 90, 4, 16), rows(1, 90, 2, 16, seed=1), rows(1, 90, 2, 16, seed=2)
    expected = attention(q, k, v, causal=True)
    table = torch.tensor([[4, 0, 5, 2, 1, 3]], dtype=torch.int32)
    for cache in (
        KVCache.contiguous(1, 96, 2, 16, dtype=torch.float64, device="cpu"),
        KVCache.paged(1, 96, 2, 16, page_table=table, dtype=torch.float64, device="cpu"),
    ):
        at = 0
        for size in (17, 1, 40, 16, 16):
            own = slice(at, at + size)
            cache.append(k[:, own], v[:, own])
            torch.testing.assert_close(decode_attention(q[:, own], **cache.view()), expected[:, own])
            at += size


# ---- arguments ------------------------------------------------------------------------------------------


def paged_call() -> dict[str, Any]:
    k, v = (rows(7, 16, 2, 16, seed=s) for s in (1, 2))
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    lengths = torch.tensor([40, 17], dtype=torch.int32)
    return {"q": rows(2, 20, 4, 16), "k_cache": k, "v_cache": v, "cache_seqlens": lengths, "page_table": table}


@pytest.mark.parametrize("entry", [-1, 7, -(2**31), 2**31 - 1])
def test_a_page_that_is_none_is_refused_on_the_cpu(entry: int) -> None:
    given = paged_call()
    given["page_table"][1, 1] = entry
    with pytest.raises(UnsupportedProblem, match=f"entry 1 of sequence 1 is {entry}, .*: reserve pages first"):
        decode_attention(**given)
    given["page_table"][1, 1], given["page_table"][1, 2] = 4, entry  # behind the length
    decode_attention(**given)


@pytest.mark.parametrize("length", [-5, 49, 2**31 - 1])
def test_lengths_without_room_count_as_all_or_nothing_and_a_check_refuses_them(length: int) -> None:
    given = paged_call()
    given["cache_seqlens"][1] = length
    clamped = given | {"cache_seqlens": given["cache_seqlens"].clamp(0, 48)}
    assert torch.equal(decode_attention(**given), decode_attention(**clamped))
    with pytest.raises(UnsupportedProblem, match=f"from 0 to 48, .* sequence 1 has {length} tokens"):
        decode_attention(**given, check=True)


def test_no_queries_and_wrong_configs_are_refused() -> None:
    given = paged_call()
    with pytest.raises(UnsupportedProblem, match="a token of each sequence at least"):
        decode_attention(**given | {"q": given["q"][:, :0]})
    config = DecodeConfig.parse("tile_kv=64 warps=4 stages=2 ctas_per_sm=1 splits=1")
    with pytest.raises(InvalidConfig, match="AttentionConfig"):
        decode_attention(**given, config=config)
    with pytest.raises(UnsupportedProblem, match="no gradient"):
        decode_attention(**given | {"q": given["q"].requires_grad_()}).sum().backward()


@pytest.mark.parametrize("options", [(-1, 0.2, 0.0, True), (3, 0.2, 5.0, False)])
def test_opcheck(options: tuple[Any, ...]) -> None:
    given = tuple(paged_call().values())
    ops = torch.ops.cutekernels
    opcheck(ops.decode_attention, (*given, *[None] * 3, *options))
    into = (*given, *[None] * 3, torch.empty_like(given[0]), *options)
    opcheck(ops.decode_attention_out, into)


# ---- the declaration ------------------------------------------------------------------------------------


def test_problems_are_causal_and_of_one_length_of_queries() -> None:
    base = "batch=1 seq_q=64 seq_kv=64 heads_q=4 heads_kv=2"
    assert CacheProblem.parse(base).causal
    for words in ("causal=0", "window=right", "window=both", "mask=1", "varlen=1", "page_size=48"):
        with pytest.raises(UnsupportedProblem, match=f"{words.partition('=')[0]} must be one of"):
            CacheProblem.parse(f"{base} {words}")


def test_a_block_is_part_or_multiple_of_a_page() -> None:
    p = CacheProblem.parse("batch=4 seq_q=2048 seq_kv=8192 heads_q=32 heads_kv=8 page_size=64")
    for tile_kv, valid in ((128, True), (64, True), (96, False), (80, False)):
        config = AttentionConfig.parse(
            f"tile_q=128 tile_kv={tile_kv} warps=8 stages=2 ctas_per_sm=1 q_in_registers=0 lazy=1 order=rows "
            "body=warpgroup turns=1"
        )
        reason = CACHE_ATTENTION.why_not(p, config, H200)
        assert (reason is None) == valid
        assert valid or "neither part nor multiple of a page" in str(reason)
        assert CACHE_ATTENTION.why_not(p.replace(page_size=0), config, H200) is None


# ---- kernels --------------------------------------------------------------------------------------------

BASE = "batch=4 seq_q=2048 seq_kv=8192 heads_q=32 heads_kv=8"
PROBLEMS = {
    "ragged": f"{BASE} head_dim=40 window=left window_left=500 softcap=1",
    "small pages": f"{BASE} page_size=16 lse=1",  # with the L40S, for which a test below looks at it too
    "wide": f"{BASE} page_size=256 head_dim=256 sinks=same",
    "window": f"{BASE} page_size=32 window=left window_left=500 head_dim=64 dtype=fp16",
}
SPILL_BYTES = 96  # beside 255 registers, of addresses that are read once a block: docs/notes/attention.md


@compiled.paired(PROBLEMS)
def test_compiles_for_every_architecture_as_why_not_predicts(name: str, spec: gpu.GpuSpec) -> None:
    p = CacheProblem.parse(PROBLEMS[name])
    config = CACHE_ATTENTION.default(p, spec)
    facts = compiled.facts(CACHE_ATTENTION, p, config, spec, config.smem(p).total_bytes)
    assert facts.stack_bytes <= SPILL_BYTES


def test_a_load_of_a_block_is_one_box_of_each_page() -> None:
    """K is loaded in one place of the code, V in two, Q in others; a block has one page of 256, four of 16."""
    config = AttentionConfig.parse(
        "tile_q=128 tile_kv=64 warps=8 stages=2 ctas_per_sm=1 q_in_registers=0 lazy=1 order=rows body=warpgroup turns=1"
    )
    loads = []
    for size in (256, 16):
        made = compiled.built(CACHE_ATTENTION, CacheProblem.parse(f"{BASE} head_dim=64 page_size={size}"), config)
        loads.append(compiled.compiled.opcodes(made)["UTMALDG.4D"])
    assert loads[0] > 3 and loads[1] - loads[0] == 3 * (4 - 1)


@pytest.mark.parametrize("change", ["page_size=16", "page_size=256", "window=left", "softcap=1", "lse=1", "sinks=same"])
def test_static_fields_change_the_code(change: str) -> None:
    base = CacheProblem.parse("batch=2 seq_q=256 seq_kv=512 heads_q=4 heads_kv=2 head_dim=32")
    compiled.changes_the_code(CACHE_ATTENTION, base, change)


def test_the_kernel_depends_on_the_static_half_of_a_problem_alone() -> None:
    first = CacheProblem.parse(f"{PROBLEMS['small pages']} head_dim=32")
    second = first.replace(batch=3, seq_q=300, seq_kv=1008, heads_q=28, heads_kv=4)
    warps = [c for c in CACHE_ATTENTION.valid(second, H200) if c.body == "multistage"]
    config = min(warps, key=lambda c: (area(c), str(c)))  # compiles fast
    compiled.depends_on_statics_alone(CACHE_ATTENTION, first, second, config)


def test_pages_are_looked_up_a_block_ahead_and_once_for_k_and_v() -> None:
    p = CacheProblem.parse(PROBLEMS["small pages"])
    spec = gpu.lookup("l40s")
    config = CACHE_ATTENTION.default(p, spec)
    products = 2 * config.rows * config.tile_kv * p.head_dim // (16 * 8 * 16)
    inside = compiled.loops(CACHE_ATTENTION, p, config, spec.name, products)[-1]
    across = config.threads // 8
    assert count(inside, "LDG.") == config.tile_kv // max(16, across)
    assert count(inside, "LDGSTS.E.BYPASS") == 2 * config.tile_kv * p.head_dim // 8 // config.threads
