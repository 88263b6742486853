"""SQLite files: damage, killed writers, forks, read-only directories, journal modes."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest

from cutekernels.db.storage import engine, snapshot, sqlite
from cutekernels.db.storage.store import Store
from cutekernels.errors import StoreError
from tests.db.trials import trial
from tests.processes import python

pytestmark = pytest.mark.usefixtures("shipped")

HERE = Path(__file__).parents[2]
GARBAGE = b"not a database, but long enough to be looked at as if it were one " * 100


def child_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}


def run_child(code: str, *args: str) -> str:
    child = python(code, *args, check=False, env=child_environment())
    assert child.returncode == 0, child.stderr
    return child.stdout


# ---- damage -------------------------------------------------------------------------------------------------


def damage_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 : len(data)] = os.urandom(len(data) - 4096)
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:6000])


@pytest.mark.parametrize("how", [damage_pages, cut_short])
def test_a_damaged_file_is_set_aside_and_reported(
    how: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tuned.db"
    with Store(path) as store:
        store.record([trial(f"a={i}") for i in range(200)])
    assert callable(how)
    how(path)
    damaged = path.read_bytes()
    Path(f"{path}-journal").write_bytes(b"its journal")
    with pytest.raises(StoreError, match=r"tuned\.db"):
        Store(path, readonly=True).trials()  # only reading repairs nothing
    assert path.read_bytes() == damaged
    with Store(path) as store:
        assert store.trials() == []
        assert store.record([trial()]) == 1
    asides = sorted(p for p in tmp_path.iterdir() if ".corrupt-" in p.name)
    assert asides[0].read_bytes() == damaged
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert asides[0].name in caplog.text
    assert not Path(f"{path}-journal").exists()


def test_setting_aside_takes_the_journal_along(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    for suffix in ("", "-journal", "-wal", "-shm"):
        Path(f"{path}{suffix}").write_text(f"content{suffix}")
    aside = sqlite.set_aside(path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        f"{aside.name}{suffix}": f"content{suffix}" for suffix in ("", "-journal", "-wal", "-shm")
    }


def test_a_busy_database_is_not_taken_for_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(sqlite, "wal_is_safe", lambda: False)  # in WAL mode nobody can lock readers out
    path = tmp_path / "tuned.db"
    Store(path).record([trial()])
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=r"database is locked; another process has held it"):
            Store(path)
        other.execute("ROLLBACK")
    with Store(path) as store:
        assert len(store.trials()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tuned.db", "tuned.db.lock"]


def test_a_writer_waits_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.05)
    with Store(tmp_path / "tuned.db") as store, closing(sqlite3.connect(tmp_path / "tuned.db")) as other:
        other.isolation_level = None
        other.execute("BEGIN IMMEDIATE")
        assert store.trials() == []  # a writer does not stop readers
        with pytest.raises(StoreError, match="locked"):
            store.record([trial()])
        other.execute("COMMIT")
        assert store.record([trial()]) == 1


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "tuned?x=1%20#.db"
    path.parent.mkdir(parents=True)
    path.touch()
    with Store(path) as store:
        store.record([trial()])
    with Store(path, readonly=True) as store:
        assert len(store.trials()) == 1
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]


def test_a_directory_is_not_a_database(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is a file; .* is not one"):
        Store(tmp_path)


def test_an_empty_file_is_one_that_was_never_filled(tmp_path: Path) -> None:
    """As a process leaves it that was killed, or had a full disk, while it made the tables."""
    (path := tmp_path / "tuned.db").touch()
    with pytest.raises(StoreError, match=r"is empty: .*`cutekernels db doctor --fix` makes its tables"):
        Store(path, readonly=True)
    with Store(path) as store:
        assert store.winners() == []


def test_what_a_closed_folder_hides_is_not_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    assert sqlite.is_absent(tmp_path / "tuned.db") and sqlite.is_absent(file / "tuned.db")
    assert not sqlite.is_absent(file)

    def closed(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "lstat", closed)
    assert not sqlite.is_absent(tmp_path / "tuned.db")


# ---- killed and forked --------------------------------------------------------------------------------------

ENDLESS_WRITER = """
import sys
from tests.db.trials import trial
from cutekernels.db.storage.store import Store
with Store(sys.argv[1]) as store:
    print("ready", flush=True)
    for i in range(10**6):
        batch = [trial(f"batch={i}") for _ in range(40)]
        store.record(batch)
        store.crown(batch[0].id)
