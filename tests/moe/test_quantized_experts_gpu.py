"""Packed experts on a GPU: numerics against fp64, ragged groups, isolation, determinism, graphs, gradients."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import cutekernels as ck
from cutekernels import compile as compiler
from cutekernels import gpu, verify
from cutekernels.ops.products.groups import SPREADS, sample_offsets
from cutekernels.ops.products.packed import QUANTIZED_GROUPED_GEMM
from cutekernels.ops.products.packed import QuantizedGroupedProblem as Problem
from cutekernels.ops.shared.tolerance import rounded_operand_depth
from cutekernels.quant import QuantizedStack
from tests.compiled import having
from tests.moe.packed import SCHEMES, experts, products
from tests.moe.test_grouped_gpu import WRONG, assert_nan_stays, ends, replayed
from tests.on_gpu import normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_seed")]
AWKWARD = [
    "rows=1 n=64 k=8 experts=1 code=e2m1 group=32 scale=e8m0",
    "rows=129 n=256 k=40 experts=1023 code=int8 group=0 scale=bf16 bias=same activation=gelu",
    "rows=700 n=320 k=264 experts=150 code=e2m1 group=32 scale=e8m0 activation=swiglu_oai bias=fp32",
    "rows=500 n=128 k=520 experts=7 dtype=fp16 code=e2m1 group=32 scale=e8m0 activation=swiglu_oai",
    "rows=700 n=320 k=272 experts=50 code=e2m1 group=16 scale=ue5m3 factors=1 activation=swiglu_oai bias=fp32",
    "rows=3000 n=448 k=720 experts=20 dtype=fp16 code=e2m1 group=16 scale=ue5m3 factors=1 bias=same",
    "rows=500 n=128 k=520 experts=7 dtype=fp16 group=64 zeros=1 bias=fp32 activation=gelu_tanh",
    "rows=65 n=192 k=1000 experts=33 code=nf4 group=64 scale=fp32 activation=silu_mul",
    "rows=900 n=128 k=200 experts=3 code=e4m3 scale_rows=128 scale=bf16 activation=silu_mul out_align=1",
    "rows=3000 n=448 k=712 experts=20 code=e2m1 group=32 scale=e8m0 activation=swiglu_oai bias=same",
    "rows=3000 n=448 k=712 experts=200 zeros=1 group=32 activation=silu_mul bias=fp32 dtype=fp16",
    "rows=5000 n=384 k=520 experts=5 code=e4m3 scale_rows=128 scale=fp32 activation=silu_mul",
    "rows=5000 n=320 k=520 experts=5 code=e4m3 group=0 scale=fp32 bias=same",
]


def some(problem: Problem, count: int, seed: int, **values: Any) -> list[str]:
    """Texts of valid configs."""
    found = having(QUANTIZED_GROUPED_GEMM.valid(problem, gpu.detect()), **values)
    return [str(c) for c in random.Random(seed).sample(found, min(count, len(found)))]


def error(found: Tensor, exact: Tensor, k: int, gated: bool = False) -> float:
    kind = "fp16" if found.dtype == torch.float16 else "bf16"
    depth = max(float(k), rounded_operand_depth(kind, gated=gated))
    return verify.worst_error((found,), (exact,), 2.0 * found.numel() * k, depth=depth)


@pytest.mark.parametrize("seed", range(len(SPREADS)), ids=SPREADS)
@pytest.mark.parametrize("text", [*QUANTIZED_GROUPED_GEMM.suite, *AWKWARD], ids=str)
def test_every_suite_and_spread_with_default_and_random_configs(text: str, seed: int) -> None:
    op, problem, spec = QUANTIZED_GROUPED_GEMM, Problem.parse(text), gpu.detect()
    inputs = op.sample(problem, "cuda", seed)
    options = {name: getattr(problem, name) for name in op.options}
    results = op.outputs(problem, *inputs)
    assert op.problem(*results, *inputs[:-2], **options) == problem
    expected, work = op.reference(problem, *inputs), op.work(problem)
    default = op.default(problem, spec)
    chosen = [default]
    for values in ({"body": "skinny", "stream_k": False}, {"body": "skinny", "stream_k": True}, {"body": "warpgroup"}):
        chosen += [op.Config.parse(c) for c in some(problem, 2, seed % 2, **values)]
    for config in chosen:
        verify.poison(results)
        bound = op.bind(problem, config, compiler.get(op, problem, config, spec))
        for _ in range(2):  # tickets are zero again, so a second launch is right too
            bound(*results, *inputs)
        found = verify.worst_error(results, expected, work.flops, depth=work.depth)
        assert found <= 1, f"[{problem}] [{config}] is off by {found:.3g} tolerances"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activation", ["none", "silu_mul", "swiglu_oai"])
def test_schemes_over_the_public_call(scheme: str, activation: Any) -> None:
    weight, x = experts(6, 256, 336, scheme, "cuda"), normal(300, 336)
    bias = torch.randn(6, 256, device="cuda")
    for offsets in (ends(0, 40, 41, 41, 170, 290, 300), ends(0, 0, 0, 0, 0, 0, 300), ends(7, 7, 8, 9, 10, 11, 12)):
        out = ck.grouped_gemm(x, weight, offsets, bias, activation=activation)
        again = ck.grouped_gemm(x, weight, offsets, bias, activation=activation)
        assert torch.equal(out, again)
        exact = products(x, weight, offsets, bias, activation)
        assert error(out, exact, 336, activation != "none") <= 1
        assert (out[: int(offsets[0])] == 0).all() and (out[int(offsets[-1]) :] == 0).all()


def test_nan_stays_with_its_expert_and_its_row() -> None:
    for scheme in ("mxfp4", "int4_g32 zeros", "fp8_block", "fp8_channel"):
        weight, x, offsets = experts(6, 256, 200, scheme, "cuda"), normal(300, 200), ends(0, 40, 41, 41, 170, 290, 300)
        problem = Problem.parse("rows=300 n=256 k=200 experts=6" + TEXT[scheme])
        for config in [*some(problem, 3, 1, body="skinny"), *some(problem, 3, 1, body="warpgroup")]:
            clean = ck.grouped_gemm(x, weight, offsets, config=config)
            spoilt_x = x.clone()
            spoilt_x[41:170] = float("nan")
            spoilt = ck.grouped_gemm(spoilt_x, weight, offsets, config=config)
            assert_nan_stays(spoilt, clean)
            assert error(clean, products(x, weight, offsets), 200) <= 1
            if scheme != "mxfp4":  # whose exponents cannot be NaN
                scales = weight.weight.scales.clone()
                rows = 256 // weight.weight.scale_rows
                scales[:, 3 * rows : 4 * rows] = float("nan")
                own = weight.weight
                bad = QuantizedStack(
                    type(own)(own.code, own.group, own.scale_rows, own.shape, own.packed, scales, own.zeros), 6
                )
                spoilt = ck.grouped_gemm(x, bad, offsets, config=config)
                assert_nan_stays(spoilt, clean)


TEXT = {
    "mxfp4": " code=e2m1 group=32 scale=e8m0",
    "int4_g32 zeros": " group=32 zeros=1",
    "fp8_block": " code=e4m3 scale_rows=128 scale=fp32",
    "fp8_channel": " code=e4m3 group=0 scale=fp32",
}


@pytest.mark.parametrize(
    "values",
    WRONG,
)
def test_wrong_offsets_touch_nothing_outside(values: tuple[int, ...]) -> None:
    memory = torch.full((2, 300, 64), 9.0, device="cuda", dtype=torch.bfloat16)
    x, out = memory[0, 100:200], memory[1, 100:200]
    weight, before = experts(2, 64, 64, "mxfp4", "cuda"), memory.clone()
    problem = Problem.parse("rows=100 n=64 k=64 experts=2 code=e2m1 group=32 scale=e8m0")
    for config in [*some(problem, 3, 4, body="skinny"), *some(problem, 3, 4, body="warpgroup")]:
        ck.grouped_gemm(x, weight, ends(*values), out=out, config=config)
        held = ends(*values).clamp(0, 100).cummax(0).values.int()  # what the kernel makes of them
        assert torch.equal(out, ck.grouped_gemm(x, weight, held, config=config))
    torch.cuda.synchronize()
    memory[1, 100:200] = before[1, 100:200]
    assert torch.equal(memory, before)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("count", [16, 300])
def test_a_graph_follows_its_offsets(spread: str, count: int) -> None:
    """One captured graph serves whatever routing its buffers hold, and each replay has the same bits."""
    x, weight = normal(512, 128), experts(count, 128, 128, "mxfp4", "cuda")
    first, offsets = replayed(x, weight, count, spread)
    assert error(first, products(x, weight, offsets), 128) <= 1


@pytest.mark.parametrize("tokens", [1, 7, 100])
@pytest.mark.parametrize("scheme", ["mxfp4", "int4_g64", "fp8_block"])
def test_an_ffn_and_its_gradient(tokens: int, scheme: str) -> None:
    activation: Any = "swiglu_oai" if scheme == "mxfp4" else "silu_mul"
    up, down = experts(16, 256, 128, scheme, "cuda"), experts(16, 128, 128, scheme, "cuda", 1)
    ids = torch.rand(tokens, 16, device="cuda").topk(4).indices
    weights, bias = torch.rand(tokens, 4, device="cuda"), torch.randn(16, 256, device="cuda")
    x, grads, outs = normal(tokens, 128), [], []
    for w_up, w_down in ((up, down), (up, down), (up.dequantize(), down.dequantize())):
        leaf = x.clone().requires_grad_()
        out = ck.moe_ffn(leaf, w_up, w_down, ids, weights, gate_up_bias=bias, activation=activation)
        out.sum().backward()
        outs.append(out.detach())
        grads.append(leaf.grad)
    assert torch.equal(outs[0], outs[1]) and torch.equal(grads[0], grads[1])
    for packed, dense in ((outs[0], outs[2]), (grads[0], grads[2])):
        assert packed is not None and dense is not None
        size = dense.float().square().mean().sqrt()
        assert ((packed - dense).float().square().mean().sqrt() / size).item() < 0.02


def test_no_rows() -> None:
    weight = experts(3, 128, 64, "mxfp4", "cuda")
    assert ck.grouped_gemm(normal(0, 64), weight, ends(0, 0, 0, 0)).shape == (0, 128)


def test_memory_is_that_of_what_is_packed() -> None:
    weight, x = experts(32, 512, 1024, "mxfp4", "cuda"), normal(64, 1024)
    offsets = sample_offsets(64, 32, "uniform", torch.Generator("cuda").manual_seed(0))
    ck.grouped_gemm(x, weight, offsets)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = ck.grouped_gemm(x, weight, offsets)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + 0.03 * weight.nbytes
    assert weight.nbytes <= 32 * 512 * 1024 * (0.5 + 1 / 32)
