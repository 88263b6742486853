"""``gelu_mul``, ``bias_gelu`` and packed gates on a GPU: numerics against fp64, memory, streams, graphs, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.activations.api import bias_gelu, gelu_mul, silu_mul
from cutekernels.ops.activations.op import slab_rows
from tests.activations.gelu_cases import APPROXIMATE, OPS, VALUES, error_ratio, truth
from tests.activations.silu_mul_cases import DTYPES
from tests.on_gpu import computed, drawn, needs_memory, normal, slice_written, traced

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_seed")]

AWKWARD = [
    "rows=1 cols=1",
    "rows=7 cols=13 layout=rows align=2",
    "rows=1000 cols=9",
    "rows=31 cols=8191 dtype=fp32 approximate=tanh",
    "rows=33 cols=515 dtype=fp16 layout=rows align=8",
    "rows=1023 cols=77 dtype=fp32 layout=strided",
    "rows=5 cols=65536 approximate=tanh",
]
SUITES = [(op, text) for op in OPS.values() for text in (*op.suite, *AWKWARD)]


def worst(op: str, results: Any, inputs: Any, approximate: str) -> float:
    """The error ratio of all results, a few slabs of rows at a time."""
    rows, found = inputs[0].shape[0], 0.0
    slab = max(1, slab_rows(rows))
    step = slab * max(1, 512 // slab)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        exact = truth(op, [t if t.dim() == 1 else t[part] for t in inputs], approximate, slab)
        parts = [r[part] for r in results]
        if op == "bias_gelu_backward":
            parts[1] = results[1][begin // slab : (begin + step) // slab]
        found = max([found, *(error_ratio(r, *e, inputs[0].dtype is torch.float32) for r, e in zip(parts, exact))])  # noqa: B905
    return found


def right(op: str, out: Tensor, inputs: list[Tensor], approximate: str = "none") -> bool:
    flat = [t if op == "bias_gelu" and t is inputs[-1] else t.reshape(-1, t.shape[-1]) for t in (out, *inputs)]
    return worst(op, flat[:1], flat[1:], approximate) <= 1


# ---- kernels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "text"), SUITES, ids=str)
def test_every_suite_with_default_and_random_configs(op: Any, text: str) -> None:
    problem = op.Problem.parse(text)
    inputs = op.sample(problem, "cuda", 11)
    options = {"approximate": problem.approximate}
    for config in drawn(op, problem, 4, text):
        results = computed(op, problem, config, inputs)
        assert op.problem(*results, *inputs, **options) == problem or problem.rows == 1 or problem.cols == 1
        ratio = worst(op.name, results, inputs, problem.approximate)
        assert ratio <= 1, f"{op.name} [{problem}] [{config}] is off by {ratio:.3g} tolerances"


@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_special_values_are_torch_s(dtype: str, approximate: str) -> None:
    x = torch.tensor([float(v) for v in VALUES], dtype=DTYPES[dtype], device="cuda")
    expected = F.gelu(x.float(), approximate=approximate).to(x.dtype)
    tolerance = {"rtol": 2.0**-7 if dtype == "bf16" else 2.0**-19, "atol": 2.0**-22}
    for out in (
        gelu_mul(x, torch.ones_like(x), approximate=approximate),
        bias_gelu(x, torch.zeros_like(x), approximate=approximate),
    ):
        torch.testing.assert_close(out, expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_as_exact_as_torch(dtype: torch.dtype, approximate: str) -> None:
    """The largest error, outliers included, is at most twice that of torch."""
    x, bias = normal(1 << 10, 1 << 12, dtype=dtype) * 3, normal(1 << 12, dtype=dtype)
    exact = F.gelu(x.double() + bias.double(), approximate=approximate)
    ours = (bias_gelu(x, bias, approximate=approximate).double() - exact).abs()
    torchs = (F.gelu(x.float() + bias.float(), approximate=approximate).to(dtype).double() - exact).abs()
    assert ours.max() <= 2 * torchs.max()
    assert ours.mean() <= 1.1 * torchs.mean()


# ---- memory ---------------------------------------------------------------------------------------------


def test_any_strides() -> None:
    square, bias = normal(300, 300), normal(600)
    for x, b in [
        (square.t(), bias[:300]),
        (square[::2, 1::3], bias[:100]),
        (square[:1].expand(300, 300), bias[1:301]),
        (square, bias[::2]),
        (square, bias[:1].expand(300)),
        (square, bias[:300].float()),
        (normal(6, 5, 40).transpose(0, 1), bias[:40]),
        (normal(7), bias[:7]),
        (normal(2, 2, 2, 9), bias[:9]),
    ]:
        assert right("bias_gelu", bias_gelu(x, b), [x, b]), (x.shape, x.stride(), b.stride())
    assert right("gelu_mul", gelu_mul(square.t(), square), [square.t(), square])


def test_out_into_a_slice_and_upon_x() -> None:
    whole, x, bias = normal(65, 1200), normal(65, 1001), normal(1001)
    out = slice_written(3, lambda out: bias_gelu(x, bias, out=out))
    assert right("bias_gelu", out, [x, bias])
    assert bias_gelu(x, bias, out=x) is x
    assert torch.equal(x, out)
    with pytest.raises(UnsupportedProblem, match="element upon element"):
        bias_gelu(whole[:, :1000], bias[:1000], out=whole[:, 8:1008])
    with pytest.raises(UnsupportedProblem, match="one device"):
        bias_gelu(x, bias.cpu())


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (2, 0, 3)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device="cuda", dtype=torch.float16, requires_grad=True)
    bias = torch.ones(shape[-1:], device="cuda", dtype=torch.float16, requires_grad=True)
    out = bias_gelu(x, bias)
    assert out.shape == shape
    out.sum().backward()
    assert bias.grad is not None
    assert (bias.grad == 0).all()
    if shape[-1] % 2 == 0:
        assert silu_mul(x.detach()).shape == (*shape[:-1], shape[-1] // 2)


@pytest.mark.slow
def test_more_than_two_billion_elements() -> None:
    needs_memory(24)
    rows, cols = 70_000, 32_776
    x, bias = normal(rows, cols), normal(cols)
    out = bias_gelu(x, bias)
    packed = gelu_mul(x)
    for begin in (0, 65_000, rows - 300):
        part = slice(begin, begin + 300)
        assert right("bias_gelu", out[part], [x[part], bias])
        assert right("gelu_mul", packed[part], list(x[part].chunk(2, dim=-1)))
    del packed
    dx, partials = torch.ops.cutekernels.bias_gelu_backward(out, x, bias, "none")
    slab = slab_rows(rows)
    for index in (0, len(partials) - 1):
        part = slice(index * slab, (index + 1) * slab)
        exact = truth("bias_gelu_backward", [out[part], x[part], bias], "none", slab)
        assert error_ratio(dx[part], *exact[0], precise=False) <= 1
        assert error_ratio(partials[index : index + 1], *exact[1], precise=False) <= 1


# ---- gradients and tracing ------------------------------------------------------------------------------


@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("rows", [5, 700])
def test_gradients_of_a_bias(dtype: torch.dtype, approximate: str, rows: int) -> None:
    for bias_dtype in {dtype, torch.float32}:
        x, bias = normal(2, rows, 130, dtype=dtype).requires_grad_(), normal(130, dtype=bias_dtype).requires_grad_()
        dout = normal(1, 1, 130, dtype=dtype).expand(2, rows, 130)
        bias_gelu(x, bias, approximate=approximate).backward(dout)
        assert x.grad is not None
        assert bias.grad is not None
        assert bias.grad.dtype is bias_dtype
        inputs = [t.detach().reshape(-1, 130) for t in (dout, x)] + [bias.detach()]
        ((dx, magnitude, factor), _) = truth("bias_gelu_backward", inputs, approximate)
        precise = dtype is torch.float32
        assert error_ratio(x.grad.reshape(-1, 130), dx, magnitude, factor, precise) <= 1
        # a sum of fp32 numbers in some order: an ulp of the sum of magnitudes for each level of slabs
        assert error_ratio(bias.grad, dx.sum(0), magnitude.sum(0) * 2, factor.sum(0), precise) <= 1
        again = torch.autograd.grad(bias_gelu(x, bias, approximate=approximate), bias, dout)[0]
        assert torch.equal(again, bias.grad), "the same sum in the same order"


@pytest.mark.parametrize("function", [silu_mul, gelu_mul])
def test_gradients_of_packed_gates(function: Any) -> None:
    packed = normal(5, 7, 2 * 136).requires_grad_()
    gate, up = (t.detach().requires_grad_() for t in packed.chunk(2, dim=-1))
    out = function(packed)
    assert torch.equal(out, function(gate, up))
    dout = torch.randn_like(out)
    out.backward(dout)
    function(gate, up).backward(dout)
    assert packed.grad is not None
    assert torch.equal(packed.grad, torch.cat([gate.grad, up.grad], dim=-1))  # type: ignore[list-item]


@traced
def test_compiled_whole() -> None:
    def mlp(packed: Tensor, bias: Tensor) -> Tensor:
        return bias_gelu(silu_mul(packed) + gelu_mul(packed, approximate="tanh"), bias)

    packed, bias = normal(64, 512).requires_grad_(), normal(256).requires_grad_()
    grads = []
    for function in (mlp, torch.compile(mlp, fullgraph=True)):
        out = function(packed, bias)
        grads.append((out, *torch.autograd.grad(out.float().sum(), (packed, bias))))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-6, atol=2.0**-6)
