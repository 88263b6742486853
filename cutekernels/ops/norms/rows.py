"""Operands, problems, configs and rules that norms and their gradients share: :class:`NormOp`.

The ops are in ``op.py`` and ``gradients.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from cutekernels import gpu as gpus
from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Scalar, Work, exact, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.shared import streaming
from cutekernels.ops.shared.coefficients import STREAMING
from cutekernels.ops.shared.dtypes import BYTES, WIDEST_BYTES
from cutekernels.ops.shared.laid_out import LaidOut
from cutekernels.ops.shared.operands import Leads, Looks, Named, Operand, Sizes, misfit
from cutekernels.ops.shared.strides import cube, matrix
from cutekernels.ops.shared.tile_rules import accesses_rule, idle_rule
from cutekernels.ops.shared.triton_op import TritonPart
from cutekernels.rules import of_both, of_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec


# ---- operands, problems and configs ---------------------------------------------------------------------


class Rows(Operand):
    """``(..., heads, cols)`` with a stride for each of rows, heads and columns; made by :func:`rows`."""

    __slots__ = ()

    def walk(self, t: Tensor) -> tuple[int, ...]:
        found = cube(t.shape, t.stride())
        if found is None:
            raise UnsupportedProblem(
                "leading dimensions but the last must be walked by one stride; strides "
                f"{t.stride()} of shape {tuple(t.shape)} are not: pass a contiguous copy"
            )
        return found[3:]

    def taken(self, t: Tensor) -> bool:
        return cube(t.shape, t.stride()) is not None


class RowColumns(Operand):
    """``(cols,)``, or ``(heads, cols)`` with a row for each head, contiguous; made by :func:`columns`."""

    __slots__ = ()

    def describe(self) -> str:
        return "(cols,) or (heads, cols)"


def rows(*, result: bool = False, given: str | None = None) -> Operand:
    """A tensor of the shape and type of ``x``."""
    return Rows(("*rows", "cols"), "dtype", ("row", "head", "col"), result, given, given is not None, True)


def columns(kind: str, *, result: bool = False, given: str | None = None) -> Operand:
    """A weight, a bias or the gradient of one; ``kind``: the field of the problem that says its type."""
    return RowColumns(("*heads", "cols"), kind, (), result, given, True, False)


@dataclass(frozen=True)
class NormProblem(LaidOut, Problem):
    """Rows of ``cols`` elements, ``rows`` of them at each of ``heads`` heads.

    ``layout``: "rows" where one stride walks all rows (``heads`` is 1 then) and elements of a row are contiguous in
    every operand, "heads" where rows and heads need a stride each, "strided" for the rest. ``per_head``: weights
    and biases are (heads, cols). ``align``: bytes that divide every such operand's address, strides and row length;
    nothing depends on it where the layout is strided. ``weight`` and ``bias`` say of which type, next to ``dtype``.
    """

    aligns_rows: ClassVar[str | None] = "cols"
    most: ClassVar[Mapping[str, int]] = {"cols": 1 << 30}
    rows: int = extent(ladder)
    cols: int = extent(exact)
    heads: int = extent(exact, default=1)
    dtype: str = plain("bf16", "fp16", "fp32")
    weight: str = plain("same", "none", "fp32")
    layout: str = plain("rows", "heads", "strided")
    per_head: bool = plain(False, True)
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout == "rows" and (self.heads > 1 or self.per_head):
            raise UnsupportedProblem(f"{self.heads} heads, or weights for each, are layout=heads")

    @property
    def width(self) -> int:
        """A tile's width where it holds whole rows."""
        return max(32, power_of_two(self.cols))


