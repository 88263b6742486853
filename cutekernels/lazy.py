"""Lazy public names: imported at first use, declared once in the ``__init__.pyi`` beside the package's file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``(__getattr__, __dir__, __all__)`` for ``package``, whose stub lies beside ``file``.

    The stub's imports give each name's module: ``from cutekernels.dispatch import reload as reload`` is an attribute of
    that module, ``from cutekernels import nn as nn`` a module of this package.
    """
    homes: dict[str, str | None] = {}
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            homes.update({alias.name: None if node.module == package else node.module for alias in node.names})

    def fetch(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = import_module(f"{package}.{name}") if home is None else getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)  # a module of the same name, imported by then, must not win
        return value

    def names() -> list[str]:
        dunders = {name for name in vars(sys.modules[package]) if name.startswith("__")}
        return sorted({*dunders, *homes})

    return fetch, names, sorted(homes)
