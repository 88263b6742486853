"""Products with packed weights: ``quantized_linear``, and ``quantized_grouped_gemm`` over the rows of experts.

``out = activation(x @ dequantized(weight)^T + bias)``; the weights of experts lie one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.op import P, Work, plain
from cutekernels.ops.activations.op import SILU_MUL, GluProblem
from cutekernels.ops.products.dequantize import PackedPart, decode_codes, rows_of_scale, steps, weight_operands
from cutekernels.ops.products.epilogue import ALPHA, CLAMPED, GATES, LIMIT, bias_bytes, exact_product
from cutekernels.ops.products.groups import (
    SPREADS,
    ExpertRows,
    by_group,
    check_extents,
    draw_offsets,
    other_rows,
    sampled_experts,
)
from cutekernels.ops.products.schedules.groups import Experts
from cutekernels.ops.products.schedules.packed_problem import (
    PackedWeight,
    QuantizedConfig,
    QuantizedProblem,
    since_revision_1,
)
from cutekernels.ops.products.schedules.packed_skinny import GROUPED_PACKED_SKINNY, PACKED_SKINNY
from cutekernels.ops.products.schedules.packed_warpgroup import GROUPED_PACKED_WARPGROUP, PACKED_WARPGROUP
from cutekernels.ops.products.schedules.problem import ELEMENT_BYTES, GATED, WIDEST
from cutekernels.ops.products.schedules.schedule import PackedSchedule, Product
from cutekernels.ops.shared.cute_op import CuteOp
from cutekernels.ops.shared.operands import Array, Matrix, Named, Sizes, Vector
from cutekernels.ops.shared.tolerance import rounded_operand_depth
from cutekernels.quant.layout import TILE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec


@dataclass(frozen=True)
class QuantizedGroupedProblem(PackedWeight, ExpertRows):
    """Packed experts. ``out_align`` as of ``quantized_linear``."""

    bias: str = plain("none", "same", "fp32")
    activation: str = plain(*ACTIVATIONS, *GATES)
    out_align: int = plain(8, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
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

    @cached_property
    def one(self) -> QuantizedProblem:
        """The product of one expert with all rows."""
        return QuantizedProblem(
            m=self.rows,
            n=self.weight_rows,
            k=self.k,
            bias="none" if self.gated else self.bias,
            activation=GATED if self.gated else self.activation,
            out_align=self.out_align,
            **self.packing,
        )

    @property
    def beside(self) -> Experts:
        return Experts(self.rows, self.experts, self.activation == CLAMPED)


class PackedProduct(PackedPart[P, QuantizedConfig], Product[P, QuantizedConfig]):
    """The common part of both. Their problems have ``one``, the product of one weight, which schedules read, and what
    they read ``beside`` it.
    """

    Config = QuantizedConfig
    schedules: ClassVar[Mapping[str, PackedSchedule]]

    # -- rules and choice

    def for_schedules(self, p: Any) -> tuple[QuantizedProblem, Any]:
        return p.one, p.beside

    @rates.remember
    def default(self, p: Any, gpu: GpuSpec) -> QuantizedConfig:
        """The models' best, which compare; of one estimate the first schedule's config is preferred."""
        choices = [best for schedule in self.schedules.values() if (best := schedule.best(p.one, gpu, p.beside))]
        if not choices:
            raise AssertionError(f"no config for {p} on {gpu.name}")
        return min(choices, key=lambda choice: choice[0])[1]

    def estimate_us(self, p: Any, c: QuantizedConfig, gpu: GpuSpec) -> float:
        return float(super().estimate_us(p, c, gpu)) if p.one.m and p.one.n else 0.0

    # -- kernel

    def further(self, p: Any, c: QuantizedConfig) -> list[Any]:
        """The workspace, then a call's numbers."""
        found, count = super().further(p, c), len(self.scalar_types)
        return [*found[count:], *found[:count]]

    def bind(self, p: Any, c: QuantizedConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        workspace, count = self.schedules[c.body].workspace(p.one, c, p.beside), len(self.scalar_types)

        def launch(*args: Any) -> None:
            numbers = len(args) - count
            kernel(*args[:numbers], *workspace(), *args[numbers:])

        return launch

    # -- calls

    def facts(self, named: Named, sizes: Sizes) -> dict[str, Any]:
        if sizes["k"] % 8 or not sizes["k"]:
            raise UnsupportedProblem(f"K={sizes['k']} must be a multiple of 8: pad x with zeros")
        return super().facts(named, sizes)

    # -- mathematics

    def draw(self, p: Any, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        return draw_offsets(p, generator) if name == "offsets" else super().draw(p, name, shape, generator)

    def moved_weights(self, p: Any) -> float:
        """Weights that a launch reads."""
        return 1.0

    def work(self, p: Any) -> Work:
        one, weights = p.one, self.moved_weights(p)
        moved = weights * one.weight_bytes + ELEMENT_BYTES * one.m * (one.k + one.columns)
        # nf4's table and scaled weights are rounded to the activations' type.
        depth = max(float(one.k), rounded_operand_depth(p.dtype, gated=p.gated))
        return Work(2.0 * one.m * one.n * one.k, float(moved + weights * bias_bytes(p.bias, one.n)), depth)


class QuantizedLinear(PackedProduct[QuantizedProblem], CuteOp[QuantizedProblem, QuantizedConfig]):
    """x and a QuantizedWeight's tensors, with a bias; ``columns`` are half of ``n`` where gated."""

    name = "quantized_linear"
    revision = 2
    earlier = {1: since_revision_1}
    Problem = QuantizedProblem
    schedules = {schedule.name: schedule for schedule in (PACKED_SKINNY, PACKED_WARPGROUP)}
    suite = (
        "m=1 n=3584 k=3584",
        "m=16 n=3072 k=8192 code=e4m3 group=0 scale=fp32",
        "m=8 n=2048 k=2048 code=e4m3 scale_rows=128 scale=fp32 bias=same",
        "m=64 n=4096 k=4096 zeros=1",
        "m=200 n=3584 k=3584 code=int8 group=0 scale=bf16 activation=silu",
        "m=1024 n=4096 k=4096",
        "m=4 n=7168 k=3584 activation=silu_mul",
        "m=512 n=8192 k=4096 activation=silu_mul",
        "m=33 n=1000 k=1096 group=32 zeros=1 dtype=fp16 scale=bf16 bias=fp32",
        "m=5 n=129 k=200 group=64 code=nf4 scale=fp32 out_align=1",
        "m=300 n=1160 k=520 group=64 scale=bf16 activation=relu",
        "m=16 n=2880 k=2880 code=e2m1 group=32 scale=e8m0 bias=same",
        "m=16 n=4096 k=4096 code=e2m1 group=16 scale=ue5m3 factors=1",
    )
    out = Matrix("m", "columns", result=True, align="out_align")
    x = Matrix("m", "k", align=16)
    packed, scales, zeros, factors = weight_operands("n", "n/64")
    bias = Vector("columns", dtype="bias", strides=(), optional=True)
    options = ("code", "group", "n", "activation")

    def divisors(self, p: QuantizedProblem, c: QuantizedConfig) -> dict[str, int]:
        return {"columns": p.out_align, "k": 8}

    def derive(self, sizes: Sizes, **options: Any) -> None:
        rows = sizes["n"]
        gated = options["activation"] == GATED
        if gated and rows % 2:
            raise ValueError(f"activation={GATED} takes the gate's rows and as many of up's; there are {rows}")
        sizes |= {"columns": rows // (1 + gated), **steps(options)}

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        super().refuse(named, sizes, **options)
        if options["activation"] == GATED and named["bias"] is not None:
            raise UnsupportedProblem(f"activation={GATED} takes no bias: add it to a product without an activation")

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, *packed, bias = args
        weight = decode_codes(packed, options["code"], options["group"], options["n"], x.shape[1])
        return (exact_product(x, weight, bias, options["activation"], x.dtype),)


class QuantizedGroupedGemm(PackedProduct[QuantizedGroupedProblem], CuteOp[QuantizedGroupedProblem, QuantizedConfig]):
    """Rows in groups times the packed weight of all experts' rows, ``total``; ``alpha`` and ``limit`` are of
    ``swiglu_oai``.
    """

    name = "quantized_grouped_gemm"
    revision = 1
    Problem = QuantizedGroupedProblem
    schedules = {schedule.name: schedule for schedule in (GROUPED_PACKED_SKINNY, GROUPED_PACKED_WARPGROUP)}
    sample_kinds = len(SPREADS)
    suite = (
        "rows=4 n=2880 k=2880 experts=32 code=e2m1 group=32 scale=e8m0 activation=swiglu_oai bias=same",
        "rows=64 n=2880 k=2880 experts=32 code=e2m1 group=32 scale=e8m0 bias=same",
        "rows=1024 n=2880 k=2880 experts=32 code=e2m1 group=32 scale=e8m0 activation=swiglu_oai bias=same",
        "rows=8 n=768 k=2048 experts=128 activation=silu_mul",
        "rows=128 n=2048 k=768 experts=128",
        "rows=512 n=768 k=2048 experts=128 zeros=1 activation=silu_mul",
        "rows=32 n=14336 k=4096 experts=8 activation=silu_mul",
        "rows=128 n=2048 k=768 experts=128 code=e4m3 scale_rows=128 scale=fp32",
        "rows=77 n=192 k=200 experts=5 code=e4m3 group=0 scale=fp32 dtype=fp16 bias=fp32 activation=gelu",
        "rows=64 n=768 k=2048 experts=128 code=e2m1 group=16 scale=ue5m3 factors=1 activation=silu_mul",
        "rows=300 n=64 k=136 experts=40 group=32 zeros=1 scale=bf16 activation=silu_mul bias=same",
    )
    out = Matrix("rows", "n", result=True, align="out_align")
    x = Matrix("rows", "k", align=16)
    packed, scales, zeros, factors = weight_operands("total", "tiles")
    offsets = Array("experts+1", dtype="i32", strides=())
    bias = Array("experts", "weight_rows", dtype="bias", optional=True, align=1)
    options = ("code", "group", "activation")
    scalar_types = {"alpha": "fp32", "limit": "fp32"}
    scalar_samples = {"alpha": ALPHA, "limit": LIMIT}

    def divisors(self, p: QuantizedGroupedProblem, c: QuantizedConfig) -> dict[str, int]:
        return {"n": 8, "k": 8}

    def derive(self, sizes: Sizes, **options: Any) -> None:
        if "tiles" not in sizes:  # of a problem
            sizes["tiles"] = sizes["experts"] * sizes["n"] * (1 + (options["activation"] in GATES)) // TILE
        total, experts = sizes["tiles"] * TILE, sizes["experts"]
        if not experts or total % experts:
            raise ValueError(f"a stack of {total} rows is not of {experts} experts: pass offsets of the stack's")
        rows = total // experts
        sizes |= {"total": total, "weight_rows": rows}
        sizes |= {"n": rows // (1 + (options["activation"] in GATES)), **steps(options)}

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        super().refuse(named, sizes, **options)
        check_extents(sizes["rows"], sizes["experts"])
        n, gated = sizes["weight_rows"], options["activation"] in GATES
        scale_rows = rows_of_scale(named["scales"], sizes["total"])
        unit = max(TILE, scale_rows) * (1 + gated)
        if n % unit:
            raise UnsupportedProblem(
                f"packed experts have {unit} rows or a multiple{', half of them gates,' if gated else ''} so that "
                f"tiles of {TILE} and scales of {scale_rows} rows end with them; these have {n}: pad them, or quantize "
                "them with a scale to a row"
            )

    variant = other_rows

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, packed, scales, zeros, factors, offsets, bias, alpha, limit = args
        activation, total = options["activation"], packed.shape[0] * TILE
        scale_rows, n = rows_of_scale(scales, total), total // (offsets.shape[0] - 1)

        def product(e: int, rows: Tensor) -> Tensor:
            own = slice(e * n // scale_rows, (e + 1) * n // scale_rows)
            tables = [None if t is None else t[:, own].contiguous() for t in (scales, zeros, factors)]
            weight = packed[e * n // TILE : (e + 1) * n // TILE], *tables
            whole = decode_codes(weight, options["code"], options["group"], n, x.shape[1])
            return exact_product(rows, whole, None if bias is None else bias[e], activation, x.dtype, alpha, limit)

        return (by_group(x, offsets, n // 2 if activation in GATES else n, product),)

    def moved_weights(self, p: QuantizedGroupedProblem) -> float:
        return sampled_experts(p.rows, p.experts)


@rates.remember
def gate_pays(p: QuantizedProblem, gpu: GpuSpec) -> bool:
    """Whether a gate's product takes no longer, by the models, than the product and ``silu_mul`` in turn."""
    halves = GluProblem(p.m, p.columns, dtype=p.dtype, layout="rows", align=WIDEST * ELEMENT_BYTES)
    two: list[tuple[Any, Any]] = [(QUANTIZED_LINEAR, p.replace(activation="none")), (SILU_MUL, halves)]
    gated, *apart = [op.estimate_us(q, op.default(q, gpu), gpu) for op, q in [(QUANTIZED_LINEAR, p), *two]]
    return bool(gated <= sum(apart))


QUANTIZED_LINEAR = QuantizedLinear()
QUANTIZED_GROUPED_GEMM = QuantizedGroupedGemm()
OPS = QUANTIZED_LINEAR, QUANTIZED_GROUPED_GEMM
