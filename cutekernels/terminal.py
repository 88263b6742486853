"""Output of the command lines: data to stdout as a table, JSON or CSV; messages to stderr; errors as one line.

Each verb's own ``cli.py`` chooses rows and columns; how they are written is the same for all and stands here.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from itertools import zip_longest
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.errors import MarkupError
from rich.table import Table
from rich.text import Text

ONE_LINE = 1_000_000  # columns, for a row of one line: where stdout is no terminal, as ps and docker print it
MOST_DRAWN = 2000  # rows that rich draws: it measures every cell, half a second for a thousand rows

# C0 and C1 controls but tab and newline, marks that turn the direction of text, lone surrogates.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Format(StrEnum):
    """How a listing is written."""

    table = "table"
    json = "json"
    csv = "csv"


As = Annotated[Format, typer.Option("--format", help="How to write it.")]


def clean(text: str) -> str:
    """``text`` with characters that act on a terminal written as escapes: what a database holds is not trusted."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def is_terminal() -> bool:
    """Whether stdout is one, which has a width."""
    return Console().is_terminal


def show(table: Any, *, one_line: bool = False) -> None:
    """Print a rich table to stdout, with nothing in it that acts on the terminal, and broken markup as plain text.

    It is as wide as the terminal. Where stdout is none, or with ``one_line``, each row is one line, however long.
    """
    if isinstance(table, Table) and table.row_count > MOST_DRAWN:
        _write_plainly(table)
        return
    if isinstance(table, Table):
        _clean_table(table)
    console = Console(highlight=False)  # made per call, so that a redirected stdout is the one in use
    if console.is_terminal and not one_line:
        console.print(table)
        return
    console = Console(highlight=False, width=ONE_LINE)
    with console.capture() as printed:
        console.print(*(_unfold(table) if isinstance(table, Table) else [table]), sep="\n")
    sys.stdout.write("".join(f"{line.rstrip(' ')}\n" for line in printed.get().removesuffix("\n").split("\n")))


def _unfold(table: Table) -> list[Any]:
    """A table whose rows are one line each, between its title and caption, which it would fold to its width."""
    for column in table.columns:
        column.header, *column._cells = map(_line, (column.header, *column._cells))
    _, right, _, left = table.padding
    table.padding = (0, right, 0, left)
    parts = [table.title, table, table.caption]
    table.title = table.caption = None
    return [part for part in parts if part is not None]


def _line(value: Any) -> Any:
    if isinstance(value, Text) and "\n" in value.plain:
        return Text("  ".join(value.plain.split("\n")), style=value.style, justify=value.justify)
    return value


def _write_plainly(table: Table) -> None:
    """Write a long table in columns as wide as their widest line: nothing is wrapped, coloured or boxed."""
    columns = [[_lines(value) for value in (c.header, *c._cells)] for c in table.columns]
    widths = [max(len(line) for lines in column for line in lines) for column in columns]
    right = [column.justify == "right" or _is_numeric(column._cells) for column in table.columns]
    for row in zip(*columns, strict=True):
        for line in zip_longest(*row, fillvalue=""):
            padded = (t.rjust(w) if flush else t.ljust(w) for t, w, flush in zip(line, widths, right, strict=True))
            sys.stdout.write(" ".join(padded).rstrip() + "\n")


def _lines(value: Any) -> list[str]:
    if isinstance(value, str):
        value = _clean_cell(value)
    return clean(value.plain).split("\n")


def _is_numeric(cells: Sequence[Any]) -> bool:
    return any(isinstance(value, Text) and value.justify == "right" for value in cells)


def _clean_table(table: Table) -> None:
    for column in table.columns:
        column.header = _clean_cell(column.header)
        column._cells = [_clean_cell(value) for value in column._cells]
    if table.title is not None:
        table.title = _clean_cell(table.title)
    if table.caption is not None:
        table.caption = _clean_cell(table.caption)


def _clean_cell(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return Text.from_markup(clean(value))
        except MarkupError:
            return Text(clean(value))
    if isinstance(value, Text) and _UNSAFE.search(value.plain):
        return Text(clean(value.plain), style=value.style, justify=value.justify, overflow=value.overflow)
    return value


class _Messages(Console):
    def on_broken_pipe(self) -> None:
        """Nothing: rich would end the process, and throw away what it has for stdout."""


def say(message: str, style: str = "") -> None:
    """Print ``message`` to stderr as one line. Where nobody reads it any more, the exit code is all that is left."""
    line = Text(clean(" ".join(message.split())), style=style)
    with suppress(OSError):
        _Messages(stderr=True, highlight=False).print(line, soft_wrap=True)
        sys.stderr.flush()


def fail(message: str, code: int = 1) -> NoReturn:
    """End the process with ``message`` as one line on stderr: code 1 for a failure, 2 for misuse."""
    say(message, "red")
    sys.exit(code)


def write(rows: Sequence[Mapping[str, Any]], format: Format, columns: Sequence[str] = ()) -> None:
    """Write rows to stdout. ``columns`` limits a table or CSV; without it, a table has those of the first row."""
    if format is Format.json:
        typer.echo(as_json(rows))
    elif format is Format.csv:
        typer.echo(as_csv(rows, columns), nl=False)
    elif rows:
        names = columns or list(flat(rows[0]))
        table = Table(*names, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for row in map(flat, rows):
            table.add_row(*(cell(row.get(name)) for name in names))
        show(table)


def as_json(value: Any) -> str:
    """``value`` as indented JSON, dates in ISO 8601; a number that is not finite, which JSON lacks, is null."""
    return json.dumps(_finite(value), indent=2, default=plain, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Rows as CSV with a header; nested records become columns of their own."""
    flattened = [flat(row) for row in rows]
    text = io.StringIO()
    names = columns or list(dict.fromkeys(name for row in flattened for name in row))
    writer = csv.DictWriter(text, names, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _csv_value(value) for name, value in row.items()} for row in flattened)
    return text.getvalue()


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` with nested records as columns: ``gpu_name``, ``environment_driver``."""
    flattened: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flattened |= {f"{name}_{inner}": v for inner, v in value.items()}
        else:
            flattened[name] = value
    return flattened


def plain(value: object) -> object:
    """A date as ISO 8601 text; anything else as it is."""
    return value.isoformat() if isinstance(value, datetime) else value


def _csv_value(value: object) -> object:
    value = _join(value)
    return clean(value) if isinstance(value, str) else plain(value)


def _join(value: object) -> object:
    """A list as one text; anything else as it is."""
    return (
        "; ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in value) if isinstance(value, list) else value
    )


def cell(value: object) -> Text:
    """A table's cell. Text, not markup: a database from elsewhere may hold ``[red]``."""
    value = _join(value)
    if value is None:
        return Text("")
    if isinstance(value, float):
        return Text(f"{value:.4g}" if value < 1000 or value >= 1e7 else f"{value:.1f}", justify="right")
    return Text(clean(str(plain(value))), overflow="fold")
