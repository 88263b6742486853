"""``sample_filter``: which tokens may be sampled, and with what logits.

Four filters in the order of Hugging Face's logits warpers: temperature, top-k, top-p, min-p. Each says from which
rank down tokens go; what is left is the intersection. Exactly, for one row of logits x with maximum m:

1. Temperature T > 0: y = x / T. T = 0 is greedy: the first of the largest logits stays, unscaled, whatever the other
   filters say.
2. Top-k: tokens with fewer than k larger logits stay; so all that tie with the k-th do.
3. Top-p: the masses exp(y - m / T) of the tokens that are left, in descending order, up to the first whose running sum
   reaches p of their total; then all that tie with it, which makes the result independent of any order. Never nothing.
4. Min-p: tokens with exp(y - m / T) >= min_p, i.e. at least min_p times as probable as the first.

-0 equals 0. NaN ranks above +inf, as in torch.sort; where the largest logit is infinite or NaN, those equal to it have
all the mass. Masses are fp32 exponentials to within a few ulp, truncated to whole multiples of 2^-40 and then summed
exactly, so that the choice is the same on any machine, in any config, and on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Work, extent, knob, ladder, plain
from cutekernels.ops.shared.coefficients import FILTER
from cutekernels.ops.shared.laid_out import LaidOut
from cutekernels.ops.shared.operands import Array, Matrix
from cutekernels.ops.shared.triton_op import TritonOp
from cutekernels.rules import of_both, of_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

MAX_COLS = 1 << 30
_ONE = 1 << 40


@dataclass(frozen=True)
class SampleFilterProblem(LaidOut, Problem):
    """Rows of logits, leading dimensions flattened; ``cols`` is the vocabulary.

    ``by_k``, ``by_p``, ``by_min_p``: the filters that are on. ``temperatures`` and the three after it: the parameters
    that differ from row to row.
    """

    aligns_rows: ClassVar[str | None] = "cols"
    most: ClassVar = {"cols": MAX_COLS}
    rows: int = extent(ladder)
    cols: int = extent()
    dtype: str = plain("bf16", "fp16", "fp32")
    by_k: bool = plain(False, True)
    by_p: bool = plain(False, True)
    by_min_p: bool = plain(False, True)
    temperatures: bool = plain(False, True)
    top_ks: bool = plain(False, True)
    top_ps: bool = plain(False, True)
    min_ps: bool = plain(False, True)
    layout: str = plain("rows", "strided")
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        for each, filtered in (("top_ks", self.by_k), ("top_ps", self.by_p), ("min_ps", self.by_min_p)):
            if getattr(self, each) and not filtered:
                raise UnsupportedProblem(f"{each}=1 are parameters of a filter that is not asked for")

    @property
    def searches(self) -> int:
        return self.by_k + self.by_p


@dataclass(frozen=True)
class SampleFilterConfig(Config):
    """A search fixes ``bits`` of a threshold in one pass over a row, shared by ``splits`` programs (a launch each)."""

    block: int = knob(1024, 4096)
    warps: int = knob(4, 8, 16, 32)
    bits: int = knob(1, 2, 4)
    splits: int = knob(1, 8, 32)


_MAX_SUMS = 32  # 64-bit sums of one thread


class SampleFilter(TritonOp[SampleFilterProblem, SampleFilterConfig]):
    """The filtered logits. A parameter is a number, or a tensor with one for each row."""

    name = "sample_filter"
    revision = 1
    Problem = SampleFilterProblem
    Config = SampleFilterConfig
    suite = (
        "rows=1 cols=128256 dtype=fp32 by_k=1 by_p=1",
        "rows=1 cols=151936 by_k=1 by_p=1 by_min_p=1",
        "rows=16 cols=128256 dtype=fp32 by_p=1",
        "rows=64 cols=152064 dtype=fp32 by_k=1 by_p=1 by_min_p=1 temperatures=1 top_ks=1 top_ps=1 min_ps=1",
        "rows=256 cols=128256 dtype=fp32 by_k=1 by_p=1",
        "rows=33 cols=50257 dtype=fp16 by_k=1 by_p=1 align=2",
        "rows=7 cols=1001 by_p=1 by_min_p=1 layout=strided",
        "rows=1024 cols=32000 dtype=fp32 by_min_p=1",
        "rows=4 cols=262144 dtype=fp32 by_k=1",
    )
    kernel = "sampling:sample_filter"
    options = ("by_k", "by_p", "by_min_p")
    in_place = False  # splits read a row after others have written to it
    out = Matrix("*rows", "cols", result=True)
    logits = Matrix("*rows", "cols")
    temperatures = Array("*rows", dtype="fp32", strides=(), given="temperatures")
    top_ks = Array("*rows", dtype="i32", strides=(), given="top_ks")
    top_ps = Array("*rows", dtype="fp32", strides=(), given="top_ps")
    min_ps = Array("*rows", dtype="fp32", strides=(), given="min_ps")
    sizes = {"cols": "i32", "chunk": "i32"}
    constexprs = ("temperatures", "top_ks", "top_ps", "min_ps", *options, "block", "bits")
    scalar_types = {"temperature": "fp32", "top_k": "i32", "top_p": "fp32", "min_p": "fp32"}
    scalar_samples = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
    extras = {"state_ptr": "*i64", "stage": "i32", "phase": "i32"}

    def numbers(self, p: SampleFilterProblem, c: SampleFilterConfig) -> tuple[int, ...]:
        return p.cols, self.chunk(p, c)

    def divisible(self, p: SampleFilterProblem, c: SampleFilterConfig) -> dict[str, int]:
        return {"chunk": c.block}

    def constants(self, p: SampleFilterProblem, c: SampleFilterConfig) -> dict[str, int | bool | str]:
        return super().constants(p, c) | {"KEY_BITS": 8 * p.itemsize, "SPLIT": c.splits > 1}

    def build_options(self, p: SampleFilterProblem, c: SampleFilterConfig) -> dict[str, Any]:
        return {"num_warps": c.warps, "enable_fp_fusion": False}

    @of_config
    def elements_of_a_thread(self, c: SampleFilterConfig, gpu: GpuSpec) -> str | None:
        each = c.block // (32 * c.warps)
        if 2 <= each <= 8:
            return None
        return f"a thread of {32 * c.warps} takes 2 to 8 elements of a block; {c.block} give it {each}"

    @of_both
    def most_sums(self, p: SampleFilterProblem, c: SampleFilterConfig, gpu: GpuSpec) -> str | None:
        if not p.searches:
            return "nothing is searched: bits must be 1" if c.bits > 1 else None
        sums = c.block // (32 * c.warps) << c.bits
        most = _MAX_SUMS if c.warps <= 16 else _MAX_SUMS // 4  # a thread of 1024 has 64 registers
        return f"bits={c.bits} make {sums} sums in each thread; at most {most}" if sums > most else None

    @of_both
    def no_idle_splits(self, p: SampleFilterProblem, c: SampleFilterConfig, gpu: GpuSpec) -> str | None:
        if c.splits == 1 or c.splits * c.block <= 2 * p.cols:
            return None
        return f"splits={c.splits} of a block of {c.block} or more idle on rows of {p.cols}"

    @of_both
    def most_programs(self, p: SampleFilterProblem, c: SampleFilterConfig, gpu: GpuSpec) -> str | None:
        if c.splits == 1 or p.rows * c.splits <= 16 * gpu.sm_count:
            return None
        return f"splits={c.splits} of {p.rows} rows are more programs than {gpu.sm_count} SMs run at once"

    def default(self, p: SampleFilterProblem, gpu: GpuSpec) -> SampleFilterConfig:
        block, warps, bits = 4096, 16, 2
        splits = next((n for n in (32, 8) if p.rows * n <= 2 * gpu.sm_count), 1)
        if splits > 1:
            block, warps, bits = 1024, 16, 4
        if splits * block > 2 * p.cols:
            splits = 1
        return SampleFilterConfig(block, warps, bits if p.searches else 1, splits)

    def grid(self, p: SampleFilterProblem, c: SampleFilterConfig) -> tuple[int, int, int]:
        return p.rows, -(-p.cols // self.chunk(p, c)), 1

    def chunk(self, p: SampleFilterProblem, c: SampleFilterConfig) -> int:
        """Columns of one program: whole blocks."""
        return max(1, -(-p.cols // (c.splits * c.block))) * c.block

    def passes(self, p: SampleFilterProblem, c: SampleFilterConfig) -> list[tuple[int, int]]:
        """(stage, phase) of each pass over a row."""
        phases = range(8 * p.itemsize // c.bits)
        counts = [(1, i) for i in phases] if p.by_k else []
        return [(0, 0), *counts, *([(2, i) for i in phases] if p.by_p else []), (3, 0)]

    def estimate_us(self, p: SampleFilterProblem, c: SampleFilterConfig, gpu: GpuSpec) -> float:
        """Instructions or bytes of each pass over a row, one pass after another."""
        rate, programs = rates.of(gpu), p.rows * self.grid(p, c)[1]
        memory = p.rows * p.cols * p.itemsize / (gpu.dram_gbps * 1e3)
        between = rate.launch_us if c.splits > 1 else FILTER.pass_us
        digits = FILTER.digit << c.bits
        each = FILTER.first, FILTER.top_k + digits, FILTER.top_p + 2 * digits, FILTER.last
        total = 0.0
        for stage, _ in self.passes(p, c):
            instructions = each[stage]
            alone = self.chunk(p, c) * instructions / (32 * min(4, c.warps)) / rate.clock_mhz
            total += max(alone * max(1.0, programs / gpu.sm_count), memory) + between
        return rate.launch_us + total

    def bind(self, p: SampleFilterProblem, c: SampleFilterConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        import torch

        launch, passes = super().bind(p, c, kernel), self.passes(p, c)
        state_size = p.rows * (1 + 2 * (8 * p.itemsize // c.bits << c.bits))
        if c.splits == 1:
            return lambda *args: launch(*args, 0, 0, 0)

        def pass_by_pass(*args: Any) -> None:
            state = torch.zeros(state_size, dtype=torch.int64, device=args[0].device)
            for stage, phase in passes:
                launch(*args, state.data_ptr(), stage, phase)

        return pass_by_pass

    def draw(
        self, p: SampleFilterProblem, name: str, shape: tuple[int, ...], generator: torch.Generator
    ) -> Tensor | None:
        import torch

        if name == "logits":
            return torch.randn(shape, generator=generator, device=generator.device).mul_(4)
        low, high = {"temperatures": (0.5, 1.5), "top_ks": (1, 100), "top_ps": (0.5, 1), "min_ps": (0, 0.1)}[name]
        return torch.rand(shape, generator=generator, device=generator.device).mul_(high - low).add_(low)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        logits = args[0]
        given = [_by_row(t, number, logits) for t, number in zip(args[1:5], args[5:], strict=True)]
        temperature, top_k, top_p, min_p = given
        if logits.numel() == 0:
            return (logits.clone(),)
        greedy = ~(temperature > 0)
        wide = logits if logits.dtype is torch.float64 else logits.float()
        y = wide / torch.where(greedy, 1.0, temperature).to(wide.dtype)
        keys = _keys(logits)
        most = keys.amax(-1, keepdim=True)
        first = (keys == most).int().argmax(-1, keepdim=True)
        masses = _masses((y - y.gather(-1, first)).float())
        masses = torch.where(keys == most, _ONE, masses)
        ranked, order = torch.sort(keys, dim=-1, descending=True)
        floor = torch.full_like(most, torch.iinfo(torch.int64).min)
        cols = logits.shape[-1]
        if options["by_k"]:
            kth = ranked.gather(-1, (top_k.long() - 1).clamp(0, cols - 1))
            floor = torch.where((top_k > 0) & (top_k < cols), kth, floor)
        if options["by_p"]:
            running = torch.where(ranked >= floor, masses.gather(-1, order), 0).cumsum(-1)
            wanted = (top_p.double() * running[..., -1:].double()).ceil().long().clamp_min(1)
            last = (running < wanted).sum(-1, keepdim=True).clamp_max(cols - 1)
            floor = torch.where(top_p < 1, torch.maximum(floor, ranked.gather(-1, last)), floor)
        kept = keys >= floor
        if options["by_min_p"]:
            kept &= (masses.double() >= min_p.double().clamp_max(1) * _ONE) | ~(min_p > 0)
        columns = torch.arange(cols, device=logits.device)
        kept = torch.where(greedy, columns == first, kept)
        return (torch.where(kept, y, float("-inf")).to(logits.dtype),)

    def work(self, p: SampleFilterProblem) -> Work:
        return Work(0.0, 2.0 * p.rows * p.cols * p.itemsize)


def _by_row(t: Tensor | None, number: float, logits: Tensor) -> Tensor:
    """A parameter as a column beside the logits, in the type that kernels take."""
    import torch

    if t is not None:
        return t.unsqueeze(-1)
    kind = torch.int32 if isinstance(number, int) else torch.float32
    return torch.full((*logits.shape[:-1], 1), number, dtype=kind, device=logits.device)


def _keys(x: Tensor) -> Tensor:
    """Integers in the order of torch.sort: -0 equals 0, NaN is the largest."""
    import torch

    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    highest = torch.iinfo(kind).max
    bits = x.contiguous().view(kind).long()
    keys = torch.where(bits < 0, bits ^ highest, bits)
    return torch.where(x == 0, 0, torch.where(x.isnan(), highest, keys))


def _masses(d: Tensor) -> Tensor:
    """exp(d) in units of 2^-40, by the same fp32 operations as the kernel's, each rounded by itself."""
    import torch

    d = torch.where(d > -64, d, -64.0)
    n = torch.floor(d * 1.4426950408889634 + 0.5)
    r = (d - n * 0.693115234375) - n * 3.194618494528623e-05
    e = r * 0.001388888888888889 + 0.008333333333333333
    for coefficient in (0.041666666666666664, 0.16666666666666666, 0.5, 1.0, 1.0):
        e = e * r + coefficient
    return ((e * 16777216.0).long() << 16) >> (-n).long().clamp_max(63)


SAMPLE_FILTER = SampleFilter()
