"""``moe_dispatch`` and ``moe_route_dispatch``: one launch in the place of two or three, for few tokens.

``moe_dispatch`` is ``moe_permute`` and ``moe_gather``, ``moe_route_dispatch`` also the ``moe_route`` in front. Each of
their programs looks at all pairs of a token and a slot, so both take a bounded number of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import P, Problem, Scalar, Work, extent, plain, power_of_two
from cutekernels.ops.moe.permute import MAX_GROUPS, MOE_PERMUTE, popular_ids
from cutekernels.ops.moe.route import MAX_EXPERTS, MAX_TOP_K, MOE_ROUTE
from cutekernels.ops.moe.rows import GRID_Y, MAX_PER_THREAD, MOE_GATHER, MoeMoveConfig
from cutekernels.ops.shared import streaming, tile_rules
from cutekernels.ops.shared.dtypes import BYTES
from cutekernels.ops.shared.operands import Array, Matrix, Named, Sizes
from cutekernels.ops.shared.triton_op import LaidOut, TritonOp
from cutekernels.rules import of_both, of_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

MAX_PAIRS = 256
"""Of either op: beyond, counting them all for each slot takes a program about as long as the launch that it saves."""
MAX_LOGITS = 2048
"""Of all tokens of ``moe_route_dispatch``, to powers of two: 16 tokens of 128 experts, or 4 of 512. Each program has
them in registers, with their keys and ids; four warps do."""
_LOGITS_PER_THREAD = 16  # more spill
_SPREAD_CLOCKS = 60  # a reduction over several warps, beside one within a warp
_REDUCE_CLOCKS = 25


@dataclass(frozen=True)
class MoeDispatchProblem(LaidOut, Problem):
    """``tokens`` rows of ``cols`` elements, each of which goes to the ``top_k`` groups of ``experts`` that ids name."""

    aligns_rows: ClassVar[str | None] = "cols"
    tokens: int = extent()
    cols: int = extent()
    experts: int = extent()
    top_k: int = plain(8, *(k for k in range(1, MAX_TOP_K + 1) if k != 8))
    dtype: str = plain("bf16", "fp16", "fp32")
    index: str = plain("i32", "i64")
    layout: str = plain("rows", "strided")
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.tokens, self.top_k, self.experts)

    @property
    def pairs(self) -> int:
        """Pairs, to a power of two."""
        return max(32, power_of_two(self.tokens * self.top_k))

    @property
    def bins(self) -> int:
        """One for each expert and one for ids that name none, to a power of two."""
        return max(32, power_of_two(self.experts + 1))

    def static(self) -> tuple[tuple[str, Scalar], ...]:
        return (*super().static(), ("pairs", self.pairs), ("bins", self.bins))


@dataclass(frozen=True)
class MoeRouteDispatchProblem(LaidOut, Problem):
    """The same by logits of type ``router``, the type of the rows or fp32. ``renormalize``: weights sum to 1.

    ``align`` divides the bytes of a token's logits too.
    """

    aligns_rows: ClassVar[str | None] = "cols"
    tokens: int = extent()
    cols: int = extent()
    experts: int = extent()
    top_k: int = plain(8, *(k for k in range(1, MAX_TOP_K + 1) if k != 8))
    dtype: str = plain("bf16", "fp16", "fp32")
    router: str = plain("same", "fp32")
    renormalize: bool = plain(True, False)
    layout: str = plain("rows", "strided")
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_routed(self.tokens, self.top_k, self.experts)
        if self.layout != "strided" and self.experts * self.logit_bytes % self.align:
            raise UnsupportedProblem(
                f"logits of {self.experts * self.logit_bytes} bytes are not aligned to {self.align}: lower align"
            )

    @property
    def logit_bytes(self) -> int:
        return BYTES["fp32"] if self.router == "fp32" else self.itemsize

    @property
    def rows(self) -> int:
        """Tokens, to a power of two."""
        return power_of_two(self.tokens)

    @property
    def width(self) -> int:
        """The power of two that a token's logits fill in registers."""
        return max(8, power_of_two(self.experts))

    def static(self) -> tuple[tuple[str, Scalar], ...]:
        return (*super().static(), ("rows", self.rows), ("width", self.width))


