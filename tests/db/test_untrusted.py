"""Secrets in URLs, files that must not be overwritten, and rows, lines and numbers that no cutekernels wrote."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cutekernels import cli, terminal
from cutekernels.db.questions.reader import Database
from cutekernels.db.storage import engine, snapshot, sqlite, statements
from cutekernels.db.storage.certificate import Certificate
from cutekernels.db.storage.store import Store, Trial
from cutekernels.db.storage.trial import TRIAL_RULES
from cutekernels.db.storage.uuid7 import uuid7
from cutekernels.errors import StoreError
from tests.command_line import invoke
from tests.db.test_cli import ok, refused
from tests.db.test_hostile import database
from tests.db.trials import L40S, edit, trial

HUGE = 10**400


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_said", set())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with one winner."""
    return database(tmp_path / "tuned.db", trial())


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


# ---- secrets ------------------------------------------------------------------------------------------------

SECRET = [
    "postgresql://127.0.0.1:1/x?user=u&password=topsecret",
    "postgresql://127.0.0.1:1/x?user=u&passfile=topsecret&sslpassword=topsecret",
    "postgresql://u:top/topsecret@127.0.0.1:1/x",
    "postgresql://u:p@topsecret@127.0.0.1:1/x",
    "postgresql://u:topsecret/x",
    "sqlite+pysqlcipher://:topsecret@/x.db",
]


@pytest.mark.parametrize("url", SECRET)
def test_no_message_and_no_log_shows_a_password(url: str, caplog: pytest.LogCaptureFixture) -> None:
    assert "topsecret" not in refused("stats", "--db", url)
    assert "topsecret" not in engine.shown(url) or url.startswith("sqlite")
    snapshot.load("h200", url)
    assert "only shipped winners" in caplog.text
    assert "topsecret" not in caplog.text


def test_what_is_no_secret_is_shown() -> None:
    assert engine.shown("postgresql://u@host:1/x?sslmode=require") == "postgresql://u@host:1/x?sslmode=require"
    assert engine.shown("postgresql://host/x?password=p") == "postgresql://host/x?password=***"


