"""Attention, decode and their gradients in plain PyTorch: in fp64, rounded once, one head of one sequence at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cutekernels.ops.attention import token_scales

Index = int | slice


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_kv: Tensor | None,
    sinks: Tensor | None, scale: float, softcap: float, *, left: int | None, right: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(out, lse)``. Rows of no sequence have 0, and their sink or -inf as lse."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    group = q.shape[-2] // max(1, k.shape[-2])
    varlen = cu_seqlens_q is not None
    rows = (q.shape[1], q.shape[0]) if varlen else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_full(rows, -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    if sinks is not None:
        lse.copy_(sinks.unsqueeze(-1))
    for i, (at_q, at_kv) in enumerate(_sequences(q, cu_seqlens_q, cu_seqlens_kv)):
        q1, k1, v1, out1 = q[at_q], k[at_kv], v[at_kv], out[at_q]
        lse1 = lse[:, at_q] if varlen else lse[at_q]
        seen = band(q1.shape[0], k1.shape[0], left, right, q.device)
        for h in range(q1.shape[1]):
            visible = seen if mask is None else seen & mask[i, h]
            k2, v2 = k1[:, h // group].double(), v1[:, h // group].double()
            sink = None if sinks is None else sinks[h].double()
            lse1[h], weights, _ = _weights(q1[:, h].double(), k2, visible, scale, softcap, sink)
            out1[:, h] = (weights @ _seen_values(v2, visible)).to(out.dtype)
    return out, lse


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, table: Tensor | None, sinks: Tensor | None,
    scale: float, softcap: float, k_scale: Tensor | None = None, v_scale: Tensor | None = None, *, left: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(out, lse)`` of a cache, contiguous or in the pages of ``table``; of e4m3 numbers times their scales."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    kind = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=kind)
    for b, length in enumerate(lengths.tolist()):
        pages: Any = slice(b, b + 1)
        if table is not None:
            pages = table[b, : -(-length // k_cache.shape[1])].long().clamp(0, k_cache.shape[0] - 1)
        k, v = (_numbers(t[pages], scale, pages)[:length] for t, scale in ((k_cache, k_scale), (v_cache, v_scale)))
        own = slice(b, b + 1)
        out[own], lse[own] = attention(
            q[own], k[None], v[None], None, None, None, sinks, scale, softcap, left=left, right=0
        )  # fmt: skip
    return out, lse


def _numbers(codes: Tensor, scale: Tensor | None, pages: Any) -> Tensor:
    """The rows of some pages of a cache, times the scales of their heads, or of their tokens and heads."""
    if scale is None:
        return codes.flatten(0, 1)
    if scale.dtype != torch.uint8:
        return codes.flatten(0, 1).double() * scale.double()[:, None]
    return (codes.double() * token_scales.by_slot(scale[pages], codes.shape[1], torch.float64)).flatten(0, 1)


def gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_kv: Tensor | None, scale: float, softcap: float,
    *, left: int | None, right: int | None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``(dq, dk, dv)``; for those of sinks see :func:`sink_gradients`."""
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    group = q.shape[-2] // max(1, k.shape[-2])
    for i, (at_q, at_kv) in enumerate(_sequences(q, cu_seqlens_q, cu_seqlens_kv)):
        dout1, q1, k1, v1, dq1, dk1, dv1 = dout[at_q], q[at_q], k[at_kv], v[at_kv], dq[at_q], dk[at_kv], dv[at_kv]
        dlse1 = None if dlse is None else dlse[at_q] if cu_seqlens_q is None else dlse[:, at_q]
        seen = band(q1.shape[0], k1.shape[0], left, right, q.device)
        for head in range(k1.shape[1]):
            k2, v2 = k1[:, head].double(), v1[:, head].double()
            sum_k, sum_v = torch.zeros_like(k2), torch.zeros_like(v2)
            for h in range(head * group, (head + 1) * group):
                visible = seen if mask is None else seen & mask[i, h]
                steep = None if dlse1 is None else dlse1[h].double()
                sink = None if sinks is None else sinks[h].double()
                one = _one_head(dout1[:, h].double(), steep, q1[:, h].double(), k2, v2, visible, scale, softcap, sink)
                dq1[:, h] = one[0].to(q.dtype)
                sum_k += one[1]
                sum_v += one[2]
            dk1[:, head], dv1[:, head] = sum_k.to(k.dtype), sum_v.to(v.dtype)
    return dq, dk, dv


def sink_gradients(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink's value is 0: ``-sum(exp(sink - lse) * (sum(dout * out) - dlse))`` over the rows of its head."""
    delta = (dout.double() * out.double()).sum(-1).transpose(-1, -2)
    if dlse is not None:
        delta = delta - dlse.double()
    logits = (sinks.double().unsqueeze(-1) - lse.double()).masked_fill(lse == -math.inf, -math.inf)
    terms = logits.exp() * delta  # ([B,] H, rows)
    return -terms.sum(-1).reshape(-1, len(sinks)).sum(0).to(sinks.dtype)


def band(seq_q: int, seq_kv: int, left: int | None, right: int | None, device: torch.device) -> Tensor:
    """Mask of the keys a query sees, ``(seq_q, seq_kv)``; the last query is aligned with the last key, None is no
    limit.
    """
    ahead = torch.arange(seq_kv, device=device) - torch.arange(seq_q, device=device).unsqueeze(-1) - (seq_kv - seq_q)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    return seen


def _sequences(q: Tensor, cu_q: Tensor | None, cu_kv: Tensor | None) -> list[tuple[Index, Index]]:
    """Each sequence's index in the tensors of queries and in those of keys."""
    if cu_q is None or cu_kv is None:
        return [(b, b) for b in range(q.shape[0])]
    ends_q, ends_kv = cu_q.tolist(), cu_kv.tolist()
    return [(slice(*ends_q[i : i + 2]), slice(*ends_kv[i : i + 2])) for i in range(len(ends_q) - 1)]


def _weights(
    q: Tensor, k: Tensor, visible: Tensor, scale: float, softcap: float, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One head's log-sum-exp, probabilities (0 for a query that sees nothing), and the slope of the cap."""
    scores = scale * (q @ k.T)
    slope = torch.ones((), dtype=scores.dtype, device=scores.device)
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = softcap * capped, 1.0 - capped.square()
    scores = scores.masked_fill(~visible, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.expand(len(scores), 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[:, : len(k)].masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)
    return torch.logsumexp(scores, dim=-1), weights, slope


def _seen_values(v: Tensor, visible: Tensor) -> Tensor:
    """Values with 0 for keys that no query sees, which add nothing whatever their V: 0 * NaN is NaN."""
    return v.masked_fill(~visible.any(dim=0).unsqueeze(-1), 0.0)


def _seeing(rows: Tensor, visible: Tensor) -> Tensor:
    """Queries' rows with 0 for queries that see nothing, likewise."""
    return rows.masked_fill(~visible.any(dim=1).unsqueeze(-1), 0.0)


def _one_head(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``(dq, dk, dv)`` of one query head."""
    dout, q = _seeing(dout, visible), _seeing(q, visible)
    k, v = _seen_values(k, visible), _seen_values(v, visible)
    _, weights, slope = _weights(q, k, visible, scale, softcap, sink)
    dweights = dout @ v.T
    delta = (weights * dweights).sum(dim=-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.masked_fill(~visible.any(dim=-1), 0.0).unsqueeze(-1)
    dscores = weights * (dweights - delta) * slope
    return scale * (dscores @ k), scale * (dscores.T @ q), weights.T @ dout
