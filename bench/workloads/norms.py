"""Norms and their gradients: decoding, prefill and batches of two models, and the rows that others published."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baselines import DTYPES, Absent, Inputs, Launch, Workload, compiled, each, eager
from bench.suites import Case, suite
from bench.workloads.declared import exact, of_rows, workload
from cutekernels.ops.norms.api import add_rms_norm, layer_norm, rms_norm
from cutekernels.ops.norms.gradients import COLUMN_SUM, LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD, ColumnSumProblem
from cutekernels.ops.norms.op import ADD_RMS_NORM, LAYER_NORM, RMS_NORM

EPS = 1e-6

# ---- cases ----------------------------------------------------------------------------------------------


def _sizes(shapes: Iterable[tuple[int, int]], before: str = "") -> dict[str, dict[str, int]]:
    return {f"{before}{rows}x{cols}": {"rows": rows, "cols": cols} for rows, cols in shapes}


_FORWARD = _sizes([(1, 4096), (16, 3584), (2048, 896), (2048, 3584), (2048, 4096), (32768, 4096), (32768, 8192)])
_BACKWARD = _sizes([(16, 4096), (2048, 4096), (2048, 8192), (32768, 4096), (32768, 8192)])
# Published in fp16: hidden sizes at 2048 rows, whole vectors and 48 heads of 128, and one training shape.
_TOKENS = [8 * seq for seq in (1024, 4096, 8192, 16384)]
_REFERENCE = {
    **_sizes((2048, n) for n in (896, 1536, 2048, 3072, 3584, 4096)),
    **_sizes([(rows, 6144) for rows in _TOKENS], "vector "),
    **_sizes([(48 * rows, 128) for rows in _TOKENS], "heads "),
    **_sizes([(32 * 128, 4096)], "training "),
}


# ---- the mathematics, in plain torch --------------------------------------------------------------------


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.to(wide.dtype)).to(x.dtype)


def _add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    u = x + residual
    return _rms(u, weight), u


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _backward(centred: bool, dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    kind = torch.promote_types(x.dtype, torch.float32)
    d, v = dy.to(kind), x.to(kind)
    v = v - v.mean(-1, keepdim=True) if centred else v
    rstd = torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS)
    v = v * rstd
    g = d * weight.to(kind)
    slope = v * (g * v).mean(-1, keepdim=True)
    dx = rstd * ((g - g.mean(-1, keepdim=True) if centred else g) - slope)
    sums = ((d * v).sum(0), d.sum(0)) if centred else ((d * v).sum(0),)
    return dx.to(x.dtype), *[t.to(weight.dtype) for t in sums]


_PLAIN: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms,
    "add_rms_norm": _add_rms,
    "layer_norm": _layer,
    "rms_norm_backward": partial(_backward, False),
    "layer_norm_backward": partial(_backward, True),
}


def _plain(case: Case) -> Callable[..., Any]:
    return _PLAIN[case.op]


# ---- contenders -----------------------------------------------------------------------------------------


def _torchs(case: Case) -> Callable[..., Launch]:
    """torch's own kernel, where it has one."""
    aten = torch.ops.aten

    def rms_backward(dy: Tensor, x: Tensor, w: Tensor) -> Launch:
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
        return lambda: aten._fused_rms_norm_backward(dy, x, x.shape[-1:], rstd, w, [True, True])

    def layer_backward(dy: Tensor, x: Tensor, w: Tensor) -> Launch:
        _, mean, rstd = aten.native_layer_norm(x, x.shape[-1:], w, w, EPS)
        return lambda: aten.native_layer_norm_backward(dy, x, x.shape[-1:], mean, rstd, w, w, [True, True, True])

    makers: dict[str, Callable[..., Launch]] = {
        "rms_norm": lambda x, w: partial(F.rms_norm, x, x.shape[-1:], w, EPS),
        "layer_norm": lambda x, w, b: partial(F.layer_norm, x, x.shape[-1:], w, b, EPS),
        "rms_norm_backward": rms_backward,
        "layer_norm_backward": layer_backward,
    }
    if case.op not in makers:
        raise Absent("torch has no kernel of its own for this")
    return makers[case.op]


