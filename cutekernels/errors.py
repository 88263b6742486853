"""The exceptions of this package.

::

    CuteKernelsError
    ├── UnsupportedProblem (ValueError)   these arguments pose a problem no kernel solves
    ├── InvalidConfig (ValueError)        this configuration breaks a rule of the op's ``why_not``
    ├── UnknownGpu (LookupError)          no such GPU in the table, or none in the machine
    ├── CompileError                      the DSL, ptxas or the compiling child process failed
    │   ├── CacheUnusable                 the kernel cache cannot be used or written: no verdict on a config
    │   └── CompilerKilled                the compiler is missing, starved or killed: no verdict on a config
    ├── WrongResult                       a kernel's output disagrees with its reference
    ├── JobError (ValueError)             a tuning job file breaks a rule
    └── StoreError                        the tuned-config database cannot be read or written
        └── StoreUnreachable              its server went away or does not answer: a later try may succeed

A message states the rule, the value that broke it, and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class CuteKernelsError(Exception):
    """Base of every error this package raises on purpose."""


class UnsupportedProblem(CuteKernelsError, ValueError):
    """The arguments of an op pose a problem that no kernel solves."""


class InvalidConfig(CuteKernelsError, ValueError):
    """A configuration breaks a rule stated in its op's ``why_not``."""


class UnknownGpu(CuteKernelsError, LookupError):
    """A GPU name that is not in the table, or ``auto`` on a machine without a GPU."""


class CompileError(CuteKernelsError):
    """A kernel did not compile: the DSL, ptxas, or the compiling child process failed."""


class CacheUnusable(CompileError):
    """The kernel cache or the temporary folder is full, not writable or not this user's own."""


class CompilerKilled(CompileError):
    """The compiler is missing, ran out of memory, or was killed from outside. The same compile may succeed later."""


class WrongResult(CuteKernelsError):
    """A kernel's output disagrees with its reference by more than the tolerance."""


class JobError(CuteKernelsError, ValueError):
    """A tuning job file breaks a rule."""


class StoreError(CuteKernelsError):
    """The tuned-config database cannot be read or written."""


class StoreUnreachable(StoreError):
    """The database's server went away or does not answer. The same command may succeed later."""


def near(name: str, known: Iterable[str]) -> str:
    """``"Did you mean 'gemm'? "``, or nothing where no known name is close."""
    lower = {word.lower(): word for word in sorted(set(known), reverse=True)}
    found = get_close_matches(name[:100].lower(), lower, n=1, cutoff=0.6)
    return f"Did you mean {lower[found[0]]!r}? " if found else ""
