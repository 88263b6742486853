"""DPO's and GRPO's losses without logits: ``ck.linear_logprob`` between a model's body and its head.

    python examples/preference.py          # a tiny model, on the CPU or a GPU

A trainer that needs log-probabilities of given tokens (TRL's ``_get_per_token_logps`` and its like) calls the model for
its logits, which take tokens x vocabulary x 4 bytes, twice. :func:`logps` gives the same from the hidden states.
It prints:

    dpo step 0: loss 0.693
    dpo step 1: loss 0.523
    dpo step 2: loss 0.428
    grpo: loss -0.712
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutekernels as ck


def logps(model: Any, ids: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each next token in ``targets`` ``(B, T)``: 0 where that is -100. ``ids``: ``(B, T)``."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    nexts = F.pad(targets, (0, 1), value=-100)[:, 1:]
    return ck.linear_logprob(hidden, model.lm_head.weight, nexts, temperature=temperature)


def dpo_loss(policy: Any, reference: Any, chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Direct preference optimization of pairs ``(ids, targets)`` stacked as ``(2, B, T)`` each."""
    ids, targets = (torch.cat([chosen[i], rejected[i]]) for i in range(2))
    ours = logps(policy, ids, targets).sum(1)
    with torch.no_grad():
        theirs = logps(reference, ids, targets).sum(1)
    better, worse = (ours - theirs).chunk(2)
    return -F.logsigmoid(beta * (better - worse)).mean()


def grpo_loss(
    policy: Any, ids: Tensor, targets: Tensor, advantages: Tensor, before: Tensor, clip: float = 0.2
) -> Tensor:
    """Group relative policy optimization: ``advantages`` ``(B,)``; ``before``: log-probabilities as sampled."""
    ratio = torch.exp(logps(policy, ids, targets) - before)
    gained = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - clip, 1 + clip) * advantages[:, None])
    counted = F.pad(targets, (0, 1), value=-100)[:, 1:] != -100
    return -torch.where(counted, gained, 0.0).sum() / counted.sum()


def main() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    where = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    policy, reference = (Qwen2ForCausalLM(config).to(where, torch.bfloat16) for _ in range(2))
    reference.load_state_dict(policy.state_dict())
    for model in (policy, reference):
        ck.patch(model)
    pairs = torch.randint(0, 512, (2, 2, 12), device=where)
    masked = pairs.clone()
    masked[:, :, :6] = -100  # the prompt
    chosen, rejected = (torch.stack([pairs[i], masked[i]]) for i in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for step in range(3):
        loss = dpo_loss(policy, reference, chosen, rejected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"dpo step {step}: loss {loss.item():.3f}")
    before = logps(policy, *chosen).detach()
    loss = grpo_loss(policy, *chosen, torch.randn(2, device=where), before)
    loss.backward()
    print(f"grpo: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
