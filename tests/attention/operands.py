"""Small operands of calls that repeat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutekernels.ops.attention import token_scales

BF16, INT32 = torch.bfloat16, torch.int32


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def prefill(seq: int = 6, heads: tuple[int, int] = (4, 2), batch: int = 2) -> dict[str, Any]:
    return {name: randn(batch, seq, n, 16) for name, n in zip("qkv", (heads[0], heads[1], heads[1]), strict=True)}


def packed() -> dict[str, Any]:
    ends = torch.tensor([0, 5, 12], dtype=INT32)
    return {"q": randn(12, 4, 16), "k": randn(12, 2, 16), "v": randn(12, 2, 16)} | dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_kv"), ends
    )


def fused() -> dict[str, Any]:
    q, k, v = randn(2, 6, 8, 16).split((4, 2, 2), dim=2)
    return {"q": q, "k": k, "v": v}


def decode(*queries: int, batch: int = 2, pages: int = 0, room: int = 32) -> dict[str, Any]:
    shape = (pages, 16, 2, 16) if pages else (batch, room, 2, 16)
    given = {"q": randn(batch, *queries, 4, 16), "k_cache": randn(*shape), "v_cache": randn(*shape)}
    given["cache_seqlens"] = torch.full((batch,), 9, dtype=INT32)
    if pages:
        given["page_table"] = torch.arange(2 * batch, dtype=INT32).view(batch, 2)
    return given


def fp8(given: dict[str, Any], of_tokens: bool = False) -> dict[str, Any]:
    """The same over a cache in FP8, with a scale of each head, or of each token and head."""
    given |= {name: given[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    shape = token_scales.shape(given["k_cache"])
    scales = [torch.randint(120, 130, shape, dtype=torch.uint8) if of_tokens else torch.rand(2) for _ in range(2)]
    return given | dict(zip(("k_scale", "v_scale"), scales, strict=True))
