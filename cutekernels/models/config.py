"""``config.json`` as a decoder reads it: by the row of its family in ``architectures.py``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cutekernels.errors import UnsupportedProblem
from cutekernels.models.architectures import ARCHITECTURES, FULL, SLIDING, Architecture, LayerPart, layers_that_turn
from cutekernels.models.ropes import read_ropes
from cutekernels.models.routing import MOST, MOST_LAYERS, Routed
from cutekernels.nn.mlp import Gate
from cutekernels.ops.shared.checks import check_flag, check_number, check_whole, quote

_STORED_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_GATES: dict[str, Gate] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
_COMMON: dict[str, Any] = {
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 32768, "sliding_window": None, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
# Transformers' other families ignore these keys, which some checkpoints have all the same.
_READ_BY_SOME = {
    "attention_k_eq_v", "enable_moe_block", "global_head_dim", "hidden_activation", "norm_topk_prob", "no_rope_layers",
    "use_qk_norm", "use_sliding_window",
}  # fmt: skip
_FLAGS = (
    "attention_bias", "is_causal", "mlp_bias", "norm_topk_prob", "tie_word_embeddings", "use_bias",
    "attention_k_eq_v", "enable_moe_block", "use_qk_norm", "use_sliding_window",
)  # fmt: skip


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
        inside: whether the checkpoint has it beside towers for images.
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
    inside: bool
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
            "one": 1,
        } | self._of_experts()

    def _of_experts(self) -> dict[str, int]:
        if self.routed is None:
            return {}
        routed = self.routed
        widths = {"expert": routed.width, "2expert": 2 * routed.width, "shared": routed.shared}
        return {"experts": routed.experts} | widths

    def routed_at(self, layer: int) -> Routed | None:
        """The experts of a layer, or None where it has none."""
        return None if self.routed is None or layer < self.routed.first else self.routed

    def parts(self, layer: int) -> tuple[LayerPart, ...]:
        """Parts of one layer."""
        routed = self.routed_at(layer)
        kinds = "all", "dense" if routed is None else "routed", "keys" if self.has_keys_alone(layer) else "values"
        return tuple(
            part.of(0 if routed is None else routed.experts)
            for part in ARCHITECTURES[self.model_type].layer
            if part.layers in kinds and (not part.option or self.raw[part.option])
        )

    def has_keys_alone(self, layer: int) -> bool:
        """Whether a layer's keys are its values too."""
        return bool(self.raw.get("attention_k_eq_v")) and not self.is_sliding(layer)

    @property
    def body_path(self) -> str:
        """The path in a checkpoint of what a language model alone calls ``model``."""
        return "model.language_model" if self.inside else "model"

    def is_unread(self, name: str) -> bool:
        """Whether a checkpoint's tensor is of towers for images, or of layers that guess tokens further ahead."""
        if self.inside and name.startswith(ARCHITECTURES[self.model_type].towers):
            return True
        found, last = _STORED_LAYER.match(name), self.num_hidden_layers
        ahead = ARCHITECTURES[self.model_type].ahead
        return bool(found and ahead and last <= int(found[1]) < last + self.raw[ahead])

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
    inside = next((text for text, one in ARCHITECTURES.items() if one.inside and one.inside == kind), "")
    if inside:
        own = given.get("text_config")
        if not isinstance(own, dict) or own.get("model_type", inside) != inside:
            raise UnsupportedProblem(
                f"text_config of config.json is an object of model_type {inside}; it is {quote(own)}: mend config.json"
            )
        tying = {name: given[name] for name in ("tie_word_embeddings",) if name in given}  # which counts before its own
        kind, given = inside, {"eos_token_id": given.get("eos_token_id")} | own | tying
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise UnsupportedProblem(
            f"load takes checkpoints whose model_type is one of {', '.join(_known_types())}; config.json has "
            f"{quote(kind)}: load it with transformers, and see whether Decoder.from_transformers takes the model"
        )
    architecture = ARCHITECTURES[kind]
    raw = _COMMON | architecture.defaults | given
    if raw.get("rope_parameters") is None and "rope_parameters" in architecture.defaults:
        raw["rope_parameters"] = architecture.defaults["rope_parameters"]
    for name in _READ_BY_SOME - architecture.defaults.keys():
        raw.pop(name, None)
    for name in _FLAGS:
        if raw.get(name) is not None:
            check_flag("config.json", name, raw[name])
    check_ends("config.json", raw.get("eos_token_id"))
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        check_whole("config.json", name, raw.get(name), 1, MOST_LAYERS if name == "num_hidden_layers" else MOST)
    heads = raw["num_attention_heads"]
    heads_kv = heads if raw["num_key_value_heads"] is None else raw["num_key_value_heads"]
    head_dim = raw["head_dim"] or raw["hidden_size"] // heads
    check_whole("config.json", "num_key_value_heads", heads_kv, 1, heads)
    check_whole("config.json", "head_dim", head_dim, 1, MOST)
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
        raise UnsupportedProblem(
            f"load has the gates {', '.join(_GATES)}; config.json has {quote(act)}: load the model with transformers"
        )
    if architecture.scaled and architecture.scores is None:
        check_number("config.json", "query_pre_attn_scalar", raw["query_pre_attn_scalar"], 1e-30)
    if raw.get("use_sliding_window") is False and "no_rope_layers" not in raw:  # SmolLM3's layer_types say it alone
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
    _check_alike(raw, types, head_dim, heads_kv)
    scaling = architecture.scores or (raw["query_pre_attn_scalar"] if architecture.scaled else head_dim) ** -0.5
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
        turning=tuple(layers_that_turn(raw, raw["num_hidden_layers"])) if "no_rope_layers" in raw else None,
        attn_logit_softcapping=raw.get("attn_logit_softcapping"),
        final_logit_softcapping=raw.get("final_logit_softcapping"),
        is_causal=bool(raw.get("is_causal", True))
        and raw.get("use_bidirectional_attention") in (None, False, "vision"),  # images alone
        tied=raw.get("tie_word_embeddings"), inside=bool(inside), eos_token_id=raw.get("eos_token_id"), raw=raw,
    )  # fmt: skip


