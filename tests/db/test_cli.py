"""``cutekernels db``: each verb, its formats, exit codes, and the split between stdout and stderr."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from alembic import command

import cutekernels
from cutekernels import settings
from cutekernels.db.questions import query
from cutekernels.db.questions.cli import app
from cutekernels.db.storage import engine, snapshot
from cutekernels.db.storage.store import Store, Trial
from cutekernels.db.storage.uuid7 import uuid7
from cutekernels.errors import UnknownGpu, UnsupportedProblem
from cutekernels.ops import registry
from tests.command_line import invoke
from tests.db.test_hostile import database
from tests.db.trials import H200, L40S, edit, trial
from tests.processes import python
from tests.shipping import ship

KNOBS = "tile_n=128 tile_k=64 warps_m=2 warps_n=2 stages=3 raster=8 ctas_per_sm=2"
GEMM = trial(f"tile_m=128 {KNOBS}", problem="m=4096 n=4096 k=4096", median_us=200.0, ratio=1.25, baseline_us=2000.0)
SKINNY = trial(
    "tile_m=32 tile_n=32 tile_k=64 warps_m=2 warps_n=2 stages=6 raster=1 ctas_per_sm=3",
    problem="m=16 n=4096 k=4096",
    origin="predicted",
    median_us=None,
)

ELSEWHERE = trial(
    "tile_m=32 tile_n=64 tile_k=128 warps_m=1 warps_n=4 stages=2 raster=1 ctas_per_sm=2",
    gpu=replace(H200, name="rtx5090", target="sm_120a"),
    problem="m=32 n=4096 k=4096 b_major=k",
    median_us=32.0,
)
SILU = trial("block=[red]1024", gpu=L40S, op="silu_mul", problem="rows=4096 cols=64")
LOST = trial("tile_m=256 stages=2", problem="m=4096 n=4096 k=4096", status="crashed", message="Xid 13\nillegal address")


@pytest.fixture
def db(tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small database, which is also the one in the settings, beside a winner that ships for another GPU."""
    ship(shipped, "rtx5090", ELSEWHERE.as_line() + "\n")
    path = database(tmp_path / "tuned.db", GEMM, SKINNY, SILU, LOST)
    with Store(path) as store:
        store.note_requests([("h200", "gemm", 1, "m=1 n=1 k=1", 5), ("l40s", "gemm", 1, "m=2 n=2 k=2", 7)])
    monkeypatch.setenv(settings.DB_VARIABLE, str(path))
    return path


def run(*words: str, input: str | bytes | None = None) -> Any:
    return invoke(app, *words, input=input)


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


def local(*words: str) -> Any:
    """Rows of a query that come from the local database."""
    return [row for row in rows("query", *words) if row["source"] == "local"]


@pytest.mark.usefixtures("db")
@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], [SKINNY, GEMM, SILU]),
        (["--gpu", "L40S"], [SILU]),
        (["--op", "gemm"], [SKINNY, GEMM]),
        (["--problem", "k=4096 m=4096"], [GEMM]),
        (["--problem", "m=4096 dtype=bf16"], [GEMM]),  # a default, which the stored text leaves out
        (["--problem", "m=4000 dtype=fp16"], [GEMM]),  # the bucket, and both types share a tuning
        (["--problem", "m>=17 n=4096"], [GEMM]),
        (["--problem", "m<=16"], [SKINNY]),
        (["--problem", "m!=16 k=4096"], [GEMM]),
        (["--problem", "m=409"], []),
        (["--problem", "n=4000"], []),
        (["--problem", "accumulate=fp16"], []),
        (["--origin", "predicted"], [SKINNY]),
    ],
)
def test_query(filters: list[str], expected: list[Trial]) -> None:
    found = local(*filters)
    assert [row["id"] for row in found] == [t.id for t in expected]
    assert [row["config_text"] for row in found] == [t.config for t in expected]
    text = ok("query", *filters, "--format", "csv").stdout
    parsed = [row for row in csv.DictReader(io.StringIO(text)) if row.get("source") == "local"]
    assert text.startswith("gpu,op,revision,source,serves,")
    assert sorted(row["config_text"] for row in parsed) == sorted(t.config for t in expected)
    table = ok("query", *filters, "--sort", "source")
    for t in expected:
        assert t.config.split()[0] in table.stdout
        assert t.id[-8:] in table.stdout


