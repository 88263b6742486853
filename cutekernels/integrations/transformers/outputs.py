"""Outputs of a model, and those of one that trains without logits, in which None keeps the logits' place."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from functools import cache
from typing import Any, get_args

_COMMON = "MoeCausalLMOutputWithPast", "CausalLMOutputWithPast", "CausalLMOutputWithCrossAttentions"


@cache
def output_of(model: Any) -> Any:
    """The class of what a class of models with a head returns, or None where none is known by its names."""
    said = inspect.signature(model.forward).return_annotation
    named = [kind for kind in (said, *get_args(said)) if hasattr(kind, "to_tuple")]
    known = [getattr(sys.modules[model.__module__], name, None) for name in _COMMON]
    found = next((kind for kind in (*named, *known) if kind is not None), None)
    return found if {"loss", "logits"} <= getattr(found, "__dataclass_fields__", {}).keys() else None


class WithoutLogits:
    """An output of transformers whose tuple has None in the logits' place.

    Transformers leaves out what is None, so that ``outputs[1]``, the logits behind a loss, would be the cache.
    """

    kind: type

    def to_tuple(self) -> tuple[Any, ...]:
        me: Any = self
        return tuple([getattr(me, f.name) for f in fields(me) if f.name == "logits" or f.name in me])

    def __reduce__(self) -> Any:
        me: Any = self
        return _rebuilt, (self.kind, {f.name: getattr(me, f.name) for f in fields(me)})


@cache
def without_logits(kind: Any) -> Any:
    """``kind``, an output class of transformers, whose instances keep the logits' place."""
    return type(kind.__name__, (WithoutLogits, kind), {"kind": kind, "__module__": __name__})


def _rebuilt(kind: type, values: dict[str, Any]) -> Any:
    return without_logits(kind)(**values)