def _quack(case: Case) -> Callable[..., Launch]:
    from quack.rmsnorm import rmsnorm, rmsnorm_bwd

    def backward(dy: Tensor, x: Tensor, w: Tensor) -> Launch:
        rstd = torch.rsqrt(x.float().square().mean(-1) + EPS)
        return lambda: tuple(rmsnorm_bwd(x, w, dy, rstd)[:2])

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Launch:
        layernorm: Any = (
            getattr(import_module("quack.rmsnorm"), "layernorm_fwd", None) or import_module("quack.layernorm").layernorm
        )
        wide = [t.float() for t in (w, b)]  # it takes no others
        return partial(layernorm, x, *wide, eps=EPS)

    makers: dict[str, Callable[..., Launch]] = {
        "rms_norm": lambda x, w: partial(rmsnorm, x, w, eps=EPS),
        "add_rms_norm": lambda x, r, w: partial(rmsnorm, x, w, residual=r, eps=EPS, prenorm=True),
        "layer_norm": layer,
        "rms_norm_backward": backward,
    }
    if case.op not in makers:
        raise Absent("quack has no gradient of LayerNorm")
    return makers[case.op]


def _liger(case: Case) -> Callable[..., Launch]:
    """Its kernels without autograd. ``gemma`` is its name for arithmetic that rounds once."""
    from liger_kernel.ops import fused_add_rms_norm, layer_norm, rms_norm

    def rms_backward(dy: Tensor, x: Tensor, w: Tensor) -> Launch:
        _, x, rstd, block, warps, mode = rms_norm.rms_norm_forward(x, w, EPS, 0.0, "gemma", None)
        return lambda: tuple(rms_norm.rms_norm_backward(dy, x, w, rstd, 0.0, mode, block, warps, False, None))

    def layer_backward(dy: Tensor, x: Tensor, w: Tensor) -> Launch:
        _, x, mean, rstd, *_ = layer_norm.layer_norm_forward(x, w, w, EPS)
        return lambda: tuple(layer_norm.layer_norm_backward(dy, x, w, w, mean, rstd))

    makers: dict[str, Callable[..., Launch]] = {
        "rms_norm": lambda x, w: lambda: rms_norm.rms_norm_forward(x, w, EPS, 0.0, "gemma", None)[0],
        "add_rms_norm": lambda x, r, w: (
            lambda: tuple(fused_add_rms_norm.fused_add_rms_norm_forward(x, r, w, EPS, 0.0, "gemma")[:2])
        ),
        "layer_norm": lambda x, w, b: lambda: layer_norm.layer_norm_forward(x, w, b, EPS)[0],
        "rms_norm_backward": rms_backward,
        "layer_norm_backward": layer_backward,
    }
    return makers[case.op]


_PEERS = (
    compiled(lambda case: _PLAIN[case.op]),
    eager(lambda case: _PLAIN[case.op]),
    each("torch's kernel", _torchs),
    each("quack", _quack),
    each("liger", _liger),
)


def _workload(op: Any, function: Callable[..., Any] | None = None, *more: str) -> Workload:
    """``more``: suites of the rows that others published."""
    shapes = {"llm": _BACKWARD if function is None else _FORWARD, **dict.fromkeys(more, _REFERENCE)}
    suites = {name: suite(op.name, op.Problem, some) for name, some in shapes.items()}
    numbers, truth, streams = {"eps": EPS, "weight_offset": 0.0}, partial(_truth, op), partial(of_rows, op)
    return workload(op, suites, _PEERS, function, numbers, truth=truth, streams=streams)


def _truth(op: Any, case: Case, i: Inputs) -> tuple[Tensor, ...]:
    if op is ADD_RMS_NORM:  # the norm is of the rounded sum
        x, residual, *rest = i.args
        i = Inputs(i.operands, i.results, args=(x + residual, torch.zeros_like(x), *rest))
    return exact(op, case, i)


# ---- the second pass of weights' gradients --------------------------------------------------------------


# As many partial sums as programs of one to four per SM leave on an H200.
_PARTS = {f"{parts}x{cols}": {"parts": parts, "cols": cols} for cols in (4096, 8192) for parts in (132, 264, 528)}


def _sum(case: Case) -> Callable[..., Any]:
    dtype = DTYPES[ColumnSumProblem.parse(case.problem).dtype]
    return lambda parts: parts.sum(0).to(dtype)


WORKLOADS = (
    _workload(RMS_NORM, rms_norm, "reference", "headtohead"),
    _workload(ADD_RMS_NORM, add_rms_norm),
    _workload(LAYER_NORM, layer_norm),
    _workload(RMS_NORM_BACKWARD),
    _workload(LAYER_NORM_BACKWARD),
    workload(COLUMN_SUM, {"parts": suite("column_sum", ColumnSumProblem, _PARTS)}, (compiled(_sum), eager(_sum))),
)
