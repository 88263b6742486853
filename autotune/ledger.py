"""The tuner's way of writing: rows gather for a second and are stored in one transaction."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from sqlalchemy.orm import Session

from cutekernels.db.store import Store, Trial
from cutekernels.errors import StoreError

FLUSH_S = 1.0  # a killed run loses the attempts of at most this long


class Ledger(Store):
    """A store whose :meth:`record` waits. Reads, :meth:`crown` and closing write first what waits. For many threads."""

    def __init__(self, url: str | os.PathLike[str] | None = None) -> None:
        super().__init__(url)
        self._waiting: list[Trial] = []
        self._since = time.monotonic()
        self._lock = threading.RLock()
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
                    super().record(self._waiting)
                except StoreError as error:
                    self._failed = error
                    raise
                self._waiting = []
            self._since = time.monotonic()

    def crown(self, trial_id: str) -> bool:
        self.flush()
        return super().crown(trial_id)

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        self.flush()
        with super()._reading() as session:
            yield session

    def close(self) -> None:
        try:
            with self._lock:
                self._failed = None
                self.flush()
        except StoreError as error:
            raise StoreError(
                f"{error} ({len(self._waiting)} attempts were not stored, and will be made again)"
            ) from error
        finally:
            super().close()
