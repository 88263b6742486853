"""One model for kernels that memory limits: bytes over bandwidth, stretched where too little is in flight."""

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
    registers: int = 32,
    coalesced: bool = True,
    walked: float = 0.0,
) -> float:
    """Time of a kernel that moves ``moved_bytes`` through DRAM.

    Args:
        gpu: where it runs.
        moved_bytes: read and written in all.
        grid: programs.
        warps: of one program.
        tile_bytes: what one program has in flight at a time.
        registers: of one thread.
        coalesced: whether neighbouring threads touch neighbouring bytes.
        walked: elements that a thread takes one after another, beside the launch; the last program's time is added.
    """
    rate = rates.of(gpu)
    programs = max(1, math.prod(grid))
    resident = max(1, min(gpu.max_warps // warps, gpu.REGISTERS_PER_SM // (32 * warps * registers)))
    each = programs / gpu.sm_count
    in_flight = gpu.sm_count * min(resident, each) * tile_bytes
    peak = gpu.dram_gbps * 1e3 * rate.dram_share
    bandwidth = min(1.0, in_flight / (gpu.dram_gbps * 1e3 * rate.dram_latency_us))
    waves = each / resident
    busy = min(1.0, each) if waves <= 1 else waves / math.ceil(waves)
    memory = moved_bytes / peak * (1.0 if coalesced else STREAMING.uncoalesced)
    memory_us = memory / max(1 / gpu.sm_count, bandwidth * busy)  # an SM's share at least
    return rate.launch_us + max(each * rate.block_us, memory_us) + walked * rate.walked_us


def start_bound(gpu: GpuSpec, moved_bytes: float, grid: tuple[int, int, int]) -> bool:
    """Whether the programs of ``grid`` take longer to start than a launch, and than their bytes take to move."""
    rate = rates.of(gpu)
    starting = math.prod(grid) / gpu.sm_count * rate.block_us
    return starting > max(rate.launch_us, moved_bytes / (gpu.dram_gbps * 1e3 * rate.dram_share))
