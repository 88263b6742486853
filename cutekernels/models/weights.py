"""The weights of a model, as the decoder multiplies them: read off transformers' or ``load``'s, in its memory.

What a family has of its own (other norms, gates, windows, experts, rotary tables) is data here; nothing that computes
asks which family a model is of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.checkpoints import layout_of, quantized_weight
from cutekernels.integrations.transformers.families import Family, gate_of
from cutekernels.models.accepted import REMEDY, check_model
from cutekernels.models.loaded import Apart
from cutekernels.nn.mlp import Gate, gate_mul, gated, projected
from cutekernels.nn.moe import MoE
from cutekernels.nn.packing import side_by_side
from cutekernels.ops.embedding.api import embedding
from cutekernels.ops.norms.api import add_rms_norm, rms_norm
from cutekernels.quant import QuantizedWeight, concatenate


@dataclass(frozen=True)
class Embedding:
    """Rows of ``weight``, times ``scale`` where there is one."""

    weight: Tensor
    scale: float | None

    def __call__(self, ids: Tensor) -> Tensor:
        rows = embedding(ids, self.weight)
        return rows if self.scale is None else rows * self.scale


@dataclass(frozen=True)
class Projection:
    """``x @ weight.T + bias``."""

    weight: Tensor | QuantizedWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return projected(x, self.weight, self.bias, name="Decoder")

    def gated(self, x: Tensor, gate: Gate) -> Tensor:
        """``act(first half) * second half`` of the product."""
        return gated(x, self.weight, self.bias, gate, name="Decoder")


@dataclass(frozen=True)
class Projections:
    """Products of one input, side by side in the result, whose weights cannot be."""

    parts: tuple[Projection, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)

    def gated(self, x: Tensor, gate: Gate) -> Tensor:
        """``act(first) * second``."""
        first, second = self.parts
        return gate_mul(gate, first(x), second(x))


@dataclass(frozen=True)
class Norm:
    """An RMS norm. ``options``: of :func:`cutekernels.rms_norm`."""

    weight: Tensor
    options: dict[str, Any]

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, **self.options)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``(norm(x + residual), x + residual)``."""
        return add_rms_norm(x, residual, self.weight, **self.options)


@dataclass(frozen=True)
class Mlp:
    """``down(act(gate(x)) * up(x))``."""

    gate_up: Projection | Projections
    gate: Gate
    down: Projection

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up.gated(x, self.gate))


@dataclass(frozen=True)
class Attention:
    """Attention of one layer.

    Attributes:
        q_norm, k_norm: of each head's queries and keys, or None.
        cos, sin: ``(positions, head_dim / 2)``, fp32 at least; layers share them.
        options: ``scale``, ``softcap`` and ``window``, as :func:`cutekernels.attention` takes them.
    """

    qkv: Projection | Projections
    q_norm: Norm | None
    k_norm: Norm | None
    out: Projection
    cos: Tensor
    sin: Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """One decoder layer; ``attention_out_norm`` and ``mlp_out_norm`` are of results before the residual is added."""

    attention_norm: Norm
    attention: Attention
    attention_out_norm: Norm | None
    mlp_norm: Norm
    mlp: Mlp | MoE
    mlp_out_norm: Norm | None


@dataclass(frozen=True)
class Weights:
    """A whole model. ``softcap``: logits become ``softcap * tanh(logit / softcap)``, where there is one."""

    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Projection
    softcap: float | None
    heads_q: int
    heads_kv: int
    head_dim: int

    def logits(self, hidden: Tensor) -> Tensor:
        """``(B, V)`` of ``(B, H)``, behind the last norm."""
        logits = self.head(hidden)
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


def read(model: Any, positions: int) -> Weights:
    """The weights of a transformers or loaded model, with rotary tables for ``positions`` tokens.

    q, k and v projections, and gate and up, are moved side by side: the model's parameters become views of one tensor
    each, so that nothing is in memory twice. Experts stay where they are.

    Raises:
        UnsupportedProblem: a model that :func:`check_model` refuses, and options of its family that no op has.
    """
    family, ropes = check_model(model)
    config = model.config
    with torch.no_grad():
        tables = _tables(model, ropes, positions)
        layers = tuple(_layer(layer, family, tables, model.dtype) for layer in model.model.layers)
    table = model.model.embed_tokens
    scale = getattr(table, "embed_scale", None)
    return Weights(
        embedding=Embedding(table.weight.detach(), None if scale is None else float(scale.to(table.weight.dtype))),
        layers=layers,
        norm=_norm(model.model.norm, family),
        head=_projection(model.lm_head, model.dtype),
        softcap=family.logit_softcap_of(config),
        heads_q=config.num_attention_heads,
        heads_kv=config.num_key_value_heads,
        head_dim=model.model.layers[0].self_attn.head_dim,
    )


