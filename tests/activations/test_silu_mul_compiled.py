"""``silu_mul``'s kernels compiled for GPUs that are not there: code, resources, and what each knob does to them."""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.ops.activations.op import SILU_MUL, GluProblem
from cutekernels.ops.activations.tiles import TileConfig
from tests.activations.silu_mul_cases import H200, OPS

TARGETS = [gpu.lookup(name) for name in ("a100", "rtx3090", "l40s", "h200", "rtx5090")]


@cache
def ptx(op: str, problem: GluProblem, config: TileConfig, target: str) -> str:
    return OPS[op].build(problem, config, gpu.lookup(target)).ptx  # type: ignore[attr-defined, no-any-return]


def accesses(text: str) -> set[str]:
    return set(re.findall(r"(?:ld|st)\.global\S*?\.((?:v\d\.)?b\d+)\b", text))


@pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_compiles_for_every_architecture(op: Any, spec: gpu.GpuSpec) -> None:
    rng = random.Random(spec.name)
    for text in (
        "rows=2048 cols=11008",
        "rows=2048 cols=11008 layout=rows",
        "rows=64 cols=99 dtype=fp32 layout=strided",
    ):
        problem = GluProblem.parse(text)
        configs = [op.default(problem, spec), rng.choice(list(op.valid(problem, spec)))]
        for config in configs:
            facts = op.build(problem, config, spec).facts
            assert facts.stack_bytes == 0, (text, config, facts)
            assert facts.smem_bytes == 0
            assert facts.registers * 32 * config.warps <= 64 * 1024


def test_the_largest_tiles_do_not_spill() -> None:
    """The rule on registers in why_not is there to keep every valid config free of spills."""
    for op, text in product(OPS.values(), ["rows=64 cols=8192 layout=rows", "rows=64 cols=99 layout=strided"]):
        problem = GluProblem.parse(text)
        worst = max(op.valid(problem, H200), key=lambda c: c.block_rows * c.block_cols / c.warps)
        assert op.build(problem, worst, H200).facts.stack_bytes == 0, worst


BASE = {
    "dense": TileConfig(1, 2048, 4, "normal"),
    "rows": TileConfig(2, 1024, 4, "normal"),
    "strided": TileConfig(16, 32, 4, "normal"),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
@pytest.mark.parametrize("layout", BASE)
def test_every_knob_changes_the_code_or_the_grid(op: Any, layout: str) -> None:
    problem = GluProblem(2048, 11008, layout=layout)
    base = op.check(problem, BASE[layout], H200)
    seen = {(ptx(op.name, problem, base, "h200"), op.grid(problem, base))}
    for knob, values in TileConfig.space().items():
        others = [base.replace(**{knob: v}) for v in values if v != getattr(base, knob)]
        others = [c for c in others if op.why_not(problem, c, H200) is None]
        assert others or (knob == "block_rows" and layout == "dense"), knob
        for config in others[:2]:
            made = (ptx(op.name, problem, config, "h200"), op.grid(problem, config))
            assert made not in seen, f"{knob} changes nothing in {config}"
            seen.add(made)


@pytest.mark.parametrize(
    ("text", "widths"),
    [
        ("rows=2048 cols=11008", {"v4.b32", "b16"}),
        ("rows=2048 cols=11008 layout=rows", {"v4.b32", "b16"}),
        ("rows=2048 cols=11008 layout=rows align=8", {"v2.b32", "b16"}),
        ("rows=2048 cols=11008 layout=rows align=4", {"b32", "b16"}),
        ("rows=2048 cols=11008 layout=rows align=2", {"b16"}),
        ("rows=2048 cols=11008 dtype=fp32", {"v4.b32", "b32"}),
    ],
)
def test_accesses_are_as_wide_as_alignment_allows(text: str, widths: set[str]) -> None:
    """The narrow ones belong to the ragged end of a row, whatever its length."""
    problem = GluProblem.parse(text)
    for target in ("a100", "h200", "rtx5090"):
        config = SILU_MUL.default(problem, gpu.lookup(target))
        assert accesses(ptx("silu_mul", problem, config, target)) == widths


def test_compiled_code_does_not_depend_on_extents() -> None:
    config = BASE["rows"]
    first, second = (GluProblem(rows, cols, layout="rows") for rows, cols in ((2048, 11008), (64, 999)))
    assert first.static() == second.static()
    assert ptx("silu_mul", first, config, "h200") == ptx("silu_mul", second, config, "h200")
