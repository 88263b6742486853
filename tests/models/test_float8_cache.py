"""``Decoder(kv_cache="fp8")`` on tiny models: logits near those of the model, scales of checkpoints and of prompts."""

from __future__ import annotations

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
PROMPTS = [[5, 9, 3, 77, 21, 4, 8, 100, 12], [7, 2, 90]]
K, V = torch.tensor(0.03), torch.tensor(0.02)
# What a checkpoint may hold, behind a layer's self_attn, and what it means for keys and values.
NAMES: dict[str, tuple[dict[str, Tensor], tuple[float, float]]] = {
    "of the module": ({"k_scale": K, "v_scale": V}, (0.03, 0.02)),
    "of the projections": ({"k_proj.k_scale": K[None], "v_proj.v_scale": V[None]}, (0.03, 0.02)),
    "of the joined projection": ({"qkv_proj.k_scale": K, "qkv_proj.v_scale": V}, (0.03, 0.02)),
    "deprecated": ({"kv_scale": K}, (0.03, 0.03)),
    "deprecated beside another": ({"kv_scale": K, "v_scale": V}, (0.03, 0.02)),
}


def model() -> Any:
    return tiny.model("llama", num_hidden_layers=2)


def logits(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[list[int]]]:
    """Of every token that is chosen, and the tokens."""
    found, take = [], decoder._choices.take

    def kept(logits: Tensor, *rest: Any, **into: Any) -> Tensor:
        found.append(logits[:1])
        return take(logits, *rest, **into)

    monkeypatch.setattr(decoder._choices, "take", kept)
    tokens = decoder.generate(PROMPTS[:1], max_new_tokens=8).tokens
    return torch.cat(found).double(), tokens


def scales(decoder: Decoder) -> list[tuple[list[float], list[float]]]:
    return [(c.k_scale.tolist(), c.v_scale.tolist()) for c in decoder._caches]  # type: ignore[union-attr]


@pytest.mark.parametrize("chunk", [4, 2048])
def test_logits_are_near_those_of_the_model(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, tokens = logits(
        Decoder.from_transformers(whole := model(), **SIZES, chunk=chunk, kv_cache="fp8"), monkeypatch
    )
    with torch.no_grad():
        expected = whole(torch.tensor([PROMPTS[0] + tokens[0]])).logits[0, len(PROMPTS[0]) - 1 : -1].double()
    assert 1e-5 < float((ours - expected).abs().max() / expected.abs().max()) < 1 / 16


def test_requests_share_the_first_prompt_s_scales() -> None:
    decoder = Decoder.from_transformers(model(), **SIZES, kv_cache="fp8")
    first = decoder.generate(PROMPTS[:1], max_new_tokens=6).tokens
    taken = scales(decoder)
    assert len({*taken[0][0], *taken[1][0]}) == 4, "each layer's heads have their own"
    assert decoder.generate(PROMPTS, max_new_tokens=6).tokens[:1] == first
    assert scales(decoder) == taken
    for cache in decoder._caches:
        cache.check()


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_a_checkpoint_are_read_under_every_name(name: str, tmp_path: Path) -> None:
    held, expected = NAMES[name]
    model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.1.self_attn.{suffix}": t for suffix, t in held.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    decoder = Decoder.from_pretrained(tmp_path, **SIZES, kv_cache="fp8", progress=False)
    assert scales(decoder)[1] == tuple([[pytest.approx(x)] * 2 for x in expected])
    decoder.generate(PROMPTS, max_new_tokens=2)
    assert scales(decoder)[1] == tuple([[pytest.approx(x)] * 2 for x in expected])
    assert scales(decoder)[0][0] != [1.0, 1.0], "the other layer's are of the first prompt"
    assert Decoder.from_pretrained(tmp_path, **SIZES, progress=False)._caches[1].k_scale is None


def test_scales_of_a_module_of_transformers() -> None:
    given = model().bfloat16()
    given.model.layers[0].self_attn.k_scale = torch.nn.Parameter(torch.tensor([0.5, 0.25]), requires_grad=False)
    given.model.layers[0].self_attn.v_proj.v_scale = torch.tensor(2.0)
    decoder = Decoder.from_transformers(given, **SIZES, kv_cache="fp8")
    assert scales(decoder)[0] == ([0.5, 0.25], [2.0, 2.0])
    del given.model.layers[0].self_attn.v_proj.v_scale
    with pytest.raises(UnsupportedProblem, match="come together"):
        Decoder.from_transformers(given, **SIZES, kv_cache="fp8")
    Decoder.from_transformers(given, **SIZES)


def test_check_names_what_is_too_large_while_a_request_runs() -> None:
    given = model()
    given.model.layers[1].self_attn.kv_scale = torch.tensor(1e-6)
    decoder = Decoder.from_transformers(given, **SIZES, kv_cache="fp8")
    number = decoder.add(PROMPTS[0], max_new_tokens=4)
    decoder.check()
    decoder.step()
    with pytest.raises(UnsupportedProblem, match="448 times their scale, by sequence: {0: "):
        decoder.check()
    decoder.cancel(number)
    decoder.check()


def test_refusals() -> None:
    with pytest.raises(UnsupportedProblem, match="kv_cache is \"fp8\", or None .*got 'int8'"):
        Decoder.from_transformers(model(), **SIZES, kv_cache="int8")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedProblem, match="multiple of 16, .* it is 8"):
        Decoder.from_transformers(tiny.model("llama", head_dim=8), **SIZES, kv_cache="fp8")
