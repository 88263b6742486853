"""The norms without a GPU: kernels under Triton's interpreter, declarations, the CPU path, the call path."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from cutekernels import verify
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops import registry
from cutekernels.ops.norms.api import add_rms_norm, layer_norm, rms_norm, rms_norm_beside
from cutekernels.ops.norms.gradients import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from cutekernels.ops.norms.op import RMS_NORM
from cutekernels.ops.shared import calls
from tests.compiled import half
from tests.gpu_path import recorded
from tests.interpreted import H200, kernel_tests, of_each_dtype
from tests.norms import cases as norm_cases
from tests.norms.cases import CASES, OPS, PLANTED, SPECIAL
from tests.refusals import Calls, refused

# ---- kernels, interpreted -------------------------------------------------------------------------------


LAYOUTS = "dense|misaligned|padded|every other|expanded|transposed|cube|of a projection|wide columns"
INTERPRETED = half(CASES, rf"({LAYOUTS})|few SMs|warps=|\d columns|chunks|no (weight|rows)|one column")
interpreted, test_kernel_numerics, test_a_planted_bug_is_caught = kernel_tests(
    norm_cases.__file__, INTERPRETED, PLANTED, SPECIAL
)


def test_every_layout_was_among_the_cases(interpreted: dict[str, dict[str, Any]]) -> None:
    problems = [OPS[CASES[case]["op"]].Problem.parse(interpreted[case]["problem"]) for case in INTERPRETED]
    assert {p.layout for p in problems} == {"rows", "heads", "strided"}
    assert {p.align for p in problems if p.layout != "strided"} == {2, 4, 8, 16}
    assert {(p.layout, p.per_head) for p in problems} >= {("heads", True), ("heads", False), ("strided", True)}
    assert {p.weight for p in problems} == {"same", "none", "fp32"}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_values_are_torch_s(interpreted: dict[str, dict[str, Any]], case: str) -> None:
    """NaN, infinities and squares that overflow spread as in PyTorch: over a row at most."""
    _, inputs, _, _ = norm_cases.operands(SPECIAL[case])
    inputs[0].view(-1)[:3] = torch.tensor([float(v) for v in SPECIAL[case]["values"]])
    x, *affine = [t.float() for t in inputs]
    expected = (F.rms_norm if "rms" in case else F.layer_norm)(x, (40,), *affine, eps=1e-5).flatten()
    actual = torch.tensor([float(v) for v in interpreted[case]["results"][0]])
    tolerance = 2.0**-6 if "bf16" in case else 2.0**-20
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-30, equal_nan=True)


# ---- declarations ---------------------------------------------------------------------------------------


def test_more_tiles_than_a_grid_has_programs_are_refused() -> None:
    many = RMS_NORM.Problem(1, 8, heads=1 << 31, layout="heads", per_head=True)
    with pytest.raises(UnsupportedProblem, match="split"):
        RMS_NORM.default(many, H200)


def test_few_configs_are_worth_a_measurement() -> None:
    for op in OPS.values():
        for text in (op.suite[0], "rows=2048 cols=768", "rows=32768 cols=4096"):
            valid = list(op.valid(op.Problem.parse(text), H200))
            assert 3 <= len(valid) <= 60, (op, text, len(valid))


def test_a_gradient_s_tile_holds_many_narrow_rows() -> None:
    """Few parts are left to sum up; wider rows go one at a time where tiles of many would be too few."""
    for op in (RMS_NORM_BACKWARD, LAYER_NORM_BACKWARD):
        tiles = [op.default(op.Problem.parse(f"rows=4096 cols={cols}"), H200).block_rows for cols in (64, 128)]
        assert tiles == [32, 1]


def test_a_weight_s_gradient_is_granted_the_depth_of_its_sum() -> None:
    """An element near zero may be off by rounding of its larger terms."""
    op = OPS["rms_norm_backward"]
    work = op.work(op.Problem.parse("rows=32768 cols=4096"))
    assert work.depth == 32768
    exact = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 181
    exact[0] = 1e-4
    actual = exact.clone()
    actual[0] += 5e-5
    assert verify.worst_error([actual], [exact], work.flops, depth=work.depth) <= 1
    assert verify.worst_error([actual], [exact], flops=2 * 4096 * 6) > 1  # what dx alone would be granted
    actual[0] += 0.5  # one row's term
    assert verify.worst_error([actual], [exact], work.flops, depth=work.depth) > 1


def test_the_model_is_near_what_was_measured() -> None:
    """The peers' times on an H200, µs, bf16, cold L2: 2048x3584 9.1, 2048x4096 9.8, 32768x4096 130, x8192 252."""
    for text, measured in (("rows=2048 cols=4096", 9.8), ("rows=32768 cols=4096", 130), ("rows=32768 cols=8192", 252)):
        problem = RMS_NORM.Problem.parse(text)
        model = RMS_NORM.estimate_us(problem, RMS_NORM.default(problem, H200), H200)
        assert measured / 1.4 < model < measured * 1.4, (text, model)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("rows=1 cols=1 dtype=fp32 align=2", "one element of fp32, 4 bytes; it is 2"),
        ("rows=1 cols=1001", "rows of 2002 bytes"),
        ("rows=1 cols=8 heads=2", "layout=heads"),
        ("rows=1 cols=2147483648", "at most"),
    ],
)
def test_problems_that_do_not_exist(text: str, rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rule):
        RMS_NORM.Problem.parse(text)


