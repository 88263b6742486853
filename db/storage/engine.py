"""Opening a database: checked, migrated, and ready for transactions that hold under threads, processes and forks.

For writing, an SQLite file is prepared under the file lock ``<path>.lock``: refused on a network filesystem;
checked, and renamed where it is damaged; migrated; put into the journal mode that is safe with this SQLite
version. A PostgreSQL database is migrated under an advisory lock. For reading only, nothing is
created, migrated or repaired.

Each transaction opens its own connection and closes it (NullPool): a forked child finds none to share. A writing
transaction on SQLite begins with BEGIN IMMEDIATE, so that two writers queue instead of failing on lock upgrade.
"""

from __future__ import annotations

import errno
import lzma
import os
import sqlite3
import threading
import zlib
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateTable

from cutekernels import settings
from cutekernels.db.storage import lock, sqlite
from cutekernels.db.storage.migrations import HEAD
from cutekernels.errors import StoreError, StoreUnreachable
from cutekernels.interrupts import section

WRITING = "cutekernels_writing"  # execution option: this transaction will write

_LOCK_TIMEOUT_S = 120.0
_PATIENCE_S = (30, 120)  # PostgreSQL: for a lock that another session holds, and for a statement
_CONNECT_TIMEOUT_S = 10
AWAY_S = 120.0  # longest wait of a run for a server that went away
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)  # for files beside a database
_SECRETS = ("password", "passfile", "sslpassword")  # of a PostgreSQL URL's query
_SETS_ASIDE = "; `cutekernels db doctor --fix` sets a damaged file aside and begins a fresh one"
_MIGRATION_LOCK = 0x6375_7465  # PostgreSQL advisory lock: "cute"
_WRITERS_LOCK = 0x6375_7466
_AWAY = ("57P01", "57P02", "57P03", "53300", "08000", "08003", "08006")  # shut down, crashed, starting, full, cut off
_AWAY_FOR_NOW = ("starting up", "shutting down", "terminating connection", "recovery mode", "too many")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TABLES = {"gpu", "environment", "trial", "winner", "request", "rate", "alembic_version"}
_alembic_lock = threading.Lock()  # Alembic's context is one per process, whatever the database


def open_engine(
    url: str,
    *,
    readonly: bool = False,
    accepts: Collection[str] = (HEAD,),
    patience_s: tuple[int, int] = _PATIENCE_S,
) -> Engine:
    """An engine on the database at ``url``, with this package's schema, or for reading one that ``accepts`` names.

    ``patience_s``: how long PostgreSQL waits for a lock, and works on a statement.

    Raises:
        StoreError: unreachable, locked for too long, of a newer schema, not ours, or not writable here.
    """
    if lock.is_one(url):
        raise StoreError(
            f"{shown(url)} is a lock, which calls read and nothing writes; name a database with --db "
            "(`cutekernels lock --check LOCK --db URL` compares the two)"
        )
    path = sqlite.path_of(url)
    with translated(shown(url)):
        if path is None:
            engine = _postgres(url, patience_s)
            if not readonly:
                _upgrade(engine)
        elif readonly:
            if not path.is_file():
                if sqlite.is_absent(path):
                    raise StoreError(f"there is no database at {path}; `cutekernels tune` and `db import` create one")
                os.lstat(path)  # raises where the folder is closed; is_file() is False there from Python 3.14 on
                raise StoreError(f"an SQLite database is a file; {path} is not one: name another")
            engine = _sqlite(path, readonly=True)
        else:
            engine = _sqlite(path)
            _prepare(path, engine)
        if readonly:
            with engine.connect() as connection:
                if path is None and _version(connection) is None and not _strangers(connection):
                    return _no_rows()  # nobody has written yet; an empty file may be what is left of one
                _require_known(connection, accepts)
    return engine


