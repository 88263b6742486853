"""What users call, and the op's definition in torch: ``torch.ops.cutekernels.scale_rows``."""

from __future__ import annotations

from torch import Tensor

from cutekernels.ops.scale_rows.op import SCALE_ROWS, ScaleRowsConfig
from cutekernels.ops.shared.calls import call, register


def scale_rows(
    x: Tensor, scale: Tensor, *, out: Tensor | None = None, config: ScaleRowsConfig | str | None = None
) -> Tensor:
    """``x * scale[:, None]``, in fp32, rounded once.

    Args:
        x: ``(R, C)``, fp16, bf16 or fp32. Strided columns cost a copy.
        scale: ``(R,)``, fp32.
        out: where to write: shape, dtype and device of ``x``, ``x`` itself included. Not differentiable.
        config: overrides the tuned choice. Ignored on the CPU.

    Raises:
        UnsupportedProblem, InvalidConfig: operands that no kernel takes, a config that breaks a rule of the op.
    """
    return call(SCALE_ROWS, (x, scale), config=config, out=None if out is None else (out,))[0]


register(SCALE_ROWS)
