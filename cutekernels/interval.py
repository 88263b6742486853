"""Something done again and again in the background, beside the calls of a serving process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Interval:
    """Calls ``action`` at an interval in a daemon thread. A forked child goes on with a thread of its own."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action
        self._seconds: float | None = None
        self._stop = threading.Event()
        os.register_at_fork(after_in_child=self._restart)

    @property
    def seconds(self) -> float | None:
        """None while nothing is done."""
        return self._seconds

    def every(self, seconds: float | None) -> None:
        """Begin, with another interval if one was set; None ends it. Raises ValueError for no positive number."""
        if seconds is not None and not 0 < seconds < threading.TIMEOUT_MAX:
            raise ValueError(f"an interval is a positive number of seconds; it is {seconds!r}")
        self._seconds = seconds
        self._stop.set()
        self._restart()

    def _restart(self) -> None:
        if self._seconds is not None:
            self._stop = threading.Event()
            given = self._seconds, self._stop
            threading.Thread(target=self._run, args=given, name=self._name, daemon=True).start()

    def _run(self, seconds: float, stop: threading.Event) -> None:
        while not stop.wait(seconds):
            self._action()
