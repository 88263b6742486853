"""The skinny schedule of packed weights, for few tokens: rules, model, body, grid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cutekernels import rates
from cutekernels.kernels.cute.parts.smem import SkinnyPackedSmem
from cutekernels.ops.quantized.coefficients import SKINNY
from cutekernels.ops.quantized.problem import (
    DECODE_INSTRUCTIONS,
    SCALE_BYTES,
    QuantizedConfig,
    QuantizedProblem,
)
from cutekernels.ops.quantized.schedule import QuantizedSchedule
from cutekernels.rules import of_both

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

NAME = "skinny"
TILES_M = (8, 16, 24, 32, 48, 64)
_MOST_ACCUMULATORS = 64  # of a thread; as many again where scales have groups
_MOST_WARPS = {16: 24, 24: 16, 48: 12, 64: 8}  # of an SM, by a thread's accumulators: registers
_MOST_CHUNK = {32: 512, 64: 128}  # elements of K that a warp multiplies at a time, likewise
_LEAST_IN_FLIGHT = 32 * 1024  # bytes of an SM's stages


def fitting_tiles(p: QuantizedProblem) -> tuple[int, ...]:
    """Values of ``tile_m`` that suit the tokens of ``p``: the least that holds them, and the largest."""
    least = next((tile for tile in TILES_M if tile >= p.m), TILES_M[-1])
    return (least,) if p.m <= 32 else tuple(sorted({least, 32, 64}))


def smem(p: QuantizedProblem, c: QuantizedConfig) -> SkinnyPackedSmem:
    return SkinnyPackedSmem(
        c.tile_m, c.tile_n, c.tile_k, c.stages, c.warps_k, p.bits, SCALE_BYTES[p.scale], p.group, p.scale_rows,
        p.zeros, 2 if p.gated else 1,
    )  # fmt: skip


def accumulators(c: QuantizedConfig) -> int:
    """Of a thread."""
    return c.tile_n // 16 // c.warps_n * c.tile_m // 2


class PackedSkinnySchedule(QuantizedSchedule):
    """cp.async and warp MMA; weights are decoded in registers."""

    name = NAME

    @of_both
    def number_of_warps(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> str | None:
        if c.warps_n * c.warps_k not in (4, 8):
            return f"{c.warps_n}x{c.warps_k} warps: take 4 or 8"
        return None

    @of_both
    def warps_divide(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> str | None:
        if c.tile_k // c.warps_k < 64:
            return f"tile_k={c.tile_k} leaves less than 64 to each of {c.warps_k} groups of warps"
        if c.tile_n // 16 % c.warps_n or c.tile_n // 16 < c.warps_n:
            return f"tile_n={c.tile_n} does not divide among {c.warps_n} warps of 16 rows"
        if p.gated and (c.tile_n < 32 or c.tile_n // 16 // c.warps_n % 2):
            return f"tile_n={c.tile_n} of {c.warps_n} warps has no strips of gate and up for each: take more rows"
        return None

    @of_both
    def registers(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> str | None:
        warps, held = c.warps_n * c.warps_k, accumulators(c)
        if held > _MOST_ACCUMULATORS or c.tile_n // 16 // c.warps_n > 4:
            strips = c.tile_n // 16 // c.warps_n
            return f"a thread holds {held} accumulators of {strips} strips: take more warps along the rows"
        most = next((warps for limit, warps in _MOST_WARPS.items() if held <= limit), 16)
        if warps * c.ctas_per_sm > min(most, gpu.max_warps):
            many = f"{c.ctas_per_sm} CTAs of {warps} warps with {held} accumulators a thread"
            return f"{many}: take {most} warps an SM or fewer"
        longest = next((k for limit, k in _MOST_CHUNK.items() if held <= limit), 128)
        if (chunk := c.tile_k // c.warps_k) > longest:
            return f"a warp has {chunk} of K at a time with {held} accumulators a thread: take {longest} or less"
        return None

    @of_both
    def shared_memory(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> str | None:
        frame = smem(p, c)
        if frame.total_bytes > gpu.smem_per_block_bytes:
            return f"{frame.total_bytes} bytes of shared memory are more than a block's {gpu.smem_per_block_bytes}"
        if c.ctas_per_sm * (frame.total_bytes + gpu.SMEM_RESERVED_BYTES) > gpu.smem_per_sm_bytes:
            return f"{c.ctas_per_sm} CTAs of {frame.total_bytes} bytes do not fit in an SM's shared memory"
        if c.ctas_per_sm * frame.sums_at < _LEAST_IN_FLIGHT:
            return f"{frame.sums_at} bytes of stages keep too few in flight: take {_LEAST_IN_FLIGHT} an SM or more"
        return None

    @of_both
    def dependent_launch(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> str | None:
        if c.pdl and not gpu.has_pdl:
            return f"pdl=1 needs programmatic dependent launch, which {gpu.name} lacks"
        return None

    @of_both
    def tile_of_tokens(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> str | None:
        fitting = fitting_tiles(p)
        if c.tile_m not in fitting:
            return f"tile_m={c.tile_m} does not suit {p.m} tokens: take {' or '.join(map(str, fitting))}"
        return None

    @of_both
    def waves(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> str | None:
        if c.stream_k and tiles(p, c) % (gpu.sm_count * c.ctas_per_sm) == 0:
            return f"stream_k=1: {tiles(p, c)} tiles fill whole waves without"
        return None

    # -- choice

    def confined(self, p: QuantizedProblem) -> dict[str, tuple[Any, ...]]:
        return {"tile_m": fitting_tiles(p)}

    def shortlist(self, p: QuantizedProblem, gpu: GpuSpec, x: None) -> Iterator[QuantizedConfig]:
        ahead = (2 if gpu.has_pdl else 0,)
        for tile in fitting_tiles(p):
            yield from self.fitting(gpu, x, tile_m=(tile,), pdl=(gpu.has_pdl,), prefetch_l2=ahead)

    def estimate_us(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> float:
        return estimate_us(p, c, gpu)

    def preference(self, p: QuantizedProblem, c: QuantizedConfig, x: None) -> tuple[object, ...]:
        return c.stream_k, -c.tile_k, c.tile_n, -c.stages, str(c)

    # -- kernel

    def groups(self, c: QuantizedConfig) -> int:
        return 1

    def smem(self, p: QuantizedProblem, c: QuantizedConfig) -> SkinnyPackedSmem:
        return smem(p, c)

    def tiles(self, p: QuantizedProblem, c: QuantizedConfig) -> int:
        return tiles(p, c)

    def grid(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> tuple[int, ...]:
        return grid(p, c, gpu)

    def body(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> Any:
        return body(p, c)


PACKED_SKINNY = PackedSkinnySchedule()


def tiles(p: QuantizedProblem, c: QuantizedConfig) -> int:
    return -(-p.n // c.tile_n) * -(-p.m // c.tile_m)


def grid(p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> tuple[int, int]:
    """CTAs, and the units (k-tiles) of each."""
    return dealt(tiles(p, c), p, c, gpu)


def dealt(count: int, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> tuple[int, int]:
    """CTAs that ``count`` tiles are dealt out to, and the units (k-tiles) of each."""
    k_tiles, resident = max(1, -(-p.k // c.tile_k)), gpu.sm_count * c.ctas_per_sm
    units = max(1, count * k_tiles)
    share = -(-units // resident) if c.stream_k else k_tiles * max(1, -(-count // resident))
    return -(-units // share), share


def estimate_us(p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> float:
    return tiles_us(p, c, gpu, tiles(p, c), min(p.m, c.tile_m), p.weight_bytes)


def tiles_us(
    p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, count: int, tokens: float, weight_bytes: float
) -> float:
    """The slowest of DRAM, an SM's loads, its instructions and its MMAs for the busiest SM; fixed costs.

    ``count`` tiles of ``tokens`` each, which read ``weight_bytes`` from DRAM.
    """
    rate, own = rates.of(gpu), SKINNY
    ctas, share = dealt(count, p, c, gpu)
    frame = smem(p, c)
    per_sm = -(-ctas // gpu.sm_count)
    resident = min(per_sm, c.ctas_per_sm)
    units = per_sm * share
    unit_bytes = frame.x_at + tokens * c.tile_k * 2 + (frame.stage_bytes - frame.scales_at)
    in_flight = resident * (c.stages - 1) * unit_bytes
    port = min(own.port * rate.sm_bytes_per_us, in_flight / (own.latency * rate.dram_latency_us))
    lanes = units * c.tile_n * c.tile_k / 256 / 4  # of a scheduler: MMAs of 8 tokens
    columns, strips = c.tile_m / 8, c.tile_n // 16 // c.warps_n
    instructions = DECODE_INSTRUCTIONS[p.code] + own.beside + (own.column + own.fragment / strips) * columns
    issue = lanes * instructions / (own.issue * rate.clock_mhz) * (1 + own.few / (c.warps_n * c.warps_k * resident))
    flops = 2.0 * units * c.tile_n * c.tile_k * c.tile_m
    multiply = max(lanes * columns * own.mma_cycles / rate.clock_mhz, flops / (own.mma * rate.mma_flops_per_us))
    dram = weight_bytes / (own.dram * rate.dram_share * gpu.dram_gbps * 1e3)
    sharp = own.sharpness
    busy = sum(us**sharp for us in (dram, units * unit_bytes / port, issue, multiply)) ** (1 / sharp)
    k_tiles = max(1, -(-p.k // c.tile_k))
    fixed = rate.launch_us + own.unit_us * share + own.end_us * per_sm * -(-share // k_tiles)
    fixed += own.group_us * (c.warps_k - 1)
    if c.stream_k and share % k_tiles:
        fixed += own.shared * rate.exchange_us
    return float(fixed + busy + (0.0 if c.pdl else rate.dependent_us))


def body(p: QuantizedProblem, c: QuantizedConfig) -> Any:
    from cutekernels.kernels.cute.quantized.skinny_packed import SkinnyPacked

    return SkinnyPacked(**parts(p, c), prefetch_tiles=c.prefetch_l2)


def parts(p: QuantizedProblem, c: QuantizedConfig) -> dict[str, Any]:
    """What a body for one weight and one for experts have in common."""
    from cutekernels.backends import cute as backend
    from cutekernels.kernels.cute.parts.column_scale import ColumnScale
    from cutekernels.kernels.cute.parts.epilogue import Activation, Epilogue
    from cutekernels.kernels.cute.parts.packed import PackedWeights

    epilogue = ColumnScale if p.group == 0 else Epilogue
    return {
        "weights": PackedWeights(p.code, backend.dtype_of(p.dtype), folded=p.code == "e2m1" and p.dtype == "bf16"),
        "scale": backend.scale_of(p.scale),
        "group": p.group,
        "scale_rows": p.scale_rows,
        "zeros": p.zeros,
        "tile_m": c.tile_m,
        "tile_n": c.tile_n,
        "tile_k": c.tile_k,
        "warps_n": c.warps_n,
        "warps_k": c.warps_k,
        "stages": c.stages,
        "epilogue": epilogue(Activation("silu_approx" if p.gated else p.activation)),
        "dependent": c.pdl,
        "ctas_per_sm": c.ctas_per_sm,
        "gated": p.gated,
    }
