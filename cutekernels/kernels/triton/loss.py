"""Softmax statistics of logits, and gradients of a loss with respect to them, one block of the vocabulary at a time.

A block of logits is (rows, cols), as a product left it. What a row's loss and gradient need of the whole vocabulary is
its *state*, eight numbers in fp32 that one kernel updates block after block:

    0 MAXIMUM      m, the largest u so far
    1 SUM          sum of exp(d), d = (u - m) * factor
    2 TARGET       the target's u; 0 until its block has come
    3 WEIGHED      sum of exp(d) * d                    (MOMENTS)
    4 TOTAL        sum of w * d, w the class's weight   (TOTALS)
    5 SHARE        sum of w                             (TOTALS)
    6, 7           0: a row is one sector of 32 bytes

The logit of the loss is ``z = u * factor``: ``tanh(x / cap) * (cap / temperature)`` of what the product left (CAPPED),
or ``x / temperature``. Sums are of what logits lie below the largest, which is subtracted before the factor: near 1e30
a log-sum-exp has no digits for the logarithm, and a product that the compiler fuses into the difference differs from
the one that it rounded, by 1e22.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

_LOG2E = tl.constexpr(1.4426950408889634)

Pointers = namedtuple("Pointers", "out_state_ptr logits_ptr targets_ptr class_weight_ptr state_ptr")
Gradients = namedtuple("Gradients", "out_ptr logits_ptr targets_ptr class_weight_ptr factors_ptr")
Steps = namedtuple("Steps", "row col", defaults=(0, 0))
Numbers = namedtuple("Numbers", "first ignore scale cap")
GradientNumbers = namedtuple("GradientNumbers", "first scale cap")
Row = namedtuple("Row", "logits cols col")  # of a block; col: the columns' stride


class Strides(NamedTuple):
    """Strides of the operands, in elements."""

    out: Steps = Steps()  # of gradients
    logits: Steps = Steps()


class How(NamedTuple):
    """Compiled in: what the loss needs, and a program's columns."""

    CAPPED: bool
    MOMENTS: bool
    TOTALS: bool
    WEIGHTED: bool
    BLOCK: int


@triton.jit
def _exp(x):
    return tl.exp2(x * _LOG2E)


@triton.jit
def _squash(x, cap):
    """``tanh(x / cap)``. Absolute error of some 1e-7: of ``cap`` times that, a part of an ulp of the largest logits."""
    return 1.0 - 2.0 / (_exp(2.0 * x / cap) + 1.0)


@triton.jit
def _logits(row, c, cap, CAPPED: tl.constexpr):
    """u of columns ``c``: -inf past the block."""
    there = c < row.cols
    u = tl.load(row.logits + c.to(tl.int64) * row.col, mask=there, other=0.0).to(tl.float32)
    if CAPPED:
        u = _squash(u, cap)
    return tl.where(there, u, float("-inf"))


@triton.jit
def _sums(row, class_weight_ptr, factor, cap, anchor, how):
    """Of a row of a block: the largest u; the sums of exp(d), exp(d) * d, w * d and w of ``d = (u - anchor) * factor``.

    An anchor of -inf counts as 0.
    """
    top = tl.full([how.BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([how.BLOCK], tl.float32)
    weight = tl.zeros([how.BLOCK], tl.float32)
    plain = tl.zeros([how.BLOCK], tl.float32)
    share = tl.zeros([how.BLOCK], tl.float32)
    anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
    for at in range(0, row.cols, how.BLOCK):
        c = at + tl.arange(0, how.BLOCK)
        u = _logits(row, c, cap, how.CAPPED)
        below = (u - anchor) * factor
        e = _exp(below)
        top = tl.maximum(top, u)
        mass += e
        if how.MOMENTS:
            weight += tl.where(e > 0.0, e * below, e)
        if how.TOTALS:
            there = c < row.cols
            w = tl.load(class_weight_ptr + c, mask=there, other=0.0) if how.WEIGHTED else 1.0
            plain += tl.where(there, w * below, 0.0)
            if how.WEIGHTED:
                share += w
    every = tl.sum(share, axis=0) if how.WEIGHTED else row.cols * 1.0
    return tl.max(top, axis=0), tl.sum(mass, axis=0), tl.sum(weight, axis=0), tl.sum(plain, axis=0), every


@triton.jit
def _term(state, n: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, 8) == n, state, 0.0), axis=0)


