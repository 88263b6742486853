"""The skinny schedule, for few tokens: rules, model, body, workspace.

The body computes ``out^T``: weight rows, ``tile_n``, take the MMA's 16 rows, tokens, ``tile_m``, its 8 columns.
``split_k`` CTAs share a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutekernels import rates
from cutekernels.kernels.cute.parts.smem import SkinnySmem
from cutekernels.op import ladder, power_of_two
from cutekernels.ops.gemm import coefficients, prefetch
from cutekernels.ops.gemm.prefetch import Prefetches
from cutekernels.ops.gemm.problem import ELEMENT_BYTES, MOST_TOKENS, WIDEST, GemmConfig, GemmProblem
from cutekernels.ops.gemm.schedule import GRID_AXIS, PLAIN, Extras, TokensSchedule
from cutekernels.rules import of_both, of_config, of_problem

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

USUAL_TILES = (8, 16, 32, 64)  # tokens of a tile that the default chooses among
WIDE_WARPS = 8  # of tiles of more tokens than those
# The default up to here on GPUs without warpgroup MMA: docs/notes/gemm.md#skinny-or-multistage (H200, 2026-11-21).
DEFAULT_TOKENS = 32
LEAST_IN_FLIGHT = 32 * 1024  # bytes of stages
# fp16 weights of the norm are multiplied by this before they multiply the linear layer's weight; the epilogue divides.
# Products down to 4e-6 stay normal numbers (fp16's own end at 6e-5), and those up to 4094 stay finite.
FP16_SCALE = 16.0
# Limits beyond which ptxas spills: docs/notes/gemm.md#registers (sm_80 to sm_120a, 2026-11).
_OTHER_REGISTERS, _OTHER_REGISTERS_CLOSE = 48, 40
_MOST_SUMMED, _MOST_OF_MANY_WARPS = 240, 96
_MOST_ACCUMULATORS = {
    True: 96,
    False: 88,
}  # accumulators where groups of warps share K, by whether the tile is a usual one


@dataclass(frozen=True)
class Skinny(TokensSchedule, Prefetches):
    """cp.async and warp MMA; takes a norm in front of the product and a gate behind it."""

    name = "skinny"

    # -- rules

    @of_problem
    def most_tokens(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> str | None:
        if p.m > MOST_TOKENS:
            return f"skinny is for at most {MOST_TOKENS} rows of a; there are {p.m}"
        return None

    def fitting_tiles(self, p: GemmProblem) -> Sequence[int]:
        """The usual tile, and what covers the bucket of ``p`` exactly, in one tile or, if wide, in two.

        The bucket's tokens count, not those of ``p``: what was tuned for a bucket then serves every problem in it.
        """
        tokens = min(MOST_TOKENS, ladder(p.m))
        shares = (1, 2) if tokens > USUAL_TILES[-1] else (1,)
        return sorted({usual_tile(p), *(max(8, -(-tokens // share // 8) * 8) for share in shares)})

    def smem(self, c: GemmConfig, extras: Extras = PLAIN) -> SkinnySmem:
        squaring = c.warps if extras.squares else 0
        return SkinnySmem(
            c.tile_n, c.tile_m, c.tile_k, c.stages, c.warps_k, squaring=squaring, gamma_bytes=extras.gamma_bytes
        )

    @of_config
    def short_k_tiles(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if c.tile_k < 128 and c.tile_m <= 16:
            return f"tile_k={c.tile_k} is little between barriers for {c.tile_m} tokens: take 128 or more"
        return None

    @of_config
    def number_of_warps(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if c.warps not in (4, 8):
            return f"{c.warps_n}x{c.warps_k} warps: take 4 or 8"
        if c.tile_m > USUAL_TILES[-1] and c.warps < WIDE_WARPS:
            return f"tile_m={c.tile_m} takes {WIDE_WARPS} warps; there are {c.warps}"
        return None

    @of_config
    def warps_divide(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if c.tile_n % (16 * c.warps_n):
            return f"tile_n={c.tile_n} does not divide among {c.warps_n} warps of 16"
        if c.tile_k // 16 % c.warps_k:
            return f"tile_k={c.tile_k} does not deal out among {c.warps_k} warps"
        return None

    @of_config
    def shared_memory(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        frame = self.smem(c, x)
        if frame.total_bytes > gpu.smem_per_block_bytes:
            return f"{frame.total_bytes} bytes of shared memory are more than a block's {gpu.smem_per_block_bytes}"
        if frame.staged_bytes < LEAST_IN_FLIGHT:
            return f"{frame.staged_bytes} bytes of stages keep too few in flight: take {LEAST_IN_FLIGHT} or more"
        return None

    @of_config
    def registers(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        needed, held = registers_per_thread(c, x), accumulators(c)
        if needed > gpu.MAX_REGISTERS_PER_THREAD:
            return f"a thread needs about {needed} registers"
        if c.warps_k > 1 and held > _MOST_ACCUMULATORS[usual(c)]:
            return f"a thread holds {held} accumulators, and spills: take more warps along the rows"
        if not usual(c) and (
            (c.split_k > 1 and held * c.split_k > _MOST_SUMMED) or (c.warps_k > 2 and held > _MOST_OF_MANY_WARPS)
        ):
            return f"{c.split_k} splits and {c.warps_k} groups of warps sum {held} accumulators: spills"
        return None

    @of_both
    def tile_of_tokens(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        fitting = self.fitting_tiles(p)
        if c.tile_m not in fitting:
            return f"tile_m={c.tile_m} does not suit {p.m} tokens: take {' or '.join(map(str, fitting))}"
        return None

    @of_both
    def splits(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if c.split_k > 1 and tiles(p, c) > 2 * gpu.sm_count:
            return f"split_k={c.split_k}: {tiles(p, c)} tiles fill the GPU without"
        if c.split_k > 1 and c.split_k * 2 > -(-p.k // c.tile_k):
            return f"split_k={c.split_k} leaves less than two k-tiles of {c.tile_k} to each"
        return None

    @of_both
    def weight_rows(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if -(-p.n // c.tile_n) > GRID_AXIS:
            return f"{p.n} weight rows are more than {GRID_AXIS} tiles of {c.tile_n}"
        if c.tile_n > max(32, p.n):
            return f"tile_n={c.tile_n} idles most of a tile over {p.n} weight rows"
        return None

    # -- choice

    def shortlist(self, p: GemmProblem, gpu: GpuSpec, x: Extras = PLAIN) -> Iterable[GemmConfig]:
        among = {"tile_k": (128, 256), "stages": (3, 5, 8), "prefetch_l2": (0, 2, 4)}
        return self.fitting(gpu, PLAIN, tile_m=(usual_tile(p),), **among)

    def preference(self, p: GemmProblem, c: GemmConfig, extras: Extras = PLAIN) -> tuple[object, ...]:
        """Small tiles, then many warps, most of them along the rows: docs/notes/gemm.md#skinny-ties."""
        return c.tile_n, -c.warps, -c.warps_n, str(c)

    def estimate_us(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> float:
        """The slowest of an SM's port, latency and DRAM, plus fixed costs."""
        if p.m == 0 or p.n == 0:
            return 0.0
        rate, own = rates.of(gpu), coefficients.SKINNY
        ctas = tiles(p, c) * c.split_k
        fit = gpu.smem_per_sm_bytes // (self.smem(c, extras).total_bytes + gpu.SMEM_RESERVED_BYTES)
        resident = max(1, min(fit, gpu.max_warps // c.warps))
        tokens = min(p.m, c.tile_m)
        cta_bytes = (c.tile_n + tokens) * p.k * ELEMENT_BYTES / c.split_k
        k_tiles = -(-p.k // c.tile_k) / c.split_k

        def wave_us(together: int) -> float:
            in_flight = together * (c.stages - 1) * (c.tile_n + tokens) * c.tile_k * ELEMENT_BYTES
            bytes_per_us = min(own.port * rate.sm_bytes_per_us, in_flight / rate.dram_latency_us)
            fixed = own.cta * rate.dram_latency_us + own.k_tile * rate.barrier_us * k_tiles / together
            return together * cta_bytes / bytes_per_us + fixed

        waves, rest = divmod(ctas, gpu.sm_count * resident)
        busy = waves * wave_us(resident)
        if rest:
            busy += wave_us(-(-rest // gpu.sm_count))
        dram = ELEMENT_BYTES * p.n * p.k / (own.dram * rate.dram_share * gpu.dram_gbps * 1e3)
        us = rate.launch_us + max(dram, busy)
        us -= rate.dependent_us if c.pdl else 0.0
        us += own.split * rate.exchange_us if c.split_k > 1 else 0.0
        if ctas <= gpu.sm_count * resident:
            us -= prefetch.saved_us(c, gpu, own.ahead)
        if c.pdl and resident > 1 and waves == 0:
            us *= own.crowded
        if extras.squares:
            us += own.squares / rate.clock_mhz * tokens * p.k
        return float(us)

    def body(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        import cutlass

        from cutekernels.kernels.cute.gemm.skinny_gemm import SkinnyGemm
        from cutekernels.kernels.cute.parts.epilogue import Activation, Epilogue
        from cutekernels.kernels.cute.parts.load import OperandLoad
        from cutekernels.kernels.cute.parts.mma import WarpMma
        from cutekernels.kernels.cute.parts.norm import TokenNorm

        norm = None
        if extras.norm:
            weighted = extras.gamma_bytes > 0
            norm = TokenNorm(
                tokens=c.tile_m, tile_k=c.tile_k, stages=c.stages, warps_m=c.warps_n, warps_k=c.warps_k,
                weighted=weighted, statistics=extras.squares,
                scale=FP16_SCALE if p.dtype == "fp16" and weighted else 1.0,
            )  # fmt: skip
        return SkinnyGemm(
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

    def shares_tiles(self, c: GemmConfig) -> bool:
        return c.split_k > 1

    def workspace(self, p: GemmProblem, c: GemmConfig, extras: Extras = PLAIN) -> Callable[[], tuple[Any, ...]]:
        from cutekernels.ops.shared.per_stream import Workspace

        if c.split_k == 1:
            return tuple
        count = tiles(p, c)
        return Workspace(count * c.split_k * (c.tile_n + extras.squares) * c.tile_m, count).get


SKINNY = Skinny()


# ---- arithmetic of the rules ----------------------------------------------------------------------------


def usual_tile(p: GemmProblem) -> int:
    """Tokens of the default's tile: a power of two."""
    return min(USUAL_TILES[-1], max(USUAL_TILES[0], power_of_two(p.m)))


def usual(c: GemmConfig) -> bool:
    """Whether the default could have the tile of ``c``."""
    return c.tile_m in USUAL_TILES


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
    if usual(c):
        return accumulators(c) + blocks * fragment + beside + _OTHER_REGISTERS
    return accumulators(c) + min(2, blocks) * fragment + beside + _OTHER_REGISTERS_CLOSE


def loaders(rows: int, c: GemmConfig) -> int:
    """Threads that load a tile of ``rows``: as many as divide it by whole vectors along K, none idle."""
    along = c.tile_k // WIDEST
    threads = SKINNY.threads(c)
    return along * max(across for across in range(1, threads // along + 1) if rows % across == 0)
