"""The tables of the models' numbers: each has a unit and a meaning, and a formula reads it."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from cutekernels.rates import Rates

OPS = Path(__file__).parents[2] / "cutekernels" / "ops"
TABLES = sorted(OPS.rglob("coefficients.py"))
OTHERS = """bytes clocks columns cycles exponent factor instructions multiplications power programs share tiles tokens
us CTAs DRAM's one of the warp"""
UNITS = {f.name for f in fields(Rates)} | set(OTHERS.split())  # first words of what a number multiplies or counts


def numbers(table: Path) -> list[tuple[str, str]]:
    """The fields of a table's classes, each with the comment on its line."""
    lines, found = table.read_text().splitlines(), []
    for kind in (node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ClassDef)):
        for field in (node for node in kind.body if isinstance(node, ast.AnnAssign)):
            assert isinstance(field.target, ast.Name)
            found.append((field.target.id, lines[field.lineno - 1].partition("  # ")[2]))
    return found


def unexplained(name: str, comment: str) -> bool:
    return re.split(r"[ :]", comment)[0] not in UNITS or len(comment.split()) < 2


each_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.parent.name)


@each_table
def test_each_number_has_a_unit_and_a_meaning(table: Path) -> None:
    assert [name for name, comment in numbers(table) if unexplained(name, comment)] == []


@each_table
def test_a_table_imports_no_other_file_of_ops_than_tables(table: Path) -> None:
    imported = re.findall(r"^from (cutekernels\S*) import", table.read_text(), re.MULTILINE)
    assert all(module.endswith(".coefficients") for module in imported)


@each_table
def test_a_formula_reads_each_number(table: Path) -> None:
    formulas = "\n".join(file.read_text() for file in OPS.rglob("*.py") if file.name != table.name)
    assert [name for name, _ in numbers(table) if not re.search(rf"\.{name}\b", formulas)] == []


def test_a_number_without_a_unit_is_seen() -> None:
    assert (
        unexplained("port", "") and unexplained("port", "what an SM loads") and unexplained("port", "sm_bytes_per_us")
    )
    assert not unexplained("port", "sm_bytes_per_us: what an SM loads")


def test_every_family_with_numbers_has_one_table() -> None:
    assert {table.parent.name for table in TABLES} == {"attention", "moe", "schedules", "shared"}
