"""Attention and the loss of a model that no row of ``families.py`` names, for ``patch``.

Attention that transformers dispatches by name, and the loss that a head gives with labels, are compared in calls of the
model itself: attention on the queries, keys and masks of each layer, in training and out of it; the loss on random
hidden states. Where one differs it stays the model's own.
"""

from __future__ import annotations

import copy
import inspect
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutekernels.integrations.transformers import attention, modules
from cutekernels.integrations.transformers.families import Family
from cutekernels.integrations.transformers.outputs import output_of
from cutekernels.integrations.transformers.projections import sharded
from cutekernels.integrations.transformers.structure import (
    UNKNOWN,
    attempt,
    difference,
    drawing_nothing,
    relative,
    tolerance,
)

_COMPARED = "cutekernels_compared"  # the name of attention under which both run
NO_MODEL = "the model is none of transformers; cutekernels.route_sdpa() takes calls of scaled_dot_product_attention"
_NOT_BY_NAME = "transformers does not dispatch it by name in this model"
_LARGEST = 30.0  # scores at which softcaps and clamps count
_TOKENS = 12
# What a config may say of logits, and the convention of families.py that reads it.
_HEADS = {"final_logit_softcapping": "logit_softcap", "logit_scale": "logit_scale", "logits_scaling": "multipliers"}


