"""The warpgroup schedule of packed weights, for many tokens: rules, model, body, grid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cutekernels import rates
from cutekernels.kernels.cute.parts.smem import WarpgroupPackedSmem
from cutekernels.ops.quantized.coefficients import WARPGROUP
from cutekernels.ops.quantized.problem import (
    DECODE_INSTRUCTIONS,
    SCALE_BYTES,
    QuantizedConfig,
    QuantizedProblem,
)
from cutekernels.ops.quantized.schedule import QuantizedSchedule
from cutekernels.rules import of_both, of_problem

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

NAME = "warpgroup"
ROWS = 64  # of a consumer group
_REGISTERS = {1: 232, 2: 232, 3: 160}  # of a consumer's thread, by groups
_BOXES = 1  # buffers of results of a consumer group
_BESIDE_REGISTERS = 76  # decoded weights twice, addresses, scales


def groups(c: QuantizedConfig) -> int:
    """Consumer warp groups."""
    return c.tile_n // ROWS


def smem(p: QuantizedProblem, c: QuantizedConfig) -> WarpgroupPackedSmem:
    return WarpgroupPackedSmem(
        groups(c), c.tile_m, c.tile_k, c.stages, _BOXES, p.bias != "none", p.bits, SCALE_BYTES[p.scale], p.group,
        p.scale_rows, p.zeros,
    )  # fmt: skip


def registers(p: QuantizedProblem, c: QuantizedConfig) -> int:
    """Of a consumer's thread, about."""
    twice = p.group > 0 and c.scaled == "accumulators"
    return c.tile_m // 2 * (2 if twice else 1) + _BESIDE_REGISTERS


