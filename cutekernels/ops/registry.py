"""The families of ops, and the ops of each. A family is a package of this folder, or a module of one, with its ops in
``OPS``.

Nothing here imports torch, and an op that is asked for by name imports its own family alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cutekernels.errors import UnsupportedProblem, near
from cutekernels.op import Op

FAMILIES: dict[str, tuple[str, ...]] = {
    "products.dense": ("gemm",),
    "products.grouped": ("grouped_gemm", "grouped_gemm_wgrad"),
    "products.packed": ("quantized_linear", "quantized_grouped_gemm"),
    "products.dequantize": ("dequantize",),
    "products.norm": ("rms_norm_linear", "linear_silu_mul"),
    "attention": ("attention", "attention_delta", "attention_backward", "decode_attention", "cache_attention"),
    "activations": (
        "silu_mul",
        "silu_mul_backward",
        "gelu_mul",
        "gelu_mul_backward",
        "bias_gelu",
        "bias_gelu_backward",
    ),
    "rope": ("rope",),
    "kv_append": ("kv_append",),
    "optimizer": ("adamw_step",),
    "embedding": ("embedding", "embedding_backward"),
    "norms": (
        "rms_norm",
        "rms_norm_backward",
        "add_rms_norm",
        "layer_norm",
        "layer_norm_backward",
        "column_sum",
        "column_sum_pair",
    ),
    "moe": (
        "moe_route",
        "moe_route_backward",
        "moe_permute",
        "moe_gather",
        "moe_dispatch",
        "moe_combine",
        "moe_combine_backward",
    ),
    "sampling": ("sample_filter",),
    "loss": ("logit_statistics", "logit_gradient", "scale_gradient"),
}
_HOMES = {op: family for family, ops in FAMILIES.items() for op in ops}
_loaded: dict[str, Op[Any, Any]] = {}

OPS: tuple[Op[Any, Any], ...]
"""All ops, whose families are imported at first use."""


def __getattr__(name: str) -> Any:
    if name != "OPS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = tuple([get(op) for op in _HOMES])
    return globals()[name]


def find(name: str) -> Op[Any, Any] | None:
    """The op called ``name``, if there is one."""
    if name not in _loaded and name in _HOMES:
        _loaded.update({op.name: op for op in import_module(f"cutekernels.ops.{_HOMES[name]}").OPS})
    return _loaded.get(name)


_OPS_BEHIND = {  # public functions that are no ops, with those that they call
    "linear": "gemm with b_major=k, or quantized_linear",
    "moe_ffn": "grouped_gemm, or quantized_grouped_gemm, and moe_permute, moe_combine",
}


def get(name: str) -> Op[Any, Any]:
    """The op called ``name``. Raises UnsupportedProblem for any other."""
    found = find(name)
    if found is None:
        known = dict.fromkeys((*_HOMES, *_loaded))
        hint = f"That function calls {_OPS_BEHIND[name]}. " if name in _OPS_BEHIND else near(name, known)
        raise UnsupportedProblem(f"no op is called {name[:60]!r}. {hint}The ops: {', '.join(known)}")
    return found
