"""The kernel repository: the sources that its layers reach, moved under one package of relative imports.

``build/torch-BACKEND/`` is the package. Any project of the hub may be loaded beside this one, and beside an installed
cutekernels, so that nothing in it is named absolutely: imports are relative, modules named in text begin with the
package's own name, and torch's ops have a namespace by a hash of the sources.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cutekernels
from cutekernels.db import snapshot
from cutekernels.errors import UnsupportedProblem

BACKENDS = "cuda", "cpu"
NAME = "cutekernels"
LAYERS = "RMSNorm", "SwiGLUMLP", "Linear", "rotary_pos_emb"
_DEPENDS = {"cuda": ["tvm-ffi", "nvidia-cutlass-dsl"], "cpu": ["tvm-ffi"]}
_PACKAGE = Path(cutekernels.__file__).parent
_REPLACED = {"cutekernels.db.snapshot": _PACKAGE / "hub/winners.py", "cutekernels.layers": _PACKAGE / "hub/layers.py"}
_ALLOWED = {"torch", "triton", "cutlass", "cuda", "tvm_ffi", "numpy"}  # of other projects; the DSL imports NumPy
_INIT = '''"""{summary}"""

ROOT = __name__

from . import layers  # noqa: E402
from .layers import flash_attn_func, flash_attn_varlen_func  # noqa: E402

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "layers"]
'''


def write(out: Path, backend: str = "cuda") -> Path:
    """Write the repository for a backend; the variant's folder.

    Raises:
        UnsupportedProblem: ``out`` is a file, a folder with something else in it, or one that cannot be written.
    """
    try:
        return _written(out, backend)
    except OSError as error:
        raise UnsupportedProblem(
            f"a kernel repository cannot be written into {out}: {error.strerror}; name another folder"
        ) from error


def _written(out: Path, backend: str) -> Path:
    variant = out / "build" / f"torch-{backend}"
    if out.exists() and (not out.is_dir() or any(path.name != "build" for path in out.iterdir()) or variant.exists()):
        raise UnsupportedProblem(f"a kernel repository is written into a new or an empty folder; {out} is none")
    files = dict(_files())
    digest = hashlib.sha256(json.dumps(sorted((name, text) for name, text in files.items())).encode()).hexdigest()[:8]
    new = variant.with_name(f"{variant.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    for name, text in files.items():
        path = new / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(_SPACE, digest))
    (new / "winners.json").write_text(json.dumps(_winners(), separators=(",", ":")))
    (new / "metadata.json").write_text(json.dumps(_metadata(backend, digest), indent=2))
    new.rename(variant)
    return variant


def _metadata(backend: str, digest: str) -> dict[str, Any]:
    """What the ``kernels`` package reads."""
    return {
        "id": f"_{NAME}_{backend}_{digest}", "name": NAME, "version": 1, "license": "MIT",
        "python-depends": _DEPENDS[backend], "backend": {"type": backend},
    }  # fmt: skip


def _winners() -> dict[str, list[list[Any]]]:
    """The shipped winners of each GPU."""
    return {
        gpu: [
            [
                t.op,
                t.revision,
                t.problem,
                t.config,
                t.origin,
                t.median_us,
                t.ratio,
                t.message * (t.origin == "predicted"),
            ]
            for t in snapshot.shipped(gpu)
        ]
        for gpu in snapshot.shipped_gpus()
    }


# ---- sources --------------------------------------------------------------------------------------------

_SPACE = "0hash0"  # of which no source has one
_NAMESPACE = "torch.ops.cutekernels", 'Library("cutekernels'


def _files() -> Iterator[tuple[str, str]]:
    """Path and text of each file: what ``layers`` reaches, and every package on the way."""
    waiting, seen = ["cutekernels.layers"], set[str]()
    summary = "GEMM, attention and norms of cutekernels, with their measured winners, as a kernel repository."
    while waiting:
        module = waiting.pop()
        file = _file(module)
        if module in seen or file is None:
            continue
        seen.add(module)
        waiting.append(module.rpartition(".")[0])
        parts = module.split(".")[1:]
        if module == "cutekernels":
            yield "__init__.py", _INIT.format(summary=summary)
            continue
        package = file.name == "__init__.py"
        text = file.read_text()
        if package and "lazy.attach" in text:  # names for users of the whole package
            yield f"{'/'.join(parts)}/__init__.py", f'"""{ast.get_docstring(ast.parse(text))}"""\n'
            continue
        source, reached = _moved(text, module, depth=len(parts) if package else len(parts) - 1)
        waiting += reached
        yield f"{'/'.join(parts)}{'/__init__' if package else ''}.py", source


def _file(module: str) -> Path | None:
    """The source of a module of this package."""
    if module in _REPLACED:
        return _REPLACED[module]
    parts = module.split(".")
    if parts[0] != "cutekernels":
        return None
    base = Path(snapshot.__file__).parent if parts[1:2] == ["db"] else _PACKAGE.joinpath(*parts[1:2])
    for path in (base.joinpath(*parts[2:]).with_suffix(".py"), base.joinpath(*parts[2:], "__init__.py")):
        if path.is_file() and (len(parts) > 1 or path.name == "__init__.py"):
            return path
    return None


def _moved(text: str, module: str, depth: int) -> tuple[str, list[str]]:
    """A module's source in the repository, ``depth`` packages below its root, and the modules that it imports.

    Raises:
        UnsupportedProblem: it imports what no kernel repository may.
    """
    for named in _NAMESPACE:
        text = text.replace(named, f"{named}_{_SPACE}")
    tree, dots = ast.parse(text), "." * (depth + 1)
    hidden = {id(inner) for node in ast.walk(tree) if _is_typing(node) for inner in ast.walk(node)}
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    said |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    reached: list[str] = []
    edits: list[tuple[int, int, int, str]] = []  # line, from, to, text
    rooted = False
    for node in ast.walk(tree):
        others: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "cutekernels":
            inner = (node.module or "").removeprefix("cutekernels").removeprefix(".")
            length = len(f"from {node.module}")
            edits.append((node.lineno, node.col_offset, node.col_offset + length, f"from {dots}{inner}"))
            if id(node) not in hidden:
                reached += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.ImportFrom):
            others = [node.module or ""]
        elif isinstance(node, ast.Import):
            others = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in said:
            edit = _renamed(node, text)
            if edit is not None:
                edits.append(edit)
                rooted = rooted or "_ROOT" in edit[-1]
                reached += _named(node)
        wrong = [name for name in others if name.split(".")[0] not in _ALLOWED and not _is_standard(name)]
        if wrong and id(node) not in hidden:
            raise UnsupportedProblem(
                "a kernel repository imports torch, Triton, CuTe, NumPy and the standard library alone; "
                f"{module} imports {wrong[0]}: leave that out of what the layers reach"
            )
    lines = text.splitlines(keepends=True)
    for line, begin, end, new in sorted(edits, reverse=True):
        row = lines[line - 1].encode()
        lines[line - 1] = (row[:begin] + new.encode() + row[end:]).decode()
    if rooted:
        place = next(i for i, line in enumerate(lines) if line.startswith("from __future__")) + 1
        lines.insert(place, f"\nfrom {dots} import ROOT as _ROOT\n")
    return "".join(lines), reached


def _named(node: ast.AST) -> list[str]:
    """The modules that a text names: one, or all of a package whose modules are looked up in it."""
    if not isinstance(node, ast.Constant):
        return []
    module = str(node.value).partition(":")[0]
    file = _file(module)
    if file is None or not module.startswith("cutekernels.kernels."):
        return [module]
    inner = (path.relative_to(file.parent).with_suffix("").parts for path in sorted(file.parent.rglob("*.py")))
    return [module, *(".".join((module, *parts)).removesuffix(".__init__") for parts in inner)]


def _is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_standard(name: str) -> bool:
    return name.split(".")[0] in sys.stdlib_module_names


def _renamed(node: ast.Constant | ast.JoinedStr, text: str) -> tuple[int, int, int, str] | None:
    """The edit of a text that names a module of this package, or torch's namespace of its ops."""
    first: Any = node if isinstance(node, ast.Constant) else next(iter(node.values), None)
    if not isinstance(first, ast.Constant) or not str(first.value).startswith("cutekernels"):
        return None
    segment = ast.get_source_segment(text, node) or ""
    body = segment.lstrip("f").strip('"')
    place = node.lineno, node.col_offset, node.end_col_offset or 0
    if node.lineno != node.end_lineno or not segment.lstrip("f").startswith('"'):
        return None
    if body.startswith("cutekernels::"):
        return *place, f'f"{NAME}_{_SPACE}::{body.removeprefix("cutekernels::")}"'
    if body.startswith("cutekernels.") and all(
        x.isidentifier() or x[:1] == "{" for x in body.replace(":", ".").split(".")
    ):
        return *place, f'f"{{_ROOT}}.{body.removeprefix("cutekernels.")}"'
    return None
