"""Rows grouped by expert, by ids or by a router's logits: one launch for few tokens, else a chain of ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import SymInt, Tensor

from cutekernels.ops.moe.api import moe_gather, moe_permute, moe_route
from cutekernels.ops.moe.dispatch import MAX_PAIRS, MOE_DISPATCH, MOE_ROUTE_DISPATCH, most_routed
from cutekernels.ops.moe.route import MOE_ROUTE_BACKWARD
from cutekernels.ops.moe.rows import MOE_COMBINE
from cutekernels.ops.shared.calls import call, register

_is_compiling = torch.compiler.is_compiling


def dispatched(x: Tensor, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(rows, offsets, inverse)`` of ``moe_permute(ids, experts)`` and ``moe_gather(x, inverse)``.

    ``x`` is ``(..., H)`` and ``ids`` ``(..., K)``.
    """
    if _at_most(ids.numel(), MAX_PAIRS):
        rows, offsets, inverse = call(MOE_DISPATCH, (x, ids), (experts,))
    else:
        _, offsets, inverse = moe_permute(ids, experts)
        rows = moe_gather(x, inverse)
    return rows, offsets, inverse


def route_dispatched(
    x: Tensor, logits: Tensor, top_k: int, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(rows, offsets, inverse, weights, ids)``: :func:`dispatched` by ``moe_route(logits, top_k)``.

    ``logits`` are ``(..., E)``. Weights sum over a token's experts in an order of their own: they may differ from
    those of ``moe_route`` in the last bit, as those of its configs do among themselves.
    """
    experts = logits.shape[-1] if logits.dim() else 0
    if (
        type(top_k) is int
        and top_k > 0  # moe_route says what is wrong with any other
        and (logits.dtype == x.dtype or logits.dtype == torch.float32)
        and _at_most(logits.numel(), most_routed(experts, top_k) * experts)
    ):
        rows, offsets, inverse, weights, ids = call(MOE_ROUTE_DISPATCH, (x, logits), (top_k, renormalize))
        return rows, offsets, inverse, weights, ids
    weights, ids = moe_route(logits, top_k, renormalize=renormalize)
    return *dispatched(x, ids, experts), weights, ids


def _at_most(number: int | SymInt, most: int) -> bool:
    """Whether ``number <= most``; of a size that a graph leaves open, whether that is known without a guard."""
    if not _is_compiling():
        return bool(number <= most)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(number <= most)


# ---- gradients --------------------------------------------------------------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, offsets, inverse = output
    ctx.save_for_backward(inverse)
    ctx.mark_non_differentiable(offsets, inverse)


def _gradient(ctx: Any, drows: Tensor, *_: Any) -> tuple[Tensor, None, None, None]:
    (inverse,) = ctx.saved_tensors
    return MOE_COMBINE.path(drows, inverse, None, None), None, None, None


def _remember_routed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, logits, ctx.top_k, ctx.renormalize, _ = inputs
    _, offsets, inverse, weights, ids = output
    ctx.save_for_backward(inverse, weights, ids, logits)
    ctx.mark_non_differentiable(offsets, inverse, ids)


def _routed_gradient(ctx: Any, drows: Tensor, _: Any, __: Any, dweights: Tensor, ___: Any) -> tuple[Any, ...]:
    inverse, weights, ids, logits = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx = MOE_COMBINE.path(drows, inverse, None, None) if needs[0] else None
    dlogits = None
    if needs[1]:
        dlogits = MOE_ROUTE_BACKWARD.path(dweights, weights, ids, logits, ctx.top_k, ctx.renormalize, None)
    return dx, dlogits, None, None, None


register(MOE_DISPATCH, gradient=_gradient, remember=_remember)
register(MOE_ROUTE_DISPATCH, gradient=_routed_gradient, remember=_remember_routed)
