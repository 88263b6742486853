"""Grouped GEMM, warpgroup schedule: a product for each group of rows by TMA and warpgroup MMA.

Schedule:
    :class:`WarpgroupGemm`'s loads, mainloop and results over tiles that the device finds. In each CTA of a persistent
    grid the loading warp looks for the next tile among the groups' ends (``parts/walk.py``), passes it on through a
    ring in shared memory (``parts/schedule.py``) and starts its loads; the groups that multiply take tiles from the
    ring. The last entry says that there is none, and which rows belong to no group: those get zeros.
    Tiles run group by group, so that CTAs at work share an expert's weights in the L2. An expert is a coordinate of the
    weights' TMA. The tile at a group's end begins early, where the group has so many rows; else it reads rows of the
    next group, which spoil only rows of the product that are not stored (``GroupBoxes``).
    ``swapped`` puts weight rows on the MMA's side of 64, and tokens on that of 16 to 256.

Source:
    CUTLASS's grouped GEMM finds tiles by a warp that scans the problems' sizes; here sizes are prefix sums already and
    no descriptor is written on the device.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.gemm.warpgroup import GROUP, ROWS, Side, WarpgroupGemm
from cutekernels.kernels.cute.parts.schedule import TileRing
from cutekernels.kernels.cute.parts.smem import ALIGNMENT, WarpgroupSmem
from cutekernels.kernels.cute.parts.walk import GroupWalk


@dataclass(frozen=True)
class GroupedWarpgroup:
    """``product`` of each group, whose results are :class:`GroupBoxes`."""

    product: WarpgroupGemm

    @property
    def tokens(self) -> Side:
        """The product's operand that holds tokens."""
        return self.product.of_columns if self.product.swapped else self.product.of_rows

    @property
    def weights(self) -> Side:
        return self.product.of_rows if self.product.swapped else self.product.of_columns

    @property
    def cluster_t(self) -> int:
        """CTAs of a cluster along the tokens: they have weights in common."""
        return self.weights.sharers

    @property
    def cluster_o(self) -> int:
        """CTAs of a cluster along out's columns."""
        return self.tokens.sharers

    @property
    def smem(self) -> WarpgroupSmem:
        return replace(self.product.smem, places=WarpgroupSmem.PLACES)

    @property
    def walk(self) -> GroupWalk:
        return GroupWalk(self.tokens.rows * self.cluster_t, self.product.raster)

    @property
    def ring(self) -> TileRing:
        return TileRing(WarpgroupSmem.PLACES, 4 * self.product.sharing)

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # (T, N)
        mX: cute.Tensor,  # (T, K)
        mW: cute.Tensor,  # (G, N, K); gated (G, 2 * N, K)
        mEnds: cute.Tensor,  # (G + 1,)
        mBias: cute.Tensor | None,  # (G, N)
        stream: cuda.CUstream,
    ):
        body, dtype = self.product, mX.element_type
        prepared, boxed = body.prepared, body.boxed
        swapped = const_expr(body.swapped)
        mX = prepared(mX, False, False)
        mW = prepared(mW, False, not (body.rows_k_major if const_expr(swapped) else body.columns_k_major))  # (N, K, G)
        mTile = prepared(mD, body.swapped, body.results.rows_contiguous)
        layout_r, layout_s = body.layouts(dtype)
        layout_t, layout_w = (layout_s, layout_r) if const_expr(swapped) else (layout_r, layout_s)
        tma_t, tX = boxed(mX, layout_t, self.tokens)
        tma_w, tW = boxed(mW, layout_w, self.weights)
        results = body.results
        tma_d, tD = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), mTile, results.layout(), results.shape
        )
        tiled_mma = body.mma(dtype)
        rows, groups = mX.shape[0], mEnds.shape[0] - 1
        tiles_o = cute.ceil_div(mD.shape[1], self.weights.box * self.cluster_o)
        most = (rows // self.walk.unit + cutlass.min(groups, rows)) * tiles_o * body.cluster
        self.kernel(
            tma_t, tX, tma_w, tW, tma_d, tD, mD, mEnds, mBias, tiled_mma, layout_r, layout_s, tiles_o,
        ).launch(
            grid=[cutlass.min(most, Int32(body.resident)), 1, 1],
            block=[body.threads, 1, 1],
            cluster=[body.cluster, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # percent
            use_pdl=body.dependent,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_t: cute.CopyAtom,
        tX: cute.Tensor,  # (T, K), coordinates
        tma_w: cute.CopyAtom,
        tW: cute.Tensor,  # (N, K, G), coordinates
        tma_d: cute.CopyAtom,
        tD: cute.Tensor,  # (T, N), or (N, T) where swapped, coordinates
        mD: cute.Tensor,
        mEnds: cute.Tensor,
        mBias: cute.Tensor | None,
        tiled_mma: cute.TiledMma,
        layout_r: cute.ComposedLayout,
        layout_s: cute.ComposedLayout,
        tiles_o: Int32,
    ):
        body, smem, ring = self.product, self.smem, self.ring
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        group = cute.arch.make_warp_uniform(tid // GROUP)
        warp = cute.arch.make_warp_uniform(tid // 32)
        loading = const_expr(body.groups)  # the group that loads

        # -- setup
        storage = SmemAllocator().allocate(smem.total_bytes, byte_alignment=ALIGNMENT)
        furnish, ready, init = body.furnish, body.ready, ring.init
        sR, sS, full, empty, landed, turns = furnish(storage, layout_r, layout_s)
        at_ring = cute.recast_ptr(storage + smem.ring_at, dtype=Int64)
        if warp == 4 * loading:
            with cute.arch.elect_one():
                init(at_ring)
        ready(warp, (tma_t, tma_w, tma_d), full, empty, landed)

        k_tiles = cute.ceil_div(cute.size(tX, mode=[1]), body.tile_k)
        search, consume = self.search, self.consume
        if group == loading:
            cute.arch.setmaxregister_decrease(body.registers[0])
            if warp == 4 * loading:
                search(
                    block, (tma_t, tX, sS if const_expr(body.swapped) else sR),
                    (tma_w, tW, sR if const_expr(body.swapped) else sS), mD, mEnds, tiles_o, at_ring, full, empty,
                    k_tiles,
                )  # fmt: skip
                if const_expr(body.dependent):
                    cute.arch.griddepcontrol_launch_dependents()  # their setup then runs behind the last products
        else:
            cute.arch.setmaxregister_increase(body.registers[1])
            consume(
                tid, group, tiled_mma, sR, sS, full, empty, landed, turns, at_ring, k_tiles, storage,
                (tma_d, tD, mD, mBias),
            )  # fmt: skip
        if const_expr(body.cluster > 1):  # the other CTA's copies and arrivals need this one's shared memory
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def search(
        self,
        block: Int32,
        tokens: tuple[cute.CopyAtom, cute.Tensor, cute.Tensor],
        weights: tuple[cute.CopyAtom, cute.Tensor, cute.Tensor],
        mD: cute.Tensor,
        mEnds: cute.Tensor,
        tiles_o: Int32,
        at_ring: cute.Pointer,
        full: cute.Pointer,
        empty: cute.Pointer,
        k_tiles: Int32,
    ):
        """The loading warp's work: finds the CTA's tiles, passes them on, loads them."""
        body, walk = self.product, self.walk
        chunk, find, publish = walk.chunk, walk.find, self.ring.publish
        load, produce = body.load, body.produce
        tile_t, tile_o = const_expr(self.tokens.rows), const_expr(self.weights.box)
        rows, columns = mD.shape
        blocks, _, _ = cute.arch.grid_dim()
        rank, tile, step = block % body.cluster, block // body.cluster, blocks // body.cluster
        rHigh = cute.make_rmem_tensor(4, Int32)
        lead = cutlass.min(cutlass.max(mEnds[0], Int32(0)), rows)
        low, total, top = chunk(mEnds, rows, rHigh, Int32(0), lead)
        first, before = Int32(0), Int32(0)
        entry, stage, phase, group = Int32(0), Int32(0), Int32(1), Int32(0)
        while group >= 0:
            state, group, begin, end, at_t, at_o = find(
                mEnds, rows, rHigh, (first, low, total, top, before), tile, tiles_o
            )
            first, low, total, top, before = state
            if group >= 0:
                if const_expr(self.cluster_t > 1):
                    at_t = at_t * self.cluster_t + rank
                if const_expr(self.cluster_o > 1):
                    at_o = at_o * self.cluster_o + rank
                token = cutlass.max(cutlass.min(begin + at_t * tile_t, end - tile_t), begin)
                column = cutlass.max(cutlass.min(at_o * tile_o, columns - tile_o), Int32(0))
                publish(at_ring, entry, token, column, group, end)
                loads = [
                    *load(tokens, self.tokens, token, group, rank),
                    *load(weights, self.weights, column, group, rank),
                ]
                stage, phase = produce(loads, full, empty, stage, phase, k_tiles)
                entry, tile = entry + 1, tile + step
        for i in cutlass.range_constexpr(2 if body.pingpong else 1):
            publish(at_ring, entry + i, lead, top, Int32(-1), Int32(0))

    @cute.jit
    def consume(
        self,
        tid: Int32,
        group: Int32,
        tiled_mma: cute.TiledMma,
        sR: cute.Tensor,
        sS: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        landed: cute.Pointer,
        turns: cute.Pointer,
        at_ring: cute.Pointer,
        k_tiles: Int32,
        storage: cute.Pointer,
        operands: tuple,
    ):
        """A multiplying group's tiles, one after the other, then its share of the rows of no group."""
        tma_d, tD, mD, mBias = operands
        body, smem, results = self.product, self.smem, self.product.results
        member = tid % GROUP
        fragments, skip, multiply = body.fragments, body.pipeline.skip, body.multiply
        begin, deliver, finish = results.begin, results.deliver, results.finish
        receive, blank = self.ring.receive, self.blank
        rR, rS, acc = fragments(group, tiled_mma, sR, sS)
        at_boxes = storage + smem.boxes_at + group * (smem.boxes * smem.box_bytes)
        at_bias = cute.recast_ptr(storage + smem.biases_at + group * (smem.BIASES * 4), dtype=Float32)
        landed = landed + group * smem.boxes
        below = group * ROWS if const_expr(not body.pingpong) else Int32(0)  # this group's first row of a tile

        stage, phase, used, turn, entry = Int32(0), Int32(0), Int32(0), Int32(1) - group, Int32(0)
        if const_expr(body.pingpong):
            entry = group
            if group == 1:
                stage, phase = skip(stage, phase, k_tiles)
        token, column, expert, end = receive(at_ring, entry)
        while expert >= 0:
            row, across = token, column
            if const_expr(body.swapped):
                row, across = column, token
            corner = (row + below, across, Int32(0))
            bias = None
            if const_expr(mBias is not None):
                bias = mBias[expert, None]
            outgoing = (tma_d, tD, None, None, bias, Float32(1.0), Float32(0.0), mD, end)
            begin(member, corner, row, at_boxes, at_bias, landed, used, outgoing)
            if const_expr(body.pingpong):
                cute.arch.mbarrier_wait(turns + group, turn)
                turn = turn ^ 1
            acc.fill(0.0)
            stage, phase = multiply(member, tiled_mma, acc, rR, rS, full, empty, stage, phase, k_tiles, turns, group)
            if const_expr(body.pingpong):
                stage, phase = skip(stage, phase, k_tiles)
            deliver(member, group, acc, corner, below, at_boxes, at_bias, landed, used, outgoing)
            used = used + results.count
            entry = entry + const_expr(2 if body.pingpong else 1)
            token, column, expert, end = receive(at_ring, entry)
        finish(member)
        blank(tid, mD, token, column)

    @cute.jit
    def blank(self, tid: Int32, mD: cute.Tensor, lead: Int32, tail: Int32):
        """Zeros for the rows before ``lead`` and from ``tail`` on: this CTA's share."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        rows, columns = mD.shape
        warps = const_expr(4 * self.product.groups)
        zeros = cute.make_rmem_tensor(8, mD.element_type)
        zeros.fill(0.0)
        for i in cutlass.range(block * warps + tid // 32, lead + (rows - tail), blocks * warps, unroll=1):
            row = i if i < lead else i - lead + tail
            for column in cutlass.range(tid % 32 * 8, columns, 32 * 8, unroll=1):
                to = mD.iterator + (Int64(row) * mD.stride[0] + column)
                cute.autovec_copy(zeros, cute.make_tensor(to.align(16), cute.make_layout(8)))
