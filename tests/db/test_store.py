"""The store, on SQLite and on a real PostgreSQL alike: each test here runs on both."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from cutekernels.db.storage import engine, migrations, models, snapshot, sqlite
from cutekernels.db.storage.store import Environment, ImportReport, Store, Trial
from cutekernels.errors import StoreError
from tests.db.postgres import Postgres, running
from tests.db.trials import H200, L40S, trial

pytestmark = pytest.mark.usefixtures("shipped")

PROBLEM = "m=16 n=64 k=32"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Makes a fresh PostgreSQL database per call and gives its URL."""
    with running() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Gives the URL of a new, empty database at each call."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres")  # type: ignore[no-any-return]
    return lambda: f"sqlite:///{tmp_path / uuid4().hex}.db"


@pytest.fixture
def url(fresh: Callable[[], str]) -> str:
    return fresh()


# ---- schema -------------------------------------------------------------------------------------------------


def test_models_and_migrations_agree(url: str) -> None:
    Store(url).close()
    made = engine.open_engine(url, readonly=True)
    with made.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, models.Base.metadata) == []
        checks = {
            constraint["name"]
            for table in models.Base.metadata.tables
            for constraint in inspect(connection).get_check_constraints(table)
        }
    declared = {
        str(c.name) for t in models.Base.metadata.tables.values() for c in t.constraints if "ck_" in str(c.name)
    }
    assert checks == declared == {"ck_trial_origin", "ck_trial_status"}


def test_head_is_the_last_migration(url: str) -> None:
    with engine.open_engine(url).connect() as connection:
        scripts = ScriptDirectory.from_config(engine.alembic_config(connection))
    revisions = [script.revision for script in scripts.walk_revisions()]
    assert revisions[0] == migrations.HEAD
    assert revisions == sorted(revisions, reverse=True)


def test_down_and_up_again(url: str) -> None:
    Store(url).record([trial()])
    writer = engine.open_engine(url).execution_options(**{engine.WRITING: True})
    with writer.begin() as connection:
        command.downgrade(engine.alembic_config(connection), "base")
    with writer.connect() as connection:
        assert set(inspect(connection).get_table_names()) == {"alembic_version"}
    with Store(url) as store:
        assert store.trials() == []
        assert store.record([trial()]) == 1


@pytest.mark.parametrize("earlier", ["0001", "0002"])
def test_an_upgrade_keeps_every_row(url: str, earlier: str) -> None:
    kept = trial(sources="")
    with Store(url) as store:
        store.record([kept])
        store.crown(kept.id)
    writer = engine.open_engine(url).execution_options(**{engine.WRITING: True})
    with writer.begin() as connection:
        command.downgrade(engine.alembic_config(connection), earlier)
    assert len(snapshot.load(kept.gpu.name, url).table) >= 1, "calls read it before the upgrade too"
    with Store(url) as store:
        (found,) = store.winners()
        expected = kept if earlier == "0002" else replace(kept, environment=found.environment)  # older: no provenance
        assert found == expected


