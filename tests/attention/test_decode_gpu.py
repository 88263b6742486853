"""Decode on a GPU: judged against fp64 beside poisoned caches, ragged lengths, pages, splits and graphs."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels import gpu
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention.api import decode_attention
from cutekernels.ops.attention.decode import DECODE_ATTENTION, DecodeConfig, DecodeProblem
from tests.attention import cases
from tests.attention.cases import lengths_of
from tests.attention.decode_cases import GROUPS, arguments, random_config, random_problem
from tests.seeds import seeds

pytestmark = pytest.mark.gpu


SHARED = [(1, False), (3, False), (8, False), (2, True), (3, True), (8, True)]  # splits, and whether by a cluster
launched = partial(cases.launched, DECODE_ATTENTION)


def truth(p: DecodeProblem, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64."""
    out, lse = DECODE_ATTENTION.reference(p.replace(lse=True), *cases.wide(args))
    return out, lse


def judge(p: DecodeProblem, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    _, lse = cases.judge(DECODE_ATTENTION, p, args, results)
    assert (results[0].transpose(1, 2)[lse == -math.inf] == 0).all()


def some_config(p: DecodeProblem, **knobs: int) -> DecodeConfig:
    """A valid config with these knobs, the model's best of them."""
    spec = gpu.detect()
    fitting = [
        c for c in DECODE_ATTENTION.valid(p, spec) if all(getattr(c, name) == value for name, value in knobs.items())
    ]
    if knobs.get("cluster") and not spec.has_wgmma:
        pytest.skip(f"{spec.name} has no clusters")
    return min(fitting, key=lambda c: DECODE_ATTENTION.estimate_us(p, c, spec))


@pytest.mark.parametrize("text", DECODE_ATTENTION.suite[3:])
def test_the_suite_is_right(text: str) -> None:
    p = DecodeProblem.parse(text)
    args = DECODE_ATTENTION.sample(p, "cuda", 0)
    judge(p, args, launched(p, args))


@pytest.mark.parametrize("seed", seeds(30))
def test_random_configs_are_right(seed: int) -> None:
    rng = random.Random(seed)
    p = random_problem(rng)
    args = arguments(p, lengths_of(rng, p, "cuda"), seed)
    judge(p, args, launched(p, args, random_config(rng, p, gpu.detect())))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("seq_q", [1, 4, 16])
def test_groups_and_queries_share_tiles(seq_q: int, group: int) -> None:
    p = DecodeProblem(4, 777, 2 * group, 2, seq_q, head_dim=64, lse=True)
    lengths = torch.tensor([777, 0, 1, 401], device="cuda", dtype=torch.int32)
    args = arguments(p, lengths, group)
    judge(p, args, launched(p, args))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [0, 16, 64, 256])
@pytest.mark.parametrize(("splits", "cluster"), SHARED)
def test_ragged_lengths_across_pages_and_splits(splits: int, cluster: bool, page_size: int, head_dim: int) -> None:
    p = DecodeProblem(8, 2048, 28, 4, head_dim=head_dim, page_size=page_size, lse=True)
    lengths = torch.tensor([0, 1, 15, 16, 17, 500, 2047, 2048], device="cuda", dtype=torch.int32)
    args = arguments(p, lengths, splits)
    judge(p, args, launched(p, args, some_config(p, splits=splits, cluster=cluster)))


