"""Gated activations, ``out = act(gate) * up``, ``gelu(x + bias)``, and their gradients: six ops of one schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from cutekernels.kernels.activations import activated, gelu_slope, gelu_tanh_slope, silu_slope
from cutekernels.op import plain, power_of_two
from cutekernels.ops.activations.tiles import TileConfig, TiledOp, TileProblem
from cutekernels.ops.shared import tile_rules
from cutekernels.ops.shared.operands import Matrix, Sizes, Vector
from cutekernels.ops.shared.triton_op import TritonOp
from cutekernels.rules import of_both

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.gpu import GpuSpec


@dataclass(frozen=True)
class GluProblem(TileProblem):
    """A gated activation. See :class:`~cutekernels.ops.activations.tiles.TileProblem`."""

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
        return super().constants(p, c) | {"ACT": p.act, "DENSE": p.layout == "dense"}


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

    def constants(self, p: BiasGeluProblem, c: TileConfig) -> dict[str, int | bool | str]:
        return super().constants(p, c) | {"ACT": p.act}


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

    @of_both
    def no_idle_rows(self, p: BiasGeluProblem, c: TileConfig, gpu: GpuSpec) -> str | None:
        rows = slab_rows(p.rows)
        return tile_rules.idles("block_rows", c.block_rows, power_of_two(rows), f"slabs of {rows} rows")

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
