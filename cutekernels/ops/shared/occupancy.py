"""The number of CTAs on an SM: rules that several ops' ``why_not`` have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutekernels.columns import smaller
from cutekernels.rules import Broken

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec


def occupancy_rules(gpu: GpuSpec, *, ctas: Any, most: int, warps: Any, registers: Any, smem: Any) -> Broken:
    """The rules that ``ctas`` CTAs on an SM break: they fit, and up to ``most`` no further one would."""
    yield from overflows(gpu, ctas=ctas, warps=warps, registers=registers, smem=smem)
    full: Any = False
    for broken, *_ in overflows(gpu, ctas=ctas + 1, warps=warps, registers=registers, smem=smem):
        full = full | broken
    room = (ctas < most) & (full == 0)
    yield room, "ctas_per_sm={} leaves room for one more CTA on an SM: take {}", ctas, ctas + 1


def overflows(gpu: GpuSpec, *, ctas: Any, warps: Any, registers: Any, smem: Any) -> Broken:
    """The resources of an SM that ``ctas`` CTAs exceed; ``registers`` per thread, ``smem`` bytes per CTA."""
    left = smaller(gpu.MAX_REGISTERS_PER_THREAD, gpu.REGISTERS_PER_SM // (32 * warps * ctas))
    threads, block, whole = 32 * warps, gpu.smem_per_block_bytes, gpu.smem_per_sm_bytes
    yield registers > left, "a thread needs about {} registers; {} CTAs of {} leave {}", registers, ctas, threads, left
    yield smem > block, "{} bytes of shared memory are more than a block's {}", smem, block
    beyond = ctas * (smem + gpu.SMEM_RESERVED_BYTES) > whole
    yield beyond, "{} CTAs of {} bytes of shared memory exceed an SM's {}", ctas, smem, whole
    yield ctas * warps > gpu.max_warps, "{} CTAs of {} warps exceed an SM's {}", ctas, warps, gpu.max_warps


def no_warpgroups(schedule: object, p: object, gpu: GpuSpec, x: object) -> str | None:
    """The rule, of problems, of kernels by TMA and warpgroup MMA."""
    return None if gpu.has_tma and gpu.has_wgmma else f"{gpu.name} has no warpgroup MMA"
