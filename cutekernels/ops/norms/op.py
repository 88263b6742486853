"""Declarations of ``rms_norm``, ``add_rms_norm`` and ``layer_norm``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import plain
from cutekernels.ops.norms.rows import NormOp, NormProblem, affine_kind, typed, wide

# ---- declarations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RmsNormProblem(NormProblem):
    """``rounding``: whether ``x * rstd`` is rounded before it is multiplied by the weight. ``shifted``: whether
    ``weight_offset`` is added to that; 0 needs no addition.
    """

    rounding: str = plain("once", "huggingface")
    shifted: bool = plain(False, True)

    def bucket(self) -> RmsNormProblem:
        """One tuning serves weights with and without an offset."""
        return super().bucket().replace(shifted=False)


@dataclass(frozen=True)
class LayerNormProblem(NormProblem):
    """``bias``: of which type, as ``weight``."""

    bias: str = plain("same", "none", "fp32")


class _RmsNorms(NormOp[RmsNormProblem]):
    Problem = RmsNormProblem
    kernels = "norms.forward"
    options = ("rounding", "shifted")
    scalars = ("eps", "weight_offset")
    strides_over_tiles = False
    wide_row = 2048

    def kind(self, p: RmsNormProblem, name: str) -> str | None:
        return typed(p, p.weight) if name == "weight" else p.dtype

    def values(self, p: RmsNormProblem) -> int:
        return self._copied(p) + (p.weight != "none")

    def flags(self, p: RmsNormProblem) -> dict[str, bool]:
        return {"WEIGHT": p.weight != "none", "SHIFTED": p.shifted, "ROUND_TWICE": p.rounding == "huggingface"}

    def pose(self, common: Mapping[str, Any], named: Any, options: Mapping[str, Any]) -> RmsNormProblem:
        return RmsNormProblem(**common, **options)

    def sample(self, p: RmsNormProblem, device: str, seed: int) -> tuple[Any, ...]:
        *args, offset = super().sample(p, device, seed)
        return (*args, offset if p.shifted else 0.0)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        x = inputs[0]
        assert x is not None
        return tuple([x.new_empty(x.shape) for _ in self.results])

    def normalise(self, x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> Tensor:
        v = wide(x)
        y = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
        if rounding == "huggingface":
            y = y.to(x.dtype).to(v.dtype)
        return (y if weight is None else y * (weight.to(v.dtype) + offset)).to(x.dtype)


class RmsNorm(_RmsNorms):
    """``y = x * rstd * (weight + weight_offset)``. Arguments: x, weight, eps, weight_offset."""

    name = "rms_norm"
    revision = 1
    # H200, 32768 rows, us in chunks (in the tuner) and whole (in the bench): 4096 columns 128.3 and 133.2, 6144 of fp16
    # 193 and 213, 8192 256 and 265; chunks of 2048 take 265 there too (2026-11-22).
    chunks: ClassVar[Mapping[int, tuple[int, int]]] = {4096: (2048, 8), 8192: (4096, 16)}
    suite = (
        "rows=1 cols=4096",
        "rows=16 cols=3584",
        "rows=333 cols=1001 align=2",
        "rows=77 cols=130 layout=strided",
        "rows=300 cols=128 heads=5 layout=heads",
        "rows=300 cols=64 heads=3 layout=heads per_head=1",
        "rows=2048 cols=896",
        "rows=2048 cols=3584",
        "rows=2048 cols=4096",
        "rows=2048 cols=4096 weight=fp32 shifted=1",
        "rows=2048 cols=5120 dtype=fp32 weight=none",
        "rows=33 cols=20000 dtype=fp16",
        "rows=8192 cols=6144 dtype=fp16",
        "rows=32768 cols=4096",
    )
    results = ("y",)
    inputs = ("x", "weight")
    schema = "Tensor x, Tensor? weight, str rounding, bool shifted, float eps, float weight_offset"
    flops_per_element = 4

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, weight, eps, offset = args
        return (self.normalise(x, weight, eps, offset if options["shifted"] else 0.0, options["rounding"]),)


class AddRmsNorm(_RmsNorms):
    """``u = x + residual`` and its RMSNorm: (y, u). Arguments: x, residual, weight, eps, weight_offset."""

    name = "add_rms_norm"
    revision = 1
    # H200, 32768 rows, us in chunks (tuner) and whole (bench): 4096 columns 260 and 264, 8192 516 and 522 (2026-11-21).
    chunks: ClassVar[Mapping[int, tuple[int, int]]] = {4096: (2048, 8), 8192: (4096, 16)}
    # 2048 x 896 in us, H200: two rows to four warps 3.69 in a warm L2 and 5.13, one row 3.02 and 4.97 (2026-11-22).
    summands = 2
    suite = (
        "rows=1 cols=4096",
        "rows=16 cols=3584",
        "rows=333 cols=1001 align=2",
        "rows=77 cols=130 layout=strided",
        "rows=2048 cols=3584",
        "rows=2048 cols=4096",
        "rows=2048 cols=5120 dtype=fp32",
        "rows=33 cols=20000 dtype=fp16",
        "rows=32768 cols=4096",
    )
    results = ("y", "u")
    inputs = ("x", "residual", "weight")
    schema = "Tensor x, Tensor residual, Tensor? weight, str rounding, bool shifted, float eps, float weight_offset"
    flops_per_element = 5

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, residual, weight, eps, offset = args
        u = (wide(x) + wide(residual)).to(x.dtype)
        return self.normalise(u, weight, eps, offset if options["shifted"] else 0.0, options["rounding"]), u


class LayerNorm(NormOp[LayerNormProblem]):
    """``y = (x - mean) * rstd * weight + bias``. Arguments: x, weight, bias, eps."""

    name = "layer_norm"
    revision = 1
    suite = (
        "rows=1 cols=4096",
        "rows=16 cols=3584",
        "rows=333 cols=1001 align=2",
        "rows=77 cols=130 layout=strided",
        "rows=300 cols=128 heads=5 layout=heads",
        "rows=2048 cols=768",
        "rows=2048 cols=4096",
        "rows=2048 cols=4096 weight=fp32 bias=fp32",
        "rows=2048 cols=5120 dtype=fp32 weight=none bias=none",
        "rows=33 cols=20000 dtype=fp16 bias=none",
        "rows=32768 cols=4096",
    )
    Problem = LayerNormProblem
    kernels = "norms.forward"
    results = ("y",)
    inputs = ("x", "weight", "bias")
    scalars = ("eps",)
    schema = "Tensor x, Tensor? weight, Tensor? bias, float eps"
    strides_over_tiles = False
    wide_row = 2048
    # H200, 32768 rows of 4096 and of 8192: 131.4 and 268 us in pairs, 142 and 361 one by one (2026-11-21).
    paired = True
    flops_per_element = 7

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        super().admit(inputs, results, **options)
        _, weight, bias = inputs
        if bias is not None and weight is None and bias.dim() > 1:
            raise UnsupportedProblem("a bias for each head needs weights of its shape; got none: pass ones")

    def kind(self, p: LayerNormProblem, name: str) -> str | None:
        return typed(p, p.weight) if name == "weight" else typed(p, p.bias) if name == "bias" else p.dtype

    def values(self, p: LayerNormProblem) -> int:
        return 1 + (p.weight != "none") + (p.bias != "none")

    def flags(self, p: LayerNormProblem) -> dict[str, bool]:
        return {"WEIGHT": p.weight != "none", "BIAS": p.bias != "none"}

    def pose(self, common: Mapping[str, Any], named: Mapping[str, Tensor | None], options: Any) -> LayerNormProblem:
        x = named["x"]
        assert x is not None
        return LayerNormProblem(**common, bias=affine_kind(named["bias"], x))

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        x = inputs[0]
        assert x is not None
        return (x.new_empty(x.shape),)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, weight, bias, eps = args
        v = wide(x)
        v = v - v.mean(-1, keepdim=True)
        y = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
        y = y if weight is None else y * weight.to(v.dtype)
        return ((y if bias is None else y + bias.to(v.dtype)).to(x.dtype),)


RMS_NORM = RmsNorm()
ADD_RMS_NORM = AddRmsNorm()
LAYER_NORM = LayerNorm()
