"""AdamW's update, of one tensor or of all tensors in a table; and what goes before it: step counts, sums of squares.

Everything is elementwise over memory that is dense, so tensors are runs of elements, and there are no strides. Names:
``avg`` and ``sq`` are the moments (exp_avg, exp_avg_sq), ``master`` the fp32 copy of a parameter in 16 bits; ``out_x``
is where x goes, often x itself. ``w1 = 1 - beta1``, ``w2 = 1 - beta2``, ``decay = 1 - lr * weight_decay``, ``size`` is
lr over its bias correction, ``root`` the square root of the second moment's. Width: VEC elements are one
access, 16 bytes of fp32. The end of a run is masked in units of VEC, which keeps accesses wide whatever its length is;
the at most VEC - 1 elements beyond the last whole unit follow one by one.

A table has one row of ROW numbers per tensor, which stay; addresses of gradients are a column of their own, sent at
each step. Address 0: the tensor has no gradient this time, and is left alone.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

# 64-bit numbers per tensor in a table: param, exp_avg, exp_avg_sq, master, step, elements, 0, 0
ROW = tl.constexpr(8)

# Pointers; those of a master copy are used only where there is one.
Run = namedtuple(
    "Run",
    "out_param_ptr out_exp_avg_ptr out_exp_avg_sq_ptr out_master_ptr param_ptr grad_ptr exp_avg_ptr exp_avg_sq_ptr "
    "master_ptr",
)
Table = namedtuple("Table", "table_ptr grads_ptr chunks_ptr")
Hyper = namedtuple("Hyper", "lr weight_decay w1 beta2 w2 eps c1 c2")
Factors = namedtuple("Factors", "decay size root scale")


class How(NamedTuple):
    """Compiled in."""

    BLOCK: int
    VEC: int
    MASTER: bool
    MAXIMIZE: bool
    LR_ON_DEVICE: bool
    EVICT: str
    STEP_ON_DEVICE: bool = True
    PARAM: str = ""  # types behind a table's addresses
    GRAD: str = ""
    MOMENTS: str = ""


@triton.jit
def _one_minus_exp(x):
    """``1 - e^x`` in fp32 for x <= 0, to the last bit or two near 0 too, where 1 - 0.999^1 would lose 4 digits."""
    # Near 0 the series of e^x - 1, by Horner's rule.
    series = 1.0 + x / 10.0
    for n in tl.static_range(9, 1, -1):
        series = 1.0 + x / n * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def _corrections(step_ptr, c1, c2, ON_DEVICE: tl.constexpr):
    """Bias corrections ``1 - beta1^step`` and ``sqrt(1 - beta2^step)``: given, or from the betas' logarithms."""
    if ON_DEVICE:
        step = tl.maximum(tl.load(step_ptr).to(tl.float32), 1.0)  # a count below 1 would divide by 0
        return _one_minus_exp(step * c1), tl.sqrt_rn(_one_minus_exp(step * c2))
    else:
        return c1, c2


@triton.jit
def _update(run, inside, of, by, how, CLIP: tl.constexpr):
    """One AdamW update of the elements that the pointers are at: in fp32, each result rounded once, when stored."""
    # All loads before any store: a result may be its operand's memory.
    g = tl.load(run.grad_ptr, mask=inside, other=0.0, eviction_policy=how.EVICT).to(tl.float32)
    # The update is of the fp32 copy where there is one; the parameter is its rounding.
    if how.MASTER:
        p = tl.load(run.master_ptr, mask=inside, other=0.0, eviction_policy=how.EVICT)
    else:
        p = tl.load(run.param_ptr, mask=inside, other=0.0, eviction_policy=how.EVICT).to(tl.float32)
    m = tl.load(run.exp_avg_ptr, mask=inside, other=0.0, eviction_policy=how.EVICT).to(tl.float32)
    v = tl.load(run.exp_avg_sq_ptr, mask=inside, other=0.0, eviction_policy=how.EVICT).to(tl.float32)
    if CLIP:
        g = g * by.scale
    if how.MAXIMIZE:
        g = -g
    # Moments, weight decay, step; then all stores.
    m += of.w1 * (g - m)
    v = v * of.beta2 + (of.w2 * g) * g
    p = p * by.decay - by.size * (m / (tl.sqrt_rn(v) / by.root + of.eps))
    tl.store(run.out_exp_avg_ptr, m, mask=inside, eviction_policy=how.EVICT)
    tl.store(run.out_exp_avg_sq_ptr, v, mask=inside, eviction_policy=how.EVICT)
    tl.store(run.out_param_ptr, p, mask=inside, eviction_policy=how.EVICT)
    if how.MASTER:
        tl.store(run.out_master_ptr, p, mask=inside, eviction_policy=how.EVICT)


