"""The numbers of attention's models, one table for each body. Each line has the unit, mostly a rate of ``rates.py``
that the number multiplies, and what it stands for. Where they are from: docs/notes/attention.md.
"""

from __future__ import annotations

from dataclasses import dataclass

EXPONENTS_PER_CLOCK = 16  # of an SM
EXPONENTS = 0.35  # share of the forward exponents' time that products do not hide
HIDDEN = 3.0  # exponent of the mean of the SMs' time and that of K and V read anew: 2958 us, 3063 seen (H100)
EAGER = 1.7  # factor of their time: sums are rescaled in every block
FEW = 1.6  # share of attention_delta's time that is lost, divided by the elements a thread has in flight
# Factors of the time by the order of tiles, even ones and uneven ones: the heavy ones had better not be the last; of
# even ones K and V had better stay in the L2. A pair of tiles is even.
ORDER = {
    False: {"rows": 1.0, "l2": 1.01, "heads": 1.02, "paired": 1.0},
    True: {"rows": 1.05, "l2": 1.05, "heads": 1.0, "paired": 1.0},
}


@dataclass(frozen=True)
class PrefillCosts:
    """Tiles that walk tiles, forward and backward. Fitted to 59 forward runs (H200, 2026-11-22)."""

    cta: float = 2.75 / 0.8  # dram_latency_us: the beginning and end of a CTA
    edge: float = 1.2  # share of the larger tile: what masks at an edge of the band cost; 1.7 as fitted, less 0.5
    fed: float = 0.83  # mma_flops_per_us: what a full SM of warps reaches
    dram: float = 0.9 / 0.92  # dram_share: what the loads reach
    unhidden: float = 0.05  # share of the shorter of two times that the longer does not hide
    tile: float = 0.17 / 0.08  # barrier_us: a walked tile, whatever its size
    one_stage: float = 1.05  # factor of ``tile`` with one stage: 1 % faster where timed, and spills (head dim 128)
    many: int = 8  # CTAs of an SM from which no wave is left half empty
    few_warps: float = 0.15  # power of an SM's warps, of CROWD_WARPS, by which forward's speed falls; once gemm's
    # Numbers of the gradients alone, not fitted to measurements of their own:
    wait: float = 0.4 / 0.08  # barrier_us: the next tile, with one stage
    slopes: float = 0.5  # share of the exponents' time that products do not hide
    crowd: float = 0.3  # power of an SM's warps, of CROWD_WARPS, by which its speed falls: they hide less

    CROWD_WARPS = 8


@dataclass(frozen=True)
class WarpgroupPrefillCosts:
    """Fitted to 252 runs of 27 problems (H200, 2026-11-24)."""

    block: tuple[float, ...] = (6.4, 1.4)  # barrier_us: a block of keys, whatever its size, with 1 stage and 2
    again: float = 3.9 / 0.8  # dram_latency_us: a further CTA of an SM
    next: float = 2.9 / 0.8  # dram_latency_us: a further tile of a CTA
    ahead: float = 2.4 / 0.8  # dram_latency_us: a further tile, whose queries load ahead
    port: float = 0.33  # sm_bytes_per_us: an SM's first loads, its last results, and the sums that a cluster exchanges
    no_turns: float = 1.02  # factor: groups that do not take turns
    dealt: float = 1.06  # factor: uneven tiles dealt out before the heavy ones are done
    odd: float = 1.04  # factor: blocks of keys that are no multiple of 64
    room: float = 0.95  # share of the SMs that clusters of four CTAs find at once: 32 took turns on 132


@dataclass(frozen=True)
class BackwardCosts:
    """Fitted on an H200 (2026-11-24)."""

    cta: float = 3.9 / 0.8  # dram_latency_us: a CTA
    next: float = 2.5 / 0.8  # dram_latency_us: a further tile of a CTA
    tile: float = 0.3 / 0.08  # barrier_us: a walked tile, whatever its size
    drawn: float = 1.04  # factor: tiles drawn from a counter
    tight: float = 1.01  # factor: two stages
    many: int = 8  # tiles of an SM above which its last one does not count
    late: float = 0.4  # share of the heaviest tile that is added where a band's heavy ones start last
    full: float = 2.0  # tiles for each SM; with fewer, a band's heavy ones start last


@dataclass(frozen=True)
class Decode:
    """Fitted to 778 runs of 44 problems (H200, 2026-11-24)."""

    port: float = 108 / 99  # sm_bytes_per_us: what an SM loads
    latency: float = 0.57 / 0.8  # dram_latency_us: a load
    block: float = 0.11 * 1700  # cycles: 16 keys of a warp
    float8: float = 0.7  # cycles: a padded column of e4m3 in 16 keys of a warp, a guess
    converted: float = 11.0  # cycles: the same column where the GPU has no instruction for it (H200 as an A100)
    ticket: float = 3.2 / 0.63  # exchange_us: splits leave their sums and draw a ticket
    partial: float = 0.3 / 0.63  # exchange_us: a split's sums are added up, divided by the warps
    message: float = 0.2 / 0.63  # exchange_us: the sums of each CTA of a cluster, which meets once
    clustered: float = 0.8  # share of the SMs that clusters of three CTAs and more fill: parts of a chip have a rest
    hidden: float = 0.12  # share of the shorter of two times that goes on behind the longer


MULTISTAGE, WARPGROUP, WARPGROUP_BACKWARD, DECODE = PrefillCosts(), WarpgroupPrefillCosts(), BackwardCosts(), Decode()
