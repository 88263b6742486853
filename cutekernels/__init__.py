"""cutekernels: tuned GPU kernels for LLM operators, and the service that tunes them.

Importing this package loads nothing heavy. Its public names stand in ``__init__.pyi``; each is fetched at first use.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from cutekernels import lazy

if find_spec("cutekernels.db") is None:  # a checkout's folder, which lies beside those of db and autotune
    raise ImportError("this checkout is not installed: run `pip install -e .` in it, or start Python in another folder")

try:
    __version__ = version("cutekernels")
except PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0"

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
