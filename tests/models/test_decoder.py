"""``Decoder`` on tiny models: transformers' greedy tokens, requests that come and go, seeds, and clear refusals."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cutekernels.errors import UnsupportedProblem
from cutekernels.kv_cache import KVCache
from cutekernels.models import Decoder, Sampling
from cutekernels.models.sampling import Choices, uniform
from cutekernels.models.weights import Attention, LayerWeights, SharedMoE, Weights
from cutekernels.nn import MoE
from tests.integrations import tiny
from tests.models.near_ties import following, widened
from tests.traced import Recording

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
ADDED = ("phi3", "granite", "olmo2", "smollm3", "starcoder2", "qwen2-moe", "glm4", "cohere2", "glm4-moe", "qwen3-vl")
# The family of tiny.py and what is changed, by name. Softcaps are small enough to count, and windows have 8 tokens.
# Gemma's tied heads make tiny models repeat their last token, so that some here have heads of their own.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "llama-bias", "qwen2", "qwen3", "mistral", "mixtral", "qwen3-moe")},
    **{name: (name, {}) for name in ADDED},
    "phi3-partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "qwen3-vl-tied": ("qwen3-vl", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "mixtral-window": ("mixtral", {"sliding_window": 8}),
    "qwen3-moe-dense": ("qwen3-moe", {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3-moe-sparse-step": (
        "qwen3-moe",
        {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 8},
    ),
    "glm4-moe-plain": (
        "glm4-moe",
        {
            "num_hidden_layers": 4,
            "first_k_dense_replace": 2,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": False,
            "norm_topk_prob": False,
            "attention_bias": True,
            "n_shared_experts": 1,
        },
    ),
    "gemma2-tied": ("gemma2", {}),
    "gemma2": (
        "gemma2",
        {"tie_word_embeddings": False, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3-tied": ("gemma3", {}),
    "gemma3-all-sliding-tied": ("gemma3", {"layer_types": ["sliding_attention"] * 2}),
    "gemma3": (
        "gemma3",
        {
            "tie_word_embeddings": False,
            "attn_logit_softcapping": 2.0,  # which its attention does not read
            "final_logit_softcapping": 3.0,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            },
        },
    ),
    "gemma4-tied": ("gemma4", {}),
    "gemma4": (
        "gemma4",
        {
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
        },
    ),
    "gemma4-inside": ("gemma4-inside", {"final_logit_softcapping": 3.0}),
    "gemma4-values": ("gemma4", {"tie_word_embeddings": False, "attention_k_eq_v": False}),
}
DRAWN = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=11)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small only wait for other threads, the more the busier the machine is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(name: str) -> Any:
    family, changes = MODELS[name]
    return tiny.model(family, **changes)


def prompts(*lengths: int, most: int = 131) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, most, (n,), generator=generator).tolist() for n in lengths]


def decoder(model: Any, **options: Any) -> Decoder:
    return Decoder.from_transformers(model, **({"max_batch": 4, "max_tokens": 128, "page_size": 16} | options))


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()


# ---- tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "qwen3-moe-sparse-step", *ADDED]
)  # for logits of all of them see below
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    """24 tokens for prompts shorter and longer than a window, a page and a chunk, more of them than slots."""
    model, given = made(name), prompts(1, 16, 50)
    expected = [greedy(model, prompt, 24) for prompt in given]
    ours = decoder(model, max_batch=2, chunk=20).generate(given, max_new_tokens=24)
    assert ours.tokens == expected
    assert ours.tokens_per_second > 0
    assert max(len({*tokens}) for tokens in expected) > 1, "a model that repeats itself would hide errors"
    assert greedy(model, given[1], 8) == expected[1][:8], "the model is as it was"


def distance(model: Any, engine: Decoder, monkeypatch: pytest.MonkeyPatch) -> float:
    """How far the logits behind 24 tokens are from transformers' own, in roundings of fp32 at the largest of them."""
    (prompt,), found = prompts(33), []
    take = engine._choices.take

    def kept(logits: torch.Tensor, *rest: Any, **into: Any) -> torch.Tensor:
        found.append(logits[:1])
        return take(logits, *rest, **into)

    monkeypatch.setattr(engine._choices, "take", kept)
    (tokens,) = engine.generate([prompt], max_new_tokens=24).tokens
    with torch.no_grad():
        expected = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return float((torch.cat(found) - expected).abs().max() / expected.abs().max()) * 2**23


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    assert distance(model, decoder(model, chunk=20), monkeypatch) <= 64


