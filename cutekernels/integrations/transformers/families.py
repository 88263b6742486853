"""Model families as data: which classes of transformers they are made of, and by which conventions.

``patch`` and ``models.Decoder`` both read a model through this file.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.nn.mlp import Gate
from cutekernels.ops.rope.api import rope

Norms = tuple[str | None, str | None, str | None, str | None]
_BEFORE: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
_BEHIND: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_AROUND: Norms = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_AROUND_GLM: Norms = "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"


@dataclass(frozen=True)
class Family:
    """One ``model_type`` of transformers.

    Attributes:
        module: of ``transformers.models``, which holds the classes.
        prefix: of the classes' names.
        experts: whether it has mixtures of experts.
        weight_offset, rounding: of its norms, as :func:`cutekernels.rms_norm` takes them.
        norms: the names of a layer's norms: in front of attention, of its result, in front of the MLP, of its result;
            None where there is none.
        parallel: attention and MLP have one input, and their results are added at once.
        layer_norm: norms are layer norms: ``torch.nn.LayerNorm`` with biases, or the family's own.
        whole_norms: norms of queries and keys are of all heads together, before these are told apart.
        joined_qkv, joined_mlp: checkpoints have q, k and v in one projection; gate and up.
        gated: MLPs have a gate; else ``c_proj(act(c_fc(x)))``.
        multipliers: embeddings are multiplied by the config's ``embedding_multiplier``, what is added to the residual
            by ``residual_multiplier``, and logits are divided by ``logits_scaling``.
        logit_scale: logits are multiplied by the config's ``logit_scale``.
        interleaved: channels that turn together are neighbours.
        table: rows of cosines: their halves repeat, they have each angle once, or twice in a row.
        turns_in_windows: layers without a window have no rotary embedding.
        output_gate: attention's result is multiplied by sigmoids, of logits behind each head's query in q_proj.
        shares_keys: values are normed, too; a layer may have keys for values, or an earlier layer's keys and values.
        sinks: attention has a logit for each head that takes its share and adds nothing.
        windowed: attention has a ``sliding_window``: the config's in all layers of the model or in those that
            ``layer_types`` says (transformers' masks have it, whatever a layer was told), or its own layer's.
        passes_window: transformers' attention hands that on; where not, its mask holds it.
        softcap: attention has the config's ``attn_logit_softcapping``.
        logit_softcap: logits have the config's ``final_logit_softcapping``.
        causal: masks are the causal band, a window and padding, and nothing else that a config may ask for.
        renamed: ``(role, class)`` whose name is another, or None for one that no kernel has.
        mlp: names of an MLP's projections, the last one behind the gate; () for the usual ones.
        gate: of an MLP that has it in its code alone.
        attention_left: why attention stays transformers' own, or "".
        undecoded: why ``Decoder`` does not take the family, or "".
        inside: the ``model_type`` of models with a head that have it beside towers for images; "" where none has.
    """

    module: str
    prefix: str
    experts: bool = False
    weight_offset: float = 0.0
    rounding: str = "huggingface"
    norms: Norms = _BEFORE
    parallel: bool = False
    layer_norm: bool = False
    whole_norms: bool = False
    joined_qkv: bool = False
    joined_mlp: bool = False
    gated: bool = True
    multipliers: bool = False
    logit_scale: bool = False
    interleaved: bool = False
    table: Literal["halves", "once", "twice"] = "halves"
    turns_in_windows: bool = False
    output_gate: bool = False
    shares_keys: bool = False
    sinks: bool = False
    windowed: Literal["model", "types", "layer"] | None = "layer"
    passes_window: bool = True
    softcap: bool = False
    logit_softcap: bool = False
    causal: bool = True
    renamed: tuple[tuple[str, str | None], ...] = ()
    mlp: tuple[str, ...] = ()
    gate: Gate | None = None
    attention_left: str = ""
    undecoded: str = ""
    inside: str = ""

    def classes(self) -> dict[str, type]:
        """The classes by role: norm, mlp, attention, layer, experts, and the model with its head."""
        found = import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        suffixes = {
            "norm": "RMSNorm",
            "mlp": "MLP",
            "attention": "Attention",
            "layer": "DecoderLayer",
            "causal": "ForCausalLM",
            "gated_norm": "RMSNormGated",
        }
        if self.experts:
            suffixes["experts"] = "Experts"
        names = {role: f"{self.prefix}{suffix}" for role, suffix in suffixes.items()} | dict(self.renamed)
        named = {role: getattr(found, name or "", None) for role, name in names.items()}
        if self.layer_norm and named["norm"] is None:
            named["norm"] = torch.nn.LayerNorm
        return {role: cls for role, cls in named.items() if cls is not None}

    def norm_options(self, norm: Any) -> dict[str, Any]:
        """Options with which ``rms_norm``, or ``layer_norm``, computes what the module ``norm`` does."""
        eps = norm.__dict__.get("variance_epsilon")  # where it is missing, getattr would search the module in Python
        eps = norm.eps if eps is None else eps
        if self.layer_norm:
            return {"eps": eps}
        return {"eps": eps, "weight_offset": self.weight_offset, "rounding": self.rounding}

    def softcap_of(self, attention: Any) -> float | None:
        """The softcap of an attention module's scores, or None."""
        return attention.attn_logit_softcapping if self.softcap else None

    def logit_softcap_of(self, config: Any) -> float | None:
        """The softcap of a model's logits, or None."""
        return config.final_logit_softcapping if self.logit_softcap else None

    def embedding_multiplier_of(self, model: Any) -> float | None:
        """The factor of a model's embeddings, or None."""
        if self.multipliers:
            return float(model.config.embedding_multiplier)
        table = model.model.embed_tokens
        scale = getattr(table, "embed_scale", None)  # a tensor, of Gemma's
        return None if scale is None else float(scale.to(table.weight.dtype))

    def residual_multiplier_of(self, config: Any) -> float | None:
        """The factor of what is added to a model's residual, or None."""
        return float(config.residual_multiplier) if self.multipliers else None

    def logits_scaling_of(self, config: Any) -> float | None:
        """The divisor of a model's logits, or None."""
        if self.logit_scale:
            return 1.0 / float(config.logit_scale)
        return float(config.logits_scaling) if self.multipliers else None

    def turns(self, attention: Any) -> bool:
        """Whether an attention module has a rotary embedding."""
        if self.turns_in_windows:
            return attention.sliding_window is not None
        return bool(attention.__dict__.get("use_rope", True))

    def rotary_table(self, t: Tensor) -> Tensor:
        """Cosines or sines of transformers, ``(B, S, ...)``, with each angle once."""
        if self.table == "halves":
            return t.narrow(-1, 0, t.shape[-1] // 2)
        return t if self.table == "once" else t[..., ::2]

    def turned(self, q: Tensor, k: Any, cos: Tensor, sin: Tensor) -> tuple[Tensor, Any]:
        """Queries and keys, or None, behind the rotary embedding; cosines and sines as transformers makes them."""
        if cos.requires_grad or sin.requires_grad:
            cos, sin = cos.detach(), sin.detach()
        if self.table == "halves" and not self.interleaved:
            return rope(q, k, cos, sin)
        batch, tokens = cos.shape[:2]
        cos, sin = self.rotary_table(cos), self.rotary_table(sin)
        if batch == 1:
            return rope(q, k, cos[0], sin[0], interleaved=self.interleaved)
        positions = torch.arange(batch * tokens, device=cos.device).view(batch, tokens)
        return rope(q, k, cos.flatten(0, 1), sin.flatten(0, 1), interleaved=self.interleaved, positions=positions)

    def window_of(self, attention: Any) -> int | None:
        """How many tokens a query of an attention module sees, itself included, or None for all."""
        if self.windowed is None:
            return None
        own: int | None = attention.__dict__.get("sliding_window")
        if self.windowed == "types" and own is None and hasattr(attention, "config"):  # of transformers, not of load
            typed = attention.config.layer_types[attention.layer_idx] == "sliding_attention"
            return attention.config.sliding_window if typed else None
        if self.windowed != "model" or "sliding_window" in attention.__dict__:
            return own
        return getattr(attention.config, "sliding_window", None)


_GEMMA: dict[str, Any] = {"weight_offset": 1.0, "rounding": "once", "norms": _AROUND, "logit_softcap": True}
_DELTA: dict[str, Any] = {
    "weight_offset": 1.0, "rounding": "once", "output_gate": True, "windowed": None,
    "undecoded": "three of four layers mix tokens by the gated delta rule, which no kernel computes",
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "Llama", windowed=None),
    "mistral": Family("mistral", "Mistral", windowed="model"),
    "mixtral": Family("mixtral", "Mixtral", experts=True, windowed="model"),
    "qwen2": Family("qwen2", "Qwen2"),
    "qwen3": Family("qwen3", "Qwen3"),
    "qwen3_moe": Family("qwen3_moe", "Qwen3Moe", experts=True, windowed="model"),
    "qwen3_5_text": Family("qwen3_5", "Qwen3_5", **_DELTA),
    "qwen3_5_moe_text": Family("qwen3_5_moe", "Qwen3_5Moe", experts=True, **_DELTA),
    "qwen3_next": Family("qwen3_next", "Qwen3Next", experts=True, **_DELTA),
    "qwen3_vl_text": Family("qwen3_vl", "Qwen3VLText", windowed=None, inside="qwen3_vl"),
    "glm4_moe": Family("glm4_moe", "Glm4Moe", experts=True, windowed=None),
    "qwen2_moe": Family("qwen2_moe", "Qwen2Moe", experts=True, passes_window=False),
    "phi3": Family("phi3", "Phi3", joined_qkv=True, joined_mlp=True, windowed="model"),
    "granite": Family("granite", "Granite", multipliers=True, windowed=None),
    "olmo2": Family("olmo2", "Olmo2", rounding="once", norms=_BEHIND, whole_norms=True, windowed=None),
    "smollm3": Family("smollm3", "SmolLM3", windowed="types", passes_window=False),
    "starcoder2": Family("starcoder2", "Starcoder2", layer_norm=True, gated=False, windowed="model"),
    "glm4": Family("glm4", "Glm4", norms=_AROUND_GLM, joined_mlp=True, interleaved=True, windowed=None),
    "cohere2": Family(
        "cohere2", "Cohere2", norms=("input_layernorm", None, None, None), parallel=True, layer_norm=True,
        logit_scale=True, interleaved=True, table="twice", turns_in_windows=True,
        renamed=(("norm", "Cohere2LayerNorm"),),
    ),
    "gpt_oss": Family(
        "gpt_oss", "GptOss", experts=True, rounding="once", table="once", sinks=True, renamed=(("mlp", None),),
        undecoded="its experts have biases and a clamped gate, which only cutekernels.models.load(path) reads",
    ),
    "deepseek_v2": Family(
        "deepseek_v2", "DeepseekV2", experts=True, windowed=None, renamed=(("attention", None),),
        attention_left="its keys and values are expanded from one latent vector (MLA), and have two widths",
        undecoded="its cache holds latent vectors (MLA), which no kernel reads",
    ),
    "qwen2_5_vl_text": Family("qwen2_5_vl", "Qwen2_5_VL", renamed=(("mlp", "Qwen2MLP"),)),
    "gemma2": Family("gemma2", "Gemma2", softcap=True, **_GEMMA),
    "gemma3_text": Family("gemma3", "Gemma3", causal=False, **_GEMMA),
    "gemma4_text": Family(
        "gemma4", "Gemma4Text", experts=True, rounding="once", norms=_AROUND, shares_keys=True, logit_softcap=True,
        causal=False, renamed=(("norm", "Gemma4RMSNorm"), ("causal", "Gemma4ForCausalLM"), ("layer", None)),
        inside="gemma4",
    ),
}  # fmt: skip


def family_of(model: Any, verb: str, remedy: str, *, head: bool = False) -> Family:
    """The family of a transformers model. Raises UnsupportedProblem for anything else, which ``verb`` does not take.

    ``head``: whether ``verb`` needs a language model's head, too.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILIES or not is_whole(model):
        taken = [name for name, family in FAMILIES.items() if not (head and family.undecoded)]
        shown = f"model_type {kind!r}" if kind and is_whole(model) else f"a {type(model).__name__}"
        raise UnsupportedProblem(
            f"{verb} takes models of transformers whose model_type is one of {', '.join(taken)}; this is {shown}: "
            f"{by_part(model, head) or remedy}"
        )
    return FAMILIES[kind]


def is_listed(model: Any) -> bool:
    """Whether a model of transformers is of one of ``FAMILIES``."""
    return is_whole(model) and getattr(getattr(model, "config", None), "model_type", None) in FAMILIES


def is_whole(model: Any) -> bool:
    """Whether ``model`` is a model of transformers, or a wrapper that passes for one, and no layer of it."""
    return isinstance(model, torch.nn.Module) and hasattr(model, "set_attn_implementation")


def by_part(model: Any, head: bool) -> str:
    """The remedy where a part of ``model`` is of a family: a wrapper's (DataParallel), or a multimodal model's."""
    parts = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    for name, part in parts:
        if is_whole(part) and getattr(getattr(part, "config", None), "model_type", None) in FAMILIES:
            path = f"model.{name}" if all(map(str.isidentifier, name.split("."))) else f"model.get_submodule({name!r})"
            if head and not hasattr(part, "lm_head"):
                return f"call the model itself, with cutekernels.patch({path})"
            return f"pass {path}"
    return ""


def shared_parameters(model: torch.nn.Module) -> set[int]:
    """``id`` of each parameter that several modules have, or one module that has several places in others.

    A parent in two places is one parent: what it holds has one place.
    """
    children = [child for parent in model.modules() for child in parent._modules.values() if child is not None]
    places = Counter(id(p) for child in children for p in child._parameters.values() if p is not None)
    return {one for one, number in places.items() if number > 1}


ACTIVATIONS = ("act_fn", "activation_fn", "act")


def activation_of(mlp: Any) -> Any:
    """The activation module of an MLP, whatever its family calls it."""
    modules = mlp._modules
    own = next((modules[name] for name in ACTIVATIONS if name in modules), None)
    return next((getattr(mlp, name) for name in ACTIVATIONS if hasattr(mlp, name)), None) if own is None else own


def gate_of(act: Any) -> Gate | None:
    """The gate that an activation module makes of an MLP, or None for one that no kernel has."""
    if act is torch.nn.functional.silu or isinstance(act, torch.nn.SiLU) or type(act).__name__ == "SiLUActivation":
        return "silu"
    if type(act).__name__ in ("GELUTanh", "PytorchGELUTanh"):
        return "gelu_tanh"
    if isinstance(act, torch.nn.GELU):
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    return "gelu" if act is torch.nn.functional.gelu or type(act).__name__ == "GELUActivation" else None
