"""Kernels of routing and sampling compiled without a GPU: their code, their resources, and what each knob changes."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

pytest.importorskip("triton")

from cutekernels import gpu
from cutekernels.ops.moe.route import MOE_ROUTE
from cutekernels.ops.sampling.op import SAMPLE_FILTER
from tests.moe.cases import OPS
from tests.triton_compiled import H200, TARGETS, accesses, built, check_knobs, check_resources, in_turns, program

ALL = {**OPS, "sample_filter": SAMPLE_FILTER}
SIZES = {  # a problem of each op, and configs that together leave another value to every knob
    "moe_route": ("tokens=4096 experts=128 dtype=fp32", ["tokens=4 warps=4 method=rounds"]),
    "moe_route_backward": ("tokens=4096 experts=128", ["tokens=4 warps=4"]),
    "moe_permute": ("pairs=4000 experts=60", ["block=256 programs=32 passes=1 warps=4"]),
    "moe_gather": ("tokens=2048 cols=4096", ["block=2048 warps=4"]),
    "moe_combine": ("tokens=2048 cols=4096 weighted=1", ["block=2048 warps=4"]),
    "moe_combine_backward": ("tokens=2048 cols=4096 weighted=1", ["block=2048 warps=4"]),
    "moe_dispatch": ("tokens=16 cols=4096 experts=128", ["block=2048 warps=4"]),
    "sample_filter": ("rows=4 cols=128256 dtype=fp32 by_k=1 by_p=1", ["block=1024 warps=16 bits=1 splits=1"]),
}


@in_turns(ALL)
def test_compiles_for_every_architecture(op: Any, spec: gpu.GpuSpec) -> None:
    problem = op.Problem.parse(SIZES[op.name][0])
    config = op.default(problem, spec)
    if spec in TARGETS[2:]:
        rng = random.Random(op.name)
        problem = op.Problem.parse(rng.choice([t for t in op.suite if "layout" not in t]))
        config = rng.choice(list(op.valid(problem, spec)))
    # The largest search keeps 32 sums of 64 bits in 128 registers, and a few words that are seldom used elsewhere.
    facts = check_resources(op, problem, config, spec, stack=32 if op is SAMPLE_FILTER else 0)
    assert facts.smem_bytes <= 48 * 1024


@pytest.mark.parametrize("op", ALL.values(), ids=ALL.keys())
def test_every_knob_changes_the_code_or_the_launches(op: Any) -> None:
    text, bases = SIZES[op.name]
    problem = op.Problem.parse(text)

    def launch(config: Any) -> Any:
        passes = op.passes(problem, config) if op is SAMPLE_FILTER else getattr(config, "passes", 1)
        return op.grid(problem, config), str(passes)

    changed: set[str] = set()
    for base in bases:
        changed |= check_knobs(op, problem, op.Config.parse(base), launch=launch).keys()
    assert changed == {"", *op.Config.space()}


@pytest.mark.parametrize(
    ("op", "text", "widths"),
    [
        ("moe_route", "tokens=4096 experts=128 dtype=fp32", {"v4.b32", "b32"}),
        ("moe_route", "tokens=4096 experts=60 top_k=4 align=8", {"v2.b32", "b32"}),
        ("moe_gather", "tokens=2048 cols=4096", {"v4.b32", "b32"}),
        ("moe_gather", "tokens=2048 cols=4100 align=8", {"v2.b32", "b32"}),
        ("moe_dispatch", "tokens=16 cols=4096 experts=128", {"v4.b32", "b32"}),
        ("moe_combine", "tokens=2048 cols=4096 weighted=1", {"v4.b32", "b32"}),
        ("moe_combine", "tokens=2048 cols=1001 align=2", {"b16", "b32"}),
        ("moe_combine_backward", "tokens=2048 cols=4096 weighted=1", {"v4.b32", "b32"}),
        ("sample_filter", "rows=256 cols=128256 dtype=fp32 by_k=1 by_p=1", {"v4.b32"}),
        ("sample_filter", "rows=256 cols=128256 by_k=1", {"v4.b32"}),
    ],
)
def test_accesses_are_as_wide_as_alignment_allows(op: str, text: str, widths: set[str]) -> None:
    """Rows are accessed as wide as they allow; indices and weights are single words."""
    declared = ALL[op]
    problem = declared.Problem.parse(text)
    found = accesses(built(declared, problem, declared.default(problem, H200)).ptx)
    assert found <= widths
    assert max(widths, key=len) in found


@pytest.mark.parametrize(
    ("op", "texts"),
    [
        ("moe_route", ["tokens=4096 experts=128", "tokens=9 experts=72"]),
        ("moe_permute", ["pairs=4096 experts=100", "pairs=300 experts=64"]),
        ("moe_dispatch", ["tokens=16 cols=4096 experts=100", "tokens=9 cols=1000 experts=64"]),
        ("moe_combine", ["tokens=4096 cols=4096", "tokens=9 cols=1000"]),
        ("sample_filter", ["rows=256 cols=128256 by_p=1", "rows=256 cols=32000 by_p=1"]),
    ],
)
def test_compiled_code_does_not_depend_on_extents(op: str, texts: list[str]) -> None:
    declared = ALL[op]
    first, second = (declared.Problem.parse(t) for t in texts)
    assert first.static() == second.static()
    config = next(c for c in declared.valid(first, H200) if declared.why_not(second, c, H200) is None)
    assert program(declared, first, config) == program(declared, second, config)


def test_a_row_of_a_warp_is_reduced_by_single_instructions() -> None:
    """128 experts fill a warp: the maximum of each round is one redux, two for fp32, without barriers in between."""
    for dtype, reductions in (("bf16", 8), ("fp32", 16)):
        problem = MOE_ROUTE.Problem.parse(f"tokens=4096 experts=128 dtype={dtype}")
        ptx = built(MOE_ROUTE, problem, MOE_ROUTE.default(problem, H200)).ptx
        assert len(re.findall("redux.sync", ptx)) == reductions
        assert len(re.findall("bar.sync", ptx)) <= 4


def test_masses_are_not_fused() -> None:
    """Fused multiply-adds would give masses of their own, and the CPU and the GPU would keep different tokens."""
    text, (config,) = SIZES["sample_filter"]
    ptx = built(SAMPLE_FILTER, SAMPLE_FILTER.Problem.parse(text), SAMPLE_FILTER.Config.parse(config)).ptx
    body = ptx.replace("div.rn.f32", "")
    assert "fma.rn.f32" not in body
    assert "mul.f32" in body or "mul.rn.f32" in body
