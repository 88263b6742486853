"""``route_sdpa``: torch's ``scaled_dot_product_attention`` through :func:`~cutekernels.ops.attention.api.attention`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from cutekernels import torch_names
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention.api import attention

DEVICES = ("cuda",)  # calls on other devices are passed on, since no kernel of ours runs there
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass
class Routing:
    """Counts of the calls inside a :func:`route_sdpa`.

    Attributes:
        routed: calls that ran here.
        passed_on: calls that torch ran itself, by reason.
    """

    routed: int = 0
    passed_on: Counter[str] = field(default_factory=Counter)


@contextmanager
def route_sdpa() -> Iterator[Routing]:
    """Runs ``torch.nn.functional.scaled_dot_product_attention`` as :func:`cutekernels.attention` where possible.

    ::

        with cutekernels.route_sdpa() as routing:
            model.generate(...)
        print(routing)

    Every call in this thread and inside the block is intercepted, however the function was imported; other threads'
    calls are not. Calls that ``attention`` takes are routed: fp16 and bf16 on a GPU, ``(B, H, S, D)`` with D
    contiguous, a bool mask or none, ``is_causal`` (from the top left, as in torch, for any lengths), ``enable_gqa``;
    gradients too, which can be taken once. All other calls go to torch, as do those that torch.compile traces, and
    are counted by reason. Nothing is copied: ``(B, H, S, D)`` and ``(B, S, H, D)`` are two views of one memory.

    Blocks may be nested: the inner one comes first. Results differ from torch's by rounding. A query that sees no key
    has 0.

    Yields:
        Routing: counts of the calls.
    """
    routing = Routing()
    with _Router(routing):
        yield routing


class _Router(TorchFunctionMode):
    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self._routing = routing

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is multi_head_attention_forward and all(t in _PLAIN for t in types):
            with self:
                return _without_overrides(func)(*args, **kwargs)
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        try:
            q, k, v, options = _pose(*_bind(args, kwargs))
        except UnsupportedProblem as reason:
            self._routing.passed_on[str(reason)] += 1
            return func(*args, **kwargs)
        except (AttributeError, TypeError, RuntimeError):  # arguments that torch itself refuses
            self._routing.passed_on["not for arguments of other kinds"] += 1
            return func(*args, **kwargs)
        try:
            made = attention(q, k, v, **options)
        except UnsupportedProblem as reason:
            self._routing.passed_on[str(reason)] += 1
            return func(*args, **kwargs)
        self._routing.routed += 1
        return made.transpose(1, 2)


def _without_overrides(func: Any) -> Any:
    """A copy of ``func`` that skips its check for overrides, during which no mode sees the calls inside it.

    ``multi_head_attention_forward`` is torch's only function around ours that is written in Python and has the check.
    """
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    twin = FunctionType(func.__code__, names, func.__name__, func.__defaults__)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def _bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments in torch's order. Raises UnsupportedProblem for missing and unknown ones."""
    given = {**_DEFAULTS, **dict(zip(_NAMES, args, strict=False)), **kwargs}
    if set(given) != set(_NAMES) or len(args) > len(_NAMES):
        raise UnsupportedProblem("not for arguments that are missing or not known here")
    return [given[name] for name in _NAMES]


def _pose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """The arguments of ``attention``. Raises UnsupportedProblem where torch is to run the call."""
    given = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    for rule, broken in (
        ("tensors of a class of their own", any(type(t) not in _PLAIN for t in given)),
        ("a call that is traced or transformed", torch.compiler.is_compiling() or _in_transform()),
        ("tensors that are on no GPU", any(t.device.type not in DEVICES for t in given)),
        ("dropout", dropout_p != 0.0),
        ("other than four dimensions", any(t.dim() != 4 for t in given[:3])),
        ("a mask that is not bool", attn_mask is not None and attn_mask.dtype != torch.bool),
        ("a mask beside is_causal", attn_mask is not None and is_causal),
        ("a scale that is a tensor or a bool", isinstance(scale, (bool, Tensor))),
        ("autocast to another type", _autocast(query)),
    ):
        if broken:
            raise UnsupportedProblem(f"not for {rule}")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if any(t.stride(3) != 1 for t in (q, k, v)):
        raise UnsupportedProblem("not for channels that are not contiguous")
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise UnsupportedProblem("not for empty tensors")
    if q.shape[2] != k.shape[2] and enable_gqa is not True:
        raise UnsupportedProblem("not for heads that are broadcast")
    mask = None if attn_mask is None else _mask(attn_mask, q.shape[1], k.shape[1])
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    options: dict[str, Any] = {"scale": factor, "mask": mask}
    if is_causal is not False and is_causal is not True:
        raise UnsupportedProblem("not for an is_causal that is no bool")
    if is_causal:
        # torch aligns the top left, so query i sees keys up to i; ``attention`` aligns the bottom right. Later keys are
        # left out, and where there are more queries than keys, the band is moved by as many.
        behind = q.shape[1] - k.shape[1]
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
        options |= {"window": (None, behind)} if behind > 0 else {"causal": True}
    return q, k, v, options


def _mask(mask: Tensor, seq_q: int, seq_kv: int) -> Tensor:
    """``mask`` as a view broadcast to (B or 1, HQ or 1, SQ, SKV)."""
    if mask.dim() > 4 or any(
        n not in (1, wanted) for n, wanted in zip(mask.shape[::-1], (seq_kv, seq_q), strict=False)
    ):
        raise UnsupportedProblem("not for a mask that does not broadcast to (B, H, SQ, SKV)")
    mask = mask[(None,) * (4 - mask.dim())]
    return mask.expand(*mask.shape[:2], seq_q, seq_kv)


def _autocast(t: Tensor) -> bool:
    """Whether torch would cast ``t`` first."""
    kind = t.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != t.dtype


def _in_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad) is active, whose wrappers are tensors without memory."""
    return torch_names.transforms() is not None
