"""Routing tokens to experts: softmax with top-k in one pass over the logits, and its gradient.

Logits are ranked as integers: :func:`ordered` maps a float to an int32 whose order is that of torch.sort (-0 equals 0,
NaN above everything), so one integer comparison ranks any two, and the lowest int32 is left for columns that are not
there or taken already.

Grid: one axis of blocks of TOKENS rows. Logits and their gradients are (tokens, experts) with two strides; weights and
ids are (tokens, TOP_K), dense as results, with two strides as operands. WIDTH, a power of two, holds all experts.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

LOWEST = tl.constexpr(-(1 << 31))
_HIGHEST = tl.constexpr((1 << 31) - 1)

Pointers = namedtuple("Pointers", "dlogits_ptr dweights_ptr weights_ptr ids_ptr logits_ptr", defaults=5 * (0,))
Sizes = namedtuple("Sizes", "tokens experts")
Steps = namedtuple("Steps", "row col", defaults=(0, 0))
How = namedtuple("How", "TOKENS WIDTH TOP_K RENORMALIZE SLOTS METHOD", defaults=(0, ""))


class Strides(NamedTuple):
    """Strides of the operands, in elements."""

    dlogits: Steps = Steps()
    dweights: Steps = Steps()
    weights: Steps = Steps()
    ids: Steps = Steps()
    logits: Steps = Steps()


@triton.jit
def ordered(x):
    """An int32 for each element of ``x`` (fp32, fp16, bf16), in the order of torch.sort; never LOWEST.

    Half types fill the lower 16 bits: -32767 to 32767.
    """
    if x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True)
        highest: tl.constexpr = _HIGHEST
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        highest: tl.constexpr = 32767
    wide = x.to(tl.float32)
    key = bits ^ ((bits >> 31) & highest)  # negative floats grow as integers the further they are from zero
    key = tl.where(wide == 0.0, 0, key)
    return tl.where(wide != wide, highest, key)


@triton.jit
def valued(key, dtype: tl.constexpr):
    """The fp32 value of a float of type ``dtype`` from its :func:`ordered` key."""
    if dtype.primitive_bitwidth == 32:
        bits = key ^ ((key >> 31) & _HIGHEST)
        return bits.to(tl.float32, bitcast=True)
    else:
        bits = key ^ ((key >> 31) & 32767)
        return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _exp(x):
    """e^x for x <= 0, to a few ulp of fp32 (``tl.exp`` alone loses ``|x|`` of them). NaN stays NaN."""
    # e^x = 2^n e^rest; ln 2 in two parts, so that n times the first is exact.
    x = tl.where(x < -1000.0, -1000.0, x)  # keeps inf - inf out of the reduction
    n = tl.floor(x * 1.4426950408889634)
    rest = (x - n * 0.693115234375) - n * 3.194618494528623e-05
    return tl.exp2(n) * tl.exp2(rest * 1.4426950408889634)


@triton.jit
def _rows(tokens, TOKENS: tl.constexpr):
    """This program's first row, and a mask of its TOKENS rows."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    left = tl.minimum(tokens - first, TOKENS).to(tl.int32)
    r = tl.arange(0, TOKENS)
    return first, r, r < left


