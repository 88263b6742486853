"""A grouped product in Triton as serving engines have it for their fused MoE: the peer on every GPU.

A program takes one tile of one expert's rows, a band of tiles shares an expert's columns in the L2, and
``triton.autotune`` chooses among tiles like those of vLLM's tuned tables. ``DISABLE_MMA_V3=1`` in the environment
keeps Triton on Hopper to the MMA of a warp, which is what our multistage body has.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILES = (  # rows, columns, k, warps, stages
    (16, 64, 128, 4, 4), (16, 128, 128, 4, 4), (16, 128, 64, 4, 5), (32, 128, 64, 4, 4), (32, 128, 128, 4, 3),
    (64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 4),
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4),
)  # fmt: skip
CONFIGS = [
    triton.Config(
        {"tile_m": m, "tile_n": n, "tile_k": k, "band": 8 if m > 32 else 1}, num_warps=warps, num_stages=stages
    )
    for m, n, k, warps, stages in _TILES
]


def suited(configs: list[triton.Config], named: dict[str, Any], **_: Any) -> list[triton.Config]:
    """Tiles from half of an expert's mean rows to four times as many."""
    mean = min(max(named["rows"] / named["experts"], 16), 128)
    return [c for c in configs if mean / 2 <= c.kwargs["tile_m"] <= 4 * mean]


@triton.autotune(CONFIGS, key=["rows", "n", "k", "experts"], prune_configs_by={"early_config_prune": suited})
@triton.jit
def _group(
    x,
    weight,
    offsets,
    out,
    weight_n,
    weight_k,
    rows,
    n,
    k,
    experts: tl.constexpr,
    groups: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
    band: tl.constexpr,
):
    tiles_n = tl.cdiv(n, tile_n)
    tiles_m = tl.num_programs(0) // tiles_n
    first = tl.program_id(0) // (band * tiles_n) * band
    within = tl.program_id(0) % (band * tiles_n)
    height = tl.minimum(tiles_m - first, band)
    tile, column = first + within % height, within // height
    # The expert of a tile row, by a prefix sum over the experts' tile rows.
    index = tl.arange(0, groups)
    real = index < experts
    begins, ends = tl.load(offsets + index, real, 0), tl.load(offsets + index + 1, real, 0)
    last = tl.cumsum(tl.cdiv(ends - begins, tile_m))
    expert = tl.sum(((last <= tile) & real).to(tl.int32))
    if expert >= experts:
        return
    before = tl.sum(tl.where(index < expert, tl.cdiv(ends - begins, tile_m), 0))
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    row = begin + (tile - before) * tile_m + tl.arange(0, tile_m)
    col = column * tile_n + tl.arange(0, tile_n)
    depth = tl.arange(0, tile_k)
    a = x + row[:, None].to(tl.int64) * k + depth[None, :]
    b = weight + expert.to(tl.int64) * n * k + (col % n)[None, :] * weight_n + depth[:, None] * weight_k
    total = tl.zeros((tile_m, tile_n), tl.float32)
    for done in range(0, k, tile_k):
        inside = depth < k - done
        left = tl.load(a, (row < end)[:, None] & inside[None, :], 0.0)
        right = tl.load(b, inside[:, None], 0.0)
        total = tl.dot(left, right, total)
        a += tile_k
        b += tile_k * weight_k
    to = out + row[:, None].to(tl.int64) * n + col[None, :]
    tl.store(to, total.to(out.dtype.element_ty), (row < end)[:, None] & (col < n)[None, :])


def grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """``x (rows, K)`` sorted by expert, ``weight (E, N, K)`` with either contiguous, ``offsets (E + 1,)`` int32:
    ``(rows, N)``.
    """
    (rows, k), (experts, n, _) = x.shape, weight.shape
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return ((rows // meta["tile_m"] + min(experts, rows)) * triton.cdiv(n, meta["tile_n"]),)

    _group[grid](x, weight, offsets, out, *weight.stride()[1:], rows, n, k, experts, triton.next_power_of_2(experts))
    return out
