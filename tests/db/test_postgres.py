"""Several sessions of one PostgreSQL database: locks that are held too long, pruning beside writers, moves."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from optuna.storages import InMemoryStorage
from sqlalchemy import make_url

from cutekernels.autotune import run
from cutekernels.autotune.studies import Studies
from cutekernels.db.questions.cli import app
from cutekernels.db.storage import engine, snapshot
from cutekernels.db.storage.rate import Rate
from cutekernels.db.storage.store import Request, Store
from cutekernels.errors import StoreError
from tests.command_line import invoke
from tests.db.test_store import PROBLEM, postgres  # noqa: F401  a fixture
from tests.db.trials import trial

pytestmark = pytest.mark.usefixtures("shipped")


def test_a_lock_that_another_session_holds_is_not_waited_for_without_end(
    postgres: Callable[[], str],  # noqa: F811
) -> None:
    url = postgres()
    Store(url).close()
    patient = engine.open_engine(url, readonly=True)
    hasty = engine.open_engine(url, readonly=True, patience_s=(1, 2))
    with patient.begin() as holder:
        holder.exec_driver_sql("LOCK TABLE trial")
        begin = time.monotonic()
        refused = pytest.raises(StoreError, match="lock timeout; another session of PostgreSQL holds its tables")
        with refused, engine.translated("db"), hasty.connect() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM trial")
        assert time.monotonic() - begin < 25, "30 s without the patience of its own"
    refused = pytest.raises(StoreError, match="statement timeout; PostgreSQL took longer")
    with refused, engine.translated("db"), hasty.connect() as connection:
        connection.exec_driver_sql("SELECT pg_sleep(30)")
    with patient.connect() as connection:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock_shared({engine._WRITERS_LOCK})")
        with Store(url) as store:
            assert store.prune(older_than=timedelta(0), count_only=True) == 0, "which waits for nobody"
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "30s"
        assert connection.exec_driver_sql("SHOW statement_timeout").scalar() == "2min"


def test_a_role_with_few_rights_a_database_without_an_encoding_and_somebodys_trigger(
    postgres: Callable[[], str],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = postgres()
    owner, named = engine.session(url), make_url(url)
    owner.exec_driver_sql("CREATE ROLE tuner LOGIN; GRANT CREATE ON SCHEMA public TO tuner")
    owner.exec_driver_sql("CREATE DATABASE bytes ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    its = named.set(username="tuner").render_as_string(hide_password=False)
    with Store(its) as store:
        store.record([trial()])
    with pytest.raises(StoreError, match="permission denied for database .*; ask its owner for the right"):
        Studies(its)
    assert isinstance(run._studies(its).storage, InMemoryStorage) and "stay in memory" in caplog.text
    owner.exec_driver_sql("CREATE SCHEMA cutekernels_studies AUTHORIZATION tuner")
    Studies(its).close()
    with Store(named.set(database="bytes").render_as_string(hide_password=False)) as store:
        store.record([trial()])
        assert store.count() == 1
    code = "CREATE FUNCTION boo() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$"
    owner.exec_driver_sql(f"{code}; CREATE TRIGGER boo BEFORE INSERT ON trial EXECUTE FUNCTION boo()")
    for readonly in (True, False):
        with pytest.raises(StoreError, match="trigger called 'boo', which is not ours"):
            Store(url, readonly=readonly).count()
    owner.close()


def test_requests_are_cleared_beside_those_who_note_them(postgres: Callable[[], str]) -> None:  # noqa: F811
    url, errors, end = postgres(), list[StoreError](), time.monotonic() + 2.0
    rows = [("h200", "gemm", 1, f"m={i}", 1) for i in range(300)]

    def work(step: Callable[[Store], object]) -> None:
        with Store(url) as store:
            while time.monotonic() < end and not errors:
                try:
                    step(store)
                except StoreError as error:
                    errors.append(error)

    def clear(store: Store) -> None:
        store.clear_requests([Request(*row, datetime.now(UTC)) for row in random.sample(rows, 30)])

    Store(url).close()
    steps: list[Callable[[Store], object]] = [lambda store: store.note_requests(rows), clear]
    threads = [threading.Thread(target=work, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [] and not any(thread.is_alive() for thread in threads)


def test_pruning_beside_writers_breaks_no_reference(postgres: Callable[[], str]) -> None:  # noqa: F811
    """Rows of a GPU or an environment that nobody points to go while another writer is about to point to them."""
    url, stop, errors = postgres(), threading.Event(), list[Exception]()
    Store(url).close()

    def work(step: Callable[[Store, int], object]) -> None:
        with Store(url) as store:
            for i in range(10_000):
                if stop.is_set():
                    return
                try:
                    step(store, i)
                except Exception as error:  # noqa: BLE001  whatever it is, the test's thread raises it
                    errors.append(error)
                    return

    steps: list[Callable[[Store, int], object]] = [
        lambda store, i: store.record([trial(f"a={i}")]),
        lambda store, i: store.record([trial(f"b={i}")]),
        lambda store, i: store.prune(older_than=timedelta(days=-1)),
    ]
    threads = [threading.Thread(target=work, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    time.sleep(3.0)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert errors == []


@pytest.mark.parametrize(
    ("change", "rule"),
    [("id = upper(id)", "id must be"), ("error = 'NaN'", "error must be"), ("registers = -1", "registers must be")],
)
def test_doctor_finds_broken_rows(postgres: Callable[[], str], change: str, rule: str) -> None:  # noqa: F811
    url = postgres()
    with Store(url) as store:
        store.record([trial("a=1"), trial("a=2")])
        assert store.broken_rows() == []
        with engine.open_engine(url).execution_options(**{engine.WRITING: True}).begin() as connection:
            connection.exec_driver_sql(f"UPDATE trial SET {change} WHERE config = 'a=1'")
        (found,) = store.broken_rows()
        assert rule in found


def test_a_merge_carries_requests_and_rates_and_can_be_repeated(
    tmp_path: Path,
    postgres: Callable[[], str],  # noqa: F811
) -> None:
    """A database moves from SQLite to PostgreSQL and back with all that it holds."""
    first, second, back = str(tmp_path / "first.db"), postgres(), str(tmp_path / "back.db")
    old, new = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 2, tzinfo=UTC)

    def rate(name: str, value: float, measured: datetime) -> Rate:
        return Rate(gpu="h200", name=name, revision=1, value=value, unit="us", created_at=measured)

    with Store(first) as store:  # nothing was ever tuned in it
        store.note_requests([("h200", "gemm", 1, PROBLEM, 7), ("l40s", "gemm", 1, PROBLEM, 2)])
        store.keep_rates([rate("dram", 2.0, new), rate("l2", 3.0, old)])
        requests, rates = store.requests(), store.rates()
    with Store(second) as store:
        store.note_requests([("l40s", "gemm", 1, PROBLEM, 5)])
        store.keep_rates([rate("dram", 9.0, old), rate("l2", 8.0, new)])
        for _ in range(2):
            report = store.merge(first)
            assert (report.added, report.requests, report.rates) == (0, 2, 2)
            assert {(r.gpu, r.hits) for r in store.requests()} == {("h200", 7), ("l40s", 5)}
            assert {(r.name, r.value) for r in store.rates()} == {("dram", 2.0), ("l2", 8.0)}
    with Store(back) as store:
        store.merge(second)
        assert {(r.gpu, r.hits) for r in store.requests()} == {("h200", 7), ("l40s", 5)}
        assert len(store.rates()) == len(rates) and requests[0] in store.requests()


@pytest.mark.parametrize("others", [False, True])
def test_a_database_that_nobody_has_written_reads_as_no_rows(
    others: bool,
    postgres: Callable[[], str],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = postgres()
    if others:
        with engine._postgres(url).begin() as connection:
            connection.exec_driver_sql("CREATE TABLE theirs (id INTEGER)")
    with Store(url, readonly=True) as store:
        assert store.trials() == store.winners() == store.requests() == store.rates() == store.stats() == []
        assert store.count() == 0 and store.broken_rows() == [] and store.find("019a") == []
    assert snapshot.load("h200", url, strict=True).table == {} and caplog.text == ""
    done = invoke(app, "query", "--db", url, "--gpu", "h200")
    assert done.exit_code == 0 and "no winner matches" in done.stderr
    with Store(url) as store:
        store.record([trial()])
    with Store(url, readonly=True) as store:
        assert store.count() == 1
