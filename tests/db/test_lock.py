"""Locks: winners frozen in a file with a hash, which calls read in place of a database, and ranks compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cutekernels
from cutekernels import cli, dispatch, gpu, lock
from cutekernels.db.storage import lock as files
from cutekernels.db.storage import snapshot
from cutekernels.db.storage.store import Rate, Store
from cutekernels.errors import StoreError, UnknownGpu
from cutekernels.ops import registry
from tests.command_line import invoke
from tests.db.trials import trial

ROW = ["winner", "h200", "gemm", 12, "m=16 n=4096 k=4096", "tile_m=64", "measured", 11.25, None, ""]


@pytest.fixture
def frozen(tmp_path: Path) -> Path:
    lock.write(str(tmp_path / "winners.lock"), ["h200", "l40s"])
    return tmp_path / "winners.lock"


def named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTEKERNELS_DB", str(path))
    cutekernels.reload()


def test_calls_choose_as_they_did_and_read_nothing_else(frozen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, sibling = snapshot.load("h200"), snapshot.load(gpu.SIBLINGS["h200"])
    named(frozen, monkeypatch)
    monkeypatch.setattr(snapshot, "shipped", lambda gpu: pytest.fail("shipped winners are in the lock"))
    after = snapshot.load("h200")
    assert after.table.keys() == before.table.keys() and after.rates == before.rates
    assert snapshot.load(gpu.SIBLINGS["h200"]).table.keys() == sibling.table.keys() != set()
    for key, table in before.table.items():
        assert {p: w._replace(source="lock") for p, w in table.items()} == dict(after.table[key])
    told = cutekernels.explain("gemm", "m=16 n=4096 k=4096", gpu="h200")
    assert told.choice.origin == "tuned" and "(lock)" in str(told)
    assert lock.digest() == after.digest == files.read(frozen).digest
    assert snapshot.load("a100").table == {}, "a GPU that was not frozen has no winner"


@pytest.mark.parametrize(
    ("gpus", "said"), [("h200", r"list of GPUs' names; got 'h200'"), (["h300"], "no GPU is called")]
)
def test_names_that_freeze_nothing_are_refused(gpus: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises((StoreError, UnknownGpu), match=said):
        lock.write(str(tmp_path / "w.lock"), gpus)
    assert not (tmp_path / "w.lock").exists()


@pytest.mark.parametrize(
    ("us", "ratio", "differ"), [(8.4109, 1.0366, 0), (8.4161, 1.0366, 1), (8.4109, 1.0376, 1)], ids=str
)
def test_a_comparison_is_of_the_digits_that_shipped_rows_have(
    us: float, ratio: float, differ: int, tmp_path: Path
) -> None:
    """0.2.0 shipped five digits, which its locks have; later versions ship four."""
    for name, made in (("one.lock", (8.411, 1.037)), ("other.lock", (us, ratio))):
        (tmp_path / name).write_text(files.text([(*ROW[:7], *made, "")]))
    assert len(lock.compare(str(tmp_path / "one.lock"), str(tmp_path / "other.lock"))) == differ


def test_equal_winners_have_equal_hashes(frozen: Path, tmp_path: Path) -> None:
    again = lock.write(str(tmp_path / "again.lock"), ["l40s", "h200"])
    assert again[0] == files.read(frozen).digest and frozen.read_bytes() == (tmp_path / "again.lock").read_bytes()


def whole(change: Callable[[list[str]], object]) -> Callable[[str], str]:
    """A change of a lock's rows under a right hash."""

    def made(text: str) -> str:
        rows = [json.loads(line) for line in text.splitlines()[1:]]
        change(rows)
        return files.text(map(tuple, rows))

    return made


BROKEN: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "truncated": lambda text: text[:-40],
    "truncated at a line": lambda text: "".join(text.splitlines(keepends=True)[:-1]),
    "one digit edited": lambda text: text[:-20] + ("1" if text[-20] != "1" else "2") + text[-19:],
    "a line more": lambda text: text + json.dumps(ROW) + "\n",
    "a line twice": lambda text: text + text.splitlines(keepends=True)[-1],
    "head alone": lambda text: text.splitlines(keepends=True)[0],
    "no head": lambda text: "".join(text.splitlines(keepends=True)[1:]),
    "a database": lambda text: "SQLite format 3\0" + "x" * 100,
    "of a later version": lambda text: text.replace('"cutekernels_lock": 1', '"cutekernels_lock": 2', 1),
    "another count": lambda text: text.replace('"rows": ', '"rows": 9', 1),
    "a number for a text": whole(lambda rows: rows.append(["winner", "h200", "gemm", 12, 5, *ROW[5:]])),
    "a number of no measurement": whole(lambda rows: rows.append([*ROW[:7], 10**400, *ROW[8:]])),
    "a ratio below 0": whole(lambda rows: rows.append([*ROW[:8], -1.0, *ROW[9:]])),
    "a row too short": whole(lambda rows: rows.append(ROW[:7])),
    "an unknown kind": whole(lambda rows: rows.append(["loser", *ROW[1:]])),
}