@pytest.mark.parametrize("name", ["glm4-moe", "qwen3-vl", "gemma4", "gemma4-inside"])
def test_in_bf16_logits_are_no_further_from_fp32_than_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, changes = MODELS[name]
    model, (prompt,), found = tiny.model(family, torch.bfloat16, **changes), prompts(33), []
    engine = decoder(model, chunk=20)
    take = engine._choices.take
    keep: Any = lambda x, *rest, **into: found.append(x[:1].float()) or take(x, *rest, **into)  # noqa: E731
    monkeypatch.setattr(engine._choices, "take", keep)
    (tokens,) = engine.generate([prompt], max_new_tokens=24).tokens
    expected = following(widened(model), prompt, tokens)
    theirs, ours = ((x - expected).norm() for x in (following(model, prompt, tokens), torch.cat(found)))
    assert 0 < ours <= (2.0 if name == "glm4-moe" else 1.25) * theirs < 0.1 * expected.norm()


Change = Callable[[Weights], Weights]


def of_layers(change: Callable[[LayerWeights], dict[str, Any]]) -> Change:
    return lambda w: dataclasses.replace(w, layers=tuple(dataclasses.replace(x, **change(x)) for x in w.layers))


def of_attention(change: Callable[[Attention], dict[str, Any]]) -> Change:
    return of_layers(lambda x: {"attention": dataclasses.replace(x.attention, **change(x.attention))})


def of_options(**options: Any) -> Change:
    return of_attention(lambda a: {"options": a.options | options})


def one_rotary_table(w: Weights) -> Weights:
    """The first layer's table, in all layers."""
    first = w.layers[0].attention
    return of_attention(lambda a: {"cos": first.cos, "sin": first.sin})(w)


def of_last(change: Callable[[LayerWeights], dict[str, Any]]) -> Change:
    """A change of the last layer alone."""
    return lambda w: dataclasses.replace(
        w, layers=(*w.layers[:-1], dataclasses.replace(w.layers[-1], **change(w.layers[-1])))
    )


def of_experts(change: Callable[[MoE], dict[str, Any]]) -> Change:
    """A change of the last layer's experts: attributes, or the correction of their router."""

    def changed(w: Weights) -> Weights:
        mlp = w.layers[-1].mlp
        assert isinstance(mlp, SharedMoE) and isinstance(mlp.routed, MoE)
        for name, value in change(mlp.routed).items():
            if name == "correction":
                mlp.routed.gate.e_score_correction_bias = value
            else:
                setattr(mlp.routed, name, value)
        return w

    return changed


