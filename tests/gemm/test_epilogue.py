"""The epilogue that all products share, and one that only this file uses: a factor for each column of out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cutekernels import gpu
from cutekernels.backends.cute import CuteArtifact
from cutekernels.ops.products.dense import GEMM, SCHEDULES
from cutekernels.ops.products.schedules.problem import GemmConfig, GemmProblem

ROWS = {"multistage": 40, "skinny": 40, "skinny_warpgroup": 40, "warpgroup": 136}  # of out, by body


def problem(body: str) -> GemmProblem:
    return GemmProblem.parse(f"m={ROWS[body]} n=200 k=64 b_major=k activation=relu")


def configs(body: str, spec: gpu.GpuSpec) -> list[GemmConfig]:
    """One config of ``body`` for ``spec``, or one for each side that out's columns may take in the product."""
    found = [c for c in GEMM.valid(problem(body), spec) if c.body == body and c.split_k == 1]
    return [next(c for c in found if c.swap_ab == swapped) for swapped in sorted({c.swap_ab for c in found})]


@cache
def scaled(c: GemmConfig, spec: gpu.GpuSpec) -> CuteArtifact:
    """``relu(alpha * factors[n] * (a @ b))``."""
    import cutlass
    from cutlass.cute.runtime import make_fake_tensor

    from cutekernels.backends import cute as backend
    from cutekernels.kernels.cute.parts.column_scale import ColumnScale
    from cutekernels.kernels.cute.parts.epilogue import Activation
    from tests.gemm.scaled import Scaled

    body, epilogue = SCHEDULES[c.body].body(problem(c.body), c, spec), ColumnScale(Activation("relu"))
    if hasattr(body, "results") and c.body != "skinny_warpgroup":
        body = replace(body, results=replace(body.results, epilogue=epilogue))
    else:
        body = replace(body, epilogue=epilogue)
    sym = cutlass.cute.sym_int
    m, n, k = (sym(divisibility=8) for _ in range(3))

    def matrix(rows: Any, columns: Any, stride: tuple[Any, ...]) -> Any:
        return make_fake_tensor(cutlass.BFloat16, (rows, columns), stride=stride, assumed_align=16)

    pitches = [sym(divisibility=8) for _ in range(3)]
    return backend.compile(
        Scaled(body),
        matrix(m, n, (pitches[0], 1)),
        matrix(m, k, (pitches[1], 1)),
        matrix(k, n, (1, pitches[2])),
        make_fake_tensor(cutlass.Float32, (n,), stride=(1,), assumed_align=4),
        cutlass.Float32(1.0),
        gpu=spec,
    )


@pytest.mark.parametrize("body", ROWS)
def test_every_body_takes_a_further_epilogue(body: str) -> None:
    spec = gpu.lookup("h200" if "warpgroup" in body else "a100")
    assert configs(body, spec)
    for c in configs(body, spec):
        assert scaled(c, spec).facts.stack_bytes == 0, c


@pytest.mark.gpu
@pytest.mark.parametrize("body", ROWS)
def test_columns_are_scaled(body: str) -> None:
    spec = gpu.detect()
    if not configs(body, spec):
        pytest.skip(f"{spec.name} has no {body}")
    draw = torch.Generator(device="cuda").manual_seed(0)
    # Small integers and powers of two: every sum and product is exact, in bf16 too.
    a, b = (torch.randint(-1, 2, (rows, 64), generator=draw, device="cuda").bfloat16() for rows in (ROWS[body], 200))
    factors = 2.0 ** torch.randint(-3, 4, (200,), generator=draw, device="cuda")
    expected = torch.relu(0.5 * factors.double() * (a.double() @ b.double().T)).bfloat16()
    for c in configs(body, spec):
        out = torch.full(expected.shape, torch.nan, device="cuda", dtype=torch.bfloat16)
        scaled(c, spec).kernel()(out, a, b.T, factors, 0.5)
        assert torch.equal(out, expected), c


class Coordinates:
    """All of a matrix, in numpy."""

    def __init__(self, gated: bool = False) -> None:
        self.gated = gated

    def columns(self, vector: Any) -> Any:
        return np.broadcast_to(vector, (4, 6))

    def rows(self, vector: Any) -> Any:
        return np.broadcast_to(vector[:, None], (4, 6))

    def elements(self, matrix: Any) -> Any:
        return matrix

    def halves(self, x: Any) -> tuple[Any, Any]:
        return x[:, :3], x[:, 3:]


def test_the_arithmetic() -> None:
    """In numpy: the same methods, which the kernels call with vectors of registers."""
    from cutekernels.kernels.cute.parts.column_scale import ColumnScale
    from cutekernels.kernels.cute.parts.epilogue import Epilogue, EpilogueOperands

    rng = np.random.default_rng(0)
    acc, c = rng.standard_normal((2, 4, 6))
    bias, factors, rows = rng.standard_normal(6), rng.standard_normal(6), rng.standard_normal(4)
    tanh: Any = SimpleNamespace(apply=np.tanh)
    operands = EpilogueOperands(c, bias, 2.0, 0.5, row_factors=rows, own=factors)  # type: ignore[arg-type]
    plain = 2.0 * rows[:, None] * acc
    for epilogue, product in ((Epilogue(tanh), plain), (ColumnScale(tanh), plain * factors)):
        x = product + 0.5 * c + bias
        assert np.allclose(epilogue.apply(acc, Coordinates(), operands), np.tanh(x), rtol=1e-14)
        gated = epilogue.apply(acc, Coordinates(gated=True), operands)
        assert np.allclose(gated, np.tanh(x[:, :3]) * x[:, 3:], rtol=1e-14)
    assert np.array_equal(Epilogue(tanh).apply(acc, Coordinates(), EpilogueOperands()), np.tanh(acc))
