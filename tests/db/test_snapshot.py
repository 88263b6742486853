"""The dispatcher's view: read-only, standard library only, and never an exception, whatever the database looks like."""

from __future__ import annotations

import json
import lzma
import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from cutekernels import settings
from cutekernels.db.storage import lines, migrations, snapshot, sqlite
from cutekernels.db.storage.snapshot import TunedConfig
from cutekernels.db.storage.store import Store, Trial
from cutekernels.errors import StoreError
from tests.db.trials import L40S, edit, trial
from tests.processes import python
from tests.shipping import ship, text_of

pytestmark = pytest.mark.usefixtures("shipped")

PROBLEM = "m=16 n=64 k=32"


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_said", set())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with one winner, ``a=1``."""
    path = tmp_path / "home" / "tuned.db"
    fill(path, trial("a=1"))
    return path


def fill(path: Path, *winners: Trial) -> None:
    with Store(path) as store:
        store.record(winners)
        assert all(store.crown(t.id) for t in winners)


def configs(path: Path | str, gpu: str = "h200") -> list[str]:
    return sorted(w.config for table in snapshot.load(gpu, str(path)).table.values() for w in table.values())


# ---- what it holds ------------------------------------------------------------------------------------------


def test_it_is_immutable(path: Path) -> None:
    table = snapshot.load("h200", str(path)).table
    assert isinstance(table, MappingProxyType)
    assert not isinstance(table["gemm", 1], MutableMapping)
    with pytest.raises(AttributeError):
        table["gemm", 1][PROBLEM].config = "a=2"  # type: ignore[misc]


def test_ops_revisions_and_gpus_stand_apart(tmp_path: Path) -> None:
    fill(tmp_path / "x.db", trial("a=1"), trial("a=2", revision=2), trial("a=3", op="silu_mul"), trial("a=4", gpu=L40S))
    table = snapshot.load("h200", str(tmp_path / "x.db")).table
    assert {key: [w.config for w in winners.values()] for key, winners in table.items()} == {
        ("gemm", 1): ["a=1"],
        ("gemm", 2): ["a=2"],
        ("silu_mul", 1): ["a=3"],
    }
    assert configs(tmp_path / "x.db", "a100-sxm-80gb") == []


@pytest.mark.parametrize(
    ("below", "above", "seen"),
    [
        ("measured", "measured", "database"),
        ("predicted", "measured", "database"),
        ("predicted", "predicted", "database"),
        ("measured", "predicted", "shipped"),
        ("measured", None, "shipped"),
        (None, "predicted", "database"),
    ],
)
def test_the_users_rows_overlay_the_shipped(
    shipped: Path, tmp_path: Path, below: str | None, above: str | None, seen: str
) -> None:
    if below:
        ship(shipped, "h200", trial("a=1", origin=below, ratio=2.0).as_line() + "\n")
    fill(tmp_path / "x.db", trial("a=9", problem="m=1"), *([trial("a=2", origin=above)] if above else []))
    table = snapshot.load("h200", str(tmp_path / "x.db")).table["gemm", 1]
    if seen == "shipped":
        assert table[PROBLEM] == TunedConfig("gemm", 1, PROBLEM, "a=1", below or "", 12.5, 2.0, "", "shipped")
    else:
        assert table[PROBLEM] == TunedConfig("gemm", 1, PROBLEM, "a=2", above or "", 12.5, None, "", "database")
    assert table["m=1"].source == "database"


def test_an_export_can_be_shipped(shipped: Path, path: Path, tmp_path: Path) -> None:
    with Store(path) as store:
        store.export(shipped / "h200.jsonl.xz")
    table = snapshot.load("h200", str(tmp_path / "absent.db")).table
    assert table == {
        ("gemm", 1): {PROBLEM: TunedConfig("gemm", 1, PROBLEM, "a=1", "measured", 12.5, None, "", "shipped")}
    }


