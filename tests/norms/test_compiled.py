"""The norms' kernels compiled for GPUs that are not there: code, resources, and what each knob does to them."""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.ops.norms.gradients import COLUMN_SUM, COLUMN_SUM_PAIR, ColumnSumConfig, ColumnSumProblem
from cutekernels.ops.norms.rows import NormConfig
from tests.norms.cases import H200, OPS

TARGETS = [gpu.lookup(name) for name in ("a100", "l40s", "h200", "rtx5090")]
NO_SPILL = 16  # bytes of stack that ptxas takes here and there with registers to spare
ALL = {**OPS, "column_sum": COLUMN_SUM, "column_sum_pair": COLUMN_SUM_PAIR}


@cache
def ptx(op: str, problem: Any, config: Any, target: str) -> str:
    return ALL[op].build(problem, config, gpu.lookup(target)).ptx  # type: ignore[no-any-return]


def accesses(text: str) -> set[str]:
    return set(re.findall(r"(?:ld|st)\.global\S*?\.((?:v\d\.)?b\d+)\b", text))


@pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
@pytest.mark.parametrize("op", ALL.values(), ids=ALL.keys())
def test_compiles_for_every_architecture(op: Any, spec: gpu.GpuSpec) -> None:
    rng = random.Random(op.name + spec.name)
    for text in (op.suite[0], rng.choice(op.suite[1:])):
        problem = op.Problem.parse(text)
        for config in (op.default(problem, spec), rng.choice(list(op.valid(problem, spec))))[text == op.suite[0] :]:
            facts = op.build(problem, config, spec).facts
            assert facts.stack_bytes <= NO_SPILL, (problem, config, facts)
            assert facts.registers * 32 * config.warps <= 64 * 1024
            assert facts.smem_bytes <= spec.smem_per_block_bytes


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_the_largest_tiles_do_not_spill(op: Any) -> None:
    """The model of registers in why_not keeps valid configs from spilling."""
    for text in ("rows=20000 cols=8192", "rows=20000 cols=1000 layout=strided"):
        problem = op.Problem.parse(text)
        valid = [c for c in op.valid(problem, H200) if c.resident]
        largest = max(valid, key=lambda c: (c.block_rows * c.block_cols / c.warps, c.warps, c.stages))
        widest = max(valid, key=lambda c: (c.warps, c.block_rows * c.block_cols, c.stages))
        for config in (largest, widest):
            assert op.build(problem, config, H200).facts.stack_bytes <= NO_SPILL, config


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_every_knob_changes_the_code_or_the_grid(op: Any) -> None:
    per_sm, stages = (2, 3) if op.strides_over_tiles else (0, 1)
    staying = (op.Problem(65536, 4096), NormConfig(1, 4096, True, 8, 2, 4))
    wide = (op.Problem(2048, 16384), NormConfig(1, 4096, False, 8, min(per_sm, 1), 1))
    each = (op.Problem(65536, 256), NormConfig(8, 256, True, 4, per_sm, stages))
    moved: set[str] = set()
    for problem, base in (staying, wide, each):
        op.check(problem, base, H200)
        seen = {(ptx(op.name, problem, base, "h200"), op.grid(problem, base, 132))}
        for knob, values in NormConfig.space().items():
            others = [base.replace(**{knob: v}) for v in values if v != getattr(base, knob)]
            for config in [c for c in others if op.why_not(problem, c, H200) is None][:1]:
                made = (ptx(op.name, problem, config, "h200"), op.grid(problem, config, 132))
                assert made not in seen, f"{knob} changes nothing in {config}"
                seen.add(made)
                moved.add(knob)
    # A row is whole or in chunks: no single knob leads from the one to the other.
    assert moved == set(NormConfig.space()) - {"resident"}


def test_every_knob_of_the_column_sum_changes_the_code_or_the_grid() -> None:
    problem, base = ColumnSumProblem(264, 4096), ColumnSumConfig(64, 32, 4)
    seen = {(ptx("column_sum", problem, base, "h200"), COLUMN_SUM.grid(problem, base))}
    for knob, values in ColumnSumConfig.space().items():
        others = [base.replace(**{knob: v}) for v in values if v != getattr(base, knob)]
        for config in [c for c in others if COLUMN_SUM.why_not(problem, c, H200) is None]:
            made = (ptx("column_sum", problem, config, "h200"), COLUMN_SUM.grid(problem, config))
            assert made not in seen, f"{knob} changes nothing in {config}"
            seen.add(made)


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
    for target in ("a100", "h200"):
        config = OPS["rms_norm"].default(problem, gpu.lookup(target))
        assert accesses(ptx("rms_norm", problem, config, target)) == (
            widths | {"v4.b32"} if "fp32" in text else widths
        ), target


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("target", ["a100", "h200"])
def test_programs_that_stay_copy_ahead(op: str, target: str) -> None:
    """cp.async of 16 bytes into shared memory, for each operand that is read row by row."""
    problem = OPS[op].Problem(32768, 4096)
    config = NormConfig(1, 4096, True, 8, 2, 3)
    text = ptx(op, problem, config, target)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, 0x10|cp\.async\.cg\.shared\.global", text)
    per_thread = 2 * (1 if op in ("rms_norm", "layer_norm") else 2)
    assert len(copies) == 3 * per_thread  # two tiles before the loop, one in it


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "layer_norm"])
def test_small_results_are_kept(op: str) -> None:
    """Each store is there twice, of which the kernel takes one by the result's size."""
    problem = OPS[op].Problem(64, 3584)
    text = ptx(op, problem, OPS[op].default(problem, H200), "h200")
    kept = re.findall(r"st\.global\.L1::evict_last\.L2::cache_hint\.v4", text)
    assert len(kept) == len(re.findall(r"st\.global\.v4", text)) >= (2 if op == "add_rms_norm" else 1)


@pytest.mark.parametrize("op", OPS)
def test_compiled_code_does_not_depend_on_extents(op: str) -> None:
    first, second = OPS[op].Problem(2048, 4096), OPS[op].Problem(4096, 3000)
    config = NormConfig(1, 4096, True, 8, 2 if OPS[op].strides_over_tiles else 0, 3 if "back" in op else 1)
    assert first.static() == second.static()
    assert ptx(op, first, config, "h200") == ptx(op, second, config, "h200")


@pytest.mark.parametrize(("op", "weights"), list(product(OPS, ["same", "fp32"])))
def test_the_default_of_a_decode_step_is_one_access_per_thread(op: str, weights: str) -> None:
    problem = OPS[op].Problem(1, 4096, weight=weights)
    config = OPS[op].default(problem, H200)
    assert (config.block_rows, config.block_cols, config.warps, config.stages) == (1, 4096, 16, 1)
    assert OPS[op].grid(problem, config, 132) == (1, 1, 1)
