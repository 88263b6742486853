"""Calls of a typer app, as from a command line."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner, Result


def invoke(app: Any, *words: str, **options: Any) -> Result:
    return CliRunner().invoke(app, words, **options)