def test_all_are_registered() -> None:
    assert all(registry.get(name) is op for name, op in OPS.items())
    with pytest.raises(UnsupportedProblem, match="absent weight"):
        OPS["rms_norm_backward"].Problem.parse("rows=1 cols=8 weight=none")


# ---- the functions, on the CPU --------------------------------------------------------------------------


@of_each_dtype
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 4), (0, 4), (4, 0)], ids=str)
def test_cpu_tensors_run_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, r = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    cols = shape[-1:] or (1,)
    w, b = torch.randn(cols).to(dtype), torch.randn(cols).to(dtype)
    y, u = add_rms_norm(x, r, w)
    checked = partial(torch.testing.assert_close, rtol=8e-3 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)
    assert torch.equal(u, x + r)
    assert torch.equal(y, rms_norm(u, w))
    if shape and shape[-1]:
        checked(rms_norm(x, w), F.rms_norm(x, cols, w, eps=1e-6))
        checked(rms_norm(x), F.rms_norm(x, cols, eps=1e-6))
        checked(rms_norm(x, w, weight_offset=1.0), F.rms_norm(x.double(), cols, w.double() + 1, eps=1e-6).to(dtype))
        checked(layer_norm(x, w, b), F.layer_norm(x, cols, w, b))
        checked(layer_norm(x), F.layer_norm(x, cols))
        checked(layer_norm(x, None, b), F.layer_norm(x, cols, None, b))


def test_weights_of_each_head() -> None:
    x, w, b = torch.randn(2, 5, 3, 8), torch.randn(3, 8), torch.randn(3, 8)
    for h in range(3):
        torch.testing.assert_close(rms_norm(x, w)[:, :, h], rms_norm(x[:, :, h], w[h]))
        torch.testing.assert_close(layer_norm(x, w, b)[:, :, h], layer_norm(x[:, :, h], w[h], b[h]))


def test_huggingface_s_order_of_rounding() -> None:
    x, w = torch.randn(64, 96).bfloat16(), torch.randn(96).bfloat16()
    normalised = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    theirs = w * normalised.bfloat16()
    assert torch.equal(rms_norm(x, w, rounding="huggingface"), theirs)
    once = rms_norm(x, w)
    assert not torch.equal(once, theirs)
    exact = normalised.double() * w.double()
    # On average: the largest error is the same, by either, in one draw of 37.
    assert (once.double() - exact).abs().mean() < (theirs.double() - exact).abs().mean()


def test_fp32_weights_beside_half() -> None:
    x, w = torch.randn(4, 8).bfloat16(), torch.randn(8)
    assert rms_norm(x, w).dtype == torch.bfloat16
    torch.testing.assert_close(rms_norm(x, w).float(), F.rms_norm(x.float(), (8,), w, eps=1e-6), rtol=4e-3, atol=1e-4)
    x, w = x.requires_grad_(), w.requires_grad_()
    rms_norm(x, w).sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert (x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.float32)


