"""Databases from elsewhere, files that are none, forks under a writer, and many rows at once."""

from __future__ import annotations

import gc
import random
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cutekernels.db.storage import sqlite
from cutekernels.db.storage.store import Store, Trial
from cutekernels.errors import StoreError
from tests.db.test_sqlite import child_environment
from tests.db.trials import H200, L40S, edit, trial


def database(path: Path, *trials: Trial) -> Path:
    with Store(path) as store:
        store.record(trials)
        for t in trials:
            if t.status == "ok":
                store.crown(t.id)
    return path


# ---- forks --------------------------------------------------------------------------------------------------

FORK_UNDER_A_WRITER = """
import os, sys, threading, time
from tests.db.trials import trial
from cutekernels.db.storage import sqlite
from cutekernels.db.storage.store import Store
sqlite.BUSY_TIMEOUT_S = 15.0
with Store(sys.argv[1]) as store:
    end = threading.Event()
    def write():
        while not end.is_set():
            store.record([trial()])
            time.sleep(0.002)
    def read():
        while not end.is_set():
            store.winners()
            time.sleep(0.002)
    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    codes = []
    for child in range(20):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                assert store.record([trial(f"child={child}")]) == 1
                code = 0
            finally:
                os._exit(code)
        codes.append(os.waitpid(pid, 0)[1])
    end.set()
    for thread in threads:
        thread.join()
    print(sum(code != 0 for code in codes), len([t for t in store.trials() if t.config.startswith("child=")]))
"""


def test_a_child_forked_under_a_writing_thread_is_not_locked_out(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK_UNDER_A_WRITER, str(tmp_path / "tuned.db")]
    child = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=200)
    assert child.stdout == "0 20\n", child.stderr


@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_a_connection_left_open_may_end_in_another_thread(tmp_path: Path) -> None:
    """A garbage collector runs in whichever thread it likes; sqlite3 closes a connection in its own thread alone."""
    before = sqlite._connections._of_threads.total()
    sqlite.connect(database(tmp_path / "tuned.db"))
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert sqlite._connections._of_threads.total() == before, "the next fork would wait for it"


# ---- many rows ----------------------------------------------------------------------------------------------


def mixed(number: int) -> Trial:
    """A trial some of whose measurements are absent, as in a database of several GPUs and years."""
    dice = random.Random(number)
    changes: dict[str, object] = {"gpu": dice.choice((H200, L40S)), "problem": f"m={number} n=64 k=32"}
    if dice.random() < 0.3:
        changes |= {"status": "crashed", "median_us": None, "message": "Xid 13"}
    for name, value in (("ratio", 1.2), ("registers", 32), ("error", 0.5), ("samples", 60), ("smem_bytes", 1024)):
        if dice.random() < 0.5:
            changes[name] = value
    return trial(f"tile_m={number % 7}", **changes)


