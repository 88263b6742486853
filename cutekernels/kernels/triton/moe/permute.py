"""Grouping (token, slot) pairs by expert, and moving rows there and back.

A counting sort, stable and without atomics: programs take consecutive runs of the pairs, in order. Each counts its
runs per expert; a program's place in the output follows from the counts of all; inside a block of pairs a
bitonic sort of ``id * BLOCK + place`` keeps equal ids in order. :func:`moe_dispatch` has few pairs, which each program
counts whole.

Strides: ids, order, inverse (when written) and counts are dense; rows and tokens of :func:`moe_gather` and what follows
have a row and a column stride each. ``inverse``, read by these, is (tokens, TOP_K). A place of ``inverse`` that is no
row is neither read nor written.
"""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait


@triton.jit
def _bin(ids, experts):
    """Bins of ids: the expert, or the one behind the last for an id that names none."""
    return tl.where((ids >= 0) & (ids < experts), ids, experts).to(tl.int32)


@triton.jit
def _bins(ids_ptr, begin, end, experts, BLOCK: tl.constexpr):
    """A mask of the pairs from ``begin`` on that are before ``end``, and their bins."""
    i = begin + tl.arange(0, BLOCK)
    here = i < end
    return here, _bin(tl.load(ids_ptr + i, mask=here, other=0), experts)


@triton.jit
def _count(counts_ptr, ids_ptr, begin, end, experts, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Writes how many of the pairs from ``begin`` to ``end`` go to each bin, as this program's row."""
    # Counts stay in registers until the run has ended.
    counts = tl.zeros([BINS], tl.int32)
    for at in range(begin, end, BLOCK):
        here, bin = _bins(ids_ptr, at, end, experts, BLOCK)
        counts += tl.histogram(bin, BINS, mask=here)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@triton.jit
def _counts_of_all(counts_ptr, BINS: tl.constexpr):
    """The counts of all programs, and of those before this one."""
    TILE: tl.constexpr = 8192 // BINS  # rows whose loads are in flight together
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for row in range(0, tl.num_programs(0), TILE):
        rows = row + tl.arange(0, TILE)
        at = rows[:, None] * BINS + tl.arange(0, BINS)[None, :]
        counts = tl.load(counts_ptr + at, mask=(rows < tl.num_programs(0))[:, None], other=0)
        # Programs before this one have placed their pairs of each bin ahead of its own.
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((rows < tl.program_id(0))[:, None], counts, 0), axis=0)
    return total, before


