"""Drop-in modules over the ops: state dicts are those of their Hugging Face or PyTorch twins.

One file per family; each name below is fetched at first use, so that importing this package loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutekernels.nn.mlp import SwiGLU as SwiGLU
    from cutekernels.nn.norms import LayerNorm as LayerNorm
    from cutekernels.nn.norms import RMSNorm as RMSNorm
    from cutekernels.nn.rotary import RotaryEmbedding as RotaryEmbedding

_HOMES = {
    "RotaryEmbedding": "cutekernels.nn.rotary",
    "LayerNorm": "cutekernels.nn.norms",
    "RMSNorm": "cutekernels.nn.norms",
    "SwiGLU": "cutekernels.nn.mlp",
}

__all__ = ["LayerNorm", "RMSNorm", "RotaryEmbedding", "SwiGLU"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cutekernels.nn' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
