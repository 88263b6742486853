"""``moe_route``, ``moe_permute``, ``moe_gather`` and ``moe_combine``: the public functions, and their gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cutekernels.ops.moe.permute import MOE_PERMUTE, MoePermuteConfig
from cutekernels.ops.moe.route import MOE_ROUTE, MOE_ROUTE_BACKWARD, MoeRouteConfig
from cutekernels.ops.moe.rows import MOE_COMBINE, MOE_COMBINE_BACKWARD, MOE_DISPATCH, MOE_GATHER, MoeMoveConfig
from cutekernels.ops.shared.calls import call, register
from cutekernels.ops.shared.checks import check_flag, check_whole


def moe_route(
    logits: Tensor, top_k: int, *, renormalize: bool = True, config: MoeRouteConfig | str | None = None
) -> tuple[Tensor, Tensor]:
    """The ``top_k`` largest of ``softmax(logits)`` over all experts, in descending order, and whose they are.

    Experts are ranked by their logits, ties to the lower expert (-0 equals 0). Computed in fp32 and never rounded:
    weights are fp32 whatever the logits are, since they multiply what experts return. A row with NaN or +inf, or of
    -inf alone, has weights NaN as ``torch.softmax`` has; its ids are distinct and in range all the same, NaN ranking
    first as in ``torch.topk``.

    Args:
        logits: ``(..., E)``, fp16, bf16 or fp32 (on the CPU fp64 too), E from 1 to 512; any strides.
        top_k: experts per token, from 1 to ``min(E, 32)``.
        renormalize: divides the weights of a token by their sum, so that they sum to 1.
        config: overrides the tuned choice, as a :class:`MoeRouteConfig` or its text. Ignored on the CPU.

    Returns:
        ``(weights, ids)``, each ``(..., top_k)`` and contiguous. ``weights`` in fp32 (fp64 for fp64 logits),
        differentiable in ``logits``, once. ``ids`` in int32, which is what kernels index experts with at half the
        traffic; ``ids.long()`` is what ``torch.topk`` returns.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, too many experts, ``top_k`` out of range.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    if type(top_k) is not int or type(renormalize) is not bool:  # keys take 1 for True, and 8.0 for 8
        check_whole("moe_route", "top_k", top_k)
        check_flag("moe_route", "renormalize", renormalize)
    weights, ids = call(MOE_ROUTE, (logits,), (top_k, renormalize), config=config)
    return weights, ids


def moe_permute(
    ids: Tensor, num_experts: int, *, config: MoePermuteConfig | str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Groups (token, slot) pairs by expert, stably: what a grouped GEMM needs.

    ``moe_gather(x, inverse)`` brings tokens into the grouped order, ``moe_combine(y, inverse, weights)`` back. Row r of
    that order holds pair ``order[r]``, numbered ``t * K + j`` for a token and its slot.

    Args:
        ids: ``(..., K)``, int32 or int64, any strides: the expert of each pair, pairs numbered front to back. An id
            that names no expert (-1, say, for one on another device) is grouped behind all others.
        num_experts: E, from 1 to 1023.
        config: overrides the tuned choice, as a :class:`MoePermuteConfig` or its text. Ignored on the CPU.

    Returns:
        ``(order, offsets, inverse)``, int32. ``order`` ``(T*K,)``: the pairs, grouped. ``offsets`` ``(E+1,)``: expert
        e has rows ``offsets[e]`` to ``offsets[e+1]`` of the grouped order. ``inverse``, shaped as ``ids``: the row
        of each pair. ``order`` and ``inverse`` are permutations of ``range(T*K)`` whatever the ids are.

    Raises:
        UnsupportedProblem: another dtype, more than 1023 experts, more than 2^31 - 2^20 pairs.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    if type(num_experts) is not int:
        check_whole("moe_permute", "num_experts", num_experts)
    order, offsets, inverse = call(MOE_PERMUTE, (ids,), (num_experts,), config=config)
    return order, offsets, inverse


def moe_gather(x: Tensor, inverse: Tensor, *, config: MoeMoveConfig | str | None = None) -> Tensor:
    """``rows[inverse[t, j]] = x[t]``: a copy of each token for each of its experts, grouped by expert.

    Args:
        x: ``(..., H)``, fp16, bf16 or fp32 (on the CPU fp64 too); any strides, contiguous rows are fast.
        inverse: ``(..., K)`` int32 from :func:`moe_permute`: a permutation of ``range(T*K)``. Rows that it leaves
            out are undefined; an entry that names no row is skipped on a GPU, and raises on the CPU.
        config: overrides the tuned choice, as a :class:`MoeMoveConfig` or its text. Ignored on the CPU.

    Returns:
        ``(T*K, H)``, dtype of ``x``, contiguous. Differentiable in ``x``; its gradient is summed in fp32 over a
        token's slots in their order.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, shapes that do not fit, other devices.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    return call(MOE_GATHER, (x, inverse), config=config)[0]


def moe_combine(
    rows: Tensor, inverse: Tensor, weights: Tensor | None = None, *, config: MoeMoveConfig | str | None = None
) -> Tensor:
    """``out[t] = sum_j weights[t, j] * rows[inverse[t, j]]``: in fp32, in the order of j, rounded once.

    Args:
        rows: ``(T*K, H)``, fp16, bf16 or fp32 (on the CPU fp64 too), grouped by expert; any strides.
        inverse: ``(..., K)`` int32 from :func:`moe_permute`. An entry that names no row adds nothing on a GPU, and
            raises on the CPU.
        weights: ``(..., K)`` fp32 from :func:`moe_route` (fp64 beside fp64 rows); None for ones.
        config: overrides the tuned choice, as a :class:`MoeMoveConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., H)``, dtype of ``rows``, contiguous. Differentiable in ``rows`` and ``weights``, deterministically;
        with ``weights`` once.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, shapes that do not fit, other devices.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    return call(MOE_COMBINE, (rows, inverse, weights), config=config)[0]


# ---- gradients --------------------------------------------------------------------------------------


def _remember_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, ctx.top_k, ctx.renormalize, _ = inputs
    ctx.save_for_backward(*output, logits)
    ctx.mark_non_differentiable(output[1])


def _route_gradient(ctx: Any, dweights: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
    dlogits = MOE_ROUTE_BACKWARD.path(dweights, *ctx.saved_tensors, ctx.top_k, ctx.renormalize, None)
    return dlogits, None, None, None


def _remember_inverse(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _gather_gradient(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
    (inverse,) = ctx.saved_tensors
    return MOE_COMBINE.path(drows, inverse, None, None), None, None


def _remember_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, inverse, weights, _ = inputs
    if weights is None:
        ctx.save_for_backward(inverse)
    else:
        ctx.save_for_backward(inverse, rows, weights)


def _combine_gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
    inverse, *saved = ctx.saved_tensors
    if not saved:
        return MOE_GATHER.path(dout, inverse, None), None, None, None
    rows, weights = saved
    drows, dweights = MOE_COMBINE_BACKWARD.path(dout, rows, inverse, weights, None)
    return drows, None, dweights, None


register(MOE_ROUTE, gradient=_route_gradient, remember=_remember_route)
register(MOE_ROUTE_BACKWARD)
register(MOE_PERMUTE)
register(MOE_GATHER, gradient=_gather_gradient, remember=_remember_inverse)
register(MOE_DISPATCH)
register(MOE_COMBINE, gradient=_combine_gradient, remember=_remember_combine)
register(MOE_COMBINE_BACKWARD)
