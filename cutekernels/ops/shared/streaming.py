"""One model for kernels that memory limits: the bytes' time, the programs' starts, or loads one after another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cutekernels import rates
from cutekernels.ops.shared.coefficients import STREAMING

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec


def estimate_us(
    gpu: GpuSpec,
    moved_bytes: float,
    grid: tuple[int, int, int],
    warps: int,
    tile_bytes: float,
    *,
    loads: float = 1.0,
    registers: int = 32,
    coalesced: bool = True,
    walked: float = 0.0,
) -> float:
    """Time of a kernel that moves ``moved_bytes`` through DRAM. It never falls as programs and bytes grow in number.

    Args:
        gpu: where it runs.
        moved_bytes: read and written in all.
        grid: programs.
        warps: of one program.
        tile_bytes: what one program has in flight at a time.
        loads: of such tiles, which a program waits for one after another; a launch's time has the first of them.
        registers: of one thread.
        coalesced: whether neighbouring threads touch neighbouring bytes.
        walked: elements that a thread takes one after another, beside the launch; the last program's time is added.
    """
    rate = rates.of(gpu)
    memory_us = moved_bytes / (gpu.dram_gbps * 1e3 * rate.dram_share) * (1.0 if coalesced else STREAMING.uncoalesced)
    starts_us = math.prod(grid) / gpu.sm_count * rate.block_us
    waits = loads * max(1.0, waves(gpu, grid, warps, registers)) - 1
    waits_us = max(0.0, waits) * rate.dram_latency_us
    streamed_us: float = rates.both_us(max(starts_us, memory_us), waits_us, STREAMING.hidden)
    return rate.launch_us + tile_bytes / rate.sm_bytes_per_us + streamed_us + walked * rate.walked_us


def waves(gpu: GpuSpec, grid: tuple[int, int, int], warps: int, registers: int = 32) -> float:
    """The programs of ``grid`` over those that the GPU holds at a time."""
    resident = max(1, min(gpu.max_warps // warps, gpu.REGISTERS_PER_SM // (32 * warps * registers)))
    return math.prod(grid) / (gpu.sm_count * resident)


def start_bound(gpu: GpuSpec, moved_bytes: float, grid: tuple[int, int, int]) -> bool:
    """Whether the programs of ``grid`` take longer to start than a launch, and than their bytes take to move."""
    rate = rates.of(gpu)
    starting = math.prod(grid) / gpu.sm_count * rate.block_us
    return starting > max(rate.launch_us, moved_bytes / (gpu.dram_gbps * 1e3 * rate.dram_share))
