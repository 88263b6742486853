"""Attention under the name ``"cutekernels"`` in transformers' ``AttentionInterface``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.families import FAMILIES
from cutekernels.ops.attention.api import attention, decode_attention
from cutekernels.ops.attention.decode import MOST_QUERIES
from cutekernels.ops.shared.dtypes import DTYPES

NAME = "cutekernels"
LEFT = "_cutekernels_left"  # the attribute of a module whose attention SDPA computes, in a model where others' is ours
# What modules may hand on: arguments of ``attend``, and some that it need not know.
KNOWN = {
    "dropout", "scaling", "sliding_window", "softcap", "is_causal", "s_aux", "position_bias", "position_ids",
    "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep",
}  # fmt: skip


@cache
def register_attention() -> None:
    """Register attention and its masks with transformers under the name ``"cutekernels"``.

    ::

        ck.register_attention()
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="cutekernels")

    or ``model.set_attn_implementation("cutekernels")``. A registered name holds for this process, in any model whose
    attention transformers dispatches by name, which keeps all its other layers. :func:`patch` does it by itself.
    Calling it again does nothing.

    Raises:
        ImportError: transformers is not installed.
    """
    require_transformers("register_attention")
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def require_transformers(verb: str) -> None:
    """Raises ImportError where transformers is not installed."""
    if find_spec("transformers") is None:
        raise ImportError(f"{verb} needs transformers, which is not installed: pip install 'transformers>=5.17,<6'")


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query ``(B, HQ, SQ, D)``, key and value ``(B, HKV, SKV, D)``,
    and ``s_aux``, the sinks of gpt-oss ``(HQ,)``.

    Returns:
        ``(B, SQ, HQ, D)``, and None for the weights, which are never formed.

    Raises:
        UnsupportedProblem: dropout, a position bias, a mask that is not bool, or what ``attention`` does not take.
    """
    tokens = _tokens(module, query, kwargs.get("position_ids"))
    if LEFT in module.__dict__:
        attention_mask = _written_out(attention_mask, tokens, query, key)
        from transformers import AttentionInterface

        kwargs |= {"sliding_window": sliding_window, "softcap": softcap, "is_causal": is_causal, "s_aux": s_aux}
        own: Any = AttentionInterface._global_mapping["sdpa"]
        return own(module, query, key, value, attention_mask, dropout, scaling, **kwargs)  # type: ignore[no-any-return]
    if dropout:
        raise UnsupportedProblem(f"attention has no dropout; it is {dropout}: set the config's attention_dropout to 0")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedProblem('attention takes no position bias: use attn_implementation="eager"')
    lengths = padding = None
    if attention_mask is not None and _counts(attention_mask, query.shape[0]):
        lengths, attention_mask = attention_mask.view(-1), None
    elif attention_mask is not None and _pads(attention_mask, key):
        padding, attention_mask = attention_mask.view(torch.bool).expand(-1, -1, query.shape[2], -1), None
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise UnsupportedProblem(
            f"attention takes bool masks; this one is {attention_mask.dtype}: pass the 2-D mask of padding instead"
        )
    if query.is_meta and query.dtype not in DTYPES.values():  # torch's, like the products: shapes are all there is
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return out.transpose(1, 2), None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    sinks = None if s_aux is None or s_aux.dtype == torch.float32 else s_aux.to(q.dtype)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux if sinks is None else sinks}
    if attention_mask is not None:
        return attention(q, k, v, mask=attention_mask, **options), None
    if lengths is not None:
        return decode_attention(q, k, v, lengths, **options), None
    causal = padding is not None or (is_causal if is_causal is not None else getattr(module, "is_causal", True))
    # As torch aligns: the first token sees the first key, of a static cache.
    if causal and padding is None and 1 < tokens < k.shape[1]:
        k, v = k[:, :tokens], v[:, :tokens]
    # A window that hides nothing is no harm where an exported length is a symbol.
    keys: Any = k.shape[1]
    windowed = sliding_window is not None and (isinstance(keys, torch.SymInt) or keys > sliding_window)
    # In other models, as in SDPA, masks alone have windows.
    if causal and windowed and getattr(getattr(module, "config", None), "model_type", None) in FAMILIES:
        options["window"] = (sliding_window - 1, None)  # type: ignore[operator]
    tracked = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if causal and padding is None and q.is_cuda and q.shape[1] <= MOST_QUERIES < k.shape[1] and not tracked:
        lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
        return decode_attention(q, k, v, lengths, **options), None
    if q.shape[1] == 1:  # no expression: a traced length may be a symbol
        causal = False
    return attention(q, k, v, causal=causal, mask=padding, **options), None


