"""The house keeps its floors: a file imports only lower ones, or its own room. CONTRIBUTING says what they are for."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutekernels.ops import registry
from tests.imports import FOLDERS, ROOT, UPWARDS

MAX_LINES = 600
BODIES, MAX_BODY_LINES = "cutekernels/kernels/cute/", 800  # a body is one thing, read from top to bottom
MOST_FLOORS = 6  # inside a family

# A file's floor; a folder stands for all files in it, and is one room. The longest match counts.
FLOORS = {
    "cutekernels/__main__.py": 20,
    "bench/": 20,
    "cutekernels/models/": 19,
    "cutekernels/hub/": 19,
    "cutekernels/cli.py": 18,
    "cutekernels/integrations/": 18,
    "cutekernels/introspection.py": 17,
    "cutekernels/lock.py": 17,
    "cutekernels/optim/": 17,
    "cutekernels/kv_cache.py": 17,
    "cutekernels/sdpa.py": 17,
    "cutekernels/nn/": 17,
    "autotune/": 17,
    # Inside ops/ each family's floor; between a family's own files, see below.
    "cutekernels/ops/__init__.py": 12,
    "cutekernels/ops/library.py": 12,
    "cutekernels/ops/registry.py": 11,
    "cutekernels/ops/norm_linear/": 9,
    "cutekernels/ops/loss/": 9,
    "cutekernels/ops/quantized/": 9,
    "cutekernels/ops/kv_append/": 9,
    "cutekernels/ops/moe/": 10,
    "cutekernels/ops/shared/": 7,
    "cutekernels/dispatch.py": 6,
    "cutekernels/compilers.py": 5,
    "cutekernels/compile.py": 4,
    "cutekernels/guests/": 4,
    "cutekernels/op.py": 3,
    "cutekernels/backends/": 3,
    "cutekernels/backends/__init__.py": 2,  # the contract, which Op.build speaks of
    "cutekernels/gpu.py": 2,
    "cutekernels/rates.py": 3,
    "cutekernels/rules.py": 3,
    "cutekernels/quant/": 3,
    "cutekernels/measure.py": 2,
    "cutekernels/conditions.py": 1,
    "cutekernels/verify.py": 2,
    "cutekernels/isolate.py": 2,
    "cutekernels/environment.py": 2,
    "cutekernels/installation.py": 3,
    "db/": 2,
    "db/query.py": 12,  # this and the next three read declarations
    "db/reader.py": 13,
    "db/html_report.py": 14,
    "db/cli.py": 15,
    "cutekernels/errors.py": 1,
    "cutekernels/settings.py": 1,
    "cutekernels/lazy.py": 1,
    "cutekernels/interval.py": 2,
    "cutekernels/terminal.py": 1,
    "cutekernels/__init__.py": 2,
    "cutekernels/kernels/": 1,
}
FAMILY_FLOOR = 8  # of a family of ops that builds on no other
OWN_FLOOR = {f"cutekernels/ops/{family}/" for family in registry.FAMILIES} - set(FLOORS)
FLOORS |= dict.fromkeys(OWN_FLOOR, FAMILY_FLOOR)
HEAVY_IN_DB = {"torch", "triton", "cutlass", "cuda", "tvm_ffi"}
FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("cutekernels", "autotune", "db", "bench")
    for path in (ROOT / folder).rglob("*.py")
)
FAMILIES = sorted({str(Path(file).parent) for file in FILES if re.match(r"cutekernels/ops/\w+/", file)})


def room(file: str) -> str:
    """The row of ``FLOORS`` that ``file`` belongs to."""
    found = [key for key in FLOORS if file == key or (key.endswith("/") and file.startswith(key))]
    assert found, f"{file} has no floor: give it one in {Path(__file__).name}, as low as its imports let it lie"
    return max(found, key=len)


def file_of(module: str) -> str | None:
    """The file a dotted name of ours refers to: the module, or the one that holds the name."""
    words = module.split(".")
    for prefix, folder in FOLDERS.items():
        if module == prefix or module.startswith(prefix + "."):
            words = [folder, *words[2:]]
    while words:
        path = "/".join(words)
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            if (ROOT / candidate).is_file():
                return candidate
        words.pop()
    return None


def imports(file: str) -> Iterator[str]:
    """Every dotted name ``file`` imports, inside functions too, and by ``import_module`` with a literal."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if re.fullmatch(r"cutekernels(\.\w+)+", name) and file_of(name) not in (None, "cutekernels/__init__.py"):
                yield name


def ours(module: str) -> bool:
    return module.split(".")[0] in ("cutekernels", "bench", "autotune", "db")


@pytest.mark.parametrize("file", FILES)
def test_imports_only_lower_floors(file: str) -> None:
    here = room(file)
    for module in imports(file):
        target = file_of(module) if ours(module) else None
        if target is None or (file, module) in UPWARDS:
            continue
        there = room(target)
        allowed = there == here or FLOORS[there] < FLOORS[here]
        assert allowed, f"{file} (floor {FLOORS[here]}) imports {module} (floor {FLOORS[there]})"


