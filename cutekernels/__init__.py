"""cutekernels: tuned GPU kernels for LLM operators, and the service that tunes them.

Importing this package loads nothing heavy; each name below is fetched at first use.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutekernels.dispatch import reload as reload
    from cutekernels.dispatch import warmup as warmup
    from cutekernels.face import explain as explain
    from cutekernels.face import report_misses as report_misses
    from cutekernels.kv_cache import KVCache as KVCache
    from cutekernels.ops.activations import bias_gelu as bias_gelu
    from cutekernels.ops.activations import gelu_mul as gelu_mul
    from cutekernels.ops.activations import silu_mul as silu_mul
    from cutekernels.ops.attend import attention as attention
    from cutekernels.ops.attend_decode import decode_attention as decode_attention
    from cutekernels.ops.embedding import embedding as embedding
    from cutekernels.ops.expert_rows import moe_combine as moe_combine
    from cutekernels.ops.expert_rows import moe_gather as moe_gather
    from cutekernels.ops.matmul import gemm as gemm
    from cutekernels.ops.matmul import linear as linear
    from cutekernels.ops.norm_linear import fold as fold
    from cutekernels.ops.norm_linear import linear_silu_mul as linear_silu_mul
    from cutekernels.ops.norm_linear import rms_norm_linear as rms_norm_linear
    from cutekernels.ops.norms import add_rms_norm as add_rms_norm
    from cutekernels.ops.norms import layer_norm as layer_norm
    from cutekernels.ops.norms import rms_norm as rms_norm
    from cutekernels.ops.optimizer import adamw_step as adamw_step
    from cutekernels.ops.permutation import moe_permute as moe_permute
    from cutekernels.ops.rope import rope as rope
    from cutekernels.ops.routing import moe_route as moe_route
    from cutekernels.ops.sampling import sample_filter as sample_filter
    from cutekernels.sdpa import route_sdpa as route_sdpa

_HOMES = {
    "moe_combine": "cutekernels.ops.expert_rows",
    "moe_gather": "cutekernels.ops.expert_rows",
    "moe_permute": "cutekernels.ops.permutation",
    "moe_route": "cutekernels.ops.routing",
    "sample_filter": "cutekernels.ops.sampling",
    "add_rms_norm": "cutekernels.ops.norms",
    "layer_norm": "cutekernels.ops.norms",
    "rms_norm": "cutekernels.ops.norms",
    "fold": "cutekernels.ops.norm_linear",
    "linear_silu_mul": "cutekernels.ops.norm_linear",
    "rms_norm_linear": "cutekernels.ops.norm_linear",
    "attention": "cutekernels.ops.attend",
    "decode_attention": "cutekernels.ops.attend_decode",
    "KVCache": "cutekernels.kv_cache",
    "route_sdpa": "cutekernels.sdpa",
    "gemm": "cutekernels.ops.matmul",
    "linear": "cutekernels.ops.matmul",
    "bias_gelu": "cutekernels.ops.activations",
    "gelu_mul": "cutekernels.ops.activations",
    "silu_mul": "cutekernels.ops.activations",
    "rope": "cutekernels.ops.rope",
    "embedding": "cutekernels.ops.embedding",
    "adamw_step": "cutekernels.ops.optimizer",
    "explain": "cutekernels.face",
    "report_misses": "cutekernels.face",
    "reload": "cutekernels.dispatch",
    "warmup": "cutekernels.dispatch",
}
_ROOMS = ("nn",)  # packages that a name of this one may be
_REGISTRY = "cutekernels.ops.registry"  # registers the torch ops that the functions fall back on

try:
    __version__ = version("cutekernels")
except PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0"

__all__ = [
    "KVCache",
    "__version__",
    "adamw_step",
    "add_rms_norm",
    "attention",
    "bias_gelu",
    "decode_attention",
    "embedding",
    "explain",
    "fold",
    "gelu_mul",
    "gemm",
    "layer_norm",
    "linear",
    "linear_silu_mul",
    "moe_combine",
    "moe_gather",
    "moe_permute",
    "moe_route",
    "reload",
    "report_misses",
    "rms_norm",
    "rms_norm_linear",
    "rope",
    "route_sdpa",
    "sample_filter",
    "silu_mul",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'cutekernels' has no attribute {name!r}")
    import_module(_REGISTRY)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_ROOMS])
