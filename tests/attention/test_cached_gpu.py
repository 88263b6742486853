"""``decode_attention`` of many queries on a GPU: judged against fp64 beside poisoned caches, pages, lengths, graphs."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from cutekernels import KVCache, gpu
from cutekernels.ops.attention.api import attention, decode_attention
from cutekernels.ops.attention.cache import CACHE_ATTENTION, CacheProblem
from tests.attention import cases
from tests.attention.cached_cases import arguments, random_config, random_problem, without_unseen_pages
from tests.attention.cases import lengths_of
from tests.seeds import seeds

pytestmark = pytest.mark.gpu
launched = partial(cases.launched, CACHE_ATTENTION)


judge = partial(cases.judge, CACHE_ATTENTION)


def bodies() -> tuple[str, ...]:
    return ("multistage", "warpgroup") if gpu.detect().has_wgmma else ("multistage",)


@pytest.mark.parametrize("text", CACHE_ATTENTION.suite[3:])
def test_the_suite_is_right(text: str) -> None:
    p = CacheProblem.parse(text)
    args = CACHE_ATTENTION.sample(p, "cuda", 0)
    judge(p, args, launched(p, args))


@pytest.mark.parametrize("seed", seeds(40))
def test_random_problems_and_configs(seed: int) -> None:
    """Ragged lengths, NaN behind the ends and before the windows, hostile entries where nothing is seen."""
    rng = random.Random(seed)
    p = random_problem(rng)
    args = arguments(p, lengths_of(rng, p, "cuda"), seed)
    for body in bodies():
        judge(p, args, launched(p, without_unseen_pages(p, args), random_config(rng, p, gpu.detect(), body)))


@pytest.mark.parametrize("page_size", [0, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("window", [False, True])
def test_every_page_size_over_many_tiles(page_size: int, window: bool) -> None:
    p = CacheProblem(
        4, 300, 1024, 16, 4, 100 if window else 0, head_dim=64, window="left" if window else "none",
        page_size=page_size, lse=True,
    )  # fmt: skip
    lengths = torch.tensor([1024, 1, 0, 777], device="cuda", dtype=torch.int32)
    args = arguments(p, lengths, page_size)
    rng = random.Random(page_size)
    for body in bodies():
        for _ in range(2):
            judge(p, args, launched(p, without_unseen_pages(p, args), random_config(rng, p, gpu.detect(), body)))


@pytest.mark.parametrize("page_size", [0, 16, 128])
def test_hostile_lengths_and_pages_stay_inside_the_cache(page_size: int) -> None:
    p = CacheProblem(6, 64, 512, 4, 2, head_dim=64, page_size=page_size)
    lengths = torch.tensor([512, 2**31 - 1, -(2**31), -1, 513, 100], device="cuda", dtype=torch.int32)
    args = arguments(p, lengths.clamp(0, 512), 0)
    q, k, v, _, table, *rest = args
    for body in bodies():
        config = random_config(random.Random(page_size), p, gpu.detect(), body)
        (expected,) = launched(p, args, config)
        judge(p, args, (expected,))
        (out,) = launched(p, (q, k, v, lengths, table, *rest), config)
        assert torch.equal(out, expected)
        if table is not None:
            wrong = torch.randint(-(2**31), 2**31 - 1, table.shape, device="cuda").to(torch.int32)
            wrong[0] = table[0]
            (out,) = launched(p, (q, k, v, lengths, wrong, *rest), config)
            torch.cuda.synchronize()
            assert torch.equal(out[0], expected[0])


def test_pages_and_one_piece_and_attention_are_the_same() -> None:
    """Bit for bit with one config, since each walks the same blocks."""
    k, v = (torch.randn(2, 512, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(2, 200, 8, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((2,), 512, device="cuda", dtype=torch.int32)
    pages, table = cases.in_pages(k, v)
    p = CacheProblem(2, 200, 512, 8, 2, page_size=16)
    for body in bodies():
        config = str(random_config(random.Random(1), p, gpu.detect(), body))
        expected = attention(q, k, v, causal=True, config=config)
        assert torch.equal(decode_attention(q, k, v, lengths, config=config), expected)
        assert torch.equal(decode_attention(q, *pages, lengths, page_table=table, config=config), expected)


def test_a_captured_graph_is_good_for_any_lengths() -> None:
    p = CacheProblem(3, 100, 1024, 14, 2, page_size=16, lse=True)
    filled = torch.full((3,), 1024, device="cuda", dtype=torch.int32)
    args = arguments(p, filled, 0)
    attend = partial(decode_attention, *args[:4], page_table=args[4], return_lse=True)
    cases.assert_a_graph_follows(p, args, attend, judge)


@pytest.mark.parametrize("page_size", [0, 64])
def test_a_prompt_in_chunks_through_a_cache(page_size: int) -> None:
    q, k, v = (torch.randn(1, 300, h, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    expected = attention(q, k, v, causal=True)
    cache = KVCache.paged(1, 320, 2, 64, page_size=64) if page_size else KVCache.contiguous(1, 300, 2, 64)
    at = 0
    for size in (17, 128, 1, 100, 16, 38):
        own = slice(at, at + size)
        cache.append(k[:, own], v[:, own])
        out = decode_attention(q[:, own], **cache.view())
        torch.testing.assert_close(out, expected[:, own], rtol=2e-2, atol=2e-3)
        at += size
    cache.check()


def test_a_planted_bug_is_caught() -> None:
    """One key too few."""
    p = CacheProblem(2, 64, 200, 4, 2, head_dim=64)
    args = CACHE_ATTENTION.sample(p, "cuda", 0)
    judge(p, args, launched(p, args))
    short = launched(p, (*args[:3], args[3] - 1, *args[4:]))
    with pytest.raises(AssertionError, match="times what rounding explains"):
        judge(p, args, short)
