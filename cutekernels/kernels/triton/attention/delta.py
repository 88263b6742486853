"""Statistics of each query that attention's gradients start from: its log-sum-exp to base 2, and ``delta``."""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_delta(
    stats_ptr,
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    seq,
    heads,
    rows,
    out_batch,
    out_row,
    out_head,
    dout_batch,
    dout_row,
    dout_head,
    HEAD_DIM: tl.constexpr,
    DLSE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``stats[0] = lse * log2(e)`` and ``stats[1] = delta = sum(out * dout) - dlse`` of all ``rows`` queries, in fp32.

    A query that saw nothing has inf instead of -inf, so that its probabilities are 0, and a delta of 0.

    Grid: one axis. A program has BLOCK_ROWS queries of one head; programs are in the order of ``lse``, head by head.
    out and dout are (batch, row, head, HEAD_DIM) with strides of their own and dense channels; lse, dlse and each half
    of stats are dense, (batch, head, row).
    Masks: rows beyond ``seq`` belong to the next head and are left out; channels beyond HEAD_DIM do not exist.
    """
    pdl_wait(DEPENDENT)
    # This program's head, and its queries there.
    blocks = tl.cdiv(seq, BLOCK_ROWS)
    layer = tl.program_id(0) // blocks
    r = tl.program_id(0) % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    c = tl.arange(0, BLOCK_COLS)
    there = r < seq
    inside = there[:, None] & (c < HEAD_DIM)[None, :]
    batch, head = (layer // heads).to(tl.int64), (layer % heads).to(tl.int64)
    # delta: a row's product of out and dout.
    wide = r.to(tl.int64)[:, None]
    o = tl.load(out_ptr + batch * out_batch + head * out_head + wide * out_row + c[None, :], mask=inside, other=0.0)
    d = tl.load(dout_ptr + batch * dout_batch + head * dout_head + wide * dout_row + c[None, :], mask=inside, other=0.0)
    delta = tl.sum(o.to(tl.float32) * d.to(tl.float32), axis=1)
    # Statistics are dense; the second half of stats begins behind all rows of the first.
    at = layer.to(tl.int64) * seq + r
    lse = tl.load(lse_ptr + at, mask=there, other=0.0)
    if DLSE:
        delta -= tl.load(dlse_ptr + at, mask=there, other=0.0)
    blind = lse == float("-inf")
    tl.store(stats_ptr + at, tl.where(blind, float("inf"), lse * _LOG2_E), mask=there)
    tl.store(stats_ptr + rows + at, tl.where(blind, 0.0, delta), mask=there)