def test_broken_shipped_rows_are_skipped_with_one_line(
    shipped: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = trial("a=5", problem="m=1")
    ship(
        shipped,
        "h200",
        f"not json\n\n{good.as_line()}\n{trial(gpu=L40S).as_line()}\n{json.dumps(good.as_row() | {'op': 5})}\n",
    )
    for _ in range(2):
        assert configs(path) == ["a=1", "a=5"]
    assert len(caplog.records) == 1
    assert "3 broken rows skipped, the first: line 1: not a JSON object" in caplog.text
    assert configs(path, "../shipped/h200") == []


def test_shipped_rows_come_in_the_order_of_their_file(shipped: Path) -> None:
    found = [trial("a=1", problem=f"m={m} n=64 k=32") for m in (16, 4, 64)]
    ship(shipped, "h200", "".join(t.as_line() + "\n" for t in found))
    assert snapshot.shipped("h200") == found


def test_a_gpu_that_is_a_path_names_no_file(shipped: Path, caplog: pytest.LogCaptureFixture) -> None:
    ship(shipped.parent, "h200", "somebody else's\n")
    assert snapshot.shipped("../h200") == []
    assert caplog.messages == [], "nothing was read"


def test_a_cut_file_of_shipped_winners_is_told_and_skipped(shipped: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = lzma.compress((trial("a=1").as_line() + "\n").encode())
    (shipped / "h200.jsonl.xz").write_bytes(whole)
    assert [t.config for t in snapshot.shipped("h200")] == ["a=1"]
    (shipped / "h200.jsonl.xz").write_bytes(whole[:-12])
    assert snapshot.shipped("h200") == []
    assert "shipped/h200.jsonl.xz: " in caplog.text


def test_every_shipped_row_of_the_package_is_sound() -> None:
    for file in (Path(snapshot.__file__).parents[1] / "shipped").glob("*.jsonl.xz"):
        trials = [t for _, t in lines.parsed(text_of(file).splitlines())]
        assert trials
        assert not [t for t in trials if isinstance(t, StoreError)]
        assert {t.gpu.name for t in trials} == {file.name.split(".")[0]}
        assert all(t.status == "ok" for t in trials)
        assert len({t.key for t in trials}) == len(trials), f"{file.name}: one row per key"
        for section in {(str(t.environment), str(t.sources)) for t in trials}:
            keys = [t.key for t in trials if (str(t.environment), str(t.sources)) == section]
            assert keys == sorted(keys), f"{file.name}: a section is ordered by key"


# ---- what it leaves alone -----------------------------------------------------------------------------------

LIGHT = """
import sys
from cutekernels.db.storage import snapshot
table = snapshot.load("h200", sys.argv[1]).table
heavy = {"sqlalchemy", "alembic", "torch", "triton", "cutlass", "typer", "rich", "filelock"} & set(sys.modules)
print(sorted(w.config for winners in table.values() for w in winners.values() if w.source == "database"), sorted(heavy))
"""


def test_loading_imports_the_standard_library_only(path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = python(LIGHT, str(path), check=False, env=environment)
    assert (child.stdout, child.stderr) == ("['a=1'] []\n", "")


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("wal", [False, True])
def test_reading_changes_nothing_on_disk(path: Path, wal: bool) -> None:
    edit(path, f"PRAGMA journal_mode = {'wal' if wal else 'delete'}")
    assert sqlite.in_wal_mode(path) is wal
    Path(f"{path}.lock").unlink(missing_ok=True)
    before = contents(path.parent)
    assert list(before) == ["tuned.db"]
    assert configs(path) == ["a=1"]
    assert contents(path.parent) == before


def test_it_sees_what_a_live_wal_writer_has_committed(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = wal")
        connection.execute("UPDATE trial SET config = 'a=2'")
        connection.commit()
        assert Path(f"{path}-wal").stat().st_size > 0
        assert configs(path) == ["a=2"]


def test_a_checkpoint_while_reading_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A WAL file at rest is read without locks; a concurrent write makes the reader start over."""
    edit(path, "PRAGMA journal_mode = wal")
    readings = 0

    def connect_and_be_overtaken(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        nonlocal readings
        readings += 1
        connection = sqlite_connect_readonly(*args, **kwargs)
        connection.execute("SELECT count(*) FROM trial")
        if readings <= overtaken:
            with closing(sqlite3.connect(path)) as writer:  # closing checkpoints and removes the -wal file
                writer.execute("UPDATE trial SET config = ?", (f"a={overtaken}{readings}",))
                writer.commit()
        return connection

    sqlite_connect_readonly = sqlite.connect_readonly
    monkeypatch.setattr(sqlite, "connect_readonly", connect_and_be_overtaken)
    overtaken = 1
    assert configs(path) == ["a=11"]
    assert readings == 2
    readings, overtaken = 0, 99
    assert configs(path) == []


# ---- what it survives ---------------------------------------------------------------------------------------


@pytest.fixture
def one_warning(shipped: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    """A shipped winner ``a=0`` is there; the test must log one warning, however often it loads."""
    ship(shipped, "h200", trial("a=0").as_line() + "\n")
    yield shipped
    (record,) = caplog.get_records("call")
    assert record.levelname == "WARNING"
    assert "only shipped winners and defaults are used" in record.getMessage()


def load_twice(place: Path | str) -> None:
    for _ in range(2):
        assert configs(place) == ["a=0"]


@pytest.mark.usefixtures("one_warning")
def test_a_missing_database(tmp_path: Path) -> None:
    load_twice(tmp_path / "deep" / "absent.db")
    assert not (tmp_path / "deep").exists()


@pytest.mark.usefixtures("one_warning")
def test_a_directory(tmp_path: Path) -> None:
    load_twice(tmp_path)


def test_a_fifo_is_not_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SQLite would wait for somebody to write into it."""
    os.mkfifo(tmp_path / "x.db")
    held = os.open(tmp_path / "x.db", os.O_RDWR)  # so that this test fails rather than hangs
    os.write(held, b"no database" * 1000)
    assert configs(tmp_path / "x.db") == []
    os.close(held)
    assert "it is not a file" in caplog.text


@pytest.mark.usefixtures("one_warning")
def test_a_file_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"hello, I am not a database at all" * 100)
    load_twice(tmp_path / "x.db")


@pytest.mark.usefixtures("one_warning")
def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "x.db").touch()
    load_twice(tmp_path / "x.db")


@pytest.mark.usefixtures("one_warning")
@pytest.mark.parametrize("wal", [False, True])
def test_damaged_pages(path: Path, wal: bool) -> None:
    if wal:
        edit(path, "PRAGMA journal_mode = wal")
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
    load_twice(path)


@pytest.mark.usefixtures("one_warning")
@pytest.mark.parametrize("version", ["9999", "0000", "", None, 7])
def test_another_schema(path: Path, version: object) -> None:
    edit(
        path,
        ("CREATE TABLE other AS SELECT ? AS version_num", (version,)),
        "DROP TABLE alembic_version",
        "ALTER TABLE other RENAME TO alembic_version",
    )
    load_twice(path)


@contextmanager
def locked_by_another_process(path: Path) -> Iterator[None]:
    code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('BEGIN EXCLUSIVE')"
    code += "; print('locked', flush=True); sys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        yield
        other.communicate("\n", timeout=30)


@pytest.mark.usefixtures("one_warning")
def test_locked_by_another_process(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_TIMEOUT_S", 0.1)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = delete")  # in WAL mode nobody can lock readers out
    with locked_by_another_process(path):
        load_twice(path)


@pytest.mark.usefixtures("one_warning")
def test_half_written_by_a_killed_writer(path: Path) -> None:
    code = """if True:
        import os, signal, sqlite3, sys
        c = sqlite3.connect(sys.argv[1], isolation_level=None)
        c.execute("PRAGMA journal_mode = delete")
        c.execute("PRAGMA cache_size = 5")
        c.execute("BEGIN IMMEDIATE")
        c.execute("CREATE TABLE big (x)")
        c.executemany("INSERT INTO big VALUES (?)", [("x" * 500,)] * 1000)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", code, str(path)], timeout=30)
    load_twice(path)
    Store(path, readonly=True).close()  # what `cutekernels db stats` does
    assert configs(path) == ["a=1"]


@pytest.mark.usefixtures("one_warning")
def test_a_bad_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.LOG_VARIABLE, "loud")
    for _ in range(2):
        assert [w.config for w in snapshot.load("h200").table["gemm", 1].values()] == ["a=0"]


@pytest.mark.usefixtures("one_warning")
@pytest.mark.parametrize("place", ["~no-such-user-here/x.db", "sqlite://", "oracle://x", "a\x00b.db"])
def test_addresses_that_make_no_sense(place: str) -> None:
    load_twice(place)


def test_the_place_comes_from_the_settings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.DB_VARIABLE, str(path))
    assert snapshot.load("h200").table["gemm", 1][PROBLEM].config == "a=1"


def test_rows_of_the_wrong_type_are_skipped_with_one_line(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = [trial(f"bad={i}", problem=f"m={i}") for i in range(4)]
    fill(path, *bad)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = 1")
        for t, (column, value) in zip(
            bad, [("config", b"\x00"), ("origin", "guess"), ("median_us", "fast"), ("ratio", b"")], strict=True
        ):
            connection.execute(f"UPDATE trial SET {column} = ? WHERE id = ?", (value, t.id))
        connection.commit()
    for _ in range(2):
        assert configs(path) == ["a=1"]
    assert len(caplog.records) == 1
    assert "4 broken rows skipped" in caplog.text


def test_a_text_that_is_no_utf8_hides_no_other(path: Path) -> None:
    bad = trial("bad=1", problem="m=4 n=64 k=32")
    fill(path, bad)
    edit(path, ("UPDATE trial SET config = CAST(x'ff' AS TEXT) WHERE id = ?", (bad.id,)))
    assert configs(path) == ["a=1", "\udcff"], "which is no config of any op"


def test_the_known_schema_is_a_number_that_sorts() -> None:
    assert migrations.HEAD.isdigit()
    assert len(migrations.HEAD) == 4


def test_nobody_tuned_yet_is_nothing_to_warn_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CUTEKERNELS_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert snapshot.load("l4").table == {}
    assert not caplog.records
    monkeypatch.setenv("CUTEKERNELS_DB", str(tmp_path / "named.db"))
    assert snapshot.load("l4").table == {}
    assert "there is none" in caplog.text


# ---- many rows ----------------------------------------------------------------------------------------------


def test_the_reason_of_a_prediction_is_read_and_a_measurements_message_is_not(tmp_path: Path) -> None:
    told = trial("a=1", problem="m=1", origin="predicted", message="twice as fast")
    fill(tmp_path / "x.db", told, trial("a=2", problem="m=2", message="Xid 13"))
    table = snapshot.load("h200", str(tmp_path / "x.db")).table["gemm", 1]
    assert (table["m=1"].reason, table["m=2"].reason) == ("twice as fast", "")


# ---- what is kept, and what is told -------------------------------------------------------------------------


def test_what_was_read_is_kept_until_it_is_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.DB_VARIABLE, str(path))
    snapshot.forget({})
    first, other = snapshot.snapshot_of("h200"), snapshot.snapshot_of("l40s")
    assert snapshot.snapshot_of("h200") is first and snapshot.all_held() == {"h200": first, "l40s": other}
    snapshot.forget({"l40s": other})
    assert snapshot.snapshot_of("l40s") is other and snapshot.snapshot_of("h200") is not first
    snapshot.forget({})


def test_a_password_is_not_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Not where SQLAlchemy, which knows the parts of a URL, is missing either."""
    monkeypatch.setitem(sys.modules, "cutekernels.db.storage.engine", None)
    snapshot.load("h200", "postgresql+psycopg://me:hunter2@nowhere/tuned")
    assert "postgresql+psycopg://..." in caplog.text and "hunter2" not in caplog.text


def test_a_prediction_needs_no_time_and_a_problem_is_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.db"
    fill(path, trial("a=1", problem="m=1", origin="predicted", median_us=None), trial("a=2", problem="m=2"))
    edit(path, "UPDATE winner SET problem = x'00ff' WHERE problem = 'm=2'")
    table = snapshot.load("h200", str(path)).table["gemm", 1]
    assert [(w.problem, w.median_us) for w in table.values()] == [("m=1", None)]
    assert "1 broken rows skipped" in caplog.text


@pytest.mark.parametrize("column", ["median_us", "ratio"])
@pytest.mark.parametrize("value", ["9e999", "-1.0"])
def test_a_time_that_is_none_serves_no_call(
    column: str, value: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As listings and `db doctor` leave its row out; a lock could not hold it."""
    path = tmp_path / "x.db"
    fill(path, trial("a=1", problem="m=1"), trial("a=2", problem="m=2"))
    edit(path, "PRAGMA ignore_check_constraints = 1", f"UPDATE trial SET {column} = {value} WHERE problem = 'm=2'")
    assert [*snapshot.load("h200", str(path)).table["gemm", 1]] == ["m=1"]
    assert "1 broken rows skipped" in caplog.text


def test_a_rate_of_no_speed_is_left_out(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for name, value in (("good", 2.0), ("none", 0.0), ("negative", -1.0), ("endless", math.inf), (b"\xff", 2.0)):
            row = ("h200", name, 1, value, "us", "2026-01-01 00:00:00", "", "")
            connection.execute("INSERT INTO rate VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        connection.commit()
    assert dict(snapshot.load("h200", str(path)).rates) == {("good", 1): 2.0}
