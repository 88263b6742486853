"""The warpgroup schedule of packed weights, for many tokens: rules, model, body, grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutekernels import rates
from cutekernels.columns import larger, pick, smaller, where
from cutekernels.kernels.cute.parts.smem import WarpgroupPackedSmem
from cutekernels.ops.quantized.coefficients import WARPGROUP
from cutekernels.ops.quantized.problem import (
    DECODE_INSTRUCTIONS,
    SCALE_BYTES,
    QuantizedConfig,
    QuantizedProblem,
)
from cutekernels.ops.quantized.schedule import QuantizedSchedule
from cutekernels.rules import Among, Broken, of_both, of_config, of_problem

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

NAME = "warpgroup"
ROWS = 64  # of a consumer group
_REGISTERS = {1: 232, 2: 232, 3: 160}  # of a consumer's thread, by groups
_BOXES = 1  # buffers of results of a consumer group
_BESIDE_REGISTERS = 76  # decoded weights twice, addresses, scales


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

    @of_config
    def registers(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        twice = (c.scaled == "accumulators") & (x.group > 0)
        need = c.tile_m // 2 * where(twice, 2, 1) + _BESIDE_REGISTERS  # about
        most = pick(self.groups(c), _REGISTERS)
        why = "tile_m={} scaled={} needs about {} registers of a thread's {}"
        yield need > most, why, c.tile_m, c.scaled, need, most

    @of_config
    def scaled(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        accumulators = c.scaled == "accumulators"
        why = "scaled=weights is for scales of groups: those of all of K multiply results"
        yield (c.scaled == "weights") & (x.group == 0), why
        why = "scaled=accumulators: e2m1 is multiplied by its powers of two where it is decoded; take weights"
        yield accumulators & (x.code == "e2m1"), why
        twice = accumulators & (x.group == 128) & (c.tile_k == 64) & (c.tile_m > 64)
        yield twice, "tile_k=64 adds accumulators twice a group: take 128"

    @of_config
    def shared_memory(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        frame, most = self.smem(x, c), gpu.smem_per_block_bytes
        need = frame.total_bytes
        yield need > most, "{} bytes of shared memory are more than a block's {}", need, most
        room = (c.stages < 8) & (need + frame.x_bytes + frame.packed_bytes <= most)
        yield room, "stages={} leaves room for {}", c.stages, c.stages + 1

    @of_both
    def tile_of_tokens(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        yield c.tile_m > max(16, 2 * p.m), "tile_m={} idles most of a tile over {} tokens", c.tile_m, p.m
        often = 4 * c.tile_m < min(p.m, 64)
        yield often, "tile_m={} reads the weight too often for {} tokens", c.tile_m, p.m

    @of_both
    def waves(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        count = self.tiles(p, c)
        yield c.stream_k & (count % gpu.sm_count == 0), "stream_k=1: {} tiles fill whole waves without", count
        lone = (c.raster > 1) & (p.m <= c.tile_m)
        yield lone, "raster={} does not suit one column of tiles: take 1", c.raster

    # -- choice

    def usual(self, p: QuantizedProblem, gpu: GpuSpec, x: Any) -> Among:
        return {"pdl": (True,)}

    def times_us(self, p: QuantizedProblem, c: Any, gpu: GpuSpec, x: Any) -> Any:
        ctas, rounds, share = self.grid(p, c, gpu)
        k_tiles = -(-p.k // c.tile_k)
        steps = where(c.stream_k, rounds * k_tiles + share, -(-self.tiles(p, c) // ctas) * k_tiles)
        return self.steps_us(p, c, gpu, steps, p.weight_bytes + 2.0 * p.m * (p.k + p.n))

    def steps_us(self, p: QuantizedProblem, c: Any, gpu: GpuSpec, steps: Any, moved: float) -> Any:
        """``steps`` k-tiles of the busiest SM, bound by MMAs, decoding or loads; DRAM beside; fixed costs."""
        rate, own, count = rates.of(gpu), WARPGROUP, self.groups(c)
        scaling = 0.0 if p.code == "e2m1" else own.exact if p.scale == p.dtype else own.scaled
        instructions = float(DECODE_INSTRUCTIONS[p.code]) + own.beside + where(c.scaled == "weights", scaling, 0.0)
        ends = where(c.scaled == "accumulators", c.tile_k / smaller(p.group, c.tile_k), 0.0) if p.group else 0.0
        instructions = instructions * (c.tile_k / 64 * 4) + ends * c.tile_m / 2
        decode = instructions / (own.issue * rate.clock_mhz)  # of one group
        multiply = 2.0 * c.tile_n * c.tile_m * c.tile_k / (own.mma * rate.warpgroup_flops_per_us) + own.end_us * ends
        multiply = multiply + where(count == 1, own.alone * decode, 0.0)
        fetch = (c.tile_m * c.tile_k * 2 + c.tile_n * c.tile_k * p.bits / 8) / (own.port * rate.sm_bytes_per_us)
        sharp = own.sharpness
        step = sum(us**sharp for us in (multiply, count * decode, fetch)) ** (1 / sharp)
        busy = steps * (step + own.half_us * c.tile_k / 64)
        dram = moved / (own.dram * rate.dram_share * gpu.dram_gbps * 1e3)
        fixed = own.fixed * rate.launch_us + where(c.pdl, 0.0, rate.dependent_us)
        met = (own.shared + own.parts * c.tile_m * count / 256) * rate.exchange_us
        return fixed + where(c.stream_k, met, 0.0) + rates.both_us(busy, dram, own.hidden)

    def preference(self, p: QuantizedProblem, c: Any, x: Any) -> tuple[Any, ...]:
        return c.stream_k, -c.stages, c.raster != 8

    # -- kernel

    def groups(self, c: QuantizedConfig) -> int:
        """Consumer warp groups."""
        return c.tile_n // ROWS

    def smem(self, p: QuantizedProblem, c: QuantizedConfig) -> WarpgroupPackedSmem:
        return WarpgroupPackedSmem(
            self.groups(c), c.tile_m, c.tile_k, c.stages, _BOXES, p.bias != "none", p.bits, SCALE_BYTES[p.scale],
            p.step, p.scale_rows, p.zeros,
        )  # fmt: skip

    def grid(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> tuple[int, int, int]:
        """CTAs, the whole tiles of each where they share the others, and each one's k-tiles of those."""
        count, k_tiles = larger(1, self.tiles(p, c)), larger(1, -(-p.k // c.tile_k))
        rounds, rest = divmod(count, gpu.sm_count)
        share = -(-rest * k_tiles // gpu.sm_count)
        sharing = where(rounds > 0, gpu.sm_count, -(-rest * k_tiles // larger(1, share)))
        ctas = where(c.stream_k, sharing, smaller(count, gpu.sm_count))
        return ctas, where(c.stream_k, rounds, 0), where(c.stream_k, share, 0)

    def body(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> Any:
        from cutekernels.kernels.cute.parts.boxes import ResultBoxes
        from cutekernels.kernels.cute.quantized.warpgroup_packed import WarpgroupPacked

        return WarpgroupPacked(**self.parts(p, c), results=ResultBoxes(**self.boxes(p, c)), split=c.stream_k)

    def boxes(self, p: QuantizedProblem, c: QuantizedConfig) -> dict[str, Any]:
        """TMA boxes of the results."""
        from cutekernels.backends import cute as backend
        from cutekernels.kernels.cute.parts.epilogue import Activation, Epilogue

        return {
            "dtype": backend.type_of(p.dtype),
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

    def parts(self, p: QuantizedProblem, c: QuantizedConfig) -> dict[str, Any]:
        """The common part of a body for one weight and one for experts."""
        from cutekernels.backends import cute as backend
        from cutekernels.kernels.cute.parts.packed import PackedWeights
        from cutekernels.kernels.cute.parts.schedule import Raster

        floats = p.code == "e2m1" or (p.code == "e4m3" and c.scaled == "weights" and p.scale != p.dtype)
        return {
            "weights": PackedWeights(
                p.code, backend.type_of(p.dtype), p.factors or (floats and p.dtype == "bf16"), p.scale
            ),
            "scale": backend.type_of(p.scale),
            "group": p.step,
            "scale_rows": p.scale_rows,
            "zeros": p.zeros,
            "factors": p.factors,
            "scaled": c.scaled,
            "groups": self.groups(c),
            "tile_n": c.tile_m,
            "tile_k": c.tile_k,
            "stages": c.stages,
            "raster": Raster(c.raster),
            "dependent": c.pdl,
        }


PACKED_WARPGROUP = PackedWarpgroupSchedule()
