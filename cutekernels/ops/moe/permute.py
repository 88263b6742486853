"""Grouping tokens by expert for a grouped GEMM, and bringing the results back.

A mixture of experts, for tokens ``x`` (T, H), K experts each out of E::

    weights, ids = moe_route(x @ router.T, K)                 # (T, K) fp32, (T, K) int32
    order, offsets, inverse = moe_permute(ids, E)             # (T*K,), (E+1,), (T, K), all int32
    rows = moe_gather(x, inverse)                             # (T*K, H), grouped by expert
    y = grouped_gemm(rows, experts, offsets)                  # rows[offsets[e] : offsets[e+1]] @ experts[e]
    out = moe_combine(y, inverse, weights)                    # (T, H)

A *pair* is a token and one of its slots, ``t * K + j``. Row r of the grouped order holds pair ``order[r]``, so a GEMM
that gathers for itself reads ``x[order[r] // K]``; pair p went to row ``inverse.flatten()[p]``. The order is stable:
within a group, pairs stand as they came. Nothing waits for the host, which learns no group's size: ``offsets`` is for
kernels (``torch._grouped_mm`` takes ``offs=offsets[1:]``).

Everything is deterministic: moving rows is a permutation, so the gradient of one way is the other, and sums run over
a token's slots in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Scalar, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.moe.coefficients import PERMUTE
from cutekernels.ops.products.groups import MAX_GROUPS, MAX_PAIRS
from cutekernels.ops.shared import tile_rules
from cutekernels.ops.shared.dtypes import TYPES
from cutekernels.ops.shared.operands import Array, Sizes
from cutekernels.ops.shared.tile_rules import idle_rule
from cutekernels.ops.shared.triton_op import Launch, TritonOp
from cutekernels.rules import of_both, of_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec


@dataclass(frozen=True)
class MoePermuteProblem(Problem):
    """``pairs`` ids of type ``index``, each naming one of ``experts`` groups."""

    pairs: int = extent(ladder)
    experts: int = extent()
    index: str = plain("i32", "i64")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.experts)

    @property
    def bins(self) -> int:
        return bins_of(self.experts)

    def static(self) -> tuple[tuple[str, Scalar], ...]:
        return (*super().static(), ("bins", self.bins))


_PROGRAMS = (1, 32, 128, 256)


@dataclass(frozen=True)
class MoePermuteConfig(Config):
    """At most ``programs``, in blocks of ``block`` ids. ``passes=1``: each program counts all ids by itself."""

    block: int = knob(256, 512, 1024, 2048, 32, 64, 128)
    programs: int = knob(*_PROGRAMS)
    passes: int = knob(1, 2)
    warps: int = knob(4, 8, 1, 2)


_SORTED = 8  # more spill on Ampere, and take half a minute to compile
_RECOUNTED = 16  # blocks that every program may count for itself


class MoePermute(TritonOp[MoePermuteProblem, MoePermuteConfig]):
    """``(order, offsets, inverse)`` of a stable sort by expert."""

    name = "moe_permute"
    revision = 1
    Problem = MoePermuteProblem
    Config = MoePermuteConfig
    suite = (
        "pairs=8 experts=128",
        "pairs=128 experts=128",
        "pairs=1999 experts=60 index=i64",
        "pairs=8192 experts=8",
        "pairs=32768 experts=128",
        "pairs=40960 experts=512",
        "pairs=262144 experts=256",
        "pairs=16777216 experts=128",
    )
    kernel = "moe.permute:moe_permute"
    options = ("experts",)
    in_place = False
    order = Array("pairs", dtype="i32", strides=(), result=True)
    offsets = Array("experts+1", dtype="i32", strides=(), result=True)
    inverse = Array("*pairs", dtype="i32", strides=(), result=True)
    ids = Array("*pairs", dtype="index", strides=())
    sizes = {"pairs": "i32", "experts": "i32", "run": "i32"}
    constexprs = ("bins", "block", "passes")
    extras = {"counts_ptr": "*i32", "phase": "i32"}

    def refuse(self, named: Mapping[str, Tensor | None], sizes: Sizes, **options: Any) -> None:
        check_groups(options["experts"])
        if sizes["pairs"] > MAX_PAIRS:
            raise UnsupportedProblem(
                f"moe_permute takes up to {MAX_PAIRS} ids, numbered in int32; got {sizes['pairs']}"
            )

    def numbers(self, p: MoePermuteProblem, c: MoePermuteConfig) -> tuple[int, ...]:
        return p.pairs, p.experts, self.run(p, c)

    def divisible(self, p: MoePermuteProblem, c: MoePermuteConfig) -> dict[str, int]:
        return {"run": c.block, "counts_ptr": 16}

    @of_config
    def an_id_each(self, c: MoePermuteConfig, gpu: GpuSpec) -> str | None:
        return tile_rules.accesses(c.block, c.warps, 1, unit="ids") if c.block < 256 else None

    no_idle_ids = idle_rule("block", "pairs", "{} ids", least=64)

    @of_config
    def most_sorted(self, c: MoePermuteConfig, gpu: GpuSpec) -> str | None:
        if c.block <= _SORTED * 32 * c.warps:
            return None
        return f"a thread sorts {c.block // (32 * c.warps)} ids of a block; at most {_SORTED}"

    @of_both
    def no_idle_programs(self, p: MoePermuteProblem, c: MoePermuteConfig, gpu: GpuSpec) -> str | None:
        blocks, fewer = -(-p.pairs // c.block), max((n for n in _PROGRAMS if n < c.programs), default=0)
        return f"programs={c.programs}: {fewer} are enough for {blocks} blocks" if fewer >= max(1, blocks) else None

    @of_both
    def most_recounted(self, p: MoePermuteProblem, c: MoePermuteConfig, gpu: GpuSpec) -> str | None:
        blocks = -(-p.pairs // c.block)
        if c.passes == 2 or blocks <= _RECOUNTED:
            return None
        return f"passes=1 has every program count {blocks} blocks; at most {_RECOUNTED}"

    @of_both
    def two_passes_of_several(self, p: MoePermuteProblem, c: MoePermuteConfig, gpu: GpuSpec) -> str | None:
        alone = min(c.programs, -(-p.pairs // c.block)) <= 1
        return "one program needs no second pass" if c.passes == 2 and alone else None

    def default(self, p: MoePermuteProblem, gpu: GpuSpec) -> MoePermuteConfig:
        # One program for what one block holds; else small blocks, until there is one for every program.
        block = min(1024, max(32, power_of_two(p.pairs)))
        if p.pairs > block:
            block = max(256, min(block, power_of_two(p.pairs // 128)))
        blocks = -(-p.pairs // block)
        programs = next((n for n in _PROGRAMS if n >= blocks or n > gpu.sm_count), _PROGRAMS[-1])
        passes = 1 if blocks <= 4 else 2
        return MoePermuteConfig(block, programs, passes, 8 if block >= 512 else min(4, block // 32))

    def grid(self, p: MoePermuteProblem, c: MoePermuteConfig) -> tuple[int, int, int]:
        return max(1, -(-p.pairs // self.run(p, c))), 1, 1

    def run(self, p: MoePermuteProblem, c: MoePermuteConfig) -> int:
        """Ids of one program: whole blocks."""
        blocks = max(1, -(-p.pairs // c.block))
        return -(-blocks // min(c.programs, blocks)) * c.block

    def estimate_us(self, p: MoePermuteProblem, c: MoePermuteConfig, gpu: GpuSpec) -> float:
        """Counting, reading everyone's counts, and placing; or bytes, if those take longer."""
        rate = rates.of(gpu)
        programs, blocks = self.grid(p, c)[0], max(1, -(-p.pairs // c.block))
        waves = -(-programs // (gpu.sm_count * PERMUTE.resident))
        each = c.block / (32 * c.warps * 4)
        count, place = (
            clocks / rate.clock_mhz
            for clocks in (PERMUTE.count + PERMUTE.counted * each, PERMUTE.place + PERMUTE.placed * each)
        )
        own = self.run(p, c) // c.block
        counting = count * (blocks if c.passes == 1 else own) * waves
        reading = 0.0 if c.passes == 1 else (PERMUTE.place + programs * p.bins * PERMUTE.read) / rate.clock_mhz
        memory = self.work(p).bytes / (gpu.dram_gbps * 1e3 * PERMUTE.scattered)
        return rate.launch_us * c.passes + max(memory, counting + reading + place * own * waves)

    def bind(self, p: MoePermuteProblem, c: MoePermuteConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        launch = super().bind(p, c, kernel)
        if c.passes == 1:
            return launch.ending(0, 1) if isinstance(launch, Launch) else launch
        size = self.grid(p, c)[0] * p.bins

        def counted(*operands: Any) -> None:
            counts = operands[0].new_empty(size)
            for phase in range(2):
                launch(*operands, counts.data_ptr(), phase)

        return counted

    def draw(
        self, p: MoePermuteProblem, name: str, shape: tuple[int, ...], generator: torch.Generator
    ) -> Tensor | None:
        import torch

        # Some experts are more popular than others.
        popularity = torch.randn(shape, generator=generator, device=generator.device).sigmoid()
        return (popularity * p.experts).to(TYPES[p.index]).clamp_(0, p.experts - 1)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        (ids,) = args
        experts = options["experts"]
        bins = torch.where((ids >= 0) & (ids < experts), ids, experts).flatten().long()
        order = torch.argsort(bins, stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=ids.device))
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, bins, torch.ones_like(bins))
        offsets = counts.cumsum(0) - counts
        return order.int(), offsets.int(), inverse.int().view(ids.shape)


def bins_of(experts: int) -> int:
    """One for each expert and one for ids that name none, to a power of two."""
    return max(32, power_of_two(experts + 1))


def check_groups(experts: int) -> None:
    if not 1 <= experts <= MAX_GROUPS:
        raise UnsupportedProblem(f"moe_permute groups by 1 to {MAX_GROUPS} experts; got {experts}")


MOE_PERMUTE = MoePermute()
