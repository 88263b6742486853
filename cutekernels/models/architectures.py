"""Families as their checkpoints have them: names and shapes of tensors, and what ``config.json`` may leave out.

A family is a row of ``ARCHITECTURES``; what it computes by stands in ``integrations/transformers/families.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cutekernels.errors import UnsupportedProblem
from cutekernels.models.ropes import read_ropes
from cutekernels.nn.mlp import Gate
from cutekernels.ops.shared.checks import check_flag, check_number, check_whole, quote

SLIDING, FULL = "sliding_attention", "full_attention"
_MOST, _MOST_LAYERS = 2**31 - 1, 2000
_Bias = bool | str  # of a part
_GATES: dict[str, Gate] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip


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
    """

    path: str
    stored: tuple[str, ...]
    rows: tuple[str, ...]
    columns: str | None = "hidden"
    bias: _Bias = False
    each: bool = False
    tensor: str = ""

    def of(self, experts: int) -> LayerPart:
        """With the modules of so many experts, one behind the other."""
        if not self.each:
            return self
        stored = tuple(name.format(e) for e in range(experts) for name in self.stored)
        return replace(self, stored=stored, rows=self.rows * experts, each=False)


@dataclass(frozen=True)
class Routed:
    """A mixture of experts, as ``config.json`` has it.

    Attributes:
        experts: how many.
        top_k: of a token.
        width: of an expert.
        renormalize: whether a token's weights are divided by their sum.
        activation: of ``moe_ffn``.
        limit: of a clamped gate.
    """

    experts: int
    top_k: int
    width: int
    renormalize: bool
    activation: Literal["silu_mul", "swiglu_oai"] = "silu_mul"
    limit: float = 7.0


def _norm(path: str, size: str = "hidden", bias: bool = False) -> LayerPart:
    return LayerPart(path, (path,), (size,), None, bias)


def _attention(qkv_bias: _Bias, out_bias: _Bias) -> tuple[LayerPart, ...]:
    """Projections of the common names."""
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return (
        LayerPart("self_attn.qkv_proj", qkv, ("query", "key", "key"), bias=qkv_bias),
        LayerPart("self_attn.o_proj", ("self_attn.o_proj",), ("hidden",), "query", out_bias),
    )


