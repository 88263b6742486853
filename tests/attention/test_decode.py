"""``decode_attention`` without a GPU: errors, mathematics, caches, registration, the declaration's arithmetic."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from cutekernels import gpu
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.cache import CacheRows
from cutekernels.kernels.cute.parts.fragments import span_bytes, swizzled
from cutekernels.ops.attention.api import decode_attention
from cutekernels.ops.attention.cache import CACHE_ATTENTION
from cutekernels.ops.attention.decode import DECODE_ATTENTION, DecodeProblem
from tests.attention.cases import lengths_of, opcheck, over_a_cache, rows, wide
from tests.attention.decode_cases import arguments, random_problem


def call(seq_q: int = 3, room: int = 20, batch: int = 2) -> Any:
    q, k, v = rows(batch, seq_q, 4, 16), rows(batch, room, 2, 16, seed=1), rows(batch, room, 2, 16, seed=2)
    return q, k, v, torch.tensor([13, 20, 7, 1][:batch], dtype=torch.int32)


# ---- mathematics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_agrees_with_torch_in_fp64_whatever_the_cache_holds_elsewhere(seed: int) -> None:
    rng = random.Random(seed)
    p = random_problem(rng, rooms=(1, 2, 7, 20, 33)).replace(softcap=False)
    lengths = lengths_of(rng, p)
    args = wide(arguments(p, lengths, seed))
    out, lse = over_a_cache(p, args, return_lse=True)
    q, k, v, _, table, _, _, _, scale, _ = args
    group = p.heads_q // p.heads_kv
    for b, length in enumerate(lengths.tolist()):
        own = (k[b], v[b]) if table is None else (t[table[b].long()].flatten(0, 1) for t in (k, v))
        k1, v1 = (t[:length].repeat_interleave(group, 1).transpose(0, 1) for t in own)
        at = torch.arange(length) - torch.arange(p.seq_q).unsqueeze(-1) - (length - p.seq_q)
        seen = (at <= 0) & (at >= -(p.window_left if p.window else length + p.seq_q))
        expected = functional.scaled_dot_product_attention(q[b].transpose(0, 1), k1, v1, attn_mask=seen, scale=scale)
        blind = ~seen.any(-1)
        torch.testing.assert_close(out[b, ~blind], expected.transpose(0, 1)[~blind], rtol=1e-12, atol=1e-12)
        assert (out[b, blind] == 0).all()
        assert torch.equal(lse[b] == -math.inf, blind.expand(p.heads_q, -1))


def test_pages_are_the_same_as_one_piece() -> None:
    q, k, v, lengths = call(room=48)
    expected = decode_attention(q, k, v, lengths)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    pages = [rows(7, 16, 2, 16, seed=9) for _ in range(2)]
    for cache, whole in zip(pages, (k, v), strict=True):
        cache[order] = whole.reshape(6, 16, 2, 16)
    table = order.view(2, 3).to(torch.int32)
    torch.testing.assert_close(decode_attention(q, *pages, lengths, page_table=table), expected)
    table[0, 1:], table[1, 2:] = -1, 99  # of no token
    torch.testing.assert_close(decode_attention(q, *pages, lengths, page_table=table), expected)


def test_queries_see_each_other_causally() -> None:
    q, k, v, lengths = call(seq_q=3)
    together = decode_attention(q, k, v, lengths)
    for i in range(3):
        alone = decode_attention(q[:, i], k, v, lengths - (2 - i))
        assert alone.shape == (2, 4, 16)
        torch.testing.assert_close(together[:, i], alone)


def test_a_window_reaches_back_from_each_query() -> None:
    q, k, v, lengths = call(seq_q=2)
    out = decode_attention(q, k, v, lengths, window=(4, None))
    for b, length in enumerate(lengths.tolist()):
        recent = slice(length - 5, length)
        one = torch.tensor([5], dtype=torch.int32)
        alone = decode_attention(q[b : b + 1, 1], k[b : b + 1, recent], v[b : b + 1, recent], one)
        torch.testing.assert_close(out[b : b + 1, 1], alone)
    torch.testing.assert_close(decode_attention(q, k, v, lengths, window=(None, 0)), decode_attention(q, k, v, lengths))


def test_a_length_beyond_the_cache_counts_as_all_of_it() -> None:
    q, k, v, _ = call()
    full, above = (torch.tensor([n, n], dtype=torch.int32) for n in (20, 25))
    assert torch.equal(decode_attention(q, k, v, above), decode_attention(q, k, v, full))


def test_softcap_bounds_scores() -> None:
    q, k, v, lengths = call()
    lse = decode_attention(q * 100, k, v, lengths, softcap=2.0, return_lse=True)[1]
    assert (lse <= 2.0 + lengths.double().log().view(2, 1, 1)).all()


def test_half_precision_is_rounded_once() -> None:
    q, k, v, lengths = call()
    q, k, v = (t.bfloat16() for t in (q, k, v))
    out = decode_attention(q, k, v, lengths)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, decode_attention(q.double(), k.double(), v.double(), lengths).bfloat16())


@pytest.mark.parametrize(("batch", "room"), [(0, 20), (2, 0)])
def test_empty_extents(batch: int, room: int) -> None:
    q, k, v, lengths = call(batch=batch, room=room)
    out, lse = decode_attention(q, k, v, lengths, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (batch, 4, 3)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


# ---- arguments ------------------------------------------------------------------------------------------


def refused(message: str, *args: Any, **options: Any) -> None:
    with pytest.raises(UnsupportedProblem, match=message):
        decode_attention(*args, **options)


def test_errors_name_rule_value_and_remedy() -> None:
    q, k, v, n = call()
    refused(r"q must be \(B, HQ, D\)", q[0, 0], k, v, n)
    refused("k_cache does not fit: it has 3 dimensions", q, k[0], v[0], n)
    refused("takes k_cache in float64 or float8_e4m3fn; got torch.float32: convert", q, k.float(), v.float(), n)
    refused("must have one shape", q, k, v[:, :-1], n)
    refused("of q's 2 sequences; it has 1: pages need a page_table", q, k[:1], v[:1], n)
    refused("multiple of 8 up to 256; it is 12", q[..., :12], k[..., :12], v[..., :12], n)
    refused("k_cache's 2 heads must divide q's 3", q[:, :, :3], k, v, n)
    refused("k_cache's 0 heads must divide q's 4", q, k[:, :, :0], v[:, :, :0], n)
    refused("k_cache's 0 heads must divide q's 0", q[:, :, :0], k[:, :, :0], v[:, :, :0], n)
    refused("a token of each sequence at least", rows(2, 0, 4, 16), k, v, n)
    refused("scale must be above 0", q, k, v, n, scale=-1.0)
    refused("softcap must be above 0", q, k, v, n, softcap=0.0)
    refused("window must be", q, k, v, n, window=3)
    refused("no later keys", q, k, v, n, window=(3, 3))
    refused("write None for no limit", q, k, v, n, window=(-1, None))
    refused("takes cache_seqlens in int32; got torch.int64", q, k, v, n.long())
    refused("cache_seqlens does not fit: its batch is 1, q's 2", q, k, v, n[:1])
    table = torch.zeros(2, 2, dtype=torch.int32)
    refused("takes page_table in int32", q, k, v, n, page_table=table.long())
    refused("a page has 16, 32, 64, 128, 256 tokens, not 20", q, k, v, n, page_table=table)
    refused("out must", q, k, v, n, out=q[0])
    refused("out= overlaps an operand", q, k, v, n, out=q)
    refused("out must not overlap itself", q, k, v, n, out=q.new_empty(1, 3, 4, 16).expand(2, -1, -1, -1))


def test_out_is_written_and_returned() -> None:
    q, k, v, lengths = call(seq_q=1)
    wide = q.new_full((2, 4, 32), math.nan)
    out = wide[..., :16]
    result, lse = decode_attention(q[:, 0], k, v, lengths, out=out, return_lse=True)
    assert result is out
    assert lse.shape == (2, 4)
    assert torch.equal(out, decode_attention(q, k, v, lengths)[:, 0])
    assert wide[..., 16:].isnan().all()


def test_gradients_are_refused_clearly() -> None:
    q, k, v, lengths = call()
    q.requires_grad_()
    with pytest.raises(UnsupportedProblem, match="decode_attention has no gradient"):
        decode_attention(q, k, v, lengths).sum().backward()
    refused("out= is not differentiable", q, k, v, lengths, out=torch.empty_like(q))


def test_only_aligned_rows_are_read_in_place() -> None:
    cache = rows(2, 8, 4, 16, dtype=torch.bfloat16)
    readable = partial(DECODE_ATTENTION.takes, "out")
    assert readable(cache)
    assert readable(cache[:, :, 1:3])
    assert readable(cache.transpose(1, 2))
    assert not readable(rows(2, 8, 4, 17, dtype=torch.bfloat16)[..., :16])
    assert not readable(cache.transpose(2, 3))


# ---- torch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(-1, 0.2, 0.0, True), (3, 0.2, 5.0, False)])
def test_opcheck(options: tuple[Any, ...]) -> None:
    q, k, v, lengths = call()
    ops = torch.ops.cutekernels
    opcheck(ops.decode_attention, (q, k, v, lengths, *[None] * 4, *options))
    into = (q, k, v, lengths, *[None] * 4, torch.empty_like(q), *options)
    opcheck(ops.decode_attention_out, into)


# ---- the declaration ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [0, 16, 64])
def test_samples_are_poisoned_wherever_no_sequence_has_a_token(page_size: int) -> None:
    p = DecodeProblem(3, 128, 4, 2, head_dim=32, page_size=page_size)
    q, k, v, lengths, table, sinks, *scales, scale, _ = DECODE_ATTENTION.sample(p, "cpu", 0)
    assert q.isfinite().all()
    for t in (k, v):
        assert int(t.isfinite().sum()) == int(lengths.sum()) * 2 * 32
        for b, length in enumerate(lengths.tolist()):
            own = t[b] if table is None else t[table[b].long()].flatten(0, 1)
            assert own[:length].isfinite().all()
            assert own[length:].isnan().all()
    assert int(lengths.min()) > 0
    assert int(lengths.max()) <= 128
    (out,) = DECODE_ATTENTION.reference(p, q, k, v, lengths, table, sinks, *scales, scale, 0.0)
    assert out.isfinite().all()


def test_problems_that_contradict_themselves_are_refused() -> None:
    base = "batch=1 seq_kv=8 heads_q=4"
    for words, message in {
        "heads_kv=3": "must be a multiple of heads_kv",
        "heads_kv=4 seq_q=17": "from 1 to 16",
        "heads_kv=4 window_left=3": "needs window=1",
    }.items():
        with pytest.raises(UnsupportedProblem, match=message):
            DecodeProblem.parse(f"{base} {words}")


def test_splits_fill_the_gpu_where_sequences_are_few_and_are_spared_where_many() -> None:
    spec = gpu.lookup("h200")
    few, many = (
        DecodeProblem.parse(t) for t in ("batch=1 seq_kv=32768 heads_q=32 heads_kv=8", DECODE_ATTENTION.suite[0])
    )
    config = DECODE_ATTENTION.default(few, spec)
    assert few.tiles * config.splits * config.warps >= spec.sm_count * 4
    assert DECODE_ATTENTION.default(many, spec).splits == 1


@pytest.mark.parametrize("padded", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("rows", [16, 32])
def test_a_lane_finds_its_vectors_by_constants(rows: int, padded: int) -> None:
    """``place`` leads from a lane's first vector to where the swizzle puts each of its others; all are covered."""
    part, span = CacheRows(rows, padded, padded, 3, 0), span_bytes(padded)
    found = set()
    for lane in range(32):
        own, chunk = divmod(lane, part.along)
        first = swizzled(lane * 16, span)
        for i in range(0, rows, part.across):
            for column in part.columns():
                flip, offset = part.place(i, column)
                linear = (column * 2 // span * rows + own + i) * span + chunk * 16
                assert (first ^ flip) + offset == swizzled(linear, span)
                found.add(linear)
    assert found == set(range(0, rows * padded * 2, 16))


# ---- page tables ----------------------------------------------------------------------------------------


def paged_call() -> Any:
    q, k, v = rows(2, 2, 4, 16), rows(6, 16, 2, 16, seed=1), rows(6, 16, 2, 16, seed=2)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    return q, k, v, torch.tensor([40, 17], dtype=torch.int32), table


@pytest.mark.parametrize("entry", [-1, -(2**31), 6, 2**31 - 1])
@pytest.mark.parametrize("check", [False, True])
def test_used_entries_that_name_no_page_are_refused(entry: int, check: bool) -> None:
    *given, table = paged_call()
    whole = decode_attention(*given, page_table=table)
    table[1, 2] = entry  # of no token
    assert torch.equal(decode_attention(*given, page_table=table, check=check), whole)
    table[1, 1] = entry
    with pytest.raises(UnsupportedProblem, match=f"one of 6 pages .* entry 1 of sequence 1 is {entry}, .* 17 tokens"):
        decode_attention(*given, page_table=table, check=check)


def test_entries_before_a_window_may_be_anything() -> None:
    q, k, v, lengths, table = paged_call()
    whole = decode_attention(q, k, v, lengths, page_table=table, window=(6, None))
    table[0, :2] = 2**31 - 1  # 40 - 2 - 6 = 32 tokens that nobody sees
    assert torch.equal(decode_attention(q, k, v, lengths, page_table=table, window=(6, None)), whole)
    with pytest.raises(UnsupportedProblem, match="entry 1 of sequence 0"):
        decode_attention(q, k, v, lengths, page_table=table, window=(7, None))


@pytest.mark.parametrize("length", [-1, 49])
def test_a_check_refuses_lengths_without_room(length: int) -> None:
    *given, _, table = paged_call()
    lengths = torch.tensor([40, length], dtype=torch.int32)
    decode_attention(*given, lengths, page_table=table)
    with pytest.raises(UnsupportedProblem, match=f"from 0 to 48, .* sequence 1 has {length} tokens: make room"):
        decode_attention(*given, lengths, page_table=table, check=True)


def test_a_cache_of_no_pages_has_no_tokens() -> None:
    q, k, v, _, table = paged_call()
    none = torch.zeros(2, dtype=torch.int32)
    out, lse = decode_attention(q, k[:0], v[:0], none, page_table=table, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    with pytest.raises(UnsupportedProblem, match="one of 0 pages"):
        decode_attention(q, k[:0], v[:0], none + 1, page_table=table)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (
            "batch=1 seq_kv=268435457 heads_q=4 heads_kv=2",
            "room for up to 268435456 keys, not 268435457: pass a part",
        ),
        ("batch=1048576 seq_kv=17 heads_q=8192 heads_kv=128 seq_q=16", "at most 2147483647 tiles of 16 queries"),
    ],
)
def test_what_no_launch_holds_is_refused(words: str, rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rule):
        DECODE_ATTENTION.Problem.parse(words)
    if "room" in rule:
        with pytest.raises(UnsupportedProblem, match=rule):
            CACHE_ATTENTION.Problem.parse(f"{words} seq_q=32")


def test_the_largest_room_has_a_default_and_an_estimate() -> None:
    for gpu_name in ("h200", "a100", "rtx5090"):
        spec = gpu.lookup(gpu_name)
        problem = DECODE_ATTENTION.Problem.parse("batch=2 seq_kv=268435456 heads_q=8 heads_kv=1 page_size=64")
        config = DECODE_ATTENTION.default(problem, spec)
        assert 0 < DECODE_ATTENTION.estimate_us(problem, config, spec) < 1e9