@pytest.mark.parametrize("broken", [None, *BROKEN.values()], ids=["missing", *BROKEN])
def test_one_that_is_not_whole_raises_in_one_sentence(
    broken: Callable[[str], str] | None, frozen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = frozen.read_text()
    frozen.unlink()
    if broken is not None:
        frozen.write_text(broken(text))
    named(frozen, monkeypatch)
    with pytest.raises(StoreError) as raised:
        dispatch.winners(gpu.lookup("h200"))
    words = str(raised.value)
    assert str(frozen) in words and "cutekernels lock" in words and "\n" not in words and len(words) < 400
    with pytest.raises(StoreError):
        lock.verify()


def test_nothing_writes_into_one(frozen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named(frozen, monkeypatch)
    for readonly in (False, True):
        with pytest.raises(StoreError, match="is a lock, which calls read and nothing writes; name a database"):
            Store(readonly=readonly)
    assert "is a lock" in invoke(cli.app, "db", "query").stderr


def test_the_command(frozen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = invoke(cli.app, "lock", "--gpu", "h200")
    assert made.exit_code == 0 and made.stdout.strip() == files.read(tmp_path / "winners.lock").digest
    assert {row[1] for row in files.read(tmp_path / "winners.lock").rows} >= {"h200", "h100-sxm"}, "what an H200 uses"
    assert invoke(cli.app, "lock", "--check").stdout == made.stdout
    db = tmp_path / "own.db"
    Store(db).close()
    same = invoke(cli.app, "lock", "--check", "--db", str(db))
    assert (same.exit_code, same.stdout) == (0, made.stdout)
    with Store(db) as store:
        one = trial("tile_m=128", problem="m=48 n=64 k=32", revision=registry.get("gemm").revision)
        store.record([one])
        store.crown(one.id)
        store.keep_rates([Rate(gpu="h200", name="copy_gbps", revision=1, value=4000.0, unit="GB/s")])
    other = invoke(cli.app, "lock", "--check", "--db", str(db))
    assert other.exit_code == 1 and f"differs from {db} in 2 rows" in " ".join(other.stderr.split())
    for part in ("only in the database", "m=48 n=64 k=32", "copy_gbps", "tile_m=128 measured 12.5"):
        assert part in " ".join(other.stdout.split())
    os.mkfifo("pipe.lock")
    assert invoke(cli.app, "lock", "--check", "--gpu", "h200").exit_code == 2
    for wrong, words in (
        (["w.txt"], "ends with .lock"),
        (["--check", "no.lock"], "No such file"),
        (["--check", "pipe.lock"], "is not a file"),
        (["--gpu", "x9"], "no GPU"),
    ):
        result = invoke(cli.app, "lock", *wrong)
        assert result.exit_code and words in str(result.exception)
    everything = invoke(cli.app, "lock", "all.lock")
    assert everything.exit_code == 0 and len(files.read(tmp_path / "all.lock").rows) > len(files.read(frozen).rows) / 2
    broken = invoke(cli.app, "lock", "bad.lock", "--db", str(frozen.with_suffix(".lock.db")))
    assert broken.exit_code == 1 and not (tmp_path / "bad.lock").exists()


def test_verify_needs_a_lock_that_was_not_changed_since_it_was_read(
    frozen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="names no lock: write one with `cutekernels lock`"):
        lock.verify()
    named(frozen, monkeypatch)
    dispatch.winners(gpu.lookup("h200"))
    assert lock.verify() == files.read(frozen).digest
    frozen.write_text(files.text([tuple(ROW)]))
    with pytest.raises(StoreError, match=r"changed after calls on h200 had read it.*call cutekernels.reload\(\)"):
        lock.verify()
    cutekernels.reload()
    assert lock.verify() == files.read(frozen).digest


RANK = """
import os, sys, torch.distributed as dist
import cutekernels
from cutekernels.errors import StoreError
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
for os.environ["CUTEKERNELS_DB"] in sys.argv[3:]:
    cutekernels.reload()
    try:
        print("right", cutekernels.lock.verify())
    except StoreError as error:
        print("wrong", str(error).replace("\\n", " "))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_compare_their_locks(frozen: Path, tmp_path: Path) -> None:
    """Two ranks agree on one lock, both raise where theirs differ or one is missing, and agree again afterwards."""
    drifted, missing = tmp_path / "drifted.lock", tmp_path / "missing.lock"
    drifted.write_text(files.text([tuple(ROW)]))
    digest = files.read(frozen).digest
    locks = {0: [frozen] * 4, 1: [frozen, drifted, missing, frozen]}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meet"), *map(str, paths)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, paths in locks.items()
    ]
    told = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    words = [
        f"right {digest}",
        f"wrong ranks read different winners: lock {digest[:12]} with cutekernels ",
        "wrong rank 1: lock",
        f"right {digest}",
    ]
    for lines in told:
        assert len(lines) == len(words) and all(map(str.startswith, lines, words)), told
