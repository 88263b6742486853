"""Rows to their experts and back: ``moe_gather``, ``moe_combine`` and their gradients; ``moe_dispatch`` of few pairs.

``permute.py`` says where they stand among the steps of a mixture of experts. Each way is the gradient of the other,
weights apart. ``moe_dispatch`` permutes and gathers in one launch, without a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Scalar, Work, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.moe.permute import MOE_PERMUTE, bins_of, check_groups
from cutekernels.ops.moe.route import MAX_TOP_K
from cutekernels.ops.products.groups import MAX_PAIRS
from cutekernels.ops.shared import streaming
from cutekernels.ops.shared.laid_out import LaidOut
from cutekernels.ops.shared.operands import Array, Matrix, Sizes
from cutekernels.ops.shared.tile_rules import accesses_rule, elements_rule, idle_rule
from cutekernels.ops.shared.triton_op import TritonOp, TritonPart
from cutekernels.rules import of_both

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

FEW_PAIRS = 256
"""Most pairs that ``moe_dispatch`` takes: each program counts them all for each slot, eight in a lane of its warp."""
_MAX_PER_THREAD = 32
_GRID_Y = 65535


@dataclass(frozen=True)
class MoeMoveProblem(LaidOut, Problem):
    """``tokens`` rows of ``cols`` elements, each of which goes to ``top_k`` places or comes from there."""

    aligns_rows: ClassVar[str | None] = "cols"
    tokens: int = extent(ladder)
    cols: int = extent()
    top_k: int = plain(8, *(k for k in range(1, MAX_TOP_K + 1) if k != 8))
    dtype: str = plain("bf16", "fp16", "fp32")
    weighted: bool = plain(False, True)
    layout: str = plain("rows", "strided")
    align: int = plain(16, 8, 4, 2)


@dataclass(frozen=True)
class MoeDispatchProblem(LaidOut, Problem):
    """``tokens`` rows of ``cols`` elements, each of which goes to the ``top_k`` of ``experts`` that its ids name."""

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
        _check_few(self.tokens, self.top_k, self.experts)

    def static(self) -> tuple[tuple[str, Scalar], ...]:
        return (*super().static(), ("pairs", self.pairs), ("bins", bins_of(self.experts)))

    @property
    def pairs(self) -> int:
        """Pairs, to a power of two."""
        return max(32, power_of_two(self.tokens * self.top_k))


@dataclass(frozen=True)
class MoeMoveConfig(Config):
    """``block`` columns at a time."""

    block: int = knob(256, 512, 1024, 2048, 4096, 8192)
    warps: int = knob(1, 2, 4, 8)


class MoveRows(TritonPart[MoeMoveProblem, MoeMoveConfig]):
    """Shared by all: ``inverse`` numbers the rows of the grouped order for each token."""

    Problem = MoeMoveProblem
    Config = MoeMoveConfig
    in_place = False
    sizes = {"tokens": "i64", "cols": "i32"}
    constexprs: ClassVar[tuple[str, ...]] = ("top_k", "block")

    def derive(self, sizes: Sizes, **options: Any) -> None:
        pairs = sizes["tokens"] * sizes["top_k"]
        if sizes.setdefault("pairs", pairs) != pairs:
            raise ValueError("pairs = tokens * top_k")

    def refuse(self, named: Mapping[str, Tensor | None], sizes: Sizes, **options: Any) -> None:
        if not 1 <= sizes["top_k"] <= MAX_TOP_K:
            raise UnsupportedProblem(f"inverse is int32 (..., K) with K from 1 to {MAX_TOP_K}; K is {sizes['top_k']}")
        if sizes["pairs"] > MAX_PAIRS:
            raise UnsupportedProblem(f"at most {MAX_PAIRS} rows are numbered in int32; got {sizes['pairs']}")

    accesses = accesses_rule("block")
    most_elements = elements_rule("block", most=_MAX_PER_THREAD)
    no_idle_columns = idle_rule("block", "cols", "rows of {}", least=256)

    @of_both
    def most_blocks(self, p: MoeMoveProblem, c: MoeMoveConfig, gpu: GpuSpec) -> str | None:
        blocks = -(-p.cols // c.block)
        if blocks <= _GRID_Y or c.block >= 8192:
            return None
        return f"a grid has at most {_GRID_Y} blocks of a row; block={c.block} makes {blocks}"

    def default(self, p: MoeMoveProblem, gpu: GpuSpec) -> MoeMoveConfig:
        if -(-p.cols // 256) > _GRID_Y:
            return MoeMoveConfig(8192, 8)
        # One access of 16 bytes per thread, in small programs where there is little to do.
        width = max(256, power_of_two(p.cols))
        warps = 4 if p.tokens * p.cols >= 1024 * gpu.sm_count else 1
        block = max(256, min(width, 32 * warps * 16 // p.itemsize))
        return MoeMoveConfig(block, max(1, min(warps, block * p.itemsize // 512)))

    def grid(self, p: MoeMoveProblem, c: MoeMoveConfig) -> tuple[int, int, int]:
        return p.tokens, max(1, -(-p.cols // c.block)), 1

    def estimate_us(self, p: MoeMoveProblem, c: MoeMoveConfig, gpu: GpuSpec) -> float:
        tile = c.block * p.itemsize * (p.top_k if "combine" in self.name else 1)
        return streaming.estimate_us(
            gpu, self.work(p).bytes, self.grid(p, c), c.warps, tile, coalesced=p.layout == "rows"
        )

    def work(self, p: MoeMoveProblem) -> Work:
        terms = p.cols if self.name == "moe_combine_backward" else p.top_k
        return Work(2.0 * p.tokens * p.top_k * p.cols, self.bytes(p), depth=terms)

    def draw(self, p: MoeMoveProblem, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        import torch

        if name != "inverse":
            return None
        return torch.randperm(p.tokens * p.top_k, generator=generator, device=generator.device).view(shape)


def _check(inverse: Tensor) -> Tensor:
    """``inverse`` as an index. Raises UnsupportedProblem for an entry that names no row."""
    if inverse.numel() and not 0 <= int(inverse.min()) <= int(inverse.max()) < inverse.numel():
        raise UnsupportedProblem(
            f"inverse is a permutation of 0 to {inverse.numel() - 1}, as moe_permute returns it; it has entries from "
            f"{int(inverse.min())} to {int(inverse.max())}"
        )
    return inverse.long()


class MoeGather(MoveRows, TritonOp[MoeMoveProblem, MoeMoveConfig]):
    """``rows[inverse[t, j]] = x[t]``."""

    name = "moe_gather"
    revision = 1
    kernel = "moe.permute:moe_gather"
    suite = (
        "tokens=1 cols=2048",
        "tokens=16 cols=4096",
        "tokens=333 cols=1001 top_k=4 align=2",
        "tokens=257 cols=130 top_k=2 layout=strided",
        "tokens=2048 cols=7168",
        "tokens=4096 cols=2048 dtype=fp16",
        "tokens=4096 cols=4096 top_k=2 dtype=fp32",
    )
    rows = Matrix("pairs", "cols", result=True)
    x = Matrix("*tokens", "cols")
    inverse = Matrix("*tokens", "top_k", "i32")

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        x, inverse = args
        copies = x.unsqueeze(-2).expand(*inverse.shape, x.shape[-1]).reshape(inverse.numel(), x.shape[-1])
        return (torch.empty_like(copies).index_copy_(0, _check(inverse).flatten(), copies),)


class MoeDispatch(MoveRows, TritonOp[MoeMoveProblem, MoeMoveConfig]):
    """``rows[inverse[t, j]] = x[t]``, with the ``offsets`` and ``inverse`` of a stable sort of ``ids`` by expert."""

    name = "moe_dispatch"
    revision = 1
    Problem = MoeDispatchProblem  # type: ignore[assignment]  # which has what these methods read
    kernel = "moe.permute:moe_dispatch"
    options = ("experts",)
    suite = (
        "tokens=1 cols=2048 experts=128",
        "tokens=16 cols=2048 experts=128",
        "tokens=32 cols=7168 experts=256",
        "tokens=33 cols=1001 experts=60 top_k=4 index=i64 align=2",
        "tokens=57 cols=130 experts=8 top_k=2 dtype=fp16 layout=strided",
        "tokens=128 cols=4096 experts=8 top_k=2 dtype=fp32",
    )
    rows = Matrix("pairs", "cols", result=True)
    offsets = Array("experts+1", dtype="i32", strides=(), result=True)
    inverse = Matrix("*tokens", "top_k", "i32", strides=(), result=True)
    x = Matrix("*tokens", "cols")
    ids = Matrix("*tokens", "top_k", "index", strides=())
    sizes = {"tokens": "i32", "cols": "i32", "experts": "i32"}

    def refuse(self, named: Mapping[str, Tensor | None], sizes: Sizes, **options: Any) -> None:
        super().refuse(named, sizes)
        _check_few(sizes["tokens"], sizes["top_k"], sizes["experts"])

    def constants(self, p: Any, c: MoeMoveConfig) -> dict[str, int | bool | str]:
        return super().constants(p, c) | {"PAIRS": p.pairs, "BINS": bins_of(p.experts)}

    most_blocks = None  # type: ignore[assignment]  # they stand on the grid's long axis

    def default(self, p: Any, gpu: GpuSpec) -> MoeMoveConfig:
        return MoeMoveConfig(256, 1)  # one warp, whose sums need no barrier

    def grid(self, p: Any, c: MoeMoveConfig) -> tuple[int, int, int]:
        return 1 + -(-p.cols // c.block), max(1, p.tokens), 1

    def draw(self, p: Any, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        return MOE_PERMUTE.draw(p, name, shape, generator) if name == "ids" else None

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, ids = args
        _, offsets, inverse = MOE_PERMUTE.evaluate(ids, **options)
        return *MOE_GATHER.evaluate(x, inverse), offsets, inverse


def _check_few(tokens: int, top_k: int, experts: int) -> None:
    check_groups(experts)
    if tokens * top_k > FEW_PAIRS:
        raise UnsupportedProblem(
            f"moe_dispatch takes up to {FEW_PAIRS} pairs of a token and an expert; got {tokens} times {top_k}: call "
            "moe_permute and moe_gather"
        )


class MoeCombine(MoveRows, TritonOp[MoeMoveProblem, MoeMoveConfig]):
    """``out[t] = sum_j weights[t, j] * rows[inverse[t, j]]``."""

    name = "moe_combine"
    revision = 1
    kernel = "moe.permute:moe_combine"
    constexprs = (*MoveRows.constexprs, "weighted")
    suite = (
        "tokens=1 cols=2048 weighted=1",
        "tokens=16 cols=4096 weighted=1",
        "tokens=333 cols=1001 top_k=4 weighted=1 align=2",
        "tokens=257 cols=130 top_k=2 weighted=1 layout=strided",
        "tokens=2048 cols=7168 weighted=1",
        "tokens=4096 cols=2048 dtype=fp16",
        "tokens=4096 cols=4096 top_k=2 dtype=fp32 weighted=1",
    )
    out = Matrix("*tokens", "cols", result=True)
    rows = Matrix("pairs", "cols")
    inverse = Matrix("*tokens", "top_k", "i32")
    weights = Matrix("*tokens", "top_k", "wide", given="weighted")

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        rows, inverse, weights = args
        terms = rows[_check(inverse)].double()
        if weights is not None:
            terms = terms * weights.double().unsqueeze(-1)
        return (terms.sum(-2).to(rows.dtype),)


class MoeCombineBackward(MoveRows, TritonOp[MoeMoveProblem, MoeMoveConfig]):
    """The gradient of a weighted :class:`MoeCombine`, a program per row."""

    name = "moe_combine_backward"
    revision = 1
    kernel = "moe.permute:moe_combine_backward"
    suite = (
        "tokens=16 cols=4096 weighted=1",
        "tokens=333 cols=1001 top_k=4 weighted=1 align=2",
        "tokens=257 cols=130 top_k=2 weighted=1 layout=strided",
        "tokens=2048 cols=7168 weighted=1",
        "tokens=4096 cols=2048 top_k=2 dtype=fp32 weighted=1",
    )
    drows = Matrix("pairs", "cols", result=True)
    dweights = Matrix("*tokens", "top_k", "wide", result=True)
    dout = Matrix("*tokens", "cols")
    rows = Matrix("pairs", "cols")
    inverse = Matrix("*tokens", "top_k", "i32")
    weights = Matrix("*tokens", "top_k", "wide")

    def facts(self, named: Mapping[str, Tensor | None], sizes: Sizes) -> dict[str, Scalar]:
        return {"weighted": True}

    most_blocks = None  # type: ignore[assignment]  # a program walks a row's blocks

    def default(self, p: MoeMoveProblem, gpu: GpuSpec) -> MoeMoveConfig:
        # The row in one block of two accesses per thread where that is possible.
        block = min(max(256, power_of_two(p.cols)), 4096)
        return MoeMoveConfig(block, max(1, min(8, block * p.itemsize // (32 * 32))))

    def grid(self, p: MoeMoveProblem, c: MoeMoveConfig) -> tuple[int, int, int]:
        return p.tokens * p.top_k, 1, 1

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        dout, rows, inverse, weights = args
        at, d = _check(inverse), dout.double().unsqueeze(-2)
        terms = (weights.double().unsqueeze(-1) * d).to(rows.dtype).reshape(rows.shape)
        drows = torch.empty_like(terms).index_copy_(0, at.flatten(), terms)
        return drows, (rows[at].double() * d).sum(-1).to(weights.dtype)


MOE_GATHER = MoeGather()
MOE_DISPATCH = MoeDispatch()
MOE_COMBINE = MoeCombine()
MOE_COMBINE_BACKWARD = MoeCombineBackward()
