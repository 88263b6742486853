"""Model families as data: which classes of transformers they are made of, and by which conventions.

``patch`` and ``models.Decoder`` both read a model through this file.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from cutekernels.errors import UnsupportedProblem
from cutekernels.nn.mlp import Gate


@dataclass(frozen=True)
class Family:
    """One ``model_type`` of transformers.

    Attributes:
        module: of ``transformers.models``, which holds the classes.
        prefix: of the classes' names.
        experts: whether it has mixtures of experts.
        weight_offset, rounding: of its norms, as :func:`cutekernels.rms_norm` takes them.
        sandwich: layers have norms behind attention and MLP too, before the residual is added.
        windowed: attention has the config's ``sliding_window``, or its layer's.
        softcap: attention has the config's ``attn_logit_softcapping``.
        logit_softcap: logits have the config's ``final_logit_softcapping``.
        causal: masks are the causal band, a window and padding, and nothing else that a config may ask for.
    """

    module: str
    prefix: str
    experts: bool = False
    weight_offset: float = 0.0
    rounding: str = "huggingface"
    sandwich: bool = False
    windowed: bool = True
    softcap: bool = False
    logit_softcap: bool = False
    causal: bool = True

    def classes(self) -> dict[str, type]:
        """The classes by role: norm, mlp, attention, layer, experts, and the model with its head."""
        found = import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        suffixes = {
            "norm": "RMSNorm",
            "mlp": "MLP",
            "attention": "Attention",
            "layer": "DecoderLayer",
            "causal": "ForCausalLM",
        }
        if self.experts:
            suffixes["experts"] = "Experts"
        named = {role: getattr(found, f"{self.prefix}{suffix}", None) for role, suffix in suffixes.items()}
        return {role: cls for role, cls in named.items() if cls is not None}

    def norm_options(self, norm: Any) -> dict[str, Any]:
        """Options with which :func:`cutekernels.rms_norm` computes what the module ``norm`` does."""
        eps = getattr(norm, "variance_epsilon", None)
        eps = norm.eps if eps is None else eps
        return {"eps": eps, "weight_offset": self.weight_offset, "rounding": self.rounding}

    def softcap_of(self, attention: Any) -> float | None:
        """The softcap of an attention module's scores, or None."""
        return attention.attn_logit_softcapping if self.softcap else None

    def logit_softcap_of(self, config: Any) -> float | None:
        """The softcap of a model's logits, or None."""
        return config.final_logit_softcapping if self.logit_softcap else None

    def window_of(self, attention: Any) -> int | None:
        """How many tokens a query of an attention module sees, itself included, or None for all."""
        own = attention if hasattr(attention, "layer_type") else attention.config
        return getattr(own, "sliding_window", None) if self.windowed else None


_GEMMA: dict[str, Any] = {"weight_offset": 1.0, "rounding": "once", "sandwich": True, "logit_softcap": True}
FAMILIES = {
    "llama": Family("llama", "Llama", windowed=False),
    "mistral": Family("mistral", "Mistral"),
    "mixtral": Family("mixtral", "Mixtral", experts=True),
    "qwen2": Family("qwen2", "Qwen2"),
    "qwen3": Family("qwen3", "Qwen3"),
    "qwen3_moe": Family("qwen3_moe", "Qwen3Moe", experts=True),
    "gemma2": Family("gemma2", "Gemma2", softcap=True, **_GEMMA),
    "gemma3_text": Family("gemma3", "Gemma3", causal=False, **_GEMMA),
}


def family_of(model: Any, verb: str, remedy: str, *, head: bool = False) -> Family:
    """The family of a transformers model. Raises UnsupportedProblem for anything else, which ``verb`` does not take.

    ``head``: whether ``verb`` needs a language model's head, too.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILIES or not _is_whole(model):
        shown = f"model_type {kind!r}" if kind and _is_whole(model) else f"a {type(model).__name__}"
        raise UnsupportedProblem(
            f"{verb} takes models of transformers whose model_type is one of {', '.join(FAMILIES)}; this is {shown}: "
            f"{_by_part(model, head) or remedy}"
        )
    return FAMILIES[kind]


def _is_whole(model: Any) -> bool:
    """Whether ``model`` is a model of transformers, or a wrapper that passes for one, and no layer of it."""
    return isinstance(model, torch.nn.Module) and hasattr(model, "set_attn_implementation")


def _by_part(model: Any, head: bool) -> str:
    """The remedy where a part of ``model`` is of a family: a wrapper's (DataParallel), or a multimodal model's."""
    parts = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    for name, part in parts:
        if _is_whole(part) and getattr(getattr(part, "config", None), "model_type", None) in FAMILIES:
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


def gate_of(act: Any) -> Gate | None:
    """The gate that an activation module makes of an MLP, or None for one that no kernel has."""
    if isinstance(act, torch.nn.SiLU) or type(act).__name__ == "SiLUActivation":
        return "silu"
    if type(act).__name__ in ("GELUTanh", "PytorchGELUTanh"):
        return "gelu_tanh"
    if isinstance(act, torch.nn.GELU):
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    return "gelu" if type(act).__name__ == "GELUActivation" else None