@refused
def test_refusals_say_the_rule() -> Calls:
    x, w, whole = torch.randn(4, 6), torch.randn(6), torch.randn(8, 12)
    return {
        r"residual \(..., cols\).* each extent the same": lambda: add_rms_norm(x, x[:1], w),
        "takes residual in float32; got torch.float64": lambda: add_rms_norm(x, x.double(), w),
        r"weight \(cols,\) or \(heads, cols\).* got x \(4, 6\), weight \(5,\)": lambda: rms_norm(x, w[:5]),
        r"got x \(4, 6\), weight \(\)": lambda: rms_norm(x, w[0]),
        r"got x \(6,\), weight \(4, 6\)": lambda: rms_norm(w, x),
        "got torch.int32": lambda: rms_norm(x.int(), w),
        "takes weight in float32; got torch.bfloat16": lambda: rms_norm(x, w.bfloat16()),
        "operands of one device": lambda: rms_norm(x, w.to("meta")),
        "a bias for each head needs weights": lambda: layer_norm(x, None, x),
        r"weight \(6,\), bias \(4, 6\)": lambda: layer_norm(x, w, x),
        "rounding must be one of once, huggingface": lambda: rms_norm(x, w, rounding="twice"),
        r"y must be \(4, 6\), .*; it is \(6, 4\)": lambda: rms_norm(x, w, out=torch.empty(6, 4)),
        "takes y in float32; got torch.float64": lambda: rms_norm(x, w, out=torch.empty(4, 6, dtype=torch.float64)),
        "overlap itself": lambda: rms_norm(x, w, out=torch.empty(1, 6).expand(4, 6)),
        "element upon element": lambda: rms_norm(whole[:4], None, out=whole[1:5]),
        "not differentiable": lambda: rms_norm(x.clone().requires_grad_(), w, out=torch.empty(4, 6)),
    }


