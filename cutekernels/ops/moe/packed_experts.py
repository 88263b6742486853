"""Problems of ``quantized_grouped_gemm``, and its two schedules: rules, models, bodies, grids.

They are ``quantized_linear``'s, over tiles that the device finds. A rule reads the product of one
expert with all rows, and :class:`Experts` beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cutekernels.columns import among, larger, smaller
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.kernels.cute.parts.smem import WarpgroupPackedSmem, WarpgroupSmem
from cutekernels.op import Problem, extent, ladder, plain
from cutekernels.ops.gemm.epilogue import GATED
from cutekernels.ops.moe.coefficients import PACKED_GROUPED
from cutekernels.ops.moe.grouped_schedules import expected_hit, row_tiles
from cutekernels.ops.moe.permute import check_extents
from cutekernels.ops.quantized.packed_skinny import TILES_M, PackedSkinnySchedule
from cutekernels.ops.quantized.packed_warpgroup import ROWS, PackedWarpgroupSchedule
from cutekernels.ops.quantized.problem import QuantizedConfig, QuantizedProblem, check_scaling
from cutekernels.rules import Among, Broken, of_both, of_config, of_problem

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

CLAMPED = "swiglu_oai"  # gpt-oss's gate: (up + 1) * gate * sigmoid(alpha * gate), with both clamped
GATES = (GATED, CLAMPED)
_MOST_UNITS = 2**31 - 1
LEAST_STAGES = 3
"""Stages of warpgroup: with two its fastest took 1.17 to 1.37 times as long at all three problems where a tune had some
(H100, 2026-11-26)."""
TILE = 64  # rows of a packed tile


@dataclass(frozen=True)
class QuantizedGroupedProblem(Problem):
    """``rows`` of ``k`` in ``experts`` groups, times packed weights of ``(n, k)``, or ``(2 * n, k)`` where gated.

    The other fields are those of ``quantized_linear``.
    """

    rows: int = extent(ladder)
    n: int = extent()
    k: int = extent()
    experts: int = extent()
    dtype: str = plain("bf16", "fp16")
    code: str = plain("int4", "int8", "e4m3", "nf4", "e2m1")
    group: int = plain(128, 64, 32, 0, 16)
    scale_rows: int = plain(1, 128)
    scale: str = plain("fp16", "bf16", "fp32", "e8m0", "ue5m3")
    zeros: bool = plain(False, True)
    factors: bool = plain(False, True)
    bias: str = plain("none", "same", "fp32")
    activation: str = plain(*ACTIVATIONS, *GATES)
    out_align: int = plain(8, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scaling(self)
        check_extents(self.rows, self.experts)
        unit = max(TILE, self.scale_rows)
        if self.k % 8 or self.n % unit:
            raise UnsupportedProblem(
                f"experts take k={self.k} divisible by 8, and n={self.n} by {unit}, of a gate and of up each"
            )

    def bucket(self) -> QuantizedGroupedProblem:
        """One tuning serves every bias, activation and gate, both dtypes, and both 16-bit types of scales."""
        scale = "fp16" if self.scale == "bf16" else self.scale
        activation = GATED if self.gated else "none"
        return super().bucket().replace(bias="none", activation=activation, dtype="bf16", scale=scale, out_align=8)

    @property
    def gated(self) -> bool:
        return self.activation in GATES

    @property
    def weight_rows(self) -> int:
        """Rows of an expert's weight."""
        return 2 * self.n if self.gated else self.n

    @cached_property
    def one(self) -> QuantizedProblem:
        """The product of one expert with all rows."""
        return QuantizedProblem(
            self.rows, self.weight_rows, self.k, self.dtype, self.code, self.group, self.scale_rows, self.scale,
            self.zeros, self.factors, "none" if self.gated else self.bias, GATED if self.gated else self.activation,
            self.out_align,
        )  # fmt: skip

    @property
    def beside(self) -> Experts:
        return Experts(self.rows, self.experts)


