"""``GemmSchedule``: what ops know of a kernel body. One frozen object each: MULTISTAGE, SKINNY, SKINNY_WARPGROUP,
WARPGROUP.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels.columns import Columns, among
from cutekernels.kernels.cute.parts.smem import GemmSmem, SkinnySmem, SkinnyWarpgroupSmem, WarpgroupSmem
from cutekernels.ops.gemm.problem import BODIES, WIDEST, GemmConfig, GemmProblem, foreign, span
from cutekernels.rules import EVERY, Among, Broken, Schedule, of_both, of_problem

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

GRID_AXIS = 65535  # most CTAs along y or z of a grid


@dataclass(frozen=True, slots=True)
class Extras:
    """Work of a body beside the product."""

    norm: bool = False  # rstd multiplies each token
    gamma_bytes: int = 0  # an element of the norm's weight; 0 for none
    squares: bool = False  # rstd is computed from sums of squares; else it is given
    gated: bool = False  # two weight rows to an output, silu(gate) * up
    source: bool = False  # C is added
    biased: bool = False
    half_accumulators: bool = False  # fp16, two in a register

    @property
    def weighs(self) -> bool:
        """Whether tokens or weights pass through registers on their way to the MMA."""
        return self.gamma_bytes > 0 or self.squares


PLAIN, HALF_ACCUMULATORS = Extras(), Extras(half_accumulators=True)


def extras_of(p: GemmProblem) -> Extras:
    """Work that ``p`` asks of a body beside the product."""
    return _extras(p.accumulate == "fp16", p.c != "none", p.bias != "none")


@cache
def _extras(half_accumulators: bool, source: bool, biased: bool) -> Extras:
    return Extras(half_accumulators=half_accumulators, source=source, biased=biased)


class GemmSchedule(Schedule[GemmProblem, GemmConfig, Extras]):
    """Rules, model and body of one way to multiply. ``x``: PLAIN, or what the rules read of ``gemm``'s problem."""

    narrowed: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Values of knobs in place of :data:`BODIES`'s."""

    def foreign_knobs(self, c: GemmConfig) -> Iterator[str]:
        return foreign(c, **self.narrowed)

    def span(self, among: Among = EVERY) -> Columns:
        return span(self.name, self.narrowed | dict(among))

    def fitting_tiles(self, p: GemmProblem) -> Sequence[int]:
        """The values of ``tile_m`` that suit ``p``, all where any may."""
        return BODIES[self.name]["tile_m"]

    @abstractmethod
    def smem(
        self, c: GemmConfig, extras: Extras = PLAIN
    ) -> GemmSmem | SkinnySmem | SkinnyWarpgroupSmem | WarpgroupSmem:
        """The shared memory of a CTA."""

    def threads(self, c: GemmConfig) -> int:
        """Threads of a CTA."""
        return 32 * c.warps

    @abstractmethod
    def body(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        """The kernel body with its parts."""

    def shares_tiles(self, c: GemmConfig) -> bool:
        """Whether CTAs share a tile through global memory."""
        return False

    def workspace_types(self, c: GemmConfig, extras: Extras = PLAIN) -> list[Any]:
        """The body's last arguments as it is compiled: partial sums and tickets, where CTAs share a tile."""
        if not self.shares_tiles(c):
            return []
        import cutlass

        from cutekernels.backends import cute as backend

        return [backend.dense(cutlass.Float32, None, align=16), backend.dense(cutlass.Int32, None)]

    def workspace(self, p: GemmProblem, c: GemmConfig, extras: Extras = PLAIN) -> Callable[[], tuple[Any, ...]]:
        """A function that returns the last arguments of a launch on the current stream."""
        return tuple


class TokensSchedule(GemmSchedule):
    """One for ``x @ weight.T``."""

    @of_problem
    def layouts(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> str | None:
        """The majors and alignments."""
        if (p.a_major, p.b_major, p.out_major) != ("k", "k", "n") or min(p.a_align, p.b_align) < WIDEST:
            return f"{self.name} takes a and b with K contiguous and 16-byte aligned rows, and out with N contiguous"
        return None

    @of_problem
    def one_product(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> str | None:
        """Neither a batch nor large strides nor sums in fp16."""
        if p.batched or p.wide or p.accumulate != "fp32":
            return f"{self.name} takes no batch, no 64-bit strides and accumulates in fp32"
        return None

    @of_both
    def tile_of_tokens(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        fitting = self.fitting_tiles(p)
        why = "tile_m={} does not suit {} tokens: take {}"
        yield among(c.tile_m, fitting) == 0, why, c.tile_m, p.m, " or ".join(map(str, fitting))
