"""``quantized_linear_backward``: the gradient of ``quantized_linear``'s tokens, ``dx = dout @ weight``.

Columns of the weight are decoded into one workspace, a part at a time, and multiplied while they are in the L2 (of many
tokens), into their columns of dx. Launches follow one another on the current stream, so parts share the workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cutekernels import gpu as gpus
from cutekernels.errors import UnsupportedProblem
from cutekernels.gpu import GpuSpec
from cutekernels.ops.activations.api import JOINED_BACKWARD
from cutekernels.ops.gemm.api import gemm
from cutekernels.ops.gemm.epilogue import GATED
from cutekernels.ops.gemm.slopes import reads_value, through_activation
from cutekernels.ops.quantized.decode import DEQUANTIZE, Packed, decode_codes
from cutekernels.ops.shared.calls import define_with_out, run, splitting
from cutekernels.ops.shared.checks import check_results
from cutekernels.ops.shared.dtypes import GPU_DTYPES
from cutekernels.ops.shared.paths import Path
from cutekernels.quant.layout import TILE

Tensors = tuple[Tensor, ...]
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


def decoded_parts(
    dout: Tensor, weight: Packed, code: str, group: int, n: int, k: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Columns from ``begin`` to ``end`` of a packed weight in ``dout``'s type, part by part in one workspace."""
    dtype = GPU_DTYPES.names[dout.dtype]
    ranges = list(parts(n, k, dout.shape[0], gpus.detect(dout.get_device())))
    workspace = dout.new_empty((n, ranges[0][1]))
    for begin, end in ranges:
        width = end - begin
        part = workspace if width == workspace.shape[1] else workspace[:, :width]
        run(DEQUANTIZE, (part,), tuple(weight), options=(code, group, n, k, width, dtype), scalars=(begin,))
        yield begin, end, part


def check_weight(weight: Packed, code: str, group: int, n: int, k: int) -> None:
    """Raises UnsupportedProblem for tensors that are no packed weight of ``(n, k)``."""
    DEQUANTIZE.admit(weight, code=code, group=group, n=n, k=k, columns=k, dtype="bf16")


def saved_for(activation: str, first: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """Operands of :func:`before_activation`: the activation's value, or ``first`` and the bias to form ``z`` again."""
    return (value, None) if reads_value(activation) else (None, None) if activation == "none" else (first, bias)


def before_activation(grad: Tensor, value: Tensor, activation: str, z: Callable[[], Tensor]) -> Tensor:
    """The gradient of a product ``z`` from that of ``activation``, whose ``value`` is read where that serves.

    ``z``, which a fused forward never stored, is computed again.
    """
    if activation == "none":
        return grad
    if reads_value(activation):
        return through_activation(grad, value, activation)
    if activation == GATED:
        return JOINED_BACKWARD["silu_mul"](grad, z(), None)  # type: ignore[no-any-return]
    return through_activation(grad, z(), activation)


def define(
    name: str,
    inputs: str,
    options: str,
    rows: Callable[..., int],
    multiply: Callable[..., object],
    exact: Callable[..., Tensor],
) -> Path:
    """Defines the op ``name`` of a gradient ``dout``, a packed weight and what stands behind both.

    Args:
        name: of the op.
        inputs: the schema of those behind the weight's.
        options: the schema of those behind ``group``; the last is K.
        rows: ``(*inputs, *options)``, the weight's rows; it refuses what does not fit.
        multiply: ``(dout, columns of the weight, their columns of dx, *inputs)``, on a GPU.
        exact: ``(dout, weight, *inputs)``, dx in the type of both.
    """

    def check(given: Tensors | None, inputs: tuple[Any, ...], *options: Any) -> int:
        dout, packed, *_ = inputs
        n, k = rows(*inputs, *options), options[-1]
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
        return n

    @torch.no_grad()
    def cuda(given: Tensors | None, inputs: tuple[Any, ...], *options: Any) -> Tensor | None:
        n, (code, group, *_, k) = check(given, inputs, *options), options
        dout, weight, rest = inputs[0], inputs[1:5], inputs[5:]
        dx = dout.new_empty((dout.shape[0], k)) if given is None else given[0]
        if dx.numel():
            dout = dout if dout.stride(1) == 1 else dout.contiguous()  # once, not for each part
            for begin, end, part in decoded_parts(dout, weight, code, group, n, k):
                multiply(dout, part, dx if end - begin == k else dx[:, begin:end], *rest)
        return dx if given is None else None

    def cpu(given: Tensors | None, inputs: tuple[Any, ...], *options: Any) -> Tensor | None:
        n, (code, group, *_, k) = check(given, inputs, *options), options
        dout, weight, rest = inputs[0], inputs[1:5], inputs[5:]
        wide = torch.float32 if dout.dtype in _HALVES else dout.dtype
        whole = decode_codes(weight, code, group, n, k).to(dout.dtype)
        dx = exact(dout.to(wide), whole.to(wide), *rest).to(dout.dtype)
        if given is None:
            return dx
        given[0].copy_(dx)
        return None

    def fake(given: Tensors | None, inputs: tuple[Any, ...], *options: Any) -> Tensor | None:
        check(given, inputs, *options)
        dout: Tensor = inputs[0]
        return dout.new_empty((dout.shape[0], options[-1])) if given is None else None

    operands = f"Tensor dout, Tensor packed, Tensor scales, Tensor? zeros, Tensor? factors{inputs}"
    count = operands.count("Tensor")
    return define_with_out(
        name, operands, f"str code, int group, {options}", splitting(count, cuda, cpu, fake), results=("dx",)
    )


def _rows(dout: Tensor, *given: Any) -> int:
    code, group, n, k = given[4:]
    check_weight(given[:4], code, group, n, k)
    if dout.dim() != 2 or dout.shape[1] != n:
        raise UnsupportedProblem(f"dout must be (M, {n}); its shape is {tuple(dout.shape)}")
    return int(n)


def _multiply(dout: Tensor, part: Tensor, dx: Tensor) -> None:
    gemm(dout, part, out=dx)


BACKWARD_PATH = define("quantized_linear_backward", "", "int n, int k", _rows, _multiply, torch.matmul)
