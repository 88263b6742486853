"""Runs a function at a fixed interval in a daemon thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from cutekernels import settings

LEAST_S = 0.01  # a shorter interval would keep a CPU busy


class Interval:
    """Calls ``action`` at an interval in a daemon thread. A forked child goes on with a thread of its own.

    What ``action`` raises is logged, and the next interval tries again.
    """

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
        """Begin, with another interval if one was set; None ends it. Raises ValueError as :meth:`check`."""
        self.check(seconds)
        self._seconds = seconds
        self._stop.set()
        self._restart()

    @staticmethod
    def check(seconds: object) -> None:
        """Raise ValueError for what is neither None nor a number of seconds from ``LEAST_S`` up."""
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (number and LEAST_S <= seconds < threading.TIMEOUT_MAX):  # type: ignore[operator]
            raise ValueError(f"an interval is a number of seconds from {LEAST_S} up; it is {seconds!r:.40}")

    def _restart(self) -> None:
        if self._seconds is not None:
            self._stop = threading.Event()
            given = self._seconds, self._stop
            threading.Thread(target=self._run, args=given, name=self._name, daemon=True).start()

    def _run(self, seconds: float, stop: threading.Event) -> None:
        while not stop.wait(seconds):
            try:
                self._action()
            except Exception as error:  # noqa: BLE001  the edge of a thread: ending would end the repetition silently
                settings.logger("background").warning("%s: %s: %s", self._name, type(error).__name__, error)
