"""Rows of a table by id, and the gradient of the table: sums of the rows of each id.

A tile's edge is masked in units of VEC columns, which is one access; the at most VEC - 1 columns beyond the last whole
unit follow one by one. Offsets are 64 bits wide. Matrices have strides of rows and columns, vectors of rows.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

Pointers = namedtuple("Pointers", "out_ptr ids_ptr table_ptr")
Gradients = namedtuple("Gradients", "dtable_ptr dout_ptr order_ptr starts_ptr")
Sizes = namedtuple("Sizes", "rows vocabulary cols")
Steps = namedtuple("Steps", "row col")
How = namedtuple("How", "BLOCK_ROWS BLOCK_COLS VEC")


class Strides(NamedTuple):
    """Strides of :func:`embedding`'s operands, in elements."""

    out: Steps
    ids_row: int
    table: Steps


class GradientStrides(NamedTuple):
    """Strides of :func:`embedding_backward`'s operands, in elements."""

    dtable: Steps
    dout: Steps
    order_row: int
    starts_row: int


@triton.jit
def _gather(out, table, known, there, cols_inside):
    """The rows of ids in the table; NaN for ids outside."""
    values = tl.load(table, mask=known[:, None] & cols_inside[None, :], other=float("nan"))
    tl.store(out, values, mask=there[:, None] & cols_inside[None, :])


@triton.jit
def embedding(at: Pointers, n: Sizes, by: Strides, how: How, DEPENDENT: tl.constexpr = False):
    """``out[r] = table[ids[r]]``. An id outside the table gives NaN, and reads nothing.

    Grid: blocks of BLOCK_ROWS rows of out, by blocks of BLOCK_COLS columns.
    Schedule: a program loads the numbers of its rows, then copies a block of columns of each.
    Masks: rows of out that do not exist are not stored; rows of the table that do not exist are not read.
    """
    pdl_wait(DEPENDENT)
    # Rows of out, and the rows of the table that they name.
    r = tl.program_id(0).to(tl.int64) * how.BLOCK_ROWS + tl.arange(0, how.BLOCK_ROWS)
    begin = tl.program_id(1).to(tl.int64) * how.BLOCK_COLS
    there = r < n.rows
    ids = tl.load(at.ids_ptr + r * by.ids_row, mask=there, other=0).to(tl.int64)
    known = there & (ids >= 0) & (ids < n.vocabulary)
    # Whole units of VEC columns.
    left = tl.minimum(n.cols - begin, how.BLOCK_COLS).to(tl.int32)
    sources = at.table_ptr + begin * by.table.col + ids[:, None] * by.table.row
    targets = at.out_ptr + begin * by.out.col + r[:, None] * by.out.row
    c = tl.arange(0, how.BLOCK_COLS)
    wide = c.to(tl.int64)[None, :]
    _gather(targets + wide * by.out.col, sources + wide * by.table.col, known, there, c // how.VEC < left // how.VEC)
    # Ragged tail: columns beyond the last whole unit.
    if how.VEC > 1:
        whole = left // how.VEC * how.VEC
        if whole < left:
            last = whole + tl.arange(0, how.VEC)
            tail = last.to(tl.int64)[None, :]
            _gather(targets + tail * by.out.col, sources + tail * by.table.col, known, there, last < left)


@triton.jit
def _sum_rows(target, source, at, by, run, inside, how, WIDTH: tl.constexpr):
    """Adds up rows ``order[begin:end]`` of WIDTH columns in fp32, BLOCK_ROWS at a time, and rounds once."""
    # Each row of the tile has its own total, so that BLOCK_ROWS loads are in flight.
    begin, end = run
    total = tl.zeros((how.BLOCK_ROWS, WIDTH), tl.float32)
    for first in range(begin, end, how.BLOCK_ROWS):
        i = first + tl.arange(0, how.BLOCK_ROWS)
        rows = tl.load(at.order_ptr + i * by.order_row, mask=i < end, other=0).to(tl.int64)
        there = (i < end)[:, None] & inside[None, :]
        total += tl.load(source + rows[:, None] * by.dout.row, mask=there, other=0.0).to(tl.float32)
    tl.store(target, tl.sum(total, axis=0).to(target.dtype.element_ty), mask=inside)


@triton.jit
def embedding_backward(at: Gradients, cols, by: GradientStrides, how: How, DEPENDENT: tl.constexpr = False):
    """``dtable[v] = sum of dout[order[i]] for starts[v] <= i < starts[v + 1]``: zero for rows that no id names.

    Grid: rows of the table, by blocks of BLOCK_COLS columns.
    Schedule: a program owns a block of columns of one row of the table and walks its rows of ``dout`` in order, so that
    every element is written once and sums are the same each time.
    """
    pdl_wait(DEPENDENT)
    # The rows of dout that name this row of the table: a run of ``order``.
    v = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * how.BLOCK_COLS
    begin = tl.load(at.starts_ptr + v * by.starts_row).to(tl.int64)
    end = tl.load(at.starts_ptr + (v + 1) * by.starts_row).to(tl.int64)
    # Whole units of VEC columns.
    left = tl.minimum(cols - column, how.BLOCK_COLS).to(tl.int32)
    target = at.dtable_ptr + v * by.dtable.row + column * by.dtable.col
    source = at.dout_ptr + column * by.dout.col
    c = tl.arange(0, how.BLOCK_COLS)
    wide = c.to(tl.int64)
    targets, sources = target + wide * by.dtable.col, source + wide[None, :] * by.dout.col
    _sum_rows(targets, sources, at, by, (begin, end), c // how.VEC < left // how.VEC, how, how.BLOCK_COLS)
    # Ragged tail: columns beyond the last whole unit.
    if how.VEC > 1:
        whole = left // how.VEC * how.VEC
        if whole < left:
            last = whole + tl.arange(0, how.VEC)
            tail = last.to(tl.int64)
            tails, sources_of_tail = target + tail * by.dtable.col, source + tail[None, :] * by.dout.col
            _sum_rows(tails, sources_of_tail, at, by, (begin, end), last < left, how, how.VEC)
