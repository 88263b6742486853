"""RMSNorm and LayerNorm, with or without a residual before them.

Operands are cubes of (rows, heads, cols); a matrix (NESTED=False) has no heads. A *tile* is BLOCK_ROWS rows at one
head. Where rows fit in registers (RESIDENT) a tile is as wide as a row, and every element is read once. Wider rows
are walked in chunks of BLOCK_COLS: once for the statistics, twice where they are centred, and once more for the
results, when the row is in the L2 cache.

Grid: one axis. A program takes one tile, or (STAGES > 0) stays and strides over the tiles: Triton then copies the
operands of the next STAGES - 1 tiles into shared memory while this one is reduced. With weights for each head
(PER_HEAD) the stride is a multiple of the heads, so that all tiles of a program have the same weights, which it loads
once.

Inside the kernels an operand is its pointer and strides. Weights and biases are contiguous: pointer, and the stride of
heads, 0 where all share them. Arithmetic is in fp32, results are rounded once, offsets are 64 bits wide. Masks: rows
and columns that do not exist are read as 0 and not stored.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait, prefetch_l2

FEW = tl.constexpr(128)  # programs that all SMs hold at once

Pointers = namedtuple("Pointers", "y_ptr u_ptr x_ptr residual_ptr weight_ptr bias_ptr", defaults=6 * (0,))
Sizes = namedtuple("Sizes", "rows heads cols")
Steps = namedtuple("Steps", "row head col", defaults=3 * (0,))
Numbers = namedtuple("Numbers", "eps weight_offset", defaults=(0.0,))

Cube = namedtuple("Cube", "ptr by")
Weight = namedtuple("Weight", "ptr head")
Operands = namedtuple("Operands", "y u x residual weight bias")  # without a residual there is no u


class Strides(NamedTuple):
    """Strides of the operands, in elements."""

    y: Steps = Steps()
    u: Steps = Steps()
    x: Steps = Steps()
    residual: Steps = Steps()


class How(NamedTuple):
    """Compiled in: which operands there are, what is computed, and a program's tile."""

    WEIGHT: bool
    NESTED: bool
    PER_HEAD: bool
    BLOCK_ROWS: int
    BLOCK_COLS: int
    RESIDENT: bool
    STAGES: int
    SHIFTED: bool = False  # weights are offset
    ROUND_TWICE: bool = False
    BIAS: bool = False
    RESIDUAL: bool = False
    CENTRED: bool = False


@triton.jit
def _place(index, heads, BLOCK_ROWS: tl.constexpr, NESTED: tl.constexpr):
    """First row and head of a tile."""
    if NESTED:
        return index // heads * BLOCK_ROWS, index % heads
    else:
        return index * BLOCK_ROWS, index * 0


@triton.jit
def _prefetch(ptr, steps, weight_ptr, n, how, WEIGHT: tl.constexpr):
    """Prefetches the first row of this program's tile, and the weight, into the L2 where programs are few.

    With more programs the prefetch would only repeat the loads that follow. docs/notes/norms.md#prefetch
    """
    # Only rows whose columns are contiguous: a bulk prefetch is of one run of bytes.
    if not how.NESTED:  # noqa: SIM102  known when compiled
        if steps.col == 1:  # noqa: SIM102
            if tl.num_programs(0) <= FEW:
                prefetch_l2(ptr + tl.program_id(0).to(tl.int64) * how.BLOCK_ROWS * steps.row, n.cols)
                if WEIGHT:
                    prefetch_l2(weight_ptr, n.cols)


@triton.jit
def _at(operand, row, head, r, c):
    """Pointers to the columns ``c`` of the rows ``row + r`` at ``head``. Shape (height of r, width of c)."""
    start = operand.ptr + row * operand.by.row + head * operand.by.head
    return start + r.to(tl.int64)[:, None] * operand.by.row + c.to(tl.int64)[None, :] * operand.by.col


