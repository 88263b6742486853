"""Rows that gather before they are written: nothing is lost, nothing is read too early."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cutekernels.autotune import ledger
from cutekernels.autotune.ledger import Ledger
from cutekernels.db.storage.store import Store, StoreError
from tests.db.trials import trial


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ledger, "FLUSH_S", 1e9)  # no writing by time, however slow the machine
    return tmp_path / "t.db"


def stored(db: Path) -> int:
    with Store(db, readonly=True) as store:
        return len(store.trials())


def test_rows_gather_and_the_end_writes_them(db: Path) -> None:
    with Ledger(db) as rows:
        for i in range(5):
            assert rows.record([trial(f"a={i}")]) == 1
        assert stored(db) == 0
    assert stored(db) == 5


def test_an_error_or_an_interruption_writes_them_too(db: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Ledger(db) as rows:
        rows.record([trial()])
        raise KeyboardInterrupt
    assert stored(db) == 1


def test_after_a_second_they_are_written(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "FLUSH_S", 0.0)
    with Ledger(db) as rows:
        rows.record([trial()])
        assert stored(db) == 1


def test_readers_and_crowns_see_them(db: Path) -> None:
    with Ledger(db) as rows:
        one, two = trial("a=1"), trial("a=2")
        rows.record([one])
        assert [t.id for t in rows.trials()] == [one.id]
        rows.record([two])
        assert rows.crown(two.id)
        assert [t.id for t in rows.winners()] == [two.id]


def test_what_could_not_be_written_is_kept(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(db) as rows:
        rows.record([trial()])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "record", _full)
            with pytest.raises(StoreError):
                rows.flush()
    assert stored(db) == 1


def _full(self: Store, trials: object) -> int:
    raise StoreError("the disk is full")


def test_threads_share_it(db: Path) -> None:
    with Ledger(db) as rows:

        def work(number: int) -> None:
            for i in range(20):
                rows.record([trial(f"a={number} b={i}")])
                if i % 7 == 0:
                    rows.winners()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert stored(db) == 80


def test_a_locked_database_is_waited_for_once_and_the_loss_is_told(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def locked(self: Store, trials: object) -> int:
        asked.append(1)
        raise StoreError("database is locked")

    monkeypatch.setattr(ledger, "FLUSH_S", 0.0)
    rows = Ledger(db)
    monkeypatch.setattr(Store, "record", locked)
    for _ in range(3):
        with pytest.raises(StoreError, match="locked"):
            rows.record([trial()])
    assert len(asked) == 1, "the other lanes fail at once"
    with pytest.raises(StoreError, match=r"locked \(3 attempts were not stored"):
        rows.close()
    assert len(asked) == 2
