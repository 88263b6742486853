"""The model that a decoder reads, and whether its parameters still lie where they were read."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor

from cutekernels import torch_names
from cutekernels.errors import UnsupportedProblem
from cutekernels.models.weights import Weights, read
from cutekernels.nn.quantized import QuantizedLinear
from cutekernels.quant import QuantizedWeight

_BUFFERS = ("e_score_correction_bias", "layer_scalar")  # of transformers' modules, that weights are read from


class Source:
    """A model's weights, read anew where its parameters have been moved or replaced since.

    ``to``, ``load_state_dict(assign=True)``, ``p.data = ...``, a new ``Parameter`` or module, FSDP and adapters all do
    that. What was read holds the memory of each parameter, so nothing else can have come to one of their addresses.
    """

    def __init__(self, model: Any, positions: int) -> None:
        """``positions``: of the rotary tables."""
        self.model, self._positions = model, positions
        self.weights = self._read()

    def _read(self) -> Weights:
        found = read(self.model, self._positions)
        modules = [*self.model.modules()]
        self._children = [module._modules for module in modules if module._modules]
        self._children_then = [dict(children) for children in self._children]
        held = [(owner, name) for owner in (module._parameters for module in modules) for name in owner]
        # A quantized weight is no parameter, and frozen: where it moves, another one is in its place.
        held += [(own, "weight") for own in map(vars, modules) if isinstance(own.get("weight"), QuantizedWeight)]
        packed = [m for m in modules if isinstance(m, QuantizedLinear)]
        held += [(module._buffers, name) for module in packed for name in module._buffers]
        held += [(vars(module), "_whole") for module in packed]  # another one where a state dict was loaded in place
        held += [(own, name) for own in (m._buffers for m in modules) for name in _BUFFERS if name in own]
        self._owners, self._names = [owner for owner, _ in held], [name for _, name in held]
        self._held = [owner[name] for owner, name in held]  # None where there is no bias
        self._parameters = [p for p in self._held if isinstance(p, Tensor)]
        self._addresses = [*map(Tensor.data_ptr, self._parameters)]
        return found

    def moved(self) -> bool:
        """Whether a parameter has another address, or another parameter or module is in its place.

        In loops of C alone, since every step asks: of 8B parameters about 0.1 ms.
        """
        if self._children != self._children_then:
            return True
        if not all(map(is_, map(dict.get, self._owners, self._names), self._held)):
            return True
        with torch_names.without_overrides():  # of a default device's mode, which makes each call ten times as slow
            return [*map(Tensor.data_ptr, self._parameters)] != self._addresses

    def refresh(self) -> None:
        """Read the weights anew.

        Raises:
            UnsupportedProblem: the model has become one that cannot be read, or that needs other caches.
        """
        before, remedy = self.weights, "undo that, or make another decoder"
        try:
            found = self._read()
        except UnsupportedProblem as error:
            raise UnsupportedProblem(
                f"the model has changed since this decoder was made, and cannot be read any more ({remedy}): {error}"
            ) from error
        if _shape(found) != _shape(before):
            self._addresses = []  # still to be read
            raise UnsupportedProblem(
                f"the model has changed since this decoder was made, from {_shape(before)} to {_shape(found)}, which "
                f"its cache does not fit: {remedy}"
            )
        self.weights = found


def _shape(w: Weights) -> str:
    """All that a decoder's caches and graphs depend on."""
    table = w.embedding.weight
    return (
        f"{len(w.layers)} layers of {w.heads_q} and {w.heads_kv} heads of {w.head_dim}, {len(table)} and "
        f"{w.head.weight.shape[0]} tokens, {table.dtype} on {table.device}"
    )
