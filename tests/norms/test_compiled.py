"""The norms' kernels compiled without a GPU: their code, their resources, and what each knob changes."""

from __future__ import annotations

import random
import re
from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.ops.norms.gradients import COLUMN_SUM, COLUMN_SUM_PAIR, ColumnSumConfig, ColumnSumProblem
from cutekernels.ops.norms.rows import NormConfig
from tests.norms.cases import OPS
from tests.triton_compiled import H200, accesses, built, check_knobs, check_resources, in_turns, program

NO_SPILL = 16  # bytes of stack that ptxas takes here and there with registers to spare
ALL = {**OPS, "column_sum": COLUMN_SUM, "column_sum_pair": COLUMN_SUM_PAIR}


@in_turns(ALL)
def test_compiles_for_every_architecture(op: Any, spec: gpu.GpuSpec) -> None:
    rng = random.Random(op.name + spec.name)
    first, other = (op.Problem.parse(text) for text in (op.suite[0], rng.choice(op.suite[1:])))
    check_resources(op, first, rng.choice(list(op.valid(first, spec))), spec, stack=NO_SPILL)
    check_resources(op, other, op.default(other, spec), spec, stack=NO_SPILL)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_the_largest_tiles_do_not_spill(op: Any) -> None:
    """The model of registers in why_not keeps valid configs from spilling."""
    whole, ragged = (op.Problem.parse(f"rows=20000 {words}") for words in ("cols=8192", "cols=1000 layout=strided"))
    for problem, size in (
        (whole, lambda c: (c.block_rows * c.block_cols / c.warps, c.warps, c.stages)),
        (ragged, lambda c: (c.warps, c.block_rows * c.block_cols, c.stages)),
    ):
        largest = max((c for c in op.valid(problem, H200) if c.resident), key=size)
        check_resources(op, problem, largest, stack=NO_SPILL)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_every_knob_changes_the_code_or_the_grid(op: Any) -> None:
    per_sm, stages = (2, 3) if op.strides_over_tiles else (0, 1)
    staying = (op.Problem(65536, 4096), op.Config(1, 4096, True, 8, 2, 4))
    wide = (op.Problem(2048, 16384), op.Config(1, 4096, False, 8, min(per_sm, 1), 1))
    each = (op.Problem(65536, 256), op.Config(8, 256, True, 4, per_sm, stages))
    changed: set[str] = set()
    for problem, base in (staying, wide, each)[op.strides_over_tiles :]:  # all of those leave values to each
        changed |= check_knobs(op, problem, base, launch=lambda config, p=problem: op.grid(p, config, 132)).keys()
    # A row is whole or in chunks: no single knob leads from the one to the other.
    assert changed == {"", *NormConfig.space()} - {"resident"}


def test_every_knob_of_the_column_sum_changes_the_code_or_the_grid() -> None:
    check_knobs(COLUMN_SUM, ColumnSumProblem(264, 4096), ColumnSumConfig(64, 32, 4), most=None)


@pytest.mark.parametrize(
    ("text", "widths"),
    [
        ("rows=2048 cols=4096", {"v4.b32"}),
        ("rows=2048 cols=3584", {"v4.b32"}),
        ("rows=2048 cols=4096 weight=fp32", {"v4.b32"}),
        ("rows=2048 cols=128 heads=32 layout=heads per_head=1", {"v4.b32", "b16"}),  # a thread per weight
        ("rows=2048 cols=4100 align=8", {"v2.b32"}),
        ("rows=2048 cols=4098 align=4", {"b32"}),
        ("rows=2048 cols=4097 align=2", {"b16"}),
        ("rows=2048 cols=4096 dtype=fp32", {"v4.b32"}),
        ("rows=2048 cols=20000", {"v4.b32"}),
    ],
)
def test_accesses_are_as_wide_as_alignment_allows(text: str, widths: set[str]) -> None:
    problem = OPS["rms_norm"].Problem.parse(text)
    config = OPS["rms_norm"].default(problem, H200)
    found = accesses(built(OPS["rms_norm"], problem, config).ptx)
    assert found == (widths | {"v4.b32"} if "fp32" in text else widths)


@pytest.mark.parametrize("op", OPS)
def test_programs_that_stay_copy_ahead(op: str) -> None:
    """cp.async of 16 bytes into shared memory, for each operand that is read row by row."""
    problem = OPS[op].Problem(32768, 4096)
    config = OPS[op].Config(1, 4096, True, 8, 2, 3)
    text = built(OPS[op], problem, config).ptx
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, 0x10|cp\.async\.cg\.shared\.global", text)
    per_thread = 2 * (1 if op in ("rms_norm", "layer_norm") else 2)
    assert len(copies) == 3 * per_thread  # two tiles before the loop, one in it


@pytest.mark.parametrize("op", OPS)
def test_compiled_code_does_not_depend_on_extents(op: str) -> None:
    first, second = OPS[op].Problem(2048, 4096), OPS[op].Problem(4096, 3000)
    config = OPS[op].Config(1, 4096, True, 8, 2 if OPS[op].strides_over_tiles else 0, 3 if "back" in op else 1)
    assert first.static() == second.static()
    assert program(OPS[op], first, config) == program(OPS[op], second, config)


@pytest.mark.parametrize(("op", "weights"), list(product(OPS, ["same", "fp32"])))
def test_the_default_of_a_decode_step_is_one_access_per_thread(op: str, weights: str) -> None:
    problem = OPS[op].Problem(1, 4096, weight=weights)
    config = OPS[op].default(problem, H200)
    assert (config.block_rows, config.block_cols, config.warps, config.stages) == (1, 4096, 16, 1)
    assert OPS[op].grid(problem, config, 132) == (1, 1, 1)
