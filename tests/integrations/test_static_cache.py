"""A patched model over transformers' ``StaticCache``: what it passes for a mask, eager, traced and in ``generate``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from transformers import StaticCache

import cutekernels as ck
from cutekernels.integrations.transformers import attention as integrated
from tests.integrations import tiny
from tests.traced import Graphs

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's, where it compiles
ROOM = 24
# Before, transformers wrote a prompt's mask out, which costs time alone: generated tokens are compared on all versions.
reads_no_mask = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 14),
    reason="from transformers 5.14 on a prompt over a static cache may have no mask",
)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor | None]]:
    """The mask that each call of attention gets."""
    seen: list[Tensor | None] = []
    attend = integrated.attend

    def kept(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        seen.append(mask)
        return attend(module, q, k, v, mask, **options)

    monkeypatch.setattr(integrated, "attend", kept)
    integrated.register_attention.cache_clear()
    integrated.register_attention()
    yield seen
    monkeypatch.undo()
    integrated.register_attention.cache_clear()
    integrated.register_attention()


def tokens() -> Tensor:
    return torch.randint(1, 96, (2, 20), generator=torch.Generator().manual_seed(3))


def parts(model: Any, ids: Tensor, *ends: int, forward: Any = None, **options: Any) -> list[Tensor]:
    """Logits of consecutive parts of ``ids``, the first up to ``ends[0]``, over one cache that has been used."""
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    with torch.no_grad():
        model(ids[:, :1], past_key_values=cache)  # allocates it
        cache.reset()
        run = model if forward is None else forward
        return [
            run(ids[:, begin:end], past_key_values=cache, **{n: v[:, :end] for n, v in options.items()}).logits
            for begin, end in zip((0, *ends), ends, strict=False)
        ]


def close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@reads_no_mask
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_later_tokens_count_keys(family: str, masks: list[Tensor | None]) -> None:
    model, ids = tiny.model(family), tokens()
    expected = parts(model, ids, 12, 18, 19, 20)
    layers = model.config.num_hidden_layers
    with ck.patch(model):
        got = parts(model, ids, 12, 18, 19, 20)
    close(got, expected)
    assert masks[layers : 2 * layers] == [None] * layers, "the first part is a causal band"
    counted = [m.flatten().tolist() for m in masks[2 * layers :] if m is not None and m.dtype == torch.int32]
    assert counted == [[n, n] for n in (18, 19, 20) for _ in range(layers)]


@reads_no_mask
def test_padding_and_gradients_keep_the_mask(masks: list[Tensor | None]) -> None:
    model, ids = tiny.model("llama"), tokens()
    seen = torch.ones_like(ids)
    ones = parts(model, ids, 12, 20, attention_mask=seen)
    seen[0, :4] = 0
    padded = parts(model, ids, 12, 20, attention_mask=seen)
    with ck.patch(model):
        got = parts(model, ids, 12, 20, attention_mask=torch.ones_like(ids))
        assert masks[-1] is not None and masks[-1].dtype == torch.int32
        close(got, ones)
        got = parts(model, ids, 12, 20, attention_mask=seen)
        assert masks[-1] is not None and masks[-1].dtype == torch.bool
        close(got[1:], padded[1:])  # the tokens behind the padding
        cache = StaticCache(config=model.config, max_cache_len=ROOM)
        with torch.no_grad():
            model(ids[:, :12], past_key_values=cache)
        model(ids[:, 12:], past_key_values=cache).logits.sum().backward()
        assert masks[-1] is not None and masks[-1].dtype == torch.bool


@reads_no_mask
def test_a_prompt_as_long_as_the_cache_reads_no_mask() -> None:
    """Traced, the cache's offset is a tensor; a step behind a prompt runs the decode kernel."""
    graphs = Graphs()
    torch.compiler.reset()
    model = tiny.model("llama")
    ids = torch.cat((tokens(), tokens()[:, : ROOM - 20]), 1)
    expected = parts(model, ids, ROOM), parts(model, ids, 12, 13)
    layers = model.config.num_hidden_layers
    with ck.patch(model):
        traced = torch.compile(model, fullgraph=True, dynamic=False, backend=aot_autograd(fw_compiler=graphs.backend))
        close(parts(model, ids, ROOM, forward=traced), expected[0])
        whole = tiny.masks_of(graphs.seen[-1])
        assert whole == [None] * layers
        close(parts(model, ids, 12, 13, forward=traced), expected[1])
        for graph in graphs.seen[1:]:
            nodes = [n for n in graph.graph.nodes if n.target is torch.ops.cutekernels._decode_attention.default]
            assert len(nodes) == layers


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
def test_generated_tokens(family: str) -> None:
    model, ids = tiny.model(family), tokens()
    seen = torch.ones_like(ids)
    seen[0, :3] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    for given in ({}, {"attention_mask": seen}):
        expected = model.generate(ids, **options, **given)
        with ck.patch(model):
            assert torch.equal(model.generate(ids, **options, **given), expected)
