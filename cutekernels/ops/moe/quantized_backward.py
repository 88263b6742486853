"""``quantized_grouped_gemm_backward``: the gradient of the rows of ``grouped_gemm`` with packed experts.

As of ``quantized_linear``: columns of all experts' weights are decoded into one workspace, a part at a time, and
multiplied into their columns of dx.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.moe.grouped import GROUPED_GEMM, check_offsets, groups_of
from cutekernels.ops.quantized.backward import decoded_parts
from cutekernels.ops.quantized.decode import check_weight, rows_of_scale
from cutekernels.ops.shared.calls import run
from cutekernels.ops.shared.checks import check_results
from cutekernels.ops.shared.registration import define_with_out, splitting
from cutekernels.quant.layout import TILE
from cutekernels.quant.weight import QuantizedWeight

NAME = "quantized_grouped_gemm_backward"
_HALVES = (torch.bfloat16, torch.float16)


def _check(given: tuple[Tensor, ...] | None, inputs: tuple[Any, ...], code: str, group: int, k: int) -> int:
    """Rows of all experts' weights."""
    dout, packed, scales, zeros, offsets = inputs
    check_offsets(offsets, dout, None)
    total: int = packed.shape[0] * TILE
    check_weight(packed, scales, zeros, code, group, total, k)
    if dout.dim() != 2 or dout.shape[1] * (offsets.shape[0] - 1) != total:
        raise UnsupportedProblem(
            f"dout must be (T, N) for {total} rows of {offsets.shape[0] - 1} experts; its shape is {tuple(dout.shape)}"
        )
    if not dout.is_floating_point() or (dout.is_cuda and dout.dtype not in _HALVES):
        raise UnsupportedProblem(f"dout must be fp16 or bf16 (on the CPU fp32 and fp64 too); it is {dout.dtype}")
    for dx in given or ():
        if tuple(dx.shape) != (dout.shape[0], k) or dx.dtype != dout.dtype:
            raise UnsupportedProblem(
                f"dx must be {(dout.shape[0], k)} {dout.dtype}; it is {tuple(dx.shape)} {dx.dtype}"
            )
    for t in (packed, *(given or ())):
        if t.device != dout.device:
            raise UnsupportedProblem(f"all tensors must be on dout's device {dout.device}; one is on {t.device}")
    check_results(given or ())
    return total


@torch.no_grad()
def _cuda(given: tuple[Tensor, ...] | None, inputs: tuple[Any, ...], *options: Any) -> Tensor | None:
    total = _check(given, inputs, *options)
    dout, packed, scales, zeros, offsets = inputs
    code, group, k = options
    dx = dout.new_empty((dout.shape[0], k)) if given is None else given[0]
    if dx.numel():
        dout = dout if dout.stride(1) == 1 else dout.contiguous()
        for begin, end, decoded in decoded_parts(dout, (packed, scales, zeros), code, group, total, k):
            weight = decoded.unflatten(0, (offsets.shape[0] - 1, -1)).mT
            own = dx if end - begin == k else dx[:, begin:end]
            run(GROUPED_GEMM, (own,), (dout, weight, offsets, None), options=("none",))
    return dx if given is None else None


def _cpu(given: tuple[Tensor, ...] | None, inputs: tuple[Any, ...], *options: Any) -> Tensor | None:
    total = _check(given, inputs, *options)
    dout, packed, scales, zeros, offsets = inputs
    code, group, k = options
    weight = QuantizedWeight(
        code=code, group=group, scale_rows=rows_of_scale(scales, total), shape=(total, k), packed=packed,
        scales=scales, zeros=zeros,
    )  # fmt: skip
    wide = torch.float32 if dout.dtype in _HALVES else dout.dtype
    decoded = weight.dequantize(torch.float32).to(dout.dtype).to(wide).view(offsets.shape[0] - 1, -1, k)
    dx: Tensor = dout.new_zeros((dout.shape[0], k))
    for e, (begin, end) in enumerate(groups_of(offsets, dout.shape[0])):
        dx[begin:end] = (dout[begin:end].to(wide) @ decoded[e]).to(dout.dtype)
    if given is None:
        return dx
    given[0].copy_(dx)
    return None


def _fake(given: tuple[Tensor, ...] | None, inputs: tuple[Any, ...], *options: Any) -> Tensor | None:
    _check(given, inputs, *options)
    dout: Tensor = inputs[0]
    return dout.new_empty((dout.shape[0], options[2])) if given is None else None


BACKWARD_PATH = define_with_out(
    NAME,
    "Tensor dout, Tensor packed, Tensor scales, Tensor? zeros, Tensor offsets",
    "str code, int group, int k",
    splitting(5, _cuda, _cpu, _fake),
    results=("dx",),
)
