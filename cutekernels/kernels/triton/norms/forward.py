"""RMSNorm and LayerNorm, with or without a residual before them.

Operands are cubes of (rows, heads, cols); a matrix (NESTED=False) has no heads. A *tile* is BLOCK_ROWS rows at one
head. Where rows fit in registers (RESIDENT) a tile is as wide as a row, and every element is read once. Wider rows
are walked in chunks of BLOCK_COLS: once for the statistics, twice where they are centred, and once more for the
results, when the row is in the L2 cache.

Grid: one axis. A program takes one tile, or (STAGES > 0) stays and strides over the tiles: Triton then copies the
operands of the next STAGES - 1 tiles into shared memory while this one is reduced. With weights for each head
(PER_HEAD) the stride is a multiple of the heads, so that all tiles of a program have the same weights, which it loads
once.

Inside the kernels an operand is a tuple: pointer, then the strides of rows, heads and columns. Weights and biases are
contiguous: pointer, then the stride of heads, 0 where all share them. Arithmetic is in fp32, results are rounded once,
offsets are 64 bits wide. Masks: rows and columns that do not exist are read as 0 and not stored.
"""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait, prefetch_l2

FEW = tl.constexpr(128)  # programs that all SMs hold at once


@triton.jit
def _place(index, heads, BLOCK_ROWS: tl.constexpr, NESTED: tl.constexpr):
    """First row and head of a tile."""
    if NESTED:
        return index // heads * BLOCK_ROWS, index % heads
    else:
        return index * BLOCK_ROWS, index * 0


