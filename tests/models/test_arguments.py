"""Arguments that a decoder and ``Sampling`` refuse, each with its rule, the value and a remedy."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.models import Sampling, arguments
from tests.integrations import tiny
from tests.models.test_decoder import decoder

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 2.5}, "top_k"),
        ({"temperature": 1e-45}, "number from 1e-30 to 3.4e.38.* it is 1e-45: pass 0"),
        ({"temperature": 1e300}, "number from 1e-30 to 3.4e.38"),
        ({"presence_penalty": -1e38}, "presence_penalty as a finite number from -1e.06 to 1e.06"),
        ({"top_p": 1.5}, "top_p as a finite number from 0 to 1"),
        ({"min_p": -0.1}, "min_p"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_sampling_is_refused(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rule):
        Sampling(**options)


def test_numpys_numbers_are_numbers() -> None:
    given = Sampling(np.float32(0.5), np.int32(40), np.float16(0.5), np.float32(0.0), np.float64(1.5), np.int64(7))  # type: ignore[arg-type]
    assert given == Sampling(0.5, 40, 0.5, 0.0, 1.5, 7)
    assert [type(value) for value in vars(given).values()] == [float, int, float, float, float, int]
    for wrong in ({"top_k": np.float32(3)}, {"temperature": np.bool_(True)}, {"seed": np.int64(-1)}):
        with pytest.raises(UnsupportedProblem, match=next(iter(wrong))):
            Sampling(**wrong)
    stop = arguments.stop_tokens([np.int64(7), np.uint8(3), 5], 131)
    assert stop == {3, 5, 7} and {type(token) for token in stop} == {int}
    engine = decoder(tiny.model("llama"))
    prompt: list[Any] = [np.int64(1), np.int32(2), 3]
    found = engine.generate([prompt], max_new_tokens=np.int64(2)).tokens  # type: ignore[arg-type]
    assert found == engine.generate([[1, 2, 3]], max_new_tokens=2).tokens


def test_the_last_seed_has_one_behind_it() -> None:
    found = decoder(tiny.model("llama")).generate([[1], [2]], max_new_tokens=2, sampling=Sampling(1.0, seed=2**63 - 1))
    assert [len(tokens) for tokens in found.tokens] == [2, 2]


@pytest.mark.parametrize(
    ("prompt", "options", "rule"),
    [
        ([], {}, "it is empty"),
        ([1, 131], {}, "one is 131"),
        ([1, -1], {}, "one is -1"),
        ([1.5], {}, r"one is 1\.5"),
        ("text", {}, "tokenizer"),
        ([1] * 100, {"max_new_tokens": 29}, "129, and the cache holds 128"),
        ([1], {"max_new_tokens": 0}, "from 1 up"),
        ([1], {"stop": 3}, "stop is token ids"),
        ([1], {"stop": [np.int64(131)]}, r"from 0 to 130"),
        ([1], {"stop": [np.float32(3)]}, "stop is token ids"),
        ([1], {"stop": [np.bool_(True)]}, "stop is token ids"),
        ([1], {"stop": ["x"]}, "stop is token ids"),
        ([1], {"stop": [131]}, r"from 0 to 130; got \[131\]"),
        ([1], {"stop": torch.tensor([1, 2])}, "a tensor of shape"),
        ([1], {"stop": {1: 2}}, r"in a list, a tuple or a set, .*; got \{1: 2\}: pass"),
        ([1], {"stop": {}}, r"stop is token ids.*got \{\}"),
        ([1], {"stop": ""}, "stop is token ids.*got ''"),
        ([1], {"stop": b"ab"}, "stop is token ids.*got b'ab'"),
        ([1], {"stop": iter([1])}, "stop is token ids.*got <list_iterator"),
        ([1], {"stop": [True]}, r"stop is token ids.*got \[True\]"),
        ([1], {"stop": [[1]]}, r"stop is token ids.*got \[\[1\]\]"),
        (None, {}, "a prompt as token ids.*got None: pass a list"),
        (1, {}, "a prompt as token ids.*got 1"),
        ({1, 2}, {}, r"a prompt as token ids.*got \{1, 2\}"),
        ({"input_ids": [1]}, {}, "a prompt as token ids.*pass its input_ids"),
        (b"ab", {}, "a prompt as token ids.*b'ab'"),
        (torch.tensor([1, 2], device="meta"), {}, "with values; got a tensor on the meta device"),
        (torch.tensor([1.0]), {}, r"one is 1\.0"),
        ([1], {"sampling": 1}, "a Sampling or None; got 1: pass"),
        ([1], {"sampling": {}}, r"a Sampling or None; got \{\}"),
        ([1], {"sampling": "x"}, "a Sampling or None; got 'x'"),
        ([1], {"sampling": Sampling}, "a Sampling or None; got <class"),
    ],
)
def test_wrong_requests_are_refused_and_nothing_is_lost(prompt: Any, options: dict[str, Any], rule: str) -> None:
    engine = decoder(tiny.model("llama"))
    with pytest.raises(UnsupportedProblem, match=rule):
        engine.add(prompt, **({"max_new_tokens": 10} | options))
    assert engine.idle and engine.finished == []
    with pytest.raises(KeyError, match="no request 0"):
        engine.result(0)


def test_generate_queues_all_prompts_or_none() -> None:
    engine = decoder(tiny.model("llama"))
    other = engine.add([5, 6], max_new_tokens=3)
    for wrong in ([500], []):
        with pytest.raises(UnsupportedProblem, match="a prompt is token ids"):
            engine.generate([[1, 2], [3], wrong], max_new_tokens=4)
    with pytest.raises(UnsupportedProblem, match="tokens and 500 new ones"):
        engine.generate([[1, 2], [3]], max_new_tokens=500)
    with pytest.raises(UnsupportedProblem, match="stop is token ids"):
        engine.generate([[1, 2]], stop=3)  # type: ignore[arg-type]
    while not engine.idle:
        engine.step()
    assert engine.finished == [other]


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (None, "prompts as a list of prompts; got None"),
        (1, "prompts as a list of prompts; got 1"),
        ("text", "prompts as a list of prompts; got 'text'"),
        ({(1, 2), (3,)}, "prompts as a list of prompts; got"),
        (torch.tensor(1), "rows of a tensor; this has shape ()"),
        (torch.ones(1, 2, device="meta", dtype=torch.long), "got a tensor on the meta device"),
        ([1, 2], "a prompt as token ids.*got 1: pass a list"),
        ([[1, 2], None], "a prompt as token ids.*got None: pass a list"),
        ([[1, 2], {1, 2}], "a prompt as token ids.*got"),
    ],
    ids=["none", "number", "text", "set", "scalar", "meta", "ids", "none-within", "set-within"],
)
def test_wrong_prompts_are_refused_and_nothing_is_queued(given: Any, rule: str) -> None:
    engine = decoder(tiny.model("llama"))
    with pytest.raises(UnsupportedProblem, match=rule):
        engine.generate(given, max_new_tokens=2)
    for wrong in ({"sampling": {}}, {"stop": [131]}, {"progress": "x"}):
        with pytest.raises(UnsupportedProblem, match=next(iter(wrong))):
            engine.generate([[1, 2]], **wrong)  # type: ignore[arg-type]
    assert engine.idle


def other_architecture() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2))


def classifier() -> Any:
    config = tiny.model("gemma2").config
    return transformers.Gemma2ForSequenceClassification(config)


def other_linear() -> Any:
    model = tiny.model("gemma3")
    model.model.layers[1].self_attn.q_proj.__class__ = type("LoraLinear", (torch.nn.Linear,), {})
    return model


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def wrapped_experts() -> Any:
    model = tiny.model("qwen3-moe")
    experts = model.model.layers[1].mlp.experts
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", Doubled())
    return model


def dynamic(family: str) -> Any:
    own = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    nested = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": own}
    return tiny.model(family, rope_parameters=nested if family == "gemma3" else own)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (other_architecture, r"one of llama.*gemma4_text; this is model_type 'gpt2'.*route_sdpa"),
        (lambda: torch.nn.Linear(4, 4), "this is a Linear"),
        (lambda: types.SimpleNamespace(config=tiny.model("llama").config), "this is a SimpleNamespace"),
        (lambda: tiny.model("llama").to("meta"), "on the meta device: load it"),
        (classifier, "Gemma2ForSequenceClassification has no lm_head"),
        (other_linear, r"model\.layers\.1\.self_attn\.q_proj as a torch.*; it is a tests\..*LoraLinear: merge"),
        (wrapped_experts, "experts whose gate_up_proj and down_proj are plain parameters"),
        (lambda: dynamic("llama"), "rope_type is dynamic"),
        (lambda: dynamic("gemma3"), "rope_type is dynamic"),
        (lambda: tiny.model("gemma3", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (lambda: tiny.model("llama", hidden_act="relu"), "gates of SiLU and GELU; one is ReLU"),
        (lambda: tiny.model("mixtral", hidden_act="gelu"), "MoE's experts have the activation SiLU"),
        (lambda: tiny.model("mixtral", router_jitter_noise=0.1), "no noise in its router"),
    ],
    ids=[
        "architecture", "no-model", "no-module", "meta", "classifier", "adapter", "experts", "rope", "rope-of-a-layer",
        "bidirectional", "gate", "gate-of-experts", "jitter",
    ],
)  # fmt: skip
def test_other_models_are_refused(make: Callable[[], Any], rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rule):
        decoder(make())


def test_patched_models_and_wrong_sizes_are_refused() -> None:
    model = tiny.model("llama")
    with ck.patch(model), pytest.raises(UnsupportedProblem, match="unpatch first"):
        decoder(model)
    for name in ("max_batch", "max_tokens", "chunk"):
        with pytest.raises(UnsupportedProblem, match=name):
            decoder(model, **{name: 0})
    with pytest.raises(UnsupportedProblem, match="a page has 16, 32"):
        decoder(model, page_size=5)
    for name, values in {"page_size": (0, None, "16"), "pages": (0, "4", 2.0), "max_batch": (True,)}.items():
        for value in values:
            with pytest.raises(
                UnsupportedProblem, match=f"takes {name} as a whole number of at least 1; got {value!r}"
            ):
                decoder(model, **{name: value})
    for tokenizer in (1, "x", lambda text: text):
        with pytest.raises(UnsupportedProblem, match="takes tokenizer as a callable with batch_decode"):
            decoder(model, tokenizer=tokenizer)


@pytest.mark.parametrize(
    "sizes", [{"max_tokens": 2**40}, {"max_tokens": 2**40, "pages": 4}, {"max_batch": 2**40}, {"pages": 2**40}], ids=str
)
def test_more_than_the_memory_is_refused_before_it_is_allocated(sizes: dict[str, int]) -> None:
    with pytest.raises(UnsupportedProblem, match=r"take \d+ bytes, and cpu has \d+: pass smaller ones"):
        decoder(tiny.model("llama"), **sizes)


def test_the_bytes_that_a_decoder_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check counts the cache, both tables and the tokens seen, to the byte."""
    model = tiny.model("llama")
    engine = decoder(model, max_tokens=100)
    own = engine._w.layers[0].attention
    held = [own.cos, own.sin, engine._caches[0].page_table, engine._choices.seen]
    held += [t for cache in engine._caches for t in (cache.k_cache, cache.v_cache)]
    need = sum(t.nbytes for t in held if t is not None)
    monkeypatch.setattr(arguments, "free_bytes", lambda device: need)
    decoder(model, max_tokens=100)
    monkeypatch.setattr(arguments, "free_bytes", lambda device: need - 1)
    with pytest.raises(UnsupportedProblem, match=f"take {need} bytes, and cpu has {need - 1}"):
        decoder(model, max_tokens=100)
