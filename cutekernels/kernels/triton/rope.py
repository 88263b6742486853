"""Rotary position embedding: pairs of a head's channels, rotated by the angle of their token's position.

Grid:
    The first axis walks blocks of channels, those that rotate before those that a partial rotation only copies, of one
    tile of tokens after the other (a tile never crosses a batch entry); the second walks blocks of heads, those of q
    before those of k. A tile is (TOKENS, HEADS, BLOCK) pairs. Neighbours in time are thus neighbours in memory:
    docs/notes/rope.md (H200, 2026-11-22).

Arguments of :func:`rope` (every operand has its own strides, in elements; promises about them are constexprs):
    ==========================  =======================================================================================
    ``out_q``, ``q``            (B, SEQ, HQ, D), may be the same memory; strides batch, seq, head, dim
    ``out_k``, ``k``            (B, SEQ, HKV, D), may be the same memory; strides batch, seq, head, dim
    ``cos``, ``sin``            (TABLE_ROWS, half) or (B, TABLE_ROWS, half); strides batch (0 for one table), row, col
    ``positions``               of the first token (B,), or of each (B, SEQ), by POSITIONS; strides batch, seq
    ``start``                   the first token's position in all sequences, where POSITIONS is "start"
    ``seq``, ``seq_blocks``     tokens of a sequence, and tiles of TOKENS of them
    ``heads_q``, ``heads_kv``   heads
    ``half``, ``head_dim``      pairs of channels that rotate, and channels
    ``half_blocks``, ``parts``  blocks of channels that rotate, and all blocks of channels
    ``table_rows``              positions in the tables
    TOKENS, HEADS, BLOCK        a tile: tokens, heads, pairs of channels
    SPREAD                      cosines and sines are loaded for each head
    POSITIONS                   "start", "batch" or "token"
    INTERLEAVED                 a pair is two neighbouring channels, else channels i and i + half
    INVERSE                     rotate back: the gradient
    DEPENDENT                   the launch is a programmatic dependent one
    ==========================  =======================================================================================
"""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait


@triton.jit
def _position(positions_ptr, start, s, at, inside, POSITIONS: tl.constexpr):
    """The positions of tokens ``s`` of one sequence: from ``start``, from a start per sequence, or one per token."""
    # Positions need no table lookup of their own where they are consecutive.
    if POSITIONS == "start":
        return start + s
    elif POSITIONS == "batch":
        return tl.load(positions_ptr + at).to(tl.int64) + s
    else:
        return tl.load(positions_ptr + at, mask=inside, other=0).to(tl.int64)


