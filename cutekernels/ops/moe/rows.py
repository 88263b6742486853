"""Rows to their experts and back: ``moe_gather``, ``moe_combine`` and the gradients of both.

Where they stand among the steps of a mixture of experts says ``permutation.py``. Moving rows is a permutation with
copies: each way is the gradient of the other, weights apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Config, Problem, Work, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.moe.permute import MAX_PAIRS
from cutekernels.ops.moe.route import MAX_TOP_K
from cutekernels.ops.shared import tensor_op
from cutekernels.ops.shared.layout import check_alignment, laid_out, place, walk
from cutekernels.ops.shared.tensor_op import (
    DTYPE_NAMES,
    GPU_DTYPES,
    Launch,
    TensorOp,
    check_alike,
    check_dtype,
    check_results,
    present,
)

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec


# ---- declarations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoeMoveProblem(Problem):
    """``tokens`` rows of ``cols`` elements, each going to ``top_k`` places or coming from there.

    ``layout``: "rows" where the elements of each row are contiguous. ``align``: bytes that divide every operand's
    address, its row pitch and its row; nothing depends on it where they are strided.
    """

    tokens: int = extent(ladder)
    cols: int = extent()
    top_k: int = plain(8, *(k for k in range(1, MAX_TOP_K + 1) if k != 8))
    dtype: str = plain("bf16", "fp16", "fp32")
    weighted: bool = plain(False, True)
    layout: str = plain("rows", "strided")
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alignment(self.layout, self.align, self.cols, self.itemsize)

    @property
    def itemsize(self) -> int:
        return GPU_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class MoeMoveConfig(Config):
    """``block`` columns at a time."""

    block: int = knob(256, 512, 1024, 2048, 4096, 8192)
    warps: int = knob(1, 2, 4, 8)


_MAX_PER_THREAD = 32
_GRID_Y = 65535


class _MoveOp(TensorOp[MoeMoveProblem, MoeMoveConfig]):
    """What moving there, back, and its gradient have in common. ``wide`` names the operands with ``cols`` columns."""

    Problem = MoeMoveProblem
    Config = MoeMoveConfig
    in_place = False
    wide: tuple[str, ...]
    moved: float  # rows read and written, in units of a token's top_k
    once: float  # and in units of one

    def _posed(self, operands: Sequence[Tensor | None], tokens: int, top_k: int, weighted: bool) -> MoeMoveProblem:
        named = dict(zip((*self.results, *self.inputs), operands, strict=True))
        wide = present([named[name] for name in self.wide])
        cols = wide[0].shape[-1]
        return MoeMoveProblem(tokens, cols, top_k, DTYPE_NAMES[wide[0].dtype], weighted, *laid_out(*wide))

    def why_not(self, p: MoeMoveProblem, c: MoeMoveConfig, gpu: GpuSpec) -> str | None:
        per_thread = c.block // (32 * c.warps)
        vec = 1 if p.layout == "strided" else p.align // p.itemsize
        if per_thread < vec:
            return f"{32 * c.warps} threads of {vec} elements an access need a block of {32 * c.warps * vec}"
        if per_thread > _MAX_PER_THREAD:
            return f"a thread's block has {per_thread} elements; at most {_MAX_PER_THREAD}"
        if c.block > max(256, power_of_two(p.cols)):
            return f"block={c.block} idles most of a block in rows of {p.cols}"
        if -(-p.cols // c.block) > _GRID_Y and c.block < 8192:
            return f"a grid has at most {_GRID_Y} blocks of a row; block={c.block} makes {-(-p.cols // c.block)}"
        return None

    def default(self, p: MoeMoveProblem, gpu: GpuSpec) -> MoeMoveConfig:
        if -(-p.cols // 1024) > _GRID_Y:
            return MoeMoveConfig(8192, 8)
        # One access of 16 bytes to a thread, in small programs where there is little to do.
        width = max(256, power_of_two(p.cols))
        warps = 4 if p.tokens * p.cols >= 1024 * gpu.sm_count else 1
        block = max(256, min(width, 32 * warps * 16 // p.itemsize))
        return MoeMoveConfig(block, max(1, min(warps, block * p.itemsize // 512)))

    def blocks(self, p: MoeMoveProblem, c: MoeMoveConfig) -> int:
        return max(1, -(-p.cols // c.block))

    def grid(self, p: MoeMoveProblem, c: MoeMoveConfig) -> tuple[int, int, int]:
        return p.tokens, self.blocks(p, c), 1

    def estimate_us(self, p: MoeMoveProblem, c: MoeMoveConfig, gpu: GpuSpec) -> float:
        x, y, _ = self.grid(p, c)
        programs = x * y
        issue = programs / gpu.sm_count * (0.03 + 0.002 * p.top_k * max(1, c.block // (32 * c.warps * 8)))
        thin = max(1.0, 4 * 16 / (c.block / (32 * c.warps) * p.itemsize) / 4)
        return 1.5 + max(issue, self.work(p).bytes / (gpu.dram_gbps * 1e3 * 0.9) * thin)

    def build(self, p: MoeMoveProblem, c: MoeMoveConfig, gpu: GpuSpec) -> Artifact:
        from cutekernels.backends.triton import compile_kernel
        from cutekernels.kernels.triton.moe import permute as permutation

        operands = (*self.results, *self.inputs)
        kinds = {"inverse": "*i32", "weights": "*fp32", "dweights": "*fp32"}
        signature = {f"{name}_ptr": kinds.get(name, f"*{p.dtype}") for name in operands}
        signature |= {"tokens": "i64", "cols": "i32"}
        for name in operands:
            signature |= {f"{name}_row": "i64", f"{name}_col": "i64"}
        constants: dict[str, int | bool | str] = {"TOP_K": p.top_k, "BLOCK": c.block}
        if self.name == "moe_combine":
            constants["WEIGHTED"] = p.weighted
        if "weights" in operands and not p.weighted:
            constants |= {"weights_ptr": 0, "weights_row": 0, "weights_col": 0}
        divisible: dict[str, int] = {}
        if p.layout == "rows":
            units = p.align // p.itemsize
            divisible["cols"] = units
            for name in self.wide:
                constants[f"{name}_col"] = 1
                divisible |= {f"{name}_ptr": p.align, f"{name}_row": units}
        return compile_kernel(
            getattr(permutation, self.name),
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            divisible=divisible,
            options={"num_warps": c.warps},
            gpu=gpu,
        )

    def bind(self, p: MoeMoveProblem, c: MoeMoveConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        def numbers(*operands: Tensor | None) -> list[int]:
            walks = [(0, 0) if t is None else walk(t) for t in operands]
            return [p.tokens, p.cols, *[s for strides in walks for s in strides]]

        return Launch(kernel, self.grid(p, c), len(self.results) + len(self.inputs), numbers)

    def work(self, p: MoeMoveProblem) -> Work:
        rows = p.tokens * (self.moved * p.top_k + self.once)
        weights = 4 * p.tokens * p.top_k * (1 + p.weighted)
        sums = p.cols if self.name == "moe_combine_backward" else p.top_k
        return Work(2.0 * p.tokens * p.top_k * p.cols, float(rows * p.cols * p.itemsize + weights), depth=sums)

    def _permutation(self, p: MoeMoveProblem, device: str, draw: torch.Generator) -> Tensor:
        rows = torch.randperm(p.tokens * p.top_k, generator=draw, device=device)
        return rows.to(torch.int32).view(p.tokens, p.top_k)


def _check_places(op: Any, rows: Tensor, tokens: Tensor, inverse: Tensor, weights: Tensor | None = None) -> None:
    """Refuses operands that do not fit together: ``rows`` (T*K, H), ``tokens`` (..., H), ``inverse`` (..., K)."""
    check_dtype(op, tokens)
    check_alike(op, tokens, [rows], ("dtype", "device"))
    check_alike(op, tokens, [inverse], ("device",))
    if inverse.dtype is not torch.int32 or inverse.dim() == 0 or not 1 <= inverse.shape[-1] <= MAX_TOP_K:
        raise UnsupportedProblem(
            f"inverse is int32 (..., K) with K from 1 to {MAX_TOP_K}; got {inverse.dtype} {tuple(inverse.shape)}"
        )
    if inverse.numel() > MAX_PAIRS:
        raise UnsupportedProblem(f"at most {MAX_PAIRS} rows are numbered in int32; got {inverse.numel()}")
    wanted = (inverse.numel(), *tokens.shape[-1:])
    if tokens.dim() == 0 or tokens.shape[:-1] != inverse.shape[:-1] or rows.shape != wanted:
        raise UnsupportedProblem(
            f"{op.name} takes inverse (..., K), tokens (..., H) and rows (T*K, H); got {tuple(inverse.shape)}, "
            f"{tuple(tokens.shape)} and {tuple(rows.shape)}"
        )
    if weights is not None:
        kind = torch.float64 if tokens.dtype is torch.float64 else torch.float32
        if weights.shape != inverse.shape or weights.dtype is not kind or weights.device != tokens.device:
            raise UnsupportedProblem(
                f"weights are {kind} {tuple(inverse.shape)} on {tokens.device}, as moe_route returns them; got "
                f"{weights.dtype} {tuple(weights.shape)} on {weights.device}"
            )


class MoeGather(_MoveOp):
    """``rows[inverse[t, j]] = x[t]``. Arguments: x, inverse."""

    name = "moe_gather"
    revision = 1
    suite = (
        "tokens=1 cols=2048",
        "tokens=16 cols=4096",
        "tokens=333 cols=1001 top_k=4 align=2",
        "tokens=257 cols=130 top_k=2 layout=strided",
        "tokens=2048 cols=7168",
        "tokens=4096 cols=2048 dtype=fp16",
        "tokens=4096 cols=4096 top_k=2 dtype=fp32",
    )
    results = ("rows",)
    inputs = ("x", "inverse")
    schema = "Tensor x, Tensor inverse"
    wide = ("rows", "x")
    moved, once = 1.0, 1.0

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        x, inverse = present(inputs)
        rows = results[0] if results else self._rows(x, inverse)
        _check_places(self, rows, x, inverse)
        check_results(results)

    @staticmethod
    def _rows(x: Tensor, inverse: Tensor) -> Tensor:
        return x.new_empty((inverse.numel(), *x.shape[-1:]))

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        x, inverse = present(inputs)
        return (self._rows(x, inverse),)

    def problem(self, *operands: Tensor | None, **options: Any) -> MoeMoveProblem:
        inverse = present(operands)[2]
        return self._posed(operands, inverse.numel() // inverse.shape[-1], inverse.shape[-1], False)

    def outputs(self, p: MoeMoveProblem, *args: Tensor) -> tuple[Tensor, ...]:
        return (place(args[0].new_empty, p, p.tokens * p.top_k, p.cols),)

    def sample(self, p: MoeMoveProblem, device: str, seed: int) -> tuple[Tensor, ...]:
        draw = torch.Generator(device).manual_seed(seed)
        x = place(_normal(p, device, draw), p, p.tokens, p.cols)
        return x, self._permutation(p, device, draw)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, inverse = args
        copies = x.unsqueeze(-2).expand(*inverse.shape, x.shape[-1]).reshape(inverse.numel(), x.shape[-1])
        return (torch.empty_like(copies).index_copy_(0, inverse.flatten().long(), copies),)


class MoeCombine(_MoveOp):
    """``out[t] = sum_j weights[t, j] * rows[inverse[t, j]]``. Arguments: rows, inverse, weights."""

    name = "moe_combine"
    revision = 1
    suite = (
        "tokens=1 cols=2048 weighted=1",
        "tokens=16 cols=4096 weighted=1",
        "tokens=333 cols=1001 top_k=4 weighted=1 align=2",
        "tokens=257 cols=130 top_k=2 weighted=1 layout=strided",
        "tokens=2048 cols=7168 weighted=1",
        "tokens=4096 cols=2048 dtype=fp16",
        "tokens=4096 cols=4096 top_k=2 dtype=fp32 weighted=1",
    )
    results = ("out",)
    inputs = ("rows", "inverse", "weights")
    schema = "Tensor rows, Tensor inverse, Tensor? weights"
    wide = ("out", "rows")
    moved, once = 1.0, 1.0

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        rows, inverse, weights = inputs
        assert rows is not None
        assert inverse is not None
        out = results[0] if results else self._out(rows, inverse)
        _check_places(self, rows, out, inverse, weights)
        check_results(results)

    @staticmethod
    def _out(rows: Tensor, inverse: Tensor) -> Tensor:
        return rows.new_empty((*inverse.shape[:-1], *rows.shape[-1:]))

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        rows, inverse, _ = inputs
        assert rows is not None
        assert inverse is not None
        return (self._out(rows, inverse),)

    def problem(self, *operands: Tensor | None, **options: Any) -> MoeMoveProblem:
        inverse = present(operands)[2]
        weighted = operands[3] is not None
        return self._posed(operands, inverse.numel() // inverse.shape[-1], inverse.shape[-1], weighted)

    def outputs(self, p: MoeMoveProblem, *args: Tensor) -> tuple[Tensor, ...]:
        return (place(args[0].new_empty, p, p.tokens, p.cols),)

    def sample(self, p: MoeMoveProblem, device: str, seed: int) -> tuple[Tensor | None, ...]:
        draw = torch.Generator(device).manual_seed(seed)
        rows = place(_normal(p, device, draw), p, p.tokens * p.top_k, p.cols)
        inverse = self._permutation(p, device, draw)
        weights = torch.randn((p.tokens, p.top_k), generator=draw, device=device) if p.weighted else None
        return rows, inverse, weights

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        rows, inverse, weights = args
        terms = rows[inverse.long()].double()
        if weights is not None:
            terms = terms * weights.double().unsqueeze(-1)
        return (terms.sum(-2).to(rows.dtype),)


class MoeCombineBackward(_MoveOp):
    """The gradient of a weighted :class:`MoeCombine`: (drows, dweights). Arguments: dout, rows, inverse, weights."""

    name = "moe_combine_backward"
    revision = 1
    suite = (
        "tokens=16 cols=4096 weighted=1",
        "tokens=333 cols=1001 top_k=4 weighted=1 align=2",
        "tokens=257 cols=130 top_k=2 weighted=1 layout=strided",
        "tokens=2048 cols=7168 weighted=1",
        "tokens=4096 cols=2048 top_k=2 dtype=fp32 weighted=1",
    )
    results = ("drows", "dweights")
    inputs = ("dout", "rows", "inverse", "weights")
    schema = "Tensor dout, Tensor rows, Tensor inverse, Tensor weights"
    wide = ("drows", "dout", "rows")
    moved, once = 2.0, 1.0

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        dout, rows, inverse, weights = present(inputs)
        _check_places(self, rows, dout, inverse, weights)
        if results:
            check_alike(self, rows, results[:1])
            check_alike(self, weights, results[1:])
        check_results(results)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        _, rows, _, weights = present(inputs)
        return rows.new_empty(rows.shape), weights.new_empty(weights.shape)

    def problem(self, *operands: Tensor | None, **options: Any) -> MoeMoveProblem:
        inverse = present(operands)[4]
        return self._posed(operands, inverse.numel() // inverse.shape[-1], inverse.shape[-1], True)

    def why_not(self, p: MoeMoveProblem, c: MoeMoveConfig, gpu: GpuSpec) -> str | None:
        return super().why_not(p.replace(cols=min(p.cols, c.block * _GRID_Y)), c, gpu)

    def default(self, p: MoeMoveProblem, gpu: GpuSpec) -> MoeMoveConfig:
        # The row in one block of two accesses to a thread where that is possible.
        width = max(256, power_of_two(p.cols))
        block = min(width, 4096)
        return MoeMoveConfig(block, max(1, min(8, block * p.itemsize // (32 * 32))))

    def blocks(self, p: MoeMoveProblem, c: MoeMoveConfig) -> int:
        return 1

    def grid(self, p: MoeMoveProblem, c: MoeMoveConfig) -> tuple[int, int, int]:
        return p.tokens * p.top_k, 1, 1

    def outputs(self, p: MoeMoveProblem, *args: Tensor) -> tuple[Tensor, ...]:
        return place(args[0].new_empty, p, p.tokens * p.top_k, p.cols), torch.empty_like(args[3])

    def sample(self, p: MoeMoveProblem, device: str, seed: int) -> tuple[Tensor, ...]:
        draw = torch.Generator(device).manual_seed(seed)
        normal = _normal(p, device, draw)
        dout, rows = place(normal, p, p.tokens, p.cols), place(normal, p, p.tokens * p.top_k, p.cols)
        inverse = self._permutation(p, device, draw)
        return dout, rows, inverse, torch.randn((p.tokens, p.top_k), generator=draw, device=device)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        dout, rows, inverse, weights = args
        at, d = inverse.long(), dout.double().unsqueeze(-2)
        terms = (weights.double().unsqueeze(-1) * d).to(rows.dtype).reshape(rows.shape)
        drows = torch.empty_like(terms).index_copy_(0, at.flatten(), terms)
        return drows, (rows[at].double() * d).sum(-1).to(weights.dtype)


MOE_GATHER = MoeGather()
MOE_COMBINE = MoeCombine()
MOE_COMBINE_BACKWARD = MoeCombineBackward()


# ---- the functions --------------------------------------------------------------------------------------


def moe_gather(x: Tensor, inverse: Tensor, *, config: MoeMoveConfig | str | None = None) -> Tensor:
    """``rows[inverse[t, j]] = x[t]``: a copy of each token for each of its experts, grouped by expert.

    Args:
        x: ``(..., H)``, fp16, bf16 or fp32 (on the CPU fp64 too); any strides, contiguous rows are fast.
        inverse: ``(..., K)`` int32 from :func:`moe_permute`: a permutation of ``range(T*K)``. Rows that it leaves
            out are undefined.
        config: overrides the tuned choice, as a :class:`MoeMoveConfig` or its text. Ignored on the CPU.

    Returns:
        ``(T*K, H)``, dtype of ``x``, contiguous. Differentiable in ``x``; its gradient is summed in fp32 over a
        token's slots in their order.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, shapes that do not fit, other devices.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    found = tensor_op.eager(MOE_GATHER, None, (x, inverse), config=config)
    if found is not None:
        return found[0]
    text = None if config is None else str(config)
    return torch.ops.cutekernels.moe_gather(x, inverse, text)  # type: ignore[no-any-return]


