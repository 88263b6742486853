"""Rules of ``rms_norm``'s CuTe body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutekernels.op import power_of_two
from cutekernels.ops.norms.rows import MAX_PROGRAMS, NormConfig, NormProblem
from cutekernels.ops.shared import tile_rules
from cutekernels.ops.shared.two_bodies import CuteBody
from cutekernels.rules import of_both, of_problem

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

_MOST_ELEMENTS = 32  # of a thread: x, the weight and the result stay in registers
_LEAST_THREADS = 8  # of a row


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

    @of_both
    def no_idle_rows(self, p: NormProblem, c: NormConfig, gpu: GpuSpec) -> str | None:
        return tile_rules.idles("block_rows", c.block_rows, power_of_two(p.rows), f"{p.rows} rows")
