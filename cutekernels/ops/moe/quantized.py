"""``quantized_grouped_gemm``: the declaration. ``grouped_gemm`` with packed experts, for few tokens an expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import ACTIVATIONS
from cutekernels.ops.gemm.epilogue import activate, draw_bias
from cutekernels.ops.moe.grouped import (
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
from cutekernels.ops.quantized.decode import check_weight, decode_codes, random_weight, rows_of_scale
from cutekernels.ops.quantized.op import PackedProduct
from cutekernels.ops.quantized.problem import QuantizedConfig
from cutekernels.ops.shared.checks import check_dtype
from cutekernels.ops.shared.dtypes import DTYPES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss


class QuantizedGroupedGemm(PackedProduct[QuantizedGroupedProblem]):
    """Arguments: x ``(T, K)``, packed, scales and zeros or None of all experts' rows, offsets ``(E + 1,)``, bias
    ``(E, N)`` or None, then alpha and limit of ``swiglu_oai``.
    """

    name = "quantized_grouped_gemm"
    revision = 1
    Problem = QuantizedGroupedProblem
    activations = (*ACTIVATIONS, *GATES)
    schedules = SCHEDULES
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
    inputs = ("x", "packed", "scales", "zeros", "offsets", "bias")
    options = ("code", "group", "activation")
    scalars = ("alpha", "limit")
    schema = (
        "Tensor x, Tensor packed, Tensor scales, Tensor? zeros, Tensor offsets, Tensor? bias, "
        "str code, int group, str activation, float alpha, float limit"
    )

    # -- kernel

    def body(self, p: QuantizedGroupedProblem, c: QuantizedConfig, gpu: GpuSpec) -> Any:
        return SCHEDULES[c.body].grouped_body(p, c)

    def divisor(self, p: QuantizedGroupedProblem) -> int:
        return 8

    def tail_fakes(self, p: QuantizedGroupedProblem, dtype: Any, n: Any) -> list[Any]:
        from cutlass import Int32

        from cutekernels.backends import cute as backend

        return [backend.dense(Int32, None), backend.bias(p.bias, dtype, None, None)]

    def numbers(self, c: QuantizedConfig) -> list[Any]:
        from cutlass import Float32, Int32

        return [Int32(1), Float32(1.0), Float32(1.0)]

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
        return t.stride(-1) == 1 if name == "bias" else super().takes(name, t)

    def admit(self, inputs: Sequence[Tensor | None], results: Sequence[Tensor] = (), **options: Any) -> None:
        x, packed, scales, zeros, offsets, bias = inputs
        assert x is not None and packed is not None and scales is not None and offsets is not None
        check_dtype(self, x)
        self.check_activation(options["activation"])
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
        self.check_beside(x, packed, bias, results, (experts, n), (x.shape[0], n // 2 if gated else n))

    def fresh(self, *inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        x, packed, _, _, offsets, _ = inputs
        assert x is not None and packed is not None and offsets is not None
        n = packed.shape[0] * 64 // (offsets.shape[0] - 1)
        return (x.new_empty((x.shape[0], n // 2 if options["activation"] in GATES else n)),)

    def problem(self, *operands: Tensor | None, **options: Any) -> QuantizedGroupedProblem:
        out, x, packed, scales, zeros, offsets, bias = operands
        assert out is not None and x is not None and packed is not None and scales is not None and offsets is not None
        found = self.fields(out, x, packed.shape[0] * 64, scales, zeros, bias)
        experts = offsets.shape[0] - 1
        return QuantizedGroupedProblem(rows=x.shape[0], n=out.shape[1], experts=experts, **options, **found)

    # -- mathematics

    def outputs(self, p: QuantizedGroupedProblem, *args: Any) -> tuple[Tensor, ...]:
        pitch = p.n if p.out_align == 8 else p.n + 1
        return (args[0].new_empty((p.rows, pitch))[:, : p.n],)

    def sample(self, p: QuantizedGroupedProblem, device: str, seed: int) -> tuple[Any, ...]:
        import torch

        packed, scales, zeros = random_weight(p.one.replace(n=p.experts * p.weight_rows), device, seed)
        draw = torch.Generator(device=device).manual_seed(seed + 1)
        bias = draw_bias(p, draw, p.experts, p.weight_rows)
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
        x, packed, scales, zeros, offsets, bias, alpha, limit = args
        activation, total = options["activation"], packed.shape[0] * 64
        scale_rows, experts = rows_of_scale(scales, total), offsets.shape[0] - 1
        n = total // experts
        out = x.new_zeros((x.shape[0], n // 2 if activation in GATES else n))
        for e, (begin, end) in enumerate(groups_of(offsets, x.shape[0])):
            if begin == end:
                continue
            own = slice(e * n // scale_rows, (e + 1) * n // scale_rows)
            weight = (packed[e * n // 64 : (e + 1) * n // 64], scales[:, own].contiguous())
            points = None if zeros is None else zeros[:, own].contiguous()
            whole = decode_codes(*weight, points, options["code"], options["group"], n, x.shape[1])
            y = x[begin:end].double() @ whole.double().t()
            if bias is not None:
                y = y + bias[e].double()
            out[begin:end] = gated(y, activation, alpha, limit).to(x.dtype)
        return (out,)

    def moved_weights(self, p: QuantizedGroupedProblem) -> float:
        return sampled_experts(p.rows, p.experts)


QUANTIZED_GROUPED_GEMM = QuantizedGroupedGemm()


def gated(y: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """``activation`` of what a product gave, gates before up where there are both."""
    import torch

    if activation != CLAMPED:
        return activate(y, activation)
    gate, up = y.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)
