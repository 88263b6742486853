"""The skinny schedules as ``gemm`` sees them: which problems and configs they take, models, bodies, the workspace.

``body=skinny`` has a CTA, or ``split_k`` of them, to a tile. The same serves ``norm_linear_op.py``, whose kernel is
this body with a norm in front of the product or a gate behind it. ``body=stream`` deals out k-tiles evenly to as many
CTAs as the GPU holds at once; only the tuner chooses it, where it measured it.

``tile_m`` are weight rows (of N) here and ``tile_n`` tokens (of M): operands are swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from cutekernels.kernels.cute.parts.smem import SkinnySmem
from cutekernels.kernels.cute.parts.stream import SLOTS
from cutekernels.op import ladder, power_of_two
from cutekernels.ops.gemm import prefetch
from cutekernels.ops.shared.per_stream import Workspace

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec
    from cutekernels.ops.gemm.op import GemmConfig, GemmProblem

MOST_TOKENS = 128
USUAL_TILES = (8, 16, 32, 64)  # of tokens, what the default chooses among
WIDE_WARPS = 8  # of tiles of more tokens than that
# Up to which the default is skinny wherever it can be; beyond, never. The two models do not compare: at 16 tokens the
# multistage one is sanguine, at 64 this one is (19.9 us where it says 10.8; H200, K = N = 3584, 2026-11-21).
DEFAULT_TOKENS = 32
LEAST_IN_FLIGHT = 32 * 1024  # bytes of stages
_OTHER_REGISTERS, _OTHER_REGISTERS_CLOSE = 48, 40
# Of 70 configs with other tiles than the usual, those beyond spilled (sm_90a, 2026-11-21): the compiler reads the
# splits' or the warps' sums of many accumulators together.
_MOST_SUMMED, _MOST_OF_MANY_WARPS = 240, 96
# Sums of a thread where groups of warps share K. With 128 nearly all configs have 8 to 200 bytes of stack, and with 96
# of a tile of 24, 48 or 96 tokens 8 to 48 (sm_80, sm_89, sm_90a, sm_120a, 2026-11-22).
_MOST_SUMS = {True: 96, False: 88}  # by whether the tile is a usual one
_GRID_AXIS = 65535

# The model's constants, fitted to 540 configs of six problems on an H200 (2026-11-21): 11 % off, root mean square.
_LAUNCH_US, _DEPENDENT_US, _SPLIT_US = 1.4, 0.63, 2.8
_SM_BYTES_PER_US = 59e3
_LATENCY_US = 0.87
_DRAM_RATE = 0.81  # of the datasheet's
_L2_BYTES_PER_US_PER_SM = 54.6e3
_CTA_US, _TILE_US = 1.3, 0.009


@dataclass(frozen=True, slots=True)
class Extras:
    """What the body does beside the product."""

    gamma_bytes: int = 0  # an element of the norm's weight, in front
    squares: bool = False  # the norm's statistics
    gated: bool = False  # two weight rows to an output

    def registers(self, c: GemmConfig) -> int:
        """Squares, their factors in the epilogue, gamma's fragments."""
        return c.tile_n * self.squares + c.tile_k // 16 // c.warps_k * self.gamma_bytes


PLAIN = Extras()


def usual_tile(p: GemmProblem) -> int:
    """Tokens of a tile of the default: a power of two."""
    return min(USUAL_TILES[-1], max(USUAL_TILES[0], power_of_two(p.m)))


