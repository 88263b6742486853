"""``quantized_linear``: the declaration. ``out = activation(x @ dequantized(weight)^T + bias)``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.op import Work
from cutekernels.ops.gemm.epilogue import GATED, activate, bias_bytes, draw_bias, kind_of
from cutekernels.ops.gemm.layouts import alignment
from cutekernels.ops.gemm.problem import ELEMENT_BYTES
from cutekernels.ops.quantized.decode import (
    check_weight,
    decode_codes,
    random_weight,
    rows_of_scale,
    scale_of,
    weight_fakes,
)
from cutekernels.ops.quantized.packed_skinny import PACKED_SKINNY
from cutekernels.ops.quantized.packed_warpgroup import PACKED_WARPGROUP
from cutekernels.ops.quantized.problem import QuantizedConfig, QuantizedProblem, since_revision_1
from cutekernels.ops.quantized.schedule import QuantizedSchedule
from cutekernels.ops.shared.checks import check_dtype, check_results
from cutekernels.ops.shared.dtypes import DTYPES, GPU_DTYPES
from cutekernels.ops.shared.tensor_op import TensorOp
from cutekernels.ops.shared.tolerance import rounded_operand_depth

if TYPE_CHECKING:
    from torch import Tensor

    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

SCHEDULES: dict[str, QuantizedSchedule] = {s.name: s for s in (PACKED_SKINNY, PACKED_WARPGROUP)}
Q = TypeVar("Q", bound=Any)
_FEW = 16  # tokens: warp groups are not asked up to here


class PackedProduct(TensorOp[Q, QuantizedConfig]):
    """A product with packed weights: of one, or of experts (``moe/quantized.py``).

    Its problems have ``one``, the product of one weight, which schedules read, and what they read ``beside`` it.
    """

    Config = QuantizedConfig
    results = ("out",)
    in_place = False
    flattens = False
    activations: ClassVar[tuple[str, ...]]
    schedules: ClassVar[Mapping[str, QuantizedSchedule]]

    # -- rules and choice

    def why_not(self, p: Q, c: QuantizedConfig, gpu: GpuSpec) -> str | None:
        return self.schedules[c.body].why_not(p.one, c, gpu, p.beside)

    def valid(self, p: Q, gpu: GpuSpec) -> Iterator[QuantizedConfig]:
        for schedule in self.schedules.values():
            yield from schedule.valid(p.one, gpu, p.beside)

    def candidates(self, p: Q) -> Iterable[QuantizedSchedule]:
        """The schedules that the default is chosen among; of one estimate the first one's config is preferred."""
        return self.schedules.values()

    def default(self, p: Q, gpu: GpuSpec) -> QuantizedConfig:
        """The models' best, which compare."""
        return _default(self, p, gpu)

    def estimate_us(self, p: Q, c: QuantizedConfig, gpu: GpuSpec) -> float:
        if not (p.one.m and p.one.n):
            return 0.0
        return float(self.schedules[c.body].estimate_us(p.one, c, gpu, p.beside))

    # -- kernel

    def build(self, p: Q, c: QuantizedConfig, gpu: GpuSpec) -> Artifact:
        from cutlass import Float32, Int32
        from cutlass.cute import sym_int

        from cutekernels.backends import cute as backend

        dtype = backend.dtype_of(p.dtype)
        m, n, k = sym_int(), sym_int(divisibility=self.divisor(p)), sym_int(divisibility=8)
        return backend.compile(
            self.body(p, c, gpu),
            backend.matrix(dtype, m, n, p.out_align),
            backend.matrix(dtype, m, k, 8),
            *weight_fakes(p),
            *self.tail_fakes(p, dtype, n),
            backend.dense(Float32, None, align=16),
            backend.dense(Int32, None),
            *self.numbers(c),
            gpu=gpu,
        )

    @abstractmethod
    def body(self, p: Q, c: QuantizedConfig, gpu: GpuSpec) -> Any:
        """The kernel body with its parts."""

    @abstractmethod
    def divisor(self, p: Q) -> int:
        """The columns of out divide by it."""

    @abstractmethod
    def tail_fakes(self, p: Q, dtype: Any, n: Any) -> list[Any]:
        """Operands behind the weight's as compilers see them. ``n``: the columns of out."""

    @abstractmethod
    def numbers(self, c: QuantizedConfig) -> list[Any]:
        """A kernel's last arguments."""

    # -- calls

    def takes(self, name: str, t: Tensor) -> bool:
        aligned = t.device.type == "meta" or t.data_ptr() % 16 == 0
        if name in ("x", "out"):
            return t.stride(-1) == 1 and (name == "out" or (aligned and (t.shape[0] <= 1 or t.stride(0) % 8 == 0)))
        return t.is_contiguous() and (aligned or name == "offsets")

    def check_activation(self, activation: str) -> None:
        if activation not in self.activations:
            known = ", ".join(name for name in self.activations if name != "none")
            raise UnsupportedProblem(f"activation must be one of {known}; it is {activation!r}")

    def check_beside(
        self,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        results: Sequence[Tensor],
        of_bias: tuple[int, ...],
        of_out: tuple[int, ...],
    ) -> None:
        """Refuses a bias and results that are not of these shapes or x's type, and operands of other devices."""
        import torch

        if bias is not None and (tuple(bias.shape) != of_bias or bias.dtype not in (x.dtype, torch.float32)):
            raise UnsupportedProblem(
                f"bias must be {of_bias} of x's dtype {x.dtype} or fp32; it is {tuple(bias.shape)} {bias.dtype}"
            )
        for out in results:
            if tuple(out.shape) != of_out or out.dtype != x.dtype:
                raise UnsupportedProblem(f"out must be {of_out} {x.dtype}; it is {tuple(out.shape)} {out.dtype}")
        for name, t in (("packed", packed), ("bias", bias), *(("out", out) for out in results)):
            if t is not None and t.device != x.device:
                raise UnsupportedProblem(f"{name} must be on x's device {x.device}; it is on {t.device}: move it")
        check_results(results)

    def fields(
        self, out: Tensor, x: Tensor, n: int, scales: Tensor, zeros: Tensor | None, bias: Tensor | None
    ) -> dict[str, Any]:
        """Fields of the problem that all have. ``n``: the weight's rows."""
        if x.shape[1] % 8 or not x.shape[1]:
            raise UnsupportedProblem(f"K={x.shape[1]} must be a multiple of 8: pad x with zeros")
        return {
            "k": x.shape[1],
            "dtype": GPU_DTYPES.names[x.dtype],
            "scale_rows": rows_of_scale(scales, n),
            "scale": scale_of(scales),
            "zeros": zeros is not None,
            "bias": kind_of(bias, x),
            "out_align": 8 if alignment(out) == 8 else 1,
        }

    # -- mathematics

    def moved_weights(self, p: Q) -> float:
        """Weights that a launch reads."""
        return 1.0

    def work(self, p: Q) -> Work:
        one, weights = p.one, self.moved_weights(p)
        moved = weights * one.weight_bytes + ELEMENT_BYTES * one.m * (one.k + one.columns)
        # nf4's table and scaled weights are rounded to the activations' type.
        depth = max(float(one.k), rounded_operand_depth(p.dtype, gated=p.gated))
        return Work(2.0 * one.m * one.n * one.k, float(moved + weights * bias_bytes(p.bias, one.n)), depth)


