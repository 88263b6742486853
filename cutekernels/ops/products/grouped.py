"""``grouped_gemm`` and the gradient of its weights: the declarations. The public function stands in ``grouped_api.py``.

A group is the rows of one expert, from ``offsets[e]`` to ``offsets[e + 1]``, as :func:`moe_permute` returns them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels import rates
from cutekernels.columns import round_off
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.op import Work, plain
from cutekernels.ops.activations.op import SILU_MUL, GluProblem
from cutekernels.ops.products.epilogue import bias_bytes, exact_product
from cutekernels.ops.products.groups import (
    SPREADS,
    ExpertRows,
    by_group,
    check_extents,
    draw_offsets,
    groups_of,
    other_rows,
    sampled_experts,
)
from cutekernels.ops.products.schedules.grouped import DEPTH_WARPGROUP, GROUPED_WARPGROUP
from cutekernels.ops.products.schedules.groups import expected_hit, row_tiles
from cutekernels.ops.products.schedules.multistage import MULTISTAGE
from cutekernels.ops.products.schedules.problem import ELEMENT_BYTES, GATED, GemmConfig, GemmProblem, since_revision_1
from cutekernels.ops.products.schedules.schedule import DenseSchedule, Extras, Product, extras_of
from cutekernels.ops.products.schedules.warpgroup import WARPGROUP
from cutekernels.ops.shared.cute_op import CuteOp
from cutekernels.ops.shared.operands import Array, Matrix, Named, Sizes
from cutekernels.ops.shared.tolerance import rounded_operand_depth

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

_GRID = 2**31 - 1


@dataclass(frozen=True)
class GroupedProblem(ExpertRows):
    """``weight``: its contiguous extent. ``align``: elements that divide addresses, pitches and contiguous extents."""

    dtype: str = plain("bf16", "fp16")
    weight: str = plain("k", "n")
    bias: str = plain("none", "same", "fp32")
    activation: str = plain(*ACTIVATIONS, GATED)
    align: int = plain(8, 4, 2, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n % self.align or self.k % self.align:
            fits = math.gcd(self.n, self.k, 8)
            raise UnsupportedProblem(f"align={self.align} must divide n={self.n} and k={self.k}: write align={fits}")

    def bucket(self) -> GroupedProblem:
        """One tuning serves every bias and activation but the gate, and both dtypes, as for ``gemm``."""
        activation = GATED if self.gated else "none"
        return super().bucket().replace(bias="none", activation=activation, dtype="bf16")

    @property
    def hit(self) -> int:
        """Experts that have rows, where rows spread evenly."""
        return max(1, min(self.experts, self.rows))


class GroupedProduct(Product[GroupedProblem, GemmConfig]):
    """Rules, choice and body of both: one product's rules and model are those of gemm's schedules."""

    Problem = GroupedProblem
    Config = GemmConfig
    in_place = False
    sample_kinds = len(SPREADS)
    along: ClassVar[str]
    schedules: ClassVar[Mapping[str, DenseSchedule]]

    def one(self, p: GroupedProblem, *, most: bool = False) -> GemmProblem:
        """The product of one group, or, with ``most``, the largest that one can be; all of them as a batch."""
        raise NotImplementedError

    def for_schedules(self, p: GroupedProblem) -> tuple[GemmProblem, Extras]:
        return _largest_product(self, p)

    @property
    def warpgroup(self) -> Any:
        """The schedule of warp groups."""
        return self.schedules[WARPGROUP.name]

    # -- rules and choice

    def why_not(self, p: GroupedProblem, c: GemmConfig, gpu: GpuSpec) -> str | None:
        if c.body not in self.schedules or c.persistent:
            return (
                f"{self.name} has the body {' or '.join(self.schedules)}, with persistent=0; got body={c.body} "
                f"persistent={c.persistent:d}"
            )
        if self.blocks(p, c) > _GRID:
            return f"{self.blocks(p, c)} tiles are more than a grid's {_GRID}: take larger tiles"
        return super().why_not(p, c, gpu)

    def blocks(self, p: GroupedProblem, c: GemmConfig) -> int:
        """Tiles that there can be at most: CTAs of a launch, or what a persistent grid's CTAs share."""
        raise NotImplementedError

    def valid(self, p: GroupedProblem, gpu: GpuSpec) -> Iterator[GemmConfig]:
        yield from (c for c in super().valid(p, gpu) if self.fits_grid(p, c))

    def fits_grid(self, p: GroupedProblem, c: Any) -> Any:
        """Whether a grid has a CTA for each tile of ``c``, which schedules do not ask; of columns a mask."""
        return (c.persistent == 0) & (self.blocks(p, c) <= _GRID)

    @rates.remember
    def default(self, p: GroupedProblem, gpu: GpuSpec) -> GemmConfig:
        """The model's best of the warpgroup body where that takes ``p``, else of the multistage one."""
        # The bodies' models do not compare; warp groups led at all sizes: docs/notes/moe.md#two-bodies (H200,
        # 2026-11-24). Of few columns there may be no tile of warp groups that suits them.
        found = self.best(p, gpu, self.warpgroup) or self.best(p, gpu, MULTISTAGE)
        assert found is not None, f"no config for {p} on {gpu.name}"
        return found

    def best(self, p: GroupedProblem, gpu: GpuSpec, schedule: DenseSchedule) -> GemmConfig | None:
        """The model's best of ``schedule``."""
        most, extras = self.for_schedules(p)
        if schedule.refusal(most, gpu, extras) is not None:
            return None
        c, kept = schedule.candidates(most, gpu, extras)
        kept &= self.fits_grid(p, c)
        return schedule.least(most, c, extras, kept, self.estimate_us(p, c, gpu))[1] if kept.any() else None

    def estimate_us(self, p: GroupedProblem, c: Any, gpu: GpuSpec) -> Any:
        """The model's time of a config, or of columns of one body's."""
        if c.body != MULTISTAGE.name:
            most, extras = self.for_schedules(p)
            return round_off(self.warpgroup.spread_us(most, p.experts, c, gpu, extras))
        gated_us = 0.0
        if p.gated:
            gate = GluProblem(rows=p.rows, cols=p.n, dtype=p.dtype, align=min(16, p.align * ELEMENT_BYTES))
            gated_us = SILU_MUL.estimate_us(gate, SILU_MUL.default(gate, gpu), gpu)
        return round_off(self.multistage_us(p, c, gpu) + gated_us)

    def multistage_us(self, p: GroupedProblem, c: Any, gpu: GpuSpec) -> Any:
        """The multistage body's model: that of a batch of equal products, one for each expert that has rows."""
        return MULTISTAGE.times_us(self.one(p), c, gpu)

    def extras(self, p: GroupedProblem) -> Extras:
        """Work of a body beside the product."""
        return replace(extras_of(self.one(p)), gated=p.gated)

    # -- kernel

    def body(self, p: GroupedProblem, c: GemmConfig, gpu: GpuSpec) -> Any:
        from cutekernels.kernels.cute.products.multistage_grouped import MultistageGrouped

        body = super().body(p, c, gpu)
        return MultistageGrouped(**vars(body), along=self.along) if c.body == MULTISTAGE.name else body

    def divisors(self, p: GroupedProblem, c: GemmConfig) -> dict[str, int]:
        return dict.fromkeys(("n", "k", "weight_rows"), p.align)

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        check_extents(sizes["rows"], sizes["experts"])

    def draw(self, p: GroupedProblem, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        import torch

        if name == "offsets":
            return draw_offsets(p, generator)
        if name != "weight":
            return None
        values: Tensor = torch.randn(shape, generator=generator, device=generator.device)
        return values.mul_(max(1, p.k) ** -0.5)

    def moved_experts(self, p: GroupedProblem) -> float:
        """Experts whose matrices a launch reads or writes, on the mean of its samples."""
        raise NotImplementedError

    def work(self, p: GroupedProblem) -> Work:
        experts = self.moved_experts(p)
        moved = p.rows * (p.n + p.k) + experts * p.weight_rows * p.k
        bias = bias_bytes(p.bias, experts * p.weight_rows)
        depth = float(p.k if self.along == "m" else max(1, p.rows))
        if p.gated:  # a chain rounds gate and up, as norm_linear's does its operand: the same grant
            depth = max(depth, rounded_operand_depth(p.dtype, gated=True))
        return Work(2.0 * p.rows * p.weight_rows * p.k, float(moved * ELEMENT_BYTES + bias), depth)


@lru_cache(256)
def _largest_product(op: GroupedProduct, p: GroupedProblem) -> tuple[GemmProblem, Extras]:
    """The largest product of a group, and what is done beside it: what the bodies' rules look at."""
    return op.one(p, most=True), op.extras(p)


class GroupedGemm(GroupedProduct, CuteOp[GroupedProblem, GemmConfig]):
    """A row's group has a matrix of ``weight_rows``, of which out has half as many columns where gated."""

    name = "grouped_gemm"
    revision = 2
    earlier = {1: since_revision_1}
    along = "m"
    schedules = {schedule.name: schedule for schedule in (MULTISTAGE, GROUPED_WARPGROUP)}
    suite = (
        "rows=8 n=1536 k=2048 experts=128",
        "rows=2048 n=1536 k=2048 experts=128",
        "rows=32768 n=2048 k=768 experts=128",
        "rows=8192 n=28672 k=4096 experts=8",
        "rows=1024 n=5760 k=2880 experts=32 bias=same",
        "rows=8192 n=14336 k=4096 experts=8 activation=silu_mul",
        "rows=300 n=200 k=136 experts=5 weight=n dtype=fp16 activation=silu",
        "rows=77 n=131 k=65 experts=3 bias=fp32 align=1",
    )
    out = Matrix("rows", "n", result=True, align="align", bits=64)
    x = Matrix("rows", "k", align="align", bits=64)
    weight = Array("experts", "weight_rows", "k", align="align", bits=64, major="weight")
    offsets = Array("experts+1", dtype="i32", strides=())
    bias = Array("experts", "weight_rows", dtype="bias", optional=True, align=1, bits=64)
    options = ("activation",)

    def one(self, p: GroupedProblem, *, most: bool = False) -> GemmProblem:
        m, batch = (p.rows, 1) if most else (-(-p.rows // p.hit), p.hit)
        return GemmProblem(
            m, p.weight_rows, p.k, batch, dtype=p.dtype, b_major=p.weight, bias=p.bias,
            activation="none" if p.gated else p.activation, a_align=p.align, b_align=p.align, out_align=p.align,
            batched=True, wide=True,
        )  # fmt: skip

    def multistage_us(self, p: GroupedProblem, c: Any, gpu: GpuSpec) -> Any:
        """With as many tiles, and as many experts hit, as rows that choose at random are expected to need."""
        moved = ELEMENT_BYTES * (p.rows * (p.k + p.weight_rows) + expected_hit(p.rows, p.experts) * p.weight_rows * p.k)
        tiles = row_tiles(p.rows, p.experts, c, "tile_m") * -(-p.weight_rows // c.tile_n)
        search_us = (1 + p.experts / 64) * rates.of(gpu).l2_latency_us  # 32 ends at a time, half of them at the mean
        return MULTISTAGE.tiles_us(self.one(p), c, tiles, moved, gpu, search_us)

    def moved_experts(self, p: GroupedProblem) -> float:
        return sampled_experts(p.rows, p.experts)

    def blocks(self, p: GroupedProblem, c: GemmConfig) -> int:
        return (p.rows // c.tile_m + min(p.experts + 2, p.rows)) * -(-p.weight_rows // c.tile_n)

    def bind(self, p: GroupedProblem, c: GemmConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        from cutekernels.ops.activations.api import silu_mul

        if not p.gated or c.body != MULTISTAGE.name:
            return kernel

        def chain_of_two(out: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> None:
            packed = x.new_empty((x.shape[0], weight.shape[1]))
            kernel(packed, x, weight, *rest)
            silu_mul(packed, out=out)

        return chain_of_two

    def same_extents(self, p: GroupedProblem, c: GemmConfig) -> dict[str, str]:
        return {} if p.gated and c.body != MULTISTAGE.name else {"n": "weight_rows"}

    def derive(self, sizes: Sizes, **options: Any) -> None:
        halves = 1 + (options["activation"] == GATED)
        rows = sizes.setdefault("weight_rows", halves * sizes.get("n", 0))
        if rows % halves:
            raise ValueError(f"{GATED} takes weight (E, 2 * N, K), gate and up; it has {rows} rows")
        sizes["n"] = rows // halves

    variant = other_rows

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, weight, offsets, bias = args
        activation = options["activation"]

        def product(e: int, rows: Tensor) -> Tensor:
            return exact_product(rows, weight[e], None if bias is None else bias[e], activation, x.dtype)

        return (by_group(x, offsets, weight.shape[1] // (1 + (activation == GATED)), product),)


class GroupedGemmWgrad(GroupedProduct, CuteOp[GroupedProblem, GemmConfig]):
    """The gradient of the groups' matrices, from that of a product's rows and from the rows."""

    name = "grouped_gemm_wgrad"
    revision = 2
    earlier = {1: since_revision_1}
    along = "k"
    schedules = {schedule.name: schedule for schedule in (MULTISTAGE, DEPTH_WARPGROUP)}
    suite = (
        "rows=2048 n=1536 k=2048 experts=128",
        "rows=32768 n=2048 k=768 experts=128",
        "rows=8192 n=28672 k=4096 experts=8",
        "rows=300 n=200 k=136 experts=5 dtype=fp16",
        "rows=77 n=131 k=65 experts=3 align=1",
    )
    dweight = Array("experts", "n", "k", result=True, align="align", bits=64)
    dout = Matrix("rows", "n", align="align", bits=64)
    x = Matrix("rows", "k", align="align", bits=64)
    offsets = Array("experts+1", dtype="i32", strides=())

    def one(self, p: GroupedProblem, *, most: bool = False) -> GemmProblem:
        depth, batch = (p.rows, 1) if most else (-(-p.rows // p.hit), p.experts)
        return GemmProblem(
            p.n, p.k, depth, batch, dtype=p.dtype, a_major="m", a_align=p.align, b_align=p.align, out_align=p.align,
            batched=True, wide=True,
        )  # fmt: skip

    def moved_experts(self, p: GroupedProblem) -> float:
        return float(p.experts)  # one without rows has its zeros written

    def blocks(self, p: GroupedProblem, c: GemmConfig) -> int:
        return p.experts * -(-p.n // c.tile_m) * -(-p.k // c.tile_n)

    def bind(self, p: GroupedProblem, c: GemmConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: kernel(*operands, None)

    def further(self, p: GroupedProblem, c: GemmConfig) -> list[None]:
        return [None]  # no bias

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        dout, x, offsets = args
        ends = groups_of(offsets, x.shape[0])
        dweight = x.new_zeros((len(ends), dout.shape[1], x.shape[1]))
        for e, (begin, end) in enumerate(ends):
            dweight[e] = (dout[begin:end].double().mT @ x[begin:end].double()).to(x.dtype)
        return (dweight,)


GROUPED_GEMM = GroupedGemm()
GROUPED_GEMM_WGRAD = GroupedGemmWgrad()
OPS = GROUPED_GEMM, GROUPED_GEMM_WGRAD
