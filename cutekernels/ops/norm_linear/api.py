"""``rms_norm_linear`` and ``linear_silu_mul``: the public functions around the projections of a transformer block.

Up to 128 tokens both are ops of their own (``op.py``), and the tuner times one kernel against a chain of the ops they
are made of. Beyond, with a residual, with ``exact``, with a packed weight and where gradients are wanted, they are that
chain, which keeps what a gradient needs (``chain.py``). On a GPU ``linear_silu_mul`` is an op of its own beyond too,
behind the norm's.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import Activation
from cutekernels.ops.gemm.problem import MOST_TOKENS
from cutekernels.ops.norm_linear.chain import linear_then_gate, norm_then_linear
from cutekernels.ops.norm_linear.op import LINEAR_SILU_MUL, RMS_NORM_LINEAR
from cutekernels.ops.norm_linear.problem import NormLinearConfig
from cutekernels.ops.norms.api import rms_norm
from cutekernels.ops.shared.calls import call, register
from cutekernels.ops.shared.checks import INFINITE, check_eps, check_flag, check_tensor, check_word
from cutekernels.ops.shared.paths import autocasting, transformed
from cutekernels.quant.weight import QuantizedWeight


class _Options(TypedDict, total=False):
    eps: float
    rstd: Tensor | None
    activation: Activation | None
    exact: bool
    out: Tensor | None
    config: NormLinearConfig | str | None


_Weight = Tensor | QuantizedWeight


# fmt: off
@overload
def rms_norm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: _Weight, bias: Tensor | None = ..., *, residual: None = ...,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def rms_norm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: _Weight, bias: Tensor | None = ..., *, residual: Tensor,
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: _Weight, bias: Tensor | None = ..., *, residual: Tensor | None,
    **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on
def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    rstd: Tensor | None = None,
    activation: Activation | None = None,
    exact: bool = False,
    out: Tensor | None = None,
    config: NormLinearConfig | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``y = activation(rms_norm(u) @ weight.T + bias)`` with ``u = x``, or ``u = x + residual`` rounded to its type.

    The product accumulates in fp32. Each of its terms has one rounding to the type of ``x``: one after the other, the
    ops round the normalised rows; the fused kernels round ``norm_weight * weight`` (``body=skinny``) or, in bf16,
    ``x * norm_weight`` (``body=skinny_warpgroup``), and multiply the fp32 sums by rstd. In fp16 that wants
    ``norm_weight * weight`` below 4094, and keeps its bits down to 4e-6.

    Args:
        x: ``(..., K)``, fp16 or bf16 (on the CPU fp32 and fp64 too), any strides.
        norm_weight: ``(K,)``, dtype of ``x`` or fp32; None for ones, say where :func:`fold` has put it into ``weight``.
        weight: ``(N, K)``, dtype of ``x``: the layout of ``nn.Linear.weight``. Or a
            :class:`~cutekernels.quant.QuantizedWeight`, which has no gradient: the norm and the product one after the
            other.
        bias: ``(N,)``, dtype of ``x`` or fp32.
        eps: added to the mean of squares. Not used with ``rstd``.
        residual: shape, dtype and device of ``x``.
        rstd: ``(...)``, fp32: ``1 / sqrt(mean(u^2) + eps)`` of each row where a preceding op has it; then not computed.
        activation: ``"relu" | "gelu" | "gelu_tanh" | "silu"``; None for identity.
        exact: round ``u * rstd`` to the type of ``x`` before ``norm_weight``, as Hugging Face's modules do.
        out: where to write y, ``(..., N)``; must not overlap an input. Not differentiable.
        config: overrides the tuned choice, as a :class:`NormLinearConfig` or its text. Ignored on the CPU.

    Returns:
        ``y``, ``(..., N)``, dtype of ``x``; with ``residual``, ``(y, u)``. Differentiable in x, residual, norm_weight,
        weight and bias; with ``rstd``, that is taken as given.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched extents, dtypes or devices, an ``out`` that overlaps an
            input or itself, ``out`` together with gradients, ``config`` with a residual, ``exact`` or a packed weight.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    _check_tensors("rms_norm_linear", x=x)
    if not isinstance(weight, QuantizedWeight):
        _check_tensors("rms_norm_linear", weight=weight)
    _check_tensors("rms_norm_linear", optional=True, norm_weight=norm_weight, bias=bias, residual=residual, rstd=rstd)
    check_word("rms_norm_linear", "activation", activation, optional=True)
    if type(eps) is not float or not 0.0 <= eps < INFINITE:
        check_eps("rms_norm_linear", eps)
    if exact is not False:
        check_flag("rms_norm_linear", "exact", exact)
    if len(weight.shape) != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise UnsupportedProblem(
            f"x must be (..., K) and weight (N, K); their shapes are {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if norm_weight is not None and tuple(norm_weight.shape) != (x.shape[-1],):
        raise UnsupportedProblem(
            f"norm_weight must be (K,) = ({x.shape[-1]},); its shape is {tuple(norm_weight.shape)}"
        )
    composed = residual is not None or exact
    if config is not None and (composed or isinstance(weight, QuantizedWeight)):
        raise UnsupportedProblem(
            "config= is for one kernel; with residual=, exact=True or a packed weight several run: leave it out"
        )
    if composed or isinstance(weight, QuantizedWeight) or _as_chain(config, x, norm_weight, weight, bias):
        with _uncast(x, out):
            y, u = norm_then_linear(
                x, norm_weight, weight, bias, rstd, eps, activation, residual=residual, exact=exact, out=out
            )
        return y if residual is None else (y, u)
    inputs, results = (x, norm_weight, weight, bias, rstd), None if out is None else (out,)
    options = ("none" if activation is None else activation,)
    return call(RMS_NORM_LINEAR, inputs, options, (eps,), config=config, out=results)[0]


def linear_silu_mul(
    x: Tensor,
    w_gate_up: Tensor | QuantizedWeight,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    norm: bool | None = None,
    out: Tensor | None = None,
    config: NormLinearConfig | str | None = None,
) -> Tensor:
    """``silu(h @ w_gate.T) * (h @ w_up.T)``, gate and up projected in one product; ``h`` is ``x`` or its RMS norm.

    One after the other, the ops round both projections to the type of ``x`` before the gate; the fused kernel, which
    rounds the result alone, is closer to the truth. The norm is that of :func:`rms_norm_linear`.

    Args:
        x: ``(..., K)``, fp16 or bf16 (on the CPU fp32 and fp64 too), any strides.
        w_gate_up: ``(2 * I, K)``, dtype of ``x``: the rows of the gate's weight, then those of up's. Or a
            :class:`~cutekernels.quant.QuantizedWeight`, without gradient: the ops one after the other.
        norm_weight: ``(K,)``, dtype of ``x`` or fp32; selects the norm in front.
        eps: of the norm.
        norm: True for the norm in front without a weight (say after :func:`fold`); by default as ``norm_weight`` says.
        out: where to write, ``(..., I)``; must not overlap an input. Not differentiable.
        config: overrides the tuned choice, as a :class:`NormLinearConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., I)``, dtype of ``x``. Differentiable in x, w_gate_up and norm_weight.

    Raises:
        UnsupportedProblem: an odd number of weight rows, ``norm=False`` with a ``norm_weight``, ``config`` with a
            packed weight, and what :func:`rms_norm_linear` and ``silu_mul`` refuse.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    _check_tensors("linear_silu_mul", x=x)
    if not isinstance(w_gate_up, QuantizedWeight):
        _check_tensors("linear_silu_mul", w_gate_up=w_gate_up)
    _check_tensors("linear_silu_mul", optional=True, norm_weight=norm_weight)
    if type(eps) is not float or not 0.0 <= eps < INFINITE:
        check_eps("linear_silu_mul", eps)
    if norm is not None:
        check_flag("linear_silu_mul", "norm", norm)
    if len(w_gate_up.shape) != 2 or w_gate_up.shape[0] % 2:
        raise UnsupportedProblem(
            f"w_gate_up must be (2 * I, K), the gate's rows before up's; its shape is {tuple(w_gate_up.shape)}"
        )
    if norm is False and norm_weight is not None:
        raise UnsupportedProblem("norm=False takes no norm_weight: leave one of them out")
    norm = bool(norm) or norm_weight is not None
    if isinstance(w_gate_up, QuantizedWeight):
        if config is not None:
            raise UnsupportedProblem("config= is for one kernel; with a packed weight several run: leave it out")
        _check_tensors("linear_silu_mul", optional=True, out=out)
        with _uncast(x, out):
            if not _differentiates(x, norm_weight):
                from cutekernels.ops.quantized.api import gated

                if norm:
                    x, norm_weight, norm = rms_norm(x, norm_weight, eps=eps), None, False
                made = gated(x, w_gate_up, out=out)
                if made is not None:
                    return made
            return linear_then_gate(x, w_gate_up, norm_weight, eps, norm, out=out)
    if _as_chain(config, x, norm_weight, w_gate_up):
        with _uncast(x, out):
            if not x.is_cuda or _differentiates(x, norm_weight, w_gate_up):
                return linear_then_gate(x, w_gate_up, norm_weight, eps, norm, out=out)
            if norm:
                x, norm_weight, norm = rms_norm(x, norm_weight, eps=eps), None, False
    results = None if out is None else (out,)
    return call(LINEAR_SILU_MUL, (x, w_gate_up, norm_weight), (norm,), (eps,), config=config, out=results)[0]


def fold(norm_weight: Tensor, weight: Tensor) -> Tensor:
    """``weight * norm_weight``, ``(N, K)``: a projection that has its norm's weight in it, rounded once.

    ``rms_norm_linear(x, None, fold(norm_weight, weight))`` then needs no weight for the norm. A copy as large as
    ``weight``, to be made again whenever either changes; for training, keep them apart.

    Args:
        norm_weight: ``(K,)``, fp16, bf16, fp32 or fp64.
        weight: ``(N, K)``, one of these dtypes, on the same device.

    Returns:
        ``(N, K)``, dtype of ``weight``. Differentiable in both.

    Raises:
        UnsupportedProblem: another dtype, two devices, extents that do not match.
    """
    _check_tensors("fold", norm_weight=norm_weight, weight=weight)
    for name, t in (("norm_weight", norm_weight), ("weight", weight)):
        if t.dtype not in _FOLDED or t.device != weight.device:
            raise UnsupportedProblem(
                f"fold takes fp16, bf16, fp32 or fp64 on one device; {name} is {t.dtype} on {t.device}: convert it"
            )
    if weight.dim() != 2 or tuple(norm_weight.shape) != (weight.shape[1],):
        raise UnsupportedProblem(
            f"norm_weight must be (K,) and weight (N, K); their shapes are {tuple(norm_weight.shape)} and "
            f"{tuple(weight.shape)}"
        )
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) * norm_weight.to(wide)).to(weight.dtype)


_FOLDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# ---- which way ------------------------------------------------------------------------------------------


def _as_chain(config: NormLinearConfig | str | None, x: Tensor, *others: Tensor | None) -> bool:
    """Whether a call takes the chain: too many tokens for a norm within the product, or gradients."""
    return _differentiates(x, *others) or (config is None and math.prod(x.shape[:-1]) > MOST_TOKENS)


def _differentiates(*operands: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)


def _check_tensors(op: str, *, optional: bool = False, **tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None or not optional:
            check_tensor(op, name, t)


def _uncast(x: Tensor, out: Tensor | None) -> AbstractContextManager[object]:
    """The chain's types are those of its operands where it writes to ``out``, under autocast too."""
    return nullcontext() if out is None or not autocasting() else torch.autocast(x.device.type, enabled=False)


# ---- torch.library --------------------------------------------------------------------------------------


def _norm_then_linear(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None, rstd: Tensor | None,
    activation: str, eps: float, config: str | None = None,
) -> Tensor:  # fmt: skip
    return norm_then_linear(x, norm_weight, weight, bias, rstd, eps, None if activation == "none" else activation)[0]


def _linear_then_gate(
    x: Tensor, w_gate_up: Tensor, norm_weight: Tensor | None, norm: bool, eps: float, config: str | None = None
) -> Tensor:
    return linear_then_gate(x, w_gate_up, norm_weight, eps, norm)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors = [t if isinstance(t, Tensor) else None for t in inputs]
    ctx.save_for_backward(*tensors)
    ctx.others = [None if isinstance(t, Tensor) else t for t in inputs]


def _gradient(name: str, chain: Any) -> Any:
    """The backward of the op called ``name``, with the arguments and the result of ``chain``."""

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # for a second derivative, within vmap: elsewhere the chain itself is recorded
            raise UnsupportedProblem(f"{name} within vmap is differentiable once: call its parts one after the other")
        wanted = [*ctx.needs_input_grad, *[False] * len(ctx.others)][: len(ctx.others)]  # no entry for omitted defaults
        if transformed():
            return _within_transform(chain, ctx, wanted, dy)
        leaves = [
            None if t is None else t.detach().requires_grad_(w) for t, w in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            y = chain(*[other if t is None else t for t, other in zip(leaves, ctx.others, strict=True)])
        sources = [t for t, w in zip(leaves, wanted, strict=True) if t is not None and w]
        grads = iter(torch.autograd.grad(y, sources, dy))
        return tuple([next(grads) if w else None for w in wanted])

    return backward


def _within_transform(chain: Any, ctx: Any, wanted: list[bool], dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients by ``torch.func.vjp``, which transforms take; autograd's own way they refuse."""
    args = [other if t is None else t for t, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
    places = [i for i, want in enumerate(wanted) if want]

    def of(*leaves: Tensor) -> Tensor:
        given = dict(zip(places, leaves, strict=True))
        return chain(*[given.get(i, arg) for i, arg in enumerate(args)])  # type: ignore[no-any-return]

    pull: Any = torch.func.vjp(of, *[args[i] for i in places])[1]
    grads = iter(pull(dy))
    return tuple([next(grads) if want else None for want in wanted])


# The backward of both recomputes the chain and differentiates it.
for op, chain, kept in (
    (RMS_NORM_LINEAR, _norm_then_linear, ("norm_weight", "rstd")),
    (LINEAR_SILU_MUL, _linear_then_gate, ("norm_weight",)),
):
    register(
        op,
        gradient=_gradient(op.name, chain),
        remember=_remember,
        autocast="lower",
        kept=[op.inputs.index(name) for name in kept],
    )
