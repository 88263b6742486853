"""Installation: every dependency is imported and declared, the wheel is whole, calls load no more than they need."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest

from tests import versions
from tests.processes import python

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {  # distributions whose modules are called otherwise
    "nvidia-cutlass-dsl": {"cutlass", "cuda"},
    "apache-tvm-ffi": {"tvm_ffi"},
    "psycopg": {"psycopg"},
    "pillow": {"PIL"},
    "quack-kernels": {"quack"},
    "liger-kernel": {"liger_kernel"},
    "flash-attn-4": {"flash_attn"},
    "humming-kernels": {"humming"},
}
# Loaded by name: SQLAlchemy loads psycopg for a URL of PostgreSQL, and the DSL the runtime of its compiled objects.
BY_NAME = {"psycopg", "apache-tvm-ffi"}


def name_of(requirement: str) -> str:
    return requirement.split(";")[0].split("[")[0].split("<")[0].split(">")[0].split("=")[0].strip().lower()


@cache
def imported() -> set[str]:
    """Top-level modules that the package's files import, anywhere."""
    found = set()
    for folder in ("cutekernels", "autotune", "db"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.split(".")[0])
    return found


def modules_of(requirements: list[str]) -> set[str]:
    names = {name_of(requirement) for requirement in requirements}
    return {module for name in names for module in MODULES.get(name, {name.replace("-", "_")})}


@pytest.mark.parametrize("requirement", PROJECT["dependencies"])
def test_every_dependency_is_imported(requirement: str) -> None:
    name = name_of(requirement)
    assert name in BY_NAME or MODULES.get(name, {name.replace("-", "_")}) & imported()


PINS = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text().replace("_", "-").lower(), re.M))
LOCK = (ROOT / "requirements.lock").read_text()
LOCKED = dict(re.findall(r"^([\w.-]+)==(\S+) \\$", LOCK, re.M))


@pytest.mark.parametrize("requirement", versions.declared())
def test_every_dependency_has_a_lower_bound_that_the_lock_keeps(requirement: str) -> None:
    (pin,) = versions.lowest([requirement])
    name, _, bound = pin.partition("==")
    assert re.fullmatch(r"[\w.-]+(\[\w+\])?((>=|<|!=)[\d.]+,?)+", requirement), "what doctor's excludes() reads"
    if name in PINS:  # pandas is for users alone
        assert numbers(PINS[name]) >= numbers(bound)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def test_a_dependency_without_a_lower_bound_is_refused() -> None:
    assert versions.lowest(["typer>=0.20", "psycopg[binary]>=3.2,<4"]) == ["psycopg==3.2", "typer==0.20"]
    for careless in ("typer", "typer<1", "typer==0.20"):
        with pytest.raises(ValueError, match="no lower bound"):
            versions.lowest([careless])


def test_an_engine_s_versions_replace_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"torch": "2.14.0", "triton": "3.8.0", "xformers": "1"}
    monkeypatch.setattr(versions, "resolved", lambda *asked: theirs)
    found = versions.constraints("vllm")
    assert {"torch==2.14.0", "triton==3.8.0"} <= set(found) and "xformers==1" not in found
    assert len(found) == len(set(map(versions.named, versions.declared())))
    assert versions.constraints("newest") != found


def test_what_moves_beside_an_engine_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = dict.fromkeys(versions.SHARED, "2") | {"vllm": "0.33.0"}
    for beside in ("2", "1"):
        monkeypatch.setattr(versions, "resolved", lambda *asked, b=beside: alone | ({"torch": b} if asked[1:] else {}))
        assert versions.resolves("vllm") is (beside == "2")
    assert "beside vllm 0.33.0: torch 2 -> 1" in capsys.readouterr().out


