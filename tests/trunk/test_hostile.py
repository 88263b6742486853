"""Hostile arguments and files, for every verb: one line on stderr, exit code 1 or 2, no traceback."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cutekernels import cli
from cutekernels.db.storage.store import Store
from tests.db.trials import trial

GEMM = trial()

DIGITS = "9" * 5000
HEX = hex(10**5000)
TASK = '[[tasks]]\nop = "gemm"\nproblems = ["m=16 n=64 k=64"]\n'
JOBS = {
    "trials of 5000 digits": f'name = "x"\ntrials = {DIGITS}\n{TASK}',
    "trials in hex": f'name = "x"\ntrials = {HEX}\n{TASK}',
    "budget in hex": f'name = "x"\nbudget_s = {HEX}\n{TASK}',
    "unknown key in hex": f'name = "x"\nfoo = {HEX}\n{TASK}',
    "extent in hex": f'name = "x"\n[[tasks]]\nop = "gemm"\n[tasks.grid]\nm = [{HEX}]\nn = 64\nk = 64\n',
    "extent of 5000 digits": f'name = "x"\n[[tasks]]\nop = "gemm"\nproblems = ["m={DIGITS} n=64 k=64"]\n',
    "nested lists": f"a = {'[' * 5000}{']' * 5000}",
    "nested tables": f"[{'.'.join('a' * 3000)}]\n",
    "nested inline tables": f"a = {'{a = ' * 3000}1{'}' * 3000}",
    "no UTF-8": "\udcff",
}
LINES = {
    "nested lists": "[" * 60000,
    "nested objects": '{"a":' * 3000 + "1" + "}" * 3000,
    "5000 digits": f'{{"median_us": {DIGITS}}}',
    "zeros": "\0\0\0",
}


class Said:
    """Exit code and stderr of one call."""

    def __init__(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["cutekernels", *words])
        try:
            cli.main()
            self.code: object = 0
        except SystemExit as raised:
            self.code = raised.code
        self.err = capfd.readouterr().err

    def is_one_line(self, code: int) -> bool:
        return self.code == code and len(self.err.splitlines()) == 1 and len(self.err) < 12_000


@pytest.fixture
def loop(tmp_path: Path) -> str:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return str(tmp_path / "loop")


@pytest.mark.parametrize("what", JOBS)
def test_job_files(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOBS[what], errors="surrogateescape")
    said = Said(capfd, monkeypatch, "tune", str(job), "--gpu", "h200", "--db", str(tmp_path / "t.db"))
    assert said.is_one_line(2), said.err[-2000:]
    assert not (tmp_path / "t.db").exists()


@pytest.mark.parametrize("what", ["loop", "folder", "long", "zero"])
def test_job_paths(
    what: str, loop: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"loop": loop, "folder": str(tmp_path), "long": "x" * 5000, "zero": "a\0b"}[what]
    said = Said(capfd, monkeypatch, "tune", job, "--gpu", "h200")
    assert said.is_one_line(2), said.err[-2000:]


@pytest.mark.parametrize("option", ["--trials", "--jobs", "--limit", "--budget-s"])
@pytest.mark.parametrize("value", [DIGITS, "nan", "99999999999999", "-1", ""])
def test_numbers_of_tune(
    option: str, value: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (option, value) == ("--limit", "99999999999999"):
        pytest.skip("as many as there are")
    job = tmp_path / "job.toml"
    job.write_text(f'name = "x"\n{TASK}')
    said = Said(capfd, monkeypatch, "tune", str(job), "--gpu", "h200", "--db", str(tmp_path / "t.db"), option, value)
    assert said.code == 2 and "Traceback" not in said.err


@pytest.mark.parametrize(
    "text", [f"m={DIGITS}", "=" * 5000, "m=\udced", "m=1_0", "m=-1", "m=1e9", "m=٣", "m=" + "9" * 20]
)
@pytest.mark.parametrize("verb", [("explain", "gemm", "--gpu=h200"), ("db", "show"), ("db", "query", "--problem")])
def test_problems(
    verb: tuple[str, ...], text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said(capfd, monkeypatch, *verb, text)
    assert said.is_one_line(2), said.err[-2000:]


@pytest.mark.parametrize("verb", ["query", "history", "stats", "requests", "export", "doctor"])
@pytest.mark.parametrize(
    "db", ["loop", "folder", "below", "x" * 5000, "foo://x", "mysql://a/b", f"postgresql://h:{DIGITS}/x", "a\0b"]
)
def test_databases(
    verb: str, db: str, loop: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"loop": loop, "folder": str(tmp_path), "below": f"{loop}/t.db"}.get(db, db)
    said = Said(capfd, monkeypatch, "db", verb, "--db", place)
    assert said.is_one_line(1), said.err[-2000:]


@pytest.mark.parametrize("verb", ["import", "merge"])
@pytest.mark.parametrize("what", [*LINES, "loop", "folder"])
def test_files_to_take_in(
    verb: str, what: str, loop: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(LINES.get(what, "") + "\n")
    place = {"loop": loop, "folder": str(tmp_path)}.get(what, str(file))
    said = Said(capfd, monkeypatch, "db", verb, place, "--db", str(tmp_path / "t.db"))
    assert said.is_one_line(1), said.err[-2000:]


@pytest.mark.parametrize("days", [DIGITS, "999999999"])
def test_days_to_prune(days: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(capfd, monkeypatch, "db", "prune", "--days", days)
    assert said.code == 2 and "Traceback" not in said.err


@pytest.fixture
def db(tmp_path: Path) -> str:
    with Store(tmp_path / "t.db") as store:
        store.record([GEMM])
        store.crown(GEMM.id)
    return str(tmp_path / "t.db")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_export_to_a_full_device_fails_and_leaves_it_a_device(
    db: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "device"
    device.symlink_to("/dev/full")  # a link, lest an export that renames over its target hits the machine's own
    said = Said(capfd, monkeypatch, "db", "export", str(device), "--db", db)
    assert said.is_one_line(1) and "No space left" in said.err
    assert device.is_char_device()


def test_a_file_that_cannot_be_written_is_named_without_the_databases_remedy(
    db: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said(capfd, monkeypatch, "db", "export", str(tmp_path / "no" / "file"), "--db", db)
    assert said.is_one_line(1)
    assert f"'{tmp_path / 'no' / 'file'}': No such file or directory; name another file" in said.err.replace("\n", "")


def test_export_follows_links(
    db: str, loop: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    assert Said(capfd, monkeypatch, "db", "export", str(link), "--db", db).code == 0
    assert link.is_symlink() and "gemm" in target.read_text()
    said = Said(capfd, monkeypatch, "db", "export", loop, "--db", db)
    assert said.is_one_line(1) and Path(loop).is_symlink()
