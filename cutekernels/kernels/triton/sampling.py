"""Filtering logits before sampling: temperature, top-k, top-p and min-p without sorting the vocabulary.

Each filter keeps what ranks at or above a threshold, so it is the threshold that is searched: the largest key (see
``ordered`` of ``moe/route.py``) from which up there are enough, in number for top-k, in mass for top-p. A search fixes
BITS bits of the key at a time, from the top: one pass over the row measures all FAN = 2^BITS candidates.

Masses are whole numbers, exp(x - max) in units of 2^-40, so that their sums are exact: the tokens that are kept depend
neither on the order of summation nor on the config. They are made from fp32 additions and multiplications alone, each
rounded by itself (the kernel is compiled without fused multiply-add): any machine gets the same ones.

Values of :func:`sample_filter`: out and logits are (rows, cols); temperature, top-k, top-p and min-p are a number for
all rows or (TEMPERATURES, TOP_KS, TOP_PS, MIN_PS) a dense vector of one for each row; BY_K, BY_P and BY_MIN_P say which
filters there are. KEY_BITS is 16 or 32, as the logits' type has. ``run`` says where a search is; its ``state``, where
SPLIT: for each row the maximum, then FAN counts and FAN masses of each phase, zero before the first launch.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait
from cutekernels.kernels.triton.moe.route import LOWEST, ordered, valued

ONE = tl.constexpr(1 << 40)
_ALL = tl.constexpr(1 << 62)  # above any sum, so a search for it keeps everything

Pointers = namedtuple("Pointers", "out_ptr logits_ptr temperatures_ptr top_ks_ptr top_ps_ptr min_ps_ptr")
Sizes = namedtuple("Sizes", "cols chunk")
Steps = namedtuple("Steps", "row col")
Numbers = namedtuple("Numbers", "temperature top_k top_p min_p")
Pass = namedtuple("Pass", "state_ptr stage phase")
Line = namedtuple("Line", "logits begin end cols col")  # a row's columns from begin to before end; col: their stride


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
    BITS: int
    KEY_BITS: int
    SPLIT: bool


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
def _keys(line, at, BLOCK: tl.constexpr):
    """A block of a row from column ``at`` on: columns, their mask, values and keys."""
    c = at + tl.arange(0, BLOCK)
    there = c < line.cols
    x = tl.load(line.logits + c.to(tl.int64) * line.col, mask=there, other=0.0)
    return c, there, x, tl.where(there, ordered(x), LOWEST)


@triton.jit
def _most(line, BLOCK: tl.constexpr):
    """The row's largest key and its first column, as one number that is never negative."""
    # The key above, shifted to be positive; below it the column, counted down, so that the first of equal keys wins.
    best = tl.zeros([BLOCK], tl.int64)
    for at in range(line.begin, line.end, BLOCK):
        c, there, _, key = _keys(line, at, BLOCK)
        both = (key.to(tl.int64) + 2147483648) * 2147483648 + (2147483647 - c)
        best = tl.maximum(best, tl.where(there, both, 0))
    return tl.max(best, axis=0)


@triton.jit
def _candidates(low, phase, BITS: tl.constexpr, KEY_BITS: tl.constexpr):
    """The keys ``low`` with every value of the BITS bits that ``phase`` fixes."""
    return low + (tl.arange(0, 1 << BITS) << (KEY_BITS - BITS * (phase + 1)))


@triton.jit
def _counts(line, candidates, BLOCK: tl.constexpr, FAN: tl.constexpr):
    """The number of keys that reach each candidate."""
    found = tl.zeros([FAN, BLOCK], tl.int32)
    for at in range(line.begin, line.end, BLOCK):
        _, there, _, key = _keys(line, at, BLOCK)
        found += ((key[None, :] >= candidates[:, None]) & there[None, :]).to(tl.int32)
    return tl.sum(found, axis=1).to(tl.int64)


@triton.jit
def _masses(line, candidates, floor, most, temperature, BLOCK: tl.constexpr, FAN: tl.constexpr):
    """The mass of the keys that reach each candidate, and ``floor`` too."""
    # A block whose keys all lie below the floor and the least candidate needs no exponentials.
    found = tl.zeros([FAN, BLOCK], tl.int64)
    top = tl.div_rn(valued(most, line.logits.dtype.element_ty), temperature)
    useful = tl.maximum(floor, tl.min(candidates, axis=0))
    for at in range(line.begin, line.end, BLOCK):
        _, there, x, key = _keys(line, at, BLOCK)
        if tl.max(key, axis=0) >= useful:
            m = mass(tl.div_rn(x.to(tl.float32), temperature) - top)
            m = tl.where(key == most, ONE, m)
            m = tl.where((key >= floor) & there, m, 0)
            found += tl.where(key[None, :] >= candidates[:, None], m[None, :], 0)
    return tl.sum(found, axis=1)


