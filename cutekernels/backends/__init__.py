"""Backends: each DSL's kernels as artifacts, compiled without a GPU, saved as files, loaded where a GPU is.

``cute.py`` and ``triton.py`` each provide an :class:`Artifact`; ``cutekernels.compile`` caches them and
knows neither DSL.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cutekernels import settings
from cutekernels.errors import CacheUnusable


@dataclass(frozen=True, slots=True)
class Facts:
    """Resources of a compiled kernel: registers and stack per thread, shared memory per block."""

    registers: int
    stack_bytes: int  # local memory: spills and run-time-indexed arrays
    smem_bytes: int


def own_directory(path: Path) -> Path:
    """``path``, created 0700 if missing. It holds compiled objects, which are run, so it must be this user's alone.

    Raises:
        CacheUnusable: it cannot be used, belongs to another user, or others may write to it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise CacheUnusable(
            f"the kernel cache {path} cannot be used: {error}; set {settings.CACHE_VARIABLE}"
        ) from error
    if not is_own(status):
        raise CacheUnusable(
            f"the kernel cache {path} must be this user's own and closed to others (0700), since its objects "
            f"are run; it has owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):o}. "
            f"chmod it or set {settings.CACHE_VARIABLE}"
        )
    return path


def is_own(status: os.stat_result) -> bool:
    """Whether this user alone can write to the file: nobody else can have planted code in it."""
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """This process's environment variable ``name`` is ``value`` meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Artifact(ABC):
    """A compiled kernel. ``backend`` names the class in the cache's index."""

    backend: ClassVar[str]
    facts: Facts

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write one file that :meth:`load` reads; the caller makes the write atomic."""

    @classmethod
    @abstractmethod
    def load(cls, path: Path) -> Callable[..., Any]:
        """The launchable kernel in ``path``. Raises CompileError for a damaged file."""

    @abstractmethod
    def kernel(self) -> Callable[..., Any]:
        """The launchable kernel, on this machine's GPU."""
