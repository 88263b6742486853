"""Errors of results, measured in their tolerance: an ulp of the result's dtype plus what the arithmetic may lose."""

from __future__ import annotations

import torch
from torch import Tensor

FP32_ULP = 2.0**-23


def worst_ratio(actual: Tensor, exact: Tensor, slack: Tensor, *, equal_nan: bool = False) -> float:
    """The largest error over its tolerance: at most 1 is right, 1e30 where ``actual`` or ``exact`` is NaN.

    The tolerance is one ulp of ``actual``'s dtype (rounding once costs half of one; the interpreter truncates to bf16)
    plus ``slack``. ``exact`` is in fp64. Exactly rounded results, infinities among them, have no error.
    ``equal_nan``: neither has NaN where ``exact`` is NaN.
    """
    kind = torch.finfo(actual.dtype)
    _, exponent = torch.frexp(exact.abs().clamp(kind.smallest_normal, kind.max))
    ulp = torch.ldexp(torch.full_like(exact, kind.eps), exponent - 1)
    ratio = (actual.double() - exact).abs() / (ulp + slack)
    right = actual.double() == exact.to(actual.dtype).double()
    if equal_nan:
        right |= actual.isnan() & exact.isnan()
    ratio = torch.where(right, 0.0, ratio)
    return float(torch.nan_to_num(ratio, nan=1e30, posinf=1e30).max()) if ratio.numel() else 0.0
