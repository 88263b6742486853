"""New tokens into a cache of keys and values: where each sequence ends, and its end with them.

Grid:
    The first axis walks tokens (a tile never crosses a sequence), the second blocks of heads, those of q, of k, of v,
    the third blocks of channels, those that rotate before those that do not. Where a program takes all heads (WHOLE)
    the first axis walks blocks of channels of one tile of tokens after the other, as in ``rope``: neighbours in time
    are neighbours in memory. A cache is walked by page, slot and head; without pages a sequence is one page.

Values of :func:`kv_append` (strides in elements, channels always dense):
    ==============================  ===================================================================================
    ``out_q``, ``q``                (B, SEQ, HQ, D), rotated; may be the same memory; strides batch, seq, head
    ``k_cache``, ``v_cache``        (PAGES, PAGE_SIZE, HKV, D), or (B, ROOM, HKV, D); strides page, slot, head
    ``k``, ``v``                    (B, SEQ, HKV, D), new tokens; strides batch, seq, head
    ``state``, ``out_state``        (3, B) int32, may be the same memory; stride row. Lengths, lost tokens, tickets
    ``page_table``                  (B, ENTRIES) int32, where PAGE_SIZE > 0; strides batch, entry
    ``counts``                      (B,) int32, how many of the SEQ tokens are real, where COUNTED; stride step
    ``cos``, ``sin``                (ANGLES, half) of positions, or (B, SEQ, half) where GATHERED, where TURNING
    ``k_scale``, ``v_scale``        (PAGES, HKV, PAGE_SIZE or more) bytes, where FP8; strides page, head. Numbers of
                                    the cache are to be multiplied by 2^(byte - 127), one of each token and head
    ``seq``, ``seq_blocks``         tokens of a sequence, and tiles of TOKENS of them
    ``heads_q``, ``heads_kv``       heads; of q there may be none
    ``half``, ``head_dim``          pairs of channels that rotate, and channels
    ``half_blocks``, ``parts``      blocks of channels that rotate, and all blocks of channels
    ``room``                        tokens that a sequence's cache holds
    ``pages``, ``angles``           pages of the cache, rows of the tables of cosines and sines
    TOKENS, HEADS, BLOCK            a tile: tokens, heads, pairs of channels
    SPREAD                          cosines and sines are loaded for each head (see ``rope``)
    WHOLE                           a program takes all heads, one block of HEADS after the other
    THREADS                         of a program
    PAGE_SIZE                       slots of a page; 0: no pages
    COUNTED, TURNING, GATHERED      which of the operands above there are
    FP8                             caches are e4m3, in bytes
    RUNS                            where FP8: 1, or 2 where some channels rotate and others do not
    INTERLEAVED                     a pair is two neighbouring channels, else channels i and i + half
    DEPENDENT                       the launch is a programmatic dependent one
    ==============================  ===================================================================================
Where FP8 a program holds all channels of its heads, since their largest number decides the scale: BLOCK pairs cover a
head, ``parts`` is 1, and channels that do not rotate are a second tile beside those that do.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

Pointers = namedtuple(
    "Pointers",
    "out_q_ptr k_cache_ptr v_cache_ptr out_state_ptr k_scale_ptr v_scale_ptr "
    "q_ptr k_ptr v_ptr state_ptr page_table_ptr counts_ptr cos_ptr sin_ptr",
)
Sizes = namedtuple("Sizes", "seq seq_blocks heads_q heads_kv half head_dim half_blocks parts room pages angles")
TokenSteps = namedtuple("TokenSteps", "batch seq head")
SlotSteps = namedtuple("SlotSteps", "page slot head")
ScaleSteps = namedtuple("ScaleSteps", "page head")
StateSteps = namedtuple("StateSteps", "row")
EntrySteps = namedtuple("EntrySteps", "batch entry")
CountSteps = namedtuple("CountSteps", "step")
AngleSteps = namedtuple("AngleSteps", "batch row")
How = namedtuple(
    "How", "TOKENS HEADS BLOCK SPREAD WHOLE THREADS PAGE_SIZE COUNTED TURNING GATHERED INTERLEAVED FP8 RUNS"
)
Rows = namedtuple("Rows", "ptr by")  # of one operand
Inputs = namedtuple("Inputs", "q k v")
Results = namedtuple("Results", "q k v k_scale v_scale")
Blocks = namedtuple("Blocks", "q kv heads_q heads_kv half head_dim half_blocks stays")  # stays: out_q is q
Tokens = namedtuple("Tokens", "batch s there")  # of a tile, and which of them exist
Slots = namedtuple("Slots", "page slot kept")  # of the tile's tokens, and which of them have one
Runs = namedtuple("Runs", "first second first_end second_end")  # of channels


class Strides(NamedTuple):
    """Strides of the operands, in elements."""

    out_q: TokenSteps
    k_cache: SlotSteps
    v_cache: SlotSteps
    out_state: StateSteps
    k_scale: ScaleSteps
    v_scale: ScaleSteps
    q: TokenSteps
    k: TokenSteps
    v: TokenSteps
    state: StateSteps
    page_table: EntrySteps
    counts: CountSteps
    cos: AngleSteps
    sin: AngleSteps


_ENTRIES = tl.constexpr(64)  # entries of a page table examined together


@triton.jit
def _of(block, n, q, k, v):
    """The pointer and three strides of the operand, q, k or v, that ``block`` belongs to."""
    pointer = v.ptr
    outer, inner, head = v.by
    if block < n.q:
        pointer = q.ptr
        outer, inner, head = q.by
    elif block < n.q + n.kv:
        pointer = k.ptr
        outer, inner, head = k.by
    return pointer, outer, inner, head


@triton.jit
def _heads(block, n, HEADS: tl.constexpr):
    """The heads of a block, in its operand, and whether they exist. A surplus block has none."""
    first = block - n.q - n.kv
    heads = n.heads_kv
    if block < n.q:
        first = block
        heads = n.heads_q
    elif block < n.q + n.kv:
        first = block - n.q
    h = first * HEADS + tl.arange(0, HEADS)
    return h.to(tl.int64), h < heads


@triton.jit
def _channels(block, part, n, how):
    """The beginnings and ends of a tile's two runs of BLOCK channels; interleaved, of one run of twice the length.

    In v, and behind the turning channels of q and k, the second run follows the first.
    """
    # Channels that do not rotate: two runs of BLOCK, one behind the other.
    first = part * (2 * how.BLOCK)
    second = first + how.BLOCK
    first_end = n.head_dim
    second_end = n.head_dim
    if how.TURNING:
        rotary = block < n.q + n.kv
        if rotary:
            if part < n.half_blocks:
                # Pairs: neighbours, or channels ``half`` apart.
                if how.INTERLEAVED:
                    first_end = 2 * n.half
                else:
                    first = part * how.BLOCK
                    second = n.half + first
                    first_end = n.half
                    second_end = 2 * n.half
            else:
                # Behind the rotating channels; where q stays in its memory nothing is to be copied.
                first = 2 * n.half + (part - n.half_blocks) * (2 * how.BLOCK)
                second = first + how.BLOCK
                if n.stays & (block < n.q):
                    first_end = 0
                    second_end = 0
    return Runs(first, second, first_end, second_end)


@triton.jit
def _run(rows, there, start, end, N: tl.constexpr):
    """Pointers to N channels of each row from ``start`` on, and which of them exist. ``rows``: (TOKENS, HEADS)."""
    d = start + tl.arange(0, N)
    return rows[:, :, None] + d[None, None, :], there[:, :, None] & (d < end)[None, None, :]


@triton.jit
def _load(rows, there, channels, how):
    """Loads a tile's two runs of channels; interleaved, the one run twice."""
    if how.INTERLEAVED:
        at, exist = _run(rows, there, channels.first, channels.first_end, 2 * how.BLOCK)
        x = tl.load(at, mask=exist)
        return x, x
    else:
        at, exist = _run(rows, there, channels.first, channels.first_end, how.BLOCK)
        x1 = tl.load(at, mask=exist)
        at, exist = _run(rows, there, channels.second, channels.second_end, how.BLOCK)
        x2 = tl.load(at, mask=exist)
        return x1, x2


