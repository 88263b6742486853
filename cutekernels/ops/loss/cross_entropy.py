"""``linear_cross_entropy``: the loss of a classifier over a vocabulary, without its logits.

For the mean and the sum, gradients are formed in the forward pass (three products); the backward scales them. Each
token's own loss (``reduction="none"``) may meet any upstream gradient: its backward forms the logits again, as
:mod:`cutekernels.ops.loss.logprob` does (four products).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cutekernels import torch_names
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.loss import logprob
from cutekernels.ops.loss import products as common
from cutekernels.ops.loss.products import (
    Classifier,
    Gradients,
    chunks,
    differentiate,
    fake_gradients,
    fresh_state,
    read,
)
from cutekernels.ops.loss.rows import MAXIMUM, SCALE_GRADIENT, SUM, TARGET, TERMS, TOTAL
from cutekernels.ops.shared.calls import call, define, register
from cutekernels.ops.shared.checks import check_number, check_tensor, check_whole
from cutekernels.ops.shared.paths import Path, plain, transformed

_unwrap = torch_names.unwrap
REDUCTIONS = ("mean", "sum", "none")
_TENSORS = "Tensor x, Tensor weight, Tensor targets, Tensor? bias, Tensor? class_weight, Tensor? items"
_OPTIONS = (
    "bool mean, SymInt ignore_index, float label_smoothing, float z_loss, float softcap, float scale, "
    "bool wide, bool wants_x, bool wants_weight, bool wants_bias"
)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    class_weight: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None,
    accumulate: torch.dtype | None = None,
) -> Tensor:
    """``F.cross_entropy(x @ weight.T + bias, targets)``, without the logits: they are formed a block at a time.

    Of a token with logits z, target t and class weights w (1 where there are none), over V classes::

        loss = (1 - label_smoothing) * w[t] * (lse(z) - z[t])
             + label_smoothing / V * sum_c w[c] * (lse(z) - z[c]) + z_loss * lse(z)^2

    Args:
        x: ``(..., K)``, fp16 or bf16 (on the CPU fp32 and fp64 too).
        weight: ``(V, K)``, dtype of ``x``: the layout of ``nn.Linear.weight``.
        targets: ``(...)``, int64 or int32: classes from 0 to V - 1, or ``ignore_index``. Others are refused on the
            CPU; on a GPU their loss is NaN, as are the gradients. Nothing is read outside the row.
        bias: ``(V,)``, dtype of ``x`` or fp32.
        reduction: ``"mean"`` over the tokens that count (weighted by ``w[t]``, as torch does), ``"sum"``, or
            ``"none"`` for ``(...)``. Where no token counts the mean is NaN, as torch's is, and gradients are 0.
        ignore_index: target of tokens that do not count. Their loss and gradients are 0.
        label_smoothing: share of the target that is spread over all classes, 0 to 1.
        z_loss: factor of the squared log-sum-exp; its mean is over the number of tokens that count.
        softcap: logits become ``softcap * tanh(logits / softcap)`` first; None for no cap.
        temperature: divides the logits, after the cap.
        class_weight: ``(V,)``, fp32 or dtype of ``x``; w above, without gradient.
        num_items_in_batch: with ``"mean"``, what the sum is divided by in the place of the number of tokens: a number
            or a tensor of one, as transformers passes it under gradient accumulation.
        accumulate: the type in which weight's gradient is added up over chunks of 2048 tokens: ``torch.float32``, or
            None for that of the product (weight's own, or autocast's), as ``reduction="none"`` has it. The gradient
            itself has weight's type.

    Returns:
        fp32 (fp64 for fp64): a scalar, or ``(...)``. Differentiable in x, weight and bias. For ``"mean"`` and
        ``"sum"`` gradients are formed here and scaled by the backward, which runs once. Same bits each time.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched extents or devices, a target outside the classes on
            the CPU, an option out of its range.
    """
    name = "linear_cross_entropy"
    x, targets, lead = common.flatten(name, x, weight, targets, bias)
    scale, cap = common.shape(name, temperature, softcap)
    if reduction not in REDUCTIONS:
        raise UnsupportedProblem(f"{name} takes reduction as mean, sum or none; got {reduction!r}")
    check_whole(name, "ignore_index", ignore_index)
    check_number(name, "label_smoothing", label_smoothing, 0.0, 1.0)
    check_number(name, "z_loss", z_loss, 0.0, common.GREATEST)
    label_smoothing, z_loss = float(label_smoothing), float(z_loss)
    if accumulate not in (None, torch.float32, weight.dtype):
        raise UnsupportedProblem(f"{name} takes accumulate as torch.float32 or None; got {accumulate}")
    if reduction == "none" and accumulate not in (None, weight.dtype):
        raise UnsupportedProblem(f"{name} takes accumulate with reduction mean or sum; with none leave it out")
    if class_weight is not None:
        check_tensor(name, "class_weight", class_weight)
        if class_weight.shape != weight.shape[:1] or class_weight.dtype not in (x.dtype, torch.float32):
            raise UnsupportedProblem(
                f"{name} takes class_weight as ({weight.shape[0]},) in fp32 or x's type; got "
                f"{tuple(class_weight.shape)} in {class_weight.dtype}"
            )
        if class_weight.requires_grad:
            raise UnsupportedProblem(f"{name} has no gradient with respect to class_weight: pass class_weight.detach()")
        class_weight = class_weight.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    items = _items(num_items_in_batch, reduction, x)
    if reduction == "none":
        losses = logprob.token_losses(
            x, weight, targets, bias, class_weight, ignore_index, label_smoothing, z_loss, cap, scale
        )
        return losses.view(lead)
    wide = accumulate == torch.float32
    if transformed():  # wrappers do not say what is wanted below
        wants = [True, True, bias is not None]
    else:
        recording = torch.is_grad_enabled()
        wants = [recording and t is not None and t.requires_grad for t in (x, weight, bias)]
    options = (reduction == "mean", ignore_index, label_smoothing, z_loss, cap, scale, wide)
    loss: Tensor = PATH(x, weight, targets, bias, class_weight, items, *options, *wants)[0]
    return loss


def _items(given: int | Tensor | None, reduction: str, x: Tensor) -> Tensor | None:
    """``num_items_in_batch`` as a tensor of one number beside ``x``."""
    if given is None:
        return None
    name = "linear_cross_entropy"
    if reduction != "mean":
        raise UnsupportedProblem(
            f"{name} divides by num_items_in_batch for reduction='mean' alone; it is {reduction!r}"
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    if isinstance(given, Tensor):
        if given.numel() != 1:
            raise UnsupportedProblem(f"{name} takes num_items_in_batch as one number; got {tuple(given.shape)}")
        return given.detach().reshape(()).to(device=x.device, dtype=wide)
    check_number(name, "num_items_in_batch", given, 0.0, common.GREATEST)
    return torch.full((), float(given), dtype=wide, device=x.device)


# ---- forward and backward -------------------------------------------------------------------------------


@torch.no_grad()
def _compute(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, class_weight: Tensor | None, items: Tensor | None,
    mean: bool, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, scale: float,
    wide: bool, wants_x: bool, wants_weight: bool, wants_bias: bool, *, multiply: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, its gradients by x, weight and bias (empty tensors for those nobody wants), and the factor that those
    of fp16 still want (else empty).

    ``multiply``: :func:`_multiply`, or the op that it is in graphs; what is around it a compiler fuses.
    """
    _check(x, weight, targets, bias, class_weight, ignore_index)
    targets = targets.contiguous()
    counted = targets != ignore_index
    sums = torch.promote_types(x.dtype, torch.float32)
    of_class = common.class_weights(class_weight, targets, len(weight), sums)  # w[t]; NaN outside the classes
    number = counted.sum()
    divisor = items
    if divisor is None:
        divisor = number if class_weight is None else torch.where(counted, of_class, 0.0).sum()
    factor = divisor.to(sums).reciprocal() if mean else of_class.new_ones(())
    factor_z = (number if items is None else items).to(factor.dtype).reciprocal() if mean else factor
    every = class_weight.sum() if class_weight is not None else float(len(weight))
    share = label_smoothing / max(1, len(weight))
    # Gradients of fp16 stay large until the backward: those of a mean over many tokens would vanish below its range.
    shrunk = mean and x.dtype == torch.float16
    shift = divisor.to(sums).clamp_min(1.0).log2().floor().exp2() if shrunk else None
    grown = factor if shift is None else factor * shift

    smoothed = label_smoothing != 0.0
    factors: Any = (None,) * 4
    if wants_x or wants_weight or wants_bias:
        of_target = (1 - label_smoothing) * grown * of_class
        factors = (
            torch.where(counted, of_target + share * grown * every, 0.0),
            torch.where(counted, -of_target, 0.0),
            torch.where(counted, -share * grown, 0.0) if smoothed else None,
            None if z_loss == 0.0 else 2 * z_loss * (factor_z if shift is None else shift * factor_z),
        )
    products: Any = multiply or _multiply
    state, *gradients = products(
        x, weight, targets, bias, class_weight if smoothed else None, *factors, ignore_index, softcap, scale, smoothed,
        wide, wants_x, wants_weight, wants_bias,
    )  # fmt: skip

    maximum, log_sum, at_target = state[:, MAXIMUM], state[:, SUM].log(), state[:, TARGET]
    by = scale * (softcap or 1.0)
    losses = (1 - label_smoothing) * of_class * (log_sum - (at_target - maximum) * by)
    if smoothed:
        losses = losses + share * (every * log_sum - state[:, TOTAL])
    loss = torch.where(counted, losses, 0.0).sum() * factor
    if z_loss != 0.0:
        lse = torch.where(counted, maximum * by + log_sum, 0.0)
        loss = loss + factor_z * (z_loss**0.5 * lse).square().sum()
    unit = x.new_empty(0, dtype=sums) if shift is None else shift.reciprocal()
    return loss, *gradients, unit


