"""The norm in front of a product, as a launch of its own."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.norms.api import rms_norm


def normalise(u: Tensor, norm_weight: Tensor | None, rstd: Tensor | None, eps: float, exact: bool = False) -> Tensor:
    """The RMS norm of ``u``, rounded once, or twice where ``exact``: by its kernel, or where ``rstd`` is given by
    torch's own.
    """
    if rstd is None:
        rounding: Literal["once", "huggingface"] = "huggingface" if exact else "once"
        return rms_norm(u, norm_weight, eps=eps, rounding=rounding)
    if rstd.shape != u.shape[:-1] or rstd.dtype not in (torch.float32, torch.float64) or rstd.device != u.device:
        raise UnsupportedProblem(
            f"rstd must be {tuple(u.shape[:-1])}, fp32, on {u.device}; it is {tuple(rstd.shape)}, {rstd.dtype}, on "
            f"{rstd.device}"
        )
    wide = torch.promote_types(u.dtype, torch.float32)
    h = u.to(wide) * rstd.to(wide).unsqueeze(-1)
    if exact:
        h = h.to(u.dtype).to(wide)
    if norm_weight is not None:
        h = h * norm_weight.to(wide)
    return h.to(u.dtype)
