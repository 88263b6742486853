"""``silu_mul``, ``gelu_mul`` and ``bias_gelu``: the public functions, and their registration with torch.

Gate and up may be the halves of one joined tensor: then autograd sees one operand and gets one gradient, whose halves
the same kernels write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.activations.op import (
    BIAS_GELU,
    BIAS_GELU_BACKWARD,
    GELU_MUL,
    GELU_MUL_BACKWARD,
    SILU_MUL,
    SILU_MUL_BACKWARD,
    Gated,
    TileConfig,
)
from cutekernels.ops.shared.calls import call, define, plan_call, refuse_others, register, run, text_of
from cutekernels.ops.shared.paths import PLAIN, Call, CallCache, Path, direct, is_grad_enabled, refuse_gradient

# ---- the functions --------------------------------------------------------------------------------------


def silu_mul(
    gate: Tensor, up: Tensor | None = None, *, out: Tensor | None = None, config: TileConfig | str | None = None
) -> Tensor:
    """``out = silu(gate) * up`` with ``silu(x) = x / (1 + exp(-x))``: in fp32, rounded once.

    Args:
        gate: ``(..., N)``, fp16, bf16 or fp32 (on the CPU fp64 too). Any strides: operands whose rows are
            contiguous are fast, the two halves of a joint projection included. Leading dimensions that no
            single stride walks (say, a transposed batch) cost a contiguous copy of that operand.
        up: shape, dtype and device of ``gate``; nothing is broadcast or cast. Without it ``gate`` is joined,
            ``(..., 2N)``: its first half is the gate, its second half is up, and its gradient is one tensor.
        out: where to write: shape, dtype and device of ``gate`` (of a half), any strides. It may be ``gate`` or
            ``up`` itself, element upon element; any other overlap is refused. Not differentiable.
        config: overrides the tuned choice, as a :class:`TileConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., N)``, contiguous, or ``out``. Differentiable in ``gate`` and ``up``, once.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched shapes, dtypes or devices, a joined tensor of odd
            width, an ``out`` that overlaps an input or itself, ``out`` together with gradients.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    return _gate(SILU_MUL, gate, up, (), out, config)


def gelu_mul(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    approximate: Literal["none", "tanh"] = "none",
    out: Tensor | None = None,
    config: TileConfig | str | None = None,
) -> Tensor:
    """``out = gelu(gate) * up`` in fp32, rounded once; ``gelu(x)`` is ``x`` times the normal distribution function.

    Args:
        gate: as :func:`silu_mul` takes it, joined where ``up`` is left out.
        up: shape, dtype and device of ``gate``.
        approximate: ``"none"``, or ``"tanh"`` for ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))``.
        out: where to write, as in :func:`silu_mul`.
        config: overrides the tuned choice, as a :class:`TileConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., N)``, contiguous, or ``out``. Differentiable in ``gate`` and ``up``, once.

    Raises:
        UnsupportedProblem: as :func:`silu_mul` raises it; another ``approximate``.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    return _gate(GELU_MUL, gate, up, (approximate,), out, config)