"""

HALF_WRITER = """
import os, signal, sys
from tests.db.trials import trial
from cutekernels.db.storage.store import Store
from cutekernels.db.storage.statements import add
with Store(sys.argv[1]) as store, store._writing() as session:
    session.connection().exec_driver_sql("PRAGMA cache_size = 5")  # pages go to the file before the commit
    add(session, [trial(message="x" * 1000) for _ in range(500)])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_minus_9_leaves_whole_transactions(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    for delay in (0.05, 0.33, 0.61):
        writer = subprocess.Popen(
            [sys.executable, "-c", ENDLESS_WRITER, str(path)],
            env=child_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(delay)
        writer.kill()
        writer.communicate()
        assert writer.returncode == -signal.SIGKILL
        with Store(path) as store:
            counts: dict[str, int] = {}
            for t in store.trials():
                counts[t.config] = counts.get(t.config, 0) + 1
            assert all(count % 40 == 0 for count in counts.values())
            assert len(store.winners()) == (1 if counts else 0) or len(counts) == 1
            assert store.record([trial("after=1") for _ in range(40)]) == 40
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert not [p for p in tmp_path.iterdir() if "corrupt" in p.name]


@pytest.mark.parametrize("readonly", [False, True])
def test_a_half_written_transaction_is_rolled_back(tmp_path: Path, readonly: bool) -> None:
    path = tmp_path / "tuned.db"
    with Store(path) as store:
        store.record([kept := trial()])
    size = path.stat().st_size
    child = subprocess.run([sys.executable, "-c", HALF_WRITER, str(path)], env=child_environment(), timeout=60)
    assert child.returncode == -signal.SIGKILL
    if not sqlite.wal_is_safe():
        assert path.stat().st_size > size  # half a transaction is in the file,
        assert Path(f"{path}-journal").stat().st_size > 0  # and how to undo it in the journal
    with Store(path, readonly=readonly) as store:
        assert store.trials() == [kept]


FORKER = """
import os, sys
from tests.db.trials import trial
from cutekernels.db.storage.store import Store
with Store(sys.argv[1]) as store:
    store.record([trial("before=1")])
    pids = []
    for child in range(3):
        pid = os.fork()
        if pid == 0:
            for i in range(10):
                assert store.record([trial(f"child={child} i={i}")]) == 1
            os._exit(0)
        pids.append(pid)
    for i in range(10):
        assert store.record([trial(f"parent={i}")]) == 1
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    print(len(store.trials()), sum("tuned.db" in os.readlink(link) for link in links if os.path.exists(link)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_store_is_used_on_in_forked_children(tmp_path: Path) -> None:
    # 1 + 3 * 10 + 10 trials, and no connection kept that a child could inherit
    assert run_child(FORKER, str(tmp_path / "tuned.db")) == "41 0\n"


# ---- places -------------------------------------------------------------------------------------------------

READONLY_READER = """
import os, sys
from cutekernels import db
from cutekernels.db.storage import snapshot
from cutekernels.db.storage.store import Store
from cutekernels.errors import StoreError
path = sys.argv[1]
Store(path).close()  # this and the next lines import what a stranger to root's home could not
snapshot.load("h200", path)
db.open(path).winners(gpu="h200")
del os.environ["CUTEKERNELS_DB"]
os.environ["XDG_DATA_HOME"] = os.path.dirname(path) + "/.."
os.mkdir(os.path.dirname(path) + "/../cutekernels", 0)
with Store(path, readonly=True) as store:
    store.winners()
os.chmod(os.path.dirname(path), 0o555)
if os.geteuid() == 0:
    os.setuid(65534)  # root may write anywhere
before = sorted(os.listdir(os.path.dirname(path)))
for writing in (path, os.path.dirname(path) + "/other.db"):
    try:
        Store(writing)
        print("opened")
    except StoreError as error:
        print("refused", "name a place that you may write" in str(error))
with Store(path, readonly=True) as store:
    print([t.config for t in store.winners()])
print([w.config for w in snapshot.load("h200", path).table["gemm", 1].values() if w.source == "database"])
print(sorted(os.listdir(os.path.dirname(path))) == before)
print(len(db.open().winners(gpu="h200", op="gemm")) > 9, "only shipped winners are found" in str(snapshot._said))
"""


def test_a_read_only_directory_can_be_read_from() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "inner" / "tuned.db"
        with Store(path) as store:
            store.record([t := trial("a=1")])
            store.crown(t.id)
        try:
            output = run_child(READONLY_READER, str(path)).splitlines()
        finally:
            path.parent.chmod(stat.S_IRWXU)
        assert output == ["refused True", "refused True", "['a=1']", "['a=1']", "True", "True True"]


MOUNTS = r"""
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/me/local tmpfs rw 0 0
//server/share /mnt/my\040share cifs rw 0 0
user@host: /mnt/ssh fuse.sshfs rw 0 0
store /scratch lustre rw 0 0
proc /work/cover ext4 rw 0 0
store /work/cover beegfs_nodev rw 0 0
store /work/cover beegfs rw 0 0
broken
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/tuned.db", None),
        ("/home/me/tuned.db", "nfs4"),
        ("/home", "nfs4"),
        ("/homework/tuned.db", None),
        ("/home/me/local/tuned.db", None),
        ("/mnt/my share/tuned.db", "cifs"),
        ("/mnt/ssh/tuned.db", "fuse.sshfs"),
        ("/scratch/a/b/c/tuned.db", "lustre"),
        ("/work/cover/tuned.db", "beegfs"),
    ],
)
def test_network_filesystems_are_recognized(path: str, kind: str | None, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert sqlite.network_filesystem(Path(path), mounts) == kind
    assert sqlite.network_filesystem(Path(path), tmp_path / "absent") is None


def test_network_filesystems_are_refused_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.db"
    with Store(path) as store:
        store.record([trial()])
    monkeypatch.setattr(sqlite, "network_filesystem", lambda path: "nfs4")
    with pytest.raises(StoreError, match=r"network filesystem \(nfs4\).*PostgreSQL URL"):
        Store(path)
    with Store(path, readonly=True) as store:
        assert len(store.trials()) == 1
        with pytest.raises(StoreError, match="readonly"):
            store.record([trial()])


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("sqlite://", "a file"),
        ("sqlite:///:memory:", "a file"),
        ("mysql://root@localhost/x", "is neither"),
        ("postgresql+nosuchdriver://localhost/x", "no driver"),
        ("postgresql://me:secret@localhost:port/x", "database URL"),
        ("postgresql://me:secret@127.0.0.1:1/x", "database postgresql"),
    ],
)
def test_addresses_that_lead_nowhere(address: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StoreError, match=reason) as caught:
        Store(address)
    assert "secret" not in str(caught.value)
    assert snapshot.load("h200", address).table == {}
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text


