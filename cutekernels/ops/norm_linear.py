"""``rms_norm_linear`` and ``linear_silu_mul``: the public functions around the projections of a transformer block.

Up to 128 tokens both are ops of their own (``products/norm.py``), and the tuner times one kernel against a chain of the
ops they are made of. Beyond, with a residual, with ``exact``, with a packed weight and where gradients are wanted, they
are that chain, which keeps what a gradient needs. On a GPU ``linear_silu_mul`` is an op of its own beyond too, behind
the norm's.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import Activation
from cutekernels.ops.activations.api import silu_mul
from cutekernels.ops.linear import linear
from cutekernels.ops.norms.api import add_rms_norm, rms_norm
from cutekernels.ops.products.chain import normalise
from cutekernels.ops.products.fused import NormLinearConfig
from cutekernels.ops.products.norm import LINEAR_SILU_MUL, RMS_NORM_LINEAR
from cutekernels.ops.products.schedules.problem import MOST_TOKENS
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
    _check_operands("rms_norm_linear", eps, x, weight, "weight", norm_weight, bias, residual, rstd)
    check_word("rms_norm_linear", "activation", activation, optional=True)
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
                x, norm_weight, weight, bias, rstd, activation, eps, residual=residual, exact=exact, out=out
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
            :class:`~cutekernels.quant.QuantizedWeight`, without gradient.
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
    _check_operands("linear_silu_mul", eps, x, w_gate_up, "w_gate_up", norm_weight)
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
        from cutekernels.ops.products.packed_api import gated

        if config is not None:
            raise UnsupportedProblem("config= is for one kernel; with a packed weight several run: leave it out")
        check_tensor("linear_silu_mul", "out", out, optional=True)
        with _uncast(x, out):
            if not _differentiates(x, norm_weight):
                if norm:
                    x, norm_weight, norm = rms_norm(x, norm_weight, eps=eps), None, False
                made = gated(x, w_gate_up, out=out)
                if made is not None:
                    return made
            return linear_then_gate(x, w_gate_up, norm_weight, norm, eps, out=out)
    if _as_chain(config, x, norm_weight, w_gate_up):
        with _uncast(x, out):
            if not x.is_cuda or _differentiates(x, norm_weight, w_gate_up):
                return linear_then_gate(x, w_gate_up, norm_weight, norm, eps, out=out)
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
    named = {"norm_weight": norm_weight, "weight": weight}
    for name, t in named.items():
        check_tensor("fold", name, t)
    for name, t in named.items():
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


# ---- the chain of ops ------------------------------------------------------------------------------------


def norm_then_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    rstd: Tensor | None,
    activation: Activation | Literal["none"] | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    exact: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(y, u)``: the norm's kernel, which rounds its rows, then the product's."""
    if rstd is None and residual is not None:
        rounding: Literal["once", "huggingface"] = "huggingface" if exact else "once"
        h, u = add_rms_norm(x, residual, norm_weight, eps=eps, rounding=rounding)
    else:
        u = x if residual is None else _sum(x, residual)
        h = normalise(u, norm_weight, rstd, eps, exact)
    return linear(h, weight, bias, activation=None if activation == "none" else activation, out=out), u


def linear_then_gate(
    x: Tensor,
    w_gate_up: Tensor | QuantizedWeight,
    norm_weight: Tensor | None,
    norm: bool,
    eps: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The norm's kernel where there is a norm, one product for gate and up, rounded, then the gate's kernel."""
    h = rms_norm(x, norm_weight, eps=eps) if norm else x
    return silu_mul(linear(h, w_gate_up), out=out)


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    for what in ("shape", "dtype", "device"):
        if getattr(residual, what) != getattr(x, what):
            raise UnsupportedProblem(f"residual must have x's {what} {getattr(x, what)}; got {getattr(residual, what)}")
    return x + residual


# ---- which way ------------------------------------------------------------------------------------------


def _as_chain(config: NormLinearConfig | str | None, x: Tensor, *others: Tensor | None) -> bool:
    """Whether a call takes the chain: too many tokens for a norm within the product, or gradients."""
    return _differentiates(x, *others) or (config is None and math.prod(x.shape[:-1]) > MOST_TOKENS)


def _differentiates(*operands: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)


def _check_operands(op: str, eps: float, x: Tensor, weight: _Weight, weight_name: str, *others: Tensor | None) -> None:
    check_tensor(op, "x", x)
    if not isinstance(weight, QuantizedWeight):
        check_tensor(op, weight_name, weight)
    for i, t in enumerate(others):
        if t is not None:
            check_tensor(op, ("norm_weight", "bias", "residual", "rstd")[i], t)
    if type(eps) is not float or not 0.0 <= eps < INFINITE:
        check_eps(op, eps)


def _uncast(x: Tensor, out: Tensor | None) -> AbstractContextManager[object]:
    """The chain's types are those of its operands where it writes to ``out``, under autocast too."""
    return nullcontext() if out is None or not autocasting() else torch.autocast(x.device.type, enabled=False)


# ---- torch.library --------------------------------------------------------------------------------------


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
    (RMS_NORM_LINEAR, lambda *args: norm_then_linear(*args[:7])[0], ("norm_weight", "rstd")),  # without config
    (LINEAR_SILU_MUL, lambda *args: linear_then_gate(*args[:5]), ("norm_weight",)),
):
    register(
        op,
        gradient=_gradient(op.name, chain),
        remember=_remember,
        autocast="lower",
        kept=[op.inputs.index(name) for name in kept],
    )
