"""Gradients of ``attention``, from tensors to launches, and their registration with torch.

Statistics of the rows first (``attention_delta``), then the passes of ``attention_backward``. Always deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutekernels import dispatch
from cutekernels import gpu as gpus
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention import reference
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD
from cutekernels.ops.attention.backward_config import (
    NARROWEST_HANDED,
    AttentionBackwardProblem,
    Launches,
    passes,
)
from cutekernels.ops.attention.calls import NO_WINDOW, check_scale, window_of
from cutekernels.ops.attention.delta import ATTENTION_DELTA
from cutekernels.ops.attention.op import ATTENTION
from cutekernels.ops.attention.operands import check_ends
from cutekernels.ops.attention.problem import LOG2_E, AttentionProblem, sides_of
from cutekernels.ops.shared.calls import define, plan_call, ways_of
from cutekernels.ops.shared.paths import Call, CallCache, Inputs, Path

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

_CALLS = CallCache()
_OPERANDS = ("dout", "q", "k", "v", "mask", "cu_seqlens_q", "cu_seqlens_kv")
_NO_BAND: dict[str, Any] = dict(zip(ATTENTION.options, (False, *NO_WINDOW, False, False), strict=True))
Results = tuple[Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, dsinks


def _check(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    cu_q: Tensor | None, cu_kv: Tensor | None, sinks: Tensor | None, scale: float,
) -> None:  # fmt: skip
    """Raises UnsupportedProblem for arguments that pose no problem."""
    check_scale(scale)
    ATTENTION.admit((q, k, v, mask, cu_q, cu_kv, sinks), **_NO_BAND)
    rows = (q.shape[0], q.shape[2], q.shape[1]) if cu_q is None else (q.shape[1], q.shape[0])
    wide = torch.promote_types(q.dtype, torch.float32)
    like_q, like_lse = (tuple(q.shape), q.dtype, q.device), (rows, wide, q.device)
    for name, t, like in (
        ("dout", dout, like_q),
        ("out", out, like_q),
        ("lse", lse, like_lse),
        ("dlse", dlse, like_lse),
    ):
        if t is not None and (found := (tuple(t.shape), t.dtype, t.device)) != like:
            why = ": call attention with return_lse" if like is like_lse else ", as q is"
            raise UnsupportedProblem("{} must be {}, {}, on {}; it is {}, {}, on {}{}".format(name, *like, *found, why))


@cache
def problems(posed: AttentionProblem, gpu: GpuSpec | None) -> tuple[AttentionBackwardProblem, ...]:
    """The problems of the launches that give the gradients of ``posed``: one where dS had better go through memory
    and finds room in that of ``gpu``. Without ``gpu``, those of each pass.
    """
    fields = {name: getattr(posed, name) for name in type(posed).__dataclass_fields__}
    found = [AttentionBackwardProblem(**fields, of=of) for of in passes(posed.head_dim)]
    if gpu is not None and gpu.has_wgmma and found[0].may_hand_on and posed.width >= NARROWEST_HANDED:
        whole = found[0].replace(of="qkv")
        config = dispatch.resolve(ATTENTION_BACKWARD, whole, gpu).config
        if Launches.of(whole, config, gpu).worth_it(whole, config, gpu):
            return (whole,)
    return tuple(found)


def _launch(
    inputs: Inputs, causal: bool, left: int, right: int, scale: float, softcap: float, config: str | None
) -> tuple[Tensor, ...]:
    """dq, dk, dv and dsinks, by the statistics' launch and those of the passes: planned once for calls alike."""
    options, scalars = (causal, left, right, softcap > 0.0), (scale, softcap)
    given = None, inputs, options, scalars, config
    if 0.0 < scale < math.inf:  # neither guards nor keys hold it
        made = _CALLS.replay(*given) or _CALLS.recall(given)
        if made is not None:
            return made
    _check(*(*inputs, scale))  # type: ignore[arg-type]
    _, _, q, k, v, *_, sinks = inputs
    assert q is not None and k is not None and v is not None
    fresh = _fresh(q, k, v, sinks)
    call = Call.of(_plan(inputs, causal, left, right, softcap, config), inputs, fresh)
    return _CALLS.add(call, given)


