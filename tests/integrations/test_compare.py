"""``ck.compare``: errors of the plain and the patched model, which moves nothing, and inputs that it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers import modules
from tests import every_model
from tests.integrations import tiny
from tests.integrations.test_transformers import RIGHT, snapshot
from tests.integrations.tiny import tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("patched", [False, True])
def test_compare(patched: bool) -> None:
    model = tiny.model("qwen2", torch.bfloat16)
    if patched:
        ck.patch(model)
    before = snapshot(model)
    result = ck.compare(model, {"input_ids": tokens(), "attention_mask": RIGHT}, layers=True)
    assert str(snapshot(model)) == str(before), "classes, values and addresses"
    assert list(result.plain) == list(result.patched) == ["layer 0", "layer 1", "logits"]
    assert 1e-4 < result.patched["logits"] <= 1.25 * result.plain["logits"] < 0.1
    assert "same most likely token" in str(result)
    assert any(isinstance(m, modules.Patched) for m in model.modules()) == patched


@pytest.mark.parametrize("kind", ["helium", "gpt2", "gpt_neox", "olmo3"])
def test_compare_takes_models_of_no_family(kind: str) -> None:
    """Layers and heads may have any name."""
    model = every_model.built(kind).to(torch.bfloat16)
    before = snapshot(model)
    result = ck.compare(model, {"input_ids": tokens(), "attention_mask": RIGHT}, layers=True)
    assert str(snapshot(model)) == str(before)
    layers = [f"layer {i}" for i in range(model.config.num_hidden_layers)]
    assert list(result.patched) == [*layers, "logits"]
    assert 1e-4 < result.patched["logits"] <= 1.5 * result.plain["logits"] < 0.2


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "compare needs inputs.*got {}"),
    "none": (None, "needs inputs.*got None"),
    "number": (1, "needs inputs.*got 1"),
    "text": ("x", "needs inputs.*got 'x'"),
    "list": ([1], r"needs inputs.*got \[1\]: pass tokenizer"),
    "array": (np.ones((1, 2), dtype=np.int64), "needs inputs.*got array"),
    "list-within": ({"input_ids": [1]}, "needs inputs.*input_ids"),
    "key": ({"input_ids": tokens(), 1: 2}, "needs inputs"),
    "both": ({"input_ids": tokens(), "inputs_embeds": torch.ones(2, 20, 64)}, "either input_ids or inputs_embeds"),
    "meta": (torch.zeros(1, 2, dtype=torch.long, device="meta"), "device, cpu; input_ids is on meta: move it"),
    "mask-meta": ({"input_ids": tokens(), "attention_mask": RIGHT.to("meta")}, "cpu; attention_mask is on meta"),
    "float": (tokens().float(), r"token ids \(B, S\), int64 or int32, at least one; got \(2, 20\) torch.float32"),
    "one-dimension": (tokens()[0], r"token ids \(B, S\).*got \(20,\)"),
    "empty": (torch.zeros(1, 0, dtype=torch.long), r"at least one; got \(1, 0\)"),
    "above": (tokens() + 131, r"ids from 0 to 130; they go from \d+ to \d+: use the model's own"),
    "below": (tokens() - 131, "ids from 0 to 130"),
    "width": ({"inputs_embeds": torch.ones(1, 2, 63)}, r"inputs_embeds \(B, S, 64\).*got \(1, 2, 63\)"),
    "ids-as-embeds": ({"inputs_embeds": tokens()}, r"inputs_embeds \(B, S, 64\)"),
    "mask": ({"input_ids": tokens(), "attention_mask": [1]}, r"attention_mask as a tensor \(2, 20\).*got \[1\]"),
    "mask-shape": ({"input_ids": tokens(), "attention_mask": RIGHT[:1]}, "got a tensor of shape"),
    "mask-zero": ({"input_ids": tokens(), "attention_mask": 0 * RIGHT}, "that count, one at least"),
    "cache": ({"input_ids": tokens(), "past_key_values": ()}, "a cache grows"),
    "new cache": ({"input_ids": tokens(), "cache": ()}, "a cache grows"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_compare_refuses_wrong_inputs(name: str) -> None:
    inputs, rule = WRONG[name]
    with pytest.raises(UnsupportedProblem, match=rule):
        ck.compare(tiny.model("llama"), inputs)


def test_compare_refuses_other_models_and_options() -> None:
    model = tiny.model("llama")
    for other in (None, torch.nn.Linear(4, 4)):
        with pytest.raises(UnsupportedProblem, match=f"compare takes models.*this is a {type(other).__name__}"):
            ck.compare(other, tokens())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedProblem, match="LlamaModel has none"):
        ck.compare(model.model, tokens())
    with pytest.raises(UnsupportedProblem, match="layers as a bool; got 'x'"):
        ck.compare(model, tokens(), layers="x")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedProblem, match="some on the meta device"):
        ck.compare(tiny.model("llama").to("meta"), tokens())
    norm = model.model.norm
    norm.forward = lambda x: type(norm).forward(norm, x)
    with pytest.raises(UnsupportedProblem, match=r"model\.norm has a function for.*\(del module\.forward\)"):
        ck.compare(model, tokens())


def test_compare_takes_embeddings_of_the_models_own_type() -> None:
    model, ids = tiny.model("llama", torch.bfloat16), tokens().int()
    with torch.no_grad():
        rows = model.get_input_embeddings()(ids)
    by_rows, by_ids = ck.compare(model, {"inputs_embeds": rows, "attention_mask": None}), ck.compare(model, ids)
    assert by_rows == by_ids
