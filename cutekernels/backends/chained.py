"""No kernel of its own: the artifact of a config that launches other ops' plans, one after the other.

It gives such a config a place in the cache and in the tuner, beside those that are kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from cutekernels.backends import Artifact, Facts
from cutekernels.errors import CompileError

_CONTENT = "no kernel: the op's bind launches other ops\n"


class Chained(Artifact):
    """Its ``kernel()`` is never launched: the op's ``bind`` leaves it alone."""

    backend: ClassVar[str] = "chained"

    def __init__(self) -> None:
        self.facts = Facts(registers=0, stack_bytes=0, smem_bytes=0)

    def save(self, path: Path) -> None:
        path.write_text(_CONTENT)

    @classmethod
    def load(cls, path: Path) -> Callable[..., Any]:
        if path.read_text() != _CONTENT:
            raise CompileError(f"{path} is not the artifact of a chain of ops")
        return _refuse

    def kernel(self) -> Callable[..., Any]:
        return _refuse


def _refuse(*args: Any) -> None:
    raise AssertionError("a chain of ops has no kernel of its own to launch")
