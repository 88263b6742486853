"""Attention's operands, from their checks to the problem they pose, and calls of it that repeat."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cutekernels import dispatch, torch_names
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention.arguments import check_dtype, check_ends, check_scale, check_sinks
from cutekernels.ops.attention.problem import WIDEST, AttentionProblem, Sides, sinks_of
from cutekernels.ops.shared.call_cache import Call, CallCache, Inputs, empty_copy, stand_ins
from cutekernels.ops.shared.checks import check_apart, check_fits
from cutekernels.ops.shared.dtypes import DTYPES
from cutekernels.ops.shared.registration import Implementation, direct
from cutekernels.ops.shared.strides import pairs

_is_compiling = torch.compiler.is_compiling
_autocast = torch_names.autocasting
_function_modes = torch_names.function_modes
_NAMES = DTYPES.names
_WIDEST_HEAD = 256
_MOST_ROW_STRIDE = 2**23  # elements; a tile's offsets have 32 bits


def replay(
    calls: CallCache, out: Tensor | None, operands: Inputs, options: tuple[object, ...],
    scalars: tuple[float, float], config: str | None,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """``(out[, lse])`` of a call that repeats one; None, and nothing was done, where it must go through torch.

    ``scalars`` are scale and softcap, of which the caller has checked the second.
    """
    if _is_compiling() or _function_modes() or _autocast() or not 0.0 < scalars[0] < math.inf:
        return None
    if type(operands[0]) is not Tensor:  # a fake's address is not to be read
        return None
    results = None if out is None else (out,)
    call = results, operands, options, scalars, config
    made = calls.replay(*call)
    if made is None and direct(*operands, out):
        made = calls.recall(call)
    return made


def implementations(
    calls: CallCache,
    sides: int,
    check: Callable[..., None],
    posed: Callable[..., tuple[Any, Any, Sequence[Tensor | None]]],
    compute: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Implementation, Implementation, Implementation]:
    """An op of ``(*inputs, *sides, scale, softcap, return_lse, config)`` on a GPU, on the CPU and of fakes.

    Args:
        calls: what repeats.
        sides: the number of options that say which keys a query sees.
        check: ``(*inputs, scale)``, refuses what poses no problem.
        posed: ``(out, inputs, *sides, softcap, return_lse)`` for checked GPU tensors: the op, the problem, and what its
            launch takes for out and the inputs.
        compute: ``(*inputs, *sides, scale, softcap)``: out and lse.
    """

    def returned(given: tuple[Tensor] | None, inputs: Any, wanted: bool, made: tuple[Tensor, ...]) -> Any:
        lse = made[1] if wanted else _fresh_lse(inputs[0], False)
        return (made[0], lse) if given is None else lse

    def launched(into: tuple[Tensor] | None, inputs: Any, seen: Any, scalars: Any, wanted: bool, config: Any) -> Any:
        q: Tensor = inputs[0]
        out = q.new_empty(q.shape) if into is None else into[0]
        results = (out, _fresh_lse(q, True)) if wanted else (out,)
        if out.numel() == 0:
            return results
        with torch.cuda.device(q.get_device()):
            op, problem, (target, *rest) = posed(out, inputs, *seen, scalars[1], wanted)
            launch = dispatch.plan(op, problem, q.get_device(), config).launch
        options = (*seen, scalars[1] > 0.0, wanted)
        return add(calls, launch, into, inputs, options, scalars, config, results, (target, *results[1:], *rest))

    def cuda(given: tuple[Tensor] | None, inputs: Any, *options: Any) -> Any:
        *seen, scale, softcap, wanted, config = (*options, None)[: sides + 4]
        made = None
        if 0.0 < scale < math.inf:  # neither guards nor keys hold it
            call = given, inputs, (*seen, softcap > 0.0, wanted), (scale, softcap), config
            made = calls.replay(*call) or calls.recall(call)
        if made is None:
            check(*inputs, scale)
            if given is not None:
                check_out(given[0], inputs)
            made = launched(given, inputs, seen, (scale, softcap), wanted, config)
        return returned(given, inputs, wanted, made)

    def cpu(given: tuple[Tensor] | None, inputs: Any, *options: Any) -> Any:
        *seen, scale, softcap, wanted = options[: sides + 3]
        check(*inputs, scale)
        if given is not None:
            check_out(given[0], inputs)
        made = compute(*inputs, *seen, scale, softcap)
        if given is not None:
            given[0].copy_(made[0])
        return returned(given, inputs, wanted, made)

    def fake(given: tuple[Tensor] | None, inputs: Any, *options: Any) -> Any:
        q, wanted = inputs[0], options[sides + 2]
        check(*inputs, options[sides])
        if given is not None:
            check_fits(given[0], q.shape, q)
        out = q.new_empty(q.shape) if given is None else given[0]
        return returned(given, inputs, wanted, (out, _fresh_lse(q, wanted)))

    return cuda, cpu, fake


def _fresh_lse(q: Tensor, wanted: bool) -> Tensor:
    """Memory for the log-sum-exp, or an empty tensor; varlen sequences have no batch."""
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3]) if wanted else (0,)
    return q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))


def sides_seen(left: int, right: int, causal: bool = False) -> Sides:
    """Keys that a query sees before and behind its own, None for all: of an op's options, -1 for all."""
    return {"left": None if left < 0 else left, "right": 0 if causal else None if right < 0 else right}


