"""Attention calls met before: what takes ``attention`` and ``decode_attention`` from arguments to launch in a lookup.

Checks, plan and the way operands are handed over depend on a call's key: its options, and shape, strides, dtype and
device of each operand. Addresses are looked at each time; what tensors hold, scale, softcap and the stream are the
call's own. What torch should see, rows that are copied first and what may have to be refused: the general path's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutekernels import dispatch
from cutekernels.op import Op
from cutekernels.ops.shared.call_cache import keep
from cutekernels.ops.shared.strides import span_bytes
from cutekernels.ops.shared.tensor_op import WIDEST_BYTES, direct

Way = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Call:
    """What follows from the key of a call. Places are those of ``(out, *operands)``.

    ``ways``: what becomes of those that the launch does not take as they are. ``spans``: their bytes, from first to
    last; 0 for one that is absent.
    """

    launch: Callable[..., None]
    device: int
    shape: tuple[int, ...]
    lse: tuple[int, ...] | None  # its shape, where the launch gives one
    ways: tuple[Way | None, ...]
    spans: tuple[int, ...]
    absent: int  # operands that are None


_CALLS: dict[tuple[object, ...], _Call] = {}
_ROWS = 4  # out, q, k and v: what kernels read and write in aligned vectors
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_autocast = torch._C._is_any_autocast_enabled
_function_modes = torch._C._len_torch_function_stack
_increment_version = torch._C._increment_version


def forget() -> None:
    """Of calls made before: what they came to know."""
    _CALLS.clear()


dispatch.on_reload(forget)


def again(
    op: Op[Any, Any],
    out: Tensor | None,
    operands: Sequence[Tensor | None],
    options: tuple[object, ...],
    scalars: tuple[float, float],
) -> tuple[Tensor, Any] | None:
    """``(out, lse or None)`` of a call like one that was remembered; None for any other, and nothing was done.

    ``operands`` begin with q, k and v; ``scalars`` are scale and softcap, of which the caller has checked the second.
    """
    given = (out, *operands)
    if not direct(*given) or _autocast() or _function_modes():
        return None
    try:
        call = _CALLS.get(_key(op, out, operands, options))
        if call is None or call.device != _current_device() or not 0.0 < scalars[0] < math.inf:
            return None
        begins = [0 if t is None else t.data_ptr() for t in given]
    except (RuntimeError, TypeError):  # tensors without strides or memory, options without a hash
        return None
    at, at_q, at_k, at_v = begins[:_ROWS]
    if (at | at_q | at_k | at_v) % WIDEST_BYTES or begins.count(0) != call.absent + (out is None):
        return None
    q = operands[0]
    assert q is not None
    if out is None:
        out = q.new_empty(call.shape)
    else:
        span = call.spans[0]
        for begin, other_span in zip(begins[1:], call.spans[1:], strict=True):
            if -other_span < begin - at < span:
                return None
        _increment_version((out,))
    target, *posed = [
        t if way is None or t is None else way(t) for t, way in zip((out, *operands), call.ways, strict=True)
    ]
    if call.lse is None:
        call.launch(target, *posed, *scalars)
        return out, None
    lse = q.new_empty(call.lse, dtype=torch.float32)
    call.launch(target, lse, *posed, *scalars)
    return out, lse


def remember(
    op: Op[Any, Any],
    out: Tensor | None,
    operands: Sequence[Tensor | None],
    options: tuple[object, ...],
    launch: Callable[..., None],
    results: tuple[Tensor, ...],
    posed: Sequence[Tensor | None],
) -> None:
    """Has :func:`again` make calls like this, in which ``launch`` took ``posed`` for ``(results[0], *operands)``.

    Only where the rows are in their own memory: whether they must be copied is not in the key.
    """
    key = _key(op, out, operands, options)
    if key in _CALLS:  # a call that wants gradients goes the general path each time
        return
    given = (results[0], *operands)
    ways = [None if t is None or p is None else _way(t, p) for t, p in zip(given, posed, strict=True)]
    if Tensor.contiguous in ways[:_ROWS]:
        return
    call = _Call(
        launch=launch,
        device=results[0].get_device(),
        shape=tuple(results[0].shape),
        lse=tuple(results[1].shape) if len(results) > 1 else None,
        ways=tuple(ways),
        spans=tuple([0 if t is None else span_bytes(t) for t in given]),
        absent=sum(t is None for t in operands),
    )
    keep(_CALLS, key, call)


def _way(t: Tensor, posed: Tensor) -> Way | None:
    """From ``t`` to ``posed``, which is the same tensor, a view from where it begins, or a contiguous copy."""
    if posed.data_ptr() != t.data_ptr():
        return Tensor.contiguous
    shape, strides = tuple(posed.shape), posed.stride()
    return None if (shape, strides) == (t.shape, t.stride()) else lambda t: t.as_strided(shape, strides)


def _key(
    op: Op[Any, Any], out: Tensor | None, operands: Sequence[Tensor | None], options: tuple[object, ...]
) -> tuple[object, ...]:
    facts: list[object] = [op.name, options]
    for t in (out, *operands):
        facts += (None,) if t is None else (t.shape, t.stride(), t.dtype, t.get_device(), t.is_neg())
    return tuple(facts)
