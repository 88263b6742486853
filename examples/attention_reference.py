"""Attention twice in plain torch: naive, and in blocks with an online softmax, as the kernels compute it.

    python examples/attention_reference.py

It prints how far both are from torch's own:

    naive: largest error 1.6e-15
    blocked: largest error 8.9e-16
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def naive(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """``softmax(q @ k.T / sqrt(D)) @ v``; q: (B, S, H, D), k and v: (B, T, HKV, D).

    Causal: the last query sees every key. A query that sees no key has a result of zeros.
    """
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(~_seen(q.shape[1], k.shape[1], q.device), -math.inf)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1).nan_to_num(0.0), v)


def blocked(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, rows: int = 64, cols: int = 64) -> Tensor:
    """The same without the matrix of scores: ``rows`` queries at a time meet ``cols`` keys at a time.

    Of the keys so far each query keeps the largest score, the sum of exponentials relative to it, and the weighted sum
    of values. A larger score rescales both sums; at the end one is divided by the other.
    """
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, S, D)
    seen = _seen(q.shape[2], k.shape[2], q.device)
    out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    for first in range(0, q.shape[2], rows):
        block = slice(first, first + rows)
        tile = q[:, :, block] / math.sqrt(q.shape[3])
        largest = tile.new_full((*tile.shape[:3], 1), -math.inf)
        total, weighted = torch.zeros_like(largest), out[:, :, block]
        for start in range(0, k.shape[2], cols):
            keys = slice(start, start + cols)
            if causal and not seen[block, keys].any():
                break  # every later key is hidden too
            scores = tile @ k[:, :, keys].mT
            if causal:
                scores = scores.masked_fill(~seen[block, keys], -math.inf)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            base = new.clamp_min(torch.finfo(new.dtype).min)  # finite where no key was seen yet
            rescale, p = (largest - base).exp(), (scores - base).exp()
            total = total * rescale + p.sum(-1, keepdim=True)
            weighted = weighted * rescale + p @ v[:, :, keys]
            largest = new
        out[:, :, block] = torch.where(total > 0, weighted / total, 0.0)
    return out.transpose(1, 2)


def _seen(queries: int, keys: int, device: torch.device) -> Tensor:
    """``(queries, keys)``: which key a query sees when the last query sees all."""
    return torch.ones((queries, keys), dtype=torch.bool, device=device).tril(keys - queries)


def main() -> None:
    """Both against ``scaled_dot_product_attention`` in fp64."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 200, h, 64, generator=draw, dtype=torch.float64) for h in (8, 2, 2))
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    for function in (naive, blocked):
        error = (function(q, k, v, causal=True) - expected.transpose(1, 2)).abs().max()
        print(f"{function.__name__}: largest error {error:.1e}")


if __name__ == "__main__":
    main()
