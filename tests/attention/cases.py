"""Seeded attention problems for tests: ragged lengths, every option, every kind of head dim."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.nn import functional

from cutekernels.gpu import GpuSpec
from cutekernels.ops.attention.op import ATTENTION, AttentionConfig
from cutekernels.ops.attention.problem import AttentionProblem
from cutekernels.ops.attention.reference import band

LENGTHS = (1, 7, 64, 65, 129, 1000)
HEAD_DIMS = (32, 40, 64, 72, 80, 96, 128, 192, 256)
GROUPS = (1, 4, 7, 8)


def random_problem(rng: random.Random, lengths: tuple[int, ...] = LENGTHS) -> AttentionProblem:
    causal = rng.random() < 0.5
    window = rng.choice(("none", "none", "left") if causal else ("none", "none", "left", "right", "both"))
    kind = rng.choice(("batch", "batch", "mask", "varlen"))
    heads_kv = rng.choice((1, 2))
    return AttentionProblem(
        batch=rng.choice((1, 2, 3)),
        seq_q=rng.choice(lengths),
        seq_kv=rng.choice(lengths),
        heads_q=heads_kv * rng.choice(GROUPS),
        heads_kv=heads_kv,
        window_left=rng.choice((0, 5, 64, 200)) if window in ("left", "both") else 0,
        window_right=rng.choice((0, 5, 64)) if window in ("right", "both") else 0,
        head_dim=rng.choice(HEAD_DIMS),
        dtype=rng.choice(("bf16", "fp16")),
        causal=causal,
        window=window,
        softcap=rng.random() < 0.2,
        mask=kind == "mask",
        varlen=kind == "varlen",
        lse=rng.random() < 0.5,
    )


def random_config(rng: random.Random, problem: AttentionProblem, gpu: GpuSpec) -> AttentionConfig:
    return rng.choice(list(ATTENTION.valid(problem, gpu)))


def sides(p: AttentionProblem) -> tuple[int | None, int | None]:
    """The band's ``(left, right)``, None for no limit."""
    right = 0 if p.causal else p.window_right if p.limited_right else None
    return p.window_left if p.limited_left else None, right


def torch_attention(p: AttentionProblem, args: tuple[object, ...]) -> Tensor:
    """What torch's scaled_dot_product_attention makes of the same arguments; NaN for queries that see nothing."""
    q, k, v, mask, _, _, scale, _ = args
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(scale, float)
    seen = band(q.shape[1], k.shape[1], *sides(p), q.device)[None, None]
    if isinstance(mask, Tensor):
        seen = seen & mask
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2).transpose(1, 2) for t in (k, v))
    seen = seen.expand(q.shape[0], q.shape[2], -1, -1)
    return (
        functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=seen, scale=scale)
        .transpose(1, 2)
        .masked_fill(~seen.any(-1).transpose(1, 2).unsqueeze(-1), torch.nan)
    )
