"""Caches in FP8 without a GPU: the stated bounds, a scale of each token and head, garbage beyond lengths, refusals."""

from __future__ import annotations

import copy
import io
import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.float8 import Float8
from cutekernels.kv_cache import KVCache
from cutekernels.ops.attention import token_scales
from cutekernels.ops.attention.api import decode_attention
from cutekernels.ops.attention.cache import CacheProblem
from cutekernels.ops.attention.decode import DecodeProblem
from cutekernels.ops.kv_append.op import LENGTHS
from cutekernels.ops.rope.api import rope
from tests.rope.cases import table

FP8: dict[str, Any] = {"dtype": "fp8", "device": "cpu"}
HEADS, DIM = 2, 32


def tokens(seq: int, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple([torch.randn(batch, seq, h, DIM, generator=draw).to(dtype) for h in (4, HEADS, HEADS)])


def made(paged: bool = False, batch: int = 2, room: int = 64) -> KVCache:
    """A cache whose memory is NaN, scales too."""
    if paged:
        cache = KVCache.paged(batch, room, HEADS, DIM, pages=batch * room // 16 + 3, **FP8)
        cache.reserve(room)
    else:
        cache = KVCache.contiguous(batch, room, HEADS, DIM, **FP8)
    for t in (cache.k_cache, cache.v_cache, *scales_of(cache)):
        t.view(torch.uint8).fill_(0xFF)
    return cache


def scales_of(cache: KVCache) -> tuple[Tensor, Tensor]:
    assert cache.k_scale is not None and cache.v_scale is not None
    return cache.k_scale, cache.v_scale


def held(cache: KVCache, b: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence as they are read, (length, H, D) in fp64."""
    length, found = int(cache.lengths[b]), []
    for t, scale in zip((cache.k_cache, cache.v_cache), scales_of(cache), strict=True):
        pages = torch.tensor([b]) if cache.page_table is None else cache.page_table[b].long().clamp_min(0)
        powers = 2.0 ** (scale[pages].double() - 127)
        rows = t[pages].double() * powers[..., : t.shape[1]].transpose(1, 2)[..., None]
        found.append(rows.flatten(0, 1)[:length])
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


def test_a_power_is_the_least_without_clamping_at_every_size() -> None:
    """Every finite bf16 and fp16 number as the largest of a head: the code is at most 448, and above half of it."""
    for dtype, least in ((torch.bfloat16, -64), (torch.float16, -15)):
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        x = x[x.isfinite()].view(-1, 1)
        codes, scales = token_scales.quantized(x)
        exponent = scales.double() - 127
        exact = x[:, 0].double().abs()
        assert (exponent >= least).all() and (exact <= 448 * 2.0**exponent).all()
        assert ((exact > 224 * 2.0**exponent) | (exponent == least)).all()
        read = codes[:, 0].double() * 2.0**exponent
        assert ((read - x[:, 0].double()).abs() <= torch.maximum(exact / 16, 2.0 ** (exponent - 10))).all()
        assert (read.to(dtype).double() == read).all(), "a number of the cache is one of its type"


def test_what_is_not_finite_becomes_nan_and_hurts_no_neighbour() -> None:
    x = torch.tensor([[1.0, math.inf, -3.0, math.nan, -math.inf, 0.5], [0.0] * 6, [math.nan] * 6])
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        codes, scales = token_scales.quantized(x.to(dtype))
        plain, their = token_scales.quantized(x.nan_to_num(0.0, 0.0, 0.0).to(dtype))
        assert torch.equal(scales, their)
        assert torch.equal(codes.float().isnan(), ~x.isfinite())
        assert torch.equal(codes.float().nan_to_num(0.0), plain.float())


# ---- bounds ---------------------------------------------------------------------------------------------


def rounding(x: Tensor) -> Tensor:
    """The largest error of a number, as ``KVCache`` states it."""
    return torch.maximum(x.abs() / 16, x.abs().amax(-1, keepdim=True) / 2**17)


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
            for kept, exact in zip(held(cache, b), (wide[0][b], wide[1][b]), strict=True):
                assert ((kept - exact).abs() <= rounding(exact) * 1.0001).all()
        scores = torch.einsum("bqhd,bkhd->bhqk", own.double().abs(), rounding(wide[0]).repeat_interleave(2, 2))
        d = scores.amax((1, 2, 3)) / math.sqrt(DIM)
        large = wide[1].abs().amax((1, 2, 3))
        bound = rounding(wide[1]).amax((1, 2, 3)) + ((2 * d).exp() - 1) * large
        errors = (out - plain).abs()
        assert (errors.amax((1, 2, 3)) <= bound + 2**-8 * large).all()  # the result is rounded to bf16
        worst.append(float(errors.square().mean().sqrt() / plain.square().mean().sqrt()))
    assert 0.01 < max(worst) < 0.06, worst
    cache.check()


def test_the_error_is_that_of_the_best_scales_of_heads() -> None:
    """Heads of any size, some with outlier channels: within 1.02 of the best of many static scales, measured."""
    draw = torch.Generator().manual_seed(0)
    ours, static = 0.0, dict.fromkeys((1.0, 1.4, 2.0, 4.0), 0.0)
    for _ in range(12):
        q = torch.randn(2, 16, 64, generator=draw) / 4
        k, v = (torch.randn(2, 256, 16, 64, generator=draw) for _ in range(2))
        k[..., 5] *= 8
        k, v = (t * torch.exp2(torch.rand(16, 1, generator=draw)) for t in (k, v))

        def attended(k: Tensor, v: Tensor, q: Tensor = q) -> Tensor:
            weights = torch.einsum("bhd,bthd->bht", q, k).mul(0.125).softmax(-1)
            return torch.einsum("bht,bthd->bhd", weights, v)

        plain = attended(k, v)

        def error(k: Tensor, v: Tensor, plain: Tensor = plain) -> float:
            return float(((attended(k, v) - plain).square().sum(-1) / plain.square().sum(-1)).mean())

        read = [
            c.float() * token_scales.powers(s, torch.float32)[..., None] for c, s in map(token_scales.quantized, (k, v))
        ]
        ours += error(*read)
        for factor in static:
            scales = [t.abs().amax((0, 1, 3))[:, None] * factor / 448 for t in (k, v)]
            static[factor] += error(
                *[(t / s).to(torch.float8_e4m3fn).float() * s for t, s in zip((k, v), scales, strict=True)]
            )
    assert ours**0.5 < 1.02 * min(static.values()) ** 0.5, (ours, static)


# ---- scales of tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", [False, True])
def test_a_token_depends_on_no_other(paged: bool) -> None:
    """Prompts of zeros, of other sizes and of NaN before, beside and after leave codes and scales as they are."""
    _, k, v = tokens(9)
    alone = made(paged)
    alone.append(k, v)
    for fill in (0.0, 1e20, math.nan, math.inf):
        other, used = torch.full_like(k, fill), made(paged)
        used.append(other, other)
        used.reset()
        if paged:
            used.reserve(30)
        used.append(*(torch.stack((t[0], other[1])) for t in (k, v)))
        used.append(other, other)
        used.lengths.fill_(9)
        assert all(torch.equal(a, b) for a, b in zip(held(used, 0), held(alone, 0), strict=True))


@pytest.mark.parametrize("factor", [1000.0, 1e-6, 1e30])
def test_later_tokens_of_another_size_are_within_the_bound(factor: float) -> None:
    cache, (_, k, v) = made(), tokens(5)
    parts = [(k, v), (k * factor, v * factor)]
    for own in parts:
        cache.append(*own)
    for b in range(2):
        for found, exact in zip(held(cache, b), zip(*parts, strict=True), strict=True):
            whole = torch.cat(exact, 1)[b].double()
            assert ((found - whole).abs() <= rounding(whole)).all()


def test_sizes_by_powers_of_two_change_no_bit() -> None:
    q, k, v = tokens(9)
    plain, scaled = made(), made()
    plain.append(k, v)
    scaled.append(k * 2.0**-20, v * 2.0**20)
    a, b = decode_attention(q, **plain.view()), decode_attention(q * 2.0**20, **scaled.view())
    assert torch.equal(a * 2.0**20, b)


def test_scales_of_tokens_that_differ_by_far_and_heads_of_zeros() -> None:
    q, k, v = tokens(40, dtype=torch.float32)
    k, v = k.bfloat16(), v * 2.0 ** torch.randint(-20, 21, (2, 40, HEADS, 1))
    v[:, ::5], k[:, ::7] = 0.0, 0.0
    v = v.bfloat16()
    cache = made()
    cache.append(k, v)
    assert (cache.v_scale[:, :, 0] == 127 - 64).all()  # type: ignore[index]
    out = decode_attention(q[:, -1:], **cache.view())
    read = [torch.stack([held(cache, b)[i] for b in range(2)]) for i in range(2)]
    expected = decode_attention(q[:, -1:].double(), *read, cache.lengths)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4 * float(expected.abs().max()))


def test_parts_layers_copies_and_pickles_have_their_scales() -> None:
    layers = KVCache.layers(2, 2, 32, HEADS, DIM, pages=8, **FP8)
    layers[0].reserve(5)
    _, k, v = tokens(5)
    for factor, cache in enumerate(layers):
        cache.append(k * 4.0**factor, v)
    assert torch.equal(scales_of(layers[1])[0][:2, :, :5], scales_of(layers[0])[0][:2, :, :5] + 2)
    q = tokens(1)[0]
    saved = io.BytesIO()
    torch.save(layers[1], saved)
    saved.seek(0)
    for twin in (copy.deepcopy(layers[1]), torch.load(saved, weights_only=False)):
        assert torch.equal(decode_attention(q, **twin.view()), decode_attention(q, **layers[1].view()))
    layers[0].reset()
    assert not layers[1]._states[:, LENGTHS].any()
    whole = made(room=70)
    assert scales_of(whole)[0].shape == (2, HEADS, 80)
    whole.append(k, v)
    for b in range(2):
        assert scales_of(whole[b])[0].data_ptr() == scales_of(whole)[0][b].data_ptr()
        assert torch.equal(
            decode_attention(q[b : b + 1], **whole[b].view()), decode_attention(q, **whole.view())[b : b + 1]
        )
    whole[1].append(k[1:], v[1:])
    assert whole.lengths.tolist() == [5, 10]


def test_memory_of_the_caller_has_scales_of_the_caller() -> None:
    memory = [torch.zeros(6, 16, HEADS, DIM).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = [torch.zeros(6, 2 * HEADS, 16, dtype=torch.uint8)[:, ::2] for _ in range(2)]
    pages = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
    cache = KVCache(*memory, pages, k_scale=scales[0], v_scale=scales[1])
    _, k, v = tokens(20)
    cache.append(k, v)
    assert (scales[0][3] > 0).all() and not scales[0][2].any()
    q, own = tokens(1)[0], KVCache(*memory, pages)
    assert scales_of(own)[0].shape == (6, HEADS, 16)
    own.append(k, v)
    assert torch.equal(decode_attention(q, **cache.view()), decode_attention(q, **own.view()))


def test_scales_of_heads_are_read_as_before() -> None:
    """Caches of other engines: fp32, one of each head."""
    q, k, v = tokens(9)
    scales = torch.tensor([0.5, 3.0]), torch.tensor([0.01, 2.0])
    codes = [
        (t.float() / s[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn) for t, s in zip((k, v), scales, strict=True)
    ]
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    wide = [c.float() * s[:, None] for c, s in zip(codes, scales, strict=True)]
    found = decode_attention(q, *codes, lengths, k_scale=scales[0], v_scale=scales[1])
    torch.testing.assert_close(found, decode_attention(q.float(), *wide, lengths).bfloat16())


def test_one_tuning_serves_both_kinds_of_scales() -> None:
    for kind, text in (
        (DecodeProblem, "batch=2 seq_kv=64 heads_q=4 heads_kv=2"),
        (CacheProblem, "batch=2 seq_q=40 seq_kv=64 heads_q=4 heads_kv=2"),
    ):
        heads, of_tokens = (kind.parse(f"{text} cache={cache}") for cache in ("fp8", "fp8_tokens"))
        assert str(heads).endswith("cache=fp8") and str(of_tokens).endswith("cache=fp8_tokens")
        assert of_tokens.bucket() == heads.bucket() and "cache=fp8" in str(heads.bucket())
        assert kind.parse(text).bucket().cache == "same"


# ---- refusals, torch ------------------------------------------------------------------------------------


def test_refusals_say_the_rule() -> None:
    cache, (q, k, v) = made(), tokens(3)
    given = cache.view()
    scale = scales_of(cache)[0]
    wide = KVCache.contiguous(1, 8, 1, 16, device="cpu")
    for rule, call in {
        "multiple of 16": lambda: KVCache.contiguous(1, 8, 1, 24, **FP8),
        "is in float8_e4m3fn; got torch.float8_e5m2": lambda: KVCache.contiguous(
            1, 8, 1, 16, dtype=torch.float8_e5m2, device="cpu"
        ),
        "come together, .* got k_scale beside": lambda: KVCache(cache.k_cache, cache.v_cache, k_scale=scale),
        "got k_scale and v_scale beside torch.bfloat16": lambda: KVCache(
            wide.k_cache, wide.v_cache, k_scale=scale, v_scale=scale
        ),
        r"k_scale of .* must be uint8 \(2, 2, 64\), .* it is torch.float32, \(2,\)": lambda: KVCache(
            cache.k_cache, cache.v_cache, k_scale=torch.ones(2), v_scale=torch.ones(2)
        ),
        "k_scale as a torch.Tensor; got builtins.float": lambda: KVCache(
            cache.k_cache,
            cache.v_cache,
            k_scale=1.0,
            v_scale=1.0,  # type: ignore[arg-type]
        ),
        "takes v in bfloat16; got torch.float32": lambda: cache.append(k, v.float()),
        "k_scale belongs to .*, and k_scale is missing": lambda: decode_attention(q, **given | {"k_scale": None}),
        "v_scale belongs to .* is torch.bfloat16, and v_scale is given": lambda: decode_attention(
            q, k, v, torch.ones(2, dtype=torch.int32), v_scale=torch.ones(2)
        ),
        "v_scale does not fit: its heads_kv is 3, k_cache's 2": lambda: decode_attention(
            q, **given | {"v_scale": torch.ones(3)}
        ),
        r"v_scale \(.* = \(2, 2, 64\); got \(2, 2, 60\)": lambda: decode_attention(
            q, **given | {"v_scale": scale[..., :60]}
        ),
        "both of heads, or both of tokens": lambda: decode_attention(q, **given | {"v_scale": torch.ones(2)}),
        r"slots side by side; .* \(256, 128, 2\)": lambda: decode_attention(
            q, **given | {"v_scale": torch.zeros(2, 2, 128, dtype=torch.uint8)[..., ::2]}
        ),
        r"16-byte aligned rows; .* \(130, 65, 1\)": lambda: KVCache(
            cache.k_cache, cache.v_cache, k_scale=scale, v_scale=torch.zeros(2, 2, 65, dtype=torch.uint8)[..., :64]
        ),
        "takes k_cache in bfloat16 or float8_e4m3fn; got torch.float8_e5m2": lambda: decode_attention(
            q, *[t.to(torch.float8_e5m2) for t in (k, v)], given["cache_seqlens"]
        ),
        "must have one dtype": lambda: decode_attention(q, k, v.to(torch.float8_e4m3fn), given["cache_seqlens"]),
    }.items():
        with pytest.raises(UnsupportedProblem, match=rule):
            call()


@pytest.mark.parametrize("paged", [False, True])
def test_autocast_and_graphs_take_a_cache_as_it_is(paged: bool) -> None:
    cache, (q, k, v) = made(paged), tokens(3)
    cache.append(k, v)
    expected = decode_attention(q, **cache.view())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(decode_attention(q.float(), **cache.view()), expected)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(k, v)
        return decode_attention(q, **cache.view()) * 2

    cache.lengths.zero_()
    for t in scales_of(cache):
        t.fill_(0xFF)
    with torch.no_grad():
        assert torch.equal(step(q, k, v), expected * 2)
    assert cache.lengths.tolist() == [3, 3]


@pytest.mark.parametrize("many", [False, True])
def test_opcheck(many: bool) -> None:
    cache = made()
    q, k, v = tokens(20 if many else 2)
    cache.append(k, v)
    view = cache.view()
    args = (q, view["k_cache"], view["v_cache"], cache.lengths, None, None, view["k_scale"], view["v_scale"])
    tests = ("test_faketensor", "test_aot_dispatch_dynamic")  # that of schemas multiplies, which torch lacks in FP8
    torch.library.opcheck(torch.ops.cutekernels.decode_attention, (*args, -1, 0.2, 0.0, True), test_utils=tests)
