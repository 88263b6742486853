"""Leases: which process of those that share a database is at a task. A lease ends with its holder, however that ends.

Beside an SQLite file, whose processes are of one host, a lease is a lock on one byte of ``<database>.leases``; in
PostgreSQL it is an advisory lock of a session. Neither is a row: nothing has to be renewed, and none outlives a kill. A
host that vanishes from the network is noticed by the server's keepalives, within a minute.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import threading
from typing import Protocol

from sqlalchemy import Connection, text

from cutekernels.db import engine, sqlite

SUFFIX = ".leases"
_KEEPALIVES = {"tcp_keepalives_idle": 20, "tcp_keepalives_interval": 10, "tcp_keepalives_count": 3}


class Leases(Protocol):
    """Of one process; for many threads."""

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
    """Locks of one session, which its connection's end releases."""

    def __init__(self, url: str) -> None:
        self._name = engine.shown(url)
        self._mutex = threading.Lock()
        with engine.translated(self._name):
            self._session: Connection = engine.session(url)
            for setting, value in _KEEPALIVES.items():
                self._session.execute(text(f"SET {setting} = {value}"))

    def take(self, name: str) -> bool:
        return self._ask("pg_try_advisory_lock", name)

    def release(self, name: str) -> None:
        self._ask("pg_advisory_unlock", name)

    def _ask(self, function: str, name: str) -> bool:
        with self._mutex, engine.translated(self._name):
            return bool(self._session.execute(text(f"SELECT {function}(:key)"), {"key": _number(name)}).scalar())

    def close(self) -> None:
        with self._mutex:
            self._session.close()
            self._session.engine.dispose()
