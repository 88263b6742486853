"""Packed experts without a GPU: values, gradients, tracing, refusals, what is posed, and what it compiles to."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import cutekernels as ck
from cutekernels import gpu, nn
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.products.grouped_api import clamped_swiglu
from cutekernels.ops.products.packed import QUANTIZED_GROUPED_GEMM, QUANTIZED_LINEAR, QuantizedGroupedProblem
from cutekernels.ops.products.schedules.packed_problem import QuantizedConfig
from cutekernels.ops.products.schedules.packed_skinny import GROUPED_PACKED_SKINNY
from cutekernels.quant import QuantizedStack
from tests import compiled, sass
from tests.moe.packed import SCHEMES, experts, products

OFFSETS = torch.tensor([1, 4, 4, 9, 9, 11], dtype=torch.int32)  # two empty groups; rows 0, 11 and 12 belong to none


# ---- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "activation"),
    [*[(s, "swiglu_oai") for s in SCHEMES], *[("mxfp4", a) for a in (None, "gelu", "silu_mul")]],
)
def test_each_row_meets_its_expert(scheme: str, activation: Any) -> None:
    weight, x = experts(5, 256, 160, scheme), torch.randn(13, 160).bfloat16()
    bias = torch.randn(5, 256)
    out = ck.grouped_gemm(x, weight, OFFSETS, bias, activation=activation)
    assert torch.equal(out, products(x, weight, OFFSETS, bias, activation or "none"))
    swapped = QuantizedStack(experts(5, 256, 160, scheme, seed=1).weight, 5)
    assert not torch.equal(out, products(x, swapped, OFFSETS, bias, activation or "none"))


def test_the_clamped_gate_is_gpt_oss_s() -> None:
    """As transformers' GptOssExperts computes it, with gate and up apart."""
    y = torch.randn(9, 64) * 8
    gate, up = y[:, :32].clamp(max=7.0), y[:, 32:].clamp(-7.0, 7.0)
    torch.testing.assert_close(clamped_swiglu(y), (up + 1) * (gate * torch.sigmoid(gate * 1.702)))
    assert clamped_swiglu(torch.full((1, 2), torch.nan)).isnan().all()


@pytest.mark.parametrize("scheme", ["mxfp4", "int4_g64", "fp8_block"])
@pytest.mark.parametrize("activation", ["silu_mul", "swiglu_oai"])
def test_an_ffn_is_that_of_the_decoded_experts_and_so_are_its_gradients(scheme: str, activation: Any) -> None:
    up, down = experts(6, 256, 128, scheme), experts(6, 128, 128, scheme, seed=1)
    ids, weights = torch.randint(0, 6, (9, 2)), torch.rand(9, 2)
    found = []
    for w_up, w_down in ((up, down), (up.dequantize(), down.dequantize())):
        leaves = [torch.randn(s, generator=torch.Generator().manual_seed(3)) for s in ((9, 128), (6, 256), (6, 128))]
        x, b_up, b_down = (t.bfloat16().requires_grad_() for t in leaves)
        out = ck.moe_ffn(x, w_up, w_down, ids, weights, gate_up_bias=b_up, down_bias=b_down, activation=activation)
        out.sum().backward()
        found.append((out.detach(), x.grad, b_up.grad, b_down.grad))
    for packed, dense in zip(*found, strict=True):
        torch.testing.assert_close(packed, dense, rtol=0.04, atol=0.04)