def moe_combine(
    rows: Tensor, inverse: Tensor, weights: Tensor | None = None, *, config: MoeMoveConfig | str | None = None
) -> Tensor:
    """``out[t] = sum_j weights[t, j] * rows[inverse[t, j]]``: in fp32, in the order of j, rounded once.

    Args:
        rows: ``(T*K, H)``, fp16, bf16 or fp32 (on the CPU fp64 too), grouped by expert; any strides.
        inverse: ``(..., K)`` int32 from :func:`moe_permute`.
        weights: ``(..., K)`` fp32 from :func:`moe_route` (fp64 beside fp64 rows); None for ones.
        config: overrides the tuned choice, as a :class:`MoeMoveConfig` or its text. Ignored on the CPU.

    Returns:
        ``(..., H)``, dtype of ``rows``, contiguous. Differentiable in ``rows`` and ``weights``, deterministically;
        with ``weights`` once.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, shapes that do not fit, other devices.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    found = tensor_op.eager(MOE_COMBINE, None, (rows, inverse, weights), config=config)
    if found is not None:
        return found[0]
    text = None if config is None else str(config)
    return torch.ops.cutekernels.moe_combine(rows, inverse, weights, text)  # type: ignore[no-any-return]


# ---- torch.library --------------------------------------------------------------------------------------


def register(library: torch.library.Library) -> None:
    """Defines the ops of this file in ``library``, with their gradients."""
    tensor_op.register(library, MOE_GATHER, backward=_gather_gradient, setup_context=_remember_inverse)
    tensor_op.register(library, MOE_COMBINE, backward=_combine_gradient, setup_context=_remember)
    tensor_op.register(library, MOE_COMBINE_BACKWARD)


def _remember_inverse(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _gather_gradient(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
    (inverse,) = ctx.saved_tensors
    return torch.ops.cutekernels.moe_combine(drows, inverse, None), None, None


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, inverse, weights, _ = inputs
    if weights is None:
        ctx.save_for_backward(inverse)
    else:
        ctx.save_for_backward(inverse, rows, weights)


def _combine_gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
    inverse, *saved = ctx.saved_tensors
    if not saved:
        return torch.ops.cutekernels.moe_gather(dout, inverse), None, None, None
    rows, weights = saved
    drows, dweights = torch.ops.cutekernels.moe_combine_backward(dout, rows, inverse, weights)
    return drows, None, dweights, None


def _normal(p: MoeMoveProblem, device: str, draw: torch.Generator) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, generator=draw, device=device, dtype=GPU_DTYPES[p.dtype])