def _plan(
    inputs: Inputs, causal: bool, left: int, right: int, softcap: float, config: str | None
) -> Callable[..., None]:
    """``launch(dq, dk, dv, dsinks, *inputs, scale, softcap)`` for operands that lie as ``inputs`` do."""
    dout, dlse, q, k, v, out, lse, mask, cu_q, cu_kv, _ = inputs
    assert dout is not None and q is not None and k is not None and v is not None and lse is not None
    if q.numel() == 0 or k.numel() == 0:
        return _of_nothing
    with torch.cuda.device(q.device):
        statistics = plan_call(ATTENTION_DELTA, (out, dout, lse, dlse))
        seen = (causal, *window_of(left, right), softcap > 0.0, False)
        options = dict(zip(ATTENTION.options, seen, strict=True))
        passed = []
        posed = ATTENTION.problem(q, q, k, v, mask, cu_q, cu_kv, None, **options)
        for problem in problems(posed, gpus.detect(q.get_device()) if config is None else None):
            plan = dispatch.plan(ATTENTION_BACKWARD, problem, q.get_device(), config if "k" in problem.of else None)
            passed.append((plan.launch, ["qkv".index(name) for name in problem.of]))
        ways = ways_of(ATTENTION_BACKWARD, dict(zip(_OPERANDS, (dout, q, k, v, mask, cu_q, cu_kv), strict=True)))
    shape = (2, -1, q.shape[-2], lse.shape[-1])

    def launch(*args: Any) -> None:
        dout, dlse, q, k, v, out, lse, mask, cu_q, cu_kv, sinks, scale, softcap = args[4:]
        given = (out, dout, lse, dlse)
        (stats,) = statistics.run(None, given, [0 if t is None else t.data_ptr() for t in given], ())
        places = [
            t if way is None else way(t)
            for t, way in zip((dout, q, k, v, mask, cu_q, cu_kv), ways, strict=True)
        ]  # fmt: skip
        for launched, results in passed:
            launched(*[args[i] for i in results], *places[:4], stats, *places[4:], scale, softcap)
        if sinks is not None:
            args[3].copy_(_of_sinks(sinks, stats.view(shape)))

    return launch


def _of_nothing(*args: Any) -> None:
    """The gradients where there is no query or no key: zero, but the sinks', whose log-sum-exp is the sink itself."""
    for t in args[:4]:
        t.zero_()
    dlse, sinks = args[5], args[14]
    if sinks is not None and dlse is not None:
        args[3].copy_(dlse.sum(-1).reshape(-1, len(sinks)).sum(0))


def _of_sinks(sinks: Tensor, stats: Tensor) -> Tensor:
    """Gradients of the sinks from ``stats`` ``(2, B, H, rows)``, added up by torch in a fixed order."""
    terms = torch.exp2(sinks.float().unsqueeze(-1) * LOG2_E - stats[0]) * stats[1]
    return -terms.sum((0, 2)).to(sinks.dtype)


def _fresh(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Results:
    """Memory for dq, dk, dv and the gradients of sinks, of which there may be none."""
    dsinks = q.new_empty((0,)) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


# ---- torch.library --------------------------------------------------------------------------------------

_SCHEMA = (
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? sinks, bool causal, int window_left, int window_right, "
    "float scale, float softcap, str? config=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_INPUTS = _SCHEMA.count("Tensor ") + _SCHEMA.count("Tensor? ")


def _split(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``(inputs, causal, left, right, scale, softcap, config)``; torch leaves out a default at the end."""
    return args[:_INPUTS], *(*args[_INPUTS:], None)[:6]


def _cuda(*args: Any) -> tuple[Tensor, ...]:
    return _launch(*_split(args))


def _fake(*args: Any) -> Results:
    inputs, *options = _split(args)
    _check(*(*inputs, options[3]))
    return _fresh(*(*inputs[2:5], inputs[10]))


def _cpu(*args: Any) -> Results:
    inputs, causal, left, right, scale, softcap, _ = _split(args)
    _check(*(*inputs, scale))
    dout, dlse, q, k, v, out, lse, mask, cu_q, cu_kv, sinks = inputs
    if cu_q is not None:
        check_ends(q, k, cu_q, cu_kv)
    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[2], -1, -1)
    dq, dk, dv = reference.gradients(
        dout, dlse, q, k, v, mask, cu_q, cu_kv, scale, softcap, sinks=sinks,
        **sides_of(causal, *window_of(left, right)),
    )  # fmt: skip
    dsinks = q.new_empty((0,)) if sinks is None else reference.sink_gradients(dout, dlse, out, lse, sinks)
    return dq, dk, dv, dsinks


# The op has no gradient itself. ``config`` is for the kernel that gives dK; the dispatcher chooses for the others.
BACKWARD_PATH = Path(_SCHEMA, (_cuda, _cpu), define(f"_{_SCHEMA}", _cuda, _cpu, _fake))
