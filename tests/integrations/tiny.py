"""Tiny transformers models of every family, with weights that make their results differ from token to token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError

# Config class, and what differs from the common ones.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    # Eager: transformers 5.17 drops the softcap in SDPA.
    "gemma2": ("Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 16, "attn_implementation": "eager"}),
    "gemma3": (
        "Gemma3Text",
        {"sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma4": (
        "Gemma4Text",
        {
            "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16,
            "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "use_sliding_window": True,
            "shared_expert_intermediate_size": 80, "sliding_window": 8, "max_window_layers": 1,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 8}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 0.5,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 8, "tie_word_embeddings": False},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 8, "tie_word_embeddings": False}),
    "glm4": ("Glm4", {}),
    "cohere2": (
        "Cohere2",
        {
            "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.7,
            "tie_word_embeddings": False,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2,
            "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "attn_implementation": "eager"},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4, "routed_scaling_factor": 1.5,
        },
    ),
}  # fmt: skip
# Language models inside of models that see images too: the config class of the whole, and what its parts ask for.
INSIDE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl": (
        "Qwen3VL",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        {
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
    ),
    "gemma4-inside": (
        "Gemma4",
        FAMILIES["gemma4"][1],
        {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
    ),
}  # fmt: skip
COMMON = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Sizes of a text part, whose whole names the tokens, and of a tower beside it.
TEXT = {name: value for name, value in COMMON.items() if not name.endswith("_token_id")}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def configured(name: str, **options: Any) -> Any:
    """A config; skips the test where this version of transformers has none, or refuses its defaults (5.4's Cohere2)."""
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}Config")
    try:
        return getattr(transformers, f"{name}Config")(**options)
    except StrictDataclassFieldValidationError as error:
        pytest.skip(f"{name}Config: {error}")


def model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A causal language model in evaluation mode, always the same."""
    if family in INSIDE:
        name, own, tower = INSIDE[family]
        tied, text = changes.pop("tie_word_embeddings", False), COMMON | own | changes
        if name == "Qwen3VL":
            tower = tower | {"out_hidden_size": text["hidden_size"]}
        config = configured(name, text_config=text, vision_config=tower, tie_word_embeddings=tied)
        cls = f"{name}ForConditionalGeneration"
    else:
        name, own = FAMILIES[family]
        config = configured(name, **(COMMON | own | changes))
        cls = f"{name.removesuffix('Text')}ForCausalLM"
    torch.manual_seed(5)
    made = getattr(transformers, cls)(config)
    for path, parameter in made.named_parameters():
        torch.nn.init.normal_(
            parameter, std=0.02 if path.endswith("norm.bias") else 0.15
        )  # or tokens repeat themselves
    for path, buffer in made.named_buffers():
        if path.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
        if path.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 0.8)
    return made.to(dtype).eval()


def wide(family: str, dtype: torch.dtype, **changes: Any) -> Any:
    """A model on the GPU of heads of 64 channels."""
    made = model(family, **({"hidden_size": 256, "intermediate_size": 384, "head_dim": 64} | changes))
    for parameter in made.parameters():  # hidden sizes of 64 have 0.15
        parameter.data.mul_(0.5)
    return made.to("cuda", dtype)


def tokens(batch: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(2, 131, (batch, length), generator=torch.Generator().manual_seed(3))


def masks_of(graph: Any) -> list[Any]:
    """The mask of each attention in a traced graph."""
    return [n.args[3] for n in graph.graph.nodes if n.target is torch.ops.cutekernels._attention.default]
