"""Turns on a GPU that several searches share: many prepare at a time, one is timed while all others wait."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cutekernels.compile import directory
from cutekernels.db.storage.leases import lock_byte

_QUEUE, _GPU = 0, 1  # bytes of the file that processes share


def shared_file(gpu: str) -> Path:
    """The file whose locks order this user's processes on the GPU with the identity ``gpu``."""
    return directory().parent / f"gpu-{gpu}"


class Turns:
    """A lock with two ways in. :meth:`alone` waits until nobody is inside; who waits for it goes before newcomers.

    A search waits for its turn before it sends a request, so that a deadline covers its own work alone.

    Args:
        shared: the GPU's file (:func:`shared_file`), by which other processes keep to the same order; None: none do.
    """

    def __init__(self, shared: Path | None = None) -> None:
        self._shared = shared
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
            with self._beside_others(fcntl.F_RDLCK):
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
            with self._beside_others(fcntl.F_WRLCK):
                yield
        finally:
            with self._changed:
                self._timed = False
                self._changed.notify_all()

    @contextmanager
    def _beside_others(self, kind: int) -> Iterator[None]:
        """The same among processes. Who waits for the GPU alone keeps the queue's byte, behind which newcomers wait."""
        if self._shared is None:
            yield
            return
        file = os.open(self._shared, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            lock_byte(file, fcntl.F_WRLCK, _QUEUE, wait=True)
            lock_byte(file, kind, _GPU, wait=True)
            lock_byte(file, fcntl.F_UNLCK, _QUEUE)
            yield
        finally:
            os.close(file)  # and its locks with it
