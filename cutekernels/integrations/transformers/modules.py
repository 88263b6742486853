"""Transformers' layers with our kernels: each class here is put in front of a layer's own class.

A patched module keeps its parameters, buffers, hooks and name; only its class changes, to a subclass of the original.
"""

from __future__ import annotations

import functools
import inspect
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.attention import register_attention
from cutekernels.integrations.transformers.families import Family, activation_of, gate_of
from cutekernels.integrations.transformers.outputs import output_of, without_logits
from cutekernels.integrations.transformers.projections import (
    is_linear,
    is_parametrized,
    kind_of,
    multiplied,
    parameter,
    sharded,
    whole,
)
from cutekernels.integrations.transformers.turns import turning_forward
from cutekernels.nn import packed_training
from cutekernels.nn.mlp import Gate, gate_mul, gated, has_no_hooks, project
from cutekernels.nn.packing import side_by_side
from cutekernels.ops.linear import linear
from cutekernels.ops.loss.cross_entropy import linear_cross_entropy
from cutekernels.ops.norms.api import add_rms_norm, layer_norm, rms_norm, rms_norm_beside

# ---- classes that change places -------------------------------------------------------------------------


class Patched:
    """A module whose class was swapped; ``original`` is the one it had, ``family`` its conventions."""

    original: type
    family: Family

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the two classes that this one is made of."""
        swapped_class = next(base for base in type(self).__mro__ if "original" in vars(base))
        return _rebuilt, (swapped_class.__bases__[0], self.original, self.family), self.__getstate__()


@cache
def swapped(mixin: Any, original: type, family: Family) -> Any:
    """The class of a patched ``original``."""
    own: dict[str, Any] = {"original": original, "family": family, "__module__": __name__}
    if family.mlp:
        own["names"] = family.mlp
        if issubclass(mixin, PackedMlp):
            own["parts"] = family.mlp[:2]
    if issubclass(mixin, Turned):
        own["forward"] = turning_forward(original, family)
    if issubclass(mixin, CausalLM):
        theirs: Any = original
        own["forward"] = _signed(mixin.forward, theirs.forward)
        own["taken"] = tuple(inspect.signature(theirs.forward).parameters)[1:]
        kind = output_of(theirs)
        own["of_experts"] = "router_logits" in kind.__dataclass_fields__
        own["output"] = without_logits(kind)
    return type(original.__name__, (mixin, original), own)


def _signed(forward: Any, original: Any) -> Any:
    """``forward`` under the signature of ``original``, off which trainers read what a model takes."""

    @functools.wraps(original, assigned=("__name__", "__doc__", "__annotations__"))
    def signed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return signed


def unswapped(cls: Any) -> Any:
    """``cls`` with the original in the place of the class that :func:`swapped` made.

    Parametrizations and FSDP derive classes from a patched one, which are made anew on the original.

    Raises:
        UnsupportedProblem: a derived class whose methods call ``super()``, which binds them to the class as it is.
    """
    if not issubclass(cls, Patched):
        return cls
    if "original" in vars(cls):
        return cls.original
    for name, method in vars(cls).items():
        function = getattr(method, "__func__", None) or getattr(method, "fget", None) or method
        if "__class__" in getattr(getattr(function, "__code__", None), "co_freevars", ()):
            raise UnsupportedProblem(
                f"unpatch cannot move a class whose methods call super() onto another base; {cls.__qualname__}.{name} "
                f"does: set the module's __class__ back to {cls.__bases__[-1].__qualname__}, as patch left it, first"
            )
    left_out, forward = {"__dict__", "__weakref__"}, vars(cls).get("forward")
    if getattr(forward, "__globals__", {}).get("__name__") == "transformers.modeling_layers":
        left_out.add("forward")  # a wrapper of what is inherited, which each class of its layers gets
    own = {name: value for name, value in vars(cls).items() if name not in left_out}
    return type(cls)(cls.__name__, tuple(map(unswapped, cls.__bases__)), own)


def _rebuilt(mixin: type, original: type, family: Family) -> Any:
    register_attention()  # a model comes with its attention's name, maybe to another process
    cls = swapped(mixin, original, family)
    return cls.__new__(cls)


# ---- projections that share an input --------------------------------------------------------------------


class Fused(Patched):
    """A module whose projections of one input lie in the memory of one tensor.

    Attributes:
        parts: the projections' names.
        packed: ``(weight, bias or None)`` of all of them, or None where they cannot be packed.
        sources: the projections that were packed: adapters put others in their place.
        views: ``(projection, "weight" or "bias", parameter or None, address)`` of what was packed.
        shared: whether another module has one of the weights too, which then cannot lie in two places.
    """

    parts: tuple[str, ...] = ()
    packed: tuple[Tensor, Tensor | None] | None = None
    sources: tuple[torch.nn.Linear, ...] = ()
    views: tuple[tuple[torch.nn.Linear, str, Tensor | None, int], ...] = ()
    shared: bool = False

    def pack(self) -> str:
        """Move the projections' parameters side by side. Returns why not, or ""."""
        linears = [getattr(self, name) for name in self.parts]
        reason = "its weights belong to other modules too" if self.shared else _apart(linears)
        if reason:
            self.packed, self.sources, self.views = None, (), ()
        else:
            self.packed = _together(linears, "weight"), _together(linears, "bias")  # type: ignore[assignment]
            self.sources = tuple(linears)
            kept = [(x, kind, getattr(x, kind)) for x in linears for kind in ("weight", "bias")]
            self.views = tuple((x, kind, p, 0 if p is None else p.data_ptr()) for x, kind, p in kept)
        return reason

    def fused(self) -> tuple[Tensor, Tensor | None] | None:
        """The packed parameters, where one product with them does what the projections would do.

        Where gradients of parameters are taken, that is a product of ``packed_training``, which autocast cannot have.
        """
        if self.packed is None:
            return None
        traced = torch.compiler.is_compiling()
        grads = torch.is_grad_enabled() and torch.is_autocast_enabled(self.packed[0].device.type)
        if any(map(sharded, self.sources)):
            return None if traced or self.pack() else self.packed  # lets go of the memory that FSDP has copied
        modules: Any = self._modules  # type: ignore[attr-defined]
        for name, source in zip(self.parts, self.sources, strict=True):
            if modules.get(name) is not source or not has_no_hooks(source) or is_parametrized(source):
                return None
        for source, kind, p, address in self.views:
            if grads and p is not None and p.requires_grad:
                return None
            moved = p is not None and not traced and p.data_ptr() != address
            now = parameter(source, kind)
            if now is not p or moved:  # it has been replaced, for this call alone where it is no parameter
                passing = now is not p and not isinstance(now, torch.nn.Parameter)
                return None if traced or passing or self.pack() else self.fused()
        return self.packed

    def trained(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]] | None:
        """The packed weights and biases as parameters, where autograd records a product of ``x`` with them: frozen ones
        too, whose memory it then watches for changes. None under autocast, where no parameter trains.
        """
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return None
        if not x.requires_grad and not any(p is not None and p.requires_grad for _, _, p, _ in self.views):
            return None
        weights = [p for _, kind, p, _ in self.views if p is not None and kind == "weight"]
        return weights, [p for _, kind, p, _ in self.views if p is not None and kind == "bias"]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``half`` and their like give each parameter memory of its own."""
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        self.pack()
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("packed", "sources", "views")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self.pack()


def _apart(linears: list[Any]) -> str:
    """Why projections cannot be packed, or ""."""
    if not all(issubclass(getattr(type(x), "original", type(x)), torch.nn.Linear) for x in linears):
        return f"its projections are of {', '.join(sorted({kind_of(type(x)) for x in linears}))}"
    if any(getattr(type(x), "original", type(x)) is not torch.nn.Linear for x in linears):
        return "its projections are subclasses of Linear"
    if any(hasattr(getattr(x, "weight", None), "placements") for x in linears):
        return "its projections are sharded as DTensors, each a product of its own"
    if not all(map(has_no_hooks, linears)):
        return "its projections have hooks"
    weights = [x._parameters.get("weight") for x in linears]
    if any(type(w) is not torch.nn.Parameter or w.is_meta or w.dim() != 2 for w in weights):
        return "its weights are no plain parameters"
    if any(map(sharded, linears)):
        return "its projections are sharded by FSDP"
    if any(x.weight.device.type == "cpu" and x.weight.is_shared() for x in linears):
        return "its weights are in memory shared with other processes"
    alike = {(x.weight.dtype, x.weight.device, x.in_features, x.weight.requires_grad, x.bias is None) for x in linears}
    if len(alike) > 1:
        return "its projections differ in dtype, device, bias or requires_grad"
    return ""


def _together(linears: list[Any], name: str) -> Tensor | None:
    parts = [getattr(x, name) for x in linears]
    return None if parts[0] is None else side_by_side(parts)


# ---- layers ---------------------------------------------------------------------------------------------


class Norm(Patched):
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """The norm, rounded as the original rounds."""
        weight = parameter(self, "weight")
        if x.dtype != weight.dtype:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        return rms_norm(x, weight, **self.family.norm_options(self))


class GatedNorm(Norm):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """The norm, multiplied by ``silu(gate)`` in fp32."""
        me: Any = self
        weight = parameter(me, "weight")
        if hidden_states.dtype != weight.dtype:
            return super(Norm, self).forward(hidden_states, gate)  # type: ignore[misc, no-any-return]
        normed = rms_norm(hidden_states, weight, eps=me.variance_epsilon, rounding="huggingface")
        return (normed * torch.nn.functional.silu(gate.float())).to(normed.dtype)


class LayerNorm(Patched):
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """The norm, rounded once."""
        me: Any = self
        weight = parameter(me, "weight")
        if x.dtype != weight.dtype:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        return layer_norm(x, weight, me._parameters.get("bias"), **self.family.norm_options(self))


class Linear(Patched):
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        weight = parameter(self, "weight")
        if not multiplied(x, weight):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        return project(x, weight, parameter(self, "bias"), name="Linear")


def own_gate(mlp: Any) -> Gate | None:
    """The gate that an MLP's activation is, unless it has been replaced by another or hooked."""
    if mlp.family.gate is not None:
        return mlp.family.gate  # type: ignore[no-any-return]
    activation = activation_of(mlp)
    hooked = isinstance(activation, torch.nn.Module) and not has_no_hooks(activation)
    return None if hooked else gate_of(activation)


