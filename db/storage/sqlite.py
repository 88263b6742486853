"""Handling of SQLite files. Standard library only, because a dispatcher's snapshot uses it.

Five problems are handled. Some SQLite versions can lose a write in WAL mode. A file can be damaged. Locks do not work
on network filesystems. Even a read-only connection creates files beside a database in WAL mode. A child that is forked
while a connection is open inherits SQLite's own record of the locks, and is locked out for good.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cutekernels.errors import StoreError

BUSY_TIMEOUT_S = 30.0

READ_LIMIT_S = 120.0  # of one read-only connection, which stays open for one transaction

SUFFIXES = ("-journal", "-wal", "-shm")
BESIDE = (*SUFFIXES, ".lock", ".leases", ".studies")  # with those that this package keeps

_MOST_VERDICTS = 100  # lines of a check, of which some are rows that break a rule
TIME_STEP_S = 0.03  # three times the coarsest kernel clock
_URL_PREFIX = "sqlite:///"
_MAGIC = b"SQLite format 3\x00"
_FORK_PATIENCE_S = 120.0
_STEPS_PER_LOOK = 100_000  # SQLite's virtual machine steps between two looks at the clock

# The WAL-reset bug: two connections checkpointing at once could drop committed pages. Fixed in 3.51.3 and carried
# back to these two branches.
_WAL_FIXED = (3, 51, 3)
_WAL_FIXED_BRANCHES = {(3, 50): 7, (3, 44): 6}

_NETWORK_FILESYSTEM = re.compile(
    r"(fuse\.)?(9p|afs|beegfs|ceph|ceph-fuse|cifs|davfs|gcsfuse|gfs2?|glusterfs|gpfs|juicefs|lustre|ncpfs|nfs4?|ocfs2"
    r"|orangefs|panfs|pvfs2|rclone|s3fs|smb[23]?|smbfs|sshfs|wekafs)"
)


def path_of(url: str) -> Path | None:
    """The file behind an SQLite URL; None for another database's URL. Raises StoreError for one without a file."""
    if url.startswith(_URL_PREFIX):
        text = url[len(_URL_PREFIX) :]
        if text not in ("", ":memory:"):
            # Where a link leads: SQLite keeps -wal and -journal beside the file itself.
            return Path(os.path.realpath(Path(text).expanduser()))
    if url.startswith("sqlite"):
        named = re.sub(r"(?<=://).*@", "***@", url)  # SQLCipher's URLs hold a password
        raise StoreError(f"an SQLite database is a file, {_URL_PREFIX}<path>; it is {named!r}. Give a path to a file")
    return None


def wal_is_safe(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> bool:
    """Whether this SQLite is free of the WAL-reset bug."""
    fixed_patch = _WAL_FIXED_BRANCHES.get(version[:2])
    return version >= _WAL_FIXED or (fixed_patch is not None and version[2] >= fixed_patch)


def network_filesystem(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The kind of network filesystem ``path`` lies on (``"nfs4"``, ...); None where it is local or unknown."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return None
    try:
        place, kind, best = path.resolve(), None, -1
    except RuntimeError as error:  # Python 3.11 and 3.12
        raise StoreError(f"{path} is a loop of symbolic links; name another file") from error
    for line in lines:
        words = line.split()
        if len(words) < 3:
            continue
        mount = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[1]))
        # A later mount hides an earlier one on the same point, hence >=.
        if place.is_relative_to(mount) and len(mount.parts) >= best:
            kind, best = words[2], len(mount.parts)
    return kind if kind is not None and _NETWORK_FILESYSTEM.fullmatch(kind) else None


