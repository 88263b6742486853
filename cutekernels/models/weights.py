"""The weights of a model, as the decoder multiplies them: read off transformers' or ``load``'s, in its memory.

What a family has of its own (other norms, gates, windows, experts, rotary tables) is data here; nothing that computes
asks which family a model is of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.checkpoints import layout_of, quantized_experts, quantized_weight
from cutekernels.integrations.transformers.families import Family, activation_of, gate_of
from cutekernels.models.accepted import REMEDY, check_model
from cutekernels.models.language import language_of
from cutekernels.models.loaded import Apart
from cutekernels.models.routing import Routed
from cutekernels.nn.mlp import Gate, gate_mul, gated, project
from cutekernels.nn.moe import SIGMOID, MoE, route_by_sigmoid
from cutekernels.nn.packing import side_by_side
from cutekernels.ops.embedding.api import embedding
from cutekernels.ops.linear import linear
from cutekernels.ops.moe.api import moe_route
from cutekernels.ops.moe.ffn import moe_ffn
from cutekernels.ops.norms.api import add_rms_norm, layer_norm, rms_norm
from cutekernels.quant import QuantizedStack, QuantizedWeight, concatenate

_SOFTMAX = (
    "Qwen3MoeSparseMoeBlock",
    "MixtralSparseMoeBlock",
)  # whose routers are moe_route, and whose experts may be packed


@dataclass(frozen=True)
class EmbeddingWeights:
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
        return project(x, self.weight, self.bias, name="Decoder")

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
class NormWeights:
    """An RMS norm. ``options``: of :func:`cutekernels.rms_norm`. ``weight``: None for ones."""

    weight: Tensor | None
    options: dict[str, Any]

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, **self.options)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``(norm(x + residual), x + residual)``."""
        assert self.weight is not None
        return add_rms_norm(x, residual, self.weight, **self.options)


@dataclass(frozen=True)
class LayerNorm:
    """A layer norm. ``options``: of :func:`cutekernels.layer_norm`."""

    weight: Tensor
    bias: Tensor | None
    options: dict[str, Any]

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, **self.options)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``(norm(x + residual), x + residual)``."""
        total = x + residual
        return self(total), total


class NoNorm:
    """Stands where a family has no norm."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``x + residual``, twice."""
        total = x + residual
        return total, total


@dataclass(frozen=True)
class MlpWeights:
    """``down(act(gate(x)) * up(x))``."""

    gate_up: Projection | Projections
    gate: Gate
    down: Projection

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up.gated(x, self.gate))


@dataclass(frozen=True)
class PlainMlpWeights:
    """``down(act(up(x)))``."""

    up: Projection
    activation: Gate
    down: Projection

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(linear(x, self.up.weight, self.up.bias, activation=self.activation))


@dataclass(frozen=True)
class Softmax:
    """A router that takes the softmax over all experts."""

    logits: Projection
    top_k: int
    renormalize: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(weights, ids)`` of each token's experts."""
        return moe_route(self.logits(x), self.top_k, renormalize=self.renormalize)


@dataclass(frozen=True)
class Sigmoid:
    """A router of sigmoids in fp32. ``options``: of :func:`cutekernels.nn.moe.route_by_sigmoid`."""

    weight: Tensor
    correction: Tensor
    options: dict[str, Any]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(weights, ids)`` of each token's experts."""
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = torch.nn.functional.linear(x.to(wide), self.weight.to(wide)).sigmoid()
        return route_by_sigmoid(scores, self.correction, **self.options)