@triton.jit
def _rotate(
    out_ptr,
    x_ptr,
    cos,
    sin,
    s,
    h,
    inside,
    half,
    column,
    out_seq,
    out_head,
    out_dim,
    x_seq,
    x_head,
    x_dim,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """One tile: ``(x1 cos - x2 sin, x2 cos + x1 sin)``. Pointers and results are (TOKENS, HEADS, channels).

    ``inside``: tokens and heads that exist; channels beyond the last pair are masked here.
    """
    x_rows = x_ptr + s.to(tl.int64)[:, None, None] * x_seq + h.to(tl.int64)[None, :, None] * x_head
    out_rows = out_ptr + s.to(tl.int64)[:, None, None] * out_seq + h.to(tl.int64)[None, :, None] * out_head
    if INTERLEAVED:
        # Pairs are neighbours: one run of channels, split and joined in registers.
        d = 2 * column + tl.arange(0, 2 * BLOCK)
        mask = inside[:, :, None] & (d < 2 * half)[None, None, :]
        x = tl.load(x_rows + d.to(tl.int64)[None, None, :] * x_dim, mask=mask, other=0.0)
        x1, x2 = tl.split(tl.reshape(x, (s.shape[0], h.shape[0], BLOCK, 2)))
        x1 = x1.to(tl.float32)
        x2 = x2.to(tl.float32)
        y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin).to(out_ptr.dtype.element_ty)
        y = tl.reshape(y, (s.shape[0], h.shape[0], 2 * BLOCK))
        tl.store(out_rows + d.to(tl.int64)[None, None, :] * out_dim, y, mask=mask)
    else:
        # Pairs are ``half`` apart: two runs of channels.
        d = column + tl.arange(0, BLOCK)
        mask = inside[:, :, None] & (d < half)[None, None, :]
        x_first = x_rows + d.to(tl.int64)[None, None, :] * x_dim
        x1 = tl.load(x_first, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_first + half * x_dim, mask=mask, other=0.0).to(tl.float32)
        out_first = out_rows + d.to(tl.int64)[None, None, :] * out_dim
        tl.store(out_first, (x1 * cos - x2 * sin).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out_first + half * out_dim, (x2 * cos + x1 * sin).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _copy(out_ptr, x_ptr, s, h, inside, begin, end, out_seq, out_head, out_dim, x_seq, x_head, x_dim, W: tl.constexpr):
    """Copies channels from ``begin`` to before ``end``, at most W of them; nothing where the result is the input."""
    if out_ptr.to(tl.int64) != x_ptr.to(tl.int64):
        d = begin + tl.arange(0, W)
        mask = inside[:, :, None] & (d < end)[None, None, :]
        i = s.to(tl.int64)[:, None, None]
        j = h.to(tl.int64)[None, :, None]
        k = d.to(tl.int64)[None, None, :]
        x = tl.load(x_ptr + i * x_seq + j * x_head + k * x_dim, mask=mask, other=0.0)
        tl.store(out_ptr + i * out_seq + j * out_head + k * out_dim, x, mask=mask)


@triton.jit
def rope(
    out_q_ptr,
    out_k_ptr,
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    seq,
    seq_blocks,
    heads_q,
    heads_kv,
    half,
    head_dim,
    half_blocks,
    parts,
    table_rows,
    out_q_batch,
    out_q_seq,
    out_q_head,
    out_q_dim,
    out_k_batch,
    out_k_seq,
    out_k_head,
    out_k_dim,
    q_batch,
    q_seq,
    q_head,
    q_dim,
    k_batch,
    k_seq,
    k_head,
    k_dim,
    cos_batch,
    cos_row,
    cos_col,
    sin_batch,
    sin_row,
    sin_col,
    positions_batch,
    positions_seq,
    start,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPREAD: tl.constexpr,
    POSITIONS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Rotates q and k by the angles of their tokens' positions, or back by them (INVERSE). fp32, one rounding.

    Arguments and grid: the module's header.
    Schedule: a program loads its tokens' cosines and sines once for all its heads. Where they are fewer than the
    threads, Triton distributes them; else (SPREAD) each head loads them again, from the L1 cache, which avoids an
    exchange through shared memory.
    A position outside of the table makes its token NaN; nothing is read out of bounds.
    """
    pdl_wait(DEPENDENT)
    # This program's block of channels, tile of tokens, and block of heads.
    part = tl.program_id(0) % parts
    pid = tl.program_id(0) // parts
    batch = (pid // seq_blocks).to(tl.int64)
    first = pid % seq_blocks * TOKENS
    block = tl.program_id(1)
    q_blocks = tl.cdiv(heads_q, HEADS)
    s = first + tl.arange(0, TOKENS)
    there = s < seq
    if part < half_blocks:
        # Channels that rotate: cosines and sines of the tile's tokens, NaN where the table has no such row.
        column = part * BLOCK
        d = column + tl.arange(0, BLOCK)
        at = batch * positions_batch + s.to(tl.int64) * positions_seq
        if POSITIONS == "batch":
            at = batch * positions_batch
        position = _position(positions_ptr, start, s.to(tl.int64), at, there, POSITIONS)
        legal = ((position >= 0) & (position < table_rows))[:, None, None] & (d < half)[None, None, :]
        place = position[:, None, None]
        d = d.to(tl.int64)[None, None, :]
        nan = float("nan")
        cos_at = cos_ptr + batch * cos_batch + (place * cos_row + d * cos_col)
        sin_at = sin_ptr + batch * sin_batch + (place * sin_row + d * sin_col)
        # One element for each thread that needs it, by redundant loads instead of an exchange.
        if SPREAD:
            legal = tl.broadcast_to(legal, (TOKENS, HEADS, BLOCK))
            cos_at = tl.broadcast_to(cos_at, (TOKENS, HEADS, BLOCK))
            sin_at = tl.broadcast_to(sin_at, (TOKENS, HEADS, BLOCK))
        cos = tl.load(cos_at, mask=legal, other=nan).to(tl.float32)
        sin = tl.load(sin_at, mask=legal, other=nan).to(tl.float32)
        # The inverse of a rotation is that by the opposite angle.
        if INVERSE:
            sin = -sin
        # Heads of q, then those of k.
        if block < q_blocks:
            h = block * HEADS + tl.arange(0, HEADS)
            _rotate(
                out_q_ptr + batch * out_q_batch,
                q_ptr + batch * q_batch,
                cos,
                sin,
                s,
                h,
                there[:, None] & (h < heads_q)[None, :],
                half,
                column,
                out_q_seq,
                out_q_head,
                out_q_dim,
                q_seq,
                q_head,
                q_dim,
                BLOCK,
                INTERLEAVED,
            )
        else:
            h = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
            _rotate(
                out_k_ptr + batch * out_k_batch,
                k_ptr + batch * k_batch,
                cos,
                sin,
                s,
                h,
                there[:, None] & (h < heads_kv)[None, :],
                half,
                column,
                out_k_seq,
                out_k_head,
                out_k_dim,
                k_seq,
                k_head,
                k_dim,
                BLOCK,
                INTERLEAVED,
            )
    else:
        # Channels behind those that rotate are copied.
        begin = 2 * half + (part - half_blocks) * (2 * BLOCK)
        if block < q_blocks:
            h = block * HEADS + tl.arange(0, HEADS)
            _copy(
                out_q_ptr + batch * out_q_batch,
                q_ptr + batch * q_batch,
                s,
                h,
                there[:, None] & (h < heads_q)[None, :],
                begin,
                head_dim,
                out_q_seq,
                out_q_head,
                out_q_dim,
                q_seq,
                q_head,
                q_dim,
                2 * BLOCK,
            )
        else:
            h = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
            _copy(
                out_k_ptr + batch * out_k_batch,
                k_ptr + batch * k_batch,
                s,
                h,
                there[:, None] & (h < heads_kv)[None, :],
                begin,
                head_dim,
                out_k_seq,
                out_k_head,
                out_k_dim,
                k_seq,
                k_head,
                k_dim,
                2 * BLOCK,
            )
