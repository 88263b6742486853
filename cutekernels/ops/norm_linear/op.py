"""The declarations of ``rms_norm_linear`` and ``linear_silu_mul``; the public functions are in ``api.py``.

A config's ``path`` is ``fused``, one kernel, or ``chain``: the norm, the product and the gate as they are tuned
themselves. The tuner times one against the other, so a call is never slower than our own ops one after the other. A
fused kernel's ``body`` is ``gemm``'s skinny one, with a norm in front or a gate behind, its skinny_warpgroup one, with
a norm in front, or its warpgroup one, with a gate behind.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from cutekernels import dispatch, rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS, activated
from cutekernels.op import Op, Problem, Work
from cutekernels.ops.activations.op import SILU_MUL, GluProblem
from cutekernels.ops.gemm.coefficients import NORM
from cutekernels.ops.gemm.epilogue import GATED, activate, kind_of
from cutekernels.ops.gemm.op import GEMM, SCHEDULES, nothing
from cutekernels.ops.gemm.problem import ELEMENT_BYTES, WIDEST, GemmProblem
from cutekernels.ops.gemm.schedule import PLAIN
from cutekernels.ops.gemm.skinny_warpgroup import SKINNY_WARPGROUP, weighing_us
from cutekernels.ops.gemm.warpgroup import WARPGROUP
from cutekernels.ops.norm_linear.fused import FUSED_SCHEDULES, GATE_ROWS, product_of
from cutekernels.ops.norm_linear.problem import (
    CHAIN,
    KNOBS,
    LinearSiluMulProblem,
    NormLinearConfig,
    NormLinearProblem,
    RmsNormLinearProblem,
    since_revision_1,
)
from cutekernels.ops.norms.op import RMS_NORM, RmsNormProblem
from cutekernels.ops.shared.checks import check_results
from cutekernels.ops.shared.dtypes import DTYPES
from cutekernels.ops.shared.strides import alignment, span_bytes
from cutekernels.ops.shared.tensor_op import TensorOp
from cutekernels.ops.shared.tolerance import rounded_operand_depth

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

_FEW = NormLinearConfig(path="fused", tile_m=8, tile_n=16, tile_k=256, warps_k=4)  # the skinny body


# ---- ops ------------------------------------------------------------------------------------------------

N = TypeVar("N", bound=NormLinearProblem)
Part = tuple[Op[Any, Any], Problem]


class NormLinear(TensorOp[N, NormLinearConfig]):
    """The common part of both ops: paths, rules, model and kernel."""

    Config = NormLinearConfig
    results = ("y",)
    scalars = ("eps",)
    in_place = False
    weight_at: ClassVar[int]  # position of the linear layer's weight among the inputs
    gates: ClassVar[bool]

    # -- rules and choice

    def why_not(self, p: N, c: NormLinearConfig, gpu: GpuSpec) -> str | None:
        if c.path == "fused":
            return FUSED_SCHEDULES[c.body].why_not(p, c, gpu, p.extras)
        odd = (name for name, values in KNOBS.items() if getattr(c, name) != values[0])
        return next((f"path=chain has no {name}: leave it at {KNOBS[name][0]}" for name in odd), None)

    def valid(self, p: N, gpu: GpuSpec) -> Iterator[NormLinearConfig]:
        yield CHAIN
        for schedule in FUSED_SCHEDULES.values():
            yield from schedule.valid(p, gpu, p.extras)

    def default(self, p: N, gpu: GpuSpec) -> NormLinearConfig:
        """The skinny_warpgroup body's best by its model, where that costs less than a norm's kernel; else the chain.

        Candidates hide the weighing of tokens behind their loads.
        """
        schedule, product, x = FUSED_SCHEDULES[SKINNY_WARPGROUP.name], product_of(p), p.extras
        if schedule.refusal(p, gpu, x) or p.layout != "aligned" or 0 in (p.m, p.n):
            return CHAIN
        c, kept = schedule.candidates(p, gpu, x)
        if not kept.any():
            return CHAIN
        alone_us = float(SKINNY_WARPGROUP.estimate_us(product, c, gpu, PLAIN)[kept].min())
        kept &= weighing_us(product, c, gpu) < NORM.hidden * alone_us  # type: ignore[arg-type]
        if not kept.any():
            return CHAIN
        found = schedule.least(p, c, x, kept, schedule.estimate_us(p, c, gpu, x))
        rate = rates.of(gpu)
        norm_us = NORM.kernel * rate.launch_us + NORM.token / rate.clock_mhz * min(p.m, NORM.tokens)
        chain_us = alone_us + norm_us + NORM.of_product * alone_us
        return found[1] if found[0] + NORM.within * rate.exchange_us < chain_us else CHAIN

    def estimate_us(self, p: N, c: NormLinearConfig, gpu: GpuSpec) -> float:
        """The schedule's model, or the sum of those of the chain's ops."""
        if p.m == 0 or p.n == 0:
            return 0.0
        if c.path == "chain":
            return sum(_default_us(op, part, gpu) for op, part in self.parts(p))
        return FUSED_SCHEDULES[c.body].estimate_us(p, c, gpu, p.extras)  # type: ignore[no-any-return]

    # -- kernel

    def build(self, p: N, c: NormLinearConfig, gpu: GpuSpec) -> Artifact:
        if c.path == "chain":
            from cutekernels.backends.chained import Chained

            return Chained()
        import cutlass

        from cutekernels.backends import cute as backend

        cute = cutlass.cute
        dtype = backend.type_of(p.dtype)
        kinds = {"same": dtype, "fp32": cutlass.Float32}
        extras, schedule, product = p.extras, SCHEDULES[c.body], product_of(p)
        out_align = WIDEST if schedule in (SKINNY_WARPGROUP, WARPGROUP) else 1
        m, k = cute.sym_int(), cute.sym_int(divisibility=WIDEST)
        rows = cute.sym_int(divisibility=2 * GATE_ROWS if extras.gated else out_align)
        n = cute.sym_int(divisibility=GATE_ROWS) if extras.gated else rows
        return backend.compile(
            schedule.body(product, c.product, gpu, extras).with_norm,
            backend.matrix(dtype, m, n, out_align),
            backend.matrix(dtype, m, k, WIDEST),
            backend.matrix(dtype, rows, k, WIDEST),
            backend.bias(product.bias, dtype, n),
            None if p.weight == "none" else backend.dense(kinds[p.weight], k, align=16),
            backend.dense(cutlass.Float32, m) if extras.norm and not extras.squares else None,
            cutlass.Float32(0.0),
            *schedule.workspace_types(c.product, extras),
            gpu=gpu,
        )

    def chained(self, p: N, c: NormLinearConfig, gpu: GpuSpec | None = None) -> list[Part]:
        if c.path != "chain" or p.layout != "aligned" or 0 in (p.m, p.n):
            return []  # in other layouts their problems are known at the call
        return self.parts(p)

    def bind(self, p: N, c: NormLinearConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        if 0 in (p.m, p.n):
            return nothing
        if c.path == "chain":
            for op, part in self.chained(p, c):
                dispatch.plan(op, part, torch.cuda.current_device())  # compiled now, for graphs captured later
            return self.chain(p)
        workspace = SCHEDULES[c.body].workspace(product_of(p), c.product, p.extras)

        def launch(y: Tensor, *inputs: Any) -> None:
            x, norm_weight, weight, bias, rstd, eps = self.kernel_arguments(*inputs)
            kernel(_matrix(y), _matrix(x), weight, bias, norm_weight, rstd, eps, *workspace())

        return launch

    @abstractmethod
    def parts(self, p: N) -> list[Part]:
        """The ops that :meth:`chain` launches, and their problems where ``p`` is aligned."""

    @abstractmethod
    def chain(self, p: N) -> Callable[..., None]:
        """``launch(*results, *inputs, *scalars)`` by the ops of :meth:`parts`."""

    @abstractmethod
    def kernel_arguments(self, *args: Any) -> tuple[Any, ...]:
        """``(x, norm_weight, weight, bias, rstd, eps)`` of a launch's inputs and scalars."""

    # -- operands

    def takes(self, name: str, t: Tensor) -> bool:
        return t.is_contiguous() if t.dim() == 1 or name == "rstd" else super().takes(name, t)

    def _admit(self, x: Tensor, weight: Tensor, norm_weight: Tensor | None, results: Sequence[Tensor]) -> None:
        """The requirements of both ops on their operands."""
        import torch

        allowed = [*DTYPES.values(), *([torch.float32, torch.float64] if x.device.type == "cpu" else [])]
        if x.dtype not in allowed:
            names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
            raise UnsupportedProblem(f"{self.name} on {x.device.type} takes {names}; got {x.dtype}")
        if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
            raise UnsupportedProblem(
                f"x must be (..., K) and weight (N, K); their shapes are {tuple(x.shape)} and {tuple(weight.shape)}"
            )
        if norm_weight is not None and tuple(norm_weight.shape) != (x.shape[-1],):
            raise UnsupportedProblem(
                f"norm_weight must be (K,) = ({x.shape[-1]},); its shape is {tuple(norm_weight.shape)}"
            )
        self._alike(x, weight=weight)
        self._alike(x, torch.float32, norm_weight=norm_weight)
        rows = weight.shape[0] // (2 if self.gates else 1)
        for out in results:
            self._alike(x, out=out)
            if out.shape != (*x.shape[:-1], rows):
                raise UnsupportedProblem(f"out must be {(*x.shape[:-1], rows)}; its shape is {tuple(out.shape)}")
        check_results(results)

    def _alike(self, x: Tensor, *others: torch.dtype, **operands: Tensor | None) -> None:
        for name, t in operands.items():
            if t is not None and (t.device != x.device or t.dtype not in (x.dtype, *others)):
                raise UnsupportedProblem(
                    f"{name} must have x's dtype {x.dtype} and be on {x.device}; it has {t.dtype}, on {t.device}: "
                    "convert it"
                )

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        x, weight = inputs[0], inputs[self.weight_at]
        assert x is not None and weight is not None
        return (x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if self.gates else 1))),)

    def outputs(self, p: N, *args: Any) -> tuple[Tensor, ...]:
        if p.layout == "inputs":  # an odd pitch, so that few rows of the result are aligned
            return (args[0].new_empty((p.m, p.n + 1))[:, : p.n],)
        return self.fresh(*args[: len(self.inputs)])

    def work(self, p: N) -> Work:
        g = p.product
        moved = (g.m * g.k + g.n * g.k + p.m * p.n) * ELEMENT_BYTES + p.k * p.gamma_bytes
        return Work(flops=2.0 * g.m * g.n * g.k, bytes=float(moved), depth=depth(p))