@dataclass(frozen=True)
class Experts:
    """A router, and experts whose weights are packed or not. ``options``: of :func:`cutekernels.moe_ffn`."""

    route: Softmax | Sigmoid
    gate_up: Tensor | QuantizedStack
    down: Tensor | QuantizedStack
    options: dict[str, Any]

    def __call__(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        return moe_ffn(x, self.gate_up, self.down, ids, weights, **self.options)


@dataclass(frozen=True)
class SharedMoE:
    """Experts, and one that every token has, times the sigmoid of ``gate`` where there is one."""

    routed: MoE | Experts
    shared: MlpWeights
    gate: Projection | None

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.routed(x)
        shared = self.shared(x)
        return out + (shared if self.gate is None else self.gate(x).sigmoid() * shared)


@dataclass(frozen=True)
class Attention:
    """Attention of one layer.

    Attributes:
        q_norm, k_norm: of queries and keys, or None: of each head's, or of all heads' together (``whole_norms``).
        v_norm: of each head's values, or None.
        keys_alone: there are no projections of values: they are the keys in front of their norm.
        cos, sin: ``(positions, R / 2)`` with R up to head_dim, fp32 at least; layers share them. None: nothing turns.
        interleaved: channels that turn together are neighbours.
        options: ``scale``, ``softcap``, ``window`` and ``sinks``, as :func:`cutekernels.attention` takes them.
    """

    qkv: Projection | Projections
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    v_norm: NormWeights | None
    keys_alone: bool
    whole_norms: bool
    out: Projection
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    options: dict[str, Any]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; ``attention_out_norm`` and ``mlp_out_norm`` are of results before the residual is added, and
    ``multiplier`` multiplies them. ``parallel``: the MLP has attention's input, and both results are added at once.
    ``scalar`` ``(1,)`` multiplies the layer's result, residual and all.
    """

    attention_norm: NormWeights | LayerNorm | NoNorm
    attention: Attention
    attention_out_norm: NormWeights | None
    mlp_norm: NormWeights | LayerNorm | NoNorm
    mlp: MlpWeights | PlainMlpWeights | MoE | SharedMoE | Experts
    mlp_out_norm: NormWeights | None
    parallel: bool
    multiplier: float | None
    scalar: Tensor | None


@dataclass(frozen=True)
class Weights:
    """A whole model. ``softcap``: logits become ``softcap * tanh(logit / softcap)``, where there is one. ``scaling``:
    they are divided by it.
    """

    embedding: EmbeddingWeights
    layers: tuple[LayerWeights, ...]
    norm: NormWeights | LayerNorm
    head: Projection
    softcap: float | None
    scaling: float | None
    heads_q: int
    heads_kv: int
    head_dim: int

    def logits(self, hidden: Tensor) -> Tensor:
        """``(B, V)`` of ``(B, H)``, behind the last norm."""
        logits = self.head(hidden)
        if self.scaling is not None:
            logits = logits / self.scaling
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


def read(model: Any, positions: int) -> Weights:
    """The weights of a transformers or loaded model, with rotary tables for ``positions`` tokens.

    q, k and v projections, and gate and up, are moved side by side: the model's parameters become views of one tensor
    each, so that nothing is in memory twice. Experts stay where they are.

    Raises:
        UnsupportedProblem: a model that :func:`check_model` refuses, and options of its family that no op has.
    """
    family, ropes = check_model(model)
    model = language_of(model)
    config = model.config
    with torch.no_grad():
        tables = _tables(model, family, ropes, positions)
        multiplier = family.residual_multiplier_of(config)
        try:
            layers = tuple(
                _layer(number, layer, family, tables, model.dtype, multiplier)
                for number, layer in enumerate(model.model.layers)
            )
        except AttributeError as error:
            if not isinstance(error.obj, torch.nn.Module):
                raise
            raise UnsupportedProblem(
                f"Decoder cannot read a module that another was replaced by: {error}; {REMEDY}"
            ) from error
    return Weights(
        embedding=EmbeddingWeights(model.model.embed_tokens.weight.detach(), family.embedding_multiplier_of(model)),
        layers=layers,
        norm=_any_norm(model.model.norm, family),
        head=_projection(model.lm_head, model.dtype),
        softcap=family.logit_softcap_of(config),
        scaling=family.logits_scaling_of(config),
        heads_q=config.num_attention_heads,
        heads_kv=config.num_key_value_heads,
        head_dim=model.model.layers[0].self_attn.head_dim,
    )


def _tables(
    model: Any, family: Family, ropes: dict[str | None, Any], positions: int
) -> dict[str | None, tuple[Tensor, Tensor]]:
    """cos and sin of each of ``ropes``."""
    probe = torch.zeros((), dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)
    ids = torch.arange(positions, device=model.device)[None]
    if hasattr(model.model.rotary_emb, "mrope_section"):  # a position in time, height and width: one number for text
        ids = ids.expand(3, -1, -1)
    found = {}
    for kind in ropes:
        cos, sin = model.model.rotary_emb(probe, ids, *(() if kind is None else (kind,)))
        found[kind] = family.rotary_table(cos)[0].contiguous(), family.rotary_table(sin)[0].contiguous()
    return found


def _layer(
    number: int,
    layer: Any,
    family: Family,
    tables: dict[str | None, tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    multiplier: float | None,
) -> LayerWeights:
    before, of_attention, between, of_mlp = (name and getattr(layer, name) for name in family.norms)
    scalar = getattr(layer, "layer_scalar", None)
    with _naming(f"model.layers.{number}.self_attn"):
        attention = _attention(layer.self_attn, family, tables, dtype)
    return LayerWeights(
        attention_norm=NoNorm() if before is None else _any_norm(before, family),
        attention=attention,
        attention_out_norm=None if of_attention is None else _norm(of_attention, family),
        mlp_norm=NoNorm() if between is None else _any_norm(between, family),
        mlp=_mlp(f"model.layers.{number}.mlp", layer.mlp, dtype),
        mlp_out_norm=None if of_mlp is None else _norm(of_mlp, family),
        parallel=family.parallel,
        multiplier=multiplier,
        scalar=None if scalar is None else getattr(scalar, "weight", scalar).detach(),
    )


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Errors from within say ``path`` first."""
    try:
        yield
    except UnsupportedProblem as error:
        raise UnsupportedProblem(f"{path}: {error}") from error


def _attention(
    attention: Any, family: Family, tables: dict[str | None, tuple[Tensor, Tensor]], dtype: torch.dtype
) -> Attention:
    if not attention.is_causal:
        raise UnsupportedProblem(
            f"Decoder's tokens see earlier ones alone; this model has use_bidirectional_attention: {REMEDY}"
        )
    window = family.window_of(attention)
    cos: Tensor | None
    sin: Tensor | None
    cos, sin = tables[None if None in tables else attention.layer_type]
    if not family.turns(attention):
        cos = sin = None
    keys_alone = getattr(attention, "v_proj", attention) is None or getattr(attention, "keys_alone", False)
    return Attention(
        qkv=_join(attention, dtype, "qkv_proj", "q_proj", "k_proj", *(() if keys_alone else ("v_proj",))),
        q_norm=_norm(attention.q_norm, family) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm, family) if hasattr(attention, "k_norm") else None,
        v_norm=_norm(attention.v_norm, family) if hasattr(attention, "v_norm") else None,
        keys_alone=keys_alone,
        whole_norms=family.whole_norms,
        out=_projection(attention.o_proj, dtype),
        cos=cos,
        sin=sin,
        interleaved=family.interleaved,
        options={
            "scale": attention.scaling,
            "softcap": family.softcap_of(attention),
            "window": None if window is None else (window - 1, None),
            **({"sinks": attention.sinks.weight.detach()} if hasattr(attention, "sinks") else {}),
        },
    )


