"""The bodies in CuTe of ops that have two, on a GPU: numerics against fp64, in place, empty, streams and graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("cutlass")

from cutekernels import compile as compiler
from cutekernels import gpu, rms_norm, rope
from tests.norms import cases as norm_cases
from tests.rope import cases as rope_cases
from tests.shared.two_bodies_cases import OPS, RAGGED, in_cute

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_cache_one_seed")]

NORM = "block_rows=1 block_cols=4096 resident=1 warps=8 per_sm=0 stages=1 body=cute"
TURN = "tokens=1 heads=4 block=64 warps=1 body=cute"


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def worst(op: Any, problem: Any, results: Any, args: Any) -> float:
    """The largest error over its tolerance."""
    options = {name: getattr(problem, name) for name in op.options}
    if op.name == "rope":
        return rope_cases.worst(results, args, **options)
    named = dict(zip([*op.inputs, *op.scalars], args, strict=True)) | options
    exact = norm_cases.truth(op.name, list(results), named)
    return max(norm_cases.error_ratio(r, *e) for r, e in zip(results, exact, strict=True))


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, op in OPS.items() for t in (*op.suite, *RAGGED[n])])
def test_random_configs_are_right(name: str, text: str) -> None:
    op, spec = OPS[name], gpu.detect()
    problem = op.Problem.parse(text)
    found = in_cute(op, problem, spec)
    if not found:
        pytest.skip("refused by a rule")
    args = op.sample(problem, "cuda", 11)
    for config in random.Random(text).sample(found, min(4, len(found))):
        results = op.outputs(problem, *args)
        for result in results:
            result.fill_(float("nan"))
        op.bind(problem, config, compiler.get(op, problem, config, spec))(*results, *args)
        ratio = worst(op, problem, results, args)
        assert ratio <= 1, f"{name} [{problem}] [{config}] is off by {ratio:.3g} tolerances"


def normalised(t: Tensor, out: Tensor | None = None) -> Tensor:
    return rms_norm(t, t[0].clone(), out=out, config=NORM)


def test_out_upon_the_input() -> None:
    x = normal(333, 4096)
    expected = normalised(x)
    assert normalised(x, x) is x
    assert torch.equal(x, expected)


def test_heads_turn_in_place_and_where_positions_are_illegal() -> None:
    q, k, (cos, sin) = normal(2, 9, 8, 128), normal(2, 9, 2, 128), rope_cases.table(9, 32, device="cuda")
    config = TURN.replace("block=64", "block=32").replace("heads=4", "heads=8")
    positions = torch.tensor([0, 3], device="cuda")  # the last tokens of the second leave the table
    expected = rope(q, k, cos, sin, positions=positions, config=config)
    by_triton = rope(q, k, cos, sin, positions=positions)
    turned = rope(q, k, cos, sin, positions=positions, inplace=True, config=config)
    assert turned[0] is q
    for ours, other, placed in zip(expected, by_triton, turned, strict=True):
        assert ours is not None and other is not None and placed is not None
        assert ours[1, 6:, :, :64].isnan().all()
        assert not ours[:, :6].isnan().any()
        torch.testing.assert_close(ours, other, equal_nan=True)
        torch.testing.assert_close(placed, ours, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 4096), (3, 0, 4096)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    assert rms_norm(x, config=NORM).shape == shape


def test_streams_and_graphs() -> None:
    x, out = normal(64, 4096), normal(64, 4096)
    expected = normalised(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # the third call is one that repeats, by addresses
            normalised(x, out)
    stream.synchronize()
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        normalised(x, out)
    out.zero_()
    x.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, normalised(x))