@triton.jit
def _store(rows, there, channels, x1, x2, how):
    """Stores what :func:`_load` loads."""
    if how.INTERLEAVED:
        at, exist = _run(rows, there, channels.first, channels.first_end, 2 * how.BLOCK)
        tl.store(at, x1, mask=exist)
    else:
        at, exist = _run(rows, there, channels.first, channels.first_end, how.BLOCK)
        tl.store(at, x1, mask=exist)
        at, exist = _run(rows, there, channels.second, channels.second_end, how.BLOCK)
        tl.store(at, x2, mask=exist)


@triton.jit
def _largest(x, start, end):
    """The largest size of finite numbers in each token and head of ``x``, (TOKENS, HEADS, N), whose channels are those
    from ``start`` on, below ``end``.
    """
    there = start + tl.arange(0, x.shape[2]) < end
    size = tl.abs(x.to(tl.float32))
    return tl.max(tl.where(there[None, None, :] & (size < float("inf")), size, 0.0), axis=2)


@triton.jit
def _largest_of(channels, x1, x2, INTERLEAVED: tl.constexpr):
    """:func:`_largest` of a tile's two runs of channels, or of its one."""
    if INTERLEAVED:
        return _largest(x1, channels.first, channels.first_end)
    else:
        return tl.maximum(
            _largest(x1, channels.first, channels.first_end), _largest(x2, channels.second, channels.second_end)
        )


