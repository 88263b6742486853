"""GEMM, multistage schedule: ``out = act(alpha * A @ B + beta * C + bias)`` on any GPU with cp.async and mma.sync.

Schedule:
    Every warp copies and every warp multiplies. ``stages`` buffers of A and B in shared memory are filled by
    cp.async ``stages - 1`` tiles ahead; one barrier per k-tile hands a buffer over. Within a k-tile, the
    fragments of k-block i+1 travel from shared memory by ldmatrix while block i multiplies. A partial k-tile
    comes *first*, zero-filled, so the mainloop needs no bounds along K. The result leaves through the same
    shared memory, 16 bytes a thread. A *persistent* grid takes one tile after the other, keeps the output tile's
    shared memory apart, and starts the next tile's loads before the result leaves: docs/notes/gemm.md#persistent.

Source:
    The cp.async pipeline is the classic Ampere one (CUTLASS 2.x "multistage"; NVIDIA's CuTe DSL
    ``tensorop_gemm`` example has the partial-tile-first trick). Here layouts, loads, raster and epilogue are
    parts, tiles and warps are free, every operand takes either major and any alignment, and strides may be
    64 bits wide.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.epilogue import GemmEpilogue
from cutekernels.kernels.cute.parts.load import OperandLoad
from cutekernels.kernels.cute.parts.mma import WarpMma
from cutekernels.kernels.cute.parts.ptx import instruction
from cutekernels.kernels.cute.parts.schedule import Raster
from cutekernels.kernels.cute.parts.smem import ALIGNMENT


@dataclass(frozen=True)
class MultistageGemm:
    """The body; ``ctas_per_sm`` bounds registers so that so many CTAs fit."""

    load_a: OperandLoad
    load_b: OperandLoad
    mma: WarpMma
    raster: Raster
    epilogue: GemmEpilogue
    ctas_per_sm: int
    transposed: bool  # out is M-major: compute its transpose, B^T A^T, instead
    resident: int  # most CTAs in the grid; 0 for one a tile

    @property
    def persistent(self) -> bool:
        return self.resident > 0

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # ([L,] M, N)
        mA: cute.Tensor,  # ([L,] M, K)
        mB: cute.Tensor,  # ([L,] K, N)
        mC: cute.Tensor | None,  # ([L,] M, N)
        mBias: cute.Tensor | None,  # (N,)
        alpha: Float32,
        beta: Float32,
        stream: cuda.CUstream,
    ):
        if const_expr(self.transposed):
            mA, mB, mD = columns_first(mB), rows_first(mA), columns_first(mD)
            mC = columns_first(mC) if const_expr(mC is not None) else None
        else:
            mA, mB, mD = rows_first(mA), columns_first(mB), rows_first(mD)
            mC = rows_first(mC) if const_expr(mC is not None) else None
        # mA (M, K, L), mB (N, K, L), mC and mD (M, N, L)
        tiles_m = cute.ceil_div(cute.size(mD, mode=[0]), self.epilogue.tile_m)
        tiles_n = cute.ceil_div(cute.size(mD, mode=[1]), self.epilogue.tile_n)
        blocks = tiles_m * tiles_n * cute.size(mD, mode=[2])
        if const_expr(self.persistent):
            blocks = cutlass.min(blocks, Int32(self.resident))
        self.kernel(mD, mA, mB, mC, mBias, alpha, beta, self.mma.tiled_mma(mA.element_type)).launch(
            grid=[blocks, 1, 1],
            block=[self.epilogue.threads, 1, 1],
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent; without it the DSL needs the driver, which may be absent
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mD: cute.Tensor,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mC: cute.Tensor | None,
        mBias: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        tiled_mma: cute.TiledMma,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        load_a, load_b, epilogue = self.load_a, self.load_b, self.epilogue
        tile_m, tile_n = epilogue.tile_m, epilogue.tile_n
        dtype = mA.element_type

        # -- setup: shared memory and fragments
        layout_a, layout_b, layout_d = load_a.smem_layout(dtype), load_b.smem_layout(dtype), epilogue.smem_layout(dtype)
        a_elements, b_elements = cute.cosize(layout_a), cute.cosize(layout_b)
        staged, d_elements = a_elements + b_elements, cute.cosize(layout_d)
        at_d = const_expr(staged if self.persistent else 0)  # where the output tile begins
        storage = SmemAllocator().allocate_array(dtype, max(staged, at_d + d_elements), byte_alignment=ALIGNMENT)
        sA = cute.make_tensor(cute.recast_ptr(storage, layout_a.inner, dtype), layout_a.outer)  # (M, K, STAGE)
        sB = cute.make_tensor(
            cute.recast_ptr(storage + a_elements, layout_b.inner, dtype), layout_b.outer
        )  # (N, K, STAGE)
        sD = cute.make_tensor(cute.recast_ptr(storage + at_d, layout_d.inner, dtype), layout_d.outer)  # (M, N)
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((tile_m, tile_n)), self.mma.accumulate)

        # -- tile after tile; the next one's first loads are under way while this one's result leaves
        m, n = cute.size(mA, mode=[0]), cute.size(mB, mode=[0])
        tiles_m, tiles_n = cute.ceil_div(m, tile_m), cute.ceil_div(n, tile_n)
        tiles = tiles_m * tiles_n * cute.size(mD, mode=[2])
        place, fill, multiply, leave = self.raster.place, self.fill, self.multiply, self.leave
        fill(tid, mA, mB, sA, sB, place(block, tiles_m, tiles_n))
        if const_expr(self.persistent):
            for tile in cutlass.range(block, tiles, blocks, unroll=1):
                at = place(tile, tiles_m, tiles_n)
                multiply(opaque(tid), mA, mB, sA, sB, at, tiled_mma, acc)
                if tile + blocks < tiles:
                    fill(opaque(tid), mA, mB, sA, sB, place(tile + blocks, tiles_m, tiles_n))
                leave(opaque(tid), at, tiled_mma, acc, mD, sD, mC, mBias, alpha, beta)
        else:
            at = place(block, tiles_m, tiles_n)
            multiply(tid, mA, mB, sA, sB, at, tiled_mma, acc)
            leave(tid, at, tiled_mma, acc, mD, sD, mC, mBias, alpha, beta)

    @cute.jit
    def leave(
        self,
        tid: Int32,
        at: tuple[Int32, Int32, Int32],
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        mD: cute.Tensor,
        sD: cute.Tensor,
        mC: cute.Tensor | None,
        mBias: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
    ):
        """The epilogue of tile ``at``."""
        tile_m, tile_n = self.epilogue.tile_m, self.epilogue.tile_n
        m, n = cute.size(mD, mode=[0]), cute.size(mD, mode=[1])
        gD = cute.local_tile(mD[None, None, at[2]], (tile_m, tile_n), (at[0], at[1]))
        cD = cute.local_tile(cute.make_identity_tensor((m, n)), (tile_m, tile_n), (at[0], at[1]))
        gC = None
        mC_layer = None
        if const_expr(mC is not None):
            mC_layer = mC[None, None, at[2]]
            gC = cute.local_tile(mC_layer, (tile_m, tile_n), (at[0], at[1]))
        finish = self.epilogue.finish
        finish(acc, tiled_mma.get_slice(tid), tid, gD, cD, sD, (m, n), mC_layer, gC, mBias, alpha, beta)

    @cute.jit
    def fill(
        self,
        tid: Int32,
        mA: cute.Tensor,
        mB: cute.Tensor,
        sA: cute.Tensor,
        sB: cute.Tensor,
        at: tuple[Int32, Int32, Int32],
    ):
        """The loads of the first ``stages - 1`` k-tiles of tile ``at``, the partial one first."""
        load_a, load_b = self.load_a, self.load_b
        m, n, k = cute.size(mA, mode=[0]), cute.size(mB, mode=[0]), cute.size(mA, mode=[1])
        k_tiles = cute.ceil_div(k, load_a.tile_k)
        a_copies, b_copies = load_a.copies, load_b.copies
        copy_a, tAgA, tAsA, tAcA, pA = a_copies(tid, mA, sA, at[0], at[2])
        copy_b, tBgB, tBsB, tBcB, pB = b_copies(tid, mB, sB, at[1], at[2])
        if k_tiles * load_a.tile_k > k:
            tAsA[None, None, None, 0].fill(0.0)
            tBsB[None, None, None, 0].fill(0.0)
            cute.arch.sync_threads()
            first_of_a, first_of_b = load_a.first_mask, load_b.first_mask
            cute.copy(copy_a, tAgA[None, None, None, 0], tAsA[None, None, None, 0], pred=first_of_a(tAcA, m))
            cute.copy(copy_b, tBgB[None, None, None, 0], tBsB[None, None, None, 0], pred=first_of_b(tBcB, n))
        else:
            if k_tiles > 0:
                cute.copy(copy_a, tAgA[None, None, None, 0], tAsA[None, None, None, 0], pred=pA)
                cute.copy(copy_b, tBgB[None, None, None, 0], tBsB[None, None, None, 0], pred=pB)
        cute.arch.cp_async_commit_group()
        for stage in cutlass.range_constexpr(1, load_a.stages - 1):
            if stage < k_tiles:
                cute.copy(copy_a, tAgA[None, None, None, stage], tAsA[None, None, None, stage], pred=pA)
                cute.copy(copy_b, tBgB[None, None, None, stage], tBsB[None, None, None, stage], pred=pB)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def multiply(
        self,
        tid: Int32,
        mA: cute.Tensor,
        mB: cute.Tensor,
        sA: cute.Tensor,
        sB: cute.Tensor,
        at: tuple[Int32, Int32, Int32],
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
    ):
        """The mainloop of tile ``at``, whose first loads :meth:`fill` has started. All buffers are free afterwards."""
        load_a, load_b = self.load_a, self.load_b
        stages = const_expr(load_a.stages)
        k_tiles = cute.ceil_div(cute.size(mA, mode=[1]), load_a.tile_k)
        a_copies, b_copies = load_a.copies, load_b.copies
        copy_a, tAgA, tAsA, _, pA = a_copies(tid, mA, sA, at[0], at[2])
        copy_b, tBgB, tBsB, _, pB = b_copies(tid, mB, sB, at[1], at[2])
        thr_mma = tiled_mma.get_slice(tid)
        rA = thr_mma.make_fragment_A(thr_mma.partition_A(sA)[None, None, None, 0])  # (MMA, MMA_M, MMA_K)
        rB = thr_mma.make_fragment_B(thr_mma.partition_B(sB)[None, None, None, 0])  # (MMA, MMA_N, MMA_K)
        to_a, to_b = self.mma.fragment_copies(tiled_mma, mA.element_type)
        ldm_a, ldm_b = to_a.get_slice(tid), to_b.get_slice(tid)
        tCsA, tCrA = ldm_a.partition_S(sA), ldm_a.retile(rA)  # (CPY, CPY_M, CPY_K, STAGE)
        tCsB, tCrB = ldm_b.partition_S(sB), ldm_b.retile(rB)  # (CPY, CPY_N, CPY_K, STAGE)
        k_blocks = cute.size(rA, mode=[2])

        acc.fill(0.0)
        read, write = Int32(0), Int32(stages - 1)
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.sync_threads()
        cute.copy(to_a, tCsA[None, None, 0, 0], tCrA[None, None, 0])
        cute.copy(to_b, tCsB[None, None, 0, 0], tCrB[None, None, 0])
        for k_tile in cutlass.range(k_tiles, unroll=1):
            for kb in cutlass.range_constexpr(k_blocks):
                nxt = (kb + 1) % k_blocks
                if const_expr(kb == k_blocks - 1):
                    read = read + 1
                    if read == stages:
                        read = Int32(0)
                    cute.arch.cp_async_wait_group(stages - 2)
                    cute.arch.sync_threads()
                cute.copy(to_a, tCsA[None, None, nxt, read], tCrA[None, None, nxt])
                cute.copy(to_b, tCsB[None, None, nxt, read], tCrB[None, None, nxt])
                if const_expr(kb == 0):
                    ahead = k_tile + (stages - 1)
                    if ahead < k_tiles:
                        cute.copy(copy_a, tAgA[None, None, None, ahead], tAsA[None, None, None, write], pred=pA)
                        cute.copy(copy_b, tBgB[None, None, None, ahead], tBsB[None, None, None, write], pred=pB)
                    cute.arch.cp_async_commit_group()
                    write = write + 1
                    if write == stages:
                        write = Int32(0)
                cute.gemm(tiled_mma, acc, rA[None, None, kb], rB[None, None, kb], acc)
        cute.arch.cp_async_wait_group(0)  # every copy has landed,
        cute.arch.sync_threads()  # and every warp has read


def opaque(x: Int32) -> Int32:
    """``x`` as a value unknown to the compiler, which then keeps nothing derived from it in registers."""
    return Int32(instruction("mov.b32 $0, $1;", "=r,r", x, result=Int32.mlir_type))


def rows_first(t: cute.Tensor) -> cute.Tensor:
    """``([L,] X, Y)`` as ``(X, Y, L)``."""
    return batch_last(t, (0, 1))


def columns_first(t: cute.Tensor) -> cute.Tensor:
    """``([L,] X, Y)`` as ``(Y, X, L)``."""
    return batch_last(t, (1, 0))


def batch_last(t: cute.Tensor, order: tuple[int, int]) -> cute.Tensor:
    if cute.rank(t) == 3:
        return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[order[0] + 1, order[1] + 1, 0]))
    matrix = cute.select(t.layout, mode=list(order))
    return cute.make_tensor(t.iterator, cute.append(matrix, cute.make_layout(1, stride=0)))
