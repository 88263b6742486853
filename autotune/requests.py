"""Requests of a runtime to its worker, and how each config ended: values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass

from cutekernels.conditions import Conditions
from cutekernels.gpu import GpuSpec

VENDOR = "vendor"
"""The name of the vendor's call among the outcomes of a final."""


@dataclass(frozen=True)
class Warm:
    """Request: make the CUDA context, which takes as long as a short measurement."""


@dataclass(frozen=True)
class Prepare:
    """Request: make the inputs and the reference of a problem."""

    op: str
    problem: str
    gpu: GpuSpec
    seed: int = 0


@dataclass(frozen=True)
class Measure:
    """Request: verify ``configs``, time the correct ones interleaved. ``race``: leader, contenders (``measure.py``).

    Search and final time alike. A ``final`` also times the vendor's call, as :data:`VENDOR`, and watches clock,
    temperature and power.
    """

    prepare: Prepare
    configs: tuple[str, ...]
    race: tuple[str, ...] = ()
    rounds: int = 20
    budget_us: float | None = None
    duty: float | None = None  # share of the time that the GPU is busy (``measure.py``); None: as the problem asks for
    final: bool = False


@dataclass(frozen=True)
class Load:
    """Request: launch the configs of ``measure`` once, verify them, and make the right ones ready to be timed."""

    measure: Measure


@dataclass(frozen=True)
class Outcome:
    """The result for one config. ``error`` over 1 means a wrong result, whose times are missing or do not count."""

    error: float
    us: tuple[float, ...] = ()
    conditions: Conditions | None = None

    @property
    def right(self) -> bool:
        return self.error <= 1 and bool(self.us)
