"""Product of a few tokens with a packed weight: ``out = act(X @ dequantized(W)^T + bias)``, or of a gate and up.

At decode sizes a linear layer is limited by reading the weight, so the kernel keeps many of its bytes in flight, and
decodes them in registers: shared memory and DRAM see packed bytes alone.

Roles:
    Weight rows take the m16 side of the MMA, tokens the n8 side. A CTA has ``tile_n`` weight rows and ``tile_m`` tokens
    at a time. All threads copy, all warps multiply: ``warps_n`` of them divide the rows, and ``warps_k`` groups divide
    each k-tile.

Work:
    A unit is one k-tile of one tile of out. All units, tile after tile, are dealt out to the CTAs in equal runs, so one
    full wave reads the weight whatever its shape ("stream-K"). A tile whose k-tiles lie in several CTAs is added up by
    the one that has the first of them, at the end of its run, when the others have left theirs: they began with it.
    Runs are dealt out from the last CTA to the first, since only CTAs that start earlier may be waited for.

Pipeline:
    ``stages`` buffers of packed weight, tokens, scales and zero points, filled ``stages - 1`` units ahead by cp.async,
    across the ends of tiles. No mbarrier: a thread waits for its own copies (one commit group a unit), then one
    CTA-wide barrier a unit says that everyone's have landed, and that everyone has read the buffer before.

One unit: wait and barrier; start the copies of unit + ``stages - 1``; then for 64 of K at a time: a lane's 16 or 32
    packed bytes of each strip of 16 rows (they lie in its order), the tokens' fragments by ldmatrix; decode a k-block,
    multiply it; at the end of a group of the scales, add its accumulators times its scales to the tile's.
Tile's end: groups of warps leave accumulators in shared memory and the first adds them up; a tile of several CTAs by
    way of a workspace and a counter. Results go straight from registers to memory: they are few.

Numbers: codes less their zero points are exact in the activations' type, products and sums are fp32, and scales
    multiply fp32 sums, a group of K at a time: a weight is never rounded. (nf4's table is, to the activations' type.)
    e2m1 is multiplied by its powers of two where it is decoded, exactly in bf16; fp32 sums have no part in it. NVFP4's
    scales likewise; its factors of rows are those of a ColumnScale.

Gated, W has the gates' rows before up's, half of a CTA's rows are gates and half what they multiply, and a warp has
    equally many strips of both, so that one thread holds a pair: ``out = silu(gate) * up``.

Ends: behind K, where no k-tile divides it, tokens are zeros, the buffer keeps what it held of packed weight (any byte
    decodes to a finite number), and scales are those of the last group. Tokens beyond the last are not copied: their
    columns of the accumulators are never stored.

Dependent launch (PDL): CTAs are set up while the previous kernel still runs, and bring ``prefetch_tiles`` units of
    the weight into the L2. The next may start when the last loads are under way.

Refuses (``ops/products/schedules/packed_skinny.py``): tokens whose rows are not 16-byte aligned, K no multiple of 8.

Source:
    Packing weights in the order of MMA fragments and striped partitioning are Marlin's ideas; scales on the sums
    rather than on the weights are DeepGEMM's promotion. Here both serve int4, int8, e4m3, nf4, and the first e2m1.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cutekernels.kernels.cute.parts.dependent import pdl_launch, pdl_wait
from cutekernels.kernels.cute.parts.epilogue import Epilogue, EpilogueOperands, FragmentCoordinates
from cutekernels.kernels.cute.parts.packed import PackedWeights, load_words, shared_number
from cutekernels.kernels.cute.parts.pipeline import next_stage
from cutekernels.kernels.cute.parts.prefetch import prefetch_bulk
from cutekernels.kernels.cute.parts.ptx import copy_async, copy_async_or_zero, load_matrices
from cutekernels.kernels.cute.parts.smem import TILE, SkinnyPackedSmem
from cutekernels.kernels.cute.parts.tile_share import TileOwner, WarpSums, add_parts, leave, parts_at
from cutekernels.kernels.cute.products.packed_values import Extents, Operands, PackedBody

STRIP = 16  # rows of an MMA
VECTOR = 16  # bytes


@dataclass(frozen=True)
class Cta:
    """A CTA's part of the product, as one of its threads has it."""

    tid: Int32
    run: Int32  # its number
    storage: cute.Pointer
    given: Operands
    of: Extents
    warp_n: Int32 | None = None  # the warp's part of the rows
    warp_k: Int32 | None = None  # and of each k-tile


