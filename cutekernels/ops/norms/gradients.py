"""The gradients of the norms, and the column sum that their weights need.

A launch is two kernels: the first writes ``dx`` and, for weights and biases, one fp32 part per program; the second adds
the parts up, in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Work, exact, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.norms.rows import N, NormConfig, NormOp, NormProblem, sms_here, typed
from cutekernels.ops.shared import tensor_op
from cutekernels.ops.shared.tensor_op import DTYPE_NAMES, GPU_DTYPES, WIDEST_BYTES, Launch, TensorOp

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec


# ---- the second pass ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnSumProblem(Problem):
    """``parts`` rows of fp32 for each result, whose type is ``dtype``.

    ``align``: bytes that divide the address of the parts and a row's length.
    """

    parts: int = extent(ladder)
    cols: int = extent(exact)
    dtype: str = plain("fp32", "bf16", "fp16")
    align: int = plain(16, 8, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cols * 4 % self.align:
            raise UnsupportedProblem(f"align={self.align} divides a row of {self.cols} fp32; it does not: take less")


@dataclass(frozen=True)
class ColumnSumConfig(Config):
    """A program sums ``block_cols`` columns, ``block_parts`` rows at a time."""

    block_parts: int = knob(8, 32, 64, 128, 256)
    block_cols: int = knob(16, 32, 64, 128)
    warps: int = knob(2, 4, 8)


class ColumnSum(TensorOp[ColumnSumProblem, ColumnSumConfig]):
    """``out[c] = sum of parts[p, c] over p``, in an order that only the config decides. Argument: parts, contiguous."""

    name = "column_sum"
    revision = 1
    suite: ClassVar[tuple[str, ...]] = (
        "parts=132 cols=4096",
        "parts=264 cols=4096 dtype=bf16",
        "parts=7 cols=1001 align=4",
        "parts=528 cols=8192",
    )
    Problem = ColumnSumProblem
    Config = ColumnSumConfig
    results: ClassVar[tuple[str, ...]] = ("out",)
    inputs = ("parts",)
    schema = "Tensor parts"
    in_place = False

    def takes(self, name: str, t: Tensor) -> bool:
        return t.is_contiguous()

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        (parts,) = inputs
        assert parts is not None
        if parts.dim() != 2 or parts.dtype != torch.float32:
            raise UnsupportedProblem(
                f"{self.name} takes a matrix of torch.float32; got {tuple(parts.shape)} of {parts.dtype}"
            )
        if parts.shape[0] % len(self.results):
            raise UnsupportedProblem(f"{self.name} sums as many rows into each result; got {parts.shape[0]}")
        for out in results:
            if out.shape != parts.shape[1:] or out.device != parts.device or out.dtype not in DTYPE_NAMES:
                raise UnsupportedProblem(f"{self.name} writes {tuple(parts.shape[1:])}; got {tuple(out.shape)}")

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        (parts,) = inputs
        assert parts is not None
        return tuple([parts.new_empty(parts.shape[1:]) for _ in self.results])

    def problem(self, *operands: Tensor | None, **options: Any) -> ColumnSumProblem:
        out, parts = operands[0], operands[-1]
        assert out is not None
        assert parts is not None
        bits = WIDEST_BYTES | parts.data_ptr() | parts.shape[1] * 4
        # The result is written once; it may lie anywhere.
        rows, cols = parts.shape
        return ColumnSumProblem(rows // len(self.results), cols, DTYPE_NAMES[out.dtype], bits & -bits)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        return tuple([half.double().sum(0).float() for half in args[0].chunk(len(self.results))])

    def reference(self, p: ColumnSumProblem, *args: Any) -> tuple[Tensor, ...]:
        halves = args[0].chunk(len(self.results)) if p.parts else [args[0]] * len(self.results)
        return tuple([half.double().sum(0).to(GPU_DTYPES[p.dtype]) for half in halves])

    def why_not(self, p: ColumnSumProblem, c: ColumnSumConfig, gpu: GpuSpec) -> str | None:
        per_thread = c.block_parts * c.block_cols // (32 * c.warps)
        if per_thread < p.align // 4:
            return (
                f"{32 * c.warps} threads need {p.align} bytes each; a tile has {c.block_parts * c.block_cols} elements"
            )
        if per_thread > 64:
            return f"a thread keeps {per_thread} sums; at most 64"
        if c.block_parts > max(8, power_of_two(p.parts)):
            return f"block_parts={c.block_parts} idles most of a tile with {p.parts} parts"
        if c.block_cols > max(32, power_of_two(p.cols)):
            return f"block_cols={c.block_cols} idles most of a tile with {p.cols} columns"
        return None

    def default(self, p: ColumnSumProblem, gpu: GpuSpec) -> ColumnSumConfig:
        rows = min(128, max(8, power_of_two(p.parts)))
        block_parts = max(v for v in (8, 32, 64, 128) if v <= rows)
        warps = max(w for w in (2, 4, 8) if w == 2 or block_parts * 32 >= 32 * w * 8)
        return ColumnSumConfig(block_parts, 32, warps)

    def estimate_us(self, p: ColumnSumProblem, c: ColumnSumConfig, gpu: GpuSpec) -> float:
        """A chain of L2 round trips, or the bytes."""
        rounds = -(-p.parts // c.block_parts)
        waves = max(1.0, self.grid(p, c)[0] / (gpu.sm_count * max(1, gpu.max_warps // c.warps)))
        return 1.5 + max(rounds * 0.5 * waves, self.work(p).bytes / (gpu.dram_gbps * 1e3))

    def build(self, p: ColumnSumProblem, c: ColumnSumConfig, gpu: GpuSpec) -> Artifact:
        from cutekernels.backends.triton import compile_kernel
        from cutekernels.kernels.triton.norms import gradients as norm_gradients

        constants: dict[str, int | bool | str | float] = {"BLOCK_PARTS": c.block_parts, "BLOCK_COLS": c.block_cols}
        signature = {f"{name}_ptr": f"*{p.dtype}" for name in self.results}
        signature |= {"parts_ptr": "*fp32", "parts": "i32", "cols": "i64"}
        return compile_kernel(
            getattr(norm_gradients, self.name),
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            divisible={"parts_ptr": p.align, "cols": p.align // 4},
            options={"num_warps": c.warps},
            gpu=gpu,
        )

    def grid(self, p: ColumnSumProblem, c: ColumnSumConfig) -> tuple[int, int, int]:
        return -(-p.cols // c.block_cols), len(self.results), 1

    def bind(self, p: ColumnSumProblem, c: ColumnSumConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        return Launch(kernel, self.grid(p, c), len(self.results) + 1, lambda *operands: (p.parts, p.cols))

    def outputs(self, p: ColumnSumProblem, *args: Any) -> tuple[Tensor, ...]:
        return tuple([args[0].new_empty(p.cols, dtype=GPU_DTYPES[p.dtype]) for _ in self.results])

    def sample(self, p: ColumnSumProblem, device: str, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        skew = p.align % WIDEST_BYTES // 4
        rows = p.parts * len(self.results)
        memory = torch.randn(rows * p.cols + skew, generator=generator, device=device)
        return (memory[skew:].view(rows, p.cols),)

    def work(self, p: ColumnSumProblem) -> Work:
        moved = 4 * p.parts * p.cols + GPU_DTYPES[p.dtype].itemsize * p.cols
        n = len(self.results)
        return Work(flops=float(n * p.parts * p.cols), bytes=float(n * moved), depth=float(p.parts))


class ColumnSumPair(ColumnSum):
    """Two of them: the first half of the rows summed into ``out``, the second into ``more``. Argument: parts."""

    name = "column_sum_pair"
    suite = ("parts=132 cols=4096", "parts=264 cols=4096 dtype=bf16", "parts=7 cols=1001 align=4")
    results = ("out", "more")


# ---- the gradients --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RmsNormBackwardProblem(NormProblem):
    """``dweight``: whether it is wanted. ``du``: whether ``x`` is a sum with a gradient of its own."""

    dweight: bool = plain(True, False)
    du: bool = plain(False, True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dweight(self, self.dweight)


@dataclass(frozen=True)
class LayerNormBackwardProblem(NormProblem):
    """``dweight``: whether it is wanted. ``dbias``: of which type it is wanted."""

    dweight: bool = plain(True, False)
    dbias: str = plain("same", "none", "fp32")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dweight(self, self.dweight)


def _check_dweight(p: NormProblem, wanted: bool) -> None:
    if wanted and p.weight == "none":
        raise UnsupportedProblem("there is no gradient of an absent weight: dweight must be 0 with weight=none")


class _NormBackward(NormOp[N]):
    """What both gradients do alike: their sums over rows."""

    kernels = "norms.gradients"
    strides_over_tiles = True

    def bind(self, p: N, c: NormConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        if p.rows * p.heads * p.cols == 0:
            return self._nothing
        grid = self.grid(p, c, sms_here())
        programs = math.prod(grid)
        launch = Launch(kernel, grid, len(self.results) + len(self.inputs), lambda *o: self.numbers(p, *o))
        summed = [i for i, name in enumerate(self.results) if name != "dx" and self.kind(p, name) is not None]
        absent = [i for i, name in enumerate(self.results) if name != "dx" and i not in summed]
        per_head = p.heads if p.per_head else 1

        def launch_both(*args: Any) -> None:
            places = list(args)
            for i in absent:
                places[i] = None
            parts = tensor_op.scratch(args[0], len(summed), programs // per_head, per_head * p.cols) if summed else None
            for i, part in zip(summed, () if parts is None else parts.unbind(), strict=True):
                places[i] = part
            launch(*places)
            if len(summed) == 2 and args[summed[0]].dtype == args[summed[1]].dtype:
                assert parts is not None
                tensor_op.run(COLUMN_SUM_PAIR, tuple([args[i].view(-1) for i in summed]), (parts.flatten(0, 1),))
            else:
                for i in summed:
                    tensor_op.run(COLUMN_SUM, (args[i].view(-1),), (places[i],))

        return launch_both

    def _nothing(self, *operands: Any) -> None:
        """The sums over no rows."""
        for t in operands[: len(self.results)]:
            t.zero_()


class RmsNormBackward(_NormBackward[RmsNormBackwardProblem]):
    """The gradient of RMSNorm: (dx, dweight), plus ``du`` where ``x`` is the ``u`` of ``add_rms_norm``.

    Arguments: dy, x, weight, du, eps, weight_offset. ``dweight`` is empty where it is not wanted.
    """

    name = "rms_norm_backward"
    revision = 1
    suite = (
        "rows=1 cols=4096",
        "rows=16 cols=3584",
        "rows=333 cols=1001 align=2",
        "rows=77 cols=130 layout=strided",
        "rows=300 cols=128 heads=5 layout=heads",
        "rows=300 cols=64 heads=3 layout=heads per_head=1",
        "rows=2048 cols=4096",
        "rows=2048 cols=4096 weight=fp32 du=1",
        "rows=2048 cols=8192 dweight=0",
        "rows=2048 cols=5120 dtype=fp32 weight=none dweight=0",
        "rows=133 cols=20000 dtype=fp16",
        "rows=2048 cols=8192",
        "rows=32768 cols=4096",
        "rows=32768 cols=8192",
    )
    Problem = RmsNormBackwardProblem
    results = ("dx", "dweight")
    inputs = ("dy", "x", "weight", "du")
    options = ("dweight",)
    scalars = ("eps", "weight_offset")
    schema = "Tensor dy, Tensor x, Tensor? weight, Tensor? du, bool dweight, float eps, float weight_offset"
    flops_per_element = 13

    def kind(self, p: RmsNormBackwardProblem, name: str) -> str | None:
        if name == "dweight":
            return "fp32" if p.dweight else None
        if name == "du":
            return p.dtype if p.du else None
        return typed(p, p.weight) if name == "weight" else p.dtype

    def values(self, p: RmsNormBackwardProblem) -> int:
        return 3 + (p.weight != "none") + p.dweight

    def flags(self, p: RmsNormBackwardProblem) -> dict[str, bool]:
        return {"RESIDUAL": p.du, "WEIGHT": p.weight != "none", "PARTS": p.dweight}

    def pose(
        self, common: Mapping[str, Any], named: Mapping[str, Tensor | None], options: Mapping[str, Any]
    ) -> RmsNormBackwardProblem:
        wanted = bool(options.get("dweight", True)) and named["weight"] is not None
        return RmsNormBackwardProblem(**common, dweight=wanted, du=named["du"] is not None)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        dy, _, weight, _ = inputs
        assert dy is not None
        wanted = weight if options.get("dweight", True) else None
        return dy.new_empty(dy.shape), dy.new_empty(0) if wanted is None else wanted.new_empty(wanted.shape)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        dy, x, weight, du, eps, offset = args
        d, v = dy.double(), x.double()
        rstd = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
        g = d if weight is None else d * (weight.double() + offset)
        v = v * rstd
        dx = rstd * (g - v * (g * v).mean(-1, keepdim=True))
        dx = dx if du is None else dx + du.double()
        wanted = weight is not None and options["dweight"]
        return dx.to(x.dtype), _summed(d * v, weight, weight.dtype) if wanted else dy.new_empty(0)


class LayerNormBackward(_NormBackward[LayerNormBackwardProblem]):
    """The gradient of LayerNorm: (dx, dweight, dbias). Arguments: dy, x, weight, eps.

    What is not wanted is empty. ``dbias`` says of which type the bias is.
    """

    name = "layer_norm_backward"
    revision = 1
    suite = (
        "rows=1 cols=4096",
        "rows=333 cols=1001 align=2",
        "rows=77 cols=130 layout=strided",
        "rows=300 cols=128 heads=5 layout=heads",
        "rows=2048 cols=768",
        "rows=2048 cols=4096",
        "rows=2048 cols=4096 weight=fp32 dbias=fp32",
        "rows=2048 cols=5120 dtype=fp32 weight=none dweight=0 dbias=none",
        "rows=133 cols=20000 dtype=fp16",
        "rows=2048 cols=8192",
        "rows=32768 cols=4096",
    )
    Problem = LayerNormBackwardProblem
    results = ("dx", "dweight", "dbias")
    inputs = ("dy", "x", "weight")
    options = ("dweight", "dbias")
    scalars = ("eps",)
    schema = "Tensor dy, Tensor x, Tensor? weight, bool dweight, str dbias, float eps"
    flops_per_element = 17

    def kind(self, p: LayerNormBackwardProblem, name: str) -> str | None:
        if name in ("dweight", "dbias"):
            return "fp32" if (p.dweight if name == "dweight" else p.dbias != "none") else None
        return typed(p, p.weight) if name == "weight" else p.dtype

    def values(self, p: LayerNormBackwardProblem) -> int:
        return 3 + (p.weight != "none") + p.dweight + (p.dbias != "none")

    def flags(self, p: LayerNormBackwardProblem) -> dict[str, bool]:
        return {"WEIGHT": p.weight != "none", "PARTS": p.dweight, "BIAS": p.dbias != "none"}

    def pose(
        self, common: Mapping[str, Any], named: Mapping[str, Tensor | None], options: Mapping[str, Any]
    ) -> LayerNormBackwardProblem:
        wanted = bool(options.get("dweight", True)) and named["weight"] is not None
        return LayerNormBackwardProblem(**common, dweight=wanted, dbias=options.get("dbias", "same"))

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        dy, _, weight = inputs
        assert dy is not None
        wanted = weight if options.get("dweight", True) else None
        dbias, shape = options.get("dbias", "same"), dy.shape[-1:] if weight is None else weight.shape
        return (
            dy.new_empty(dy.shape),
            dy.new_empty(0) if wanted is None else wanted.new_empty(wanted.shape),
            dy.new_empty(0) if dbias == "none" else dy.new_empty(shape, dtype=_bias_type(dbias, dy)),
        )

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        dy, x, weight, eps = args
        d, v = dy.double(), x.double()
        v = v - v.mean(-1, keepdim=True)
        rstd = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
        v = v * rstd
        g = d if weight is None else d * weight.double()
        dx = rstd * (g - g.mean(-1, keepdim=True) - v * (g * v).mean(-1, keepdim=True))
        wanted, bias = weight is not None and options["dweight"], options["dbias"]
        like = dy.new_empty(dy.shape[-1:]) if weight is None else weight
        return (
            dx.to(x.dtype),
            _summed(d * v, weight, weight.dtype) if wanted else dy.new_empty(0),
            dy.new_empty(0) if bias == "none" else _summed(d, like, _bias_type(bias, dy)),
        )


def _bias_type(kind: str, like: Tensor) -> torch.dtype:
    return like.dtype if kind == "same" else torch.float32


def _summed(t: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` summed over its leading dimensions to the shape of a weight."""
    return t.reshape(-1, *like.shape).sum(0).to(dtype)


COLUMN_SUM = ColumnSum()
COLUMN_SUM_PAIR = ColumnSumPair()
RMS_NORM_BACKWARD = RmsNormBackward()
LAYER_NORM_BACKWARD = LayerNormBackward()


def register(library: torch.library.Library) -> None:
    """Defines the ops of this file in ``library``. They have no gradients of their own."""
    tensor_op.register(library, RMS_NORM_BACKWARD)
    tensor_op.register(library, LAYER_NORM_BACKWARD)
