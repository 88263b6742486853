"""Statistics of each query that attention's gradients start from: its log-sum-exp to base 2, and ``delta``."""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

Pointers = namedtuple("Pointers", "stats_ptr out_ptr dout_ptr lse_ptr dlse_ptr")
Sizes = namedtuple("Sizes", "seq heads rows")
Steps = namedtuple("Steps", "batch row head")
How = namedtuple("How", "HEAD_DIM DLSE BLOCK_ROWS BLOCK_COLS")


class Strides(NamedTuple):
    """Strides of the operands, in elements."""

    out: Steps
    dout: Steps


@triton.jit
def attention_delta(at: Pointers, n: Sizes, by: Strides, how: How, DEPENDENT: tl.constexpr = False):
    """``stats[0] = lse * log2(e)`` and ``stats[1] = delta = sum(out * dout) - dlse`` of all ``rows`` queries, in fp32.

    A query that saw nothing has inf instead of -inf, so that its probabilities are 0, and a delta of 0.

    Grid: one axis. A program has BLOCK_ROWS queries of one head; programs are in the order of ``lse``, head by head.
    out and dout are (batch, row, head, HEAD_DIM) with strides of their own and dense channels; lse, dlse and each half
    of stats are dense, (batch, head, row).
    Masks: rows beyond ``seq`` belong to the next head and are left out; channels beyond HEAD_DIM do not exist.
    """
    pdl_wait(DEPENDENT)
    # This program's head, and its queries there.
    blocks = tl.cdiv(n.seq, how.BLOCK_ROWS)
    layer = tl.program_id(0) // blocks
    r = tl.program_id(0) % blocks * how.BLOCK_ROWS + tl.arange(0, how.BLOCK_ROWS)
    c = tl.arange(0, how.BLOCK_COLS)
    there = r < n.seq
    inside = there[:, None] & (c < how.HEAD_DIM)[None, :]
    batch, head = (layer // n.heads).to(tl.int64), (layer % n.heads).to(tl.int64)
    # delta: a row's product of out and dout.
    wide = r.to(tl.int64)[:, None]
    o = tl.load(
        at.out_ptr + batch * by.out.batch + head * by.out.head + wide * by.out.row + c[None, :], mask=inside, other=0.0
    )
    d = tl.load(
        at.dout_ptr + batch * by.dout.batch + head * by.dout.head + wide * by.dout.row + c[None, :],
        mask=inside,
        other=0.0,
    )
    delta = tl.sum(o.to(tl.float32) * d.to(tl.float32), axis=1)
    # Statistics are dense; the second half of stats begins behind all rows of the first.
    first = layer.to(tl.int64) * n.seq + r
    lse = tl.load(at.lse_ptr + first, mask=there, other=0.0)
    if how.DLSE:
        delta -= tl.load(at.dlse_ptr + first, mask=there, other=0.0)
    blind = lse == float("-inf")
    tl.store(at.stats_ptr + first, tl.where(blind, float("inf"), lse * _LOG2_E), mask=there)
    tl.store(at.stats_ptr + n.rows + first, tl.where(blind, 0.0, delta), mask=there)