class Mlp(Patched):
    """A gated MLP whose gate and up are one projection. ``names``: of the projections."""

    names: tuple[str, ...] = ("gate_up_proj", "down_proj")

    def forward(self, x: Tensor) -> Tensor:
        """``down(act(gate(x)) * up(x))``."""
        me: Any = self
        gate, gate_up = own_gate(me), getattr(me, self.names[0])
        if gate is None:  # the activation has been replaced: patch leaves such modules alone
            return super().forward(x)  # type: ignore[misc, no-any-return]
        if whole(gate_up, x):
            hidden = gated(x, parameter(gate_up, "weight"), parameter(gate_up, "bias"), gate, name="Mlp")
        else:
            hidden = gate_mul(gate, gate_up(x))
        return getattr(me, self.names[1])(hidden)  # type: ignore[no-any-return]


class PlainMlp(Patched):
    """An MLP without a gate. ``names``: of the projections."""

    names: tuple[str, ...] = ("c_fc", "c_proj")

    def forward(self, x: Tensor) -> Tensor:
        """``c_proj(act(c_fc(x)))``."""
        me: Any = self
        activation, up = own_gate(me), getattr(me, self.names[0])
        if activation is None or not whole(up, x):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        hidden = linear(x, parameter(up, "weight"), parameter(up, "bias"), activation=activation)
        return getattr(me, self.names[1])(hidden)  # type: ignore[no-any-return]


