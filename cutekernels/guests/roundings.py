"""What guests round on the way to their result, as the judge's tolerance; weights in blocks of fp8."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = (0, 128, 64)  # extents of a scale's block; 0: no scales
_EPS = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp8": 2.0**-3}
_MOST_FP8 = 448.0


def depth_of(roundings: Mapping[str, int]) -> float:
    """The depth whose fp32 sums lose as much as so many ``roundings`` of a sum's terms: six standard deviations.

    Relative error of one, for numbers spread evenly over an octave: 0.735 eps / sqrt(12). Terms' errors are
    independent, so that a sum's is as large relative to the typical result.
    """
    variance = sum(times * (0.735 * _EPS[kind]) ** 2 / 12 for kind, times in roundings.items())
    return 8 * 2.0**23 * 6 * math.sqrt(variance)


def quantized(w: Tensor, block_n: int, block_k: int) -> tuple[Tensor, Tensor]:
    """``w (..., N, K)`` in e4m3 with an fp32 scale for each block, ``(..., N / block_n, K / block_k)`` rounded up."""
    import torch

    *lead, n, k = w.shape
    rows, cols = -(-n // block_n), -(-k // block_k)
    padded = torch.nn.functional.pad(w.float(), (0, cols * block_k - k, 0, rows * block_n - n))
    blocks = padded.view(*lead, rows, block_n, cols, block_k)
    scale = blocks.abs().amax((-3, -1), keepdim=True).clamp_min(1e-12) / _MOST_FP8
    packed = (blocks / scale).view(padded.shape)[..., :n, :k].to(torch.float8_e4m3fn)
    return packed.contiguous(), scale.squeeze(-1).squeeze(-2).contiguous()


def dequantized(w: Tensor, scale: Any, index: int | None, block_n: int, block_k: int) -> Tensor:
    """``w``, or its part ``index``, in fp32 with the scales of its blocks, which are None where there are none."""
    part: Tensor = (w if index is None else w[index]).float()
    if scale is None:
        return part
    s = scale if index is None else scale[index]
    n, k = part.shape
    return part * cast("Tensor", s).repeat_interleave(block_n, 0)[:n].repeat_interleave(block_k, 1)[:, :k]
