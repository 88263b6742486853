"""Each script in ``examples/`` runs on a CPU and prints what its docstring says, whatever the figures are."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path for path in ROOT.glob("examples/*.py") if "prints" in path.read_text())
FIGURE = re.compile(r"-?\d[\d.]*(?:e[+-]?\d+)?")


def shape(text: str) -> list[str]:
    """Lines without their figures and spaces; a list of figures counts as one."""
    lines = [" ".join(FIGURE.sub("#", line).split()) for line in text.strip().splitlines()]
    return [re.sub(r"#(?:, #)+", "#", line) for line in lines]


def promised(path: Path) -> str:
    """The indented block behind "prints" in the docstring of ``path``."""
    told = ast.get_docstring(ast.parse(path.read_text())) or ""
    _, _, rest = told.partition("rints")
    blocks = re.findall(r"(?:^    .*\n?)+", rest, re.MULTILINE)
    assert blocks, f"{path.name} does not say what it prints"
    return textwrap.dedent(blocks[0])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers' own
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_print_what_they_promise(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert shape(capsys.readouterr().out) == shape(promised(path))


def test_there_are_some_and_another_output_would_be_seen() -> None:
    assert len(EXAMPLES) >= 6
    assert shape("loss 0.5 -> 0.25\n[1, 2, 3]") == shape("loss 1e-3 ->  7\n[4]") != shape("loss 0.5\n[4]")
