"""``quantized_grouped_gemm``: the declaration. ``grouped_gemm`` with packed experts, for few tokens an expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cutekernels import rates
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS, activated
from cutekernels.op import Work
from cutekernels.ops.gemm.layouts import alignment
from cutekernels.ops.gemm.problem import ELEMENT_BYTES
from cutekernels.ops.moe.grouped import (
    GATED,
    SPREADS,
    check_offsets,
    groups_of,
    sample_offsets,
    sampled_experts,
)
from cutekernels.ops.moe.packed_experts import (
    CLAMPED,
    GATES,
    SCHEDULES,
    QuantizedGroupedProblem,
)
from cutekernels.ops.quantized.decode import check_weight, random_weight, rows_of_scale, scale_of
from cutekernels.ops.quantized.problem import QuantizedConfig
from cutekernels.ops.shared.checks import check_dtype, check_results
from cutekernels.ops.shared.dtypes import DTYPES, GPU_DTYPES
from cutekernels.ops.shared.tensor_op import TensorOp
from cutekernels.ops.shared.tolerance import rounded_operand_depth

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss


class QuantizedGroupedGemm(TensorOp[QuantizedGroupedProblem, QuantizedConfig]):
    """Arguments: x ``(T, K)``, packed, scales and zeros or None of all experts' rows, offsets ``(E + 1,)``, bias
    ``(E, N)`` or None, then alpha and limit of ``swiglu_oai``.
    """

    name = "quantized_grouped_gemm"
    revision = 1
    Problem = QuantizedGroupedProblem
    Config = QuantizedConfig
    sample_kinds = len(SPREADS)
    suite = (
        "rows=4 n=2880 k=2880 experts=32 code=e2m1 group=32 scale=e8m0 activation=swiglu_oai bias=same",
        "rows=64 n=2880 k=2880 experts=32 code=e2m1 group=32 scale=e8m0 bias=same",
        "rows=1024 n=2880 k=2880 experts=32 code=e2m1 group=32 scale=e8m0 activation=swiglu_oai bias=same",
        "rows=8 n=768 k=2048 experts=128 activation=silu_mul",
        "rows=128 n=2048 k=768 experts=128",
        "rows=512 n=768 k=2048 experts=128 zeros=1 activation=silu_mul",
        "rows=32 n=14336 k=4096 experts=8 activation=silu_mul",
        "rows=128 n=2048 k=768 experts=128 code=e4m3 scale_rows=128 scale=fp32",
        "rows=77 n=192 k=200 experts=5 code=e4m3 group=0 scale=fp32 dtype=fp16 bias=fp32 activation=gelu",
        "rows=300 n=64 k=136 experts=40 group=32 zeros=1 scale=bf16 activation=silu_mul bias=same",
    )
    results = ("out",)
    inputs = ("x", "packed", "scales", "zeros", "offsets", "bias")
    options = ("code", "group", "activation")
    scalars = ("alpha", "limit")
    schema = (
        "Tensor x, Tensor packed, Tensor scales, Tensor? zeros, Tensor offsets, Tensor? bias, "
        "str code, int group, str activation, float alpha, float limit"
    )
    in_place = False
    flattens = False

    # -- rules and choice

    def why_not(self, p: QuantizedGroupedProblem, c: QuantizedConfig, gpu: GpuSpec) -> str | None:
        if c.body not in SCHEDULES:
            return f"{self.name} has the body {' or '.join(SCHEDULES)}; got body={c.body}"
        return SCHEDULES[c.body].why_not(p.one, c, gpu, p.beside)

    def valid(self, p: QuantizedGroupedProblem, gpu: GpuSpec) -> Iterator[QuantizedConfig]:
        for schedule in SCHEDULES.values():
            yield from schedule.valid(p.one, gpu, p.beside)

    def default(self, p: QuantizedGroupedProblem, gpu: GpuSpec) -> QuantizedConfig:
        """The model's best."""
        return _default(p, gpu)

    def estimate_us(self, p: QuantizedGroupedProblem, c: QuantizedConfig, gpu: GpuSpec) -> float:
        return float(SCHEDULES[c.body].estimate_us(p.one, c, gpu, p.beside)) if p.rows and p.n else 0.0

    # -- kernel

    def build(self, p: QuantizedGroupedProblem, c: QuantizedConfig, gpu: GpuSpec) -> Artifact:
        import cutlass
        from cutlass.cute.runtime import make_fake_tensor

        from cutekernels.backends import cute as backend
        from cutekernels.quant import layout

        sym = cutlass.cute.sym_int
        dtype, scale = backend.dtype_of(p.dtype), backend.scale_of(p.scale)
        rows, n, k, ends = sym(), sym(divisibility=8), sym(divisibility=8), sym()

        def matrix(columns: Any, align: int) -> Any:
            stride = (sym(divisibility=align), 1)
            return make_fake_tensor(dtype, (rows, columns), stride=stride, assumed_align=align * ELEMENT_BYTES)

        def dense(kind: Any, *shape: Any) -> Any:
            """A contiguous tensor."""
            strides = (*[sym() for _ in shape[1:]], 1)
            return make_fake_tensor(kind, shape, stride=strides, assumed_align=16)

        bias = None
        if p.bias != "none":
            kind = cutlass.Float32 if p.bias == "fp32" else dtype
            bias = make_fake_tensor(kind, (sym(), sym()), stride=(sym(), 1), assumed_align=kind.width // 8)
        return backend.compile(
            SCHEDULES[c.body].grouped_body(p, c),
            matrix(n, p.out_align),
            matrix(k, 8),
            dense(cutlass.Uint8, sym(), sym(), layout.TILE_BYTES[p.one.bits]),
            dense(scale, sym(), sym()),
            dense(cutlass.Uint8, sym(), sym()) if p.zeros else None,
            make_fake_tensor(cutlass.Int32, (ends,), stride=(1,), assumed_align=4),
            bias,
            dense(cutlass.Float32, sym()),
            make_fake_tensor(cutlass.Int32, (sym(),), stride=(1,), assumed_align=4),
            cutlass.Int32(1),
            cutlass.Float32(1.0),
            cutlass.Float32(1.0),
            gpu=gpu,
        )

    def bind(self, p: QuantizedGroupedProblem, c: QuantizedConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        from cutekernels.gpu import detect
        from cutekernels.ops.shared.per_stream import StreamWorkspace

        schedule = SCHEDULES[c.body]
        ctas, places = schedule.ctas(p.one, c, detect(), p.beside), schedule.places(p.one, c, p.beside)
        shared = c.tile_m * c.tile_n if c.stream_k else 0
        workspace = StreamWorkspace(max(4, 2 * ctas * shared), max(4, places * c.stream_k)).get

        def launch(*args: Any) -> None:
            kernel(*args[:-2], *workspace(), ctas, *args[-2:])

        return launch

    # -- calls

    def takes(self, name: str, t: Tensor) -> bool:
        if name in ("x", "out"):
            meta = t.device.type == "meta"
            aligned = (t.shape[0] <= 1 or t.stride(0) % 8 == 0) and (meta or t.data_ptr() % 16 == 0)
            return t.stride(-1) == 1 and (name == "out" or aligned)
        if name == "bias":
            return t.stride(-1) == 1
        return t.is_contiguous() and (name == "offsets" or t.device.type == "meta" or t.data_ptr() % 16 == 0)

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        import torch

        x, packed, scales, zeros, offsets, bias = inputs
        assert x is not None and packed is not None and scales is not None and offsets is not None
        check_dtype(self, x)
        if options["activation"] not in (*ACTIVATIONS, *GATES):
            known = ", ".join(name for name in (*ACTIVATIONS, *GATES) if name != "none")
            raise UnsupportedProblem(f"activation must be one of {known}; it is {options['activation']!r}")
        if x.dim() != 2 or packed.dim() != 3 or scales.dim() != 2:
            raise UnsupportedProblem(f"x must be (T, K) beside a stack's tensors; its shape is {tuple(x.shape)}")
        check_offsets(offsets, x, None)
        experts, total = offsets.shape[0] - 1, packed.shape[0] * 64
        n = total // experts
        check_weight(packed, scales, zeros, options["code"], options["group"], total, x.shape[1])
        gated = options["activation"] in GATES
        unit = max(64, rows_of_scale(scales, total)) * (2 if gated else 1)
        if n * experts != total:
            raise UnsupportedProblem(
                f"a stack of {total} rows is not of {experts} experts, as offsets has them: pass offsets of the stack's"
            )
        if n % unit:
            raise UnsupportedProblem(
                f"packed experts have {unit} rows or a multiple{', half of them gates,' if gated else ''} so that "
                f"tiles of 64 and scales of {rows_of_scale(scales, total)} rows end with them; these have {n}: pad "
                "them, or quantize them with a scale to a row"
            )
        if bias is not None and (tuple(bias.shape) != (experts, n) or bias.dtype not in (x.dtype, torch.float32)):
            raise UnsupportedProblem(
                f"bias must be ({experts}, {n}) of x's dtype {x.dtype} or fp32; it is {tuple(bias.shape)} {bias.dtype}"
            )
        shape = x.shape[0], n // 2 if gated else n
        for out in results:
            if tuple(out.shape) != shape or out.dtype != x.dtype:
                raise UnsupportedProblem(f"out must be {shape} {x.dtype}; it is {tuple(out.shape)} {out.dtype}")
        for name, t in (("packed", packed), ("bias", bias), *(("out", out) for out in results)):
            if t is not None and t.device != x.device:
                raise UnsupportedProblem(f"{name} must be on x's device {x.device}; it is on {t.device}: move it")
        check_results(results)

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        x, packed, _, _, offsets, _ = inputs
        assert x is not None and packed is not None and offsets is not None
        n = packed.shape[0] * 64 // (offsets.shape[0] - 1)
        return (x.new_empty((x.shape[0], n // 2 if options["activation"] in GATES else n)),)

    def problem(self, *operands: Tensor | None, **options: Any) -> QuantizedGroupedProblem:
        import torch

        out, x, packed, scales, zeros, offsets, bias = operands
        assert out is not None and x is not None and packed is not None and scales is not None and offsets is not None
        if x.shape[1] % 8 or not x.shape[1]:
            raise UnsupportedProblem(f"K={x.shape[1]} must be a multiple of 8: pad x with zeros")
        return QuantizedGroupedProblem(
            rows=x.shape[0],
            n=out.shape[1],
            k=x.shape[1],
            experts=offsets.shape[0] - 1,
            dtype=GPU_DTYPES.names[x.dtype],
            code=options["code"],
            group=options["group"],
            scale_rows=rows_of_scale(scales, packed.shape[0] * 64),
            scale=scale_of(scales),
            zeros=zeros is not None,
            bias="none" if bias is None else "fp32" if bias.dtype == torch.float32 else "same",
            activation=options["activation"],
            out_align=8 if alignment(out) == 8 else 1,
        )

    # -- mathematics

    def outputs(self, p: QuantizedGroupedProblem, *args: Any) -> tuple[Tensor, ...]:
        pitch = p.n if p.out_align == 8 else p.n + 1
        return (args[0].new_empty((p.rows, pitch))[:, : p.n],)

    def sample(self, p: QuantizedGroupedProblem, device: str, seed: int) -> tuple[Any, ...]:
        import torch

        packed, scales, zeros = random_weight(p.one.replace(n=p.experts * p.weight_rows), device, seed)
        draw = torch.Generator(device=device).manual_seed(seed + 1)
        bias = None
        if p.bias != "none":
            bias = torch.randn((p.experts, p.weight_rows), generator=draw, device=device)
            bias = bias if p.bias == "fp32" else bias.to(DTYPES[p.dtype])
        x, offsets = self._draw_rows(p, draw, seed)
        return x, packed, scales, zeros, offsets, bias, ALPHA, LIMIT

    def variant(self, p: QuantizedGroupedProblem, args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
        import torch

        _, packed, scales, zeros, offsets, *rest = args
        x, offsets = self._draw_rows(p, torch.Generator(device=offsets.device).manual_seed(seed), seed)
        return x, packed, scales, zeros, offsets, *rest

    def _draw_rows(self, p: QuantizedGroupedProblem, draw: torch.Generator, seed: int) -> tuple[Tensor, Tensor]:
        """Rows and how they spread."""
        import torch

        x = torch.randn((p.rows, p.k), generator=draw, device=draw.device).to(DTYPES[p.dtype])
        return x, sample_offsets(p.rows, p.experts, SPREADS[seed % len(SPREADS)], draw)

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        import torch

        from cutekernels.quant.weight import QuantizedWeight

        x, packed, scales, zeros, offsets, bias, alpha, limit = args
        activation, total = options["activation"], packed.shape[0] * 64
        scale_rows, experts = rows_of_scale(scales, total), offsets.shape[0] - 1
        n = total // experts
        out = x.new_zeros((x.shape[0], n // 2 if activation in GATES else n))
        for e, (begin, end) in enumerate(groups_of(offsets, x.shape[0])):
            if begin == end:
                continue
            own = slice(e * n // scale_rows, (e + 1) * n // scale_rows)
            weight = QuantizedWeight(
                code=options["code"], group=options["group"], scale_rows=scale_rows, shape=(n, x.shape[1]),
                packed=packed[e * n // 64 : (e + 1) * n // 64], scales=scales[:, own].contiguous(),
                zeros=None if zeros is None else zeros[:, own].contiguous(),
            )  # fmt: skip
            y = x[begin:end].double() @ weight.dequantize(torch.float32).double().t()
            if bias is not None:
                y = y + bias[e].double()
            out[begin:end] = gated(y, activation, alpha, limit).to(x.dtype)
        return (out,)

    def work(self, p: QuantizedGroupedProblem) -> Work:
        experts = sampled_experts(p.rows, p.experts)
        bias = 0 if p.bias == "none" else experts * p.weight_rows * (4 if p.bias == "fp32" else ELEMENT_BYTES)
        moved = experts * p.one.weight_bytes + ELEMENT_BYTES * p.rows * (p.k + p.n) + bias
        depth = max(float(p.k), rounded_operand_depth(p.dtype, gated=p.gated))
        return Work(2.0 * p.rows * p.weight_rows * p.k, float(moved), depth)


QUANTIZED_GROUPED_GEMM = QuantizedGroupedGemm()


def gated(y: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """``activation`` of what a product gave, gates before up where there are both."""
    import torch

    if activation not in GATES:
        return activated(y, activation)
    gate, up = y.chunk(2, dim=-1)
    if activation == GATED:
        return torch.nn.functional.silu(gate) * up
    assert activation == CLAMPED
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


@rates.remember
def _default(p: QuantizedGroupedProblem, gpu: GpuSpec) -> QuantizedConfig:
    choices = [schedule.best(p.one, gpu, p.beside) for schedule in SCHEDULES.values()]
    found = [choice for choice in choices if choice is not None]
    if not found:
        raise AssertionError(f"no config for {p} on {gpu.name}")
    return min(found, key=lambda choice: choice[0])[1]
