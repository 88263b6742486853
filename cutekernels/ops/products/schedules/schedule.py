"""``DenseSchedule`` and ``PackedSchedule``: what ops know of a kernel body, one frozen object each. ``Product``: an op
with several. Rules that several schedules have are classes beside them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cutekernels import rates
from cutekernels.columns import among, cached, larger, smaller
from cutekernels.gpu import GpuSpec
from cutekernels.op import C, P
from cutekernels.ops.products.schedules.coefficients import MULTISTAGE, PREFETCH
from cutekernels.ops.products.schedules.packed_problem import QuantizedConfig, QuantizedProblem
from cutekernels.ops.products.schedules.problem import ELEMENT_BYTES, WIDEST, GemmConfig, GemmProblem
from cutekernels.ops.shared.cute_op import CutePart
from cutekernels.rules import Broken, Schedule, of_both, of_config, of_problem

GRID_AXIS = 65535  # most CTAs along y or z of a grid
MOST_PREFETCHED = 128 * 1024  # bytes that a CTA prefetches


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
    layout: str = "aligned"  # of a fused kernel's operands, which its rules of problems read

    @property
    def weighs(self) -> bool:
        """Whether tokens or weights pass through registers on their way to the MMA."""
        return self.gamma_bytes > 0 or self.squares


PLAIN = Extras()


def extras_of(p: GemmProblem) -> Extras:
    """Work that ``p`` asks of a body beside the product."""
    return Extras(source=p.c != "none", biased=p.bias != "none", half_accumulators=p.accumulate == "fp16")


class DenseSchedule(Schedule[GemmProblem, GemmConfig, Extras]):
    """Rules, model and body of one way to multiply by a dense weight. ``x``: what rules read beside the product."""

    config = GemmConfig
    in_memory: ClassVar[bool] = False
    """Whether the ``split_k`` CTAs of a tile share it through global memory."""

    @abstractmethod
    def smem(self, c: GemmConfig, extras: Extras = PLAIN) -> Any:
        """The shared memory of a CTA."""

    def threads(self, c: GemmConfig) -> int:
        """Threads of a CTA."""
        return 32 * c.warps

    @abstractmethod
    def body(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, extras: Extras = PLAIN) -> Any:
        """The kernel body with its parts."""

    def shares_tiles(self, c: GemmConfig) -> bool:
        """Whether CTAs share a tile through global memory."""
        return self.in_memory and c.split_k > 1

    def workspace_types(self, c: GemmConfig) -> list[Any]:
        """The body's last arguments as it is compiled."""
        return workspace_types() if self.shares_tiles(c) else []

    def workspace(self, p: GemmProblem, c: GemmConfig, extras: Extras = PLAIN) -> Callable[[], tuple[Any, ...]]:
        """A function that returns the last arguments of a launch on the current stream."""
        return tuple


