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
from cutekernels.errors import UnsupportedProblem
from cutekernels.kv_cache import KVCache
from cutekernels.ops.attention.cached import CACHE_ATTENTION, CacheProblem
from cutekernels.ops.attention.decode import DECODE_ATTENTION, DecodeProblem
from cutekernels.ops.attention.decode_api import decode_attention
from tests.attention import cached_cases, cases, decode_cases, test_cached_gpu, test_decode_gpu
from tests.attention.test_decode_gpu import SHARED, some_config
from tests.rope.cases import table

pytestmark = pytest.mark.gpu
decoded = partial(cases.launched, DECODE_ATTENTION)
walked = partial(cases.launched, CACHE_ATTENTION)
NAN = 0x7F


def fp8(p: Any) -> Any:
    """The problem over a cache in FP8, its head dim one that there is."""
    return p.replace(cache="fp8", head_dim=-(-p.head_dim // 16) * 16)


# ---- decode ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_random_problems_and_configs(seed: int) -> None:
    rng = random.Random(seed)
    p = fp8(decode_cases.random_problem(rng, sinks=("none", "same", "fp32")))
    args = decode_cases.arguments(p, decode_cases.lengths_of(rng, p, "cuda"), seed)
    test_decode_gpu.judge(p, args, decoded(p, args, decode_cases.random_config(rng, p, gpu.detect())))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("page_size", [0, 16, 256])
@pytest.mark.parametrize(("splits", "cluster"), SHARED)
def test_ragged_lengths_across_pages_and_splits(splits: int, cluster: bool, page_size: int, head_dim: int) -> None:
    p = DecodeProblem(8, 2048, 28, 4, head_dim=head_dim, page_size=page_size, lse=True, cache="fp8")
    lengths = torch.tensor([0, 1, 15, 16, 17, 500, 2047, 2048], device="cuda", dtype=torch.int32)
    args = decode_cases.arguments(p, lengths, splits)
    test_decode_gpu.judge(p, args, decoded(p, args, some_config(p, splits=splits, cluster=cluster)))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_code_is_decoded_and_nan_stays_with_its_head(dtype: str) -> None:
    """Sequences of one key: the result is its value, exactly but for the result's rounding."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(1, 1, 2, 128)
    v = codes.view(torch.float8_e4m3fn)
    q = torch.randn(1, 1, 8, 128, device="cuda", dtype=kind)
    k = torch.zeros(1, 1, 2, 128, device="cuda").to(torch.float8_e4m3fn)
    ones, lengths = torch.tensor([1.0, 0.25], device="cuda"), torch.ones(1, device="cuda", dtype=torch.int32)
    out = decode_attention(q, k, v, lengths, k_scale=ones, v_scale=ones)
    exact = (v.double() * ones.double()[:, None]).to(kind)[0, 0].repeat_interleave(4, 0)
    assert torch.equal(out[0, 0].nan_to_num(9.0), exact.nan_to_num(9.0))
    k.view(torch.uint8)[0, 0, 0, 5] = NAN
    out = decode_attention(q, k, torch.ones_like(k.float()).to(k.dtype), lengths, k_scale=ones, v_scale=ones)
    assert out[0, 0, :4].isnan().all()
    assert (out[0, 0, 4:] == 0.25).all()


@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1.0, 1e4, 1e30])
def test_queries_of_any_size_beside_others(factor: float) -> None:
    """bf16 queries become fp16 times a power of two of their own, so a row's size hurts no other row."""
    p = DecodeProblem(2, 300, 8, 2, 3, head_dim=64, lse=True, cache="fp8")
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


@pytest.mark.parametrize(("splits", "cluster"), SHARED[2:])
def test_a_captured_graph_is_good_for_any_lengths_and_the_same_each_time(splits: int, cluster: bool) -> None:
    p = DecodeProblem(3, 2048, 28, 4, page_size=16, lse=True, cache="fp8")
    filled = torch.full((3,), 2048, device="cuda", dtype=torch.int32)
    q, k, v, lengths, pages, sinks, k_scale, v_scale, scale, cap = decode_cases.arguments(p, filled, 0)
    config = str(some_config(p, splits=splits, cluster=cluster))

    def attend() -> Any:
        return decode_attention(
            q, k, v, lengths, page_table=pages, k_scale=k_scale, v_scale=v_scale, return_lse=True, config=config
        )

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend()
    for seed in range(6):
        lengths.copy_(decode_cases.lengths_of(random.Random(seed), p, "cuda"))
        q.normal_()
        k_scale.mul_(1.1)
        out.fill_(math.nan)
        graph.replay()
        test_decode_gpu.judge(p, (q, k, v, lengths, pages, sinks, k_scale, v_scale, scale, cap), (out, lse))
        once = out.clone()
        graph.replay()
        assert torch.equal(out, once)


def test_a_planted_bug_is_caught() -> None:
    """Scales of the heads exchanged."""
    p = DecodeProblem(2, 200, 8, 2, head_dim=64, cache="fp8")
    args = DECODE_ATTENTION.sample(p, "cuda", 0)
    results = decoded(p, (*args[:7], args[7].flip(0), *args[8:]))
    with pytest.raises(AssertionError, match="times what rounding explains"):
        test_decode_gpu.judge(p, args, results)


# ---- many queries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_random_chunks_of_prompts(seed: int) -> None:
    rng = random.Random(seed)
    p = fp8(cached_cases.random_problem(rng))
    args = CACHE_ATTENTION.sample(p, "cuda", seed)
    args = (*args[:3], cached_cases.lengths_of(rng, p, "cuda").minimum(args[3]), *args[4:])
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
    caches[0].check()


def test_bits_are_those_of_the_cpu_and_too_large_ones_are_counted() -> None:
    k, v = torch.randn(2, 40, 2, 64).bfloat16(), torch.randn(2, 40, 2, 64).bfloat16()
    k[0, 3, 1, 5], v[1, 0, 0, 0], v[1, 1, 0, 1] = math.inf, -1e30, math.nan
    found = []
    for device in ("cpu", "cuda"):
        cache = KVCache.contiguous(2, 64, 2, 64, dtype="fp8", device=device)
        cache.set_scales(torch.tensor([0.004, 0.1]), 0.02)
        cache.append(k.to(device), v.to(device))
        assert cache.saturated is not None
        found.append([t.cpu()[:, :40].view(torch.uint8) for t in (cache.k_cache, cache.v_cache)])
        found[-1].append(cache.saturated.cpu())
        with pytest.raises(UnsupportedProblem, match="448 times their scale"):
            cache.check()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_scales_of_the_first_prompt_come_ahead_of_a_graph() -> None:
    k, v = (torch.randn(2, 1, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cache = KVCache.contiguous(2, 64, 2, 64, dtype="fp8")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedProblem, match="append once ahead of the capture"), torch.cuda.graph(graph):
        k.add(v)  # an empty capture warns
        cache.append(k, v)
    cache.append(k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(k, v)
    before: Tensor = cache.lengths.clone()
    graph.replay()
    assert torch.equal(cache.lengths, before + 1)
    cache.check()
