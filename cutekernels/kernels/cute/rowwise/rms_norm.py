"""RMSNorm: ``y = x * rstd * (weight + offset)``, where ``rstd = 1 / sqrt(mean of x^2 + eps)`` of each row.

A good first body to read: no pipeline, no matrix product, every element loaded once and kept in registers.

Roles: a CTA has ``rows`` whole rows. Of its threads, equally many share each row: a part of a warp, or several warps.
    A thread has vectors of ``vec`` elements, ``threads_per_row`` vectors apart, so that neighbours load neighbours.

One row: load it and the weight (all loads before the first is waited for); add up squares in the thread, in the warp
    by shuffles, over warps through shared memory; multiply; store.

Numbers: fp32, rounded once; with ``round_twice`` ``x * rstd`` is rounded to y's type before the weight multiplies it.

Ends: columns behind the last are read as 0 and not stored. ``vec`` divides a row's length, so a vector is in or out.
    ``y`` may be ``x``: a thread stores to what it has read itself.

Refuses (``ops/norms/op.py``): rows with a stride for each head, strided columns, rows that registers cannot hold.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.dependent import pdl_launch, pdl_wait

WARP = 32
ACCESS_BITS = 128  # of the widest load


class Operands(NamedTuple):
    """Tensors of a launch."""

    mY: cute.Tensor  # (rows, cols)
    mX: cute.Tensor  # (rows, cols)
    mW: cute.Tensor | None  # (cols,)


@dataclass(frozen=True)
class RmsNorm:
    """The body."""

    rows: int  # of a CTA
    width: int  # the power of two that covers a row
    threads: int
    vec: int  # elements that divide a row, its pitch and its address
    shifted: bool  # whether the offset is added to the weight
    round_twice: bool
    dependent: bool  # whether it is launched as a dependent of the kernel before (PDL)

    @property
    def threads_per_row(self) -> int:
        return self.threads // self.rows

    @property
    def warps_per_row(self) -> int:
        """1 where a row has a part of a warp."""
        return max(1, self.threads_per_row // WARP)

    @cute.jit
    def __call__(self, grid: cute.Shape, m: Operands, eps: Float32, offset: Float32, stream: cuda.CUstream):
        self.kernel(m, eps, offset).launch(grid=grid, block=[self.threads, 1, 1], use_pdl=self.dependent, stream=stream)

    @cute.kernel
    def kernel(self, m: Operands, eps: Float32, offset: Float32):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        tile, cols = const_expr((self.rows, self.width)), m.mX.shape[1]
        gX, gY = cute.local_tile(m.mX, tile, (cta, 0)), cute.local_tile(m.mY, tile, (cta, 0))
        cX = cute.local_tile(cute.make_identity_tensor(m.mX.shape), tile, (cta, 0))

        # -- this thread's part: the same elements of x, y and the weight
        copy = self.copy(m.mX.element_type)
        thr = copy.get_slice(tid)
        tXgX, tXgY, tXcX = thr.partition_S(gX), thr.partition_D(gY), thr.partition_S(cX)  # (VEC, 1, VECTORS)
        mask = cute.make_rmem_tensor((1, 1, cute.size(tXcX, mode=[2])), Boolean)
        for v in cutlass.range_constexpr(cute.size(mask)):
            mask[0, 0, v] = cute.elem_less(tXcX[0, 0, v], m.mX.shape)
        if const_expr(self.dependent):
            pdl_launch()
            pdl_wait()

        # -- loads
        rX = cute.make_rmem_tensor_like(tXgX)
        rX.fill(0.0)  # columns that do not exist add nothing to the sum
        cute.copy(copy, tXgX, rX, pred=mask)
        weight = None
        if const_expr(m.mW is not None):
            gW = cute.make_tensor(m.mW.iterator, cute.make_layout(tile, stride=(0, 1)))  # every row's
            copy_w = self.copy(m.mW.element_type)
            tWgW = copy_w.get_slice(tid).partition_S(gW)
            rW = cute.make_rmem_tensor(tWgW.shape, m.mW.element_type)
            # One flag for all accesses of a vector: fp32 weights take two.
            both = cute.make_layout((cute.size(tWgW.shape[0][1]), 1, cute.size(mask)), stride=(0, 0, 1))
            cute.copy(copy_w, tWgW, rW, pred=cute.make_tensor(mask.iterator, both))
            weight = rW.load().to(Float32).reshape(rX.shape)
            if const_expr(self.shifted):
                weight = weight + offset

        # -- the row's mean square, and its result
        x = rX.load().to(Float32)
        squares = self.row_sum(tid, (x * x).reduce(cute.ReductionOp.ADD, init_val=Float32(0.0), reduction_profile=0))
        y = x * cute.math.rsqrt(squares / Float32(cols) + eps)
        if const_expr(self.round_twice):
            y = y.to(m.mY.element_type).to(Float32)
        if const_expr(m.mW is not None):
            y = y * weight
        rX.store(y.to(m.mY.element_type))
        cute.copy(copy, rX, tXgY, pred=mask)

    def copy(self, dtype: type[cutlass.Numeric]) -> cute.TiledCopy:
        """``threads_per_row`` threads along each row, ``vec`` elements each."""
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=min(ACCESS_BITS, self.vec * dtype.width)
        )
        threads = cute.make_layout((self.rows, self.threads_per_row), stride=(self.threads_per_row, 1))
        return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, self.vec)))

    @cute.jit
    def row_sum(self, tid: Int32, value: Float32) -> Float32:
        """The sum of ``value`` over the threads of this thread's row, in the same order in every run."""
        lanes = const_expr(min(WARP, self.threads_per_row))
        for step in cutlass.range_constexpr(lanes.bit_length() - 1):
            value = value + cute.arch.shuffle_sync_bfly(value, offset=1 << step)
        if const_expr(self.warps_per_row > 1):
            layout = cute.make_layout((self.warps_per_row, self.rows))
            sums = SmemAllocator().allocate_tensor(Float32, layout)
            sums[tid // WARP] = value  # all lanes of a warp store the same
            # Every warp has stored its part before any thread adds them up.
            cute.arch.sync_threads()
            value = sums[0, tid // self.threads_per_row]
            for w in cutlass.range_constexpr(1, self.warps_per_row):
                value = value + sums[w, tid // self.threads_per_row]
        return value
