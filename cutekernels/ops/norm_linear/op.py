"""The declarations of ``rms_norm_linear`` and ``linear_silu_mul``; the public functions are in ``norm_linear.py``.

A config's ``path`` is ``fused``, one kernel, or ``chain``, the norm, the product and the gate as they are tuned
themselves. So the tuner times the one against the other, and the dispatcher never makes a call slower than our own ops
one after the other. A fused kernel's ``body`` is one of ``gemm``'s: ``kernels/cute/skinny.py`` with a norm in
front of the product or a gate behind it, or ``specialized.py`` with a norm in front.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from cutekernels import dispatch
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Op, Problem, Work
from cutekernels.ops.activations.op import SILU_MUL, GluProblem
from cutekernels.ops.gemm import skinny, specialized
from cutekernels.ops.gemm.api import alignment
from cutekernels.ops.gemm.multistage import ELEMENT_BYTES
from cutekernels.ops.gemm.op import ACTIVATIONS, DTYPES, GEMM, WIDEST, GemmProblem
from cutekernels.ops.norm_linear.chain import check_rstd, linear_then_gate, norm_then_linear
from cutekernels.ops.norm_linear.problem import (
    CHAIN,
    FUSED,
    KNOBS,
    LinearSiluMulProblem,
    NormLinearConfig,
    NormLinearProblem,
    RmsNormLinearProblem,
    spanned,
)
from cutekernels.ops.norms.op import RMS_NORM, RmsNormProblem
from cutekernels.ops.shared.strides import span_bytes
from cutekernels.ops.shared.tensor_op import TensorOp, check_results

if TYPE_CHECKING:
    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

# What fp16 weights of the norm are scaled by before they multiply the linear layer's: products down to 4e-6 stay normal
# numbers (fp16's own end at 6e-5), and those up to 4094 stay finite. The epilogue takes it back.
FP16_SCALE = 16.0
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_GATE_ROWS = 8  # of the gate, then as many of up, in an MMA's 16
# The model: what the fused kernel does beside the product, which mostly hides behind the loads.
_SQUARES_US_PER_TOKEN = 0.02
# What the norm's kernel costs in front of a product, and within it where it is hidden. The norm within the specialized
# product, the norm and the product, the product alone, us, H200, 2026-11-22: 3584 columns, 7.90, 8.02, 7.34 at one
# token; 7.91, 8.45, 7.46 at 8; 8.11, 8.69, 7.58 at 16; 8.32, 9.01, 7.7 at 32; 8.83, 9.29, 8.00 at 64; 18944 columns,
# 32.4, 32.9, 31.9; 32.7, 33.8, 32.6 at 16; 33.8, 34.9, 33.2 at 64; 4096 x 4096, 9.76, 10.2, 9.11 at one; 2560 x 2560,
# 5.50, 5.67, 4.57; 6.23, 6.22, 5.10 at 64.
_NORM_US, _NORM_US_PER_TOKEN, _NORM_TOKENS, _NORM_OF_PRODUCT = 0.8, 0.005, 64, 0.02
_WITHIN_US = 0.5
# Of the product's time that weighing may take and be hidden: 2048 x 4096, 0.82 of it, 64 tokens 7.70 us and by norm
# and product 7.18, 16 tokens 6.68 and 6.65; 6144 x 4096, 0.68 of it, 16 tokens 14.4 and 14.5, by two CTAs to a tile,
# 0.34 of it, 14.0; 2560 x 2560 above, 0.61 of it (of the model's time 0.51).
_HIDDEN = 0.55


# ---- ops ------------------------------------------------------------------------------------------------

N = TypeVar("N", bound=NormLinearProblem)
Part = tuple[Op[Any, Any], Problem]


class NormLinear(TensorOp[N, NormLinearConfig]):
    """What the two ops share: the paths, the rules, the model and the kernel."""

    Config = NormLinearConfig
    results = ("y",)
    scalars = ("eps",)
    in_place = False
    weight_at: ClassVar[int]  # where the linear layer's weight stands among the inputs
    gates: ClassVar[bool]

    # -- rules and choice

    def why_not(self, p: N, c: NormLinearConfig, gpu: GpuSpec) -> str | None:
        return next(self._broken(p, c, gpu), None)

    def _broken(self, p: N, c: NormLinearConfig, gpu: GpuSpec) -> Iterator[str]:
        if c.path == "chain":
            for name, values in KNOBS.items():
                if getattr(c, name) != values[0]:
                    yield f"path=chain has no {name}: leave it at {values[0]}"
            return
        for name, values in KNOBS.items():
            allowed = FUSED[c.body].get(name, values[:1])
            if getattr(c, name) not in allowed:
                yield f"body={c.body} takes {name} from {', '.join(map(str, allowed))}; it is {getattr(c, name)}"
        if p.layout == "any":
            yield "path=fused takes rows of x and weight 16-byte aligned, K contiguous, of less than 2^31 elements"
        if p.k == 0:
            yield "path=fused needs a K to sum over"
        if p.extras.gated and p.n % _GATE_ROWS:
            yield f"path=fused takes the gate's rows {_GATE_ROWS} at a time; there are {p.n}"
        if c.body == "specialized":
            yield from self._broken_specialized(p, c, gpu)
        else:
            yield from skinny.broken(p.product, c.product, gpu, p.extras)

    def _broken_specialized(self, p: N, c: NormLinearConfig, gpu: GpuSpec) -> Iterator[str]:
        """The rules of the specialized body that ``c`` breaks."""
        if p.extras.gated or not self.normalises(p):
            yield "body=specialized has a norm in front of the product and no gate behind it"
        if p.dtype == "fp16" and p.weight != "none":
            yield "body=specialized multiplies x by norm_weight before rstd is known, which may leave the range of fp16"
        if p.m > skinny.MOST_TOKENS:
            yield f"path=fused takes {skinny.MOST_TOKENS} tokens or fewer; there are {p.m}"
        if p.n % WIDEST or p.layout == "inputs":
            yield f"body=specialized stores {WIDEST} outputs at a time, aligned: n={p.n}, layout={p.layout}"
        if c.squares == "apart":
            if not p.extras.squares:
                yield "squares=apart is for rstd=computed"
            yield from specialized.crowded(_stored(self, p), c.product, gpu)
        yield from specialized.broken(_stored(self, p), c.product, gpu, p.extras)

    def valid(self, p: N, gpu: GpuSpec) -> Iterator[NormLinearConfig]:
        if p.layout == "any" or next(skinny.refused(p.product), None) is not None:
            return iter([CHAIN])
        bodies = {"skinny": skinny, "specialized": specialized}
        tiles = {(body, tile) for body, own in bodies.items() for tile in own.fitting_tiles(p.product)}
        likely = (c for c in NormLinearConfig.every() if c == CHAIN or (c.body, c.tile_n) in tiles)
        return (c for c in likely if self.why_not(p, c, gpu) is None)

    def default(self, p: N, gpu: GpuSpec) -> NormLinearConfig:
        """The specialized body's best by its model of those whose CTAs all run at once and hide weighing behind their
        loads, where that costs less than a kernel for it; else the chain.
        """
        stored = _stored(self, p)
        if p.layout != "aligned" or 0 in (p.m, p.n) or next(specialized.refused(stored, gpu), None) is not None:
            return CHAIN
        tiles = specialized.fitting_tiles(p.product)[:1]
        among = [
            c
            for c in _shortlist()
            if c.tile_n in tiles and -(-p.n // c.tile_m) * c.split_k <= gpu.sm_count and self.why_not(p, c, gpu) is None
        ]
        if not among:
            return CHAIN
        alone = min(specialized.estimate_us(stored, c.product, gpu) for c in among)
        hidden = [c for c in among if specialized.weighing_us(stored, c.product) < _HIDDEN * alone]
        if not hidden:
            return CHAIN
        fused = {c: self.estimate_us(p, c, gpu) for c in hidden}
        best = min(hidden, key=lambda c: (fused[c], specialized.preference(c.product, p.extras)))
        apart = best.replace(squares="apart")
        if self.why_not(p, apart, gpu) is None:
            fused[apart] = self.estimate_us(p, apart, gpu)
            best = min(best, apart, key=fused.__getitem__)
        norm = _NORM_US + _NORM_US_PER_TOKEN * min(p.m, _NORM_TOKENS) + _NORM_OF_PRODUCT * alone
        return best if fused[best] + _WITHIN_US < alone + norm else CHAIN

    def estimate_us(self, p: N, c: NormLinearConfig, gpu: GpuSpec) -> float:
        """The models of the ops it launches, one after the other; or the skinny product's and what goes with it."""
        if p.m == 0 or p.n == 0:
            return 0.0
        if c.path == "fused" and c.body == "specialized":
            stored = _stored(self, p)
            saved = specialized.apart_saves_us(stored, c.product, gpu) if c.squares == "apart" else 0.0
            return specialized.estimate_us(stored, c.product, gpu, p.extras) - saved
        if c.path == "fused":
            beside = _SQUARES_US_PER_TOKEN * min(p.m, c.tile_n) * p.k / 4096 if p.extras.squares else 0.0
            return skinny.estimate_us(p.product, c.product, gpu, p.extras) + beside
        return sum(_default_us(op, part, gpu) for op, part in self.parts(p))

    # -- kernel

    def build(self, p: N, c: NormLinearConfig, gpu: GpuSpec) -> Artifact:
        if c.path == "chain":
            from cutekernels.backends.chained import Chained

            return Chained()
        import cutlass
        from cutlass.cute.runtime import make_fake_tensor

        from cutekernels.backends import cute as backend
        from cutekernels.kernels.cute.parts.norm import RowNorm, TokenNorm

        cute = cutlass.cute
        dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[p.dtype]
        kinds = {"same": dtype, "fp32": cutlass.Float32}
        gated, squares = p.extras.gated, p.extras.squares
        norm: Any = None
        if self.normalises(p):
            weighted = p.weight != "none"
            if c.body == "specialized":
                norm = RowNorm(tile_k=c.tile_k, stages=c.stages, weighted=weighted, statistics=squares)
            else:
                norm = TokenNorm(
                    tokens=c.tile_n, tile_k=c.tile_k, stages=c.stages, warps_m=c.warps_m, warps_k=c.warps_k,
                    weighted=weighted, statistics=squares,
                    scale=FP16_SCALE if p.dtype == "fp16" and weighted else 1.0,
                )  # fmt: skip
        if c.body == "specialized":
            apart = c.squares == "apart"
            body, out_align = specialized.body(_stored(self, p), c.product, norm, p.extras, apart), WIDEST
        else:
            body, out_align = skinny.body(self.epilogue(p), c.product, norm, p.extras), 1
        m, k = cute.sym_int(), cute.sym_int(divisibility=WIDEST)
        rows = cute.sym_int(divisibility=2 * _GATE_ROWS if gated else out_align)
        n = cute.sym_int(divisibility=_GATE_ROWS) if gated else rows

        def matrix(first: Any, second: Any, align: int) -> Any:
            pitch = cute.sym_int(divisibility=align)
            return make_fake_tensor(dtype, (first, second), stride=(pitch, 1), assumed_align=align * ELEMENT_BYTES)

        def vector(kind: Any, length: Any, align: int) -> Any:
            return make_fake_tensor(kind, (length,), stride=(1,), assumed_align=align)

        bias = self.epilogue(p).bias
        own: list[Any] = [None, None]  # the body's: a workspace, or words and a step
        if c.body == "specialized":
            own = [vector(cutlass.Int64, cute.sym_int(), 8) if c.squares == "apart" else None, cutlass.Int32(0)]
        elif c.split_k > 1:
            own = [vector(cutlass.Float32, cute.sym_int(), 16), vector(cutlass.Int32, cute.sym_int(), 4)]
        return backend.compile(
            body.normed,
            matrix(m, n, out_align),
            matrix(m, k, WIDEST),
            matrix(rows, k, WIDEST),
            None if bias == "none" else vector(kinds[bias], n, kinds[bias].width // 8),
            None if p.weight == "none" else vector(kinds[p.weight], k, 16),
            vector(cutlass.Float32, m, 4) if norm is not None and not squares else None,
            cutlass.Float32(0.0),
            *own,
            gpu=gpu,
        )

    def bind(self, p: N, c: NormLinearConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        if 0 in (p.m, p.n):
            return _nothing
        if c.path == "chain":
            if p.layout == "aligned":  # else their problems are known at the call
                for op, part in self.parts(p):
                    dispatch.plan(op, part, torch.cuda.current_device())  # compiled now, for graphs captured later
            return self.chain(p)
        if c.body == "specialized":
            own = specialized.norm_arguments(_stored(self, p), c.product, c.squares == "apart")
        else:
            own = skinny.norm_arguments(p.product, c.product, p.extras)

        def launch(y: Tensor, *inputs: Any) -> None:
            x, norm_weight, weight, bias, rstd, eps = self.kernel_arguments(*inputs)
            kernel(_matrix(y), _matrix(x), weight, bias, norm_weight, rstd, eps, *own())

        return launch

    @abstractmethod
    def normalises(self, p: N) -> bool:
        """Whether a norm stands in front."""

    @abstractmethod
    def epilogue(self, p: N) -> GemmProblem:
        """The product with the bias and activation behind it."""

    @abstractmethod
    def parts(self, p: N) -> list[Part]:
        """The ops that :meth:`chain` launches, and what it poses to them where ``p`` is aligned."""

    @abstractmethod
    def chain(self, p: N) -> Callable[..., None]:
        """``launch(*results, *inputs, *scalars)`` by the ops it is made of."""

    @abstractmethod
    def kernel_arguments(self, *args: Any) -> tuple[Any, ...]:
        """``(x, norm_weight, weight, bias, rstd, eps)`` of a launch's inputs and scalars."""

    # -- operands

    def takes(self, name: str, t: Tensor) -> bool:
        if t.dim() == 1:
            return t.is_contiguous()
        if name == "rstd":
            return t.is_contiguous()
        return super().takes(name, t)

    def _admit(self, x: Tensor, weight: Tensor, norm_weight: Tensor | None, results: Sequence[Tensor]) -> None:
        """What both ops ask of their operands."""
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
        if p.layout == "inputs":  # rows of the result further apart, so that few are aligned
            return (args[0].new_empty((p.m, p.n + 1))[:, : p.n],)
        return self.fresh(*args[: len(self.inputs)])

    def work(self, p: N) -> Work:
        g = p.product
        moved = (g.m * g.k + g.n * g.k + p.m * p.n) * ELEMENT_BYTES + p.k * p.gamma_bytes
        return Work(flops=2.0 * g.m * g.n * g.k, bytes=float(moved), depth=depth(p))


def depth(p: NormLinearProblem) -> float:
    """The sum's length that grants what rounding an operand costs, ``x * rstd * gamma`` or ``weight * gamma``.

    Each product is then off by half an ulp of its type at most, their sum by a normal error of ``eps / sqrt(12)`` times
    the typical output. Seven standard deviations are granted, for the most of a million outputs; five times that
    behind a gate, which multiplies two such sums. ``verify.py`` grants ``depth / 8 * eps(fp32)``.
    """
    eps = {"bf16": 2.0**-7, "fp16": 2.0**-10}[p.dtype]
    granted = 7 * (5 if p.extras.gated else 1) * eps / math.sqrt(12)
    return max(float(p.k), 8 * granted / 2.0**-23)


@lru_cache(maxsize=256)
def _stored(op: NormLinear[Any], p: NormLinearProblem) -> GemmProblem:
    """The product as the specialized body has it: rows of out are aligned where N is."""
    return op.epilogue(p).replace(out_align=math.gcd(p.n, WIDEST))


@cache
def _shortlist() -> tuple[NormLinearConfig, ...]:
    return tuple(spanned("specialized", pdl=(True,), stages=(4, 5, 6, 8, 12), ahead=(0, 1, 2, 4), squares=("beside",)))


def _nothing(*args: Any) -> None:
    """The launch of an empty problem."""


def _matrix(t: Tensor) -> Tensor:
    return t if t.dim() == 2 else t.view(-1, t.shape[-1])


@cache
def _default_us(op: Op[Any, Any], p: Problem, gpu: GpuSpec) -> float:
    return op.estimate_us(p, op.default(p, gpu), gpu)


def _norm(p: NormLinearProblem) -> Part:
    align = p.product.a_align * ELEMENT_BYTES
    return RMS_NORM, RmsNormProblem(rows=p.m, cols=p.k, dtype=p.dtype, weight=p.weight, align=align)


def _product(g: GemmProblem) -> Part:
    return GEMM, g.replace(out_align=math.gcd(g.n, WIDEST))


def _kind(t: Tensor | None, x: Tensor) -> str:
    return "none" if t is None else "same" if t.dtype == x.dtype else "fp32"


def _posed(y: Tensor, x: Tensor, weight: Tensor, norm_weight: Tensor | None) -> dict[str, Any]:
    """The fields both problems have."""
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
    return {"m": m, "n": n, "k": k, "dtype": _NAMES[x.dtype], "layout": layout}


class RmsNormLinear(NormLinear[RmsNormLinearProblem]):
    """``y = activation(rms_norm(x) @ weight.T + bias)``. Arguments: x, norm_weight, weight, bias, rstd, eps."""

    name = "rms_norm_linear"
    revision = 1
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
            **_posed(y, x, weight, norm_weight),
            norm_weight=_kind(norm_weight, x),
            rstd="computed" if rstd is None else "given",
            bias=_kind(bias, x),
            **options,
        )

    def normalises(self, p: RmsNormLinearProblem) -> bool:
        return True

    def epilogue(self, p: RmsNormLinearProblem) -> GemmProblem:
        return p.product.replace(bias=p.bias, activation=p.activation)

    def parts(self, p: RmsNormLinearProblem) -> list[Part]:
        norm = [_norm(p)] if p.rstd == "computed" else []  # torch's own kernels multiply by what is given
        return [*norm, _product(self.epilogue(p))]

    def chain(self, p: RmsNormLinearProblem) -> Callable[..., None]:
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
        z = _normed(x, norm_weight, rstd, eps) @ weight.double().t()
        if bias is not None:
            z = z + bias.double()
        return (ACTIVATIONS[options["activation"]](z).to(x.dtype),)

    def sample(self, p: RmsNormLinearProblem, device: str, seed: int) -> tuple[Any, ...]:
        x, norm_weight, weight, draw = _sampled(p, device, seed)
        bias = None if p.bias == "none" else draw(p.n).to(x.dtype if p.bias == "same" else torch.float32)
        rstd = None if p.rstd == "computed" else (1 + 0.2 * draw(p.m)).abs()  # not what would be computed
        return x, norm_weight, weight, bias, rstd, 1e-5


class LinearSiluMul(NormLinear[LinearSiluMulProblem]):
    """``silu(h @ w_gate.T) * (h @ w_up.T)``, h = x or its norm. Arguments: x, w_gate_up, norm_weight, eps."""

    name = "linear_silu_mul"
    revision = 1
    suite = (
        "m=1 n=18944 k=3584",
        "m=16 n=18944 k=3584 norm=1 norm_weight=same",
        "m=5 n=1000 k=520 dtype=fp16 norm=1 norm_weight=fp32",
        "m=64 n=512 k=1024 norm=1",
        "m=256 n=512 k=1024",
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
            **_posed(y, x, w_gate_up, norm_weight), norm_weight=_kind(norm_weight, x), **options
        )

    def normalises(self, p: LinearSiluMulProblem) -> bool:
        return p.norm

    def epilogue(self, p: LinearSiluMulProblem) -> GemmProblem:
        return p.product

    def parts(self, p: LinearSiluMulProblem) -> list[Part]:
        align = math.gcd(p.n, WIDEST) * ELEMENT_BYTES
        halves = GluProblem(p.m, p.n, dtype=p.dtype, layout="rows" if p.m > 1 else "dense", align=align)
        return [*([_norm(p)] if p.norm else []), _product(p.product), (SILU_MUL, halves)]

    def chain(self, p: LinearSiluMulProblem) -> Callable[..., None]:
        def launch(y: Tensor, x: Tensor, w_gate_up: Tensor, norm_weight: Tensor | None, eps: float) -> None:
            linear_then_gate(x, w_gate_up, norm_weight, eps, p.norm, out=y)

        return launch

    def kernel_arguments(self, *args: Any) -> tuple[Any, ...]:
        x, w_gate_up, norm_weight, eps = args
        return x, norm_weight, w_gate_up, None, None, eps

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, w_gate_up, norm_weight, eps = args
        h = _normed(x, norm_weight, None, eps) if options["norm"] else x.double()
        gate, up = (h @ w_gate_up.double().t()).chunk(2, -1)
        return ((torch.nn.functional.silu(gate) * up).to(x.dtype),)

    def sample(self, p: LinearSiluMulProblem, device: str, seed: int) -> tuple[Any, ...]:
        x, norm_weight, weight, _ = _sampled(p, device, seed)
        return x, weight, norm_weight, 1e-5


def _normed(x: Tensor, norm_weight: Tensor | None, rstd: Tensor | None, eps: float) -> Tensor:
    """In fp64."""
    u = x.double()
    scale = torch.rsqrt(u.square().mean(-1) + eps) if rstd is None else rstd.double()
    h = u * scale.unsqueeze(-1)
    return h if norm_weight is None else h * norm_weight.double()


def _sampled(
    p: NormLinearProblem, device: str, seed: int
) -> tuple[Tensor, Tensor | None, Tensor, Callable[..., Tensor]]:
    """x, the norm's weight, the linear layer's with outputs near 1, and where more numbers come from."""
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