def test_gradients_of_rows_and_biases() -> None:
    weight, bias = experts(5, 128, 64, "mxfp4"), torch.randn(5, 128, dtype=torch.float64, requires_grad=True)
    x = torch.randn(13, 64, dtype=torch.float64, requires_grad=True)
    for activation in (None, "relu", "silu", "silu_mul", "swiglu_oai"):
        options = (weight.weight.code, 32, activation or "none", 1.702, 1.0)  # a limit that many values reach

        def f(x: Any, b: Any, options: Any = options) -> Any:
            own = weight.weight
            return QUANTIZED_GROUPED_GEMM.path(x, own.packed, own.scales, None, None, OFFSETS, b, *options, None)

        y = f(x, bias)
        dense = weight.dequantize(torch.float32).double()
        x2, b2 = x.detach().requires_grad_(), bias.detach().requires_grad_()
        parts = [torch.zeros(1, y.shape[1]).double()]
        for e, (a, z) in enumerate(itertools.pairwise(OFFSETS)):
            own = x2[a:z] @ dense[e].mT + b2[e]
            if activation == "swiglu_oai":
                own = clamped_swiglu(own, 1.702, 1.0)
            elif activation == "silu_mul":
                own = torch.nn.functional.silu(own[:, :64]) * own[:, 64:]
            elif activation is not None:
                own = getattr(torch.nn.functional, activation)(own)
            parts.append(own)
        expected = torch.cat([*parts, torch.zeros(2, y.shape[1]).double()])
        d = torch.randn_like(expected)
        for got, exact in zip(
            torch.autograd.grad(y, (x, bias), d), torch.autograd.grad(expected, (x2, b2), d), strict=True
        ):
            torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-6)


def test_opcheck_and_compile() -> None:
    weight, x = experts(5, 128, 64, "int4_g32 zeros"), torch.randn(13, 64).bfloat16().requires_grad_()
    own = weight.weight
    args = (x, own.packed, own.scales, own.zeros, own.factors, OFFSETS, None, "int4", 32, "silu", 1.0, 1.0)
    torch.library.opcheck(torch.ops.cutekernels.quantized_grouped_gemm, args)
    back = (torch.randn(13, 128).bfloat16(), own.packed, own.scales, own.zeros, own.factors, OFFSETS, "int4", 32, 64)
    torch.library.opcheck(torch.ops.cutekernels.quantized_grouped_gemm_backward, back)
    made = torch.compile(lambda x: ck.grouped_gemm(x, weight, OFFSETS), backend="aot_eager", fullgraph=True)
    assert torch.equal(made(x), ck.grouped_gemm(x, weight, OFFSETS))


# ---- refusals, and what a GPU is asked ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"offsets": OFFSETS[:-1]}, r"offsets \(6,\)"),
        ({"offsets": OFFSETS.long()}, "takes offsets in int32"),
        ({"x": torch.zeros(13, 96).bfloat16()}, r"takes x \(T, 64\)"),
        ({"bias": torch.zeros(5, 64)}, r"takes bias .* = \(5, 128\); got \(5, 64\)"),
        ({"activation": "swish"}, "activation must be one of"),
        ({"limit": -1.0}, "limit"),
        ({"out": torch.zeros(13, 64).bfloat16()}, r"out must be \(13, 128\)"),
    ],
)
def test_misfits_are_refused(changed: dict[str, Any], said: str) -> None:
    good = {"x": torch.zeros(13, 64).bfloat16(), "weight": experts(5, 128, 64, "mxfp4"), "offsets": OFFSETS}
    with pytest.raises(UnsupportedProblem, match=said):
        ck.grouped_gemm(**good | changed)


@pytest.mark.parametrize(
    ("rows", "scheme", "said"), [(192, "mxfp4", "128 rows or a multiple"), (128, "fp8_block", "256 rows .* have 128")]
)
def test_experts_that_a_gate_cannot_halve_are_refused(rows: int, scheme: str, said: str) -> None:
    weight = experts(5, rows, 64, scheme)  # 96 rows of gates are no whole tiles, 64 no whole block
    with pytest.raises(UnsupportedProblem, match=said) as caught:
        ck.grouped_gemm(torch.zeros(13, 64).bfloat16(), weight, OFFSETS, activation="silu_mul")
    assert "offsets" not in str(caught.value), "they are the stack's"


