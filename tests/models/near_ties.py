"""Greedy tokens of 16-bit models, judged by the logits of the same weights in fp32."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SLACK = 4.0  # largest errors of transformers' own logits by which a token may lie below the best one


@torch.no_grad()
def following(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """A model's logits ``(len(tokens), V)`` for the places of ``tokens`` behind ``prompt``, in fp32."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    return model(ids).logits[0, len(prompt) - 1 : -1].float()  # type: ignore[no-any-return]


def widened(model: Any) -> Any:
    """A copy in fp32."""
    return copy.deepcopy(model).float()


def check_greedy(
    model: Any, exact: Any, prompt: Sequence[int], tokens: Sequence[int], routing: tuple[int, int, float] | None = None
) -> None:
    """Fails where a token is not the most likely one of ``exact``, nor as likely but for what 16 bits round.

    ``routing``: experts, how many a token has, and how near another one a token is not judged.
    """
    expected, theirs = following(exact, prompt, tokens), following(model, prompt, tokens)
    told = torch.ones(len(tokens), dtype=torch.bool, device=expected.device)
    if routing is not None:
        ids = torch.tensor([[*prompt, *tokens]], device=expected.device)
        experts, top_k, tie = routing
        told = (routing_gap(exact, {"input_ids": ids}, experts, top_k) >= tie)[0, len(prompt) - 1 : -1]
        assert float(told.double().mean()) >= 0.5
    slack = SLACK * float((theirs - expected).abs()[told].max())
    within = expected >= expected.max(-1, keepdim=True).values - slack
    assert float(within.double().mean()) < 0.2, "most tokens would pass: the model tells them too little apart"
    chosen = torch.tensor(tokens, device=expected.device)[:, None]
    wrong = (told & ~within.gather(1, chosen)[:, 0]).nonzero().flatten().tolist()
    assert not wrong, f"tokens {wrong} of {len(tokens)} are not the best ones"


@torch.no_grad()
def routing_gap(model: Any, given: dict[str, Any], experts: int, top_k: int) -> Tensor:
    """``(B, S)``: by how many standard deviations of its scores a token's last expert leads the next, in any layer."""
    gaps: list[Tensor] = []

    def seen(module: Any, args: Any) -> None:
        scores = args[0].flatten(0, -2) @ module.weight.T + (getattr(module, "bias", None) is not None and module.bias)
        if hasattr(module, "e_score_correction_bias"):  # in one group
            scores = scores.sigmoid() + module.e_score_correction_bias
        best = scores.sort(-1, descending=True).values
        gaps.append((best[:, top_k - 1] - best[:, top_k]) / scores.std())

    routers = [m for n, m in model.named_modules() if n.endswith(("gate", "router")) and len(m.weight) == experts]
    handles = [router.register_forward_pre_hook(seen) for router in routers]
    try:
        model(**given)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(gaps).amin(0).view_as(given["input_ids"])
