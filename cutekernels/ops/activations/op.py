"""Gated activations, ``out = act(gate) * up``, ``gelu(x + bias)``, and their gradients: six ops of one schedule,
elementwise passes over matrices in tiles, one per program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from cutekernels.kernels.activations import activated, gelu_slope, gelu_tanh_slope, silu_slope
from cutekernels.op import Config, Problem, Work, exact, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.shared import streaming
from cutekernels.ops.shared.dtypes import WIDEST_BYTES
from cutekernels.ops.shared.laid_out import LaidOut, place_as
from cutekernels.ops.shared.operands import Matrix, Sizes, Vector
from cutekernels.ops.shared.tile_rules import accesses_rule, idle_rule
from cutekernels.ops.shared.triton_op import TritonOp, TritonPart
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
    constexprs = ("block_rows", "block_cols", "vec", "act")
    flops_per_element: ClassVar[int]
    large: ClassVar[tuple[tuple[int, int, float], ...]] = ((4, 2, 4.0),)
    """Tiles of large problems: warps, accesses per thread to each operand, and the least number of such tiles, in
    units of the 4-warp blocks that fill the GPU."""

    def numbers(self, p: T, c: TileConfig) -> tuple[int, ...]:
        return (1, p.rows * p.cols) if p.layout == "dense" else super().numbers(p, c)

    def constants(self, p: T, c: TileConfig) -> dict[str, int | bool | str]:
        one_row = {"rows": 1} if p.layout == "dense" else {}
        return super().constants(p, c) | one_row | {"PRECISE": p.dtype == "fp32", "EVICT": _EVICT[c.evict]}

    accesses = accesses_rule("block_rows", "block_cols")

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

    no_idle_columns = idle_rule(
        "block_cols", lambda p: GRID_AXIS if p.layout == "dense" else p.cols, "rows of {}", least=256
    )
    no_idle_rows = idle_rule("block_rows", "rows", "{} rows")

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


# ---- problems of activations ------------------------------------------------------------------------------


@dataclass(frozen=True)
class GluProblem(TileProblem):
    """A gated activation. See :class:`TileProblem`."""

    @property
    def act(self) -> str:
        """The kernel's name of the activation."""
        return "silu"


def _gelu(approximate: str) -> str:
    """The name of GELU in the table of activations."""
    return "gelu" if approximate == "none" else "gelu_tanh"


def _gelu_slope(x: Tensor, approximate: str) -> Tensor:
    return gelu_slope(x) if approximate == "none" else gelu_tanh_slope(x)


class _Approximated:
    """A problem with GELU: exact (``x`` times the normal distribution function), or its approximation by tanh."""

    approximate: str
    dtype: str

    @property
    def act(self) -> str:
        return _gelu(self.approximate)

    @property
    def depth(self) -> float:
        """How exact GELU and its slope can be: an absolute error left of 0, and where terms of the slope cancel.

        Half precision: 2^-17 of the terms, which may be five times a typical result, and so 2048 / 8 ulp of fp32 of
        that. fp32: 1 + erf loses what torch's loses. docs/notes/activations.md (modelled on a CPU)
        """
        return 256.0 if self.dtype == "fp32" else 2048.0


@dataclass(frozen=True)
class GeluProblem(_Approximated, GluProblem):
    """A gated GELU."""

    approximate: str = plain("none", "tanh")


@dataclass(frozen=True)
class BiasGeluProblem(_Approximated, TileProblem):
    """A GELU whose bias is one row, in the type of the matrices or in fp32."""

    layout: str = plain("rows", "strided")
    bias: str = plain("same", "fp32")
    approximate: str = plain("none", "tanh")


# ---- gated ----------------------------------------------------------------------------------------------

G = TypeVar("G", bound=GluProblem)
LARGE = ((16, 1, 0.9), (4, 2, 4.0))  # tiles of large forward passes: docs/notes/activations.md (H200, 2026-11)


class Gated(TiledOp[G]):
    """Shared by both passes of every gated activation."""

    def constants(self, p: G, c: TileConfig) -> dict[str, int | bool | str]:
        return super().constants(p, c) | {"DENSE": p.layout == "dense"}


