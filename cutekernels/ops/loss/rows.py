"""``logit_statistics`` and ``logit_gradient``: what losses need of a block of logits, row by row.

The state of a row is described in ``kernels/triton/loss.py``: maximum, sum of exponentials, the target's logit and
three sums that some losses need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Work, exact, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.shared import streaming
from cutekernels.ops.shared.coefficients import STREAMING
from cutekernels.ops.shared.dtypes import BYTES, WIDEST_BYTES
from cutekernels.ops.shared.laid_out import LaidOut
from cutekernels.ops.shared.operands import Array, Matrix, Sizes
from cutekernels.ops.shared.tile_rules import accesses_rule, elements_rule, idle_rule
from cutekernels.ops.shared.triton_op import TritonOp, TritonPart

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

TERMS = 8  # numbers of a row's state, and of its factors
MAXIMUM, SUM, TARGET, WEIGHED, TOTAL, SHARE = range(6)
_MOST_PER_THREAD = 32  # logits of a row that a thread holds
_DEPTH = 64.0


@dataclass(frozen=True)
class LogitProblem(LaidOut, Problem):
    """A block of ``cols`` classes. ``capped``: logits pass through a softcap. ``moments``: the sum of p * d is wanted,
    d the logit less the largest. ``totals``: the sum of all d is, each times its class's weight where ``weighted``.
    """

    aligns_rows: ClassVar[str | None] = "cols"
    most: ClassVar = {"rows": (1 << 31) - 1, "cols": 1 << 30}
    rows: int = extent(ladder)
    cols: int = extent(exact)
    dtype: str = plain("bf16", "fp16", "fp32")
    index: str = plain("i64", "i32")
    capped: bool = plain(False, True)
    moments: bool = plain(False, True)
    totals: bool = plain(False, True)
    weighted: bool = plain(False, True)
    layout: str = plain("rows", "strided")
    align: int = plain(16, 8, 4, 2)


@dataclass(frozen=True)
class LogitConfig(Config):
    """A row is walked ``block`` columns at a time by ``warps``."""

    block: int = knob(256, 512, 1024, 2048, 4096, 8192, 16384)
    warps: int = knob(1, 2, 4, 8, 16)


class LogitRows(TritonPart[LogitProblem, LogitConfig]):
    """What both ops over a block of logits share."""

    Problem = LogitProblem
    Config = LogitConfig
    suite = (
        "rows=2048 cols=15232",
        "rows=2048 cols=15232 capped=1 moments=1",
        "rows=512 cols=62464 dtype=fp16",
        "rows=16 cols=128256 totals=1 weighted=1",
        "rows=333 cols=1001 align=2 moments=1 totals=1 index=i32",
        "rows=57 cols=130 layout=strided",
        "rows=100 cols=1 align=2",
        "rows=64 cols=32000 dtype=fp32 capped=1 totals=1",
    )
    options = ("capped", "moments", "totals")
    sizes = {"cols": "i32"}
    constexprs = ("capped", "moments", "totals", "weighted", "block")

    def derive(self, sizes: Sizes, **options: Any) -> None:
        if sizes.setdefault("terms", TERMS) != TERMS:
            raise ValueError(f"a row's state and factors have {TERMS} numbers")

    accesses = accesses_rule("block", one_warp=True)
    most_elements = elements_rule("block", most=_MOST_PER_THREAD)
    no_idle_columns = idle_rule("block", "cols", "{} columns", least=256)

    def draw(self, p: LogitProblem, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        import torch

        where = generator.device
        if name == "targets":
            return torch.randint(0, max(1, p.cols), shape, generator=generator, device=where)
        if name == "logits":
            return torch.randn(shape, generator=generator, device=where).mul_(4)
        if name == "class_weight":
            return torch.rand(shape, generator=generator, device=where).add_(0.5)
        values = torch.rand(shape, generator=generator, device=where)
        if name == "state":
            return values.mul_(4).add_(1)
        # Factors: a maximum and a sum's logarithm like those of the logits, the rest of either sign.
        values.mul_(2).sub_(1)
        if p.capped:
            values[:, 0].mul_(0.1).add_(0.6)  # u is a tanh
        else:
            values[:, 0] += 7 + 0.7 * max(1, p.cols).bit_length()
        values[:, 1] += 1
        return values

    def u(self, logits: Tensor, scale: float, cap: float, capped: bool) -> tuple[Tensor, float]:
        """u in fp64, and the factor that makes it the loss's logits."""
        import torch

        x = logits.double()
        return (torch.tanh(x / cap), cap * scale) if capped else (x, scale)


