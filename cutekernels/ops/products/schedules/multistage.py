"""The multistage schedule: rules, model, body. It takes every problem, on every GPU.

Where rows of out are not contiguous the kernel computes ``out^T``; rules and model of both look at its own tile.
"""

from __future__ import annotations

from typing import Any

from cutekernels import rates
from cutekernels.columns import gcd, larger, pick, smaller, where
from cutekernels.gpu import GpuSpec
from cutekernels.kernels.cute.parts.smem import GemmSmem
from cutekernels.op import power_of_two
from cutekernels.ops.products.schedules import coefficients
from cutekernels.ops.products.schedules.problem import ACROSS, ELEMENT_BYTES, GemmConfig, GemmProblem
from cutekernels.ops.products.schedules.schedule import PLAIN, DenseSchedule, Extras, mma_share, resident_ctas
from cutekernels.rules import Among, Broken, occupancy_rules, of_both, of_config

MAX_WARPS = 8
MAX_CTAS = 3
MIN_TILE = 32
MIN_WARP_TILE = 16
FEW_ROWS = 32  # the most of a tile's smaller side where k-tiles may be 256 bytes
# Registers beside accumulators and double-buffered fragments: addresses, masks, loop state.
OTHER_REGISTERS = 48  # docs/notes/gemm.md#registers (compiled for the H200, 2026-11)
# Registers that a default has for each element loaded alone, by strides of 32 bits and of 64: with fewer most tiles
# spill, docs/notes/gemm.md#registers (compiled for sm_80, sm_89 and sm_90a, 2026-11-30).
_LONE_REGISTERS = 5, 7

# Tiles and warps that the default chooses among.
_SHORTLIST = (
    (128, 256, 2, 4), (256, 128, 4, 2), (128, 128, 2, 2), (128, 128, 4, 2), (64, 128, 2, 2), (128, 64, 2, 2),
    (128, 64, 4, 1), (64, 128, 1, 4), (64, 64, 2, 2), (32, 128, 1, 4), (128, 32, 4, 1), (32, 256, 1, 4),
    (256, 32, 4, 1), (32, 64, 1, 4), (64, 32, 4, 1), (32, 32, 2, 2),)  # fmt: skip


