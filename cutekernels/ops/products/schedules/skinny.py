"""The skinny schedule, for few tokens: rules, model, body, workspace.

The body computes ``out^T``: weight rows, ``tile_n``, take the MMA's 16 rows, tokens, ``tile_m``, its 8 columns.
``split_k`` CTAs share a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cutekernels import rates
from cutekernels.columns import among, cached, larger, smaller, where
from cutekernels.gpu import GpuSpec
from cutekernels.kernels.cute.parts.smem import SkinnySmem
from cutekernels.op import ladder, power_of_two
from cutekernels.ops.products.schedules import coefficients
from cutekernels.ops.products.schedules.problem import ELEMENT_BYTES, MOST_TOKENS, WIDEST, GemmConfig, GemmProblem
from cutekernels.ops.products.schedules.schedule import (
    GRID_AXIS,
    PLAIN,
    Extras,
    Prefetches,
    Tokens,
    mma_share,
    resident_ctas,
    saved_us,
)
from cutekernels.rules import Among, Broken, of_both, of_config, of_problem

USUAL_TILES = (8, 16, 32, 64)  # tokens of a tile that the default chooses among
WIDE_WARPS = 8  # of tiles of more tokens than those
LEAST_IN_FLIGHT = 32 * 1024  # bytes of stages
# fp16 weights of the norm are multiplied by this before they multiply the linear layer's weight; the epilogue divides.
# Products down to 4e-6 stay normal numbers (fp16's own end at 6e-5), and those up to 4094 stay finite.
FP16_SCALE = 16.0
# Limits beyond which ptxas spills: docs/notes/gemm.md#registers.
_OTHER_REGISTERS, _OTHER_REGISTERS_CLOSE = 48, 40
_MOST_ACCUMULATORS = 96  # where groups of warps share K


class Skinny(Tokens, Prefetches):
    """cp.async and warp MMA; takes a norm in front of the product and a gate behind it."""

    name = "skinny"
    in_memory = True

    # -- rules

    @of_problem
    def most_tokens(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Broken:
        yield p.m > MOST_TOKENS, "skinny is for at most {} rows of a; there are {}", MOST_TOKENS, p.m

    def fitting_tiles(self, p: GemmProblem) -> Sequence[int]:
        """The usual tile, and what covers the bucket of ``p`` exactly, in one tile or, if wide, in two.

        The bucket's tokens count, not those of ``p``: what was tuned for a bucket then serves every problem in it.
        """
        tokens = min(MOST_TOKENS, ladder(p.m))
        shares = (1, 2) if tokens > USUAL_TILES[-1] else (1,)
        return sorted({usual_tile(p), *(max(8, -(-tokens // share // 8) * 8) for share in shares)})

    @cached
    def smem(self, c: GemmConfig, extras: Extras = PLAIN) -> SkinnySmem:
        squaring = c.warps if extras.squares else 0
        return SkinnySmem(
            c.tile_n, c.tile_m, c.tile_k, c.stages, c.warps_k, squaring=squaring, gamma_bytes=extras.gamma_bytes
        )

    @of_config
    def short_k_tiles(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        short = (c.tile_k < 128) & (c.tile_m <= 16)
        yield short, "tile_k={} is little between barriers for {} tokens: take 128 or more", c.tile_k, c.tile_m

    @of_config
    def warps(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        yield among(c.warps, (4, 8)) == 0, "{}x{} warps: take 4 or 8", c.warps_n, c.warps_k
        few = (c.tile_m > USUAL_TILES[-1]) & (c.warps < WIDE_WARPS)
        yield few, "tile_m={} takes {} warps; there are {}", c.tile_m, WIDE_WARPS, c.warps
        odd = c.tile_n % (16 * c.warps_n) > 0
        yield odd, "tile_n={} does not divide among {} warps of 16", c.tile_n, c.warps_n
        odd = c.tile_k // 16 % c.warps_k > 0
        yield odd, "tile_k={} does not deal out among {} warps", c.tile_k, c.warps_k

    @of_config
    def shared_memory(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        frame, most = self.smem(c, x), gpu.smem_per_block_bytes
        need, staged = frame.total_bytes, frame.staged_bytes
        yield need > most, "{} bytes of shared memory are more than a block's {}", need, most
        few = staged < LEAST_IN_FLIGHT
        yield few, "{} bytes of stages keep too few in flight: take {} or more", staged, LEAST_IN_FLIGHT

    @of_config
    def registers(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        needed, held = registers_per_thread(c, x), accumulators(c)
        yield needed > gpu.MAX_REGISTERS_PER_THREAD, "a thread needs about {} registers", needed
        spills = (c.warps_k > 1) & (held > _MOST_ACCUMULATORS)
        yield spills, "a thread holds {} accumulators, and spills: take more warps along the rows", held

    @of_both
    def splits(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        count, shared = tiles(p, c), c.split_k > 1
        full = shared & (count > 2 * gpu.sm_count)
        yield full, "split_k={}: {} tiles fill the GPU without", c.split_k, count
        little = shared & (c.split_k * 2 > -(-p.k // c.tile_k))
        yield little, "split_k={} leaves less than two k-tiles of {} to each", c.split_k, c.tile_k

    @of_both
    def weight_rows(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        many = -(-p.n // c.tile_n) > GRID_AXIS
        yield many, "{} weight rows are more than {} tiles of {}", p.n, GRID_AXIS, c.tile_n
        yield c.tile_n > max(32, p.n), "tile_n={} idles most of a tile over {} weight rows", c.tile_n, p.n

    # -- choice

    def usual(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Among:
        return {"tile_m": (usual_tile(p),), "tile_k": (128, 256), "stages": (3, 5, 8), "prefetch_l2": (0, 2, 4)}

    def preference(self, p: GemmProblem, c: Any, extras: Extras = PLAIN) -> tuple[Any, ...]:
        """As many rows as tokens, small tiles, many warps, most along the rows: docs/notes/gemm.md#skinny-ties."""
        return -smaller(c.tile_n, c.tile_m), c.tile_n, -c.warps, -c.warps_n

    def times_us(self, p: GemmProblem, c: Any, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        """Waves, each as slow as DRAM or an SM, plus fixed costs; an SM's port or latency hides a part of the MMAs."""
        if p.m == 0 or p.n == 0:
            return 0.0
        rate, own = rates.of(gpu), coefficients.SKINNY
        ctas = tiles(p, c) * c.split_k
        registers, smem = registers_per_thread(c, extras), self.smem(c, extras).total_bytes
        resident = resident_ctas(gpu, warps=c.warps, registers=registers, smem=smem)
        tokens = smaller(p.m, c.tile_m)
        cta_bytes = (c.tile_n + tokens) * p.k * ELEMENT_BYTES / c.split_k
        cta_flops = 2.0 * c.tile_n * c.tile_m * p.k / c.split_k
        k_tiles = -(-p.k // c.tile_k) / c.split_k

        def wave_us(together: Any) -> Any:
            in_flight = together * (c.stages - 1) * (c.tile_n + tokens) * c.tile_k * ELEMENT_BYTES
            bytes_per_us = smaller(own.port * rate.sm_bytes_per_us, in_flight / (own.latency * rate.dram_latency_us))
            fixed = own.cta * rate.dram_latency_us + own.k_tile * rate.barrier_us * k_tiles / together
            fixed = fixed + own.added / rate.clock_mhz * (c.warps_k - 1) * accumulators(c)
            fed = mma_share(together * c.warps, c.tile_n / c.warps_n, c.tile_m)
            multiply = together * cta_flops / (rate.mma_flops_per_us * fed)
            return together * cta_bytes / bytes_per_us + own.mma * multiply + fixed

        dram = ELEMENT_BYTES * p.n * p.k / (rate.dram_share * gpu.dram_gbps * 1e3)
        at_once = gpu.sm_count * resident
        waves, rest = divmod(ctas, at_once)
        last = larger(wave_us(larger(1, -(-rest // gpu.sm_count))), dram * rest / ctas)
        busy = waves * larger(wave_us(resident), dram * at_once / ctas) + where(rest > 0, last, 0.0)
        us = rate.launch_us + busy - where(c.pdl, rate.dependent_us, 0.0)
        us = us + where(c.split_k > 1, own.split * rate.exchange_us, 0.0)
        us = us - where(ctas <= at_once, saved_us(c, gpu, own.ahead), 0.0)
        us = us * where(c.pdl & (resident > 1) & (waves == 0), own.crowded, 1.0)
        return us + (own.squares / rate.clock_mhz * tokens * p.k if extras.squares else 0.0)

    def body(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        import cutlass

        from cutekernels.kernels.cute.parts.epilogue import Activation, Epilogue
        from cutekernels.kernels.cute.parts.load import OperandLoad
        from cutekernels.kernels.cute.parts.mma import WarpMma
        from cutekernels.kernels.cute.parts.norm import TokenNorm
        from cutekernels.kernels.cute.products.skinny import SkinnyGemm

        norm = None
        if extras.norm:
            weighted = extras.gamma_bytes > 0
            norm = TokenNorm(
                tokens=c.tile_m, tile_k=c.tile_k, stages=c.stages, warps_m=c.warps_n,
                weighted=weighted, statistics=extras.squares,
                scale=FP16_SCALE if p.dtype == "fp16" and weighted else 1.0,
            )  # fmt: skip
        return SkinnyGemm(
            smem=self.smem(c, extras),
            load_w=OperandLoad(c.tile_n, c.tile_k, c.stages, loaders(c.tile_n, c), True, WIDEST),
            load_x=OperandLoad(c.tile_m, c.tile_k, c.stages, loaders(c.tile_m, c), True, WIDEST),
            mma=WarpMma(c.warps_n, 1, cutlass.Float32, True, True, 8 if c.tile_m % 16 else 16),
            warps_k=c.warps_k,
            split_k=c.split_k,
            dependent=c.pdl,
            epilogue=Epilogue(Activation("silu" if extras.gated else p.activation)),
            ctas_per_sm=c.ctas_per_sm,
            prefetch_tiles=c.prefetch_l2,
            norm=norm,
            gated=extras.gated,
        )

    def workspace(self, p: GemmProblem, c: GemmConfig, extras: Extras = PLAIN) -> Callable[[], tuple[Any, ...]]:
        from cutekernels.ops.shared.per_stream import StreamWorkspace

        if c.split_k == 1:
            return tuple
        count = tiles(p, c)
        return StreamWorkspace(count * c.split_k * (c.tile_n + extras.squares) * c.tile_m, count).get


SKINNY = Skinny()


# ---- arithmetic of the rules ----------------------------------------------------------------------------


def usual_tile(p: GemmProblem) -> int:
    """Tokens of the default's tile: a power of two."""
    return min(USUAL_TILES[-1], max(USUAL_TILES[0], power_of_two(p.m)))


def usual(c: GemmConfig) -> Any:
    """Whether the default could have the tile of ``c``."""
    return among(c.tile_m, USUAL_TILES)


def tiles(p: GemmProblem, c: GemmConfig) -> int:
    return -(-p.n // c.tile_n) * -(-p.m // c.tile_m)


def accumulators(c: GemmConfig) -> int:
    """Fp32 sums of a thread."""
    return c.tile_n * c.tile_m // (32 * c.warps_n)


def registers_per_thread(c: GemmConfig, extras: Extras = PLAIN) -> int:
    """An estimate. A compiler short of registers reads no more than two k-blocks ahead."""
    blocks = c.tile_k // 16 // c.warps_k
    fragment = c.tile_n // c.warps_n // 4 + c.tile_m // 4
    beside = c.tile_m * extras.squares + blocks * extras.gamma_bytes  # squares and their factors, gamma's fragments
    read, other = where(usual(c), blocks, smaller(2, blocks)), where(usual(c), _OTHER_REGISTERS, _OTHER_REGISTERS_CLOSE)
    return accumulators(c) + read * fragment + beside + other


def loaders(rows: int, c: GemmConfig) -> int:
    """Threads that load a tile of ``rows``: as many as divide it by whole vectors along K, none idle."""
    along = c.tile_k // WIDEST
    threads = SKINNY.threads(c)
    return along * max(across for across in range(1, threads // along + 1) if rows % across == 0)
