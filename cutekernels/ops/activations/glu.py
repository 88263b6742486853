"""Gated activations, ``out = act(gate) * up``, and their gradients: four ops of one schedule and one kernel body."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cutekernels.op import plain
from cutekernels.ops.activations.tiles import TileConfig, TiledOp, TileProblem, widened
from cutekernels.ops.shared.tensor_op import ElementwiseOp


@dataclass(frozen=True)
class GluProblem(TileProblem):
    """A gated activation. See :class:`~cutekernels.ops.activations.tiles.TileProblem`."""

    @property
    def act(self) -> str:
        """What the kernel calls the activation."""
        return "silu"


@dataclass(frozen=True)
class GeluProblem(GluProblem):
    """The same with GELU: exact (``x`` times the normal distribution function), or its approximation by tanh."""

    approximate: str = plain("none", "tanh")

    @property
    def act(self) -> str:
        return "gelu" if self.approximate == "none" else "gelu_tanh"


G = TypeVar("G", bound=GluProblem)


# H200, 2048 rows of 4096 to 18944, fp16: 13.45 -> 13.07 to 55.63 -> 54.98 us for silu_mul (2026-11-21).
LARGE = ((16, 1, 0.9), (4, 2, 4.0))


class Gated(TiledOp[G], ElementwiseOp[G, TileConfig]):
    """What both passes of every activation have in common."""

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        super().admit(inputs, results, **options)
        if options:
            self.Problem(0, 0, **options)  # refuses values that no field takes

    def constants(self, p: G) -> dict[str, int | bool | str]:
        return {"ACT": p.act, "DENSE": p.layout == "dense"}


class SiluMul(Gated[GluProblem]):
    """``out = silu(gate) * up``. Arguments: gate, up."""

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
    kernel = "glu"
    results = ("out",)
    inputs = ("gate", "up")
    schema = "Tensor gate, Tensor up"
    large = LARGE
    flops_per_element = 5

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        gate, up = args
        return ((F.silu(widened(gate)) * widened(up)).to(gate.dtype),)


class SiluMulBackward(Gated[GluProblem]):
    """The gradient of :class:`SiluMul`: (dgate, dup). Arguments: dout, gate, up."""

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
    kernel = "glu_backward"
    results = ("dgate", "dup")
    inputs = ("dout", "gate", "up")
    schema = "Tensor dout, Tensor gate, Tensor up"
    flops_per_element = 11

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        # fp64 throughout: dgate crosses zero near gate = -1.278, where fp32 would leave nothing but its own error.
        dout, gate, up = args
        d, g, u = dout.double(), gate.double(), up.double()
        s = torch.sigmoid(g)
        return (d * u * (s * (1 + g * (1 - s)))).to(gate.dtype), (d * (g * s)).to(up.dtype)


class GeluMul(Gated[GeluProblem]):
    """``out = gelu(gate) * up``. Arguments: gate, up."""

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
    kernel = "glu"
    results = ("out",)
    inputs = ("gate", "up")
    options = ("approximate",)
    schema = "Tensor gate, Tensor up, str approximate"
    large = LARGE
    flops_per_element = 20

    def depth(self, p: GeluProblem) -> float:
        return gelu_depth(p)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        gate, up = args
        # In fp64: 1 + erf cancels left of 0, where fp32 would leave little but its own error.
        return ((F.gelu(gate.double(), **options) * up.double()).to(gate.dtype),)


class GeluMulBackward(Gated[GeluProblem]):
    """The gradient of :class:`GeluMul`: (dgate, dup). Arguments: dout, gate, up."""

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
    kernel = "glu_backward"
    results = ("dgate", "dup")
    inputs = ("dout", "gate", "up")
    options = ("approximate",)
    schema = "Tensor dout, Tensor gate, Tensor up, str approximate"
    flops_per_element = 28

    def depth(self, p: GeluProblem) -> float:
        return gelu_depth(p)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        dout, gate, up = args
        d, g, u = dout.double(), gate.double(), up.double()
        value, slope = gelu_and_slope(g, **options)
        return (d * u * slope).to(gate.dtype), (d * value).to(up.dtype)


def gelu_depth(p: TileProblem) -> float:
    """How exact GELU and its slope can be: an absolute error left of 0, and at the slope's zero, where terms cancel.

    Half precision: 2^-17 of the terms, which may be five times a typical result, and so 2048 / 8 ulp of fp32 of that.
    fp32: 1 + erf loses what torch's loses. Modelled on a CPU with 4M elements: 0.7 and 0.1 of what is granted.
    """
    return 256.0 if p.dtype == "fp32" else 2048.0


def gelu_and_slope(x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """GELU of ``x`` and its derivative, in the type of ``x``."""
    if approximate == "none":
        cdf = 0.5 * torch.special.erfc(-x * math.sqrt(0.5))
        return x * cdf, cdf + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    inner = 2 * math.sqrt(2 / math.pi)
    s = torch.sigmoid(inner * (x + 0.044715 * x * x * x))
    return x * s, s + x * (s * (1 - s)) * inner * (1 + 3 * 0.044715 * x * x)


SILU_MUL = SiluMul()
SILU_MUL_BACKWARD = SiluMulBackward()
GELU_MUL = GeluMul()
GELU_MUL_BACKWARD = GeluMulBackward()
