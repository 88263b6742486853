"""The numbers of the models of packed products, one table for each body. Each line has the unit, mostly a rate of
``rates.py`` that the number multiplies, and what it stands for; ``problem.py`` has the instructions that decode eight
weights, by code. Where they are from: docs/notes/quantized.md#models (H200, 2026-11-26).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PackedSkinnyCosts:
    """Warp MMA."""

    beside: float = 2.9  # instructions: beside decoding, for eight weights of a lane
    column: float = 1.6  # instructions: beside these, for eight tokens
    fragment: float = 0.66  # instructions: for eight tokens, shared by a warp's strips
    issue: float = 0.63  # share of a scheduler's cycles that issue one
    few: float = 2.1  # share of their time that is added, divided by an SM's warps
    mma_cycles: float = 15.3  # cycles of a scheduler: eight weights of a lane and eight tokens
    mma: float = 0.85  # mma_flops_per_us: what the SM's warps reach
    port: float = 0.56  # sm_bytes_per_us: what an SM loads
    latency: float = 1.65  # dram_latency_us: a load
    dram: float = 0.9  # dram_share: what the loads reach
    unit_us: float = 0.048  # us: between units
    end_us: float = 0.45  # us: a tile's end
    group_us: float = 0.063  # us: each further group of warps that shares K
    shared: float = 1.7  # exchange_us: a shared tile
    sharpness: float = 8.0  # exponent of the mean of four times


@dataclass(frozen=True)
class PackedWarpgroupCosts:
    """Warpgroup MMA."""

    beside: float = 2.39  # instructions: beside decoding, for eight weights
    scaled: float = 13.2  # instructions: to scale eight weights
    exact: float = 6.5  # instructions: to scale eight weights where scales have the activations' type
    issue: float = 0.58  # share of a scheduler's cycles that issue one
    alone: float = 0.15  # share of decoding that one group alone does not hide
    mma: float = 1.05  # warpgroup_flops_per_us: what a steady mainloop reaches
    port: float = 1.8  # sm_bytes_per_us: what an SM loads
    dram: float = 1.59  # dram_share: what the loads reach
    half_us: float = 0.043  # us: each 64 of K
    end_us: float = 0.044  # us: a group's end
    fixed: float = 1.71  # launch_us: a launch, with its first and last CTA
    shared: float = 3.7  # exchange_us: a shared tile, whatever its size
    parts: float = 9  # exchange_us: 128 x 128 partial sums of a shared tile
    met: float = 0.2  # exchange_us: the CTAs of a cluster that shares a tile, whatever its size
    sent: float = 4  # exchange_us: 128 x 128 partial sums that they send
    latency: float = 1.16  # dram_latency_us: a load, which all stages but one hide
    sharpness: float = 3.9  # exponent of the mean of a k-tile's four times
    hidden: float = 2.26  # exponent of the mean of the busiest SM's time and DRAM's


@dataclass(frozen=True)
class DequantizeCosts:
    """A weight's way back; no sweep of it is recorded."""

    dram: float = 1.3  # factor of the time of the bytes at the datasheet's rate
    odd: float = 0.02  # share of that time: each tile of a program off two, and a launch that is not dependent


SKINNY, WARPGROUP, DEQUANTIZE = PackedSkinnyCosts(), PackedWarpgroupCosts(), DequantizeCosts()
