"""``examples/new_op`` and ``examples/new_cute_op`` join a copy of the package by ``docs/add_op.py``, and work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs import add_op

ROOT = Path(__file__).parents[2]

USE = """
import ctypes, json, sys
import torch
import cutekernels
from cutekernels import dispatch, gpu, verify
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops import registry
from cutekernels.ops.softcap.api import softcap
from cutekernels.ops.softcap.op import SOFTCAP
from tests.interpreted import interpret

assert cutekernels.__file__.startswith(sys.argv[1]), cutekernels.__file__
report = {"registered": registry.get("softcap") is SOFTCAP}
x = torch.randn(3, 5, 100, dtype=torch.bfloat16)
report["cpu"] = torch.equal(softcap(x, 2.0), (2 * torch.tanh(x.double() / 2)).to(x.dtype))
fakes = torch.compile(lambda t: softcap(t, 2.0), backend="eager", fullgraph=True)
report["compiled"] = torch.equal(fakes(x), softcap(x, 2.0))
report["errors"] = {}
for text in SOFTCAP.suite[:3]:
    p = SOFTCAP.Problem.parse(text)
    args = SOFTCAP.sample(p, "cpu", 0)
    (out,) = SOFTCAP.outputs(p, *args)
    verify.poison((out,))
    posed = interpret(SOFTCAP, (out,), args[:1], args[1:])
    assert SOFTCAP.Problem.parse(posed) == p, (posed, text)
    report["errors"][text] = verify.worst_error((out,), SOFTCAP.reference(p, *args), SOFTCAP.work(p).flops)
report["explained"] = str(dispatch.explain(SOFTCAP, SOFTCAP.Problem(16, 4096), gpu.lookup("l40s")).choice.origin)
refused = []
for bad in (None, [1.0], torch.ones(3, dtype=torch.int32), torch.ones(3).to_sparse()):
    try:
        softcap(bad, 2.0)
    except UnsupportedProblem as error:
        refused.append(str(error))
report["refused"] = refused
report["public"] = cutekernels.softcap is softcap
from bench import workloads
from docs import generate
(case, *_) = workloads.cases("softcap", "suite")
work = workloads.get("softcap")
i = work.inputs(case, SOFTCAP.Problem.parse(case.problem), "cpu", 0)
(ours,) = work.ours(case, [i], None)
report["benched"] = float((ours()[0].double() - work.truth(case, i)[0]).abs().max())
report["sections"] = "softcap" in generate.reference()
print(json.dumps(report))
"""
WIDTHS = """
import json
from cutekernels.ops import registry
from tests.shared.test_widths_compiled import LAID_OUT, aligned, narrow

op = registry.get("softcap")
assert op in LAID_OUT
found = [sorted(narrow(op, aligned(op)))]
op.Problem.aligns_rows = None
print(json.dumps([*found, sorted(narrow(op, aligned(op).replace(dtype="fp16")))]))
"""


IN_CUTE = """
import json
import torch
import cutekernels as ck
from cutekernels import gpu
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops import registry
from cutekernels.ops.scale_rows.op import SCALE_ROWS as op

assert registry.get("scale_rows") is op
x, scale = torch.randn(5, 24).bfloat16(), torch.randn(5)
exact = (x.double() * scale.double()[:, None]).to(x.dtype)
report = {"right": torch.equal(ck.scale_rows(x, scale), exact), "stack": []}
for spec in map(gpu.lookup, ("a100", "l40s", "h200", "rtx5090")):
    p = op.Problem.parse("rows=7 cols=24")
    report["stack"].append(op.build(p, op.default(p, spec), spec).facts.stack_bytes)
problem = op.Problem.parse("rows=5 cols=26 align=2")
args = op.sample(problem, "cpu", 0)
report["posed"] = str(op.problem(*op.outputs(problem, *args), *args)) == str(problem)
report["refused"] = []
for bad in ((x, scale[:4]), (x, scale.double()), (x.int(), scale)):
    try:
        ck.scale_rows(*bad)
    except UnsupportedProblem as error:
        report["refused"].append(str(error))
print(json.dumps(report))
"""
ON_A_GPU = """
import json
import torch
import cutekernels as ck