class _DispatchOp(TritonOp[P, MoeMoveConfig], Generic[P]):
    """Shared by both: ``block`` columns of a token in one program."""

    Config = MoeMoveConfig
    in_place = False
    sizes = {"tokens": "i32", "cols": "i32", "experts": "i32"}

    def derive(self, sizes: Sizes) -> None:
        sizes["pairs"] = sizes["tokens"] * sizes["top_k"]

    @of_config
    def most_elements(self, c: MoeMoveConfig, gpu: GpuSpec) -> str | None:
        return tile_rules.most_elements(c.block, c.warps, MAX_PER_THREAD)

    @of_both
    def no_idle_columns(self, p: Any, c: MoeMoveConfig, gpu: GpuSpec) -> str | None:
        return tile_rules.idles("block", c.block, max(256, power_of_two(p.cols)), f"rows of {p.cols}")

    @of_both
    def most_blocks(self, p: Any, c: MoeMoveConfig, gpu: GpuSpec) -> str | None:
        programs = 1 + -(-p.cols // c.block)
        if programs <= GRID_Y or c.block >= 8192:
            return None
        return f"a token has at most {GRID_Y} programs; block={c.block} makes {programs}"

    def _block(self, p: Any, warps: int) -> MoeMoveConfig:
        """One access of 16 bytes per thread, where rows are that wide."""
        if -(-p.cols // 256) >= GRID_Y:
            return MoeMoveConfig(8192, 8)
        width = max(256, power_of_two(p.cols))
        return MoeMoveConfig(max(256, min(width, 32 * warps * 16 // p.itemsize)), warps)

    def grid(self, p: Any, c: MoeMoveConfig) -> tuple[int, int, int]:
        # Without tokens, one program writes the offsets.
        return max(1, p.tokens), 1 + (-(-p.cols // c.block) if p.tokens else 0), 1

    def _copying_us(self, p: Any, c: MoeMoveConfig, clocks: float, gpu: GpuSpec) -> float:
        """A kernel whose programs take ``clocks`` before they know where their rows go."""
        moved = streaming.estimate_us(
            gpu, self.bytes(p), self.grid(p, c), c.warps, c.block * p.itemsize, coalesced=p.layout == "rows"
        )
        return moved + clocks / rates.of(gpu).clock_mhz


class MoeDispatch(_DispatchOp[MoeDispatchProblem]):
    """``rows[inverse[t, j]] = x[t]``, and ``offsets`` and ``inverse`` of a stable sort of ``ids`` by expert."""

    name = "moe_dispatch"
    revision = 1
    Problem = MoeDispatchProblem
    suite = (
        "tokens=1 cols=2048 experts=128",
        "tokens=16 cols=2048 experts=128",
        "tokens=32 cols=7168 experts=256",
        "tokens=33 cols=1001 experts=60 top_k=4 index=i64 align=2",
        "tokens=57 cols=130 experts=8 top_k=2 dtype=fp16 layout=strided",
        "tokens=128 cols=4096 experts=8 top_k=2 dtype=fp32",
    )
    kernel = "moe.dispatch:moe_dispatch"
    options = ("experts",)
    rows = Matrix("pairs", "cols", result=True)
    offsets = Array("experts+1", dtype="i32", strides=(), result=True)
    inverse = Matrix("*tokens", "top_k", "i32", strides=(), result=True)
    x = Matrix("*tokens", "cols")
    ids = Matrix("*tokens", "top_k", "index")

    def refuse(self, named: Mapping[str, Tensor | None], sizes: Sizes, **options: Any) -> None:
        _check(sizes["tokens"], sizes["top_k"], sizes["experts"])

    def constants(self, p: MoeDispatchProblem, c: MoeMoveConfig) -> dict[str, int | bool | str]:
        return {"TOP_K": p.top_k, "PAIRS": p.pairs, "BINS": p.bins, "BLOCK": c.block}

    @of_both
    def accesses(self, p: MoeDispatchProblem, c: MoeMoveConfig, gpu: GpuSpec) -> str | None:
        return tile_rules.accesses(c.block, c.warps, p.vec)

    def default(self, p: MoeDispatchProblem, gpu: GpuSpec) -> MoeMoveConfig:
        # One warp, whose reductions need no barrier.
        return self._block(p, 1)

    def estimate_us(self, p: MoeDispatchProblem, c: MoeMoveConfig, gpu: GpuSpec) -> float:
        each = max(1.0, p.pairs / (32 * c.warps))
        return self._copying_us(p, c, 100 + p.top_k * (each * 6 + _reduce_clocks(c.warps)), gpu)

    def draw(
        self, p: MoeDispatchProblem, name: str, shape: tuple[int, ...], generator: torch.Generator
    ) -> Tensor | None:
        return popular_ids(p.experts, p.index, shape, generator) if name == "ids" else None

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, ids = args
        _, offsets, inverse = MOE_PERMUTE.evaluate(ids, experts=options["experts"])
        return MOE_GATHER.evaluate(x, inverse)[0], offsets, inverse

    def work(self, p: MoeDispatchProblem) -> Work:
        return Work(0.0, self.bytes(p))


class MoeRouteDispatch(_DispatchOp[MoeRouteDispatchProblem]):
    """:class:`MoeDispatch` by the ``(weights, ids)`` that routing ``logits`` gives, which are results too."""

    name = "moe_route_dispatch"
    revision = 1
    Problem = MoeRouteDispatchProblem
    suite = (
        "tokens=1 cols=2048 experts=128",
        "tokens=4 cols=2048 experts=128 router=fp32",
        "tokens=16 cols=2048 experts=128",
        "tokens=8 cols=7168 experts=256 router=fp32 renormalize=0",
        "tokens=13 cols=1001 experts=60 top_k=4 renormalize=0 align=2",
        "tokens=3 cols=3072 experts=60 top_k=6 align=8",
        "tokens=7 cols=130 experts=8 top_k=2 dtype=fp16 layout=strided",
        "tokens=8 cols=4096 experts=8 top_k=2 dtype=fp32",
    )
    kernel = "moe.dispatch:moe_route_dispatch"
    options = ("top_k", "renormalize")
    rows = Matrix("pairs", "cols", result=True)
    offsets = Array("experts+1", dtype="i32", strides=(), result=True)
    inverse = Matrix("*tokens", "top_k", "i32", strides=(), result=True)
    weights = Matrix("*tokens", "top_k", "wide", strides=(), result=True)
    ids = Matrix("*tokens", "top_k", "i32", strides=(), result=True)
    x = Matrix("*tokens", "cols")
    logits = Matrix("*tokens", "experts", "router", laid=True)

    def refuse(self, named: Mapping[str, Tensor | None], sizes: Sizes, **options: Any) -> None:
        _check_routed(sizes["tokens"], options["top_k"], sizes["experts"])

    def layout(self, named: Named, sizes: Sizes, found: Mapping[str, Any]) -> dict[str, Scalar]:
        layout = super().layout(named, sizes, found)
        if layout["layout"] == "rows":
            logits = named["logits"]
            assert logits is not None
            bits = int(layout["align"]) | sizes["experts"] * logits.element_size()
            layout["align"] = bits & -bits
        return layout

    def divisible(self, p: MoeRouteDispatchProblem, c: MoeMoveConfig) -> dict[str, int]:
        return {} if p.layout == "strided" else {"experts": max(1, p.align // p.logit_bytes)}

    def constants(self, p: MoeRouteDispatchProblem, c: MoeMoveConfig) -> dict[str, int | bool | str]:
        tile = {"TOKENS": p.rows, "WIDTH": p.width, "TOP_K": p.top_k}
        return {**tile, "RENORMALIZE": p.renormalize, "BLOCK": c.block}

    @of_both
    def most_logits(self, p: MoeRouteDispatchProblem, c: MoeMoveConfig, gpu: GpuSpec) -> str | None:
        return tile_rules.most_elements(p.rows * p.width, c.warps, _LOGITS_PER_THREAD)

    @of_both
    def no_idle_warps(self, p: MoeRouteDispatchProblem, c: MoeMoveConfig, gpu: GpuSpec) -> str | None:
        if c.warps == 1 or p.rows * p.width >= 32 * c.warps:
            return None
        return tile_rules.accesses(c.block, c.warps, p.vec)

    def default(self, p: MoeRouteDispatchProblem, gpu: GpuSpec) -> MoeMoveConfig:
        # A row of logits inside one warp, so that its reductions are; warps for the rows, up to four of them.
        warps = min(4, p.rows) if p.width >= 32 else 1
        return self._block(p, max(warps, p.rows * p.width // (32 * _LOGITS_PER_THREAD)))

    def estimate_us(self, p: MoeRouteDispatchProblem, c: MoeMoveConfig, gpu: GpuSpec) -> float:
        logits = max(1.0, p.rows * p.width / (32 * c.warps))
        keys = 1 if p.itemsize == 2 and p.router == "same" else 2
        inside = _reduce_clocks(1 if c.warps <= p.rows else c.warps)  # of a row of logits
        rounds = p.top_k * keys * (logits * 3 + inside)
        rows = p.top_k * 2 * (max(1.0, p.width / 32) * 3 + inside)
        return self._copying_us(p, c, 200 + logits * 20 + rounds + 3 * _reduce_clocks(c.warps) + rows, gpu)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, logits = args
        weights, ids = MOE_ROUTE.evaluate(logits, **options)
        return *MOE_DISPATCH.evaluate(x, ids, experts=logits.shape[-1]), weights, ids

    def work(self, p: MoeRouteDispatchProblem) -> Work:
        return Work(4.0 * p.tokens * p.experts, self.bytes(p))


def _reduce_clocks(warps: int) -> int:
    return _REDUCE_CLOCKS if warps == 1 else _REDUCE_CLOCKS + _SPREAD_CLOCKS


def most_routed(experts: int, top_k: int) -> int:
    """The tokens that :class:`MoeRouteDispatch` takes: their logits, to powers of two, and their pairs are few."""
    return min(MAX_LOGITS >> max(3, (experts - 1).bit_length()), MAX_PAIRS // top_k)


def _check(tokens: int, top_k: int, experts: int) -> None:
    if not 1 <= experts <= MAX_GROUPS:
        raise UnsupportedProblem(f"moe_dispatch groups by 1 to {MAX_GROUPS} experts; got {experts}")
    _check_top_k("moe_dispatch", top_k)
    if tokens * top_k > MAX_PAIRS:
        raise UnsupportedProblem(
            f"moe_dispatch takes up to {MAX_PAIRS} pairs of a token and an expert; got {tokens} times {top_k}: call "
            "moe_permute and moe_gather"
        )


def _check_routed(tokens: int, top_k: int, experts: int) -> None:
    if not 1 <= experts <= MAX_EXPERTS:
        raise UnsupportedProblem(f"moe_route_dispatch takes logits of 1 to {MAX_EXPERTS} experts; got {experts}")
    if top_k > experts:
        raise UnsupportedProblem(f"top_k is from 1 to {experts} for {experts} experts; it is {top_k}")
    _check_top_k("moe_route_dispatch", top_k)
    if tokens > (most := most_routed(experts, top_k)):
        raise UnsupportedProblem(
            f"moe_route_dispatch takes up to {most} tokens that choose {top_k} of {experts} experts; got {tokens}: "
            "call moe_route, moe_permute and moe_gather"
        )


def _check_top_k(op: str, top_k: int) -> None:
    if not 1 <= top_k <= MAX_TOP_K:
        raise UnsupportedProblem(f"{op} gives a token K experts with K from 1 to {MAX_TOP_K}; K is {top_k}")


MOE_DISPATCH = MoeDispatch()
MOE_ROUTE_DISPATCH = MoeRouteDispatch()
