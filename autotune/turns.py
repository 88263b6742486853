"""Turns on a GPU that several searches share: many prepare at a time, one is timed while all others wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock with two ways in. :meth:`alone` waits until nobody is inside; who waits for it goes before newcomers.

    A search waits for its turn before it sends a request, so that a deadline covers its own work alone.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = self._waiting = 0
        self._timed = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """For work on the GPU that is not timed: inputs, references, first launches."""
        with self._changed:
            self._changed.wait_for(lambda: not self._timed and not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For timing: nothing else runs on the GPU."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._timed and not self._inside)
            finally:
                self._waiting -= 1
            self._timed = True
        try:
            yield
        finally:
            with self._changed:
                self._timed = False
                self._changed.notify_all()
