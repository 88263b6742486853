"""Softmax statistics of logits, and gradients of a loss with respect to them, one block of the vocabulary at a time.

A block of logits is (rows, cols), as a product left it. What a row's loss and gradient need of the whole vocabulary is
its *state*, eight numbers in fp32 that one kernel updates block after block:

    0 MAXIMUM      m, the largest logit so far
    1 SUM          sum of exp(z - m)
    2 TARGET       the target's logit; 0 until its block has come
    3 WEIGHED      sum of exp(z - m) * z                (MOMENTS)
    4 TOTAL        sum of w * z, w the class's weight   (TOTALS)
    5 to 7         0: a row is one sector of 32 bytes

``z`` is the logit of the loss: ``z = cap * tanh(x / cap) / temperature`` of what the product left (CAPPED), or
``x / temperature``.
"""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp(x):
    return tl.exp2(x * _LOG2E)


@triton.jit
def _squashed(x, cap):
    """``tanh(x / cap)``. Absolute error of some 1e-7: of ``cap`` times that, a part of an ulp of the largest logits."""
    return 1.0 - 2.0 / (_exp(2.0 * x / cap) + 1.0)


@triton.jit
def _logits(logits, c, cols, logits_col, scale, cap, CAPPED: tl.constexpr):
    """The loss's logits of columns ``c``: -inf past the block."""
    there = c < cols
    z = tl.load(logits + c.to(tl.int64) * logits_col, mask=there, other=0.0).to(tl.float32)
    if CAPPED:
        z = cap * _squashed(z, cap)
    return tl.where(there, z * scale, float("-inf"))


@triton.jit
def _sums(
    logits,
    class_weight_ptr,
    cols,
    logits_col,
    scale,
    cap,
    anchor,
    CAPPED: tl.constexpr,
    MOMENTS: tl.constexpr,
    TOTALS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a row of a block: the largest logit, the sums of exp(z - anchor) and of that times z, the sum of w * z."""
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
    for at in range(0, cols, BLOCK):
        c = at + tl.arange(0, BLOCK)
        z = _logits(logits, c, cols, logits_col, scale, cap, CAPPED)
        e = _exp(z - anchor)
        top = tl.maximum(top, z)
        mass += e
        if MOMENTS:
            weight += tl.where(e > 0.0, e * z, 0.0)
        if TOTALS:
            there = c < cols
            w = tl.load(class_weight_ptr + c, mask=there, other=0.0) if WEIGHTED else 1.0
            plain += tl.where(there, w * z, 0.0)
    return tl.max(top, axis=0), tl.sum(mass, axis=0), tl.sum(weight, axis=0), tl.sum(plain, axis=0)


@triton.jit
def logit_statistics(
    out_state_ptr,
    logits_ptr,
    targets_ptr,
    class_weight_ptr,
    state_ptr,
    cols,
    logits_row,
    logits_col,
    first,
    ignore,
    scale,
    cap,
    CAPPED: tl.constexpr,
    MOMENTS: tl.constexpr,
    TOTALS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Adds a block of the vocabulary, whose first class is ``first``, to the state of its rows.

    Grid: rows.
    Schedule: a program walks over its row BLOCK columns at a time; each lane keeps sums of its own until the end.
    Masks: columns past the block count as logits of -inf. Rows whose target is ``ignore`` are not read.
    """
    pdl_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row).to(tl.int64)
    state = state_ptr + row * 8
    out = out_state_ptr + row * 8
    maximum = tl.load(state)
    total = tl.load(state + 1)
    of_target = tl.load(state + 2)
    weighed = tl.load(state + 3)
    summed = tl.load(state + 4)
    if target != ignore:
        logits = logits_ptr + row * logits_row
        # Exponentials are taken from an anchor, the largest logit of the blocks before and of the first columns here,
        # so that sums meet once. Where a later logit is far above it, a second pass takes that for the anchor.
        c = tl.arange(0, BLOCK)
        z = _logits(logits, c, cols, logits_col, scale, cap, CAPPED)
        anchor = tl.maximum(maximum, tl.max(z, axis=0))
        top, mass, weight, plain = _sums(
            logits, class_weight_ptr, cols, logits_col, scale, cap, anchor, CAPPED, MOMENTS, TOTALS, WEIGHTED, BLOCK
        )
        top = tl.maximum(maximum, top)
        if top - anchor > 40.0:
            anchor = top
            _, mass, weight, plain = _sums(
                logits, class_weight_ptr, cols, logits_col, scale, cap, anchor, CAPPED, MOMENTS, TOTALS, WEIGHTED, BLOCK
            )
        # From the anchor to the maximum. Where all logits so far are -inf, exp(-inf - 0) is the 0 that
        # exp(-inf + inf) is not.
        finite = tl.where(top == float("-inf"), 0.0, top)
        moved = _exp(tl.where(anchor == float("-inf"), 0.0, anchor) - finite)
        grown = _exp(maximum - finite)
        total = total * grown + mass * moved
        if MOMENTS:
            weighed = weighed * grown + weight * moved
        if TOTALS:
            summed += plain
        maximum = top
        # The target's logit, if it is in this block.
        own = target - first
        if (own >= 0) & (own < cols):
            its = tl.load(logits + own * logits_col).to(tl.float32)
            if CAPPED:
                its = cap * _squashed(its, cap)
            of_target = its * scale
    k = tl.arange(0, 8)
    found = tl.where(k == 0, maximum, tl.where(k == 1, total, tl.where(k == 2, of_target, 0.0)))
    tl.store(out + k, tl.where(k == 3, weighed, tl.where(k == 4, summed, found)))