@dataclass(frozen=True)
class Experts:
    """Questions of rules and model beside the product of one expert."""

    rows: int
    experts: int

    @property
    def hit(self) -> float:
        """Experts that the rows are expected to choose."""
        return expected_hit(self.rows, self.experts) if self.rows else 0.0

    @property
    def mean(self) -> float:
        """Rows of an expert that has some."""
        return self.rows / max(1.0, self.hit)

    def row_tiles(self, c: Any) -> Any:
        """Tiles of ``c`` that they are expected to fill."""
        return row_tiles(self.rows, self.experts, c, "tile_m")

    def most_row_tiles(self, tile: Any) -> Any:
        """Those that there can be at most, whatever the groups' ends."""
        return self.rows // tile + min(self.experts, self.rows)


class _Grouped:
    """Shared by both."""

    def places(self, p: QuantizedProblem, c: QuantizedConfig, x: Experts) -> Any:
        """Tiles of out that there can be at most."""
        return x.most_row_tiles(c.tile_m) * -(-p.n // c.tile_n)


class GroupedSkinnySchedule(_Grouped, PackedSkinnySchedule):
    """Skinny, over the rows of each expert."""

    @of_config
    def no_prefetch(self, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        yield c.prefetch_l2 > 0, "prefetch_l2={}: experts are known to the device alone; take 0", c.prefetch_l2

    @of_both
    def tile_of_tokens(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        fitting, why = self.fitting_tiles(x), "tile_m={} does not suit {} rows of {} experts: take {}"
        yield among(c.tile_m, fitting) == 0, why, c.tile_m, x.rows, x.experts, " or ".join(map(str, fitting))

    @of_both
    def waves(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        units = self.places(p, c, x) * -(-p.k // c.tile_k)
        why = "tile_m={} makes {} k-tiles, which 32 bits do not count: take larger tiles"
        yield units > _MOST_UNITS, why, c.tile_m, units

    def fitting_tiles(self, x: Experts) -> tuple[int, ...]:
        """Values of ``tile_m`` around the rows that an expert has on the mean, up to all rows."""
        least = next((i for i, tile in enumerate(TILES_M) if tile >= x.mean), len(TILES_M) - 1)
        return tuple(t for t in TILES_M[max(0, least - 1) : least + 2] if t // 2 < max(1, x.rows)) or TILES_M[:1]

    def usual(self, p: QuantizedProblem, gpu: GpuSpec, x: Any) -> Among:
        return {"tile_m": self.fitting_tiles(x), "pdl": (gpu.has_pdl,), "prefetch_l2": (0,)}

    def times_us(self, p: QuantizedProblem, c: Any, gpu: GpuSpec, x: Any) -> Any:
        count = x.row_tiles(c)
        tokens = smaller(c.tile_m, x.rows / larger(1, count))
        return self.tiles_us(p, c, gpu, count * -(-p.n // c.tile_n), tokens, x.hit * p.weight_bytes)

    def ctas(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Experts) -> int:
        """All that are resident, or as many as there can be tiles or k-tiles."""
        return self.dealt(max(1, self.places(p, c, x)), p, c, gpu)[0]

    def grouped_body(self, p: QuantizedGroupedProblem, c: QuantizedConfig) -> Any:
        from cutekernels.kernels.cute.products.skinny_packed_grouped import SkinnyPackedGrouped

        clamped = p.activation == CLAMPED
        return SkinnyPackedGrouped(**self.parts(p.one, c), prefetch_tiles=0, split=c.stream_k, clamped=clamped)


class GroupedWarpgroupSchedule(_Grouped, PackedWarpgroupSchedule):
    """Warpgroup, over the rows of each expert: whole tiles, of gates and up 64 rows each."""

    costs = PACKED_GROUPED
    waves = None  # type: ignore[assignment]
    cluster = None  # type: ignore[assignment]

    @of_problem
    def no_gate(self, p: QuantizedProblem, gpu: GpuSpec, x: Any) -> str | None:
        return None

    @of_config
    def whole_tiles(self, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        yield c.stream_k, "stream_k=1: warpgroup gives each CTA whole tiles of experts; take 0"
        yield c.split_k > 1, "split_k={}: warpgroup gives each CTA whole tiles of experts; take 1", c.split_k
        yield c.ctas_per_sm > 1, "ctas_per_sm={}: warpgroup has an SM to itself; take 1", c.ctas_per_sm

    @of_config
    def depth(self, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        why = "stages={} loads one k-tile while another is multiplied: take {} or more"
        yield c.stages < LEAST_STAGES, why, c.stages, LEAST_STAGES

    @of_config
    def two_groups(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        odd = (c.tile_n != 2 * ROWS) & x.gated
        yield odd, "tile_n={}: a gate has a group's 64 rows and another's 64 of up; take 128", c.tile_n

    @of_config
    def registers_under_way(self, c: QuantizedConfig, gpu: GpuSpec, x: QuantizedProblem) -> Broken:
        # Within a loop over tiles ptxas writes registers that products still read: docs/notes/quantized.md.
        read = (c.tile_k == 64) & ((c.scaled == "weights") | (x.group == 0))
        yield read, "tile_k=64 decodes into registers that products under way still read; take 128"

    @of_both
    def tile_of_tokens(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Any) -> Broken:
        own = (c.tile_m, x.rows, x.experts)
        yield c.tile_m > max(16, 2 * x.mean), "tile_m={} idles most of a tile over {} rows of {} experts", *own
        yield 4 * c.tile_m < min(x.mean, 64), "tile_m={} reads weights too often for {} rows of {} experts", *own

    def usual(self, p: QuantizedProblem, gpu: GpuSpec, x: Any) -> Among:
        return {"pdl": (True,), "stream_k": (False,), "split_k": (1,), "ctas_per_sm": (1,)}

    def smem(self, p: QuantizedProblem, c: QuantizedConfig) -> WarpgroupPackedSmem:
        exchanged = c.tile_m // 2 if p.gated else 0
        return replace(super().smem(p, c), places=WarpgroupSmem.PLACES, exchanged=exchanged)

    def times_us(self, p: QuantizedProblem, c: Any, gpu: GpuSpec, x: Any) -> Any:
        tiles = x.row_tiles(c) * -(-p.n // c.tile_n)
        steps = -(-tiles // gpu.sm_count) * -(-p.k // c.tile_k)
        moved = x.hit * p.weight_bytes + 2.0 * x.rows * (p.k + p.columns)
        return self.steps_us(p, c, gpu, steps, moved)

    def ctas(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec, x: Experts) -> int:
        """All that are resident, or as many as there can be tiles."""
        return int(max(1, min(gpu.sm_count, self.places(p, c, x))))

    def grouped_body(self, p: QuantizedGroupedProblem, c: QuantizedConfig) -> Any:
        from cutekernels.kernels.cute.parts.boxes import GroupBoxes
        from cutekernels.kernels.cute.parts.epilogue import Activation, Epilogue
        from cutekernels.kernels.cute.products.warpgroup_packed_grouped import WarpgroupPackedGrouped

        gate = Epilogue(Activation("silu_approx")) if p.gated else None
        plain = p.one.replace(activation="none" if p.gated else p.activation)
        results = GroupBoxes(**self.boxes(plain, c), swap_ab=True)
        return WarpgroupPackedGrouped(
            **self.parts(plain, c), results=results, split=False, gate=gate, clamped=p.activation == CLAMPED
        )


GROUPED_SKINNY, GROUPED_WARPGROUP = GroupedSkinnySchedule(), GroupedWarpgroupSchedule()
SCHEDULES: dict[str, GroupedSkinnySchedule | GroupedWarpgroupSchedule] = {
    schedule.name: schedule for schedule in (GROUPED_SKINNY, GROUPED_WARPGROUP)
}
