"""``moe_route``: which experts a token goes to and with what weight, and its gradient.

    logits = x @ router.T                                  # (T, E)
    weights, ids = moe_route(logits, top_k)                # (T, K) fp32, (T, K) int32

What follows (grouping the tokens by expert, and bringing the experts' results back) is in ``permute.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import C, Config, Problem, Scalar, Work, extent, knob, ladder, plain, power_of_two
from cutekernels.ops.moe.coefficients import ROUTE
from cutekernels.ops.shared import tile_rules
from cutekernels.ops.shared.dtypes import WIDEST_BYTES
from cutekernels.ops.shared.laid_out import LaidOut
from cutekernels.ops.shared.operands import Matrix, Sizes
from cutekernels.ops.shared.tile_rules import accesses_rule, idle_rule
from cutekernels.ops.shared.triton_op import TritonOp, TritonPart
from cutekernels.rules import of_both

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

MAX_EXPERTS = 512
MAX_TOP_K = 32
_MAX_TILE = 32  # elements of a thread's tile, each with its key, its result and a mask


@dataclass(frozen=True)
class MoeRouteProblem(LaidOut, Problem):
    """Rows of router logits, leading dimensions flattened into tokens. ``renormalize``: weights sum to 1."""

    aligns_rows: ClassVar[str | None] = "experts"
    tokens: int = extent(ladder)
    experts: int = extent()
    top_k: int = plain(8, *(k for k in range(1, MAX_TOP_K + 1) if k != 8))
    dtype: str = plain("bf16", "fp16", "fp32")
    renormalize: bool = plain(True, False)
    layout: str = plain("rows", "strided")
    align: int = plain(16, 8, 4, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_experts(self.experts, self.top_k)

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


class RouteRows(TritonPart[MoeRouteProblem, C]):
    """Shared by routing and its gradient."""

    Problem = MoeRouteProblem
    options = ("top_k", "renormalize")
    in_place = False
    sizes = {"tokens": "i64", "experts": "i32"}
    constexprs: ClassVar[tuple[str, ...]] = ("tokens", "width", "top_k", "renormalize")

    def refuse(self, named: Mapping[str, Tensor | None], sizes: Sizes, **options: Any) -> None:
        _check_experts(sizes["experts"], options["top_k"])

    an_element_each = accesses_rule("tokens", "width", vec=1, one_warp=True)

    @of_both
    def most_elements(self, p: MoeRouteProblem, c: Any, gpu: GpuSpec) -> str | None:
        return tile_rules.most_elements(c.tokens * p.width, c.warps, _MAX_TILE)

    no_idle_tokens = idle_rule("tokens", "tokens", "{} rows")

    def _tile(self, p: MoeRouteProblem, gpu: GpuSpec) -> tuple[int, int]:
        """``(tokens, warps)``: a row inside one warp, so that its reductions are; four warps once the GPU is full."""
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
        """Bytes over bandwidth, or warp instructions over an SM's issue slots where those take longer."""
        rate = rates.of(gpu)
        programs = -(-p.tokens // tokens)
        waves = -(-programs // (gpu.sm_count * max(1, gpu.max_warps // warps // ROUTE.occupied)))
        alone = warps * instructions / min(ROUTE.slots, warps) * ROUTE.dependent / rate.clock_mhz
        issue = programs / gpu.sm_count * warps * instructions / ROUTE.slots / rate.clock_mhz
        memory = self.work(p).bytes / (gpu.dram_gbps * 1e3 * rate.dram_share)
        return rate.launch_us + max(memory, issue, waves * alone)


class MoeRoute(RouteRows[MoeRouteConfig], TritonOp[MoeRouteProblem, MoeRouteConfig]):
    """``(weights, ids)`` of the ``top_k`` largest softmax(logits)."""

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
    kernel = "moe.route:moe_route"
    constexprs = (*RouteRows.constexprs, "slots", "method")
    weights = Matrix("*tokens", "top_k", "wide", strides=(), result=True)
    ids = Matrix("*tokens", "top_k", "i32", strides=(), result=True)
    logits = Matrix("*tokens", "experts")

    def default(self, p: MoeRouteProblem, gpu: GpuSpec) -> MoeRouteConfig:
        return MoeRouteConfig(*self._tile(p, gpu), "rounds")

    def estimate_us(self, p: MoeRouteProblem, c: MoeRouteConfig, gpu: GpuSpec) -> float:
        each = c.tokens * p.width / (32 * c.warps)
        keys = 1 if p.itemsize == 2 else 2
        if c.method == "rounds":
            steps = p.top_k * (each * ROUTE.round + ROUTE.rounds) * keys
        else:
            depth = p.slots.bit_length() * (p.width.bit_length() + p.slots.bit_length()) / 2
            steps = depth * each * ROUTE.compared * keys
        return self._model_us(p, c.tokens, c.warps, ROUTE.start + each * ROUTE.softmax + steps, gpu)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        (logits,) = args
        top_k, kind = options["top_k"], torch.promote_types(logits.dtype, torch.float32)
        # A stable sort takes ties from the left; torch.topk promises no order among them.
        values, ids = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
        e = torch.exp(values - values[..., :1])
        weights = e[..., :top_k] / (e[..., :top_k] if options["renormalize"] else e).sum(-1, keepdim=True)
        return weights.to(kind), ids[..., :top_k].to(torch.int32)

    def work(self, p: MoeRouteProblem) -> Work:
        return Work(4.0 * p.tokens * p.experts, self.bytes(p))


class MoeRouteBackward(RouteRows[MoeRouteBackwardConfig], TritonOp[MoeRouteProblem, MoeRouteBackwardConfig]):
    """The gradient of :class:`MoeRoute`."""

    name = "moe_route_backward"
    revision = 1
    Config = MoeRouteBackwardConfig
    suite = (
        "tokens=4096 experts=128",
        "tokens=4096 experts=64 top_k=6 dtype=fp32 renormalize=0",
        "tokens=333 experts=60 top_k=4 align=8",
        "tokens=257 experts=128 renormalize=0 layout=strided",
    )
    kernel = "moe.route:moe_route_backward"
    dlogits = Matrix("*tokens", "experts", result=True)
    dweights = Matrix("*tokens", "top_k", "wide")
    weights = Matrix("*tokens", "top_k", "wide")
    ids = Matrix("*tokens", "top_k", "i32")
    logits = Matrix("*tokens", "experts")

    def default(self, p: MoeRouteProblem, gpu: GpuSpec) -> MoeRouteBackwardConfig:
        return MoeRouteBackwardConfig(*self._tile(p, gpu))

    def estimate_us(self, p: MoeRouteProblem, c: MoeRouteBackwardConfig, gpu: GpuSpec) -> float:
        each = c.tokens * p.width / (32 * c.warps)
        return self._model_us(p, c.tokens, c.warps, ROUTE.start + each * (ROUTE.gradient + ROUTE.round * p.top_k), gpu)

    def sample(self, p: MoeRouteProblem, device: str, seed: int) -> tuple[Tensor, ...]:
        dweights, _, _, logits = super().sample(p, device, seed)
        return dweights, *MOE_ROUTE.reference(p, logits), logits

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

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


def _check_experts(experts: int, top_k: int) -> None:
    if not 1 <= experts <= MAX_EXPERTS:
        raise UnsupportedProblem(f"a router has logits of 1 to {MAX_EXPERTS} experts; it has {experts}")
    most = min(experts, MAX_TOP_K)
    if not 1 <= top_k <= most:
        raise UnsupportedProblem(
            f"top_k is from 1 to {most} for {experts} experts; it is {top_k}: route to fewer experts"
        )


MOE_ROUTE = MoeRoute()
MOE_ROUTE_BACKWARD = MoeRouteBackward()
