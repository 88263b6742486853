"""Output of the command lines: data to stdout as a table, JSON or CSV; messages to stderr; errors as one line.

Each verb's own ``cli.py`` chooses rows and columns; how they are written is the same for all and stands here.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 220  # columns of a table on a pipe, which has no width of its own


class Format(StrEnum):
    """How a listing is written."""

    table = "table"
    json = "json"
    csv = "csv"


As = Annotated[Format, typer.Option("--format", help="How to write it.")]


def show(table: Any) -> None:
    """Print a rich table to stdout."""
    console = Console(highlight=False)  # made per call, so that a redirected stdout is the one in use
    (console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)).print(table)


def say(message: str, style: str = "") -> None:
    """Print ``message`` to stderr as one line."""
    Console(stderr=True, highlight=False).print(Text(" ".join(message.split()), style=style), soft_wrap=True)


def fail(message: str, code: int = 1) -> NoReturn:
    """End the process with ``message`` as one line on stderr: code 1 for a failure, 2 for misuse."""
    say(message, "red")
    sys.exit(code)


def write(rows: Sequence[Mapping[str, Any]], format: Format, columns: Sequence[str] = ()) -> None:
    """Write rows to stdout. ``columns`` limits a table or CSV; without it, all that the first row has."""
    if format is Format.json:
        typer.echo(as_json(rows))
    elif format is Format.csv:
        typer.echo(as_csv(rows, columns), nl=False)
    elif rows:
        names = columns or list(flat(rows[0]))
        table = Table(*names)
        for row in map(flat, rows):
            table.add_row(*(cell(row.get(name)) for name in names))
        show(table)


def as_json(value: Any) -> str:
    """``value`` as indented JSON, dates in ISO 8601."""
    return json.dumps(value, indent=2, default=plain)


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Rows as CSV with a header; nested records become columns of their own."""
    flattened = [flat(row) for row in rows]
    text = io.StringIO()
    names = columns or list(flattened[0] if flattened else ())
    writer = csv.DictWriter(text, names, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: plain(value) for name, value in row.items()} for row in flattened)
    return text.getvalue()


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` with nested records as columns: ``gpu_name``, ``environment_driver``."""
    flattened: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flattened |= {f"{name}_{inner}": v for inner, v in value.items()}
        else:
            flattened[name] = value
    return flattened


def plain(value: object) -> object:
    """A date as ISO 8601 text; anything else as it is."""
    return value.isoformat() if isinstance(value, datetime) else value


def cell(value: object) -> Text:
    """A table's cell. Text, not markup: a database from elsewhere may hold ``[red]``."""
    if value is None:
        return Text("")
    if isinstance(value, float):
        return Text(f"{value:.4g}" if value < 1000 else f"{value:.1f}", justify="right")
    return Text(str(plain(value)), overflow="fold")