def renormalized(w: Weights) -> Weights:
    for layer in w.layers:
        assert isinstance(layer.mlp, MoE) and not layer.mlp.renormalize
        layer.mlp.renormalize = True
    return w


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", lambda w: dataclasses.replace(w, softcap=None)),
        ("gemma2", of_options(softcap=None)),
        ("gemma2", of_options(window=None)),
        ("gemma2", of_options(window=(7, None))),
        ("gemma2", of_layers(lambda x: {"attention_out_norm": None})),
        ("gemma2", of_layers(lambda x: {"mlp_out_norm": None})),
        ("gemma2", of_layers(lambda x: {"mlp": dataclasses.replace(x.mlp, gate="gelu")})),
        ("gemma2-tied", lambda w: dataclasses.replace(w, embedding=dataclasses.replace(w.embedding, scale=None))),
        ("gemma3", of_options(softcap=2.0)),
        ("gemma3", of_attention(lambda a: {"q_norm": None, "k_norm": None})),
        ("gemma3", lambda w: of_attention(lambda a: {"cos": w.layers[0].attention.cos})(w)),
        ("qwen3-moe", renormalized),
        ("phi3", of_options(window=None)),
        ("granite", lambda w: dataclasses.replace(w, embedding=dataclasses.replace(w.embedding, scale=None))),
        ("granite", of_layers(lambda x: {"multiplier": None})),
        ("granite", lambda w: dataclasses.replace(w, scaling=None)),
        ("olmo2", of_layers(lambda x: {"mlp_out_norm": None})),
        ("olmo2", of_attention(lambda a: {"q_norm": None, "k_norm": None})),
        ("smollm3", one_rotary_table),
        ("smollm3", of_options(window=None)),
        ("starcoder2", of_layers(lambda x: {"mlp": dataclasses.replace(x.mlp, activation="silu")})),
        ("starcoder2", of_layers(lambda x: {"mlp_norm": dataclasses.replace(x.mlp_norm, bias=x.mlp_norm.bias * 0)})),
        ("qwen2-moe", of_layers(lambda x: {"mlp": x.mlp.routed})),
        ("qwen2-moe", of_options(window=None)),
        ("glm4", of_attention(lambda a: {"interleaved": False})),
        ("glm4", of_layers(lambda x: {"mlp_out_norm": None})),
        ("glm4-moe", of_experts(lambda m: {"correction": m.gate.e_score_correction_bias * 0})),
        ("glm4-moe", of_experts(lambda m: {"groups": (1, 1)})),
        ("glm4-moe", of_experts(lambda m: {"scaling": 1.0})),
        ("glm4-moe", of_last(lambda x: {"mlp": x.mlp.routed})),
        ("gemma4", of_layers(lambda x: {"scalar": None})),
        ("gemma4", of_attention(lambda a: {"v_norm": None})),
        ("gemma4", of_options(scale=0.25)),
        ("gemma4", one_rotary_table),
        ("cohere2", of_layers(lambda x: {"parallel": False})),
        ("cohere2", lambda w: dataclasses.replace(w, scaling=None)),
        ("cohere2", one_rotary_table),
        ("cohere2", of_attention(lambda a: {"interleaved": False})),
    ],
    ids=[
        "softcap-of-logits", "softcap-of-scores", "no-window", "window-everywhere", "norm-behind-attention",
        "norm-behind-mlp", "gate", "embedding-scale", "no-softcap-of-scores", "norms-of-heads", "one-rotary-table",
        "weights-of-experts", "phi3-window", "embedding-multiplier", "residual-multiplier", "logits-scaling",
        "norm-behind-alone", "whole-norms", "layers-without-rope", "smollm3-window", "activation", "bias-of-a-norm",
        "shared-expert", "qwen2-moe-window", "neighbours-that-turn", "glm4-norm-behind-mlp", "correction-of-a-router",
        "groups-of-experts", "scaling-of-experts", "experts-of-every-token", "scalar-of-a-layer", "norm-of-values",
        "scores-unscaled", "gemma4-one-rotary-table", "parallel", "logit-scale", "cohere2-layers-without-rope",
        "cohere2-neighbours-that-turn",
    ],
)  # fmt: skip
def test_what_a_family_has_of_its_own_counts(name: str, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece, left out or put where it does not belong, is seen in the logits."""
    model = made(name)
    engine = decoder(model, chunk=20)
    engine._w = change(engine._w)
    assert distance(model, engine, monkeypatch) > 640


def test_a_prompt_in_chunks_is_a_prompt_at_once() -> None:
    model, given = tiny.model("qwen3"), prompts(50)
    whole = decoder(model).generate(given, max_new_tokens=20).tokens
    for chunk in (1, 16, 17, 49):
        assert decoder(model, chunk=chunk).generate(given, max_new_tokens=20).tokens == whole


VIEWS = (
    "_unsafe_view",
    "slice",
    "select",
    "split_with_sizes",
    "unsqueeze",
    "flatten",
    "unflatten",
    "view",
    "reshape",
    "t",
    "to",
)
# Of tokens and logits; an empty tensor in the place of scales that a cache lacks.
OTHERS = ("argmax", "copy_", "mul", "div", "tanh", "new_empty")


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe-dense", "gemma2", "gemma3"])
def test_a_step_is_of_our_ops_and_waits_for_nothing(name: str) -> None:
    """No product of torch's, and nothing that reads a value back or has a shape that depends on one."""
    engine = decoder(made(name))
    engine.generate(prompts(5, 9), max_new_tokens=3)
    with Recording() as called:
        engine._decode(2, True)
    theirs = {op.split(".")[1] for op in called.seen if op.startswith("aten.")}
    assert theirs <= {*VIEWS, *OTHERS}
    experts = {"moe_route", "moe_permute", "moe_gather", "grouped_gemm", "moe_combine"}
    ours = {op.split(".")[1].lstrip("_") for op in called.seen if op.startswith("cutekernels.")}
    assert (experts & ours) == (experts if name in ("mixtral", "qwen3-moe-dense") else set())
    assert {"embedding", "rms_norm", "add_rms_norm", "gemm", "kv_append", "decode_attention"} <= ours


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("llama", Sampling()),
        ("llama", DRAWN),
        ("llama", Sampling(temperature=1.2, presence_penalty=3.0, seed=2)),
        ("qwen3-moe", Sampling()),
        ("gemma3", Sampling()),
    ],
)
def test_a_request_gets_the_same_tokens_in_any_company(name: str, sampling: Sampling) -> None:
    """Others join while it runs, stop early and leave; slots and pages are used again."""
    engine = decoder(made(name), max_batch=3)
    first, *others = prompts(20, 5, 30, 12, 9)
    alone = engine.add(first, max_new_tokens=18, sampling=sampling)
    while not engine.idle:
        engine.step()
    expected = engine.result(alone)
    assert len(expected) == 18
    for others_first in (False, True):
        numbers = [engine.add(p, max_new_tokens=3 + 4 * i) for i, p in enumerate(others[:2])] if others_first else []
        request = engine.add(first, max_new_tokens=18, sampling=sampling)
        engine.step()
        numbers += [engine.add(p, max_new_tokens=5 + i, sampling=DRAWN) for i, p in enumerate(others)]
        while not engine.idle:
            engine.step()
        assert engine.finished == sorted([request, *numbers])
        assert engine.result(request) == expected
        for number in numbers:
            engine.result(number)
    assert engine._caches[0].free_pages == 3 * 8


