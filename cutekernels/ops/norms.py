"""``rms_norm``, ``add_rms_norm`` and ``layer_norm``: declarations, the functions, and their registration with torch.

Their gradients are ops of ``norm_gradients.py``. Nothing but tensors that exist anyway is kept for them: ``rstd`` is
computed again from ``x``, which a gradient reads in any case, so keeping it would only add bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import plain
from cutekernels.ops import calls
from cutekernels.ops.norm_op import NormConfig, NormOp, NormProblem, affine_kind, typed, wide

# ---- declarations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RmsNormProblem(NormProblem):
    """``rounding``: whether ``x * rstd`` is rounded before it is multiplied by the weight. ``shifted``: whether
    ``weight_offset`` is added to that; 0 needs no addition.
    """

    rounding: str = plain("once", "huggingface")
    shifted: bool = plain(False, True)

    def bucket(self) -> RmsNormProblem:
        """One tuning serves weights with and without an offset."""
        return super().bucket().replace(shifted=False)


@dataclass(frozen=True)
class LayerNormProblem(NormProblem):
    """``bias``: of which type, as ``weight``."""

    bias: str = plain("same", "none", "fp32")


class _RmsNorms(NormOp[RmsNormProblem]):
    Problem = RmsNormProblem
    kernels = "norms"
    options = ("rounding", "shifted")
    scalars = ("eps", "weight_offset")
    strides_over_tiles = False
    wide_row = 2048

    def kind(self, p: RmsNormProblem, name: str) -> str | None:
        return typed(p, p.weight) if name == "weight" else p.dtype

    def values(self, p: RmsNormProblem) -> int:
        return self._copied(p) + (p.weight != "none")

    def flags(self, p: RmsNormProblem) -> dict[str, bool]:
        return {"WEIGHT": p.weight != "none", "SHIFTED": p.shifted, "ROUND_TWICE": p.rounding == "huggingface"}

    def pose(self, common: Mapping[str, Any], named: Any, options: Mapping[str, Any]) -> RmsNormProblem:
        return RmsNormProblem(**common, **options)

    def sample(self, p: RmsNormProblem, device: str, seed: int) -> tuple[Any, ...]:
        *args, offset = super().sample(p, device, seed)
        return (*args, offset if p.shifted else 0.0)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        x = inputs[0]
        assert x is not None
        return tuple([x.new_empty(x.shape) for _ in self.results])

    def normalise(self, x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> Tensor:
        v = wide(x)
        y = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
        if rounding == "huggingface":
            y = y.to(x.dtype).to(v.dtype)
        return (y if weight is None else y * (weight.to(v.dtype) + offset)).to(x.dtype)


class RmsNorm(_RmsNorms):
    """``y = x * rstd * (weight + weight_offset)``. Arguments: x, weight, eps, weight_offset."""

    name = "rms_norm"
    revision = 1
    # H200, 32768 rows, us in chunks (in the tuner) and whole (in the bench): 4096 columns 128.3 and 133.2, 6144 of fp16
    # 193 and 213, 8192 256 and 265; chunks of 2048 take 265 there too (2026-11-22).
    chunks: ClassVar[Mapping[int, tuple[int, int]]] = {4096: (2048, 8), 8192: (4096, 16)}
    suite = (
        "rows=1 cols=4096",
        "rows=16 cols=3584",
        "rows=333 cols=1001 align=2",
        "rows=77 cols=130 layout=strided",
        "rows=300 cols=128 heads=5 layout=heads",
        "rows=300 cols=64 heads=3 layout=heads per_head=1",
        "rows=2048 cols=896",
        "rows=2048 cols=3584",
        "rows=2048 cols=4096",
        "rows=2048 cols=4096 weight=fp32 shifted=1",
        "rows=2048 cols=5120 dtype=fp32 weight=none",
        "rows=33 cols=20000 dtype=fp16",
        "rows=8192 cols=6144 dtype=fp16",
        "rows=32768 cols=4096",
    )
    results = ("y",)
    inputs = ("x", "weight")
    schema = "Tensor x, Tensor? weight, str rounding, bool shifted, float eps, float weight_offset"
    flops_per_element = 4

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, weight, eps, offset = args
        return (self.normalise(x, weight, eps, offset if options["shifted"] else 0.0, options["rounding"]),)


class AddRmsNorm(_RmsNorms):
    """``u = x + residual`` and its RMSNorm: (y, u). Arguments: x, residual, weight, eps, weight_offset."""

    name = "add_rms_norm"
    revision = 1
    # H200, 32768 rows, us in chunks (tuner) and whole (bench): 4096 columns 260 and 264, 8192 516 and 522 (2026-11-21).
    chunks: ClassVar[Mapping[int, tuple[int, int]]] = {4096: (2048, 8), 8192: (4096, 16)}
    # 2048 x 896 in us, H200: two rows to four warps 3.69 in a warm L2 and 5.13, one row 3.02 and 4.97 (2026-11-22).
    summands = 2
    suite = (
        "rows=1 cols=4096",
        "rows=16 cols=3584",
        "rows=333 cols=1001 align=2",
        "rows=77 cols=130 layout=strided",
        "rows=2048 cols=3584",
        "rows=2048 cols=4096",
        "rows=2048 cols=5120 dtype=fp32",
        "rows=33 cols=20000 dtype=fp16",
        "rows=32768 cols=4096",
    )
    results = ("y", "u")
    inputs = ("x", "residual", "weight")
    schema = "Tensor x, Tensor residual, Tensor? weight, str rounding, bool shifted, float eps, float weight_offset"
    flops_per_element = 5

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, residual, weight, eps, offset = args
        u = (wide(x) + wide(residual)).to(x.dtype)
        return self.normalise(u, weight, eps, offset if options["shifted"] else 0.0, options["rounding"]), u


class LayerNorm(NormOp[LayerNormProblem]):
    """``y = (x - mean) * rstd * weight + bias``. Arguments: x, weight, bias, eps."""

    name = "layer_norm"
    revision = 1
    suite = (
        "rows=1 cols=4096",
        "rows=16 cols=3584",
        "rows=333 cols=1001 align=2",
        "rows=77 cols=130 layout=strided",
        "rows=300 cols=128 heads=5 layout=heads",
        "rows=2048 cols=768",
        "rows=2048 cols=4096",
        "rows=2048 cols=4096 weight=fp32 bias=fp32",
        "rows=2048 cols=5120 dtype=fp32 weight=none bias=none",
        "rows=33 cols=20000 dtype=fp16 bias=none",
        "rows=32768 cols=4096",
    )
    Problem = LayerNormProblem
    kernels = "norms"
    results = ("y",)
    inputs = ("x", "weight", "bias")
    scalars = ("eps",)
    schema = "Tensor x, Tensor? weight, Tensor? bias, float eps"
    strides_over_tiles = False
    wide_row = 2048
    # H200, 32768 rows of 4096 and of 8192: 131.4 and 268 us in pairs, 142 and 361 one by one (2026-11-21).
    paired = True
    flops_per_element = 7

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        super().admit(inputs, results, **options)
        _, weight, bias = inputs
        if bias is not None and weight is None and bias.dim() > 1:
            raise UnsupportedProblem("a bias for each head needs weights of its shape; got none: pass ones")

    def kind(self, p: LayerNormProblem, name: str) -> str | None:
        return typed(p, p.weight) if name == "weight" else typed(p, p.bias) if name == "bias" else p.dtype

    def values(self, p: LayerNormProblem) -> int:
        return 1 + (p.weight != "none") + (p.bias != "none")

    def flags(self, p: LayerNormProblem) -> dict[str, bool]:
        return {"WEIGHT": p.weight != "none", "BIAS": p.bias != "none"}

    def pose(self, common: Mapping[str, Any], named: Mapping[str, Tensor | None], options: Any) -> LayerNormProblem:
        x = named["x"]
        assert x is not None
        return LayerNormProblem(**common, bias=affine_kind(named["bias"], x))

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        x = inputs[0]
        assert x is not None
        return (x.new_empty(x.shape),)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, weight, bias, eps = args
        v = wide(x)
        v = v - v.mean(-1, keepdim=True)
        y = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
        y = y if weight is None else y * weight.to(v.dtype)
        return ((y if bias is None else y + bias.to(v.dtype)).to(x.dtype),)


RMS_NORM = RmsNorm()
ADD_RMS_NORM = AddRmsNorm()
LAYER_NORM = LayerNorm()


# ---- the functions --------------------------------------------------------------------------------------


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    rounding: str = "once",
    out: Tensor | None = None,
    config: NormConfig | str | None = None,
) -> Tensor:
    """``y = x * rstd * (weight + weight_offset)`` with ``rstd = 1 / sqrt(mean(x^2) + eps)`` over the last dimension.

    In fp32 (fp64 inputs, on the CPU, in fp64), rounded once.

    Args:
        x: ``(..., N)``, fp16, bf16 or fp32 (on the CPU fp64 too). Any strides: rows whose elements are contiguous are
            fast, slices of a joint projection included. Where no single stride walks the dimensions before the last
            two, a contiguous copy is made.
        weight: ``(N,)``, or ``(H, N)`` for an ``x`` of ``(..., H, N)``, a row for each head; dtype of ``x`` or
            fp32. None for ones; ``weight_offset`` is then not used.
        eps: added to the mean of squares.
        weight_offset: 1.0 for Gemma's weights, which are stored less one.
        rounding: ``"once"``, or ``"huggingface"`` to round ``x * rstd`` to the type of ``x`` before it is multiplied
            by the weight, as ``LlamaRMSNorm`` does. Gradients are the same for both.
        out: where to write: shape, dtype and device of ``x``, any strides. It may be ``x`` itself; any
            other overlap is refused. Not differentiable.
        config: overrides the tuned choice, as a :class:`NormConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., N)``, dtype of ``x`` whatever the weight's, contiguous, or ``out``. Differentiable in ``x`` and
        ``weight``, once; the gradient of ``weight`` is summed in fp32 in a fixed order.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched shapes, dtypes or devices, an ``out`` that
            overlaps an operand or itself, ``out`` together with gradients.
        InvalidConfig: ``config`` breaks a rule of the op.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    results = None if out is None else (out,)
    found = calls.eager(RMS_NORM, results, (x, weight), (rounding, weight_offset != 0), (eps, weight_offset), config)
    if found is not None:
        return found[0]
    text = None if config is None else str(config)
    if out is None:
        return torch.ops.cutekernels.rms_norm(  # type: ignore[no-any-return]
            x, weight, rounding, weight_offset != 0, eps, weight_offset, text
        )
    calls.refuse_gradient(x, weight, out)
    torch.ops.cutekernels.rms_norm_out(x, weight, out, rounding, weight_offset != 0, eps, weight_offset, text)
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    rounding: str = "once",
    config: NormConfig | str | None = None,
) -> tuple[Tensor, Tensor]:
    """``u = x + residual`` and ``y = rms_norm(u, weight)``, in one pass: a transformer block's residual and next norm.

    ``u`` is rounded to its type, and ``y`` is the norm of that rounded ``u``: what the two steps give one by one.

    Args:
        x: ``(..., N)``, fp16, bf16 or fp32 (on the CPU fp64 too), any strides, as in :func:`rms_norm`.
        residual: shape, dtype and device of ``x``; nothing is broadcast or cast.
        weight: ``(N,)`` or ``(H, N)``, dtype of ``x`` or fp32, or None, as in :func:`rms_norm`.
        eps: added to the mean of squares.
        weight_offset: as in :func:`rms_norm`.
        rounding: as in :func:`rms_norm`.
        config: overrides the tuned choice, as a :class:`NormConfig` or its text. Ignored on the CPU.

    Returns:
        ``(y, u)``, both ``(..., N)`` and contiguous, dtype of ``x``. Differentiable in ``x``, ``residual`` and
        ``weight``, once, through both results.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched shapes, dtypes or devices.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    options = (rounding, weight_offset != 0)
    found = calls.eager(ADD_RMS_NORM, None, (x, residual, weight), options, (eps, weight_offset), config)
    if found is not None:
        return found[0], found[1]
    text = None if config is None else str(config)
    return torch.ops.cutekernels.add_rms_norm(  # type: ignore[no-any-return]
        x, residual, weight, rounding, weight_offset != 0, eps, weight_offset, text
    )


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    config: NormConfig | str | None = None,
) -> Tensor:
    """``y = (x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension, ``var`` biased as in PyTorch.

    The mean is subtracted before squares are summed. In fp32 (fp64 inputs, on the CPU, in fp64), rounded once.

    Args:
        x: ``(..., N)``, fp16, bf16 or fp32 (on the CPU fp64 too), any strides, as in :func:`rms_norm`.
        weight: ``(N,)`` or ``(H, N)``, dtype of ``x`` or fp32, or None for ones.
        bias: shape of ``weight``, dtype of ``x`` or fp32, or None for zeros.
        eps: added to the variance.
        config: overrides the tuned choice, as a :class:`NormConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., N)``, dtype of ``x``, contiguous. Differentiable in ``x``, ``weight`` and ``bias``, once; the gradients
        of ``weight`` and ``bias`` are summed in fp32 in a fixed order.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched shapes, dtypes or devices.
        InvalidConfig: ``config`` breaks a rule of the op.

    Source: Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450.
    """
    found = calls.eager(LAYER_NORM, None, (x, weight, bias), (), (eps,), config)
    if found is not None:
        return found[0]
    text = None if config is None else str(config)
    return torch.ops.cutekernels.layer_norm(x, weight, bias, eps, text)  # type: ignore[no-any-return]


# ---- torch.library --------------------------------------------------------------------------------------


def register(library: torch.library.Library) -> None:
    """Defines the ops of this file in ``library``, with their gradients."""
    calls.register(library, RMS_NORM, backward=_rms_norm_gradient, setup_context=_remember_rms_norm)
    calls.register(library, ADD_RMS_NORM, backward=_add_rms_norm_gradient, setup_context=_remember_add_rms_norm)
    calls.register(library, LAYER_NORM, backward=_layer_norm_gradient, setup_context=_remember_layer_norm)


def _remember_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, _, eps, offset, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.scalars = (eps, offset)


def _rms_norm_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wanted = weight is not None and ctx.needs_input_grad[1]
    dx, dweight = torch.ops.cutekernels.rms_norm_backward(dy, x, weight, None, wanted, *ctx.scalars)
    return dx, dweight if wanted else None, *[None] * 5


def _remember_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, _, _, eps, offset, _ = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.scalars = (eps, offset)
    ctx.set_materialize_grads(False)


def _add_rms_norm_gradient(ctx: Any, dy: Tensor | None, du: Tensor | None) -> tuple[Tensor | None, ...]:
    u, weight = ctx.saved_tensors
    if dy is None:
        return du, du, *[None] * 6
    wanted = weight is not None and ctx.needs_input_grad[2]
    dx, dweight = torch.ops.cutekernels.rms_norm_backward(dy, u, weight, du, wanted, *ctx.scalars)
    return dx, dx, dweight if wanted else None, *[None] * 5


def _remember_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, eps, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias = affine_kind(bias, x)
    ctx.eps = eps


def _layer_norm_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wanted = weight is not None and ctx.needs_input_grad[1]
    bias = ctx.bias if ctx.needs_input_grad[2] else "none"
    dx, dweight, dbias = torch.ops.cutekernels.layer_norm_backward(dy, x, weight, wanted, bias, ctx.eps)
    return dx, dweight if wanted else None, None if bias == "none" else dbias, None, None
