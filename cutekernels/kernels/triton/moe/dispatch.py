"""Grouping the rows of few tokens by expert, in one launch, with the routing in front or without.

``moe_route``, ``moe_permute`` and ``moe_gather`` are three launches that wait for each other. With few pairs of a token
and a slot, each program finds for itself where the rows of its token go, from the ids or logits of all.

Grid: (tokens, 1 + blocks of BLOCK columns). Programs (t, 1) and on copy columns of token t to its TOP_K rows; program
(t, 0) writes token t's line of the small results, and (0, 0) the offsets too. Without tokens (0, 0) is there alone.

Strides: rows, x, ids and logits have a row and a column stride each, when read; all other results are dense.
"""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait
from cutekernels.kernels.triton.moe.route import LOWEST, largest, softmax_of


@triton.jit
def _columns(x_ptr, tokens, cols, x_row, x_col, BLOCK: tl.constexpr):
    """This program's columns, a mask of them, which is empty for program (t, 0), and the token's values there."""
    t = tl.program_id(0)
    c = (tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)
    inside = (c < cols) & (tl.program_id(1) > 0) & (t < tokens)
    c = c.to(tl.int64)
    return c, inside, tl.load(x_ptr + t.to(tl.int64) * x_row + c * x_col, mask=inside)


@triton.jit
def moe_dispatch(
    rows_ptr,
    offsets_ptr,
    inverse_ptr,
    x_ptr,
    ids_ptr,
    tokens,
    cols,
    experts,
    rows_row,
    rows_col,
    x_row,
    x_col,
    ids_row,
    ids_col,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``rows[inverse[t, j]] = x[t]``, grouped by ``ids`` stably; ``offsets``: where each group begins.

    PAIRS, a power of two, holds all pairs; BINS all experts and a bin behind them, for ids that name none. A pair's row
    is the number of pairs of lower bins, and of its own bin before it.
    """
    pdl_wait(DEPENDENT)
    # The token's columns are on their way while pairs are counted.
    t = tl.program_id(0)
    writes = (tl.program_id(1) == 0) & (t < tokens)
    c, inside, x = _columns(x_ptr, tokens, cols, x_row, x_col, BLOCK)

    # ---- the bins of all pairs; those that are not there have the last one, which no pair of any token counts

    pair = tl.arange(0, PAIRS)
    there = pair < tokens * TOP_K
    places = (pair // TOP_K).to(tl.int64) * ids_row + (pair % TOP_K).to(tl.int64) * ids_col
    ids = tl.load(ids_ptr + places, mask=there, other=0)
    bins = tl.where((ids >= 0) & (ids < experts), ids, experts).to(tl.int32)
    bins = tl.where(there, bins, BINS)

    # ---- the token's rows, slot by slot

    for j in tl.static_range(TOP_K):
        own = tl.load(ids_ptr + t.to(tl.int64) * ids_row + j * ids_col, mask=t < tokens, other=0)
        own = tl.where((own >= 0) & (own < experts), own, experts).to(tl.int32)
        before = (bins < own) | ((bins == own) & (pair < t * TOP_K + j))
        row = tl.sum(before.to(tl.int32), 0)
        tl.store(rows_ptr + row.to(tl.int64) * rows_row + c * rows_col, x, mask=inside)
        tl.store(inverse_ptr + t * TOP_K + j, row, mask=writes)

    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        bin = tl.arange(0, BINS)
        counts = tl.histogram(tl.where(there, bins, 0), BINS, mask=there)
        tl.store(offsets_ptr + bin, tl.cumsum(counts, 0) - counts, mask=bin <= experts)


@triton.jit
def moe_route_dispatch(
    rows_ptr,
    offsets_ptr,
    inverse_ptr,
    weights_ptr,
    ids_ptr,
    x_ptr,
    logits_ptr,
    tokens,
    cols,
    experts,
    rows_row,
    rows_col,
    x_row,
    x_col,
    logits_row,
    logits_col,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """:func:`moe_dispatch` by the ids that routing ``logits`` gives, and these with their weights.

    Schedule: a program keeps the logits of all tokens in registers, TOKENS by WIDTH, powers of two, and takes TOP_K
    times the maximum of each row. A token has no expert twice: a pair's row is the number of pairs of lower experts,
    and of tokens before it that have its expert.
    """
    pdl_wait(DEPENDENT)
    # The token's columns are on their way while tokens are routed.
    t = tl.program_id(0)
    writes = (tl.program_id(1) == 0) & (t < tokens)
    c, inside, x = _columns(x_ptr, tokens, cols, x_row, x_col, BLOCK)

    # ---- the experts of all tokens

    r = tl.arange(0, TOKENS)
    e = tl.arange(0, WIDTH)
    expert = tl.broadcast_to(e[None, :], [TOKENS, WIDTH])
    there = (r < tokens)[:, None] & (e < experts)[None, :]
    places = r.to(tl.int64)[:, None] * logits_row + e.to(tl.int64)[None, :] * logits_col
    logits = tl.load(logits_ptr + places, mask=there, other=0)
    top, ids, most, left = largest(logits, there, expert, TOP_K, WIDTH)

    # ---- by expert: its pairs, those of tokens before this one; and, slot j in column j, this token's experts

    # Three sums over tokens as one, of 10 bits each but the last: up to 256 tokens, and experts below 512.
    chosen = (there & (left == LOWEST)).to(tl.int32)
    parts = chosen + tl.where((r < t)[:, None], chosen << 10, 0) + tl.where((r == t)[:, None], ids << 20, 0)
    both = tl.sum(parts, axis=0)
    count, earlier, owns = both & 1023, (both >> 10) & 1023, both >> 20

    # ---- the token's rows, slot by slot

    for j in tl.static_range(TOP_K):
        own = tl.sum(tl.where(e == j, owns, 0), 0)
        row = tl.sum(tl.where(e < own, count, tl.where(e == own, earlier, 0)), 0)
        tl.store(rows_ptr + row.to(tl.int64) * rows_row + c * rows_col, x, mask=inside)
        tl.store(inverse_ptr + t * TOP_K + j, row, mask=writes)

    if tl.program_id(1) == 0:
        weights = softmax_of(logits, there, top, most, e, TOP_K, RENORMALIZE)
        line = (r == t)[:, None] & there & (e < TOP_K)[None, :]
        to = r[:, None] * TOP_K + e[None, :]
        tl.store(weights_ptr + to, weights, mask=line)
        tl.store(ids_ptr + to, ids, mask=line)
        if tl.program_id(0) == 0:
            tl.store(offsets_ptr + e, tl.cumsum(count, 0) - count, mask=e < experts)
            tl.store(offsets_ptr + experts, tokens * TOP_K)
