"""Join a new op's folder to the tree: ``python -m docs.add_op examples/new_op``.

The folder is what ``examples/new_op`` is: ``op.py`` and ``api.py`` that import each other as
``cutekernels.ops.<family>``, ``__init__.py`` with ``OPS``, and ``kernel.py``. The script copies it, and writes the
names where they must stand:

- ``cutekernels/ops/<family>/`` and ``cutekernels/kernels/{triton,cute}/<family>.py``: the files themselves;
- ``cutekernels/ops/registry.py``: the family and its ops;
- ``cutekernels/__init__.pyi``: the public functions of ``api.py``;
- ``README.md``: the functions, in the table of ops.

Dispatcher, tuner, database, ``explain``, ``python -m bench``, floors, the reference page and the tests that run over
every op follow from the registry. ``python -m docs.generate`` writes the pages, which ``main`` does too.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAST_ROW = "| `sample_filter`"  # the README's row of ops that stand for themselves


def family_of(folder: Path) -> str:
    """The family that the folder's files import each other by."""
    found = set(re.findall(r"from cutekernels\.ops\.(\w+)\.op import", (folder / "__init__.py").read_text()))
    if len(found) != 1:
        raise SystemExit(f"{folder}/__init__.py imports from one cutekernels.ops.<family>.op; found {sorted(found)}")
    return found.pop()


def names_of_ops(folder: Path) -> list[str]:
    """``name = "..."`` of each class in ``op.py``."""
    classes = [node for node in ast.parse((folder / "op.py").read_text()).body if isinstance(node, ast.ClassDef)]
    return [
        node.value.value
        for each in classes
        for node in each.body
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "name" for target in node.targets)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def functions_of(folder: Path) -> list[str]:
    """The public functions of ``api.py``."""
    tree = ast.parse((folder / "api.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def insert(path: Path, before: str, lines: str) -> None:
    """Write ``lines`` into ``path`` in front of the text ``before``, which stands there once."""
    text = path.read_text()
    if text.count(before) != 1:
        raise SystemExit(f"{path} has no single {before!r} to write {lines.strip()!r} in front of")
    path.write_text(text.replace(before, lines + before))


def join(folder: Path, root: Path = ROOT) -> str:
    """Write the op of ``folder`` into the tree at ``root``; the family's name."""
    family, ops, functions = family_of(folder), names_of_ops(folder), functions_of(folder)
    language = "cute" if "import cutlass" in (folder / "kernel.py").read_text() else "triton"
    home, kernel = root / "cutekernels/ops" / family, root / f"cutekernels/kernels/{language}/{family}.py"
    for place in (home, kernel):
        if any(file.is_file() and file.suffix != ".pyc" for file in (place, *place.rglob("*"))):
            raise SystemExit(f"{place} is there already")
    ignored = shutil.ignore_patterns("__pycache__", "kernel.py")
    shutil.copytree(folder, home, ignore=ignored, dirs_exist_ok=True)
    shutil.copy(folder / "kernel.py", kernel)
    names = ", ".join(f'"{op}"' for op in ops) + ("," if len(ops) == 1 else "")
    insert(root / "cutekernels/ops/registry.py", "}\n_HOMES", f'    "{family}": ({names}),\n')
    stub = root / "cutekernels/__init__.pyi"
    lines = "".join(f"from cutekernels.ops.{family}.api import {name} as {name}\n" for name in functions)
    following = next(
        (line for line in stub.read_text().splitlines() if line.startswith("from ") and line > lines), "\n__version__"
    )
    insert(stub, following, lines)
    shown = ", ".join(f"`{name}`" for name in functions)
    text = (root / "README.md").read_text()
    (root / "README.md").write_text(text.replace(LAST_ROW, f"| {shown}, {LAST_ROW[2:]}", 1))
    return family


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    family = join(Path(sys.argv[1]))
    print(f"{family} is joined; python -m docs.generate writes the pages")


if __name__ == "__main__":
    main()