def depth(p: NormLinearProblem) -> float:
    """The length of a sum whose tolerance covers one rounded operand, ``x * rstd * gamma`` or ``weight * gamma``."""
    return max(float(p.k), rounded_operand_depth(p.dtype, gated=p.extras.gated))


def _matrix(t: Tensor) -> Tensor:
    return t if t.dim() == 2 else t.view(-1, t.shape[-1])


@rates.remember
def _default_us(op: Op[Any, Any], p: Problem, gpu: GpuSpec) -> float:
    return op.estimate_us(p, op.default(p, gpu), gpu)


def _norm(p: NormLinearProblem) -> Part:
    align = p.product.a_align * ELEMENT_BYTES
    return RMS_NORM, RmsNormProblem(rows=p.m, cols=p.k, dtype=p.dtype, weight=p.weight, align=align)


def _product(g: GemmProblem) -> Part:
    return GEMM, g.replace(out_align=math.gcd(g.n, WIDEST))


def _fields(y: Tensor, x: Tensor, weight: Tensor, norm_weight: Tensor | None) -> dict[str, Any]:
    """The fields that both problems have."""
    k = x.shape[-1]
    m = math.prod(x.shape[:-1])
    aligned = False
    if m and k:
        flat = x.reshape(m, k) if x.dim() != 2 else x
        aligned = (
            flat.stride(-1) == weight.stride(-1) == y.stride(-1) == 1
            and min(alignment(flat), alignment(weight)) == WIDEST
            and (norm_weight is None or norm_weight.data_ptr() % 16 == 0)
            and max(map(span_bytes, (flat, weight, y))) < 2 * 2**31
        )
    n = y.shape[-1]
    whole = n % WIDEST > 0 or alignment(y) == WIDEST
    layout = "any" if not aligned else "aligned" if whole else "inputs"
    return {"m": m, "n": n, "k": k, "dtype": DTYPES.names[x.dtype], "layout": layout}


