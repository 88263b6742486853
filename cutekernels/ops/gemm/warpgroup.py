"""The warpgroup schedule: TMA and warpgroup MMA in a persistent grid, for any layout. Rules, model, body.

``tile_m`` advances by the MMA's 64 rows, ``tile_n`` by its 8 columns; with ``swap_ab``, which computes ``out^T``, the
other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels import rates
from cutekernels.gpu import ARCHITECTURES
from cutekernels.kernels.cute.parts.smem import WarpgroupSmem
from cutekernels.ops.gemm import coefficients
from cutekernels.ops.gemm.prefetch import Prefetches
from cutekernels.ops.gemm.problem import (
    ELEMENT_BYTES,
    MOST_TOKENS,
    WIDEST,
    GemmConfig,
    GemmProblem,
    Side,
)
from cutekernels.ops.gemm.schedule import HALF_ACCUMULATORS, PLAIN, Extras, GemmSchedule, extras_of
from cutekernels.ops.gemm.skinny_warpgroup import SKINNY_WARPGROUP
from cutekernels.ops.shared.occupancy import no_warpgroups
from cutekernels.rules import of_both, of_config, of_problem

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec
    from cutekernels.ops.shared.per_stream import Workspace

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


@dataclass(frozen=True)
class Warpgroup(GemmSchedule, Prefetches):
    """One warp loads by TMA, groups of four warps multiply from shared memory; takes a gate behind the product."""

    name = "warpgroup"
    table: ClassVar[coefficients.Warpgroup] = coefficients.WARPGROUP
    places: ClassVar[int] = 0  # of a ring of tiles in shared memory

    # -- rules

    warpgroup_mma = of_problem(no_warpgroups)

    @of_problem
    def alignment(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> str | None:
        if min(p.a_align, p.b_align, p.out_align) < WIDEST:
            return f"{self.name} takes operands with 16-byte aligned rows"
        return None

    @of_problem
    def layout_of_c(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> str | None:
        if p.c != "none" and (p.c != p.out_major or p.c_align < WIDEST):
            return f"{self.name} takes a c with 16-byte aligned rows, whose contiguous extent is out's"
        return None

    @of_problem
    def strides(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> str | None:
        return f"{self.name} takes no 64-bit strides" if p.wide else None

    @of_problem
    def least_depth(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> str | None:
        return f"{self.name} takes a K of 1 or more" if p.k == 0 else None

    @of_problem
    def few_tokens(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> str | None:
        if p.k and p.m <= MOST_TOKENS and SKINNY_WARPGROUP.refusal(p, gpu, x) is None:
            return f"up to {MOST_TOKENS} tokens of a K-major weight are for body={SKINNY_WARPGROUP.name}"
        return None

    @of_problem
    def least_extents(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> str | None:
        if min(p.m, p.n) < LEAST_EXTENT:
            return f"{self.name} takes {LEAST_EXTENT} rows and columns or more; they are {p.m} and {p.n}"
        return None

    def smem(self, c: GemmConfig, extras: Extras = PLAIN) -> WarpgroupSmem:
        return frame(*c.mma_tile, c.tile_k, c.stages, groups(c), extras.source, extras.biased, self.places)

    def threads(self, c: GemmConfig) -> int:
        """The groups that multiply, and the one that loads."""
        return 128 * (groups(c) + 1)

    @of_config
    def clusters(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if c.cluster_m * c.cluster_n > 2:
            return "a cluster has two CTAs at most: take cluster_m=1 or cluster_n=1"
        return None

    @of_config
    def ping_pong(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if c.pingpong and c.mma_tile[0] > 2 * GROUP_ROWS:
            return f"pingpong=1 gives each group a tile of its own, of 64 or 128 rows; {rows_knob(c)}={c.mma_tile[0]}"
        return None

    @of_config
    def registers(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        shared = sharing(c)  # three groups are never in ping-pong
        accumulators = c.tile_m * c.tile_n // (128 * shared) // (2 if x.half_accumulators else 1)
        most = MOST_OF_THREE if shared == 3 else MOST_ACCUMULATORS
        if accumulators > most:
            what = "pairs of fp16 accumulators" if x.half_accumulators else "accumulators"
            return f"{c.tile_m}x{c.tile_n} are {accumulators} {what} a thread; {groups(c)} groups keep {most} at most"
        return None

    @of_config
    def gate(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if x.gated and (c.swap_ab or c.tile_n < 2 * WarpgroupSmem.BOX or c.tile_n % (2 * COLUMNS)):
            return (
                f"a gate takes swap_ab=0, and tiles of {2 * WarpgroupSmem.BOX} columns or more in steps of "
                f"{2 * COLUMNS}, half of them gates; swap_ab={int(c.swap_ab)}, tile_n={c.tile_n}"
            )
        return None

    @of_both
    def registers_at_the_end(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        plain = (p.c, p.bias, p.activation) == ("none", "none", "none") and not x.gated
        accumulators = accumulators_of(c, p.accumulate == "fp16")
        if not plain and accumulators > MOST_FINISHED:
            kept = f"with c, a bias, an activation or a gate it keeps {MOST_FINISHED} at most"
            return f"{accumulators} accumulators a thread; {kept}"
        return None

    @of_both
    def operand_tiles(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        a, b = p.operands
        for name, tile, side, shared in (("m", c.tile_m, a, c.cluster_n), ("n", c.tile_n, b, c.cluster_m)):
            if not side.k_major and tile % (SWIZZLED * shared):
                return f"tile_{name}={tile} is loaded in {shared} parts, along M or N by {SWIZZLED} elements"
            if tile > 2 * max(GROUP_ROWS, side.extent):
                return f"tile_{name}={tile} idles most of a tile over an extent of {side.extent}"
        return None

    @of_both
    def boxes_of_c(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if p.c != "none" and (width := c.mma_tile[1]) % WarpgroupSmem.BOX:
            return f"{columns_knob(c)}={width}: with c, results leave by whole boxes of {WarpgroupSmem.BOX} columns"
        return None

    @of_both
    def shared_memory(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        smem = self.smem(c, extras_of(p))
        if smem.total_bytes > gpu.smem_per_block_bytes:
            return f"{smem.total_bytes} bytes of shared memory are more than a block's {gpu.smem_per_block_bytes}"
        if c.stages < 6 and smem.total_bytes + 2 * smem.stage_bytes <= gpu.smem_per_block_bytes:
            return f"stages={c.stages} leaves room for {c.stages + 2}"
        return None

    @of_config
    def split(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if c.split_k > 1 and (c.pingpong or not c.pdl or x.half_accumulators or x.gated):
            return f"split_k={c.split_k} takes pingpong=0, pdl=1, accumulators in fp32 and no gate"
        return None

    @of_both
    def last_wave(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if c.split_k == 1:
            return None
        tiles_m, tiles_n = cluster_tiles(p, c)
        clusters, k_tiles = clusters_of(c, gpu), -(-p.k // c.tile_k)
        left = tiles_m * tiles_n * p.batch % clusters
        if not left or left * c.split_k > clusters:
            return f"split_k={c.split_k}: the last wave has {left} tiles for {clusters} clusters"
        if c.raster > 1 and tiles_m * tiles_n * p.batch < clusters:
            return f"raster={c.raster} orders several waves of tiles: take 1"
        if k_tiles < LEAST_SHARE * c.split_k:
            return f"split_k={c.split_k} leaves less than {LEAST_SHARE} k-tiles to each"
        return None

    @of_both
    def several_tiles(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        tiles_m, tiles_n = cluster_tiles(p, c)
        if c.cluster_m * c.cluster_n > 1 and tiles_m * tiles_n * p.batch == 1:
            return "a cluster is for more than two tiles"
        if c.raster > 1 and tiles_m == 1:
            return f"raster={c.raster} does not suit one row of tiles: take 1"
        return None

    # -- choice

    def shortlist(self, p: GemmProblem, gpu: GpuSpec, x: Extras = PLAIN) -> Iterable[GemmConfig]:
        """The two deepest pipelines of every tile."""
        return deepest(self, gpu, extras_of(p) if x in (PLAIN, HALF_ACCUMULATORS) else x, raster=(1, 8), pdl=(True,))

    def preference(self, p: GemmProblem, c: GemmConfig, extras: Extras = PLAIN) -> tuple[object, ...]:
        """More stages, bands of 8 tile rows, rows that stay rows."""
        return -c.stages, c.raster != 8, c.raster, c.swap_ab, c.mma_cluster[1], str(c)

    def estimate_us(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> float:
        """Tiles of the busiest SM, a k-tile bound by MMAs, shared memory, L2 or latency; DRAM beside; fixed costs.

        Fitted to 2950 runs of 280 products on an H200; its choice among them takes 1.01 times the best one's time.
        """
        tiles_m, tiles_n = cluster_tiles(p, c)
        outputs = p.m * p.n * (0.5 if extras.gated else 1 if p.c == "none" else 2)
        moved = ELEMENT_BYTES * p.batch * (p.m * p.k + p.k * p.n + outputs)
        rows, columns = sides(p, c)
        more = "m" if rows.extent > columns.extent else "n" if columns.extent > rows.extent else ""
        return self.walk_us(c, tiles_m * tiles_n * p.batch, p.k, moved, gpu, extras, more)

    def walk_us(
        self, c: GemmConfig, tiles: int, k: int, moved: float, gpu: GpuSpec, extras: Extras = PLAIN, more: str = ""
    ) -> float:
        """The time of so many tiles of clusters, ``k`` deep, that move so many bytes between DRAM and chip. ``more``:
        the side of the tile whose operand has more rows, ``"m"`` or ``"n"``.
        """
        rate, own = rates.of(gpu), self.table
        (tile_rows, tile_columns), (cluster_rows, cluster_columns) = c.mma_tile, c.mma_cluster
        clusters, k_tiles = max(1, clusters_of(c, gpu)), -(-k // c.tile_k)
        waves, left = divmod(tiles, clusters)
        steps = waves * k_tiles + (-(-k_tiles // c.split_k) if left else 0)
        tiles = waves + (left > 0)
        multiply = 2.0 * c.tile_m * c.tile_n * c.tile_k / (own.mma * rate.warpgroup_flops_per_us)
        loaded = (tile_rows / cluster_columns + tile_columns / cluster_rows) * c.tile_k * ELEMENT_BYTES
        arriving = (c.tile_m + c.tile_n) * c.tile_k * ELEMENT_BYTES
        fetch = loaded / ((own.port if tiles <= 1 else own.steady) * rate.sm_bytes_per_us)
        read = tile_rows / GROUP_ROWS * (GROUP_ROWS + tile_columns) * c.tile_k * ELEMENT_BYTES
        passed = (read + arriving) / (own.shared * rate.smem_bytes_per_us)
        awaited = own.latency * rate.exchange_us / (c.stages - 1)
        step = sum(us**own.sharpness for us in (multiply, fetch, passed, awaited)) ** (1 / own.sharpness)
        step = max(step, arriving / (own.arrival * rate.sm_bytes_per_us))
        finished = tile_columns * (own.gate / 2 if extras.gated else 1)
        epilogue = own.epilogue / rate.sm_bytes_per_us * tile_rows * finished
        ends = 1.0 if c.pingpong else float(tiles)
        if own.single and self.smem(c, extras).boxes == 1:
            ends += own.single * ((1 + tiles) / 2 if c.pingpong else tiles)
        busy = steps * step + epilogue * ends
        if c.split_k > 1:  # one part is left, the others of a tile are added
            busy += own.handed * rate.exchange_us + c.split_k * 4.0 * c.tile_m * c.tile_n / rate.sm_bytes_per_us
        dram = moved / (rate.dram_share * gpu.dram_gbps * 1e3)
        fixed = own.fixed * rate.launch_us + (0.0 if c.pdl else rate.dependent_us)
        shared = {"m": cluster_columns, "n": cluster_rows}.get(more, 2)
        apart = own.apart if c.cluster_m * c.cluster_n > 1 and shared == 1 else 1.0
        return (fixed + rates.both_us(busy, dram, own.hidden)) * apart

    def body(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        import cutlass

        from cutekernels.backends import cute as backend
        from cutekernels.kernels.cute.gemm.warpgroup_gemm import WarpgroupGemm
        from cutekernels.kernels.cute.gemm.warpgroup_split import WarpgroupSplit
        from cutekernels.kernels.cute.parts.boxes import ResultBoxes
        from cutekernels.kernels.cute.parts.epilogue import Activation, Epilogue
        from cutekernels.kernels.cute.parts.schedule import Raster

        rows, columns = sides(p, c)
        pitch = GROUP_ROWS * sharing(c)
        gate = "none" if not extras.gated else "m" if c.swap_ab else "n"
        (tile_m, tile_n), (cluster_m, cluster_n) = c.mma_tile, c.mma_cluster
        results = ResultBoxes(
            dtype=backend.dtype_of(p.dtype),
            columns=tile_n // 2 if gate == "n" else tile_n,
            panels=tile_m // pitch // (2 if gate == "m" else 1),
            pitch=pitch,
            boxes=self.smem(c, extras_of(p)).boxes,
            rows_contiguous=(p.out_major == "m") != c.swap_ab,
            source=p.c != "none",
            biased=p.bias != "none",
            out_columns=0 if c.swap_ab else 1,
            epilogue=Epilogue(Activation("silu_approx" if extras.gated else p.activation)),
            gate=gate,
        )
        return (WarpgroupGemm if c.split_k == 1 else partial(WarpgroupSplit, split_k=c.split_k))(
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=c.tile_k,
            stages=c.stages,
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

    def shares_tiles(self, c: GemmConfig) -> bool:
        return c.split_k > 1

    def workspace(self, p: GemmProblem, c: GemmConfig, extras: Extras = PLAIN) -> Callable[[], tuple[Any, ...]]:
        from cutekernels.gpu import detect

        return _workspace(detect().sm_count).get if c.split_k > 1 else tuple


WARPGROUP = Warpgroup()


@cache
def deepest(schedule: Warpgroup, gpu: GpuSpec, x: Extras, **among: tuple[Any, ...]) -> tuple[GemmConfig, ...]:
    """The two deepest pipelines of each tile that fits."""
    by_tile: dict[tuple[Any, ...], list[GemmConfig]] = {}
    for c in schedule.fitting(gpu, x, **among):
        if schedule.smem(c, x).total_bytes <= gpu.smem_per_block_bytes:
            tile = tuple(value for name, value in vars(c).items() if name != "stages")
            by_tile.setdefault(tile, []).append(c)
    return tuple(c for own in by_tile.values() for c in sorted(own, key=lambda c: -c.stages)[:2])


@cache
def _workspace(ctas: int) -> Workspace:
    """One for all launches of a stream, which follow one another, and tiles of any size."""
    from cutekernels.ops.shared.per_stream import Workspace

    return Workspace(ctas * 2 * 128 * MOST_ACCUMULATORS, ctas * 3)


# ---- arithmetic of the rules ----------------------------------------------------------------------------


@cache
def frame(
    tile_m: int, tile_n: int, tile_k: int, stages: int, groups: int, source: bool, biased: bool, places: int
) -> WarpgroupSmem:
    """The shared memory of a CTA. A group has the most boxes that fit in it."""
    most = ARCHITECTURES[9, 0].smem_per_block_bytes
    among = (SOURCE_BOXES,) if source else BOXES
    frames = [WarpgroupSmem(tile_m, tile_n, tile_k, stages, groups, boxes, biased, places) for boxes in among]
    return next((own for own in frames if own.total_bytes <= most), frames[-1])


def sharing(c: GemmConfig) -> int:
    """Groups that share a tile."""
    return WarpgroupSmem.sharing(c.tile_n if c.swap_ab else c.tile_m, c.pingpong)


def groups(c: GemmConfig) -> int:
    """Groups that multiply."""
    return 2 if c.pingpong else sharing(c)


def accumulators_of(c: GemmConfig, half: bool = False) -> int:
    """Registers of a thread's accumulators, which hold two each where those are fp16."""
    return c.tile_m * c.tile_n // (128 * sharing(c)) // (2 if half else 1)


def sides(p: GemmProblem, c: GemmConfig) -> tuple[Side, Side]:
    """The operand of the MMA's rows and that of its columns."""
    a, b = p.operands
    return (b, a) if c.swap_ab else (a, b)


def rows_knob(c: GemmConfig) -> str:
    """The knob of the tile along the MMA's rows."""
    return "tile_n" if c.swap_ab else "tile_m"


def columns_knob(c: GemmConfig) -> str:
    """The knob of the tile along the MMA's columns."""
    return "tile_m" if c.swap_ab else "tile_n"


def clusters_of(c: GemmConfig, gpu: GpuSpec) -> int:
    """Clusters that are resident at once."""
    return gpu.sm_count // (c.cluster_m * c.cluster_n)


def cluster_tiles(p: GemmProblem, c: GemmConfig) -> tuple[int, int]:
    """Tiles of whole clusters along the MMA's rows and columns."""
    rows, columns = sides(p, c)
    (tile_m, tile_n), (cluster_m, cluster_n) = c.mma_tile, c.mma_cluster
    return -(-rows.extent // (tile_m * cluster_m)), -(-columns.extent // (tile_n * cluster_n))
