"""Triton kernels wait for the preceding kernel before they access memory, where the GPU lets them start early."""

from __future__ import annotations

import re

import pytest

from cutekernels import gpu
from cutekernels.backends.triton import TritonArtifact
from cutekernels.ops import registry
from cutekernels.ops.shared.triton_op import TritonOp

MEMORY = re.compile(r"\b(ld|st|atom|red|cp\.async)[.a-z0-9:]*\.(global|shared\.global)")
PREFETCH = re.compile(r"cp\.async\.bulk\.prefetch\.L2\.global \[[^;]*;")
WAIT = "griddepcontrol.wait"


TRITON = [op.name for op in registry.OPS if isinstance(op, TritonOp)]


def compiled(name: str, spec: gpu.GpuSpec) -> TritonArtifact:
    op = registry.get(name)
    problem = op.Problem.parse(op.suite[0])
    artifact = op.build(problem, op.default(problem, spec), spec)
    assert isinstance(artifact, TritonArtifact)
    return artifact


@pytest.mark.parametrize("name", TRITON)
def test_nothing_is_read_or_written_before_the_wait(name: str) -> None:
    artifact = compiled(name, gpu.lookup("h200"))
    ptx = PREFETCH.sub("", artifact.ptx)  # which only asks
    first = MEMORY.search(ptx)
    assert first is not None, "a kernel moves something"
    assert WAIT in ptx[: first.start()]
    assert "griddepcontrol.launch_dependents" in ptx[: first.start()]
    assert artifact.binary.recipe.options["launch_pdl"] is True


@pytest.mark.parametrize("name", ["silu_mul", "rms_norm"])
def test_gpus_without_dependent_launch_know_nothing_of_it(name: str) -> None:
    artifact = compiled(name, gpu.lookup("l40s"))
    assert "griddepcontrol" not in artifact.ptx
    assert artifact.binary.recipe.options["launch_pdl"] is False


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_norms_ask_for_their_first_rows_before_the_wait(name: str) -> None:
    ptx = compiled(name, gpu.lookup("h200")).ptx
    asked = [match.start() for match in PREFETCH.finditer(ptx)]
    assert len(asked) == (2 if name == "rms_norm" else 3), "of rows, a residual's and the weight"
    assert max(asked) < ptx.index(WAIT)
    assert not PREFETCH.search(compiled(name, gpu.lookup("l40s")).ptx)
