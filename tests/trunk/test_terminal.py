"""Output of the command lines: the same rows as a table, JSON and CSV; errors as one line on stderr."""

from __future__ import annotations

import csv
import io
import json
import re
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


# ---- long tables --------------------------------------------------------------------------------------------


def _long(count: int) -> list[dict[str, Any]]:
    return [{"op": "gemm", "us": float(i), "why": "line\nbelow" if i == 7 else "\x1b[31m[red]"} for i in range(count)]


def test_a_long_table_has_every_row_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write(_long(terminal.MOST_DRAWN + 1), Format.table)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["op", "us", "why"]
    assert len(lines) == 1 + terminal.MOST_DRAWN + 1 + 1, "a header, the rows, and the second line of one"
    assert [line.split() for line in lines[8:10]] == [["gemm", "7", "line"], ["below"]]
    assert lines[8].index("line") == lines[9].index("below"), "below each other"
    assert lines[1].split() == ["gemm", "0", "\\x1b[31m[red]"], "no text acts on the terminal, none is markup"


def test_a_long_table_is_not_drawn_by_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures and wraps each cell several times: 20,000 rows took 35 s of CPU time where plain lines take 7."""

    def drawn(*args: object, **options: object) -> None:
        raise AssertionError("drawn by rich")

    monkeypatch.setattr(terminal.Console, "print", drawn)
    terminal.write(_long(terminal.MOST_DRAWN + 1), Format.table)
    with pytest.raises(AssertionError, match="drawn by rich"):
        terminal.write(_long(terminal.MOST_DRAWN), Format.table)


LONG = [{"problem": "m=4096 n=11008 k=4096 " * 6, "us": float(n), "note": "line one\nline two"} for n in range(3)]


def test_on_a_pipe_a_row_is_one_line_whatever_columns_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for columns in ("40", "1000"):
        monkeypatch.setenv("COLUMNS", columns)
        terminal.write(LONG, Format.table)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 + len(LONG)
        assert all(LONG[0]["problem"] in line and line.endswith("line one  line two") for line in lines[1:])
        table = Table("a", title="a title longer than the table", caption="and its caption", padding=(0, 2, 1, 0))
        table.add_row("one")
        table.box = None
        terminal.show(table)
        assert capsys.readouterr().out.splitlines() == ["a title longer than the table", "a", "one", "and its caption"]


def test_in_a_terminal_a_table_has_its_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    widest = {}
    for columns in (60, 120, 400):
        monkeypatch.setenv("COLUMNS", str(columns))
        terminal.write(LONG, Format.table)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        widest[columns] = max(map(len, lines))
    assert widest[60] <= 60 < widest[120] <= 120 < widest[400] <= 400
