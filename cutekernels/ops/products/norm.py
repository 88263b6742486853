"""The declarations of ``rms_norm_linear`` and ``linear_silu_mul``; the public functions are in ``ops/norm_linear.py``.

A config's ``path`` is ``fused``, one kernel, or ``chain``: the norm, the product and the gate as they are tuned
themselves. The tuner times one against the other, so a call is never slower than our own ops one after the other. A
fused kernel's ``body`` is ``gemm``'s skinny one, with a norm in front or a gate behind, its skinny_warpgroup one, with
a norm in front, or its warpgroup one, with a gate behind.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cutekernels import dispatch, rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Op, P, Problem, Scalar, Work
from cutekernels.ops.activations.op import SILU_MUL, GluProblem
from cutekernels.ops.norms.op import RMS_NORM, RmsNormProblem
from cutekernels.ops.products.dense import GEMM, nothing
from cutekernels.ops.products.epilogue import exact_product
from cutekernels.ops.products.fused import (
    CHAIN,
    FUSED_SCHEDULES,
    GATE_ROWS,
    KNOBS,
    LinearSiluMulProblem,
    NormLinearConfig,
    NormLinearProblem,
    RmsNormLinearProblem,
    product_of,
    since_revision_1,
)
from cutekernels.ops.products.schedules.coefficients import NORM
from cutekernels.ops.products.schedules.problem import ELEMENT_BYTES, GATED, WIDEST, GemmProblem
from cutekernels.ops.products.schedules.schedule import PLAIN, Extras, Product
from cutekernels.ops.products.schedules.skinny_warpgroup import SKINNY_WARPGROUP, weighing_us
from cutekernels.ops.products.schedules.warpgroup import WARPGROUP
from cutekernels.ops.shared.cute_op import CuteOp
from cutekernels.ops.shared.operands import Matrix, Named, Sizes, Vector
from cutekernels.ops.shared.strides import alignment, span_bytes
from cutekernels.ops.shared.tolerance import rounded_operand_depth

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

_FEW = NormLinearConfig(path="fused", tile_m=8, tile_n=16, tile_k=256, warps_k=4)  # the skinny body


# ---- ops ------------------------------------------------------------------------------------------------

Part = tuple[Op[Any, Any], Problem]


class NormLinear(Product[P, NormLinearConfig]):
    """The common part of both ops: paths, rules, model and kernel."""

    Config = NormLinearConfig
    schedules = FUSED_SCHEDULES
    scalar_types = {"eps": "fp32"}
    scalar_samples = {"eps": 1e-5}
    in_place = False

    # -- rules and choice

    def for_schedules(self, p: Any) -> tuple[GemmProblem, Extras]:
        return product_of(p), p.extras

    def why_not(self, p: Any, c: NormLinearConfig, gpu: GpuSpec) -> str | None:
        if c.path == "fused":
            return super().why_not(p, c.product, gpu)
        odd = (name for name, values in KNOBS.items() if getattr(c, name) != values[0])
        return next((f"path=chain has no {name}: leave it at {KNOBS[name][0]}" for name in odd), None)

    def valid(self, p: Any, gpu: GpuSpec) -> Iterator[NormLinearConfig]:
        yield CHAIN
        yield from super().valid(p, gpu)

    def default(self, p: Any, gpu: GpuSpec) -> NormLinearConfig:
        """The skinny_warpgroup body's best by its model, where that costs less than a norm's kernel; else the chain.

        Candidates hide the weighing of tokens behind their loads.
        """
        schedule, product, x = FUSED_SCHEDULES[SKINNY_WARPGROUP.name], product_of(p), p.extras
        if schedule.refusal(product, gpu, x) or p.layout != "aligned" or 0 in (p.m, p.n):
            return CHAIN
        c, kept = schedule.candidates(product, gpu, x)
        if not kept.any():
            return CHAIN
        alone_us = float(SKINNY_WARPGROUP.estimate_us(product, c, gpu, PLAIN)[kept].min())
        kept &= weighing_us(product, c, gpu) < NORM.hidden * alone_us  # type: ignore[arg-type]
        if not kept.any():
            return CHAIN
        found = schedule.least(product, c, x, kept, schedule.estimate_us(product, c, gpu, x))
        rate = rates.of(gpu)
        norm_us = NORM.kernel * rate.launch_us + NORM.token / rate.clock_mhz * min(p.m, NORM.tokens)
        chain_us = alone_us + norm_us + NORM.of_product * alone_us
        return found[1] if found[0] + NORM.within * rate.exchange_us < chain_us else CHAIN  # type: ignore[return-value]

    def estimate_us(self, p: Any, c: NormLinearConfig, gpu: GpuSpec) -> float:
        """The schedule's model, or the sum of those of the chain's ops."""
        if p.m == 0 or p.n == 0:
            return 0.0
        if c.path == "chain":
            return sum(_default_us(op, part, gpu) for op, part in self.parts(p))
        return super().estimate_us(p, c.product, gpu)  # type: ignore[no-any-return]

    # -- kernel

    def build(self, p: Any, c: NormLinearConfig, gpu: GpuSpec) -> Artifact:
        if c.path == "chain":
            from cutekernels.backends.chained import Chained

            return Chained()
        return super().build(p, c, gpu)

    def body(self, p: Any, c: NormLinearConfig, gpu: GpuSpec) -> Any:
        return super().body(p, c.product, gpu).with_norm

    def elements(self, p: Any, c: NormLinearConfig, name: str) -> int:
        if name in ("bias", "rstd"):
            return 1
        if name == "out":
            return WIDEST if c.body in (SKINNY_WARPGROUP.name, WARPGROUP.name) else 1
        return 4 if name == "norm_weight" and p.norm_weight == "fp32" else WIDEST

    def divisors(self, p: Any, c: NormLinearConfig) -> dict[str, int]:
        n = GATE_ROWS if p.extras.gated else self.elements(p, c, "out")
        return {"k": WIDEST, "rows": 2 * GATE_ROWS, "n": n}

    def chained(self, p: Any, c: NormLinearConfig, gpu: GpuSpec | None = None) -> list[Part]:
        if c.path != "chain" or p.layout != "aligned" or 0 in (p.m, p.n):
            return []  # in other layouts their problems are known at the call
        return self.parts(p)

    def bind(self, p: Any, c: NormLinearConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        if 0 in (p.m, p.n):
            return nothing
        if c.path == "chain":
            for op, part in self.chained(p, c):
                dispatch.plan(op, part, torch.cuda.current_device())  # compiled now, for graphs captured later
            return self.chain(p)
        workspace = FUSED_SCHEDULES[c.body].workspace(product_of(p), c.product, p.extras)

        names = list(self.operands)
        places = [names.index(name) if name in names else None for name in self.order]

        def launch(*args: Any) -> None:
            y, x, *others, rstd = [None if i is None else args[i] for i in places]
            rstd = None if rstd is None else rstd.view(-1)
            kernel(_matrix(y), _matrix(x), *others, rstd, args[-1], *workspace())

        return launch

    @abstractmethod
    def parts(self, p: Any) -> list[Part]:
        """The ops that :meth:`chain` launches, and their problems where ``p`` is aligned."""

    @abstractmethod
    def chain(self, p: Any) -> Callable[..., None]:
        """``launch(*results, *inputs, *scalars)`` by the ops of :meth:`parts`."""

    # -- operands

    def layout(self, named: Named, sizes: Sizes, found: Mapping[str, Any]) -> dict[str, Scalar]:
        y, x, weight, _, norm_weight, _ = [named.get(name) for name in self.order]
        assert y is not None and x is not None and weight is not None
        m, k, n = sizes["m"], sizes["k"], sizes["n"]
        aligned = False
        if m and k:
            flat = x.reshape(m, k) if x.dim() != 2 else x
            aligned = (
                flat.stride(-1) == weight.stride(-1) == y.stride(-1) == 1
                and min(alignment(flat), alignment(weight)) == WIDEST
                and (norm_weight is None or norm_weight.data_ptr() % 16 == 0)
                and max(map(span_bytes, (flat, weight, y))) < 2 * 2**31
            )
        whole = aligned and (n % WIDEST > 0 or alignment(y) == WIDEST)
        return {"layout": "aligned" if whole else "inputs" if aligned else "any"}

    def place(self, p: Any, name: str, result: Tensor) -> Tensor:
        # an odd pitch, so that few rows of the result are aligned
        return result.new_empty((p.m, p.n + 1))[:, : p.n] if p.layout == "inputs" else result

    def arrange(self, p: Any, name: str, values: Tensor) -> Tensor:
        if name != "x" or p.layout != "any":
            return values
        return values.new_empty((p.m, p.k + 1))[:, : p.k].copy_(values)

    def draw(self, p: Any, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """Rows that differ in rstd, an rstd that differs from a computed one, outputs near 1."""
        import torch

        if name in ("norm_weight", "bias"):
            return None
        values: Tensor = torch.randn(shape, generator=generator, device=generator.device)
        if name == "x":
            return values.mul_(0.5 + 2 * torch.rand(p.m, 1, generator=generator, device=generator.device))
        return (1 + 0.2 * values).abs() if name == "rstd" else values.mul_(max(1, p.k) ** -0.5)

    def work(self, p: Any) -> Work:
        g = p.epilogue
        moved = (g.m * g.k + g.n * g.k + p.m * p.n) * ELEMENT_BYTES + p.k * p.gamma_bytes
        # The tolerance of a sum this long covers one rounded operand, x * rstd * gamma or weight * gamma.
        depth = max(float(p.k), rounded_operand_depth(p.dtype, gated=p.extras.gated))
        return Work(flops=2.0 * g.m * g.n * g.k, bytes=float(moved), depth=depth)


def _matrix(t: Any) -> Any:
    return t if t.dim() == 2 else t.view(-1, t.shape[-1])


@rates.remember
def _default_us(op: Op[Any, Any], p: Problem, gpu: GpuSpec) -> float:
    return op.estimate_us(p, op.default(p, gpu), gpu)


def _norm(p: NormLinearProblem) -> Part:
    align = p.epilogue.a_align * ELEMENT_BYTES
    return RMS_NORM, RmsNormProblem(rows=p.m, cols=p.k, dtype=p.dtype, weight=p.norm_weight, align=align)


class RmsNormLinear(NormLinear[RmsNormLinearProblem], CuteOp[RmsNormLinearProblem, NormLinearConfig]):
    """``y = activation(rms_norm(x) @ weight.T + bias)``."""

    name = "rms_norm_linear"
    revision = 2
    earlier = {1: since_revision_1}
    suite = (
        "m=1 n=3584 k=3584",
        "m=16 n=3584 k=3584",
        "m=64 n=3584 k=3584",
        "m=4 n=1024 k=520 dtype=fp16 norm_weight=fp32 bias=fp32 activation=gelu",
        "m=8 n=4096 k=4096 norm_weight=none rstd=given bias=same activation=silu",
        "m=100 n=513 k=328 dtype=fp16",
        "m=256 n=3584 k=3584",
        "m=3 n=70 k=131 layout=any",
        "m=5 n=512 k=1024 layout=inputs",
    )
    Problem = RmsNormLinearProblem
    out = Matrix("*m", "n", result=True)
    x = Matrix("*m", "k")
    norm_weight = Vector("k", dtype="norm_weight", strides=(), optional=True)
    weight = Matrix("n", "k")
    bias = Vector("n", dtype="bias", strides=(), optional=True)
    rstd = Vector("*m", dtype="sums", strides=(), given="rstd=given")
    options = ("activation",)
    order = ("out", "x", "weight", "bias", "norm_weight", "rstd")

    def parts(self, p: RmsNormLinearProblem) -> list[Part]:
        norm = [_norm(p)] if p.rstd == "computed" else []  # torch's own kernels multiply by a given rstd
        return [*norm, (GEMM, p.epilogue)]

    def chain(self, p: RmsNormLinearProblem) -> Callable[..., None]:
        from cutekernels.ops.products.api import linear_into
        from cutekernels.ops.products.chain import normalise

        activation: Any = None if p.activation == "none" else p.activation

        def launch(*args: Any) -> None:
            y, x, norm_weight, weight, bias, rstd, eps = args
            linear_into(y, normalise(x, norm_weight, rstd, eps), weight, bias, activation)

        return launch

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, norm_weight, weight, bias, rstd, eps = args
        h = _exact_norm(x, norm_weight, rstd, eps)
        return (exact_product(h, weight, bias, options["activation"], x.dtype),)


class LinearSiluMul(NormLinear[LinearSiluMulProblem], CuteOp[LinearSiluMulProblem, NormLinearConfig]):
    """``silu(h @ w_gate.T) * (h @ w_up.T)``, h = x or its norm."""

    name = "linear_silu_mul"
    revision = 2
    earlier = {1: since_revision_1}
    suite = (
        "m=1 n=18944 k=3584",
        "m=16 n=18944 k=3584 norm=1 norm_weight=same",
        "m=5 n=1000 k=520 dtype=fp16 norm=1 norm_weight=fp32",
        "m=64 n=512 k=1024 norm=1",
        "m=256 n=512 k=1024",
        "m=1000 n=4096 k=4096",
        "m=3 n=35 k=131 layout=any",
    )
    Problem = LinearSiluMulProblem
    out = Matrix("*m", "n", result=True)
    x = Matrix("*m", "k")
    w_gate_up = Matrix("rows", "k")
    norm_weight = Vector("k", dtype="norm_weight", strides=(), optional=True)
    options = ("norm",)
    order = ("out", "x", "w_gate_up", "bias", "norm_weight", "rstd")

    def derive(self, sizes: Sizes, **options: Any) -> None:
        if sizes.setdefault("rows", 2 * sizes.get("n", 0)) % 2:
            raise ValueError(f"w_gate_up has the gate's rows and as many of up's; there are {sizes['rows']}")
        sizes["n"] = sizes["rows"] // 2

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        if named["norm_weight"] is not None and not options["norm"]:
            raise UnsupportedProblem("norm=False takes no norm_weight: leave one of them out")

    def default(self, p: LinearSiluMulProblem, gpu: GpuSpec) -> NormLinearConfig:
        """One config for few tokens without a norm: docs/notes/norm_linear.md#gate-of-few-tokens (H200, 2026-11-24).

        Else the warpgroup body's best by its model, where that is ahead of the chain's; else the chain.
        """
        few = _FEW.replace(pdl=gpu.has_pdl)
        if 0 < p.m <= few.tile_m and not p.norm and self.why_not(p, few, gpu) is None:
            return few
        found = FUSED_SCHEDULES[WARPGROUP.name].best(product_of(p), gpu, p.extras)
        return found[1] if found and found[0] < self.estimate_us(p, CHAIN, gpu) else CHAIN  # type: ignore[return-value]

    def parts(self, p: LinearSiluMulProblem) -> list[Part]:
        align = math.gcd(p.n, WIDEST) * ELEMENT_BYTES
        halves = GluProblem(p.m, p.n, dtype=p.dtype, layout="rows" if p.m > 1 else "dense", align=align)
        return [*([_norm(p)] if p.norm else []), (GEMM, p.epilogue), (SILU_MUL, halves)]

    def chain(self, p: LinearSiluMulProblem) -> Callable[..., None]:
        from cutekernels.ops.activations.api import silu_mul
        from cutekernels.ops.products.api import linear_into
        from cutekernels.ops.products.chain import normalise

        def launch(y: Tensor, x: Tensor, w_gate_up: Tensor, norm_weight: Tensor | None, eps: float) -> None:
            h = normalise(x, norm_weight, None, eps) if p.norm else x
            both = x.new_empty((*x.shape[:-1], w_gate_up.shape[0]))
            linear_into(both, h, w_gate_up)
            silu_mul(both, out=y)

        return launch

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, w_gate_up, norm_weight, eps = args
        h = _exact_norm(x, norm_weight, None, eps) if options["norm"] else x.double()
        return (exact_product(h, w_gate_up, None, GATED, x.dtype),)


def _exact_norm(x: Tensor, norm_weight: Tensor | None, rstd: Tensor | None, eps: float) -> Tensor:
    """The RMS norm of ``x``, in fp64."""
    import torch

    u = x.double()
    scale = torch.rsqrt(u.square().mean(-1) + eps) if rstd is None else rstd.double()
    h = u * scale.unsqueeze(-1)
    return h if norm_weight is None else h * norm_weight.double()


RMS_NORM_LINEAR = RmsNormLinear()
LINEAR_SILU_MUL = LinearSiluMul()
OPS = RMS_NORM_LINEAR, LINEAR_SILU_MUL
