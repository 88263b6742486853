"""``config.json`` of each family as hubs hold it, and what of a checkpoint is read or left: as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cutekernels import patch
from cutekernels.errors import UnsupportedProblem
from cutekernels.models import Decoder, load
from cutekernels.models.config import read_config
from cutekernels.models.language import language_of
from cutekernels.models.loaded import LoadedModel, Rotary
from tests.integrations import tiny
from tests.models.test_decoder import greedy, prompts
from tests.models.test_load import SIZES, assert_alike, config, edit, logits, one_thread, saved

__all__ = ["one_thread"]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# Keys as older versions of transformers wrote them, and as hubs hold them; the sizes are those of the test.
HUB: dict[str, dict[str, Any]] = {
    "llama-2": {"model_type": "llama"},
    "llama-3.1": {
        "model_type": "llama", "num_key_value_heads": 2, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen2.5-yarn": {
        "model_type": "qwen2", "num_key_value_heads": 2, "rope_theta": 1000000.0, "sliding_window": 131072,
        "use_sliding_window": False, "max_window_layers": 28,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "qwen3-window": {
        "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "use_sliding_window": True,
        "sliding_window": 16, "max_window_layers": 1, "rope_scaling": None,
    },
    "mistral": {
        "model_type": "mistral", "num_key_value_heads": 2, "rope_theta": 10000,
        "rope_scaling": {"type": "linear", "factor": 2},
    },
    "gemma-2": {
        "model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "gelu",
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24,
    },
    "gemma-3": {
        "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1000000,
        "rope_local_base_freq": 10000, "sliding_window": 512, "sliding_window_pattern": 2,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "phi-3-mini": {"model_type": "phi3", "num_key_value_heads": 4, "sliding_window": 2047, "rope_scaling": None},
    "granite": {
        "model_type": "granite", "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "logits_scaling": 16.0,
    },
    "olmo2": {"model_type": "olmo2", "rope_theta": 500000},
    "smollm3": {"model_type": "smollm3"},
    "smollm3-window": {
        "model_type": "smollm3", "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 16,
    },
    "gpt-oss": {"model_type": "gpt_oss", "num_key_value_heads": 2},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 4096},
    "glm-4": {"model_type": "glm4", "head_dim": 16, "rope_theta": 10000.0},
    "glm-4.5": {
        "model_type": "glm4_moe", "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True,
        "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": None, "moe_intermediate_size": 48,
        "n_routed_experts": 8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    },
    "glm-4.6": {
        "model_type": "glm4_moe", "num_attention_heads": 8, "use_qk_norm": True, "rope_theta": 1000000,
        "moe_intermediate_size": 48, "n_routed_experts": 8, "first_k_dense_replace": 3,
    },
    "qwen3-vl": {
        "model_type": "qwen3_vl", "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text", "num_key_value_heads": 2, "head_dim": 16, "attention_bias": False,
            "rms_norm_eps": 1e-6, "rope_theta": 5000000, "hidden_act": "silu",
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [3, 3, 2], "rope_type": "default"},
        },
        "vision_config": {"model_type": "qwen3_vl", "depth": 1, "hidden_size": 32, "num_heads": 2},
    },
    "gemma-4": {  # of real ones full layers have heads of 512, which are refused
        "model_type": "gemma4_text", "num_key_value_heads": 2,
        "head_dim": 16, "global_head_dim": 16, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.4, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
    "gemma-4-inside": {
        "model_type": "gemma4", "tie_word_embeddings": True, "audio_config": None,
        "text_config": {
            "model_type": "gemma4_text", "num_key_value_heads": 2,
            "head_dim": 16, "global_head_dim": 16, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision", "rope_parameters": None,
        },
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 32, "num_hidden_layers": 1},
    },
    "command-r7b": {
        "model_type": "cohere2", "num_key_value_heads": 2, "rope_theta": 50000, "logit_scale": 0.25,
        "sliding_window": 16, "sliding_window_pattern": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_configs_of_hubs_mean_what_transformers_reads(name: str) -> None:
    common = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    common, raw = common | {"num_attention_heads": 4, "pad_token_id": None}, HUB[name]
    raw = raw | {"text_config": common | raw["text_config"]} if "text_config" in raw else common | raw
    if name == "command-r7b":
        tiny.configured("Cohere2")
    if name.startswith("gemma-4"):
        tiny.configured("Gemma4")
    ours = read_config(json.loads(json.dumps(raw)))
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(raw)))
    auto = transformers.AutoModelForImageTextToText if "text_config" in raw else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = language_of(auto.from_config(theirs))
    assert bool(ours.tied) == theirs.tie_word_embeddings
    theirs = theirs.get_text_config()
    loaded = LoadedModel(ours, None, torch.float32)
    for mine, layer in zip(loaded.model.layers, model.model.layers, strict=True):
        attention = layer.self_attn
        window = attention if hasattr(attention, "sliding_window") else theirs
        assert mine.self_attn.sliding_window == (
            getattr(window, "sliding_window", None) if name[:5] != "llama" else None
        )
        assert mine.self_attn.use_rope == getattr(attention, "use_rope", True)
        assert mine.self_attn.scaling == attention.scaling and mine.self_attn.head_dim == attention.head_dim
        joined = hasattr(attention, "qkv_proj")
        parts = [getattr(attention, f"{part}_proj") for part in (["qkv"] if joined else "qkv")]
        parts = [part for part in parts if part is not None]  # keys that are values, too
        assert len(mine.self_attn.qkv_proj.weight) == sum(len(part.weight) for part in parts)
        assert (mine.self_attn.qkv_proj.bias is None) == (parts[0].bias is None)
        assert hasattr(mine.self_attn, "q_norm") == hasattr(attention, "q_norm")
        assert hasattr(mine.mlp, "experts") == hasattr(layer.mlp, "experts")
        norm = next(m for name, m in layer.named_children() if name.endswith("norm"))
        eps = getattr(norm, "variance_epsilon", None)
        own = next(m for name, m in mine.named_children() if name.endswith("norm"))
        assert own.variance_epsilon == (norm.eps if eps is None else eps)
    for multiplier in ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"):
        assert getattr(ours, multiplier) == getattr(theirs, multiplier, 1.0)
    rotary, positions = type(model.model.rotary_emb)(theirs), torch.arange(3000)[None]
    for kind in (None,) if "rope_theta" in ours.rope_parameters else ours.rope_parameters:
        arguments = torch.zeros(()), positions, *(() if kind is None else (kind,))
        for mine, expected in zip(Rotary(ours)(*arguments), rotary(*arguments), strict=True):
            assert torch.equal(mine, expected)
    assert ours.gate == ("gelu_tanh" if name.startswith(("gemma", "starcoder2")) else "silu")


@pytest.mark.parametrize(
    ("family", "values", "rule"),
    [
        ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.01}}, "leaves 0 of 16"),
        ("glm4", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
        ("cohere2", {"logit_scale": 0.0}, "logit_scale"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type is longrope"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers .* each of 2 layers; it is \[1\]"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval as a whole number"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling"),
        ("starcoder2", {"norm_epsilon": "x"}, "norm_epsilon"),
        ("qwen3-moe", {"norm_topk_prob": "false"}, "norm_topk_prob as a bool; got 'false'"),
        ("glm4-moe", {"n_group": 3}, r"2 of 8 experts are in topk_group=1 of n_group=3 groups of two experts or more"),
        ("glm4-moe", {"topk_group": 3}, "topk_group as a whole number from 1 to 2; got 3"),
        ("glm4-moe", {"n_routed_experts": 600}, "n_routed_experts as a whole number from 1 to 512; got 600"),
        ("glm4-moe", {"hidden_act": "gelu"}, "experts have the gate of SiLU"),
        ("glm4-moe", {"use_qk_norm": False}, "has a tensor 'model.layers.0.self_attn.k_norm.weight', of no module of"),
        ("glm4-moe", {"first_k_dense_replace": 0}, "of no module of a glm4_moe"),
        ("qwen3-vl", {"text_config": None}, "text_config of config.json is an object .* qwen3_vl_text; it is None"),
        ("qwen3-vl", {"text_config": {"model_type": "qwen3"}}, "text_config .* of model_type qwen3_vl_text; it is"),
        ("llama", {"eos_token_id": [2, "x"]}, r"eos_token_id of config.json .* it is \[2, 'x'\]"),
    ],
)
def test_options_of_a_family_are_read_or_refused(
    family: str, values: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    saved(tiny.model(family), tmp_path)
    config(**values)(tmp_path)
    with pytest.raises(UnsupportedProblem, match=rule):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}),  # a Ministral, as transformers has it
        ("mistral", {"use_sliding_window": False}),
        ("mixtral", {"norm_topk_prob": False}),
        ("starcoder2", {"hidden_activation": "silu"}),
        ("llama", {"no_rope_layers": [0, 0]}),
        ("llama", {"global_head_dim": 512, "attention_k_eq_v": True, "use_qk_norm": "x", "layer_types": None}),
        ("gemma3", {"global_head_dim": 512, "attention_k_eq_v": True, "num_nextn_predict_layers": 4}),
    ],
)
def test_keys_of_other_families_mean_what_transformers_reads(
    family: str, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tiny.model(family), tmp_path)
    config(**values)(tmp_path)
    _, found = logits(Decoder.from_pretrained(tmp_path, **SIZES), monkeypatch)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor(prompts(21, 3)[:1])).logits[:, -1]
    assert (found[0] - expected).abs().max() < 1e-3 * expected.abs().max()


def test_windows_that_layer_types_alone_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM3's masks have them whatever ``use_sliding_window`` is, of which its layers know."""
    types = ["sliding_attention", "full_attention"]
    model, plain = [
        tiny.model("smollm3", layer_types=types, sliding_window=w, use_sliding_window=False) for w in (5, 500)
    ]
    assert model.model.layers[0].self_attn.sliding_window is None
    with torch.no_grad():
        expected, without = [m(tiny.tokens()).logits for m in (model, plain)]
    tolerance = 1e-4 * expected.abs().max()
    assert (expected - without).abs().max() > 100 * tolerance
    with patch(model), torch.no_grad():
        assert (model(tiny.tokens()).logits - expected).abs().max() < tolerance
    ours = assert_alike(model, saved(model, tmp_path), monkeypatch)
    prompt = prompts(21)[0]
    assert ours.generate([prompt], max_new_tokens=12).tokens == [greedy(model, prompt, 12)]


