"""The table of activations that products end with: what kernels compute, what torch does, and the gradient.

``kernel(f, x)`` is written over the operations of ``f``. ``cute/parts/epilogue.py`` has them for vectors of registers,
``tests/gemm/test_activations.py`` for tensors: so a CPU evaluates the arithmetic that kernels compile, which is held to
``torch``, as ``gradient`` is to autograd's of that. A number that two of them need is a constant of this file. Triton's
gates (``triton/activations.py``) have arithmetic of their own, held to the same rows in the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

SQRT_HALF = 0.7071067811865476
SQRT_2_OVER_PI = 0.7978845608028654
CUBIC = 0.044715  # of GELU by tanh

# ---- kernels: in fp32; NaN stays NaN --------------------------------------------------------------------


def identity(f: Any, x: Any) -> Any:
    return x


def relu(f: Any, x: Any) -> Any:
    return f.where(x < 0.0, f.full_like(x, 0.0), x)  # false for NaN, which passes through


def silu(f: Any, x: Any) -> Any:
    return x / (1.0 + f.exp(-x))


def silu_approx(f: Any, x: Any) -> Any:
    """By the approximate reciprocal, since a division is ten instructions, and a branch."""
    return x * f.reciprocal(1.0 + f.exp(-x))


def silu_precise(f: Any, x: Any) -> Any:
    """For results in fp32, by an exponential that reduces its argument first."""
    return x / (1.0 + f.precise_exp(-x))


def gelu(f: Any, x: Any) -> Any:
    return 0.5 * x * (1.0 + f.erf(x * SQRT_HALF))


def gelu_tanh(f: Any, x: Any) -> Any:
    return 0.5 * x * (1.0 + f.tanh(SQRT_2_OVER_PI * (x + CUBIC * x * x * x)))


def clamped_gate(f: Any, gate: Any, up: Any, alpha: Any, limit: Any) -> Any:
    """gpt-oss's SwiGLU: ``(up + 1) * gate * sigmoid(alpha * gate)``, gates clamped from above, up on both sides."""
    # Comparisons are false for NaN, which passes through.
    gate = f.where(gate > limit, f.full_like(gate, limit), gate)
    up = f.where(up > limit, f.full_like(up, limit), up)
    up = f.where(up < -limit, f.full_like(up, -limit), up)
    inverse = f.reciprocal(1.0 + f.exp(-alpha * gate))
    return (up + 1.0) * (gate * inverse)


# ---- torch ----------------------------------------------------------------------------------------------


def _torch(name: str, **options: Any) -> Callable[[Tensor], Tensor]:
    """``torch.nn.functional``'s function of that name, all of its options given."""

    def function(x: Tensor) -> Tensor:
        import torch.nn.functional as F

        return getattr(F, name)(x, **options)  # type: ignore[no-any-return]

    return function


# ---- gradients, in the type of their arguments ----------------------------------------------------------


def silu_slope(z: Tensor) -> Tensor:
    s = z.sigmoid()
    return s * (1 + z * (1 - s))


def gelu_slope(z: Tensor) -> Tensor:
    # erfc, since 1 + erf cancels left of 0.
    return 0.5 * (-z * math.sqrt(0.5)).erfc() + z * (-0.5 * z * z).exp() * (1 / math.sqrt(2 * math.pi))


def gelu_tanh_slope(z: Tensor) -> Tensor:
    inner = 2 * math.sqrt(2 / math.pi)
    s = (inner * (z + CUBIC * z * z * z)).sigmoid()
    return s + z * (s * (1 - s)) * inner * (1 + 3 * CUBIC * z * z)


def _by(slope: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The gradient through a slope, in fp32 or better, rounded once."""

    def gradient(grad: Tensor, z: Tensor) -> Tensor:
        import torch

        wide = torch.promote_types(z.dtype, torch.float32)
        return (grad.to(wide) * slope(z.to(wide))).to(grad.dtype)

    return gradient


def _relu_gradient(grad: Tensor, z: Tensor) -> Tensor:
    return grad.where(z > 0, grad.new_zeros(()))


# ---- the table ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One activation."""

    kernel: Callable[[Any, Any], Any]
    torch: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor] | None = None
    """``gradient(grad, z)``: ``grad`` times the slope at ``z``. None: calls that need it are refused."""
    of_value: bool = False
    """Whether ``gradient`` takes the activation's value as well as ``z``, which then is not computed again."""
    variants: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    """The same by other instructions, by the names that bodies call."""


TABLE: dict[str, Row] = {
    "none": Row(identity, lambda x: x, lambda grad, z: grad),
    "relu": Row(relu, _torch("relu"), _relu_gradient, of_value=True),
    "gelu": Row(gelu, _torch("gelu", approximate="none"), _by(gelu_slope)),
    "gelu_tanh": Row(gelu_tanh, _torch("gelu", approximate="tanh"), _by(gelu_tanh_slope)),
    "silu": Row(
        silu,
        _torch("silu"),
        _by(silu_slope),
        variants={"silu_approx": silu_approx, "silu_precise": silu_precise},
    ),
}
KERNELS = {name: row.kernel for name, row in TABLE.items()} | {
    name: kernel for row in TABLE.values() for name, kernel in row.variants.items()
}
"""What bodies compute, by name: of rows and of their variants."""


def activated(x: Tensor, activation: str) -> Tensor:
    """``activation`` of ``x``, by torch."""
    return TABLE[activation].torch(x)