@triton.jit
def _affine(operand, head, c, inside, PRESENT: tl.constexpr):
    """A weight or a bias as it is stored, in half the registers of fp32. Shape (1, width of c)."""
    if PRESENT:
        return tl.load(operand.ptr + head * operand.head + c.to(tl.int64), mask=inside, other=0.0)[None, :]
    else:
        return 0.0


@triton.jit
def _summed(given, how, row, head, r, c, inside, EVICT: tl.constexpr):
    """``x``, or ``x + residual`` rounded to their type: what is normalised is what is stored. In fp32."""
    value = tl.load(_at(given.x, row, head, r, c), mask=inside, other=0.0, eviction_policy=EVICT)
    if how.RESIDUAL:
        other = tl.load(_at(given.residual, row, head, r, c), mask=inside, other=0.0, eviction_policy=EVICT)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
    return value.to(tl.float32)


@triton.jit
def _store(operand, value, row, head, r, c, inside):
    tl.store(_at(operand, row, head, r, c), value.to(operand.ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale(x, rstd, weight, bias, given, of, how):
    """Normalised values times the weight, plus the bias."""
    y = x * rstd[:, None]
    # As modules do that normalise in fp32 and multiply in the operands' type.
    if how.ROUND_TWICE:
        y = y.to(given.y.ptr.dtype.element_ty).to(tl.float32)
    if how.WEIGHT:
        w = weight.to(tl.float32)
        if how.SHIFTED:
            w += of.weight_offset
        y = y * w
    if how.BIAS:
        y = y + bias.to(tl.float32)
    return y


@triton.jit
def _resident(given, n, of, how, affine, row, head):
    """One tile that holds whole rows."""
    r = tl.arange(0, how.BLOCK_ROWS)
    c = tl.arange(0, how.BLOCK_COLS)
    inside = (r < n.rows - row)[:, None] & (c < n.cols)[None, :]
    # One read of each element; the sum with the residual is a result of its own.
    value = _summed(given, how, row, head, r, c, inside, "")
    if how.RESIDUAL:
        _store(given.u, value, row, head, r, c, inside)
    # Statistics; centred columns that do not exist are put back to 0.
    if how.CENTRED:
        value = tl.where(inside, value - (tl.sum(value, axis=1) / n.cols)[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(value * value, axis=1) / n.cols + of.eps)
    _store(given.y, _scale(value, rstd, affine[0], affine[1], given, of, how), row, head, r, c, inside)


@triton.jit
def _in_chunks(given, n, of, how, row, head):
    """One row, walked in chunks. A result may be an operand itself: only the last pass writes, behind what it reads."""
    r = tl.arange(0, 1)
    # First pass, where centred: the mean.
    mean = tl.zeros([1], tl.float32)
    if how.CENTRED:
        total = tl.zeros([1, how.BLOCK_COLS], tl.float32)
        for start in range(0, n.cols, how.BLOCK_COLS):
            c = start + tl.arange(0, how.BLOCK_COLS)
            inside = (c < n.cols)[None, :]
            total += _summed(given, how, row, head, r, c, inside, "evict_last")
        mean = tl.sum(total, axis=1) / n.cols
    # Next pass: squares. The row stays in the L2 cache for the last one.
    squares = tl.zeros([1, how.BLOCK_COLS], tl.float32)
    for start in range(0, n.cols, how.BLOCK_COLS):
        c = start + tl.arange(0, how.BLOCK_COLS)
        inside = (c < n.cols)[None, :]
        value = _summed(given, how, row, head, r, c, inside, "evict_last")
        if how.CENTRED:
            value = tl.where(inside, value - mean[:, None], 0.0)
        squares += value * value
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / n.cols + of.eps)
    # Last pass: results.
    for start in range(0, n.cols, how.BLOCK_COLS):
        c = start + tl.arange(0, how.BLOCK_COLS)
        inside = (c < n.cols)[None, :]
        value = _summed(given, how, row, head, r, c, inside, "evict_first")
        if how.RESIDUAL:
            _store(given.u, value, row, head, r, c, inside)
        # Weights are read again with each chunk, unlike those of whole rows.
        w = _affine(given.weight, head, c, c < n.cols, how.WEIGHT)
        b = _affine(given.bias, head, c, c < n.cols, how.BIAS)
        _store(given.y, _scale(value - mean[:, None], rstd, w, b, given, of, how), row, head, r, c, inside)


@triton.jit
def _forward(at, n, by, of, how):
    """This program's tiles."""
    head_step = n.cols if how.PER_HEAD else 0
    given = Operands(
        Cube(at.y_ptr, by.y),
        Cube(at.u_ptr, by.u),
        Cube(at.x_ptr, by.x),
        Cube(at.residual_ptr, by.residual),
        Weight(at.weight_ptr, head_step),
        Weight(at.bias_ptr, head_step),
    )
    if how.RESIDENT:
        row, head = _place(tl.program_id(0).to(tl.int64), n.heads, how.BLOCK_ROWS, how.NESTED)
        # Weights are loaded ahead of the first row, so that they arrive together.
        c = tl.arange(0, how.BLOCK_COLS)
        w = _affine(given.weight, head, c, c < n.cols, how.WEIGHT)
        b = _affine(given.bias, head, c, c < n.cols, how.BIAS)
        if how.STAGES > 0:
            # A persistent program: tiles a grid apart, the next ones being copied behind this one.
            first = tl.program_id(0).to(tl.int64)
            step = tl.num_programs(0).to(tl.int64)
            for index in tl.range(first, tl.cdiv(n.rows, how.BLOCK_ROWS) * n.heads, step, num_stages=how.STAGES):
                row, head = _place(index, n.heads, how.BLOCK_ROWS, how.NESTED)
                _resident(given, n, of, how, (w, b), row, head)
        else:
            # One tile for each program.
            _resident(given, n, of, how, (w, b), row, head)
    else:
        # One row, chunk by chunk.
        row, head = _place(tl.program_id(0).to(tl.int64), n.heads, how.BLOCK_ROWS, how.NESTED)
        _in_chunks(given, n, of, how, row, head)


@triton.jit
def rms_norm(at: Pointers, n: Sizes, by: Strides, of: Numbers, how: How, DEPENDENT: tl.constexpr = False):
    """``y = x * rstd * (weight + weight_offset)`` with ``rstd = 1 / sqrt(mean(x^2) + eps)``.

    Without SHIFTED the offset is 0. ROUND_TWICE rounds ``x * rstd`` before the product, as Hugging Face's modules do.
    """
    # Ahead of the wait only prefetches are allowed: the L2 cache is coherent with the kernel ahead.
    if DEPENDENT:
        _prefetch(at.x_ptr, by.x, at.weight_ptr, n, how, how.WEIGHT)
    pdl_wait(DEPENDENT)
    _forward(at, n, by, of, how)


@triton.jit
def add_rms_norm(at: Pointers, n: Sizes, by: Strides, of: Numbers, how: How, DEPENDENT: tl.constexpr = False):
    """``u = x + residual``, rounded, and ``y`` the RMSNorm of that ``u``."""
    # Ahead of the wait only prefetches are allowed: the L2 cache is coherent with the kernel ahead.
    if DEPENDENT:
        _prefetch(at.x_ptr, by.x, at.weight_ptr, n, how, how.WEIGHT)
        _prefetch(at.residual_ptr, by.residual, at.weight_ptr, n, how, False)
    pdl_wait(DEPENDENT)
    _forward(at, n, by, of, how)


@triton.jit
def layer_norm(at: Pointers, n: Sizes, by: Strides, of: Numbers, how: How, DEPENDENT: tl.constexpr = False):
    """``y = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(mean((x - mean)^2) + eps)``."""
    pdl_wait(DEPENDENT)
    _forward(at, n, by, of, how)
