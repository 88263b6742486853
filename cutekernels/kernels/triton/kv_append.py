"""New tokens into a cache of keys and values: where each sequence ends, and its end with them.

The grid's first axis walks tokens (a tile never crosses a sequence), the second blocks of heads, those of q, of k, of
v, the third blocks of channels, those that turn before those that do not. A cache is walked by page, slot and head;
without pages a sequence is one page.
"""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import await_turn

_ENTRIES = tl.constexpr(64)  # of a page table that are looked at together


@triton.jit
def _turn(out_rows, x_rows, cos, sin, read, written, half, column, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """``(x1 cos - x2 sin, x2 cos + x1 sin)`` of BLOCK pairs of channels. Rows, (TOKENS, HEADS): pointers.

    All that are ``read`` are loaded, those ``written`` are stored: loads need not wait for the sequence's length.
    """
    if INTERLEAVED:
        d = 2 * column + tl.arange(0, 2 * BLOCK)
        channels = (d < 2 * half)[None, None, :]
        x = tl.load(x_rows[:, :, None] + d[None, None, :], mask=read[:, :, None] & channels, other=0.0)
        x1, x2 = tl.split(tl.reshape(x, (x_rows.shape[0], x_rows.shape[1], BLOCK, 2)))
        x1 = x1.to(tl.float32)
        x2 = x2.to(tl.float32)
        y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin).to(out_rows.dtype.element_ty)
        y = tl.reshape(y, (x_rows.shape[0], x_rows.shape[1], 2 * BLOCK))
        tl.store(out_rows[:, :, None] + d[None, None, :], y, mask=written[:, :, None] & channels)
    else:
        d = column + tl.arange(0, BLOCK)
        channels = (d < half)[None, None, :]
        x_first = x_rows[:, :, None] + d[None, None, :]
        x1 = tl.load(x_first, mask=read[:, :, None] & channels, other=0.0).to(tl.float32)
        x2 = tl.load(x_first + half, mask=read[:, :, None] & channels, other=0.0).to(tl.float32)
        out_first = out_rows[:, :, None] + d[None, None, :]
        tl.store(out_first, (x1 * cos - x2 * sin).to(out_rows.dtype.element_ty), mask=written[:, :, None] & channels)
        tl.store(
            out_first + half, (x2 * cos + x1 * sin).to(out_rows.dtype.element_ty), mask=written[:, :, None] & channels
        )


@triton.jit
def _copy(out_rows, x_rows, read, written, begin, end, WIDTH: tl.constexpr):
    """Channels from ``begin`` to before ``end``, WIDTH of them at most, as they are."""
    d = begin + tl.arange(0, WIDTH)
    channels = (d < end)[None, None, :]
    x = tl.load(x_rows[:, :, None] + d[None, None, :], mask=read[:, :, None] & channels, other=0.0)
    tl.store(out_rows[:, :, None] + d[None, None, :], x, mask=written[:, :, None] & channels)


@triton.jit
def _legal(page, pages):
    """Whether a page table's entry names a page of the cache."""
    return (page >= 0) & (page < pages)