def _tables(model: Any, ropes: dict[str | None, Any], positions: int) -> dict[str | None, tuple[Tensor, Tensor]]:
    """cos and sin of each of ``ropes``."""
    probe = torch.zeros((), dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)
    ids = torch.arange(positions, device=model.device)[None]
    found = {}
    for kind in ropes:
        cos, sin = model.model.rotary_emb(probe, ids, *(() if kind is None else (kind,)))
        half = cos.shape[-1] // 2
        found[kind] = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
    return found


def _layer(layer: Any, family: Family, tables: dict[str | None, tuple[Tensor, Tensor]], dtype: torch.dtype) -> Layer:
    attended = layer.post_attention_layernorm  # before the residual is added in Gemma's layers, behind that in others
    return Layer(
        attention_norm=_norm(layer.input_layernorm, family),
        attention=_attention(layer.self_attn, family, tables, dtype),
        attention_out_norm=_norm(attended, family) if family.sandwich else None,
        mlp_norm=_norm(layer.pre_feedforward_layernorm if family.sandwich else attended, family),
        mlp=_mlp(layer.mlp, dtype),
        mlp_out_norm=_norm(layer.post_feedforward_layernorm, family) if family.sandwich else None,
    )


def _attention(
    attention: Any, family: Family, tables: dict[str | None, tuple[Tensor, Tensor]], dtype: torch.dtype
) -> Attention:
    if not attention.is_causal:
        raise UnsupportedProblem(
            f"Decoder's tokens see earlier ones alone; this model has use_bidirectional_attention: {REMEDY}"
        )
    window = family.window_of(attention)
    cos, sin = tables[None if None in tables else attention.layer_type]
    return Attention(
        qkv=_joined(attention, dtype, "qkv_proj", "q_proj", "k_proj", "v_proj"),
        q_norm=_norm(attention.q_norm, family) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm, family) if hasattr(attention, "k_norm") else None,
        out=_projection(attention.o_proj, dtype),
        cos=cos,
        sin=sin,
        options={
            "scale": attention.scaling,
            "softcap": family.softcap_of(attention),
            "window": None if window is None else (window - 1, None),
        },
    )


def _mlp(mlp: Any, dtype: torch.dtype) -> Mlp | MoE:
    if hasattr(mlp, "experts"):
        try:
            return MoE.from_transformers(mlp)
        except UnsupportedProblem as error:
            raise UnsupportedProblem(f"Decoder runs experts as nn.MoE does. {error}, and {REMEDY}") from error
    gate = gate_of(mlp.act_fn)
    if gate is None:
        raise UnsupportedProblem(
            f"Decoder has the gates of SiLU and GELU; one is {type(mlp.act_fn).__name__}: {REMEDY}"
        )
    return Mlp(_joined(mlp, dtype, "gate_up_proj", "gate_proj", "up_proj"), gate, _projection(mlp.down_proj, dtype))


def _norm(norm: Any, family: Family) -> Norm:
    return Norm(norm.weight.detach(), family.norm_options(norm))


def _projection(linear: Any, dtype: torch.dtype) -> Projection:
    weight: Tensor | QuantizedWeight | None = quantized_weight(linear, dtype)
    if weight is None:
        weight = linear.weight.detach() if isinstance(linear.weight, Tensor) else linear.weight
    assert weight is not None
    return Projection(weight, None if linear.bias is None else linear.bias.detach())


def _joined(module: Any, dtype: torch.dtype, whole: str, *names: str) -> Projection | Projections:
    """The projections of one input: those of ``names`` side by side, or ``whole`` where they are joined already."""
    found = getattr(module, whole, None)
    if isinstance(found, Apart):
        return Projections(tuple(_projection(part, dtype) for part in found.parts))
    if found is not None:
        return _projection(found, dtype)
    linears = [getattr(module, name) for name in names]
    if not any(map(layout_of, linears)):
        weight = side_by_side([linear.weight for linear in linears])
        bias = None if linears[0].bias is None else side_by_side([linear.bias for linear in linears])
        return Projection(weight.detach(), None if bias is None else bias.detach())
    parts = [_projection(linear, dtype) for linear in linears]
    weights = [part.weight for part in parts if isinstance(part.weight, QuantizedWeight)]
    biases = [part.bias for part in parts if part.bias is not None]
    joined = concatenate(weights) if len(weights) == len(parts) and len(biases) in (0, len(parts)) else None
    if joined is None:
        return Projections(tuple(parts))
    return Projection(joined, torch.cat(biases) if biases else None)
