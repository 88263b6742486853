"""The gradients of the norms in ``forward.py``, and the sums over rows that weights and biases need.

Grid: one axis of programs, and columns for :func:`column_sum`. A program strides over tiles (with PER_HEAD by a
multiple of the heads) and keeps its share of the weight's gradient in fp32: in registers where rows are RESIDENT, else
in its own row of parts, which stays in the L2 cache. ``dweight_ptr`` and ``dbias_ptr`` point to the parts, one row per
program; :func:`column_sum` adds them in a fixed order: no atomics, the same bits on every run. The statistics are
computed again from ``x``, which is read anyway: saving them would only add bytes. Values, operands and masks are as in
``forward.py``.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait
from cutekernels.kernels.triton.norms.forward import Cube, Numbers, Sizes, Steps, Weight, _affine, _at, _place, _store

Pointers = namedtuple("Pointers", "dx_ptr dweight_ptr dbias_ptr dy_ptr x_ptr weight_ptr du_ptr", defaults=7 * (0,))
Operands = namedtuple("Operands", "dx dy x weight du")


class Strides(NamedTuple):
    """Strides of the operands, in elements."""

    dx: Steps
    dy: Steps
    x: Steps
    du: Steps = Steps()


class How(NamedTuple):
    """Compiled in: which operands there are, what is computed, and a program's tile."""

    WEIGHT: bool
    DWEIGHT: bool
    NESTED: bool
    PER_HEAD: bool
    BLOCK_ROWS: int
    BLOCK_COLS: int
    RESIDENT: bool
    STAGES: int
    CENTRED: bool
    DBIAS: bool = False
    DU: bool = False  # x was a result too, and has a gradient of its own


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(a, b):
    """Row sums of two tiles, in one exchange between warps."""
    return tl.reduce((a, b), 1, _both)


