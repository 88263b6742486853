"""``ck.patch`` on a GPU: errors beside transformers' own, tokens, gradients, ``torch.compile``, unpatching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

import cutekernels as ck
from tests import every_model
from tests.integrations import tiny
from tests.models.near_ties import check_greedy, routing_gap, widened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_seed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # torch's, where it imports its compiler
]
OWN: dict[str, dict[str, Any]] = {  # widths of experts, and of heads
    "qwen3-moe": {"moe_intermediate_size": 128},
    "qwen2-moe": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 192},
    "glm4-moe": {"moe_intermediate_size": 128, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "deepseek-v2": {"moe_intermediate_size": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64},
    "gemma4": {"global_head_dim": 64},
}
FAMILIES = tuple(family for family in tiny.FAMILIES if family != "llama-bias")
JOINED, LATENT = "phi3", "deepseek-v2"  # q, k and v stored as one; attention that stays transformers' own
PLAIN = ("llama", "qwen2", "qwen3", "gemma2", "phi3", "granite", "olmo2", "smollm3", "starcoder2", "glm4", "cohere2")
EXPERTS = ("mixtral", "gpt-oss", *(family for family in OWN if family != "gemma4"))
MOST = dict.fromkeys(FAMILIES, 1.25) | dict.fromkeys(EXPERTS, 2.0)  # errors beside transformers' own
TIE = 0.02  # a token so near another expert, in deviations of its scores, may be rounded to that one


def made(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return tiny.wide(family, dtype, **OWN.get(family, {}))


def ids(batch: int = 4, length: int = 50) -> Tensor:
    return tiny.tokens(batch, length).cuda()


def left_padded(batch: int, length: int) -> Tensor:
    mask = torch.ones((batch, length), dtype=torch.int64, device="cuda")
    mask[0, :7] = 0
    return mask


# ---- results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [7, 50, 200])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in EXPERTS])
def test_no_further_from_fp32_than_transformers(family: str, length: int) -> None:
    model = made(family)
    for mask in (None, left_padded(4, length)):
        found = ck.compare(model, {"input_ids": ids(4, length), "attention_mask": mask})
        assert 0 < found.patched["logits"] <= 1.25 * found.plain["logits"] < 0.2


@torch.no_grad()
@pytest.mark.parametrize("length", [7, 50, 200])
@pytest.mark.parametrize("family", EXPERTS)
def test_routed_tokens_are_no_further_from_fp32_than_transformers(family: str, length: int) -> None:
    model = made(family)
    exact = widened(model)
    for mask in (None, left_padded(4, length)):
        given = {"input_ids": ids(4, length), "attention_mask": mask}
        tied = routing_gap(exact, given, experts=4, top_k=2) < TIE
        assert float(tied.double().mean()) < 0.2
        told = ~tied if mask is None else ~tied & mask.bool()
        expected, plain = exact(**given).logits[told], model(**given).logits[told].float()
        with ck.patch(model):
            ours = model(**given).logits[told].float()
        assert 0 < float((ours - expected).abs().max()) <= MOST[family] * float((plain - expected).abs().max())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fp16_is_no_further_from_fp32_than_transformers(family: str) -> None:
    found = ck.compare(made(family, torch.float16), ids())
    assert 0 < found.patched["logits"] <= 1.25 * found.plain["logits"] < 0.02


@pytest.mark.parametrize("kind", ["helium", "stablelm", "hunyuan_v1_dense", "olmo3", "qwen3_5_text", "gemma4_text"])
def test_other_models_are_no_further_from_fp32_than_transformers(kind: str) -> None:
    """By structure, and of a row that is not in ``tiny.FAMILIES``."""
    model, given = every_model.built(kind).to("cuda", torch.bfloat16), ids()
    with torch.no_grad():
        expected, theirs = widened(model)(given).logits, model(given).logits.float()
        with ck.patch(model) as report:
            ours = model(given).logits.float()
        assert torch.equal(model(given).logits.float(), theirs)
    assert {"norm", "mlp", "linear", "attention", "causal"} <= report.patched.keys(), report
    assert 0 < (ours - expected).norm() <= 1.5 * (theirs - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_the_model_bit_for_bit(family: str) -> None:
    model, given = made(family), ids()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        before = model(given).logits
        with ck.patch(model) as report:
            assert not torch.equal(model(given).logits, before), "nothing was patched"
        assert report.patched["attention"] == 2 * (family != LATENT)
        assert report.fused["attention"] == 2 * (family not in (LATENT, JOINED))
        places = [p.data_ptr() for p in model.parameters()]
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in model.state_dict().values())
        assert torch.equal(model(given).logits, before)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == places


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", PLAIN)
def test_generated_tokens_are_the_best_of_fp32(family: str, cache: str | None, padded: bool) -> None:
    model, given = made(family), ids(2, 30)
    mask = left_padded(2, 30) if padded else torch.ones_like(given)
    exact = widened(model)
    options = {"max_new_tokens": 16, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    with ck.patch(model):
        tokens = model.generate(given, attention_mask=mask, **options)[:, 30:].tolist()
    for prompt, row, seen in zip(given.tolist(), tokens, mask.bool().tolist(), strict=True):
        check_greedy(model, exact, [t for t, real in zip(prompt, seen, strict=True) if real], row)


# ---- gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_no_further_from_fp32_than_transformers(family: str) -> None:
    model, given = made(family), ids()
    model.train()

    def gradients(m: Any) -> Tensor:
        m.zero_grad()
        m(given, labels=given).loss.backward()
        return torch.cat([p.grad.float().flatten() for p in m.parameters() if p.grad is not None])

    expected, theirs = gradients(widened(model)), gradients(model)
    with ck.patch(model):
        ours = gradients(model)
    assert ours.shape == expected.shape
    error, allowed = (float((g - expected).norm() / expected.norm()) for g in (ours, theirs))
    assert 0 < error <= MOST[family] * allowed < 0.3


# ---- torch.compile --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_compiled_without_graph_breaks(family: str) -> None:
    """The graph's ops are those of eager calls: the same bits."""
    model, given = made(family), ids()
    with torch.no_grad(), ck.patch(model):
        expected = model(given).logits
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(given).logits, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, about its own parts
def test_compiled_by_inductor_no_further_from_fp32_than_transformers() -> None:
    model, given = made("qwen2"), ids()
    with torch.no_grad():
        expected, theirs = widened(model)(given).logits, model(given).logits.float()
        with ck.patch(model):
            torch.compiler.reset()
            ours = torch.compile(model, fullgraph=True)(given).logits.float()
    assert (ours - expected).norm() <= 1.25 * (theirs - expected).norm()


@pytest.mark.filterwarnings("ignore")  # of torch, about its own parts
def test_cuda_graphs_over_a_static_cache_no_further_from_fp32_than_transformers() -> None:
    """A prompt, part of one, and steps: each shape is run plain, recorded, then replayed."""
    model, given = made("llama"), ids(1, 40)
    exact = widened(model)

    def parts(m: Any, run: Any, *ends: int) -> Tensor:
        cache = StaticCache(config=m.config, max_cache_len=ends[-1])
        m(given[:, :1], past_key_values=cache)  # allocates it
        found = []
        for _ in range(3):
            cache.reset()
            found = []
            for begin, end in zip((0, *ends), ends, strict=False):
                torch.compiler.cudagraph_mark_step_begin()
                found.append(run(given[:, begin:end], past_key_values=cache).logits.clone())
        return torch.cat(found, 1).float()

    with torch.no_grad():
        for ends in ((40,), (20, 38, 39, 40)):
            expected, theirs = parts(exact, exact, *ends), parts(model, model, *ends)
            with ck.patch(model):
                torch.compiler.reset()
                ours = parts(model, torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False), *ends)
            assert 0 < (ours - expected).norm() <= 1.25 * (theirs - expected).norm()
