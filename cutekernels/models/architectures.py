"""Families as their checkpoints have them: names and shapes of tensors, and what ``config.json`` may leave out.

A family is a row of ``ARCHITECTURES``; what it computes by stands in ``integrations/transformers/families.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cutekernels.errors import UnsupportedProblem
from cutekernels.models import routing
from cutekernels.models.routing import MOST, Routed
from cutekernels.ops.shared.checks import check_whole, quote

SLIDING, FULL = "sliding_attention", "full_attention"
_Bias = bool | str  # of a part


@dataclass(frozen=True)
class LayerPart:
    """A module with weights.

    Attributes:
        path: where the decoder reads it: ``"self_attn.qkv_proj"``.
        stored: its name in a checkpoint, or several whose rows are put together.
        rows: of each of ``stored``, by the names of :meth:`Config.sizes`.
        columns: likewise; None for a vector, a norm's weight.
        bias: whether it has one; a key of ``config.json`` says so where it is text.
        each: ``stored`` are patterns, and every expert has them: ``"mlp.experts.{}.gate_proj"``.
        tensor: where a stored module has several: the name of its only one, or what its names begin with.
        layers: which layers have it: those with experts ("routed"), those without ("dense"), those whose values are
            projected ("values"), those that have keys for values ("keys"), or all.
        option: the key of ``config.json`` that says whether layers have it; "" where they do.
        wide: a buffer in fp32, whatever the model's type.
    """

    path: str
    stored: tuple[str, ...]
    rows: tuple[str, ...]
    columns: str | None = "hidden"
    bias: _Bias = False
    each: bool = False
    tensor: str = ""
    layers: Literal["all", "dense", "routed", "values", "keys"] = "all"
    option: str = ""
    wide: bool = False

    def of(self, experts: int) -> LayerPart:
        """With the modules of so many experts, one behind the other."""
        if not self.each:
            return self
        stored = tuple(name.format(e) for e in range(experts) for name in self.stored)
        return replace(self, stored=stored, rows=self.rows * experts, each=False)


def _norm(path: str, size: str = "hidden", bias: bool = False) -> LayerPart:
    return LayerPart(path, (path,), (size,), None, bias)


def _attention(qkv_bias: _Bias, out_bias: _Bias, layers: Literal["all", "values"] = "all") -> tuple[LayerPart, ...]:
    """Projections of the common names. ``layers``: which have this of values."""
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return (
        LayerPart("self_attn.qkv_proj", qkv, ("query", "key", "key"), bias=qkv_bias, layers=layers),
        LayerPart("self_attn.o_proj", ("self_attn.o_proj",), ("hidden",), "query", out_bias),
    )


def _layer(norms: tuple[LayerPart, ...], qkv_bias: _Bias, out_bias: _Bias, mlp_bias: _Bias) -> tuple[LayerPart, ...]:
    """A layer of the common names."""
    return *norms, *_attention(qkv_bias, out_bias), *_mlp("mlp", "intermediate", mlp_bias)


def _mlp(path: str, width: str, bias: _Bias = False) -> tuple[LayerPart, ...]:
    """A gated MLP of the common names."""
    return (
        LayerPart(f"{path}.gate_up_proj", (f"{path}.gate_proj", f"{path}.up_proj"), (width,) * 2, bias=bias),
        LayerPart(f"{path}.down_proj", (f"{path}.down_proj",), ("hidden",), width, bias),
    )


def _mixture(front: str, names: tuple[str, str, str], router: str = "") -> tuple[LayerPart, ...]:
    """A router and the gate, up and down projections of each expert, by their names in a checkpoint. ``router``: the
    name of its weight, where it has other tensors too.
    """
    gate, up, down = (f"{front}.experts.{{}}.{name}" for name in names)
    return (
        LayerPart("mlp.gate", (f"{front}.gate",), ("experts",), tensor=router),
        LayerPart("mlp.experts.gate_up_proj", (gate, up), ("expert",) * 2, each=True),
        LayerPart("mlp.experts.down_proj", (down,), ("hidden",), "expert", each=True),
    )


_TABLE = LayerPart("model.embed_tokens", ("model.embed_tokens",), ("vocabulary",))
_HEAD = LayerPart("lm_head", ("lm_head",), ("vocabulary",))
_PRE_NORMS = _norm("input_layernorm"), _norm("post_attention_layernorm")
_SANDWICH = *_PRE_NORMS, _norm("pre_feedforward_layernorm"), _norm("post_feedforward_layernorm")
_BEHIND = _norm("post_attention_layernorm"), _norm("post_feedforward_layernorm")
_WHOLE_NORMS = _norm("self_attn.q_norm", "query"), _norm("self_attn.k_norm", "key")
_LAYER_NORMS = _norm("input_layernorm", bias=True), _norm("post_attention_layernorm", bias=True)
_HEAD_NORMS = _norm("self_attn.q_norm", "head"), _norm("self_attn.k_norm", "head")


def _layers_after(raw: dict[str, Any], count: int) -> list[str]:
    """Full attention up to ``max_window_layers``, and windows from there on."""
    first = raw["max_window_layers"] if raw["sliding_window"] is not None else count
    return [SLIDING if i >= first else FULL for i in range(count)]


def _layers_all_sliding(raw: dict[str, Any], count: int) -> list[str]:
    """Windows, where there are any, in every layer."""
    return [FULL if raw["sliding_window"] is None else SLIDING] * count


def _layers_by_pattern(raw: dict[str, Any], count: int) -> list[str]:
    """Each ``sliding_window_pattern``-th layer has full attention."""
    return [SLIDING if (i + 1) % raw["sliding_window_pattern"] else FULL for i in range(count)]


def _layers_without_rope(raw: dict[str, Any], count: int) -> list[str]:
    """Windows, where there are any, in layers without rotary embedding."""
    windowed = raw["use_sliding_window"] and raw["sliding_window"] is not None
    return [SLIDING if windowed and not turns else FULL for turns in layers_that_turn(raw, count)]


def layers_that_turn(raw: dict[str, Any], count: int) -> list[bool]:
    """Whether each layer has a rotary embedding."""
    listed, interval = raw["no_rope_layers"], raw["no_rope_layer_interval"]
    if listed is None:
        check_whole("config.json", "no_rope_layer_interval", interval, 1, MOST)
        return [bool((i + 1) % interval) for i in range(count)]
    if not isinstance(listed, list) or len(listed) < count or not all(one in (0, 1) for one in listed):
        raise UnsupportedProblem(
            f"no_rope_layers of config.json is 1 (rotary embedding) or 0 for each of {count} layers; it is "
            f"{quote(listed)}: mend config.json"
        )
    return [bool(one) for one in listed[:count]]


@dataclass(frozen=True)
class Architecture:
    """The layout of a checkpoint of one ``model_type``.

    Attributes:
        layer: the parts of each layer, ``model.layers.0.`` in front of their names.
        defaults: of keys that ``config.json`` may leave out, as transformers has them.
        types: the types of layers where the config has no ``layer_types``; None where all are alike.
        local_theta: the base of rotary embeddings of layers with windows, where it is another.
        eps: the key of the norms' epsilon.
        partial: the config's ``partial_rotary_factor`` counts.
        routed: reads what the config says of experts; None where there are none.
        scaled: embeddings are multiplied by the root of their width, scores by ``query_pre_attn_scalar``'s.
        scores: what scores are multiplied by, where no option says so.
        ahead: the key of how many layers follow the last one, which guess tokens further ahead and are not read.
        inside: the ``model_type`` of checkpoints that have it beside towers for images: this config is then their
            ``text_config``, and ``model.`` of its tensors' names is ``model.language_model.``.
        towers: what names of tensors of the towers begin with.
    """

    layer: tuple[LayerPart, ...]
    defaults: dict[str, Any] = field(default_factory=dict)
    types: Callable[[dict[str, Any], int], list[str]] | None = None
    local_theta: float | None = None
    eps: str = "rms_norm_eps"
    partial: bool = False
    scaled: bool = False
    routed: Callable[[dict[str, Any]], Routed] | None = None
    body: tuple[LayerPart, ...] = (_TABLE, _norm("model.norm"), _HEAD)
    ahead: str = ""
    inside: str = ""
    towers: tuple[str, ...] = ()
    scores: float | None = None


_QWEN = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "tie_word_embeddings": True, "use_bidirectional_attention": False,
}  # fmt: skip
ARCHITECTURES = {
    "llama": Architecture(
        _layer(_PRE_NORMS, "attention_bias", "attention_bias", "mlp_bias"), {"max_position_embeddings": 2048}
    ),
    "mistral": Architecture(
        _layer(_PRE_NORMS, False, False, False),
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        _layers_all_sliding,  # with layer_types it is a Ministral
    ),
    "qwen2": Architecture(_layer(_PRE_NORMS, True, False, False), _QWEN, _layers_after),
    "qwen3": Architecture(
        _layer((*_PRE_NORMS, *_HEAD_NORMS), "attention_bias", "attention_bias", False),
        {**_QWEN, "head_dim": 128},
        _layers_after,
    ),
    "qwen3_vl_text": Architecture(
        _layer((*_PRE_NORMS, *_HEAD_NORMS), "attention_bias", "attention_bias", False),
        {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0, "max_position_embeddings": 128000},
        inside="qwen3_vl",
        towers=("model.visual.",),
    ),
    "mixtral": Architecture(
        (*_PRE_NORMS, *_attention(False, False), *_mixture("block_sparse_moe", ("w1", "w3", "w2"))),
        {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        routed=routing.mixtral,
    ),
    "qwen3_moe": Architecture(
        (
            *_PRE_NORMS, *_HEAD_NORMS, *_attention("attention_bias", "attention_bias"),
            *_mixture("mlp", ("gate_proj", "up_proj", "down_proj")),
        ),
        {
            "num_key_value_heads": 4, "sliding_window": 4096, "use_sliding_window": False, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False, "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        routed=routing.qwen3_moe,
    ),
    "glm4_moe": Architecture(
        (
            *_PRE_NORMS, *(replace(part, option="use_qk_norm") for part in _HEAD_NORMS),
            *_attention("attention_bias", False),
            *(replace(part, layers="dense") for part in _mlp("mlp", "intermediate")),
            *(
                replace(part, layers="routed") for part in (
                    *_mixture("mlp", ("gate_proj", "up_proj", "down_proj"), "weight"),
                    LayerPart(
                        "mlp.correction", ("mlp.gate",), ("experts",), None, tensor="e_score_correction_bias", wide=True
                    ),
                    *_mlp("mlp.shared_experts", "shared"),
                )
            ),
        ),
        {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.5, "use_qk_norm": False, "moe_intermediate_size": 1408, "num_experts_per_tok": 8,
            "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 1,
        },
        partial=True,
        routed=routing.glm4_moe,
        ahead="num_nextn_predict_layers",
    ),
    "gpt_oss": Architecture(
        (
            *_PRE_NORMS, *_attention("attention_bias", "attention_bias"),
            LayerPart("self_attn.sinks", ("self_attn",), ("heads",), None, tensor="sinks"),
            LayerPart("mlp.gate", ("mlp.router",), ("experts",), bias=True),
            LayerPart(
                "mlp.experts.gate_up_proj", ("mlp.experts",), ("2expert",), "hidden", True, tensor="gate_up_proj_"
            ),
            LayerPart("mlp.experts.down_proj", ("mlp.experts",), ("hidden",), "expert", True, tensor="down_proj_"),
        ),
        {
            "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
            "max_position_embeddings": 131072, "sliding_window": 128, "sliding_window_pattern": 2,
            "attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        _layers_by_pattern,
        routed=routing.gpt_oss,
    ),
    "phi3": Architecture(
        (
            *_PRE_NORMS,
            LayerPart("self_attn.qkv_proj", ("self_attn.qkv_proj",), ("query+2key",)),
            LayerPart("self_attn.o_proj", ("self_attn.o_proj",), ("hidden",), "query"),
            LayerPart("mlp.gate_up_proj", ("mlp.gate_up_proj",), ("2intermediate",)),
            LayerPart("mlp.down_proj", ("mlp.down_proj",), ("hidden",), "intermediate"),
        ),
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        partial=True,
    ),
    "granite": Architecture(
        _layer(_PRE_NORMS, "attention_bias", "attention_bias", "mlp_bias"),
        {
            "max_position_embeddings": 2048, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
            "attention_multiplier": 1.0, "logits_scaling": 1.0,
        },
    ),
    "olmo2": Architecture(
        _layer((*_BEHIND, *_WHOLE_NORMS), "attention_bias", "attention_bias", False),
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    "smollm3": Architecture(
        _layer(_PRE_NORMS, "attention_bias", "attention_bias", "mlp_bias"),
        {
            "num_key_value_heads": 4, "rope_theta": 2e6, "use_sliding_window": False, "no_rope_layers": None,
            "no_rope_layer_interval": 4, "tie_word_embeddings": True,
        },
        _layers_without_rope,
    ),
    "starcoder2": Architecture(
        (
            *_LAYER_NORMS,
            *_attention("use_bias", "use_bias"),
            LayerPart("mlp.c_fc", ("mlp.c_fc",), ("intermediate",), bias="use_bias"),
            LayerPart("mlp.c_proj", ("mlp.c_proj",), ("hidden",), "intermediate", "use_bias"),
        ),
        {
            "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5, "use_bias": True, "tie_word_embeddings": True,
        },
        eps="norm_epsilon",
        body=(_TABLE, _norm("model.norm", bias=True), _HEAD),
    ),
    "glm4": Architecture(
        (
            *_PRE_NORMS, _norm("post_self_attn_layernorm"), _norm("post_mlp_layernorm"),
            *_attention("attention_bias", False),
            LayerPart("mlp.gate_up_proj", ("mlp.gate_up_proj",), ("2intermediate",)),
            LayerPart("mlp.down_proj", ("mlp.down_proj",), ("hidden",), "intermediate"),
        ),
        {
            "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-7,
            "max_position_embeddings": 131072, "partial_rotary_factor": 0.5,
        },
        partial=True,
    ),
    "cohere2": Architecture(
        _layer((_norm("input_layernorm"),), "attention_bias", "attention_bias", False),
        {
            "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "sliding_window": 4096, "logit_scale": 0.0625,
            "sliding_window_pattern": 4, "tie_word_embeddings": True,
        },
        _layers_by_pattern,
        eps="layer_norm_eps",
    ),
    "gemma2": Architecture(
        _layer(_SANDWICH, "attention_bias", "attention_bias", False),
        {
            **_GEMMA, "sliding_window_pattern": 2, "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        _layers_by_pattern,
        scaled=True,
    ),
    "gemma3_text": Architecture(
        _layer((*_SANDWICH, *_HEAD_NORMS), "attention_bias", "attention_bias", False),
        {**_GEMMA, "sliding_window_pattern": 6, "max_position_embeddings": 131072, "rope_theta": 1e6},
        _layers_by_pattern,
        local_theta=1e4,
        scaled=True,
    ),
    "gemma4_text": Architecture(
        (
            *_SANDWICH, *_HEAD_NORMS, *_attention("attention_bias", "attention_bias", "values"),
            LayerPart(
                "self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj"), ("query", "key"), bias="attention_bias",
                layers="keys",
            ),
            *_mlp("mlp", "intermediate"), LayerPart("layer_scalar", ("",), ("one",), None, tensor="layer_scalar"),
        ),
        {
            **_GEMMA, "sliding_window": 512, "sliding_window_pattern": 6, "max_position_embeddings": 131072,
            "rope_theta": 1e6, "query_pre_attn_scalar": None, "global_head_dim": 512,
            "num_global_key_value_heads": None, "attention_k_eq_v": False, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 256, "enable_moe_block": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        _layers_by_pattern,
        local_theta=1e4,
        scaled=True,
        inside="gemma4",
        towers=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
        scores=1.0,
    ),
}  # fmt: skip