@triton.jit
def _exponent(largest, HALF: tl.constexpr):
    """The biased exponent of the least power of two that is at least ``largest / 448``, and no less than 2^-64.

    HALF, of fp16 numbers, no less than 2^-15: e4m3's step is then fp16's own, and the power itself an fp16 number.
    """
    bits = largest.to(tl.int32, bitcast=True)
    # 448 is 1.75 * 2^8: a mantissa beyond .75 carries into the exponent.
    return tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 112 if HALF else 63)


@triton.jit
def _e4m3(x, exponent):
    """The bits of ``x / 2^(exponent - 127)``, at most 448, in e4m3, rounded to nearest even; NaN where not finite.

    Numbers that would be rounded to one that their type lacks (65536 of fp16, 2^128 of others) become the next below.
    """
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    y = x.to(tl.float32) * inverse
    size = tl.abs(y)
    finite = size < float("inf")
    largest: tl.constexpr = 61440.0 if x.dtype == tl.float16 else 240.0 * 2.0**120
    size = tl.minimum(size, largest * inverse)
    bits = size.to(tl.int32, bitcast=True)
    # Three digits of the mantissa are kept, and the exponent's bias is 7, not 127; below 2^-6 numbers are multiples of
    # 2^-9, which a sum with 2^14 rounds to.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(finite, code | sign, 0x7F).to(tl.uint8)


@triton.jit
def _store_fp8(block, n, outs, heads, slots, tiles, how):
    """Stores whole heads of k or v in e4m3, and their scales. ``heads``: which, and which of them are kept of which
    tokens. ``tiles``: runs of channels and their numbers, one tile, and a second where RUNS is 2.
    """
    h, there = heads
    page = slots.page.to(tl.int64)
    slot = slots.slot.to(tl.int64)
    channels, x1, x2, others, y1, y2 = tiles
    pointer = outs.v.ptr
    outer, inner, head = outs.v.by
    scales = outs.v_scale.ptr
    scale_page, scale_head = outs.v_scale.by
    if block < n.q + n.kv:
        pointer = outs.k.ptr
        outer, inner, head = outs.k.by
        scales = outs.k_scale.ptr
        scale_page, scale_head = outs.k_scale.by
    largest = _largest_of(channels, x1, x2, how.INTERLEAVED)
    if how.RUNS == 2:
        largest = tl.maximum(largest, _largest_of(others, y1, y2, how.INTERLEAVED))
    exponent = _exponent(largest, x1.dtype == tl.float16)
    tl.store(scales + (page * scale_page + slot)[:, None] + h[None, :] * scale_head, exponent.to(tl.uint8), mask=there)
    rows = pointer + (page * outer + slot * inner)[:, None] + h[None, :] * head
    exponent = exponent[:, :, None]
    _store(rows, there, channels, _e4m3(x1, exponent), _e4m3(x2, exponent), how)
    if how.RUNS == 2:
        _store(rows, there, others, _e4m3(y1, exponent), _e4m3(y2, exponent), how)