def test_messages_show_no_password(tmp_path: Path) -> None:
    assert engine.shown("postgresql://me:secret@host/x") == "postgresql://me:***@host/x"
    assert repr(Store(tmp_path / "x.db")) == f"Store('sqlite:///{tmp_path}/x.db')"


# ---- journal modes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        ((3, 40, 1), False),
        ((3, 44, 5), False),
        ((3, 44, 6), True),
        ((3, 45, 0), False),
        ((3, 50, 6), False),
        ((3, 50, 7), True),
        ((3, 51, 0), False),
        ((3, 51, 2), False),
        ((3, 51, 3), True),
        ((3, 52, 0), True),
        ((4, 0, 0), True),
    ],
)
def test_wal_only_where_it_is_free_of_the_reset_bug(version: tuple[int, int, int], safe: bool) -> None:
    assert sqlite.wal_is_safe(version) is safe


def journal_mode(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])


def test_the_journal_mode_follows_the_sqlite_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.db"
    for safe, mode in ((True, "wal"), (False, "delete"), (True, "wal")):
        monkeypatch.setattr(sqlite, "wal_is_safe", lambda safe=safe: safe)
        with Store(path) as store:
            assert store.record([trial()]) == 1
        assert journal_mode(path) == mode
    with Store(path, readonly=True) as store:
        assert len(store.trials()) == 3