def test_stop_tokens_end_a_request() -> None:
    model, (prompt,) = tiny.model("llama"), prompts(10)
    whole = greedy(model, prompt, 40)
    stop = whole[17]
    engine = decoder(model)
    cut = whole[: whole.index(stop) + 1]
    assert engine.generate([prompt, prompts(10, 4)[1]], max_new_tokens=40, stop=(stop,)).tokens[0] == cut
    assert engine.generate([prompt], max_new_tokens=40).tokens == [whole], "its slot and pages are free again"


@pytest.mark.parametrize("kind", ["one", "list", "config", "tokenizer"])
def test_requests_end_where_transformers_ends_them(kind: str) -> None:
    """At the model's end-of-sequence tokens and the tokenizer's, unless others are given, or none."""
    model, (prompt,) = tiny.model("llama"), prompts(10)
    whole = greedy(model, prompt, 40)
    end = whole[17]
    cut = whole[: whole.index(end) + 1]
    assert len(cut) < 40
    tokenizer = type("Tokenizer", (), {"eos_token_id": end, "batch_decode": list, "__call__": None})()
    engine = decoder(model, tokenizer=tokenizer if kind == "tokenizer" else None)
    if kind != "tokenizer":  # as users set it, after the decoder was made
        model.generation_config.eos_token_id = {"one": end, "list": [end, 130, 10**6]}.get(kind)
        assert greedy(model, prompt, 40) == (whole if kind == "config" else cut)
    if kind == "config":
        assert engine.generate([prompt], max_new_tokens=40).tokens == [whole]
        model.generation_config, model.config.eos_token_id = None, end
    assert engine.generate([prompt], max_new_tokens=40).tokens == [cut]
    number = engine.add(prompt, max_new_tokens=40)
    while not engine.idle:
        engine.step()
    assert engine.result(number) == cut
    assert engine.generate([prompt], max_new_tokens=40, stop=()).tokens == [whole]
    assert engine.generate([prompt], max_new_tokens=40, stop=(whole[2],)).tokens == [whole[: whole.index(whole[2]) + 1]]


def test_seeds() -> None:
    engine, (prompt,) = decoder(tiny.model("qwen2")), prompts(10)
    results = [
        engine.generate([prompt], max_new_tokens=30, sampling=Sampling(1.0, seed=s)).tokens[0] for s in (1, 1, 2)
    ]
    assert results[0] == results[1] != results[2]
    many = engine.generate([prompt] * 4, max_new_tokens=30, sampling=Sampling(1.0, seed=0)).tokens
    assert many[1] == results[0] and len({tuple(tokens) for tokens in many}) == 4


