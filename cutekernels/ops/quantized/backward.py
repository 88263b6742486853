"""``quantized_linear_backward``: the gradient of ``quantized_linear``'s tokens, ``dx = dout @ weight``.

Columns of the weight are decoded into one workspace, a part at a time, and multiplied while they are in the L2 (of many
tokens), into their columns of dx. Launches follow one another on the current stream, so parts share the workspace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cutekernels import gpu as gpus
from cutekernels.errors import UnsupportedProblem
from cutekernels.gpu import GpuSpec
from cutekernels.ops.gemm.api import gemm
from cutekernels.ops.quantized.decode import DEQUANTIZE, check_weight, rows_of_scale
from cutekernels.ops.shared.calls import run
from cutekernels.ops.shared.checks import check_results
from cutekernels.ops.shared.dtypes import GPU_DTYPES
from cutekernels.ops.shared.registration import define_with_out, splitting
from cutekernels.quant.layout import TILE
from cutekernels.quant.weight import QuantizedWeight

NAME = "quantized_linear_backward"
DECODED_BYTES = 24 << 20  # of decoded columns at a time: they stay in the L2
MOST_DECODED_BYTES = 256 << 20  # where few tokens need more columns for a product that fills a GPU
_ROWS, _COLUMNS = 128, 256  # of dx, that an SM takes at a time in such a product
_HALVES = (torch.bfloat16, torch.float16)


def parts(n: int, k: int, m: int, gpu: GpuSpec) -> Iterator[tuple[int, int]]:
    """``(begin, end)`` of the columns that are decoded at a time: one part where all fit, else about equal ones.

    A part is whole waves of the product's tiles, so few tokens have larger parts. It is a multiple of 256 columns, or
    of 64 where a weight has too many rows for that.
    """
    tiles = max(1, -(-m // _ROWS))  # along tokens
    wave = _COLUMNS * max(1, gpu.sm_count // tiles)
    held = min(max(DECODED_BYTES, wave * n * 2), MOST_DECODED_BYTES) if tiles < gpu.sm_count else DECODED_BYTES
    if n * k * 2 <= held:
        most = k
    else:
        fitting = held // (2 * n)
        unit = next((unit for unit in (wave, _COLUMNS) if unit <= fitting), TILE)
        most = max(unit, fitting // unit * unit)
        count, unit = -(-k // most), min(unit, _COLUMNS)
        most = -(-k // (count * unit)) * unit
    for begin in range(0, k, most):
        yield begin, min(begin + most, k)


def _check(given: tuple[Tensor, ...] | None, inputs: tuple[Any, ...], code: str, group: int, n: int, k: int) -> None:
    dout, packed, scales, zeros = inputs
    check_weight(packed, scales, zeros, code, group, n, k)
    if dout.dim() != 2 or dout.shape[1] != n:
        raise UnsupportedProblem(f"dout must be (M, {n}); its shape is {tuple(dout.shape)}")
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


def decoded_parts(
    dout: Tensor, weight: tuple[Tensor, Tensor, Tensor | None], code: str, group: int, n: int, k: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Columns from ``begin`` to ``end`` of a packed weight in ``dout``'s type, part by part in one workspace."""
    dtype = GPU_DTYPES.names[dout.dtype]
    ranges = list(parts(n, k, dout.shape[0], gpus.detect(dout.get_device())))
    workspace = dout.new_empty((n, ranges[0][1]))
    for begin, end in ranges:
        width = end - begin
        decoded = workspace if width == workspace.shape[1] else workspace[:, :width]
        run(DEQUANTIZE, (decoded,), weight, options=(code, group, n, k, width, dtype), scalars=(begin,))
        yield begin, end, decoded


@torch.no_grad()
def _cuda(given: tuple[Tensor, ...] | None, inputs: tuple[Any, ...], *options: Any) -> Tensor | None:
    _check(given, inputs, *options)
    dout, packed, scales, zeros = inputs
    code, group, n, k = options
    dx = dout.new_empty((dout.shape[0], k)) if given is None else given[0]
    if dx.numel():
        if dout.stride(1) != 1:
            dout = dout.contiguous()  # once, not for each part
        for begin, end, decoded in decoded_parts(dout, (packed, scales, zeros), code, group, n, k):
            gemm(dout, decoded, out=dx if end - begin == k else dx[:, begin:end])
    return dx if given is None else None


def _cpu(given: tuple[Tensor, ...] | None, inputs: tuple[Any, ...], *options: Any) -> Tensor | None:
    _check(given, inputs, *options)
    dout, packed, scales, zeros = inputs
    code, group, n, k = options
    weight = QuantizedWeight(
        code=code, group=group, scale_rows=rows_of_scale(scales, n), shape=(n, k), packed=packed, scales=scales,
        zeros=zeros,
    )  # fmt: skip
    decoded = weight.dequantize(torch.float32).to(dout.dtype)
    wide = torch.float32 if dout.dtype in _HALVES else dout.dtype
    dx: Tensor = (dout.to(wide) @ decoded.to(wide)).to(dout.dtype)
    if given is None:
        return dx
    given[0].copy_(dx)
    return None


def _fake(given: tuple[Tensor, ...] | None, inputs: tuple[Any, ...], *options: Any) -> Tensor | None:
    _check(given, inputs, *options)
    dout: Tensor = inputs[0]
    return dout.new_empty((dout.shape[0], options[3])) if given is None else None


BACKWARD_PATH = define_with_out(
    NAME,
    "Tensor dout, Tensor packed, Tensor scales, Tensor? zeros",
    "str code, int group, int n, int k",
    splitting(4, _cuda, _cpu, _fake),
    results=("dx",),
)
