"""A compiled object's key changes with every source that its op's ``build`` can reach."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cutekernels import compile as compiler
from cutekernels import gpu
from cutekernels.ops import registry
from tests.test_floors import ROOT, file_of, imports, ours

# Modules that a file names but ``build`` does not run: they store, measure or dispatch what was built.
USERS = ("db/", "cutekernels/cli.py", "cutekernels/nn/")


def reached(module: str) -> set[str]:
    """Files of ours that ``module`` imports, directly or not, lazily or for types alone."""
    found: set[str] = set()
    ahead = [file_of(module)]
    while ahead:
        file = ahead.pop()
        if file is not None and file not in found and not file.startswith(USERS):
            found.add(file)
            ahead += [file_of(name) for name in imports(file) if ours(name)]
    return found


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package that fingerprints are taken of."""
    package = shutil.copytree(ROOT / "cutekernels", tmp_path / "cutekernels", ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr(compiler, "_PACKAGE", package)
    yield tmp_path


def fingerprint(op: type) -> str:
    return compiler.source_fingerprint.__wrapped__(op)


def test_every_file_that_a_build_reaches_changes_its_key(copy: Path) -> None:
    ops = {type(op).__module__: type(op) for op in registry.OPS}
    files = {file for module in ops for file in reached(module)}
    assert {"cutekernels/ops/gemm/specialized.py", "cutekernels/ops/norms/rows.py", "cutekernels/gpu.py"} <= files
    assert "cutekernels/kernels/cute/parts/smem.py" in reached("cutekernels.ops.gemm.op")
    any_op = type("Any", (), {})  # an op adds nothing to the package's files but its own, were that elsewhere
    plain = fingerprint(any_op)
    for file in sorted(files):
        text = (copy / file).read_text()
        (copy / file).write_text(text + "\n# edited")
        assert fingerprint(any_op) != plain, f"{file} is reached and not hashed"
        (copy / file).write_text(text)
    assert fingerprint(any_op) == plain


def test_an_op_of_another_package_is_hashed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("elsewhere")
    module.__file__ = str(tmp_path / "elsewhere.py")
    (tmp_path / "elsewhere.py").write_text("# one")
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    stranger = type("Stranger", (type(registry.OPS[0]),), {"__module__": "elsewhere"})
    before = fingerprint(stranger)
    (tmp_path / "elsewhere.py").write_text("# two")
    assert fingerprint(stranger) != before


def test_a_key_names_the_gpu_whole() -> None:
    """``build`` may read anything of a GpuSpec, so two that differ in anything share no object."""
    op = registry.get("rms_norm")
    p = op.Problem.parse("rows=16 cols=4096")
    c = op.default(p, gpu.lookup("h200"))
    keys = {compiler.cache_key(op, p, c, spec) for spec in (*gpu.GPUS, gpu.lookup("h200-99kib"))}
    assert len(keys) == len(gpu.GPUS) + 1
