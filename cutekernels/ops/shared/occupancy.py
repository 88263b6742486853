"""The number of CTAs on an SM: rules that several ops' ``why_not`` have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec


def occupancy_rules(gpu: GpuSpec, *, ctas: int, most: int, warps: int, registers: int, smem: int) -> Iterator[str]:
    """The rules that ``ctas`` CTAs on an SM break: they fit, and up to ``most`` no further one would."""
    yield from overflows(gpu, ctas=ctas, warps=warps, registers=registers, smem=smem)
    more = overflows(gpu, ctas=ctas + 1, warps=warps, registers=registers, smem=smem)
    if ctas < most and next(more, None) is None:
        yield f"ctas_per_sm={ctas} leaves room for one more CTA on an SM: take {ctas + 1}"


def overflows(gpu: GpuSpec, *, ctas: int, warps: int, registers: int, smem: int) -> Iterator[str]:
    """The resources of an SM that ``ctas`` CTAs exceed; ``registers`` per thread, ``smem`` bytes per CTA."""
    available = min(gpu.MAX_REGISTERS_PER_THREAD, gpu.REGISTERS_PER_SM // (32 * warps * ctas))
    if registers > available:
        yield f"a thread needs about {registers} registers; {ctas} CTAs of {32 * warps} leave {available}"
    if smem > gpu.smem_per_block_bytes:
        yield f"{smem} bytes of shared memory are more than a block's {gpu.smem_per_block_bytes}"
    if ctas * (smem + gpu.SMEM_RESERVED_BYTES) > gpu.smem_per_sm_bytes:
        yield f"{ctas} CTAs of {smem} bytes of shared memory exceed an SM's {gpu.smem_per_sm_bytes}"
    if ctas * warps > gpu.max_warps:
        yield f"{ctas} CTAs of {warps} warps exceed an SM's {gpu.max_warps}"


def no_warpgroups(schedule: object, p: object, gpu: GpuSpec, x: object) -> str | None:
    """The rule, of problems, of kernels by TMA and warpgroup MMA."""
    return None if gpu.has_tma and gpu.has_wgmma else f"{gpu.name} has no warpgroup MMA"