@triton.jit
def _from(run, i):
    """The elements ``i`` of a run."""
    return Run(*[pointer + i for pointer in run])


@triton.jit
def _chunk(run, left, of, by, how, CLIP: tl.constexpr):
    """Updates up to BLOCK elements from where the pointers point; ``left`` says how many there are."""
    # Whole units of VEC elements.
    i = tl.arange(0, how.BLOCK)
    _update(_from(run, i), i // how.VEC < left // how.VEC, of, by, how, CLIP)
    # Ragged tail: elements beyond the last whole unit.
    if how.VEC > 1:
        whole = left // how.VEC * how.VEC
        if whole < left:
            j = whole + tl.arange(0, how.VEC)
            _update(_from(run, j), j < left, of, by, how, CLIP)


@triton.jit
def adamw_step(run: Run, step_ptr, rate_ptr, elements, of: Hyper, how: How, DEPENDENT: tl.constexpr = False):
    """``p <- p (1 - lr wd) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)`` with the moments m and v of g.

    Grid: one block of BLOCK elements per program: all loads, the arithmetic in fp32, all stores.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, in the order of torch.optim.AdamW.
    """
    pdl_wait(DEPENDENT)
    # A learning rate and a step count on the device keep a captured graph valid.
    lr = of.lr
    if how.LR_ON_DEVICE:
        lr = tl.load(rate_ptr).to(tl.float32)
    bias1, root = _corrections(step_ptr, of.c1, of.c2, how.STEP_ON_DEVICE)
    begin = tl.program_id(0).to(tl.int64) * how.BLOCK
    run = _from(run, begin)
    left = tl.minimum(elements - begin, how.BLOCK).to(tl.int32)
    _chunk(run, left, of, Factors(1.0 - lr * of.weight_decay, lr / bias1, root, 1.0), how, False)


@triton.jit
def _typed_pointer(address, TYPE: tl.constexpr, VEC: tl.constexpr):
    """A pointer to elements of TYPE at ``address``, aligned to VEC of them."""
    kind: tl.constexpr = tl.dtype(TYPE)
    return tl.multiple_of(address.to(tl.pointer_type(kind)), kind.primitive_bitwidth // 8 * VEC)


@triton.jit
def _place(chunk, table, BLOCK: tl.constexpr):
    """Where ``chunk`` is: its tensor's row, its gradient's address, its first element, and how many elements it has."""
    tensor = tl.load(table.chunks_ptr + 2 * chunk).to(tl.int64)
    begin = tl.load(table.chunks_ptr + 2 * chunk + 1).to(tl.int64) * BLOCK
    row = table.table_ptr + tensor * ROW
    grad = tl.load(table.grads_ptr + tensor)
    left = tl.minimum(tl.load(row + 5) - begin, BLOCK).to(tl.int32)
    return row, grad, begin, tl.where(grad == 0, 0, left)


@triton.jit
def adamw_table(table: Table, rate_ptr, norm, max_norm, of: Hyper, how: How, DEPENDENT: tl.constexpr = False):
    """:func:`adamw_step` in place, of every tensor in a table that has a gradient.

    ``chunks``: for each program which tensor it works on and where it begins there, in blocks. Steps are on the device,
    one per tensor; c1 and c2 are the logarithms of the betas. ``norm``: the address of the gradients' norm, by which
    they are clipped to ``max_norm``, or 0.

    Grid: one chunk per program. As :func:`adamw_step`, behind two dependent loads of addresses that all programs share
    through the cache.
    """
    pdl_wait(DEPENDENT)
    # This program's chunk; VEC says how its addresses are aligned.
    row, gradient, begin, left = _place(tl.program_id(0).to(tl.int64), table, how.BLOCK)
    param = _typed_pointer(tl.load(row), how.PARAM, how.VEC) + begin
    grad = _typed_pointer(gradient, how.GRAD, how.VEC) + begin
    avg = _typed_pointer(tl.load(row + 1), how.MOMENTS, how.VEC) + begin
    sq = _typed_pointer(tl.load(row + 2), how.MOMENTS, how.VEC) + begin
    master = _typed_pointer(tl.load(row + 3), "fp32", how.VEC) + begin
    lr = of.lr
    if how.LR_ON_DEVICE:
        lr = tl.load(rate_ptr).to(tl.float32)
    # Clipping, as torch.nn.utils.clip_grad_norm_ does it. NaN is not above 1, and stays.
    scale = 1.0
    if norm != 0:
        scale = max_norm / (tl.load(norm.to(tl.pointer_type(tl.float32))) + 1e-6)
        scale = tl.where(scale > 1.0, 1.0, scale)
    # Each tensor has its own step count.
    step = tl.load(row + 4).to(tl.pointer_type(tl.float32))
    bias1, root = _corrections(step, of.c1, of.c2, True)
    run = Run(param, avg, sq, master, param, grad, avg, sq, master)
    _chunk(run, left, of, Factors(1.0 - lr * of.weight_decay, lr / bias1, root, scale), how, True)


@triton.jit
def adamw_squares(
    table: Table,
    sums_ptr,
    chunks,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    GRAD: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``sums[program]``: the sum of squares of the gradients in one run of the chunks, in fp32.

    Grid: as many programs as the caller has sums. Each adds up its run in order: the same bits each time. Neighbouring
    chunks are mostly of one tensor, whose row is then in the L1 cache.
    """
    pdl_wait(DEPENDENT)
    i, j = tl.arange(0, BLOCK), tl.arange(0, VEC)
    sums = tl.zeros((BLOCK,), tl.float32)
    tails = tl.zeros((VEC,), tl.float32)
    program = tl.program_id(0).to(tl.int64)
    run = tl.cdiv(chunks, tl.num_programs(0))
    # Unrolled, so that loads of four chunks are in flight at a time.
    for chunk in tl.range(program * run, tl.minimum(program * run + run, chunks), loop_unroll_factor=4):
        _row, address, begin, left = _place(chunk, table, BLOCK)
        grad = _typed_pointer(address, GRAD, VEC) + begin
        # Whole units of VEC elements, then those beyond the last one.
        g = tl.load(grad + i, mask=i // VEC < left // VEC, other=0.0).to(tl.float32)
        sums += g * g
        if VEC > 1:
            whole = left // VEC * VEC
            g = tl.load(grad + whole + j, mask=whole + j < left, other=0.0).to(tl.float32)
            tails += g * g
    tl.store(sums_ptr + program, tl.sum(sums, 0) + tl.sum(tails, 0))


@triton.jit
def adamw_count(table_ptr, grads_ptr, tensors, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False):
    """Adds 1 to the step count of every tensor that has a gradient. Grid: BLOCK tensors per program."""
    pdl_wait(DEPENDENT)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tensors
    there = tl.load(grads_ptr + i, mask=inside, other=0) != 0
    step = tl.load(table_ptr + i * ROW + 4, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    tl.store(step, tl.load(step, mask=there, other=0.0) + 1.0, mask=there)
