"""Launches by addresses and numbers alone, for a GEMM without C, batch or workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cutekernels import torch_names

if TYPE_CHECKING:
    from cutekernels.ops.shared.paths import Fire

current_stream = torch_names.current_stream


class AddressedLaunch:
    """``launch(out, a, b, c, bias, alpha, beta)`` over ``kernel(out, a, b, bias, *numbers, alpha, beta, stream)``.

    The kernel takes addresses, None where there is no bias, and the current stream's handle.
    """

    __slots__ = ("_along", "kernel")

    def __init__(self, kernel: Callable[..., Any], along: tuple[int, int, int]) -> None:
        self.kernel = kernel
        self._along = along

    def numbers(self, out: Tensor, a: Tensor, b: Tensor) -> tuple[int, ...]:
        """m, n, k and the pitches of out, a and b, which follow from shapes and strides."""
        pitches = [
            t.stride(1 - along) if t.shape[1 - along] > 1 else 0  # the stride of a lone row may be anything
            for t, along in zip((out, a, b), self._along, strict=True)
        ]
        return (*out.shape, a.shape[1], *pitches)

    def settle(self, out: Tensor, a: Tensor, b: Tensor, biased: bool) -> Fire:
        """The launch by addresses, for operands that lie as these do: of out, a and b, or of these, C and a bias."""
        kernel, device = self.kernel, out.get_device()
        m, n, k, pitch_out, pitch_a, pitch_b = self.numbers(out, a, b)

        def fire_biased(addresses: list[int], scalars: tuple[Any, ...]) -> None:
            at, at_a, at_b, _, at_bias = addresses
            alpha, beta = scalars
            stream = current_stream(device)
            kernel(at, at_a, at_b, at_bias, m, n, k, pitch_out, pitch_a, pitch_b, alpha, beta, stream)

        def fire(addresses: list[int], scalars: tuple[Any, ...]) -> None:
            at, at_a, at_b = addresses
            alpha, beta = scalars
            kernel(at, at_a, at_b, None, m, n, k, pitch_out, pitch_a, pitch_b, alpha, beta, current_stream(device))

        return fire_biased if biased else fire

    def __call__(
        self, out: Tensor, a: Tensor, b: Tensor, c: None, bias: Tensor | None, alpha: float, beta: float
    ) -> None:
        stream = current_stream(out.get_device())
        addresses = [None if t is None else t.data_ptr() for t in (out, a, b, bias)]
        self.kernel(*addresses, *self.numbers(out, a, b), alpha, beta, stream)
