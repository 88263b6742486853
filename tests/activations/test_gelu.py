"""``gelu_mul``, ``bias_gelu`` and packed gates without a GPU: interpreted kernels, declarations, CPU and call path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from cutekernels.errors import InvalidConfig
from cutekernels.ops.activations.api import JOINED, bias_gelu, gelu_mul, silu_mul
from cutekernels.ops.activations.op import (
    BIAS_GELU,
    BIAS_GELU_BACKWARD,
    GELU_MUL,
    SILU_MUL_BACKWARD,
    BiasGeluProblem,
)
from cutekernels.ops.shared import calls
from tests.activations import gelu_cases
from tests.activations.gelu_cases import APPROXIMATE, CASES, PLANTED, SPECIAL, VALUES
from tests.activations.silu_mul_cases import DTYPES
from tests.compiled import H200
from tests.interpreted import kernel_tests, of_each_dtype
from tests.refusals import Calls, refused

# ---- kernels, interpreted -------------------------------------------------------------------------------


interpreted, test_kernel_numerics, test_a_planted_bug_is_caught = kernel_tests(
    gelu_cases.__file__, CASES, PLANTED, SPECIAL
)


def test_every_layout_was_among_the_cases(interpreted: dict[str, dict[str, Any]]) -> None:
    problems = [BiasGeluProblem.parse(interpreted[c]["problem"]) for c in CASES if c.startswith("bias_gelu")]
    assert {(p.layout, p.bias, p.approximate) for p in problems} == {
        (layout, bias, approximate)
        for layout in ("rows", "strided")
        for bias in ("same", "fp32")
        for approximate in APPROXIMATE
    }
    assert {p.align for p in problems if p.layout == "rows"} == {2, 4, 8, 16}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_values_are_torch_s(interpreted: dict[str, dict[str, Any]], case: str) -> None:
    """NaN and infinities come out as from ``F.gelu`` on a GPU: -inf * 0 is NaN."""
    x = torch.tensor([float(v) for v in VALUES], dtype=DTYPES[SPECIAL[case]["dtype"]]).float()
    expected = F.gelu(x, approximate=SPECIAL[case]["approximate"])
    expected[1] = torch.inf  # F.gelu of inf is NaN on a CPU, since its vectorized erf is
    actual = torch.tensor([float(v) for v in interpreted[case]["results"]])
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.isinf(), expected.isinf())
    tolerance = 2.0**-7 if "bf16" in case else 2.0**-20
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=2.0**-20, equal_nan=True)


# ---- the declarations -----------------------------------------------------------------------------------


def test_a_slab_is_no_shorter_than_a_tile() -> None:
    problem = BiasGeluProblem(64, 4096)
    with pytest.raises(InvalidConfig, match="slabs of 8 rows"):
        BIAS_GELU_BACKWARD.check(
            problem, BIAS_GELU_BACKWARD.Config.parse("block_rows=16 block_cols=256 warps=4 evict=normal"), H200
        )


def test_work_is_what_must_be_moved() -> None:
    assert BIAS_GELU.work(BiasGeluProblem(2048, 4096, bias="fp32")).bytes == 2 * 2 * 2048 * 4096 + 4 * 4096
    assert BIAS_GELU_BACKWARD.work(BiasGeluProblem(2048, 4096)).bytes == 3 * 2 * 2048 * 4096 + 2 * 4096 + 64 * 4 * 4096


# ---- the functions, on the CPU --------------------------------------------------------------------------


@pytest.mark.parametrize("approximate", APPROXIMATE)
@of_each_dtype
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 4), (0, 4), (4, 0)], ids=str)
def test_cpu_tensors_run_the_reference(dtype: torch.dtype, shape: tuple[int, ...], approximate: str) -> None:
    x, up = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    bias = torch.randn(shape[-1:]).to(dtype)
    expected = (F.gelu(x.double(), approximate=approximate) * up.double()).to(dtype)
    torch.testing.assert_close(gelu_mul(x, up, approximate=approximate), expected)
    expected = F.gelu(x.double() + bias.double(), approximate=approximate).to(dtype)
    torch.testing.assert_close(bias_gelu(x, bias, approximate=approximate), expected)
    out = torch.empty_like(x)
    assert bias_gelu(x, bias, approximate=approximate, out=out) is out
    torch.testing.assert_close(out, expected)
    if dtype is not torch.float64:
        torch.testing.assert_close(bias_gelu(x, bias.float(), approximate=approximate), expected)


GATED: list[Callable[..., Tensor]] = [silu_mul, gelu_mul, lambda *t, **o: gelu_mul(*t, approximate="tanh", **o)]


@pytest.mark.parametrize("function", GATED)
def test_packed_is_two_halves(function: Callable[..., Tensor]) -> None:
    packed = torch.randn(3, 5, 12, requires_grad=True)
    gate, up = (t.detach().requires_grad_() for t in packed.chunk(2, dim=-1))
    out, expected = function(packed), function(gate, up)
    assert torch.equal(out, expected)
    assert out.is_contiguous()
    out.sum().backward()
    expected.sum().backward()
    assert packed.grad is not None
    assert torch.equal(packed.grad, torch.cat([gate.grad, up.grad], dim=-1))  # type: ignore[list-item]
    place = torch.empty(3, 5, 6)
    with torch.no_grad():
        assert function(packed, out=place) is place
    assert torch.equal(place, out.detach())


@refused
def test_refusals_say_the_rule() -> Calls:
    x, bias = torch.randn(4, 6), torch.randn(6)
    return {
        "approximate must be one of none, tanh; it is 'erf'": lambda: gelu_mul(x, x, approximate="erf"),
        "must be one of none, tanh; it is 'sigmoid'": lambda: bias_gelu(x, bias, approximate="sigmoid"),
        "side by side; got .3, 5.": lambda: silu_mul(torch.randn(3, 5)),
        r"side by side; got \(\)": lambda: gelu_mul(torch.randn(())),
        r"out must be \(4, 6\).* it is \(4, 12\)": lambda: silu_mul(torch.randn(4, 12), out=torch.empty(4, 12)),
        "not differentiable": lambda: silu_mul(torch.randn(4, 12, requires_grad=True), out=torch.empty(4, 6)),
        "element upon element": lambda: silu_mul(w := torch.randn(4, 12), out=w[:, 3:9]),
        "got torch.complex64": lambda: gelu_mul(torch.randn(4, 6).cfloat()),
        r"bias \(cols,\), each extent .* got x \(4, 6\), bias \(4,\)": lambda: bias_gelu(x, bias[:4]),
        r"got x \(4, 6\), bias \(1, 6\)": lambda: bias_gelu(x, bias[None]),
        "takes bias in float32; got torch.float64": lambda: bias_gelu(x, bias.double()),
        "got torch.float16: convert it": lambda: bias_gelu(x.bfloat16(), bias.half()),
        "takes .*; got torch.int32": lambda: bias_gelu(x.int(), bias.int()),
        r"out must be \(4, 6\).* it is \(6, 4\)": lambda: bias_gelu(x, bias, out=torch.empty(6, 4)),
        "overlap itself": lambda: bias_gelu(x, bias, out=torch.empty(6).expand(4, 6)),
        "overlaps an operand other than element upon element": lambda: bias_gelu(x, x[0], out=x),
        "out= is not differentiable": lambda: bias_gelu(x, bias.clone().requires_grad_(), out=torch.empty(4, 6)),
    }


@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_gradients(approximate: str) -> None:
    x, up = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *t: gelu_mul(*t, approximate=approximate), (x, up))
    assert torch.autograd.gradcheck(lambda t: gelu_mul(t, approximate=approximate), (x,))
    assert torch.autograd.gradcheck(silu_mul, (x,))
    assert torch.autograd.gradcheck(lambda *t: bias_gelu(*t, approximate=approximate), (x, bias))
    assert torch.autograd.gradcheck(lambda *t: bias_gelu(*t, approximate=approximate), (x.detach(), bias))
    many = torch.randn(300, 4, dtype=torch.float64, requires_grad=True)  # several slabs
    (found,) = torch.autograd.grad(bias_gelu(many, bias, approximate=approximate).sum(), bias)
    (expected,) = torch.autograd.grad(F.gelu(many + bias, approximate=approximate).sum(), bias)
    torch.testing.assert_close(found, expected)
    half = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    (found,) = torch.autograd.grad(bias_gelu(many.bfloat16(), half).sum(), half)
    assert found.dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    ops, x, bias = torch.ops.cutekernels, torch.randn(4, 6), torch.randn(6)
    for gradient in (False, True):
        a, b = x.clone().requires_grad_(gradient), bias.clone().requires_grad_(gradient)
        torch.library.opcheck(ops.gelu_mul.default, (a, x, "tanh"))
        torch.library.opcheck(ops.silu_mul_packed.default, (a,))
        torch.library.opcheck(ops.gelu_mul_packed.default, (a, "none"))
        torch.library.opcheck(ops.bias_gelu.default, (a, b, "none"))
    torch.library.opcheck(ops.gelu_mul_out.default, (x, x, torch.empty(4, 6), "none"))
    torch.library.opcheck(ops.gelu_mul_backward.default, (x, x, x, "none"))
    torch.library.opcheck(ops.silu_mul_packed_backward.default, (x[:, :3], x))
    torch.library.opcheck(ops.gelu_mul_packed_backward.default, (x[:, 3:], x, "tanh"))
    torch.library.opcheck(ops.bias_gelu_out.default, (x, bias, torch.empty(4, 6), "tanh"))
    torch.library.opcheck(ops.bias_gelu_backward.default, (x, x, bias, "none"))


# ---- the GPU's path, on CPU tensors ---------------------------------------------------------------------


def test_launches_pose_what_they_launch(launches: list[str]) -> None:
    x, bias = torch.randn(2, 300, 8, dtype=torch.bfloat16), torch.randn(8)
    expected = bias_gelu(x, bias, approximate="tanh")
    (out,) = calls.run(BIAS_GELU, None, (x, bias), options=("tanh",))
    assert torch.equal(out, expected)
    dx, partials = calls.run(BIAS_GELU_BACKWARD, None, (x[:1].expand(2, 300, 8), x, bias), options=("none",))
    assert (dx.shape, partials.shape) == (x.shape, (19, 8))
    calls.run(BIAS_GELU, None, (x[..., ::2], bias[::2]), options=("none",))
    calls.run(GELU_MUL, None, (x, x), options=("none",))
    calls.run(GELU_MUL, None, (x, x), options=("tanh",))
    calls.run(BIAS_GELU_BACKWARD, None, (x[:0], x[:0], bias), options=("none",))
    assert launches == [
        "bias_gelu rows=600 cols=8 bias=fp32 approximate=tanh",
        "bias_gelu_backward rows=600 cols=8 bias=fp32",
        "bias_gelu rows=600 cols=4 layout=strided bias=fp32",
        "gelu_mul rows=600 cols=8",
        "gelu_mul rows=600 cols=8 approximate=tanh",
    ]


def test_a_packed_gradient_is_written_in_halves(launches: list[str]) -> None:
    packed, dout = torch.randn(6, 16), torch.randn(6, 8)
    place = torch.empty_like(packed)
    halves = place.chunk(2, dim=-1)
    calls.run(SILU_MUL_BACKWARD, (halves[0], halves[1]), (dout, *packed.chunk(2, dim=-1)))
    assert torch.equal(place, torch.ops.cutekernels.silu_mul_packed_backward(dout, packed))
    assert launches == ["silu_mul_backward rows=6 cols=8 dtype=fp32 layout=rows"]


def test_a_packed_call_repeats_the_launch_of_its_halves(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = JOINED["silu_mul"]
    monkeypatch.setattr(path, "_cpu", path._gpu)
    monkeypatch.setattr(path, "_differentiated_on_cpu", path.differentiated)
    for gradients in (False, False, True, True):
        packed = torch.randn(3, 5, 12, requires_grad=True)
        with torch.set_grad_enabled(gradients):
            out = silu_mul(packed)
        gate, up = (t.detach().requires_grad_() for t in packed.chunk(2, dim=-1))
        expected = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(out, expected)
        assert (out.grad_fn is not None) is gradients
        if gradients:
            (found,) = torch.autograd.grad(out.sum(), packed)
            torch.testing.assert_close(found, torch.cat(torch.autograd.grad(expected.sum(), (gate, up)), dim=-1))
    assert launches == ["silu_mul rows=15 cols=6 dtype=fp32 layout=rows align=8"] * 4
    assert len(calls.calls) == 1
