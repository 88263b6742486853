"""``quantized_linear``: the declaration. ``out = activation(x @ dequantized(weight)^T + bias)``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Work
from cutekernels.ops.gemm.epilogue import GATED, activate, bias_bytes
from cutekernels.ops.gemm.problem import ELEMENT_BYTES
from cutekernels.ops.quantized.decode import (
    check_scales,
    decode_codes,
    draw_packed,
    rows_of_scale,
    steps,
    weight_operands,
)
from cutekernels.ops.quantized.packed_skinny import PACKED_SKINNY
from cutekernels.ops.quantized.packed_warpgroup import PACKED_WARPGROUP
from cutekernels.ops.quantized.problem import QuantizedConfig, QuantizedProblem, since_revision_1
from cutekernels.ops.quantized.schedule import QuantizedSchedule
from cutekernels.ops.shared.cute_op import CuteOp
from cutekernels.ops.shared.operands import Matrix, Named, Sizes, Vector
from cutekernels.ops.shared.tolerance import rounded_operand_depth

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

SCHEDULES: dict[str, QuantizedSchedule] = {s.name: s for s in (PACKED_SKINNY, PACKED_WARPGROUP)}


class PackedProduct:
    """Rules, choice and checks of products with packed weights: of one, or of experts (``moe/quantized.py``).

    Their problems have ``one``, the product of one weight, which schedules read, and what they read ``beside`` it.
    """

    Config = QuantizedConfig
    in_place: ClassVar[bool] = False
    beyond: ClassVar[tuple[str, ...]] = ("group",)
    fixed: ClassVar[tuple[str, ...]] = ("tile_bytes",)
    schedules: ClassVar[Mapping[str, QuantizedSchedule]]

    # -- rules and choice

    def why_not(self, p: Any, c: QuantizedConfig, gpu: GpuSpec) -> str | None:
        return self.schedules[c.body].why_not(p.one, c, gpu, p.beside)

    def valid(self, p: Any, gpu: GpuSpec) -> Iterator[QuantizedConfig]:
        for schedule in self.schedules.values():
            yield from schedule.valid(p.one, gpu, p.beside)

    def candidates(self, p: Any) -> Iterable[QuantizedSchedule]:
        """The schedules that the default is chosen among; of one estimate the first one's config is preferred."""
        return self.schedules.values()

    def default(self, p: Any, gpu: GpuSpec) -> QuantizedConfig:
        """The models' best, which compare."""
        return _default(self, p, gpu)

    def estimate_us(self, p: Any, c: QuantizedConfig, gpu: GpuSpec) -> float:
        if not (p.one.m and p.one.n):
            return 0.0
        return float(self.schedules[c.body].estimate_us(p.one, c, gpu, p.beside))

    # -- kernel

    def further(self, p: Any, c: QuantizedConfig) -> list[Any]:
        from cutlass import Float32, Int32

        from cutekernels.backends import cute as backend

        return [backend.dense(Float32, None, align=16), backend.dense(Int32, None), *self.numbers(c)]

    @abstractmethod
    def numbers(self, c: QuantizedConfig) -> list[Any]:
        """A kernel's last arguments."""

    # -- calls

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        check_scales(named, options)

    def facts(self, named: Named, sizes: Sizes) -> dict[str, Any]:
        if sizes["k"] % 8 or not sizes["k"]:
            raise UnsupportedProblem(f"K={sizes['k']} must be a multiple of 8: pad x with zeros")
        return {"scale_rows": rows_of_scale(named["scales"], sizes.get("total", sizes["n"]))}

    # -- mathematics

    def draw(self, p: Any, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        return draw_packed(p, name, shape, generator)

    def moved_weights(self, p: Any) -> float:
        """Weights that a launch reads."""
        return 1.0

    def work(self, p: Any) -> Work:
        one, weights = p.one, self.moved_weights(p)
        moved = weights * one.weight_bytes + ELEMENT_BYTES * one.m * (one.k + one.columns)
        # nf4's table and scaled weights are rounded to the activations' type.
        depth = max(float(one.k), rounded_operand_depth(p.dtype, gated=p.gated))
        return Work(2.0 * one.m * one.n * one.k, float(moved + weights * bias_bytes(p.bias, one.n)), depth)


@rates.remember
def _default(op: PackedProduct, p: Any, gpu: GpuSpec) -> QuantizedConfig:
    found = [schedule.best(p.one, gpu, p.beside) for schedule in op.candidates(p)]
    choices = [choice for choice in found if choice is not None]
    if not choices:
        raise AssertionError(f"no config for {p} on {gpu.name}")
    return min(choices, key=lambda choice: choice[0])[1]


class QuantizedLinear(PackedProduct, CuteOp[QuantizedProblem, QuantizedConfig]):
    """x and a QuantizedWeight's tensors, with a bias; ``columns`` are half of ``n`` where gated."""

    name = "quantized_linear"
    revision = 2
    earlier = {1: since_revision_1}
    Problem = QuantizedProblem
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
        "m=16 n=4096 k=4096 code=e2m1 group=16 scale=ue5m3 factors=1",
    )
    out = Matrix("m", "columns", result=True, align="out_align")
    x = Matrix("m", "k", align=16)
    packed, scales, zeros, factors = weight_operands("n", "n/64")
    bias = Vector("columns", dtype="bias", strides=(), optional=True)
    options = ("code", "group", "n", "activation")

    # -- kernel

    def body(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> Any:
        return SCHEDULES[c.body].body(p, c, gpu)

    def divisors(self, p: QuantizedProblem, c: QuantizedConfig) -> dict[str, int]:
        return {"columns": p.out_align, "k": 8}

    def numbers(self, c: QuantizedConfig) -> list[Any]:
        from cutlass import Int32

        return [Int32(1)] * (2 if c.body == PACKED_SKINNY.name else 3)

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

    def derive(self, sizes: Sizes, **options: Any) -> None:
        rows = sizes["n"]
        gated = options["activation"] == GATED
        if gated and rows % 2:
            raise ValueError(f"activation={GATED} takes the gate's rows and as many of up's; there are {rows}")
        sizes |= {"columns": rows // (1 + gated), **steps(options)}

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        super().refuse(named, sizes, **options)
        if options["activation"] == GATED and named["bias"] is not None:
            raise UnsupportedProblem(f"activation={GATED} takes no bias: add it to a product without an activation")

    # -- mathematics

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, *packed, bias = args
        weight = decode_codes(packed, options["code"], options["group"], options["n"], x.shape[1])
        y = x.double() @ weight.double().t()
        if bias is not None:
            y = y + bias.double()
        return (activate(y, options["activation"]).to(x.dtype),)


QUANTIZED_LINEAR = QuantizedLinear()
