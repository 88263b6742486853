"""Prefetch of weights by a dependent launch that waits for its turn: rules and model of the ``prefetch_l2`` knob.

Under programmatic dependent launch a CTA is placed while the kernel ahead still runs, and waits until that is done.
Memory would be idle in between; instead, ``prefetch_l2`` k-tiles of W are brought to the L2 cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutekernels import rates
from cutekernels.columns import kept, larger, smaller
from cutekernels.ops.gemm.coefficients import PREFETCH
from cutekernels.ops.gemm.problem import ELEMENT_BYTES, GemmConfig
from cutekernels.rules import Broken, of_config

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

MOST = 128 * 1024


def prefetched_bytes(c: GemmConfig) -> int:
    """Bytes that a CTA prefetches."""
    return c.prefetch_l2 * c.tile_n * c.tile_k * ELEMENT_BYTES


class Prefetches:
    """The rules of schedules that prefetch."""

    @of_config
    def dependent_launch(self, c: GemmConfig, gpu: GpuSpec, x: object) -> Broken:
        yield c.pdl & (not gpu.has_pdl), "{} has no programmatic dependent launch", gpu.name
        without = (c.prefetch_l2 > 0) & (c.pdl == 0)
        yield without, "prefetch_l2={} is for pdl=1: without, no time passes before a kernel's turn", c.prefetch_l2

    @of_config
    def prefetch(self, c: GemmConfig, gpu: GpuSpec, x: object) -> Broken:
        taken = prefetched_bytes(c)
        yield taken > MOST, "prefetch_l2={} asks for {} bytes at once: at most {}", c.prefetch_l2, taken, MOST


@kept
def saved_us(c: GemmConfig, gpu: GpuSpec, most: float) -> float:
    """Gain of a launch whose CTAs are all placed at once, at most ``most`` of the time between launches; CTAs of later
    waves have nothing to wait for.
    """
    taken, enough, too_much = prefetched_bytes(c), PREFETCH.enough, PREFETCH.too_much
    gain = most * rates.of(gpu).dependent_us
    return gain * (smaller(taken, enough) / enough - larger(0, taken - too_much) / too_much)