@dataclass(frozen=True)
class Unit:
    """One k-tile of one tile of out, which is ``n``-th along weight rows and ``m``-th along tokens."""

    n: Int32
    m: Int32
    k_tile: Int32


@dataclass(frozen=True)
class StripCoordinates(FragmentCoordinates):
    """Coordinates of accumulators ((2, 2), (STRIP, HALF), TOKENS) of a warp; gated, half the strips are gates."""

    half: Int32 | None = None  # weight rows of a half

    def coordinate(self, of: tuple, mode: int) -> Int32:
        """From row, token and half."""
        return of[0] + of[2] * self.half if mode == 0 else of[1]

    @cute.jit
    def halves(self, x: cute.TensorSSA) -> tuple[cute.TensorSSA, cute.TensorSSA]:
        rX = cute.make_rmem_tensor(x.shape, Float32)
        rX.store(x)
        strips = const_expr(rX.shape[1] // 2)
        layout = cute.make_layout(((2, 2), strips, rX.shape[2]), stride=((1, 2), 4, 8 * strips))
        gate, up = [cute.make_tensor(rX.iterator + 4 * strips * half, layout) for half in range(2)]
        return gate.load(), up.load()


@dataclass(frozen=True)
class SkinnyPacked(PackedBody):
    """The body."""

    smem: SkinnyPackedSmem
    weights: PackedWeights
    warps_n: int
    epilogue: Epilogue  # with scales of all of K, or factors, a ColumnScale
    dependent: bool
    prefetch_tiles: int  # units of W prefetched before pdl_wait
    ctas_per_sm: int
    gated: bool = False

    @property
    def halves(self) -> int:
        """Parts of a tile's rows: gates and what they multiply, or all."""
        return 2 if self.gated else 1

    @property
    def rows(self) -> int:
        """Columns of out in a tile."""
        return self.smem.tile_n // self.halves

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.smem.warps_k

    @property
    def group_threads(self) -> int:
        """Threads that share a part of K."""
        return 32 * self.warps_n

    @property
    def strips(self) -> int:
        """Strips of 16 rows of a warp."""
        return self.smem.tile_n // STRIP // self.warps_n

    @property
    def chunk(self) -> int:
        """Elements of K of a warp in a unit."""
        return self.smem.tile_k // self.smem.warps_k

    @property
    def interval(self) -> int:
        """Elements of K between two additions to the tile's accumulators; 0: scales multiply at the tile's end."""
        return 0 if self.weights.code == "e2m1" else min(self.weights.group, self.chunk)

    @cute.jit
    def extend(self, given: Operands, ctas: Int32, share: tuple[Int32, ...], stream: cuda.CUstream):
        """Launches the body; ``share``: the units of each CTA, unless the device finds them."""
        self.launch((given, *share), [ctas, 1, 1], stream)

    @cute.kernel
    def kernel(self, given: Operands, share: Int32):
        tid, _, _ = cute.arch.thread_idx()
        run = TileOwner().run()
        of = self.extents(given, cute.ceil_div(cute.size(given.mX, mode=[0]), self.smem.tile_m), share)
        first = run * share
        end = cutlass.min(first + share, of.tiles_n * of.tiles_m * of.k_tiles)
        storage = SmemAllocator().allocate(self.smem.total_bytes, byte_alignment=128)
        cta = Cta(tid, run, storage, given, of)
        at = self.unit(of, first)
        if const_expr(self.dependent):
            if const_expr(self.prefetch_tiles > 0):
                # A thread of a warp each: a warp's prefetches are issued one by one.
                warp = tid // 32
                if tid % 32 == 0 and warp < self.prefetch_tiles and at.k_tile + warp < of.k_tiles:
                    self.prefetch(cta, Unit(at.n, at.m, at.k_tile + warp))
                if const_expr(self.weights.group == 0):  # noqa: SIM102  known when compiled
                    if tid == 1:
                        self.prefetch_scales(cta, at)
            pdl_wait()
        self.walk(cta, at, first, end)

    @cute.jit
    def extents(self, given: Operands, tiles_m: Int32, share: Int32) -> Extents:
        """Sizes of ``given``, with ``tiles_m`` tiles along tokens, for all of which a CTA has ``share`` units."""
        (m, k), (_, n) = given.mX.shape, given.mD.shape
        k_tiles, tiles_n = cute.ceil_div(k, self.smem.tile_k), cute.ceil_div(n, self.rows)
        return Extents(n, m, k, k_tiles, tiles_n, tiles_m, share, tiles_k=cute.ceil_div(k, TILE))

    @cute.jit
    def walk(self, cta: Cta, at: Unit, first: Int32, end: Int32):
        """This CTA's units, from number ``first``, which is ``at``, to ``end``."""
        # -- setup
        base = cta.storage.toint().to(Int32)
        strips, tokens = const_expr(self.strips), const_expr(self.smem.tile_m // 8)
        tiled_mma = cute.make_tiled_mma(warp.MmaF16BF16Op(self.weights.dtype, Float32, (STRIP, 8, 16)))
        acc = cute.make_rmem_tensor(((2, 2), strips, tokens), Float32)
        acc.fill(0.0)
        constant = self.weights.constant(cta.of.share)
        warp_n = cute.arch.make_warp_uniform(cta.tid // 32 % self.warps_n)
        warp_k = cute.arch.make_warp_uniform(cta.tid // self.group_threads)
        cta = replace(cta, warp_n=warp_n, warp_k=warp_k)

        # -- prologue: the first stages - 1 units, a commit group each; unrolled, since a load is on its way the sooner
        coming = at
        for stage in cutlass.range_constexpr(self.smem.stages - 1):
            if first + stage < end:
                self.produce(cta, coming, base + stage * self.smem.stage_bytes)
            cute.arch.cp_async_commit_group()
            coming = self.following(cta, coming)

        # -- mainloop
        read, write = Int32(0), Int32(self.smem.stages - 1)
        for number in cutlass.range(first, end, unroll=1):
            # This unit has landed, for this thread and then for all; and all warps have read the one before, so its
            # buffer, ``write``, may be filled again.
            cute.arch.cp_async_wait_group(self.smem.stages - 2)
            cute.arch.sync_threads()
            if number + (self.smem.stages - 1) < end:
                self.produce(cta, coming, base + write * self.smem.stage_bytes)
            cute.arch.cp_async_commit_group()
            if const_expr(self.dependent):  # noqa: SIM102  known when compiled
                if number == cutlass.max(first, end - (self.smem.stages - 1)):
                    pdl_launch()
            self.consume(cta, tiled_mma, base + read * self.smem.stage_bytes, constant, acc)
            if at.k_tile == cta.of.k_tiles - 1 or number == end - 1:
                # -- the end of a tile, or of this CTA's part of it
                self.end_tile(cta, at, acc)
                acc.fill(0.0)
            coming = self.following(cta, coming)
            at = self.following(cta, at)
            read, write = next_stage(read, self.smem.stages), next_stage(write, self.smem.stages)

    @cute.jit
    def unit(self, of: Extents, number: Int32) -> Unit:
        """Tiles are counted along tokens first, so that those of the same weight rows follow one another."""
        tile = number // of.k_tiles
        n, m = tile, Int32(0)
        if of.tiles_m > 1:  # or nothing more is divided: loads begin the sooner
            n = tile // of.tiles_m
            m = tile - n * of.tiles_m
        return Unit(n, m, number - tile * of.k_tiles)

    @cute.jit
    def following(self, cta: Cta, unit: Unit) -> Unit:
        """The unit behind ``unit``."""
        n, m, k_tile = unit.n, unit.m, unit.k_tile + 1
        if k_tile == cta.of.k_tiles:
            k_tile = Int32(0)
            m = m + 1
            if m == cta.of.tiles_m:
                m = Int32(0)
                n = n + 1
        return Unit(n, m, k_tile)

    # ---- where a unit lies: of one product, whose weight has all rows and whose tokens are all of X's

    def tile_number(self, cta: Cta, unit: Unit) -> Int32:
        """The number of a unit's tile, among all."""
        return unit.n * cta.of.tiles_m + unit.m

    def first_row(self, cta: Cta, unit: Unit) -> int | Int32:
        """The row of W with which the unit's weight begins."""
        return 0

    def all_rows(self, cta: Cta, unit: int) -> Int32:
        """The rows of W in ``unit``s."""
        return cute.ceil_div(cta.of.n * self.halves, unit)

    def first_token(self, unit: Unit) -> Int32:
        """The first token of a unit's tile."""
        return unit.m * self.smem.tile_m

    def end_of_tokens(self, cta: Cta, unit: Unit) -> Int32:
        """Behind the last token of its weight."""
        return cta.of.m

    def row_scales(self, cta: Cta, unit: Unit) -> cute.Tensor:
        """Scales of all of K, or factors: one for each of out's columns."""
        return (cta.given.weight.mF if self.weights.factors else cta.given.weight.mS)[0, None]

    def bias(self, cta: Cta, unit: Unit) -> cute.Tensor | None:
        """The bias of the weight's rows."""
        return cta.given.mBias

    # ---- loads

    @cute.jit
    def produce(self, cta: Cta, unit: Unit, stage: Int32):
        """Starts this thread's copies of a unit into ``stage``; the caller commits the group."""
        first_k = unit.k_tile * self.smem.tile_k
        if first_k + self.smem.tile_k <= cta.of.k:
            self.load_weight(cta, unit, stage, None)
            self.load_tokens(cta, unit, stage + self.smem.x_at, False)
        else:
            # The last k-tile: nothing is read behind K, and tokens are zeros there. What the buffer of the weight holds
            # then adds nothing: every code is a finite number.
            self.load_weight(cta, unit, stage, (cta.of.tiles_k - first_k // TILE) * self.smem.tile_bytes)
            self.load_tokens(cta, unit, stage + self.smem.x_at, True)
        if const_expr(self.weights.group > 0 or self.weights.zeros):
            self.load_scales(cta, unit, first_k, stage)

    @cute.jit
    def load_weight(self, cta: Cta, unit: Unit, stage: Int32, limit: Int32 | None):
        """A run along K of packed tiles, or of the CTA's strips in them, for each 64 rows; up to ``limit`` bytes."""
        # A step of all threads covers whole tiles, or a part of one: either way a constant and a thread's own offset.
        step, part = const_expr(VECTOR * self.threads), const_expr(self.smem.part_bytes)
        own_tile, own = cta.tid * VECTOR // part, cta.tid * VECTOR % part
        for block in cutlass.range_constexpr(self.halves * self.smem.half_blocks):
            half = const_expr(block // self.smem.half_blocks)
            in_half = unit.n * self.rows + block % self.smem.half_blocks * TILE
            row = in_half + (self.first_row(cta, unit) + half * cta.of.n)
            first = Int64(row // TILE) * cta.of.tiles_k + unit.k_tile * (self.smem.tile_k // TILE)
            source = cta.given.weight.mW.iterator.toint() + first * self.smem.tile_bytes
            if const_expr(self.rows < TILE):
                source = source + row % TILE // STRIP * (self.smem.tile_bytes // 4)
            source = source + (own_tile * self.smem.tile_bytes + own)
            if const_expr(block % self.smem.half_blocks == 0) or in_half < cta.of.n:
                for i in cutlass.range_constexpr(-(-self.smem.run_bytes // step)):
                    ahead = const_expr(i * step // part * self.smem.tile_bytes + i * step % part)
                    target = stage + (block * self.smem.run_bytes + i * step) + cta.tid * VECTOR
                    inside = (
                        const_expr((i + 1) * step <= self.smem.run_bytes)
                        or i * step + cta.tid * VECTOR < self.smem.run_bytes
                    )
                    if const_expr(limit is not None):
                        inside = inside and own_tile * self.smem.tile_bytes + own + ahead < limit
                    if inside:
                        copy_async(target, source + ahead, VECTOR)

    @cute.jit
    def load_tokens(self, cta: Cta, unit: Unit, target: Int32, ends: cutlass.Constexpr[bool]):
        """Tokens, their 16-byte chunks swizzled by an XOR with the row so that ldmatrix meets no bank twice."""
        chunks = const_expr(self.smem.tile_k // 8)
        mX, first_k = cta.given.mX, unit.k_tile * self.smem.tile_k
        for i in cutlass.range_constexpr(-(-self.smem.tile_m * chunks // self.threads)):
            at = i * self.threads + cta.tid
            row, chunk = at // chunks, at % chunks
            token = self.first_token(unit) + row
            exists = token < self.end_of_tokens(cta, unit)
            if const_expr((i + 1) * self.threads > self.smem.tile_m * chunks):
                exists = exists and row < self.smem.tile_m
            if exists:
                source = mX.iterator.toint() + (Int64(token) * mX.stride[0] + (first_k + chunk * 8)) * 2
                place = target + row * (self.smem.tile_k * 2) + ((chunk ^ (row & 7)) * VECTOR)
                if const_expr(ends):
                    if first_k + chunk * 8 < cta.of.k:
                        copy_async(place, source, VECTOR)
                    else:
                        copy_async_or_zero(place, mX.iterator.toint(), VECTOR, Int32(0))
                else:
                    copy_async(place, source, VECTOR)

    @cute.jit
    def load_scales(self, cta: Cta, unit: Unit, first_k: Int32, stage: Int32):
        """Scales, and zero points, of the unit's groups: ``(group, row)``."""
        first, count = Int32(0), Int32(1)  # groups: the unit's first, and all of K
        if const_expr(self.weights.group > 0):
            first = first_k // self.weights.group
            count = cute.ceil_div(cta.of.k, self.weights.group)
        if const_expr(self.weights.scale_rows > 1):
            # One scale for the tile's rows; groups behind K are read as the last.
            blocks = self.all_rows(cta, self.weights.scale_rows)
            if cta.tid < self.smem.groups * self.halves:
                group = cutlass.min(first + cta.tid // self.halves, count - 1)
                row = unit.n * self.rows + cta.tid % self.halves * cta.of.n
                block = (row + self.first_row(cta, unit)) // self.weights.scale_rows
                at = Int64(group) * blocks + block
                if const_expr(self.weights.scale_type.width == 32):
                    copy_async(
                        stage + self.smem.scales_at + cta.tid * 4, cta.given.weight.mS.iterator.toint() + at * 4, 4
                    )
                else:
                    # cp.async moves 4 bytes at least, which the next scale may begin between.
                    place = cute.make_ptr(
                        self.weights.scale_type,
                        stage + self.smem.scales_at + cta.tid * 4,
                        cute.AddressSpace.smem,
                        assumed_align=4,
                    )
                    slot = cute.make_tensor(place, cute.make_layout(1))
                    slot[0] = cta.given.weight.mS[group, block]
        else:
            groups, weight = (first, count), cta.given.weight
            if const_expr(self.weights.group > 0):
                self.load_strip(cta, unit, weight.mS, self.smem.groups, groups, stage + self.smem.scales_at)
            if const_expr(self.weights.zeros):
                self.load_strip(cta, unit, weight.mZ, self.smem.zero_groups, groups, stage + self.smem.zeros_at)

    @cute.jit
    def load_strip(
        self, cta: Cta, unit: Unit, mT: cute.Tensor, count: cutlass.Constexpr[int], groups: tuple, target: Int32
    ):
        """``(count, tile_n)`` elements of a ``(groups, rows)`` tensor; groups behind K are read as the last.

        ``groups``: the unit's first, and how many all of K has.
        """
        element_bytes = const_expr(mT.element_type.width // 8)
        rows, first_row = self.all_rows(cta, TILE) * TILE, unit.n * self.rows + self.first_row(cta, unit)
        vectors = const_expr(self.smem.tile_n * element_bytes // VECTOR)
        total = const_expr(vectors * count)
        for i in cutlass.range_constexpr(-(-total // self.threads)):
            at = i * self.threads + cta.tid
            group, vector = at // vectors, at % vectors
            row = vector * (VECTOR // element_bytes)
            if const_expr(self.gated):
                row = row + (cta.of.n - self.rows if row >= self.rows else Int32(0))
            row = row + first_row
            exists = const_expr((i + 1) * self.threads <= total) or at < total
            if const_expr(self.smem.tile_n > TILE or self.gated):
                exists = exists and row < rows
            if exists:
                source_group = cutlass.min(groups[0] + group, groups[1] - 1)
                source = mT.iterator.toint() + (Int64(source_group) * rows + row) * element_bytes
                copy_async(target + at * VECTOR, source, VECTOR)

    @cute.jit
    def prefetch(self, cta: Cta, unit: Unit):
        """The unit's packed tiles into the L2, by one thread."""
        first = unit.k_tile * (self.smem.tile_k // TILE)
        count = cutlass.min(cta.of.tiles_k - first, self.smem.tile_k // TILE) * self.smem.tile_bytes
        for block in cutlass.range_constexpr(self.halves * self.smem.half_blocks):
            in_half = unit.n * self.rows + block % self.smem.half_blocks * TILE
            if in_half < cta.of.n:
                row = in_half + block // self.smem.half_blocks * cta.of.n
                at = (Int64(row // TILE) * cta.of.tiles_k + first) * self.smem.tile_bytes
                prefetch_bulk(cta.given.weight.mW.iterator.toint() + at, count)

    @cute.jit
    def prefetch_scales(self, cta: Cta, unit: Unit):
        """Scales of all of K of the tile's rows into the L2, by one thread."""
        size = const_expr(self.weights.scale_bytes)
        first = unit.n * self.rows
        count = cutlass.min(cute.ceil_div(cta.of.n, TILE) * TILE - first, Int32(self.rows)) * size
        for half in cutlass.range_constexpr(self.halves):
            prefetch_bulk(cta.given.weight.mS.iterator.toint() + Int64(first + half * cta.of.n) * size, count)

    # ---- products

    @cute.jit
    def consume(
        self,
        cta: Cta,
        tiled_mma: cute.TiledMma,
        stage: Int32,
        constant: Int32,
        acc: cute.Tensor,  # ((2, 2), STRIP, TOKENS)
    ):
        """A unit's products of this warp: its strips of rows, its chunk of K."""
        lane, warp_n, warp_k = cta.tid % 32, cta.warp_n, cta.warp_k
        strips, tokens = const_expr(self.strips), const_expr(self.smem.tile_m // 8)
        strip_bytes = const_expr(self.smem.tile_bytes // 4)
        # The lane's bytes of the warp's first strip: strips of a tile lie one behind the other, and so do tiles.
        strip = warp_n * (strips // self.halves)  # of its half
        first_tile = warp_k * (self.chunk // TILE)
        weights_at = (
            stage + (strip // 4) * self.smem.run_bytes + (strip % 4) * strip_bytes + first_tile * self.smem.part_bytes
        )
        weights_at = weights_at + lane * VECTOR
        # ldmatrix: lane i has row i % 8 of the matrix of k-chunk i // 8; chunks 0-3 and 4-7 of a swizzled line.
        row = lane % 8
        x_line = stage + self.smem.x_at + row * (self.smem.tile_k * 2) + warp_k * (self.chunk * 2)
        x_at = [x_line + (((lane // 8) + 4 * half) ^ row) * VECTOR for half in range(2)]
        part = acc
        if const_expr(self.interval > 0):
            part = cute.make_rmem_tensor(acc.shape, Float32)
            part.fill(0.0)
        rA = cute.make_rmem_tensor(((2, 2, 2), strips, 1), self.weights.dtype)
        rB = cute.make_rmem_tensor(((2, 2), tokens, 2), self.weights.dtype)
        pairs, matrices = cute.recast_tensor(rA, Int32), cute.recast_tensor(rB, Int32)
        words = cute.make_rmem_tensor((4, strips), Int32)
        powers = cute.make_rmem_tensor((2, strips), Int32)
        shifts = cute.make_rmem_tensor((2, strips), Int32)
        if const_expr(self.weights.code == "int4" and not self.weights.zeros):
            shifts.fill(self.weights.symmetric)
        for kb in cutlass.range_constexpr(self.chunk // 16):
            k = warp_k * self.chunk + kb * 16  # of the unit
            # -- a lane's packed bytes: 4 k-blocks of 4 bits to 16 bytes, or 2 of 8 bits
            of_run = const_expr(16 * 8 // (8 * self.weights.bits))
            if const_expr(kb % of_run == 0):
                for s in cutlass.range_constexpr(strips):
                    half, own = self.half_of(s)
                    within = const_expr((kb // 4) * self.smem.part_bytes + (kb % 4) // of_run * (32 * VECTOR))
                    before = const_expr(half * self.smem.half_blocks + own // 4)  # runs
                    offset = const_expr(before * self.smem.run_bytes + own % 4 * strip_bytes + within)
                    load_words(weights_at + offset, words[None, s])
            if const_expr(self.weights.zeros and (kb == 0 or (self.interval > 0 and kb * 16 % self.interval == 0))):
                zeros = stage + self.smem.zeros_at
                if const_expr(self.weights.group > 0):
                    zeros = zeros + k // self.weights.group * self.smem.tile_n
                self.load_bytes(zeros, lane, strip, shifts, self.weights.shift)
            if const_expr(self.weights.code == "e2m1" and kb * 16 % self.weights.group == 0):
                if const_expr(self.weights.factors):
                    self.load_words_of_scales(stage, lane, k, strip, powers)
                else:
                    scales = stage + self.smem.scales_at + k // self.weights.group * self.smem.tile_n
                    self.load_bytes(scales, lane, strip, powers, self.weights.power)
            if const_expr(kb % 2 == 0):
                # -- tokens of two k-blocks: four matrices of 8 x 8 for each 8 tokens
                for t in cutlass.range_constexpr(tokens):
                    offset = const_expr(t * 8 * self.smem.tile_k * 2 + kb // 4 * 128)
                    four = load_matrices(x_at[kb // 2 % 2] + offset)
                    for i in cutlass.range_constexpr(4):
                        matrices[i % 2, t, i // 2] = four[i]
            for s in cutlass.range_constexpr(strips):
                of_block = cute.make_tensor(
                    words.iterator + (4 * s + kb % of_run * self.weights.words), cute.make_layout(self.weights.words)
                )
                of_pairs = cute.make_tensor(pairs.iterator + 4 * s, cute.make_layout(4))
                self.weights.decode(of_block, shifts[None, s], constant, of_pairs)
                if const_expr(self.weights.factors):
                    self.weights.times_scales(powers[None, s], kb % 4, constant, of_pairs)
                elif const_expr(self.weights.code == "e2m1"):
                    self.weights.times_powers(powers[None, s], of_pairs)
            cute.gemm(tiled_mma, part, rA[None, None, 0], rB[None, None, kb % 2], part)
            if const_expr(self.interval > 0 and (kb + 1) * 16 % self.interval == 0):
                # -- the end of a group: its accumulators times its scales
                self.promote(stage + self.smem.scales_at, lane, k, strip, part, acc)
                part.fill(0.0)

    def half_of(self, s: int) -> tuple[int, int]:
        """The half of a tile's rows that a warp's strip ``s`` belongs to, and its number among the warp's there."""
        return s // (self.strips // self.halves), s % (self.strips // self.halves)

    @cute.jit
    def load_words_of_scales(self, stage: Int32, lane: Int32, k: Int32, strip: Int32, words: cute.Tensor):
        """Two words of rows r and r + 8 of each strip: scales of 64 of K."""
        first = stage + self.smem.scales_at + (k // self.weights.group * self.smem.tile_n + lane // 4 * 2) * 4
        for s in cutlass.range_constexpr(self.strips):
            half, own = self.half_of(s)
            load_words(first + (half * self.rows + (strip + own) * STRIP) * 4, words[None, s])

    @cute.jit
    def load_bytes(
        self, first: Int32, lane: Int32, strip: Int32, made: cute.Tensor, change: cutlass.Constexpr[Callable]
    ):
        """``change`` of the bytes of rows r and r + 8 of each strip; ``first`` is that of the tile's first row."""
        for s in cutlass.range_constexpr(self.strips):
            half, own = self.half_of(s)
            for r in cutlass.range_constexpr(2):
                at = first + (half * self.rows + (strip + own) * STRIP + lane // 4 + 8 * r)
                made[r, s] = change(shared_number(cutlass.Uint8, at).to(Int32))

    @cute.jit
    def promote(self, scales: Int32, lane: Int32, k: Int32, strip: Int32, part: cute.Tensor, acc: cute.Tensor):
        """``acc += scale * part``; a thread has rows r and r + 8 of each strip."""
        size = const_expr(self.weights.scale_bytes)
        for s in cutlass.range_constexpr(self.strips):
            half, own = self.half_of(s)
            for r in cutlass.range_constexpr(2):
                at = scales + (k // self.weights.group * self.halves + half) * 4
                if const_expr(self.weights.scale_rows == 1):
                    row = half * self.rows + (strip + own) * STRIP + lane // 4 + 8 * r
                    at = scales + (k // self.weights.group * self.smem.tile_n + row) * size
                factor = shared_number(self.weights.scale_type, at).to(Float32)
                for t in cutlass.range_constexpr(self.smem.tile_m // 8):
                    for i in cutlass.range_constexpr(2):
                        acc[(i, r), s, t] = acc[(i, r), s, t] + factor * part[(i, r), s, t]

    # ---- the end of a tile

    @cute.jit
    def end_tile(self, cta: Cta, at: Unit, acc: cute.Tensor):
        """Adds the accumulators of all groups of warps, and of all CTAs that have a part of the tile; stores them."""
        lane = cta.tid % self.group_threads
        if const_expr(self.smem.warps_k > 1):
            # The groups leave the next tile's behind the next unit's barrier, so after the first group has read.
            WarpSums(self.group_threads, self.smem.warps_k).add_up(
                cta.storage + self.smem.sums_at, lane, cta.warp_k, acc
            )
        tile = self.tile_number(cta, at)
        begin, counter = tile * cta.of.k_tiles, cta.given.workspace.mCounters.iterator + tile
        # A run has one part at most of a tile that began before it.
        sums = parts_at(cta.given.workspace.mPartials.iterator, self.group_threads, acc, 1 << 16)  # a part for each run
        if cta.run * cta.of.share > begin:
            if cta.warp_k == 0:
                leave(acc, sums, lane, cta.run)
            TileOwner().post(counter, cta.tid)
        else:
            if at.k_tile < cta.of.k_tiles - 1:
                # The tile's other k-tiles are the later runs'.
                last = (begin + cta.of.k_tiles - 1) // cta.of.share
                TileOwner().wait(counter, cta.tid, last - cta.run)
                if cta.warp_k == 0:
                    add_parts(acc, sums, lane, cta.run + 1, last + 1)
            if cta.warp_k == 0:
                self.store(cta, at, acc)

    @cute.jit
    def store(self, cta: Cta, at: Unit, acc: cute.Tensor):
        """The epilogue; stores the tile, element by element. Those outside are masked here."""
        mD, strips, lane = cta.given.mD, const_expr(self.strips // self.halves), cta.tid % 32
        first_row = at.n * self.rows + cta.warp_n * (strips * STRIP) + lane // 4
        first_token = self.first_token(at) + lane % 4 * 2
        # Of the lane's accumulators: two tokens, rows r and r + 8; strips of 16 rows, in each half; 8 tokens apart.
        row, token, half = cute.E(0), cute.E(1), cute.E(2)
        layout = cute.make_layout(
            ((2, 2), (strips, self.halves), self.smem.tile_m // 8),
            stride=((token, 8 * row), (STRIP * row, half), 8 * token),
        )
        end = self.end_of_tokens(cta, at)
        everywhere = cute.make_identity_tensor((cta.of.n, cta.of.m, self.halves))
        cD = cute.make_tensor(cute.domain_offset((first_row, first_token, 0), everywhere).iterator, layout)
        extents = (cta.of.n * self.halves, end)
        coordinates = StripCoordinates(cD, extents, 0, gated=self.gated, half=cta.of.n)
        operands = EpilogueOperands(
            mBias=self.bias(cta, at),
            alpha=Float32(self.weights.undone) if const_expr(self.weights.folded) else None,
            own=self.row_scales(cta, at) if const_expr(self.weights.by_rows) else None,
            clamp=cta.given.clamp,
        )
        x = self.epilogue.apply(acc.load(), coordinates, operands)
        cOut = cD[None, (None, 0), None]  # ((2, 2), STRIP, TOKENS)
        rD = cute.make_rmem_tensor(cOut.shape, mD.element_type)
        rD.store(x.to(mD.element_type))
        # Row by row, as the factors and biases of rows are used.
        for s in cutlass.range_constexpr(strips):
            for r in cutlass.range_constexpr(2):
                for t in cutlass.range_constexpr(self.smem.tile_m // 8):
                    for i in cutlass.range_constexpr(2):
                        row, token, _ = cOut[(i, r), s, t]
                        if row < cta.of.n and token < end:
                            mD[token, row] = rD[(i, r), s, t]
