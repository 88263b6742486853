"""GEMM, multistage schedule: ``out = act(alpha * A @ B + beta * C + bias)`` on any GPU with cp.async and mma.sync.

Roles:
    There are none apart: every warp copies and every warp multiplies, ``warps_m x warps_n`` of them on a tile. A CTA
    has one tile; a *persistent* one takes a tile after the other, a grid apart, in the raster's order.

Pipeline:
    ``stages`` buffers of A and B in shared memory, filled ``stages - 1`` k-tiles ahead by cp.async. It has no mbarrier:
    a thread waits for its own copies (one commit group a k-tile, empty groups at the end keep the count), then one
    CTA-wide barrier a k-tile says that everyone's copies have landed, and that everyone has read the buffer before.

One k-tile of the mainloop:
    1. k-block 0: load the fragments of block 1 (ldmatrix), start the copies of k-tile + ``stages - 1`` into the buffer
       that the k-tile before has left, multiply block 0.
    2. k-block i: load the fragments of block i + 1, multiply block i.
    3. Last k-block: wait for the next k-tile and for all warps, load its block 0, multiply the last block.

Ends:
    A ragged K comes *first*: ``OperandLoad.copies`` shifts k-tiles so that the first is partial. ``produce`` zeros its
    buffer and masks it along K (``OperandLoad.first_mask``), so the mainloop needs no bounds along K. Rows beyond M or
    N are masked in each copy (``OperandLoad.mask``); their products are whatever lay in shared memory, and the epilogue
    does not store them.

Epilogue:
    Through a tile in shared memory, 16 bytes a thread (``parts/tile_output.py``): in the place of the buffers, or, in a
    persistent grid, apart from them, because there the next tile's copies start before the result leaves:
    docs/notes/gemm.md#persistent. An M-major out is computed as its transpose, ``B^T A^T``.

Refuses:
    Nothing: any layout, any alignment, 64-bit strides, K = 0. ``ops/products/schedules/multistage.py`` says which tiles
    fit which problem.

Source:
    The cp.async pipeline is the classic Ampere one (CUTLASS 2.x "multistage"; NVIDIA's CuTe DSL
    ``tensorop_gemm`` example has the partial-tile-first trick). Here layouts, loads, raster and epilogue are
    parts, tiles and warps are free, every operand takes either major and any alignment, and strides may be
    64 bits wide.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.fragments import shared_tensor
from cutekernels.kernels.cute.parts.gemm_arguments import GemmBody, GemmOperands, columns_first, rows_first
from cutekernels.kernels.cute.parts.load import OperandLoad
from cutekernels.kernels.cute.parts.mma import WarpMma
from cutekernels.kernels.cute.parts.pipeline import next_stage
from cutekernels.kernels.cute.parts.ptx import instruction
from cutekernels.kernels.cute.parts.schedule import Raster, Tile
from cutekernels.kernels.cute.parts.smem import ALIGNMENT
from cutekernels.kernels.cute.parts.tile_output import TileOutput, TileStore


@dataclass(frozen=True)
class Cta:
    """A CTA's buffers and accumulators, as one of its threads has them."""

    tid: Int32
    sA: cute.Tensor  # (M, K, STAGE)
    sB: cute.Tensor  # (N, K, STAGE)
    sD: cute.Tensor  # (tile_m, tile_n), in their place or, persistent, apart from them
    tiled_mma: cute.TiledMma
    acc: cute.Tensor  # ((2, 2), MMA_M, MMA_N)


