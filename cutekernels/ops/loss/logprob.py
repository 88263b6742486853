"""``linear_logprob``: the log-probability of each token's target, without the logits; and of a shard of a vocabulary.

One op gives for each row the target's logit, the log-sum-exp and, where they are wanted, the mean logit under the
softmax and the sum of all: less the largest logit, which is the fifth. The first four may meet any upstream gradient
per row; the backward forms the logits again (four products). What losses make of them is plain torch. The largest logit
has no gradient: a loss does not depend on it, or adds it to the log-sum-exp, whose gradient is the softmax either way.
"""

from __future__ import annotations

from typing import Any, NamedTuple, overload
from typing import Literal as L

import torch
from torch import Tensor

from cutekernels.ops.loss import products
from cutekernels.ops.loss.products import (
    Classifier,
    Gradients,
    chunks,
    differentiate,
    fake_gradients,
    fresh_state,
    read,
)
from cutekernels.ops.loss.rows import MAXIMUM, SUM, TARGET, TERMS, TOTAL, WEIGHED
from cutekernels.ops.shared.calls import define
from cutekernels.ops.shared.checks import check_flag, check_whole
from cutekernels.ops.shared.paths import Path

_TENSORS = "Tensor x, Tensor weight, Tensor targets, Tensor? bias, Tensor? class_weight"
_SHAPE = "SymInt first, SymInt ignore_index, float softcap, float scale, bool moments, bool totals"
_SUMS = f"linear_logprob({_TENSORS}, {_SHAPE}, bool shard) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
_BACKWARD = (
    "linear_logprob_backward(Tensor dtarget, Tensor dlse, Tensor dmean, Tensor dtotal, Tensor maximum, Tensor log_sum, "
    f"Tensor mean, {_TENSORS}, {_SHAPE}, bool wants_x, bool wants_weight, bool wants_bias) -> (Tensor, Tensor, Tensor)"
)


class LogProb(NamedTuple):
    """Each row, in fp32: the target's log-probability, the log-sum-exp of the logits, the softmax's entropy."""

    logp: Tensor
    lse: Tensor
    entropy: Tensor


class ShardSums(NamedTuple):
    """Each row over one rank's classes, in fp32: the target's logit (0 where another rank has it), log-sum-exp, and
    the mean logit under the shard's own softmax.
    """

    target_logit: Tensor
    lse: Tensor
    mean_logit: Tensor


