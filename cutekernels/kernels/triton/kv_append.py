"""New tokens into a cache of keys and values: where each sequence ends, and its end with them.

Grid:
    The first axis walks tokens (a tile never crosses a sequence), the second blocks of heads, those of q, of k, of v,
    the third blocks of channels, those that rotate before those that do not. Where a program takes all heads (WHOLE)
    the first axis walks blocks of channels of one tile of tokens after the other, as in ``rope``: neighbours in time
    are neighbours in memory. A cache is walked by page, slot and head; without pages a sequence is one page.

Arguments of :func:`kv_append` (strides in elements, channels always dense):
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

Inside, an operand is a tuple (pointer, outer, inner and head stride); ``sizes`` are (blocks of q, blocks of k or v,
heads_q, heads_kv); ``widths`` are (half, head_dim, half_blocks, whether out_q is q); ``ins`` are q, k and v; ``outs``
are out_q, both caches and their scales, (pointer, page and head stride) of each; ``tile`` is (batch, tokens, which
exist, page, slot, which are kept); ``values`` are both halves of the pairs, cosines and sines.
"""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

_ENTRIES = tl.constexpr(64)  # entries of a page table examined together


@triton.jit
def _of(block, sizes, q, k, v):
    """The (pointer, three strides) of the operand, q, k or v, that ``block`` belongs to."""
    q_blocks, kv_blocks, _, _ = sizes
    pointer, outer, inner, head = v
    if block < q_blocks:
        pointer, outer, inner, head = q
    elif block < q_blocks + kv_blocks:
        pointer, outer, inner, head = k
    return pointer, outer, inner, head


@triton.jit
def _heads(block, sizes, HEADS: tl.constexpr):
    """The heads of a block, in its operand, and whether they exist. A surplus block has none."""
    q_blocks, kv_blocks, heads_q, heads_kv = sizes
    first = block - q_blocks - kv_blocks
    heads = heads_kv
    if block < q_blocks:
        first = block
        heads = heads_q
    elif block < q_blocks + kv_blocks:
        first = block - q_blocks
    h = first * HEADS + tl.arange(0, HEADS)
    return h.to(tl.int64), h < heads