def _layer(norms: tuple[LayerPart, ...], qkv_bias: _Bias, out_bias: _Bias, mlp_bias: _Bias) -> tuple[LayerPart, ...]:
    """A layer of the common names."""
    return (
        *norms,
        *_attention(qkv_bias, out_bias),
        LayerPart("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), ("intermediate",) * 2, bias=mlp_bias),
        LayerPart("mlp.down_proj", ("mlp.down_proj",), ("hidden",), "intermediate", mlp_bias),
    )


def _mixture(front: str, names: tuple[str, str, str]) -> tuple[LayerPart, ...]:
    """A router and the gate, up and down projections of each expert, by their names in a checkpoint."""
    gate, up, down = (f"{front}.experts.{{}}.{name}" for name in names)
    return (
        LayerPart("mlp.gate", (f"{front}.gate",), ("experts",)),
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
    windowed = raw["sliding_window"] is not None
    return [SLIDING if windowed and not turns else FULL for turns in _turning(raw, count)]


def _turning(raw: dict[str, Any], count: int) -> list[bool]:
    """Whether each layer has a rotary embedding."""
    listed, interval = raw["no_rope_layers"], raw["no_rope_layer_interval"]
    if listed is None:
        check_whole("config.json", "no_rope_layer_interval", interval, 1, _MOST)
        return [bool((i + 1) % interval) for i in range(count)]
    if not isinstance(listed, list) or len(listed) < count or not all(one in (0, 1) for one in listed):
        raise UnsupportedProblem(
            f"no_rope_layers of config.json is 1 (rotary embedding) or 0 for each of {count} layers; it is "
            f"{quote(listed)}: mend config.json"
        )
    return [bool(one) for one in listed[:count]]


def _router(raw: dict[str, Any], width: str) -> Routed:
    experts: int = raw.get("num_local_experts", raw.get("num_experts", 0))
    check_whole("config.json", "num_experts", experts, 1, 512)
    check_whole("config.json", "num_experts_per_tok", raw["num_experts_per_tok"], 1, min(experts, 32))
    check_whole("config.json", width, raw.get(width), 1, _MOST)
    return Routed(experts, raw["num_experts_per_tok"], raw[width], bool(raw.get("norm_topk_prob", True)))


def _mixtral(raw: dict[str, Any]) -> Routed:
    if raw.get("router_jitter_noise"):
        raise UnsupportedProblem("experts have no noise in their router; set router_jitter_noise of config.json to 0")
    return _silu(raw, _router(raw, "intermediate_size"))


def _qwen3_moe(raw: dict[str, Any]) -> Routed:
    if raw["decoder_sparse_step"] != 1 or raw["mlp_only_layers"]:
        raise UnsupportedProblem(
            "load takes experts in every layer; config.json has decoder_sparse_step or mlp_only_layers: load it with "
            "transformers, and pass the model to Decoder.from_transformers"
        )
    return _silu(raw, _router(raw, "moe_intermediate_size"))


def _silu(raw: dict[str, Any], routed: Routed) -> Routed:
    if raw["hidden_act"] not in ("silu", "swish"):
        raise UnsupportedProblem(f"experts have the gate of SiLU; config.json has {quote(raw['hidden_act'])}")
    return routed


def _gpt_oss(raw: dict[str, Any]) -> Routed:
    check_number("config.json", "swiglu_limit", raw["swiglu_limit"], 0.0)
    return replace(
        _silu(raw, _router(raw, "intermediate_size")), renormalize=True, activation="swiglu_oai",
        limit=float(raw["swiglu_limit"]),
    )  # fmt: skip


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


_COMMON: dict[str, Any] = {
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 32768, "sliding_window": None, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
# Transformers' other families ignore these keys, which some checkpoints have all the same.
_READ_BY_SOME = {"hidden_activation", "norm_topk_prob", "no_rope_layers", "use_sliding_window"}
_FLAGS = (
    "attention_bias", "is_causal", "mlp_bias", "norm_topk_prob", "tie_word_embeddings", "use_bias",
    "use_sliding_window",
)  # fmt: skip
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
    "mixtral": Architecture(
        (*_PRE_NORMS, *_attention(False, False), *_mixture("block_sparse_moe", ("w1", "w3", "w2"))),
        {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        routed=_mixtral,
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
        routed=_qwen3_moe,
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
        },
        _layers_by_pattern,
        routed=_gpt_oss,
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
}  # fmt: skip


@dataclass(frozen=True)
class DecoderConfig:
    """The part of ``config.json`` that decides what a decoder computes, under the names of transformers.

    Attributes:
        layer_types: of each layer, or None where all are alike.
        gate: of the MLP.
        scaling: of attention's scores.
        embed_scale: of embeddings, or None.
        rotary_dim: channels of a head that turn.
        embedding_multiplier, residual_multiplier, logits_scaling, logit_scale: of families that have them, else 1.
        routed: of the experts, or None.
        turning: whether each layer has a rotary embedding, or None for all.
        tied: whether the head is the embedding's table; None where the config does not say.
        raw: the config itself, with what it leaves out.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    gate: Gate
    layer_types: tuple[str, ...] | None
    sliding_window: int | None
    rope_parameters: dict[str, Any]
    rotary_dim: int
    scaling: float
    embed_scale: float | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    logit_scale: float
    routed: Routed | None
    turning: tuple[bool, ...] | None
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    is_causal: bool
    tied: bool | None
    eos_token_id: Any
    raw: dict[str, Any]

    def sizes(self) -> dict[str, int]:
        """Rows and columns by the names of :class:`LayerPart`."""
        return {
            "hidden": self.hidden_size,
            "intermediate": self.intermediate_size,
            "vocabulary": self.vocab_size,
            "head": self.head_dim,
            "query": self.num_attention_heads * self.head_dim,
            "key": self.num_key_value_heads * self.head_dim,
            "query+2key": (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim,
            "2intermediate": 2 * self.intermediate_size,
            "heads": self.num_attention_heads,
        } | self._of_experts()

    def _of_experts(self) -> dict[str, int]:
        if self.routed is None:
            return {}
        return {"experts": self.routed.experts, "expert": self.routed.width, "2expert": 2 * self.routed.width}

    def parts(self) -> tuple[LayerPart, ...]:
        """Of each layer."""
        experts = 0 if self.routed is None else self.routed.experts
        return tuple(part.of(experts) for part in ARCHITECTURES[self.model_type].layer)

    def has_bias(self, part: LayerPart) -> bool:
        return bool(self.raw[part.bias]) if isinstance(part.bias, str) else part.bias

    def is_sliding(self, layer: int) -> bool:
        return self.layer_types is None or self.layer_types[layer] == SLIDING


def read_config(given: dict[str, Any]) -> DecoderConfig:
    """The config of a family in ``ARCHITECTURES``.

    Raises:
        UnsupportedProblem: another family, sizes that are none, options that no op has.
    """
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise UnsupportedProblem(
            f"load takes checkpoints whose model_type is one of {', '.join(ARCHITECTURES)}; config.json has "
            f"{quote(kind)}: load it with transformers, and see whether Decoder.from_transformers takes the model"
        )
    architecture = ARCHITECTURES[kind]
    raw = _COMMON | architecture.defaults | given
    for name in _READ_BY_SOME - architecture.defaults.keys():
        raw.pop(name, None)
    for name in _FLAGS:
        if raw.get(name) is not None:
            check_flag("config.json", name, raw[name])
    check_ends("config.json", raw.get("eos_token_id"))
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        check_whole("config.json", name, raw.get(name), 1, _MOST_LAYERS if name == "num_hidden_layers" else _MOST)
    heads = raw["num_attention_heads"]
    heads_kv = heads if raw["num_key_value_heads"] is None else raw["num_key_value_heads"]
    head_dim = raw["head_dim"] or raw["hidden_size"] // heads
    check_whole("config.json", "num_key_value_heads", heads_kv, 1, heads)
    check_whole("config.json", "head_dim", head_dim, 1, _MOST)
    if heads % heads_kv:
        raise UnsupportedProblem(f"config.json has {heads} heads for {heads_kv} of keys, which do not divide them")
    check_number("config.json", architecture.eps, raw[architecture.eps], 0.0)
    for name in (
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "logit_scale",
    ):
        if name in architecture.defaults:
            check_number("config.json", name, raw[name], 1e-30)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(name) is not None:
            check_number("config.json", name, raw[name], 0.0)
    act = raw.get("hidden_activation") or raw["hidden_act"]
    if not isinstance(act, str) or act not in _GATES:
        raise UnsupportedProblem(f"load has the gates {', '.join(_GATES)}; config.json has {quote(act)}")
    if architecture.scaled:
        check_number("config.json", "query_pre_attn_scalar", raw["query_pre_attn_scalar"], 1e-30)
    if raw.get("use_sliding_window") is False:
        raw["sliding_window"] = None
    types = _types(raw, architecture)
    ropes = read_ropes(raw, architecture.local_theta)
    rotary_dim = head_dim
    if architecture.partial:
        share = ropes.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
        check_number("config.json", "partial_rotary_factor", share, 0.0, 1.0)
        rotary_dim = int(head_dim * share)
        if rotary_dim < 2 or rotary_dim % 2:
            raise UnsupportedProblem(
                f"rotary embeddings turn pairs of channels; partial_rotary_factor {share} of config.json leaves "
                f"{rotary_dim} of {head_dim}: mend config.json"
            )
    scaling = raw["query_pre_attn_scalar"] ** -0.5 if architecture.scaled else head_dim**-0.5
    return DecoderConfig(
        model_type=kind, vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"], num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads, num_key_value_heads=heads_kv, head_dim=head_dim,
        rms_norm_eps=raw[architecture.eps], gate=_GATES[act], layer_types=types, sliding_window=raw["sliding_window"],
        rope_parameters=ropes, rotary_dim=rotary_dim,
        scaling=float(raw["attention_multiplier"]) if "attention_multiplier" in architecture.defaults else scaling,
        embed_scale=raw["hidden_size"] ** 0.5 if architecture.scaled else None,
        embedding_multiplier=raw.get("embedding_multiplier", 1.0),
        residual_multiplier=raw.get("residual_multiplier", 1.0),
        logits_scaling=raw.get("logits_scaling", 1.0),
        logit_scale=raw.get("logit_scale", 1.0),
        routed=None if architecture.routed is None else architecture.routed(raw),
        turning=tuple(_turning(raw, raw["num_hidden_layers"])) if "no_rope_layers" in raw else None,
        attn_logit_softcapping=raw.get("attn_logit_softcapping"),
        final_logit_softcapping=raw.get("final_logit_softcapping"),
        is_causal=bool(raw.get("is_causal", True)) and not raw.get("use_bidirectional_attention"),
        tied=raw.get("tie_word_embeddings"), eos_token_id=raw.get("eos_token_id"), raw=raw,
    )  # fmt: skip


def check_ends(file: str, ids: Any) -> None:
    """Refuses an ``eos_token_id`` that is neither a token's number nor a list of such, at which no text would end."""
    if ids is not None and not all(type(token) is int for token in (ids if isinstance(ids, list) else [ids])):
        raise UnsupportedProblem(
            f"eos_token_id of {file} is a token's number, or a list of them; it is {quote(ids)}: mend {file}"
        )


def _types(raw: dict[str, Any], architecture: Architecture) -> tuple[str, ...] | None:
    """The type of each layer, checked with the window that it asks for."""
    window, count = raw["sliding_window"], raw["num_hidden_layers"]
    if window is not None:
        check_whole("config.json", "sliding_window", window, 1, _MOST)
    if architecture.types is None:
        return None
    for name in ("max_window_layers", "sliding_window_pattern"):
        if name in raw:
            check_whole("config.json", name, raw[name], int(name == "sliding_window_pattern"), _MOST)
    types = raw.get("layer_types")
    types = architecture.types(raw, count) if types is None else types
    if not isinstance(types, list) or len(types) != count or not all(one in (SLIDING, FULL) for one in types):
        raise UnsupportedProblem(
            f"layer_types of config.json is {SLIDING} or {FULL} for each of {count} layers; it is {quote(types)}"
        )
    if window is None and SLIDING in types:
        raise UnsupportedProblem("config.json has layers with a window, and no sliding_window: mend config.json")
    return tuple(types)
