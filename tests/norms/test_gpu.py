"""The norms on a GPU: numerics against fp64, awkward memory, streams, graphs, tracing, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.norms.api import add_rms_norm, layer_norm, rms_norm
from cutekernels.ops.norms.gradients import COLUMN_SUM, COLUMN_SUM_PAIR
from tests.norms.cases import DTYPES, OPS, error_ratio, truth
from tests.on_gpu import computed, drawn, needs_memory, normal, slice_written, traced

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_seed")]

SUITES = [(op, text) for op in OPS.values() for text in op.suite]
AWKWARD = [
    "rows=1 cols=1 align=2",
    "rows=5 cols=2 layout=strided",
    "rows=7 cols=13 align=2",
    "rows=4099 cols=24",
    "rows=3001 cols=8191 dtype=fp32 align=4",
    "rows=4000 cols=516 dtype=fp16 align=8",
    "rows=1023 cols=77 dtype=fp32 layout=strided",
    "rows=700 cols=96 heads=7 layout=heads per_head=1",
    "rows=700 cols=96 heads=7 layout=strided per_head=1",
    "rows=300 cols=16384",
    "rows=300 cols=65536",
    "rows=9 cols=65535 align=2",
]


def worst(op: Any, results: Any, args: dict[str, Any]) -> float:
    exact = truth(op.name, list(results), args)
    return max(error_ratio(r, *e) for r, e in zip(results, exact, strict=True))


def right(y: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, layer: bool = False) -> bool:
    args = {"x": x, "weight": weight, "bias": bias, "eps": 1e-5 if layer else 1e-6}
    return worst(OPS["layer_norm" if layer else "rms_norm"], [y], args) <= 1


# ---- kernels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "text"), SUITES + [(op, t) for op in OPS.values() for t in AWKWARD], ids=str)
def test_every_suite_with_default_and_random_configs(op: Any, text: str) -> None:
    problem = op.Problem.parse(text)
    args = op.sample(problem, "cuda", 11)
    inputs, options = args[: len(op.inputs)], {name: getattr(problem, name) for name in op.options}
    named = dict(zip([*op.inputs, *op.scalars], args, strict=True)) | options
    for config in drawn(op, problem, 5, text):
        results = computed(op, problem, config, args)
        posed = op.problem(*results, *inputs, **options)
        assert posed == problem or problem.rows == 1 or problem.cols == 1
        ratio = worst(op, results, named)
        assert ratio <= 1, f"{op.name} [{problem}] [{config}] is off by {ratio:.3g} tolerances"


@pytest.mark.parametrize(
    ("op", "text"), [(op, text) for op in (COLUMN_SUM, COLUMN_SUM_PAIR) for text in op.suite], ids=str
)
def test_column_sum(op: Any, text: str) -> None:
    problem = op.Problem.parse(text)
    (parts,) = op.sample(problem, "cuda", 3)
    halves = parts.double().chunk(len(op.results))
    for config in drawn(op, problem, 5, text):
        results = computed(op, problem, config, (parts,))
        assert op.problem(*results, parts) == problem
        for result, half in zip(results, halves, strict=True):
            assert error_ratio(result, half.sum(0), half.abs().sum(0)) <= 1


def test_gradients_are_the_same_bits_every_time() -> None:
    x, w, dy = normal(5000, 4096), normal(4096), normal(5000, 4096)
    first = torch.ops.cutekernels.rms_norm_backward(dy, x, w, None, True, 1e-6, 0.0)
    for _ in range(5):
        again = torch.ops.cutekernels.rms_norm_backward(dy, x, w, None, True, 1e-6, 0.0)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_as_exact_as_torch(dtype: torch.dtype) -> None:
    """The largest error, outlier channels included, is at most twice that of torch."""
    x, w, b = normal(2048, 4096, dtype=dtype), normal(4096, dtype=dtype), normal(4096, dtype=dtype)
    x[:, ::100] *= 50
    wide = [t.double() for t in (x, w, b)]
    for ours, torchs, exact in (
        (rms_norm(x, w), F.rms_norm(x, (4096,), w, eps=1e-6), F.rms_norm(wide[0], (4096,), wide[1], eps=1e-6)),
        (layer_norm(x, w, b), F.layer_norm(x, (4096,), w, b), F.layer_norm(wide[0], (4096,), *wide[1:])),
    ):
        scale = exact.abs() + wide[0].abs().mean()
        off, torchs_off = (((t.double() - exact).abs() / scale).max() for t in (ours, torchs))
        assert off <= 2 * torchs_off + 2.0**-22


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e30"])
def test_special_values_are_torch_s(dtype: str, value: str) -> None:
    x, w = normal(4, 40, dtype=DTYPES[dtype]), normal(40, dtype=DTYPES[dtype])
    x[1, 3] = float(value)
    for ours, torchs in (
        # On the CPU, where torch computes what it documents; on a GPU its running variance overflows differently.
        (rms_norm(x, w, eps=1e-5), F.rms_norm(x.float().cpu(), (40,), w.float().cpu(), eps=1e-5)),
        (layer_norm(x, w), F.layer_norm(x.float().cpu(), (40,), w.float().cpu())),
    ):
        tolerance = 2.0**-6 if dtype == "bf16" else 1e-5
        torch.testing.assert_close(ours.float().cpu(), torchs, rtol=tolerance, atol=1e-5, equal_nan=True)


def test_huggingface_s_order_of_rounding() -> None:
    x, w = normal(512, 4096), normal(4096)
    normalised = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    theirs, ours = w * normalised, rms_norm(x, w, rounding="huggingface")
    # Where fp32 statistics in another order tip x * rstd over to its neighbour, the product moves too.
    assert (ours != theirs).double().mean() < 1e-3
    assert (rms_norm(x, w) != theirs).double().mean() > 0.05


# ---- memory ---------------------------------------------------------------------------------------------


def test_any_strides() -> None:
    w, heads = normal(96), normal(6, 96)
    joint = normal(3, 50, 10, 96)
    for x in (
        joint,
        joint[:, :, :6],
        joint[:, :, 6:8],
        joint.transpose(0, 1),
        joint.transpose(1, 2),
        joint[..., 1:].contiguous()[..., :1].expand(3, 50, 10, 96),
        joint[:1].expand(3, 50, 10, 96),
        normal(96, 70).t(),
        normal(70, 192)[:, ::2],
        normal(70, 104)[:, :96],
        normal(70, 97)[:, 1:],
        normal(96),
        normal(1, 96),
    ):
        assert right(rms_norm(x, w), x, w), (x.shape, x.stride())
        assert right(layer_norm(x, w, w), x, w, w, layer=True), (x.shape, x.stride())
    assert right(rms_norm(joint[:, :, :6], heads), joint[:, :, :6], heads)
    assert right(rms_norm(joint[:, :, 4:], heads), joint[:, :, 4:], heads)
    sparse = normal(192)[::2]
    assert right(rms_norm(joint, sparse), joint, sparse)
    assert right(rms_norm(joint, w.float()), joint, w.float())
    assert right(rms_norm(joint), joint, None)


@pytest.mark.parametrize("begin", [0, 1, 2, 4, 8])
def test_out_into_a_slice(begin: int) -> None:
    x, w = normal(65, 1001), normal(1001)
    assert right(slice_written(begin, lambda out: rms_norm(x, w, out=out)), x, w)


@pytest.mark.parametrize("cols", [256, 4096, 40_000])
def test_out_upon_the_input(cols: int) -> None:
    whole, w = normal(640, cols), normal(cols)
    expected = rms_norm(whole, w)
    assert rms_norm(whole, w, out=whole) is whole
    assert torch.equal(whole, expected)
    with pytest.raises(UnsupportedProblem, match="element upon element"):
        rms_norm(whole[:-1], w, out=whole[1:])
    with pytest.raises(UnsupportedProblem, match="overlap itself"):
        rms_norm(whole, w, out=normal(1, cols).expand(640, cols))


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (2, 0, 3)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device="cuda", dtype=torch.float16, requires_grad=True)
    w = torch.ones(shape[-1:], device="cuda", dtype=torch.float16, requires_grad=True)
    for y in (rms_norm(x, w), layer_norm(x, w, w), *add_rms_norm(x, x, w)):
        assert y.shape == shape
        x.grad = w.grad = None
        y.sum().backward(retain_graph=True)
        assert x.grad is not None
        assert x.grad.shape == shape
        assert w.grad is None or (w.grad == 0).all()


@pytest.mark.slow
def test_more_than_two_billion_elements() -> None:
    needs_memory(40)
    rows, cols = 70_000, 32_771
    x, w = normal(rows, cols), normal(cols)
    y = rms_norm(x, w)
    for begin in (0, 65_000, rows - 300):
        part = slice(begin, begin + 300)
        assert right(y[part], x[part], w)
    dx, dw = torch.ops.cutekernels.rms_norm_backward(y, x, w, None, True, 1e-6, 0.0)
    assert dw.isfinite().all()
    part = slice(rows - 300, rows)
    exact = truth("rms_norm_backward", [dx[part], dw], {"dy": y[part], "x": x[part], "weight": w, "eps": 1e-6})
    assert error_ratio(dx[part], *exact[0]) <= 1
    del y, dx
    # In rows that are far apart, the offset of a row alone passes 2^31; many narrow rows are over 2^31 together.
    far = x.view(-1)[: (1 << 31) + 2048].as_strided((3, 1024), (1 << 30, 1))
    assert right(rms_norm(far), far, None)
    columns = x.view(-1)[: (1 << 31) + 2048].as_strided((5, 3), (7, 1 << 30))
    assert right(rms_norm(columns), columns, None)
    narrow = x.view(-1)[: (1 << 31) + 4096].view(-1, 64)
    y = rms_norm(narrow, w[:64].contiguous())
    assert right(y[-100_000:], narrow[-100_000:], w[:64])


# ---- gradients and tracing ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("arrangement", ["dense", "slices", "expanded gradient", "batch transposed", "heads"])
def test_gradients(dtype: torch.dtype, arrangement: str) -> None:
    x, r = (normal(30, 7, 2 * 136, dtype=dtype)[..., 136:] for _ in range(2))
    if arrangement != "slices":
        x, r = x.contiguous(), r.contiguous()
    if arrangement == "batch transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    x, r = x.detach().requires_grad_(), r.detach().requires_grad_()
    shape = (7, 136) if arrangement == "heads" else (136,)
    w, b = (normal(*shape, dtype=torch.float32 if dtype == torch.float16 else dtype).requires_grad_() for _ in range(2))

    def gradient(y: Tensor) -> Tensor:
        return torch.ones_like(y[:1, :1, :1]).expand_as(y) if "expanded" in arrangement else torch.randn_like(y)

    def checked(op: str, results: list[Tensor], inputs: dict[str, Any], leaves: tuple[Tensor, ...]) -> None:
        assert worst(OPS[op], results, {n: t.detach() if isinstance(t, Tensor) else t for n, t in inputs.items()}) <= 1
        for leaf in leaves:
            leaf.grad = None

    y = rms_norm(x, w)
    y.backward(dy := gradient(y))
    assert x.grad is not None
    assert w.grad is not None
    checked("rms_norm_backward", [x.grad, w.grad], {"dy": dy, "x": x, "weight": w, "eps": 1e-6}, (x, w))
    y, u = add_rms_norm(x, r, w)
    torch.autograd.backward((y, u), (dy, du := gradient(u)))
    assert r.grad is not None
    assert torch.equal(x.grad, r.grad)
    args = {"dy": dy, "x": u, "weight": w, "du": du, "eps": 1e-6}
    checked("rms_norm_backward", [x.grad, w.grad], args, (x, r, w))
    y = layer_norm(x, w, b)
    y.backward(dy)
    assert b.grad is not None
    args = {"dy": dy, "x": x, "weight": w, "eps": 1e-5}
    checked("layer_norm_backward", [x.grad, w.grad, b.grad], args, (x, w, b))


@traced
def test_compiled_whole() -> None:
    @torch.compile(fullgraph=True)
    def block(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y, u = add_rms_norm(x, residual, weight)
        return layer_norm(rms_norm(y, weight) * 2 + u, weight)

    x, r, w = normal(64, 512).requires_grad_(), normal(64, 512), normal(512).requires_grad_()
    out = block(x, r, w)
    y, u = add_rms_norm(x, r, w)
    torch.testing.assert_close(out, layer_norm(rms_norm(y, w) * 2 + u, w), rtol=2e-2, atol=2e-2)
    out.sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert w.grad.isfinite().all()


@traced
def test_opcheck() -> None:
    x, w = normal(16, 64, dtype=torch.float32).requires_grad_(), normal(64, dtype=torch.float32).requires_grad_()
    ops, checked = torch.ops.cutekernels, torch.library.opcheck
    checked(ops.rms_norm.default, (x, w, "once", False, 1e-6, 0.0))
    checked(ops.add_rms_norm.default, (x, x.detach().clone(), w, "once", False, 1e-6, 0.0))
    checked(ops.layer_norm.default, (x, w, w.detach().clone(), 1e-6))
    x, w = x.detach(), w.detach()
    checked(ops.rms_norm_out.default, (x, w, torch.empty_like(x), "once", False, 1e-6, 0.0))
    checked(ops.rms_norm_backward.default, (x.clone(), x, w, None, True, 1e-6, 0.0))
    checked(ops.layer_norm_backward.default, (x.clone(), x, w, True, "same", 1e-6))
