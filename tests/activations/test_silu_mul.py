"""``silu_mul`` without a GPU: kernels under Triton's interpreter, the declaration, the CPU path, the call path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.activations.api import silu_mul
from cutekernels.ops.activations.op import SILU_MUL, SILU_MUL_BACKWARD, GluProblem
from cutekernels.ops.shared import calls
from tests.activations import silu_mul_cases
from tests.activations.silu_mul_cases import (
    AT_THE_ROOT,
    CASES,
    DTYPES,
    OPS,
    PLANTED,
    ROOT,
    SPECIAL,
    VALUES,
    error_ratio,
    truth,
)
from tests.compiled import H200
from tests.interpreted import kernel_tests, of_each_dtype
from tests.refusals import Calls, refused

# ---- kernels, interpreted -------------------------------------------------------------------------------


interpreted, test_kernel_numerics, test_a_planted_bug_is_caught = kernel_tests(
    silu_mul_cases.__file__, CASES, PLANTED, SPECIAL | AT_THE_ROOT
)


def test_every_layout_was_among_the_cases(interpreted: dict[str, dict[str, Any]]) -> None:
    problems = [GluProblem.parse(interpreted[case]["problem"]) for case in CASES]
    assert {p.layout for p in problems} == {"dense", "rows", "strided"}
    assert {p.align for p in problems if p.layout != "strided"} == {2, 4, 8, 16}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_values_are_torch_s(interpreted: dict[str, dict[str, Any]], case: str) -> None:
    """NaN, infinities and signed zeros come out as from ``F.silu`` in fp32."""
    gate = torch.tensor([float(v) for v in VALUES], dtype=DTYPES[SPECIAL[case]["dtype"]]).float().requires_grad_()
    silu = torch.nn.functional.silu(gate)
    if SPECIAL[case]["op"] == "silu_mul":
        expected = [silu.detach()]
    else:
        silu.sum().backward()
        assert gate.grad is not None
        # torch has no value of its own for silu at inf as a factor; dup is silu(gate) as s * gate.
        expected = [gate.grad, (gate * torch.sigmoid(gate)).detach()]
    for got, want in zip(interpreted[case]["results"], expected, strict=True):
        actual = torch.tensor([float(v) for v in got])
        tolerance = 2.0**-7 if "bf16" in case else 2.0**-20
        torch.testing.assert_close(actual, want, rtol=tolerance, atol=1e-37, equal_nan=True)
        assert torch.equal(actual.signbit() | actual.isnan(), want.signbit() | want.isnan())


def test_gradient_is_exact_around_its_zero(interpreted: dict[str, dict[str, Any]]) -> None:
    """Near gate = -1.278 terms of size 1 cancel: the naive 1 + g * (1 - s) is off by 2e-8 there."""
    gate = torch.tensor([float(v) for v in ROOT])
    exact = truth("silu_mul_backward", [torch.ones_like(gate), gate, torch.ones_like(gate)])[0][0]
    actual = torch.tensor([float(v) for v in interpreted["root"]["results"][0]]).double()
    assert exact.min() < 0 < exact.max()
    assert (actual - exact).abs().max() < 1.2e-8  # 7e-9 with Triton 3.9, 8.4e-9 with 3.7.1


# ---- the declaration ------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
@pytest.mark.parametrize(
    "text", ["rows=6 cols=33 layout=rows", "rows=6 cols=33 layout=rows align=4", "rows=6 cols=40 align=8"]
)
def test_awkward_problems_can_be_posed(op: Any, text: str) -> None:
    """Outputs are padded where the problem's alignment is more than a contiguous row has."""
    problem = GluProblem.parse(text)
    args = op.sample(problem, "cpu", 0)
    assert op.problem(*op.outputs(problem, *args), *args) == problem


def test_work_is_what_must_be_moved() -> None:
    problem = GluProblem(2048, 4096)
    assert SILU_MUL.work(problem).bytes == 3 * 2 * 2048 * 4096
    assert SILU_MUL_BACKWARD.work(problem).bytes == 5 * 2 * 2048 * 4096
    # KERNELS.md: compiled SwiGLU takes 13.1 µs at 2048x4096 and 55.1 at 2048x18944 on an H200; the model is near.
    for cols, measured in ((4096, 13.1), (18944, 55.1)):
        problem = GluProblem(2048, cols)
        model = SILU_MUL.estimate_us(problem, SILU_MUL.default(problem, H200), H200)
        assert measured / 1.25 < model < measured * 1.25


def test_no_more_than_a_quarter_of_the_default_s_columns_are_past_a_row() -> None:
    """Tiles of 4096 took, of 4864 columns, 27.1 us where those of 1024 take 15.9 (2048 rows, H200, 2026-11-29)."""
    for cols in (4864, 8960, 9728, 11008, 14336, 18944, 18952):
        for op in (SILU_MUL, SILU_MUL_BACKWARD):
            block = op.default(GluProblem(2048, cols, layout="rows"), H200).block_cols
            assert -(-cols // block) * block <= 1.25 * cols
    assert SILU_MUL.default(GluProblem(2048, 130, layout="rows"), H200).block_cols == 256  # a row of one tile


def test_alignment_covers_an_element() -> None:
    with pytest.raises(UnsupportedProblem, match="one element of fp32, 4 bytes; it is 2"):
        GluProblem(1, 1, "fp32", align=2)


# ---- the function, on the CPU ---------------------------------------------------------------------------


@of_each_dtype
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 4), (0, 4), (4, 0)], ids=str)
def test_cpu_tensors_run_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate, up = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    out = silu_mul(gate, up)
    assert out.dtype == dtype
    assert out.shape == shape
    assert error_ratio(out, *truth("silu_mul", [gate, up])[0]) <= 1


