"""Tables of ``cutekernels db`` in a terminal, from 80 columns on: problem and config below each other, ids shortened.

Where stdout is no terminal, and by ``--wide``, a row is one line: :func:`wide` says of which columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from cutekernels.terminal import cell

_MOST_LONE = 20
Rows = Sequence[Mapping[str, Any]]
_WIDE = ("gpu", "op", "revision", "problem_text", "problem", "config_text", "config", "source", "serves", "origin")
_WIDE_NUMBERS = ("status", "median_us", "ratio", "tflops", "gbps", "roofline", "id", "reason", "message")


def wide(rows: Rows) -> list[str]:
    """Columns of a table with one line for each row; none for rows that have no problem and config."""
    first = rows[0]
    if "config" not in first:
        return []
    names = [name for name in (*_WIDE, *_WIDE_NUMBERS) if name in first]
    return [name for name in names if not isinstance(first[name], Mapping)]


def winners(rows: Rows) -> Table:
    """Winners: ``*`` behind the source marks the row that calls use; the others' reason stands below the config."""
    table = _table("op\ngpu", "problem\nconfig", "us", "x default", "from", "id")
    for row in rows:
        table.add_row(
            _pair(row["op"], row["gpu"]),
            _pair(*filter(None, (row["problem_text"], row["config_text"], row["reason"]))),
            cell(row["median_us"]),
            cell(row["ratio"]),
            Text(row["source"] + (" *" if row["serves"] else "")),
            Text(f"..{row['id'][-8:]}"),
        )
    return table


def trials(rows: Rows) -> Table:
    """Trials: a failed one's reason stands below its config."""
    table = _table("op\ngpu", "problem\nconfig", "status", "us", "x default", "id")
    for row in rows:
        told = [row["problem_text"], row["config_text"], row.get("message", "").strip().split("\n")[0][:120]]
        table.add_row(
            _pair(row["op"], row["gpu"]),
            _pair(*filter(None, told)),
            Text(row["status"]),
            cell(row.get("median_us")),
            cell(row.get("ratio")),
            Text(f"..{row['id'][-8:]}"),
        )
    return table


def differences(rows: Rows) -> Table:
    """Differences of two databases; a's config above b's. Many problems that only one has are counted."""
    table = _table("op\ngpu", "problem\nconfig of a\nconfig of b", "state", "a us", "b us", "a/b")
    lone = Counter((row["gpu"], row["state"]) for row in rows if "only" in row["state"])
    many = {kind: count for kind, count in lone.items() if count > _MOST_LONE}
    for (gpu, state), count in many.items():
        table.add_row(_pair(f"{count} problems", gpu), _pair("a pipe or --format csv lists them"), Text(state))
    for row in rows:
        if (row["gpu"], row["state"]) in many:
            continue
        table.add_row(
            _pair(row["op"], row["gpu"]),
            _pair(row["problem_text"], row["a_config_text"] or "-", row["b_config_text"] or "-"),
            Text(row["state"]),
            cell(row["a_us"]),
            cell(row["b_us"]),
            cell(row["speedup"]),
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in names:
        wraps = name.startswith("problem") or name == "state"
        table.add_column(name, no_wrap=not wraps, overflow="fold" if wraps else "ellipsis", ratio=None)
    return table


def _pair(*lines: str) -> Text:
    return Text("\n".join(lines), overflow="fold")