class PackedWarpgroupSchedule(QuantizedSchedule):
    """TMA and warpgroup MMA; weights are decoded in registers."""

    name = NAME

    @of_problem
    def warpgroup_mma(self, p: QuantizedProblem, gpu: GpuSpec, x: None) -> str | None:
        return None if gpu.has_wgmma else f"warpgroup needs warpgroup MMA, which {gpu.name} lacks"

    @of_problem
    def no_gate(self, p: QuantizedProblem, gpu: GpuSpec, x: None) -> str | None:
        return "warpgroup has no gate behind the product: activation=silu_mul is skinny's" if p.gated else None

    @of_problem
    def aligned_out(self, p: QuantizedProblem, gpu: GpuSpec, x: None) -> str | None:
        if p.out_align < 8:
            return "warpgroup stores 16 bytes at a time: it takes an out of 16-byte aligned rows, n divisible by 8"
        return None

    @of_both
    def registers(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> str | None:
        need, most = registers(p, c), _REGISTERS[groups(c)]
        if need > most:
            return f"tile_m={c.tile_m} scaled={c.scaled} needs about {need} registers of a thread's {most}"
        return None

    @of_both
    def scaled(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> str | None:
        if c.scaled == "weights" and p.group == 0:
            return "scaled=weights is for scales of groups: those of all of K multiply results"
        if c.scaled == "accumulators" and p.code == "e2m1":
            return "scaled=accumulators: e2m1 is multiplied by its powers of two where it is decoded; take weights"
        if c.scaled == "accumulators" and p.group == 128 and c.tile_k == 64 and c.tile_m > 64:
            return "tile_k=64 adds accumulators twice a group: take 128"
        return None

    @of_both
    def shared_memory(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> str | None:
        frame = self.smem(p, c)
        if frame.total_bytes > gpu.smem_per_block_bytes:
            return f"{frame.total_bytes} bytes of shared memory are more than a block's {gpu.smem_per_block_bytes}"
        if c.stages < 8 and frame.total_bytes + frame.x_bytes + frame.packed_bytes <= gpu.smem_per_block_bytes:
            return f"stages={c.stages} leaves room for {c.stages + 1}"
        return None

    @of_both
    def tile_of_tokens(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> str | None:
        if c.tile_m > max(16, 2 * p.m):
            return f"tile_m={c.tile_m} idles most of a tile over {p.m} tokens"
        if 4 * c.tile_m < min(p.m, 64):
            return f"tile_m={c.tile_m} reads the weight too often for {p.m} tokens"
        return None

    @of_both
    def waves(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> str | None:
        if c.stream_k and tiles(p, c) % gpu.sm_count == 0:
            return f"stream_k=1: {tiles(p, c)} tiles fill whole waves without"
        if c.raster > 1 and p.m <= c.tile_m:
            return f"raster={c.raster} does not suit one column of tiles: take 1"
        return None

    # -- choice

    def shortlist(self, p: QuantizedProblem, gpu: GpuSpec, x: None) -> Iterable[QuantizedConfig]:
        return self.fitting(gpu, x, pdl=(True,))

    def estimate_us(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: None) -> float:
        return estimate_us(p, c, gpu)

    def preference(self, p: QuantizedProblem, c: QuantizedConfig, x: None) -> tuple[object, ...]:
        return c.stream_k, -c.stages, c.raster != 8, str(c)

    # -- kernel

    def groups(self, c: QuantizedConfig) -> int:
        return groups(c)

    def smem(self, p: QuantizedProblem, c: QuantizedConfig) -> WarpgroupPackedSmem:
        return smem(p, c)

    def tiles(self, p: QuantizedProblem, c: QuantizedConfig) -> int:
        return tiles(p, c)

    def grid(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> tuple[int, ...]:
        return grid(p, c, gpu)

    def body(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> Any:
        return body(p, c)


PACKED_WARPGROUP = PackedWarpgroupSchedule()


def tiles(p: QuantizedProblem, c: QuantizedConfig) -> int:
    return -(-p.n // c.tile_n) * -(-p.m // c.tile_m)


def grid(p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> tuple[int, int, int]:
    """CTAs, the whole tiles of each where they share the others, and each one's k-tiles of those."""
    count, k_tiles = max(1, tiles(p, c)), max(1, -(-p.k // c.tile_k))
    if not c.stream_k:
        return min(count, gpu.sm_count), 0, 0
    rounds, rest = divmod(count, gpu.sm_count)
    if rounds:
        return gpu.sm_count, rounds, -(-rest * k_tiles // gpu.sm_count)
    share = -(-count * k_tiles // gpu.sm_count)
    return -(-count * k_tiles // share), 0, share


def estimate_us(p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> float:
    ctas, rounds, share = grid(p, c, gpu)
    k_tiles = -(-p.k // c.tile_k)
    steps = float(rounds * k_tiles + share) if c.stream_k else float(-(-tiles(p, c) // ctas) * k_tiles)
    return steps_us(p, c, gpu, steps, p.weight_bytes + 2.0 * p.m * (p.k + p.n))


def steps_us(p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, steps: float, moved: float) -> float:
    """``steps`` k-tiles of the busiest SM, bound by MMAs, decoding or loads; DRAM beside; fixed costs."""
    rate, own, count = rates.of(gpu), WARPGROUP, groups(c)
    instructions = float(DECODE_INSTRUCTIONS[p.code]) + own.beside
    if c.scaled == "weights":
        instructions += 0.0 if p.code == "e2m1" else own.exact if p.scale == p.dtype else own.scaled
    instructions *= c.tile_k / 64 * 4
    ends = 0.0
    if p.group and c.scaled == "accumulators":
        ends = c.tile_k / min(p.group, c.tile_k)
        instructions += ends * c.tile_m / 2
    decode = instructions / (own.issue * rate.clock_mhz)  # of one group
    multiply = 2.0 * c.tile_n * c.tile_m * c.tile_k / (own.mma * rate.warpgroup_flops_per_us) + own.end_us * ends
    if count == 1:
        multiply += own.alone * decode
    fetch = (c.tile_m * c.tile_k * 2 + c.tile_n * c.tile_k * p.bits / 8) / (own.port * rate.sm_bytes_per_us)
    sharp = own.sharpness
    step = sum(us**sharp for us in (multiply, count * decode, fetch)) ** (1 / sharp)
    busy = steps * (step + own.half_us * c.tile_k / 64)
    dram = moved / (own.dram * rate.dram_share * gpu.dram_gbps * 1e3)
    fixed = own.fixed * rate.launch_us + (0.0 if c.pdl else rate.dependent_us)
    if c.stream_k:
        fixed += (own.shared + own.parts * c.tile_m * count / 256) * rate.exchange_us
    return float(fixed + (busy**own.hidden + dram**own.hidden) ** (1 / own.hidden))


def body(p: QuantizedProblem, c: QuantizedConfig) -> Any:
    from cutekernels.kernels.cute.parts.boxes import ResultBoxes
    from cutekernels.kernels.cute.quantized.warpgroup_packed import WarpgroupPacked

    return WarpgroupPacked(**parts(p, c), results=ResultBoxes(**boxes(p, c)), split=c.stream_k)


def boxes(p: QuantizedProblem, c: QuantizedConfig) -> dict[str, Any]:
    """Of results."""
    from cutekernels.backends import cute as backend
    from cutekernels.kernels.cute.parts.epilogue import Activation, Epilogue

    return {
        "dtype": backend.dtype_of(p.dtype),
        "columns": c.tile_m,
        "panels": 1,
        "pitch": ROWS,
        "boxes": _BOXES,
        "rows_contiguous": True,
        "source": False,
        "biased": p.bias != "none",
        "out_columns": 0,
        "epilogue": Epilogue(Activation(p.activation)),
    }


def parts(p: QuantizedProblem, c: QuantizedConfig) -> dict[str, Any]:
    """What a body for one weight and one for experts have in common."""
    from cutekernels.backends import cute as backend
    from cutekernels.kernels.cute.parts.packed import PackedWeights
    from cutekernels.kernels.cute.parts.schedule import Raster

    floats = p.code == "e2m1" or (p.code == "e4m3" and c.scaled == "weights" and p.scale != p.dtype)
    return {
        "weights": PackedWeights(p.code, backend.dtype_of(p.dtype), folded=floats and p.dtype == "bf16"),
        "scale": backend.scale_of(p.scale),
        "group": p.group,
        "scale_rows": p.scale_rows,
        "zeros": p.zeros,
        "scaled": c.scaled,
        "groups": groups(c),
        "tile_n": c.tile_m,
        "tile_k": c.tile_k,
        "stages": c.stages,
        "raster": Raster(c.raster),
        "dependent": c.pdl,
    }
