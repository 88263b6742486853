"""The skinny schedules of packed weights, for few tokens: rules, models, bodies, grids. Of experts a rule reads the
product of one with all rows, and :class:`Experts` beside it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from cutekernels import rates
from cutekernels.columns import among, cached, larger, smaller, where
from cutekernels.gpu import GpuSpec
from cutekernels.kernels.cute.parts.smem import SkinnyPackedSmem
from cutekernels.ops.products.schedules import coefficients
from cutekernels.ops.products.schedules.groups import Experts
from cutekernels.ops.products.schedules.packed_problem import (
    BODIES,
    DECODE_INSTRUCTIONS,
    SCALE_BYTES,
    QuantizedConfig,
    QuantizedProblem,
)
from cutekernels.ops.products.schedules.schedule import PackedSchedule
from cutekernels.rules import Among, Broken, of_both, of_config

TILES_M = BODIES["skinny"]["tile_m"]
_MOST_ACCUMULATORS = 64  # of a thread; as many again where scales have groups
_MOST_WARPS = {16: 24, 24: 16, 48: 12, 64: 8}  # of an SM, by a thread's accumulators: registers
_MOST_CHUNK = {32: 512, 64: 128}  # elements of K that a warp multiplies at a time, likewise
_LEAST_IN_FLIGHT = 32 * 1024  # bytes of an SM's stages
_MOST_UNITS = 2**31 - 1


def accumulators(c: QuantizedConfig) -> int:
    """Accumulators of a thread."""
    return c.tile_n // 16 // c.warps_n * c.tile_m // 2


class PackedSkinny(PackedSchedule):
    """cp.async and warp MMA; weights are decoded in registers."""

    name = "skinny"
    numbers = 2
    costs: ClassVar[coefficients.PackedSkinnyCosts] = coefficients.PACKED_SKINNY

    @of_config
    def warps(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        yield among(c.warps_n * c.warps_k, (4, 8)) == 0, "{}x{} warps: take 4 or 8", c.warps_n, c.warps_k
        little = c.tile_k // c.warps_k < 64
        yield little, "tile_k={} leaves less than 64 to each of {} groups of warps", c.tile_k, c.warps_k
        strips = c.tile_n // 16
        odd = (strips % c.warps_n > 0) | (strips < c.warps_n)
        yield odd, "tile_n={} does not divide among {} warps of 16 rows", c.tile_n, c.warps_n
        if x.gated:
            odd = (c.tile_n < 32) | (strips // c.warps_n % 2 > 0)
            why = "tile_n={} of {} warps has no strips of gate and up for each: take more rows"
            yield odd, why, c.tile_n, c.warps_n

    @of_config
    def registers(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        warps, held, strips = c.warps_n * c.warps_k, accumulators(c), c.tile_n // 16 // c.warps_n
        spills = (held > _MOST_ACCUMULATORS) | (strips > 4)
        yield spills, "a thread holds {} accumulators of {} strips: take more warps along the rows", held, strips
        most = _within(held, _MOST_WARPS, 16)
        why = "{} CTAs of {} warps with {} accumulators a thread: take {} warps an SM or fewer"
        yield warps * c.ctas_per_sm > smaller(most, gpu.max_warps), why, c.ctas_per_sm, warps, held, most
        chunk, longest = c.tile_k // c.warps_k, _within(held, _MOST_CHUNK, 128)
        why = "a warp has {} of K at a time with {} accumulators a thread: take {} or less"
        yield chunk > longest, why, chunk, held, longest

    @of_config
    def shared_memory(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        frame, most = self.smem(x, c), gpu.smem_per_block_bytes
        need, staged = frame.total_bytes, frame.sums_at
        yield need > most, "{} bytes of shared memory are more than a block's {}", need, most
        beyond = c.ctas_per_sm * (need + gpu.SMEM_RESERVED_BYTES) > gpu.smem_per_sm_bytes
        yield beyond, "{} CTAs of {} bytes do not fit in an SM's shared memory", c.ctas_per_sm, need
        few = c.ctas_per_sm * staged < _LEAST_IN_FLIGHT
        yield few, "{} bytes of stages keep too few in flight: take {} an SM or more", staged, _LEAST_IN_FLIGHT

    @of_config
    def dependent_launch(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        yield c.pdl & (not gpu.has_pdl), "pdl=1 needs programmatic dependent launch, which {} lacks", gpu.name

    @of_both
    def tile_of_tokens(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        fitting, why = self.fitting_tiles(p, x), "tile_m={} does not suit {}: take {}"
        yield among(c.tile_m, fitting) == 0, why, c.tile_m, self.tokens(p, x)[1], " or ".join(map(str, fitting))

    @of_both
    def waves(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        count = self.tiles(p, c)
        whole = c.stream_k & (count % (gpu.sm_count * c.ctas_per_sm) == 0)
        yield whole, "stream_k=1: {} tiles fill whole waves without", count

    # -- choice

    def fitting_tiles(self, p: QuantizedProblem, x: Any) -> tuple[int, ...]:
        """Values of ``tile_m`` that suit the tokens of ``p``: the least that holds them, and the largest."""
        least = next((tile for tile in TILES_M if tile >= p.m), TILES_M[-1])
        return (least,) if p.m <= 32 else tuple(sorted({least, 32, 64}))

    def usual(self, p: QuantizedProblem, gpu: GpuSpec, x: Any) -> Among:
        return {"tile_m": self.fitting_tiles(p, x), "pdl": (gpu.has_pdl,), "prefetch_l2": (2 if gpu.has_pdl else 0,)}

    def times_us(self, p: QuantizedProblem, c: Any, gpu: GpuSpec, x: Any) -> Any:
        return self.tiles_us(p, c, gpu, self.tiles(p, c), smaller(p.m, c.tile_m), p.weight_bytes)

    def tiles_us(self, p: QuantizedProblem, c: Any, gpu: GpuSpec, count: Any, tokens: Any, weight_bytes: float) -> Any:
        """The slowest of DRAM, an SM's loads, its instructions and its MMAs for the busiest SM; fixed costs.

        ``count`` tiles of ``tokens`` each, which read ``weight_bytes`` from DRAM.
        """
        rate, own = rates.of(gpu), self.costs
        ctas, share = self.dealt(count, p, c, gpu)
        frame = self.smem(p.least, c)
        per_sm = -(-ctas // gpu.sm_count)
        resident = smaller(per_sm, c.ctas_per_sm)
        units = per_sm * share
        unit_bytes = frame.x_at + tokens * c.tile_k * 2 + (frame.stage_bytes - frame.scales_at)
        in_flight = resident * (c.stages - 1) * unit_bytes
        port = smaller(own.port * rate.sm_bytes_per_us, in_flight / (own.latency * rate.dram_latency_us))
        lanes = units * c.tile_n * c.tile_k / 256 / 4  # of a scheduler: MMAs of 8 tokens
        columns, strips = c.tile_m / 8, c.tile_n // 16 // c.warps_n
        instructions = DECODE_INSTRUCTIONS[p.code] + own.beside + (own.column + own.fragment / strips) * columns
        issue = lanes * instructions / (own.issue * rate.clock_mhz) * (1 + own.few / (c.warps_n * c.warps_k * resident))
        flops = 2.0 * units * c.tile_n * c.tile_k * c.tile_m
        cycles = lanes * smaller(columns * own.mma_cycles, own.mma_start + columns * own.mma_more)
        multiply = larger(cycles / rate.clock_mhz, flops / (own.mma * rate.mma_flops_per_us))
        dram = weight_bytes / (own.dram * rate.dram_share * gpu.dram_gbps * 1e3)
        sharp = own.sharpness
        busy = sum(us**sharp for us in (dram, units * unit_bytes / port, issue, multiply)) ** (1 / sharp)
        k_tiles = larger(1, -(-p.k // c.tile_k))
        fixed = rate.launch_us + own.unit_us * share + own.end_us * per_sm * -(-share // k_tiles)
        fixed = fixed + own.group_us * (c.warps_k - 1)
        first = resident * smaller(ctas, gpu.sm_count) * frame.x_at  # bytes of weights of the first units
        fixed = fixed + own.first * first / (own.dram * rate.dram_share * gpu.dram_gbps * 1e3)
        fixed = fixed + where(c.stream_k & (share % k_tiles > 0), own.shared * rate.exchange_us, 0.0)
        return fixed + busy + where(c.pdl, 0.0, rate.dependent_us)

    def preference(self, p: QuantizedProblem, c: Any, x: Any) -> tuple[Any, ...]:
        return c.stream_k, -c.tile_k, c.tile_n, -c.stages

    # -- kernel

    @cached
    def smem(self, p: QuantizedProblem, c: QuantizedConfig) -> SkinnyPackedSmem:
        return SkinnyPackedSmem(
            c.tile_m, c.tile_n, c.tile_k, c.stages, c.warps_k, p.bits, SCALE_BYTES[p.scale], p.step, p.scale_rows,
            p.zeros, 2 if p.gated else 1,
        )  # fmt: skip

    def grid(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any = None) -> tuple[int, ...]:
        """CTAs, and the units (k-tiles) of each."""
        return self.dealt(self.tiles(p, c), p, c, gpu)

    def dealt(self, count: Any, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> tuple[int, int]:
        """CTAs that ``count`` tiles are dealt out to, and the units (k-tiles) of each."""
        k_tiles, resident = larger(1, -(-p.k // c.tile_k)), gpu.sm_count * c.ctas_per_sm
        units = larger(1, count * k_tiles)
        share = where(c.stream_k, -(-units // resident), k_tiles * larger(1, -(-count // resident)))
        return -(-units // share), share

    def body(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any = None) -> Any:
        from cutekernels.kernels.cute.parts.column_scale import ColumnScale
        from cutekernels.kernels.cute.parts.epilogue import Activation, Epilogue
        from cutekernels.kernels.cute.products.skinny_packed import SkinnyPacked

        epilogue = ColumnScale if p.group == 0 or p.factors else Epilogue
        return SkinnyPacked(
            weights=self.weights(p, p.code == "e2m1" and (p.factors or p.dtype == "bf16")),
            smem=self.smem(p, c),
            warps_n=c.warps_n,
            ctas_per_sm=c.ctas_per_sm,
            epilogue=epilogue(Activation("silu_approx" if p.gated else p.activation)),
            dependent=c.pdl,
            prefetch_tiles=c.prefetch_l2,
            gated=p.gated,
        )


class GroupedPackedSkinny(PackedSkinny):
    """Over the rows of each expert: tiles that the device finds."""

    numbers = 1
    costs = coefficients.EXPERTS_SKINNY

    @of_config
    def no_prefetch(self, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        yield c.prefetch_l2 > 0, "prefetch_l2={}: experts are known to the device alone; take 0", c.prefetch_l2

    @of_both
    def waves(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        units = x.most_tiles(p, c) * -(-p.k // c.tile_k)
        why = "tile_m={} makes {} k-tiles, which 32 bits do not count: take larger tiles"
        yield units > _MOST_UNITS, why, c.tile_m, units

    def fitting_tiles(self, p: QuantizedProblem, x: Experts) -> tuple[int, ...]:
        """Values of ``tile_m`` around the rows that an expert has on the mean, up to all rows."""
        least = next((i for i, tile in enumerate(TILES_M) if tile >= x.mean), len(TILES_M) - 1)
        return tuple(t for t in TILES_M[max(0, least - 1) : least + 2] if t // 2 < max(1, x.rows)) or TILES_M[:1]

    def usual(self, p: QuantizedProblem, gpu: GpuSpec, x: Any) -> Among:
        tiles_k = BODIES[self.name]["tile_k"][:-1]  # nobody has timed experts with the longest
        return {**super().usual(p, gpu, x), "tile_k": tiles_k, "prefetch_l2": (0,)}

    def times_us(self, p: QuantizedProblem, c: Any, gpu: GpuSpec, x: Any) -> Any:
        count = x.row_tiles(c)
        tokens = smaller(c.tile_m, x.rows / larger(1, count))
        return self.tiles_us(p, c, gpu, count * -(-p.n // c.tile_n), tokens, x.hit * p.weight_bytes)

    def counters(self, p: QuantizedProblem, c: QuantizedConfig, x: Experts) -> int:
        return x.most_tiles(p, c)  # type: ignore[no-any-return]

    def grid(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any = None) -> tuple[int, ...]:
        """All CTAs that are resident, or as many as there can be tiles or k-tiles."""
        return self.dealt(max(1, x.most_tiles(p, c)), p, c, gpu)[:1]

    def body(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any = None) -> Any:
        from cutekernels.kernels.cute.products.skinny_packed_grouped import SkinnyPackedGrouped

        return SkinnyPackedGrouped(**vars(super().body(p, c, gpu)), split=c.stream_k, clamped=x.clamped)


PACKED_SKINNY, GROUPED_PACKED_SKINNY = PackedSkinny(), GroupedPackedSkinny()


def _within(held: Any, limits: dict[int, int], beyond: int) -> Any:
    """A stand-in for the least limit that ``held`` keeps."""
    for limit, value in reversed(limits.items()):
        beyond = where(held <= limit, value, beyond)
    return beyond