found = []
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for rows, cols in ((1, 8), (33, 1001), (257, 4096), (0, 8), (3, 0)):
        x, scale = torch.randn(rows, cols + 3, device="cuda").to(dtype)[:, :cols], torch.randn(rows, device="cuda")
        exact = (x.double() * scale.double()[:, None]).to(dtype)
        found.append(torch.equal(ck.scale_rows(x, scale), exact) and torch.equal(ck.scale_rows(x, scale, out=x), exact))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the example in it."""
    tree = tmp_path_factory.mktemp("tree")
    package = shutil.copytree(ROOT / "cutekernels", tree / "cutekernels", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("autotune", "db"):  # as setuptools installs them
        shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "tests").symlink_to(ROOT / "tests")
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("bench", "docs"):
        (tree / name).symlink_to(ROOT / name)
    (package / "ops/softcap/__pycache__").mkdir(parents=True)  # as an undone try leaves it
    (package / "ops/softcap/__pycache__/op.pyc").touch()
    assert add_op.join(ROOT / "examples/new_op", tree) == "softcap"
    assert add_op.join(ROOT / "examples/new_cute_op", tree) == "scale_rows"
    return tree


def reported(tree: Path, script: str, **variables: str) -> Any:
    """The last line that ``script`` prints in a process that imports from ``tree``."""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tree)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tree,
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def report(tree: Path) -> dict[str, Any]:
    return reported(tree, USE, TRITON_INTERPRET="1")  # type: ignore[no-any-return]


def test_it_is_registered_dispatched_and_traced(report: dict[str, Any]) -> None:
    assert report["registered"]
    assert report["cpu"]
    assert report["compiled"]
    assert report["explained"] == "default"


def test_its_kernel_is_right(report: dict[str, Any]) -> None:
    assert len(report["errors"]) == 3
    assert all(error <= 1 for error in report["errors"].values()), report["errors"]


def test_its_accesses_are_wide_and_narrow_ones_would_be_seen(tree: Path) -> None:
    assert reported(tree, WIDTHS) == [[], ["ld", "st"]]


def test_one_with_a_kernel_in_cute_is_compiled_and_posed(tree: Path) -> None:
    report = reported(tree, IN_CUTE)
    assert report["right"] and report["posed"]
    assert report["stack"] == [0] * 4
    assert [said for said in report["refused"] if not said.startswith("scale_rows")] == []
    assert ["scale does not fit: its rows is 4, x's 5" in report["refused"][0], len(report["refused"])] == [True, 3]


def test_a_new_cute_op_takes_120_lines_beside_its_kernel() -> None:
    files = (ROOT / "examples/new_cute_op").glob("*.py")
    assert sum(len(f.read_text().splitlines()) for f in files if f.name != "kernel.py") <= 120


@pytest.mark.gpu
def test_the_one_in_cute_is_right_on_a_gpu(tree: Path) -> None:
    assert all(reported(tree, ON_A_GPU))


def test_bad_operands_are_refused_without_a_line_of_its_own(report: dict[str, Any]) -> None:
    none, numbers, integers, sparse = report["refused"]
    assert "x as a torch.Tensor; got None" in none
    assert "got builtins.list" in numbers
    assert "takes bfloat16" in integers
    assert "call to_dense()" in sparse


def test_it_is_public_benched_and_documented(report: dict[str, Any]) -> None:
    assert report["public"] and report["sections"]
    assert report["benched"] < 0.01


def test_its_names_stand_where_they_must(tmp_path: Path) -> None:
    for name in ("README.md", "cutekernels/__init__.pyi", "cutekernels/ops/registry.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for language in ("triton", "cute"):
        (tmp_path / "cutekernels/kernels" / language).mkdir(parents=True)
    add_op.join(ROOT / "examples/new_op", tmp_path)
    add_op.join(ROOT / "examples/new_cute_op", tmp_path)
    assert (tmp_path / "cutekernels/kernels/cute/scale_rows.py").exists()
    assert "| `softcap`, `" in (tmp_path / "README.md").read_text()
    with pytest.raises(SystemExit, match="is there already"):
        add_op.join(ROOT / "examples/new_op", tmp_path)