class PackedMlp(Fused, Mlp):
    """A gated MLP whose gate and up are projections of their own."""

    names = ("gate_proj", "up_proj", "down_proj")
    parts = ("gate_proj", "up_proj")

    def forward(self, x: Tensor) -> Tensor:
        """``down(act(gate(x)) * up(x))``."""
        me: Any = self
        fused, gate = self.fused(), own_gate(me)
        first, second, last = (me._modules[name] for name in self.names)
        if gate is None:
            return super(Mlp, self).forward(x)  # type: ignore[misc, no-any-return]
        if fused is None or not multiplied(x, fused[0]):
            hidden = gate_mul(gate, first(x), second(x))
        elif (trained := self.trained(x)) is None:
            hidden = gated(x, *fused, gate, name="Mlp")
        elif not trained[1] and last.bias is None and whole(last, x):
            (gate_weight, up_weight), down = trained[0], last.weight
            return packed_training.mlp(x, gate, fused[0], gate_weight, up_weight, down)  # type: ignore[no-any-return]
        else:
            hidden = gate_mul(gate, packed_training.projections(x, *fused, *trained))
        return last(hidden)  # type: ignore[no-any-return]


class Attention(Patched):
    """Attention whose q, k and v are one projection."""

    head_dim: int

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Projections, norms of q and k, rotary embedding, cache, attention, output projection.

        The cache is called ``past_key_values`` before transformers 5.24.
        """
        me: Any = self
        names: Any = sys.modules[self.original.__module__]
        shape, family = hidden_states.shape[:-1], self.family
        cache = past_key_values if cache is None else cache
        q, k, v, gate = self.operands(hidden_states, position_embeddings, cache, kwargs)
        attend = names.ALL_ATTENTION_FUNCTIONS.get_interface(
            me.config._attn_implementation, names.eager_attention_forward
        )
        if family.sinks:
            kwargs["s_aux"] = parameter(me, "sinks")
        out, weights = attend(
            self, q, k, v, attention_mask, dropout=me.attention_dropout if me.training else 0.0, scaling=me.scaling,
            sliding_window=family.window_of(me), softcap=family.softcap_of(me), position_ids=position_ids, **kwargs,
        )  # fmt: skip
        out = out.reshape(*shape, -1)
        return me.o_proj(out if gate is None else out * torch.sigmoid(gate.reshape(*shape, -1))), weights

    def operands(self, x: Tensor, tables: tuple[Tensor, Tensor], cache: Any, options: dict[str, Any]) -> Any:
        """Queries, keys and values ``(B, H, S, D)``, all that the cache has, and logits of the output gate or None."""
        me: Any = self
        family, shape, gate = self.family, x.shape[:-1], None
        q, k, v = self.query_key_value(x)
        if family.output_gate:
            q, gate = q.view(*shape, -1, 2 * me.head_dim).chunk(2, dim=-1)
        if family.whole_norms:
            q, k = me.q_norm(q), me.k_norm(k)
        q, k, v = (t.view(*shape, -1, me.head_dim) for t in (q, k, v))
        if "q_norm" in me._modules and not family.whole_norms:
            q, k = me.q_norm(q), me.k_norm(k)
        if family.turns(me):
            q, k = family.turned(q, k, *tables)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v, me.layer_idx)
        return q, k, v, gate

    def query_key_value(self, x: Tensor) -> Any:
        """The projections of ``x`` ``(B, S, H)``."""
        me: Any = self
        query, key = (n * me.head_dim for n in (me.config.num_attention_heads, me.config.num_key_value_heads))
        return me.qkv_proj(x).split((query, key, key), dim=-1)


class PackedAttention(Fused, Attention):
    """Attention whose q, k and v are projections of their own."""

    parts = ("q_proj", "k_proj", "v_proj")

    def query_key_value(self, x: Tensor) -> Any:
        """The projections of ``x`` ``(B, S, H)``."""
        fused = self.fused()
        if fused is None or not multiplied(x, fused[0]):
            return [getattr(self, name)(x) for name in self.parts]
        if (trained := self.trained(x)) is None:
            sizes = [source.out_features for source in self.sources]
            return project(x, *fused, name="Attention").split(sizes, dim=-1)
        sizes = [len(weight) for weight in trained[0]]
        return packed_training.projections(x, *fused, *trained).split(sizes, dim=-1)


class Turned(Patched):
    """An attention layer of which our kernels compute the rotary embedding alone, in its own forward."""


class Layer(Patched):
    """A decoder layer that adds the residual and takes the norm before the MLP in one pass."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        me: Any = self
        normed, residual = norm_with_sum(hidden_states, None, me.input_layernorm)
        attended, _ = me.self_attn(hidden_states=normed, **kwargs)
        attended = drop(me, "resid_attn_dropout", attended)
        normed, residual = norm_with_sum(attended, residual, me.post_attention_layernorm)
        out = me.mlp(normed)
        out = out[0] if type(out) is tuple else out  # gpt-oss: router's
        return residual + drop(me, "resid_mlp_dropout", out)


