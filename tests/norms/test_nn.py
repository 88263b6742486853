"""``cutekernels.nn.RMSNorm`` and ``LayerNorm``: state dicts, results and gradients beside their twins', on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cutekernels import nn
from cutekernels.errors import UnsupportedProblem


class LlamaRMSNorm(torch.nn.Module):
    """A twin of Hugging Face's module: the same state dict, roundings in the same order."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


@pytest.mark.parametrize("twin", [LlamaRMSNorm(96), torch.nn.RMSNorm(96, 1e-6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_takes_its_twin_s_place(twin: torch.nn.Module, dtype: torch.dtype) -> None:
    twin = twin.to(dtype)
    torch.nn.init.normal_(twin.get_parameter("weight"))
    ours = nn.RMSNorm(96, 1e-6, rounding="huggingface", dtype=dtype)
    assert list(ours.state_dict()) == list(twin.state_dict()) == ["weight"]
    ours.load_state_dict(twin.state_dict())
    twin.load_state_dict(ours.state_dict())
    assert ours.eps == ours.variance_epsilon == 1e-6
    x = torch.randn(2, 5, 96).to(dtype)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = twin(a), ours(b)
    if isinstance(twin, LlamaRMSNorm) and dtype == torch.bfloat16:
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    found.backward(dy)
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-5
    for t, u in ((a.grad, b.grad), (twin.get_parameter("weight").grad, ours.get_parameter("weight").grad)):
        torch.testing.assert_close(u, t, rtol=tolerance, atol=tolerance)
    twin.zero_grad()


X = torch.randn(2, 5, 16)
SHAPES = [16, [16], (16,), X.shape[-1:]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arguments_are_those_of_the_twin(shape: Any) -> None:
    """By place and by name, with torch's eps for None."""
    for args, options in (
        ((shape,), {"eps": None}),
        ((shape, None, False), {}),
        ((shape, 1e-3, True, "cpu", torch.float64), {}),
        ((), {"normalized_shape": shape, "eps": 1e-3, "device": "meta"}),
    ):
        ours, twin = nn.RMSNorm(*args, **options), torch.nn.RMSNorm(*args, **options)
        assert repr(ours) == repr(twin) and (ours.eps, ours.normalized_shape) == (twin.eps, twin.normalized_shape)
        assert (ours.weight is None) == (twin.weight is None)
        for a, b in zip(ours.parameters(), twin.parameters(), strict=True):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    assert nn.RMSNorm(hidden_size=16).eps == 1e-6, "Hugging Face's name and default"
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = (X * 1e-4).to(dtype)
        ours, twin = nn.RMSNorm(shape, None, dtype=dtype), torch.nn.RMSNorm(shape, None, dtype=dtype)
        torch.testing.assert_close(ours(x), twin(x))
        torch.testing.assert_close(ours(x, x)[0], twin(x + x))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"hidden_size": (3, 16)}, r"hidden_size as the length of the last dimension; got \(3, 16\): flatten"),
        ({"normalized_shape": []}, r"normalized_shape as the length of the last dimension; got \[\]"),
        (
            {"normalized_shape": 16, "hidden_size": 16},
            "either hidden_size or normalized_shape; got 16 and 16: pass one",
        ),
        ({}, "got None and None: pass one"),
        ({"normalized_shape": [2.0]}, r"normalized_shape as a whole number from 1 to .*; got 2\.0"),
    ],
)
def test_shapes_of_no_row_are_refused(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rule):
        nn.RMSNorm(**options)


def test_a_residual_gives_a_pair() -> None:
    norm, x, r = nn.RMSNorm(16), torch.randn(3, 16), torch.randn(3, 16)
    torch.nn.init.normal_(norm.get_parameter("weight"))
    y, u = norm(x, r)
    assert torch.equal(u, x + r)
    assert torch.equal(y, norm(u))


def test_weights_of_each_head_and_weights_less_one() -> None:
    norm, x = nn.RMSNorm(16, heads=4), torch.randn(2, 3, 4, 16)
    assert norm.get_parameter("weight").shape == (4, 16)
    assert torch.equal(norm(x), nn.RMSNorm(16)(x))
    gemma = nn.RMSNorm(16, weight_offset=1.0)
    assert (gemma.get_parameter("weight") == 0).all()
    assert torch.equal(gemma(x), nn.RMSNorm(16)(x))
    bare = nn.RMSNorm(16, elementwise_affine=False)
    assert torch.equal(bare(x), nn.RMSNorm(16)(x))
    assert list(bare.state_dict()) == []
    assert "elementwise_affine=False" in repr(bare)
    with pytest.raises(UnsupportedProblem, match="each extent the same"):
        norm(torch.randn(2, 3, 16))


@pytest.mark.parametrize("shape", [(16,), (3, 16)])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 1e-2}])
def test_layer_norm_takes_its_twin_s_place(shape: tuple[int, ...], options: dict[str, bool]) -> None:
    twin, ours = torch.nn.LayerNorm(shape, **options), nn.LayerNorm(shape, **options)  # type: ignore[arg-type]
    for parameter in twin.parameters():
        torch.nn.init.normal_(parameter)
    assert list(ours.state_dict()) == list(twin.state_dict())
    ours.load_state_dict(twin.state_dict())
    assert repr(ours) == repr(twin)
    x = torch.randn(2, 4, 3, 16)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = twin(a), ours(b)
    torch.testing.assert_close(found, expected)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    found.backward(dy)
    torch.testing.assert_close(b.grad, a.grad)
    for t, u in zip(twin.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(u.grad, t.grad)
    with pytest.raises((ValueError, UnsupportedProblem)):
        ours(torch.randn(2, 15))