@triton.jit
def _load_wide(operand, row, head, r, c, inside):
    return tl.load(_at(operand, row, head, r, c), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _scale(given, n, of, how, head, c):
    """Factors of the normalised values."""
    if how.WEIGHT:
        return _affine(given.weight, head, c, c < n.cols, True).to(tl.float32) + of.weight_offset
    else:
        return 1.0


@triton.jit
def _resident(given, n, of, how, weight, shares, row, head):
    """One tile of whole rows; returns the program's shares with this tile's added.

    The loads are 0 where nothing is, so that no sum needs a mask, but for centred values.
    """
    r = tl.arange(0, how.BLOCK_ROWS)
    c = tl.arange(0, how.BLOCK_COLS)
    inside = (r < n.rows - row)[:, None] & (c < n.cols)[None, :]
    # dy, x, and g, the gradient of the normalised values.
    d = _load_wide(given.dy, row, head, r, c, inside)
    v = _load_wide(given.x, row, head, r, c, inside)
    g = d * weight
    # Centring x also centres the gradient: the means of both, in one exchange.
    if how.CENTRED:
        mean, drift = _sums(v, g)
        v = tl.where(inside, v - (mean / n.cols)[:, None], 0.0)
        g_centred = g - (drift / n.cols)[:, None]
    else:
        g_centred = g
    # rstd, and the mean of g * z, which both need the centred values.
    squares, slope = _sums(v * v, g * v)
    rstd = tl.rsqrt(squares / n.cols + of.eps)
    v = v * rstd[:, None]
    result = rstd[:, None] * (g_centred - v * (slope * rstd / n.cols)[:, None])
    # x's own gradient, where x was a result too.
    if how.DU:
        result += _load_wide(given.du, row, head, r, c, inside)
    _store(given.dx, result, row, head, r, c, inside)
    # This tile's shares.
    dw, db = shares
    if how.DWEIGHT:
        dw += d * v
    if how.DBIAS:
        db += d
    return dw, db


@triton.jit
def _in_chunks(given, n, of, how, parts, begun, row, head):
    """One row in chunks. Its shares are added to the program's row of parts, which is written first if not begun."""
    r = tl.arange(0, 1)
    live = (r < n.rows - row)[:, None]
    # First pass, where centred: the means of x and of g.
    mean = tl.zeros([1], tl.float32)
    drift = tl.zeros([1], tl.float32)
    if how.CENTRED:
        first = tl.zeros([1, how.BLOCK_COLS], tl.float32)
        second = tl.zeros([1, how.BLOCK_COLS], tl.float32)
        for start in range(0, n.cols, how.BLOCK_COLS):
            c = start + tl.arange(0, how.BLOCK_COLS)
            inside = live & (c < n.cols)[None, :]
            first += _load_wide(given.x, row, head, r, c, inside)
            second += _load_wide(given.dy, row, head, r, c, inside) * _scale(given, n, of, how, head, c)
        mean, drift = _sums(first, second)
        mean /= n.cols
        drift /= n.cols
    # Next pass: squares, and the sum of g * v.
    first = tl.zeros([1, how.BLOCK_COLS], tl.float32)
    second = tl.zeros([1, how.BLOCK_COLS], tl.float32)
    for start in range(0, n.cols, how.BLOCK_COLS):
        c = start + tl.arange(0, how.BLOCK_COLS)
        inside = live & (c < n.cols)[None, :]
        v = tl.where(inside, _load_wide(given.x, row, head, r, c, inside) - mean[:, None], 0.0)
        g = _load_wide(given.dy, row, head, r, c, inside) * _scale(given, n, of, how, head, c)
        first += v * v
        second += g * v
    squares, slope = _sums(first, second)
    rstd = tl.rsqrt(squares / n.cols + of.eps)
    # Last pass: dx, and this row's shares of the weight's and the bias's gradients.
    for start in range(0, n.cols, how.BLOCK_COLS):
        c = start + tl.arange(0, how.BLOCK_COLS)
        inside = live & (c < n.cols)[None, :]
        d = _load_wide(given.dy, row, head, r, c, inside)
        v = (_load_wide(given.x, row, head, r, c, inside) - mean[:, None]) * rstd[:, None]
        g = d * _scale(given, n, of, how, head, c)
        result = rstd[:, None] * (g - drift[:, None] - v * (slope * rstd / n.cols)[:, None])
        if how.DU:
            result += _load_wide(given.du, row, head, r, c, inside)
        _store(given.dx, result, row, head, r, c, inside)
        # The program's own row of parts: no other program reads or writes it, so that no order is needed.
        mine = (c < n.cols)[None, :]
        if how.DWEIGHT:
            at = parts[0] + c.to(tl.int64)[None, :]
            tl.store(at, tl.load(at, mask=mine & begun, other=0.0) + tl.where(inside, d * v, 0.0), mask=mine)
        if how.DBIAS:
            at = parts[1] + c.to(tl.int64)[None, :]
            tl.store(at, tl.load(at, mask=mine & begun, other=0.0) + d, mask=mine)


@triton.jit
def _backward(at, n, by, of, how):
    """This program's tiles, a grid apart, and its shares of the weight's and the bias's gradients."""
    given = Operands(
        Cube(at.dx_ptr, by.dx),
        Cube(at.dy_ptr, by.dy),
        Cube(at.x_ptr, by.x),
        Weight(at.weight_ptr, n.cols if how.PER_HEAD else 0),
        Cube(at.du_ptr, by.du),
    )
    pid = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    tiles = tl.cdiv(n.rows, how.BLOCK_ROWS) * n.heads
    # This program's row of parts.
    dw_parts, db_parts = at.dweight_ptr, at.dbias_ptr
    if how.DWEIGHT:
        dw_parts += pid * n.cols
    if how.DBIAS:
        db_parts += pid * n.cols
    if how.RESIDENT:
        # Shares in registers: a row of them for each row of a tile, added up at the end.
        c = tl.arange(0, how.BLOCK_COLS)
        row, head = _place(pid, n.heads, how.BLOCK_ROWS, how.NESTED)
        w = _scale(given, n, of, how, head, c)
        dw = tl.zeros([how.BLOCK_ROWS, how.BLOCK_COLS], tl.float32)
        db = tl.zeros([how.BLOCK_ROWS, how.BLOCK_COLS], tl.float32)
        for index in tl.range(pid, tiles, programs, num_stages=how.STAGES):
            row, head = _place(index, n.heads, how.BLOCK_ROWS, how.NESTED)
            dw, db = _resident(given, n, of, how, w, (dw, db), row, head)
        # Rows of a tile are added up once, at the end.
        if how.DWEIGHT:
            tl.store(dw_parts + c.to(tl.int64), tl.sum(dw, axis=0), mask=c < n.cols)
        if how.DBIAS:
            tl.store(db_parts + c.to(tl.int64), tl.sum(db, axis=0), mask=c < n.cols)
    else:
        # Shares in the parts: the first row is stored, further ones are added.
        for index in range(pid, tiles, programs):
            row, head = _place(index, n.heads, how.BLOCK_ROWS, how.NESTED)
            _in_chunks(given, n, of, how, (dw_parts, db_parts), index >= programs, row, head)


@triton.jit
def rms_norm_backward(at: Pointers, n: Sizes, by: Strides, of: Numbers, how: How, DEPENDENT: tl.constexpr = False):
    """With ``g = dy * (weight + weight_offset)`` and ``z = x * rstd``: ``dx = rstd * (g - z * mean(g * z)) + du`` and
    ``dweight = sum over rows of dy * z``. ``du`` is the gradient of ``u``, where ``x`` is ``add_rms_norm``'s.
    """
    pdl_wait(DEPENDENT)
    _backward(at, n, by, of, how)


@triton.jit
def layer_norm_backward(at: Pointers, n: Sizes, by: Strides, of: Numbers, how: How, DEPENDENT: tl.constexpr = False):
    """With ``g = dy * weight`` and ``z = (x - mean) * rstd``: ``dx = rstd * (g - mean(g) - z * mean(g * z))``,
    ``dweight = sum of dy * z`` and ``dbias = sum of dy`` over rows.
    """
    pdl_wait(DEPENDENT)
    _backward(at, n, by, of, how)


@triton.jit
def _column_sum(out_ptr, parts_ptr, parts, cols, BLOCK_PARTS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """One program's columns of :func:`column_sum`."""
    c = tl.program_id(0).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    p = tl.arange(0, BLOCK_PARTS)
    # Rows in steps of BLOCK_PARTS, then the rows of the step: one order, whatever the grid.
    total = tl.zeros([BLOCK_PARTS, BLOCK_COLS], tl.float32)
    for start in range(0, parts, BLOCK_PARTS):
        inside = (p < parts - start)[:, None] & (c < cols)[None, :]
        at = parts_ptr + (start + p).to(tl.int64)[:, None] * cols + c[None, :]
        total += tl.load(at, mask=inside, other=0.0)
    result = tl.sum(total, axis=0)
    tl.store(out_ptr + c, result.to(out_ptr.dtype.element_ty), mask=c < cols)


@triton.jit
def column_sum(
    out_ptr,
    parts_ptr,
    parts,
    cols,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``out[c] = sum over p of parts[p, c]``, in an order that only the config decides.

    Grid: blocks of BLOCK_COLS columns. A program walks down its columns, BLOCK_PARTS rows at a time.
    ``parts`` is dense, (parts, cols).
    """
    pdl_wait(DEPENDENT)
    _column_sum(out_ptr, parts_ptr, parts, cols, BLOCK_PARTS, BLOCK_COLS)


@triton.jit
def column_sum_pair(
    out_ptr,
    more_ptr,
    parts_ptr,
    parts,
    cols,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Two sums in one launch: the first ``parts`` rows into ``out``, as many after them into ``more``.

    Grid: blocks of columns, by the two sums.
    """
    pdl_wait(DEPENDENT)
    if tl.program_id(1) == 0:
        _column_sum(out_ptr, parts_ptr, parts, cols, BLOCK_PARTS, BLOCK_COLS)
    else:
        _column_sum(more_ptr, parts_ptr + parts.to(tl.int64) * cols, parts, cols, BLOCK_PARTS, BLOCK_COLS)
