"""The warpgroup schedule: TMA and warpgroup MMA in a persistent grid, for any layout. Rules, model, body.

``tile_m`` advances by the MMA's 64 rows, ``tile_n`` by its 8 columns; with ``swap_ab``, which computes ``out^T``, the
other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels import rates
from cutekernels.columns import cached, larger, where
from cutekernels.gpu import ARCHITECTURES, GpuSpec
from cutekernels.kernels.cute.parts.smem import WarpgroupSmem
from cutekernels.ops.products.schedules import coefficients
from cutekernels.ops.products.schedules.problem import ELEMENT_BYTES, MOST_TOKENS, WIDEST, GemmConfig, GemmProblem
from cutekernels.ops.products.schedules.schedule import PLAIN, DenseSchedule, Extras, Prefetches, extras_of
from cutekernels.ops.products.schedules.skinny_warpgroup import SKINNY_WARPGROUP
from cutekernels.rules import Among, Broken, no_warpgroups, of_both, of_config, of_problem

if TYPE_CHECKING:
    from cutekernels.ops.shared.per_stream import StreamWorkspace

GROUP_ROWS, COLUMNS = 64, 8  # of an MMA; it has more columns by as many
SWIZZLED = 64  # elements of a swizzled line: what an operand that is not K-major advances by
LEAST_EXTENT = 32  # rows and columns of out; fewer leave most of a tile idle
# Registers of a thread's accumulators: more spill, whatever setmaxnreg gives; 208 took 15 times as long (H200,
# 2026-11-23).
MOST_ACCUMULATORS = 192
MOST_FINISHED = 176  # with C, a bias or an activation
MOST_OF_THREE = 80  # where three groups leave a thread 160 registers
LEAST_SHARE = 8  # k-tiles of a CTA's part of a tile, below which parts cost more than they save
# Buffers of a group's results: two, or one where that leaves room for the stages; where C comes in through them, four.
BOXES, SOURCE_BOXES = (2, 1), 4


class Warpgroup(DenseSchedule, Prefetches):
    """One warp loads by TMA, groups of four warps multiply from shared memory; takes a gate behind the product."""

    name = "warpgroup"
    in_memory = True
    table: ClassVar[coefficients.WarpgroupCosts] = coefficients.WARPGROUP
    places: ClassVar[int] = 0  # of a ring of tiles in shared memory

    # -- rules

    warpgroup_mma = of_problem(no_warpgroups)

    @of_problem
    def alignment(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Broken:
        odd = min(p.a_align, p.b_align, p.out_align) < WIDEST
        yield odd, "{} takes operands with 16-byte aligned rows", self.name

    @of_problem
    def strides(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Broken:
        odd = p.c != "none" and (p.c != p.out_major or p.c_align < WIDEST)
        yield odd, "{} takes a c with 16-byte aligned rows, whose contiguous extent is out's", self.name
        yield p.wide, "{} takes no 64-bit strides", self.name

    @of_problem
    def least_depth(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Broken:
        yield p.k == 0, "{} takes a K of 1 or more", self.name

    @of_problem
    def least_extents(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Broken:
        few = p.k and p.m <= MOST_TOKENS and SKINNY_WARPGROUP.refusal(p, gpu, x) is None
        yield few, "up to {} tokens of a K-major weight are for body={}", MOST_TOKENS, SKINNY_WARPGROUP.name
        why = "{} takes {} rows and columns or more; they are {} and {}"
        yield min(p.m, p.n) < LEAST_EXTENT, why, self.name, LEAST_EXTENT, p.m, p.n

    @cached
    def smem(self, c: GemmConfig, extras: Extras = PLAIN) -> WarpgroupSmem:
        """A group has the most boxes that fit in it."""
        own = *c.mma_tile, c.tile_k, c.stages, groups(c)
        if extras.source:
            return WarpgroupSmem(*own, SOURCE_BOXES, extras.biased, self.places)
        most, least = BOXES
        wide = WarpgroupSmem(*own, most, extras.biased, self.places).total_bytes
        boxes = where(wide <= ARCHITECTURES[9, 0].smem_per_block_bytes, most, least)
        return WarpgroupSmem(*own, boxes, extras.biased, self.places)

    def threads(self, c: GemmConfig) -> int:
        """The groups that multiply, and the one that loads."""
        return 128 * (groups(c) + 1)

    @of_config
    def clusters(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        yield c.cluster_m * c.cluster_n > 2, "a cluster has two CTAs at most: take cluster_m=1 or cluster_n=1"

    @of_config
    def ping_pong(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        rows = c.mma_tile[0]
        why = "pingpong=1 gives each group a tile of its own, of 64 or 128 rows; {}={}"
        yield c.pingpong & (rows > 2 * GROUP_ROWS), why, where(c.swap_ab, "tile_n", "tile_m"), rows

    @of_config
    def registers(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        accumulators = accumulators_of(c, x.half_accumulators)
        most = where(sharing(c) == 3, MOST_OF_THREE, MOST_ACCUMULATORS)  # three groups are never in ping-pong
        what = "pairs of fp16 accumulators" if x.half_accumulators else "accumulators"
        why = f"{{}}x{{}} are {{}} {what} a thread; {{}} groups keep {{}} at most"
        yield accumulators > most, why, c.tile_m, c.tile_n, accumulators, groups(c), most

    @of_config
    def gate(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        odd = c.swap_ab | (c.tile_n < 2 * WarpgroupSmem.BOX) | (c.tile_n % (2 * COLUMNS) > 0)
        why = (
            f"a gate takes swap_ab=0, and tiles of {2 * WarpgroupSmem.BOX} columns or more in steps of {2 * COLUMNS}, "
            "half of them gates; swap_ab={:d}, tile_n={}"
        )
        yield odd & x.gated, why, c.swap_ab, c.tile_n

    @of_both
    def registers_at_the_end(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        if (p.c, p.bias, p.activation) != ("none", "none", "none") or x.gated:
            accumulators = accumulators_of(c, p.accumulate == "fp16")
            why = "{} accumulators a thread; with c, a bias, an activation or a gate it keeps {} at most"
            yield accumulators > MOST_FINISHED, why, accumulators, MOST_FINISHED

    @of_both
    def operand_tiles(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        a, b = p.operands
        for name, tile, side, shared in (("m", c.tile_m, a, c.cluster_n), ("n", c.tile_n, b, c.cluster_m)):
            if not side.k_major:
                why = "tile_{}={} is loaded in {} parts, along M or N by {} elements"
                yield tile % (SWIZZLED * shared) > 0, why, name, tile, shared, SWIZZLED
            idle = tile > 2 * max(GROUP_ROWS, side.extent)
            yield idle, "tile_{}={} idles most of a tile over an extent of {}", name, tile, side.extent

    @of_both
    def boxes_of_c(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        if p.c != "none":
            width, why = c.mma_tile[1], "{}={}: with c, results leave by whole boxes of {} columns"
            knob = where(c.swap_ab, "tile_m", "tile_n")
            yield width % WarpgroupSmem.BOX > 0, why, knob, width, WarpgroupSmem.BOX

    @of_config
    def shared_memory(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        smem, most = self.smem(c, x), gpu.smem_per_block_bytes
        yield smem.total_bytes > most, "{} bytes of shared memory are more than a block's {}", smem.total_bytes, most
        room = (c.stages < 6) & (smem.total_bytes + 2 * smem.stage_bytes <= most)
        yield room, "stages={} leaves room for {}", c.stages, c.stages + 2

    @of_config
    def split(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        without = c.pingpong | (c.pdl == 0) | x.half_accumulators | x.gated
        why = "split_k={} takes pingpong=0, pdl=1, accumulators in fp32 and no gate"
        yield (c.split_k > 1) & without, why, c.split_k

    @of_both
    def last_wave(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        tiles_m, tiles_n = cluster_tiles(p, c)
        split, count, clusters = c.split_k > 1, tiles_m * tiles_n * p.batch, clusters_of(c, gpu)
        left = count % clusters
        none = split & ((left == 0) | (left * c.split_k > clusters))
        yield none, "split_k={}: the last wave has {} tiles for {} clusters", c.split_k, left, clusters
        waves = split & (c.raster > 1) & (count < clusters)
        yield waves, "raster={} orders several waves of tiles: take 1", c.raster
        little = split & (-(-p.k // c.tile_k) < LEAST_SHARE * c.split_k)
        yield little, "split_k={} leaves less than {} k-tiles to each", c.split_k, LEAST_SHARE

    @of_both
    def several_tiles(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        tiles_m, tiles_n = cluster_tiles(p, c)
        lone = (c.cluster_m * c.cluster_n > 1) & (tiles_m * tiles_n * p.batch == 1)
        yield lone, "a cluster is for more than two tiles"
        yield (c.raster > 1) & (tiles_m == 1), "raster={} does not suit one row of tiles: take 1", c.raster

    # -- choice

    def usual(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Among:
        return {"raster": (1, 8), "pdl": (True,)}

    def preference(self, p: GemmProblem, c: Any, extras: Extras = PLAIN) -> tuple[Any, ...]:
        """More stages, bands of 8 tile rows, rows that stay rows."""
        return -c.stages, c.raster != 8, c.raster, c.swap_ab, c.mma_cluster[1]

    def times_us(self, p: GemmProblem, c: Any, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        """Tiles of the busiest SM, a k-tile bound by MMAs, shared memory, L2 or latency; DRAM beside; fixed costs.

        Fitted to 2950 runs of 280 products on an H200; its choice among them takes 1.01 times the best one's time.
        """
        tiles_m, tiles_n = cluster_tiles(p, c)
        outputs = p.m * p.n * (0.5 if extras.gated else 1 if p.c == "none" else 2)
        moved = ELEMENT_BYTES * p.batch * (p.m * p.k + p.k * p.n + outputs)
        rows, columns = extents(p, c)
        high, wide = c.mma_cluster
        shared = where(rows > columns, wide, where(columns > rows, high, 2))  # the operand of fewer rows
        return self.walk_us(c, tiles_m * tiles_n * p.batch, p.k, moved, gpu, extras, (high * wide > 1) & (shared == 1))

    def walk_us(
        self, c: Any, tiles: Any, k: Any, moved: float, gpu: GpuSpec, extras: Extras = PLAIN, apart: Any = False
    ) -> Any:
        """The time of so many tiles of clusters, ``k`` deep, that move so many bytes between DRAM and chip. ``apart``:
        the clusters share the operand of fewer rows.
        """
        rate, own = rates.of(gpu), self.table
        clusters, k_tiles = larger(1, clusters_of(c, gpu)), -(-k // c.tile_k)
        waves, left = divmod(tiles, clusters)
        steps = waves * k_tiles + where(left > 0, -(-k_tiles // c.split_k), 0)
        tiles = waves + (left > 0)
        first, steady, epilogue, single, handed = self._parts_us(c, gpu, extras)
        ends = where(c.pingpong, 1.0, tiles) + single * where(c.pingpong, (1 + tiles) / 2, tiles)
        busy = steps * where(tiles <= 1, first, steady) + epilogue * ends + handed
        dram = moved / (rate.dram_share * gpu.dram_gbps * 1e3)
        fixed = own.fixed * rate.launch_us + where(c.pdl, 0.0, rate.dependent_us)
        return (fixed + rates.both_us(busy, dram, own.hidden)) * where(apart, own.apart, 1.0)

    @cached
    def _parts_us(self, c: Any, gpu: GpuSpec, extras: Extras) -> tuple[Any, ...]:
        """A k-tile of an SM that has one tile, and of one that has several; a tile's end, what a single box adds to it,
        and what a split's parts do.
        """
        rate, own = rates.of(gpu), self.table
        (tile_rows, tile_columns), (cluster_rows, cluster_columns) = c.mma_tile, c.mma_cluster
        multiply = 2.0 * c.tile_m * c.tile_n * c.tile_k / (own.mma * rate.warpgroup_flops_per_us)
        loaded = (tile_rows / cluster_columns + tile_columns / cluster_rows) * c.tile_k * ELEMENT_BYTES
        arriving = (c.tile_m + c.tile_n) * c.tile_k * ELEMENT_BYTES
        read = tile_rows / GROUP_ROWS * (GROUP_ROWS + tile_columns) * c.tile_k * ELEMENT_BYTES
        passed = (read + arriving) / (own.shared * rate.smem_bytes_per_us)
        awaited = own.latency * rate.exchange_us / (c.stages - 1)

        def step_us(port: float) -> Any:
            fetch = loaded / (port * rate.sm_bytes_per_us)
            step = sum(us**own.sharpness for us in (multiply, fetch, passed, awaited)) ** (1 / own.sharpness)
            return larger(step, arriving / (own.arrival * rate.sm_bytes_per_us))

        finished = tile_columns * (own.gate / 2 if extras.gated else 1)
        epilogue = own.epilogue / rate.sm_bytes_per_us * tile_rows * finished
        single = where(self.smem(c).boxes == 1, own.single, 0.0)
        # One part is left, the others of a tile are added.
        handed = own.handed * rate.exchange_us + c.split_k * 4.0 * c.tile_m * c.tile_n / rate.sm_bytes_per_us
        return step_us(own.port), step_us(own.steady), epilogue, single, where(c.split_k > 1, handed, 0.0)

    def body(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        import cutlass

        from cutekernels.backends import cute as backend
        from cutekernels.kernels.cute.parts.boxes import ResultBoxes
        from cutekernels.kernels.cute.parts.epilogue import Activation, Epilogue
        from cutekernels.kernels.cute.parts.schedule import Raster
        from cutekernels.kernels.cute.products.warpgroup import WarpgroupGemm
        from cutekernels.kernels.cute.products.warpgroup_split import WarpgroupSplit

        rows, columns = p.operands[::-1] if c.swap_ab else p.operands
        pitch = GROUP_ROWS * sharing(c)
        gate = "none" if not extras.gated else "m" if c.swap_ab else "n"
        (tile_m, tile_n), (cluster_m, cluster_n) = c.mma_tile, c.mma_cluster
        smem = self.smem(c, extras_of(p))
        results = ResultBoxes(
            dtype=backend.type_of(p.dtype),
            columns=tile_n // 2 if gate == "n" else tile_n,
            panels=tile_m // pitch // (2 if gate == "m" else 1),
            pitch=pitch,
            boxes=smem.boxes,
            rows_contiguous=(p.out_major == "m") != c.swap_ab,
            source=p.c != "none",
            biased=p.bias != "none",
            out_columns=0 if c.swap_ab else 1,
            epilogue=Epilogue(Activation("silu_approx" if extras.gated else p.activation)),
            gate=gate,
        )
        return (WarpgroupGemm if c.split_k == 1 else partial(WarpgroupSplit, split_k=c.split_k))(
            smem=smem,
            pingpong=c.pingpong,
            cluster_m=cluster_m,
            cluster_n=cluster_n,
            raster=Raster(c.raster),
            rows_k_major=rows.k_major,
            columns_k_major=columns.k_major,
            accumulate=cutlass.Float16 if p.accumulate == "fp16" else cutlass.Float32,
            results=results,
            swap_ab=c.swap_ab,
            dependent=c.pdl,
            resident=clusters_of(c, gpu) * c.cluster_m * c.cluster_n,
        )

    def workspace(self, p: GemmProblem, c: GemmConfig, extras: Extras = PLAIN) -> Callable[[], tuple[Any, ...]]:
        from cutekernels.gpu import detect

        return _workspace(detect().sm_count).get if c.split_k > 1 else tuple


WARPGROUP = Warpgroup()


@cache
def _workspace(ctas: int) -> StreamWorkspace:
    """One for all launches of a stream, which follow one another, and tiles of any size."""
    from cutekernels.ops.shared.per_stream import StreamWorkspace

    return StreamWorkspace(ctas * 2 * 128 * MOST_ACCUMULATORS, ctas * 3)


# ---- arithmetic of the rules ----------------------------------------------------------------------------


def sharing(c: GemmConfig) -> int:
    """Groups that share a tile."""
    return WarpgroupSmem.sharing(c.mma_tile[0], c.pingpong)


def groups(c: GemmConfig) -> int:
    """Groups that multiply."""
    return where(c.pingpong, 2, sharing(c))


def accumulators_of(c: GemmConfig, half: bool = False) -> int:
    """Registers of a thread's accumulators, which hold two each where those are fp16."""
    return c.tile_m * c.tile_n // (128 * sharing(c)) // (2 if half else 1)


def extents(p: GemmProblem, c: GemmConfig) -> tuple[Any, Any]:
    """Extents along the MMA's rows and along its columns."""
    a, b = p.operands
    return where(c.swap_ab, b.extent, a.extent), where(c.swap_ab, a.extent, b.extent)


def clusters_of(c: GemmConfig, gpu: GpuSpec) -> int:
    """Clusters that are resident at once."""
    return gpu.sm_count // (c.cluster_m * c.cluster_n)


def cluster_tiles(p: GemmProblem, c: GemmConfig) -> tuple[int, int]:
    """Tiles of whole clusters along the MMA's rows and columns."""
    rows, columns = extents(p, c)
    (tile_m, tile_n), (cluster_m, cluster_n) = c.mma_tile, c.mma_cluster
    return -(-rows // (tile_m * cluster_m)), -(-columns // (tile_n * cluster_n))