@triton.jit
def _end(table_row, table_entry, start, end, pages, PAGE_SIZE: tl.constexpr):
    """The first position from ``start`` on that has no page; ``end`` at the latest."""
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
    q_ptr,
    k_ptr,
    v_ptr,
    state_ptr,
    table_ptr,
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
    table_batch,
    table_entry,
    counts_step,
    cos_batch,
    cos_row,
    sin_batch,
    sin_row,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPREAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COUNTED: tl.constexpr,
    TURNING: tl.constexpr,
    GATHERED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Appends tokens of k and v behind each sequence's end, k and q turned by their positions, and moves the end.

    ``state``: (3, B) int32, the sequences' lengths, the tokens that found no room, and tickets, which are zero
    between launches.

    Schedule: programs load a tile's rows, turn or copy them, and store them where the sequence's length and page
    table say. All programs of a sequence read its length, so the last of them to finish, which its ticket tells,
    writes the new one: each has loaded it before the barrier ahead of its ticket. Where there is only one, it takes
    no ticket. SPREAD: see ``rope``.
    A token without a page, or behind the last one there is room for, is written nowhere. A position outside of
    the table of angles makes its token NaN; nothing is read out of bounds.
    """
    await_turn(DEPENDENT)
    pid = tl.program_id(0)
    batch = (pid // seq_blocks).to(tl.int64)
    block = tl.program_id(1)
    part = tl.program_id(2)
    q_blocks = tl.cdiv(heads_q, HEADS)
    kv_blocks = tl.cdiv(heads_kv, HEADS)
    start = tl.minimum(tl.maximum(tl.load(state_ptr + batch).to(tl.int64), 0), room)
    count = tl.full((), 0, tl.int64) + seq
    if COUNTED:
        count = tl.minimum(tl.maximum(tl.load(counts_ptr + batch * counts_step).to(tl.int64), 0), count)

    s = pid % seq_blocks * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    position = start + s
    kept = (s < count) & (position < room)
    if PAGE_SIZE == 0:
        page = tl.zeros_like(s) + batch
        slot = position
    else:
        entry = table_ptr + batch * table_batch + position // PAGE_SIZE * table_entry
        page = tl.load(entry, mask=kept, other=0).to(tl.int64)
        slot = position % PAGE_SIZE
        kept = kept & _legal(page, pages)

    there = s < seq
    if block < q_blocks:
        h = block * HEADS + tl.arange(0, HEADS).to(tl.int64)
        x_rows = q_ptr + batch * q_batch + s[:, None] * q_seq + h[None, :] * q_head
        out_rows = out_q_ptr + batch * out_q_batch + s[:, None] * out_q_seq + h[None, :] * out_q_head
        read = there[:, None] & (h < heads_q)[None, :]
        written = read
    elif block < q_blocks + kv_blocks:
        h = (block - q_blocks) * HEADS + tl.arange(0, HEADS).to(tl.int64)
        x_rows = k_ptr + batch * k_batch + s[:, None] * k_seq + h[None, :] * k_head
        out_rows = k_cache_ptr + (page * k_cache_page + slot * k_cache_slot)[:, None] + h[None, :] * k_cache_head
        read = there[:, None] & (h < heads_kv)[None, :]
        written = read & kept[:, None]
    else:
        h = (block - q_blocks - kv_blocks) * HEADS + tl.arange(0, HEADS).to(tl.int64)
        x_rows = v_ptr + batch * v_batch + s[:, None] * v_seq + h[None, :] * v_head
        out_rows = v_cache_ptr + (page * v_cache_page + slot * v_cache_slot)[:, None] + h[None, :] * v_cache_head
        read = there[:, None] & (h < heads_kv)[None, :]
        written = read & kept[:, None]

    begin = part * (2 * BLOCK)
    if TURNING:
        turns = block < q_blocks + kv_blocks
        if turns & (part < half_blocks):
            place = position
            if GATHERED:
                place = s
            column = part * BLOCK
            d = column + tl.arange(0, BLOCK)
            legal = (there & (place < angles))[:, None, None] & (d < half)[None, None, :]
            nan = float("nan")
            cos_at = cos_ptr + batch * cos_batch + place[:, None, None] * cos_row + d[None, None, :]
            sin_at = sin_ptr + batch * sin_batch + place[:, None, None] * sin_row + d[None, None, :]
            if SPREAD:
                legal = tl.broadcast_to(legal, (TOKENS, HEADS, BLOCK))
                cos_at = tl.broadcast_to(cos_at, (TOKENS, HEADS, BLOCK))
                sin_at = tl.broadcast_to(sin_at, (TOKENS, HEADS, BLOCK))
            cos = tl.load(cos_at, mask=legal, other=nan).to(tl.float32)
            sin = tl.load(sin_at, mask=legal, other=nan).to(tl.float32)
            _turn(out_rows, x_rows, cos, sin, read, written, half, column, BLOCK, INTERLEAVED)
            begin = head_dim
        elif turns:
            begin = 2 * half + (part - half_blocks) * (2 * BLOCK)
            if (block < q_blocks) & (out_q_ptr.to(tl.int64) == q_ptr.to(tl.int64)):
                begin = head_dim
    if begin < head_dim:
        _copy(out_rows, x_rows, read, written, begin, head_dim, 2 * BLOCK)

    tl.debug_barrier()  # no thread may still want the length that the last program overwrites
    shares = seq_blocks * tl.num_programs(1) * tl.num_programs(2)
    last = shares == 1
    if shares > 1:
        last = tl.atomic_add(state_ptr + 2 * state_row + batch, 1) == shares - 1
    if last:
        end = tl.minimum(start + count, room)
        if PAGE_SIZE > 0:
            end = _end(table_ptr + batch * table_batch, table_entry, start, end, pages, PAGE_SIZE)
        lost = tl.load(state_ptr + state_row + batch)
        tl.store(out_state_ptr + batch, end.to(tl.int32))
        tl.store(out_state_ptr + out_state_row + batch, lost + (start + count - end).to(tl.int32))
        tl.store(state_ptr + 2 * state_row + batch, 0)
        tl.store(out_state_ptr + 2 * out_state_row + batch, 0)
