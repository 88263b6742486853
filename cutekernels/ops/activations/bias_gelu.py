"""``gelu(x + bias)`` and its gradient, in one pass over the data each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.gpu import GpuSpec
from cutekernels.op import Work, plain, power_of_two
from cutekernels.ops.activations.glu import gelu_and_slope, gelu_depth
from cutekernels.ops.activations.tiles import TileConfig, TiledOp, TileProblem
from cutekernels.ops.shared import tensor_op


@dataclass(frozen=True)
class BiasGeluProblem(TileProblem):
    """A tile problem whose bias is one row, in the type of the matrices or in fp32."""

    layout: str = plain("rows", "strided")
    bias: str = plain("same", "fp32")
    approximate: str = plain("none", "tanh")


class _BiasGelu(TiledOp[BiasGeluProblem]):
    """What both passes have in common."""

    Problem = BiasGeluProblem
    joins_rows = False
    vectors = ("bias",)
    options = ("approximate",)

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        *matrices, bias = tensor_op.present(inputs)
        x = matrices[-1]
        tensor_op.check_dtype(self, x)
        tensor_op.check_alike(self, x, matrices)
        tensor_op.check_alike(self, x, [bias], ("device",))
        if x.dim() == 0 or bias.shape != x.shape[-1:]:
            raise UnsupportedProblem(
                f"{self.name} takes x of (..., N) and a bias of (N,); got {tuple(x.shape)} and {tuple(bias.shape)}"
            )
        if bias.dtype not in (x.dtype, torch.float32):
            raise UnsupportedProblem(
                f"{self.name} takes a bias of x's dtype, {x.dtype}, or of torch.float32; got {bias.dtype}: convert it"
            )
        tensor_op.check_results(results)
        if results:
            for given, own in zip(results, self.fresh(*[t.to("meta") for t in (*matrices, bias)]), strict=True):
                tensor_op.check_alike(self, own, [given], ("shape", "dtype"))
                tensor_op.check_alike(self, x, [given], ("device",))
        self.Problem(0, 0, **options)  # refuses values that no field takes

    def problem(self, *operands: Tensor | None, **options: Any) -> BiasGeluProblem:
        *_, x, bias = tensor_op.present(operands)
        return super().problem(*operands, bias="same" if bias.dtype is x.dtype else "fp32", **options)

    def element(self, p: BiasGeluProblem, name: str) -> str:
        return "fp32" if name == "bias" and p.bias == "fp32" else super().element(p, name)

    def depth(self, p: BiasGeluProblem) -> float:
        return gelu_depth(p)

    def constants(self, p: BiasGeluProblem) -> dict[str, int | bool | str]:
        return {"ACT": "gelu" if p.approximate == "none" else "gelu_tanh"}


class BiasGelu(_BiasGelu):
    """``out = gelu(x + bias)``. Arguments: x, bias."""

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
    kernel = "bias_gelu"
    results = ("out",)
    inputs = ("x", "bias")
    schema = "Tensor x, Tensor bias, str approximate"
    flops_per_element = 20

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        x = tensor_op.present(inputs)[0]
        return (x.new_empty(x.shape),)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, bias = args
        return (F.gelu(x.double() + bias, **options).to(x.dtype),)  # fp64: 1 + erf cancels left of 0


class BiasGeluBackward(_BiasGelu):
    """The gradient of :class:`BiasGelu`: dx, and the sums of dx over slabs of rows, whose sum is the bias's.

    Arguments: dout, x, bias.
    """

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
    kernel = "bias_gelu_backward"
    results = ("dx", "partials")
    partials = ("partials",)
    inputs = ("dout", "x", "bias")
    schema = "Tensor dout, Tensor x, Tensor bias, str approximate"
    flops_per_element = 28
    in_place = False

    def numbers(self, p: BiasGeluProblem) -> dict[str, int]:
        return super().numbers(p) | {"slab": slab_rows(p.rows)}

    def why_not(self, p: BiasGeluProblem, c: TileConfig, gpu: GpuSpec) -> str | None:
        if c.block_rows > power_of_two(slab_rows(p.rows)):
            return f"block_rows={c.block_rows} idles most of a tile in slabs of {slab_rows(p.rows)} rows"
        return super().why_not(p, c, gpu)

    def default(self, p: BiasGeluProblem, gpu: GpuSpec) -> TileConfig:
        # Narrow blocks, for programs are columns times slabs; two rows per thread at a time keep enough in flight.
        width = min(256, max(32, power_of_two(p.cols), 32 * p.vec))
        height = min(8, power_of_two(slab_rows(p.rows)))
        if p.layout == "strided":
            return TileConfig(height, 32, min(4, height), "normal")
        return TileConfig(height, width, max(1, min(4, width * height // (32 * p.vec))), "normal")

    def tiles(self, p: BiasGeluProblem, c: TileConfig) -> int:
        return -(-p.cols // c.block_cols) * slabs(p.rows)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        _, x, _ = tensor_op.present(inputs)
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
        return x.new_empty(x.shape), x.new_empty((slabs(rows), x.shape[-1]), dtype=dtype)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        dout, x, bias = args
        dx = dout.double() * gelu_and_slope(x.double() + bias.double(), **options)[1]
        flat = dx.reshape(-1, x.shape[-1]) if dx.numel() else dx.new_empty((0, x.shape[-1]))
        partials = [part.sum(dim=0) for part in flat.split(max(1, slab_rows(len(flat))))] if len(flat) else []
        stacked = torch.stack(partials) if partials else flat
        return dx.to(x.dtype), stacked if x.dtype is torch.float64 else stacked.float()

    def work(self, p: BiasGeluProblem) -> Work:
        found = super().work(p)
        return Work(found.flops, found.bytes + 4 * slabs(p.rows) * p.cols, found.depth)


def slab_rows(rows: int) -> int:
    """Rows that one partial sum is of: 8 where there are few, else 32, else a 128th."""
    return min(rows, 8) if rows <= 256 else max(32, -(-rows // 128))


def slabs(rows: int) -> int:
    """How many partial sums there are."""
    return -(-rows // slab_rows(rows)) if rows else 0


BIAS_GELU = BiasGelu()
BIAS_GELU_BACKWARD = BiasGeluBackward()