def bias_gelu(
    x: Tensor,
    bias: Tensor,
    *,
    approximate: Literal["none", "tanh"] = "none",
    out: Tensor | None = None,
    config: TileConfig | str | None = None,
) -> Tensor:
    """``out = gelu(x + bias)`` in fp32, rounded once; ``gelu(z)`` is ``z`` times the normal distribution function.

    Args:
        x: ``(..., N)``, fp16, bf16 or fp32 (on the CPU fp64 too). Any strides; contiguous rows are fastest, and N
            a multiple of 16 bytes. Leading dimensions that no single stride walks cost a contiguous copy.
        bias: ``(N,)``, dtype of ``x`` or fp32, any stride.
        approximate: ``"none"``, or ``"tanh"`` as :func:`gelu_mul` takes it.
        out: where to write: shape, dtype and device of ``x``, any strides. It may be ``x`` itself, element upon
            element; any other overlap is refused. Not differentiable.
        config: overrides the tuned choice, as a :class:`TileConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., N)``, contiguous, or ``out``. Differentiable in ``x`` and ``bias``, once; the gradient of ``bias`` is
        summed in fp32, in the same order each time.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched shapes, dtypes or devices, another ``approximate``,
            an ``out`` that overlaps an input or itself, ``out`` together with gradients.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    results = None if out is None else (out,)
    return call(BIAS_GELU, (x, bias), (approximate,), config=config, out=results)[0]


def _gate(
    op: Gated[Any],
    gate: Tensor,
    up: Tensor | None,
    options: tuple[str, ...],
    out: Tensor | None,
    config: TileConfig | str | None,
) -> Tensor:
    """``op`` of two tensors, or of the halves of one."""
    if up is None:
        if out is None and type(gate) in PLAIN:
            path, calls = JOINED[op.name]
            differentiated = path.differentiated if is_grad_enabled() and gate.requires_grad else None
            made = calls.replay(None, (gate,), options, (), config, differentiated)
            if made is not None:
                return made[0]
        refuse_others(op, (gate, gate), None, options)
        if out is None:
            return JOINED[op.name][0](gate, *options, text_of(config, op.Config))  # type: ignore[no-any-return]
        refuse_gradient(gate)
        gate, up = _halves(op.name, gate)
    elif isinstance(gate, Tensor) and isinstance(up, Tensor) and not gate.dim():  # one element is a row of one
        row = _gate(op, gate[None], up[None], options, None if out is None else out[None], config)
        return row[0] if out is None else out
    return call(op, (gate, up), options, config=config, out=None if out is None else (out,))[0]


def _halves(name: str, joined: Tensor) -> tuple[Tensor, Tensor]:
    if joined.dim() == 0 or joined.shape[-1] % 2:
        raise UnsupportedProblem(
            f"{name} of one tensor takes (..., 2N), gate and up side by side; got {tuple(joined.shape)}: "
            "pass up too, or an even width"
        )
    n = joined.shape[-1] // 2
    return joined.narrow(-1, 0, n), joined.narrow(-1, n, n)


# ---- torch.library --------------------------------------------------------------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors = [t for t in inputs if isinstance(t, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.options = inputs[len(tensors) : -1]


def _gradient(path: Path) -> Callable[..., tuple[Any, ...]]:
    """The gradient as ``path`` of dout and the remembered inputs computes it."""

    def gradient(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        found = path(dout, *ctx.saved_tensors, *ctx.options, None)
        return (*(found if isinstance(found, tuple | list) else (found,)), *[None] * len(ctx.options), None)

    return gradient


def _bias_gelu_gradient(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    x, bias = ctx.saved_tensors
    dx, partials = BIAS_GELU_BACKWARD.path(dout, x, bias, *ctx.options, None)
    dbias = partials.sum(dim=0).to(bias.dtype) if ctx.needs_input_grad[1] else None
    return dx, dbias, None, None


JOINED: dict[str, tuple[Path, CallCache]] = {}
"""Paths of one tensor that holds gate and up, by name of the op, each with its cache of calls."""
JOINED_BACKWARD: dict[str, Path] = {}


def _replay(
    calls: CallCache,
    op: Gated[Any],
    halved: tuple[bool, ...],
    general: Callable[..., Tensor],
    empty: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """``general(*tensors, *options, config)`` on a GPU, where a call like one before is one launch by addresses.

    ``op`` is called with the halves of those of (result, *tensors) that are ``halved``. ``empty(*tensors)``: memory for
    the result.
    """
    n, options = len(halved) - 1, len(op.options)

    def parts(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        pairs = zip(tensors, halved, strict=True)
        return tuple([half for t, halves in pairs for half in (_halves(op.name, t) if halves else (t,))])

    def first(tensors: tuple[Tensor, ...], chosen: tuple[str, ...]) -> Tensor:
        out = empty(*tensors)
        places = parts((out, *tensors))
        call = plan_call(op, places[len(op.results) :], places[: len(op.results)], chosen)
        if call.launch is None:
            return out
        launched, fire, ends = call.launch, call.fire, []
        for i, t in enumerate((out, *tensors)):
            ends += [(i, 0), (i, t.shape[-1] // 2 * t.element_size())] if halved[i] else [(i, 0)]

        def by_addresses(addresses: list[int], scalars: tuple[Any, ...]) -> None:
            fire([addresses[i] + offset for i, offset in ends], scalars)  # type: ignore[misc]

        own = Call.of(
            lambda *given: launched(*parts(given)), tensors, (out,), (), None if fire is None else by_addresses
        )
        return calls.add(own, (None, tensors, chosen, (), None))[0]

    def launch(*args: Any) -> Tensor:
        tensors, chosen = args[:n], args[n : n + options]
        made = calls.replay(None, tensors, chosen) or calls.recall((None, tensors, chosen, (), None))
        if made is not None:
            return made[0]
        if len(chosen) < options or args[n + options :] not in ((), (None,)) or any(t.is_neg() for t in tensors):
            return general(*args)
        return first(tensors, chosen)

    return launch


def _register_joined(op: Gated[Any], backward: Gated[Any]) -> None:
    """Defines ``<op>_packed`` and ``<op>_packed_backward``: one tensor, one gradient, by the launches of the halves."""
    options = len(op.options)  # behind them config, which torch leaves out where it is None

    def forward(joined: Tensor, *rest: Any) -> Tensor:
        return op.path(*_halves(op.name, joined), *(*rest, None)[: options + 1])  # type: ignore[no-any-return]

    def gradient(dout: Tensor, joined: Tensor, *rest: Any) -> Tensor:
        gate, up = _halves(op.name, joined)
        djoined = joined.new_empty(joined.shape)
        places = _halves(op.name, djoined)
        if direct(dout, joined):
            run(backward, places, (dout, gate, up), options=rest[:options])
        else:
            getattr(torch.ops.cutekernels, f"{backward.name}_out")(dout, gate, up, *places, *rest[:options])
        return djoined

    words = "".join(f", str {option}" for option in op.options)
    schema = f"{op.name}_packed_backward(Tensor dout, Tensor packed{words}, str? config=None) -> Tensor"
    on_gpu = _replay(
        CallCache(), backward, (True, False, True), gradient, lambda dout, joined: joined.new_empty(joined.shape)
    )
    JOINED_BACKWARD[op.name] = Path(schema, (on_gpu, gradient), define(f"_{schema}", on_gpu, gradient, gradient))
    schema = f"{op.name}_packed(Tensor packed{words}, str? config=None) -> Tensor"
    calls = CallCache()
    on_gpu = _replay(
        calls, op, (False, True), forward, lambda joined: joined.new_empty(_halves(op.name, joined)[0].shape)
    )
    own, gradient_of = define(f"_{schema}", on_gpu, forward, forward), _gradient(JOINED_BACKWARD[op.name])
    JOINED[op.name] = Path(schema, (on_gpu, forward), own, remember=_remember, gradient=gradient_of), calls


for op, backward in ((SILU_MUL, SILU_MUL_BACKWARD), (GELU_MUL, GELU_MUL_BACKWARD)):
    register(backward)
    register(op, gradient=_gradient(backward.path), remember=_remember)
    _register_joined(op, backward)
register(BIAS_GELU, gradient=_bias_gelu_gradient, remember=_remember)
register(BIAS_GELU_BACKWARD)
