"""The fused kernels of ``rms_norm_linear`` and ``linear_silu_mul``: ``gemm``'s bodies, with rules of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cutekernels.columns import Columns
from cutekernels.ops.gemm.op import SCHEDULES
from cutekernels.ops.gemm.problem import MOST_TOKENS, WIDEST, GemmConfig, GemmProblem
from cutekernels.ops.gemm.schedule import Extras, GemmSchedule
from cutekernels.ops.norm_linear.problem import FUSED, NormLinearConfig, NormLinearProblem, span
from cutekernels.rules import EVERY, Among, Reads, Schedule, foreign, of_problem

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

GATE_ROWS = 8  # weight rows of the gate, then as many of up, in an MMA's 16


@lru_cache(maxsize=256)
def product_of(p: NormLinearProblem) -> GemmProblem:
    """The product as a fused body computes it; rows of out are aligned where N is."""
    return p.epilogue.replace(out_align=math.gcd(p.n, WIDEST))


@dataclass(frozen=True)
class Fused(Schedule[NormLinearProblem, NormLinearConfig, Extras]):
    """One kernel by the schedule ``inner``, whose rules of the product are this one's too. ``x``: ``p.extras``."""

    inner: GemmSchedule

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    # -- rules

    @of_problem
    def operands(self, p: NormLinearProblem, gpu: GpuSpec, x: Extras) -> str | None:
        if p.layout == "any":
            return "path=fused takes rows of x and weight 16-byte aligned, K contiguous, of less than 2^31 elements"
        return None

    @of_problem
    def depth(self, p: NormLinearProblem, gpu: GpuSpec, x: Extras) -> str | None:
        return "path=fused needs a K to sum over" if p.k == 0 else None

    @of_problem
    def gate_rows(self, p: NormLinearProblem, gpu: GpuSpec, x: Extras) -> str | None:
        if x.gated and p.n % GATE_ROWS:
            return f"path=fused takes the gate's rows {GATE_ROWS} at a time; there are {p.n}"
        return None

    def failures_of(self, reads: Reads, *read: Any) -> Iterator[str]:
        yield from super().failures_of(reads, *read)
        yield from self.inner.failures_of(reads, *map(_within, read))

    def unbroken(self, reads: Reads, c: Columns, *read: Any) -> Any:
        return super().unbroken(reads, c, *read) & self.inner.unbroken(reads, c, *map(_within, read))

    def foreign_knobs(self, c: NormLinearConfig) -> Iterator[str]:
        return foreign(c, ALLOWED[self.name])

    # -- choice

    def span(self, among: Among = EVERY) -> Columns:
        return span(self.name, among)

    def drawn(self, c: GemmConfig) -> NormLinearConfig:
        return NormLinearConfig.fused(c)

    def usual(self, p: NormLinearProblem, gpu: GpuSpec, x: Extras) -> Among:
        return self.inner.usual(product_of(p), gpu, x)

    def times_us(self, p: NormLinearProblem, c: Any, gpu: GpuSpec, x: Extras) -> Any:
        return self.inner.times_us(product_of(p), _within(c), gpu, x)

    def preference(self, p: NormLinearProblem, c: Any, x: Extras) -> tuple[Any, ...]:
        return self.inner.preference(product_of(p), c, x)


class FusedSkinnyWarpgroup(Fused):
    """A norm in front of the product."""

    @of_problem
    def norm_alone(self, p: NormLinearProblem, gpu: GpuSpec, x: Extras) -> str | None:
        if x.gated or not x.norm:
            return f"body={self.name} has a norm in front of the product and no gate behind it"
        return None

    @of_problem
    def range_of_fp16(self, p: NormLinearProblem, gpu: GpuSpec, x: Extras) -> str | None:
        if p.dtype == "fp16" and p.weight != "none":
            return f"body={self.name} scales x by norm_weight before rstd is known: it may leave the range of fp16"
        return None

    @of_problem
    def most_tokens(self, p: NormLinearProblem, gpu: GpuSpec, x: Extras) -> str | None:
        if p.m > MOST_TOKENS:
            return f"path=fused takes {MOST_TOKENS} tokens or fewer; there are {p.m}"
        return None

    @of_problem
    def whole_rows(self, p: NormLinearProblem, gpu: GpuSpec, x: Extras) -> str | None:
        if p.n % WIDEST or p.layout == "inputs":
            return f"body={self.name} stores {WIDEST} outputs at a time, aligned: n={p.n}, layout={p.layout}"
        return None

    def usual(self, p: NormLinearProblem, gpu: GpuSpec, x: Extras) -> Among:
        """More than two CTAs to a tile, whose times nobody measured behind a norm, are for the tuner."""
        tile = self.inner.fitting_tiles(product_of(p))[0]
        return {**super().usual(p, gpu, x), "tile_m": (tile,), "split_k": (1, 2)}

    def usually(self, p: NormLinearProblem, c: Columns, gpu: GpuSpec, x: Extras) -> Any:
        """Those that run all of their CTAs at once."""
        return -(-p.n // c.tile_n) * c.split_k <= gpu.sm_count


class FusedWarpgroup(Fused):
    """A gate behind the product."""

    @of_problem
    def gate_alone(self, p: NormLinearProblem, gpu: GpuSpec, x: Extras) -> str | None:
        if x.norm or not x.gated:
            return f"body={self.name} has a gate behind the product and no norm in front"
        return None

    @of_problem
    def whole_rows(self, p: NormLinearProblem, gpu: GpuSpec, x: Extras) -> str | None:
        if p.layout == "inputs":
            return f"body={self.name} stores {WIDEST} outputs at a time, aligned: layout={p.layout}"
        return None


ALLOWED = {
    body: {name: own.get(name, values[:1]) for name, values in NormLinearConfig.space().items() if name != "path"}
    for body, own in FUSED.items()
}
KINDS = {"skinny_warpgroup": FusedSkinnyWarpgroup, "warpgroup": FusedWarpgroup}
FUSED_SCHEDULES: dict[str, Fused] = {body: KINDS.get(body, Fused)(SCHEDULES[body]) for body in FUSED}


def _within(read: Any) -> Any:
    """Problem and config as the schedule of the product reads them."""
    if isinstance(read, NormLinearProblem):
        return product_of(read)
    return read.product if isinstance(read, NormLinearConfig) else read
