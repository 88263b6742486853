"""The numbers of the models of products, one table for each body. Each line has the unit, mostly a rate of ``rates.py``
that the number multiplies, and what it stands for. Where they are from: docs/notes/gemm.md; of packed weights
docs/notes/quantized.md#models (H200, 2026-11-26), whose ``packed_problem.py`` has the instructions that decode eight
weights, by code; of groups docs/notes/moe.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class MultistageCosts:
    """Fitted to 943 runs of 47 products (H200, 2026-11); ``sharpness`` and ``epilogue`` to 840 runs of products, of
    groups and of their weights' gradients (H200 and H100, 2026-12-01).
    """

    latency: float = 1.1 / 0.8  # dram_latency_us: a k-tile that nothing hides
    port: float = 70 / 99  # sm_bytes_per_us: what an SM loads
    sharpness: float = 4.7  # exponent of the mean of a k-tile's two times
    epilogue: float = 7.2  # bytes at sm_bytes_per_us: an output element's end
    barrier: tuple[float, ...] = (1.8, 1.0, 0.4)  # barrier_us: a k-tile's, with 2 stages, 3 and more
    persistent: float = 0.4  # share of a CTA's fixed time that the next tile's loads do not hide
    row_bytes: tuple[float, ...] = (1.13, 1.05, 1.0)  # DRAM's time: a k-tile loads 64 bytes of a row, 128, 256
    aligned: tuple[float, ...] = (0.3, 0.6, 0.85, 1.0)  # the MMAs' rate, guesses: rows aligned to 1 element, 2, 4, 8
    reuse: float = 5.0  # multiplications per element of a fragment at which the MMAs run at half their rate
    shown: float = 0.002  # share of the shorter of two times that overlap, a guess: settles ties


@dataclass(frozen=True)
class SkinnyCosts:
    """Fitted on an H200 (2026-11-21); ``mma`` on it and on an H100, up to 128 tokens (2026-11-30); ``latency`` and
    ``added`` are not fitted (2026-12-01).
    """

    split: float = 2.8 / 0.63  # exchange_us: CTAs that share a tile leave their sums and draw a ticket
    ahead: float = 0.4 / 0.63  # dependent_us: what a prefetch gains at most
    port: float = 59 / 99  # sm_bytes_per_us: what an SM loads
    latency: float = MultistageCosts.latency  # dram_latency_us: a load
    cta: float = 1.3 / 0.8  # dram_latency_us: the beginning and end of a CTA
    added: float = 2.0  # cycles: an accumulator of another group of warps, a guess
    k_tile: float = 0.009 / 0.08  # barrier_us: a k-tile, divided by the CTAs of an SM
    mma: float = 0.3  # share of the MMAs' time that loads do not hide
    crowded: float = 1.15  # factor: early CTAs of a dependent launch pile up on the SMs that are free
    squares: float = 34.0 / 4096  # cycles: an element of a token in its sum of squares


@dataclass(frozen=True)
class SkinnyWarpgroupCosts:
    """Fitted up to 128 tokens (H200 and H100, 2026-11-25), chosen for more (2026-11-26, 2026-11-27)."""

    launch: float = 2.3  # launch_us: a launch, with its first and last CTA
    ahead: float = 2.23  # dependent_us: what a prefetch gains at most
    latency: float = 1.63  # l2_latency_us: a load, divided by the stages behind it
    shallow: float = 0.147  # share of a k-tile's time lost to few stages, divided by them
    started: float = 21.0  # columns that an MMA could multiply while it starts
    dram: float = 1.09  # dram_share: what the loads reach
    epilogue: float = 5.2  # bytes at sm_bytes_per_us: an output element's end
    met: float = 3.3  # exchange_us: the wait for more than two CTAs to a tile, which ends the loads
    message: float = 0.2 / 0.63  # exchange_us: each CTA beyond two, as in decode attention
    weighed: float = 3.74  # cycles: a k of 64 tokens, multiplied by the norm's weight on its way to the MMA


@dataclass(frozen=True)
class WarpgroupCosts:
    """Fitted to 2950 runs of 280 products (H200, 2026-11-24)."""

    fixed: float = 2.19 / 1.5  # launch_us: a launch, with its first and last CTA
    mma: float = 6.51 / 6.22  # warpgroup_flops_per_us: what a steady mainloop reaches
    port: float = 105.7 / 99.0  # sm_bytes_per_us: what the L2 gives an SM that has one tile
    steady: float = 93.9 / 99.0  # sm_bytes_per_us: what the L2 gives an SM that has several tiles
    arrival: float = 119.8 / 99.0  # sm_bytes_per_us: what may arrive in an SM, multicast or not
    shared: float = 1.4  # smem_bytes_per_us: what MMAs read and what arrives
    apart: float = 1.048  # factor: a cluster shares the operand of fewer rows, which the L2 holds anyway
    epilogue: float = 5.5e-5 * 99e3  # bytes at sm_bytes_per_us: an output element's end
    gate: float = 1.5  # factor: a gated result's epilogue to a plain one's
    single: float = 0.2  # share that a single box of results adds to an epilogue; half where groups take turns
    handed: float = 1.0 / 0.63  # exchange_us: split K's wait for another CTA's part of a tile
    latency: float = 1.1 / 0.63  # exchange_us: a load that comes back while the other stages are multiplied
    sharpness: float = 8.2  # exponent of the mean of a k-tile's four times
    hidden: float = 3.0  # exponent of the mean of the busiest SM's time and DRAM's


@dataclass(frozen=True)
class Prefetch:
    """Bytes of weights that a CTA of a dependent launch prefetches (H200, 2026-11-22)."""

    enough: int = 32 * 1024  # bytes from which the gain is whole
    too_much: int = 48 * 1024  # bytes from which it is lost again


@dataclass(frozen=True)
class NormCosts:
    """In front of a product, as a kernel or within: docs/notes/norm_linear.md (H200, 2026-11-22)."""

    kernel: float = 0.8 / 1.5  # launch_us: a norm's own kernel
    of_product: float = 0.02  # share of the product's time that its kernel adds
    token: float = 8.5  # cycles: a token in that kernel, up to ``tokens`` of them
    tokens: int = 64  # tokens: more of them take that kernel no longer
    within: float = 0.5 / 0.63  # exchange_us: the norm within the product, where it is hidden
    hidden: float = 0.55  # share of the product's time that weighing may take and be hidden


@dataclass(frozen=True)
class PackedSkinnyCosts:
    """Warp MMA of packed weights. Fitted with the next to 1,770 runs of 133 products (H200, 2026-11-30)."""

    beside: float = 2.8  # instructions: beside decoding, for eight weights of a lane
    column: float = 1.6  # instructions: beside these, for eight tokens
    fragment: float = 0.66  # instructions: for eight tokens, shared by a warp's strips
    issue: float = 0.81  # share of a scheduler's cycles that issue one
    few: float = 1.85  # share of their time that is added, divided by an SM's warps
    mma_cycles: float = 20.0  # cycles of a scheduler: eight weights of a lane and eight tokens
    mma_start: float = 14.0  # cycles of a scheduler, beyond 16 tokens: eight weights of a lane
    mma_more: float = 13.0  # cycles of a scheduler: and eight tokens (H200 as an A100 and an L40S, 2026-12-01)
    mma: float = 0.85  # mma_flops_per_us: what the SM's warps reach
    port: float = 0.57  # sm_bytes_per_us: what an SM loads
    latency: float = 1.26  # dram_latency_us: a load
    dram: float = 0.94  # dram_share: what the loads reach
    unit_us: float = 0.056  # us: between units
    end_us: float = 0.3  # us: a tile's end
    group_us: float = 0.058  # us: each further group of warps that shares K
    first: float = 0.68  # share of the first units' time at DRAM's rate that nothing hides
    shared: float = 3.0  # exchange_us: a shared tile
    sharpness: float = 8.0  # exponent of the mean of four times


@dataclass(frozen=True)
class PackedWarpgroupCosts:
    """Warpgroup MMA of packed weights."""

    beside: float = 2.05  # instructions: beside decoding, for eight weights
    scaled: float = 13.2  # instructions: to scale eight weights
    exact: float = 6.5  # instructions: to scale eight weights where scales have the activations' type
    issue: float = 0.56  # share of a scheduler's cycles that issue one
    alone: float = 0.11  # share of decoding that one group alone does not hide
    mma: float = 1.05  # warpgroup_flops_per_us: what a steady mainloop reaches
    port: float = 2.0  # sm_bytes_per_us: what an SM loads
    dram: float = 1.39  # dram_share: what the loads reach
    half_us: float = 0.0386  # us: each 64 of K
    k_tile_us: float = 0.0258  # us: each k-tile
    end_us: float = 0.05  # us: a group's end
    fixed: float = 1.53  # launch_us: a launch, with its first and last CTA
    shared: float = 4.8  # exchange_us: a shared tile, whatever its size
    parts: float = 9  # exchange_us: 128 x 128 partial sums of a shared tile
    met: float = 0.2  # exchange_us: the CTAs of a cluster that shares a tile, whatever its size
    sent: float = 6.2  # exchange_us: 128 x 128 partial sums that they send
    turn_us: float = 0.078  # us: groups that take k-tiles in turn add up
    latency: float = 1.46  # dram_latency_us: a load, which all stages but one hide
    sharpness: float = 3.9  # exponent of the mean of a k-tile's four times
    hidden: float = 2.35  # exponent of the mean of the busiest SM's time and DRAM's


@dataclass(frozen=True)
class DequantizeCosts:
    """A weight's way back; no sweep of it is recorded."""

    dram: float = 1.3  # factor of the time of the bytes at the datasheet's rate
    odd: float = 0.02  # share of that time: each tile of a program off two, and a launch that is not dependent


