"""``LoadedModel``: a checkpoint's weights under the names by which the decoder reads a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from cutekernels.integrations.transformers.families import FAMILIES
from cutekernels.models.architectures import ARCHITECTURES, LayerPart
from cutekernels.models.config import DecoderConfig
from cutekernels.models.ropes import frequencies
from cutekernels.nn import quantized
from cutekernels.nn.mlp import Gate
from cutekernels.quant import QuantizedWeight

_ACTIVATIONS: dict[Gate, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
}


class Weighted(nn.Module):
    """A projection, a norm or an embedding: ``weight``, and ``bias`` or None. Nothing calls it.

    ``weight`` is a parameter, or a :class:`cutekernels.quant.QuantizedWeight`, which is moved, saved and loaded as
    :class:`cutekernels.nn.QuantizedLinear` does it: of several that were joined, in this package's own format.
    """

    weight: Any
    bias: Tensor | None
    embed_scale: Tensor | None
    variance_epsilon: float

    def __init__(self, shape: tuple[int, ...], bias: bool, dtype: torch.dtype, wide: bool = False) -> None:
        """``wide``: in fp32, in a buffer, as transformers has the corrections of routers."""
        super().__init__()
        self.bias, self._wide = None, wide
        dtype = torch.float32 if wide else dtype
        self.put("weight", torch.empty(shape, dtype=dtype, device="meta"))
        if bias:
            self.put("bias", torch.empty(shape[:1], dtype=dtype, device="meta"))

    def put(self, kind: str, value: Any) -> None:
        """Take ``value`` in the place of what was here; ``kind`` is "weight" or "bias"."""
        if self._wide:
            self.register_buffer(kind, value)
            return
        self._parameters.pop(kind, None)
        setattr(self, kind, nn.Parameter(value, requires_grad=False) if isinstance(value, Tensor) else value)

    def extra_repr(self) -> str:
        bias = "" if self.bias is None else ", bias"
        shown = f"{tuple(self.weight.shape)}" if isinstance(self.weight, Tensor) else f"{self.weight}"
        return f"{shown}{bias}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Weighted:
        """Moves a quantized weight too; another type is that of its products, and nothing that is stored changes."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if isinstance(self.weight, QuantizedWeight):
            self.weight = quantized.applied(self.weight, fn)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(self.weight, QuantizedWeight):
            quantized.save(self.weight, destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if isinstance(self.weight, QuantizedWeight):
            assign = bool(local_metadata.get("assign_to_params_buffers", False))
            found = quantized.loaded(self.weight, state_dict, prefix, assign, strict, missing_keys, error_msgs)
            self.weight = self.weight if found is None else found
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class Apart(nn.Module):
    """Projections of one input that one product cannot serve: quantized in different ways, say."""

    def __init__(self, parts: Sequence[Weighted]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


class Rotary(nn.Module):
    """Cosines and sines, called as transformers' modules are: ``(x, positions)``, or with a type of layer behind."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._ropes, self._dim = config.rope_parameters, config.rotary_dim
        self._table = FAMILIES[config.model_type].table

    def forward(self, x: Tensor, positions: Tensor, kind: str | None = None) -> tuple[Tensor, Tensor]:
        own = self._ropes if kind is None else self._ropes[kind]
        turns, factor = frequencies(own, self._dim)
        angles = positions[..., None].float() * turns.to(x.device)
        if self._table != "once":
            twice = self._table == "twice"
            angles = angles.repeat_interleave(2, dim=-1) if twice else torch.cat((angles, angles), dim=-1)
        return (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)


class LoadedModel(nn.Module):
    """The result of :func:`load`: a model that a ``Decoder`` takes, and that nothing calls.

    Attributes:
        config: what of ``config.json`` decides what is computed; ``config.raw`` has all of it.
        generation_config: ``eos_token_id``, or None where there was no ``generation_config.json``.
    """

    def __init__(self, config: DecoderConfig, generation: dict[str, Any] | None, dtype: torch.dtype) -> None:
        """Its weights are on the meta device, to be put in place one by one."""
        super().__init__()
        self.config = config
        self.generation_config = None
        if generation is not None:
            self.generation_config = SimpleNamespace(eos_token_id=generation.get("eos_token_id"))
        architecture = ARCHITECTURES[config.model_type]
        self.model, sizes = nn.Module(), config.sizes()
        self.model.layers = nn.ModuleList(self._layer(i) for i in range(config.num_hidden_layers))
        self.model.rotary_emb = Rotary(config)
        self._parts: dict[str, LayerPart] = {part.path: part for part in architecture.body}
        for i in range(config.num_hidden_layers):
            self._parts |= {f"model.layers.{i}.{part.path}": part for part in config.parts(i)}
        for path, part in self._parts.items():
            rows = sum(sizes[one] for one in part.rows)
            if part.tensor.endswith("_"):  # of all experts
                rows *= sizes["experts"]
            shape = (rows, *([] if part.columns is None else [sizes[part.columns]]))
            module = Weighted(shape, config.has_bias(part), dtype, part.wide)
            if part.columns is None:
                module.variance_epsilon = config.rms_norm_eps
            parent, _, name = path.rpartition(".")
            setattr(self.get_submodule(parent), name, module)
        if config.embed_scale is not None:
            scale = torch.tensor(config.embed_scale, dtype=dtype, device="cpu")
            self.model.embed_tokens.register_buffer("embed_scale", scale, persistent=False)  # type: ignore[union-attr]

    @property
    def parts(self) -> dict[str, LayerPart]:
        """Every module with weights, by its path."""
        return self._parts

    @property
    def device(self) -> torch.device:
        return self._table.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations, and of every weight that is not quantized."""
        return self._table.dtype

    @property
    def _table(self) -> Tensor:
        found = self.model.embed_tokens.weight  # type: ignore[union-attr]
        assert isinstance(found, Tensor)
        return found

    def extra_repr(self) -> str:
        c = self.config
        return f"{c.model_type}, {c.num_hidden_layers} layers of {c.hidden_size}, {self.dtype} on {self.device}"

    def _layer(self, index: int) -> nn.Module:
        """One layer without its weights."""
        config = self.config
        attention, mlp, layer = nn.Module(), nn.Module(), nn.Module()
        own: dict[str, Any] = {
            "is_causal": config.is_causal,
            "head_dim": config.head_dim,
            "layer_type": None if config.layer_types is None else config.layer_types[index],
            "sliding_window": config.sliding_window if config.is_sliding(index) else None,
            "scaling": config.scaling,
            "use_rope": config.turning is None or config.turning[index],
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "keys_alone": config.has_keys_alone(index),
        }
        for name, value in own.items():
            setattr(attention, name, value)
        if FAMILIES[config.model_type].shares_keys:
            attention.v_norm = SimpleNamespace(eps=config.rms_norm_eps)  # type: ignore[assignment]
        mlp.act_fn = _ACTIVATIONS[config.gate]()
        routed = config.routed_at(index)
        if routed is not None:
            mlp.routed, mlp.experts = routed, nn.Module()  # type: ignore[assignment]
            if routed.shared:
                mlp.shared_experts = nn.Module()
                mlp.shared_experts.act_fn = mlp.act_fn
        layer.self_attn, layer.mlp = attention, mlp
        return layer