def url_of(place: str | os.PathLike[str] | None) -> str:
    """The SQLAlchemy URL of a path or URL; None: of the settings' database. Raises StoreError for neither."""
    try:
        return settings.load().database_url if place is None else settings.database_url(os.fspath(place))
    except (TypeError, ValueError) as error:
        raise StoreError(f"a database is named by a path or a URL: {error}") from error


def shown(url: str) -> str:
    """``url`` without its secrets, for messages: those before the host, and those that libpq takes in the query."""
    try:
        parsed = make_url(url)
        secret = {name: "***" for name in parsed.query if name.lower() in _SECRETS}
        host = parsed.host.rpartition("@")[2] if parsed.host else None  # the end of a password with an @ of its own
        parsed = parsed.set(host=host).update_query_dict(secret)
        return parsed.render_as_string(hide_password=True).replace("=%2A%2A%2A", "=***")
    except (ArgumentError, ValueError):
        return url.partition("://")[0] + "://..."


@contextmanager
def translated(name: str) -> Iterator[None]:
    """Turn errors of SQLAlchemy, sqlite3 and the file system into a StoreError about database ``name``."""
    try:
        yield
    except UnicodeDecodeError as error:  # sqlite3 cannot even read out what SQLite has to say of a damaged schema
        raise StoreError(f"database {name}: its schema is damaged ({error}){_SETS_ASIDE}") from error
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        cause = str(getattr(error, "orig", None) or error).strip()
        first = next(iter(cause.splitlines()), type(error).__name__)
        kind = StoreUnreachable if is_away(error) else StoreError
        raise kind(f"database {name}: {first}{_remedy(first)}") from error


def is_away(error: BaseException | None) -> bool:
    """Whether an error is of a PostgreSQL server that ended a session or takes none, as while it restarts."""
    state = getattr(getattr(error, "orig", None), "sqlstate", "")
    if getattr(error, "connection_invalidated", False) or state in _AWAY:
        return True
    told = str(error)  # libpq's, without a state: it did not connect
    return state is None and ("FATAL" not in told or any(words in told for words in _AWAY_FOR_NOW))


