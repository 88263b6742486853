"""The four environment variables, read here and nowhere else.

``CUTEKERNELS_DB``
    Location of the tuned-config database: a path to an SQLite file or a SQLAlchemy URL
    (``postgresql+psycopg://...``). Default: ``tuned.db`` under the XDG data directory.
``CUTEKERNELS_CACHE``
    Directory of compiled kernels, created with mode 0700. Default: the XDG cache directory.
``CUTEKERNELS_LOG``
    Level of the ``cutekernels`` logger (``debug``, ``info``, ``warning``, ``error``). Default ``warning``.
``CUTEKERNELS_GPU_AS``
    A GPU that this machine's own stands in for (``a100``): its kernels keep to what that one has. Default: none.

A user without a home directory (no HOME, no passwd entry) has both in ``cutekernels-UID`` in the temporary directory.
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

APP = "cutekernels"
DB_VARIABLE = "CUTEKERNELS_DB"
CACHE_VARIABLE = "CUTEKERNELS_CACHE"
LOG_VARIABLE = "CUTEKERNELS_LOG"
GPU_AS_VARIABLE = "CUTEKERNELS_GPU_AS"

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of the environment variables, resolved once per :func:`load`."""

    database_url: str
    cache_dir: Path
    database_named: bool  # whether the environment names it; the default one need not exist

    @property
    def database_path(self) -> Path | None:
        """The SQLite file behind :attr:`database_url`, or None for another database."""
        prefix = "sqlite:///"
        if not self.database_url.startswith(prefix):
            return None
        return Path(os.path.realpath(self.database_url.removeprefix(prefix)))


def database_url(text: str) -> str:
    """A SQLAlchemy URL for ``text``, which is a URL already or a path to an SQLite file.

    Raises:
        ValueError: a home directory that is not there; what is no path for SQLite, of which a file would be made here.
    """
    if not text.strip() or "\0" in text or text == ":memory:" or text.startswith("file:"):
        raise ValueError(
            f"a database is a path to a file, or a URL such as postgresql://...; {text!r} is neither (SQLite's names "
            "of databases in memory, temporary ones and file: URIs are not taken): give a path, as ./tuned.db"
        )
    return text if "://" in text else f"sqlite:///{_absolute(text)}"


def load() -> Settings:
    """Read the locations from the environment."""
    database = os.environ.get(DB_VARIABLE) or str(_xdg("XDG_DATA_HOME", ".local/share") / "tuned.db")
    cache = os.environ.get(CACHE_VARIABLE) or str(_xdg("XDG_CACHE_HOME", ".cache"))
    return Settings(database_url(database), _absolute(cache), bool(os.environ.get(DB_VARIABLE)))


def log_level() -> int:
    """The level that the environment sets. Raises ValueError for an unknown one."""
    level = os.environ.get(LOG_VARIABLE, "warning").lower()
    if level not in _LEVELS:
        raise ValueError(f"{LOG_VARIABLE} must be one of {', '.join(_LEVELS)}; it is {level!r}")
    return _LEVELS[level]


def gpu_as() -> str | None:
    """The GPU that this machine's own stands in for; None: it is itself."""
    return os.environ.get(GPU_AS_VARIABLE) or None


def stand_in_as(name: str) -> None:
    """Let the GPU here stand in for another, in this process and in those that it starts from now on."""
    os.environ[GPU_AS_VARIABLE] = name


def _xdg(variable: str, below_home: str) -> Path:
    """Our directory in one of the XDG base directory specification, which ignores relative paths."""
    named = os.environ.get(variable, "")
    if os.path.isabs(named):
        return Path(named) / APP
    try:
        return Path.home() / below_home / APP
    except RuntimeError:  # its owner and mode are checked before anything in it is run, see own_directory
        return Path(tempfile.gettempdir()) / f"{APP}-{os.getuid()}"


def _absolute(text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{text!r} names a home directory, and there is none: {error}; give the whole path") from error


def logger(name: str) -> logging.Logger:
    """The package's logger for ``name``, at the level that the environment sets; a wrong one is warned of, once."""
    log = logging.getLogger(f"{APP}.{name}")
    root = logging.getLogger(APP)
    if root.level == logging.NOTSET:
        try:
            root.setLevel(log_level())
        except ValueError as error:
            root.setLevel(logging.WARNING)
            root.warning("%s; warning is used", error)
    return log