class PackedSchedule(Schedule[QuantizedProblem, QuantizedConfig, Any]):
    """Likewise by a packed weight. ``x``: nothing, or of experts ``groups.Experts``; rules of configs read a class
    of problems in its place.
    """

    config = QuantizedConfig
    numbers: ClassVar[int]
    """How many numbers a launch takes behind its workspace."""

    def class_of(self, p: QuantizedProblem, x: Any) -> QuantizedProblem:
        return p.least

    def tokens(self, p: QuantizedProblem, x: Any) -> tuple[float, str]:
        """The tokens of a weight, on the mean of experts that have some, and of what they are, in words."""
        return (p.m, f"{p.m} tokens") if x is None else (x.mean, f"{x.rows} rows of {x.experts} experts")

    def tiles(self, p: QuantizedProblem, c: QuantizedConfig) -> int:
        """Tiles of out."""
        return -(-p.n // c.tile_n) * -(-p.m // c.tile_m)

    def counters(self, p: QuantizedProblem, c: QuantizedConfig, x: Any) -> int:
        """Counters of shared tiles."""
        return self.tiles(p, c)

    @abstractmethod
    def smem(self, p: QuantizedProblem, c: QuantizedConfig) -> Any:
        """The shared memory of a CTA."""

    @abstractmethod
    def grid(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any = None) -> tuple[int, ...]:
        """CTAs, and the numbers that a launch takes behind them."""

    @abstractmethod
    def body(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any = None) -> Any:
        """The kernel body with its parts."""

    def weights(self, p: QuantizedProblem, folded: bool) -> Any:
        """How weights are packed."""
        from cutekernels.backends import cute as backend
        from cutekernels.kernels.cute.parts.packed import PackedWeights

        dtype, scale = backend.type_of(p.dtype), backend.type_of(p.scale)
        return PackedWeights(p.code, dtype, scale, p.step, p.scale_rows, p.zeros, p.factors, folded)

    def workspace_types(self, c: QuantizedConfig) -> list[Any]:
        """Arguments of a body behind its operands, as it is compiled."""
        from cutlass import Int32

        return [*workspace_types(), *[Int32(1)] * self.numbers]

    def workspace(self, p: QuantizedProblem, c: QuantizedConfig, x: Any = None) -> Callable[[], tuple[Any, ...]]:
        """A function that returns them for a launch on the current stream."""
        from cutekernels.gpu import detect
        from cutekernels.ops.shared.per_stream import StreamWorkspace

        numbers, shared = self.grid(p, c, detect(), x), c.tile_m * c.tile_n if c.stream_k else 0
        memory = StreamWorkspace(max(4, numbers[0] * shared), max(4, self.counters(p, c, x) * c.stream_k)).get
        return lambda: (*memory(), *numbers)


def workspace_types() -> list[Any]:
    """Partial sums and counters of CTAs that share tiles through global memory, as a body is compiled."""
    import cutlass

    from cutekernels.backends import cute as backend

    return [backend.dense(cutlass.Float32, None, align=16), backend.dense(cutlass.Int32, None)]


class Product(CutePart[P, C]):
    """Rules, model and body of an op are those of the schedule that a config's ``body`` names. Put it before CuteOp."""

    schedules: ClassVar[Mapping[str, Any]]

    @abstractmethod
    def for_schedules(self, p: P) -> tuple[Any, Any]:
        """The problem that schedules read, and what they read beside it."""

    def why_not(self, p: P, c: Any, gpu: GpuSpec) -> str | None:
        one, x = self.for_schedules(p)
        return self.schedules[c.body].why_not(one, c, gpu, x)  # type: ignore[no-any-return]

    def valid(self, p: P, gpu: GpuSpec) -> Iterator[C]:
        one, x = self.for_schedules(p)
        for schedule in self.schedules.values():
            yield from schedule.valid(one, gpu, x)

    def estimate_us(self, p: P, c: Any, gpu: GpuSpec) -> Any:
        one, x = self.for_schedules(p)
        return self.schedules[c.body].estimate_us(one, c, gpu, x)

    def body(self, p: P, c: Any, gpu: GpuSpec) -> Any:
        one, x = self.for_schedules(p)
        return self.schedules[c.body].body(one, c, gpu, x)

    def further(self, p: P, c: Any) -> list[Any]:
        """A call's numbers, then the workspace."""
        return [*super().further(p, c), *self.schedules[c.body].workspace_types(c)]


# ---- rules that several schedules share -----------------------------------------------------------------


class Tokens(DenseSchedule):
    """The rules of schedules for ``x @ weight.T``, dense."""

    @abstractmethod
    def fitting_tiles(self, p: GemmProblem) -> Sequence[int]:
        """The values of ``tile_m`` that suit ``p``."""

    @of_problem
    def one_product(self, p: GemmProblem, gpu: GpuSpec, x: Extras) -> Broken:
        odd = (p.a_major, p.b_major, p.out_major) != ("k", "k", "n") or min(p.a_align, p.b_align) < WIDEST
        why = "{} takes a and b with K contiguous and 16-byte aligned rows, and out with N contiguous"
        yield odd, why, self.name
        several = p.batched or p.wide or p.accumulate != "fp32"
        yield several, "{} takes no batch, no 64-bit strides and accumulates in fp32", self.name

    @of_both
    def tile_of_tokens(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec, x: Extras) -> Broken:
        fitting = self.fitting_tiles(p)
        why = "tile_m={} does not suit {} tokens: take {}"
        yield among(c.tile_m, fitting) == 0, why, c.tile_m, p.m, " or ".join(map(str, fitting))


class Prefetches:
    """The rules of schedules that prefetch weights: a dependent launch that waits for its turn.

    Under programmatic dependent launch a CTA is placed while the kernel ahead still runs, and waits until that is done.
    Memory would be idle in between; instead, ``prefetch_l2`` k-tiles of W are brought to the L2 cache.
    """

    @of_config
    def dependent_launch(self, c: GemmConfig, gpu: GpuSpec, x: object) -> Broken:
        yield c.pdl & (not gpu.has_pdl), "{} has no programmatic dependent launch", gpu.name
        without = (c.prefetch_l2 > 0) & (c.pdl == 0)
        yield without, "prefetch_l2={} is for pdl=1: without, no time passes before a kernel's turn", c.prefetch_l2

    @of_config
    def prefetch(self, c: GemmConfig, gpu: GpuSpec, x: object) -> Broken:
        taken, why = prefetched_bytes(c), "prefetch_l2={} asks for {} bytes at once: at most {}"
        yield taken > MOST_PREFETCHED, why, c.prefetch_l2, taken, MOST_PREFETCHED


def prefetched_bytes(c: GemmConfig) -> int:
    """Bytes that a CTA prefetches."""
    return c.prefetch_l2 * c.tile_n * c.tile_k * ELEMENT_BYTES


# ---- terms of models ------------------------------------------------------------------------------------


def mma_share(warps: Any, rows: Any, columns: Any) -> Any:
    """The share of the MMAs' rate that ``warps`` of an SM reach, each with a tile of ``rows`` by ``columns``: a warp
    has one of the SM's tensor cores.
    """
    reuse = rows * columns / (rows + columns)  # multiplications per element of a fragment loaded
    return smaller(1.0, warps / GpuSpec.TENSOR_CORES_PER_SM) * reuse / (reuse + MULTISTAGE.reuse)


def resident_ctas(gpu: GpuSpec, *, warps: Any, registers: Any, smem: Any) -> Any:
    """CTAs that share an SM of ``gpu``; ``registers`` per thread, ``smem`` bytes per CTA."""
    registers = -(-smaller(registers, gpu.MAX_REGISTERS_PER_THREAD) // 8) * 8
    fit = smaller(
        gpu.runs_on.smem_per_sm_bytes // (smem + gpu.SMEM_RESERVED_BYTES),
        gpu.REGISTERS_PER_SM // (32 * warps * registers),
    )
    return larger(1, smaller(fit, gpu.runs_on.max_warps // warps))


@cached
def saved_us(c: GemmConfig, gpu: GpuSpec, most: float) -> float:
    """Gain of a launch whose CTAs are all placed at once, at most ``most`` of the time between launches; CTAs of later
    waves have nothing to wait for.
    """
    taken, enough, too_much = prefetched_bytes(c), PREFETCH.enough, PREFETCH.too_much
    gain = most * rates.of(gpu).dependent_us
    return gain * (smaller(taken, enough) / enough - larger(0, taken - too_much) / too_much)
