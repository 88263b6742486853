"""The multistage schedule as ``gemm`` sees it: rules, model, body. It takes every problem, on every GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cutekernels.op import power_of_two
from cutekernels.ops.shared.occupancy import crowding

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec
    from cutekernels.ops.gemm.op import GemmConfig, GemmProblem

ELEMENT_BYTES = 2
MAX_WARPS = 8
MAX_CTAS = 3
MIN_TILE = 32
MIN_WARP_TILE = 16
# Registers beside accumulators and double-buffered fragments: addresses, masks, loop state. At 64x64 per warp the
# compiler needs 234 to 252 (sm_90a, 2026-11-21), where accumulators and fragments make 192.
OTHER_REGISTERS = 48

# The model's constants (see ``estimate_us``).
_LAUNCH_US = 1.3
_LATENCY_US = 1.1  # of a k-tile that nothing hides
_DRAM_LATENCY_US = 0.8
_L2_GBPS_PER_SM = 70.0
_UNALIGNED_RATE = {8: 1.0, 4: 0.85, 2: 0.6, 1: 0.3}  # guesses, by the narrower operand's alignment
# Tiles and warps that the default chooses among.
SHORTLIST = (
    (128, 256, 2, 4), (256, 128, 4, 2), (128, 128, 2, 2), (128, 128, 2, 4), (64, 128, 2, 2), (128, 64, 2, 2),
    (128, 64, 4, 1), (64, 128, 1, 4), (64, 64, 2, 2), (32, 128, 1, 4), (128, 32, 4, 1), (32, 256, 1, 4),
    (256, 32, 4, 1), (32, 64, 1, 4), (64, 32, 4, 1), (32, 32, 2, 2),)  # fmt: skip


def broken(p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> Iterator[str]:
    if c.warps > MAX_WARPS:
        yield f"{c.warps_m}x{c.warps_n} warps are more than {MAX_WARPS}"
    if c.warps < 4 and c.tile_m * c.tile_n > 32 * 64:
        yield f"{c.warps} warps are too few for a {c.tile_m}x{c.tile_n} tile: take 4"
    for name, tile, warps in (("m", c.tile_m, c.warps_m), ("n", c.tile_n, c.warps_n)):
        if tile % (MIN_WARP_TILE * warps):
            yield f"tile_{name}={tile} does not divide among {warps} warps of {MIN_WARP_TILE}"
    if max(c.warp_tile) > 2 * min(c.warp_tile):
        yield f"a warp's {c.warp_tile[0]}x{c.warp_tile[1]} tile is lopsided: at most 2 to 1"
    if min(c.warp_tile) < 32 and c.tile_m * c.tile_n >= 128 * 64:
        yield f"{c.warps} warps of {c.warp_tile[0]}x{c.warp_tile[1]} load more than they multiply: take fewer"
    registers, smem = registers_per_thread(p, c), c.smem.total_bytes
    yield from crowding(gpu, ctas=c.ctas_per_sm, most=MAX_CTAS, warps=c.warps, registers=registers, smem=smem)
    rows, columns = p.sides()
    for name, tile, side in (("m", c.tile_m, rows), ("n", c.tile_n, columns)):
        if not divides(tile, c.tile_k, side.k_major, side.align, c.threads):
            yield f"{c.threads} threads do not divide a {tile}x{c.tile_k} tile (alignment {side.align})"
        if tile > max(MIN_TILE, power_of_two(side.extent)):
            yield f"tile_{name}={tile} idles most of a tile over an extent of {side.extent}"
    for align in {p.out_align} | ({p.c_align} if source(p) == "staged" else set()):
        if not divides(c.tile_m, c.tile_n, True, align, c.threads):
            yield f"{c.threads} threads do not divide the output tile (alignment {align})"
    tile_rows, tile_columns = -(-rows.extent // c.tile_m), -(-columns.extent // c.tile_n)
    if c.persistent and (c.ctas_per_sm > 1 or c.tile_m * c.tile_n < 128 * 128):
        yield "persistent=1 is for large tiles that have an SM to themselves: others hide each other's ends"
    if c.persistent and tile_rows * tile_columns * p.batch <= gpu.sm_count:
        yield "persistent=1 is for more tiles than there are SMs"
    # Together, an SM array's CTAs should cover about as many rows as columns: wide tiles want taller bands.
    fitting = {1} if tile_rows < 2 else {1, 8} if tile_rows <= 4 else {8}
    if tile_rows >= 64 or (tile_rows >= 16 and c.tile_n > c.tile_m):
        fitting |= {16}
    if c.raster not in fitting:
        yield f"raster={c.raster} does not suit {tile_rows} tile rows: take one of {sorted(fitting)}"


def estimate_us(p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> float:
    """Waves of CTAs, each k-tile as slow as tensor cores, L2 or latency, plus fixed costs; or DRAM, if slower.

    The constants are fitted to 943 configs of 47 problems on an H200 (2026-11-21) and scaled by the spec
    elsewhere. They rank: the best estimate is 1.11 times the best time measured, on average, while the
    estimates themselves are off by 20 %. No substitute for measuring.
    """
    rows, columns = p.sides()
    tiles = -(-rows.extent // c.tile_m) * -(-columns.extent // c.tile_n) * p.batch
    if tiles == 0:
        return 0.0
    warp_m, warp_n = c.warp_tile
    peak = gpu.mma_fp16_tflops if p.accumulate == "fp16" else gpu.mma_tflops
    flops_per_us = peak * 1e6 / gpu.sm_count * _UNALIGNED_RATE[min(p.a_align, p.b_align)]
    reuse = warp_m * warp_n / (warp_m + warp_n)  # multiplications per element of a fragment loaded
    k_tiles = max(1, -(-p.k // c.tile_k))
    stage_bytes = (c.tile_m + c.tile_n) * c.tile_k * ELEMENT_BYTES

    def wave_us(together: int) -> float:
        """How long ``together`` CTAs on an SM take."""
        fed = min(1.0, (together * c.warps / 8) ** 0.15) * reuse / (reuse + 5.0)
        multiply = together * 2.0 * c.tile_m * c.tile_n * c.tile_k / (flops_per_us * fed)
        fetch = together * stage_bytes / (_L2_GBPS_PER_SM * 1e3)
        # 128x256, persistent, 4096^3 at full clock: 0.03 us more with 3 stages than with 4 (H200, 2026-11-21).
        barrier = 0.08 * {2: 1.8, 3: 1.0}.get(c.stages, 0.4) / min(together, 2)
        step = max(multiply, fetch) + barrier
        fixed = 0.8 / min(together, 2) + 2.7e-4 * c.tile_m * c.tile_n * together
        if c.persistent:  # most of it passes while the next tile's loads are under way
            fixed *= 0.4
        return float(k_tiles * max(step, _LATENCY_US / (c.stages - 1)) + fixed)

    full, rest = divmod(tiles, gpu.sm_count * c.ctas_per_sm)
    busy = full * wave_us(c.ctas_per_sm) + (wave_us(-(-rest // gpu.sm_count)) if rest else 0.0)
    # Little's law: what is in flight bounds the bandwidth.
    in_flight = min(tiles, gpu.sm_count * c.ctas_per_sm) * (c.stages - 1) * stage_bytes
    moved = ELEMENT_BYTES * p.batch * (p.m * p.k + p.k * p.n + p.m * p.n * (1 if p.c == "none" else 2))
    bytes_per_us = min(0.92 * gpu.dram_gbps * 1e3, in_flight / _DRAM_LATENCY_US)
    return float(_LAUNCH_US + max(busy, moved / bytes_per_us))


def body(p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> Any:
    """The multistage body with its parts."""
    import cutlass

    from cutekernels.kernels.cute.gemm.multistage import MultistageGemm
    from cutekernels.kernels.cute.parts.epilogue import Activation, GemmEpilogue
    from cutekernels.kernels.cute.parts.load import OperandLoad
    from cutekernels.kernels.cute.parts.mma import WarpMma
    from cutekernels.kernels.cute.parts.schedule import Raster

    rows, columns = p.sides()
    accumulate = cutlass.Float16 if p.accumulate == "fp16" else cutlass.Float32
    bias_axis = "none" if p.bias == "none" else "m" if p.transposed else "n"
    return MultistageGemm(
        load_a=OperandLoad(c.tile_m, c.tile_k, c.stages, c.threads, rows.k_major, rows.align),
        load_b=OperandLoad(c.tile_n, c.tile_k, c.stages, c.threads, columns.k_major, columns.align),
        mma=WarpMma(c.warps_m, c.warps_n, accumulate, rows.k_major, columns.k_major),
        raster=Raster(c.raster),
        epilogue=GemmEpilogue(
            c.tile_m, c.tile_n, c.threads, p.out_align, source(p), p.c_align, bias_axis, Activation(p.activation)
        ),
        ctas_per_sm=c.ctas_per_sm,
        transposed=p.transposed,
        resident=gpu.sm_count * c.ctas_per_sm if c.persistent else 0,
    )


# ---- arithmetic of the rules ----------------------------------------------------------------------------


def source(p: GemmProblem) -> str:
    """How the epilogue reads C: through shared memory where C's contiguous extent is out's."""
    return "none" if p.c == "none" else "staged" if p.c == p.out_major else "direct"


def registers_per_thread(p: GemmProblem, c: GemmConfig) -> int:
    """About what the compiler will need: accumulators, two k-blocks of fragments, narrow loads, and the rest."""
    warp_m, warp_n = c.warp_tile
    accumulators = warp_m * warp_n // 32 // (2 if p.accumulate == "fp16" else 1)
    fragments = 2 * (warp_m + warp_n) * 16 * ELEMENT_BYTES // 4 // 32
    # Vectors of one or two elements are many, and each has an address and a mask: 22 configs an alignment, sm_90a.
    sides = zip((c.tile_m, c.tile_n), p.sides(), strict=True)
    vectors = sum(tile * c.tile_k // side.align // c.threads for tile, side in sides if side.align <= 2)
    return accumulators + fragments + 2 * vectors + OTHER_REGISTERS


def divides(rows: int, columns: int, along_columns: bool, align: int, threads: int) -> bool:
    """Whether ``threads`` vectors of ``align`` elements cover a ``rows x columns`` tile evenly."""
    along_extent, across_extent = (columns, rows) if along_columns else (rows, columns)
    along = math.gcd(along_extent // align, threads)
    return across_extent % (threads // along) == 0