@contextmanager
def file_errors(name: str) -> Iterator[None]:
    """Turn an error of reading or writing the file ``name``, which is no database, into a StoreError."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # the latter three: of a compressed file
        remedy = "free space on its disk" if getattr(error, "errno", None) in _FULL else "name another file"
        raise StoreError(f"{name!r}: {getattr(error, 'strerror', None) or error}; {remedy}") from error


def _remedy(cause: str) -> str:
    if "is not a database" in cause:
        return "; name another file"
    if "image is malformed" in cause or "malformed database schema" in cause:
        return _SETS_ASIDE
    if "interrupted" in cause:
        return f"; reading it took longer than {sqlite.READ_LIMIT_S:.0f} s"
    if "lock timeout" in cause:
        return "; another session of PostgreSQL holds its tables, try again when it is done"
    if "statement timeout" in cause:
        return f"; PostgreSQL took longer than {_PATIENCE_S[1]} s, or than its role may; try again when it is less busy"
    if any(words in cause for words in ("password authentication failed", "no password supplied", "empty password")):
        return "; write it into the URL, or into ~/.pgpass"
    if "does not exist" in cause and 'FATAL:  database "' in cause:
        return "; make it with createdb, or name another"
    if "is full" in cause or "No space" in cause or "disk I/O" in cause:
        return "; free space on its disk, or name another place with --db or CUTEKERNELS_DB"
    if "locked" in cause:
        return f"; another process has held it for {sqlite.BUSY_TIMEOUT_S:.0f} s, try again when it is done"
    if "permission denied for" in cause or "read-only transaction" in cause:
        return "; ask its owner for the right, or name another database with --db or CUTEKERNELS_DB"
    if "readonly" in cause or "Permission denied" in cause or "unable to open" in cause or "Read-only" in cause:
        return "; name a place that you may write with --db or CUTEKERNELS_DB"
    if "connection" in cause.lower() and "FATAL" not in cause:
        return "; is the server there, and are host and port right?"
    return ""


# ---- engines ------------------------------------------------------------------------------------------------


def postgres_url(url: str) -> URL:
    """``url`` with its driver. Raises StoreError for a URL that is none of PostgreSQL."""
    scheme, _, rest = url.partition("://")
    if scheme in ("postgres", "postgresql"):  # the URL names no driver: use psycopg
        url = f"postgresql+psycopg://{rest}"
    elif not scheme.startswith("postgresql+"):
        raise StoreError(f"a database is an SQLite file or PostgreSQL; {shown(url)!r} is neither")
    try:
        found = make_url(url)
        if "@" in (found.host or ""):
            raise ValueError("an @ in the host")
    except (ArgumentError, ValueError) as error:  # which may quote the password
        raise StoreError(
            f"not a database URL: {shown(url)}; one is postgresql://user:password@host:port/name, "
            "an @, / or : in the password written as %40, %2F or %3A"
        ) from error
    return found


def in_utf8(url: URL) -> URL:
    """``url`` of a client that reads UTF-8: of a database without an encoding, SQL_ASCII, it would read bytes."""
    return url if "client_encoding" in url.query else url.update_query_dict({"client_encoding": "utf8"})


def _postgres(url: str, patience_s: tuple[int, int] = _PATIENCE_S) -> Engine:
    try:
        given = {"connect_timeout": _CONNECT_TIMEOUT_S}
        engine = create_engine(in_utf8(postgres_url(url)), poolclass=NullPool, connect_args=given)
    except (ImportError, NoSuchModuleError) as error:
        raise StoreError(f"no driver for {shown(url)}: {error}; pip install 'psycopg[binary]>=3.2.1'") from error
    lock_s, statement_s = patience_s

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:  # for this transaction alone: a pooler may keep the session
        limits = {"lock_timeout": lock_s, "statement_timeout": statement_s}
        both = ", ".join(f"set_config('{name}', '{limit}s', true)" for name, limit in limits.items())
        connection.exec_driver_sql(f"SELECT {both}")

    return engine


# Triggers of our tables, and views in their places: type, name, table and nothing, as SQLite's schema tells them.
_STRANGE_IN_POSTGRES = """
    SELECT 'trigger', t.tgname, c.relname, '' FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
    WHERE NOT t.tgisinternal AND c.relname = ANY(:tables) AND pg_table_is_visible(c.oid)
    UNION ALL SELECT 'view', c.relname, c.relname, '' FROM pg_class c
    WHERE c.relkind IN ('v', 'm') AND c.relname = ANY(:tables) AND pg_table_is_visible(c.oid)