@pytest.mark.parametrize(
    "family",
    sorted(str(p.relative_to(ROOT)) for p in (ROOT / "cutekernels/ops").iterdir() if p.is_dir() and "__" not in p.name),
)
def test_a_family_has_few_floors_and_no_circle(family: str) -> None:
    """Imports between a family's files, type-only and lazy ones included: at most six floors over its numbers."""
    files = [f for f in FILES if f.startswith(f"{family}/") and not f.endswith("/coefficients.py")]
    below = {f: {t for m in imports(f) if ours(m) and (t := file_of(m)) in files and t != f} for f in files}
    assert floors(below) <= MOST_FLOORS, below


def test_a_circle_and_a_tall_family_are_seen() -> None:
    with pytest.raises(AssertionError, match="a, b"):
        floors({"a": {"b"}, "b": {"a"}, "c": set()})
    assert floors({"a": {"b"}, "b": {"c"}, "c": set(), "d": {"c"}}) == 3


def floors(below: dict[str, set[str]]) -> int:
    """How many floors files take that import those ``below`` them. Fails where they import one another in a circle."""
    height: dict[str, int] = {}
    while len(height) < len(below):
        ready = [f for f in below if f not in height and all(g in height for g in below[f])]
        assert ready, f"import one another in a circle: {', '.join(f for f in below if f not in height)}"
        height |= {f: 1 + max((height[g] for g in below[f]), default=0) for f in ready}
    return max(height.values(), default=0)


def test_every_exception_is_in_use() -> None:
    for file, module in UPWARDS - {("cutekernels/cli.py", "bench.__main__")}:
        assert module in set(imports(file)), f"{file} no longer names {module}: take it off UPWARDS"


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("db/")])
def test_the_database_knows_no_torch_and_its_store_no_ops(file: str) -> None:
    for module in imports(file):
        assert module.split(".")[0] not in HEAVY_IN_DB, f"{file} imports {module}"
        assert room(file) != "db/" or not module.startswith("cutekernels.op"), f"{file} imports {module}"


def test_the_snapshot_needs_only_the_standard_library() -> None:
    tree = ast.parse((ROOT / "db/snapshot.py").read_text())
    top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {alias.name if isinstance(n, ast.Import) else str(n.module) for n in top for alias in n.names}
    assert not any(name.split(".")[0] in ("sqlalchemy", "alembic") for name in names), names


def test_files_are_short_and_well_named() -> None:
    for file in [*FILES, *(str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("*.py"))]:
        lines = len((ROOT / file).read_text().splitlines())
        most = MAX_BODY_LINES if file.startswith(BODIES) and "/parts/" not in file else MAX_LINES
        assert lines <= most, f"{file} has {lines} lines, {most} at most: split it where two ideas meet"
        assert Path(file).stem not in ("utils", "helpers", "util", "common", "misc"), f"{file}: say what is in it"
        assert not re.search(r"sm_?\d{2}|_v\d$", Path(file).stem), f"{file}: bodies per schedule, not per GPU"


@pytest.mark.parametrize("file", [f for f in FILES if f != "cutekernels/gpu.py"])
def test_architectures_are_named_in_gpu_py_only(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        words = [getattr(node, a) for a in ("id", "attr", "name", "arg") if isinstance(getattr(node, a, None), str)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            words.append(node.value)
        for word in words:
            assert " " in word or not re.search(r"\bsm_?\d{2}", word), f"{file} names {word!r}: ask GpuSpec instead"


def test_every_package_is_installed() -> None:
    """The packages stand in pyproject.toml by hand; a new folder with Python in it must be listed."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    names = {"autotune": "cutekernels.autotune", "db": "cutekernels.db", "cutekernels": "cutekernels"}
    found = set()
    for file in FILES:
        first, *rest = Path(file).parent.parts
        if first in names:
            found.add(".".join([names[first], *rest]))
    assert listed - found == {"cutekernels.autotune.jobs", "cutekernels.db.shipped"}, "folders of data alone"
    assert found <= listed


def test_the_check_itself_sees_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_floors.ROOT", tmp_path)
    for file, text in {
        "cutekernels/gpu.py": "def f():\n    from cutekernels.ops.gemm import op\n",
        "cutekernels/ops/gemm/op.py": "from cutekernels import gpu\n",
        "db/store.py": "NAME = 'cutekernels.ops.gemm.op:GEMM'\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    test_imports_only_lower_floors("cutekernels/ops/gemm/op.py")
    for file in ("cutekernels/gpu.py", "db/store.py"):
        with pytest.raises(AssertionError, match=r"floor 2\) imports cutekernels.ops.gemm.op"):
            test_imports_only_lower_floors(file)