def test_what_cannot_be_had_fails_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tool = tmp_path / "uv" / "bin" / "uv"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho 'no solution:\n vllm is not there' >&2; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(versions, "HOME", tmp_path)
    assert not versions.passes("vllm", []) and not versions.resolves("sglang")
    said = capsys.readouterr().out
    assert "not to be had: no solution: vllm is not there" in said
    assert "beside sglang: no solution: vllm is not there" in said


def test_no_bound_sets_an_engine_s_torch_back() -> None:
    """torch pins its Triton, engines pin torch: an upper bound of ours would replace theirs."""
    bounds = {name_of(row): row for row in PROJECT["dependencies"]}
    assert not any(mark in bounds[name] for name in ("torch", "triton") for mark in "<,!")


def test_tests_of_versions_are_there() -> None:
    assert [path for path in versions.TESTS if not (ROOT / path.split("::")[0]).exists()] == []


def test_the_lock_has_what_constraints_name_and_hashes_alone() -> None:
    assert {name: PINS.get(name) for name in LOCKED} == LOCKED, "`make lock` after a change of constraints.txt"
    extras = PROJECT["optional-dependencies"]
    needed = {name_of(row) for row in [*PROJECT["dependencies"], *extras["dev"]]}
    assert needed - {"torch"} <= set(LOCKED), "`make lock` after a change of pyproject.toml"
    builds = [name for name in LOCKED if name.startswith("nvidia-") and not name.startswith("nvidia-cutlass-dsl")]
    assert "torch" not in LOCKED and not builds, "only torch's CUDA builds need them: TORCH_ALONE of the Makefile"
    entries = re.split(r"^(?=\w)", LOCK, flags=re.M)[1:]
    assert len(entries) == len(LOCKED)
    assert all(re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+\n", entry) for entry in entries)


def test_actions_are_pinned_by_commit() -> None:
    uses = re.findall(r"uses: (\S+)(.*)", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert uses
    for action, comment in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action}: which release it is stands behind it"


def test_every_import_is_declared() -> None:
    extras = [r for name, rows in PROJECT["optional-dependencies"].items() if name != "dev" for r in rows]
    declared = modules_of([*PROJECT["dependencies"], *extras])
    ours = {"cutekernels", "bench", "tests", "__future__"}
    foreign = {m for m in imported() if m not in sys.stdlib_module_names} - ours
    assert foreign <= declared, f"not in pyproject.toml: {sorted(foreign - declared)}"


PLACES = {"cutekernels/": "", "autotune/": "cutekernels/", "db/": "cutekernels/"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The package's files, but those that git ignores, and a folder with the wheel and the sdist of a copy of them.

    Files that are not added yet are among them: without the folder of a new op, setuptools would only say that it does
    not exist.
    """
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True).stdout.split()
    folder = tmp_path_factory.mktemp("built")
    names = [n for n in listed if n.startswith(tuple(PLACES)) and (ROOT / n).exists()]
    if not names:
        pytest.skip("no git checkout")
    for name in (*names, "pyproject.toml", "setup.py", "README.md"):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    for kind in ("sdist", "wheel"):
        code = f"import setuptools.build_meta as build, sys; build.build_{kind}(sys.argv[1])"
        command = [sys.executable, "-W", "error", "-c", code, str(folder)]
        done = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
    return names, folder


def test_every_file_is_in_the_wheel(built: tuple[list[str], Path]) -> None:
    names, folder = built
    inside = set(zipfile.ZipFile(next(folder.glob("*.whl"))).namelist())
    expected = {PLACES[name.split("/")[0] + "/"] + name for name in names if not name.endswith(".md")}
    assert expected <= inside, f"not in the wheel: {sorted(expected - inside)}"
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    missing = {name for name in names if not name.endswith(".md")} - packed
    assert not missing, f"not in the sdist: {sorted(missing)}"


def test_the_dockerfile_copies_all_that_the_wheel_is_built_from() -> None:
    """Nothing here runs Docker: a file that moved would only be missed in a build."""
    text = (ROOT / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "setup.py", *(place.rstrip("/") for place in PLACES), PROJECT["readme"]} <= copied
    extras = re.search(r'"\.\[(.*)\]"', text)
    assert extras and set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_wheel_alone_calls_queries_and_tunes(built: tuple[list[str], Path], tmp_path: Path) -> None:
    """Without the checkout: its files are nowhere on the path of these processes."""
    wheel = next(built[1].glob("*.whl"))
    assert wheel.stat().st_size < 1_500_000, "README and docs/quickstart.md say that it is 1 MB"
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    job = tmp_path / "job.toml"
    job.write_text('name = "one"\n[[tasks]]\nop = "silu_mul"\nproblems = ["rows=16 cols=4096"]\n')
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path / "installed"),
        "CUTEKERNELS_DB": str(tmp_path / "tuned.db"),
        "CUTEKERNELS_CACHE": str(tmp_path / "cache"),
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    called = "import cutekernels as ck, torch; print(ck.__file__, *ck.linear(torch.ones(2, 8), torch.ones(3, 8)).shape)"
    where, *shape = run("-c", called).split()
    assert where.startswith(str(tmp_path)) and shape == ["2", "3"]
    assert "qwen2.5-7b" in run("-m", "cutekernels", "jobs", "--format", "csv")
    assert "tuned" in run("-m", "cutekernels", "explain", "gemm", "m=16 n=4096 k=4096", "--gpu", "h200")
    run("-m", "cutekernels", "tune", str(job), "--gpu", "l40s", "--limit", "1", "--jobs", "1")
    assert "predicted" in run("-m", "cutekernels", "db", "query", "--local", "--format", "csv")


QUERYING = ("typer", "rich", "sqlalchemy", "alembic", "filelock")  # docs/quickstart.md, "Only to query"
BLOCKED = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED_NAMES:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
from cutekernels.cli import main
for sys.argv[1:] in COMMANDS:
    try:
        main()
    except SystemExit as end:
        assert not end.code, sys.argv
"""


def test_queries_need_few_packages(tmp_path: Path) -> None:
    assert f"pip install {' '.join(QUERYING)}\n" in (ROOT / "docs/quickstart.md").read_text()
    others = {name_of(requirement) for requirement in PROJECT["dependencies"]} - set(QUERYING)
    blocked = {module for name in others for module in MODULES.get(name, {name})} | {"numpy", "transformers", "pandas"}
    assert "torch" in blocked and "optuna" in blocked
    commands = [
        ["db", "query", "--gpu", "h200", "--limit", "1"],
        ["explain", "gemm", "m=16 n=4096 k=4096", "--gpu", "h200"],
        ["db", "import", str(ROOT / "db/shipped/h200.jsonl.xz")],
        ["db", "export", str(tmp_path / "winners.jsonl"), "--gpu", "h200"],
        ["gpus"],
        ["jobs"],
    ]
    code = BLOCKED.replace("BLOCKED_NAMES", repr(blocked)).replace("COMMANDS", repr(commands))
    done = python(code, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-1000:]


def test_calling_a_kernel_loads_no_database_and_no_tuner_and_the_way_into_transformers_is_no_import_of_it() -> None:
    code = (
        "import sys, torch, cutekernels as ck\n"
        "ck.patch, ck.compare, ck.register_attention, ck.register_experts, ck.models.Decoder\n"
        "x = torch.randn(4, 16); ck.linear(x, torch.randn(8, 16)); ck.rms_norm(x); ck.silu_mul(x, x)\n"
        "print([m for m in ('sqlalchemy', 'optuna', 'alembic', 'typer', 'transformers') if m in sys.modules])"
    )
    done = python(code)
    assert done.stdout.strip() == "[]"


def test_dir_has_public_names_alone() -> None:
    import cutekernels

    assert {name for name in dir(cutekernels) if not name.startswith("__")} == set(cutekernels.__all__)


def test_the_version_stands_in_one_place() -> None:
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {PROJECT['version']}" in (ROOT / "CITATION.cff").read_text()
