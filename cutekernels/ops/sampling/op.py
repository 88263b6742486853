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
_MAX_SUMMED = 1 << 22  # columns whose masses, 2^40 at most, are summed in 64 bits
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
        if self.by_p:
            _check_summed(self.cols)

    @property
    def searches(self) -> int:
        return self.by_k + self.by_p


@dataclass(frozen=True)
class SampleFilterConfig(Config):
    """A program reads ``depth`` blocks of a row at a time. ``splits`` programs share a row, a launch for each pass."""

    block: int = knob(1024, 2048, 4096)
    warps: int = knob(4, 8, 16)
    depth: int = knob(1, 2, 4, 8)
    splits: int = knob(1, 8, 32)


_MOST_READ = 16  # elements that one thread reads at a time: registers
_ROUNDS = 4  # passes that narrow the span of top-p at most
_STATE = 8 * _ROUNDS + 3  # words of a row's state beside two for each lane


class SampleFilter(TritonOp[SampleFilterProblem, SampleFilterConfig]):
    """The filtered logits. A parameter is a number, or a tensor with one for each row."""

    name = "sample_filter"
    revision = 2
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
    in_place = False  # the result holds what is searched, before logits are read for the last time
    out = Matrix("*rows", "cols", result=True)
    logits = Matrix("*rows", "cols")
    temperatures = Array("*rows", dtype="fp32", strides=(), given="temperatures")
    top_ks = Array("*rows", dtype="i32", strides=(), given="top_ks")
    top_ps = Array("*rows", dtype="fp32", strides=(), given="top_ps")
    min_ps = Array("*rows", dtype="fp32", strides=(), given="min_ps")
    sizes = {"cols": "i32", "chunk": "i32"}
    constexprs = ("temperatures", "top_ks", "top_ps", "min_ps", *options, "block", "depth")
    scalar_types = {"temperature": "fp32", "top_k": "i32", "top_p": "fp32", "min_p": "fp32"}
    scalar_samples = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
    extras = {"state_ptr": "*i64", "stage": "i32"}

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
        if 1 <= each <= 8 and each * c.depth <= _MOST_READ:
            return None
        return (
            f"a thread of {32 * c.warps} takes 1 to 8 elements of a block, and {_MOST_READ} at a time at most; "
            f"{c.depth} blocks of {c.block} give it {each} each"
        )

    @of_both
    def idle_blocks(self, p: SampleFilterProblem, c: SampleFilterConfig, gpu: GpuSpec) -> str | None:
        if c.depth == 1 or c.depth * c.block < 2 * p.cols:
            return None
        return f"{c.depth} blocks of {c.block} are twice a row of {p.cols} or more: take fewer"

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
        half = p.itemsize == 2
        for splits, warps, depth, waves in ((32, 16, 2, 2), (8, 8, 1 if half else 4, 4)):
            if p.rows * splits <= waves * gpu.sm_count and splits * 1024 <= 2 * p.cols:
                return SampleFilterConfig(1024, warps, depth, splits)
        wide = half or not p.searches or p.rows <= gpu.sm_count
        block, warps = (2048, 16) if wide and p.cols > 1024 else (1024, 8)
        depth = 1 if half else next(d for d in (4, 2, 1) if d == 1 or d * block < 2 * p.cols)
        return SampleFilterConfig(block, warps, depth, 1)

    def grid(self, p: SampleFilterProblem, c: SampleFilterConfig) -> tuple[int, int, int]:
        return p.rows, -(-p.cols // self.chunk(p, c)), 1

    def chunk(self, p: SampleFilterProblem, c: SampleFilterConfig) -> int:
        """Columns of one program: whole blocks."""
        return max(1, -(-p.cols // (c.splits * c.block))) * c.block

    def stages(self, p: SampleFilterProblem, *, narrows: bool, greedy: bool) -> list[int]:
        """Launches where rows are split: whether top-p alone searches some rows, and whether some may be greedy."""
        found = [0, *range(1, _ROUNDS + 1)] if narrows else [0]
        found += [_ROUNDS + 1] if p.searches or greedy else []
        found += [_ROUNDS + 2] if p.searches else []
        return [*found, _ROUNDS + 3]

    def estimate_us(self, p: SampleFilterProblem, c: SampleFilterConfig, gpu: GpuSpec) -> float:
        """Instructions, loads or bytes of each pass over a row; of a search those of a block for each phase."""
        rate, own = rates.of(gpu), FILTER
        chunk, memory = self.chunk(p, c), p.rows * p.cols * p.itemsize / (gpu.dram_gbps * 1e3)
        of_row, of_chunk = (max(1.0, n / gpu.sm_count) for n in (p.rows, p.rows * self.grid(p, c)[1]))
        instruction_us = 1 / (32 * min(4, c.warps)) / rate.clock_mhz
        loads = -(-chunk // (c.block * c.depth)) * rate.l2_latency_us
        passes, search = [own.first, own.last + own.top_p * (p.by_min_p and not p.by_k)], 0.0
        if p.searches:
            passes += [own.first + own.top_k] + [own.top_p + 16 * own.digit] * (not p.by_k)
            phases, lanes = 4 * p.itemsize, 8 * p.by_k
            counted, weighed = own.top_k + 4 * own.digit, own.top_p + 8 * own.digit
            instructions = (lanes + p.by_k * phases) * counted + p.by_p * phases * weighed
            search = instructions * c.block * instruction_us + (lanes + p.searches * phases) * own.pass_us
        stages = self.stages(p, narrows=p.by_p and not p.by_k, greedy=p.temperatures)
        launches = 1 if c.splits == 1 else 1 + len(stages)
        over = sum(max(of_chunk * (chunk * each * instruction_us + loads), memory) for each in passes)
        return launches * rate.launch_us + over + of_row * search

    def bind(self, p: SampleFilterProblem, c: SampleFilterConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        import torch

        launch = super().bind(p, c, kernel)
        if c.splits == 1:
            return lambda *args: launch(*args, 0, 0)
        state_size = p.rows * (2 * c.block + _STATE)

        def pass_by_pass(*args: Any) -> None:
            state = torch.zeros(state_size, dtype=torch.int64, device=args[0].device)
            temperature, top_k = args[-4:-2]
            narrows = p.by_p and (p.top_ks or not (p.by_k and 0 < top_k < p.cols))
            for stage in self.stages(p, narrows=narrows, greedy=p.temperatures or not temperature > 0):
                launch(*args, state.data_ptr(), stage)

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
            _check_summed(cols)
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


def _check_summed(cols: int) -> None:
    if cols > _MAX_SUMMED:
        raise UnsupportedProblem(f"top_p sums up to {_MAX_SUMMED} columns exactly; got {cols}: take top_k or min_p")


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