@pytest.mark.usefixtures("db")
def test_query_gives_typed_columns() -> None:
    (row,) = local("--op", "gemm", "--problem", "m=4096")
    assert (row["problem"]["m"], row["problem"]["dtype"], row["problem"]["wide"]) == (4096, "bf16", False)
    assert (row["config"]["stages"], row["config"]["tile_m"]) == (3, 128)
    assert row["tflops"] == pytest.approx(2 * 4096**3 / 200 / 1e6)
    assert row["roofline"] == pytest.approx(row["tflops"] / 989.5)
    assert (row["vendor_us"], row["ratio"], row["environment"]["driver"]) == (2000.0, 1.25, "580.95")
    (skinny,) = local("--op", "gemm", "--problem", "m=16")
    assert (skinny["median_us"], skinny["tflops"]) == (None, None)


@pytest.mark.usefixtures("db")
def test_local_and_shipped_winners_stand_side_by_side(shipped: Path) -> None:
    """Both shipped winners are measured: a local measurement serves in their place, a local prediction does not."""
    measured = [replace(t, origin="measured", id=uuid7()) for t in (GEMM, SKINNY)]
    ship(shipped, "h200", "".join(t.as_line() + "\n" for t in measured))
    for problem, local_serves in (("m=4096", True), ("m=16", False)):
        same = rows("query", "--gpu", "h200", "--op", "gemm", "--problem", problem)
        assert [(row["source"], row["serves"]) for row in same] == [
            ("local", local_serves),
            ("shipped", not local_serves),
        ]
    (shown,) = rows("show", "m=16 n=4096 k=4096", "--gpu", "h200")
    assert shown["source"] == "shipped"
    assert rows("show", shown["id"][-12:])[0]["id"] == shown["id"]


@pytest.mark.usefixtures("db")
def test_local_alone(shipped: Path) -> None:
    ship(shipped, "h200", GEMM.as_line() + "\n")
    assert {row["source"] for row in rows("query", "--local")} == {"local"}
    assert {row["source"] for row in rows("query")} == {"local", "shipped"}


@pytest.mark.usefixtures("db")
def test_of_two_predictions_that_serve_nobody_the_local_one_is_shown(shipped: Path) -> None:
    other = trial("tile_m=32 stages=4", problem=SKINNY.problem, origin="predicted", median_us=None)
    ship(shipped, "h200", other.as_line() + "\n")
    (shown,) = rows("show", SKINNY.problem)
    assert (shown["source"], shown["config_text"]) == ("local", SKINNY.config)


def test_without_a_database_shipped_winners_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(settings.DB_VARIABLE, str(tmp_path / "absent.db"))
    result = ok("query", "--gpu", "h200", "--op", "gemm")
    assert "shipped  True" in result.stdout
    assert "no database yet, only shipped winners" in result.stderr
    assert not (tmp_path / "absent.db").exists()


@pytest.mark.usefixtures("db")
@pytest.mark.parametrize("verb", [["query"], ["history"], ["requests"], ["stats"], ["show", GEMM.id]])
def test_tables_fit_80_columns(verb: list[str], narrow_terminal: None) -> None:
    assert max(map(len, ok(*verb).stdout.splitlines())) <= 80


