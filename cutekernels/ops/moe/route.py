"""``moe_route``: which experts a token goes to and with what weight, and its gradient.

    logits = x @ router.T                                  # (T, E)
    weights, ids = moe_route(logits, top_k)                # (T, K) fp32, (T, K) int32

What follows (grouping the tokens by expert, and bringing the experts' results back) is in ``permutation.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.op import C, Config, Problem, Scalar, Work, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.shared import tensor_op
from cutekernels.ops.shared.layout import check_alignment, check_contiguous, laid_out, place, walk
from cutekernels.ops.shared.tensor_op import (
    DTYPE_NAMES,
    GPU_DTYPES,
    WIDEST_BYTES,
    Launch,
    TensorOp,
    check_alike,
    check_dtype,
    present,
)

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

MAX_EXPERTS = 512
MAX_TOP_K = 32


# ---- declarations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoeRouteProblem(Problem):
    """Rows of router logits, leading dimensions flattened into tokens.

    ``layout``: "rows" where the logits of each token are contiguous. ``align``: bytes that divide the logits' address,
    their row pitch and their row; nothing depends on it where they are strided. ``renormalize``: weights sum to 1.
    """

    tokens: int = extent(ladder)
    experts: int = extent()
    top_k: int = plain(8, *(k for k in range(1, MAX_TOP_K + 1) if k != 8))
    dtype: str = plain("bf16", "fp16", "fp32")
    renormalize: bool = plain(True, False)
    layout: str = plain("rows", "strided")
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.experts <= MAX_EXPERTS:
            raise UnsupportedProblem(f"a router has 1 to {MAX_EXPERTS} experts; it has {self.experts}")
        if self.top_k > self.experts:
            raise UnsupportedProblem(f"top_k is at most the number of experts, {self.experts}; it is {self.top_k}")
        check_alignment(self.layout, self.align, self.experts, self.itemsize)

    @property
    def itemsize(self) -> int:
        return GPU_DTYPES[self.dtype].itemsize

    @property
    def width(self) -> int:
        """The power of two that a row fills in registers."""
        return max(8, power_of_two(self.experts))

    @property
    def slots(self) -> int:
        return max(2, power_of_two(self.top_k))

    def static(self) -> tuple[tuple[str, Scalar], ...]:
        return (*super().static(), ("width", self.width))


@dataclass(frozen=True)
class MoeRouteConfig(Config):
    """``tokens`` rows in one program; ``method``: top_k maxima one after another, or a partial bitonic sort."""

    tokens: int = knob(1, 2, 4, 8, 16, 32)
    warps: int = knob(1, 2, 4, 8)
    method: str = knob("rounds", "sort")


@dataclass(frozen=True)
class MoeRouteBackwardConfig(Config):
    """``tokens`` rows in one program."""

    tokens: int = knob(1, 2, 4, 8, 16, 32)
    warps: int = knob(1, 2, 4, 8)


_MAX_TILE = 32  # elements of a thread's tile, each with its key, its result and a mask


class _RouteOp(TensorOp[MoeRouteProblem, C], Generic[C]):
    """What routing and its gradient have in common."""

    Problem = MoeRouteProblem
    options = ("top_k", "renormalize")
    in_place = False

    def _fits(self, p: MoeRouteProblem, tokens: int, warps: int) -> str | None:
        tile, threads = tokens * p.width, 32 * warps
        if tile < threads and warps > 1:
            return f"{threads} threads share a tile of {tile} elements"
        if tile > _MAX_TILE * threads:
            return f"a thread's tile has {tile // threads} elements; at most {_MAX_TILE}"
        if tokens > power_of_two(p.tokens):
            return f"tokens={tokens} idles most of a tile with {p.tokens} rows"
        return None

    def _tile(self, p: MoeRouteProblem, gpu: GpuSpec) -> tuple[int, int]:
        """(tokens, warps): a row inside one warp, so that its reductions are; four warps once the GPU is full."""
        per_warp = max(1, 128 // p.width)
        tokens = min(per_warp, power_of_two(p.tokens))
        warps = 4 if p.width * p.itemsize <= 32 * WIDEST_BYTES else 1
        while warps > 1 and p.tokens < tokens * warps * gpu.sm_count * 2:
            warps //= 2
        tokens = min(32, tokens * warps, power_of_two(p.tokens))
        while warps > 1 and tokens * p.width < 32 * warps:
            warps //= 2
        return tokens, warps

    def grid(self, p: MoeRouteProblem, c: Any) -> tuple[int, int, int]:
        return -(-p.tokens // c.tokens), 1, 1

    def _model_us(self, p: MoeRouteProblem, tokens: int, warps: int, instructions: float, gpu: GpuSpec) -> float:
        """Bytes over bandwidth, or warp instructions over four issue slots an SM where those take longer."""
        programs = -(-p.tokens // tokens)
        waves = -(-programs // (gpu.sm_count * max(1, gpu.max_warps // warps // 2)))
        alone = warps * instructions / min(4, warps) * 0.002  # latency of one program, ns apart at 4 per clock
        issue = programs / gpu.sm_count * warps * instructions / 4 * 0.0006
        return 1.5 + max(self.work(p).bytes / (gpu.dram_gbps * 1e3 * 0.9), issue, waves * alone)


class MoeRoute(_RouteOp[MoeRouteConfig]):
    """``(weights, ids)`` of the ``top_k`` largest softmax(logits). Arguments: logits."""

    name = "moe_route"
    revision = 1
    Config = MoeRouteConfig
    suite = (
        "tokens=1 experts=128",
        "tokens=16 experts=256",
        "tokens=4096 experts=8 top_k=2",
        "tokens=4096 experts=64 top_k=6 dtype=fp32 renormalize=0",
        "tokens=4096 experts=128",
        "tokens=4096 experts=128 dtype=fp32",
        "tokens=4096 experts=256 dtype=fp16",
        "tokens=4096 experts=512 top_k=10 dtype=fp32",
        "tokens=333 experts=60 top_k=4 align=8",
        "tokens=257 experts=128 layout=strided",
        "tokens=32768 experts=128",
    )
    results = ("weights", "ids")
    inputs = ("logits",)
    schema = "Tensor logits, int top_k, bool renormalize"

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        (logits,) = present(inputs)
        check_dtype(self, logits)
        check_router(logits, options["top_k"])
        if results:
            weights, ids = results
            shape = (*logits.shape[:-1], options["top_k"])
            for t, dtype in ((weights, _weights_type(logits)), (ids, torch.int32)):
                if t.shape != shape or t.dtype != dtype or t.device != logits.device:
                    raise UnsupportedProblem(f"{self.name} writes {shape} {dtype}; got {tuple(t.shape)} {t.dtype}")
            check_contiguous(self, results)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        (logits,) = present(inputs)
        shape = (*logits.shape[:-1], options["top_k"])
        return logits.new_empty(shape, dtype=_weights_type(logits)), logits.new_empty(shape, dtype=torch.int32)

    def problem(self, *operands: Tensor | None, **options: Any) -> MoeRouteProblem:
        logits = present(operands)[2]
        experts = logits.shape[-1]
        return MoeRouteProblem(
            logits.numel() // max(1, experts),
            experts,
            options["top_k"],
            DTYPE_NAMES[logits.dtype],
            options["renormalize"],
            *laid_out(logits),
        )

    def why_not(self, p: MoeRouteProblem, c: MoeRouteConfig, gpu: GpuSpec) -> str | None:
        return self._fits(p, c.tokens, c.warps)

    def default(self, p: MoeRouteProblem, gpu: GpuSpec) -> MoeRouteConfig:
        return MoeRouteConfig(*self._tile(p, gpu), "rounds")

    def estimate_us(self, p: MoeRouteProblem, c: MoeRouteConfig, gpu: GpuSpec) -> float:
        each = c.tokens * p.width / (32 * c.warps)
        keys = 1 if p.itemsize == 2 else 2
        if c.method == "rounds":
            steps = p.top_k * (each * 3 + 10) * keys
        else:
            depth = p.slots.bit_length() * (p.width.bit_length() + p.slots.bit_length()) / 2
            steps = depth * each * 8 * keys
        return self._model_us(p, c.tokens, c.warps, 100 + each * 20 + steps, gpu)

    def build(self, p: MoeRouteProblem, c: MoeRouteConfig, gpu: GpuSpec) -> Artifact:
        from cutekernels.backends.triton import compile_kernel
        from cutekernels.kernels.triton.moe import route as routing

        signature = {"weights_ptr": "*fp32", "ids_ptr": "*i32", "logits_ptr": f"*{p.dtype}"}
        signature |= {"tokens": "i64", "experts": "i32", "logits_row": "i64", "logits_col": "i64"}
        constants: dict[str, int | bool | str] = {
            "TOKENS": c.tokens,
            "WIDTH": p.width,
            "TOP_K": p.top_k,
            "SLOTS": p.slots,
            "RENORMALIZE": p.renormalize,
            "METHOD": c.method,
        }
        divisible: dict[str, int] = {}
        if p.layout == "rows":
            constants["logits_col"] = 1
            units = p.align // p.itemsize
            divisible = {"logits_ptr": p.align, "logits_row": units, "experts": units}
        return compile_kernel(
            routing.moe_route,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            divisible=divisible,
            options={"num_warps": c.warps},
            gpu=gpu,
        )

    def bind(self, p: MoeRouteProblem, c: MoeRouteConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        grid, tokens, experts = self.grid(p, c), p.tokens, p.experts

        return Launch(kernel, grid, 3, lambda weights, ids, logits: (tokens, experts, *walk(logits)))

    def outputs(self, p: MoeRouteProblem, *args: Tensor) -> tuple[Tensor, ...]:
        return self.fresh(*args, top_k=p.top_k, renormalize=p.renormalize)

    def sample(self, p: MoeRouteProblem, device: str, seed: int) -> tuple[Tensor, ...]:
        draw = torch.Generator(device).manual_seed(seed)

        def normal(size: int) -> Tensor:
            return torch.randn(size, generator=draw, device=device, dtype=GPU_DTYPES[p.dtype])

        return (place(normal, p, p.tokens, p.experts),)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        (logits,) = args
        top_k, kind = options["top_k"], _weights_type(logits)
        # A stable sort takes ties from the left; torch.topk promises no order among them.
        values, ids = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
        e = torch.exp(values - values[..., :1])
        weights = e[..., :top_k] / (e[..., :top_k] if options["renormalize"] else e).sum(-1, keepdim=True)
        return weights.to(kind), ids[..., :top_k].to(torch.int32)

    def work(self, p: MoeRouteProblem) -> Work:
        return Work(4.0 * p.tokens * p.experts, float(p.tokens * (p.experts * p.itemsize + 8 * p.top_k)))


class MoeRouteBackward(_RouteOp[MoeRouteBackwardConfig]):
    """The gradient of :class:`MoeRoute`. Arguments: dweights, weights, ids, logits."""

    name = "moe_route_backward"
    revision = 1
    Config = MoeRouteBackwardConfig
    suite = (
        "tokens=4096 experts=128",
        "tokens=4096 experts=64 top_k=6 dtype=fp32 renormalize=0",
        "tokens=333 experts=60 top_k=4 align=8",
        "tokens=257 experts=128 renormalize=0 layout=strided",
    )
    results = ("dlogits",)
    inputs = ("dweights", "weights", "ids", "logits")
    schema = "Tensor dweights, Tensor weights, Tensor ids, Tensor logits, int top_k, bool renormalize"

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        dweights, weights, ids, logits = present(inputs)
        check_dtype(self, logits)
        check_router(logits, options["top_k"])
        check_alike(self, weights, [dweights])
        check_alike(self, weights, [ids], ("shape", "device"))
        check_alike(self, logits, [weights], ("device",))
        check_alike(self, logits, results)
        shape = (*logits.shape[:-1], options["top_k"])
        if weights.shape != shape or weights.dtype != _weights_type(logits) or ids.dtype != torch.int32:
            raise UnsupportedProblem(
                f"{self.name} takes weights {shape} in {_weights_type(logits)} and ids in torch.int32; "
                f"got {tuple(weights.shape)}, {weights.dtype} and {ids.dtype}"
            )
        tensor_op.check_results(results)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        logits = present(inputs)[3]
        return (logits.new_empty(logits.shape),)

    def problem(self, *operands: Tensor | None, **options: Any) -> MoeRouteProblem:
        dlogits, *_, logits = present(operands)
        experts = logits.shape[-1]
        return MoeRouteProblem(
            logits.numel() // max(1, experts),
            experts,
            options["top_k"],
            DTYPE_NAMES[logits.dtype],
            options["renormalize"],
            *laid_out(dlogits, logits),
        )

    def why_not(self, p: MoeRouteProblem, c: MoeRouteBackwardConfig, gpu: GpuSpec) -> str | None:
        return self._fits(p, c.tokens, c.warps)

    def default(self, p: MoeRouteProblem, gpu: GpuSpec) -> MoeRouteBackwardConfig:
        return MoeRouteBackwardConfig(*self._tile(p, gpu))

    def estimate_us(self, p: MoeRouteProblem, c: MoeRouteBackwardConfig, gpu: GpuSpec) -> float:
        each = c.tokens * p.width / (32 * c.warps)
        return self._model_us(p, c.tokens, c.warps, 100 + each * (10 + 3 * p.top_k), gpu)

    def build(self, p: MoeRouteProblem, c: MoeRouteBackwardConfig, gpu: GpuSpec) -> Artifact:
        from cutekernels.backends.triton import compile_kernel
        from cutekernels.kernels.triton.moe import route as routing

        signature = {"dlogits_ptr": f"*{p.dtype}", "dweights_ptr": "*fp32", "weights_ptr": "*fp32", "ids_ptr": "*i32"}
        signature |= {"logits_ptr": f"*{p.dtype}", "tokens": "i64", "experts": "i32"}
        for name in (*self.results, *self.inputs):
            signature |= {f"{name}_row": "i64", f"{name}_col": "i64"}
        constants: dict[str, int | bool | str] = {
            "TOKENS": c.tokens,
            "WIDTH": p.width,
            "TOP_K": p.top_k,
            "RENORMALIZE": p.renormalize,
        }
        divisible: dict[str, int] = {}
        if p.layout == "rows":
            constants |= {"dlogits_col": 1, "logits_col": 1}
            units = p.align // p.itemsize
            divisible = {"dlogits_ptr": p.align, "logits_ptr": p.align, "experts": units}
            divisible |= {"dlogits_row": units, "logits_row": units}
        return compile_kernel(
            routing.moe_route_backward,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            divisible=divisible,
            options={"num_warps": c.warps},
            gpu=gpu,
        )

    def bind(self, p: MoeRouteProblem, c: MoeRouteBackwardConfig, kernel: Callable[..., Any]) -> Callable[..., None]:
        grid, tokens, experts = self.grid(p, c), p.tokens, p.experts

        return Launch(kernel, grid, 5, lambda *operands: (tokens, experts, *[s for t in operands for s in walk(t)]))

    def outputs(self, p: MoeRouteProblem, *args: Tensor) -> tuple[Tensor, ...]:
        return (place(args[3].new_empty, p, p.tokens, p.experts),)

    def sample(self, p: MoeRouteProblem, device: str, seed: int) -> tuple[Tensor, ...]:
        logits = MOE_ROUTE.sample(p, device, seed)[0]
        weights, ids = MOE_ROUTE.reference(p, logits)
        draw = torch.Generator(device).manual_seed(seed + 1)
        return torch.randn(weights.shape, generator=draw, device=device), weights, ids, logits

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        dweights, weights, ids, logits = args
        d, w, index = dweights.double(), weights.double(), ids.long()
        zeros = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
        p = zeros.scatter(-1, index, w) if options["renormalize"] else torch.softmax(logits.double(), -1)
        return ((p * (zeros.scatter(-1, index, d) - (w * d).sum(-1, keepdim=True))).to(logits.dtype),)

    def work(self, p: MoeRouteProblem) -> Work:
        reads = 1 if p.renormalize else 2
        moved = p.tokens * (p.experts * p.itemsize * reads + 12 * p.top_k)
        # Differences of sums of top_k terms, granted relative to all results, most of which are zero.
        return Work(4.0 * p.tokens * p.experts, float(moved), depth=8 * p.experts)


def _weights_type(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def check_router(logits: Tensor, top_k: int) -> None:
    """Refuses what no router has."""
    experts = logits.shape[-1] if logits.dim() else 0
    if not 1 <= experts <= MAX_EXPERTS:
        raise UnsupportedProblem(
            f"moe_route takes logits (..., E) of 1 to {MAX_EXPERTS} experts; got shape {tuple(logits.shape)}"
        )
    if not 1 <= top_k <= min(experts, MAX_TOP_K):
        raise UnsupportedProblem(
            f"top_k is from 1 to {min(experts, MAX_TOP_K)} for {experts} experts; it is {top_k}: route to fewer experts"
        )


MOE_ROUTE = MoeRoute()
MOE_ROUTE_BACKWARD = MoeRouteBackward()


# ---- the function ---------------------------------------------------------------------------------------


def moe_route(
    logits: Tensor, top_k: int, *, renormalize: bool = True, config: MoeRouteConfig | str | None = None
) -> tuple[Tensor, Tensor]:
    """The ``top_k`` largest of ``softmax(logits)`` over all experts, in descending order, and whose they are.

    Experts are ranked by their logits, ties to the lower expert (-0 equals 0). In fp32, rounded never: the weights are
    fp32 whatever the logits are, since they multiply what experts return. A row with NaN or +inf, or of -inf alone, has
    weights NaN as ``torch.softmax`` has; its ids are distinct and in range all the same, NaN ranking first as in
    ``torch.topk``.

    Args:
        logits: ``(..., E)``, fp16, bf16 or fp32 (on the CPU fp64 too), E from 1 to 512; any strides.
        top_k: experts per token, from 1 to ``min(E, 32)``.
        renormalize: divides the weights of a token by their sum, so that they sum to 1.
        config: overrides the tuned choice, as a :class:`MoeRouteConfig` or its text. Ignored on the CPU.

    Returns:
        ``(weights, ids)``, each ``(..., top_k)`` and contiguous. ``weights`` in fp32 (fp64 for fp64 logits),
        differentiable in ``logits``, once. ``ids`` in int32, which is what kernels index experts with at half the
        traffic; ``ids.long()`` is what ``torch.topk`` returns.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, too many experts, ``top_k`` out of range.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    found = tensor_op.eager(MOE_ROUTE, None, (logits,), (top_k, renormalize), (), config)
    if found is not None:
        return found[0], found[1]
    text = None if config is None else str(config)
    return torch.ops.cutekernels.moe_route(logits, top_k, renormalize, text)  # type: ignore[no-any-return]


# ---- torch.library --------------------------------------------------------------------------------------


def register(library: torch.library.Library) -> None:
    """Defines the ops of this file in ``library``, with their gradients."""
    tensor_op.register(library, MOE_ROUTE, backward=_gradient, setup_context=_remember)
    tensor_op.register(library, MOE_ROUTE_BACKWARD)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, ctx.top_k, ctx.renormalize, _ = inputs
    ctx.save_for_backward(*output, logits)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, dweights: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
    dlogits = torch.ops.cutekernels.moe_route_backward(dweights, *ctx.saved_tensors, ctx.top_k, ctx.renormalize)
    return dlogits, None, None, None
