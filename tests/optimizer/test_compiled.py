"""AdamW's kernels compiled without a GPU: their code, their resources, and what each knob changes."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.ops.optimizer.op import ADAMW_COUNT, ADAMW_SQUARES, ADAMW_STEP, ADAMW_TABLE, AdamWConfig, AdamWProblem
from tests.triton_compiled import H200, accesses, built, check_resources, in_turns

OPS = {op.name: op for op in (ADAMW_STEP, ADAMW_TABLE)}


@in_turns({name: name for name in OPS})
def test_compiles_for_every_architecture(op: str, spec: gpu.GpuSpec) -> None:
    rng = random.Random(spec.name)
    for text in ("elements=1000000", "elements=5 dtype=bf16 grad=fp32 master=1 maximize=1 rate=device align=2"):
        problem = AdamWProblem.parse(text).replace(step="device" if op == "adamw_table" else "host")
        default = (op == "adamw_step") == (problem.dtype == "bf16")
        config = ADAMW_STEP.default(problem, spec) if default else rng.choice(list(ADAMW_STEP.valid(problem, spec)))
        assert check_resources(OPS[op], problem, config, spec).smem_bytes == 0


@in_turns({op.name: op for op in (ADAMW_SQUARES, ADAMW_COUNT)})
def test_what_goes_before_compiles_for_every_architecture(op: Any, spec: gpu.GpuSpec) -> None:
    for text in ("elements=1000000 dtype=bf16", "elements=5 dtype=bf16 grad=fp32 align=2"):
        problem = AdamWProblem.parse(text)
        largest = max((c for c in ADAMW_STEP.valid(problem, spec)), key=lambda c: (c.block, c.warps))
        for config in (ADAMW_STEP.default(problem, spec), largest):
            check_resources(op, problem, config, spec)
    if op is ADAMW_SQUARES:
        assert "v4.b32" in accesses(built(op, AdamWProblem(9, "bf16"), largest).ptx, "ld")


@pytest.mark.parametrize("op", OPS)
def test_the_largest_blocks_do_not_spill(op: str) -> None:
    problem = AdamWProblem(1000, "bf16", "fp32", master=True, step="device")
    for config in (AdamWConfig(2048, 4, "normal"), AdamWConfig(4096, 8, "first")):
        check_resources(OPS[op], problem, ADAMW_STEP.check(problem, config, H200))


@pytest.mark.parametrize(
    ("words", "widths"),
    [
        ("", {"v4.b32", "b32"}),
        ("align=4", {"b32"}),
        ("dtype=bf16", {"v4.b32", "v2.b32", "b32", "b16"}),
        ("dtype=bf16 align=2", {"b32", "b16"}),
        ("dtype=bf16 moments=bf16", {"v4.b32", "b32", "b16"}),
        ("dtype=fp16 moments=fp16 align=2", {"b32", "b16"}),
        ("moments=bf16", {"v4.b32", "v2.b32", "b32", "b16"}),
    ],
)
def test_accesses_are_as_wide_as_alignment_allows(words: str, widths: set[str]) -> None:
    """Narrow accesses belong to the ragged end, whatever its length; b64 are a table's addresses."""
    problem = AdamWProblem.parse(f"elements=1000000 step=device {words}")
    for op in OPS:
        config = ADAMW_STEP.default(problem, H200)
        artifact = built(OPS[op], problem, config)
        found = accesses(artifact.ptx)
        assert found - {"b64"} == widths
        assert ("b64" in found) == (op == "adamw_table")
        assert artifact.facts.registers <= 72
