"""GEMM, skinny schedule: ``out = act(alpha * X @ W^T + beta * C + bias)`` for a few tokens X and a weight W (N, K).

At decode sizes a linear layer is a race to read the weight, so everything here keeps many of its bytes in flight.

Schedule:
    Operands are swapped: weight rows take the m16 side of the MMA, tokens the n8 side, so that 8 tokens waste nothing.
    A CTA takes ``tile_m`` weight rows; cp.async fills ``stages`` buffers of W and X. Within a k-tile, the k-blocks of
    16 are dealt out to ``warps_k`` groups of warps, whose sums meet in shared memory at the end. ``split_k`` CTAs share
    a tile's K: each leaves its partial sums in a workspace, the last to arrive adds all of them in their order, so the
    result does not depend on who was last. Results go straight from registers to memory: they are few.
    With programmatic dependent launch, CTAs are placed and set up while the kernel ahead still runs. H200, 16 tokens,
    K = N = 3584, one CTA an SM: 8.96 -> 8.41 us. Where several share an SM it loses, since early CTAs crowd on the
    SMs that happen to be free. Asking the L2 for the first k-tiles before the wait gained nothing (8.37), asking for
    all of the weight lost (one token: 8.51 without either, 9.11 with both). Loading it into shared memory then would be
    wrong where the kernel ahead writes the weight (2026-11-21).

Source:
    Swapped operands and split-K with a ticket are common practice (CUTLASS "stream-K" and "split-K semaphore"); the
    dealing of k-blocks to warps is CUTLASS's "sliced-K".
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.gemm_multistage import columns_first, rows_first
from cutekernels.kernels.cute.parts.epilogue import Activation
from cutekernels.kernels.cute.parts.load import OperandLoad
from cutekernels.kernels.cute.parts.mma import WarpMma
from cutekernels.kernels.cute.parts.smem import ALIGNMENT, SkinnySmem


@dataclass(frozen=True)
class SkinnyGemm:
    """The body. ``load_w`` and ``load_x`` may have fewer threads than the CTA."""

    load_w: OperandLoad
    load_x: OperandLoad
    mma: WarpMma
    warps_k: int
    split_k: int
    dependent: bool  # launched under programmatic dependent launch
    activation: Activation
    ctas_per_sm: int

    @property
    def group(self) -> int:
        """Threads that share a k-block."""
        return 32 * self.mma.warps_m

    @property
    def threads(self) -> int:
        return self.group * self.warps_k

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # (M, N)
        mX: cute.Tensor,  # (M, K)
        mW: cute.Tensor,  # (K, N)
        mC: cute.Tensor | None,  # (M, N)
        mBias: cute.Tensor | None,  # (N,)
        alpha: Float32,
        beta: Float32,
        stream: cuda.CUstream,
    ):
        """For ``split_k = 1``."""
        shared = self.shared
        shared(mD, mX, mW, mC, mBias, alpha, beta, None, None, stream)

    @cute.jit
    def shared(
        self,
        mD: cute.Tensor,
        mX: cute.Tensor,
        mW: cute.Tensor,
        mC: cute.Tensor | None,
        mBias: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        mPartials: cute.Tensor | None,  # (tiles * split_k * tile_m * tile_n,), of the tiles as GemmConfig names them
        mTickets: cute.Tensor | None,  # (tiles,), zero before and after
        stream: cuda.CUstream,
    ):
        """With a workspace, for ``split_k > 1``."""
        mD, mW = columns_first(mD), columns_first(mW)  # (N, M, 1), (N, K, 1)
        mC = columns_first(mC) if const_expr(mC is not None) else None
        tiles_n = cute.ceil_div(cute.size(mD, mode=[0]), self.load_w.rows)
        tiles_m = cute.ceil_div(cute.size(mD, mode=[1]), self.load_x.rows)
        self.kernel(
            mD, rows_first(mX), mW, mC, mBias, alpha, beta, mPartials, mTickets, self.mma.tiled_mma(mX.element_type)
        ).launch(
            grid=[self.split_k, tiles_m, tiles_n],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mD: cute.Tensor,
        mX: cute.Tensor,
        mW: cute.Tensor,
        mC: cute.Tensor | None,
        mBias: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        mPartials: cute.Tensor | None,
        mTickets: cute.Tensor | None,
        tiled_mma: cute.TiledMma,
    ):
        tid, _, _ = cute.arch.thread_idx()
        split, at_m, at_n = cute.arch.block_idx()
        load_w, load_x = self.load_w, self.load_x
        tile_n, tile_m, tile_k = load_w.rows, load_x.rows, load_w.tile_k
        stages = const_expr(load_w.stages)
        dtype = mX.element_type
        n, m, k = cute.size(mW, mode=[0]), cute.size(mX, mode=[0]), cute.size(mX, mode=[1])
        k_tiles = cute.ceil_div(k, tile_k)
        first, end = split * k_tiles // self.split_k, (split + 1) * k_tiles // self.split_k

        # -- setup
        layout_w, layout_x = load_w.smem_layout(dtype), load_x.smem_layout(dtype)
        w_elements = cute.cosize(layout_w)
        shape_acc = tiled_mma.partition_shape_C((tile_n, tile_m))
        acc = cute.make_rmem_tensor(shape_acc, Float32)  # ((2, 2), MMA_N, MMA_M)
        per_thread = cute.size(acc)
        smem = SkinnySmem(tile_n, tile_m, tile_k, stages, self.warps_k)
        storage = SmemAllocator().allocate(smem.total_bytes, byte_alignment=ALIGNMENT)
        base = cute.recast_ptr(storage, dtype=dtype)
        sW = cute.make_tensor(cute.recast_ptr(base, layout_w.inner, dtype), layout_w.outer)  # (N, K, STAGE)
        sX = cute.make_tensor(
            cute.recast_ptr(base + w_elements, layout_x.inner, dtype), layout_x.outer
        )  # (M, K, STAGE)

        if const_expr(self.dependent):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

        copies_w, copies_x = load_w.copies, load_x.copies
        copy_w, tWgW, tWsW, tWcW, pW = copies_w(tid, mW, sW, at_n, Int32(0))
        copy_x, tXgX, tXsX, tXcX, pX = copies_x(tid % load_x.threads, mX, sX, at_m, Int32(0))
        loads_x = tid < load_x.threads
        loads_w = tid < load_w.threads

        # -- prologue: the partial k-tile comes first, zero-filled
        if first == 0 and k_tiles * tile_k > k:
            if loads_w:
                tWsW[None, None, None, 0].fill(0.0)
            if loads_x:
                tXsX[None, None, None, 0].fill(0.0)
            cute.arch.sync_threads()
            first_of_w, first_of_x = load_w.first_mask, load_x.first_mask
            if loads_w:
                cute.copy(copy_w, tWgW[None, None, None, 0], tWsW[None, None, None, 0], pred=first_of_w(tWcW, n))
            if loads_x:
                cute.copy(copy_x, tXgX[None, None, None, 0], tXsX[None, None, None, 0], pred=first_of_x(tXcX, m))
        else:
            if first < end:
                if loads_w:
                    cute.copy(copy_w, tWgW[None, None, None, first], tWsW[None, None, None, 0], pred=pW)
                if loads_x:
                    cute.copy(copy_x, tXgX[None, None, None, first], tXsX[None, None, None, 0], pred=pX)
        cute.arch.cp_async_commit_group()
        for stage in cutlass.range_constexpr(1, stages - 1):
            if first + stage < end:
                if loads_w:
                    cute.copy(copy_w, tWgW[None, None, None, first + stage], tWsW[None, None, None, stage], pred=pW)
                if loads_x:
                    cute.copy(copy_x, tXgX[None, None, None, first + stage], tXsX[None, None, None, stage], pred=pX)
            cute.arch.cp_async_commit_group()

        # -- mainloop: this warp's k-blocks of each k-tile
        lane = tid % self.group
        slice_k = tid // self.group
        thr_mma = tiled_mma.get_slice(lane)
        rW = thr_mma.make_fragment_A(thr_mma.partition_A(sW)[None, None, None, 0])  # (MMA, MMA_N, MMA_K)
        rX = thr_mma.make_fragment_B(thr_mma.partition_B(sX)[None, None, None, 0])  # (MMA, MMA_M, MMA_K)
        to_w, to_x = self.mma.fragment_copies(tiled_mma, dtype)
        ldm_w, ldm_x = to_w.get_slice(lane), to_x.get_slice(lane)
        tCsW, tCrW = ldm_w.partition_S(sW), ldm_w.retile(rW)  # (CPY, CPY_N, CPY_K, STAGE)
        tCsX, tCrX = ldm_x.partition_S(sX), ldm_x.retile(rX)  # (CPY, CPY_M, CPY_K, STAGE)
        blocks = const_expr(tile_k // 16 // self.warps_k)

        acc.fill(0.0)
        read, write = Int32(0), Int32(stages - 1)
        for k_tile in cutlass.range(first, end, unroll=1):
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.sync_threads()
            ahead = k_tile + (stages - 1)
            if ahead < end:
                if loads_w:
                    cute.copy(copy_w, tWgW[None, None, None, ahead], tWsW[None, None, None, write], pred=pW)
                if loads_x:
                    cute.copy(copy_x, tXgX[None, None, None, ahead], tXsX[None, None, None, write], pred=pX)
            cute.arch.cp_async_commit_group()
            for block in cutlass.range_constexpr(blocks):
                kb = block * self.warps_k + slice_k
                cute.copy(to_w, tCsW[None, None, kb, read], tCrW[None, None, block])
                cute.copy(to_x, tCsX[None, None, kb, read], tCrX[None, None, block])
            for block in cutlass.range_constexpr(blocks):
                cute.gemm(tiled_mma, acc, rW[None, None, block], rX[None, None, block], acc)
            read = read + 1
            if read == stages:
                read = Int32(0)
            write = write + 1
            if write == stages:
                write = Int32(0)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        # -- the groups' sums meet in the first
        if const_expr(self.warps_k > 1):
            sums = cute.make_tensor(
                cute.recast_ptr(storage, dtype=Float32),
                cute.make_layout(
                    (self.group, per_thread, self.warps_k - 1), stride=(1, self.group, self.group * per_thread)
                ),
            )
            if slice_k > 0:
                for i in cutlass.range_constexpr(per_thread):
                    sums[lane, i, slice_k - 1] = acc[i]
            cute.arch.sync_threads()
            if slice_k == 0:
                for s in cutlass.range_constexpr(self.warps_k - 1):
                    for i in cutlass.range_constexpr(per_thread):
                        acc[i] = acc[i] + sums[lane, i, s]

        # -- the splits' sums meet in whichever CTA is last
        finish = self.finish
        if const_expr(self.split_k == 1):
            if slice_k == 0:
                finish(acc, thr_mma, at_n, at_m, mD, mC, mBias, alpha, beta)
        else:
            _, tiles_m, _ = cute.arch.grid_dim()
            tile = at_n * tiles_m + at_m
            partials = cute.make_tensor(
                mPartials.iterator + Int64(tile) * (self.split_k * self.group * per_thread),
                cute.make_layout(
                    (self.group, per_thread, self.split_k), stride=(1, self.group, self.group * per_thread)
                ),
            )
            flag = cute.make_tensor(cute.recast_ptr(storage + smem.flag_at, dtype=Int32), cute.make_layout(1))
            if slice_k == 0:
                for i in cutlass.range_constexpr(per_thread):
                    partials[lane, i, split] = acc[i]
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_threads()
            if tid == 0:
                flag[0] = cute.arch.atomic_add(mTickets.iterator + tile, Int32(1), sem="acq_rel", scope="gpu")
            cute.arch.sync_threads()
            if flag[0] == self.split_k - 1:
                cute.arch.fence_acq_rel_gpu()
                if slice_k == 0:
                    acc.fill(0.0)
                    for s in cutlass.range_constexpr(self.split_k):
                        for i in cutlass.range_constexpr(per_thread):
                            acc[i] = acc[i] + partials[lane, i, s]
                    finish(acc, thr_mma, at_n, at_m, mD, mC, mBias, alpha, beta)
                if tid == 0:
                    mTickets[tile] = Int32(0)

    @cute.jit
    def finish(
        self,
        acc: cute.Tensor,  # ((2, 2), MMA_N, MMA_M)
        thr_mma: cute.TiledMma,
        at_n: Int32,
        at_m: Int32,
        mD: cute.Tensor,  # (N, M, 1)
        mC: cute.Tensor | None,
        mBias: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
    ):
        n, m = cute.size(mD, mode=[0]), cute.size(mD, mode=[1])
        tile = (self.load_w.rows, self.load_x.rows)
        cD = cute.local_tile(cute.make_identity_tensor((n, m)), tile, (at_n, at_m))
        tCcD = thr_mma.partition_C(cD)  # ((2, 2), MMA_N, MMA_M)
        x = alpha * acc.load()
        if const_expr(mC is not None):
            rC = cute.make_rmem_tensor(tCcD.shape, Float32)
            rC.fill(0.0)
            for i in cutlass.range_constexpr(cute.size(tCcD)):
                if cute.elem_less(tCcD[i], (n, m)):
                    rC[i] = mC[tCcD[i][0], tCcD[i][1], 0].to(Float32)
            x = x + beta * rC.load()
        if const_expr(mBias is not None):
            rBias = cute.make_rmem_tensor(tCcD.shape, Float32)
            rBias.fill(0.0)
            for i in cutlass.range_constexpr(cute.size(tCcD)):
                if tCcD[i][0] < n:
                    rBias[i] = mBias[tCcD[i][0]].to(Float32)
            x = x + rBias.load()
        activate = self.activation.apply
        rD = cute.make_rmem_tensor(tCcD.shape, mD.element_type)
        rD.store(activate(x).to(mD.element_type))
        for i in cutlass.range_constexpr(cute.size(tCcD)):
            if cute.elem_less(tCcD[i], (n, m)):
                mD[tCcD[i][0], tCcD[i][1], 0] = rD[i]
