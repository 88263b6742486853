"""GEMM, skinny schedule: ``out = act(alpha * X @ W^T + beta * C + bias)`` for a few tokens X and a weight W (N, K).

At decode sizes a linear layer is limited by reading the weight, so the kernel keeps many of its bytes in flight.

Roles:
    Operands are swapped: weight rows take the m16 side of the MMA, tokens the n8 side, so that 8 tokens waste nothing.
    A CTA has ``load_w.rows`` weight rows and ``load_x.rows`` tokens. Its first threads copy (``load_w.threads``,
    ``load_x.threads`` and the norm's may be fewer than the CTA's); every warp multiplies. Within a k-tile, the k-blocks
    of 16 are dealt out to ``warps_k`` groups of warps. ``split_k`` CTAs share a tile's K.

Pipeline:
    ``stages`` buffers of W, X and the norm's weight, filled ``stages - 1`` k-tiles ahead by cp.async. No mbarrier: a
    thread waits for its own copies (one commit group a k-tile), then one CTA-wide barrier a k-tile says that everyone's
    have landed, and that everyone has read the buffer before.

One k-tile: wait and barrier; start the copies of k-tile + ``stages - 1``; load this group's fragments of all its
    k-blocks (ldmatrix); multiply them.
Tile's end: groups of warps leave their accumulators in shared memory and the first adds them up; with ``split_k`` > 1
    all CTAs but the last split's leave their own in a workspace, and that one waits for them and adds them to its own
    in their order, so the result is the same each time. GPUs start it behind the others. Results go straight from
    registers to memory: they are few.

Ends: a ragged K comes *first*, in the first split's first k-tile, zero-filled and masked (``OperandLoad.first_mask``).
    Rows of W and tokens that do not exist are masked in each copy, and not stored (``store``).

Dependent launch (PDL): CTAs are set up while the previous kernel still runs, and bring ``prefetch_tiles`` k-tiles of
    the weight into the L2; loads to shared memory would be wrong where the previous kernel writes the weight. The next
    may start when the last loads are under way: docs/notes/gemm.md#dependent-launch.

With a norm of the tokens in front (``parts/norm.py``) its weight travels in the same stages; sums of squares are added
    as accumulators are, in shared memory and in the workspace, and rstd multiplies the fp32 accumulators. With a gate
    behind, 8 rows of the gate's weight and the same 8 of up's make an MMA's 16, so one thread has both of an output.

Refuses (``ops/products/schedules/skinny.py``): many tokens; operands that are not K-major with 16-byte aligned rows; an
    out that is not N-major; a batch, 64-bit strides, fp16 accumulators.

Source:
    Swapped operands and split-K with a semaphore are common practice (CUTLASS "stream-K" and "split-K semaphore"); the
    dealing of k-blocks to warps is CUTLASS's "sliced-K"; rstd behind the product is the usual rearrangement of norm and
    projection.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.dependent import pdl_launch, pdl_wait
from cutekernels.kernels.cute.parts.epilogue import Epilogue, EpilogueOperands, FragmentCoordinates
from cutekernels.kernels.cute.parts.fragments import shared_tensor
from cutekernels.kernels.cute.parts.gemm_arguments import (
    GemmBody,
    GemmOperands,
    NormOperands,
    columns_first,
    rows_first,
)
from cutekernels.kernels.cute.parts.load import OperandLoad, TileCopies
from cutekernels.kernels.cute.parts.mma import WarpMma
from cutekernels.kernels.cute.parts.norm import GammaCopies, TokenNorm
from cutekernels.kernels.cute.parts.pipeline import next_stage
from cutekernels.kernels.cute.parts.prefetch import prefetch_bulk
from cutekernels.kernels.cute.parts.smem import ALIGNMENT, SkinnySmem
from cutekernels.kernels.cute.parts.tile_share import TileOwner, WarpSums, Workspace, add_parts, leave, parts_at


@dataclass(frozen=True)
class Loads:
    """One thread's copies of a tile's operands, and which of them it has a part in."""

    w: TileCopies
    x: TileCopies
    copies_w: Boolean
    copies_x: Boolean
    gamma: GammaCopies | None


@dataclass(frozen=True)
class SkinnyGemm(GemmBody):
    """The body. ``load_w`` and ``load_x`` may have fewer threads than the CTA."""

    smem: SkinnySmem
    load_w: OperandLoad
    load_x: OperandLoad
    mma: WarpMma
    warps_k: int
    split_k: int
    dependent: bool  # launched under programmatic dependent launch
    epilogue: Epilogue
    ctas_per_sm: int
    norm: TokenNorm | None = None  # of the tokens, in front
    prefetch_tiles: int = 0  # k-tiles of W prefetched before pdl_wait
    gated: bool = False  # W is (2 * I, K), the gate's rows before up's; out (M, I) is activation(gate) * up

    @property
    def group(self) -> int:
        """Threads that share a k-block."""
        return 32 * self.mma.warps_m

    @property
    def threads(self) -> int:
        return self.group * self.warps_k

    @cute.jit
    def extend(self, given: GemmOperands, stream: cuda.CUstream):
        """The workspace's partials are ``(tiles * split_k * tile_m * tile_n,)``, with as many squares as tokens more
        where those are summed; its counters ``(tiles,)``.
        """
        epilogue, norm = given.epilogue, given.norm
        if const_expr(self.norm is not None):
            epilogue = replace(epilogue, alpha=Float32(const_expr(1.0 / self.norm.scale)))
        if const_expr(epilogue.mC is not None):
            epilogue = replace(epilogue, mC=columns_first(epilogue.mC)[None, None, 0])
        if const_expr(norm is None):
            norm = NormOperands()
            mD, mW = columns_first(given.mD), columns_first(given.mB)
        else:
            mW = self.interleaved(given.mB) if const_expr(self.gated) else rows_first(given.mB)
            mD = columns_first(given.mD)
        tiles_n = cute.ceil_div(cute.size(mW, mode=[0]), self.load_w.rows)
        tiles_m = cute.ceil_div(cute.size(mD, mode=[1]), self.load_x.rows)
        tiled_mma = self.mma.tiled_mma(given.mA.element_type)
        arguments = (mD, rows_first(given.mA), mW, epilogue, given.workspace, norm, tiled_mma)
        self.launch(arguments, [self.split_k, tiles_m, tiles_n], stream)

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
        operands: EpilogueOperands,
        workspace: Workspace,
        given: NormOperands,
        tiled_mma: cute.TiledMma,
    ):
        tid, _, _ = cute.arch.thread_idx()
        split, index_m, index_n = cute.arch.block_idx()
        stages = const_expr(self.load_w.stages)
        dtype = mX.element_type
        n, m, k = cute.size(mW, mode=[0]), cute.size(mX, mode=[0]), cute.size(mX, mode=[1])
        k_tiles = cute.ceil_div(k, self.load_w.tile_k)
        first, end = split * k_tiles // self.split_k, (split + 1) * k_tiles // self.split_k  # this CTA's k-tiles

        # -- setup
        layout_w, layout_x = self.load_w.smem_layout(dtype), self.load_x.smem_layout(dtype)
        shape_acc = tiled_mma.partition_shape_C((self.load_w.rows, self.load_x.rows))
        acc = cute.make_rmem_tensor(shape_acc, Float32)  # ((2, 2), MMA_N, MMA_M)
        per_thread = cute.size(acc)
        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=ALIGNMENT)
        base = cute.recast_ptr(storage, dtype=dtype)
        sW = shared_tensor(base, layout_w, dtype)  # (N, K, STAGE)
        sX = shared_tensor(base + cute.cosize(layout_w), layout_x, dtype)  # (M, K, STAGE)

        # What only a norm has: squares of rows, its weight's copies and fragments.
        sQ = tCsG = rG = squares = gamma = None
        if const_expr(self.squaring):
            layout_q = cute.make_layout((self.load_x.rows, self.threads // 32))  # (M, WARP)
            sQ = cute.make_tensor(cute.recast_ptr(storage + self.smem.squares_at, dtype=Float32), layout_q)

        if const_expr(self.dependent):
            if const_expr(self.prefetch_tiles > 0):
                # PDL: before the wait only prefetches, a row of W to a thread, right whatever is written meanwhile.
                row = index_n * self.load_w.rows + tid
                column = first * self.load_w.tile_k
                if tid < self.load_w.rows and row < n and column < k:
                    count = cutlass.min(k - column, cutlass.min(self.prefetch_tiles, end - first) * self.load_w.tile_k)
                    prefetch_bulk((mW.iterator + cute.crd2idx((row, column, 0), mW.layout)).toint(), count * 2)
            pdl_wait()

        copies_w = self.load_w.copies(tid, mW, sW, index_n, Int32(0))
        copies_x = self.load_x.copies(tid % self.load_x.threads, mX, sX, index_m, Int32(0))
        has_x = tid < self.load_x.threads
        has_w = tid < self.load_w.threads
        if const_expr(self.weighted):
            at_g = cute.recast_ptr(storage + self.smem.gamma_at, dtype=given.mGamma.element_type)
            sG = cute.make_tensor(at_g, cute.make_layout((self.load_w.tile_k, stages)))  # (K, STAGE)
            gamma = self.norm.copies(tid, given.mGamma, sG)
            tCsG = self.norm.of_fragments(tid, sG)  # ((2, 2), MMA_K, STAGE)
        loads = Loads(copies_w, copies_x, has_w, has_x, gamma)

        # -- prologue: the first stages - 1 k-tiles, a commit group each
        if first == 0 and k_tiles * self.load_w.tile_k > k:
            # The partial k-tile comes first: masked along K over zeros, so that what lies before K adds nothing.
            if has_w:
                self.load_w.clear(copies_w, 0)
            if has_x:
                self.load_x.clear(copies_x, 0)
            if const_expr(self.weighted):
                self.norm.clear(gamma)
            # The zeros of all threads are written before any copy lands among them.
            cute.arch.sync_threads()
            if has_w:
                self.load_w.start(copies_w, 0, 0, self.load_w.first_mask(copies_w, n))
            if has_x:
                self.load_x.start(copies_x, 0, 0, self.load_x.first_mask(copies_x, m))
            if const_expr(self.weighted):
                self.norm.start(gamma, gamma.copies and gamma.exists, 0, 0)
        else:
            if first < end:
                self.produce(loads, first, 0)
        cute.arch.cp_async_commit_group()
        for stage in cutlass.range_constexpr(1, stages - 1):
            if first + stage < end:
                self.produce(loads, first + stage, stage)
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
        blocks = const_expr(self.load_w.tile_k // 16 // self.warps_k)
        if const_expr(self.weighted):
            rG = cute.make_rmem_tensor(((2, 2), blocks), given.mGamma.element_type)
        if const_expr(self.squaring):
            squares = cute.make_rmem_tensor(((2, 2), cute.size(rX, mode=[1])), Float32)
            squares.fill(0.0)

        acc.fill(0.0)
        read, write = Int32(0), Int32(stages - 1)
        for k_tile in cutlass.range(first, end, unroll=1):
            # This k-tile has landed, for this thread and then for all; and all warps have the fragments of the one
            # before in registers, so its buffer, ``write``, may be filled again.
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.sync_threads()
            coming = k_tile + (stages - 1)
            if coming < end:
                self.produce(loads, coming, write)
            cute.arch.cp_async_commit_group()
            if const_expr(self.dependent):  # noqa: SIM102  known when compiled
                if k_tile == cutlass.max(first, end - stages + 1):
                    pdl_launch()
            # Fragments of this group's k-blocks: every ``warps_k``-th, so that groups share a k-tile evenly.
            for block in cutlass.range_constexpr(blocks):
                kb = block * self.warps_k + slice_k
                cute.copy(to_w, tCsW[None, None, kb, read], tCrW[None, None, block])
                cute.copy(to_x, tCsX[None, None, kb, read], tCrX[None, None, block])
                if const_expr(self.weighted):
                    cute.autovec_copy(tCsG[None, kb, read], rG[None, block])
            for block in cutlass.range_constexpr(blocks):
                # gamma on the weight's fragments, in place; squares of the tokens by the same MMA.
                if const_expr(self.weighted):
                    self.norm.weigh(rW[None, None, block], rG[None, block], rW[None, None, block])
                if const_expr(self.squaring):
                    self.norm.square(tiled_mma, lane // 32, k_tile * blocks + block, squares, rX[None, None, block])
                cute.gemm(tiled_mma, acc, rW[None, None, block], rX[None, None, block], acc)
            read, write = next_stage(read, stages), next_stage(write, stages)
        if const_expr(self.squaring):
            self.norm.leave(tid, squares, sQ)
        # No copy is on its way and every warp has read: accumulators may take the stages' place. Squares are left.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        # -- the first group of warps adds the accumulators of all
        if const_expr(self.warps_k > 1):
            WarpSums(self.group, self.warps_k).add_up(storage, lane, slice_k, acc)

        # rstd of each token: given, or, where squares are summed, left in shared memory before the tile's end.
        row_factors = given.mRstd
        if const_expr(self.squaring):
            row_factors = sQ[None, 0]
        operands = replace(operands, row_factors=row_factors)
        if const_expr(self.split_k == 1):
            # -- this CTA has the whole K
            if const_expr(self.squaring):
                self.norm.leave_rstd(tid, sQ, sQ, k, given.eps)
            if slice_k == 0:
                self.store(acc, thr_mma, index_n, index_m, mD, operands)
        else:
            # -- the last split, which waits for the others, adds their accumulators to its own
            _, tiles_m, _ = cute.arch.grid_dim()
            tile = index_n * tiles_m + index_m
            squares_left = const_expr(self.load_x.rows if self.squaring else 0)
            length = self.split_k * (self.group * per_thread + squares_left)
            of_tile = workspace.mPartials.iterator + Int64(tile) * length
            partials = parts_at(of_tile, self.group, acc, self.split_k)
            if const_expr(self.squaring):
                layout_q = cute.make_layout((self.load_x.rows, self.split_k))  # (M, SPLIT)
                gQ = cute.make_tensor(of_tile + self.split_k * self.group * per_thread, layout_q)
                if tid < self.load_x.rows:
                    gQ[tid, split] = self.norm.total(sQ, tid)
            counter, others = workspace.mCounters.iterator + tile, const_expr(self.split_k - 1)
            if split < others:
                # Another's: this CTA leaves the accumulators of its first group, and its sums of squares.
                if slice_k == 0:
                    leave(acc, partials, lane, split)
                TileOwner().post(counter, tid)
            else:
                TileOwner().wait(counter, tid, Int32(others))
                # rstd comes from the squares of all splits.
                if const_expr(self.squaring):
                    self.norm.leave_rstd(tid, gQ, sQ, k, given.eps)
                if slice_k == 0:
                    add_parts(acc, partials, lane, Int32(0), Int32(others))
                    self.store(acc, thr_mma, index_n, index_m, mD, operands)

    @cute.jit
    def produce(self, loads: Loads, k_tile: Int32, stage: Int32):
        """Starts this thread's part of a k-tile's copies into ``stage``; the caller commits the group."""
        if loads.copies_w:
            self.load_w.start(loads.w, k_tile, stage, loads.w.mask)
        if loads.copies_x:
            self.load_x.start(loads.x, k_tile, stage, loads.x.mask)
        if const_expr(self.weighted):
            self.norm.start(loads.gamma, loads.gamma.copies, k_tile, stage)

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,  # ((2, 2), MMA_N, MMA_M)
        thr_mma: cute.TiledMma,
        index_n: Int32,
        index_m: Int32,
        mD: cute.Tensor,  # (N, M, 1)
        operands: EpilogueOperands,  # C (N, M), row factors (M,)
    ):
        """The epilogue; stores the tile, element by element. Those outside are masked here."""
        n, m = cute.size(mD, mode=[0]) * (2 if const_expr(self.gated) else 1), cute.size(mD, mode=[1])
        tile = (self.load_w.rows, self.load_x.rows)
        cD = cute.local_tile(cute.make_identity_tensor((n, m)), tile, (index_n, index_m))
        tCcD = thr_mma.partition_C(cD)  # ((2, 2), MMA_N, MMA_M)
        origin = (index_n * tile[0], index_m * tile[1])
        # Rows r and r + 8 of an MMA's 16 are the gate and up of one output.
        coordinates = FragmentCoordinates(tCcD, (n, m), 0, origin, gated=self.gated)
        x = self.epilogue.apply(acc.load(), coordinates, operands)
        cOut = tCcD[(None, 0), None, None] if const_expr(self.gated) else tCcD
        rD = cute.make_rmem_tensor(cOut.shape, mD.element_type)
        rD.store(x.to(mD.element_type))
        for i in cutlass.range_constexpr(cute.size(cOut)):
            row, token = cOut[i]
            if cute.elem_less(cOut[i], (n, m)):
                if const_expr(self.gated):
                    row = row // 16 * 8 + row % 8  # of gates and up alike
                mD[row, token, 0] = rD[i]
