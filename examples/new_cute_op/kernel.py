"""The kernel: elementwise, a block of a row per CTA.

One thread: load its vectors (all before the first is waited for), multiply, store. ``out`` may be ``x``.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.dependent import pdl_launch, pdl_wait


@dataclass(frozen=True)
class ScaleRows:
    """The body, called with matrices of contiguous rows and their scales."""

    block: int  # elements of a CTA
    threads: int
    vec: int  # elements that divide a row, its pitch and its address
    dependent: bool  # whether it is launched as a dependent of the kernel before (PDL)

    @cute.jit
    def __call__(self, mO: cute.Tensor, mX: cute.Tensor, mS: cute.Tensor, stream: cuda.CUstream):
        blocks = Int32(cute.ceil_div(mO.shape[1], self.block))
        self.kernel(mO, mX, mS, blocks).launch(
            grid=[Int32(mO.shape[0]) * blocks, 1, 1], block=[self.threads, 1, 1], use_pdl=self.dependent, stream=stream
        )

    @cute.kernel
    def kernel(self, mO: cute.Tensor, mX: cute.Tensor, mS: cute.Tensor, blocks: Int32):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row, block = Int64(cta // blocks), Int64(cta % blocks)
        gO, gX = (cute.local_tile(t, (1, self.block), (row, block))[0, None] for t in (mO, mX))
        left = Int32(mO.shape[1] - block * self.block)  # elements of the row from this block on

        # -- this thread's part: (VEC, VECTORS)
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), mO.element_type, num_bits_per_copy=self.vec * mO.element_type.width
        )
        copy = cute.make_tiled_copy_tv(atom, cute.make_layout(self.threads), cute.make_layout(self.vec))
        thr = copy.get_slice(tid)
        tOgO, tXgX = thr.partition_D(gO), thr.partition_S(gX)
        tXcX = thr.partition_S(cute.make_identity_tensor(self.block))
        mask = cute.make_rmem_tensor((1, cute.size(tXcX, mode=[1])), Boolean)
        for v in cutlass.range_constexpr(cute.size(mask)):
            mask[0, v] = tXcX[0, v] < left
        if const_expr(self.dependent):
            pdl_launch()
            pdl_wait()

        rX = cute.make_rmem_tensor_like(tXgX)
        rX.fill(0.0)
        cute.copy(copy, tXgX, rX, pred=mask)
        rX.store((rX.load().to(Float32) * mS[row]).to(mO.element_type))
        cute.copy(copy, rX, tOgO, pred=mask)
