"""``Schedule``: what ops know of a kernel body. One frozen object each: MULTISTAGE, SKINNY, SKINNY_WARPGROUP,
WARPGROUP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels.kernels.cute.parts.smem import GemmSmem, SkinnySmem, SkinnyWarpgroupSmem, WarpgroupSmem
from cutekernels.ops.gemm.problem import WIDEST, GemmConfig, GemmProblem

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

GRID_AXIS = 65535  # most CTAs along y or z of a grid


@dataclass(frozen=True, slots=True)
class Extras:
    """What a body does beside the product."""

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
    """What ``p`` asks of a body beside the product."""
    return _extras(p.accumulate == "fp16", p.c != "none", p.bias != "none")


@cache
def _extras(half_accumulators: bool, source: bool, biased: bool) -> Extras:
    return Extras(half_accumulators=half_accumulators, source=source, biased=biased)


def summed(p: GemmProblem) -> Extras:
    """What of ``p`` decides which configs are fit, whatever the extents and the epilogue: the type of its sums."""
    return HALF_ACCUMULATORS if p.accumulate == "fp16" else PLAIN


class Schedule(ABC):
    """Rules, model and body of one way to multiply. ``extras`` are PLAIN for ``gemm``."""

    name: ClassVar[str]
    """Its value of ``GemmConfig.body``."""

    @abstractmethod
    def refused(self, p: GemmProblem, gpu: GpuSpec) -> Iterator[str]:
        """The rules that ``p`` breaks, whatever the config."""

    @abstractmethod
    def fitting_tiles(self, p: GemmProblem) -> Sequence[int]:
        """The values of ``tile_m`` that suit ``p``, all where any may: the rule that most configs break."""

    @abstractmethod
    def unfit(self, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Iterator[str]:
        """The rules that ``c`` breaks on ``gpu``, whatever the problem."""

    @abstractmethod
    def unsuited(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Iterator[str]:
        """The rules between ``p`` and ``c``."""

    def broken(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Iterator[str]:
        """All the rules that are broken."""
        yield from self.refused(p, gpu)
        yield from self.unfit(c, gpu, extras)
        yield from self.unsuited(p, c, gpu, extras)

    @abstractmethod
    def shortlist(self, p: GemmProblem, gpu: GpuSpec) -> Iterable[GemmConfig]:
        """The configs that the default is chosen among, without those that are unfit for ``gpu``."""

    @abstractmethod
    def estimate_us(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> float:
        """The model's time. Skinny's ranks its own configs only; the others' compare."""

    def preference(self, p: GemmProblem, c: GemmConfig, extras: Extras = PLAIN) -> tuple[object, ...]:
        """Sort key among configs of one estimate; the least is preferred."""
        return (str(c),)

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
        """The body's last arguments as it is compiled: fake tensors, scalars and None."""
        return []

    def workspace(self, p: GemmProblem, c: GemmConfig, extras: Extras = PLAIN) -> Callable[[], tuple[Any, ...]]:
        """A function that returns the last arguments of a launch on the current stream."""
        return tuple


def refused_layout(name: str, p: GemmProblem) -> Iterator[str]:
    """The rules of bodies for ``x @ weight.T`` that ``p`` breaks."""
    if (p.a_major, p.b_major, p.out_major) != ("k", "k", "n") or min(p.a_align, p.b_align) < WIDEST:
        yield f"{name} takes a and b with K contiguous and 16-byte aligned rows, and out with N contiguous"
    if p.batched or p.wide or p.accumulate != "fp32":
        yield f"{name} takes no batch, no 64-bit strides and accumulates in fp32"


def vector_type(kind: Any, align: int) -> Any:
    """A fake vector of a length known at the launch; ``align`` in bytes."""
    import cutlass
    from cutlass.cute.runtime import make_fake_tensor

    return make_fake_tensor(kind, (cutlass.cute.sym_int(),), stride=(1,), assumed_align=align)
