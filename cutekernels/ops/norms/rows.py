"""What norms and their gradients have in common: how operands lie, how rows become tiles, which config may do it.

The ops themselves are in ``norms.py`` and ``norm_gradients.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from cutekernels import gpu as gpus
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Work, exact, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.shared.strides import cube, matrix
from cutekernels.ops.shared.tensor_op import (
    DTYPE_NAMES,
    GPU_DTYPES,
    WIDEST_BYTES,
    Launch,
    TensorOp,
    check_alike,
    check_dtype,
    check_results,
    present,
)

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec


# ---- problems and configs -------------------------------------------------------------------------------

_MAX_COLS = 1 << 30


@dataclass(frozen=True)
class NormProblem(Problem):
    """Rows of ``cols`` elements, ``rows`` of them at each of ``heads`` heads.

    ``layout``: "rows" where one stride walks all rows (``heads`` is 1 then) and elements of a row are contiguous in
    every operand, "heads" where rows and heads need a stride each, "strided" for the rest. ``per_head``: weights
    and biases are (heads, cols). ``align``: bytes that divide every such operand's address, strides and row length;
    nothing depends on it where the layout is strided. ``weight`` and ``bias`` say of which type, next to ``dtype``.
    """

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
        if self.align < self.itemsize:
            raise UnsupportedProblem(
                f"align covers one element of {self.dtype}, {self.itemsize} bytes; it is {self.align}"
            )
        if self.cols > _MAX_COLS:
            raise UnsupportedProblem(f"a row has at most {_MAX_COLS} elements; it has {self.cols}: split it")
        if self.cols % self.vec:
            raise UnsupportedProblem(
                f"align={self.align} divides a row's bytes; {self.cols} elements of {self.dtype} want a smaller one"
            )
        if self.layout == "rows" and (self.heads > 1 or self.per_head):
            raise UnsupportedProblem(f"{self.heads} heads, or weights for each, are layout=heads")

    @property
    def itemsize(self) -> int:
        return GPU_DTYPES[self.dtype].itemsize

    @property
    def vec(self) -> int:
        """Elements in one access."""
        return 1 if self.layout == "strided" else self.align // self.itemsize

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

_AFFINE = frozenset(["weight", "bias"])
_SUMMED = frozenset(["dweight", "dbias"])
_MAX_PROGRAMS = (1 << 31) - 1
_MANY_ROWS = 8192
_WIDE_STRIDED_ROW = 1024  # addresses take the registers
_CHUNKS = (1024, 8192)
_PERSISTENT_TILES = (2048, 4096)  # elements
_LEAST_STAYING = 8  # elements of a thread
_IN_FLIGHT = (24 << 10, 128 << 10)  # bytes copied ahead on one SM
_REGISTERS = 28  # of a thread, beside its tile


class NormOp(TensorOp[N, NormConfig]):
    """An op over cubes of one shape and type, with weights and biases that belong to the columns.

    ``weight`` and ``bias`` among the operands are of the columns' shape, as are the results ``dweight`` and ``dbias``,
    sums over rows, of which a kernel writes one fp32 part per program. All others are of the shape of ``x``.
    """

    Config = NormConfig
    kernels: ClassVar[str]  # the module
    strides_over_tiles: ClassVar[bool]  # always, because its programs keep sums
    wide_row: ClassVar[int] = 8192
    """Beyond so many columns rows may be walked in chunks."""
    chunks: ClassVar[Mapping[int, tuple[int, int]]] = {}
    """By a row's width, where many rows are faster in chunks than whole: a chunk's columns, and warps."""
    paired: ClassVar[bool] = False
    """Whether many wide rows go two to a program."""
    summands: ClassVar[int] = 1
    """How many rows are added up ahead of the norm: of narrow ones, a thread takes as much in all."""
    flops_per_element: ClassVar[int]

    @property
    def operands(self) -> tuple[str, ...]:
        return (*self.results, *self.inputs)

    @abstractmethod
    def kind(self, p: N, name: str) -> str | None:
        """The type of an operand's elements for the kernel; None for one that is absent."""

    @abstractmethod
    def values(self, p: N) -> int:
        """fp32 values that a thread keeps for each element of its tile."""

    @abstractmethod
    def flags(self, p: N) -> dict[str, bool]:
        """Constants of the kernel, beside those of the config."""

    @abstractmethod
    def pose(self, common: Mapping[str, Any], named: Mapping[str, Tensor | None], options: Mapping[str, Any]) -> N:
        """The problem, from the fields that every norm has and the op's own."""

    # -- from tensors to problems

    def takes(self, name: str, t: Tensor) -> bool:
        if name in _AFFINE or name in _SUMMED:
            return t.is_contiguous()
        return cube(t.shape, t.stride()) is not None

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        named = dict(zip(self.operands, (*(results or (None,) * len(self.results)), *inputs), strict=True))
        x = named["x"]
        assert x is not None
        check_dtype(self, x)
        check_alike(self, x, present([t for name, t in named.items() if name not in _AFFINE | _SUMMED]))
        shapes = [x.shape[-1:], x.shape[-2:]] if x.dim() > 1 else [torch.Size([x.shape[-1] if x.dim() else 1])]
        affine = present([named.get(name) for name in ("weight", "bias")])
        for t in affine:
            check_alike(self, x, [t], ["device"])
            if t.shape not in shapes:
                expected = " or ".join(str(tuple(s)) for s in shapes)
                raise UnsupportedProblem(
                    f"{self.name} on {tuple(x.shape)} takes weights of shape {expected}; got {tuple(t.shape)}"
                )
            if t.dtype not in (x.dtype, torch.float32):
                raise UnsupportedProblem(
                    f"{self.name} on {x.dtype} takes weights of {x.dtype} or torch.float32; got {t.dtype}: convert them"
                )
        check_alike(self, affine[0] if affine else x, affine, ["shape"])
        for name, value in options.items():
            allowed = self.Problem.__dataclass_fields__[name].metadata["values"]
            if value not in allowed:
                raise UnsupportedProblem(f"{name} must be one of {', '.join(map(str, allowed))}; it is {value!r}")
        if results:
            for place, like in zip(results, self.fresh(*[_ghost(t) for t in inputs], **options), strict=True):
                check_alike(self, like, [place], ["shape", "dtype"])
                check_alike(self, x, [place], ["device"])
            check_results(results)

    def problem(self, *operands: Tensor | None, **options: Any) -> N:
        named = dict(zip(self.operands, operands, strict=True))
        full = [t for name, t in named.items() if name not in _AFFINE | _SUMMED and t is not None]
        affine = present([named.get(name) for name in ("weight", "bias")])
        x = named["x"]
        assert x is not None
        if x.dtype not in DTYPE_NAMES:
            raise UnsupportedProblem(f"{self.name} on a GPU takes {', '.join(DTYPE_NAMES.values())}; got {x.dtype}")
        per_head = any(t.dim() == 2 and t.shape[0] > 1 for t in affine)
        cubes = [cube(t.shape, t.stride()) for t in full]
        flat = not per_head and all(matrix(t.shape, t.stride()) is not None for t in full)
        walks = [_walk(t, flat) for t in full]
        if None in cubes or not all(t.is_contiguous() for t in affine):
            raise UnsupportedProblem(
                f"{self.name} takes operands whose leading dimensions but the last are walked by one stride, and "
                "contiguous weights: pass contiguous copies"
            )
        rows, heads, cols = walks[0][:3]
        bits = WIDEST_BYTES | cols * x.dtype.itemsize
        for t, (*_, row_stride, head_stride, _) in zip(full, walks, strict=True):
            bits |= t.data_ptr() | (row_stride | head_stride) * t.dtype.itemsize
        align = bits & -bits
        while any(t.data_ptr() % _affine_align(align, x.dtype, t.dtype) for t in affine):
            align //= 2
        strided = any(col_stride != 1 for *_, col_stride in walks)
        weight = named.get("weight")
        common = {
            "rows": rows,
            "cols": cols,
            "heads": heads,
            "dtype": DTYPE_NAMES[x.dtype],
            "weight": affine_kind(weight, x),
            "layout": "strided" if strided else "rows" if flat else "heads",
            "per_head": per_head,
        }
        return self.pose(common if strided else common | {"align": align}, named, options)

    # -- configs

    def why_not(self, p: N, c: NormConfig, gpu: GpuSpec) -> str | None:
        threads, tile = 32 * c.warps, c.block_rows * c.block_cols
        if c.resident:
            if c.block_cols != p.width:
                return f"whole rows of {p.cols} take block_cols={p.width}"
        else:
            wide = _WIDE_STRIDED_ROW if p.layout == "strided" else self.wide_row
            if p.cols <= wide:
                return f"rows of {p.cols} are walked whole: resident must be true up to {wide}"
            if not _CHUNKS[0] <= c.block_cols <= min(_CHUNKS[1], p.width // 2):
                return f"chunks are of {_CHUNKS[0]} to {_CHUNKS[1]} columns, and less than a row"
            if c.block_rows > 1 or c.stages > 1:
                return "rows in chunks are taken one by one and not copied ahead: block_rows and stages must be 1"
        if c.warps > 1 and tile < threads * p.vec:
            return f"{threads} threads of {p.vec} elements an access need a tile of {threads * p.vec} elements"
        if c.block_rows > power_of_two(p.rows):
            return f"block_rows={c.block_rows} idles most of a tile with {p.rows} rows"
        registers, most = self._registers(p, c), min(gpu.MAX_REGISTERS_PER_THREAD, gpu.REGISTERS_PER_SM // threads)
        if registers > most:
            return f"a thread needs about {registers} registers and has at most {most}"
        if c.per_sm == 0 and self._tiles(p, c) > _MAX_PROGRAMS:
            return f"{self._tiles(p, c)} tiles are more than the {_MAX_PROGRAMS} programs of a grid"
        if c.per_sm == 0:
            if self.strides_over_tiles:
                return "programs keep sums over their tiles: per_sm must not be 0"
            return None if c.stages == 1 else "a program with one tile copies none ahead: stages must be 1"
        return self._why_not_stay(p, c, gpu)

    def _why_not_stay(self, p: N, c: NormConfig, gpu: GpuSpec) -> str | None:
        """Rules for programs that stay on their SM."""
        tile, tiles = c.block_rows * c.block_cols, self._tiles(p, c)
        if c.stages > 1 and (p.layout == "strided" or p.align < 4):
            return "copies ahead are of 4 bytes or more: stages must be 1"
        ahead = (c.stages - 1) * tile * p.itemsize * self._copied(p)
        if ahead + 1024 > gpu.smem_per_block_bytes or c.per_sm * (ahead + 2048) > gpu.smem_per_sm_bytes:
            return f"{c.per_sm} programs on an SM copy {ahead} bytes each ahead; it has {gpu.smem_per_sm_bytes}"
        if c.per_sm > 1:
            if c.per_sm * c.warps > gpu.max_warps:
                return f"an SM holds {gpu.max_warps} warps"
            if c.per_sm * 32 * c.warps * self._registers(p, c) > gpu.REGISTERS_PER_SM:
                return f"{c.per_sm} programs of {c.warps} warps need more registers than an SM has"
            if tiles < gpu.sm_count * c.per_sm:
                return f"{tiles} tiles leave some of the {c.per_sm} programs on an SM without one"
        low, high = _PERSISTENT_TILES
        if c.block_rows > 1 and not low <= tile <= high:
            return f"programs that stay take tiles of one row, or of {low} to {high} elements"
        if c.warps > 1 and tile < 32 * c.warps * _LEAST_STAYING:
            return f"threads that stay take {_LEAST_STAYING} elements or more each; a tile has {tile}"
        walks = tiles >= 2 * gpu.sm_count * c.per_sm  # every program has tiles to copy ahead
        if self.strides_over_tiles:
            if not c.resident or p.layout == "strided" or p.align < 4:
                return None
            if walks != (c.stages > 1):
                return "programs copy ahead where each has two tiles or more, and nowhere else"
            return None
        if not walks or c.stages == 1:
            return "programs that copy nothing ahead gain nothing by staying: per_sm must be 0"
        low, high = _IN_FLIGHT
        if not low <= c.per_sm * ahead <= high:
            return f"{c.per_sm * ahead} bytes ahead on an SM; {low} to {high} keep the memory busy"
        return None

    def _registers(self, p: N, c: NormConfig) -> int:
        per_thread = -(-c.block_rows * c.block_cols // (32 * c.warps))
        addresses = 2 * self._full(p) if p.layout == "strided" else 0
        return per_thread * (self.values(p) + addresses) + _REGISTERS

    def _full(self, p: N) -> int:
        """Operands of the shape of ``x``."""
        names = [n for n in self.operands if n not in _AFFINE | _SUMMED]
        return sum(self.kind(p, n) is not None for n in names)

    def _copied(self, p: N) -> int:
        """Operands of the shape of ``x`` that are read."""
        names = [n for n in self.inputs if n not in _AFFINE]
        return sum(self.kind(p, n) is not None for n in names)

    def _tiles(self, p: N, c: NormConfig) -> int:
        return -(-p.rows // c.block_rows) * p.heads

    def default(self, p: N, gpu: GpuSpec) -> NormConfig:
        for c in self._candidates(p, gpu):
            if self.why_not(p, c, gpu) is None:
                return c
        raise UnsupportedProblem(
            f"{p.rows} rows of {p.cols} at {p.heads} heads are more tiles than a grid's {_MAX_PROGRAMS} programs: "
            "split them"
        )

    def _candidates(self, p: N, gpu: GpuSpec) -> Iterator[NormConfig]:
        """From the most wanted to what always works."""
        stay = [(4, 3), (2, 3), (2, 2), (1, 3), (1, 2), (2, 1), (1, 1)] if self.strides_over_tiles else [(0, 1)]
        few = p.rows * p.heads <= gpu.sm_count
        # Two accesses of 16 bytes per thread, one where rows are so few that latency rules. Narrow rows share a tile.
        elements = max(p.vec, 8) if few else 2 * max(p.vec, 8 // max(1, p.itemsize // 2))
        narrow = 128 * elements // p.width
        if narrow > 1 and not few:
            elements //= self.summands
            narrow //= self.summands
        rows = 1 if few else min(64, power_of_two(p.rows), max(1, narrow))
        if p.rows * p.heads >= _MANY_ROWS:
            if p.width in self.chunks:
                columns, warps = self.chunks[p.width]
                yield NormConfig(1, columns, False, warps, 0, 1)
            if self.paired and 4096 <= p.width <= 16384:
                yield NormConfig(2, p.width, True, min(16, p.width // 512), 0, 1)
        if p.width <= 16384:
            for per_sm, stages in stay:
                for block_rows in (rows, 1):
                    warps = min(16, max(1, block_rows * p.width // (32 * elements)))
                    for w in (warps, warps * 2, warps * 4, warps // 2):
                        if 1 <= w <= 16:
                            yield NormConfig(block_rows, p.width, True, w, per_sm, stages)
            for w in (16, 8, 4, 2, 1):
                yield NormConfig(1, p.width, True, w, stay[-1][0], 1)
        for chunk, w in ((4096, 8), (4096, 16), (2048, 8), (2048, 16), (1024, 8), (1024, 16)):
            for per_sm, stages in stay:
                if stages == 1:
                    yield NormConfig(1, chunk, False, w, per_sm, 1)

    def estimate_us(self, p: N, c: NormConfig, gpu: GpuSpec) -> float:
        """Bytes over bandwidth, stretched where too few of them are in flight or some SMs are idle."""
        tiles = self._tiles(p, c)
        by_registers = gpu.REGISTERS_PER_SM // (32 * c.warps * self._registers(p, c))
        resident = max(1, min(32, gpu.max_warps // c.warps, by_registers)) if c.per_sm == 0 else c.per_sm
        busy = min(1.0, tiles / gpu.sm_count)
        share = min(float(resident), tiles / gpu.sm_count) * max(1, c.stages - 1)
        width = min(p.cols, c.block_cols if c.resident else 2 * c.block_cols)  # the next chunk is asked for early
        in_flight = gpu.sm_count * share * c.block_rows * width * p.itemsize * self._copied(p)
        # Little's law: bandwidth times a loaded memory latency of 0.8 µs must be in flight. A tile's registers are
        # idle while it is reduced, unless the next tiles are on their way.
        needed = gpu.dram_gbps * 1e3 * 0.8 * (1.0 if c.stages > 1 else 1.5)
        # Rows that are walked again come from the caches; threads that hold little of them leave room for more.
        passes = 1.0 if c.resident else 0.97 if self.chunks else 1.3
        narrow = 4.0 if p.layout == "strided" else 1.0
        memory = self.work(p).bytes / (gpu.dram_gbps * 1e3 * 0.92) * narrow * passes
        second = 0.0
        if self.strides_over_tiles:  # parts are written, and read by the second pass
            parts = 8.0 * self._programs(p, c, gpu.sm_count) * p.cols * sum(n in _SUMMED for n in self.results)
            second = 1.5 + parts / (gpu.dram_gbps * 1e3)
        issue = tiles / gpu.sm_count * 0.05 if c.per_sm == 0 else 0.0  # an SM starts a block about every 50 ns
        return 1.5 + second + max(issue, memory / max(0.02, min(1.0, in_flight / needed) * busy))

    # -- kernels

    def build(self, p: N, c: NormConfig, gpu: GpuSpec) -> Artifact:
        from importlib import import_module

        from cutekernels.backends.triton import compile_kernel

        signature: dict[str, str] = {}
        constants: dict[str, int | bool | str | float] = {}
        divisible: dict[str, int] = {}
        for name in self.operands:
            kind, pointer = self.kind(p, name), f"{name}_parts_ptr" if name in _SUMMED else f"{name}_ptr"
            signature[pointer] = f"*{kind}"
            if kind is None:
                constants[pointer] = 0
            else:
                divisible[pointer] = min(WIDEST_BYTES, p.vec * GPU_DTYPES[kind].itemsize)
        signature |= {"rows": "i64", "heads": "i64", "cols": "i32"}
        divisible["cols"] = p.vec
        if p.layout == "rows":
            constants["heads"] = 1
        for name in self.operands:
            if name in _SUMMED:
                continue
            absent, affine = self.kind(p, name) is None, name in _AFFINE
            for axis in ("head", "col") if affine else ("row", "head", "col"):
                stride = f"{name}_{axis}"
                signature[stride] = "i64"
                if axis == "col" and (affine or (p.layout != "strided" and not absent)):
                    constants[stride] = 1
                elif absent or (axis == "head" and (p.layout == "rows" or (affine and not p.per_head))):
                    constants[stride] = 0
                else:
                    divisible[stride] = p.vec
        signature |= dict.fromkeys(self.scalars, "fp32")
        constants |= self.flags(p)
        constants |= {
            "NESTED": p.layout != "rows",
            "BLOCK_ROWS": c.block_rows,
            "BLOCK_COLS": c.block_cols,
            "RESIDENT": c.resident,
            "STAGES": c.stages if c.per_sm else 0,
        }
        return compile_kernel(
            getattr(import_module(f"cutekernels.kernels.triton.{self.kernels}"), self.name),
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            divisible={name: n for name, n in divisible.items() if name not in constants},
            options={"num_warps": c.warps},
            gpu=gpu,
        )

    def _programs(self, p: N, c: NormConfig, sm_count: int) -> int:
        tiles = self._tiles(p, c)
        if c.per_sm == 0:
            return tiles
        programs = min(tiles, sm_count * c.per_sm)
        return max(p.heads, programs // p.heads * p.heads) if p.per_head else programs

    def grid(self, p: N, c: NormConfig, sm_count: int) -> tuple[int, int, int]:
        return self._programs(p, c, sm_count), 1, 1

    def numbers(self, p: N, *operands: Tensor | None) -> list[int]:
        """Extents and strides, in the kernel's order."""
        numbers = [p.rows, p.heads, p.cols]
        for name, t in zip(self.operands, operands, strict=True):
            if name in _AFFINE:
                numbers += [p.cols if p.per_head and t is not None else 0, 1]
            elif name not in _SUMMED:
                numbers += [0, 0, 0] if t is None else _walk(t, p.heads == 1)[3:]
        return numbers

    def bind(self, p: N, c: NormConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        if p.rows * p.heads * p.cols == 0:
            return lambda *operands: None
        grid = self.grid(p, c, sms_here() if c.per_sm else 0)
        return Launch(kernel, grid, len(self.operands), lambda *operands: self.numbers(p, *operands))

    # -- what a problem looks like

    def outputs(self, p: N, *args: Any) -> tuple[Tensor, ...]:
        return self.fresh(*args[: len(self.inputs)], **{name: getattr(p, name) for name in self.options})

    def sample(self, p: N, device: str, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        skew = p.align % WIDEST_BYTES // p.itemsize  # elements off a 16-byte boundary
        shape = (p.rows, p.cols) if p.layout == "rows" else (p.rows, p.heads, p.cols)
        args: list[Any] = []
        for name in self.inputs:
            kind = self.kind(p, name)
            if kind is None:
                args.append(None)
            elif name in _AFFINE:
                affine_shape = (p.heads, p.cols) if p.per_head else (p.cols,)
                args.append(torch.randn(affine_shape, generator=generator, device=device, dtype=GPU_DTYPES[kind]))
            else:
                strides: tuple[int, ...] = (p.cols, 1)
                if p.layout == "strided":  # columns far apart, rows close
                    strides = (p.heads, 1, p.rows * p.heads)
                elif p.layout == "heads":  # some of the heads of a joint projection
                    strides = ((p.heads + 2) * p.cols, p.cols, 1)
                size = p.rows * max(strides[0], p.heads * p.cols)
                memory = torch.randn(size + skew, generator=generator, device=device, dtype=GPU_DTYPES[kind])
                args.append(memory.as_strided(shape, strides, skew))
        scalars = {"eps": 1e-5, "weight_offset": 0.25}
        return (*args, *[scalars[name] for name in self.scalars])

    def work(self, p: N) -> Work:
        elements = p.rows * p.heads * p.cols
        moved = elements * p.itemsize * self._full(p)
        for name in self.operands:
            kind = self.kind(p, name)
            if kind is not None and name in _AFFINE | _SUMMED:
                moved += p.cols * (p.heads if p.per_head else 1) * GPU_DTYPES[kind].itemsize
        depth = max(p.cols, p.rows if self.strides_over_tiles else 0)
        return Work(flops=float(self.flops_per_element * elements), bytes=float(moved), depth=float(depth))


def sms_here() -> int:
    return gpus.detect(torch.cuda.current_device() if torch.cuda.is_available() else None).sm_count


def _ghost(t: Tensor | None) -> Tensor | None:
    """``t`` without its memory."""
    return None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta")


def _walk(t: Tensor, flat: bool) -> tuple[int, int, int, int, int, int]:
    """``cube`` of a tensor, its heads among the rows where it is ``flat``."""
    shape, strides = t.shape, t.stride()
    if flat:
        found = matrix(shape, strides)
        assert found is not None, "problem() asked"
        rows, cols, row_stride, col_stride = found
        return rows, 1, cols, row_stride if rows > 1 else 0, 0, col_stride
    cubed = cube(shape, strides)
    if cubed is None:
        raise UnsupportedProblem(
            f"leading dimensions but the last must be walked by one stride; strides {strides} of shape "
            f"{tuple(shape)} are not: pass a contiguous copy"
        )
    return cubed


def _affine_align(align: int, dtype: torch.dtype, kind: torch.dtype) -> int:
    """What must divide the address of a weight of type ``kind`` beside operands aligned to ``align``."""
    return min(WIDEST_BYTES, align // dtype.itemsize * kind.itemsize) if align > dtype.itemsize else 1


def affine_kind(t: Tensor | None, x: Tensor) -> str:
    return "none" if t is None else "same" if t.dtype == x.dtype else "fp32"


def typed(p: NormProblem, kind: str) -> str | None:
    """A field like ``weight``, as the type it stands for."""
    return {"same": p.dtype, "fp32": "fp32", "none": None}[kind]


def wide(t: Tensor) -> Tensor:
    """In fp32, or fp64 where it is that already."""
    return t.to(torch.float32 if t.dtype.itemsize == 2 else torch.float64)