class SiluMul(Gated[GluProblem], TritonOp[GluProblem, TileConfig]):
    """``out = silu(gate) * up``."""

    name = "silu_mul"
    revision = 1
    suite = (
        "rows=1 cols=14336",
        "rows=16 cols=3584",
        "rows=333 cols=1001 layout=rows align=2",
        "rows=257 cols=130 layout=strided",
        "rows=2048 cols=4096",
        "rows=2048 cols=11008",
        "rows=2048 cols=11008 layout=rows",
        "rows=2048 cols=14336 dtype=fp16",
        "rows=2048 cols=5120 dtype=fp32",
        "rows=2048 cols=18944",
        "rows=16384 cols=18944",
    )
    Problem = GluProblem
    kernel = "activations:glu"
    out = Matrix("*rows", "cols", result=True)
    gate = Matrix("*rows", "cols")
    up = Matrix("*rows", "cols")
    large = LARGE
    flops_per_element = 5

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        gate, up = (t.to(torch.float32 if t.dtype.itemsize == 2 else torch.float64) for t in args)
        return ((activated(gate, "silu") * up).to(args[0].dtype),)


class SiluMulBackward(Gated[GluProblem], TritonOp[GluProblem, TileConfig]):
    """The gradient of :class:`SiluMul`."""

    name = "silu_mul_backward"
    revision = 1
    suite = (
        "rows=16 cols=3584",
        "rows=333 cols=1001 layout=rows align=2",
        "rows=257 cols=130 layout=strided",
        "rows=2048 cols=11008",
        "rows=2048 cols=11008 layout=rows",
        "rows=2048 cols=14336 dtype=fp16",
        "rows=2048 cols=5120 dtype=fp32",
    )
    Problem = GluProblem
    kernel = "activations:glu_backward"
    dgate = Matrix("*rows", "cols", result=True)
    dup = Matrix("*rows", "cols", result=True)
    dout = Matrix("*rows", "cols")
    gate = Matrix("*rows", "cols")
    up = Matrix("*rows", "cols")
    flops_per_element = 11

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        # fp64 throughout: dgate crosses zero near gate = -1.278, where fp32 would leave nothing but its own error.
        d, g, u = (t.double() for t in args)
        return (d * u * silu_slope(g)).to(args[1].dtype), (d * activated(g, "silu")).to(args[2].dtype)


class GeluMul(Gated[GeluProblem], TritonOp[GeluProblem, TileConfig]):
    """``out = gelu(gate) * up``."""

    name = "gelu_mul"
    revision = 1
    suite = (
        "rows=16 cols=3584",
        "rows=333 cols=1001 layout=rows align=2 approximate=tanh",
        "rows=257 cols=130 layout=strided",
        "rows=2048 cols=10240",
        "rows=2048 cols=10240 approximate=tanh",
        "rows=2048 cols=10240 layout=rows approximate=tanh",
        "rows=2048 cols=14336 dtype=fp16",
        "rows=2048 cols=5120 dtype=fp32",
        "rows=2048 cols=5120 dtype=fp32 approximate=tanh",
    )
    Problem = GeluProblem
    options = ("approximate",)
    kernel = SiluMul.kernel
    out, gate, up = SiluMul.out, SiluMul.gate, SiluMul.up
    large = LARGE
    flops_per_element = 20

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        gate, up = args
        # In fp64: 1 + erf cancels left of 0, where fp32 would leave little but its own error.
        return ((activated(gate.double(), _gelu(**options)) * up.double()).to(gate.dtype),)


class GeluMulBackward(Gated[GeluProblem], TritonOp[GeluProblem, TileConfig]):
    """The gradient of :class:`GeluMul`."""

    name = "gelu_mul_backward"
    revision = 1
    suite = (
        "rows=16 cols=3584",
        "rows=333 cols=1001 layout=rows align=2",
        "rows=257 cols=130 layout=strided approximate=tanh",
        "rows=2048 cols=10240",
        "rows=2048 cols=10240 layout=rows approximate=tanh",
        "rows=2048 cols=5120 dtype=fp32",
        "rows=2048 cols=5120 dtype=fp32 approximate=tanh",
    )
    Problem = GeluProblem
    options = ("approximate",)
    kernel = SiluMulBackward.kernel
    dgate, dup = SiluMulBackward.dgate, SiluMulBackward.dup
    dout, gate, up = SiluMulBackward.dout, SiluMulBackward.gate, SiluMulBackward.up
    flops_per_element = 28

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        d, g, u = (t.double() for t in args)
        value, slope = activated(g, _gelu(**options)), _gelu_slope(g, **options)
        return (d * u * slope).to(args[1].dtype), (d * value).to(args[2].dtype)


# ---- with a bias ----------------------------------------------------------------------------------------


class BiasedGelu(TiledOp[BiasGeluProblem]):
    """Shared by both passes."""

    Problem = BiasGeluProblem
    options = ("approximate",)


