"""The norms' kernels compiled without a GPU: their code, their resources, and what each knob changes."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels.ops.norms.gradients import COLUMN_SUM, ColumnSumConfig, ColumnSumProblem
from cutekernels.ops.norms.rows import NormConfig
from tests.norms.cases import OPS
from tests.triton_compiled import H200, built, check_knobs


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


@pytest.mark.parametrize("op", OPS)
def test_programs_that_stay_copy_ahead(op: str) -> None:
    """cp.async of 16 bytes into shared memory, for each operand that is read row by row."""
    problem = OPS[op].Problem(32768, 4096)
    config = OPS[op].Config(1, 4096, True, 8, 2, 3)
    text = built(OPS[op], problem, config).ptx
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, 0x10|cp\.async\.cg\.shared\.global", text)
    per_thread = 2 * (1 if op in ("rms_norm", "layer_norm") else 2)
    assert len(copies) == 3 * per_thread  # two tiles before the loop, one in it


@pytest.mark.parametrize(("op", "weights"), list(product(OPS, ["same", "fp32"])))
def test_the_default_of_a_decode_step_is_one_access_per_thread(op: str, weights: str) -> None:
    problem = OPS[op].Problem(1, 4096, weight=weights)
    config = OPS[op].default(problem, H200)
    assert (config.block_rows, config.block_cols, config.warps, config.stages) == (1, 4096, 16, 1)
    assert OPS[op].grid(problem, config, 132) == (1, 1, 1)
