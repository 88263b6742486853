"""Activations: gated (``out = act(gate) * up``) and with a bias (``out = gelu(x + bias)``), and their gradients.

Grid: two axes that count as one, since the first ends at 2^31 - 1. Every kernel walks a (rows, cols) matrix in tiles of
BLOCK_ROWS x BLOCK_COLS; programs run through a row's tiles first. Every operand has its own two strides. Promises of
the op are constexprs: element strides of 1, and for gated operands that are dense throughout (DENSE) one single row of
``cols`` elements.

Width: VEC elements are one access. A tile's edge is masked in units of VEC, which keeps every access wide
whatever ``cols`` is; the at most VEC - 1 elements beyond the last whole unit of a row follow one by one.

ACT is "silu", "gelu" (x times the normal distribution function) or "gelu_tanh". Arithmetic is fp32, with one rounding
per result. PRECISE is for fp32 results; without it the functions are good to 2^-17, a 32nd of a half type's rounding.
"""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

# ---- functions of one element ---------------------------------------------------------------------------


@triton.jit
def _exp(x, PRECISE: tl.constexpr):
    """e^x in fp32. Plain ``tl.exp`` rounds x * log2(e) once: up to 5e-6 relative at |x| = 80, enough for a
    half result. PRECISE reduces the argument first (Cody and Waite), for fp32 results.
    """
    if PRECISE:
        # The clamp keeps inf - inf out of the reduction; e^x is 0 or inf long before it.
        x = tl.minimum(tl.maximum(x, -1000.0), 1000.0)
        n = tl.floor(x * 1.4426950408889634)
        # ln 2 in two parts; n has at most 11 bits, the high part 13, so n * high is exact.
        rest = (x - n * 0.693115234375) - n * 3.194618494528623e-05
        return tl.exp2(n) * tl.exp2(rest * 1.4426950408889634)
    else:
        return tl.exp(x)


@triton.jit
def _over_one_plus_exp(x, y, PRECISE: tl.constexpr):
    """x / (1 + e^-y) in fp32. Where e^-y overflows to inf the quotient is 0, or nan for an infinite x, as in
    PyTorch.
    """
    if PRECISE:
        return tl.div_rn(x, 1.0 + _exp(-y, PRECISE))
    else:
        return x / (1.0 + _exp(-y, PRECISE))


@triton.jit
def _normal_cdf(x, PRECISE: tl.constexpr):
    """The normal distribution function.

    Without PRECISE 2 to a polynomial in |x| gives the tail: right of 0 relative to 1, left of it relative to the
    tail itself, to 5e-6 up to |x| = 5.6 and below 6e-8 / |x| beyond; 7 FMAs and one exp2 where erf takes some 20
    instructions. The coefficients are a minimax fit of log2 of the tail over [0, 5.6], exact at 0.
    """
    if PRECISE:
        return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    else:
        t = tl.abs(x)
        p = tl.fma(t, -1.7561941376698087e-06, 6.009295611875132e-05)
        p = tl.fma(p, t, -0.0009190887212753296)
        p = tl.fma(p, t, 0.008464084006845951)
        p = tl.fma(p, t, -0.05387135595083237)
        p = tl.fma(p, t, -0.4585549533367157)
        p = tl.fma(p, t, -1.1512115001678467)
        tail = tl.exp2(tl.fma(p, t, -1.0))
        return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def _twice_inner(x):
    """2 * sqrt(2 / pi) * (x + 0.044715 * x^3): gelu by tanh is x * sigmoid of this."""
    return x * tl.fma(x * x, 0.07135481282553853, 1.5957691216057308)


@triton.jit
def _activation(x, ACT: tl.constexpr, PRECISE: tl.constexpr):
    if ACT == "silu":
        return _over_one_plus_exp(x, x, PRECISE)
    elif ACT == "gelu":
        return x * _normal_cdf(x, PRECISE)
    else:
        tl.static_assert(ACT == "gelu_tanh", "no such activation: give it a branch here and in the slope")
        return _over_one_plus_exp(x, _twice_inner(x), PRECISE)


