"""``examples/patch_model.py`` runs and says what it did."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "patch_model.py"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert "attention: 2 patched, 2 fused" in said
    assert "error against fp32" in said
