"""Sources in the keys of compiled kernels: whatever a build can reach, by imports and as it runs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cutekernels import compile as compiler
from cutekernels import gpu as gpus
from cutekernels.ops import registry
from cutekernels.ops.products.dense import GEMM
from tests.imports import ROOT, file_of, imports
from tests.processes import python
from tests.trunk.test_compile import Compiled

H200 = gpus.lookup("h200")
PACKAGE = ROOT / "cutekernels"
KERNELS = sorted(file for file in (PACKAGE / "kernels").rglob("*.py") if file.stem != "__init__")
REACHED = (
    *("kernels/cute/products/skinny.py", "ops/products/dense.py", "ops/shared/declared_op.py", "backends/cute.py"),
    *("ops/products/schedules/dense.py", "ops/attention/op.py", "ops/norms/rows.py", "dispatch.py", "gpu.py"),
    "a_new_module.py",
)
NOT_REACHED = (
    *("nn/mlp.py", "cli.py", "ops/products/api.py", "ops/attention/api.py", "ops/shared/calls.py"),
    *("ops/linear.py", "ops/library.py", "ops/rope/op.py", "ops/rope/rotary.py"),
)


def is_ours(base: type) -> bool:
    return base.__module__.startswith("cutekernels.")


def calls(file: str) -> bool:
    """Whether a file of ours is of the path of calls."""
    return compiler._CALLS.fullmatch(file.removeprefix("cutekernels/")) is not None


def sources(op: Any) -> set[str]:
    return {str(file.relative_to(ROOT)) for file in compiler._sources(type(op)) if ROOT in file.parents}


def fingerprint(op: type) -> str:
    """The source fingerprint, computed anew."""
    return compiler.source_fingerprint.__wrapped__(op)


def test_a_changed_source_is_another_key_where_a_build_can_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    monkeypatch.setattr(compiler, "_PACKAGE", package)

    def write(name: str, text: str) -> None:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)

    for name in (*REACHED, *NOT_REACHED):
        write(name, "a = 1\n")
    write("ops/products/schedules/packed.py", "from cutekernels.ops.attention import op\n")
    write("ops/attention/config.py", "    from cutekernels.ops import norms\n")
    for name in NOT_REACHED:
        before = fingerprint(type(GEMM))
        write(name, "a = 2\n")
        assert fingerprint(type(GEMM)) == before, name
    for name in REACHED:
        before = fingerprint(type(GEMM))
        write(name, "a = 2\n")
        assert fingerprint(type(GEMM)) != before, name
    before = fingerprint(Compiled)
    write("ops/rope/op.py", "a = 3\n")
    assert fingerprint(Compiled) != before, "an op from elsewhere may use any"


def test_an_op_from_elsewhere_brings_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "toy_op_for_the_fingerprint.py"
    own.write_text("class Toy:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    toy = importlib.import_module(own.stem).Toy
    before = fingerprint(toy)
    own.write_text("class Toy:\n    a = 2\n")
    assert fingerprint(toy) != before
    del sys.modules[own.stem]


@pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
def test_every_file_that_an_op_imports_is_in_its_key(op: Any) -> None:
    """Through imports within functions too, but not on through the path of calls."""
    found, left = set[str](), {str(file_of(base.__module__)) for base in type(op).__mro__ if is_ours(base)}
    while left:
        found |= left
        left = {f for file in left for f in imports(file) if f.startswith("cutekernels/") and not calls(f)} - found
    assert not found - sources(op)
    assert {"cutekernels/op.py", "cutekernels/gpu.py"} < found


def test_imports_of_ops_and_kernels_do_not_reach_the_path_of_calls() -> None:
    """So whatever a build takes from it, it would import within a function, and run."""
    kernels = [f"cutekernels.{file.relative_to(PACKAGE).with_suffix('')}".replace("/", ".") for file in KERNELS]
    code = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "import cutekernels.ops.registry as r; assert r.OPS\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('cutekernels')), sep='\\n')"
    )
    names = [*kernels, *(f"cutekernels.backends.{name}" for name in ("cute", "triton", "chained"))]
    told = python(code, json.dumps(names)).stdout
    loaded = {str(Path(file).relative_to(ROOT)) for file in told.split()}
    assert len(loaded) > 150 and not {file for file in loaded if calls(file)}


@pytest.mark.slow
@pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
def test_what_a_build_runs_is_in_its_key(op: Any) -> None:
    ran: set[str] = set()
    p = op.Problem.parse(op.suite[0])
    c = op.default(p, H200)
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, value: ran.add(frame.f_code.co_filename))
    try:
        op.build(p, c, H200)
    finally:
        sys.setprofile(before)
    ours = {str(Path(file).relative_to(ROOT)) for file in ran if file.startswith(str(PACKAGE))}
    assert not ours - sources(op)
    assert {"cutekernels/gpu.py", str(file_of(type(op).build.__module__))} <= ours


def test_another_compiler_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(Compiled)
    monkeypatch.setattr(compiler, "package_version", lambda name: "99.9")
    assert fingerprint(Compiled) != before