class _OpenConnections:
    """The number of open connections: os.fork waits until other threads have closed theirs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # over a lock of its owner's: a collector may leave while it is held
        self._of_threads: Counter[int] = Counter()
        self._forking = False

    def enter(self, thread: int) -> None:
        """Wait for a fork, unless the thread has a connection already: it may connect again, or fork itself."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forking or self._of_threads[thread] > 0, _FORK_PATIENCE_S)
            self._of_threads[thread] += 1

    def leave(self, thread: int) -> None:
        with self._changed:
            self._of_threads[thread] -= 1
            self._changed.notify_all()

    def before_fork(self) -> None:
        self._changed.acquire()
        self._forking = True
        own = threading.get_ident()
        self._changed.wait_for(lambda: self._of_threads.total() <= self._of_threads[own], _FORK_PATIENCE_S)

    def after_fork(self) -> None:
        self._forking = False
        self._changed.notify_all()
        self._changed.release()


_connections = _OpenConnections()


def _forget_connections() -> None:
    global _connections
    _connections = _OpenConnections()


os.register_at_fork(
    before=lambda: _connections.before_fork(),
    after_in_parent=lambda: _connections.after_fork(),
    after_in_child=_forget_connections,
)


class Connection(sqlite3.Connection):
    """A connection that os.fork waits for, until it is closed.

    ``counted``: among which, and as which thread's. ``unlocked``: the file and its :func:`stamp` before it was
    opened, where reading takes no lock.
    """

    counted: tuple[_OpenConnections, int] | None = None
    unlocked: tuple[Path, tuple[int, ...]] | None = None

    def close(self) -> None:
        super().close()
        self._leave()

    def __del__(self) -> None:  # in any thread, where close() is for its own alone; sqlite3 lets go of the file
        self._leave()

    def _leave(self) -> None:
        (counted, thread), self.counted = self.counted or (None, 0), None
        if counted is _connections:  # not in a forked child, which counts its own
            counted.leave(thread)


def _connect(target: str | Path, **options: Any) -> Connection:
    counted, thread = _connections, threading.get_ident()
    counted.enter(thread)
    try:
        connection = sqlite3.connect(target, isolation_level=None, factory=Connection, **options)
    except BaseException:
        counted.leave(thread)
        raise
    connection.counted = counted, thread
    # A byte that is not UTF-8 becomes a character that no rule lets through: one broken row hides no other.
    connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    return connection


def connect(path: Path) -> Connection:
    """A connection for reading and writing whose transactions the caller begins. It makes no file."""
    connection = _connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=BUSY_TIMEOUT_S)
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def is_absent(path: Path) -> bool:
    """Whether nothing is at ``path``, not even a link. What is in a folder that may not be entered may be there."""
    try:
        os.lstat(path)
    except OSError as error:
        return isinstance(error, (FileNotFoundError, NotADirectoryError))
    return False


def is_database(path: Path) -> bool:
    """Whether the file begins as SQLite's files do. An empty one is a database without tables."""
    with path.open("rb") as file:
        header = file.read(len(_MAGIC))
    return header in (b"", _MAGIC)


def claim(path: Path) -> str:
    """Why no text may be written over or into the file: it is a database, or one of those beside one. Else ""."""
    owners = [Path(str(path).removesuffix(end)) for end in ("", *BESIDE) if str(path).endswith(end)]
    found = next((p for p in owners if p.is_file() and p.stat().st_size > 0 and is_database(p)), None)
    if found is None:
        return ""
    return "is an SQLite database" if found == path else f"belongs to the SQLite database {found}"


def in_wal_mode(path: Path) -> bool:
    """Whether the file's header says WAL."""
    with path.open("rb") as file:
        header = file.read(20)
    return header.startswith(_MAGIC) and header[18:20] == b"\x02\x02"


def needs_immutable(path: Path) -> bool:
    """Whether only ``immutable=1`` reads this file without creating ``-wal`` and ``-shm`` beside it.

    True for a file in WAL mode that no process has open: its ``-wal`` is absent or empty, all content is in the file
    itself. Immutable reading takes no lock; compare :func:`stamp` before and after to detect a writer.
    """
    wal = Path(f"{path}-wal")
    return in_wal_mode(path) and (not wal.exists() or wal.stat().st_size == 0)


