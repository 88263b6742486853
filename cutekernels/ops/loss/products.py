"""The products of a loss over a vocabulary: logits of a few tokens and classes at a time, and what becomes of them.

Tokens are taken in chunks, classes in blocks, so that no piece of the logits is over 64 MB. Three products of a block:
the logits ``x @ weight.T``, and with their gradient ``dz`` in the logits' place ``dz @ weight`` and ``dz.T @ x``.
Logits and dz are in x's type, each rounded once, as ``nn.Linear`` and autograd round them; sums are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cutekernels.ops.loss.rows import LOGIT_GRADIENT, LOGIT_STATISTICS, MAXIMUM, TERMS
from cutekernels.ops.products.api import gemm
from cutekernels.ops.shared.calls import call, register

MOST_BYTES = 64_000_000  # of a block of logits
MOST_ROWS = 2048  # of a chunk: its products are as fast as those of more rows, and dweight is added up that often
_WIDTH = 256  # blocks have multiples of it: columns of the widest tiles
_ROWS = 128  # and chunks of this
_VECTOR = 8  # classes; a ragged last block is two, so that most of it moves by 16 bytes


@dataclass(frozen=True)
class Classifier:
    """Where logits come from: ``z = softcap(x @ weight.T + bias) / temperature``, of classes from ``first`` on.

    ``moments`` and ``totals``: which sums the loss needs beside the sum of exponentials (see ``rows.py``).
    """

    weight: Tensor  # (V, K)
    bias: Tensor | None  # (V,)
    class_weight: Tensor | None  # (V,) fp32, or fp64 beside fp64
    first: int
    ignore: int
    scale: float  # 1 / temperature
    cap: float  # 0 for none
    moments: bool
    totals: bool

    @property
    def options(self) -> tuple[bool, bool, bool]:
        return self.cap != 0.0, self.moments, self.totals

    @property
    def factor(self) -> float:
        """From a state's ``u`` to the logit ``z``: see ``kernels/triton/loss.py``."""
        return self.scale * (self.cap or 1.0)

    @property
    def shape(self) -> tuple[float, float]:
        """``scale`` and ``cap`` as kernels take them."""
        return self.scale, self.cap or 1.0

    def classes(self, begin: int, end: int) -> Tensor | None:
        return None if self.class_weight is None else self.class_weight[begin:end]

    def write_logits(self, x: Tensor, begin: int, end: int, out: Tensor) -> None:
        """The products of classes ``begin`` to ``end``: neither softcap nor temperature."""
        bias = None if self.bias is None else self.bias[begin:end]
        gemm(x, self.weight[begin:end].t(), bias=bias, out=out)


@dataclass
class Gradients:
    """Where gradients go; None for those nobody asked for.

    ``dweight`` is added up over chunks in its own type, ``dbias`` in fp32 or better.
    """

    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None

    @property
    def wanted(self) -> bool:
        return self.dx is not None or self.dweight is not None or self.dbias is not None


