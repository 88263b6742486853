"""The families of ops. A family is a module or package of this folder with ``OPS`` and ``register(library)``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from cutekernels.errors import UnsupportedProblem, near
from cutekernels.op import Op

FAMILIES = (
    "gemm",
    "attention",
    "norm_linear",
    "activations",
    "rope",
    "kv_append",
    "optimizer",
    "embedding",
    "norms",
    "moe",
    "sampling",
    "quantized",
    "loss",
)
_FAMILIES = [import_module(f"cutekernels.ops.{name}") for name in FAMILIES]
OPS: tuple[Op[Any, Any], ...] = tuple(op for family in _FAMILIES for op in family.OPS)

# torch.ops.cutekernels.*: how torch.compile, autograd and CPU tensors reach the ops. Lives as long as this module.
LIBRARY = torch.library.Library("cutekernels", "FRAGMENT")
for family in _FAMILIES:
    family.register(LIBRARY)

_BY_NAME = {op.name: op for op in OPS}


def get(name: str) -> Op[Any, Any]:
    """The op called ``name``. Raises UnsupportedProblem for any other."""
    if name not in _BY_NAME:
        raise UnsupportedProblem(f"no op is called {name[:60]!r}. {near(name, _BY_NAME)}The ops: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
