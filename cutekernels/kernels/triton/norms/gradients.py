"""The gradients of the norms in ``forward.py``, and the sums over rows that weights and biases need.

Grid: one axis of programs, and columns for :func:`column_sum`. A program strides over tiles (with PER_HEAD by a
multiple of the heads) and keeps its share of the weight's gradient in fp32: in registers where rows are RESIDENT, else
in its own row of parts, which stays in the L2 cache. ``dweight_ptr`` and ``dbias_ptr`` point to the parts, one row per
program; :func:`column_sum` adds them in a fixed order: no atomics, the same bits on every run. The statistics are
computed again from ``x``, which is read anyway: saving them would only add bytes. Operands and masks are as in
``forward.py``.
"""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait
from cutekernels.kernels.triton.norms.forward import _affine, _at, _place, _store


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(a, b):
    """Row sums of two tiles, in one exchange between warps."""
    return tl.reduce((a, b), 1, _both)


@triton.jit
def _loaded(operand, row, head, r, c, inside):
    return tl.load(_at(operand, row, head, r, c), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _scale(operand, head, c, inside, weight_offset, WEIGHT: tl.constexpr):
    """What the normalised values were multiplied by."""
    if WEIGHT:
        return _affine(operand, head, c, inside, True).to(tl.float32) + weight_offset
    else:
        return 1.0


@triton.jit
def _resident(
    dx,
    dy,
    x,
    du,
    weight,
    dw,
    db,
    row,
    head,
    rows,
    cols,
    eps,
    CENTRED: tl.constexpr,
    DU: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One tile of whole rows; returns the program's shares with this tile's added.

    The loads are 0 where nothing is, so that no sum needs a mask, but for centred values.
    """
    r = tl.arange(0, BLOCK_ROWS)
    c = tl.arange(0, BLOCK_COLS)
    inside = (r < rows - row)[:, None] & (c < cols)[None, :]
    # dy, x, and g, the gradient of the normalised values.
    d = _loaded(dy, row, head, r, c, inside)
    v = _loaded(x, row, head, r, c, inside)
    g = d * weight
    # Centring x also centres the gradient: the means of both, in one exchange.
    if CENTRED:
        mean, drift = _sums(v, g)
        v = tl.where(inside, v - (mean / cols)[:, None], 0.0)
        g_centred = g - (drift / cols)[:, None]
    else:
        g_centred = g
    # rstd, and the mean of g * z, which both need the centred values.
    squares, slope = _sums(v * v, g * v)
    rstd = tl.rsqrt(squares / cols + eps)
    v = v * rstd[:, None]
    result = rstd[:, None] * (g_centred - v * (slope * rstd / cols)[:, None])
    # x's own gradient, where x was a result too.
    if DU:
        result += _loaded(du, row, head, r, c, inside)
    _store(dx, result, row, head, r, c, inside)
    # This tile's shares.
    if DWEIGHT:
        dw += d * v
    if DBIAS:
        db += d
    return dw, db


@triton.jit
def _chunked(
    dx,
    dy,
    x,
    du,
    weight,
    dw_parts,
    db_parts,
    row,
    head,
    rows,
    cols,
    eps,
    weight_offset,
    begun,
    CENTRED: tl.constexpr,
    DU: tl.constexpr,
    WEIGHT: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One row in chunks. Its shares are added to the program's row of parts, which is written first if not begun."""
    r = tl.arange(0, 1)
    live = (r < rows - row)[:, None]
    # First pass, where centred: the means of x and of g.
    mean = tl.zeros([1], tl.float32)
    drift = tl.zeros([1], tl.float32)
    if CENTRED:
        first = tl.zeros([1, BLOCK_COLS], tl.float32)
        second = tl.zeros([1, BLOCK_COLS], tl.float32)
        for start in range(0, cols, BLOCK_COLS):
            c = start + tl.arange(0, BLOCK_COLS)
            inside = live & (c < cols)[None, :]
            first += _loaded(x, row, head, r, c, inside)
            second += _loaded(dy, row, head, r, c, inside) * _scale(weight, head, c, c < cols, weight_offset, WEIGHT)
        mean, drift = _sums(first, second)
        mean /= cols
        drift /= cols
    # Next pass: squares, and the sum of g * v.
    first = tl.zeros([1, BLOCK_COLS], tl.float32)
    second = tl.zeros([1, BLOCK_COLS], tl.float32)
    for start in range(0, cols, BLOCK_COLS):
        c = start + tl.arange(0, BLOCK_COLS)
        inside = live & (c < cols)[None, :]
        v = tl.where(inside, _loaded(x, row, head, r, c, inside) - mean[:, None], 0.0)
        g = _loaded(dy, row, head, r, c, inside) * _scale(weight, head, c, c < cols, weight_offset, WEIGHT)
        first += v * v
        second += g * v
    squares, slope = _sums(first, second)
    rstd = tl.rsqrt(squares / cols + eps)
    # Last pass: dx, and this row's shares of the weight's and the bias's gradients.
    for start in range(0, cols, BLOCK_COLS):
        c = start + tl.arange(0, BLOCK_COLS)
        inside = live & (c < cols)[None, :]
        d = _loaded(dy, row, head, r, c, inside)
        v = (_loaded(x, row, head, r, c, inside) - mean[:, None]) * rstd[:, None]
        g = d * _scale(weight, head, c, c < cols, weight_offset, WEIGHT)
        result = rstd[:, None] * (g - drift[:, None] - v * (slope * rstd / cols)[:, None])
        if DU:
            result += _loaded(du, row, head, r, c, inside)
        _store(dx, result, row, head, r, c, inside)
        # The program's own row of parts: no other program reads or writes it, so that no order is needed.
        mine = (c < cols)[None, :]
        if DWEIGHT:
            at = dw_parts + c.to(tl.int64)[None, :]
            tl.store(at, tl.load(at, mask=mine & begun, other=0.0) + tl.where(inside, d * v, 0.0), mask=mine)
        if DBIAS:
            at = db_parts + c.to(tl.int64)[None, :]
            tl.store(at, tl.load(at, mask=mine & begun, other=0.0) + d, mask=mine)


@triton.jit
def _backward(
    dx,
    dy,
    x,
    du,
    weight,
    dw_parts,
    db_parts,
    rows,
    heads,
    cols,
    eps,
    weight_offset,
    CENTRED: tl.constexpr,
    DU: tl.constexpr,
    WEIGHT: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
    NESTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    RESIDENT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """This program's tiles, a grid apart, and its shares of the weight's and the bias's gradients."""
    pid = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    tiles = tl.cdiv(rows, BLOCK_ROWS) * heads
    # This program's row of parts.
    if DWEIGHT:
        dw_parts += pid * cols
    if DBIAS:
        db_parts += pid * cols
    if RESIDENT:
        # Shares in registers: a row of them for each row of a tile, added up at the end.
        c = tl.arange(0, BLOCK_COLS)
        row, head = _place(pid, heads, BLOCK_ROWS, NESTED)
        w = _scale(weight, head, c, c < cols, weight_offset, WEIGHT)
        dw = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        db = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        for index in tl.range(pid, tiles, programs, num_stages=STAGES):
            row, head = _place(index, heads, BLOCK_ROWS, NESTED)
            dw, db = _resident(
                dx,
                dy,
                x,
                du,
                w,
                dw,
                db,
                row,
                head,
                rows,
                cols,
                eps,
                CENTRED,
                DU,
                DWEIGHT,
                DBIAS,
                BLOCK_ROWS,
                BLOCK_COLS,
            )
        # Rows of a tile are added up once, at the end.
        if DWEIGHT:
            tl.store(dw_parts + c.to(tl.int64), tl.sum(dw, axis=0), mask=c < cols)
        if DBIAS:
            tl.store(db_parts + c.to(tl.int64), tl.sum(db, axis=0), mask=c < cols)
    else:
        # Shares in the parts: the first row is stored, further ones are added.
        for index in range(pid, tiles, programs):
            row, head = _place(index, heads, BLOCK_ROWS, NESTED)
            _chunked(
                dx,
                dy,
                x,
                du,
                weight,
                dw_parts,
                db_parts,
                row,
                head,
                rows,
                cols,
                eps,
                weight_offset,
                index >= programs,
                CENTRED,
                DU,
                WEIGHT,
                DWEIGHT,
                DBIAS,
                BLOCK_COLS,
            )


@triton.jit
def rms_norm_backward(
    dx_ptr,
    dweight_ptr,
    dy_ptr,
    x_ptr,
    weight_ptr,
    du_ptr,
    rows,
    heads,
    cols,
    dx_row,
    dx_head,
    dx_col,
    dy_row,
    dy_head,
    dy_col,
    x_row,
    x_head,
    x_col,
    du_row,
    du_head,
    du_col,
    eps,
    weight_offset,
    DU: tl.constexpr,
    WEIGHT: tl.constexpr,
    DWEIGHT: tl.constexpr,
    NESTED: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    RESIDENT: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """With ``g = dy * (weight + weight_offset)`` and ``z = x * rstd``: ``dx = rstd * (g - z * mean(g * z)) + du`` and
    ``dweight = sum over rows of dy * z``. ``du`` is the gradient of ``u``, where ``x`` is ``add_rms_norm``'s.
    """
    pdl_wait(DEPENDENT)
    # No bias: its parts are never written, so that the weight's pointer stands in.
    _backward(
        (dx_ptr, dx_row, dx_head, dx_col),
        (dy_ptr, dy_row, dy_head, dy_col),
        (x_ptr, x_row, x_head, x_col),
        (du_ptr, du_row, du_head, du_col),
        (weight_ptr, cols if PER_HEAD else 0),
        dweight_ptr,
        dweight_ptr,
        rows,
        heads,
        cols,
        eps,
        weight_offset,
        False,
        DU,
        WEIGHT,
        DWEIGHT,
        False,
        NESTED,
        BLOCK_ROWS,
        BLOCK_COLS,
        RESIDENT,
        STAGES,
    )


@triton.jit
def layer_norm_backward(
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    dy_ptr,
    x_ptr,
    weight_ptr,
    rows,
    heads,
    cols,
    dx_row,
    dx_head,
    dx_col,
    dy_row,
    dy_head,
    dy_col,
    x_row,
    x_head,
    x_col,
    eps,
    WEIGHT: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
    NESTED: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    RESIDENT: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """With ``g = dy * weight`` and ``z = (x - mean) * rstd``: ``dx = rstd * (g - mean(g) - z * mean(g * z))``,
    ``dweight = sum of dy * z`` and ``dbias = sum of dy`` over rows.
    """
    pdl_wait(DEPENDENT)
    # No gradient of the sum with a residual: x stands in for it.
    x = (x_ptr, x_row, x_head, x_col)
    _backward(
        (dx_ptr, dx_row, dx_head, dx_col),
        (dy_ptr, dy_row, dy_head, dy_col),
        x,
        x,
        (weight_ptr, cols if PER_HEAD else 0),
        dweight_ptr,
        dbias_ptr,
        rows,
        heads,
        cols,
        eps,
        0.0,
        True,
        False,
        WEIGHT,
        DWEIGHT,
        DBIAS,
        NESTED,
        BLOCK_ROWS,
        BLOCK_COLS,
        RESIDENT,
        STAGES,
    )


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
