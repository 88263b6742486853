"""Rules of ``silu_mul``'s CuTe body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutekernels.op import power_of_two
from cutekernels.ops.activations.tiles import GRID_AXIS, TileConfig, TileProblem
from cutekernels.ops.shared import tile_rules
from cutekernels.ops.shared.two_bodies import CuteBody
from cutekernels.rules import of_both

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

_MOST_ELEMENTS = 32  # of a thread, of each operand


class CuteSiluMul(CuteBody[TileProblem, TileConfig]):
    """``block_cols`` elements of one row for each CTA of ``warps`` warps."""

    module = "silu_mul"
    knobs = {"block_cols": (256, 512, 1024, 2048, 4096, 8192), "warps": (1, 4, 16)}
    shapes = {name: {"row": "rows", "col": "cols"} for name in ("out", "gate", "up")}

    def body(self, kernels: Any, p: TileProblem, c: TileConfig, gpu: GpuSpec) -> Any:
        return kernels.SiluMul(c.block_cols, 32 * c.warps, p.vec, gpu.has_pdl)

    @of_both
    def elements_of_a_thread(self, p: TileProblem, c: TileConfig, gpu: GpuSpec) -> str | None:
        each = c.block_cols // (32 * c.warps)
        if p.vec <= each <= _MOST_ELEMENTS:
            return None
        return f"body=cute gives a thread {p.vec} to {_MOST_ELEMENTS} elements; block_cols={c.block_cols} makes {each}"

    @of_both
    def no_idle_columns(self, p: TileProblem, c: TileConfig, gpu: GpuSpec) -> str | None:
        if p.layout == "dense":
            return None
        return tile_rules.idles("block_cols", c.block_cols, max(256, power_of_two(p.cols)), f"rows of {p.cols}")

    @of_both
    def most_blocks(self, p: TileProblem, c: TileConfig, gpu: GpuSpec) -> str | None:
        rows, cols = (1, p.rows * p.cols) if p.layout == "dense" else (p.rows, p.cols)
        blocks = rows * -(-cols // c.block_cols)
        if blocks <= GRID_AXIS:
            return None
        return f"body=cute takes {GRID_AXIS} blocks at most; block_cols={c.block_cols} makes {blocks}: take body=triton"
