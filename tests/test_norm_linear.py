"""``rms_norm_linear`` and ``linear_silu_mul``: values against fp64, gradients, what they return and refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16 = torch.bfloat16


def randn(*shape: int, device: str = "cpu", dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device, dtype=torch.float32) * scale).to(dtype)


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(11)


def normed(u: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    h = u.double() * torch.rsqrt(u.double().square().mean(-1, keepdim=True) + eps)
    return h if weight is None else h * weight.double()


def unfused(u: Tensor, norm_weight: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What torch's own kernels make of it."""
    return F.linear(F.rms_norm(u, u.shape[-1:], norm_weight.to(u.dtype), eps), weight)


def close(ours: Tensor, exact: Tensor, theirs: Tensor, factor: float = 1.25) -> bool:
    """No further from the truth than ``factor`` times the unfused path."""
    error, bar = ((t.double() - exact).norm() for t in (ours, theirs))
    return bool(error <= factor * bar + 1e-3 * exact.norm() * torch.finfo(ours.dtype).eps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3, 64, 130])
@pytest.mark.parametrize("outliers", [False, True])
def test_values(device: str, rows: int, outliers: bool) -> None:
    x, g, w = randn(2, rows, 264, device=device), randn(264, device=device), randn(136, 264, device=device)
    if outliers:
        x[..., ::53] *= 1e4
    for eps in (1e-6, 1e-12):
        exact = normed(x, g, eps) @ w.double().t()
        y = ck.rms_norm_linear(x, g, w, eps=eps)
        assert isinstance(y, Tensor)
        assert (y.shape, y.dtype) == ((2, rows, 136), BF16)
        assert close(y, exact, unfused(x, g, w, eps))
        folded = ck.rms_norm_linear(x, None, ck.fold(g, w), eps=eps)
        assert isinstance(folded, Tensor)
        assert close(folded, exact, unfused(x, g, w, eps), 1.5)


@pytest.mark.parametrize("device", DEVICES)
def test_residual_rstd_bias_activation_and_out(device: str) -> None:
    x, r, g = randn(5, 128, device=device), randn(5, 128, device=device), randn(128, device=device, dtype=torch.float32)
    w, bias = randn(64, 128, device=device, scale=0.1), randn(64, device=device)
    u = x + r
    exact = F.silu(normed(u, g, 1e-6) @ w.double().t() + bias.double())
    out = torch.full((5, 80), 7.0, device=device, dtype=BF16)
    y, seen = ck.rms_norm_linear(x, g, w, bias, residual=r, activation="silu", out=out[:, :64])
    assert torch.equal(seen, u)
    assert y.data_ptr() == out.data_ptr()
    assert (out[:, 64:] == 7).all()
    torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=2e-2)
    rstd = torch.rsqrt(u.float().square().mean(-1) + 1e-6)
    given, seen = ck.rms_norm_linear(x, g, w, bias, residual=r, rstd=rstd, activation="silu")
    assert torch.equal(seen, u)
    torch.testing.assert_close(given.double(), exact, rtol=2e-2, atol=2e-2)
    doubled = ck.rms_norm_linear(u, g, w, rstd=2 * rstd)
    plain = ck.rms_norm_linear(u, g, w)
    assert isinstance(doubled, Tensor) and isinstance(plain, Tensor)
    assert torch.equal(doubled, 2 * plain) or close(doubled, 2 * plain.double(), 2.01 * plain)


