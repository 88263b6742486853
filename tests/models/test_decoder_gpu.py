"""``Decoder`` on a GPU: tokens and logits beside fp32, graphs that stay while requests come and go, seeds, pages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import cutekernels as ck
from cutekernels.models import Decoder, Sampling
from cutekernels.models.sampling import uniform
from tests.integrations import tiny
from tests.models import test_decoder
from tests.models.near_ties import check_greedy, following, widened
from tests.models.test_decoder import DRAWN
from tests.models.test_requests import PENALIZED, finish
from tests.models.test_threads import at_once

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_seed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
OWN: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"moe_intermediate_size": 128},
    "qwen2-moe": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 192},
    "glm4-moe": {"moe_intermediate_size": 128},
    "gemma2": {"tie_word_embeddings": False},
    "gemma3": {"tie_word_embeddings": False},
    "gemma4": {"tie_word_embeddings": False, "global_head_dim": 64},
    "gemma4-inside": {"tie_word_embeddings": False, "global_head_dim": 64},
}
FAMILIES = tuple(family for family in (*tiny.FAMILIES, *tiny.INSIDE) if family not in ("gpt-oss", "deepseek-v2"))
EXPERTS = ("mixtral", "qwen3-moe", "qwen2-moe", "glm4-moe")  # rounding sends a token between two of them to the other
KINDS = [(family, torch.bfloat16) for family in FAMILIES] + [("llama", torch.float16), ("qwen3", torch.float16)]


def made(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return tiny.wide(family, dtype, vocab_size=1031, **OWN.get(family, {}))


prompts = partial(test_decoder.prompts, most=1031)


decoder = partial(test_decoder.decoder, max_tokens=256)


# ---- beside fp32 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "dtype"), KINDS, ids=[f"{f}-{str(d)[6:]}" for f, d in KINDS])
def test_greedy_tokens_are_the_best_of_fp32(family: str, dtype: torch.dtype) -> None:
    """Prompts shorter and longer than a window, a page and a chunk, more of them than slots."""
    model, given = made(family, dtype), prompts(1, 16, 50)
    exact = widened(model)
    tokens = decoder(model, max_batch=2, chunk=20).generate(given, max_new_tokens=24).tokens
    assert max(len({*row}) for row in tokens) > 1
    for prompt, row in zip(given, tokens, strict=True):
        check_greedy(model, exact, prompt, row)


class Uncaptured:
    """A step that is run where a graph would be replayed, so that its logits can be kept."""

    def __init__(self, engine: Decoder, batch: int, greedy: bool) -> None:
        self._step = lambda: engine._decode(batch, greedy)

    def replay(self) -> None:
        self._step()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_no_further_from_fp32_than_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (prompt,), kept = made(family), prompts(60), []
    engine = decoder(model)
    take = engine._choices.take
    monkeypatch.setattr(engine, "_graph", lambda batch, greedy: Uncaptured(engine, batch, greedy))
    keep: Any = lambda x, *rest, **into: kept.append(x[:1].float()) or take(x, *rest, **into)  # noqa: E731
    monkeypatch.setattr(engine._choices, "take", keep)
    (tokens,) = engine.generate([prompt], max_new_tokens=32).tokens
    expected = following(widened(model), prompt, tokens)
    theirs = (following(model, prompt, tokens) - expected).norm() / expected.norm()
    ours = (torch.cat(kept) - expected).norm() / expected.norm()
    assert 0 < ours <= (2.0 if family in EXPERTS else 1.25) * theirs
    assert theirs < 0.1


# ---- requests that come and go --------------------------------------------------------------------------


def in_company(engine: Decoder, request: list[int], sampling: Sampling, others: Sequence[tuple[list[int], int]]) -> Any:
    """The tokens of ``request`` among others; the last of those runs as long, so that steps have one size."""
    number = engine.add(request, max_new_tokens=24, sampling=sampling)
    numbers = [engine.add(prompt, max_new_tokens=most, sampling=DRAWN) for prompt, most in others]
    finish(engine)
    for other in numbers:
        engine.result(other)
    return engine.result(number)


@pytest.mark.parametrize(
    ("family", "sampling"),
    [("llama", Sampling()), ("llama", DRAWN), ("qwen3", PENALIZED), ("qwen3-moe", Sampling()), ("gemma3", DRAWN)],
    ids=["llama", "llama-drawn", "qwen3-penalty", "qwen3-moe", "gemma3-drawn"],
)
def test_a_request_gets_the_same_tokens_in_any_company(family: str, sampling: Sampling) -> None:
    """Bit for bit while steps have one size: rows of a product and sequences of a cache know nothing of each other."""
    engine = decoder(made(family))
    request, a, b, c, d, e = prompts(20, 5, 30, 12, 9, 40)
    first = in_company(engine, request, sampling, [(a, 3), (b, 30), (c, 40), (d, 6)])
    captured = dict(engine._graphs)
    second = in_company(engine, request, sampling, [(e, 12), (d, 2), (b, 40), (a, 9), (c, 5)])
    assert first == second and len(first) == 24
    assert engine._graphs == captured, "a request that joins needs no graph of its own"
    assert engine._caches[0].free_pages == 4 * 16
    assert int(engine._caches[0].lost.sum()) == 0


def test_steps_wait_for_nothing_and_requests_join_without_capture() -> None:
    engine = decoder(made("qwen2"))
    first, second, *others = prompts(20, 5, 30, 12)
    engine.generate([first, second, *others], max_new_tokens=4)  # compiles and captures
    numbers = [engine.add(p, max_new_tokens=40) for p in (first, *others)]
    for _ in range(3):
        engine.step()
    captured = dict(engine._graphs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            engine._advance(engine._requests.running())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    numbers.append(engine.add(second, max_new_tokens=9))
    finish(engine)
    assert engine._graphs == captured
    assert [len(engine.result(n)) for n in numbers] == [40, 40, 40, 9]


def test_sizes_of_steps_share_their_state() -> None:
    """Requests leave one by one, so that steps shrink from 8 sequences to one; each size is captured on the way."""
    model, given = made("qwen2"), prompts(*range(10, 18))
    exact, engine = widened(model), decoder(model, max_batch=8)
    numbers = [engine.add(p, max_new_tokens=4 + 3 * (8 - i)) for i, p in enumerate(given)]
    finish(engine)
    assert {batch for batch, _ in engine._graphs} == {1, 2, 4, 8}
    for prompt, number in zip(given, numbers, strict=True):
        check_greedy(model, exact, prompt, engine.result(number))


def test_pages_are_used_again() -> None:
    """Five pages of 16 tokens for six requests of two: two run at a time, in pages that others left."""
    model, given = made("llama"), prompts(10, 11, 12, 13, 9, 8)
    exact, engine = widened(model), decoder(model, pages=5)
    tokens = engine.generate(given, max_new_tokens=20).tokens
    for prompt, row in zip(given, tokens, strict=True):
        check_greedy(model, exact, prompt, row)
    assert engine._caches[0].free_pages == 5
    assert engine.generate(given, max_new_tokens=20).tokens == tokens


# ---- a model that changes -------------------------------------------------------------------------------


def test_weights_that_move_are_followed_and_captured_again() -> None:
    """A graph knows addresses: what moves nothing leaves it, and what moves weights replaces it."""
    model, (prompt,) = made("llama"), prompts(10)
    engine = decoder(model)
    before = engine.generate([prompt], max_new_tokens=24).tokens
    captured = dict(engine._graphs)
    ck.compare(model, torch.tensor([prompt], device="cuda"))
    with ck.patch(model):
        pass
    assert engine.generate([prompt], max_new_tokens=24).tokens == before and engine._graphs == captured
    for scale in (-0.9, 1.1):
        given = {name: scale * t for name, t in model.state_dict().items()}
        model.load_state_dict(given, assign=True)
        (tokens,) = engine.generate([prompt], max_new_tokens=24).tokens
        check_greedy(model, widened(model), prompt, tokens)
        assert engine._graphs.keys() == captured.keys() and not {*engine._graphs.values()} & {*captured.values()}


def test_threads_generate_what_one_does() -> None:
    """One captures while others wait; requests come from a tensor on the device meanwhile."""
    engine, given = decoder(made("qwen2")), prompts(10, 20, 30)
    rows = [torch.tensor(prompt, device="cuda") for prompt in given]
    calls = [lambda i=i: engine.generate(given[i:] + given[:i], max_new_tokens=12).tokens for i in range(3)]
    added = [lambda row=row: engine.add(row, max_new_tokens=4) for row in rows]
    results = at_once(*calls, *added)
    finish(engine)
    for number in results[3:]:
        assert len(engine.result(number)) == 4
    assert [[len(row) for row in tokens] for tokens in results[:3]] == [[12] * 3] * 3
    assert at_once(*calls) == [call() for call in calls]


# ---- sampling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [DRAWN, PENALIZED], ids=["drawn", "penalty"])
def test_a_seed_gives_the_same_tokens(sampling: Sampling) -> None:
    engine, (prompt,) = decoder(made("qwen2")), prompts(10)
    first, second = (engine.generate([prompt] * 3, max_new_tokens=24, sampling=sampling).tokens for _ in range(2))
    assert first == second
    assert len({tuple(row) for row in first}) == 3, "requests of one call have seeds of their own"


def test_random_numbers_are_those_of_the_cpu() -> None:
    seeds, positions = torch.arange(0, 2**62, 2**55), torch.arange(128, dtype=torch.int32)
    assert torch.equal(uniform(seeds.cuda(), positions.cuda()).cpu(), uniform(seeds, positions))


@pytest.fixture(autouse=True)
def no_graphs_left() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_cache_in_fp8_holds_what_one_in_16_bits_does(family: str) -> None:
    """A prompt in chunks and captured steps; the first layer's keys and values see no rounding but their own."""
    model, given = made(family), prompts(40, 9)
    engines = [decoder(model, chunk=16, kv_cache=kind) for kind in (None, "fp8")]  # type: ignore[arg-type]
    for engine in engines:
        for prompt in given:
            engine.add(prompt, max_new_tokens=30)
        for _ in range(4):
            engine.step()
    plain, fp8 = (engine._caches[0] for engine in engines)
    assert fp8.k_scale is not None and fp8.v_scale is not None
    assert torch.equal(plain.lengths, fp8.lengths)
    for b, prompt in enumerate(given):
        for name, scale in (("k_cache", fp8.k_scale), ("v_cache", fp8.v_scale)):
            rows = []
            for cache in (plain, fp8):
                assert cache.page_table is not None
                pages = cache.page_table[b, : -(-len(prompt) // 16)].long()
                numbers = getattr(cache, name)[pages].double()
                if cache is fp8:
                    numbers *= 2.0 ** (scale[pages].double() - 127).transpose(1, 2).unsqueeze(-1)
                rows.append(numbers.flatten(0, 1)[: len(prompt)])
            bound = torch.maximum(rows[0].abs() / 16, rows[0].abs().amax(-1, keepdim=True) / 2**17)
            assert ((rows[1] - rows[0]).abs() <= bound * 1.001).all()
    for engine in engines:
        finish(engine)


def test_tokens_in_fp8_depend_on_no_request_before_or_beside() -> None:
    """Behind requests under weights of another size, and beside others in a step of as many: the same tokens."""
    model, given = made("llama"), prompts(40, 9, 70, 25)
    used = decoder(model, kv_cache="fp8", chunk=16)
    for factor in (64.0, 1 / 64):
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.v_proj.weight.mul_(factor)
                layer.self_attn.o_proj.weight.mul_(1 / factor)
        used.generate(given[::-1], max_new_tokens=5)
    for order in ([0], [3, 1, 2, 0], [2, 3], [2, 1]):
        listed = [given[i] for i in order]
        fresh = decoder(model, kv_cache="fp8", chunk=16).generate(listed, max_new_tokens=12).tokens
        assert used.generate(listed, max_new_tokens=12).tokens == fresh, order
    pairs = [used.generate([given[2], given[i]], max_new_tokens=12).tokens[0] for i in (3, 1, 0)]
    assert pairs[0] == pairs[1] == pairs[2]
