"""Caches in FP8 on a GPU: judged against fp64 of the dequantized cache, and what is appended is what is attended to."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels import gpu
from cutekernels.kv_cache import KVCache
from cutekernels.ops.attention.api import decode_attention
from cutekernels.ops.attention.cache import CACHE_ATTENTION, CacheProblem
from cutekernels.ops.attention.decode import DECODE_ATTENTION, DecodeProblem
from tests.attention import cached_cases, cases, decode_cases, test_cached_gpu, test_decode_gpu
from tests.attention.test_decode_gpu import SHARED, some_config
from tests.on_gpu import graph_of
from tests.rope.cases import table
from tests.seeds import seeds

pytestmark = pytest.mark.gpu
decoded = partial(cases.launched, DECODE_ATTENTION)
walked = partial(cases.launched, CACHE_ATTENTION)
NAN = 0x7F


KINDS = ("fp8", "fp8_tokens")  # scales of heads, and of tokens and heads


def fp8(p: Any, cache: str) -> Any:
    """The problem over a cache in FP8, its head dim one that there is."""
    return p.replace(cache=cache, head_dim=-(-p.head_dim // 16) * 16)


# ---- decode ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(60))
def test_random_problems_and_configs(seed: int) -> None:
    rng = random.Random(seed)
    p = fp8(decode_cases.random_problem(rng, sinks=("none", "same", "fp32")), KINDS[seed % 3 > 0])
    args = decode_cases.arguments(p, cases.lengths_of(rng, p, "cuda"), seed)
    test_decode_gpu.judge(p, args, decoded(p, args, decode_cases.random_config(rng, p, gpu.detect())))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("page_size", [0, 16, 256])
@pytest.mark.parametrize(("splits", "cluster"), SHARED)
def test_ragged_lengths_across_pages_and_splits(splits: int, cluster: bool, page_size: int, head_dim: int) -> None:
    p = DecodeProblem(8, 2048, 28, 4, head_dim=head_dim, page_size=page_size, lse=True, cache="fp8_tokens")
    lengths = torch.tensor([0, 1, 15, 16, 17, 500, 2047, 2048], device="cuda", dtype=torch.int32)
    args = decode_cases.arguments(p, lengths, splits)
    test_decode_gpu.judge(p, args, decoded(p, args, some_config(p, splits=splits, cluster=cluster)))


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_code_is_decoded_and_nan_stays_with_its_head(dtype: str, of_tokens: bool, queries: int) -> None:
    """Sequences of one key: the result is its value, exactly but for the result's rounding."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(1, 1, 2, 128)
    v = codes.view(torch.float8_e4m3fn)
    q = torch.randn(1, queries, 8, 128, device="cuda", dtype=kind)
    k = torch.zeros(1, 1, 2, 128, device="cuda").to(torch.float8_e4m3fn)
    factors, lengths = torch.tensor([1.0, 0.25], device="cuda"), torch.ones(1, device="cuda", dtype=torch.int32)
    scale = factors
    if of_tokens:
        scale = torch.full((1, 2, 16), 0xFF, dtype=torch.uint8, device="cuda")
        scale[..., 0] = torch.tensor([127, 125], device="cuda")
    out = decode_attention(q, k, v, lengths, k_scale=scale, v_scale=scale)
    exact = (v.double() * factors.double()[:, None]).to(kind)[0, 0].repeat_interleave(4, 0)
    assert torch.equal(out[0, -1].nan_to_num(9.0), exact.nan_to_num(9.0))
    k.view(torch.uint8)[0, 0, 0, 5] = NAN
    out = decode_attention(q, k, torch.ones_like(k.float()).to(k.dtype), lengths, k_scale=scale, v_scale=scale)
    assert out[0, -1, :4].isnan().all()
    assert (out[0, -1, 4:] == 0.25).all()


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(("dtype", "power"), [(torch.bfloat16, 20), (torch.float16, 6)])
def test_scales_that_differ_by_far_beside_garbage(dtype: torch.dtype, power: int, page_size: int, queries: int) -> None:
    """V's of tokens by up to 2^40, heads of zeros, and bytes of 0xFF wherever no token is: as the CPU computes it."""
    room, seq = 900, 800
    cache = KVCache.paged(2, room, 2, 128, page_size=16, dtype="fp8")
    if not page_size:
        cache = KVCache.contiguous(2, room, 2, 128, dtype="fp8")
    assert cache.k_scale is not None and cache.v_scale is not None
    for t in (cache.k_cache, cache.v_cache, cache.k_scale, cache.v_scale):
        t.view(torch.uint8).fill_(0xFF)
    k, v = (torch.randn(2, seq, 2, 128, device="cuda") for _ in range(2))
    v *= 2.0 ** torch.randint(-power, power + 1, (2, seq, 2, 1), device="cuda")
    k[:, ::7], v[:, ::5] = 0.0, 0.0
    cache.append(k.to(dtype), v.to(dtype))
    cache.lengths[1] = 797
    q = torch.randn(2, queries, 8, 128, device="cuda", dtype=dtype)
    sinks = torch.tensor([-math.inf, 0.0, 5.0, 40.0] * 2, device="cuda")
    for options in ({}, {"window": (100, None)}, {"sinks": sinks}, {"softcap": 2.0}):
        out, lse = decode_attention(q, **cache.view(), return_lse=True, **options)  # type: ignore[arg-type]
        given = {name: t if t is None else t.cpu() for name, t in cache.view().items()}
        if "sinks" in options:
            options = {"sinks": sinks.cpu()}
        wide, their = decode_attention(q.cpu().float(), **given, return_lse=True, **options)  # type: ignore[arg-type]
        errors = (out.cpu().double() - wide.double()).square().mean(-1).sqrt()
        least = 2.0**-24 if dtype is torch.float16 else 0.0  # behind a sink of 40 results are smaller than fp16 has
        assert (errors <= 0.02 * wide.double().square().mean(-1).sqrt() + least).all(), options
        torch.testing.assert_close(lse.cpu(), their, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("cache", KINDS)
@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1.0, 1e4, 1e30])
def test_queries_of_any_size_beside_others(factor: float, cache: str) -> None:
    """bf16 queries become fp16 times a power of two of their own, so a row's size hurts no other row."""
    p = DecodeProblem(2, 300, 8, 2, 3, head_dim=64, lse=True, cache=cache)
    q, k, v, lengths, pages, sinks, k_scale, v_scale, scale, cap = DECODE_ATTENTION.sample(p, "cuda", 1)
    q[:, :, ::2] *= factor
    q[0, 1, 1] = math.inf
    args = (q, k, v, lengths, pages, sinks, k_scale, v_scale, scale, cap)
    out, lse = decoded(p, args)
    kept = torch.ones(2, 3, 8, dtype=torch.bool, device="cuda")
    kept[0, 1, 1] = False
    expected, expected_lse = DECODE_ATTENTION.reference(p, *cases.wide(args))
    assert not out[0, 1, 1].isfinite().any()
    if factor < 1e10:
        torch.testing.assert_close(out[kept].double(), expected[kept].double(), rtol=2e-2, atol=2e-2)
        finite = kept.transpose(1, 2)
        torch.testing.assert_close(lse[finite].double(), expected_lse[finite].double(), rtol=1e-4, atol=1e-3)
    else:  # one key takes all of a large row; the others are as before
        small = kept.clone()
        small[:, :, ::2] = False
        torch.testing.assert_close(out[small].double(), expected[small].double(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cache", KINDS)
@pytest.mark.parametrize(("splits", "cluster"), SHARED[2:])
def test_a_captured_graph_is_good_for_any_lengths_and_the_same_each_time(
    splits: int, cluster: bool, cache: str
) -> None:
    p = DecodeProblem(3, 2048, 28, 4, page_size=16, lse=True, cache=cache)
    filled = torch.full((3,), 2048, device="cuda", dtype=torch.int32)
    args = decode_cases.arguments(p, filled, 0)
    pages, _, k_scale, v_scale = args[4:8]
    options = {"page_table": pages, "k_scale": k_scale, "v_scale": v_scale}
    options["config"] = str(some_config(p, splits=splits, cluster=cluster))
    cases.assert_a_graph_follows(
        p,
        args,
        lambda: decode_attention(*args[:4], return_lse=True, **options),
        test_decode_gpu.judge,
        lambda: k_scale.mul_(1.1) if cache == "fp8" else k_scale.sub_(1),
    )


@pytest.mark.parametrize("cache", KINDS)
def test_a_planted_bug_is_caught(cache: str) -> None:
    """Scales of the heads, or of the tokens, exchanged."""
    p = DecodeProblem(2, 208, 8, 2, head_dim=64, cache=cache)
    args = decode_cases.arguments(p, torch.full((2,), 208, device="cuda", dtype=torch.int32), 0)
    results = decoded(p, (*args[:7], args[7].flip(-1), *args[8:]))
    with pytest.raises(AssertionError, match="times what rounding explains"):
        test_decode_gpu.judge(p, args, results)


# ---- many queries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(45))
def test_random_chunks_of_prompts(seed: int) -> None:
    rng = random.Random(seed)
    p = fp8(cached_cases.random_problem(rng), KINDS[seed % 3 > 0])
    args = CACHE_ATTENTION.sample(p, "cuda", seed)
    args = (*args[:3], cases.lengths_of(rng, p, "cuda").minimum(args[3]), *args[4:])
    results = walked(p, args, cached_cases.random_config(rng, p, gpu.detect()))
    test_cached_gpu.judge(p, args, results)


@pytest.mark.parametrize("text", [t for t in CACHE_ATTENTION.suite if "fp8" in t])
def test_the_suite_of_many_queries(text: str) -> None:
    p = CacheProblem.parse(text).replace(seq_q=300, seq_kv=1024)
    args = CACHE_ATTENTION.sample(p, "cuda", 0)
    test_cached_gpu.judge(p, args, walked(p, args))


# ---- the cache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [0, 16, 64])
def test_what_is_appended_is_what_is_attended_to(page_size: int, dtype: torch.dtype) -> None:
    """Against a cache in 16 bits, within the bound; and the CPU's bits where nothing turns."""
    draw = partial(torch.randn, device="cuda", dtype=dtype)
    caches = [
        KVCache.paged(3, 512, 2, 128, page_size=page_size, dtype=kind)
        if page_size
        else KVCache.contiguous(3, 512, 2, 128, dtype=kind)
        for kind in ("fp8", dtype)
    ]
    cos, sin = table(512, 64, device="cuda")
    for seq in (300, 1, 1, 40):
        q, k, v = draw(3, seq, 8, 128), draw(3, seq, 2, 128), draw(3, seq, 2, 128)
        outs = []
        for cache in caches:
            own = q.clone()
            cache.append(k, v, q=own, cos=cos, sin=sin)
            outs.append(decode_attention(own, **cache.view()).double())
        error = (outs[0] - outs[1]).square().mean().sqrt() / outs[1].square().mean().sqrt()
        assert 0.005 < float(error) < 0.06


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1.0, 1e4])
def test_bits_are_those_of_the_cpu(factor: float, dtype: torch.dtype) -> None:
    k, v = ((torch.randn(2, 40, 2, 64) * factor).to(dtype) for _ in range(2))
    k[0, 3, 1, 5], v[1, 0, 0, 0], v[1, 1, 0, 1], v[0, 5] = math.inf, torch.finfo(dtype).min, math.nan, 0.0
    found: list[list[Tensor]] = []
    for device in ("cpu", "cuda"):
        cache = KVCache.contiguous(2, 64, 2, 64, dtype="fp8", device=device)
        cache.append(k.to(device), v.to(device))
        assert cache.k_scale is not None and cache.v_scale is not None
        found.append([t.cpu()[:, :40].view(torch.uint8) for t in (cache.k_cache, cache.v_cache)])
        found[-1] += [t.cpu()[..., :40] for t in (cache.k_scale, cache.v_scale)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_first_append_may_be_captured() -> None:
    k, v = (torch.randn(2, 1, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    caches = [KVCache.contiguous(2, 64, 2, 64, dtype="fp8") for _ in range(2)]
    caches[1].append(k * 100, v)  # compiles
    caches[1].reset()
    graph, _ = graph_of(lambda: caches[0].append(k, v))
    for _ in range(3):
        graph.replay()
        caches[1].append(k, v)
    q = torch.randn(2, 8, 64, device="cuda", dtype=torch.bfloat16)
    assert caches[0].lengths.tolist() == [3, 3]
    assert torch.equal(*[decode_attention(q, **cache.view()) for cache in caches])