@triton.jit
def _prefetch(operand, weight, cols, WEIGHT: tl.constexpr, NESTED: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Prefetches the first row of this program's tile, and the weight, into the L2 where programs are few.

    With more programs the prefetch would only repeat the loads that follow. docs/notes/norms.md#prefetch
    """
    # Only rows whose columns are contiguous: a bulk prefetch is of one run of bytes.
    if not NESTED:  # noqa: SIM102  known when compiled
        if operand[3] == 1:  # noqa: SIM102
            if tl.num_programs(0) <= FEW:
                prefetch_l2(operand[0] + tl.program_id(0).to(tl.int64) * BLOCK_ROWS * operand[1], cols)
                if WEIGHT:
                    prefetch_l2(weight[0], cols)


@triton.jit
def _at(operand, row, head, r, c):
    """Pointers to the columns ``c`` of the rows ``row + r`` at ``head``. Shape (height of r, width of c)."""
    start = operand[0] + row * operand[1] + head * operand[2]
    return start + r.to(tl.int64)[:, None] * operand[1] + c.to(tl.int64)[None, :] * operand[3]


@triton.jit
def _affine(operand, head, c, inside, PRESENT: tl.constexpr):
    """A weight or a bias as it is stored, in half the registers of fp32. Shape (1, width of c)."""
    if PRESENT:
        at = operand[0] + head * operand[1] + c.to(tl.int64)
        return tl.load(at, mask=inside, other=0.0)[None, :]
    else:
        return 0.0


@triton.jit
def _summed(x, residual, row, head, r, c, inside, RESIDUAL: tl.constexpr, EVICT: tl.constexpr):
    """``x``, or ``x + residual`` rounded to their type: what is normalised is what is stored. In fp32."""
    value = tl.load(_at(x, row, head, r, c), mask=inside, other=0.0, eviction_policy=EVICT)
    if RESIDUAL:
        other = tl.load(_at(residual, row, head, r, c), mask=inside, other=0.0, eviction_policy=EVICT)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
    return value.to(tl.float32)


@triton.jit
def _store(operand, value, row, head, r, c, inside):
    tl.store(_at(operand, row, head, r, c), value.to(operand[0].dtype.element_ty), mask=inside)


@triton.jit
def _scaled(
    x,
    rstd,
    weight,
    offset,
    bias,
    result,
    WEIGHT: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIAS: tl.constexpr,
    ROUND_TWICE: tl.constexpr,
):
    """Normalised values times the weight, plus the bias."""
    y = x * rstd[:, None]
    # As modules do that normalise in fp32 and multiply in the operands' type.
    if ROUND_TWICE:
        y = y.to(result[0].dtype.element_ty).to(tl.float32)
    if WEIGHT:
        w = weight.to(tl.float32)
        if SHIFTED:
            w += offset
        y = y * w
    if BIAS:
        y = y + bias.to(tl.float32)
    return y


@triton.jit
def _resident(
    y,
    u,
    x,
    residual,
    weight,
    bias,
    row,
    head,
    rows,
    cols,
    eps,
    weight_offset,
    WEIGHT: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND_TWICE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One tile that holds whole rows."""
    r = tl.arange(0, BLOCK_ROWS)
    c = tl.arange(0, BLOCK_COLS)
    inside = (r < rows - row)[:, None] & (c < cols)[None, :]
    # One read of each element; the sum with the residual is a result of its own.
    value = _summed(x, residual, row, head, r, c, inside, RESIDUAL, "")
    if RESIDUAL:
        _store(u, value, row, head, r, c, inside)
    # Statistics; centred columns that do not exist are put back to 0.
    if CENTRED:
        value = tl.where(inside, value - (tl.sum(value, axis=1) / cols)[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(value * value, axis=1) / cols + eps)
    scaled = _scaled(value, rstd, weight, weight_offset, bias, y, WEIGHT, SHIFTED, BIAS, ROUND_TWICE)
    _store(y, scaled, row, head, r, c, inside)


@triton.jit
def _chunked(
    y,
    u,
    x,
    residual,
    weight,
    bias,
    row,
    head,
    cols,
    eps,
    weight_offset,
    WEIGHT: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND_TWICE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One row, walked in chunks. A result may be an operand itself: only the last pass writes, behind what it reads."""
    r = tl.arange(0, 1)
    # First pass, where centred: the mean.
    mean = tl.zeros([1], tl.float32)
    if CENTRED:
        total = tl.zeros([1, BLOCK_COLS], tl.float32)
        for start in range(0, cols, BLOCK_COLS):
            c = start + tl.arange(0, BLOCK_COLS)
            total += _summed(x, residual, row, head, r, c, (c < cols)[None, :], RESIDUAL, "evict_last")
        mean = tl.sum(total, axis=1) / cols
    # Next pass: squares. The row stays in the L2 cache for the last one.
    squares = tl.zeros([1, BLOCK_COLS], tl.float32)
    for start in range(0, cols, BLOCK_COLS):
        c = start + tl.arange(0, BLOCK_COLS)
        inside = (c < cols)[None, :]
        value = _summed(x, residual, row, head, r, c, inside, RESIDUAL, "evict_last")
        if CENTRED:
            value = tl.where(inside, value - mean[:, None], 0.0)
        squares += value * value
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / cols + eps)
    # Last pass: results.
    for start in range(0, cols, BLOCK_COLS):
        c = start + tl.arange(0, BLOCK_COLS)
        inside = (c < cols)[None, :]
        value = _summed(x, residual, row, head, r, c, inside, RESIDUAL, "evict_first")
        if RESIDUAL:
            _store(u, value, row, head, r, c, inside)
        # Weights are read again with each chunk, unlike those of whole rows.
        w = _affine(weight, head, c, c < cols, WEIGHT)
        b = _affine(bias, head, c, c < cols, BIAS)
        scaled = _scaled(value - mean[:, None], rstd, w, weight_offset, b, y, WEIGHT, SHIFTED, BIAS, ROUND_TWICE)
        _store(y, scaled, row, head, r, c, inside)


@triton.jit
def _forward(
    y,
    u,
    x,
    residual,
    weight,
    bias,
    rows,
    heads,
    cols,
    eps,
    weight_offset,
    WEIGHT: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND_TWICE: tl.constexpr,
    NESTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    RESIDENT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """This program's tiles."""
    if RESIDENT:
        row, head = _place(tl.program_id(0).to(tl.int64), heads, BLOCK_ROWS, NESTED)
        # Weights are loaded ahead of the first row, so that they arrive together.
        c = tl.arange(0, BLOCK_COLS)
        w = _affine(weight, head, c, c < cols, WEIGHT)
        b = _affine(bias, head, c, c < cols, BIAS)
        if STAGES > 0:
            # A persistent program: tiles a grid apart, the next ones being copied behind this one.
            first = tl.program_id(0).to(tl.int64)
            step = tl.num_programs(0).to(tl.int64)
            for index in tl.range(first, tl.cdiv(rows, BLOCK_ROWS) * heads, step, num_stages=STAGES):
                row, head = _place(index, heads, BLOCK_ROWS, NESTED)
                _resident(
                    y,
                    u,
                    x,
                    residual,
                    w,
                    b,
                    row,
                    head,
                    rows,
                    cols,
                    eps,
                    weight_offset,
                    WEIGHT,
                    SHIFTED,
                    BIAS,
                    RESIDUAL,
                    CENTRED,
                    ROUND_TWICE,
                    BLOCK_ROWS,
                    BLOCK_COLS,
                )
        else:
            # One tile for each program.
            _resident(
                y,
                u,
                x,
                residual,
                w,
                b,
                row,
                head,
                rows,
                cols,
                eps,
                weight_offset,
                WEIGHT,
                SHIFTED,
                BIAS,
                RESIDUAL,
                CENTRED,
                ROUND_TWICE,
                BLOCK_ROWS,
                BLOCK_COLS,
            )
    else:
        # One row, chunk by chunk.
        row, head = _place(tl.program_id(0).to(tl.int64), heads, BLOCK_ROWS, NESTED)
        _chunked(
            y,
            u,
            x,
            residual,
            weight,
            bias,
            row,
            head,
            cols,
            eps,
            weight_offset,
            WEIGHT,
            SHIFTED,
            BIAS,
            RESIDUAL,
            CENTRED,
            ROUND_TWICE,
            BLOCK_COLS,
        )


@triton.jit
def rms_norm(
    y_ptr,
    x_ptr,
    weight_ptr,
    rows,
    heads,
    cols,
    y_row,
    y_head,
    y_col,
    x_row,
    x_head,
    x_col,
    eps,
    weight_offset,
    WEIGHT: tl.constexpr,
    SHIFTED: tl.constexpr,
    ROUND_TWICE: tl.constexpr,
    NESTED: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    RESIDENT: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``y = x * rstd * (weight + weight_offset)`` with ``rstd = 1 / sqrt(mean(x^2) + eps)``.

    Without SHIFTED the offset is 0. ROUND_TWICE rounds ``x * rstd`` before the product, as Hugging Face's modules do.
    """
    x = (x_ptr, x_row, x_head, x_col)
    y = (y_ptr, y_row, y_head, y_col)
    weight = (weight_ptr, cols if PER_HEAD else 0)
    # Ahead of the wait only prefetches are allowed: the L2 cache is coherent with the kernel ahead.
    if DEPENDENT:
        _prefetch(x, weight, cols, WEIGHT, NESTED, BLOCK_ROWS)
    pdl_wait(DEPENDENT)
    # No residual, no bias, not centred.
    _forward(
        y,
        y,
        x,
        x,
        weight,
        weight,
        rows,
        heads,
        cols,
        eps,
        weight_offset,
        WEIGHT,
        SHIFTED,
        False,
        False,
        False,
        ROUND_TWICE,
        NESTED,
        BLOCK_ROWS,
        BLOCK_COLS,
        RESIDENT,
        STAGES,
    )


@triton.jit
def add_rms_norm(
    y_ptr,
    u_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    rows,
    heads,
    cols,
    y_row,
    y_head,
    y_col,
    u_row,
    u_head,
    u_col,
    x_row,
    x_head,
    x_col,
    residual_row,
    residual_head,
    residual_col,
    eps,
    weight_offset,
    WEIGHT: tl.constexpr,
    SHIFTED: tl.constexpr,
    ROUND_TWICE: tl.constexpr,
    NESTED: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    RESIDENT: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``u = x + residual``, rounded, and ``y`` the RMSNorm of that ``u``."""
    x = (x_ptr, x_row, x_head, x_col)
    residual = (residual_ptr, residual_row, residual_head, residual_col)
    y = (y_ptr, y_row, y_head, y_col)
    u = (u_ptr, u_row, u_head, u_col)
    weight = (weight_ptr, cols if PER_HEAD else 0)
    # Ahead of the wait only prefetches are allowed: the L2 cache is coherent with the kernel ahead.
    if DEPENDENT:
        _prefetch(x, weight, cols, WEIGHT, NESTED, BLOCK_ROWS)
        _prefetch(residual, weight, cols, False, NESTED, BLOCK_ROWS)
    pdl_wait(DEPENDENT)
    # With a residual, whose sum goes to u; no bias, not centred.
    _forward(
        y,
        u,
        x,
        residual,
        weight,
        weight,
        rows,
        heads,
        cols,
        eps,
        weight_offset,
        WEIGHT,
        SHIFTED,
        False,
        True,
        False,
        ROUND_TWICE,
        NESTED,
        BLOCK_ROWS,
        BLOCK_COLS,
        RESIDENT,
        STAGES,
    )


@triton.jit
def layer_norm(
    y_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    rows,
    heads,
    cols,
    y_row,
    y_head,
    y_col,
    x_row,
    x_head,
    x_col,
    eps,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    NESTED: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    RESIDENT: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``y = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(mean((x - mean)^2) + eps)``."""
    pdl_wait(DEPENDENT)
    x = (x_ptr, x_row, x_head, x_col)
    y = (y_ptr, y_row, y_head, y_col)
    weight = (weight_ptr, cols if PER_HEAD else 0)
    bias = (bias_ptr, cols if PER_HEAD else 0)
    # Centred, with a bias; no residual.
    _forward(
        y,
        y,
        x,
        x,
        weight,
        bias,
        rows,
        heads,
        cols,
        eps,
        0.0,
        WEIGHT,
        False,
        BIAS,
        False,
        True,
        False,
        NESTED,
        BLOCK_ROWS,
        BLOCK_COLS,
        RESIDENT,
        STAGES,
    )
