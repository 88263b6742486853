"""Output of the command lines: the same rows as a table, JSON and CSV; errors as one line on stderr."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.table import Table

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


HOSTILE = "m=1\x1b[2J\x9b31m\u202e\udcff"


@pytest.mark.parametrize("format", [Format.table, Format.csv, Format.json])
def test_nothing_that_is_printed_acts_on_the_terminal(format: Format, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write([{"problem": HOSTILE}], format)
    with pytest.raises(SystemExit):
        terminal.fail(f"bad {HOSTILE}")
    shown = capsys.readouterr()
    assert not set("\x1b\x9b\u202e\udcff") & set(shown.out + shown.err)
    assert "m=1\\x1b[2J" in shown.err


def test_a_table_with_broken_markup_or_escapes_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("job [/red]", title="[/bold] of a job\x1b[2J")
    table.add_row("[/nope] 4096")
    terminal.show(table)
    shown = capsys.readouterr().out
    assert "[/nope] 4096" in shown
    assert "job [/red]" in shown
    assert "\x1b" not in shown


def test_csv_has_the_columns_of_all_rows() -> None:
    assert terminal.as_csv([{"a": 1}, {"b": {"c": 2}}]) == "a,b_c\n1,\n,2\n"
