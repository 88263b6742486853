"""GEMM: the declaration. ``out = activation(alpha * a @ b + beta * c + bias)``; public functions in ``api.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import activated
from cutekernels.op import Work
from cutekernels.ops.products.epilogue import bias_bytes
from cutekernels.ops.products.schedules import skinny_warpgroup
from cutekernels.ops.products.schedules.multistage import MULTISTAGE
from cutekernels.ops.products.schedules.problem import (
    ELEMENT_BYTES,
    MOST_TOKENS,
    VENDOR,
    GemmConfig,
    GemmProblem,
    since_revision_1,
)
from cutekernels.ops.products.schedules.schedule import DenseSchedule, Extras, Product, extras_of
from cutekernels.ops.products.schedules.skinny import SKINNY
from cutekernels.ops.products.schedules.skinny_warpgroup import SKINNY_WARPGROUP
from cutekernels.ops.products.schedules.warpgroup import WARPGROUP
from cutekernels.ops.shared.cute_op import CuteOp
from cutekernels.ops.shared.operands import Array, Leads, Looks, Named, Sizes, Vector
from cutekernels.ops.shared.strides import span_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec
    from cutekernels.ops.shared.paths import Fire

SCHEDULES: dict[str, DenseSchedule] = {
    schedule.name: schedule for schedule in (MULTISTAGE, SKINNY, SKINNY_WARPGROUP, WARPGROUP)
}


class Gemm(Product[GemmProblem, GemmConfig], CuteOp[GemmProblem, GemmConfig]):
    """One of a and b may have the batch alone; c, which is read where ``beta`` is not 0, is as the result."""

    name = "gemm"
    revision = 2
    earlier = {1: since_revision_1}
    Problem = GemmProblem
    Config = GemmConfig
    schedules = SCHEDULES
    suite = (
        "m=512 n=512 k=512",
        "m=4096 n=4096 k=4096",
        "m=4096 n=4096 k=4096 dtype=fp16 accumulate=fp16",
        "m=1024 n=1024 k=1024 b_major=k c=n bias=fp32 activation=gelu",
        "m=2048 n=4608 k=3584 b_major=k bias=same",
        "m=256 n=4096 k=14336 b_major=k activation=silu",
        "m=16 n=4096 k=4096 b_major=k",
        "m=1 n=4096 k=4096 b_major=k",
        "m=384 n=512 k=320 a_major=m b_major=n out_major=m c=m activation=relu dtype=fp16",
        "m=384 n=512 k=320 a_major=m b_major=k c=n activation=gelu_tanh",
        "m=100 n=300 k=500 a_align=4 b_align=4 out_align=4",
        "m=77 n=129 k=131 a_align=1 b_align=1 out_align=1 c=n c_align=1 bias=same dtype=fp16",
        "m=130 n=200 k=64 batch=7 batched=1",
    )

    in_place_pairs = frozenset((("out", "c"),))
    out = Array("batch?", "m", "n", result=True, align="out_align", major="out_major")
    a = Array("batch?", "m", "k", align="a_align", major="a_major")
    b = Array("batch?", "k", "n", align="b_align", major="b_major")
    c = Array("batch?", "m", "n", optional=True, align="c_align", major="c")
    bias = Vector("n", dtype="bias", strides=(), optional=True)
    options = ("activation", "accumulate")
    scalar_types = {"alpha": "fp32", "beta": "fp32"}

    # -- rules

    def for_schedules(self, p: GemmProblem) -> tuple[GemmProblem, Extras]:
        return p, extras_of(p)

    def why_not(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> str | None:
        if not c.vendors:
            return super().why_not(p, c, gpu)
        if gpu.confined_to is not None:
            return f"cuBLAS would not keep to what {gpu.name} has"
        asked = f"activation={p.activation} bias={p.bias} c={p.c} accumulate={p.accumulate}"
        return next(c.foreign(), None) or (None if self.vendor(p) else f"no one call of torch's has {asked}")

    def valid(self, p: GemmProblem, gpu: GpuSpec) -> Iterator[GemmConfig]:
        yield from super().valid(p, gpu)
        yield from (c for c in GemmConfig.span(VENDOR) if self.why_not(p, c, gpu) is None)

    # -- choice

    @rates.remember
    def default(self, p: GemmProblem, gpu: GpuSpec) -> GemmConfig:
        """The best of the bodies by their models; but where skinny_warpgroup takes ``p``, skinny for the fewest tokens,
        that one up to MOST_TOKENS, and then the better of it and warpgroup.
        """
        x = extras_of(p)
        bodies: tuple[DenseSchedule, ...] = (SKINNY, MULTISTAGE, WARPGROUP)
        if SKINNY_WARPGROUP.refusal(p, gpu, x) is None:
            if p.m < skinny_warpgroup.least_tokens(p, gpu) and (few := SKINNY.best(p, gpu, x)):
                return few[1]
            bodies = (SKINNY_WARPGROUP, WARPGROUP) if p.m > MOST_TOKENS else (SKINNY_WARPGROUP,)
        for among in (bodies, (MULTISTAGE,)):
            if found := [best for body in among if (best := body.best(p, gpu, x))]:
                return min(found, key=lambda best: best[0])[1]
        raise AssertionError(f"no config for {p} on {gpu.name}")

    def estimate_us(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> float:
        if c.vendors:  # no model of cuBLAS is needed: only its measured time counts
            return self.estimate_us(p, self.default(p, gpu), gpu)
        return super().estimate_us(p, c, gpu)  # type: ignore[no-any-return]

    # -- kernel

    def build(self, p: GemmProblem, c: GemmConfig, gpu: GpuSpec) -> Artifact:
        if c.vendors:
            from cutekernels.backends.chained import Chained

            return Chained()
        if p.addressed and not SCHEDULES[c.body].shares_tiles(c):
            return self._build_addressed(p, self.body(p, c, gpu), gpu)
        return super().build(p, c, gpu)

    def divisors(self, p: GemmProblem, c: GemmConfig) -> dict[str, int]:
        return {name: p.divisibility(name) for name in "mnk"}

    def missing(self, p: GemmProblem) -> tuple[str, ...]:
        return () if p.batched else ("batch",)

    def _build_addressed(self, p: GemmProblem, body: Any, gpu: GpuSpec) -> Artifact:
        from cutlass import Float32, Int32
        from cutlass.cute import AddressSpace
        from cutlass.cute.runtime import make_ptr

        from cutekernels.backends import cute as backend
        from cutekernels.kernels.cute.addressed import Addressed, Operand

        dtype, aligns = backend.type_of(p.dtype), (p.out_align, p.a_align, p.b_align)
        out, a, b = (Operand(along, align) for along, align in zip(p.along, aligns, strict=True))
        m, n, k = (p.divisibility(name) for name in "mnk")

        def address(kind: Any, align: int) -> Any:
            return make_ptr(kind, 16, AddressSpace.gmem, assumed_align=align)

        bias = Float32 if p.bias == "fp32" else dtype
        return backend.compile(
            Addressed(body, out, a, b, (m, n, k)),
            *[address(dtype, o.align * ELEMENT_BYTES) for o in (out, a, b)],
            None if p.bias == "none" else address(bias, bias.width // 8),
            *[Int32(1) for _ in range(6)],
            Float32(1.0),
            Float32(0.0),
            gpu=gpu,
            names_stream=True,
        )

    def bind(self, p: GemmProblem, c: GemmConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        if 0 in (p.m, p.n, p.batch):
            return nothing
        if c.vendors:
            return _vendor
        schedule = SCHEDULES[c.body]
        if not schedule.shares_tiles(c):  # a kernel's arguments are out, a, b, c, bias, alpha, beta already
            if not p.addressed:
                return kernel
            return AddressedLaunch(kernel, p.along)
        workspace = schedule.workspace(p, c)

        def launch(*args: Any) -> None:
            kernel(*args, *workspace())

        return launch

    # -- from tensors to problems, and back

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        import torch

        a, b, c = (named[name] for name in "abc")
        assert a is not None and b is not None
        if c is not None and c.dim() != max(a.dim(), b.dim()):
            raise UnsupportedProblem(f"c must have the result's batch; its shape is {tuple(c.shape)}")
        if options["accumulate"] == "fp16" and a.dtype != torch.float16:
            raise UnsupportedProblem(f"accumulate='fp16' is for fp16 operands; they are {a.dtype}")

    def result(self, name: str, named: Named, sizes: Sizes, leads: Leads, **options: Any) -> Looks:
        batch = (sizes["batch"],) if "batch" in sizes else ()
        return (*batch, sizes["m"], sizes["n"]), (self._dtype(named, options),)

    def facts(self, named: Named, sizes: Sizes) -> dict[str, Any]:
        spans = [span_bytes(t) for name, t in named.items() if t is not None and name != "bias"]
        return {"batched": "batch" in sizes, "wide": max(spans) >= ELEMENT_BYTES * 2**31}

    def draw_scalars(self, p: GemmProblem, generator: torch.Generator) -> tuple[float, float]:
        """A scale that keeps results near 1, where an activation is neither linear nor saturated."""
        return (1.0 / max(1, p.k)) ** 0.5, 0.0 if p.c == "none" else 0.5

    # -- mathematics

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """In fp64: fp32 would leave an error of its own."""
        a, b, c, bias, alpha, beta = args
        x = a.double() @ b.double()
        if alpha != 1.0:
            x = alpha * x
        if c is not None and beta != 0.0:
            x = x + beta * c.double()
        if bias is not None:
            x = x + bias.double()
        return (activated(x, options["activation"]).to(a.dtype),)

    def work(self, p: GemmProblem) -> Work:
        outputs = p.batch * p.m * p.n
        moved = p.batch * (p.m * p.k + p.k * p.n) + outputs * (1 if p.c == "none" else 2)
        moved_bytes = moved * ELEMENT_BYTES + bias_bytes(p.bias, p.n)
        return Work(flops=2.0 * outputs * p.k, bytes=float(moved_bytes))

    def vendor(self, p: GemmProblem) -> Callable[..., object] | None:
        """cuBLAS through torch, where one call of it does all that ``p`` asks."""
        two_addends = p.bias != "none" and p.c != "none"
        if p.activation != "none" or p.accumulate != "fp32" or p.bias == "fp32" or two_addends:
            return None
        return _vendor


GEMM = Gemm()


def _vendor(
    out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, bias: Tensor | None, alpha: float, beta: float
) -> None:
    import torch

    multiply = torch.baddbmm if out.dim() == 3 else torch.addmm
    with torch.no_grad():
        if bias is not None:
            multiply(bias, a, b, alpha=alpha, out=out)
        else:  # with beta=0 the first operand is not read
            multiply(out if c is None else c, a, b, alpha=alpha, beta=0.0 if c is None else beta, out=out)


class AddressedLaunch:
    """``launch(out, a, b, c, bias, alpha, beta)`` over ``kernel(out, a, b, bias, *numbers, alpha, beta, stream)``.

    The kernel takes addresses, None where there is no bias, and the current stream's handle.
    """

    __slots__ = ("_along", "_current_stream", "kernel")

    def __init__(self, kernel: Callable[..., Any], along: tuple[int, int, int]) -> None:
        from cutekernels import torch_names

        self.kernel = kernel
        self._along, self._current_stream = along, torch_names.current_stream

    def numbers(self, out: Tensor, a: Tensor, b: Tensor) -> tuple[int, ...]:
        """m, n, k and the pitches of out, a and b, which follow from shapes and strides."""
        pitches = [
            t.stride(1 - along) if t.shape[1 - along] > 1 else 0  # the stride of a lone row may be anything
            for t, along in zip((out, a, b), self._along, strict=True)
        ]
        return (*out.shape, a.shape[1], *pitches)

    def settle(self, out: Tensor, a: Tensor, b: Tensor, biased: bool) -> Fire:
        """The launch by addresses, for operands that lie as these do: of out, a and b, or of these, C and a bias."""
        kernel, device, current_stream = self.kernel, out.get_device(), self._current_stream
        m, n, k, pitch_out, pitch_a, pitch_b = self.numbers(out, a, b)

        def fire_biased(addresses: list[int], scalars: tuple[Any, ...]) -> None:
            at, at_a, at_b, _, at_bias = addresses
            alpha, beta = scalars
            stream = current_stream(device)
            kernel(at, at_a, at_b, at_bias, m, n, k, pitch_out, pitch_a, pitch_b, alpha, beta, stream)

        def fire(addresses: list[int], scalars: tuple[Any, ...]) -> None:
            at, at_a, at_b = addresses
            alpha, beta = scalars
            kernel(at, at_a, at_b, None, m, n, k, pitch_out, pitch_a, pitch_b, alpha, beta, current_stream(device))

        return fire_biased if biased else fire

    def __call__(
        self, out: Tensor, a: Tensor, b: Tensor, c: None, bias: Tensor | None, alpha: float, beta: float
    ) -> None:
        stream = self._current_stream(out.get_device())
        addresses = [None if t is None else t.data_ptr() for t in (out, a, b, bias)]
        self.kernel(*addresses, *self.numbers(out, a, b), alpha, beta, stream)


def nothing(*args: Any) -> None:
    """The launch of an empty problem."""


OPS = (GEMM,)
