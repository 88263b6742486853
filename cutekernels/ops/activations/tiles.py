"""Elementwise passes over matrices in tiles, one per program: their problem, config, rules and model.

What an op computes in a tile, and of which operands, its own file says.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Work, exact, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.shared.strides import matrix
from cutekernels.ops.shared.tensor_op import DTYPE_NAMES, GPU_DTYPES, WIDEST_BYTES, Launch, TensorOp

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec


@dataclass(frozen=True)
class TileProblem(Problem):
    """An elementwise pass over matrices of one shape, leading dimensions flattened into rows.

    ``layout``: "dense" where every operand is contiguous, "rows" where the elements of each row are,
    "strided" for the rest. ``align``: bytes that divide every operand's address and, unless dense, its row
    pitch; nothing depends on it where the layout is strided.
    """

    rows: int = extent(ladder)
    cols: int = extent(exact)
    dtype: str = plain("bf16", "fp16", "fp32")
    layout: str = plain("dense", "rows", "strided")
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.align < self.itemsize:
            raise UnsupportedProblem(
                f"align covers one element of {self.dtype}, {self.itemsize} bytes; it is {self.align}"
            )

    @property
    def itemsize(self) -> int:
        return GPU_DTYPES[self.dtype].itemsize

    @property
    def vec(self) -> int:
        """Elements in one access."""
        return 1 if self.layout == "strided" else self.align // self.itemsize


@dataclass(frozen=True)
class TileConfig(Config):
    """One tile per program; ``evict="first"`` asks the caches to drop the inputs, which are read once."""

    block_rows: int = knob(1, 2, 4, 8, 16, 32)
    block_cols: int = knob(32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    warps: int = knob(1, 2, 4, 8, 16)
    evict: str = knob("normal", "first")


EVICT = {"normal": "", "first": "evict_first"}
_MAX_OPERAND_REGISTERS = 160
_GRID_AXIS = 1 << 30


def matrix_strides(t: Tensor) -> tuple[int, int]:
    found = matrix(t.shape, t.stride())
    assert found is not None, "problem() refuses operands that are no matrix"
    return found[2:]


T = TypeVar("T", bound=TileProblem)


class TiledOp(TensorOp[T, TileConfig]):
    """An op over matrices of one shape and type; some operands may be something else.

    Its kernel's parameters are, in this order: ``<name>_ptr`` of every operand, results first; ``rows``, ``cols`` and
    what else :meth:`numbers` has; ``<name>_row`` and ``<name>_col`` of every matrix, ``<name>_col`` of every vector;
    constexprs.
    """

    Config = TileConfig
    kernel: ClassVar[str]
    """A function of ``cutekernels.kernels.triton.activations``."""
    flops_per_element: ClassVar[int]
    joins_rows: ClassVar[bool] = True
    """Whether rows that lie end to end are one long row: the layout "dense"."""
    vectors: ClassVar[tuple[str, ...]] = ()
    """Inputs of one row, ``(cols,)``."""
    large: ClassVar[tuple[tuple[int, int, float], ...]] = ((4, 2, 4.0),)
    """For large problems: warps, a thread's accesses to each operand, and from how many tiles on, in numbers of what
    the GPU holds of 4 warps."""
    partials: ClassVar[tuple[str, ...]] = ()
    """Contiguous fp32 results of a shape of their own."""

    def element(self, p: T, name: str) -> str:
        """The type of operand ``name``."""
        return "fp32" if name in self.partials else p.dtype

    def numbers(self, p: T) -> dict[str, int]:
        """What the kernel is told of the problem at run time."""
        return {"rows": 1, "cols": p.rows * p.cols} if p.layout == "dense" else {"rows": p.rows, "cols": p.cols}

    @abstractmethod
    def constants(self, p: T) -> dict[str, int | bool | str]:
        """The kernel's constexprs that depend on the problem, but for those of every tiled kernel."""

    def _operands(self) -> tuple[str, ...]:
        return (*self.results, *self.inputs)

    def _matrices(self) -> tuple[str, ...]:
        return tuple([name for name in self._operands() if name not in (*self.vectors, *self.partials)])

    def problem(self, *operands: Tensor | None, **options: Any) -> T:
        named = {name: t for name, t in zip(self._operands(), operands, strict=True) if t is not None}
        given = [named[name] for name in self._matrices()]
        dtype = given[0].dtype
        if dtype not in DTYPE_NAMES:
            raise UnsupportedProblem(f"{self.name} on a GPU takes {', '.join(DTYPE_NAMES.values())}; got {dtype}")
        matrices = []
        for t in given:
            m = matrix(t.shape, t.stride())
            if m is None:
                raise UnsupportedProblem(
                    f"leading dimensions must be walked by one stride; strides {t.stride()} of shape "
                    f"{tuple(t.shape)} are not: pass a contiguous copy"
                )
            matrices.append(m)
        for name in self.partials:
            if not named[name].is_contiguous():
                raise UnsupportedProblem(f"{name} must be contiguous; its strides are {named[name].stride()}")
        rows, cols = matrices[0][:2]
        options |= {"rows": rows, "cols": cols, "dtype": DTYPE_NAMES[dtype]}
        vectors = [named[name] for name in self.vectors]
        if any(m[3] != 1 for m in matrices) or any(_step(t) != 1 for t in vectors):
            return self.Problem(**options, layout="strided")
        dense = self.joins_rows and (rows == 1 or all(pitch == cols for _, _, pitch, _ in matrices))
        bits = WIDEST_BYTES
        for t, (_, _, pitch, _) in zip(given, matrices, strict=True):
            bits |= t.data_ptr() | (0 if dense or rows == 1 else pitch * dtype.itemsize)
        for t in (*vectors, *[named[name] for name in self.partials]):
            bits |= t.data_ptr()
        return self.Problem(**options, layout="dense" if dense else "rows", align=bits & -bits)

    def why_not(self, p: T, c: TileConfig, gpu: GpuSpec) -> str | None:
        threads = 32 * c.warps
        per_thread = c.block_rows * c.block_cols // threads
        if per_thread < p.vec:
            return f"{threads} threads of {p.vec} elements an access need a tile of {threads * p.vec} elements"
        # fp32 values and, where nothing is known of the strides, 64-bit addresses.
        registers = per_thread * (len(self.inputs) + len(self.results)) * (3 if p.layout == "strided" else 1)
        if registers > _MAX_OPERAND_REGISTERS:
            return f"a thread's tile takes {registers} registers; at most {_MAX_OPERAND_REGISTERS}"
        if p.layout == "dense" and c.block_rows > 1:
            return "a dense problem is one long row: block_rows must be 1"
        if p.layout != "dense" and c.block_cols > max(256, power_of_two(p.cols)):
            return f"block_cols={c.block_cols} idles most of a tile in rows of {p.cols}"
        if c.block_rows > power_of_two(p.rows):
            return f"block_rows={c.block_rows} idles most of a tile with {p.rows} rows"
        return None

    def default(self, p: T, gpu: GpuSpec) -> TileConfig:
        if p.layout == "strided":
            # Square tiles: whichever dimension is contiguous, neighbouring threads use up the sectors they fetch.
            rows = min(32, power_of_two(p.rows))
            return TileConfig(rows, 32, min(4, rows), "normal")
        # What suits large problems where that fills the GPU well, else 16 bytes of each operand per thread; where even
        # that leaves SMs idle, smaller blocks.
        wave = gpu.sm_count * (gpu.max_warps // 4)
        for warps, accesses, least in (*self.large, (4, 1, 0.0), (2, 1, 0.0), (1, 1, 0.0)):
            c = self._tile(p, 32 * warps * accesses * WIDEST_BYTES // p.itemsize, warps)
            if self.tiles(p, c) >= max(gpu.sm_count, least * wave):
                break
        return c

    def _tile(self, p: T, elements: int, warps: int) -> TileConfig:
        """A tile of about ``elements``, as wide as a row and as high as is left."""
        widths = [w for w in self.Config.space()["block_cols"] if isinstance(w, int)]
        if p.layout == "dense":
            return TileConfig(1, max(widths[0], elements), warps, "normal")
        width = min(elements, max(widths[0], power_of_two(p.cols)))
        height = min(32, elements // width, power_of_two(p.rows))
        if width * height < 32 * p.vec:  # too little for one warp: let lanes idle
            width = max(widths[0], 32 * p.vec // height)
        return TileConfig(height, width, max(1, min(warps, width * height // (32 * p.vec))), "normal")

    def tiles(self, p: T, c: TileConfig) -> int:
        """How many programs there are."""
        if p.layout == "dense":
            return -(-p.rows * p.cols // c.block_cols)
        return -(-p.rows // c.block_rows) * -(-p.cols // c.block_cols)

    def estimate_us(self, p: T, c: TileConfig, gpu: GpuSpec) -> float:
        """Bytes over bandwidth, stretched where too few bytes are in flight or the last wave is thin."""
        tiles, tile = self.tiles(p, c), c.block_rows * c.block_cols
        resident = min(32, gpu.max_warps // c.warps)  # blocks on one SM
        waves = max(1.0, tiles / (gpu.sm_count * resident))
        busy = min(1.0, tiles / gpu.sm_count) if waves == 1 else waves / -(-waves // 1)
        # Little's law: bandwidth times a loaded memory latency of 0.8 µs must be in flight.
        in_flight = gpu.sm_count * min(resident, tiles / gpu.sm_count) * tile * p.itemsize * len(self.inputs)
        needed = gpu.dram_gbps * 1e3 * 0.8
        narrow = 1.0 if p.layout != "strided" else 4.0
        memory = self.work(p).bytes / (gpu.dram_gbps * 1e3 * 0.92) * narrow
        issue = tiles / gpu.sm_count * 0.05  # an SM starts a block about every 50 ns
        return 1.5 + max(issue, memory / max(0.05, min(1.0, in_flight / needed) * max(0.5, busy)))

    def grid(self, p: T, c: TileConfig) -> tuple[int, int, int]:
        tiles = self.tiles(p, c)
        return min(tiles, _GRID_AXIS), -(-tiles // _GRID_AXIS), 1

    def build(self, p: T, c: TileConfig, gpu: GpuSpec) -> Artifact:
        from cutekernels.backends.triton import compile_kernel
        from cutekernels.kernels.triton import activations

        signature = {f"{name}_ptr": f"*{self.element(p, name)}" for name in self._operands()}
        divisible = {} if p.layout == "strided" else dict.fromkeys(signature, p.align)
        signature |= dict.fromkeys(self.numbers(p), "i64")
        constants: dict[str, int | bool | str] = {"rows": 1} if p.layout == "dense" else {}
        for name in self._matrices():
            signature |= {f"{name}_row": "i64", f"{name}_col": "i64"}
            if p.layout == "rows":
                divisible[f"{name}_row"] = p.vec
            if p.layout == "dense":
                constants[f"{name}_row"] = 0
        signature |= {f"{name}_col": "i64" for name in self.vectors}
        if p.layout != "strided":
            constants |= {f"{name}_col": 1 for name in (*self._matrices(), *self.vectors)}
        constants |= self.constants(p) | {
            "BLOCK_ROWS": c.block_rows,
            "BLOCK_COLS": c.block_cols,
            "VEC": p.vec,
            "PRECISE": p.dtype == "fp32",
            "EVICT": EVICT[c.evict],
        }
        return compile_kernel(
            getattr(activations, self.kernel),
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            divisible=divisible,
            options={"num_warps": c.warps},
            gpu=gpu,
        )

    def bind(self, p: T, c: TileConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        if p.rows == 0 or p.cols == 0:
            return lambda *operands: None
        numbers = tuple(self.numbers(p).values())
        names, matrices = self._operands(), self._matrices()

        def following(*operands: Tensor) -> tuple[int, ...]:
            named = dict(zip(names, operands, strict=True))
            strides = [s for name in matrices for s in matrix_strides(named[name])]
            return (*numbers, *strides, *[_step(named[name]) for name in self.vectors])

        return Launch(kernel, self.grid(p, c), len(names), (lambda *_: numbers) if p.layout == "dense" else following)

    def outputs(self, p: T, *args: Any) -> tuple[Tensor, ...]:
        options = {name: getattr(p, name) for name in self.options}
        fresh = self.fresh(*args, **options)
        # Rows of an odd length cannot be both contiguous and aligned; a padded pitch keeps what the problem promises.
        pitch = -(-p.cols // p.vec) * p.vec if p.layout == "rows" else p.cols
        if pitch == p.cols:
            return fresh
        return tuple(
            [
                t if name in self.partials else t.new_empty((*t.shape[:-1], pitch))[..., : p.cols]
                for name, t in zip(self.results, fresh, strict=True)
            ]
        )

    def sample(self, p: T, device: str, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        samples: list[Tensor] = []
        for i, name in enumerate(self.inputs):
            dtype = GPU_DTYPES[self.element(p, name)]
            skew = p.align % WIDEST_BYTES // dtype.itemsize  # elements off a 16-byte boundary
            strided = p.layout == "strided"
            if name in self.vectors:
                step = 2 if strided else 1
                memory = torch.randn(p.cols * step + skew, generator=generator, device=device, dtype=dtype)
                samples.append(memory.as_strided((p.cols,), (step,), skew))
                continue
            if p.layout == "dense":
                size, strides = p.rows * p.cols, (p.cols, 1)
            elif p.layout == "rows":  # as one half of a joint gate-and-up projection lies
                pitch = 2 * (-(-p.cols // p.vec) * p.vec)
                size, strides = p.rows * pitch, (pitch, 1)
            else:  # the first one transposed, the others every other element
                size, strides = (p.rows * p.cols, (1, p.rows)) if i == 0 else (2 * p.rows * p.cols, (2 * p.cols, 2))
            memory = torch.randn(size + skew, generator=generator, device=device, dtype=dtype)
            samples.append(memory.as_strided((p.rows, p.cols), strides, skew))
        return tuple(samples)

    def work(self, p: T) -> Work:
        elements = p.rows * p.cols
        bytes_ = len(self._matrices()) * p.itemsize * elements
        bytes_ += sum(GPU_DTYPES[self.element(p, name)].itemsize * p.cols for name in self.vectors)
        return Work(float(self.flops_per_element * elements), float(bytes_), self.depth(p))

    def depth(self, p: T) -> float | None:
        """As :class:`~cutekernels.op.Work` has it."""
        return None


def _step(vector: Tensor) -> int:
    return vector.stride(0) if vector.shape[0] != 1 else 1


def widened(t: Tensor) -> Tensor:
    """For a reference: fp32 for a half, fp64 for the rest."""
    return t.to(torch.float32 if t.dtype.itemsize == 2 else torch.float64)