class BiasGelu(BiasedGelu, TritonOp[BiasGeluProblem, TileConfig]):
    """``out = gelu(x + bias)``."""

    name = "bias_gelu"
    revision = 1
    suite = (
        "rows=16 cols=4096",
        "rows=333 cols=1001 align=2 approximate=tanh",
        "rows=257 cols=130 layout=strided bias=fp32",
        "rows=512 cols=4096 dtype=fp16",
        "rows=2048 cols=4096",
        "rows=2048 cols=4096 bias=fp32 approximate=tanh",
        "rows=2048 cols=16384 dtype=fp16",
        "rows=2048 cols=5120 dtype=fp32",
    )
    kernel = "activations:bias_gelu"
    out = Matrix("*rows", "cols", result=True)
    x = Matrix("*rows", "cols")
    bias = Vector("cols", dtype="bias", stride="col", laid=True)
    flops_per_element = 20

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, bias = args
        return (activated(x.double() + bias, _gelu(**options)).to(x.dtype),)  # fp64: 1 + erf cancels left of 0


class BiasGeluBackward(BiasedGelu, TritonOp[BiasGeluProblem, TileConfig]):
    """The gradient of :class:`BiasGelu`: dx, and the sums of dx over slabs of rows, whose sum is the bias's."""

    name = "bias_gelu_backward"
    revision = 1
    suite = (
        "rows=16 cols=4096",
        "rows=333 cols=1001 align=2 approximate=tanh",
        "rows=257 cols=130 layout=strided bias=fp32",
        "rows=2048 cols=4096",
        "rows=2048 cols=4096 bias=fp32 approximate=tanh",
        "rows=2048 cols=16384 dtype=fp16",
        "rows=2048 cols=5120 dtype=fp32",
    )
    kernel = "activations:bias_gelu_backward"
    dx = Matrix("*rows", "cols", result=True)
    partials = Matrix("slabs", "cols", dtype="wide", strides=(), result=True, laid=True)
    dout = Matrix("*rows", "cols")
    x = Matrix("*rows", "cols")
    bias = Vector("cols", dtype="bias", stride="col", laid=True)
    sizes = {"rows": "i64", "cols": "i64", "slab": "i64"}
    flops_per_element = 28
    in_place = False

    def derive(self, sizes: Sizes, **options: Any) -> None:
        sizes["slabs"] = slabs(sizes["rows"])

    def numbers(self, p: BiasGeluProblem, c: TileConfig) -> tuple[int, ...]:
        return p.rows, p.cols, slab_rows(p.rows)

    no_idle_rows = idle_rule("block_rows", lambda p: slab_rows(p.rows), "slabs of {} rows")

    def default(self, p: BiasGeluProblem, gpu: GpuSpec) -> TileConfig:
        # Narrow blocks, as there are only columns times slabs programs; two rows per thread keep enough in flight.
        width = min(256, max(32, power_of_two(p.cols), 32 * p.vec))
        height = min(8, power_of_two(slab_rows(p.rows)))
        if p.layout == "strided":
            return TileConfig(height, 32, min(4, height), "normal")
        return TileConfig(height, width, max(1, min(4, width * height // (32 * p.vec))), "normal")

    def tiles(self, p: BiasGeluProblem, c: TileConfig) -> int:
        return -(-p.cols // c.block_cols) * slabs(p.rows)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        dout, x, bias = args
        dx = dout.double() * _gelu_slope(x.double() + bias.double(), **options)
        flat = dx.reshape(-1, x.shape[-1]) if dx.numel() else dx.new_empty((0, x.shape[-1]))
        partials = [part.sum(dim=0) for part in flat.split(max(1, slab_rows(len(flat))))] if len(flat) else []
        stacked = torch.stack(partials) if partials else flat
        return dx.to(x.dtype), stacked if x.dtype is torch.float64 else stacked.float()


def slab_rows(rows: int) -> int:
    """Rows per partial sum: 8 where there are few, else 32, else a 128th."""
    return min(rows, 8) if rows <= 256 else max(32, -(-rows // 128))


def slabs(rows: int) -> int:
    """The number of partial sums."""
    return -(-rows // slab_rows(rows)) if rows else 0


SILU_MUL = SiluMul()
SILU_MUL_BACKWARD = SiluMulBackward()
GELU_MUL = GeluMul()
GELU_MUL_BACKWARD = GeluMulBackward()
BIAS_GELU = BiasGelu()
BIAS_GELU_BACKWARD = BiasGeluBackward()
OPS = (SILU_MUL, SILU_MUL_BACKWARD, GELU_MUL, GELU_MUL_BACKWARD, BIAS_GELU, BIAS_GELU_BACKWARD)