@dataclass(frozen=True)
class MultistageGemm(GemmBody):
    """The body; ``ctas_per_sm`` bounds registers so that so many CTAs fit."""

    load_a: OperandLoad
    load_b: OperandLoad
    mma: WarpMma
    raster: Raster
    results: TileStore
    ctas_per_sm: int
    transposed: bool  # out is M-major: compute its transpose, B^T A^T, instead
    resident: int  # most CTAs in the grid; 0 for one a tile
    dependent: ClassVar[bool] = False

    @property
    def threads(self) -> int:
        return self.results.threads

    @property
    def persistent(self) -> bool:
        return self.resident > 0

    @cute.jit
    def extend(self, given: GemmOperands, stream: cuda.CUstream):
        if const_expr(self.transposed):
            mA, mB, out_first = columns_first(given.mB), rows_first(given.mA), columns_first
        else:
            mA, mB, out_first = rows_first(given.mA), columns_first(given.mB), rows_first
        # mA (M, K, L), mB (N, K, L), mC and mD (M, N, L)
        mD, mC = out_first(given.mD), given.epilogue.mC
        if const_expr(mC is not None):
            mC = out_first(mC)
        tiles_m = cute.ceil_div(cute.size(mD, mode=[0]), self.results.tile_m)
        tiles_n = cute.ceil_div(cute.size(mD, mode=[1]), self.results.tile_n)
        blocks = tiles_m * tiles_n * cute.size(mD, mode=[2])
        if const_expr(self.persistent):
            blocks = cutlass.min(blocks, Int32(self.resident))
        given = GemmOperands(mD, mA, mB, replace(given.epilogue, mC=mC))
        self.launch((given, self.mma.tiled_mma(mA.element_type)), [blocks, 1, 1], stream)

    @cute.kernel
    def kernel(self, given: GemmOperands, tiled_mma: cute.TiledMma):
        # given: mA (M, K, L), mB (N, K, L), mC and mD (M, N, L)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        cta = self.set_up(tid, given.mA.element_type, tiled_mma)
        m, n = cute.size(given.mA, mode=[0]), cute.size(given.mB, mode=[0])
        tiles_m, tiles_n = cute.ceil_div(m, self.results.tile_m), cute.ceil_div(n, self.results.tile_n)
        tiles = tiles_m * tiles_n * cute.size(given.mD, mode=[2])
        if const_expr(self.persistent):
            # -- tile after tile: the next one's first copies are under way while this one's result leaves
            self.produce(cta, given, self.raster.place(block, tiles_m, tiles_n))
            for index in cutlass.range(block, tiles, blocks, unroll=1):
                tile = self.raster.place(index, tiles_m, tiles_n)
                self.consume(replace(cta, tid=opaque(tid)), given, tile)
                if index + blocks < tiles:
                    coming = replace(cta, tid=opaque(tid))
                    self.produce(coming, given, self.raster.place(index + blocks, tiles_m, tiles_n))
                self.store(replace(cta, tid=opaque(tid)), given, tile)
        else:
            self.multiply(cta, given, self.raster.place(block, tiles_m, tiles_n))

    @cute.jit
    def multiply(self, cta: Cta, given: GemmOperands, tile: Tile):
        """One tile, from its first copies to its end."""
        self.produce(cta, given, tile)
        self.consume(cta, given, tile)
        self.store(cta, given, tile)

    @cute.jit
    def set_up(self, tid: Int32, dtype: cutlass.Constexpr[type[cutlass.Numeric]], tiled_mma: cute.TiledMma) -> Cta:
        layout_a, layout_b = self.load_a.smem_layout(dtype), self.load_b.smem_layout(dtype)
        layout_d = self.results.smem_layout(dtype)
        a_elements, b_elements = cute.cosize(layout_a), cute.cosize(layout_b)
        staged, d_elements = a_elements + b_elements, cute.cosize(layout_d)
        d_offset = const_expr(staged if self.persistent else 0)
        storage = SmemAllocator().allocate_array(dtype, max(staged, d_offset + d_elements), byte_alignment=ALIGNMENT)
        sA, sB = shared_tensor(storage, layout_a, dtype), shared_tensor(storage + a_elements, layout_b, dtype)
        sD = shared_tensor(storage + d_offset, layout_d, dtype)
        shape = tiled_mma.partition_shape_C((self.results.tile_m, self.results.tile_n))
        return Cta(tid, sA, sB, sD, tiled_mma, cute.make_rmem_tensor(shape, self.mma.accumulate))

    @cute.jit
    def produce(self, cta: Cta, given: GemmOperands, tile: Tile):
        """Starts the copies of the first ``stages - 1`` k-tiles of ``tile``, the partial one first.

        Nobody may read the buffers any more. Each k-tile is one commit group, those that do not exist too.
        """
        m, n, k = cute.size(given.mA, mode=[0]), cute.size(given.mB, mode=[0]), cute.size(given.mA, mode=[1])
        k_tiles = cute.ceil_div(k, self.load_a.tile_k)
        a = self.load_a.copies(cta.tid, given.mA, cta.sA, tile.m, tile.layer)
        b = self.load_b.copies(cta.tid, given.mB, cta.sB, tile.n, tile.layer)
        if k_tiles * self.load_a.tile_k > k:
            # The partial k-tile: masked along K over zeros, so that what lies before K adds nothing.
            self.load_a.clear(a, 0)
            self.load_b.clear(b, 0)
            # The zeros of all threads are written before any copy lands among them.
            cute.arch.sync_threads()
            self.load_a.start(a, 0, 0, self.load_a.first_mask(a, m))
            self.load_b.start(b, 0, 0, self.load_b.first_mask(b, n))
        else:
            # K is whole k-tiles: the first is like the others.
            if k_tiles > 0:
                self.load_a.start(a, 0, 0, a.mask)
                self.load_b.start(b, 0, 0, b.mask)
        cute.arch.cp_async_commit_group()
        for stage in cutlass.range_constexpr(1, self.load_a.stages - 1):
            if stage < k_tiles:
                self.load_a.start(a, stage, stage, a.mask)
                self.load_b.start(b, stage, stage, b.mask)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def consume(self, cta: Cta, given: GemmOperands, tile: Tile):
        """The mainloop of ``tile``, whose first copies :meth:`produce` has started. All buffers are free afterwards."""
        stages = const_expr(self.load_a.stages)
        k_tiles = cute.ceil_div(cute.size(given.mA, mode=[1]), self.load_a.tile_k)
        a = self.load_a.copies(cta.tid, given.mA, cta.sA, tile.m, tile.layer)
        b = self.load_b.copies(cta.tid, given.mB, cta.sB, tile.n, tile.layer)
        thr_mma = cta.tiled_mma.get_slice(cta.tid)
        rA = thr_mma.make_fragment_A(thr_mma.partition_A(cta.sA)[None, None, None, 0])  # (MMA, MMA_M, MMA_K)
        rB = thr_mma.make_fragment_B(thr_mma.partition_B(cta.sB)[None, None, None, 0])  # (MMA, MMA_N, MMA_K)
        to_a, to_b = self.mma.fragment_copies(cta.tiled_mma, given.mA.element_type)
        ldm_a, ldm_b = to_a.get_slice(cta.tid), to_b.get_slice(cta.tid)
        tCsA, tCrA = ldm_a.partition_S(cta.sA), ldm_a.retile(rA)  # (CPY, CPY_M, CPY_K, STAGE)
        tCsB, tCrB = ldm_b.partition_S(cta.sB), ldm_b.retile(rB)  # (CPY, CPY_N, CPY_K, STAGE)
        k_blocks = cute.size(rA, mode=[2])

        cta.acc.fill(0.0)
        read, write = Int32(0), Int32(stages - 1)
        # Wait for this thread's copies of k-tile 0 (the ``stages - 2`` groups behind it may be under way), then for
        # everyone's.
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.sync_threads()
        cute.copy(to_a, tCsA[None, None, 0, 0], tCrA[None, None, 0])
        cute.copy(to_b, tCsB[None, None, 0, 0], tCrB[None, None, 0])
        # All k-tiles alike: none is masked along K, the partial one being zero-filled.
        for k_tile in cutlass.range(k_tiles, unroll=1):
            for kb in cutlass.range_constexpr(k_blocks):
                nxt = (kb + 1) % k_blocks
                if const_expr(kb == k_blocks - 1):
                    read = next_stage(read, stages)
                    # The next k-tile has landed, for this thread and then for all; and all warps have this k-tile's
                    # fragments in registers, so its buffer may be filled again in the next round.
                    cute.arch.cp_async_wait_group(stages - 2)
                    cute.arch.sync_threads()
                # Fragments one k-block ahead. Behind the last k-tile they are stale, and not multiplied.
                cute.copy(to_a, tCsA[None, None, nxt, read], tCrA[None, None, nxt])
                cute.copy(to_b, tCsB[None, None, nxt, read], tCrB[None, None, nxt])
                if const_expr(kb == 0):
                    # Into the buffer of the k-tile before, which all warps have left at the barrier above.
                    ahead = k_tile + (stages - 1)
                    if ahead < k_tiles:
                        self.load_a.start(a, ahead, write, a.mask)
                        self.load_b.start(b, ahead, write, b.mask)
                    cute.arch.cp_async_commit_group()
                    write = next_stage(write, stages)
                cute.gemm(cta.tiled_mma, cta.acc, rA[None, None, kb], rB[None, None, kb], cta.acc)
        # No copy is on its way and every warp has read: the epilogue, or the next tile's copies, may take the buffers.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    @cute.jit
    def store(self, cta: Cta, given: GemmOperands, tile: Tile):
        """The epilogue of ``tile``."""
        shape, at = (self.results.tile_m, self.results.tile_n), (tile.m, tile.n)
        m, n = cute.size(given.mD, mode=[0]), cute.size(given.mD, mode=[1])
        gD = cute.local_tile(given.mD[None, None, tile.layer], shape, at)  # (tile_m, tile_n)
        cD = cute.local_tile(cute.make_identity_tensor((m, n)), shape, at)  # (tile_m, tile_n), coordinates
        mC = gC = None
        if const_expr(given.epilogue.mC is not None):
            mC = given.epilogue.mC[None, None, tile.layer]
            gC = cute.local_tile(mC, shape, at)  # (tile_m, tile_n)
        out = TileOutput(gD, cD, cta.sD, (m, n), gC, replace(given.epilogue, mC=mC))
        self.results.finish(cta.tid, cta.tiled_mma.get_slice(cta.tid), cta.acc, out)


def opaque(x: Int32) -> Int32:
    """``x`` as a value unknown to the compiler, which then keeps nothing derived from it in registers."""
    return Int32(instruction("mov.b32 $0, $1;", "=r,r", x, result=Int32.mlir_type))