def fitting_tiles(p: GemmProblem) -> list[int]:
    """Tokens of a tile that suit ``p``: the usual, and what covers its bucket exactly, in one tile or, if wide, two.

    Of the bucket and not of ``p``, so that what was tuned for a bucket serves every problem in it. Buckets are the
    ladder's, so 40, 56, 80 and 112 would suit none.
    """
    tokens = min(MOST_TOKENS, ladder(p.m))
    shares = (1, 2) if tokens > USUAL_TILES[-1] else (1,)
    return sorted({usual_tile(p), *(max(8, -(-tokens // share // 8) * 8) for share in shares)})


def smem(c: GemmConfig, extras: Extras = PLAIN) -> SkinnySmem:
    frame = SkinnySmem(c.tile_m, c.tile_n, c.tile_k, c.stages, c.warps_k, apart=c.body == "stream")
    return replace(frame, squaring=c.warps if extras.squares else 0, gamma_bytes=extras.gamma_bytes)


def tiles(p: GemmProblem, c: GemmConfig) -> int:
    return -(-p.n // c.tile_m) * -(-p.m // c.tile_n)


def refused(p: GemmProblem) -> Iterator[str]:
    """The rules that ``p`` breaks, whatever the config."""
    if p.m > MOST_TOKENS:
        yield f"skinny is for at most {MOST_TOKENS} rows of a; there are {p.m}"
    if (p.a_major, p.b_major, p.out_major) != ("k", "k", "n") or min(p.a_align, p.b_align) < 8:
        yield "skinny takes a and b with K contiguous and 16-byte aligned rows, and out with N contiguous"
    if p.batched or p.wide or p.accumulate != "fp32":
        yield "skinny takes no batch, no 64-bit strides and accumulates in fp32"


def broken(p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Iterator[str]:
    """The rules that ``c`` breaks."""
    yield from refused(p)
    fitting = fitting_tiles(p)
    if c.tile_n not in fitting:
        yield f"tile_n={c.tile_n} does not suit {p.m} tokens: take {' or '.join(map(str, fitting))}"
    if c.tile_k < 128 and c.tile_n <= 16:
        yield f"tile_k={c.tile_k} is little between barriers for {c.tile_n} tokens: take 128 or more"
    if c.warps not in (4, 8):
        yield f"{c.warps_m}x{c.warps_k} warps: take 4 or 8"
    if c.tile_m % (16 * c.warps_m):
        yield f"tile_m={c.tile_m} does not divide among {c.warps_m} warps of 16"
    if c.tile_k // 16 % c.warps_k:
        yield f"tile_k={c.tile_k} does not deal out among {c.warps_k} warps"
    frame = smem(c, extras)
    if frame.total_bytes > gpu.smem_per_block_bytes:
        yield f"{frame.total_bytes} bytes of shared memory are more than a block's {gpu.smem_per_block_bytes}"
    if frame.staged_bytes < LEAST_IN_FLIGHT:
        yield f"{frame.staged_bytes} bytes of stages keep too few in flight: take {LEAST_IN_FLIGHT} or more"
    registers = registers_per_thread(c, extras)
    if registers > gpu.MAX_REGISTERS_PER_THREAD:
        yield f"a thread needs about {registers} registers"
    if c.body == "skinny" and c.warps_k > 1 and accumulators(c) > _MOST_SUMS[usual(c)]:
        yield f"a thread holds {accumulators(c)} sums, and spills: take more warps along the rows"
    if not usual(c):
        sums = accumulators(c) * c.split_k if c.split_k > 1 else 0
        if sums > _MOST_SUMMED or (c.warps_k > 2 and accumulators(c) > _MOST_OF_MANY_WARPS):
            yield f"{c.split_k} splits and {c.warps_k} groups of warps sum {accumulators(c)} accumulators: spills"
    if c.tile_n > USUAL_TILES[-1] and c.warps < WIDE_WARPS:
        yield f"tile_n={c.tile_n} takes {WIDE_WARPS} warps; there are {c.warps}"
    if c.split_k > 1 and tiles(p, c) > 2 * gpu.sm_count:
        yield f"split_k={c.split_k}: {tiles(p, c)} tiles fill the GPU without"
    if c.split_k > 1 and c.split_k * 2 > -(-p.k // c.tile_k):
        yield f"split_k={c.split_k} leaves less than two k-tiles of {c.tile_k} to each"
    yield from prefetch.broken(c, gpu)
    if -(-p.n // c.tile_m) > _GRID_AXIS:
        yield f"{p.n} weight rows are more than {_GRID_AXIS} tiles of {c.tile_m}"
    if c.tile_m > max(32, p.n):
        yield f"tile_m={c.tile_m} idles most of a tile over {p.n} weight rows"
    if c.body == "stream":
        yield from _broken_stream(p, c, gpu, registers)


def _broken_stream(p: GemmProblem, c: GemmConfig, gpu: GpuSpec, registers: int) -> Iterator[str]:
    ctas = gpu.sm_count * c.ctas_per_sm
    if p.k == 0 or p.k % c.tile_k:
        yield f"body=stream takes K in whole k-tiles of {c.tile_k}; it is {p.k}"
    if units(p, c) * ctas >= 2**31:
        yield f"{units(p, c)} k-tiles are more than body=stream counts for {ctas} CTAs"
    if units(p, c) < 2 * ctas:
        yield f"body=stream leaves less than two k-tiles to each of {ctas} CTAs"
    needed = c.ctas_per_sm * (smem(c).total_bytes + gpu.SMEM_RESERVED_BYTES)
    if needed > gpu.smem_per_sm_bytes:
        yield f"{c.ctas_per_sm} CTAs take {needed} bytes of an SM's {gpu.smem_per_sm_bytes} of shared memory"
    available = gpu.REGISTERS_PER_SM // (c.threads * c.ctas_per_sm)
    if registers > available:
        yield f"a thread needs about {registers} registers; {c.ctas_per_sm} CTAs of {c.threads} leave {available}"


def usual(c: GemmConfig) -> bool:
    """Whether ``c`` is one of those the default chooses among, knobs aside."""
    return c.body == "skinny" and c.tile_n in USUAL_TILES


def preference(c: GemmConfig) -> tuple[object, ...]:
    """The least is preferred among configs of one estimate, which is DRAM's for many.

    Small tiles, then many warps, of them many along the rows. H200, us, 2026-11-22. 18944 x 3584: one token 38.9 with
    tiles of 128 rows, four 35.3 with 16; sixteen 35.2 with 1x4 warps, 34.3 with 1x8, 34.1 with 2x4. 3584 x 3584: one
    8.2 with 1x8, 8.0 with 2x4; sixteen 8.4 and 8.2.
    """
    return c.tile_m, -c.warps, -c.warps_m, str(c)


def registers_per_thread(c: GemmConfig, extras: Extras = PLAIN) -> int:
    """About what the compiler will need. Where it is short of them, it reads no more than two k-blocks ahead."""
    blocks = c.tile_k // 16 // c.warps_k
    fragment = c.tile_m // c.warps_m // 4 + c.tile_n // 4
    if usual(c):
        return accumulators(c) + blocks * fragment + extras.registers(c) + _OTHER_REGISTERS
    return accumulators(c) + min(2, blocks) * fragment + extras.registers(c) + _OTHER_REGISTERS_CLOSE


def accumulators(c: GemmConfig) -> int:
    """Of a thread."""
    return c.tile_m * c.tile_n // (32 * c.warps_m)


def loaders(rows: int, c: GemmConfig) -> int:
    """Threads that load a tile of ``rows``: as many as divide it by whole vectors along K, none idle."""
    along = c.tile_k // 8
    return along * max(across for across in range(1, c.threads // along + 1) if rows % across == 0)


def units(p: GemmProblem, c: GemmConfig) -> int:
    """k-tiles of all tiles, which ``body=stream`` deals out."""
    return tiles(p, c) * -(-p.k // c.tile_k)


def estimate_us(p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> float:
    """What an SM's CTAs pull through its port, or latency, DRAM or the L2 allow, whichever is slowest; fixed costs."""
    if p.m == 0 or p.n == 0:
        return 0.0
    if c.body == "stream":
        return _stream_us(p, c, gpu)
    ctas = tiles(p, c) * c.split_k
    frame = smem(c, extras)
    fit = gpu.smem_per_sm_bytes // (frame.total_bytes + gpu.SMEM_RESERVED_BYTES)
    resident = max(1, min(fit, gpu.max_warps // c.warps))
    tokens = min(p.m, c.tile_n)
    cta_bytes = (c.tile_m + tokens) * p.k * 2 / c.split_k
    k_tiles = -(-p.k // c.tile_k) / c.split_k

    def wave_us(together: int) -> float:
        in_flight = together * (c.stages - 1) * (c.tile_m + tokens) * c.tile_k * 2
        rate = min(_SM_BYTES_PER_US, in_flight / _LATENCY_US)
        return together * cta_bytes / rate + _CTA_US + _TILE_US * k_tiles / together

    waves, rest = divmod(ctas, gpu.sm_count * resident)
    busy = waves * wave_us(resident) * (0.93 if waves > 1 else 1.0)
    if rest:
        busy += wave_us(-(-rest // gpu.sm_count))
    dram = 2.0 * p.n * p.k / (_DRAM_RATE * gpu.dram_gbps * 1e3)
    l2 = ctas * cta_bytes / (_L2_BYTES_PER_US_PER_SM * gpu.sm_count)
    us = _LAUNCH_US - (_DEPENDENT_US if c.pdl else 0.0) + max(dram, l2, busy) + (_SPLIT_US if c.split_k > 1 else 0.0)
    if ctas <= gpu.sm_count * resident:
        us -= prefetch.saved_us(c)
    crowding = c.pdl and resident > 1 and waves == 0  # early CTAs crowd on the SMs that happen to be free
    return float(us * (1.15 if crowding else 1.0))


def _stream_us(p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> float:
    """The same with every SM's share alike, and what it takes to join the tiles that CTAs share.

    No constant is fitted to this body: it is a guess that ranks candidates until they are measured.
    """
    tokens = min(p.m, c.tile_n)
    unit_bytes = (c.tile_m + tokens) * c.tile_k * 2
    share = -(-units(p, c) // (gpu.sm_count * c.ctas_per_sm))
    rate = min(_SM_BYTES_PER_US, c.ctas_per_sm * (c.stages - 1) * unit_bytes / _LATENCY_US)
    busy = c.ctas_per_sm * share * unit_bytes / rate + _CTA_US + _TILE_US * share
    dram = 2.0 * p.n * p.k / (_DRAM_RATE * gpu.dram_gbps * 1e3)
    l2 = units(p, c) * unit_bytes / (_L2_BYTES_PER_US_PER_SM * gpu.sm_count)
    return float(_LAUNCH_US - (_DEPENDENT_US if c.pdl else 0.0) + max(dram, l2, busy) + _SPLIT_US)


def body(p: GemmProblem, c: GemmConfig, norm: Any = None, extras: Extras = PLAIN) -> Any:
    """The kernel body with its parts; ``norm`` is a ``TokenNorm`` or None."""
    import cutlass

    from cutekernels.kernels.cute.gemm.skinny import SkinnyGemm
    from cutekernels.kernels.cute.gemm.stream import StreamGemm
    from cutekernels.kernels.cute.parts.epilogue import Activation
    from cutekernels.kernels.cute.parts.load import OperandLoad
    from cutekernels.kernels.cute.parts.mma import WarpMma

    kind = StreamGemm if c.body == "stream" else SkinnyGemm
    return kind(
        load_w=OperandLoad(c.tile_m, c.tile_k, c.stages, loaders(c.tile_m, c), True, 8),
        load_x=OperandLoad(c.tile_n, c.tile_k, c.stages, loaders(c.tile_n, c), True, 8),
        mma=WarpMma(c.warps_m, 1, cutlass.Float32, True, True, 8 if c.tile_n % 16 else 16),
        warps_k=c.warps_k,
        split_k=c.split_k,
        dependent=c.pdl,
        activation=Activation("silu" if extras.gated else p.activation),
        ctas_per_sm=c.ctas_per_sm,
        ahead=c.ahead,
        norm=norm,
        gated=extras.gated,
    )


def bind(p: GemmProblem, c: GemmConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``launch(out, a, b, c, bias, alpha, beta)``."""
    if not c.shares_tiles:
        return kernel
    shared = workspace(p, c)

    def launch(*args: Any) -> None:
        kernel(*args, *shared.get())

    return launch


def workspace(p: GemmProblem, c: GemmConfig, extras: Extras = PLAIN) -> Workspace:
    """For tiles that CTAs share. ``body=stream`` starts as many CTAs as theirs has slots for."""
    count = tiles(p, c)
    if c.body == "stream":
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Workspace(device.multi_processor_count * c.ctas_per_sm * SLOTS * c.tile_m * c.tile_n, count)
    return Workspace(count * c.split_k * (c.tile_m + extras.squares) * c.tile_n, count)


def norm_arguments(p: GemmProblem, c: GemmConfig, extras: Extras) -> Callable[[], tuple[Any, ...]]:
    """What a launch with a norm or a gate takes last: the workspace of tiles that CTAs share."""
    return workspace(p, c, extras).get if c.shares_tiles else lambda: (None, None)