@overload
def linear_logprob(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, temperature: float = 1.0,
    softcap: float | None = None, ignore_index: int = -100, entropy: L[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def linear_logprob(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, temperature: float = 1.0,
    softcap: float | None = None, ignore_index: int = -100, entropy: L[True],
) -> LogProb: ...  # fmt: skip


def linear_logprob(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    entropy: bool = False,
) -> Tensor | LogProb:
    """``log_softmax(softcap(x @ weight.T + bias) / temperature)[targets]``, without the logits.

    Args:
        x: ``(..., K)``, fp16 or bf16 (on the CPU fp32 and fp64 too).
        weight: ``(V, K)``, dtype of ``x``.
        targets: ``(...)``, int64 or int32: classes from 0 to V - 1, or ``ignore_index``. Others are refused on the
            CPU and give NaN on a GPU.
        bias: ``(V,)``, dtype of ``x`` or fp32.
        temperature: divides the logits, after the cap.
        softcap: logits become ``softcap * tanh(logits / softcap)`` first; None for no cap.
        ignore_index: target of rows that do not count: their results and gradients are 0.
        entropy: whether to return a :class:`LogProb` of log-probability, log-sum-exp and entropy.

    Returns:
        ``(...)`` in fp32 (fp64 for fp64), or three of those. Differentiable in x, weight and bias by any upstream
        gradients; memory is that of 64 MB of logits and the gradients. Same bits each time.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched extents or devices, a target outside the classes on
            the CPU, an option out of its range.
    """
    name = "linear_logprob"
    x, targets, lead = products.flatten(name, x, weight, targets, bias)
    scale, cap = products.shape(name, temperature, softcap)
    check_whole(name, "ignore_index", ignore_index)
    check_flag(name, "entropy", entropy)
    target, log_sum, mean, _, maximum = SUMS(
        x, weight, targets, bias, None, 0, ignore_index, cap, scale, bool(entropy), False, False
    )
    logp: Tensor = (target - log_sum).view(lead)
    if not entropy:
        return logp
    return LogProb(logp, (_largest(maximum, scale, cap) + log_sum).view(lead), (log_sum - mean).view(lead))


def linear_logprob_shard(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    first: int,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> ShardSums:
    """The share of one rank of a sharded vocabulary in :func:`linear_logprob`.

    With one :class:`ShardSums` of each rank, ``lse = logsumexp(lses)``, ``logp = sum(target_logits) - lse`` and
    ``entropy = lse - sum(exp(lses - lse) * mean_logits)``. Rows whose target is
    ``ignore_index`` are zeros here and no part of that: give them 0 afterwards.

    Args:
        x: ``(..., K)``, the same on all ranks.
        weight: ``(V / ranks, K)``: classes ``first``, ``first + 1``, ...
        targets: ``(...)``, classes of the whole vocabulary. Those of other ranks give a target's logit of 0.
        bias: of this rank's classes.
        first: this rank's first class.
        temperature, softcap, ignore_index: as :func:`linear_logprob` takes them.

    Returns:
        Three ``(...)`` in fp32, each differentiable in x, weight and bias. x's gradient is this rank's part.

    Raises:
        UnsupportedProblem: as :func:`linear_logprob`; a negative ``first``.
    """
    name = "linear_logprob_shard"
    x, targets, lead = products.flatten(name, x, weight, targets, bias)
    scale, cap = products.shape(name, temperature, softcap)
    check_whole(name, "ignore_index", ignore_index)
    check_whole(name, "first", first, 0)
    target, log_sum, mean, _, maximum = SUMS(
        x, weight, targets, bias, None, first, ignore_index, cap, scale, True, False, True
    )
    largest = _largest(maximum, scale, cap)
    return ShardSums(target.view(lead), (largest + log_sum).view(lead), (largest + mean).view(lead))


def token_losses(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, class_weight: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, cap: float, scale: float,
) -> Tensor:  # fmt: skip
    """:func:`linear_cross_entropy` of each row by itself, for checked arguments."""
    smoothed = label_smoothing != 0
    shares = class_weight if smoothed else None
    target, log_sum, _, total, maximum = SUMS(
        x, weight, targets, bias, shares, 0, ignore_index, cap, scale, False, smoothed, False
    )
    of_class = products.class_weights(class_weight, targets, len(weight), log_sum.dtype)
    losses = (1 - label_smoothing) * of_class * (log_sum - target)
    if smoothed:
        every = class_weight.sum() if class_weight is not None else len(weight)
        losses = losses + label_smoothing / len(weight) * (every * log_sum - total)
    if z_loss != 0:
        lse = _largest(maximum, scale, cap) + log_sum
        losses = losses + (z_loss**0.5 * lse).square()  # without the square of a large one
    return torch.where(targets != ignore_index, losses, 0.0)


def _largest(maximum: Tensor, scale: float, cap: float) -> Tensor:
    """The largest logit of each row, off its state's MAXIMUM."""
    return maximum.detach() * (scale * (cap or 1.0))


# ---- forward and backward -------------------------------------------------------------------------------


@torch.no_grad()
def _compute(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, class_weight: Tensor | None, first: int,
    ignore_index: int, softcap: float, scale: float, moments: bool, totals: bool, shard: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Each row's target logit, log-sum-exp, mean logit and sum of logits, less the largest logit; and its MAXIMUM.

    Zeros for what is not wanted. A shard's target logit is whole.
    """
    _check(x, weight, targets, bias, class_weight, ignore_index, first if shard else None)
    x, weight, targets = x.contiguous(), products.rows_contiguous(weight), targets.contiguous()
    bias = None if bias is None else bias.contiguous()
    of = Classifier(weight, bias, class_weight, first, ignore_index, scale, softcap, moments, totals)
    state = fresh_state(x, len(x))
    for begin, end in chunks(len(x)):
        read(x[begin:end], targets[begin:end], of, state[begin:end], keep=False)
    counted = targets != ignore_index
    maximum, log_sum = (torch.where(counted, t, 0.0) for t in (state[:, MAXIMUM], state[:, SUM].log()))
    target = state[:, TARGET] * of.factor
    if not shard:
        known = ~counted | ((targets >= 0) & (targets < len(weight)))
        target = torch.where(known, (state[:, TARGET] - maximum) * of.factor, torch.nan)
    mean = torch.where(counted, state[:, WEIGHED] / state[:, SUM], 0.0) if moments else torch.zeros_like(log_sum)
    return target, log_sum, mean, state[:, TOTAL].clone(), maximum


@torch.no_grad()
def _differentiate(
    dtarget: Tensor, dlse: Tensor, dmean: Tensor, dtotal: Tensor, maximum: Tensor, log_sum: Tensor, mean: Tensor,
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, class_weight: Tensor | None, first: int,
    ignore_index: int, softcap: float, scale: float, moments: bool, totals: bool, wants_x: bool, wants_weight: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients by x, weight and bias: empty tensors for those nobody wants."""
    x, weight, targets = x.contiguous(), products.rows_contiguous(weight), targets.contiguous()
    bias = None if bias is None else bias.contiguous()
    of = Classifier(weight, bias, class_weight, first, ignore_index, scale, softcap, moments, totals)
    into = Gradients.fresh(x, weight, bias, (wants_x, wants_weight, wants_bias))
    counted = targets != ignore_index
    factors = log_sum.new_zeros((len(x), TERMS))
    factors[:, 0], factors[:, 1] = maximum, log_sum
    factors[:, 2] = torch.where(counted, dlse + dmean * (1 - mean) if moments else dlse, 0.0)
    factors[:, 4] = torch.where(counted, dtarget, 0.0)
    if moments:
        factors[:, 3] = torch.where(counted, dmean, 0.0)
    if totals:
        factors[:, 5] = torch.where(counted, dtotal, 0.0)
    for begin, end in chunks(len(x)):
        rows = into.of_rows(begin, end)
        differentiate(x[begin:end], targets[begin:end], of, factors[begin:end], rows, begin == 0, [])
    return into.rounded(x, weight, bias)


def _check(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, class_weight: Tensor | None, ignore_index: int,
    first: int | None,
) -> None:  # fmt: skip
    products.check("linear_logprob", x, weight, targets, bias, class_weight, ignore_index=ignore_index, first=first)


def _fake(*args: Any) -> tuple[Tensor, ...]:
    x, weight, targets, bias, class_weight, first, ignore_index = args[:7]
    _check(x, weight, targets, bias, class_weight, ignore_index, first)
    kind = torch.promote_types(x.dtype, torch.float32)
    return tuple([x.new_empty(x.shape[:1], dtype=kind) for _ in range(5)])


def _fake_gradient(*args: Any) -> tuple[Tensor, ...]:
    x, weight, _, bias = args[7:11]
    return fake_gradients(x, weight, bias, args[-3:])


def _remember(ctx: Any, args: tuple[Any, ...], made: tuple[Tensor, ...]) -> None:
    ctx.options = args[5:11]
    ctx.save_for_backward(made[4], made[1], made[2], *args[:5])


def _gradient(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
    maximum, log_sum, mean, x, weight, targets, bias, class_weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wants = needs[0], needs[1], bias is not None and needs[3]
    made = BACKWARD(*upstream[:4], maximum, log_sum, mean, x, weight, targets, bias, class_weight, *ctx.options, *wants)
    dx, dweight, dbias = [t if wanted else None for t, wanted in zip(made, wants, strict=True)]
    return dx, dweight, None, dbias, *[None] * 8


BACKWARD = Path(
    _BACKWARD,
    (_differentiate, _differentiate),
    define(f"_{_BACKWARD}", _differentiate, _differentiate, _fake_gradient),
)
SUMS = Path(
    _SUMS,
    (_compute, _compute),
    define(f"_{_SUMS}", _compute, _compute, _fake),
    remember=_remember,
    gradient=_gradient,
    autocast="lower",
    kept=(3, 4),
)