def chunks(rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of tokens, about equally many each."""
    count = -(-rows // MOST_ROWS)
    size = -(-rows // max(1, count) // _ROWS) * _ROWS
    for begin in range(0, rows, max(1, size)):
        yield begin, min(begin + size, rows)


def blocks(classes: int, rows: int, element_bytes: int) -> list[tuple[int, int]]:
    """Ranges of classes, about equally many each, that make at most MOST_BYTES with so many rows."""
    most = max(_WIDTH, MOST_BYTES // (max(1, rows) * element_bytes) // _WIDTH * _WIDTH)
    count = -(-classes // most)
    size = -(-classes // max(1, count) // _WIDTH) * _WIDTH
    found = [(begin, min(begin + size, classes)) for begin in range(0, classes, max(1, size))]
    if found:
        begin, end = found[-1]
        whole = begin + (end - begin) // _VECTOR * _VECTOR
        if begin < whole < end:
            found[-1:] = [(begin, whole), (whole, end)]
    return found


def fresh_state(x: Tensor, rows: int) -> Tensor:
    """The state of rows of which no class has been seen."""
    state = x.new_zeros((rows, TERMS), dtype=torch.promote_types(x.dtype, torch.float32))
    state.select(1, MAXIMUM).fill_(-torch.inf)
    return state


def read(x: Tensor, targets: Tensor, of: Classifier, state: Tensor, keep: bool) -> list[Tensor]:
    """Brings ``state`` (rows, TERMS) up to date with all classes. The blocks of logits, if they are to be kept."""
    rows, kept = len(x), []
    buffer: Tensor | None = None
    for begin, end in blocks(len(of.weight), rows, x.element_size()):
        if keep or buffer is None:
            buffer = x.new_empty(rows * (end - begin))
        logits = buffer[: rows * (end - begin)].view(rows, end - begin)
        of.write_logits(x, begin, end, logits)
        operands = (logits, targets, of.classes(begin, end), state)
        scalars = (of.first + begin, of.ignore, *of.shape)
        call(LOGIT_STATISTICS, operands, of.options, scalars, out=(_alias(state),))
        if keep:
            kept.append(logits)
    return kept


def differentiate(
    x: Tensor, targets: Tensor, of: Classifier, factors: Tensor, into: Gradients, first_chunk: bool, kept: list[Tensor]
) -> None:
    """Adds one chunk's gradients, whose rows have ``factors`` (rows, TERMS): the state's MAXIMUM, the logarithm of its
    SUM, a, b, t, s.

    ``kept``: its blocks of logits, which are used up; computed again where there are none.
    """
    ranges = blocks(len(of.weight), len(x), x.element_size())
    count = len(ranges) - (len(ranges) > 1 and ranges[-1][1] - ranges[-1][0] < _VECTOR)
    parts: Tensor | None = None
    before: Tensor | None = None
    widest = max([end - begin for begin, end in ranges], default=0)
    buffer = None if kept else x.new_empty(len(x) * widest)
    if into.dx is not None and count > 1:
        # A part of dx for each block, rounded once, then their sum in fp32: as exact as one product over all classes,
        # but for one rounding.
        parts = x.new_empty((count, *x.shape))
    for i in reversed(range(len(ranges))):  # the last blocks of logits may still be in the L2 cache
        begin, end = ranges[i]
        if buffer is None:
            dz = kept[i]
            kept[i] = x  # the block is free as soon as its products are issued
        else:
            dz = buffer[: len(x) * (end - begin)].view(len(x), end - begin)
            of.write_logits(x, begin, end, dz)
        operands = (dz, targets, of.classes(begin, end), factors)
        call(LOGIT_GRADIENT, operands, of.options, (of.first + begin, *of.shape), out=(_alias(dz),))
        if into.dx is not None:
            weight = of.weight[begin:end]
            if i == count:  # a ragged end's few classes, to which the block before adds its own
                before = gemm(dz, weight)
            else:
                beta = 0.0 if before is None else 1.0
                gemm(dz, weight, before, beta=beta, out=into.dx if parts is None else parts[i])
                before = None
        if into.dweight is not None:
            _add_product(dz, x, into.dweight[begin:end], first_chunk)
        if into.dbias is not None:
            into.dbias[begin:end] += dz.sum(0, dtype=into.dbias.dtype)
    if parts is not None and into.dx is not None:
        torch.sum(parts, 0, out=into.dx)  # halves are added in fp32


def _alias(t: Tensor) -> Tensor:
    """``t`` as a tensor of its own: calls with one tensor in two places are not replayed."""
    return t.detach()


def _add_product(dz: Tensor, x: Tensor, dweight: Tensor, first_chunk: bool) -> None:
    """``dweight += dz.T @ x``, or its first value."""
    if dweight.dtype == x.dtype:
        if first_chunk:
            gemm(dz.t(), x, out=dweight)
        else:
            gemm(dz.t(), x, dweight, beta=1.0, out=dweight)
    elif first_chunk:
        dweight.copy_(gemm(dz.t(), x))
    else:
        dweight += gemm(dz.t(), x)


register(LOGIT_STATISTICS)
register(LOGIT_GRADIENT)
