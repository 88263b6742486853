"""Declarations of ``rms_norm``, ``add_rms_norm`` and ``layer_norm``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels.op import knob, plain
from cutekernels.ops.norms.rows import MAX_PROGRAMS, SUITE, NormConfig, NormOp, NormProblem, columns, rows, wide
from cutekernels.ops.shared.tile_rules import idle_rule
from cutekernels.ops.shared.triton_op import TritonOp
from cutekernels.ops.shared.two_bodies import BODIES, CuteBody, TwoBodies
from cutekernels.rules import of_both, of_problem

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

_MOST_ELEMENTS = 32  # of a thread: x, the weight and the result stay in registers
_LEAST_THREADS = 8  # of a row


@dataclass(frozen=True)
class RmsNormProblem(NormProblem):
    """``rounding``: whether ``x * rstd`` is rounded before it is multiplied by the weight. ``shifted``: whether
    ``weight_offset`` is added to that; 0 needs no addition.
    """

    rounding: str = plain("once", "huggingface")
    shifted: bool = plain(False, True)

    def bucket(self) -> RmsNormProblem:
        """One tuning serves weights with and without an offset."""
        return super().bucket().replace(shifted=False)


@dataclass(frozen=True)
class RmsNormConfig(NormConfig):
    """``body``: in Triton, or in CuTe, which takes rows whole and one tile a program."""

    body: str = knob(*BODIES, added=True)


@dataclass(frozen=True)
class LayerNormProblem(NormProblem):
    """``bias``: of which type, as ``weight``."""

    bias: str = plain("same", "none", "fp32")


class RmsNorms(NormOp[RmsNormProblem]):
    """What both norms by the root of the mean square share."""

    Problem = RmsNormProblem
    wide_row = 2048
    options = ("rounding", "shifted")
    constexprs = (*NormOp.constexprs, "shifted")
    scalar_types = {"eps": "fp32", "weight_offset": "fp32"}

    def constants(self, p: RmsNormProblem, c: NormConfig) -> dict[str, int | bool | str]:
        return super().constants(p, c) | {"ROUND_TWICE": p.rounding == "huggingface"}

    def sample(self, p: RmsNormProblem, device: str, seed: int) -> tuple[Any, ...]:
        *args, offset = super().sample(p, device, seed)
        return (*args, offset if p.shifted else 0.0)

    def normalise(self, x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> Tensor:
        v = wide(x)
        y = v * (v.square().mean(-1, keepdim=True) + eps).rsqrt()
        if rounding == "huggingface":
            y = y.to(x.dtype).to(v.dtype)
        return (y if weight is None else y * (weight.to(v.dtype) + offset)).to(x.dtype)


class CuteRmsNorm(CuteBody[NormProblem, NormConfig]):
    """``block_rows`` whole rows for each CTA of ``warps`` warps."""

    module = "rms_norm"
    knobs = {
        "block_rows": (1, 2, 4, 8, 16, 32),
        "block_cols": (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        "warps": (1, 2, 4, 8, 16),
    }
    shapes = {name: {"row": "rows", "col": "cols"} for name in "yx"} | {"weight": {"": "cols"}}

    def body(self, kernels: Any, p: Any, c: NormConfig, gpu: GpuSpec) -> Any:
        return kernels.RmsNorm(
            rows=c.block_rows,
            width=c.block_cols,
            threads=32 * c.warps,
            vec=p.vec,
            shifted=p.shifted,
            round_twice=p.rounding == "huggingface",
            dependent=gpu.has_pdl,
        )

    @of_problem
    def one_stride_of_rows(self, p: NormProblem, gpu: GpuSpec) -> str | None:
        if p.layout != "heads":
            return None
        return "body=cute takes rows that one stride walks and one weight for all; layout is heads: take body=triton"

    @of_problem
    def most_rows(self, p: NormProblem, gpu: GpuSpec) -> str | None:
        if p.rows <= MAX_PROGRAMS:
            return None
        return f"body=cute takes {MAX_PROGRAMS} rows at most; there are {p.rows}: take body=triton"

    @of_both
    def whole_rows(self, p: NormProblem, c: NormConfig, gpu: GpuSpec) -> str | None:
        if c.block_cols == p.width:
            return None
        return f"body=cute takes rows whole, those of {p.cols} by block_cols={p.width}; it is {c.block_cols}"

    @of_both
    def elements_of_a_thread(self, p: NormProblem, c: NormConfig, gpu: GpuSpec) -> str | None:
        each = c.block_rows * c.block_cols // (32 * c.warps)
        if p.vec <= each <= _MOST_ELEMENTS:
            return None
        return f"body=cute gives a thread {p.vec} to {_MOST_ELEMENTS} elements; {each} are block_rows={c.block_rows}"

    @of_both
    def threads_of_a_row(self, p: NormProblem, c: NormConfig, gpu: GpuSpec) -> str | None:
        each = 32 * c.warps // c.block_rows
        if each >= min(_LEAST_THREADS, c.block_cols // p.vec):
            return None
        return f"a row of body=cute has {_LEAST_THREADS} threads or all it has accesses for; {each} are too few"

    no_idle_rows = idle_rule("block_rows", "rows", "{} rows")


class RmsNorm(TwoBodies[RmsNormProblem, NormConfig], RmsNorms, TritonOp[RmsNormProblem, NormConfig]):
    """``y = x * rstd * (weight + weight_offset)``."""

    name = "rms_norm"
    revision = 1
    # Chunks beat whole rows at 32768 rows: docs/notes/norms.md#chunks (H200, 2026-11-22).
    chunks: ClassVar[Mapping[int, tuple[int, int]]] = {4096: (2048, 8), 8192: (4096, 16)}
    # Few warps walk a wide tile that is padding by a quarter: docs/notes/norms.md#padded-rows (H100, H200, 2026-11-27).
    padded: ClassVar[int] = 4
    suite = (
        *SUITE,
        "rows=16 cols=3584",
        "rows=300 cols=128 heads=5 layout=heads",
        "rows=300 cols=64 heads=3 layout=heads per_head=1",
        "rows=2048 cols=896",
        "rows=2048 cols=3584",
        "rows=2048 cols=4096 weight=fp32 shifted=1",
        "rows=2048 cols=5120 dtype=fp32 weight=none",
        "rows=33 cols=20000 dtype=fp16",
        "rows=8192 cols=6144 dtype=fp16",
    )
    Config = RmsNormConfig
    kernel = "norms.forward:rms_norm"
    cute = CuteRmsNorm()
    y = rows(result=True)
    x = rows()
    weight = columns("weight")
    flops_per_element = 4

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, weight, eps, offset = args
        return (self.normalise(x, weight, eps, offset if options["shifted"] else 0.0, options["rounding"]),)


class AddRmsNorm(RmsNorms, TritonOp[RmsNormProblem, NormConfig]):
    """``u = x + residual`` and its RMSNorm ``y``."""

    name = "add_rms_norm"
    revision = 1
    # Chunks beat whole rows at 32768 rows: docs/notes/norms.md#chunks (H200, 2026-11-21).
    chunks: ClassVar[Mapping[int, tuple[int, int]]] = {4096: (2048, 8), 8192: (4096, 16)}
    # One narrow row to four warps beats two: docs/notes/norms.md#narrow-rows (H200, 2026-11-22).
    summands = 2
    suite = (
        *SUITE,
        "rows=16 cols=3584",
        "rows=2048 cols=3584",
        "rows=2048 cols=5120 dtype=fp32",
        "rows=33 cols=20000 dtype=fp16",
    )
    kernel = "norms.forward:add_rms_norm"
    y = rows(result=True)
    u = rows(result=True)
    x = rows()
    residual = rows()
    weight = columns("weight")
    flops_per_element = 5

    def constants(self, p: RmsNormProblem, c: NormConfig) -> dict[str, int | bool | str]:
        return super().constants(p, c) | {"RESIDUAL": True}

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, residual, weight, eps, offset = args
        u = (wide(x) + wide(residual)).to(x.dtype)
        return self.normalise(u, weight, eps, offset if options["shifted"] else 0.0, options["rounding"]), u


class LayerNorm(NormOp[LayerNormProblem], TritonOp[LayerNormProblem, NormConfig]):
    """``y = (x - mean) * rstd * weight + bias``."""

    name = "layer_norm"
    revision = 1
    suite = (
        *SUITE,
        "rows=16 cols=3584",
        "rows=300 cols=128 heads=5 layout=heads",
        "rows=2048 cols=768",
        "rows=2048 cols=4096 weight=fp32 bias=fp32",
        "rows=2048 cols=5120 dtype=fp32 weight=none bias=none",
        "rows=33 cols=20000 dtype=fp16 bias=none",
    )
    Problem = LayerNormProblem
    wide_row = 2048
    kernel = "norms.forward:layer_norm"
    y = rows(result=True)
    x = rows()
    weight = columns("weight")
    bias = columns("bias")
    scalar_types = {"eps": "fp32"}
    # Pairs of wide rows beat single ones at 32768 rows: docs/notes/norms.md#pairs (H200, 2026-11-21).
    paired = True
    flops_per_element = 7

    def constants(self, p: LayerNormProblem, c: NormConfig) -> dict[str, int | bool | str]:
        return super().constants(p, c) | {"CENTRED": True}

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, weight, bias, eps = args
        v = wide(x)
        v = v - v.mean(-1, keepdim=True)
        y = v * (v.square().mean(-1, keepdim=True) + eps).rsqrt()
        y = y if weight is None else y * weight.to(v.dtype)
        return ((y if bias is None else y + bias.to(v.dtype)).to(x.dtype),)


RMS_NORM = RmsNorm()
ADD_RMS_NORM = AddRmsNorm()
LAYER_NORM = LayerNorm()
