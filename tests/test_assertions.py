"""No assertion holds whatever the values are: ``assert a == b if c else {d}`` asserts a set wherever c is false."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests", "bench", "cutekernels", "autotune", "db", "docs", "examples")
TESTS = (
    *(ast.Compare, ast.Call, ast.UnaryOp, ast.BoolOp, ast.BinOp, ast.Name, ast.Attribute, ast.Subscript),
    *(ast.NamedExpr, ast.Await, ast.ListComp, ast.SetComp, ast.DictComp),
)


def always_true(node: ast.expr) -> bool:
    """Whether ``node``, or a side of its, is true whatever values are: a set, a lambda, a text, a number."""
    match node:
        case ast.IfExp():
            sides = node.body, node.orelse
            return any(always_true(side) or isinstance(side, ast.Name | ast.Attribute) for side in sides)
        case ast.BoolOp():
            return any(map(always_true, node.values))
        case ast.Constant():
            return bool(node.value)
    return not isinstance(node, TESTS)


def vacuous(source: str) -> Iterator[tuple[int, str]]:
    """The assertions of ``source`` that cannot fail, and comparisons that nobody reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and always_true(node.test):
            yield node.lineno, ast.unparse(node.test)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare):
            yield node.lineno, ast.unparse(node)


def test_every_assertion_can_fail() -> None:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 500
    found = [f"{file.relative_to(ROOT)}:{line}: {what}" for file in files for line, what in vacuous(file.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        'assert seen == every if wgmma else {"multistage"}',
        "assert seen >= every if known else seen",
        "assert a == b or {c}",
        'assert (a == b, "the same")',
        "assert [x for x in found if wrong(x)] or (x for x in found)",
        "assert (wrong(x) for x in found)",
        "assert lambda: False",
        "a == b",
    ],
)
def test_one_that_cannot_fail_is_seen(source: str) -> None:
    assert list(vacuous(source))


@pytest.mark.parametrize(
    "source",
    [
        "assert a == (b if c else {d})",
        "assert f(a) if b else a == b",
        "assert not {a} & b",
        "assert a or b",
        "assert {x for x in a if x}",
    ],
)
def test_one_that_can_fail_is_left_alone(source: str) -> None:
    assert not list(vacuous(source))