def test_a_newer_schema_is_refused_and_left_alone(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with Store(url) as store:
        store.record([t := trial()])
        store.crown(t.id)
    writer = engine.open_engine(url).execution_options(**{engine.WRITING: True})
    with writer.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for readonly in (False, True):
        with pytest.raises(StoreError, match=r"schema '9999', newer than '0004'.*upgrade cutekernels"):
            Store(url, readonly=readonly)
    for _ in range(2):
        assert snapshot.load("h200", url).table == {}
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "newer" in caplog.text


def test_threads_making_databases_at_once(fresh: Callable[[], str]) -> None:
    urls = [fresh() for _ in range(3)] * 2
    recorded: list[int] = []
    start = threading.Barrier(len(urls))

    def make(url: str) -> None:
        start.wait()
        with Store(url) as store:
            recorded.append(store.record([trial()]))

    threads = [threading.Thread(target=make, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorded == [1] * len(urls)


def test_someone_elses_tables_are_not_touched(url: str) -> None:
    path = sqlite.path_of(url)
    if path is not None:
        path.touch()
    made = engine._postgres(url) if path is None else engine._sqlite(path)
    with made.execution_options(**{engine.WRITING: True}).begin() as connection:
        connection.execute(text("CREATE TABLE trial (verdict TEXT)"))
    with pytest.raises(StoreError, match="not ours: trial"):
        Store(url)
    with pytest.raises(StoreError, match="not a tuned-config database"):
        Store(url, readonly=True)
    with made.connect() as connection:
        assert inspect(connection).get_table_names() == ["trial"]


# ---- trials -------------------------------------------------------------------------------------------------


def test_trials_come_back_as_recorded_oldest_first(url: str) -> None:
    full = trial(
        gpu=L40S,
        environment=Environment(),
        revision=3,
        p20_us=0.1,
        p80_us=1e300,
        samples=2**62,
        ratio=1.5,
        ratio_low=1.25,
        ratio_high=1.75,
        baseline_us=2.0,
        error=0.0,
        registers=255,
        stack_bytes=2**40,
        smem_bytes=0,
        message="naïve\n'quotes' \\ %s :x",
    )
    old = trial(created_at=datetime(2020, 2, 29, 23, 59, 59, 123456, tzinfo=UTC))
    with Store(url) as store:
        assert store.record([full, old]) == 2
    with Store(url) as store:
        assert store.trials() == [old, full]
        assert store.trial(full.id) == full
        assert store.trial("nothing") is None
        assert store.find(old.id[:35]) == [old]
        assert store.find("%") == []


def test_recording_an_id_again_changes_nothing(url: str) -> None:
    first = trial(median_us=1.0)
    forged = Trial.from_row(first.as_row() | {"median_us": 0.001})
    with Store(url) as store:
        assert store.record([first, first]) == 1
        assert store.record([forged, second := trial()]) == 1
        assert store.record([]) == 0
        assert store.trials() == [first, second]


def test_a_batch_is_recorded_whole_or_not_at_all(url: str) -> None:
    def failing() -> Iterator[Trial]:
        yield trial()
        raise RuntimeError("the tuner died")

    with Store(url) as store:
        with pytest.raises(RuntimeError):
            store.record(failing())
        assert store.trials() == []


def test_every_filter(url: str) -> None:
    base = trial()
    others = {
        "gpu": trial(gpu=L40S),
        "op": trial(op="silu_mul"),
        "revision": trial(revision=2),
        "problem": trial(problem="m=32 n=64 k=32"),
        "config": trial("tile_m=64"),
        "origin": trial(origin="predicted"),
        "status": trial(status="crashed"),
    }
    values: dict[str, Any] = {
        "gpu": "l40s",
        "op": "silu_mul",
        "revision": 2,
        "problem": "m=32 n=64 k=32",
        "config": "tile_m=64",
        "origin": "predicted",
        "status": "crashed",
    }
    with Store(url) as store:
        store.record([base, *others.values()])
        for name, value in values.items():
            assert store.trials(**{name: value}) == [others[name]], name
        assert store.trials(gpu="h200", op="gemm", revision=1, problem=PROBLEM, config="tile_m=128", origin="measured",
                            status="ok") == [base]  # fmt: skip
        some = {("gemm", PROBLEM), ("silu_mul", "m=32 n=64 k=32")}
        assert store.trials(problems=some) == [t for t in (base, *others.values()) if (t.op, t.problem) in some]
        assert store.trials(latest=3) == [base, *others.values()][-3:]
        assert store.trials(gpu="a100") == []


def test_many_trials_in_one_go(url: str) -> None:
    batch = [trial(f"tile_m={i}") for i in range(3000)]
    with Store(url) as store:
        assert store.record(batch) == 3000
        assert store.record(batch) == 0
        assert len(store.trials()) == 3000
    other = Store(url)
    assert other.stats()[0].trials == 3000


# ---- winners ------------------------------------------------------------------------------------------------


def test_crowning(url: str) -> None:
    slow, fast, guess, better_guess = trial("a=1"), trial("a=2"), trial(origin="predicted"), trial(origin="predicted")
    broken = trial(status="wrong_result")
    with Store(url) as store:
        store.record([slow, fast, guess, better_guess, broken])
        assert store.winners() == []
        assert store.crown(guess.id)
        assert store.crown(better_guess.id)
        assert store.winners() == [better_guess]
        assert store.crown(slow.id)
        assert not store.crown(guess.id)
        assert store.winners() == [slow]
        assert store.crown(fast.id)
        assert store.crown(fast.id)
        assert store.crown(slow.id)  # the tuner's word, older or not
        assert store.winners(gpu="h200", op="gemm", revision=1, problem=PROBLEM, origin="measured") == [slow]
        for refused in ({"gpu": "l40s"}, {"op": "x"}, {"revision": 2}, {"problem": "m=1"}, {"origin": "predicted"}):
            assert store.winners(**refused) == []
        with pytest.raises(StoreError, match="only a trial of status ok"):
            store.crown(broken.id)
        with pytest.raises(StoreError, match="no trial 'nobody'"):
            store.crown("nobody")


def test_one_winner_per_key_and_one_key_per_gpu_name(url: str) -> None:
    keys = [trial(), trial(gpu=L40S), trial(op="silu_mul"), trial(revision=2), trial(problem="m=1 n=1 k=1")]
    twin = trial(gpu=type(H200)(**{**trial().as_row()["gpu"], "memory_bytes": 1}))  # the same name, other attributes
    with Store(url) as store:
        store.record([*keys, twin])
        assert all(store.crown(t.id) for t in [*keys, twin])
        assert len(store.winners()) == 5
        assert store.winners(gpu="h200", op="gemm", revision=1, problem=PROBLEM) == [twin]


# ---- requests and counts ------------------------------------------------------------------------------------


def test_requests_add_up_and_leave_the_queue_when_measured(url: str) -> None:
    rows = [("h200", "gemm", 1, "m=1", 3), ("h200", "gemm", 1, PROBLEM, 10), ("l40s", "gemm", 1, "m=1", 1)]
    with Store(url) as store:
        store.note_requests([])
        store.note_requests([*rows, rows[0]])
        store.note_requests(rows[:1])
        assert [(r.problem, r.hits) for r in store.requests(gpu="h200")] == [(PROBLEM, 10), ("m=1", 9)]
        assert [r.gpu for r in store.requests()] == ["h200", "h200", "l40s"]
        assert [r.hits for r in store.requests(limit=1)] == [10]
        assert datetime.now(UTC) - store.requests()[0].last_seen < timedelta(minutes=1)
        store.record([guess := trial(origin="predicted"), measured := trial()])
        store.crown(guess.id)
        assert len(store.requests(gpu="h200")) == 2
        store.crown(measured.id)
        assert [r.problem for r in store.requests(gpu="h200")] == ["m=1"]


@pytest.mark.parametrize(
    "row", [("H 200", "gemm", 1, "m=1", 1), ("h200", "", 1, "m=1", 1), ("h200", "gemm", "1", "m=1", 1),
            ("h200", "gemm", 1, "m=1\n", 1), ("h200", "gemm", 1, "m=1", 0), ("h200", "gemm", 1, "m=1", 2**31)]
)  # fmt: skip
def test_bad_requests_are_refused(url: str, row: Any) -> None:
    with Store(url) as store:
        with pytest.raises(StoreError, match="must be"):
            store.note_requests([("h200", "gemm", 1, "m=2", 1), row])
        assert store.requests() == []


def test_stats(url: str) -> None:
    with Store(url) as store:
        assert store.stats() == []
        store.record([a := trial(), trial(), trial(status="timeout"), trial(origin="predicted"), trial(gpu=L40S)])
        store.crown(a.id)
        rows = [(s.gpu, s.op, s.origin, s.trials, s.ok, s.winners) for s in store.stats()]
    assert rows == [
        ("h200", "gemm", "measured", 3, 2, 1),
        ("h200", "gemm", "predicted", 1, 1, 0),
        ("l40s", "gemm", "measured", 1, 1, 0),
    ]


# ---- export, import, merge ----------------------------------------------------------------------------------


def fill(store: Store, *trials: Trial) -> None:
    store.record(trials)
    for t in trials:
        store.crown(t.id)


def test_export_and_import(fresh: Callable[[], str], tmp_path: Path) -> None:
    winners = [trial(), trial(gpu=L40S), trial(op="silu_mul", origin="predicted")]
    file = tmp_path / "winners.jsonl"
    with Store(fresh()) as store:
        fill(store, *winners)
        store.record([trial(status="crashed")])
        assert store.export(file) == 3
        stream = io.StringIO()
        assert store.export(stream, gpu="h200", op="gemm") == 1
    assert [Trial.from_line(line) for line in file.read_text().splitlines()] == [winners[0], winners[2], winners[1]]
    assert stream.getvalue() == file.read_text().splitlines(keepends=True)[0]
    assert [p.name for p in tmp_path.glob(".winners*")] == []
    with Store(fresh()) as store:
        assert store.import_(file) == ImportReport(added=3, crowned=3, kept=0)
        assert store.import_(file) == ImportReport(added=0, crowned=0, kept=3)
        assert store.winners() == [winners[0], winners[2], winners[1]]
        assert store.import_(io.StringIO("\n\n")) == ImportReport(0, 0, 0)
        again = io.StringIO()
        store.export(again)
        assert again.getvalue() == file.read_text()


def lines(*trials: Trial) -> io.StringIO:
    return io.StringIO("".join(f"{t.as_line()}\n" for t in trials))


def test_who_wins_on_import(fresh: Callable[[], str]) -> None:
    day = timedelta(days=1)
    now = datetime.now(UTC)
    old, new = trial("a=1", created_at=now - 2 * day), trial("a=2", created_at=now - day)
    guess = trial("a=3", origin="predicted", created_at=now)
    failed = trial("a=4", status="crashed", created_at=now)
    expected = {
        (old, new): new,
        (new, old): new,
        (old, guess): old,
        (guess, old): old,
        (old, failed): old,
        (old, new, guess): new,
        (guess, new, old): new,
    }
    for order, winner in expected.items():
        with Store(fresh()) as store:  # one after another
            for t in order:
                store.import_(lines(t))
            assert store.winners() == [winner]
            assert len(store.trials()) == len(order)
        with Store(fresh()) as store:  # in one file
            report = store.import_(lines(*order))
            assert store.winners() == [winner]
            assert (report.added, report.crowned) == (len(order), 1)


def test_an_import_cannot_rewrite_a_recorded_trial(url: str) -> None:
    mine = trial("a=1", status="wrong_result")
    forged = Trial.from_row(mine.as_row() | {"status": "ok", "config": "a=2"})
    with Store(url) as store:
        store.record([mine])
        assert store.import_(lines(forged)) == ImportReport(added=0, crowned=0, kept=1, differing=1)
        assert store.trials() == [mine]
        assert store.winners() == []


def hostile() -> list[tuple[str, str]]:
    row = trial().as_row()
    return [
        ("}{", "not a JSON object"),
        (json.dumps(row | {"median_us": "0"}), "median_us must be a finite number"),
        *((json.dumps(row | {"median_us": us}), f"above 0; it is {us}: measure again") for us in (0.0, None)),
        (json.dumps(row | {"config": "'); DROP TABLE trial; --\u0000"}), "config must be"),
        (json.dumps(row | {"pickle": "gASV"}), "no field 'pickle'"),
        (json.dumps(row | {"created_at": "2999-01-01T00:00:00+00:00"}), "in the future"),
        (json.dumps(row | {"op": "\udcff"}), "op must be"),
        ("x" * 200_000, "at most 65536"),
    ]


@pytest.mark.parametrize(("line", "reason"), hostile())
def test_one_hostile_line_and_nothing_is_imported(url: str, line: str, reason: str) -> None:
    with Store(url) as store:
        with pytest.raises(StoreError, match=f"line 3: .*{reason}.*nothing was imported"):
            store.import_(io.StringIO(f"{trial().as_line()}\n\n{line}\n{trial().as_line()}\n"))
        assert store.trials() == []


def test_a_file_that_is_not_text_or_not_there(url: str, tmp_path: Path) -> None:
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(trial(message="é").as_line().replace("\\u00e9", "#").encode().replace(b"#", b"\xff") + b"\n")
    with Store(url) as store:
        with pytest.raises(StoreError, match=r"binary.jsonl, line 1: message must be"):
            store.import_(binary)
        with pytest.raises(StoreError, match="No such file"):
            store.import_(tmp_path / "absent.jsonl")
        with pytest.raises(StoreError, match="No such file"):
            store.export(tmp_path / "absent" / "out.jsonl")


def test_merging_is_a_union_whatever_the_order(fresh: Callable[[], str]) -> None:
    now = datetime.now(UTC)
    a_trials = [trial("a=1", created_at=now - timedelta(hours=2)), trial("a=2", problem="m=1"), trial(status="pruned")]
    b_trials = [trial("b=1", created_at=now - timedelta(hours=1)), trial("b=2", problem="m=1", origin="predicted")]
    a, b = fresh(), fresh()
    with Store(a) as store:
        fill(store, *a_trials[:2])
        store.record(a_trials[2:])
    with Store(b) as store:
        fill(store, *b_trials)
        store.record(a_trials[:1])
    with Store(a) as left, Store(b) as right:
        assert left.merge(b) == ImportReport(added=2, crowned=1, kept=1)
        assert left.merge(b) == ImportReport(added=0, crowned=0, kept=2)
        assert right.merge(a) == ImportReport(added=2, crowned=1, kept=1)
        assert left.winners() == right.winners() == [a_trials[1], b_trials[0]]
        assert left.trials() == right.trials()
        assert len(left.trials()) == 5
        assert left.merge(a) == ImportReport(added=0, crowned=0, kept=2)


def test_merging_across_kinds_of_database(fresh: Callable[[], str], tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    with Store(file) as other:
        fill(other, t := trial(ratio=1.25))
    with Store(fresh()) as store:
        assert store.merge(file) == ImportReport(1, 1, 0)
        assert store.winners() == [t]
        with pytest.raises(StoreError, match="there is no database"):
            store.merge(tmp_path / "absent.db")
    assert not (tmp_path / "absent.db").exists()


# ---- snapshot -----------------------------------------------------------------------------------------------


def test_the_snapshot_sees_the_winners(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with Store(url) as store:
        fill(
            store,
            trial("a=1", ratio=1.5),
            trial("a=2", problem="m=1", origin="predicted", median_us=None),
            trial(gpu=L40S),
        )
        store.record([trial("a=9")])
    table = snapshot.load("h200", url).table
    assert list(table) == [("gemm", 1)]
    assert table["gemm", 1] == {
        PROBLEM: snapshot.TunedConfig("gemm", 1, PROBLEM, "a=1", "measured", 12.5, 1.5, "", "database"),
        "m=1": snapshot.TunedConfig("gemm", 1, "m=1", "a=2", "predicted", None, None, "", "database"),
    }
    assert caplog.records == []


# ---- many writers -------------------------------------------------------------------------------------------


def test_threads_writing_at_once(url: str) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(6)

    def write(number: int, store: Store) -> None:
        try:
            start.wait()
            for i in range(5):
                # Environments are new to the database, and the same in each thread: they collide on insertion.
                batch = [trial(f"thread={number} i={i}", environment=Environment(driver=f"{i}.{j}")) for j in range(4)]
                assert store.record(batch) == 4
                store.note_requests(
                    [("h200", "gemm", 1, f"m={j}", 1) for j in (range(4), reversed(range(4)))[number % 2]]
                )
                store.crown(batch[0].id)
        except (StoreError, AssertionError) as error:
            failures.append(error)

    with Store(url) as store:
        threads = [threading.Thread(target=write, args=(n, store)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(store.trials()) == 6 * 5 * 4
        assert len({t.environment for t in store.trials()}) == 20
        assert [r.hits for r in store.requests()] == [30, 30, 30, 30]
        assert len(store.winners()) == 1


def test_a_prediction_never_replaces_a_measurement_in_a_race(url: str) -> None:
    with Store(url) as store:
        for round_number in range(6):
            problem = f"m={round_number}"
            measured = trial(problem=problem)
            guesses = [trial(problem=problem, origin="predicted") for _ in range(3)]
            start = threading.Barrier(4)

            def crown(t: Trial, start: threading.Barrier = start) -> None:
                start.wait()
                store.record([t])
                store.crown(t.id)

            threads = [threading.Thread(target=crown, args=(t,)) for t in [*guesses, measured]]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert store.winners(problem=problem) == [measured]


WRITER = """
import sys
from tests.db.trials import trial
from cutekernels.db.storage.store import Store
number = int(sys.argv[2])
with Store(sys.argv[1]) as store:
    for i in range(10):
        batch = [trial(f"process={number} i={i} j={j}") for j in range(5)]
        assert store.record(batch) == 5
        assert store.crown(batch[0].id)
"""


def test_processes_creating_and_writing_at_once(url: str) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    }
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, url, str(n)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for n in range(3)
    ]
    errors = [writer.communicate(timeout=60)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * 3, errors
    with Store(url) as store:
        assert len(store.trials()) == 150
        assert len(store.winners()) == 1