@triton.jit
def logit_gradient(
    out_ptr,
    logits_ptr,
    targets_ptr,
    class_weight_ptr,
    factors_ptr,
    cols,
    out_row,
    out_col,
    logits_row,
    logits_col,
    first,
    scale,
    cap,
    CAPPED: tl.constexpr,
    MOMENTS: tl.constexpr,
    TOTALS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``dz[j] = p[j] * (a + b * z[j]) + t * [j is the target] + u * w[j]`` with ``p = exp(z - lse)``, then ``dx``.

    The factors of a row are lse, a, b, t and u (of eight numbers, as the state has). Rows whose a, b, t and u are all 0
    get zeros and are not read. ``out`` may be the logits themselves.

    Grid: rows, by blocks of BLOCK columns.
    Masks: columns past the block are neither read nor written.
    """
    pdl_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    factors = factors_ptr + row * 8
    lse = tl.load(factors)
    a = tl.load(factors + 1)
    b = tl.load(factors + 2)
    t = tl.load(factors + 3)
    u = tl.load(factors + 4)
    active = (a != 0.0) | (b != 0.0) | (t != 0.0) | (u != 0.0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < cols
    wide = c.to(tl.int64)
    read = c < tl.where(active, cols, 0)
    x = tl.load(logits_ptr + row * logits_row + wide * logits_col, mask=read, other=0.0).to(tl.float32)
    z = x
    if CAPPED:
        squashed = _squashed(x, cap)
        z = cap * squashed
    z = z * scale
    p = _exp(z - lse)
    if MOMENTS:
        d = tl.where(p > 0.0, p * (a + b * z), p)
    else:
        d = p * a
    own = tl.load(targets_ptr + row).to(tl.int64) - first
    d += tl.where(wide == own, t, 0.0)
    if TOTALS:
        if WEIGHTED:
            d += u * tl.load(class_weight_ptr + c, mask=there, other=0.0)
        else:
            d += u
    # From z back to what the product left.
    d = d * scale
    if CAPPED:
        d = d * (1.0 - squashed * squashed)
    d = tl.where(active, d, 0.0)
    tl.store(out_ptr + row * out_row + wide * out_col, d.to(out_ptr.dtype.element_ty), mask=there)


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