def _tokens(module: Any, query: Tensor, position_ids: Any) -> Any:
    """How many tokens the call has, of which ``query`` has the last ones: fewer in layers that take an earlier one's
    keys, where only some logits are asked for (Gemma 4).
    """
    own = query.shape[2]
    if module.__dict__.get("is_kv_shared_layer") and isinstance(position_ids, Tensor):
        return position_ids.shape[-1]
    return own


def _written_out(mask: Tensor | None, tokens: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask of :func:`make_mask` as other attention reads it; ``tokens`` as :func:`_tokens` has them."""
    if mask is None:
        return None if tokens == query.shape[2] else _band(tokens, query, key)
    if _counts(mask, query.shape[0]):
        return _band(mask, query, key)
    return _band(key.shape[2], query, key) & mask.bool() if _pads(mask, key) else mask


def _band(tokens: Any, query: Tensor, key: Tensor) -> Tensor:
    """The mask ``(B or 1, 1, SQ, SKV)`` of the last queries of so many ``tokens``, a number or :func:`_lengths`, whose
    keys come first in a static cache.
    """
    own, keys = query.shape[2], torch.arange(key.shape[2], device=query.device)
    last = torch.arange(own, device=query.device)[:, None] + (tokens - own)
    seen: Tensor = keys <= last
    return seen.view(-1, 1, own, key.shape[2])


class _Traced:
    """The mask of a traced call of a patched model, as far as the call tells. Traces run one at a time."""

    own_positions = False
    """Whether the model made ``position_ids`` itself: tokens of one sequence, whatever a graph can see of them."""


_traced = _Traced()  # an object: torch 2.11 traces no assignment to a class


def watch(body: torch.nn.Module) -> None:
    """Has masks learn, while the text part of a model is traced, whether its positions are its own."""
    body.register_forward_pre_hook(_begin, with_kwargs=True)
    body.register_forward_hook(_end, always_call=True)


def unwatch(body: torch.nn.Module) -> None:
    for own in HOOKS:
        unhook(body, own)


def unhook(module: torch.nn.Module, own: Callable[..., Any]) -> None:
    """Take a hook of a forward off a module, wherever it was registered."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook is own]:
            for table in (hooks, module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called):
                table.pop(key, None)


def _begin(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        given = ("position_ids", "attention_mask", "past_key_values", "cache")
        plain = len(args) <= 1 and all(kwargs.get(name) is None for name in given)
        last = list(module._forward_pre_hooks.values())[-1] is _begin  # later ones may add positions, as may a wrapper
        _traced.own_positions = plain and last and "forward" not in module.__dict__


def _end(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling():
        _traced.own_positions = False


HOOKS = (_begin, _end)
"""Those that :func:`watch` registers."""


def make_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
    """The mask of a batch, as transformers' own for SDPA: None where the causal band and the window say it all.

    Over a static cache it is how many keys each sequence has, int32 ``(B, 1, 1, 1)``, where they and the causal band
    say it all: the decode kernel reads no key beyond them. Where padding, the band and the window do, it is the keys
    that count, int8 ``(B, 1, 1, SKV)``: blocks that the band hides are skipped then.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    # Other models may mean chunks by local_size, or not pass their window on.
    known = not args and getattr(kwargs.get("config"), "model_type", None) in FAMILIES
    family = FAMILIES[kwargs["config"].model_type] if known else None
    windowed = local_size is not None and family is not None and family.windowed is not None and family.passes_window
    if (windowed or local_size is None) and not args and _is_band(windowed=windowed, **kwargs):
        return None
    skips = kwargs.get("allow_is_causal_skip", True)
    one = kwargs.get("q_length") == 1  # then transformers does not skip, for its compiled graphs' sake
    counted = known and local_size is None and kwargs.get("mask_function") is causal_mask_function and (skips or one)
    if counted and one and (lengths := _lengths(**kwargs)) is not None:
        return lengths
    if ((counted and not one) or (windowed and skips)) and _is_padded_band(**kwargs):
        seen = kwargs["attention_mask"]
        begins = kwargs["q_length"] == kwargs["kv_length"]
        if begins and not torch.compiler.is_compiling() and seen.all():
            return None
        return seen[:, None, None].bool().to(torch.int8)  # type: ignore[no-any-return]
    if windowed:
        plain = {**kwargs, "mask_function": causal_mask_function}
        if skips and sdpa_mask(*args, local_size=None, **plain) is None:
            return None
    mask = sdpa_mask(*args, local_size=local_size, **kwargs)
    lengths = _lengths(**kwargs) if mask is not None and counted and not one else None
    return mask if lengths is None else lengths


def _lengths(
    batch_size: int,
    q_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Keys of each sequence in a static cache, whose offset is on the device; None where padding hides some of them,
    which the host waits to know, or where gradients are wanted, which the decode kernel has none of.
    """
    if not isinstance(q_offset, Tensor) or kv_offset != 0 or torch.is_grad_enabled():
        return None
    if attention_mask is not None:
        if torch.compiler.is_compiling() or attention_mask.dim() != 2:
            return None
        if not (attention_mask.all() & (q_offset + q_length <= attention_mask.shape[1])):
            return None
    return (q_offset + q_length).to(torch.int32).expand(batch_size).contiguous().view(batch_size, 1, 1, 1)


def _is_padded_band(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> bool:
    """Whether a mask is the causal band of the last queries, less padding, whose mask has all keys. Not where a trace
    other than the compiler's would keep what one mask's values say.
    """
    from transformers.utils.import_utils import is_tracing

    if attention_mask is None or attention_mask.shape != (batch_size, kv_length) or q_length == 1:
        return False
    if is_tracing(attention_mask) and not torch.compiler.is_compiling():
        return False
    return not isinstance(q_offset, Tensor) and kv_offset == 0 and bool(q_offset + q_length == kv_length)


def _pads(mask: Tensor, key: Tensor) -> bool:
    """Whether a mask of :func:`make_mask` has the keys that are no padding."""
    return mask.dtype == torch.int8 and mask.shape == (key.shape[0], 1, 1, key.shape[2])


def _counts(mask: Tensor, batch: int) -> bool:
    """Whether a mask is :func:`_lengths`."""
    return mask.dtype == torch.int32 and mask.shape == (batch, 1, 1, 1)


def _is_band(
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    windowed: bool = False,
    use_vmap: bool = False,
    **_: Any,
) -> bool:
    """Whether a traced call's mask is the causal band of a prompt: transformers writes that one out, since SDPA would
    align the band of an exported program with the first key. Ours ends at the last one. Without a cache it also looks
    for packed sequences in ``position_ids``, which a graph cannot see to be a plain range.

    A static cache has its offset on the device; a prompt as long as the cache can only begin at its first token.
    """
    if not torch.compiler.is_compiling() or attention_mask is not None:
        return False
    if not allow_is_causal_skip and (use_vmap or not _traced.own_positions):  # use_vmap: with a mask of the caller's
        return False
    begins = not windowed if isinstance(q_offset, Tensor) else q_offset == 0
    return bool(begins and kv_offset == 0 and q_length == kv_length)
