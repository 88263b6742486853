"""Gemma 4: layers that take an earlier one's keys and values, values from keys, layers of other heads, and the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import cutekernels as ck
from tests import every_model
from tests.integrations.test_transformers import close, snapshot
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


APART = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}  # keys of their own, one embedding
VARIANTS: dict[str, dict[str, Any]] = {
    "wide": {},
    "double-mlp": {"global_head_dim": 32, "use_double_wide_mlp": True},
    "values-from-keys": {"global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1} | APART,
    "plain": {"global_head_dim": 16, "attention_bias": True} | APART,
    "later-tokens": {"global_head_dim": 16, "use_bidirectional_attention": "all"} | APART,
    "experts": {
        "global_head_dim": 16, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 48, "final_logit_softcapping": 3.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_each_kind_of_layer_is_what_transformers_computes(name: str) -> None:
    model, ids = gemma4(**VARIANTS[name]), tokens()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    before = snapshot(model)

    def results() -> list[Tensor]:
        with torch.no_grad():
            found = [model(ids).logits, model(ids, attention_mask=mask).logits[mask.bool()]]
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return [*found, loss.detach(), gradients / gradients.abs().max()]

    def generated() -> list[Tensor]:
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "disable_compile": True}
        seen = (torch.ones_like(ids), mask)
        return [
            model.generate(ids, attention_mask=own, cache_implementation=cache, **options)
            for own in seen
            for cache in (None, "static")
        ]

    expected, rows = results(), generated()
    assert max(len({*row}) for row in rows[0][:, 20:].tolist()) > 1
    with ck.patch(model) as report:
        assert report.patched["attention"] == 4 and report.fused["mlp"] == 4
        assert len([path for path, rule in report.left if "core" in path]) == 2 * (name == "wide")
        for ours, theirs in zip(results(), expected, strict=True):
            close(ours, theirs)
        assert all(torch.equal(a, b) for a, b in zip(generated(), rows, strict=True))
    after = snapshot(model)
    assert after["classes"] == before["classes"] and after["attention"] == before["attention"]


def test_norms_whose_weight_is_no_parameter_keep_it() -> None:
    """As FSDP has it: only what has no weight at all is a norm without one."""
    model, ids = gemma4(**VARIANTS["plain"]), tokens()
    for module in model.modules():
        if type(module).__name__ == "Gemma4RMSNorm" and module.with_scale:
            weight = module._parameters.pop("weight")
            module.weight = weight.detach() * 2
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model):
            close(model(ids).logits, expected)


def test_more_experts_of_a_token_than_kernels_take_are_left() -> None:
    model, ids = gemma4(**VARIANTS["experts"] | {"num_experts": 40, "top_k_experts": 33}), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model) as report:
            assert "K is 33" in str(report) and "experts" not in report.patched
            close(model(ids).logits, expected)


@pytest.mark.parametrize("name", ["wide", "values-from-keys"])
def test_compiled_without_graph_breaks(name: str) -> None:
    model, ids = gemma4(**VARIANTS[name]), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model):
            torch.compiler.reset()
            close(torch.compile(model, fullgraph=True, backend="eager")(ids).logits, expected)


def test_wide_heads_leave_all_of_attention_where_it_is_not_sdpas() -> None:
    model, ids = gemma4(attn_implementation="eager"), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model) as report:
            assert model.config._attn_implementation == "eager" and "it is 512" in str(report)
            close(model(ids).logits, expected)
