"""The kernel repository: what it is made of, a process that has nothing but it, and the ``kernels`` package."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cutekernels.db import snapshot
from cutekernels.errors import UnsupportedProblem
from cutekernels.hub import tree, winners

ROOT = Path(__file__).parents[2]
LAYERS = {"Linear", "RMSNorm", "SwiGLUMLP", "rotary_pos_emb"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both variants: one as the command writes it, the other beside it."""
    out = tmp_path_factory.mktemp("hub") / "repository"
    command = [sys.executable, "-m", "cutekernels.hub", str(out), "--backend", "cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(out / "build/torch-cuda")
    assert tree.write(out, "cpu") == out / "build/torch-cpu"
    return out


def run(*command: str, folder: Path) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUTEKERNELS_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_imports_are_relative_and_few(repository: Path) -> None:
    variant = repository / "build/torch-cuda"
    assert {path.name for path in repository.iterdir()} == {"build"}
    for file in variant.rglob("*.py"):
        text = file.read_text()
        assert "torch.ops.cutekernels." not in text and '"cutekernels::' not in text, file
        for node in ast.walk(ast.parse(text)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & {"cutekernels", "sqlalchemy", "optuna", "typer"}
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["python-depends"] == ["tvm-ffi", "nvidia-cutlass-dsl"]
    assert metadata["backend"] == {"type": "cuda"} and metadata["id"].isidentifier()
    rows = json.loads((variant / "winners.json").read_text())
    assert {gpu: len(own) for gpu, own in rows.items()} == {
        gpu: len(snapshot.shipped(gpu)) for gpu in snapshot.shipped_gpus()
    }


def test_winners_are_asked_as_the_database_is() -> None:
    """What the copied sources use of ``db/snapshot.py`` is in its stand-in, with the same fields."""
    used = set()
    for name in ("dispatch", "rates"):
        for node in ast.walk(ast.parse((ROOT / f"cutekernels/{name}.py").read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and "snapshot" in node.value.id:
                used.add(node.attr)
            if isinstance(node, ast.ImportFrom) and node.module == "cutekernels.db.snapshot":
                used |= {alias.name for alias in node.names}
    used &= set(vars(snapshot))
    assert {"held", "may_serve", "Winner"} <= used <= set(vars(winners))
    assert winners.Winner._fields == snapshot.Winner._fields
    assert set(winners.Snapshot.__dataclass_fields__) == set(snapshot.Snapshot.__dataclass_fields__)


def test_a_folder_with_something_in_it_is_refused(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = {path: path.stat().st_mtime_ns for path in repository.rglob("*")}
    for out in (repository, tmp_path, tmp_path / "file"):
        said = f"a kernel repository is written into a new or an empty folder; {out} is none"
        with pytest.raises(UnsupportedProblem, match=f"^{re.escape(said)}$"):
            tree.write(out)
    command = [sys.executable, "-m", "cutekernels.hub", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "") and f"; {tmp_path} is none\n" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in repository.rglob("*")} == before


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsupportedProblem, match=r"into .*/file/out: Not a directory; name another folder"):
        tree.write(tmp_path / "file" / "out", "cpu")


def test_sources_that_import_something_else_are_refused() -> None:
    with pytest.raises(
        Exception, match=r"torch, Triton, CuTe, NumPy and the standard library alone; a\.b imports optuna"
    ):
        tree._moved("from __future__ import annotations\nimport optuna\n", "a.b", 1)
    moved, reached = tree._moved('from __future__ import annotations\nX = "cutekernels.ops.rope:A"\n', "a.b", 2)
    assert 'f"{_ROOT}.ops.rope:A"' in moved and "from ... import ROOT as _ROOT" in moved
    assert reached == ["cutekernels.ops.rope"]


def test_a_process_that_has_the_repository_alone(repository: Path, tmp_path: Path) -> None:
    """No cutekernels, SQLAlchemy, Optuna, Typer; kernels compile for a GPU that is not there, by shipped winners."""
    script = str(Path(__file__).with_name("alone.py"))
    found = run(script, str(repository / "build/torch-cpu"), folder=tmp_path)
    assert found["norm"] < 64 * 2.0**-23 and found["attention"] == [2, 5, 4, 16]
    assert found["layers"] == dict.fromkeys(LAYERS, True)
    assert found["compiled"]["gemm"][0] == "tuned" and found["compiled"]["gemm"][1] > 0
    assert found["compiled"]["norms"][1] > 0 and found["there"] == []


def test_the_kernels_package_loads_it(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``use_kernels=True``: a model equals itself patched."""
    pytest.importorskip("kernels")
    from transformers.utils.import_utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip("the version of kernels does not fit the one of transformers")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    found = run("-m", "tests.hub.by_kernels", str(repository), folder=tmp_path)
    assert max(found["apart"]) <= 64 * 2.0**-23 * max(1.0, found["size"])
    homes = {name: home.rpartition(".")[2] for name, home in found["forwards"].items()}
    assert homes["LlamaRMSNorm"] == homes["LlamaMLP"] == homes["Linear"] == homes["rotary_pos_emb"] == "layers"