class Multistage(DenseSchedule):
    """Every warp copies and multiplies; any layout, any alignment; no extras."""

    name = "multistage"

    def smem(self, c: GemmConfig, extras: Extras = PLAIN) -> GemmSmem:
        return GemmSmem(c.tile_m, c.tile_n, c.tile_k, c.stages, c.persistent)

    # -- rules

    @of_config
    def warps(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        yield c.warps > MAX_WARPS, "{}x{} warps are more than {}", c.warps_m, c.warps_n, MAX_WARPS
        few = (c.warps < 4) & (c.tile_m * c.tile_n > 32 * 64)
        yield few, "{} warps are too few for a {}x{} tile: take 4", c.warps, c.tile_m, c.tile_n

    @of_config
    def tile_divides(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        for name, tile, warps in (("m", c.tile_m, c.warps_m), ("n", c.tile_n, c.warps_n)):
            odd = tile % (MIN_WARP_TILE * warps) > 0
            yield odd, "tile_{}={} does not divide among {} warps of {}", name, tile, warps, MIN_WARP_TILE

    @of_config
    def warp_tile(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        rows, columns = c.warp_tile
        short = smaller(rows, columns)
        lopsided = larger(rows, columns) > 2 * short
        yield lopsided, "a warp's {}x{} tile is lopsided: at most 2 to 1", rows, columns
        small = (short < 32) & (c.tile_m * c.tile_n >= 128 * 64)
        yield small, "{} warps of {}x{} load more than they multiply: take fewer", c.warps, rows, columns

    @of_config
    def long_k_tiles(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        many = (c.tile_k > 64) & (smaller(c.tile_m, c.tile_n) > FEW_ROWS)
        why = "tile_k={} is for few rows, where DRAM is the limit: take 64 for {}x{} tiles"
        yield many, why, c.tile_k, c.tile_m, c.tile_n

    @of_config
    def persistent_tile(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        small = c.persistent & ((c.ctas_per_sm > 1) | (c.tile_m * c.tile_n < 128 * 128))
        yield small, "persistent=1 is for large tiles that have an SM to themselves: others hide each other's ends"

    @of_both
    def occupancy(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        c = of_kernel(p, c)
        registers, smem = registers_per_thread(p, c), self.smem(c).total_bytes
        return occupancy_rules(gpu, ctas=c.ctas_per_sm, most=MAX_CTAS, warps=c.warps, registers=registers, smem=smem)

    @of_both
    def operand_tiles(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        """Threads divide a tile's vectors; an extent fills half of its tile."""
        threads = self.threads(c)
        for name, tile, side in zip("mn", (c.tile_m, c.tile_n), p.operands, strict=True):
            odd = divides(tile, c.tile_k, side.k_major, side.align, threads) == 0
            yield odd, "{} threads do not divide a {}x{} tile (alignment {})", threads, tile, c.tile_k, side.align
            idle = tile > max(MIN_TILE, power_of_two(side.extent))
            yield idle, "tile_{}={} idles most of a tile over an extent of {}", name, tile, side.extent

    @of_both
    def long_k_tiles_of(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        rows, columns = p.sides
        if not (columns if columns.extent > rows.extent else rows).k_major:
            yield c.tile_k > 64, "tile_k={} is for a larger operand that lies along K: take 64", c.tile_k

    @of_both
    def output_tile(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        c = of_kernel(p, c)
        threads = self.threads(c)
        for align in {p.out_align} | ({p.c_align} if source(p) == "staged" else set()):
            odd = divides(c.tile_m, c.tile_n, True, align, threads) == 0
            yield odd, "{} threads do not divide the output tile (alignment {})", threads, align

    @of_both
    def persistent_tiles(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        few = -(-p.m // c.tile_m) * -(-p.n // c.tile_n) * p.batch <= gpu.sm_count
        yield c.persistent & few, "persistent=1 is for more tiles than there are SMs"

    @of_both
    def raster(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        """CTAs that run together should cover about as many rows as columns: wide tiles need taller bands."""
        c = of_kernel(p, c)
        rows = -(-p.sides[0].extent // c.tile_m)
        tall = (rows >= 64) | ((rows >= 16) & (c.tile_n > c.tile_m))
        suits = ((c.raster == 1) & (rows <= 4)) | ((c.raster == 8) & (rows >= 2)) | ((c.raster == 16) & tall)
        why = "raster={} does not suit {} tile rows: 1 is for up to 4, 8 for 2 and more, 16 for 64, of wide tiles 16"
        yield suits == 0, why, c.raster, rows

    # -- choice

    def usual(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Among:
        knobs = ("tile_m", "tile_n", "warps_m", "warps_n")
        return {tuple(ACROSS[name] for name in knobs) if p.transposed else knobs: _SHORTLIST}

    def usually(self, p: GemmProblem, c: Any, gpu: GpuSpec, x: Extras) -> Any:
        """Tiles that leave registers to elements loaded alone; the tuner tries others too, and drops what spills."""
        c = of_kernel(p, c)
        threads = self.threads(c)
        lone = sum(tile for tile, side in zip((c.tile_m, c.tile_n), p.sides, strict=True) if side.align == 1)
        needed = _LONE_REGISTERS[p.wide] * lone * c.tile_k // threads
        return needed <= smaller(gpu.MAX_REGISTERS_PER_THREAD, gpu.REGISTERS_PER_SM // (threads * c.ctas_per_sm))

    def times_us(self, p: GemmProblem, c: Any, gpu: GpuSpec, x: Extras = PLAIN) -> Any:
        rows, columns = p.sides
        seen = of_kernel(p, c)
        tiles = -(-rows.extent // seen.tile_m) * -(-columns.extent // seen.tile_n) * p.batch
        moved = ELEMENT_BYTES * p.batch * (p.m * p.k + p.k * p.n + p.m * p.n * (1 if p.c == "none" else 2))
        return self.tiles_us(p, c, tiles, moved, gpu)

    def tiles_us(self, p: GemmProblem, c: Any, tiles: Any, moved: float, gpu: GpuSpec, search_us: float = 0.0) -> Any:
        """Waves of CTAs, each k-tile as slow as tensor cores, L2 or latency, plus fixed costs; or its share of DRAM's
        time, if longer.

        Where that or latency is, most configs would tie: a little of what it hides counts, so that the least work is
        preferred. It ranks configs, and is no substitute for measuring: docs/notes/gemm.md#multistage-model.

        Args:
            tiles: those of ``c`` that the product, or a batch of products like ``p``, has.
            moved: bytes to and from DRAM.
            search_us: a CTA's time until it knows its tile.
        """
        if 0 in (p.m, p.n, p.batch):
            return 0.0
        rate, own = rates.of(gpu), coefficients.MULTISTAGE
        rows, columns = p.sides
        c = of_kernel(p, c)
        peak = rate.mma_fp16_flops_per_us if p.accumulate == "fp16" else rate.mma_flops_per_us
        flops_per_us = peak * own.aligned[min(p.a_align, p.b_align).bit_length() - 1]
        k_tiles = larger(1, -(-p.k // c.tile_k))
        stage_bytes = (c.tile_m + c.tile_n) * c.tile_k * ELEMENT_BYTES
        awaited = rate.barrier_us * pick(smaller(c.stages, 4), dict(enumerate(own.barrier, 2)))

        def longer(one: Any, other: Any) -> Any:
            """The longer time, and a little of what it hides."""
            return larger(one, other) + own.shown * smaller(one, other)

        def wave_us(together: Any) -> Any:
            """How long ``together`` CTAs on an SM take."""
            fed = mma_share(together * c.warps, *c.warp_tile)
            multiply = together * 2.0 * c.tile_m * c.tile_n * c.tile_k / (flops_per_us * fed)
            fetch = together * stage_bytes / (own.port * rate.sm_bytes_per_us)
            step = rates.both_us(multiply, fetch, own.sharpness) + awaited / smaller(together, 2)
            fixed = (rate.dram_latency_us + search_us) / smaller(together, 2)  # the beginning and end of a CTA
            fixed = fixed + own.epilogue / rate.sm_bytes_per_us * c.tile_m * c.tile_n * together
            fixed = fixed * where(c.persistent, own.persistent, 1.0)
            latency = own.latency * rate.dram_latency_us / (c.stages - 1)
            return k_tiles * longer(step, latency) + fixed

        registers, smem = registers_per_thread(p, c) + read_ahead(c), self.smem(c).total_bytes
        fit = resident_ctas(gpu, warps=c.warps, registers=registers, smem=smem)
        resident = where(c.persistent, 1, larger(c.ctas_per_sm, fit))
        at_once = gpu.sm_count * resident
        # Little's law: what is in flight bounds the bandwidth.
        in_flight = smaller(tiles, at_once) * (c.stages - 1) * stage_bytes
        bytes_per_us = smaller(rate.dram_share * gpu.dram_gbps * 1e3, in_flight / rate.dram_latency_us)
        wider, across = (columns, c.tile_n) if columns.extent > rows.extent else (rows, c.tile_m)
        row_bytes = ELEMENT_BYTES * (c.tile_k if wider.k_major else smaller(across, 64))
        dram = moved / bytes_per_us * pick(row_bytes // 128, dict(enumerate(own.row_bytes)))

        full, rest = divmod(tiles, at_once)
        last = longer(wave_us(larger(1, -(-rest // gpu.sm_count))), dram * rest / tiles)
        return rate.launch_us + full * longer(wave_us(resident), dram * at_once / tiles) + where(rest > 0, last, 0.0)

    def text(self, p: GemmProblem, c: GemmConfig) -> str:
        return str(of_kernel(p, c))

    def body(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        import cutlass

        from cutekernels.kernels.cute.parts.epilogue import Activation, Epilogue
        from cutekernels.kernels.cute.parts.load import OperandLoad
        from cutekernels.kernels.cute.parts.mma import WarpMma
        from cutekernels.kernels.cute.parts.schedule import Raster
        from cutekernels.kernels.cute.parts.tile_output import TileStore
        from cutekernels.kernels.cute.products.multistage import MultistageGemm

        rows, columns = p.sides
        c = of_kernel(p, c)
        threads = self.threads(c)
        accumulate = cutlass.Float16 if p.accumulate == "fp16" else cutlass.Float32
        out_columns = 0 if p.transposed else 1
        epilogue = Epilogue(Activation(p.activation))
        return MultistageGemm(
            load_a=OperandLoad(c.tile_m, c.tile_k, c.stages, threads, rows.k_major, rows.align),
            load_b=OperandLoad(c.tile_n, c.tile_k, c.stages, threads, columns.k_major, columns.align),
            mma=WarpMma(c.warps_m, c.warps_n, accumulate, rows.k_major, columns.k_major),
            raster=Raster(c.raster),
            results=TileStore(c.tile_m, c.tile_n, threads, p.out_align, source(p), p.c_align, out_columns, epilogue),
            ctas_per_sm=c.ctas_per_sm,
            transposed=p.transposed,
            resident=gpu.sm_count * c.ctas_per_sm if c.persistent else 0,
        )


MULTISTAGE = Multistage()


# ---- arithmetic of the rules ----------------------------------------------------------------------------


def of_kernel(p: GemmProblem, c: GemmConfig) -> GemmConfig:
    """The config of what the kernel computes, out or ``out^T``; and back."""
    return c.transposed if p.transposed else c


def source(p: GemmProblem) -> str:
    """How the epilogue reads C: through shared memory where C's contiguous extent is out's."""
    return "none" if p.c == "none" else "staged" if p.c == p.out_major else "direct"


def registers_per_thread(p: GemmProblem, c: GemmConfig) -> int:
    """An estimate, of the kernel's config: accumulators, two k-blocks of fragments, narrow loads, and the rest."""
    warp_m, warp_n = c.warp_tile
    accumulators = warp_m * warp_n // 32 // (2 if p.accumulate == "fp16" else 1)
    fragments = 2 * (warp_m + warp_n) * 16 * ELEMENT_BYTES // 4 // 32
    # Each vector of one or two elements has an address and a mask (22 configs an alignment, sm_90a).
    sides = zip((c.tile_m, c.tile_n), p.sides, strict=True)
    vectors = sum(tile * c.tile_k // side.align // (32 * c.warps) for tile, side in sides if side.align <= 2)
    return accumulators + fragments + 2 * vectors + OTHER_REGISTERS


def read_ahead(c: GemmConfig) -> Any:
    """Registers that the compiler takes beside those where nothing limits it: docs/notes/gemm.md#registers."""
    return (c.tile_k // 16 - 2) * sum(c.warp_tile) // 8  # half of the fragments of a k-tile's further blocks


def divides(rows: Any, columns: Any, along_columns: bool, align: int, threads: Any) -> Any:
    """Whether ``threads`` vectors of ``align`` elements cover a ``rows x columns`` tile evenly."""
    along_extent, across_extent = (columns, rows) if along_columns else (rows, columns)
    along = gcd(along_extent // align, threads)
    return across_extent % (threads // along) == 0
