"""The length of a sum whose tolerance covers an operand that is rounded on the way."""

from __future__ import annotations

import math

_DEVIATIONS = 7  # standard deviations, for the largest error of a million outputs
_GATED = 5  # times as many behind a gate, which multiplies two such sums
_EPS = {"bf16": 2.0**-7, "fp16": 2.0**-10}


def rounded_operand_depth(dtype: str, gated: bool) -> float:
    """The depth at which ``verify.py`` grants what rounding one operand of a sum to ``dtype`` costs.

    Each product is off by half an ulp of its type at most, their sum by a normal error of ``eps / sqrt(12)`` times the
    typical output. ``verify.py`` grants ``depth / 8 * eps(fp32)``.
    """
    granted = _DEVIATIONS * (_GATED if gated else 1) * _EPS[dtype] / math.sqrt(12)
    return 8 * granted / 2.0**-23
