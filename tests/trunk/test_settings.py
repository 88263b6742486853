"""The four environment variables: defaults, values, refusals."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

import cutekernels
from cutekernels import cli, lock, settings
from cutekernels.db.storage import snapshot
from cutekernels.db.storage.store import Store
from cutekernels.errors import StoreError
from tests.command_line import invoke
from tests.processes import python


def test_defaults_lie_in_the_xdg_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (settings.DB_VARIABLE, settings.CACHE_VARIABLE, settings.LOG_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = settings.load()
    assert loaded.database_path == tmp_path / "data" / "cutekernels" / "tuned.db"
    assert loaded.cache_dir == tmp_path / "cache" / "cutekernels"
    assert settings.log_level() == logging.WARNING


def test_a_path_becomes_an_absolute_sqlite_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(settings.DB_VARIABLE, "here/tuned.db")
    loaded = settings.load()
    assert loaded.database_url == f"sqlite:///{tmp_path}/here/tuned.db"
    assert loaded.database_path == tmp_path / "here" / "tuned.db"


def test_a_url_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql+psycopg://tuner@db.example/tuned"
    monkeypatch.setenv(settings.DB_VARIABLE, url)
    assert settings.load().database_url == url
    assert settings.load().database_path is None


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(settings.DB_VARIABLE, "~/t.db")
    monkeypatch.setenv(settings.CACHE_VARIABLE, "~/c")
    loaded = settings.load()
    assert loaded.database_path == tmp_path / "t.db"
    assert loaded.cache_dir == tmp_path / "c"


@pytest.mark.parametrize(
    ("text", "level"), [("debug", logging.DEBUG), ("INFO", logging.INFO), ("error", logging.ERROR)]
)
def test_log_levels(monkeypatch: pytest.MonkeyPatch, text: str, level: int) -> None:
    monkeypatch.setenv(settings.LOG_VARIABLE, text)
    assert settings.log_level() == level


def test_an_unknown_log_level_says_which_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.LOG_VARIABLE, "loud")
    with pytest.raises(ValueError, match="CUTEKERNELS_LOG must be one of debug, info, warning, error; it is 'loud'"):
        settings.log_level()


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """``code`` in a process of its own, whose environment is ``env`` alone."""
    return python(code, env={"PATH": "", **env})


def test_a_wrong_log_level_is_warned_of_and_stops_no_op(tmp_path: Path) -> None:
    code = (
        "import torch, cutekernels as ck; x = torch.randn(2, 64).bfloat16(); print(ck.rms_norm(x, x[0]).shape[1]);"
        "from cutekernels import compile, settings; settings.load()"
    )
    done = run(code, CUTEKERNELS_LOG="junk", HOME=str(tmp_path))
    assert done.stdout.strip() == "64"
    assert done.stderr.count("CUTEKERNELS_LOG must be one of debug, info, warning, error; it is 'junk'") == 1


NO_HOME = (
    "import os, pwd, tempfile; from cutekernels import settings; os.setuid(54321); tempfile.tempdir = '/nowhere'; "
)


def test_without_a_home_directory_both_lie_in_the_temporary_one() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become a user without a passwd entry")
    done = run(NO_HOME + "s = settings.load(); print(s.cache_dir, s.database_path)")
    assert done.stdout.split() == ["/nowhere/cutekernels-54321", "/nowhere/cutekernels-54321/tuned.db"]
    done = run(
        NO_HOME + "\ntry: settings.load()\nexcept ValueError as error: print(error)", CUTEKERNELS_CACHE="~/kernels"
    )
    assert "'~/kernels' names a home directory" in done.stdout and "give the whole path" in done.stdout


def test_a_home_directory_that_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*args: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (settings.DB_VARIABLE, settings.CACHE_VARIABLE, "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    place = Path(tempfile.gettempdir()) / f"cutekernels-{os.getuid()}"
    assert (settings.load().cache_dir, settings.load().database_path) == (place, place / "tuned.db")


def test_the_package_logger_takes_its_level_from_the_environment() -> None:
    code = "from cutekernels import settings; print(settings.logger('x').getEffectiveLevel())"
    env = {"CUTEKERNELS_LOG": "debug", "PATH": "", "HOME": "/nonexistent"}
    done = python(code, env=env)
    assert int(done.stdout) == logging.DEBUG


def test_there_is_no_fifth_variable() -> None:
    root = Path(__file__).parents[2]
    for folder in ("cutekernels", "autotune", "db", "bench"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text()
            named = set(re.findall(r"CUTEKERNELS_[A-Z_]+", text))
            assert named <= {f"CUTEKERNELS_{name}" for name in ("DB", "CACHE", "LOG", "GPU_AS")}, f"{path}: {named}"
            names = "settings|CUTEKERNELS|DB_V|CACHE_V|LOG_V|GPU_AS_V"
            reads = re.search(rf"(getenv|environ\.get|environ)[(\[]\W*({names})", text)
            assert not reads or path.name == "settings.py", f"{path} reads it; settings.load() does"


NO_FILES = (":memory:", "", " ", "\t", "file:tuned.db", "file::memory:?cache=shared")


@pytest.mark.parametrize("name", NO_FILES)
def test_sqlites_names_of_what_is_no_file_make_none(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files of such names were made, in the directory of the moment."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    rule = "a database is a path to a file, or a URL .*: give a path, as ./tuned.db"
    with pytest.raises(ValueError, match=rule):
        settings.database_url(name)
    calls: list[Any] = [
        lambda: cutekernels.db.open(name, shipped=False),
        lambda: Store(name),
        lambda: snapshot.load("h200", name, strict=True),
    ]
    if name.endswith(".db"):
        calls.append(lambda: lock.write(name.replace(".db", ".lock"), ["h200"]))
    for call in calls:
        with pytest.raises(StoreError, match=rule):
            call()
    for words in (
        ["db", "import", "none.jsonl", "--db", name],
        ["db", "merge", name],
        ["db", "merge", "a.db", "--db", name],
        ["db", "query", "--db", name],
        ["db", "doctor", "--fix", "--db", name],
        ["lock", "x.lock", "--gpu", "h200", "--db", name],
        ["tune", "qwen2.5-7b", "--gpu", "h200", "--db", name],
    ):
        done = invoke(cli.app, *words)
        told = done.stderr or str(done.exception)
        assert done.exit_code == 1 and re.search(rule, told), (words, told)
    assert not list(here.iterdir())
    if name.strip():
        monkeypatch.setenv("CUTEKERNELS_DB", name)
        with pytest.raises(ValueError, match=rule):
            settings.load()