@triton.jit
def _activation_and_slope(x, ACT: tl.constexpr, PRECISE: tl.constexpr):
    """The activation and its derivative, which crosses 0 between terms that do not."""
    if ACT == "silu":
        s = _over_one_plus_exp(1.0, x, PRECISE)
        # 1 + x * (1 - s), which is 0 near x = -1.278: for x < 0 1 + x is exact and 1 - s is not, for x > 0 it is the
        # other way round. docs/notes/activations.md (modelled on a CPU, 2026-11-21)
        return x * s, s * tl.where(x < 0.0, tl.fma(-x, s, 1.0 + x), tl.fma(x, 1.0 - s, 1.0))
    elif ACT == "gelu":
        cdf = _normal_cdf(x, PRECISE)
        density = 0.3989422804014327 * _exp(-0.5 * x * x, PRECISE)
        return x * cdf, tl.fma(x, density, cdf)
    else:
        tl.static_assert(ACT == "gelu_tanh", "no such activation: give it a branch here and in the value")
        s = _over_one_plus_exp(1.0, _twice_inner(x), PRECISE)
        inner_slope = tl.fma(x * x, 0.21406443847661558, 1.5957691216057308)
        return x * s, tl.fma(x * (s * (1.0 - s)), inner_slope, s)


# ---- tiles ----------------------------------------------------------------------------------------------


@triton.jit
def _tile(rows, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, DENSE: tl.constexpr):
    """This program's tile: its first row and column, and how many of each are inside the matrix.

    A grid's first axis ends at 2^31 - 1, so programs are counted over two; surplus ones find nothing left.
    """
    pid = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if DENSE:
        # One long row.
        row = pid * 0
        col = pid * BLOCK_COLS
    else:
        col_blocks = tl.cdiv(cols, BLOCK_COLS)
        row = pid // col_blocks * BLOCK_ROWS
        col = pid % col_blocks * BLOCK_COLS
    rows_left = tl.maximum(0, tl.minimum(rows - row, BLOCK_ROWS)).to(tl.int32)
    cols_left = tl.maximum(0, tl.minimum(cols - col, BLOCK_COLS)).to(tl.int32)
    return row, col, rows_left, cols_left


@triton.jit
def _at(ptr, row, col, row_stride, col_stride, r, c):
    """Pointers to elements (row + r, col + c), by 64-bit offsets. Shape (BLOCK_ROWS, width of c)."""
    start = ptr + row * row_stride + col * col_stride
    return start + r.to(tl.int64)[:, None] * row_stride + c.to(tl.int64)[None, :] * col_stride


# ---- gated ----------------------------------------------------------------------------------------------


