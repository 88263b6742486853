"""What softcap is: problem, config, rules, mathematics. Nothing here imports torch before it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutekernels.op import Config, Problem, Work, exact, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.shared import streaming, tile_rules
from cutekernels.ops.shared.laid_out import LaidOut
from cutekernels.ops.shared.operands import Matrix
from cutekernels.ops.shared.triton_op import TritonOp
from cutekernels.rules import of_both

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.gpu import GpuSpec


@dataclass(frozen=True)
class SoftcapProblem(LaidOut, Problem):
    """What is asked: extents bucketed for tuning, and properties that a compiled kernel depends on."""

    rows: int = extent(ladder)
    cols: int = extent(exact)
    dtype: str = plain("bf16", "fp16", "fp32")
    layout: str = plain("rows", "strided")
    align: int = plain(16, 8, 4, 2)
    aligns_rows = "cols"  # a row ends on a multiple of align too: without this, masked accesses are of single elements


@dataclass(frozen=True)
class SoftcapConfig(Config):
    """What the tuner searches: columns of a block, and warps."""

    block: int = knob(256, 512, 1024, 2048)
    warps: int = knob(1, 2, 4, 8)


class Softcap(TritonOp[SoftcapProblem, SoftcapConfig]):
    """``out = cap * tanh(x / cap)``, one block of a row per program."""

    name = "softcap"
    revision = 1
    suite = (
        "rows=16 cols=4096",
        "rows=333 cols=1001 align=2",
        "rows=57 cols=130 layout=strided",
        "rows=2048 cols=4096 dtype=fp32",
    )
    Problem = SoftcapProblem
    Config = SoftcapConfig
    kernel = "softcap:softcap"
    # Operands, once: shapes, checks, torch's schema, samples, the kernel's signature and its strides follow.
    out = Matrix("*rows", "cols", result=True)
    x = Matrix("*rows", "cols")
    sizes = {"cols": "i64"}
    constexprs = ("block",)
    scalar_types = {"cap": "fp32"}
    scalar_samples = {"cap": 2.0}

    def grid(self, p: SoftcapProblem, c: SoftcapConfig) -> tuple[int, int, int]:
        return p.rows, -(-p.cols // c.block), 1

    # Rules: what a method is given beside the GPU is what its decorator says it reads.

    @of_both
    def accesses(self, p: SoftcapProblem, c: SoftcapConfig, gpu: GpuSpec) -> str | None:
        return tile_rules.accesses(c.block, c.warps, p.vec)

    @of_both
    def no_idle_columns(self, p: SoftcapProblem, c: SoftcapConfig, gpu: GpuSpec) -> str | None:
        return tile_rules.idles("block", c.block, max(256, power_of_two(p.cols)), f"rows of {p.cols}")

    def estimate_us(self, p: SoftcapProblem, c: SoftcapConfig, gpu: GpuSpec) -> float:
        tile = c.block * p.itemsize
        return streaming.estimate_us(
            gpu, self.work(p).bytes, self.grid(p, c), c.warps, tile, coalesced=p.layout == "rows"
        )

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, cap = args
        return ((cap * (x.double() / cap).tanh()).to(x.dtype),)

    def work(self, p: SoftcapProblem) -> Work:
        return Work(flops=10.0 * p.rows * p.cols, bytes=self.bytes(p))


SOFTCAP = Softcap()