@pytest.mark.parametrize("page_size", [0, 16])
def test_windows_leave_all_but_the_last_keys_unread(page_size: int) -> None:
    """Keys before the window are poisoned too, and their pages do not exist."""
    p = DecodeProblem(3, 1024, 8, 2, 4, 100, head_dim=64, page_size=page_size, window=True, lse=True)
    lengths = torch.tensor([1024, 333, 50], device="cuda", dtype=torch.int32)
    q, k, v, lengths, table, *rest = arguments(p, lengths, 0)
    for b, length in enumerate(lengths.tolist()):
        gone = max(0, length - 4 - 100)
        for t in (k, v):
            if table is None:
                t[b, :gone] = math.nan
            else:
                t[table[b, : gone // 16].long()] = math.nan
        if table is not None:
            table[b, : gone // 16] = -(2**31)
    args = (q, k, v, lengths, table, *rest)
    results = launched(p, args)
    if table is not None:
        args = (q, k, v, lengths, table.clamp_min(0), *rest)
    judge(p, args, results)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_large_logits_neither_overflow_nor_lose_their_way(dtype: str) -> None:
    p = DecodeProblem(2, 1000, 8, 2, 3, dtype=dtype, lse=True)
    q, k, *rest = DECODE_ATTENTION.sample(p, "cuda", 3)
    args = (q * 16, k * 16, *rest)
    out, lse = launched(p, args, some_config(p, splits=4))
    expected, expected_lse = truth(p, args)
    assert float(expected_lse.max()) > 500
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("splits", "cluster"), [(16, False), *SHARED[-1:]])
def test_splits_and_runs_agree(splits: int, cluster: bool) -> None:
    """Whoever arrives last, sums are added up in a fixed order: bit for bit the same each time."""
    p = DecodeProblem.parse("batch=2 seq_kv=4096 heads_q=28 heads_kv=4 lse=1")
    args = DECODE_ATTENTION.sample(p, "cuda", 0)
    config = some_config(p, splits=splits, cluster=cluster)
    first = launched(p, args, config)
    judge(p, args, first)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, launched(p, args, config), strict=True))


@pytest.mark.parametrize(("splits", "cluster"), SHARED[2:])
def test_a_captured_graph_is_good_for_any_lengths(splits: int, cluster: bool) -> None:
    p = DecodeProblem(3, 2048, 28, 4, page_size=16, lse=True)
    filled = torch.full((3,), 2048, device="cuda", dtype=torch.int32)
    args = arguments(p, filled, 0)
    options = {"page_table": args[4], "config": str(some_config(p, splits=splits, cluster=cluster))}
    cases.assert_a_graph_follows(p, args, lambda: decode_attention(*args[:4], return_lse=True, **options), judge)


def test_pages_give_what_one_piece_does() -> None:
    p = DecodeProblem(2, 512, 8, 2)
    lengths = torch.tensor([512, 300], device="cuda", dtype=torch.int32)
    q, k, v, *_ = arguments(p, lengths, 0)
    pages, table = cases.in_pages(k, v)
    config = str(some_config(p, splits=4))
    expected = decode_attention(q, k, v, lengths, config=config)
    assert torch.equal(decode_attention(q, *pages, lengths, page_table=table, config=config), expected)


def test_caches_are_read_in_place_or_refused() -> None:
    fused = torch.randn(2, 300, 2, 2, 64, device="cuda", dtype=torch.bfloat16)
    k, v = fused[:, :, 0], fused[:, :, 1]
    q = torch.randn(2, 8, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([300, 77], device="cuda", dtype=torch.int32)
    out, lse = decode_attention(q, k, v, lengths, return_lse=True)
    assert lse.shape == (2, 8)
    assert torch.equal(out, decode_attention(q, k.contiguous(), v.contiguous(), lengths))
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    assert torch.equal(out, decode_attention(q, *heads_first, lengths))
    odd = [torch.nn.functional.pad(t, (1, 0))[..., 1:] for t in (k, v)]
    with pytest.raises(UnsupportedProblem, match="a cache is not copied"):
        decode_attention(q, *odd, lengths)
    into = torch.full((2, 8, 72), math.nan, device="cuda", dtype=torch.bfloat16)[..., 1:65]
    decode_attention(q, k, v, lengths, out=into)
    assert torch.equal(out, into)


@pytest.mark.parametrize(("batch", "room"), [(0, 20), (2, 0)])
def test_empty_extents(batch: int, room: int) -> None:
    q = torch.randn(batch, 4, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(batch, room, 2, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.zeros(batch, device="cuda", dtype=torch.int32)
    out, lse = decode_attention(q, k, k, lengths, return_lse=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_a_planted_bug_is_caught() -> None:
    """One key too few."""
    p = DecodeProblem(2, 200, 8, 2, head_dim=64)
    args = DECODE_ATTENTION.sample(p, "cuda", 0)
    judge(p, args, launched(p, args))
    short = launched(p, (*args[:3], args[3] - 1, *args[4:]))
    with pytest.raises(AssertionError, match="times what rounding explains"):
        judge(p, args, short)
