"""``quantized_grouped_gemm_backward``: the gradient of the rows of ``grouped_gemm`` with packed experts.

As of ``quantized_linear``: columns of all experts' weights are decoded into one workspace, a part at a time, and
multiplied into their columns of dx.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.moe.grouped import GROUPED_GEMM, check_offsets, groups_of
from cutekernels.ops.quantized.backward import check_weight, define
from cutekernels.ops.shared.calls import run
from cutekernels.quant.layout import TILE


def _rows(dout: Tensor, *given: Any) -> int:
    """Rows of all experts' weights."""
    weight, (offsets, code, group, k) = given[:4], given[4:]
    check_offsets(offsets, dout)
    total: int = weight[0].shape[0] * TILE
    check_weight(weight, code, group, total, k)
    if dout.dim() != 2 or dout.shape[1] * (offsets.shape[0] - 1) != total:
        raise UnsupportedProblem(
            f"dout must be (T, N) for {total} rows of {offsets.shape[0] - 1} experts; its shape is {tuple(dout.shape)}"
        )
    return total


def _multiply(dout: Tensor, part: Tensor, dx: Tensor, offsets: Tensor) -> None:
    weight = part.unflatten(0, (offsets.shape[0] - 1, -1)).mT
    run(GROUPED_GEMM, (dx,), (dout, weight, offsets, None), options=("none",))


def _exact(dout: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    of_experts = weight.view(offsets.shape[0] - 1, -1, weight.shape[1])
    dx = dout.new_zeros((dout.shape[0], weight.shape[1]))
    for e, (begin, end) in enumerate(groups_of(offsets, dout.shape[0])):
        dx[begin:end] = dout[begin:end] @ of_experts[e]
    return dx


BACKWARD_PATH = define("quantized_grouped_gemm_backward", ", Tensor offsets", "int k", _rows, _multiply, _exact)