def _mlp(path: str, mlp: Any, dtype: torch.dtype) -> MlpWeights | PlainMlpWeights | MoE | SharedMoE | Experts:
    if isinstance(getattr(mlp, "routed", None), Routed):
        return _with_shared(mlp, _experts(mlp, mlp.routed, dtype), dtype)
    if hasattr(mlp, "experts"):
        with _naming(f"{path}.experts"):
            packed = quantized_experts(mlp.experts, dtype)
        if packed is not None and type(mlp).__name__ in (*_SOFTMAX, *SIGMOID):
            return _with_shared(mlp, Experts(_router(mlp.gate, type(mlp).__name__ in SIGMOID), *packed, {}), dtype)
        try:
            apart = hasattr(mlp, "shared_expert_gate") or type(mlp).__name__ in SIGMOID
            routed = MoE.routed_part(mlp) if apart else MoE.from_transformers(mlp)
        except UnsupportedProblem as error:
            raise UnsupportedProblem(f"Decoder runs experts as nn.MoE does. {error}, and {REMEDY}") from error
        return _with_shared(mlp, routed, dtype)
    with _naming(path):
        if hasattr(mlp, "c_fc"):
            return PlainMlpWeights(_projection(mlp.c_fc, dtype), _gate(mlp), _projection(mlp.c_proj, dtype))
        return _gated_mlp(mlp, dtype)