# ---- sampling -------------------------------------------------------------------------------------------


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]).expand(4096, 5)
    choices = Choices(4096, 5, torch.device("cpu"))
    for slot in range(4096):
        choices.put(slot, Sampling(temperature=1.0, seed=slot))
    drawn = choices.take(logits, torch.zeros(4096, dtype=torch.int32), slice(0, 4096), False)
    shares = torch.bincount(drawn, minlength=5).double() / 4096
    torch.testing.assert_close(shares, logits[0].double().softmax(-1), atol=0.03, rtol=0)
    assert (drawn == choices.take(logits, torch.zeros(4096, dtype=torch.int32), slice(0, 4096), False)).all()


def test_filters_penalty_and_zero_temperature() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    positions = torch.zeros(1, dtype=torch.int32)

    def tokens(sampling: Sampling, draws: int) -> list[int]:
        choices = Choices(1, 4, torch.device("cpu"))
        choices.put(0, sampling)
        return [int(choices.take(logits, positions + i, slice(0, 1), sampling.greedy)) for i in range(draws)]

    assert tokens(Sampling(), 3) == [0, 0, 0]
    assert set(tokens(Sampling(1.0, top_k=2), 200)) == {0, 1}
    assert set(tokens(Sampling(1.0, min_p=0.3), 200)) == {0, 1}
    assert tokens(Sampling(0.0, presence_penalty=10.0), 4) == [0, 1, 2, 3]


def test_uniform_numbers_are_uniform_and_apart() -> None:
    numbers = uniform(torch.arange(1000)[:, None], torch.arange(100)[None])
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.005
    assert numbers.unique().numel() > 99_000
    assert abs(float(torch.corrcoef(torch.stack([numbers[:, :-1].flatten(), numbers[:, 1:].flatten()]))[0, 1])) < 0.02


@pytest.mark.parametrize("penalty", [0.0, -1e6])
def test_the_least_temperature_is_as_good_as_greedy(penalty: float) -> None:
    engine, (prompt,) = decoder(tiny.model("llama")), prompts(10)
    given = {"max_new_tokens": 1 if penalty else 12}
    expected = engine.generate([prompt], **given).tokens
    cold = Sampling(1e-30, presence_penalty=penalty)
    assert engine.generate([prompt], sampling=cold, **given).tokens == expected
    logits, choices = torch.tensor([[3.0, 2.0, 4.0]]), Choices(1, 3, torch.device("cpu"))
    choices.put(0, cold)
    choices.seen[0, 1] = True
    taken = choices.take(logits, torch.zeros(1, dtype=torch.int32), slice(0, 1), False)
    assert taken.tolist() == [1 if penalty else 2]


# ---- memory ---------------------------------------------------------------------------------------------


def test_weights_are_in_memory_once() -> None:
    model = tiny.model("llama")
    engine = decoder(model)
    layer, own = model.model.layers[0], engine._w.layers[0]
    assert layer.self_attn.k_proj.weight.data_ptr() == own.attention.qkv.weight[64:].data_ptr()
    assert layer.mlp.up_proj.weight.data_ptr() == own.mlp.gate_up.weight[96:].data_ptr()
    second = decoder(model)._w.layers[0]
    assert second.attention.qkv.weight.data_ptr() == own.attention.qkv.weight.data_ptr(), "they lie so already"
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(0.5)
    given = prompts(9)
    assert engine.generate(given, max_new_tokens=12).tokens == [greedy(model, given[0], 12)], "updates are seen"


def test_experts_and_tied_heads_are_in_memory_once() -> None:
    model = tiny.model("qwen3-moe", tie_word_embeddings=True)
    own, block = decoder(model)._w, model.model.layers[1].mlp
    assert own.layers[1].mlp.experts.gate_up_proj is block.experts.gate_up_proj
    assert own.head.weight.data_ptr() == own.embedding.weight.data_ptr() == model.lm_head.weight.data_ptr()


