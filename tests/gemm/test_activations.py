"""The table of activations on a CPU: what kernels compute, what torch does, and the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels import activations
from cutekernels.kernels.activations import ACTIVATIONS, KERNELS, TABLE, Row
from cutekernels.ops.products.gradients import through_activation
from cutekernels.ops.products.grouped_api import clamped_swiglu


class Tensors:
    """The operations that activations are written over, on tensors; ``Registers`` has them for kernels."""

    where, full_like, exp, precise_exp = torch.where, torch.full_like, torch.exp, torch.exp
    erf, tanh, reciprocal = torch.erf, torch.tanh, torch.reciprocal


def arguments() -> Tensor:
    """From -12 to 12, and what overflows, vanishes or is no number, in fp64."""
    odd = [0.0, 1e-30, -1e-30, 60.0, -60.0, 1e4, -1e4, float("nan")]
    return torch.cat((torch.linspace(-12, 12, 4801, dtype=torch.float64), torch.tensor(odd, dtype=torch.float64)))


def wrong(row: Row, kernel: Callable[[Any, Any], Any]) -> list[str]:
    """Where ``kernel`` and the gradient of ``row`` are not ``row.torch`` and its derivative."""
    x = arguments().requires_grad_()
    expected = row.torch(x)
    found = []
    if not torch.allclose(kernel(Tensors, x), expected, rtol=1e-12, atol=1e-12, equal_nan=True):
        found.append("kernel")
    half = kernel(Tensors, x.detach().float())
    if not torch.allclose(half.double(), expected, rtol=1e-5, atol=2e-6, equal_nan=True):
        found.append("kernel in fp32")
    if row.gradient is not None:
        x = arguments()[:-1].requires_grad_()
        expected = row.torch(x)
        z = expected if row.of_value else x
        (slope,) = torch.autograd.grad(expected.sum(), x)
        if not torch.allclose(row.gradient(torch.ones_like(x), z.detach()), slope, rtol=1e-12, atol=1e-12):
            found.append("gradient")
    return found


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kernels_compute_what_torch_does_and_gradients_are_its_derivative(name: str) -> None:
    row = TABLE[name]
    for kernel in (row.kernel, *row.variants.values()):
        assert not wrong(row, kernel)


def test_the_table_has_every_name_and_bodies_call_nothing_else() -> None:
    assert tuple(TABLE) == ACTIVATIONS
    assert KERNELS.keys() == {*TABLE, "silu_approx", "silu_precise"}


@pytest.mark.parametrize("function", [ck.gemm, ck.linear, ck.rms_norm_linear, ck.grouped_gemm])
def test_docstrings_name_all(function: Callable[..., Tensor]) -> None:
    names = " | ".join(f'"{name}"' for name in ACTIVATIONS if name != "none")
    assert f"activation: ``{names}``; None for identity" in str(function.__doc__)


def leaky(slope: float) -> Callable[[Any, Any], Any]:
    return lambda f, x: f.where(x < 0.0, slope * x, x)


def leaky_relu(slope: float, torchs: float, gradients: float) -> Row:
    """An activation of three slopes, which should be one."""

    def gradient(grad: Tensor, z: Tensor) -> Tensor:
        return grad.where(z > 0, gradients * grad)

    return Row(leaky(slope), lambda x: torch.nn.functional.leaky_relu(x, torchs), gradient, of_value=True)


def test_a_planted_slope_is_caught() -> None:
    for slopes, message in (
        ((0.1, 0.1, 0.1), []),
        ((0.3, 0.1, 0.1), ["kernel", "kernel in fp32"]),
        ((0.1, 0.01, 0.1), ["kernel", "kernel in fp32", "gradient"]),
        ((0.1, 0.1, 0.3), ["gradient"]),
    ):
        row = leaky_relu(*slopes)
        assert wrong(row, row.kernel) == message
    swapped = {"erf": Tensors.tanh, "tanh": Tensors.erf}
    with pytest.MonkeyPatch.context() as patch:
        for name, other in swapped.items():
            patch.setattr(Tensors, name, staticmethod(other))
        assert wrong(TABLE["gelu"], activations.gelu) and wrong(TABLE["gelu_tanh"], activations.gelu_tanh)


def test_kernels_call_the_table_over_the_operations_of_the_same_names() -> None:
    """On values that record what is done to them: ``Activation.apply`` is the function of the table."""
    from cutlass import cute

    from cutekernels.kernels.cute.parts.epilogue import Activation, Registers

    names = {name for name in vars(Tensors) if not name.startswith("_")}
    assert names == {name for name in vars(Registers) if not name.startswith("_")}
    assert (Registers.where, Registers.full_like) == (cute.where, cute.full_like)
    assert (Registers.erf, Registers.tanh, Registers.precise_exp) == (cute.math.erf, cute.math.tanh, cute.math.exp)
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            patch.setitem(KERNELS, name, lambda f, x, name=name: (name, f, x))
            assert Activation(name).apply("x") == (name, Registers, "x")  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize("alpha", [1.702, 0.7])
def test_the_clamped_gate_is_torch_s(alpha: float) -> None:
    gate, up = torch.meshgrid(arguments()[::97], arguments()[::89], indexing="ij")
    expected = clamped_swiglu(torch.cat((gate, up), dim=-1), alpha, 7.0)
    for gates, ups in ((gate, up), (gate * 2, up * 3)):
        expected = clamped_swiglu(torch.cat((gates, ups), dim=-1), alpha, 7.0)
        found = activations.clamped_gate(Tensors, gates, ups, alpha, 7.0)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    halved = activations.clamped_gate(Tensors, gate, up, alpha, 3.5)
    assert not torch.allclose(halved, clamped_swiglu(torch.cat((gate, up), -1), alpha, 7.0), equal_nan=True)


# ---- gradients ------------------------------------------------------------------------------------------


@contextmanager
def replaced(name: str, row: Row) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TABLE, name, row)
        yield


def calls() -> dict[str, Callable[[Tensor], Tensor]]:
    """Every function with an activation, of tokens (6, 64)."""
    weight, offsets = torch.randn(64, 64), torch.tensor([0, 2, 6], dtype=torch.int32)
    packed = ck.quant.quantize(weight, "int4_g64")
    return {
        "gemm": lambda x: ck.gemm(x, weight, activation="relu"),
        "linear": lambda x: ck.linear(x, weight, activation="relu"),
        "packed linear": lambda x: ck.linear(x.half(), packed, activation="relu"),
        "rms_norm_linear": lambda x: ck.rms_norm_linear(x, None, weight, activation="relu"),
        "grouped_gemm": lambda x: ck.grouped_gemm(x, torch.stack((weight, weight)), offsets, activation="relu"),
        "packed grouped_gemm": lambda x: ck.grouped_gemm(
            x.half(), ck.quant.stack([packed, packed]), offsets, activation="relu"
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_an_activation_without_a_gradient_says_so_before_the_forward_returns(name: str) -> None:
    call, x = calls()[name], torch.randn(6, 64)
    with replaced("relu", replace(TABLE["relu"], gradient=None)):
        call(x)
        x.requires_grad_()
        with torch.no_grad():
            call(x)
        with pytest.raises(UnsupportedProblem, match="activation='relu' has no gradient: call under torch.no_grad"):
            call(x)
        with pytest.raises(UnsupportedProblem, match="has no gradient"):
            through_activation(x, x, "relu")


@pytest.mark.parametrize("name", calls())
def test_a_gradient_that_reads_the_value_gets_it(name: str) -> None:
    """The value serves relu; a row that reads ``z`` gives the same, after another product."""
    call, x = calls()[name], torch.randn(6, 64).requires_grad_()
    (own,) = torch.autograd.grad(call(x).sum(), x)
    with replaced("relu", replace(TABLE["relu"], of_value=False)):
        (other,) = torch.autograd.grad(call(x).sum(), x)
    assert torch.equal(own, other)
