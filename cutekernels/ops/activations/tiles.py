"""Elementwise passes over matrices in tiles, one per program: their problem, config, rules and default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from cutekernels.op import Config, Problem, Work, exact, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.shared import streaming, tile_rules
from cutekernels.ops.shared.dtypes import WIDEST_BYTES
from cutekernels.ops.shared.laid_out import LaidOut, place_as
from cutekernels.ops.shared.triton_op import TritonPart
from cutekernels.rules import of_both

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

_MAX_OPERAND_REGISTERS = 160
_MOST_COLUMNS = 1.25  # of a row's large tiles, over its own
GRID_AXIS = 1 << 30
_EVICT = {"normal": "", "first": "evict_first"}


@dataclass(frozen=True)
class TileProblem(LaidOut, Problem):
    """An elementwise pass over matrices of one shape, leading dimensions flattened into rows."""

    rows: int = extent(ladder)
    cols: int = extent(exact)
    dtype: str = plain("bf16", "fp16", "fp32")
    layout: str = plain("dense", "rows", "strided")
    align: int = plain(16, 8, 4, 2)

    @property
    def depth(self) -> float | None:
        """See :class:`~cutekernels.op.Work`."""
        return None


@dataclass(frozen=True)
class TileConfig(Config):
    """One tile per program; ``evict="first"`` marks the inputs, which are read once, as the first to leave caches."""

    block_rows: int = knob(1, 2, 4, 8, 16, 32)
    block_cols: int = knob(32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    warps: int = knob(1, 2, 4, 8, 16)
    evict: str = knob("normal", "first")


T = TypeVar("T", bound=TileProblem)


class TiledOp(TritonPart[T, TileConfig]):
    """The part of an op over matrices of one shape and type; some operands may be something else."""

    Config = TileConfig
    sizes = {"rows": "i64", "cols": "i64"}
    flops_per_element: ClassVar[int]
    large: ClassVar[tuple[tuple[int, int, float], ...]] = ((4, 2, 4.0),)
    """Tiles of large problems: warps, accesses per thread to each operand, and the least number of such tiles, in
    units of the 4-warp blocks that fill the GPU."""

    def numbers(self, p: T, c: TileConfig) -> tuple[int, ...]:
        return (1, p.rows * p.cols) if p.layout == "dense" else super().numbers(p, c)

    def constants(self, p: T, c: TileConfig) -> dict[str, int | bool | str]:
        blocks: dict[str, int | bool | str] = {"BLOCK_ROWS": c.block_rows, "BLOCK_COLS": c.block_cols, "VEC": p.vec}
        one_row = {"rows": 1} if p.layout == "dense" else {}
        return blocks | one_row | {"PRECISE": p.dtype == "fp32", "EVICT": _EVICT[c.evict]}

    @of_both
    def accesses(self, p: T, c: TileConfig, gpu: GpuSpec) -> str | None:
        return tile_rules.accesses(c.block_rows * c.block_cols, c.warps, p.vec)

    @of_both
    def registers_of_operands(self, p: T, c: TileConfig, gpu: GpuSpec) -> str | None:
        need = self._registers(p, c)
        if need <= _MAX_OPERAND_REGISTERS:
            return None
        return f"a thread's tile takes {need} registers; at most {_MAX_OPERAND_REGISTERS}"

    @of_both
    def one_long_row(self, p: T, c: TileConfig, gpu: GpuSpec) -> str | None:
        if p.layout != "dense" or c.block_rows == 1:
            return None
        return "a dense problem is one long row: block_rows must be 1"

    @of_both
    def no_idle_columns(self, p: T, c: TileConfig, gpu: GpuSpec) -> str | None:
        if p.layout == "dense":
            return None
        return tile_rules.idles("block_cols", c.block_cols, max(256, power_of_two(p.cols)), f"rows of {p.cols}")

    @of_both
    def no_idle_rows(self, p: T, c: TileConfig, gpu: GpuSpec) -> str | None:
        return tile_rules.idles("block_rows", c.block_rows, power_of_two(p.rows), f"{p.rows} rows")

    def _registers(self, p: T, c: TileConfig) -> int:
        """Per thread: fp32 values and, where nothing is known of the strides, 64-bit addresses."""
        per_thread = c.block_rows * c.block_cols // (32 * c.warps)
        return per_thread * len(self.operands) * (3 if p.layout == "strided" else 1)

    def default(self, p: T, gpu: GpuSpec) -> TileConfig:
        if p.layout == "strided":
            # Square tiles: whichever dimension is contiguous, neighbouring threads use up the sectors they fetch.
            rows = min(32, power_of_two(p.rows))
            return TileConfig(rows, 32, min(4, rows), "normal")
        # The tiles of large problems where those fill the GPU well and little of a row's last one is past its end, else
        # 16 bytes of each operand per thread; where even that leaves SMs idle, smaller blocks.
        wave = gpu.sm_count * (gpu.max_warps // 4)
        for warps, accesses, least in (*self.large, (4, 1, 0.0), (2, 1, 0.0), (1, 1, 0.0)):
            c = self._tile(p, 32 * warps * accesses * WIDEST_BYTES // p.itemsize, warps)
            across = -(-p.cols // c.block_cols)
            ragged = p.layout == "rows" and across > 1 and across * c.block_cols > _MOST_COLUMNS * p.cols
            if self.tiles(p, c) >= max(gpu.sm_count, least * wave) and not (least and ragged):
                break
        return c

    def _tile(self, p: T, elements: int, warps: int) -> TileConfig:
        """A tile of about ``elements``, as wide as a row and as high as is left."""
        least = 32
        if p.layout == "dense":
            return TileConfig(1, max(least, elements), warps, "normal")
        width = min(elements, max(least, power_of_two(p.cols)))
        height = min(32, elements // width, power_of_two(p.rows))
        if width * height < 32 * p.vec:  # too little for one warp: lanes idle
            width = max(least, 32 * p.vec // height)
        return TileConfig(height, width, max(1, min(warps, width * height // (32 * p.vec))), "normal")

    def tiles(self, p: T, c: TileConfig) -> int:
        """The number of programs."""
        if p.layout == "dense":
            return -(-p.rows * p.cols // c.block_cols)
        return -(-p.rows // c.block_rows) * -(-p.cols // c.block_cols)

    def grid(self, p: T, c: TileConfig) -> tuple[int, int, int]:
        tiles = self.tiles(p, c)
        return min(tiles, GRID_AXIS), -(-tiles // GRID_AXIS), 1

    def estimate_us(self, p: T, c: TileConfig, gpu: GpuSpec) -> float:
        return streaming.estimate_us(
            gpu,
            self.bytes(p),
            self.grid(p, c),
            c.warps,
            c.block_rows * c.block_cols * p.itemsize * len(self.inputs),
            registers=max(32, self._registers(p, c)),
            coalesced=p.layout != "strided",
            walked=len(self.inputs) * c.block_rows * c.block_cols / (32 * c.warps),
        )

    def arrange(self, p: T, name: str, values: Tensor) -> Tensor:
        if p.layout == "rows":  # as one half of a joint gate-and-up projection lies
            return place_as(values, p, rows_apart=2)
        if p.layout == "strided" and name == self.inputs[0]:
            return values.t().contiguous().t()
        return place_as(values, p)

    def work(self, p: T) -> Work:
        return Work(float(self.flops_per_element * p.rows * p.cols), self.bytes(p), p.depth)
