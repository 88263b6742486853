"""Gemma 4: layers that take an earlier one's keys and values, values from keys, layers of other heads, and the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import cutekernels as ck
from tests import every_model
from tests.integrations.test_transformers import close
from tests.integrations.tiny import tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def gemma4(**changes: Any) -> Any:
    """The model of ``every_model`` (two of four layers share keys, heads of 512 in half of them), changed."""
    before = every_model.OWN["gemma4_text"]
    every_model.OWN["gemma4_text"] = before | changes
    try:
        model = every_model.built("gemma4_text")
    finally:
        every_model.OWN["gemma4_text"] = before
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.7)
    return model


@pytest.mark.parametrize("global_head_dim", [16, 512])
@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
def test_logits_of_the_last_tokens_alone(cache: str, global_head_dim: int) -> None:
    """Layers that share keys then see the last queries only, of all keys: those of a static cache end before it."""
    model, ids = gemma4(global_head_dim=global_head_dim), tokens()

    def logits(keep: int, mask: Tensor | None) -> Tensor:
        made = {
            "none": lambda: None,
            "dynamic": lambda: transformers.DynamicCache(config=model.config),
            "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=40),
        }[cache]()
        out: Tensor = model(ids, past_key_values=made, attention_mask=mask, logits_to_keep=keep).logits
        return out

    with torch.no_grad():
        expected = logits(0, None)
        with ck.patch(model):
            for mask in (None, torch.ones_like(ids)):
                for keep in (0, 1, 5):
                    close(logits(keep, mask), expected[:, -keep:])
