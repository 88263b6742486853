"""``FairLock``: a reentrant lock that threads get in the order in which they ask for it."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A reentrant lock, first come, first served.

    A loop that takes a ``threading.RLock`` for each step takes it again before a thread that waits wakes up, which may
    then wait for as long as the loop runs.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        with self._changed:
            if self._owner != threading.get_ident():
                ticket = object()
                self._waiting.append(ticket)
                try:
                    self._changed.wait_for(lambda: self._owner is None and self._waiting[0] is ticket)
                    self._owner = threading.get_ident()
                finally:  # after an interrupt, the next one is served
                    self._waiting.remove(ticket)
                    self._changed.notify_all()
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()
