"""Norms of a transformer layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.norms.api import add_rms_norm, layer_norm, rms_norm
from cutekernels.ops.shared.checks import (
    check_eps,
    check_flag,
    check_number,
    check_place,
    check_tensor,
    check_whole,
    quote,
)


class RMSNorm(torch.nn.Module):
    """:func:`cutekernels.rms_norm` with its weight; given a residual, :func:`cutekernels.add_rms_norm`.

    Takes the arguments of Hugging Face's ``LlamaRMSNorm`` and of ``torch.nn.RMSNorm``; its state dict is theirs,
    ``weight``, and so are its attributes: ``variance_epsilon`` and ``eps``, ``normalized_shape``. ``eps`` defaults to
    Hugging Face's.

    Args:
        hidden_size: length of a row, or a shape of one dimension (a tuple, a list, ``x.shape[-1:]``).
        eps: added to the mean of squares; None for torch's default, that of the type it computes in:
            ``torch.finfo(torch.float32).eps``, for fp64 its own.
        elementwise_affine: whether there is a weight.
        device: of the weight.
        dtype: of the weight.
        normalized_shape: torch's name for ``hidden_size``.
        heads: how many rows of weights, for inputs of ``(..., heads, hidden_size)``; None for one that all share.
        weight_offset: what is added to the weight: 1.0 for Gemma's.
        rounding: ``"once"``, or ``"huggingface"`` to round where ``LlamaRMSNorm`` does.

    Shape: ``(..., hidden_size)`` to the same, or to a pair of the same. Differentiable in the inputs and the
    weight, once.
    """

    weight: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int | Sequence[int] | None = None,
        eps: float | None = 1e-6,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        normalized_shape: int | Sequence[int] | None = None,
        heads: int | None = None,
        weight_offset: float = 0.0,
        rounding: Literal["once", "huggingface"] = "once",
    ) -> None:
        super().__init__()
        size = _row(hidden_size, normalized_shape)
        if heads is not None:
            check_whole("RMSNorm", "heads", heads, 1, 2**31 - 1)
        if eps is not None:
            check_eps("RMSNorm", eps)
        check_number("RMSNorm", "weight_offset", weight_offset)
        check_flag("RMSNorm", "elementwise_affine", elementwise_affine)
        if rounding not in ("once", "huggingface"):
            raise UnsupportedProblem(
                f"RMSNorm takes rounding as 'once' or 'huggingface'; got {quote(rounding)}: pass one"
            )
        check_place(dtype, device, optional=True)
        self.normalized_shape = (size,)
        self.variance_epsilon = eps
        self.weight_offset = weight_offset
        self.rounding = rounding
        shape = (size,) if heads is None else (heads, size)
        weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.reset_parameters()

    @property
    def eps(self) -> float | None:
        return self.variance_epsilon

    def reset_parameters(self) -> None:
        """Sets the weight so that, with its offset, it is one."""
        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of ``x``; with a residual, ``(norm of the sum, the sum)``."""
        eps = self.variance_epsilon
        if eps is None:
            check_tensor("RMSNorm", "x", x)
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        if residual is None:
            return rms_norm(
                x,
                self.weight,
                eps=eps,
                weight_offset=self.weight_offset,
                rounding=self.rounding,
            )
        return add_rms_norm(
            x,
            residual,
            self.weight,
            eps=eps,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
        )

    def extra_repr(self) -> str:
        shape = self.normalized_shape if self.weight is None else tuple(self.weight.shape)
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{shape}, eps={self.variance_epsilon}{offset}, elementwise_affine={self.weight is not None}"


def _row(hidden_size: object, normalized_shape: object) -> int:
    """The length of a row, which has two names; a shape of one dimension is one."""
    if (hidden_size is None) == (normalized_shape is None):
        raise UnsupportedProblem(
            f"RMSNorm takes either hidden_size or normalized_shape; got {quote(hidden_size)} and "
            f"{quote(normalized_shape)}: pass one"
        )
    name, size = ("hidden_size", hidden_size) if normalized_shape is None else ("normalized_shape", normalized_shape)
    if isinstance(size, tuple | list):
        if len(size) != 1:
            raise UnsupportedProblem(
                f"RMSNorm takes {name} as the length of the last dimension; got {quote(size)}: flatten what is "
                "normalized into one dimension"
            )
        (size,) = size
    check_whole("RMSNorm", name, size, 1, 2**31 - 1)
    return size  # type: ignore[return-value]


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` over :func:`cutekernels.layer_norm`: the same arguments, attributes and state dict.

    Shape: ``(..., *normalized_shape)`` to the same. Differentiable in the input and the parameters, once.
    """

    def forward(self, x: Tensor) -> Tensor:
        check_tensor("LayerNorm", "x", x)
        weight, bias = (None if t is None else t.flatten() for t in (self.weight, self.bias))
        if x.shape[max(0, x.dim() - len(self.normalized_shape)) :] != self.normalized_shape:
            raise UnsupportedProblem(
                f"the last dimensions must be {self.normalized_shape}; the input is {tuple(x.shape)}: make a "
                "LayerNorm of its shape, or move what is normalized to the end"
            )
        rows = x if len(self.normalized_shape) == 1 else x.flatten(-len(self.normalized_shape))
        return layer_norm(rows, weight, bias, eps=self.eps).view(x.shape)
