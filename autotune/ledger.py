"""The tuner's way of writing: rows gather for a second and are stored in one transaction.

A server that restarts is waited for: rows gather meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import text
from sqlalchemy.orm import Session

from cutekernels import settings
from cutekernels.db.storage import engine
from cutekernels.db.storage.store import Store, Trial
from cutekernels.errors import StoreError, StoreUnreachable

FLUSH_S = 1.0  # a killed run loses the attempts of at most this long
_FIRST_S, _MOST_S = 0.1, 5.0  # between looks for it, twice as long each time


class Ledger(Store):
    """A store whose :meth:`record` waits. Reads, :meth:`crown` and closing write first what waits. For many threads."""

    def __init__(self, url: str | os.PathLike[str] | None = None) -> None:
        super().__init__(url)
        self._waiting: list[Trial] = []
        self._since = time.monotonic()
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._failed: StoreError | None = None  # the first: a locked database is waited for once, not by each lane

    def record(self, trials: Iterable[Trial]) -> int:
        """Take trials, and return their number.

        Those within a second of the last writing are stored with later ones.
        """
        batch = list(trials)
        with self._lock:
            self._waiting += batch
            if time.monotonic() - self._since >= FLUSH_S:
                self.flush()
        return len(batch)

    def flush(self) -> None:
        """Store what waits. Where that fails, later calls fail at once, and :meth:`close` tries again."""
        with self._lock:
            if self._failed is not None:
                raise self._failed
            if self._waiting:
                try:
                    self._store()
                except StoreError as error:
                    self._failed = error
                    raise
            self._since = time.monotonic()

    def _store(self) -> None:
        while self._waiting:
            try:
                super().record(self._waiting)
                self._waiting = []
            except StoreUnreachable as error:
                self.await_server(error)

    def await_server(self, error: StoreUnreachable) -> None:
        """Wait until the server that went away answers again.

        Raises:
            StoreUnreachable: it did not within :data:`engine.AWAY_S`.
        """
        with self._lock:  # one lane looks for it, the others wait for that one
            if self._failed is not None:
                raise self._failed
            limit, pause = time.monotonic() + engine.AWAY_S, _FIRST_S
            while time.monotonic() < limit:
                with suppress(StoreUnreachable), super()._reading() as session:
                    session.execute(text("SELECT 1"))
                    return
                if pause == _FIRST_S:
                    settings.logger("autotune").warning("%s; waiting up to %.0f s for it", error, engine.AWAY_S)
                if self._closing.wait(pause):
                    raise error
                pause = min(_MOST_S, 2 * pause)
            self._failed = StoreUnreachable(f"{error}; it did not come back within {engine.AWAY_S:.0f} s")
            raise self._failed

    @contextmanager
    def hurry_on_signal(self) -> Iterator[None]:
        """Wait for no server any more once a signal ends the block."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._closing.set()
            raise

    def crown(self, trial_id: str) -> bool:
        self.flush()
        return super().crown(trial_id)

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        self.flush()
        with super()._reading() as session:
            yield session

    def close(self) -> None:
        self._closing.set()  # nobody waits for a server any more
        try:
            with self._lock:
                self._failed = None
                self.flush()
        except StoreError as error:
            raise type(error)(
                f"{error} ({len(self._waiting)} attempts were not stored, and will be made again)"
            ) from error
        finally:
            super().close()
