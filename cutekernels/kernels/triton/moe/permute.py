"""Grouping (token, slot) pairs by expert, and moving rows there and back.

A counting sort, stable and without atomics: programs take consecutive runs of the pairs, in order. Each counts its
runs per expert; a program's place in the output follows from the counts of all; inside a block of pairs a
bitonic sort of ``id * BLOCK + place`` keeps equal ids in order. :func:`moe_dispatch` has few pairs, which each program
counts whole.

Strides: ids, order, inverse (when written) and counts are dense; rows and tokens of :func:`moe_gather` and what follows
have a row and a column stride each. ``inverse``, read by these, is (tokens, TOP_K). A place of ``inverse`` that is no
row is neither read nor written.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

Places = namedtuple("Places", "order_ptr offsets_ptr inverse_ptr ids_ptr")
Pairs = namedtuple("Pairs", "pairs experts run")  # a program's share of the pairs is its run
Sorting = namedtuple("Sorting", "BINS BLOCK PASSES")

# Of kernels that move rows.
Dispatched = namedtuple("Dispatched", "rows_ptr offsets_ptr inverse_ptr x_ptr ids_ptr")
Pointers = namedtuple(
    "Pointers", "out_ptr drows_ptr dweights_ptr dout_ptr rows_ptr x_ptr inverse_ptr weights_ptr", defaults=8 * (0,)
)
Sizes = namedtuple("Sizes", "tokens cols experts", defaults=(0,))
Steps = namedtuple("Steps", "row col", defaults=(0, 0))
How = namedtuple("How", "TOP_K BLOCK WEIGHTED PAIRS BINS", defaults=(False, 0, 0))


class Strides(NamedTuple):
    """Strides of the operands, in elements."""

    out: Steps = Steps()
    drows: Steps = Steps()
    dweights: Steps = Steps()
    dout: Steps = Steps()
    rows: Steps = Steps()
    x: Steps = Steps()
    inverse: Steps = Steps()
    weights: Steps = Steps()


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
def _place(at, begin, end, experts, total, before, how):
    """Places the pairs from ``begin`` to ``end``; program 0 writes where the groups begin."""
    bins = tl.arange(0, how.BINS)
    lane = tl.arange(0, how.BLOCK)
    starts = tl.cumsum(total, 0) - total
    if tl.program_id(0) == 0:
        tl.store(at.offsets_ptr + bins, starts, mask=bins <= experts)
    goal = starts + before  # where this program's next pair of each bin goes
    for start in range(begin, end, how.BLOCK):
        # A block of pairs in the order of their bins; pairs that do not exist sort behind all.
        here, bin = _bins(at.ids_ptr, start, end, experts, how.BLOCK)
        key = tl.sort(tl.where(here, bin * how.BLOCK + lane, how.BINS * how.BLOCK))
        bin = key // how.BLOCK
        there = bin < how.BINS
        pair = start + key % how.BLOCK
        counts = tl.histogram(bin, how.BINS, mask=there)
        # Pair i of the sorted block goes to its bin's goal, plus its place among those of its bin.
        first = tl.cumsum(counts, 0) - counts  # of each bin, in the sorted block
        to = tl.gather(goal - first, tl.where(there, bin, 0), 0) + lane
        tl.store(at.order_ptr + to, pair, mask=there)
        tl.store(at.inverse_ptr + pair, to, mask=there)
        goal += counts


@triton.jit
def moe_permute(at: Places, n: Pairs, counts_ptr, phase, how: Sorting, DEPENDENT: tl.constexpr = False):
    """``order``: pairs grouped by expert; ``offsets``: where each group begins; ``inverse``: where each pair went.

    Grid: one axis. Program p owns pairs [p * run, (p + 1) * run). With two PASSES it is launched twice: phase 0 writes
    the counts of each program, phase 1 reads those of all and places. With one, each program counts all pairs itself.
    """
    pdl_wait(DEPENDENT)
    begin = tl.program_id(0) * n.run
    end = tl.minimum(begin + n.run, n.pairs)
    # One pass: every program counts everything. Two launches: counts meet in memory, between kernels.
    if how.PASSES == 1:
        total, before = _own(at.ids_ptr, begin, n.pairs, n.experts, how.BINS, how.BLOCK)
        _place(at, begin, end, n.experts, total, before, how)
    else:
        if phase == 0:
            _count(counts_ptr, at.ids_ptr, begin, end, n.experts, how.BINS, how.BLOCK)
        else:
            total, before = _counts_of_all(counts_ptr, how.BINS)
            _place(at, begin, end, n.experts, total, before, how)


@triton.jit
def moe_gather(at: Pointers, n: Sizes, by: Strides, how: How, DEPENDENT: tl.constexpr = False):
    """``rows[inverse[t, j]] = x[t]``: each row is read once and written TOP_K times.

    Grid: a program per token and BLOCK columns.
    """
    pdl_wait(DEPENDENT)
    # The token's columns, in registers; then one store for each slot.
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * how.BLOCK + tl.arange(0, how.BLOCK)
    inside = c < n.cols
    c = c.to(tl.int64)
    x = tl.load(at.x_ptr + t * by.x.row + c * by.x.col, mask=inside)
    for j in tl.static_range(how.TOP_K):
        place = tl.load(at.inverse_ptr + t * by.inverse.row + j * by.inverse.col).to(tl.int64)
        known = (place >= 0) & (place < n.tokens * how.TOP_K)
        tl.store(at.rows_ptr + place * by.rows.row + c * by.rows.col, x, mask=inside & known)


@triton.jit
def moe_dispatch(at: Dispatched, n: Sizes, by: Strides, how: How, DEPENDENT: tl.constexpr = False):
    """:func:`moe_permute` without its order, and :func:`moe_gather`: one launch for the few pairs that PAIRS holds.

    Grid: (1 + blocks of BLOCK columns, tokens). A token's first program writes its line of ``inverse``, token 0's the
    offsets too; the others copy columns. Each finds its token's rows for itself: a pair's is the number of pairs of
    lower bins, and of its own bin before it. Without tokens only offsets are written.
    """
    pdl_wait(DEPENDENT)
    # The token's columns are on their way while pairs are counted.
    t = tl.program_id(1)
    first = tl.program_id(0) == 0
    c = (tl.program_id(0) - 1) * how.BLOCK + tl.arange(0, how.BLOCK)
    inside = (c < n.cols) & (t < n.tokens) & (not first)
    c = c.to(tl.int64)
    x = tl.load(at.x_ptr + t.to(tl.int64) * by.x.row + c * by.x.col, mask=inside)
    # All pairs, then slot by slot where the token's go.
    pair = tl.arange(0, how.PAIRS)
    here, bins = _bins(at.ids_ptr, 0, n.tokens * how.TOP_K, n.experts, how.PAIRS)
    counted = tl.where(here, bins, how.BINS)  # pairs that do not exist come behind all
    for j in tl.static_range(how.TOP_K):
        place = t * how.TOP_K + j
        own = _bin(tl.load(at.ids_ptr + place, mask=t < n.tokens, other=0), n.experts)
        row = tl.sum(((counted < own) | ((counted == own) & (pair < place))).to(tl.int32), 0)
        tl.store(at.rows_ptr + row.to(tl.int64) * by.rows.row + c * by.rows.col, x, mask=inside)
        tl.store(at.inverse_ptr + place, row, mask=first & (t < n.tokens))
    if first & (t == 0):
        bin = tl.arange(0, how.BINS)
        counts = tl.histogram(bins, how.BINS, mask=here)
        tl.store(at.offsets_ptr + bin, tl.cumsum(counts, 0) - counts, mask=bin <= n.experts)


@triton.jit
def moe_combine(at: Pointers, n: Sizes, by: Strides, how: How, DEPENDENT: tl.constexpr = False):
    """``out[t] = sum_j weights[t, j] * rows[inverse[t, j]]``, in fp32, in the order of j, rounded once.

    Grid: a program per token and BLOCK columns; the loads of all TOP_K rows are in flight together.
    """
    pdl_wait(DEPENDENT)
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * how.BLOCK + tl.arange(0, how.BLOCK)
    inside = c < n.cols
    c = c.to(tl.int64)
    # Slot by slot; one that is no row adds 0.
    total = tl.zeros([how.BLOCK], tl.float32)
    for j in tl.static_range(how.TOP_K):
        place = tl.load(at.inverse_ptr + t * by.inverse.row + j * by.inverse.col).to(tl.int64)
        known = (place >= 0) & (place < n.tokens * how.TOP_K)
        row = tl.load(at.rows_ptr + place * by.rows.row + c * by.rows.col, mask=inside & known, other=0.0)
        row = row.to(tl.float32)
        if how.WEIGHTED:
            row = row * tl.load(at.weights_ptr + t * by.weights.row + j * by.weights.col)
        total += row
    tl.store(at.out_ptr + t * by.out.row + c * by.out.col, total.to(at.out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def moe_combine_backward(at: Pointers, n: Sizes, by: Strides, how: How, DEPENDENT: tl.constexpr = False):
    """``drows[inverse[t, j]] = weights[t, j] * dout[t]`` and ``dweights[t, j] = <dout[t], rows[inverse[t, j]]>``.

    Grid: a program per (token, slot), through the columns in BLOCKs; a token's slots are neighbours, so that
    dout comes from L2 for all but the first. fp32 arithmetic; each gradient is rounded once.
    """
    pdl_wait(DEPENDENT)
    t = (tl.program_id(0) // how.TOP_K).to(tl.int64)
    j = (tl.program_id(0) % how.TOP_K).to(tl.int64)
    place = tl.load(at.inverse_ptr + t * by.inverse.row + j * by.inverse.col).to(tl.int64)
    known = (place >= 0) & (place < n.tokens * how.TOP_K)
    w = tl.load(at.weights_ptr + t * by.weights.row + j * by.weights.col)
    # Columns in blocks: drows as they pass, the slot's product of dout and rows at the end.
    dot = tl.zeros([how.BLOCK], tl.float32)
    for begin in range(0, n.cols, how.BLOCK):
        c = begin + tl.arange(0, how.BLOCK)
        inside = (c < n.cols) & known
        c = c.to(tl.int64)
        d = tl.load(at.dout_ptr + t * by.dout.row + c * by.dout.col, mask=inside, other=0.0).to(tl.float32)
        row = tl.load(at.rows_ptr + place * by.rows.row + c * by.rows.col, mask=inside, other=0.0).to(tl.float32)
        dot += d * row
        drow = (w * d).to(at.drows_ptr.dtype.element_ty)
        tl.store(at.drows_ptr + place * by.drows.row + c * by.drows.col, drow, mask=inside)
    tl.store(at.dweights_ptr + t * by.dweights.row + j * by.dweights.col, tl.sum(dot))