@triton.jit
def moe_route(at: Pointers, n: Sizes, by: Strides, how: How, DEPENDENT: tl.constexpr = False):
    """``weights[t, j], ids[t, j]``: the j-th largest of softmax(logits[t]), ties to the lower expert.

    Schedule: a program keeps TOKENS rows in registers, WIDTH experts wide. METHOD "rounds": TOP_K times the row's
    maximum, which is then struck out. "sort": a bitonic sort that keeps SLOTS candidates per run. A half logit shares
    an int32 with its column, so that a maximum finds both; an fp32 logit takes a second reduction, or an int64.
    """
    pdl_wait(DEPENDENT)
    # ---- this program's rows of logits, as keys

    first, r, here = _rows(n.tokens, how.TOKENS)
    c = tl.arange(0, how.WIDTH)
    col = tl.broadcast_to(c[None, :], [how.TOKENS, how.WIDTH])
    there = here[:, None] & (c < n.experts)[None, :]
    start = at.logits_ptr + first * by.logits.row
    x = tl.load(
        start + r.to(tl.int64)[:, None] * by.logits.row + c.to(tl.int64)[None, :] * by.logits.col, mask=there, other=0
    )
    dtype: tl.constexpr = x.dtype
    half: tl.constexpr = dtype.primitive_bitwidth == 16
    key = ordered(x)

    # ---- the TOP_K largest of each row

    # Ranked: the key above, WIDTH - 1 - column below.
    # The lower column wins among equal keys.
    if how.METHOD == "sort":
        if half:
            ranked = tl.where(there, key * 65536 + (how.WIDTH - 1 - col), LOWEST)
            best = tl.topk(ranked, how.SLOTS)
            top = best >> 16
            ids = how.WIDTH - 1 - (best & 65535)
        else:
            ranked = tl.where(there, key, LOWEST).to(tl.int64) * 4294967296 + (how.WIDTH - 1 - col)
            best = tl.topk(ranked, how.SLOTS)
            top = (best >> 32).to(tl.int32)
            ids = how.WIDTH - 1 - (best & 4294967295).to(tl.int32)
        slot = tl.arange(0, how.SLOTS)
        most = tl.max(tl.where(slot[None, :] == 0, top, LOWEST), axis=1, keep_dims=True)
    else:
        # Results gather in the first TOP_K columns of the tile itself: no layout is ever converted.
        top = tl.full([how.TOKENS, how.WIDTH], 0, tl.int32)
        ids = tl.full([how.TOKENS, how.WIDTH], 0, tl.int32)
        if half:
            ranked = tl.where(there, key * 65536 + (how.WIDTH - 1 - col), LOWEST)
            for j in tl.static_range(how.TOP_K):
                best = tl.max(ranked, axis=1, keep_dims=True)
                top = tl.where(col == j, best, top)
                ranked = tl.where(ranked == best, LOWEST, ranked)
                if j == 0:
                    most = best >> 16
            ids = how.WIDTH - 1 - (top & 65535)
            top = top >> 16
        else:
            ranked = tl.where(there, key, LOWEST)
            for j in tl.static_range(how.TOP_K):
                best = tl.max(ranked, axis=1, keep_dims=True)
                first_col = tl.min(tl.where(ranked == best, col, how.WIDTH), axis=1, keep_dims=True)
                top = tl.where(col == j, best, top)
                ids = tl.where(col == j, first_col, ids)
                ranked = tl.where(col == first_col, LOWEST, ranked)
                if j == 0:
                    most = best
        slot = c

    # ---- their weights

    # The row's maximum is NaN if there is any: as in torch's softmax, the whole row is then NaN.
    most = valued(most, dtype)
    e = _exp(valued(top, dtype) - most)
    if how.RENORMALIZE:
        total = tl.sum(tl.where(slot[None, :] < how.TOP_K, e, 0.0), axis=1, keep_dims=True)
    else:
        total = tl.sum(tl.where(there, _exp(x.to(tl.float32) - most), 0.0), axis=1, keep_dims=True)
    w = tl.div_rn(e, tl.broadcast_to(total, e.shape))
    # Slots beyond TOP_K are the tile's width alone.
    inside = here[:, None] & (slot < how.TOP_K)[None, :]
    to = first * how.TOP_K + (r * how.TOP_K)[:, None] + slot[None, :]
    tl.store(at.weights_ptr + to, w, mask=inside)
    tl.store(at.ids_ptr + to, ids, mask=inside)


@triton.jit
def moe_route_backward(at: Pointers, n: Sizes, by: Strides, how: How, DEPENDENT: tl.constexpr = False):
    """``dlogits = p * (d - sum_j w_j dw_j)``, d the gradient of an expert that was chosen, 0 for the others.

    ``p`` are the weights themselves where they were renormalised (0 for the others), else the softmax, computed again.

    Schedule: a program spreads the TOP_K slots of TOKENS rows over a tile in registers and writes it: no atomics.
    """
    pdl_wait(DEPENDENT)
    first, r, here = _rows(n.tokens, how.TOKENS)
    c = tl.arange(0, how.WIDTH)
    row = first + r.to(tl.int64)
    there = here[:, None] & (c < n.experts)[None, :]
    p = tl.full([how.TOKENS, how.WIDTH], 0.0, tl.float32)
    d = tl.full([how.TOKENS, how.WIDTH], 0.0, tl.float32)
    dot = tl.full([how.TOKENS], 0.0, tl.float32)
    # Slot by slot: its gradient to its expert's column, and the product of weights and gradients.
    for j in tl.static_range(how.TOP_K):
        w = tl.load(at.weights_ptr + row * by.weights.row + j * by.weights.col, mask=here, other=0.0)
        dw = tl.load(at.dweights_ptr + row * by.dweights.row + j * by.dweights.col, mask=here, other=0.0)
        expert = tl.load(at.ids_ptr + row * by.ids.row + j * by.ids.col, mask=here, other=0)
        dot += w * dw
        chosen = c[None, :] == expert[:, None]
        d = tl.where(chosen, dw[:, None], d)
        if how.RENORMALIZE:
            p = tl.where(chosen, w[:, None], p)
    cols = c.to(tl.int64)[None, :]
    if not how.RENORMALIZE:
        x = tl.load(
            at.logits_ptr + row[:, None] * by.logits.row + cols * by.logits.col, mask=there, other=float("-inf")
        )
        # The row's maximum, or NaN if there is any.
        most = valued(tl.max(tl.where(there, ordered(x), LOWEST), axis=1, keep_dims=True), x.dtype)
        e = tl.where(there, _exp(x.to(tl.float32) - most), 0.0)
        p = tl.div_rn(e, tl.broadcast_to(tl.sum(e, axis=1, keep_dims=True), e.shape))
    dlogits = p * (d - dot[:, None])
    tl.store(
        at.dlogits_ptr + row[:, None] * by.dlogits.row + cols * by.dlogits.col,
        dlogits.to(at.dlogits_ptr.dtype.element_ty),
        mask=there,
    )