def fp64(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_gradients() -> None:
    x, r, w, b, heads, more = fp64(2, 3, 5), fp64(2, 3, 5), fp64(5), fp64(5), fp64(3, 5), fp64(3, 5)
    checked = torch.autograd.gradcheck
    assert checked(rms_norm, (x, w))
    assert checked(rms_norm, (x,))
    assert checked(rms_norm, (x, heads))
    assert checked(partial(rms_norm, weight_offset=1.0, eps=1e-3), (x, w))
    assert checked(rms_norm, (x.detach(), w))
    assert checked(rms_norm, (x, w.detach()))
    assert checked(add_rms_norm, (x, r, w))
    assert checked(lambda *args: add_rms_norm(*args)[0], (x, r, w))
    assert checked(lambda *args: add_rms_norm(*args)[1], (x, r, w))
    beside = partial(rms_norm_beside, eps=1e-3, weight_offset=1.0, rounding="once")
    assert checked(beside, (x, w))
    assert checked(beside, (x, heads))
    assert checked(lambda *args: beside(*args)[1], (x, w))
    assert checked(lambda *args: sum(beside(*args)), (x, w.detach()))
    assert checked(layer_norm, (x, w, b))
    assert checked(layer_norm, (x, heads, more))
    assert checked(layer_norm, (x, None, b))
    assert checked(layer_norm, (x.detach(), w, b.detach()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck() -> None:
    ops, checked = torch.ops.cutekernels, torch.library.opcheck
    x, r = torch.randn(4, 6, requires_grad=True), torch.randn(8, 6)[::2].requires_grad_()
    w, b = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
    checked(ops.rms_norm.default, (x, w, "once", False, 1e-6, 0.0))
    checked(ops.add_rms_norm.default, (x, r, None, "huggingface", False, 1e-6, 0.0))
    checked(ops.layer_norm.default, (x, w, b, 1e-6))
    x, r, w = x.detach(), r.detach(), w.detach()
    checked(ops.rms_norm_out.default, (x, w, torch.empty(4, 6), "once", False, 1e-6, 0.0))
    checked(ops.rms_norm_backward.default, (r, x, w, x, True, 1e-6, 0.0))
    checked(ops.rms_norm_backward.default, (r, x, None, None, True, 1e-6, 0.0))
    checked(ops.layer_norm_backward.default, (r, x, w, True, "same", 1e-6))
    checked(ops.layer_norm_backward.default, (r, x, None, False, "none", 1e-6))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dynamic", [None, True])
def test_traced_numbers(dynamic: bool | None) -> None:
    """The second value of a float makes it a traced one; with ``dynamic`` the first does."""
    torch._dynamo.reset()
    norm = torch.compile(rms_norm, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    x, w = torch.randn(4, 6), torch.randn(6)
    for offset in (0.0, 1.0, 0.5):
        torch.testing.assert_close(norm(x, w, weight_offset=offset), rms_norm(x, w, weight_offset=offset))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_norm_beside_its_input() -> None:
    """Gradients of both are added by the norm's backward pass, in graphs too; autocast is as for the norm alone."""
    torch._dynamo.reset()
    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    options: dict[str, Any] = {"eps": 1e-6, "weight_offset": 0.0, "rounding": "huggingface"}

    def twice(x: Tensor, w: Tensor) -> Tensor:
        y, same = rms_norm_beside(x, w, **options)
        return y + same.sin()

    y = rms_norm(x, w, **options)
    expected = torch.autograd.grad((y + x.sin()).square().sum(), (x, w))
    for function in (twice, torch.compile(twice, backend="aot_eager", fullgraph=True)):
        found = torch.autograd.grad(function(x, w).square().sum(), (x, w))
        torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(rms_norm_beside(x, w, **options), (rms_norm(x, w, **options), x))
        for residual in (x[0], x.long()):
            with pytest.raises(UnsupportedProblem, match="a residual of x's shape"):
                add_rms_norm(x, residual, w)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm_beside(x, w, **options), (y.detach(), x.detach()))


# ---- the GPU's path, on CPU tensors ---------------------------------------------------------------------


def run(x: Tensor, weight: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    results = None if out is None else (out,)
    return calls.run(RMS_NORM, results, (x, weight), options=("once", False), scalars=(1e-6, 0.0))[0]


def test_launch_poses_what_it_launches(launches: list[str]) -> None:
    joint = torch.randn(2, 3, 6, 16)  # heads of a joint projection
    queries, w = joint[:, :, :4], torch.randn(16)
    expected = rms_norm(queries, w)
    assert torch.equal(run(queries, w), expected)
    run(queries, torch.randn(4, 16))
    run(joint, w)
    run(joint[:, :, 0], w)
    run(joint.transpose(0, 1)[..., 0, :], w)
    run(joint[0, 0].t())
    run(joint[..., 1:])
    run(joint[0, 0, 0], w)
    run(joint, torch.randn(40)[1:17])
    assert launches == [
        "rms_norm rows=6 cols=16 heads=4 dtype=fp32 layout=heads",
        "rms_norm rows=6 cols=16 heads=4 dtype=fp32 layout=heads per_head=1",
        "rms_norm rows=36 cols=16 dtype=fp32",
        "rms_norm rows=6 cols=16 dtype=fp32",
        "rms_norm rows=3 cols=16 heads=2 dtype=fp32 layout=heads",
        "rms_norm rows=16 cols=6 dtype=fp32 weight=none layout=strided",
        "rms_norm rows=36 cols=15 dtype=fp32 weight=none align=4",
        "rms_norm rows=1 cols=16 dtype=fp32",
        "rms_norm rows=36 cols=16 dtype=fp32 align=4",
    ]


def test_operands_that_are_no_cube_are_copied(launches: list[str]) -> None:
    x, w = torch.randn(4, 3, 2, 8).transpose(0, 1), torch.randn(16)[::2]
    out = torch.zeros(4, 3, 2, 8).transpose(0, 1)
    expected = rms_norm(x, w)
    assert torch.equal(run(x, w), expected)
    assert run(x, w, out) is out
    assert torch.equal(out, expected)
    assert run(x, w, x) is x
    assert torch.equal(x, expected)
    assert launches == ["rms_norm rows=24 cols=8 dtype=fp32"] * 3


@pytest.mark.parametrize("op", [RMS_NORM_BACKWARD, LAYER_NORM_BACKWARD], ids=lambda op: op.name)
def test_the_sums_compiled_ahead_are_those_that_a_launch_plans(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutekernels.ops.norms.rows.sms_here", lambda: H200.sm_count)
    for text in op.suite:
        p = op.Problem.parse(text)
        if p.rows * p.cols > 2**20:
            continue
        inputs = op.sample(p, "cpu", 0)
        options = {name: getattr(p, name) for name in op.options}
        n = len(op.inputs)
        with recorded() as seen:
            calls.run(op, None, inputs[:n], options=tuple(options.values()), scalars=inputs[n:])
        planned = {f"{one.name} {problem}" for one, problem in op.chained(p, op.default(p, H200), H200)}
        assert planned == {each for each in seen if each.startswith("column_sum")}