@torch.no_grad()
def _multiply(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    a: Tensor | None, t: Tensor | None, s: Tensor | None, slope: Tensor | None, ignore_index: int, softcap: float,
    scale: float, totals: bool, wide: bool, wants_x: bool, wants_weight: bool, wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The rows' states, and the gradients by x, weight and bias: empty tensors for those nobody wants.

    ``a``, ``t`` and ``s``: factors of the rows, None where no gradient is wanted. ``slope``: by which a row's
    log-sum-exp is in its ``a``, a number on the device.
    """
    x, weight, targets = x.contiguous(), common.rows_contiguous(weight), targets.contiguous()
    bias = None if bias is None else bias.contiguous()
    of = Classifier(weight, bias, class_weight, 0, ignore_index, scale, softcap, moments=False, totals=totals)
    into = Gradients.fresh(x, weight, bias, (wants_x, wants_weight, wants_bias), wide=wide)
    state = fresh_state(x, len(x))
    for begin, end in chunks(len(x)):
        some, own, its_state = x[begin:end], targets[begin:end], state[begin:end]
        kept = read(some, own, of, its_state, into.wanted)
        if a is None or t is None:
            continue
        factors = its_state.clone()  # MAXIMUM is its first
        log_sum = torch.log(its_state[:, SUM], out=factors[:, 1])
        factors[:, 2], factors[:, 4] = a[begin:end], t[begin:end]
        if s is not None:
            factors[:, 5] = s[begin:end]
        if slope is not None:
            lse = its_state[:, MAXIMUM] * of.factor + log_sum  # of a row that does not count none
            factors[:, 2] += torch.where(own != ignore_index, slope * lse, 0.0)
        differentiate(some, own, of, factors, into.of_rows(begin, end), begin == 0, kept)
    return state, *into.rounded(x, weight, bias)


def _check(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, shares: Tensor | None, ignore: int) -> None:
    common.check("linear_cross_entropy", x, weight, targets, bias, shares, ignore_index=ignore, first=None)


def _check_and_multiply(*args: Any) -> Any:
    x, weight, targets, bias, class_weight, _, _, _, _, ignore_index = args[:10]
    _check(x, weight, targets, bias, class_weight, ignore_index)
    return _multiply(*args)


def _fake(*args: Any) -> tuple[Tensor, ...]:
    x, weight, targets, bias, class_weight, _, _, _, _, ignore_index = args[:10]
    _check(x, weight, targets, bias, class_weight, ignore_index)
    rows = x.shape[0]  # len() would make a number of what a graph leaves open
    state = x.new_empty((rows, TERMS), dtype=torch.promote_types(x.dtype, torch.float32))
    return state, *fake_gradients(x, weight, bias, args[-3:])


def _remember(ctx: Any, args: tuple[Any, ...], made: tuple[Tensor, ...]) -> None:
    ctx.wants = args[-3:]
    ctx.spent = False
    ctx.transformed = transformed()  # the pullback of torch.func.vjp is called outside of it
    ctx.save_for_backward(*made[1:])
    if not ctx.transformed:  # there a second derivative has to meet these, or would be 0
        ctx.mark_non_differentiable(*made[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """The gradients of the forward times the loss's own; in place outside of graphs, or memory is taken twice."""
    found: list[Tensor | None] = [None, None, None]
    if dloss is not None:
        within = transformed() or ctx.transformed
        if not within and torch.is_grad_enabled():
            raise UnsupportedProblem(
                "linear_cross_entropy has no second derivative (create_graph=True): write the loss out in torch"
            )
        if ctx.spent:
            raise RuntimeError(
                "linear_cross_entropy runs backward once: its gradients, formed in the forward, have been handed out. "
                "Call it again, or with reduction='none', which forms them in each backward"
            )
        ctx.spent = in_place = not within and plain((dloss,)) is not None
        saved = ctx.saved_tensors
        *gradients, unit = map(_unwrap, saved) if ctx.transformed else saved  # wrappers have no address
        factor = (dloss * unit if unit.numel() else dloss).reshape(1)
        for i, (t, wanted) in enumerate(zip(gradients, ctx.wants, strict=True)):
            if wanted and (in_place or within):
                own = factor.to(torch.promote_types(t.dtype, torch.float32))  # fp32 for an fp32 bias beside fp64
                found[i] = call(SCALE_GRADIENT, (t, own), (), (1.0,), out=(t,) if in_place else None)[0]
            elif wanted:  # traced: a compiler fuses it with what is added, from another use of a tied weight
                found[i] = (t.to(factor.dtype) * factor).to(t.dtype)
    return found[0], found[1], None, found[2], *[None] * 12


register(SCALE_GRADIENT)
_PRODUCTS = define(
    "_linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, Tensor? bias, Tensor? class_weight, "
    "Tensor? a, Tensor? t, Tensor? s, Tensor? slope, SymInt ignore_index, float softcap, float scale, bool totals, "
    "bool wide, bool wants_x, bool wants_weight, bool wants_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    _check_and_multiply,
    _check_and_multiply,
    _fake,
)


def _compute_in_graph(*args: Any) -> Any:
    return _compute(*args, multiply=_PRODUCTS)


PATH = Path(
    f"linear_cross_entropy({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    (_compute, _compute),
    _compute_in_graph,
    remember=_remember,
    gradient=_gradient,
    autocast="lower",
    kept=(3, 4, 5),
)