def decoder_of(model: Any) -> Any:
    """The part of a model of transformers that has its text's attention: itself, where no part has a config for it."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else model
    apart = hasattr(type(found), "set_attn_implementation") and found.config is not model.config
    return found if apart else model


def _unseen(model: Any) -> str:
    """Why a model cannot be called to compare it, or "": where weights are sharded, every rank would have to."""
    if any(p.is_meta for p in model.parameters()):
        return "the model has weights on the meta device, where nothing can be compared"
    if any(map(sharded, model.modules())) or any(hasattr(p, "placements") for p in model.parameters()):
        return "the model's weights are sharded"
    return "" if isinstance(attempt(_tokens, model), Tensor) else "the model has no table of tokens"


# ---- attention ------------------------------------------------------------------------------------------


@drawing_nothing
def attention_of(model: Any, body: Any) -> tuple[int, dict[int, str]] | str:
    """How many modules of ``body`` in ``model`` have attention that is ours, with the reasons of others by ``id``; or
    why none has. Others are marked, for :func:`~.attention.attend` to leave them to SDPA.
    """
    if not body._can_set_attn_implementation():
        return _NOT_BY_NAME
    if any(m.config is not body.config for m in body.modules() if hasattr(type(m), "set_attn_implementation")):
        return "parts of the model have configs of their own"
    if getattr(body.config, "output_attentions", False):
        return "config asks for output_attentions"
    if unseen := _unseen(model):
        return unseen
    own = body.config._attn_implementation
    both = _Both(own if own in ("eager", "sdpa") else "sdpa" if body._supports_sdpa else "eager")
    ids = _tokens(model)
    try:
        expected = attempt(_results, model, ids)
        if isinstance(expected, Exception):
            return f"a call with tokens alone fails ({type(expected).__name__}: {expected})"
        with both:
            body.set_attn_implementation(_COMPARED)
            failed = [attempt(_results, model, ids), attempt(_results, model.train(), ids)]
            model.eval()
        wrong = [f"{type(one).__name__}: {one}" for one in failed if isinstance(one, Exception)]
        if wrong or not both.called:
            return f"a call fails with it ({wrong[0]})" if wrong else _NOT_BY_NAME
        if both.left.keys() == both.called or (both.left and both.theirs != "sdpa"):
            return next(iter(both.left.values()))
        for module in body.modules():
            if id(module) in both.left:
                module.__dict__[attention.LEFT] = True
        body.set_attn_implementation(attention.NAME)
        found = attempt(_results, model, ids)
        if isinstance(found, Exception):
            return f"a call fails with it ({type(found).__name__}: {found})"
        off = max(_typical(a, b) for a, b in zip(found, expected, strict=True))
        close = off <= torch.finfo(expected[0].dtype).eps ** 0.5
        if not close:
            return f"the model's results differ by {off:.1e} with it"
        return len(both.called) - len(both.left), both.left
    finally:
        model.eval()
        body.set_attn_implementation(own)


class _Both:
    """Attention under a name of its own while it is entered: transformers' as ``theirs``, and ours beside it."""

    def __init__(self, theirs: str) -> None:
        self.theirs, self.called, self.left = theirs, set[int](), dict[int, str]()
        self.masks = dict[int, tuple[Any, Any]]()  # by id of ours, kept so that none is given twice: ours and theirs

    def __enter__(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(_COMPARED, self.attend)
        AttentionMaskInterface.register(_COMPARED, self.mask)

    def __exit__(self, *error: object) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_COMPARED)

    def mask(self, *args: Any, **kwargs: Any) -> Any:
        from transformers import AttentionMaskInterface

        ours = attention.make_mask(*args, **kwargs)
        self.masks[id(ours)] = ours, AttentionMaskInterface._global_mapping[self.theirs](*args, **kwargs)
        return ours

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any) -> Any:
        self.called.add(id(module))
        own_mask = self.masks.get(id(attention_mask), (None, attention_mask))[1]
        if id(module) not in self.left:
            reason = self._why_not(module, (query, key, value), attention_mask, own_mask, more)
            self.left |= {id(module): reason} if reason else {}
        return self._function(module)(module, query, key, value, own_mask, **more)

    def _function(self, module: Any) -> Any:
        from transformers import AttentionInterface

        names: Any = sys.modules[getattr(type(module), "original", type(module)).__module__]
        return names.eager_attention_forward if self.theirs == "eager" else AttentionInterface._global_mapping["sdpa"]

    def _why_not(self, module: Any, qkv: Any, mask: Any, own_mask: Any, more: dict[str, Any]) -> str:
        """Why ours is not what ``theirs`` gives; with gradients in training, and out of it with large scores too."""
        unknown = sorted(name for name, x in more.items() if name not in attention.KNOWN and x is not None)
        if unknown:
            return f"it is called with {', '.join(unknown)}, which no kernel knows"
        seen = mask.any(-1)[:, 0].expand(-1, qkv[0].shape[2]) if isinstance(mask, Tensor) and mask.dim() == 4 else None
        scale = _LARGEST / max(float(qkv[0].float().abs().amax() * qkv[1].float().abs().amax()), 1e-9)
        for factor in (1.0,) if module.training else (1.0, max(scale, 1.0)):
            sizes = (factor, 1.0, 1.0)
            given = [(t.detach() * size).requires_grad_(module.training) for t, size in zip(qkv, sizes, strict=True)]
            expected = attempt(_call, self._function(module), module, given, own_mask, more, seen)
            ours = attempt(_call, attention.attend, module, given, mask, more, seen)
            if isinstance(expected, Exception) or isinstance(ours, Exception):
                return str(ours if isinstance(ours, Exception) else expected)
            off = max(relative(a, b) for a, b in zip(ours, expected, strict=True))
            if not off <= 4 * tolerance(qkv[0].dtype):
                return difference(off)
        return ""


def _call(call: Any, module: Any, qkv: Any, mask: Any, more: Any, seen: Tensor | None) -> list[Tensor]:
    """Attention's result where a row sees anything, and the gradients that it has."""
    with torch.set_grad_enabled(module.training):
        out = call(module, *qkv, mask, **more)[0]
    if seen is not None:
        out = out[seen]
    if not out.requires_grad:
        return [out]
    along = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return [out, *torch.autograd.grad(out, qkv, along)]


def _tokens(model: Any) -> Tensor:
    """Tokens that mean nothing to the config."""
    table = model.get_input_embeddings().weight
    configs = [model.config, *(getattr(model.config, name) for name in model.config.sub_configs)]  # None: no such part
    options = [option for config in configs if config is not None for option in vars(config).items()]
    meant = {v for k, v in options if "token" in k and isinstance(v, int)}
    plain = torch.tensor([i for i in range(min(len(table), 512)) if i not in meant])
    drawn = torch.randint(len(plain), (2, _TOKENS), generator=torch.Generator().manual_seed(3))
    return plain[drawn].to(table.device)


