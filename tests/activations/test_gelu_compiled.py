"""``gelu_mul`` and ``bias_gelu`` compiled for GPUs that are not there. ``silu_mul`` answers for the gated schedule."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.ops.activations.op import BIAS_GELU, BIAS_GELU_BACKWARD, GELU_MUL
from cutekernels.ops.activations.tiles import TileConfig
from tests.activations.gelu_cases import OPS
from tests.activations.silu_mul_cases import H200

TARGETS = [gpu.lookup(name) for name in ("a100", "l40s", "h200", "rtx5090")]


@cache
def artifact(op: str, problem: str, config: TileConfig, target: str) -> Any:
    declared = OPS[op]
    return declared.build(declared.Problem.parse(problem), config, gpu.lookup(target))


@pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_compiles_for_every_architecture(op: Any, spec: gpu.GpuSpec) -> None:
    rng = random.Random(spec.name + op.name)
    for text in ("rows=2048 cols=4096 approximate=none", "rows=64 cols=99 dtype=fp32 layout=strided approximate=tanh"):
        problem = op.Problem.parse(text)
        config = (
            op.default(problem, spec) if text.startswith("rows=2048") else rng.choice(list(op.valid(problem, spec)))
        )
        facts = artifact(op.name, text, config, spec.name).facts
        assert facts.stack_bytes == 0, (text, config, facts)
        assert facts.registers * 32 * config.warps <= 64 * 1024


@pytest.mark.parametrize("op", [BIAS_GELU, BIAS_GELU_BACKWARD], ids=lambda op: op.name)
def test_the_largest_tiles_do_not_spill(op: Any) -> None:
    for text in ("rows=4096 cols=8192", "rows=4096 cols=99 layout=strided"):
        problem = op.Problem.parse(text)
        worst = max(op.valid(problem, H200), key=lambda c: c.block_rows * c.block_cols / c.warps)
        assert artifact(op.name, text, worst, "h200").facts.stack_bytes == 0, worst


@pytest.mark.parametrize("op", [BIAS_GELU, BIAS_GELU_BACKWARD], ids=lambda op: op.name)
def test_every_knob_changes_the_code_or_the_grid(op: Any) -> None:
    text, base = "rows=2048 cols=11008", TileConfig(2, 1024, 4, "normal")
    problem = op.Problem.parse(text)
    op.check(problem, base, H200)
    seen = {(artifact(op.name, text, base, "h200").ptx, op.grid(problem, base))}
    for knob, values in TileConfig.space().items():
        others = [base.replace(**{knob: v}) for v in values if v != getattr(base, knob)]
        config = next(c for c in others if op.why_not(problem, c, H200) is None)
        made = (artifact(op.name, text, config, "h200").ptx, op.grid(problem, config))
        assert made not in seen, f"{knob} changes nothing in {config}"
        seen.add(made)


@pytest.mark.parametrize("target", ["a100", "h200"])
@pytest.mark.parametrize(
    ("text", "widths"),
    [
        ("rows=2048 cols=4096", {"v4.b32", "b16"}),
        ("rows=2048 cols=4096 bias=fp32", {"v4.b32", "b16", "b32"}),
        ("rows=2048 cols=1001 align=2", {"b16"}),
        ("rows=2048 cols=4096 dtype=fp32", {"v4.b32", "b32"}),
    ],
)
def test_accesses_are_as_wide_as_alignment_allows(text: str, widths: set[str], target: str) -> None:
    """The narrow ones belong to the ragged end of a row, whatever its length, and to rows read or written once."""
    for op in (BIAS_GELU, BIAS_GELU_BACKWARD):
        config = op.default(op.Problem.parse(text), gpu.lookup(target))
        ptx = artifact(op.name, text, config, target).ptx
        found = set(re.findall(r"(?:ld|st)\.global\S*?\.((?:v\d\.)?b\d+)\b", ptx))
        assert found - {"b32", "v2.b32"} == widths - {"b32"}
        assert len(re.findall(r"ld\.global\S*?\.v2\.b32", ptx)) <= 1  # the bias's, of the backward pass


def test_exact_gelu_costs_no_more_than_its_approximation() -> None:
    """In half precision: a polynomial and one exp2, where tanh takes an exp2 and a division."""
    texts = [f"rows=2048 cols=11008 approximate={approximate}" for approximate in ("none", "tanh")]
    config = TileConfig(1, 2048, 4, "normal")
    exact, approximate = (artifact("gelu_mul", text, config, "h200").ptx for text in texts)
    assert exact.count("ex2.approx") == approximate.count("ex2.approx")
    assert "div.full" not in exact
    assert "div.full" in approximate


def test_the_problems_of_both_activations_are_told_apart() -> None:
    config = TileConfig(1, 2048, 4, "normal")
    exact, approximate = (GELU_MUL.Problem.parse(f"rows=64 cols=64{a}") for a in ("", " approximate=tanh"))
    assert exact.static() != approximate.static()
    assert exact.bucket() != approximate.bucket()
    assert (
        artifact("gelu_mul", str(exact), config, "h200").ptx
        != artifact("gelu_mul", str(approximate), config, "h200").ptx
    )
