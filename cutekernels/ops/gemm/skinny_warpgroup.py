"""The skinny_warpgroup schedule, for few tokens: TMA and warpgroup MMA, for GPUs that have them. Rules, model, body.

Tokens, ``tile_m``, take the MMA's 64 rows, weight rows, ``tile_n``, its columns. ``split_k`` CTAs of a cluster share a
tile's K.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from cutekernels import rates
from cutekernels.kernels.cute.parts.smem import SkinnyWarpgroupSmem
from cutekernels.op import ladder
from cutekernels.ops.gemm import coefficients, prefetch
from cutekernels.ops.gemm.prefetch import Prefetches
from cutekernels.ops.gemm.problem import BODIES, ELEMENT_BYTES, GemmConfig, GemmProblem
from cutekernels.ops.gemm.schedule import GRID_AXIS, PLAIN, Extras, TokensSchedule
from cutekernels.ops.shared.occupancy import no_warpgroups
from cutekernels.rules import of_both, of_config, of_problem

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

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
# Share of the SMs that clusters find at once, by their CTAs: 30 of four, 15 of eight on 132 (H200, 2026-11-24).
_ROOM = {4: 0.91, 8: 0.91}
_OTHER_REGISTERS = 40
_WEIGHING_REGISTERS = 56  # for k-tiles of 128: fragments as loaded and as multiplied, the norm's weight

# Bytes of W in flight, enough for two CTAs to a tile: docs/notes/gemm.md#skinny_warpgroup-ties (H200, 2026-11-22).
_FEW_TOKENS, _FEW_TOKENS_WEIGHTS, _WEIGHTS = 16, 80_000, 70_000


@dataclass(frozen=True)
class SkinnyWarpgroup(TokensSchedule, Prefetches):
    """One warp loads by TMA, warp groups multiply; takes a norm in front of the product."""

    name = "skinny_warpgroup"

    # -- rules

    warpgroup_mma = of_problem(no_warpgroups)

    @of_problem
    def least_depth(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> str | None:
        return f"{self.name} takes a K of 8 or more" if p.k == 0 else None

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

    def smem(self, c: GemmConfig, extras: Extras = PLAIN) -> SkinnyWarpgroupSmem:
        return SkinnyWarpgroupSmem(
            c.tile_m, c.tile_n, c.tile_k, c.stages, c.split_k, extras.gamma_bytes, extras.squares, exclusive(c)
        )

    def threads(self, c: GemmConfig) -> int:
        """Groups that multiply, and the warp that loads."""
        return 128 * groups(c) + 32

    @of_config
    def shared_memory(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        frame = self.smem(c, x)
        if frame.total_bytes > gpu.smem_per_block_bytes:
            return f"{frame.total_bytes} bytes of shared memory are more than a block's {gpu.smem_per_block_bytes}"
        taken = c.ctas_per_sm * (frame.total_bytes + gpu.SMEM_RESERVED_BYTES)
        if taken > gpu.smem_per_sm_bytes:
            return f"{c.ctas_per_sm} CTAs take {taken} bytes of an SM's {gpu.smem_per_sm_bytes} of shared memory"
        in_flight = c.ctas_per_sm * c.stages * frame.stage_bytes
        if in_flight < LEAST_IN_FLIGHT:
            return f"{in_flight} bytes of stages keep too few in flight: take {LEAST_IN_FLIGHT} or more"
        return None

    @of_config
    def lone_ctas(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if c.split_k > 2 and c.ctas_per_sm > 1:
            return f"split_k={c.split_k} is for tiles that leave SMs idle: take ctas_per_sm=1"
        return None

    @of_config
    def registers(self, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        # Registers are allocated for whole groups of warps: ptxas gives 96 a thread to 544 threads, not 120.
        reserved_threads = -(-self.threads(c) // 128) * 128
        available = min(gpu.MAX_REGISTERS_PER_THREAD, gpu.REGISTERS_PER_SM // (reserved_threads * c.ctas_per_sm))
        needed = registers_per_thread(c) + (_WEIGHING_REGISTERS * c.tile_k // 128 if x.weighs else 0)
        if needed > available:
            return f"a thread needs about {needed} registers; it has {available}"
        return None

    @of_both
    def tile_of_tokens(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        fitting = self.fitting_tiles(p)
        if c.tile_m not in fitting:
            return f"tile_m={c.tile_m} does not suit {p.m} tokens: take {' or '.join(map(str, fitting))}"
        return None

    @of_both
    def busy_gpu(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if c.tile_n not in TILES:
            return None
        return waves(p, c, gpu)[c.tile_n].idle

    @of_both
    def grid_axes(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if -(-p.n // c.tile_n) > GRID_AXIS or -(-p.m // GROUP_TOKENS) > GRID_AXIS:
            return f"{p.m} x {p.n} are more tiles than an axis of a grid has, {GRID_AXIS}"
        return None

    @of_both
    def splits(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> str | None:
        if c.split_k > 1 and waves(p, c, gpu)[c.tile_n].number > 1:
            return f"split_k={c.split_k}: the tiles fill the GPU with fewer CTAs to each"
        if c.split_k > 1 and c.split_k * 2 > -(-p.k // c.tile_k):
            return f"split_k={c.split_k} leaves less than two k-tiles of {c.tile_k} to each"
        return None

    # -- choice

    def shortlist(self, p: GemmProblem, gpu: GpuSpec, x: Extras = PLAIN) -> Iterable[GemmConfig]:
        among = {"stages": (4, 5, 6, 8, 12), "prefetch_l2": (0, 1, 2, 4)}
        tiles = self.fitting_tiles(p)
        return chain.from_iterable(self.fitting(gpu, PLAIN, tile_m=(tile,), **among) for tile in tiles)

    def preference(self, p: GemmProblem, c: GemmConfig, extras: Extras = PLAIN) -> tuple[object, ...]:
        """One CTA to an SM, many to a tile, most bytes in flight, long k-tiles; for several CTAs to a tile just enough
        bytes of W: docs/notes/gemm.md#skinny_warpgroup-ties (H200, 2026-11-22).
        """
        frame = self.smem(c)
        in_flight = c.stages * frame.stage_bytes
        if c.split_k == 1:
            return c.ctas_per_sm, -1, -in_flight, -c.tile_k, str(c)
        weights = c.stages * c.tile_n * c.tile_k * frame.element_bytes
        enough = _FEW_TOKENS_WEIGHTS if c.tile_m <= _FEW_TOKENS and not extras.weighs else _WEIGHTS
        return c.ctas_per_sm, -c.split_k, -min(weights, enough), -c.tile_k, in_flight, str(c)

    def estimate_us(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> float:
        """The slowest of an SM's port, its MMAs, weighing, a stage's latency and DRAM, plus fixed costs."""
        if p.m == 0 or p.n == 0:
            return 0.0
        rate, own = rates.of(gpu), coefficients.SKINNY_WARPGROUP
        frame, rows = self.smem(c), GROUP_TOKENS * groups(c)
        count = ctas(p, c)
        k_tiles = -(-p.k // c.tile_k) / c.split_k
        weighed = weighing_us(p, c, gpu) / k_tiles if extras.weighs else 0.0
        finished = rows * c.tile_n * min(1.0, 2 / c.split_k)  # outputs of a CTA; the numbers were fitted to one and two

        def wave_us(together: int) -> float:
            step = max(
                together * frame.stage_bytes / rate.sm_bytes_per_us,
                together * 2 * rows * (c.tile_n + own.started) * c.tile_k / rate.warpgroup_flops_per_us,
                own.latency * rate.l2_latency_us / (c.stages - 1),
                together * weighed,
            )
            sums = together * finished * own.epilogue / rate.sm_bytes_per_us
            return k_tiles * step * (1.0 + own.shallow / c.stages) + sums

        room = resident(c, gpu)
        full, rest = divmod(count, room)
        busy = full * wave_us(c.ctas_per_sm) + (wave_us(-(-rest // gpu.sm_count)) if rest else 0.0)
        each = -(-count // gpu.sm_count)  # CTAs of an SM, or of most
        loading = min(1.0, count / (each * gpu.sm_count)) if count <= room else 1.0
        dram = ELEMENT_BYTES * p.n * (p.k + p.m) / (own.dram * rate.dram_share * gpu.dram_gbps * 1e3 * loading)
        fixed = own.launch * rate.launch_us + (0.0 if c.pdl else rate.dependent_us)
        # Few tokens leave an SM's time far below DRAM's.
        both = rates.both_us(busy, dram, rate.overlap if p.m > GROUP_TOKENS else rates.ALONE)
        us = fixed + both - (prefetch.saved_us(c, gpu, own.ahead) if count <= room else 0.0)
        if c.split_k > 2:  # the wait for the whole cluster, messages, and what is sent beyond half a tile
            met = rate.exchange_us * (own.met + own.message * (c.split_k - 2))
            sent = 2 * 4 * rows * c.tile_n * (1 / 2 - 1 / c.split_k) / rate.sm_bytes_per_us
            us += met + sent
        return float(us)

    def body(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        from cutekernels.kernels.cute.gemm.skinny_warpgroup_gemm import SkinnyWarpgroupGemm
        from cutekernels.kernels.cute.parts.epilogue import Activation, Epilogue
        from cutekernels.kernels.cute.parts.norm import RowNorm

        norm = None
        if extras.norm:
            norm = RowNorm(tile_k=c.tile_k, stages=c.stages, weighted=extras.gamma_bytes > 0, statistics=extras.squares)
        return SkinnyWarpgroupGemm(
            rows=c.tile_m,
            tile_n=c.tile_n,
            tile_k=c.tile_k,
            stages=c.stages,
            split=c.split_k,
            dependent=c.pdl,
            epilogue=Epilogue(Activation(p.activation)),
            out_align=p.out_align,
            ctas_per_sm=c.ctas_per_sm,
            exclusive=exclusive(c),
            prefetch_tiles=c.prefetch_l2,
            norm=norm,
            gamma_bytes=extras.gamma_bytes,
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


def exclusive(c: GemmConfig) -> bool:
    """Whether shared memory keeps a second CTA from an SM, though it would fit. Two CTAs to a tile are about as many
    as there are SMs; where two of them shared one, others had none: docs/notes/gemm.md#alone (H200, 2026-11-22).
    """
    return c.split_k > 1 and c.ctas_per_sm == 1


def resident(c: GemmConfig, gpu: GpuSpec) -> int:
    """CTAs that run at once: whole clusters, of which larger ones leave some SMs of a part of the chip over."""
    return int(gpu.sm_count * _ROOM.get(c.split_k, 1.0)) // c.split_k * c.split_k * c.ctas_per_sm


class Waves(NamedTuple):
    """What tiles of so many columns do to a GPU: waves of CTAs, and why others keep more of it at work."""

    number: int
    idle: str | None


def waves(p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> dict[int, Waves]:
    """Waves by a tile's columns."""
    return _waves(p.n, -(-p.m // (GROUP_TOKENS * groups(c))) * c.split_k, resident(c, gpu))


@lru_cache(maxsize=1024)
def _waves(columns: int, ctas: int, room: int) -> dict[int, Waves]:
    """For ``ctas`` to a tile's columns; an idle column of a tile counts as an idle share of its CTA."""
    counts = {tile: -(-(-(-columns // tile) * ctas) // room) for tile in TILES}
    busy = {tile: columns * ctas / max(1, n * room * tile) for tile, n in counts.items()}
    best, found = max(TILES, key=lambda tile: busy[tile]), {}
    for tile, count in counts.items():
        least = next(other for other in TILES if counts[other] == count)
        idle = None
        if least < tile:
            idle = f"tile_n={tile} makes as many waves of CTAs as tile_n={least}"
        elif busy[tile] < LEAST_BUSY * busy[best]:
            idle = f"tile_n={tile} has {busy[tile]:.0%} of the GPU at work where tile_n={best} has {busy[best]:.0%}"
        found[tile] = Waves(count, idle)
    return found


def registers_per_thread(c: GemmConfig) -> int:
    """An estimate; the compiler takes more where there are, to load a bias ahead of its use."""
    return c.tile_n // 2 + _OTHER_REGISTERS


def weighing_us(p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> float:
    """Time that a CTA's warps need to multiply its tokens by the norm's weight."""
    each = coefficients.SKINNY_WARPGROUP.weighed / rates.of(gpu).clock_mhz
    return -(-p.k // c.tile_k) / c.split_k * c.tile_k * groups(c) * each