# ---- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["export", "report"])
def test_no_database_is_overwritten(path: Path, tmp_path: Path, verb: str) -> None:
    before = path.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(path)
    for target in (path, link):
        assert "tuned.db is an SQLite database: name another file" in refused(verb, str(target), "--db", str(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize("beside", ["-journal", "-wal", "-shm", ".lock", ".leases", ".studies"])
@pytest.mark.parametrize("verb", ["export", "report"])
def test_no_file_beside_a_database_is_overwritten(path: Path, verb: str, beside: str) -> None:
    """A journal holds what a killed writer left undone, a lock is one by its inode."""
    target = Path(f"{path}{beside}")
    before = target.read_bytes() if target.exists() else None
    told = refused(verb, str(target), "--db", str(path))
    assert f"tuned.db{beside} belongs to the SQLite database" in told
    assert "tuned.db: name another file" in told
    assert (target.read_bytes() if target.exists() else None) == before


def test_files_are_written_with_the_mode_that_the_user_wants(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    with umask(0o077):
        ok("export", str(file), "--db", str(path))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with umask(0o022):
        ok("export", str(file), "--db", str(path))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        file.chmod(0o664)
        ok("export", str(file), "--db", str(path))
        assert stat.S_IMODE(file.stat().st_mode) == 0o664
        file.unlink()
        ok("export", str(file), "--db", str(path))
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("table", ["winner", "request", "rate"])
def test_a_dropped_table_is_named(path: Path, table: str) -> None:
    edit(path, f"DROP TABLE {table}")
    for readonly in (True, False):
        with pytest.raises(StoreError, match=f"lacks tables of its schema 0004: {table}"):
            Store(path, readonly=readonly)
    for options in ((), ("--fix",)):
        assert f"lacks tables of its schema 0004: {table}" in refused("doctor", *options, "--db", str(path))


def test_a_schema_that_is_not_utf8_is_damage_like_any_other(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = path.read_bytes()
    assert content.count(b"CREATE TABLE trial") == 1
    path.write_bytes(content.replace(b"CREATE TABLE trial", b"CREATE \xffABLE trial"))
    for verb in ("stats", "doctor"):
        message = refused(verb, "--db", str(path))
        assert "tuned.db: its schema is damaged" in message
        assert "`cutekernels db doctor --fix`" in message
    snapshot.load("h200", str(path))
    assert "its schema is damaged" in caplog.text
    assert "its schema is damaged" in (sqlite.damage(path) or "")
    with Store(path) as store:
        assert store.trials() == []
    assert "it was renamed to" in caplog.text
    assert len(list(path.parent.glob("tuned.db.corrupt-*"))) == 1


# ---- rows ---------------------------------------------------------------------------------------------------


def test_a_certificates_huge_number_breaks_a_rule(path: Path, tmp_path: Path) -> None:
    certificate = Certificate("a=1", ("a=1",), 1, 1, (1.0,) * 7, clock_mhz=1000)
    row = trial(certificate=certificate).as_row()
    row["certificate"]["clock_mhz"] = HUGE
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(row))
    assert "line 1: a certificate's clock_mhz must be a finite number" in refused(
        "import", str(file), "--db", str(path)
    )
    with Store(path) as store, pytest.raises(StoreError, match="quantiles"):
        store.record([trial(certificate=replace(certificate, quantiles_us=(2**53,) * 7))])  # type: ignore[arg-type]
    edit(path, f"UPDATE trial SET certificate = '{json.dumps(row['certificate'])}'")
    with Store(path) as store:
        assert store.trials() == []
        (broken,) = store.broken_rows()
        assert "certificate must be a certificate" in broken


def test_a_certificate_that_no_line_holds_is_refused() -> None:
    tied = tuple(f"a={i:0998}" for i in range(60))
    with pytest.raises(StoreError, match=r"at most; they have 60000: name fewer"):
        Certificate(tied[0], tied, 1, 1, (1.0,) * 7)


GOOD = "'h200', 'gemm', 1, 'm=8 n=64 k=32', 3, '2026-01-01 00:00:00'"


@pytest.mark.parametrize(
    ("good", "bad", "rule"),
    [
        ("'h200'", "x'ff00'", "gpu must be"),
        ("'gemm'", "x'00ff'", "op must be"),
        (" 1,", " 'one',", "revision must be"),
        ("'m=8 n=64 k=32'", "x'00ff'", "problem must be"),
        (" 3,", " 'abc',", "hits must be"),
        (" 3,", " 9e999,", "hits must be"),
        (" 3,", " -3,", "hits must be"),
        ("'2026-01-01 00:00:00'", "x'00ff'", "last_seen must be"),
        ("'2026-01-01 00:00:00'", "'garbage'", "last_seen must be"),
    ],
)
def test_a_broken_request_hides_no_other(
    path: Path, good: str, bad: str, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(path) as store:
        store.note_requests([("h200", "gemm", 1, "m=1 n=1 k=1", 5)])
        edit(path, f"INSERT INTO request VALUES ({GOOD.replace(good, bad)})")
        assert [r.problem for r in store.requests(limit=1)] == ["m=1 n=1 k=1"]
        (broken,) = store.broken_rows()
    assert f"1 broken requests left out, the first: {rule}" in caplog.text
    assert broken.startswith("request (")
    assert rule in broken


@pytest.mark.parametrize(
    ("damage", "reasons"),
    [
        ("DELETE FROM gpu", ["no such gpu"]),
        ("DELETE FROM environment", ["no such environment"]),
        ("UPDATE trial SET status = 'crashed'", ["its status is 'crashed', not ok"]),
        ("UPDATE winner SET problem = 'm=99 n=64 k=32'", ["it is of ('h200', 'gemm', 1, 'm=16 n=64 k=32')"]),
        ("UPDATE winner SET gpu = 'l40s'", ["it is of ('h200', 'gemm', 1, 'm=16 n=64 k=32')"]),
        ("UPDATE trial SET message = ''", []),
    ],
)
def test_doctor_tells_of_rows_that_belong_to_none(path: Path, damage: str, reasons: list[str]) -> None:
    edit(path, damage)
    with Store(path) as store:
        found = store.broken_rows()
    assert len(found) == len(reasons)
    assert all(reason in row for reason, row in zip(reasons, found, strict=True))


def test_a_winner_that_failed_serves_no_call(path: Path) -> None:
    assert snapshot.load("h200", str(path)).table["gemm", 1]
    edit(path, "UPDATE trial SET status = 'crashed'")
    found = snapshot.load("h200", str(path)).table.get(("gemm", 1), {})
    assert all(winner.source == "shipped" for winner in found.values())
    with Store(path) as store:
        assert store.winners() == []


# ---- lines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["2026-11-21T02:20:00", "2026-11-21"])
def test_a_moment_without_its_offset_is_refused(moment: str) -> None:
    row = trial().as_row() | {"created_at": moment}
    with pytest.raises(StoreError, match=r"created_at must be .* with its UTC offset"):
        Trial.from_row(row)
    with_offset = row | {"created_at": "2026-11-21T02:20:00+02:00"}
    assert Trial.from_row(with_offset).created_at == datetime(2026, 11, 21, 0, 20, tzinfo=UTC)


def test_one_id_with_two_contents_is_refused(tmp_path: Path) -> None:
    one = trial("a=1")
    file = tmp_path / "in.jsonl"
    with Store(tmp_path / "tuned.db") as store:
        file.write_text(f"{one.as_line()}\n\n{replace(one, config='a=2').as_line()}\n")
        with pytest.raises(StoreError, match=rf"line 3: id {one.id} stands in line 1 with other contents"):
            store.import_(file)
        assert store.trials() == []
        file.write_text(f"{one.as_line()}\n{one.as_line()}\n")
        assert store.import_(file).added == 1


# ---- what is shown ------------------------------------------------------------------------------------------


def test_json_has_no_infinity(tmp_path: Path) -> None:
    path = database(tmp_path / "tuned.db", trial(median_us=5e-324))
    found = ok("query", "--db", str(path), "--op", "gemm", "--gpu", "h200", "--format", "json").stdout

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (row,) = (row for row in json.loads(found, parse_constant=refuse) if row["source"] == "local")
    assert (row["median_us"], row["tflops"], row["gbps"], row["roofline"]) == (5e-324, None, None, None)
    assert json.loads(terminal.as_json([{"a": [float("nan"), (1.5,)], "b": float("-inf")}])) == [
        {"a": [None, [1.5]], "b": None}
    ]


def test_large_numbers_stay_short() -> None:
    shown = [terminal.cell(value).plain for value in (12.345678, 1234.56, 9999999.0, 1e7, 1.7e308)]
    assert shown == ["12.35", "1234.6", "9999999.0", "1e+07", "1.7e+308"]


def test_show_looks_among_the_trials_of_the_op_that_is_named(tmp_path: Path) -> None:
    start = uuid7()[:13]
    ids = [f"{start}-7000-8000-0000000000{number:02x}" for number in range(12)]
    old = [trial(id=id_, created_at=datetime(2026, 1, 1, tzinfo=UTC)) for id_ in ids[:11]]
    wanted = trial(id=ids[11], gpu=L40S, op="silu_mul", problem="rows=16 cols=64")
    path = database(tmp_path / "tuned.db", *old, wanted)
    with Database(path) as opened:
        assert opened.trials(part=start, op="silu_mul") == opened.trials(part=start, gpu="l40s") == [wanted]
        assert len(opened.trials(part=start)) == 10


def test_show_names_the_rule_for_ids(path: Path) -> None:
    assert "at least 8 characters of a trial's id" in refused("show", "abc", "--db", str(path), code=2)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("median_us", v) for v in ("-1", "9e999", "'fast'", "x'00'", "1", "NULL")),
        *(
            ("registers", v)
            for v in ("-1", "1.5", "'many'", "x'00'", "'7'", "NULL", str(2**63 - 1), "9223372036854775808")
        ),
        *(("revision", v) for v in ("-1", "1.5", "'one'", str(2**31))),
        *(("id", v) for v in ("'x'", "upper(id)", "id || 'a'", "id || char(0)", "CAST(id AS BLOB)")),
        ("id", "substr(id, 1, 14) || '4' || substr(id, 16)"),
        *(("created_at", v) for v in ("'2026-02-30 10:00:00.000000'", "'2026-13-01 10:00:00.000000'", "5", "x'00'")),
        *(("created_at", v) for v in ("'2026-01-01 24:00:00.000000'", "'0000-01-01 00:00:00.000000'", "'2026-01-01'")),
        *(
            ("created_at", v)
            for v in ("created_at || char(0)", "CAST(created_at AS BLOB)", "substr(created_at, 1, 19)")
        ),
        *(("config", v) for v in ("config || char(0)", "config || char(7)", "CAST(x'80' AS TEXT)", "x'41'")),
    ],
)
def test_doctor_finds_the_rows_that_listings_leave_out(path: Path, column: str, value: str) -> None:
    edit(path, "DELETE FROM winner", f"UPDATE trial SET {column} = {value}")
    with Store(path) as store:
        assert len(store.broken_rows()) == 1 - len(store.trials())


@pytest.mark.parametrize("name", ["x'ff00'", "'h200' || char(27)"])
def test_a_task_of_a_gpu_whose_name_is_none_is_left_out(path: Path, name: str) -> None:
    edit(path, f"UPDATE gpu SET name = {name}")
    assert invoke(cli.app, "studies", "--db", str(path)).exit_code == 0
    with Store(path) as store:
        assert store.tasks() == [] and len(store.broken_rows()) > 0


def test_what_is_read_does_not_grow_with_the_trials(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Counter[str]()

    def counted(name: str, rule: Callable[[object], str | None]) -> Callable[[object], str | None]:
        def count(value: object) -> str | None:
            judged[name] += 1
            return rule(value)

        return count

    with Store(path) as store:
        before = len(store.trials())
        store.record([trial(problem="m=32 n=64 k=32", median_us=1.0 + i, ratio=2.0 + i) for i in range(1000)])
        assert store.count() == before + 1000
        monkeypatch.setattr(statements, "TRIAL_RULES", {n: counted(n, rule) for n, rule in TRIAL_RULES.items()})
        assert store.broken_rows() == []
    assert judged["config"] and judged.total() < 50, "doctor judges each value once, and no sound number, id or moment"
    made = list[Trial]()
    monkeypatch.setattr(Trial, "__post_init__", lambda one: made.append(one))
    with Database(path, shipped=False) as database:
        assert len(database.trials(problem="m=16 n=64")) == before == len(made)
