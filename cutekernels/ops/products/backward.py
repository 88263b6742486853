"""The gradient of the tokens of products with packed weights, ``dx = dout @ weight``, of one weight or of experts.

Columns of the weight, of all experts' weights, are decoded into one workspace, a part at a time, and multiplied while
they are in the L2 (of many tokens), into their columns of dx. Launches follow one another on the current stream, so
parts share the workspace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cutekernels import gpu as gpus
from cutekernels.errors import UnsupportedProblem
from cutekernels.gpu import GpuSpec
from cutekernels.ops.products.api import gemm
from cutekernels.ops.products.dequantize import DEQUANTIZE, decode_codes
from cutekernels.ops.products.grouped import GROUPED_GEMM, GROUPED_GEMM_WGRAD
from cutekernels.ops.products.groups import by_group, check_offsets
from cutekernels.ops.shared.calls import define_with_out, run, splitting
from cutekernels.ops.shared.checks import check_results
from cutekernels.ops.shared.dtypes import GPU_DTYPES
from cutekernels.ops.shared.paths import Path
from cutekernels.quant.layout import TILE

Tensors = tuple[Tensor, ...]
DECODED_BYTES = 24 << 20  # of decoded columns at a time: they stay in the L2
MOST_DECODED_BYTES = 256 << 20  # where few tokens need more columns for a product that fills a GPU
_ROWS, _COLUMNS = 128, 256  # of dx, that an SM takes at a time in such a product
_BIAS_COLUMNS = 8  # of ones, whose product with dout is the gradient of experts' biases: 16-byte rows
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


def _check(given: Tensors | None, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> int:
    """Rows of the weight, of all experts' weights. Raises UnsupportedProblem for what poses no problem."""
    dout, *weight = inputs[:5]
    code, group, *n, k = options
    if len(inputs) == 5:
        total, experts, wanted = n[0], 1, f"(M, {n[0]})"
    else:
        check_offsets(inputs[5], dout)
        total, experts = weight[0].shape[0] * TILE, inputs[5].shape[0] - 1
        wanted = f"(T, N) for {total} rows of {experts} experts"
    DEQUANTIZE.admit(weight, code=code, group=group, n=total, k=k, columns=k, dtype="bf16")
    if dout.dim() != 2 or dout.shape[1] * experts != total:
        raise UnsupportedProblem(f"dout must be {wanted}; its shape is {tuple(dout.shape)}")
    if not dout.is_floating_point() or (dout.is_cuda and dout.dtype not in _HALVES):
        raise UnsupportedProblem(f"dout must be fp16 or bf16 (on the CPU fp32 and fp64 too); it is {dout.dtype}")
    for dx in given or ():
        if tuple(dx.shape) != (dout.shape[0], k) or dx.dtype != dout.dtype:
            raise UnsupportedProblem(
                f"dx must be {(dout.shape[0], k)} {dout.dtype}; it is {tuple(dx.shape)} {dx.dtype}"
            )
    for t in (weight[0], *(given or ())):
        if t.device != dout.device:
            raise UnsupportedProblem(f"all tensors must be on dout's device {dout.device}; one is on {t.device}")
    check_results(given or ())
    return int(total)


def group_sums(rows: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """``(E, N)``: the rows of each group added up, in a fixed order; rounded once, to ``dtype``."""
    if dtype == rows.dtype:
        ones = rows.new_ones((rows.shape[0], _BIAS_COLUMNS))
        return GROUPED_GEMM_WGRAD.path(rows, ones, offsets, None)[..., 0]  # type: ignore[no-any-return]
    ends = offsets.clamp(0, rows.shape[0]).cummax(0).values.long()  # as the kernels read offsets, whatever they are
    return torch.segment_reduce(rows.to(dtype), "sum", offsets=ends, unsafe=True)


def _of_experts(weight: Tensor, offsets: Tensor) -> Tensor:
    return weight.view(offsets.shape[0] - 1, -1, weight.shape[1])


@torch.no_grad()
def _cuda(given: Tensors | None, inputs: tuple[Any, ...], *options: Any) -> Tensor | None:
    n, (code, group, *_, k) = _check(given, inputs, options), options
    dout, weight, offsets = inputs[0], inputs[1:5], inputs[5:]
    dx: Tensor = dout.new_empty((dout.shape[0], k)) if given is None else given[0]
    if dx.numel():
        dout = dout if dout.stride(1) == 1 else dout.contiguous()  # once, not for each part
        dtype = GPU_DTYPES.names[dout.dtype]
        ranges = list(parts(n, k, dout.shape[0], gpus.detect(dout.get_device())))
        workspace = dout.new_empty((n, ranges[0][1]))
        for begin, end in ranges:
            width = end - begin
            part = workspace if width == workspace.shape[1] else workspace[:, :width]
            run(DEQUANTIZE, (part,), weight, options=(code, group, n, k, width, dtype), scalars=(begin,))
            own: Tensor = dx if width == k else dx[:, begin:end]
            if offsets:
                run(GROUPED_GEMM, (own,), (dout, _of_experts(part, offsets[0]).mT, *offsets, None), options=("none",))
            else:
                gemm(dout, part, out=own)
    return dx if given is None else None


def _cpu(given: Tensors | None, inputs: tuple[Any, ...], *options: Any) -> Tensor | None:
    n, (code, group, *_, k) = _check(given, inputs, options), options
    dout, weight, offsets = inputs[0], inputs[1:5], inputs[5:]
    wide = torch.float32 if dout.dtype in _HALVES else dout.dtype
    whole, exact = decode_codes(weight, code, group, n, k).to(dout.dtype).to(wide), dout.to(wide)
    if offsets:
        experts = _of_experts(whole, offsets[0])
        dx = by_group(exact, offsets[0], k, lambda e, rows: rows @ experts[e])
    else:
        dx = exact @ whole
    if given is None:
        return dx.to(dout.dtype)
    given[0].copy_(dx.to(dout.dtype))
    return None


def _fake(given: Tensors | None, inputs: tuple[Any, ...], *options: Any) -> Tensor | None:
    _check(given, inputs, options)
    dout: Tensor = inputs[0]
    return dout.new_empty((dout.shape[0], options[-1])) if given is None else None


def _define(name: str, offsets: str, rows: str) -> Path:
    operands = f"Tensor dout, Tensor packed, Tensor scales, Tensor? zeros, Tensor? factors{offsets}"
    ways = splitting(operands.count("Tensor"), _cuda, _cpu, _fake)
    return define_with_out(name, operands, f"str code, int group, {rows}int k", ways, results=("dx",))


LINEAR_BACKWARD = _define("quantized_linear_backward", "", "int n, ")
GROUPED_BACKWARD = _define("quantized_grouped_gemm_backward", ", Tensor offsets", "")
