"""``adamw_step``: the public function, and its registration with torch.

The op writes results of its own, which the public function lets be the inputs.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.optimizer.op import ADAMW_STEP, UPDATED, AdamWConfig, Hyper
from cutekernels.ops.shared.calls import call, places, refuse_others, register, register_inplace
from cutekernels.ops.shared.checks import check_number, check_whole, present, quote
from cutekernels.ops.shared.paths import refuse_duals

_MOST_STEPS = int(sys.float_info.max)  # the corrections are computed in floats


def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int | Tensor,
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    master: Tensor | None = None,
    config: AdamWConfig | str | None = None,
) -> Tensor:
    """One AdamW update in place: ``m += (1 - b1)(g - m)``, ``v = b2 v + (1 - b2) g^2``, then
    ``p = p (1 - lr wd) - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)``, as :class:`torch.optim.AdamW` does.

    Args:
        param: any shape, fp32, bf16 or fp16 (on the CPU fp64 too). Dense operands of equal strides are fast; others
            cost copies.
        grad: shape of ``param``, its dtype or fp32.
        exp_avg: the first moment m, shape of ``param``: fp32, or bf16 or fp16 for half the memory. It is rounded once,
            when it is stored; ``param`` takes its update from the unrounded value.
        exp_avg_sq: the second moment v, likewise.
        step: which step this is, counted from 1: an int, or one fp32 number on the device, which is not waited for (a
            number below 1 there counts as 1).
        lr: the learning rate, a float or one fp32 number on the device.
        betas: decay rates of the moments, from 0 to below 1.
        eps: added to the denominator.
        weight_decay: decoupled from the gradient.
        maximize: ascend.
        master: an fp32 copy of a bf16 or fp16 ``param``: it is updated, and ``param`` is its rounding.
        config: overrides the tuned choice, as a :class:`AdamWConfig` or its text. Ignored on the CPU.

    Returns:
        ``param``. Not differentiable.

    Raises:
        UnsupportedProblem: shapes, dtypes or devices that do not fit, betas or a step out of range, sparse or complex
            tensors, operands that overlap, a call that asks for gradients.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    steps, count = (step, None) if isinstance(step, Tensor) else (None, step)
    rates, rate = (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)
    check_hyper(rate, betas, eps, weight_decay)
    if rates is not None and rates.dtype != torch.float32:
        raise UnsupportedProblem(f"adamw_step takes lr in float32; got {rates.dtype}: convert it")
    if steps is None:
        check_whole("adamw_step", "step", count, 1, _MOST_STEPS)
    hyper = Hyper.of(rate, betas, eps, weight_decay, count)
    inputs = (param, grad, exp_avg, exp_avg_sq, master, steps, rates)
    refuse_others(ADAMW_STEP, inputs, None, (maximize,))
    if torch.is_grad_enabled() and any(t.requires_grad for t in present(inputs)):
        raise UnsupportedProblem("adamw_step is not differentiable: call it under torch.no_grad()")
    refuse_duals("adamw_step", inputs)

    call(ADAMW_STEP, inputs, (maximize,), tuple(hyper), config=config, out=places(inputs, UPDATED), in_place=True)
    return param


def check_hyper(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Refuses what torch.optim.AdamW refuses."""
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        check_number("AdamW", name, value, 0.0)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise UnsupportedProblem(f"AdamW takes betas as two numbers (beta1, beta2); got {quote(betas)}")
    for beta in betas:
        check_number("AdamW", "each of betas", beta, 0.0)
        if not beta < 1.0:
            raise UnsupportedProblem(f"betas are from 0 to below 1; got {betas}")


register(ADAMW_STEP)
register_inplace(ADAMW_STEP, UPDATED)
