"""Changes of a patched model: parameters that train alone, weights replaced, another attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import cutekernels as ck
from tests.integrations import tiny
from tests.integrations.test_transformers import close
from tests.integrations.tiny import tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers' and peft's own


def gradients(model: Any) -> dict[str, Any]:
    model.zero_grad()
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    "trains",
    [("proj.bias", "norm"), ("v_proj", "o_proj"), ("k_proj", "norm"), ("up_proj", "norm"), ("q_proj.bias", "norm")],
)
def test_any_choice_of_parameters_trains(trains: tuple[str, ...]) -> None:
    """BitFit's biases, or one projection of three: the joint product must not swallow their gradients."""
    model = tiny.model("qwen2")
    with ck.patch(model):
        for name, p in model.named_parameters():
            p.requires_grad_(any(part in name for part in trains))
        ours = gradients(model)
    expected = gradients(model)
    assert [name for name, grad in ours.items() if grad is None] == []
    for name, grad in expected.items():
        close(ours[name], grad)


def attribute(model: Any, name: str) -> Any:
    return model.get_submodule(f"model.layers.0.{name}")


def replace_data(model: Any, name: str) -> None:
    linear = attribute(model, name)
    linear.weight.data = linear.weight.data * 3


def replace_parameter(model: Any, name: str) -> None:
    linear = attribute(model, name)
    linear.weight = torch.nn.Parameter(linear.weight.detach() * 3)


def replace_bias(model: Any, name: str) -> None:
    linear = attribute(model, name)
    if linear.bias is not None:
        linear.bias.data = linear.bias.data + 1


def load_one(model: Any, name: str) -> None:
    key = f"model.layers.0.{name}.weight"
    model.load_state_dict({key: model.state_dict()[key] * 3}, strict=False, assign=True)


@pytest.mark.parametrize("change", [replace_data, replace_parameter, replace_bias, load_one])
@pytest.mark.parametrize(
    "name", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
)
def test_weights_replaced_one_by_one_count(name: str, change: Callable[[Any, str], None]) -> None:
    model, ids = tiny.model("qwen2"), tokens()
    other = copy.deepcopy(model)
    change(other, name)
    with torch.no_grad(), ck.patch(model):
        model(ids)
        change(model, name)
        close(model(ids).logits, other(ids).logits)
        close(model(ids).logits, other(ids).logits)


@pytest.mark.parametrize("act", [torch.nn.ReLU(), torch.nn.GELU()])
def test_another_activation_counts(act: torch.nn.Module) -> None:
    model, ids = tiny.model("qwen2"), tokens()
    before = model(ids).logits
    with torch.no_grad(), ck.patch(model):
        for layer in model.model.layers:
            layer.mlp.act_fn = act
        ours = model(ids).logits
    close(ours, model(ids).logits)
    assert not torch.equal(ours, before)


@pytest.mark.parametrize("targets", [["v_proj"], ["k_proj", "up_proj"]])
def test_adapters_that_spare_the_first_projection_are_merged(targets: list[str]) -> None:
    """PEFT's safe merge gives weights memory of their own."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    results = []
    for patched in (False, True):
        model = tiny.model("qwen2")
        if patched:
            ck.patch(model)
        torch.manual_seed(1)
        merged = peft.get_peft_model(model, config).merge_and_unload(safe_merge=True)
        with torch.no_grad():
            results.append(merged(tokens()).logits)
    close(results[1], results[0])


def test_a_model_patched_in_inference_mode_can_be_trained() -> None:
    model = tiny.model("qwen2")
    expected = gradients(model)
    with torch.inference_mode():
        ck.patch(model)
        model(tokens())
    for name, grad in gradients(model).items():
        close(grad, expected[name])


def test_backward_hooks_of_projections_run() -> None:
    model = tiny.model("qwen2")
    for name, p in model.named_parameters():
        p.requires_grad_("embed" in name)
    calls: list[int] = []
    with ck.patch(model):
        model.model.layers[0].self_attn.q_proj.register_full_backward_hook(lambda *_: calls.append(1))
        gradients(model)
    assert calls == [1]


# ---- attention ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "llama"])
def test_eager_attention_on_a_patched_model(family: str) -> None:
    """The way to attention weights, as docs/transformers.md has it."""
    model, ids = tiny.model(family), tokens()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids, output_attentions=True)
        with ck.patch(model):
            model.set_attn_implementation("eager")
            ours = model(ids, output_attentions=True)
    close(ours.logits, expected.logits)
    assert len(ours.attentions) == len(expected.attentions) == 2


def test_dropout_leaves_eager_attention() -> None:
    model, ids = tiny.model("llama", attention_dropout=0.1), tokens()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model):
            close(model(ids).logits, expected)


@pytest.mark.parametrize("head_dim", [12, 264])
def test_a_head_dim_without_a_kernel_leaves_attention(head_dim: int) -> None:
    model, ids = tiny.model("llama", head_dim=head_dim), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model) as report:
            close(model(ids).logits, expected)
    assert any("head_dim" in reason and str(head_dim) in reason for _, reason in report.left)
    assert model.config._attn_implementation == "sdpa"


def test_gemma3_has_no_soft_cap_in_attention() -> None:
    """Its config has one, which transformers' class does not pass on."""
    model, ids = tiny.model("gemma3", attn_logit_softcapping=1.0), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model):
            close(model(ids).logits, expected)


def test_chunked_attention_of_another_model_keeps_its_mask() -> None:
    """After a patch the name is known to every model; Llama 4's chunks are not a window."""
    ck.patch(tiny.model("llama"))
    own = {"head_dim": 16, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 96}
    config = transformers.Llama4TextConfig(**(tiny.COMMON | own), num_experts_per_tok=1, moe_layers=[])
    torch.manual_seed(5)
    model: Any = transformers.Llama4ForCausalLM(config).eval()
    with torch.no_grad():
        expected = model(tokens()).logits
        model.set_attn_implementation("cutekernels")
        close(model(tokens()).logits, expected)


def test_compare_leaves_the_mode_of_each_module() -> None:
    model = tiny.model("qwen2").train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    ck.compare(model, tokens())
    assert [module.training for module in model.modules()] == before
