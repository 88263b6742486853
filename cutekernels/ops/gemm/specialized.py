"""The specialized schedule as ``gemm`` sees it: TMA and warpgroup MMA, for GPUs that have them.

Operands are swapped as in ``gemm_skinny.py``: ``tile_m`` are columns of out (rows of a weight), ``tile_n`` its rows
(tokens). ``split_k`` CTAs of a cluster share a tile's K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cutekernels import gpu as gpus
from cutekernels.kernels.cute.parts.smem import SpecializedSmem
from cutekernels.op import ladder
from cutekernels.ops.gemm import mailboxes, prefetch
from cutekernels.ops.gemm.skinny import PLAIN, Extras

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec
    from cutekernels.ops.gemm.op import GemmConfig, GemmProblem

TILES = tuple(range(32, 257, 8))  # of columns
TOKEN_TILES = (8, 16, 32, 48, 64, 96, 128, 192, 256)
SQUARING_CTAS = SpecializedSmem.SQUARING_CTAS
GROUP_TOKENS = SpecializedSmem.GROUP_ROWS  # that a warp group multiplies
USUAL_TOKENS = 128  # of a tile, where there are more
# From how many tokens on it is the default, where two CTAs to a tile of 32 columns keep fewer than this share of the
# SMs at work; where they keep as many it always is. Skinny and it, us, H200, 2026-11-22: 512 x 3584, one token 3.67 and
# 3.75, eight 3.65 and 3.79; 1024 x 4096, four 4.21 and 3.85, eight 5.05 and 3.91; 2048 x 4096, one 6.03 and 5.35, eight
# 6.48 and 5.60; 2560 x 2560 5.77 and 4.57, 5.78 and 4.74; 3584 x 3584 7.52 and 7.34, 7.70 and 7.46; 4096 x 4096 9.26
# and 9.11, 9.39 and 9.08. Behind `rms_norm` skinny is the faster one at 3584 x 3584, one token 8.02 and 8.22, eight
# 8.45 and 8.53; the norm within the product is faster than both, 7.90 and 7.91.
LEAST_TOKENS = 8
_ENOUGH_AT_WORK = 0.45
LEAST_IN_FLIGHT = 32 * 1024  # bytes of stages
# Of the best tile's share of the GPU at work. Less was never among the best, and a tuned neighbour's tile, which suits
# its own number of columns, is not taken over where it would leave an SM in three idle.
LEAST_BUSY = 0.8
_OTHER_REGISTERS = 40
_WEIGHING_REGISTERS = 56  # of k-tiles of 128: fragments as they come and as they are multiplied, the norm's weight
_GRID_AXIS = 65535

# Rows are squared by CTAs apart from how many tokens of a tile on. By warps beside and by them, us, H200, 2026-11-23,
# chains of dependent launches: 3584 x 3584, 64 tokens 8.56 and 8.05, 48 8.09 and 7.95, 32 7.90 and 7.83, 16 7.83 and
# 7.73, 8 7.70 and 7.68; 4096 x 4096 10.25 and 9.83, 9.78 and 9.72, 9.72 and 9.67, 9.73 and 9.68, 9.59 and 9.55; 4608 x
# 3584, 48 tokens 9.85 and 9.76, 32 9.78 and 9.68.
LEAST_APART = 16
# Their sums are there 4.0 us after the turn at 64 x 3584, 5.2 at 64 x 4096, since all read those rows. Asked at 2.3, 3,
# 3.5, 4, 4.5, 5 us, 64 x 3584 took 9.36, 8.54, 8.50, 8.25, 8.16, 8.18, and at 4.8 and 5.5 64 x 4096 10.61 and 10.16;
# with loads in step, at 4.4 to 5.7 us 64 x 3584 took 8.03. Fewer tokens ask no earlier: at 2.6 us 32 took as long as
# at 5.3, 16 at 1.3 us 8.00. An answer takes up to 2 us; who asks too early asks twice.
_ANSWERED_US, _APART_US = 2.5, 0.3  # the latter of a whole group's tokens

# Of the datasheet's DRAM rate, at which CTAs ask for W where rows are normed on their way. H200, us, 2026-11-23, by
# 382 (the datasheet's), 390, 400, 410 ns a k-tile: 64 tokens x 3584 8.04, 8.03, 8.04, 8.03, at will 8.14 to 8.21; by
# 382, 400 and at will 48 tokens 8.02, 8.00, 8.05, 32 7.80, 7.80, 7.84, 8 7.61, 7.61, 7.63. By 437 and at will 64 x 4096
# 9.77 and 9.96; 64 x 4608, 64 x 6144 the same. With everything in the L2 64 x 3584 takes 6.76 at will, 6.85 by 382 and
# 7.03 by 400. Without a norm there is less to gain (7.76 and 7.77; 16 tokens 7.36 and 7.36, by 400 7.41; 64 x 4096 9.48
# and 9.56; 64 x 18944 32.25 and 32.42), and 6.0 in the L2 would become 6.7.
_PACE = 0.98

# The model's constants, fitted to 343 runs of 12 problems on an H200 (2026-11-22): 10 % off, root mean square (runs
# beyond 1.25 times their problem's best count a quarter). The default was within 4 % of the best run of eleven of
# them, and not among the runs of the twelfth (4096 tokens). Among all configs, shallow ones too, the model's choice
# was up to 29 % off. Of other problems nothing is known.
_LAUNCH_US, _UNDEPENDENT_US = 2.46, 0.59
_SM_BYTES_PER_US = 99e3
_SM_FLOPS_PER_US = 6.22e6
_LATENCY_US = 0.674
_SHALLOW = 0.257  # what few stages cost
_COLUMNS_LOST = 20  # that an MMA could multiply in the time it takes to begin
_DRAM_RATE = 0.80  # of the datasheet's
_SUMS_PER_US = 6.4e3
# Not of that fit, since sums are sent and tiles come in steps of 8: 3584 x 3584 by two CTAs of 56 columns and one of
# 32, one token 7.34 and 7.73, 16 tokens 7.58 and 7.90, 64 tokens 8.01 and 8.37; 4096 x 4096 of 64 and 32, one token
# 9.11 and 9.30, 16 9.39 and 9.39, 64 9.83 and 10.1; 6144 x 4096 of 96 and 48, 13.1 and 13.1, 13.6 and 13.3, 14.05 and
# 13.9.
_SPLIT_US = 0.0
# Nor this: 64 tokens of one k, weighed on their way to the MMA (2048 x 4096, one token: 6.5 us, 5.4 without; a k-tile
# of 128 takes about 0.28).
_WEIGHED_US = 2.2e-3
# Bytes of W in flight that are enough, of two CTAs to a tile.
_FEW_TOKENS, _FEW_TOKENS_WEIGHTS, _WEIGHTS = 16, 80_000, 70_000
# Nor this: 96 SMs take longer than all 132 (4608 columns, 16 tokens: 10.8 us and 9.9), and 112 longer than 128, or some
# with fewer CTAs than others.
_ENOUGH_SMS, _FEW_SMS = 0.96, 0.3


def groups(c: GemmConfig) -> int:
    return -(-c.tile_n // GROUP_TOKENS)


def threads(c: GemmConfig) -> int:
    """Groups that multiply, and the warp that loads."""
    return 128 * groups(c) + 32


def _reserved_threads(c: GemmConfig) -> int:
    """Registers are set aside for whole groups of warps: ptxas gives 96 a thread to 544 threads, not 120."""
    return -(-threads(c) // 128) * 128


def ctas(p: GemmProblem, c: GemmConfig) -> int:
    """That have a tile, or a share of one."""
    return -(-p.n // c.tile_m) * -(-p.m // (GROUP_TOKENS * groups(c))) * c.split_k


def smem(c: GemmConfig, extras: Extras = PLAIN) -> SpecializedSmem:
    return SpecializedSmem(
        c.tile_n, c.tile_m, c.tile_k, c.stages, c.split_k, extras.gamma_bytes, extras.squares, alone(c)
    )


def alone(c: GemmConfig) -> bool:
    """Whether no second CTA may come to an SM, though it would fit. Two to a tile are about as many as there are SMs;
    where two of them shared one, others had none. H200, 3584 x 3584, 92 KiB: 16 tokens 8.41 us, alone 7.65; with the
    norm within, 8 tokens 10.8 and 8.4 (2026-11-22).
    """
    return c.split_k > 1 and c.ctas_per_sm == 1


def fitting_tiles(p: GemmProblem) -> list[int]:
    """Tokens of a tile that suit ``p``: the least that cover its bucket in one tile, whole groups of warps; beyond,
    USUAL_TOKENS or twice as many, or one group where that wastes less. 192 tokens x 3584, H200: 11.2 us by tiles of
    192, 13.7 by three of 64 (2026-11-22).
    """
    tokens = min(ladder(p.m), TOKEN_TILES[-1])
    least = min(t for t in TOKEN_TILES if t >= tokens)
    fitting = {least} if p.m <= TOKEN_TILES[-1] else {TOKEN_TILES[-1]}
    if p.m > GROUP_TOKENS:
        fitting.add(USUAL_TOKENS)
    if p.m > TOKEN_TILES[-1] and 0 < p.m % USUAL_TOKENS <= GROUP_TOKENS:
        fitting.add(GROUP_TOKENS)
    return sorted(fitting)


def waves(p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> dict[int, tuple[int, float]]:
    """By a tile's columns: how often all CTAs that fit on the GPU are replaced, and their share that is at work."""
    return _waves(p.n, -(-p.m // (GROUP_TOKENS * groups(c))) * c.split_k, gpu.sm_count * c.ctas_per_sm)


@lru_cache(maxsize=1024)
def _waves(columns: int, ctas: int, room: int) -> dict[int, tuple[int, float]]:
    """For ``ctas`` to a tile's columns; an idle column of a tile counts as an idle share of its CTA."""
    counts = {tile: -(-(-(-columns // tile) * ctas) // room) for tile in TILES}
    return {tile: (n, columns * ctas / max(1, n * room * tile)) for tile, n in counts.items()}


def least_tokens(p: GemmProblem, gpu: GpuSpec) -> int:
    """From how many on this schedule is the default, where it can be."""
    return LEAST_TOKENS if 2 * -(-p.n // TILES[0]) < _ENOUGH_AT_WORK * gpu.sm_count else 1


def refused(p: GemmProblem, gpu: GpuSpec) -> Iterator[str]:
    """The rules that ``p`` breaks, whatever the config."""
    if not (gpu.has_tma and gpu.has_wgmma):
        yield f"{gpu.name} has no warpgroup MMA"
    if (p.a_major, p.b_major, p.out_major) != ("k", "k", "n") or min(p.a_align, p.b_align) < 8:
        yield "specialized takes a and b with K contiguous and 16-byte aligned rows, and out with N contiguous"
    if p.batched or p.wide or p.accumulate != "fp32":
        yield "specialized takes no batch, no 64-bit strides and accumulates in fp32"
    if p.k == 0:
        yield "specialized takes a K of 8 or more"


def broken(p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Iterator[str]:
    """The rules that ``c`` breaks."""
    yield from refused(p, gpu)
    fitting = fitting_tiles(p)
    if c.tile_n not in fitting:
        yield f"tile_n={c.tile_n} does not suit {p.m} tokens: take {' or '.join(map(str, fitting))}"
    if c.tile_m in TILES:
        by_tile = waves(p, c, gpu)
        count, busy = by_tile[c.tile_m]
        least = next(tile for tile in TILES if by_tile[tile][0] == count)
        if least < c.tile_m:
            yield f"tile_m={c.tile_m} makes as many waves of CTAs as tile_m={least}"
        best = max(TILES, key=lambda tile: by_tile[tile][1])
        if busy < LEAST_BUSY * by_tile[best][1]:
            yield f"tile_m={c.tile_m} has {busy:.0%} of the GPU at work where tile_m={best} has {by_tile[best][1]:.0%}"
    if -(-p.n // c.tile_m) > _GRID_AXIS or -(-p.m // GROUP_TOKENS) > _GRID_AXIS:
        yield f"{p.m} x {p.n} are more tiles than an axis of a grid has, {_GRID_AXIS}"
    frame = smem(c, extras)
    if frame.total_bytes > gpu.smem_per_block_bytes:
        yield f"{frame.total_bytes} bytes of shared memory are more than a block's {gpu.smem_per_block_bytes}"
    taken = c.ctas_per_sm * (frame.total_bytes + gpu.SMEM_RESERVED_BYTES)
    if taken > gpu.smem_per_sm_bytes:
        yield f"{c.ctas_per_sm} CTAs take {taken} bytes of an SM's {gpu.smem_per_sm_bytes} of shared memory"
    in_flight = c.ctas_per_sm * c.stages * frame.stage_bytes
    if in_flight < LEAST_IN_FLIGHT:
        yield f"{in_flight} bytes of stages keep too few in flight: take {LEAST_IN_FLIGHT} or more"
    available = min(gpu.MAX_REGISTERS_PER_THREAD, gpu.REGISTERS_PER_SM // (_reserved_threads(c) * c.ctas_per_sm))
    needed = registers_per_thread(c) + (_WEIGHING_REGISTERS * c.tile_k // 128 if extras != PLAIN else 0)
    if needed > available:
        yield f"a thread needs about {needed} registers; it has {available}"
    if c.split_k > 1 and waves(p, c, gpu)[c.tile_m][0] > 1:
        yield f"split_k={c.split_k}: the tiles fill the GPU without"
    if c.split_k * 2 > -(-p.k // c.tile_k) and c.split_k > 1:
        yield f"split_k={c.split_k} leaves less than two k-tiles of {c.tile_k} to each"
    yield from prefetch.broken(c, gpu)


def registers_per_thread(c: GemmConfig) -> int:
    """About what the compiler will need; it takes more where there are, to load a bias ahead of its use."""
    return c.tile_m // 2 + _OTHER_REGISTERS


def preference(c: GemmConfig, extras: Extras = PLAIN) -> tuple[object, ...]:
    """The least is preferred among configs of one estimate, which is DRAM's for many: one CTA to an SM, two to a tile
    (``_SPLIT_US``), most bytes in flight, long k-tiles. H200, 64 tokens x 18944, us: 104 KiB 37.0, 156 KiB 35.2, 208
    KiB 35.2 and, in half as many k-tiles, 35.0; two CTAs to an SM 37.7. Of two CTAs to a tile, just enough of W: 3584 x
    3584, by 5, 6, 8 stages of 14 KiB of it, 16 tokens 7.61, 7.58, 7.63, behind a norm 8.11, 8.21; 64 tokens 8.01, 8.04,
    behind a norm 8.83, 9.03; of 18944 long rows, one token 33.9, 33.0; 4096 x 4096, 16 KiB, 8 tokens 9.08, 9.11, 64
    tokens 9.75, 9.81 (2026-11-22).
    """
    in_flight = c.stages * smem(c).stage_bytes
    if c.split_k == 1:
        return c.ctas_per_sm, -1, -in_flight, -c.tile_k, str(c)
    weights = c.stages * c.tile_m * c.tile_k * smem(c).element_bytes
    enough = _FEW_TOKENS_WEIGHTS if c.tile_n <= _FEW_TOKENS and extras == PLAIN else _WEIGHTS
    return c.ctas_per_sm, -c.split_k, -min(weights, enough), -c.tile_k, in_flight, str(c)


def estimate_us(p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> float:
    """What an SM's CTAs pull, multiply or weigh, or a stage's latency, or DRAM, whichever is slowest; fixed costs."""
    if p.m == 0 or p.n == 0:
        return 0.0
    frame, rows = smem(c), GROUP_TOKENS * groups(c)
    count = ctas(p, c)
    k_tiles = -(-p.k // c.tile_k) / c.split_k
    weighed = weighing_us(p, c) / k_tiles if extras != PLAIN else 0.0

    def wave_us(together: int) -> float:
        step = max(
            together * frame.stage_bytes / _SM_BYTES_PER_US,
            together * 2 * rows * (c.tile_m + _COLUMNS_LOST) * c.tile_k / _SM_FLOPS_PER_US,
            _LATENCY_US / (c.stages - 1),
            together * weighed,
        )
        return k_tiles * step * (1.0 + _SHALLOW / c.stages) + together * rows * c.tile_m / _SUMS_PER_US

    room = gpu.sm_count * c.ctas_per_sm
    full, rest = divmod(count, room)
    busy = full * wave_us(c.ctas_per_sm) + (wave_us(-(-rest // gpu.sm_count)) if rest else 0.0)
    each = -(-count // gpu.sm_count)  # SM's CTAs, or most SMs'
    asking = min(1.0, count / (_ENOUGH_SMS * each * gpu.sm_count)) ** _FEW_SMS if count <= room else 1.0
    dram = 2.0 * p.n * (p.k + p.m) / (_DRAM_RATE * gpu.dram_gbps * 1e3 * asking)
    meeting = 0.0 if c.split_k == 1 else _SPLIT_US
    fixed = _LAUNCH_US + (0.0 if c.pdl else _UNDEPENDENT_US) + meeting
    return float(fixed + max(busy, dram) - (prefetch.saved_us(c) if count <= room else 0.0))


def weighing_us(p: GemmProblem, c: GemmConfig) -> float:
    """What a CTA's warps need to multiply its tokens by the norm's weight."""
    return -(-p.k // c.tile_k) / c.split_k * c.tile_k * groups(c) * _WEIGHED_US


def step_ns(p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> int:
    """What DRAM takes for a k-tile of W for each CTA that runs."""
    bytes_each = c.tile_m * c.tile_k * smem(c).element_bytes
    return round(min(ctas(p, c), gpu.sm_count * c.ctas_per_sm) * bytes_each / (_PACE * gpu.dram_gbps))


def norm_arguments(p: GemmProblem, c: GemmConfig, apart: bool) -> Callable[[], tuple[Any, ...]]:
    """What a launch with a norm takes last: where rows are squared ``apart``, the step of its loads."""
    step = step_ns(p, c, gpus.detect())
    if not apart:
        return lambda: (None, step)
    mailboxes.reserve.prepare()
    return lambda: (mailboxes.words.get(), step)


def crowded(p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> Iterator[str]:
    """Whether there are SMs without a tile for CTAs that square rows."""
    idle = gpu.sm_count - ctas(p, c)
    if idle < SQUARING_CTAS:
        yield f"squares=apart needs {SQUARING_CTAS} SMs without a tile; there are {max(0, idle)}"


def apart_saves_us(p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> float:
    """Of the time that warps beside take to square rows; less than none where the answer would be waited for."""
    spare_us = estimate_us(p, c, gpu) - p.k * smem(c).asked_ps * 1e-6 - _ANSWERED_US
    saved_us = _APART_US * min(1.0, c.tile_n / GROUP_TOKENS)
    return saved_us if c.tile_n >= LEAST_APART and spare_us >= 0 else -_APART_US - max(0.0, -spare_us)


def body(p: GemmProblem, c: GemmConfig, norm: Any = None, extras: Extras = PLAIN, apart: bool = False) -> Any:
    """The kernel body with its parts."""
    from cutekernels.kernels.cute.gemm.specialized import SpecializedGemm
    from cutekernels.kernels.cute.parts.epilogue import Activation

    return SpecializedGemm(
        rows=c.tile_n,
        tile_n=c.tile_m,
        tile_k=c.tile_k,
        stages=c.stages,
        split=c.split_k,
        dependent=c.pdl,
        activation=Activation(p.activation),
        out_align=p.out_align,
        ctas_per_sm=c.ctas_per_sm,
        alone=alone(c),
        ahead=c.ahead,
        norm=norm,
        gamma_bytes=extras.gamma_bytes,
        apart=apart,
    )