def test_the_correction_of_a_router_stays_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers keeps it; rounded to the model's type it would choose other experts."""
    saved(tiny.model("glm4-moe"), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    correction = model.model.layers[1].mlp.gate.e_score_correction_bias
    ours = assert_alike(model, tmp_path, monkeypatch, dtype=torch.bfloat16)
    found = ours._source.model.model.layers[1].mlp.correction.weight
    assert found.dtype == torch.float32 and torch.equal(found, correction)
    assert not torch.equal(found, found.bfloat16().float())


def test_layers_that_guess_further_tokens_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the last layer as many as the config says; one more is of no module."""
    model = tiny.model("glm4-moe")
    path = saved(model, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    beside = {"model.layers.2.eh_proj.weight": torch.ones(3), "model.layers.2.self_attn.q_proj.weight": torch.ones(3)}
    save_file(tensors | beside, path)
    assert_alike(model, tmp_path, monkeypatch)
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(3)}, path)
    with pytest.raises(UnsupportedProblem, match=r"'model.layers.3.eh_proj.weight', of no module of a glm4_moe"):
        load(tmp_path)


def test_a_language_model_among_towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights alone are read of Qwen3-VL, and it ends where the whole model does."""
    saved(tiny.model("qwen3-vl", torch.bfloat16, eos_token_id=7), tmp_path, max_shard_size="30KB")
    edit(tmp_path / "config.json", lambda c: (c.pop("dtype"), c["text_config"].update(dtype="bfloat16")))
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = 7
    ours = assert_alike(model, tmp_path, monkeypatch)
    loaded = ours._source.model
    assert loaded.dtype == torch.bfloat16
    assert sum(p.numel() for p in loaded.parameters()) == sum(
        p.numel() for part in (model.model.language_model, model.lm_head) for p in part.parameters()
    )
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert Decoder.from_pretrained(tmp_path, **SIZES)._stop(None) == {7}
