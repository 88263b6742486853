"""The kernel: elementwise, a block of a row per program."""

import triton
import triton.language as tl

from cutekernels.kernels.triton.dependent import pdl_wait


@triton.jit
def softcap(
    out_ptr, x_ptr, cols, out_row, out_col, x_row, x_col, cap, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """``out[r, c] = cap * tanh(x[r, c] / cap)``."""
    pdl_wait(DEPENDENT)  # for the kernel before, where the launch does not
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = col < cols
    x = tl.load(x_ptr + row * x_row + col * x_col, mask=inside).to(tl.float32)
    v = x / cap
    squared = v * v
    # 1 - 2 / (exp(2 v) + 1) is right at both ends, where exp overflows to inf or vanishes; near 0 it cancels.
    far = 1.0 - 2.0 / (tl.exp(2.0 * v) + 1.0)
    near = v * (1.0 - squared * (1.0 / 3.0 - squared * (2.0 / 15.0)))
    y = cap * tl.where(squared < 0.01, near, far)
    tl.store(out_ptr + row * out_row + col * out_col, y.to(out_ptr.dtype.element_ty), mask=inside)
