"""Filtering logits before sampling: temperature, top-k, top-p and min-p without sorting the vocabulary.

Each filter keeps what ranks at or above a threshold, so it is the threshold that is searched: the largest key (see
``ordered`` of ``moe/route.py``) from which up there are enough, in number for top-k, in mass for top-p. A search fixes
two bits of the key at a time, from the top, by the sums of the four candidates.

Only few logits can be that threshold. One pass finds the largest of every BLOCK-th column: ``k`` such lanes that reach
a key are at least ``k`` logits that do. A second one moves what reaches it to the front of the row's result, lane by
lane, and the searches read those alone. Where their mass is too little for top-p, the whole row is moved.

Masses are whole numbers, exp(x - max) in units of 2^-40, so that their sums are exact: the tokens that are kept depend
neither on the order of summation nor on the config. They are made from fp32 additions and multiplications alone, each
rounded by itself (the kernel is compiled without fused multiply-add): any machine gets the same ones.

Values of :func:`sample_filter`: out and logits are (rows, cols); temperature, top-k, top-p and min-p are a number for
all rows or (TEMPERATURES, TOP_KS, TOP_PS, MIN_PS) a dense vector of one for each row; BY_K, BY_P and BY_MIN_P say which
filters there are. KEY_BITS is 16 or 32, as the logits' type has. A pass reads DEPTH blocks of BLOCK columns at a time,
and loads as many ahead with two STAGES.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait
from cutekernels.kernels.triton.moe.route import LOWEST, ordered, valued

ONE = tl.constexpr(1 << 40)
_BITS = tl.constexpr(2)  # of a key that a phase of a search fixes
_FAN = tl.constexpr(4)
_LANE_BITS = tl.constexpr(16)  # of a key that lanes are to reach

Pointers = namedtuple("Pointers", "out_ptr logits_ptr temperatures_ptr top_ks_ptr top_ps_ptr min_ps_ptr")
Sizes = namedtuple("Sizes", "cols")
Steps = namedtuple("Steps", "row col")
Numbers = namedtuple("Numbers", "temperature top_k top_p min_p")
Line = namedtuple("Line", "start cols col")  # a row: its columns, and their stride
Front = namedtuple("Front", "start col count deepest")  # of a result: what is moved, how many to a lane, and at most
Softmax = namedtuple("Softmax", "most top temperature")  # the largest key, its value by the temperature


class Strides(NamedTuple):
    """Strides of the operands, in elements."""

    out: Steps
    logits: Steps


class How(NamedTuple):
    """Compiled in: of which numbers each row has its own, which filters there are, how they search."""

    TEMPERATURES: bool
    TOP_KS: bool
    TOP_PS: bool
    MIN_PS: bool
    BY_K: bool
    BY_P: bool
    BY_MIN_P: bool
    BLOCK: int
    DEPTH: int
    STAGES: int
    KEY_BITS: int


@triton.jit
def mass(d):
    """exp(d) for d <= 0 in units of 2^-40, an int64. 0 below -28, and for NaN."""
    # e^d = 2^n e^r, the latter by a polynomial of degree 6.
    d = tl.where(d > -64.0, d, -64.0)
    n = tl.floor(d * 1.4426950408889634 + 0.5)
    r = (d - n * 0.693115234375) - n * 3.194618494528623e-05  # in [-0.35, 0.35]; n * the first part is exact
    e = r * 0.001388888888888889 + 0.008333333333333333
    e = e * r + 0.041666666666666664
    e = e * r + 0.16666666666666666
    e = e * r + 0.5
    e = e * r + 1.0
    e = e * r + 1.0
    whole = (e * 16777216.0).to(tl.int32).to(tl.int64)  # exact: e has 24 bits and is at least 0.7
    return (whole << 16) >> tl.minimum(0.0 - n, 63.0).to(tl.int64)


@triton.jit
def _mass(x, key, of):
    """Masses of logits ``x`` and their keys."""
    return tl.where(key == of.most, ONE, mass(tl.div_rn(x.to(tl.float32), of.temperature) - of.top))


@triton.jit
def _tile(line, at, how):
    """DEPTH blocks of a row from column ``at`` on, (DEPTH, BLOCK): columns, their mask, values and keys."""
    c = at + tl.arange(0, how.DEPTH)[:, None] * how.BLOCK + tl.arange(0, how.BLOCK)[None, :]
    there = c < line.cols
    x = tl.load(line.start + c.to(tl.int64) * line.col, mask=there, other=0.0)
    return c, there, x, tl.where(there, ordered(x), LOWEST)


@triton.jit
def _lanes(line, how):
    """The largest key of each lane: of every BLOCK-th column."""
    most = tl.full([how.DEPTH, how.BLOCK], float("-inf"), tl.float32)
    for at in tl.range(0, line.cols, how.DEPTH * how.BLOCK, num_stages=how.STAGES):
        _, there, x, _ = _tile(line, at, how)
        x = tl.where(there, x.to(tl.float32), float("-inf"))
        most = tl.maximum(most, x, propagate_nan=tl.PropagateNan.ALL)
    return tl.max(ordered(most.to(line.start.dtype.element_ty)), axis=0)


@triton.jit
def _first(line, most, how):
    """The first column of the key ``most``."""
    first = tl.full([how.DEPTH, how.BLOCK], 2147483647, tl.int32)
    for at in tl.range(0, line.cols, how.DEPTH * how.BLOCK, num_stages=how.STAGES):
        c, _, _, key = _tile(line, at, how)
        first = tl.minimum(first, tl.where(key == most, c, 2147483647))
    return tl.min(tl.min(first, axis=0), axis=0)


@triton.jit
def _gather(out, line, least, how):
    """The values from the key ``least`` up, moved to the front of their lanes; all values, where it is no number's."""
    bound = valued(least, line.start.dtype.element_ty)
    count = tl.zeros([how.BLOCK], tl.int32)
    lane = tl.arange(0, how.BLOCK)[None, :]
    for at in tl.range(0, line.cols, how.DEPTH * how.BLOCK, num_stages=how.STAGES):
        _, there, x, _ = _tile(line, at, how)
        reached = (~(x.to(tl.float32) < bound) & there).to(tl.int32)
        place = count[None, :] + tl.cumsum(reached, axis=0) - reached
        tl.store(out.start + (place * how.BLOCK + lane).to(tl.int64) * out.col, x, mask=reached > 0)
        count += tl.sum(reached, axis=0)
    tl.debug_barrier()  # other threads may read them
    return Front(out.start, out.col, count, tl.max(count, axis=0))


