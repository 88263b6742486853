"""The experts of a mixture, packed: what an :class:`cutekernels.nn.MoE` holds in the place of its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.nn import quantized
from cutekernels.ops.shared.checks import quote
from cutekernels.quant import QuantizedStack, QuantizedWeight

_NAMES = ("gate_up_proj", "down_proj")


class PackedExperts(torch.nn.Module):
    """``gate_up_proj`` ``(E, 2 * I, H)`` and ``down_proj`` ``(E, H, I)``, packed, without gradients.

    They move with the module. State dicts have them in this package's own format (``gate_up_proj.weight.packed``, ...),
    whatever checkpoint they came from, and take them back.
    """

    def __init__(self, gate_up: QuantizedStack, down: QuantizedStack) -> None:
        super().__init__()
        for name, stack in zip(_NAMES, (gate_up, down), strict=True):
            if not isinstance(stack, QuantizedStack):
                raise UnsupportedProblem(
                    f"packed experts have {name} as a QuantizedStack; got {quote(stack)}: use cutekernels.quant.stack"
                )
        (experts, rows, hidden), fits = gate_up.shape, gate_up.shape[1] % 2 == 0
        if not fits or down.shape != (experts, hidden, rows // 2):
            raise UnsupportedProblem(
                f"packed experts have gate_up_proj (E, 2 * I, H) and down_proj (E, H, I); got {gate_up.shape} and "
                f"{down.shape}: pass stacks of one mixture"
            )
        self.gate_up_proj, self.down_proj = gate_up, down

    def extra_repr(self) -> str:
        return f"{self.gate_up_proj}, {self.down_proj}"

    def _own(self, name: str) -> QuantizedWeight:
        weight: QuantizedWeight = getattr(self, name).weight
        return dataclasses.replace(weight, format="cutekernels", details={})

    def _put(self, name: str, weight: QuantizedWeight) -> None:
        setattr(self, name, QuantizedStack(weight, getattr(self, name).experts))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedExperts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in _NAMES:
            self._put(name, quantized.applied(getattr(self, name).weight, fn))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in _NAMES:
            quantized.save(self._own(name), destination, f"{prefix}{name}.")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *how: Any) -> None:
        metadata, strict, missing_keys, _, error_msgs = how
        assign = bool(metadata.get("assign_to_params_buffers", False))
        for name in _NAMES:
            own = f"{prefix}{name}."
            found = quantized.loaded(self._own(name), state_dict, own, assign, strict, missing_keys, error_msgs)
            if found is not None:
                self._put(name, found)
        super()._load_from_state_dict(state_dict, prefix, *how)