@triton.jit
def _rotate(x1, x2, cos, sin, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """``(x1 cos - x2 sin, x2 cos + x1 sin)`` of BLOCK pairs of channels, in fp32, rounded once."""
    if INTERLEAVED:
        even, odd = tl.split(tl.reshape(x1, (x1.shape[0], x1.shape[1], BLOCK, 2)))
        even = even.to(tl.float32)
        odd = odd.to(tl.float32)
        y = tl.join(even * cos - odd * sin, odd * cos + even * sin).to(x1.dtype)
        y = tl.reshape(y, (x1.shape[0], x1.shape[1], 2 * BLOCK))
        return y, y
    else:
        a = x1.to(tl.float32)
        b = x2.to(tl.float32)
        return (a * cos - b * sin).to(x1.dtype), (b * cos + a * sin).to(x1.dtype)


@triton.jit
def _fetch(block, part, n, ins, tokens, how):
    """Loads a tile's tokens of a block of heads, as they are."""
    # A surplus block, which WHOLE fetches behind its last, has no heads and loads nothing.
    pointer, outer, inner, head = _of(block, n, ins.q, ins.k, ins.v)
    h, real = _heads(block, n, how.HEADS)
    rows = pointer + tokens.batch * outer + tokens.s[:, None] * inner + h[None, :] * head
    channels = _channels(block, part, n, how)
    return _load(rows, tokens.there[:, None] & real[None, :], channels, how)


@triton.jit
def _put(block, part, n, outs, tokens, slots, values, how):
    """Rotates and stores a fetched tile: q to its tokens' rows, k and v to the slots of the tokens that are kept."""
    x1, x2, cos, sin = values
    kept = slots.kept
    if how.TURNING:
        turns = (block < n.q + n.kv) & (part < n.half_blocks)
        if turns:
            x1, x2 = _rotate(x1, x2, cos, sin, how.BLOCK, how.INTERLEAVED)
    # k and v go to the tokens' pages and slots, q to their batch entry and row.
    outermost = slots.page.to(tl.int64)
    innermost = slots.slot.to(tl.int64)
    pointer, outer, inner, head = _of(block, n, outs.q, outs.k, outs.v)
    h, real = _heads(block, n, how.HEADS)
    if block < n.q:
        outermost = tl.zeros_like(tokens.s) + tokens.batch
        innermost = tokens.s
        kept = tokens.there
    rows = pointer + (outermost * outer + innermost * inner)[:, None] + h[None, :] * head
    channels = _channels(block, part, n, how)
    _store(rows, kept[:, None] & real[None, :], channels, x1, x2, how)


@triton.jit
def _put_fp8(block, n, outs, tokens, slots, values, rest, how):
    """:func:`_put` of whole heads, k and v in e4m3 with their scales. ``rest``: the tile of channels that stay."""
    x1, x2, cos, sin = values
    y1, y2 = rest
    if how.TURNING:
        turns = block < n.q + n.kv
        if turns:
            x1, x2 = _rotate(x1, x2, cos, sin, how.BLOCK, how.INTERLEAVED)
    h, real = _heads(block, n, how.HEADS)
    channels = _channels(block, 0, n, how)
    others = _channels(block, 1, n, how)
    if block < n.q:
        outer, inner, head = outs.q.by
        rows = outs.q.ptr + (tokens.batch * outer + tokens.s * inner)[:, None] + h[None, :] * head
        _store(rows, tokens.there[:, None] & real[None, :], channels, x1, x2, how)
        if how.RUNS == 2:
            _store(rows, tokens.there[:, None] & real[None, :], others, y1, y2, how)
    else:
        heads = (h, slots.kept[:, None] & real[None, :])
        _store_fp8(block, n, outs, heads, slots, (channels, x1, x2, others, y1, y2), how)


@triton.jit
def _legal(page, pages):
    """Whether a page table's entry names a page of the cache."""
    return (page >= 0) & (page < pages)


@triton.jit
def _end(table_row, table_entry, start, end, pages, PAGE_SIZE: tl.constexpr):
    """The first position from ``start`` on without a page; ``end`` if there is none before."""
    # A sequence's entries, _ENTRIES at a time: the first hole is where the sequence ends.
    found = end
    for begin in range(start // PAGE_SIZE, tl.cdiv(end, PAGE_SIZE), _ENTRIES):
        entry = begin + tl.arange(0, _ENTRIES).to(tl.int64)
        needed = entry < tl.cdiv(end, PAGE_SIZE)
        page = tl.load(table_row + entry * table_entry, mask=needed, other=0)
        hole = tl.min(tl.where(needed & ~_legal(page, pages), entry * PAGE_SIZE, end), axis=0)
        found = tl.minimum(found, tl.maximum(hole, start))
    return found


@triton.jit
def kv_append(at: Pointers, of: Sizes, by: Strides, how: How, DEPENDENT: tl.constexpr = False):
    """Appends tokens of k and v behind each sequence's end, k and q rotated by their positions, and moves the end.

    Arguments and grid: the module's header. ``state``: (3, B) int32, the sequences' lengths, the tokens that found no
    room, and tickets, which are zero between launches.

    Schedule: a program loads a tile's rows and the sequence's length, and, once the length is there, what follows from
    it: pages, cosines and sines, a ticket. It rotates or copies the rows and stores them where length and page table
    say. A program of all heads (WHOLE) does so for one block of heads after the other, prefetching the next.
    All programs of a sequence read its length, and the last to have read it, by its ticket, writes the new one. One
    thread reads the length and broadcasts it; no program reads it twice, so the ticket is taken early and without a
    fence, which would wait for the stores and empty the L1 cache. A sequence's only program takes no ticket. SPREAD:
    see ``rope``.
    A token without a page, or behind the last one there is room for, is written nowhere. A position outside of
    the table of angles makes its token NaN; nothing is read out of bounds.
    """
    pdl_wait(DEPENDENT)
    # ---- this program's block of channels (part), tile of tokens (pid) and first block of heads

    q_blocks = tl.cdiv(of.heads_q, how.HEADS)
    kv_blocks = tl.cdiv(of.heads_kv, how.HEADS)
    if how.WHOLE:
        part = tl.program_id(0) % of.parts
        pid = tl.program_id(0) // of.parts
        block = 0
        shares = of.seq_blocks * of.parts
    else:
        part = tl.program_id(2)
        pid = tl.program_id(0)
        block = tl.program_id(1)
        shares = of.seq_blocks * tl.num_programs(1) * tl.num_programs(2)
    # ---- loads that need nothing but the grid: the sequence's length, the tile's rows

    batch = (pid // of.seq_blocks).to(tl.int64)
    lane = tl.arange(0, how.THREADS)
    # Words 0 and 1 of the sequence's state, each by a thread; nothing else reads the length.
    words = tl.load(at.state_ptr + lane * by.state.row + batch, mask=lane < 2, other=0)
    count = tl.full((), 0, tl.int64) + of.seq
    if how.COUNTED:
        count = tl.minimum(tl.maximum(tl.load(at.counts_ptr + batch * by.counts.step).to(tl.int64), 0), count)

    ins = Inputs(Rows(at.q_ptr, by.q), Rows(at.k_ptr, by.k), Rows(at.v_ptr, by.v))
    outs = Results(
        Rows(at.out_q_ptr, by.out_q),
        Rows(at.k_cache_ptr, by.k_cache),
        Rows(at.v_cache_ptr, by.v_cache),
        Rows(at.k_scale_ptr, by.k_scale),
        Rows(at.v_scale_ptr, by.v_scale),
    )
    stays = at.out_q_ptr.to(tl.int64) == at.q_ptr.to(tl.int64)
    n = Blocks(q_blocks, kv_blocks, of.heads_q, of.heads_kv, of.half, of.head_dim, of.half_blocks, stays)
    s = pid % of.seq_blocks * how.TOKENS + tl.arange(0, how.TOKENS).to(tl.int64)
    there = s < of.seq
    tokens = Tokens(batch, s, there)
    x1, x2 = _fetch(block, part, n, ins, tokens, how)
    y1, y2 = x1, x2
    if how.RUNS == 2:
        y1, y2 = _fetch(block, 1, n, ins, tokens, how)

    # ---- what follows from the length: positions, pages and slots, cosines and sines, a ticket

    start = tl.minimum(tl.max(tl.where(lane == 0, words, 0), axis=0).to(tl.int64), of.room)
    position = start + s
    kept = (s < count) & (position < of.room)
    # Where the tokens go; one whose entry names no page goes nowhere.
    if how.PAGE_SIZE == 0:
        page = tl.zeros_like(s) + batch
        slot = position
    else:
        entry = at.page_table_ptr + batch * by.page_table.batch + position // how.PAGE_SIZE * by.page_table.entry
        page = tl.load(entry, mask=kept, other=0)
        slot = (position % how.PAGE_SIZE).to(tl.int32)
        kept = kept & _legal(page, of.pages)
    cos = 0.0
    sin = 0.0
    if how.TURNING:
        # A row of the table for each token; NaN where there is none.
        place = position
        if how.GATHERED:
            place = s
        d = part * how.BLOCK + tl.arange(0, how.BLOCK)
        turning = (part < of.half_blocks) & (block < q_blocks + kv_blocks)
        legal = (there & (place < of.angles) & turning)[:, None, None] & (d < of.half)[None, None, :]
        nan = float("nan")
        cos_at = at.cos_ptr + batch * by.cos.batch + place[:, None, None] * by.cos.row + d[None, None, :]
        sin_at = at.sin_ptr + batch * by.sin.batch + place[:, None, None] * by.sin.row + d[None, None, :]
        if how.SPREAD:
            legal = tl.broadcast_to(legal, (how.TOKENS, how.HEADS, how.BLOCK))
            cos_at = tl.broadcast_to(cos_at, (how.TOKENS, how.HEADS, how.BLOCK))
            sin_at = tl.broadcast_to(sin_at, (how.TOKENS, how.HEADS, how.BLOCK))
        cos = tl.load(cos_at, mask=legal, other=nan).to(tl.float32)
        sin = tl.load(sin_at, mask=legal, other=nan).to(tl.float32)
    slots = Slots(page, slot, kept)
    # The program with the sequence's last ticket writes the new length: all others have read the old one. Early and
    # relaxed: see above.
    last = shares == 1
    if shares > 1:
        last = tl.atomic_add(at.state_ptr + 2 * by.state.row + batch, 1, sem="relaxed") == shares - 1
    # ---- rotate and store, block of heads by block of heads

    if how.WHOLE:
        # The next block is loaded before this one is stored.
        for i in range(q_blocks + 2 * kv_blocks):
            next1, next2 = _fetch(i + 1, part, n, ins, tokens, how)
            values = (x1, x2, cos, sin)
            if how.FP8:
                z1, z2 = next1, next2
                if how.RUNS == 2:
                    z1, z2 = _fetch(i + 1, 1, n, ins, tokens, how)
                rest = (y1, y2)
                _put_fp8(i, n, outs, tokens, slots, values, rest, how)
                y1 = z1
                y2 = z2
            else:
                _put(i, part, n, outs, tokens, slots, values, how)
            x1 = next1
            x2 = next2
    else:
        values = (x1, x2, cos, sin)
        if how.FP8:
            rest = (y1, y2)
            _put_fp8(block, n, outs, tokens, slots, values, rest, how)
        else:
            _put(block, part, n, outs, tokens, slots, values, how)

    # ---- the sequence's new length, by the last of its programs

    if last:
        end = tl.minimum(start + count, of.room)
        if how.PAGE_SIZE > 0:
            # The sequence ends at the first token without a page.
            if of.seq_blocks == 1:  # every token is in this tile
                end = tl.min(tl.where((s < count) & ~kept, tl.minimum(position, end), end), axis=0)
            else:
                row = at.page_table_ptr + batch * by.page_table.batch
                end = _end(row, by.page_table.entry, start, end, of.pages, how.PAGE_SIZE)
        # Tokens beyond the end are lost; the ticket is zero again for the next launch.
        lost = tl.sum(tl.where(lane == 1, words, 0), axis=0)
        tl.store(at.out_state_ptr + batch, end.to(tl.int32))
        tl.store(at.out_state_ptr + by.out_state.row + batch, lost + (start + count - end).to(tl.int32))
        tl.store(at.state_ptr + 2 * by.state.row + batch, 0)
        tl.store(at.out_state_ptr + 2 * by.out_state.row + batch, 0)
