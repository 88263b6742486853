"""Artifact of a config without a kernel of its own, which launches other ops' plans or the vendor's call.

With it such a config is cached and tuned like those that have a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from cutekernels.backends import Artifact, Facts
from cutekernels.errors import CompileError

_CONTENT = "no kernel: the op's bind launches others\n"


class Chained(Artifact):
    """A placeholder: the op's ``bind`` never launches its ``kernel()``."""

    backend: ClassVar[str] = "chained"

    def __init__(self) -> None:
        self.facts = Facts(registers=0, stack_bytes=0, smem_bytes=0)

    def save(self, path: Path) -> None:
        path.write_text(_CONTENT)

    @classmethod
    def load(cls, path: Path) -> Callable[..., Any]:
        if path.read_text() != _CONTENT:
            raise CompileError(f"{path} is not the artifact of a config without a kernel")
        return _refuse

    def kernel(self) -> Callable[..., Any]:
        return _refuse


def _refuse(*args: Any) -> None:
    raise AssertionError("this config has no kernel of its own to launch")