def _known_types() -> list[str]:
    """Each ``model_type`` that ``config.json`` may have."""
    return [*ARCHITECTURES, *(one.inside for one in ARCHITECTURES.values() if one.inside)]


def check_ends(file: str, ids: Any) -> None:
    """Refuses an ``eos_token_id`` that is neither a token's number nor a list of such, at which no text would end."""
    if ids is not None and not all(type(token) is int for token in (ids if isinstance(ids, list) else [ids])):
        raise UnsupportedProblem(
            f"eos_token_id of {file} is a token's number, or a list of them; it is {quote(ids)}: mend {file}"
        )


def _check_alike(raw: dict[str, Any], types: tuple[str, ...] | None, head_dim: int, heads_kv: int) -> None:
    """Refuses a config whose layers have heads of other widths, or more or fewer of them (Gemma 4)."""
    if "global_head_dim" not in raw:
        return
    own, count = raw.get("per_layer_config"), raw["num_global_key_value_heads"] if raw["attention_k_eq_v"] else None
    if own is None:
        whole = {"head_dim": raw["global_head_dim"], "num_key_value_heads": heads_kv if count is None else count}
        own = {layer: whole for layer, kind in enumerate(types or ()) if kind == FULL}
    usual = {"head_dim": head_dim, "num_key_value_heads": heads_kv}
    for layer, values in own.items() if isinstance(own, dict) else [("?", own)]:
        if not isinstance(values, dict) or values != {name: usual.get(name) for name in values}:
            raise UnsupportedProblem(
                f"load takes layers whose heads are alike, up to 256 wide; layer {layer} of config.json has "
                f"{quote(values)}, others {usual}: load it with transformers, and generate under cutekernels.patch"
            )


def _types(raw: dict[str, Any], architecture: Architecture) -> tuple[str, ...] | None:
    """The type of each layer, checked with the window that it asks for."""
    window, count = raw["sliding_window"], raw["num_hidden_layers"]
    if window is not None:
        check_whole("config.json", "sliding_window", window, 1, MOST)
    if architecture.types is None:
        return None
    for name in ("max_window_layers", "sliding_window_pattern"):
        if name in raw:
            check_whole("config.json", name, raw[name], int(name == "sliding_window_pattern"), MOST)
    types = raw.get("layer_types")
    types = architecture.types(raw, count) if types is None else types
    if not isinstance(types, list) or len(types) != count or not all(one in (SLIDING, FULL) for one in types):
        raise UnsupportedProblem(
            f"layer_types of config.json is {SLIDING} or {FULL} for each of {count} layers; it is {quote(types)}"
        )
    if "global_head_dim" in raw:  # as transformers has it in Gemma 4
        types = [*types[:-1], FULL]
    if window is None and SLIDING in types:
        raise UnsupportedProblem("config.json has layers with a window, and no sliding_window: mend config.json")
    return tuple(types)
