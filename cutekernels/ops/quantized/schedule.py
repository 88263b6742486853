"""``QuantizedSchedule``: what ops know of a body for packed weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cutekernels.columns import Columns
from cutekernels.ops.quantized.problem import QuantizedConfig, QuantizedProblem, foreign, span
from cutekernels.rules import EVERY, Among, Schedule

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec


class QuantizedSchedule(Schedule[QuantizedProblem, QuantizedConfig, Any]):
    """Rules, model, body and grid. Nothing is asked beside a problem, but of experts (``moe/packed_experts.py``)."""

    def class_of(self, p: QuantizedProblem, x: Any) -> QuantizedProblem:
        return class_of(p)

    def foreign_knobs(self, c: QuantizedConfig) -> Iterator[str]:
        return foreign(c)

    def span(self, among: Among = EVERY) -> Columns:
        return span(self.name, among)

    def groups(self, c: QuantizedConfig) -> int:
        """Parts of a CTA that share a tile through memory apart."""
        return 1

    def tiles(self, p: QuantizedProblem, c: QuantizedConfig) -> int:
        """Tiles of out."""
        return -(-p.n // c.tile_n) * -(-p.m // c.tile_m)

    @abstractmethod
    def smem(self, p: QuantizedProblem, c: QuantizedConfig) -> Any:
        """The shared memory of a CTA."""

    @abstractmethod
    def grid(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> tuple[int, ...]:
        """CTAs, and the numbers that a launch takes behind them."""

    @abstractmethod
    def body(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> Any:
        """The kernel body with its parts."""


@lru_cache(maxsize=1024)
def class_of(p: QuantizedProblem) -> QuantizedProblem:
    """The least problem of those that differ from ``p`` in extents alone."""
    return p.replace(m=1, n=128, k=128)