@rates.remember
def _default(op: PackedProduct[Any], p: Any, gpu: GpuSpec) -> QuantizedConfig:
    found = [schedule.best(p.one, gpu, p.beside) for schedule in op.candidates(p)]
    choices = [choice for choice in found if choice is not None]
    if not choices:
        raise AssertionError(f"no config for {p} on {gpu.name}")
    return min(choices, key=lambda choice: choice[0])[1]


class QuantizedLinear(PackedProduct[QuantizedProblem]):
    """Arguments: x ``(M, K)``, then a QuantizedWeight's packed, scales, zeros or None, then bias or None."""

    name = "quantized_linear"
    revision = 2
    earlier = {1: since_revision_1}
    Problem = QuantizedProblem
    activations = (*ACTIVATIONS, GATED)
    schedules = SCHEDULES
    suite = (
        "m=1 n=3584 k=3584",
        "m=16 n=3072 k=8192 code=e4m3 group=0 scale=fp32",
        "m=8 n=2048 k=2048 code=e4m3 scale_rows=128 scale=fp32 bias=same",
        "m=64 n=4096 k=4096 zeros=1",
        "m=200 n=3584 k=3584 code=int8 group=0 scale=bf16 activation=silu",
        "m=1024 n=4096 k=4096",
        "m=4 n=7168 k=3584 activation=silu_mul",
        "m=33 n=1000 k=1096 group=32 zeros=1 dtype=fp16 scale=bf16 bias=fp32",
        "m=5 n=129 k=200 group=64 code=nf4 scale=fp32 out_align=1",
        "m=300 n=1160 k=520 group=64 scale=bf16 activation=relu",
        "m=16 n=2880 k=2880 code=e2m1 group=32 scale=e8m0 bias=same",
    )
    inputs = ("x", "packed", "scales", "zeros", "bias")
    options = ("code", "group", "n", "activation")
    schema = (
        "Tensor x, Tensor packed, Tensor scales, Tensor? zeros, Tensor? bias, "
        "str code, int group, int n, str activation"
    )

    # -- kernel

    def body(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> Any:
        return SCHEDULES[c.body].body(p, c, gpu)

    def divisor(self, p: QuantizedProblem) -> int:
        return p.out_align

    def tail_fakes(self, p: QuantizedProblem, dtype: Any, n: Any) -> list[Any]:
        from cutekernels.backends import cute as backend

        return [backend.bias(p.bias, dtype, n)]

    def numbers(self, c: QuantizedConfig) -> list[Any]:
        from cutlass import Int32

        return [Int32(1)] * (2 if c.body == PACKED_SKINNY.name else 3)

    def candidates(self, p: QuantizedProblem) -> Iterable[QuantizedSchedule]:
        return [PACKED_SKINNY, PACKED_WARPGROUP][: 1 + (p.m > _FEW)]

    def bind(self, p: QuantizedProblem, c: QuantizedConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        from cutekernels.gpu import detect
        from cutekernels.ops.shared.per_stream import StreamWorkspace

        numbers = SCHEDULES[c.body].grid(p, c, detect())
        count, shared = SCHEDULES[c.body].tiles(p, c), c.tile_m * c.tile_n if c.stream_k else 0
        groups = SCHEDULES[c.body].groups(c)
        workspace = StreamWorkspace(max(4, 2 * numbers[0] * shared), max(4, count * groups * c.stream_k)).get

        def launch(*operands: Any) -> None:
            kernel(*operands, *workspace(), *numbers)

        return launch

    # -- calls

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        x, packed, scales, zeros, bias = inputs
        assert x is not None and packed is not None and scales is not None
        check_dtype(self, x)
        self.check_activation(options["activation"])
        if x.dim() != 2:
            raise UnsupportedProblem(f"x must be (M, K); its shape is {tuple(x.shape)}")
        n = options["n"]
        columns = columns_of(n, options["activation"])
        check_weight(packed, scales, zeros, options["code"], options["group"], n, x.shape[1])
        self.check_beside(x, packed, bias, results, (n,), (x.shape[0], columns))

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        x = inputs[0]
        assert x is not None
        return (x.new_empty((x.shape[0], columns_of(options["n"], options["activation"]))),)

    def problem(self, *operands: Tensor | None, **options: Any) -> QuantizedProblem:
        out, x, _, scales, zeros, bias = operands
        assert out is not None and x is not None and scales is not None
        return QuantizedProblem(x.shape[0], **options, **self.fields(out, x, options["n"], scales, zeros, bias))

    # -- mathematics

    def outputs(self, p: QuantizedProblem, *args: Any) -> tuple[Tensor, ...]:
        x = args[0]
        if p.out_align == 8:
            return (x.new_empty((p.m, p.columns)),)
        return (x.new_empty((p.m, -(-p.columns // 8) * 8 + 1))[:, : p.columns],)

    def sample(self, p: QuantizedProblem, device: str, seed: int) -> tuple[Any, ...]:
        import torch

        packed, scales, zeros = random_weight(p, device, seed)
        draw = torch.Generator(device=device).manual_seed(seed + 1)
        x = torch.randn((p.m, p.k), generator=draw, device=device).to(DTYPES[p.dtype])
        return x, packed, scales, zeros, draw_bias(p, draw, p.n)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, packed, scales, zeros, bias = args
        weight = decode_codes(packed, scales, zeros, options["code"], options["group"], options["n"], x.shape[1])
        y = x.double() @ weight.double().t()
        if bias is not None:
            y = y + bias.double()
        return (activate(y, options["activation"]).to(x.dtype),)


QUANTIZED_LINEAR = QuantizedLinear()


def columns_of(n: int, activation: str) -> int:
    """Columns of out, of a weight of ``n`` rows."""
    if activation != GATED:
        return n
    if n % 2:
        raise UnsupportedProblem(f"activation={GATED} takes the gate's rows and as many of up's; there are {n}")
    return n // 2
