"""Caches in FP8 without a GPU: the stated bounds, scales from prompts and by hand, pages, what saturates, refusals."""

from __future__ import annotations

import copy
import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.float8 import Float8
from cutekernels.kv_cache import KVCache
from cutekernels.ops.attention.decode_api import decode_attention
from cutekernels.ops.kv_append.op import LENGTHS
from cutekernels.ops.rope.api import rope
from tests.rope.cases import table

FP8: dict[str, Any] = {"dtype": "fp8", "device": "cpu"}
HEADS, DIM = 2, 32


def tokens(seq: int, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple([torch.randn(batch, seq, h, DIM, generator=draw).to(dtype) for h in (4, HEADS, HEADS)])


def made(paged: bool = False, batch: int = 2, room: int = 64, **scales: Any) -> KVCache:
    if paged:
        cache = KVCache.paged(batch, room, HEADS, DIM, pages=batch * room // 16 + 3, **FP8)
        cache.reserve(room)
    else:
        cache = KVCache.contiguous(batch, room, HEADS, DIM, **FP8)
    if scales:
        cache.set_scales(**scales)
    return cache


def held(cache: KVCache, b: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence as they are read, (length, H, D) in fp64."""
    length, found = int(cache.lengths[b]), []
    for t, scale in ((cache.k_cache, cache.k_scale), (cache.v_cache, cache.v_scale)):
        assert scale is not None
        rows = t[b] if cache.page_table is None else t[cache.page_table[b].long().clamp_min(0)].flatten(0, 1)
        found.append(rows[:length].double() * scale.double()[:, None])
    return found[0], found[1]


# ---- the format -----------------------------------------------------------------------------------------


def test_shifts_decode_every_number_nan_too() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    for code, exact in enumerate(numbers.tolist()):
        for byte, other in ((8, 24), (24, 8)):
            word = (code << byte | (255 - code) << other | 0x00A5005A) & 0xFFFFFFFF  # other bytes are anything
            bits = Float8(False).shift(word) & 0xFFFFFFFF  # type: ignore[arg-type, operator]
            (found,) = struct.unpack("<e", struct.pack("<H", bits >> (byte - 8) & 0xFFFF))
            found *= Float8(False).undone
            assert found == exact or (math.isnan(found) and math.isnan(exact))
            assert math.copysign(1, found) == math.copysign(1, exact) or math.isnan(exact)


# ---- bounds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", [False, True])
def test_results_are_within_the_stated_bound_of_an_unrounded_cache(paged: bool) -> None:
    cache, (cos, sin) = made(paged), table(64, DIM // 2)
    q, k, v = tokens(40)
    _, turned_k = rope(q, k, cos, sin)
    assert turned_k is not None
    worst = []
    for first, last in ((0, 25), (25, 26), (26, 40)):
        own = q[:, first:last].clone()
        cache.append(k[:, first:last], v[:, first:last], q=own, cos=cos, sin=sin)
        out = decode_attention(own, **cache.view()).double()
        lengths = torch.full((2,), last, dtype=torch.int32)
        wide = [t[:, :last].double() for t in (turned_k, v)]
        plain = decode_attention(own.double(), *wide, lengths)
        for b in range(2):
            for (kept, exact), scale in zip(
                zip(held(cache, b), (wide[0][b], wide[1][b]), strict=True), (cache.k_scale, cache.v_scale), strict=True
            ):
                assert ((kept - exact).abs() <= rounding(exact, scale) * 1.0001).all()
        scores = torch.einsum(
            "bqhd,bkhd->bhqk", own.double().abs(), rounding(wide[0], cache.k_scale).repeat_interleave(2, 2)
        )
        d = scores.amax((1, 2, 3)) / math.sqrt(DIM)
        large = wide[1].abs().amax((1, 2, 3))
        bound = rounding(wide[1], cache.v_scale).amax((1, 2, 3)) + ((2 * d).exp() - 1) * large
        errors = (out - plain).abs()
        assert (errors.amax((1, 2, 3)) <= bound + 2**-8 * large).all()  # the result is rounded to bf16
        worst.append(float(errors.square().mean().sqrt() / plain.square().mean().sqrt()))
    assert 0.01 < max(worst) < 0.06, worst
    cache.check()


def rounding(x: Tensor, scale: Tensor | None) -> Tensor:
    """The largest error of a number."""
    assert scale is not None
    return torch.maximum(x.abs() / 16, scale.double()[:, None] / 1024)


# ---- scales ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_first_prompt_sets_scales_by_head_that_hold_at_every_position(interleaved: bool) -> None:
    cache, (cos, sin) = made(), table(64, DIM // 2)
    q, k, v = tokens(9)
    k, v = k * torch.tensor([1.0, 100.0])[:, None].bfloat16(), v * torch.tensor([0.01, 1.0])[:, None].bfloat16()
    cache.append(k, v, q=q, cos=cos, sin=sin, interleaved=interleaved, counts=torch.tensor([9, 0], dtype=torch.int32))
    assert cache.k_scale is not None and cache.v_scale is not None
    torch.testing.assert_close(cache.v_scale, v[0].float().abs().amax((0, 2)) * 4 / 448)
    halves = k[0].float().unflatten(-1, (-1, 2) if interleaved else (2, -1)).movedim(-1 if interleaved else -2, 0)
    torch.testing.assert_close(cache.k_scale, torch.hypot(*halves).amax((0, 2)) * 4 / 448)
    first = [cache.k_scale.clone(), cache.v_scale.clone()]
    cache.reset()
    again = [t[:1].expand(2, -1, -1, -1) * 3 for t in (k, v)]  # 4 times as large would fit, at any angle
    cache.append(*again, cos=cos, sin=sin, q=q, interleaved=interleaved)
    cache[0:1].append(k[:1, :1], v[:1, :1])
    assert all(torch.equal(a, b) for a, b in zip(first, (cache.k_scale, cache.v_scale), strict=True))
    assert cache[1].k_scale is cache.k_scale
    cache.check()


def test_prompts_of_nothing_and_of_infinities_leave_finite_scales() -> None:
    for fill in (0.0, math.inf, math.nan):
        cache = made()
        k = torch.full((2, 3, HEADS, DIM), fill)
        cache.append(k, k)
        assert cache.k_scale is not None and (cache.k_scale == 1).all()


def test_an_append_of_no_tokens_leaves_scales_to_the_first_ones() -> None:
    cache, (_, k, v) = made(), tokens(3)
    cache.append(k[:, :0], v[:, :0])
    cache[0:0].append(k[:0], v[:0])
    cache.append(k, v, counts=torch.zeros(len(k), dtype=torch.int32))
    cache.append(k * 1000, v * 1000)
    cache.check()
    assert cache.v_scale is not None
    torch.testing.assert_close(cache.v_scale, (v * 1000).float().abs().amax((0, 1, 3)) * 4 / 448)


def test_a_refused_append_leaves_scales_to_the_next_one() -> None:
    cache, other, (_, k, v) = made(), made(), tokens(3)
    with pytest.raises(UnsupportedProblem, match="leave a table of 1 rows"):
        cache.append(k * 1000, v * 1000, cos=torch.ones(1, DIM // 2), sin=torch.zeros(1, DIM // 2))
    assert cache.k_scale is not None and (cache.k_scale == 1).all()
    for appended in (cache, other):
        appended.append(k, v)
    assert other.k_scale is not None and torch.equal(cache.k_scale, other.k_scale)


def test_numbers_that_are_too_large_saturate_and_check_tells() -> None:
    cache = made(k_scale=0.5, v_scale=torch.tensor([1.0, 2.0]))
    k = torch.full((2, 2, HEADS, DIM), 1.0)
    v = k.clone()
    k[0, 0, 0, :3] = torch.tensor([224.0, -225.0, -math.inf])
    v[1, 1, 1, :4] = torch.tensor([896.0, 900.0, math.nan, math.inf])
    cache.append(k, v)
    assert cache.saturated is not None and cache.saturated.tolist() == [2, 2]
    assert held(cache, 0)[0][0, 0, :3].tolist() == [224.0, -224.0, -224.0]
    assert held(cache, 1)[1][1, 1, :4].nan_to_num(7.0).tolist() == [896.0, 896.0, 7.0, 896.0]
    with pytest.raises(UnsupportedProblem, match=r"448 times their scale, by sequence: \{0: 2, 1: 2\}"):
        cache.check()
    with pytest.raises(UnsupportedProblem, match="reset it first"):
        cache.set_scales(4.0, 4.0)
    cache.reset()
    cache.set_scales(4.0, 4.0)
    cache.check()


def test_layers_have_scales_of_their_own_and_copies_keep_them() -> None:
    layers = KVCache.layers(2, 2, 32, HEADS, DIM, pages=8, **FP8)
    layers[1].set_scales(0.25, torch.tensor(0.5))
    layers[0].reserve(5)
    _, k, v = tokens(5)
    for cache in layers:
        cache.append(k, v)
    assert layers[1].k_scale is not None and layers[1].k_scale.tolist() == [0.25, 0.25]
    assert layers[0].k_scale is not None and (layers[0].k_scale < 0.25).all()
    twin = copy.deepcopy(layers[1])
    assert twin.v_scale is not None and twin.v_scale.tolist() == [0.5, 0.5] and len(twin._state) == 4
    q = tokens(1)[0]
    assert torch.equal(decode_attention(q, **twin.view()), decode_attention(q, **layers[1].view()))
    layers[0].reset()
    assert not layers[1]._states[:, LENGTHS].any()


# ---- refusals, torch ------------------------------------------------------------------------------------


def test_refusals_say_the_rule() -> None:
    cache, (q, k, v) = made(), tokens(3)
    given = made(k_scale=1.0, v_scale=1.0).view()
    for rule, call in {
        "multiple of 16": lambda: KVCache.contiguous(1, 8, 1, 24, **FP8),
        "is in float8_e4m3fn; got torch.float8_e5m2": lambda: KVCache.contiguous(
            1, 8, 1, 16, dtype=torch.float8_e5m2, device="cpu"
        ),
        "come together": lambda: cache.set_scales(1.0, None),
        r"k_scale is a number above 0.*got \[0.0\]": lambda: cache.set_scales(0.0, 1.0),
        r"v_scale is .* 2 heads; got \[1.0, 1.0, 1.0\]": lambda: cache.set_scales(1.0, torch.ones(3)),
        "k_scale is a number, .*; got 'small'": lambda: cache.set_scales("small", 1.0),  # type: ignore[arg-type]
        "this one is torch.bfloat16": lambda: KVCache.contiguous(1, 8, 1, 16, device="cpu").set_scales(1.0, 1.0),
        "takes v in bfloat16; got torch.float32": lambda: cache.append(k, v.float()),
        "k_scale belongs to .*, and k_scale is missing": lambda: decode_attention(q, **given | {"k_scale": None}),
        "v_scale belongs to .* is torch.bfloat16, and v_scale is given": lambda: decode_attention(
            q, k, v, torch.ones(2, dtype=torch.int32), v_scale=torch.ones(2)
        ),
        r"v_scale must be fp32, \(2,\)": lambda: decode_attention(q, **given | {"v_scale": torch.ones(3)}),
        "k_cache must have q's dtype": lambda: decode_attention(
            q, *[t.to(torch.float8_e5m2) for t in (k, v)], given["cache_seqlens"]
        ),
        "must have one dtype": lambda: decode_attention(q, k, v.to(torch.float8_e4m3fn), given["cache_seqlens"]),
    }.items():
        with pytest.raises(UnsupportedProblem, match=rule):
            call()
    assert cache.k_scale is not None and (cache.k_scale == 1).all()
    assert not cache._scales.known  # type: ignore[union-attr]


def test_autocast_and_graphs_take_a_cache_as_it_is() -> None:
    cache, (q, k, v) = made(k_scale=0.05, v_scale=0.05), tokens(3)
    cache.append(k, v)
    expected = decode_attention(q, **cache.view())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(decode_attention(q.float(), **cache.view()), expected)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(k, v)
        return decode_attention(q, **cache.view()) * 2

    cache.reset()
    with torch.no_grad():
        assert torch.equal(step(q, k, v), expected * 2)
    assert cache.lengths.tolist() == [3, 3]


@pytest.mark.parametrize("many", [False, True])
def test_opcheck(many: bool) -> None:
    cache = made(k_scale=0.05, v_scale=0.05)
    q, k, v = tokens(20 if many else 2)
    cache.append(k, v)
    view = cache.view()
    args = (q, view["k_cache"], view["v_cache"], cache.lengths, None, None, view["k_scale"], view["v_scale"])
    tests = ("test_faketensor", "test_aot_dispatch_dynamic")  # that of schemas multiplies, which torch lacks in FP8
    torch.library.opcheck(torch.ops.cutekernels.decode_attention, (*args, -1, 0.2, 0.0, True), test_utils=tests)