class RmsNormLinear(NormLinear[RmsNormLinearProblem]):
    """``y = activation(rms_norm(x) @ weight.T + bias)``. Arguments: x, norm_weight, weight, bias, rstd, eps."""

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
    inputs = ("x", "norm_weight", "weight", "bias", "rstd")
    options = ("activation",)
    schema = "Tensor x, Tensor? norm_weight, Tensor weight, Tensor? bias, Tensor? rstd, str activation, float eps"
    weight_at = 2
    gates = False

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        import torch

        from cutekernels.ops.norm_linear.chain import check_rstd

        x, norm_weight, weight, bias, rstd = inputs
        assert x is not None and weight is not None
        self._admit(x, weight, norm_weight, results)
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise UnsupportedProblem(f"bias must be (N,) = ({weight.shape[0]},); its shape is {tuple(bias.shape)}")
        self._alike(x, torch.float32, bias=bias)
        if rstd is not None:
            check_rstd(rstd, x)
            if x.is_cuda:
                self._alike(x, torch.float32, rstd=rstd)
        if options["activation"] not in ACTIVATIONS:
            known = ", ".join(name for name in ACTIVATIONS if name != "none")
            raise UnsupportedProblem(f"activation must be one of {known}, or None; it is {options['activation']!r}")

    def problem(self, *operands: Tensor | None, **options: Any) -> RmsNormLinearProblem:
        y, x, norm_weight, weight, bias, rstd = operands
        assert y is not None and x is not None and weight is not None
        return RmsNormLinearProblem(
            **_fields(y, x, weight, norm_weight),
            norm_weight=kind_of(norm_weight, x),
            rstd="computed" if rstd is None else "given",
            bias=kind_of(bias, x),
            **options,
        )

    def parts(self, p: RmsNormLinearProblem) -> list[Part]:
        norm = [_norm(p)] if p.rstd == "computed" else []  # torch's own kernels multiply by a given rstd
        return [*norm, _product(p.epilogue)]

    def chain(self, p: RmsNormLinearProblem) -> Callable[..., None]:
        from cutekernels.ops.norm_linear.chain import norm_then_linear

        activation = None if p.activation == "none" else p.activation

        def launch(
            y: Tensor,
            x: Tensor,
            norm_weight: Tensor | None,
            weight: Tensor,
            bias: Tensor | None,
            rstd: Tensor | None,
            eps: float,
        ) -> None:
            norm_then_linear(x, norm_weight, weight, bias, rstd, eps, activation, out=y)

        return launch

    def kernel_arguments(self, *args: Any) -> tuple[Any, ...]:
        *others, rstd, eps = args
        return (*others, rstd if rstd is None else rstd.view(-1), eps)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, norm_weight, weight, bias, rstd, eps = args
        z = _exact_norm(x, norm_weight, rstd, eps) @ weight.double().t()
        if bias is not None:
            z = z + bias.double()
        return (activated(z, options["activation"]).to(x.dtype),)

    def sample(self, p: RmsNormLinearProblem, device: str, seed: int) -> tuple[Any, ...]:
        import torch

        x, norm_weight, weight, draw = _draw(p, device, seed)
        bias = None if p.bias == "none" else draw(p.n).to(x.dtype if p.bias == "same" else torch.float32)
        rstd = None if p.rstd == "computed" else (1 + 0.2 * draw(p.m)).abs()  # differs from a computed one
        return x, norm_weight, weight, bias, rstd, 1e-5


