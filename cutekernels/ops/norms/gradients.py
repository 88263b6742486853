"""The gradients of the norms, and the column sums that their weights need.

A launch is two kernels: the first writes ``dx`` and, for weights and biases, one fp32 part per program; the second adds
the parts up, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Scalar, Work, exact, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.norms.rows import SUITE, N, NormConfig, NormOp, NormProblem, columns, rows
from cutekernels.ops.shared.dtypes import TYPES, WIDEST_BYTES
from cutekernels.ops.shared.operands import Array, Leads, Looks, Named, Sizes
from cutekernels.ops.shared.tile_rules import accesses_rule, elements_rule, idle_rule
from cutekernels.ops.shared.triton_op import TritonOp, TritonPart

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec


# ---- the second pass ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnSumProblem(Problem):
    """``parts`` rows of fp32 for each result, whose type is ``dtype``.

    ``align``: bytes that divide the address of the parts and a row's length.
    """

    parts: int = extent(ladder)
    cols: int = extent(exact)
    dtype: str = plain("fp32", "bf16", "fp16")
    align: int = plain(16, 8, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cols * 4 % self.align:
            raise UnsupportedProblem(f"align={self.align} divides a row of {self.cols} fp32; it does not: take less")

    @property
    def vec(self) -> int:
        """Elements in one access."""
        return self.align // 4


@dataclass(frozen=True)
class ColumnSumConfig(Config):
    """A program sums ``block_cols`` columns, ``block_parts`` rows at a time."""

    block_parts: int = knob(8, 32, 64, 128, 256)
    block_cols: int = knob(16, 32, 64, 128)
    warps: int = knob(2, 4, 8)


class ColumnSums(TritonPart[ColumnSumProblem, ColumnSumConfig]):
    """Sums of columns for one result or more: as many rows of ``parts`` for each."""

    revision = 1
    Problem = ColumnSumProblem
    Config = ColumnSumConfig
    sizes = {"parts": "i32", "cols": "i64"}
    constexprs = ("block_parts", "block_cols")
    in_place = False

    def derive(self, sizes: Sizes, **options: Any) -> None:
        lines = sizes.setdefault("lines", len(self.results) * sizes.get("parts", 0))
        sizes["parts"] = lines // len(self.results)
        if lines % len(self.results):
            raise ValueError("as many parts for each result")

    def layout(self, named: Named, sizes: Sizes, found: Mapping[str, Any]) -> dict[str, Scalar]:
        parts = named["parts"]
        assert parts is not None
        bits = WIDEST_BYTES | parts.data_ptr() | sizes["cols"] * 4  # results may lie anywhere: they are written once
        return {"align": bits & -bits}

    def divisible(self, p: ColumnSumProblem, c: ColumnSumConfig) -> dict[str, int]:
        return {"cols": p.vec}

    def grid(self, p: ColumnSumProblem, c: ColumnSumConfig) -> tuple[int, int, int]:
        return -(-p.cols // c.block_cols), len(self.results), 1

    def arrange(self, p: ColumnSumProblem, name: str, values: Tensor) -> Tensor:
        skew = p.align % WIDEST_BYTES // 4
        return values.new_empty(values.numel() + skew)[skew:].view(values.shape).copy_(values)

    def outputs(self, p: ColumnSumProblem, *args: Any) -> tuple[Tensor, ...]:
        return tuple([args[0].new_empty(p.cols, dtype=TYPES[p.dtype]) for _ in self.results])

    def reference(self, p: ColumnSumProblem, *args: Any) -> tuple[Tensor, ...]:
        return self.evaluate(*args, dtype=TYPES[p.dtype])

    def evaluate(self, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> tuple[Tensor, ...]:
        lines, cols = args[0].shape
        each = args[0].view(len(self.results), lines // len(self.results), cols)
        total = each.double().sum(1)
        return tuple(total.float() if dtype is None else total.to(dtype))

    accesses = accesses_rule("block_parts", "block_cols")
    most_sums = elements_rule("block_parts", "block_cols", most=64)
    no_idle_parts = idle_rule("block_parts", "parts", "{} parts", least=8)
    no_idle_columns = idle_rule("block_cols", "cols", "{} columns", least=32)

    def default(self, p: ColumnSumProblem, gpu: GpuSpec) -> ColumnSumConfig:
        rows = min(128, max(8, power_of_two(p.parts)))
        block_parts = max(v for v in (8, 32, 64, 128) if v <= rows)
        warps = max(w for w in (2, 4, 8) if w == 2 or block_parts * 32 >= 32 * w * 8)
        return ColumnSumConfig(block_parts, 32, warps)

    def estimate_us(self, p: ColumnSumProblem, c: ColumnSumConfig, gpu: GpuSpec) -> float:
        """A chain of round trips to the L2, or the bytes."""
        rate = rates.of(gpu)
        rounds = -(-p.parts // c.block_parts)
        waves = max(1.0, self.grid(p, c)[0] / (gpu.sm_count * max(1, gpu.max_warps // c.warps)))
        return rate.launch_us + max(rounds * rate.l2_latency_us * waves, self.bytes(p) / (gpu.dram_gbps * 1e3))

    def work(self, p: ColumnSumProblem) -> Work:
        return Work(float(len(self.results) * p.parts * p.cols), self.bytes(p), depth=float(p.parts))


class ColumnSum(ColumnSums, TritonOp[ColumnSumProblem, ColumnSumConfig]):
    """``out[c] = sum of parts[p, c] over p``, in an order that only the config decides."""

    name = "column_sum"
    suite = (
        "parts=132 cols=4096",
        "parts=264 cols=4096 dtype=bf16",
        "parts=7 cols=1001 align=4",
        "parts=528 cols=8192",
    )
    kernel = "norms.gradients:column_sum"
    out = Array("cols", strides=(), result=True, laid=False)
    parts = Array("lines", "cols", dtype="fp32", strides=(), laid=True)


class ColumnSumPair(ColumnSums, TritonOp[ColumnSumProblem, ColumnSumConfig]):
    """Two sums in one launch: the first half of the rows into ``out``, the second into ``more``."""

    name = "column_sum_pair"
    suite = ("parts=132 cols=4096", "parts=264 cols=4096 dtype=bf16", "parts=7 cols=1001 align=4")
    kernel = "norms.gradients:column_sum_pair"
    out = Array("cols", strides=(), result=True, laid=False)
    more = Array("cols", strides=(), result=True, laid=False)
    parts = Array("lines", "cols", dtype="fp32", strides=(), laid=True)


# ---- the gradients --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _BackwardProblem(NormProblem):
    dweight: bool = plain(True, False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dweight and self.weight == "none":
            raise UnsupportedProblem("there is no gradient of an absent weight: dweight must be 0 with weight=none")


@dataclass(frozen=True)
class RmsNormBackwardProblem(_BackwardProblem):
    """``dweight``: whether it is wanted. ``du``: whether ``x`` is a sum with a gradient of its own."""

    du: bool = plain(False, True)


@dataclass(frozen=True)
class LayerNormBackwardProblem(_BackwardProblem):
    """``dweight``: whether it is wanted. ``dbias``: of which type it is wanted."""

    dbias: str = plain("same", "none", "fp32")


class _NormBackward(NormOp[N]):
    """Both gradients' common part. ``dweight`` and ``dbias`` are empty where they are not wanted."""

    strides_over_tiles = True
    centred: ClassVar[bool]

    def result(self, name: str, named: Named, sizes: Sizes, leads: Leads, **options: Any) -> Looks:
        import torch

        shape, types = super().result(name, named, sizes, leads, **options)
        weight = named["weight"]
        if name == "dweight":
            return (weight.shape, (weight.dtype,)) if weight is not None and options["dweight"] else ((0,), types)
        if name == "dbias":
            shape = (0,) if options["dbias"] == "none" else shape[-1:] if weight is None else weight.shape
            return shape, (torch.float32,) if options["dbias"] == "fp32" else types
        return shape, types

    def problem(self, *operands: Tensor | None, **options: Any) -> N:
        weight = operands[len(self.results) + self.inputs.index("weight")]
        return super().problem(*operands, **options | {"dweight": bool(options["dweight"]) and weight is not None})

    def kind(self, p: N, name: str) -> str | None:
        found = super().kind(p, name)
        return "fp32" if found is not None and name in ("dweight", "dbias") else found  # parts

    def constants(self, p: N, c: NormConfig) -> dict[str, int | bool | str]:
        return super().constants(p, c) | {"CENTRED": self.centred}

    def chained(self, p: N, c: NormConfig, gpu: GpuSpec) -> list[tuple[TritonOp[Any, Any], ColumnSumProblem]]:
        """The sums that the second pass adds up."""
        if not p.rows * p.heads * p.cols:
            return []
        per_head = p.heads if p.per_head else 1
        lines, cols = self.grid(p, c, gpu.sm_count)[0] // per_head, per_head * p.cols
        kinds = [getattr(p, self.operands[name].dtype) for name in self.results[1:] if self.kind(p, name) is not None]
        kinds = ["fp32" if kind == "fp32" else p.dtype for kind in kinds]
        align = (bits := WIDEST_BYTES | cols * 4) & -bits
        if len(kinds) == 2 and kinds[0] == kinds[1]:
            return [(COLUMN_SUM_PAIR, ColumnSumProblem(lines, cols, kinds[0], align))]
        return [(COLUMN_SUM, ColumnSumProblem(lines, cols, kind, align)) for kind in dict.fromkeys(kinds)]

    def bind(self, p: N, c: NormConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        from cutekernels.ops.norms.passes import BothPasses

        n = len(self.results)

        def sums_of_nothing(*args: Any) -> None:
            for t in args[:n]:
                t.zero_()

        if not p.rows * p.heads * p.cols:
            return sums_of_nothing
        launch = super().bind(p, c, kernel)
        programs, _, _ = self.grid(p, c)
        summed = [i for i, name in enumerate(self.results) if i and self.kind(p, name) is not None]
        per_head = p.heads if p.per_head else 1
        shape = len(summed), programs // per_head, per_head * p.cols
        return BothPasses(launch, (COLUMN_SUM, COLUMN_SUM_PAIR), n, summed, shape)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:

        named = dict(zip((*self.inputs, *self.scalars), args, strict=True))
        d, v, weight, du = named["dy"].double(), named["x"].double(), named["weight"], named.get("du")
        if self.centred:
            v = v - v.mean(-1, keepdim=True)
        rstd = (v.square().mean(-1, keepdim=True) + named["eps"]).rsqrt()
        v = v * rstd
        g = d if weight is None else d * (weight.double() + named.get("weight_offset", 0.0))
        slope = v * (g * v).mean(-1, keepdim=True)
        dx = rstd * ((g - g.mean(-1, keepdim=True) if self.centred else g) - slope)
        found = [(dx if du is None else dx + du.double()).to(named["x"].dtype)]
        for name, terms in zip(self.results[1:], (d * v, d), strict=False):
            shape, types = self.result(name, named, {}, {}, **options)
            found.append((terms.new_zeros(shape) if 0 in shape else terms.reshape(-1, *shape).sum(0)).to(types[0]))
        return tuple(found)


class RmsNormBackward(_NormBackward[RmsNormBackwardProblem], TritonOp[RmsNormBackwardProblem, NormConfig]):
    """The gradient of RMSNorm: (dx, dweight), plus ``du`` where ``x`` is the ``u`` of ``add_rms_norm``."""

    name = "rms_norm_backward"
    revision = 1
    suite = (
        *SUITE,
        "rows=16 cols=3584",
        "rows=300 cols=128 heads=5 layout=heads",
        "rows=300 cols=64 heads=3 layout=heads per_head=1",
        "rows=2048 cols=4096 weight=fp32 du=1",
        "rows=2048 cols=8192 dweight=0",
        "rows=2048 cols=5120 dtype=fp32 weight=none dweight=0",
        "rows=133 cols=20000 dtype=fp16",
        "rows=2048 cols=8192",
        "rows=32768 cols=8192",
    )
    Problem = RmsNormBackwardProblem
    kernel = "norms.gradients:rms_norm_backward"
    dx = rows(result=True)
    dweight = columns("weight", result=True, given="dweight")
    dy = rows()
    x = rows()
    weight = columns("weight")
    du = rows(given="du")
    options = ("dweight",)
    scalar_types = {"eps": "fp32", "weight_offset": "fp32"}
    centred = False
    flops_per_element = 13


class LayerNormBackward(_NormBackward[LayerNormBackwardProblem], TritonOp[LayerNormBackwardProblem, NormConfig]):
    """The gradient of LayerNorm: (dx, dweight, dbias). ``dbias``, an option too, says of which type the bias is."""

    name = "layer_norm_backward"
    revision = 1
    suite = (
        *SUITE,
        "rows=300 cols=128 heads=5 layout=heads",
        "rows=2048 cols=768",
        "rows=2048 cols=4096 weight=fp32 dbias=fp32",
        "rows=2048 cols=5120 dtype=fp32 weight=none dweight=0 dbias=none",
        "rows=133 cols=20000 dtype=fp16",
        "rows=2048 cols=8192",
    )
    Problem = LayerNormBackwardProblem
    kernel = "norms.gradients:layer_norm_backward"
    dx = rows(result=True)
    dweight = columns("weight", result=True, given="dweight")
    dbias = columns("dbias", result=True)
    dy = rows()
    x = rows()
    weight = columns("weight")
    options = ("dweight", "dbias")
    scalar_types = {"eps": "fp32"}
    centred = True
    flops_per_element = 17


COLUMN_SUM = ColumnSum()
COLUMN_SUM_PAIR = ColumnSumPair()
RMS_NORM_BACKWARD = RmsNormBackward()
LAYER_NORM_BACKWARD = LayerNormBackward()
