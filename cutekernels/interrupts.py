"""Signals that end a program, raised where nothing is half done.

Python runs a signal's handler between any two steps of the main thread, within other libraries too. An error raised
there can leave a database's transaction open, for whose lock the program then waits itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_sections = 0  # of the main thread, in which a signal waits
_waiting: BaseException | None = None


def end(error: BaseException) -> None:
    """Raises ``error``, for a signal's handler: at once, or at the end of the section that is under way.

    A second Ctrl-C waits for nothing.
    """
    global _waiting
    if not _sections or (isinstance(error, KeyboardInterrupt) and isinstance(_waiting, KeyboardInterrupt)):
        _waiting = None
        raise error
    _waiting = error


@contextmanager
def section() -> Iterator[None]:
    """A part of the main thread's work that no signal by way of :func:`end` breaks off."""
    global _sections, _waiting
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _sections += 1
    try:
        yield
    finally:
        _sections -= 1
        if not _sections and _waiting is not None:
            error, _waiting = _waiting, None
            raise error
