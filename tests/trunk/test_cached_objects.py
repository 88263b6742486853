"""Things in the cache where an object should be: things that are no files, halves, what another process is writing."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cutekernels import compile as compiler
from cutekernels.errors import CacheUnusable, CompileError
from tests.trunk.test_compile import (
    CONFIG,
    FACTS,
    OP,
    PROBLEM,
    TextArtifact,
    _toy_backend,  # noqa: F401  a fixture
    builds,
    files,
    forget,
    get,
    only,
)
from tests.tuner.toys import H200


@pytest.fixture
def in_time() -> Iterator[None]:
    """Fails the test after ten seconds: what opens a FIFO may wait for ever."""

    def late(*args: Any) -> None:
        raise AssertionError("it waits for the other end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


def _full(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("not empty")


def _linked(path: Path) -> None:
    """A symbolic link to a whole file elsewhere, which others may write to."""
    path.with_suffix(".elsewhere").write_bytes(path.with_suffix(".before").read_bytes())
    path.symlink_to(path.with_suffix(".elsewhere"))


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a directory": lambda path: path.mkdir(),
    "a full directory": _full,
    "a socket": _socket,
    "a link to a file": _linked,
    "a link to nothing": lambda path: path.symlink_to(path.parent / "nothing"),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("suffix", ["text", "json"])
@pytest.mark.parametrize("put", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_is_no_file_is_built_again(
    put: Callable[[Path], object], suffix: str, in_time: None, caplog: pytest.LogCaptureFixture
) -> None:
    get()
    forget()
    path = only(f"*.{suffix}")
    path.rename(path.with_suffix(".before"))
    put(path)
    assert get().startswith("fresh")
    assert path.is_file() and not path.is_symlink()
    forget()
    assert get().startswith("loaded")
    assert builds() == 2
    assert all("is damaged" in message and "building it again" in message for message in caplog.messages)


@pytest.mark.parametrize("suffix", ["lock", "new"])
@pytest.mark.parametrize("put", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_is_no_lock_or_folder_is_removed(
    put: Callable[[Path], object], suffix: str, in_time: None, tmp_path: Path
) -> None:
    path = compiler.directory() / f"{compiler.cache_key(OP, PROBLEM, CONFIG, H200)}.{suffix}"
    path.with_suffix(".before").write_text("whole")
    put(path)
    assert get().startswith("fresh")
    assert not os.path.lexists(path)
    assert [f.suffix for f in files("*.[jt]*")] == [".json", ".text"]


def test_an_entry_that_another_process_is_replacing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its two files are renamed in turn. Between them their checksum differs, and nothing is wrong."""
    get()
    only("*.json").write_text("{}")  # so that it is replaced
    between, go_on = threading.Event(), threading.Event()
    real = compiler._replace

    def slowly(path: Path, write: Any) -> None:
        if path.suffix == ".json":
            between.set()
            assert go_on.wait(30)
        real(path, write)

    monkeypatch.setattr(compiler, "_replace", slowly)
    first = threading.Thread(target=compiler.prepare, args=(OP, PROBLEM, CONFIG, H200))
    first.start()
    assert between.wait(30)
    caplog.clear()
    found: list[Any] = []
    second = threading.Thread(target=lambda: found.append(compiler.prepare(OP, PROBLEM, CONFIG, H200)))
    second.start()
    second.join(0.3)
    assert second.is_alive() and not found
    go_on.set()
    first.join()
    second.join()
    assert found == [FACTS]
    assert builds() == 2
    assert caplog.messages == []


def test_an_object_of_another_process_that_does_not_load_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = compiler._hold_key

    @contextmanager
    def beaten(key: str) -> Iterator[None]:
        """Another process was first."""
        with real(key):
            with monkeypatch.context() as patch:
                patch.setattr(TextArtifact, "save", lambda self, path: path.write_text("another loader's format"))
                compiler._build(OP, PROBLEM, CONFIG, H200, key)
            yield

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_hold_key", beaten)
        assert get().startswith("fresh")
    (message,) = caplog.messages
    assert "does not load" in message
    forget()
    assert get().startswith("loaded")


@pytest.mark.parametrize("first", [True, False], ids=["built here", "built by another process meanwhile"])
def test_nothing_is_loaded_under_the_lock(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading may wait for a collective that runs, and that for a rank which waits for the lock."""
    key, free, real = compiler.cache_key(OP, PROBLEM, CONFIG, H200), [], compiler._hold_key

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            held = compiler._flock(compiler.directory() / f"{key}.lock", wait=False)
            free.append(held is not None)
            if held is not None:
                os.close(held)
            return method(*args)

        return call

    @contextmanager
    def beaten(key: str) -> Iterator[None]:
        with real(key):
            if not compiler.ready(key):
                compiler._build(OP, PROBLEM, CONFIG, H200, key)
            yield

    monkeypatch.setattr(TextArtifact, "kernel", watched(TextArtifact.kernel))
    monkeypatch.setattr(TextArtifact, "load", watched(TextArtifact.load))
    if not first:
        monkeypatch.setattr(compiler, "_hold_key", beaten)
    assert get().startswith("fresh" if first else "loaded")
    assert free == [True]
    assert builds() == 1


@pytest.mark.parametrize(
    "failure", [CompileError("no such loader"), ImportError("no such module"), FileNotFoundError("it has just gone")]
)
def test_what_cannot_be_loaded_is_compiled(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    get()
    forget()

    def refuse(path: Path) -> Any:
        raise failure

    monkeypatch.setattr(TextArtifact, "load", refuse)
    assert get().startswith("fresh")
    assert str(failure) in caplog.text


def test_where_no_temporary_file_can_be_made_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: TextArtifact) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TextArtifact, "kernel", refuse)
    with pytest.raises(CacheUnusable, match="No space left on device; .*TMPDIR"):
        get()


def test_a_long_compile_within_a_call_names_warmup_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "_told", False)
    with caplog.at_level(logging.INFO, logger="cutekernels"):
        get()
        assert caplog.messages == [], "0.05 s are not long"
        monkeypatch.setattr(compiler, "_LONG_S", 0.01)
        compiler.prepare(OP, PROBLEM, CONFIG.replace(warps=4), H200)
        assert caplog.messages == [], "no call waits"
        for tile in (16, 64):
            get(config=CONFIG.replace(tile=tile))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "cutekernels.warmup([('toy', 'm=16 n=64'), ...])" in record.getMessage()
