"""The language model in a model that sees images too, as a decoder reads it: for prompts of text alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cutekernels.integrations.transformers.families import FAMILIES

_INSIDE = {family.inside: kind for kind, family in FAMILIES.items() if family.inside}
_COMPILED = "_orig_mod"  # the submodule of what torch.compile returns for a module


class Language:
    """``whole``'s text layers and its head, by the names of a language model alone.

    Modules keep the paths that they have in ``whole``, for messages; those of its towers are left out.
    """

    def __init__(self, whole: Any) -> None:
        self.whole, self.config = whole, whole.config.text_config
        self.model, self.lm_head = whole.model.language_model, whole.lm_head
        self.generation_config = getattr(whole, "generation_config", None)

    @property
    def device(self) -> torch.device:
        return self.model.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype  # type: ignore[no-any-return]

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        for path, module in self.whole.named_modules():
            if _is_read(path) or path.replace(_COMPILED, "").strip(".") in ("", "model"):
                yield path, module

    def named_parameters(self, **options: Any) -> Iterator[tuple[str, Any]]:
        return ((path, p) for path, p in self.whole.named_parameters(**options) if _is_read(path))

    def parameters(self) -> Iterator[Any]:
        return (p for _, p in self.named_parameters())

    def modules(self) -> Iterator[Any]:
        return (module for _, module in self.named_modules())

    def get_submodule(self, path: str) -> Any:
        return self.whole.get_submodule(path)


def _is_read(path: str) -> bool:
    """Whether a module or a parameter is the language model's or its head's."""
    path = path.replace(f"{_COMPILED}.", "")
    return path.startswith(("model.language_model", "lm_head"))


def language_of(model: Any) -> Any:
    """``model`` itself, or the language model, under its head, of one that sees images too: a decoder reads it."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    whole = hasattr(type(getattr(model, _COMPILED, model)), "set_attn_implementation")
    return Language(model) if kind in _INSIDE and whole and hasattr(model, "lm_head") else model
