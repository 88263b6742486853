"""Parts of products' gradients: through what stands behind a product, and the sums that biases get."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import TABLE
from cutekernels.ops.products.epilogue import ALPHA, CLAMPED, LIMIT
from cutekernels.ops.products.schedules.problem import GATED


def before_activation(
    grad: Tensor,
    value: Tensor | None,
    activation: str,
    z: Callable[[], Tensor],
    alpha: float = ALPHA,
    limit: float = LIMIT,
) -> Tensor:
    """The gradient of a product ``z`` from that of ``activation``, whose ``value`` is read where that serves.

    ``z``, which a fused forward never stored, is computed again. ``alpha``, ``limit``: of CLAMPED.
    """
    if activation == "none":
        return grad
    if reads_value(activation):
        assert value is not None
        return through_activation(grad, value, activation)
    if activation == GATED:
        from cutekernels.ops.activations.api import JOINED_BACKWARD

        return JOINED_BACKWARD["silu_mul"](grad, z(), None)  # type: ignore[no-any-return]
    if activation == CLAMPED:
        return _through_clamped(grad, z(), alpha, limit)
    return through_activation(grad, z(), activation)


def saved_for(activation: str, first: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """Operands of :func:`before_activation`: the activation's value, or ``first`` and the bias to form ``z`` again."""
    return (value, None) if reads_value(activation) else (None, None) if activation == "none" else (first, bias)


def through_activation(grad: Tensor, z: Tensor, activation: str) -> Tensor:
    """``grad`` times the slope of the activation at ``z``, or where its value serves, of that value."""
    return _gradient(activation)(grad, z)


def reads_value(activation: str) -> bool:
    """Whether the gradient reads what the activation gave, so that ``z`` is not computed again; of a gate never.

    Raises:
        UnsupportedProblem: the activation has no gradient.
    """
    if activation not in TABLE:
        return False
    _gradient(activation)
    return TABLE[activation].of_value


def _gradient(activation: str) -> Callable[[Tensor, Tensor], Tensor]:
    gradient = TABLE[activation].gradient
    if gradient is None:
        raise UnsupportedProblem(
            f"activation={activation!r} has no gradient: call under torch.no_grad(), apply it to the product yourself, "
            "or give its row in cutekernels/kernels/activations.py one"
        )
    return gradient


def _through_clamped(dout: Tensor, z: Tensor, alpha: float, limit: float) -> Tensor:
    """The gradient of gpt-oss's gate, which clamps stop."""
    wide = torch.promote_types(z.dtype, torch.float32)
    gate, up = z.to(wide).chunk(2, dim=-1)
    g, u, d = gate.clamp(max=limit), up.clamp(-limit, limit), dout.to(wide)
    s = torch.sigmoid(alpha * g)
    dgate = d * (u + 1) * (s + alpha * g * s * (1 - s)) * (gate <= limit)
    dup = d * g * s * (up.abs() <= limit)
    return torch.cat((dgate, dup), dim=-1).to(z.dtype)


def column_sums(dz: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over all dimensions but the last, in fp32 or better, rounded once."""
    return dz.sum(tuple(range(dz.dim() - 1)), dtype=dtype)  # torch accumulates halves in fp32
