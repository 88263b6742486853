"""How one DSL becomes an artifact: compiled without a GPU, saved as a file, loaded where a GPU is.

``cute.py`` and ``triton.py`` each provide an :class:`Artifact`; ``cutekernels.compile`` caches them and
knows neither DSL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Facts:
    """What the compiler says of a kernel before it ever ran: per thread, per thread, per block."""

    registers: int
    stack_bytes: int  # local memory: spills and run-time-indexed arrays
    smem_bytes: int


class Artifact(ABC):
    """A compiled kernel. ``backend`` names the class in the cache's index."""

    backend: ClassVar[str]
    facts: Facts

    @abstractmethod
    def save(self, path: Path) -> None:
        """Writes one file that :meth:`load` reads; the caller makes the write atomic."""

    @classmethod
    @abstractmethod
    def load(cls, path: Path) -> Callable[..., Any]:
        """The launchable kernel in ``path``. Raises CompileError for a damaged file."""

    @abstractmethod
    def kernel(self) -> Callable[..., Any]:
        """The launchable kernel, without going through a file."""
