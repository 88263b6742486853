"""Triton's kernels as PTX for compute capability 8.0, assembled for Hopper: the code an A100's ptxas gets, run here.

CuTe's kernels cannot take this way: the DSL packs a kernel for the target that it compiled for, and refuses another's
("fatbinary elf mismatch", 4.8.1). Their bodies for an A100 run compiled for sm_90a: ``CUTEKERNELS_GPU_AS=a100``.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutekernels import compile as compiler
from cutekernels import environment, verify
from cutekernels import gpu as gpus
from cutekernels.backends.triton import TritonArtifact
from cutekernels.gpu import GpuSpec
from cutekernels.ops import registry

_SCRIPT = """#!/bin/sh
for word do shift; case $word in --gpu-name=sm_80) word=--gpu-name=sm_90;; esac; set -- "$@" "$word"; done
exec "{ptxas}" "$@"
"""
SPEC = replace(gpus.lookup("h200-as-a100"), name="h200-as-a100-by-ptx", capability=(8, 0), confined_to=None)
_FLAGS = 48  # offset of an ELF's flags, which name the architecture


def _posed(op: Any, spec: GpuSpec = SPEC) -> tuple[Any, Any]:
    problem = min(map(op.Problem.parse, op.suite), key=lambda p: op.work(p).floor_us(spec))
    return problem, op.default(problem, spec)


OPS = [op for op in registry.OPS if op.compiler(_posed(op)[1]) == "triton"]


@pytest.fixture(autouse=True)
def _assembled_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "ptxas"
    script.write_text(_SCRIPT.format(ptxas=environment.ptxas()))
    script.chmod(0o700)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(script))
    monkeypatch.setattr(gpus, "detect", lambda device=None: SPEC)


@pytest.mark.parametrize("name", ["silu_mul", "rms_norm"])
def test_the_code_is_for_an_a100_and_the_binary_for_hopper(name: str) -> None:
    op = registry.get(name)
    artifact = op.build(*_posed(op), SPEC)
    assert isinstance(artifact, TritonArtifact)
    assert ".target sm_80" in artifact.ptx
    (flags,) = struct.unpack_from("<I", artifact.binary.cubin, _FLAGS)
    assert 90 in (flags & 0xFF, flags >> 8 & 0xFF), "where it stands depends on the version of the ELF"


def test_most_ops_have_such_a_kernel() -> None:
    without = {op.name for op in registry.OPS} - {op.name for op in OPS}
    products = {"gemm", "rms_norm_linear", "linear_silu_mul", "quantized_linear", "dequantize"}
    attention = {"attention", "attention_backward", "decode_attention", "cache_attention"}
    assert without == products | attention | {"grouped_gemm", "grouped_gemm_wgrad", "quantized_grouped_gemm"}


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_a100s_code_is_right(op: Any) -> None:
    problem, config = _posed(op)
    args = op.sample(problem, "cuda", 0)
    outputs = op.outputs(problem, *args)
    expected = op.reference(problem, *args)
    verify.poison(outputs)
    op.bind(problem, config, compiler.get(op, problem, config, SPEC))(*outputs, *args)
    work = op.work(problem)
    judge = verify.Judge(expected, work.flops, getattr(problem, "accumulate", "fp32"), work.depth, op.partial)
    assert judge.worst_error(outputs) <= 1
