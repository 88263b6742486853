"""Gradients through the activations that products end with, as the table of activations has them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import TABLE


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
