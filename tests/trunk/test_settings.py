"""The three environment variables: defaults, values, refusals."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cutekernels import settings


def test_defaults_lie_in_the_xdg_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (settings.DB_VARIABLE, settings.CACHE_VARIABLE, settings.LOG_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = settings.load()
    assert loaded.database_path == tmp_path / "data" / "cutekernels" / "tuned.db"
    assert loaded.cache_dir == tmp_path / "cache" / "cutekernels"
    assert loaded.log_level == logging.WARNING


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
    assert settings.load().log_level == level


def test_an_unknown_log_level_says_which_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.LOG_VARIABLE, "loud")
    with pytest.raises(ValueError, match="CUTEKERNELS_LOG must be one of debug, info, warning, error; it is 'loud'"):
        settings.load()


def test_the_package_logger_takes_its_level_from_the_environment() -> None:
    code = "from cutekernels import settings; print(settings.logger('x').getEffectiveLevel())"
    env = {"CUTEKERNELS_LOG": "debug", "PATH": "", "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) == logging.DEBUG


def test_there_is_no_fourth_variable() -> None:
    root = Path(__file__).parents[2]
    for folder in ("cutekernels", "autotune", "db", "bench"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text()
            named = set(re.findall(r"CUTEKERNELS_[A-Z]+", text))
            assert named <= {"CUTEKERNELS_DB", "CUTEKERNELS_CACHE", "CUTEKERNELS_LOG"}, f"{path}: {named}"
            reads = re.search(r"(getenv|environ\.get|environ)[(\[]\W*(settings|CUTEKERNELS|DB_V|CACHE_V|LOG_V)", text)
            assert not reads or path.name == "settings.py", f"{path} reads it; settings.load() does"
