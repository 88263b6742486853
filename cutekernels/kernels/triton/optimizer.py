"""AdamW's update, of one tensor or of all tensors in a table.

Everything is elementwise over memory that is dense, so tensors are runs of elements, and there are no strides. Names:
``avg`` and ``sq`` are the moments (exp_avg, exp_avg_sq), ``master`` the fp32 copy of a parameter in 16 bits; ``out_x``
is where x goes, often x itself. ``w1 = 1 - beta1``, ``w2 = 1 - beta2``, ``decay = 1 - lr * weight_decay``, ``size`` is
lr over its bias correction, ``root`` the square root of the second moment's. Width: VEC elements are one
access, 16 bytes of fp32. The end of a run is masked in units of VEC, which keeps accesses wide whatever its length is;
the at most VEC - 1 elements beyond the last whole unit follow one by one.
"""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait

ROW = tl.constexpr(
    8
)  # 64-bit numbers per tensor in a table: param, grad, exp_avg, exp_avg_sq, master, step, elements, 0


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
def _update(
    out_param,
    out_avg,
    out_sq,
    out_master,
    param,
    grad,
    avg,
    sq,
    master,
    inside,
    decay,
    w1,
    beta2,
    w2,
    eps,
    size,
    root,
    MASTER: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    EVICT: tl.constexpr,
):
    """One AdamW update of the elements that the pointers are at."""
    # All loads before any store: a result may be its operand's memory.
    g = tl.load(grad, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
    # The update is of the fp32 copy where there is one; the parameter is its rounding.
    if MASTER:
        p = tl.load(master, mask=inside, other=0.0, eviction_policy=EVICT)
    else:
        p = tl.load(param, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
    m = tl.load(avg, mask=inside, other=0.0, eviction_policy=EVICT)
    v = tl.load(sq, mask=inside, other=0.0, eviction_policy=EVICT)
    if MAXIMIZE:
        g = -g
    # Moments, weight decay, step; then all stores.
    m += w1 * (g - m)
    v = v * beta2 + (w2 * g) * g
    p = p * decay - size * (m / (tl.sqrt_rn(v) / root + eps))
    tl.store(out_avg, m, mask=inside, eviction_policy=EVICT)
    tl.store(out_sq, v, mask=inside, eviction_policy=EVICT)
    tl.store(out_param, p.to(out_param.dtype.element_ty), mask=inside, eviction_policy=EVICT)
    if MASTER:
        tl.store(out_master, p, mask=inside, eviction_policy=EVICT)


@triton.jit
def _chunk(
    out_param,
    out_avg,
    out_sq,
    out_master,
    param,
    grad,
    avg,
    sq,
    master,
    left,
    decay,
    w1,
    beta2,
    w2,
    eps,
    size,
    root,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    MASTER: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Updates up to BLOCK elements from where the pointers point; ``left`` says how many there are."""
    # Whole units of VEC elements.
    i = tl.arange(0, BLOCK)
    _update(
        out_param + i,
        out_avg + i,
        out_sq + i,
        out_master + i,
        param + i,
        grad + i,
        avg + i,
        sq + i,
        master + i,
        i // VEC < left // VEC,
        decay,
        w1,
        beta2,
        w2,
        eps,
        size,
        root,
        MASTER,
        MAXIMIZE,
        EVICT,
    )
    # Ragged tail: elements beyond the last whole unit.
    if VEC > 1:
        whole = left // VEC * VEC
        if whole < left:
            j = whole + tl.arange(0, VEC)
            _update(
                out_param + j,
                out_avg + j,
                out_sq + j,
                out_master + j,
                param + j,
                grad + j,
                avg + j,
                sq + j,
                master + j,
                j < left,
                decay,
                w1,
                beta2,
                w2,
                eps,
                size,
                root,
                MASTER,
                MAXIMIZE,
                EVICT,
            )


@triton.jit
def adamw_step(
    out_param_ptr,
    out_exp_avg_ptr,
    out_exp_avg_sq_ptr,
    out_master_ptr,
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    master_ptr,
    step_ptr,
    lr_ptr,
    elements,
    lr,
    weight_decay,
    w1,
    beta2,
    w2,
    eps,
    c1,
    c2,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    MASTER: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    EVICT: tl.constexpr,
    STEP_ON_DEVICE: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """``p <- p (1 - lr wd) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)`` with the moments m and v of g.

    Grid: one block of BLOCK elements per program: all loads, the arithmetic in fp32, all stores.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, in the order of torch.optim.AdamW.
    """
    pdl_wait(DEPENDENT)
    # A learning rate and a step count on the device keep a captured graph valid.
    if LR_ON_DEVICE:
        lr = tl.load(lr_ptr).to(tl.float32)
    bias1, root = _corrections(step_ptr, c1, c2, STEP_ON_DEVICE)
    # Without a master copy its pointers are never used; the parameter's stand in.
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    master = param_ptr
    out_master = out_param_ptr
    if MASTER:
        master = master_ptr
        out_master = out_master_ptr
    _chunk(
        out_param_ptr + begin,
        out_exp_avg_ptr + begin,
        out_exp_avg_sq_ptr + begin,
        out_master + begin,
        param_ptr + begin,
        grad_ptr + begin,
        exp_avg_ptr + begin,
        exp_avg_sq_ptr + begin,
        master + begin,
        tl.minimum(elements - begin, BLOCK).to(tl.int32),
        1.0 - lr * weight_decay,
        w1,
        beta2,
        w2,
        eps,
        lr / bias1,
        root,
        BLOCK,
        VEC,
        MASTER,
        MAXIMIZE,
        EVICT,
    )


@triton.jit
def _typed(address, TYPE: tl.constexpr, VEC: tl.constexpr):
    """A pointer to elements of TYPE at ``address``, aligned to VEC of them."""
    if TYPE == "bf16":
        return tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 2 * VEC)
    elif TYPE == "fp16":
        return tl.multiple_of(address.to(tl.pointer_type(tl.float16)), 2 * VEC)
    else:
        return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 4 * VEC)


@triton.jit
def adamw_table(
    table_ptr,
    chunks_ptr,
    lr_ptr,
    lr,
    weight_decay,
    w1,
    beta2,
    w2,
    eps,
    c1,
    c2,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    MASTER: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    EVICT: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """:func:`adamw_step` in place, of every tensor in a table.

    ``table``: ROW numbers a tensor. ``chunks``: for each program which tensor it works on and where it begins there,
    in blocks. Steps are on the device, one per tensor; c1 and c2 are the logarithms of the betas.

    Grid: one chunk per program. As :func:`adamw_step`, behind two dependent loads of addresses that all programs share
    through the cache.
    """
    pdl_wait(DEPENDENT)
    # This program's chunk: which tensor, and from which element on.
    pid = tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunks_ptr + 2 * pid).to(tl.int64)
    begin = tl.load(chunks_ptr + 2 * pid + 1).to(tl.int64) * BLOCK
    # The tensor's addresses; VEC says how they are aligned.
    row = table_ptr + tensor * ROW
    param = _typed(tl.load(row), PARAM, VEC) + begin
    grad = _typed(tl.load(row + 1), GRAD, VEC) + begin
    avg = _typed(tl.load(row + 2), "fp32", VEC) + begin
    sq = _typed(tl.load(row + 3), "fp32", VEC) + begin
    master = param
    if MASTER:
        master = _typed(tl.load(row + 4), "fp32", VEC) + begin
    if LR_ON_DEVICE:
        lr = tl.load(lr_ptr).to(tl.float32)
    # Each tensor has its own step count.
    step = tl.load(row + 5).to(tl.pointer_type(tl.float32))
    bias1, root = _corrections(step, c1, c2, True)
    _chunk(
        param,
        avg,
        sq,
        master,
        param,
        grad,
        avg,
        sq,
        master,
        tl.minimum(tl.load(row + 6) - begin, BLOCK).to(tl.int32),
        1.0 - lr * weight_decay,
        w1,
        beta2,
        w2,
        eps,
        lr / bias1,
        root,
        BLOCK,
        VEC,
        MASTER,
        MAXIMIZE,
        EVICT,
    )