@triton.jit
def _own(ids_ptr, begin, pairs, experts, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """:func:`_counts_of_all`, counted by this program itself. ``begin`` is a multiple of BLOCK."""
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for at in range(0, pairs, BLOCK):
        here, bin = _bins(ids_ptr, at, pairs, experts, BLOCK)
        counts = tl.histogram(bin, BINS, mask=here)
        total += counts
        before += tl.where(at < begin, counts, 0)
    return total, before


@triton.jit
def _place(
    order_ptr,
    offsets_ptr,
    inverse_ptr,
    ids_ptr,
    begin,
    end,
    experts,
    total,
    before,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Places the pairs from ``begin`` to ``end``; program 0 writes where the groups begin."""
    bins = tl.arange(0, BINS)
    lane = tl.arange(0, BLOCK)
    starts = tl.cumsum(total, 0) - total
    if tl.program_id(0) == 0:
        tl.store(offsets_ptr + bins, starts, mask=bins <= experts)
    goal = starts + before  # where this program's next pair of each bin goes
    for at in range(begin, end, BLOCK):
        # A block of pairs in the order of their bins; pairs that do not exist sort behind all.
        here, bin = _bins(ids_ptr, at, end, experts, BLOCK)
        key = tl.sort(tl.where(here, bin * BLOCK + lane, BINS * BLOCK))
        bin = key // BLOCK
        there = bin < BINS
        pair = at + key % BLOCK
        counts = tl.histogram(bin, BINS, mask=there)
        # Pair i of the sorted block goes to its bin's goal, plus its place among those of its bin.
        first = tl.cumsum(counts, 0) - counts  # of each bin, in the sorted block
        to = tl.gather(goal - first, tl.where(there, bin, 0), 0) + lane
        tl.store(order_ptr + to, pair, mask=there)
        tl.store(inverse_ptr + pair, to, mask=there)
        goal += counts


@triton.jit
def moe_permute(
    order_ptr,
    offsets_ptr,
    inverse_ptr,
    ids_ptr,
    pairs,
    experts,
    run,
    counts_ptr,
    phase,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PASSES: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``order``: pairs grouped by expert; ``offsets``: where each group begins; ``inverse``: where each pair went.

    Grid: one axis. Program p owns pairs [p * run, (p + 1) * run). With two PASSES it is launched twice: phase 0 writes
    the counts of each program, phase 1 reads those of all and places. With one, each program counts all pairs itself.
    """
    pdl_wait(DEPENDENT)
    begin = tl.program_id(0) * run
    end = tl.minimum(begin + run, pairs)
    # One pass: every program counts everything. Two launches: counts meet in memory, between kernels.
    if PASSES == 1:
        total, before = _own(ids_ptr, begin, pairs, experts, BINS, BLOCK)
        _place(order_ptr, offsets_ptr, inverse_ptr, ids_ptr, begin, end, experts, total, before, BINS, BLOCK)
    else:
        if phase == 0:
            _count(counts_ptr, ids_ptr, begin, end, experts, BINS, BLOCK)
        else:
            total, before = _counts_of_all(counts_ptr, BINS)
            _place(order_ptr, offsets_ptr, inverse_ptr, ids_ptr, begin, end, experts, total, before, BINS, BLOCK)


@triton.jit
def moe_gather(
    rows_ptr,
    x_ptr,
    inverse_ptr,
    tokens,
    cols,
    rows_row,
    rows_col,
    x_row,
    x_col,
    inverse_row,
    inverse_col,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``rows[inverse[t, j]] = x[t]``: each row is read once and written TOP_K times.

    Grid: a program per token and BLOCK columns.
    """
    pdl_wait(DEPENDENT)
    # The token's columns, in registers; then one store for each slot.
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < cols
    c = c.to(tl.int64)
    x = tl.load(x_ptr + t * x_row + c * x_col, mask=inside)
    for j in tl.static_range(TOP_K):
        at = tl.load(inverse_ptr + t * inverse_row + j * inverse_col).to(tl.int64)
        known = (at >= 0) & (at < tokens * TOP_K)
        tl.store(rows_ptr + at * rows_row + c * rows_col, x, mask=inside & known)


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
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """:func:`moe_permute` without its order, and :func:`moe_gather`: one launch for the few pairs that PAIRS holds.

    Grid: (1 + blocks of BLOCK columns, tokens). A token's first program writes its line of ``inverse``, token 0's the
    offsets too; the others copy columns. Each finds its token's rows for itself: a pair's is the number of pairs of
    lower bins, and of its own bin before it. Without tokens only offsets are written.
    """
    pdl_wait(DEPENDENT)
    # The token's columns are on their way while pairs are counted.
    t = tl.program_id(1)
    first = tl.program_id(0) == 0
    c = (tl.program_id(0) - 1) * BLOCK + tl.arange(0, BLOCK)
    inside = (c < cols) & (t < tokens) & (not first)
    c = c.to(tl.int64)
    x = tl.load(x_ptr + t.to(tl.int64) * x_row + c * x_col, mask=inside)
    # All pairs, then slot by slot where the token's go.
    pair = tl.arange(0, PAIRS)
    here, bins = _bins(ids_ptr, 0, tokens * TOP_K, experts, PAIRS)
    counted = tl.where(here, bins, BINS)  # pairs that do not exist come behind all
    for j in tl.static_range(TOP_K):
        place = t * TOP_K + j
        own = _bin(tl.load(ids_ptr + place, mask=t < tokens, other=0), experts)
        row = tl.sum(((counted < own) | ((counted == own) & (pair < place))).to(tl.int32), 0)
        tl.store(rows_ptr + row.to(tl.int64) * rows_row + c * rows_col, x, mask=inside)
        tl.store(inverse_ptr + place, row, mask=first & (t < tokens))
    if first & (t == 0):
        bin = tl.arange(0, BINS)
        counts = tl.histogram(bins, BINS, mask=here)
        tl.store(offsets_ptr + bin, tl.cumsum(counts, 0) - counts, mask=bin <= experts)


@triton.jit
def moe_combine(
    out_ptr,
    rows_ptr,
    inverse_ptr,
    weights_ptr,
    tokens,
    cols,
    out_row,
    out_col,
    rows_row,
    rows_col,
    inverse_row,
    inverse_col,
    weights_row,
    weights_col,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``out[t] = sum_j weights[t, j] * rows[inverse[t, j]]``, in fp32, in the order of j, rounded once.

    Grid: a program per token and BLOCK columns; the loads of all TOP_K rows are in flight together.
    """
    pdl_wait(DEPENDENT)
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < cols
    c = c.to(tl.int64)
    # Slot by slot; one that is no row adds 0.
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        at = tl.load(inverse_ptr + t * inverse_row + j * inverse_col).to(tl.int64)
        known = (at >= 0) & (at < tokens * TOP_K)
        row = tl.load(rows_ptr + at * rows_row + c * rows_col, mask=inside & known, other=0.0).to(tl.float32)
        if WEIGHTED:
            row = row * tl.load(weights_ptr + t * weights_row + j * weights_col)
        total += row
    tl.store(out_ptr + t * out_row + c * out_col, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def moe_combine_backward(
    drows_ptr,
    dweights_ptr,
    dout_ptr,
    rows_ptr,
    inverse_ptr,
    weights_ptr,
    tokens,
    cols,
    drows_row,
    drows_col,
    dweights_row,
    dweights_col,
    dout_row,
    dout_col,
    rows_row,
    rows_col,
    inverse_row,
    inverse_col,
    weights_row,
    weights_col,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``drows[inverse[t, j]] = weights[t, j] * dout[t]`` and ``dweights[t, j] = <dout[t], rows[inverse[t, j]]>``.

    Grid: a program per (token, slot), through the columns in BLOCKs; a token's slots are neighbours, so that
    dout comes from L2 for all but the first. fp32 arithmetic; each gradient is rounded once.
    """
    pdl_wait(DEPENDENT)
    t = (tl.program_id(0) // TOP_K).to(tl.int64)
    j = (tl.program_id(0) % TOP_K).to(tl.int64)
    at = tl.load(inverse_ptr + t * inverse_row + j * inverse_col).to(tl.int64)
    known = (at >= 0) & (at < tokens * TOP_K)
    w = tl.load(weights_ptr + t * weights_row + j * weights_col)
    # Columns in blocks: drows as they pass, the slot's product of dout and rows at the end.
    dot = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, cols, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        inside = (c < cols) & known
        c = c.to(tl.int64)
        d = tl.load(dout_ptr + t * dout_row + c * dout_col, mask=inside, other=0.0).to(tl.float32)
        row = tl.load(rows_ptr + at * rows_row + c * rows_col, mask=inside, other=0.0).to(tl.float32)
        dot += d * row
        drow = (w * d).to(drows_ptr.dtype.element_ty)
        tl.store(drows_ptr + at * drows_row + c * drows_col, drow, mask=inside)
    tl.store(dweights_ptr + t * dweights_row + j * dweights_col, tl.sum(dot))
