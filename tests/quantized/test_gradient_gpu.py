"""Decoding packed weights on a GPU, and the gradients that decode with it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cutekernels as ck
from cutekernels import gpu
from cutekernels.ops.products import backward
from cutekernels.ops.products import packed_api as api
from tests.quantized.cases import BF16, COMMON, FP16, FP32, KINDS, Kind, error, make

assert api, "it registers the op"
on_gpu = pytest.mark.gpu
shared = pytest.mark.usefixtures("one_seed")
ASYMMETRIC = Kind(group=64, zeros=True)
K = 1096


def tokens(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def _memory_of(call: Any) -> int:
    """The bytes that ``call`` had allocated at its peak beyond what there was."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@on_gpu
@shared
@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_dequantize(kind: Kind) -> None:
    """The gradient's kernel: fp32 values rounded once, in every bit, at an offset and at the ends."""
    made = make(129, 200, kind, "cuda")
    weight = made.weight()
    held = weight.packed, weight.scales, weight.zeros, weight.factors
    for first, columns in ((0, 200), (64, 72), (192, 8)):
        found = torch.ops.cutekernels.dequantize(*held, kind.code, kind.group, 129, 200, columns, "bf16", first)
        assert torch.equal(found, weight.dequantize(FP32)[:, first : first + columns].to(BF16))


@on_gpu
@shared
@pytest.mark.parametrize("tiles", [1, 2, 4])
@pytest.mark.parametrize("kind", COMMON.values(), ids=str)
def test_dequantize_into_slices(kind: Kind, tiles: int) -> None:
    """Each config and both types, aligned and not; nothing beside out is written."""
    n, k = 200, 456
    places = (0, 456, 8, False), (64, 392, 8, True), (128, 261, 1, True), (0, 328, 3, False)
    weight = make(n, k, kind, "cuda").weight()
    for dtype, name in ((BF16, "bf16"), (FP16, "fp16")):
        for first, columns, at, pdl in places:
            memory = torch.full((n + 2, 480), math.nan, device="cuda", dtype=dtype)
            out = memory[1:-1, at : at + columns]
            torch.ops.cutekernels.dequantize_out(
                weight.packed, weight.scales, weight.zeros, weight.factors, out, kind.code, kind.group, n, k, columns,
                name, first, f"tiles={tiles} pdl={int(pdl and gpu.detect().has_pdl)}",
            )  # fmt: skip
            assert torch.equal(out, weight.dequantize(FP32)[:, first : first + columns].to(dtype))
            out.fill_(math.nan)
            assert bool(memory.isnan().all())


@on_gpu
@shared
@pytest.mark.parametrize("code", ["int8", "e4m3", "nf4"])
def test_dequantize_small_and_large_numbers(code: str) -> None:
    """Every code, e4m3's subnormal numbers too, by scales whose products are subnormal, or beyond out's largest."""
    made = make(64, 256, Kind(code, 0, scale=FP32), "cuda")
    codes = torch.arange(256, device="cuda", dtype=torch.uint8).repeat(64, 1)
    codes = codes % 16 if code == "nf4" else codes - (codes % 128 == 127).to(torch.uint8) * (code == "e4m3")
    scales = torch.logspace(-44, 38, 64, device="cuda")[None].to(FP32)
    weight = replace(made, codes=codes, scales=scales).weight()
    for dtype, name in ((BF16, "bf16"), (FP16, "fp16")):
        found = torch.ops.cutekernels.dequantize(
            weight.packed, weight.scales, None, None, code, 0, 64, 256, 256, name, 0
        )
        assert torch.equal(found, weight.dequantize(FP32).to(dtype))


@on_gpu
@shared
@pytest.mark.parametrize("m", [5, 300])
@pytest.mark.parametrize("kind", [*COMMON.values(), Kind(group=64, zeros=True, order=True)], ids=str)
def test_the_gradient_is_that_of_the_dequantized_weight(kind: Kind, m: int) -> None:
    made = make(1000, K, kind, "cuda")
    x, b, dy = tokens(m, K).requires_grad_(), tokens(1000).requires_grad_(), tokens(m, 1000)
    ck.linear(x, made.weight(), b).backward(dy)
    assert x.grad is not None and b.grad is not None
    dense = made.exact().to(BF16).double()  # the gradient's product reads decoded weights in x's type
    assert error(x.grad, (dy.double() @ dense).to(BF16), 1000) <= 1
    torch.testing.assert_close(b.grad.double(), dy.double().sum(0), rtol=2**-7, atol=1e-2)


@on_gpu
@shared
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("m, n, k", [(64, 8192, 3336), (1, 4096, 8192), (300, 5000, 4104)])
def test_a_gradient_of_several_parts(
    m: int, n: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts, the last narrower, share a workspace: each product reads its own; the same bits every time."""
    monkeypatch.setattr(backward, "MOST_DECODED_BYTES", backward.DECODED_BYTES)  # as of many tokens
    assert len(list(backward.parts(n, k, m, gpu.detect()))) > 1
    made, dy = make(n, k, ASYMMETRIC, "cuda"), tokens(m, n, dtype=dtype)
    weight = made.weight()
    given = weight.packed, weight.scales, weight.zeros, weight.factors, "int4", 64, n, k
    dx = backward.LINEAR_BACKWARD(dy, *given)
    assert error(dx, (dy.double() @ made.exact().to(dtype).double()).to(dtype), n) <= 1
    assert all(torch.equal(backward.LINEAR_BACKWARD(dy, *given), dx) for _ in range(5))
    turned = dy.t().contiguous().t()
    assert error(backward.LINEAR_BACKWARD(turned, *given), dx, n) <= 1


@on_gpu
@shared
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_gradients_through_activations(activation: Any) -> None:
    made = make(1000, K, ASYMMETRIC, "cuda")
    x, dy = tokens(40, K).requires_grad_(), tokens(40, 1000)
    ck.linear(x, made.weight(), activation=activation).backward(dy)
    wide = x.detach().double().requires_grad_()
    z = wide @ made.exact().t()
    (z.relu() if activation == "relu" else torch.nn.functional.silu(z)).backward(dy.double())
    assert x.grad is not None and wide.grad is not None
    distance = (x.grad.double() - wide.grad).norm() / wide.grad.norm()
    assert distance < 0.01, "dz is rounded to bf16 between the slope and the product"


@on_gpu
@shared
def test_a_backward_decodes_no_whole_weight() -> None:
    """QLoRA of many tokens: beside the packed weight there are dx and parts of the weight decoded, of 24 MiB each."""
    n, k, m = 8192, 8192, 4096
    weight = make(n, k, Kind(), "cuda").weight()
    dy = tokens(m, n)
    op = torch.ops.cutekernels.quantized_linear_backward
    given = dy, weight.packed, weight.scales, weight.zeros, weight.factors, weight.code, weight.group, n, k
    op(*given)  # compiles
    used = _memory_of(lambda: op(*given)) - m * k * 2
    assert used < n * k * 2 / 3, f"{used / 1e6:.0f} MB, of a weight of {n * k * 2 / 1e6:.0f} decoded"
