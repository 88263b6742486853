"""``KVCache`` on the CPU: contiguous and in pages, what is appended is what is attended to, pages come and go."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.kv_cache import NO_PAGE, KVCache
from cutekernels.ops.attention.api import attention, decode_attention
from cutekernels.ops.kv_append.op import LENGTHS, LOST
from cutekernels.ops.rope.api import rope
from tests.rope.cases import table

SMALL: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
KINDS = ("contiguous", "identity", "reserved", "the caller's")


def made(kind: str, batch: int = 3, room: int = 64) -> KVCache:
    if kind == "contiguous":
        return KVCache.contiguous(batch, room, 2, 16, **SMALL)
    if kind == "identity":
        return KVCache.paged(batch, room, 2, 16, **SMALL)
    if kind == "reserved":
        cache = KVCache.paged(batch, room, 2, 16, pages=batch * room // 16 + 1, **SMALL)
        for tokens in (1, 16, 17, 40, room):  # pages of sequences come to lie between those of others
            cache.reserve(tokens)
        return cache
    order = torch.randperm(batch * room // 16 + 5, generator=torch.Generator().manual_seed(3)).int()
    return KVCache.paged(
        batch, room, 2, 16, pages=len(order), page_table=order[: batch * room // 16].view(batch, -1), **SMALL
    )


def tokens(seq: int, batch: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, seq, h, 16, generator=draw, dtype=torch.float64) for h in (4, 2, 2))
    return q, k, v


# ---- tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_what_attention_over_everything_does(kind: str) -> None:
    cache, (cos, sin) = made(kind), table(64, 8, torch.float64)
    whole = tokens(30)
    turned_q, turned_k = rope(*whole[:2], cos, sin)
    assert turned_k is not None
    expected = attention(turned_q, turned_k, whole[2], causal=True)
    at = 0
    for seq in (13, 1, 4, 1, 11):
        q, k, v = (t[:, at : at + seq].clone() for t in whole)
        assert cache.append(k, v, q=q, cos=cos, sin=sin) is q
        at += seq
        assert cache.lengths.tolist() == [at] * 3
        torch.testing.assert_close(q, turned_q[:, at - seq : at])
        torch.testing.assert_close(decode_attention(q, **cache.view()), expected[:, at - seq : at])
    cache.check()


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_their_own_lengths(kind: str) -> None:
    """Sequences are filled one by one, and some of them advanced; without angles no row is rotated."""
    cache = made(kind)
    q, k, v = tokens(40)
    for b, length in enumerate((7, 0, 33)):
        assert cache[b].append(k[b : b + 1, :length], v[b : b + 1, :length]) is None
    counts = torch.tensor([2, 0, 1], dtype=torch.int32)
    more = tokens(2, seed=1)
    cache.append(*more[1:], counts=counts)
    assert cache.lengths.tolist() == [9, 0, 34]
    out = decode_attention(q[:, :1], **cache.view())
    for b, length in enumerate((7, 0, 33)):
        keys, values = (
            torch.cat((old[b : b + 1, :length], new[b : b + 1, : counts[b]]), 1)
            for old, new in zip((k, v), more[1:], strict=True)
        )
        torch.testing.assert_close(out[b : b + 1], attention(q[b : b + 1, :1], keys, values))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_without_room_are_lost_and_counted(kind: str) -> None:
    cache = made(kind)
    for t in (cache.k_cache, cache.v_cache):
        t.fill_(7.0)
    before = tokens(62)
    cache.append(*before[1:])
    cache.check()
    kept = [t.clone() for t in (cache.k_cache, cache.v_cache)]
    cache.append(*tokens(5, seed=1)[1:], counts=torch.tensor([5, 1, 2], dtype=torch.int32))
    assert cache.lengths.tolist() == [64, 63, 64]
    assert cache.lost.tolist() == [3, 0, 0]
    cache.append(*tokens(2, seed=2)[1:])
    assert cache.lengths.tolist() == [64, 64, 64]
    assert cache.lost.tolist() == [5, 1, 2]
    with pytest.raises(UnsupportedProblem, match=r"found no room, by sequence: \{0: 5, 1: 1, 2: 2\}"):
        cache.check()
    for now, old in zip((cache.k_cache, cache.v_cache), kept, strict=True):
        assert int((now != old).any(-1).any(-1).sum()) == 6  # two tokens of each sequence
    cache.reset()
    cache.check()
    assert cache.lengths.tolist() == [0, 0, 0]


def test_speculated_tokens_are_taken_back() -> None:
    cache = made("identity")
    _, k, v = tokens(8)
    cache.append(k, v)
    lengths, taken = cache.lengths, torch.tensor([3, 0, 1], dtype=torch.int32)
    cache.lengths -= taken
    assert cache.view()["cache_seqlens"] is lengths
    cache.append(k[:, :1], v[:, :1])
    assert lengths.tolist() == [6, 9, 8]
    assert torch.equal(cache.k_cache[0, 5], k[0, 0])
    cache.lengths = cache.lengths - taken
    assert cache.lengths is lengths and lengths.tolist() == cache._state[LENGTHS].tolist() == [3, 9, 7]
    cache.append(k[:, 1:2], v[:, 1:2])
    assert lengths.tolist() == [4, 10, 8]
    assert torch.equal(cache.k_cache[0, 3], k[0, 1])
    for wrong in (taken.long(), taken[:1], taken.to("meta")):
        with pytest.raises(UnsupportedProblem, match=r"lengths takes \(3,\) torch.int32 on cpu; got .*: convert"):
            cache.lengths = wrong
    with pytest.raises(UnsupportedProblem, match="takes lengths as a torch.Tensor; got builtins.list"):
        cache.lengths = [1, 2, 3]  # type: ignore[assignment]


@pytest.mark.parametrize("copied", [lambda it: pickle.loads(pickle.dumps(it)), copy.deepcopy, copy.copy])
def test_copies_hold_together(copied: Callable[[Any], Any]) -> None:
    cache, (_, k, v) = made("contiguous"), tokens(2)
    cache.append(k, v)
    for each in (copied(cache), copied(cache[:])):
        each.append(k, v)
        assert each.lengths.tolist() == each._state[LENGTHS].tolist()
        each.lost += 1
        assert each._state[LOST].tolist() == each.lost.tolist()
    layers = KVCache.layers(3, 3, 64, 2, 16, pages=12, **SMALL)
    layers[0].reserve(8)
    for layer in layers:
        layer.append(k, v)
    again = copied(layers)
    assert all(layer.page_table is again[0].page_table for layer in again)
    again[2].reset()
    assert [layer.lengths.tolist() for layer in again] == [[2] * 3, [2] * 3, [0] * 3]
    again[0][1].reset()
    assert [layer.lengths.tolist() for layer in again] == [[2, 0, 2], [2, 0, 2], [0] * 3]
    again[0].reset()
    assert not any(layer.lengths.any() for layer in again)
    assert again[0].free_pages == 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_the_same_memory(kind: str) -> None:
    cache = made(kind)
    part = cache[1:]
    assert len(part) == 2
    assert part.room == cache.room
    part.append(*tokens(3, batch=2)[1:])
    assert cache.lengths.tolist() == [0, 3, 3]
    assert [len(c) for c in cache] == [1, 1, 1]
    cache[-1].lengths.fill_(2)
    assert cache.lengths.tolist() == [0, 3, 2]
    with pytest.raises(IndexError, match="there are 3 sequences; got 3"):
        cache[3]
    with pytest.raises(UnsupportedProblem, match="got a step of 2"):
        cache[::2]


# ---- pages ----------------------------------------------------------------------------------------------


def test_pages_are_reserved_as_needed_and_given_back() -> None:
    cache = KVCache.paged(3, 64, 2, 16, pages=6, **SMALL)
    assert (cache.page_size, cache.room, cache.free_pages) == (16, 64, 6)
    assert (cache.page_table == NO_PAGE).all()
    cache.append(*tokens(1)[1:])
    assert cache.lost.tolist() == [1, 1, 1]
    cache.reset()
    cache.reserve([20, 0, 16])
    assert cache.free_pages == 3
    cache.reserve([17, 0, 16])  # has them already
    assert cache.free_pages == 3
    with pytest.raises(UnsupportedProblem, match="4 more pages of 16 tokens are needed and 3 are free"):
        cache.reserve([64, 17, 0])
    assert cache.free_pages == 3
    cache.append(*tokens(18)[1:])
    assert cache.lengths.tolist() == [18, 0, 16]
    assert cache.lost.tolist() == [0, 18, 2]
    cache[0].reset()
    assert cache.free_pages == 5
    assert cache.lengths.tolist() == [0, 0, 16]
    assert (cache.page_table[0] == NO_PAGE).all()
    cache[1].reserve(64)
    assert cache.free_pages == 1
    used = cache.page_table[cache.page_table != NO_PAGE].tolist()
    assert len(set(used)) == len(used) == 5


def test_no_two_sequences_ever_share_a_page() -> None:
    rng, cache = random.Random(4), KVCache.paged(5, 128, 1, 8, page_size=32, pages=11, **SMALL)
    at = cache.page_table
    for _ in range(200):
        b = rng.randrange(5)
        if rng.random() < 0.4:
            cache[b].reset()
        else:
            try:
                cache[b].reserve(rng.randrange(129))
            except UnsupportedProblem:
                assert cache.free_pages < 4
        used = cache.page_table[cache.page_table != NO_PAGE].tolist()
        assert len(set(used)) == len(used) == 11 - cache.free_pages
        assert all(0 <= page < 11 for page in used)
        full = (cache.page_table != NO_PAGE).int()
        assert (full.cummin(1).values == full).all()
    assert cache.page_table is at  # where a captured graph looks for it


def test_layers_share_a_table() -> None:
    first = KVCache.paged(3, 64, 2, 16, pages=6, **SMALL)
    second = KVCache.paged(3, 64, 2, 16, pages=6, page_table=first.page_table, **SMALL)
    first.reserve(20)
    q, k, v = tokens(20)
    first.append(k, v)
    second.append(v, k)
    torch.testing.assert_close(decode_attention(q[:, 19], **second.view()), attention(q[:, 19:], v, k).squeeze(1))
    torch.testing.assert_close(decode_attention(q[:, 19], **first.view()), attention(q[:, 19:], k, v).squeeze(1))
    with pytest.raises(UnsupportedProblem, match="the page table is the caller's"):
        second.reserve(30)


def test_memory_that_is_there() -> None:
    joint = torch.zeros(4, 16, 2, 2, 16, dtype=torch.float64)
    pages = torch.tensor([[3, 0], [NO_PAGE, NO_PAGE]], dtype=torch.int32)
    cache = KVCache(joint[:, :, 0], joint[:, :, 1], pages)
    assert (cache.batch, cache.room) == (2, 32)
    _, k, v = tokens(17, batch=2)
    cache.append(k, v)
    assert cache.lost.tolist() == [0, 17]
    assert torch.equal(joint[3, :, 0], k[0, :16])
    assert torch.equal(joint[0, 0, 1], v[0, 16])
    assert repr(cache) == "<KVCache of 2 x 32 tokens, pages of 16, 2 x 16 float64>"


def test_refusals_say_the_rule() -> None:
    cache, k = made("contiguous"), torch.zeros(4, 12, 2, 16)
    for rule, call in {
        "alike and have four dimensions": lambda: KVCache(k, k[:, :3]),
        "a page has 16, 32, 64, 128, 256 tokens, not 12": lambda: KVCache(k, k, torch.zeros(2, 2, dtype=torch.int32)),
        r"page_table is int32 \(B, MAX_PAGES\)": lambda: KVCache(k, k, torch.zeros(2, 2)),
        "not 8": lambda: KVCache.paged(2, 64, 2, 16, page_size=8, **SMALL),
        r"have a page_table \(2, 4\); got \(2, 3\)": lambda: KVCache.paged(
            2, 64, 2, 16, page_table=torch.zeros(2, 3, dtype=torch.int32), **SMALL
        ),
        "hands out no pages": lambda: cache.reserve(3),
        "a number of tokens up to 64": lambda: KVCache.paged(2, 64, 2, 16, pages=9, **SMALL).reserve(65),
        "one for each of 2 sequences": lambda: KVCache.paged(2, 64, 2, 16, pages=9, **SMALL).reserve([1]),
        "takes k_cache in float32 or float8_e4m3fn; got torch.float64": lambda: cache.append(k[:3, :1], k[:3, :1]),
    }.items():
        with pytest.raises(UnsupportedProblem, match=rule):
            call()


@pytest.mark.parametrize("kind", ["contiguous", "identity"])
def test_no_sequences(kind: str) -> None:
    cache = made(kind, batch=0)
    cache.append(*tokens(3, batch=0)[1:])
    cache.check()
    cache.reset()
    assert len(cache) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["contiguous", "identity"])
def test_a_step_is_traced_whole(kind: str) -> None:
    """``lengths`` is a view of what append updates, and has moved where the graph reads it."""
    cos, sin = table(64, 8, torch.float64)

    def step(cache: KVCache, q: Tensor, k: Tensor, v: Tensor) -> Any:
        turned = cache.append(k, v, q=q * 1, cos=cos, sin=sin)
        assert turned is not None
        return decode_attention(turned, **cache.view())

    compiled, caches = torch.compile(step, fullgraph=True, backend="aot_eager"), (made(kind), made(kind))
    for seed in range(3):
        with torch.no_grad():
            assert torch.equal(compiled(caches[0], *tokens(2, seed=seed)), step(caches[1], *tokens(2, seed=seed)))
    assert caches[0].lengths.tolist() == caches[1].lengths.tolist() == [6, 6, 6]


def test_pages_are_taken_under_any_default_device() -> None:
    cache = KVCache.paged(1, 32, 2, 16, pages=4, **SMALL)
    with torch.device("meta"):
        cache.reserve(16)
    _, k, v = tokens(3, batch=1)
    cache.append(k, v)
    assert (cache.lengths.tolist(), cache.lost.tolist()) == ([3], [0])


def test_a_reservation_that_fails_takes_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache.paged(1, 32, 2, 16, pages=2, **SMALL)

    def broken(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "tensor", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            cache.reserve(32)
    cache.reserve(32)
    _, k, v = tokens(20, batch=1)
    cache.append(k, v)
    assert (cache.lengths.tolist(), cache.lost.tolist()) == ([20], [0])


@pytest.mark.parametrize("kind", KINDS)
def test_caches_made_in_inference_mode_are_used_outside_of_it(kind: str) -> None:
    with torch.inference_mode():
        cache = made(kind)
    _, k, v = tokens(3)
    cache.append(k, v)
    assert cache.lengths.tolist() == [3, 3, 3]