@triton.jit
def _block(front, i, how):
    """The values at the front of all lanes that have ``i`` more before them: their mask, values and keys."""
    there = i < front.count
    at = i * how.BLOCK + tl.arange(0, how.BLOCK)
    x = tl.load(front.start + at.to(tl.int64) * front.col, mask=there, other=0.0)
    return there, x, tl.where(there, ordered(x), LOWEST)


@triton.jit
def _counts(front, candidates, how):
    """The number of keys that reach each candidate."""
    found = tl.zeros([_FAN, how.BLOCK], tl.int32)
    for i in range(front.deepest):
        there, _, key = _block(front, i, how)
        found += ((key[None, :] >= candidates[:, None]) & there[None, :]).to(tl.int32)
    return tl.sum(found, axis=1).to(tl.int64)


@triton.jit
def _masses(front, candidates, floor, of, how):
    """The mass of the keys that reach each candidate, and ``floor`` too."""
    found = tl.zeros([_FAN, how.BLOCK], tl.int64)
    for i in range(front.deepest):
        there, x, key = _block(front, i, how)
        m = tl.where((key >= floor) & there, _mass(x, key, of), 0)
        found += tl.where(key[None, :] >= candidates[:, None], m[None, :], 0)
    return tl.sum(found, axis=1)


