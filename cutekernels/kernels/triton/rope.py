"""Rotary position embedding: pairs of a head's channels, rotated by the angle of their token's position.

Grid:
    The first axis walks blocks of channels, those that rotate before those that a partial rotation only copies, of one
    tile of tokens after the other (a tile never crosses a batch entry); the second walks blocks of heads, those of q
    before those of k. A tile is (TOKENS, HEADS, BLOCK) pairs. Neighbours in time are thus neighbours in memory:
    docs/notes/rope.md (H200, 2026-11-22).

Values of :func:`rope` (every operand has its own strides, in elements; promises about them are constexprs):
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

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

Pointers = namedtuple("Pointers", "out_q_ptr out_k_ptr q_ptr k_ptr cos_ptr sin_ptr positions_ptr")
Sizes = namedtuple("Sizes", "seq seq_blocks heads_q heads_kv half head_dim half_blocks parts table_rows")
HeadSteps = namedtuple("HeadSteps", "batch seq head dim")
TableSteps = namedtuple("TableSteps", "batch row col")
TokenSteps = namedtuple("TokenSteps", "batch seq")
How = namedtuple("How", "TOKENS HEADS BLOCK SPREAD POSITIONS INTERLEAVED INVERSE")
Heads = namedtuple("Heads", "ptr by")  # of one sequence
Tile = namedtuple("Tile", "s h inside")  # tokens, heads, and which of them exist


class Strides(NamedTuple):
    """Strides of the operands, in elements."""

    out_q: HeadSteps
    out_k: HeadSteps
    q: HeadSteps
    k: HeadSteps
    cos: TableSteps
    sin: TableSteps
    positions: TokenSteps


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
def _rotate(out, x, turn, tile, half, column, how):
    """One tile: ``(x1 cos - x2 sin, x2 cos + x1 sin)``. Pointers and results are (TOKENS, HEADS, channels).

    ``turn``: cosines and sines. Channels beyond the last pair are masked here.
    """
    cos, sin = turn
    x_rows = x.ptr + tile.s.to(tl.int64)[:, None, None] * x.by.seq + tile.h.to(tl.int64)[None, :, None] * x.by.head
    out_rows = (
        out.ptr + tile.s.to(tl.int64)[:, None, None] * out.by.seq + tile.h.to(tl.int64)[None, :, None] * out.by.head
    )
    if how.INTERLEAVED:
        # Pairs are neighbours: one run of channels, split and joined in registers.
        d = 2 * column + tl.arange(0, 2 * how.BLOCK)
        mask = tile.inside[:, :, None] & (d < 2 * half)[None, None, :]
        pairs = tl.load(x_rows + d.to(tl.int64)[None, None, :] * x.by.dim, mask=mask, other=0.0)
        x1, x2 = tl.split(tl.reshape(pairs, (tile.s.shape[0], tile.h.shape[0], how.BLOCK, 2)))
        x1 = x1.to(tl.float32)
        x2 = x2.to(tl.float32)
        y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin).to(out.ptr.dtype.element_ty)
        y = tl.reshape(y, (tile.s.shape[0], tile.h.shape[0], 2 * how.BLOCK))
        tl.store(out_rows + d.to(tl.int64)[None, None, :] * out.by.dim, y, mask=mask)
    else:
        # Pairs are ``half`` apart: two runs of channels.
        d = column + tl.arange(0, how.BLOCK)
        mask = tile.inside[:, :, None] & (d < half)[None, None, :]
        x_first = x_rows + d.to(tl.int64)[None, None, :] * x.by.dim
        x1 = tl.load(x_first, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_first + half * x.by.dim, mask=mask, other=0.0).to(tl.float32)
        out_first = out_rows + d.to(tl.int64)[None, None, :] * out.by.dim
        tl.store(out_first, (x1 * cos - x2 * sin).to(out.ptr.dtype.element_ty), mask=mask)
        tl.store(out_first + half * out.by.dim, (x2 * cos + x1 * sin).to(out.ptr.dtype.element_ty), mask=mask)


@triton.jit
def _copy(out, x, tile, begin, end, W: tl.constexpr):
    """Copies channels from ``begin`` to before ``end``, at most W of them; nothing where the result is the input."""
    if out.ptr.to(tl.int64) != x.ptr.to(tl.int64):
        d = begin + tl.arange(0, W)
        mask = tile.inside[:, :, None] & (d < end)[None, None, :]
        i = tile.s.to(tl.int64)[:, None, None]
        j = tile.h.to(tl.int64)[None, :, None]
        k = d.to(tl.int64)[None, None, :]
        values = tl.load(x.ptr + i * x.by.seq + j * x.by.head + k * x.by.dim, mask=mask, other=0.0)
        tl.store(out.ptr + i * out.by.seq + j * out.by.head + k * out.by.dim, values, mask=mask)


@triton.jit
def rope(at: Pointers, n: Sizes, by: Strides, start, how: How, DEPENDENT: tl.constexpr = False):
    """Rotates q and k by the angles of their tokens' positions, or back by them (INVERSE). fp32, one rounding.

    Arguments and grid: the module's header.
    Schedule: a program loads its tokens' cosines and sines once for all its heads. Where they are fewer than the
    threads, Triton distributes them; else (SPREAD) each head loads them again, from the L1 cache, which avoids an
    exchange through shared memory.
    A position outside of the table makes its token NaN; nothing is read out of bounds.
    """
    pdl_wait(DEPENDENT)
    # This program's block of channels, tile of tokens, and block of heads.
    part = tl.program_id(0) % n.parts
    pid = tl.program_id(0) // n.parts
    batch = (pid // n.seq_blocks).to(tl.int64)
    first = pid % n.seq_blocks * how.TOKENS
    block = tl.program_id(1)
    q_blocks = tl.cdiv(n.heads_q, how.HEADS)
    s = first + tl.arange(0, how.TOKENS)
    there = s < n.seq
    if part < n.half_blocks:
        # Channels that rotate: cosines and sines of the tile's tokens, NaN where the table has no such row.
        column = part * how.BLOCK
        d = column + tl.arange(0, how.BLOCK)
        where = batch * by.positions.batch + s.to(tl.int64) * by.positions.seq
        if how.POSITIONS == "batch":
            where = batch * by.positions.batch
        position = _position(at.positions_ptr, start, s.to(tl.int64), where, there, how.POSITIONS)
        legal = ((position >= 0) & (position < n.table_rows))[:, None, None] & (d < n.half)[None, None, :]
        place = position[:, None, None]
        d = d.to(tl.int64)[None, None, :]
        nan = float("nan")
        cos_at = at.cos_ptr + batch * by.cos.batch + (place * by.cos.row + d * by.cos.col)
        sin_at = at.sin_ptr + batch * by.sin.batch + (place * by.sin.row + d * by.sin.col)
        # One element for each thread that needs it, by redundant loads instead of an exchange.
        if how.SPREAD:
            legal = tl.broadcast_to(legal, (how.TOKENS, how.HEADS, how.BLOCK))
            cos_at = tl.broadcast_to(cos_at, (how.TOKENS, how.HEADS, how.BLOCK))
            sin_at = tl.broadcast_to(sin_at, (how.TOKENS, how.HEADS, how.BLOCK))
        cos = tl.load(cos_at, mask=legal, other=nan).to(tl.float32)
        sin = tl.load(sin_at, mask=legal, other=nan).to(tl.float32)
        # The inverse of a rotation is that by the opposite angle.
        if how.INVERSE:
            sin = -sin
        # Heads of q, then those of k.
        if block < q_blocks:
            h = block * how.HEADS + tl.arange(0, how.HEADS)
            out = Heads(at.out_q_ptr + batch * by.out_q.batch, by.out_q)
            x = Heads(at.q_ptr + batch * by.q.batch, by.q)
            tile = Tile(s, h, there[:, None] & (h < n.heads_q)[None, :])
            _rotate(out, x, (cos, sin), tile, n.half, column, how)
        else:
            h = (block - q_blocks) * how.HEADS + tl.arange(0, how.HEADS)
            out = Heads(at.out_k_ptr + batch * by.out_k.batch, by.out_k)
            x = Heads(at.k_ptr + batch * by.k.batch, by.k)
            tile = Tile(s, h, there[:, None] & (h < n.heads_kv)[None, :])
            _rotate(out, x, (cos, sin), tile, n.half, column, how)
    else:
        # Channels behind those that rotate are copied.
        begin = 2 * n.half + (part - n.half_blocks) * (2 * how.BLOCK)
        if block < q_blocks:
            h = block * how.HEADS + tl.arange(0, how.HEADS)
            out = Heads(at.out_q_ptr + batch * by.out_q.batch, by.out_q)
            x = Heads(at.q_ptr + batch * by.q.batch, by.q)
            tile = Tile(s, h, there[:, None] & (h < n.heads_q)[None, :])
            _copy(out, x, tile, begin, n.head_dim, 2 * how.BLOCK)
        else:
            h = (block - q_blocks) * how.HEADS + tl.arange(0, how.HEADS)
            out = Heads(at.out_k_ptr + batch * by.out_k.batch, by.out_k)
            x = Heads(at.k_ptr + batch * by.k.batch, by.k)
            tile = Tile(s, h, there[:, None] & (h < n.heads_kv)[None, :])
            _copy(out, x, tile, begin, n.head_dim, 2 * how.BLOCK)
