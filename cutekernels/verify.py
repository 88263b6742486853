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
    import torch
    from torch import Tensor

_ULPS = 1.5
_FP32_ULPS = 16
_K_STEP = 8  # the smallest k of a tensor-core instruction on any GPU here
_CHUNK = 1 << 24  # elements compared at a time: fp64 copies of a whole output would not always fit
_KEPT = 1 << 28  # elements of which a judge keeps tolerances, of 4 bytes for 16-bit ones
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
    return _Reference(expected, accumulated, partial).error_ratio(actual)


class Judge:
    """References for outputs of many configs of one problem: their tolerances are made once, and kept if ``keep``.

    The other arguments are those of :func:`worst_error`.
    """

    def __init__(
        self,
        expected: Sequence[Tensor | None],
        flops: float,
        accumulate: str = "fp32",
        depth: float | None = None,
        partial: bool = False,
        *,
        keep: bool = True,
    ) -> None:
        elements = sum(e.numel() for e in expected if e is not None)
        if depth is None:
            depth = flops / (2 * elements) if elements else 0.0
        self._references = [
            None if e is None else _Reference(e, accumulation_error(e, depth, accumulate), partial, keep=keep)
            for e in expected
        ]

    def worst_error(self, actual: Sequence[Tensor | None]) -> float:
        """:func:`error_ratio` over all outputs of a launch."""
        pairs = zip(actual, self._references, strict=True)
        return max((r.error_ratio(a) for a, r in pairs if a is not None and r is not None), default=0.0)


class _Reference:
    """An expected output in chunks of rows, each with the tolerance of its elements where they are kept."""

    def __init__(self, expected: Tensor, accumulated: float, partial: bool, *, keep: bool = False) -> None:
        self._expected, self._accumulated, self._partial = expected, accumulated, partial
        self._chunks = list(_rows(expected, expected))
        squares = sum(float(_squares(t.double()).sum()) for t in self._chunks)
        self._typical = math.sqrt(squares / max(1, expected.numel()))
        kept = keep and expected.numel() <= _KEPT
        self._tolerances = [self._tolerance(t) for t in self._chunks] if kept else None

    def error_ratio(self, actual: Tensor) -> float:
        expected = self._expected
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            raise WrongResult(
                f"an output must be {tuple(expected.shape)} {expected.dtype}; "
                f"it is {tuple(actual.shape)} {actual.dtype}"
            )
        tolerances: Iterable[Tensor] = self._tolerances or map(self._tolerance, self._chunks)
        parts = zip(_rows(actual, expected), self._chunks, tolerances, strict=True)
        return max((self._ratio(*part) for part in parts), default=0.0)

    def _tolerance(self, truth: Tensor) -> Tensor:
        import torch

        if not truth.is_floating_point():
            return truth
        kind = torch.finfo(truth.dtype)
        b = truth.double()
        # ulp: eps at the element's power of two; for subnormal numbers, that of the smallest normal one.
        _, exponent = torch.frexp(b.abs().clamp_min(kind.smallest_normal))
        ulp = torch.ldexp(torch.full_like(b, kind.eps), exponent - 1)
        rows = _squares(b).mean(-1, keepdim=True).sqrt().clamp_min(self._typical)
        return (_ULPS * ulp + _FP32_ULPS * 2.0**-23 * b.abs() + self._accumulated * rows).to(_exact(truth))

    def _ratio(self, ours: Tensor, truth: Tensor, tolerance: Tensor) -> float:
        import torch

        if not truth.is_floating_point():
            return 0.0 if torch.equal(ours, truth) else math.inf
        a, b = ours.to(_exact(truth)), truth.to(_exact(truth))
        ratio = (a - b).abs_().div_(tolerance)
        # inf - inf is NaN, yet an overflow that the reference has too is correct. A NaN in the reference matches in
        # what is left unwritten alone.
        same = (a == b) & a.isinf()
        ratio = ratio.masked_fill_(same | (a.isnan() & b.isnan()) if self._partial else same, 0.0)
        return float(torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf).max())


def _rows(t: Tensor, like: Tensor) -> Iterable[Tensor]:
    """``t`` in chunks of rows as long as those of ``like``; none where it is empty."""
    if like.numel() == 0:
        return ()
    width = like.shape[-1] if like.dim() > 1 else like.numel()
    chunks: Iterable[Tensor] = t.reshape(-1, width).split(max(1, _CHUNK // width))
    return chunks


def _exact(t: Tensor) -> torch.dtype:
    """A type in which differences of 16-bit numbers are off by an ulp of fp32, and of others by one of fp64."""
    import torch

    return torch.float32 if t.element_size() < 4 else torch.float64


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
    judge = Judge([e for _, e in pairs], flops, accumulate, depth, partial, keep=False)
    return judge.worst_error([a for a, _ in pairs])