def check_heads(q: Tensor, k: Tensor, v: Tensor, suffix: str = "") -> None:
    """Refuses heads that do not fit together; ``suffix`` ends the names of k and v."""
    if k.shape != v.shape:
        raise UnsupportedProblem(
            f"k{suffix} and v{suffix} must have one shape; they have {tuple(k.shape)} and {tuple(v.shape)}: where v's "
            "heads are narrower (DeepSeek's v_head_dim), pad them with zeros and drop those channels of the result"
        )
    (heads_q, head_dim), heads_kv = q.shape[-2:], k.shape[-2]
    if head_dim % WIDEST or not 0 < head_dim <= _WIDEST_HEAD:
        raise UnsupportedProblem(f"q's head dim must be a multiple of {WIDEST} up to {_WIDEST_HEAD}; it is {head_dim}")
    if heads_kv == 0 or heads_q % heads_kv:
        raise UnsupportedProblem(f"k{suffix}'s {heads_kv} heads must divide q's {heads_q}")


def check_out(out: Tensor, inputs: Sequence[Any]) -> None:
    """Refuses an ``out`` that is not as q or shares memory with an input."""
    check_fits(out, inputs[0].shape, inputs[0])
    check_apart(out, [("an input", t) for t in inputs])


def check_values(operands: Any, scale: float) -> None:
    """:func:`check`, and the values of the sequences' ends."""
    check(*(*operands, scale))
    q, k, _, _, cu_q, cu_kv, _ = operands
    if cu_q is not None:
        check_ends(q, k, cu_q, cu_kv)


def check(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_q: Tensor | None, cu_kv: Tensor | None,
    sinks: Tensor | None, scale: float,
) -> None:  # fmt: skip
    """Raises UnsupportedProblem for arguments that pose no problem."""
    varlen = cu_q is not None or cu_kv is not None
    rank, form = (3, "(TOTAL, H, D)") if varlen else (4, "(B, S, H, D)")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != rank:
            raise UnsupportedProblem(
                f"{name} must be {form}; its shape is {tuple(t.shape)}"
                + ("" if varlen else ": packed sequences need cu_seqlens_q and cu_seqlens_kv")
            )
        if t.dtype != q.dtype or t.device != q.device:
            raise UnsupportedProblem(
                f"{name} must have q's dtype {q.dtype} and device {q.device}; it has {t.dtype} on {t.device}"
            )
    check_dtype("attention", q)
    check_heads(q, k, v)
    if k.shape[-1] != q.shape[-1] or (not varlen and k.shape[0] != q.shape[0]):
        raise UnsupportedProblem(
            f"q and k must agree in head dim and batch; their shapes are {tuple(q.shape)} and {tuple(k.shape)}"
        )
    check_scale(scale)
    if sinks is not None:
        check_sinks(sinks, q)
    if mask is not None:
        if varlen:
            raise UnsupportedProblem("mask is for a batch of one length: packed sequences take none")
        wanted = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        fits = mask.dim() == 4 and all(
            n == w or (n == 1 and i < 2) for i, (n, w) in enumerate(zip(mask.shape, wanted, strict=True))
        )
        if mask.dtype != torch.bool or mask.device != q.device or not fits:
            raise UnsupportedProblem(
                f"mask must be bool, (B or 1, HQ or 1, SQ, SKV) of {wanted}, on {q.device}; it is {mask.dtype}, "
                f"{tuple(mask.shape)}, on {mask.device}"
            )
    if varlen:
        if cu_q is None or cu_kv is None:
            raise UnsupportedProblem("packed sequences need both cu_seqlens_q and cu_seqlens_kv; one is missing")
        for name, t in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
            if t.dtype != torch.int32 or t.dim() != 1 or t.shape != cu_q.shape or t.device != q.device or not len(t):
                raise UnsupportedProblem(
                    f"{name} must be int32, (sequences + 1,), of one length with the other, on {q.device}; it is "
                    f"{t.dtype}, {tuple(t.shape)}, on {t.device}"
                )
        if len(cu_q) == 1 and q.shape[0]:
            raise UnsupportedProblem(f"cu_seqlens_q of length 1 has no sequence, yet q has {q.shape[0]} rows")