def test_a_busy_file_leaves_wal_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.05)
    path = tmp_path / "tuned.db"
    monkeypatch.setattr(sqlite, "wal_is_safe", lambda: True)
    Store(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM trial").fetchall()
        monkeypatch.setattr(sqlite, "wal_is_safe", lambda: False)
        with pytest.raises(StoreError, match="locked"):
            Store(path)
        reader.execute("ROLLBACK")
    Store(path).close()
    assert journal_mode(path) == "delete"
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM trial").fetchall()
        monkeypatch.setattr(sqlite, "wal_is_safe", lambda: True)
        Store(path).close()  # the rollback journal is safe anywhere, so a busy file may keep it
        reader.execute("ROLLBACK")
    assert journal_mode(path) == "delete"


def test_the_lock_on_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    monkeypatch.setattr(engine, "_LOCK_TIMEOUT_S", 0.05)
    path = tmp_path / "tuned.db"
    with FileLock(f"{path}.lock"):
        with pytest.raises(StoreError, match="another process is opening"):
            Store(path)
        assert not path.exists()
    Store(path).close()


# ---- links, and reading without a lock ----------------------------------------------------------------------


def test_a_link_means_the_database_it_leads_to(tmp_path: Path) -> None:
    """A damaged one is set aside where it lies, and the link stays a link."""
    real, link = tmp_path / "real" / "tuned.db", tmp_path / "link.db"
    with Store(real) as store:
        store.record([trial(f"a={i}") for i in range(200)])
    link.symlink_to(real)
    damage_pages(real)
    with Store(link) as store:
        store.record([trial("b=1")])
    assert link.is_symlink()
    with Store(real, readonly=True) as store:
        assert [t.config for t in store.trials()] == ["b=1"]
    assert len(list(real.parent.glob("tuned.db.corrupt-*"))) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.db", "real"]


@pytest.fixture
def wal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database in WAL mode that nobody has open."""
    monkeypatch.setattr(sqlite, "wal_is_safe", lambda: True)
    with Store(tmp_path / "tuned.db") as store:
        store.record([trial("a=1")])
    assert sqlite.needs_immutable(tmp_path / "tuned.db")
    return tmp_path / "tuned.db"


def test_a_reader_has_one_view_while_others_write(wal: Path) -> None:
    with Store(wal, readonly=True) as reader, Store(wal) as writer:
        with reader._reading() as session:
            first = session.connection().exec_driver_sql("SELECT count(*) FROM trial").scalar()
            writer.record([trial("a=2")])
            assert session.connection().exec_driver_sql("SELECT count(*) FROM trial").scalar() == first == 1
            with pytest.raises(Exception, match="readonly"):
                session.connection().exec_driver_sql("DELETE FROM trial")
        assert len(reader.trials()) == 2
    assert [p.name for p in wal.parent.iterdir() if p.suffix != ".lock"] == ["tuned.db"]


def test_nothing_is_locked_on_a_network_filesystem(wal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sqlite.may_lock(wal)
    monkeypatch.setattr(sqlite, "network_filesystem", lambda path: "nfs4")
    assert not sqlite.may_lock(wal)


@pytest.mark.parametrize("full_disk", [False, True])
def test_a_reader_that_can_lock_nothing_says_when_a_writer_came_between(
    wal: Path, monkeypatch: pytest.MonkeyPatch, full_disk: bool
) -> None:
    def full(path: Path, timeout_s: float) -> sqlite.Connection:
        with closing(sqlite3.connect(":memory:")) as small:
            small.execute("PRAGMA max_page_count = 1")
            small.execute("CREATE TABLE a (b)")
        raise AssertionError("a disk that is not full")

    if full_disk:
        monkeypatch.setattr(sqlite, "connect_querying", full)
    else:
        monkeypatch.setattr(sqlite, "may_lock", lambda path: False)  # as in another user's folder
    with Store(wal, readonly=True) as reader, Store(wal) as writer:
        refused = pytest.raises(StoreError, match="was written to while it was read: repeat the command")
        with refused, reader._reading() as session:
            session.connection()
            writer.record([trial("a=2")])
        assert len(reader.trials()) == 2


def test_counting_what_a_prune_would_delete_writes_nothing(wal: Path) -> None:
    with Store(wal, readonly=True) as store:
        assert store.prune(stale={"gemm": (9,)}, count_only=True) == 1
    with Store(wal) as store:
        assert store.prune(stale={"gemm": (9,)}) == 1 and store.trials() == []


def test_a_place_for_no_lock_file_is_told_at_once() -> None:
    with pytest.raises(StoreError, match=r"/proc/x\.db"):
        Store("/proc/x.db")
