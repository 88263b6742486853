"""``gelu_mul`` and ``bias_gelu`` compiled without a GPU. The gated schedule is tested with ``silu_mul``."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.ops.activations.op import BIAS_GELU, BIAS_GELU_BACKWARD, GELU_MUL
from cutekernels.ops.activations.tiles import TileConfig
from tests.activations.gelu_cases import OPS
from tests.triton_compiled import H200, accesses, built, check_knobs, check_resources, in_turns


@in_turns(OPS)
def test_compiles_for_every_architecture(op: Any, spec: gpu.GpuSpec) -> None:
    rng = random.Random(spec.name + op.name)
    large = op.Problem.parse("rows=2048 cols=4096 approximate=none")
    small = op.Problem.parse("rows=64 cols=99 dtype=fp32 layout=strided approximate=tanh")
    check_resources(op, large, op.default(large, spec), spec)
    check_resources(op, small, rng.choice(list(op.valid(small, spec))), spec)


@pytest.mark.parametrize("op", [BIAS_GELU, BIAS_GELU_BACKWARD], ids=lambda op: op.name)
def test_the_largest_tiles_do_not_spill(op: Any) -> None:
    for text in ("rows=4096 cols=8192", "rows=4096 cols=99 layout=strided"):
        problem = op.Problem.parse(text)
        worst = max(op.valid(problem, H200), key=lambda c: c.block_rows * c.block_cols / c.warps)
        check_resources(op, problem, worst)


@pytest.mark.parametrize("op", [BIAS_GELU, BIAS_GELU_BACKWARD], ids=lambda op: op.name)
def test_every_knob_changes_the_code_or_the_grid(op: Any) -> None:
    changed = check_knobs(op, op.Problem.parse("rows=2048 cols=11008"), TileConfig(2, 1024, 4, "normal"))
    assert changed.keys() == {"", *TileConfig.space()}


@pytest.mark.parametrize(
    ("text", "widths"),
    [
        ("rows=2048 cols=4096", {"v4.b32", "b16"}),
        ("rows=2048 cols=4096 bias=fp32", {"v4.b32", "b16", "b32"}),
        ("rows=2048 cols=1001 align=2", {"b16"}),
        ("rows=2048 cols=4096 dtype=fp32", {"v4.b32", "b32"}),
    ],
)
def test_accesses_are_as_wide_as_alignment_allows(text: str, widths: set[str]) -> None:
    """Narrow accesses belong to the ragged end of a row, whatever its length, and to rows read or written once."""
    for op in (BIAS_GELU, BIAS_GELU_BACKWARD):
        problem = op.Problem.parse(text)
        ptx = built(op, problem, op.default(problem, H200)).ptx
        assert accesses(ptx) - {"b32", "v2.b32"} == widths - {"b32"}
        assert len(re.findall(r"ld\.global\S*?\.v2\.b32", ptx)) <= 1  # the bias's, of the backward pass


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