@triton.jit
def _share(p, total):
    """The least whole mass from ``p * total`` up, at least 1; above ``total`` for p >= 1."""
    exact = p.to(tl.float64) * total.to(tl.float64)
    whole = exact.to(tl.int64)
    whole = tl.maximum(whole + (whole.to(tl.float64) < exact).to(tl.int64), 1)
    return tl.where(p < 1.0, whole, _ALL)


@triton.jit
def _advance(low, sums, wanted, phase, BITS: tl.constexpr, KEY_BITS: tl.constexpr):
    """``low`` with BITS more bits: the last candidate whose sum reaches the goal."""
    enough = (sums >= wanted) & (tl.arange(0, 1 << BITS) > 0)
    return low + (tl.sum(enough.to(tl.int32), axis=0) << (KEY_BITS - BITS * (phase + 1)))


@triton.jit
def _state(table, wanted, done, LOW: tl.constexpr, BITS: tl.constexpr, KEY_BITS: tl.constexpr):
    """The state of a search after ``done`` phases, from their sums; the sums of the running phase still grow."""
    FAN: tl.constexpr = 1 << BITS
    phase = tl.arange(0, KEY_BITS // BITS)
    j = tl.arange(0, FAN)
    sums = tl.load(table + phase[:, None] * FAN + j[None, :], mask=(phase < done)[:, None], other=0)
    enough = ((sums >= wanted) & (j[None, :] > 0)).to(tl.int32)
    return LOW + tl.sum(tl.sum(enough, axis=1) << (KEY_BITS - BITS * (phase + 1)), axis=0)


@triton.jit
def _write(out, out_col, line, floor, best, scaling, least, how):
    """Writes what is kept, scaled, and -inf for the rest. ``scaling``: the temperature, and whether it is greedy."""
    temperature, greedy = scaling
    # The largest key and its first column, as ``_most`` joined them; greedy rows keep that column alone.
    most = (best // 2147483648 - 2147483648).to(tl.int32)
    first = (2147483647 - best % 2147483648).to(tl.int32)
    top = tl.div_rn(valued(most, line.logits.dtype.element_ty), temperature)
    for at in range(line.begin, line.end, how.BLOCK):
        c, there, x, key = _keys(line, at, how.BLOCK)
        y = tl.div_rn(x.to(tl.float32), temperature)
        kept = key >= floor
        if how.BY_MIN_P:
            kept = kept & ((key == most) | (mass(y - top) >= least))
        kept = tl.where(greedy, c == first, kept)
        y = tl.where(kept, y, float("-inf"))
        tl.store(out + c.to(tl.int64) * out_col, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def sample_filter(
    at: Pointers, n: Sizes, by: Strides, of: Numbers, run: Pass, how: How, DEPENDENT: tl.constexpr = False
):
    """One row of ``sample_filter``; what is kept is described where the op is declared.

    Grid: rows, by chunks of ``chunk`` columns (one chunk without SPLIT).
    Schedule: without SPLIT a program does all of a row, pass after pass. With it, each pass is a launch, and each
    program of a row takes ``chunk`` columns: the sums meet in ``state`` by integer atomics, whose order changes
    nothing, and each program of the next launch reads the search so far off them. ``stage`` says which pass: 0 the
    maximum, 1 counts, 2 masses, 3 the result.
    """
    pdl_wait(DEPENDENT)
    FAN: tl.constexpr = 1 << how.BITS
    PHASES: tl.constexpr = how.KEY_BITS // how.BITS
    LOW: tl.constexpr = -(1 << (how.KEY_BITS - 1))
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * n.chunk
    end = tl.minimum(begin + n.chunk, n.cols)
    logits = at.logits_ptr + row * by.logits.row
    out = at.out_ptr + row * by.out.row
    # tl.full makes tensors of numbers: the interpreter passes Python's own, in fp64.
    temperature = tl.load(at.temperatures_ptr + row) if how.TEMPERATURES else tl.full([], of.temperature, tl.float32)
    top_k = tl.load(at.top_ks_ptr + row) if how.TOP_KS else tl.full([], of.top_k, tl.int32)
    top_p = tl.load(at.top_ps_ptr + row) if how.TOP_PS else tl.full([], of.top_p, tl.float32)
    min_p = tl.load(at.min_ps_ptr + row) if how.MIN_PS else tl.full([], of.min_p, tl.float32)
    # A temperature of 0, below, or NaN is greedy: the first of the largest logits. Such rows skip the searches.
    greedy = ~(temperature > 0.0)
    temperature = tl.where(greedy, 1.0, temperature)
    searched_k = (top_k > 0) & (top_k < n.cols) & ~greedy
    searched_p = (top_p < 1.0) & ~greedy
    # min-p: a share of the largest mass, which is ONE.
    least = tl.where(min_p > 0.0, _share(tl.minimum(min_p, 1.0) * 0.5, tl.full([], ONE * 2, tl.int64)), 0)

    # ---- with SPLIT: one pass of the search, of one chunk

    if how.SPLIT:
        line = Line(logits, begin, end, n.cols, by.logits.col)
        state = run.state_ptr + row * (1 + 2 * PHASES * FAN)
        counted = state + 1
        weighed = counted + PHASES * FAN
        if run.stage == 0:
            # The maximum of the row: the programs' own meet in the first word.
            best = _most(line, how.BLOCK)
            tl.atomic_max(state, best, sem="relaxed")
        else:
            best = tl.load(state)
            most = (best // 2147483648 - 2147483648).to(tl.int32)
            floor = tl.full([], LOW, tl.int32)
            # The floor that top-k has fixed so far: all phases are done where masses are measured.
            if how.BY_K:
                done = tl.where(run.stage == 1, run.phase, PHASES)
                goal = tl.where(searched_k, top_k.to(tl.int64), _ALL)
                floor = _state(counted, goal, done, LOW, how.BITS, how.KEY_BITS)
            if run.stage == 1:
                # Counts of this phase's candidates, added to those of the row's other programs.
                if searched_k:
                    candidates = _candidates(floor, run.phase, how.BITS, how.KEY_BITS)
                    sums = _counts(line, candidates, how.BLOCK, FAN)
                    tl.atomic_add(counted + run.phase * FAN + tl.arange(0, FAN), sums, sem="relaxed")
            else:
                # The floor that top-p has fixed so far, from the masses of the phases before.
                low = tl.full([], LOW, tl.int32)
                if how.BY_P:
                    wanted = tl.where(searched_p, _share(top_p, tl.load(weighed)), _ALL)
                    done = tl.where(run.stage == 2, run.phase, PHASES)
                    low = _state(weighed, wanted, done, LOW, how.BITS, how.KEY_BITS)
                if run.stage == 2:
                    if searched_p:
                        candidates = _candidates(low, run.phase, how.BITS, how.KEY_BITS)
                        sums = _masses(line, candidates, floor, most, temperature, how.BLOCK, FAN)
                        tl.atomic_add(weighed + run.phase * FAN + tl.arange(0, FAN), sums, sem="relaxed")
                else:
                    floor = tl.maximum(floor, low)
                    _write(out, by.out.col, line, floor, best, (temperature, greedy), least, how)
    # ---- without SPLIT: all passes of a row, one after another

    else:
        line = Line(logits, 0, n.cols, n.cols, by.logits.col)
        best = _most(line, how.BLOCK)
        most = (best // 2147483648 - 2147483648).to(tl.int32)
        floor = tl.full([], LOW, tl.int32)
        # top-k: BITS bits of the floor a pass, by counts.
        if how.BY_K:  # noqa: SIM102 - known at compile time, unlike what follows
            if searched_k:
                for i in range(PHASES):
                    candidates = _candidates(floor, i, how.BITS, how.KEY_BITS)
                    sums = _counts(line, candidates, how.BLOCK, FAN)
                    floor = _advance(floor, sums, top_k.to(tl.int64), i, how.BITS, how.KEY_BITS)
        # top-p: the same by masses, of what top-k has left.
        if how.BY_P:  # noqa: SIM102
            if searched_p:
                low = tl.full([], LOW, tl.int32)
                wanted = tl.full([], 0, tl.int64)
                for i in range(PHASES):
                    candidates = _candidates(low, i, how.BITS, how.KEY_BITS)
                    sums = _masses(line, candidates, floor, most, temperature, how.BLOCK, FAN)
                    if i == 0:  # the first candidate is reached by all
                        total = tl.sum(tl.where(tl.arange(0, FAN) == 0, sums, 0), axis=0)
                        wanted = _share(top_p, total)
                    low = _advance(low, sums, wanted, i, how.BITS, how.KEY_BITS)
                floor = tl.maximum(floor, low)
        _write(out, by.out.col, line, floor, best, (temperature, greedy), least, how)
