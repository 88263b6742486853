"""Projections of a transformers model, and the weights that kernels multiply of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutekernels.nn.mlp import has_no_hooks
from cutekernels.ops.shared.dtypes import DTYPES


def parameter(module: Any, name: str) -> Any:
    """``module.name``, of a parameter. torch searches a module in Python, at a microsecond each."""
    own = module._parameters
    return own[name] if name in own else getattr(module, name)


def kind_of(cls: type) -> str:
    """A class with where it comes from: many are called Linear."""
    return f"{cls.__module__}.{cls.__qualname__}"


def sharded(linear: Any) -> bool:
    """Whether FSDP puts a module's parameters in place for each call; torch.compile reads the same mark."""
    return "_is_fsdp_managed_module" in linear.__dict__


def computes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our kernels compute in ``dtype``: a 16-bit one, but on the CPU any."""
    return device.type == "cpu" or dtype in DTYPES.values()


def multiplied(x: Tensor, weight: Tensor) -> bool:
    """Whether our kernels multiply ``x`` by ``weight``: of one type, in which they compute."""
    return x.dtype == weight.dtype and computes(x.device, x.dtype)


def is_linear(module: Any) -> bool:
    """Whether a patched module is a plain Linear: not quantized, its parameters its own, without hooks."""
    own = getattr(type(module), "original", None) is torch.nn.Linear and not is_parametrized(module)
    return own and "quantized_layout" not in module.__dict__ and has_no_hooks(module)


def is_parametrized(module: Any) -> bool:
    """Whether each read of a parameter computes it (torch.nn.utils.parametrize), which may draw or change a state."""
    return "parametrizations" in module._modules


def whole(linear: Any, x: Tensor) -> bool:
    """Whether a projection is its parameters alone, and multiplies what has the type of ``x``."""
    return is_linear(linear) and multiplied(x, parameter(linear, "weight")) and not sharded(linear)
