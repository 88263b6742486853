"""Why a module is not patched: among others what its ops refuse, which are asked on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers import modules, projections
from cutekernels.integrations.transformers.checkpoints import is_quantized
from cutekernels.integrations.transformers.experts import why_not_experts
from cutekernels.integrations.transformers.families import Family, activation_of, gate_of
from cutekernels.integrations.transformers.quantized import Quantized, why_not_computed
from cutekernels.integrations.transformers.tensor_parallel import is_planned
from cutekernels.nn.mlp import Gate, gate_mul, has_no_hooks
from cutekernels.ops.attention.api import attention, decode_attention
from cutekernels.ops.attention.problem import WIDEST
from cutekernels.ops.linear import linear
from cutekernels.ops.moe.ffn import moe_ffn
from cutekernels.ops.norms.api import layer_norm, rms_norm
from cutekernels.ops.rope.api import rope

WIDEST_HEAD = 256
_COMPUTED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def why_not(role: str, module: Any, family: Family, top_k: int) -> str:
    """Why a module is left as it is, or "". ``top_k``: how many experts a token has."""
    if "forward" in module.__dict__ and not is_planned(module):
        return "its forward has been replaced (by device_map's hooks, say)"
    if role == "experts":
        return why_not_experts(module) or _not_multiplied(module.gate_up_proj) or _of_experts(module, top_k)
    if role == "layer" and "linear_attn" in module._modules:
        return "its tokens are mixed by the gated delta rule, which stays transformers' own"
    if _drops(module):
        return "it has dropout, which no kernel has"
    if role == "mlp":
        return _mlp_left(module, family)
    if role == "linear":
        reason = _not_multiplied(module.weight)
        return reason or (
            _of_linear(*module.weight.shape, _dtype(module.weight)) if _has_shape(module.weight, 2) else ""
        )
    if role == "norm" and is_bare(module):
        return ""
    if role == "norm" and family.layer_norm:
        eps = family.norm_options(module)["eps"]
        return _of_layer_norm(len(module.weight), _dtype(module.weight), eps) if _has_shape(module.weight, 1) else ""
    if role == "norm" and _has_shape(module.weight, 1):
        return _of_norm(tuple(module.weight.shape), _dtype(module.weight), *family.norm_options(module).values())
    if role == "attention":
        return _asks_for_more(type(module), family) or _of_rope(
            module.head_dim, *_heads(module), _dtype(_query(module))
        )
    return ""


def is_bare(norm: Any) -> bool:
    """Whether a norm has no weight, as Gemma 4's say of themselves; one that is no parameter (FSDP's) is one too."""
    return getattr(norm, "with_scale", True) is False


def _drops(module: Any) -> bool:
    """Whether a layer or a part of one zeroes some of its results in training."""
    inner = [child.p for child in module.children() if isinstance(child, torch.nn.Dropout)]
    return any(p > 0 for p in [*inner, getattr(module, "residual_dropout", 0)])


def _mlp_left(module: Any, family: Family) -> str:
    act = activation_of(module)
    gate = gate_of(act)
    if gate is None:
        return f"no kernel has the gate of {type(act).__name__}"
    if not has_no_hooks(act):
        return "its activation has hooks"
    name = "c_fc" if not family.gated else "gate_up_proj" if family.joined_mlp else "gate_proj"
    weight: Any = _weight_of(getattr(module, name))
    if not _has_shape(weight, 2):
        return ""
    if not family.gated:
        return _not_multiplied(weight) or _of_linear(*weight.shape, _dtype(weight), gate)
    return _of_gate(gate, len(weight) // (1 + family.joined_mlp), _dtype(weight))


def _asks_for_more(original: type[Any], family: Family) -> str:
    """Why an attention layer's arguments are not ours, as in a version of transformers that has renamed some."""
    taken = inspect.signature(modules.Attention.forward).parameters
    asked = inspect.signature(original.forward).parameters
    nothing = {"use_cache", "output_attentions"}  # of old versions: the cache is given or not, weights never returned
    shared = {"shared_kv_states"} if family.shares_keys else set[str]()
    unknown = sorted(asked.keys() - taken.keys() - nothing - shared)
    if shared - asked.keys():
        return "this version of transformers hands shared keys on in another way"
    if unknown:
        return f"this version of transformers calls it with {', '.join(unknown)}, which no kernel knows"
    if "apply_multimodal_rotary_pos_emb" in getattr(
        getattr(inspect.unwrap(original.forward), "__code__", None), "co_names", ()
    ):
        return "this version of transformers turns its queries and keys by three tables, which no kernel takes"
    return ""


def why_no_core(module: Any, family: Family, dtype: torch.dtype) -> str:
    """Why no kernel takes the queries, keys and values of an attention layer, or "". ``dtype``: the model's."""
    if module.head_dim % WIDEST or module.head_dim > WIDEST_HEAD:
        return f"kernels take a head_dim that is a multiple of {WIDEST} up to {WIDEST_HEAD}; it is {module.head_dim}"
    window, weight = family.window_of(module), _query(module)
    return _not_computed(module, dtype) or _of_core(
        module.head_dim, *_heads(module), _dtype(weight), module.scaling, family.softcap_of(module), window
    )


