"""Kernels of routing and sampling compiled without a GPU: what their code must and must not have."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from cutekernels.ops.moe.route import MOE_ROUTE
from cutekernels.ops.sampling.op import SAMPLE_FILTER
from tests.triton_compiled import H200, built


def test_a_row_of_a_warp_is_reduced_by_single_instructions() -> None:
    """128 experts fill a warp: the maximum of each round is one redux, two for fp32, without barriers in between."""
    for dtype, reductions in (("bf16", 8), ("fp32", 16)):
        problem = MOE_ROUTE.Problem.parse(f"tokens=4096 experts=128 dtype={dtype}")
        ptx = built(MOE_ROUTE, problem, MOE_ROUTE.default(problem, H200)).ptx
        assert len(re.findall("redux.sync", ptx)) == reductions
        assert len(re.findall("bar.sync", ptx)) <= 4


def test_masses_are_not_fused() -> None:
    """Fused multiply-adds would give masses of their own, and the CPU and the GPU would keep different tokens."""
    problem = SAMPLE_FILTER.Problem.parse("rows=4 cols=128256 dtype=fp32 by_k=1 by_p=1")
    ptx = built(SAMPLE_FILTER, problem, SAMPLE_FILTER.Config.parse("block=2048 warps=16 depth=2 splits=1")).ptx
    body = ptx.replace("div.rn.f32", "")
    assert "fma.rn.f32" not in body
    assert "mul.f32" in body or "mul.rn.f32" in body
