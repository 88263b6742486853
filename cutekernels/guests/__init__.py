"""Guests: kernels that are not ours, tuned by the same search, workers and judge, kept in the same database.

Whoever owns the kernel describes it as an :class:`~cutekernels.op.Op` is described: a Problem (its axes), a Config (its
space), rules, a default, how to make inputs, a reference, the least work, and :meth:`Guest.call` in place of a build.
A function without arguments returns the description, and names it: ``module:function``, in job files, on the command
line and in rows. ``vllm.py`` and ``sglang.py`` hold ready ones; ``examples/fused_moe.py`` describes its own kernel.

No call of ours reads a guest's rows: ``cutekernels db export --format vllm|sglang`` writes the tables that their
loaders read (``tables.py``). A guest's module is imported where its user or a run of theirs named it, never because a
row or a job file from elsewhere does.
"""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import is_dataclass
from importlib import import_module
from traceback import extract_tb
from typing import Any, ClassVar

from cutekernels.backends import Artifact, Facts
from cutekernels.backends.chained import Chained
from cutekernels.errors import CompileError, InvalidConfig, UnsupportedProblem
from cutekernels.gpu import GpuSpec
from cutekernels.op import C, Config, Op, P, Problem

READY = "cutekernels.guests."  # beginning of the modules that a job file may name without its user's leave
MOST_NAMED = 128  # characters of a name, as in the database
MOST_REVISION = 2**31 - 1  # as in the database
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)

_loaded: dict[str, Guest[Any, Any]] = {}


class Guest(Op[P, C]):
    """A kernel that somebody else launches. ``revision`` counts changes of its description.

    ``distributions`` are the packages whose versions its rows depend on, beside the file of the description.
    """

    name: str  # type: ignore[misc]  # set by load(): the name by which it was asked for
    distributions: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def call(self, p: P, c: C, *tensors: Any) -> object:
        """Launches the kernel with config ``c`` on ``(*outputs, *sample)``; it must write every output.

        Legal in a CUDA graph's capture after a first call, which may compile.
        """

    def begin(self) -> None:
        """Imports and starts what :meth:`call` needs: in the measuring process, while a problem's inputs are made."""

    def compile(self, p: P, c: C, gpu: GpuSpec) -> Facts:
        """Compiles ahead into the kernel's own cache, in a process that sees no GPU; what the compiler says of it.

        Without this the first call compiles, in the measuring process, which has half a minute for it.
        """
        return Facts(registers=0, stack_bytes=0, smem_bytes=0)

    def estimate_us(self, p: P, c: C, gpu: GpuSpec) -> float:
        """The roofline for every config, so that the search begins anywhere; a model of the kernel does better."""
        return self.work(p).floor_us(gpu)

    def compiled_from(self, p: P) -> tuple[tuple[str, Any], ...]:
        """All of ``p``: Triton, for one, specializes on integers that are 1 or that 16 divides."""
        return tuple(vars(p).items())

    def build(self, p: P, c: C, gpu: GpuSpec) -> Artifact:
        return Chained(self.compile(p, c, gpu))

    def bind(self, p: P, c: C, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*tensors: Any) -> object:
            try:
                return self.call(p, c, *tensors)
            except Exception as error:
                if _refused(error):
                    raise CompileError(f"{self.name} with [{c}]: {error}") from error
                raise

        return launch


def _refused(error: Exception) -> bool:
    """Whether Triton refused the config: too much shared memory, an error of its compiler or of ptxas."""
    errors = sys.modules.get("triton.errors")
    return errors is not None and isinstance(error, errors.TritonError)


def is_guest(name: str) -> bool:
    """Whether an op's name is a guest's, ``module:function``."""
    return ":" in name


def load(name: str) -> Guest[Any, Any]:
    """The guest that ``module:function`` describes. Imports the module, so the name must come from the user.

    Raises:
        UnsupportedProblem: no such module or function, or it returns no :class:`Guest`.
    """
    if name not in _loaded:
        _loaded[name] = _described(name)
    return _loaded[name]


def _described(name: str) -> Guest[Any, Any]:
    if not _NAME.fullmatch(name) or len(name) > MOST_NAMED:
        raise UnsupportedProblem(
            f"a guest is named module:function, as {READY}vllm:fused_moe, in at most {MOST_NAMED} characters; "
            f"it is {name[:60]!r}"
        )
    module, _, function = name.partition(":")
    try:
        describe = getattr(import_module(module), function, None)
        guest = describe() if callable(describe) else describe
    except ImportError as error:
        raise UnsupportedProblem(
            f"the guest {name} cannot be imported: {error}; its module must be on Python's path (PYTHONPATH=.)"
        ) from error
    except (Exception, SystemExit) as error:  # of code that is not ours: a script ends where it is imported
        raise UnsupportedProblem(f"the guest {name} cannot be described: {_located(error)}") from error
    if not isinstance(guest, Guest):
        raise UnsupportedProblem(f"{name} must be a function that returns a Guest; it gave {type(guest).__name__}")
    for attribute in ("revision", "Problem", "Config"):
        if not hasattr(guest, attribute):
            raise UnsupportedProblem(f"the guest {name} has no {attribute}: {type(guest).__name__} must set it")
    _require_declared(guest, name)
    guest = copy(guest)  # one object may have two names
    guest.name = name
    return guest


def _require_declared(guest: Guest[Any, Any], name: str) -> None:
    """Refuse what a type checker would: the tuner reads these of the class before it calls any of its functions."""
    revision = guest.revision
    if type(revision) is not int or not 0 <= revision <= MOST_REVISION:
        raise UnsupportedProblem(
            f"{name}: revision is a whole number from 0 to {MOST_REVISION}; it is {revision!r:.60}"
        )
    for attribute, base in (("Problem", Problem), ("Config", Config)):
        found = getattr(guest, attribute)
        if not (isinstance(found, type) and issubclass(found, base) and is_dataclass(found)):
            raise UnsupportedProblem(
                f"{name}: {attribute} is a frozen dataclass that extends cutekernels.op.{attribute}; "
                f"it is {found!r:.60}"
            )


def fault(guest: Guest[Any, Any], p: Any, gpu: GpuSpec) -> str:
    """Why no search of a problem can begin: its default breaks a rule, or the description raises; else empty."""
    try:
        default = guest.check(p, guest.default(p, gpu), gpu)
        guest.estimate_us(p, default, gpu)
    except InvalidConfig as error:
        return f"its default config breaks a rule of its own: {error}"
    except Exception as error:  # noqa: BLE001  # of code that is not ours
        return f"its description raises {_located(error)}"
    return ""


def _located(error: BaseException) -> str:
    at = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {at.filename}:{at.lineno}: {error}"


def allowed(name: str, named: tuple[str, ...]) -> None:
    """Raises UnsupportedProblem for a guest that a job file names, unless it is a ready one or among ``named``."""
    if name not in named and not name.startswith(READY):
        raise UnsupportedProblem(f"{name} is a guest, whose module runs here: allow it with --guest {name}")