@pytest.mark.usefixtures("db")
@pytest.mark.parametrize("columns", ["40", "300"])
@pytest.mark.parametrize("verb", ["query", "history", "requests", "stats", "diff"])
def test_where_stdout_is_no_terminal_a_row_is_one_line(
    verb: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its readers take lines for rows, whatever COLUMNS says."""
    monkeypatch.setenv("COLUMNS", columns)
    words = [verb, "shipped", str(settings.load().database_path)] if verb == "diff" else [verb]
    found, lines = rows(*words), ok(*words).stdout.splitlines()
    assert len(lines) == len(found) + 1 > 1
    assert not any(line.endswith(" ") for line in lines)
    for row, line in zip(found, lines[1:], strict=True):
        shown = [row[name] for name in ("gpu", "op", "problem_text", "config_text", "id") if row.get(name)]
        assert all(str(value.get("name") if isinstance(value, dict) else value) in line for value in shown), line


@pytest.mark.usefixtures("db")
def test_columns_sort_and_wide() -> None:
    lines = ok("query", "--columns", "op,problem_m,median_us,id", "--sort", "-median_us").stdout.splitlines()
    assert lines[0].split() == ["op", "problem_m", "median_us", "id"]
    text = ok("query", "--columns", "op,median_us", "--sort", "-median_us", "--format", "csv").stdout
    times = [float(row["median_us"]) for row in csv.DictReader(io.StringIO(text)) if row["median_us"]]
    assert times == sorted(times, reverse=True)
    assert any(GEMM.problem in line and GEMM.config in line and GEMM.id in line for line in wide_lines())
    assert "Did you mean 'median_us'?" in refused("query", "--columns", "median", code=2)
    assert "there is no column 'speed'" in refused("query", "--sort", "speed", code=2)


def wide_lines() -> list[str]:
    return str(ok("query", "--wide").stdout).splitlines()


@pytest.mark.usefixtures("db")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "nonsense"], "no GPU is called 'nonsense'"),
        (["--gpu", "h20"], "Did you mean 'h200'?"),
        (["--op", "gem"], "Did you mean 'gemm'?"),
        (["--problem", "mm=4"], "'mm' is not a field"),
        (["--op", "gemm", "--problem", "rows=4"], "'rows' is not a field of a problem of gemm"),
        (["--problem", "dtype=fp8"], "dtype must be one of"),
        (["--problem", "m=-1"], "m is an extent"),
        (["--problem", "dtype>bf16"], "no extent"),
        (["--problem", "big ones"], "a problem is asked for by fields"),
    ],
)
def test_names_that_do_not_exist_are_misuse(words: list[str], said: str) -> None:
    for verb in ("query", "history"):
        assert said in refused(verb, *words, code=2)


@pytest.mark.usefixtures("db")
def test_aliases_are_resolved(db: Path) -> None:
    a100 = trial("x=1", gpu=replace(H200, name="a100-sxm-80gb"), problem="m=64 n=64 k=64")
    database(db, a100)
    for name in ("a100", "A100", "a100-sxm-80gb"):
        assert [row["id"] for row in rows("query", "--gpu", name)] == [a100.id]
        assert [row["id"] for row in rows("history", "--gpu", name)] == [a100.id]


@pytest.mark.usefixtures("db")
def test_csv_cells() -> None:
    text = ok("query", "--op", "silu_mul", "--gpu", "l40s", "--format", "csv").stdout
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["gpu"], row["config_text"], row["median_us"], row["ratio"]) == ("l40s", "block=[red]1024", "12.5", "")


@pytest.mark.parametrize("words", [["--columns", "problem"], ["--columns", "op,config"], ["--sort", "-environment"]])
def test_a_record_is_no_column(db: Path, words: list[str]) -> None:
    result = run("query", *words, "--format", "csv")
    assert result.exit_code == 2 and "there is no column" in result.stderr


@pytest.mark.parametrize("verb", ["history", "requests"])
def test_a_limit_above_all_numbers_of_sql(db: Path, verb: str) -> None:
    ok(verb, "--limit", "9" * 20)


def test_the_python_api(db: Path) -> None:
    with cutekernels.db.open(db) as opened:
        (winner,) = [
            w for w in opened.winners(gpu="h200", op="gemm", m=">=17", n=4096, dtype="bf16") if w.id == GEMM.id
        ]
        assert (winner.problem["k"], winner.config["stages"], winner.serves, winner.source) == (4096, 3, True, "local")
        assert winner.as_row()["median_us"] == 200.0
        with pytest.raises(UnsupportedProblem, match="not a field"):
            opened.winners(op="gemm", rows=4)
        with pytest.raises(UnknownGpu, match="h100"):
            opened.winners(gpu="h101")
        for words in ({"origin": "x"}, {"origin": 1}, {"op": ""}, {"gpu": 1}, {"op": ["gemm"]}, {"problem": {"m": 1}}):
            with pytest.raises(UnsupportedProblem, match=r"must be|no op is called"):
                opened.winners(**words)
        with pytest.raises(UnsupportedProblem, match="m is an extent"):
            opened.winners(m=True)
    with cutekernels.db.open(db, shipped=False) as opened:
        assert len(opened.winners()) == 3


@pytest.mark.parametrize(
    "verb", [("query", "--gpu", "h200", "--problem", "m=16"), ("show", "m=16"), ("stats",), ("history",)]
)
def test_the_first_call_after_an_installation_loads_no_torch(db: Path, verb: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom cutekernels.db.questions.cli import app\n"
        "try:\n    app([*sys.argv[1:], '--format', 'json'])\n"
        "except SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'triton', 'alembic') if m in sys.modules], file=sys.stderr)"
    )
    done = python(code, *verb)
    assert done.stderr.strip().endswith("[]")


def test_values_that_share_a_tuning_are_found_as_the_dispatcher_finds_them() -> None:
    """A query folds field by field; an op's own ``bucket`` decides for the whole problem."""
    for op in registry.OPS:
        for text in op.suite:
            problem = op.Problem.parse(text)
            stored = query.problem(op.name, str(problem.bucket()))
            assert query.matches(op.name, stored, query.conditions(text, op.name)), (op.name, text)
            assert query.problem(op.name, text) == {f.name: getattr(problem, f.name) for f in fields(op.Problem)}


def test_diff_fits_80_columns_and_counts_what_one_has(db: Path, shipped: Path, narrow_terminal: None) -> None:
    ship(shipped, "h200", "".join(trial(problem=f"m={m} n=64 k=32").as_line() + "\n" for m in range(1, 22)))
    lines = ok("diff", "shipped", str(db)).stdout.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 40, "21 problems are one line, the few that db has one each"
    assert [line for line in lines if line.startswith("21 problems")] and "only in b" in " ".join(lines)


def test_diff(db: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    faster = trial("tile_m=64 stages=3", problem=GEMM.problem, median_us=160.0)
    database(other, faster, SILU)
    found = rows("diff", str(db), str(other))
    assert [(row["state"], row["speedup"]) for row in found] == [("only in a", None), ("other config", 1.25)]
    assert "other config" in ok("diff", str(db), str(other)).stdout
    assert "the winners are the same" in ok("diff", str(db), str(db)).stderr
    assert "there is no database" in refused("diff", str(db), str(tmp_path / "absent.db"))


def test_requests_say_why_they_wait_and_are_cleared(db: Path) -> None:
    """A measurement of a later revision ends one too; a prediction ends none, and says so."""
    p = "m=16 n=4096 k=4096"
    with Store(db) as store:
        store.note_requests(
            [("h200", "gemm", 1, p, 3), ("h200", "gone", 1, "m=1", 2), ("h200", "gemm", 2, GEMM.problem, 9)]
        )
        store.note_requests([("h200", "gemm", 1, "m=64 n=64 k=64", 1)])
        later = replace(GEMM, id=uuid7(), revision=2, problem="m=64 n=64 k=64")
        store.record([later])
        store.crown(later.id)
    notes = {(row["op"], row["problem_text"]): row["note"] for row in rows("requests", "--gpu", "h200")}
    assert notes["gemm", p] == "predicted: only a measurement on a h200 ends it"
    assert notes["gone", "m=1"] == "this version has no such op"
    assert notes["gemm", "m=1 n=1 k=1"].startswith("its problem is not one of this version's: k=1 is contiguous in a")
    assert notes["gemm", GEMM.problem] == "" and ("gemm", later.problem) not in notes
    refused("requests", "--yes", code=2)
    assert "1 requests would be cleared" in ok("requests", "--clear", "--problem", "m=16").stderr
    assert "4 requests cleared" in ok("requests", "--clear", "--op", "gemm", "--gpu", "h200", "--yes").stderr
    assert [row["op"] for row in rows("requests")] == ["gemm", "gone"]
    assert "2 requests cleared" in ok("requests", "--clear", "--yes").stderr
    assert rows("requests") == [] and len(Store(db).trials()) == 5


def test_prune(db: Path) -> None:
    refused("prune", code=2)
    assert "1 trials would be deleted" in ok("prune", "--days", "0").stderr
    assert len(Store(db).trials()) == 4
    assert "1 trials deleted" in ok("prune", "--days", "0", "--stale", "--yes").stderr
    assert {t.id for t in Store(db).trials()} == {GEMM.id, SKINNY.id, SILU.id}


def test_doctor(db: Path, tmp_path: Path) -> None:
    (unused,) = [row for row in rows("doctor") if row["state"] != "ok"]
    assert unused["state"] == "unused" and unused["found"].startswith("1 that calls refuse") and "silu" in str(unused)
    assert {"what": "winners", "state": "ok", "found": "2 valid"} in rows("doctor")
    edit(db, ("UPDATE trial SET median_us = 'fast' WHERE id = ?", (LOST.id,)))
    result = run("doctor")
    assert result.exit_code == 1
    assert LOST.id in result.stdout.replace("\n", "")
    assert "there is no database" in refused("doctor", "--fix", "--db", str(tmp_path / "absent.db"))


def test_an_older_schema_is_upgraded_by_doctor(db: Path) -> None:
    writer = engine.open_engine(f"sqlite:///{db}").execution_options(**{engine.WRITING: True})
    with writer.begin() as connection:
        command.downgrade(engine.alembic_config(connection), "0001")
    assert snapshot.load("l40s", str(db)).table, "a dispatcher reads it as it is"
    assert "db doctor --fix" in refused("query")
    ok("doctor", "--fix")
    assert [row["id"] for row in local()] == [SKINNY.id, GEMM.id, SILU.id]


def test_a_hostile_database_does_not_reach_the_terminal(db: Path) -> None:
    edit(
        db,
        "UPDATE request SET problem = 'm=1' || char(27) || '[2J' || char(155)",
        "UPDATE gpu SET name = 'evil' || char(27) || '[31m' WHERE name = 'l40s'",
        ("UPDATE trial SET message = char(27) || '[2J[bold' WHERE id = ?", (LOST.id,)),
    )
    for words in (["query"], ["history"], ["stats"], ["requests"], ["doctor"]):
        for format in ("table", "json", "csv"):
            result = run(*words, "--format", format)
            assert result.exit_code in (0, 1)
            assert not set("\x1b\x9b") & set(result.stdout + result.stderr), (words, format)


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
    for words in ("hardware_name", "h200", "environment_driver", "580.95", "illegal address", str(H200.memory_bytes)):
        assert words in table
    (row,) = rows("show", LOST.id)
    assert (row["id"], row["config_text"], row["message"]) == (LOST.id, LOST.config, LOST.message)
    assert row["hardware"] == LOST.as_row()["gpu"]
    assert rows("show", LOST.id[-10:]) == [row]
    (gemm,) = rows("show", "k=4096 n=4096 m=4096 dtype=fp16")
    assert (gemm["id"], gemm["source"]) == (GEMM.id, "local")
    (silu,) = rows("show", "rows=4096 cols=64")
    assert silu["id"] == SILU.id
    (row,) = csv.DictReader(io.StringIO(ok("show", GEMM.id, "--format", "csv").stdout))
    assert row["gpu"] == row["hardware_name"] == "h200"
    assert row["ratio"] == "1.25"


@pytest.mark.usefixtures("db")
def test_show_says_what_is_missing_or_ambiguous() -> None:
    assert "nothing matches 'm=5'" in refused("show", "m=5")
    assert "'mm' is not a field" in refused("show", "mm=5", code=2)
    assert "nothing matches" in refused("show", "00000000-0000")
    assert "nothing matches" in refused("show", LOST.id, "--gpu", "l40s")
    several = refused("show", "m>=4 n=4096 k=4096")
    assert "trials match" in several
    assert GEMM.id in several


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
    assert [row["problem_text"] for row in rows("requests", "--gpu", "h200")] == ["m=1 n=1 k=1"]
    assert len(rows("requests", "--limit", "1")) == 1
    assert "m=1 n=1 k=1" in ok("requests").stdout
    assert ok("requests", "--format", "csv").stdout.startswith("gpu,op,revision,problem_text,hits,last_seen,note,")
    assert ok("stats", "--format", "csv").stdout.startswith("gpu,op,origin,trials,ok,winners\nh200,")


def test_an_empty_database_is_an_answer(tmp_path: Path) -> None:
    path = str(tmp_path / "empty.db")
    Store(path).close()
    for verb in (["query", "--gpu", "l4"], ["history"], ["stats"], ["requests"]):
        assert json.loads(ok(*verb, "--db", path, "--format", "json").stdout) == []
        assert ok(*verb, "--db", path).stdout == ""
        assert len(ok(*verb, "--db", path, "--format", "csv").stdout.splitlines()) == 1


# ---- carrying -----------------------------------------------------------------------------------------------


def test_export_follows_a_link_and_never_replaces_a_device(db: Path, tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    ok("export", str(link))
    assert link.is_symlink() and file.read_text()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ok("export", str(pipe))
        assert os.read(reader, 1 << 20).decode() == file.read_text()
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    full = Path("/dev/full")
    if full.is_char_device() and os.geteuid() != 0:  # a broken rule would replace it where it may
        failed = run("export", str(full))
        assert failed.exit_code == 1 and "No space left" in failed.stderr and full.is_char_device()


def test_export_import_and_merge(db: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    result = ok("export", str(file), "--gpu", "h200")
    assert (result.stdout, "2 local winners written to" in result.stderr) == ("", True)
    everything = ok("export")
    assert [json.loads(line)["gpu"]["name"] for line in everything.stdout.splitlines()] == ["h200", "h200", "l40s"]
    assert "3 local winners written to stdout" in everything.stderr
    nothing = ok("export", str(tmp_path / "none.jsonl"), "--gpu", "a100").stderr
    assert "0 local winners written to" in nothing
    assert "shipped ones, which every installation has, are not among them" in nothing
    other = str(tmp_path / "other.db")
    first = ok("import", str(file), "--db", other)
    assert (first.stdout, first.stderr) == ("", "2 trials added, 2 winners set, 0 winners kept as they were\n")
    assert (
        "1 trials added, 1 winners set, 2 winners" in ok("import", "-", "--db", other, input=everything.stdout).stderr
    )
    assert "1 trials added, 0 winners set, 3 winners" in ok("merge", str(db), "--db", other).stderr
    assert rows("query", "--db", other) == rows("query")


def test_a_dry_import_shows_what_would_change_and_changes_nothing(db: Path, tmp_path: Path) -> None:
    file, other = str(tmp_path / "out.jsonl"), tmp_path / "other.db"
    ok("export", file)

    def shown() -> list[tuple[str, str]]:
        done = ok("import", file, "--dry-run", "--db", str(other), "--format", "json")
        assert "nothing was stored" in done.stderr
        return [(row["state"], row["problem_text"]) for row in json.loads(done.stdout)]

    found = shown()
    assert len(found) == 3 and {state for state, _ in found} == {"only in b"} and not other.exists()
    ok("import", file, "--db", str(other))
    before = rows("query", "--db", str(other))
    assert shown() == [] and rows("query", "--db", str(other)) == before
    now = Store(db).winners(gpu="l40s")[0]
    Path(file).write_text(replace(now, id=uuid7(), config="tile_m=1", median_us=1e6).as_line() + "\n")
    assert shown() == [("other config", now.problem)], "a later row of the same problem"
    Path(file).write_text(replace(now, config="tile_m=1").as_line() + "\n")
    # Tuned by a clock that was wrong.
    edit(other, ("UPDATE trial SET created_at = '2999-01-01 00:00:00.000000' WHERE id != ?", (now.id,)))
    before = rows("query", "--db", str(other))
    assert shown() == [], "its id is here, with other contents"
    for words in (["--dry-run"], []):
        told = ok("import", file, *words, "--db", str(other)).stderr
        assert "0 trials added, 0 winners set, 1 winners kept" in told and "1 incoming winners are here" in told
    assert rows("query", "--db", str(other)) == before
    assert "bad" in refused("import", str(tmp_path / "bad.jsonl"), "--dry-run")
    assert "bad" in refused("import", str(tmp_path / "bad.jsonl"), "--db", str(tmp_path / "none.db"))
    assert not (tmp_path / "none.db").exists(), "of a wrong file no database is made"
    edit(db, "UPDATE trial SET median_us = 1325.439")
    ok("export", file, "--slim")
    for words in (("--dry-run",), ()):
        assert "other contents" not in ok("import", file, *words, "--db", str(db)).stderr, "its own export"
    assert rows("query", "--gpu", "l4", "--columns", "problem_m,config_tile_m") == []


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
    for words in (["query"], ["history"], ["stats"], ["requests"], ["export"], ["show", "m=1"], ["doctor"]):
        message = refused(*words, "--db", str(absent))
        assert "there is no database at" in message
        assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert "is neither" in refused("query", "--db", "mysql://root:pw@host/x")


def test_a_bad_log_level_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = rows("query")
    monkeypatch.setenv(settings.LOG_VARIABLE, "loud")
    assert rows("query") == plain


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
    for verb in ("query", "show", "history", "export", "import", "merge", "stats", "requests", "prune", "doctor"):
        assert verb in overview
        assert "--db" in ok(verb, "--help").stdout
        assert ok(verb, "-h").stdout == ok(verb, "--help").stdout
    assert "diff" in overview
