"""Filtering logits before sampling: temperature, top-k, top-p and min-p without sorting the vocabulary.

Each filter keeps what ranks at or above a threshold, so it is the threshold that is searched: the largest key (see
``ordered`` of ``moe/route.py``) from which up there are enough, in number for top-k, in mass for top-p. A search fixes
two bits of the key at a time, from the top, by the sums of the four candidates.

Mostly few logits can be that threshold, and the searches read those alone, moved to the front of the row's result. For
top-k they follow from lanes, the largest of every BLOCK-th column: ``k`` lanes that reach a key are at least ``k``
logits that do (for more than BLOCK, all that are not -inf). For top-p alone, from the masses above a few equally spaced
values, up to four times.

Masses are whole numbers, exp(x - max) in units of 2^-40, so that their sums are exact: the tokens that are kept depend
neither on the order of summation nor on the config. They are made from fp32 additions and multiplications alone, each
rounded by itself (the kernel is compiled without fused multiply-add): any machine gets the same ones.

Values of :func:`sample_filter`: out and logits are (rows, cols); temperature, top-k, top-p and min-p are a number for
all rows or (TEMPERATURES, TOP_KS, TOP_PS, MIN_PS) a dense vector of one for each row; BY_K, BY_P and BY_MIN_P say which
filters there are. KEY_BITS is 16 or 32, as the logits' type has. A pass reads DEPTH blocks of BLOCK columns at a time.
``state``, where SPLIT, zero before the first launch: of each row the lanes, how many logits were moved to each, the
masses of four passes, and what is found.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait
from cutekernels.kernels.triton.moe.route import LOWEST, ordered, valued

ONE = tl.constexpr(1 << 40)
_HIGHEST = tl.constexpr((1 << 31) - 1)
_BITS = tl.constexpr(2)  # of a key that a phase of a search fixes
_FAN = tl.constexpr(4)
_LANE_BITS = tl.constexpr(16)  # of a key that lanes are to reach
_STEPS = tl.constexpr(8)  # sums of a pass that narrows: of the whole row, and from seven values up
_ALL = tl.constexpr(1 << 62)  # above any mass
_ROUNDS = tl.constexpr(4)  # such passes at most
_MOVE, _SEARCH, _WRITE = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)  # stages after the rounds
_REACH = tl.constexpr(16.0)  # how far below the maximum they lie at first: e^-16 is 1e-7

Pointers = namedtuple("Pointers", "out_ptr logits_ptr temperatures_ptr top_ks_ptr top_ps_ptr min_ps_ptr")
Sizes = namedtuple("Sizes", "cols chunk")
Steps = namedtuple("Steps", "row col")
Numbers = namedtuple("Numbers", "temperature top_k top_p min_p")
Pass = namedtuple("Pass", "state_ptr stage")
Line = namedtuple("Line", "start begin end col")  # a row's columns from begin to before end; col: their stride
Front = namedtuple("Front", "start col count deepest")  # of a result: what is moved, how many to a lane, and at most
Softmax = namedtuple("Softmax", "most top temperature")  # the largest key, its value by the temperature
Span = namedtuple("Span", "low high beyond within")  # keys of a threshold, both inclusive; masses above, and with them
Limits = namedtuple("Limits", "floor only least")  # keys from floor up; one column alone, or -1; masses from least up
Request = namedtuple("Request", "temperature top_k top_p least greedy by_k by_p")  # by_k, by_p: what is searched
State = namedtuple("State", "lanes counts sums result")  # of a row: where its parts begin


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
def _mass(x, key, of):
    """Masses of logits ``x`` and their keys."""
    return tl.where(key == of.most, ONE, mass(tl.div_rn(x.to(tl.float32), of.temperature) - of.top))


@triton.jit
def _softmax(most, temperature, dtype: tl.constexpr):
    """The largest key of a row, its value by the temperature, and that: masses follow from them."""
    return Softmax(most, tl.div_rn(valued(most, dtype), temperature), temperature)


@triton.jit
def _share(p, total):
    """The least whole mass from ``p * total`` up, at least 1."""
    exact = p.to(tl.float64) * total.to(tl.float64)
    whole = exact.to(tl.int64)
    return tl.maximum(whole + (whole.to(tl.float64) < exact).to(tl.int64), 1)


# ---- passes over a row


@triton.jit
def _columns(line, c):
    """The columns ``c`` of a row: their numbers, their mask, values and keys."""
    there = c < line.end
    x = tl.load(line.start + c.to(tl.int64) * line.col, mask=there, other=0.0)
    return c, there, x, tl.where(there, ordered(x), LOWEST)


@triton.jit
def _tile(line, at, how):
    """DEPTH blocks of a row from column ``at`` on, (DEPTH, BLOCK)."""
    return _columns(line, at + tl.arange(0, how.DEPTH)[:, None] * how.BLOCK + tl.arange(0, how.BLOCK)[None, :])


@triton.jit
def _lanes(line, how):
    """The largest key of each lane: of every BLOCK-th column."""
    most = tl.full([how.DEPTH, how.BLOCK], float("-inf"), tl.float32)
    for at in tl.range(line.begin, line.end, how.DEPTH * how.BLOCK):
        _, there, x, _ = _tile(line, at, how)
        x = tl.where(there, x.to(tl.float32), float("-inf"))
        most = tl.maximum(most, x, propagate_nan=tl.PropagateNan.ALL)
    return tl.max(ordered(most.to(line.start.dtype.element_ty)), axis=0)


@triton.jit
def _first(line, most, how):
    """The first column of the key ``most``, or the largest int32."""
    first = tl.full([how.DEPTH, how.BLOCK], _HIGHEST, tl.int32)
    for at in tl.range(line.begin, line.end, how.DEPTH * how.BLOCK):
        c, _, _, key = _tile(line, at, how)
        first = tl.minimum(first, tl.where(key == most, c, _HIGHEST))
    return tl.min(tl.min(first, axis=0), axis=0)


@triton.jit
def _least_key(dtype: tl.constexpr):
    """The key above that of -inf, which has no mass and is the result of what goes."""
    return ordered(tl.full([], float("-inf"), tl.float32).to(dtype)) + 1


@triton.jit
def _everything(dtype: tl.constexpr):
    """The span of all keys but the least."""
    high, none = tl.full([], _HIGHEST, tl.int32), tl.full([], 0, tl.int64)
    return Span(_least_key(dtype), high, none, tl.full([], _ALL, tl.int64))


@triton.jit
def _candidates_of_span(span, of, dtype: tl.constexpr):
    """The lowest key, and those of seven values that divide the span, or REACH below the maximum, from the top down."""
    upper = valued(tl.minimum(span.high, of.most), dtype)
    lower = tl.where(span.low > _least_key(dtype), valued(span.low, dtype), upper - of.temperature * _REACH)
    j = tl.arange(0, _STEPS)
    values = upper - (upper - lower) * (j.to(tl.float32) / _STEPS)
    return tl.where(j == 0, LOWEST, ordered(values.to(dtype)))


@triton.jit
def _masses_from(line, candidates, of, how):
    """The mass of the keys that reach each of STEPS candidates."""
    WIDTH: tl.constexpr = how.BLOCK // 2  # so that a thread has few sums
    found = tl.zeros([_STEPS, WIDTH], tl.int64)
    for at in tl.range(line.begin, line.end, 2 * WIDTH):
        for half in tl.static_range(2):
            _, there, x, key = _columns(line, at + half * WIDTH + tl.arange(0, WIDTH))
            m = tl.where(there, _mass(x, key, of), 0)
            found += tl.where(key[None, :] >= candidates[:, None], m[None, :], 0)
    return tl.sum(found, axis=1)


@triton.jit
def _narrow(span, candidates, sums, wanted):
    """The part of a span where the mass from a key up comes to ``wanted``, by the sums of candidates."""
    enough = sums >= wanted
    low = tl.max(tl.where(enough, candidates, LOWEST), axis=0)
    high = tl.min(tl.where(enough, _HIGHEST, candidates - 1), axis=0)
    beyond = tl.max(tl.where(enough, 0, sums), axis=0)
    within = tl.min(tl.where(enough, sums, span.within), axis=0)
    return Span(tl.maximum(span.low, low), tl.minimum(span.high, high), tl.maximum(span.beyond, beyond), within)


@triton.jit
def _is_wide(span, of, dtype: tl.constexpr, how):
    """Whether so many logits may lie in a span that another pass is cheaper than searches of them."""
    FEW: tl.constexpr = how.BLOCK // 4 if how.SPLIT else 4 * how.BLOCK
    return span.within - span.beyond > _mass(valued(span.low, dtype), span.low, of) * FEW


@triton.jit
def _gather(out, line, span, counts, how):
    """Moves the values in the span to the front of their lanes; how many of this program's each has. ``counts``, where
    SPLIT: how many of all programs'.
    """
    count = tl.zeros([how.BLOCK], tl.int32)
    lane = tl.arange(0, how.BLOCK)
    for at in tl.range(line.begin, line.end, how.DEPTH * how.BLOCK):
        _, there, x, key = _tile(line, at, how)
        reached = ((key >= span.low) & (key <= span.high) & there).to(tl.int32)
        more = tl.sum(reached, axis=0)
        before = count
        if how.SPLIT:
            before = tl.atomic_add(counts + lane, more.to(tl.int64), mask=more > 0, sem="relaxed").to(tl.int32)
        place = before[None, :] + tl.cumsum(reached, axis=0) - reached
        tl.store(out.start + (place * how.BLOCK + lane[None, :]).to(tl.int64) * out.col, x, mask=reached > 0)
        count += more
    return count


@triton.jit
def _write(out, line, limits, of, how):
    """Writes what is kept, divided by the temperature, and -inf for the rest."""
    for at in tl.range(line.begin, line.end, how.DEPTH * how.BLOCK):
        c, there, x, key = _tile(line, at, how)
        stays = (key >= limits.floor) & ((limits.only < 0) | (c == limits.only))
        if how.BY_MIN_P:  # noqa: SIM102 - known at compile time, unlike what follows
            if limits.least > 0:
                stays = stays & (_mass(x, key, of) >= limits.least)
        y = tl.where(stays, tl.div_rn(x.to(tl.float32), of.temperature), float("-inf"))
        tl.store(out.start + c.to(tl.int64) * out.col, y.to(out.start.dtype.element_ty), mask=there)


# ---- searches


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
def _masses(front, candidates, of, how):
    """The mass of the keys that reach each candidate."""
    found = tl.zeros([_FAN, how.BLOCK], tl.int64)
    for i in range(front.deepest):
        there, x, key = _block(front, i, how)
        m = tl.where(there, _mass(x, key, of), 0)
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
def _least_of_mass(front, least, of, how):
    """The least key whose mass is ``least`` or more, and the largest one whose is not: masses fall with their keys but
    for their last bit.
    """
    enough = tl.full([how.BLOCK], _HIGHEST, tl.int32)
    little = tl.full([how.BLOCK], LOWEST, tl.int32)
    for i in range(front.deepest):
        there, x, key = _block(front, i, how)
        reached = _mass(x, key, of) >= least
        enough = tl.minimum(enough, tl.where(there & reached, key, _HIGHEST))
        little = tl.maximum(little, tl.where(there & ~reached, key, LOWEST))
    return tl.min(enough, axis=0), tl.max(little, axis=0)


@triton.jit
def _tighten(span, front, how):
    """The span from the least key at the front to the largest: of equal logits there is one."""
    low = tl.full([how.BLOCK], _HIGHEST, tl.int32)
    high = tl.full([how.BLOCK], LOWEST, tl.int32)
    for i in range(front.deepest):
        there, _, key = _block(front, i, how)
        low = tl.minimum(low, tl.where(there, key, _HIGHEST))
        high = tl.maximum(high, key)
    return Span(tl.min(low, axis=0), tl.max(high, axis=0), span.beyond, span.within)


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
def _bound_by_lanes(span, lanes, wanted, how):
    """The part of a span from a key up that ``wanted`` lanes reach, the largest one of few bits; or all of it."""
    low = tl.full([], -(1 << (how.KEY_BITS - 1)), tl.int32)
    for phase in range(_LANE_BITS // _BITS):
        candidates = _candidates(low, phase, how)
        sums = tl.sum((lanes[None, :] >= candidates[:, None]).to(tl.int32), axis=1)
        low = _advance(low, sums, wanted, phase, how)
    return Span(tl.maximum(span.low, low), span.high, span.beyond, span.within)


@triton.jit
def _search(front, wanted, floor, span, of, how, BY_MASS: tl.constexpr):
    """The largest key of the span, from ``floor`` up, that ``wanted`` reach, in number or in mass."""
    low = tl.full([], -(1 << (how.KEY_BITS - 1)), tl.int32)
    least, most = tl.maximum(span.low, floor), tl.minimum(span.high, of.most)
    for phase in range(how.KEY_BITS // _BITS):
        shift = how.KEY_BITS - _BITS * (phase + 1)
        if (least >> shift) == (most >> shift):  # there is one candidate
            low = (least >> shift) << shift
        else:
            candidates = _candidates(low, phase, how)
            if BY_MASS:
                sums = _masses(front, candidates, of, how) + span.beyond
            else:
                sums = _counts(front, candidates, how)
            low = _advance(low, sums, wanted, phase, how)
    return low


@triton.jit
def _choose(front, span, wanted, request, of, how):
    """The least key and mass of what is kept, by the logits in the span. ``wanted``: top-p's mass, without top-k."""
    floor = tl.full([], -(1 << (how.KEY_BITS - 1)), tl.int32)
    least, span = request.least, _tighten(span, front, how)
    if how.BY_K:  # noqa: SIM102 - known at compile time, unlike what follows
        if request.by_k:
            floor = _search(front, request.top_k.to(tl.int64), floor, span, of, how, False)
    if how.BY_P:  # noqa: SIM102
        if request.by_p:
            if request.by_k:
                wanted = _share(request.top_p, _mass_from(front, floor, of, how))
            floor = tl.maximum(floor, _search(front, wanted, floor, span, of, how, True))
    if how.BY_K and how.BY_MIN_P:  # noqa: SIM102
        if request.by_k:
            # The floor serves for min-p too, unless a last bit of masses is in the way.
            enough, little = _least_of_mass(front, least, of, how)
            floor = tl.maximum(floor, enough)
            least = tl.where(little < floor, 0, least)
    return floor, least


