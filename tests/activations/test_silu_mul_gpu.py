"""``silu_mul`` on a GPU: numerics against fp64, awkward memory, streams, graphs, tracing, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import cutekernels
from cutekernels.errors import InvalidConfig, UnsupportedProblem
from cutekernels.ops.activations.api import silu_mul
from cutekernels.ops.activations.op import SILU_MUL, SILU_MUL_BACKWARD, GluProblem
from tests.activations.silu_mul_cases import DTYPES, OPS, VALUES, error_ratio, truth
from tests.on_gpu import computed, drawn, needs_memory, normal, slice_written, traced

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_seed")]

SUITES = [(op, text) for op in (SILU_MUL, SILU_MUL_BACKWARD) for text in op.suite]
AWKWARD = [
    "rows=1 cols=1",
    "rows=5 cols=1 layout=strided",
    "rows=7 cols=13 layout=rows align=2",
    "rows=1000 cols=9",
    "rows=31 cols=8191 dtype=fp32",
    "rows=33 cols=515 dtype=fp16 layout=rows align=8",
    "rows=1023 cols=77 dtype=fp32 layout=strided",
]
_CHUNK_ROWS = 512


def worst(op: str, results: Any, inputs: Any) -> float:
    """The error ratio of all results, computed a chunk of rows at a time."""
    found = 0.0
    for begin in range(0, max(1, inputs[0].shape[0]), _CHUNK_ROWS):
        part = slice(begin, begin + _CHUNK_ROWS)
        exact = truth(op, [t[part] for t in inputs])
        found = max([found, *(error_ratio(r[part], *e) for r, e in zip(results, exact, strict=True))])
    return found


def right(out: Tensor, gate: Tensor, up: Tensor) -> bool:
    two_d = [t.reshape(-1, t.shape[-1]) for t in (out, gate, up)]
    return worst("silu_mul", two_d[:1], two_d[1:]) <= 1


# ---- kernels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "text"), SUITES + [(op, t) for op in OPS.values() for t in AWKWARD], ids=str)
def test_every_suite_with_default_and_random_configs(op: Any, text: str) -> None:
    problem = GluProblem.parse(text)
    inputs = op.sample(problem, "cuda", 11)
    for config in drawn(op, problem, 5, text):
        results = computed(op, problem, config, inputs)
        assert op.problem(*results, *inputs) == problem or problem.rows == 1 or problem.cols == 1
        ratio = worst(op.name, results, inputs)
        assert ratio <= 1, f"{op.name} [{problem}] [{config}] is off by {ratio:.3g} tolerances"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_special_values_are_torch_s(dtype: str) -> None:
    gate = torch.tensor([float(v) for v in VALUES], dtype=DTYPES[dtype], device="cuda")
    out = silu_mul(gate, torch.ones_like(gate))
    expected = torch.nn.functional.silu(gate.float()).to(gate.dtype)
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=2.0**-7 if dtype == "bf16" else 2.0**-20, atol=1e-37)
    assert torch.equal(out.signbit() | out.isnan(), expected.signbit() | expected.isnan())


def test_as_exact_as_torch_in_fp32() -> None:
    """The largest error, outliers included, is at most twice that of torch."""
    gate, up = normal(1 << 12, 1 << 10, dtype=torch.float32) * 8, normal(1 << 12, 1 << 10, dtype=torch.float32)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    scale = exact.abs().clamp_min(1e-30)
    ours = ((silu_mul(gate, up).double() - exact).abs() / scale).max()
    torchs = ((torch.nn.functional.silu(gate) * up).double().sub(exact).abs() / scale).max()
    assert ours <= 2 * torchs


# ---- memory ---------------------------------------------------------------------------------------------


def test_any_strides() -> None:
    joint = normal(3, 50, 2 * 344)
    gate, up = joint.chunk(2, dim=-1)
    assert right(silu_mul(gate, up), gate, up)
    square = normal(300, 300)
    for gate, up in [
        (square.t(), square),
        (square.t(), square.t()),
        (square[::2, 1::3], square[1::2, ::3]),
        (square[:1].expand(300, 300), square),
        (square[0, 0].expand(300, 300), square.t()),
        (normal(6, 5, 40).transpose(0, 1), normal(5, 6, 40)),
        (normal(5, 1, 40).expand(5, 6, 40), normal(5, 6, 40)),
        (normal(7), normal(7)),
        (normal(2, 2, 2, 2, 9), normal(2, 2, 2, 2, 9)),
    ]:
        assert right(silu_mul(gate, up), gate, up), (gate.shape, gate.stride(), up.stride())


@pytest.mark.parametrize("begin", [0, 1, 2, 4, 8])
def test_out_into_a_slice(begin: int) -> None:
    gate, up = normal(65, 1001), normal(65, 1001)
    assert right(slice_written(begin, lambda out: silu_mul(gate, up, out=out)), gate, up)


def test_out_beside_and_upon_the_inputs() -> None:
    whole = normal(64, 3 * 128)
    gate, up, out = whole.chunk(3, dim=-1)
    expected = silu_mul(gate, up)
    silu_mul(gate, up, out=out)
    assert torch.equal(out, expected)
    up_before = up.clone()
    assert silu_mul(gate, up, out=gate) is gate
    assert torch.equal(gate, expected)
    assert torch.equal(up, up_before)
    for wrong in (whole[:, 64:192], whole[:, 1:129], whole.view(-1)[: 64 * 128].view(64, 128)):
        with pytest.raises(UnsupportedProblem, match="element upon element"):
            silu_mul(gate, up, out=wrong)
    with pytest.raises(UnsupportedProblem, match="overlap itself"):
        silu_mul(gate, up, out=normal(1, 128).expand(64, 128))


def test_out_that_is_no_matrix() -> None:
    gate, up = normal(4, 6, 40), normal(4, 6, 40)
    out = torch.empty(6, 4, 40, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    silu_mul(gate, up, out=out)
    assert torch.equal(out, silu_mul(gate, up))


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (2, 0, 3)])
def test_empty(shape: tuple[int, ...]) -> None:
    gate = torch.empty(shape, device="cuda", dtype=torch.float16)
    assert silu_mul(gate, gate).shape == shape


@pytest.mark.slow
def test_more_than_two_billion_elements() -> None:
    needs_memory(24)
    rows, cols = 70_000, 32_771
    gate, up = normal(rows, cols), normal(rows, cols)
    out = silu_mul(gate, up)
    for begin in (0, 65_000, rows - 300):
        part = slice(begin, begin + 300)
        assert right(out[part], gate[part], up[part])
    # In rows that are far apart, the offset of a row alone passes 2^31.
    far = gate.view(-1)[: (1 << 31) + 2048].as_strided((3, 1024), (1 << 30, 1))
    assert right(silu_mul(far, far), far, far)
    columns = gate.view(-1)[: (1 << 31) + 2048].as_strided((5, 3), (7, 1 << 30))
    assert right(silu_mul(columns, columns), columns, columns)


# ---- launches -------------------------------------------------------------------------------------------


def test_devices_are_not_mixed() -> None:
    with pytest.raises(UnsupportedProblem, match="one device"):
        silu_mul(normal(4, 8), torch.zeros(4, 8, dtype=torch.bfloat16))
    with pytest.raises(UnsupportedProblem, match=r"takes bfloat16, float16, float32; got torch.float64"):
        silu_mul(normal(4, 8).double(), normal(4, 8).double())


def test_forced_config() -> None:
    gate, up = normal(64, 4096), normal(64, 4096)
    config = SILU_MUL.Config(1, 512, 2, "first")
    expected = silu_mul(gate, up)
    assert torch.equal(silu_mul(gate, up, config=config), expected)
    assert torch.equal(silu_mul(gate, up, config=str(config)), expected)
    with pytest.raises(InvalidConfig, match="block_rows must be 1"):
        silu_mul(gate, up, config="block_rows=2 block_cols=512 warps=2 evict=first")


def test_reload_forgets_plans() -> None:
    gate, up = normal(8, 64), normal(8, 64)
    first = silu_mul(gate, up)
    cutekernels.reload()
    assert torch.equal(silu_mul(gate, up), first)


# ---- gradients and tracing ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("arrangement", ["dense", "halves", "expanded gradient", "batch transposed"])
def test_gradients(dtype: torch.dtype, arrangement: str) -> None:
    joint = normal(5, 7, 2 * 130, dtype=dtype)
    gate, up = joint.chunk(2, dim=-1) if arrangement == "halves" else (normal(5, 7, 130, dtype=dtype) for _ in range(2))
    if arrangement == "batch transposed":
        gate = gate.transpose(0, 1).contiguous().transpose(0, 1)
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    out = silu_mul(gate, up)
    dout = torch.ones_like(out[:1, :1, :1]).expand_as(out) if "expanded" in arrangement else torch.randn_like(out)
    out.backward(dout)
    inputs = [t.detach().reshape(-1, 130) for t in (dout, gate, up)]
    results = [t.reshape(-1, 130) for t in (gate.grad, up.grad) if t is not None]
    assert worst("silu_mul_backward", results, inputs) <= 1


@traced
def test_compiled_whole() -> None:
    @torch.compile(fullgraph=True)
    def mlp(joint: Tensor, down: Tensor) -> Tensor:
        gate, up = joint.chunk(2, dim=-1)
        return silu_mul(gate, up) @ down

    joint, down = normal(64, 512).requires_grad_(), normal(256, 32)
    out = mlp(joint, down)
    gate, up = joint.detach().chunk(2, dim=-1)
    torch.testing.assert_close(out, silu_mul(gate, up) @ down)
    out.sum().backward()
    dout = down.sum(dim=1).expand(64, 256)
    exact = truth("silu_mul_backward", [dout, gate, up])
    assert joint.grad is not None
    for half, (value, magnitude, _) in zip(joint.grad.chunk(2, dim=-1), exact, strict=True):
        # dout itself was rounded to bf16 by the matrix product
        assert ((half.double() - value).abs() <= 2.0**-7 * magnitude + 2.0**-6 * value.abs() + 1e-3).all()