class LinearSiluMul(NormLinear[LinearSiluMulProblem]):
    """``silu(h @ w_gate.T) * (h @ w_up.T)``, h = x or its norm. Arguments: x, w_gate_up, norm_weight, eps."""

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
    inputs = ("x", "w_gate_up", "norm_weight")
    options = ("norm",)
    schema = "Tensor x, Tensor w_gate_up, Tensor? norm_weight, bool norm, float eps"
    weight_at = 1
    gates = True

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        x, w_gate_up, norm_weight = inputs
        assert x is not None and w_gate_up is not None
        if w_gate_up.dim() != 2 or w_gate_up.shape[0] % 2:
            raise UnsupportedProblem(
                f"w_gate_up must be (2 * I, K), the gate's rows before up's; its shape is {tuple(w_gate_up.shape)}"
            )
        if norm_weight is not None and not options["norm"]:
            raise UnsupportedProblem("norm=False takes no norm_weight: leave one of them out")
        self._admit(x, w_gate_up, norm_weight, results)

    def problem(self, *operands: Tensor | None, **options: Any) -> LinearSiluMulProblem:
        y, x, w_gate_up, norm_weight = operands
        assert y is not None and x is not None and w_gate_up is not None
        return LinearSiluMulProblem(
            **_fields(y, x, w_gate_up, norm_weight), norm_weight=kind_of(norm_weight, x), **options
        )

    def default(self, p: LinearSiluMulProblem, gpu: GpuSpec) -> NormLinearConfig:
        """One config for few tokens without a norm: docs/notes/norm_linear.md#gate-of-few-tokens (H200, 2026-11-24).

        Else the warpgroup body's best by its model, where that is ahead of the chain's; else the chain.
        """
        few = _FEW.replace(pdl=gpu.has_pdl)
        if 0 < p.m <= few.tile_m and not p.norm and self.why_not(p, few, gpu) is None:
            return few
        found = FUSED_SCHEDULES[WARPGROUP.name].best(p, gpu, p.extras)
        return found[1] if found and found[0] < self.estimate_us(p, CHAIN, gpu) else CHAIN

    def parts(self, p: LinearSiluMulProblem) -> list[Part]:
        align = math.gcd(p.n, WIDEST) * ELEMENT_BYTES
        halves = GluProblem(p.m, p.n, dtype=p.dtype, layout="rows" if p.m > 1 else "dense", align=align)
        return [*([_norm(p)] if p.norm else []), _product(p.product), (SILU_MUL, halves)]

    def chain(self, p: LinearSiluMulProblem) -> Callable[..., None]:
        from cutekernels.ops.norm_linear.chain import linear_then_gate

        def launch(y: Tensor, x: Tensor, w_gate_up: Tensor, norm_weight: Tensor | None, eps: float) -> None:
            linear_then_gate(x, w_gate_up, norm_weight, eps, p.norm, out=y)

        return launch

    def kernel_arguments(self, *args: Any) -> tuple[Any, ...]:
        x, w_gate_up, norm_weight, eps = args
        return x, norm_weight, w_gate_up, None, None, eps

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, w_gate_up, norm_weight, eps = args
        h = _exact_norm(x, norm_weight, None, eps) if options["norm"] else x.double()
        return (activate(h @ w_gate_up.double().t(), GATED).to(x.dtype),)

    def sample(self, p: LinearSiluMulProblem, device: str, seed: int) -> tuple[Any, ...]:
        x, norm_weight, weight, _ = _draw(p, device, seed)
        return x, weight, norm_weight, 1e-5


