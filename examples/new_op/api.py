"""What users call, and the op's definition in torch: ``torch.ops.cutekernels.softcap``."""

from __future__ import annotations

from torch import Tensor

from cutekernels.ops.shared.calls import call, register
from cutekernels.ops.softcap.op import SOFTCAP, SoftcapConfig


def softcap(x: Tensor, cap: float, *, out: Tensor | None = None, config: SoftcapConfig | str | None = None) -> Tensor:
    """``cap * tanh(x / cap)``, in fp32, rounded once.

    Args:
        x: ``(..., N)``, fp16, bf16 or fp32, any strides.
        cap: the bound of the result's absolute value.
        out: where to write: shape, dtype and device of ``x``. Not differentiable.
        config: overrides the tuned choice. Ignored on the CPU.

    Raises:
        UnsupportedProblem: operands that no kernel takes.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    return call(SOFTCAP, (x,), (), (cap,), config=config, out=None if out is None else (out,))[0]


register(SOFTCAP)
