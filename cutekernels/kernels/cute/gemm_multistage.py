"""GEMM, multistage schedule: ``out = act(alpha * A @ B + beta * C + bias)`` on any GPU with cp.async and mma.sync.

Schedule:
    Every warp copies and every warp multiplies. ``stages`` buffers of A and B in shared memory are filled by
    cp.async ``stages - 1`` tiles ahead; one barrier per k-tile hands a buffer over. Within a k-tile, the
    fragments of k-block i+1 travel from shared memory by ldmatrix while block i multiplies. A partial k-tile
    comes *first*, zero-filled, so the mainloop needs no bounds along K. The result leaves through the same
    shared memory, 16 bytes a thread.

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
from cutekernels.kernels.cute.parts.schedule import Raster
from cutekernels.kernels.cute.parts.smem import ALIGNMENT


@dataclass(frozen=True)
class MultistageGemm:
    """The body. ``ops/gemm.py`` chooses the parts; ``ctas_per_sm`` bounds registers so that many fit."""

    load_a: OperandLoad
    load_b: OperandLoad
    mma: WarpMma
    raster: Raster
    epilogue: GemmEpilogue
    ctas_per_sm: int
    transposed: bool  # out is M-major: compute its transpose, B^T A^T, instead

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
        self.kernel(mD, mA, mB, mC, mBias, alpha, beta, self.mma.tiled_mma(mA.element_type)).launch(
            grid=[blocks, 1, 1],
            block=[self.epilogue.threads, 1, 1],
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent; left out, the DSL asks the driver, and there may be none here
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
        load_a, load_b, epilogue = self.load_a, self.load_b, self.epilogue
        tile_m, tile_n, tile_k = epilogue.tile_m, epilogue.tile_n, load_a.tile_k
        stages = const_expr(load_a.stages)
        dtype = mA.element_type
        m, n, k = cute.size(mA, mode=[0]), cute.size(mB, mode=[0]), cute.size(mA, mode=[1])

        tiles_m, tiles_n = cute.ceil_div(m, tile_m), cute.ceil_div(n, tile_n)
        layer = block // (tiles_m * tiles_n)
        tile = self.raster.tile
        at_m, at_n = tile(block - layer * (tiles_m * tiles_n), tiles_m, tiles_n)

        # -- setup: this CTA's tiles, shared memory, what each thread copies
        k_tiles = cute.ceil_div(k, tile_k)
        residue = k - k_tiles * tile_k  # <= 0: how far before K the first tile starts
        shift_a, shift_b = load_a.shifted, load_b.shifted
        gA = shift_a(cute.local_tile(mA[None, None, layer], (tile_m, tile_k), (at_m, None)), residue)
        gB = shift_b(cute.local_tile(mB[None, None, layer], (tile_n, tile_k), (at_n, None)), residue)
        gD = cute.local_tile(mD[None, None, layer], (tile_m, tile_n), (at_m, at_n))
        cA = cute.domain_offset(
            (0, residue, 0), cute.local_tile(cute.make_identity_tensor((m, k)), (tile_m, tile_k), (at_m, None))
        )
        cB = cute.domain_offset(
            (0, residue, 0), cute.local_tile(cute.make_identity_tensor((n, k)), (tile_n, tile_k), (at_n, None))
        )
        cD = cute.local_tile(cute.make_identity_tensor((m, n)), (tile_m, tile_n), (at_m, at_n))

        layout_a, layout_b, layout_d = load_a.smem_layout(dtype), load_b.smem_layout(dtype), epilogue.smem_layout(dtype)
        a_elements, b_elements = cute.cosize(layout_a), cute.cosize(layout_b)
        storage = SmemAllocator().allocate_array(
            dtype, max(a_elements + b_elements, cute.cosize(layout_d)), byte_alignment=ALIGNMENT
        )
        sA = cute.make_tensor(cute.recast_ptr(storage, layout_a.inner, dtype), layout_a.outer)  # (M, K, STAGE)
        sB = cute.make_tensor(
            cute.recast_ptr(storage + a_elements, layout_b.inner, dtype), layout_b.outer
        )  # (N, K, STAGE)
        sD = cute.make_tensor(cute.recast_ptr(storage, layout_d.inner, dtype), layout_d.outer)  # (M, N)

        copy_a, copy_b = load_a.tiled_copy(dtype), load_b.tiled_copy(dtype)
        thr_a, thr_b = copy_a.get_slice(tid), copy_b.get_slice(tid)
        tAgA, tAsA, tAcA = (
            thr_a.partition_S(gA),
            thr_a.partition_D(sA),
            thr_a.partition_S(cA),
        )  # (CPY, CPY_M, CPY_K, k | STAGE | k)
        tBgB, tBsB, tBcB = (
            thr_b.partition_S(gB),
            thr_b.partition_D(sB),
            thr_b.partition_S(cB),
        )  # (CPY, CPY_N, CPY_K, k | STAGE | k)
        rows_of_a, rows_of_b = load_a.row_mask, load_b.row_mask
        pA, pB = rows_of_a(tAcA, m), rows_of_b(tBcB, n)

        # -- prologue: fill stages - 1 buffers, the partial k-tile first
        if residue < 0:
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
        for stage in cutlass.range_constexpr(1, stages - 1):
            if stage < k_tiles:
                cute.copy(copy_a, tAgA[None, None, None, stage], tAsA[None, None, None, stage], pred=pA)
                cute.copy(copy_b, tBgB[None, None, None, stage], tBsB[None, None, None, stage], pred=pB)
            cute.arch.cp_async_commit_group()

        # -- mainloop
        thr_mma = tiled_mma.get_slice(tid)
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((tile_m, tile_n)), self.mma.accumulate)
        acc.fill(0.0)
        rA = thr_mma.make_fragment_A(thr_mma.partition_A(sA)[None, None, None, 0])  # (MMA, MMA_M, MMA_K)
        rB = thr_mma.make_fragment_B(thr_mma.partition_B(sB)[None, None, None, 0])  # (MMA, MMA_N, MMA_K)
        to_a, to_b = self.mma.fragment_copies(tiled_mma, dtype)
        ldm_a, ldm_b = to_a.get_slice(tid), to_b.get_slice(tid)
        tCsA, tCrA = ldm_a.partition_S(sA), ldm_a.retile(rA)  # (CPY, CPY_M, CPY_K, STAGE)
        tCsB, tCrB = ldm_b.partition_S(sB), ldm_b.retile(rB)  # (CPY, CPY_N, CPY_K, STAGE)
        k_blocks = cute.size(rA, mode=[2])

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

        # -- epilogue: the buffers are free once every copy has landed and every warp has read
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        gC = None
        mC_layer = None
        if const_expr(mC is not None):
            mC_layer = mC[None, None, layer]
            gC = cute.local_tile(mC_layer, (tile_m, tile_n), (at_m, at_n))
        finish = epilogue.finish
        finish(acc, thr_mma, tid, gD, cD, sD, (m, n), mC_layer, gC, mBias, alpha, beta)


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