def test_out_is_written_where_it_lies() -> None:
    gate, up, whole = torch.randn(4, 6), torch.randn(4, 6), torch.full((4, 20), 9.0)
    expected = silu_mul(gate, up)
    out = whole[:, 3:15:2]
    assert silu_mul(gate, up, out=out) is out
    assert torch.equal(out, expected)
    assert (whole == 9).sum() == 4 * 14
    assert silu_mul(gate, up, out=gate) is gate
    assert torch.equal(gate, expected)


@refused
def test_refusals_say_the_rule() -> Calls:
    x, whole = torch.randn(4, 6), torch.randn(8, 12)
    return {
        "each extent the same": lambda: silu_mul(x, x[:1]),
        "takes up in float32; got torch.float64: convert": lambda: silu_mul(x, x.double()),
        "takes bfloat16, float16, float32, float64; got torch.int32": lambda: silu_mul(x.int(), x.int()),
        "got torch.complex64": lambda: silu_mul(x.cfloat(), x.cfloat()),
        "operands of one device": lambda: silu_mul(x, x, out=torch.empty(4, 6, device="meta")),
        "out must be .*4, 6.*it is .6, 4.": lambda: silu_mul(x, x, out=torch.empty(6, 4)),
        "overlap itself": lambda: silu_mul(x, x, out=torch.empty(1, 6).expand(4, 6)),
        "element upon element": lambda: silu_mul(whole[:4], x.repeat(1, 2), out=whole[1:5]),
        "not differentiable": lambda: silu_mul(x.clone().requires_grad_(), x, out=torch.empty(4, 6)),
    }


def test_gradients() -> None:
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(silu_mul, (gate, up))
    assert torch.autograd.gradcheck(silu_mul, (gate, up.detach()))
    assert torch.autograd.gradcheck(silu_mul, (gate.detach(), up))


# ---- the GPU's path, on CPU tensors ---------------------------------------------------------------------


def run(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    return calls.run(SILU_MUL, None if out is None else (out,), (gate, up))[0]


def test_launch_poses_what_it_launches(launches: list[str]) -> None:
    joint = torch.randn(2, 3, 32)
    gate, up = joint.chunk(2, dim=-1)
    expected = silu_mul(gate, up)
    assert torch.equal(run(gate, up), expected)
    run(gate.contiguous(), up.contiguous())
    run(gate[..., 1:], up[..., 1:])
    run(gate.transpose(1, 2)[0], up.transpose(1, 2)[0])
    run(gate[0, 0], up[0, 0])
    assert launches == [
        "silu_mul rows=6 cols=16 dtype=fp32 layout=rows",
        "silu_mul rows=6 cols=16 dtype=fp32",
        "silu_mul rows=6 cols=15 dtype=fp32 layout=rows align=4",
        "silu_mul rows=16 cols=3 dtype=fp32 layout=strided",
        "silu_mul rows=1 cols=16 dtype=fp32",
    ]


def test_operands_that_are_no_matrix_are_copied(launches: list[str]) -> None:
    gate, up = torch.randn(4, 3, 8).transpose(0, 1), torch.randn(3, 4, 8)
    out = torch.zeros(4, 3, 8).transpose(0, 1)
    expected = silu_mul(gate, up)
    assert torch.equal(run(gate, up), expected)
    assert run(gate, up, out) is out
    assert torch.equal(out, expected)
    assert run(gate, up, gate) is gate
    assert torch.equal(gate, expected)
    assert launches == ["silu_mul rows=12 cols=8 dtype=fp32"] * 3


def test_nothing_is_launched_for_nothing(launches: list[str]) -> None:
    assert run(torch.empty(0, 8), torch.empty(0, 8)).shape == (0, 8)
    assert launches == []


def test_calls_are_told_apart(launches: list[str]) -> None:
    """One memo entry per shape, strides, dtype and alignment, and a refusal is not remembered as a success."""
    x = torch.randn(9, 64)
    for begin in (0, 1, 2, 4, 0, 1):
        run(x[:8, begin : begin + 32], x[1:, begin : begin + 32])
    assert [p.partition(" align=")[2] for p in launches] == ["", "4", "8", "", "", "4"]
    whole = torch.randn(8, 64)
    run(whole[:, :32], whole[:, :32], whole[:, 32:])
    with pytest.raises(UnsupportedProblem, match="element upon element"):
        run(whole[:, :32], whole[:, :32], whole[:, 16:48])
    with pytest.raises(UnsupportedProblem, match="each extent the same"):
        run(whole[:, :32], whole[:, :31])