def test_requests_wait_for_pages() -> None:
    """Four pages of 16 tokens for three requests of two pages each: two run, the third waits."""
    model, given = tiny.model("llama"), prompts(10, 11, 12)
    engine = decoder(model, pages=4)
    numbers = [engine.add(prompt, max_new_tokens=20) for prompt in given]
    engine.step()
    engine.step()
    assert [len(engine.tokens_of(n)) > 0 for n in numbers] == [True, True, False]
    while not engine.idle:
        engine.step()
    assert [engine.result(n) for n in numbers] == [greedy(model, prompt, 20) for prompt in given]


def test_layers_of_a_cache_share_pages_and_empty_together() -> None:
    first, second = KVCache.layers(2, 3, 64, 2, 8, pages=6, page_size=16, dtype=torch.float32, device="cpu")
    first[1].reserve(40)
    k = torch.randn(3, 20, 2, 8)
    counts = torch.tensor([0, 20, 0], dtype=torch.int32)
    for cache in (first, second):
        cache.append(k, k, counts=counts)
    assert second.page_table is first.page_table
    assert first.lengths.tolist() == second.lengths.tolist() == [0, 20, 0]
    assert first.free_pages == 3
    first[1].reset()
    assert first.lengths.tolist() == second.lengths.tolist() == [0, 0, 0]
    assert first.free_pages == 6


# ---- requests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [16, 64])
def test_max_tokens_bounds_a_request_within_its_last_page(page_size: int) -> None:
    """The rotary tables end at ``max_tokens``, though the last page has room for more."""
    model, (prompt,) = tiny.model("llama"), prompts(40)
    engine = decoder(model, max_tokens=100, page_size=page_size)
    with pytest.raises(UnsupportedProblem, match="101, and the cache holds 100"):
        engine.add(prompt, max_new_tokens=61)
    assert engine.generate([prompt], max_new_tokens=60).tokens == [greedy(model, prompt, 60)]


def test_a_tensor_is_one_prompt() -> None:
    engine = decoder(tiny.model("llama"))
    expected = engine.generate([[1, 2, 3]], max_new_tokens=4).tokens
    row = torch.tensor([1, 2, 3])
    for same in (row, row[None], row.numpy()):
        assert engine.generate([same], max_new_tokens=4).tokens == expected
    for several in (row.expand(2, 3), row[0]):
        with pytest.raises(UnsupportedProblem, match="a prompt is one sequence"):
            engine.add(several)
    rows = row.expand(2, 3)
    assert engine.generate(rows, max_new_tokens=4).tokens == expected * 2
    assert engine.generate((list(r) for r in rows.tolist()), max_new_tokens=4).tokens == expected * 2  # type: ignore[arg-type]
    assert engine.generate([array.array("q", [1, 2, 3])], max_new_tokens=4).tokens == expected


def test_text_and_progress() -> None:
    class Tokenizer:
        def __call__(self, text: str) -> Any:
            return type("Encoded", (), {"input_ids": [ord(c) for c in text]})

        def batch_decode(self, tokens: list[list[int]]) -> list[str]:
            return [" ".join(map(str, row)) for row in tokens]

    engine = decoder(tiny.model("llama"), tokenizer=Tokenizer())
    result = engine.generate(["hello", [104, 105]], max_new_tokens=4, progress=True)
    assert result.texts == [" ".join(map(str, row)) for row in result.tokens]


# ---- modes around it ------------------------------------------------------------------------------------


def test_autocast_around_a_decoder_changes_nothing() -> None:
    model = tiny.model("qwen3")
    expected = decoder(model).generate([[1, 2, 3]], max_new_tokens=6).tokens
    with torch.autocast("cpu", torch.bfloat16):
        assert decoder(model).generate([[1, 2, 3]], max_new_tokens=6).tokens == expected


def test_made_in_inference_mode_and_used_outside_of_it() -> None:
    model = tiny.model("qwen3")
    with torch.inference_mode():
        made = decoder(model)
    assert made.generate([[1, 2, 3]], max_new_tokens=6).tokens == [greedy(model, [1, 2, 3], 6)]


def test_another_default_device() -> None:
    model = tiny.model("qwen3")
    made, expected = decoder(model), greedy(model, [1, 2, 3], 6)
    with torch.device("meta"):
        assert made.generate([[1, 2, 3]], max_new_tokens=6).tokens == [expected]
