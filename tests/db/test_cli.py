"""``cutekernels db``: each verb, its formats, exit codes, and the split between stdout and stderr."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cutekernels import settings
from cutekernels.db.cli import app
from cutekernels.db.store import Store, Trial
from tests.db.trials import H200, L40S, trial

GEMM = trial("tile_m=128 stages=3", problem="m=4096 n=4096 k=4096", ratio=1.25, baseline_us=2000.0)
SKINNY = trial("tile_m=16 stages=4", problem="m=16 n=4096 k=4096", origin="predicted", median_us=None)
SILU = trial("block=[red]1024", gpu=L40S, op="silu_mul", problem="rows=4096 cols=64")
LOST = trial("tile_m=256 stages=2", problem="m=4096 n=4096 k=4096", status="crashed", message="Xid 13\nillegal address")


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small database, which is also the one in the settings."""
    path = tmp_path / "tuned.db"
    with Store(path) as store:
        store.record([GEMM, SKINNY, SILU, LOST])
        for winner in (GEMM, SKINNY, SILU):
            store.crown(winner.id)
        store.note_requests([("h200", "gemm", 1, "m=1 n=1 k=1", 5), ("l40s", "gemm", 1, "m=2 n=2 k=2", 7)])
    monkeypatch.setenv(settings.DB_VARIABLE, str(path))
    return path


def run(*words: str, input: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, list(words), input=input)


def ok(*words: str, input: str | bytes | None = None) -> Any:
    result = run(*words, input=input)
    assert result.exit_code == 0, result.output
    return result


def rows(*words: str) -> Any:
    return json.loads(ok(*words, "--format", "json").stdout)


def refused(*words: str, code: int = 1, input: str | bytes | None = None) -> str:
    result = run(*words, input=input)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return str(result.stderr)


# ---- looking ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("db")
@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], [SKINNY, GEMM, SILU]),
        (["--gpu", "l40s"], [SILU]),
        (["--op", "gemm"], [SKINNY, GEMM]),
        (["--problem", "k=4096 m=4096"], [GEMM]),
        (["--problem", "m=409"], []),
        (["--origin", "predicted"], [SKINNY]),
    ],
)
def test_query(filters: list[str], expected: list[Trial]) -> None:
    found = rows("query", *filters)
    assert [Trial.from_row(row) for row in found] == expected
    text = ok("query", *filters, "--format", "csv").stdout
    parsed = list(csv.DictReader(io.StringIO(text)))
    assert text.startswith("id,created_at,gpu,op,revision,problem,config,origin,status,median_us,")
    assert sorted(row["config"] for row in parsed) == sorted(t.config for t in expected)
    table = ok("query", *filters)
    for t in expected:
        assert t.config in table.stdout
        assert t.id in table.stdout
    assert ("no winner matches" in table.stderr) is (not expected)


@pytest.mark.usefixtures("db")
def test_csv_cells() -> None:
    (row,) = csv.DictReader(io.StringIO(ok("query", "--op", "silu_mul", "--format", "csv").stdout))
    assert (row["gpu"], row["config"], row["median_us"], row["ratio"]) == ("l40s", "block=[red]1024", "12.5", "")


@pytest.mark.usefixtures("db")
def test_history() -> None:
    assert [row["id"] for row in rows("history", "--op", "gemm")] == [GEMM.id, SKINNY.id, LOST.id]
    assert [row["id"] for row in rows("history", "--limit", "1", "--gpu", "h200")] == [LOST.id]
    assert "crashed" in ok("history", "--problem", "m=4096").stdout
    parsed = list(csv.DictReader(io.StringIO(ok("history", "--format", "csv").stdout)))
    assert [row["message"] for row in parsed][-1] == "Xid 13\nillegal address"
    assert "no trial matches" in ok("history", "--gpu", "a100").stderr


@pytest.mark.usefixtures("db")
def test_show() -> None:
    table = ok("show", LOST.id).stdout
    for words in ("gpu_name", "h200", "environment_driver", "580.95", "illegal address", str(H200.memory_bytes)):
        assert words in table
    assert rows("show", LOST.id) == [LOST.as_row()]
    assert rows("show", "k=4096 n=4096 m=16") == [SKINNY.as_row()]
    assert rows("show", "rows=4096") == [SILU.as_row()]
    (row,) = csv.DictReader(io.StringIO(ok("show", GEMM.id, "--format", "csv").stdout))
    assert row["gpu_name"] == "h200"
    assert row["ratio"] == "1.25"


