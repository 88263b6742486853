"""Models that compute something else than their weights say are refused by ``Decoder``, with the module's path."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.families import FAMILIES
from cutekernels.models import load
from cutekernels.models.architectures import ARCHITECTURES
from tests.integrations import tiny
from tests.models.test_decoder import decoder, greedy, prompts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def negated(module: Any, args: Any, out: Any) -> Any:
    return -out


def unchanged(module: Any, args: Any) -> None:
    return None


# ---- hooks and forwards ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda m: m.lm_head.register_forward_hook(negated), r"; lm_head has one, negated: remove the hook.*patch"),
        (lambda m: m.register_forward_hook(negated), "; the model has one, negated"),
        (
            lambda m: m.model.layers[1].mlp.register_forward_pre_hook(unchanged),
            r"; model\.layers\.1\.mlp has one, unchanged",
        ),
        (
            lambda m: m.model.norm.register_forward_hook(lambda mod, args, kw, out: out, with_kwargs=True),
            r"; model\.norm has one",
        ),
        (
            lambda m: setattr(m.model.layers[0].mlp, "forward", lambda x: -x),
            r"; model\.layers\.0\.mlp has a forward of its own: delete the attribute \(del module\.forward\).*patch",
        ),
        (
            lambda m: setattr(m.model.layers[0].mlp, "forward", m.model.layers[1].mlp.forward),
            r"; model\.layers\.0\.mlp has a forward of its own",
        ),
    ],
    ids=["head", "model", "pre-hook", "keywords", "forward", "forward-of-another"],
)
def test_hooks_and_replaced_forwards_are_refused(change: Callable[[Any], Any], rule: str) -> None:
    model = tiny.model("llama")
    change(model)
    with pytest.raises(UnsupportedProblem, match=rule):
        decoder(model)


def test_of_a_model_with_towers_its_language_model_is_asked() -> None:
    """By the paths of the whole; what sees images may have any hooks."""
    model, (prompt,) = tiny.model("qwen3-vl"), prompts(9)
    model.model.visual.register_forward_hook(negated)
    assert decoder(model).generate([prompt], max_new_tokens=8).tokens == [greedy(model, prompt, 8)]
    compiled = torch.compile(model, backend="eager")
    assert decoder(compiled).generate([prompt], max_new_tokens=8).tokens == [greedy(model, prompt, 8)]
    for path in ("model.language_model.layers.1.mlp", "lm_head", "model"):
        hook = model.get_submodule(path).register_forward_hook(negated)
        with pytest.raises(UnsupportedProblem, match=rf"; {re.escape(path)} has one, negated"):
            decoder(model)
        hook.remove()
    with ck.patch(model), pytest.raises(UnsupportedProblem, match="this one is patched"):
        decoder(model)
    with pytest.raises(UnsupportedProblem, match=r"cutekernels\.patch\(model\.language_model\)"):
        decoder(model.model)
    with pytest.raises(UnsupportedProblem, match="Qwen3VLTextModel has no lm_head"):
        decoder(model.model.language_model)


def test_adapters_in_a_model_with_towers_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = tiny.model("qwen3-vl")
    around = peft.get_peft_model(model, peft.LoraConfig(target_modules=r".*language_model.*q_proj"))
    for one in (model, around):
        with pytest.raises(UnsupportedProblem, match=r"merge adapters|model_type is one of"):
            decoder(one)


def test_a_removed_hook_leaves_nothing() -> None:
    model, (prompt,) = tiny.model("llama"), prompts(9)
    hook = model.lm_head.register_forward_hook(negated)
    model.model.norm.forward = model.model.norm.forward  # the class's own, as what restores a forward leaves it
    hook.remove()
    assert decoder(model).generate([prompt], max_new_tokens=8).tokens == [greedy(model, prompt, 8)]


def test_the_documents_table_of_families_is_the_codes() -> None:
    text = (Path(__file__).parents[2] / "docs/transformers.md").read_text()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| .*`.*", text, re.MULTILINE)]
    said = {row[1].strip("`"): row for row in rows if len(row) == 6 and row[1] != "`model_type`"}
    assert said.keys() == FAMILIES.keys()
    text_part = "qwen2_5_vl_text"  # has no head
    decoded = {kind for kind, family in FAMILIES.items() if not family.undecoded} - {text_part}
    assert {kind for kind, row in said.items() if row[3]} == decoded
    assert {kind for kind, row in said.items() if row[4]} == ARCHITECTURES.keys()


@pytest.mark.parametrize(("name", "rule"), [("gpt-oss", "a clamped gate"), ("deepseek-v2", r"latent vectors \(MLA\)")])
def test_families_that_only_patch_takes(name: str, rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rf"does not take .*ForCausalLM: .*{rule}.*cutekernels\.patch"):
        decoder(tiny.model(name))


@pytest.mark.parametrize(
    "name", [name for name in (*tiny.FAMILIES, *tiny.INSIDE) if name not in ("gpt-oss", "deepseek-v2")]
)
def test_hooks_by_which_transformers_records_are_accepted(name: str) -> None:
    """They stay on a model that was once called with ``output_hidden_states``."""
    model, (prompt,) = tiny.model(name), prompts(9)
    model(torch.tensor([prompt]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    decoder(model)


def test_compiled_and_unpatched_models_are_accepted() -> None:
    """``torch.compile`` puts a forward on its wrapper, and its users put one on the model: both are the class's own."""
    model, (prompt,) = tiny.model("llama"), prompts(9)
    expected = [greedy(model, prompt, 8)]
    with ck.patch(model):
        pass
    for changed in (model, torch.compile(model, backend="eager")):
        assert decoder(changed).generate([prompt], max_new_tokens=8).tokens == expected
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    model.forward = torch.compile(model.forward, backend="eager")
    assert decoder(model).generate([prompt], max_new_tokens=8).tokens == expected


