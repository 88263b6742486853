"""SwiGLU's gate: ``out = silu(gate) * up``, element by element, ``silu(g) = g / (1 + e^-g)``.

Roles: a CTA has ``block`` neighbours of one row; a thread has vectors of ``vec`` elements of them, all threads apart,
    so that neighbours load neighbours. Operands without gaps between rows come as one long row.

One thread: load its vectors of gate and up (all before the first is waited for); multiply; store. Threads never meet.

Numbers: fp32, rounded once. Of half operands the reciprocal is approximate: good to a 32nd of their rounding.

Ends: a vector that ends behind the row is left out; the row's last ``cols % vec`` elements follow, a thread each.
    ``out`` may be an operand: a thread stores to what it has read itself.

Refuses (``ops/activations/cute.py``): strided columns.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cutekernels.kernels.cute.parts.epilogue import Activation


class Operands(NamedTuple):
    """Tensors of a launch, (rows, cols) each."""

    mO: cute.Tensor
    mG: cute.Tensor
    mU: cute.Tensor


@dataclass(frozen=True)
class SiluMul:
    """The body."""

    block: int  # elements of a CTA
    threads: int
    vec: int  # elements that divide every address and pitch
    dependent: bool  # whether it is launched as a dependent of the kernel before (PDL)

    @cute.jit
    def __call__(self, grid: cute.Shape, m: Operands, stream: cuda.CUstream):
        self.kernel(m, Int32(cute.ceil_div(m.mO.shape[1], self.block))).launch(
            grid=grid, block=[self.threads, 1, 1], use_pdl=self.dependent, stream=stream
        )

    @cute.kernel
    def kernel(self, m: Operands, blocks: Int32):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row, block = Int64(cta // blocks), Int64(cta % blocks)
        gO, gG, gU = (cute.local_tile(t, (1, self.block), (row, block))[0, None] for t in m)
        # Elements of the row from this block on: all of the block's, but in the row's last block.
        left = Int32(cutlass.min(m.mO.shape[1] - block * self.block, Int64(self.block)))

        # -- this thread's part: (VEC, VECTORS) of each operand
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), m.mO.element_type, num_bits_per_copy=self.vec * m.mO.element_type.width
        )
        copy = cute.make_tiled_copy_tv(atom, cute.make_layout(self.threads), cute.make_layout(self.vec))
        thr = copy.get_slice(tid)
        tOgO, tGgG, tUgU = thr.partition_D(gO), thr.partition_S(gG), thr.partition_S(gU)
        tGcG = thr.partition_S(cute.make_identity_tensor(self.block))
        mask = cute.make_rmem_tensor((1, cute.size(tGcG, mode=[1])), Boolean)
        for v in cutlass.range_constexpr(cute.size(mask)):
            mask[0, v] = tGcG[0, v] + self.vec <= left
        if const_expr(self.dependent):
            # PDL: the next kernel may be set up; then wait until the one before has ended and its writes are visible.
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

        # -- whole vectors
        rG, rU = cute.make_rmem_tensor_like(tGgG), cute.make_rmem_tensor_like(tUgU)
        rG.fill(0.0)
        rU.fill(0.0)
        cute.copy(copy, tGgG, rG, pred=mask)
        cute.copy(copy, tUgU, rU, pred=mask)
        rG.store(self.gated(rG, rU))
        cute.copy(copy, rG, tOgO, pred=mask)

        # -- the row's last elements, fewer than a vector
        if const_expr(self.vec > 1):
            at = left // self.vec * self.vec + tid
            if at < left:
                own = cute.make_rmem_tensor((1, 2), m.mO.element_type)
                own[0, 0], own[0, 1] = gG[at], gU[at]
                own[None, 0].store(self.gated(own[None, 0], own[None, 1]))
                gO[at] = own[0, 0]

    @cute.jit
    def gated(self, gate: cute.Tensor, up: cute.Tensor) -> cute.TensorSSA:
        """``silu(gate) * up`` in the operands' type."""
        g, u = gate.load().to(Float32), up.load().to(Float32)
        silu = Activation("silu_precise" if gate.element_type is Float32 else "silu_approx")
        return (silu.apply(g) * u).to(gate.element_type)
