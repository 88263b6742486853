"""UUID version 7 (RFC 9562): 48 bits of Unix milliseconds, then 74 random bits.

The standard library has none before Python 3.14. Within a process, each id is greater than the one before, even
when several fall into one millisecond or the clock steps back; after a fork the child starts afresh, so that it
does not continue its parent's sequence.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
import uuid

_RANDOM_BITS = 74
_STEP_BITS = 32  # within one millisecond ids grow by a random step, so that a neighbour cannot be guessed


class _Sequence:
    """The last id given out, and the lock around it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.millis = 0
        self.tail = 0

    def next(self) -> tuple[int, int]:
        with self.lock:
            now = time.time_ns() // 1_000_000
            if now > self.millis:
                self.millis, self.tail = now, secrets.randbits(_RANDOM_BITS)
            else:
                self.tail += 1 + secrets.randbits(_STEP_BITS)
                if self.tail >> _RANDOM_BITS:
                    self.millis, self.tail = self.millis + 1, secrets.randbits(_RANDOM_BITS)
            return self.millis, self.tail


_sequence = _Sequence()


def _start_afresh() -> None:
    global _sequence
    _sequence = _Sequence()


os.register_at_fork(after_in_child=_start_afresh)


_HEX = "[0-9a-f]"
UUID7 = f"{_HEX * 8}-{_HEX * 4}-7{_HEX * 3}-[89ab]{_HEX * 3}-{_HEX * 12}"  # for regular expressions and SQL's GLOB
_WRITTEN = re.compile(UUID7)


def uuid7() -> str:
    """A new id: ``"019ab3c1-....-7...-....-............"``, greater than any this process made before."""
    millis, tail = _sequence.next()
    head, low = tail >> 62, tail & ((1 << 62) - 1)
    return str(uuid.UUID(int=(millis & ((1 << 48) - 1)) << 80 | 0x7 << 76 | head << 64 | 0b10 << 62 | low))


def is_uuid7(text: str) -> bool:
    """Whether ``text`` is a version 7 UUID as :func:`uuid7` writes it."""
    return _WRITTEN.fullmatch(text) is not None
