"""Correctness: outputs are compared with a reference, within a tolerance that is derived, not chosen.

The reference is computed in fp32 or better and rounded once to the output's type (``Op.reference``). A correct
kernel accumulates in its own order and rounds once as well. The distance of an element to the reference is then at
most the sum of

* **1.5 ulp** of the output's type at the element's magnitude. Torch's own error is half an ulp, a kernel is
  granted twice that, and the reference itself is off by another half;
* **16 ulp of fp32**, relative: the few fp32 operations around the sum (scaling, activation, ``exp2``);
* the **accumulation error**, absolute: a sum that cancels keeps the error of its large partial sums. Tensor cores
  truncate once per k-step of 8, each time up to an ulp of a partial sum as large as the typical output:
  ``depth / 8 * eps(fp32) * typical`` for sums of ``depth`` products. With fp16 accumulation the ulp is 8192 times
  larger, so a worst case would allow anything; its steps round to nearest, and four standard deviations
  of that random walk are allowed instead: ``4 * sqrt(depth / 8) * eps(fp16) * typical``.

The *typical* output is the root mean square of the whole result, or of the element's row where that is larger: rows
differ in size, and their errors with them. An accumulation error of that many standard deviations (six where an op
derives its ``depth`` from one, as attention does) is exceeded by the worst of millions of outputs, so it is scaled with
the extreme of as many normal draws as there are outputs: :func:`extreme`. docs/notes/trunk.md#judge (CPU, 2026-11).

:func:`error_ratio` is the worst distance over that sum: up to 1 is correct. NaN where the reference has a number is
infinitely wrong, so that :func:`poison` reveals elements that were never written. For bf16 and a depth of 4096,
leaving out *one* product of an element's sum fails (``tests/trunk/test_verify.py`` plants it, and other bugs).

Torch is imported inside the functions, because commands that only print a database load this file too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

from cutekernels.errors import WrongResult

if TYPE_CHECKING:
    from torch import Tensor

_ULPS = 1.5
_FP32_ULPS = 16
_K_STEP = 8  # the smallest k of a tensor-core instruction on any GPU here
_CHUNK = 1 << 24  # elements compared at a time: fp64 copies of a whole output would not always fit
_SIGMAS = 6.0  # standard deviations that a declared depth stands for
_FALSE_ALARMS = 1e-6  # correct results called wrong, per judgement
ACCUMULATE_EPS = {"fp32": 2.0**-23, "fp16": 2.0**-10}


def poison(outputs: Iterable[Tensor | None]) -> None:
    """Fill ``outputs`` with values no kernel writes: NaN, or an integer type's lowest number."""
    import torch

    for out in outputs:
        if out is None:
            continue
        if out.is_floating_point():
            out.fill_(math.nan)
        elif out.dtype is not torch.bool:
            out.fill_(torch.iinfo(out.dtype).min)


def extreme(draws: int) -> float:
    """Standard deviations that the largest of ``draws`` normal errors exceeds in one of a million judgements."""
    return -NormalDist().inv_cdf(_FALSE_ALARMS / (2 * max(1, draws)))


def accumulation_error(expected: Tensor, depth: float, accumulate: str = "fp32") -> float:
    """Allowed absolute error of accumulating sums of ``depth`` products, over the typical output.

    See the module's docstring.
    """
    if accumulate not in ACCUMULATE_EPS:
        raise ValueError(f"accumulate must be one of {', '.join(ACCUMULATE_EPS)}; it is {accumulate!r}")
    if expected.numel() == 0 or not expected.is_floating_point():
        return 0.0
    steps = max(1.0, depth / _K_STEP)
    growth = steps if accumulate == "fp32" else 4 * math.sqrt(steps)
    return growth * ACCUMULATE_EPS[accumulate] * max(1.0, extreme(expected.numel()) / _SIGMAS)


def error_ratio(actual: Tensor, expected: Tensor, accumulated: float = 0.0, *, partial: bool = False) -> float:
    """The worst error of ``actual`` over its tolerance: correct up to 1, ``inf`` for NaN or an unwritten element.

    Args:
        actual: the kernel's output.
        expected: the reference, of the same shape and type.
        accumulated: error allowed over the typical output, from :func:`accumulation_error`.
        partial: NaN in ``expected`` marks elements that no launch writes; ``actual`` must be NaN there too, as
            :func:`poison` leaves it.

    Raises:
        WrongResult: shapes or types differ.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise WrongResult(
            f"an output must be {tuple(expected.shape)} {expected.dtype}; it is {tuple(actual.shape)} {actual.dtype}"
        )
    if expected.numel() == 0:
        return 0.0
    width = expected.shape[-1] if expected.dim() > 1 else expected.numel()
    ours, truth = actual.reshape(-1, width), expected.reshape(-1, width)
    rows = max(1, _CHUNK // width)
    chunks = list(zip(ours.split(rows), truth.split(rows), strict=True))
    typical = math.sqrt(sum(float(_squares(t.double()).sum()) for _, t in chunks) / expected.numel())
    return max(_chunk_ratio(o, t, accumulated, typical, partial) for o, t in chunks)


def _chunk_ratio(ours: Tensor, truth: Tensor, accumulated: float, typical: float, partial: bool) -> float:
    import torch

    if not truth.is_floating_point():
        return 0.0 if torch.equal(ours, truth) else math.inf
    kind = torch.finfo(truth.dtype)
    a, b = ours.double(), truth.double()
    # ulp: eps at the element's power of two; for subnormal numbers, that of the smallest normal one.
    _, exponent = torch.frexp(b.abs().clamp_min(kind.smallest_normal))
    ulp = torch.ldexp(torch.full_like(b, kind.eps), exponent - 1)
    rows = _squares(b).mean(-1, keepdim=True).sqrt().clamp_min(typical)
    tolerance = _ULPS * ulp + _FP32_ULPS * 2.0**-23 * b.abs() + accumulated * rows
    ratio = (a - b).abs() / tolerance
    # inf - inf is NaN, yet an overflow that the reference has too is correct. A NaN in the reference matches in what
    # is left unwritten alone.
    same = (a == b) & a.isinf()
    ratio = ratio.masked_fill(same | (a.isnan() & b.isnan()) if partial else same, 0.0)
    return float(torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf).max())


def _squares(b: Tensor) -> Tensor:
    """Squares, but 0 for an overflow: it would allow any error of the others."""
    return b.square().masked_fill(~b.isfinite(), 0.0)


def worst_error(
    actual: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    flops: float,
    accumulate: str = "fp32",
    depth: float | None = None,
    partial: bool = False,
) -> float:
    """:func:`error_ratio` over all outputs of a launch; unless given, the depth of the sums follows from ``flops``."""
    pairs = [(a, e) for a, e in zip(actual, expected, strict=True) if a is not None and e is not None]
    elements = sum(e.numel() for _, e in pairs)
    if depth is None:
        depth = flops / (2 * elements) if elements else 0.0
    return max(
        (error_ratio(a, e, accumulation_error(e, depth, accumulate), partial=partial) for a, e in pairs), default=0.0
    )