@triton.jit
def _read_request(at, n, of, row, how):
    """The parameters of a row, and by which of top-k and top-p it is searched."""
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
    by_k = (top_k > 0) & (top_k < n.cols) & how.BY_K
    by_p = (top_p < 1.0) & how.BY_P
    return Request(temperature, top_k, top_p, tl.where(greedy, 0, least), greedy, by_k, by_p)


@triton.jit
def _do_pass(out, line, state, stage, request, how):
    """One pass over a part of a row."""
    dtype: tl.constexpr = line.start.dtype.element_ty
    lane, step = tl.arange(0, how.BLOCK), tl.arange(0, _STEPS)
    if stage == 0:
        # Zero, as the state is at first, is below the distance of any key from the lowest int32.
        tl.atomic_max(state.lanes + lane, _lanes(line, how).to(tl.int64) - LOWEST, sem="relaxed")
    else:
        lanes = (tl.load(state.lanes + lane) + LOWEST).to(tl.int32)
        of = _softmax(tl.max(lanes, axis=0), request.temperature, dtype)
        if stage == _WRITE:
            floor = tl.load(state.result).to(tl.int32) if how.BY_K or how.BY_P else _everything(dtype).low
            only = tl.where(request.greedy, (0 - tl.load(state.result + 1)) + _HIGHEST, -1).to(tl.int32)
            least = tl.load(state.result + 2) if how.BY_K or how.BY_P else request.least
            _write(out, line, Limits(floor, only, least), of, how)
        elif request.greedy:
            if stage == _MOVE:
                # Counted down, so that the first of all programs wins, and zero is none.
                tl.atomic_max(state.result + 1, (0 - _first(line, of.most, how).to(tl.int64)) + _HIGHEST, sem="relaxed")
            elif (stage == _SEARCH) & (line.begin == 0):
                tl.store(state.result, _everything(dtype).low.to(tl.int64))
        elif how.BY_K or how.BY_P:
            span, wanted = _everything(dtype), tl.full([], 0, tl.int64)
            if how.BY_P:  # noqa: SIM102
                if request.by_p & ~request.by_k:
                    # The span so far, from the sums of the passes before this one, which are read at once.
                    places = tl.arange(0, _ROUNDS)[:, None] * _STEPS + step[None, :]
                    before = tl.load(state.sums + places)
                    for i in range(_ROUNDS):
                        if (stage > i) & _is_wide(span, of, dtype, how):
                            candidates = _candidates_of_span(span, of, dtype)
                            if stage == i + 1:
                                sums = _masses_from(line, candidates, of, how)
                                tl.atomic_add(state.sums + i * _STEPS + step, sums, sem="relaxed")
                            else:
                                found = tl.sum(tl.where(places // _STEPS == i, before, 0), axis=0)
                                if i == 0:
                                    wanted = _share(request.top_p, tl.max(found, axis=0))
                                span = _narrow(span, candidates, found, wanted)
            if stage > _ROUNDS:
                if how.BY_K:  # noqa: SIM102
                    if request.by_k:
                        span = _bound_by_lanes(span, lanes, request.top_k, how)
                if stage == _MOVE:
                    if request.by_k | request.by_p:
                        _gather(out, line, span, state.counts, how)
                elif line.begin == 0:
                    count = tl.load(state.counts + lane).to(tl.int32)
                    front = Front(out.start, out.col, count, tl.max(count, axis=0))
                    floor, least = _choose(front, span, wanted, request, of, how)
                    tl.store(state.result, floor.to(tl.int64))
                    tl.store(state.result + 2, least)


@triton.jit
def _do_all(out, line, request, how):
    """All passes over a row, one after another; ``out`` holds what the searches read until the last one writes it."""
    dtype: tl.constexpr = line.start.dtype.element_ty
    lanes = _lanes(line, how)
    of = _softmax(tl.max(lanes, axis=0), request.temperature, dtype)
    floor, only, least = _everything(dtype).low, tl.full([], -1, tl.int32), request.least
    if request.greedy:
        only = _first(line, of.most, how)
    elif how.BY_K or how.BY_P:  # noqa: SIM102
        if request.by_k | request.by_p:
            span, wanted = _everything(dtype), tl.full([], 0, tl.int64)
            if how.BY_K:  # noqa: SIM102
                if request.by_k:
                    span = _bound_by_lanes(span, lanes, request.top_k, how)
            if how.BY_P:  # noqa: SIM102
                if ~request.by_k:
                    for i in range(_ROUNDS):
                        if _is_wide(span, of, dtype, how):
                            candidates = _candidates_of_span(span, of, dtype)
                            sums = _masses_from(line, candidates, of, how)
                            if i == 0:
                                wanted = _share(request.top_p, tl.max(sums, axis=0))
                            span = _narrow(span, candidates, sums, wanted)
            count = _gather(out, line, span, 0, how)
            tl.debug_barrier()  # other threads may read what was moved
            front = Front(out.start, out.col, count, tl.max(count, axis=0))
            floor, least = _choose(front, span, wanted, request, of, how)
            tl.debug_barrier()  # all have read what is overwritten
    _write(out, line, Limits(floor, only, least), of, how)


@triton.jit
def sample_filter(
    at: Pointers, n: Sizes, by: Strides, of: Numbers, run: Pass, how: How, DEPENDENT: tl.constexpr = False
):
    """One row of ``sample_filter``; what is kept is described where the op is declared.

    Grid: rows, by chunks of ``chunk`` columns (one chunk without SPLIT).
    Schedule: without SPLIT a program does all of a row, pass after pass. With it, each pass is a launch, and each
    program of a row takes ``chunk`` columns: what they find meets in ``state`` by integer atomics, whose order changes
    nothing. ``stage`` says which pass: 0 the lanes, 1 to ROUNDS masses that narrow the span of top-p, MOVE the move of
    what lies in it, SEARCH the searches, by one program, WRITE the result.
    """
    pdl_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * n.chunk
    end = tl.minimum(begin + n.chunk, n.cols)
    line = Line(at.logits_ptr + row * by.logits.row, begin, end, by.logits.col)
    out = Line(at.out_ptr + row * by.out.row, begin, end, by.out.col)
    request = _read_request(at, n, of, row, how)
    if how.SPLIT:
        state = run.state_ptr + row * (2 * how.BLOCK + _ROUNDS * _STEPS + 3)
        sums = state + 2 * how.BLOCK
        _do_pass(out, line, State(state, state + how.BLOCK, sums, sums + _ROUNDS * _STEPS), run.stage, request, how)
    else:
        _do_all(out, line, request, how)
