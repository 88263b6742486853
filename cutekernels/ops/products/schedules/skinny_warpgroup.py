"""The skinny_warpgroup schedule, for few tokens: TMA and warpgroup MMA, for GPUs that have them. Rules, model, body.

Tokens, ``tile_m``, take the MMA's 64 rows, weight rows, ``tile_n``, its columns. ``split_k`` CTAs of a cluster share a
tile's K.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from cutekernels import rates
from cutekernels.columns import cached, larger, over, smaller, where
from cutekernels.gpu import GpuSpec
from cutekernels.kernels.cute.parts.smem import SkinnyWarpgroupSmem
from cutekernels.op import ladder
from cutekernels.ops.products.schedules import coefficients
from cutekernels.ops.products.schedules.problem import BODIES, ELEMENT_BYTES, GemmConfig, GemmProblem
from cutekernels.ops.products.schedules.schedule import GRID_AXIS, PLAIN, Extras, Prefetches, Tokens, saved_us
from cutekernels.rules import Among, Broken, no_warpgroups, of_both, of_config, of_problem

TILES, TOKEN_TILES = BODIES["skinny_warpgroup"]["tile_n"], BODIES["skinny_warpgroup"]["tile_m"]
GROUP_TOKENS = SkinnyWarpgroupSmem.GROUP_ROWS  # multiplied by a warp group
USUAL_TOKENS = 128  # of a tile, where there are more
# The default from this many tokens on, where two CTAs to a tile of 32 columns keep less than _ENOUGH_AT_WORK of the
# SMs at work; elsewhere from the first: docs/notes/gemm.md#skinny_warpgroup-or-skinny (H200, 2026-11-22).
LEAST_TOKENS = 8
_ENOUGH_AT_WORK = 0.45
LEAST_IN_FLIGHT = 32 * 1024  # bytes of stages
# Least share of the GPU at work, relative to the best tile's. A tuned neighbour's tile suits its own columns, and is
# refused where it would idle an SM in three.
LEAST_BUSY = 0.8
_ROOM = 0.91  # share of the SMs that clusters find at once: 30 of four, 15 of eight on 132 (H200, 2026-11-24)
_OTHER_REGISTERS = 40
_WEIGHING_REGISTERS = 56  # for k-tiles of 128: fragments as loaded and as multiplied, the norm's weight

# Bytes of W in flight, enough for two CTAs to a tile: docs/notes/gemm.md#skinny_warpgroup-ties (H200, 2026-11-22).
_FEW_TOKENS, _FEW_TOKENS_WEIGHTS, _WEIGHTS = 16, 80_000, 70_000


class SkinnyWarpgroup(Tokens, Prefetches):
    """One warp loads by TMA, warp groups multiply; takes a norm in front of the product."""

    name = "skinny_warpgroup"

    # -- rules

    warpgroup_mma = of_problem(no_warpgroups)

    @of_problem
    def least_depth(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Broken:
        yield p.k == 0, "{} takes a K of 8 or more", self.name

    def fitting_tiles(self, p: GemmProblem) -> Sequence[int]:
        """The least tile that covers the bucket of ``p``, whole groups; beyond, USUAL_TOKENS or twice as many, or one
        group where that wastes less.
        """
        tokens = min(ladder(p.m), TOKEN_TILES[-1])
        least = min(t for t in TOKEN_TILES if t >= tokens)
        fitting = {least} if p.m <= TOKEN_TILES[-1] else {TOKEN_TILES[-1]}
        if p.m > GROUP_TOKENS:
            fitting.add(USUAL_TOKENS)
        if p.m > TOKEN_TILES[-1] and 0 < p.m % USUAL_TOKENS <= GROUP_TOKENS:
            fitting.add(GROUP_TOKENS)
        return sorted(fitting)

    @cached
    def smem(self, c: GemmConfig, extras: Extras = PLAIN) -> SkinnyWarpgroupSmem:
        # Shared memory keeps a second CTA from an SM, though it would fit. Two CTAs to a tile are about as many as
        # there are SMs; where two of them shared one, others had none: docs/notes/gemm.md#alone (H200, 2026-11-22).
        exclusive = (c.split_k > 1) & (c.ctas_per_sm == 1)
        return SkinnyWarpgroupSmem(
            c.tile_m, c.tile_n, c.tile_k, c.stages, c.split_k, extras.gamma_bytes, extras.squares, exclusive
        )

    def threads(self, c: GemmConfig) -> int:
        """Groups that multiply, and the warp that loads."""
        return 128 * groups(c) + 32

    @of_config
    def shared_memory(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        frame, most = self.smem(c, x), gpu.smem_per_block_bytes
        need = frame.total_bytes
        yield need > most, "{} bytes of shared memory are more than a block's {}", need, most
        taken, room = c.ctas_per_sm * (need + gpu.SMEM_RESERVED_BYTES), gpu.smem_per_sm_bytes
        yield taken > room, "{} CTAs take {} bytes of an SM's {} of shared memory", c.ctas_per_sm, taken, room
        in_flight = c.ctas_per_sm * c.stages * frame.stage_bytes
        few = in_flight < LEAST_IN_FLIGHT
        yield few, "{} bytes of stages keep too few in flight: take {} or more", in_flight, LEAST_IN_FLIGHT

    @of_config
    def lone_ctas(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        several = (c.split_k > 2) & (c.ctas_per_sm > 1)
        yield several, "split_k={} is for tiles that leave SMs idle: take ctas_per_sm=1", c.split_k

    @of_config
    def registers(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        # Registers are allocated for whole groups of warps: ptxas gives 96 a thread to 544 threads, not 120.
        reserved_threads = -(-self.threads(c) // 128) * 128
        available = smaller(gpu.MAX_REGISTERS_PER_THREAD, gpu.REGISTERS_PER_SM // (reserved_threads * c.ctas_per_sm))
        needed = registers_per_thread(c) + (_WEIGHING_REGISTERS * c.tile_k // 128 if x.weighs else 0)
        yield needed > available, "a thread needs about {} registers; it has {}", needed, available

    @of_both
    def busy_gpu(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        knobs = ("tile_m", "tile_n", "split_k", "ctas_per_sm")
        least, busy, best, most = over(c, knobs, lambda c: occupancy_of(p, c, gpu))
        yield least < c.tile_n, "tile_n={} makes as many waves of CTAs as tile_n={}", c.tile_n, least
        why = "tile_n={} has {:.0%} of the GPU at work where tile_n={} has {:.0%}"
        yield busy < LEAST_BUSY * most, why, c.tile_n, busy, best, most

    @of_both
    def grid_axes(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        many = larger(-(-p.n // c.tile_n), -(-p.m // GROUP_TOKENS)) > GRID_AXIS
        yield many, "{} x {} are more tiles than an axis of a grid has, {}", p.m, p.n, GRID_AXIS

    @of_both
    def splits(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        shared = c.split_k > 1
        full = shared & (ctas(p, c) > resident(c, gpu))
        yield full, "split_k={}: the tiles fill the GPU with fewer CTAs to each", c.split_k
        little = shared & (c.split_k * 2 > -(-p.k // c.tile_k))
        yield little, "split_k={} leaves less than two k-tiles of {} to each", c.split_k, c.tile_k

    # -- choice

    def usual(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Among:
        tiles = tuple(self.fitting_tiles(p))
        return {"tile_m": tiles, "stages": (4, 5, 6, 8, 12), "prefetch_l2": (0, 1, 2, 4), "pdl": (True,)}

    def preference(self, p: GemmProblem, c: Any, extras: Extras = PLAIN) -> tuple[Any, ...]:
        """One CTA to an SM, many to a tile, most bytes in flight, long k-tiles; for several CTAs to a tile just enough
        bytes of W: docs/notes/gemm.md#skinny_warpgroup-ties (H200, 2026-11-22).
        """
        frame, alone = self.smem(c), c.split_k == 1
        in_flight = c.stages * frame.stage_bytes
        weights = c.stages * c.tile_n * c.tile_k * ELEMENT_BYTES
        few = (c.tile_m <= _FEW_TOKENS) & (not extras.weighs)
        enough = smaller(weights, where(few, _FEW_TOKENS_WEIGHTS, _WEIGHTS))
        return c.ctas_per_sm, -c.split_k, -where(alone, in_flight, enough), -c.tile_k, where(alone, 0, in_flight)

    def times_us(self, p: GemmProblem, c: Any, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        """The slowest of an SM's port, its MMAs, weighing, a stage's latency and DRAM, plus fixed costs."""
        if p.m == 0 or p.n == 0:
            return 0.0
        rate, own = rates.of(gpu), coefficients.SKINNY_WARPGROUP
        frame, rows = self.smem(c), GROUP_TOKENS * groups(c)
        count = ctas(p, c)
        k_tiles = -(-p.k // c.tile_k) / c.split_k
        weighed = weighing_us(p, c, gpu) / k_tiles if extras.weighs else 0.0
        finished = rows * c.tile_n * smaller(1.0, 2 / c.split_k)  # outputs of a CTA; fitted to one and two of them

        def wave_us(together: Any) -> Any:
            loaded = frame.stage_bytes / rate.sm_bytes_per_us
            multiplied = 2 * rows * (c.tile_n + own.started) * c.tile_k / rate.warpgroup_flops_per_us
            step = together * larger(larger(loaded, multiplied), weighed)
            step = larger(step, own.latency * rate.l2_latency_us / (c.stages - 1))
            sums = together * finished * own.epilogue / rate.sm_bytes_per_us
            return k_tiles * step * (1.0 + own.shallow / c.stages) + sums

        room = resident(c, gpu)
        full, rest = divmod(count, room)
        last = wave_us(-(-rest // gpu.sm_count))
        busy = full * wave_us(c.ctas_per_sm) + where(rest > 0, last, 0.0)
        each = -(-count // gpu.sm_count)  # CTAs of an SM, or of most
        at_once = count <= room
        loading = where(at_once, smaller(1.0, count / (each * gpu.sm_count)), 1.0)
        dram = ELEMENT_BYTES * p.n * (p.k + p.m) / (own.dram * rate.dram_share * gpu.dram_gbps * 1e3 * loading)
        fixed = own.launch * rate.launch_us + where(c.pdl, 0.0, rate.dependent_us)
        # Few tokens leave an SM's time far below DRAM's.
        both = rates.both_us(busy, dram, rate.overlap if p.m > GROUP_TOKENS else rates.ALONE)
        us = fixed + both - where(at_once, saved_us(c, gpu, own.ahead), 0.0)
        # The wait for the whole cluster, messages, and what is sent beyond half a tile.
        met = rate.exchange_us * (own.met + own.message * (c.split_k - 2))
        sent = 2 * 4 * rows * c.tile_n * (1 / 2 - 1 / c.split_k) / rate.sm_bytes_per_us
        return us + where(c.split_k > 2, met + sent, 0.0)

    def body(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        from cutekernels.kernels.cute.parts.epilogue import Activation, Epilogue
        from cutekernels.kernels.cute.parts.norm import RowNorm
        from cutekernels.kernels.cute.products.skinny_warpgroup import SkinnyWarpgroupGemm

        norm = None
        if extras.norm:
            norm = RowNorm(tile_k=c.tile_k, stages=c.stages, weighted=extras.gamma_bytes > 0, statistics=extras.squares)
        return SkinnyWarpgroupGemm(
            smem=self.smem(c, extras),
            dependent=c.pdl,
            epilogue=Epilogue(Activation(p.activation)),
            out_align=p.out_align,
            ctas_per_sm=c.ctas_per_sm,
            prefetch_tiles=c.prefetch_l2,
            norm=norm,
        )


SKINNY_WARPGROUP = SkinnyWarpgroup()


def least_tokens(p: GemmProblem, gpu: GpuSpec) -> int:
    """Tokens from which on this schedule is the default, where it takes ``p``."""
    return LEAST_TOKENS if 2 * -(-p.n // TILES[0]) < _ENOUGH_AT_WORK * gpu.sm_count else 1


# ---- arithmetic of the rules ----------------------------------------------------------------------------


def groups(c: GemmConfig) -> int:
    """Warp groups of a CTA."""
    return -(-c.tile_m // GROUP_TOKENS)


def ctas(p: GemmProblem, c: GemmConfig) -> int:
    """CTAs that have a tile, or a share of one."""
    return -(-p.n // c.tile_n) * -(-p.m // (GROUP_TOKENS * groups(c))) * c.split_k


def resident(c: GemmConfig, gpu: GpuSpec) -> Any:
    """CTAs that run at once: whole clusters, of which larger ones leave some SMs of a part of the chip over."""
    found = gpu.sm_count * where(c.split_k > 2, _ROOM, 1.0) // 1
    return found // c.split_k * c.split_k * c.ctas_per_sm


def occupancy_of(p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> tuple[float, float, float, float]:
    """Occupancy of the GPU by tiles as wide as those of ``c``: the narrowest tile of as many waves, the share of the
    GPU at work, and the tile that keeps most of it at work, with its share.
    """
    shared = -(-p.m // (GROUP_TOKENS * groups(c))) * c.split_k  # CTAs to those columns
    return _fill(p.n, shared, resident(c, gpu)).get(c.tile_n, (c.tile_n, 1.0, c.tile_n, 1.0))


@lru_cache(maxsize=1024)
def _fill(columns: int, ctas: int, room: float) -> dict[int, tuple[float, float, float, float]]:
    """Occupancy by each tile, for ``ctas`` to a tile's columns; its idle columns count as an idle share of its CTA."""
    counts = {tile: -(-(-(-columns // tile) * ctas) // room) for tile in TILES}
    busy = {tile: columns * ctas / max(1, n * room * tile) for tile, n in counts.items()}
    best, least = max(TILES, key=lambda tile: busy[tile]), dict[float, int]()
    for tile, n in counts.items():
        least.setdefault(n, tile)
    return {tile: (least[n], busy[tile], best, busy[best]) for tile, n in counts.items()}


def registers_per_thread(c: GemmConfig) -> int:
    """An estimate; the compiler takes more where there are, to load a bias ahead of its use."""
    return c.tile_n // 2 + _OTHER_REGISTERS


def weighing_us(p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> float:
    """Time that a CTA's warps need to multiply its tokens by the norm's weight."""
    each = coefficients.SKINNY_WARPGROUP.weighed / rates.of(gpu).clock_mhz
    return -(-p.k // c.tile_k) / c.split_k * c.tile_k * groups(c) * each
