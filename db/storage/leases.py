"""Leases: which process of those that share a database is at a task. A lease ends with its holder, however that ends.

Beside an SQLite file, whose processes are of one host, a lease is a lock on one byte of ``<database>.leases``; in
PostgreSQL it is an advisory lock of a session. Neither is a row: nothing has to be renewed, and none outlives a kill. A
host that vanishes from the network is noticed by the server's keepalives, within a minute. A server that restarts has
released all: holders come back and take theirs again, before anybody takes a new one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import threading
import time
from contextlib import suppress
from typing import Protocol

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from cutekernels import settings
from cutekernels.db.storage import engine, sqlite
from cutekernels.errors import StoreError, StoreUnreachable

SUFFIX = ".leases"
KEEP_S = 2.0  # between looks for a session that ended
HOLDERS_FIRST_S = 15.0  # after a server's restart, before a new lease: longer than its holder takes to come back
_KEEPALIVES = {"tcp_keepalives_idle": 20, "tcp_keepalives_interval": 10, "tcp_keepalives_count": 3}


class Leases(Protocol):
    """Leases of one process, shared by its threads."""

    def take(self, name: str) -> bool:
        """Whether ``name`` is this process's now, and stays so until it is released; False: somebody else's."""
        ...

    def release(self, name: str) -> None: ...

    def close(self) -> None:
        """Release all."""
        ...


def of(url: str) -> Leases:
    """The leases of the database at ``url``. Raises StoreError where they cannot be held there."""
    path = sqlite.path_of(url)
    return _Sessions(url) if path is None else _Bytes(f"{path}{SUFFIX}")


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 2


def lock_byte(file: int, kind: int, at: int, *, wait: bool = False) -> None:
    """Set or end a lock on one byte of an open file. It is the file's as it was opened here, not the process's.

    Raises:
        BlockingIOError, PermissionError: another has it, and ``wait`` is false.
    """
    fcntl.fcntl(
        file, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, at, 1, 0)
    )


class _Bytes:
    def __init__(self, path: str) -> None:
        with engine.file_errors(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def take(self, name: str) -> bool:
        try:
            lock_byte(self._file, fcntl.F_WRLCK, _number(name))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self, name: str) -> None:
        lock_byte(self._file, fcntl.F_UNLCK, _number(name))

    def close(self) -> None:
        os.close(self._file)


class _Sessions:
    """Locks of one session, which its connection's end releases; a thread notices that, and takes them again."""

    def __init__(self, url: str) -> None:
        self._url, self._name = url, engine.shown(url)
        self._mutex = threading.Lock()
        self._held: set[str] = set()
        self._since = -HOLDERS_FIRST_S  # when this session began in place of one that ended
        self._away_since: float | None = None
        self._closing = threading.Event()
        self._session: Connection | None = self._begin()
        threading.Thread(target=self._keep, name="cutekernels-leases", daemon=True).start()

    def _begin(self) -> Connection:
        with engine.translated(self._name):
            session = engine.session(self._url)
            for setting, value in _KEEPALIVES.items():
                session.execute(text(f"SET {setting} = {value}"))
        return session

    def take(self, name: str) -> bool:
        with self._mutex:
            if not self._alive() or time.monotonic() < self._since + HOLDERS_FIRST_S:
                return False
            taken = self._ask("pg_try_advisory_lock", name)
            if taken:
                self._held.add(name)
            return taken

    def release(self, name: str) -> None:
        with self._mutex, suppress(StoreUnreachable):  # which has released it
            self._held.discard(name)
            self._ask("pg_advisory_unlock", name)

    def _keep(self) -> None:
        while not self._closing.wait(KEEP_S):
            with self._mutex, suppress(StoreError):  # which the next taking raises
                if not self._closing.is_set():
                    self._alive()

    def _alive(self) -> bool:
        """Whether the session lives, or another one could begin in its place, which takes what it held.

        Raises:
            StoreUnreachable: none could for :data:`engine.AWAY_S`.
        """
        try:
            if self._session is not None:
                with engine.translated(self._name):
                    self._session.execute(text("SELECT 1"))
                return True
        except StoreUnreachable:
            self._end()
        try:
            self._session, self._since = self._begin(), time.monotonic()
            lost = [name for name in sorted(self._held) if not self._ask("pg_try_advisory_lock", name)]
        except StoreUnreachable:
            self._end()
            self._away_since = self._away_since or time.monotonic()
            if time.monotonic() - self._away_since > engine.AWAY_S:
                raise
            return False
        self._away_since = None
        if lost:
            told = "another run took %s while the server was away: both make its attempts"
            settings.logger("db").warning(told, ", ".join(lost))
        return True

    def _ask(self, function: str, name: str) -> bool:
        if self._session is None:
            return False
        with engine.translated(self._name):
            return bool(self._session.execute(text(f"SELECT {function}(:key)"), {"key": _number(name)}).scalar())

    def _end(self) -> None:
        if self._session is not None:
            with suppress(SQLAlchemyError):  # it ended already
                self._session.close()
            self._session.engine.dispose()
            self._session = None

    def close(self) -> None:
        self._closing.set()
        with self._mutex:
            self._end()