MULTISTAGE, SKINNY, SKINNY_WARPGROUP = MultistageCosts(), SkinnyCosts(), SkinnyWarpgroupCosts()
WARPGROUP, PREFETCH, NORM = WarpgroupCosts(), Prefetch(), NormCosts()
PACKED_SKINNY, PACKED_WARPGROUP, DEQUANTIZE = PackedSkinnyCosts(), PackedWarpgroupCosts(), DequantizeCosts()
# Experts' packed weights: fitted before (H200, 2026-11-26).
EXPERTS_SKINNY = replace(
    PACKED_SKINNY, beside=2.9, issue=0.63, few=2.1, mma_cycles=15.3, mma_start=0.0, mma_more=15.3, port=0.56,
    latency=1.65, dram=0.9, unit_us=0.048, end_us=0.45, group_us=0.063, first=0.0, shared=1.7,
)  # fmt: skip
EXPERTS_WARPGROUP = replace(
    PACKED_WARPGROUP, beside=2.39, issue=0.47, alone=0.15, port=1.8, dram=1.59, half_us=0.0323, k_tile_us=0.0215,
    end_us=0.044, fixed=1.71, latency=1.16, hidden=2.26,
)  # fmt: skip
# Groups of rows, and along the depth: what differs, fitted to 1800 runs of 95 products (H200, 2026-11-24; H100,
# 2026-11-25). Multistage has its own numbers.
GROUPED = replace(
    WARPGROUP, port=0.63, steady=1.0, shared=math.inf, epilogue=11.0, single=0.0, latency=1.39, sharpness=2.63
)
