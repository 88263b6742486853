"""What attention's ops share: the problem, its mathematics in plain PyTorch, and small arithmetic on both."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.cute.parts.attention_smem import padded
from cutekernels.op import Problem, extent, ladder, plain

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WIDEST = 8  # elements in 16 bytes
UNLIMITED = 2**30  # a window's side that reaches to the end
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class AttentionProblem(Problem):
    """Extents, and what kernels are compiled for.

    Packed sequences (``varlen``) have lengths of their own; ``seq_q`` and ``seq_kv`` are then their means, rounded up.
    ``window`` says which of its sides limits, by ``window_left`` and ``window_right`` keys; ``causal`` limits the right
    side at the query's own key, where the last query is aligned with the last key.
    """

    batch: int = extent(ladder)
    seq_q: int = extent(ladder)
    seq_kv: int = extent(ladder)
    heads_q: int = extent()
    heads_kv: int = extent()
    window_left: int = extent(ladder, default=0)
    window_right: int = extent(ladder, default=0)
    head_dim: int = plain(128, *range(8, 128, 8), *range(136, 264, 8))
    dtype: str = plain("bf16", "fp16")
    causal: bool = plain(False, True)
    window: str = plain("none", "left", "right", "both")
    softcap: bool = plain(False, True)
    mask: bool = plain(False, True)
    varlen: bool = plain(False, True)
    lse: bool = plain(False, True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads_kv == 0 or self.heads_q % self.heads_kv:
            raise UnsupportedProblem(
                f"heads_q={self.heads_q} must be a multiple of heads_kv={self.heads_kv}: each K and V head serves a "
                "group of query heads"
            )
        if self.causal and self.window in ("right", "both"):
            raise UnsupportedProblem(f"causal=1 limits the right side already: window={self.window} must leave it out")
        for side in ("left", "right"):
            if getattr(self, f"window_{side}") and self.window not in (side, "both"):
                raise UnsupportedProblem(f"window_{side} needs window={side} or both; it is {self.window}")
        if self.mask and self.varlen:
            raise UnsupportedProblem("a mask is for a batch of one length: packed sequences take none")

    def bucket(self) -> AttentionProblem:
        """One tuning serves results with and without lse, and the head dims of one padded size."""
        return super().bucket().replace(lse=False, head_dim=padded(self.head_dim))

    @property
    def limited_left(self) -> bool:
        return self.window in ("left", "both")

    @property
    def limited_right(self) -> bool:
        return self.causal or self.window in ("right", "both")

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one head and sequence that the band leaves."""
        shift = self.seq_kv - self.seq_q
        ends = _clipped_sum(self.seq_q, shift + self.window_right + 1, self.seq_kv) if self.limited_right else None
        begins = _clipped_sum(self.seq_q, shift - self.window_left, self.seq_kv) if self.limited_left else 0
        return max(0, (self.seq_q * self.seq_kv if ends is None else ends) - begins)


def _clipped_sum(rows: int, first: int, most: int) -> int:
    """``sum(min(max(first + r, 0), most) for r in range(rows))``."""

    def up_to(n: int) -> int:  # of clip(x, 0, most) for x < n
        if n <= 0:
            return 0
        rising = min(n, most)
        return rising * (rising - 1) // 2 + (n - rising) * most

    return up_to(first + rows) - up_to(first)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    scale: float,
    softcap: float,
    *,
    left: int | None,
    right: int | None,
) -> tuple[Tensor, Tensor]:
    """The same mathematics in plain PyTorch, in fp64, rounded once: ``(out, lse)``; a head of a sequence at a time."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    group = q.shape[-2] // max(1, k.shape[-2])
    kind = torch.promote_types(q.dtype, torch.float32)
    if cu_seqlens_q is None or cu_seqlens_kv is None:
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=kind)
        sequences = [(q[b], k[b], v[b], out[b], lse[b], None if mask is None else mask[b]) for b in range(q.shape[0])]
    else:
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=kind)
        at_q, at_kv = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
        sequences = []
        for i in range(len(at_q) - 1):
            of_q, of_kv = slice(at_q[i], at_q[i + 1]), slice(at_kv[i], at_kv[i + 1])
            sequences.append((q[of_q], k[of_kv], v[of_kv], out[of_q], lse[:, of_q], None))
    for q1, k1, v1, out1, lse1, mask1 in sequences:
        seen = band(q1.shape[0], k1.shape[0], left, right, q.device)
        for h in range(q1.shape[1]):
            scores = scale * (q1[:, h].double() @ k1[:, h // group].double().T)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            visible = seen if mask1 is None else seen & mask1[h]
            scores = scores.masked_fill(~visible, -math.inf)
            lse1[h] = torch.logsumexp(scores, dim=-1)
            weights = torch.softmax(scores, dim=-1).masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)
            # Keys that nobody sees add nothing, whatever their V: 0 * NaN is NaN.
            values = v1[:, h // group].double().masked_fill(~visible.any(dim=0).unsqueeze(-1), 0.0)
            out1[:, h] = (weights @ values).to(out.dtype)
    return out, lse


def band(seq_q: int, seq_kv: int, left: int | None, right: int | None, device: torch.device) -> Tensor:
    """Which keys a query sees, ``(seq_q, seq_kv)``; the last query is aligned with the last key, None is no limit."""
    ahead = torch.arange(seq_kv, device=device) - torch.arange(seq_q, device=device).unsqueeze(-1) - (seq_kv - seq_q)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    return seen


def score_factors(scale: float, softcap: float) -> tuple[float, float, float]:
    """What kernels multiply scores by, to base 2, and the two factors of a cap (0: none) that leave them so."""
    if not softcap:
        return scale * LOG2_E, 0.0, 0.0
    return 1.0, 2 * LOG2_E * scale / softcap, softcap * LOG2_E


def vectors_along(head_dim: int) -> int:
    """Threads side by side in a row: the 16-byte vectors of a swizzle pattern."""
    return 8 if padded(head_dim) % 64 == 0 else 4


def depth(p: AttentionProblem) -> float:
    """What sums of this depth lose in fp32, probabilities rounded to 16 bits make ours lose: six standard deviations,
    which one element in 5e8 exceeds.

    A row's error is ``u * sqrt(sum (p v)^2)``, about ``u`` of the row's own typical result. Rows that see few keys have
    results larger than the whole output's typical one, by the root of how many fewer.
    """
    # Relative error of rounding, for numbers spread evenly over an octave: 0.735 eps / sqrt(12).
    deviation = 0.735 * {"bf16": 2.0**-7, "fp16": 2.0**-10}[p.dtype] / math.sqrt(12)
    keys = p.pairs / max(1, p.seq_q)
    uneven = p.limited_left or p.limited_right or p.mask or p.varlen
    larger = math.sqrt(max(1.0, keys)) if uneven else 1.0
    return max(keys, 8 * 2.0**23 * 6 * deviation * larger)
