"""``tune``: what it writes where, and how it refuses names and files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from cutekernels.autotune import cli
from cutekernels.autotune.report import TaskReport, TuneReport
from cutekernels.db.storage.store import Store
from tests.command_line import invoke


def test_the_log_is_not_appended_to_a_database(tmp_path: Path) -> None:
    log = tmp_path / "tuned.db"
    Store(log).close()
    before = log.read_bytes()
    result = invoke(cli.app, "demo", "--gpu", "l40s", "--log", str(log))
    assert result.exit_code == 2
    assert "tuned.db is an SQLite database: name another file" in " ".join(result.stderr.split())
    assert log.read_bytes() == before


@pytest.mark.parametrize("beside", ["", "-wal", "-journal", ".lock", ".leases", ".studies"])
def test_the_log_is_no_file_of_the_run_s_database(tmp_path: Path, beside: str) -> None:
    """Neither is there yet; a link leads to it."""
    (tmp_path / "link").symlink_to(tmp_path)
    log = tmp_path / "link" / f"new.db{beside}"
    result = invoke(cli.app, "demo", "--gpu", "l40s", "--log", str(log), "--db", str(tmp_path / "new.db"))
    assert result.exit_code == 2
    assert "is the run's database, or a file beside it: name another file" in " ".join(result.stderr.split())
    assert not list(tmp_path.glob("new.db*"))


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000])
def test_a_name_too_long_for_a_file_is_no_job(name: str) -> None:
    result = invoke(cli.app, name, "--list")
    assert result.exit_code == 2
    assert "is neither a file nor a bundled job" in result.stderr


def test_the_report_is_written_where_only_ascii_is() -> None:
    report = TuneReport("mine", "h200", "measured", (TaskReport("gemm", "m=1", "failed", None, ""),), 1.0)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=stream, width=100).print(report.as_table())
    stream.flush()
    stream.seek(0)
    assert "us" in stream.read()