@triton.jit
def _mass_from(front, floor, of, how):
    """The mass of the keys that reach ``floor``."""
    found = tl.zeros([how.BLOCK], tl.int64)
    for i in range(front.deepest):
        there, x, key = _block(front, i, how)
        found += tl.where((key >= floor) & there, _mass(x, key, of), 0)
    return tl.sum(found, axis=0)


@triton.jit
def _mass_of_all(line, of, how):
    """The mass of a row."""
    found = tl.zeros([how.BLOCK], tl.int64)
    for at in tl.range(0, line.cols, how.DEPTH * how.BLOCK, num_stages=how.STAGES):
        _, there, x, key = _tile(line, at, how)
        found += tl.sum(tl.where(there, _mass(x, key, of), 0), axis=0)
    return tl.sum(found, axis=0)


@triton.jit
def _least_of_mass(front, floor, least, of, how):
    """The least key from ``floor`` up whose mass is ``least`` or more, and the largest one whose is not: masses fall
    with their keys but for their last bit.
    """
    enough = tl.full([how.BLOCK], 2147483647, tl.int32)
    little = tl.full([how.BLOCK], LOWEST, tl.int32)
    for i in range(front.deepest):
        there, x, key = _block(front, i, how)
        there = there & (key >= floor)
        reached = _mass(x, key, of) >= least
        enough = tl.minimum(enough, tl.where(there & reached, key, 2147483647))
        little = tl.maximum(little, tl.where(there & ~reached, key, LOWEST))
    return tl.min(enough, axis=0), tl.max(little, axis=0)


@triton.jit
def _share(p, total):
    """The least whole mass from ``p * total`` up, at least 1."""
    exact = p.to(tl.float64) * total.to(tl.float64)
    whole = exact.to(tl.int64)
    return tl.maximum(whole + (whole.to(tl.float64) < exact).to(tl.int64), 1)


@triton.jit
def _candidates(low, phase, how):
    """The keys ``low`` with every value of the two bits that ``phase`` fixes."""
    return low + (tl.arange(0, _FAN) << (how.KEY_BITS - _BITS * (phase + 1)))


@triton.jit
def _advance(low, sums, wanted, phase, how):
    """``low`` with two more bits: the last candidate whose sum reaches the goal."""
    enough = (sums >= wanted) & (tl.arange(0, _FAN) > 0)
    return low + (tl.sum(enough.to(tl.int32), axis=0) << (how.KEY_BITS - _BITS * (phase + 1)))