@pytest.mark.parametrize("device", DEVICES)
def test_exact_rounds_where_hugging_face_does(device: str) -> None:
    x, g, w = randn(64, 256, device=device), randn(256, device=device), torch.eye(256, device=device, dtype=BF16)
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    chain = g * (x.float() * rstd).to(BF16)
    y = ck.rms_norm_linear(x, g, w, exact=True)  # an identity shows the operand itself
    given = ck.rms_norm_linear(x, g, w, exact=True, rstd=rstd[:, 0])
    assert isinstance(y, Tensor) and isinstance(given, Tensor)
    assert torch.equal(given, chain)
    assert (y != chain).double().mean() < 1e-3  # statistics summed in another order
    once = ck.rms_norm_linear(x, g, w)
    assert isinstance(once, Tensor)
    assert (once != chain).double().mean() > 0.05


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [False, True])
def test_gate_and_up_in_one_product(device: str, norm: bool) -> None:
    x, g = randn(3, 7, 96, device=device), randn(96, device=device)
    gate, up = randn(40, 96, device=device, scale=0.2), randn(40, 96, device=device, scale=0.2)
    both = torch.cat([gate, up])
    h = normed(x, g, 1e-6) if norm else x.double()
    exact = F.silu(h @ gate.double().t()) * (h @ up.double().t())
    y = ck.linear_silu_mul(x, both, norm_weight=g if norm else None)
    assert (y.shape, y.dtype) == ((3, 7, 40), BF16)
    torch.testing.assert_close(y.double(), exact, rtol=4e-2, atol=4e-2)
    out = torch.empty_like(y)
    assert ck.linear_silu_mul(x, both, norm_weight=g if norm else None, out=out) is out
    assert torch.equal(out, y)
    bare = ck.linear_silu_mul(x, both, norm=True)
    ones = ck.linear_silu_mul(x, both, norm_weight=torch.ones_like(g))
    assert torch.equal(bare, ones)


def test_gradients() -> None:
    double = {"dtype": torch.float64, "requires_grad": True}
    x, r, g = torch.randn(3, 6, **double), torch.randn(3, 6, **double), torch.randn(6, **double)  # type: ignore[arg-type]
    w, b = torch.randn(4, 6, **double), torch.randn(4, **double)  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(
        lambda *t: ck.rms_norm_linear(t[0], t[1], t[2], t[3], activation="silu"), (x, g, w, b)
    )
    assert torch.autograd.gradcheck(lambda *t: ck.rms_norm_linear(t[0], t[2], t[3], residual=t[1]), (x, r, g, w))
    assert torch.autograd.gradcheck(lambda *t: ck.linear_silu_mul(t[0], t[1], norm_weight=t[2]), (x, w, g))


@pytest.mark.gpu
def test_gradients_on_a_gpu() -> None:
    x, g, w = randn(40, 256, device="cuda"), randn(256, device="cuda"), randn(128, 256, device="cuda", scale=0.1)
    grads = []
    for wide in (False, True):
        leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in (x, g, w)]
        if wide:
            y: Any = F.linear(F.rms_norm(leaves[0], (256,), leaves[1], 1e-6), leaves[2])
        else:
            y = ck.rms_norm_linear(*leaves)
        (y * torch.arange(128, device="cuda")).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, truth in zip(*grads, strict=True):
        assert (ours.double() - truth).norm() <= 2e-2 * truth.norm()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_traced_whole(device: str) -> None:
    x, r, g = randn(4, 64, device=device), randn(4, 64, device=device), randn(64, device=device)
    w = randn(32, 64, device=device)

    @torch.compile(fullgraph=True, backend="eager")
    def block(x: Tensor, r: Tensor) -> Tensor:
        y, u = ck.rms_norm_linear(x, g, w, residual=r)
        return ck.linear_silu_mul(u, w, norm_weight=g) + y.sum()

    y, u = ck.rms_norm_linear(x, g, w, residual=r)
    torch.testing.assert_close(block(x, r), ck.linear_silu_mul(u, w, norm_weight=g) + y.sum())


def test_refusals() -> None:
    x, g, w = randn(4, 64), randn(64), randn(32, 64)
    for call, said in (
        (lambda: ck.rms_norm_linear(x, g, w.t()), "weight .N, K."),
        (lambda: ck.rms_norm_linear(x, g[:32], w), "norm_weight must be"),
        (lambda: ck.rms_norm_linear(x, g, w, rstd=torch.ones(3)), "rstd must be"),
        (lambda: ck.rms_norm_linear(x, g, w, rstd=torch.ones(4, dtype=BF16)), "rstd must be"),
        (lambda: ck.rms_norm_linear(x, g, w, residual=x[:2], rstd=torch.ones(4)), "residual must have"),
        (lambda: ck.rms_norm_linear(x, g, w, residual=x[:2]), "one shape"),
        (lambda: ck.rms_norm_linear(x, g, w, activation="tanh"), "activation must be"),
        (lambda: ck.linear_silu_mul(x, w[:31]), "2 . I"),
        (lambda: ck.linear_silu_mul(x, w, norm_weight=g, norm=False), "norm=False"),
        (lambda: ck.fold(g[:3], w), "norm_weight must be"),
    ):
        with pytest.raises(UnsupportedProblem, match=said):
            call()
