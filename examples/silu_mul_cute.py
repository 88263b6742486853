"""The first kernel in CuTe to read: SwiGLU's gate, ``out = silu(gate) * up``, ``silu(g) = g / (1 + e^-g)``.

    python examples/silu_mul_cute.py

On a CPU it prints what the compiler makes of it for an H200; on a GPU it compares results with torch's:

    2048 elements a CTA of 4 warps: 32 registers a thread, 0 bytes of stack

``ck.silu_mul`` is a kernel in Triton, as fast as this one; ``python -m bench silu_mul --suite headtohead`` times both.

Roles: a CTA has ``block`` neighbours of one row; a thread has vectors of ``vec`` elements of them, all threads apart,
    so that neighbours load neighbours. Operands without gaps between rows come as one long row.

One thread: load its vectors of gate and up (all before the first is waited for); multiply; store. Threads never meet.

Numbers: fp32, rounded once. Of half operands the reciprocal is approximate: good to a 32nd of their rounding.

Ends: a vector that ends behind the row is left out; the row's last ``cols % vec`` elements follow, a thread each.
    ``out`` may be an operand: a thread stores to what it has read itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_tensor
from torch import Tensor

from cutekernels import gpu as gpus
from cutekernels.backends import cute as backend
from cutekernels.gpu import GpuSpec
from cutekernels.kernels.cute.parts.epilogue import Activation

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
WIDEST_BYTES = 16  # of an access


@dataclass(frozen=True)
class SiluMul:
    """The body, called with matrices (rows, cols) whose rows are contiguous, and torch's current stream."""

    block: int  # elements of a CTA
    threads: int
    vec: int  # elements that divide every address and pitch
    dependent: bool  # whether it is launched as a dependent of the kernel before (PDL)

    @cute.jit
    def __call__(self, mO: cute.Tensor, mG: cute.Tensor, mU: cute.Tensor, stream: cuda.CUstream):
        rows, blocks = Int32(mO.shape[0]), Int32(cute.ceil_div(mO.shape[1], self.block))
        self.kernel(mO, mG, mU, blocks).launch(
            grid=[rows * blocks, 1, 1], block=[self.threads, 1, 1], use_pdl=self.dependent, stream=stream
        )

    @cute.kernel
    def kernel(self, mO: cute.Tensor, mG: cute.Tensor, mU: cute.Tensor, blocks: Int32):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row, block = Int64(cta // blocks), Int64(cta % blocks)
        gO, gG, gU = (cute.local_tile(t, (1, self.block), (row, block))[0, None] for t in (mO, mG, mU))
        # Elements of the row from this block on: all of the block's, but in the row's last block.
        left = Int32(cutlass.min(mO.shape[1] - block * self.block, Int64(self.block)))

        # -- this thread's part: (VEC, VECTORS) of each operand
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), mO.element_type, num_bits_per_copy=self.vec * mO.element_type.width
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
                own = cute.make_rmem_tensor((1, 2), mO.element_type)
                own[0, 0], own[0, 1] = gG[at], gU[at]
                own[None, 0].store(self.gated(own[None, 0], own[None, 1]))
                gO[at] = own[0, 0]

    @cute.jit
    def gated(self, gate: cute.Tensor, up: cute.Tensor) -> cute.TensorSSA:
        """``silu(gate) * up`` in the operands' type."""
        g, u = gate.load().to(Float32), up.load().to(Float32)
        silu = Activation("silu_precise" if gate.element_type is Float32 else "silu_approx")
        return (silu.apply(g) * u).to(gate.element_type)


def compiled(dtype: str, vec: int, block: int, warps: int, spec: GpuSpec) -> Any:
    """The kernel for any number of rows and columns whose rows lie multiples of ``vec`` elements apart."""
    kind = backend.type_of(dtype)
    shape = cute.sym_int(64), cute.sym_int(64)

    def fake() -> Any:
        stride = (cute.sym_int(64, divisibility=vec), 1)
        return make_fake_tensor(kind, shape, stride=stride, assumed_align=vec * kind.width // 8)

    return backend.compile(SiluMul(block, 32 * warps, vec, spec.has_pdl), fake(), fake(), fake(), gpu=spec)


@cache
def launcher(dtype: str, vec: int, block: int, warps: int, device: int) -> Callable[..., Any]:
    """The kernel for a GPU of this machine, ready for tensors ``(out, gate, up)``."""
    return compiled(dtype, vec, block, warps, gpus.detect(device)).kernel()


def silu_mul(gate: Tensor, up: Tensor, out: Tensor, block: int = 2048, warps: int = 4) -> Tensor:
    """``out[:] = silu(gate) * up``, matrices of one type and shape whose rows are contiguous."""
    tensors = [out, gate, up]
    if all(t.is_contiguous() for t in tensors):
        tensors = [t.view(1, -1) for t in tensors]
    size = gate.element_size()
    vec = math.gcd(WIDEST_BYTES // size, *[t.stride(0) for t in tensors], *[t.data_ptr() // size for t in tensors])
    launcher(TYPES[gate.dtype], vec, block, warps, gate.get_device())(*tensors)
    return out


def main() -> None:
    on_gpu = torch.cuda.is_available()
    facts = compiled("bf16", 8, 2048, 4, gpus.lookup("auto" if on_gpu else "h200")).facts
    told = f"{facts.registers} registers a thread, {facts.stack_bytes} bytes of stack"
    print(f"2048 elements a CTA of 4 warps: {told}")
    if on_gpu:
        halves = torch.randn(333, 2 * 1004, device="cuda", dtype=torch.bfloat16).chunk(2, dim=1)  # rows end in a vector
        for gate, up in (halves, [half.contiguous() for half in halves]):
            expected = (torch.nn.functional.silu(gate.float()) * up.float()).to(up.dtype)
            torch.testing.assert_close(silu_mul(gate, up, torch.empty_like(up)), expected)


if __name__ == "__main__":
    main()
