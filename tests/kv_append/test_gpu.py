"""``kv_append``, ``KVCache`` and ``route_sdpa`` on a GPU: tickets, graphs, pages, and decoding beside torch."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cutekernels import compile as compiler
from cutekernels import gpu
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.kv_cache import NO_PAGE, KVCache
from cutekernels.ops.attention.api import decode_attention
from cutekernels.ops.kv_append.api import kv_append
from cutekernels.ops.kv_append.op import KV_APPEND, KvAppendProblem
from cutekernels.sdpa import route_sdpa
from tests.kv_append.cases import CASES, judge, posed, right
from tests.on_gpu import graph_of, needs_memory, normal, traced
from tests.rope.cases import table

pytestmark = pytest.mark.gpu
KINDS = (0, 16, 256)  # page sizes


def made(page_size: int, batch: int = 4, room: int = 512, heads: int = 2, head_dim: int = 128) -> KVCache:
    """A cache full of NaN; pages in a random order."""
    if page_size:
        entries = -(-room // page_size)
        pages = torch.randperm(batch * entries, device="cuda").int().view(batch, entries)
        cache = KVCache.paged(batch, room, heads, head_dim, page_size=page_size, page_table=pages)
    else:
        cache = KVCache.contiguous(batch, room, heads, head_dim)
    cache.k_cache.fill_(float("nan"))
    cache.v_cache.fill_(float("nan"))
    return cache


def held(cache: KVCache, b: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence, (1, H, length, D)."""
    length = int(cache.lengths[b])
    if cache.page_table is None:
        rows = [t[b, :length] for t in (cache.k_cache, cache.v_cache)]
    else:
        pages = cache.page_table[b, : -(-length // cache.page_size)].long()
        rows = [t[pages].flatten(0, 1)[:length] for t in (cache.k_cache, cache.v_cache)]
    return rows[0].transpose(0, 1)[None], rows[1].transpose(0, 1)[None]


# ---- the kernel -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_interpreted_case(case: str) -> None:
    """The public function updates in place, token by token as expected, and does the same when run again."""
    given = CASES[case]
    results, inputs, memory = posed(given)
    interleaved, expected = bool(given.get("interleaved")), []
    for _ in range(2):
        around = [t.cuda() for t in memory]
        k_cache, v_cache = (t[1:-1] for t in around)
        q, k, v, state, pages, counts, cos, sin = (None if t is None else t.cuda() for t in inputs)
        scales = [t.cuda() for t in results[4:]]
        k_scale, v_scale = scales if given.get("fp8") else (None, None)
        before = k_cache.cpu(), v_cache.cpu(), *results[4:]
        kv_append(
            k,
            v,
            k_cache,
            v_cache,
            state,
            page_table=pages,
            counts=counts,
            q=q if q.shape[2] else None,
            cos=cos,
            sin=sin,
            interleaved=interleaved,
            k_scale=k_scale,
            v_scale=v_scale,
            config=given.get("config"),
        )
        found = [t.cpu() for t in (q, k_cache, v_cache, state, *scales)]
        assert right(judge(before, tuple(found), inputs, interleaved))
        edges = [(t.cpu()[[0, -1]].double(), m[[0, -1]].double()) for t, m in zip(around, memory, strict=True)]
        assert all((t == m).all() for t, m in edges)
        expected.append(found)
    twice = [(a.double().nan_to_num(9.0), b.double().nan_to_num(9.0)) for a, b in zip(*expected, strict=True)]
    assert all(torch.equal(a, b) for a, b in twice)
    assert len(results) == 6


@pytest.mark.parametrize("text", KV_APPEND.suite)
def test_every_suite_with_default_and_random_configs(text: str) -> None:
    """A launch like the tuner's: results in separate, poisoned memory, launched twice."""
    problem, spec = KvAppendProblem.parse(text), gpu.detect()
    args = KV_APPEND.sample(problem, "cuda", 11)
    valid = list(KV_APPEND.valid(problem, spec))
    configs = [KV_APPEND.default(problem, spec), *random.Random(text).sample(valid, min(5, len(valid)))]
    expected = KV_APPEND.reference(problem, *args)
    for config in configs:
        results = KV_APPEND.outputs(problem, *args)
        assert KV_APPEND.problem(*results, *args, interleaved=problem.interleaved).static() == problem.static()
        launch = KV_APPEND.bind(problem, config, compiler.get(KV_APPEND, problem, config, spec))
        for _ in range(2):
            for t in results:
                t.fill_(float("nan") if t.is_floating_point() else -9)
            launch(*results, *args)
            assert torch.equal(results[3], expected[3]), config
            for result, value in zip(results[:3], expected[:3], strict=True):
                rtol, pair = 2e-2, (result, value)
                if value.element_size() == 1:  # where fp32 rounds otherwise, a number beside a tie is a step away
                    rtol, pair = 0.125, (result.float(), value.float())
                torch.testing.assert_close(*pair, equal_nan=True, rtol=rtol, atol=2e-3)
        assert (args[3][2] == 0).all(), "a ticket is left"


@pytest.mark.parametrize("page_size", [0, 16])
def test_many_programs_move_an_end_once(page_size: int) -> None:
    """Thousands of programs read a length that one of them overwrites, in hundreds of launches."""
    batch, seq = 3, 700
    k, v, q = normal(batch, seq, 4, 64), normal(batch, seq, 4, 64), normal(batch, seq, 8, 64)
    cos, sin = table(4096, 32, device="cuda")
    cache = made(page_size, batch, 1536, 4, 64)
    first = None
    for _ in range(200):
        cache.reset()
        turned = q.clone()
        for _ in range(2):
            cache.append(k, v, q=turned, cos=cos, sin=sin, config="tokens=1 heads=1 block=32 warps=1")
        held_now = [*held(cache, 0), *held(cache, 2), cache.lengths, cache.lost, turned]
        first = [t.clone() for t in held_now] if first is None else first
        assert all(torch.equal(a, b) for a, b in zip(first, held_now, strict=True))
    assert cache.lengths.tolist() == [2 * seq] * batch
    cache.check()


def test_any_strides() -> None:
    """Slices of a fused projection, heads first, channels apart."""
    cos, sin = table(600, 64, device="cuda")
    joint = normal(4, 20, (6 + 2 * 2) * 128).unflatten(-1, (-1, 128))
    given = [t.clone() for t in (joint[:, :, :6], joint[:, :, 6:8], joint[:, :, 8:])]
    plain = [t.clone() for t in given]
    expected = made(16)
    expected.append(plain[1], plain[2], q=plain[0], cos=cos, sin=sin)
    arrangements = [
        [joint[:, :, :6], joint[:, :, 6:8], joint[:, :, 8:]],
        [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given],
        [t.mT.contiguous().mT for t in given],
        [F.pad(t, (1, 0))[..., 1:] for t in given],
    ]
    for q, k, v in arrangements:
        cache = made(0)
        assert cache.append(k, v, q=q, cos=cos, sin=sin) is q
        assert torch.equal(q, plain[0])
        for b in range(4):
            assert all(torch.equal(x, y) for x, y in zip(held(cache, b), held(expected, b), strict=True))


@pytest.mark.slow
def test_more_than_two_billion_elements() -> None:
    needs_memory(24)
    k, v = normal(2, 3, 8, 128), normal(2, 3, 8, 128)
    whole = KVCache.contiguous(2, 1 << 21, 8, 128)
    pages = torch.full((2, 1 << 17), NO_PAGE, device="cuda", dtype=torch.int32)
    cut = KVCache(*(t.view(-1, 16, 8, 128) for t in (whole.k_cache, whole.v_cache)), pages)
    pages[:, 0] = torch.tensor([(1 << 18) - 2, (1 << 18) - 1])
    whole.lengths.fill_((1 << 21) - 2)
    whole.append(k, v)
    assert whole.lost.tolist() == [1, 1]
    assert torch.equal(whole.k_cache[:, -2:], k[:, :2])
    assert torch.equal(whole.v_cache[:, -2:], v[:, :2])
    cut.append(v, k)
    assert torch.equal(cut.k_cache[-2:, :3], v)
    assert torch.equal(cut.v_cache[-2:, :3], k)
    far = whole.k_cache.view(-1)[: (1 << 31) + 8 * 128].as_strided((1, 1, 3, 128), (0, 0, 1 << 30, 1)).normal_()
    some = KVCache.contiguous(1, 4, 3, 128)
    some.append(far, far)
    assert torch.equal(some.k_cache[:, :1], far)


# ---- the cache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", KINDS)
def test_decoding_beside_torch(page_size: int) -> None:
    cache, (cos, sin) = made(page_size), table(512, 64, device="cuda")
    for step, seq in enumerate((130, 1, 5, 16, 1)):
        counts = torch.tensor([seq, 0, max(0, seq - step), seq], device="cuda", dtype=torch.int32)
        q, k, v = normal(4, seq, 8, 128), normal(4, seq, 2, 128), normal(4, seq, 2, 128)
        cache.append(k, v, q=q, cos=cos, sin=sin, counts=counts if step else None)
        last = q[:, -1:]
        out = decode_attention(last, **cache.view())
        for b in range(4):
            keys, values = (t.double() for t in held(cache, b))
            query = last[b : b + 1].transpose(1, 2).double()
            expected = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True).transpose(1, 2)
            torch.testing.assert_close(out[b : b + 1].double(), expected, rtol=2e-2, atol=2e-2)
    cache.check()


@pytest.mark.parametrize("page_size", KINDS)
def test_a_captured_step_appends_and_attends_at_any_length(page_size: int) -> None:
    """One graph, replayed: what it leaves is bit for bit what calls one by one leave."""
    cos, sin = table(600, 64, device="cuda")
    steps = [[normal(4, 1, h, 128) for h in (8, 2, 2)] for _ in range(20)]
    active = [torch.randint(0, 2, (4,), device="cuda").int() for _ in steps]
    caches = [made(page_size) for _ in range(2)]
    if page_size:
        caches[1].page_table.copy_(caches[0].page_table)
    for cache in caches:
        cache.lengths.copy_(torch.tensor([0, 100, 495, 510]))
        cache.k_cache.fill_(0.5)
        cache.v_cache.fill_(0.25)
    q, k, v = (t.clone() for t in steps[0])
    counts = active[0].clone()

    def step(cache: KVCache) -> Any:
        turned = cache.append(k, v, q=q, cos=cos, sin=sin, counts=counts)
        return decode_attention(turned, **cache.view())

    step(made(page_size))
    graph, out = graph_of(lambda: step(caches[0]))
    for operands, number in zip(steps, active, strict=True):
        counts.copy_(number)
        for t, given in zip((q, k, v), operands, strict=True):
            t.copy_(given)
        graph.replay()
        replayed, turned = out.clone(), q.clone()
        q.copy_(operands[0])
        assert torch.equal(step(caches[1]), replayed)
        assert torch.equal(q, turned)
    for name in ("lengths", "lost", "k_cache", "v_cache"):
        assert torch.equal(*(getattr(cache, name) for cache in caches)), name
    assert caches[0].lengths.tolist()[3] <= 512


def test_reserve_and_reset_under_a_captured_append() -> None:
    """Pages are freed and reserved between replays; the graph uses the current ones."""
    cache = KVCache.paged(2, 64, 2, 64, pages=3)
    k, v = normal(2, 10, 2, 64), normal(2, 10, 2, 64)
    cache.append(k, v)
    cache.reset()
    graph, _ = graph_of(lambda: cache.append(k, v))
    cache.reset()
    cache.reserve([20, 10])
    graph.replay()
    graph.replay()
    assert cache.lengths.tolist() == [20, 16]
    assert cache.lost.tolist() == [0, 4]
    with pytest.raises(UnsupportedProblem, match="1: 4"):
        cache.check()
    cache[0].reset()
    cache[1].reserve(40)
    graph.replay()
    assert cache.lengths.tolist() == [0, 26]
    assert cache.lost.tolist() == [10, 4]
    assert cache.page_table is not None
    assert (cache.page_table[0] == NO_PAGE).all()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_append_does_not_wait_for_the_device() -> None:
    cache, k = made(16), normal(4, 1, 2, 128)
    counts = torch.ones(4, device="cuda", dtype=torch.int32)
    cache.append(k, k)
    try:
        torch.cuda.set_sync_debug_mode("error")
        cache.append(k, k, counts=counts)
        cache[1:3].append(k[1:3], k[1:3])
        cache.reset()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.lengths.tolist() == [0] * 4


@traced
def test_compiled_whole() -> None:
    cos, sin = table(512, 64, device="cuda")
    caches = [made(16), made(16)]

    @torch.compile(fullgraph=True)
    def step(joint: Tensor, k_cache: Tensor, v_cache: Tensor, state: Tensor, pages: Tensor) -> Tensor:
        heads = (joint + 1).unflatten(-1, (6, 128))
        q = heads[:, :, :2].clone()
        kv_append(heads[:, :, 2:4], heads[:, :, 4:], k_cache, v_cache, state, page_table=pages, q=q, cos=cos, sin=sin)
        return q

    joint = normal(4, 3, 6 * 128)
    ours = caches[0]
    assert ours.page_table is not None
    q = step(joint, ours.k_cache, ours.v_cache, ours._state, ours.page_table)
    heads = (joint + 1).unflatten(-1, (6, 128))
    expected = caches[1].append(heads[:, :, 2:4], heads[:, :, 4:], q=heads[:, :, :2], cos=cos, sin=sin)
    assert torch.equal(q, expected)
    for b in range(4):
        assert all(torch.equal(x, y) for x, y in zip(held(ours, b), held(caches[1], b), strict=True))


def test_forced_config() -> None:
    cache, k = made(0), normal(4, 3, 2, 128)
    cache.append(k, k, config="tokens=2 heads=2 block=64 warps=1")
    assert torch.equal(cache.k_cache[:, :3], k)
    with pytest.raises(InvalidConfig, match="block=128 does not cover"):
        cache.append(k, k, config="tokens=1 heads=2 block=128 warps=1")


# ---- torch's own attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(256, 256), (100, 333), (333, 100), (1, 500)])
@pytest.mark.parametrize("causal", [False, True])
def test_routed_calls_agree_with_torch(causal: bool, seq_q: int, seq_kv: int, dtype: torch.dtype) -> None:
    q, k, v = (normal(2, s, h, 64, dtype=dtype).transpose(1, 2) for s, h in ((seq_q, 8), (seq_kv, 2), (seq_kv, 2)))
    wide = [t.double() for t in (q, k, v)]
    exact = F.scaled_dot_product_attention(*wide, is_causal=causal, enable_gqa=True)
    with route_sdpa() as routing:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert (routing.routed, dict(routing.passed_on)) == (1, {})
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", [(1, 1, 1, 77), (2, 1, 50, 77), (1, 8, 50, 77)])
def test_routed_masks_agree_with_torch(shape: tuple[int, ...]) -> None:
    q, k, v = normal(2, 8, 50, 64), normal(2, 8, 77, 64), normal(2, 8, 77, 64)
    seen = torch.rand(shape, device="cuda") < 0.6
    seen[..., 3] = True
    exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), attn_mask=seen)
    with route_sdpa() as routing:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    assert routing.routed == 1
    assert routing.passed_on.total() == 1
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


def test_routed_gradients_agree_with_torch() -> None:
    given = [normal(2, h, s, 64) for h, s in ((8, 90), (2, 120), (2, 120))]
    dout, found = normal(2, 8, 90, 64), []
    for routes, dtype in ((True, torch.bfloat16), (False, torch.float64)):
        args = [t.to(dtype, copy=True).requires_grad_() for t in given]
        with route_sdpa() if routes else nullcontext():
            out = F.scaled_dot_product_attention(*args, is_causal=True, enable_gqa=True)
        out.backward(dout.to(dtype))
        found.append([t.grad.double() for t in args if t.grad is not None])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=2e-2, atol=6e-2)
