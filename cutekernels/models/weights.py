"""The weights of a Llama-class model, as the decoder multiplies them: read off a transformers model, in its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.nn.packing import side_by_side

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Projection:
    """``x @ weight.T + bias``."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Layer:
    """One decoder layer; ``window`` is how many tokens a query sees, itself included, or None for all."""

    norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    window: int | None


@dataclass(frozen=True)
class Weights:
    """A whole model. ``cos`` and ``sin``: ``(positions, head_dim / 2)``, fp32 at least."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Projection
    cos: Tensor
    sin: Tensor
    eps: float
    scale: float
    heads_q: int
    heads_kv: int
    head_dim: int


def read(model: Any, positions: int) -> Weights:
    """The weights of a transformers model, with rotary tables for ``positions`` tokens.

    q, k and v projections, and gate and up, are moved side by side: the model's parameters become views of one tensor
    each, so that nothing is in memory twice.

    Raises:
        UnsupportedProblem: a model that is no Llama-class decoder, is patched, or lies on several devices.
    """
    config: Any = getattr(model, "config", None)
    _check(model, config)
    with torch.no_grad():
        layers = tuple(_layer(layer) for layer in model.model.layers)
        probe = torch.zeros((), dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)
        cos, sin = model.model.rotary_emb(probe, torch.arange(positions, device=model.device)[None])
    first = model.model.layers[0].self_attn
    half = first.head_dim // 2
    return Weights(
        embedding=model.model.embed_tokens.weight.detach(),
        layers=layers,
        norm=model.model.norm.weight.detach(),
        head=_projection(model.lm_head),
        cos=cos[0, :, :half].contiguous(),
        sin=sin[0, :, :half].contiguous(),
        eps=config.rms_norm_eps,
        scale=first.scaling,
        heads_q=config.num_attention_heads,
        heads_kv=config.num_key_value_heads,
        head_dim=first.head_dim,
    )


def _check(model: Any, config: Any) -> None:
    kind = getattr(config, "model_type", None)
    if kind not in MODEL_TYPES or not hasattr(model, "lm_head"):
        raise UnsupportedProblem(
            f"Decoder takes transformers' causal language models of model_type {', '.join(MODEL_TYPES)}; "
            f"this is {kind or type(model).__name__}: use cutekernels.patch(model) and model.generate"
        )
    if any(hasattr(module, "original") for module in model.modules()):
        raise UnsupportedProblem("Decoder reads a plain model, and this one is patched: call cutekernels.unpatch first")
    if len({(p.device, p.dtype) for p in model.parameters()}) != 1:
        raise UnsupportedProblem("Decoder takes a model on one device and of one dtype: move it with model.to(...)")
    rope = config.rope_parameters.get("rope_type", "default")
    if rope not in ("default", "linear", "llama3", "yarn"):
        raise UnsupportedProblem(f"Decoder takes rotary tables that do not depend on the length; rope_type is {rope}")
    act = getattr(config, "hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UnsupportedProblem(f"Decoder has the gate of SiLU; hidden_act is {act}: use cutekernels.patch(model)")


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    own = attention if hasattr(attention, "layer_type") else attention.config
    return Layer(
        norm=layer.input_layernorm.weight.detach(),
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        out=_projection(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=_projection(mlp.down_proj),
        window=getattr(own, "sliding_window", None),
    )


def _projection(linear: Any) -> Projection:
    if type(linear) is not torch.nn.Linear:
        raise UnsupportedProblem(f"Decoder multiplies plain Linear layers; one is a {type(linear).__name__}: merge it")
    return Projection(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def _joined(*linears: Any) -> Projection:
    parts = [_projection(linear) for linear in linears]
    weight = side_by_side([linear.weight for linear in linears])
    return Projection(weight, None if parts[0].bias is None else side_by_side([linear.bias for linear in linears]))
