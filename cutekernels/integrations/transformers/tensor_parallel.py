"""Tensor parallelism as transformers does it (``tp_plan="auto"``): a rank computes its share by our kernels.

transformers shards weights as DTensors, and puts a function in front of each planned module's forward that hands it
local tensors and reduces or gathers its result. That function stays; what it calls is the patched forward. Nothing is
gathered that transformers does not gather itself.
"""

from __future__ import annotations

from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from cutekernels.integrations.transformers.modules import Linear
from cutekernels.nn.mlp import project

_MODULE = "transformers.distributed.tensor_parallel"


def is_planned(module: Any) -> bool:
    """Whether a module's own forward is transformers', around the one of its class."""
    return _cell(module) is not None


def rebind(module: Any) -> None:
    """Have transformers' forward call the one of the class that a planned module has now."""
    cell = _cell(module)
    if cell is not None:
        cell.cell_contents = type(module).forward.__get__(module)


def _cell(module: Any) -> CellType | None:
    """Where transformers' forward keeps the one that it calls: a method of the module itself."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, FunctionType) or forward.__module__ != _MODULE:
        return None
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    cell = cells.get("original_forward")
    return cell if cell is not None and getattr(cell.cell_contents, "__self__", None) is module else None


def is_sharded(weight: object) -> bool:
    """Whether a weight is a DTensor."""
    return hasattr(weight, "placements") and hasattr(weight, "device_mesh")


class ShardedLinear(Linear):
    """A projection whose weight is a DTensor. In inference transformers puts local tensors in its place; in training
    operands are DTensors.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        me: Any = self
        if not is_sharded(me.weight):
            return super().forward(x)
        found = _shards(x, me.weight, me.bias)
        theirs: Any = super(Linear, self)
        return theirs.forward(x) if found is None else found


# ---- placements -----------------------------------------------------------------------------------------


def _rows() -> dict[tuple[Any, Any], tuple[Any, Any]]:
    """``(x, weight)`` to ``(result, gradient of x)``: weights ``(N, K)`` in shards of rows or of columns, or whole."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole, rows, columns, last = Replicate(), Shard(0), Shard(1), Shard(-1)
    return {(whole, rows): (last, Partial()), (last, columns): (Partial(), last), (whole, whole): (whole, whole)}


def _shards(x: Any, weight: Any, bias: Any) -> Tensor | None:
    """The product of DTensors, each rank's by our kernel; None for placements in no row of the table.

    Not by ``local_map``, which takes every rank's share to be of one size: a vocabulary's need not be.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(x, DTensor) or len(x.placements) != 1 or len(weight.placements) != 1:
        return None
    last = Shard(x.dim() - 1)
    of_x = Shard(-1) if x.placements[0] == last else x.placements[0]
    found = _rows().get((of_x, weight.placements[0]))
    if found is None or (bias is not None and (of_x.is_shard() or bias.placements != weight.placements)):
        return None  # a bias is added once, behind the sum
    result, of_gradient = (last if placement.is_shard() else placement for placement in found)
    local = x.to_local(grad_placements=[of_gradient]), weight.to_local(), None if bias is None else bias.to_local()
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    made = project(*local, name="Linear")
    return DTensor.from_local(made, weight.device_mesh, [result], run_check=False, shape=shape, stride=stride)
