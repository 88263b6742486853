"""Attention's gradients for tests: problems, torch's results, ``attention_delta`` interpreted in a child."""

from __future__ import annotations

import json
import math
import random
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cutekernels.gpu import GpuSpec
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD
from cutekernels.ops.attention.backward_config import AttentionBackwardConfig, AttentionBackwardProblem, passes
from cutekernels.ops.attention.reference import band
from tests.attention.cases import random_problem

LENGTHS = (1, 7, 64, 65, 129, 500)


def random_backward(rng: random.Random, lengths: tuple[int, ...] = LENGTHS) -> AttentionBackwardProblem:
    p = random_problem(rng, lengths).replace(lse=False)
    fields = {name: getattr(p, name) for name in type(p).__dataclass_fields__}
    return AttentionBackwardProblem(**fields, of=rng.choice(passes(p.head_dim)))


def random_config(rng: random.Random, p: AttentionBackwardProblem, gpu: GpuSpec) -> AttentionBackwardConfig:
    return rng.choice(list(ATTENTION_BACKWARD.valid(p, gpu)))


def sequences(
    p: AttentionBackwardProblem, args: tuple[Any, ...]
) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """``(dout, q, k, v, seen)`` of each sequence: (H, S, D), K and V of all query heads; seen is (HQ, SQ, SKV).

    ``args`` are the op's. Views, so that gradients reach what is in ``args``.
    """
    dout, q, k, v, _, mask, cu_q, cu_kv, *_ = args
    group = q.shape[-2] // k.shape[-2]
    found = []
    if cu_q is None:
        places = [(b, b) for b in range(q.shape[0])]
    else:
        ends_q, ends_kv = cu_q.tolist(), cu_kv.tolist()
        places = [
            (slice(ends_q[i], ends_q[i + 1]), slice(ends_kv[i], ends_kv[i + 1]))  # type: ignore[misc]
            for i in range(len(ends_q) - 1)
        ]
    for i, (of_q, of_kv) in enumerate(places):
        own = [t.transpose(0, 1) for t in (dout[of_q], q[of_q])]
        other = [t.repeat_interleave(group, 1).transpose(0, 1) for t in (k[of_kv], v[of_kv])]
        seen = band(own[1].shape[1], other[0].shape[1], **p.sides, device=q.device).expand(q.shape[-2], -1, -1)
        found.append((*own, *other, seen if mask is None else seen & mask[i]))
    return found


def torch_gradients(
    p: AttentionBackwardProblem, args: tuple[Any, ...], *, plain: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` by torch's autograd, through scaled_dot_product_attention or, ``plain``, products and softmax.

    Queries that see nothing are given every key and no gradient, which comes to the same.
    """
    leaves = [t.detach().clone().requires_grad_() for t in args[1:4]]
    scale, softcap = args[-2:]
    total: Any = 0.0
    for dout, q, k, v, seen in sequences(p, (args[0], *leaves, *args[4:])):
        if q.shape[1] == 0 or k.shape[1] == 0:
            continue
        some = seen.any(-1, keepdim=True)
        dout = dout.masked_fill(~some, 0.0)
        seen = seen | ~some
        if plain:
            scores = scale * (q @ k.transpose(1, 2))
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            out = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1) @ v
        else:
            out = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen[None], scale=scale)
            out = out[0]
        total = total + (out.double() * dout.double()).sum()
    if isinstance(total, Tensor):
        total.backward()
    return tuple([torch.zeros_like(t) if t.grad is None else t.grad for t in leaves])  # type: ignore[return-value]


def chosen(of: str, gradients: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The gradients among ``(dq, dk, dv)`` that ``of`` names."""
    named = dict(zip("qkv", gradients, strict=True))
    return tuple([named[name] for name in of])


# ---- attention_delta, interpreted -----------------------------------------------------------------------

_BASE = {"shape": (2, 19, 3, 64), "dtype": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    "dense": _BASE,
    "fp16": _BASE | {"dtype": "fp16"},
    "dlse": _BASE | {"dlse": True},
    "narrow": _BASE | {"shape": (1, 5, 2, 8)},
    "ragged head": _BASE | {"shape": (2, 9, 2, 80), "dlse": True},
    "wide": _BASE | {"shape": (1, 20, 2, 256)},
    "packed": _BASE | {"shape": (70, 3, 96)},
    "slices": _BASE | {"kind": "slices"},
    "heads first": _BASE | {"kind": "heads first"},
    "one query": _BASE | {"shape": (3, 1, 4, 128)},
    "blind": _BASE | {"blind": True, "dlse": True},
    "small blocks": _BASE | {"config": "block_rows=4 warps=1"},
    "large blocks": _BASE | {"config": "block_rows=64 warps=2"},
    "none": _BASE | {"shape": (2, 0, 3, 64)},
}
PLANTED = {
    "a query forgotten": _BASE | {"edit": {"seq": -1}},
    "another head's row": _BASE | {"edit": {"out_head": 8}},
    "dout by out's pitch": _BASE | {"kind": "heads first", "edit": {"dout_row": 8}},
}


def child_case(case: dict[str, Any]) -> dict[str, Any]:
    from cutekernels.ops.attention.delta import ATTENTION_DELTA
    from tests.interpreted import interpret

    generator = torch.Generator().manual_seed(3)
    shape, kind = list(case["shape"]), {"bf16": torch.bfloat16, "fp16": torch.float16}[case["dtype"]]
    packed = len(shape) == 3

    def operand() -> Tensor:
        if case.get("kind") == "slices":
            return torch.randn(*shape[:-1], 3 * shape[-1], generator=generator).to(kind)[..., shape[-1] : 2 * shape[-1]]
        if case.get("kind") == "heads first":
            batch, seq, heads, dim = shape
            return torch.randn(batch, heads, seq + 2, dim, generator=generator).to(kind)[:, :, :seq].transpose(1, 2)
        return torch.randn(shape, generator=generator).to(kind)

    out, dout = operand(), operand()
    rows = (shape[1], shape[0]) if packed else (shape[0], shape[2], shape[1])
    lse = torch.randn(rows, generator=generator)
    dlse = torch.randn(rows, generator=generator) if case.get("dlse") else None
    if case.get("blind"):
        lse[..., ::3] = -math.inf
        assert dlse is not None
        dlse[..., ::3] = math.nan
    memory = torch.full((2 * lse.numel() + 64,), math.nan)
    stats = memory[: 2 * lse.numel()].view(2, -1)
    ATTENTION_DELTA.admit((out, dout, lse, dlse), (stats,))
    interpret(ATTENTION_DELTA, (stats,), (out, dout, lse, dlse), config=case.get("config"), edit=case.get("edit"))
    (expected,) = ATTENTION_DELTA.evaluate(out, dout, lse, dlse)
    error = (stats - expected).masked_fill(stats == expected, 0.0).abs()
    return {
        "error": float(error.nan_to_num(math.inf).max()) if error.numel() else 0.0,
        "outside": bool(memory[2 * lse.numel() :].isnan().all()),
    }


if __name__ == "__main__":
    json.dump([child_case(case) for case in json.load(sys.stdin)], sys.stdout)
