"""``Decoder(kv_cache="fp8")`` on tiny models: logits near the model's, tokens that no other request has a part in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.models import Decoder
from tests.integrations import tiny

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SIZES: dict[str, Any] = {"max_batch": 2, "max_tokens": 64, "page_size": 16}
PROMPTS = [[5, 9, 3, 77, 21, 4, 8, 100, 12], [7, 2, 90], [1, 64, 3, 3, 9]]
# What a checkpoint may hold, behind a layer's self_attn.
NAMES = ("k_scale v_scale", "k_proj.k_scale v_proj.v_scale", "qkv_proj.k_scale qkv_proj.v_scale", "kv_scale", "k_scale")


def model() -> Any:
    return tiny.model("llama", num_hidden_layers=2)


def fp8(model: Any, **options: Any) -> Decoder:
    return Decoder.from_transformers(model, **SIZES, kv_cache="fp8", **options)


def tokens(decoder: Decoder, prompts: list[list[int]] = PROMPTS, count: int = 6) -> list[list[int]]:
    return decoder.generate(prompts, max_new_tokens=count).tokens


def logits(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[list[int]]]:
    """Logits of every token that is chosen, and the tokens."""
    found, take = [], decoder._choices.take

    def kept(logits: Tensor, *rest: Any, **into: Any) -> Tensor:
        found.append(logits[:1])
        return take(logits, *rest, **into)

    monkeypatch.setattr(decoder._choices, "take", kept)
    chosen = tokens(decoder, PROMPTS[:1], 8)
    return torch.cat(found).double(), chosen


@contextmanager
def values_times(model: Any, factor: float) -> Iterator[None]:
    """Values times ``factor``, which what follows undoes: a model of the same logits."""

    def multiply(factor: float) -> None:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.v_proj.weight.mul_(factor)
                layer.self_attn.o_proj.weight.div_(factor)

    multiply(factor)
    yield
    multiply(1 / factor)


@pytest.mark.parametrize("chunk", [4, 2048])
def test_logits_are_near_those_of_the_model(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, chosen = logits(fp8(whole := model(), chunk=chunk), monkeypatch)
    with torch.no_grad():
        expected = whole(torch.tensor([PROMPTS[0] + chosen[0]])).logits[0, len(PROMPTS[0]) - 1 : -1].double()
    assert 1e-5 < float((ours - expected).abs().max() / expected.abs().max()) < 1 / 16


def test_tokens_are_the_same_in_any_order_and_behind_any_prefix_of_requests() -> None:
    given = model()
    alone = [tokens(fp8(given), [prompt])[0] for prompt in PROMPTS]
    used = fp8(given)
    for order in permutations(range(3)):
        for count in (1, 2, 3):
            assert tokens(used, [PROMPTS[i] for i in order[:count]]) == [alone[i] for i in order[:count]]


@pytest.mark.parametrize("factor", [64.0, 2.0**-12])
def test_a_warm_up_under_values_of_another_size_changes_no_token(factor: float) -> None:
    given = model()
    fresh = tokens(fp8(given))
    with values_times(given, factor):
        warmed = fp8(given)
        tokens(warmed, [[100, 50]])
    assert tokens(warmed) == fresh
    with values_times(given, factor):  # powers of two: even the bits are those of before
        assert tokens(warmed) == tokens(fp8(given)) == fresh


def test_a_warm_up_on_zeros_changes_no_token() -> None:
    given = model()
    fresh, kept = tokens(fp8(given)), {name: p.clone() for name, p in given.named_parameters()}
    with torch.no_grad():
        for p in given.parameters():
            p.zero_()
    warmed = fp8(given)
    tokens(warmed)
    with torch.no_grad():
        for name, p in given.named_parameters():
            p.copy_(kept[name])
    assert tokens(warmed) == fresh


@pytest.mark.parametrize("names", NAMES)
def test_scales_of_a_checkpoint_are_read_and_not_needed(names: str, tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    plain = tokens(Decoder.from_pretrained(tmp_path, **SIZES, kv_cache="fp8", progress=False))
    held = load_file(tmp_path / "model.safetensors")
    held |= {f"model.layers.1.self_attn.{name}": torch.tensor(1e-6) for name in names.split()}
    save_file(held, tmp_path / "model.safetensors")
    assert tokens(Decoder.from_pretrained(tmp_path, **SIZES, kv_cache="fp8", progress=False)) == plain
    assert Decoder.from_pretrained(tmp_path, **SIZES, progress=False)._caches[1].k_scale is None
    given = model()
    given.model.layers[0].self_attn.k_scale = torch.nn.Parameter(torch.tensor([1e-6]), requires_grad=False)
    assert tokens(fp8(given)) == plain


def test_refusals() -> None:
    with pytest.raises(UnsupportedProblem, match="kv_cache is \"fp8\", or None .*got 'int8'"):
        Decoder.from_transformers(model(), **SIZES, kv_cache="int8")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedProblem, match="multiple of 16, .* it is 8"):
        fp8(tiny.model("llama", head_dim=8))
