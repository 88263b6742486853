"""The families of ops. A family is a module or package with ``OPS`` and ``register(library)``."""

from __future__ import annotations

from typing import Any

import torch

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Op
from cutekernels.ops import (
    activations,
    attention,
    embedding,
    gemm,
    kv_append,
    moe,
    norm_linear,
    norms,
    optimizer,
    rope,
    sampling,
)

FAMILIES = (
    gemm,
    attention,
    norm_linear,
    activations,
    rope,
    kv_append,
    optimizer,
    embedding,
    norms,
    moe,
    sampling,
)
OPS: tuple[Op[Any, Any], ...] = tuple(op for family in FAMILIES for op in family.OPS)

# torch.ops.cutekernels.*: how torch.compile, autograd and CPU tensors reach the ops. Lives as long as this module.
LIBRARY = torch.library.Library("cutekernels", "FRAGMENT")
for family in FAMILIES:
    family.register(LIBRARY)

_BY_NAME = {op.name: op for op in OPS}


def get(name: str) -> Op[Any, Any]:
    """The op called ``name``. Raises UnsupportedProblem for any other."""
    if name not in _BY_NAME:
        raise UnsupportedProblem(f"no op is called {name!r}; the ops: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
