"""``quantized_grouped_gemm``: the declaration. ``grouped_gemm`` with packed experts, for few tokens an expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.gemm.epilogue import activate
from cutekernels.ops.moe.grouped import SPREADS, groups_of, sample_offsets, sampled_experts
from cutekernels.ops.moe.packed_experts import CLAMPED, GATES, SCHEDULES, TILE, QuantizedGroupedProblem
from cutekernels.ops.moe.permute import check_extents
from cutekernels.ops.quantized.decode import decode_codes, rows_of_scale, steps, weight_operands
from cutekernels.ops.quantized.op import PackedProduct
from cutekernels.ops.quantized.problem import QuantizedConfig
from cutekernels.ops.shared.cute_op import CuteOp
from cutekernels.ops.shared.dtypes import DTYPES
from cutekernels.ops.shared.operands import Array, Matrix, Named, Sizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.gpu import GpuSpec

ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss


class QuantizedGroupedGemm(PackedProduct, CuteOp[QuantizedGroupedProblem, QuantizedConfig]):
    """Rows in groups times the packed weight of all experts' rows, ``total``; ``alpha`` and ``limit`` are of
    ``swiglu_oai``.
    """

    name = "quantized_grouped_gemm"
    revision = 1
    Problem = QuantizedGroupedProblem
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
        "rows=64 n=768 k=2048 experts=128 code=e2m1 group=16 scale=ue5m3 factors=1 activation=silu_mul",
        "rows=300 n=64 k=136 experts=40 group=32 zeros=1 scale=bf16 activation=silu_mul bias=same",
    )
    out = Matrix("rows", "n", result=True, align="out_align")
    x = Matrix("rows", "k", align=16)
    packed, scales, zeros, factors = weight_operands("total", "tiles")
    offsets = Array("experts+1", dtype="i32", strides=())
    bias = Array("experts", "weight_rows", dtype="bias", optional=True, align=1)
    options = ("code", "group", "activation")
    scalar_types = {"alpha": "fp32", "limit": "fp32"}
    scalar_samples = {"alpha": ALPHA, "limit": LIMIT}

    # -- kernel

    def body(self, p: QuantizedGroupedProblem, c: QuantizedConfig, gpu: GpuSpec) -> Any:
        return SCHEDULES[c.body].grouped_body(p, c)

    def divisors(self, p: QuantizedGroupedProblem, c: QuantizedConfig) -> dict[str, int]:
        return {"n": 8, "k": 8}

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

    def derive(self, sizes: Sizes, **options: Any) -> None:
        if "tiles" not in sizes:  # of a problem
            sizes["tiles"] = sizes["experts"] * sizes["n"] * (1 + (options["activation"] in GATES)) // TILE
        total, experts = sizes["tiles"] * TILE, sizes["experts"]
        if not experts or total % experts:
            raise ValueError(f"a stack of {total} rows is not of {experts} experts: pass offsets of the stack's")
        rows = total // experts
        sizes |= {"total": total, "weight_rows": rows}
        sizes |= {"n": rows // (1 + (options["activation"] in GATES)), **steps(options)}

    def refuse(self, named: Named, sizes: Sizes, **options: Any) -> None:
        super().refuse(named, sizes, **options)
        check_extents(sizes["rows"], sizes["experts"])
        n, gated = sizes["weight_rows"], options["activation"] in GATES
        scale_rows = rows_of_scale(named["scales"], sizes["total"])
        unit = max(TILE, scale_rows) * (1 + gated)
        if n % unit:
            raise UnsupportedProblem(
                f"packed experts have {unit} rows or a multiple{', half of them gates,' if gated else ''} so that "
                f"tiles of {TILE} and scales of {scale_rows} rows end with them; these have {n}: pad them, or quantize "
                "them with a scale to a row"
            )

    # -- mathematics

    def draw(
        self, p: QuantizedGroupedProblem, name: str, shape: tuple[int, ...], generator: torch.Generator
    ) -> Tensor | None:
        if name != "offsets":
            return super().draw(p, name, shape, generator)
        return sample_offsets(p.rows, p.experts, SPREADS[generator.initial_seed() % len(SPREADS)], generator)

    def variant(self, p: QuantizedGroupedProblem, args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
        import torch

        x, *weight, offsets, bias, alpha, limit = args
        draw = torch.Generator(device=offsets.device).manual_seed(seed)
        x = torch.randn((p.rows, p.k), generator=draw, device=draw.device).to(DTYPES[p.dtype])
        return x, *weight, self.draw(p, "offsets", (), draw), bias, alpha, limit

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        x, packed, scales, zeros, factors, offsets, bias, alpha, limit = args
        activation, total = options["activation"], packed.shape[0] * 64
        scale_rows, experts = rows_of_scale(scales, total), offsets.shape[0] - 1
        n = total // experts
        out = x.new_zeros((x.shape[0], n // 2 if activation in GATES else n))
        for e, (begin, end) in enumerate(groups_of(offsets, x.shape[0])):
            if begin == end:
                continue
            own = slice(e * n // scale_rows, (e + 1) * n // scale_rows)
            tables = [None if t is None else t[:, own].contiguous() for t in (scales, zeros, factors)]
            weight = packed[e * n // 64 : (e + 1) * n // 64], *tables
            whole = decode_codes(weight, options["code"], options["group"], n, x.shape[1])
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