def drop(layer: Any, name: str, x: Tensor) -> Tensor:
    """``x`` behind the dropout of that name, where the layer has one (Phi-3) that does anything."""
    module = layer._modules.get(name)
    if module is None or (type(module) is Dropout and has_no_hooks(module) and not (module.training and module.p)):
        return x
    return module(x)  # type: ignore[no-any-return]


class ScaledLayer(Patched):
    """The same where attention's and the MLP's results are multiplied before they are added."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        me: Any = self
        normed, residual = norm_with_sum(hidden_states, None, me.input_layernorm)
        attended, _ = me.self_attn(hidden_states=normed, **kwargs)
        scaled = attended * me.residual_multiplier
        normed, residual = norm_with_sum(scaled, residual, me.post_attention_layernorm)
        return residual + me.mlp(normed) * me.residual_multiplier  # type: ignore[no-any-return]


class SandwichLayer(Patched):
    """The same where attention's and the MLP's results are normed before they are added."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        me: Any = self
        before, of_attention, between, of_mlp = (getattr(me, str(name)) for name in self.family.norms)
        normed, residual = norm_with_sum(hidden_states, None, before)
        attended, _ = me.self_attn(hidden_states=normed, **kwargs)
        normed, residual = norm_with_sum(of_attention(attended), residual, between)
        return residual + of_mlp(me.mlp(normed))  # type: ignore[no-any-return]


