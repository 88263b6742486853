"""What scale_rows is: problem, config, rules, mathematics. Torch and the DSL are imported where they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Work, exact, extent, knob, ladder, plain
from cutekernels.ops.shared import streaming, tile_rules
from cutekernels.ops.shared.cute_op import CuteOp
from cutekernels.ops.shared.dtypes import BYTES
from cutekernels.ops.shared.operands import Array, Matrix
from cutekernels.rules import Ruled, of_both

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.gpu import GpuSpec


@dataclass(frozen=True)
class ScaleRowsProblem(Problem):
    """``align``: elements that divide all addresses, pitches and rows."""

    rows: int = extent(ladder)
    cols: int = extent(exact)
    dtype: str = plain("bf16", "fp16", "fp32")
    align: int = plain(8, 4, 2, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cols % self.align:
            raise UnsupportedProblem(f"align={self.align} must divide cols={self.cols}: lower align")

    @property
    def vec(self) -> int:
        """Elements of one access."""
        return min(self.align, 16 // BYTES[self.dtype])


@dataclass(frozen=True)
class ScaleRowsConfig(Config):
    """What the tuner searches: columns of a CTA, and its warps."""

    block: int = knob(256, 512, 1024, 2048)
    warps: int = knob(1, 2, 4, 8)


class ScaleRows(Ruled, CuteOp[ScaleRowsProblem, ScaleRowsConfig]):
    """``out[r, c] = x[r, c] * scale[r]``, a block of a row per CTA."""

    name = "scale_rows"
    revision = 1
    suite = ("rows=16 cols=4096", "rows=333 cols=1001 align=1", "rows=57 cols=130 align=2 dtype=fp32")
    Problem = ScaleRowsProblem
    Config = ScaleRowsConfig
    # Operands, once: shapes, checks, torch's schema, samples, what the compiler sees, and strides follow.
    out = Matrix("rows", "cols", result=True, align="align", bits=64)
    x = Matrix("rows", "cols", align="align", bits=64)
    scale = Array("rows", dtype="fp32", strides=())

    def body(self, p: ScaleRowsProblem, c: ScaleRowsConfig, gpu: GpuSpec) -> Any:
        from cutekernels.kernels.cute.scale_rows import ScaleRows as Body

        return Body(c.block, 32 * c.warps, p.vec, gpu.has_pdl)

    def divisors(self, p: ScaleRowsProblem, c: ScaleRowsConfig) -> dict[str, int]:
        return {"cols": p.align}

    @of_both  # a rule of problems and configs
    def accesses(self, p: ScaleRowsProblem, c: ScaleRowsConfig, gpu: GpuSpec) -> str | None:
        return tile_rules.accesses(c.block, c.warps, p.vec)

    def estimate_us(self, p: ScaleRowsProblem, c: ScaleRowsConfig, gpu: GpuSpec) -> float:
        grid = p.rows, -(-p.cols // c.block), 1
        return streaming.estimate_us(gpu, self.work(p).bytes, grid, c.warps, c.block * BYTES[p.dtype])

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, scale = args
        return ((x.double() * scale.double()[:, None]).to(x.dtype),)

    def work(self, p: ScaleRowsProblem) -> Work:
        return Work(flops=float(p.rows * p.cols), bytes=self.bytes(p))


SCALE_ROWS = ScaleRows()