@dataclass(frozen=True)
class NormConfig(Config):
    """Tiles of ``block_rows`` rows; ``resident`` ones are as wide as a row, others walk it in chunks.

    ``per_sm`` programs stay on each SM and stride over the tiles, copying ``stages - 1`` of them ahead; with 0 every
    tile has a program.
    """

    block_rows: int = knob(1, 2, 4, 8, 16, 32, 64)
    block_cols: int = knob(32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    resident: bool = knob(True, False)
    warps: int = knob(1, 2, 4, 8, 16)
    per_sm: int = knob(0, 1, 2, 4)
    stages: int = knob(1, 2, 3, 4)


# ---- what all norms have in common ----------------------------------------------------------------------

N = TypeVar("N", bound=NormProblem)

SUITE = (  # problems that all norms are measured at
    "rows=1 cols=4096",
    "rows=333 cols=1001 align=2",
    "rows=77 cols=130 layout=strided",
    "rows=2048 cols=4096",
    "rows=32768 cols=4096",
)
MAX_PROGRAMS = (1 << 31) - 1
_MANY_ROWS = 8192
_WIDE_STRIDED_ROW = 1024  # 64-bit addresses take the registers
_CHUNKS = (1024, 8192)
_PERSISTENT_TILES = (2048, 4096)  # elements
_LEAST_STAYING = 8  # elements of a thread
_NARROW = 64  # columns, of gradients that take tiles of many rows first: docs/notes/streaming.md#narrow-gradients
_IN_FLIGHT = (24 << 10, 128 << 10)  # bytes copied ahead on one SM
_OTHER_SMEM = 1024  # bytes of a program, beside what it copies ahead
_REGISTERS = 28  # of a thread, beside its tile


class NormOp(TritonPart[N, NormConfig]):
    """The part of an op over :func:`rows` of one shape and type and :func:`columns` that belong to them.

    Kernels take weights and biases contiguous. Of results that are :func:`columns`, sums over rows, a kernel writes
    one fp32 part per program.
    """

    Config = NormConfig
    sizes = {"rows": "i64", "heads": "i64", "cols": "i32"}
    constexprs: ClassVar[tuple[str, ...]] = ("per_head", "block_rows", "block_cols", "resident")
    scalar_samples = {"eps": 1e-5, "weight_offset": 0.25}
    strides_over_tiles: ClassVar[bool] = False
    """Whether programs always stay, because they keep sums."""
    wide_row: ClassVar[int] = 8192
    """Rows of more columns than this may be walked in chunks."""
    chunks: ClassVar[Mapping[int, tuple[int, int]]] = {}
    """For widths at which many rows are faster in chunks than whole: a chunk's columns, and warps."""
    paired: ClassVar[bool] = False
    """Whether many wide rows go two to a program."""
    padded: ClassVar[int] = 1
    """So many times as many elements a thread has where a quarter of a wide row's tile is padding."""
    summands: ClassVar[int] = 1
    """How many rows are added up before the norm. Threads of narrow rows take as many elements in all."""
    flops_per_element: ClassVar[int]

    # -- from tensors to problems

    def _pose(self, named: Named, **options: Any) -> tuple[Sizes, dict[str, torch.Size]]:
        rowed = {name: t for name, t in named.items() if isinstance(self.operands[name], Rows)}
        scalars = {name: t.view(1) for name, t in rowed.items() if t is not None and not t.dim()}
        return super()._pose({**named, **scalars}, **options)

    def result(self, name: str, named: Named, sizes: Sizes, leads: Leads, **options: Any) -> Looks:
        x = named["x"]
        assert x is not None
        return x.shape, (x.dtype,)

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        x = named["x"]
        assert x is not None
        for name in self.affine:
            t = named[name]
            if t is not None and t.dim() > 1 and t.shape != x.shape[-2:]:
                raise misfit(self.name, self.operands, named)
            if t is not None and t.dim() > 1 and named["weight"] is None:
                raise UnsupportedProblem("a bias for each head needs weights of its shape; got none: pass ones")

    def facts(self, named: Named, sizes: Sizes) -> dict[str, Scalar]:
        per_head = sizes.get("heads", 1) > 1
        rowed = [t for name, t in named.items() if isinstance(self.operands[name], Rows) and t is not None]
        flat = not per_head and all(matrix(t.shape, t.stride()) is not None for t in rowed)
        heads = 1 if flat else rowed[0].shape[-2]
        return {"rows": sizes["rows"] // max(1, heads), "heads": heads, "per_head": per_head}

    def layout(self, named: Named, sizes: Sizes, found: Mapping[str, Any]) -> dict[str, Scalar]:
        laid = super().layout(named, sizes, found)
        if laid["layout"] == "strided":
            return laid
        bits = int(laid["align"])
        for t in [t for name in self.affine if (t := named[name]) is not None]:
            bits |= t.data_ptr() % WIDEST_BYTES * BYTES[found["dtype"]] // t.element_size()
        return {"layout": "rows" if found["heads"] == 1 else "heads", "align": bits & -bits}

    def strides(self, p: N, name: str, t: Tensor) -> Sequence[int]:
        row, head, col = super().strides(p, name, t)
        return (head or row, 0, col) if p.heads == 1 else (row, head, col)  # one head: any that ``t`` has are rows

    @property
    def affine(self) -> list[str]:
        """The inputs that are :func:`columns`."""
        return [name for name in self.inputs if isinstance(self.operands[name], RowColumns)]

    # -- configs

    @of_both
    def whole_rows(self, p: N, c: NormConfig, gpu: GpuSpec) -> str | None:
        if c.resident:
            return None if c.block_cols == p.width else f"whole rows of {p.cols} take block_cols={p.width}"
        wide = _WIDE_STRIDED_ROW if p.layout == "strided" else self.wide_row
        return f"rows of {p.cols} are walked whole: resident must be true up to {wide}" if p.cols <= wide else None

    @of_both
    def chunks_of_rows(self, p: N, c: NormConfig, gpu: GpuSpec) -> str | None:
        if c.resident or _CHUNKS[0] <= c.block_cols <= min(_CHUNKS[1], p.width // 2):
            return None
        return f"chunks are of {_CHUNKS[0]} to {_CHUNKS[1]} columns, and less than a row"

    @of_config
    def chunks_one_by_one(self, c: NormConfig, gpu: GpuSpec) -> str | None:
        if c.resident or c.block_rows == c.stages == 1:
            return None
        return "rows in chunks are taken one by one and not copied ahead: block_rows and stages must be 1"

    accesses = accesses_rule("block_rows", "block_cols", one_warp=True)
    no_idle_rows = idle_rule("block_rows", "rows", "{} rows")

    @of_both
    def registers_of_a_thread(self, p: N, c: NormConfig, gpu: GpuSpec) -> str | None:
        most = min(gpu.MAX_REGISTERS_PER_THREAD, gpu.REGISTERS_PER_SM // (32 * c.warps))
        need = self._registers(p, c)
        return f"a thread needs about {need} registers and has at most {most}" if need > most else None

    @of_both
    def most_programs(self, p: N, c: NormConfig, gpu: GpuSpec) -> str | None:
        tiles = self._tiles(p, c)
        if c.per_sm or tiles <= MAX_PROGRAMS:
            return None
        return f"{tiles} tiles are more than the {MAX_PROGRAMS} programs of a grid"

    @of_config
    def one_tile_each(self, c: NormConfig, gpu: GpuSpec) -> str | None:
        if c.per_sm:
            return None
        if self.strides_over_tiles:
            return "programs keep sums over their tiles: per_sm must not be 0"
        return None if c.stages == 1 else "a program with one tile copies none ahead: stages must be 1"

    # Of programs that stay on their SM: per_sm is not 0.

    @of_both
    def copies_of_four_bytes(self, p: N, c: NormConfig, gpu: GpuSpec) -> str | None:
        if c.stages > 1 and not self._copies(p):
            return "copies ahead are of 4 bytes or more: stages must be 1"
        return None

    @of_both
    def smem_of_copies(self, p: N, c: NormConfig, gpu: GpuSpec) -> str | None:
        ahead = self._bytes_ahead(p, c)
        own = ahead + _OTHER_SMEM
        if own <= gpu.smem_per_block_bytes and c.per_sm * (own + gpu.SMEM_RESERVED_BYTES) <= gpu.smem_per_sm_bytes:
            return None
        return f"{c.per_sm} programs on an SM copy {ahead} bytes each ahead; it has {gpu.smem_per_sm_bytes}"

    @of_config
    def warps_of_an_sm(self, c: NormConfig, gpu: GpuSpec) -> str | None:
        return f"an SM holds {gpu.max_warps} warps" if c.per_sm > 1 and c.per_sm * c.warps > gpu.max_warps else None

    @of_both
    def registers_of_an_sm(self, p: N, c: NormConfig, gpu: GpuSpec) -> str | None:
        if c.per_sm <= 1 or c.per_sm * 32 * c.warps * self._registers(p, c) <= gpu.REGISTERS_PER_SM:
            return None
        return f"{c.per_sm} programs of {c.warps} warps need more registers than an SM has"

    @of_both
    def a_tile_for_each(self, p: N, c: NormConfig, gpu: GpuSpec) -> str | None:
        tiles = self._tiles(p, c)
        if c.per_sm <= 1 or tiles >= gpu.sm_count * c.per_sm:
            return None
        return f"{tiles} tiles leave some of the {c.per_sm} programs on an SM without one"

    @of_config
    def staying_tiles(self, c: NormConfig, gpu: GpuSpec) -> str | None:
        low, high = _PERSISTENT_TILES
        if not c.per_sm or c.block_rows == 1 or low <= c.block_rows * c.block_cols <= high:
            return None
        return f"programs that stay take tiles of one row, or of {low} to {high} elements"

    @of_config
    def staying_threads(self, c: NormConfig, gpu: GpuSpec) -> str | None:
        tile = c.block_rows * c.block_cols
        if not c.per_sm or c.warps == 1 or tile >= 32 * c.warps * _LEAST_STAYING:
            return None
        return f"threads that stay take {_LEAST_STAYING} elements or more each; a tile has {tile}"

    @of_both
    def copies_ahead(self, p: N, c: NormConfig, gpu: GpuSpec) -> str | None:
        if not c.per_sm:
            return None
        walks = self._tiles(p, c) >= 2 * gpu.sm_count * c.per_sm  # every program has tiles to copy ahead
        if self.strides_over_tiles:
            if not c.resident or not self._copies(p) or walks == (c.stages > 1):
                return None
            return "programs copy ahead where each has two tiles or more, and nowhere else"
        if not walks or c.stages == 1:
            return "programs that copy nothing ahead gain nothing by staying: per_sm must be 0"
        (low, high), flying = _IN_FLIGHT, c.per_sm * self._bytes_ahead(p, c)
        return None if low <= flying <= high else f"{flying} bytes ahead on an SM; {low} to {high} keep the memory busy"

    def _copies(self, p: N) -> bool:
        """Whether tiles can be copied ahead."""
        return p.layout != "strided" and p.align >= 4

    def _bytes_ahead(self, p: N, c: NormConfig) -> int:
        return (c.stages - 1) * c.block_rows * c.block_cols * p.itemsize * self._wide(p, self.inputs)

    def _registers(self, p: N, c: NormConfig) -> int:
        per_thread = -(-c.block_rows * c.block_cols // (32 * c.warps))
        # fp32 values that a thread keeps for each element of its tile: gradients keep two operands and a result.
        values = 3 if self.strides_over_tiles else self._wide(p, self.inputs)
        values += sum(self.kind(p, n) is not None for n, o in self.operands.items() if isinstance(o, RowColumns))
        addresses = 2 * self._wide(p, self.operands) if p.layout == "strided" else 0
        return per_thread * (values + addresses) + _REGISTERS

    def _wide(self, p: N, names: Iterable[str]) -> int:
        """The number of operands among ``names`` that are there and of the shape of ``x``."""
        return sum(isinstance(self.operands[n], Rows) and self.kind(p, n) is not None for n in names)

    def _tiles(self, p: N, c: NormConfig) -> int:
        return -(-p.rows // c.block_rows) * p.heads

    def default(self, p: N, gpu: GpuSpec) -> NormConfig:
        for c in self._candidates(p, gpu):
            if self.why_not(p, c, gpu) is None:
                return c
        raise UnsupportedProblem(
            f"{p.rows} rows of {p.cols} at {p.heads} heads are more tiles than a grid's {MAX_PROGRAMS} programs: "
            "split them"
        )

    def _candidates(self, p: N, gpu: GpuSpec) -> Iterator[NormConfig]:
        """Configs in order of preference; the last ones fit every problem that a grid holds."""
        stay = [(4, 3), (2, 3), (2, 2), (1, 3), (1, 2), (2, 1), (1, 1)] if self.strides_over_tiles else [(0, 1)]
        few = p.rows * p.heads <= self.summands * gpu.sm_count
        # Two accesses of 16 bytes per thread, one where rows are so few that latency rules, and as many of each
        # summand where rows are whole tiles. Narrow rows share a tile.
        elements = max(p.vec, 8) if few else 2 * max(p.vec, 8 // max(1, p.itemsize // 2))
        narrow = 128 * elements // p.width
        if not few:
            elements = elements // self.summands if narrow > 1 else elements * self.summands
            narrow //= self.summands
            if p.width >= self.wide_row and 4 * p.cols <= 3 * p.width:
                elements *= self.padded
        rows = 1 if few else min(64, power_of_two(p.rows), max(1, narrow))
        if p.rows * p.heads >= _MANY_ROWS:
            if p.width in self.chunks:
                columns, warps = self.chunks[p.width]
                yield self.Config(1, columns, False, warps, 0, 1)
            if self.paired and 4096 <= p.width <= 16384:
                yield self.Config(2, p.width, True, min(16, p.width // 512), 0, 1)
        if p.width <= 16384:
            shapes = [(block_rows, *each) for each in stay for block_rows in (rows, 1)]
            if self.strides_over_tiles and p.width <= _NARROW:  # whole tiles leave few parts to sum up
                shapes.sort(key=lambda shape: -shape[0])
            for block_rows, per_sm, stages in shapes:
                warps = min(16, max(1, block_rows * p.width // (32 * elements)))
                some = [w for w in (warps, warps * 2, warps * 4, warps // 2) if 1 <= w <= 16]
                tiles = [self.Config(block_rows, p.width, True, w, per_sm, stages) for w in some]
                # Whole waves come first for sums: docs/notes/streaming.md#what-a-thread-takes (H200).
                yield from sorted(tiles, key=lambda c: self._idle(p, c, gpu)) if self.summands > 1 else tiles
            for w in (16, 8, 4, 2, 1):
                yield self.Config(1, p.width, True, w, stay[-1][0], 1)
        for chunk, w in ((4096, 8), (4096, 16), (2048, 8), (2048, 16), (1024, 8), (1024, 16)):
            for per_sm, stages in stay:
                if stages == 1:
                    yield self.Config(1, chunk, False, w, per_sm, 1)

    def _idle(self, p: N, c: NormConfig, gpu: GpuSpec) -> float:
        """The room for programs in all waves over the programs; 1 in a single wave."""
        waves = streaming.waves(gpu, self.grid(p, c, gpu.sm_count), c.warps, self._registers(p, c))
        return math.ceil(waves) / max(1.0, waves) if waves else 1.0

    def estimate_us(self, p: N, c: NormConfig, gpu: GpuSpec) -> float:
        grid = self.grid(p, c, gpu.sm_count)
        width = min(p.cols, c.block_cols if c.resident else 2 * c.block_cols)  # the next chunk is loaded early
        ahead = max(1, c.stages - 1)
        tile = c.block_rows * width * p.itemsize * self._wide(p, self.inputs) * ahead
        passes = STREAMING.chunked if self.chunks and not c.resident else 1.0
        registers = self._registers(p, c)
        walked = 0 if c.resident else 2 * -(-p.cols // c.block_cols) * c.block_cols / (32 * c.warps)  # by a thread
        first = streaming.estimate_us(
            gpu, passes * self.work(p).bytes, grid, c.warps, tile, loads=self._tiles(p, c) / max(1, grid[0]) / ahead,
            registers=registers, coalesced=p.layout != "strided", walked=walked,
        )  # fmt: skip
        if not self.strides_over_tiles:
            return first
        parts = 8.0 * grid[0] * p.cols * (len(self.results) - self._wide(p, self.results))  # written, and read again
        return first + rates.of(gpu).launch_us + parts / (gpu.dram_gbps * 1e3)

    # -- kernels

    def grid(self, p: N, c: NormConfig, sm_count: int | None = None) -> tuple[int, int, int]:
        """Programs on a GPU of ``sm_count`` SMs, by default the current one."""
        programs = self._tiles(p, c)
        if c.per_sm:
            programs = min(programs, (sms_here() if sm_count is None else sm_count) * c.per_sm)
            programs = max(p.heads, programs // max(1, p.heads) * p.heads) if p.per_head else programs
        return programs, 1, 1

    def constants(self, p: N, c: NormConfig) -> dict[str, int | bool | str]:
        found = super().constants(p, c) | {"NESTED": p.layout != "rows", "STAGES": c.stages if c.per_sm else 0}
        for name, operand in self.operands.items():
            if operand.optional:
                found[name.upper()] = self.kind(p, name) is not None
            if p.layout == "rows" and isinstance(operand, Rows):
                found[f"{name}_head"] = 0
        return found | {"heads": 1} if p.layout == "rows" else found

    def divisible(self, p: N, c: NormConfig) -> dict[str, int]:
        kinds = {name: self.kind(p, name) for name, o in self.operands.items() if isinstance(o, RowColumns)}
        return {f"{n}_ptr": min(WIDEST_BYTES, p.vec * BYTES[k]) for n, k in kinds.items() if k is not None}

    # -- what a problem looks like

    def leads_in(self, p: N) -> dict[str, tuple[int, ...]]:
        rows = (p.rows,) if p.layout == "rows" else (p.rows, p.heads)
        return {"*rows": rows, "*heads": (p.heads,) if p.per_head else ()}

    def arrange(self, p: N, name: str, values: Tensor) -> Tensor:
        if p.layout != "heads":
            return super().arrange(p, name, values)
        skew = p.align % WIDEST_BYTES // p.itemsize
        joint = values.new_empty(p.rows * (p.heads + 2) * p.cols + skew)[skew:].view(p.rows, p.heads + 2, p.cols)
        return joint[:, : p.heads].copy_(values)  # some of the heads of a joint projection

    def work(self, p: N) -> Work:
        depth = max(p.cols, p.rows if self.strides_over_tiles else 0)
        return Work(float(self.flops_per_element * p.rows * p.heads * p.cols), self.bytes(p), depth=float(depth))


def sms_here() -> int:
    import torch

    return gpus.detect(torch.cuda.current_device() if torch.cuda.is_available() else None).sm_count


def wide(t: Tensor) -> Tensor:
    """In fp32, or fp64 where it is that already."""
    import torch

    return t.to(torch.float32 if t.dtype.itemsize == 2 else torch.float64)