def test_hooks_of_accelerate_are_refused_until_they_are_removed() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, (prompt,) = tiny.model("llama"), prompts(9)
    accelerate.hooks.add_hook_to_module(model.model.layers[1], accelerate.hooks.ModelHook())
    with pytest.raises(UnsupportedProblem, match=r"model\.layers\.1 has one .*device_map.*remove_hook_from_module"):
        decoder(model)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert decoder(model).generate([prompt], max_new_tokens=8).tokens == [greedy(model, prompt, 8)]


# ---- classes --------------------------------------------------------------------------------------------


LORA = r"it is a peft\.tuners\.lora\.layer\."


@pytest.mark.parametrize(
    ("kind", "target", "rule"),
    [
        (
            "LoraConfig",
            "q_proj",
            r"model\.layers\.0\.self_attn\.q_proj as a torch\.nn\.modules\.linear\.Linear; "
            rf"{LORA}Linear: merge adapters \(merge_and_unload\)",
        ),
        ("LoraConfig", "lm_head", f"lm_head as .*; {LORA}Linear"),
        ("LoraConfig", "embed_tokens", rf"model\.embed_tokens as a torch\.nn\.modules\.sparse\.Embedding; {LORA}Emb"),
        ("LNTuningConfig", "norm", r"model\.norm as a .*LlamaRMSNorm; it is a peft\.tuners\.ln_tuning\.layer\."),
        ("LNTuningConfig", "input_layernorm", r"model\.layers\.0\.input_layernorm as a .*LlamaRMSNorm; it is a peft"),
    ],
    ids=["projection", "head", "embedding", "norm", "norm-of-a-layer"],
)
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # peft's, of norms
def test_adapters_are_refused_with_their_path(kind: str, target: str, rule: str) -> None:
    peft = pytest.importorskip("peft")
    model = tiny.model("llama")
    around = peft.get_peft_model(model, getattr(peft, kind)(target_modules=rf".*\b{target}"))
    with pytest.raises(UnsupportedProblem, match=f"Decoder reads {rule}"):
        decoder(model)
    with pytest.raises(UnsupportedProblem, match=rf"Decoder reads base_model\.model\.{rule}"):
        decoder(around)


