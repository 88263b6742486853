"""``python -m bench training`` without a GPU: what it lists, refuses and shows."""

from __future__ import annotations

import pytest

from bench import training, wall
from bench.rows import Row
from cutekernels.errors import UnknownGpu
from tests.command_line import invoke


def test_a_dry_run_lists_cases_and_contenders() -> None:
    listed = invoke(training.app, "--dry-run").output.splitlines()
    assert len(listed) == len(training.CASES)
    some = invoke(training.app, "--dry-run", "--match", "loss").output
    assert some.count("\n") == 3
    assert "liger" in some


@pytest.mark.parametrize(("arguments", "code"), [(["--match", "nothing"], 2), ([], 1)])
def test_what_cannot_run_is_said(arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise UnknownGpu(name)

    monkeypatch.setattr(wall.gpus, "lookup", none)
    result = invoke(training.app, *arguments)
    assert result.exit_code == code
    assert "--dry-run" in result.output


def test_the_table_has_failed_rows_too() -> None:
    common = ("training", "step", "a", "a", 1.0, 0.0)
    shown = wall.table([Row(*common, "plain", "ok", median_us=2e3), Row(*common, "liger", "absent", "not here")])
    assert shown.row_count == 2
