"""Standard streams that are closed, full or read by nobody: no traceback, the right exit code, nothing half done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cutekernels.db.questions import cli as db_cli
from tests.command_line import invoke
from tests.db.trials import trial
from tests.processes import python

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


@pytest.mark.parametrize("words", [["gpus"], ["bench", "rms_norm", "--dry-run"]])
def test_a_full_stdout_is_one_line(words: list[str]) -> None:
    module = [words[0]] if words[0] == "bench" else ["cutekernels", words[0]]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", *module, *words[1:]],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "No space left on device\n")


def call(*words: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cutekernels", *words], text=True, timeout=60, check=False, **streams)


def store_a_row_for(words: str) -> None:
    if words.startswith("db "):
        assert invoke(db_cli.app, "import", "-", input=trial().as_line()).exit_code == 0


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_a_closed_stream_gets_no_file_of_its_number(closed: tuple[int, ...]) -> None:
    program = f"""
import os, sys
for number in {closed}:
    os.close(number)
os.execv(sys.executable, [sys.executable, "-m", "cutekernels", "gpus"])
"""
    done = python(program, check=False)
    told = "stdout is closed, and there is something to write to it\n"
    assert (done.returncode, done.stderr) == {(1,): (1, told), (2,): (0, "")}.get(closed, (1, ""))
    assert ("h200" in done.stdout) == (1 not in closed)


@pytest.mark.parametrize("words", ["gpus --format json", "--help", "db stats"])
def test_what_cannot_be_written_to_a_closed_stdout_is_told(words: str) -> None:
    store_a_row_for(words)
    line = f'exec "{sys.executable}" -m cutekernels {words} >&-'
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "stdout is closed, and there is something to write to it\n")


def test_what_writes_nothing_to_a_closed_stdout_works() -> None:
    line = f'exec "{sys.executable}" -m cutekernels db import - >&-'
    done = subprocess.run(
        ["sh", "-c", line], input=trial().as_line(), stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and "1" in done.stderr


def test_a_file_opened_later_gets_no_text_meant_for_a_closed_stream(tmp_path: Path) -> None:
    program = """
import contextlib, os, sys
from cutekernels import cli
for number in range(3):
    os.close(number)
cli._fill_standard_streams()
opened = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
with contextlib.suppress(OSError):
    print("text for nobody", flush=True)
os.write(1, b"text of a child for nobody")
os.write(opened, str(opened > 2).encode())
"""
    python(program, str(tmp_path / "told"))
    assert (tmp_path / "told").read_text() == "True"


@pytest.mark.parametrize("words", ["gpus", "gpus --format json", "db export"])
def test_a_reader_that_left_ends_it_as_sigpipe_does(words: str) -> None:
    store_a_row_for(words)
    readable, writable = os.pipe()
    os.close(readable)
    with open(writable, "w") as unread:
        done = call(*words.split(), stdout=unread, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("reader", ["full", "gone"])
def test_an_error_that_cannot_be_told_keeps_its_exit_code(reader: str) -> None:
    if reader == "full":
        with open("/dev/full", "w") as full:
            assert call("explain", "nonsense", "m=1", "--gpu", "h200", stderr=full).returncode == 2
        return
    readable, writable = os.pipe()
    os.close(readable)
    try:
        assert call("explain", "nonsense", "m=1", "--gpu", "h200", stderr=writable).returncode == 2
    finally:
        os.close(writable)