def _results(model: Any, ids: Tensor) -> list[Tensor] | None:
    """Results of a call, of a padded one, and of one more token; in training of the first alone, which is not kept."""
    with torch.no_grad():
        plain = model(input_ids=ids)
        if model.training:
            return None
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        padded = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        cache = padded.get("past_key_values")
        last = () if cache is None else (model(input_ids=ids[:, -1:], attention_mask=mask, **{name: cache}),)
    found = [x.last_hidden_state if (y := x.get("logits")) is None else y for x in (plain, padded, *last)]
    return [found[0].flatten(0, 1), found[1][mask[:, :-1].bool()], *(x.flatten(0, 1) for x in found[2:])]


def _typical(ours: Tensor, theirs: Tensor) -> float:
    """By how much most tokens differ: a router's choice between two experts may turn over a rounding."""
    return float(((ours.double() - theirs.double()).norm(dim=-1) / theirs.double().norm(dim=-1).clamp(1e-9)).median())


# ---- the loss -------------------------------------------------------------------------------------------


@drawing_nothing
def loss_of(model: Any) -> Family | str:
    """By which conventions the loss of a model with a head is ``linear_cross_entropy``'s; or why it is not."""
    head = model.get_output_embeddings()
    if head is None or modules.body_of(model) is model or "labels" not in inspect.signature(model.forward).parameters:
        return "the model has no head that gives one"
    cls: Any = type(model)
    if output_of(cls) is None:
        return "the class of its results is not known"
    if unseen := _unseen(model):
        return unseen
    config, reason = model.config, ""
    for option in (*_HEADS, ""):
        if option and not getattr(config, option, None):
            continue
        said_so: dict[str, Any] = {_HEADS[option]: True} if option else {}
        family = replace(UNKNOWN, **said_so)
        ours = copy.copy(model)
        ours.__class__ = modules.swapped(modules.CausalLM, cls, family)
        reason = ours._why_logits({}) or _loss_differs(model, ours, head.weight)
        if not reason:
            return family
    return reason


def _loss_differs(model: Any, ours: Any, weight: Tensor) -> str:
    """Why ``ours`` gives another loss than ``model``, on random hidden states, or ""."""
    ids = _tokens(model)
    labels = ids.clone()
    labels[0, :4] = -100
    size = 20.0 / float(weight.detach().float().norm(dim=1).mean().clamp(1e-9))  # logits of which softcaps count

    def losses(one: Any, more: dict[str, Any]) -> tuple[set[Any], list[Tensor]]:
        x = torch.randn(*ids.shape, weight.shape[1], generator=torch.Generator().manual_seed(4)) * size
        x = x.to(weight.device, weight.dtype).requires_grad_()

        def instead(_: Any, __: Any, output: Any) -> Any:
            output.last_hidden_state = x
            return output

        hook = modules.body_of(model).register_forward_hook(instead)
        try:
            out = one(input_ids=ids, labels=labels, **more)
        finally:
            hook.remove()
        slope = torch.autograd.grad(out.loss, x, allow_unused=True)
        return {type(out).__name__, *out.keys()} - {"logits"}, [out.loss, *slope]

    for more in ({}, {"num_items_in_batch": torch.tensor(7)}, {"attention_mask": torch.ones_like(ids)}):
        theirs = attempt(losses, model.train(), more)
        mine = attempt(losses, ours.train(), more)
        model.eval()
        if isinstance(theirs, Exception):
            return f"a call with labels fails ({type(theirs).__name__}: {theirs})"
        if isinstance(mine, Exception):
            return f"a call with labels fails with it ({type(mine).__name__}: {mine})"
        if theirs[0] != mine[0]:
            return "other results come with it"
        off = max(relative(a, b) for a, b in zip(mine[1], theirs[1], strict=True))
        if not off <= tolerance(weight.dtype):
            return difference(off)
    return ""