def connect_readonly(path: Path, timeout_s: float, *, immutable: bool, limit_s: float | None = None) -> Connection:
    """A connection that cannot write, does not create the file, and is interrupted after :data:`READ_LIMIT_S`."""
    uri = f"{path.as_uri()}?mode=ro" + ("&immutable=1" if immutable else "")
    return _limit(_connect(uri, uri=True, timeout=timeout_s), READ_LIMIT_S if limit_s is None else limit_s)


def _limit(connection: Connection, limit_s: float) -> Connection:
    end = time.monotonic() + limit_s
    connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS_PER_LOOK)
    return connection


def may_lock(path: Path) -> bool:
    """Whether locks can be taken: this user may write to the file and beside it, and the disk is a local one."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK) and network_filesystem(path) is None


def connect_querying(path: Path, timeout_s: float) -> Connection:
    """A connection with SQLite's locks that refuses to write; files beside one in WAL mode go when it is closed."""
    connection = _limit(_connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=timeout_s), READ_LIMIT_S)
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA schema_version").fetchone()  # makes the files beside it
    except BaseException:
        connection.close()
        raise
    return connection


def is_half_written(error: BaseException) -> bool:
    """Whether reading failed because a killed writer's transaction has yet to be rolled back (:func:`roll_back`)."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_ROLLBACK


def roll_back(path: Path) -> None:
    """Roll back the transaction of a killed writer, as SQLite does at the first read that may write."""
    with closing(connect(path)) as connection:
        connection.execute("PRAGMA schema_version").fetchone()


def stamp(path: Path) -> tuple[int, ...]:
    """A value that changes when a database is written: inode, time and size of the file, and the size of its ``-wal``.

    File times advance in steps of up to 10 ms, and two writes within a step share one. For a file written just now
    this waits for the next step, so that a later write changes the stamp.
    """
    age_s = time.time() - path.stat().st_mtime
    if 0 <= age_s < TIME_STEP_S:
        time.sleep(TIME_STEP_S - age_s)
    wal = Path(f"{path}-wal")
    file = path.stat()
    return file.st_ino, file.st_mtime_ns, file.st_size, wal.stat().st_size if wal.exists() else 0


def damage(path: Path) -> str | None:
    """Damage of the file by SQLite's own quick check; None for an intact or an empty one.

    Raises:
        sqlite3.OperationalError: it cannot be checked: locked, unreadable, disk full.
    """
    try:
        with closing(connect(path)) as connection:
            connection.execute(
                "PRAGMA ignore_check_constraints = ON"
            )  # of rows that break a rule, which readers leave out
            found = [str(row[0]) for row in connection.execute(f"PRAGMA quick_check({_MOST_VERDICTS})")]
            verdict = [line for line in found if not line.startswith("NULL value in ")] or ["ok"]
    except UnicodeDecodeError as error:  # in what SQLite says of a damaged schema
        return f"its schema is damaged: {error}"
    except sqlite3.DatabaseError as error:
        if (error.sqlite_errorcode & 0xFF) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return str(error)
        raise
    return None if verdict == ["ok"] else "; ".join(verdict)


def set_aside(path: Path) -> Path:
    """Rename a damaged file, with its journal, to ``<path>.corrupt-<UTC time>``; nothing is deleted.

    The journal is renamed too: otherwise SQLite would replay it into the new file of that name.
    """
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = Path(f"{path}.corrupt-{moment}")
    for suffix in SUFFIXES:
        companion = Path(f"{path}{suffix}")
        if companion.exists():
            companion.rename(f"{aside}{suffix}")
    path.rename(aside)
    return aside


def set_journal_mode(connection: sqlite3.Connection, *, wal: bool) -> None:
    """Switch to WAL or to the rollback journal.

    A busy file keeps its rollback journal, which is always safe; a busy WAL file that should leave WAL raises.
    """
    wanted = "wal" if wal else "delete"
    if connection.execute("PRAGMA journal_mode").fetchone()[0] == wanted:
        return
    try:
        connection.execute(f"PRAGMA journal_mode = {wanted}")
    except sqlite3.OperationalError:
        if not wal:
            raise
