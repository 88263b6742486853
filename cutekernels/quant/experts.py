"""``QuantizedStack``: the weights of a mixture's experts, as one packed weight of all their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.quant import layout
from cutekernels.quant.join import concatenate, kind
from cutekernels.quant.weight import QuantizedWeight


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class QuantizedStack:
    """``(E, N, K)``: expert e has rows ``e * N`` to ``(e + 1) * N`` of ``weight``; 64 divides N, 128 in blocks.

    Attributes:
        weight: all rows, of shape ``(E * N, K)``.
        experts: E.

    Raises:
        UnsupportedProblem: rows that are not whole tiles of each expert, act-order, offsets of torchao.
    """

    weight: QuantizedWeight
    experts: int

    def __post_init__(self) -> None:
        rows, unit = self.weight.shape[0], max(layout.TILE, self.weight.scale_rows)
        if self.experts < 1 or rows % self.experts or rows // max(1, self.experts) % unit:
            raise UnsupportedProblem(
                f"each expert of a stack has a multiple of {unit} rows; {rows} rows of {self.experts} experts do not: "
                "pad each expert's rows, or dequantize()"
            )
        if self.weight.order is not None or self.weight.offsets is not None:
            what = "GPTQ's act-order" if self.weight.order is not None else "torchao's offsets"
            raise UnsupportedProblem(
                f"experts have one order of K and no offsets, and these have {what}; quantize their dequantize() anew "
                'with cutekernels.quant.quantize(weight, "int4_g128")'
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(E, N, K)``."""
        return self.experts, self.weight.shape[0] // self.experts, self.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The tensors that :meth:`dequantize` returns."""
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        """The memory of all tensors that a product reads."""
        return self.weight.nbytes

    def __repr__(self) -> str:
        e, n, k = self.shape
        return f"QuantizedStack({e} experts of {n} x {k}: {self.weight})"

    def to(self, *args: Any, **options: Any) -> QuantizedStack:
        """See :meth:`QuantizedWeight.to`."""
        return QuantizedStack(self.weight.to(*args, **options), self.experts)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights of the checkpoint, ``(E, N, K)``: as :meth:`QuantizedWeight.dequantize`."""
        return self.weight.dequantize(dtype).view(self.shape)


@torch.no_grad()
def stack(weights: Sequence[QuantizedWeight], *, details: Mapping[str, Any] | None = None) -> QuantizedStack:
    """The experts' weights in one stack, copied.

    Args:
        weights: of one shape and quantized alike.
        details: of a reader that writes the stack back; the weights then keep their format.

    Raises:
        UnsupportedProblem: none, weights that differ, and what :class:`QuantizedStack` refuses.
    """
    if not isinstance(weights, Sequence) or not all(isinstance(w, QuantizedWeight) for w in weights):
        raise UnsupportedProblem(
            f"stack takes a list of QuantizedWeight, one for each expert; got {type(weights).__name__}: quantize() "
            "each expert's matrix"
        )
    if not weights:
        raise UnsupportedProblem("a stack has an expert at least, and got none; pass their weights")
    first = weights[0]
    odd = next((i for i, w in enumerate(weights) if w.shape != first.shape or kind(w) != kind(first)), None)
    if odd is not None:
        raise UnsupportedProblem(
            f"experts of a stack are of one shape and quantized alike; number {odd} is {weights[odd]}, and number 0 is "
            f"{first}: quantize them alike"
        )
    unit = max(layout.TILE, first.scale_rows)
    if first.shape[0] % unit:
        raise UnsupportedProblem(
            f"experts of a stack have multiples of {unit} rows{' in blocks' if unit > layout.TILE else ''}, and these "
            f"have {first.shape[0]}: pad each expert's rows, or dequantize()"
        )
    joined = concatenate(weights)
    if joined is None:
        raise UnsupportedProblem(
            "experts of a stack have one order of K, and these have several (GPTQ's act-order); quantize their "
            'dequantize() anew with cutekernels.quant.quantize(weight, "int4_g128")'
        )
    if details is not None:
        joined = replace(joined, format=first.format, details={**details, "experts": len(weights)})
    return QuantizedStack(joined, len(weights))
