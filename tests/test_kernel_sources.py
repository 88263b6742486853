"""How kernel bodies are written: what STYLE asks of them that a tree can show. Whether comments are true, it cannot."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).parents[1] / "cutekernels" / "kernels"
CUTE = KERNELS / "cute"
FILES = sorted(CUTE.rglob("*.py"))
BODIES = [
    file
    for file in FILES
    if file.parent.name in ("products", "attention")
    and file.stem not in ("__init__", "dequantize", "values")
    and "packed" not in file.stem
]
LEAST_COMMENTS = 6.0  # own-line comments to a hundred lines of code, in a body
MANY, MOST_OF_MANY = 10, 16  # parameters of a function, ``self`` among them, and functions that have so many
ADDENDS = {"beta", "mC", "gC", "sC", "tC", "rC", "mBias", "rBias", "sBias", "bias", "biases"}
ENTRIES = ("__call__", "kernel")  # a launch's arguments, one by one


def aliases(tree: ast.AST) -> Iterator[str]:
    """Names that stand for an attribute of ``self``: bound to ``self.<name>`` itself, or to what hangs on ``self`` and
    only ever called. ``tile_m = self.epilogue.tile_m`` is none: it shortens a path to a value.
    """
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        called = {id(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
        loads = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        for target, value in pairs(function):
            uses = [id(node) for node in loads if node.id == target]
            only_called = bool(uses) and all(use in called for use in uses)
            if value == f"self.{target}" or (value.startswith("self.") and only_called):
                yield f"{function.name}: {target} = {value}"


def pairs(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """``(name, dotted path)`` of each assignment of a path to a name, those in tuples too."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        left, right = node.targets[0], node.value
        both = isinstance(left, ast.Tuple) and isinstance(right, ast.Tuple)
        targets = left.elts if both else [left]  # type: ignore[attr-defined]
        values = right.elts if both else [right]  # type: ignore[attr-defined]
        for target, value in zip(targets, values, strict=False):
            if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
                yield target.id, ast.unparse(value)


def additions(tree: ast.AST) -> Iterator[str]:
    """Sums and products with C, its factor or a bias, and activations: what the epilogue alone does."""
    for node in ast.walk(tree):
        sides: tuple[ast.AST, ...] = ()
        if isinstance(node, ast.BinOp):
            sides = (node.left, node.right)
        elif isinstance(node, ast.AugAssign):
            sides = (node.target, node.value)
        if sides and isinstance(node.op, ast.Add | ast.Mult) and any(operand(side) in ADDENDS for side in sides):  # type: ignore[attr-defined]
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and operand(node.func) == "activation":
            yield ast.unparse(node)


def operand(node: ast.AST) -> str:
    """The name that an operand comes from, whatever is loaded, converted or indexed of it: ``rC.load().to(x)``, rC."""
    if isinstance(node, ast.Call):
        return operand(node.func)
    if isinstance(node, ast.Subscript):
        return operand(node.value)
    if isinstance(node, ast.Attribute):
        return operand(node.value) if node.attr in ("load", "to", "apply") else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def comments_per_hundred(source: str) -> float:
    """Own-line comments to a hundred lines of code, docstrings and empty lines left out."""
    lines = [line.strip() for line in source.splitlines()]
    comments = sum(line.startswith("#") for line in lines)
    described = sum(len(node.body[0].value.value.splitlines()) for node in documented(source))
    return 100 * comments / (sum(bool(line) for line in lines) - comments - described)


def documented(source: str) -> Iterator[ast.Module]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and ast.get_docstring(node):
            yield node  # type: ignore[misc]


def test_calls_go_through_self_and_the_formatter_lays_out() -> None:
    for file in FILES:
        source = file.read_text()
        assert not list(aliases(ast.parse(source))), file
        assert "fmt: skip" not in source, file


def test_bodies_speak() -> None:
    for file in BODIES:
        assert comments_per_hundred(file.read_text()) >= LEAST_COMMENTS, file


def test_one_epilogue() -> None:
    found = {file.name for file in FILES if list(additions(ast.parse(file.read_text())))}
    assert found == {"epilogue.py"}


def test_only_entries_have_many_parameters() -> None:
    wide = [
        (str(file.relative_to(CUTE)), node.name)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and len(node.args.args) >= MANY
    ]
    assert not [found for found in wide if found[1] not in ENTRIES]
    assert len(wide) <= MOST_OF_MANY


def test_the_checks_see_what_they_are_for() -> None:
    planted = "def f(self):\n    go, n = self.part.go, self.part.n\n    mma = self.mma\n    return go(n, mma)\n"
    assert list(aliases(ast.parse(planted))) == ["f: go = self.part.go", "f: mma = self.mma"]
    planted = "x = a * acc + out.beta * rC.load().to(Float32)\nx += self.mBias[at]\ny = self.activation.apply(x)\n"
    assert sorted(additions(ast.parse(planted))) == [
        "out.beta * rC.load().to(Float32)",
        "self.activation.apply(x)",
        "x += self.mBias[at]",
    ]
    assert comments_per_hundred('"""Two\nlines."""\n\n# why\nx = 1\ny = 2\n') == 50.0
