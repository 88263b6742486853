"""Several sessions of one PostgreSQL database: locks that are held too long, and pruning beside writers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from cutekernels.db import engine
from cutekernels.db.store import Store
from cutekernels.errors import StoreError
from tests.db.test_store import postgres  # noqa: F401  a fixture
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
