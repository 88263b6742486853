"""Gradients of ``attention``, from tensors to launches, and their registration with torch.

Statistics of the rows first (``attention_delta``), then the passes of ``attention_backward``. Always deterministic.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from cutekernels import dispatch
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.attention import reference
from cutekernels.ops.attention.api import canonical, check, pose
from cutekernels.ops.attention.arguments import check_ends
from cutekernels.ops.attention.backward import ATTENTION_BACKWARD
from cutekernels.ops.attention.backward_config import AttentionBackwardProblem, passes
from cutekernels.ops.attention.delta import ATTENTION_DELTA
from cutekernels.ops.attention.problem import LOG2_E, AttentionProblem
from cutekernels.ops.shared import tensor_op
from cutekernels.ops.shared.registration import define, no_gradient


def _check(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> None:
    """Raises UnsupportedProblem for arguments that pose no problem."""
    mask, cu_q, cu_kv, _, _, _, scale, _, _, sinks = _filled(rest)
    check(q, k, v, mask, cu_q, cu_kv, scale, sinks)
    for name, t in (("dout", dout), ("out", out)):
        if t.shape != q.shape or t.dtype != q.dtype or t.device != q.device:
            raise UnsupportedProblem(
                f"{name} must be as q, {tuple(q.shape)}, {q.dtype}, on {q.device}; it is {tuple(t.shape)}, {t.dtype}, "
                f"on {t.device}"
            )
    rows = (q.shape[0], q.shape[2], q.shape[1]) if cu_q is None else (q.shape[1], q.shape[0])
    kind = torch.promote_types(q.dtype, torch.float32)
    for name, given in (("lse", lse), ("dlse", dlse)):
        if given is not None and (given.shape != rows or given.dtype != kind or given.device != q.device):
            raise UnsupportedProblem(
                f"{name} must be {tuple(rows)}, {kind}, on {q.device}; it is {tuple(given.shape)}, {given.dtype}, on "
                f"{given.device}: call attention with return_lse"
            )


def _filled(rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """The op's arguments from ``mask`` on; torch leaves out defaults at the end."""
    return (*rest, None, None)[:10]


@cache
def _problems(posed: AttentionProblem) -> tuple[AttentionBackwardProblem, ...]:
    """The problems of the passes that give the gradients of ``posed``."""
    fields = {name: getattr(posed, name) for name in type(posed).__dataclass_fields__}
    return tuple([AttentionBackwardProblem(**fields, of=of) for of in passes(posed.head_dim)])


def _run(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Poses, plans and launches for checked GPU tensors."""
    mask, cu_q, cu_kv, causal, left, right, scale, softcap, config, sinks = _filled(rest)
    *results, dsinks = _fresh(q, k, v, sinks)
    if q.numel() == 0 or k.numel() == 0:
        for t in (*results, dsinks):
            t.zero_()
        if sinks is not None and dlse is not None:  # lse is the sink
            dsinks = dlse.sum(-1).reshape(-1, len(sinks)).sum(0).to(sinks.dtype)
        return results[0], results[1], results[2], dsinks
    with torch.cuda.device(q.device):
        dout, q, k, v = (canonical(t) for t in (dout, q, k, v))
        (stats,) = tensor_op.run(ATTENTION_DELTA, None, (out, dout, lse, dlse))
        problems = _problems(pose(q, k, mask, cu_q, causal, left, right, softcap, False))
        if mask is not None:
            mask = mask.expand(q.shape[0], q.shape[2], -1, -1)
        ends = [None if t is None else t.contiguous() for t in (cu_q, cu_kv)]
        named = dict(zip("qkv", results, strict=True))
        for problem in problems:
            chosen = config if "k" in problem.of else None
            plan = dispatch.plan(ATTENTION_BACKWARD, problem, q.get_device(), chosen)
            plan.launch(*[named[name] for name in problem.of], dout, q, k, v, stats, mask, *ends, scale, softcap)
        if sinks is not None:
            dsinks = _of_sinks(sinks, stats.view(2, -1, q.shape[-2], lse.shape[-1]))
    return results[0], results[1], results[2], dsinks


def _of_sinks(sinks: Tensor, stats: Tensor) -> Tensor:
    """As :func:`reference.sink_gradients`, from ``stats`` ``(2, B, H, rows)``: torch adds up in a fixed order."""
    terms = torch.exp2(sinks.float().unsqueeze(-1) * LOG2_E - stats[0]) * stats[1]
    return -terms.sum((0, 2)).to(sinks.dtype)


def _fresh(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for dq, dk, dv and the gradients of sinks, of which there may be none."""
    dsinks = q.new_empty((0,)) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


# ---- torch.library --------------------------------------------------------------------------------------

_SCHEMA = (
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, bool causal, int window_left, int window_right, float scale, "
    "float softcap, str? config=None, Tensor? sinks=None) -> (Tensor, Tensor, Tensor, Tensor)"
)


def register(library: torch.library.Library) -> None:
    """Defines the op in ``library`` (namespace "cutekernels"): schema, GPU and CPU, fake. It has no gradient itself.

    ``config`` is for the kernel that gives dK; the dispatcher chooses for the others.
    """
    define(library, _SCHEMA, _cuda, _cpu, _fake)
    name = "attention_backward"
    torch.library.register_autograd(f"cutekernels::{name}", no_gradient(name), lib=library)


def _cuda(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(*args)
    return _run(*args)


def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(*args)
    return _fresh(*(*args[2:5], _filled(args[7:])[-1]))


def _cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(*args)
    dout, dlse, q, k, v, out, lse = args[:7]
    mask, cu_q, cu_kv, causal, left, right, scale, softcap, _, sinks = _filled(args[7:])
    if cu_q is not None:
        check_ends(q, k, cu_q, cu_kv)
    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[2], -1, -1)
    reach = 0 if causal else right
    dq, dk, dv = reference.gradients(
        dout, dlse, q, k, v, mask, cu_q, cu_kv, scale, softcap,
        left=None if left < 0 else left, right=None if reach < 0 else reach, sinks=sinks,
    )  # fmt: skip
    dsinks = q.new_empty((0,)) if sinks is None else reference.sink_gradients(dout, dlse, out, lse, sinks)
    return dq, dk, dv, dsinks
