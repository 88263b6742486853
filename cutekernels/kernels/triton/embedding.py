"""Rows of a table by id, and the gradient of the table: sums of the rows of each id.

A tile's edge is masked in units of VEC columns, which is one access; the at most VEC - 1 columns beyond the last whole
unit follow one by one. Offsets are 64 bits wide. Matrices have strides of rows and columns, vectors of rows.
"""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait


@triton.jit
def _gather(out, table, known, there, cols_inside):
    """The rows of ids in the table; NaN for ids outside."""
    values = tl.load(table, mask=known[:, None] & cols_inside[None, :], other=float("nan"))
    tl.store(out, values, mask=there[:, None] & cols_inside[None, :])


@triton.jit
def embedding(
    out_ptr,
    ids_ptr,
    table_ptr,
    rows,
    vocabulary,
    cols,
    out_row,
    out_col,
    ids_row,
    table_row,
    table_col,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    VEC: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``out[r] = table[ids[r]]``. An id outside the table gives NaN, and reads nothing.

    Grid: blocks of BLOCK_ROWS rows of out, by blocks of BLOCK_COLS columns.
    Schedule: a program loads the numbers of its rows, then copies a block of columns of each.
    Masks: rows of out that do not exist are not stored; rows of the table that do not exist are not read.
    """
    pdl_wait(DEPENDENT)
    # Rows of out, and the rows of the table that they name.
    r = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    begin = tl.program_id(1).to(tl.int64) * BLOCK_COLS
    there = r < rows
    ids = tl.load(ids_ptr + r * ids_row, mask=there, other=0).to(tl.int64)
    known = there & (ids >= 0) & (ids < vocabulary)
    # Whole units of VEC columns.
    left = tl.minimum(cols - begin, BLOCK_COLS).to(tl.int32)
    sources = table_ptr + begin * table_col + ids[:, None] * table_row
    targets = out_ptr + begin * out_col + r[:, None] * out_row
    c = tl.arange(0, BLOCK_COLS)
    wide = c.to(tl.int64)[None, :]
    _gather(targets + wide * out_col, sources + wide * table_col, known, there, c // VEC < left // VEC)
    # Ragged tail: columns beyond the last whole unit.
    if VEC > 1:
        whole = left // VEC * VEC
        if whole < left:
            last = whole + tl.arange(0, VEC)
            tail = last.to(tl.int64)[None, :]
            _gather(targets + tail * out_col, sources + tail * table_col, known, there, last < left)


@triton.jit
def _sum_rows(
    dtable,
    dout,
    order_ptr,
    begin,
    end,
    dout_row,
    order_row,
    inside,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Adds up rows ``order[begin:end]`` of WIDTH columns in fp32, BLOCK_ROWS at a time, and rounds once."""
    # Each row of the tile has its own total, so that BLOCK_ROWS loads are in flight.
    total = tl.zeros((BLOCK_ROWS, WIDTH), tl.float32)
    for at in range(begin, end, BLOCK_ROWS):
        i = at + tl.arange(0, BLOCK_ROWS)
        rows = tl.load(order_ptr + i * order_row, mask=i < end, other=0).to(tl.int64)
        total += tl.load(dout + rows[:, None] * dout_row, mask=(i < end)[:, None] & inside[None, :], other=0.0).to(
            tl.float32
        )
    tl.store(dtable, tl.sum(total, axis=0).to(dtable.dtype.element_ty), mask=inside)


@triton.jit
def embedding_backward(
    dtable_ptr,
    dout_ptr,
    order_ptr,
    starts_ptr,
    cols,
    dtable_row,
    dtable_col,
    dout_row,
    dout_col,
    order_row,
    starts_row,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    VEC: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``dtable[v] = sum of dout[order[i]] for starts[v] <= i < starts[v + 1]``: zero for rows that no id names.

    Grid: rows of the table, by blocks of BLOCK_COLS columns.
    Schedule: a program owns a block of columns of one row of the table and walks its rows of ``dout`` in order, so that
    every element is written once and sums are the same each time.
    """
    pdl_wait(DEPENDENT)
    # The rows of dout that name this row of the table: a run of ``order``.
    v = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK_COLS
    begin = tl.load(starts_ptr + v * starts_row).to(tl.int64)
    end = tl.load(starts_ptr + (v + 1) * starts_row).to(tl.int64)
    # Whole units of VEC columns.
    left = tl.minimum(cols - column, BLOCK_COLS).to(tl.int32)
    target = dtable_ptr + v * dtable_row + column * dtable_col
    source = dout_ptr + column * dout_col
    c = tl.arange(0, BLOCK_COLS)
    wide = c.to(tl.int64)
    _sum_rows(
        target + wide * dtable_col,
        source + wide[None, :] * dout_col,
        order_ptr,
        begin,
        end,
        dout_row,
        order_row,
        c // VEC < left // VEC,
        BLOCK_COLS,
        BLOCK_ROWS,
    )
    # Ragged tail: columns beyond the last whole unit.
    if VEC > 1:
        whole = left // VEC * VEC
        if whole < left:
            last = whole + tl.arange(0, VEC)
            tail = last.to(tl.int64)
            _sum_rows(
                target + tail * dtable_col,
                source + tail[None, :] * dout_col,
                order_ptr,
                begin,
                end,
                dout_row,
                order_row,
                last < left,
                VEC,
                BLOCK_ROWS,
            )
