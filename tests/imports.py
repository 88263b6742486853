"""The files that a file refers to, read from its text: what the floors are checked by, and the ledger of GPU tests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from cutekernels.ops import registry

ROOT = Path(__file__).parents[1]
FOLDERS = {"cutekernels.autotune": "autotune", "cutekernels.db": "db"}
# Imports upwards, by name and at run time only: what a caller's argument or a verb asks for.
UPWARDS = {
    ("cutekernels/cli.py", "bench.__main__"),  # the verb, from a table of text
}

QUOTED = r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
_STRING_OR_COMMENT = re.compile(rf"({QUOTED})|[ \t]*#[^\n]*", re.S)
_DOCSTRING = re.compile(r'(\A|:\n)\s*[rR]?"""(?:\\.|[^\\])*?"""[ \t]*(?=\n|\Z)', re.S)
_IMPORT = re.compile(r"^\s*(?:from ([\w.]+) )?import (\([^)]*\)|[^\n(]+)", re.M)
_DOTTED_TEXT = re.compile(r"""["'](cutekernels(?:\.\w+)+)[:"']""")
_OP_TEXT = re.compile(r"""["'](\w+)["']""")


@cache
def code(file: str) -> str:
    """The file without comments, docstrings and empty lines. By text: a tree differs between versions of Python."""
    bare = _STRING_OR_COMMENT.sub(lambda found: found[1] or "", (ROOT / file).read_text())
    lines = _DOCSTRING.sub(r"\1", re.sub(r"\n\s*\n", "\n", bare)).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip())


@cache
def public_names(package: str) -> dict[str, str]:
    """Names of a lazy package, whose stub says where each lies, with the dotted names that they stand for."""
    stub = (ROOT / package).with_suffix(".pyi")
    found = re.findall(r"^from ([\w.]+) import (\w+)", stub.read_text(), re.M) if stub.exists() else []
    return {name: f"{module}.{name}" for module, name in found}


@cache
def file_of(name: str) -> str | None:
    """The file of ours that a dotted name refers to: a module, or the one that holds it, through lazy packages."""
    words = name.split(".")
    for prefix, folder in FOLDERS.items():
        if f"{name}.".startswith(f"{prefix}."):
            words = [folder, *words[2:]]
    for length in range(len(words), 0, -1):
        path = "/".join(words[:length])
        if (ROOT / f"{path}.py").is_file():
            return f"{path}.py"
        package = f"{path}/__init__.py"
        if (ROOT / package).is_file():
            home = public_names(package).get(words[length]) if length < len(words) else None
            return package if home is None or home == name else file_of(home)
    return None


def names_in(file: str) -> Iterator[str]:
    """Dotted names that a file refers to: imports, attributes of what it imports, texts; a test's names of ops too."""
    text = code(file)
    modules: dict[str, str] = {}
    for module, listed in _IMPORT.findall(text):
        for entry in re.findall(r"([\w.]+)(?: as (\w+))?", listed.strip("()")):
            name = f"{module}.{entry[0]}" if module else entry[0]
            modules[entry[1] or entry[0]] = name
            yield name
    lazy = {alias: name for alias, name in modules.items() if public_names(file_of(name) or "")}
    for alias, name in lazy.items():
        yield from (f"{name}.{word}" for word in re.findall(rf"(?<![\w.]){re.escape(alias)}\.(\w+)", text))
    yield from _DOTTED_TEXT.findall(text)
    if file.startswith("tests/"):
        ops = {op: family for family, ops in registry.FAMILIES.items() for op in ops}
        some = (
            set(registry.FAMILIES) if "registry.OPS" in text else {ops[n] for n in _OP_TEXT.findall(text) if n in ops}
        )
        yield from (f"cutekernels.ops.{family}" for family in some)


@cache
def imports(file: str) -> frozenset[str]:
    """The files that a file's names refer to, but for those of exceptions upwards: a floor above tests them."""
    names = (name for name in names_in(file) if (file, name) not in UPWARDS)
    return frozenset(found for name in names if (found := file_of(name)) is not None) - {file}


def reached(files: Iterable[str]) -> set[str]:
    """The files with all that they import, and so on."""
    seen: set[str] = set()
    left = set(files)
    while left:
        seen |= left
        left = {below for file in left for below in imports(file)} - seen
    return seen


@contextmanager
def tree_at(root: Path) -> Iterator[None]:
    """The files of another tree, for as long as it lasts."""
    global ROOT
    own, ROOT = ROOT, root
    remembered = code, public_names, file_of, imports
    for each in remembered:
        each.cache_clear()
    yield
    ROOT = own
    for each in remembered:
        each.cache_clear()
