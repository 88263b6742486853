"""SwiGLU's elementwise half, ``out = silu(gate) * up``, and its gradient.

Both kernels walk a (rows, cols) matrix in tiles of BLOCK_ROWS x BLOCK_COLS, one tile per program; programs
run through a row's tiles first. Every operand has its own two strides. What the op can promise it passes as
a constexpr: element strides of 1, and for operands that are dense throughout (DENSE) one single row of
``cols`` elements.

Width: VEC elements are one access. A tile's edge is masked in units of VEC, which keeps every access wide
whatever ``cols`` is; the at most VEC - 1 elements beyond the last whole unit of a row follow one by one.
"""

import triton
import triton.language as tl


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
def _tile(rows, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, DENSE: tl.constexpr):
    """This program's tile: its first row and column, and how many of each are inside the matrix.

    A grid's first axis ends at 2^31 - 1, so programs are counted over two; surplus ones find nothing left.
    """
    pid = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if DENSE:
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


@triton.jit
def _silu_mul(out, gate, up, inside, PRECISE: tl.constexpr, EVICT: tl.constexpr):
    g = tl.load(gate, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
    u = tl.load(up, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
    y = _over_one_plus_exp(g, g, PRECISE) * u
    tl.store(out, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul(
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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    VEC: tl.constexpr,
    DENSE: tl.constexpr,
    PRECISE: tl.constexpr,
    EVICT: tl.constexpr,
):
    """``out = silu(gate) * up``; fp32 arithmetic, one rounding.

    Schedule: one program per tile: load both operands, compute in registers, store.
    """
    row, col, rows_left, cols_left = _tile(rows, cols, BLOCK_ROWS, BLOCK_COLS, DENSE)
    r = tl.arange(0, BLOCK_ROWS)
    c = tl.arange(0, BLOCK_COLS)
    _silu_mul(
        _at(out_ptr, row, col, out_row, out_col, r, c),
        _at(gate_ptr, row, col, gate_row, gate_col, r, c),
        _at(up_ptr, row, col, up_row, up_col, r, c),
        (r < rows_left)[:, None] & (c // VEC < cols_left // VEC)[None, :],
        PRECISE,
        EVICT,
    )
    if VEC > 1:
        whole = cols_left // VEC * VEC
        if whole < cols_left:
            last = whole + tl.arange(0, VEC)
            _silu_mul(
                _at(out_ptr, row, col, out_row, out_col, r, last),
                _at(gate_ptr, row, col, gate_row, gate_col, r, last),
                _at(up_ptr, row, col, up_row, up_col, r, last),
                (r < rows_left)[:, None] & (last < cols_left)[None, :],
                PRECISE,
                EVICT,
            )


@triton.jit
def _silu_mul_backward(dgate, dup, dout, gate, up, inside, PRECISE: tl.constexpr, EVICT: tl.constexpr):
    d = tl.load(dout, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
    g = tl.load(gate, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
    u = tl.load(up, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
    s = _over_one_plus_exp(1.0, g, PRECISE)
    # 1 + g * (1 - s), which is 0 near g = -1.278. There 1 + g is exact and 1 - s is not: fp32, 16M elements, worst
    # error 1.09 -> 0.44 of what verify.py grants (modelled on a CPU, 2026-11-21). For g > 0 it is the other way round.
    slope = s * tl.where(g < 0.0, tl.fma(-g, s, 1.0 + g), tl.fma(g, 1.0 - s, 1.0))
    tl.store(dgate, (d * u * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup, (d * (g * s)).to(dup.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_backward(
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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    VEC: tl.constexpr,
    DENSE: tl.constexpr,
    PRECISE: tl.constexpr,
    EVICT: tl.constexpr,
):
    """``dgate = dout * up * s * (1 + gate * (1 - s))`` and ``dup = dout * gate * s``, with s = sigmoid(gate).

    Schedule: as :func:`silu_mul`. The activation is recomputed: nothing of the forward pass but its inputs
    is read. fp32 arithmetic, one rounding per gradient.
    """
    row, col, rows_left, cols_left = _tile(rows, cols, BLOCK_ROWS, BLOCK_COLS, DENSE)
    r = tl.arange(0, BLOCK_ROWS)
    c = tl.arange(0, BLOCK_COLS)
    _silu_mul_backward(
        _at(dgate_ptr, row, col, dgate_row, dgate_col, r, c),
        _at(dup_ptr, row, col, dup_row, dup_col, r, c),
        _at(dout_ptr, row, col, dout_row, dout_col, r, c),
        _at(gate_ptr, row, col, gate_row, gate_col, r, c),
        _at(up_ptr, row, col, up_row, up_col, r, c),
        (r < rows_left)[:, None] & (c // VEC < cols_left // VEC)[None, :],
        PRECISE,
        EVICT,
    )
    if VEC > 1:
        whole = cols_left // VEC * VEC
        if whole < cols_left:
            last = whole + tl.arange(0, VEC)
            _silu_mul_backward(
                _at(dgate_ptr, row, col, dgate_row, dgate_col, r, last),
                _at(dup_ptr, row, col, dup_row, dup_col, r, last),
                _at(dout_ptr, row, col, dout_row, dout_col, r, last),
                _at(gate_ptr, row, col, gate_row, gate_col, r, last),
                _at(up_ptr, row, col, up_row, up_col, r, last),
                (r < rows_left)[:, None] & (last < cols_left)[None, :],
                PRECISE,
                EVICT,
            )
