"""The house keeps its floors: a file imports only lower ones, or its own room. CONTRIBUTING says what they are for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cutekernels.ops import registry
from tests import imports
from tests.imports import QUOTED, ROOT, UPWARDS, code, file_of, names_in

MAX_LINES = 600
BODIES, MAX_BODY_LINES = "cutekernels/kernels/cute/", 800  # a body is one thing, read from top to bottom
MOST_FLOORS = 6  # inside a family

# A file's floor; a folder stands for all files in it, and is one room. The longest match counts.
FLOORS = {
    "cutekernels/__main__.py": 21,
    "bench/": 21,
    "cutekernels/cli.py": 20,
    "cutekernels/models/": 19,
    "cutekernels/integrations/": 18,
    "cutekernels/introspection.py": 18,
    "cutekernels/ahead.py": 17,
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
    "cutekernels/ops/norm_linear.py": 11,
    "cutekernels/ops/moe/": 11,
    "cutekernels/ops/linear.py": 10,
    "cutekernels/ops/loss/": 10,
    "cutekernels/ops/products/": 9,
    "cutekernels/ops/products/schedules/": 8,
    "cutekernels/ops/kv_append/": 9,
    "cutekernels/ops/shared/": 7,
    "cutekernels/dispatch.py": 6,
    "cutekernels/lengths.py": 4,
    "cutekernels/compilers.py": 16,
    "cutekernels/compile.py": 4,
    "cutekernels/op.py": 3,
    "cutekernels/backends/": 3,
    "cutekernels/backends/__init__.py": 2,  # the contract, which Op.build speaks of
    "cutekernels/gpu.py": 2,
    "cutekernels/rates.py": 3,
    "cutekernels/rules.py": 4,
    "cutekernels/quant/": 3,
    "cutekernels/measure.py": 2,
    "cutekernels/torch_names.py": 2,
    "cutekernels/conditions.py": 1,
    "cutekernels/interrupts.py": 1,
    "cutekernels/verify.py": 2,
    "cutekernels/isolate.py": 2,
    "cutekernels/environment.py": 2,
    "cutekernels/installation.py": 3,
    "db/__init__.py": 1,
    "db/storage/": 2,
    "db/questions/": 13,  # reads declarations
    "cutekernels/errors.py": 1,
    "cutekernels/settings.py": 1,
    "cutekernels/lazy.py": 0,
    "cutekernels/interval.py": 2,
    "cutekernels/terminal.py": 1,
    "cutekernels/__init__.py": 3,
    "cutekernels/kernels/": 1,
    "cutekernels/columns.py": 0,
}
FAMILY_FLOOR = 8  # of a family of ops that builds on no other
OWN_FLOOR = {f"cutekernels/ops/{family}/" for family in registry.FAMILIES if "." not in family} - set(FLOORS)
FLOORS |= dict.fromkeys(OWN_FLOOR, FAMILY_FLOOR)
MOST_UPWARDS = 5
CIRCLES = set[frozenset[str]]()
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


def is_allowed(here: str, there: str) -> bool:
    return there == here or FLOORS[there] < FLOORS[here]


def test_imports_are_of_lower_floors() -> None:
    for file in FILES:
        for name in names_in(file):
            target = file_of(name)
            if target is not None and target != file and (file, name) not in UPWARDS:
                here, there = room(file), room(target)
                allowed = is_allowed(here, there)
                assert allowed, f"{file} (floor {FLOORS[here]}) imports {name} (floor {FLOORS[there]})"


def below(files: Sequence[str]) -> dict[str, set[str]]:
    """The imports of each of ``files`` among them: lazily, for types or upwards too."""
    return {file: {file_of(name) for name in names_in(file)} & {*files} - {file} for file in files}  # type: ignore[misc]


def test_files_import_one_another_in_named_circles_alone() -> None:
    assert {frozenset(circle) for circle in circles(below(FILES))} == CIRCLES


def test_a_family_has_few_floors() -> None:
    """At most six over its numbers."""
    for family in FAMILIES:
        files = [f for f in FILES if str(Path(f).parent) == family and not f.endswith("/coefficients.py")]
        assert floors(below(files)) <= MOST_FLOORS, family


def test_a_circle_and_a_tall_family_are_seen() -> None:
    assert list(circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "e2"}, "e2": set()})) == [
        {"b", "c"}
    ]
    assert list(circles({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c", "a"}})) == [{"a", "b"}, {"c", "d"}]
    assert floors({"a": {"b"}, "b": {"c"}, "c": set(), "d": {"c"}}) == 3


def circles(below: dict[str, set[str]]) -> Iterator[set[str]]:
    """Groups of files that each reach every other one of their group."""
    left = dict(below)
    while left:
        size = len(left) + 1
        while len(left) < size:  # those that import none of the others are in no circle
            size, left = len(left), {f: some for f, g in left.items() if (some := g & left.keys())}
        if not left:
            return
        first = next(iter(left))
        down, up = reached(left, first), reached({g: {f for f in left if g in left[f]} for g in left}, first)
        if len(down & up) > 1:
            yield down & up
        left = {f: g for f, g in left.items() if f not in down & up}


def reached(below: dict[str, set[str]], first: str) -> set[str]:
    seen, left = set[str](), {first}
    while left:
        seen |= left
        left = {g for f in left for g in below[f] if g in below} - seen
    return seen


def floors(below: dict[str, set[str]]) -> int:
    """How many floors files take that import those ``below`` them, in no circle."""
    height: dict[str, int] = {}
    while len(height) < len(below):
        ready = [f for f in below if f not in height and all(g in height for g in below[f])]
        assert ready, f"import one another in a circle: {', '.join(f for f in below if f not in height)}"
        height |= {f: 1 + max((height[g] for g in below[f]), default=0) for f in ready}
    return max(height.values(), default=0)


def test_every_exception_is_in_use() -> None:
    assert len(UPWARDS) <= MOST_UPWARDS
    for file, name in UPWARDS - {("cutekernels/cli.py", "bench.__main__")}:
        assert name in set(names_in(file)), f"{file} no longer names {name}: take it off UPWARDS"
        assert not is_allowed(room(file), room(str(file_of(name)))), f"{file}: {name} is lower, take it off UPWARDS"


def test_the_database_knows_no_torch_and_its_store_no_ops() -> None:
    for file in (f for f in FILES if f.startswith("db/")):
        for name in names_in(file):
            assert name.split(".")[0] not in HEAVY_IN_DB, f"{file} imports {name}"
            assert room(file) != "db/storage/" or not name.startswith("cutekernels.op"), f"{file} imports {name}"


def test_the_snapshot_needs_only_the_standard_library() -> None:
    tree = ast.parse((ROOT / "db/storage/snapshot.py").read_text())
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


def test_architectures_are_named_in_gpu_py_only() -> None:
    for file in (f for f in FILES if f != "cutekernels/gpu.py"):
        words = re.sub(QUOTED, lambda text: "" if " " in text[0] else text[0], code(file))
        found = re.search(r"\bsm_?\d{2}\w*", words)
        assert found is None, f"{file} names {found[0]!r}: ask GpuSpec instead"


def test_the_checks_see_violations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "cutekernels/ops/products/dense.py": "from cutekernels import gpu\n",
        "cutekernels/gpu.py": "def f():\n    from cutekernels.ops.products import (\n        dense,\n    )\n",
        "db/storage/store.py": "NAME = 'cutekernels.ops.products.dense:GEMM'\n",
        "cutekernels/rules.py": "def f(): return 'sm_90'  # sm_90\n",
        "db/storage/trial.py": "import torch\nWORDS = 'such as sm_90'\n",
    }
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    with imports.tree_at(tmp_path):
        for check, said in (
            (
                test_imports_are_of_lower_floors,
                r"(gpu|store).py \(floor 2\) imports cutekernels.ops.products.dense",
            ),
            (test_files_import_one_another_in_named_circles_alone, "cutekernels/gpu.py"),
            (test_architectures_are_named_in_gpu_py_only, "rules.py names 'sm_90'"),
            (test_the_database_knows_no_torch_and_its_store_no_ops, "imports (torch|cutekernels.op)"),
        ):
            for some in (list(files), list(files)[1:], list(files)[2:]) if "floor" in said else (list(files),):
                monkeypatch.setattr(f"{__name__}.FILES", some)
                with pytest.raises(AssertionError, match=said):
                    check()
        monkeypatch.setattr(f"{__name__}.FILES", list(files)[:1])
        test_imports_are_of_lower_floors()
