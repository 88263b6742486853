"""Model families as data: which classes of transformers are patched, and by which conventions."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from cutekernels.errors import UnsupportedProblem


@dataclass(frozen=True)
class Family:
    """One ``model_type`` of transformers.

    Attributes:
        module: of ``transformers.models``, which holds the classes.
        prefix: of the classes' names.
        experts: suffix of the mixture-of-experts block's class, or "".
        weight_offset, rounding: of its norms, as :func:`cutekernels.rms_norm` takes them.
        sandwich: layers have norms behind attention and MLP too, before the residual is added.
        softcap: attention has the config's ``attn_logit_softcapping``.
    """

    module: str
    prefix: str
    experts: str = ""
    weight_offset: float = 0.0
    rounding: str = "huggingface"
    sandwich: bool = False
    softcap: bool = False

    def classes(self) -> dict[str, type]:
        """The classes by role: norm, mlp, attention, layer, experts."""
        found = import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        suffixes = {"norm": "RMSNorm", "mlp": "MLP", "attention": "Attention", "layer": "DecoderLayer"}
        if self.experts:
            suffixes["experts"] = self.experts
        named = {role: getattr(found, f"{self.prefix}{suffix}", None) for role, suffix in suffixes.items()}
        return {role: cls for role, cls in named.items() if cls is not None}


_GEMMA: dict[str, Any] = {"weight_offset": 1.0, "rounding": "once", "sandwich": True}
FAMILIES = {
    "llama": Family("llama", "Llama"),
    "mistral": Family("mistral", "Mistral"),
    "mixtral": Family("mixtral", "Mixtral", "SparseMoeBlock"),
    "qwen2": Family("qwen2", "Qwen2"),
    "qwen3": Family("qwen3", "Qwen3"),
    "qwen3_moe": Family("qwen3_moe", "Qwen3Moe", "SparseMoeBlock"),
    "gemma2": Family("gemma2", "Gemma2", softcap=True, **_GEMMA),
    "gemma3_text": Family("gemma3", "Gemma3", **_GEMMA),
}


def family_of(model: Any) -> Family:
    """The family of a transformers model. Raises UnsupportedProblem for anything else."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILIES:
        shown = f"model_type {kind!r}" if kind else f"a {type(model).__name__}"
        raise UnsupportedProblem(
            f"patch takes models of transformers whose model_type is one of {', '.join(FAMILIES)}; this is {shown}: "
            "replace its layers by cutekernels.nn modules, or its attention by cutekernels.route_sdpa()"
        )
    return FAMILIES[kind]
