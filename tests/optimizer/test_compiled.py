"""AdamW's kernels compiled for GPUs that are not there: code, resources, and what each knob does to them."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.ops.optimizer import ADAMW_STEP, ADAMW_TABLE, AdamWConfig, AdamWProblem
from tests.optimizer.cases import H200

TARGETS = [gpu.lookup(name) for name in ("a100", "l40s", "h200", "rtx5090")]
OPS = {op.name: op for op in (ADAMW_STEP, ADAMW_TABLE)}


@cache
def built(op: str, problem: AdamWProblem, config: AdamWConfig, target: str) -> Any:
    return OPS[op].build(problem, config, gpu.lookup(target))


def accesses(text: str) -> set[str]:
    return set(re.findall(r"(?:ld|st)\.global\S*?\.((?:v\d\.)?b\d+)\b", text))


@pytest.mark.parametrize("spec", TARGETS, ids=lambda g: g.target)
@pytest.mark.parametrize("op", OPS)
def test_compiles_for_every_architecture(op: str, spec: gpu.GpuSpec) -> None:
    rng = random.Random(spec.name)
    for text in ("elements=1000000", "elements=5 dtype=bf16 grad=fp32 master=1 maximize=1 rate=device align=2"):
        problem = AdamWProblem.parse(text).replace(step="device" if op == "adamw_table" else "host")
        for config in (ADAMW_STEP.default(problem, spec), rng.choice(list(ADAMW_STEP.valid(problem, spec)))):
            facts = built(op, problem, config, spec.name).facts
            assert facts.stack_bytes == facts.smem_bytes == 0, (text, config, facts)


@pytest.mark.parametrize("op", OPS)
def test_the_largest_blocks_do_not_spill(op: str) -> None:
    problem = AdamWProblem(1000, "bf16", "fp32", master=True, step="device")
    for config in (AdamWConfig(2048, 4, "normal"), AdamWConfig(4096, 8, "first")):
        assert built(op, problem, ADAMW_STEP.check(problem, config, H200), "h200").facts.stack_bytes == 0


def test_every_knob_changes_the_code_or_the_grid() -> None:
    problem, base = AdamWProblem(1000000), AdamWConfig(1024, 4, "normal")
    seen = {(built("adamw_step", problem, base, "h200").ptx, ADAMW_STEP.grid(problem, base))}
    for knob, values in AdamWConfig.space().items():
        others = [base.replace(**{knob: v}) for v in values if v != getattr(base, knob)]
        others = [c for c in others if ADAMW_STEP.why_not(problem, c, H200) is None]
        assert others, knob
        for config in others[:2]:
            made = (built("adamw_step", problem, config, "h200").ptx, ADAMW_STEP.grid(problem, config))
            assert made not in seen, f"{knob} changes nothing in {config}"
            seen.add(made)


@pytest.mark.parametrize(
    ("words", "widths"),
    [
        ("", {"v4.b32", "b32"}),
        ("align=4", {"b32"}),
        ("dtype=bf16", {"v4.b32", "v2.b32", "b32", "b16"}),
        ("dtype=bf16 align=2", {"b32", "b16"}),
    ],
)
def test_accesses_are_as_wide_as_alignment_allows(words: str, widths: set[str]) -> None:
    """The narrow ones belong to the ragged end, whatever its length; b64 are a table's addresses."""
    problem = AdamWProblem.parse(f"elements=1000000 step=device {words}")
    for op in OPS:
        config = ADAMW_STEP.default(problem, H200)
        artifact = built(op, problem, config, "h200")
        found = accesses(artifact.ptx)
        assert found - {"b64"} == widths
        assert ("b64" in found) == (op == "adamw_table")
        assert artifact.facts.registers <= 72