def test_an_ffn_refuses_a_stack_in_the_place_of_a_tensor() -> None:
    up, down = experts(2, 128, 64, "mxfp4"), experts(2, 64, 64, "mxfp4")
    ids, weights = torch.zeros(3, 1).int(), torch.ones(3, 1)
    with pytest.raises(UnsupportedProblem, match="activation"):
        ck.moe_ffn(torch.zeros(3, 64).bfloat16(), up, down, ids, weights, activation="gelu")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedProblem, match=r"w_down \(E, H, I\)"):
        ck.moe_ffn(torch.zeros(3, 64).bfloat16(), up, up, ids, weights)
    with pytest.raises(UnsupportedProblem, match="takes x as a torch.Tensor"):
        ck.moe_ffn(up, up, down, ids, weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("changed", [{"limit": -1.0}, {"limit": math.nan}, {"alpha": "x"}])
def test_a_clamped_gate_of_plain_experts_has_the_same_limits(changed: dict[str, Any]) -> None:
    x, ids, weights = torch.zeros(3, 4), torch.zeros(3, 1).int(), torch.ones(3, 1)
    with pytest.raises(UnsupportedProblem, match=f"moe_ffn takes {next(iter(changed))} as a finite number"):
        ck.moe_ffn(x, torch.zeros(2, 6, 4), torch.zeros(2, 4, 3), ids, weights, activation="swiglu_oai", **changed)


def test_operands_pose_what_they_are() -> None:
    op, x, own = QUANTIZED_GROUPED_GEMM, torch.randn(13, 160).bfloat16(), experts(5, 256, 160, "fp8_block").weight
    inputs = (x, own.packed, own.scales, None, None, OFFSETS, torch.zeros(5, 256))
    options = {"code": "e4m3", "group": 128, "activation": "silu_mul"}
    op.admit(inputs, **options)
    assert str(op.problem(*op.fresh(*inputs, **options), *inputs, **options)) == (
        "rows=13 n=128 k=160 experts=5 code=e4m3 scale_rows=128 scale=fp32 bias=fp32 activation=silu_mul"
    )


@pytest.mark.parametrize("text", QUANTIZED_GROUPED_GEMM.suite[-2:])
def test_variants_share_weights(text: str) -> None:
    op, problem = QUANTIZED_GROUPED_GEMM, QuantizedGroupedProblem.parse(text)
    for seed in range(3):
        args = op.sample(problem, "cpu", seed)
        other = op.variant(problem, args, seed + 1)
        assert other[1] is args[1] and not torch.equal(other[0], args[0])


# ---- kernels --------------------------------------------------------------------------------------------


# MXFP4, int4 with zero points, FP8 in blocks and in rows, and what no tile divides.
EACH_KIND = [QUANTIZED_GROUPED_GEMM.suite[i] for i in (0, 7, 5, 8, 9)]


@pytest.mark.parametrize(("text", "spec"), compiled.pairs(EACH_KIND), ids=lambda x: getattr(x, "target", x))
def test_defaults_compile_without_spills_in_the_shared_memory_that_rules_count(text: str, spec: gpu.GpuSpec) -> None:
    p = QuantizedGroupedProblem.parse(text)
    c = QUANTIZED_GROUPED_GEMM.default(p, spec)
    facts = QUANTIZED_GROUPED_GEMM.build(p, c, spec).facts
    assert facts.stack_bytes == 0
    assert facts.smem_bytes == QUANTIZED_GROUPED_GEMM.schedules[c.body].smem(p.one, c).total_bytes


@pytest.mark.parametrize(
    ("text", "knobs"),
    [
        (
            "rows=4096 n=768 k=2048 experts=8 code=e2m1 group=32 scale=e8m0 activation=swiglu_oai bias=fp32",
            "tile_m=128 tile_n=128 tile_k=128 stages=4 scaled=weights raster=8",
        ),
        (
            "rows=4096 n=768 k=2048 experts=8 zeros=1 activation=silu_mul",
            "tile_m=64 tile_n=128 tile_k=128 stages=7 scaled=accumulators raster=1",
        ),
        (
            "rows=4096 n=832 k=2048 experts=8 code=int8 group=0 scale=bf16 bias=same activation=gelu",
            "tile_m=128 tile_n=64 tile_k=128 stages=5 scaled=accumulators raster=8",
        ),
        (
            "rows=4096 n=768 k=2048 experts=8 code=e4m3 scale_rows=128 scale=fp32",
            "tile_m=96 tile_n=192 tile_k=128 stages=4 scaled=weights raster=8",
        ),
    ],
)
def test_ways_through_the_warpgroup_body_compile(text: str, knobs: str, tmp_path: Path) -> None:
    """ptxas keeps products under way, whose registers nothing writes: it waits as often as for one weight."""
    spec, p = gpu.lookup("h200"), QuantizedGroupedProblem.parse(text)
    c = QuantizedConfig.parse(
        f"body=warpgroup {knobs} stream_k=0 pdl=1 warps_n=1 warps_k=1 ctas_per_sm=1 prefetch_l2=0"
    )
    assert QUANTIZED_GROUPED_GEMM.why_not(p, c, spec) is None
    built = QUANTIZED_GROUPED_GEMM.build(p, c, spec)
    assert built.facts.stack_bytes == 0
    assert built.facts.smem_bytes == QUANTIZED_GROUPED_GEMM.schedules[c.body].smem(p.one, c).total_bytes
    one = p.one.replace(activation="none", n=p.n)
    both = [sass.instructions(compiled.cubin(b), tmp_path) for b in (built, QUANTIZED_LINEAR.build(one, c, spec))]
    waits = [sum(opcode.startswith("WARPGROUP.DEPBAR") for opcode, _ in code) for code in both]
    assert waits[0] == waits[1] > 0
    assert [sass.overwritten(code) for code in both] == [[], []]


def test_workspaces_hold_every_tile() -> None:
    """However rows spread, tiles are no more than counters."""
    p = QuantizedGroupedProblem.parse("rows=77 n=192 k=200 experts=5")
    spec = gpu.lookup("h200")
    for c in list(QUANTIZED_GROUPED_GEMM.valid(p, spec))[::97]:
        for ends in ((0, 1, 2, 3, 4, 77), (0, 77, 77, 77, 77, 77), (0, 15, 31, 46, 62, 77)):
            tiles = sum(-(-(b - a) // c.tile_m) for a, b in itertools.pairwise(ends)) * -(-p.n // c.tile_n)
            assert tiles <= GROUPED_PACKED_SKINNY.counters(p.one, c, p.beside)


# ---- nn.MoE ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu_oai", "bias": True}], ids=str)
def test_a_module_of_packed_experts(options: dict[str, Any]) -> None:
    """The same as with decoded experts; its state dict is whole; it moves; gradients reach x and the router."""
    made = [nn.MoE(128, 64, 8, 2, dtype=torch.bfloat16, **options) for _ in range(3)]
    with torch.no_grad():
        for name, p in made[0].named_parameters():
            if name.endswith("bias"):
                p.normal_()
    made[1].load_state_dict(made[0].state_dict())
    packed, dense, other = made[0].pack_experts("mxfp4"), made[1], made[2].pack_experts("mxfp4")
    dense.experts.gate_up_proj.data.copy_(packed.experts.gate_up_proj.dequantize())
    dense.experts.down_proj.data.copy_(packed.experts.down_proj.dequantize())
    x = torch.randn(5, 128).bfloat16().requires_grad_()
    torch.testing.assert_close(packed(x), dense(x), rtol=0.02, atol=0.02)
    assert not torch.equal(other(x), packed(x))
    other.load_state_dict(packed.state_dict())
    assert torch.equal(other(x), packed(x))
    assert other.to("meta").experts.down_proj.device.type == "meta"
    packed(x).sum().backward()
    assert x.grad is not None and packed.gate.weight.grad is not None
    state = packed.state_dict()
    del state["experts.gate_up_proj.weight.scales"]
    with pytest.raises(RuntimeError, match="gate_up_proj.weight: the state dict lacks weight.scales"):
        packed.load_state_dict(state)


def test_a_module_refuses_stacks_that_are_not_its_own() -> None:
    module, up, down = nn.MoE(128, 64, 8, 2), experts(8, 128, 128, "mxfp4"), experts(8, 128, 64, "mxfp4")
    for given, said in (
        ((up, up), "pass stacks of one mixture"),
        ((experts(4, 128, 128, "mxfp4"), experts(4, 128, 64, "mxfp4")), r"this MoE has gate_up_proj \(8, 128, 128\)"),
        ((up, None), "down_proj as a QuantizedStack"),
        (("mxfp4", down), "pass both stacks"),
        (("mxfp5", None), "a scheme is one of"),
    ):
        with pytest.raises(UnsupportedProblem, match=said):
            module.pack_experts(*given)
    assert module.pack_experts(up, down)(torch.randn(3, 128)).shape == (3, 128)
