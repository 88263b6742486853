"""GEMM, stream-K schedule of the skinny one: even shares of k-tiles, whatever number of tiles there is.

At 64 to 128 tokens an SM's port is the limit (about 59 KB a microsecond, H200), and 148 tiles over 132 SMs leave 16 of
them with double work: N = 18944, K = 3584 took 46 us with every tile there is, where DRAM needs 35 (2026-11-21). Here
every SM pulls the same number of bytes, so large tiles, which read tokens less often, are no worse dealt out.

Schedule:
    Operands are swapped and k-blocks dealt to groups of warps as in ``gemm_skinny.py``. All CTAs are at work at once.
    The k-tiles of all tiles, tile by tile, are one sequence, of which each CTA has an equal stretch
    (``parts/stream.py``). It walks it with one cp.async pipeline: the next tile's loads are under way while this one's
    result leaves. The warps' sums have shared memory of their own for that.
    A tile within one stretch is finished at once. Of a tile that several CTAs share, each leaves its partial sums in
    the workspace, and the last to arrive adds all of them in the order of K, so the result does not depend on who was
    last. Nobody waits for another CTA.
    K comes in whole k-tiles; rows and tokens that do not exist are not loaded, and what lies in their place reaches
    only results that are not stored.

Source:
    Osama et al., "Stream-K" (2023), for the even stretches; the ticket is split-K's, where the paper's CTAs wait.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.gemm.multistage import rows_first
from cutekernels.kernels.cute.gemm.skinny import SkinnyGemm
from cutekernels.kernels.cute.parts.load import OperandLoad
from cutekernels.kernels.cute.parts.smem import ALIGNMENT, SkinnySmem
from cutekernels.kernels.cute.parts.stream import SLOTS, begin, owner, slot


@dataclass(frozen=True)
class StreamGemm(SkinnyGemm):
    """The body, by way of :meth:`shared`; neither norm nor gate. The workspace has ``SLOTS`` tiles for each CTA."""

    def smem(self, gamma_bytes: int = 0) -> SkinnySmem:
        return replace(super().smem(gamma_bytes), apart=True)

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
        mPartials: cute.Tensor,  # (ctas * SLOTS * tile_m * tile_n,), of the tiles as GemmConfig names them
        mTickets: cute.Tensor,  # (tiles,), zero before and after
        mGamma: None,
        mRstd: None,
        eps: None,
        stream: cuda.CUstream,
    ):
        tile_n, tile_m, tile_k = self.load_w.rows, self.load_x.rows, self.load_w.tile_k
        tiles = cute.ceil_div(cute.size(mW, mode=[0]), tile_n) * cute.ceil_div(cute.size(mD, mode=[1]), tile_m)
        units = tiles * (cute.size(mX, mode=[1]) // tile_k)
        ctas = cutlass.min(units, cute.size(mPartials) // (SLOTS * tile_m * tile_n))
        tiled_mma = self.mma.tiled_mma(mX.element_type)
        self.walk(mD, rows_first(mX), mW, mC, mBias, alpha, beta, mPartials, mTickets, tiled_mma).launch(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.kernel
    def walk(
        self,
        mD: cute.Tensor,
        mX: cute.Tensor,  # (M, K, 1)
        mW: cute.Tensor,
        mC: cute.Tensor | None,
        mBias: cute.Tensor | None,
        alpha: Float32,
        beta: Float32,
        mPartials: cute.Tensor,
        mTickets: cute.Tensor,
        tiled_mma: cute.TiledMma,
    ):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        load_w, load_x = self.load_w, self.load_x
        tile_n, tile_m, tile_k = load_w.rows, load_x.rows, load_w.tile_k
        stages = const_expr(load_w.stages)
        dtype = mX.element_type
        n, m, k = cute.size(mW, mode=[0]), cute.size(mX, mode=[0]), cute.size(mX, mode=[1])
        k_tiles = k // tile_k
        tiles_m = cute.ceil_div(m, tile_m)
        units = cute.ceil_div(n, tile_n) * tiles_m * k_tiles
        first, end = begin(cta, ctas, units), begin(cta + 1, ctas, units)

        # -- setup
        layout_w, layout_x = load_w.smem_layout(dtype), load_x.smem_layout(dtype)
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((tile_n, tile_m)), Float32)  # ((2, 2), MMA_N, MMA_M)
        per_thread = cute.size(acc)
        smem = self.smem()
        storage = SmemAllocator().allocate(smem.total_bytes, byte_alignment=ALIGNMENT)
        base = cute.recast_ptr(storage, dtype=dtype)
        sW = cute.make_tensor(cute.recast_ptr(base, layout_w.inner, dtype), layout_w.outer)  # (N, K, STAGE)
        sX = cute.make_tensor(
            cute.recast_ptr(base + cute.cosize(layout_w), layout_x.inner, dtype), layout_x.outer
        )  # (M, K, STAGE)
        flag = cute.make_tensor(cute.recast_ptr(storage + smem.flag_at, dtype=Int32), cute.make_layout(1))

        if const_expr(self.dependent):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

        panels, fetch, finish = self.panels, self.fetch, self.finish
        copy_w, tWgW, tWsW, tWcW = panels(load_w, tid % load_w.threads, mW, sW)
        copy_x, tXgX, tXsX, tXcX = panels(load_x, tid % load_x.threads, mX, sX)
        loads_w, loads_x = tid < load_w.threads, tid < load_x.threads

        # -- prologue: where the next load comes from, kept up by hand, since a division is slow
        tile = first // k_tiles
        from_n, from_m, from_k = tile // tiles_m, tile % tiles_m, first % k_tiles
        for stage in cutlass.range_constexpr(stages - 1):
            if first + stage < end:
                fetch(load_w, loads_w, copy_w, tWgW, tWsW[None, None, None, stage], tWcW, from_n, from_k, n)
                fetch(load_x, loads_x, copy_x, tXgX, tXsX[None, None, None, stage], tXcX, from_m, from_k, m)
            cute.arch.cp_async_commit_group()
            from_k = from_k + 1
            if from_k == k_tiles:
                from_k = Int32(0)
                from_m = from_m + 1
                if from_m == tiles_m:
                    from_m = Int32(0)
                    from_n = from_n + 1

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

        read, write = Int32(0), Int32(stages - 1)
        for at in cutlass.range(tile, (end - 1) // k_tiles + 1, unroll=1):
            at_n, at_m = at // tiles_m, at % tiles_m
            low, high = cutlass.max(first, at * k_tiles), cutlass.min(end, (at + 1) * k_tiles)

            # -- mainloop of one tile: this warp's k-blocks of each k-tile
            acc.fill(0.0)
            for unit in cutlass.range(low, high, unroll=1):
                cute.arch.cp_async_wait_group(stages - 2)
                cute.arch.sync_threads()
                if unit + (stages - 1) < end:
                    fetch(load_w, loads_w, copy_w, tWgW, tWsW[None, None, None, write], tWcW, from_n, from_k, n)
                    fetch(load_x, loads_x, copy_x, tXgX, tXsX[None, None, None, write], tXcX, from_m, from_k, m)
                cute.arch.cp_async_commit_group()
                from_k = from_k + 1
                if from_k == k_tiles:
                    from_k = Int32(0)
                    from_m = from_m + 1
                    if from_m == tiles_m:
                        from_m = Int32(0)
                        from_n = from_n + 1
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

            # -- the groups' sums meet in the first; a barrier of the next k-tile keeps the next tile's from these
            if const_expr(self.warps_k > 1):
                sums = cute.make_tensor(
                    cute.recast_ptr(storage + smem.sums_at, dtype=Float32),
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

            # -- the CTAs' sums meet in whichever is last
            whole = Int32(1)
            if high - low < k_tiles:
                leader = owner(at * k_tiles, ctas, units)
                sharers = owner((at + 1) * k_tiles - 1, ctas, units) - leader + 1
                partials = cute.make_tensor(
                    mPartials.iterator,
                    cute.make_layout(
                        (self.group, per_thread, SLOTS * ctas), stride=(1, self.group, self.group * per_thread)
                    ),
                )
                if slice_k == 0:
                    mine = slot(cta, leader)
                    for i in cutlass.range_constexpr(per_thread):
                        partials[lane, i, mine] = acc[i]
                cute.arch.fence_acq_rel_gpu()
                cute.arch.sync_threads()
                if tid == 0:
                    flag[0] = cute.arch.atomic_add(mTickets.iterator + at, Int32(1), sem="acq_rel", scope="gpu")
                cute.arch.sync_threads()
                whole = Int32(0)
                if flag[0] == sharers - 1:
                    whole = Int32(1)
                    cute.arch.fence_acq_rel_gpu()
                    if slice_k == 0:
                        acc.fill(0.0)
                        for s in cutlass.range(sharers, unroll=1):
                            theirs = slot(leader + s, leader)
                            for i in cutlass.range_constexpr(per_thread):
                                acc[i] = acc[i] + partials[lane, i, theirs]
                    if tid == 0:
                        mTickets[at] = Int32(0)
            if whole == 1 and slice_k == 0:
                finish(acc, thr_mma, at_n, at_m, mD, mC, mBias, alpha, beta, None, None)

    @cute.jit
    def panels(self, load: cutlass.Constexpr[OperandLoad], tid: Int32, mX: cute.Tensor, sX: cute.Tensor):
        """How thread ``tid`` copies the k-tiles of every row panel: ``(copy, tXgX, tXsX, tXcX)``.

        Source ``(CPY, CPY_ROWS, CPY_K, panel, k)``, destination ``(CPY, CPY_ROWS, CPY_K, STAGE)``, coordinates as the
        source.
        """
        tile, layer = (load.rows, load.tile_k), mX[None, None, 0]
        gX = cute.local_tile(layer, tile, (None, None))
        cX = cute.local_tile(cute.make_identity_tensor(layer.shape), tile, (None, None))
        copy = load.tiled_copy(mX.element_type)
        thr = copy.get_slice(tid)
        return copy, thr.partition_S(gX), thr.partition_D(sX), thr.partition_S(cX)

    @cute.jit
    def fetch(
        self,
        load: cutlass.Constexpr[OperandLoad],
        loads: Boolean,
        copy: cute.TiledCopy,
        tXgX: cute.Tensor,
        target: cute.Tensor,
        tXcX: cute.Tensor,
        panel: Int32,
        at_k: Int32,
        extent: Int32,
    ):
        """Starts the copy of k-tile ``at_k`` of ``panel``, without the rows beyond ``extent``."""
        if loads:
            masked = load.row_mask
            mask = masked(tXcX[None, None, None, panel, None], extent)
            cute.copy(copy, tXgX[None, None, None, panel, at_k], target, pred=mask)