@pytest.mark.usefixtures("db")
def test_show_says_what_is_missing_or_ambiguous() -> None:
    assert "nothing matches 'm=5'" in refused("show", "m=5")
    assert "nothing matches" in refused("show", "00000000-0000")
    assert "nothing matches" in refused("show", LOST.id, "--gpu", "l40s")
    several = refused("show", "n=4096")
    assert "2 trials match" in several
    assert GEMM.id in several
    assert SKINNY.id in several


@pytest.mark.usefixtures("db")
def test_stats_and_requests() -> None:
    assert rows("stats")[0] == {
        "gpu": "h200",
        "op": "gemm",
        "origin": "measured",
        "trials": 2,
        "ok": 1,
        "winners": 1,
    }
    assert [row["hits"] for row in rows("requests")] == [7, 5]
    assert [row["problem"] for row in rows("requests", "--gpu", "h200")] == ["m=1 n=1 k=1"]
    assert len(rows("requests", "--limit", "1")) == 1
    assert "m=1 n=1 k=1" in ok("requests").stdout
    assert ok("requests", "--format", "csv").stdout.startswith("gpu,op,revision,problem,hits,last_seen\nl40s,")
    assert ok("stats", "--format", "csv").stdout.startswith("gpu,op,origin,trials,ok,winners\nh200,")


def test_an_empty_database_is_an_answer(tmp_path: Path) -> None:
    path = str(tmp_path / "empty.db")
    Store(path).close()
    for verb in ("query", "history", "stats", "requests"):
        assert json.loads(ok(verb, "--db", path, "--format", "json").stdout) == []
        assert ok(verb, "--db", path).stdout == ""
        assert len(ok(verb, "--db", path, "--format", "csv").stdout.splitlines()) == 1


# ---- carrying -----------------------------------------------------------------------------------------------


def test_export_import_and_merge(db: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    result = ok("export", str(file), "--gpu", "h200")
    assert (result.stdout, "2 winners written to" in result.stderr) == ("", True)
    everything = ok("export")
    assert [json.loads(line)["gpu"]["name"] for line in everything.stdout.splitlines()] == ["h200", "h200", "l40s"]
    assert "3 winners written to stdout" in everything.stderr
    other = str(tmp_path / "other.db")
    first = ok("import", str(file), "--db", other)
    assert (first.stdout, first.stderr) == ("", "2 trials added, 2 winners set, 0 winners kept as they were\n")
    assert (
        "1 trials added, 1 winners set, 2 winners" in ok("import", "-", "--db", other, input=everything.stdout).stderr
    )
    assert "1 trials added, 0 winners set, 3 winners" in ok("merge", str(db), "--db", other).stderr
    assert rows("query", "--db", other) == rows("query")


def test_a_hostile_import_is_one_red_line(db: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(f"{trial(problem='m=7').as_line()}\n{{}}\n")
    message = refused("import", str(file))
    assert message.count("\n") == 1
    assert "bad.jsonl, line 2: a trial needs config" in message
    assert "line 1: " in refused("import", "-", input=b"\xff\xfe\n")
    assert len(Store(db).trials()) == 4
    assert "No such file" in refused("import", str(tmp_path / "absent.jsonl"))


# ---- misuse -------------------------------------------------------------------------------------------------


def test_no_database_is_one_line_and_makes_none(tmp_path: Path) -> None:
    absent = tmp_path / "absent.db"
    for words in (["query"], ["history"], ["stats"], ["requests"], ["export"], ["show", "m=1"]):
        message = refused(*words, "--db", str(absent))
        assert "there is no database at" in message
        assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert "is neither" in refused("query", "--db", "mysql://root:pw@host/x")


def test_a_bad_environment_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.LOG_VARIABLE, "loud")
    assert "must be one of debug" in refused("query")


@pytest.mark.usefixtures("db")
@pytest.mark.parametrize(
    "words",
    [
        ["query", "--format", "yaml"],
        ["query", "--origin", "guessed"],
        ["query", "--nope"],
        ["history", "--limit", "0"],
        ["show"],
        ["import"],
        ["merge"],
        ["dance"],
    ],
)
def test_misuse_exits_with_2(words: list[str]) -> None:
    assert "Usage" in refused(*words, code=2)


def test_every_verb_is_explained() -> None:
    overview = ok("--help").stdout
    for verb in ("query", "show", "history", "export", "import", "merge", "stats", "requests"):
        assert verb in overview
        assert "--db" in ok(verb, "--help").stdout
