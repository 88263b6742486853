"""GEMM, skinny schedule: ``out = act(alpha * X @ W^T + beta * C + bias)`` for a few tokens X and a weight W (N, K).

At decode sizes a linear layer is limited by reading the weight, so the kernel keeps many of its bytes in flight.

Schedule:
    Operands are swapped: weight rows take the m16 side of the MMA, tokens the n8 side, so that 8 tokens waste nothing.
    A CTA takes ``tile_m`` weight rows; cp.async fills ``stages`` buffers of W and X. Within a k-tile, the k-blocks of
    16 are dealt out to ``warps_k`` groups of warps, whose sums are added in shared memory at the end. ``split_k`` CTAs
    share a tile's K: each leaves its partial sums in a workspace, and the last to arrive adds all of them in their
    order, so the result is the same each time. Results go straight from registers to memory: they are few.
    With programmatic dependent launch, CTAs are set up while the kernel ahead still runs, and prefetch ``ahead``
    k-tiles of the weight into the L2; loads to shared memory would be wrong where the kernel ahead writes the weight.
    The next kernel is released when the last loads are under way: docs/notes/gemm.md#dependent-launch.
    With a norm of the tokens in front (``parts/norm.py``) its weight travels in the same stages; sums of squares are
    added as the products' are, in shared memory and in the workspace, and rstd multiplies the fp32 sums. With a gate
    behind, 8 rows of the gate's weight and the same 8 of up's make an MMA's 16, so one thread has both of an output.

Source:
    Swapped operands and split-K with a ticket are common practice (CUTLASS "stream-K" and "split-K semaphore"); the
    dealing of k-blocks to warps is CUTLASS's "sliced-K"; rstd behind the product is the usual rearrangement of norm and
    projection.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.gemm.multistage import columns_first, rows_first
from cutekernels.kernels.cute.parts.epilogue import Activation
from cutekernels.kernels.cute.parts.load import OperandLoad
from cutekernels.kernels.cute.parts.mma import WarpMma
from cutekernels.kernels.cute.parts.norm import TokenNorm
from cutekernels.kernels.cute.parts.prefetch import prefetch_bulk
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
    norm: TokenNorm | None = None  # of the tokens, in front
    ahead: int = 0  # k-tiles of W prefetched before the turn
    gated: bool = False  # W is (2 * I, K), the gate's rows before up's; out (M, I) is activation(gate) * up

    @property
    def group(self) -> int:
        """Threads that share a k-block."""
        return 32 * self.mma.warps_m

    @property
    def threads(self) -> int:
        return self.group * self.warps_k

    @property
    def weighted(self) -> bool:
        return self.norm is not None and self.norm.weighted

    @property
    def squaring(self) -> bool:
        return self.norm is not None and self.norm.statistics

    def smem(self, gamma_bytes: int) -> SkinnySmem:
        return SkinnySmem(
            self.load_w.rows,
            self.load_x.rows,
            self.load_w.tile_k,
            self.load_w.stages,
            self.warps_k,
            squaring=self.threads // 32 if self.squaring else 0,
            gamma_bytes=gamma_bytes,
        )

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
        mC = columns_first(mC) if const_expr(mC is not None) else None
        start = self.start
        mD, mW = columns_first(mD), columns_first(mW)
        start(mD, mX, mW, mC, mBias, alpha, beta, mPartials, mTickets, None, None, None, stream)

    @cute.jit
    def normed(
        self,
        mD: cute.Tensor,  # (M, N), or (M, I) where gated
        mX: cute.Tensor,  # (M, K)
        mW: cute.Tensor,  # (N, K), or (2 * I, K) where gated
        mBias: cute.Tensor | None,  # (N,)
        mGamma: cute.Tensor | None,  # (K,)
        mRstd: cute.Tensor | None,  # (M,)
        eps: Float32,
        mPartials: cute.Tensor | None,  # (tiles * split_k * (tile_m * tile_n + tile_n),)
        mTickets: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        """With ``norm`` in front or ``gated`` behind; the workspace for ``split_k > 1``."""
        alpha = Float32(const_expr(1.0 if self.norm is None else 1.0 / self.norm.scale))
        beta, interleave, start = Float32(0.0), self.interleaved, self.start
        mW = interleave(mW) if const_expr(self.gated) else rows_first(mW)
        start(columns_first(mD), mX, mW, None, mBias, alpha, beta, mPartials, mTickets, mGamma, mRstd, eps, stream)

    @cute.jit
    def start(
        self,
        mD: cute.Tensor,  # (N, M, 1)
        mX: cute.Tensor,  # (M, K)
        mW: cute.Tensor,  # (N, K, 1)
        mC: cute.Tensor | None,  # (N, M, 1)
        mBias: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        mPartials: cute.Tensor | None,
        mTickets: cute.Tensor | None,
        mGamma: cute.Tensor | None,
        mRstd: cute.Tensor | None,
        eps: Float32 | None,
        stream: cuda.CUstream,
    ):
        tiles_n = cute.ceil_div(cute.size(mW, mode=[0]), self.load_w.rows)
        tiles_m = cute.ceil_div(cute.size(mD, mode=[1]), self.load_x.rows)
        tiled_mma = self.mma.tiled_mma(mX.element_type)
        self.kernel(
            mD, rows_first(mX), mW, mC, mBias, alpha, beta, mPartials, mTickets, mGamma, mRstd, eps, tiled_mma
        ).launch(
            grid=[self.split_k, tiles_m, tiles_n],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.jit
    def interleaved(self, mW: cute.Tensor) -> cute.Tensor:
        """``(2 * I, K)`` as ``((8, 2, I / 8), K, 1)``: 8 rows of the gate, then the same 8 of up.

        Rows r and r + 8 of an MMA belong to one thread, which so has the gate and up of its outputs.
        """
        pitch, half = mW.stride[0], cute.size(mW, mode=[0]) // 2
        up = cute.assume(half * pitch, divby=8)
        layout = cute.make_layout(
            ((8, 2, half // 8), cute.size(mW, mode=[1]), 1), stride=((pitch, up, pitch * 8), 1, 0)
        )
        return cute.make_tensor(mW.iterator, layout)

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
        mGamma: cute.Tensor | None,
        mRstd: cute.Tensor | None,
        eps: Float32 | None,
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
        smem = self.smem(mGamma.element_type.width // 8 if const_expr(self.weighted) else 0)
        storage = SmemAllocator().allocate(smem.total_bytes, byte_alignment=ALIGNMENT)
        base = cute.recast_ptr(storage, dtype=dtype)
        sW = cute.make_tensor(cute.recast_ptr(base, layout_w.inner, dtype), layout_w.outer)  # (N, K, STAGE)
        sX = cute.make_tensor(
            cute.recast_ptr(base + w_elements, layout_x.inner, dtype), layout_x.outer
        )  # (M, K, STAGE)

        sQ = copy_g = tGgG = tGsG = tCsG = rG = squares = None
        g_exists = loads_g = False
        if const_expr(self.squaring):
            sQ = cute.make_tensor(
                cute.recast_ptr(storage + smem.squares_at, dtype=Float32),
                cute.make_layout((tile_m, self.threads // 32)),
            )

        if const_expr(self.dependent):
            if const_expr(self.ahead > 0):
                row = at_n * tile_n + tid
                column = first * tile_k
                if tid < tile_n and row < n and column < k:
                    count = cutlass.min(k - column, cutlass.min(self.ahead, end - first) * tile_k)
                    prefetch_bulk((mW.iterator + cute.crd2idx((row, column, 0), mW.layout)).toint(), count * 2)
            cute.arch.griddepcontrol_wait()

        copies_w, copies_x = load_w.copies, load_x.copies
        copy_w, tWgW, tWsW, tWcW, pW = copies_w(tid, mW, sW, at_n, Int32(0))
        copy_x, tXgX, tXsX, tXcX, pX = copies_x(tid % load_x.threads, mX, sX, at_m, Int32(0))
        loads_x = tid < load_x.threads
        loads_w = tid < load_w.threads
        if const_expr(self.weighted):
            kind = mGamma.element_type
            sG = cute.make_tensor(
                cute.recast_ptr(storage + smem.gamma_at, dtype=kind), cute.make_layout((tile_k, stages))
            )
            copies_g, of_fragments = self.norm.copies, self.norm.of_fragments
            fetch, clear = self.norm.fetch, self.norm.clear
            copy_g, tGgG, tGsG, g_exists = copies_g(tid, mGamma, sG)
            loads_g = tid < self.norm.load_threads(kind)
            tCsG = of_fragments(tid, sG)  # ((2, 2), MMA_K, STAGE)

        # -- prologue: the partial k-tile comes first, zero-filled
        if first == 0 and k_tiles * tile_k > k:
            if loads_w:
                tWsW[None, None, None, 0].fill(0.0)
            if loads_x:
                tXsX[None, None, None, 0].fill(0.0)
            if const_expr(self.weighted):
                clear(loads_g, tGsG[None, None, 0])
            cute.arch.sync_threads()
            first_of_w, first_of_x = load_w.first_mask, load_x.first_mask
            if loads_w:
                cute.copy(copy_w, tWgW[None, None, None, 0], tWsW[None, None, None, 0], pred=first_of_w(tWcW, n))
            if loads_x:
                cute.copy(copy_x, tXgX[None, None, None, 0], tXsX[None, None, None, 0], pred=first_of_x(tXcX, m))
            if const_expr(self.weighted):
                fetch(loads_g and g_exists, copy_g, tGgG[None, None, 0], tGsG[None, None, 0])
        else:
            if first < end:
                if loads_w:
                    cute.copy(copy_w, tWgW[None, None, None, first], tWsW[None, None, None, 0], pred=pW)
                if loads_x:
                    cute.copy(copy_x, tXgX[None, None, None, first], tXsX[None, None, None, 0], pred=pX)
                if const_expr(self.weighted):
                    fetch(loads_g, copy_g, tGgG[None, None, first], tGsG[None, None, 0])
        cute.arch.cp_async_commit_group()
        for stage in cutlass.range_constexpr(1, stages - 1):
            if first + stage < end:
                if loads_w:
                    cute.copy(copy_w, tWgW[None, None, None, first + stage], tWsW[None, None, None, stage], pred=pW)
                if loads_x:
                    cute.copy(copy_x, tXgX[None, None, None, first + stage], tXsX[None, None, None, stage], pred=pX)
                if const_expr(self.weighted):
                    fetch(loads_g, copy_g, tGgG[None, None, first + stage], tGsG[None, None, stage])
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
        if const_expr(self.weighted):
            rG = cute.make_rmem_tensor(((2, 2), blocks), mGamma.element_type)
            weigh = self.norm.weigh
        if const_expr(self.squaring):
            squares = cute.make_rmem_tensor(((2, 2), cute.size(rX, mode=[1])), Float32)
            squares.fill(0.0)
            square, leave = self.norm.square, self.norm.leave

        acc.fill(0.0)
        read, write = Int32(0), Int32(stages - 1)
        for k_tile in cutlass.range(first, end, unroll=1):
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.sync_threads()
            coming = k_tile + (stages - 1)
            if coming < end:
                if loads_w:
                    cute.copy(copy_w, tWgW[None, None, None, coming], tWsW[None, None, None, write], pred=pW)
                if loads_x:
                    cute.copy(copy_x, tXgX[None, None, None, coming], tXsX[None, None, None, write], pred=pX)
                if const_expr(self.weighted):
                    fetch(loads_g, copy_g, tGgG[None, None, coming], tGsG[None, None, write])
            cute.arch.cp_async_commit_group()
            if const_expr(self.dependent):  # noqa: SIM102  known when compiled
                if k_tile == cutlass.max(first, end - stages + 1):
                    cute.arch.griddepcontrol_launch_dependents()  # their loads then follow ours
            for block in cutlass.range_constexpr(blocks):
                kb = block * self.warps_k + slice_k
                cute.copy(to_w, tCsW[None, None, kb, read], tCrW[None, None, block])
                cute.copy(to_x, tCsX[None, None, kb, read], tCrX[None, None, block])
                if const_expr(self.weighted):
                    cute.autovec_copy(tCsG[None, kb, read], rG[None, block])
            for block in cutlass.range_constexpr(blocks):
                if const_expr(self.weighted):
                    weigh(rW[None, None, block], rG[None, block], rW[None, None, block])
                if const_expr(self.squaring):
                    square(tiled_mma, lane // 32, k_tile * blocks + block, squares, rX[None, None, block])
                cute.gemm(tiled_mma, acc, rW[None, None, block], rX[None, None, block], acc)
            read = read + 1
            if read == stages:
                read = Int32(0)
            write = write + 1
            if write == stages:
                write = Int32(0)
        if const_expr(self.squaring):
            leave(tid, squares, sQ)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        # -- the first group adds the sums of all
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

        # -- the last CTA to arrive adds the sums of all splits
        finish = self.finish
        if const_expr(self.squaring):
            total = self.norm.total
        if const_expr(self.split_k == 1):
            if const_expr(self.squaring):
                if tid < tile_m:
                    sQ[tid, 0] = cute.math.rsqrt(total(sQ, tid) / k + eps)
                cute.arch.sync_threads()
            if slice_k == 0:
                finish(acc, thr_mma, at_n, at_m, mD, mC, mBias, alpha, beta, mRstd, sQ)
        else:
            _, tiles_m, _ = cute.arch.grid_dim()
            tile = at_n * tiles_m + at_m
            squares_left = const_expr(tile_m if self.squaring else 0)
            left = mPartials.iterator + Int64(tile) * (self.split_k * (self.group * per_thread + squares_left))
            partials = cute.make_tensor(
                left,
                cute.make_layout(
                    (self.group, per_thread, self.split_k), stride=(1, self.group, self.group * per_thread)
                ),
            )
            flag = cute.make_tensor(cute.recast_ptr(storage + smem.flag_at, dtype=Int32), cute.make_layout(1))
            if slice_k == 0:
                for i in cutlass.range_constexpr(per_thread):
                    partials[lane, i, split] = acc[i]
            if const_expr(self.squaring):
                gQ = cute.make_tensor(
                    left + self.split_k * self.group * per_thread, cute.make_layout((tile_m, self.split_k))
                )
                if tid < tile_m:
                    gQ[tid, split] = total(sQ, tid)
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_threads()
            if tid == 0:
                flag[0] = cute.arch.atomic_add(mTickets.iterator + tile, Int32(1), sem="acq_rel", scope="gpu")
            cute.arch.sync_threads()
            if flag[0] == self.split_k - 1:
                cute.arch.fence_acq_rel_gpu()
                if const_expr(self.squaring):
                    if tid < tile_m:
                        sQ[tid, 0] = cute.math.rsqrt(total(gQ, tid) / k + eps)
                    cute.arch.sync_threads()
                if slice_k == 0:
                    acc.fill(0.0)
                    for s in cutlass.range_constexpr(self.split_k):
                        for i in cutlass.range_constexpr(per_thread):
                            acc[i] = acc[i] + partials[lane, i, s]
                    finish(acc, thr_mma, at_n, at_m, mD, mC, mBias, alpha, beta, mRstd, sQ)
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
        mRstd: cute.Tensor | None,  # (M,)
        sQ: cute.Tensor | None,  # (tile_m, warps): rstd in its first column
    ):
        n, m = cute.size(mD, mode=[0]) * (2 if const_expr(self.gated) else 1), cute.size(mD, mode=[1])
        tile = (self.load_w.rows, self.load_x.rows)
        cD = cute.local_tile(cute.make_identity_tensor((n, m)), tile, (at_n, at_m))
        tCcD = thr_mma.partition_C(cD)  # ((2, 2), MMA_N, MMA_M)
        x = alpha * acc.load()
        if const_expr(self.norm is not None):
            spread = self.norm.spread
            if const_expr(self.squaring):
                x = x * spread(tCcD, at_m * tile[1], Int32(tile[1]), sQ[None, 0]).load()
            else:
                x = x * spread(tCcD, Int32(0), m, mRstd).load()
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
        if const_expr(self.gated):
            rY = cute.make_rmem_tensor(tCcD.shape, Float32)
            rY.store(x)
            gate, up = rY[(None, 0), None, None], rY[(None, 1), None, None]  # (2, MMA_N, MMA_M)
            tCcG = tCcD[(None, 0), None, None]
            rG = cute.make_rmem_tensor(gate.shape, mD.element_type)
            rG.store((activate(gate.load()) * up.load()).to(mD.element_type))
            for i in cutlass.range_constexpr(cute.size(tCcG)):
                if cute.elem_less(tCcG[i], (n, m)):
                    mD[tCcG[i][0] // 16 * 8 + tCcG[i][0] % 8, tCcG[i][1], 0] = rG[i]
        else:
            rD = cute.make_rmem_tensor(tCcD.shape, mD.element_type)
            rD.store(activate(x).to(mD.element_type))
            for i in cutlass.range_constexpr(cute.size(tCcD)):
                if cute.elem_less(tCcD[i], (n, m)):
                    mD[tCcD[i][0], tCcD[i][1], 0] = rD[i]
