"""``examples/preference.py``: DPO and GRPO through ``linear_logprob`` are those of whole logits."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.integrations import tiny

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "preference.py"))


def whole(model: Any, ids: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """As trainers compute them: from the model's logits."""
    nexts = torch.nn.functional.pad(targets, (0, 1), value=-100)[:, 1:]
    logits = model(input_ids=ids).logits / temperature
    found = logits.log_softmax(-1).gather(-1, nexts.clamp_min(0)[..., None])[..., 0]
    return torch.where(nexts != -100, found, 0.0)


def test_losses_are_those_of_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, reference = tiny.model("qwen2"), tiny.model("llama")
    ids = torch.randint(2, 131, (2, 3, 12), generator=torch.Generator().manual_seed(1))
    targets = ids.clone()
    targets[:, :, :4] = -100
    chosen, rejected = (torch.stack([ids[i], targets[i]]) for i in range(2))
    advantages, before = torch.tensor([1.0, -0.5, 0.3]), whole(policy, *chosen).detach() + 0.1
    results = []
    for logps in (EXAMPLE["logps"], whole):
        model = copy.deepcopy(policy)
        monkeypatch.setitem(EXAMPLE["dpo_loss"].__globals__, "logps", logps)
        losses = (
            EXAMPLE["dpo_loss"](model, reference, chosen, rejected),
            EXAMPLE["grpo_loss"](model, *chosen, advantages, before),
        )
        torch.stack(losses).sum().backward()
        results.append([*losses, *[p.grad for p in model.parameters()]])
    for mine, theirs in zip(*results, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    EXAMPLE["main"]()
    said = capsys.readouterr().out
    assert said.startswith("dpo step 0: loss 0.693")
    assert "grpo: loss" in said
