"""The warpgroup schedules of packed weights, for many tokens: rules, models, bodies, grids. Of experts a rule reads the
product of one with all rows, and :class:`Experts` beside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from cutekernels import rates
from cutekernels.columns import larger, pick, smaller, where
from cutekernels.gpu import GpuSpec
from cutekernels.kernels.cute.parts.smem import WarpgroupPackedSmem, WarpgroupSmem
from cutekernels.ops.products.schedules import coefficients
from cutekernels.ops.products.schedules.packed_problem import (
    BODIES,
    DECODE_INSTRUCTIONS,
    SCALE_BYTES,
    QuantizedConfig,
    QuantizedProblem,
)
from cutekernels.ops.products.schedules.schedule import PackedSchedule
from cutekernels.rules import Among, Broken, of_both, of_config, of_problem

ROWS = 64  # of a consumer group
_REGISTERS = {1: 232, 2: 232, 3: 160}  # of a consumer's thread, by groups
_WIDEST_SHARED = {1: 192, 2: 192, 3: 96}  # tokens of a tile that a cluster shares, likewise
_REGISTERS_OF_TWO = {1: 216, 2: 104, 3: 0}  # where two CTAs share an SM
MOST_IN_TURN = 64  # tokens of a tile whose k-tiles groups take in turn
_BOXES = 1  # buffers of results of a consumer group
_BESIDE_REGISTERS = 72  # decoded weights twice, addresses, scales
LEAST_STAGES = 3
"""Of experts: with two the fastest took 1.17 to 1.37 times as long at all three problems where a tune had some (H100,
2026-11-26)."""
# Clusters that ran at once on 132 SMs, by CTAs of each (H200, 2026-11-29), with one CTA to an SM and with two.
_CLUSTERS = {1: 132, 2: 66, 3: 38, 4: 30, 5: 22, 6: 16, 8: 15}
_CLUSTERS_OF_TWO = {1: 264, 2: 132, 3: 72, 4: 56, 5: 40, 6: 36, 8: 15}


class PackedWarpgroup(PackedSchedule):
    """TMA and warpgroup MMA; weights are decoded in registers."""

    name = "warpgroup"
    numbers = 3
    costs: ClassVar[coefficients.PackedWarpgroupCosts] = coefficients.PACKED_WARPGROUP

    @of_problem
    def warpgroup_mma(self, p: QuantizedProblem, gpu: GpuSpec, x: None) -> Broken:
        yield not gpu.has_wgmma, "warpgroup needs warpgroup MMA, which {} lacks", gpu.name

    @of_problem
    def aligned_out(self, p: QuantizedProblem, gpu: GpuSpec, x: None) -> Broken:
        why = "warpgroup stores 16 bytes at a time: it takes an out of 16-byte aligned rows, n divisible by 8"
        yield p.out_align < 8, why

    @of_config
    def registers(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        twice = (c.scaled == "accumulators") & (x.group > 0)
        need = c.tile_m // 2 * where(twice, 2, 1) + _BESIDE_REGISTERS  # about
        count = smaller(self.groups(c) * c.warps_k, 3)  # no rule lets more through
        most = where(c.ctas_per_sm > 1, pick(count, _REGISTERS_OF_TWO), pick(count, _REGISTERS))
        why = "tile_m={} scaled={} needs about {} registers of a thread's {}"
        yield need > most, why, c.tile_m, c.scaled, need, most
        widest = pick(count, _WIDEST_SHARED)
        why = "split_k={}: a thread that sends sums of tile_m={} spills: take {} or less"
        yield (c.split_k > 1) & (c.tile_m > widest), why, c.split_k, c.tile_m, widest

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
        frame, need = self.smem(x, c), self.smem(x, c).total_bytes
        most = smaller(gpu.smem_per_block_bytes, gpu.smem_per_sm_bytes // c.ctas_per_sm - gpu.SMEM_RESERVED_BYTES)
        yield need > most, "{} bytes of shared memory are more than a block's {}", need, most
        more = c.stages + c.warps_k
        room = (more <= 8) & (need + c.warps_k * (frame.x_bytes + frame.packed_bytes) <= most)
        yield room, "stages={} leaves room for {}", c.stages, more

    @of_config
    def two_batches(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        # A k-tile of 64 is one of two batches under way, whose stage is released when the next but one has landed.
        ahead = (c.tile_k == 64) & ((c.scaled == "weights") | (x.group == 0))
        read = where(ahead, 2, 1) * c.warps_k
        why = "stages={} are all read by k-tiles under way: take {} or more"
        yield c.stages <= read, why, c.stages, read + 1

    @of_config
    def turns(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        several = c.warps_k > 1
        why = "stages={} of groups that take turns are not each one group's alone: take a multiple of warps_k={}"
        yield c.stages % c.warps_k > 0, why, c.stages, c.warps_k
        yield several & (c.tile_n > ROWS), "warps_k={} is for groups of the same rows: take tile_n=64", c.warps_k
        wide = several & (c.tile_m > MOST_IN_TURN)
        why = "warps_k={}: products of tile_m={} take no less than decoding: take {} or less"
        yield wide, why, c.warps_k, c.tile_m, MOST_IN_TURN
        why = "warps_k={} is for tiles that a CTA or a cluster has alone: take stream_k=0"
        yield several & c.stream_k, why, c.warps_k
        yield several & x.gated, "warps_k={}: a gate has a group of rows, and another of up; take 1", c.warps_k

    @of_config
    def two_ctas(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        two = c.ctas_per_sm > 1
        yield two & (c.tile_n > ROWS), "ctas_per_sm={} takes 64 rows each, tile_n=64", c.ctas_per_sm
        yield two & c.stream_k, "ctas_per_sm={}: stream_k=1 has one CTA to an SM", c.ctas_per_sm

    @of_config
    def two_groups(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        odd = (c.tile_n != 2 * ROWS) & x.gated
        yield odd, "tile_n={}: a gate has a group's 64 rows and another's 64 of up; take 128", c.tile_n

    @of_both
    def tile_of_tokens(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        tokens, words = self.tokens(p, x)
        yield _idles(c.tile_m, tokens), "tile_m={} idles most of a tile over {}", c.tile_m, words
        yield _reads_often(c.tile_m, tokens), "tile_m={} reads weights too often for {}", c.tile_m, words

    @of_both
    def waves(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        count = self.tiles(p, c)
        yield c.stream_k & (count % gpu.sm_count == 0), "stream_k=1: {} tiles fill whole waves without", count
        lone = (c.raster > 1) & (p.m <= c.tile_m)
        yield lone, "raster={} does not suit one column of tiles: take 1", c.raster

    @of_both
    def cluster(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        shared = c.split_k > 1
        yield shared & c.stream_k, "split_k={} and stream_k=1 are two ways to share a tile: take one", c.split_k
        yield shared & (c.raster > 1), "raster={}: clusters have one tile each; take 1", c.raster
        little = shared & (2 * c.split_k > -(-p.k // c.tile_k))
        yield little, "split_k={} leaves less than two k-tiles of {} to each", c.split_k, c.tile_k
        k_tiles, turns = -(-p.k // c.tile_k) // c.split_k, c.warps_k > 1
        yield turns & (k_tiles < 2 * c.warps_k), "warps_k={}: groups take turns at {} k-tiles", c.warps_k, k_tiles
        all_once = turns & (self.tiles(p, c) * c.split_k > gpu.sm_count * c.ctas_per_sm)
        yield all_once, "warps_k={} is for CTAs of one tile: {} tiles are more", c.warps_k, self.tiles(p, c)
        many = shared & (self.tiles(p, c) > clusters(c, gpu))
        yield many, "split_k={}: {} tiles are more than the clusters that run at once", c.split_k, self.tiles(p, c)

    # -- choice

    def usual(self, p: QuantizedProblem, gpu: GpuSpec, x: Any) -> Among:
        few = p.m <= 2 * MOST_IN_TURN  # tokens of two tiles, which no band need hold together
        tiles = tuple([t for t in BODIES[self.name]["tile_m"] if not _idles(t, p.m) and not _reads_often(t, p.m)])
        either = {"raster": (1,)} if few else {"warps_k": (1,)}
        return {"pdl": (True,), "tile_m": tiles, **either}

    def times_us(self, p: QuantizedProblem, c: Any, gpu: GpuSpec, x: Any) -> Any:
        ctas, rounds, share = self.grid(p, c, gpu)
        k_tiles = -(-p.k // c.tile_k)
        whole = where(c.split_k > 1, -(-k_tiles // c.split_k), -(-self.tiles(p, c) // ctas) * k_tiles)
        steps = where(c.stream_k, rounds * k_tiles + share, -(-whole // c.warps_k))
        # Clusters may fill some SMs and leave others idle.
        together = where(c.split_k > 1, c.ctas_per_sm, smaller(c.ctas_per_sm, -(-ctas // gpu.sm_count))) * c.warps_k
        own, moved = self.costs, p.weight_bytes + 2.0 * p.m * (p.k + p.columns)
        halves = c.tile_m * self.groups(c) / 256  # of 128 x 128 sums
        met = where(c.stream_k, own.shared + own.parts * halves, 0.0)
        turns = where(c.warps_k > 1, own.turn_us, 0.0)
        met = met + where(c.split_k > 1, own.met + own.sent * (1 - 1 / c.split_k) * halves, 0.0)
        return met * rates.of(gpu).exchange_us + turns + self.steps_us(p, c, gpu, steps, moved, together)

    def steps_us(self, p: QuantizedProblem, c: Any, gpu: GpuSpec, steps: Any, moved: float, together: Any = 1) -> Any:
        """``steps`` k-tiles of each of the CTAs, or groups in turn, that share the busiest SM, bound by MMAs, decoding,
        loads or their latency; DRAM beside; fixed costs.
        """
        rate, own, count = rates.of(gpu), self.costs, self.groups(c) * together
        scaling = 0.0 if p.code == "e2m1" else own.exact if p.scale == p.dtype else own.scaled
        instructions = float(DECODE_INSTRUCTIONS[p.code]) + own.beside + where(c.scaled == "weights", scaling, 0.0)
        ends = where(c.scaled == "accumulators", c.tile_k / smaller(p.group, c.tile_k), 0.0) if p.group else 0.0
        instructions = instructions * (c.tile_k / 64 * 4) + ends * c.tile_m / 2
        decode = instructions / (own.issue * rate.clock_mhz)  # of one group
        flops = 2.0 * c.tile_n * c.tile_m * c.tile_k * together
        multiply = flops / (own.mma * rate.warpgroup_flops_per_us) + own.end_us * ends
        multiply = multiply + where(count == 1, own.alone * decode, 0.0)
        loaded = together * c.tile_k * (c.tile_m * 2 + c.tile_n * p.bits / 8)
        fetch, ahead = loaded / (own.port * rate.sm_bytes_per_us), larger(1, c.stages - c.warps_k)
        # Stages are filled once without a wait.
        refilled = larger(0.0, 1.0 - c.stages / larger(1, steps * c.warps_k))
        wait = refilled * own.latency * rate.dram_latency_us * c.warps_k / ahead
        sharp = own.sharpness
        step = sum(us**sharp for us in (multiply, count * decode, fetch, wait)) ** (1 / sharp)
        busy = steps * (step + own.k_tile_us + own.half_us * c.tile_k / 64)
        dram = moved / (own.dram * rate.dram_share * gpu.dram_gbps * 1e3)
        fixed = own.fixed * rate.launch_us + where(c.pdl, 0.0, rate.dependent_us)
        return fixed + rates.both_us(busy, dram, own.hidden)

    def preference(self, p: QuantizedProblem, c: Any, x: Any) -> tuple[Any, ...]:
        return c.stream_k, -c.stages, c.raster != 8

    # -- kernel

    def counters(self, p: QuantizedProblem, c: QuantizedConfig, x: Any) -> int:
        return self.tiles(p, c) * self.groups(c)

    def groups(self, c: QuantizedConfig) -> int:
        """Consumer warp groups."""
        return c.tile_n // ROWS

    def smem(self, p: QuantizedProblem, c: QuantizedConfig) -> WarpgroupPackedSmem:
        return WarpgroupPackedSmem(
            self.groups(c), c.tile_m, c.tile_k, c.stages, _BOXES, p.bias != "none", p.bits, SCALE_BYTES[p.scale],
            p.step, p.scale_rows, p.zeros, received=(c.split_k - 1) * (c.tile_m // 2 // owners(c)),
            exchanged=left_at_once(c) if p.gated else (c.warps_k - 1) * self.groups(c) * (c.tile_m // 2),
        )  # fmt: skip

    def grid(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any = None) -> tuple[int, ...]:
        """CTAs, the whole tiles of each where they share the others, and each one's k-tiles of those."""
        count, k_tiles = larger(1, self.tiles(p, c)), larger(1, -(-p.k // c.tile_k))
        rounds, rest = divmod(count, gpu.sm_count)
        share = -(-rest * k_tiles // gpu.sm_count)
        sharing = where(rounds > 0, gpu.sm_count, -(-rest * k_tiles // larger(1, share)))
        whole = where(c.split_k > 1, count * c.split_k, smaller(count, gpu.sm_count * c.ctas_per_sm))
        ctas = where(c.stream_k, sharing, whole)
        return ctas, where(c.stream_k, rounds, 0), where(c.stream_k, share, 0)

    def body(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any = None) -> Any:
        from cutekernels.backends import cute as backend
        from cutekernels.kernels.cute.parts.boxes import ResultBoxes
        from cutekernels.kernels.cute.parts.epilogue import Activation, Epilogue
        from cutekernels.kernels.cute.parts.schedule import Raster
        from cutekernels.kernels.cute.products.warpgroup_packed import WarpgroupPacked

        floats = p.code == "e2m1" or (p.code == "e4m3" and c.scaled == "weights" and p.scale != p.dtype)
        results = ResultBoxes(
            dtype=backend.type_of(p.dtype),
            columns=c.tile_m // owners(c),
            panels=1,
            pitch=ROWS,
            boxes=_BOXES,
            rows_contiguous=True,
            source=False,
            biased=p.bias != "none",
            out_columns=0,
            epilogue=Epilogue(Activation("none" if p.gated else p.activation)),
        )
        return WarpgroupPacked(
            weights=self.weights(p, p.factors or (floats and p.dtype == "bf16")),
            smem=self.smem(p, c),
            scaled=c.scaled,
            groups=self.groups(c) * c.warps_k,
            split=c.stream_k,
            raster=Raster(c.raster),
            results=results,
            dependent=c.pdl,
            cluster=c.split_k,
            owners=owners(c),
            ctas_per_sm=c.ctas_per_sm,
            warps_k=c.warps_k,
            gate=Epilogue(Activation("silu_approx")) if p.gated else None,
        )


class GroupedPackedWarpgroup(PackedWarpgroup):
    """Over the rows of each expert: whole tiles, of gates and up 64 rows each."""

    numbers = 1
    costs = coefficients.EXPERTS_WARPGROUP
    waves = None  # type: ignore[assignment]
    cluster = None  # type: ignore[assignment]

    @of_config
    def whole_tiles(self, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        yield c.stream_k, "stream_k=1: warpgroup gives each CTA whole tiles of experts; take 0"
        yield c.split_k > 1, "split_k={}: warpgroup gives each CTA whole tiles of experts; take 1", c.split_k
        yield c.ctas_per_sm > 1, "ctas_per_sm={}: warpgroup has an SM to itself; take 1", c.ctas_per_sm
        yield c.warps_k > 1, "warps_k={}: warpgroup's groups have other rows each; take 1", c.warps_k

    @of_config
    def depth(self, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        why = "stages={} loads one k-tile while another is multiplied: take {} or more"
        yield c.stages < LEAST_STAGES, why, c.stages, LEAST_STAGES

    def usual(self, p: QuantizedProblem, gpu: GpuSpec, x: Any) -> Among:
        return {"pdl": (True,), "stream_k": (False,), "split_k": (1,), "ctas_per_sm": (1,), "warps_k": (1,)}

    def smem(self, p: QuantizedProblem, c: QuantizedConfig) -> WarpgroupPackedSmem:
        return replace(super().smem(p, c), places=WarpgroupSmem.PLACES)

    def times_us(self, p: QuantizedProblem, c: Any, gpu: GpuSpec, x: Any) -> Any:
        steps = x.waves(c, -(-p.n // c.tile_n), gpu.sm_count) * -(-p.k // c.tile_k)
        moved = x.hit * p.weight_bytes + 2.0 * x.rows * (p.k + p.columns)
        return self.steps_us(p, c, gpu, steps, moved)

    def grid(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any = None) -> tuple[int, ...]:
        """All CTAs that are resident, or as many as there can be tiles."""
        return (int(max(1, min(gpu.sm_count, x.most_tiles(p, c)))),)

    def body(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any = None) -> Any:
        from cutekernels.kernels.cute.parts.boxes import GroupBoxes
        from cutekernels.kernels.cute.products.warpgroup_packed_grouped import WarpgroupPackedGrouped

        product = super().body(p, c, gpu)
        results = GroupBoxes(**vars(product.results), swap_ab=True)
        return WarpgroupPackedGrouped(**vars(product) | {"results": results, "clamped": x.clamped})


PACKED_WARPGROUP, GROUPED_PACKED_WARPGROUP = PackedWarpgroup(), GroupedPackedWarpgroup()


def _idles(tile: Any, tokens: float) -> Any:
    return tile > max(16, 2 * tokens)


def _reads_often(tile: Any, tokens: float) -> Any:
    return 4 * tile < min(tokens, 64)


def owners(c: Any) -> Any:
    """CTAs of a cluster that have a share of its tile's results, 16 tokens or a multiple: as many as divide them."""
    found, sixteens = 1, c.tile_m // 16
    for count in range(2, 9):
        found = where((count <= c.split_k) & (sixteens % count == 0), count, found)
    return found


def left_at_once(c: Any) -> Any:
    """Accumulators that a thread of a gate leaves for another at a time, 64 at most."""
    results = c.tile_m // 2 // owners(c)
    return results // -(-results // 64)


def clusters(c: Any, gpu: GpuSpec) -> Any:
    """Clusters of ``split_k`` CTAs that run at once."""
    found = where(c.ctas_per_sm > 1, pick(c.split_k, _CLUSTERS_OF_TWO), pick(c.split_k, _CLUSTERS))
    return found * gpu.sm_count // 132
