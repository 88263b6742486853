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

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

Pointers = namedtuple(
    "Pointers",
    "out_ptr dgate_ptr dup_ptr dx_ptr partials_ptr dout_ptr gate_ptr up_ptr x_ptr bias_ptr",
    defaults=10 * (0,),
)
Sizes = namedtuple("Sizes", "rows cols slab", defaults=(0,))
Steps = namedtuple("Steps", "row col", defaults=(0, 0))
Matrix = namedtuple("Matrix", "ptr by")


class Strides(NamedTuple):
    """Strides of the operands, in elements."""

    out: Steps = Steps()
    dgate: Steps = Steps()
    dup: Steps = Steps()
    dx: Steps = Steps()
    dout: Steps = Steps()
    gate: Steps = Steps()
    up: Steps = Steps()
    x: Steps = Steps()
    bias_col: int = 0


class How(NamedTuple):
    """Compiled in: the function, a tile, the accesses."""

    ACT: str
    BLOCK_ROWS: int
    BLOCK_COLS: int
    VEC: int
    PRECISE: bool
    EVICT: str
    DENSE: bool = False


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
def _tile(n, how):
    """This program's tile: its first row and column, and how many of each are inside the matrix.

    A grid's first axis ends at 2^31 - 1, so programs are counted over two; surplus ones find nothing left.
    """
    pid = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if how.DENSE:
        # One long row.
        row = pid * 0
        col = pid * how.BLOCK_COLS
    else:
        col_blocks = tl.cdiv(n.cols, how.BLOCK_COLS)
        row = pid // col_blocks * how.BLOCK_ROWS
        col = pid % col_blocks * how.BLOCK_COLS
    rows_left = tl.maximum(0, tl.minimum(n.rows - row, how.BLOCK_ROWS)).to(tl.int32)
    cols_left = tl.maximum(0, tl.minimum(n.cols - col, how.BLOCK_COLS)).to(tl.int32)
    return row, col, rows_left, cols_left


@triton.jit
def _at(operand, row, col, r, c):
    """Pointers to elements (row + r, col + c), by 64-bit offsets. Shape (BLOCK_ROWS, width of c)."""
    start = operand.ptr + row * operand.by.row + col * operand.by.col
    return start + r.to(tl.int64)[:, None] * operand.by.row + c.to(tl.int64)[None, :] * operand.by.col


# ---- gated ----------------------------------------------------------------------------------------------


@triton.jit
def _glu_part(operands, how, row, col, r, c, inside):
    """Rows r and columns c of a tile: forward with (out, gate, up), backward with (dgate, dup, dout, gate, up)."""
    first = _at(operands[0], row, col, r, c)
    # All loads, then the arithmetic, then all stores: a result may be an operand's memory.
    if len(operands) == 3:
        gate = _at(operands[1], row, col, r, c)
        up = _at(operands[2], row, col, r, c)
        g = tl.load(gate, mask=inside, other=0.0, eviction_policy=how.EVICT).to(tl.float32)
        u = tl.load(up, mask=inside, other=0.0, eviction_policy=how.EVICT).to(tl.float32)
        y = _activation(g, how.ACT, how.PRECISE) * u
        tl.store(first, y.to(first.dtype.element_ty), mask=inside)
    else:
        second = _at(operands[1], row, col, r, c)
        dout = _at(operands[2], row, col, r, c)
        gate = _at(operands[3], row, col, r, c)
        up = _at(operands[4], row, col, r, c)
        d = tl.load(dout, mask=inside, other=0.0, eviction_policy=how.EVICT).to(tl.float32)
        g = tl.load(gate, mask=inside, other=0.0, eviction_policy=how.EVICT).to(tl.float32)
        u = tl.load(up, mask=inside, other=0.0, eviction_policy=how.EVICT).to(tl.float32)
        value, slope = _activation_and_slope(g, how.ACT, how.PRECISE)
        tl.store(first, (d * u * slope).to(first.dtype.element_ty), mask=inside)
        tl.store(second, (d * value).to(second.dtype.element_ty), mask=inside)


