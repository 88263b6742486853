"""The skinny schedule as ``gemm`` sees it: which problems and configs it takes, its model, its body, its workspace.

The same for ``norm_linear_op.py``, whose kernel is this body with a norm in front of the product or a gate behind it.

``tile_m`` are weight rows (of N) here and ``tile_n`` tokens (of M): operands are swapped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutekernels.kernels.cute.parts.smem import SkinnySmem
from cutekernels.op import power_of_two

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec
    from cutekernels.ops.gemm import GemmConfig, GemmProblem

MOST_TOKENS = 128
WIDEST_TOKENS = 64  # of one tile
# Up to which the default is skinny wherever it can be; beyond, never. The two models do not compare: at 16 tokens the
# multistage one is sanguine, at 64 this one is (19.9 us where it says 10.8; H200, K = N = 3584, 2026-11-21).
DEFAULT_TOKENS = 32
LEAST_IN_FLIGHT = 32 * 1024  # bytes of stages
_OTHER_REGISTERS = 48
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


def smem(c: GemmConfig, extras: Extras = PLAIN) -> SkinnySmem:
    frame = SkinnySmem(c.tile_m, c.tile_n, c.tile_k, c.stages, c.warps_k)
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
    fitting = min(WIDEST_TOKENS, max(8, power_of_two(p.m)))
    if c.tile_n != fitting:
        yield f"tile_n={c.tile_n} does not suit {p.m} tokens: take {fitting}"
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
    accumulators = c.tile_m * c.tile_n // (32 * c.warps_m)
    fragments = c.tile_k // 16 // c.warps_k * (c.tile_m // c.warps_m // 4 + c.tile_n // 4)
    registers = accumulators + fragments + extras.registers(c) + _OTHER_REGISTERS
    if registers > gpu.MAX_REGISTERS_PER_THREAD:
        yield f"a thread needs about {registers} registers"
    for name, rows in (("m", c.tile_m), ("n", c.tile_n)):
        across = loaders(rows, c) // min(loaders(rows, c), c.tile_k // 8)
        if rows % across:
            yield f"{loaders(rows, c)} threads do not divide tile_{name}={rows} by tile_k={c.tile_k}"
    if c.split_k > 1 and tiles(p, c) > 2 * gpu.sm_count:
        yield f"split_k={c.split_k}: {tiles(p, c)} tiles fill the GPU without"
    if c.split_k > 1 and c.split_k * 2 > -(-p.k // c.tile_k):
        yield f"split_k={c.split_k} leaves less than two k-tiles of {c.tile_k} to each"
    if c.pdl and not gpu.has_pdl:
        yield f"{gpu.name} has no programmatic dependent launch"
    if -(-p.n // c.tile_m) > _GRID_AXIS:
        yield f"{p.n} weight rows are more than {_GRID_AXIS} tiles of {c.tile_m}"
    if c.tile_m > max(32, p.n):
        yield f"tile_m={c.tile_m} idles most of a tile over {p.n} weight rows"


def loaders(rows: int, c: GemmConfig) -> int:
    """Threads that load a tile of ``rows``: no more than it has vectors."""
    return min(c.threads, rows * c.tile_k // 8)


def estimate_us(p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> float:
    """What an SM's CTAs pull through its port, or latency, DRAM or the L2 allow, whichever is slowest; fixed costs."""
    if p.m == 0 or p.n == 0:
        return 0.0
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
    crowding = c.pdl and resident > 1 and waves == 0  # early CTAs crowd on the SMs that happen to be free
    return float(us * (1.15 if crowding else 1.0))


def body(p: GemmProblem, c: GemmConfig, norm: Any = None, extras: Extras = PLAIN) -> Any:
    """The kernel body with its parts; ``norm`` is a ``TokenNorm`` or None."""
    import cutlass

    from cutekernels.kernels.cute.gemm_skinny import SkinnyGemm
    from cutekernels.kernels.cute.parts.epilogue import Activation
    from cutekernels.kernels.cute.parts.load import OperandLoad
    from cutekernels.kernels.cute.parts.mma import WarpMma

    return SkinnyGemm(
        load_w=OperandLoad(c.tile_m, c.tile_k, c.stages, loaders(c.tile_m, c), True, 8),
        load_x=OperandLoad(c.tile_n, c.tile_k, c.stages, loaders(c.tile_n, c), True, 8),
        mma=WarpMma(c.warps_m, 1, cutlass.Float32, True, True, min(16, c.tile_n)),
        warps_k=c.warps_k,
        split_k=c.split_k,
        dependent=c.pdl,
        activation=Activation("silu" if extras.gated else p.activation),
        ctas_per_sm=c.ctas_per_sm,
        norm=norm,
        gated=extras.gated,
    )


# ---- the workspace of split-K ---------------------------------------------------------------------------

_RESERVE = 1 << 20  # tickets of one device for captured launches


class Workspace:
    """Partial sums and tickets for launches of one size, per stream.

    Launches of one stream follow one another and share theirs. A launch captured in a graph has partial sums in the
    graph's own memory and tickets that no other launch has (of a million, taken in turn), since graphs replay on any
    stream. Tickets are zero between launches: the last CTA of a tile clears its own.
    """

    def __init__(self, partials: int, tickets: int) -> None:
        self._partials, self._tickets = partials, tickets
        self._by_stream: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        with _lock:
            _reserve(torch.cuda.current_device())  # allocated before any capture

    def get(self) -> tuple[Tensor, Tensor]:
        device = torch.cuda.current_device()
        if torch.cuda.is_current_stream_capturing():
            return torch.empty(self._partials, device="cuda"), _take(device, self._tickets)
        key = device, torch._C._cuda_getCurrentRawStream(device)
        found = self._by_stream.get(key)
        if found is None:
            found = self._by_stream[key] = (
                torch.empty(self._partials, device="cuda"),
                torch.zeros(self._tickets, device="cuda", dtype=torch.int32),
            )
        return found


_lock = threading.Lock()
_reserves: dict[int, Tensor] = {}
_taken: dict[int, int] = {}


def _reserve(device: int) -> Tensor:
    if device not in _reserves:
        _reserves[device] = torch.zeros(_RESERVE, device=f"cuda:{device}", dtype=torch.int32)
        torch.cuda.current_stream(device).synchronize()  # whoever takes some may do so on another stream
    return _reserves[device]


def _take(device: int, tickets: int) -> Tensor:
    with _lock:
        begin = _taken.get(device, 0)
        if begin + tickets > _RESERVE:
            begin = 0
        _taken[device] = begin + tickets
        return _reserve(device)[begin : begin + tickets]


def bind(p: GemmProblem, c: GemmConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``launch(out, a, b, c, bias, alpha, beta)``."""
    if c.split_k == 1:
        return kernel
    shared = workspace(p, c)

    def launch(*args: Any) -> None:
        kernel(*args, *shared.get())

    return launch


def workspace(p: GemmProblem, c: GemmConfig, extras: Extras = PLAIN) -> Workspace:
    """For ``split_k > 1``."""
    count = tiles(p, c)
    return Workspace(count * c.split_k * (c.tile_m + extras.squares) * c.tile_n, count)
