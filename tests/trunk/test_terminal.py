"""Output of the command lines: the same rows as a table, JSON and CSV; errors as one line on stderr."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from cutekernels import terminal
from cutekernels.terminal import Format

ROWS: list[dict[str, Any]] = [
    {"gpu": {"name": "h200", "sms": 132}, "at": datetime(2026, 11, 23, tzinfo=UTC), "us": 12.3456, "why": None},
    {"gpu": {"name": "l40s", "sms": 142}, "at": datetime(2026, 11, 24, tzinfo=UTC), "us": 1234.56, "why": "[red]"},
]


def test_json_keeps_nesting_and_writes_dates_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write(ROWS, Format.json)
    found = json.loads(capsys.readouterr().out)
    assert found[0] == {**ROWS[0], "at": "2026-11-23T00:00:00+00:00"}


def test_csv_has_a_column_for_each_nested_field(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write(ROWS, Format.csv)
    first, _ = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert first == {
        "gpu_name": "h200",
        "gpu_sms": "132",
        "at": "2026-11-23T00:00:00+00:00",
        "us": "12.3456",
        "why": "",
    }


def test_csv_of_no_rows_still_has_its_header() -> None:
    assert terminal.as_csv([], ["a", "b"]) == "a,b\n"


def test_a_table_shows_the_columns_named_and_markup_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write(ROWS, Format.table, ["us", "why"])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("12.35", "1234.6", "[red]"))
    assert "h200" not in shown


def test_an_error_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        terminal.fail("rule broken;\n  the remedy", code=2)
    assert end.value.code == 2
    assert capsys.readouterr() == ("", "rule broken; the remedy\n")