@triton.jit
def _glu(operands, n, how):
    """One tile, forward or backward by the number of operands: whole units of VEC columns, then the ragged tail."""
    row, col, rows_left, cols_left = _tile(n, how)
    r = tl.arange(0, how.BLOCK_ROWS)
    c = tl.arange(0, how.BLOCK_COLS)
    inside = (r < rows_left)[:, None] & (c // how.VEC < cols_left // how.VEC)[None, :]
    _glu_part(operands, how, row, col, r, c, inside)
    # Ragged tail: columns beyond the last whole unit.
    if how.VEC > 1:
        whole = cols_left // how.VEC * how.VEC
        if whole < cols_left:
            last = whole + tl.arange(0, how.VEC)
            beyond = (r < rows_left)[:, None] & (last < cols_left)[None, :]
            _glu_part(operands, how, row, col, r, last, beyond)


@triton.jit
def glu(at: Pointers, n: Sizes, by: Strides, how: How, DEPENDENT: tl.constexpr = False):
    """``out = act(gate) * up``.

    Grid: one program per tile: load both operands, compute in registers, store.
    """
    pdl_wait(DEPENDENT)
    _glu((Matrix(at.out_ptr, by.out), Matrix(at.gate_ptr, by.gate), Matrix(at.up_ptr, by.up)), n, how)


@triton.jit
def glu_backward(at: Pointers, n: Sizes, by: Strides, how: How, DEPENDENT: tl.constexpr = False):
    """``dgate = dout * up * act'(gate)`` and ``dup = dout * act(gate)``.

    Grid: as :func:`glu`. The activation is recomputed from the inputs of the forward pass.
    """
    pdl_wait(DEPENDENT)
    operands = (
        Matrix(at.dgate_ptr, by.dgate),
        Matrix(at.dup_ptr, by.dup),
        Matrix(at.dout_ptr, by.dout),
        Matrix(at.gate_ptr, by.gate),
        Matrix(at.up_ptr, by.up),
    )
    _glu(operands, n, how)


# ---- with a bias ----------------------------------------------------------------------------------------


@triton.jit
def _bias_at(at, by, col, c):
    """Pointers to columns ``col + c`` of the bias."""
    return at.bias_ptr + col * by.bias_col + c.to(tl.int64) * by.bias_col


@triton.jit
def bias_gelu(at: Pointers, n: Sizes, by: Strides, how: How, DEPENDENT: tl.constexpr = False):
    """``out = gelu(x + bias)``.

    Grid: one program per tile; the bias is loaded once for all its rows.
    """
    pdl_wait(DEPENDENT)
    out, x = Matrix(at.out_ptr, by.out), Matrix(at.x_ptr, by.x)
    row, col, rows_left, cols_left = _tile(n, how)
    r = tl.arange(0, how.BLOCK_ROWS)
    # Whole units of VEC columns.
    c = tl.arange(0, how.BLOCK_COLS)
    pointers = _at(out, row, col, r, c), _at(x, row, col, r, c), _bias_at(at, by, col, c)
    _bias_gelu(pointers, r < rows_left, c // how.VEC < cols_left // how.VEC, how)
    # Ragged tail: columns beyond the last whole unit.
    if how.VEC > 1:
        whole = cols_left // how.VEC * how.VEC
        if whole < cols_left:
            last = whole + tl.arange(0, how.VEC)
            beyond = _at(out, row, col, r, last), _at(x, row, col, r, last), _bias_at(at, by, col, last)
            _bias_gelu(beyond, r < rows_left, last < cols_left, how)


@triton.jit
def _bias_gelu(pointers, rows_inside, cols_inside, how):
    """The elements that the pointers, of out, x and bias, are at."""
    out, x, bias = pointers
    inside = rows_inside[:, None] & cols_inside[None, :]
    b = tl.load(bias, mask=cols_inside, other=0.0).to(tl.float32)
    z = tl.load(x, mask=inside, other=0.0, eviction_policy=how.EVICT).to(tl.float32) + b[None, :]
    tl.store(out, _activation(z, how.ACT, how.PRECISE).to(out.dtype.element_ty), mask=inside)


@triton.jit
def bias_gelu_backward(at: Pointers, n: Sizes, by: Strides, how: How, DEPENDENT: tl.constexpr = False):
    """``dx = dout * gelu'(x + bias)``, and its sum over each slab of rows in ``partials``, in fp32.

    Grid: one program per block of columns and slab of ``slab`` rows, which it walks BLOCK_ROWS at a time. Each sum is
    of fp32 gradients, before they are rounded, and always taken in the same order. ``partials``: dense, (slabs, cols).
    """
    pdl_wait(DEPENDENT)
    # This program's columns and slab; a surplus program of the grid's second axis has no rows.
    col_blocks = tl.cdiv(n.cols, how.BLOCK_COLS)
    pid = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    col = pid % col_blocks * how.BLOCK_COLS
    index = pid // col_blocks
    row = index * n.slab
    rows_left = tl.maximum(0, tl.minimum(n.rows - row, n.slab)).to(tl.int32)
    cols_left = tl.maximum(0, tl.minimum(n.cols - col, how.BLOCK_COLS)).to(tl.int32)
    place = index, row, col
    r = tl.arange(0, how.BLOCK_ROWS)
    c = tl.arange(0, how.BLOCK_COLS)
    if rows_left > 0:
        # Whole units of VEC columns.
        pointers, steps = _slab_at(at, n, by, how, place, r, c)
        _bias_gelu_slab(pointers, steps, rows_left, c // how.VEC < cols_left // how.VEC, how)
        # Ragged tail: columns beyond the last whole unit.
        if how.VEC > 1:
            whole = cols_left // how.VEC * how.VEC
            if whole < cols_left:
                last = whole + tl.arange(0, how.VEC)
                beyond, tail_steps = _slab_at(at, n, by, how, place, r, last)
                _bias_gelu_slab(beyond, tail_steps, rows_left, last < cols_left, how)


@triton.jit
def _slab_at(at, n, by, how, place, r, c):
    """Pointers into the columns ``col + c`` of a slab: partials, dx, dout, x and bias; and to its next rows."""
    index, row, col = place
    pointers = (
        at.partials_ptr + index * n.cols + col + c,
        _at(Matrix(at.dx_ptr, by.dx), row, col, r, c),
        _at(Matrix(at.dout_ptr, by.dout), row, col, r, c),
        _at(Matrix(at.x_ptr, by.x), row, col, r, c),
        _bias_at(at, by, col, c),
    )
    return pointers, (how.BLOCK_ROWS * by.dx.row, how.BLOCK_ROWS * by.dout.row, how.BLOCK_ROWS * by.x.row)


@triton.jit
def _bias_gelu_slab(pointers, steps, rows_left, cols_inside, how):
    """All rows of a slab, at the columns that the pointers are at; ``steps`` lead to the next rows."""
    partials, dx, dout, x, bias = pointers
    dx_step, dout_step, x_step = steps
    r = tl.arange(0, how.BLOCK_ROWS)
    b = tl.load(bias, mask=cols_inside, other=0.0).to(tl.float32)
    total = tl.zeros(dx.shape, tl.float32)
    for begin in range(0, rows_left, how.BLOCK_ROWS):
        inside = (begin + r < rows_left)[:, None] & cols_inside[None, :]
        d = tl.load(dout, mask=inside, other=0.0, eviction_policy=how.EVICT).to(tl.float32)
        z = tl.load(x, mask=inside, other=0.0, eviction_policy=how.EVICT).to(tl.float32) + b[None, :]
        _, slope = _activation_and_slope(z, how.ACT, how.PRECISE)
        gradient = d * slope
        tl.store(dx, gradient.to(dx.dtype.element_ty), mask=inside)
        # Outside there is nothing to add, but a slope there may be nan: 0 * nan would stick.
        total += tl.where(inside, gradient, 0.0)
        dx += dx_step
        dout += dout_step
        x += x_step
    tl.store(partials, tl.sum(total, axis=0), mask=cols_inside)
