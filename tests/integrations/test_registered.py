"""Attention and experts under their names in transformers, in models of which ``patch`` knows nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.moe import ExpertsInterface

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.experts import run_experts
from tests.integrations import tiny
from tests.integrations.test_transformers import LEFT, close
from tests.integrations.tiny import tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_key_value_heads": 2}


def made(name: str, head: str = "ForCausalLM", **options: Any) -> Any:
    torch.manual_seed(5)
    model = getattr(transformers, name + head)(tiny.configured(name, **(SIZES | options)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins as a process does; what others have registered is there again behind it."""
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface, ExpertsInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
        interface._global_mapping.pop("cutekernels", None)
    ck.register_attention.cache_clear()
    ck.register_experts.cache_clear()
    yield
    ck.register_attention.cache_clear()
    ck.register_experts.cache_clear()


@pytest.mark.parametrize(
    ("name", "head"), [("GPTNeoX", "ForCausalLM"), ("Bert", "ForMaskedLM"), ("OPT", "ForCausalLM")]
)
def test_attention_by_name(name: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal and not; a dense mask, none, and a cache."""
    model, ids, called = made(name, head), tokens(), []
    masks = (None, LEFT)
    with torch.no_grad():
        expected = [model(ids, attention_mask=mask).logits for mask in masks]
    with pytest.raises(ValueError, match='attn_implementation="cutekernels"` is not supported'):
        model.set_attn_implementation("cutekernels")
    ck.register_attention()
    ck.register_attention()
    model.set_attn_implementation("cutekernels")
    ours = transformers.AttentionInterface._global_mapping["cutekernels"]
    kept = lambda *a, **k: called.append(1) or ours(*a, **k)  # noqa: E731
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "cutekernels", kept)
    with torch.no_grad():
        for mask, logits in zip(masks, expected, strict=True):
            close(model(ids, attention_mask=mask).logits, logits, mask)
    assert len(called) == 4, "each layer of both calls"
    if head == "ForCausalLM":
        options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": LEFT}
        found = model.generate(ids, **options)
        model.set_attn_implementation("eager")
        assert torch.equal(found, model.generate(ids, **options))


@pytest.mark.parametrize("family", ["qwen2-moe", "phi3", "smollm3"])
def test_windows_by_name_alone(family: str) -> None:
    """Windows of families that hand one on, and of one whose mask alone holds it."""
    model, ids = tiny.model(family), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        ck.register_attention()
        model.set_attn_implementation("cutekernels")
        close(model(ids).logits, expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [("Olmoe", {}), ("Qwen2Moe", {}), ("Qwen3Moe", {"hidden_act": "gelu"}), ("GptOss", {"num_local_experts": 4})],
)
def test_experts_by_name(name: str, options: dict[str, Any]) -> None:
    """Experts of SiLU, of another gate; turned, with biases and a clamped gate."""
    model, ids = made(name, **(MOE | options)), tokens()

    def results() -> tuple[Any, ...]:
        model.zero_grad()
        result = model(ids, labels=ids)
        result.loss.backward()
        return result.logits, model.model.layers[0].mlp.experts.gate_up_proj.grad.clone()

    expected = results()
    with pytest.raises(ValueError, match="cutekernels"):
        model.set_experts_implementation("cutekernels")
    ck.register_experts()
    model.set_experts_implementation("cutekernels")
    for ours, theirs in zip(results(), expected, strict=True):
        close(ours, theirs)
    options = {"max_new_tokens": 8, "do_sample": False}
    found = model.generate(ids, **options)
    model.set_experts_implementation("eager")
    assert torch.equal(found, model.generate(ids, **options))


@pytest.mark.parametrize(
    ("attribute", "value", "rule"),
    [
        ("is_concatenated", False, "gate and up are interleaved"),
        ("has_post_expert_norm", True, "a norm of their own"),
        ("down_proj", None, "no plain parameters"),
        (
            "down_proj",
            torch.nn.Parameter(torch.zeros(4, 64, 48).to(torch.float8_e4m3fn), requires_grad=False),
            r"its experts are quantized: load the checkpoint itself by cutekernels\.models\.load",
        ),
    ],
)
def test_experts_that_no_kernel_has_are_refused(
    attribute: str, value: Any, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel would compute these wrongly without a word."""
    experts = tiny.model("qwen3-moe").model.layers[0].mlp.experts
    if not hasattr(experts, attribute):
        pytest.skip(f"experts of this version of transformers have no {attribute}")
    ids, weights = torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    assert run_experts(experts, torch.ones(3, 64), ids, weights).shape == (3, 64)
    assert not run_experts(experts, torch.ones(3, 64), ids + 4, weights).any(), "an expert of another rank"
    monkeypatch.setattr(experts, attribute, value)
    with pytest.raises(UnsupportedProblem, match=rf'{rule}.*set_experts_implementation\("grouped_mm"\)'):
        run_experts(experts, torch.ones(3, 64), ids, weights)


@pytest.mark.parametrize("register", [ck.register_attention, ck.register_experts])
def test_without_transformers(register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=f"{register.__name__} needs transformers.*pip install"):
        register()
