"""Sums of the rows of each group: gradients of experts' biases."""

from __future__ import annotations

import torch
from torch import Tensor

from cutekernels.ops.moe.grouped import GROUPED_GEMM_WGRAD

_BIAS_COLUMNS = 8  # of ones, whose product with dout is the bias's gradient: 16-byte rows


def group_sums(rows: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """``(E, N)``: the rows of each group added up, in a fixed order; rounded once, to ``dtype``."""
    if dtype == rows.dtype:
        ones = rows.new_ones((rows.shape[0], _BIAS_COLUMNS))
        return GROUPED_GEMM_WGRAD.path(rows, ones, offsets, None)[..., 0]  # type: ignore[no-any-return]
    ends = offsets.clamp(0, rows.shape[0]).cummax(0).values.long()  # as the kernels read offsets, whatever they are
    return torch.segment_reduce(rows.to(dtype), "sum", offsets=ends, unsafe=True)