class LogitStatistics(LogitRows, TritonOp[LogitProblem, LogitConfig]):
    """The rows' state with a block of the vocabulary added. ``out_state`` may be ``state``."""

    name = "logit_statistics"
    revision = 2
    kernel = "loss:logit_statistics"
    out_state = Array("rows", "terms", dtype="wide", strides=(), result=True)
    logits = Matrix("rows", "cols")
    targets = Array("rows", dtype="index", strides=())
    class_weight = Array("cols", dtype="wide", strides=(), given="weighted")
    state = Array("rows", "terms", dtype="wide", strides=())
    in_place_pairs = frozenset({("out_state", "state")})
    scalar_types = {"first": "i64", "ignore": "i64", "scale": "fp32", "cap": "fp32"}
    scalar_samples = {"first": 0, "ignore": -100, "scale": 0.9, "cap": 30.0}

    def grid(self, p: LogitProblem, c: LogitConfig) -> tuple[int, int, int]:
        return p.rows, 1, 1

    def default(self, p: LogitProblem, gpu: GpuSpec) -> LogitConfig:
        # A warp a row, with as many elements in flight as registers hold: docs/notes/loss.md#passes (H200, 2026-11-26).
        return LogitConfig(min(512 if p.moments or p.totals else 1024, max(256, power_of_two(p.cols))), 1)

    def estimate_us(self, p: LogitProblem, c: LogitConfig, gpu: GpuSpec) -> float:
        item = 4 if p.dtype == "fp32" else 2
        passes = -(-p.cols // c.block)
        moved = self.work(p).bytes * (passes * c.block / max(1, p.cols)) ** STREAMING.ragged
        return streaming.estimate_us(
            gpu, moved, self.grid(p, c), c.warps, c.block * item, loads=passes, coalesced=p.layout == "rows"
        )

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        logits, targets, class_weight, state, first, ignore, scale, cap = args
        u, factor = self.u(logits, scale, cap, options["capped"])
        made = state.double()
        maximum, total, of_target, weighed, summed, share = made.unbind(1)[:6]
        kept = targets != ignore
        top = torch.maximum(maximum, torch.where(u.isnan(), -torch.inf, u).amax(1)) if u.shape[1] else maximum
        anchor = torch.where(top == -torch.inf, 0.0, top)
        below = (u - anchor[:, None]) * factor
        mass, grown = torch.exp(below), torch.exp((maximum - anchor) * factor)
        grows = (torch.where(maximum == -torch.inf, 0.0, maximum) - anchor) * factor
        own = targets.long() - first
        here = (own >= 0) & (own < u.shape[1])
        at = own.clamp(0, max(0, u.shape[1] - 1))[:, None]
        found = [
            top,
            total * grown + mass.sum(1),
            torch.where(here, u.gather(1, at)[:, 0], of_target) if u.shape[1] else of_target,
            weighed,
            summed,
            share,
        ]
        if options["moments"]:
            before = torch.where(grown > 0, (weighed + grows * total) * grown, 0.0)
            found[WEIGHED] = before + torch.where(mass > 0, mass * below, mass).sum(1)
        if options["totals"]:
            every = float(u.shape[1]) if class_weight is None else class_weight.double().sum()
            moved = torch.where(share != 0, grows * share, 0.0)
            found[TOTAL] = summed + moved + (below if class_weight is None else below * class_weight).sum(1)
            found[SHARE] = share + every
        updated = torch.where(kept[:, None], torch.stack(found, dim=1), made[:, :6])
        return (torch.nn.functional.pad(updated, (0, TERMS - 6)).to(state.dtype),)

    def work(self, p: LogitProblem) -> Work:
        return Work(flops=0.0, bytes=self.bytes(p), depth=float(max(_DEPTH, p.cols)))


class LogitGradient(LogitRows, TritonOp[LogitProblem, LogitConfig]):
    """The gradient with respect to a block of logits, from the rows' factors. ``out`` may be ``logits``."""

    name = "logit_gradient"
    revision = 2
    kernel = "loss:logit_gradient"
    out = Matrix("rows", "cols", result=True)
    logits = Matrix("rows", "cols")
    targets = Array("rows", dtype="index", strides=())
    class_weight = Array("cols", dtype="wide", strides=(), given="weighted")
    factors = Array("rows", "terms", dtype="wide", strides=())
    in_place_pairs = frozenset({("out", "logits")})
    scalar_types = {"first": "i64", "scale": "fp32", "cap": "fp32"}
    scalar_samples = {"first": 0, "scale": 0.9, "cap": 30.0}

    def grid(self, p: LogitProblem, c: LogitConfig) -> tuple[int, int, int]:
        return p.rows, -(-p.cols // c.block), 1

    def default(self, p: LogitProblem, gpu: GpuSpec) -> LogitConfig:
        block = min(2048, max(256, power_of_two(p.cols)))
        return LogitConfig(block, max(1, min(8, block // (32 * max(8, p.vec)))))

    def estimate_us(self, p: LogitProblem, c: LogitConfig, gpu: GpuSpec) -> float:
        item = 4 if p.dtype == "fp32" else 2
        coalesced = p.layout == "rows"
        return streaming.estimate_us(
            gpu, self.work(p).bytes, self.grid(p, c), c.warps, c.block * item, coalesced=coalesced
        )

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        logits, targets, class_weight, factors, first, scale, cap = args
        u, factor = self.u(logits, scale, cap, options["capped"])
        maximum, log_sum, a, b, t, s = factors.double()[:, :6, None].unbind(1)
        below = (u - maximum) * factor
        p = torch.exp(below - log_sum)
        d = torch.where(p > 0, p * (a + b * below), p) if options["moments"] else p * a
        own = targets.long() - first
        d = d + t * (torch.arange(u.shape[1], device=u.device) == own[:, None])
        if options["totals"]:
            d = d + (s if class_weight is None else s * class_weight)
        if options["capped"]:
            d = d * (1 - u * u)
        active = (a != 0) | (b != 0) | (t != 0) | (s != 0)
        return (torch.where(active, d * scale, 0.0).to(logits.dtype),)

    def work(self, p: LogitProblem) -> Work:
        return Work(flops=0.0, bytes=self.bytes(p), depth=_DEPTH)


# ---- a gradient times the loss's own --------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleProblem(Problem):
    """``elements`` of a dense tensor. ``align``: bytes that divide its address and its length."""

    aligns_rows: ClassVar[str | None] = "elements"
    elements: int = extent(ladder)
    dtype: str = plain("bf16", "fp16", "fp32")
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        item = BYTES[self.dtype]
        if self.align < item:
            raise UnsupportedProblem(f"align covers one element of {self.dtype}, {item} bytes; it is {self.align}")

    @property
    def vec(self) -> int:
        """Elements in one access."""
        return self.align // BYTES[self.dtype]


@dataclass(frozen=True)
class ScaleConfig(Config):
    """``programs`` take blocks of ``block`` elements in turns."""

    block: int = knob(1024, 2048, 4096, 8192)
    warps: int = knob(4, 8)
    programs: int = knob(256, 1024, 4096)


class ScaleGradient(TritonOp[ScaleProblem, ScaleConfig]):
    """``out = grad * factor * inverse``, where ``factor`` is one number on the device. ``out`` may be ``grad``."""

    name = "scale_gradient"
    revision = 1
    Problem = ScaleProblem
    Config = ScaleConfig
    suite = (
        "elements=1000",
        "elements=1000001 align=2",
        "elements=29360128",
        "elements=525336576",
        "elements=4194304 dtype=fp16",
        "elements=4194304 dtype=fp32",
    )
    kernel = "loss:scale_gradient"
    out = Array("*elements", strides=(), result=True)
    grad = Array("*elements", strides=())
    factor = Array("*one", dtype="wide", strides=())
    sizes = {"elements": "i64"}
    constexprs = ("block",)
    scalar_types = {"inverse": "fp32"}
    scalar_samples = {"inverse": 0.5}

    def refuse(self, named: Mapping[str, Tensor | None], sizes: Sizes, **options: Any) -> None:
        if sizes["one"] != 1:
            raise UnsupportedProblem(f"a factor is one number on the device; got {sizes['one']}")

    def sizes_in(self, p: ScaleProblem) -> Sizes:
        return super().sizes_in(p) | {"one": 1}

    def arrange(self, p: ScaleProblem, name: str, values: Tensor) -> Tensor:
        skew = p.align % WIDEST_BYTES // values.element_size()
        return values.new_empty(values.numel() + skew)[skew:].copy_(values)

    accesses = accesses_rule("block")
    most_elements = elements_rule("block", most=_MOST_PER_THREAD)

    def default(self, p: ScaleProblem, gpu: GpuSpec) -> ScaleConfig:
        return ScaleConfig(2048, 4, 1024)

    def grid(self, p: ScaleProblem, c: ScaleConfig) -> tuple[int, int, int]:
        return min(-(-p.elements // c.block), c.programs), 1, 1

    def estimate_us(self, p: ScaleProblem, c: ScaleConfig, gpu: GpuSpec) -> float:
        grid, tile = self.grid(p, c), c.block * BYTES[p.dtype]
        loads = p.elements / c.block / max(1, grid[0])
        return streaming.estimate_us(gpu, self.work(p).bytes, grid, c.warps, tile, loads=loads)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        grad, factor, inverse = args
        return ((grad.double() * (factor.double() * inverse)).to(grad.dtype),)

    def work(self, p: ScaleProblem) -> Work:
        return Work(flops=0.0, bytes=2.0 * p.elements * BYTES[p.dtype], depth=1.0)


LOGIT_STATISTICS = LogitStatistics()
LOGIT_GRADIENT = LogitGradient()
SCALE_GRADIENT = ScaleGradient()