@triton.jit
def _channels(block, part, sizes, widths, BLOCK: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The beginnings and ends of a tile's two runs of BLOCK channels; interleaved, of one run of twice the length.

    In v, and behind the turning channels of q and k, the second run follows the first.
    """
    q_blocks, kv_blocks, _, _ = sizes
    half, head_dim, half_blocks, stays = widths
    # Channels that do not rotate: two runs of BLOCK, one behind the other.
    first = part * (2 * BLOCK)
    second = first + BLOCK
    first_end = head_dim
    second_end = head_dim
    if TURNING:
        rotary = block < q_blocks + kv_blocks
        if rotary:
            if part < half_blocks:
                # Pairs: neighbours, or channels ``half`` apart.
                if INTERLEAVED:
                    first_end = 2 * half
                else:
                    first = part * BLOCK
                    second = half + first
                    first_end = half
                    second_end = 2 * half
            else:
                # Behind the rotating channels; where q stays in its memory nothing is to be copied.
                first = 2 * half + (part - half_blocks) * (2 * BLOCK)
                second = first + BLOCK
                if stays & (block < q_blocks):
                    first_end = 0
                    second_end = 0
    return first, second, first_end, second_end


@triton.jit
def _load(rows, there, channels, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Loads a tile's two runs of channels; interleaved, the one run twice. ``rows``: pointers, (TOKENS, HEADS)."""
    first, second, first_end, second_end = channels
    if INTERLEAVED:
        d = first + tl.arange(0, 2 * BLOCK)
        x = tl.load(rows[:, :, None] + d[None, None, :], mask=there[:, :, None] & (d < first_end)[None, None, :])
        return x, x
    else:
        d = first + tl.arange(0, BLOCK)
        x1 = tl.load(rows[:, :, None] + d[None, None, :], mask=there[:, :, None] & (d < first_end)[None, None, :])
        d = second + tl.arange(0, BLOCK)
        x2 = tl.load(rows[:, :, None] + d[None, None, :], mask=there[:, :, None] & (d < second_end)[None, None, :])
        return x1, x2


@triton.jit
def _store(rows, there, channels, x1, x2, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Stores what :func:`_load` loads."""
    first, second, first_end, second_end = channels
    if INTERLEAVED:
        d = first + tl.arange(0, 2 * BLOCK)
        tl.store(rows[:, :, None] + d[None, None, :], x1, mask=there[:, :, None] & (d < first_end)[None, None, :])
    else:
        d = first + tl.arange(0, BLOCK)
        tl.store(rows[:, :, None] + d[None, None, :], x1, mask=there[:, :, None] & (d < first_end)[None, None, :])
        d = second + tl.arange(0, BLOCK)
        tl.store(rows[:, :, None] + d[None, None, :], x2, mask=there[:, :, None] & (d < second_end)[None, None, :])


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
    first, second, first_end, second_end = channels
    if INTERLEAVED:
        return _largest(x1, first, first_end)
    else:
        return tl.maximum(_largest(x1, first, first_end), _largest(x2, second, second_end))


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
def _store_fp8(
    block,
    sizes,
    outs,
    where,
    channels,
    x1,
    x2,
    others,
    y1,
    y2,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Stores whole heads of k or v in e4m3, and their scales. ``where``: heads, pages, slots, which are kept."""
    q_blocks, kv_blocks, _, _ = sizes
    _, out_k, out_v, scale_k, scale_v = outs
    h, page, slot, there = where
    pointer, outer, inner, head = out_v
    scales, scale_page, scale_head = scale_v
    if block < q_blocks + kv_blocks:
        pointer, outer, inner, head = out_k
        scales, scale_page, scale_head = scale_k
    largest = _largest_of(channels, x1, x2, INTERLEAVED)
    if RUNS == 2:
        largest = tl.maximum(largest, _largest_of(others, y1, y2, INTERLEAVED))
    exponent = _exponent(largest, x1.dtype == tl.float16)
    tl.store(scales + (page * scale_page + slot)[:, None] + h[None, :] * scale_head, exponent.to(tl.uint8), mask=there)
    rows = pointer + (page * outer + slot * inner)[:, None] + h[None, :] * head
    exponent = exponent[:, :, None]
    _store(rows, there, channels, _e4m3(x1, exponent), _e4m3(x2, exponent), BLOCK, INTERLEAVED)
    if RUNS == 2:
        _store(rows, there, others, _e4m3(y1, exponent), _e4m3(y2, exponent), BLOCK, INTERLEAVED)


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
def _fetch(
    block,
    part,
    sizes,
    widths,
    ins,
    batch,
    s,
    there,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNING: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Loads tokens ``s`` of a block of heads, as they are."""
    # A surplus block, which WHOLE fetches behind its last, has no heads and loads nothing.
    q, k, v = ins
    pointer, outer, inner, head = _of(block, sizes, q, k, v)
    h, real = _heads(block, sizes, HEADS)
    rows = pointer + batch * outer + s[:, None] * inner + h[None, :] * head
    channels = _channels(block, part, sizes, widths, BLOCK, TURNING, INTERLEAVED)
    return _load(rows, there[:, None] & real[None, :], channels, BLOCK, INTERLEAVED)


@triton.jit
def _put(
    block,
    part,
    sizes,
    widths,
    outs,
    tile,
    values,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNING: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotates and stores a fetched tile: q to its tokens' rows, k and v to the slots of the tokens that are kept."""
    q, k, v, _, _ = outs
    x1, x2, cos, sin = values
    batch, s, there, page, slot, kept = tile
    q_blocks, kv_blocks, _, _ = sizes
    half_blocks = widths[2]
    if TURNING:
        turns = (block < q_blocks + kv_blocks) & (part < half_blocks)
        if turns:
            x1, x2 = _rotate(x1, x2, cos, sin, BLOCK, INTERLEAVED)
    # k and v go to the tokens' pages and slots, q to their batch entry and row.
    outermost = page.to(tl.int64)
    innermost = slot.to(tl.int64)
    pointer, outer, inner, head = _of(block, sizes, q, k, v)
    h, real = _heads(block, sizes, HEADS)
    if block < q_blocks:
        outermost = tl.zeros_like(s) + batch
        innermost = s
        kept = there
    rows = pointer + (outermost * outer + innermost * inner)[:, None] + h[None, :] * head
    channels = _channels(block, part, sizes, widths, BLOCK, TURNING, INTERLEAVED)
    _store(rows, kept[:, None] & real[None, :], channels, x1, x2, BLOCK, INTERLEAVED)


@triton.jit
def _put_fp8(
    block,
    sizes,
    widths,
    outs,
    tile,
    values,
    rest,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNING: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    RUNS: tl.constexpr,
):
    """:func:`_put` of whole heads, k and v in e4m3 with their scales. ``rest``: the tile of channels that stay."""
    x1, x2, cos, sin = values
    y1, y2 = rest
    batch, s, there, page, slot, kept = tile
    q_blocks, kv_blocks, _, _ = sizes
    if TURNING:
        turns = block < q_blocks + kv_blocks
        if turns:
            x1, x2 = _rotate(x1, x2, cos, sin, BLOCK, INTERLEAVED)
    h, real = _heads(block, sizes, HEADS)
    channels = _channels(block, 0, sizes, widths, BLOCK, TURNING, INTERLEAVED)
    others = _channels(block, 1, sizes, widths, BLOCK, TURNING, INTERLEAVED)
    if block < q_blocks:
        pointer, outer, inner, head = outs[0]
        rows = pointer + (batch * outer + s * inner)[:, None] + h[None, :] * head
        _store(rows, there[:, None] & real[None, :], channels, x1, x2, BLOCK, INTERLEAVED)
        if RUNS == 2:
            _store(rows, there[:, None] & real[None, :], others, y1, y2, BLOCK, INTERLEAVED)
    else:
        where = (h, page.to(tl.int64), slot.to(tl.int64), kept[:, None] & real[None, :])
        _store_fp8(block, sizes, outs, where, channels, x1, x2, others, y1, y2, BLOCK, INTERLEAVED, RUNS)


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
def kv_append(
    out_q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_state_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    state_ptr,
    page_table_ptr,
    counts_ptr,
    cos_ptr,
    sin_ptr,
    seq,
    seq_blocks,
    heads_q,
    heads_kv,
    half,
    head_dim,
    half_blocks,
    parts,
    room,
    pages,
    angles,
    out_q_batch,
    out_q_seq,
    out_q_head,
    k_cache_page,
    k_cache_slot,
    k_cache_head,
    v_cache_page,
    v_cache_slot,
    v_cache_head,
    out_state_row,
    k_scale_page,
    k_scale_head,
    v_scale_page,
    v_scale_head,
    q_batch,
    q_seq,
    q_head,
    k_batch,
    k_seq,
    k_head,
    v_batch,
    v_seq,
    v_head,
    state_row,
    page_table_batch,
    page_table_entry,
    counts_step,
    cos_batch,
    cos_row,
    sin_batch,
    sin_row,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPREAD: tl.constexpr,
    WHOLE: tl.constexpr,
    THREADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COUNTED: tl.constexpr,
    TURNING: tl.constexpr,
    GATHERED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    RUNS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
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

    q_blocks = tl.cdiv(heads_q, HEADS)
    kv_blocks = tl.cdiv(heads_kv, HEADS)
    if WHOLE:
        part = tl.program_id(0) % parts
        pid = tl.program_id(0) // parts
        block = 0
        shares = seq_blocks * parts
    else:
        part = tl.program_id(2)
        pid = tl.program_id(0)
        block = tl.program_id(1)
        shares = seq_blocks * tl.num_programs(1) * tl.num_programs(2)
    # ---- loads that need nothing but the grid: the sequence's length, the tile's rows

    batch = (pid // seq_blocks).to(tl.int64)
    lane = tl.arange(0, THREADS)
    # Words 0 and 1 of the sequence's state, each by a thread; nothing else reads the length.
    words = tl.load(state_ptr + lane * state_row + batch, mask=lane < 2, other=0)
    count = tl.full((), 0, tl.int64) + seq
    if COUNTED:
        count = tl.minimum(tl.maximum(tl.load(counts_ptr + batch * counts_step).to(tl.int64), 0), count)

    x_q = (q_ptr, q_batch, q_seq, q_head)
    x_k = (k_ptr, k_batch, k_seq, k_head)
    x_v = (v_ptr, v_batch, v_seq, v_head)
    ins = (x_q, x_k, x_v)
    out_q = (out_q_ptr, out_q_batch, out_q_seq, out_q_head)
    out_k = (k_cache_ptr, k_cache_page, k_cache_slot, k_cache_head)
    out_v = (v_cache_ptr, v_cache_page, v_cache_slot, v_cache_head)
    scale_k = (k_scale_ptr, k_scale_page, k_scale_head)
    scale_v = (v_scale_ptr, v_scale_page, v_scale_head)
    outs = (out_q, out_k, out_v, scale_k, scale_v)
    sizes = (q_blocks, kv_blocks, heads_q, heads_kv)
    widths = (half, head_dim, half_blocks, out_q_ptr.to(tl.int64) == q_ptr.to(tl.int64))
    s = pid % seq_blocks * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    there = s < seq
    x1, x2 = _fetch(block, part, sizes, widths, ins, batch, s, there, HEADS, BLOCK, TURNING, INTERLEAVED)
    y1, y2 = x1, x2
    if RUNS == 2:
        y1, y2 = _fetch(block, 1, sizes, widths, ins, batch, s, there, HEADS, BLOCK, TURNING, INTERLEAVED)

    # ---- what follows from the length: positions, pages and slots, cosines and sines, a ticket

    start = tl.minimum(tl.max(tl.where(lane == 0, words, 0), axis=0).to(tl.int64), room)
    position = start + s
    kept = (s < count) & (position < room)
    # Where the tokens go; one whose entry names no page goes nowhere.
    if PAGE_SIZE == 0:
        page = tl.zeros_like(s) + batch
        slot = position
    else:
        entry = page_table_ptr + batch * page_table_batch + position // PAGE_SIZE * page_table_entry
        page = tl.load(entry, mask=kept, other=0)
        slot = (position % PAGE_SIZE).to(tl.int32)
        kept = kept & _legal(page, pages)
    cos = 0.0
    sin = 0.0
    if TURNING:
        # A row of the table for each token; NaN where there is none.
        place = position
        if GATHERED:
            place = s
        d = part * BLOCK + tl.arange(0, BLOCK)
        turning = (part < half_blocks) & (block < q_blocks + kv_blocks)
        legal = (there & (place < angles) & turning)[:, None, None] & (d < half)[None, None, :]
        nan = float("nan")
        cos_at = cos_ptr + batch * cos_batch + place[:, None, None] * cos_row + d[None, None, :]
        sin_at = sin_ptr + batch * sin_batch + place[:, None, None] * sin_row + d[None, None, :]
        if SPREAD:
            legal = tl.broadcast_to(legal, (TOKENS, HEADS, BLOCK))
            cos_at = tl.broadcast_to(cos_at, (TOKENS, HEADS, BLOCK))
            sin_at = tl.broadcast_to(sin_at, (TOKENS, HEADS, BLOCK))
        cos = tl.load(cos_at, mask=legal, other=nan).to(tl.float32)
        sin = tl.load(sin_at, mask=legal, other=nan).to(tl.float32)
    tile = (batch, s, there, page, slot, kept)
    # The program with the sequence's last ticket writes the new length: all others have read the old one. Early and
    # relaxed: see above.
    last = shares == 1
    if shares > 1:
        last = tl.atomic_add(state_ptr + 2 * state_row + batch, 1, sem="relaxed") == shares - 1
    # ---- rotate and store, block of heads by block of heads

    if WHOLE:
        # The next block is loaded before this one is stored.
        for i in range(q_blocks + 2 * kv_blocks):
            next1, next2 = _fetch(i + 1, part, sizes, widths, ins, batch, s, there, HEADS, BLOCK, TURNING, INTERLEAVED)
            values = (x1, x2, cos, sin)
            if FP8:
                z1, z2 = next1, next2
                if RUNS == 2:
                    z1, z2 = _fetch(i + 1, 1, sizes, widths, ins, batch, s, there, HEADS, BLOCK, TURNING, INTERLEAVED)
                rest = (y1, y2)
                _put_fp8(i, sizes, widths, outs, tile, values, rest, HEADS, BLOCK, TURNING, INTERLEAVED, RUNS)
                y1 = z1
                y2 = z2
            else:
                _put(i, part, sizes, widths, outs, tile, values, HEADS, BLOCK, TURNING, INTERLEAVED)
            x1 = next1
            x2 = next2
    else:
        values = (x1, x2, cos, sin)
        if FP8:
            rest = (y1, y2)
            _put_fp8(block, sizes, widths, outs, tile, values, rest, HEADS, BLOCK, TURNING, INTERLEAVED, RUNS)
        else:
            _put(block, part, sizes, widths, outs, tile, values, HEADS, BLOCK, TURNING, INTERLEAVED)

    # ---- the sequence's new length, by the last of its programs

    if last:
        end = tl.minimum(start + count, room)
        if PAGE_SIZE > 0:
            # The sequence ends at the first token without a page.
            if seq_blocks == 1:  # every token is in this tile
                end = tl.min(tl.where((s < count) & ~kept, tl.minimum(position, end), end), axis=0)
            else:
                row = page_table_ptr + batch * page_table_batch
                end = _end(row, page_table_entry, start, end, pages, PAGE_SIZE)
        # Tokens beyond the end are lost; the ticket is zero again for the next launch.
        lost = tl.sum(tl.where(lane == 1, words, 0), axis=0)
        tl.store(out_state_ptr + batch, end.to(tl.int32))
        tl.store(out_state_ptr + out_state_row + batch, lost + (start + count - end).to(tl.int32))
        tl.store(state_ptr + 2 * state_row + batch, 0)
        tl.store(out_state_ptr + 2 * out_state_row + batch, 0)