def test_mixed_rows_are_imported_quickly(tmp_path: Path) -> None:
    """10,000 rows in 1 s of CPU time (2026-11-23); the ORM took 5 s for as many, and four times that for twice them."""
    rows = [mixed(i) for i in range(10_000)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{t.as_line()}\n" for t in rows))
    with Store(tmp_path / "tuned.db") as store:
        begin = time.process_time()
        report = store.import_(file)
        assert time.process_time() - begin < 3
        assert report.added == len(rows)
        assert report.crowned == sum(t.status == "ok" for t in rows)
        assert {t.id for t in store.winners()} == {t.id for t in rows if t.status == "ok"}
        assert store.trials() == sorted(rows, key=lambda t: (t.created_at, t.id))


@pytest.mark.slow
def test_a_writer_beside_a_large_import_never_fails(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{mixed(i).as_line()}\n" for i in range(6_000)))
    errors: list[BaseException] = []
    written = 0
    done = threading.Event()

    def write() -> None:
        nonlocal written
        try:
            with Store(tmp_path / "tuned.db") as store:
                while not done.is_set():
                    written += store.record([trial()])
        except StoreError as error:
            errors.append(error)

    with Store(tmp_path / "tuned.db") as store:
        beside = threading.Thread(target=write)
        beside.start()
        report = store.import_(file)
        done.set()
        beside.join()
        assert (errors, report.added, len(store.trials())) == ([], 6_000, 6_000 + written)
    assert written > 0


# ---- rows and files that break the rules --------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE trial SET origin = 'measured', median_us = 'fast' WHERE config = 'bad=1'",
        "UPDATE trial SET created_at = 'yesterday' WHERE config = 'bad=1'",
        "UPDATE trial SET message = CAST(x'ff1b5b326a' AS TEXT) WHERE config = 'bad=1'",
        "UPDATE trial SET problem = 'm=1' || char(27) || '[2J' WHERE config = 'bad=1'",
        "UPDATE trial SET revision = 9e99 WHERE config = 'bad=1'",
    ],
)
def test_a_broken_row_hides_no_other(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    good = trial(problem="m=16 n=64 k=32")
    path = database(tmp_path / "tuned.db", good, trial("bad=1", problem="m=1 n=1 k=1"))
    edit(path, damage)
    with Store(path) as store:
        assert store.trials() == store.winners() == [good]
        assert store.export(tmp_path / "out.jsonl") == 1
        assert len(store.broken_rows()) == 1
        assert store.crown(good.id)
    assert "1 broken rows left out" in caplog.text
    assert "\x1b" not in caplog.text
    with pytest.raises(StoreError, match=r"broken row.*nothing was taken"):
        Store(tmp_path / "other.db").merge(path)


@pytest.mark.parametrize("damage", ["UPDATE trial SET status = 'skipped'", "UPDATE trial SET gpu = NULL"])
def test_a_row_that_breaks_a_rule_of_the_schema_is_no_damage_of_the_file(tmp_path: Path, damage: str) -> None:
    good = trial(problem="m=16 n=64 k=32")
    path = database(tmp_path / "tuned.db", good, trial("bad=1", problem="m=1 n=1 k=1"))
    try:
        edit(path, "PRAGMA ignore_check_constraints = ON", f"{damage} WHERE config = 'bad=1'")
    except sqlite3.Error:
        pytest.skip("this SQLite refuses the planted row")
    with Store(path) as store:
        assert good in store.trials()
    assert not list(tmp_path.glob("*.corrupt-*"))


def test_merge_refuses_the_future_as_import_does(tmp_path: Path) -> None:
    late = trial(created_at=datetime.now(UTC) + timedelta(days=2))
    path = database(tmp_path / "late.db", late)
    with Store(tmp_path / "tuned.db") as store:
        with pytest.raises(StoreError, match=rf"{late.id}: created_at lies in the future.*nothing was merged"):
            store.merge(path)
        assert store.trials() == []
        with Store(path) as other:
            good = trial("tile_m=32", problem="m=2")
            other.record([good])
            other.crown(good.id)
            other.crown(late.id)
            assert [row for row in other.broken_rows() if late.id in row and "lies in the future" in row]
            assert store.pull(path).added == 1 and store.winners() == [good], "the rest of a fleet's winners"
            assert other.prune(older_than=timedelta(days=1)) == 0, "a winner stays"
            better = trial("tile_m=64", problem=late.problem)
            other.record([better])
            other.crown(better.id)
            assert other.prune(older_than=timedelta(days=1)) == 1 and other.broken_rows() == []


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS version_num FROM n"


@pytest.mark.parametrize(
    ("statements", "what"),
    [
        (("DROP TABLE winner", f"CREATE VIEW winner AS {ENDLESS}"), "view called 'winner'"),
        (("DROP TABLE alembic_version", f"CREATE VIEW alembic_version AS {ENDLESS}"), "view called 'alembic_version'"),
        (("CREATE TRIGGER t AFTER INSERT ON trial BEGIN DELETE FROM winner; END",), "trigger called 't'"),
        (("DROP VIEW winners", "DROP TABLE trial", "CREATE VIRTUAL TABLE trial USING fts4(x)"), "virtual table"),
    ],
)
def test_views_and_triggers_in_place_of_tables_are_refused(
    tmp_path: Path, statements: tuple[str, ...], what: str
) -> None:
    path = database(tmp_path / "hostile.db", trial())
    edit(path, *statements)
    begin = time.process_time()
    for readonly in (True, False):
        with pytest.raises(StoreError, match=what):
            Store(path, readonly=readonly)
    with Store(tmp_path / "tuned.db") as store, pytest.raises(StoreError, match=what):
        store.merge(path)
    assert time.process_time() - begin < 10


def test_a_view_of_ones_own_is_no_harm(tmp_path: Path) -> None:
    path = database(tmp_path / "tuned.db", trial())
    edit(path, "CREATE VIEW mine AS SELECT op, median_us FROM winners")
    with Store(path) as store:
        assert len(store.winners()) == 1


def test_reading_ends_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "READ_LIMIT_S", 0.2)
    opened = sqlite.connect_readonly(database(tmp_path / "tuned.db"), 1.0, immutable=False)
    with closing(opened) as connection, pytest.raises(sqlite3.OperationalError, match="interrupted"):
        connection.execute(ENDLESS).fetchall()


