"""The numbers of the models of grouped products and of routing, as in ``ops/gemm/coefficients.py``. The multistage body
of grouped products has gemm's, packed ones those of ``ops/quantized``. Where they are from: docs/notes/moe.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cutekernels.ops.gemm.coefficients import WARPGROUP
from cutekernels.ops.quantized.coefficients import WARPGROUP as PACKED

# What differs from gemm's, fitted to 1800 runs of 95 products (H200, 2026-11-24; H100, 2026-11-25).
GROUPED = replace(
    WARPGROUP, port=0.63, steady=1.0, shared=math.inf, epilogue=11.0, single=0.0, latency=1.39, sharpness=2.63
)
# Packed products' before clusters, to which 49 problems of experts were held (H100, 2026-11-26).
PACKED_GROUPED = replace(
    PACKED, beside=1.8, scaled=11.3, exact=6.5, issue=0.41, alone=0.4, mma=1.01, port=0.93, dram=1.5, half_us=0.023,
    end_us=0.011, fixed=2.6, latency=0.0, sharpness=4.9, hidden=3.3,
)  # fmt: skip


@dataclass(frozen=True)
class Route:
    """Instructions of a warp, counted; nothing was fitted."""

    slots: int = 4  # warp instructions per clock of an SM
    dependent: float = 3.4  # clocks: from one instruction of a chain to the next, where nothing hides it
    occupied: int = 2  # of the warps that an SM holds, one in so many is there
    start: int = 100  # instructions: a program, whatever its size
    softmax: int = 20  # instructions: an element of a thread
    round: int = 3  # instructions: an element of a thread in a round that finds one expert
    rounds: int = 10  # instructions: a round that finds one expert, whatever its size
    compared: int = 8  # instructions: an element of a thread in a step of a sort
    gradient: int = 10  # instructions: an element of a thread in the gradient


@dataclass(frozen=True)
class Permute:
    """Clocks of one program; no sweep of it is recorded."""

    resident: int = 4  # programs of an SM
    count: int = 1000  # clocks: to count a block, whatever its size
    counted: int = 500  # clocks: to count four ids of a thread
    place: int = 1700  # clocks: to place a block, whatever its size; as many to read what all programs have counted
    placed: int = 2000  # clocks: to place four ids of a thread
    read: float = 1 / 8  # clocks: to read a count
    scattered: float = 0.7  # share of DRAM's rate that scattered stores reach


ROUTE, PERMUTE = Route(), Permute()