def test_a_prompt_of_an_adapter_is_refused_and_a_merged_model_is_not() -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedProblem, match=r"itself; this is a peft\.peft_model\.PeftModelForCausalLM around"):
        decoder(peft.get_peft_model(tiny.model("llama"), tuned))
    lora = peft.get_peft_model(tiny.model("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    decoder(lora.merge_and_unload())


# ---- Gemma 4 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"global_head_dim": 512}, r"a multiple of 8 up to 256; this model's is 512: generate .* cutekernels\.patch"),
        ({"global_head_dim": 32}, r"heads alike; .* \(16, 2\) and \(32, 2\): generate .* cutekernels\.patch"),
        ({"num_global_key_value_heads": 1}, r"heads alike; .* \(16, 2\) and \(16, 4\)"),
        (
            {"num_hidden_layers": 4, "num_kv_shared_layers": 2},
            "an earlier one's keys and values; .*_layers=2: generate",
        ),
        ({"hidden_size_per_layer_input": 16}, "second embedding of each token.*hidden_size_per_layer_input=16"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
            "experts beside an MLP; .*enable_moe_block=True",
        ),
        ({"use_bidirectional_attention": "all"}, "tokens see earlier ones alone"),
    ],
    ids=["wide", "unlike-widths", "unlike-numbers", "shared-keys", "second-embeddings", "experts", "later-tokens"],
)
def test_what_a_decoder_lacks_of_gemma_4(changes: dict[str, Any], rule: str, tmp_path: Path) -> None:
    """The model is refused, and so is its checkpoint."""
    changes = {
        "layer_types": ["sliding_attention", "full_attention"] * (changes.get("num_hidden_layers", 2) // 2)
    } | changes
    model = tiny.model("gemma4", **changes)
    with pytest.raises(UnsupportedProblem, match=rule):
        decoder(model)
    model.save_pretrained(tmp_path)
    alike = "global_head_dim" in changes or "num_global_key_value_heads" in changes
    with pytest.raises(UnsupportedProblem, match="heads are alike, up to 256 wide; layer 1 .*patch" if alike else rule):
        load(tmp_path)


def test_a_hubs_config_of_gemma_4_is_refused(tmp_path: Path) -> None:
    """Its full layers have heads of 512, by a key of its own or by default."""
    tiny.model("gemma4").save_pretrained(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    given.pop("per_layer_config", None)
    for own in ({}, {"global_head_dim": 512}):
        (tmp_path / "config.json").write_text(json.dumps(given | own))
        with pytest.raises(
            UnsupportedProblem, match=r"layer 1 of config.json has .*'head_dim': 512.*cutekernels.patch"
        ):
            load(tmp_path)


# ---- sizes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [12, 264])
def test_head_dims_that_no_kernel_takes_are_refused(head_dim: int) -> None:
    with pytest.raises(UnsupportedProblem, match=f"head_dim that is a multiple of 8 up to 256; this.* is {head_dim}:"):
        decoder(tiny.model("llama", head_dim=head_dim))


@pytest.mark.parametrize("head_dim", [8, 256])
def test_head_dims_at_the_limits_are_taken(head_dim: int) -> None:
    model, (prompt,) = tiny.model("llama", head_dim=head_dim), prompts(9)
    assert decoder(model).generate([prompt], max_new_tokens=4).tokens == [greedy(model, prompt, 4)]


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    """``patch`` keeps what ``is_causal`` says."""
    model, causal = tiny.model("llama", is_causal=False), tiny.model("llama")
    with pytest.raises(UnsupportedProblem, match=r"has is_causal=False: set it to True, or .*cutekernels\.patch"):
        decoder(model)
    with torch.no_grad():
        expected = model(tiny.tokens()).logits
        assert (expected - causal(tiny.tokens()).logits).abs().max() > 0.1
        with ck.patch(model):
            torch.testing.assert_close(model(tiny.tokens()).logits, expected, atol=1e-4, rtol=0)


def test_fp32_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the decoder is made, before its weights move; on the CPU fp32 and fp64 run."""
    model = tiny.model("llama")
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
    with pytest.raises(
        UnsupportedProblem, match=r"fp16 and bf16 on a GPU; .*float32: convert it, model\.to\(torch\.bfloat16\)"
    ):
        decoder(model)
