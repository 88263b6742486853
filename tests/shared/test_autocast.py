"""Under autocast our functions give what torch's own give: types of results and gradients, and values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutekernels as ck
from cutekernels import nn
from cutekernels.ops.shared import paths
from tests.host_cost import direct_anywhere

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
Pair = tuple[Callable[..., Any], Callable[..., Any]]


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*[t.transpose(1, 2) for t in (q, k, v)]).transpose(1, 2)


def _chain(x: Tensor, norm_weight: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, x.shape[-1:], norm_weight, 1e-6), weight)


def _gated(x: Tensor, w_gate_up: Tensor) -> Tensor:
    gate, up = F.linear(x, w_gate_up).chunk(2, -1)
    return F.silu(gate) * up


PAIRS: dict[str, tuple[Pair, tuple[tuple[int, ...], ...]]] = {
    "gemm": ((ck.gemm, torch.mm), ((6, 8), (8, 16))),
    "linear": ((ck.linear, F.linear), ((2, 3, 8), (16, 8), (16,))),
    "rms_norm_linear": ((ck.rms_norm_linear, _chain), ((6, 8), (8,), (16, 8))),
    "rms_norm_linear, a chain": ((ck.rms_norm_linear, _chain), ((200, 8), (8,), (16, 8))),
    "linear_silu_mul": ((ck.linear_silu_mul, _gated), ((6, 8), (16, 8))),
    "attention": ((ck.attention, _sdpa), ((2, 4, 2, 8), (2, 4, 2, 8), (2, 4, 2, 8))),
    "rms_norm": ((ck.rms_norm, lambda x, w: F.rms_norm(x, (8,), w, 1e-6)), ((6, 8), (8,))),
    "layer_norm": ((ck.layer_norm, lambda x, w, b: F.layer_norm(x, (8,), w, b)), ((6, 8), (8,), (8,))),
    "silu_mul": ((ck.silu_mul, lambda gate, up: F.silu(gate) * up), ((6, 8), (6, 8))),
    "bias_gelu": ((ck.bias_gelu, lambda x, b: F.gelu(x + b)), ((6, 8), (8,))),
    "embedding": ((lambda t: ck.embedding(torch.tensor([1, 2]), t), lambda t: F.embedding(torch.tensor([1, 2]), t)),
                  ((6, 8),)),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_results_and_gradients_are_torchs(name: str) -> None:
    for into, dtype, grad in product((BF16, FP16), (FP32, BF16, FP64), (False, True)):
        (ours, theirs), shapes = PAIRS[name]
        found = []
        for function in (ours, theirs):
            torch.manual_seed(0)
            given = [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]
            with torch.autocast("cpu", into):
                y = function(*given)
            if grad:
                y.float().square().sum().backward()
            found.append((y, [t.grad for t in given]))
        (y, grads), (wanted, their_grads) = found
        assert y.dtype == wanted.dtype, (into, dtype)
        assert [t is None or t.dtype for t in grads] == [t is None or t.dtype for t in their_grads]
        near: dict[str, Any] = {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(y, wanted, **near)
        if grad:
            scale = max(float(t.abs().max()) for t in their_grads if t is not None)
            torch.testing.assert_close(grads, their_grads, rtol=0.05, atol=0.05 * scale)


def test_decode_attention_casts_the_cache_and_no_lengths() -> None:
    cache = torch.randn(2, 16, 2, 8)
    with torch.autocast("cpu", BF16):
        y = ck.decode_attention(torch.randn(2, 4, 8), cache, cache, torch.tensor([3, 4], dtype=torch.int32))
    assert y.dtype == BF16


@pytest.mark.parametrize("x", [FP32, BF16])
def test_a_residual_stream_stays_in_its_type(x: torch.dtype) -> None:
    rows, residual, weight = torch.randn(4, 8).to(x), torch.randn(4, 8), torch.randn(8)
    with torch.autocast("cpu", BF16):
        y, u = ck.add_rms_norm(rows, residual, weight)
        wanted = F.rms_norm(rows + residual, (8,), weight, 1e-6)
        assert ck.rms_norm_linear(rows, weight, torch.randn(16, 8), residual=residual)[0].dtype == BF16  # type: ignore[index]
    assert (y.dtype, u.dtype) == (wanted.dtype, FP32)
    torch.testing.assert_close(y, wanted)


def test_out_is_not_cast_as_torchs_is_not() -> None:
    x, w = torch.randn(6, 8), torch.randn(8, 8)
    with torch.autocast("cpu", BF16):
        wanted = torch.mm(x, w, out=torch.empty(6, 8))
        torch.testing.assert_close(ck.gemm(x, w, out=torch.empty(6, 8)), wanted, rtol=1e-6, atol=1e-5)
        apart = torch.empty(2, 8, 3).permute(0, 2, 1)
        assert ck.linear(x.view(2, 3, 8), w.t(), out=apart) is apart
        for rows in (x, x.repeat(50, 1)):
            y = ck.rms_norm_linear(rows, w[0], w, out=torch.empty(len(rows), 8))
            assert isinstance(y, Tensor) and y.dtype == FP32
            ck.linear_silu_mul(rows, w, norm_weight=w[0], out=torch.empty(len(rows), 4))
    torch.testing.assert_close(apart.reshape(6, 8), wanted, rtol=1e-6, atol=1e-5)


def test_modules_follow() -> None:
    x = torch.randn(4, 8)
    with torch.autocast("cpu", BF16):
        assert nn.SwiGLU(8, 16)(x).dtype == BF16
        assert nn.RMSNorm(8)(x).dtype == torch.nn.RMSNorm(8)(x).dtype
        assert nn.LayerNorm(8)(x).dtype == torch.nn.LayerNorm(8)(x).dtype


def test_what_goes_without_torch_sees_autocast() -> None:
    x = torch.randn(4, 8)
    guard = paths.guard_of([x])
    assert guard(x) and direct_anywhere()(x)
    with torch.autocast("cpu", BF16):
        assert not guard(x)  # so that no call is replayed
        assert not direct_anywhere()(x)
        with torch.autocast("cpu", enabled=False):
            assert guard(x)


def test_norms_go_to_fp32_on_cuda() -> None:
    """The rule alone, on fakes: torch's own rms_norm and layer_norm are in CUDA autocast's list of fp32."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, 8, dtype=BF16, device="cuda")
        torch.set_autocast_enabled("cuda", True)  # torch.autocast refuses where there is no GPU
        torch.set_autocast_dtype("cuda", FP16)
        try:
            assert torch.ops.cutekernels.rms_norm(x, None, "once", False, 1e-6, 0.0).dtype == FP32
            assert torch.ops.cutekernels.layer_norm(x, None, None, 1e-5).dtype == FP32
            y, u = torch.ops.cutekernels.add_rms_norm(x, x, None, "once", False, 1e-6, 0.0)
            assert (y.dtype, u.dtype) == (FP32, BF16)
            assert torch.ops.cutekernels.gemm(x, x.t(), None, None).dtype == FP16
            assert torch.ops.cutekernels.silu_mul(x, x).dtype == BF16
        finally:
            torch.set_autocast_enabled("cuda", False)