@triton.jit
def logit_statistics(at: Pointers, cols, by: Strides, of: Numbers, how: How, DEPENDENT: tl.constexpr = False):
    """Adds a block of the vocabulary, whose first class is ``first``, to the state of its rows.

    Grid: rows.
    Schedule: a program walks over its row BLOCK columns at a time; each lane keeps sums of its own until the end.
    Masks: columns past the block count as logits of -inf. Rows whose target is ``ignore`` are not read.
    """
    pdl_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(at.targets_ptr + row).to(tl.int64)
    state = at.state_ptr + row * 8
    out = at.out_state_ptr + row * 8
    # The state in one register a lane: all warps read it before sums meet, behind which one of them writes in place.
    k = tl.arange(0, 8)
    found = tl.where(k < 6, tl.load(state + k), 0.0)
    if target != of.ignore:
        maximum = tl.load(state)
        line = Row(at.logits_ptr + row * by.logits.row, cols, by.logits.col)
        factor = of.scale * of.cap if how.CAPPED else of.scale
        # Exponentials are taken from an anchor, the largest logit of the blocks before and of the first columns here,
        # so that sums meet once. Where a later logit is far above it, a second pass takes that for the anchor.
        c = tl.arange(0, how.BLOCK)
        anchor = tl.maximum(maximum, tl.max(_logits(line, c, of.cap, how.CAPPED), axis=0))
        top, mass, weight, plain, every = _sums(line, at.class_weight_ptr, factor, of.cap, anchor, how)
        top = tl.maximum(maximum, top)
        if (top - anchor) * factor > 40.0:
            anchor = top
            _, mass, weight, plain, every = _sums(line, at.class_weight_ptr, factor, of.cap, top, how)
        # From the anchor, and from the maximum of before, to the maximum. Where all logits so far are -inf,
        # exp(-inf - 0) is the 0 that exp(-inf + inf) is not.
        finite = tl.where(top == float("-inf"), 0.0, top)
        up = (tl.where(anchor == float("-inf"), 0.0, anchor) - finite) * factor
        grows = (tl.where(maximum == float("-inf"), 0.0, maximum) - finite) * factor
        moved = _exp(up)
        grown = _exp((maximum - finite) * factor)
        total = _term(found, 1)
        found = tl.where(k == 0, top, tl.where(k == 1, total * grown + mass * moved, found))
        if how.MOMENTS:
            weighed = tl.where(grown > 0.0, (_term(found, 3) + grows * total) * grown, 0.0)
            found = tl.where(k == 3, weighed + (weight + up * mass) * moved, found)
        if how.TOTALS:
            share = _term(found, 5)
            summed = _term(found, 4) + tl.where(share != 0.0, grows * share, 0.0)
            found = tl.where(k == 4, summed + (plain + up * every), tl.where(k == 5, share + every, found))
        # The target's logit, if it is in this block.
        own = target - of.first
        if (own >= 0) & (own < cols):
            its = tl.load(line.logits + own * by.logits.col).to(tl.float32)
            found = tl.where(k == 2, _squash(its, of.cap) if how.CAPPED else its, found)
    tl.store(out + k, found)


@triton.jit
def logit_gradient(at: Gradients, cols, by: Strides, of: GradientNumbers, how: How, DEPENDENT: tl.constexpr = False):
    """``dz[j] = p[j] * (a + b * d[j]) + t * [j is the target] + s * w[j]``, then ``dx``.

    Here ``p = exp(d - log_sum)``. The factors of a row are m, log_sum, a, b, t and s (of eight numbers, as the state
    has). Rows whose a, b, t and s are all 0 get zeros and are not read. ``out`` may be the logits themselves.

    Grid: rows, by blocks of BLOCK columns.
    Masks: columns past the block are neither read nor written.
    """
    pdl_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    factors = at.factors_ptr + row * 8
    maximum = tl.load(factors)
    log_sum = tl.load(factors + 1)
    a = tl.load(factors + 2)
    b = tl.load(factors + 3)
    t = tl.load(factors + 4)
    s = tl.load(factors + 5)
    active = (a != 0.0) | (b != 0.0) | (t != 0.0) | (s != 0.0)
    c = tl.program_id(1) * how.BLOCK + tl.arange(0, how.BLOCK)
    there = c < cols
    wide = c.to(tl.int64)
    read = c < tl.where(active, cols, 0)
    x = tl.load(at.logits_ptr + row * by.logits.row + wide * by.logits.col, mask=read, other=0.0).to(tl.float32)
    if how.CAPPED:
        squashed = _squash(x, of.cap)
        below = (squashed - maximum) * (of.scale * of.cap)
    else:
        below = (x - maximum) * of.scale
    p = _exp(below - log_sum)
    if how.MOMENTS:
        d = tl.where(p > 0.0, p * (a + b * below), p)
    else:
        d = p * a
    own = tl.load(at.targets_ptr + row).to(tl.int64) - of.first
    d += tl.where(wide == own, t, 0.0)
    if how.TOTALS:
        if how.WEIGHTED:
            d += s * tl.load(at.class_weight_ptr + c, mask=there, other=0.0)
        else:
            d += s
    # From z back to what the product left.
    d = d * of.scale
    if how.CAPPED:
        d = d * (1.0 - squashed * squashed)
    d = tl.where(active, d, 0.0)
    tl.store(at.out_ptr + row * by.out.row + wide * by.out.col, d.to(at.out_ptr.dtype.element_ty), mask=there)


@triton.jit
def scale_gradient(
    out_ptr,
    grad_ptr,
    factor_ptr,
    elements,
    inverse,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``out = grad * (factor * inverse)``, in fp32, rounded once. In place, nothing is touched where that is 1.

    Grid: as many programs as run at once, each walking over every so many blocks.
    """
    pdl_wait(DEPENDENT)
    by = tl.load(factor_ptr).to(tl.float32) * inverse
    if (by != 1.0) | (out_ptr.to(tl.int64) != grad_ptr.to(tl.int64)):
        for at in range(tl.program_id(0).to(tl.int64) * BLOCK, elements, tl.num_programs(0).to(tl.int64) * BLOCK):
            i = at + tl.arange(0, BLOCK)
            there = i < elements
            x = tl.load(grad_ptr + i, mask=there, other=0.0).to(tl.float32)
            tl.store(out_ptr + i, (x * by).to(out_ptr.dtype.element_ty), mask=there)