@pytest.mark.parametrize("content", [b"my notes\n", b"SQLite format 2", b"\x7fELF" * 5000])
def test_a_file_that_is_no_database_is_left_where_it_is(tmp_path: Path, content: bytes) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_bytes(content)
    with pytest.raises(StoreError, match=r"notes.txt is not an SQLite database; name another file"):
        Store(notes)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    assert notes.read_bytes() == content


def test_what_cannot_be_read_is_closed(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_bytes(b"my notes\n")
    before = sqlite._connections._of_threads.total()
    with pytest.raises(StoreError, match="is not a database") as caught:
        Store(notes, readonly=True)
    assert sqlite._connections._of_threads.total() == before, caught.traceback  # which keeps what its frames hold


def test_a_loop_of_links_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "a" / "tuned.db"):
        for readonly in (True, False):
            with pytest.raises(StoreError):
                Store(path, readonly=readonly)


def test_a_place_that_is_none_or_has_no_driver_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (1, b"t.db", ["t.db"], "~nobody-at-all/t.db"):
        with pytest.raises(StoreError, match="a path or a URL"):
            Store(place)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match="no driver.*pip install 'psycopg"):  # our extra would bring torch
        Store("postgresql://host/t")


# ---- upkeep -------------------------------------------------------------------------------------------------


def test_prune_keeps_winners_and_forgets_the_rest(tmp_path: Path) -> None:
    old = datetime.now(UTC) - timedelta(days=40)
    kept, lost = trial("kept=1", created_at=old), trial("lost=1", created_at=old, status="crashed")
    young, stale = trial("young=1", status="crashed"), trial("stale=1", revision=0, gpu=L40S)
    with Store(database(tmp_path / "tuned.db", kept, lost, young, stale)) as store:
        options = {"older_than": timedelta(days=30), "stale": {"gemm": (1,)}}
        assert store.prune(**options, count_only=True) == 2  # type: ignore[arg-type]
        assert len(store.trials()) == 4
        assert store.prune(**options) == 2  # type: ignore[arg-type]
        assert {t.config for t in store.trials()} == {"kept=1", "young=1"}
        assert store.winners() == [kept]
        assert store.prune() == 0
        moment = f"{datetime.now(UTC):%Y-%m-%d %H:%M}:61.000000"
        edit(tmp_path / "tuned.db", f"UPDATE trial SET created_at = '{moment}'")
        assert store.prune(older_than=timedelta(days=30)) == 1, "young is of no date now, and a winner stays"


def test_prune_of_one_gpu_leaves_the_others_alone(tmp_path: Path) -> None:
    mine, other = trial("mine=1", revision=0), trial("other=1", revision=0, gpu=L40S)
    with Store(database(tmp_path / "tuned.db", mine, other)) as store:
        assert store.prune(stale={"gemm": (1,)}, gpu="h200", count_only=True) == 1
        assert store.prune(stale={"gemm": (1,)}, gpu="h200") == 1
        assert store.winners() == [other]
        assert store.prune(stale={"gemm": (1,)}, op="rope") == 0
        assert store.prune(older_than=timedelta(days=-1), gpu="h200") == 0


def test_the_view_has_a_row_for_each_winner(tmp_path: Path) -> None:
    path = database(tmp_path / "tuned.db", trial(baseline_us=20.0), trial("lost=1", status="crashed"))
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        (row,) = connection.execute("SELECT * FROM winners")
    found = {name: row[name] for name in ("gpu", "op", "problem", "config", "median_us", "vendor_us", "driver")}
    assert found == {
        "gpu": "h200",
        "op": "gemm",
        "problem": "m=16 n=64 k=32",
        "config": "tile_m=128",
        "median_us": 12.5,
        "vendor_us": 20.0,
        "driver": "580.95",
    }
