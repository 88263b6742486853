"""``silu_mul``'s kernels compiled without a GPU: their code, their resources, and what each knob changes."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.ops.activations.op import SILU_MUL, GluProblem
from tests.activations.silu_mul_cases import OPS
from tests.compiled import pairs
from tests.triton_compiled import H200, TARGETS, accesses, built, check_knobs, check_resources, program

TEXTS = ("rows=2048 cols=11008", "rows=2048 cols=11008 layout=rows", "rows=64 cols=99 dtype=fp32 layout=strided")


@pytest.mark.parametrize("spec", [*TARGETS, gpu.lookup("rtx3090")], ids=lambda g: g.target)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_compiles_for_every_architecture(op: Any, spec: gpu.GpuSpec) -> None:
    """A problem each, in turns, one op with its default and the other with a random config."""
    problem = GluProblem.parse(next((text for text, paired in pairs(TEXTS) if paired == spec), TEXTS[0]))
    default = (op is SILU_MUL) == (spec in TARGETS[::2])
    config = op.default(problem, spec) if default else random.Random(spec.name).choice(list(op.valid(problem, spec)))
    assert check_resources(op, problem, config, spec).smem_bytes == 0


def test_the_largest_tiles_do_not_spill() -> None:
    """The rule on registers in why_not keeps every valid config free of spills."""
    for op, text in product(OPS.values(), ["rows=64 cols=8192 layout=rows", "rows=64 cols=99 layout=strided"]):
        problem = GluProblem.parse(text)
        worst = max(op.valid(problem, H200), key=lambda c: c.block_rows * c.block_cols / c.warps)
        check_resources(op, problem, worst)


BASE = {
    "dense": (1, 2048, 4, "normal"),
    "rows": (2, 1024, 4, "normal"),
    "strided": (16, 32, 4, "normal"),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
@pytest.mark.parametrize("layout", BASE)
def test_every_knob_changes_the_code_or_the_grid(op: Any, layout: str) -> None:
    problem = GluProblem(2048, 11008, layout=layout)
    changed = check_knobs(op, problem, op.Config(*BASE[layout]))
    assert changed.keys() | ({"block_rows"} if layout == "dense" else set()) == {"", *op.Config.space()}


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
    """Narrow accesses belong to the ragged end of a row, whatever its length."""
    problem = GluProblem.parse(text)
    spec = gpu.lookup("rtx5090" if "align" in text else "h200")
    assert accesses(built(SILU_MUL, problem, SILU_MUL.default(problem, spec), spec).ptx) == widths


def test_compiled_code_does_not_depend_on_extents() -> None:
    config = SILU_MUL.Config(*BASE["rows"])
    first, second = (GluProblem(rows, cols, layout="rows") for rows, cols in ((2048, 11008), (64, 999)))
    assert first.static() == second.static()
    assert program(SILU_MUL, first, config) == program(SILU_MUL, second, config)
