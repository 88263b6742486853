"""The last layer of a language model and its loss, as one module."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cutekernels.ops.loss.cross_entropy import linear_cross_entropy
from cutekernels.ops.shared.checks import check_flag, check_place, check_whole


class LinearCrossEntropy(torch.nn.Linear):
    """:func:`cutekernels.linear_cross_entropy` with its weight: ``module(x, targets)`` is the loss.

    A ``torch.nn.Linear`` in all else, state dict included; ``module.logits(x)`` are its logits.

    Args:
        in_features: K.
        out_features: V, the number of classes.
        bias: whether there is one.
        device: of the parameters.
        dtype: of the parameters.
        reduction, ignore_index, label_smoothing, z_loss, softcap, temperature, accumulate: as the function takes them.

    Shape: ``(..., in_features)`` and targets ``(...)`` to a scalar, or with ``reduction="none"`` to ``(...)``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        reduction: Literal["mean", "sum", "none"] = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        temperature: float = 1.0,
        accumulate: torch.dtype | None = None,
    ) -> None:
        check_whole("LinearCrossEntropy", "in_features", in_features, 1, 2**31 - 1)
        check_whole("LinearCrossEntropy", "out_features", out_features, 1, 2**31 - 1)
        check_flag("LinearCrossEntropy", "bias", bias)
        check_place(dtype, device, optional=True)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.reduction: Literal["mean", "sum", "none"] = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.temperature = temperature
        self.accumulate = accumulate

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        targets: Tensor,
        *,
        class_weight: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Tensor:
        """The loss of ``x`` with respect to ``targets``."""
        return linear_cross_entropy(
            x,
            self.weight,
            targets,
            self.bias,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            temperature=self.temperature,
            class_weight=class_weight,
            num_items_in_batch=num_items_in_batch,
            accumulate=self.accumulate,
        )

    def logits(self, x: Tensor) -> Tensor:
        """``softcap(x @ weight.T + bias) / temperature``, as a whole."""
        z = torch.nn.functional.linear(x, self.weight, self.bias)
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z / self.temperature
