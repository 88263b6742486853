"""``quantized_linear``: the declaration. ``out = activation(x @ dequantized(weight)^T + bias)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS, activated
from cutekernels.op import Work
from cutekernels.ops.gemm.layouts import alignment
from cutekernels.ops.gemm.problem import ELEMENT_BYTES
from cutekernels.ops.quantized.decode import check_weight, random_weight, rows_of_scale, scale_of
from cutekernels.ops.quantized.packed_skinny import PACKED_SKINNY
from cutekernels.ops.quantized.packed_warpgroup import PACKED_WARPGROUP
from cutekernels.ops.quantized.problem import GATED, QuantizedConfig, QuantizedProblem, since_revision_1
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
_FEW = 16  # tokens: warp groups are not asked up to here


class QuantizedLinear(TensorOp[QuantizedProblem, QuantizedConfig]):
    """Arguments: x ``(M, K)``, then a QuantizedWeight's packed, scales, zeros or None, then bias or None."""

    name = "quantized_linear"
    revision = 2
    earlier = {1: since_revision_1}
    Problem = QuantizedProblem
    Config = QuantizedConfig
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
    results = ("out",)
    inputs = ("x", "packed", "scales", "zeros", "bias")
    options = ("code", "group", "n", "activation")
    schema = (
        "Tensor x, Tensor packed, Tensor scales, Tensor? zeros, Tensor? bias, "
        "str code, int group, int n, str activation"
    )
    in_place = False
    flattens = False

    # -- rules and choice

    def why_not(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> str | None:
        return SCHEDULES[c.body].why_not(p, c, gpu, None)

    def valid(self, p: QuantizedProblem, gpu: GpuSpec) -> Iterator[QuantizedConfig]:
        for schedule in SCHEDULES.values():
            yield from schedule.valid(p, gpu, None)

    def default(self, p: QuantizedProblem, gpu: GpuSpec) -> QuantizedConfig:
        """The models' best."""
        return _default(p, gpu)

    def estimate_us(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> float:
        return float(SCHEDULES[c.body].estimate_us(p, c, gpu, None)) if p.m and p.n else 0.0

    # -- kernel

    def build(self, p: QuantizedProblem, c: QuantizedConfig, gpu: GpuSpec) -> Artifact:
        import cutlass
        from cutlass.cute.runtime import make_fake_tensor

        from cutekernels.backends import cute as backend
        from cutekernels.quant import layout

        sym = cutlass.cute.sym_int
        dtype, scale = backend.dtype_of(p.dtype), backend.scale_of(p.scale)
        m, n, k = sym(), sym(divisibility=p.out_align), sym(divisibility=8)

        def matrix(rows: Any, columns: Any, align: int) -> Any:
            stride = (sym(divisibility=align), 1)
            return make_fake_tensor(dtype, (rows, columns), stride=stride, assumed_align=align * ELEMENT_BYTES)

        def dense(kind: Any, *shape: Any) -> Any:
            """A contiguous tensor."""
            strides: list[Any] = [1]
            for _ in shape[1:]:
                strides.insert(0, sym())
            return make_fake_tensor(kind, shape, stride=tuple(strides), assumed_align=16)

        bias = None
        if p.bias != "none":
            kind = cutlass.Float32 if p.bias == "fp32" else dtype
            bias = make_fake_tensor(kind, (n,), stride=(1,), assumed_align=kind.width // 8)
        numbers = [cutlass.Int32(1)] * (2 if c.body == PACKED_SKINNY.name else 3)
        return backend.compile(
            SCHEDULES[c.body].body(p, c, gpu),
            matrix(m, n, p.out_align),
            matrix(m, k, 8),
            dense(cutlass.Uint8, sym(), sym(), layout.TILE_BYTES[p.bits]),
            dense(scale, sym(), sym()),
            dense(cutlass.Uint8, sym(), sym()) if p.zeros else None,
            bias,
            dense(cutlass.Float32, sym()),
            make_fake_tensor(cutlass.Int32, (sym(),), stride=(1,), assumed_align=4),
            *numbers,
            gpu=gpu,
        )

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

    def takes(self, name: str, t: Tensor) -> bool:
        if name in ("x", "out"):
            return t.stride(-1) == 1 and (name == "out" or _rows_aligned(t))
        return t.is_contiguous() and t.data_ptr() % 16 == 0 if t.device.type != "meta" else True

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        import torch

        x, packed, scales, zeros, bias = inputs
        assert x is not None and packed is not None and scales is not None
        check_dtype(self, x)
        if options["activation"] not in (*ACTIVATIONS, GATED):
            known = ", ".join(name for name in (*ACTIVATIONS, GATED) if name != "none")
            raise UnsupportedProblem(f"activation must be one of {known}; it is {options['activation']!r}")
        if x.dim() != 2:
            raise UnsupportedProblem(f"x must be (M, K); its shape is {tuple(x.shape)}")
        n = options["n"]
        columns = columns_of(n, options["activation"])
        check_weight(packed, scales, zeros, options["code"], options["group"], n, x.shape[1])
        if bias is not None and (tuple(bias.shape) != (n,) or bias.dtype not in (x.dtype, torch.float32)):
            raise UnsupportedProblem(
                f"bias must be ({n},) of x's dtype {x.dtype} or fp32; it is {tuple(bias.shape)} {bias.dtype}"
            )
        for out in results:
            if tuple(out.shape) != (x.shape[0], columns) or out.dtype != x.dtype:
                raise UnsupportedProblem(
                    f"out must be {(x.shape[0], columns)} {x.dtype}; it is {tuple(out.shape)} {out.dtype}"
                )
        for name, t in (("packed", packed), ("bias", bias), *(("out", out) for out in results)):
            if t is not None and t.device != x.device:
                raise UnsupportedProblem(f"{name} must be on x's device {x.device}; it is on {t.device}: move it")
        check_results(results)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        x = inputs[0]
        assert x is not None
        return (x.new_empty((x.shape[0], columns_of(options["n"], options["activation"]))),)

    def problem(self, *operands: Tensor | None, **options: Any) -> QuantizedProblem:
        import torch

        out, x, _, scales, zeros, bias = operands
        assert out is not None and x is not None and scales is not None
        n, code, group = options["n"], options["code"], options["group"]
        if x.shape[1] % 8 or not x.shape[1]:
            raise UnsupportedProblem(f"K={x.shape[1]} must be a multiple of 8: pad x with zeros")
        return QuantizedProblem(
            m=x.shape[0],
            n=n,
            k=x.shape[1],
            dtype=GPU_DTYPES.names[x.dtype],
            code=code,
            group=group,
            scale_rows=rows_of_scale(scales, n),
            scale=scale_of(scales),
            zeros=zeros is not None,
            bias="none" if bias is None else "fp32" if bias.dtype == torch.float32 else "same",
            activation=options["activation"],
            out_align=8 if alignment(out) == 8 else 1,
        )

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
        bias = None
        if p.bias != "none":
            bias = torch.randn(p.n, generator=draw, device=device)
            bias = bias if p.bias == "fp32" else bias.to(DTYPES[p.dtype])
        return x, packed, scales, zeros, bias

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        from cutekernels.quant.weight import QuantizedWeight

        x, packed, scales, zeros, bias = args
        weight = QuantizedWeight(
            code=options["code"],
            group=options["group"],
            scale_rows=rows_of_scale(scales, options["n"]),
            shape=(options["n"], x.shape[1]),
            packed=packed,
            scales=scales,
            zeros=zeros,
        )
        y = x.double() @ weight.dequantize(torch.float32).double().t()
        if bias is not None:
            y = y + bias.double()
        if options["activation"] == GATED:
            gate, up = y.chunk(2, dim=-1)
            return ((torch.nn.functional.silu(gate) * up).to(x.dtype),)
        return (activated(y, options["activation"]).to(x.dtype),)

    def work(self, p: QuantizedProblem) -> Work:
        bias = 0 if p.bias == "none" else p.n * (4 if p.bias == "fp32" else ELEMENT_BYTES)
        moved = p.weight_bytes + ELEMENT_BYTES * p.m * (p.k + p.columns) + bias
        # nf4's table and scaled weights are rounded to the activations' type.
        depth = max(float(p.k), rounded_operand_depth(p.dtype, gated=p.gated))
        return Work(2.0 * p.m * p.n * p.k, float(moved), depth)


QUANTIZED_LINEAR = QuantizedLinear()


def columns_of(n: int, activation: str) -> int:
    """Columns of out, of a weight of ``n`` rows."""
    if activation != GATED:
        return n
    if n % 2:
        raise UnsupportedProblem(f"activation={GATED} takes the gate's rows and as many of up's; there are {n}")
    return n // 2


def _rows_aligned(x: Tensor) -> bool:
    """Whether rows of ``x`` begin where 16 bytes do."""
    meta = x.device.type == "meta"
    return (x.shape[0] <= 1 or x.stride(0) % 8 == 0) and (meta or x.data_ptr() % 16 == 0)


@rates.remember
def _default(p: QuantizedProblem, gpu: GpuSpec) -> QuantizedConfig:
    """Both bodies' models compare; of one estimate skinny's config is preferred."""
    found = [PACKED_SKINNY.best(p, gpu, None), PACKED_WARPGROUP.best(p, gpu, None) if p.m > _FEW else None]
    choices = [choice for choice in found if choice is not None]
    if not choices:
        raise AssertionError(f"no config for {p} on {gpu.name}")
    return min(choices, key=lambda choice: choice[0])[1]