"""


@contextmanager
def making_schema(url: str, schema: str) -> Iterator[None]:
    """For making tables in ``schema`` of a PostgreSQL database, one process at a time; makes the schema itself."""
    engine = _postgres(url)
    with section(), translated(shown(url)), engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": _MIGRATION_LOCK})
        if connection.scalar(text("SELECT to_regnamespace(:schema)"), {"schema": schema}) is None:
            connection.execute(text(f"CREATE SCHEMA {schema}"))  # only this needs a right on the whole database
        connection.commit()  # the lock is the session's, and stays
        yield


def session(url: str) -> Connection:
    """A connection to a PostgreSQL database that stays open, for locks of its session; each statement is its own."""
    return _postgres(url).execution_options(isolation_level="AUTOCOMMIT").connect()


def queue(connection: Connection, *, alone: bool) -> None:
    """Wait, on PostgreSQL, until no other writer is ``alone``, or until there is none. SQLite has one at a time."""
    if connection.dialect.name == "postgresql":
        kind = "" if alone else "_shared"
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock{kind}({_WRITERS_LOCK})")


def require_unchanged(connection: Connection) -> None:
    """After reading: raises StoreError where it took no lock and a writer came between."""
    path, before = getattr(connection.connection.dbapi_connection, "unlocked", None) or (None, None)
    if path is not None and sqlite.stamp(path) != before:
        raise StoreError(f"{path} was written to while it was read: repeat the command")


def _sqlite(path: Path, *, readonly: bool = False) -> Engine:
    def connect_readonly() -> sqlite.Connection:
        if not sqlite.needs_immutable(path):
            return sqlite.connect_readonly(path, sqlite.BUSY_TIMEOUT_S, immutable=False)
        if sqlite.may_lock(path):
            try:
                return sqlite.connect_querying(path, sqlite.BUSY_TIMEOUT_S)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _NO_ROOM:
                    raise
        before = sqlite.stamp(path)
        connection = sqlite.connect_readonly(path, sqlite.BUSY_TIMEOUT_S, immutable=True)
        connection.unlocked = path, before
        return connection

    def connect() -> sqlite3.Connection:
        _require_present(path)
        if not readonly:
            return sqlite.connect(path)
        connection = connect_readonly()
        try:
            connection.execute("PRAGMA schema_version").fetchone()
        except BaseException as error:
            connection.close()
            if not sqlite.is_half_written(error):
                raise
            sqlite.roll_back(path)
            return connect_readonly()
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writing = connection.get_execution_options().get(WRITING, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")

    return engine


def _require_present(path: Path) -> None:
    if sqlite.is_absent(path):
        raise StoreError(f"{path} was deleted while in use: put it back, or repeat the command for a fresh one")


def _prepare(path: Path, engine: Engine) -> None:
    filesystem = sqlite.network_filesystem(path)
    if filesystem is not None:
        raise StoreError(
            f"{path} lies on a network filesystem ({filesystem}), where SQLite's locks cannot be trusted; "
            "name a local file or a PostgreSQL URL with --db or CUTEKERNELS_DB"
        )
    if os.path.lexists(path) and not path.is_file():
        raise StoreError(f"an SQLite database is a file; {path} is not one")
    if path.exists() and not sqlite.is_database(path):
        raise StoreError(f"{path} is not an SQLite database; name another file with --db or CUTEKERNELS_DB")
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o666))  # FileLock takes some failures for a held lock
    try:
        with FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S):
            trouble = sqlite.damage(path) if path.exists() else None
            if trouble is not None:
                aside = sqlite.set_aside(path)
                settings.logger("db").warning(
                    "the database %s is damaged (%s); it was renamed to %s and a fresh one begun. "
                    "`sqlite3 FILE .recover` may save its rows",
                    path,
                    trouble,
                    aside,
                )
            if not path.exists():  # no connection makes a file in the place of one that was deleted
                path.touch(0o644)
            try:
                _upgrade(engine)
                with closing(sqlite.connect(path)) as connection:
                    sqlite.set_journal_mode(connection, wal=sqlite.wal_is_safe())
            except Exception:
                _require_present(path)
                raise
    except Timeout as error:
        raise StoreError(
            f"{path}.lock has been held for {_LOCK_TIMEOUT_S:.0f} s: another process is opening the database"
        ) from error


# ---- the schema ---------------------------------------------------------------------------------------------


def _upgrade(engine: Engine) -> None:
    with engine.connect() as connection:
        _require_plain_tables(connection)
        if _version(connection) == HEAD:  # nearly always: no writer has to be waited for
            _require_all_tables(connection)
            return
    with engine.execution_options(**{WRITING: True}).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT set_config('statement_timeout', '0', true)"))  # it works on whole tables
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
        _migrate(connection)


def _migrate(connection: Connection) -> None:
    """Brings the schema to :data:`HEAD` within the connection's transaction; refuses what it does not know."""
    found = _version(connection)
    if found == HEAD:
        return _require_all_tables(connection)
    if found is None:
        if strangers := _strangers(connection):
            known = ", ".join(sorted(strangers)[:5])
            raise StoreError(f"{_name_of(connection)} holds tables that are not ours: {known}. Name another")
    elif found > HEAD:
        raise _newer(found)
    from alembic import command  # imported here: only the first opening and upgrades need it
    from alembic.util import CommandError

    try:
        with _alembic_lock:
            command.upgrade(alembic_config(connection), "head")
    except CommandError as error:
        raise StoreError(f"the database's schema {found!r} cannot be upgraded to {HEAD!r}: {error}") from error