class CausalLM(Patched):
    """A language model that trains without logits: with labels, its loss is ``linear_cross_entropy`` of the head.

    Attributes:
        taken: the names of its forward's arguments.
        of_experts: whether its outputs have those of routers.
        output: the class of outputs that have no logits.
    """

    taken: tuple[str, ...]
    of_experts: bool
    output: Any

    def forward(self, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        """The original's results. ``skip_logits``: whether they come without logits where there are labels; by default
        in training.
        """
        me: Any = self
        kwargs.update(zip(self.taken, args, strict=False))
        skips = me.training if skip_logits is None else skip_logits
        if kwargs.get("labels") is None or not skips or self._why_logits(kwargs):
            return super().forward(**kwargs)  # type: ignore[misc]
        labels, as_dict = kwargs.pop("labels"), kwargs.pop("return_dict", None)
        kwargs.pop("logits_to_keep", None)
        names: Any = sys.modules[self.original.__module__]
        routed = kwargs.get("output_router_logits")
        if self.of_experts:
            routed = getattr(me.config, "output_router_logits", False) if routed is None else routed
            kwargs["output_router_logits"] = routed
        outputs = body_of(me)(**kwargs)
        shifted = kwargs.get("shift_labels")
        if shifted is None:  # the target of each token is the next one's label
            shifted = torch.nn.functional.pad(labels, (0, 1), value=kwargs.get("ignore_index", -100))[..., 1:]
        head, x = me.get_output_embeddings(), outputs.last_hidden_state
        items, scaling = kwargs.get("num_items_in_batch"), self.family.logits_scaling_of(me.config)
        loss = linear_cross_entropy(
            x, head.weight, shifted.to(x.device), head.bias, softcap=self.family.logit_softcap_of(me.config),
            ignore_index=kwargs.get("ignore_index", -100), num_items_in_batch=items,
            temperature=1.0 if scaling is None else scaling,
        )  # fmt: skip
        own: dict[str, Any] = {name: getattr(outputs, name, None) for name in self.output.__dataclass_fields__}
        if routed and hasattr(names, "load_balancing_loss_func"):
            own["aux_loss"] = names.load_balancing_loss_func(
                outputs.router_logits, me.num_experts, me.num_experts_per_tok, kwargs.get("attention_mask")
            )
            loss = loss + me.router_aux_loss_coef * own["aux_loss"].to(loss.device)
        made = self.output(**own | {"loss": loss, "logits": None})
        return made if (me.config.return_dict if as_dict is None else as_dict) else made.to_tuple()

    def _why_logits(self, given: dict[str, Any]) -> str:
        """Why the loss needs logits, or ""."""
        me: Any = self
        head = me.get_output_embeddings()
        keep = given.get("logits_to_keep", 0)
        if not isinstance(keep, int) or keep:
            return "some logits are asked for"
        if getattr(me.loss_function, "__name__", "") != "ForCausalLMLoss":
            return "the model has a loss of its own"
        routed = given.get("output_router_logits")
        if not self.family.prefix and (getattr(me.config, "output_router_logits", False) if routed is None else routed):
            return "routers have a share in it"
        if not is_linear(head):
            return "its head is no plain Linear, or has hooks"
        if type(head.weight) is not torch.nn.Parameter or head.weight.dim() != 2:
            return "its head's weight is no plain parameter (sharded, say)"
        scaling = self.family.logits_scaling_of(me.config)
        if scaling is not None and not scaling > 0:
            return "its logits are divided by no positive number"
        body = next(body_of(me).parameters())
        lowered = torch.is_autocast_enabled(body.device.type)
        if not lowered and (body.dtype != head.weight.dtype or not multiplied(head.weight, head.weight)):
            return "no kernel multiplies its head's type"
        return ""


def body_of(model: Any) -> Any:
    """The part of a model in front of its head; the model itself where transformers knows none."""
    found = model.base_model
    return getattr(model, "model", model) if found is model else found  # Llama 4's prefix names no part of it


def norm_with_sum(x: Tensor, residual: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """``(norm(x + residual), x + residual)``, or without a residual ``(norm(x), x)``: gradients meet in the norm's."""
    if isinstance(norm, Norm) and has_no_hooks(norm):
        weight = parameter(norm, "weight")
        if residual is not None and x.dtype == residual.dtype == weight.dtype:
            return add_rms_norm(x, residual, weight, **norm.family.norm_options(norm))
        if residual is None and x.dtype == weight.dtype and torch.is_grad_enabled():
            return rms_norm_beside(x, weight, **norm.family.norm_options(norm))  # type: ignore[no-any-return]
    total = x if residual is None else residual + x
    return norm(total), total