def _router(gate: Any, sigmoid: bool) -> Softmax | Sigmoid:
    """The router of a block of transformers whose experts are packed."""
    renormalize = bool(getattr(gate, "norm_topk_prob", True))
    if not sigmoid:
        return Softmax(Projection(gate.weight.detach(), None), gate.top_k, renormalize)
    options = {
        "top_k": gate.top_k, "renormalize": renormalize, "scaling": float(gate.routed_scaling_factor),
        "groups": (gate.num_group, gate.topk_group),
    }  # fmt: skip
    return Sigmoid(gate.weight.detach(), gate.e_score_correction_bias, options)


def _with_shared(mlp: Any, routed: MoE | Experts, dtype: torch.dtype) -> MoE | SharedMoE | Experts:
    """``routed`` beside the experts that every token has, where ``mlp`` has such."""
    if hasattr(mlp, "shared_expert_gate"):
        return SharedMoE(routed, _gated_mlp(mlp.shared_expert, dtype), _projection(mlp.shared_expert_gate, dtype))
    if hasattr(mlp, "shared_experts"):
        return SharedMoE(routed, _gated_mlp(mlp.shared_experts, dtype), None)
    return routed


def _experts(mlp: Any, routed: Routed, dtype: torch.dtype) -> Experts:
    """Experts of a loaded model: the rows of all lie one behind the other."""

    def stack(module: Any) -> Tensor | QuantizedStack:
        weight = _projection(module, dtype).weight
        if isinstance(weight, QuantizedWeight):
            return QuantizedStack(weight, routed.experts)
        dense: Tensor = weight.unflatten(0, (routed.experts, -1))
        return dense

    gate_up, down = stack(mlp.experts.gate_up_proj), stack(mlp.experts.down_proj)
    if gate_up.shape[1] != 2 * down.shape[2]:
        raise UnsupportedProblem(
            f"an expert of {down.shape[2]} columns in down_proj has {2 * down.shape[2]} rows in gate_proj and up_proj, "
            f"not {gate_up.shape[1]}; where a width that fills no tile of 64 is padded, quantize all three or none"
        )
    biases = [m.bias for m in (mlp.experts.gate_up_proj, mlp.experts.down_proj)]
    of_up, of_down = (None if bias is None else bias.detach().unflatten(0, (routed.experts, -1)) for bias in biases)
    options = {"gate_up_bias": of_up, "down_bias": of_down, "activation": routed.activation, "limit": routed.limit}
    if routed.sigmoid is None:
        return Experts(Softmax(_projection(mlp.gate, dtype), routed.top_k, routed.renormalize), gate_up, down, options)
    chosen: dict[str, Any] = {
        "top_k": routed.top_k, "renormalize": routed.renormalize, "scaling": routed.sigmoid.scaling,
        "groups": routed.sigmoid.groups,
    }  # fmt: skip
    return Experts(Sigmoid(mlp.gate.weight.detach(), mlp.correction.weight, chosen), gate_up, down, options)


def _gated_mlp(mlp: Any, dtype: torch.dtype) -> MlpWeights:
    gate_up = _join(mlp, dtype, "gate_up_proj", "gate_proj", "up_proj")
    return MlpWeights(gate_up, _gate(mlp), _projection(mlp.down_proj, dtype))


def _gate(mlp: Any) -> Gate:
    act = activation_of(mlp)
    gate = gate_of(act)
    if gate is None:
        raise UnsupportedProblem(f"Decoder has the gates of SiLU and GELU; one is {type(act).__name__}: {REMEDY}")
    return gate


def _any_norm(norm: Any, family: Family) -> NormWeights | LayerNorm:
    if not family.layer_norm:
        return _norm(norm, family)
    bias = getattr(norm, "bias", None)
    return LayerNorm(norm.weight.detach(), None if bias is None else bias.detach(), family.norm_options(norm))


def _norm(norm: Any, family: Family) -> NormWeights:
    weight = getattr(norm, "weight", None)
    return NormWeights(None if weight is None else weight.detach(), family.norm_options(norm))


def _projection(linear: Any, dtype: torch.dtype) -> Projection:
    weight: Tensor | QuantizedWeight | None = quantized_weight(linear, dtype)
    if weight is None:
        weight = linear.weight.detach() if isinstance(linear.weight, Tensor) else linear.weight
    assert weight is not None
    return Projection(weight, None if linear.bias is None else linear.bias.detach())


def _join(module: Any, dtype: torch.dtype, whole: str, *names: str) -> Projection | Projections:
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