def pose(
    q: Tensor, k: Tensor, mask: Tensor | None, cu_q: Tensor | None,
    causal: bool, left: int, right: int, softcap: float, lse: bool, sinks: Tensor | None = None,
) -> AttentionProblem:  # fmt: skip
    """The problem these checked arguments pose."""
    if cu_q is None:
        batch, seq_q, seq_kv = q.shape[0], q.shape[1], k.shape[1]
    else:
        batch = cu_q.shape[0] - 1
        seq_q, seq_kv = (-(-t.shape[0] // max(1, batch)) for t in (q, k))
    limits = {(False, False): "none", (True, False): "left", (False, True): "right", (True, True): "both"}
    return AttentionProblem(
        batch=batch,
        seq_q=seq_q,
        seq_kv=seq_kv,
        heads_q=q.shape[-2],
        heads_kv=k.shape[-2],
        window_left=max(left, 0),
        window_right=max(right, 0),
        head_dim=q.shape[-1],
        dtype=_NAMES[q.dtype],
        causal=causal,
        window=limits[left >= 0, right >= 0],
        softcap=softcap > 0.0,
        mask=mask is not None,
        varlen=cu_q is not None,
        lse=lse,
        sinks=sinks_of(sinks, q),
    )


def canonical(t: Tensor) -> Tensor:
    """``t`` itself where its rows are contiguous and aligned; else a view or a copy of which that is true."""
    strides = [0 if n == 1 else s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    aligned = all(s % WIDEST == 0 for s in strides) and t.data_ptr() % 16 == 0
    if t.stride(-1) != 1 or not aligned or strides[-2] >= _MOST_ROW_STRIDE:
        return t.clone(memory_format=torch.contiguous_format)
    return t if (*strides, 1) == t.stride() else t.as_strided(t.shape, (*strides, 1))


def dense(sinks: Tensor | None) -> Tensor | None:
    """``sinks`` with a stride of 1, even where there is one of them."""
    return None if sinks is None else sinks.contiguous().as_strided(sinks.shape, (1,))


def add(
    calls: CallCache, launch: Callable[..., None], into: tuple[Tensor] | None, operands: Inputs,
    options: tuple[object, ...], scalars: tuple[float, float], config: str | None, results: tuple[Tensor, ...],
    posed: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Makes and caches the call in which ``launch`` takes ``posed`` for ``(*results, *operands)``."""
    ways = [way(t, p, i == 0) for i, (t, p) in enumerate(zip((*results, *operands), posed, strict=True))]
    copied = [] if posed[0] is None or posed[0].data_ptr() == results[0].data_ptr() else [0]
    apart = () if into is None else pairs(1, (*into, *operands))
    call = Call.of(stand_ins(launch, ways, copied), operands, results[into is not None :], apart)
    return calls.add(call, (into, operands, options, scalars, config))


def way(t: Tensor | None, posed: Tensor | None, result: bool = False) -> Callable[[Tensor], Tensor] | None:
    """The function from ``t`` to ``posed``: None for itself, a view that begins where it does, or a contiguous copy."""
    if t is None or posed is None or posed is t:
        return None
    shape, strides = tuple(posed.shape), posed.stride()
    if posed.data_ptr() != t.data_ptr():
        if result:
            return lambda t: empty_copy(t).as_strided(shape, strides)
        return partial(torch.clone, memory_format=torch.contiguous_format)
    return None if (shape, strides) == (t.shape, t.stride()) else lambda t: t.as_strided(shape, strides)


def is_canonical(t: Tensor) -> bool:
    """Whether :func:`canonical` gives a view."""
    aligned = all(s % WIDEST == 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n != 1)
    wide = t.shape[-3] != 1 and t.stride(-3) >= _MOST_ROW_STRIDE
    return t.stride(-1) == 1 and aligned and not wide and t.data_ptr() % 16 == 0