# ---- weights --------------------------------------------------------------------------------------------


def _not_computed(module: Any, dtype: torch.dtype) -> str:
    """Why the queries of an attention layer have no type that kernels take: that of its weights, or of the model."""
    projection = _query_of(module)
    own = next((t for t in (*projection.parameters(), *projection.buffers())), None)
    if own is not None and is_quantized(projection):
        return why_not_computed(own.device, dtype)
    return _not_multiplied(getattr(projection, "weight", None))


def _not_multiplied(weight: object) -> str:
    if not isinstance(weight, Tensor):
        return "its weights are no tensors (quantized, say)"
    if projections.multiplied(weight, weight):
        return ""
    return f"on a GPU kernels multiply fp16 and bf16, and its weights are {weight.dtype}"


# ---- ops ------------------------------------------------------------------------------------------------


def _has_shape(weight: Any, dimensions: int) -> bool:
    """Whether a weight has its own shape: what is quantized or sharded may be packed, flat or empty."""
    return isinstance(weight, Tensor) and weight.dim() == dimensions and weight.numel() > 0


def _dtype(weight: object) -> torch.dtype:
    """The type in which an op is asked: on the CPU, where it takes any, and for what is quantized, bf16."""
    known = isinstance(weight, Tensor) and weight.dtype in _COMPUTED and weight.device.type != "cpu"
    return weight.dtype if known else torch.bfloat16  # type: ignore[attr-defined]


def _heads(module: Any) -> tuple[int, int]:
    heads, groups = module.config.num_attention_heads, getattr(module, "num_key_value_groups", None)
    return heads, module.config.num_key_value_heads if groups is None else heads // groups


def _query_of(module: Any) -> Any:
    projection = module.qkv_proj if hasattr(module, "qkv_proj") else module.q_proj
    return getattr(projection, "base_layer", projection)  # behind an adapter


def _query(module: Any) -> object:
    return _weight_of(_query_of(module))


def _weight_of(projection: Any) -> object:
    """A projection's weight; None for a patched quantized one, which would have to make it."""
    return None if isinstance(projection, Quantized) else getattr(projection, "weight", None)


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except UnsupportedProblem as error:
        return str(error)
    return ""


@cache
def _of_norm(shape: tuple[int, ...], dtype: torch.dtype, eps: float, offset: float, rounding: Any) -> str:
    x, weight = _meta(1, *shape, dtype=dtype), _meta(*shape, dtype=dtype)
    return _refusal(lambda: rms_norm(x, weight, eps=eps, weight_offset=offset, rounding=rounding))


@cache
def _of_layer_norm(width: int, dtype: torch.dtype, eps: float) -> str:
    x, weight = _meta(1, width, dtype=dtype), _meta(width, dtype=dtype)
    return _refusal(lambda: layer_norm(x, weight, weight, eps=eps))


@cache
def _of_linear(n: int, k: int, dtype: torch.dtype, activation: Gate | None = None) -> str:
    return _refusal(lambda: linear(_meta(1, k, dtype=dtype), _meta(n, k, dtype=dtype), activation=activation))


@cache
def _of_gate(gate: Gate, width: int, dtype: torch.dtype) -> str:
    half = _meta(1, width, dtype=dtype)
    return _refusal(lambda: gate_mul(gate, half, half))


@cache
def _of_rope(head_dim: int, heads_q: int, heads_kv: int, dtype: torch.dtype) -> str:
    q, k = (_meta(1, 2, heads, head_dim, dtype=dtype) for heads in (heads_q, heads_kv))
    table = _meta(1, 2, head_dim, dtype=dtype)
    return _refusal(lambda: rope(q, k, table, table))


@cache
def _of_core(
    head_dim: int,
    heads_q: int,
    heads_kv: int,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None,
    last: int | None,
) -> str:
    q, k = (_meta(1, 2, heads, head_dim, dtype=dtype) for heads in (heads_q, heads_kv))
    lengths = _meta(1, dtype=torch.int32)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    if last is not None:
        options["window"] = (last - 1, None)
    whole = _refusal(lambda: attention(q, k, k, causal=True, **options))
    return whole or _refusal(lambda: decode_attention(q[:, :1], k, k, lengths, **options))


def _of_experts(module: Any, top_k: int) -> str:
    gate_up, down = module.gate_up_proj, module.down_proj
    shapes = [tuple((w.mT if getattr(module, "is_transposed", False) else w).shape) for w in (gate_up, down)]
    return _of_shapes(*shapes, top_k, _dtype(gate_up))


@cache
def _of_shapes(gate_up: tuple[int, ...], down: tuple[int, ...], top_k: int, dtype: torch.dtype) -> str:
    x, ids, weights = (_meta(1, n, dtype=kind) for n, kind in ((down[1], dtype), (top_k, torch.int64), (top_k, dtype)))
    return _refusal(lambda: moe_ffn(x, _meta(*gate_up, dtype=dtype), _meta(*down, dtype=dtype), ids, weights))