def _exact_norm(x: Tensor, norm_weight: Tensor | None, rstd: Tensor | None, eps: float) -> Tensor:
    """The RMS norm of ``x``, in fp64."""
    import torch

    u = x.double()
    scale = torch.rsqrt(u.square().mean(-1) + eps) if rstd is None else rstd.double()
    h = u * scale.unsqueeze(-1)
    return h if norm_weight is None else h * norm_weight.double()


def _draw(p: NormLinearProblem, device: str, seed: int) -> tuple[Tensor, Tensor | None, Tensor, Callable[..., Tensor]]:
    """x, the norm's weight, the linear layer's with outputs near 1, and a source of more numbers."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    dtype = DTYPES[p.dtype]
    spread = 0.5 + 2 * torch.rand(p.m, 1, generator=generator, device=device)  # so that rows differ in rstd
    pitch = p.k + (p.layout == "any")
    x = (draw(p.m, pitch) * spread).to(dtype)[:, : p.k]
    weight = (draw(p.product.n, p.k) * (1.0 / max(1, p.k)) ** 0.5).to(dtype)
    gamma = None
    if p.weight != "none":
        gamma = draw(p.k).to(dtype if p.weight == "same" else torch.float32)
    return x, gamma, weight, draw


RMS_NORM_LINEAR = RmsNormLinear()
LINEAR_SILU_MUL = LinearSiluMul()
