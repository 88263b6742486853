"""``gelu_mul`` and ``bias_gelu`` compiled without a GPU. The gated schedule is tested with ``silu_mul``."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from cutekernels.ops.activations.op import GELU_MUL, TileConfig
from tests.triton_compiled import built


def test_exact_gelu_costs_no_more_than_its_approximation() -> None:
    """The exact GELU in half precision is a polynomial and one exp2; tanh takes an exp2 and a division."""
    problems = [GELU_MUL.Problem.parse(f"rows=2048 cols=11008 approximate={kind}") for kind in ("none", "tanh")]
    config = TileConfig(1, 2048, 4, "normal")
    exact, approximate = (built(GELU_MUL, problem, config).ptx for problem in problems)
    assert exact.count("ex2.approx") == approximate.count("ex2.approx")
    assert "div.full" not in exact
    assert "div.full" in approximate


def test_the_problems_of_both_activations_are_told_apart() -> None:
    config = TileConfig(1, 2048, 4, "normal")
    exact, approximate = (GELU_MUL.Problem.parse(f"rows=64 cols=64{a}") for a in ("", " approximate=tanh"))
    assert exact.static() != approximate.static()
    assert exact.bucket() != approximate.bucket()
    assert built(GELU_MUL, exact, config).ptx != built(GELU_MUL, approximate, config).ptx