def _strangers(connection: Connection) -> set[str]:
    """Tables beside which ours cannot be made: of their names, or in an SQLite file any."""
    found = set(inspect(connection).get_table_names()) - {"alembic_version"}
    return found if connection.dialect.name == "sqlite" else found & _TABLES


def _no_rows() -> Engine:
    """For reading a PostgreSQL database that has no tables yet: those of this schema in memory, empty."""
    from cutekernels.db.storage.models import Base

    engine = create_engine("sqlite://", poolclass=NullPool)
    tables = [str(CreateTable(table).compile(engine)) for table in Base.metadata.sorted_tables]
    version = f"CREATE TABLE alembic_version AS SELECT '{HEAD}' AS version_num"

    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _: object) -> None:
        connection.executescript(";".join([*tables, version]))

    return engine


def alembic_config(connection: Connection) -> Any:
    """Alembic's configuration for the packaged migrations on ``connection``; no ``alembic.ini`` involved."""
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(files("cutekernels.db.storage") / "migrations").replace("%", "%%"))
    return config


def _name_of(connection: Connection) -> str:
    """The database's file, or its name on a server."""
    if connection.dialect.name == "sqlite":
        return str(connection.exec_driver_sql("PRAGMA database_list").all()[0][2])
    return str(connection.engine.url.database)


def _require_known(connection: Connection, accepts: Collection[str]) -> None:
    _require_plain_tables(connection)
    found = _version(connection)
    if found is None:
        name = _name_of(connection)
        if connection.dialect.name == "sqlite" and not os.path.getsize(name):
            raise StoreError(
                f"{name} is empty: nothing was stored before a process died or the disk was full; "
                "`cutekernels db doctor --fix` makes its tables"
            )
        raise StoreError(f"{name} is not a tuned-config database: it has no schema revision. Name another")
    if found > HEAD:
        raise _newer(found)
    if found not in accepts:
        raise StoreError(
            f"the database has schema {found}, older than {HEAD}; `cutekernels db doctor --fix` upgrades it"
        )
    if found == HEAD:
        _require_all_tables(connection)


def _require_all_tables(connection: Connection) -> None:
    """Refuse a database of this schema without one of its tables, which somebody dropped."""
    missing = _TABLES - set(inspect(connection).get_table_names())
    if missing:
        raise StoreError(
            f"the database lacks tables of its schema {HEAD}: {', '.join(sorted(missing))}. Restore a copy of it, or "
            "move it away; the next `cutekernels tune` then begins a fresh one"
        )


def _require_plain_tables(connection: Connection) -> None:
    """Refuse a schema that runs somebody's code: triggers, and views or virtual tables in place of our tables."""
    query = text("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master")
    if connection.dialect.name == "postgresql":
        query = text(_STRANGE_IN_POSTGRES).bindparams(tables=[*_TABLES])
    for kind, name, table, sql in connection.execute(query):
        strange = table in _TABLES and (kind == "view" or sql.lstrip().upper().startswith("CREATE VIRTUAL"))
        if strange or kind == "trigger":
            what = kind if kind != "table" else "virtual table"
            raise StoreError(
                f"the database has a {what} called {name[:40]!r}, which is not ours and would run at each read "
                "or write; drop it if it is your own"
            )


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if found is None else str(found)


def _newer(found: str) -> StoreError:
    return StoreError(
        f"the database has schema {found[:40]!r}, newer than {HEAD!r}, the newest this cutekernels knows; "
        "upgrade cutekernels or name another database with --db or CUTEKERNELS_DB"
    )