@triton.jit
def _reached(lanes, wanted, how):
    """A key that ``wanted`` lanes reach, or the lowest: the largest one of few bits."""
    low = tl.full([], -(1 << (how.KEY_BITS - 1)), tl.int32)
    for phase in range(_LANE_BITS // _BITS):
        candidates = _candidates(low, phase, how)
        sums = tl.sum((lanes[None, :] >= candidates[:, None]).to(tl.int32), axis=1)
        low = _advance(low, sums, wanted, phase, how)
    return low


@triton.jit
def _search(front, wanted, floor, least, of, how, BY_MASS: tl.constexpr):
    """The largest key, from ``least`` to the largest there is, that ``wanted`` reach, in number or in mass of what
    reaches ``floor``.
    """
    low = tl.full([], -(1 << (how.KEY_BITS - 1)), tl.int32)
    for phase in range(how.KEY_BITS // _BITS):
        shift = how.KEY_BITS - _BITS * (phase + 1)
        if (least >> shift) == (of.most >> shift):  # there is one candidate
            low = (least >> shift) << shift
        else:
            candidates = _candidates(low, phase, how)
            if BY_MASS:
                sums = _masses(front, candidates, floor, of, how)
            else:
                sums = _counts(front, candidates, how)
            low = _advance(low, sums, wanted, phase, how)
    return low


@triton.jit
def _write(out, line, floor, only, least, of, how):
    """Writes what is kept, divided by the temperature, and -inf for the rest: the keys from ``floor`` up, the column
    ``only`` alone where there is one, and masses from ``least`` up.
    """
    for at in tl.range(0, line.cols, how.DEPTH * how.BLOCK, num_stages=how.STAGES):
        c, there, x, key = _tile(line, at, how)
        kept = (key >= floor) & ((only < 0) | (c == only))
        if how.BY_MIN_P:  # noqa: SIM102 - known at compile time, unlike what follows
            if least > 0:
                kept = kept & (_mass(x, key, of) >= least)
        y = tl.where(kept, tl.div_rn(x.to(tl.float32), of.temperature), float("-inf"))
        tl.store(out.start + c.to(tl.int64) * out.col, y.to(out.start.dtype.element_ty), mask=there)


@triton.jit
def sample_filter(at: Pointers, n: Sizes, by: Strides, of: Numbers, how: How, DEPENDENT: tl.constexpr = False):
    """One row of ``sample_filter``; what is kept is described where the op is declared.

    Grid: rows. A program passes over its row three times, and a fourth time for the mass of a row that top-k leaves
    whole; ``out`` holds what the searches read until the last pass writes it.
    """
    pdl_wait(DEPENDENT)
    LOW: tl.constexpr = -(1 << (how.KEY_BITS - 1))
    row = tl.program_id(0).to(tl.int64)
    line = Line(at.logits_ptr + row * by.logits.row, n.cols, by.logits.col)
    out = Line(at.out_ptr + row * by.out.row, n.cols, by.out.col)
    # tl.full makes tensors of numbers: the interpreter passes Python's own, in fp64.
    temperature = tl.load(at.temperatures_ptr + row) if how.TEMPERATURES else tl.full([], of.temperature, tl.float32)
    top_k = tl.load(at.top_ks_ptr + row) if how.TOP_KS else tl.full([], of.top_k, tl.int32)
    top_p = tl.load(at.top_ps_ptr + row) if how.TOP_PS else tl.full([], of.top_p, tl.float32)
    min_p = tl.load(at.min_ps_ptr + row) if how.MIN_PS else tl.full([], of.min_p, tl.float32)
    # A temperature of 0, below, or NaN is greedy: the first of the largest logits. Such rows skip the searches.
    greedy = ~(temperature > 0.0)
    temperature = tl.where(greedy, 1.0, temperature)
    # min-p: a share of the largest mass, which is ONE.
    least = tl.where(min_p > 0.0, _share(tl.minimum(min_p, 1.0) * 0.5, tl.full([], ONE * 2, tl.int64)), 0)
    lanes = _lanes(line, how)
    most = tl.max(lanes, axis=0)
    softmax = Softmax(most, tl.div_rn(valued(most, line.start.dtype.element_ty), temperature), temperature)
    floor = tl.full([], LOW, tl.int32)
    only = tl.full([], -1, tl.int32)
    if greedy:
        only = _first(line, most, how)
        least = tl.full([], 0, tl.int64)
    elif how.BY_K or how.BY_P:
        searched_k = (top_k > 0) & (top_k < n.cols) & how.BY_K
        searched_p = (top_p < 1.0) & how.BY_P
        if searched_k | searched_p:
            # What may be a threshold: as many lanes as top-k keeps reach it, or a quarter of all.
            reached = _reached(lanes, tl.where(searched_k, top_k, how.BLOCK // 4), how)
            front = _gather(out, line, reached, how)
            if searched_k:
                floor = _search(front, top_k.to(tl.int64), floor, reached, softmax, how, False)
            if searched_p:
                total = _mass_from(front, floor, softmax, how)
                moved = total
                if ~searched_k:
                    total = _mass_of_all(line, softmax, how)
                wanted = _share(top_p, total)
                if moved < wanted:
                    reached = tl.full([], LOW, tl.int32)
                    front = _gather(out, line, reached, how)
                floor = _search(front, wanted, floor, tl.maximum(floor, reached), softmax, how, True)
            if how.BY_MIN_P:
                # A floor serves for min-p too, unless a last bit of masses is in the way.
                enough, little = _least_of_mass(front, floor, least, softmax, how)
                floor = tl.maximum(floor, enough)
                least = tl.where(little < floor, 0, least)
            tl.debug_barrier()  # all have read what is overwritten
    _write(out, line, floor, only, least, softmax, how)