@triton.jit
def _glu_part(ptrs, row_strides, col_strides, row, col, r, c, inside, ACT: tl.constexpr, PRECISE: tl.constexpr, EVICT):
    """Rows r and columns c of a tile: forward with (out, gate, up), backward with (dgate, dup, dout, gate, up)."""
    first = _at(ptrs[0], row, col, row_strides[0], col_strides[0], r, c)
    # All loads, then the arithmetic, then all stores: a result may be an operand's memory.
    if len(ptrs) == 3:
        gate = _at(ptrs[1], row, col, row_strides[1], col_strides[1], r, c)
        up = _at(ptrs[2], row, col, row_strides[2], col_strides[2], r, c)
        g = tl.load(gate, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
        u = tl.load(up, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
        y = _activation(g, ACT, PRECISE) * u
        tl.store(first, y.to(first.dtype.element_ty), mask=inside)
    else:
        second = _at(ptrs[1], row, col, row_strides[1], col_strides[1], r, c)
        dout = _at(ptrs[2], row, col, row_strides[2], col_strides[2], r, c)
        gate = _at(ptrs[3], row, col, row_strides[3], col_strides[3], r, c)
        up = _at(ptrs[4], row, col, row_strides[4], col_strides[4], r, c)
        d = tl.load(dout, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
        g = tl.load(gate, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
        u = tl.load(up, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
        value, slope = _activation_and_slope(g, ACT, PRECISE)
        tl.store(first, (d * u * slope).to(first.dtype.element_ty), mask=inside)
        tl.store(second, (d * value).to(second.dtype.element_ty), mask=inside)


@triton.jit
def _glu(
    ptrs,
    row_strides,
    col_strides,
    rows,
    cols,
    ACT: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    VEC: tl.constexpr,
    PRECISE: tl.constexpr,
    EVICT: tl.constexpr,
):
    """One tile, forward or backward by the number of ``ptrs``: whole units of VEC columns, then the ragged tail."""
    row, col, rows_left, cols_left = _tile(rows, cols, BLOCK_ROWS, BLOCK_COLS, DENSE)
    r = tl.arange(0, BLOCK_ROWS)
    c = tl.arange(0, BLOCK_COLS)
    inside = (r < rows_left)[:, None] & (c // VEC < cols_left // VEC)[None, :]
    _glu_part(ptrs, row_strides, col_strides, row, col, r, c, inside, ACT, PRECISE, EVICT)
    # Ragged tail: columns beyond the last whole unit.
    if VEC > 1:
        whole = cols_left // VEC * VEC
        if whole < cols_left:
            last = whole + tl.arange(0, VEC)
            beyond = (r < rows_left)[:, None] & (last < cols_left)[None, :]
            _glu_part(ptrs, row_strides, col_strides, row, col, r, last, beyond, ACT, PRECISE, EVICT)


@triton.jit
def glu(
    out_ptr,
    gate_ptr,
    up_ptr,
    rows,
    cols,
    out_row,
    out_col,
    gate_row,
    gate_col,
    up_row,
    up_col,
    ACT: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    VEC: tl.constexpr,
    PRECISE: tl.constexpr,
    EVICT: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``out = act(gate) * up``.

    Grid: one program per tile: load both operands, compute in registers, store.
    """
    pdl_wait(DEPENDENT)
    ptrs, row_strides, col_strides = (
        (out_ptr, gate_ptr, up_ptr),
        (out_row, gate_row, up_row),
        (out_col, gate_col, up_col),
    )
    _glu(ptrs, row_strides, col_strides, rows, cols, ACT, DENSE, BLOCK_ROWS, BLOCK_COLS, VEC, PRECISE, EVICT)


@triton.jit
def glu_backward(
    dgate_ptr,
    dup_ptr,
    dout_ptr,
    gate_ptr,
    up_ptr,
    rows,
    cols,
    dgate_row,
    dgate_col,
    dup_row,
    dup_col,
    dout_row,
    dout_col,
    gate_row,
    gate_col,
    up_row,
    up_col,
    ACT: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    VEC: tl.constexpr,
    PRECISE: tl.constexpr,
    EVICT: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``dgate = dout * up * act'(gate)`` and ``dup = dout * act(gate)``.

    Grid: as :func:`glu`. The activation is recomputed from the inputs of the forward pass.
    """
    pdl_wait(DEPENDENT)
    ptrs = (dgate_ptr, dup_ptr, dout_ptr, gate_ptr, up_ptr)
    row_strides = (dgate_row, dup_row, dout_row, gate_row, up_row)
    col_strides = (dgate_col, dup_col, dout_col, gate_col, up_col)
    _glu(ptrs, row_strides, col_strides, rows, cols, ACT, DENSE, BLOCK_ROWS, BLOCK_COLS, VEC, PRECISE, EVICT)


# ---- with a bias ----------------------------------------------------------------------------------------


@triton.jit
def _bias_at(ptr, col, col_stride, c):
    """Pointers to columns ``col + c`` of a vector."""
    return ptr + col * col_stride + c.to(tl.int64) * col_stride


@triton.jit
def bias_gelu(
    out_ptr,
    x_ptr,
    bias_ptr,
    rows,
    cols,
    out_row,
    out_col,
    x_row,
    x_col,
    bias_col,
    ACT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    VEC: tl.constexpr,
    PRECISE: tl.constexpr,
    EVICT: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``out = gelu(x + bias)``.

    Grid: one program per tile; the bias is loaded once for all its rows.
    """
    pdl_wait(DEPENDENT)
    # Whole units of VEC columns.
    row, col, rows_left, cols_left = _tile(rows, cols, BLOCK_ROWS, BLOCK_COLS, False)
    r = tl.arange(0, BLOCK_ROWS)
    c = tl.arange(0, BLOCK_COLS)
    _bias_gelu(
        _at(out_ptr, row, col, out_row, out_col, r, c),
        _at(x_ptr, row, col, x_row, x_col, r, c),
        _bias_at(bias_ptr, col, bias_col, c),
        r < rows_left,
        c // VEC < cols_left // VEC,
        ACT,
        PRECISE,
        EVICT,
    )
    # Ragged tail: columns beyond the last whole unit.
    if VEC > 1:
        whole = cols_left // VEC * VEC
        if whole < cols_left:
            last = whole + tl.arange(0, VEC)
            _bias_gelu(
                _at(out_ptr, row, col, out_row, out_col, r, last),
                _at(x_ptr, row, col, x_row, x_col, r, last),
                _bias_at(bias_ptr, col, bias_col, last),
                r < rows_left,
                last < cols_left,
                ACT,
                PRECISE,
                EVICT,
            )


@triton.jit
def _bias_gelu(out, x, bias, rows_inside, cols_inside, ACT: tl.constexpr, PRECISE: tl.constexpr, EVICT: tl.constexpr):
    """The elements that the pointers are at."""
    inside = rows_inside[:, None] & cols_inside[None, :]
    b = tl.load(bias, mask=cols_inside, other=0.0).to(tl.float32)
    z = tl.load(x, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32) + b[None, :]
    tl.store(out, _activation(z, ACT, PRECISE).to(out.dtype.element_ty), mask=inside)


@triton.jit
def bias_gelu_backward(
    dx_ptr,
    partials_ptr,
    dout_ptr,
    x_ptr,
    bias_ptr,
    rows,
    cols,
    slab,
    dx_row,
    dx_col,
    dout_row,
    dout_col,
    x_row,
    x_col,
    bias_col,
    ACT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    VEC: tl.constexpr,
    PRECISE: tl.constexpr,
    EVICT: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``dx = dout * gelu'(x + bias)``, and its sum over each slab of rows in ``partials``, in fp32.

    Grid: one program per block of columns and slab of ``slab`` rows, which it walks BLOCK_ROWS at a time. Each sum is
    of fp32 gradients, before they are rounded, and always taken in the same order. ``partials``: dense, (slabs, cols).
    """
    pdl_wait(DEPENDENT)
    # This program's columns and slab; a surplus program of the grid's second axis has no rows.
    col_blocks = tl.cdiv(cols, BLOCK_COLS)
    pid = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    col = pid % col_blocks * BLOCK_COLS
    index = pid // col_blocks
    row = index * slab
    rows_left = tl.maximum(0, tl.minimum(rows - row, slab)).to(tl.int32)
    cols_left = tl.maximum(0, tl.minimum(cols - col, BLOCK_COLS)).to(tl.int32)
    r = tl.arange(0, BLOCK_ROWS)
    c = tl.arange(0, BLOCK_COLS)
    if rows_left > 0:
        # Whole units of VEC columns.
        _bias_gelu_slab(
            partials_ptr + index * cols + col + c,
            _at(dx_ptr, row, col, dx_row, dx_col, r, c),
            _at(dout_ptr, row, col, dout_row, dout_col, r, c),
            _at(x_ptr, row, col, x_row, x_col, r, c),
            _bias_at(bias_ptr, col, bias_col, c),
            BLOCK_ROWS * dx_row,
            BLOCK_ROWS * dout_row,
            BLOCK_ROWS * x_row,
            rows_left,
            c // VEC < cols_left // VEC,
            ACT,
            BLOCK_ROWS,
            PRECISE,
            EVICT,
        )
        # Ragged tail: columns beyond the last whole unit.
        if VEC > 1:
            whole = cols_left // VEC * VEC
            if whole < cols_left:
                last = whole + tl.arange(0, VEC)
                _bias_gelu_slab(
                    partials_ptr + index * cols + col + last,
                    _at(dx_ptr, row, col, dx_row, dx_col, r, last),
                    _at(dout_ptr, row, col, dout_row, dout_col, r, last),
                    _at(x_ptr, row, col, x_row, x_col, r, last),
                    _bias_at(bias_ptr, col, bias_col, last),
                    BLOCK_ROWS * dx_row,
                    BLOCK_ROWS * dout_row,
                    BLOCK_ROWS * x_row,
                    rows_left,
                    last < cols_left,
                    ACT,
                    BLOCK_ROWS,
                    PRECISE,
                    EVICT,
                )


@triton.jit
def _bias_gelu_slab(
    partials,
    dx,
    dout,
    x,
    bias,
    dx_step,
    dout_step,
    x_step,
    rows_left,
    cols_inside,
    ACT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PRECISE: tl.constexpr,
    EVICT: tl.constexpr,
):
    """All rows of a slab, at the columns that the pointers are at."""
    r = tl.arange(0, BLOCK_ROWS)
    b = tl.load(bias, mask=cols_inside, other=0.0).to(tl.float32)
    total = tl.zeros(dx.shape, tl.float32)
    for begin in range(0, rows_left, BLOCK_ROWS):
        inside = (begin + r < rows_left)[:, None] & cols_inside[None, :]
        d = tl.load(dout, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
        z = tl.load(x, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32) + b[None, :]
        _, slope = _activation_and_slope(z, ACT, PRECISE)
        gradient = d * slope
        tl.store(dx, gradient.to(dx.dtype.element_ty), mask=inside)
        # Outside there is nothing to add, but a slope there may be nan: 0 * nan would stick.
        total += tl.where(inside, gradient, 0.0)
        dx += dx_step
        dout += dout_step
        x += x_step
    tl.store(partials, tl.sum(total, axis=0), mask=cols_inside)
